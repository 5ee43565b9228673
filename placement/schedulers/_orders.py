"""Numba kernels on the order in which the blocks of many micro-batches are started.

Every block takes micro-batches in their order (they are identical), so that an order is a word
over blocks: the k-th time that a block occurs, it is of micro-batch k. ``arrange`` makes such a
word and its earliest starts, ``anneal`` looks for shorter ones.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from placement.schedulers._blocks import Work

_NO_LIMIT = 1 << 60


def tables(work: Work) -> tuple[Any, ...]:
    """The work as flat arrays for the kernels (CSR: devices, predecessors, successors)."""
    users: list[list[int]] = [[] for _ in work.blocks]
    for v, block in enumerate(work.blocks):
        for u, _ in block.preds:
            users[u].append(v)

    def flat(rows: list[list[int]]) -> tuple[Any, Any]:
        ptr = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        return ptr, np.array([x for row in rows for x in row], np.int64)

    pred_ptr, pred = flat([[u for u, _ in b.preds] for b in work.blocks])
    return (
        np.array([b.time for b in work.blocks], np.int64),
        np.array([b.memory for b in work.blocks], np.int64),
        np.array(work.limit or (_NO_LIMIT,) * work.num_devices, np.int64),
        *flat([sorted(b.devices) for b in work.blocks]),
        pred_ptr,
        pred,
        np.array([delay for b in work.blocks for _, delay in b.preds], np.int64),
        *flat(users),
    )


@nb.njit(cache=True)
def arrange(work, key, eager, word, start, before):  # type: ignore[no-untyped-def]
    """Start block after block as early as its devices allow; the end of the last, or -1.

    Of the blocks whose predecessors have been started, and for which there is memory, the one
    with the smallest ``key[micro-batch, block]`` comes next; if ``eager``, the one that can
    start first, then the smallest key. -1: there is none.

    Fills ``word [N n]`` (``micro-batch * n + block``), ``start [N, n]`` and ``before
    [N, devices of all blocks]``: what ran on each device of the block before it, or -1.
    """
    time, memory, limit, dev_ptr, dev, pred_ptr, _, _, user_ptr, user = work
    num, n = key.shape
    free = np.zeros(len(limit), np.int64)
    held = np.zeros(len(limit), np.int64)
    latest = np.full(len(limit), -1)
    count = np.zeros(n, np.int64)
    arrival = np.full(n, -1)  # of the inputs of the next micro-batch of each block
    for b in range(n):
        if pred_ptr[b] == pred_ptr[b + 1]:
            arrival[b] = 0
    end = 0
    for at in range(num * n):
        best, best_begin, best_key = -1, 0, 0.0
        for b in range(n):
            if arrival[b] < 0:
                continue
            k = key[count[b], b]
            if not eager and best >= 0 and k >= best_key:
                continue
            begin = arrival[b]
            able = True
            for i in range(dev_ptr[b], dev_ptr[b + 1]):
                d = dev[i]
                begin = max(begin, free[d])
                if memory[b] > 0 and held[d] + memory[b] > limit[d]:
                    able = False
                    break
            if not able:
                continue
            if (
                best < 0
                or not eager
                or begin < best_begin
                or (begin == best_begin and k < best_key)
            ):
                best, best_begin, best_key = b, begin, k
        if best < 0:
            return -1
        j = count[best]
        word[at] = j * n + best
        start[j, best] = best_begin
        end = max(end, best_begin + time[best])
        for i in range(dev_ptr[best], dev_ptr[best + 1]):
            d = dev[i]
            free[d] = best_begin + time[best]
            held[d] += memory[best]
            before[j, i] = latest[d]
            latest[d] = word[at]
        count[best] += 1
        _arrive(work, start, count, arrival, best)
        for i in range(user_ptr[best], user_ptr[best + 1]):
            if count[user[i]] == j:
                _arrive(work, start, count, arrival, user[i])
    return end


@nb.njit(cache=True)
def _arrive(work, start, count, arrival, b):  # type: ignore[no-untyped-def]
    """When the inputs of the next micro-batch of block ``b`` arrive; -1 if not known."""
    time, _, _, _, _, pred_ptr, pred, delay, _, _ = work
    j = count[b]
    arrival[b] = -1
    if j == len(start):
        return
    begin = 0
    for i in range(pred_ptr[b], pred_ptr[b + 1]):
        p = pred[i]
        if count[p] <= j:
            return
        begin = max(begin, start[j, p] + time[p] + delay[i])
    arrival[b] = begin


@nb.njit(cache=True)
def anneal(work, word, start, before, best, rounds, seed, target, temperature):  # type: ignore[no-untyped-def]
    """Shorter orders by simulated annealing at one temperature; the length of the best.

    A move takes two blocks that follow each other on a device on a critical path, and changes
    their order in that micro-batch or in a run of them. ``word``, ``start`` and ``before`` are
    those of ``arrange`` and are replaced by where the walk ends, ``best [N, n]`` by the
    shortest starts. Ends after ``rounds`` moves or at ``target``.
    """
    time = work[0]
    np.random.seed(seed)
    num, n = start.shape
    size = num * n
    key = np.empty((num, n))
    new_word, new_start, new_before = word.copy(), start.copy(), before.copy()
    first, then = np.empty(size, np.int64), np.empty(size, np.int64)
    length, shortest = 0, 0
    for b in range(n):
        length = max(length, start[-1, b] + time[b])
        shortest = max(shortest, best[-1, b] + time[b])
    for _ in range(rounds):
        if shortest <= target:
            break
        for at in range(size):
            key[word[at] // n, word[at] % n] = at
        found = _critical(work, start, before, length, first, then)
        if found == 0:
            break
        pick = np.random.randint(found)
        y, x = first[pick], then[pick]
        span = 1 if np.random.random() < 0.5 else 1 + np.random.randint(num)
        pull = np.random.random() < 0.5
        for i in range(span):
            jy, jx = y // n + i, x // n + i
            if jy >= num or jx >= num:
                break
            if pull:
                _pull(work, key, jx, x % n, key[jy, y % n] - 0.5)
            else:
                key[jy, y % n] = max(key[jy, y % n], key[jx, x % n] + 0.5)
        new = arrange(work, key, False, new_word, new_start, new_before)
        if new < 0:
            continue
        if new <= length or np.random.random() < np.exp((length - new) / temperature):
            length = new
            word, new_word = new_word, word
            start, new_start = new_start, start
            before, new_before = new_before, before
            if length < shortest:
                shortest = length
                best[:] = start
    return word, start, before, shortest


@nb.njit(cache=True)
def _critical(work, start, before, length, first, then):  # type: ignore[no-untyped-def]
    """Pairs of different blocks that follow each other without a gap on a device.

    Along one path of blocks that wait for each other, from the last to the first; where there
    are several to choose from, a random one. Fills ``first`` and ``then``; how many.
    """
    time, _, _, dev_ptr, _, pred_ptr, pred, delay, _, _ = work
    num, n = start.shape
    here, seen = -1, 0
    for b in range(n):
        if start[num - 1, b] + time[b] == length:
            seen += 1
            if np.random.random() * seen < 1:
                here = (num - 1) * n + b
    found = 0
    while here >= 0:
        j, b = here // n, here % n
        chosen, seen = -1, 0
        for i in range(pred_ptr[b], pred_ptr[b + 1]):
            p = pred[i]
            if start[j, p] + time[p] + delay[i] == start[j, b]:
                seen += 1
                if np.random.random() * seen < 1:
                    chosen = j * n + p
        for i in range(dev_ptr[b], dev_ptr[b + 1]):
            y = before[j, i]
            if y < 0 or start[y // n, y % n] + time[y % n] != start[j, b]:
                continue
            seen += 1
            if np.random.random() * seen < 1:
                chosen = y
            if y % n != b and found < len(first):
                first[found], then[found] = y, here
                found += 1
        here = chosen
    return found


@nb.njit(cache=True)
def _pull(work, key, j, b, to):  # type: ignore[no-untyped-def]
    """Lower the key of a block to ``to``, and those of its ancestors below it."""
    pred_ptr, pred = work[5], work[6]
    if key[j, b] <= to:
        return
    key[j, b] = to
    for i in range(pred_ptr[b], pred_ptr[b + 1]):
        _pull(work, key, j, pred[i], to - 1e-6)
