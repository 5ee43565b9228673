"""Numba kernels of ``placement.planners.contiguous_dp``, which says what they compute."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.tools.jit import Struct, allocating, array, kernel

Array = NDArray[Any]


class Graph(Struct):
    """Operators and what they hand over, for ``topological_order``; and room for it."""

    group: Array  # int32 [N]
    inner_ptr: Array  # int32 [N + 1] tensors made by operators that each operator uses
    inner: Array  # int32
    output_ptr: Array  # int32 [N + 1] tensors that each makes
    output: Array  # int32
    users_ptr: Array  # int32 [T + 1] operators that use each tensor
    users: Array  # int32
    size: Array  # int64 [T] bytes
    left: Array = array("T", np.int64)  # users that are not placed
    missing: Array = array("N", np.int64)  # inputs that are not there
    ready: Array = array("N", np.int64)
    freed: Array = array("N", np.int64)


@kernel
def _growth(t, n, factor):
    """Bytes that ``n`` makes less those that nobody needs after it, times its factor."""
    made, unused = 0, 0
    for k in range(t.output_ptr[n], t.output_ptr[n + 1]):
        made += t.size[t.output[k]]
    for k in range(t.inner_ptr[n], t.inner_ptr[n + 1]):
        if t.left[t.inner[k]] == 1:
            unused += t.size[t.inner[k]]
    return factor[n] * (made - unused)


@allocating
def topological_order(t, rule, factor, first, look, rng, position):
    """Fill ``position`` int32 ``[G]``, -1 before; ``first`` int64 ``[N]`` orders who is ready."""
    left, missing, ready, freed = t.left, t.missing, t.ready, t.freed
    for k in range(len(left)):
        left[k] = t.users_ptr[k + 1] - t.users_ptr[k]
    for n in range(len(missing)):
        missing[n] = t.inner_ptr[n + 1] - t.inner_ptr[n]
    count, placed = 0, 0
    for n in first:
        if missing[n] == 0:
            ready[count] = n
            count += 1
    while count > 0:
        k = count - 1
        if rule == 0:
            best, k = np.inf, max(0, count - 1 - look)
            for i in range(k, count):
                growth = _growth(t, ready[i], factor)
                if growth < best:
                    best, k = growth, i
        elif rule == 1:
            k = rng.integers(0, count)
        n = ready[k]
        count -= 1
        for i in range(k, count):
            ready[i] = ready[i + 1]
        if position[t.group[n]] < 0:
            position[t.group[n]] = placed
            placed += 1
        for i in range(t.inner_ptr[n], t.inner_ptr[n + 1]):
            left[t.inner[i]] -= 1
        num_freed = 0
        for i in range(t.output_ptr[n], t.output_ptr[n + 1]):
            tensor = t.output[i]
            for j in range(t.users_ptr[tensor], t.users_ptr[tensor + 1]):
                user = t.users[j]
                missing[user] -= 1
                if missing[user] == 0:
                    freed[num_freed] = user
                    num_freed += 1
        for i in rng.permutation(num_freed):
            ready[count] = freed[i]
            count += 1


@kernel
def sum_up(begin, end, column, weight, above, grid):
    """Add each weight to the rows from ``begin`` to before ``end`` and from ``column`` on.

    ``grid`` float64 ``[C + 1, C + 1]`` and ``above`` float64 ``[C + 1]`` are 0 before.
    """
    for k in range(len(weight)):
        grid[begin[k], column[k]] += weight[k]
    for k in range(len(weight)):
        grid[end[k], column[k]] -= weight[k]
    for i in range(grid.shape[0]):
        along = 0.0
        for j in range(grid.shape[1]):
            above[j] += grid[i, j]
            along += above[j]
            grid[i, j] = along


@kernel
def append_stage(cost, summed, best, last, state, first, after, device):
    """Better splits of ``state``: those of the states ``first`` to before ``after``, and a stage.

    ``best`` float64 ``[S, C + 1]`` is what the blocks before each cost, ``last`` int32
    ``[S, C + 1, 3]`` the state before the last stage, its device, and where it begins. ``cost``
    float64 ``[C + 1, C + 1]`` is of the stage of blocks ``[j, i)`` on ``device``.
    """
    for j in range(cost.shape[0] - 1):
        which = first  # costs are joined monotonously: of several states the best one will do
        for s in range(first + 1, after):
            if best[s, j] < best[which, j]:
                which = s
        before = best[which, j]
        if before == np.inf:
            continue
        for i in range(j + 1, cost.shape[0]):
            value = before + cost[j, i] if summed else max(before, cost[j, i])
            if value < best[state, i]:
                best[state, i] = value
                last[state, i, 0], last[state, i, 1], last[state, i, 2] = which, device, j
