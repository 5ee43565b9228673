"""A plan of a planner's answer: with what is predicted of it, what is proved, and where from."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from placement.bounds import lower_bound, lower_bounds
from placement.objective import Objective
from placement.plan import parts
from placement.plan.document import Plan
from placement.plan.parts import Fallback, Measured, PlanError, Predicted, stages_of, whole_modules
from placement.problem import Placement, Problem, Solution
from placement.tools.files import as_data
from placement.tools.ownership import version
from placement.tools.strict import explain

if TYPE_CHECKING:
    from placement.schedule import Schedule
    from placement.timeline import Timeline


def make_plan(
    problem: Problem,
    solution: Solution,
    *,
    planner: str,
    parameters: Mapping[str, Any] | None = None,
    schedule: Schedule | None = None,
    workload: str | None = None,
    measured: Measured | None = None,
) -> Plan:
    """The plan of a planner's answer, with predictions, proved bounds and fallback.

    Args:
        planner: its name, e.g. ``heft``; ``parameters``: its fields (see ``parameters_of``).
        schedule: an order, if not the one that the planner decided (``solution.schedule``).
            One of a single sample also is the ``priority`` of samples in a pipeline.
        workload: how ``placement.workloads.load`` finds the module.

    Raises:
        PlanError: the placement does not fit (with the bytes), or a name cannot be written.
        ProblemError: the placement is not one of this problem.
    """
    graph, devices = problem.graph, problem.cluster.device_names
    placement = problem.check_placement(solution.placement)
    order = schedule or solution.schedule
    solution = replace(solution, schedule=order)
    single, stream = _simulated(problem, placement, order)
    peak = _peak_bytes(problem, placement, single, stream)
    # Of a call alone, one micro-batch was judged: so many are in flight as there is memory for.
    is_call = problem.objective is Objective.LATENCY and order is None
    while is_call and problem.max_in_flight > 1 and memory_excess(problem, peak):
        problem = replace(problem, max_in_flight=problem.max_in_flight - 1)
        single, stream = _simulated(problem, placement, order)
        peak = _peak_bytes(problem, placement, single, stream)
    if excess := memory_excess(problem, peak):
        raise PlanError(f"the placement does not fit: {'; '.join(excess)}")
    problem = replace(problem, max_phases=max(problem.max_phases, len(np.atleast_2d(placement))))
    phases = [[devices[d] for d in row] for row in np.atleast_2d(placement)]
    pieces = parts.PiecesInfo.of(graph)
    assignment, *later = (dict(zip(graph.op_name, on, strict=True)) for on in phases)
    try:
        return Plan(
            schema_version=3 if pieces else 2 if later else 1,
            planner=parts.PlannerInfo(name=planner, parameters=dict(parameters or {})),
            graph=parts.GraphInfo.of(graph, workload),
            cluster=parts.ClusterInfo.of(problem),
            objective=problem.objective.value,
            num_microbatches=stream.num_microbatches,
            max_in_flight=problem.max_in_flight,
            second_j=problem.second_j,
            assignment=assignment,
            phases=tuple({op: d for op, d in on.items() if d != assignment[op]} for on in later),
            priority=_priority(problem, single, order),
            order=None if order is None else order.named(graph, devices),
            pieces=pieces,
            stages=stages_of(graph.op_name, phases[0]),
            device_map=whole_modules(graph.op_module, phases[0]),
            predicted=_predicted(problem, solution, single, stream, peak),
            measured=measured,
            lower_bound_s=_proved_bounds(problem, solution),
            limits=parts.Limits(
                memory_bytes=_per_device(problem, problem.memory_bytes),
                headroom_bytes=_per_device(problem, problem.memory_bytes - peak),
            ),
            fallback=_fallback(problem),
            provenance=parts.Provenance(
                version=version(),
                git_commit=_git_commit(),
                created=now(),
                profile=as_data(problem.profile.provenance),
            ),
        )
    except ValidationError as error:
        raise PlanError(f"graph {graph.name!r}: {explain(error, parts.Strict)}") from error


def _simulated(
    problem: Problem, placement: Placement, schedule: Schedule | None
) -> tuple[Timeline, Timeline]:
    """One micro-batch, in the slowest phase; and many. An order of a single one is that of both."""
    from placement.simulator import simulate

    stream = simulate(problem, placement, schedule)
    if _is_single(schedule):
        return stream, stream
    singles = [simulate(problem, phase, None, 1) for phase in np.atleast_2d(placement)]
    return max(singles, key=lambda line: line.latency_s), stream


def _is_single(schedule: Schedule | None) -> bool:
    return schedule is not None and schedule.num_microbatches == 1


def _priority(problem: Problem, single: Timeline, schedule: Schedule | None) -> tuple[int, ...]:
    """``[N]`` ranks: the problem's, or those of an order of a single micro-batch."""
    if not _is_single(schedule):
        return tuple(problem.priority.tolist())
    return tuple(np.argsort(np.lexsort((single.end_s[0], single.start_s[0]))).tolist())


