from __future__ import annotations

import itertools
import re
import sys
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from placement import importers
from placement.bounds import lower_bounds
from placement.cluster import Cluster, Device, Link
from placement.objective import Objective
from placement.planners import PlannerError, find, load, names
from placement.planners.phase_search import unrolled
from placement.problem import Problem, ProblemError, Solution, host_of
from placement.search.evaluation import (
    FromStart,
    Position,
    Search,
    can_move,
    cannot_fit,
    device_classes,
    distinct_pairs,
    moves,
)
from placement.search.stages import Stages, merge_blocks
from placement.simulator import score
from placement.testing import check_planner
from placement.tools.limits import MOST
from tests.problems import (
    altered,
    chain,
    every_placement,
    graph_of,
    problem_on,
    random_problem,
    small_problem,
    with_twins,
)

# Not these: they need a file or an optional package, take seconds for each proof, or are for one
# objective; each has contract tests of its own.
ELSEWHERE = ("expert", "metis", "cp_sat", "mip", "coarsened", "order_search", "policy")
ELSEWHERE += ("data_parallel", "phase_search")  # they need more than one phase
PLANNERS = [name for name in names() if name not in ELSEWHERE]
SEARCHES = [name for name in PLANNERS if issubclass(find(name), FromStart)]


def make(compute_s, edges=(), **more) -> Problem:
    """``edges`` are (producer, consumer); links between all devices, which send a byte a second."""
    some = {"memory_bytes": 10**12, "num_microbatches": 32, "max_in_flight": 8, "param_bytes": 0}
    return small_problem(compute_s, edges, **{"link": (0.0, 1.0)} | some | more)


def random_small(seed: int, num_ops: int | None = None, **settings) -> Problem:
    """At most 6 operators on 2 or 3 unlike devices, with groups, skips and slow links."""
    rng = np.random.default_rng(seed)
    n, d = num_ops or int(rng.integers(1, 7)), int(rng.integers(2, 4))
    compute_s = rng.random((n, d)) + 0.1
    if rng.random() < 0.5:
        compute_s[rng.random((n, d)) < 0.2] = np.inf
        compute_s[:, 0] = np.where(np.isinf(compute_s).any(axis=1), 1.0, compute_s[:, 0])
    edges = [(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.5]
    drawn = {"tensor_bytes": rng.integers(0, 40, n)}
    drawn |= {"link": (0.01, 100.0, bool(rng.random() < 0.5)), "max_in_flight": 2}
    drawn |= {"group": rng.integers(0, n, n) if rng.random() < 0.5 else None}
    drawn |= {"objective": ["period", "latency"][int(rng.integers(2))]}
    return make(compute_s, edges, **drawn | settings)


def small(seed: int, **settings) -> Problem:
    return random_small(seed, objective="max_load", **settings)


def quick(name: str, **more: Any):
    """The planner with a budget that keeps the tests short; ``more`` is for searches."""
    options = {"evaluations": 60, **more} if name in SEARCHES else {}
    options |= {"max_states": 60} if name == "antichain_dp" else {}
    return load(name, **options)


# --- what every planner promises ---------------------------------------------------------


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_keeps_the_contract(name: str) -> None:
    check_planner(quick(name))
    begun = quick(name, start="single_device")  # best_of, the default, has its own turn here
    check_planner(begun, [random_small(seed) for seed in range(10)])
    tight = [random_small(seed, param_bytes=10, memory_bytes=60) for seed in range(10)]
    check_planner(begun, tight)


@pytest.mark.parametrize("name", ["single_device", "contiguous_dp", "best_of", *SEARCHES])
@pytest.mark.parametrize("evaluations", [1, 2, 7])
def test_a_small_budget_is_obeyed(name: str, evaluations: int) -> None:
    check_planner(load(name, evaluations=evaluations))


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_nothing_beats_brute_force_and_bounds_hold(seed: int) -> None:
    problem = random_small(seed)
    best = score(problem, every_placement(problem)).min()
    assert lower_bounds(problem)[problem.objective] <= best * (1 + 1e-9)
    for name in (*PLANNERS, "coarsened"):
        solution = quick(name, start="single_device")(problem)
        assert solution.value_s >= best * (1 - 1e-9), name
        assert (solution.lower_bound_s or 0.0) <= best * (1 + 1e-9), name


BOLD = {"simulated_annealing": {"accept": 0.3}, "cross_entropy": {"trust": 0.0, "rate": 0.1}}


@pytest.mark.parametrize("name", ["local_search", "simulated_annealing", "brkga", "cross_entropy"])
@pytest.mark.parametrize("start", ["best_of", "random"])
def test_searches_find_the_optimum_of_small_problems(name: str, start: str) -> None:
    for seed in range(5):
        problem = random_small(seed, num_ops=5)
        best = score(problem, every_placement(problem)).min()
        solution = load(name, start=start, evaluations=2000, **BOLD.get(name, {}))(problem)
        assert solution.value_s == pytest.approx(best), seed
        assert name not in ("brkga", "cross_entropy") or solution.stats["generations"] > 10


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), order=st.permutations(range(3)))
def test_renaming_devices_changes_no_value(seed: int, order: list[int]) -> None:
    problem = random_small(seed)
    order = [d for d in order if d < problem.num_devices]
    cluster = Cluster("renamed", tuple(problem.cluster.devices[d] for d in order))
    renamed = replace(problem, cluster=cluster, profile=problem.profile.for_cluster(cluster))
    for name in ("single_device", "heft"):  # a dynamic program breaks ties by number
        if name == "single_device" and np.isinf(problem.compute_s).any():
            continue  # "the first device that can" depends on the order
        value = load(name)(problem).value_s
        assert load(name)(renamed).value_s == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("objective", ["period", "max_load", "piecewise_latency"])
