"""Patterns by packing: modulo list scheduling (Rau, "Iterative modulo scheduling", MICRO 1994).

Blocks take, in their topological order, the first gap that their devices have in every period; or,
from the last block back, the last one. Nothing is taken back: it is a matter of milliseconds where
a question to CP-SAT takes seconds, and the shorter of both is where that begins.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from dataclasses import replace

import numpy as np

from placement.schedulers.searched.blocks import Ints, Work


def shortest(work: Work, least: int, most: int, end: float) -> tuple[Ints, int] | None:
    """Starts int64 ``[n]`` of one micro-batch, and the shortest period that they were packed in.

    Periods from ``least`` to below ``most`` are tried, by halving, until ``end``. None: none fits.
    """
    time_of = np.array([b.time for b in work.blocks])
    back, best = _backwards(work), None
    while least < most and time.perf_counter() < end:
        period = (least + most) // 2
        from_end = _packed(back, period)
        starts = None if from_end is None else -(from_end[::-1] + time_of)
        if starts is None or not _fits(work, starts, period):
            starts = _packed(work, period)
        if starts is not None and _fits(work, starts, period):
            best, most = (starts - starts.min(), period), period
        else:
            least = period + 1
    closed = _without_gaps(work)
    if most > closed[1] and _fits(work, *closed):
        return closed
    return best


def _without_gaps(work: Work) -> tuple[Ints, int]:
    """Blocks one after another on their devices, and of as early micro-batches as that takes.

    Where memory is not limited and every block has one device, no period is shorter; but a
    micro-batch is under way for many of them.
    """
    free, begins = [0] * work.num_devices, []
    for block in work.blocks:
        begins.append(max(free[d] for d in block.devices))
        for d in block.devices:
            free[d] = begins[-1] + block.time
    period, starts = max(free), np.zeros(work.num_blocks, np.int64)
    for b, (block, begin) in enumerate(zip(work.blocks, begins, strict=True)):
        ready = max((starts[u] + work.blocks[u].time + x for u, x in block.preds), default=0)
        starts[b] = begin + period * max(0, -(-(ready - begin) // period))
    return starts, period


def _backwards(work: Work) -> Work:
    """The same work, run from its end to its beginning; memory is not limited."""
    last = work.num_blocks - 1
    preds: list[list[tuple[int, int]]] = [[] for _ in work.blocks]
    for v, block in enumerate(work.blocks):
        for u, delay in block.preds:
            preds[last - u].append((last - v, delay))
    blocks = zip(reversed(work.blocks), preds, strict=True)
    turned = tuple(replace(block, preds=tuple(waits)) for block, waits in blocks)
    return Work(turned, work.num_devices)


def _packed(work: Work, period: int) -> Ints | None:
    """Each block in the first gap behind its predecessors; None: one finds no gap."""
    # By device: (begin, end) in the period, in the one before and in the one after it, sorted.
    busy: list[list[tuple[int, int]]] = [[] for _ in range(work.num_devices)]
    starts: list[int] = []
    for block in work.blocks:
        at = ready = max((starts[u] + work.blocks[u].time + x for u, x in block.preds), default=0)
        rows = [busy[d] for d in block.devices]
        while wait := max(_wait(row, at % period, block.time) for row in rows):
            at += wait
            if at >= ready + period:
                return None
        starts.append(at)
        for row in rows:
            for begin in (at % period - period, at % period, at % period + period):
                insort(row, (begin, begin + block.time))
    return np.array(starts, np.int64)


def _wait(row: list[tuple[int, int]], begin: int, length: int) -> int:
    """How much later than ``begin`` a block must at least start that overlaps something; else 0."""
    i = bisect_left(row, (begin, 0))
    i -= i > 0 and row[i - 1][1] > begin
    return row[i][1] - begin if i < len(row) and row[i][0] < begin + length else 0


def _fits(work: Work, starts: Ints, period: int) -> bool:
    """Whether no device ever holds more than its limit when micro-batches follow the pattern."""
    for on, limit in zip(work.on, work.limit or (), strict=False):
        memory = np.array([work.blocks[b].memory for b in on], np.int64)
        since, at = np.divmod(starts[list(on)], period)
        # A block that starts ``since`` periods into its micro-batch has run so much less often.
        held = np.cumsum(memory[np.argsort(at)]) - memory @ since
        if held.max(initial=0) > limit:
            return False
    return True
