"""``placement profile --distributed``: links between processes, and what their hosts measure."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from placement import cli

if TYPE_CHECKING:
    from placement.cluster import Cluster
    from placement.costs.links import Measured

CLUSTER = "cluster.yaml"  # unless --cluster-out says otherwise


def run(args: argparse.Namespace) -> int:
    """As a rank of ``torchrun``; or start ``args.distributed`` such processes here."""
    args.cluster_out = _cluster_out(args)
    cli.check_outputs(args.cluster_out)
    if "RANK" in os.environ:
        return _rank(args)
    if args.distributed < 2:
        raise cli.UsageError(
            f"--distributed {args.distributed or ''}: say how many processes to start here, 2 or "
            "more, or start all of them with torchrun (see --help)"
        )
    verb = ["profile", *([args.workload] if args.workload else []), "--distributed"]
    names = ("mode", "optimizer", "cluster", "out", "repeats", "cluster_out")
    return spawn(args.distributed, words_of(args, verb, names))


def _cluster_out(args: argparse.Namespace) -> str:
    """Where the cluster goes; no file of the user's is replaced that was not named for it.

    Raises:
        UsageError: it would be.
    """
    out: str = args.cluster_out or CLUSTER
    if args.cluster_out is None and os.path.exists(out):
        raise cli.UsageError(f"{out} is there already: name what to write, --cluster-out FILE")
    if args.cluster is not None and os.path.realpath(args.cluster) == os.path.realpath(out):
        raise cli.UsageError(f"--cluster-out {out}: --cluster reads it; name another file")
    return out


def words_of(args: argparse.Namespace, verb: Sequence[str], names: Sequence[str]) -> list[str]:
    """What each rank is to do, as it would be typed: ``verb``, and the options of these names."""
    words = list(verb)
    for name in (*names, "json", "debug"):
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and value is not False:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            words += [option] if value is True else [option, shown]
    return words


def spawn(num_ranks: int, words: Sequence[str], defaults: Mapping[str, str] | None = None) -> int:
    """Run ``placement WORDS`` in so many processes that know each other; the first bad exit code.

    ``defaults`` are for environment variables that are not set.

    Rank 0 speaks for all. When one ends badly the others are ended, and its last words are shown.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    shared["PYTHONPATH"] = os.pathsep.join(sys.path)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as silent:
        try:
            for rank in range(num_ranks):
                env = {
                    **(defaults or {}),
                    **os.environ,
                    **shared,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                }
                command = [sys.executable, "-m", "placement", *words]
                streams: dict[str, Any] = {"stdout": silent, "stderr": silent}
                if rank == 0:
                    streams = {"stdout": out, "stderr": None}
                processes.append(
                    subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, **streams)
                )
            while None in (codes := [p.poll() for p in processes]) and not any(codes):
                time.sleep(0.02)
            with suppress(subprocess.TimeoutExpired):  # rank 0 may be about to say the same
                processes[0].wait(5.0)
            codes[0] = processes[0].poll()
        finally:
            for process in processes:
                process.kill()
                process.wait()
        bad = [(rank, code) for rank, code in enumerate(codes) if code]
        if bad and bad[0][0]:
            silent.seek(0)
            print(silent.read().decode(errors="replace")[-2000:], end="", file=sys.stderr)
        out.seek(0)
        print(out.read().decode(errors="replace"), end="")
    if bad and bad[0][1] < 0:
        raise cli.UsageError(f"rank {bad[0][0]} was ended by signal {-bad[0][1]}")
    return bad[0][1] if bad else cli.OK


