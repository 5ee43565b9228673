"""Numba kernels that choose among offered moves: a network, and a draw from its softmax."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np

from placement.search.macro import uniform
from placement.tools.jit import allocating, copy, inlined, kernel, largest

POLICY, HAND, UNIFORM, TABU = range(4)  # who chooses
BOUND = 10.0  # of features


def no_network(num_search: int, num_move: int) -> tuple[Any, ...]:
    """``net`` of ``network`` where nobody asks it: of so many features, and zeros."""
    shapes = ((num_search, 1), (num_move, 1), (1,), (1, 1), (1,), (1,))
    return tuple(np.zeros(shape, np.float32) for shape in shapes)


@inlined
def add_rows(to, values, rows):
    """Add ``values @ rows``."""
    for i in range(len(values)):
        a = values[i]
        if a != 0.0:
            for j in range(len(to)):
                to[j] += a * rows[i, j]


@inlined
def output(start, first, second, hidden, hidden_bias, out):
    """``start`` and what a network makes of its first layer; ``second`` is room."""
    copy(second, hidden_bias)
    for i in range(len(first)):
        a = first[i]
        if a > 0.0:
            for j in range(len(second)):
                second[j] += a * hidden[i, j]
    total = start
    for j in range(len(second)):
        total += max(second[j], np.float32(0.0)) * out[j]
    return total


@allocating
def network(net, search, offered, which, width, logits):
    """Logits ``[width + 1]`` of a policy: hand score plus a network of two hidden layers.

    ``net``: (by_search [S, H], by_move [F, H], bias [H], hidden [H, H], hidden_bias [H],
    out [H]), float32. Choice 0 is to stay; ``which`` ``[C + 1]`` is negative where there is no
    move.
    """
    by_search, by_move, bias, hidden, hidden_bias, out = net
    size = len(bias)
    common = bias.copy()
    add_rows(common, search, by_search)
    first, second = np.empty(size, np.float32), np.empty(size, np.float32)
    for k in range(width + 1):
        logits[k] = -np.inf
        if k > 0 and which[k] < 0:
            continue
        copy(first, common)  # not first[:] = common: copies of arrays compile for a second
        add_rows(first, offered[k], by_move)
        logits[k] = output(offered[k, 0], first, second, hidden, hidden_bias, out)


@inlined
def bounded(value):
    return max(-BOUND, min(BOUND, value))


@kernel
def choose(random, logits, width):
    """One of 0..width with the probabilities of a softmax."""
    best = largest(logits, width + 1)
    total = 0.0
    for k in range(width + 1):
        total += np.exp(logits[k] - logits[best])
    left = uniform(random) * total
    for k in range(width + 1):
        left -= np.exp(logits[k] - logits[best])
        if left < 0.0:
            return k
    return best
