"""The critical path on one device, everything else where it ends first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.graph import topological_order
from placement.planners import Among
from placement.problem import Problem, Solution
from placement.search.evaluation import Search
from placement.search.list_schedule import Floats, schedule_that_fits


@dataclass(frozen=True)
class CriticalPathFirst:
    """CPOP (Topcuoglu, Hariri, Wu, IEEE TPDS 13(3), 2002).

    The priority of an operator is its upward plus its downward rank; those of the largest
    priority form the critical path, which goes whole to the device that runs it fastest. Ready
    operators are taken by falling priority; those off the path go where they end first, in
    the earliest gap that is long enough. ``stats["makespan_s"]`` is the length of this
    schedule, ``stats["critical_ops"]`` the length of the path.

    Deviations: those of ``Heft``; of several equal paths one is followed, by smallest number;
    what the path's device cannot run, or has no room for, is treated like the rest.
    """

    among = Among(quick=True, calls=4)

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        priority = problem.upward_rank_s + problem.downward_rank_s
        path = critical_path(problem, priority)
        able = np.isfinite(problem.compute_s[path])
        seconds = np.where(able, problem.compute_s[path], 0.0)
        # Fastest for all of it; a device that cannot run a part of it only if none can.
        device = int(np.lexsort((seconds.sum(axis=0), -able.sum(axis=0)))[0])
        device_of = np.full(problem.num_ops, -1, np.int32)
        device_of[path] = device
        order = topological_order(problem.graph.edges, problem.num_ops, -priority)
        filled = schedule_that_fits(
            search, lambda schedule: schedule.place(order, device_of=device_of)
        )
        return search.solution(makespan_s=filled.makespan_s, critical_ops=len(path))


def critical_path(problem: Problem, priority: Floats) -> list[int]:
    """The operators of one longest path, from its first to its last."""
    g = problem.graph
    first = np.searchsorted(g.edges[:, 0], np.arange(problem.num_ops + 1))
    entries = np.setdiff1d(np.arange(problem.num_ops), g.edges[:, 1])
    op = int(entries[np.argmax(priority[entries])])
    path = [op]
    while first[op] < first[op + 1]:
        users = g.edges[first[op] : first[op + 1], 1]
        # Ranks are sums in different orders: equal ones differ by rounding.
        close = priority[users] >= priority[users].max() * (1 - 1e-12)
        op = int(users[np.argmax(close)])
        path.append(op)
    return path
