"""Numba kernels of ``macro_search``: macro moves, and annealing with exact deltas on max load."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.simulator.analytic_kernels import (
    apply_move,
    apply_moves,
    fill_state,
    load_change,
    piecewise_one,
    undo_moves,
)
from placement.tools.jit import Struct, array, copy, inlined, kernel, largest

Array = NDArray[Any]

SINGLE, RUN, CHAIN, GROWTH = range(4)  # the fifth is a swap
SHARE = np.array([0.5, 0.6, 0.7, 0.85, 1.0])  # of them, cumulated, where nobody says


class MacroWeights(NamedTuple):
    """How moves are drawn, and judged."""

    tries: int = 16  # to hit a group on a wanted device
    near: float = 0.6  # of the moves go to a neighbour's device
    steep: int = 6  # squarings of the loads that a descent adds up


WEIGHTS = MacroWeights()


@inlined
def uniform(random):
    """A float in [0, 1) from ``random`` uint64 ``[1]`` (xorshift64*, Vigna 2016)."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / (1 << 53))


@inlined
def below(random, n):
    """An integer in [0, n)."""
    return np.int64(uniform(random) * n)


class Neighbours(Struct):
    """Groups that an edge joins: ``near[near_ptr[g]:near_ptr[g + 1]]``, and ``after`` alike."""

    near_ptr: Array  # int32 [G + 1]
    near: Array  # int32 before and after each group
    after_ptr: Array  # int32 [G + 1]
    after: Array  # int32 after each group


class Draws(Struct):
    """What random moves of ``G`` groups are drawn with."""

    random: Array  # uint64 [1], the generator's state
    compute_s: Array  # float64 [G, D]; inf = cannot run there
    graph: Neighbours
    share: Array  # float64 [5] cumulated probabilities of single, run, chain, growth, swap
    cut: float  # probability of a part of a stage instead
    body: int  # most groups that a move has
    group: Array = array("G", np.int32)  # groups that move
    where: Array = array("G", np.int32)  # their new devices
    mark: Array = array("G", np.int32)  # scratch, zeros before and after
    term: Array = array("D")  # energy of each device


def draws_of(
    compute_s: Array, graph: Neighbours, seed: int, share: Array, cut: float, body: int
) -> Draws:
    """Draws that begin with ``seed``, and room."""
    groups, devices = compute_s.shape
    return Draws.fresh(
        {"G": groups, "D": devices},
        # Never 0.
        random=np.random.default_rng(seed).integers(1, 2**64, 1, dtype=np.uint64),
        compute_s=compute_s,
        graph=graph,
        share=share,
        cut=cut,
        body=body,
    )


@kernel
def propose(w, device, source):
    """A random macro move off ``device`` int32 ``[G]``; returns how many groups it moves.

    They are in ``w.group``, their new devices in ``w.where``. ``source``: the group it starts
    from comes from this device, -1: from any. With probability ``w.cut`` it is a part of a stage.
    """
    random, compute_s, share, mark = w.random, w.compute_s, w.share, w.mark
    near_ptr, near, group, where = w.graph.near_ptr, w.graph.near, w.group, w.where
    num_groups, num_devices = compute_s.shape
    g = below(random, num_groups)
    if source >= 0:
        for _ in range(WEIGHTS.tries):
            if device[g] == source:
                break
            g = below(random, num_groups)
    if w.cut > 0.0 and uniform(random) < w.cut:
        return _cut(w, device, g)
    old = device[g]
    new = old
    degree = near_ptr[g + 1] - near_ptr[g]
    if degree > 0 and uniform(random) < WEIGHTS.near:
        new = device[near[near_ptr[g] + below(random, degree)]]
    if new == old:
        new = below(random, num_devices - 1)
        new += new >= old
    if compute_s[g, new] == np.inf:
        return 0
    group[0], where[0] = g, new
    kind = uniform(random)
    if kind < share[SINGLE] or w.body < 2:
        return 1
    if kind >= share[GROWTH]:
        for _ in range(WEIGHTS.tries):
            h = below(random, num_groups)
            if device[h] == new:
                if compute_s[h, old] == np.inf:
                    return 1
                group[1], where[1] = h, old
                return 2
        return 1
    most = min(w.body, num_groups)
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
        ptr, edge = w.graph.after_ptr, w.graph.after
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
def _cut(w, device, g):
    """``g`` and what it needs on its device, or all the rest there, moves to where it touches.

    Needs are neighbours of smaller number, and theirs: of a stage this is all up to ``g``.
    """
    random, compute_s, group, where, mark = w.random, w.compute_s, w.group, w.where, w.mark
    ptr, near = w.graph.near_ptr, w.graph.near
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
    for _ in range(WEIGHTS.tries):
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


