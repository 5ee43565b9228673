"""Replicas in the executor: micro-batches take turns, and nobody can tell from the results."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from placement import importers, planners, workloads
from placement.capturing import capture
from placement.capturing.training import plain_step
from placement.executor import Executor, Runner, RunnerError, Trainer
from placement.problem import ProblemError
from placement.program import split_inputs
from placement.simulator import list_schedule, score
from placement.workloads import tiny
from tests.machine import THREE, problem_of, random_placement
from tests.modules import module_of

pytestmark = pytest.mark.usefixtures("nothing_left_running")


@pytest.mark.parametrize(
    "name", ["tiny_cnn", "tiny_branches", "tiny_views", "bert_tiny", "dlrm_tiny", "lstm_tiny"]
)
def test_random_phases_compute_what_the_module_computes(name):
    module, inputs = workloads.load(name)
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        expected = module(*args, **kwargs)
    graph = capture(module, inputs)
    for seed in range(2):
        priority = problem_of(graph).priority if seed else None  # runs of operators are fused
        with Runner(graph, THREE, random_placement(graph, seed, 3, 3), priority=priority) as runner:
            for _ in range(2):  # calls go on where those before have ended
                torch.testing.assert_close(runner(*args, **kwargs), expected)
            for outputs in runner.stream([inputs] * 7):
                torch.testing.assert_close(outputs, expected)


def test_every_micro_batch_has_its_own_values_in_order_and_few_are_in_flight():
    module, _ = tiny.tiny_mlp(batch=1)
    items = [torch.full((1, 16), float(i)) for i in range(20)]
    graph = capture(module, (items[0],))
    with torch.no_grad():
        expected = [module(x) for x in items]
    taken = []

    def source():
        for i, x in enumerate(items):
            taken.append(i)
            yield x

    replicas = np.repeat([[0], [1], [0], [2]], graph.num_ops, axis=1)
    with Runner(graph, THREE, replicas, max_in_flight=3) as runner:
        for i, y in enumerate(runner.stream(source(), workers=0)):
            torch.testing.assert_close(y, expected[i])
            # Three in flight, and those that wait for one before them: at most K for each.
            assert len(taken) <= i + 1 + 3 * 4
        with pytest.raises(ValueError, match="stop"):  # a consumer that leaves
            for _ in runner.stream(items, workers=0):
                raise ValueError("stop")
        torch.testing.assert_close(runner(items[5]), expected[5])


def test_an_error_names_the_device_of_its_phase():
    good, bad = torch.eye(3), torch.zeros(3, 3)
    graph = capture(module_of(lambda m, x, y: torch.linalg.inv(x) @ y), (good, good))
    replicas = np.repeat([[0], [1]], graph.num_ops, axis=1)
    for priority in (None, problem_of(graph).priority):
        with Runner(graph, THREE, replicas, priority=priority) as runner:
            with pytest.raises(torch.linalg.LinAlgError) as caught:
                for _ in runner.stream([(good, good), (bad, good), (good, good)], workers=0):
                    pass
            assert "raised on device 'cpu:1' in operator" in caught.value.__notes__[0]
            torch.testing.assert_close(runner(good, good), good)


def test_a_measured_timeline_says_where_each_phase_ran():
    module, inputs = tiny.tiny_branches()
    graph = capture(module, inputs)
    p = random_placement(graph, 5, 3, 3)
    problem = problem_of(graph, num_microbatches=8)
    timeline = Executor(problem).run(p)
    np.testing.assert_array_equal(timeline.placement, p)
    assert timeline.start_s.shape == (8, graph.num_ops)
    edges = graph.edges
    for b, on in enumerate(timeline.device_of):
        assert (timeline.end_s[b, edges[:, 0]] <= timeline.start_s[b, edges[:, 1]] + 1e-9).all()
        sent = timeline.transfers[timeline.transfers[:, 1] == b]
        for tensor, _, source, _ in sent.tolist():
            producer = graph.tensor_src[tensor]
            assert producer < 0 or on[producer] == source
    peak = timeline.peak_bytes
    assert peak is not None and (peak >= 0).all()
    # In a given order too, which must hold whole rounds of the phases.
    nine = replace(problem, num_microbatches=9)
    ordered = Executor(nine).run(p, list_schedule(nine, p, 9))
    assert ordered.start_s.shape == (9, graph.num_ops)
    with pytest.raises(RunnerError, match="a multiple of the 3 phases"):
        Executor(problem).run(p, list_schedule(problem, p, 8))


@pytest.mark.parametrize("own_loss", [False, True])
def test_replicas_train_as_plain_pytorch_does(own_loss):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    plain = copy.deepcopy(net)
    batches = [(torch.randn(3, 8), torch.randn(3, 4)) for _ in range(10)]
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    options = {"loss": nn.functional.mse_loss, "optimizer": optimizer}
    graph = capture(net, batches[0], mode="training", **options)
    p = random_placement(graph, 1 + own_loss, 3, 2 + own_loss)
    reference = torch.optim.Adam(plain.parameters(), lr=1e-2)
    with Trainer(graph, THREE, p, optimizer) as trainer:
        for _ in range(3):
            losses = trainer.step(batches)
            expected = plain_step(plain, reference, batches, nn.functional.mse_loss)
            torch.testing.assert_close(losses, expected)
        trainer.accumulate(batches[:3])
        again = trainer.gradients()
        for x, y in batches[:3]:
            (nn.functional.mse_loss(plain(x), y) / 3).backward()
        torch.testing.assert_close(again, {name: p.grad for name, p in plain.named_parameters()})
        trainer.zero_gradients()
        assert not any(g.any() for g in trainer.runner.partial.values())
    torch.testing.assert_close([*net.parameters()], [*plain.parameters()])


def test_running_statistics_stay_on_one_device(tmp_path):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    plain = copy.deepcopy(net)
    batches = [(torch.randn(4, 8), torch.randn(4, 2)) for _ in range(6)]
    loss = nn.functional.mse_loss
    graph = capture(net, batches[0], mode="training", loss=loss)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    replicas = np.repeat([[0], [1]], graph.num_ops, axis=1)
    with pytest.raises(RunnerError, match=r"a running statistic\), is on device 0 in phase 0"):
        Runner(graph, THREE, replicas)
    with pytest.raises(ProblemError, match="changes a buffer for the next micro-batch"):
        Trainer(graph, THREE, replicas, optimizer)
    problem = problem_of(graph, max_phases=4)
    with pytest.raises(ProblemError, match=r"it is on 'cpu:0' in phase 0, on 'cpu:1' in phase 1"):
        problem.check_placement(replicas)
    assert np.isinf(score(problem, [replicas])).all()
    importers.save(problem, tmp_path / "problem.json")  # workers and files have no program
    bare = (
        replace(problem, graph=graph.without_program()),
        importers.load(tmp_path / "problem.json"),
    )
    for known in bare:
        assert known.graph.carried == graph.carried != {}
        assert known.graph.fingerprint == graph.fingerprint
        assert np.isinf(score(known, [replicas])).all()
    for name in ("data_parallel", "replicated", "phase_search"):
        options = {"start": "heft", "evaluations": 2000} if name == "phase_search" else {}
        for objective in ("period", "max_load"):
            answer = planners.load(name, **options)(replace(problem, objective=objective))
            assert np.isfinite(answer.value_s)
            problem.check_placement(answer.placement)
            Trainer(graph, THREE, answer.placement, optimizer).close()
        if name == "phase_search":
            assert answer.placement.ndim == 2  # what is before and behind takes turns
    # The first linear layer takes turns, what belongs to the statistics does not.
    norm = {graph.group[n] for n, path in enumerate(graph.op_module) if path == "1"}
    fixed = np.isin(graph.group, list(norm))
    replicas[:, fixed] = 2
    with Trainer(graph, THREE, replicas, optimizer) as trainer:
        losses = trainer.step(batches)
    step = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.testing.assert_close(losses, plain_step(plain, step, batches, loss))
    torch.testing.assert_close(dict(net.state_dict()), dict(plain.state_dict()))
