"""The nearest placement of whole units, for programs that place layers or modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.planners.contiguous_dp import ContiguousDp
from placement.problem import ROUNDING, Placement, Problem, ProblemError
from placement.simulator import score, simulate
from placement.timeline import Timeline


def best_whole(
    problem: Problem,
    unit: ArrayLike,
    known: Placement,
    devices: Collection[int],
    fixed: Mapping[int, int] | None = None,
) -> Placement:
    """The placement int32 ``[N]`` of least objective that keeps units on one device each.

    It is ``known``, int32 ``[N]``, or if that is better the best split into consecutive units,
    one for each of ``devices`` (``ContiguousDp``). Where neither fits into memory, it is the
    split, which lacks few bytes.

    Args:
        unit: int ``[N]`` the unit of each operator, numbered in the order they run; colocation
            groups of the graph do not count: a view may be elsewhere than its base, as a copy.
        fixed: unit -> its device, of units that have no choice.
    """
    numbers = np.arange(problem.num_devices)
    seconds = np.where(np.isin(numbers, [*devices]), problem.compute_s, np.inf)
    for u, device in (fixed or {}).items():
        seconds[np.ix_(np.equal(unit, u), numbers != device)] = np.inf
    profile = replace(problem.profile, compute_s=seconds)
    try:
        free = _grouped(replace(problem, profile=profile), unit)
    except ProblemError:  # a unit that runs nowhere as a whole
        return known
    cut = ContiguousDp()(free).placement
    before, after = score(free, [known, cut])
    return known if before <= after * (1 + ROUNDING) and np.isfinite(before) else cut


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
    profile = replace(problem.profile, graph_fingerprint="")  # it knows the graph's own groups
    return replace(problem, graph=replace(problem.graph, group=group), profile=profile)