@inlined
def energy_change(t, s, scale, squarings):
    """What the last ``apply_moves`` has added to the energy."""
    total = 0.0
    for i in range(2):
        d = s.moved[i]
        total += energy_term(s.load[d], s.held[d], t.memory[d], scale, squarings)
    for i in range(2):
        memory = t.memory[s.moved[i]]
        total -= energy_term(s.load_before[i], s.held_before[i], memory, scale, squarings)
    return total


@kernel
def anneal(t, s, w, best, best_s, steps, hot, temperature, power):
    """``steps`` random moves, each made with probability ``min(1, exp(-delta / temperature))``.

    Starts from ``s`` and leaves it where it ends. The energy is ``sum_d (load / best) **
    2 ** power``, so that not the slowest device alone counts.

    Args:
        t, s: of ``analytic_kernels.move_tables``, ``move_state``.
        w: of ``draws_of``.
        best: int32 ``[G]`` best placement so far, overwritten where a better one is met.
        best_s: its largest load; inf if it does not fit in memory.
        hot: probability that a move starts on the device with the largest load.
        temperature: in energies.

    Returns:
        largest load of ``best``.
    """
    own_bytes, memory = t.own_bytes, t.memory
    device, load, held = s.device, s.load, s.held
    random, group, where, term = w.random, w.group, w.where, w.term
    num_devices = len(load)
    fill_state(t, s)
    hottest = largest(load, num_devices)
    scale = 1.0 / max(load[hottest] if best_s == np.inf else best_s, 1e-300)
    for d in range(num_devices):
        term[d] = energy_term(load[d], held[d], memory[d], scale, power)
    for _ in range(steps):
        source = hottest if uniform(random) < hot else -1
        count = propose(w, device, np.int64(source))
        if count == 0:
            continue
        limit = -temperature * np.log(1.0 - uniform(random))
        g, new = np.int64(group[0]), np.int64(where[0])
        old = np.int64(device[g])
        limit += term[old] + term[new]
        if count == 1 and len(t.tied_bytes) == 0:  # most often: nothing to undo
            at_old, at_new = load_change(t, s, g, new)
            own = own_bytes[g]
            term_old = energy_term(load[old] + at_old, held[old] - own, memory[old], scale, power)
            term_new = energy_term(load[new] + at_new, held[new] + own, memory[new], scale, power)
            if term_old + term_new > limit:
                continue
            apply_move(t, s, g, new)
        else:
            apply_moves(t, s, group, where, count)
            term_old = energy_term(load[old], held[old], memory[old], scale, power)
            term_new = energy_term(load[new], held[new], memory[new], scale, power)
            if term_old + term_new > limit:
                undo_moves(t, s, group, where, count)
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
            copy(best, device)
    return best_s


class Members(Struct):
    """The operators of each group, and room for the device of each operator."""

    ptr: Array  # int32 [G + 1]
    op: Array  # int32 [N]
    device: Array  # int32 [N]


@kernel
def anneal_pieces(t, s, w, pieces, members, best, best_s, steps, temperature):
    """Like ``anneal`` for ``piecewise_latency``, with a ``temperature`` in seconds.

    ``pieces``: of ``analytic_kernels.piecewise_tables``. Returns the latency of ``best``.
    """
    memory, device, held = t.memory, s.device, s.held
    random, group, where = w.random, w.group, w.where
    ptr, op, p = members.ptr, members.op, members.device
    num_groups = len(device)
    fill_state(t, s)
    for g in range(num_groups):
        for i in range(ptr[g], ptr[g + 1]):
            p[op[i]] = device[g]
    over = overflow(held, memory)
    value = piecewise_one(pieces, p, np.inf)
    far = 10.0 * (value if best_s == np.inf else best_s)  # what too many bytes cost
    if far == np.inf:  # pieces wait for each other: every move may be made (inf * 0 is no number)
        far = 1e30
    for _ in range(steps):
        count = propose(w, device, np.int64(-1))
        if count == 0:
            continue
        apply_moves(t, s, group, where, count)
        for k in range(count):
            for i in range(ptr[group[k]], ptr[group[k] + 1]):
                p[op[i]] = where[k]
        over_then = overflow(held, memory)
        limit = value - temperature * np.log(1.0 - uniform(random)) + far * (over - over_then)
        then = piecewise_one(pieces, p, limit)
        if then <= limit:
            value, over = then, over_then
            if over == 0.0 and value < best_s * (1 - 1e-12):
                best_s = value
                copy(best, device)
            continue
        undo_moves(t, s, group, where, count)
        for k in range(count):
            for i in range(ptr[group[k]], ptr[group[k] + 1]):
                p[op[i]] = device[group[k]]
    return best_s


