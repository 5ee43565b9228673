"""Genetic search with biased random keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners import PlannerError, check_shares
from placement.problem import Problem, Solution
from placement.search.evaluation import FromStart, can_move


@dataclass(frozen=True)
class Brkga(FromStart):
    """Biased random-key genetic algorithm (Gonçalves and Resende, J. Heuristics 17, 2011).

    The search inside REGAL (Paliwal et al., ICLR 2020), where a network proposes its
    distributions; here they are uniform. An individual has a key in [0, 1) for each group and
    device; a group goes to the device with the largest key among those that can run it. A
    generation is the ``elite`` best, ``mutants`` new ones, and children of an elite and
    another parent, that take each group's keys from the elite one with probability ``bias``.

    Deviations: keys decide the placement only, not the order of transfers, and the keys of one
    individual of the first generation decode to the placement of ``start``.

    Attributes:
        population: individuals of a generation, at least 4.
        elite, mutants: shares of the population, together below 1.
        bias: probability of the elite parent's keys, 0.5..1.
    """

    population: int = 64
    elite: float = 0.2
    mutants: float = 0.15
    bias: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares(self, "elite", "mutants", "bias")

    def __call__(self, problem: Problem) -> Solution:
        """Raises: PlannerError, a population too small for its shares."""
        num_elite = max(1, round(self.elite * self.population))
        num_mutants = max(1, round(self.mutants * self.population))
        if self.population < 4 or num_elite + num_mutants >= self.population:
            raise PlannerError(
                f"brkga: population = {self.population} leaves no children beside {num_elite} "
                f"elite and {num_mutants} mutants; use at least 4, and smaller shares"
            )
        search, rng = self.begin(problem)
        assert search.best is not None
        shape = search.allowed.shape
        keys = np.empty((self.population, *shape))
        for k in range(self.population if search.left else 1):
            keys[k] = rng.random(shape)
        keys[0, np.arange(shape[0]), search.best] += 1.0
        fitness = np.full(self.population, np.inf)
        fitness[0] = search.best_cost
        fresh, generations = 1, 0
        while search.left and can_move(problem):
            decoded = np.empty((self.population - fresh, shape[0]), np.int32)
            count = 0
            while count < len(decoded) and search.left:  # one by one: a large problem takes long
                decoded[count] = np.where(search.allowed, keys[fresh + count], -1.0).argmax(axis=1)
                count += 1
            cost = search.costs(decoded[:count])
            fitness[fresh : fresh + len(cost)] = cost
            if fresh + len(cost) < self.population:  # the budget has ended
                break
            order = np.argsort(fitness, kind="stable")
            keys, fitness = keys[order], fitness[order]
            num_children = self.population - num_elite - num_mutants
            first = keys[rng.integers(num_elite, size=num_children)]
            second = keys[rng.integers(num_elite, self.population, size=num_children)]
            biased = rng.random((num_children, shape[0], 1)) < self.bias
            keys[num_elite:] = np.concatenate(
                [np.where(biased, first, second), rng.random((num_mutants, *shape))]
            )
            fitness[num_elite:] = np.inf
            fresh, generations = num_elite, generations + 1
        return search.solution(generations=generations)
