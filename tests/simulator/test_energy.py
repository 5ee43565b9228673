"""The objective ``energy``: joules per micro-batch, for every planner."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.bounds import lower_bounds
from placement.planners import load, names
from placement.problem import Problem, Solution
from placement.report.table import tables
from placement.runs.compare import compare
from placement.simulator import evaluate, list_schedule, score, value_of
from tests.problems import altered, every_placement, random_problem, small_problem
from tests.problems import chain as edges

# They need a file, a package, or a planner, or are for latency.
ELSEWHERE = ("expert", "metis", "coarsened", "order_search", "data_parallel", "phase_search")
BUDGETS = {name: {"seconds": 0.5} for name in ("cp_sat", "mip")}
BUDGETS |= {"macro_search": {"evaluations": 300}}


def roomy(seed: int, num_ops: int = 6) -> Problem:
    problem = random_problem(seed, num_ops, 2, objective="energy")
    return altered(problem, {"memory_bytes": 2**40})


@pytest.mark.parametrize("name", [n for n in names() if n not in ELSEWHERE])
def test_every_planner_is_scored_in_joules(name: str) -> None:
    problem = roomy(3)
    solution = load(name, **BUDGETS.get(name, {}))(problem)
    assert solution.value_s == score(problem, solution.placement)[0]
    assert solution.value_s == evaluate(problem, solution.placement).energy_j[0]
    assert (solution.lower_bound_s or 0) <= solution.value_s
    assert lower_bounds(problem)["energy"] <= solution.value_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_searches_find_the_placement_of_least_energy(seed: int) -> None:
    problem = roomy(seed)
    least = score(problem, every_placement(problem)).min()
    for name in ("local_search", "simulated_annealing"):
        solution = load(name, evaluations=2000, seed=seed)(problem)
        assert solution.value_s == pytest.approx(least, rel=1e-9)


def test_a_frugal_device_wins_where_energy_counts_and_a_fast_one_where_time_does() -> None:
    problem = roomy(0)
    watts = {"busy_w": lambda d: 300 if d.name == "d0" else 1, "idle_w": 0}
    costs = {"compute_s": np.tile([1.0, 4.0], (6, 1)), "loaded_s": None, "transfer_s": None}
    problem = altered(problem, watts, **costs)
    assert load("single_device")(problem).placement.tolist() == [1] * 6
    assert load("single_device")(problem.with_objective("latency")).placement.tolist() == [0] * 6


def on_two(seconds: list[list[float]], sizes: list[int], objective: Any) -> Problem:
    """A chain on devices a, with room for everything, and b, which holds 150 bytes."""
    watts, room = {"busy_w": 2.0, "idle_w": 1.0}, {"memory_bytes": [10**6, 150]}
    some = {"devices": ["a", "b"], "device": watts, **room, "objective": objective}
    return small_problem(seconds, edges(len(sizes)), tensor_bytes=sizes, **some)


@pytest.mark.parametrize("name", ["pipedream", "contiguous_dp"])
def test_activations_in_flight_count_for_joules_too(name: str) -> None:
    """Energy is of a pipeline: what fits once does not fit as often as micro-batches fly."""
    for objective in ("period", "energy"):
        solution = load(name)(on_two([[1, 1], [2, 2]], [100, 0], objective))
        assert np.isfinite(solution.value_s), (objective, solution.stats)


def test_activations_are_counted_though_one_device_would_hold_everything() -> None:
    # o0 runs only on a. Behind it would be the best cut (3.5 s), but what it makes is 100 bytes,
    # and b has no room for those of all micro-batches in flight; what o1 makes is 1 byte (4 s).
    table = [[2.0, np.inf], [2.0, 2.0], [1.5, 1.5]]
    solution = load("contiguous_dp")(on_two(table, [100, 1, 0], "period"))
    assert solution.value_s == 4.0 and solution.placement.tolist() == [0, 0, 1]


def test_the_value_of_an_order_is_in_the_unit_of_the_objective() -> None:
    problem = on_two([[1, 1]], [0], "energy")
    place = np.zeros(1, np.int32)
    for second_j in (0.0, 3.0):
        priced = replace(problem, second_j=second_j)
        order = list_schedule(priced, place, priced.num_microbatches)
        value = value_of(priced, Solution(place, 0.0, schedule=order))
        assert value == pytest.approx(float(score(priced, place)[0]))
    heavy = on_two([[1, 1], [1, 1]], [200, 0], "period")  # 200 bytes on a device of 150
    order = list_schedule(heavy, np.array([1, 1], np.int32), heavy.num_microbatches)
    assert value_of(heavy, Solution(np.array([1, 1], np.int32), 0.0, schedule=order)) == np.inf
    for objective in ("max_load", "piecewise_latency"):  # these know no order
        load_ = heavy.with_objective(objective)
        both = [Solution(np.array([0, 0], np.int32), 0.0, schedule=s) for s in (None, order)]
        assert value_of(load_, both[0]) == value_of(load_, both[1])


def test_a_comparison_shows_joules_beside_the_times(tmp_path: Path) -> None:
    both = {name: load(name) for name in ("heft", "round_robin")}
    comparison = compare({"toy": roomy(1)}, both, out_dir=tmp_path)
    row = comparison.best("toy")
    assert row.energy_j == row.value_s == min(r.value_s for r in comparison.rows)
    # Joules are not measured: a plan that runs faster is not the better one for that.
    slow, *others = sorted(comparison.rows, key=lambda r: r.value_s)
    times = {"num_rounds": 3, "measured_period_s": 1.0, "measured_latency_s": 1.0}
    fast = [replace(r, **times | {"measured_period_s": 0.5}) for r in others]
    measured = replace(comparison, rows=(replace(slow, **times), *fast))
    assert measured.best("toy").value_s == slow.value_s
    table = tables(comparison)[0]
    assert table.header[:3] == ("planner", "mJ", "period ms")
    assert f"{1e3 * row.value_s:.0f}" in {cells[1] for cells in table.cells}
    assert all(len(line) == len(table.header) for line in table.cells)
