"""Numba kernels of ``placement.objectives``, which says what they compute."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.jit import allocating, inlined, kernel
from placement.objectives import Blocks, blocks
from placement.problem import Problem


def load_tables(problem: Problem) -> tuple[Any, ...]:
    """Arguments of ``load_batch``: the colocation groups as blocks, and an operator of each."""
    cached: tuple[Any, ...] | None = problem.__dict__.get("_load_tables")
    if cached is None:
        g = problem.graph
        b = blocks(problem, g.group)
        first = np.zeros(g.num_groups, np.int32)
        first[g.group[::-1]] = np.arange(g.num_ops)[::-1]
        cached = (first, b.compute_s, b.src, b.use_ptr, b.use_dst, b.io_s)
        problem.__dict__["_load_tables"] = cached
    return cached


@allocating
def load_batch(first, compute_s, src, use_ptr, use_dst, io_s, placements, load):
    """Loads ``[B, D]`` of placements ``[B, N]``; group ``g`` is where operator ``first[g]`` is."""
    num_groups, num_devices = compute_s.shape
    device = np.empty(num_groups, np.int32)
    seen = np.empty(num_devices, np.int32)
    load[:] = 0.0
    for b in range(len(placements)):
        for g in range(num_groups):
            d = placements[b, first[g]]
            device[g] = d
            load[b, d] += compute_s[g, d]
        seen[:] = -1
        for t in range(len(src)):
            home = device[src[t]] if src[t] >= 0 else -1
            leaves = False
            for i in range(use_ptr[t], use_ptr[t + 1]):
                d = device[use_dst[i]]
                if d != home:
                    leaves = True
                    if seen[d] != t:
                        seen[d] = t
                        load[b, d] += io_s[t, d]
            if leaves and home >= 0:
                load[b, home] += io_s[t, home]


def param_tables(problem: Problem) -> tuple[Any, ...]:
    """Arguments of ``param_bytes_batch``: the parameters' readers, sorted by parameter."""
    cached: tuple[Any, ...] | None = problem.__dict__.get("_param_tables")
    if cached is None:
        g = problem.graph
        order = np.lexsort((g.param_use_op, g.param_use))
        cached = (g.param_use[order], g.param_use_op[order], g.param_bytes)
        problem.__dict__["_param_tables"] = cached
    return cached


@allocating
def param_bytes_batch(param, reader, size, placements, held):
    """Parameter bytes ``[B, D]`` of placements ``[B, N]``; tied ones once per device."""
    seen = np.empty(held.shape[1], np.int32)
    held[:] = 0
    for b in range(len(placements)):
        seen[:] = -1
        for i in range(len(param)):
            d = placements[b, reader[i]]
            if seen[d] != param[i]:
                seen[d] = param[i]
                held[b, d] += size[param[i]]


def piecewise_tables(problem: Problem) -> tuple[Any, ...]:
    """Arguments of ``piecewise_batch``, and ``tables`` of ``piecewise_one``."""
    g = problem.graph
    is_cpu = np.array([d.kind == "cpu" for d in problem.cluster.devices])
    return (
        g.in_ptr,
        g.in_tensor,
        g.out_ptr,
        g.out_tensor,
        g.tensor_src,
        g.use_ptr,
        g.use_dst,
        problem.compute_s,
        problem.io_s,
        is_cpu,
    )


@allocating
def piecewise_scratch(n, num_devices):
    """Room for ``piecewise_one``: int32 ``[10, N + D]`` and float64 ``[2, N]``."""
    return np.empty((10, n + num_devices), np.int32), np.empty((2, n))


