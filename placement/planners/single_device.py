"""Everything on one device."""

from __future__ import annotations

from dataclasses import dataclass

from placement.problem import Problem, Solution
from placement.search.evaluation import Search, single_devices


@dataclass(frozen=True)
class SingleDevice:
    """Every device is tried and the best one kept.

    What a device cannot run goes to the first device that can, its colocation group with it.

    Attributes:
        seconds, evaluations: budget; None is no limit.
    """

    seconds: float | None = None
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, self.seconds, self.evaluations)
        costs = search.costs(single_devices(problem))
        return search.solution(device=problem.cluster.device_names[int(costs.argmin())])
