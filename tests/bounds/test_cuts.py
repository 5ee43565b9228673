"""What devices write and read with what they run, against all placements and known answers."""

from dataclasses import replace

import numpy as np
import pytest

from placement.bounds import cuts, lower_bound, lower_bounds
from placement.planners import load
from placement.problem import Problem
from placement.simulator import score
from tests.problems import chain, every_placement, random_problem, small_problem


def drawn(seed: int) -> Problem:
    """Alike and unlike devices, some without transfers; groups, unsupported operators, memory."""
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(2, 7)), int(rng.integers(2, 5))
    edges = [(a, b) for b in range(n) for a in range(b) if rng.random() < 0.5]
    seconds = rng.random((n, 1)) * (rng.uniform(0.3, 3, d) if rng.random() < 0.5 else np.ones(d))
    if rng.random() < 0.3:
        seconds[:, 1:][rng.random((n, d - 1)) < 0.3] = np.inf
    held = rng.integers(1, 100, n)
    room = [int(held.sum() * rng.uniform(0.3, 1.5)) + 1] * (d - 1) + [2**40]
    grouped = {"group": rng.integers(0, n, n)} if rng.random() < 0.3 else {}
    io_s = rng.random((n, 1)) * rng.choice([0.05, 0.3, 2]) * rng.choice([0.0, 1, 2], d)
    facts = {"param_bytes": held, "memory_bytes": room[::-1], "profile": {"io_s": io_s}}
    return small_problem(seconds, edges, objective="max_load", **facts, **grouped)


@pytest.mark.parametrize("placed", [0, 4, 200])
def test_no_placement_has_less(placed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "EFFORT", cuts.CutEffort(placed=placed))
    reached = 0
    for seed in range(60):
        problem = drawn(seed)
        if seed % 3 == 0:
            problem = random_problem(seed, 5, 2 + seed % 2, grouped=True, objective="max_load")
        best_s = score(problem, every_placement(problem)).min(initial=np.inf)
        if np.isfinite(best_s):
            assert lower_bound(problem) <= best_s * (1 + 1e-9), seed
            reached += lower_bound(problem) >= best_s * (1 - 1e-9)
    assert placed < 200 or reached > 45  # small ones are solved


def test_a_group_takes_what_it_costs_to_part_it_from_the_rest() -> None:
    # 1 s each; between the second and the third a tensor takes 5 s on each side, others 0.5 s.
    io_s = np.array([[0.5], [5], [0.5], [0]]) * np.ones(4)
    problem = small_problem([[1] * 4] * 4, chain(4), profile={"io_s": io_s}, objective="max_load")
    # The second runs with the third, which costs 2 s and two tensors of 0.5 s, or with all.
    assert lower_bounds(problem)["max_load"] == pytest.approx(3)
    assert lower_bounds(problem)["period"] == pytest.approx(1)
    assert load("macro_search", evaluations=200)(problem).value_s == pytest.approx(3)
    # Replicas take turns, so that each takes all in a quarter of the time.
    assert lower_bound(replace(problem, max_phases=4)) == pytest.approx(1)


def test_one_device_runs_more_groups_than_fit_into_the_others(monkeypatch):
    monkeypatch.setattr(cuts, "EFFORT", cuts.CutEffort(placed=0))
    # Seven pairs, 2 s each, that 5 s per tensor keep together: one of three devices runs three. A
    # fourth takes longer than that for any.
    pairs, io_s = [(2 * k, 2 * k + 1) for k in range(7)], np.full((14, 4), 5.0)
    seconds = np.array([[1, 1, 1, 3.5]] * 14)
    for devices in (3, 4):
        facts = {"profile": {"io_s": io_s[:, :devices]}, "objective": "max_load"}
        problem = small_problem(seconds[:, :devices], pairs, **facts)
        assert lower_bounds(problem)["max_load"] == pytest.approx(6)
        assert load("macro_search", evaluations=400)(problem).value_s == pytest.approx(6)
