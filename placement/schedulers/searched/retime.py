"""From a repeating pattern to a schedule of N micro-batches: warm-up, cool-down, and better.

Micro-batches follow the pattern, and of it only the *order* of every device is kept: all blocks
start as early as that allows, which pulls the first ones together (warm-up) and the last ones
(cool-down). What a device holds depends on its order only, so the limits are still kept.

Few micro-batches gain from another order at the ends than in the middle. So the orders of
several patterns and of greedy rules are annealed for few micro-batches, the best is stretched
by whole periods in the middle, and annealed again for what is left of the time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.schedulers.searched import order_kernels
from placement.schedulers.searched.blocks import Block, BlocksError, Ints, Work
from placement.schedulers.searched.repetend import Pattern

Keys = NDArray[Any]  # [N, n]: whatever has the smallest comes first


@dataclass
class _Order:
    """An order of ``N`` micro-batches, as the kernels keep it."""

    word: Ints
    start: Ints
    before: Ints
    length: int


def earliest(work: Work, key: Keys) -> Ints | None:
    """int64 ``[N, n]`` starts in the order of ``key [N, n]``; None if memory ends it."""
    order = _arranged(work, order_kernels.table(work), key)
    return None if order is None else order.start


def _arranged(work: Work, table: Ints, key: Keys, eager: bool = False) -> _Order | None:
    """With ``eager`` the key only decides between blocks that could start first."""
    num, n = key.shape
    word, start = np.empty(num * n, np.int64), np.empty((num, n), np.int64)
    before = np.empty((num, sum(len(b.devices) for b in work.blocks)), np.int64)
    if eager:
        length = order_kernels.greedy(table, key.astype(np.float64), word, start, before)
    else:
        order = order_kernels.sorted_items(key)
        length = order_kernels.follow(
            table, order, 0, start, order_kernels.ANY_LENGTH, word, start, before
        )
    return None if length < 0 else _Order(word, start, before, int(length))


def shortest(
    work: Work, patterns: Sequence[Pattern], num_micro_batches: int, seconds: float
) -> Ints:
    """int64 ``[N, n]`` starts of a short schedule, from these patterns; the same for each seed.

    The search ends at the bound of ``work.makespan_bound`` or after ``seconds``.

    Raises:
        BlocksError: the patterns do not fit into the memory.
    """
    end = time.perf_counter() + seconds
    table = order_kernels.table(work)
    # So many micro-batches at most shape the ends of a schedule.
    few = min(16, num_micro_batches // 2 if num_micro_batches >= 16 else num_micro_batches)
    best = _candidates(work, table, patterns, num_micro_batches)
    if num_micro_batches > few:
        small = _candidates(work, table, patterns, few)
        small = _annealed(work, table, small, end - 0.5 * seconds)
        stretched: list[_Order | None] = []
        for order, p in itertools.product(small[:3], patterns):
            for key in _stretched(order.start, num_micro_batches, p):
                if time.perf_counter() < end or not stretched:
                    stretched.append(_arranged(work, table, key))
        best = sorted([*filter(None, stretched), *best], key=lambda o: o.length)
    return _annealed(work, table, best, end)[0].start


def _candidates(work: Work, table: Ints, patterns: Sequence[Pattern], num: int) -> list[_Order]:
    """Orders of the patterns and of greedy rules, the shortest first."""
    arranged = [_arranged(work, table, p.unrolled(num)) for p in patterns]
    batch, n = np.arange(num)[:, None], work.num_blocks
    far = int(work.tail.max()) + 1
    rules = (
        batch * n + np.zeros(n, np.int64),  # the oldest micro-batch
        work.tail + batch / num,  # what is nearest to its end: memory is released first
        batch / num - work.tail,  # what is farthest from its end
        work.head + batch * (far / num),
        batch * float(patterns[0].per_micro_batch) - work.tail,
    )
    # A greedy rule looks at all blocks for each that starts.
    for key in rules if num * n * n <= 2**25 else ():
        arranged.append(_arranged(work, table, key, eager=True))
    orders = sorted((m for m in arranged if m is not None), key=lambda m: m.length)
    if not orders:
        raise BlocksError("no pattern fits into the memory")
    return orders


def _stretched(start: Ints, num: int, pattern: Pattern) -> Iterator[Ints]:
    """Keys ``[N, n]``: a short schedule with periods put in after its first, second, ..."""
    few, k = len(start), pattern.unroll
    more = num - few
    for cut in range(k, few):
        batch = np.arange(more) + cut
        last = start[cut - k : cut]
        middle = last[(batch - cut) % k] + pattern.period * ((batch - cut) // k + 1)[:, None]
        shift = round(more * pattern.per_micro_batch)
        yield np.concatenate([start[:cut], middle, start[cut:] + shift])


def _annealed(work: Work, table: Ints, orders: list[_Order], end: float) -> list[_Order]:
    """The best first; the first few are annealed, an even share of the time for each."""
    target = work.makespan_bound(len(orders[0].start))
    unit = max(1.0, float(np.mean([b.time for b in work.blocks])))
    chosen = orders[:3]
    for i, order in enumerate(chosen):
        best = order.start.copy()
        word, start, before = order.word.copy(), order.start.copy(), order.before.copy()
        length = order.length
        began = now = time.perf_counter()
        until = began + max(0.0, end - began) / (len(chosen) - i)
        seed, rounds = 0, 40  # between two looks at the clock
        while now < until and length > target:
            temperature = unit * (0.3 - 0.25 * (now - began) / (until - began))
            word, start, before, length = order_kernels.anneal(
                table, word, start, before, best, rounds, seed, target, temperature
            )
            seed += 1
            now = time.perf_counter()
        if length < order.length:
            arranged = _arranged(work, table, best)
            if arranged is not None and arranged.length <= length:
                chosen[i] = arranged
        if length <= target:
            break
    return sorted([*chosen, *orders[3:]], key=lambda o: o.length)


def warm_up() -> None:
    """Compile the kernels, or load them from the cache."""
    work = Work((Block((0,), 1), Block((1,), 1, preds=((0, 0),)), Block((0,), 1)), 2)
    table, key = order_kernels.table(work), np.zeros((2, 3), np.int64)
    order = _arranged(work, table, key, eager=True) and _arranged(work, table, key)
    assert order is not None
    order_kernels.anneal(table, order.word, order.start, order.before, order.start, 1, 0, 0, 1.0)
