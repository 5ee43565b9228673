"""Numba kernels of ``ideal_dp``: the downward-closed sets of a DAG, and stages between them.

Items are numbered topologically, and ideals too. ``links`` int32 ``[L, 2]`` lists, for an ideal
and sorted by item, which item may be added to it and which ideal that gives;
``spans`` int32 ``[I, 3]`` says where an ideal's links begin and end, and its largest item
there (-1 if none).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from placement.jit import allocating, kernel


@allocating
def _grown(a, size):
    """A copy of ``a`` with room for ``size`` numbers, or ``a`` if it has it."""
    if size <= len(a):
        return a
    more = np.empty(max(size, 2 * len(a)), a.dtype)
    for i in range(len(a)):
        more[i] = a[i]
    return more


@allocating
def _grown_rows(a, size):
    """The same of rows."""
    if size <= len(a):
        return a
    more = np.empty((max(size, 2 * len(a)), a.shape[1]), a.dtype)
    for i in range(len(a)):
        for j in range(a.shape[1]):
            more[i, j] = a[i, j]
    return more


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
    below = np.zeros((num_items, words), np.uint64)
    for v in range(num_items):
        for i in range(pred_ptr[v], pred_ptr[v + 1]):
            below[v, pred[i] >> 6] |= np.uint64(1) << np.uint64(pred[i] & 63)

    room = 1024
    bits = np.zeros((room, words), np.uint64)
    hashes = np.zeros(room, np.uint64)
    origin = np.zeros(room, np.int32)
    added = np.zeros(room, np.int32)
    spans = np.zeros((room, 3), np.int32)
    links = np.empty((4 * room, 2), np.int32)
    table = np.full(4 * room, -1, np.int32)
    frontier = np.empty(num_items, np.int32)
    count = 1
    num_links = 0
    bits[0] = 0
    table[0] = 0
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
                free = True
                for w in range(words):
                    if below[v, w] & ~bits[i, w] != 0:
                        free = False
                        break
                if free:
                    at = size
                    while at > 0 and frontier[at - 1] > v:
                        frontier[at] = frontier[at - 1]
                        at -= 1
                    frontier[at] = v
                    size += 1
        spans = _grown_rows(spans, i + 1)
        spans[i, 0] = num_links
        spans[i, 1] = num_links + size
        spans[i, 2] = frontier[size - 1] if size else -1
        links = _grown_rows(links, num_links + size)
        for k in range(size):
            v = frontier[k]
            word = v >> 6
            bit = np.uint64(1) << np.uint64(v & 63)
            h = hashes[i] ^ code[v]
            mask = len(table) - 1
            slot = np.int64(h & np.uint64(mask))
            found = -1
            while table[slot] >= 0:
                j = table[slot]
                if hashes[j] == h:
                    same = True
                    for w in range(words):
                        want = bits[i, w]
                        if w == word:
                            want |= bit
                        if bits[j, w] != want:
                            same = False
                            break
                    if same:
                        found = j
                        break
                slot = (slot + 1) & mask
            if found < 0:
                if (count + 1) * bytes_each + 8 * (num_links + size) > memory_bytes:
                    return 0, bits, spans, links, origin, added
                found = count
                count += 1
                bits = _grown_rows(bits, count)
                hashes = _grown(hashes, count)
                origin = _grown(origin, count)
                added = _grown(added, count)
                for w in range(words):
                    bits[found, w] = bits[i, w]
                bits[found, word] |= bit
                hashes[found] = h
                origin[found] = i
                added[found] = v
                table[slot] = found
                if 2 * count > len(table):
                    table = np.full(2 * len(table), -1, np.int32)
                    mask = len(table) - 1
                    for j in range(count):
                        slot = np.int64(hashes[j] & np.uint64(mask))
                        while table[slot] >= 0:
                            slot = (slot + 1) & mask
                        table[slot] = j
            links[num_links + k, 0] = v
            links[num_links + k, 1] = found
        num_links += size
        i += 1
    return count, bits, spans, links, origin, added


@kernel
def add_up(origin, added, weight, total):
    """``total [I]``: the weight of each ideal's items."""
    for i in range(1, len(total)):
        total[i] = total[origin[i]] + weight[added[i]]


