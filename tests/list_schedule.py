"""List scheduling in plain Python: what the kernels of the planners must do, step by step."""

import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.problem import Problem, host_of
from placement.search.evaluation import Choice
from placement.search.list_schedule import Floats, produced_bytes, room_bytes

Intervals = tuple[list[float], list[float]]  # begins, ends
Devices = NDArray[np.intp]  # [K], in order


class Memory:
    """Bytes that devices hold while groups are placed one by one; tied parameters count once."""

    def __init__(self, problem: Problem, activations: int = 0) -> None:
        g = problem.graph
        self.problem, self._output_bytes = problem, activations * produced_bytes(problem)
        readers = g.group[g.param_use_op]
        self._reads = [set(g.param_use[readers == k].tolist()) for k in range(g.num_groups)]
        self._held: list[set[int]] = [set() for _ in range(problem.num_devices)]
        self._used = [0] * problem.num_devices

    def able(self, group: int) -> Devices:
        """Devices that can run ``group``: those with room, or all of them where none has."""
        can = np.flatnonzero(np.isfinite(self.problem.group_compute_s[group]))
        have = room_bytes(self.problem)
        room = [d for d in can if self._need(group, int(d)) <= have[d]]
        return np.array(room or can, np.intp)

    def hold(self, group: int, device: int) -> None:
        self._used[device] = self._need(group, device)
        self._held[device] |= self._reads[group]

    def _need(self, group: int, device: int) -> int:
        new = sorted(self._reads[group] - self._held[device])
        more = int(self.problem.graph.param_bytes[new].sum())
        return self._used[device] + int(self._output_bytes[group]) + more


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
        is_input = src < 0
        home = np.where(is_input, self._host, self.choice[g.group[src]])
        sent = transfers_s(self.problem, tensors, home)
        sent[is_input] = np.where(self._shares_host, 0.0, sent[is_input])
        sent += np.where(is_input, 0.0, self.finish_s[src])[:, None]
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
            for begins, ends in (self._runs[device], self._touching[device]):
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


def earliest_task_first(problem: Problem, activations: int, favourite: Choice) -> ListSchedule:
    """ETF where a device waits for the favourite child of what it ran last.

    ``favourite`` is int32 ``[N]``: the consumer that each operator wants beside it, or -1. As
    long as that child is not placed, another operator gets the device only once it is
    *urgent*: its inputs have arrived wherever it may run, so that no other device needs be waited
    for.
    """
    g, num_devices = problem.graph, problem.num_devices
    schedule = ListSchedule(problem, activations)
    missing = np.bincount(g.edges[:, 1], minlength=problem.num_ops)
    first = np.searchsorted(g.edges[:, 0], np.arange(problem.num_ops + 1))
    arrive_s = np.zeros((problem.num_ops, num_devices))  # when the inputs are on a device
    awaited = np.full(num_devices, -1)  # the favourite child a device waits for
    rank = problem.upward_rank_s
    ready: list[int] = []

    def release(op: int) -> None:
        arrive_s[op] = schedule.ready_s(op)
        ready.append(op)

    for entry in np.flatnonzero(missing == 0):
        release(int(entry))
    while ready:
        rows = np.array(ready)
        start = np.maximum(arrive_s[rows], schedule.free_s)
        group = g.group[rows]
        runs = np.isfinite(problem.group_compute_s[group])
        everywhere_s = np.where(runs, arrive_s[rows], 0.0).max(axis=1)[:, None]
        taken = (awaited >= 0) & (awaited != rows[:, None]) & (schedule.choice[group] < 0)[:, None]
        start = np.where(taken, np.maximum(start, everywhere_s), start)
        # What has no room anywhere it could start first is looked at when it is chosen.
        order = np.lexsort((rows, -rank[rows], _least(problem, schedule, rows, start)))
        op = int(rows[order[0]])
        able = schedule.able(op)
        at = start[order[0]]
        first_able = able[at[able] == at[able].min()]
        device = int(first_able[schedule.reach_s(op, first_able, at[first_able]).argmin()])
        schedule.place(op, device, float(at[device]))
        ready.remove(op)
        awaited[awaited == op] = -1
        child = int(favourite[op])
        free = child >= 0 and schedule.choice[g.group[child]] in (-1, device)
        awaited[device] = child if free else -1
        for user in g.edges[first[op] : first[op + 1], 1]:
            missing[user] -= 1
            if missing[user] == 0:
                release(int(user))
    return schedule


def _least(
    problem: Problem, schedule: ListSchedule, rows: NDArray[np.int64], start: NDArray[np.float64]
) -> NDArray[np.float64]:
    """float64 ``[R]``: the first start of each row on a device that it may go to."""
    fixed = schedule.choice[problem.graph.group[rows]]
    here = fixed[:, None] == np.arange(problem.num_devices)
    may = problem.supported[rows] & ((fixed < 0)[:, None] | here)
    return np.where(may, start, np.inf).min(axis=1)


def balance(problem: Problem, level: Choice, activations: int = 0, team: Any = None) -> Choice:
    """int32 ``[G]``: each level balanced over the devices, longest operators first."""
    g = problem.graph
    memory = Memory(problem, activations)
    choice = np.full(g.num_groups, -1, np.int32)
    total = np.zeros(problem.num_devices)
    longest = problem.group_compute_s.min(axis=1)[g.group]
    load, current = np.zeros(problem.num_devices), -1
    for op in np.lexsort((np.arange(problem.num_ops), -longest, level)):
        group = g.group[op]
        if choice[group] >= 0:
            continue
        if level[op] != current:
            load, current = np.zeros(problem.num_devices), level[op]
        cost = problem.group_compute_s[group].copy()
        tensors = g.in_tensor[g.in_ptr[op] : g.in_ptr[op + 1]]
        tensors = tensors[g.tensor_src[tensors] >= 0]
        for row in transfers_s(problem, tensors, choice[g.group[g.tensor_src[tensors]]]):
            cost += row
        able = memory.able(int(group))
        if team is not None and team[current, able].any():
            able = able[team[current, able]]
        least = (load + cost)[able]
        able = able[least == least.min()]
        device = int(able[(total + cost)[able].argmin()])
        choice[group] = device
        memory.hold(int(group), device)
        load[device] += cost[device]
        total[device] += cost[device]
    return choice
