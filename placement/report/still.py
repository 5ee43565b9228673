"""What the page of a run shows without scripts: a table and a picture of every workload.

A picture is SVG of a few thousand rectangles, with nothing in it that a browser would execute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from placement.report.gantt import COLOURS, merged
from placement.timeline import Timeline
from placement.tools.shown import duration, seconds

_COLUMNS: dict[str, tuple[str, ...]] = {
    "period": ("period_s", "measured_period_s"),
    "latency": ("latency_s", "measured_latency_s"),
}


def picture(timelines: Sequence[Timeline], planner: str) -> str:
    """SVG: a lane per device, a colour per micro-batch, all timelines on one time axis."""
    width, left, lane, title = 1000, 110, 22, 24  # pixels; what is left is for names of devices
    span_s = max([1e-12, *(t.makespan_s for t in timelines)])
    shapes, top = [], 0
    for timeline in timelines:
        count = len(timeline.device_names)
        num_shown = min(timeline.num_microbatches, max(1, 4_000 // count))
        what = f"{planner}, {named(timeline)}: {seconds(timeline.period_s)} per micro-batch"
        shapes.append(_text(0, top + 16, what, "name"))
        top += title
        for device, name in enumerate(timeline.device_names):
            y = top + lane * device
            short = name if len(name) < 15 else f"{name[:13]}…"
            shapes.append(_text(left - 8, y + 15, short, "device"))
            shapes.append(_bar(left, y, width - left, 'class="lane"'))
            for batch in range(num_shown):
                ops = np.flatnonzero(timeline.device_of[batch] == device)
                begin = timeline.start_s[batch, ops] - timeline.begin_s
                end = timeline.end_s[batch, ops] - timeline.begin_s
                for a, b in merged(begin, end, span_s / width):
                    scale = (width - left) / span_s
                    at, long = left + a * scale, (b - a) * scale
                    shapes.append(_bar(at, y, long, f'fill="{COLOURS[batch % len(COLOURS)]}"'))
        top += lane * count + 6
    shapes.append(_text(left, top + 12, "0"))
    shapes.append(_text(width, top + 12, duration(span_s), "end"))
    size = f'viewBox="0 0 {width} {top + 18}" role="img"'
    return f'<svg class="gantt" {size} aria-label="Timeline">{"".join(shapes)}</svg>'


def named(timeline: Timeline) -> str:
    """What a timeline is of; a measured one is one run, and no median of several."""
    return "measured, one run" if timeline.measured else "predicted"


def page(workload: Mapping[str, Any]) -> str:
    """HTML of a value of ``page_data()["workloads"]``: its figures, and its ``picture``."""
    planners: Sequence[Mapping[str, Any]] = workload["planners"]
    header = ["planner"]
    columns: list[str] = []
    for what, keys in _COLUMNS.items():
        for how, key in zip(("predicted", "measured"), keys, strict=True):
            if any(p[key] is not None for p in planners):
                header.append(f"{how} {what}")
                columns.append(key)
    rows = [
        [p["name"], *("–" if p[key] is None else seconds(p[key]) for key in columns)]
        for p in planners
    ]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f'<section class="card"><h2>{escape(workload["name"])}</h2><div class="scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<div class="sideways">{workload["picture"] or ""}</div></section>'
    )


def _bar(x: float, y: float, width: float, look: str) -> str:
    return f'<rect {look} x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="18"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'
