"""Planners that build one placement, coarsening, and the synthetic families."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cluster import Cluster, Device, Link
from placement.graph import levels, topological_order
from placement.objective import Objective
from placement.planners import PlannerError, load
from placement.planners.antichain_dp import enumerate_ideals
from placement.planners.balanced_split import _orders
from placement.planners.critical_path_greedy import critical_path, key_operators, parts
from placement.planners.level_balance import balance
from placement.planners.m_sct import favourite_children
from placement.planners.peft import optimistic_cost
from placement.problem import Problem, ProblemError
from placement.profile import Profile
from placement.search import list_kernels, stages
from placement.search.coarsen import _Merger, coarsen
from placement.search.evaluation import Search
from placement.search.list_schedule import ListSchedule, produced_bytes, room_bytes
from placement.search.stages import topological_orders
from placement.simulator import score
from placement.testing import check_planner
from placement.workloads.synthetic import families
from tests import list_schedule as reference
from tests.planners.test_planners import least_bottleneck
from tests.problems import DIAMOND, altered, chain, random_problem, small_problem, written

CONSTRUCTIVE = (
    "antichain_dp",
    "balanced_split",
    "coarsened",
    "critical_path_first",
    "critical_path_greedy",
    "level_balance",
    "m_etf",
    "m_sct",
    "m_topo",
    "peft",
    "pipedream",
)


def make(compute_s, edges=(), *, send_s=0.0, **more) -> Problem:
    """One tensor per edge, which takes ``send_s`` (one number, or one per edge) to move."""
    sizes = np.broadcast_to(send_s, len(edges))
    tensors = [(a, s, [b]) for (a, b), s in zip(edges, sizes, strict=True)]
    some = {"link": (0.0, 1.0), "objective": "latency", "param_bytes": 0, "memory_bytes": 10**12}
    some |= {"num_microbatches": 16, "max_in_flight": 8}
    return small_problem(compute_s, tensors=tensors, **some | more)


def some_problem(seed: int, **options: Any) -> Problem:
    return random_problem(seed, grouped=True, unsupported=True, **options)


# --- what every planner promises ---------------------------------------------------------------


@pytest.mark.parametrize("name", CONSTRUCTIVE)
def test_keeps_the_contract_whatever_the_objective(name: str) -> None:
    # It compares all pairs of states: few of them, because what it promises needs no more.
    planner = load(name, **({"max_states": 60} if name == "antichain_dp" else {}))
    check_planner(planner, [some_problem(seed) for seed in range(8)])
    for objective in Objective:
        some = [some_problem(seed, objective=objective) for seed in range(4)]
        check_planner(planner, [altered(problem, {"memory_bytes": 2000}) for problem in some])


@pytest.mark.parametrize("name", CONSTRUCTIVE)
def test_memory_that_forces_a_split_is_obeyed(name: str) -> None:
    problem = make([[1, 5]] * 4, chain(4), param_bytes=100, memory_bytes=[210, 10**6])
    solution = load(name)(problem)
    assert np.isfinite(solution.value_s)
    assert (solution.placement == 0).sum() <= 2


# --- PEFT --------------------------------------------------------------------------------------

# The example of Arabnejad and Barbosa (2014): figure 1 with its table of costs.
PEFT_COMPUTE = [
    [22, 21, 36], [22, 18, 18], [32, 27, 43], [7, 10, 4], [29, 27, 35],
    [26, 17, 24], [14, 25, 30], [29, 23, 36], [15, 21, 8], [13, 16, 33],
]  # fmt: skip
PEFT_EDGES = [
    (1, 2, 17), (1, 3, 31), (1, 4, 29), (1, 5, 13), (1, 6, 7), (2, 8, 3), (2, 9, 30), (3, 7, 16),
    (4, 8, 11), (4, 9, 7), (5, 9, 57), (6, 8, 5), (7, 10, 9), (8, 10, 42), (9, 10, 7),
]  # fmt: skip


@pytest.mark.parametrize("name", ["heft", "peft", "busy_heft", "m_etf", "m_topo", "level_balance"])
def test_what_a_small_gpu_cannot_hold_is_streamed_past_it(name: str) -> None:
    """Of four operators with 10 bytes the GPU holds one beside two buffers; the CPU takes 99 s."""
    gpu = Device("gpu", "cuda", memory_bytes=30), Device("streamed", "cuda", streams="gpu")
    cluster = Cluster("capped", (Device("cpu"), *gpu), (Link("cpu", "streamed", 0.0, 5.0),))
    few = small_problem([[99, 1]] * 4, chain(4), param_bytes=10, objective="latency")
    seconds = few.profile.compute_s
    profile = Profile(("cpu", "gpu"), seconds, 0 * seconds).for_cluster(cluster)
    solution = load(name)(replace(few, cluster=cluster, profile=profile))
    assert solution.value_s <= 99 * 4
    if name in ("heft", "peft", "busy_heft"):
        assert solution.value_s == pytest.approx(3 * 2)  # copies; operators run meanwhile


def test_peft_reproduces_the_example_of_its_paper() -> None:
    edges = [(a - 1, b - 1) for a, b, _ in PEFT_EDGES]
    problem = make(PEFT_COMPUTE, edges, send_s=[cost for _, _, cost in PEFT_EDGES])
    # The paper's table of optimistic costs, and its schedules: PEFT 122, HEFT 133.
    table = [
        [64, 68, 86], [42, 39, 42], [27, 41, 43], [42, 39, 50], [28, 37, 28],
        [42, 39, 44], [13, 16, 22], [13, 16, 33], [13, 16, 20], [0, 0, 0],
    ]  # fmt: skip
    assert optimistic_cost(problem).tolist() == table
    assert load("peft")(problem).stats["makespan_s"] == 122
    assert load("heft")(problem).stats["makespan_s"] == 133


# --- Baechi ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6))
def test_what_is_known_of_all_devices_at_once_is_what_is_known_of_each(seed: int) -> None:
    problem = some_problem(seed)
    g, rng = problem.graph, np.random.default_rng(seed)
    src = rng.integers(0, problem.num_devices, g.num_tensors)
    table = reference.transfers_s(problem, np.arange(g.num_tensors), src)
    for t, d in np.ndindex(table.shape):
        assert table[t, d] == problem.transfer_s(t, int(src[t]), d)

    schedule = ListSchedule(problem, activations=1)
    placed: list[tuple[int, int]] = []
    for group in range(g.num_groups):
        here = [[x for x, e in [*placed, (group, d)] if e == d] for d in range(problem.num_devices)]
        need = [
            g.param_bytes[np.unique(g.param_use[np.isin(g.group[g.param_use_op], x)])].sum()
            + produced_bytes(problem)[x].sum()
            for x in here
        ]
        can = np.flatnonzero(np.isfinite(problem.group_compute_s[group]))
        room = [d for d in can if need[d] <= room_bytes(problem)[d]]
        assert np.flatnonzero(schedule.able(group)).tolist() == (room or can.tolist())
        placed.append((group, int(rng.choice(can))))
        schedule.hold(*placed[-1])


@given(seed=st.integers(0, 10**6))
def test_gaps_are_those_between_operators(seed: int) -> None:
    problem = some_problem(seed)  # half of them with small whole seconds: many operators touch
    schedule, rng = reference.ListSchedule(problem), np.random.default_rng(seed)
    busy: list[list[tuple[float, float]]] = [[] for _ in range(problem.num_devices)]
    for op in range(problem.num_ops):
        able = schedule.able(op)
        starts = schedule.starts_s(op, able)
        for d, start in zip(able, starts, strict=True):
            free, length = schedule.ready_s(op)[d], problem.compute_s[op, d]
            for begin, end in sorted(busy[d]):
                if end > free and begin < free + length:
                    free = end
                elif begin >= free + length:
                    break
            assert start == free
        k = int(rng.integers(len(able)))
        schedule.place(op, int(able[k]), float(starts[k]))
        end = float(schedule.finish_s[op])
        busy[able[k]] += [(float(starts[k]), end)] if end > starts[k] else []


def larger_problem(seed: int) -> tuple[Problem, np.random.Generator]:
    rng = np.random.default_rng(seed)
    num_ops, options = int(rng.integers(1, 60)), rng.random(2) < 0.5
    grouped, unsupported = options.tolist()
    return random_problem(seed, num_ops, grouped=grouped, unsupported=unsupported), rng


@given(seed=st.integers(0, 10**6), activations=st.integers(0, 1))
def test_the_kernel_places_as_the_reference_does(seed: int, activations: int) -> None:
    problem, rng = larger_problem(seed)
    key = rng.integers(0, 5, problem.num_ops).astype(float)
    order = topological_order(problem.graph.edges, problem.num_ops, key)
    extra_s = rng.integers(0, 3, problem.compute_s.shape).astype(float)
    wanted = rng.integers(-1, problem.num_devices, problem.num_ops).astype(np.int32)
    ours, expected = (x(problem, activations) for x in (ListSchedule, reference.ListSchedule))
    ours.place(order[:5], extra_s, wanted)  # begun, then gone on with
    ours.place(order[5:], extra_s, wanted)
    for op in order:
        if wanted[op] in expected.able(op):
            start = expected.starts_s(op, wanted[op : op + 1].astype(np.intp))
            expected.place(op, int(wanted[op]), float(start[0]))
        else:
            expected.place_earliest(op, extra_s[op])
    assert ours.choice.tolist() == expected.choice.tolist()
    assert ours.finish_s.tolist() == expected.finish_s.tolist()
    assert ours.makespan_s == expected.makespan_s


@given(seed=st.integers(0, 10**6), activations=st.integers(0, 1))
def test_the_kernel_takes_first_what_the_reference_does(seed: int, activations: int) -> None:
    problem, rng = larger_problem(seed)
    favourite = np.full(problem.num_ops, -1, np.int32)
    for producer, consumer in problem.graph.edges[rng.random(len(problem.graph.edges)) < 0.3]:
        favourite[producer] = consumer
    ours = ListSchedule(problem, activations)
    ours.place_first_to_start(problem.upward_rank_s, favourite)
    expected = reference.earliest_task_first(problem, activations, favourite)
    assert ours.choice.tolist() == expected.choice.tolist()
    assert ours.finish_s.tolist() == expected.finish_s.tolist()


@given(seed=st.integers(0, 10**6), activations=st.integers(0, 1))
def test_the_kernel_balances_as_the_reference_does(seed: int, activations: int) -> None:
    problem, rng = larger_problem(seed)
    level = levels(problem.graph.edges, problem.num_ops)
    for team in (None, rng.random((int(level.max()) + 1, problem.num_devices)) < 0.5):
        expected = reference.balance(problem, level, activations, team)
        assert balance(problem, level, activations, team).tolist() == expected.tolist()


def test_each_kernel_is_compiled_once() -> None:
    # For another type of the same number it would be, within somebody's budget.
    columns = random_problem(1)  # arrays that lie in memory as they should not
    columns = altered(columns, compute_s=np.asfortranarray(columns.compute_s))
    for problem in (random_problem(0), columns, make([[1.0]] * 3, chain(3))):
        for name in ("heft", "peft", "m_topo", "m_etf", "level_balance"):
            load(name)(problem)
    for kernel in ("place_in_order", "place_first_to_start", "balance_levels", "gap", "hold"):
        assert len(getattr(list_kernels, kernel).signatures) <= 1, kernel


def test_m_topo_fills_one_device_after_another() -> None:
    # 6 operators of 10 bytes on 2 devices: a share is 60 / 2 + 10 = 40 bytes, 4 operators.
    problem = make([[1, 1]] * 6, chain(6), param_bytes=10)
    assert load("m_topo")(problem).placement.tolist() == [0, 0, 0, 0, 1, 1]
    # d0 has room for two only.
    problem = make([[1, 1]] * 6, chain(6), param_bytes=10, memory_bytes=[20, 100])
    assert load("m_topo")(problem).placement.tolist() == [0, 0, 1, 1, 1, 1]


def test_m_etf_takes_what_can_start_first() -> None:
    #   d0 | op0 0-2 | op1 2-5 |
    #   d1 | ......... op2 3-6 |    (its input takes 1 s)
    problem = make([[2, 2], [3, 3], [3, 3]], [(0, 1), (0, 2)], send_s=1)
    solution = load("m_etf")(problem)
    assert solution.placement.tolist() == [0, 0, 1]
    assert solution.stats["makespan_s"] == 6
    # At 4 s of transfer d0 can start both first: it is free at 5, the input arrives at 6.
    far = make([[2, 2], [3, 3], [3, 3]], [(0, 1), (0, 2)], send_s=4)
    assert load("m_etf")(far).placement.tolist() == [0, 0, 0]


def test_m_sct_waits_for_the_favourite_child() -> None:
    # op0 (1 s) feeds op1 and op2 (5 s each); the edge to op2 is dear, that to op1 costs 1 s.
    # The program balances 1 * x1 = 20 * x2 with x1 + x2 = 1: x2 = 1/21 makes op2 the favourite.
    problem = make([[1, 1], [5, 5], [5, 5]], [(0, 1), (0, 2)], send_s=[1, 20])
    assert favourite_children(problem).tolist() == [2, -1, -1]
    #   d0 | op0 0-1 | op2 1-6 |
    #   d1 | ......... op1 2-7 |
    solution = load("m_sct")(problem)
    assert solution.placement.tolist() == [0, 1, 0]
    assert solution.stats["makespan_s"] == 7
    assert solution.stats["favourites"] == 1


@pytest.mark.parametrize("together", [False, True])
def test_an_operator_waits_for_no_device_that_cannot_run_it(together: bool) -> None:
    # a and b feed c, which d0 waits for; a feeds e too, which may run on d0 and d1. Links between
    # them take 1 s, those to d2, where z alone can run, 1000 s.
    #   d0 | a 0-1 | . | e 2-3 |      e arrives on d1 at 2; if it has to be with a, d0 runs it at 1
    #   d1 | b 0-2000          | c 2000-2001
    no = np.inf
    seconds = [[1, no, no], [no, 2000, no], [1, 1, no], [1, 1, no], [no, no, 1]]
    group = [0, 1, 2, 0, 3] if together else None
    problem = make(seconds, [(0, 2), (1, 2), (0, 3)], group=group)
    far = {"latency_s": lambda x: 1000.0 if "d2" in (x.src, x.dst) else 1.0}
    problem = altered(problem, links=far)
    schedule = ListSchedule(problem)
    schedule.place_first_to_start(problem.upward_rank_s, np.array([2, -1, -1, -1, -1], np.int32))
    assert schedule.finish_s.tolist() == [1, 2000, 2001, 2 if together else 3, 1]
    assert schedule.choice[problem.graph.group].tolist() == [0, 1, 1, 0, 2]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_favourites_are_edges_and_unique(seed: int) -> None:
    problem = some_problem(seed)
    favourite = favourite_children(problem, threshold=0.5)
    chosen = [(i, int(j)) for i, j in enumerate(favourite) if j >= 0]
    assert set(chosen) <= {tuple(e) for e in problem.graph.edges.tolist()}
    assert len({j for _, j in chosen}) == len(chosen)


# --- list and level heuristics -----------------------------------------------------------------


def test_critical_path_first_keeps_the_path_together() -> None:
    # op0 -> op1 -> op3 is the path (1 + 9 + 1); d1 runs it in 5.5 s. op2 goes elsewhere.
    problem = make([[1, 0.5], [9, 4.5], [2, 2], [1, 0.5]], DIAMOND)
    solution = load("critical_path_first")(problem)
    assert solution.placement.tolist() == [1, 1, 0, 1]
    assert solution.stats["critical_ops"] == 3
    assert solution.value_s == 5.5


def test_level_balance_levels_and_balance() -> None:
    # Level 0: op0; level 1: op1..op4 (4, 3, 2, 1 s); level 2: op5.
    edges = [(0, n) for n in range(1, 5)] + [(n, 5) for n in range(1, 5)]
    problem = make([[1, 1], [4, 4], [3, 3], [2, 2], [1, 1], [1, 1]], edges)
    assert levels(problem.graph.edges, problem.num_ops).tolist() == [0, 1, 1, 1, 1, 2]
    placement = load("level_balance")(problem).placement
    load_s = np.bincount(placement[1:5], weights=[4, 3, 2, 1], minlength=2)
    assert load_s.tolist() == [5, 5]  # 4 + 1 and 3 + 2


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30)
def test_balanced_split_is_optimal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = make(rng.random((6, 3)) + 0.1, chain(6))
    split_s = load("balanced_split")(problem).stats["split_s"]
    assert split_s == pytest.approx(least_bottleneck(problem), rel=1e-6)


# --- dynamic programs --------------------------------------------------------------------------


def test_orders_of_devices_that_differ() -> None:
    assert _orders(np.array([0, 0, 1], np.int32)) == [(0, 1, 2), (0, 2, 1), (2, 0, 1)]
    assert len(_orders(np.arange(5, dtype=np.int32))) == 120
    assert _orders(np.arange(6, dtype=np.int32)) == [(0, 1, 2, 3, 4, 5)]
    # Of 64 devices permutations are not even counted.
    assert _orders(np.zeros(64, np.int32)) == [tuple(range(64))]


def test_pipedream_counts_the_transfer_as_a_stage() -> None:
    # 1 2 3 | 4 is balanced best (6); over that cut flow 7 s, over the one before 5 s: 7 either way
    # for the stages 3 | 7, so the best slowest is min(max(6, 7), max(3, 5, 7)) = 7.
    compute_s = [[1, 1], [2, 2], [3, 3], [4, 4]]
    dear = make(compute_s, chain(4), send_s=[0, 5, 7], objective="period")
    assert load("pipedream")(dear).stats["bottleneck_s"] == 7
    free = make(compute_s, chain(4), objective="period")
    for name in ("pipedream", "contiguous_dp"):
        solution = load(name)(free)
        assert solution.stats["bottleneck_s"] == 6 == pytest.approx(solution.value_s)
        assert solution.placement.tolist() == [0, 0, 0, 1]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30)
def test_pipedream_and_antichain_dp_on_a_chain_are_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    work = rng.random((6, 1)) + 0.1
    send_s = rng.integers(0, 3, 5)
    problem = make(np.repeat(work, 3, axis=1), chain(6), send_s=send_s, objective="period")
    for name in ("pipedream", "antichain_dp"):
        solution = load(name)(problem)
        assert solution.stats["bottleneck_s"] == pytest.approx(least_bottleneck(problem)), name
    assert solution.stats["num_states"] == 7
    assert solution.stats["linearised"] is False


def test_states_are_the_downward_closed_sets() -> None:
    # A diamond 0 -> {1, 2} -> 3: {}, 0, 01, 02, 012, 0123.
    edges = np.array(DIAMOND, np.int32)
    ideals = enumerate_ideals(edges, 4, limit=100)
    sets = ["".join(map(str, np.flatnonzero(row))) for row in ideals]
    assert sets == ["", "0", "01", "02", "012", "0123"]
    assert enumerate_ideals(edges, 4, limit=5) is None
    # k independent operators have 2 ** k states.
    assert len(enumerate_ideals(np.zeros((0, 2), np.int32), 7, limit=128)) == 128


def test_antichain_dp_cuts_across_branches() -> None:
    # Two chains 0 2 4 and 1 3 5 (interleaved numbers); a transfer would take 9 s. No cut of the
    # numbering avoids transfers, but one chain per device does.
    problem = make([[1, 1]] * 6, [(0, 2), (2, 4), (1, 3), (3, 5)], send_s=9, objective="period")
    solution = load("antichain_dp")(problem)
    assert solution.stats["bottleneck_s"] == 3
    assert len(set(solution.placement[::2])) == len(set(solution.placement[1::2])) == 1
    # Bounded, it says that only the prefixes of the numbering are left, and is worse.
    bounded = load("antichain_dp", max_states=8)(problem)
    assert bounded.stats["linearised"] is True
    assert bounded.stats["num_states"] == 7
    assert bounded.stats["bottleneck_s"] == 6


def test_antichain_dp_merges_tasks_before_it_falls_back_to_prefixes() -> None:
    # 8 chains of 8 have 9 ** 8 downward-closed sets. Merged to whole chains they have 2 ** 8,
    # and two devices share them evenly without a transfer; prefixes alone cut most chains.
    edges = [(a, a + 8) for a in range(56)]
    problem = make([[1, 1]] * 64, edges, send_s=100, objective="period")
    merged = load("antichain_dp", max_states=600)(problem)
    assert merged.stats["linearised"] is False
    assert merged.stats["num_tasks"] < 64 and merged.stats["num_states"] <= 600
    assert merged.stats["bottleneck_s"] == 32
    assert load("antichain_dp", max_states=20)(problem).stats["linearised"] is True
    # A sixteenth of the 2 s that 2,000 states take is for a sixteenth of the pairs: 500 states.
    assert load("antichain_dp", seconds=0.125)(problem).stats["num_states"] <= 500


def test_backward_operators_stay_with_their_forward_ones() -> None:
    # f0 f1 f2 then b2 b1 b0, each pair colocated: stages are runs of pairs.
    problem = make([[1, 1]] * 6, chain(6), group=[0, 1, 2, 2, 1, 0], objective="period")
    for name in ("antichain_dp", "pipedream", "balanced_split", "contiguous_dp"):
        solution = load(name)(problem)
        assert sorted(np.bincount(solution.placement[:3], minlength=2)) == [1, 2], name
    assert solution.stats["bottleneck_s"] == 4


# --- critical-path greedy ----------------------------------------------------------------------


def test_parts_end_at_key_operators() -> None:
    # 0 - 1 - 2 -> {3 - 4, 5} -> 6; 4 is compute-dense, 2 and 6 branch.
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (2, 5), (4, 6), (5, 6)]
    problem = make([[1], [1], [1], [1], [99], [1], [1]], edges)
    key = key_operators(problem, dense=0.8)
    assert np.flatnonzero(key).tolist() == [2, 4, 6]
    # {0, 1}, {2}, {3}, {4}, {5}, {6}: a key operator begins a part of its own.
    assert parts(problem, key).tolist() == [0, 0, 1, 2, 3, 4, 5]


def test_critical_path_passes_through_transfers_and_busy_devices() -> None:
    #   d0 | op0 0-1 | op2 1-4 | op1 4-7 |
    #   d1 | .......................... op3 7-8 |   (its input takes 3 s)
    problem = make([[1, 1], [3, 3], [3, 3], [1, 1]], [(0, 1), (0, 2), (2, 3)], send_s=3)
    assert critical_path(problem, np.array([0, 0, 0, 1], np.int32)) == [3, 2, 0]
    assert score(problem, [[0, 0, 0, 1]])[0] == 8
    #   d0 | op0 0-1 | op2 1-4 | op1 4-7 | op3 7-8 |   (op3 waits for the device)
    assert critical_path(problem, np.array([0, 0, 0, 0], np.int32)) == [3, 1, 2, 0]


def test_critical_path_greedy_moves_a_branch_away() -> None:
    # Two equal branches of 10 s: on one device 22 s. On two the transfers of 1 s overlap:
    #   d1 | op0 0-1 | op2 1-11 |
    #   d0 | ......... op1 2-12 | op3 12-13 |
    problem = make([[1, 1], [10, 10], [10, 10], [1, 1]], DIAMOND, send_s=1)
    solution = load("critical_path_greedy")(problem)
    assert solution.value_s == 13
    assert solution.stats["num_moved"] >= 1
    assert solution.value_s <= load("single_device")(problem).value_s


def test_critical_path_greedy_gives_up_what_it_cannot_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at placements takes 0.1 s of 2: it walks on where its pace leads there."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    costs = Search.costs

    def slowly(self: Search, choices: Any) -> Any:
        now[0] += 0.1
        return costs(self, choices)

    monkeypatch.setattr(Search, "costs", slowly)
    rng = np.random.default_rng(0)
    problem = make(rng.random((60, 3)), [(i, i + 4) for i in range(56)])

    def walk(beat: float | None) -> tuple[float, float]:
        began = now[0]
        value = load("critical_path_greedy", beat=beat, seconds=2)(problem).value_s
        return value, now[0] - began

    value, seconds = walk(None)
    assert seconds >= 2
    assert walk(2 * value) == (value, pytest.approx(seconds))
    early, seconds = walk(0.0)
    assert early > value, "it fell further after a quarter"
    assert 0.5 < seconds < 0.8, "a quarter, and the look that passed it"


# --- METIS and the expert ----------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("pymetis") is None, reason="pymetis is not installed")
def test_metis_cuts_the_light_edge() -> None:
    # Two cliques of four, joined by one light edge.
    edges = [*itertools.combinations(range(4), 2), *itertools.combinations(range(4, 8), 2), (3, 4)]
    problem = make([[1, 1]] * 8, edges, send_s=[9] * 12 + [1])
    check_planner(load("metis"))
    placement = load("metis")(problem).placement
    assert len(set(placement[:4])) == len(set(placement[4:])) == 1
    assert placement[0] != placement[7]


def test_expert_reads_names_and_numbers(tmp_path) -> None:
    problem = make([[1, 2]] * 3, chain(3))
    file = written(tmp_path / "split.json", {"op0": "d0", "1": "d1", "op2": "d1"})
    solution = load("expert", file=str(file))(problem)
    assert solution.placement.tolist() == [0, 1, 1]
    assert solution.value_s == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "expected an object"),
        ('{"op9": "d0"}', "has no operator 'op9'"),
        ('{"op0": "tpu"}', r"no device 'tpu'; devices are \['d0', 'd1'\]"),
        ('{"op0": ["d0"]}', "no device"),
        ('{"op0": "d0"}', r"2 operators have no device, e.g. \['op1', 'op2'\]"),
        ('{"op0": "d0", "0": "d1", "1": "d0", "2": "d0"}', "given twice"),
    ],
)
def test_expert_names_what_is_wrong(tmp_path, text: str, message: str) -> None:
    file = written(tmp_path / "split.json", text)
    with pytest.raises(PlannerError, match=message):
        load("expert", file=str(file))(make([[1, 1]] * 3, chain(3)))


def test_expert_needs_a_file_and_a_possible_split(tmp_path) -> None:
    problem = make([[1, 1]] * 3, chain(3), group=[0, 0, 1])
    with pytest.raises(PlannerError, match=r"file=split\.json"):
        load("expert")(problem)
    with pytest.raises(PlannerError, match="cannot be read"):
        load("expert", file=str(tmp_path / "none.json"))(problem)
    file = written(tmp_path / "split.json", '{"op0": "d0", "op1": "d1", "op2": "d1"}')
    with pytest.raises(ProblemError, match="colocation group"):
        load("expert", file=str(file))(problem)


# --- coarsening --------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), num_ops=st.integers(1, 12))
def test_coarsening_closes_no_cycle_and_keeps_what_counts(seed: int, num_ops: int) -> None:
    problem = some_problem(seed)
    coarse, label = coarsen(problem, num_ops)  # ``OpGraph`` refuses edges that point backwards
    g = problem.graph
    assert sorted(set(label)) == list(range(coarse.num_ops))
    assert coarse.num_ops >= min(num_ops, problem.num_ops)
    assert (label[g.edges[:, 0]] <= label[g.edges[:, 1]]).all()
    for d in range(problem.num_devices):
        total = np.bincount(label, problem.compute_s[:, d], minlength=coarse.num_ops)
        np.testing.assert_allclose(coarse.compute_s[:, d], total, rtol=1e-12)
    # Whatever the coarse problem allows, the problem allows; loads are the same.
    able = np.isfinite(coarse.group_compute_s)
    for device in range(problem.num_devices):
        choice = np.where(able[:, device], device, able.argmax(axis=1))
        placement = choice[coarse.graph.group][label]
        assert problem.check_placement(placement).dtype == np.int32
        held = coarse.resident_bytes_on(choice[coarse.graph.group])
        assert np.array_equal(problem.resident_bytes_on(placement), held)


@given(seed=st.integers(0, 10**6), width=st.integers(1, 6), depth=st.integers(1, 6))
@settings(max_examples=60)
def test_layered_graphs_stay_acyclic_at_every_size(seed: int, width: int, depth: int) -> None:
    # Complete bipartite layers: no edge is a chain, so every merge relies on the levels.
    rng = np.random.default_rng(seed)
    n = width * depth
    edges = [(a, b) for a in range(n - width) for b in range((a // width + 1) * width, n)]
    edges = [e for e in edges if e[1] // width == e[0] // width + 1 or rng.random() < 0.1]
    problem = make(rng.random((n, 2)), edges, send_s=rng.integers(0, 9, len(edges)))
    for num_ops in range(1, n + 1):
        assert coarsen(problem, num_ops)[0].num_ops == num_ops


def test_what_is_merged_first() -> None:
    # op1 is free of cost; op2 and op3 share a group; the edge 4 -> 5 is the heaviest.
    seconds = [[3, 3], [0, 0], [3, 3], [3, 3], [3, 3], [3, 3]]
    problem = make(seconds, chain(6), send_s=[1, 1, 1, 1, 9], group=[0, 1, 2, 2, 3, 4])
    assert coarsen(problem, 6)[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert coarsen(problem, 5)[1].tolist() == [0, 0, 1, 2, 3, 4]
    assert coarsen(problem, 4)[1].tolist() == [0, 0, 1, 1, 2, 3]
    coarse, label = coarsen(problem, 3)
    assert label.tolist() == [0, 0, 1, 1, 2, 2]
    assert coarse.compute_s[:, 0].tolist() == [3, 6, 6]
    # The tensor 4 -> 5 is inside now: it weighs nothing between operators.
    assert coarse.graph.tensor_bytes.tolist() == [0, 1, 0, 1, 0]
    assert coarse.profile.workspace_bytes.tolist() == [1, 1, 9]


@pytest.mark.parametrize("leaves, num_ops, hub", [(300, 295, 7), (1200, 600, 3)])
def test_edges_are_followed_where_that_takes_few_rounds(leaves, num_ops, hub):
    # One leaf joins the hub in a round: 6 rounds are few, 601 are not, so leaves pair up soon.
    problem = make(np.ones((leaves + 1, 2)), [(0, i + 1) for i in range(leaves)])
    coarse, label = coarsen(problem, num_ops)
    assert coarse.num_ops == num_ops
    assert (label == label[0]).sum() == hub


def test_a_merged_group_keeps_a_device() -> None:
    # op0 runs on d0 only, op1 on d1 only: they are never one operator.
    problem = make([[1, np.inf], [np.inf, 1]], chain(2))
    assert coarsen(problem, 1)[0].num_ops == 2
    # Nor where no device has room for both.
    problem = make([[1, 1]] * 2, chain(2), param_bytes=100, memory_bytes=150)
    assert coarsen(problem, 1)[0].num_ops == 2
    with pytest.raises(ProblemError, match="num_ops = 0"):
        coarsen(problem, 0)


@pytest.mark.parametrize("inwards", [False, True])
def test_a_star_is_merged_in_few_rounds(inwards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every edge ends at the hub, which can have one partner in a round: leaves pair up."""
    n, rounds = 600, []
    hub = n - 1 if inwards else 0
    edges = [(min(i, hub), max(i, hub)) for i in range(n) if i != hub]
    problem = small_problem(np.ones((n, 2)), edges)
    one = _Merger.round
    monkeypatch.setattr(_Merger, "round", lambda *args: rounds.append(1) or one(*args))
    coarse, label = coarsen(problem, 20)
    assert coarse.num_ops == 20 and len(rounds) < 40
    # The hub did not swallow the leaves.
    assert np.bincount(label)[label[hub]] < 100


