"""Parameters in host memory, operators on a GPU: planned, predicted, and run on an emulated one."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from placement import optimizing, planners
from placement.bounds import lower_bound
from placement.buffer import Buffer
from placement.capturing import capture
from placement.cluster import Cluster, ClusterError, Device, Link
from placement.costs.measure import cached_path, load_or_measure
from placement.executor import Executor, Runner, weights
from placement.executor.streamed import Streamed, streaming_where_short, with_streaming
from placement.graph import even_position
from placement.objective import Objective
from placement.plan import Plan, make_plan
from placement.plan.reached import least_s, reached
from placement.planners.residence import Residence, _by_saving, refitted, with_buffers
from placement.problem import Problem, ProblemError, Solution
from placement.profile import Profile
from placement.runs import ways
from placement.search.evaluation import Search
from placement.simulator import evaluate, list_schedule, score, simulate, simulate_reference
from placement.workloads import load
from tests import emulated_gpu
from tests.emulated_gpu import Event
from tests.executor.on_gpu import stream_all
from tests.problems import altered, graph_of, problem_on, small_problem, with_twins
from tests.problems import chain as edges_of

CPU, GPU = Device("cpu:0"), Device("cuda:0", "cuda")
STREAMED = Device("streamed/cuda:0", "cuda", streams="cuda:0")
THREE = Cluster("three", (CPU, GPU, STREAMED))
FIELDS = ["start_s", "end_s", "transfer_start_s", "transfer_end_s", "peak_bytes", "copies"]
FIELDS += ["copy_start_s", "copy_end_s", "busy_s"]


def chosen(graph, seed, devices=(0, 1, 2)):
    groups = np.random.default_rng(seed).choice(devices, size=graph.num_groups)
    return groups[graph.group].astype(np.int32)


# --- the simulator -------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
def test_kernel_equals_reference_where_devices_stream(seed: int) -> None:
    problem = with_twins(seed)
    rng = np.random.default_rng(seed + 1)
    for phases in (1, 1, 2):
        p = rng.integers(problem.num_devices, size=(phases, problem.graph.num_groups))
        p = p[:, problem.graph.group].astype(np.int32)
        p = np.where(problem.supported[np.arange(problem.num_ops), p], p, 0)
        p = p[0] if phases == 1 else p
        if not problem.supported[:, 0].all():
            continue
        lines = [equal_lines(problem, p)]
        if phases == 1:
            lines.append(equal_lines(replace(problem, num_microbatches=1), p))
            value = evaluate(problem, p[None])
            found = np.append(value.period_s, value.latency_s)
            np.testing.assert_allclose(found, [lines[0].period_s, lines[1].latency_s], rtol=1e-9)
            assert value.peak_bytes is None or (value.peak_bytes[0] == lines[0].peak_bytes).all()
            equal_lines(problem, p, list_schedule(problem, p, problem.num_microbatches))


def equal_lines(problem: Problem, placement: Any, order: Any = None) -> Any:
    """The timeline of kernel and reference."""
    fast, slow = (f(problem, placement, order) for f in (simulate, simulate_reference))
    for what in FIELDS:
        both = getattr(fast, what), getattr(slow, what)
        np.testing.assert_allclose(*both, rtol=1e-9, atol=1e-9, err_msg=what)
    return fast


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_no_placement_beats_the_bound(seed: int, num_ops: int) -> None:
    """Also of one operator, on a GPU that cannot hold it."""
    problem = with_twins(seed, num_ops, 3)
    most = int(problem.graph.param_bytes.sum() + problem.graph.tensor_bytes.sum())
    host, few = problem.cluster.devices[0], 1 + most // (1 + seed % 3)
    problem = altered(problem, {"memory_bytes": lambda d: d.memory_bytes if d is host else few})
    placed = np.array(list(product(range(problem.num_devices), repeat=num_ops)))
    for objective in (Objective.PERIOD, Objective.LATENCY):
        problem = replace(problem, objective=objective, max_in_flight=1 + seed % 3)
        assert lower_bound(problem) <= score(problem, placed).min() * (1 + 1e-9)
    # Whatever the size of buffers.
    least, most = least_s(problem), max(int(problem.copied_bytes.max()), 1)
    for room in (most, most * 3 // 2, most * 2, most * 4):
        one = altered(problem, {"buffer_bytes": lambda d, room=room: room if d.streams else None})
        assert max(least, lower_bound(one)) <= score(one, placed).min() * (1 + 1e-9)


def test_a_buffer_is_whole_if_anything_streams() -> None:
    """Of six operators with 4 bytes a GPU of 18 holds three, beside a buffer and two tensors.

    Of fractions alone 0.4 of all would stream, through 0.4 of a buffer.
    """
    problem = chain(*[4] * 6, buffer_bytes=4, memory_bytes=18, objective="latency")
    problem = altered(problem, compute_s=problem.profile.compute_s * [np.inf, 1, 1])
    assert lower_bound(problem) == pytest.approx(12.0)
    assert score(problem, [[1, 2, 1, 2, 1, 2]])[0] >= 12.0


def test_operators_run_so_that_copies_come_evenly() -> None:
    """Of two chains one reads what takes three times as long to come; the other runs meanwhile."""
    edges = [(0, 1), (2, 3)]
    graph = graph_of(4, edges, 1, param_bytes=[3, 3], param_uses=[(0, 0), (1, 1)])
    read, work = np.array([3.0, 3.0, 0, 0]), np.array([1.0, 1.0, 3.0, 3.0])
    assert even_position(graph, read, work).tolist() == [0, 2, 1, 3]


def test_what_an_operator_reads_and_makes_takes_memory_from_parameters() -> None:
    """8 bytes have room for all parameters; with an operator's tensors, of 2, for half of them."""
    latency = {"buffer_bytes": 4, "objective": "latency"}
    assert lower_bound(chain(4, 4, memory_bytes=10, **latency)) == 2.0
    assert lower_bound(chain(4, 4, memory_bytes=8, **latency)) >= 4.0


