"""Any planner on a smaller problem."""

from __future__ import annotations

from dataclasses import dataclass

from placement.planners import Among, PlannerError, load
from placement.problem import Planner, Problem, Solution
from placement.search.coarsen import coarsen
from placement.search.evaluation import Search
from placement.search.planner import Budget, prepared


@dataclass(frozen=True)
class Coarsened:
    """Merge operators (``placement.search.coarsen``), plan what is left, undo the merging.

    The value is that of the whole problem; ``stats["coarse_value_s"]`` is what the planner
    was told. Its bound is not passed on: it holds for the coarse problem alone.

    Attributes:
        planner: a name or a planner.
        num_ops: merge down to this many operators, where that is possible
            (``stats["num_ops"]``).
        seconds, evaluations: budget of the planner if it has such fields; None leaves its own.
            One of the evaluations is that of the whole problem.
    """

    among = Among(late=True, times=15.0)

    planner: str | Planner = "contiguous_dp"
    num_ops: int = 100
    seconds: float | None = None
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        """Raises:
        PlannerError: no such planner, or ``evaluations`` below 2.
        ProblemError: ``num_ops`` is not positive.
        """
        if self.evaluations is not None and self.evaluations < 2:
            raise PlannerError(
                f"evaluations = {self.evaluations}: at least 2, one on the coarse problem "
                "and one on the whole"
            )
        search = Search(problem, self.seconds, self.evaluations)
        coarse, label = coarsen(problem, self.num_ops)
        seconds = None if self.seconds is None else max(1e-3, self.seconds - search.seconds)
        limits = Budget(seconds, None if self.evaluations is None else self.evaluations - 1)
        callee = load(self.planner) if isinstance(self.planner, str) else self.planner
        answer = prepared(callee, budget=limits)(coarse)
        choice = search.choice(answer.placement[..., label])
        search.consider(choice, 1 + int(answer.stats.get("evaluations", 1)))
        return search.solution(num_ops=coarse.num_ops, coarse_value_s=answer.value_s)
