"""Numba kernels of ``placement.simulator.analytic``, which says what they compute."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.problem import Problem, once
from placement.tools.jit import Struct, allocating, array, inlined, kernel

Array = NDArray[Any]
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class Blocks(Struct):
    """A problem seen as ``I`` blocks of operators that are placed whole.

    Tensors that stay within a block are left out; those with the same producer and the same
    users are one, ``H`` in all. ``Q`` parameters are read by several blocks.
    """

    compute_s: Array  # float64 [I, D]; inf = cannot run there
    src: Array  # int32 [H] producing block, -1 for model inputs
    use_ptr: Array  # int32 [H + 1]
    use_dst: Array  # int32 other blocks that use each tensor
    io_s: Array  # float64 [H, D]
    own_bytes: Array  # int64 [I] parameters that only this block reads
    tied_ptr: Array  # int32 [Q + 1]
    tied_dst: Array  # int32 blocks that read each parameter of several
    tied_bytes: Array  # int64 [Q] its size

    @property
    def num_blocks(self) -> int:
        """``I``."""
        return len(self.compute_s)


def blocks(problem: Problem, block: Ints) -> Blocks:
    """The problem with operator ``n`` in block ``block[n]``, int32 ``[N]``, numbered from 0."""
    g = problem.graph
    num_blocks = int(block.max()) + 1
    compute = np.zeros((num_blocks, problem.num_devices))
    np.add.at(compute, block, problem.compute_s)

    src = np.where(g.tensor_src >= 0, block[g.tensor_src], -1)
    pairs = np.stack([g.use_tensor, block[g.use_dst]], axis=1)
    pairs = np.unique(pairs[pairs[:, 1] != src[pairs[:, 0]]], axis=0)
    merged: dict[bytes, int] = {}
    io: list[Floats] = []
    users: list[Ints] = []
    producer, ptr = [], [0]
    begin = np.searchsorted(pairs[:, 0], np.arange(g.num_tensors + 1))
    for t in np.unique(pairs[:, 0]):
        used_by = pairs[begin[t] : begin[t + 1], 1]
        key = np.append(src[t], used_by).tobytes()
        if key in merged:
            io[merged[key]] = io[merged[key]] + problem.io_s[t]
            continue
        merged[key] = len(io)
        io.append(problem.io_s[t])
        producer.append(src[t])
        users.append(used_by)
        ptr.append(ptr[-1] + len(used_by))

    reads = np.unique(np.stack([g.param_use, block[g.param_use_op]], axis=1), axis=0)
    readers = np.bincount(reads[:, 0], minlength=len(g.param_bytes))
    alone = readers[reads[:, 0]] == 1
    own = np.zeros(num_blocks, np.int64)
    np.add.at(own, reads[alone, 1], g.param_bytes[reads[alone, 0]])
    tied = np.flatnonzero(readers > 1)
    return Blocks(
        compute_s=compute,
        src=np.array(producer, np.int32),
        use_ptr=np.array(ptr, np.int32),
        use_dst=np.concatenate([np.zeros(0, np.int32), *users]).astype(np.int32),
        io_s=np.array(io).reshape(-1, problem.num_devices),
        own_bytes=own,
        tied_ptr=np.append(0, np.cumsum(readers[tied])).astype(np.int32),
        tied_dst=reads[~alone, 1].astype(np.int32),
        tied_bytes=g.param_bytes[tied],
    )


class PieceRoom(Struct):
    """Room for ``piecewise_one``; there are at most ``N + D`` pieces."""

    first: Array = array("D", np.int32)  # operator of each device
    last: Array = array("D", np.int32)
    level: Array = array("N", np.int32)
    piece: Array = array("N", np.int32)
    begin: Array = array("N+D", np.int32)  # where the operators of each piece begin in ``member``
    fill: Array = array("N+D", np.int32)
    member: Array = array("N", np.int32)  # operators, piece by piece
    missing: Array = array("N+D", np.int32)  # pieces it waits for, by tensor and use; 0: it ran
    seen: Array = array("N+D", np.int32)  # the last tensor that each one paid for
    stack: Array = array("N+D", np.int32)
    seconds: Array = array("N+D")
    ready_s: Array = array("N+D")


class Pieces(Struct):
    """A problem for ``piecewise_one``."""

    in_ptr: Array  # int32 [N + 1]
    in_tensor: Array  # int32
    out_ptr: Array  # int32 [N + 1]
    out_tensor: Array  # int32
    tensor_src: Array  # int32 [T]
    use_ptr: Array  # int32 [T + 1]
    use_dst: Array  # int32
    compute_s: Array  # float64 [N, D]
    io_s: Array  # float64 [T, D]
    is_cpu: Array  # bool [D]
    room: PieceRoom


class Moves(Struct):
    """``I`` blocks for ``apply_moves``."""

    compute_s: Array  # float64 [I, D]
    touch_ptr: Array  # int32 [I + 1]
    touch: Array  # int32 [X, 4] tensors a block makes or uses, by block: columns as below
    io_s: Array  # float64 [H, D]
    own_bytes: Array  # int64 [I] parameters that only this block reads
    tied_ptr: Array  # int32 [I + 1]
    tied: Array  # int32 parameters that a block shares with others, by block
    tied_bytes: Array  # int64 [Q]
    memory: Array  # int64 [D]


# Columns of Moves.touch: the tensor, whether the block makes it, the producing block (-1: a model
# input), how many blocks use it.
TENSOR, MAKES, MAKER, USERS = range(4)


class Placed(Struct):
    """Where the blocks are: what ``apply_moves`` changes."""

    device: Array  # int32 [I]
    load: Array = array("D")
    held: Array = array("D", np.int64)  # parameter bytes
    users: Array = array("H, D", np.int32)  # blocks on each device that use a tensor
    readers: Array = array("Q, D", np.int32)  # blocks on each device that read a tied parameter
    moved: Array = array("2", np.int64)  # the devices of the last ``apply_moves``
    load_before: Array = array("2")  # of those, before it
    held_before: Array = array("2", np.int64)


@once
def load_tables(problem: Problem) -> tuple[Blocks, Ints]:
    """The colocation groups as blocks, and int32 ``[G]`` an operator of each."""
    g = problem.graph
    return blocks(problem, g.group), g.group_op[g.group_ptr[:-1]]


@allocating
def load_batch(t, first, placements, load):
    """Loads ``[B, D]`` of placements ``[B, N]``; group ``g`` is where operator ``first[g]`` is."""
    compute_s, io_s = t.compute_s, t.io_s
    src, use_ptr, use_dst = t.src, t.use_ptr, t.use_dst
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
        for tensor in range(len(src)):
            home = device[src[tensor]] if src[tensor] >= 0 else -1
            leaves = False
            for i in range(use_ptr[tensor], use_ptr[tensor + 1]):
                d = device[use_dst[i]]
                if d != home:
                    leaves = True
                    if seen[d] != tensor:
                        seen[d] = tensor
                        load[b, d] += io_s[tensor, d]
            if leaves and home >= 0:
                load[b, home] += io_s[tensor, home]


@once
def param_tables(problem: Problem) -> tuple[Ints, Ints]:
    """Pairs of a parameter and an operator that reads it, int32 each, by parameter."""
    g = problem.graph
    order = np.lexsort((g.param_use_op, g.param_use))
    return g.param_use[order], g.param_use_op[order]


@allocating
def param_bytes_batch(param, reader, size, placements, held):
    """Bytes ``[B, D]`` of placements ``[B, K, N]``; each of ``size [P]`` once per device."""
    seen = np.empty(held.shape[1], np.int32)
    held[:] = 0
    for b in range(len(placements)):
        seen[:] = -1
        for i in range(len(param)):
            for k in range(placements.shape[1]):
                d = placements[b, k, reader[i]]
                if seen[d] != param[i]:
                    seen[d] = param[i]
                    held[b, d] += size[param[i]]


def piecewise_tables(problem: Problem) -> Pieces:
    """The problem for ``piecewise_one``, and room for one at a time."""
    g, n, d = problem.graph, problem.num_ops, problem.num_devices
    is_cpu = np.array([x.kind == "cpu" for x in problem.cluster.devices])
    return Pieces.of(g, problem, is_cpu=is_cpu, room=PieceRoom.fresh({"N": n, "D": d}))


@inlined
def _fill_pieces(t, p, s):
    """The piece of each operator: levels of the accelerators, then operators of CPUs; how many.

    An operator before the first of its device has level 0 and is not visited.
    """
    in_ptr, in_tensor, tensor_src, is_cpu = t.in_ptr, t.in_tensor, t.tensor_src, t.is_cpu
    first, last, level, piece = s.first, s.last, s.level, s.piece
    n, num_devices = t.compute_s.shape
    first[:] = -1
    for v in range(n):
        if first[p[v]] < 0:
            first[p[v]] = v
        last[p[v]] = v
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
    return count


@inlined
def _fill_members(t, p, s, count):
    """The operators, the seconds, and how many uses each piece waits for."""
    tensor_src, use_ptr, use_dst, is_cpu = t.tensor_src, t.use_ptr, t.use_dst, t.is_cpu
    compute_s, io_s = t.compute_s, t.io_s
    piece, begin, fill, member = s.piece, s.begin, s.fill, s.member
    missing, seen, seconds = s.missing, s.seen, s.seconds
    n = len(p)
    begin[: count + 1] = 0
    seconds[:count] = 0.0
    missing[:count] = 0
    s.ready_s[:count] = 0.0
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
    for tensor in range(len(tensor_src)):
        u = tensor_src[tensor]
        home = piece[u] if u >= 0 else -1
        leaves = False
        for i in range(use_ptr[tensor], use_ptr[tensor + 1]):
            w = use_dst[i]
            q = piece[w]
            if q != home:
                leaves = True
                if home >= 0:
                    missing[q] += 1
                if seen[q] != tensor:
                    seen[q] = tensor
                    if not is_cpu[p[w]]:
                        seconds[q] += io_s[tensor, p[w]]
        if leaves and home >= 0 and not is_cpu[p[u]]:
            seconds[home] += io_s[tensor, p[u]]


@kernel
def piecewise_one(t, p, limit):
    """Seconds of one sample for the placement ``p`` int32 ``[N]``; inf if above ``limit``."""
    out_ptr, out_tensor, use_ptr, use_dst = t.out_ptr, t.out_tensor, t.use_ptr, t.use_dst
    s = t.room
    piece, begin, member, missing, stack = s.piece, s.begin, s.member, s.missing, s.stack
    seconds, ready_s = s.seconds, s.ready_s
    count = _fill_pieces(t, p, s)
    _fill_members(t, p, s, count)
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
                tensor = out_tensor[j]
                for i in range(use_ptr[tensor], use_ptr[tensor + 1]):
                    r = piece[use_dst[i]]
                    if r != q:
                        ready_s[r] = max(ready_s[r], end)
                        missing[r] -= 1
                        if missing[r] == 0:
                            stack[waiting] = r
                            waiting += 1
    return latest if done == count else np.inf


@kernel
def piecewise_batch(t, placements, value):
    """Seconds ``[B]`` of one sample for placements ``[B, N]``."""
    for b in range(len(placements)):
        value[b] = piecewise_one(t, placements[b], np.inf)


def move_tables(problem: Problem, b: Blocks) -> Moves:
    """Blocks of a problem for ``apply_moves``."""
    users = np.repeat(np.arange(len(b.src)), np.diff(b.use_ptr))
    inner = np.flatnonzero(b.src >= 0)
    owner = np.concatenate([b.src[inner], b.use_dst])
    tensor = np.concatenate([inner, users]).astype(np.intp)
    makes = np.arange(len(owner)) < len(inner)
    touch = np.stack([tensor, makes, b.src[tensor], np.diff(b.use_ptr)[tensor]], axis=1)
    touch_ptr, order = _by_block(owner, b.num_blocks)
    param = np.repeat(np.arange(len(b.tied_bytes)), np.diff(b.tied_ptr))
    tied_ptr, tied_order = _by_block(b.tied_dst, b.num_blocks)
    return Moves.of(
        b,
        touch_ptr=touch_ptr,
        touch=touch[order].astype(np.int32),
        tied_ptr=tied_ptr,
        tied=param[tied_order].astype(np.int32),
        memory=problem.memory_bytes,
    )


def _by_block(owner: NDArray[Any], num_blocks: int) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    order = np.argsort(owner, kind="stable")
    return np.searchsorted(owner[order], np.arange(num_blocks + 1)).astype(np.int32), order


def move_state(tables: Moves, device: NDArray[np.int32]) -> Placed:
    """The blocks on ``device`` int32 ``[I]``."""
    num_tensors, num_devices = tables.io_s.shape
    sizes = {"D": num_devices, "H": num_tensors, "Q": len(tables.tied_bytes)}
    state = Placed.fresh(sizes, device=np.array(device, np.int32))
    fill_state(tables, state)
    return state


@kernel
def fill_state(t, s):
    """Count and add up for the devices in ``s``; the drift of many moves is gone then."""
    compute_s, touch_ptr, touch, io_s = t.compute_s, t.touch_ptr, t.touch, t.io_s
    tied_ptr, tied = t.tied_ptr, t.tied
    device, load, held, users, readers = s.device, s.load, s.held, s.users, s.readers
    load[:] = 0.0
    held[:] = 0
    users[:] = 0
    readers[:] = 0
    for g in range(len(device)):
        d = device[g]
        load[d] += compute_s[g, d]
        held[d] += t.own_bytes[g]
        for i in range(tied_ptr[g], tied_ptr[g + 1]):
            if readers[tied[i], d] == 0:
                held[d] += t.tied_bytes[tied[i]]
            readers[tied[i], d] += 1
        for i in range(touch_ptr[g], touch_ptr[g + 1]):
            if not touch[i, MAKES]:
                tensor = touch[i, TENSOR]
                users[tensor, d] += 1
                if users[tensor, d] == 1 and (touch[i, MAKER] < 0 or device[touch[i, MAKER]] != d):
                    load[d] += io_s[tensor, d]
    for g in range(len(device)):
        for i in range(touch_ptr[g], touch_ptr[g + 1]):
            tensor = touch[i, TENSOR]
            if touch[i, MAKES] and users[tensor, device[g]] < touch[i, USERS]:
                load[device[g]] += io_s[tensor, device[g]]


@kernel
def load_change(t, s, g, new):
    """What moving block ``g`` to ``new`` adds to the load of its old and of its new device."""
    touch, io_s, device, users = t.touch, t.io_s, s.device, s.users
    old = device[g]
    at_old = -t.compute_s[g, old]
    at_new = t.compute_s[g, new]
    for i in range(t.touch_ptr[g], t.touch_ptr[g + 1]):
        tensor, total = touch[i, TENSOR], touch[i, USERS]
        here = users[tensor, old]
        there = users[tensor, new]
        if touch[i, MAKES]:
            # Leaving, it becomes an input of the users left behind; arriving, it is sent
            # only where some user is elsewhere, and no longer received.
            at_old += io_s[tensor, old] * ((here > 0) - (total > here))
            at_new += io_s[tensor, new] * ((total > there) - (there > 0))
            continue
        home = device[touch[i, MAKER]] if touch[i, MAKER] >= 0 else -1
        if home == old:  # the producer stays behind and must send now
            at_old += io_s[tensor, old] * (here == total)
        else:
            at_old -= io_s[tensor, old] * (here == 1)
        if home == new:  # the producer was sending, perhaps to others too
            at_new -= io_s[tensor, new] * (there + 1 == total)
        else:
            at_new += io_s[tensor, new] * (there == 0)
    return at_old, at_new


@inlined
def _recount(t, s, g, new):
    """Block ``g`` is on ``new`` from now on; loads and bytes are left as they are."""
    touch, users, tied, readers = t.touch, s.users, t.tied, s.readers
    old = s.device[g]
    for i in range(t.touch_ptr[g], t.touch_ptr[g + 1]):
        if not touch[i, MAKES]:
            users[touch[i, TENSOR], old] -= 1
            users[touch[i, TENSOR], new] += 1
    for i in range(t.tied_ptr[g], t.tied_ptr[g + 1]):
        readers[tied[i], old] -= 1
        readers[tied[i], new] += 1
    s.device[g] = new


@kernel
def apply_move(t, s, g, new):
    """Move block ``g`` to device ``new``."""
    load, held, readers = s.load, s.held, s.readers
    old = s.device[g]
    if new == old:
        return
    at_old, at_new = load_change(t, s, g, new)
    load[old] += at_old
    load[new] += at_new
    held[old] -= t.own_bytes[g]
    held[new] += t.own_bytes[g]
    for i in range(t.tied_ptr[g], t.tied_ptr[g + 1]):
        q = t.tied[i]
        held[old] -= t.tied_bytes[q] * (readers[q, old] == 1)
        held[new] += t.tied_bytes[q] * (readers[q, new] == 0)
    _recount(t, s, g, new)


@kernel
def apply_moves(t, s, group, where, count):
    """Move blocks ``group[:count]`` between two devices, to ``where[:count]``."""
    s.moved[0], s.moved[1] = s.device[group[0]], where[0]
    for i in range(2):
        s.load_before[i], s.held_before[i] = s.load[s.moved[i]], s.held[s.moved[i]]
    for k in range(count):
        apply_move(t, s, np.int64(group[k]), np.int64(where[k]))


@kernel
def undo_moves(t, s, group, where, count):
    """Undo the last ``apply_moves``, to the last digit."""
    for k in range(count):
        _recount(t, s, group[k], s.moved[0] if where[k] == s.moved[1] else s.moved[1])
    for i in range(2):
        s.load[s.moved[i]], s.held[s.moved[i]] = s.load_before[i], s.held_before[i]
