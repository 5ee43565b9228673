"""Parameters that stay in host memory, and are copied to a GPU while operators before them run.

There is room for the largest of an operator twice. Those of every operator have their place there,
so that those of the operators before it, as many as can be, are elsewhere: they come from pinned
memory on a stream of their own, while those operators compute. The device's threads do not wait for
each other: a copy waits, on its stream, until operators have run whose parameters it overwrites; an
operator waits until its own are there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from placement.cluster import Cluster, Device, Link
from placement.executor import weights
from placement.executor.backend import CudaBackend, backend_for, is_cuda_here
from placement.graph import OpGraph
from placement.profile import Profile
from placement.program import Program, storage_of

_ALIGNED = 256  # bytes, as kernels may read several numbers at once
_HOST = torch.device("cpu")
# Of pinned memory, and a 512th of it, copied so often in a row to find out how long that takes; as
# often as takes longer than what else a machine does for a moment.
_LINK_BYTES, _COPIES, _TRIES = 2**25, 8, 5


class Streamed:
    """Parameters of operators of one device: ``reads`` has those of each, in the order of the runs.

    Raises:
        OutOfMemoryError: there is no room for the largest twice.
    """

    def __init__(
        self, backend: CudaBackend, program: Program, reads: Mapping[int, Sequence[int]]
    ) -> None:
        self.reads, self._backend, self._pinned = reads, backend, weights.Copies()
        for p in dict.fromkeys(p for read in reads.values() for p in read):
            value = program.params[p].detach()
            copy = torch.empty_like(value, device=_HOST, pin_memory=True).copy_(value)
            self._pinned.add((_HOST, p), program.params[p], weights.state_of(value), copy)
        ends = [[*itertools.accumulate(map(self._room, x), initial=0)] for x in reads.values()]
        sizes = np.array([each[-1] for each in ends])
        room = max(2 * int(sizes.max()), 1)
        self._all = torch.empty(room, dtype=torch.uint8, device=backend.torch_device)
        begin, ops, numbers = places(sizes), [*reads], np.arange(len(reads))
        self._slots = {op: _Slot() for op in ops}
        for i, (op, slot) in enumerate(self._slots.items()):
            for p, at in zip(reads[op], ends[i], strict=False):
                x = self._pinned.made[_HOST, p]
                view = self._all.narrow(0, int(begin[i]) + at, x.nbytes).view(x.dtype)
                slot.views.append(view.as_strided(x.shape, x.stride()))
            # Who had this memory before on the stream that it is from may not be done with it.
            slot.read.record(self._compute)
            over = numbers[_meet(begin, sizes, begin[i], sizes[i]) & (numbers != i)]
            slot.over = [ops[other] for other in over]
            if len(over):
                self._slots[ops[i - min((i - over) % len(ops))]].then.append(op)

    def refresh(self) -> None:
        """Copy again what was written since; while the device runs nothing."""
        if self._pinned.refresh():
            for op, slot in self._slots.items():
                if slot.is_there:
                    self._fetch(op)

    def take(self, op: int) -> list[Tensor]:
        """The parameters of ``op``, for what is launched until ``give_back``."""
        slot = self._slots[op]
        if not slot.is_there:
            self._fetch(op)
        self._compute.wait_event(slot.arrived)
        return slot.views

    def give_back(self, op: int) -> None:
        """What reads the parameters of ``op`` was launched; others can come that wait for that."""
        slot = self._slots[op]
        slot.read.record(self._compute)
        for other in slot.then:
            if not self._slots[other].is_there:
                self._fetch(other)

    def own(self, value: Any) -> Any:
        """What an operator made, but not in a buffer: other parameters will be there."""
        if isinstance(value, tuple | list):
            return [self.own(x) for x in value]
        is_here = isinstance(value, Tensor) and storage_of(value) == storage_of(self._all)
        return value.clone() if is_here else value

    @property
    def _compute(self) -> Any:
        return torch.cuda.current_stream(self._backend.torch_device)

    def _room(self, p: int) -> int:
        return -(-self._pinned.made[_HOST, p].nbytes // _ALIGNED) * _ALIGNED

    def _fetch(self, op: int) -> None:
        stream, slot = self._backend.parameters, self._slots[op]
        with torch.cuda.stream(stream):
            stream.wait_event(slot.read)
            for other in map(self._slots.__getitem__, slot.over):
                # Where others are by now, it was read before they came, which is on this stream.
                if other.is_there:
                    stream.wait_event(other.read)
                    other.is_there = False
            slot.is_there = True
            for view, p in zip(slot.views, self.reads[op], strict=True):
                view.copy_(self._pinned.made[_HOST, p], non_blocking=True)
            slot.arrived.record(stream)


class _Slot:
    """Where the parameters of an operator come.

    Attributes:
        over: operators whose parameters these overwrite.
        then: those whose parameters wait for nobody but this operator, or those before it.
    """

    def __init__(self) -> None:
        self.is_there, self.views = False, list[Tensor]()
        self.over, self.then = list[int](), list[int]()
        self.arrived, self.read = torch.cuda.Event(), torch.cuda.Event()


def places(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where parameters of these sizes come, one after another, again and again: int64 ``[n]``.

    There is room for the largest twice. Each is beside the one before it, or at an end, so that
    the next one has room beside it. It is best where it overwrites nothing, or at least half as
    much as the largest comes between it and those that it overwrites, and between it and those
    that overwrite it in the next round: for so long operators may compute. Next best is near an
    end, or there would be no room for two at the same time.
    """
    largest, begin, until = int(sizes.max()), np.zeros_like(sizes), np.append(0, sizes.cumsum())
    for k, size in enumerate(sizes.tolist()):
        best, next_size, last = (-1.0, 0, 0), sizes[(k + 1) % len(sizes)], 2 * largest - size
        beside = {int(begin[k - 1]) - size, int(begin[k - 1] + sizes[k - 1])} if k else set()
        for at in {0, last} | beside:
            over = np.flatnonzero(_meet(begin[:k], sizes[:k], at, size))
            if 0 <= at <= last and max(at, last - at) >= next_size and k - 1 not in over:
                rounds = until[k] - until[over + 1], until[-1] - until[k + 1] + until[over]
                enough = np.minimum(np.concatenate(rounds), largest / 2)
                best = max(best, (min(enough, default=largest), -min(at, last - at), -at))
        begin[k] = -best[-1]
    return begin


def _meet(begin: NDArray[np.int64], sizes: NDArray[np.int64], at: int, size: int) -> Any:
    return (begin < at + size) & (at < begin + sizes)


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
            for _ in range(_COPIES):
                there.copy_(source, non_blocking=True)
            torch.cuda.synchronize(gpu)
            spans.append((time.perf_counter() - began) / _COPIES)
        took.append(min(spans))
    short_s, long_s = took
    rate = (large - small) / max(long_s - short_s, 1e-9)
    return max(short_s - small / rate, 0.0), rate
