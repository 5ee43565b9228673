"""Simulated annealing, cold and calibrated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from placement.planners import PlannerError
from placement.problem import Problem, Solution
from placement.search.evaluation import INFEASIBLE, FromStart, Position, can_move, moves


@dataclass(frozen=True)
class SimulatedAnnealing(FromStart):
    """Annealing (Kirkpatrick, Gelatt, Vecchi, Science 1983) over the moves of ``LocalSearch``.

    The temperature falls geometrically from the first to a hundredth of it, as a function of
    the budget spent: the budget is always used to the end. The first
    temperature is calibrated on the run itself: it is the one at which the median of the
    first 100 worsenings is accepted with probability ``accept``.

    Deviations: it starts cold, because a hot start forgets the placement it began with; half
    way it returns to the best so far.

    Attributes:
        accept: probability with which the median worsening is accepted at first, above
            0 and below 1.
    """

    accept: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 < self.accept < 1.0:
            raise PlannerError(
                f"simulated_annealing: accept = {self.accept} must be above 0 and below 1"
            )

    def __call__(self, problem: Problem) -> Solution:
        search, rng = self.begin(problem)
        first = 0.0
        if can_move(problem):
            here = Position(search)
            propose = moves(problem)
            worsenings: list[float] = []
            begun, returned = search.used, False
            while search.left:
                progress = (search.used - begun) / max(1.0 - begun, 1e-12)
                if progress > 0.5 and not returned and search.best is not None:
                    returned = True
                    here.go(search.best, search.best_cost)
                cost = here.trial(*propose(rng, here.choice))
                if here.cost < cost < INFEASIBLE and len(worsenings) < 100:
                    worsenings.append(cost - here.cost)
                    first = float(np.median(worsenings)) / -math.log(self.accept)
                temperature = first * 0.01**progress  # at last a hundredth
                # With probability exp(-worsening / temperature); never at temperature 0.
                limit = -temperature * math.log(1.0 - rng.random())
                if cost <= here.cost or cost - here.cost < limit:
                    here.keep()
        return search.solution(first_temperature_s=first)
