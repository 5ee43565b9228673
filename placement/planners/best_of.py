"""The best answer of several planners."""

from __future__ import annotations

from dataclasses import dataclass

from placement.planners._search import Search
from placement.problem import Problem, Solution, lower_bounds


@dataclass(frozen=True)
class BestOf:
    """Runs ``planners`` one after another and keeps the best: the start of every search.

    Heuristics complement each other: list scheduling fails where memory is tight, contiguous
    splits fail on wide graphs. ``stats["winner"]`` names the planner that won,
    ``stats["values_s"]`` has the value of each, and ``lower_bound_s`` is
    ``placement.problem.lower_bounds``.

    Attributes:
        planners: names, as ``placement.planners.load`` takes them.
        seconds, evaluations: budget of all together; None is no limit. Planners for which
            nothing is left are not run; of the seconds that are left each has an equal share.
    """

    planners: tuple[str, ...] = ("single_device", "heft", "contiguous_dp", "round_robin")
    seconds: float | None = None
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, self.seconds, self.evaluations)
        values: dict[str, float] = {}
        winner = ""
        for i, name in enumerate(self.planners):
            if search.left:
                before = search.best_cost
                values[name] = search.run(name, 1.0 / (len(self.planners) - i)).value_s
                winner = name if search.best_cost < before else winner
        bound = lower_bounds(problem)[problem.objective]
        return search.solution(bound, winner=winner, values_s=values)
