"""Parameters that stay in host memory, and are copied to a GPU while operators before them run.

There are two buffers. While an operator reads one of them, the parameters of the next one, in the
order of the device, are copied into the other from pinned memory, on a stream of their own. The
device's threads do not wait for each other: a copy waits, on its stream, until the operator that
read the buffer last has run; an operator waits until its copy is there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from placement.cluster import Cluster, Device, Link
from placement.executor import weights
from placement.executor.backend import CudaBackend, backend_for, is_cuda_here
from placement.graph import OpGraph
from placement.profile import Profile
from placement.program import Program, storage_of

_ALIGNED = 256  # bytes, as kernels may read several numbers at once
_HOST = torch.device("cpu")
_LINK_BYTES = 2**23  # of pinned memory, and a 512th of it, copied to find out how long that takes
_TRIES = 5


class Streamed:
    """Parameters of operators of one device: ``reads`` has those of each, in the order of the runs.

    Raises:
        OutOfMemoryError: there is no room for two buffers.
    """

    def __init__(
        self, backend: CudaBackend, program: Program, reads: Mapping[int, Sequence[int]]
    ) -> None:
        self.reads, self._program, self._backend = reads, program, backend
        self._pinned = weights.Copies()
        for p in dict.fromkeys(p for read in reads.values() for p in read):
            value = program.params[p].detach()
            copy = torch.empty_like(value, device=_HOST, pin_memory=True).copy_(value)
            self._pinned.add((_HOST, p), program.params[p], weights.state_of(value), copy)
        self._next = dict(zip(reads, [*reads][1:] + [*reads][:1], strict=True))
        most = max(sum(map(self._room, read)) for read in reads.values())
        self._slots = [_Slot(most, backend.torch_device) for _ in range(2)]

    def refresh(self) -> None:
        """Copy again what was written since; while the device runs nothing."""
        if self._pinned.refresh():
            for slot in self._slots:
                slot.op = -1

    def take(self, op: int) -> list[Tensor]:
        """The parameters of ``op``, for what is launched until ``give_back``."""
        here, other = self._slots
        if op == other.op or (op != here.op and here.is_last):
            here, other = other, here
        if op != here.op:
            self._fetch(op, here)
        self._compute.wait_event(here.arrived)
        here.is_last, other.is_last = True, False
        if self._next[op] not in (op, other.op):
            self._fetch(self._next[op], other)
        return here.views[op]

    def give_back(self) -> None:
        """What reads the parameters that were taken last was launched."""
        for slot in self._slots:
            if slot.is_last:
                slot.read.record(self._compute)

    def own(self, value: Any) -> Any:
        """What an operator made, but not in a buffer: other parameters will be there."""
        if isinstance(value, tuple | list):
            return [self.own(x) for x in value]
        buffers = {storage_of(slot.all) for slot in self._slots}
        return (
            value.clone() if isinstance(value, Tensor) and storage_of(value) in buffers else value
        )

    @property
    def _compute(self) -> Any:
        return torch.cuda.current_stream(self._backend.torch_device)

    def _room(self, p: int) -> int:
        return -(-self._program.params[p].nbytes // _ALIGNED) * _ALIGNED

    def _fetch(self, op: int, slot: _Slot) -> None:
        slot.op, stream = op, self._backend.parameters
        sources = [self._pinned.made[_HOST, p] for p in self.reads[op]]
        with torch.cuda.stream(stream):
            stream.wait_event(slot.read)
            if op not in slot.views:
                ends = itertools.accumulate(map(self._room, self.reads[op]), initial=0)
                slot.views[op] = [
                    slot.all.narrow(0, at, x.nbytes).view(x.dtype).as_strided(x.shape, x.stride())
                    for at, x in zip(ends, sources, strict=False)
                ]
            for view, source in zip(slot.views[op], sources, strict=True):
                view.copy_(source, non_blocking=True)
            slot.arrived.record(stream)


class _Slot:
    """A buffer; the operator whose parameters are in it, and how they lie there."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.all = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=device)
        self.op, self.is_last = -1, False
        self.views: dict[int, list[Tensor]] = {}
        self.arrived, self.read = torch.cuda.Event(), torch.cuda.Event()
        # Who had this memory before on the stream that it is from may not be done with it.
        self.read.record(torch.cuda.current_stream(device))


def with_streaming(cluster: Cluster) -> Cluster:
    """The cluster, and for each GPU a device ``streamed/cuda:0`` whose parameters stay on the host.

    How fast they come is measured: from pinned memory, which tensors of a pipeline are copied to
    first. A cluster without a CPU or without a GPU is returned as it is.
    """
    hosts = [d.name for d in cluster.devices if d.kind == "cpu"]
    cards = [d for d in cluster.devices if d.streams is d.like is None and is_cuda_here(d.name)]
    if not hosts or not cards or cluster.streaming:
        return cluster
    idle_w = [None if d.idle_w is None else 0.0 for d in cards]  # the card's own are counted there
    more = [
        Device(f"streamed/{d.name}", "cuda", streams=d.name, model=d.model, busy_w=w, idle_w=w)
        for d, w in zip(cards, idle_w, strict=True)
    ]
    links = [Link(hosts[0], f"streamed/{d.name}", *_copying(d)) for d in cards]
    return replace(cluster, devices=(*cluster.devices, *more), links=(*cluster.links, *links))


def streaming_where_short(
    graph: OpGraph, cluster: Cluster, profile: Profile
) -> tuple[Cluster, Profile]:
    """``with_streaming`` if a GPU has no memory for the parameters, and tensors of a micro-batch.

    Otherwise, and for a training step, both as they are.
    """
    whole = int(graph.param_bytes.sum() + graph.tensor_bytes.sum())
    short = any(d.kind == "cuda" and d.memory_bytes < whole for d in cluster.devices)
    more = with_streaming(cluster) if short and not graph.is_backward.any() else cluster
    return more, profile if more is cluster else profile.for_cluster(more)


def _copying(card: Device) -> tuple[float, float]:
    """Seconds to begin a copy from pinned memory, and its bytes per second."""
    gpu, took = backend_for(card).torch_device, []
    large = min(_LINK_BYTES, max(card.memory_bytes // 4, 512))
    for size in (small := large // 512, large):
        source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(size, dtype=torch.uint8, device=gpu)
        spans = []
        for _ in range(_TRIES):
            torch.cuda.synchronize(gpu)
            began = time.perf_counter()
            there.copy_(source, non_blocking=True)
            torch.cuda.synchronize(gpu)
            spans.append(time.perf_counter() - began)
        took.append(min(spans))
    short_s, long_s = took
    rate = (large - small) / max(long_s - short_s, 1e-9)
    return max(short_s - small / rate, 0.0), rate
