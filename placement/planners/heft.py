"""Heterogeneous earliest finish time: list scheduling with insertion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners._list_schedule import ListSchedule
from placement.planners._search import Search
from placement.problem import Problem, Solution


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
        schedule = ListSchedule(problem)
        for op in np.argsort(problem.rank_position):
            schedule.place_earliest(int(op))
        search.costs(schedule.choice)
        return search.solution(makespan_s=schedule.makespan_s)
