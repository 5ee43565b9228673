"""How values are shown everywhere, and objects in a notebook.

Everything that goes into HTML is escaped: names come from files. Colours are those of the page
around it, so that dark and light ones both work; nothing is loaded and no script is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

MAX_ROWS = 40
MAX_LANES = 16
_COLUMNS = 720  # of a drawn timeline: its width in pixels
_HUES = ("#3b78c4", "#d98c26", "#3d9b70", "#c8553d", "#6aa9cf", "#96659f", "#9aa83a", "#c9729b")
_CELL = "padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.3);"


def seconds(value: float, unit: str = "s") -> str:
    """Seconds (or another unit) with a fitting prefix, e.g. ``12.3 ms``."""
    for prefix, scale in (("", 1.0), ("m", 1e3), ("µ", 1e6)):
        if value * scale >= 1.0 or prefix == "µ":
            shown = f"{value * scale:.3g} {prefix}{unit}"
            return shown if value * scale < 999.5 else f"{value:.0f} {unit}"
    raise AssertionError("the last unit always fits")


def mebibytes(value: float) -> str:
    """Bytes as MiB, or the word for no limit."""
    return "unlimited" if value >= 2**62 else f"{value / 2**20:,.1f} MiB"


def count(number: int, what: str) -> str:
    """``1 workload``, ``2 workloads``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table of text; the first column is names, the others are figures.

    Of more than ``MAX_ROWS`` rows the first are shown, and how many there are.
    """
    head = "".join(_cell("th", text, i) for i, text in enumerate(header))
    body = "".join(
        f"<tr>{''.join(_cell('td', text, i) for i, text in enumerate(row))}</tr>"
        for row in rows[:MAX_ROWS]
    )
    more = f"<div>and {len(rows) - MAX_ROWS} more</div>" if len(rows) > MAX_ROWS else ""
    return (
        '<div style="overflow-x:auto;margin:4px 0 10px">'
        f"<div><b>{escape(title)}</b></div>"
        '<table style="border-collapse:collapse;background:transparent;color:inherit">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}</div>"
    )


def lanes(title: str, tracks: Sequence[tuple[str, Any, Any, Any]], span_s: float) -> str:
    """HTML with a drawing (SVG) of who was busy when; of ``MAX_LANES`` devices at most.

    Args:
        tracks: per device its name, and float64 ``[K]`` start and end of its slices in seconds
            from 0, and the micro-batch of each, int ``[K]``; a device does one at a time.
        span_s: where the time axis ends.
    """
    shown = tracks[:MAX_LANES]
    height = 22 * len(shown) + 20
    parts = []
    for i, (name, start, end, batch) in enumerate(shown):
        y = 22 * i + 4
        parts.append(f'<text x="92" y="{y + 12}" text-anchor="end">{escape(name[:14])}</text>')
        parts.append(
            f'<rect x="100" y="{y}" width="{_COLUMNS}" height="16" fill="currentColor" '
            'opacity=".08"/>'
        )
        for hue, path in _bars(start, end, batch, span_s, y).items():
            parts.append(f'<path d="{path}" fill="{_HUES[hue]}"/>')
    y = 22 * len(shown) + 14
    parts.append(f'<text x="100" y="{y}">0</text>')
    right = 100 + _COLUMNS
    parts.append(f'<text x="{right}" y="{y}" text-anchor="end">{seconds(span_s)}</text>')
    more = f", the first {MAX_LANES} of {len(tracks)} devices" if len(tracks) > MAX_LANES else ""
    return (
        f'<div style="overflow-x:auto;margin:4px 0 10px"><div><b>{escape(title)}</b>{more}</div>'
        f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {right + 4} {height}" '
        f'width="{right + 4}" height="{height}" style="max-width:100%" fill="currentColor" '
        f'font-size="11" font-family="sans-serif">{"".join(parts)}</svg></div>'
    )


def _bars(start: Any, end: Any, batch: Any, span_s: float, y: int) -> dict[int, str]:
    """Colour -> path of the bars of one lane: at most one bar per column of the drawing."""
    import numpy as np

    if len(start) == 0 or span_s <= 0:
        return {}
    order = np.argsort(start, kind="stable")
    start, end, batch = start[order], end[order], batch[order]
    middle = (np.arange(_COLUMNS) + 0.5) * (span_s / _COLUMNS)
    at = np.searchsorted(start, middle, side="right") - 1
    busy = (at >= 0) & (end[at] > middle)
    hue = np.where(busy, batch[at] % len(_HUES), -1)
    edges = np.flatnonzero(np.diff(hue, prepend=-2, append=-2))
    paths: dict[int, str] = {}
    for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if hue[a] >= 0:
            bar = f"M{100 + a} {y}h{b - a}v16h-{b - a}z"
            paths[int(hue[a])] = paths.get(int(hue[a]), "") + bar
    return paths


def _cell(tag: str, text: str, column: int) -> str:
    align = "right" if column else "left"
    return f'<{tag} style="{_CELL}text-align:{align}">{escape(text)}</{tag}>'
