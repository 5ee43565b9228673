"""Seconds and memory of every planner on ever larger graphs: which finish, which refuse, and how.

    python -m experiments.scale [PLANNER ...] [--operators 1000 10000 100000] [--devices 2 8 64]

Layers of 50 operators with random edges, training pipelines over equal devices. Every run has a
process of its own, one core, a limit of time and one of address space. A planner that was stopped
by a limit is not tried on larger problems. What is finished lies in ``runs/scale``: the same
command continues. Writes ``experiments/results/scale.csv``, ``.md`` and ``.png``.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments import _study
from experiments._study import GIB, Store, limited, number, say
from experiments.baselines import NEEDS_A_FILE
from placement import planners
from placement.files import write_atomic
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


def run(made: Problem, name: str, options: argparse.Namespace, memory_bytes: int) -> Row:
    """One planner on one problem; its answer is scored here, out of the limits."""
    planner = _study.budgeted(name, options.seconds)
    done = limited(lambda: planner(made), options.limit, memory_bytes)
    value_s, note = None, done.note
    if done.value is not None:
        found = float(score(made, made.check_placement(done.value.placement))[0])
        value_s = found if np.isfinite(found) else None
        note = str(done.value.stats.get("message") or done.value.stats.get("infeasible") or "")
    return Row(
        operators=made.num_ops,
        devices=made.num_devices,
        planner=name,
        budget_s=options.seconds,
        limit_s=options.limit,
        memory_bytes=memory_bytes,
        status=done.status,
        seconds=done.seconds,
        grown_bytes=done.grown_bytes,
        value_s=value_s,
        note=note,
    )


def study(options: argparse.Namespace, store: Store[Row]) -> list[Row]:
    """All rows, small problems first."""
    names = options.planners or [n for n in planners.names() if n not in NEEDS_A_FILE]
    memory_bytes = int(options.memory * GIB)
    _study.warm(names, ["period"])
    rows: list[Row] = []
    for operators in sorted(options.operators):
        for devices in sorted(options.devices):
            made: Problem | None = None
            for name in names:
                given = {"planner": name, "budget_s": options.seconds, "limit_s": options.limit}
                given |= {"memory_bytes": memory_bytes, "devices": devices}
                row = store.find(operators=-(-operators // WIDTH) * WIDTH, **given)
                if row is None:
                    if made is None:
                        began = time.perf_counter()
                        made = problem(operators, devices)
                        score(made, np.zeros(made.num_ops, np.int32))
                        say(
                            f"{made.num_ops} operators, {devices} devices: made in "
                            f"{time.perf_counter() - began:.1f} s"
                        )
                    row = store.add(_tried(made, name, options, memory_bytes, rows))
                    say(f"  {name}: {_cell(row)} {row.note[:100]}")
                rows.append(row)
    return rows


def _tried(
    made: Problem,
    name: str,
    options: argparse.Namespace,
    memory_bytes: int,
    rows: Sequence[Row],
) -> Row:
    for row in rows:
        smaller = row.operators <= made.num_ops and row.devices <= made.num_devices
        if row.planner == name and row.status in STOPPED and smaller:
            note = f"{row.status} with {row.operators} operators and {row.devices} devices"
            key = (made.num_ops, made.num_devices, name, options.seconds, options.limit)
            return Row(*key, memory_bytes, "not tried", None, None, None, note)
    return run(made, name, options, memory_bytes)


def _cell(row: Row) -> str:
    if row.status != "ok":
        return row.status
    size = number(row.grown_bytes, 0, 2**-20, " MiB")
    return f"{number(row.seconds, 2)} s, {size}" + (" *" if row.note else "")


def report(rows: Sequence[Row]) -> str:
    """The matrix, and what was said."""
    sizes = list(dict.fromkeys((r.operators, r.devices) for r in rows))
    by = {(r.planner, r.operators, r.devices): r for r in rows}
    names = sorted({r.planner for r in rows})
    table = _study.to_table(
        ["planner", *(f"{n:,} x {d}" for n, d in sizes)],
        [[name, *(_cell(by[name, n, d]) for n, d in sizes)] for name in names],
    )
    said: dict[str, list[str]] = {}
    for row in rows:
        if row.note and row.status not in ("not tried", "out of time"):
            text = f"`{row.planner}`, {row.status}: " + re.sub(r"\d[\d.e+]*", "N", row.note)[:300]
            said.setdefault(text, []).append(f"{row.operators:,} x {row.devices}")
    notes = "".join(f"- {text} ({', '.join(where)})\n" for text, where in said.items())
    return table + (f"\n## What they said\n\n{notes}" if notes else "")


def plot(rows: Sequence[Row], path: Path) -> Path:
    """PNG: seconds and memory over operators, a column per number of devices, all logarithmic.

    A cross: ended by a limit.

    Raises:
        PlotError: matplotlib is not installed.
        FileError: the file cannot be written.
    """
    devices = sorted({r.devices for r in rows})
    names = sorted({r.planner for r in rows})
    figure = gantt.figure_class()(figsize=(3 + 3.6 * len(devices), 8), dpi=150)
    axes = figure.subplots(2, len(devices), sharex=True, sharey="row", squeeze=False)
    for column, count in enumerate(devices):
        for k, name in enumerate(names):
            mine = [r for r in rows if (r.planner, r.devices, r.status) == (name, count, "ok")]
            x = [r.operators for r in mine]
            style = {
                "color": gantt.COLOURS[k % len(gantt.COLOURS)],
                "ls": ("-", "--", ":", "-.")[k // len(gantt.COLOURS) % 4],
                "marker": "os^D"[k // len(gantt.COLOURS) % 4],
                "ms": 4,
                "lw": 1.2,
                "label": name,
            }
            axes[0, column].plot(x, [max(1e-3, r.seconds or 0) for r in mine], **style)
            grown = [max(1.0, (r.grown_bytes or 0) / 2**20) for r in mine]
            axes[1, column].plot(x, grown, **style)
            ended = [r for r in rows if (r.planner, r.devices) == (name, count)]
            ended = [r for r in ended if r.status in STOPPED]
            axes[0, column].plot(
                [r.operators for r in ended],
                [r.seconds for r in ended],
                "x",
                color=style["color"],
                ms=6,
            )
        axes[0, column].set_title(f"{count} devices", loc="left", fontsize=10, color=gantt.INK)
        axes[1, column].set_xlabel("operators", fontsize=9, color=gantt.INK)
    for axis in axes.flat:
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.minorticks_off()
        gantt.plain_axis(axis)
        axis.grid(axis="y", color=gantt.FAINT, alpha=0.25, lw=0.6)
        axis.tick_params(axis="y", colors=gantt.FAINT, labelsize=9)
    axes[0, 0].set_ylabel("seconds", fontsize=9, color=gantt.INK)
    axes[1, 0].set_ylabel("MiB above the problem", fontsize=9, color=gantt.INK)
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0, 1 - 1.9 / figure.get_figwidth(), 1))
    figure.legend(lines, labels, loc="center right", frameon=False, fontsize=8)
    return gantt.save_figure(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _study.common_options(parser, "scale")
    parser.add_argument("planners", nargs="*", metavar="PLANNER", help="default: all")
    parser.add_argument("--operators", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--seconds", type=float, default=10.0, help="budget of those that take one")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a run, at most")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB of address space of a run")
    options = parser.parse_args(argv)

    def work() -> None:
        warnings.simplefilter("ignore", RuntimeWarning)  # what they say is in the rows
        for name in options.planners:
            planners.find(name)
        runs = len(options.planners or planners.names()) * len(options.operators)
        runs *= len(options.devices)
        say(
            f"{runs} runs: about {runs * options.seconds / 60:.0f} minutes, at most "
            f"{runs * options.limit / 60:.0f}"
        )
        rows = study(options, Store(options.work / "scale.jsonl", Row, options.fresh))
        table = report(rows)
        facts = _study.provenance(
            budget_s=options.seconds, limit_s=options.limit, address_space_GiB=options.memory
        )
        write_atomic(options.out / "scale.csv", _study.to_csv(rows))
        plot(rows, options.out / "scale.png")
        write_atomic(
            options.out / "scale.md",
            f"""# How planners scale

`{_study.command_line("experiments.scale", argv)}`

Operators x devices: seconds, and the most memory that the process held above what it held when
it began (Python, compiled kernels and the problem itself). Planners that take a budget have
{options.seconds:g} s. A star: it answered, but said something, see below. "Refused": it raised an
error with a message. "Out of time": ended after {options.limit:g} s. "Out of memory", "killed":
the limit of {options.memory:g} GiB of address space. "Not tried": stopped by a limit on a smaller
problem.

{table}
![Seconds and memory over operators](scale.png)

{facts}""",
        )
        print(table)
        say(f"written to {options.out}: scale.csv, scale.md, scale.png")

    return _study.launch(work)


if __name__ == "__main__":
    sys.exit(main())
