"""The best of many random placements."""

from __future__ import annotations

from dataclasses import dataclass

from placement.problem import Planner, Problem, Solution
from placement.search.evaluation import FromStart, can_move, random_choice


@dataclass(frozen=True)
class RandomSearch(FromStart):
    """Best of N: a start, then groups on devices drawn uniformly."""

    start: str | Planner | None = "single_device"

    def __call__(self, problem: Problem) -> Solution:
        search, rng = self.begin(problem)
        while search.left and can_move(problem):
            search.costs([random_choice(rng, search.allowed) for _ in range(32)])
        return search.solution()
