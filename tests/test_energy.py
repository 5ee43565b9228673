"""The objective ``energy``: joules per micro-batch, for every planner."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from problems import random_problem

from placement.cluster import Device
from placement.compare import compare
from placement.planners import load, names
from placement.problem import Problem, lower_bounds
from placement.report.table import tables
from placement.simulator import evaluate, score

# They need a file, a package, or a planner, or are for latency.
ELSEWHERE = ("expert", "metis", "coarsened", "order_search")
BUDGETS = {
    "cp_sat": {"seconds": 0.5},
    "mip": {"seconds": 0.5},
    "macro_search": {"evaluations": 300},
}


def roomy(seed: int, num_ops: int = 6) -> Problem:
    problem = random_problem(seed, num_ops, 2, objective="energy")
    devices = tuple(replace(d, memory_bytes=2**40) for d in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


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
    every = np.array(list(itertools.product(range(2), repeat=6)), np.int32)
    least = score(problem, every).min()
    for name in ("local_search", "simulated_annealing"):
        found = load(name, evaluations=2000, seed=seed)(problem)
        assert found.value_s == pytest.approx(least, rel=1e-9)


def test_a_frugal_device_wins_where_energy_counts_and_a_fast_one_where_time_does() -> None:
    problem = roomy(0)
    fast, frugal = problem.cluster.devices
    watts = (Device(fast.name, busy_w=300, idle_w=0), Device(frugal.name, busy_w=1, idle_w=0))
    seconds = np.tile([1.0, 4.0], (6, 1))
    profile = replace(problem.profile, compute_s=seconds, loaded_s=None, transfer_s=None)
    cluster = replace(problem.cluster, devices=watts)
    problem = replace(problem, cluster=cluster, profile=profile)
    assert load("single_device")(problem).placement.tolist() == [1] * 6
    assert load("single_device")(problem.with_objective("latency")).placement.tolist() == [0] * 6


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
