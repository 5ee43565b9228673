"""Exact planners against brute force, and what they prove."""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.importers import load as load_workload
from placement.objective import Objective
from placement.planners import PlannerError, load
from placement.problem import Problem
from placement.simulator import score
from placement.simulator.analytic import device_loads
from placement.testing import check_planner
from tests.planners.test_ideal_dp import brute_force
from tests.planners.test_planners import make, small
from tests.problems import every_placement, random_problem

pytest.importorskip("ortools")

EXACT = ("cp_sat", "mip")  # loads are mip's, whoever is asked


def tight(seed: int) -> Problem:
    return small(seed, param_bytes=10, memory_bytes=40)


def exact(name: str, **options):
    return load(name, **({"seconds": 20, "start": "single_device"} | options))


def test_an_objective_without_a_program_is_searched_too() -> None:
    problem = random_problem(13, 5, 2, objective="period")  # the split of least load takes 11 s
    best_s = score(problem, every_placement(problem)).min()
    assert load("mip", seconds=2)(problem).value_s == pytest.approx(best_s)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from([small, tight]))
def test_any_split_equals_brute_force(seed: int, kind) -> None:
    problem = kind(seed)
    best = score(problem, every_placement(problem)).min()
    solution = exact("mip")(problem)
    if np.isinf(best):
        assert np.isinf(solution.value_s)
        return
    assert solution.value_s == pytest.approx(best, rel=2e-6)
    assert best * (1 - 1e-4) <= solution.lower_bound_s <= best * (1 + 1e-9)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6))
def test_contiguous_split_equals_brute_force_and_the_dynamic_program(seed: int) -> None:
    problem = small(seed, num_ops=5)
    best = brute_force(problem)
    with warnings.catch_warnings(action="error"):
        assert load("ideal_dp")(problem).value_s == pytest.approx(best)
    solution = exact("mip", contiguous=True)(problem)
    assert solution.value_s == pytest.approx(best, rel=2e-6)
    bound = solution.stats["contiguous_bound_s"]
    assert best * (1 - 1e-4) <= bound <= best * (1 + 1e-9)
    any_split = score(problem, every_placement(problem)).min()
    assert solution.lower_bound_s <= any_split * (1 + 1e-9)  # holds for all splits


@pytest.mark.parametrize("options", [{}, {"contiguous": True}])
def test_exact_planners_keep_the_contract(options: dict) -> None:
    planner = exact("mip", seconds=1, start="single_device", **options)
    drawn = [f(s) for s in range(2) for f in (small, tight)]
    problems = [p.with_objective(o) for p in drawn for o in ("max_load", "period")]
    check_planner(planner, problems)


@pytest.mark.parametrize("name", [*EXACT, "macro_search"])
@pytest.mark.parametrize("objective", ["latency", "max_load", "piecewise_latency", "period"])
def test_what_takes_no_time(name: str, objective: Objective) -> None:
    problem = make(np.zeros((2, 2)), [(0, 1)]).with_objective(objective)
    with warnings.catch_warnings(action="error"):
        planner = load(name, **({"seconds": 1} if name in EXACT else {"evaluations": 64}))
        assert planner(problem).value_s == 0


def test_memory_and_tied_parameters() -> None:
    # Three equal operators of 1 s; two of them share one parameter of 60 bytes, the third has
    # its own of 60: with 100 bytes a device the sharers stay together, 2 s against 1 s.
    tied = {"param_bytes": [60, 60], "param_uses": [(0, 0), (1, 0), (2, 1)]}
    for capacity, best in ((100, 2.0), (120, 2.0), (59, np.inf)):
        facts = {"param_bytes": None, "graph": tied, "objective": "max_load"}
        problem = make(np.ones((3, 2)), memory_bytes=capacity, **facts)
        assert exact("mip")(problem).value_s == best


def test_a_start_that_does_not_fit_is_not_called_not_contiguous() -> None:
    """Everything on one device is one stage; nothing fits on any device."""
    problem = make([[1, 1], [1, 1]], [(0, 1)], param_bytes=60, memory_bytes=50)
    problem = problem.with_objective("max_load")
    solution = exact("mip", contiguous=True)(problem)
    assert solution.value_s == np.inf
    assert solution.stats["message"] == "no contiguous split that fits was found: this is the start"


@pytest.mark.parametrize("name", EXACT)
def test_the_same_seed_gives_the_same(name: str) -> None:
    problem = small(3)
    a, b = (exact(name)(problem) for _ in range(2))
    assert np.array_equal(a.placement, b.placement) and a.lower_bound_s == b.lower_bound_s


def test_a_byte_too_many_does_not_fit() -> None:
    """Within its tolerance HiGHS has both operators, 1 s each, where there is room but for a byte.

    So one of them is on the other device, where it takes 9 s.
    """
    facts = {"param_bytes": 10**9, "memory_bytes": [2 * 10**9 - 1, 10**12]}
    problem = make([[1, 9]] * 2, [(0, 1)], device={"kind": ["other", "cpu"]}, **facts)
    solution = exact("mip")(problem.with_objective("max_load"))
    assert solution.value_s == pytest.approx(9)
    assert solution.lower_bound_s == pytest.approx(solution.value_s, rel=1e-5)


def test_a_program_there_is_no_time_for_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small(0).with_objective("piecewise_latency")
    start = load("single_device")(problem)
    clock = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    solution = exact("cp_sat", seconds=8, start="single_device")(problem)
    # Every look at the clock takes a second: one at each block of the program would be too many.
    assert "too few to write" in solution.stats["status"]
    assert solution.value_s == start.value_s
    assert next(clock) < 40


def test_a_missing_solver_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PlannerError, match=r"pip install 'device-placement-rl\[cp\]'"):
        exact("cp_sat")(small(0))


def test_a_start_that_is_the_optimum_is_kept_and_proved(shared: Path) -> None:
    path = shared / "data/dnn_partitioning/throughput/operator/bert_l-3_inference.json"
    problem = load_workload(path)
    solution = load("mip", seconds=20)(problem)
    assert solution.value_s == pytest.approx(21.908376105693748e-3, rel=1e-6)
    assert device_loads(problem, solution.placement).max() == pytest.approx(solution.value_s)
    assert solution.lower_bound_s <= 21.908376105693748e-3 * (1 + 1e-9)