def chain(*sizes: int, buffer_bytes: Any = None, memory_bytes: Any = 2**40, **more: Any) -> Problem:
    """Operators of 1 s on the GPU, one after another, whose parameters take a second per byte."""
    n = len(sizes)
    graph = graph_of(n, edges_of(n), 1, param_bytes=sizes)
    card = replace(GPU, memory_bytes=memory_bytes)
    streams = replace(STREAMED, buffer_bytes=buffer_bytes)
    links = (Link("cpu:0", "streamed/cuda:0", 0.0, 1.0), Link("cpu:0", "cuda:0", 0.0, 1.0))
    cluster = Cluster("c", (CPU, card, streams), links)
    seconds = np.array([[9.0, 1.0]] * n)
    profile = Profile(("cpu:0", "cuda:0"), seconds, 0 * seconds).for_cluster(cluster)
    return Problem(graph, cluster, profile, num_microbatches=3, max_in_flight=1, **more)


def test_parameters_come_in_the_order_of_use_as_early_as_the_buffer_has_room() -> None:
    """Drawn: the buffer has room for 4 bytes; each operator runs for a second.

    | s    | 0 1 2 3 4 5 6 7 8 9 |
    | link | a a b b c c a a b b |  c waits for the end of a, the next a for the end of b
    | GPU  | . . a . b . c . a . |
    """
    problem = chain(2, 2, 2, buffer_bytes=4)
    line = simulate(problem, [2, 2, 2])
    assert line.start_s[:2].tolist() == [[2, 4, 6], [8, 10, 12]] and line.period_s == 6.0
    assert line.copies[:5].tolist() == [[0, 2], [1, 2], [2, 2], [0, 2], [1, 2]]
    assert line.copy_start_s[:5].tolist() == [0, 2, 4, 6, 8]
    # A call after another: a has come when the one before it ends, and b begins to.
    once = simulate(problem, [2, 2, 2], None, 1)
    assert (once.latency_s, once.start_s.tolist()) == (6.0, [[1, 3, 5]])
    # The host has all parameters, what is page-locked is what streams; two buffers' worth is there.
    assert line.peak_bytes is not None and line.peak_bytes.tolist() == [6, 4 + 2, 6]


