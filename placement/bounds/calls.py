"""A call at least, by a linear program: paths, and what runs one after another between forks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.bounds.memory_lp import Placed, either
from placement.problem import Floats, Problem
from placement.tools.lp import EXACT, TOLERANCE, Program, Terms


class CallEffort(NamedTuple):
    """What may be spent on the programs of a call: more of it raises the bound by little."""

    work: int = 20_000  # numbers in all programs that are solved while groups may be in parts
    apart_work: int = 60_000  # ... and in those where some groups are on one device each
    near: float = 0.985  # of another bound: below it no group is put on one device
    paths: int = 30_000_000  # forks x operators x joins: seconds between each two are summed up
    covered: int = 3  # rows that an operator is in, at most, of those that are added at a time
    late: float = 1e-5  # of a call, by which a row is worth adding
    slow: float = 1e-3  # of a bound: a round that raises it by less is slow


EFFORT = CallEffort()


def tighten(program: Program, more: Callable[[Floats], bool], work: float) -> float:
    """The first column, at least, with all rows that ``more`` adds to its answers; ``work``:
    numbers in all programs that are solved, the last of them finished. Two rounds in a row that
    raise it by little are the last."""
    least, slow = 0.0, 0
    while True:
        before, least = least, max(least, program.solve()[0])
        work, slow = work - program.size, slow + 1 if least < before * (1 + EFFORT.slow) else 0
        if work <= 0 or slow == 2 or program.answer is None or not more(program.answer):
            return least


class Regions:
    """What lies between each fork and each join; -1 is before all, ``N`` after all.

    Attributes:
        forks: -1, and operators ``[F - 1]`` that several others wait for.
        joins: operators ``[J - 1]`` that wait for several others, and ``N``.
    """

    def __init__(self, problem: Problem) -> None:
        n, edges = problem.num_ops, np.unique(problem.graph.edges, axis=0)
        self.forks, self.joins = (
            np.flatnonzero(np.bincount(edges[:, k], minlength=n) > 1) for k in (0, 1)
        )
        if max(len(self.forks) * len(self.joins), n) * n > EFFORT.paths:
            self.forks = self.joins = np.zeros(0, np.intp)
        some = len(self.forks) + len(self.joins) > 0
        leads = np.zeros((n, n) if some else (0, 0), bool)
        for src, dst in edges[::-1].tolist() if some else ():
            leads[src] |= leads[dst]
            leads[src, dst] = True
        self._after = np.ones((len(self.forks) + 1, n), bool)
        self._until = np.ones((n, len(self.joins) + 1), bool)
        self._leads = np.ones((len(self.forks) + 1, len(self.joins) + 1), bool)
        if some:
            self._after[1:], self._until[:, :-1] = leads[self.forks], leads[:, self.joins]
            self._leads[1:, :-1] = self._after[1:][:, self.joins]
        self.forks, self.joins = np.append(-1, self.forks), np.append(self.joins, n)

    def late(
        self, taken: Floats, end: Floats, own: Floats, last: float
    ) -> Iterator[tuple[int, int, NDArray[np.intp]]]:
        """Fork, join and what is between, where that takes longer than an answer says.

        ``taken``: ``[N]``, or for each join ``[N, J]``; ``end``: when all end in the answer;
        ``own``: what the joins take; ``last``: when everything has ended.
        """
        begun, own = np.append(end, 0.0)[self.forks], np.append(own, 0.0)[self.joins]
        until = self._until * (taken if taken.ndim == 2 else taken[:, None])
        took = np.einsum("fw,wj->fj", self._after.astype(np.float64), until)  # not by BLAS
        late = begun[:, None] + took + own - np.append(end, last)[self.joins]
        late[~self._leads | (took <= 0)] = 0.0
        nearest = len(late) - 1 - (late[::-1] > EFFORT.late).argmax(axis=0)
        for fork in (nearest, late.argmax(axis=0)):
            covered, latest = np.zeros(len(end) + 1), late[fork, np.arange(len(fork))]
            for k in np.argsort(-latest, kind="stable").tolist():
                if latest[k] <= EFFORT.late:
                    break
                if covered[self.joins[k]] < EFFORT.covered:
                    between = np.flatnonzero(self._after[fork[k]] & self._until[:, k])
                    covered[between] += 1
                    covered[self.joins[k]] += 1
                    yield int(self.forks[fork[k]]), int(self.joins[k]), between


class Call:
    """A program of a call: loads and memory, paths, and all that is sent.

    ``streams``: see ``either``.

    Attributes:
        program, unit_s: rows and columns, and what the first column counts time in.
        whole: columns that are whole numbers in every placement.
    """

    def __init__(self, problem: Problem, streams: bool | None = None) -> None:
        g, self.problem = problem.graph, problem
        placed = Placed(problem, True, streams=streams)
        self.program, self.unit_s, self.whole = placed.program, placed.unit_s, placed.on
        self.alone_s, self.sides, self.regions = placed.alone_s, placed.sides, Regions(problem)
        program, on, every = placed.program, placed.on, np.arange(g.num_ops)
        none = np.zeros(g.num_ops)
        self.end = end = program.columns(none + 1)
        program.rows(none, *self._own(every), (end, -self.unit_s))
        program.rows(none, (end, 1.0), (0 * end, -1.0))
        after = end[g.tensor_src[g.use_tensor]], self.unit_s * (g.tensor_src[g.use_tensor] >= 0)
        until, own = (end[g.use_dst], -self.unit_s), self._own(g.use_dst)
        for arrives in placed.arrives:
            program.rows(np.zeros(len(g.use_dst)), after, *arrives, *own, until)
        group_s = problem.graph.per_group(placed.alone_s)
        for here, *more in zip(placed.sides, placed.handed, placed.taken, strict=True):
            program.row(0.0, (on[:, here], group_s[:, here]), *chain(*more), placed.time)
        for sent in placed.channels.values():
            program.row(0.0, *sent, placed.time)
        placed.copy()

    def _own(self, ops: NDArray[np.integer]) -> list[Terms]:
        on, group = self.whole, self.problem.graph.group[ops]
        return [(on[group, d], self.alone_s[ops, d]) for d in range(self.problem.num_devices)]

    def tighten(self, x: Floats) -> bool:
        """Add rows of what the answer ``x`` does not obey: between a fork and a join what is on
        one device runs one after another. False: it obeys all."""
        n, group = self.problem.num_ops, self.problem.graph.group
        disobeys = False
        seconds = x[self.whole][group] * self.alone_s / self.unit_s
        for here in self.sides:
            taken, own = seconds[:, here].sum(axis=1), seconds.sum(axis=1)
            for fork, join, between in self.regions.late(taken, x[self.end], own, x[0]):
                terms = [(self.whole[group[between], d], self.alone_s[between, d]) for d in here]
                terms += self._own(np.array([join])) if join < n else []
                terms += [(self.end[[fork]], self.unit_s)] if fork >= 0 else []
                until = self.end[[join]] if join < n else np.zeros(1, np.intp)
                self.program.row(0.0, *terms, (until, -self.unit_s))
                disobeys = True
        return disobeys

    def apart(self, least: float, work: float) -> float:
        """The first column, at least, from ``least`` up, where some groups are on one device each.

        Of those that are in parts the one with most tensors is put wherever it can be; what can
        become least is looked at first. ``work``: numbers in all programs that are solved.
        """
        program, g, number = self.program, self.problem.graph, 0
        ends = np.append(g.use_dst, g.tensor_src[g.tensor_src >= 0])
        many = np.bincount(g.group[ends], minlength=g.num_groups)
        open_ = [(least, number, every := program.upper, program.values[self.whole])]
        while work > 0:
            least, _, upper, on = open_[0]
            group = int(((1 - on.max(axis=1)) * many).argmax())
            if on[group].max() > 1 - TOLERANCE or not on.any():
                break
            heappop(open_)
            for device in np.flatnonzero(upper[self.whole[group]]):
                program.upper = upper.copy()
                program.upper[self.whole[group]] = np.arange(on.shape[1]) == device
                more, number, work = program.solve()[0], number + 1, work - program.size
                shares = program.values[self.whole]  # 0: this cannot be, or the solver failed
                heappush(open_, (max(least, more), number, program.upper, shares))
        program.upper = every
        return open_[0][0]


def call_s(problem: Problem, known_s: float = 0.0) -> float:
    """A call, at least. Of groups in parts little is asked where more is ``known_s`` by far."""

    def bound(streams: bool | None) -> float:
        call = Call(problem, streams)
        least = tighten(call.program, call.tighten, EFFORT.work)
        if least * call.unit_s > EFFORT.near * known_s and call.program.answer is not None:
            least = call.apart(least, EFFORT.apart_work)
        return least * call.unit_s * EXACT

    return either(problem, bound)
