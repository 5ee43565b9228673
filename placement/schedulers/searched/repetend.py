"""The repeating pattern of a pipeline: modulo scheduling with CP-SAT, and proofs by it.

A *pattern* gives the blocks of ``K`` consecutive micro-batches a start each; micro-batch
``c + K i`` runs ``i`` periods of length ``P`` after micro-batch ``c``. (K. Lin et al., "Tessel",
TPDS 35(12) 2024, call it a repetend and enumerate cuts of one fixed order for ``K = 1``.)

For a given ``P`` the question is a periodic event scheduling problem. Two blocks ``u, v`` that
share a device stand in one of the relations

    t_u <= s_v - s_u - P q <= P - t_v        for an integer q, their *lag*,

and all else is linear in the starts ``s`` and the lags ``q``:

* memory after the start of ``u``: every block ``v`` of the device has by then started in as many
  micro-batches as ``u``, less ``q``. Hence ``m_u - sum_v m_v q_uv <= M``;
* identical micro-batches may swap what they run, so each block takes them in their order;
* what one micro-batch holds from ``u`` to ``v`` is held ``M`` times at most:
  ``s_v + t_v <= s_u + P floor(M / amount)``. This is implied, but it is what makes proofs short,
  like the same summed up over a device, and that two such spans exclude each other where there
  is no memory for both;
* without loss, neighbours are less than a period apart (``_near``, ``_other_roots``).

There are no booleans for the order of pairs and no offsets modulo ``P``. On the published cases
this is 10-1000 times faster than the formulation with both.

A pattern whose lags are feasible at ``P`` is so at every longer period: feasibility is monotone,
and infeasible at ``P - 1`` proves ``P`` optimal.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from placement.graph import components
from placement.schedulers.searched import packing
from placement.schedulers.searched.blocks import NEVER, BlocksError, Ints, Work
from placement.tools import cpsat


class RepetendEffort(NamedTuple):
    """What may be spent on a pattern, and asked."""

    packing: float = 0.3  # of the time, at most, goes to patterns without CP-SAT
    unroll: int = 4  # micro-batches of a pattern, at most
    least_s: float = 0.2  # a question gets as much to be written down, however little is left
    nodes: int = 2**11  # blocks x micro-batches of a question ...
    pairs: int = 2**18  # ... and pairs of them on one device: more fill gigabytes


EFFORT = RepetendEffort()


@dataclass(frozen=True, eq=False)
class Pattern:
    """Micro-batch ``c + K i`` starts block ``b`` at ``starts[c, b] + period * i``.

    Attributes:
        starts: int64 ``[K, n]``.
        period: of ``K`` micro-batches.
    """

    starts: Ints
    period: int

    @property
    def unroll(self) -> int:
        """``K``."""
        return len(self.starts)

    @property
    def per_micro_batch(self) -> Fraction:
        """Time per micro-batch in steady state."""
        return Fraction(self.period, self.unroll)

    def unrolled(self, num_micro_batches: int) -> Ints:
        """int64 ``[N, n]`` starts of the first ``N`` micro-batches."""
        batch = np.arange(num_micro_batches)
        shift = self.period * (batch // self.unroll)
        return self.starts[batch % self.unroll] + shift[:, None]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a search knows when it ends.

    Attributes:
        pattern: the best.
        bound: proved: no pattern of ``unroll`` micro-batches has less time per micro-batch.
        unroll: what the search allowed; ``pattern.unroll`` divides it.
        others: longer patterns that were the best on the way.
    """

    pattern: Pattern
    bound: Fraction
    unroll: int = 1
    others: tuple[Pattern, ...] = ()

    @property
    def optimal(self) -> bool:
        """Whether the pattern's period is proved to be the shortest."""
        return self.pattern.per_micro_batch <= self.bound


