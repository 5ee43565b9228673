"""Numba kernels of ``ideal_dp``: the downward-closed sets of a DAG, and stages between them.

Items are numbered topologically, and ideals too. ``links`` int32 ``[L, 2]`` lists, for an ideal
and sorted by item, which item may be added to it and which ideal that gives;
``spans`` int32 ``[I, 3]`` says where an ideal's links begin and end, and its largest item
there (-1 if none).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.graph import csr
from placement.simulator.analytic_kernels import MAKER, MAKES, TENSOR, USERS
from placement.tools.jit import Struct, allocating, array, inlined, kernel

Array = NDArray[Any]


@allocating
def _grown(a, size):
    """A copy of ``a`` with room for ``size`` numbers or rows, or ``a`` if it has it."""
    if size <= len(a):
        return a
    more = np.empty((max(size, 2 * len(a)), *a.shape[1:]), a.dtype)
    more[: len(a)] = a
    return more


@allocating
def _all_before(pred_ptr, pred, words):
    """uint64 ``[M, words]``: the items that each waits for, as bits."""
    below = np.zeros((len(pred_ptr) - 1, words), np.uint64)
    for v in range(len(below)):
        for i in range(pred_ptr[v], pred_ptr[v + 1]):
            below[v, pred[i] >> 6] |= np.uint64(1) << np.uint64(pred[i] & 63)
    return below


@inlined
def _holds_all(bits, i, below, v):
    """Whether ideal ``i`` has all that item ``v`` waits for."""
    free = True
    for w in range(bits.shape[1]):
        free &= below[v, w] & ~bits[i, w] == 0
    return free


@inlined
def _is_with(bits, j, i, word, bit):
    """Whether ideal ``j`` is ideal ``i`` with the item of ``bit``."""
    same = True
    for w in range(bits.shape[1]):
        same &= bits[j, w] == (bits[i, w] | bit if w == word else bits[i, w])
    return same


@allocating
def _table_of(hashes, count, size):
    """A hash table of so many slots with the first ``count`` ideals, -1: empty."""
    table = np.full(size, -1, np.int32)
    for j in range(count):
        slot = np.int64(hashes[j] & np.uint64(size - 1))
        while table[slot] >= 0:
            slot = (slot + 1) & (size - 1)
        table[slot] = j
    return table


@allocating
def enumerate_ideals(pred_ptr, pred, succ_ptr, succ, code, bytes_each, memory_bytes):
    """All ideals, smaller ones first; the first is empty and the last is full.

    Each is reached from one it extends by an item and found again in a hash table: its hash is
    the exclusive or of its items' ``code``. Returns the number of ideals, 0 when they would
    need more than ``memory_bytes`` at ``bytes_each`` and eight per link; then ``bits``
    uint64 ``[I, W]``, ``spans``, ``links``, and the ideal and the item that each was first
    made of.
    """
    num_items = len(succ_ptr) - 1
    words = (num_items + 63) >> 6
    below = _all_before(pred_ptr, pred, words)
    room = 1024
    bits = np.zeros((room, words), np.uint64)
    hashes = np.zeros(room, np.uint64)
    origin = np.zeros(room, np.int32)
    added = np.zeros(room, np.int32)
    spans = np.zeros((room, 3), np.int32)
    links = np.empty((4 * room, 2), np.int32)
    table = _table_of(hashes, 1, 4 * room)
    frontier = np.empty(num_items, np.int32)
    count = 1
    num_links = 0
    i = 0
    while i < count:
        # What can be added: what could be before, and successors that waited for one item.
        size = 0
        if i == 0:
            for v in range(num_items):
                if pred_ptr[v] == pred_ptr[v + 1]:
                    frontier[size] = v
                    size += 1
        else:
            u = added[i]
            o = origin[i]
            for k in range(spans[o, 0], spans[o, 1]):
                if links[k, 0] != u:
                    frontier[size] = links[k, 0]
                    size += 1
            for k in range(succ_ptr[u], succ_ptr[u + 1]):
                v = succ[k]
                if _holds_all(bits, i, below, v):
                    at = size
                    while at > 0 and frontier[at - 1] > v:
                        frontier[at] = frontier[at - 1]
                        at -= 1
                    frontier[at] = v
                    size += 1
        spans = _grown(spans, i + 1)
        spans[i, 0] = num_links
        spans[i, 1] = num_links + size
        spans[i, 2] = frontier[size - 1] if size else -1
        links = _grown(links, num_links + size)
        for k in range(size):
            v = frontier[k]
            word = v >> 6
            bit = np.uint64(1) << np.uint64(v & 63)
            h = hashes[i] ^ code[v]
            mask = len(table) - 1
            slot = np.int64(h & np.uint64(mask))
            ideal = table[slot]
            while ideal >= 0 and (hashes[ideal] != h or not _is_with(bits, ideal, i, word, bit)):
                slot = (slot + 1) & mask
                ideal = table[slot]
            if ideal < 0:
                if (count + 1) * bytes_each + 8 * (num_links + size) > memory_bytes:
                    return 0, bits, spans, links, origin, added
                ideal = count
                count += 1
                bits = _grown(bits, count)
                hashes = _grown(hashes, count)
                origin = _grown(origin, count)
                added = _grown(added, count)
                for w in range(words):
                    bits[ideal, w] = bits[i, w]
                bits[ideal, word] |= bit
                hashes[ideal] = h
                origin[ideal] = i
                added[ideal] = v
                table[slot] = ideal
                if 2 * count > len(table):
                    table = _table_of(hashes, count, 2 * len(table))
            links[num_links + k, 0] = v
            links[num_links + k, 1] = ideal
        num_links += size
        i += 1
    return count, bits, spans, links, origin, added


def ideals_of(
    edges: NDArray[Any], num_items: int, bytes_each: int, memory_bytes: int
) -> tuple[int, Array, Array, Array, Array, Array]:
    """``enumerate_ideals`` of items with ``edges`` int ``[E, 2]``; arrays are of the ideals."""
    ends = []
    for by, to in ((1, 0), (0, 1)):  # what each waits for, and what waits for it
        pairs = edges[np.lexsort((edges[:, to], edges[:, by]))].astype(np.int32)
        ends += [csr(pairs[:, by], num_items), pairs[:, to].copy()]
    code = np.random.default_rng(0).integers(0, 2**64, num_items, dtype=np.uint64)
    count, bits, spans, links, *made = enumerate_ideals(*ends, code, bytes_each, memory_bytes)
    origin, added = (x[:count] for x in made)
    return count, bits[:count], spans[:count], links, origin, added


@kernel
def add_up(origin, added, weight, total):
    """``total [I]``: the weight of each ideal's items."""
    for i in range(1, len(total)):
        total[i] = total[origin[i]] + weight[added[i]]


