"""Graph partitioning with METIS."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.planners import PlannerError, check_least
from placement.problem import Problem, Solution
from placement.search.coarsen import edge_seconds
from placement.search.evaluation import Choice, Search
from placement.tools.ownership import needing


@dataclass(frozen=True)
class Metis:
    """Multilevel k-way partition (Karypis, Kumar, SIAM J. Sci. Comput. 20(1), 1998).

    Vertices are colocation groups weighed by seconds, edges by mean transfers. METIS cuts
    the graph, without directions, into one part per device, which weighs in proportion to the
    speed of the device; parts then go to devices such that their seconds add up to the least.

    Deviations: METIS knows neither memory nor support: what a part's device cannot run goes to
    the device that runs it fastest; where the result does not fit in memory it says so.

    Attributes:
        seed: of METIS.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 0, "seed")

    def __call__(self, problem: Problem) -> Solution:
        """Raises: PlannerError, the optional package pymetis is missing."""
        with needing("metis", "planner 'metis' needs the package pymetis", PlannerError):
            import pymetis
        search = Search(problem)
        part, cut = _partition(pymetis, problem, self.seed)
        search.costs(_assign(problem, part))
        return search.solution(edge_cut=cut)


def _partition(pymetis: Any, problem: Problem, seed: int) -> tuple[NDArray[np.int32], int]:
    """The part of each group int32 ``[G]``, and the weight of the cut edges."""
    g = problem.graph
    if problem.num_devices == 1:
        return np.zeros(g.num_groups, np.int32), 0
    able = np.isfinite(problem.group_compute_s)
    mean = np.where(able, problem.group_compute_s, 0.0).sum(axis=1) / able.sum(axis=1)
    ends = np.sort(g.group[g.edges].reshape(-1, 2), axis=1)
    outer = ends[:, 0] != ends[:, 1]
    pairs, at = np.unique(ends[outer], axis=0, return_inverse=True)
    weight = _whole(np.bincount(at.ravel(), edge_seconds(problem)[outer], len(pairs)))
    both = np.concatenate([pairs, pairs[:, ::-1]])
    order = np.lexsort((both[:, 1], both[:, 0]))
    total = np.where(able, problem.group_compute_s, mean[:, None]).sum(axis=0)
    speed = 1.0 / np.maximum(total, 1e-300)
    with _silent():
        cut, part = pymetis.part_graph(
            problem.num_devices,
            pymetis.CSRAdjacency(
                np.searchsorted(both[order, 0], np.arange(g.num_groups + 1)),
                both[order, 1].astype(np.int64),
            ),
            vweights=_whole(mean),
            eweights=np.tile(weight, 2)[order],
            tpwgts=(speed / speed.sum()).tolist(),
            recursive=False,
            options=pymetis.Options(seed=seed),
        )
    return np.array(part, np.int32), int(cut)


@contextmanager
def _silent() -> Iterator[None]:
    """METIS complains on standard output, from C, where parts stay empty: not in our output."""
    flush = ctypes.CDLL(None).fflush if os.name == "posix" else lambda _: None
    sys.stdout.flush()
    flush(None)
    stdout = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)


def _whole(weights: Any) -> NDArray[np.int64]:
    """int64, as METIS takes whole numbers: at least 1 each, the largest is a million."""
    w = np.asarray(weights, dtype=np.float64)
    largest = w.max(initial=0.0) or 1.0
    return np.maximum(1, np.rint(w / largest * 10**6)).astype(np.int64)


def _assign(problem: Problem, part: NDArray[np.int32]) -> Choice:
    """Parts to devices, one to one, with the least sum of seconds; support is obeyed."""
    from scipy.optimize import linear_sum_assignment

    able = np.isfinite(problem.group_compute_s)
    penalty = 1.0 + 1e3 * float(np.where(able, problem.group_compute_s, 0.0).sum())
    cost = np.zeros((problem.num_devices, problem.num_devices))
    np.add.at(cost, part, np.where(able, problem.group_compute_s, penalty))
    device = linear_sum_assignment(cost)[1].astype(np.int32)[part]
    bad = ~able[np.arange(len(part)), device]
    fastest = problem.group_compute_s.argmin(axis=1)
    return np.where(bad, fastest, device).astype(np.int32)
