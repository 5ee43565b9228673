"""Operator graphs as blocks: maximal pieces of one device, forward and backward apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.graph import components, levels, topological_order
from placement.problem import Placement, Problem
from placement.schedule import Schedule
from placement.schedulers import check_one_phase, without_deadlock

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Cut:
    """``n`` blocks of a placed graph of ``N`` operators; between blocks there are no circles.

    Attributes:
        label: int32 ``[N]`` block of each operator; blocks are numbered topologically.
        device: int32 ``[n]``.
        level: int32 ``[n]`` most changes of device or direction on a path to the block.
        backward: bool ``[n]``.
        edges: int32 ``[E, 2]`` distinct (block, block that uses what it makes).
        problem, placement: what was cut.
    """

    label: Ints
    device: Ints
    level: Ints
    backward: NDArray[np.bool_]
    edges: Ints
    problem: Problem
    placement: Placement

    @property
    def num_blocks(self) -> int:
        """``n``."""
        return len(self.device)

    def visits(self, device: int, backward: bool | None = None) -> list[int]:
        """Levels at which micro-batches visit a device (in one direction), in order."""
        here = self.device == device
        if backward is not None:
            here &= self.backward == backward
        return sorted(set(self.level[here].tolist()))

    @property
    def most_visits(self) -> int:
        """Of all devices."""
        return max(len(self.visits(d)) for d in range(self.problem.num_devices))

    def schedule(self, key: ArrayLike) -> Schedule:
        """Every device runs its blocks by ``key [M, n]``, smallest first, then deepest level first.

        Operators of a block run in the order of their numbers.

        Raises: SchedulerError, micro-batches would wait for buffers that later ones change.
        """
        keys, count = np.asarray(key, dtype=np.float64), len(self.label)
        batch, op = np.divmod(np.arange(len(keys) * count), count)
        block = self.label[op]
        order = np.lexsort((op, block, batch, -self.level[block], keys[batch, block]))
        rows, on = np.stack([op, batch], axis=1)[order], self.device[block[order]]
        each = tuple(rows[on == d] for d in range(self.problem.num_devices))
        return without_deadlock(self.problem, self.placement, Schedule(each, len(keys)))


def cut(
    problem: Problem,
    placement: Placement,
    *,
    kind: ArrayLike | None = None,
    max_blocks: int = 64,  # which a search still orders in seconds
) -> Cut:
    """Blocks of a placement int32 ``[N]``.

    The level of an operator counts the changes of device (or of ``kind`` int ``[N]``, by default
    forward or backward) on the way to it. Connected operators of one level, device and kind are
    a block: whatever leaves it goes to a higher level, so that there are no circles. While there
    are more than ``max_blocks``, those of one level are joined, then, of at most 2,000, the
    shortest blocks of a device with no other block on a way between them. Where neither is
    possible there are more.

    Raises:
        SchedulerError: the placement has several phases.
    """
    check_one_phase(placement)
    g, worker = problem.graph, problem.worker[placement]
    sort = np.asarray(g.is_backward if kind is None else kind, dtype=np.int64)
    place = worker * (1 + int(sort.max())) + sort
    level = np.zeros(g.num_ops, np.int32)
    for u, v in g.edges[np.argsort(g.edges[:, 1], kind="stable")]:
        level[v] = max(level[v], level[u] + (place[u] != place[v]))
    same = np.stack([level, place], axis=1)
    within = (same[g.edges[:, 0]] == same[g.edges[:, 1]]).all(axis=1)
    label = components(g.edges[within], g.num_ops).astype(np.int64)
    if label.max() >= max_blocks:
        label = np.unique(same, axis=0, return_inverse=True)[1].reshape(-1)
    seconds = problem.compute_s[np.arange(g.num_ops), placement]
    label = _joined(label, place, g.edges, seconds, max_blocks)
    first = np.unique(label, return_index=True)[1]
    block_level = np.zeros(len(first), np.int32)
    np.maximum.at(block_level, label, level)
    edges = _outer(label, g.edges)
    order = _topological(block_level, edges)
    number = np.argsort(order).astype(np.int32)
    renumbered = np.unique(number[edges], axis=0).astype(np.int32).reshape(-1, 2)
    return Cut(
        number[label],
        worker[first][order],
        levels(renumbered, len(order)),
        g.is_backward[first][order],
        renumbered,
        problem,
        placement,
    )


def _outer(label: NDArray[np.int64], edges: Ints) -> NDArray[np.int64]:
    """Distinct edges between labels."""
    pairs = label[edges].reshape(-1, 2)
    return np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)


def _topological(level: Ints, edges: NDArray[np.int64]) -> list[int]:
    """Blocks in topological order, of several the one of the lowest level first."""
    block = np.argsort(level, kind="stable")  # numbered so that lower levels come first
    mine = np.argsort(block)[edges]
    mine = mine[np.argsort(mine[:, 0], kind="stable")]
    return [int(block[n]) for n in topological_order(mine, len(level))]


def _joined(
    label: NDArray[np.int64],
    place: NDArray[np.int64],
    edges: Ints,
    seconds: NDArray[np.float64],
    max_blocks: int,
) -> NDArray[np.int64]:
    """Fewer labels: the shortest of a place are joined where that closes no circle.

    What reaches what, and what does by a way through another, is known once and kept up to date:
    joining costs a look at all pairs. More than 2,000 are not joined: tables of all pairs take
    gigabytes.
    """
    label = np.unique(label, return_inverse=True)[1].reshape(-1)
    num = int(label.max()) + 1
    if num <= max_blocks or num > 2_000:
        return label
    reach = np.zeros((num, num), bool)
    reach[tuple(_outer(label, edges).T)] = True
    for b in range(num):
        reach |= reach[:, b : b + 1] & reach[b]
    between = reach.astype(np.float32) @ reach.astype(np.float32) > 0  # a way through another
    size = np.bincount(label, weights=seconds)
    where = np.zeros(num, np.int64)
    where[label] = place
    into = np.arange(num)
    for _ in range(num - max_blocks):
        ok = (where[:, None] == where) & ~between & ~between.T
        first, then = np.nonzero(np.triu(ok, 1))
        if len(first) == 0:
            break
        at = np.argmin(size[first] + size[then])
        a, b = first[at], then[at]  # b is gone: nothing is where it is, and it reaches nothing
        into[into == b] = a
        after, before = reach[a] | reach[b], reach[:, a] | reach[:, b]
        after[[a, b]] = before[[a, b]] = False
        for table in (reach, between):
            table[[a, b]] = table[:, [a, b]] = False
        reach[a], reach[:, a] = after, before
        around = before[:, None] & after
        reach |= around
        between |= around
        between[a] = reach[after].any(axis=0)
        between[:, a] = reach[:, before].any(axis=1)
        size[a] += size[b]
        where[b] = -1 - b
    return np.unique(into[label], return_inverse=True)[1].reshape(-1)
