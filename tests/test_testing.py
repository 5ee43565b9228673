from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from placement import schedulers
from placement.cluster import Cluster, Device, Link
from placement.planners import load
from placement.problem import Placement, Problem, Solution
from placement.schedule import Schedule
from placement.simulator import evaluate, score
from placement.testing import (
    ContractError,
    check_cluster,
    check_planner,
    check_policy,
    check_scheduler,
    check_workload,
    small_placements,
    small_problems,
)


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


calls = iter(range(10**6))


def fickle(problem: Problem, solution: Solution) -> Solution:
    """Another device every time it is asked."""
    if np.isinf(problem.compute_s).any():
        return solution
    placement = np.full(problem.num_ops, next(calls) % problem.num_devices, np.int32)
    value_s = float(score(problem, placement)[0])
    why = {} if np.isfinite(value_s) else {"infeasible": "1 byte too many"}
    return Solution(placement, value_s, None, {"seconds": 0.0, "evaluations": 1} | why)


BROKEN = {
    "returned a list": lambda p, s: [s],
    "placement has shape": lambda p, s: replace(s, placement=s.placement[:-1]),
    "the rest of its colocation group": split_group,
    "but the simulator says": lambda p, s: replace(s, value_s=s.value_s * 0.99),
    "lower_bound_s = .* is above": lambda p, s: replace(s, lower_bound_s=s.value_s * 1.01),
    "stats lack 'seconds'": lambda p, s: without(s, "seconds"),
    "stats lack 'evaluations'": lambda p, s: without(s, "evaluations"),
    "has no numbers": lambda p, s: without(s, "infeasible"),
    "s and infeasible": lambda p, s: stats(s, infeasible="needs 3 bytes, has 2"),
    "the curve does not improve": lambda p, s: stats(s, curve=[(0.0, 1, 1.0), (1.0, 2, 2.0)]),
    "the curve ends at": lambda p, s: stats(s, curve=[(0.0, 1, s.value_s + 1)]),
    r"gave \[.*\] and then \[": fickle,
}


def test_what_is_correct_passes() -> None:
    check_planner(Altered(lambda p, s: s))
    check_policy(Chance())
    check_workload("tiny_branches")
    check_workload(linear)