@inlined
def overflow(held, memory):
    """Bytes that do not fit, as shares of the devices' memory; each device adds one more."""
    total = 0.0
    for d in range(len(held)):
        if held[d] > memory[d]:
            total += 1.0 + (held[d] - memory[d]) / memory[d]
    return total


class Offers(Struct):
    """Moves that ``descend`` estimates before it makes one."""

    near_s: Array  # float64, as ``Neighbours.near``: about what each takes if it is elsewhere
    group: Array = array("G", np.int32)  # of the best
    where: Array = array("G", np.int32)
    refused: Array = array("R", np.int64)  # what was tried in vain since the last that was better


@kernel
def _refused(offers, count, number):
    tried = False
    for i in range(count):
        tried |= offers.refused[i] == number
    return tried


@inlined
def _number(group, where, count):
    """Of a move: the same whatever the order of its groups."""
    total = np.int64(count)
    for k in range(count):
        x = np.int64(group[k]) * np.int64(0x2545F491) + np.int64(where[k]) + 1
        total += x * x * np.int64(0x1000193) ^ x
    return total


@kernel
def _estimate(t, s, w, near_s, count, scale):
    """About what the move in ``w`` adds to the energy: an edge costs both its devices the same."""
    device, group, where, mark, compute_s = s.device, w.group, w.where, w.mark, t.compute_s
    ptr, near = w.graph.near_ptr, w.graph.near
    old, new = np.int64(device[group[0]]), np.int64(where[0])
    at_old = at_new = 0.0
    moved = np.int64(0)
    for k in range(count):
        mark[group[k]] = 1
    for k in range(count):
        g, to = group[k], np.int64(where[k])
        sign = 1.0 if to == new else -1.0
        at_old -= sign * compute_s[g, old]
        at_new += sign * compute_s[g, new]
        moved += t.own_bytes[g] if to == new else -t.own_bytes[g]
        for i in range(ptr[g], ptr[g + 1]):
            if mark[near[i]] == 0:
                there = np.int64(device[near[i]])
                crosses = near_s[i] * ((there == device[g]) * 1.0 - (there == to) * 1.0)
                at_old += crosses
                at_new += crosses
    for k in range(count):
        mark[group[k]] = 0
    load, held, memory = s.load, s.held, t.memory
    total = 0.0
    for d, change, extra in ((old, at_old, -moved), (new, at_new, moved)):
        then_s = max(load[d] + change, 0.0)
        total += energy_term(then_s, held[d] + extra, memory[d], scale, WEIGHTS.steep)
        total -= energy_term(load[d], held[d], memory[d], scale, WEIGHTS.steep)
    return total


@kernel
def descend(t, s, w, offers, best, best_s, steps, width, hot):
    """At each of ``steps`` estimate ``width`` moves, try the best one, make it if it is better.

    What was refused is not tried again before the next move is made. Arguments as in ``anneal``.

    Returns:
        largest load of ``best``, and the moves that were tried: fewer where none is left.
    """
    device, load, held, memory = s.device, s.load, s.held, t.memory
    random, group, where = w.random, offers.group, offers.where
    num_devices, refused = len(load), 0
    fill_state(t, s)
    for step in range(steps):
        if refused == len(offers.refused):
            return best_s, step
        hottest = np.int64(largest(load, num_devices))
        scale = 1.0 / max(load[hottest] if best_s == np.inf else best_s, 1e-300)
        least, count, number = np.inf, 0, np.int64(0)
        for _ in range(width):
            drawn = propose(w, device, hottest if uniform(random) < hot else np.int64(-1))
            if drawn == 0:
                continue
            energy = _estimate(t, s, w, offers.near_s, drawn, scale)
            name = _number(w.group, w.where, drawn)
            if energy < least and not _refused(offers, refused, name):
                least, count, number = energy, drawn, name
                for k in range(count):
                    group[k], where[k] = w.group[k], w.where[k]
        if count == 0:
            return best_s, step
        apply_moves(t, s, group, where, count)
        if energy_change(t, s, scale, WEIGHTS.steep) >= 0.0:
            undo_moves(t, s, group, where, count)
            offers.refused[refused] = number
            refused += 1
            continue
        refused = 0
        highest = load[largest(load, num_devices)]
        if highest < best_s * (1 - 1e-12) and overflow(held, memory) == 0.0:
            best_s = highest
            copy(best, device)
    return best_s, steps
