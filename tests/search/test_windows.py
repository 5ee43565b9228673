"""Windows are solved exactly; bounds and optima of small shops are those of brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.bounds import lower_bound, lower_bounds
from placement.bounds.grain import grain_s
from placement.planners import load
from placement.planners.order_search import start, state_of, tables_of
from placement.problem import Problem
from placement.search import windows
from tests.problems import altered, plain, random_problem, small_problem
from tests.search.test_order_search import latency_s, optimum, started

RNG = np.random.default_rng


def shop(seed, jobs, length, machines, unit=1.0, refused=0.4) -> Problem:
    """A flexible job shop: chains whose operators run on some of the machines, nothing is sent."""
    rng = RNG(seed)
    n = jobs * length
    edges = [(i, i + 1) for i in range(n) if (i + 1) % length]
    seconds = unit * rng.integers(1, 10, (n, machines)).astype(float)
    seconds[rng.random(seconds.shape) < refused] = np.inf
    seconds[np.arange(n), rng.integers(machines, size=n)] = unit * 5.0
    return small_problem(seconds, edges, link=(0.0, 1e30), objective="latency")


@pytest.mark.parametrize("seed", range(4))
def test_the_window_of_everything_is_the_optimum(seed: int) -> None:
    problem = shop(seed, 2, 3, 2)
    tables, state = tables_of(problem), state_of(problem, 4)
    start(tables, state, np.argmin(problem.compute_s, axis=1), np.arange(6), RNG(0))
    window = windows.solve(tables, state, range(6), 1.0, 0)
    assert window.closed and window.place is not None and window.sequence is not None
    value = latency_s(problem, window.place, window.sequence)
    assert value == optimum(problem)
    assert lower_bound(problem) <= value


@pytest.mark.parametrize("seed", range(3))
def test_cp_sat_proves_the_least_latency(seed: int) -> None:
    """Of shops; where channels wait it proves a bound."""
    problem = shop(seed, 2, 3, 2)
    solution = load("cp_sat", start="heft", seconds=20)(problem)
    assert solution.value_s == solution.lower_bound_s == optimum(problem)
    problem = plain(random_problem(seed, 5, 2))
    solution = load("cp_sat", start="single_device", seconds=20)(problem)
    best = optimum(problem)
    assert solution.lower_bound_s * (1 - 1e-9) <= best <= solution.value_s * (1 + 1e-9)
    assert solution.lower_bound_s >= 0.5 * best


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_a_window_is_never_worse_where_channels_do_not_wait(seed: int) -> None:
    problem = replace(plain(random_problem(seed, 14, 3, grouped=True)), contention=False)
    tables, state = started(problem, seed)
    cost, first = state.cost_s, int(RNG(seed).integers(6))
    if cost >= 1e30:
        return
    rest_s = windows.rest_s(tables, state, first, first + 8)
    assert rest_s <= cost * (1 + 1e-9)
    window = windows.solve(tables, state, range(first, first + 8), 0.0, seed)
    problem.check_placement(window.place)
    value = latency_s(problem, window.place, window.sequence)
    assert rest_s * (1 - 1e-9) <= value <= cost * (1 + 1e-4)  # seconds were rounded
    before = state.sequence[:first]
    assert np.array_equal(window.sequence[:first], before)
    assert np.array_equal(window.place[before], state.place[before])


def test_a_search_solves_windows_and_its_seed_decides_them() -> None:
    problem = shop(1, 6, 5, 5, refused=0.9)  # above its bound, so that the search goes on
    first, again = (load("order_search", evaluations=400_000)(problem) for _ in range(2))
    assert np.array_equal(first.placement, again.placement)
    assert first.stats["windows"] == again.stats["windows"] > 0
    assert first.value_s == again.value_s
    assert first.stats["evaluations"] <= 400_000 and first.lower_bound_s is not None


def test_without_a_solver_the_search_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "available", lambda: False)
    answer = load("order_search", evaluations=400_000)(shop(1, 6, 5, 5, refused=0.9))
    assert "not installed" in answer.stats["windows"]
    assert answer.stats["evaluations"] > 100_000


def test_bounds_of_equal_machines_are_rounded_up() -> None:
    """Three operators of 3 on two machines: 6, not 4.5; of any unit, unless something is sent."""
    for unit in (1.0, 1e-3, 0.1):
        problem = small_problem(np.full((3, 2), 3.0 * unit), link=(0.0, 1e30), objective="latency")
        assert grain_s(problem) == pytest.approx(3 * unit)
        assert lower_bound(problem) == pytest.approx(6 * unit)
        assert grain_s(altered(problem, links={"latency_s": unit})) == 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 100_000), unit=st.sampled_from([1.0, 1e-3, 0.37]))
def test_no_schedule_is_below_the_bound(seed: int, unit: float) -> None:
    rng = RNG(seed)
    problem = shop(seed, *rng.integers([2, 1, 2], [6, 5, 4]).tolist(), unit)
    value = load("order_search", evaluations=500)(problem).value_s
    bound = lower_bound(problem)
    assert bound <= value * (1 + 1e-9)
    assert bound <= lower_bounds(problem)["latency"] * (1 + 1e-9)
    assert grain_s(problem) / unit == pytest.approx(round(grain_s(problem) / unit))
    assert value / grain_s(problem) == pytest.approx(round(value / grain_s(problem)))
