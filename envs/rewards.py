"""What a placement earns: one callable, the same for every environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.problem import Placement, Problem

Floats = NDArray[np.float64]

# A placement may be at worst exp(4) ~ 55 times slower than the reference before it counts as
# that; one that cannot run is worse than every one that can.
WORST_REWARD = -4.0
INFEASIBLE_REWARD = -5.0
_SOFT = 0.02  # of ``improvement``: losses of so much and more fade to nothing


class Outcome(NamedTuple):
    """``B`` placements of one problem, evaluated.

    Attributes:
        problem: what was placed.
        placements: int32 ``[B, N]`` the device of each operator, -1 = not decided.
        value_s: float64 ``[B]`` seconds (of ``energy``: joules), inf where it cannot run.
        reference_s: what reward 0 means by default.
    """

    problem: Problem
    placements: Placement
    value_s: Floats
    reference_s: float


# What placements are worth, float64 [B]. Environments that build a placement pay it at the end;
# those that improve one pay the difference that a step makes.
Reward = Callable[[Outcome], Floats]


def log_speedup(outcome: Outcome) -> Floats:
    """float64 ``[B]``: ``log(reference / value)``, at least -4; -5 where it cannot run."""
    return log_speedups(outcome.value_s, outcome.reference_s)


def log_speedups(value_s: Floats, reference_s: float | Floats) -> Floats:
    """``log_speedup`` of values float64 ``[B]``, each with its reference."""
    good = np.isfinite(value_s)
    ratio = reference_s / np.maximum(np.where(good, value_s, 1.0), 1e-300)
    return np.where(good, np.maximum(np.log(ratio), WORST_REWARD), INFEASIBLE_REWARD)


def improvement(outcome: Outcome) -> Floats:
    """float64 ``[B]``: what a placement is worth beside a reference, which is kept if it is better.

    ``log(1 + exp(gain))`` of a gain ``log(reference / value)`` in units of 2 %: about the gain
    where it is large, next to 0 where the value is 10 % worse or cannot run. 0 too where
    it is the reference's, which is known. A mean of ``log_speedup`` is highest where a policy stays
    at its warm start; this one is highest where its best samples are.
    """
    able = np.isfinite(outcome.value_s)
    gain = log_speedups(outcome.value_s, outcome.reference_s)
    return np.where(able & (np.abs(gain) > 1e-9), np.logaddexp(0.0, gain / _SOFT), 0.0)
