"""What no placement can be better than, by linear programs over placements in fractions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.objective import Objective
from placement.problem import Floats, Problem, host_of
from placement.timeline import least_window
from placement.tools.clock import loads

TOLERANCE = 1e-6  # of the solver, for what is whole and for what is proved then
EXACT = 1 - 1e-12  # sums in another order are no more
Columns = NDArray[np.intp]
Terms = tuple[Columns, ArrayLike]  # columns, and what each counts


@loads
def load_solver() -> None:
    """SciPy takes longer to import than a small program to solve."""
    import scipy.optimize
    import scipy.sparse.csgraph  # noqa: F401


class Program:
    """Rows of columns between 0 and 1; the first column is as small as the rows allow.

    ``answer`` has the columns as they then are, None where there is none; ``values`` has 0 there.
    """

    def __init__(self) -> None:
        self.upper, self.limit = np.ones(1), np.zeros(0)
        self.answer: Floats | None = None
        self.status, self.nodes = "", 0
        self._entries: list[tuple[Columns, Columns, Floats]] = []

    def columns(self, upper: ArrayLike) -> Columns:
        """New columns of at most ``upper [K]``, which are 0 or 1."""
        self.upper, before = np.append(self.upper, upper), len(self.upper)
        return np.arange(before, len(self.upper))

    def rows(self, limit: Floats, *terms: Terms) -> NDArray[np.intp]:
        """A row for each of ``limit [R]``: of each term ``[R]`` one entry."""
        first, self.limit = len(self.limit), np.append(self.limit, limit)
        rows = first + np.arange(len(limit))
        self.add(rows, *terms)
        return rows

    def row(self, limit: float, *terms: Terms) -> None:
        """One row of all columns of all terms."""
        first, self.limit = len(self.limit), np.append(self.limit, limit)
        self.add(np.array(first), *terms)

    def add(self, row: NDArray[np.intp], *terms: Terms) -> None:
        """More terms of such rows."""
        for columns, values in terms:
            a, b, c = np.broadcast_arrays(row, columns, np.asarray(values, np.float64))
            self._entries.append((a.ravel(), b.ravel(), c.ravel()))

    def covered(self, x: Floats, columns: Columns, held: Floats, room: float) -> bool:
        """Whether the whole answer ``x`` has more of ``held [K]`` than ``room``, as the solver's
        tolerance allows: with a new row one of its columns is not 1."""
        here = x[columns] > 0.5
        if not is_whole(x[columns]) or held[here].sum() <= room:
            return False
        self.row(here.sum() - 1.0, (columns[here], 1.0))
        return True

    def shares(self, can: NDArray[np.bool_]) -> Columns:
        """Columns like ``can [G, D]``, 0 where it is False; those of a row add up to 1."""
        on = self.columns(can.ravel()).reshape(can.shape)
        for sign in (1.0, -1.0):
            self.rows(np.full(len(can), sign), *((column, sign) for column in on.T))
        return on

    def solve(self, seconds: float = np.inf) -> tuple[float, Floats]:
        """The first column, at least, and the multipliers ``[R]`` that prove it.

        It is what they sum up to, whatever the solver's tolerance.
        """
        rows, limit, most = self._scaled()
        from scipy.optimize import linprog

        cost, bounds = np.eye(1, rows.shape[1])[0], np.stack([0 * self.upper, self.upper], axis=1)
        options = {"time_limit": seconds}
        answer = linprog(
            cost, A_ub=rows, b_ub=limit, bounds=bounds, method="highs", options=options
        )
        self.answer = answer.x if answer.success else None
        if not answer.success:
            return 0.0, 0 * limit
        price = np.maximum(-answer.ineqlin.marginals, 0.0)
        left = np.minimum(cost + rows.T @ price, 0.0)
        return float(left @ self.upper - price @ limit), price / most

    def whole(self, columns: Columns, seconds: float) -> float:
        """The first column, at least, where ``columns`` are whole: as far as that is proved, less
        the solver's tolerance; ``status`` is its message.

        HiGHS looks at its clock now and then only.
        """
        rows, limit, _ = self._scaled()
        from scipy.optimize import Bounds, LinearConstraint, milp

        # With presolve HiGHS has been seen to prove more than the optimum where a billionth of the
        # memory decides, or to end in an error; without, it is as fast on programs of these.
        options = {"time_limit": max(0.05, seconds), "mip_rel_gap": TOLERANCE, "presolve": False}
        integrality = np.zeros(len(self.upper))
        integrality[columns.ravel()] = 1
        answer = milp(
            np.eye(1, len(self.upper))[0],
            integrality=integrality,
            bounds=Bounds(0.0, self.upper),
            constraints=LinearConstraint(rows, -np.inf, limit),
            options=options,
        )
        self.answer, self.status = answer.x, answer.message
        self.nodes += int(answer.get("mip_node_count") or 0)
        dual = answer.get("mip_dual_bound")
        known = dual is not None and np.isfinite(dual)
        return max(0.0, float(dual) * (1 - TOLERANCE) - TOLERANCE) if known else 0.0

    def _scaled(self) -> tuple[Any, Floats, Floats]:
        """Rows, sparse, and their limits over the largest number of each; these ``[R]``."""
        load_solver()
        from scipy.sparse import csr_array

        row, column, value = map(np.concatenate, zip(*self._entries, strict=True))
        most = np.full(len(self.limit), 1e-300)
        np.maximum.at(most, row, np.abs(value))
        shape = len(self.limit), len(self.upper)
        return csr_array((value / most[row], (row, column)), shape=shape), self.limit / most, most

    @property
    def values(self) -> Floats:
        """float64, a number for each column."""
        return 0 * self.upper if self.answer is None else self.answer

    @property
    def size(self) -> int:
        """Numbers in all rows."""
        return sum(len(value) for _, _, value in self._entries)


def is_whole(x: Floats) -> bool:
    """Up to the solver's tolerance."""
    return bool((np.abs(x - np.rint(x)) <= 10 * TOLERANCE).all())


