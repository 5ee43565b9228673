"""What the simulator means, slowly and readably: an event heap over dictionaries."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.buffer import CALLS, Buffer
from placement.problem import Placement, Problem, host_of
from placement.schedule import Schedule
from placement.simulator.memory import memory_steps
from placement.simulator.predictions import beside, checked, durations, timeline_of
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
        run.copy(now)
        if run.num_admitted == run.num_batches and not run.unfinished:
            break
    sent = np.reshape(np.array(run.sent, float), (-1, 6))
    transfers = sent[:, :4].astype(np.int32), sent[:, 4], sent[:, 5]
    came = np.reshape(np.array(run.copied, float), (-1, 4))
    copies = came[:, :2].astype(np.int32), came[:, 2], came[:, 3]
    nothing = np.zeros(problem.num_devices, np.int64)
    ran = slice(run.num_batches)
    of = run.start[ran], run.end[ran], transfers, nothing, copies, run.round_s
    every = timeline_of(problem, np.atleast_2d(placed)[:num_batches], *of, are_calls=False)
    steps = memory_steps(problem, placed, every, run.window)
    timeline = timeline_of(problem, placed, *of, are_calls=run.num_batches > num_batches)
    return replace(timeline, peak_bytes=np.array([held.max() for _, held in steps]))


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
        self._fill_buffers(placed, num_batches)
        self.are_calls = num_batches == 1 and bool(self.buffers)
        if self.are_calls:  # what comes for the next call comes in this one
            self.num_batches = num_batches = CALLS
            self.window = 1
            if schedule is not None:
                calls = [np.array([0, m]) for m in range(CALLS)]
                orders = (np.concatenate([x + m for m in calls]) for x in schedule.order)
                self.schedule = Schedule(tuple(orders), CALLS)
        self.host, self.shares_host = host_of(problem)
        self.consumers = [g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]] for t in range(g.num_tensors)]
        self.produced = [g.out_tensor[g.out_ptr[i] : g.out_ptr[i + 1]] for i in range(n)]
        self.num_inputs = np.diff(g.in_ptr)
        self.start, self.end = np.empty((2, num_batches, n))
        self.sent: list[tuple[int, int, int, int, float, float]] = []
        self.events = [(0.0, 0)]  # (time, device): something may happen there
        self.missing: dict[tuple[int, int], int] = {}  # inputs that have not been sent off yet
        self.arrival: dict[tuple[int, int], float] = {}  # when the last known input arrives
        self.waiting: list[dict[tuple[int, int], float]] = [{} for _ in range(d)]
        self.running: list[tuple[int, int] | None] = [None] * d
        self.free_at = [0.0] * d  # end of the running operator or of blocking transfers
        self.last_arrival_s = [-1.0] * d  # of what was sent there
        self.channel_free = [0.0] * problem.num_channels
        self.next_entry = [0] * d
        self.unfinished: dict[int, int] = {}
        self.num_admitted = 0

    def _fill_buffers(self, placed: Placement, num_batches: int) -> None:
        """An empty buffer for each device that streams, and what copies for a micro-batch take."""
        problem, size = self.problem, self.problem.copied_bytes
        self.buffers: dict[int, Buffer] = {}  # by which of the devices that stream
        self.round_s = 0.0
        rooms = problem.buffers_of(placed)
        for k, d in enumerate(problem.cluster.streaming):
            uses = np.argsort(problem.priority)
            if self.schedule is not None:
                uses = np.array(self.schedule.order[problem.worker[d]])[:, 0]
            there = (placed[:, uses] == d).any(axis=0) & (size[uses] > 0)
            sizes = {int(op): int(size[op]) for op in uses[there]}
            if sizes:
                self.buffers[k] = Buffer(sizes, int(rooms[k]))
                one_by_one = min(self.window, num_batches) == len(placed) == 1
                if sum(sizes.values()) > rooms[k] and one_by_one:
                    seconds = sum(problem.copy_s[k, op] for op in sizes)
                    self.round_s = max(self.round_s, float(seconds))
        self.streamed_by = {d: k for k, d in enumerate(problem.cluster.streaming)}
        self.placed = placed
        self.here_s: dict[tuple[int, int], float] = {}  # when parameters are there
        self.copier_free: dict[int, float] = dict.fromkeys(self.buffers, 0.0)
        # Copies that wait for their turn on the link: operator, and where it comes to.
        self.coming: dict[int, deque[tuple[int, int]]] = {k: deque() for k in self.buffers}
        self.first_layout: list[tuple[int, int]] = []
        for k in self.buffers:
            self._launch(k)
        self.reserved: list[tuple[int, int] | None] = [None] * problem.num_devices
        self.copied: list[tuple[int, int, float, float]] = []

    def _buffer(self, key: tuple[int, int]) -> int | None:
        """Which device streams the parameters of the operator there; None: none does."""
        batch, op = key
        k = self.streamed_by.get(int(self.placed[batch % len(self.placed), op]))
        return k if k in self.buffers and op in self.buffers[k].sizes else None

    def _launch(self, k: int) -> None:
        """All copies that may begin, as far as is known, wait for their turn on the link."""
        buffer = self.buffers[k]
        while (came := buffer.copy()) is not None:
            self.coming[k].append((came.op, buffer.there[came.op]))
            self.here_s[k, came.op] = np.inf

    def copy(self, now: float) -> None:
        """Parameters begin to come, where nothing else does."""
        problem = self.problem
        for k, coming in self.coming.items():
            while coming and self.copier_free[k] <= now:
                op, to = coming.popleft()
                channel = problem.copy_channel[k]
                begin = max(now, self.channel_free[channel]) if problem.contention else now
                finish = begin + float(problem.copy_s[k, op])
                self.channel_free[channel] = self.copier_free[k] = finish
                self.copied.append((op, k, begin, finish))
                heapq.heappush(self.events, (finish, problem.cluster.streaming[k]))
                if self.buffers[k].there.get(op) == to:  # else it is overwritten, and comes again
                    self.here_s[k, op] = finish

    def _end_call(self, batch: int) -> None:
        """The last, if what is in the buffers is where it was after the first."""
        layout = [buffer.layout for buffer in self.buffers.values()]
        if batch == 0:
            self.first_layout = layout
        elif layout == self.first_layout:
            self.num_batches = batch + 1

    def admit(self, now: float) -> None:
        """Micro-batches begin where there is room, and their inputs are delivered."""
        g = self.problem.graph
        while self.num_admitted < self.num_batches and len(self.unfinished) < self.window:
            batch = self.num_admitted
            self.num_admitted += 1
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
        if (k := self._buffer(key)) is not None:
            self.buffers[k].give_back(op)
            self._launch(k)
        own, sending = np.arange(self.problem.num_devices) == device, 0.0
        for tensor in self.produced[op]:
            until, sending = self._deliver(int(tensor), batch, device, now, own, sending)
            self.free_at[device] = max(self.free_at[device], until, now + sending)
        if self.free_at[device] > now:
            heapq.heappush(self.events, (self.free_at[device], device))
        self.unfinished[batch] -= 1
        if self.unfinished[batch] == 0:
            del self.unfinished[batch]
            if self.are_calls:
                self._end_call(batch)

    def begin(self, now: float) -> None:
        """Free devices take what they run next."""
        begun = []
        for device in range(self.problem.num_devices):
            if self.running[device] is None and self.free_at[device] <= now:
                key = self.reserved[device]
                if key is None:
                    key = self._choose(device, now)
                    if key is None:
                        continue
                    del self.waiting[device][key]
                self.reserved[device] = key
                if (k := self._buffer(key)) is not None:
                    self.buffers[k].take(key[1])
                    self._launch(k)
                    if self.here_s[k, key[1]] > now:
                        continue  # it waits for its parameters
                self.reserved[device] = None
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
