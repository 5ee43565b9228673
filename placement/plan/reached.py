"""How much of what a machine can do a placement does, where a model does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from placement.bounds import lower_bound
from placement.objective import Objective
from placement.problem import Problem, Solution
from placement.tools.shown import seconds as shown

if TYPE_CHECKING:
    from placement.timeline import Timeline


def reached(problem: Problem, solution: Solution) -> str:
    """A sentence, for people: the bound beside the answer, and what devices wait for.

    Empty where every device has memory for all parameters, and for objectives in other units.
    """
    own = problem.objective
    if own not in (Objective.LATENCY, Objective.PERIOD) or not _is_short(problem):
        return ""
    from placement.simulator import simulate

    called_s = problem.called_s(solution.placement)
    value_s, bound_s = solution.value_s + called_s, least_s(problem) + problem.called_s()
    if not problem.cluster.streaming:  # else a planner's own is of this size of buffers
        bound_s = max(bound_s, solution.lower_bound_s or 0.0)
    count = 1 if own is Objective.LATENCY and solution.schedule is None else None
    line = simulate(problem, np.atleast_2d(solution.placement)[0], solution.schedule, count)
    if bound_s <= 0 or not np.isfinite(value_s):
        return ""
    return (
        f"{min(bound_s / value_s, 1.0):.0%} of what this machine can do ({shown(bound_s)} at "
        f"least); {'; '.join(_waits(problem, line))}"
    )


def least_s(problem: Problem) -> float:
    """A lower bound of the objective, whatever the size of buffers."""
    most = max(int(problem.copied_bytes.max()), 1)
    devices = tuple(
        d if d.streams is None else replace(d, buffer_bytes=most) for d in problem.cluster.devices
    )
    if devices == problem.cluster.devices:
        return lower_bound(problem)
    return lower_bound(replace(problem, cluster=replace(problem.cluster, devices=devices)))


def _is_short(problem: Problem) -> bool:
    """Whether a device streams, or some cannot hold all parameters."""
    total = int(problem.graph.param_bytes.sum())
    return bool(problem.cluster.streaming) or bool((problem.memory_bytes < total).any())


def _waits(problem: Problem, line: Timeline) -> list[str]:
    """Of each device that has work, the share of the run that it computes, and waits."""
    run, names = line.makespan_s, line.device_names
    edges = np.unique(
        np.concatenate([
            line.start_s.ravel(), line.end_s.ravel(), line.copy_start_s, line.copy_end_s,
            [line.begin_s, line.begin_s + run],
        ])
    )  # fmt: skip
    middle, took = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    inside = (middle > line.begin_s) & (middle < line.begin_s + run)
    used = np.unique(line.device_of).tolist()
    busy = {
        d: _during(middle, line.start_s[line.device_of == d], line.end_s[line.device_of == d])
        for d in used
    }
    text = []
    for d in used:
        mine = [s for s in problem.cluster.streaming if problem.worker[s] == d]
        rows = np.isin(line.copies[:, 1], mine)
        copies = _during(middle, line.copy_start_s[rows], line.copy_end_s[rows])
        others = np.any([busy[e] for e in used if e != d], axis=0) if len(used) > 1 else ~inside
        idle = inside & ~busy[d]

        def part(when: NDArray[np.bool_]) -> str:
            return f"{took[when].sum() / run:.0%}"

        words = [f"{names[d]} computes {part(inside & busy[d])} of the time"]
        if rows.any():
            words.append(f"waits for parameters {part(idle & copies & ~others)}")
            words.append(f"for others {part(idle & others)}")
            words.append(f"its link copies {part(inside & copies)}")
        text.append(", ".join(words))
    return text


def _during(
    when: NDArray[np.float64], start: NDArray[np.float64], end: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """bool, as ``when``: inside any of the spans, of which no two overlap."""
    if not len(start):
        return np.zeros(len(when), bool)
    order = np.lexsort((end, start))  # of those that begin together, one without length is first
    at = np.searchsorted(start[order], when, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (when < end[order][at])
    return inside