def tighten(
    program: Program,
    more: Callable[[Floats], bool],
    work: float,
    seconds_left: Callable[[], float] = lambda: np.inf,
) -> float:
    """The first column, at least, with all rows that ``more`` adds to its answers; ``work``:
    numbers in all programs that are solved, the last of them finished. Two rounds in a row that
    raise it by little are the last."""
    least, slow = 0.0, 0
    while True:
        before, least = least, max(least, program.solve(seconds_left())[0])
        work, slow = work - program.size, slow + 1 if least < before * (1 + _SLOW) else 0
        if work <= 0 or slow == 2 or program.answer is None or not more(program.answer):
            return least


_SLOW = 1e-3  # of a bound: a round that raises it by less is slow
_NEAR = 0.985  # of another bound: a program that is below it is not asked for more
# Numbers in all programs that are solved.
_CALL_WORK, _APART_WORK, _PIECES_WORK = 20_000, 60_000, 160_000
_PATHS = 30_000_000  # forks x operators x joins: seconds between each two are summed up
_COVERED = 3  # rows that an operator is in, at most, of those that are added at a time
MOST_GROUPS = 1_500  # of pieces: each two of them have a distance
_LEAST = 1e-4  # by which an answer breaks a row of these that is worth adding
_LATE = 1e-5  # of a call, by which a row is worth adding


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
        if max(len(self.forks) * len(self.joins), n) * n > _PATHS:
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
        nearest = len(late) - 1 - (late[::-1] > _LATE).argmax(axis=0)
        for fork in (nearest, late.argmax(axis=0)):
            covered, latest = np.zeros(len(end) + 1), late[fork, np.arange(len(fork))]
            for k in np.argsort(-latest, kind="stable").tolist():
                if latest[k] <= _LATE:
                    break
                if covered[self.joins[k]] < _COVERED:
                    between = np.flatnonzero(self._after[fork[k]] & self._until[:, k])
                    covered[between] += 1
                    covered[self.joins[k]] += 1
                    yield int(self.forks[fork[k]]), int(self.joins[k]), between