def _peak_bytes(
    problem: Problem, placement: Placement, single: Timeline, stream: Timeline
) -> NDArray[np.int64]:
    """int64 ``[D]``; objectives that are formulas count parameters only."""
    if problem.objective.is_analytic:
        return problem.param_bytes_on(placement)
    assert single.peak_bytes is not None and stream.peak_bytes is not None
    return np.maximum(single.peak_bytes, stream.peak_bytes)


def _predicted(
    problem: Problem,
    solution: Solution,
    single: Timeline,
    stream: Timeline,
    peak: NDArray[np.int64],
) -> Predicted:
    """``value_s`` is of the order of the plan, which need not be the planner's."""
    from placement.simulator import value_in, value_of

    if problem.objective.is_analytic:
        value_s = value_of(problem, solution)
    else:
        value_s = value_in(problem, single if problem.objective is Objective.LATENCY else stream)
    overhead_s = problem.overhead_s(solution.placement)
    many = stream.num_microbatches
    return Predicted(
        value_s=value_s + problem.called_s(solution.placement),
        latency_s=single.latency_s + overhead_s,
        period_s=stream.period_s,
        overhead_s=overhead_s,
        energy_j=None if stream.energy_j is None else stream.energy_j / many,
        busy_s=_per_device(problem, stream.busy_s / many),
        peak_bytes=_per_device(problem, peak),
    )


def _proved_bounds(problem: Problem, solution: Solution) -> dict[str, float]:
    """Of each objective, as ``proved_bound_s``."""
    bounds = lower_bounds(_in_order(problem, solution.schedule))
    if problem.max_phases == 1:
        own_s = solution.lower_bound_s or 0.0
        bounds[problem.objective] = max(bounds[problem.objective], own_s)
    if Objective.LATENCY in bounds:
        bounds[Objective.LATENCY] += problem.overhead_s()
    return bounds


def proved_bound_s(problem: Problem, solution: Solution) -> float:
    """The best lower bound of the objective that is proved, by the planner or in general.

    Planners prove theirs for placements with one phase.
    """
    problem = _in_order(problem, solution.schedule)
    phases = max(problem.max_phases, len(np.atleast_2d(solution.placement)))
    if phases > 1:
        return lower_bound(replace(problem, max_phases=phases)) + problem.called_s()
    return max(lower_bound(problem), solution.lower_bound_s or 0.0) + problem.called_s()


def _in_order(problem: Problem, schedule: Schedule | None) -> Problem:
    """With the micro-batches of a schedule, of which all are in flight."""
    if schedule is None:
        return problem
    count = schedule.num_microbatches
    return replace(problem, num_microbatches=count, max_in_flight=count)


def memory_excess(problem: Problem, peak_bytes: Any) -> list[str]:
    """One line for each device whose peak, int64 ``[D]``, is above its memory."""
    return [
        f"device {d.name!r} needs {int(need):,} bytes{' of pinned host memory' * bool(d.streams)}, "
        f"it has {most:,}"
        for d, need, most in zip(
            problem.cluster.devices, peak_bytes, problem.memory_bytes.tolist(), strict=True
        )
        if need > most
    ]


def parameters_of(planner: Any) -> dict[str, Any]:
    """A planner's fields as JSON (what JSON cannot hold, as text)."""
    names = [f.name for f in fields(planner)] if is_dataclass(planner) else []
    return as_data({name: getattr(planner, name) for name in names})


def now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _fallback(problem: Problem) -> Fallback | None:
    """The single device with the best objective that can hold everything."""
    from placement.simulator import evaluate, score

    able = np.flatnonzero(np.isfinite(problem.compute_s).all(axis=0))
    if len(able) == 0:
        return None
    placements = np.repeat(able[:, None], problem.num_ops, axis=1)
    value, values = score(problem, placements), evaluate(problem, placements)
    value += [problem.called_s(d) for d in able]
    best = int(value.argmin())
    if not np.isfinite(value[best]):
        return None
    return Fallback(
        device=problem.cluster.device_names[able[best]],
        value_s=float(value[best]),
        latency_s=float(values.latency_s[best]) + problem.overhead_s(able[best]),
        period_s=float(values.period_s[best]),
    )


def _per_device(problem: Problem, values: NDArray[Any]) -> dict[str, Any]:
    return dict(zip(problem.cluster.device_names, values.tolist(), strict=True))


def _git_commit() -> str | None:
    """The commit of the checkout that runs, with ``+changes`` if it was changed; else None."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        answer = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