def test_every_search_takes_a_start_a_seed_and_both_budgets(name: str, objective: str) -> None:
    problem = random_small(5, num_ops=6, objective=objective)
    for start in ("heft", "random", load("round_robin")):
        both = {"evaluations": 50, "seconds": 1e6}  # the scarcer one ends it
        first, again = (load(name, start=start, seed=4, **both)(problem) for _ in range(2))
        assert first.stats["evaluations"] <= 50
        assert np.array_equal(first.placement, again.placement)
        curve, same = ([row[1:] for row in s.stats["curve"]] for s in (first, again))
        assert curve == same
        assert curve[-1] == (first.stats["evaluations"], first.value_s)
        assert first.value_s == score(problem, first.placement)[0]
        if start != "random":
            planner = load(start) if isinstance(start, str) else start
            assert first.value_s <= planner(problem).value_s * (1 + 1e-12)


@pytest.mark.parametrize("name", SEARCHES)
def test_budgets_are_used_to_the_end(name: str) -> None:
    problem = random_small(3, num_ops=6)
    assert load(name, evaluations=137)(problem).stats["evaluations"] == 137
    assert load(name)(problem).stats["evaluations"] == 2000
    assert load(name, seconds=0.05)(problem).stats["seconds"] >= 0.05


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), bytes_each=st.sampled_from([0, 10]))
def test_moves_are_scored_incrementally_as_whole_placements_are(seed: int, bytes_each: int) -> None:
    sizes = {"param_bytes": bytes_each, "memory_bytes": 35}
    problem = random_small(seed, num_ops=6, objective="max_load", **sizes)
    search, whole = Search(problem), Search(problem)
    start = search.allowed.argmax(axis=1).astype(np.int32)
    search.cost(start)
    assume(can_move(problem))
    here, rng = Position(search), np.random.default_rng(seed)
    propose = moves(problem)
    for step in range(40):
        groups, device = propose(rng, here.choice)
        then = here.choice.copy()
        then[groups] = device
        assert here.trial(groups, device) == pytest.approx(whole.cost(then), rel=1e-12)
        if step % 3 == 0:
            here.keep()
            assert np.array_equal(here.choice, then)
        if step == 20:
            here.go(start, whole.cost(start))
    assert search.num_evaluations == 41
    assert search.best_cost <= whole.best_cost * (1 + 1e-12)


def test_seconds_are_shared_among_what_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_small(5, num_ops=6)
    run, cost, shares, rows = Search.run, Search._cost, [], []

    def shared(search: Search, planner: Any, share: float = 1.0, *rest: Any) -> Any:
        shares.append(share)
        return run(search, planner, share, *rest)

    monkeypatch.setattr(Search, "run", shared)
    monkeypatch.setattr(Search, "_cost", lambda s, x: rows.append(len(x)) or cost(s, x))
    some = ("single_device", "heft", "contiguous_dp", "round_robin")
    best = load("best_of", planners=some)(problem)
    assert shares == [1 / 2, 1 / 2, 1 / 2, 1]
    assert sum(rows) == best.stats["evaluations"]  # what a planner said is not scored again
    shares.clear()
    load("local_search", start="single_device", evaluations=10)(problem)
    assert shares == [1 / 4]


def test_heft_deals_out_what_it_had_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(np.ones((40, 4)), chain(40), tensor_bytes=10)
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("placement.planners.heft._AT_ONCE", 1)
    solution = load("heft", seconds=10)(problem)
    assert next(clock) < 30  # looks at the clock: one for each operator that was placed
    assert "ended before 3" in solution.stats["message"]
    # The chain stays on one device while there is time; the rest are runs of equal length.
    rest = solution.placement[10:]
    assert (np.diff(rest) >= 0).all() and np.ptp(np.bincount(rest)) <= 2
    assert solution.value_s == score(problem, solution.placement)[0]


@given(seed=st.integers(0, 10**6))
def test_distinct_pairs_are_numpys_unique_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 5, (int(rng.integers(0, 20)), 2)).astype(np.int32)
    unlike = pairs[pairs[:, 0] != pairs[:, 1]]
    np.testing.assert_array_equal(distinct_pairs(pairs, 5), np.unique(unlike, axis=0))


# --- memory ------------------------------------------------------------------------------


def test_nothing_fits_and_the_bytes_are_told() -> None:
    # Three operators with 100 bytes of parameters each; 2 x 90 bytes of memory.
    problem = make([[1, 1]] * 3, chain(3), param_bytes=100, memory_bytes=90)
    for name in (*PLANNERS, "coarsened"):
        solution = quick(name)(problem)
        assert solution.value_s == np.inf
        assert "90" in solution.stats["infeasible"], name
    # The least violating is an uneven split (200 and 100 bytes), and it is what is returned.
    local = load("local_search", evaluations=60)(problem)
    assert "needs 200 bytes" in local.stats["infeasible"]


def test_contiguous_dp_counts_activations_where_they_decide() -> None:
    # Parameters (10 bytes each) fit anywhere, but op0's and op1's tensors of 50 bytes do not
    # fit beside each other on the fast device d0, which has 80 bytes.
    rooms = {"tensor_bytes": [50, 50, 0], "param_bytes": 10, "memory_bytes": [80, 1000]}
    problem = make([[1, 4]] * 3, chain(3), link=(0.0, 1e6), objective="latency", **rooms)
    assert np.isinf(score(problem, [[0, 0, 0]])[0])
    best = min(score(problem, every_placement(problem)))
    assert best <= load("contiguous_dp")(problem).value_s < np.inf


