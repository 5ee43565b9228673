"""What the simulator means, slowly and readably: an event heap over dictionaries."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.problem import Placement, Problem, host_of
from placement.schedule import Schedule
from placement.simulator.predictions import Floats, beside, checked, durations, timeline_of
from placement.timeline import Timeline


def simulate_reference(
    problem: Problem,
    placement: ArrayLike,
    schedule: Schedule | None = None,
    num_microbatches: int | None = None,
) -> Timeline:
    """As ``simulate``, and equal to it.

    Raises:
        ProblemError: the placement is not one.
        ScheduleError: the schedule does not fit, or deadlocks.
    """
    placed, num_batches = checked(problem, placement, schedule, num_microbatches)
    run = Reference(problem, placed, schedule, num_batches)
    run.admit(0.0)
    while run.events:
        now = run.events[0][0]
        while run.events and run.events[0][0] == now:
            heapq.heappop(run.events)
        for device in range(problem.num_devices):
            run.end_on(device, now)
        run.admit(now)
        run.begin(now)
    sent = np.reshape(np.array(run.sent, float), (-1, 6))
    rows, begin, finish = sent[:, :4].astype(np.int32), sent[:, 4], sent[:, 5]
    peak = run.peak_bytes(rows, begin, finish)
    return timeline_of(problem, placed, run.start, run.end, (rows, begin, finish), peak)


class Reference:
    """What has happened until now. A *key* is a micro-batch and an operator."""

    def __init__(
        self, problem: Problem, placement: Placement, schedule: Schedule | None, num_batches: int
    ) -> None:
        g, n, d = problem.graph, problem.num_ops, problem.num_devices
        self.problem, self.placement = problem, placement
        self.schedule, self.num_batches = schedule, num_batches
        placed = np.atleast_2d(placement)[:num_batches]
        self.phases = problem.worker[placed]
        self.window = num_batches if schedule is not None else problem.max_in_flight
        self.seconds = durations(problem, placed, num_batches)
        self.beside_s = beside(problem, placed[0], num_batches)
        self.host, self.shares_host = host_of(problem)
        self.consumers = [g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]] for t in range(g.num_tensors)]
        self.produced = [g.out_tensor[g.out_ptr[i] : g.out_ptr[i + 1]] for i in range(n)]
        self.num_inputs = np.diff(g.in_ptr)
        self.start, self.end = np.empty((2, num_batches, n))
        self.sent: list[tuple[int, int, int, int, float, float]] = []
        self.events: list[tuple[float, int]] = []  # (time, device): something may happen there
        self.missing: dict[tuple[int, int], int] = {}  # inputs that have not been sent off yet
        self.arrival: dict[tuple[int, int], float] = {}  # when the last known input arrives
        self.waiting: list[dict[tuple[int, int], float]] = [{} for _ in range(d)]
        self.running: list[tuple[int, int] | None] = [None] * d
        self.free_at = [0.0] * d  # end of the running operator or of blocking transfers
        self.last_arrival_s = [-1.0] * d  # of what was sent there
        self.channel_free = [0.0] * problem.num_channels
        self.next_entry = [0] * d
        self.unfinished: dict[int, int] = {}
        self.admitted_s: list[float] = []

    def admit(self, now: float) -> None:
        """Micro-batches begin where there is room, and their inputs are delivered."""
        g = self.problem.graph
        while len(self.admitted_s) < self.num_batches and len(self.unfinished) < self.window:
            batch = len(self.admitted_s)
            self.admitted_s.append(now)
            self.unfinished[batch] = g.num_ops
            for op in range(g.num_ops):
                self.missing[batch, op] = int(self.num_inputs[op])
                self.arrival[batch, op] = now
                if self.num_inputs[op] == 0:
                    self._make_ready((batch, op))
            for tensor in np.flatnonzero(g.tensor_src < 0):
                self._deliver(int(tensor), batch, self.host, now, self.shares_host, 0.0)

    def end_on(self, device: int, now: float) -> None:
        """What runs on ``device`` and ends now is delivered."""
        key = self.running[device]
        if key is None or self.free_at[device] != now:
            return
        batch, op = key
        self.running[device] = None
        self.end[batch, op] = now
        own, sending = np.arange(self.problem.num_devices) == device, 0.0
        for tensor in self.produced[op]:
            until, sending = self._deliver(int(tensor), batch, device, now, own, sending)
            self.free_at[device] = max(self.free_at[device], until, now + sending)
        if self.free_at[device] > now:
            heapq.heappush(self.events, (self.free_at[device], device))
        self.unfinished[batch] -= 1
        if self.unfinished[batch] == 0:
            del self.unfinished[batch]

    def begin(self, now: float) -> None:
        """Free devices take what they run next."""
        begun = []
        for device in range(self.problem.num_devices):
            if self.running[device] is None and self.free_at[device] <= now:
                key = self._choose(device, now)
                if key is not None:
                    del self.waiting[device][key]
                    self.running[device] = key
                    self.start[key] = now
                    begun.append((device, key))
        others = sum(key is not None for key in self.running) - 1
        for device, key in begun:
            batch, op = key
            seconds = self.seconds[batch % len(self.phases), op]
            self.free_at[device] = self.start[key] + seconds + others * self.beside_s[op]
            heapq.heappush(self.events, (self.free_at[device], device))

    def _deliver(
        self,
        tensor: int,
        batch: int,
        src: int,
        now: float,
        local: NDArray[np.bool_],
        sending: float,
    ) -> tuple[float, float]:
        """Send a tensor to every device that needs it.

        Returns when blocking transfers end, and ``sending`` plus the seconds of handing it over.
        """
        problem, last_arrival_s = self.problem, self.last_arrival_s
        size = float(problem.graph.tensor_bytes[tensor])
        blocked_until = now
        arrives: dict[int, float] = {}
        for op in self.consumers[tensor]:
            dst = self._at(batch, op)
            if dst not in arrives:
                arrives[dst] = now
                if not local[dst]:
                    channel = problem.link_channel[src, dst]
                    begin = max(now, self.channel_free[channel]) if problem.contention else now
                    finish = begin + problem.transfer_s(tensor, src, dst)
                    self.channel_free[channel] = arrives[dst] = finish
                    self.sent.append((tensor, batch, src, dst, begin, finish))
                    sending += float(problem.link_send_s[src, dst])
                    sending += size * float(problem.link_send_s_per_byte[src, dst])
                    free = self.running[dst] is None and self.free_at[dst] <= now
                    if free and last_arrival_s[dst] < now:
                        sending += float(problem.link_wake_s[src, dst])
                    last_arrival_s[dst] = finish
                    if problem.link_blocking[src, dst]:
                        blocked_until = max(blocked_until, finish)
            key = (batch, int(op))
            self.missing[key] -= 1
            self.arrival[key] = max(self.arrival[key], arrives[dst])
            if self.missing[key] == 0:
                self._make_ready(key)
        return blocked_until, sending

    def _at(self, batch: int, op: int) -> int:
        return int(self.phases[batch % len(self.phases), op])

    def _make_ready(self, key: tuple[int, int]) -> None:
        device = self._at(*key)
        self.waiting[device][key] = self.arrival[key]
        heapq.heappush(self.events, (self.arrival[key], device))

    def _choose(self, device: int, now: float) -> tuple[int, int] | None:
        """What a free device takes next, if anything."""
        waiting, schedule = self.waiting[device], self.schedule
        if schedule is None:
            here = [key for key, at in waiting.items() if at <= now]
            if self.problem.ready_order == "arrival":
                return min(here, key=lambda k: (waiting[k], k), default=None)
            priority = self.problem.priority
            return min(here, key=lambda k: (k[0], priority[k[1]]), default=None)
        if self.next_entry[device] == len(schedule.order[device]):
            return None
        op, batch = map(int, schedule.order[device][self.next_entry[device]])
        key = (batch, op)
        if waiting.get(key, np.inf) > now:
            return None
        self.next_entry[device] += 1
        return key

    def peak_bytes(
        self, transfers: NDArray[np.int32], transfer_start_s: Floats, transfer_end_s: Floats
    ) -> NDArray[np.int64]:
        """int64 ``[D]``: each stored tensor is a set of intervals; the largest sum of them.

        At home a tensor lives in its root's memory, which is held while any tensor in it is; a
        copy sent elsewhere is its own.
        """
        problem, start, end = self.problem, self.start, self.end
        g, m = problem.graph, self.num_batches
        at = self.phases[np.arange(m) % len(self.phases)]  # [M, N] devices
        spans: dict[tuple[int, int, int], list[tuple[float, float]]] = {}

        def users(tensor: int, batch: int, device: int | np.intp) -> NDArray[np.int32]:
            all_users = g.use_dst[g.use_ptr[tensor] : g.use_ptr[tensor + 1]]
            return all_users[at[batch, all_users] == device]

        def hold(
            stored: int, batch: int, device: int | np.intp, begin: float, until: float
        ) -> None:
            spans.setdefault((stored, batch, int(device)), []).append((begin, until))

        for tensor in range(g.num_tensors):
            src, root = int(g.tensor_src[tensor]), int(g.tensor_root[tensor])
            for batch in range(m):
                if src >= 0:
                    home = int(at[batch, src])
                    until = max(end[batch, [src, *users(tensor, batch, home)]])
                    if tensor in g.output_tensor:
                        until = end[batch].max()
                    sent = (transfers[:, :2] == (tensor, batch)).all(axis=1)
                    until = max(until, *transfer_end_s[sent], 0.0)
                    hold(root, batch, home, start[batch, src], until)
                    continue
                for cpu in np.flatnonzero(self.shares_host):
                    if len(here := users(tensor, batch, cpu)):
                        hold(root, batch, cpu, self.admitted_s[batch], max(end[batch, here]))
        for (tensor, batch, _, b), begin in zip(transfers.tolist(), transfer_start_s, strict=True):
            stored = tensor if g.tensor_src[tensor] >= 0 else int(g.tensor_root[tensor])
            hold(stored, batch, b, begin, max(end[batch, users(tensor, batch, b)]))

        peak = problem.resident_bytes_on(self.placement)
        for device in range(problem.num_devices):
            changes = []
            for (stored, _, where), lives in spans.items():
                if where == device:
                    size = int(g.tensor_bytes[stored])
                    for begin, until in _union(lives):
                        changes += [(begin, 1, size), (until, 0, -size)]
            if problem.profile.workspace_bytes is not None:
                for batch, op in np.argwhere(at == device):
                    size = int(problem.profile.workspace_bytes[op])
                    changes += [(start[batch, op], 1, size), (end[batch, op], 0, -size)]
            now = most = 0
            for _, _, change in sorted(changes):
                now += change
                most = max(most, now)
            peak[device] += most
        return peak


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same times."""
    merged: list[tuple[float, float]] = []
    for begin, until in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((begin, until))
    return merged