@pytest.mark.parametrize("message", BROKEN)
def test_each_broken_promise_is_told(message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_planner(Altered(BROKEN[message]))


def test_a_budget_that_is_exceeded_is_told() -> None:
    greedy = Altered(lambda p, s: stats(s, evaluations=11), evaluations=10)
    with pytest.raises(ContractError, match="used 11 evaluations, 10 were allowed"):
        check_planner(greedy)
    check_planner(Altered(fickle, seconds=30.0))  # with one of seconds two runs may differ


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


# --- schedulers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reordered:
    """A correct scheduler whose order is then altered."""

    change: Any

    def __call__(self, problem: Problem, placement: Placement, num_microbatches: int) -> Schedule:
        return self.change(schedulers.load("gpipe")(problem, placement, num_microbatches))


def refuse(*_: Any) -> Schedule:
    raise schedulers.SchedulerError("only on Sundays")


BROKEN_ORDERS = {
    "returned list": lambda s: list(s.order),
    "is for 9 micro-batches": lambda s: replace(s, num_microbatches=9),
    "is scheduled 0 times": lambda s: replace(s, order=tuple(r[:-1] for r in s.order)),
    "deadlocks": lambda s: replace(s, order=tuple(r[::-1] for r in s.order)),
    "which is placed on": lambda s: replace(s, order=s.order[::-1]),
    "refused every case; the last time: only on Sundays": refuse,
}


@pytest.mark.parametrize("name", schedulers.names())
def test_every_scheduler_keeps_its_promises(name: str) -> None:
    options = {}
    if name == "searched":
        pytest.importorskip("ortools")
        options = {"seconds": 0.1}
    check_scheduler(schedulers.load(name, **options))


@pytest.mark.parametrize("message", BROKEN_ORDERS)
def test_each_broken_promise_of_a_scheduler_is_told(message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_scheduler(Reordered(BROKEN_ORDERS[message]), small_placements()[-1:])


def test_a_scheduler_that_changes_its_mind_is_told() -> None:
    # On one device micro-batches may follow each other in either order: nothing else is wrong.
    problem, placement = next(c for c in small_placements() if c[0].num_devices == 1)
    turns = iter(range(10**6))

    @dataclass(frozen=True)
    class Fickle:
        def __call__(self, p: Problem, where: Placement, num: int) -> Schedule:
            batches = range(num) if next(turns) % 2 else reversed(range(num))
            rows = [(op, m) for m in batches for op in range(p.num_ops)]
            return Schedule((np.array(rows, np.int32),), num)

    with pytest.raises(ContractError, match="another order the second time"):
        check_scheduler(Fickle(), [(problem, placement)])


def test_what_schedulers_are_asked_to_order_is_varied() -> None:
    cases = small_placements()
    assert {len(set(p.tolist())) for _, p in cases} > {1}
    assert any(problem.graph.is_backward.any() for problem, _ in cases)
    for problem, placement in cases:
        problem.check_placement(placement)


# --- policies ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chance:
    """Every group anywhere it can run; the greedy placement is the first device that can."""

    change: Any = None

    def place(self, problem: Problem, warm: Any = None, num_samples=0, seed=0) -> Placement:
        rng = np.random.default_rng(seed)
        allowed = np.isfinite(problem.group_compute_s)
        rows = [allowed.argmax(axis=1)]
        for _ in range(num_samples):
            rows.append(np.where(allowed, rng.random(allowed.shape), -1.0).argmax(axis=1))
        placements = np.array(rows, np.int32)[:, problem.graph.group]
        return placements if self.change is None else self.change(placements, seed)


BROKEN_POLICIES = {
    "placements are int64": lambda rows, seed: rows.astype(np.int64),
    r"int32 \(3, 5\), not int32 \(4, 5\)": lambda rows, seed: rows[: min(3, len(rows))],
    "there are 2": lambda rows, seed: rows + 1,
    "cannot run on": lambda rows, seed: np.ones_like(rows) if rows.shape[1] == 6 else rows,
    "the same seed gave other": lambda rows, seed: (rows + next(calls)) % 2,
    "the greedy placement was": lambda rows, seed: (rows + seed) % 2,
}


@pytest.mark.parametrize("message", BROKEN_POLICIES)
def test_each_broken_promise_of_a_policy_is_told(message: str) -> None:
    wanted = {"cannot run on": "unlike"}.get(message, "equal")
    problems = [p for p in small_problems() if p.graph.name == wanted]
    with pytest.raises(ContractError, match=message):
        check_policy(Chance(BROKEN_POLICIES[message]), problems)


# --- workloads and clusters ----------------------------------------------------------------------


def linear(training: bool = False, seeded: bool = True) -> Any:
    torch = pytest.importorskip("torch")
    if seeded:
        torch.manual_seed(0)
    return torch.nn.Linear(4, 4).train(training), (torch.ones(2, 4),)


def test_each_broken_promise_of_a_workload_is_told() -> None:
    with pytest.raises(ContractError, match="in training mode"):
        check_workload(lambda: linear(training=True))
    with pytest.raises(ContractError, match="'weight' is drawn anew"):
        check_workload(lambda: linear(seeded=False))


def described(links: list[tuple[str, str]], **device: Any) -> Cluster:
    devices = (Device("a", memory_bytes=8), Device("b", **device))
    return Cluster("two", devices, tuple(Link(x, y, 1e-5, 1e9) for x, y in links))


def test_a_cluster_says_what_predictions_need() -> None:
    both = [("a", "b"), ("b", "a")]
    check_cluster(described(both, memory_bytes=8))
    check_cluster(described([], memory_bytes=8))  # links are measured
    for links, device, message in (
        (both[:1], {"memory_bytes": 8}, r"no link for \[\('b', 'a'\)\]"),
        (both + both[:1], {"memory_bytes": 8}, "more than one link"),
        (both, {}, r"no memory_bytes for \['b'\]"),
    ):
        with pytest.raises(ContractError, match=message):
            check_cluster(described(links, **device))