def _rank(args: argparse.Namespace) -> int:
    import torch.distributed as dist

    from placement.costs import links

    links.join()
    try:
        return _measure(args, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _measure(args: argparse.Namespace, rank: int, size: int) -> int:
    from placement.cluster import Cluster
    from placement.costs import links
    from placement.executor.distributed import direct

    first = rank == 0
    with cli.progress(quiet=not first) as report:
        hosts = links.hosts_of_ranks()
        devices, ranks = _devices(args, hosts, rank)
        how = direct(Cluster("ranks", tuple(devices)))
        measured = links.measure_ranks(hosts, repeats=args.repeats, progress=report, direct=how)
        cluster = links.joined(devices, ranks, measured, "ranks")
        if first:
            cluster.to_yaml(args.cluster_out)
        profile = graph = None
        if args.workload:
            of_devices = [hosts[r] for r in ranks]
            graph = cli.capture_workload(args.workload, report, cli.mode_of(args), args.optimizer)
            profile = _profile(args, graph, cluster, of_devices, hosts, rank, report)
    if not first:
        return cli.OK
    if graph is not None and profile is not None:
        from placement.costs.measure import cached_path

        path = args.out or cached_path(graph, cluster)
        profile.save(path)
        cli.say(f"profile saved to {path}")
    placed = zip(cluster.devices, ranks, strict=True)
    infinite = {"bandwidth_bytes_per_s": None}
    answer: dict[str, Any] = {
        "hosts": list(measured.hosts),
        "devices": [{"name": d.name, "rank": r} for d, r in placed],
        "links": [
            asdict(x) | ({} if isfinite(x.bandwidth_bytes_per_s) else infinite)
            for x in cluster.links
        ],
        "slowdown": dict(measured.slowdown),
        "cluster": args.cluster_out,
    }
    if graph is not None and profile is not None:
        from placement.cli.profiled import summary

        answer["profile"] = summary(graph, cluster, profile)
    if args.json:
        cli.print_json(answer)
    else:
        _show(measured)
    named, out = args.workload or "MODEL", shlex.quote(args.cluster_out)
    cli.say(
        f"cluster written to {args.cluster_out}; next: placement plan {named} --cluster {out} "
        "--planner best_of"
    )
    return cli.OK


def _devices(
    args: argparse.Namespace, hosts: Sequence[str], rank: int
) -> tuple[list[Any], tuple[int, ...]]:
    """The devices of all ranks, and the rank of each."""
    import torch.distributed as dist

    from placement.cluster import Cluster
    from placement.costs import links
    from placement.executor.distributed import ranks_of

    if args.cluster is not None:
        cluster = Cluster.from_yaml(args.cluster)
        return list(cluster.devices), ranks_of(cluster, len(hosts))
    on_host = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    mine = links.devices_here(on_host.index(rank), len(on_host))
    if len(set(hosts)) > 1:
        mine = replace(mine, name=f"{hosts[rank]}/{mine.name}")
    every: list[Any] = [None] * len(hosts)
    dist.all_gather_object(every, mine)
    return every, tuple(range(len(hosts)))


def _profile(
    args: argparse.Namespace,
    graph: Any,
    cluster: Cluster,
    device_hosts: Sequence[str],
    hosts: Sequence[str],
    rank: int,
    report: cli.Progress,
) -> Any:
    """The graph on all devices: the first rank of each host measures those of its host."""
    from datetime import timedelta

    import torch.distributed as dist

    from placement.cluster import Cluster
    from placement.costs.links import merged
    from placement.costs.measure import measure

    patient: Any = dist.new_group(timeout=timedelta(hours=1))  # for the slowest host to measure
    mine = None
    if hosts.index(hosts[rank]) == rank:
        pairs = zip(cluster.devices, device_hosts, strict=True)
        here = tuple(d for d, host in pairs if host == hosts[rank])
        mine = measure(graph, Cluster("here", here), repeats=args.repeats, progress=report)
    every: list[Any] = [None] * len(hosts)
    dist.all_gather_object(every, mine, group=patient)
    return merged([p for p in every if p is not None], cluster)


def _show(measured: Measured) -> None:
    rows = []
    for (a, b), link in measured.links.items():
        latency, send = map(cli.seconds, (link.latency_s, link.send_s))
        rate = f"{link.bandwidth_bytes_per_s / 1e6:,.0f}"
        rows.append([f"{a} > {b}", latency, rate, send, link.channel or "its own"])
    cli.print_table(
        f"links between {len(measured.hosts)} processes on "
        + cli.count(len(set(measured.hosts)), "host"),
        ["ranks", "latency", "MB/s", "busy per tensor", "channel"],
        rows,
    )
    for what, factor in measured.slowdown.items():
        print(f"two messages at the same time, {what}: {factor:.2f} times as long as one")
