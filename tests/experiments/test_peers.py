"""The work of published systems: what their simulators do, and the problems they use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from experiments import sharded
from placement.importers import FormatError, load
from placement.planners import load as planner
from placement.problem import Problem, ProblemError
from placement.simulator import score, simulate, simulate_reference
from placement.workloads.synthetic import giph
from tests.problems import problems, random_placement, small_problem, written

SIMULATORS = pytest.mark.parametrize("run", [simulate, simulate_reference])


def drawn(seconds: list[float], tensors: Any, devices: int, **options: Any) -> Problem:
    """Equal devices; sending takes a second per byte."""
    names = [chr(ord("A") + i) for i in range(len(seconds))]
    some = {"link": (0.0, 1.0), "graph": {"op_name": names}, "num_microbatches": 1}
    compute = np.repeat(np.array(seconds)[:, None], devices, axis=1)
    return small_problem(compute, tensors=tensors, **some, **options)


@SIMULATORS
@pytest.mark.parametrize(("contention", "ends"), [(True, [1, 5, 8]), (False, [1, 5, 6])])
def test_without_contention_a_channel_carries_any_number_of_tensors(run, contention, ends):
    # d0      A.......       A.....
    # d0->d1  .aaabbb.       .aaa..     and bbb beside it
    # d1      ....B..C       ....BC
    problem = drawn([1, 1, 1], [(0, 3, [1]), (0, 3, [2])], 2, contention=contention)
    timeline = run(problem, [0, 1, 1])
    assert timeline.end_s.tolist() == [ends]
    assert timeline.transfer_start_s.tolist() == ([1, 4] if contention else [1, 1])


@SIMULATORS
@pytest.mark.parametrize(("order", "starts"), [("priority", (8, 5)), ("arrival", (5, 6))])
def test_by_arrival_what_is_ready_first_runs_first(run, order, starts):
    # d0  B..........     D's input is there at 2, E's at 3, both while A runs; E has the
    # d2  CC.........     longer way to the end
    # d1  AAAAAEEED..     by priority
    # d1  AAAAADEEE..     by arrival
    problem = drawn([5, 1, 2, 1, 3], [(1, 1, [3]), (2, 1, [4])], 3, ready_order=order)
    timeline = run(problem, [1, 0, 2, 1, 1])
    assert tuple(timeline.start_s[0, 3:]) == starts


@SIMULATORS
def test_of_equal_arrivals_the_smaller_operator_is_first(run: Any) -> None:
    problem = drawn([1, 9], [], 1)
    assert run(problem, [0, 0]).start_s.tolist() == [[9, 0]]
    assert run(replace(problem, ready_order="arrival"), [0, 0]).start_s.tolist() == [[0, 1]]
    # Of two micro-batches the first one's operators come first.
    many = replace(problem, ready_order="arrival", num_microbatches=2, max_in_flight=2)
    assert run(many, [0, 0]).start_s.tolist() == [[0, 1], [10, 11]]


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ProblemError, match="ready_order 'fifo' is unknown; use one of"):
        drawn([1], [], 1, ready_order="fifo")


def check(problem: Problem, seed: int) -> None:
    """The kernel equals the reference, and a batch its placements."""
    p = random_placement(problem, seed)
    expected, timeline = simulate_reference(problem, p), simulate(problem, p)
    for what in ("start_s", "end_s", "transfer_start_s", "transfer_end_s", "peak_bytes"):
        a, b = getattr(timeline, what), getattr(expected, what)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=f"{what}, seed {seed}")
    value = score(replace(problem, objective="latency"), p)[0]
    alone = simulate_reference(problem, p, num_microbatches=1)
    fits = (alone.peak_bytes <= problem.memory_bytes).all()
    assert not fits or value == pytest.approx(alone.latency_s, rel=1e-9)


ORDERS = st.sampled_from([(False, "arrival"), (True, "arrival"), (False, "priority")])


@given(problems(grouped=True, unsupported=True), ORDERS, st.integers(0, 100))
def test_kernel_equals_reference(problem: Problem, how: tuple[bool, Any], seed: int) -> None:
    check(replace(problem, contention=how[0], ready_order=how[1]), seed)


@given(problems(max_ops=4), st.integers(0, 100))
def test_more_bandwidth_for_all_is_never_slower_in_a_given_order(problem: Problem, s: int) -> None:
    # Transfers that need not wait arrive no later; an operator alone on its device begins then.
    alone = replace(problem, num_microbatches=1)
    assume(alone.num_ops <= alone.num_devices)
    p = np.arange(alone.num_ops, dtype=np.int32)
    shared, free = simulate(alone, p), simulate(replace(alone, contention=False), p)
    blocked = alone.link_blocking.any()
    assert blocked or (free.end_s <= shared.end_s * (1 + 1e-12) + 1e-12).all()


# -- DOPPLER's graphs

# 0 -> 1, 0 -> 2, 1 -> 3, 2 -> 3, listed out of order; two inputs are not counted.
DOPPLER = """\
6
0, 1,
1, 0, 0, 2,
3, 1, 2, 3,
30000000000,10000000000,einsummable
20000000000,40000000000
10000000000,40000000000
50000000000,40000000000
"""


def test_work_of_our_modules_in_its_units(tmp_path: Path) -> None:
    """A product is m k n, all else its elements; a result has four bytes for each of either."""
    graph = sharded.captured(sharded.CASES[1], small=True)  # 16 x 32, a hidden layer of 64
    units, products = sharded.costs(graph)
    assert units.tolist() == [16 * 32 * 64, 16 * 64, 16 * 64 * 32, 16 * 32]
    assert products.tolist() == [True, False, True, False]
    made = graph.tensor_src >= 0
    by_work, by_size = (sharded.sent(graph, units, products, rule)[made] for rule in sharded.RULES)
    assert by_work.tolist() == [4 * 16 * 32 * 64, 4 * 16 * 64, 4 * 16 * 64 * 32, 4 * 16 * 32]
    assert by_size.tolist() == [4 * 16 * 64, 4 * 16 * 64, 4 * 16 * 32, 4 * 16 * 32]
    path = written(tmp_path / "graph.txt", "3\n0,\n0,\n1,\n32768,131072\n1024,4096\n")
    assert sharded.theirs(path, "by size").graph.tensor_bytes.tolist()[:1] == [4096]


def test_a_graph_of_doppler(tmp_path: Path) -> None:
    problem = load(written(tmp_path / "graph.txt", DOPPLER), devices=2)
    assert (problem.objective, problem.ready_order) == ("latency", "arrival")
    assert problem.contention is False
    assert problem.cluster.device_names == ("gpu:0", "gpu:1")
    assert problem.graph.edges.tolist() == [[0, 1], [0, 2], [1, 3], [2, 3]]
    assert problem.graph.op_kind[0] == "einsummable"
    assert problem.compute_s.tolist() == [[3, 3], [2, 2], [1, 1], [5, 5]]
    # g0  AAABB........DDDDD     C's output takes 4 s
    # g1  ....C
    assert simulate(problem, [0, 0, 1, 0], num_microbatches=1).end_s.tolist() == [[3, 5, 5, 14]]
    assert load(written(tmp_path / "graph.txt", DOPPLER)).num_devices == 4
    spaced = DOPPLER.replace("50000000000,", "\n 50000000000 , ").rstrip() + ", mm-2 (fused)\n"
    other = load(written(tmp_path / "graph.txt", spaced), devices=2)
    assert other.compute_s.tolist() == problem.compute_s.tolist()
    assert other.graph.op_kind[3] == "mm-2 (fused)"
    assert load(written(tmp_path / "graph.txt", DOPPLER), objective="period").objective == "period"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("6\n", "7\n", "7 nodes, 2 of them inputs, but 4 lines of operators"),
        ("1, 0, 0, 2,", "1, 0, 0,", "3 producers in line 3, 4 consumers in line 4"),
        ("3, 1, 2, 3,", "4, 1, 2, 3,", r"edge \(1, 4\): operators are numbered 0..3"),
        ("3, 1, 2, 3,", "0, 1, 2, 3,", "edges form a cycle: 1 -> 0 -> 1"),
        ("20000000000,40", "2e10,40", "line 6: '2e10,40000000000' is not 'compute,transfer"),
    ],
)
def test_mistakes_in_a_graph_of_doppler(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert DOPPLER.count(old) == 1
    with pytest.raises(FormatError, match=message):
        load(written(tmp_path / "graph.txt", DOPPLER.replace(old, new)))


def test_options_of_a_graph_of_doppler(tmp_path: Path) -> None:
    path = written(tmp_path / "graph.txt", DOPPLER)
    with pytest.raises(FormatError, match="memory cannot be set: DOPPLER graphs take devices"):
        load(path, memory=1)
    with pytest.raises(FormatError, match="devices = 0 must be from 1 to 512"):
        load(path, devices=0)
    with pytest.raises(FormatError, match="3 lines: there must be four"):
        load(written(tmp_path / "graph.txt", "3\n0, 1\n1\n"))


# -- GiPH's problems


def test_problems_of_giph() -> None:
    sample = [giph(seed) for seed in range(60)]
    assert all(p.num_devices in range(15, 25) for p in sample)
    assert {p.num_devices for p in sample} >= {15, 24}
    assert all(10 <= p.num_ops <= 60 for p in sample)
    for p in sample:
        edges = p.graph.edges
        has_input, has_output = np.zeros((2, p.num_ops), bool)
        has_input[edges[:, 1]] = has_output[edges[:, 0]] = True
        # One source, one sink, and nothing else without a producer or a consumer.
        assert np.flatnonzero(~has_input).tolist() == [0]
        assert np.flatnonzero(~has_output).tolist() == [p.num_ops - 1]
        # Rank 1: work over speed, so ratios between devices are the same for all operators.
        seconds = p.compute_s
        for a in range(p.num_devices):
            both = np.isfinite(seconds[:, [0, a]]).all(axis=1)
            ratio = seconds[both, 0] / seconds[both, a]
            assert len(ratio) == 0 or np.ptp(ratio) < 1e-9
        finite = seconds[np.isfinite(seconds)]
        assert finite.min() >= 80e-3 / 7 and finite.max() <= 120e-3 / 3
        off = ~np.eye(p.num_devices, dtype=bool)
        assert p.link_latency_s[off].max() <= 20e-3
        assert np.array_equal(p.link_latency_s, p.link_latency_s.T)
        assert (1e6 * p.link_s_per_byte[off] >= 0.006e-3).all()
        assert (1e6 * p.link_s_per_byte[off] <= 0.014e-3).all()
    assert not sample[0].contention and sample[0].ready_order == "arrival"
    again = giph(7)
    assert again.graph.fingerprint == sample[7].graph.fingerprint
    assert np.array_equal(again.compute_s, sample[7].compute_s)


def test_every_baseline_places_a_problem_where_no_split_is_contiguous() -> None:
    problem = giph(0)
    single = planner("single_device")(problem).value_s
    assert np.isfinite(single)
    for name in ("heft", "contiguous_dp", "m_etf", "best_of"):
        assert np.isfinite(planner(name)(problem).value_s), name
