"""Periodic placements: micro-batch m runs where row m mod K says, in every definition alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.bounds import lower_bound, lower_bounds
from placement.exporters import Inexpressible, load, moved
from placement.plan import load_plan, make_plan
from placement.problem import Placement, Problem, ProblemError, Solution
from placement.report import gantt, usage
from placement.schedule import ScheduleError
from placement.simulator import (
    analytic,
    evaluate,
    list_schedule,
    score,
    simulate,
    simulate_reference,
    value_of,
)
from placement.simulator.memory import memory_steps
from tests.problems import altered, random_problem, small_problem

FIELDS = ("start_s", "end_s", "transfer_start_s", "transfer_end_s", "peak_bytes")


def periodic(seed: int, **options: bool) -> tuple[Problem, Placement]:
    """A random problem, and a placement of it with 2 to 5 phases."""
    problem, rng = random_problem(seed, **options), np.random.default_rng(seed + 10**6)
    problem = replace(problem, num_microbatches=int(rng.integers(1, 10)))
    if rng.random() < 0.3:
        problem = altered(problem, batch_s=float(rng.random()))
    if rng.random() < 0.5:  # a training step: what nobody reads is a gradient
        backward = rng.random(problem.num_ops) < 0.6
        problem = replace(problem, graph=replace(problem.graph, is_backward=backward))
    groups = rng.integers(problem.num_devices, size=(rng.integers(2, 6), problem.graph.num_groups))
    return problem, groups[:, problem.graph.group].astype(np.int32)


def test_two_replicas_take_turns() -> None:
    #   d0  0000 2222       two operators of 2 s, each phase on a device of its own
    #   d1  1111 3333       no transfer, and a period of 2 s
    problem = random_problem(0, num_ops=2, num_devices=2)
    costs = {"compute_s": np.full((2, 2), 2.0), "loaded_s": None, "transfer_s": None}
    problem = altered(problem, {"kind": "cpu", "memory_bytes": 2**40}, **costs)
    problem = replace(problem, num_microbatches=4, max_in_flight=2)
    both = [[0, 0], [1, 1]]
    for timeline in (simulate(problem, both), simulate_reference(problem, both)):
        assert timeline.start_s.tolist() == [[0, 2], [0, 2], [4, 6], [4, 6]]
        assert timeline.device_of.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
        assert len(timeline.transfers) == 0
        assert timeline.period_s == 2.0 and timeline.latency_s == 4.0
        assert timeline.busy_s.tolist() == [8, 8]
    values = evaluate(problem, [both])
    assert values.period_s == [2.0] and values.latency_s == [4.0]
    assert score(problem.with_objective("max_load"), [both]) == [2.0]
    held = problem.param_bytes_on(np.array(both, np.int32))
    assert held.tolist() == [problem.graph.param_bytes.sum()] * 2


def test_kernel_equals_reference_on_400_random_problems() -> None:
    for seed in range(400):
        problem, p = periodic(seed)
        fast, slow = simulate(problem, p), simulate_reference(problem, p)
        order = np.lexsort(fast.transfers.T), np.lexsort(slow.transfers.T)
        np.testing.assert_array_equal(fast.transfers[order[0]], slow.transfers[order[1]])
        for what in FIELDS:
            a, b = getattr(fast, what), getattr(slow, what)
            if what.startswith("transfer"):
                a, b = a[order[0]], b[order[1]]
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9, err_msg=f"{seed} {what}")


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_a_batch_says_what_the_timelines_say(seed: int) -> None:
    problem, p = periodic(seed, grouped=True)
    values, line = evaluate(problem, [p, p[::-1]]), simulate(problem, p)
    alone = [simulate(problem, phase, num_microbatches=1) for phase in p]
    assert values.latency_s[0] == pytest.approx(max(t.period_s for t in alone), abs=1e-9)
    if problem.num_microbatches > 1:
        assert values.period_s[0] == pytest.approx(line.period_s, abs=1e-9)
        joules = problem.num_microbatches * values.energy_j[0]
        assert joules == pytest.approx(line.energy_j)
    if values.peak_bytes is not None and problem.num_microbatches > 1:
        np.testing.assert_array_equal(values.peak_bytes[0], line.peak_bytes)


def test_gradients_of_replicas_travel_after_a_step() -> None:
    #   d0  f b f b . . v       forward 1 s, backward 1 s; the gradient takes 2 s from d1 to d0,
    #   d1  f b f b g g . v     and the new value 2 s back: 4 s more for 4 micro-batches
    graph = {"is_backward": [False, True], "output_tensor": [0], "param_uses": [(0, 0)]}
    graph |= {"param_bytes": [8], "op_name": ["f", "b"]}
    runs = {"link": (0.0, 4.0), "num_microbatches": 4, "max_in_flight": 2}
    facts = {"tensor_bytes": [4, 8], "graph": graph, "device": {"kind": "npu"}}
    problem = small_problem(np.ones((2, 2)), [(0, 1)], **facts, **runs)
    assert problem.graph.gradient_tensor.tolist() == [1]
    both = [[0, 0], [1, 1]]
    for timeline in (simulate(problem, both), simulate_reference(problem, both)):
        assert timeline.transfers.tolist() == [[1, 3, 1, 0], [1, 3, 0, 1]]
        assert timeline.transfer_end_s.tolist() == [6.0, 8.0]
        assert (timeline.period_s, timeline.makespan_s) == (1.0 + 4 / 4, 8.0)
    assert score(problem, [both]) == [2.0]
    # Devices of one memory have one copy of the parameters, and one phase has no replicas.
    assert score(altered(problem, {"kind": "cpu"}), [both]) == [1.0]
    assert score(problem, [[0, 0]]) == [2.0]


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_phases_that_are_alike_are_one(seed: int, phases: int) -> None:
    problem, p = periodic(seed)
    profile = replace(problem.profile, loaded_s=None, batch_s=0.0)  # means of loads round
    # The slope is of whole rounds: of 12 micro-batches, whatever the phases.
    problem = replace(problem, profile=profile, num_microbatches=25)
    one, many = p[0], np.stack([p[0]] * phases)
    for objective in ("period", "latency", "energy", "max_load", "piecewise_latency"):
        same = problem.with_objective(objective)
        np.testing.assert_allclose(score(same, [many]), score(same, one), rtol=1e-12)
    a, b = simulate(problem, one), simulate(problem, many)
    np.testing.assert_array_equal(a.end_s, b.end_s)
    np.testing.assert_array_equal(a.peak_bytes, b.peak_bytes)
    assert simulate(problem, p[:1]).placement.shape == one.shape  # of one phase: as ever


@given(st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_no_replicas_are_better_than_the_bounds(seed: int) -> None:
    problem, p = periodic(seed)
    problem = replace(problem, max_phases=len(p), num_microbatches=40)
    bounds = lower_bounds(problem)
    for objective, bound in bounds.items():
        same = problem.with_objective(objective)
        assert score(same, [p])[0] >= bound * (1 - 1e-9)
        assert lower_bound(same) == bound
    assert bounds["period"] <= lower_bounds(problem.one_phase)["period"] * (1 + 1e-12)  # sums


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_analytic_loads_are_means_over_phases(seed: int) -> None:
    problem, p = periodic(seed)
    same = problem.with_objective("max_load")
    value, held = analytic.evaluate(same, [p, p[::-1]])
    assert value[0] == pytest.approx(analytic.device_loads(same, p).max())
    assert value[1] == pytest.approx(value[0])
    np.testing.assert_array_equal(held[0], problem.param_bytes_on(p))


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_given_order(seed: int) -> None:
    problem, p = periodic(seed)
    schedule = list_schedule(problem, p, problem.num_microbatches)
    schedule.check(problem.graph, problem.cluster, p)
    simulate(problem, p, schedule)
    other = (p[:, :] + 1) % problem.num_devices
    if problem.num_devices > 1:
        with pytest.raises(ScheduleError, match="is told to run operator"):
            schedule.check(problem.graph, problem.cluster, other)


def test_what_is_no_periodic_placement_is_refused() -> None:
    problem = random_problem(3, num_ops=4, num_devices=2)
    for wrong, message in (
        ([[0, 0, 0, 0], [0, 2, 0, 0]], "operator 1 .* is on device 2 in phase 1"),
        (np.zeros((0, 4), int), r"shape \(0, 4\)"),
        (np.zeros((2, 3), int), r"shape \(3,\), expected \(4,\), or \(K, 4\)"),
        (np.zeros((1025, 4), int), "at most 1024 phases"),
        ([[0, 0, 0, 0], [0]], "rows of a placement have unequal lengths"),
    ):
        with pytest.raises(ProblemError, match=message):
            problem.check_placement(wrong)
    with pytest.raises(ProblemError, match="max_phases = 0 must be from 1"):
        replace(problem, max_phases=0)
    with pytest.raises(ProblemError, match=r"expected \(B, 4\), or \(B, K, 4\)"):
        score(problem, np.zeros((1, 1, 1, 4), int))


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_reports_show_each_phase_where_it_ran(seed: int) -> None:
    problem, p = periodic(seed)
    timeline = simulate(problem, p)
    steps = memory_steps(problem, p, timeline, problem.max_in_flight)
    np.testing.assert_array_equal([held.max() for _, held in steps], timeline.peak_bytes)
    share = usage.busy_share(timeline, 5).mean(axis=1)
    np.testing.assert_allclose(share, timeline.utilisation, atol=1e-6)
    assert len(gantt.text_gantt(timeline).splitlines()) >= problem.num_devices


def test_a_plan_with_phases(tmp_path: Path) -> None:
    problem = random_problem(5, num_ops=4, num_devices=2)
    problem = altered(problem, {"memory_bytes": 2**40})
    p = np.array([[0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]], np.int32)
    solution = Solution(p, 0.0)
    solution = replace(solution, value_s=value_of(problem, solution))
    plan = make_plan(problem, solution, planner="by_hand")
    assert plan.schema_version == 2 and plan.inconsistencies() == []
    assert [len(phase) for phase in plan.phases] == [3, 0]
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again == plan
    np.testing.assert_array_equal(again.placement(problem.graph, problem.cluster), p)
    assert again.timeline(problem).period_s == plan.predicted.period_s
    # No other program takes turns: the nearest is what most micro-batches do.
    with pytest.raises(Inexpressible, match="3 phases, in which micro-batches take turns") as error:
        load("csv")(plan)
    assert [*error.value.nearest.values()] == [problem.cluster.device_names[d] for d in p[0]]
    nearest = moved(plan, error.value.nearest)
    assert load("csv")(nearest).files and not nearest.phases
