"""The best of many random placements."""

from __future__ import annotations

from dataclasses import dataclass

from placement.planners import check_least
from placement.problem import Planner, Problem, Solution
from placement.search.evaluation import begin, can_move, random_choice


@dataclass(frozen=True)
class RandomSearch:
    """Best of N: a start, then groups on devices drawn uniformly.

    Attributes:
        start: planner that gives the first placement (a name or a planner), or ``random``;
            its evaluations count, and it has at most a quarter of the seconds.
        seconds, evaluations: budget; with neither, 2,000 evaluations.
        seed: of the draws.
    """

    start: str | Planner = "single_device"
    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 0, "seed")

    def __call__(self, problem: Problem) -> Solution:
        search, rng = begin(self, problem)
        while search.left and can_move(problem):
            search.costs([random_choice(rng, search.allowed) for _ in range(32)])
        return search.solution()
