"""Numba kernels on the order in which the blocks of many micro-batches are started.

Every block takes micro-batches in their order (they are identical), so that an order is a word
over blocks: the k-th time that a block occurs, it is of micro-batch k. ``follow`` makes such a word
and its earliest starts from any order, ``greedy`` from a rule, ``anneal`` looks for shorter ones.

What they know of the work is one table: numba counts a reference for every array that is taken
out of a tuple, which costs more than to start a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.schedulers.searched.blocks import Work
from placement.tools.jit import allocating, copy

ANY_LENGTH = 1 << 60

# An item of an order is micro-batch << _BITS | block: a division costs more than a start.
_BITS = 20
_BLOCK = (1 << _BITS) - 1

# Columns of a block's row: MEMORY is added at its start, TAIL is the least time from its start to
# the end of its micro-batch, AT its first column of ``before``; then come its devices, then
# (predecessor, least time from start to start).
_TIME, _MEMORY, _TAIL, _AT, _DEVICES, _PREDS, _FIRST = range(7)
# Columns of a device's row, below those of the blocks: load of one micro-batch, and the least time
# from the end of its last block to the end of that block's micro-batch.
_LIMIT, _LOAD, _REST = range(3)
# Rows of the state of the devices: when it is free, what it holds, what it ran last, load to come.
_FREE, _HELD, _LAST, _LEFT = range(4)


def table(work: Work) -> NDArray[np.int64]:
    """int64 ``[n + D, columns]``: a row for each block, then one for each device."""
    rows: list[list[int]] = []
    at = 0
    for block, tail in zip(work.blocks, work.tail.tolist(), strict=True):
        lags = [x for u, delay in block.preds for x in (u, work.blocks[u].time + delay)]
        head = [block.time, block.memory, tail, at, len(block.devices), len(block.preds)]
        rows.append([*head, *sorted(block.devices), *lags])
        at += len(block.devices)
    for d, on in enumerate(work.on):
        rest = min((work.tail[b] - work.blocks[b].time for b in on), default=0)
        limit = 1 << 60 if work.limit is None else work.limit[d]
        rows.append([limit, work.load[d], rest])
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def sorted_items(key: NDArray[Any]) -> NDArray[np.int64]:
    """int64 ``[N n]`` items by ``key [N, n]``, smallest first; of equal ones the first block."""
    batch, block = (x.ravel() for x in np.indices(key.shape))
    at = np.lexsort((batch, block, key.ravel()))
    return batch[at] << _BITS | block[at]


@allocating
def follow(work, order, prefix, prefix_start, most, word, start, before):  # type: ignore[no-untyped-def]
    """Start blocks in ``order`` int64 ``[N n]`` as early as their devices allow; the last end.

    What lacks a predecessor, or memory, waits, and is the next as soon as it can be. -1: that
    never comes, or the end would be later than ``most``. The first ``prefix`` of ``order`` start
    as ``prefix_start [N, n]`` says.

    Fills ``word [N n]``, the order of starts, ``start [N, n]`` and ``before [N, devices of all
    blocks]``: what ran on each device of the block before it, or -1.
    """
    num, n = start.shape
    state, count = _nothing_started(work, num, n)
    end = 0
    for at in range(prefix):
        item = order[at]
        begin = prefix_start[item >> _BITS, item & _BLOCK]
        word[at] = item
        _place(work, state, count, start, before, item, begin)
        end = max(end, begin + work[item & _BLOCK, _TIME])
    waiting, num_waiting, read = np.empty(num * n, np.int64), 0, prefix
    for at in range(prefix, num * n):
        item, begin, k = np.int64(0), np.int64(-1), 0
        while begin < 0 and k < num_waiting:
            item = waiting[k]
            begin = _begin(work, state, count, start, item >> _BITS, item & _BLOCK)
            k += 1
        if begin >= 0:
            num_waiting -= 1
            for i in range(k - 1, num_waiting):
                waiting[i] = waiting[i + 1]
        while begin < 0:
            if read == num * n:
                return -1
            item = order[read]
            read += 1
            begin = _begin(work, state, count, start, item >> _BITS, item & _BLOCK)
            if begin < 0:
                waiting[num_waiting] = item
                num_waiting += 1
        b = item & _BLOCK
        if begin + work[b, _TAIL] > most:
            return -1
        for i in range(work[b, _DEVICES]):
            d = work[b, _FIRST + i]
            if begin + state[_LEFT, d] + work[n + d, _REST] > most:
                return -1
        word[at] = item
        _place(work, state, count, start, before, item, begin)
        end = max(end, begin + work[b, _TIME])
    return end


@allocating
def greedy(work, key, word, start, before):  # type: ignore[no-untyped-def]
    """Start what can start first, of several the smallest ``key`` float64 ``[N, n]``.

    Fills and returns the same as ``follow``.
    """
    num, n = start.shape
    state, count = _nothing_started(work, num, n)
    end = 0
    for at in range(num * n):
        best, best_begin, best_key = -1, 0, 0.0
        for b in range(n):
            if count[b] == num:
                continue
            begin = _begin(work, state, count, start, count[b], b)
            if begin < 0:
                continue
            k = key[count[b], b]
            if best < 0 or begin < best_begin or (begin == best_begin and k < best_key):
                best, best_begin, best_key = b, begin, k
        if best < 0:
            return -1
        word[at] = count[best] << _BITS | best
        _place(work, state, count, start, before, word[at], best_begin)
        end = max(end, best_begin + work[best, _TIME])
    return end


@allocating
def _nothing_started(work, num, n):  # type: ignore[no-untyped-def]
    """State of the devices int64 ``[4, D]``, and how often each block was started."""
    state = np.zeros((4, len(work) - n), np.int64)
    state[_LAST] = -1
    for d in range(len(work) - n):
        state[_LEFT, d] = num * work[n + d, _LOAD]
    return state, np.zeros(n, np.int64)


@allocating
def _begin(work, state, count, start, j, b):  # type: ignore[no-untyped-def]
    """When a block of micro-batch ``j`` starts if it is the next; -1: it cannot be."""
    if count[b] != j:
        return -1
    n = len(count)
    begin = 0
    num_devices = work[b, _DEVICES]
    preds = _FIRST + num_devices
    for i in range(preds, preds + 2 * work[b, _PREDS], 2):
        p = work[b, i]
        if count[p] <= j:
            return -1
        begin = max(begin, start[j, p] + work[b, i + 1])
    taken = work[b, _MEMORY]
    for i in range(num_devices):
        d = work[b, _FIRST + i]
        if taken > 0 and state[_HELD, d] + taken > work[n + d, _LIMIT]:
            return -1
        begin = max(begin, state[_FREE, d])
    return begin


@allocating
def _place(work, state, count, start, before, item, begin):  # type: ignore[no-untyped-def]
    """Start a block at ``begin``."""
    j, b = item >> _BITS, item & _BLOCK
    start[j, b] = begin
    count[b] += 1
    for i in range(work[b, _DEVICES]):
        d = work[b, _FIRST + i]
        before[j, work[b, _AT] + i] = state[_LAST, d]
        state[_FREE, d] = begin + work[b, _TIME]
        state[_HELD, d] += work[b, _MEMORY]
        state[_LAST, d] = item
        state[_LEFT, d] -= work[b, _TIME]


@allocating
def anneal(work, word, start, before, best, rounds, seed, target, temperature):  # type: ignore[no-untyped-def]
    """Shorter orders by simulated annealing at one temperature; the length of the best.

    A move takes two blocks of a critical path, mostly a few steps from each other, and changes
    their order in that micro-batch or in a run of them. ``word``, ``start`` and ``before`` are
    those of ``follow`` and are replaced by where the walk ends, ``best [N, n]`` by the shortest
    starts. Ends after ``rounds`` moves or at ``target``.
    """
    np.random.seed(seed)
    num, n = start.shape
    size = num * n
    key = np.empty((num, n))
    order = np.empty(size, np.int64)
    new_word, new_start, new_before = word.copy(), start.copy(), before.copy()
    path = np.empty(size, np.int64)
    length, shortest = 0, 0
    for b in range(n):
        length = max(length, start[-1, b] + work[b, _TIME])
        shortest = max(shortest, best[-1, b] + work[b, _TIME])
    for _ in range(rounds):
        if shortest <= target:
            break
        for at in range(size):
            key[word[at] >> _BITS, word[at] & _BLOCK] = at
        on_path = _critical(work, start, before, length, path)
        if on_path < 2:
            break
        late = np.random.randint(on_path - 1)
        early = late + 1
        while early + 1 < on_path and np.random.random() < 0.7:
            early += 1
        x, y = path[late], path[early]
        span = 1 if np.random.random() < 0.5 else 1 + np.random.randint(num)  # micro-batches
        pull = np.random.random() < 0.5
        for i in range(span):
            jy, jx = (y >> _BITS) + i, (x >> _BITS) + i
            if jy >= num or jx >= num:
                break
            if pull:
                _pull(work, key, jx, x & _BLOCK, key[jy, y & _BLOCK] - 0.5)
            else:
                key[jy, y & _BLOCK] = max(key[jy, y & _BLOCK], key[jx, x & _BLOCK] + 0.5)
        prefix = _sort(word, key, order)
        # Up to here it would be taken: no need to know how much longer it is.
        most = length + int(-temperature * np.log(1.0 - np.random.random()))
        new = follow(work, order, prefix, start, most, new_word, new_start, new_before)
        if new < 0:
            continue
        length = new
        word, new_word = new_word, word
        start, new_start = new_start, start
        before, new_before = new_before, before
        if length < shortest:
            shortest = length
            for j in range(num):
                copy(best[j], start[j])
    return word, start, before, shortest


@allocating
def _critical(work, start, before, length, path):  # type: ignore[no-untyped-def]
    """Fills ``path`` with blocks that wait for each other, from the last to the first; how many.

    Where there are several to choose from, a random one.
    """
    num, n = start.shape
    here, seen = -1, 0
    for b in range(n):
        if start[num - 1, b] + work[b, _TIME] == length:
            seen += 1
            if np.random.random() * seen < 1:
                here = (num - 1) << _BITS | b
    count = 0
    while here >= 0:
        path[count] = here
        count += 1
        j, b = here >> _BITS, here & _BLOCK
        chosen, seen = -1, 0
        preds = _FIRST + work[b, _DEVICES]
        for i in range(preds, preds + 2 * work[b, _PREDS], 2):
            p = work[b, i]
            if start[j, p] + work[b, i + 1] == start[j, b]:
                seen += 1
                if seen == 1 or np.random.random() * seen < 1:
                    chosen = j << _BITS | p
        for i in range(work[b, _DEVICES]):
            y = before[j, work[b, _AT] + i]
            if y < 0 or start[y >> _BITS, y & _BLOCK] + work[y & _BLOCK, _TIME] != start[j, b]:
                continue
            seen += 1
            if seen == 1 or np.random.random() * seen < 1:
                chosen = y
        here = chosen
    return count


@allocating
def _pull(work, key, j, b, to):  # type: ignore[no-untyped-def]
    """Lower the key of a block to ``to``, and those of its ancestors below it."""
    if key[j, b] <= to:
        return
    key[j, b] = to
    preds = _FIRST + work[b, _DEVICES]
    for i in range(preds, preds + 2 * work[b, _PREDS], 2):
        _pull(work, key, j, work[b, i], to - 1e-6)


@allocating
def _sort(word, key, order):  # type: ignore[no-untyped-def]
    """``order`` becomes ``word`` by ``key``; how many come first in both.

    By insertion, as it is nearly sorted.
    """
    prefix = len(word)
    for at in range(len(word)):
        item, to = word[at], at
        k = key[item >> _BITS, item & _BLOCK]
        while to > 0 and key[order[to - 1] >> _BITS, order[to - 1] & _BLOCK] > k:
            order[to] = order[to - 1]
            to -= 1
        order[to] = item
        if to < at:
            prefix = min(prefix, to)
    return prefix
