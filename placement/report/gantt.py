"""Timelines as pictures: in the terminal, and predicted over measured as PNG."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.timeline import Timeline, joined, side_by_side
from placement.tools import shown
from placement.tools.files import write_atomic
from placement.tools.ownership import needing

Floats = NDArray[np.float64]

# Neighbours in the cycle differ in hue and in lightness: 8 micro-batches read as 8.
COLOURS = (
    "#3b6fb6", "#f2a541", "#4aa57c", "#c8553d", "#7fb7d9", "#8a5a9e", "#b7c454", "#d98ab0",
)  # fmt: skip
INK, FAINT, LANE = "#22272e", "#8b949e", "#f1f3f5"


class PlotError(ValueError):
    """A picture cannot be drawn; the message says what to install."""


def text_gantt(timeline: Timeline, width: int = 80) -> str:
    """``placement.tools.shown.text_lanes``; a loader is one line more, without what it did before
    the run.
    """
    span_s, tracks = timeline.makespan_s, timeline.tracks()
    if timeline.load_s is not None:
        start, end = (timeline.load_s - timeline.begin_s).T
        inside = np.clip(end, 0.0, span_s) - np.clip(start, 0.0, span_s)
        share = min(1.0, inside.sum() / max(span_s, 1e-30))
        tracks.append(("loader", start, end, np.arange(timeline.num_microbatches), share))
    return shown.text_lanes(tracks, span_s, width)


def plot_gantt(
    predicted: Timeline, measured: Timeline | None, path: str | Path, title: str = ""
) -> Path:
    """PNG: predicted over measured on one time axis, a lane per device, a colour per micro-batch.

    What is measured is one run: its period is that run's, and no median of several.

    Operators of one micro-batch that follow each other closely are drawn as one bar; the thin
    line under a lane is what arrives from other devices. A loader has the lowest lane.

    Raises:
        PlotError: matplotlib is not installed.
        FileError: the file cannot be written.
    """
    panels = [("predicted", predicted)]
    if measured is not None:
        panels.append(("measured, one run", measured))
    return save_figure(_figure(panels, title), path)


def picture(timeline: Timeline | None, message: str, num_lanes: int) -> NDArray[np.uint8]:
    """The timeline as a picture, uint8 ``[height, width, 3]``; without one, what is ``message``.

    Pictures of the same ``num_lanes`` are of the same size, as frames of a film are.

    Raises:
        PlotError: matplotlib is not installed.
    """
    figure = _figure([("predicted", timeline)], "") if timeline else figure_class()(dpi=150)
    figure.set_size_inches(11, 1.35 + 0.5 * num_lanes)
    if timeline is None:
        figure.text(0.5, 0.5, as_text(message), ha="center", va="center", color=INK, wrap=True)
    else:
        figure.tight_layout(h_pad=0.8)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[:, :, :3].copy()


def _figure(panels: list[tuple[str, Timeline]], title: str) -> Any:
    """One panel per timeline, all on one time axis."""
    figure_type = figure_class()
    span = max(t.makespan_s for _, t in panels)
    unit, scale = shown.unit(span)
    lanes = [len(_lanes(t)) for _, t in panels]
    figure = figure_type(figsize=(11, 1.0 + 0.5 * sum(lanes) + 0.35 * len(panels)), dpi=150)
    heights = {"height_ratios": lanes}
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw=heights)[:, 0]
    for axis, (name, timeline) in zip(axes, panels, strict=True):
        _draw(axis, timeline, scale, resolution_s=span / 1500)
        _label(axis, name, timeline)
        axis.set_xlim(min(_begin_s(t) for _, t in panels) * scale, 1.005 * span * scale)
    axes[-1].set_xlabel(
        f"time [{unit}]; numbers are micro-batches, marks under a lane are transfers that arrive",
        fontsize=9,
        color=INK,
    )
    if title:
        how = {"x": 0.012, "ha": "left", "fontsize": 13, "fontweight": "bold", "color": INK}
        figure.suptitle(as_text(title), **how)
    figure.tight_layout(h_pad=0.8)
    return figure


def _lanes(timeline: Timeline) -> tuple[str, ...]:
    return timeline.device_names + (() if timeline.load_s is None else ("loader",))


def _begin_s(timeline: Timeline) -> float:
    """When loading begins, from the begin of the run: at most 0."""
    if timeline.load_s is None:
        return 0.0
    return min(0.0, float(timeline.load_s.min()) - timeline.begin_s)


def _draw(axis: Any, timeline: Timeline, scale: float, resolution_s: float) -> None:
    num_devices = len(timeline.device_names)
    begin = timeline.begin_s
    for d in range(num_devices):
        axis.axhspan(d - 0.36, d + 0.36, color=LANE, lw=0, zorder=0)
        for m in range(timeline.num_microbatches):
            ops = np.flatnonzero(timeline.device_of[m] == d)
            bars = merged(timeline.start_s[m, ops], timeline.end_s[m, ops], resolution_s)
            spans = [((a - begin) * scale, (b - a) * scale) for a, b in bars]
            # An edge of the bar's own colour keeps bars below one pixel visible.
            colours = dict.fromkeys(("facecolor", "edgecolor"), COLOURS[m % len(COLOURS)])
            axis.broken_barh(spans, (d - 0.36, 0.72), linewidth=0.4, **colours)
            _number(axis, m, d, bars, begin, scale, room_s=18 * resolution_s)
        into = timeline.transfers[:, 3] == d
        sent_s, until_s = timeline.transfer_start_s[into], timeline.transfer_end_s[into]
        arriving = merged(sent_s, until_s, resolution_s)
        marks = [((a - begin) * scale, max((b - a), resolution_s) * scale) for a, b in arriving]
        axis.broken_barh(marks, (d + 0.395, 0.05), facecolor=FAINT, linewidth=0)
    if timeline.load_s is not None:
        _draw_loader(axis, timeline.load_s - begin, num_devices, scale)


def _draw_loader(axis: Any, load_s: Floats, lane: int, scale: float) -> None:
    """Micro-batches that are loaded at the same time share the height of the lane."""
    axis.axhspan(lane - 0.36, lane + 0.36, color=LANE, lw=0, zorder=0)
    row = side_by_side(load_s)
    height = 0.72 / (row.max() + 1)
    for m, (begin, end) in enumerate(load_s):
        span, low = (begin * scale, (end - begin) * scale), lane - 0.36 + row[m] * height
        colour = COLOURS[m % len(COLOURS)]
        axis.broken_barh([span], (low, height), facecolor=colour, linewidth=0)


def merged(start_s: Floats, end_s: Floats, gap_s: float) -> list[tuple[float, float]]:
    """Intervals float64 ``[K]``, those less than ``gap_s`` apart joined, in order."""
    _, start, end = joined(np.zeros(len(start_s), int), start_s, end_s, gap_s)
    return list(zip(start.tolist(), end.tolist(), strict=True))


def _number(
    axis: Any,
    batch: int,
    device: int,
    bars: list[tuple[float, float]],
    begin: float,
    scale: float,
    room_s: float,
) -> None:
    """The micro-batch's number in its longest bar, if it has room."""
    if not bars:
        return
    a, b = max(bars, key=lambda bar: bar[1] - bar[0])
    if b - a < room_s:
        return
    red, green, blue = (int(COLOURS[batch % len(COLOURS)][i : i + 2], 16) for i in (1, 3, 5))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    how = {"ha": "center", "va": "center", "fontsize": 8, "color": "white" if dark else INK}
    axis.text(((a + b) / 2 - begin) * scale, device, str(batch), **how)


