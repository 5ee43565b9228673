"""Parameters that stay in host memory, and are copied to a GPU ahead of their use.

They come from pinned memory on a stream of their own, in the order and to the places that a
``Buffer`` says. The device's threads do not wait for each other: a copy waits, on its stream, until
operators have run whose parameters it overwrites; an operator waits until its own are there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from placement.buffer import ALIGNED, Buffer
from placement.cluster import Cluster, ClusterError, Device, Link
from placement.executor import weights
from placement.executor.backend import CudaBackend, backend_for, is_cuda_here
from placement.graph import OpGraph
from placement.profile import Profile
from placement.program import Program, storage_of

_HOST = torch.device("cpu")
# Of pinned memory, and a 512th of it, copied so often in a row to find out how long that takes; as
# often as takes longer than what else a machine does for a moment.
_LINK_BYTES, _COPIES, _TRIES = 2**25, 8, 5


class Streamed:
    """Parameters of operators of one device: ``reads`` has those of each, in the order of the runs.

    ``room``: bytes of the buffer; None: twice those of the operator that has most.

    Raises:
        OutOfMemoryError: there is no room for the buffer.
        ClusterError: the machine does not page-lock that much memory.
    """

    def __init__(
        self,
        backend: CudaBackend,
        program: Program,
        reads: Mapping[int, Sequence[int]],
        room: int | None = None,
    ) -> None:
        self.reads, self._backend, self._pinned = reads, backend, weights.Copies()
        params = dict.fromkeys(p for read in reads.values() for p in read)
        done, total = 0, sum(program.params[p].nbytes for p in params)
        for p in params:
            try:
                copy = weights.pinned(program, p)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                advice = (
                    f"say pinned_bytes: {done} of the CPU in"
                    if done
                    else "leave what streams out of"
                )
                raise ClusterError(
                    f"{total:,} bytes of parameters are to be streamed from pinned host memory, of "
                    f"which this machine gave {done:,} ({error}): {advice} the cluster's YAML "
                    "file, and plan again"
                ) from error
            self._pinned.add((_HOST, p), program.params[p], copy)
            done += copy.tensor.nbytes
        self._ends = {
            op: [*itertools.accumulate(map(self._room, read), initial=0)]
            for op, read in reads.items()
        }
        sizes = {op: ends[-1] for op, ends in self._ends.items()}
        most = max(sizes.values())
        self._buffer = Buffer(sizes, max(most, 2 * most if room is None else room, 1))
        self._all = torch.empty(self._buffer.room, dtype=torch.uint8, device=backend.torch_device)
        self._views: dict[tuple[int, int], list[Tensor]] = {}  # by operator and place
        self._here: dict[int, list[Tensor]] = {}
        self._arrived, self._read = ({op: torch.cuda.Event() for op in reads} for _ in range(2))
        for event in self._read.values():
            # Who had this memory before on the stream that it is from may not be done with it.
            event.record(self._compute)
        self._before: list[Any] = [*self._read.values()][:1]

    def refresh(self) -> None:
        """Copy again what was written since; while the device runs nothing."""
        if self._pinned.refresh():
            self._before += map(self._read.__getitem__, self._buffer.there)
            self._buffer.forget()

    def take(self, op: int) -> list[Tensor]:
        """The parameters of ``op``, for what is launched until ``give_back``."""
        self._copy()  # what is first in the order, if this is the first that is taken
        self._buffer.take(op)
        self._copy()
        self._compute.wait_event(self._arrived[op])
        return self._here[op]

    def give_back(self, op: int) -> None:
        """What reads the parameters of ``op`` was launched; others can come that wait for that."""
        self._read[op].record(self._compute)
        self._buffer.give_back(op)
        self._copy()

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
        return -(-self._pinned.made[_HOST, p].tensor.nbytes // ALIGNED) * ALIGNED

    def _copy(self) -> None:
        """Launch all copies that may begin once what was launched before has run."""
        while (came := self._buffer.copy()) is not None:
            stream = self._backend.parameters
            with torch.cuda.stream(stream):
                for event in (*self._before, *map(self._read.__getitem__, came.over)):
                    stream.wait_event(event)
                self._before.clear()
                self._here[came.op] = views = self._views_at(came.op, came.begin)
                for view, p in zip(views, self.reads[came.op], strict=True):
                    view.copy_(self._pinned.made[_HOST, p].tensor, non_blocking=True)
                self._arrived[came.op].record(stream)

    def _views_at(self, op: int, begin: int) -> list[Tensor]:
        """The parameters of ``op`` from byte ``begin`` of the buffer on."""
        if (op, begin) not in self._views:
            views = self._views[op, begin] = []
            for p, at in zip(self.reads[op], self._ends[op], strict=False):
                x = self._pinned.made[_HOST, p].tensor
                view = self._all.narrow(0, begin + at, x.nbytes).view(x.dtype)
                views.append(view.as_strided(x.shape, x.stride()))
        return self._views[op, begin]


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