def test_local_search_leaves_an_infeasible_start() -> None:
    problem = make([[1, 5]] * 4, chain(4), param_bytes=100, memory_bytes=[210, 10**6])
    solution = load("local_search", start="single_device", evaluations=200)(problem)
    best = score(problem, every_placement(problem)).min()
    assert solution.value_s == pytest.approx(best)


# --- single device, round robin, random -----------------------------------------------------


def test_single_device_sends_the_rest_to_the_first_that_can() -> None:
    # d1 is the fastest but cannot run op1, whose group is {op1, op2}.
    seconds = [[9, 1, 5], [9, np.inf, 5], [9, 1, 5]]
    problem = make(seconds, chain(3), group=[0, 1, 1], objective="latency")
    solution = load("single_device")(problem)
    assert solution.placement.tolist() == [2, 2, 2]  # 15 beats 27 and 1 + 18
    assert solution.value_s == 15
    assert solution.stats["device"] == "d2"
    assert solution.stats["evaluations"] == 3


def test_round_robin_deals_groups_and_skips_devices_that_cannot() -> None:
    compute_s = np.ones((5, 3))
    compute_s[2, 2] = np.inf
    problem = make(compute_s, group=[0, 1, 2, 0, 3])
    # Groups 0, 1, 2, 3 -> d0, d1, d2 (cannot: next is d0), d0.
    assert load("round_robin")(problem).placement.tolist() == [0, 1, 0, 0, 0]


def test_random_search_tries_every_single_device() -> None:
    # 30 operators in a chain with dear transfers: no random placement is competitive.
    problem = make([[3, 2, 4]] * 30, chain(30), tensor_bytes=100, objective="latency")
    solution = load("random_search", evaluations=50)(problem)
    assert solution.value_s == 60
    assert set(solution.placement) == {1}


# --- HEFT --------------------------------------------------------------------------------

# The example of Topcuoglu, Hariri, Wu (2002): figure 2 and table 1.
TOPCUOGLU_COMPUTE = [
    [14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10],
    [13, 16, 9], [7, 15, 11], [5, 11, 14], [18, 12, 20], [21, 7, 16],
]  # fmt: skip
TOPCUOGLU_EDGES = [
    (1, 2, 18), (1, 3, 12), (1, 4, 9), (1, 5, 11), (1, 6, 14), (2, 8, 19), (2, 9, 16), (3, 7, 23),
    (4, 8, 27), (4, 9, 23), (5, 9, 13), (6, 8, 15), (7, 10, 17), (8, 10, 11), (9, 10, 13),
]  # fmt: skip


def test_heft_reproduces_the_example_of_its_paper() -> None:
    tensors = [(a - 1, cost, [b - 1]) for a, b, cost in TOPCUOGLU_EDGES]
    problem = make(TOPCUOGLU_COMPUTE, tensors=tensors, objective="latency")
    # Table 2 of the paper, upward ranks.
    ranks = [108, 77, 80, 80, 69, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert problem.upward_rank_s == pytest.approx(ranks, abs=1e-3)
    # Figure 3 (a), makespan 80:
    #   P1 | ........................... n2 27-40 ................. n8 57-62
    #   P2 | .................. n4 18-26  n6 26-42 ............. n9 56-68 ..... n10 73-80
    #   P3 | n1 0-9  n3 9-28  n5 28-38  n7 38-49
    solution = load("heft")(problem)
    assert solution.stats["makespan_s"] == 80
    assert solution.placement.tolist() == [2, 0, 2, 1, 2, 1, 2, 0, 1, 1]


def test_heft_inserts_into_gaps() -> None:
    # Ranks: op0 9.5, op1 8.5, op2 6, op3 1 (transfers take 4, half of the pairs are free).
    #   d0 | op0 0-1 | op3 1-2 |
    #   d1 | ....... op1 ..............
    # op3 comes last in rank but fits before what waits for a transfer.
    seconds = [[2, 9], [9, 3], [3, 9], [1, 9]]
    problem = make(seconds, chain(3), tensor_bytes=4, objective="latency")
    # d0: op0 0-2, [op3 2-3 in the gap], op2 13-16; d1: op1 6-9.
    solution = load("heft")(problem)
    assert solution.placement.tolist() == [0, 1, 0, 0]
    assert solution.stats["makespan_s"] == solution.value_s == 16


def test_heft_weighs_the_whole_group_and_memory() -> None:
    # op0 alone would finish first on d0, but its colleague op1 takes 9 s there.
    problem = make([[1, 2], [9, 1]], [(0, 1)], group=[0, 0], objective="latency")
    assert load("heft")(problem).placement.tolist() == [1, 1]
    assert load("heft")(make([[1, 2], [9, 1]], [(0, 1)])).placement.tolist() == [0, 1]
    # A device whose parameters are full is passed over.
    problem = make([[1, 9]] * 3, chain(3), param_bytes=100, memory_bytes=[250, 10**6])
    assert load("heft")(problem).placement.tolist() == [0, 0, 1]


# --- contiguous dynamic program ---------------------------------------------------------------


def contiguous(problem: Problem) -> list[np.ndarray]:
    """int ``[G]``: every way to cut groups 0..G-1 into runs on distinct devices."""
    groups, devices = problem.graph.num_groups, range(problem.num_devices)
    choices: list[np.ndarray] = []
    for k in range(1, problem.num_devices + 1):
        for cuts in itertools.combinations(range(1, groups), k - 1):
            lengths = np.diff([0, *cuts, groups])
            choices += [np.repeat(order, lengths) for order in itertools.permutations(devices, k)]
    return choices


def bottleneck(problem: Problem, placement: np.ndarray) -> float:
    """The slowest device, from the definition: compute and blocking sends, or receptions."""
    g = problem.graph
    work, received = np.zeros((2, problem.num_devices))
    for n, d in enumerate(placement):
        work[d] += problem.compute_s[n, d]
    for t in range(g.num_tensors):
        src = placement[g.tensor_src[t]]
        targets = {placement[u] for u in g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]]} - {src}
        for dst in targets:
            received[dst] += problem.transfer_s(t, src, dst)
        if targets and problem.link_blocking[src, min(targets)]:
            work[src] += problem.transfer_s(t, src, min(targets))
    return float(np.maximum(work, received).max())


