"""Everything on one device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners import Among
from placement.problem import Problem, Solution
from placement.search.evaluation import Search, single_devices


@dataclass(frozen=True)
class SingleDevice:
    """Every device is tried and the best one kept; of few evaluations, the fastest are tried.

    What a device cannot run goes to the first device that can, its colocation group with it.

    Attributes:
        seconds, evaluations: budget; None is no limit.
    """

    among = Among(quick=True, loads=1, calls=1, share=0.1)

    seconds: float | None = None
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, self.seconds, self.evaluations)
        choices = single_devices(problem)
        groups = np.arange(problem.graph.num_groups)
        fastest = problem.group_compute_s[groups, choices].sum(axis=1).argsort(kind="stable")
        best = fastest[search.costs(choices[fastest]).argmin()]
        return search.solution(device=problem.cluster.device_names[best])
