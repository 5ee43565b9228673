"""Baechi's m-TOPO: fill one device after another in topological order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners import Among
from placement.problem import Problem, Solution
from placement.search.evaluation import Choice, Search
from placement.search.list_schedule import ListSchedule, first_that_fits, produced_bytes


@dataclass(frozen=True)
class MTopo:
    """m-TOPO (Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020).

    Operators in topological order go to the first device until it holds its share, then to the
    next one. The share is the bytes of everything divided by the number of devices, plus those
    of the largest operator, and never more than the device's memory.

    Deviations: a colocation group is placed whole, at its first operator; an operator that the
    current device cannot run goes to the next one (cyclically) that can.
    """

    among = Among(quick=True, loads=7)

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        first_that_fits(search, lambda activations: (_fill(problem, activations), None))
        return search.solution()


def _fill(problem: Problem, activations: int) -> Choice:
    g, count = problem.graph, problem.num_devices
    weight = produced_bytes(problem) + g.per_group(g.op_param_bytes)
    # Python's integers: the sum of a share and a memory size may exceed 64 bits.
    share = int(weight.sum()) // count + int(weight.max())
    capacity = [min(share, int(b)) for b in problem.memory_bytes]
    used = [0] * count
    schedule, current = ListSchedule(problem, activations), 0
    for group in range(g.num_groups):
        while current < count - 1 and used[current] + weight[group] > capacity[current]:
            current += 1
        able = np.flatnonzero(schedule.able(group))
        device = int(able[((able - current) % count).argmin()])
        used[device] += int(weight[group])
        schedule.hold(group, device)
    return schedule.choice
