"""How values are shown everywhere, and objects in a notebook.

Everything that goes into HTML is escaped: names come from files. Colours are those of the page
around it, so that dark and light ones both work; nothing is loaded and no script is run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from placement.tools.progress import printable

WIDTH = 80  # columns of a table, at most
IDLE = "·"
Track = tuple[str, Any, Any, Any, float]
_CELL = "padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.3);"


def seconds(value: float, unit: str = "s") -> str:
    """Seconds (or another unit) with a fitting prefix, e.g. ``12.3 ms``."""
    for prefix, scale in (("", 1.0), ("m", 1e3), ("µ", 1e6)):
        if value * scale >= 0.9995 or prefix == "µ":
            shown = f"{value * scale:.3g} {prefix}{unit}"
            return shown if value * scale < 999.5 else f"{value:.0f} {unit}"
    raise AssertionError("the last unit always fits")


def byte_size(value: float) -> str:
    """Bytes in the unit that fits, e.g. ``12.3 MiB``, or the word for no limit."""
    if value >= 2**62:
        return "unlimited"
    units = (("GiB", 2**30), ("MiB", 2**20 / 10), ("KiB", 1))
    name = next((name for name, least in units if value >= least), "MiB")
    return f"{value / {'GiB': 2**30, 'MiB': 2**20, 'KiB': 2**10}[name]:,.1f} {name}"


def hydra_word(key: str, path: str) -> str:
    """``KEY=PATH`` for a command, in quotes of Hydra's grammar and of the shell where they ask."""
    if not re.fullmatch(r"[\w/.:+-]+", path, re.ASCII):
        path = '"' + re.sub(r'(\\*)"', r'\1\1\\"', path) + '"'
    return shlex.quote(f"{key}={path}")


def count(number: int, what: str) -> str:
    """``1 workload``, ``2 workloads``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    *,
    figures: bool = True,
) -> None:
    """To standard output, at most 80 columns; on a narrow terminal headers have two lines.

    The first column is names, the others are ``figures``.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # Names come from files: no markup, no emoji.
    out = Console(markup=False, emoji=False, highlight=False)
    out.width = min(max(out.width, 60), WIDTH)  # narrower ones would be letters below letters
    wide = out.width == WIDTH
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, column in enumerate(header):
        if i and figures and not wide:
            column = re.sub(r"(?<=.{4})[ -](?=.)", lambda x: x[0].strip() + "\n", column)
        # A figure that is cut is a wrong figure; one with a unit may be broken before that.
        whole = all(len(row[i]) <= 20 and not (i and " " in row[i]) for row in rows)
        shown.add_column(
            printable(column),
            justify="right" if i and figures else "left",
            overflow="ellipsis" if i == 0 and figures and wide else "fold",
            no_wrap=whole and bool(i) == figures,
        )
    for row in rows:
        shown.add_row(*map(printable, row))
    out.print(printable(title), style="bold")
    out.print(shown)
    for note in notes:
        out.print(printable(note), style="dim")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], most: int = 40) -> str:
    """HTML of a table of text; the first column is names, the others are figures.

    Of more than ``most`` rows the first are shown, and how many there are.
    """
    head = "".join(_cell("th", text, i) for i, text in enumerate(header))
    body = "".join(
        f"<tr>{''.join(_cell('td', text, i) for i, text in enumerate(row))}</tr>"
        for row in rows[:most]
    )
    more = f"<div>and {len(rows) - most} more</div>" if len(rows) > most else ""
    return (
        '<div style="overflow-x:auto;margin:4px 0 10px">'
        f"<div><b>{escape(title)}</b></div>"
        '<table style="border-collapse:collapse;background:transparent;color:inherit">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}</div>"
    )


def lanes(title: str, tracks: Sequence[Track], span_s: float, most: int = 16) -> str:
    """HTML with ``text_lanes``, of ``most`` devices at most."""
    more = f", the first {most} of {len(tracks)} devices" if len(tracks) > most else ""
    text = escape(text_lanes(tracks[:most], span_s, 120))
    return f"<div><b>{escape(title)}</b>{more}</div><pre>{text}</pre>"


def text_lanes(tracks: Sequence[Track], span_s: float, width: int = 80) -> str:
    """One line per track: the last digit of the micro-batch that it works on, ``·`` while idle.

    Each character is an equal slice of the span, and shows the micro-batch with the largest share
    of it, if the track is busy for at least half of it.

    Args:
        tracks: name, float64 ``[K]`` start and end of slices in seconds from 0, the micro-batch of
            each, int ``[K]``, and the busy share of all.
    """
    import numpy as np

    margin = max(len(name[:16]) for name, *_ in tracks)
    cells = max(8, width - margin - 9)  # " │" before, "│ 100 %" after
    edges = np.linspace(0.0, span_s, cells + 1)
    lines = []
    for name, start, end, batch, share in tracks:
        batch = np.append(batch, 0).astype(int)
        took = [np.append(np.clip(edge - start, 0.0, end - start), 0.0) for edge in edges]
        busy = np.diff([np.bincount(batch, x) for x in took], axis=0).T
        top, full = busy.argmax(axis=0), busy.sum(axis=0) >= 0.5 * np.diff(edges)
        row = "".join(str(m % 10) if on else IDLE for m, on in zip(top, full, strict=True))
        lines.append(f"{name[:16]:>{margin}} │{row}│{100 * share:4.0f} %")
    lines.append(f"{'':>{margin}}  0{duration(span_s):>{cells - 1}}")
    return "\n".join(lines)


def unit(span_s: float) -> tuple[str, float]:
    """The unit of a time axis, and how many a second has."""
    return ("s", 1.0) if span_s >= 2 else ("ms", 1e3) if span_s >= 2e-3 else ("µs", 1e6)


def duration(value_s: float) -> str:
    """Seconds in the unit of such an axis."""
    name, scale = unit(value_s)
    value = value_s * scale
    return f"{value:.0f} {name}" if value >= 100 else f"{value:.3g} {name}"


def _cell(tag: str, text: str, column: int) -> str:
    align = "right" if column else "left"
    return f'<{tag} style="{_CELL}text-align:{align}">{escape(text)}</{tag}>'
