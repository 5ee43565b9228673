"""``Row``: one planner on one workload, predicted and measured, as tables and files have it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from placement.objective import Objective

R = TypeVar("R")
SINGLE = "single:"  # how names of single-device placements begin


@dataclass(frozen=True)
class Row:
    """One planner with one seed on one workload; seconds throughout, None where not known.

    Attributes:
        planner: its name; ``single:<device>`` for the placements on one device.
        seed: None for a planner without one, which runs once.
        placement_id: equal for equal placements, None without an answer.
        feasible: supported everywhere and within memory.
        value_s: the objective in the simulator, inf where infeasible.
        latency_s, period_s: predicted, inf where infeasible. energy_j: too, per micro-batch; None
            where infeasible, or power unknown.
        measured_latency_s, measured_period_s: medians of ``num_rounds`` interleaved rounds;
            ``..._iqr_s``: their interquartile ranges.
        latency_error, period_error: ``predicted / measured - 1``.
        speedup, measured_speedup: latency or period (the objective's) of the best single
            device over this one's; above 1 is faster.
        bound_s: best proved lower bound of the objective over all planners, and its ``gap``,
            ``value_s / bound_s - 1``.
        plan_s, evaluations: what planning cost.
        calibration_error: by which share predictions of placements miss what runs
            (``Profile.error``); None where none ran for the profile.
        overhead_s: what a call takes besides its first operator to its last, of which latencies
            here are; those of plans have it (``Problem.overhead_s``).
        energy_source: whether the watts behind ``energy_j`` are ``measured`` or ``declared``.
        pareto: no other feasible row of the workload has a predicted latency, period and energy
            (where known) that are all as small and one of them smaller.
        note: why there is no answer, or what the planner said of it (``stats["message"]``).
    """

    workload: str
    planner: str
    seed: int | None
    objective: str
    num_ops: int
    num_devices: int
    placement_id: str | None
    feasible: bool
    value_s: float
    latency_s: float
    period_s: float
    energy_j: float | None = None
    measured_latency_s: float | None = None
    measured_latency_iqr_s: float | None = None
    measured_period_s: float | None = None
    measured_period_iqr_s: float | None = None
    num_rounds: int = 0
    latency_error: float | None = None
    period_error: float | None = None
    speedup: float | None = None
    measured_speedup: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    plan_s: float = 0.0
    evaluations: int | None = None
    note: str = ""
    energy_source: str | None = None
    pareto: bool = False
    calibration_error: float | None = None
    overhead_s: float | None = None

    @property
    def measured_s(self) -> float | None:
        """The objective as it was measured; None where it was not. Joules never are."""
        if self.objective == Objective.ENERGY:
            return None
        is_latency = "latency" in self.objective
        return self.measured_latency_s if is_latency else self.measured_period_s

    @property
    def reached_s(self) -> float:
        """The objective, measured where it was."""
        return self.value_s if self.measured_s is None else self.measured_s


def groups(rows: Iterable[R], *names: str) -> dict[Any, list[R]]:
    """Rows by the value of a field (of several: by the tuple), in the order of the rows."""
    parts: dict[Any, list[R]] = {}
    for row in rows:
        key = tuple(getattr(row, name) for name in names)
        parts.setdefault(key if len(names) > 1 else key[0], []).append(row)
    return parts
