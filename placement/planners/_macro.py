"""Numba kernels of ``macro_search``: macro moves, and annealing with exact deltas on max load."""

from __future__ import annotations

import numpy as np

from placement.jit import allocating, inlined, kernel
from placement.objective_kernels import (
    apply_move,
    apply_moves,
    fill_state,
    load_change,
    piecewise_one,
    undo_moves,
)

SINGLE, RUN, CHAIN, GROWTH = range(4)  # the fifth is a swap
_MANTISSA = 1.0 / (1 << 53)
_TRIES = 16  # to hit a group on a wanted device
_NEAR = 0.6  # of the moves go to a neighbour's device


@inlined
def uniform(random):
    """A float in [0, 1) from ``random`` uint64 ``[1]`` (xorshift64*, Vigna 2016)."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * _MANTISSA


@inlined
def below(random, n):
    """An integer in [0, n)."""
    return np.int64(uniform(random) * n)


@kernel
def propose(random, device, compute_s, graph, source, share, cut, body, group, where, mark):
    """A random macro move off ``device`` int32 ``[G]``; returns how many groups it moves.

    ``source``: the group it starts from comes from this device, -1: from any. With probability
    ``cut`` it is a part of a stage (``_cut``), otherwise ``propose_from``, of ``body`` groups at
    most. ``group`` and ``where`` are int32 ``[G]``.
    """
    num_groups = len(compute_s)
    g = below(random, num_groups)
    if source >= 0:
        for _ in range(_TRIES):
            if device[g] == source:
                break
            g = below(random, num_groups)
    if cut > 0.0 and uniform(random) < cut:
        return _cut(random, device, compute_s, graph[0], graph[1], g, group, where, mark)
    group, where = group[:body], where[:body]
    return propose_from(random, device, compute_s, graph, g, share, group, where, mark)


@kernel
def propose_from(random, device, compute_s, graph, g, share, group, where, mark):
    """A random macro move that begins with group ``g``; returns how many groups it moves.

    Args:
        random: uint64 ``[1]``, the generator's state.
        device: int32 ``[G]`` where each group is.
        compute_s: ``[G, D]``; inf = cannot run there.
        graph: (near_ptr, near, after_ptr, after): neighbours and successors of each group.
        share: float64 ``[5]`` cumulated probabilities of single, run, chain, growth, swap.
        group, where: int32 ``[L]``: filled with the groups that move and their new devices.
        mark: int32 ``[G]`` scratch, zeros before and after.
    """
    near_ptr, near, after_ptr, after = graph
    num_groups, num_devices = compute_s.shape
    old = device[g]
    new = old
    degree = near_ptr[g + 1] - near_ptr[g]
    if degree > 0 and uniform(random) < _NEAR:
        new = device[near[near_ptr[g] + below(random, degree)]]
    if new == old:
        new = below(random, num_devices - 1)
        new += new >= old
    if compute_s[g, new] == np.inf:
        return 0
    group[0], where[0] = g, new
    kind = uniform(random)
    if kind < share[SINGLE] or len(group) < 2:
        return 1
    if kind >= share[GROWTH]:
        for _ in range(_TRIES):
            h = below(random, num_groups)
            if device[h] == new:
                if compute_s[h, old] == np.inf:
                    return 1
                group[1], where[1] = h, old
                return 2
        return 1
    most = min(len(group), num_groups)
    length = max(2, int(np.exp(uniform(random) * np.log(most + 1.0))))
    length = min(length, most)
    count = 1
    if kind < share[RUN]:
        step = 1 if uniform(random) < 0.5 else -1
        h = g + step
        while count < length and 0 <= h < num_groups and device[h] == old:
            if compute_s[h, new] < np.inf:
                group[count], where[count] = h, new
                count += 1
            h += step
        return count
    mark[g] = 1
    ptr, edge = near_ptr, near
    if kind < share[CHAIN]:
        ptr, edge = after_ptr, after
    at = 0
    while at < count and count < length:
        h = group[at]
        degree = ptr[h + 1] - ptr[h]
        first = below(random, degree) if degree > 0 else 0
        for i in range(degree):
            j = edge[ptr[h] + (first + i) % degree]
            if device[j] == old and mark[j] == 0 and compute_s[j, new] < np.inf:
                mark[j] = 1
                group[count], where[count] = j, new
                count += 1
                if count == length or kind < share[CHAIN]:
                    break
        at += 1
    for i in range(count):
        mark[group[i]] = 0
    return count


@kernel
def _cut(random, device, compute_s, ptr, near, g, group, where, mark):
    """``g`` and what it needs on its device, or all the rest there, moves to where it touches.

    Needs are neighbours of smaller number, and theirs: of a stage this is all up to ``g``.
    """
    num_groups, num_devices = compute_s.shape
    old = device[g]
    group[0], mark[g] = g, 1
    count = 1
    at = 0
    while at < count:
        h = group[at]
        for i in range(ptr[h], ptr[h + 1]):
            j = near[i]
            if j < h and device[j] == old and mark[j] == 0:
                mark[j] = 1
                group[count] = j
                count += 1
        at += 1
    marked = count
    if uniform(random) < 0.5:
        for h in range(num_groups):  # behind the marked ones, and then over them
            if device[h] == old and mark[h] == 0:
                group[count] = h
                count += 1
        for i in range(marked):
            mark[group[i]] = 0
        count -= marked
        for i in range(count):
            group[i] = group[marked + i]
    else:
        for i in range(marked):
            mark[group[i]] = 0
    if count == 0:
        return 0
    new = below(random, num_devices - 1)
    new += new >= old
    for _ in range(_TRIES):
        h = group[below(random, count)]
        if ptr[h + 1] > ptr[h]:
            e = device[near[ptr[h] + below(random, ptr[h + 1] - ptr[h])]]
            if e != old:
                new = e
                break
    able = 0
    for i in range(count):
        if compute_s[group[i], new] < np.inf:
            group[able], where[able] = group[i], new
            able += 1
    return able


@inlined
def energy_term(load, held, memory, scale, squarings):
    """What a device adds to the energy: (load * scale) ** 2 ** squarings, more if too full."""
    x = load * scale
    for _ in range(squarings):
        x *= x
    if held > memory:
        x += 1e3 * (1.0 + (held - memory) / memory)
    return x


@allocating
def anneal(
    tables, state, graph, share, cut, random, best, best_s, steps, body, hot, temperature, power
):
    """``steps`` random moves, each made with probability ``min(1, exp(-delta / temperature))``.

    Starts from ``state`` and leaves it where it ends. The energy is ``sum_d (load / best) **
    2 ** power``, so that not the slowest device alone counts.

    Args:
        tables, state: of ``objective_kernels.move_tables``, ``move_state``.
        graph, share, random: of ``propose``.
        best: int32 ``[G]`` best placement so far, overwritten where a better one is met.
        best_s: its largest load; inf if it does not fit in memory.
        body: most groups a move has.
        hot: probability that a move starts on the device with the largest load.
        temperature: in energies.

    Returns:
        largest load of ``best``.
    """
    compute_s, touch_ptr, touch, io_s, own_bytes, _, _, tied_bytes, memory = tables
    device, load, held, users, _ = state
    num_groups, num_devices = compute_s.shape
    group = np.empty(num_groups, np.int32)
    where = np.empty(num_groups, np.int32)
    mark = np.zeros(num_groups, np.int32)
    term = np.empty(num_devices)
    fill_state(tables, state)
    hottest = int(np.argmax(load))
    scale = 1.0 / max(load[hottest] if best_s == np.inf else best_s, 1e-300)
    for d in range(num_devices):
        term[d] = energy_term(load[d], held[d], memory[d], scale, power)
    for _ in range(steps):
        source = hottest if uniform(random) < hot else -1
        count = propose(
            random, device, compute_s, graph, source, share, cut, body, group, where, mark
        )
        if count == 0:
            continue
        limit = -temperature * np.log(1.0 - uniform(random))
        g, new = group[0], where[0]
        old = device[g]
        limit += term[old] + term[new]
        if count == 1 and len(tied_bytes) == 0:  # most often: nothing to undo
            at_old, at_new = load_change(compute_s, touch_ptr, touch, io_s, device, users, g, new)
            own = own_bytes[g]
            term_old = energy_term(load[old] + at_old, held[old] - own, memory[old], scale, power)
            term_new = energy_term(load[new] + at_new, held[new] + own, memory[new], scale, power)
            if term_old + term_new > limit:
                continue
            apply_move(tables, state, g, new)
        else:
            load_old, load_new, held_old, held_new = load[old], load[new], held[old], held[new]
            apply_moves(tables, state, group, where, count)
            term_old = energy_term(load[old], held[old], memory[old], scale, power)
            term_new = energy_term(load[new], held[new], memory[new], scale, power)
            if term_old + term_new > limit:
                undo_moves(tables, state, group, where, count, np.int64(old), np.int64(new))
                load[old], load[new], held[old], held[new] = load_old, load_new, held_old, held_new
                continue
        term[old], term[new] = term_old, term_new
        hottest = 0
        fits = held[0] <= memory[0]
        for d in range(1, num_devices):
            if load[d] > load[hottest]:
                hottest = d
            fits &= held[d] <= memory[d]
        if fits and load[hottest] < best_s * (1 - 1e-12):
            best_s = load[hottest]
            best[:] = device
    return best_s


@allocating
def anneal_pieces(
    tables,
    state,
    pieces,
    scratch,
    members,
    graph,
    share,
    cut,
    random,
    best,
    best_s,
    steps,
    body,
    temperature,
):
    """Like ``anneal`` for ``piecewise_latency``, with a ``temperature`` in seconds.

    Args:
        pieces, scratch: of ``objective_kernels.piecewise_one``.
        members: (ptr, op): the operators of each group.

    Returns:
        latency of ``best``.
    """
    compute_s, memory = tables[0], tables[8]
    device, load, held = state[0], state[1], state[2]
    ptr, op = members
    num_groups = len(compute_s)
    group = np.empty(num_groups, np.int32)
    where = np.empty(num_groups, np.int32)
    mark = np.zeros(num_groups, np.int32)
    p = np.empty(len(op), np.int32)
    fill_state(tables, state)
    for g in range(num_groups):
        for i in range(ptr[g], ptr[g + 1]):
            p[op[i]] = device[g]
    over = _overflow(held, memory)
    value = piecewise_one(pieces, p, scratch, np.inf)
    far = 10.0 * (value if best_s == np.inf else best_s)  # what too many bytes cost
    if far == np.inf:  # pieces wait for each other: every move may be made (inf * 0 is no number)
        far = 1e30
    source = np.int64(-1)  # a literal -1 would be compiled for by itself
    for _ in range(steps):
        count = propose(
            random, device, compute_s, graph, source, share, cut, body, group, where, mark
        )
        if count == 0:
            continue
        old, new = device[group[0]], where[0]
        load_old, load_new, held_old, held_new = load[old], load[new], held[old], held[new]
        apply_moves(tables, state, group, where, count)
        for k in range(count):
            for i in range(ptr[group[k]], ptr[group[k] + 1]):
                p[op[i]] = where[k]
        over_then = _overflow(held, memory)
        limit = value - temperature * np.log(1.0 - uniform(random)) + far * (over - over_then)
        then = piecewise_one(pieces, p, scratch, limit)
        if then <= limit:
            value, over = then, over_then
            if over == 0.0 and value < best_s * (1 - 1e-12):
                best_s = value
                best[:] = device
            continue
        undo_moves(tables, state, group, where, count, np.int64(old), np.int64(new))
        load[old], load[new], held[old], held[new] = load_old, load_new, held_old, held_new
        for k in range(count):
            for i in range(ptr[group[k]], ptr[group[k] + 1]):
                p[op[i]] = device[group[k]]
    return best_s


@inlined
def _overflow(held, memory):
    """Bytes that do not fit, as shares of the devices' memory; each device adds one more."""
    total = 0.0
    for d in range(len(held)):
        if held[d] > memory[d]:
            total += 1.0 + (held[d] - memory[d]) / memory[d]
    return total
