"""Operator graphs as blocks: maximal pieces of one device, forward and backward apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.graph import components, levels, topological_order
from placement.modulo.blocks import Block, Work
from placement.problem import Placement, Problem
from placement.schedule import Schedule
from placement.schedulers import check_one_phase
from placement.simulator import durations

Ints = NDArray[np.int32]

# Blocks that a search still orders in seconds.
MAX_BLOCKS = 64
# More than this are not joined: tables of all pairs take gigabytes, and each join looks at them.
_MOST_JOINED = 2000
# Integer units of time in the load of the busiest device, and of memory in a limit.
_UNITS = 2000


@dataclass(frozen=True, eq=False)
class Cut:
    """``n`` blocks of a placed graph of ``N`` operators; between blocks there are no circles.

    Attributes:
        label: int32 ``[N]`` block of each operator; blocks are numbered topologically.
        device: int32 ``[n]``.
        level: int32 ``[n]`` most changes of device or direction on a path to the block.
        backward: bool ``[n]``.
        edges: int32 ``[E, 2]`` distinct (block, block that uses what it makes).
        num_devices: ``D``.
    """

    label: Ints
    device: Ints
    level: Ints
    backward: NDArray[np.bool_]
    edges: Ints
    num_devices: int

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
        return max(len(self.visits(d)) for d in range(self.num_devices))

    def schedule(self, key: ArrayLike) -> Schedule:
        """Every device runs its blocks by ``key [M, n]``, smallest first, then deepest level first.

        Operators of a block run in the order of their numbers.
        """
        keys, count = np.asarray(key, dtype=np.float64), len(self.label)
        batch, op = np.divmod(np.arange(len(keys) * count), count)
        block = self.label[op]
        order = np.lexsort((op, block, batch, -self.level[block], keys[batch, block]))
        rows, on = np.stack([op, batch], axis=1)[order], self.device[block[order]]
        return Schedule(tuple(rows[on == d] for d in range(self.num_devices)), len(keys))


def cut(
    problem: Problem,
    placement: Placement,
    *,
    kind: ArrayLike | None = None,
    max_blocks: int = MAX_BLOCKS,
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
        problem.num_devices,
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
    joining costs a look at all pairs.
    """
    label = np.unique(label, return_inverse=True)[1].reshape(-1)
    num = int(label.max()) + 1
    if num <= max_blocks or num > _MOST_JOINED:
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


def work_of(
    problem: Problem, placement: Placement, pieces: Cut, num_microbatches: int
) -> tuple[Work, float]:
    """The blocks with integer times, and the seconds of a unit; memory is not limited.

    Transfers from one block to another wait for each other: their seconds are the delay between
    them, or part of the first block where the link is blocking.
    """
    g = problem.graph
    seconds, on = durations(problem, placement, num_microbatches), problem.worker[placement]
    busy = np.bincount(pieces.label, weights=seconds, minlength=pieces.num_blocks)
    delay: dict[tuple[int, int], float] = {(int(u), int(v)): 0.0 for u, v in pieces.edges}
    sent: set[tuple[int, int]] = set()  # (tensor, device)
    arrived: set[tuple[int, int]] = set()  # (tensor, block): several operators of it may wait
    for tensor, op in zip(g.use_tensor.tolist(), g.use_dst.tolist(), strict=True):
        src = int(g.tensor_src[tensor])
        if src < 0 or on[src] == on[op]:
            continue
        u, v = int(pieces.label[src]), int(pieces.label[op])
        takes = problem.transfer_s(tensor, int(on[src]), int(on[op]))
        if not problem.link_blocking[on[src], on[op]]:
            if (tensor, v) not in arrived:
                delay[u, v] += takes
            arrived.add((tensor, v))
        elif (tensor, int(on[op])) not in sent:
            busy[u] += takes
        sent.add((tensor, int(on[op])))
    load = np.bincount(pieces.device, weights=busy)
    unit_s = max(float(load.max()) / _UNITS, 1e-12)
    preds: list[list[tuple[int, int]]] = [[] for _ in range(pieces.num_blocks)]
    for (u, v), takes in delay.items():
        preds[v].append((u, round(takes / unit_s)))
    blocks = tuple(
        Block((int(pieces.device[b]),), max(1, round(busy[b] / unit_s)), 0, tuple(preds[b]))
        for b in range(pieces.num_blocks)
    )
    return Work(blocks, problem.num_devices), unit_s


def held_bytes(problem: Problem, pieces: Cut) -> list[tuple[int, int, int]]:
    """(block, later block of the same device, bytes): what is produced and last used there.

    Tensors that share memory count once. What a block sends away or receives is held only
    around it, and is not in the list.
    """
    g = problem.graph
    span: dict[int, tuple[int, int]] = {}
    for tensor, op in zip(g.use_tensor.tolist(), g.use_dst.tolist(), strict=True):
        root = int(g.tensor_root[tensor])
        src = int(g.tensor_src[root])
        if src < 0:
            continue
        u, v = int(pieces.label[src]), int(pieces.label[op])
        if pieces.device[u] != pieces.device[v]:
            continue
        span[root] = u, max(v, span.get(root, (u, u))[1])
    total: dict[tuple[int, int], int] = {}
    for root, (u, v) in span.items():
        if v > u:
            total[u, v] = total.get((u, v), 0) + int(g.tensor_bytes[root])
    return [(u, v, size) for (u, v), size in sorted(total.items())]


def limited(
    work: Work, held: list[tuple[int, int, int]], room_bytes: NDArray[np.int64], num: int
) -> Work:
    """The same work where ``held`` has to fit into ``room_bytes`` int64 ``[D]``.

    Without limits if ``num`` micro-batches fit at a time.
    """
    per_batch = np.zeros(work.num_devices, np.int64)
    for u, _, size in held:
        per_batch[work.blocks[u].devices[0]] += size
    if (num * per_batch <= room_bytes).all():
        return work
    memory = np.zeros(work.num_blocks, np.int64)
    for u, v, size in held:
        unit = max(1.0, room_bytes[work.blocks[u].devices[0]] / _UNITS)
        memory[u] += round(size / unit)
        memory[v] -= round(size / unit)
    limit = tuple(int(room / max(1.0, room / _UNITS)) for room in room_bytes)
    blocks = tuple(
        Block(b.devices, b.time, int(m), b.preds) for b, m in zip(work.blocks, memory, strict=True)
    )
    return Work(blocks, work.num_devices, limit)
