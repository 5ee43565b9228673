"""Numba kernels that choose among offered moves: a network, and a draw from its softmax."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np

from placement.search.macro import uniform
from placement.tools.jit import allocating, inlined, kernel, largest

POLICY, HAND, UNIFORM, TABU = range(4)  # who chooses
BOUND = 10.0  # of features


def no_network(num_search: int, num_move: int) -> tuple[Any, ...]:
    """``net`` of ``network`` where nobody asks it: of so many features, and zeros."""
    shapes = ((num_search, 1), (num_move, 1), (1,), (1, 1), (1,), (1,))
    return tuple(np.zeros(shape, np.float32) for shape in shapes)


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
    for i in range(len(by_search)):
        a = search[i]
        for j in range(size):
            common[j] += a * by_search[i, j]
    first, second = np.empty(size, np.float32), np.empty(size, np.float32)
    for k in range(width + 1):
        logits[k] = -np.inf
        if k > 0 and which[k] < 0:
            continue
        for j in range(size):  # not first[:] = common: copies of arrays compile for a second
            first[j] = common[j]
        for i in range(len(by_move)):
            a = offered[k, i]
            if a != 0.0:
                for j in range(size):
                    first[j] += a * by_move[i, j]
        for j in range(size):
            second[j] = hidden_bias[j]
        for i in range(size):
            a = first[i]
            if a > 0.0:
                for j in range(size):
                    second[j] += a * hidden[i, j]
        score = offered[k, 0]
        for j in range(size):
            score += max(second[j], np.float32(0.0)) * out[j]
        logits[k] = score


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
