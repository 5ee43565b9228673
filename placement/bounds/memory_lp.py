"""A period at least, by a linear program of shares of groups on devices with memory."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.problem import Floats, Problem, host_of
from placement.timeline import least_window
from placement.tools.lp import EXACT, Columns, Program, Terms

_WORKING = 2  # operators whose tensors count beside parameters, a row of each device for each


def own_bytes(problem: Problem) -> Floats:
    """``[G]`` parameters; a tied one is held in equal parts."""
    g = problem.graph
    share = g.param_bytes / np.maximum(np.bincount(g.param_use, minlength=len(g.param_bytes)), 1)
    held = np.bincount(g.group[g.param_use_op], share[g.param_use], g.num_groups)
    return held.astype(np.float64)


def working_bytes(problem: Problem) -> Floats:
    """``[N]`` that a device holds at least while it runs an operator, besides parameters."""
    g, size = problem.graph, problem.graph.tensor_bytes
    every, count = np.arange(g.num_tensors), g.num_ops
    made = np.flatnonzero((g.tensor_src >= 0) & (g.tensor_root == every))
    held = np.bincount(g.tensor_src[made], size[made], count).astype(np.float64)
    stored = np.minimum(size, size[g.tensor_root])[g.use_tensor]
    read, which = np.unique(
        np.stack([g.use_dst, g.tensor_root[g.use_tensor]]), axis=1, return_inverse=True
    )
    least = np.full(read.shape[1], np.inf)
    np.minimum.at(least, which.ravel(), stored)
    held += np.bincount(read[0], least, count)
    workspace = problem.profile.workspace_bytes
    return held if workspace is None else held + workspace


def taken_in(problem: Problem) -> NDArray[np.bool_]:
    """Of which uses the reader, if the tensor comes from elsewhere, takes it in: the first of all
    readers, wherever they are. Inputs of the model are not taken in."""
    g = problem.graph
    first = np.full(g.num_tensors, g.num_ops)
    np.minimum.at(first, g.use_tensor, g.use_dst)
    return (g.tensor_src[g.use_tensor] >= 0) & (first[g.use_tensor] == g.use_dst)


class Placed:
    """A program of a time, and of the shares ``on [G, D]`` of groups on devices with memory.

    A device has a buffer beside what it streams. The time is counted in ``unit_s``, more than any
    call or item takes. ``streams``: see ``either``. ``tensors``: they need memory too.
    """

    def __init__(
        self,
        problem: Problem,
        crossing: bool,
        more_s: float = 0.0,
        streams: bool | None = None,
        tensors: bool = True,
    ) -> None:
        self.problem, self.program = problem, Program()
        own = problem.worker == np.arange(problem.num_devices)
        self.streaming = np.flatnonzero(~own)
        # The devices whose operators run on each worker, which is the first.
        self.sides = [
            np.append(w, self.streaming[problem.worker[self.streaming] == w])
            for w in np.flatnonzero(own)
        ]
        can = np.isfinite(problem.group_compute_s)
        self.on = self.program.shares(can)
        self.buffers: dict[int, tuple[Columns, float]] = {}  # of what streams: bytes, if any does
        self._hold(working_bytes(problem) if tensors else np.zeros(problem.num_ops))
        if streams:
            self.program.row(-1.0, *((buffer, -1.0) for buffer, _ in self.buffers.values()))
        elif streams is not None:
            reads = own_bytes(problem) > 0
            self.program.upper[self.on[np.ix_(reads, self.streaming)]] = 0.0
        bare = problem.without_copies
        self.alone_s, self.loaded_s = (
            np.where(problem.supported, s, 0.0) for s in (bare.compute_s, bare.loaded_s)
        )
        copied_s = float(problem.copy_s.sum()) if problem.cluster.streaming else 0.0
        self.unit_s = max(float(self.loaded_s.sum()) + copied_s + more_s, 1e-300)
        self.arrives: list[list[Terms]] = [[]]  # for each use of a tensor, counted in such ways
        self.handed: list[list[Terms]] = [[] for _ in self.sides]
        self.taken: list[list[Terms]] = [[] for _ in self.sides]  # what taking tensors in takes
        self.channels: dict[int, list[Terms]] = {}
        if len(self.sides) > 1 and crossing:
            self._cross()
        self.time = np.zeros(1, np.intp), -self.unit_s

    def copy(self, uses: float = 1.0) -> None:
        """A row for each device that streams: the time is at least ``uses`` times what is copied.

        Of a call that is all that streams: what all has room in the buffer might as well stay on
        the worker. Otherwise what the buffer has room for may have been there.
        """
        problem, size = self.problem, self.problem.copied_bytes
        for k, s in enumerate(self.problem.cluster.streaming):
            copy_s, w, terms = problem.copy_s[k], problem.worker[s], []
            same = [x[:, s] == x[:, w] for x in (self.alone_s, self.loaded_s)]
            as_worker = np.logical_and(*same) & problem.supported[:, w]
            if uses < 1.0 or not as_worker[problem.supported[:, s]].all():
                buffer, num_bytes = self.buffers[s]
                rate = float((copy_s / np.maximum(size, 1)).max())
                terms = [(buffer, -uses * num_bytes * rate)]
            copied = self.on[:, s], uses * problem.graph.per_group(copy_s)
            self.program.row(0.0, copied, *terms, self.time)

    def _hold(self, working: Floats) -> None:
        g, problem, on, held = self.problem.graph, self.problem, self.on, own_bytes(self.problem)
        runs = problem.without_copies.compute_s > 0  # what takes no time is never seen to hold
        for d, *streaming in self.sides:
            placed: list[Terms] = [(on[:, d], held)]
            buffers: list[Terms] = []
            if streaming:
                size = problem.copied_bytes
                most = max(int(size.max()), 1)
                for s in streaming:
                    given = problem.cluster.devices[s].buffer_bytes
                    buffer = self.program.columns(np.ones(1))
                    part = size / most if given is None else size > 0
                    self.program.rows(np.zeros(g.num_ops), (on[g.group, s], part), (buffer, -1.0))
                    self.buffers[s] = buffer, 2.0 * most if given is None else float(given)
                    buffers.append(self.buffers[s])
            if d == host_of(problem)[0]:
                placed += [(on[:, s], held) for s in self.streaming]
            # Some operators that need most while they run, wherever they are.
            here, room = [d, *streaming], float(problem.memory_bytes[d])
            for op in np.argsort(-working, kind="stable")[:_WORKING]:
                used = working[op] * runs[op, here]
                self._within(room, *placed, *buffers, (on[g.group[op], here], used))
            for s in streaming:  # what may be page-locked
                self._within(float(problem.memory_bytes[s]), (on[:, s], held))

    def _within(self, room: float, *terms: Terms) -> None:
        if sum(np.sum(values) for _, values in terms) > room:
            self.program.row(room, *terms)

    def _cross(self) -> None:
        """Columns for all that crosses between devices, by reading group, and once for all.

        Between more than two each takes the least to it from any other, or from it to any other.
        """
        g, problem, on = self.problem.graph, self.problem, self.on
        (_, shares_host), inner = host_of(problem), g.tensor_src >= 0
        takes_in = taken_in(problem)
        source = np.where(inner, g.group[g.tensor_src], -1)
        (tensor, reader), pair = np.unique(
            np.stack([g.use_tensor, g.group[g.use_dst]]), axis=1, return_inverse=True
        )
        first = np.array([here[0] for here in self.sides])
        two = len(first) == 2
        self.arrives = [[]] if two else [[], []]
        for k, here in enumerate(self.sides):
            dst, others = int(first[k]), np.delete(first, k)
            both: list[tuple[Any, Any]] = [(others, dst), (dst, others)]
            for arrives, ends in zip(self.arrives, both, strict=False):
                sent = problem.transfers_s(itemgetter((..., *ends)))
                sent_s, into = sent.min(axis=1), ends[1] is dst
                receive_s = problem.link_receive_s[ends]
                self.unit_s += float((sent.max(axis=1) + receive_s.max()).sum())
                if not sent_s.any():
                    continue
                may = (source[tensor] != reader) & (inner | (~shares_host[dst] & into))[tensor]
                crosses, none = np.zeros(len(tensor), np.intp), np.zeros(may.sum())
                crosses[may] = self.program.columns(none + 1)
                from_, to = source[tensor[may]], reader[may]
                sign = 1.0 if into else -1.0
                there = ((on[from_, d], -sign * inner[tensor[may]]) for d in here)
                reads = ((on[to, d], sign) for d in here)
                self.program.rows(none, *reads, *there, (crosses[may], -1.0))
                use_s = sent_s[g.use_tensor] + takes_in * receive_s.min()
                arrives.append((crosses[pair], may[pair] * use_s))
                if two:
                    self._queue(k, tensor[may], crosses[may], sent_s)
        self.arrives = [arrives for arrives in self.arrives if arrives] or [[]]

    def _queue(self, k: int, tensor: NDArray[np.integer], crosses: Columns, sent_s: Floats) -> None:
        """To side ``k`` each tensor is sent once: it is on the channel, the other side hands it
        over, and an operator of this side takes it in."""
        problem, src, dst = self.problem, int(self.sides[1 - k][0]), int(self.sides[k][0])
        g, size = problem.graph, problem.graph.tensor_bytes.astype(np.float64)
        handed_s = problem.link_send_s[src, dst] + size * problem.link_send_s_per_byte[src, dst]
        self.unit_s += float((handed_s + problem.link_wake_s[src, dst]).sum())
        which, at = np.unique(tensor, return_inverse=True)
        sent = self.program.columns(np.ones(len(which)))
        self.program.rows(np.zeros(len(at)), (crosses, 1.0), (sent[at], -1.0))
        receive_s = problem.link_receive_s[src, dst] * (g.tensor_src[which] >= 0)
        self.taken[k].append((sent, receive_s))
        if not problem.contention:
            return
        way = int(problem.link_channel[src, dst])
        self.channels.setdefault(way, []).append((sent, sent_s[which]))
        # What is handed over last may be there before that ends.
        kept_s = np.minimum(sent_s, handed_s) * (g.tensor_src >= 0)
        self.handed[1 - k].append((sent, kept_s[which]))


def either(problem: Problem, bound: Callable[[bool | None], float]) -> float:
    """The less of what is proved where something streams (True), and where nothing does (False).

    A buffer whose size is given is whole if anything is streamed, and not the part of it that the
    largest share is. Where one of both says nothing, what is proved of both together (None).
    """
    devices = [problem.cluster.devices[d] for d in problem.cluster.streaming]
    if not devices or any(device.buffer_bytes is None for device in devices):
        return bound(None)
    least = bound(True)
    if not _must_stream(problem):
        least = min(least, bound(False))
    return least or bound(None)


def _must_stream(problem: Problem) -> bool:
    """What no CPU can run has more parameters than devices with memory of their own hold."""
    is_cpu = np.array([d.kind == "cpu" for d in problem.cluster.devices])
    own = problem.worker == np.arange(problem.num_devices)
    needs = ~np.isfinite(problem.group_compute_s[:, is_cpu]).any(axis=1)
    room = problem.memory_bytes[own & ~is_cpu].sum(dtype=np.float64)
    return bool(own_bytes(problem)[needs].sum() * EXACT > room)


def columns_of(problem: Problem) -> int:
    """Variables of a program of ``Placed``, about."""
    crossing = 4 * len(problem.graph.use_dst) + problem.num_ops
    return problem.group_compute_s.size + crossing * (problem.num_workers == 2)


def busy_s(problem: Problem, load_s: float, lp_size: int) -> float:
    """A period from ``load_s``, a load alone, up: operators are slower beside busy devices.

    Of ``D`` devices with loads ``a[d]`` alone, ``m`` the largest, let
    ``share = (sum a - m) / m / (D - 1)``. No operator is stretched by less (``durations``), and
    ``sum a = m * (1 + (D - 1) * share)``. ``period_s`` bounds the period for an interval
    of shares. That of the least bound is halved again and again.

    ``batch_s`` is spread over the operators by their seconds, of which the busiest device has
    ``1 / D`` or more; and, as none of them is stretched by more than ``longer``,
    ``1 / (1 + share * (longer * D - 1))`` or more.
    """
    devices, batch_s = problem.num_workers, problem.profile.batch_s
    if problem.num_microbatches == 1:
        return load_s
    fastest_s = np.where(problem.supported, problem.without_copies.compute_s, np.inf).min(axis=1)
    if problem.max_phases > 1 or fastest_s.sum() == 0.0:
        batch_s = 0.0  # some phases may have less of it, as has what takes no time
    stretches, longer = problem.profile.loaded_s is not None and devices > 1, 1.0
    if stretches:
        bare = problem.without_copies
        took_s, most_s = (
            problem.graph.per_group(np.where(problem.supported, s, 0.0))
            for s in (bare.compute_s, bare.loaded_s)
        )
        longer = float((most_s / np.maximum(took_s, 1e-300))[most_s > 0].max(initial=1.0))

    tells_more = stretches or devices == 2 or problem.cluster.streaming
    columns = columns_of(problem)
    solves = devices > 1 and tells_more and columns <= lp_size

    def between_s(low: float, high: float) -> float:
        more_s = batch_s * max(1 / devices, 1 / (1 + high * (longer * devices - 1)))
        least_s = load_s + more_s * EXACT
        return max(least_s, period_s(problem, low, high, more_s)) if solves else least_s

    parts = [(between_s(0.0, 1.0), 0.0, 1.0)]
    narrow = 1 / 256  # shares so close are not told apart
    while solves and stretches and parts[0][2] - parts[0][1] > narrow and lp_size > 0:
        bound_s, low, high = heappop(parts)
        for ends in (low, (low + high) / 2), ((low + high) / 2, high):
            heappush(parts, (max(bound_s, between_s(*ends)), *ends))
        lp_size -= columns
    return parts[0][0]


def period_s(
    problem: Problem,
    low: float = 0.0,
    high: float = 1.0,
    more_s: float = 0.0,
    sends: bool = True,
    tensors: bool = True,
) -> float:
    """An item of a stream, at least: loads and memory; if it ``sends``, between two devices also
    all that is sent. ``tensors``: they need memory too, of which ``max_load`` knows nothing.

    All but the busiest device do from ``low`` to ``high`` of its seconds on average, so that
    operators take at least ``low`` of what ``loaded_s`` is more than ``compute_s``; the busiest
    takes ``more_s`` besides.

    Of the items that a period is measured by (``least_window``) those that were in flight before
    may have been sent by then. What the others send, and do besides, counts.
    """
    window = least_window(problem.num_microbatches) if sends and problem.max_phases == 1 else 0
    counted = max(0.0, window - problem.max_in_flight + 1) / max(window, 1)
    placed = Placed(problem, counted > 0 and problem.num_workers == 2, more_s, tensors=tensors)
    program, on, (time, minus_s) = placed.program, placed.on, placed.time
    alone_s, loaded_s = map(problem.graph.per_group, (placed.alone_s, placed.loaded_s))
    for here, handed, taken in zip(placed.sides, placed.handed, placed.taken, strict=True):
        load = (on[:, here], (alone_s + low * (loaded_s - alone_s))[:, here]), *taken
        program.row(-more_s, *load, (time, minus_s))
        if handed:
            program.row(0.0, *load, *handed, (time, minus_s / counted))
    for sent in placed.channels.values():
        program.row(0.0, *sent, (time, minus_s / counted))
    if counted > 0.0:  # of micro-batches that are in flight together one copy may serve all
        placed.copy(counted / problem.max_in_flight)
    rest = 1.0 + (problem.num_workers - 1) * high
    every = (on, alone_s), *chain(*placed.taken)
    program.row(-rest * more_s, *every, (time, rest * minus_s))
    return program.solve()[0] * placed.unit_s * EXACT
