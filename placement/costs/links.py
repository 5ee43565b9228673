"""Measure the links between processes: latency and bandwidth of every pair of ranks.

``measure_ranks`` is called by every process of a group (``torchrun``, gloo). A message travels to
the other rank and a byte comes back, so that no clocks need to agree; half of what a byte takes
there and back is taken off. Ranks on different hosts share the interface of their host: whether
they really do is measured too, with two messages at the same time, and is a ``channel``.

A rank computes on the cores that also send and receive. So the processor time of a message, on both
ends, is measured and counted as the sender's (``Link.send_s`` and ``send_s_per_byte``): where
messages go both ways, as between operators placed without regard to links, that is what each rank
loses.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from placement.cluster import Cluster, ClusterError, Device, Link
from placement.costs.transfers import fit_link
from placement.executor.awake import let_senders_finish
from placement.executor.distributed_world import Direct, move
from placement.profile import Profile
from placement.tools.progress import Progress

Floats = NDArray[np.float64]
Pair = tuple[int, int]  # sending rank, receiving rank

SIZES = (2**12, 2**16, 2**20, 2**23)  # bytes
_ROUND = (1, 1, 1, 1, *SIZES[:2], *SIZES[:2], *SIZES)  # sizes of a round; a byte comes back
HANDED = ((2**8, 200), (2**18, 40))  # bytes and number of tensors: their processor time


class LinkError(ValueError):
    """The ranks cannot be measured as asked; the message says what to type."""


@dataclass(frozen=True)
class Measured:
    """What the ranks found, the same on every rank.

    Attributes:
        hosts: ``[R]`` name of each rank's host; ranks of one host share its interface.
        links: of every ordered pair of ranks: latency, bandwidth, processor time and channel.
        slowdown: of two messages at the same time, over alone, by what was tried.
    """

    hosts: tuple[str, ...]
    links: Mapping[Pair, Link]
    slowdown: Mapping[str, float]


def join(timeout_s: float = 60.0) -> None:
    """Meet the other ranks, as ``torchrun`` has set the environment.

    Raises:
        LinkError: not started by ``torchrun``, or somebody did not come.
    """
    missing = [
        x for x in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if x not in os.environ
    ]
    if missing:
        raise LinkError(
            f"{missing[0]} is not set: say how many processes to start here (--distributed 2), or "
            "start it with torchrun --nproc-per-node 2 -m placement profile --distributed"
        )
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LinkError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not meet the others at "
            f"{where} within {timeout_s:g} s: {str(error).splitlines()[0]}"
        ) from error
    let_senders_finish()  # as a run does


def host_key() -> str:
    """Equal for processes that share their network interfaces: same kernel, same namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def host_names(keys: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """``[R]`` a name for each rank's host; hosts of the same name are numbered."""
    numbered: dict[str, str] = {}
    for key, name in zip(keys, names, strict=True):
        if key not in numbered:
            count = sum(x.partition("#")[0] == name for x in numbered.values())
            numbered[key] = f"{name}#{count + 1}" if count else name
    return tuple(numbered[key] for key in keys)


def hosts_of_ranks() -> tuple[str, ...]:
    """``[R]`` name of each rank's host; every rank must call this."""
    who: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(who, (host_key(), socket.gethostname()))
    return host_names([key for key, _ in who], [name for _, name in who])


def measure_ranks(
    hosts: Sequence[str],
    *,
    repeats: int = 5,
    progress: Progress | None = None,
    direct: Direct | None = None,
) -> Measured:
    """Links between all ranks of the process group; every rank must call it, and gets the answer.

    ``hosts`` are those ``hosts_of_ranks``; ``direct``: as a run will be given.

    Raises:
        LinkError: there is one rank only.
    """
    me, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        raise LinkError("one process has no links to others: --distributed needs 2 or more")
    say = progress or (lambda what, share: None)
    groups = {} if direct is None else direct.groups(timedelta(minutes=1))
    mine: dict[Pair, list[float]] = {}
    used: dict[tuple[int, int, int], Floats] = {}
    pairs = list(permutations(range(size), 2))
    for i, (a, b) in enumerate(pairs):
        say(f"link {a} -> {b}", i / len(pairs))
        dist.barrier()
        if me in (a, b):
            device = direct.device if direct and (a, b) in groups else torch.device("cpu")
            seconds = _ping(a, b, repeats, device, groups)
            if me == a:
                mine[a, b] = seconds
            used[a, b, me] = _hand_over(a, b, device, groups)
    used = _gathered(used)
    links = {
        (a, b): with_sending(fit((a, b), one_way(seconds)), used[a, b, a] + used[a, b, b])
        for (a, b), seconds in _gathered(mine).items()
    }
    say("shared interfaces", 1.0)
    flows = trials(hosts)
    slowdown = {what: _slowdown(together, links, me) for what, together in flows.items()}
    channels = shared_channels(hosts, slowdown)
    return Measured(
        tuple(hosts),
        {pair: replace(link, channel=channels.get(pair)) for pair, link in links.items()},
        slowdown,
    )


def one_way(seconds: Sequence[float]) -> Floats:
    """float64 ``[S]`` seconds of the messages themselves, from there-and-back seconds ``[1 + S]``.

    What comes back is a byte; the first entry is of a byte both ways. A message takes at least as
    long as the byte that answers it.
    """
    back, *there = seconds
    return np.maximum(np.asarray(there) - back / 2, np.asarray(there) / 2)


def fit(pair: Pair, seconds: Floats) -> Link:
    """The link of a pair of ranks from seconds of messages of ``SIZES``, float64 ``[S]``.

    A shaped interface lets small messages through at once, until their burst is used up; in a
    pipeline it is. Where the largest two say that it is clearly slower than all together do, they
    give the bandwidth, and the smallest the latency.
    """
    link = fit_link(f"rank:{pair[0]}", f"rank:{pair[1]}", SIZES, seconds)
    slope = float(seconds[-1] - seconds[-2]) / (SIZES[-1] - SIZES[-2])
    if slope * link.bandwidth_bytes_per_s < 1.25:
        return link
    latency_s = max(float(seconds[0]) - SIZES[0] * slope, 0.0)
    return replace(link, latency_s=latency_s, bandwidth_bytes_per_s=1.0 / slope)


def with_sending(link: Link, used_s: Floats) -> Link:
    """The link with what sending costs, from processor seconds of a tensor of each of ``HANDED``.

    Float64 ``[2]``, of both ends together.
    """
    (few, _), (many, _) = HANDED
    per_byte = max(float(used_s[1] - used_s[0]) / (many - few), 0.0)
    send_s = max(float(used_s[0]) - few * per_byte, 0.0)
    return replace(link, send_s=send_s, send_s_per_byte=per_byte)


def trials(hosts: Sequence[str]) -> dict[str, tuple[Pair, Pair]]:
    """Messages between hosts that are to be sent at the same time, by what that tells.

    ``"A:out"``: two that leave host A, over ranks as unlike as there are. ``"A <> B"``: one each
    way between two hosts.
    """
    chosen: dict[str, tuple[Pair, Pair]] = {}
    away = [(a, b) for a, b in permutations(range(len(hosts)), 2) if hosts[a] != hosts[b]]
    for host in dict.fromkeys(hosts):
        leaving = [p for p in away if hosts[p[0]] == host]
        if len(leaving) > 1:
            a, b = leaving[0]
            unlike = [(c != a) + (d != b) for c, d in leaving]
            chosen[f"{host}:out"] = (a, b), leaving[unlike.index(max(unlike))]
    for a, b in away:
        name = f"{hosts[a]} <> {hosts[b]}"
        if hosts[a] < hosts[b] and name not in chosen:
            chosen[name] = (a, b), (b, a)
    return chosen


def shared_channels(hosts: Sequence[str], slowdown: Mapping[str, float]) -> dict[Pair, str]:
    """Which channel carries the messages of each ordered pair of ranks; others have their own.

    Messages that leave a host share a channel unless two were as fast as one; both directions
    between two hosts share one if they slow each other down. A message has one channel only, so
    that a receiver's interface is shared where two hosts share a channel, and not otherwise.
    """
    shared = 1.5  # times as long beside each other: the same carries both
    name = {host: f"{host}:out" for host in dict.fromkeys(hosts)}
    for what, factor in slowdown.items():
        a, both_ways, b = what.partition(" <> ")
        if both_ways and factor >= shared:
            old, new = name[b], name[a]
            name = {host: new if used == old else used for host, used in name.items()}
    alone = {host for host in name if slowdown.get(f"{host}:out", shared) < shared}
    return {
        (a, b): name[hosts[a]]
        for a, b in permutations(range(len(hosts)), 2)
        if hosts[a] != hosts[b] and hosts[a] not in alone
    }


def devices_here(local_rank: int, local_size: int) -> Device:
    """The device of a rank where nobody describes any: its share of the cores, or its GPU.

    Raises:
        ClusterError: there are GPUs, but fewer than ranks.
    """
    if torch.cuda.is_available():
        gpus = [d for d in Cluster.detect().devices if d.kind == "cuda"]
        if local_size > len(gpus):
            raise ClusterError(
                f"{local_size} processes on a host with {len(gpus)} GPUs: each takes one; start "
                f"{len(gpus)} at most, or describe the devices of every process with --cluster FILE"
            )
        return gpus[local_rank]
    whole = Cluster.detect(max_cpu_devices=1).devices[0]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = tuple(cores[i] for i in range(len(cores)) if i * local_size // len(cores) == local_rank)
    if not mine and cores:  # more processes than cores take turns
        mine = (cores[local_rank % len(cores)],)
    return replace(
        whole,
        name=f"cpu:{local_rank}",
        cores=mine,
        threads=max(1, len(mine)),
        memory_bytes=whole.memory_bytes // local_size,
    )


def joined(
    devices: Sequence[Device], ranks: Sequence[int], measured: Measured, name: str
) -> Cluster:
    """A cluster of ``devices`` ``[D]``, of ``ranks`` ``[D]``, with the links between processes.

    Devices of one process keep the links that a profile measures. Where nothing else is shared,
    all that one process sends to another goes over one connection, and shares it.
    """
    links = []
    for a, src in enumerate(devices):
        for b, dst in enumerate(devices):
            pair = ranks[a], ranks[b]
            if pair[0] != pair[1]:
                link = measured.links[pair]
                channel = link.channel or f"rank:{pair[0]} > rank:{pair[1]}"
                links.append(replace(link, src=src.name, dst=dst.name, channel=channel))
    return Cluster(name, tuple(devices), tuple(links))


def merged(profiles: Sequence[Profile], cluster: Cluster) -> Profile:
    """One profile of a cluster's devices from those that its hosts measured of the same graph.

    Seconds beside busy devices are those beside the busy devices of the same host; an operator
    has the workspace that it needs on the host where it needs most.
    """

    def side_by_side(what: str) -> Any:
        parts = [getattr(p, what) for p in profiles]
        if all(part is None for part in parts):
            return None
        without = [
            p.compute_s if what == "loaded_s" else np.zeros(p.compute_s.shape, np.int64)
            for p in profiles
        ]
        return np.hstack([b if a is None else a for a, b in zip(parts, without, strict=True)])

    first = profiles[0]
    needed = [p.workspace_bytes for p in profiles if p.workspace_bytes is not None]
    whole = Profile(
        device_names=tuple(name for p in profiles for name in p.device_names),
        compute_s=side_by_side("compute_s"),
        spread_s=side_by_side("spread_s"),
        links=tuple(link for p in profiles for link in p.links),
        loaded_s=side_by_side("loaded_s"),
        batch_s=max(p.batch_s for p in profiles),
        workspace_bytes=np.max(needed, axis=0) if needed else None,
        library_bytes=side_by_side("library_bytes"),
        overhead_s=np.concatenate(
            [
                np.zeros(len(p.device_names)) if p.overhead_s is None else p.overhead_s
                for p in profiles
            ]
        ),
        graph_fingerprint=first.graph_fingerprint,
        provenance=first.provenance | {"hosts": [p.provenance.get("host") for p in profiles]},
    )
    return whole.for_cluster(cluster)


def _ping(
    a: int, b: int, repeats: int, device: torch.device, groups: Mapping[Pair, Any]
) -> list[float]:
    """Medians of there-and-back seconds: of a byte, then of each of ``SIZES``; on rank ``a``.

    Sizes take turns, so that what disturbs the machine falls on all alike. What is sent lies on
    ``device``, and goes through the group of a direction if there is one.
    """
    me, there, back = dist.get_rank(), groups.get((a, b)), groups.get((b, a))
    messages = {size: torch.zeros(size, dtype=torch.uint8, device=device) for size in _ROUND}
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    spans: dict[int, list[float]] = {size: [] for size in _ROUND}

    def play() -> float:
        start = time.perf_counter()
        for size in _ROUND:
            began = time.perf_counter()
            if me == a:
                move(dist.isend, messages[size], b, there)
                move(dist.irecv, byte, b, back)
            else:
                move(dist.irecv, messages[size], a, there)
                move(dist.isend, byte, a, back)
            spans[size].append(time.perf_counter() - began)
        return time.perf_counter() - start

    took = play()  # connects, and tells how many more there is time for
    rounds = torch.tensor([int(np.clip(10.0 / took, 2, repeats))])  # in about 10 s
    dist.send(rounds, b) if me == a else dist.recv(rounds, a)
    for seconds in spans.values():
        seconds.clear()
    for _ in range(int(rounds)):
        play()
    return [float(np.median(seconds)) for seconds in spans.values()]


def _hand_over(a: int, b: int, device: torch.device, groups: Mapping[Pair, Any]) -> Floats:
    """Processor seconds of this rank, one of the two, for a tensor from ``a`` to ``b``.

    Of each of the sizes of ``HANDED``. As in a run, a ticket announces a tensor, and who waits for
    it has to be woken.
    """
    me, group = dist.get_rank(), groups.get((a, b))
    how: Any = dist.isend if me == a else dist.irecv
    other = b if me == a else a
    spans = []
    for size, count in HANDED:
        ticket = torch.zeros(9, dtype=torch.int64)
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
        began = 0.0
        for i in range(count + 1):
            if i == 1:  # the first one connects
                began = time.process_time()
            if me == a:
                time.sleep(1e-3)
            announced = how(ticket, other)
            move(how, tensor, other, group)
            announced.wait()
        spans.append((time.process_time() - began) / count)
    return np.array(spans)


def _gathered(mine: dict[Any, Any]) -> dict[Any, Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {pair: value for part in every for pair, value in sorted(part.items())}


def _slowdown(flows: tuple[Pair, Pair], links: Mapping[Pair, Link], me: int) -> float:
    """How many times as long two messages take at the same time as alone: the larger of both."""
    bytes_per_s = min(links[pair].bandwidth_bytes_per_s for pair in flows)
    size = int(np.clip(0.05 * bytes_per_s, 2**16, 2**26))  # which takes about 50 ms
    spans: dict[tuple[Pair, bool], list[float]] = {}
    for _ in range(3):
        for sent in ((flows[0],), (flows[1],), flows):
            dist.barrier()
            for pair, seconds in _send(sent, size, me).items():
                spans.setdefault((pair, len(sent) == 2), []).append(seconds)
    median = _gathered({key: float(np.median(v)) for key, v in spans.items()})
    return max(median[pair, True] / median[pair, False] for pair in flows)


def _send(flows: Sequence[Pair], size: int, me: int) -> dict[Pair, float]:
    """Seconds until what is sent to this rank has arrived, from a barrier on."""
    began = time.perf_counter()
    works, arriving = [], {}
    for tag, (a, b) in enumerate(flows):
        if me == a:
            works.append(dist.isend(torch.zeros(size, dtype=torch.uint8), b, tag=tag))
        elif me == b:
            arriving[a, b] = dist.irecv(torch.zeros(size, dtype=torch.uint8), a, tag=tag)
    done = {}
    for pair, work in arriving.items():
        assert work is not None, "a receive of a member of the group"
        work.wait()
        done[pair] = time.perf_counter() - began
    for work in works:
        assert work is not None, "a send of a member of the group"
        work.wait()
    return done