@allocating
def extend(
    spans,
    links,
    costs,
    touches,
    kinds,
    remaining,
    value,
    from_ideal,
    from_kind,
    best,
    begin,
    max_steps,
):
    """The dynamic program over ideals from number ``begin`` on; returns where it stopped, how
    many sets it met, and how many steps that took: eight for each set, one for each value that
    was looked at.

    ``value[I, s]`` is the least largest load of a chain of stages that ends in ideal ``I``
    and uses the devices of state ``s``. Each ideal is final when it is reached, because the
    smaller ones come first. From it, every stage is grown an item at a time in increasing
    order, so that each set is met once, and given up when its compute alone, which only grows,
    is not below ``best[0]`` on any kind of device. A state is not followed where what remains
    does not fit on the devices that remain at prices ``remaining`` even without transfers,
    nor where it is no better than with one device less.

    Arguments, with ``M`` items, ``K`` kinds of device, ``S`` states, ``H`` tensors, ``Q`` tied
    parameters:
        spans, links: of the ideals.
        costs: compute ``[M, K]``, bytes ``[M]``, io ``[H, K]``, bytes ``[Q]``.
        touches: ``touch_ptr``, ``touch``, ``tied_ptr``, ``tied`` of the items, as in
            ``objective_kernels.move_tables``.
        kinds: memory ``[K]``, used ``[S, K]``, count ``[K]``, step ``[K]`` between states.
        remaining: priced work beyond each ideal ``[I]``, price of unused devices ``[S]``.
        value, from_ideal, from_kind: ``[I, S]``, filled in; a kind of ``K + k`` says that the
            value is the one without a device of kind ``k``.
        best: ``[1]`` only what is better counts; lowered when the full ideal gets better.
        max_steps: stop after the ideal at which this many steps were made.
    """
    compute, own_bytes, io_s, tied_bytes = costs
    touch_ptr, touch, tied_ptr, tied = touches
    memory, used, count, step = kinds
    work_left, price_left = remaining
    num_items, num_kinds = compute.shape
    num_states = len(used)
    full = len(spans) - 1
    live = np.empty(num_states, np.int64)
    usable = np.empty(num_kinds, np.bool_)
    inside = np.zeros(num_items, np.bool_)
    users = np.zeros(len(io_s), np.int32)
    readers = np.zeros(len(tied_bytes), np.int32)
    item = np.empty(num_items + 1, np.int32)
    first = np.empty(num_items + 1, np.int64)
    next_link = np.empty(num_items + 1, np.int64)
    work = np.zeros((num_items + 1, num_kinds))
    io = np.zeros((num_items + 1, num_kinds))
    held = np.zeros(num_items + 1, np.int64)
    sets = 0
    steps = 0
    for ideal in range(begin, full + 1):
        num_live = 0
        steps += num_states
        usable[:] = False
        for s in range(num_states):
            v = value[ideal, s]
            dominated = False
            for k in range(num_kinds):
                if used[s, k] > 0:
                    fewer = value[ideal, s - step[k]]
                    if fewer <= v:
                        dominated = True
                    if fewer < v:
                        v = fewer
                        value[ideal, s] = v
                        from_kind[ideal, s] = num_kinds + k
            if dominated or v >= best[0]:
                continue
            if work_left[ideal] > best[0] * price_left[s]:
                continue
            live[num_live] = s
            num_live += 1
            for k in range(num_kinds):
                if used[s, k] < count[k]:
                    usable[k] = True
        if num_live == 0 or ideal == full:
            continue
        depth = 0
        item[0] = -1
        first[0] = spans[ideal, 0]
        next_link[0] = spans[ideal, 1]
        work[0] = 0.0
        io[0] = 0.0
        held[0] = 0
        while depth >= 0:
            next_link[depth] -= 1
            link = next_link[depth]
            if link < first[depth] or links[link, 0] <= item[depth]:
                # All larger sets were met: take the last item out again.
                u = item[depth]
                if u >= 0:
                    inside[u] = False
                    for i in range(touch_ptr[u], touch_ptr[u + 1]):
                        if not touch[i, 1]:
                            users[touch[i, 0]] -= 1
                    for i in range(tied_ptr[u], tied_ptr[u + 1]):
                        readers[tied[i]] -= 1
                depth -= 1
                continue
            u = links[link, 0]
            bytes_now = held[depth] + own_bytes[u]
            for i in range(tied_ptr[u], tied_ptr[u + 1]):
                if readers[tied[i]] == 0:
                    bytes_now += tied_bytes[tied[i]]
            possible = False
            for k in range(num_kinds):
                seconds = work[depth, k] + compute[u, k]
                work[depth + 1, k] = seconds
                if usable[k] and seconds < best[0] and bytes_now <= memory[k]:
                    possible = True
            if not possible:
                continue
            sets += 1
            steps += 8
            here = links[link, 1]
            for k in range(num_kinds):
                io[depth + 1, k] = io[depth, k]
            for i in range(touch_ptr[u], touch_ptr[u + 1]):
                users_now = users[touch[i, 0]]
                change = 0  # in how often this set pays for the tensor
                if touch[i, 1]:  # made here now: sent if used elsewhere, no longer received
                    change = (users_now < touch[i, 3]) - (users_now > 0)
                elif touch[i, 2] >= 0 and inside[touch[i, 2]]:
                    change = -(users_now + 1 == touch[i, 3])  # nobody elsewhere uses it any more
                else:
                    change = 1 * (users_now == 0)  # received for its first user
                if change != 0:
                    for k in range(num_kinds):
                        io[depth + 1, k] += change * io_s[touch[i, 0], k]
            left = work_left[here]
            for k in range(num_kinds):
                load = work[depth + 1, k] + io[depth + 1, k]
                if not usable[k] or load >= best[0] or bytes_now > memory[k]:
                    continue
                steps += num_live
                for i in range(num_live):
                    s = live[i]
                    if used[s, k] == count[k]:
                        continue
                    new = s + step[k]
                    if left > best[0] * price_left[new]:
                        continue
                    v = max(value[ideal, s], load)
                    if v < value[here, new]:
                        value[here, new] = v
                        from_ideal[here, new] = ideal
                        from_kind[here, new] = k
                        if here == full and v < best[0]:
                            best[0] = v
            if spans[here, 2] <= u:
                continue  # nothing later can be added
            depth += 1
            item[depth] = u
            first[depth] = spans[here, 0]
            next_link[depth] = spans[here, 1]
            held[depth] = bytes_now
            inside[u] = True
            for i in range(touch_ptr[u], touch_ptr[u + 1]):
                if not touch[i, 1]:
                    users[touch[i, 0]] += 1
            for i in range(tied_ptr[u], tied_ptr[u + 1]):
                readers[tied[i]] += 1
        if steps >= max_steps:
            return ideal + 1, sets, steps
    return full + 1, sets, steps
