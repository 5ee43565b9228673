"""How fast placements are, from runs on a machine that is faster at one time than at another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Of logarithms of seconds. What little is known before the runs say more: standard deviations of
# the noise of a run, of placements, and of rounds, each as sure as ``SURE`` values.
NOISE, SPREAD, DRIFT, SURE = 0.05, 0.2, 0.1, 2.0
TAILS = 4.0  # degrees of freedom of the noise: an interrupted run counts for little
STEPS = 10


def levels_and_drift(index: Ints, round: Ints, values: Floats) -> tuple[Floats, Floats]:
    """Levels float64 ``[K]`` and drifts ``[R]`` whose sums, and noise, are ``values [S]``.

    A mixed model (Henderson, Biometrics 1975): levels are normal around their mean, drifts around
    0, the noise is Student's t, and expectation maximisation finds the three variances (Lange,
    Little and Taylor, JASA 1989). A level is drawn to the mean, the more the fewer its runs: the
    lowest of many single runs is mostly luck. Drifts are drawn to 0, so that errors do not add up
    from one fastest placement to the next, as they do in a median polish.

    Args:
        index, round: int64 ``[S]`` of each value, each 0..K-1 and 0..R-1.
    """
    from scipy.sparse import coo_array, diags_array

    rows, columns = int(round.max()) + 1, int(index.max()) + 1
    noise, spread, slow = NOISE**2, SPREAD**2, DRIFT**2
    weight, mean = np.ones(len(values)), float(np.median(values))
    level, drift = np.zeros(columns), np.zeros(rows)
    for _ in range(STEPS):
        w, rest = weight / noise, values - mean
        both = coo_array((w, (round, index)), (rows, columns)).tocsr()
        # Levels are eliminated: ``alone`` is the variance of one if the drifts were known.
        alone = 1 / (both.sum(axis=0) + 1 / spread)
        share = both @ diags_array(alone)
        of_level, of_drift = np.bincount(index, w * rest), np.bincount(round, w * rest)
        inverse = np.linalg.inv(np.diag(both.sum(axis=1) + 1 / slow) - (share @ both.T).toarray())
        drift = inverse @ (of_drift - share @ of_level)
        level = alone * of_level - share.T @ drift
        joint = inverse @ share  # minus the covariance of drift and level
        sure_level, sure_drift = alone + share.multiply(joint).sum(axis=0), np.diag(inverse)
        off = rest - level[index] - drift[round]
        square = off**2 + sure_level[index] + sure_drift[round] - 2 * joint[round, index]
        weight = (TAILS + 1) / (TAILS + square / noise)
        noise = _variance(weight * square, NOISE)
        center = float(level.mean())
        mean, level = mean + center, level - center
        spread = _variance(level**2 + sure_level, SPREAD)
        slow = _variance(drift**2 + sure_drift, DRIFT)
    return mean + level, drift


def _variance(squares: Floats, before: float) -> float:
    return float((squares.sum() + SURE * before**2) / (len(squares) + SURE))
