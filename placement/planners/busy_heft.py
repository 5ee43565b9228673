"""HEFT with channels that are busy, and a look at what follows."""

from __future__ import annotations

from dataclasses import dataclass

from placement.planners import Among, check_least
from placement.planners.heft import Heft
from placement.problem import Problem, Solution
from placement.search.evaluation import Search


@dataclass(frozen=True)
class BusyHeft:
    """The best of several ``heft`` in which transfers wait for their channel.

    What finishes first may leave much to do far away: each adds the optimistic cost table of PEFT
    (Arabnejad and Barbosa, IEEE TPDS 25(3), 2014) to the finish, with weights 0, 0.25 and 0.5.

    Attributes:
        seconds, evaluations: budget of all together; None is no limit.
    """

    among = Among(quick=True, calls=2, several=True)

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "evaluations")

    def __call__(self, problem: Problem) -> Solution:
        search, values = Search(problem, self.seconds, self.evaluations), {}
        for weight in (0.0, 0.25, 0.5):
            if search.left:
                values[str(weight)] = search.run(Heft(weight, busy=True), 1.0).value_s
        return search.solution(values_s=values)
