"""A piecewise latency at least, by a linear program: which groups share an accelerator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement.bounds.calls import EFFORT, Regions, tighten
from placement.bounds.memory_lp import own_bytes
from placement.objective import Objective
from placement.problem import Floats, Problem
from placement.tools.lp import EXACT, Columns, Program, Terms

_LEAST = 1e-4  # by which an answer breaks a row of these that is worth adding


class Pieces:
    """A program of a piecewise latency: which groups share an accelerator.

    A group is on an accelerator or not; of two between which something is sent, ``without[i, j]``
    is a column: ``i`` is on an accelerator and ``j`` not there with it. Accelerators are alike, so
    that a group cannot be in equal parts on all of them, where nothing would cross; what is written
    and read costs the least that it does on any.

    An operator has ended (``end``) at the latest when its piece has done so much for all operators
    up to it, in their order: reading what they read first, computing, writing. ``own`` is that of
    one operator alone.
    """

    def __init__(self, problem: Problem) -> None:
        g, self.problem, self.program = problem.graph, problem, Program()
        self.pool = pool = np.array([x.kind == "cpu" for x in problem.cluster.devices])
        seconds = np.where(problem.supported, problem.compute_s, np.inf)
        pool_s, self.alone_s = (
            seconds[:, kind].min(axis=1, initial=np.inf) for kind in (pool, ~pool)
        )
        must, cannot = np.isinf(pool_s), np.isinf(self.alone_s)
        pool_s[must], self.alone_s[cannot] = 0.0, 0.0
        self.io_s = problem.io_s[:, ~pool].min(axis=1, initial=np.inf)
        self.io_s[np.isinf(self.io_s)] = 0.0
        most_s = np.where(problem.supported, problem.compute_s, 0.0).max(axis=1).sum()
        most_s += (problem.io_s.max(axis=1) * (1 + np.diff(g.use_ptr))).sum()
        self.unit_s = max(most_s, 1e-300)
        self.own_bytes = own_bytes(problem)
        self.memory_bytes = float(problem.memory_bytes[~pool].max(initial=0))
        self.regions = Regions(problem)

        upper, least = np.ones((2, g.num_groups))
        upper[g.group[cannot]], least[:] = 0.0, 0.0
        least[g.group[must]] = 1.0
        self.on = self.program.columns(upper)
        self.program.rows(-least, (self.on, -1.0))
        for here, sign, all_bytes in ((~pool, 1.0, 0.0), (pool, -1.0, self.own_bytes.sum())):
            room_bytes = problem.memory_bytes[here].astype(np.float64).sum()
            if room_bytes < self.own_bytes.sum():
                self.program.row(room_bytes - all_bytes, (self.on, sign * self.own_bytes))
        self._pairs()
        self._times(pool_s, int((~pool).sum()))

    def _pairs(self) -> None:
        g, program = self.problem.graph, self.program
        inner = g.tensor_src[g.use_tensor] >= 0
        source = np.where(inner, g.group[g.tensor_src[g.use_tensor]], -1)
        reader = g.group[g.use_dst]
        sent = inner & (source != reader)
        two = np.sort(np.stack([source, reader])[:, sent], axis=0)
        one, other = np.unique(two, axis=1)
        self.without = np.full((g.num_groups, g.num_groups), -1, np.intp)
        none = np.zeros(len(one))
        for a, b in ((one, other), (other, one)):
            self.without[a, b] = program.columns(none + 1)
            program.rows(none, (self.without[a, b], 1.0), (self.on[a], -1.0))
        for a, b in ((one, other), (other, one)):
            there, back = self.without[a, b], self.without[b, a]
            program.rows(none, (there, 1.0), (back, -1.0), (self.on[a], -1.0), (self.on[b], 1.0))
        # Which column says that a use of a tensor is read by an accelerator, or written by one.
        self.reads = np.where(inner, self.without[reader, source], self.on[reader])
        self.reads[inner & ~sent] = -1
        self.writes = np.where(sent, self.without[source, reader], -1)
        io_s = np.zeros((g.num_groups, g.num_groups))
        at, cost_s = (source[sent], reader[sent]), self.io_s[g.use_tensor[sent]]
        np.maximum.at(io_s, at, cost_s)
        io_s = np.maximum(io_s, io_s.T)
        # Distances are told apart by what it costs to part two groups: those go along that cost.
        self.tails, self.heads = np.nonzero(self.without >= 0)
        worth = io_s[self.tails, self.heads] / max(io_s.max(initial=0.0), 1e-300)
        self.least = _LEAST / np.clip(100 * worth, 1.0, None)

    def _times(self, pool_s: Floats, accelerators: int) -> None:
        g, program, unit_s = self.problem.graph, self.program, self.unit_s
        none, here = np.zeros(g.num_ops), self.on[g.group]
        self.own, self.end = program.columns(none + 1), program.columns(none + 1)
        written = program.columns(np.ones(g.num_tensors))
        uses = np.flatnonzero(self.writes >= 0)
        program.rows(
            np.zeros(len(uses)), (self.writes[uses], 1.0), (written[g.use_tensor[uses]], -1.0)
        )
        makes = np.unique(g.use_tensor[uses])
        first = np.zeros(len(g.use_dst), bool)  # of its tensor
        by_reader = np.lexsort((g.use_dst, g.use_tensor))
        first[by_reader[np.unique(g.use_tensor[by_reader], return_index=True)[1]]] = True
        costs = self.reads >= 0
        read = first & costs
        reads = self.reads[read], self.io_s[g.use_tensor[read]]
        writes = written[makes], self.io_s[makes]

        rows = program.rows(-pool_s, (here, self.alone_s - pool_s), (self.own, -unit_s))
        program.add(rows[g.use_dst[read]], reads)
        program.add(rows[g.tensor_src[makes]], writes)
        program.rows(none, (self.own, 1.0), (self.end, -1.0))
        program.rows(none, (self.end, 1.0), (0 * self.end, -1.0))
        src, dst = g.tensor_src[g.use_tensor], g.use_dst
        begun = self.end[src], 1.0 * (src >= 0)
        again_s = np.where(costs & ~first, self.io_s[g.use_tensor], 0.0) / unit_s
        again = np.maximum(self.reads, 0), again_s
        program.rows(np.zeros(len(dst)), begun, again, (self.own[dst], 1.0), (self.end[dst], -1.0))
        time = np.zeros(1, np.intp), -accelerators * unit_s
        program.row(0.0, (here, self.alone_s), reads, writes, time)

    def tighten(self, x: Floats) -> bool:
        """Add rows that every placement obeys and the answer ``x`` does not; False: there are none.

        ``x`` says how far two groups are apart: the shortest way over columns ``without``. So
        much less than on an accelerator a group is on the same one. So

        * what is on an accelerator with a group is no more than its memory, in view of all ways;
        * no two groups are further apart than by another way between them;
        * between a fork and a join what is on the join's accelerator runs one after another.
        """
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import dijkstra

        on, columns = x[self.on], self.without[self.tails, self.heads]
        apart = np.maximum(x[columns], 0.0)
        ways = csr_array((apart + self.least, (self.tails, self.heads)), shape=self.without.shape)
        self.far, self.before = dijkstra(ways, return_predecessors=True)
        with_it = np.maximum(on[:, None] - self.far, 0.0)
        rows = len(self.program.limit)
        self._memory(with_it, _LEAST * self.memory_bytes)
        for k in np.flatnonzero(apart > self.far[self.tails, self.heads] + _LEAST):
            way = self._tree(self.tails[k], self.heads[k : k + 1], np.ones(1))
            self.program.row(0.0, (columns[k : k + 1], 1.0), (way[0], -way[1]))
        self._regions(x, with_it)
        return len(self.program.limit) > rows

    def _tree(self, root: int, to: NDArray[np.intp], weight: Floats) -> tuple[Columns, Floats]:
        """Columns of the shortest ways, and the weight of all to which these lead."""
        total = np.zeros(len(self.far))
        np.add.at(total, to, weight)
        near = np.flatnonzero(self.far[root] <= self.far[root, to].max())
        near = near[np.argsort(-self.far[root, near], kind="stable")]
        for b in near[near != root].tolist():
            total[self.before[root, b]] += total[b]
        near = near[(total[near] > 0) & (near != root)]
        return self.without[self.before[root, near], near], total[near]

    def _memory(self, with_it: Floats, least: float) -> None:
        """Of what is nearest, as little as does not fit."""
        room, on = self.memory_bytes, with_it.diagonal()
        lacking = (with_it * self.own_bytes).sum(axis=1) - room * on
        covered = np.zeros(len(on))
        for root in np.argsort(-lacking, kind="stable"):
            if lacking[root] <= least:
                break
            if covered[root] >= EFFORT.covered:
                continue
            near = np.flatnonzero(with_it[root])
            near = near[np.argsort(self.far[root, near], kind="stable")]
            held = np.cumsum(self.own_bytes[near] * with_it[root, near])
            near = near[: int(np.argmax(held > room * on[root])) + 1]
            covered[near] += 1
            columns, beyond = self._tree(root, near, self.own_bytes[near])
            more = self.own_bytes[near].sum() - room
            each = np.minimum(beyond, more) / room
            self.program.row(0.0, (self.on[[root]], more / room), (columns, -each))

    def _regions(self, x: Floats, with_it: Floats) -> None:
        regions, group = self.regions, self.problem.graph.group
        joins = regions.joins[:-1]
        taken = np.zeros((len(group), len(joins) + 1))  # the end of all is on no accelerator
        taken[:, :-1] = self.alone_s[:, None] * with_it[group[joins]][:, group].T / self.unit_s
        for fork, join, between in regions.late(taken, x[self.end], x[self.own], x[0]):
            there = between[with_it[group[join], group[between]] > 0]
            if len(there) == 0:
                continue
            root, seconds = int(group[join]), self.alone_s[there] / self.unit_s
            columns, beyond = self._tree(root, group[there], seconds)
            begun: list[Terms] = [(self.end[[fork]], 1.0)] if fork >= 0 else []
            own = (self.own[[join]], 1.0), (self.end[[join]], -1.0)
            together = (self.on[[root]], seconds.sum()), (columns, -beyond)
            self.program.row(0.0, *begun, *own, *together)


def pieces_s(problem: Problem) -> float:
    """The piecewise latency, at least: 0 where a program would take more than a moment."""
    if problem.graph.num_groups > 1_500:  # each two of them have a distance
        return 0.0
    pieces, asked = Pieces(problem), problem.objective is Objective.PIECEWISE_LATENCY
    if pieces.program.size > 20_000:
        return 0.0
    work = 160_000 if asked else 40_000  # numbers in all programs that are solved
    return tighten(pieces.program, pieces.tighten, work) * pieces.unit_s * EXACT
