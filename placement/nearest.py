"""The nearest placement of whole units, for programs that place layers or modules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.planners.contiguous_dp import ContiguousDp
from placement.problem import ROUNDING, Placement, Problem
from placement.simulator import score, simulate
from placement.timeline import Timeline


def best_whole(problem: Problem, unit: ArrayLike, candidates: ArrayLike) -> Placement:
    """The placement int32 ``[N]`` with the least objective that keeps units on one device each.

    Of ``candidates`` and of all splits into consecutive units, one for each device
    (``ContiguousDp``). The first one stays unless another is better. Where nothing fits into
    memory, it is one that lacks few bytes.

    Args:
        unit: int ``[N]`` the unit of each operator, numbered in the order they run; colocation
            groups of the graph do not count: a view may be elsewhere than its base, as a copy.
        candidates: int ``[B, N]`` placements that keep units on one device each.
    """
    free = _grouped(problem, unit)
    cut = ContiguousDp()(free).placement
    rows = np.concatenate([np.atleast_2d(np.asarray(candidates, np.int32)), cut[None]])
    values = score(free, rows)
    best = int(values.argmin())
    if not np.isfinite(values[best]):
        return cut
    return rows[0] if values[0] <= values[best] * (1 + ROUNDING) else rows[best]


def simulate_split(
    problem: Problem, placement: ArrayLike, num_microbatches: int | None = None
) -> Timeline:
    """``simulate`` of a placement that may split colocation groups.

    A view on another device than its base is a copy there: the base is sent, and the view has
    memory of the base's size.
    """
    free = _grouped(problem, np.arange(problem.num_ops))
    return simulate(free, placement, num_microbatches=num_microbatches)


def _grouped(problem: Problem, unit: ArrayLike) -> Problem:
    """The problem with units in the place of colocation groups."""
    group: NDArray[np.int32] = np.unique(unit, return_inverse=True)[1].astype(np.int32)
    profile = replace(problem.profile, graph_fingerprint="")
    return replace(problem, graph=replace(problem.graph, group=group), profile=profile)