def own_bytes(problem: Problem) -> Floats:
    """``[G]`` parameters; a tied one is held in equal parts."""
    g = problem.graph
    share = g.param_bytes / np.maximum(np.bincount(g.param_use, minlength=len(g.param_bytes)), 1)
    held = np.bincount(g.group[g.param_use_op], share[g.param_use], g.num_groups)
    return held.astype(np.float64)


def taken_in(problem: Problem) -> NDArray[np.bool_]:
    """Of which uses the reader, if the tensor comes from elsewhere, takes it in: the first of all
    readers, wherever they are. Inputs of the model are not taken in."""
    g = problem.graph
    first = np.full(g.num_tensors, g.num_ops)
    np.minimum.at(first, g.use_tensor, g.use_dst)
    return (g.tensor_src[g.use_tensor] >= 0) & (first[g.use_tensor] == g.use_dst)


class _Placed:
    """A program of a time, and of the shares ``on [G, D]`` of groups on devices with memory.

    Beside what a device streams it has two buffers. The
    time is counted in ``unit_s``, more than any call or item takes.
    """

    def __init__(
        self,
        problem: Problem,
        crossing: bool,
        more_s: float = 0.0,
        known_s: float | None = None,
    ) -> None:
        self.problem, self.program = problem, Program()
        own = problem.worker == np.arange(problem.num_devices)
        self.streaming = np.flatnonzero(~own)
        # The devices whose operators run on each worker, which is the first.
        self.sides = [
            np.append(w, self.streaming[problem.worker[self.streaming] == w])
            for w in np.flatnonzero(own)
        ]
        can = np.isfinite(problem.group_compute_s)
        self.on = self.program.shares(can)
        self.held: list[Any] = []  # of each memory: columns, their bytes, and its own
        self._hold()
        self.alone_s, self.loaded_s = (
            np.where(problem.supported, s, 0.0) for s in (problem.compute_s, problem.loaded_s)
        )
        self.unit_s = max(float(self.loaded_s.sum()) + more_s, 1e-300)
        self.arrives: list[list[Terms]] = [[]]  # for each use of a tensor, counted in such ways
        self.handed: list[list[Terms]] = [[] for _ in self.sides]
        self.taken: list[list[Terms]] = [[] for _ in self.sides]  # what taking tensors in takes
        self.channels: dict[int, list[Terms]] = {}
        if len(self.sides) > 1 and crossing:
            self._cross()
        self.unit_s = self.unit_s if known_s is None else max(known_s, 1e-300)
        self.time = np.zeros(1, np.intp), -self.unit_s

    def _hold(self) -> None:
        g, problem, on, held = self.problem.graph, self.problem, self.on, own_bytes(self.problem)
        for d, *streaming in self.sides:
            placed: list[Terms] = [(on[:, d], held)]
            buffers: list[Terms] = []
            if streaming:
                most = max(int(g.op_param_bytes.max()), 1)
                buffer = self.program.columns(np.ones(1))
                for s in streaming:
                    read = on[g.group, s], g.op_param_bytes / most
                    self.program.rows(np.zeros(g.num_ops), read, (buffer, -1.0))
                buffers.append((buffer, 2.0 * most))
            if d == host_of(problem)[0]:
                placed += [(on[:, s], held) for s in self.streaming]
            room = float(problem.memory_bytes[d])
            if sum(np.sum(values) for _, values in (*placed, *buffers)) > room:
                self.program.row(room, *placed, *buffers)
                self.held.append((*map(np.concatenate, zip(*placed, strict=True)), room))

    def _cross(self) -> None:
        """Columns for all that crosses between devices, by reading group, and once for all.

        Between more than two each takes the least to it from any other, or from it to any other.
        """
        g, problem, on = self.problem.graph, self.problem, self.on
        size, measured_s = g.tensor_bytes.astype(np.float64), problem.profile.transfer_s
        (_, shares_host), inner = host_of(problem), g.tensor_src >= 0
        takes_in = taken_in(problem)
        source = np.where(inner, g.group[g.tensor_src], -1)
        (tensor, reader), pair = np.unique(
            np.stack([g.use_tensor, g.group[g.use_dst]]), axis=1, return_inverse=True
        )
        first = np.array([here[0] for here in self.sides])
        two = len(first) == 2
        self.arrives = [[]] if two else [[], []]
        for k, here in enumerate(self.sides):
            dst, others = int(first[k]), np.delete(first, k)
            both: list[tuple[Any, Any]] = [(others, dst), (dst, others)]
            for arrives, ends in zip(self.arrives, both, strict=False):
                per_byte = np.multiply.outer(size, problem.link_s_per_byte[ends])
                sent = problem.link_latency_s[ends] + per_byte
                if measured_s is not None:
                    sent = measured_s[:, *ends]
                sent_s, into = sent.min(axis=1), ends[1] is dst
                receive_s = problem.link_receive_s[ends]
                self.unit_s += float((sent.max(axis=1) + receive_s.max()).sum())
                if not sent_s.any():
                    continue
                may = (source[tensor] != reader) & (inner | (~shares_host[dst] & into))[tensor]
                crosses, none = np.zeros(len(tensor), np.intp), np.zeros(may.sum())
                crosses[may] = self.program.columns(none + 1)
                from_, to = source[tensor[may]], reader[may]
                sign = 1.0 if into else -1.0
                there = ((on[from_, d], -sign * inner[tensor[may]]) for d in here)
                reads = ((on[to, d], sign) for d in here)
                self.program.rows(none, *reads, *there, (crosses[may], -1.0))
                use_s = sent_s[g.use_tensor] + takes_in * receive_s.min()
                arrives.append((crosses[pair], may[pair] * use_s))
                if two:
                    self._queue(k, tensor[may], crosses[may], sent_s)
        self.arrives = [arrives for arrives in self.arrives if arrives] or [[]]

    def _queue(self, k: int, tensor: NDArray[np.integer], crosses: Columns, sent_s: Floats) -> None:
        """To side ``k`` each tensor is sent once: it is on the channel, the other side hands it
        over, and an operator of this side takes it in."""
        problem, src, dst = self.problem, int(self.sides[1 - k][0]), int(self.sides[k][0])
        g, size = problem.graph, problem.graph.tensor_bytes.astype(np.float64)
        handed_s = problem.link_send_s[src, dst] + size * problem.link_send_s_per_byte[src, dst]
        self.unit_s += float((handed_s + problem.link_wake_s[src, dst]).sum())
        which, at = np.unique(tensor, return_inverse=True)
        sent = self.program.columns(np.ones(len(which)))
        self.program.rows(np.zeros(len(at)), (crosses, 1.0), (sent[at], -1.0))
        receive_s = problem.link_receive_s[src, dst] * (g.tensor_src[which] >= 0)
        self.taken[k].append((sent, receive_s))
        if not problem.contention:
            return
        way = int(problem.link_channel[src, dst])
        self.channels.setdefault(way, []).append((sent, sent_s[which]))
        # What is handed over last may be there before that ends.
        kept_s = np.minimum(sent_s, handed_s) * (g.tensor_src >= 0)
        self.handed[1 - k].append((sent, kept_s[which]))


