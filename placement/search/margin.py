"""A gain that predictions can tell: below their error one device is the answer."""

from __future__ import annotations

import numpy as np

from placement.problem import Problem, Solution
from placement.simulator import score


def unless_one_device(
    problem: Problem, solution: Solution, margin: float | None = None
) -> Solution:
    """The answer, or the best single device where the answer is better by less than ``margin``.

    Predictions of several devices err, by a share that is measured (``Profile.error``); those of
    one device hardly do. ``stats`` then has ``margin``, and ``split_value_s`` of the answer. An
    answer stays where no single device can hold and run everything. What a call takes besides its
    operators counts (``Problem.called_s``).

    Args:
        margin: a share of the single device's value, below 1; None: ``Profile.error``; 0: the
            answer stays.
    """
    margin = min(problem.profile.error if margin is None else margin, 1.0)
    able = np.flatnonzero(np.isfinite(problem.compute_s).all(axis=0)).astype(np.int32)
    one = bool((solution.placement == solution.placement.flat[0]).all())
    if not margin or one or not len(able):
        return solution
    singles = np.repeat(able[:, None], problem.num_ops, axis=1)
    called_s = np.array([problem.called_s(d) for d in able])
    value_s = score(problem, singles)
    best = int((value_s + called_s).argmin())
    one_s = value_s[best] + called_s[best]
    several_s = solution.value_s + problem.called_s(solution.placement)
    if not np.isfinite(one_s) or several_s < (1 - margin) * one_s:
        return solution
    stats = {k: v for k, v in solution.stats.items() if k != "list_order_value_s"}
    stats |= {"margin": margin, "split_value_s": several_s}
    return Solution(singles[best], float(value_s[best]), solution.lower_bound_s, stats)