def test_a_call_is_as_long_as_those_are_on_average_until_the_buffer_is_as_it_was() -> None:
    """3 bytes: behind a and b, of one each, c, of 2, has no room; behind c and a b has."""
    problem = chain(1, 1, 2, buffer_bytes=3)
    many = simulate(replace(problem, num_microbatches=9), [2, 2, 2])
    assert np.diff(many.end_s.max(axis=1)).tolist() == [4, 5] * 4
    once = simulate(problem, [2, 2, 2], None, 1)
    # The call of 4 s is shown, half a second of which is before anything happens.
    assert once.latency_s == once.makespan_s == 4.5 and once.end_s.max() == 4.5
    assert evaluate(problem, [2, 2, 2]).latency_s.tolist() == [4.5]


def test_a_copy_hides_behind_operators_that_have_none() -> None:
    """Two of eight operators take 3 s to come, while the three before each are computed."""
    problem = chain(1, 1, 1, 3, 1, 1, 1, 3, buffer_bytes=3)
    some = [1, 1, 1, 2, 1, 1, 1, 2]
    assert simulate(problem, some).period_s == simulate(problem, [1] * 8).period_s == 8.0
    assert problem.compute_s[3].tolist() == [9, 1, 3]  # a planner's estimate of one alone


def test_what_has_room_for_all_is_copied_once_and_what_is_wanted_comes_out_of_turn() -> None:
    problem = chain(2, 2, 2)
    assert simulate(problem, [2, 2, 1]).period_s == 3.0  # a and b, in 4 bytes
    buffer = Buffer({0: 2, 1: 2, 2: 2}, 4)
    assert [buffer.copy(), buffer.copy(), buffer.copy()] == [(0, 0, []), (1, 2, []), None]
    assert not buffer.take(2) and buffer.copy() == (2, 0, [0])
    buffer.give_back(1)
    assert buffer.copy() == (0, 2, [1])  # behind 2 in turn, over what was read


def test_copies_wait_for_other_transfers_of_their_link() -> None:
    """The input, 4 bytes, goes to the GPU first; a's parameters come behind it, or beside it."""
    problem = chain(2, 2, 2, buffer_bytes=4)
    graph = graph_of(1, [(0, 0)], [4, 1], tensor_src=[-1, 0], param_bytes=2)
    seconds = np.array([[9.0, 1.0]])
    for channel, start_s in ((None, 6.0), ("own", 4.0)):
        links = (replace(problem.cluster.links[0], channel=channel), problem.cluster.links[1])
        cluster = replace(problem.cluster, links=links)
        profile = Profile(("cpu:0", "cuda:0"), seconds, 0 * seconds).for_cluster(cluster)
        fed = Problem(graph, cluster, profile, num_microbatches=2, max_in_flight=1)
        assert simulate(fed, [2]).start_s[0, 0] == start_s


def test_a_buffer_is_as_large_as_the_largest_parameters_and_pinned_memory_is_limited() -> None:
    why = r"buffer_bytes = 3, but operator 1 \('op1'\) has 4 bytes"
    with pytest.raises(ProblemError, match=why):
        chain(2, 4, buffer_bytes=3)
    with pytest.raises(ClusterError, match=r"'cuda:0': buffer_bytes = 3 is said of a device that"):
        replace(GPU, buffer_bytes=3)
    with pytest.raises(ClusterError, match=r"pinned_bytes = 0, must be from 1"):
        replace(CPU, pinned_bytes=0)
    short = altered(chain(2, 2, 2), {"pinned_bytes": lambda d: 5 if d is CPU else d.pinned_bytes})
    assert np.isfinite(score(short, [[2, 2, 1], [2, 2, 2]])).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"'streamed/cuda:0' needs 6 bytes of pinned.* it has 5"):
        make_plan(short, Solution(np.array([2, 2, 2]), 1.0), planner="mine")
    search = Search(short)
    search.cost(np.array([2, 2, 2], np.int32))
    assert "'streamed/cuda:0' needs 6 bytes, has 5" in search.solution().stats["infeasible"]


def test_what_cannot_be_streamed_is_refused_by_name() -> None:
    with pytest.raises(ClusterError, match=r"streams = 'cpu:0', must name a device.*cuda:0"):
        Cluster("c", (CPU, GPU, replace(STREAMED, streams="cpu:0")))
    with pytest.raises(ClusterError, match="host memory"):
        Cluster("c", (GPU, STREAMED))
    problem = chain(2, 2)
    backward = replace(problem.graph, is_backward=np.array([False, True]))
    with pytest.raises(ProblemError, match=r"'streamed/cuda:0'.*inference"):
        replace(problem, graph=backward)