def least_bottleneck(problem: Problem) -> float:
    """Of all contiguous splits."""
    return min(bottleneck(problem, c[problem.graph.group]) for c in contiguous(problem))


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6))
def test_contiguous_dp_is_optimal_among_contiguous_splits(seed: int) -> None:
    problem = random_small(seed, objective="period")
    best = least_bottleneck(problem)
    assert load("contiguous_dp")(problem).stats["bottleneck_s"] == pytest.approx(best, rel=1e-9)


def test_contiguous_dp_equal_devices_collapse() -> None:
    # Eight equal devices are nine sets, not 256; the result uses all of them.
    problem = make(np.ones((16, 8)), chain(16))
    solution = load("contiguous_dp")(problem)
    assert solution.stats["evaluations"] == 8
    assert np.bincount(solution.placement).tolist() == [2] * 8


def test_contiguous_dp_with_too_many_sets_of_devices_says_so() -> None:
    compute_s = np.ones((8, 4)) * [1.0, 1.1, 1.2, 1.3]
    exact = load("contiguous_dp")(make(compute_s, chain(8)))
    ordered = load("contiguous_dp", max_states=4)(make(compute_s, chain(8)))
    assert exact.stats["all_orders"] and not ordered.stats["all_orders"]
    assert ordered.stats["bottleneck_s"] >= exact.stats["bottleneck_s"]
    assert np.bincount(ordered.placement, minlength=4).tolist() == [2, 2, 2, 2]


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_stage_costs_equal_their_definition(seed: int) -> None:
    problem = random_small(seed, param_bytes=7, memory_bytes=8)  # which binds: else none is counted
    costs = Stages(problem).costs(np.arange(problem.graph.num_groups, dtype=np.int32))
    g = problem.graph
    for j, i in itertools.combinations(range(g.num_groups + 1), 2):
        inside = (g.group >= j) & (g.group < i)
        assert costs.param_bytes[j, i] == pytest.approx(7 * inside.sum())
        seen = sum(
            int(g.tensor_bytes[t])
            for t in range(g.num_tensors)
            if inside[g.tensor_src[t]] or inside[g.use_dst[g.use_tensor == t]].any()
        )
        assert costs.activation_bytes[j, i] == pytest.approx(seen)


def test_merge_blocks_balances_seconds_and_keeps_the_order() -> None:
    problem = make([[1, 1]] * 50 + [[25, 25]] * 2, chain(52))
    block = merge_blocks(problem, 4)
    assert (np.diff(block) >= 0).all()
    assert sorted(set(block)) == list(range(block[-1] + 1))
    assert block[-1] <= 3
    assert merge_blocks(problem, 52).tolist() == list(range(52))
    assert load("contiguous_dp", max_blocks=4)(problem).value_s < np.inf


def test_a_last_operator_of_no_time_is_dealt_to_a_device_that_exists() -> None:
    """Its part of the work is 1 when rounded; HEFT deals out what it has no time to place."""
    problem = make(np.array([[1.0, 1.0], [0.0, 0.0]]), chain(2), tensor_bytes=10)
    solution = load("heft", seconds=1e-9)(problem)
    assert "ended before" in solution.stats["message"]
    assert solution.placement.tolist() == [1, 1]


# --- best of -----------------------------------------------------------------------------


def test_best_of_is_the_minimum_and_names_the_winner() -> None:
    for seed in range(6):
        problem = random_small(seed)
        solution = load("best_of")(problem)
        own, said = {"contiguous_dp": {"orders": 8}}, solution.stats["values_s"]
        values = {name: load(name, **own.get(name, {}))(problem).value_s for name in said}
        assert said == values
        assert solution.value_s == min(values.values())
        assert values[solution.stats["winner"]] == solution.value_s


def test_best_of_knows_every_planner_that_is_neither_a_search_nor_a_solver() -> None:
    others = {"brkga", "cp_sat", "cross_entropy", "local_search", "macro_search", "mip"}
    others |= {"random_search", "simulated_annealing", "best_of", "expert", "policy"}
    others |= {"order_search", "phase_search"}
    others |= {"even_layers", "by_memory", "llama_cpp_split"}  # what is done today, to compare with
    others |= {"residence"}  # takes part where a device streams
    assert set(load("best_of").planners) == set(names()) - others


SEARCHED = ("single_device", "heft", "critical_path_greedy")


