"""CUDA graphs on emulated devices: what is captured, and what they share."""

import gc
import threading
import warnings
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import nn

from placement import optimizing
from placement.capturing import capture
from placement.capturing.training import mean_of_outputs
from placement.cli.train import difference as train_difference
from placement.cluster import Cluster, Device
from placement.executor import Runner, Trainer
from placement.executor import backend as backend_module
from placement.executor.graphs import Replayed, pieces_of, recorded
from placement.plan import Measured, Plan, Spread, now
from placement.workloads import load
from tests import emulated_gpu
from tests.executor.on_gpu import BOTH, THREE, Draws, Layers, all_on, graphed, layers, linears
from tests.machine import random_placement
from tests.modules import module_of
from tests.problems import problem_on


@pytest.mark.parametrize("placed", ["all", "cut", "scattered", "twice"])
def test_runs_of_operators_are_replayed_as_cuda_graphs(placed):
    module, items, graph = layers(12)
    cluster, place = BOTH, all_on(graph, 1)
    if placed == "cut":
        place[graph.num_ops // 2 :][:2] = 0
    elif placed == "scattered":
        cluster, place = THREE, random_placement(graph, 3)
    elif placed == "twice":
        cluster = Cluster("two", tuple(Device(f"{h}/cuda:0", "cuda") for h in "ab"))
        place = random_placement(graph, 2, cluster.num_devices)
    with emulated_gpu.emulated(copy_s=1e-3, kernel_s=2e-4) as gpu:
        with graphed(graph, cluster, place) as runner:
            results = [runner(*item) for item in items[:2]]
            results += runner.stream(items[2:])
            assert all("fewer than 3" in why for why in runner.not_graphed.values())
        assert gpu.num_replays >= (8 if placed in ("all", "cut") else 0)
        assert not any(gpu.open_pools.values()) and gpu.num_races == 0
    expected = [module(*item) for item in items]
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("name", ["tiny_mlp", "resnet_tiny"])
def test_training_steps_are_replayed_as_cuda_graphs(name, everything):
    module, inputs = load(name)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    example, options = (inputs, None), {"loss": mean_of_outputs, "optimizer": optimizer}
    graph = capture(module, example, mode="training", **options)
    place = all_on(graph, 1) if everything else random_placement(graph, 0, 2)
    with emulated_gpu.emulated(kernel_s=1e-4) as gpu:
        with Trainer(graph, BOTH, place, optimizer) as trainer:
            trainer.runner.cuda_graphs = True
            assert train_difference(trainer, module, example, mean_of_outputs, 4) == ""
            assert all("fewer than 3" in why for why in trainer.runner.not_graphed.values())
        # Of eight micro-batches the first two are launched as they are.
        assert gpu.num_replays == 6 if everything else gpu.num_replays >= 12
        assert gpu.num_races == 0


def test_a_training_step_that_drops_at_random_is_no_graph():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    example, options = (torch.randn(3, 4), None), {"loss": mean_of_outputs, "optimizer": optimizer}
    graph = capture(module, example, mode="training", **options)
    with emulated_gpu.emulated(), Trainer(graph, BOTH, all_on(graph, 1), optimizer) as trainer:
        trainer.runner.cuda_graphs = True
        losses = trainer.step([example] * 6)
        assert list(trainer.runner.not_graphed.values()) == ["the step draws random numbers"]
        assert len(set(losses.tolist())) == 6


def test_what_cannot_be_captured_is_launched_as_before_and_named():
    """It asks the device for a value in the midst of what could be the second graph."""
    waits = module_of(lambda m, x: torch.relu(torch.cos(torch.sigmoid(x + 1) * 2 - 3) + 1) * 2 - 3)
    module, x = waits.eval(), torch.randn(3, 3)
    graph = capture(module, x)
    steps = list(graph.program.steps)
    names = [str(step.target) for step in steps]
    relu, cos = (names.index(f"aten.{name}.default") for name in ("relu", "cos"))

    class Asking(type(steps[relu].target)):
        def __init__(self, target):
            self.__dict__.update(target.__dict__)
            self.target = target

        def __call__(self, value):
            value.cpu()
            return self.target(value)

    steps[relu] = replace(steps[relu], target=Asking(steps[relu].target))
    graph = replace(graph, program=replace(graph.program, steps=tuple(steps)))
    place = all_on(graph, 1)
    place[cos] = 0
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, place) as runner:
        for i in range(6):
            torch.testing.assert_close(runner(x + i), module(x + i))
        why = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
        assert runner.not_graphed == {graph.op_name[cos + 1]: why}
        # PyTorch is as it was: what was captured before is replayed, and random numbers are drawn.
        assert gpu.num_replays >= 4 and not any(gpu.open_pools.values())
        torch.rand(3, device="cuda:0")


