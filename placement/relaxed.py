"""What no placement can be better than, by linear programs over placements in fractions."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.problem import Floats, Problem, host_of
from placement.timeline import least_window
from placement.tools.clock import loads

Columns = NDArray[np.intp]
Terms = tuple[Columns, ArrayLike]  # columns, and what each counts


@loads
def _load_solver() -> None:
    """SciPy takes longer to import than a small program to solve."""
    import scipy.optimize
    import scipy.sparse  # noqa: F401


class Program:
    """Rows of columns between 0 and 1; the first column is as small as the rows allow.

    ``found`` has the columns as they then are.
    """

    def __init__(self) -> None:
        self.upper, self.limit, self.found = np.ones(1), np.zeros(0), np.zeros(1)
        self._entries: list[tuple[Columns, Columns, Floats]] = []

    def columns(self, upper: ArrayLike) -> Columns:
        """New columns of at most ``upper [K]``, which are 0 or 1."""
        self.upper, before = np.append(self.upper, upper), len(self.upper)
        return np.arange(before, len(self.upper))

    def rows(self, limit: Floats, *terms: Terms) -> None:
        """A row for each of ``limit [R]``: of each term ``[R]`` one entry."""
        first, self.limit = len(self.limit), np.append(self.limit, limit)
        self._enter(first + np.arange(len(limit)), terms)

    def row(self, limit: float, *terms: Terms) -> None:
        """One row of all columns of all terms."""
        first, self.limit = len(self.limit), np.append(self.limit, limit)
        self._enter(np.array(first), terms)

    def _enter(self, row: Columns, terms: tuple[Terms, ...]) -> None:
        for columns, values in terms:
            a, b, c = np.broadcast_arrays(row, columns, np.asarray(values, np.float64))
            self._entries.append((a.ravel(), b.ravel(), c.ravel()))

    def shares(self, can: NDArray[np.bool_]) -> Columns:
        """Columns like ``can [G, D]``, 0 where it is False; those of a row add up to 1."""
        on = self.columns(can.ravel()).reshape(can.shape)
        for sign in (1.0, -1.0):
            self.rows(np.full(len(can), sign), *((column, sign) for column in on.T))
        return on

    def solve(self) -> tuple[float, Floats]:
        """The first column, at least, and the multipliers ``[R]`` that prove it.

        It is what they sum up to, whatever the solver's tolerance.
        """
        _load_solver()
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        row, column, value = map(np.concatenate, zip(*self._entries, strict=True))
        most = np.full(len(self.limit), 1e-300)
        np.maximum.at(most, row, np.abs(value))
        shape = len(self.limit), len(self.upper)
        rows, limit = csr_array((value / most[row], (row, column)), shape=shape), self.limit / most
        cost, bounds = np.eye(1, shape[1])[0], np.stack([0 * self.upper, self.upper], axis=1)
        answer = linprog(cost, A_ub=rows, b_ub=limit, bounds=bounds, method="highs")
        self.found = answer.x if answer.success else 0 * self.upper
        if not answer.success:
            return 0.0, 0 * limit
        price = np.maximum(-answer.ineqlin.marginals, 0.0)
        left = np.minimum(cost + rows.T @ price, 0.0)
        return float(left @ self.upper - price @ limit), price / most


def of_groups(problem: Problem, seconds: Floats) -> Floats:
    """``[G, D]`` of ``seconds [N, D]``."""
    total = np.zeros(problem.group_compute_s.shape)
    np.add.at(total, problem.graph.group, seconds)
    return total


class _Placed:
    """A program of a time, and of the shares ``on [G, D]`` of groups on devices with memory.

    A tied parameter is held in equal parts. Beside what a device streams it has two buffers. The
    time is counted in ``unit_s``, more than any call or item takes.
    """

    def __init__(self, problem: Problem, crossing: bool, more_s: float = 0.0) -> None:
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
        self._hold()
        self.alone_s, self.loaded_s = (
            np.where(problem.supported, s, 0.0) for s in (problem.compute_s, problem.loaded_s)
        )
        self.unit_s = max(float(self.loaded_s.sum()) + more_s, 1e-300)
        self.arrives: list[Terms] = []  # for each use of a tensor
        self.handed: list[list[Terms]] = [[] for _ in self.sides]
        self.channels: dict[int, list[Terms]] = {}
        if len(self.sides) == 2 and crossing:
            self._cross()
        self.time = np.zeros(1, np.intp), -self.unit_s

    def _hold(self) -> None:
        g, problem, on = self.problem.graph, self.problem, self.on
        share = g.param_bytes / np.maximum(
            np.bincount(g.param_use, minlength=len(g.param_bytes)), 1
        )
        held = np.bincount(g.group[g.param_use_op], share[g.param_use], len(on))
        for d, *streaming in self.sides:
            terms: list[Terms] = [(on[:, d], held)]
            if streaming:
                most = max(int(g.op_param_bytes.max()), 1)
                buffer = self.program.columns(np.ones(1))
                for s in streaming:
                    read = on[g.group, s], g.op_param_bytes / most
                    self.program.rows(np.zeros(g.num_ops), read, (buffer, -1.0))
                terms.append((buffer, 2.0 * most))
            if d == host_of(problem)[0]:
                terms += [(on[:, s], held) for s in self.streaming]
            if sum(np.sum(values) for _, values in terms) > problem.memory_bytes[d]:
                self.program.row(float(problem.memory_bytes[d]), *terms)

    def _cross(self) -> None:
        """Columns for all that crosses between two devices, by reading group, and once for all."""
        g, problem, on = self.problem.graph, self.problem, self.on
        size, given = g.tensor_bytes.astype(np.float64), problem.profile.transfer_s
        (_, shares_host), made = host_of(problem), g.tensor_src >= 0
        source = np.where(made, g.group[g.tensor_src], -1)
        (tensor, reader), pair = np.unique(
            np.stack([g.use_tensor, g.group[g.use_dst]]), axis=1, return_inverse=True
        )
        for k, here in enumerate(self.sides):
            src, dst = int(self.sides[1 - k][0]), int(here[0])
            sent_s = problem.link_latency_s[src, dst] + size * problem.link_s_per_byte[src, dst]
            sent_s = sent_s if given is None else given[:, src, dst]
            handed_s = problem.link_send_s[src, dst] + size * problem.link_send_s_per_byte[src, dst]
            self.unit_s += float((sent_s + handed_s + problem.link_wake_s[src, dst]).sum())

            may = (source[tensor] != reader) & (made | ~shares_host[dst])[tensor]
            crosses, none = np.zeros(len(tensor), np.intp), np.zeros(may.sum())
            crosses[may] = self.program.columns(none + 1)
            from_, to = source[tensor[may]], reader[may]
            there = ((on[from_, d], -1.0 * made[tensor[may]]) for d in here)
            self.program.rows(none, *((on[to, d], 1.0) for d in here), *there, (crosses[may], -1.0))
            self.arrives.append((crosses[pair], may[pair] * sent_s[g.use_tensor]))
            if problem.contention:
                which, at = np.unique(tensor[may], return_inverse=True)
                sent = self.program.columns(np.ones(len(which)))
                self.program.rows(none, (crosses[may], 1.0), (sent[at], -1.0))
                way = int(problem.link_channel[src, dst])
                self.channels.setdefault(way, []).append((sent, sent_s[which]))
                # What is handed over last may be there before that ends.
                kept_s = np.minimum(sent_s, handed_s) * made
                self.handed[1 - k].append((sent, kept_s[which]))


def balanced(seconds: Floats) -> NDArray[np.intp]:
    """A device ``[G]`` for each row of ``seconds [G, D]``: loads are about as even as can be.

    In fractions they are, and fewer rows than there are devices are split. Of these the heaviest is
    first, each where the load is then least.
    """
    can, program = np.isfinite(seconds), Program()
    on, taken_s = program.shares(can), np.where(can, seconds, 0.0)
    for d in range(seconds.shape[1]):
        program.row(0.0, (on[:, d], taken_s[:, d]), (np.zeros(1, int), -taken_s.sum()))
    program.solve()
    share = np.where(can, program.found[on], -1.0)
    device, split = share.argmax(axis=1), share.max(axis=1) < 1.0 - 1e-6
    load_s = np.bincount(device[~split], seconds[~split, device[~split]], seconds.shape[1])
    for g in np.flatnonzero(split)[np.argsort(-seconds[split].min(axis=1), kind="stable")]:
        device[g] = (load_s + seconds[g]).argmin()
        load_s[device[g]] += seconds[g, device[g]]
    return device


def load_s(problem: Problem) -> float:
    """The largest load, at least, of devices that hold no more parameters than their memory."""
    placed = _Placed(problem, False)
    seconds = of_groups(problem, placed.alone_s)
    for here in placed.sides:
        placed.program.row(0.0, (placed.on[:, here], seconds[:, here]), placed.time)
    return placed.program.solve()[0] * placed.unit_s * (1 - 1e-12)


def call_s(problem: Problem) -> float:
    """A call, at least: loads and memory; between two devices also paths, and all that is sent."""
    g, placed = problem.graph, _Placed(problem, True)
    program, on, unit_s = placed.program, placed.on, placed.unit_s

    def own(ops: NDArray[np.integer]) -> list[Terms]:
        return [(on[g.group[ops], d], placed.alone_s[ops, d]) for d in range(problem.num_devices)]

    every, none = np.arange(g.num_ops), np.zeros(g.num_ops)
    end = program.columns(none + 1)
    program.rows(none, *own(every), (end, -unit_s))
    program.rows(none, (end, 1.0), (0 * end, -1.0))
    after = end[g.tensor_src[g.use_tensor]], unit_s * (g.tensor_src[g.use_tensor] >= 0)
    until = end[g.use_dst], -unit_s
    program.rows(np.zeros(len(g.use_dst)), after, *placed.arrives, *own(g.use_dst), until)
    group_s = of_groups(problem, placed.alone_s)
    for here, handed in zip(placed.sides, placed.handed, strict=True):
        program.row(0.0, (on[:, here], group_s[:, here]), *handed, placed.time)
    for sent in placed.channels.values():
        program.row(0.0, *sent, placed.time)
    return program.solve()[0] * unit_s * (1 - 1e-12)


def period_s(problem: Problem, low: float = 0.0, high: float = 1.0, more_s: float = 0.0) -> float:
    """An item of a stream, at least: loads and memory; between two devices also all that is sent.

    All but the busiest device do from ``low`` to ``high`` of its seconds on average, so that
    operators take at least ``low`` of what ``loaded_s`` is more than ``compute_s``; the busiest
    takes ``more_s`` besides.

    Of the items that a period is measured by (``least_window``) those that were in flight before
    may have been sent by then. What the others send, and do besides, counts.
    """
    window = least_window(problem.num_microbatches) if problem.max_phases == 1 else 0
    counted = max(0.0, window - problem.max_in_flight + 1) / max(window, 1)
    placed = _Placed(problem, counted > 0, more_s)
    program, on, (time, minus_s) = placed.program, placed.on, placed.time
    alone_s, loaded_s = of_groups(problem, placed.alone_s), of_groups(problem, placed.loaded_s)
    for here, handed in zip(placed.sides, placed.handed, strict=True):
        load = on[:, here], (alone_s + low * (loaded_s - alone_s))[:, here]
        program.row(-more_s, load, (time, minus_s))
        if handed:
            program.row(0.0, load, *handed, (time, minus_s / counted))
    for sent in placed.channels.values():
        program.row(0.0, *sent, (time, minus_s / counted))
    rest = 1.0 + (problem.num_workers - 1) * high
    program.row(-rest * more_s, (on, alone_s), (time, rest * minus_s))
    return program.solve()[0] * placed.unit_s * (1 - 1e-12)
