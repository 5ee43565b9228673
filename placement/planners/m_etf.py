"""Baechi's m-ETF: the operator that can start first, on the device where it can."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners import Among
from placement.problem import Problem, Solution
from placement.search.evaluation import Search
from placement.search.list_schedule import schedule_that_fits


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

    among = Among(quick=True, calls=7)

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        nobody = np.full(problem.num_ops, -1, np.int32)
        filled = schedule_that_fits(
            search, lambda schedule: schedule.place_first_to_start(problem.upward_rank_s, nobody)
        )
        return search.solution(makespan_s=filled.makespan_s)
