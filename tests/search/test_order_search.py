"""Placement and order searched together: exact timetables, estimates, moves."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cluster import Link
from placement.plan import load_plan, make_plan
from placement.planners import PlannerError, load
from placement.planners.order_search import (
    OrderSearch,
    anneal,
    sequence_of,
    start,
    state_of,
    tables_of,
    why_not,
    why_simulated,
)
from placement.problem import Problem
from placement.report.run_folder import read_run
from placement.runs.compare import compare
from placement.schedule import in_sequence
from placement.search import order
from placement.search import order_estimates as estimates
from placement.search import order_moves as moves
from placement.search import order_times as times
from placement.search.evaluation import Search
from placement.simulator import score, simulate, simulate_reference, value_of
from placement.testing import check_planner
from tests.envs.test_envs import chain
from tests.problems import (
    altered,
    every_placement,
    plain,
    random_placement,
    random_problem,
    small_problem,
)

RNG = np.random.default_rng
FORTY = plain(random_problem(7, 40, 3))


def measured(problem: Problem) -> Problem:
    """The problem with all that makes times depend on what else happens, but memory suffices."""
    links = {"wake_s": 0.3, "send_s": 0.1, "receive_s": lambda x: 0.2 * (x.src < x.dst)}
    slower = problem.compute_s * RNG(0).uniform(1.0, 2.0, problem.compute_s.shape)
    problem = altered(problem, {"memory_bytes": 2**62}, links, loaded_s=slower)
    return problem.with_objective("latency")


def free(problem: Problem) -> Problem:
    """The problem with links that take no time."""
    links = {"latency_s": 0.0, "bandwidth_bytes_per_s": np.inf}
    return altered(problem, links=links, transfer_s=None)


def random_sequence(problem: Problem, seed: int) -> np.ndarray:
    """int32 ``[N]``: operators in a random order with producers first."""
    rng, g = RNG(seed), problem.graph
    done: list[int] = []
    while len(done) < problem.num_ops:
        waiting = {d for s, d in g.edges.tolist() if s not in done}
        ready = [i for i in range(problem.num_ops) if i not in waiting and i not in done]
        done.append(int(rng.choice(ready)))
    return np.array(done, np.int32)


def latency_s(problem: Problem, placement: np.ndarray, sequence: np.ndarray) -> float:
    """What the simulator says of devices that run their operators in ``sequence``."""
    schedule = in_sequence(placement, sequence, problem.num_devices)
    return float(simulate(problem, placement, schedule).latency_s)


def optimum(problem: Problem) -> float:
    """The least latency of all placements and orders."""
    edges, best = problem.graph.edges.tolist(), np.inf
    for sequence in permutations(range(problem.num_ops)):
        at = {op: k for k, op in enumerate(sequence)}
        if all(at[a] < at[b] for a, b in edges):
            order = np.array(sequence, np.int32)
            best = min(best, *(latency_s(problem, p, order) for p in every_placement(problem)))
    return best


def started(problem: Problem, seed: int, width: int = 16) -> Any:
    tables, state = tables_of(problem), state_of(problem, width)
    start(tables, state, random_placement(problem, seed), random_sequence(problem, seed), RNG(seed))
    return tables, state


@given(
    seed=st.integers(0, 100_000), contention=st.booleans(), like=st.sampled_from([plain, measured])
)
def test_timetables_are_the_simulators(seed: int, contention: bool, like: Any) -> None:
    problem = like(random_problem(seed, grouped=True, unsupported=True))
    problem = replace(problem, contention=contention)
    assert not why_not(problem) and bool(why_simulated(problem)) == (like is measured)
    state = started(problem, seed)[1]
    schedule = in_sequence(state.place, state.sequence, problem.num_devices)
    for run in (simulate, simulate_reference):
        timeline = run(problem, state.place, schedule)
        if not np.isfinite(timeline.end_s).all():
            assert state.cost_s == 1e30
            return
        np.testing.assert_allclose(state.end_s, timeline.end_s[0], rtol=1e-9)
        np.testing.assert_allclose(state.start_s, timeline.start_s[0], rtol=1e-9)
        assert state.cost_s == pytest.approx(timeline.latency_s, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 100_000),
    num_ops=st.sampled_from([15, 15, 15, 130]),  # of 130 operators passes begin in the middle
    tabu=st.booleans(),
    like=st.sampled_from([plain, lambda p: free(plain(p)), measured]),
)
def test_moves_keep_an_order_that_can_run(seed: int, num_ops: int, tabu: bool, like: Any) -> None:
    """After any number of moves the state is what it would be if it had begun there."""
    problem = like(random_problem(seed, num_ops, 3, grouped=True, unsupported=True))
    tables, state = started(problem, seed)
    steps = 40 if num_ops < 100 else 300  # the sequence is put in order of time, too
    order.play(tables, state, steps, tabu, 0.25)
    again = state_of(problem, 16)
    again.place[:], again.sequence[:] = state.place, state.sequence
    assert times.evaluate(tables, again) == state.cost_s
    assert state.position[state.sequence].tolist() == list(range(num_ops))
    seconds = ("start_s", "end_s", "hand_s", "arrival_s", "after_s", "users_s", "from_s")
    for name in (*seconds, "lane", "lane_ptr", "in_lane", "load", "mark"):
        np.testing.assert_array_equal(getattr(state, name), getattr(again, name), err_msg=name)
    np.testing.assert_array_equal(state.row_s[0], again.row_s[0])
    np.testing.assert_array_equal(state.try_arrival_s, state.arrival_s)
    problem.check_placement(state.best_place)  # colocation, support
    best = in_sequence(state.best_place, state.best_sequence, problem.num_devices)
    best.check(problem.graph, problem.cluster, state.best_place)
    timeline = simulate(problem, state.best_place, best).latency_s
    if np.isfinite(timeline):
        assert timeline == pytest.approx(state.best_s, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_moves_on_the_critical_chain_change_an_end_of_a_block(seed: int) -> None:
    """Another order within a block leaves the chain as long as it is."""
    problem = free(plain(random_problem(seed, 40, 3)))
    tables, state = started(problem, seed, width=64)
    order.play(tables, state, 60, True, 0.25)
    assert state_of(problem, 1).free_s.shape == (3,), "no channel"
    for k in np.flatnonzero(state.which >= 0):
        i, at = state.which[k], np.int64(state.at[k])
        assert state.on_chain[i]
        if state.to[k] == state.place[i]:
            a, b = moves._block(state, i)
            block = state.lane[a : b + 1].copy()
            back = order._shift(state, i, at)
            moved = block[np.argsort(state.position[block])]
            order._shift(state, i, back)
            assert moved[0] != block[0] or moved[-1] != block[-1]


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_a_pass_that_begins_and_ends_in_the_middle_is_exact(seed: int) -> None:
    """Its latency is that of a whole pass; it is given up only where that is above the limit."""
    problem = plain(random_problem(seed, 130, 3))
    tables, state = started(problem, seed)
    whole, rng = state_of(problem, 16), RNG(seed)
    for k in np.flatnonzero(state.which >= 0)[:8]:
        i, old, at = state.which[k], state.place[state.which[k]], np.int64(state.at[k])
        limit = state.cost_s * rng.choice([0.99, 1.0, 1.01, np.inf])
        num = order._members(tables, state, k)
        first, moved = order._concerned(tables, state, k, num)
        order._put(state, num, np.int64(state.to[k]))
        back = order._shift(state, i, at) if at >= 0 else at
        whole.place[:], whole.sequence[:] = state.place, state.sequence
        latency = times.evaluate(tables, whole)
        reached = times.timetable(tables, state, first, moved, limit)
        assert reached == latency or (reached == 1e30 and latency > limit)
        times.forget(tables, state)
        order._put(state, num, np.int64(old))
        if at >= 0:
            order._shift(state, i, back)
        np.testing.assert_array_equal(state.try_arrival_s, state.arrival_s)


def two_lanes() -> Problem:
    """Operators a to e; a, c, e begin on device 0, b and d on 1. c uses a, d uses b, e uses c.

    Sending takes 1 s::

        0  aaaa cc e        a 4, c 2, e 1
        1  b ddd            b 1, d 3
    """
    seconds = np.tile(np.array([[4.0], [1.0], [2.0], [3.0], [1.0]]), (1, 2))
    edges = [(0, 2), (1, 3), (2, 4)]
    return small_problem(seconds, edges, link=(1.0, 1.0), objective="latency")


def test_heads_tails_and_estimates_by_hand() -> None:
    problem = two_lanes()
    tables, state = tables_of(problem), state_of(problem, 4)
    placement = np.array([0, 1, 0, 1, 0], np.int32)
    start(tables, state, placement, np.arange(5, dtype=np.int32), RNG(0))
    assert state.start_s.tolist() == [0, 0, 4, 1, 6]
    assert state.cost_s == 7
    assert state.after_s.tolist() == [3, 3, 1, 0, 0]  # from the end of each to that of all
    assert state.chain[: state.num_chain].tolist() == [4, 2, 0]
    # e to device 1: c ends at 6, its tensor is there at 7, d has ended at 4: 8 s in all.
    assert estimates.inputs_s(tables, state, 4, 1) == 7
    assert estimates.elsewhere(tables, state, 4, 1, 7.0, 5) == (8, 7)
    # c to device 1, before d (position 1 of that lane): a's tensor at 5, c until 7, then d: 10.
    assert estimates.elsewhere(tables, state, 2, 1, 5.0, 4) == (10, 5)
    # behind d: c from 5 to 7, its tensor back at 8, e until 9.
    assert estimates.elsewhere(tables, state, 2, 1, 5.0, 5) == (9, 5)
    # c and e together to device 1, where they are in the sequence, which is in order of time:
    # behind d, c from 5 to 7, e to 8.
    assert state.sequence.tolist() == [0, 1, 3, 2, 4]
    for room in ([3, 4], [4, 3]):  # in whatever order they are given
        state.room[:2] = room
        assert estimates.together(tables, state, 1, 2) == 8
    assert list(state.room[:2]) == [3, 4]
    for i, at, latency in ((2, 4, 9.0), (4, 5, 8.0)):  # and that is what they take
        state.place[i] = 1
        back = order._shift(state, i, at)
        assert times.timetable(tables, state, -1, 99, np.inf) == latency
        order._shift(state, i, back)
        state.place[i] = 0
        assert state.sequence.tolist() == [0, 1, 3, 2, 4]


def test_estimates_of_a_measured_machine_by_hand() -> None:
    """Operators take twice as long beside a busy device; waking one takes its sender 0.5 s."""
    problem = two_lanes()
    costs = {"wake_s": 0.5, "send_s": 0.25}
    problem = altered(problem, links=costs, loaded_s=2 * problem.compute_s)
    tables, state = tables_of(problem), state_of(problem, 4)
    placement = np.array([0, 1, 0, 1, 0], np.int32)
    start(tables, state, placement, np.arange(5, dtype=np.int32), RNG(0))
    # 0  aaaaaaaa cc e       a and b begin beside each other, and so does d
    # 1  bb dddddd
    assert state.end_s.tolist() == [8, 2, 10, 8, 11] and state.cost_s == 11
    assert state.from_s.tolist() == [11, 8, 3, 6, 1] and not state.hand_s.any()
    assert estimates._seconds(tables, state, 4, 1, 8.5) == 2  # c runs
    assert estimates._seconds(tables, state, 2, 1, 8.5) == 2  # beside nobody but itself
    assert estimates._seconds(tables, state, 3, 0, 1.0) == 6  # b runs
    # a sends to c's device: while c runs there is nobody to wake.
    assert estimates._handing_s(tables, state, 0, 1, 9.0) == 0.25
    assert estimates._handing_s(tables, state, 0, 1, 12.0) == 0.75
    # e to device 1: c ends at 10, its tensor is there at 11, e runs beside nobody.
    assert estimates.elsewhere(tables, state, 4, 1, 11.0, 5) == (12, 11)
    # d to device 0, behind e: b hands its tensor over, and then nobody waits for device 1.
    assert estimates._handed_s(tables, state, 3, 0) == 0
    # c to device 1: a wakes it, 8.75, then e.
    assert estimates._handed_s(tables, state, 2, 1) == 9.75
    state.place[2] = 1  # c begins at 9 on device 1, e at 12; as a ends, d does
    assert state.sequence.tolist() == [0, 1, 3, 2, 4]
    assert times.timetable(tables, state, -1, 99, np.inf) == 13
    assert state.try_hand_s.tolist() == [0.25, 0, 0.75, 0, 0]


def test_another_order_by_hand() -> None:
    """b (1 s) before a (4 s) on one device: who waits for b begins earlier; and back again."""
    problem = two_lanes()
    tables, state = tables_of(problem), state_of(problem, 4)
    # 0  aaaa b cc e     d waits for b, which is sent until 6, and ends at 9.
    # 1             ddd
    start(tables, state, np.array([0, 0, 0, 1, 0], np.int32), np.arange(5, dtype=np.int32), RNG(0))
    assert state.cost_s == 9 and state.in_lane[1] == 1
    # 0  b aaaa cc e     b first: d from 2 to 5, all else as it was: 8.
    assert estimates.reordered(tables, state, 1, 0.0, 0) == 8
    # a behind b is the same order.
    assert estimates.reordered(tables, state, 0, 0.0, 1) == 8
    back = order._shift(state, 1, 0)
    assert state.sequence.tolist() == [1, 0, 2, 3, 4]
    assert times.timetable(tables, state, -1, 99, np.inf) == 8
    order._shift(state, 1, back)
    assert state.sequence.tolist() == list(range(5))


@given(seed=st.integers(0, 100_000))
def test_no_latency_is_below_the_estimate_where_channels_are_free(seed: int) -> None:
    """Of one that stays where it is in the sequence: the path through it is one afterwards, too.

    Nothing before it in the sequence begins earlier for it, and nothing after it has it on its way.
    """
    problem = replace(plain(random_problem(seed, 12, 3)), contention=False)
    tables, state = started(problem, seed)
    if state.cost_s >= 1e30:
        return
    rng = RNG(seed)
    for i in range(problem.num_ops):
        old = state.place[i]
        new = int((old + 1 + rng.integers(2)) % 3)
        ready = estimates.inputs_s(tables, state, i, new)
        place = estimates.first_in_lane(state, new, state.position, state.position[i])
        estimate, _ = estimates.elsewhere(tables, state, i, new, ready, place)
        state.room[0] = state.position[i]  # a body of one is the same
        assert estimates.together(tables, state, new, 1) == pytest.approx(estimate)
        state.place[i] = new
        assert times.timetable(tables, state, -1, 99, np.inf) >= min(estimate, 1e30) * (1 - 1e-9)
        state.place[i] = old


@settings(max_examples=30)
@given(seed=st.integers(0, 100_000))
def test_off_the_critical_chain_no_move_is_said_to_gain(seed: int) -> None:
    """However short the path through it: the chain is as long as before."""
    state = started(plain(random_problem(seed, 15, 3)), seed)[1]
    moves = np.flatnonzero(state.which >= 0)
    off = moves[~state.on_chain[state.which[moves]]]
    assert (state.score[off] <= 0).all()


@pytest.mark.parametrize("like", [plain, measured])
def test_the_best_of_all_placements_and_orders(like: Any) -> None:
    """Five operators on two devices: every placement in every order that can run."""
    for seed in range(4):
        problem = like(random_problem(seed + 40, 5, 2))
        best = optimum(problem)
        solution = OrderSearch(evaluations=2000)(problem)
        assert solution.value_s == pytest.approx(best, rel=1e-9)
        assert value_of(problem, solution) == pytest.approx(best, rel=1e-9)


def test_the_contract() -> None:
    problems = [like(random_problem(s, 12, 3)) for s in range(3) for like in (plain, measured)]
    check_planner(OrderSearch(evaluations=300), problems)


def test_what_takes_no_time_waits_for_what_its_channel_carries() -> None:
    """a runs on d0, b on d1, whose tensor takes 10 s, and c (5 s) on d2, whose tensor takes none.

    Both leave d0 by one channel, that of b first: 1 + 10 + 5 s.
    """
    out = Link("d0", "d1", 10.0, channel="out"), Link("d0", "d2", channel="out")
    seconds = np.where(np.eye(3, dtype=bool), [1.0, 1.0, 5.0], np.inf)
    tensors = [(0, 1, [1]), (0, 1, [2])]
    problem = small_problem(seconds, tensors=tensors, links=out, objective="latency")
    assert score(problem, [[0, 1, 2]])[0] == 16.0
    check_planner(OrderSearch(evaluations=50), [problem])


def test_it_begins_at_the_start() -> None:
    first = load("heft")(FORTY)
    solution = OrderSearch(evaluations=500, start="heft")(FORTY)
    assert solution.value_s <= first.value_s
    if solution.schedule is not None:
        alone = float(score(FORTY, solution.placement)[0])
        assert solution.stats["list_order_value_s"] == alone
    other = OrderSearch(seconds=0.2, start="heft")(FORTY)
    assert other.value_s <= first.value_s


def test_a_search_begins_where_another_ended_with_its_order() -> None:
    search = Search(FORTY, evaluations=3000)
    answer = search.run(OrderSearch(evaluations=2000, start="heft"))
    assert search.best_cost == answer.value_s
    assert search.solution().schedule is answer.schedule


@pytest.mark.parametrize(
    ("change", "words"),
    [({"objective": "period"}, "not period"), ({"ready_order": "arrival"}, "arrival")],
)
def test_problems_whose_orders_are_not_searched(change: dict[str, Any], words: str) -> None:
    problem = replace(plain(random_problem(3, 10, 3)), **change)
    assert words in why_not(problem)
    with pytest.raises(PlannerError, match=rf"order_search: .*{words}.*macro_search"):
        OrderSearch(evaluations=10)(problem)


def test_what_is_simulated_and_what_is_refused() -> None:
    problem = plain(random_problem(3, 10, 3))
    first, *others = problem.profile.links
    assert "loaded_s" in why_simulated(altered(problem, loaded_s=problem.compute_s * 1.2))
    assert "share" in why_simulated(altered(problem, links={"channel": "bridge"}))
    reasons = {"block": {"blocking": True}, "occupies": {"send_s": 1.0}, "wakes": {"wake_s": 1.0}}
    for word, change in reasons.items():  # of one link
        profile = replace(problem.profile, links=(replace(first, **change), *others))
        assert word in why_simulated(replace(problem, profile=profile))
    assert "memory" in why_not(altered(problem, {"memory_bytes": 10}))
    # One micro-batch is all that is in flight, whatever a pipelined run may hold at a time.
    g = problem.graph
    once = int(g.param_bytes.sum() + g.tensor_bytes.sum())
    for room, binds in ((once, False), (once - 1, True)):
        tighter = replace(altered(problem, {"memory_bytes": room}), max_in_flight=4)
        assert tighter.memory_may_bind and ("memory" in why_not(tighter)) == binds
        solution = load("random_search", evaluations=2)(tighter)
        assert solution.value_s == score(tighter, solution.placement)[0]


def test_a_plan_keeps_the_order(tmp_path: Path) -> None:
    problem = chain(RNG(5).random((7, 3)) + 0.2, latency_s=0.1).with_objective("latency")
    problem = plain(problem)
    solution = OrderSearch(evaluations=500)(problem)
    sequence = sequence_of(problem, solution.placement)
    schedule = in_sequence(solution.placement, sequence, problem.num_devices)
    solution = replace(solution, schedule=schedule)
    plan = make_plan(problem, solution, planner="order_search")
    assert plan.predicted.value_s == pytest.approx(solution.value_s)
    assert plan.predicted.latency_s == pytest.approx(solution.value_s)
    assert plan.num_microbatches == 1 and plan.order is not None
    assert not plan.inconsistencies()
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.timeline(problem).latency_s == pytest.approx(solution.value_s)
    # What comes first in the order comes first in a pipeline, too.
    assert np.argsort(loaded.priority).tolist() == sequence.tolist()


def test_a_comparison_keeps_the_order(tmp_path: Path) -> None:
    problems = {"p": FORTY}
    planners = {"order_search": OrderSearch(evaluations=2000, start="heft")}
    first = compare(problems, planners, [0], out_dir=tmp_path)
    again = compare(problems, planners, [0], out_dir=tmp_path)  # what is finished is read
    for comparison in (first, again):
        (row,) = (r for r in comparison.rows if r.planner == "order_search")
        solution = comparison.solutions["p", "order_search", 0]
        assert solution.schedule is not None
        assert row.value_s == row.latency_s == value_of(FORTY, solution) == solution.value_s
    assert read_run(tmp_path).comparison is not None
    assert make_plan(FORTY, solution, planner="order_search").order is not None


def test_nothing_to_search() -> None:
    problem = small_problem(np.ones((1, 2)), tensor_bytes=1, objective="latency")
    assert OrderSearch(evaluations=10)(problem).value_s == 1.0
    search = Search(problem, evaluations=10)
    search.cost(np.zeros(1, np.int32))
    assert anneal(search, 4, 0) == {"steps": 0}
