"""Numba kernels of ``placement.planners.contiguous_dp``, which says what they compute."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.tools.jit import Struct, allocating, array, inlined, kernel

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
    produced, unused = 0, 0
    for k in range(t.output_ptr[n], t.output_ptr[n + 1]):
        produced += t.size[t.output[k]]
    for k in range(t.inner_ptr[n], t.inner_ptr[n + 1]):
        if t.left[t.inner[k]] == 1:
            unused += t.size[t.inner[k]]
    return factor[n] * (produced - unused)


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


class Uses(Struct):
    """What stages cost, whatever their blocks are, for ``fill_costs``; and room for it."""

    makes_ptr: Array  # int32 [N + 1] tensors that each operator makes
    makes: Array  # int32
    uses_ptr: Array  # int32 [N + 1] tensors that each operator uses
    uses: Array  # int32
    inner: Array  # bool [T] made by an operator, not an input of the model
    compute_s: Array  # float64 [K, N] of each operator; inf where it is not supported
    arrive_s: Array  # float64 [K, T] to receive the tensor from another device
    input_s: Array  # float64 [K, T] to receive it from the host
    blocking_s: Array  # float64 [K, T] of the sender, while it sends
    first: Array = array("T", np.int64)  # block that makes or uses the tensor
    last: Array = array("T", np.int64)
    begin: Array = array("N+1", np.int64)  # of each block's operators in ``order``
    order: Array = array("N", np.int64)
    above: Array = array("N+1")


@inlined
def _spread(grid, row, end, column, weight):
    """Count ``weight`` in rows ``row`` to before ``end``, from ``column`` on, for ``_sum_rows``."""
    grid[row, column] += weight
    grid[end, column] -= weight


@inlined
def _sum_rows(grid, above):
    """Sums of what was spread, none below 0."""
    above[: grid.shape[1]] = 0.0
    for i in range(grid.shape[0]):
        along = 0.0
        for j in range(grid.shape[1]):
            above[j] += grid[i, j]
            along += above[j]
            grid[i, j] = max(along, 0.0)


@kernel
def sum_up(begin, end, weight, above, grid):
    """Add each weight to the rows from ``begin`` to before ``end``, and from column ``end`` on.

    ``grid`` float64 ``[C + 1, C + 1]`` is 0 before; ``above`` float64 ``[C + 1]`` is room.
    """
    for k in range(len(weight)):
        _spread(grid, begin[k], end[k], end[k], weight[k])
    _sum_rows(grid, above)


@kernel
def _meet(t, tensor, block, blocked, received):
    """An operator of ``block`` makes or uses ``tensor``; blocks come in their order."""
    since = t.last[tensor] + 1
    if since == block + 1:
        return
    if since == 0:
        t.first[tensor] = block
    t.last[tensor] = block
    # Stages of blocks j to i - 1 with since <= j <= block < i meet it here first.
    price_s = t.arrive_s if t.inner[tensor] else t.input_s
    for k in range(len(received)):
        _spread(received[k], since, block + 1, block + 1, price_s[k, tensor])


@kernel
def fill_costs(t, at, compute, blocked, received):
    """Fill the arrays of ``StageCosts``, float64 ``[K, C + 1, C + 1]``; ``at`` int32 ``[N]``."""
    num_blocks, begin, order = compute.shape[1] - 1, t.begin, t.order
    begin[: num_blocks + 1] = 0
    for b in at:
        begin[b + 1] += 1
    for b in range(num_blocks):
        begin[b + 1] += begin[b]
    for n in range(len(at)):
        order[begin[at[n]]] = n
        begin[at[n]] += 1
    t.last[:] = -1
    blocked[:] = 0.0
    received[:] = 0.0
    for n in order:
        for i in range(t.makes_ptr[n], t.makes_ptr[n + 1]):
            _meet(t, t.makes[i], np.int64(at[n]), blocked, received)
        for i in range(t.uses_ptr[n], t.uses_ptr[n + 1]):
            _meet(t, t.uses[i], np.int64(at[n]), blocked, received)
    for n in range(len(at)):
        end = np.int64(at[n]) + 1
        for i in range(t.makes_ptr[n], t.makes_ptr[n + 1]):
            tensor = t.makes[i]
            # Where it is made it is not received. It is sent unless all who use it are here.
            for k in range(len(received)):
                _spread(received[k], 0, end, end, -t.arrive_s[k, tensor])
                _spread(blocked[k], 0, end, end, t.blocking_s[k, tensor])
                after = t.last[tensor] + 1
                _spread(blocked[k], 0, t.first[tensor] + 1, after, -t.blocking_s[k, tensor])
    for k in range(len(received)):
        _sum_rows(received[k], t.above)
        _sum_rows(blocked[k], t.above)
        _fill_compute(t.compute_s[k], at, t.above, compute[k])


@inlined
def _fill_compute(seconds, at, above, compute):
    size = len(compute)
    above[:size] = 0.0
    refused = False
    for n in range(len(at)):
        if seconds[n] == np.inf:
            refused = True
        else:
            above[at[n] + 1] += seconds[n]
    for i in range(1, size):
        above[i] += above[i - 1]
    for j in range(size):
        for i in range(size):
            compute[j, i] = above[i] - above[j]
    if refused:
        for n in range(len(at)):
            if seconds[n] == np.inf:  # stages with block at[n] in them
                compute[: at[n] + 1, at[n] + 1 :] = np.inf


@kernel
def append_stage(cost, summed, best, last, state, first, after, device):
    """Better splits of ``state``: those of the states ``first`` to before ``after``, and a stage.

    ``best`` float64 ``[S, C + 1]`` is what the blocks before each cost, ``last`` int64
    ``[S, C + 1]`` where the last stage begins, its device and the state before it as one number
    (``last_stage``). ``cost`` float64 ``[C + 1, C + 1]`` is of the stage of blocks ``[j, i)``.
    """
    size, devices = cost.shape[0], np.int64(device) * cost.shape[0]
    for j in range(size - 1):
        which = first  # costs are joined monotonously: of several states the best one will do
        for s in range(first + 1, after):
            if best[s, j] < best[which, j]:
                which = s
        before = best[which, j]
        if before == np.inf:
            continue
        row, value, origin = cost[j, j + 1 :], best[state, j + 1 :], last[state, j + 1 :]
        here = (np.int64(which) << _STATE) + devices + j
        for i in range(len(row)):  # without branches, several at once
            joined = before + row[i] if summed else max(before, row[i])
            better = joined < value[i]
            value[i] = joined if better else value[i]
            origin[i] = here if better else origin[i]


_STATE = 40  # bits below that of a state in ``last``


def last_stage(number, size):
    """(State before, device, first block) of a number of ``append_stage``."""
    state, rest = number >> _STATE, number & ((1 << _STATE) - 1)
    return state, *divmod(rest, size)
