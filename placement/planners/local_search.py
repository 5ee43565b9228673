"""Hill climbing with restarts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners import check_least
from placement.problem import Problem, Solution
from placement.search.evaluation import (
    Choice,
    FromStart,
    Position,
    Search,
    can_move,
    moves,
    random_choice,
)


@dataclass(frozen=True)
class LocalSearch(FromStart):
    """First-improvement hill climbing over random moves (one group, or a run of groups).

    A move that changes nothing is accepted too: the slowest device alone decides the period,
    so most of the landscape is flat. After ``patience`` moves per (group, other device)
    without improvement it restarts from the best so far with some groups moved at random;
    how many is drawn log-uniformly, from one to all.

    Attributes:
        patience: restart after this many times ``G * (D - 1)`` moves without improvement.
    """

    patience: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 0, "patience")

    def __call__(self, problem: Problem) -> Solution:
        search, rng = self.begin(problem)
        restarts = 0
        if can_move(problem):
            here = Position(search)
            propose = moves(problem)
            num_moves = problem.graph.num_groups * (problem.num_devices - 1)
            stale = 0
            while search.left:
                if stale >= self.patience * num_moves:
                    restarts, stale = restarts + 1, 0
                    kicked = _kicked(search, rng)
                    here.go(kicked, search.cost(kicked))
                    continue
                cost = here.trial(*propose(rng, here.choice))
                stale = 0 if cost < here.cost else stale + 1
                if cost <= here.cost:
                    here.keep()
        return search.solution(restarts=restarts)


def _kicked(search: Search, rng: np.random.Generator) -> Choice:
    """The best choice so far with a random number of groups on random devices."""
    assert search.best is not None, "a restart follows a first climb"
    choice = search.best.copy()
    count = int(np.exp(rng.random() * np.log(len(choice) + 1)))
    groups = rng.choice(len(choice), count, replace=False)
    choice[groups] = random_choice(rng, search.allowed[groups])
    return choice