class Program(Struct):
    """The dynamic program over ideals: ``M`` items, ``K`` kinds of device, ``S`` states,
    ``H`` tensors, ``Q`` tied parameters, ``I`` ideals."""

    spans: Array  # int32 [I, 3] of the ideals, as are the links
    links: Array  # int32 [L, 2]
    compute: Array  # float64 [M, K]
    own_bytes: Array  # int64 [M]
    io_s: Array  # float64 [H, K]
    tied_bytes: Array  # int64 [Q]
    touch_ptr: Array  # of the items, as are the next three: see analytic_kernels.Moves
    touch: Array
    tied_ptr: Array
    tied: Array
    memory: Array  # int64 [K]
    used: Array  # int64 [S, K] devices of each kind that a state uses
    count: Array  # int64 [K] devices
    step: Array  # int64 [K] from a state to the one with a device more
    work_left: Array  # float64 [I] priced work beyond each ideal
    price_left: Array  # float64 [S] price of unused devices
    value: Array = array("I, S", value=np.inf)  # least largest load of a chain of stages
    from_ideal: Array = array("I, S", np.int32)  # where its last stage begins
    from_kind: Array = array("I, S", np.int8)  # its kind; K + k: as without a device of kind k
    best: Array  # float64 [1] only what is better counts
    live: Array = array("S", np.int64)  # states that are followed from an ideal
    usable: Array = array("K", np.bool_)  # whether any of them has a device left
    inside: Array = array("M", np.bool_)  # items of the stage
    users: Array = array("H", np.int32)  # items of the stage that use a tensor
    readers: Array = array("Q", np.int32)  # items of the stage that read a parameter
    item: Array = array("M+1", np.int32)  # the stage, by depth, as are the next
    first: Array = array("M+1", np.int64)  # links that were not followed yet, from here
    next_link: Array = array("M+1", np.int64)  # to before this one
    work: Array = array("M+1, K")  # compute
    io: Array = array("M+1, K")  # transfers
    held: Array = array("M+1", np.int64)  # bytes


@inlined
def _live_states(t, ideal):
    """Fill ``live`` and ``usable``; how many states are followed.

    A state is not followed where what remains does not fit on the devices that remain at prices
    ``price_left`` even without transfers, nor where it is no better than with one device less.
    """
    value, used, best_s, num_live = t.value, t.used, t.best[0], 0
    num_states, num_kinds = used.shape
    t.usable[:] = False
    for s in range(num_states):
        v = value[ideal, s]
        dominated = False
        for k in range(num_kinds):
            if used[s, k] > 0:
                fewer = value[ideal, s - t.step[k]]
                if fewer <= v:
                    dominated = True
                if fewer < v:
                    v = fewer
                    value[ideal, s] = v
                    t.from_kind[ideal, s] = num_kinds + k
        if dominated or v >= best_s:
            continue
        if t.work_left[ideal] > best_s * t.price_left[s]:
            continue
        t.live[num_live] = s
        num_live += 1
        for k in range(num_kinds):
            if used[s, k] < t.count[k]:
                t.usable[k] = True
    return num_live


