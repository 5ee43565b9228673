"""How fast placements are on a machine that is faster at one time than at another."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.runs import levels
from placement.runs.levels import levels_and_drift


def test_drift_cancels_where_the_fastest_changes() -> None:
    # Rounds:   0     1     2     3     4      of placements 0, 1, 2: 10, 8 and 5 seconds
    #           0 1   0 1   1 2   1 2   2 3    on a machine that gets slower by 20 % each time
    index = np.array([0, 1, 0, 1, 1, 2, 1, 2, 2, 3])
    where = np.repeat(np.arange(5), 2)
    seconds = np.array([10.0, 8.0, 5.0, 6.0])[index] * 1.2**where
    level, drift = levels_and_drift(index, where, np.log(seconds))
    assert np.exp(level - level[0]) == pytest.approx([1.0, 0.8, 0.5, 0.6], rel=0.1)
    assert np.exp(np.diff(drift)) == pytest.approx(np.full(4, 1.2), rel=0.04)


@pytest.mark.parametrize("slow", [1.6, 0.8])
def test_what_ran_before_tells_how_slow_a_round_is(slow: float) -> None:
    """In round 2 all takes 1.6 times as long; of its new placements nothing else says so."""
    #  rounds   0        1        2              seconds of 0..5
    index = np.array([0, 1, 0, 1, 2, 0, 1, 3, 4, 5])
    where = np.array([0, 0, 1, 1, 1, 2, 2, 2, 2, 2])
    usual = np.array([5.0, 6.0, 7.0, 7.5, 8.0, 6.5])
    seconds = usual[index] * np.where(where == 2, slow, 1.0)
    level, drift = levels_and_drift(index, where, np.log(seconds))
    assert np.exp(level - level[0]) == pytest.approx(usual / usual[0], rel=0.12)
    assert np.exp(drift[2] - drift[:2]) == pytest.approx(np.full(2, slow), rel=0.1)


@given(st.integers(0, 10_000))
def test_an_interruption_on_a_steady_machine_counts_for_little(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 6))  # of two it may be the round as well
    rounds = int(rng.integers(4, 8))
    index = np.tile(np.arange(count), rounds)
    values = np.array([3.0, 1.0, 2.0, 7.0, 5.0])[index]
    values[rng.integers(len(values))] += rng.exponential(2.0)  # a mean would be up to 4 off
    level, drift = levels_and_drift(index, np.repeat(np.arange(rounds), count), values)
    assert level == pytest.approx([3.0, 1.0, 2.0, 7.0, 5.0][:count], abs=0.12)
    assert drift == pytest.approx(np.zeros(rounds), abs=0.03)


def test_the_lowest_of_many_single_runs_is_mostly_luck() -> None:
    # Placement 0 ran often, the others once, and all are alike.
    rng = np.random.default_rng(0)
    index = np.concatenate([np.zeros(160, int), np.arange(1, 161)])
    where = np.tile(np.repeat(np.arange(40), 4), 2)
    often, once = 0.06 * rng.standard_normal((160, 2)).T
    level, _ = levels_and_drift(index, where, np.concatenate([often, once]))
    assert once.min() < -0.2 and level.min() > -0.08


def test_luck_does_not_add_up_from_one_fastest_to_the_next() -> None:
    """All take 1 second. Each round runs the fastest so far again, and four new placements.

    A median polish takes a lucky run for a fast placement, its next run for a slow round, and
    what is new in that for faster still: after 60 rounds it says 0.77 to 0.90.
    """
    for seed in range(3):
        rng = np.random.default_rng(seed)
        index, where, values = np.zeros(0, int), np.zeros(0, int), np.zeros(0)
        level = np.zeros(1)
        for number in range(60):
            new = np.arange(len(level), len(level) + 4)
            index = np.concatenate([index, [int(level.argmin())], new])
            where = np.concatenate([where, np.full(5, number)])
            noise = 0.08 * rng.standard_normal() + 0.06 * rng.standard_normal(5)
            values = np.concatenate([values, noise])
            level, _ = levels_and_drift(index, where, values)
        assert np.exp(level.min()) > 0.93


def test_with_variances_that_are_known_it_is_the_normal_posterior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the dense solution of the same model: all K + R unknowns at once."""
    monkeypatch.setattr(levels, "TAILS", 1e12)  # normal noise
    monkeypatch.setattr(levels, "SURE", 1e12)  # nothing is learned of variances
    rng = np.random.default_rng(0)
    index, where = rng.integers(0, 6, 40), rng.integers(0, 5, 40)
    index[:6], where[:5] = np.arange(6), np.arange(5)
    values = rng.standard_normal(40)
    level, drift = levels_and_drift(index, where, values)
    design = np.hstack([np.eye(6)[index], np.eye(5)[where]])
    prior = np.repeat([levels.SPREAD**-2, levels.DRIFT**-2], [6, 5])
    left = design.T @ design / levels.NOISE**2 + np.diag(prior)
    mean = level.mean()
    solution = np.linalg.solve(left, design.T @ (values - mean) / levels.NOISE**2)
    assert level == pytest.approx(mean + solution[:6], abs=0.02)
    assert drift == pytest.approx(solution[6:], abs=0.02)