def test_coarsened_runs_any_planner() -> None:
    problem = some_problem(11)
    for name in ("heft", "single_device", load("antichain_dp")):
        solution = load("coarsened", planner=name, num_ops=5)(problem)
        assert solution.stats["num_ops"] <= problem.num_ops
    # Nothing to merge: the planner's own answer.
    whole = load("coarsened", planner="peft", num_ops=100)(problem)
    assert whole.value_s == load("peft")(problem).value_s
    check_planner(load("coarsened", planner="local_search", num_ops=4, evaluations=30))
    with pytest.raises(PlannerError, match="evaluations = 1"):
        load("coarsened", evaluations=1)(problem)


# --- synthetic families ------------------------------------------------------------------------


@pytest.mark.parametrize("name", families())
def test_families_are_problems_that_repeat(name: str) -> None:
    first, again, other = (families()[name](seed) for seed in (0, 0, 1))
    assert 100 <= first.num_ops <= 2000
    assert first.graph.fingerprint == again.graph.fingerprint
    assert np.array_equal(first.compute_s, again.compute_s)
    assert not np.array_equal(first.compute_s[:100], other.compute_s[:100])
    # Connected enough: nothing but entries lacks a producer, every tensor but outputs is used.
    assert len(first.graph.edges) >= first.num_ops * 0.9


