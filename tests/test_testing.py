from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from placement.planners import load
from placement.problem import Problem, Solution
from placement.simulator import evaluate
from placement.testing import ContractError, check_planner, small_problems


@dataclass(frozen=True)
class Altered:
    """A correct planner whose answer is then altered."""

    change: Any
    evaluations: int | None = None
    seconds: float | None = None

    def __call__(self, problem: Problem) -> Solution:
        return self.change(problem, load("single_device")(problem))


def stats(solution: Solution, **changes: Any) -> Solution:
    return replace(solution, stats=solution.stats | changes)


def without(solution: Solution, key: str) -> Solution:
    return replace(solution, stats={k: v for k, v in solution.stats.items() if k != key})


def split_group(problem: Problem, solution: Solution) -> Solution:
    if problem.graph.num_groups == problem.num_ops:
        return solution
    placement = solution.placement.copy()
    placement[0] = (placement[0] + 1) % problem.num_devices
    return replace(solution, placement=placement)


def forever_worse(problem: Problem, solution: Solution) -> Solution:
    curve = [(0.0, 1, 1.0), (1.0, 2, 2.0)]
    return stats(solution, curve=curve)


calls = iter(range(10**6))


def fickle(problem: Problem, solution: Solution) -> Solution:
    """Another device every time it is asked."""
    device = next(calls) % problem.num_devices
    placement = np.full(problem.num_ops, device, np.int32)
    return (
        load("single_device")(problem)
        if np.isinf(problem.compute_s).any()
        else Solution(placement, *_value(problem, placement))
    )


def _value(problem: Problem, placement: np.ndarray) -> tuple[float, None, dict[str, Any]]:
    from placement.simulator import score

    value = float(score(problem, placement)[0])
    why = {} if np.isfinite(value) else {"infeasible": "1 byte too many"}
    return value, None, {"seconds": 0.0, "evaluations": 1} | why


BROKEN = {
    "returned a list": lambda p, s: [s],
    "the placement is not an array": lambda p, s: replace(s, placement=s.placement.tolist()),
    "is int64, not int32": lambda p, s: replace(s, placement=s.placement.astype(np.int64)),
    "placement has shape": lambda p, s: replace(s, placement=s.placement[:-1]),
    "its colocation group on": split_group,
    "but the simulator says": lambda p, s: replace(s, value_s=s.value_s * 0.99),
    "lower_bound_s = .* is above": lambda p, s: replace(s, lower_bound_s=s.value_s * 1.01),
    "stats lack 'seconds'": lambda p, s: without(s, "seconds"),
    "stats lack 'evaluations'": lambda p, s: without(s, "evaluations"),
    "has no numbers": lambda p, s: without(s, "infeasible"),
    "s and infeasible": lambda p, s: stats(s, infeasible="needs 3 bytes, has 2"),
    "the curve does not improve": forever_worse,
    "the curve ends at": lambda p, s: stats(s, curve=[(0.0, 1, s.value_s + 1)]),
    r"gave \[.*\] and then \[": fickle,
}


def test_a_correct_planner_passes() -> None:
    check_planner(Altered(lambda p, s: s))


@pytest.mark.parametrize("message", BROKEN)
def test_each_broken_promise_is_told(message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_planner(Altered(BROKEN[message]))


def test_a_budget_that_is_exceeded_is_told() -> None:
    greedy = Altered(lambda p, s: stats(s, evaluations=11), evaluations=10)
    with pytest.raises(ContractError, match="used 11 evaluations, 10 were allowed"):
        check_planner(greedy)


def test_with_a_seconds_budget_two_runs_may_differ() -> None:
    check_planner(Altered(fickle, seconds=30.0))


def test_small_problems_are_what_they_say() -> None:
    problems = small_problems()
    assert {p.objective for p in problems} == {"period", "latency"}
    assert max(p.num_ops for p in problems) <= 6
    by_name = {p.graph.name: p for p in problems}
    assert not by_name["unlike"].supported.all()
    assert by_name["unlike"].graph.num_groups < by_name["unlike"].num_ops

    def feasible(name: str) -> np.ndarray:
        problem = by_name[name]
        grid = np.indices((2,) * problem.num_ops).reshape(problem.num_ops, -1).T
        return evaluate(problem, grid).feasible

    assert feasible("equal").all()
    assert feasible("tight").any() and not feasible("tight")[[0, -1]].any()
    assert not feasible("impossible").any()


def test_own_problems_can_be_given() -> None:
    problem = small_problems()[0]
    with pytest.raises(ContractError, match=r"on 'equal' \(period\): lower_bound_s"):
        check_planner(Altered(BROKEN["lower_bound_s = .* is above"]), [problem])
