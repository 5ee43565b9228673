"""Runs of operators: where a device's share is cut, what a run keeps, who is to blame."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from placement.capturing import capture
from placement.capturing.training import mean_of_outputs
from placement.cluster import Cluster, Device
from placement.executor import worker as worker_module
from placement.executor.alone import last_seconds, on_one_device, run_seconds
from placement.executor.executor import batched
from placement.executor.generated import generate, quickest
from placement.executor.runner import Runner
from placement.executor.share import fused, runs_of, shares
from placement.executor.worker import _Turns as Turns
from placement.graph import OpGraph
from placement.problem import ProblemError
from placement.program import fill
from placement.workloads import load
from tests.modules import module_of

CLUSTER = Cluster("two", (Device("cpu:a", "cpu"), Device("cpu:b", "cpu")))


def crossed(m: Any, x: torch.Tensor) -> torch.Tensor:
    """x -> relu -> sin -> cos ; sin -> exp ; cos + exp -> tanh -> y"""
    a = torch.sin(torch.relu(x))
    return torch.tanh(torch.cos(a) + torch.exp(a))


def forked(m: Any, x: torch.Tensor) -> torch.Tensor:
    """x -> relu -> sin -> neg -> y; x -> cos -> exp -> z; y + z"""
    return torch.neg(torch.sin(torch.relu(x))) + torch.exp(torch.cos(x))


DIAMOND = ["relu", "sin", "cos", "exp", "add", "tanh"]
FORK = ["relu", "sin", "neg", "cos", "exp", "add"]


def graph_of(forward: Any, expected: list[str]) -> OpGraph:
    graph = capture(module_of(forward), torch.randn(4, 3))
    assert [name.split(".")[1] for name in graph.op_kind] == expected
    return graph


diamond, fork = partial(graph_of, crossed, DIAMOND), partial(graph_of, forked, FORK)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        # relu sin cos exp add tanh
        ((0, 0, 0, 0, 0, 0), [[(0, 1, 2, 3, 4, 5)], []]),
        # One cut: what leaves (sin) ends a run; exp reads only what the first run awaited.
        ((0, 0, 1, 1, 1, 1), [[(0, 1)], [(2, 3, 4, 5)]]),
        # exp goes out and comes back: add waits for it, cos must not.
        ((0, 0, 0, 1, 0, 0), [[(0, 1), (2,), (4, 5)], [(3,)]]),
        # Every operator sends or awaits.
        ((0, 1, 0, 1, 0, 1), [[(0,), (2,), (4,)], [(1,), (3,), (5,)]]),
    ],
)
def test_runs_are_cut_where_something_arrives_or_leaves(placement, expected):
    graph = diamond()
    parts = shares(graph, np.array(placement), 2)
    assert [runs_of(share, range(6)) for share in parts] == expected


def test_what_is_ready_before_something_comes_back_is_no_part_of_a_run() -> None:
    """sin elsewhere: neg and add wait until it comes back; cos and exp, in between, must not."""
    there_and_back = shares(fork(), np.array([1, 0, 1, 1, 1, 1]), 2)[1]
    assert len(there_and_back.returning) == 1
    assert runs_of(there_and_back, range(6)) == [(0,), (2,), (3, 4), (5,)]
    # Where neg comes after them, nothing lies between it and add.
    assert runs_of(there_and_back, [0, 1, 4, 2, 3, 5]) == [(0,), (3, 4), (2, 5)]
    # relu elsewhere: nothing there waits for this device, so one function does.
    downstream = shares(fork(), np.array([0, 1, 1, 1, 1, 1]), 2)[1]
    assert downstream.returning == frozenset()
    assert runs_of(downstream, range(6)) == [(1, 2, 3, 4, 5)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.integers(1, 3))
def test_operators_of_a_run_wait_for_the_same_and_neighbours_do_not(seed, num_ops, num_devices):
    """By brute force, on random graphs: what comes back for an operator, through others here."""
    rng = np.random.default_rng(seed)
    edges = [(u, v) for v in range(num_ops) for u in range(v) if rng.random() < 2 / num_ops]
    names = [f"op{i}" for i in range(num_ops)]
    graph = OpGraph.build("random", names, range(num_ops), [4] * num_ops, edges)
    place = rng.integers(0, num_devices, num_ops)
    before = [{u} for u in range(num_ops)]
    for u, v in edges:  # in order of v
        before[v] |= before[u]
    for d, share in enumerate(shares(graph, place, num_devices)):

        def far(op: int, d: int = d) -> set[int]:
            return {u for u, v in edges if v == op and place[u] != d}

        def awaited(op: int, d: int = d) -> set[int]:
            back = {u for u in far(op) if d in place[list(before[u])]}
            return back.union(*(awaited(u) for u, v in edges if v == op and place[u] == d))

        runs = runs_of(share, range(num_ops))
        assert [op for run in runs for op in run] == np.flatnonzero(place == d).tolist()
        sends = {u for u, v in edges if place[v] != place[u]}
        for run in runs:
            assert all(awaited(op) == awaited(run[0]) for op in run)
            assert all(far(op) <= far(run[0]) for op in run)
            assert sends.isdisjoint(run[:-1])
        for run, (op, *_) in pairwise(runs):
            assert run[-1] in sends or awaited(op) != awaited(run[0]) or not far(op) <= far(run[0])


def test_a_training_step_on_one_device_is_one_run() -> None:
    """Its loss is a result in the midst; statistics it reads and writes in one operator."""
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    options: dict[str, Any] = {"loss": mean_of_outputs, "optimizer": optimizer}
    graph = capture(module, (torch.randn(5, 3), None), mode="training", **options)
    (share, _) = shares(graph, np.zeros(graph.num_ops, np.int32), 2)
    assert len(share.carried) == 2
    runs = runs_of(share, range(graph.num_ops))
    assert runs == [tuple(range(graph.num_ops))]
    # All gradients, and all new statistics of a dtype, are written by one call each.
    seen = Launches()
    program = graph.program
    params = {p: x.detach().clone() for p, x in enumerate(program.params)}
    sums = {p: torch.zeros_like(params[p]) for p, _ in program.gradients}
    env: list[Any] = [None] * graph.num_tensors
    env[program.input_tensors[0]] = torch.randn(5, 3)
    (call,) = generate(program, runs, share, params, sums, torch.device("cpu")).calls.values()
    with seen, torch.no_grad():
        assert list(call(env, lambda: True) or ()) == []
    written = "aten._foreach_add_.List", "aten._foreach_copy_.default"
    assert [seen.names.count(name) for name in written] == [1, 2]
    assert all(x.any() for x in sums.values())


class Launches(TorchDispatchMode):
    """The names of all that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_run_lets_what_arrives_go_first() -> None:
    """The rule holds between the operators of a run: of what is ready, the highest rank.

    cpu:a       sin ──┐         is done once cos has begun
    cpu:b  relu ┘ cos ─┴─ neg exp  cos ends once sin is back; without a look around: cos exp neg
    """
    graph = fork()
    began, done = threading.Event(), list[str]()
    runner = Runner(graph, CLUSTER, np.array([1, 0, 1, 1, 1, 1]))

    def watched(name: str, target: Any) -> Any:
        def call(*args: Any) -> Any:
            if name == "sin":
                assert began.wait(10)
            if name == "cos":
                began.set()
                until = time.monotonic() + 10
                while runner.workers[1].inbox.empty():
                    assert time.monotonic() < until
                    time.sleep(1e-3)
            done.append(name)
            return target(*args)

        return call

    for name, step in zip(FORK, graph.program.steps, strict=True):
        object.__setattr__(step, "target", watched(name, step.target))
    x = torch.randn(4, 3)
    with runner:
        torch.testing.assert_close(runner(x), forked(None, x))
    assert [name for name in done if name != "sin"] == ["relu", "cos", "neg", "exp", "add"]