def alike(columns: Floats) -> tuple[Floats, NDArray[np.intp], NDArray[np.intp]]:
    """``[R, K]`` of ``columns [R, D]``: one of those that are equal, as they first come; the number
    ``[D]`` of each, and how many there are ``[K]``."""
    number: dict[bytes, int] = {}
    kind = np.array([number.setdefault(c.tobytes(), len(number)) for c in columns.T.copy()])
    return columns[:, np.unique(kind, return_index=True)[1]], kind, np.bincount(kind)


def spread(seconds: Floats, count: NDArray[np.integer]) -> tuple[Program, Columns, float]:
    """A program of the largest load, its shares of rows of ``seconds [G, K]``, and its unit;
    ``count [K]``: devices of each kind."""
    can, program = np.isfinite(seconds), Program()
    on, taken_s = program.shares(can), np.where(can, seconds, 0.0)
    for k, many in enumerate(count.tolist()):
        time = np.zeros(1, np.intp), -many * taken_s.sum()
        program.row(0.0, (on[:, k], taken_s[:, k]), time)
    return program, on, float(taken_s.sum())


def balanced(seconds: Floats) -> NDArray[np.intp]:
    """A device ``[G]`` for each row of ``seconds [G, D]``: loads are about as even as can be.

    In fractions they are, and fewer rows than there are devices are split. Of these the heaviest is
    first, each where the load is then least.
    """
    program, on, _ = spread(seconds, np.ones(seconds.shape[1], int))
    program.solve()
    share = np.where(np.isfinite(seconds), program.values[on], -1.0)
    device, split = share.argmax(axis=1), share.max(axis=1) < 1.0 - 1e-6
    load_s = np.bincount(device[~split], seconds[~split, device[~split]], seconds.shape[1])
    for g in np.flatnonzero(split)[np.argsort(-seconds[split].min(axis=1), kind="stable")]:
        device[g] = (load_s + seconds[g]).argmin()
        load_s[device[g]] += seconds[g, device[g]]
    return device


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

    def __init__(self, problem: Problem, unit_s: float | None = None) -> None:
        """``unit_s``: a latency that is known to be possible, in which time is counted."""
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
        self.unit_s = max(most_s if unit_s is None else unit_s, 1e-300)
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
        self.whole = np.append(self.on, self.without[self.tails, self.heads])
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
        much less than on an accelerator a group is on the same one; that is all the more so of
        whole numbers, where it is a step away or not at all. So

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
        with_it, least = np.maximum(on[:, None] - self.far, 0.0), _LEAST
        if is_whole(x[self.whole]):
            with_it, least = np.rint(with_it), 0.0
        rows = len(self.program.limit)
        room_bytes = float(self.problem.memory_bytes[~self.pool].astype(np.float64).sum())
        self.program.covered(x, self.on, self.own_bytes, room_bytes)
        self._memory(with_it, least * self.memory_bytes)
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
            if covered[root] >= _COVERED:
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

    def choice(self, x: Floats) -> NDArray[np.int32]:
        """The device of each group, int32 ``[G]``, where ``x`` has whole numbers: what is together
        is on one accelerator, the largest first, each on that with most room."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        group_s, on = self.problem.group_compute_s, x[self.on] > 0.5
        together = (x[self.without[self.tails, self.heads]] < 0.5) & on[self.tails] & on[self.heads]
        ends = self.tails[together], self.heads[together]
        part = connected_components(csr_array((np.ones(len(ends[0])), ends), self.without.shape))[1]
        room = np.where(self.pool, -np.inf, self.problem.memory_bytes.astype(np.float64))
        choice = np.where(self.pool, group_s, np.inf).argmin(axis=1).astype(np.int32)
        size = np.bincount(part[on], self.own_bytes[on], minlength=len(on))
        for k in np.argsort(-size, kind="stable")[: len(np.unique(part[on]))].tolist():
            members = np.flatnonzero(on & (part == k))
            can = np.isfinite(group_s[members]).all(axis=0)
            choice[members] = device = int(np.where(can, room, -np.inf).argmax())
            room[device] -= size[k]
        return choice


def pieces_s(problem: Problem) -> float:
    """The piecewise latency, at least: 0 where a program would take more than a moment."""
    if problem.graph.num_groups > MOST_GROUPS:
        return 0.0
    pieces, asked = Pieces(problem), problem.objective is Objective.PIECEWISE_LATENCY
    if pieces.program.size > _PIECES_WORK / 8:
        return 0.0
    work = _PIECES_WORK if asked else _PIECES_WORK / 4
    return tighten(pieces.program, pieces.tighten, work) * pieces.unit_s * EXACT


class Call:
    """A program of a call: loads and memory, paths, and all that is sent.

    Attributes:
        program, unit_s: rows and columns, and what the first column counts time in.
        whole: columns that are whole numbers in every placement.
    """

    def __init__(self, problem: Problem, unit_s: float | None = None) -> None:
        """``unit_s``: of a call that is known to be possible."""
        g, self.problem, placed = problem.graph, problem, _Placed(problem, True, known_s=unit_s)
        self.program, self.unit_s, self.whole = placed.program, placed.unit_s, placed.on
        self.alone_s, self.sides, self.regions = placed.alone_s, placed.sides, Regions(problem)
        self.held = placed.held
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

    def _own(self, ops: NDArray[np.integer]) -> list[Terms]:
        on, group = self.whole, self.problem.graph.group[ops]
        return [(on[group, d], self.alone_s[ops, d]) for d in range(self.problem.num_devices)]

    def tighten(self, x: Floats) -> bool:
        """Add rows of what the answer ``x`` does not obey: between a fork and a join what is on
        one device runs one after another, and has room. False: it obeys all."""
        n, group = self.problem.num_ops, self.problem.graph.group
        disobeys = any([self.program.covered(x, *held) for held in self.held])
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

    def choice(self, x: Floats) -> NDArray[np.int32]:
        """The device of each group, int32 ``[G]``, where ``x`` has whole numbers."""
        return x[self.whole].argmax(axis=1).astype(np.int32)


def call_s(problem: Problem, known_s: float = 0.0) -> float:
    """A call, at least. Of groups in parts little is asked where more is ``known_s`` by far."""
    call = Call(problem)
    least = tighten(call.program, call.tighten, _CALL_WORK)
    if least * call.unit_s > _NEAR * known_s and call.program.answer is not None:
        least = call.apart(least, _APART_WORK)
    return least * call.unit_s * EXACT


def period_s(
    problem: Problem, low: float = 0.0, high: float = 1.0, more_s: float = 0.0, sends: bool = True
) -> float:
    """An item of a stream, at least: loads and memory; if it ``sends``, between two devices also
    all that is sent.

    All but the busiest device do from ``low`` to ``high`` of its seconds on average, so that
    operators take at least ``low`` of what ``loaded_s`` is more than ``compute_s``; the busiest
    takes ``more_s`` besides.

    Of the items that a period is measured by (``least_window``) those that were in flight before
    may have been sent by then. What the others send, and do besides, counts.
    """
    window = least_window(problem.num_microbatches) if sends and problem.max_phases == 1 else 0
    counted = max(0.0, window - problem.max_in_flight + 1) / max(window, 1)
    placed = _Placed(problem, counted > 0 and problem.num_workers == 2, more_s)
    program, on, (time, minus_s) = placed.program, placed.on, placed.time
    alone_s, loaded_s = map(problem.graph.per_group, (placed.alone_s, placed.loaded_s))
    for here, handed, taken in zip(placed.sides, placed.handed, placed.taken, strict=True):
        load = (on[:, here], (alone_s + low * (loaded_s - alone_s))[:, here]), *taken
        program.row(-more_s, *load, (time, minus_s))
        if handed:
            program.row(0.0, *load, *handed, (time, minus_s / counted))
    for sent in placed.channels.values():
        program.row(0.0, *sent, (time, minus_s / counted))
    rest = 1.0 + (problem.num_workers - 1) * high
    every = (on, alone_s), *chain(*placed.taken)
    program.row(-rest * more_s, *every, (time, rest * minus_s))
    return program.solve()[0] * placed.unit_s * EXACT
