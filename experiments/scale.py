"""Seconds and memory of planners on ever larger problems: which finish, which refuse, and how.

    python -m experiments.scale operators [PLANNER ...] [--operators 1000 10000 100000]
    python -m experiments.scale devices [--devices 8 64 512 4096]

Graphs are layers of 50 operators with random edges. ``operators``: training pipelines over equal
devices, every planner. ``devices``: nodes of eight equal devices; links within a node are fast,
those between nodes slow, and all that leaves a node shares its interface (a channel); building the
problem, the simulator, some planners and a policy. Every run has a process of its own, one core, a
limit of time and one of address space; what a limit stopped is not tried on anything larger. What
is finished lies in ``runs/scale``: the same command continues.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.baselines import NEEDS_A_FILE
from experiments.runs import GIB, Run, budgeted, limited, warm
from experiments.study import Option, Options, Rows, Study, run, say
from experiments.tables import Column, finite, groups, number, table
from placement import planners
from placement.cluster import Cluster, Device, Link
from placement.problem import Problem
from placement.profile import Profile
from placement.report import gantt
from placement.simulator import score
from placement.workloads.synthetic import Family, layered

WIDTH, DENSITY = 50, 0.05
PER_NODE = 8
WITHIN = (2e-6, 100e9)  # latency and bytes/s of a link within a node
BETWEEN = (10e-6, 12.5e9)  # and between nodes: an interface of 100 Gbit/s
BUILD, SIMULATE, POLICY = "build the problem", "simulate", "policy (one shot)"
PLANNERS = ("pipedream", "contiguous_dp", "balanced_split", "replicated", "heft", "macro_search")
STOPPED = ("out of time", "out of memory", "killed")
Call = Callable[[Problem], Any]


@dataclass(frozen=True)
class Row:
    """One run of a ``subject``: a planner, or another part of the program.

    ``status``: ``ok``, ``refused`` (with a message), ``failed`` (another error), one of
    ``STOPPED``, or ``not tried``. ``grown_bytes``: most that the process held above what it
    held when it began, the problem included in the latter. ``value_s``: the period;
    ``replicated_s``: the one with replicas.
    """

    subject: str
    operators: int
    devices: int
    budget_s: float
    limit_s: float
    memory_bytes: int
    status: str
    seconds: float | None
    grown_bytes: int | None
    value_s: float | None
    replicated_s: float | None
    note: str


# --- the problems --------------------------------------------------------------------------------


def graph_of(operators: int, devices: int) -> Problem:
    """At least ``operators``, in whole layers, on so many equal devices."""
    return Family(layered(-(-operators // WIDTH), WIDTH, DENSITY), num_devices=devices)(0)


@cache
def joined(operators: int, devices: int) -> Problem:
    """``graph_of``, with what the simulator derives from it."""
    problem = graph_of(operators, devices)
    score(problem, np.zeros(problem.num_ops, np.int32))
    return problem


def cluster(num_devices: int) -> Cluster:
    """Nodes of ``PER_NODE`` devices: two levels of links, one interface per node."""
    names = [f"n{d // PER_NODE}:{d % PER_NODE}" for d in range(num_devices)]
    nodes = [f"n{i}" for i in range(-(-num_devices // PER_NODE))]
    links = (
        *(Link(f"{node}:*", "*", *BETWEEN, channel=f"{node}:out") for node in nodes),
        *(Link(f"{node}:*", f"{node}:*", *WITHIN) for node in nodes),
    )
    devices = tuple(Device(x, "accelerator", memory_bytes=2**36) for x in names)
    return Cluster(f"{num_devices}-devices", devices, links)


@cache
def in_nodes(operators: int, devices: int) -> Problem:
    """The same graph on nodes, with what the simulator derives from its links."""
    one, machine = graph_of(operators, 1), cluster(devices)
    seconds = np.repeat(one.compute_s, devices, axis=1)
    profile = Profile(machine.device_names, seconds, np.zeros_like(seconds), machine.links)
    problem = Problem(
        one.graph, machine, profile, num_microbatches=64, max_in_flight=16, max_phases=64
    )
    assert problem.num_channels >= 1
    return problem


# --- the runs ------------------------------------------------------------------------------------


def rows(build: Any, calls: Mapping[str, Call | None], options: Options) -> Iterator[Row]:
    """Every call on every problem, small problems first; None stands for building the problem."""
    limits = options.seconds, options.limit, int(options.memory * GIB)
    before: list[Row] = []
    for operators, devices in product(sorted(options.operators), sorted(options.devices)):
        build.cache_clear()
        size = -(-operators // WIDTH) * WIDTH, devices
        for subject, call in calls.items():
            make = partial(_row, subject, size, limits, build, call, before)
            row = options.finished.row(Row, [subject, *size, *limits], make, subject)
            say(f"{size[0]} x {devices} {subject}: {cell(row)} {row.note[:100]}")
            before.append(row)
            yield row


def _row(
    subject: str,
    size: tuple[int, int],
    limits: tuple[float, float, int],
    build: Any,
    call: Call | None,
    before: Sequence[Row],
) -> Row:
    smaller = stopped(before, (subject, BUILD), *size)
    if smaller is not None:
        note = f"{smaller.status} with {smaller.operators} operators and {smaller.devices} devices"
        done = Run("not tried", {}, 0.0, note=note)
    elif call is None:
        done = limited(lambda: build(*size) and {}, *limits[1:])
    else:
        problem = build(*size)  # here, so that the process begins with it
        done = limited(lambda: _answer(call(problem)), *limits[1:])
    answer = {"value_s": None, "replicated_s": None, "note": done.note[:300]} | (done.value or {})
    figures = {"status": done.status, "seconds": done.seconds, "grown_bytes": done.grown_bytes}
    return Row(subject, *size, *limits, **figures, **answer)


def _answer(solution: Any) -> dict[str, Any]:
    """What comes back from the process of a planner: no placement."""
    if not hasattr(solution, "stats"):
        return {}
    stats = solution.stats
    return {
        "value_s": finite(solution.value_s),
        "replicated_s": stats.get("replicated_period_s"),
        "note": str(stats.get("message") or stats.get("infeasible") or "")[:300],
    }


def stopped(
    before: Sequence[Row], subjects: Sequence[str], operators: int, devices: int
) -> Row | None:
    """The row of one of the subjects that a limit stopped on something smaller."""
    for row in before:
        smaller = row.operators <= operators and row.devices <= devices
        if row.subject in subjects and row.status in STOPPED and smaller:
            return row
    return None


def more_operators(options: Options) -> Iterator[Row]:
    for name in options.planners:
        planners.find(name)
    names = options.planners or [n for n in planners.names() if n not in NEEDS_A_FILE]
    warm(names, ["period"])
    calls = {name: budgeted(name, options.seconds) for name in names}
    return rows(joined, calls, options)


def more_devices(options: Options) -> Iterator[Row]:
    warm(PLANNERS, ["period"])
    _policy(in_nodes(2 * WIDTH, 2))  # imports: forked processes inherit them
    calls: dict[str, Call | None] = {BUILD: None, SIMULATE: lambda p: score(p, split(p))}
    calls |= {name: budgeted(name, options.seconds) for name in PLANNERS}
    return rows(in_nodes, calls | {POLICY: _policy}, options)


def split(problem: Problem) -> np.ndarray[Any, Any]:
    return (np.arange(problem.num_ops) * problem.num_devices // problem.num_ops).astype(np.int32)


def _policy(problem: Problem) -> Any:
    import torch

    from agents.encoder import NetworkConfig
    from agents.trained import TrainedPolicy, make_net

    torch.set_num_threads(1)  # a forked process has no other threads
    return TrainedPolicy(make_net(NetworkConfig(), "one_shot")).place(problem)


# --- the pages -----------------------------------------------------------------------------------


def cell(row: Row) -> str:
    """Seconds and MiB of a run, or how it ended."""
    if row.status != "ok":
        return row.status
    size = number(row.grown_bytes, 0, 2**-20, " MiB")
    return f"{number(row.seconds, 2)} s, {size}" + (" *" if row.note else "")


def matrix(rows: Rows, options: Options) -> dict[str, str]:
    """Planners by size, and what they said."""
    sizes = dict.fromkeys((r.operators, r.devices) for r in rows)
    by = {(r.subject, r.operators, r.devices): r for r in rows}
    columns = (
        Column(f"{n:,} x {d}", lambda name, n=n, d=d: cell(by[name, n, d])) for n, d in sizes
    )
    sizes_of: dict[str, list[str]] = {}
    for row in rows:
        if row.note and row.status not in ("not tried", "out of time"):
            text = f"`{row.subject}`, {row.status}: " + re.sub(r"\d[\d.e+]*", "N", row.note)[:300]
            sizes_of.setdefault(text, []).append(f"{row.operators:,} x {row.devices}")
    notes = "".join(f"- {text} ({', '.join(where)})\n" for text, where in sizes_of.items())
    return {
        "table": table(sorted({r.subject for r in rows}), Column("planner", str), *columns),
        "said": f"## What they said\n\n{notes}\n" if notes else "",
    }


def by_devices(rows: Rows, options: Options) -> dict[str, str]:
    """A table per number of operators, and the periods."""
    devices = sorted({r.devices for r in rows})
    by = {(r.subject, r.operators, r.devices): r for r in rows}
    tables = []
    for operators, some in groups(rows, "operators").items():
        columns = (
            Column(f"{d:,} devices", lambda n, o=operators, d=d: cell(by[n, o, d]).rstrip(" *"))
            for d in devices
        )
        names = dict.fromkeys(r.subject for r in some)
        tables.append(table(names, Column(f"{operators:,} operators", str), *columns))

    def period_s(row: Row) -> float | None:
        return row.value_s if row.replicated_s is None else row.replicated_s

    periods = table(
        [r for r in rows if period_s(r) is not None],
        Column("planner", "subject"),
        Column("operators", lambda r: f"{r.operators:,}"),
        Column("devices", lambda r: f"{r.devices:,}"),
        Column("period", period_s, 3, 1e3),
    )
    return {"table": "\n".join(tables), "periods": periods}


def plot_panels(
    rows: Rows,
    path: Path,
    line: str,
    x: str,
    measures: Mapping[str, Callable[[Any], float]],
    columns: int,
    base: int = 10,
) -> Path:
    """PNG: each measure over ``x``, a panel per subject, a colour per ``line``; all logarithmic.

    A cross: ended by a limit. ``line`` and ``x`` are fields of the rows. Each measure has so many
    ``columns`` of panels.

    Raises:
        PlotError: matplotlib is not installed.
        FileError: the file cannot be written.
    """
    colours = dict(zip(sorted({getattr(r, line) for r in rows}), gantt.COLOURS, strict=False))
    subjects = groups(rows, "subject")
    lines = -(-len(subjects) // columns)
    size = (1.8 * columns * len(measures), 0.8 + 1.3 * lines)
    figure = gantt.figure_class()(figsize=size, dpi=130, layout="constrained")
    parts = figure.subfigures(1, len(measures), squeeze=False)[0]
    for part, (what, measure) in zip(parts, measures.items(), strict=True):
        part.supxlabel(x, fontsize=9, color=gantt.INK)
        part.supylabel(what, fontsize=9, color=gantt.INK)
        axes = part.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
        for axis in axes[len(subjects) :]:
            axis.remove()
        for axis, (subject, mine) in zip(axes, subjects.items(), strict=False):
            for which, here in groups(mine, line).items():
                style = {"color": colours[which], "ms": 4, "lw": 1.3}
                for states, mark in ((("ok",), "o-"), (STOPPED, "x")):
                    some = [r for r in here if r.status in states]
                    points = [getattr(r, x) for r in some], [measure(r) for r in some]
                    axis.plot(*points, mark, **style, label=f"{which:,} {line}")
            axis.set_xscale("log", base=base)
            axis.set_yscale("log")
            axis.minorticks_off()
            gantt.plain_axis(axis)
            axis.grid(axis="y", color=gantt.FAINT, alpha=0.25, lw=0.6)
            axis.tick_params(axis="both", colors=gantt.FAINT, labelsize=7)
            axis.set_title(subject, loc="left", fontsize=8, color=gantt.INK)
    marks = [axes[0].plot([], [], "o-", color=c, ms=4, lw=1.3)[0] for c in colours.values()]
    names = [f"{which:,} {line}" for which in colours]
    how = {"loc": "outside upper center", "ncols": len(names), "frameon": False, "fontsize": 9}
    figure.legend(marks, names, **how)
    return gantt.save_figure(figure, path)


SECONDS: dict[str, Callable[[Row], float]] = {  # a logarithmic axis begins above 0
    "seconds": lambda row: max(1e-3, row.seconds or 0.0)
}
MIB: dict[str, Callable[[Row], float]] = {
    "MiB above the problem": lambda row: (
        np.nan if row.grown_bytes is None else max(1.0, row.grown_bytes / 2**20)
    )
}


def plot_operators(rows: Rows, path: Path, options: Options) -> Path:
    rows = sorted(rows, key=lambda r: r.subject)
    return plot_panels(rows, path, "devices", "operators", SECONDS | MIB, 4)


SIZES: dict[str, Any] = {
    "operators": (1_000, 10_000, 100_000),
    "devices": (2, 8, 64),
    "seconds": Option(10.0, "budget of those that take one"),
    "limit": Option(60.0, "seconds of a run, at most"),
    "memory": Option(8.0, "GiB of address space of a run"),
}
STUDIES = (
    Study(
        name="scale",
        word="operators",
        rows=more_operators,
        row=Row,
        parts=matrix,
        plot=plot_operators,
        options={"planners": Option((), "default: all", word=True, metavar="PLANNER"), **SIZES},
        facts=lambda o: {"budget_s": o.seconds, "limit_s": o.limit, "address_space_GiB": o.memory},
    ),
    Study(
        name="scale_out",
        module="experiments.scale",
        word="devices",
        rows=more_devices,
        row=Row,
        parts=by_devices,
        plot=lambda rows, path, _: plot_panels(rows, path, "operators", "devices", SECONDS, 3, 2),
        options=SIZES
        | {"devices": (8, 64, 512, 4096), "seconds": replace(SIZES["seconds"], default=5.0)}
        | {"memory": replace(SIZES["memory"], default=16.0)},
        facts=lambda o: {"limit_s": o.limit, "address_space_GiB": o.memory},
    ),
)

if __name__ == "__main__":
    raise SystemExit(run(STUDIES))
