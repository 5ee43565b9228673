"""Groups of alike devices that compute each layer together, as devices of a cluster.

Tensor parallelism as of Megatron-LM (Shoeybi et al., arXiv:1909.08053): each member has its heads
of attention, its columns and then its rows of a feed-forward, and results are added up after
either. A cluster in which groups are devices is planned like any other: layers go to groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product
from math import prod
from typing import Any

from placement.cluster import Cluster, Device, Link, pairs_of
from placement.costs.serving import Serving, buffers, serving_problem
from placement.importers.decoder import Decoder
from placement.problem import Problem, Solution
from placement.tools.files import some

_UNLIMITED = float("inf")
Group = tuple[int, ...]  # numbers of devices


class GroupError(ValueError):
    """No such groups of devices; the message has the numbers."""


def best_groups(
    decoder: Decoder,
    cluster: Cluster,
    serving: Serving,
    solve: Callable[[Problem], Solution],
    size: int | None = None,
) -> Problem:
    """The problem of the groups with which ``solve`` finds the best answer.

    Where nothing fits, it is that of the largest groups.

    Args:
        size: of all groups; None: see ``groupings``.

    Raises:
        GroupError: no groups of ``size``, or too many ways to make groups.
        ServingError, RatesError: as ``serving_problem``.
    """
    problems = [
        group_problem(decoder, cluster, serving, groups)
        for groups in groupings(decoder, cluster, size)
    ]
    return min(problems, key=lambda problem: float(solve(problem).value_s))


def group_problem(
    decoder: Decoder, cluster: Cluster, serving: Serving, groups: Sequence[Group]
) -> Problem:
    """``serving_problem`` of groups, each of whose members has buffers of its own."""
    copies = sum(buffers(decoder, serving).values())
    return serving_problem(decoder, grouped(cluster, groups, copies), serving)


def groupings(decoder: Decoder, cluster: Cluster, size: int | None = None) -> list[list[Group]]:
    """Ways to make groups of devices, those with large ones first.

    Alike devices make groups of one size, neighbours together, and of what is left over smaller
    ones: each size is one way for each kind of device, every device alone among them. With
    ``size`` there is one way: groups of so many, and what is left over alone.

    Raises:
        GroupError: ``size`` is below 2, does not divide the heads, or is more than there are alike
            devices; or there are more than 512 ways.
    """
    if any(d.streams or d.members for d in cluster.devices):
        raise GroupError(
            f"cluster {cluster.name!r}: groups are made of devices with memory of their own; leave "
            "out those that stream, and groups"
        )
    kinds: dict[Any, list[int]] = {}
    for d, device in enumerate(cluster.devices):
        kinds.setdefault(_kind(device), []).append(d)
    heads = {(part.heads, part.kv_heads) for part in decoder.parts if part.heads}
    if size is not None:
        _check_size(size, heads, kinds, cluster)
    ways = [
        [_cut(alike, k, heads) for k in range(len(alike), 0, -1) if _divides(k, heads)]
        if size is None
        else [_cut(alike, size if len(alike) >= size else 1, set())]
        for alike in kinds.values()
    ]
    if (count := prod(map(len, ways))) > 512:
        raise GroupError(
            f"{len(kinds)} kinds of devices make {count:,} ways to form groups, more than "
            "512: say how many devices a group has, --tensor-parallel 2"
        )
    return [sorted(group for kind in way for group in kind) for way in product(*ways)]


def grouped(cluster: Cluster, groups: Sequence[Group], copies_bytes: int = 0) -> Cluster:
    """The cluster with each group as one device; of one member it is that device itself.

    Between groups there is the slowest link between a member of the one and one of the other.

    Args:
        groups: numbers of devices, of alike ones.
        copies_bytes: what each member has of its own, although it is counted once for the group.
    """
    link: dict[tuple[int, int], Link] = {}
    for ends in pairs_of(cluster.links, cluster.device_names):
        link |= _each(*ends)
    devices = [_device(cluster, group, link, copies_bytes) for group in groups]
    links = []
    for (a, first), (b, second) in permutations(enumerate(groups), 2):
        between = [link[x, y] for x in first for y in second if (x, y) in link]
        if between:
            # By the seconds of a megabyte.
            slowest = max(between, key=lambda x: x.latency_s + 1e6 / x.bandwidth_bytes_per_s)
            links.append(replace(slowest, src=devices[a].name, dst=devices[b].name))
    return Cluster(cluster.name, tuple(devices), tuple(links))


def _each(a: Any, b: Any, link: Link) -> dict[tuple[int, int], Link]:
    sources, targets = (x.ravel().tolist() if hasattr(x, "ravel") else [x] for x in (a, b))
    return dict.fromkeys(product(sources, targets), link)


def _device(
    cluster: Cluster, group: Group, link: Mapping[tuple[int, int], Link], copies_bytes: int
) -> Device:
    members = [cluster.devices[d] for d in group]
    first, k = members[0], len(members)
    if k == 1:
        return first
    ring = [link[pair] for i in range(k) if (pair := (group[i - 1], group[i])) in link]
    # Those of one channel send one after another.
    sends = Counter(x.channel for x in ring)
    rates = [x.bandwidth_bytes_per_s / (sends[x.channel] if x.channel else 1) for x in ring]
    slowest = min(rates, default=_UNLIMITED)
    busy, idle = [x.busy_w for x in members], [x.idle_w for x in members]
    memory = k * min(x.memory_bytes for x in members) - (k - 1) * copies_bytes
    return replace(
        first,
        name=f"{first.name}..{members[-1].name}",
        memory_bytes=min(max(1, memory), 2**63 - 1),
        members=tuple(x.name for x in members),
        ring_latency_s=max((x.latency_s for x in ring), default=0.0),
        ring_bytes_per_s=None if slowest == _UNLIMITED else slowest,
        busy_w=None if None in busy else sum(x or 0.0 for x in busy),
        idle_w=None if None in idle else sum(x or 0.0 for x in idle),
    )


def _kind(device: Device) -> Any:
    """What alike devices have in common."""
    rates = device.flops_per_s, device.bytes_per_s, device.call_s, device.speed
    return device.kind, device.like, device.model, device.threads, rates


def _divides(k: int, heads: set[tuple[int, int]]) -> bool:
    """Whether ``k`` devices can share heads, and those of keys and values, or have copies."""
    return all(h % k == 0 and (kv % k == 0 or k % kv == 0) for h, kv in heads)


def _cut(alike: Sequence[int], k: int, heads: set[tuple[int, int]]) -> list[Group]:
    """Groups of ``k`` neighbours; of what is left over the largest that can be, if ``heads``."""
    groups: list[Group] = []
    while alike:
        if len(alike) < k:
            k = max(i for i in range(1, len(alike) + 1) if _divides(i, heads)) if heads else 1
        groups.append(tuple(alike[:k]))
        alike = alike[k:]
    return groups


def _check_size(
    size: int, heads: set[tuple[int, int]], kinds: Mapping[Any, list[int]], cluster: Cluster
) -> None:
    most = max(map(len, kinds.values()))
    if size < 2:
        raise GroupError(f"groups of {size} devices: a group has at least 2; --tensor-parallel 2")
    if size > most:
        names = [f"{len(x)} as {cluster.devices[x[0]].name!r}" for x in kinds.values()]
        raise GroupError(
            f"groups of {size} devices: members must be alike, and of {cluster.num_devices} "
            f"devices there are {some(names)}: at most {most}"
        )
    if not _divides(size, heads):
        of = " and ".join(f"{h} heads ({kv} of keys and values)" for h, kv in sorted(heads))
        can = [k for k in range(1, most + 1) if _divides(k, heads)]
        raise GroupError(
            f"groups of {size} devices cannot share {of} evenly; of at most {most} these can: "
            f"{', '.join(map(str, can))}"
        )