def test_a_capture_that_fails_costs_later_ones_nothing():
    with emulated_gpu.emulated() as gpu:
        device, stream = torch.device("cuda:0"), torch.cuda.Stream()
        x = torch.ones(3, device=device)
        with torch.cuda.stream(stream):
            pool = torch.cuda.graph_pool_handle()
            first, _ = recorded(lambda: x + 1, pool, device)
            with pytest.raises(RuntimeError, match="capturing"):
                recorded(lambda: (x + 1).cpu(), pool, device)
            first.replay()
            second, _ = recorded(lambda: x + 1, torch.cuda.graph_pool_handle(), device)
            second.replay()
        assert not any(gpu.open_pools.values()) and gpu.used_pools[pool] == 1


def test_what_draws_or_has_another_form_every_time_is_in_no_graph():
    graph = capture(Draws().eval(), torch.ones(3))
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, all_on(graph, 1)) as runner:
        results = [runner(torch.ones(3)) for _ in range(6)]
        assert "random" in "".join(runner.not_graphed.values()) and gpu.num_replays
    assert len({tuple(x.tolist()) for x in results}) == 6


def test_dropout_that_is_off_is_in_a_graph():
    """Else there would be hardly a model with one."""

    def usual(m, x):
        y = nn.functional.dropout(x, 0.1, m.training)
        x = torch.relu(x + 1).view(2, 2, 8)
        return nn.functional.scaled_dot_product_attention(x, x, x) + y.view(2, 2, 8)

    module, x = module_of(usual).eval(), torch.randn(4, 8)
    graph = capture(module, x)
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, all_on(graph, 1)) as runner:
        for i in range(6):
            torch.testing.assert_close(runner(x + i), module(x + i))
        assert gpu.num_replays >= 3 and not runner.not_graphed


def test_what_writes_is_in_the_graph_that_made_the_memory():
    program = capture(*load("tiny_views")).program
    ops = tuple(range(len(program.steps)))
    writers = [n for n, step in enumerate(program.steps) if step.target._schema.is_mutable]
    assert writers and pieces_of(program, [ops]) == [ops]
    n = writers[0]
    assert (n,) in pieces_of(program, [ops[:n], ops[n:]])


def test_pinned_memory_is_freed_while_a_graph_is_captured(monkeypatch):
    """An event that is recorded then on the stream that used it must not be a part of the graph."""
    module, x, graph = linears(4)
    with emulated_gpu.emulated() as gpu, Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner.cuda_graphs = True
        list(runner.stream([x] * 2))
        pinned = [torch.ones(4, pin_memory=True)]
        compute = runner.workers[1].backend._gpu.compute
        ordinary = gpu.pools[0, 0]
        while len(ordinary) < 32 or ordinary[0] is not compute:  # it would be had once more
            torch.cuda.Stream()
        with torch.cuda.stream(compute):
            pinned[0].to("cuda:0", non_blocking=True)
        compute.synchronize()
        end = emulated_gpu.CUDAGraph.capture_end
        monkeypatch.setattr(
            emulated_gpu.CUDAGraph, "capture_end", lambda self: (pinned.clear(), end(self))
        )
        outputs = list(runner.stream([x] * 4))
        assert not pinned and gpu.num_replays and not runner.not_graphed
    with torch.no_grad():
        torch.testing.assert_close(outputs, [module(x)] * 4)


def test_graphs_of_two_runners_share_no_workspace_of_cublas():
    """Both are captured by this thread, on the same stream, and run beside each other."""
    module, x, graph = linears(4)
    with emulated_gpu.emulated() as gpu, ExitStack() as stack:
        two = [graphed(graph, BOTH, all_on(graph, 1)) for _ in range(2)]
        mine, other = map(stack.enter_context, two)
        for runner in (mine, other):
            for _ in range(4):
                runner(x)
        assert gpu.num_replays == 2 and gpu.num_races == 0
        gpu.kernel_s = 5e-3
        results = mine.stream([x] * 4)
        outputs = [next(results), other(x), *results]
        assert gpu.num_replays == 7 and gpu.num_races == 0
    with torch.no_grad():
        torch.testing.assert_close(outputs, [module(x)] * 5)


def test_memory_that_another_runner_uses_while_a_graph_is_captured_is_not_free_too_early(
    monkeypatch,
):
    """PyTorch forgets streams that are said to use a tensor while any thread captures."""
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", 0)  # results are copied on another stream
    (_, x, graph), captures, goes_on = linears(4), threading.Event(), threading.Event()
    end = emulated_gpu.CUDAGraph.capture_end

    def ends(self):
        captures.set()
        goes_on.wait(1)
        end(self)

    with emulated_gpu.emulated(copy_s=5e-3) as gpu, ExitStack() as stack:
        first = stack.enter_context(graphed(graph, BOTH, all_on(graph, 1)))
        other = stack.enter_context(Runner(graph, BOTH, all_on(graph, 1)))
        list(first.stream([x] * 2))
        list(other.stream([x] * 2))
        monkeypatch.setattr(emulated_gpu.CUDAGraph, "capture_end", ends)
        capturing = threading.Thread(target=lambda: [list(first.stream([x] * 2)) for _ in range(2)])
        capturing.start()
        assert captures.wait(30)
        streaming = threading.Thread(target=lambda: list(other.stream([x] * 4)))
        streaming.start()
        streaming.join(0.3)
        goes_on.set()
        for thread in (capturing, streaming):
            thread.join()
        assert gpu.num_races == 0