def search(work: Work, unroll: int | None, seconds: float) -> Outcome:
    """The shortest pattern of ``unroll`` micro-batches, or the best so far after ``seconds``.

    ``unroll`` None: of one, then, where it is longer than every schedule has to be, of two,
    three, ... while there is time; the shortest of them.

    Raises:
        BlocksError: no micro-batch fits into the memory, or nothing was found in time.
    """
    end = time.perf_counter() + seconds
    start = _one_at_a_time(work, end)
    least = _below(work.period_bound)
    packed = packing.shortest(work, least, start.period, end - (1 - EFFORT.packing) * seconds)
    if packed is not None:
        start = Pattern(packed[0][None], packed[1])
    shorter, bound = _shortest(work, 1, start.period, end)
    best = Outcome(shorter or start, Fraction(bound))
    if unroll is not None:
        return best if unroll == 1 else _search_unrolled(work, unroll, best.pattern, end)
    for k in range(2, EFFORT.unroll + 1):
        left = end - time.perf_counter()
        if left <= 0 or best.pattern.per_micro_batch <= work.period_bound:
            break
        share = left / (EFFORT.unroll + 1 - k)
        wide = _search_unrolled(work, k, best.pattern, time.perf_counter() + share)
        if wide.pattern.per_micro_batch < best.pattern.per_micro_batch:
            best = replace(wide, others=(*best.others, best.pattern))
    return best


class _OutOfTime(Exception):
    """A question takes too long to write down."""


def _one_at_a_time(work: Work, end: float) -> Pattern:
    """No two micro-batches at a time: what is possible if anything is.

    Raises:
        BlocksError: not even that, or it is not known in time.
    """
    time_of = [b.time for b in work.blocks]
    starts = np.zeros((1, work.num_blocks), np.int64)
    now = 0
    for b, block in enumerate(work.blocks):
        arrived = [int(starts[0, u]) + time_of[u] + delay for u, delay in block.preds]
        starts[0, b] = max(now, *arrived, 0)
        now = int(starts[0, b]) + time_of[b]
    pattern = Pattern(starts, now)
    if not work.errors(starts):
        return pattern
    shorter, fits = solve(work, 1, now, end - time.perf_counter())
    if fits is None:
        raise BlocksError("no order was found in time that fits into memory; give more seconds")
    if shorter is None:
        raise BlocksError(
            f"memory {work.limit} of the devices: not even one micro-batch at a time fits; "
            f"with {_least_memory(work, now)} on each device it would"
        )
    return shorter


def _least_memory(work: Work, period: int) -> int:
    """The smallest limit, the same for all devices, in which one micro-batch fits."""
    low = max(b.memory for b in work.blocks)
    high = sum(max(0, b.memory) for b in work.blocks)

    def fits(limit: int) -> bool:
        roomy = Work(work.blocks, work.num_devices, (limit,) * work.num_devices)
        return solve(roomy, 1, period, 1.0)[0] is not None

    return low + bisect_left(range(low, high), True, key=fits)


