"""The cross-entropy method."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners import check_least, check_shares
from placement.problem import Problem, Solution
from placement.search.evaluation import FromStart, can_move


@dataclass(frozen=True)
class CrossEntropy(FromStart):
    """Cross-entropy method (Rubinstein 1999) with independent groups; the sampler of Post (2018).

    Every group has a distribution over the devices that can run it, at first a share ``trust``
    on the device of ``start`` and the rest uniform. Each generation is sampled from it, and it
    moves by ``rate`` towards how often the ``elite`` best have each device.

    Deviation from Post (Gao et al., NeurIPS 2018): no proximal policy gradient in between.

    Attributes:
        population: placements of a generation.
        elite: share of them that the distribution follows.
        rate: of the update, 0..1.
        trust: first probability of the start's device.
        floor: every device keeps this probability times the number of devices' inverse.
    """

    population: int = 64
    elite: float = 0.125
    rate: float = 0.3
    trust: float = 0.8
    floor: float = 0.005

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares(self, "elite", "rate", "trust", "floor")
        check_least(self, 2, "population")

    def __call__(self, problem: Problem) -> Solution:
        search, rng = self.begin(problem)
        assert search.best is not None
        uniform = search.allowed / search.allowed.sum(axis=1, keepdims=True)
        groups, devices = np.arange(len(uniform)), np.arange(uniform.shape[1])
        chance = (1.0 - self.trust) * uniform
        chance[groups, search.best] += self.trust
        num_elite = max(1, round(self.elite * self.population))
        generations = 0
        while search.left and can_move(problem):
            limit = ((1.0 - self.floor) * chance + self.floor * uniform).cumsum(axis=1)
            rows = np.empty((self.population, len(uniform)), np.int32)
            drawn = 0
            while drawn < len(rows) and search.left:  # one by one: a large problem takes long
                draw = rng.random((len(uniform), 1)) * limit[:, -1:]
                rows[drawn] = (limit <= draw).sum(axis=1)
                drawn += 1
            cost = search.costs(rows[:drawn])
            if len(cost) < self.population:  # the budget has ended
                break
            elite = rows[np.argsort(cost, kind="stable")[:num_elite]]
            often = (elite[:, :, None] == devices).mean(axis=0)
            chance = (1.0 - self.rate) * chance + self.rate * often
            generations += 1
        return search.solution(generations=generations)
