"""From 8 to 4,096 devices: seconds and memory of problem, simulator, planners and policy.

    python -m experiments.scale_out [--devices 8 64 512 4096] [--operators 1000 10000 100000]

Nodes of eight equal devices; links within a node are fast, those between nodes slow, and all that
leaves a node shares its interface (a channel). Graphs are layers of 50 operators with random
edges. Every run has a process of its own, one core, a limit of time and one of address space; what
was stopped by a limit is not tried on anything larger. Continues where it stopped. Writes
``experiments/results/scale_out.csv``, ``.md`` and ``.png``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import _study
from experiments._study import GIB, Run, Store, limited, number, say
from experiments.scale import DENSITY, STOPPED, WIDTH
from placement.cluster import Cluster, Device, Link
from placement.files import write_atomic
from placement.problem import Problem
from placement.profile import Profile
from placement.report import gantt
from placement.simulator import score
from placement.workloads.synthetic import Family, layered

PER_NODE = 8
WITHIN = (2e-6, 100e9)  # latency and bytes/s of a link within a node
BETWEEN = (10e-6, 12.5e9)  # and between nodes: an interface of 100 Gbit/s
BUILD, SIMULATE, POLICY = "build the problem", "simulate", "policy (one shot)"
PLANNERS = ("pipedream", "contiguous_dp", "balanced_split", "replicated", "heft", "macro_search")


@dataclass(frozen=True)
class Row:
    """One run; ``value_s`` is the period, ``replicated_s`` the one with replicas."""

    subject: str
    operators: int
    devices: int
    limit_s: float
    memory_bytes: int
    status: str
    seconds: float | None
    grown_bytes: int | None
    value_s: float | None
    replicated_s: float | None
    note: str


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


def build(operators: int, num_devices: int) -> Problem:
    """The problem, with what the simulator derives from its links."""
    depth = max(2, operators // WIDTH)
    one = Family(layered(depth, WIDTH, DENSITY), num_devices=1)(0)
    whole = cluster(num_devices)
    seconds = np.repeat(one.compute_s, num_devices, axis=1)
    profile = Profile(whole.device_names, seconds, np.zeros_like(seconds), whole.links)
    made = Problem(one.graph, whole, profile, num_microbatches=64, max_in_flight=16)
    assert made.num_channels >= 1
    return made


def split(problem: Problem) -> np.ndarray[Any, Any]:
    """Equal pieces, one per device."""
    return (np.arange(problem.num_ops) * problem.num_devices // problem.num_ops).astype(np.int32)


def _policy(problem: Problem) -> Any:
    import torch

    from agents.encoder import NetworkConfig
    from agents.trained import TrainedPolicy, make_net

    torch.set_num_threads(1)  # a forked process has no other threads
    return TrainedPolicy(make_net(NetworkConfig(), "one_shot")).place(problem)


def subjects(seconds: float) -> dict[str, Callable[[Problem], Any]]:
    """What is run on a problem that is there."""
    found: dict[str, Callable[[Problem], Any]] = {SIMULATE: lambda p: score(p, split(p))}
    for name in PLANNERS:
        found[name] = _study.budgeted(name, seconds)
    return found | {POLICY: _policy}


def study(options: argparse.Namespace, store: Store[Row]) -> list[Row]:
    """All rows, small problems first."""
    memory = int(options.memory * GIB)
    _study.warm(PLANNERS, ["period"])
    _policy(build(2 * WIDTH, 2))  # imports: forked processes inherit them
    rows: list[Row] = []

    def stopped(subject: str, operators: int, devices: int) -> Row | None:
        return next(
            (
                r
                for r in rows
                if r.subject in (subject, BUILD)
                and r.status in (*STOPPED, "not tried")
                and r.operators <= operators
                and r.devices <= devices
            ),
            None,
        )

    def row(subject: str, operators: int, devices: int, call: Callable[[], Any]) -> Row:
        key = {"subject": subject, "operators": operators, "devices": devices}
        known = store.find(**key, limit_s=options.limit, memory_bytes=memory)
        if known is None:
            before = stopped(subject, operators, devices)
            if before is not None:
                note = f"{before.subject}: {before.operators} x {before.devices} {before.status}"
                known = Row(**key, **_ended(options, memory, Run("not tried", None, 0.0), note))
            else:
                known = Row(**key, **_ended(options, memory, limited(call, options.limit, memory)))
            store.add(known)
            say(f"{operators} x {devices} {subject}: {_cell(known)} {known.note[:80]}")
        rows.append(known)
        return known

    for devices in sorted(options.devices):
        for operators in sorted(options.operators):
            first = row(BUILD, operators, devices, lambda o=operators, d=devices: _size(o, d))
            made: list[Problem] = []
            for name, call in subjects(options.seconds).items():
                if first.status == "ok" and not made:
                    key = {"subject": name, "operators": operators, "devices": devices}
                    if store.find(**key, limit_s=options.limit, memory_bytes=memory) is None:
                        made.append(build(operators, devices))
                row(name, operators, devices, lambda c=call, m=made: _answer(c, m))
    return rows


def _size(operators: int, devices: int) -> None:
    build(operators, devices)


def _answer(call: Callable[[Problem], Any], made: Sequence[Problem]) -> Any:
    found = call(made[0])
    return found if not hasattr(found, "stats") else replace(found, placement=np.zeros(0, np.int32))


def _ended(
    options: argparse.Namespace, memory: int, run: Run, note: str | None = None
) -> dict[str, Any]:
    stats = getattr(run.value, "stats", {})
    value = getattr(run.value, "value_s", None)
    return {
        "limit_s": options.limit,
        "memory_bytes": memory,
        "status": run.status,
        "seconds": run.seconds,
        "grown_bytes": run.grown_bytes,
        "value_s": value if value is not None and np.isfinite(value) else None,
        "replicated_s": stats.get("replicated_period_s"),
        "note": (run.note if note is None else note)[:300],
    }


def _cell(row: Row) -> str:
    if row.status != "ok":
        return row.status
    return f"{number(row.seconds, 2)} s, {number(row.grown_bytes, 0, 2**-20, ' MiB')}"


def report(rows: Sequence[Row]) -> str:
    """A table per number of operators, and the periods."""
    text = ""
    devices = sorted({r.devices for r in rows})
    names = list(dict.fromkeys(r.subject for r in rows))
    by = {(r.subject, r.operators, r.devices): r for r in rows}
    for operators in sorted({r.operators for r in rows}):
        head = [f"{operators:,} operators", *(f"{d:,} devices" for d in devices)]
        cells = [[n, *(_cell(by[n, operators, d]) for d in devices)] for n in names]
        text += _study.to_table(head, cells) + "\n"
    text += (
        "Predicted periods, in milliseconds, by the simulator; that of `replicated` is of its "
        "replicas and by its own formula (no queues, no filling of the pipeline).\n\n"
    )
    cells = []
    for (name, operators, count), r in by.items():
        value = r.replicated_s if r.replicated_s is not None else r.value_s
        if value is not None:
            cells.append([name, f"{operators:,}", f"{count:,}", number(value, 3, 1e3)])
    return text + _study.to_table(["planner", "operators", "devices", "period"], cells)


def plot(rows: Sequence[Row], path: Path) -> Path:
    """PNG: seconds over devices, a column per number of operators; a cross: ended by a limit."""
    sizes = sorted({r.operators for r in rows})
    names = list(dict.fromkeys(r.subject for r in rows))
    figure = gantt.figure_class()(figsize=(3 + 3.4 * len(sizes), 4.2), dpi=120)
    axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    for axis, operators in zip(axes, sizes, strict=True):
        for k, name in enumerate(names):
            mine = [r for r in rows if (r.subject, r.operators) == (name, operators)]
            colour = gantt.COLOURS[k % len(gantt.COLOURS)]
            ended = [r for r in mine if r.status in STOPPED]
            fine = [r for r in mine if r.status == "ok"]
            x, y = [r.devices for r in fine], [max(1e-3, r.seconds or 0.0) for r in fine]
            line = ("-", "--")[k // len(gantt.COLOURS) % 2]
            axis.plot(x, y, "o", ls=line, color=colour, ms=4, lw=1.2, label=name)
            axis.plot([r.devices for r in ended], [r.seconds for r in ended], "x", color=colour)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{operators:,} operators", loc="left", fontsize=10, color=gantt.INK)
        axis.set_xlabel("devices", fontsize=9, color=gantt.INK)
        gantt.plain_axis(axis)
        axis.tick_params(axis="y", colors=gantt.FAINT, labelsize=9)
    axes[0].set_ylabel("seconds", fontsize=9, color=gantt.INK)
    lines, labels = axes[0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0, 1 - 1.9 / figure.get_figwidth(), 1))
    figure.legend(lines, labels, loc="center right", frameon=False, fontsize=8)
    return gantt.save_figure(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _study.common_options(parser, "scale_out")
    parser.add_argument("--operators", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--seconds", type=float, default=5.0, help="budget of those that take one")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a run, at most")
    parser.add_argument("--memory", type=float, default=16.0, help="GiB of address space of a run")
    options = parser.parse_args(argv)

    def work() -> None:
        warnings.simplefilter("ignore", RuntimeWarning)
        rows = study(options, Store(options.work / "scale_out.jsonl", Row, options.fresh))
        table = report(rows)
        facts = _study.provenance(limit_s=options.limit, address_space_GiB=options.memory)
        write_atomic(options.out / "scale_out.csv", _study.to_csv(rows))
        plot(rows, options.out / "scale_out.png")
        write_atomic(
            options.out / "scale_out.md",
            f"""# From 8 to 4,096 devices

`{_study.command_line("experiments.scale_out", argv)}`

Nodes of {PER_NODE} equal devices, {WITHIN[1] / 1e9:g} GB/s within a node, {BETWEEN[1] / 1e9:g} GB/s
between nodes through one interface per node. Seconds, and the most memory that the process held
above what it held when it began. "Out of time": ended after {options.limit:g} s. "Out of memory",
"killed": the limit of {options.memory:g} GiB of address space. "Not tried": it, or building the
problem, was stopped by a limit on something smaller. The policy has untrained weights.

{table}
![Seconds over devices](scale_out.png)

{facts}""",
        )
        print(table)
        say(f"written to {options.out}: scale_out.csv, scale_out.md, scale_out.png")

    return _study.launch(work)


if __name__ == "__main__":
    sys.exit(main())