def test_best_of_leaves_evaluations_to_those_who_come_after() -> None:
    """Of 100 one goes to heft, 3 to single_device, and the walker has a quarter of the others."""
    problem = make(np.random.default_rng(0).random((40, 3)), chain(40), tensor_bytes=10)
    few = load("best_of", planners=SEARCHED, evaluations=100, search_on=False)(problem)
    assert 4 < few.stats["evaluations"] <= 25 + 4
    solution = load("best_of", planners=SEARCHED, evaluations=100)(problem)
    begun = [*few.stats["values_s"], "macro_search", "local_search"]
    assert list(solution.stats["values_s"]) == begun
    assert solution.stats["evaluations"] == 100 and solution.value_s <= few.value_s
    alone = load("best_of", planners=SEARCHED)(problem)
    walk = load("critical_path_greedy")(problem)
    assert alone.stats["evaluations"] == 4 + walk.stats["evaluations"]
    assert alone.value_s <= walk.value_s


def test_best_of_goes_on_until_the_best_is_proved_or_had_enough() -> None:
    """Two operators of 1 s that may be apart, with a result of 9 s: together they take 2 s."""
    proved = make([[1, 1]] * 2, chain(2), tensor_bytes=9).with_objective("latency")
    solution = load("best_of", seconds=60)(proved)
    assert solution.value_s == solution.lower_bound_s == pytest.approx(2.0)
    assert "macro_search" not in solution.stats["values_s"]
    unproved = random_small(1, objective="period")
    solution = load("best_of", seconds=60)(unproved)
    moves = unproved.graph.num_groups * (unproved.num_devices - 1)
    assert moves < solution.stats["evaluations"] < 2500 * moves
    assert solution.value_s <= load("best_of")(unproved).value_s


def test_a_search_that_starts_at_best_of_has_what_that_leaves() -> None:
    problem = random_small(2, objective="period")
    solution = load("local_search", evaluations=400)(problem)
    alone = load("best_of", search_on=False, evaluations=100)(problem)
    assert solution.stats["curve"][0][1] <= alone.stats["evaluations"] < 100


def test_best_of_begins_with_what_evaluates_one_placement_where_evaluations_are_few() -> None:
    names = ("contiguous_dp", "round_robin", "single_device", "antichain_dp", "ideal_dp")
    problem = random_small(0).with_objective("period")
    solution = load("best_of", planners=names, evaluations=50, search_on=False)(problem)
    order = ["ideal_dp", "single_device", "antichain_dp", "contiguous_dp", "round_robin"]
    assert list(solution.stats["values_s"]) == order
    few = load("best_of", evaluations=2)(problem)
    assert list(few.stats["values_s"]) == order[:2]


def test_few_evaluations_are_no_worse_than_the_fastest_device() -> None:
    """Sixteen operators of 1 s, and one that reads all of them: 17 s on either device.

    List schedules share the sixteen out; the last waits for eight tensors of 20 s: 162 s.
    """
    joined = make([(1, 1)] * 17, [(i, 16) for i in range(16)], tensor_bytes=20)
    joined = joined.with_objective("latency")
    one = load("single_device", evaluations=1)(joined)
    assert (one.value_s, one.stats["evaluations"]) == (17.0, 1)
    assert load("heft")(joined).value_s == 162.0
    for name, evaluations in itertools.product(("best_of", "order_search", "policy"), (2, 8, 20)):
        few = load(name, evaluations=evaluations)(joined)
        shared = evaluations == 2 and name == "order_search"  # of two its start has one
        assert few.value_s <= (162.0 if shared else 17.0)
        assert few.stats["evaluations"] <= evaluations


def test_best_of_says_what_it_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_small(0)
    monkeypatch.setitem(sys.modules, "pymetis", None)
    solution = load("best_of")(problem)
    assert list(solution.stats["skipped"]) == ["metis"]
    remedy = r"needs the package pymetis .*pip install .device-placement-rl\[metis\]"
    assert re.search(remedy, solution.stats["skipped"]["metis"])
    with pytest.raises(PlannerError, match=remedy):
        load("best_of", planners=("metis",))(problem)
    solution = load("best_of", evaluations=1)(problem)
    assert solution.stats["evaluations"] == 1
    assert "peft" in solution.stats["skipped"]


def test_best_of_begins_no_slow_planner_without_a_clock_late_unless_nothing_fits(monkeypatch):
    """Only peft takes time here, 3 s."""
    now, run = [0.0], Search.run
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def slowly(self: Search, planner: Any, *rest: Any) -> Any:
        now[0] += 3.0 if type(planner).__name__ == "Peft" else 0.0
        return run(self, planner, *rest)

    monkeypatch.setattr(Search, "run", slowly)
    # Of 8 s, m_etf could take more than what is left after peft; heft comes first.
    for seconds, ran in ((8, {"peft", "heft"}), (20, {"peft", "m_etf", "heft"})):
        some = ("peft", "m_etf", "heft")
        solution = load("best_of", planners=some, seconds=seconds, search_on=False)
        assert set(solution(random_small(0)).stats["values_s"]) == ran
    # While nothing fits, m_etf is begun although it may take as long as peft: of 5 s.
    full = make([[1, 1]] * 4, chain(4), param_bytes=10, memory_bytes=[15, 15])
    solution = load("best_of", planners=("peft", "m_etf"), seconds=5)(full)
    assert set(solution.stats["values_s"]) == {"peft", "m_etf"}