def test_families_are_twenty_and_have_the_ccr_they_state() -> None:
    assert len(families()) == 20
    for name, family in families().items():
        problem = family(3)
        produced = problem.graph.tensor_src >= 0
        speed = np.resize(family.speeds, family.num_devices)
        work_s = (problem.compute_s * speed).mean()
        send_s = problem.mean_transfer_s[produced].mean() - 1e-6
        assert send_s / work_s == pytest.approx(family.ccr, rel=0.25), name


@pytest.mark.parametrize("name", ["towers", "reduction_tree"])
def test_more_orders_are_cut_and_the_best_is_kept(name: str) -> None:
    problem = families()[name](0)
    one, eight = (load("contiguous_dp", orders=k, candidates=64)(problem) for k in (1, 8))
    assert eight.value_s < one.value_s
    # With one evaluation it is the cheapest by the program's arithmetic that is simulated.
    first = load("contiguous_dp", orders=8, evaluations=1)(problem)
    assert first.value_s < one.value_s and first.stats["evaluations"] == 1
    again = load("contiguous_dp", orders=8, candidates=64)(problem)
    assert np.array_equal(eight.placement, again.placement)


def test_orders_without_a_split_end_with_the_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, inf = [], np.inf
    split = stages.splits
    monkeypatch.setattr(stages, "splits", lambda *args: calls.append(0) or split(*args))
    # Each device refuses every second operator: no order of the chain has two stages.
    refused = make([(1, inf), (inf, 1), (1, inf), (inf, 1)], [(0, 1), (1, 2), (2, 3)])
    answer = load("contiguous_dp", orders=8, seconds=1e-9)(refused)
    assert (len(calls), answer.placement.tolist()) == (2, [0, 1, 0, 1])  # with and without limits


@settings(max_examples=30)
@given(seed=st.integers(0, 100_000))
def test_orders_are_topological(seed: int) -> None:
    problem = random_problem(seed, grouped=False)
    for position in topological_orders(problem, 3, seed):
        assert sorted(position.tolist()) == list(range(problem.graph.num_groups))
        at = position[problem.graph.group]
        assert all(at[a] < at[b] for a, b in problem.graph.edges.tolist())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_with_busy_channels_heft_knows_when_it_ends(seed: int) -> None:
    """Its own schedule cannot be shorter than without; what the rule sees is legal."""
    problem = some_problem(seed, objective="latency")
    free, busy = (load("heft", busy=x, look_ahead=0.25)(problem) for x in (False, True))
    problem.check_placement(busy.placement)
    if np.array_equal(free.placement, busy.placement):
        assert busy.stats["makespan_s"] >= free.stats["makespan_s"] * (1 - 1e-9)
    if not problem.contention:
        assert np.array_equal(free.placement, busy.placement)
