"""What planners find over time: best-so-far curves of a ``Comparison``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from placement.problem import Solution
from placement.runs.row import SINGLE

if TYPE_CHECKING:
    from placement.runs.compare import Comparison
    from placement.runs.row import Row

Floats = NDArray[np.float64]


def best_so_far(comparison: Comparison, at_s: Floats) -> dict[str, Floats]:
    """Best value so far over the best of all planners, after ``at_s [T]`` seconds of planning.

    float64 ``[T]`` of each planner: the geometric mean over workloads x seeds. As long as there
    is no answer, the best single device counts (see ``Comparison.reference``), or the first
    answer where that is worse. Values are those of the table: a planner's own are not believed
    where they are better.
    """
    logs: dict[str, list[Floats]] = {}
    for row in comparison.rows:
        best, otherwise = comparison.reference(row.workload)
        if not row.planner.startswith(SINGLE) and 0 < best < np.inf:
            when, value = steps(row, comparison.solutions)
            value = np.append(max(otherwise, value.max(initial=0.0)), value)
            so_far = np.minimum.accumulate(value)[np.searchsorted(when, at_s, side="right")]
            logs.setdefault(row.planner, []).append(np.log(so_far / best))
    return {planner: np.exp(np.mean(rows, axis=0)) for planner, rows in logs.items()}


def steps(
    row: Row, solutions: Mapping[tuple[str, str, int | None], Solution]
) -> tuple[Floats, Floats]:
    """Seconds and finite values: of the solution's curve, or of its end where there is none."""
    solution = solutions.get((row.workload, row.planner, row.seed))
    if solution is None or not np.isfinite(row.value_s):
        return np.zeros(0), np.zeros(0)
    curve = solution.stats.get("curve") or [(row.plan_s, 1, row.value_s)]
    when = np.array([point[0] for point in curve], float)
    value = np.array([point[2] for point in curve], float)
    finite = np.isfinite(value)
    return when[finite], np.maximum(value, row.value_s)[finite]