def test_best_of_tries_one_device_even_where_the_first_planner_has_taken_all_seconds(monkeypatch):
    """The list schedule had its code compiled, and found nothing that fits."""
    now = [0.0]

    def late(heft: Any, problem: Any) -> Solution:
        now[0] += 3.0
        return Solution(np.ones(problem.num_ops, np.int32), np.inf)

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr(type(load("heft")), "__call__", late)
    tight = make([[9.0, 1.0]] * 4, chain(4), param_bytes=10, memory_bytes=[40, 15])
    solution = load("best_of", seconds=1)(tight.with_objective("latency"))
    assert list(solution.stats["values_s"]) == ["heft", "single_device"]
    assert solution.placement.tolist() == [0, 0, 0, 0] and solution.value_s == 36.0


def test_best_of_begins_with_what_wins_most_often_for_the_objective() -> None:
    problem = random_small(0)
    for objective, first in (("latency", ["heft", "peft", "m_etf"]),
                             ("period", ["contiguous_dp", "level_pipeline"])):  # fmt: skip
        best_of = load("best_of", planners=("round_robin", *reversed(first)))
        solution = best_of(problem.with_objective(objective))
        assert list(solution.stats["values_s"]) == [*first, "round_robin"]


def test_best_of_does_not_look_at_the_clock_unless_it_is_told_to(monkeypatch):
    problem = random_problem(3, 12, 3)
    load("best_of")(problem)  # its kernels are loaded
    clock = itertools.count(step=1e6)
    expected = load("best_of")(problem)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    solution = load("best_of")(problem)
    assert solution.stats["values_s"] == expected.stats["values_s"]
    assert np.array_equal(solution.placement, expected.placement)


def test_best_of_begins_with_what_takes_a_moment_where_seconds_are_limited() -> None:
    problem = random_small(0, objective="period")
    late, quick = ("m_sct", "antichain_dp", "coarsened"), ("heft", "m_topo", "level_balance")
    chosen = (*late, "ideal_dp", "critical_path_greedy", *quick)
    alone = load("best_of", planners=chosen, seconds=60, search_on=False)
    order = list(alone(problem).stats["values_s"])
    assert set(order[:3]) == set(quick) and set(order[-3:]) == set(late)
    order = list(load("best_of", planners=chosen)(problem).stats["values_s"])
    assert order[:2] == ["ideal_dp", "antichain_dp"]


def test_metis_says_nothing_on_standard_output(shared: Path, capfd: Any) -> None:
    """Of 32 layers and 7 devices parts stay empty, and METIS complains; JSON must not suffer."""
    pytest.importorskip("pymetis")
    path = shared / "data/dnn_partitioning/latency/layer/gnmt_inference.json"
    print("before")
    load("metis")(importers.load(path))
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


PUBLIC = (
    "dnn_partitioning/throughput/layer/bert24_training.json",
    "dnn_partitioning/throughput/operator/bert_l-3_training.json",
    "dnn_partitioning/latency/operator/bert_l-3_inference.json",
    "moirai/googlenet.json",
)


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("objective", ["own", "latency"])
def test_best_of_is_never_worse_than_any_of_them_on_public_workloads(shared, name, objective):
    problem = importers.load(shared / "data" / name)
    problem = problem if objective == "own" else problem.with_objective("latency")
    solution = load("best_of")(problem)
    assert set(solution.stats["skipped"]) <= {"metis"}
    quick = [n for n in solution.stats["values_s"] if n not in ("ideal_dp", "critical_path_greedy")]
    for planner in quick:
        assert solution.value_s <= load(planner)(problem).value_s, planner


# --- symmetry, loading -------------------------------------------------------------------


def test_device_classes() -> None:
    compute_s = [[1, 1, 2, 1]]
    assert device_classes(make(compute_s)).tolist() == [0, 0, 1, 0]
    assert device_classes(make(compute_s, memory_bytes=[5, 5, 5, 6])).tolist() == [0, 0, 1, 2]
    # d0 and d1 share a channel towards d2, d3 does not.
    ways = {"d0": "a", "d1": "a", "d3": None}
    links = tuple(Link(src, "d2", 1, 1, channel=channel) for src, channel in ways.items())
    assert device_classes(make(compute_s, link=None, links=links)).tolist() == [0, 0, 1, 2]
    stated = make(compute_s, objective="max_load")
    io_s = replace(stated.profile, io_s=np.array([[1.0, 2, 1, 1]]))
    assert device_classes(replace(stated, profile=io_s)).tolist() == [0, 1, 2, 0]


@given(st.integers(0, 10**6), st.sampled_from(["latency", "period", "energy", "max_load"]))
def test_devices_of_a_class_may_be_swapped(seed: int, objective: Objective) -> None:
    rng, drawn = np.random.default_rng(seed), random_problem(seed, 8, 4)
    on = {"kind": rng.choice(["cpu", "other"], 4).tolist(), "busy_w": 3.0, "idle_w": 1.0}
    equal = np.repeat(rng.random((8, 1)), 4, axis=1)
    problem = problem_on(drawn.graph, equal, device=on, link=(0.3, 500.0), objective=objective)
    same = {"num_microbatches": drawn.num_microbatches, "max_in_flight": drawn.max_in_flight}
    problem = replace(problem, **same)
    placement = rng.integers(0, 4, 8)
    classes = device_classes(problem)
    for a, b in itertools.combinations(range(4), 2):
        swap = np.arange(4)
        swap[[a, b]] = b, a
        one, other = score(problem, [placement, swap[placement]])
        assert classes[a] != classes[b] or other == pytest.approx(one)


