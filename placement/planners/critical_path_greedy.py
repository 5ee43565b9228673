"""Parts between key operators, corrected greedily along the critical path."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from placement.planners import Among, check_shares
from placement.problem import Placement, Problem, Solution
from placement.search.evaluation import (
    DEFAULT_EVALUATIONS,
    Search,
    single_devices,
)
from placement.simulator import simulate

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class CriticalPathGreedy:
    """Key-operator selection and critical-path greedy correction (Shang, thesis, 2023).

    *Key operators* are the compute-dense ones (longest first, until they make up ``dense`` of
    the seconds) and the branching ones. The graph is cut at them: the parts are chains. Each
    part goes to the device that is predicted to run it fastest. Then the critical path of the
    predicted timeline is walked, and a part on it moves to another device where that lowers
    the predicted value; the walk is repeated until it moves nothing.

    Deviations: the start is the best of that split and the single devices; parts that share a
    colocation group are moved together; any number of devices, not a CPU and a GPU; the
    critical path is that of one micro-batch, whatever objective must fall.

    Attributes:
        dense: share of the seconds that the compute-dense operators make up, 0..1.
        beat: value that is worth the budget: where, after a quarter of it, the pace so far would
            not lead below this in the rest, it ends. None: it goes on.
        seconds, evaluations: budget; with neither, 2,000 evaluations.
    """

    among = Among(walks=True, loads=10, calls=9, share=0.25, several=True)

    dense: float = 0.8
    beat: float | None = None
    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        check_shares(self, "dense")

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, self.seconds, self.evaluations, DEFAULT_EVALUATIONS)
        part = parts(problem, key_operators(problem, self.dense))
        seconds = np.zeros((int(part.max()) + 1, problem.num_devices))
        np.add.at(seconds, part, problem.group_compute_s)
        fastest = seconds.argmin(axis=1)[part].astype(np.int32)
        # Where no device runs all of a part, its groups go each to its own fastest.
        own = problem.group_compute_s.argmin(axis=1).astype(np.int32)
        able = search.allowed[np.arange(len(part)), fastest]
        search.costs([np.where(able, fastest, own), *single_devices(problem)])
        walks = moved = 0
        improved, first_cost = True, search.best_cost
        while improved and search.left:
            walks, improved = walks + 1, False
            assert search.best is not None, "the start was scored"
            group = problem.graph.group
            path = critical_path(problem, search.best[group])
            for p in dict.fromkeys(part[group[path]].tolist()):
                if not search.left or _too_slow(search, first_cost, self.beat):
                    improved = False
                    break
                groups = np.flatnonzero(part == p)
                can = np.array(search.allowed[groups].all(axis=0))
                can[search.best[groups[0]]] = False
                devices = np.flatnonzero(can)
                trials = np.tile(search.best, (len(devices), 1))
                trials[:, groups] = devices[:, None]
                before = search.best_cost
                search.costs(trials)
                if search.best_cost < before:
                    moved, improved = moved + 1, True
        return search.solution(num_parts=int(part.max()) + 1, num_walks=walks, num_moved=moved)


def _too_slow(search: Search, first_cost: float, beat: float | None) -> bool:
    """Whether the pace since ``first_cost``, which only slows down, would not lead to ``beat``."""
    if beat is None:
        return False
    used = search.used  # a quarter is a fair try
    gained = first_cost - search.best_cost
    return used > 0.25 and search.best_cost - gained * (1 - used) / used > beat


def key_operators(problem: Problem, dense: float) -> NDArray[np.bool_]:
    """bool ``[N]``: compute-dense, or with more than one producer or consumer."""
    seconds = np.where(np.isfinite(problem.compute_s), problem.compute_s, np.inf).min(axis=1)
    order = np.argsort(-seconds, kind="stable")
    before = np.append(0.0, np.cumsum(seconds[order])[:-1])
    key = np.zeros(problem.num_ops, bool)
    key[order] = (before < dense * seconds.sum()) & (seconds[order] > 0)
    edges = problem.graph.edges
    for side in (0, 1):
        key |= np.bincount(edges[:, side], minlength=problem.num_ops) > 1
    return key


def parts(problem: Problem, key: NDArray[np.bool_]) -> Ints:
    """int32 ``[G]``: the part of each colocation group, numbered by first appearance.

    An operator joins the part of its producer where that is its only one and neither ends or
    begins a part: a key operator begins one, a branching producer ends one.
    """
    g = problem.graph
    edges = g.edges
    num_out = np.bincount(edges[:, 0], minlength=g.num_ops)
    num_in = np.bincount(edges[:, 1], minlength=g.num_ops)
    label = np.arange(g.num_groups, dtype=np.int32)
    able = np.isfinite(problem.group_compute_s)

    def root(group: int) -> int:
        while label[group] != group:
            label[group] = label[label[group]]
            group = int(label[group])
        return group

    for src, dst in edges:
        if num_in[dst] == 1 and num_out[src] == 1 and not key[dst]:
            a, b = root(int(g.group[src])), root(int(g.group[dst]))
            both = able[a] & able[b]
            if both.any():  # a part must be able to run somewhere
                label[max(a, b)] = min(a, b)
                able[min(a, b)] = both
    roots = np.array([root(k) for k in range(g.num_groups)])
    return np.unique(roots, return_inverse=True)[1].astype(np.int32)


def critical_path(problem: Problem, placement: Placement) -> list[int]:
    """Operators from the last to end back to one that began at once.

    Before an operator on the path comes the one it waited for: the one that its device ran
    until then, or the producer of the input that came last.
    """
    g = problem.graph
    timeline = simulate(problem, placement, num_microbatches=1)
    start, end = timeline.start_s[0], timeline.end_s[0]
    arrive = {
        (int(t), int(dst)): done
        for (t, _, _, dst), done in zip(timeline.transfers, timeline.transfer_end_s, strict=True)
    }
    by_device: dict[int, list[int]] = {}
    for n in np.lexsort((np.arange(g.num_ops), end, start)):
        by_device.setdefault(int(placement[n]), []).append(int(n))
    previous = {b: a for ops in by_device.values() for a, b in pairwise(ops)}

    op = int(np.argmax(end))
    path = [op]
    while True:
        waited_for, latest = -1, 0.0
        for t in g.in_tensor[g.in_ptr[op] : g.in_ptr[op + 1]]:
            src = int(g.tensor_src[t])
            if src >= 0:
                at = arrive.get((int(t), int(placement[op])), end[src])
                if waited_for < 0 or at > latest:
                    waited_for, latest = src, at
        before = previous.get(op, -1)
        if before >= 0 and end[before] > latest:
            waited_for = before
        if waited_for < 0:
            return path
        op = waited_for
        path.append(op)
