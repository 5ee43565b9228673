"""One planner on the problems of a suite: how far from the optimum it stays.

What a planner says of its answer does not count: value and times are the simulator's, and a value
below what is proved to be possible is an error of ours, or of the bound, and is told by name.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from placement.bounds import lower_bounds
from placement.objective import Objective
from placement.planners import solve
from placement.problem import Planner, Problem, Solution
from placement.report.table import geometric_interval, geometric_mean
from placement.simulator import simulate, value_of
from placement.workloads.suites import Case

_TOLERANCE = 1e-9  # of values that are sums of the same seconds in another order


@dataclass(frozen=True)
class BenchRow:
    """What a planner answered on one problem; times in the file's unit, None where there is none.

    ``gap`` is value over best known, or over the lower bound where nothing better is known, less
    1. ``device`` and ``start`` have an entry for each operation in the file's order; ``start`` is
    None for objectives that no timetable is of. ``note``: why there is no answer.
    """

    problem: str
    devices: int
    value: float | None = None
    lower_bound: float | None = None
    best_known: float | None = None
    gap: float | None = None
    evaluations: int | None = None
    seconds: float = 0.0
    feasible: bool = False
    device: list[int] | None = None
    start: list[float] | None = None
    objective: str = ""
    note: str = ""

    @property
    def optimal(self) -> bool:
        """Whether the value is proved to be the least possible."""
        return (
            self.value is not None
            and self.lower_bound is not None
            and self.value <= self.lower_bound * (1 + _TOLERANCE)
        )

    @property
    def unread(self) -> bool:
        """Whether there is no answer because its file is damaged."""
        return not self.objective

    @property
    def impossible(self) -> str:
        """What the value should not be below; empty if it is not.

        Below a proved bound is a defect, of the bound or of ours. So it is below the best known,
        unless somebody has found a better schedule.
        """
        floors = {"proved bound": self.lower_bound, "best known": self.best_known}
        for what, floor in floors.items():
            if self.value is not None and self.value < (floor or 0.0) * (1 - _TOLERANCE):
                return f"the {what}, {floor}"
        return ""


@dataclass(frozen=True)
class BenchMean:
    """Over ``count`` rows: geometric mean of the gaps, and its 95 % interval.

    Rows are those that have an answer, and where the best known is known of any, those of which it
    is. ``optimal`` is a share of all rows.
    """

    gap: float | None
    low: float | None
    high: float | None
    count: int
    optimal: float
    unsolved: int


def unread(case: Case, why: str) -> BenchRow:
    """The row of a case whose file is damaged."""
    bounds = {"lower_bound": _plain(case.lower_bound), "best_known": _plain(case.best_known)}
    return BenchRow(case.problem, case.devices or 0, **bounds, note=why)


def measure(case: Case, planner: Planner) -> BenchRow:
    """The row of ``planner`` on a case.

    Raises:
        FormatError: the case's file is damaged.
    """
    problem = case.load()
    bound = case.lower_bound
    if bound is None:  # an LP: not where more is known
        bound = lower_bounds(problem)[problem.objective] / case.unit_s
    facts: dict[str, Any] = {
        "problem": case.problem,
        "devices": problem.num_devices,
        "objective": str(problem.objective),
        "best_known": _plain(case.best_known),
    }
    # Going through all that was imported takes longer than a decode: no collection is to do it.
    gc.freeze()
    began = time.perf_counter()
    try:
        solution = solve(planner, problem)
        problem.check_placement(solution.placement)
        took_s = float(solution.stats.get("seconds", time.perf_counter() - began))
        value = value_of(problem, solution) / case.unit_s
        note = "" if np.isfinite(value) else str(solution.stats.get("infeasible", "does not fit"))
    except ValueError as error:  # not for this problem
        value, took_s, solution, note = np.inf, time.perf_counter() - began, None, str(error)
    finally:
        gc.unfreeze()
    if solution is None or not np.isfinite(value):
        return BenchRow(**facts, lower_bound=_plain(bound), seconds=took_s, note=note)
    if solution.lower_bound_s is not None and solution.lower_bound_s <= value * case.unit_s:
        bound = max(bound, solution.lower_bound_s / case.unit_s)
    if abs(bound - round(bound)) <= _TOLERANCE * bound:  # proved in seconds, to rounding
        bound = round(bound)
    best = bound if case.best_known is None else case.best_known
    count = solution.stats.get("evaluations")
    device, start = _in_file_order(problem, solution, case.unit_s)
    return BenchRow(
        **facts,
        value=_plain(value),
        lower_bound=_plain(bound),
        gap=value / best - 1 if best > 0 else None,
        evaluations=None if count is None else int(count),
        seconds=took_s,
        feasible=True,
        device=device,
        start=start,
    )


def _in_file_order(
    problem: Problem, solution: Solution, unit_s: float
) -> tuple[list[int], list[float] | None]:
    """Device and start of each operation; starts are of the timetable that the value is of."""
    order = problem.profile.provenance.get("file_order", range(problem.num_ops))
    device, begin = [0] * problem.num_ops, [0.0] * problem.num_ops
    start_s = np.zeros(problem.num_ops)
    if problem.objective is Objective.LATENCY:
        start_s = simulate(problem, solution.placement, solution.schedule, 1).start_s[0]
    for n, at in enumerate(order):
        device[at], begin[at] = int(solution.placement[n]), _plain(start_s[n] / unit_s)
    return device, begin if problem.objective is Objective.LATENCY else None


def _plain(value: Any) -> Any:
    """A whole number as one: what the file has."""
    if value is None or not float(value).is_integer():
        return None if value is None else float(value)
    return int(value)


def mean_of(rows: Sequence[BenchRow]) -> BenchMean:
    """What the rows come to; without a gap where none has an answer."""
    answered = [row for row in rows if row.gap is not None]
    solved = [row for row in answered if row.best_known is not None] or answered
    optimal = sum(row.optimal for row in rows) / max(1, len(rows))
    unsolved = sum(not row.feasible for row in rows)
    if not solved:
        return BenchMean(None, None, None, 0, optimal, unsolved)
    ratios = [1 + row.gap for row in solved if row.gap is not None]
    low, high = geometric_interval(ratios)
    return BenchMean(geometric_mean(ratios) - 1, low - 1, high - 1, len(solved), optimal, unsolved)


def answer(suite: str, planner: str, rows: Sequence[BenchRow], **facts: Any) -> dict[str, Any]:
    """What machines read; the keys are a contract."""
    mean = mean_of(rows)
    return {
        "suite": suite,
        "planner": planner,
        **facts,
        "gap": mean.gap,
        "gap_interval": None if mean.gap is None else [mean.low, mean.high],
        "optimal": mean.optimal,
        "unsolved": mean.unsolved,
        "rows": [asdict(row) for row in rows],
    }