def test_a_fused_share_speaks_of_runs() -> None:
    graph = diamond()
    share = shares(graph, np.array([0, 0, 0, 1, 0, 0]), 2)[0]
    whole = fused(share, runs_of(share, range(6)))
    sin, cos, exp, tanh = (graph.program.steps[i].outputs[0] for i in (1, 2, 3, 5))
    x = graph.program.input_tensors[0]
    assert whole.ops == (0, 2, 4)
    assert [whole.inputs[op] for op in whole.ops] == [(x,), (sin,), (cos, exp)]
    assert [whole.outputs[op] for op in whole.ops] == [(sin,), (cos,), (tanh,)]
    assert [whole.num_inputs[op] for op in whole.ops] == [1, 1, 2]
    assert (whole.users[x], whole.users[sin], whole.users[exp]) == ((0,), (2,), (4,))
    assert whole.num_uses[sin] == 1 and whole.sources == ()


def test_a_run_lets_tensors_go_after_their_last_reader() -> None:
    """Every tensor of a chain is alone in memory but for the one made from it."""
    graph = capture(nn.Sequential(*[nn.ReLU() for _ in range(5)]), torch.randn(8))
    (share, _) = shares(graph, np.zeros(5, np.int32), 2)
    runs = runs_of(share, range(5))
    assert runs == [(0, 1, 2, 3, 4)]
    alive, most = WeakIdKeyDictionary(), []

    def watched(target: Any) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            y = target(x)
            alive[y] = True
            most.append(len(alive))
            return y

        return call

    for step in graph.program.steps:
        object.__setattr__(step, "target", watched(step.target))
    generated = generate(graph.program, runs, share, {}, {}, torch.device("cpu"))
    env: list[Any] = [None] * graph.num_tensors
    env[graph.program.input_tensors[0]] = torch.randn(8)
    assert list(generated.calls[0](env, lambda: True) or ()) == []
    assert most == [1, 2, 2, 2, 2]
    assert [i for i, x in enumerate(env) if x is not None] == [graph.program.steps[4].outputs[0]]


