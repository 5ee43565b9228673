"""Deal the operators out like cards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.problem import Problem, Solution
from placement.search.evaluation import Search


@dataclass(frozen=True)
class RoundRobin:
    """Colocation group k, in operator order, goes to device ``k mod D``.

    Where that device cannot run it, the next one (cyclically) that can.
    """

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        groups, devices = search.allowed.shape
        turn = (np.arange(groups)[:, None] + np.arange(devices)) % devices  # [G, D]
        able = np.take_along_axis(search.allowed, turn, axis=1)
        search.costs(turn[np.arange(groups), able.argmax(axis=1)])
        return search.solution()
