"""The best of many random placements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners._search import (
    DEFAULT_EVALUATIONS,
    Search,
    can_move,
    random_choice,
    single_devices,
)
from placement.problem import Problem, Solution


@dataclass(frozen=True)
class RandomSearch:
    """Best of N: the single devices, then groups on devices drawn uniformly.

    Attributes:
        seconds, evaluations: budget; with neither, 2,000 evaluations.
        seed: of the draws.
    """

    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, self.seconds, self.evaluations, DEFAULT_EVALUATIONS)
        rng = np.random.default_rng(self.seed)
        search.costs(single_devices(problem))
        while search.left and can_move(problem):
            search.costs([random_choice(rng, search.allowed) for _ in range(32)])
        return search.solution()
