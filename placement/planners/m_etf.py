"""Baechi's m-ETF: the operator that can start first, on the device where it can."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.planners._list_schedule import ListSchedule, first_that_fits
from placement.planners._search import Choice, Search
from placement.problem import Problem, Solution


@dataclass(frozen=True)
class MEtf:
    """m-ETF (Jeon et al., Baechi, SoCC 2020), after ETF (Hwang et al., SIAM J. Comput. 1989).

    Of all ready operators and devices with room, the pair that can start first is taken, again
    and again; a device runs what it was given in that order, without insertion.
    ``stats["makespan_s"]`` is the length of this schedule.

    Deviations: of equal starts the operator of highest upward rank wins, and then the device
    where it (with its colocation group) ends first, so that unlike devices are told apart;
    a colocation group is fixed to the device of its first operator; where the simulator finds
    that activations do not fit, they are counted and the schedule is made again.
    """

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        nobody = np.full(problem.num_ops, -1, np.int32)
        makespan_s = 0.0

        def plan(activations: int) -> Choice:
            nonlocal makespan_s
            schedule = earliest_task_first(problem, activations, nobody)
            makespan_s = schedule.makespan_s
            return schedule.choice

        first_that_fits(search, plan)
        return search.solution(makespan_s=makespan_s)


def earliest_task_first(
    problem: Problem, activations: int, favourite: NDArray[np.int32]
) -> ListSchedule:
    """ETF where a device waits for the favourite child of what it ran last.

    ``favourite`` is int32 ``[N]``: the consumer that each operator wants beside it, or -1. As
    long as that child is not placed, another operator gets the device only once it is
    *urgent*: its inputs have arrived everywhere, so that no other device needs be waited for.
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
        taken = (awaited >= 0) & (awaited != rows[:, None])
        start = np.where(taken, np.maximum(start, arrive_s[rows].max(axis=1)[:, None]), start)
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