def as_text(name: str) -> str:
    """A name for matplotlib, which takes what is between two dollars for mathematics."""
    return name.replace("$", r"\$")


def _label(axis: Any, name: str, timeline: Timeline) -> None:
    lanes = _lanes(timeline)
    axis.set_yticks(range(len(lanes)), map(as_text, lanes), color=INK)
    axis.set_ylim(len(lanes) - 0.45, -0.55)
    many = timeline.num_microbatches > 1  # then the first one shares its devices
    facts = [f"{'first micro-batch' if many else 'latency'} {shown.duration(timeline.latency_s)}"]
    if many:
        facts.append(f"period {shown.duration(timeline.period_s)}")
    axis.set_title(as_text(name), loc="left", fontsize=10, color=INK, pad=4)
    axis.set_title("   ".join(facts), loc="right", fontsize=9, color=FAINT, pad=4)
    beside = {"transform": axis.get_yaxis_transform(), "va": "center"}
    for d, share in enumerate(timeline.utilisation):
        axis.text(1.006, d, f"{100 * share:.0f} %", fontsize=9, color=FAINT, **beside)
    plain_axis(axis)
    axis.tick_params(axis="y", length=0)


def plain_axis(axis: Any) -> None:
    """Only a faint line and a grid along the bottom."""
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.tick_params(axis="x", colors=FAINT, labelsize=9)
    axis.grid(axis="x", color=FAINT, alpha=0.25, lw=0.6)
    axis.set_axisbelow(True)


def figure_class() -> Any:
    """matplotlib's ``Figure``.

    Raises:
        PlotError: matplotlib is not installed.
    """
    with needing("plots", "pictures need matplotlib", PlotError):
        from matplotlib.figure import Figure
    return Figure  # not pyplot: no window, no state


def save_figure(figure: Any, path: str | Path) -> Path:
    """Write ``figure`` as PNG, whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return write_atomic(path, buffer.getvalue())