@kernel
def piecewise_one(tables, p, scratch, limit):
    """Seconds of one sample for the placement ``p`` int32 ``[N]``; inf if above ``limit``."""
    in_ptr, in_tensor, out_ptr, out_tensor, tensor_src = tables[:5]
    use_ptr, use_dst, compute_s, io_s, is_cpu = tables[5:]
    n, num_devices = compute_s.shape
    ints, floats = scratch
    first, last, level, piece = ints[0], ints[1], ints[2], ints[3]
    begin, fill, member = ints[4], ints[5], ints[6]  # operators of a piece are consecutive
    missing, seen, stack = ints[7], ints[8], ints[9]
    seconds, ready_s = floats[0], floats[1]
    first[:] = -1
    for v in range(n):
        if first[p[v]] < 0:
            first[p[v]] = v
        last[p[v]] = v
    # Levels: an operator before the first of its device has level 0 and is not visited.
    count = 0
    for d in range(num_devices):
        if is_cpu[d] or first[d] < 0:
            continue
        low = first[d]
        deepest = 0
        for v in range(low, last[d] + 1):
            inside = p[v] == d
            deep = 1 if inside else 0
            for i in range(in_ptr[v], in_ptr[v + 1]):
                u = tensor_src[in_tensor[i]]
                if u >= low:
                    at = level[u]
                    if inside and p[u] != d:
                        at += 1
                    if at > deep:
                        deep = at
            level[v] = deep
            if inside:
                piece[v] = count + deep - 1
                if deep > deepest:
                    deepest = deep
        count += deepest
    for v in range(n):
        if is_cpu[p[v]]:
            piece[v] = count
            count += 1
    begin[: count + 1] = 0
    seconds[:count] = 0.0
    missing[:count] = 0
    ready_s[:count] = 0.0
    seen[:count] = -1
    for v in range(n):
        begin[piece[v] + 1] += 1
        seconds[piece[v]] += compute_s[v, p[v]]
    for q in range(count):
        begin[q + 1] += begin[q]
        fill[q] = begin[q]
    for v in range(n):
        member[fill[piece[v]]] = v
        fill[piece[v]] += 1
    for t in range(len(tensor_src)):
        u = tensor_src[t]
        home = piece[u] if u >= 0 else -1
        leaves = False
        for i in range(use_ptr[t], use_ptr[t + 1]):
            w = use_dst[i]
            q = piece[w]
            if q != home:
                leaves = True
                if home >= 0:
                    missing[q] += 1
                if seen[q] != t:
                    seen[q] = t
                    if not is_cpu[p[w]]:
                        seconds[q] += io_s[t, p[w]]
        if leaves and home >= 0 and not is_cpu[p[u]]:
            seconds[home] += io_s[t, p[u]]
    waiting = 0
    for q in range(count):
        if missing[q] == 0:
            stack[waiting] = q
            waiting += 1
    done = 0
    latest = 0.0
    while waiting > 0:
        waiting -= 1
        q = stack[waiting]
        done += 1
        end = ready_s[q] + seconds[q]
        if end > limit:
            return np.inf
        latest = max(latest, end)
        for k in range(begin[q], begin[q + 1]):
            v = member[k]
            for j in range(out_ptr[v], out_ptr[v + 1]):
                t = out_tensor[j]
                for i in range(use_ptr[t], use_ptr[t + 1]):
                    r = piece[use_dst[i]]
                    if r != q:
                        ready_s[r] = max(ready_s[r], end)
                        missing[r] -= 1
                        if missing[r] == 0:
                            stack[waiting] = r
                            waiting += 1
    return latest if done == count else np.inf


@allocating
def piecewise_batch(
    in_ptr,
    in_tensor,
    out_ptr,
    out_tensor,
    tensor_src,
    use_ptr,
    use_dst,
    compute_s,
    io_s,
    is_cpu,
    placements,
    value,
):
    """Seconds ``[B]`` of one sample for placements ``[B, N]``."""
    ins = (in_ptr, in_tensor, out_ptr, out_tensor, tensor_src)
    tables = (*ins, use_ptr, use_dst, compute_s, io_s, is_cpu)
    scratch = piecewise_scratch(*compute_s.shape)
    for b in range(len(placements)):
        value[b] = piecewise_one(tables, placements[b], scratch, np.inf)


