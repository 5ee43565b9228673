"""A profile as people and machines read it."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from placement import cli

if TYPE_CHECKING:
    from placement.cluster import Cluster
    from placement.graph import OpGraph
    from placement.profile import Profile


def show(graph: OpGraph, cluster: Cluster, profile: Profile, *, as_json: bool) -> None:
    """The most expensive operators, and where devices of unlike kind differ most."""
    if as_json:
        cli.print_json(summary(graph, cluster, profile))
        return
    unlike, expensive, differ, ratio = _noteworthy(cluster, profile)
    # One device of each kind first: more columns than fit into a line would say nothing.
    count = cluster.num_devices
    shown = [*unlike, *(d for d in range(count) if d not in unlike)][: cli.LIMITS.devices]
    rows = [_cells(graph, profile, n, shown) for n in expensive]
    rows.append(["all operators", "", *map(seconds, profile.compute_s.sum(axis=0)[shown])])
    columns = ["operator", "kind", *(profile.device_names[d] for d in shown)]
    cli.print_table(f"{graph.name}: the most expensive operators", columns, rows)
    if len(shown) < count:
        print(f"{len(shown)} of {count} devices are shown; all of them: --json")
    if len(differ):
        cli.print_table(
            "where devices of unlike kind differ most",
            [*columns, f"{profile.device_names[unlike[0]]} / fastest"],
            [[*_cells(graph, profile, n, shown), f"{ratio[n]:.2g}"] for n in differ],
        )


def summary(graph: OpGraph, cluster: Cluster, profile: Profile) -> dict[str, object]:
    """What machines read; the keys are a contract."""
    _, expensive, differ, _ = _noteworthy(cluster, profile)
    total_s = map(number, profile.compute_s.sum(axis=0).tolist())
    return {
        "workload": graph.name,
        "num_ops": graph.num_ops,
        "graph_fingerprint": graph.fingerprint,
        "devices": list(profile.device_names),
        "total_s": dict(zip(profile.device_names, total_s, strict=True)),
        "most_expensive": [_row(graph, profile, n) for n in expensive],
        "most_different": [_row(graph, profile, n) for n in differ],
        "provenance": profile.provenance,
    }


def number(x: float) -> float | None:
    """For machines, whose JSON has no infinity: None, as where an operator cannot run."""
    return x if isfinite(x) else None


def seconds(x: float) -> str:
    """For people."""
    return cli.seconds(x) if isfinite(x) else "-"


def _noteworthy(
    cluster: Cluster, profile: Profile
) -> tuple[list[int], list[int], list[int], list[float]]:
    """A device of each kind; the most expensive operators; where kinds differ, and ``[N]`` how."""
    import numpy as np

    most, kinds = cli.LIMITS.operators, [d.kind for d in cluster.devices]
    unlike = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    expensive = np.argsort(-profile.compute_s.min(axis=1), kind="stable")[:most]
    ratio = profile.compute_s[:, unlike[0]] / profile.compute_s[:, unlike].min(axis=1)
    gain = profile.compute_s[:, unlike].max(axis=1) - profile.compute_s[:, unlike].min(axis=1)
    differ = np.argsort(-gain, kind="stable")[: most if len(unlike) > 1 else 0]
    return unlike, expensive.tolist(), differ.tolist(), ratio.tolist()


def _row(graph: OpGraph, profile: Profile, n: int) -> dict[str, object]:
    times = map(number, profile.compute_s[n].tolist())
    return {
        "operator": graph.op_name[n],
        "kind": graph.op_kind[n],
        "module": graph.op_module[n],
        "compute_s": dict(zip(profile.device_names, times, strict=True)),
    }


def _cells(graph: OpGraph, profile: Profile, n: int, devices: list[int]) -> list[str]:
    times = map(seconds, profile.compute_s[n, devices])
    return [graph.op_name[n], graph.op_kind[n].removesuffix(".default"), *times]
