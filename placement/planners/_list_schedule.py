"""A schedule that grows operator by operator: what the list-scheduling planners share."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.planners._search import INFEASIBLE, Choice, Search
from placement.problem import Problem
from placement.simulator import host_of

Floats = NDArray[np.float64]
Devices = NDArray[np.intp]  # [K], in order
Intervals = tuple[list[float], list[float]]  # begins, ends


class ListSchedule:
    """Operators placed so far, and when they run; transfers do not wait for each other.

    A colocation group is fixed to the device of its first operator. Operators must be placed
    after those they depend on.

    Attributes:
        choice: int32 ``[G]`` device of each group, -1 where none yet.
        finish_s: float64 ``[N]`` end of each placed operator.
        free_s: float64 ``[D]`` end of the last operator of each device.
    """

    def __init__(self, problem: Problem, activations: int = 0) -> None:
        """``activations``: how often a device must hold what its groups produce (see ``fits``)."""
        self.problem = problem
        self.choice: Choice = np.full(problem.graph.num_groups, -1, np.int32)
        self.finish_s = np.zeros(problem.num_ops)
        self.free_s = np.zeros(problem.num_devices)
        self.memory = Memory(problem, activations)
        self._host, self._shares_host = host_of(problem)
        # (begins, ends) of the operators of each device, and of operators without a gap between.
        self._runs: list[Intervals] = [([], []) for _ in range(problem.num_devices)]
        self._touching: list[Intervals] = [([], []) for _ in range(problem.num_devices)]

    @property
    def makespan_s(self) -> float:
        """End of the last operator."""
        return float(self.finish_s.max())

    def able(self, op: int) -> Devices:
        """Devices that ``op`` may go to: its group's, or those with support and (if any) room."""
        group = int(self.problem.graph.group[op])
        if self.choice[group] >= 0:
            return np.array([self.choice[group]], np.intp)
        return self.memory.able(group)

    def ready_s(self, op: int) -> Floats:
        """float64 ``[D]``: when the last input of ``op`` is on each device."""
        g = self.problem.graph
        tensors = g.in_tensor[g.in_ptr[op] : g.in_ptr[op + 1]]
        if not len(tensors):
            return np.zeros(self.problem.num_devices)
        src = g.tensor_src[tensors]
        given = src < 0
        home = np.where(given, self._host, self.choice[g.group[src]])
        sent = transfers_s(self.problem, tensors, home)
        sent[given] = np.where(self._shares_host, 0.0, sent[given])
        sent += np.where(given, 0.0, self.finish_s[src])[:, None]
        return sent.max(axis=0, initial=0.0)

    def starts_s(self, op: int, devices: Devices) -> Floats:
        """float64 ``[K]``: start of ``op`` on each of ``devices``, in the earliest gap."""
        starts = self.ready_s(op)[devices]
        for k in np.flatnonzero(starts < self.free_s[devices]).tolist():  # else after them all
            device = int(devices[k])
            start, length = float(starts[k]), float(self.problem.compute_s[op, device])
            # What takes no time fits between two intervals that touch, anything else does not.
            begins, ends = self._touching[device] if length > 0 else self._runs[device]
            at = bisect.bisect_right(ends, start)  # intervals before ``at`` are over
            while at < len(begins) and begins[at] < start + length:
                start = max(start, ends[at])
                at += 1
            starts[k] = start
        return starts

    def reach_s(self, op: int, devices: Devices, starts: Floats) -> Floats:
        """What to compare devices by: the end of ``op`` there, or of its whole group.

        Where ``op`` is the first of its group, the seconds of the others follow it: they will
        have to run on the same device.
        """
        group = self.problem.graph.group[op]
        first = self.choice[group] < 0
        seconds = self.problem.group_compute_s[group] if first else self.problem.compute_s[op]
        return starts + seconds[devices]

    def place(self, op: int, device: int, start: float) -> None:
        """Run ``op`` on ``device`` from ``start``, and fix its group there."""
        group = int(self.problem.graph.group[op])
        if self.choice[group] < 0:
            self.choice[group] = device
            self.memory.hold(group, device)
        end = start + self.problem.compute_s[op, device]
        self.finish_s[op] = end
        self.free_s[device] = max(self.free_s[device], end)
        if end > start:  # what takes no time occupies nothing
            begins, ends = self._runs[device]
            at = bisect.bisect_right(begins, start)
            begins.insert(at, start)
            ends.insert(at, end)
            begins, ends = self._touching[device]
            at = bisect.bisect_right(begins, start)
            begins.insert(at, start)
            ends.insert(at, end)
            if at + 1 < len(begins) and begins[at + 1] == end:
                del begins[at + 1], ends[at]
            if at and ends[at - 1] == start:
                del begins[at], ends[at - 1]

    def place_earliest(self, op: int, extra_s: Floats | None = None) -> None:
        """Place ``op`` where ``reach_s`` (plus ``extra_s[device]``) is least."""
        able = self.able(op)
        starts = self.starts_s(op, able)
        reach = self.reach_s(op, able, starts)
        if extra_s is not None:
            reach += extra_s[able]
        best = int(np.argmin(reach))
        self.place(op, int(able[best]), float(starts[best]))


