"""Deal the operators out like cards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners import Among
from placement.problem import Problem, Solution
from placement.search.evaluation import Search


@dataclass(frozen=True)
class RoundRobin:
    """Colocation group k, in operator order, goes to device ``k mod D``.

    In a graph of pieces it is piece k of every operator, with what works for that piece; operators
    that are whole go to the first device. Where a device cannot run a group, the next one
    (cyclically) that can does.
    """

    among = Among(quick=True)

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        groups, devices = search.allowed.shape
        graph = problem.graph
        number = (
            np.arange(groups) if graph.piece is None else graph.per_group(graph.piece, np.maximum)
        )
        turn = (number[:, None] + np.arange(devices)) % devices  # [G, D]
        able = np.take_along_axis(search.allowed, turn, axis=1)
        search.costs(turn[np.arange(groups), able.argmax(axis=1)])
        return search.solution()