# --- planners ------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, count: int = 6, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(self.norm(layer(x)))
        return x


def half_of(module: nn.Module, inputs: Any, flops_per_byte: float) -> tuple[Problem, Problem]:
    """A GPU with half of the memory that the model takes; with the choice to stream, and without.

    A multiplication with a weight of ``B`` bytes takes ``flops_per_byte * B`` ns on the GPU, 30
    times that on the CPU, and at least what reading it takes (as 30 GB/s, or nothing).
    """
    graph = capture(module, inputs)
    devices = CPU, replace(GPU, memory_bytes=int(graph.param_bytes.sum()) // 2), STREAMED
    ends = ("cpu:0", "cuda:0"), ("cuda:0", "cpu:0"), ("cpu:0", "streamed/cuda:0")
    links = tuple(Link(*pair, 1e-6, 25e9) for pair in ends)
    cluster, more = Cluster("half", devices[:2], links[:2]), Cluster("half", devices, links)
    size = np.zeros(graph.num_ops)
    np.add.at(size, graph.param_use_op, graph.param_bytes[graph.param_use])
    gpu = 1e-6 + flops_per_byte * 1e-9 * size
    cpu = 1e-6 + np.maximum(30 * flops_per_byte, 1 / 30) * 1e-9 * size
    seconds = np.stack([cpu, gpu], axis=1)
    profile = Profile(cluster.device_names, seconds, 0 * seconds)
    facts: dict[str, Any] = {"num_microbatches": 8, "max_in_flight": 2}
    return tuple(Problem(graph, c, profile.for_cluster(c), **facts) for c in (more, cluster))


@pytest.mark.parametrize("name", ["best_of", "macro_search"])
@pytest.mark.parametrize("objective", ["latency", "period"])
def test_many_tokens_are_worth_a_copy_of_the_weights_and_few_are_not(name, objective):
    for flops_per_byte, streams in ((0.02, True), (0.0, False)):
        both = half_of(Layers(12, 256).eval(), torch.randn(2, 256), flops_per_byte)
        values, used = [], []
        for problem in both:
            problem = replace(problem, objective=Objective(objective))
            answer = planners.load(name, evaluations=1500)(problem)
            values.append(answer.value_s)
            used.append(answer.placement)
            assert score(problem, answer.placement[None])[0] == pytest.approx(answer.value_s)
        if streams:
            assert (used[0] == 2).any() and values[0] < 0.8 * values[1]
        else:
            assert values[0] <= 1.1 * values[1] and (used[0] == 0).any()


def test_what_saves_most_per_byte_stays_and_no_placement_is_better_than_the_program() -> None:
    """Six operators of which the GPU holds two beside the buffer: every placement is tried."""
    problem = chain(*[2, 4] * 3, buffer_bytes=4, memory_bytes=14, objective="latency")
    every = np.array(list(product(range(3), repeat=6)))
    best = score(problem, every).min()
    greedy, exact = (Residence(way)(problem) for way in ("greedy", "exact"))
    assert exact.lower_bound_s is not None and lower_bound(problem) <= exact.lower_bound_s
    assert exact.lower_bound_s <= best * (1 + 1e-9)
    assert best <= exact.value_s and greedy.value_s <= 1.2 * best
    assert (greedy.placement == 2).any() and (greedy.placement == 1).any()
    line = reached(problem, greedy)
    said = r"\d+% of what this machine can do \(.* at least\); .*cuda:0 computes.*"
    assert re.fullmatch(said, line)
    large = chain(2, memory_bytes=99).cluster.workers
    fits = replace(problem, cluster=large, profile=problem.profile.for_cluster(large))
    assert reached(fits, replace(greedy, placement=np.ones(6, np.int32))) == ""


def test_an_operator_that_takes_no_time_does_not_hide_one_that_does() -> None:
    """d0 runs op0 from 0 to 1 s, op2 at 1 s and op1 from 1 to 2 s, of 6 s."""
    problem = small_problem(
        [[1, 9], [1, 9], [0, 9], [9, 5]], tensors=[(0, 0, [1]), (0, 0, [2]), (2, 0, [3])],
        param_bytes=10, memory_bytes=35, objective="latency",
    )  # fmt: skip
    line = reached(problem, Solution(np.array([0, 0, 0, 1], np.int32), 6.0))
    assert "d0 computes 33% of the time" in line


def test_a_device_that_streams_does_not_run_what_writes_a_buffer_in_a_coarse_graph_either() -> None:
    graph = graph_of(2, [(0, 1)], param_bytes=20, next_readers={0: (0,)})
    gpu, stream = Device("gpu", "cuda", memory_bytes=30), {"streams": "gpu", "buffer_bytes": 20}
    cluster = Cluster("c", (Device("cpu"), gpu, Device("s", "cuda", **stream)))
    link = (Link("cpu", "s", 0.0, 1e3),)
    problem = problem_on(graph, [[9, 1, 1]] * 2, cluster=cluster, links=link)
    for planner in ("coarsened", "best_of"):
        solution = planners.load(planner)(problem)
        assert solution.value_s < np.inf and solution.placement[0] != 2


def test_a_call_of_which_few_fit_at_a_time_has_a_plan() -> None:
    """Each copy of the tensor has 100 of the 250 bytes of d1, so two are in flight."""
    problem = small_problem(
        [[1, np.inf], [np.inf, 10]], tensors=[(0, 100, [1])], device={"kind": "cuda"},
        memory_bytes=[1000, 250], objective="latency",
    )  # fmt: skip
    solution = planners.load("single_device")(problem)
    plan = make_plan(problem, solution, planner="single_device")
    assert solution.value_s == plan.predicted.value_s == 11.0 and plan.max_in_flight == 2
    assert plan.inconsistencies() == []


def test_what_the_card_alone_can_run_goes_there_first() -> None:
    """It has room for one of three, of which the processor cannot run the last."""
    three = chain(3, 3, 3, memory_bytes=3)
    seconds = np.array([[9.0, 1.0], [9.0, 1.0], [np.inf, 1.0]])
    profile = Profile(("cpu:0", "cuda:0"), seconds, 0 * np.ones((3, 2)))
    problem = replace(three, cluster=three.cluster.workers, profile=profile)
    each = np.arange(3)
    assert _by_saving(problem, each, each, price=1.0, filled=1.0).tolist() == [0, 0, 1]


def test_a_buffer_has_the_size_that_pays() -> None:
    """Between two layers whose weights take 6 s each are six operators that have none to copy."""
    sizes = (6, *[0] * 6, 6, *[0] * 6)
    plain = chain(*sizes, memory_bytes=9, objective="latency")
    problem = with_buffers(plain)
    # Two buffers have no room; one is enough: each weight comes while six others run.
    assert problem.cluster.devices[2].buffer_bytes == 6
    solution = planners.load("residence")(problem)
    assert solution.value_s == 14.0
    assert make_plan(problem, solution, planner="residence").cluster.devices[2].buffer_bytes == 6
    again, better = refitted(plain, solution)
    assert again.cluster.devices[2].buffer_bytes == 6 and better.value_s == 14.0
    told = chain(*sizes, buffer_bytes=12)
    assert with_buffers(told).cluster is told.cluster
    # Larger ones would be faster, and are not asked for.
    told, copied = chain(2, 2, 2, buffer_bytes=2, objective="latency"), np.full(3, 2, np.int32)
    assert refitted(told, Solution(copied, 9.0))[0].cluster.devices[2].buffer_bytes == 6
    assert refitted(told, Solution(copied, 9.0), told.cluster)[0] is told


# --- on the emulated GPU -------------------------------------------------------------------------


def layers(count: int = 6) -> tuple[nn.Module, Any, Any]:
    module, inputs = Layers(count).eval(), (torch.randn(3, 64),)
    return module, inputs, capture(module, inputs)


@pytest.mark.parametrize("name", ["layers", "tiny_branches", "tiny_views", "dlrm_tiny"])
def test_results_are_the_modules_wherever_operators_and_parameters_are(name: str) -> None:
    module, inputs = load(name) if name != "layers" else layers()[:2]
    graph = capture(module, inputs)
    placements = [chosen(graph, 1, (2,)), chosen(graph, 2), chosen(graph, 3, (1, 2))]
    placements.append(np.stack([chosen(graph, 4, (1, 2)), chosen(graph, 5, (1, 2))]))
    for copy_s, kernel_s in ((1e-3, 0.0), (0.0, 5e-4)):
        with emulated_gpu.emulated(copy_s=copy_s, kernel_s=kernel_s) as gpu:
            stream_all(graph, module, inputs, THREE, placements, 4)
        assert gpu.num_races == 0


@pytest.mark.parametrize("forgotten", ["_read", "_arrived"])
def test_the_emulated_gpu_notices_a_buffer_that_is_written_or_read_too_early(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the test before says little."""
    init = Streamed.__init__

    def without(streamed: Streamed, *args: Any) -> None:
        init(streamed, *args)
        nothing = SimpleNamespace(record=lambda stream: None, done=Event().done, seen={})
        setattr(streamed, forgotten, dict.fromkeys(streamed.reads, nothing))

    module, inputs, graph = layers()
    slow = {"kernel_s": 2e-3} if forgotten == "_read" else {"copy_s": 2e-3}
    with emulated_gpu.emulated(**slow), pytest.raises((AssertionError, RuntimeError)):
        monkeypatch.setattr(Streamed, "__init__", without)
        stream_all(graph, module, inputs, THREE, [chosen(graph, 1, (2,))], 4)


def test_parameters_that_all_have_room_are_copied_once() -> None:
    """A norm after each of six layers reads the same; there is room for two layers' weights."""
    module, (x,), graph = layers()
    more = np.flatnonzero(graph.op_param_bytes)
    copies = []
    for streamed in ([], more[[0, *range(1, 12, 2)]], more):
        placement = chosen(graph, 0, (1,))
        placement[streamed] = 2
        with emulated_gpu.emulated() as gpu, Runner(graph, THREE, placement) as runner:
            for i in range(4):
                if i == 2:
                    gpu.copies.clear()
                torch.testing.assert_close(runner(x + i), module(x + i))
        copies.append(gpu.copies["pinned"])
    assert copies[0] == copies[1] <= copies[2] - 2 * 12


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([None, 1.0, 1.5, 2.0, 3.0]),
    st.sampled_from([1, 3]),
    st.sampled_from([64, 50]),
)
def test_parameters_are_copied_in_the_order_that_is_predicted(seed, part, in_flight, width):
    """By random placements in calls, one after another, and several at a time in an order.

    The buffer is a multiple of the largest; of a width of 50 a weight, of 10,000 bytes, takes
    10,240 there.
    """
    module, x = Layers(6, width).eval(), torch.randn(3, width)
    graph = capture(module, (x,))
    seconds = np.ones((graph.num_ops, 2))
    profile = Profile(("cpu:0", "cuda:0"), seconds, 0 * seconds).for_cluster(THREE)
    problem = Problem(graph, THREE, profile, num_microbatches=4, max_in_flight=in_flight)
    room = None if part is None else int(part * problem.copied_bytes.max())
    host, card, streams = THREE.devices
    cluster = replace(THREE, devices=(host, card, replace(streams, buffer_bytes=room)))
    problem = replace(problem, cluster=cluster)
    placement = chosen(graph, seed, (0, 1, 2, 2))
    order = list_schedule(problem, placement, 4) if in_flight > 1 else None
    copied: list[int] = []
    launch = Streamed._views_at

    def logged(streamed: Streamed, op: int, begin: int) -> list[torch.Tensor]:
        copied.append(op)
        return launch(streamed, op, begin)

    with pytest.MonkeyPatch.context() as patch, emulated_gpu.emulated(copy_s=1e-4) as gpu:
        patch.setattr(Streamed, "_views_at", logged)
        how = {"priority": problem.priority, "schedule": order}
        with Runner(graph, cluster, placement, **how) as runner:
            items = [x + i for i in range(4)]
            results = map(runner, items) if order is None else runner.stream(items)
            for item, result in zip(items, results, strict=True):
                torch.testing.assert_close(result, module(item), rtol=1e-4, atol=1e-5)
    assert gpu.num_races == 0
    predicted = simulate(problem, placement, order).copies[:, 0].tolist()
    assert copied[: len(predicted)] == predicted  # then what comes for a call that was not made


@pytest.mark.parametrize(
    ("first", "advice"),
    [
        # A weight of 64 x 64 numbers, a bias, and the weight of the norm had been given.
        (3, "gave 16,896 .*: say pinned_bytes: 16896 of the CPU in the cluster's"),
        (0, "gave 0 .*: leave what streams out of the cluster's"),
    ],
)
def test_pinned_memory_that_the_machine_refuses_is_named_with_its_bytes(first, advice, monkeypatch):
    _, (x,), graph = layers()
    empty_like, given = torch.empty_like, []

    def refused(value: torch.Tensor, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            given.append(value)
            if len(given) > first:
                raise RuntimeError("CUDA error: out of memory")
        return empty_like(value, **options)

    some = f"100,352 bytes .* which this machine {advice}"
    with emulated_gpu.emulated(), Runner(graph, THREE, chosen(graph, 0, (2,))) as runner:
        monkeypatch.setattr(torch, "empty_like", refused)
        with pytest.raises(ClusterError, match=some):
            runner(x)


def test_parameters_are_copied_while_operators_run() -> None:
    """Six layers, whose weight takes 10 ms to come, and two kernels of 5 ms."""
    _, inputs, graph = layers()
    with emulated_gpu.emulated(kernel_s=5e-3, copy_s=5e-3, poison=False) as gpu:
        placement = chosen(graph, 0, (2,))
        with Runner(graph, THREE, placement, max_in_flight=2) as runner:
            list(runner.stream([inputs] * 2))
            gpu.copies.clear()
            list(runner.stream([inputs] * 3))
    # A weight and a bias of every linear layer, for each of three micro-batches; some of the norm.
    assert 3 * 2 * 6 <= gpu.copies["pinned"] <= 3 * 2 * 12 + 3 and not gpu.copies["pageable"]


def test_what_was_written_since_shows_in_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both runners, which have one page-locked copy of what the module holds."""
    module, (x,), graph = layers()
    pinned, locked, placement = weights.pinned, set(), chosen(graph, 0, (2,))

    def logged(*parameter: Any) -> torch.Tensor:
        copy = pinned(*parameter)
        locked.add(id(copy))
        return copy

    monkeypatch.setattr(weights, "pinned", logged)
    with (
        emulated_gpu.emulated(copy_s=1e-3),
        Runner(graph, THREE, placement) as runner,
        Runner(capture(module, (x[:2],)), THREE, placement) as other,
    ):
        for _ in range(3):
            torch.testing.assert_close(runner(x), module(x))
            torch.testing.assert_close(other(x[:2]), module(x[:2]))
            assert len(locked) == len([*module.parameters()])
            with torch.no_grad():
                module.layers[0].weight.mul_(1.5)  # which was copied ahead
                module.layers[-1].bias.add_(1.0)


def test_runs_that_copy_parameters_are_no_cuda_graphs_and_others_are() -> None:
    module, (x,), graph = layers(8)
    placement = chosen(graph, 0, (1,))
    placement[:4] = 2
    with emulated_gpu.emulated() as gpu, Runner(graph, THREE, placement) as runner:
        runner.cuda_graphs = True
        for i in range(5):
            torch.testing.assert_close(runner(x + i), module(x + i))
        why = "parameters are copied from host memory meanwhile"
        assert set(runner.not_graphed.values()) == {why}
    assert gpu.num_races == 0


def test_a_model_twice_as_large_as_the_gpu_stays_within_its_memory_as_predicted() -> None:
    module, x = Layers(16, 128).eval(), torch.randn(8, 128)
    problem, _ = half_of(module, x, 0.02)
    answer = planners.load("macro_search", evaluations=600)(problem)
    room = int(problem.memory_bytes[1])
    assert (answer.placement == 2).any() and (answer.placement == 1).any()
    plan = make_plan(problem, answer, planner="macro_search")
    with emulated_gpu.emulated(memory_bytes=room, copy_s=1e-4) as gpu:
        line = Executor(problem).run(answer.placement)
        assert line.peak_bytes is not None and line.peak_bytes[1] == gpu.peak[0] <= room
        predicted = simulate(problem, answer.placement).peak_bytes
        assert predicted is not None and 0.8 < gpu.peak[0] / predicted[1] <= 1.05
        with Plan.model_validate_json(plan.model_dump_json()).bind(module) as runner:
            torch.testing.assert_close(runner(x), module(x), rtol=1e-4, atol=1e-5)
        on_gpu = chosen(problem.graph, 0, (1,))
        with pytest.raises(torch.OutOfMemoryError), Runner(problem.graph, THREE, on_gpu) as runner:
            runner(x)


def test_optimize_runs_ways_one_after_another_where_memory_is_short(monkeypatch):
    """There is no room for two; and a CPU that others used while it was measured is asked again."""
    module, x = Layers(8, 128).eval(), torch.randn(8, 128)
    problem, _ = half_of(module, x, 0.02)
    search = planners.load("macro_search", evaluations=300)
    only = SimpleNamespace(load=lambda *_, **__: search, solve=planners.solve)
    monkeypatch.setattr(optimizing, "planners", only)
    monkeypatch.setattr(ways, "ROUNDS", 1)
    with (
        emulated_gpu.emulated(memory_bytes=int(problem.memory_bytes[1]), copy_s=1e-3),
        optimizing.fastest(problem, (x,), 0.5) as runner,
    ):
        assert {"cuda:0", "streamed/cuda:0"} <= {*optimizing.devices_of(runner.planned)}
        assert "cpu:0" in optimizing.devices_of(runner.plan) and "single" in runner.measured
        torch.testing.assert_close(runner(x), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("cluster", "stay"), [(THREE, False), (THREE.workers, True)])
def test_where_memory_is_short_nothing_of_another_plan_stays_on_the_gpu(cluster, stay):
    """Copies that lie scattered leave gaps, in which what comes has no place."""
    module, (x,), graph = layers()
    with emulated_gpu.emulated():
        with Runner(graph, cluster, chosen(graph, 0, (1,))) as runner:
            runner(x)
            there = [weakref.ref(copy) for copy in runner.loaded.values()]
        with Runner(graph, cluster, chosen(graph, 0, (0, 1))) as runner:
            torch.testing.assert_close(runner(x), module(x))
            assert any(ref() is not None for ref in there) == stay


def test_gpus_get_a_device_that_streams_and_others_do_not() -> None:
    with emulated_gpu.emulated(num_devices=2):
        cards = (replace(GPU, idle_w=50.0, busy_w=300.0), Device("cuda:1", "cuda"))
        more = with_streaming(Cluster("c", (CPU, *cards)))
        assert more.device_names[3:] == ("streamed/cuda:0", "streamed/cuda:1")
        assert more.worker.tolist() == [0, 1, 2, 1, 2] and more.streaming == [3, 4]
        ends = {(x.src, x.dst) for x in more.links}
        assert ends == {("cpu:0", f"streamed/cuda:{i}") for i in (0, 1)} and len(more.links) == 2
        assert all(1e6 < x.bandwidth_bytes_per_s < 1e13 for x in more.links)
        assert with_streaming(more) is more
    two = Cluster("two", (CPU, Device("cpu:1")))
    assert with_streaming(two) is two


def test_a_gpu_that_is_too_small_for_the_model_streams_and_is_measured_without(tmp_path):
    graph = layers()[2]
    seconds = np.random.default_rng(0).random((graph.num_ops, 2))
    half = Cluster("half", (CPU, replace(GPU, memory_bytes=int(graph.param_bytes.sum()) // 2)))
    profile = Profile(half.device_names, seconds, 0 * seconds)
    with emulated_gpu.emulated():
        cluster, wider = streaming_where_short(graph, half, profile)
        assert cluster.device_names == ("cpu:0", "cuda:0", "streamed/cuda:0")
        assert (wider.compute_s == seconds[:, [0, 1, 1]]).all()
        profile.save(cached_path(graph, half, tmp_path))
        loaded = load_or_measure(graph, cluster, folder=tmp_path)
        assert loaded.device_names == cluster.device_names
        large = Cluster("large", (CPU, replace(GPU, memory_bytes=2**40)))
        assert streaming_where_short(graph, large, profile) == (large, profile)
