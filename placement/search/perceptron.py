"""Numba kernels of a small network: its two layers, and a draw from the softmax of its scores."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from placement.search.macro import uniform
from placement.tools.jit import copy, inlined, kernel, largest


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