def _search_unrolled(work: Work, k: int, one: Pattern, end: float) -> Outcome:
    """The shortest pattern of ``k`` micro-batches, or ``one``, that of one.

    First those whose micro-batches all look alike: with all times multiplied by ``k`` they are
    patterns of one micro-batch, up to rounding, in a far smaller search.
    """
    now = time.perf_counter()
    best = one
    upper = one.per_micro_batch * k
    alike, _ = _shortest(work.scaled(k), 1, _below(upper), now + 0.4 * (end - now))
    if alike is not None:
        copy = np.arange(k)[:, None]
        best = Pattern((alike.starts + copy * alike.period) // k, alike.period)
        upper = Fraction(alike.period)
    wide, bound = _shortest(work, k, _below(upper), end)
    return Outcome(wide or best, min(Fraction(bound, k), (wide or best).per_micro_batch), k)


def _below(period: Fraction) -> int:
    """The smallest integer that is not below ``period``."""
    return -(-period.numerator // period.denominator)


def _shortest(work: Work, k: int, below: int, end: float) -> tuple[Pattern | None, int]:
    """The shortest pattern of ``k`` micro-batches with a period less than ``below``, and a bound.

    The bound is proved: no period is smaller. Long steps up from the bound of the blocks until
    something is feasible, then halving; what could not be decided in its share of the time is
    passed over and comes last.
    """
    bound = cursor = _below(work.period_bound * k)
    best, step = None, 0
    while cursor < below:
        left = end - time.perf_counter()
        if left <= 0:
            return best, bound
        period = min(cursor + step, below - 1)
        if best is not None:
            period = (cursor + below - 1) // 2
        pattern, fits = solve(work, k, period, 0.4 * left)
        if pattern is not None:
            best = _tightened(work, pattern, cursor, max(end, time.perf_counter() + EFFORT.least_s))
            below = best.period
            continue
        if fits is False:
            bound = period + 1
        cursor, step = period + 1, 2 * step + 1
    while bound < below:
        left = end - time.perf_counter()
        if left <= 0:
            return best, bound
        pattern, fits = solve(work, k, below - 1, left)
        if pattern is not None:
            best, below = pattern, pattern.period
        elif fits is False:
            bound = below
    return best, bound


def solve(
    work: Work, k: int, period: int, seconds: float, *, seed: int = 0, shortest_flow: bool = False
) -> tuple[Pattern | None, bool | None]:
    """A pattern of ``k`` micro-batches in ``period``, and whether there is one (None: unknown).

    Args:
        seconds: after which it is unknown; ``least_s`` at least to write the question down.
        seed: others than 0 search at random, for different patterns.
        shortest_flow: the one with the least time from its first start to its last end.
    """
    pairs = sum(len(on) ** 2 for on in work.on) * k**2 // 2
    if k * work.num_blocks > EFFORT.nodes or pairs > EFFORT.pairs:
        return None, None
    end = time.perf_counter() + max(seconds, EFFORT.least_s)
    try:
        return _Question(work, k, end).solved(period, seconds, seed, shortest_flow)
    except _OutOfTime:
        return None, None


class _Question:
    """Whether ``k`` micro-batches of ``work`` have a pattern, in one period or another.

    Node ``c n + b`` is block ``b`` of micro-batch ``c``. Raises ``_OutOfTime`` where writing it
    down is not over at ``end``.
    """

    def __init__(self, work: Work, k: int, end: float) -> None:
        self.work, self.k, self.end = work, k, end
        self.nodes = list(work.blocks) * k
        self.near, self.roots = _near(work), _other_roots(work)

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Those of nodes that share a device, the smaller one first."""
        devices = [set(b.devices) for b in self.nodes]
        pairs = itertools.combinations(range(len(self.nodes)), 2)
        return [(x, y) for x, y in pairs if devices[x] & devices[y]]

    def _check_time(self) -> None:
        if time.perf_counter() > self.end:
            raise _OutOfTime

    def solved(
        self, period: int, seconds: float, seed: int, shortest_flow: bool
    ) -> tuple[Pattern | None, bool | None]:
        """See ``solve``."""
        from ortools.sat.python import cp_model

        far = self.closure(period)
        lags = None if far is None else self._fixed_point(period, far)
        if far is None or lags is None:
            return None, False
        work, nodes = self.work, self.nodes
        delay = max((d for b in work.blocks for _, d in b.preds), default=0)
        reach = len(nodes) * (period + max(b.time for b in nodes) + delay)
        model, most = cp_model.CpModel(), reach // period + 1
        start = [
            model.new_int_var(max(-reach, int(far[0, x])), min(reach, -int(far[x, 0])), "")
            for x in range(len(nodes))
        ]
        for x, y, lag in self._edges(period):
            model.add(start[y] - start[x] >= lag)
        lag_of: dict[tuple[int, int], Any] = {}
        for i, ((x, y), (low, high)) in enumerate(lags.items()):
            if i % 256 == 0:
                self._check_time()
            q = low if low == high else model.new_int_var(max(low, -most), min(high, most), "")
            lag_of[x, y], lag_of[y, x] = q, -1 - q
            model.add_linear_constraint(
                start[y] - start[x] - period * q, nodes[x].time, period - nodes[y].time
            )
        for d, limit in enumerate(work.limit or ()):
            self._check_time()
            held = [x for x, b in enumerate(nodes) if d in b.devices and b.memory]
            for x in held:
                if nodes[x].memory > 0:
                    others = [nodes[y].memory * lag_of[x, y] for y in held if y != x]
                    model.add(nodes[x].memory - sum(others) <= limit)
            self._limit_pairs(model, d, limit, period, most, start)
        if shortest_flow:
            first = model.new_int_var(-reach, reach, "")
            last = model.new_int_var(-reach, 2 * reach, "")
            for x, block in enumerate(nodes):
                model.add(start[x] >= first)
                model.add(start[x] + block.time <= last)
            model.minimize(last - first)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        self._check_time()
        left = min(seconds, self.end - time.perf_counter())
        solver.parameters.max_time_in_seconds = max(left, 0.001)
        solver.parameters.random_seed = seed
        solver.parameters.randomize_search = seed != 0
        # Starts and lags are tied by differences only: their LP relaxation says nothing.
        solver.parameters.linearization_level = 0
        # What presolving would find is in the model; it takes longer than most of these searches.
        solver.parameters.cp_model_presolve = False
        status = cpsat.solve(solver, model)
        if status == cp_model.INFEASIBLE:
            return None, False
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, None
        values = np.array([solver.value(s) for s in start]).reshape(self.k, work.num_blocks)
        return Pattern(values - values.min(), period), True

    def _limit_pairs(
        self, model: Any, d: int, limit: int, period: int, most: int, start: Sequence[Any]
    ) -> None:
        """Of pairs that take memory of device ``d`` and release it, only so many at a time.

        ``start`` are variables of the nodes. Two pairs that do not fit together take turns; of
        which periods they are is at most ``most`` apart.
        """
        pairs = self.work.pairs[d]
        # (number of the pair, when it takes memory, when it releases it, how much), by micro-batch
        spans = [
            [
                (i, start[first + u], start[first + v] + self.nodes[v].time, amount)
                for i, (u, v, amount) in enumerate(pairs)
            ]
            for first in range(0, len(start), self.work.num_blocks)
        ]
        if len(pairs) > 1:
            by_pair = itertools.chain.from_iterable(zip(*spans, strict=True))
            model.add(
                sum(size * (until - begin) for _, begin, until, size in by_pair) <= limit * period
            )
        for one, other in itertools.combinations(itertools.chain.from_iterable(spans), 2):
            pair, begin, until, size = one
            other_pair, other_begin, other_until, other_size = other
            if size + other_size > limit and pair != other_pair:
                self._check_time()
                lag = model.new_int_var(-most, most, "")
                model.add(other_begin - period * lag >= until)
                model.add(other_until - period * lag <= begin + period)

    def _edges(self, period: int) -> list[tuple[int, int, int]]:
        """(x, y, lag): node ``y`` starts at least ``lag`` after node ``x``."""
        work, k, n = self.work, self.k, self.work.num_blocks
        edges = []
        for c in range(k):
            for b, block in enumerate(work.blocks):
                x = c * n + b
                edges += [(c * n + u, x, work.blocks[u].time + delay) for u, delay in block.preds]
                if k > 1:  # each block takes micro-batches in their order
                    edges.append((x, (c + 1) % k * n + b, block.time - (c + 1) // k * period))
            for d, limit in enumerate(work.limit or ()):
                for u, v, amount in work.pairs[d]:
                    ahead = c + limit // amount
                    lag = work.blocks[v].time - ahead // k * period
                    edges.append((c * n + v, ahead % k * n + u, lag))
            for u, v, lag in self.near:
                edges.append((c * n + v, c * n + u, 1 - lag - (period if k == 1 else 2 * period)))
        for root in self.roots:
            edges += [(0, root, 0), (root, 0, 1 - period)]
        return edges

    def closure(
        self, period: int, lags: Mapping[tuple[int, int], int] | None = None
    ) -> Ints | None:
        """int64 ``[kn, kn]``: least ``s_y - s_x`` from all edges; None if they contradict.

        Also from ``lags``, where those of all pairs are known.
        """
        total = len(self.nodes)
        far = np.full((total, total), NEVER)
        np.fill_diagonal(far, 0)
        for x, y, lag in self._edges(period):
            far[x, y] = max(far[x, y], lag)
        if not self._close(far):
            return None
        if lags is None:
            return far
        for (x, y), q in lags.items():
            far[x, y] = max(far[x, y], self.nodes[x].time + period * q)
            far[y, x] = max(far[y, x], self.nodes[y].time - period * (q + 1))
        return far if self._close(far) else None

    def _close(self, far: Ints) -> bool:
        """Whether what follows of ``far``, which is filled in, does not contradict itself."""
        for x in range(len(far)):
            if x % 16 == 0:
                self._check_time()
            np.maximum(far, far[:, x : x + 1] + far[x : x + 1], out=far)
        far[far < NEVER // 2] = NEVER
        return not (np.diagonal(far) > 0).any()

    def _fixed_point(self, period: int, far: Ints) -> dict[tuple[int, int], tuple[int, int]] | None:
        """Least and largest lag of every pair of nodes on a shared device; None: impossible.

        A lag that is decided tells something about the starts, and so about other lags.
        """
        time_of = [b.time for b in self.nodes]
        while True:
            lags = {}
            changed = False
            for x, y in self.pairs:
                low = -(-(int(far[x, y]) + time_of[y]) // period) - 1
                high = (-int(far[y, x]) - time_of[x]) // period
                if low > high:
                    return None
                lags[x, y] = low, high
                if low == high:
                    after, before = time_of[x] + period * low, time_of[y] - period * (low + 1)
                    if far[x, y] < after or far[y, x] < before:
                        far[x, y], far[y, x] = max(far[x, y], after), max(far[y, x], before)
                        changed = True
            if not changed:
                return lags
            if not self._close(far):
                return None


def _other_roots(work: Work) -> list[int]:
    """A block of each part but the first that hangs together by predecessors.

    Parts may move against each other by whole periods, where each releases what it takes, so
    that this block may start within a period after block 0.
    """
    edges = [(u, v) for v, block in enumerate(work.blocks) for u, _ in block.preds]
    part = components(np.array(edges, np.int64).reshape(-1, 2), work.num_blocks)
    roots = []
    for root in np.unique(part, return_index=True)[1].tolist()[1:]:
        members = set(np.flatnonzero(part == part[root]).tolist())
        left_over = (sum(work.blocks[b].memory for b in on if b in members) for on in work.on)
        if work.limit is None or not any(left_over):
            roots.append(root)
    return roots


def _near(work: Work) -> list[tuple[int, int, int]]:
    """(u, v, lag): without loss ``s_v - s_u`` is less than ``lag`` + a period.

    A block that takes no memory may start periods earlier without harm to anything but its
    predecessors, one that releases none periods later without harm but to its successors. Where
    there is one such neighbour, they are less than a period apart (two, where several
    micro-batches share a period and move on together).
    """
    users: list[list[int]] = [[] for _ in work.blocks]
    for v, block in enumerate(work.blocks):
        for u, _ in block.preds:
            users[u].append(v)
    pairs = []
    for v, block in enumerate(work.blocks):
        for u, delay in block.preds:
            early = block.memory <= 0 and len(block.preds) == 1
            late = work.blocks[u].memory >= 0 and len(users[u]) == 1
            late &= work.blocks[u].memory > 0 or not work.blocks[u].preds
            if early or late:
                pairs.append((u, v, work.blocks[u].time + delay))
    return pairs


def _tightened(work: Work, pattern: Pattern, least: int, end: float) -> Pattern:
    """The same order at its shortest period, not below ``least``; or one on the way at ``end``."""
    low, best, starts = least, pattern, pattern.starts.reshape(-1)
    question = _Question(work, pattern.unroll, end)
    lags = {(x, y): int(starts[y] - starts[x]) // pattern.period for x, y in question.pairs}
    while low < best.period:
        period = (low + best.period) // 2
        try:
            far = question.closure(period, lags)
        except _OutOfTime:
            return best
        if far is None:
            low = period + 1
        else:
            earliest = far.max(axis=0)
            best = Pattern((earliest - earliest.min()).reshape(pattern.starts.shape), period)
    return best
