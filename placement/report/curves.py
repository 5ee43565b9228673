"""What planners find over time: best-so-far curves of a ``Comparison``, as numbers and as PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.problem import Solution
from placement.report import gantt
from placement.report.gantt import COLOURS, FAINT, INK
from placement.report.row import SINGLE, Row, groups
from placement.report.table import Comparison
from placement.tools.shown import count

Floats = NDArray[np.float64]
_LEAST = 0.05  # per cent above the best found that the picture tells from none


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


def plot_curves(comparison: Comparison, path: str | Path) -> Path:
    """PNG: how far above the best found planners are over time, both axes logarithmic.

    Planners that run with seeds are lines (``best_so_far``); the others are dots at their median
    seconds and at what they end with.

    Raises:
        PlotError: matplotlib is not installed.
        FileError: the file cannot be written.
    """
    figure = gantt.figure_class()(figsize=(10, 6), dpi=150)
    axis = figure.subplots()
    of_planner = groups(comparison.rows, "planner")
    plan_s = {planner: [row.plan_s for row in rows] for planner, rows in of_planner.items()}
    drawn = {row.planner for row in comparison.rows if row.seed is not None}
    shown = [s for planner in drawn or plan_s.keys() for s in plan_s[planner]]
    shortest_s = 1e-3
    at_s = np.geomspace(shortest_s, max([10 * shortest_s, *shown]), 300)
    above = {
        planner: np.maximum(100 * (ratio - 1), _LEAST)
        for planner, ratio in best_so_far(comparison, at_s).items()
    }
    ended = {
        planner: max(_LEAST, float(100 * (ratio[0] - 1)))
        for planner, ratio in best_so_far(comparison, np.array([np.inf])).items()
    }
    order = sorted(ended, key=ended.__getitem__)
    for k, planner in enumerate(p for p in order if p in drawn):
        dash, colour = ("-", "--", ":")[min(2, k // len(COLOURS))], COLOURS[k % len(COLOURS)]
        label = f"{gantt.as_text(planner)}  {_percent(ended[planner])}"
        axis.plot(at_s, above[planner], dash, color=colour, lw=1.8, label=label)
    dots = {
        planner: (max(shortest_s, float(np.median(plan_s[planner]))), ended[planner])
        for planner in order
        if planner not in drawn
    }
    axis.set_xscale("log")
    axis.set_yscale("log")
    for x, y in dots.values():
        axis.plot(x, y, "o", ms=4, color=INK)
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, 0.8 * _LEAST), max(high, 10 * _LEAST))
    axis.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: _percent(value))
    axis.set_xlabel("seconds of planning", fontsize=9, color=INK)
    workloads = {row.workload for row in comparison.rows}
    of = f"geometric mean of {count(len(workloads), 'workload')}"
    if len(workloads) == 1:
        of = gantt.as_text(*workloads)
    what = f"predicted, best so far above the best found: {of}"
    axis.set_ylabel(what, fontsize=9, color=INK)
    if drawn & above.keys():
        axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    gantt.plain_axis(axis)
    axis.tick_params(axis="y", colors=FAINT, labelsize=9)
    axis.grid(axis="y", color=FAINT, alpha=0.25, lw=0.6)
    figure.tight_layout()
    _label(axis, dots)
    return gantt.save_figure(figure, path)


def _label(axis: Any, dots: Mapping[str, tuple[float, float]]) -> None:
    """Names beside the dots, moved up, with a line to its dot, where one would cover another."""
    high = 9  # points
    to_points = 72 / axis.figure.dpi
    at = {name: axis.transData.transform(xy) * to_points for name, xy in dots.items()}
    # Left, right and bottom of what labels must not cover: dots, and labels that are there.
    taken = [(x - 2, x + 2, y - high / 2) for x, y in at.values()]
    for name, (left, middle) in sorted(at.items(), key=lambda item: item[1][1]):
        left, bottom = left + 5, middle - high / 2
        right = left + 4.2 * len(name)
        for other_left, other_right, other_bottom in sorted(taken, key=lambda t: t[2]):
            beside = left > other_right or right < other_left
            if not beside and abs(bottom - other_bottom) < high:
                bottom = other_bottom + high
        taken.append((left, right, bottom))
        where: dict[str, Any] = {"xytext": (5, bottom - middle), "textcoords": "offset points"}
        if bottom > middle:
            line = {"arrowstyle": "-", "color": FAINT, "lw": 0.5, "shrinkA": 0}
            where["arrowprops"] = line | {"relpos": (0, 0.5)}  # from the left end of the name
        axis.annotate(gantt.as_text(name), dots[name], fontsize=7, color=INK, **where)


def _percent(value: float) -> str:
    return "≤ 0.05 %" if value <= _LEAST else f"{value:.3g} %"