def move_tables(problem: Problem, b: Blocks) -> tuple[Any, ...]:
    """Read-only arrays of ``trial_move``.

    ``touch`` int32 ``[X, 4]`` lists for each block the tensors it makes or uses: tensor,
    whether it makes it, producing block, number of blocks that use it. ``tied`` lists the
    parameters it shares with other blocks.
    """
    users = np.repeat(np.arange(len(b.src)), np.diff(b.use_ptr))
    made = np.flatnonzero(b.src >= 0)
    owner = np.concatenate([b.src[made], b.use_dst])
    tensor = np.concatenate([made, users]).astype(np.intp)
    makes = np.arange(len(owner)) < len(made)
    touch = np.stack([tensor, makes, b.src[tensor], np.diff(b.use_ptr)[tensor]], axis=1)
    touch_ptr, order = _by_block(owner, b.num_blocks)
    param = np.repeat(np.arange(len(b.tied_bytes)), np.diff(b.tied_ptr))
    tied_ptr, tied_order = _by_block(b.tied_dst, b.num_blocks)
    return (
        b.compute_s,
        touch_ptr,
        touch[order].astype(np.int32),
        b.io_s,
        b.own_bytes,
        tied_ptr,
        param[tied_order].astype(np.int32),
        b.tied_bytes,
        problem.memory_bytes,
    )


def _by_block(owner: NDArray[Any], num_blocks: int) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    order = np.argsort(owner, kind="stable")
    return np.searchsorted(owner[order], np.arange(num_blocks + 1)).astype(np.int32), order


def move_state(tables: tuple[Any, ...], device: NDArray[np.int32]) -> tuple[Any, ...]:
    """What ``apply_move`` changes: device ``[I]``, loads ``[D]``, bytes ``[D]``, counts.

    ``users [H, D]`` and ``readers [Q, D]`` count the blocks on each device that use a tensor
    or read a tied parameter.
    """
    num_tensors, num_devices = tables[3].shape
    state = (
        np.array(device, np.int32),
        np.zeros(num_devices),
        np.zeros(num_devices, np.int64),
        np.zeros((num_tensors, num_devices), np.int32),
        np.zeros((len(tables[7]), num_devices), np.int32),
    )
    fill_state(tables, state)
    return state


@kernel
def fill_state(tables, state):
    """Count and add up for the devices in ``state[0]``; the drift of many moves is gone then."""
    compute_s, touch_ptr, touch, io_s, own_bytes, tied_ptr, tied, tied_bytes, _ = tables
    device, load, held, users, readers = state
    load[:] = 0.0
    held[:] = 0
    users[:] = 0
    readers[:] = 0
    for g in range(len(device)):
        d = device[g]
        load[d] += compute_s[g, d]
        held[d] += own_bytes[g]
        for i in range(tied_ptr[g], tied_ptr[g + 1]):
            if readers[tied[i], d] == 0:
                held[d] += tied_bytes[tied[i]]
            readers[tied[i], d] += 1
        for i in range(touch_ptr[g], touch_ptr[g + 1]):
            if not touch[i, 1]:
                t = touch[i, 0]
                users[t, d] += 1
                if users[t, d] == 1 and (touch[i, 2] < 0 or device[touch[i, 2]] != d):
                    load[d] += io_s[t, d]
    for g in range(len(device)):
        for i in range(touch_ptr[g], touch_ptr[g + 1]):
            t = touch[i, 0]
            if touch[i, 1] and users[t, device[g]] < touch[i, 3]:
                load[device[g]] += io_s[t, device[g]]