def may_be_swapped(problem: Problem, a: int, b: int) -> bool:
    """By definition: with ``a`` and ``b`` swapped nothing changes but the names of channels."""
    swap = np.arange(problem.num_devices)
    swap[[a, b]] = b, a
    devices = problem.cluster.devices
    if (devices[a].kind == "cpu") != (devices[b].kind == "cpu"):
        return False
    host, shares = host_of(problem)
    inputs = (problem.graph.tensor_src < 0).any() and problem.objective == "period"
    if host in (a, b) and inputs and not shares.all():
        return False  # only the host sends them
    libraries = problem.profile.library_bytes
    held = problem.memory_bytes if libraries is None else libraries
    for x in (problem.compute_s, problem.loaded_s, problem.memory_bytes, held):
        if not np.array_equal(x, x[..., swap]):
            return False
    pairs = [problem.link_latency_s, problem.link_s_per_byte, problem.link_blocking]
    pairs += [problem.link_wake_s, problem.link_send_s, problem.link_send_s_per_byte]
    if problem.profile.transfer_s is not None:
        pairs.append(problem.profile.transfer_s)
    if not all(np.array_equal(x, x[..., swap, :][..., swap]) for x in pairs):
        return False
    before, after = problem.link_channel.ravel(), problem.link_channel[swap][:, swap].ravel()
    return np.array_equal(before[:, None] == before, after[:, None] == after)


