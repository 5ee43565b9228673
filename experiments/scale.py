"""Seconds and memory of every planner on ever larger graphs: which finish, which refuse, and how.

    python -m experiments.scale [PLANNER ...] [--operators 1000 10000 100000] [--devices 2 8 64]

Layers of 50 operators with random edges, training pipelines over equal devices. Every run has a
process of its own, one core, a limit of time and one of address space. A planner that was stopped
by a limit is not tried on larger problems. What is finished lies in ``runs/scale``: the same
command continues. Writes ``experiments/results/scale.csv``, ``.md`` and ``.png``.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.baselines import NEEDS_A_FILE
from experiments.runs import GIB, budgeted, limited, warm
from experiments.study import Option, Options, Rows, Study, run, say
from experiments.tables import Column, number, table
from placement import planners
from placement.problem import Problem
from placement.report import gantt
from placement.simulator import score
from placement.workloads.synthetic import Family, layered

WIDTH, DENSITY = 50, 0.05
STOPPED = ("out of time", "out of memory", "killed")


@dataclass(frozen=True)
class Row:
    """One run.

    ``status``: ``ok``, ``refused`` (with a message), ``failed`` (another error), one of
    ``STOPPED``, or ``not tried``. ``grown_bytes``: most that the process held above what it
    held when it began, the problem included in the latter. ``value_s``: the period.
    """

    operators: int
    devices: int
    planner: str
    budget_s: float
    limit_s: float
    memory_bytes: int
    status: str
    seconds: float | None
    grown_bytes: int | None
    value_s: float | None
    note: str


def problem(operators: int, devices: int) -> Problem:
    """``operators``, rounded up to whole layers, on so many equal devices."""
    return Family(layered(-(-operators // WIDTH), WIDTH, DENSITY), num_devices=devices)(0)


@cache
def prepared(operators: int, devices: int) -> Problem:
    """The problem, with what is derived from it: once for all planners."""
    began = time.perf_counter()
    whole = problem(operators, devices)
    score(whole, np.zeros(whole.num_ops, np.int32))
    took_s = time.perf_counter() - began
    say(f"{whole.num_ops} operators, {devices} devices: made in {took_s:.1f} s")
    return whole


def rows(options: Options) -> Iterator[Row]:
    for name in options.planners:
        planners.find(name)
    names = options.planners or [n for n in planners.names() if n not in NEEDS_A_FILE]
    sizes = [(n, d) for n in sorted(options.operators) for d in sorted(options.devices)]
    minutes = len(names) * len(sizes) / 60
    least, most = minutes * options.seconds, minutes * options.limit
    say(f"{len(names) * len(sizes)} runs: about {least:.0f} minutes, at most {most:.0f}")
    warm(names, ["period"])
    before: list[Row] = []
    for operators, devices in sizes:
        prepared.cache_clear()
        for name in names:
            size = -(-operators // WIDTH) * WIDTH, devices
            limits = options.seconds, options.limit, int(options.memory * GIB)
            make = partial(_row, *size, name, limits, before)
            row = options.finished.row(Row, [*size, name, *limits], make, name)
            say(f"  {name}: {cell(row)} {row.note[:100]}")
            before.append(row)
            yield row


def _row(
    operators: int, devices: int, name: str, limits: tuple[float, float, int], before: Sequence[Row]
) -> Row:
    """One planner on one problem; its answer is scored here, out of the limits."""
    size = operators, devices
    smaller = stopped(before, (name,), *size, "planner")
    if smaller is not None:
        note = f"{smaller.status} with {smaller.operators} operators and {smaller.devices} devices"
        return Row(*size, name, *limits, "not tried", None, None, None, note)
    whole, planner = prepared(*size), budgeted(name, limits[0])
    done = limited(lambda: planner(whole), *limits[1:])
    value_s, note = None, done.note
    if done.value is not None:
        value = float(score(whole, whole.check_placement(done.value.placement))[0])
        value_s = value if np.isfinite(value) else None
        note = str(done.value.stats.get("message") or done.value.stats.get("infeasible") or "")
    return Row(*size, name, *limits, done.status, done.seconds, done.grown_bytes, value_s, note)


def stopped(
    before: Sequence[Any], names: Sequence[str], operators: int, devices: int, field: str
) -> Any:
    """The row of one of ``names`` (in ``field``) that a limit stopped on something smaller."""
    for row in before:
        smaller = row.operators <= operators and row.devices <= devices
        if getattr(row, field) in names and row.status in STOPPED and smaller:
            return row
    return None


def cell(row: Any) -> str:
    """Seconds and MiB of a run, or how it ended."""
    if row.status != "ok":
        return str(row.status)
    size = number(row.grown_bytes, 0, 2**-20, " MiB")
    return f"{number(row.seconds, 2)} s, {size}" + (" *" if row.note else "")


def parts(rows: Rows, options: Options) -> dict[str, str]:
    sizes = list(dict.fromkeys((r.operators, r.devices) for r in rows))
    by = {(r.planner, r.operators, r.devices): r for r in rows}
    columns = (
        Column(f"{n:,} x {d}", lambda name, n=n, d=d: cell(by[name, n, d])) for n, d in sizes
    )
    matrix = table(sorted({r.planner for r in rows}), Column("planner", str), *columns)
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.note and row.status not in ("not tried", "out of time"):
            text = f"`{row.planner}`, {row.status}: " + re.sub(r"\d[\d.e+]*", "N", row.note)[:300]
            said.setdefault(text, []).append(f"{row.operators:,} x {row.devices}")
    notes = "".join(f"- {text} ({', '.join(where)})\n" for text, where in said.items())
    if notes:
        notes = f"## What they said\n\n{notes}\n"
    return {"table": matrix, "said": notes}


def plot_panels(
    rows: Rows,
    path: Path,
    name: str,
    panel: str,
    x: str,
    measures: Mapping[str, Callable[[Any], float]],
    base: int = 10,
) -> Path:
    """PNG: each measure over ``x``, a column per ``panel``, a line per ``name``; all logarithmic.

    A cross: ended by a limit. ``name``, ``panel`` and ``x`` are fields of the rows.

    Raises:
        PlotError: matplotlib is not installed.
        FileError: the file cannot be written.
    """
    columns = sorted({getattr(r, panel) for r in rows})
    names = list(dict.fromkeys(getattr(r, name) for r in rows))
    size = (3 + 3.6 * len(columns), 0.5 + 3.7 * len(measures))
    figure = gantt.figure_class()(figsize=size, dpi=150)
    axes = figure.subplots(len(measures), len(columns), sharex=True, sharey="row", squeeze=False)
    for (line, column), axis in np.ndenumerate(axes):
        what, measure = list(measures.items())[line]
        for k, subject in enumerate(names):
            here = [r for r in rows if (getattr(r, name), getattr(r, panel)) ==
                    (subject, columns[column])]  # fmt: skip
            fine = [r for r in here if r.status == "ok"]
            ended = [r for r in here if r.status in STOPPED and line == 0]
            turn, colour = divmod(k, len(gantt.COLOURS))
            style = {"color": gantt.COLOURS[colour], "ls": ("-", "--", ":", "-.")[turn % 4]}
            style |= {"marker": "os^D"[turn % 4], "ms": 4, "lw": 1.2, "label": subject}
            axis.plot([getattr(r, x) for r in fine], [measure(r) for r in fine], **style)
            style |= {"marker": "x", "ls": "", "ms": 6, "label": None}
            axis.plot([getattr(r, x) for r in ended], [r.seconds for r in ended], **style)
        axis.set_xscale("log", base=base)
        axis.set_yscale("log")
        axis.minorticks_off()
        gantt.plain_axis(axis)
        axis.grid(axis="y", color=gantt.FAINT, alpha=0.25, lw=0.6)
        axis.tick_params(axis="y", colors=gantt.FAINT, labelsize=9)
        if line == 0:
            title = f"{columns[column]:,} {panel}"
            axis.set_title(title, loc="left", fontsize=10, color=gantt.INK)
        if line == len(measures) - 1:
            axis.set_xlabel(x, fontsize=9, color=gantt.INK)
        if column == 0:
            axis.set_ylabel(what, fontsize=9, color=gantt.INK)
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0, 1 - 1.9 / figure.get_figwidth(), 1))
    figure.legend(lines, labels, loc="center right", frameon=False, fontsize=8)
    return gantt.save_figure(figure, path)


def seconds_of(row: Any) -> float:
    """At least a millisecond, as a logarithmic axis needs."""
    return max(1e-3, row.seconds or 0.0)


def plot(rows: Rows, path: Path, options: Options) -> Path:
    measures = {
        "seconds": seconds_of,
        "MiB above the problem": lambda r: max(1.0, (r.grown_bytes or 0) / 2**20),
    }
    rows = sorted(rows, key=lambda r: r.planner)
    return plot_panels(rows, path, "planner", "devices", "operators", measures)


LIMITS = {
    "limit": Option(60.0, "seconds of a run, at most"),
    "memory": Option(8.0, "GiB of address space of a run"),
}
STUDY = Study(
    name="scale",
    rows=rows,
    row=Row,
    parts=parts,
    plot=plot,
    options={
        "planners": Option((), "default: all", word=True, metavar="PLANNER"),
        "operators": (1_000, 10_000, 100_000),
        "devices": (2, 8, 64),
        "seconds": Option(10.0, "budget of those that take one"),
        **LIMITS,
    },
    facts=lambda o: {"budget_s": o.seconds, "limit_s": o.limit, "address_space_GiB": o.memory},
)
main = partial(run, (STUDY,))

if __name__ == "__main__":
    sys.exit(main())