@kernel
def load_change(compute_s, touch_ptr, touch, io_s, device, users, g, new):
    """What moving block ``g`` to ``new`` adds to the load of its old and of its new device."""
    old = device[g]
    at_old = -compute_s[g, old]
    at_new = compute_s[g, new]
    for i in range(touch_ptr[g], touch_ptr[g + 1]):
        t = touch[i, 0]
        here = users[t, old]
        there = users[t, new]
        if touch[i, 1]:
            # Leaving, it becomes an input of the users left behind; arriving, it is sent
            # only where some user is elsewhere, and no longer received.
            total = touch[i, 3]
            at_old += io_s[t, old] * ((here > 0) - (total > here))
            at_new += io_s[t, new] * ((total > there) - (there > 0))
            continue
        home = device[touch[i, 2]] if touch[i, 2] >= 0 else -1
        if home == old:  # the producer stays behind and must send now
            at_old += io_s[t, old] * (here == touch[i, 3])
        else:
            at_old -= io_s[t, old] * (here == 1)
        if home == new:  # the producer was sending, perhaps to others too
            at_new -= io_s[t, new] * (there + 1 == touch[i, 3])
        else:
            at_new += io_s[t, new] * (there == 0)
    return at_old, at_new


@kernel
def trial_move(tables, state, g, new):
    """Largest load with block ``g`` on ``new``; inf where it cannot run or does not fit."""
    device, load, held, users, readers = state
    old = device[g]
    largest = 0.0
    if new == old:
        for d in range(len(load)):
            largest = max(largest, load[d])
        return largest
    need = held[new] + tables[4][g]
    tied_ptr = tables[5]
    for i in range(tied_ptr[g], tied_ptr[g + 1]):
        if readers[tables[6][i], new] == 0:
            need += tables[7][tables[6][i]]
    if need > tables[8][new]:
        return np.inf
    at_old, at_new = load_change(tables[0], tables[1], tables[2], tables[3], device, users, g, new)
    largest = max(load[old] + at_old, load[new] + at_new)
    for d in range(len(load)):
        if d != old and d != new:
            largest = max(largest, load[d])
    return largest


@inlined
def _recount(touch_ptr, touch, tied_ptr, tied, device, users, readers, g, new):
    """Block ``g`` is on ``new`` from now on; loads and bytes are left as they are."""
    old = device[g]
    for i in range(touch_ptr[g], touch_ptr[g + 1]):
        if not touch[i, 1]:
            users[touch[i, 0], old] -= 1
            users[touch[i, 0], new] += 1
    for i in range(tied_ptr[g], tied_ptr[g + 1]):
        readers[tied[i], old] -= 1
        readers[tied[i], new] += 1
    device[g] = new


@kernel
def apply_moves(tables, state, group, where, count):
    """Move blocks ``group[:count]`` to devices ``where[:count]``, one after another."""
    compute_s, touch_ptr, touch, io_s, own_bytes, tied_ptr, tied, tied_bytes, _ = tables
    device, load, held, users, readers = state
    for k in range(count):
        g, new = group[k], where[k]
        old = device[g]
        if new == old:
            continue
        at_old, at_new = load_change(compute_s, touch_ptr, touch, io_s, device, users, g, new)
        load[old] += at_old
        load[new] += at_new
        held[old] -= own_bytes[g]
        held[new] += own_bytes[g]
        for i in range(tied_ptr[g], tied_ptr[g + 1]):
            q = tied[i]
            held[old] -= tied_bytes[q] * (readers[q, old] == 1)
            held[new] += tied_bytes[q] * (readers[q, new] == 0)
        _recount(touch_ptr, touch, tied_ptr, tied, device, users, readers, g, new)


@kernel
def apply_move(tables, state, g, new):
    """Move block ``g`` to device ``new``."""
    apply_moves(tables, state, (g,), (new,), 1)


@kernel
def undo_moves(tables, state, group, where, count, old, new):
    """Undo ``apply_moves`` between two devices, in counts; loads and bytes are the caller's."""
    _, touch_ptr, touch, _, _, tied_ptr, tied, _, _ = tables
    device, _, _, users, readers = state
    for k in range(count):
        back = old if where[k] == new else new
        _recount(touch_ptr, touch, tied_ptr, tied, device, users, readers, group[k], back)
