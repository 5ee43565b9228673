"""Moves of placement and order, drawn and scored: numba kernels of ``order_search``."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from placement.search.macro import below, uniform
from placement.search.order_estimates import elsewhere, first_in_lane, inputs_s, reordered, together
from placement.search.order_times import NEVER
from placement.tools.jit import kernel


class MoveWeights(NamedTuple):
    """Which moves are drawn, and how they are scored."""

    tries: int = 4  # draws of a move, until one is possible
    from_chain: float = 0.8  # begin with an operator of the critical chain
    near: float = 0.35  # go to a neighbour's device ...
    any: float = 0.65  # ... or, cumulated, to any; the rest are of the order only
    alone: float = 0.5  # of those to another device; others take neighbours along
    later: float = 0.3  # are some places behind where inputs are there ...
    earlier: float = 0.5  # ... or, cumulated, one before
    far: float = 2.5  # order only: log of how many places at most, beside one
    scale: float = 3e-4  # of the latency: an estimate that gains as much has score 1 ...
    simulated: float = 10.0  # ... times that where the simulator tells times: estimates know less
    gain: float = -0.02  # below, it says only that the path through the move is not the longest
    bound: float = 30.0  # of scores
    hopeless: float = 12.0  # so much below the best a move is chosen six times in a million
    # Tabu search: an operator rests for so many steps, unless a better best is estimated ...
    rest: float = 8.0
    rest_more: float = 12.0  # ... and up to so many more


WEIGHTS = MoveWeights()


@kernel
def _window(t, s, i):
    """Positions between which ``i`` may be: of its last producer, and of its first user."""
    edge_ptr, edge_dst = t.edge_ptr, t.edge_dst
    low, high = -1, len(s.place)
    for m in range(t.in_ptr[i], t.in_ptr[i + 1]):
        low = max(low, s.position[t.in_src[m]])
    for e in range(edge_ptr[i], edge_ptr[i + 1]):
        high = min(high, s.position[edge_dst[e]])
    return low, high


@kernel
def _block(s, i):
    """First and last place of the block of ``i`` in its lane: who waits for whom on the chain."""
    d = s.place[i]
    a = b = np.int64(s.in_lane[i])
    while a > s.lane_ptr[d] and s.on_chain[s.lane[a - 1]] and s.waited[s.lane[a]] == s.lane[a - 1]:
        a -= 1
    while b + 1 < s.lane_ptr[d + 1] and s.waited[s.lane[b + 1]] == s.lane[b]:
        if not s.on_chain[s.lane[b + 1]]:
            break
        b += 1
    return a, b


@kernel
def _elsewhere_than(t, s, i):
    """A random device that can run ``i``, another one if there is one."""
    num_devices, old = t.compute_s.shape[1], s.place[i]
    count = 0
    for d in range(num_devices):
        count += t.compute_s[i, d] < np.inf
    skip = below(s.random, max(count - 1, 1))
    for d in range(num_devices):
        if d != old and t.compute_s[i, d] < np.inf:
            if skip == 0:
                return d
            skip -= 1
    return np.int64(old)


@kernel
def _neighbour(t, s, i, way, device):
    """A random operator that makes (``way`` 0) or uses (1) a tensor of ``i``, or either (2).

    One that is on ``device`` (-1: any) and not marked; -1: there is none.
    """
    in_ptr, in_src = t.in_ptr, t.in_src
    edge_ptr, edge_dst = t.edge_ptr, t.edge_dst
    n, count, neighbour = len(s.place), 0, -1
    for m in range(in_ptr[i], in_ptr[i + 1]):
        src = in_src[m]
        if src < n and way != 1 and not s.mark[src] and (device < 0 or s.place[src] == device):
            count += 1
            if below(s.random, count) == 0:
                neighbour = src
    if way == 0:
        return neighbour
    for e in range(edge_ptr[i], edge_ptr[i + 1]):
        user = edge_dst[e]
        if not s.mark[user] and (device < 0 or s.place[user] == device):
            count += 1
            if below(s.random, count) == 0:
                neighbour = user
    return neighbour


@kernel
def _gather(t, s, k, i, new):
    """Fill the body of move ``k``: the group of ``i``, and perhaps neighbours on its device.

    Returns how many operators that is; 0: one of them cannot run on ``new``.
    """
    body, old = s.body[k], np.int64(s.place[i])
    most = 1
    if uniform(s.random) >= WEIGHTS.alone:
        most = 1 + int(np.exp(uniform(s.random) * np.log(float(len(body) - 1))))
    way = below(s.random, 3)
    count = num = 0
    fits = True
    while i >= 0 and count < most:
        g = t.group[i]
        body[count] = g
        count += 1
        for m in range(t.op_ptr[g], t.op_ptr[g + 1]):
            j = t.op[m]
            fits &= t.compute_s[j, new] < np.inf
            s.mark[j] = True
            s.room[num] = j
            num += 1
        i = _neighbour(t, s, i, way, old)
    for m in range(num):
        s.mark[s.room[m]] = False
        s.room[m] = s.position[s.room[m]]
    s.count[k] = count
    return num if fits else 0


@kernel
def _reach(s, i, here):
    """A random place in its lane to which ``i`` may go from ``here``; whether not short of it.

    Within a block of the critical chain only another first or last operator can make the chain
    shorter (Nowicki and Smutnicki 1996; Balas and Vazacopoulos 1998).
    """
    first, last = s.lane_ptr[s.place[i]], s.lane_ptr[s.place[i] + 1] - 1
    later = uniform(s.random) < 0.5
    if s.on_chain[i]:
        a, b = _block(s, i)
        if a < here < b:
            return b if later else a, True
        if a == b:
            return here, False
        return a + below(s.random, b - a) + (here == a), False
    far = 1 + int(np.exp(uniform(s.random) * WEIGHTS.far))
    return min(last, here + far) if later else max(first, here - far), False


@kernel
def propose(t, s, k, tabu):
    """Draw move ``k``; of a ``tabu`` search, one of the critical chain.

    Returns its first operator (-1: none was found), device, before whom in the sequence (-1: all
    stay where they are there), and the estimated latency.
    """
    n = len(s.place)
    for _ in range(WEIGHTS.tries):
        i = below(s.random, n)
        if tabu or uniform(s.random) < WEIGHTS.from_chain:
            i = s.chain[below(s.random, s.num_chain)]
        old = s.place[i]
        new = old
        kind = uniform(s.random)
        if kind < WEIGHTS.near:
            # Casts, here and elsewhere: a kernel is compiled for every integer type it is given.
            other = _neighbour(t, s, i, np.int64(2), np.int64(-1))
            if other >= 0:
                new = s.place[other]
        elif kind < WEIGHTS.any:
            new = _elsewhere_than(t, s, i)
        if t.compute_s[i, new] == np.inf:
            new = old
        first, beyond = s.lane_ptr[new], s.lane_ptr[new + 1]
        if new == old:
            here = s.in_lane[i]
            reach, whole = _reach(s, i, np.int64(here))
            place = reach
            low, high = _window(t, s, i)
            while place < here and s.position[s.lane[place]] <= low:
                place += 1
            while place > here and s.position[s.lane[place]] >= high:
                place -= 1
            if place == here or (whole and place != reach):
                continue
            ready = inputs_s(t, s, i, old)
            latency = reordered(t, s, i, ready, place)
            at = s.position[s.lane[place]] + (place > here)
            s.count[k], s.body[k, 0] = 1, t.group[i]
            return i, old, at, latency
        num = _gather(t, s, k, i, new)
        if num == 0:
            continue
        if num > 1:
            return i, new, -1, together(t, s, new, num)
        low, high = _window(t, s, i)
        ready = inputs_s(t, s, i, new)
        a = first_in_lane(s, new, s.start_s, ready)  # when the inputs are there
        shift = uniform(s.random)
        if shift < WEIGHTS.later:
            a = min(a + below(s.random, 3), beyond)
        elif shift < WEIGHTS.earlier:
            a = max(a - 1, first)
        while a > first and s.position[s.lane[a - 1]] >= high:
            a -= 1
        while a < beyond and s.position[s.lane[a]] <= low:
            a += 1
        at = high
        if a < beyond and s.position[s.lane[a]] < high:
            at = s.position[s.lane[a]]
        return i, new, at, elsewhere(t, s, i, new, ready, a)[0]
    return -1, 0, -1, 0.0


@kernel
def offer(t, s, width, tabu):
    """Draw and score moves 1..width; choice 0 is to stay.

    Those whose score is ``hopeless`` below the best one's are withdrawn; of a ``tabu`` search
    those that rest.
    """
    s.which[0] = -1
    best = -np.inf
    scale = WEIGHTS.simulated * WEIGHTS.scale if t.simulated else WEIGHTS.scale
    for k in range(1, width + 1):
        i, new, at, latency = propose(t, s, k, tabu)
        s.which[k] = i
        if i < 0:
            continue
        s.to[k], s.at[k] = new, at
        rests = WEIGHTS.rest + WEIGHTS.rest_more * uniform(s.random) if tabu else 0.0
        if s.moved[i] > 0 and s.step - s.moved[i] < rests and latency >= s.best_s:
            s.which[k] = -1
            continue
        s.estimate_s[k] = latency
        change = min(latency, NEVER) / max(s.cost_s, 1e-300) - 1.0
        # Off the critical chain an operator can only make way for others later.
        gained = max(change, WEIGHTS.gain if s.on_chain[i] else 0.0)
        s.score[k] = max(-WEIGHTS.bound, min(WEIGHTS.bound, -gained / scale))
        best = max(best, s.score[k])
    for k in range(1, width + 1):
        if s.score[k] < best - WEIGHTS.hopeless and not tabu:
            s.which[k] = -1