def test_each_operator_of_a_run_leaves_its_number_and_when_it_ended() -> None:
    graph = capture(nn.Sequential(*[nn.ReLU() for _ in range(3)]), torch.randn(8))
    (share, _) = shares(graph, np.zeros(3, np.int32), 2)
    marks: list[Any] = []
    about = share, {}, {}, torch.device("cpu"), (marks, iter((10, 20, 30)).__next__)
    run = generate(graph.program, [(0, 1, 2)], *about).calls[0]
    env: list[Any] = [None] * graph.num_tensors
    env[graph.program.input_tensors[0]] = torch.randn(8)
    rest = run(env, lambda: False)
    assert rest is not None and next(rest) == 1  # something has arrived
    assert marks == [0, 10]
    assert list(rest) == [2] and marks == [0, 10, 1, 20, 2, 30]


def test_a_recorded_run_has_no_gap_between_its_operators() -> None:
    graph = capture(nn.Sequential(*[nn.ReLU() for _ in range(4)]), torch.randn(8))
    with Runner(graph, CLUSTER, [0] * 4, max_in_flight=1, record=True) as runner:
        list(runner.stream([torch.randn(8)] * 2))
        rows = np.array(runner.workers[0].slices).reshape(-1, 4)
    assert rows[:, :2].tolist() == [[b, op] for b in range(2) for op in range(4)]
    assert (rows[:, 2] < rows[:, 3]).all()
    assert (rows[[1, 2, 3], 2] == rows[[0, 1, 2], 3]).all()


def test_the_operator_of_a_run_that_fails_is_named() -> None:
    graph = diamond()
    bad = graph.program.steps[3]

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no exp today")

    object.__setattr__(bad, "target", fail)
    with (
        Runner(graph, CLUSTER, np.zeros(6, np.int32)) as runner,
        pytest.raises(ArithmeticError) as caught,
    ):
        runner(torch.randn(4, 3))
    assert any(graph.op_name[3] in note for note in caught.value.__notes__)


def test_random_placements_and_priorities_never_wait_for_each_other() -> None:
    """Two devices, any placement, any topological order: the same numbers, no deadlock."""
    graph = diamond()
    rng = np.random.default_rng(0)
    x = torch.randn(4, 3)
    expected = crossed(None, x)
    orders = ([0, 1, 2, 3, 4, 5], [0, 1, 3, 2, 4, 5])  # position of every operator
    for i in range(20):
        placement = rng.integers(0, 2, 6)
        with Runner(graph, CLUSTER, placement, priority=orders[i % 2]) as runner:
            for y in runner.stream([x, x, x]):
                torch.testing.assert_close(y, expected)


def test_a_runner_takes_whole_numbers_of_devices_only() -> None:
    for wrong in ([0.5] * 6, [float("nan")] * 6, [[0] * 6, [0] * 5]):
        with pytest.raises(ProblemError, match=r"numbers of devices|unequal lengths"):
            Runner(diamond(), CLUSTER, wrong)


# --- turns ---------------------------------------------------------------------------------------


def in_two_threads(turns: Turns, step: Callable[[], None], times: int) -> list[BaseException]:
    """Run 0, of two operators, so often in two threads at once; what they raised."""

    def rest() -> Iterator[int]:
        step()
        yield from ()

    def work() -> None:
        for _ in range(times):
            turns.go_on(0, rest(), True)

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(work) for _ in range(2)]
    return [error for x in ended if (error := x.exception())]


def test_short_operators_are_one_threads_at_a_time_and_long_ones_are_not(monkeypatch):
    monkeypatch.setattr(worker_module._Turns, "longest_s", 60.0)
    monkeypatch.setattr(worker_module._Turns, "short_ns", 10**11)
    inside: list[int] = []
    seen: list[int] = []

    def step() -> None:
        inside.append(0)
        time.sleep(0.001)
        seen.append(len(inside))
        inside.pop()

    turns = Turns({0: 2})
    assert in_two_threads(turns, step, 40) == [] and seen == [1] * 80
    # Once short, for good. And only a whole run tells: its last operator may be done at once.
    monkeypatch.setattr(worker_module._Turns, "short_ns", 0)
    assert in_two_threads(turns, step, 40) == [] and set(seen) == {1}
    turns = Turns({0: 2})
    for _ in range(10):
        monkeypatch.setattr(worker_module._Turns, "short_ns", 0)
        turns.go_on(0, iter(()), True)
        monkeypatch.setattr(worker_module._Turns, "short_ns", 10**11)
        assert turns.go_on(0, iter((1,)), True)[0] == 1
        turns.go_on(0, iter(()), False)
    both = threading.Barrier(2)
    assert in_two_threads(turns, lambda: both.wait(60.0) and None, 3) == []


