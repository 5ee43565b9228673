"""Topological levels, each balanced over the devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.graph import levels
from placement.planners import Among
from placement.problem import Problem, Solution
from placement.search.evaluation import Choice, Search
from placement.search.list_schedule import ListSchedule, first_that_fits


@dataclass(frozen=True)
class LevelBalance:
    """Level balance (Wang et al., J. Frontiers of Computer Science and Technology 18(1), 2024).

    The level of an operator is the length of the longest path to it. Level by level, longest
    operator first, each goes to the device whose load *in this level* stays least; the load is
    compute plus the transfers of inputs that are elsewhere.

    Deviations: a colocation group is placed whole, at its first level; unlike devices have
    their own seconds; of devices that are equally good the one with the smaller total load
    wins. Without the paper's pipeline between levels: that is ``level_pipeline``.
    """

    among = Among(quick=True, loads=4, calls=5)

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        level = levels(problem.graph.edges, problem.num_ops)
        first_that_fits(search, lambda activations: (balance(problem, level, activations), None))
        return search.solution(num_levels=int(level.max()) + 1)


def balance(
    problem: Problem,
    level: NDArray[np.int32],
    activations: int = 0,
    team: NDArray[np.bool_] | None = None,
) -> Choice:
    """int32 ``[G]``: each level balanced over the devices, longest operators first.

    Args:
        level: int32 ``[N]``.
        activations: how often a device must hold what its groups produce.
        team: bool ``[L, D]`` the devices of each level, all of them if None; a group that none
            of them can run goes to any that can.
    """
    longest = problem.group_compute_s.min(axis=1)[problem.graph.group]
    order = np.lexsort((np.arange(problem.num_ops), -longest, level))
    schedule = ListSchedule(problem, activations)
    schedule.balance(order, level, team)
    return schedule.choice
