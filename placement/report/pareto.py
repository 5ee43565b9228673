"""What latency, period and energy cost each other: the Pareto front of a ``Comparison`` as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from placement.report import gantt
from placement.report.gantt import COLOURS, FAINT, INK
from placement.report.row import Row, groups
from placement.report.table import Comparison, pareto_front

_COLUMNS = {
    "latency_s": ("latency", "ms"),
    "period_s": ("period", "ms"),
    "energy_j": ("energy", "mJ"),
}


def plot_pareto(comparison: Comparison, path: str | Path) -> Path:
    """PNG: a line of panels for each workload, one for each two of latency, period and energy.

    Predicted values of every feasible row; those on the front (``Row.pareto``) have colour and,
    as all do where they are few, names, and a line that joins those that are on the front of the
    panel's two values. Energy from declared watts says so. Of more than 12 workloads, the first 12
    are drawn.

    Raises:
        PlotError: matplotlib is not installed, or nothing fits anywhere.
        FileError: the file cannot be written.
    """
    workloads = groups((row for row in comparison.rows if row.feasible), "workload")
    if not workloads:
        raise gantt.PlotError("no placement that fits was found for any workload")
    shown = dict(list(workloads.items())[:12])  # more rows are not looked at
    with_energy = any(rows[0].energy_j is not None for rows in shown.values())
    pairs = [("latency_s", "period_s")]
    if with_energy:
        pairs += [("latency_s", "energy_j"), ("period_s", "energy_j")]
    figure = gantt.figure_class()(figsize=(5.2 * len(pairs), 3.8 * len(shown)), dpi=130)
    axes = figure.subplots(len(shown), len(pairs), squeeze=False)
    for line, (workload, rows) in zip(axes, shown.items(), strict=True):
        for axis, (x, y) in zip(line, pairs, strict=True):
            if getattr(rows[0], y) is None:
                axis.set_axis_off()
                continue
            _panel(axis, rows, x, y)
            axis.set_title(gantt.as_text(workload), loc="left", fontsize=10, color=INK)
    figure.tight_layout()
    return gantt.save_figure(figure, path)


def _panel(axis: Any, rows: Sequence[Row], x: str, y: str) -> None:
    points = [(1e3 * getattr(row, x), 1e3 * getattr(row, y)) for row in rows]
    here = pareto_front(points)
    front = sorted({p for p, is_front in zip(points, here, strict=True) if is_front})
    axis.plot(*zip(*front, strict=True), "-", drawstyle="steps-post", lw=1.2, color=COLOURS[0])
    named: dict[tuple[float, float], list[str]] = {}
    for row, point in zip(rows, points, strict=True):
        axis.plot(*point, "o", ms=5, color=COLOURS[0] if row.pareto else FAINT)
        if (row.pareto or len(rows) <= 12) and row.planner not in named.setdefault(point, []):
            named[point].append(row.planner)
    for (px, py), names in named.items():
        more = f" +{len(names) - 3}" if len(names) > 3 else ""
        text = gantt.as_text(", ".join(names[:3])) + more
        axis.annotate(
            text, (px, py), xytext=(5, 4), textcoords="offset points", fontsize=7, color=INK
        )
    for which, column in (("x", x), ("y", y)):
        name, unit = _COLUMNS[column]
        declared = " (declared watts)" if rows[0].energy_source == "declared" else ""
        label = f"predicted {name}, {unit}" + (declared if column == "energy_j" else "")
        getattr(axis, f"set_{which}label")(label, fontsize=9, color=INK)
    gantt.plain_axis(axis)
    axis.tick_params(axis="both", colors=FAINT, labelsize=8)
    axis.grid(color=FAINT, alpha=0.25, lw=0.6)
    axis.margins(0.12)
