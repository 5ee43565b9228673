"""Heterogeneous earliest finish time: list scheduling with insertion."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from placement.planners._search import Search
from placement.problem import Problem, Solution
from placement.simulator import host_of


@dataclass(frozen=True)
class Heft:
    """HEFT (Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002).

    Operators are taken by falling upward rank; each goes to the device where it finishes
    first, in the earliest gap that is long enough. As in the paper, transfers do not wait
    for each other. ``stats["makespan_s"]`` is the length of HEFT's own schedule; the value
    is the simulator's, which lets channels be busy.

    Deviations: a colocation group is fixed to the device of its first operator, chosen by the
    finish of that operator plus the seconds of the rest of the group there; a device that
    cannot hold the group's parameters beside those it has is passed over while another can;
    HEFT minimises latency, whatever the problem's objective is.
    """

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        choice, makespan = _schedule(problem)
        search.costs(choice)
        return search.solution(makespan_s=makespan)


def _schedule(problem: Problem) -> tuple[np.ndarray, float]:
    """The device of each group int32 ``[G]``, and the makespan of HEFT's schedule."""
    g, num_devices = problem.graph, problem.num_devices
    devices = range(num_devices)
    host, shares_host = host_of(problem)
    seconds = problem.compute_s
    group_seconds = problem.group_compute_s
    params = _params_of_groups(problem)
    held = np.zeros((num_devices, len(g.param_bytes)), bool)
    choice = np.full(g.num_groups, -1, np.int32)
    finish = np.zeros(g.num_ops)
    begins: list[list[float]] = [[] for _ in devices]  # of the busy intervals, sorted
    ends: list[list[float]] = [[] for _ in devices]

    def ready(op: int, device: int) -> float:
        """When the last input of ``op`` is on ``device``."""
        latest = 0.0
        for tensor in g.in_tensor[g.in_ptr[op] : g.in_ptr[op + 1]]:
            src = g.tensor_src[tensor]
            if src >= 0:
                sent = finish[src] + problem.transfer_s(tensor, choice[g.group[src]], device)
            elif shares_host[device]:
                sent = 0.0
            else:
                sent = problem.transfer_s(tensor, host, device)
            latest = max(latest, sent)
        return latest

    for op in np.argsort(problem.priority):
        group = g.group[op]
        if choice[group] >= 0:
            able = [int(choice[group])]
        else:
            able = [d for d in devices if np.isfinite(group_seconds[group, d])]
            need = [g.param_bytes[held[d] | params[group]].sum() for d in able]
            fits = [d for d, x in zip(able, need, strict=True) if x <= problem.memory_bytes[d]]
            able = fits or able
        starts = [_gap(begins[d], ends[d], ready(op, d), seconds[op, d]) for d in able]
        first = choice[group] < 0
        # For a group that is placed already there is one device, and nothing to compare.
        reach = [
            s + (group_seconds[group, d] if first else 0.0)
            for s, d in zip(starts, able, strict=True)
        ]
        best = int(np.argmin(reach))
        device, start = able[best], starts[best]
        choice[group] = device
        held[device] |= params[group]
        finish[op] = start + seconds[op, device]
        at = bisect.bisect_right(begins[device], start)
        if finish[op] > start:  # what takes no time occupies nothing
            begins[device].insert(at, start)
            ends[device].insert(at, finish[op])
    return choice, float(finish.max())


def _params_of_groups(problem: Problem) -> np.ndarray:
    """bool ``[G, P]``: which parameters the operators of each group read."""
    g = problem.graph
    reads = np.zeros((g.num_groups, len(g.param_bytes)), bool)
    reads[g.group[g.param_use_op], g.param_use] = True
    return reads


def _gap(begins: list[float], ends: list[float], ready: float, length: float) -> float:
    """The earliest start >= ``ready`` of ``length`` free seconds between the busy intervals."""
    at = bisect.bisect_right(ends, ready)  # intervals before ``at`` are over
    start = ready
    while at < len(begins) and begins[at] < start + length:
        start = max(start, ends[at])
        at += 1
    return start