@inlined
def _put(t, u, by):
    """Item ``u`` joins the stage (``by`` 1), or leaves it (-1)."""
    t.inside[u] = by > 0
    for i in range(t.touch_ptr[u], t.touch_ptr[u + 1]):
        if not t.touch[i, MAKES]:
            t.users[t.touch[i, TENSOR]] += by
    for i in range(t.tied_ptr[u], t.tied_ptr[u + 1]):
        t.readers[t.tied[i]] += by


@inlined
def _bytes_with(t, depth, u):
    """Bytes of the stage and item ``u``."""
    total = t.held[depth] + t.own_bytes[u]
    for i in range(t.tied_ptr[u], t.tied_ptr[u + 1]):
        if t.readers[t.tied[i]] == 0:
            total += t.tied_bytes[t.tied[i]]
    return total


@inlined
def _fill_io(t, depth, u):
    """``io`` of the stage and item ``u``."""
    touch, users, io = t.touch, t.users, t.io
    num_kinds = io.shape[1]
    for k in range(num_kinds):
        io[depth + 1, k] = io[depth, k]
    for i in range(t.touch_ptr[u], t.touch_ptr[u + 1]):
        users_now = users[touch[i, TENSOR]]
        change = 0  # in how often this set pays for the tensor
        if touch[i, MAKES]:  # made here now: sent if used elsewhere, no longer received
            change = (users_now < touch[i, USERS]) - (users_now > 0)
        elif touch[i, MAKER] >= 0 and t.inside[touch[i, MAKER]]:
            change = -(users_now + 1 == touch[i, USERS])  # nobody elsewhere uses it any more
        else:
            change = 1 * (users_now == 0)  # received for its first user
        if change != 0:
            for k in range(num_kinds):
                io[depth + 1, k] += change * t.io_s[touch[i, TENSOR], k]


@inlined
def _reach(t, ideal, here, depth, bytes_now, num_live):
    """The stage from ``ideal`` to ``here`` after every live state; the values looked at."""
    value, used, best, looked = t.value, t.used, t.best, 0
    full, left = len(t.spans) - 1, t.work_left[here]
    for k in range(used.shape[1]):
        load = t.work[depth, k] + t.io[depth, k]
        if not t.usable[k] or load >= best[0] or bytes_now > t.memory[k]:
            continue
        looked += num_live
        for i in range(num_live):
            s = t.live[i]
            if used[s, k] == t.count[k]:
                continue
            new = s + t.step[k]
            if left > best[0] * t.price_left[new]:
                continue
            v = max(value[ideal, s], load)
            if v < value[here, new]:
                value[here, new] = v
                t.from_ideal[here, new] = ideal
                t.from_kind[here, new] = k
                if here == full and v < best[0]:
                    best[0] = v
    return looked


@kernel
def extend(t, begin, max_steps):
    """The dynamic program over ideals from number ``begin`` on; returns where it stopped, how
    many sets it met, and how many steps that took: eight for each set, one for each value that
    was looked at. It stops after the ideal at which ``max_steps`` were made.

    Each ideal is final when it is reached, because the smaller ones come first. From it, every
    stage is grown an item at a time in increasing order, so that each set is met once, and given
    up when its compute alone, which only grows, is not below ``best`` on any kind of device.
    """
    spans, links, item, work = t.spans, t.links, t.item, t.work
    num_states, num_kinds = t.used.shape
    full, sets, steps = len(spans) - 1, 0, 0
    for ideal in range(begin, full + 1):
        steps += num_states
        num_live = _live_states(t, ideal)
        if num_live == 0 or ideal == full:
            continue
        depth = 0
        item[0] = -1
        t.first[0] = spans[ideal, 0]
        t.next_link[0] = spans[ideal, 1]
        work[0] = 0.0
        t.io[0] = 0.0
        t.held[0] = 0
        while depth >= 0:
            t.next_link[depth] -= 1
            link = t.next_link[depth]
            if link < t.first[depth] or links[link, 0] <= item[depth]:
                # All larger sets were met: take the last item out again.
                if item[depth] >= 0:
                    _put(t, item[depth], -1)
                depth -= 1
                continue
            u, here = links[link, 0], links[link, 1]
            bytes_now = _bytes_with(t, depth, u)
            possible = False
            for k in range(num_kinds):
                seconds = work[depth, k] + t.compute[u, k]
                work[depth + 1, k] = seconds
                if t.usable[k] and seconds < t.best[0] and bytes_now <= t.memory[k]:
                    possible = True
            if not possible:
                continue
            sets += 1
            _fill_io(t, depth, u)
            steps += 8 + _reach(t, ideal, here, depth + 1, bytes_now, num_live)
            if spans[here, 2] <= u:
                continue  # nothing later can be added
            depth += 1
            item[depth] = u
            t.first[depth] = spans[here, 0]
            t.next_link[depth] = spans[here, 1]
            t.held[depth] = bytes_now
            _put(t, u, 1)
        if steps >= max_steps:
            return ideal + 1, sets, steps
    return full + 1, sets, steps