def transfers_s(problem: Problem, tensors: NDArray[Any], src: NDArray[Any]) -> Floats:
    """float64 ``[K, D]``: ``problem.transfer_s`` of each tensor from its ``src`` to a device."""
    if problem.profile.transfer_s is not None:
        seconds = problem.profile.transfer_s[tensors, src]
    else:
        size = problem.graph.tensor_bytes[tensors].astype(np.float64)[:, None]
        seconds = problem.link_latency_s[src] + size * problem.link_s_per_byte[src]
    seconds[np.arange(len(src)), src] = 0.0
    return seconds


class Memory:
    """Bytes each device holds while groups are placed on it one by one.

    A group needs its parameters (tied ones once per device) and ``activations`` times the
    tensors it produces, those that share memory once.
    """

    def __init__(self, problem: Problem, activations: int = 0) -> None:
        g = problem.graph
        self._allowed = np.isfinite(problem.group_compute_s)
        self._may_bind = problem.memory_may_bind  # otherwise nothing need be counted
        if not self._may_bind:
            return
        self._capacity = problem.memory_bytes
        self._param_bytes = g.param_bytes
        self._missing = np.ones((problem.num_devices, len(g.param_bytes)), bool)
        self._used = np.zeros(problem.num_devices, np.int64)
        self._produced = activations * produced_bytes(problem)
        pairs = np.unique(np.stack([g.group[g.param_use_op], g.param_use], axis=1), axis=0)
        self._param_ptr = np.searchsorted(pairs[:, 0], np.arange(g.num_groups + 1))
        self._param = pairs[:, 1]

    def able(self, group: int) -> Devices:
        """Devices that can run ``group``: those with room, or all of them where none has."""
        can = np.flatnonzero(self._allowed[group])
        if not self._may_bind:
            return can
        room = can[(self._need(group) <= self._capacity)[can]]
        return room if len(room) else can

    def hold(self, group: int, device: int) -> None:
        """``group`` is on ``device`` from now on."""
        if self._may_bind:
            self._used[device] = self._need(group)[device]
            self._missing[device, self._params(group)] = False

    def _params(self, group: int) -> NDArray[np.int32]:
        return self._param[self._param_ptr[group] : self._param_ptr[group + 1]]

    def _need(self, group: int) -> NDArray[np.int64]:
        """int64 ``[D]``: bytes on each device if ``group`` went there too."""
        params = self._params(group)
        new = self._missing[:, params] @ self._param_bytes[params]
        return self._used + new + self._produced[group]


def produced_bytes(problem: Problem) -> NDArray[np.int64]:
    """int64 ``[G]``: the tensors that the operators of each group produce, views left out."""
    g = problem.graph
    total = np.zeros(g.num_groups, np.int64)
    own = np.flatnonzero((g.tensor_src >= 0) & (g.tensor_root == np.arange(g.num_tensors)))
    np.add.at(total, g.group[g.tensor_src[own]], g.tensor_bytes[own])
    return total


def first_that_fits(search: Search, plan: Callable[[int], Choice]) -> None:
    """Score ``plan(activations)`` until one fits: activations are not counted, then once, ...

    How long a tensor lives depends on the schedule, so a planner begins with parameters alone;
    where the simulator finds that too optimistic, it counts what is produced in one
    micro-batch, then in every micro-batch in flight.
    """
    problem = search.problem
    flights = problem.max_in_flight if problem.objective == "period" else 1
    counts = [0, 1, flights] if problem.memory_may_bind else [0]
    for activations in dict.fromkeys(counts):
        search.costs(plan(activations))
        if search.best_cost < INFEASIBLE:
            return


def ready_order(problem: Problem, priority: Floats) -> Iterator[int]:
    """Every operator, each time the ready one of highest ``priority`` float64 ``[N]``."""
    g = problem.graph
    missing = np.bincount(g.edges[:, 1], minlength=problem.num_ops)
    start = np.searchsorted(g.edges[:, 0], np.arange(problem.num_ops + 1))
    heap = [(-priority[n], int(n)) for n in np.flatnonzero(missing == 0)]
    heapq.heapify(heap)
    while heap:
        op = heapq.heappop(heap)[1]
        yield op
        for n in g.edges[start[op] : start[op + 1], 1]:
            missing[n] -= 1
            if missing[n] == 0:
                heapq.heappush(heap, (-priority[n], int(n)))
