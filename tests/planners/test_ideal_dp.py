"""The exact contiguous planner against brute force, known counts and the published values."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import importers
from placement.cluster import Link
from placement.planners import PlannerError, load
from placement.planners.ideal_dp import IdealDp, contract
from placement.problem import Problem
from placement.search import ideal_kernels
from placement.simulator import score
from placement.simulator.analytic import device_loads
from tests.problems import chain, every_placement, small_problem


def make(edges, seconds, io_s, memory_bytes=2**40, **graph) -> Problem:
    """Operators with ``seconds [N, D]``; operator ``n`` makes tensor ``n``, with ``io_s[n]``."""
    facts = {"graph": graph, "profile": {"io_s": io_s}, "device": {"kind": "acc"}}
    return small_problem(seconds, edges, memory_bytes=memory_bytes, objective="max_load", **facts)


def equal(edges, seconds, cost, devices, **graph) -> Problem:
    """Equal devices, and every tensor costs the same."""
    table = np.repeat(np.array(seconds, float)[:, None], devices, axis=1)
    return make(edges, table, np.full(table.shape, cost), **graph)


def draw(seed: int) -> Problem:
    """Up to six groups on up to three unlike devices; half of them are training graphs.

    In half of them some operators take no time.
    """
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    edges = [(u, v) for v in range(n) for u in range(v) if rng.random() < 0.35]
    back, group = np.zeros(n, bool), rng.integers(0, n, n)
    if rng.random() < 0.6:
        group = np.arange(n)
    if rng.random() < 0.5:  # backward operator of v is 2n-1-v, with v's group
        gradients = [(2 * n - 1 - v, 2 * n - 1 - u) for u, v in edges]
        edges = edges + gradients + [(v, 2 * n - 1 - v) for v in range(n)]
        back, group = np.repeat([False, True], n), np.append(group, group[::-1])
    ops = len(group)
    alike = rng.random() < 0.5
    seconds = rng.uniform(0.5, 2.0, (ops, 1 if alike else d)) * np.ones(d)
    if not alike:
        seconds[:, 1:][rng.random((ops, d - 1)) < 0.15] = np.inf
    if rng.random() < 0.5:
        seconds[(rng.random(ops) < 0.5)[:, None] & np.isfinite(seconds)] = 0.0
    io = rng.uniform(0.0, 1.0, (ops, 1 if alike else d)) * np.ones(d)
    params = rng.integers(1, 30, 3)
    reads = [(v, p) for v in range(ops) for p in range(3) if rng.random() < 0.3]
    memory = [int(rng.integers(30, 80))] * d if alike else list(rng.integers(30, 80, d).tolist())
    facts = {"param_bytes": params, "param_uses": np.array(reads, int).reshape(-1, 2)}
    return make(edges, seconds, io, memory, group=group, is_backward=back, **facts)


def brute_force(problem: Problem) -> float:
    """Least load over all placements whose devices can be ordered along the forward edges."""
    g = problem.graph
    forward = g.edges[~g.is_backward[g.edges].any(axis=1)]
    chains = []
    for p in every_placement(problem):
        before = {(a, b) for a, b in p[forward].tolist() if a != b}
        if any(
            all(order.index(a) < order.index(b) for a, b in before)
            for order in itertools.permutations(range(problem.num_devices))
        ):
            chains.append(p)
    return float(score(problem, chains).min())


@settings(max_examples=120)
@given(st.integers(0, 10**6))
def test_equals_brute_force(seed: int) -> None:
    problem = draw(seed)
    solution = IdealDp()(problem)
    expected = brute_force(problem)
    assert solution.value_s == pytest.approx(expected, rel=1e-9)
    if np.isfinite(expected):
        placement = problem.check_placement(solution.placement)
        assert solution.value_s == score(problem, placement)[0]
        assert solution.stats["contiguous_optimum"]
        assert solution.lower_bound_s <= solution.value_s
    else:
        assert "bytes of parameters" in solution.stats["infeasible"]


def test_a_drawn_chain() -> None:
    # 0 --> 1 --> 2 --> 3 of 4, 1, 1, 4 seconds on two devices; a cut costs 1 on both sides.
    problem = equal([(0, 1), (1, 2), (2, 3)], [4, 1, 1, 4], 1.0, 2)
    solution = IdealDp()(problem)
    assert solution.value_s == 6  # [0 1 |1] [1| 2 3]
    assert solution.placement.tolist() == [0, 0, 1, 1]
    assert solution.lower_bound_s == pytest.approx(6)  # of any split
    assert (solution.stats["ideals"], solution.stats["num_items"]) == (5, 4)


def test_beats_the_linearised_program_where_orders_matter() -> None:
    # Two chains side by side: any one order mixes or stacks them, ideals need not.
    #   0 (3) --> 1 (3) --> 2 (3)        cutting a chain costs 10
    #   3 (1) --> 4 (1) --> 5 (7)
    chains = [(0, 1), (1, 2), (3, 4), (4, 5)]
    problem = equal(chains, [3, 3, 3, 1, 1, 7], 10.0, 2)
    solution = IdealDp()(problem)
    assert solution.value_s == 9
    assert sorted(np.bincount(solution.placement)) == [3, 3]


GRID = [(i, i + 1) for i in range(15) if i % 3 < 2] + [(i, i + 3) for i in range(12)]  # of 5 x 3


@pytest.mark.parametrize(
    ("edges", "num_ops", "ideals"),
    [
        (chain(70), 70, 71),  # of more than one word of bits
        ([], 8, 2**8),  # an antichain
        (GRID, 15, math.comb(8, 3)),  # ways to step down from one corner to the other
    ],
)
def test_ideals_of_known_graphs(edges: list[tuple[int, int]], num_ops: int, ideals: int) -> None:
    solution = IdealDp()(equal(edges, [1.0] * num_ops, 0.5, 2))
    assert solution.stats["ideals"] == ideals


def test_reductions() -> None:
    # Groups {0, 2} and {1} form a cycle and become one item; 4 costs nothing and has one
    # neighbour, 3, which it joins; 5 costs nothing but has two.
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (3, 5), (5, 6)]
    problem = equal(edges, [1, 1, 1, 1, 0, 0, 1], 1.0, 2, group=[0, 1, 0, 2, 3, 4, 5])
    item, order = contract(problem)
    assert item.tolist() == [0, 0, 0, 1, 1, 2, 3]
    assert order.tolist() == [[0, 1], [1, 2], [2, 3]]
    # Backward operators 3, 4, 5: 3 and 5 have mates, 4 has none: its item stands where the
    # mirror image 0 <- 1 of its edges puts it, between theirs.
    #   0 --> 1 --> 2 --> (3 = back of 2) --> (4) --> (5 = back of 0)
    edges = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    back = [False] * 3 + [True] * 3
    problem = equal(edges, [1.0] * 6, 1.0, 2, group=[0, 1, 2, 2, 3, 0], is_backward=back)
    item, order = contract(problem)
    names = {"0": item[0], "1": item[1], "2": item[2], "orphan": item[4]}
    assert len(set(names.values())) == 4
    expected = {("0", "1"), ("1", "2"), ("0", "orphan"), ("orphan", "2")}
    assert set(map(tuple, order.tolist())) == {(names[a], names[b]) for a, b in expected}


def test_limits_are_never_silent() -> None:
    problem = equal([], [1.0 + 0.1 * i for i in range(12)], 0.1, 3)
    exact = IdealDp()(problem)
    with pytest.warns(RuntimeWarning, match="memory_bytes = 1000"):
        small = IdealDp(memory_bytes=1000)(problem)
    with pytest.warns(RuntimeWarning, match="seconds"):
        quick = IdealDp(seconds=1e-9)(equal([], [1.0 + 0.1 * i for i in range(17)], 0.1, 5))
    with pytest.warns(RuntimeWarning, match="max_steps = 60000 were over before all stages"):
        counted = IdealDp(seconds=None, max_steps=60000)(problem)
    assert exact.stats["sets"] > counted.stats["sets"] > 0
    with pytest.warns(RuntimeWarning, match="max_steps = 1 are too few for the ideals"):
        IdealDp(seconds=None, max_steps=1)(problem)
    with pytest.warns(RuntimeWarning, match="ideals = False: the best split found"):
        line = IdealDp(ideals=False)(problem)
    assert line.value_s == exact.stats["linearised_s"] and line.stats["ideals"] == 0
    with pytest.warns(RuntimeWarning, match="seconds = 1e-09 are too few for the ideals"):
        wide = IdealDp(seconds=1e-9)(equal([], [1.0] * 20, 0.1, 2))
    for solution in (small, quick, counted, line, wide):
        assert not solution.stats["contiguous_optimum"]
        assert "not proved optimal" in solution.stats["message"]
        assert np.isfinite(solution.value_s)
    assert exact.value_s <= small.value_s == small.stats["linearised_s"]


def test_without_time_runs_of_items_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    # 200 operators of 1 s and 2 devices: 50 runs of 4 can be cut in the middle.
    problem = equal(chain(200), [1.0] * 200, 0.0, 2)
    clock = itertools.count()
    load("ideal_dp")(problem)  # the kernels are compiled
    extend = Mock(wraps=ideal_kernels.extend)
    monkeypatch.setattr(ideal_kernels, "extend", extend)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    with pytest.warns(RuntimeWarning, match="not proved optimal"):
        solution = load("ideal_dp", seconds=1)(problem)
    assert solution.value_s == 100
    assert not solution.stats["contiguous_optimum"]
    assert max(len(call.args[0].spans) for call in extend.call_args_list) <= 51


def test_operators_that_cost_nothing_are_joined_only_where_that_loses_nothing() -> None:
    # Together their parameters fit on no device, apart they do.
    seconds = np.array([[1.0, 1.0], [0.0, 0.0]])
    facts = {"param_bytes": [6, 6], "param_uses": [(0, 0), (1, 1)]}
    apart = make([(0, 1)], seconds, np.zeros((2, 2)), [10, 10], **facts)
    solution = IdealDp()(apart)
    assert solution.value_s == 1 and solution.stats["contiguous_optimum"]
    # Two devices of 100 B. With 1 joined to 2 the best is {0 1 2 | 3}, 9 | 4 s; {1 2 3} has 110 B.
    # Apart {0 1 | 2 3} takes 5 | 8 s.
    #   0 (5 s, 10 B) --> 2 (4 s, 30 B) --> 3 (4 s, 30 B)
    #   1 (0 s, 50 B) --> 2
    table = np.repeat([[5.0], [0.0], [4.0], [4.0]], 2, axis=1)
    holds = {"param_bytes": [10, 50, 30, 30], "param_uses": [(n, n) for n in range(4)]}
    edges = [(0, 2), (1, 2), (2, 3)]
    better = make(edges, table, np.zeros((4, 2)), [100, 100], **holds)
    solution = IdealDp()(better)
    assert solution.value_s == 8 and solution.stats["contiguous_optimum"]
    assert (solution.stats["num_items"], len(contract(better)[1])) == (4, 3)
    exact = load("mip", contiguous=True, start="single_device")(better)
    assert exact.value_s == 8 == pytest.approx(exact.stats["contiguous_bound_s"], rel=1e-5)
    # Twice the memory holds everything: 1 is joined as ever.
    wide = make(edges, table, np.zeros((4, 2)), [200, 200], **holds)
    assert IdealDp()(wide).stats["num_items"] == 3
    # Together 1 and 2 fit on no fast device: only the slow one would hold them.
    table = np.array([[0.0, 0.0], [1.0, 10.0]])
    pair = {"param_bytes": [40, 40], "param_uses": [(0, 0), (1, 1)]}
    assert IdealDp()(make([(0, 1)], table, np.zeros((2, 2)), [50, 1000], **pair)).value_s == 1
    # Nor where support differs: joining 1, operator 0 would drag it to the slow device.
    table = np.array([[0.0, np.inf], [9.0, 1.0]])
    assert IdealDp()(make([(0, 1)], table, np.zeros((2, 2)))).value_s == 1
    # The first reads a model input of 10 s on device n; the second takes 1000 s on c, 10 on n.
    fed = small_problem(
        [[0, 0], [1000, 10]], tensors=[(-1, 100, [0]), (0, 1, [1])], link=(0.0, 10.0),
        device={"kind": ["cpu", "npu"]}, objective="max_load",
    )  # fmt: skip
    assert IdealDp()(fed).value_s == pytest.approx(10.1)


def test_a_split_that_is_too_large_for_one_micro_batch_alone_says_so() -> None:
    """Other operators are slow beside busy devices: then everything is over before it piles up."""
    away = np.inf
    seconds = np.array([[1, away], [1, away], [away, 2], [away, 2]])
    loaded = np.array([[10, away], [10, away], [away, 2], [away, 2]])
    problem = small_problem(
        seconds, [(0, 2), (1, 3)], tensor_bytes=[10, 10, 0, 0], devices=("a", "b"),
        memory_bytes=[10**6, 15], links=(Link("a", "b", 0.5),), profile={"loaded_s": loaded},
        objective="latency", max_in_flight=1, num_microbatches=8,
    )  # fmt: skip
    for name in ("ideal_dp", "best_of"):
        solution = load(name)(problem)
        assert solution.value_s == np.inf and "'b' needs 20 bytes" in solution.stats["infeasible"]


def test_any_objective_scores_the_same_split() -> None:
    problem = equal([(0, 1), (1, 2)], [1.0, 2.0, 3.0], 0.5, 2)
    aims = ("max_load", "period", "latency")
    splits = [load("ideal_dp")(problem.with_objective(aim)) for aim in aims]
    assert len({s.placement.tobytes() for s in splits}) == 1
    assert splits[1].value_s == score(problem.with_objective("period"), splits[1].placement)[0]


DATA = Path(__file__).parents[3] / "shared" / "data" / "dnn_partitioning"
TRUTH = json.loads((DATA / "truth.json").read_text()) if DATA.is_dir() else []
OPTIMA = [row for row in TRUTH if row["method"] == "own_dp_contiguous"]


@pytest.mark.parametrize("row", OPTIMA, ids=lambda row: row["file"])
def test_published_workloads(row: dict[str, object]) -> None:
    """The contiguous optimum to 1e-6, the number of ideals, and not a byte too many."""
    problem = importers.load(DATA / str(row["file"]))
    with warnings.catch_warnings(action="error"):
        solution = IdealDp()(problem)
    assert solution.value_s * 1e3 == pytest.approx(row["value"], rel=1e-6)
    assert solution.stats["ideals"] == row["ideals"]
    most_s = device_loads(problem, solution.placement).max()
    assert solution.value_s == pytest.approx(most_s, rel=1e-12)
    assert (problem.param_bytes_on(solution.placement) <= problem.memory_bytes).all()
    mine = [r for r in TRUTH if r["file"] == row["file"]]
    balance = next(r["value"] for r in mine if r["method"] == "balance_bound")
    assert balance * (1 - 1e-9) <= solution.lower_bound_s * 1e3 <= row["value"] * (1 + 1e-9)


def test_published_workloads_are_here() -> None:
    if not OPTIMA:
        pytest.skip(f"no reference data: {DATA} does not exist")
    assert len(OPTIMA) == 15


def test_what_has_no_time_does_not_depend_on_the_unit_of_time() -> None:
    """Four operators of half a nanosecond are split as four of half a second."""
    edges = [(0, 1), (1, 2), (2, 3)]
    for unit in (1.0, 1e-9, 1e-12):
        problem = equal(edges, [0.5 * unit] * 4, 0.01 * unit, 4)
        answer = load("ideal_dp")(problem)
        assert answer.value_s == pytest.approx(0.52 * unit)  # the two in the middle
        assert len(set(answer.placement.tolist())) == 4


def test_too_many_kinds_of_devices_are_refused_before_any_work(monkeypatch):
    """With many operators the linear program of the balance takes minutes."""

    def fail(*_: object) -> None:
        raise AssertionError("a linear program for nothing")

    rng = np.random.default_rng(0)
    problem = make([(0, 1), (1, 2)], rng.uniform(1, 2, (3, 24)), np.zeros((3, 24)))
    monkeypatch.setattr("placement.planners.ideal_dp.balance_prices", fail)
    with pytest.raises(PlannerError, match=r"24 kinds of devices make 16777216 sets .*max_states"):
        load("ideal_dp")(problem)


def test_what_takes_a_little_time_is_not_joined() -> None:
    """0 --> 1 beside 2: the 0.9 ns of 0 go to the device that has them left, before that of 1."""
    problem = equal([(0, 1)], [0.9e-9, 1e-5, 1e-5 - 0.9e-9], 0.0, 2)
    solution = IdealDp()(problem)
    assert solution.value_s == pytest.approx(1e-5, rel=1e-6)
    assert solution.placement.tolist() in ([0, 1, 0], [1, 0, 1])
