"""Smaller problems: operators that belong together are merged, and a placement is undone.

**Why no merge ever closes a cycle.** Let ``level`` be the longest path to an operator, so
``level[b] >= level[a] + 1`` for every edge ``a -> b``. In one round, disjoint *pairs* are
merged: the ends of an edge whose levels differ by exactly one, or two operators of equal
level. Suppose the merged graph had a cycle of ``k >= 2`` merged operators. Walk around it:
each of its ``k`` edges raises the level by at least 1, and inside a merged operator, from
where the walk enters to where it leaves, the level falls by at most 1, namely in a pair
``(u, v)`` of an edge that is entered at ``v`` and left at ``u``. The sum around is 0, so every
edge raises by exactly 1, and every operator on the cycle is such a pair. All these pairs
then lie on the same two levels, and the edges of the cycle lead from a ``u`` to the ``v`` of
another pair. Of the pairs on the cycle one was made last; the edge that leaves it leads to the
``v`` of an older pair. ``_round`` forbids just that: a pair is not made while ``u`` has an edge
to a ``v`` of an older one. So there is no cycle; the next round computes new levels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.graph import OpGraph, components, levels, topological_order
from placement.problem import Problem, ProblemError
from placement.profile import Profile

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


def coarsen(problem: Problem, num_ops: int) -> tuple[Problem, Ints]:
    """Merge operators until ``num_ops`` are left, or nothing can be merged.

    First operators that cost nothing go to a neighbour, then neighbours of one colocation
    group, then chains, then the ends of the heaviest edges (mean transfer seconds), and when
    no edge is left, or few of them can be merged at once, operators side by side. No merged
    operator weighs more than twice the mean until there is no other way, and every colocation
    group keeps a device that can run it and hold its parameters.

    In the coarse problem seconds are summed; tensors keep their numbers, and one that is used
    only within a merged operator weighs nothing but is part of its workspace; operators that
    share a colocation group with something merged are colocated with it.

    Returns:
        the coarse problem, and int32 ``[N]``: the coarse operator of each operator.

    Raises:
        ProblemError: ``num_ops`` is not positive.
    """
    if num_ops < 1:
        raise ProblemError(f"num_ops = {num_ops} must be at least 1; it is the size to merge to")
    merger = _Merger(problem)
    total_s = float(merger.seconds.sum())
    limit_s = 2.0 * total_s / num_ops
    side_by_side = False
    while merger.count > num_ops:
        before = merger.count
        merged = merger.round(num_ops, limit_s, side_by_side)
        if merged > (before - num_ops) // 256:  # so that there are about as many rounds, at most
            continue
        if not merged and limit_s < total_s:
            limit_s *= 2.0
        elif not side_by_side:  # e.g. a star: every edge ends at the same operator
            side_by_side = True
        elif not merged:
            break
    label = _topological(merger.label, problem.graph.edges)
    return _merged(problem, label), label


def grouped(problem: Problem, num_groups: int) -> Problem:
    """The same problem with ``num_groups`` colocation groups, or as few as ``coarsen`` leaves.

    Nothing else changes: a placement of it is one of ``problem``, and worth the same.

    Raises:
        ProblemError: ``num_groups`` is not positive.
    """
    coarse, label = coarsen(problem, num_groups)
    graph = problem.graph
    _, first, at = np.unique(coarse.graph.group[label], return_index=True, return_inverse=True)
    group = np.argsort(np.argsort(first))[at]  # numbered by first appearance, as graphs have them
    # Its profile was measured with other colocation groups; seconds do not depend on them.
    profile = replace(problem.profile, graph_fingerprint="")
    return replace(problem, graph=replace(graph, group=group.astype(np.int32)), profile=profile)


class _Merger:
    """Labels int32 ``[N]`` that become fewer; see the proof above."""

    def __init__(self, problem: Problem) -> None:
        g = problem.graph
        self._edges = g.edges
        self._edge_s = edge_seconds(problem)
        self._group = g.group
        self._group_root = np.arange(g.num_groups)
        self._able_s = np.isfinite(problem.group_compute_s)
        # Tied ones at each: never too few.
        self._param_bytes = g.per_group(g.op_param_bytes.astype(np.float64))
        self._memory_bytes = problem.memory_bytes
        self.label = np.arange(problem.num_ops, dtype=np.int32)
        self.seconds = np.where(problem.supported, problem.compute_s, np.inf).min(axis=1)

    @property
    def count(self) -> int:
        """Operators that are left."""
        return len(self.seconds)

    def round(self, num_ops: int, limit_s: float, side_by_side: bool) -> int:
        """Merge disjoint pairs, ``limit_s`` at most each; how many."""
        count = self.count
        edges, weight = self._coarse_edges()
        level = levels(edges, count)
        next_to = level[edges[:, 1]] == level[edges[:, 0]] + 1
        pairs = edges[next_to]
        pairs = pairs[self._ranking(edges, pairs, weight[next_to])]
        if side_by_side:
            order = np.lexsort((self.seconds, level))
            both = np.stack([order[:-1], order[1:]], axis=1)
            pairs = np.concatenate([pairs, both[level[both[:, 0]] == level[both[:, 1]]]])
        first = np.searchsorted(edges[:, 0], np.arange(count + 1))
        mate = np.full(count, -1)
        is_lower = np.zeros(count, bool)  # the ``v`` of a pair along an edge
        group = np.empty(count, np.int64)  # one colocation group of each label
        group[self.label] = self._group
        merged = 0
        for u, v in pairs.tolist():
            if count - merged <= num_ops:
                break
            if mate[u] >= 0 or mate[v] >= 0 or self.seconds[u] + self.seconds[v] > limit_s:
                continue
            along = level[v] > level[u]
            if along and is_lower[edges[first[u] : first[u + 1], 1]].any():
                continue  # the one way to close a cycle
            if not self._colocate(int(group[u]), int(group[v])):
                continue
            mate[u], mate[v] = v, u
            is_lower[v] = along
            merged += 1
        representative = np.where((mate >= 0) & (mate < np.arange(count)), mate, np.arange(count))
        dense = np.unique(representative, return_inverse=True)[1]
        self.label = dense[self.label].astype(np.int32)
        self.seconds = np.bincount(dense, weights=self.seconds)
        return merged

    def _coarse_edges(self) -> tuple[Ints, Floats]:
        """Distinct edges between labels, sorted, and their seconds."""
        pairs = self.label[self._edges].reshape(-1, 2)
        outer = pairs[:, 0] != pairs[:, 1]
        edges, at = np.unique(pairs[outer], axis=0, return_inverse=True)
        total = np.zeros(len(edges))
        np.add.at(total, at.reshape(-1), self._edge_s[outer])
        return edges, total

    def _ranking(self, edges: Ints, pairs: Ints, heavy: Floats) -> NDArray[np.intp]:
        """The order in which to try ``pairs`` of that weight: what must, then what pays."""
        count = self.count
        root = np.empty(count, np.int64)
        root[self.label] = [self._root(int(k)) for k in self._group]
        free = (self.seconds[pairs] == 0).any(axis=1)
        together = root[pairs[:, 0]] == root[pairs[:, 1]]
        num_out = np.bincount(edges[:, 0], minlength=count)
        num_in = np.bincount(edges[:, 1], minlength=count)
        chain = (num_out[pairs[:, 0]] == 1) & (num_in[pairs[:, 1]] == 1)
        return np.lexsort((pairs[:, 1], pairs[:, 0], -heavy, ~chain, ~together, ~free))

    def _root(self, group: int) -> int:
        while self._group_root[group] != group:
            self._group_root[group] = self._group_root[self._group_root[group]]
            group = int(self._group_root[group])
        return group

    def _colocate(self, a: int, b: int) -> bool:
        """Make two colocation groups one; False where no device could take it."""
        a, b = sorted((self._root(a), self._root(b)))
        if a == b:
            return True
        able = self._able_s[a] & self._able_s[b]
        size = self._param_bytes[a] + self._param_bytes[b]
        if not (able & (size <= self._memory_bytes)).any():
            return False
        self._group_root[b] = a
        self._able_s[a], self._param_bytes[a] = able, size
        return True


def edge_seconds(problem: Problem) -> Floats:
    """float64 ``[E']``: mean transfer of all tensors of each row of ``graph.edges``."""
    g = problem.graph
    src = g.tensor_src[g.use_tensor].astype(np.int64)
    produced = src >= 0
    edges = g.edges.astype(np.int64)
    key = src[produced] * g.num_ops + g.use_dst[produced]
    at = np.searchsorted(edges[:, 0] * g.num_ops + edges[:, 1], key)
    seconds = problem.mean_transfer_s[g.use_tensor[produced]]
    return np.bincount(at, seconds, len(edges)).astype(np.float64)


def _topological(label: Ints, edges: Ints) -> Ints:
    """The same labels, numbered so that every edge leads to a larger one."""
    pairs = label[edges].reshape(-1, 2)
    outer = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    order = topological_order(outer, int(label.max()) + 1)
    assert len(order) == label.max() + 1, "merging never closes a cycle"
    return np.argsort(order).astype(np.int32)[label]


def _merged(problem: Problem, label: Ints) -> Problem:
    """The coarse problem of topological labels int32 ``[N]``."""
    g, count = problem.graph, int(label.max()) + 1
    first = np.full(count, g.num_ops)
    np.minimum.at(first, label, np.arange(g.num_ops))
    src = np.where(g.tensor_src >= 0, label[g.tensor_src], -1)
    dst = label[g.use_dst]
    leaves = src[g.use_tensor] != dst
    # A tensor keeps its bytes if anything of its memory is used elsewhere or is an output.
    stays = np.zeros(g.num_tensors, bool)
    stays[g.tensor_root[g.use_tensor[leaves]]] = True
    stays[g.tensor_root[g.output_tensor]] = True
    stays[g.tensor_root[g.tensor_src < 0]] = True
    inner = np.flatnonzero(~stays[g.tensor_root])
    produced = np.zeros(g.num_ops, np.int64)
    np.add.at(produced, g.tensor_src[inner], g.tensor_bytes[inner])

    def name(values: tuple[str, ...]) -> list[str]:
        return [values[n] for n in first]

    readers: dict[int, dict[int, None]] = {}
    for writer, mine in g.carried.items():
        readers.setdefault(int(label[writer]), {}).update(dict.fromkeys(label[[*mine]].tolist()))
    graph = OpGraph.build(
        g.name,
        name(g.op_name),
        src,
        np.where(stays[g.tensor_root], g.tensor_bytes, 0),
        np.stack([g.use_tensor, dst], axis=1)[leaves],
        op_kind=name(g.op_kind),
        op_module=name(g.op_module),
        op_signature=name(g.op_signature),
        tensor_root=g.tensor_root,
        param_bytes=g.param_bytes,
        param_uses=np.stack([label[g.param_use_op], g.param_use], axis=1),
        group=_colocation(label, g.group, count),
        is_backward=g.is_backward[first],
        output_tensor=g.output_tensor,
        next_readers={writer: tuple(mine) for writer, mine in readers.items()},
    )

    def merged(values: Any, how: np.ufunc = np.add) -> Any:
        if values is None:
            return None
        out = np.zeros((count, *values.shape[1:]), values.dtype)
        how.at(out, label, values)
        return out

    p = problem.profile
    extra = 0 if p.workspace_bytes is None else p.workspace_bytes
    profile: Profile = replace(
        p,
        compute_s=merged(p.compute_s),
        spread_s=merged(p.spread_s),
        loaded_s=merged(p.loaded_s),
        predicted=merged(p.predicted),
        workspace_bytes=merged(produced + extra, np.maximum),
        library_bytes=merged(p.library_bytes, np.maximum),
        graph_fingerprint="",
    )
    # A buffer has room for what several operators read together.
    most = int(graph.op_param_bytes.max())
    devices = tuple(
        d if d.buffer_bytes is None else replace(d, buffer_bytes=max(d.buffer_bytes, most))
        for d in problem.cluster.devices
    )
    cluster = replace(problem.cluster, devices=devices)
    return replace(problem, graph=graph, profile=profile, cluster=cluster)


def _colocation(label: Ints, group: Ints, count: int) -> Ints:
    """``[count]``: coarse operators are colocated if a chain of shared groups links them."""
    links = np.stack([label, count + group], axis=1)
    return components(links, count + int(group.max()) + 1)[:count]
