"""From 8 to 4,096 devices: seconds and memory of problem, simulator, planners and policy.

    python -m experiments.scale_out [--devices 8 64 512 4096] [--operators 1000 10000 100000]

Nodes of eight equal devices; links within a node are fast, those between nodes slow, and all that
leaves a node shares its interface (a channel). Graphs are layers of 50 operators with random
edges. Every run has a process of its own, one core, a limit of time and one of address space; what
was stopped by a limit is not tried on anything larger. Continues where it stopped. Writes
``experiments/results/scale_out.csv``, ``.md`` and ``.png``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs import GIB, Run, budgeted, limited, warm
from experiments.scale import DENSITY, LIMITS, WIDTH, cell, plot_panels, seconds_of, stopped
from experiments.study import Option, Options, Rows, Study, run, say
from experiments.tables import Column, groups, table
from placement.cluster import Cluster, Device, Link
from placement.problem import Problem
from placement.profile import Profile
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


@cache
def build(operators: int, num_devices: int) -> Problem:
    """The problem, with what the simulator derives from its links."""
    depth = max(2, operators // WIDTH)
    one = Family(layered(depth, WIDTH, DENSITY), num_devices=1)(0)
    machine = cluster(num_devices)
    seconds = np.repeat(one.compute_s, num_devices, axis=1)
    profile = Profile(machine.device_names, seconds, np.zeros_like(seconds), machine.links)
    problem = Problem(one.graph, machine, profile, num_microbatches=64, max_in_flight=16)
    problem = replace(problem, max_phases=64)  # for replicas
    assert problem.num_channels >= 1
    return problem


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
    calls: dict[str, Callable[[Problem], Any]] = {SIMULATE: lambda p: score(p, split(p))}
    for name in PLANNERS:
        calls[name] = budgeted(name, seconds)
    return calls | {POLICY: _policy}


def rows(options: Options) -> Iterator[Row]:
    """All rows, small problems first."""
    warm(PLANNERS, ["period"])
    _policy(build(2 * WIDTH, 2))  # imports: forked processes inherit them
    before: list[Row] = []
    limits = options.limit, int(options.memory * GIB)

    def row(subject: str, size: tuple[int, int], call: Callable[[], Any]) -> Row:
        what = [subject, *size, *limits, options.seconds]
        make = partial(_row, subject, size, limits, call, before)
        row = options.finished.row(Row, what, make, subject)
        say(f"{size[0]} x {size[1]} {subject}: {cell(row)} {row.note[:80]}")
        before.append(row)
        return row

    for devices in sorted(options.devices):
        for operators in sorted(options.operators):
            size = operators, devices
            build.cache_clear()
            yield row(BUILD, size, lambda size=size: build(*size) and None)
            for name, call in subjects(options.seconds).items():
                yield row(name, size, lambda c=call, size=size: _answer(c, build(*size)))


def _answer(call: Callable[[Problem], Any], problem: Problem) -> Any:
    answer = call(problem)
    if hasattr(answer, "stats"):  # only these come back from the process
        return replace(answer, placement=np.zeros(0, np.int32))
    return answer


def _row(
    subject: str,
    size: tuple[int, int],
    limits: tuple[float, int],
    call: Callable[[], Any],
    before: Sequence[Row],
) -> Row:
    """One run, if nothing smaller was stopped by a limit."""
    smaller = stopped(before, (subject, BUILD), *size, "subject")
    if smaller is not None:
        note = f"{smaller.subject}: {smaller.operators} x {smaller.devices} {smaller.status}"
        done = Run("not tried", None, 0.0, note=note)
    else:
        if subject != BUILD:
            build(*size)  # here, so that the process begins with it
        done = limited(call, *limits)
    value = getattr(done.value, "value_s", None)
    return Row(
        subject,
        *size,
        *limits,
        status=done.status,
        seconds=done.seconds,
        grown_bytes=done.grown_bytes,
        value_s=value if value is not None and np.isfinite(value) else None,
        replicated_s=getattr(done.value, "stats", {}).get("replicated_period_s"),
        note=done.note[:300],
    )


def parts(rows: Rows, options: Options) -> dict[str, str]:
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


def plot(rows: Rows, path: Path, options: Options) -> Path:
    """Seconds over devices."""
    return plot_panels(rows, path, "subject", "operators", "devices", {"seconds": seconds_of}, 2)


STUDY = Study(
    name="scale_out",
    rows=rows,
    row=Row,
    parts=parts,
    plot=plot,
    options={
        "operators": (1_000, 10_000, 100_000),
        "devices": (8, 64, 512, 4096),
        "seconds": Option(5.0, "budget of those that take one"),
        **LIMITS,
        "memory": replace(LIMITS["memory"], default=16.0),
    },
    facts=lambda o: {"limit_s": o.limit, "address_space_GiB": o.memory},
)
main = partial(run, (STUDY,))

if __name__ == "__main__":
    sys.exit(main())