def test_a_replay_does_not_write_over_long_results_that_are_still_copied(monkeypatch):
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", 0)
    module, items = Layers().eval(), [torch.randn(4, 8) + i for i in range(6)]
    graph = capture(module, (items[0], items[0]))
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, all_on(graph, 1)) as runner:
        there = [x.to("cuda:0") for x in items]
        list(runner.stream([(x, x) for x in there]))
        gpu.copy_s = 2e-2  # while inputs are there
        results = list(runner.stream([(x, x) for x in there]))
        assert gpu.num_replays >= 6 and gpu.copies["back"] >= 6
    with torch.no_grad():
        expected = [module(x, x) for x in items]
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("graphs", ["are equal", "are slow", "are wrong", "fail"])
def test_optimize_keeps_cuda_graphs_that_compute_the_same_and_are_faster(graphs, monkeypatch):
    module, (x,), graph = layers(1)
    problem = problem_on(graph, [[1.0, 1e-3]] * graph.num_ops, cluster=BOTH)
    monkeypatch.setattr(optimizing, "measure", lambda ways, _: {n: took(n) for n in ways})
    launch, capture_begin = Replayed.launch, emulated_gpu.CUDAGraph.capture_begin

    def took(way):
        seconds = Spread.of([0.96 if graphs == "are slow" else 0.5] if "CUDA" in way else [1.0])
        return Measured(latency_s=seconds, period_s=seconds, n=1, when=now(), machine="")

    def wrong(self, env, nothing_arrived):
        rest = launch(self, env, nothing_arrived)
        if self._graph is not None:
            env[self._makes[-1]] = env[self._makes[-1]] + 1
        return rest

    def fails(self, *rest, **options):
        capture_begin(self, *rest, **options)
        raise RuntimeError("CUDA error: operation not permitted (here)")

    if graphs == "are wrong":
        monkeypatch.setattr(Replayed, "launch", wrong)
    elif graphs == "fail":
        monkeypatch.setattr(emulated_gpu.CUDAGraph, "capture_begin", fails)
    with emulated_gpu.emulated() as gpu, optimizing.fastest(problem, x, 0.5) as runner:
        assert (runner.kept, *optimizing.devices_of(runner.plan)) == ("plan", "cuda:0")
        assert runner.cuda_graphs == (graphs == "are equal")
        assert ("cuda:0 alone as CUDA graphs" in optimizing.verdict(runner)) == runner.cuda_graphs
        text = runner.plan.model_dump_json()
        assert ("cuda_graphs" in text) == runner.cuda_graphs == runner.plan.cuda_graphs
        with Plan.model_validate_json(text).bind(module, x) as bound:
            assert bound.cuda_graphs == runner.cuda_graphs
        before = gpu.num_replays
        results = [runner(*x) for _ in range(6)]
        assert (gpu.num_replays > before) == runner.cuda_graphs
    with torch.no_grad():
        torch.testing.assert_close(results, [module(*x)] * 6)


def test_a_run_of_views_is_no_graph():
    """It would be empty, as PyTorch warns."""

    def views(m, x):
        y, z = torch.relu(x), torch.sigmoid(x)
        return y.view(2, 2, 8).transpose(0, 1)[:1].unsqueeze(0), torch.relu(z).tanh().cos()

    module, x = module_of(views).eval(), torch.randn(4, 8)
    graph = capture(module, x)
    place = all_on(graph, 1)
    place[:2] = 0
    with (
        emulated_gpu.emulated() as gpu,
        graphed(graph, BOTH, place) as runner,
        warnings.catch_warnings(action="error"),
    ):
        for i in range(6):
            torch.testing.assert_close(runner(x + i), module(x + i))
        why = "fewer than 3 operators that compute something"
        assert gpu.num_replays and runner.not_graphed == {graph.op_name[2]: why}


def test_an_error_in_a_graph_is_traced_to_its_operator():
    _, (x,), graph = layers(1)
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, all_on(graph, 1)) as runner:
        gpu.missing = {"aten.tanh.default"}
        with pytest.raises(NotImplementedError) as raised:
            runner(*x)
        assert "tanh" in raised.value.__notes__[-1]


def test_memory_that_is_still_written_when_an_operator_fails_is_not_given_away():
    module, x, _ = linears()
    graph = capture(module.train(), (x, None), mode="training", loss=mean_of_outputs)

    def fails(*_, **__):
        raise ArithmeticError("in the last operator")

    *steps, last = graph.program.steps
    steps.append(replace(last, target=fails))
    graph = replace(graph, program=replace(graph.program, steps=tuple(steps)))
    with emulated_gpu.emulated(kernel_s=2e-2) as gpu:
        with (
            pytest.raises(ArithmeticError) as raised,
            Runner(graph, BOTH, all_on(graph, 1), max_in_flight=1) as runner,
        ):
            list(runner.stream_tensors([graph.program.timing_inputs()]))
        del raised
        gc.collect()
    assert gpu.num_races == 0