def test_a_run_that_took_ten_times_as_long_as_a_short_one_waits_for_no_turn_any_more() -> None:
    """Two operators, 5 us each count as short: more than 100 us are long."""

    def rest() -> Iterator[int]:
        time.sleep(0.001)
        yield from ()

    turns = Turns({0: 2})
    turns.go_on(0, rest(), True)
    with worker_module._TURN:
        assert all(turns.go_on(0, rest(), True) == (None, 0) for _ in range(130))


def test_nobody_waits_long_for_a_turn_and_an_error_ends_it() -> None:
    turns = Turns({0: 2})
    with worker_module._TURN:
        following, waited_ns = turns.go_on(0, iter((1,)), True)
        assert following == 1 and waited_ns >= 10**7
        assert worker_module._TURN.locked()  # whose turn it is keeps it

    def fails() -> Iterator[int]:
        raise ValueError("in an operator")
        yield 0

    with pytest.raises(ValueError, match="in an operator"):
        turns.go_on(0, fails(), True)
    assert not worker_module._TURN.locked()


def test_waiting_for_a_turn_makes_all_operators_slower_beside_others_and_no_slice_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module._Turns, "longest_s", 0.2)
    graph = diamond()
    inputs = [torch.randn(4, 3)]
    with on_one_device(graph, CLUSTER, 0, range(6)) as runner:
        run_seconds(runner, inputs, 1)
        with worker_module._TURN:
            list(runner.stream_tensors([inputs]))
        (worker,) = [w for w in runner.workers if w.slices]
        took = np.array([end - begin for _, _, begin, end in batched(worker.slices, 4)]) * 1e-9
        (waited,) = list(batched(worker.waits, 2))
        assert waited[0] == 1 and waited[1] >= 2 * 10**8
        assert worker.slices[2] - runner.admitted_ns[1] >= 2 * 10**8  # the first begins after it
        seconds = last_seconds(runner, range(1, 2))
        np.testing.assert_allclose(seconds, took * (1 + waited[1] * 1e-9 / took.sum()))
        assert not worker.waits


class Several(nn.Module):
    """Overloads, scalars, views, what writes, and what returns several tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x + 1).mul_(2).sub(x, alpha=0.5) / 3.0
        y = torch.div(y, 0.7, rounding_mode="floor").clamp(min=-2).pow(2)
        a, b = y.unsqueeze(0).transpose(0, 1).chunk(2, dim=-1)
        top, at = a.max(dim=0)
        z = torch.where(b > 0, b, 0.1).masked_fill(b.lt(-1), 3.0)
        z = nn.functional.interpolate(z.reshape(1, 1, 4, 4), scale_factor=2.0)
        z = nn.functional.conv2d(z, z[:, :, :3, :3], padding="valid")
        z = nn.functional.pad(nn.functional.avg_pool2d(z, 2), (1, 0))
        loss = nn.functional.cross_entropy(z, z.argmax(1)) + nn.functional.mse_loss(z, z + 1)
        product = torch.einsum("abij,abij->ij", z, z)
        product[:, torch.arange(2)] = 1.0
        return top, at, product, nn.functional.softmax(z, -1).sum(-1), loss


def test_an_operator_has_pytorchs_own_function_which_does_the_same():
    def run(function: Any, arguments: Any) -> tuple[list[str], list[Any]]:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, arguments)
        with Launches() as seen:
            output = function(*args, **kwargs)
        return seen.names, pytree.tree_leaves(output)

    models = [load(name) for name in ("tiny_cnn", "bert_tiny", "dlrm_tiny", "tiny_views")]
    models.append((Several().eval(), torch.randn(4, 8)))
    replaced = 0
    for module, inputs in models:
        program = capture(module, inputs).program
        assert program is not None
        env = dict(zip(program.input_tensors, program.timing_inputs(), strict=True))
        with torch.inference_mode():
            for step in program.steps:
                bound = tuple(fill(x, env, program.params) for x in (step.args, step.kwargs))
                names, expected = run(step.target, bound)
                if (function := quickest(step.target)) is not step.target:
                    replaced += 1
                    seen, output = run(function, bound)
                    assert seen == names
                    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)
                value = step.target(*bound[0], **bound[1])
                some = zip(step.outputs, step.output_index, strict=True) if step.multi else ()
                env |= {t: value[i] for t, i in some}
                env |= {} if step.multi else dict.fromkeys(step.outputs, value)
    assert replaced > 100