@given(st.integers(0, 10**6), st.integers(2, 5))
def test_device_classes_by_definition(seed: int, num_devices: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = random_problem(seed, 2, num_devices)
    equal = np.repeat(drawn.compute_s[:, :1], num_devices, axis=1)  # else hardly any are
    names = drawn.cluster.device_names
    links = tuple(
        Link(a, b, 1.0, 100.0, channel=[None, "x", "y"][rng.choice(3, p=[0.6, 0.2, 0.2])])
        for a in names
        for b in names
        if rng.random() < 0.95
    )
    problem = problem_on(drawn.graph, equal, memory_bytes=9, links=links)
    for p in (drawn, problem):
        classes = device_classes(p)
        for b in range(num_devices):
            new = [a for a in range(b) if classes[a] not in classes[:a]]
            first = [a for a in new if may_be_swapped(p, a, b)]
            assert (classes[b] == classes[first[0]]) if first else (classes[b] not in classes[:b])


def test_devices_whose_libraries_need_other_memory_are_unlike() -> None:
    """One of 840 bytes keeps 480 for them: the larger operator must be on the other."""
    sizes = {"param_bytes": [500, 350], "memory_bytes": 840, "objective": "latency"}
    library = {"library_bytes": np.array([[480, 0], [480, 0]])}
    problem = make(np.ones((2, 2)), chain(2), **sizes, profile=library)
    assert device_classes(problem).tolist() == [0, 1]
    assert load("contiguous_dp")(problem).placement.tolist() == [1, 0]


def test_a_coarse_answer_may_have_phases() -> None:
    problem = make(np.ones((3, 2)), chain(3), max_phases=2, num_microbatches=8)
    solution = load("coarsened", planner="data_parallel")(problem)
    assert solution.placement.shape == (2, 3) and solution.value_s == 1.5


def test_copies_of_phases_are_of_one_micro_batch() -> None:
    """Or problems that may be simulated would be refused for the number of their runs."""
    problem = make(np.ones((3, 2)), chain(3), max_phases=2, num_microbatches=8)
    assert unrolled(problem, 2).num_microbatches == 1


def test_a_latency_of_no_time_is_the_best() -> None:
    pytest.importorskip("ortools")
    problem = make([[0.0, 1.0]], link=(1.0, 1e9), objective="latency")
    assert load("cp_sat", seconds=1.0)(problem).value_s == 0.0


def test_what_stays_on_a_gpu_is_decided_within_the_budget() -> None:
    solution = load("residence", evaluations=10)(with_twins(3))
    assert solution.stats["evaluations"] <= 10


def test_residence_begins_where_every_operator_can_run() -> None:
    apart = make([[1, np.inf], [np.inf, 1]], chain(2))
    assert load("residence")(apart).placement.tolist() == [0, 1]


def streaming(host: Device, cards: int, seconds: Any, *others: Device, **more: Any) -> Problem:
    """A chain on processors and GPUs, each with a device that streams."""
    gpus = [Device(f"g{i}", "gpu", memory_bytes=100) for i in range(cards)]
    twins = [Device(f"s{i}", "gpu", streams=f"g{i}") for i in range(cards)]
    cluster = Cluster("c", (host, *others, *gpus, *twins))
    sizes = {k: more.pop(k) for k in ("param_bytes", "tensor_bytes") if k in more}
    graph = graph_of(len(seconds), chain(len(seconds)), **sizes)
    return problem_on(graph, seconds, cluster=cluster, **more)


def test_what_is_too_large_for_no_page_locked_memory_does_not_fit() -> None:
    """Two GPUs share one byte of it: each has none. One of them has room for one operator."""
    host = Device("c", pinned_bytes=1)
    problem = streaming(host, 2, [[10, 9, 9, 1, 1]] * 2, param_bytes=80, objective="latency")
    assert problem.memory_bytes[3:].tolist() == [0, 0]
    solution = load("single_device")(problem)
    assert (solution.placement.tolist(), solution.value_s) == ([0, 0], 20.0)
    check_planner(load("single_device"), [problem])


def test_page_locked_memory_is_for_parameters_alone() -> None:
    only = [[np.inf, np.inf, 1]]
    for size, fits in ((100, True), (121, False)):
        problem = streaming(Device("c"), 1, only, param_bytes=size, tensor_bytes=50)
        problem = altered(problem, {"memory_bytes": lambda d: 120 if d.streams else 2**40})
        assert np.isfinite(score(problem, [[2]])[0]) == fits
        assert (not cannot_fit(problem)) == fits
    assert "needs 121 bytes, the largest device that can run it has 120" in cannot_fit(problem)


def test_the_processor_whose_memory_is_streamed_is_like_no_other() -> None:
    """It has 105 bytes, of which 100 are streamed: an operator of 10 must be on the other one."""
    host, other = (Device(name, memory_bytes=105) for name in ("c0", "c1"))
    seconds = [[1, 1, np.inf, np.inf], [np.inf, np.inf, np.inf, 1]]
    sizes = {"param_bytes": [10, 100], "objective": "latency"}
    problem = streaming(host, 1, seconds, other, **sizes)
    problem = altered(
        problem, {"memory_bytes": lambda d: d.memory_bytes if d.kind == "cpu" else 2**40}
    )
    assert device_classes(problem).tolist() == [0, 1, 2, 3]
    solution = load("contiguous_dp")(problem)
    assert (solution.placement.tolist(), solution.value_s) == ([1, 3], 2.0)


@pytest.mark.parametrize("name", ["heft", "local_search"])
def test_the_longest_times_are_not_taken_for_infeasible(name: str) -> None:
    seconds = np.full((3, 2), MOST.seconds)
    seconds[1, 0] = seconds[2, 1] = np.inf
    size = MOST.graph_bytes // 3
    problem = make(seconds, chain(3), tensor_bytes=size, memory_bytes=2**62, link=(0.0, 2e-12))
    assert 1e27 < load(name)(problem).value_s < np.inf


def test_a_budget_must_be_positive() -> None:
    problem = make([[1, 1]])
    with pytest.raises(PlannerError, match="seconds = 0 must be positive"):
        Search(problem, seconds=0)
    with pytest.raises(PlannerError, match="evaluations = -3"):
        load("local_search", evaluations=-3)(problem)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("antichain_dp", "max_states=-1"),
        ("brkga", "elite=nan elite=-1 mutants=2 bias=nan"),
        ("cross_entropy", "elite=1.5"),
        ("macro_search", "rounds=0 width=0"),
        ("contiguous_dp", "max_blocks=0 max_states=-1 candidates=-1"),
        ("cp_sat", "threads=-3"),
        ("critical_path_greedy", "dense=nan"),
        ("ideal_dp", "memory_bytes=-1 max_states=0 seconds=-1"),
        ("local_search", "patience=-1"),
        ("m_sct", "threshold=nan lp_seconds=-1"),
        ("pipedream", "max_blocks=-1"),
        ("replicated", "max_blocks=0"),
        ("simulated_annealing", "accept=-1 accept=nan accept=2 accept=0"),
        ("time_slices", "num_directions=-1"),
        *((x, "seed=-1") for x in (*SEARCHES, "cp_sat", "metis", "agents.planner:PolicyPlanner")),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(name: str, wrong: str) -> None:
    for text in wrong.split():
        option, value = text.split("=")
        most = r"(at least [01]|within 0\.\.1|above 0 and below 1)"
        with pytest.raises(ValueError, match=rf"{option} = {value}(\.0)? must be {most}$"):
            load(name, **{option: value})


def test_the_least_that_options_can_be() -> None:
    load("cp_sat", threads=0)  # all cores
    load("local_search", patience="inf")  # never restart
    load("macro_search", rounds=None, seed=0)
    load("critical_path_greedy", dense=0)


def test_load_reads_strings_as_the_type_of_the_field() -> None:
    planner = load("local_search", seconds="2.5", seed="3", evaluations="none", start="heft")
    assert planner == load("local_search", seconds=2.5, seed=3, evaluations=None, start="heft")
    assert load("best_of", planners="heft,round_robin").planners == ("heft", "round_robin")
    assert load("local_search", patience=2).patience == 2.0
    assert load("placement.planners.heft:Heft") == load("heft")


def double(problem: Problem):
    return load("heft")(problem)


# Of a module that does not postpone its annotations.
Unpostponed = make_dataclass("Unpostponed", [("first", int, 0)])


def test_load_takes_a_function_of_the_user() -> None:
    check_planner(load(f"{__name__}:double"))
    with pytest.raises(PlannerError, match="takes no options"):
        load(f"{__name__}:double", seed=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("hefty", {}, r"no planner 'hefty'; did you mean 'heft'\? planners are .*heft, "),
        ("_search", {}, "no planner '_search'"),
        ("no.such.module:Class", {}, "cannot be imported"),
        ("placement.planners.heft:Gone", {}, "cannot be imported"),
        ("placement.planners.heft:__doc__", {}, "is of type str, not a planner"),
        ("m_topo", {"seed": 1}, "no option 'seed'; it has no options"),
        ("local_search", {"sed": 1}, r"options are start: .*seed: int = 0"),
        ("local_search", {"seed": "x"}, r"seed = 'x' is not of type int"),
        ("local_search", {"seed": 1.5}, r"seed = 1.5 is not"),
        ("local_search", {"seed": True}, r"seed = True is not"),
        ("local_search", {"evaluations": "2.5"}, r"evaluations = '2.5' is not of type int \| None"),
        ("local_search", {"start": 3}, r"start = 3 is not"),
        (f"{__name__}:Unpostponed", {"first": "x"}, "of type int; its options are first: int = 0"),
    ],
)
def test_load_names_what_is_wrong(name: str, options: dict, message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        load(name, **options)


def test_an_impossible_problem_is_refused_before_any_planner_runs() -> None:
    with pytest.raises(ProblemError, match="no device can run every operator"):
        make([[1, np.inf], [np.inf, 1]], group=[0, 0])
