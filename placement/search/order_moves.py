"""Moves of placement and order, drawn and described: numba kernels of ``order_search``."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from placement.search.chooser import BOUND, POLICY, TABU, UNIFORM, bounded
from placement.search.macro import below, uniform
from placement.search.order_estimates import elsewhere, first_in_lane, inputs_s, reordered, together
from placement.search.order_times import NEVER
from placement.tools.jit import average, kernel, largest

MOVE_FEATURES = (
    "hand: minus the estimated change of the latency (off the chain none below 0), over HAND_SCALE",
    "none: 1 for the choice to stay",
    "estimated change of the latency, percent",
    "the same, per mille",
    "1 if it changes the order only",
    "log places earlier (-) or later (+) on its device, if it changes the order only",
    "1 if it is on the critical chain",
    "slack: share of the latency that it could wait",
    "when it begins, over the latency",
    "log seconds at the target over seconds now",
    "seconds now over the mean of all",
    "load of the device left, over the largest",
    "load of the target, over the largest",
    "share of its neighbours on the target",
    "share of its neighbours on the device left",
    "when its inputs are at the target, after its begin now, percent of the latency",
    "how long it would wait for the target, percent of the latency",
    "log times that it was refused this target",
    "log moves since it last moved, over log steps",
    "log operators that move",
)
SEARCH_FEATURES = (
    "budget used, 0..1",
    "log10 temperature over 5",
    "log current value over the best, times 100",
    "log best value over the first, times 10",
    "log moves since the best was found over 10",
    "mean load over the largest",
    "mean load over the latency",
    "operators of the critical chain over all",
    "log number of operators over 10",
    "log number of devices over 3",
)
NUM_MOVE_FEATURES, NUM_SEARCH_FEATURES = len(MOVE_FEATURES), len(SEARCH_FEATURES)
HAND_SCALE = 3e-4  # of the latency: what the hand-written score calls much
_SIMULATED = 10.0  # times that where the simulator tells times: estimates know less of them
_GAIN = -0.02  # estimates below say only that the path through the move is not the longest

_FROM_CHAIN = 0.8  # of the moves begin with an operator of the critical chain
_NEAR, _ANY = 0.35, 0.65  # cumulated: to a neighbour's device, to any; the rest: order only
_LATER, _EARLIER = 0.3, 0.5  # cumulated: some places off where inputs are there
_ALONE = 0.5  # of the moves to another device; others take neighbours along
_FAR = 2.5  # order only: log of how many places at most, beside one
# Tabu search: an operator rests for so many steps and up to so many more, unless a better best is
# estimated.
_REST, _REST_MORE = 8.0, 12.0
_TRIES = 4
_HOPELESS = 12.0  # so much below the best score a move is chosen six times in a million


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
    if uniform(s.random) >= _ALONE:
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
    far = 1 + int(np.exp(uniform(s.random) * _FAR))
    return min(last, here + far) if later else max(first, here - far), False


@kernel
def propose(t, s, k, chooser):
    """Draw move ``k``; of ``TABU``, one of the critical chain.

    Returns its first operator (-1: none was found), device, before whom in the sequence (-1: all
    stay where they are there), the estimated latency, when the operator begins, when its inputs
    are there, places that it moves on its device, and operators that move.
    """
    n = len(s.place)
    for _ in range(_TRIES):
        i = below(s.random, n)
        if chooser == TABU or uniform(s.random) < _FROM_CHAIN:
            i = s.chain[below(s.random, s.num_chain)]
        old = s.place[i]
        new = old
        kind = uniform(s.random)
        if kind < _NEAR:
            # Casts, here and elsewhere: a kernel is compiled for every integer type it is given.
            other = _neighbour(t, s, i, np.int64(2), np.int64(-1))
            if other >= 0:
                new = s.place[other]
        elif kind < _ANY:
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
            return i, old, at, latency, s.start_s[i], ready, place - here, 1
        num = _gather(t, s, k, i, new)
        if num == 0:
            continue
        if num > 1:
            latency, begin, ready = together(t, s, i, new, num)
            return i, new, -1, latency, begin, ready, 0, num
        low, high = _window(t, s, i)
        ready = inputs_s(t, s, i, new)
        a = first_in_lane(s, new, s.start_s, ready)  # when the inputs are there
        shift = uniform(s.random)
        if shift < _LATER:
            a = min(a + below(s.random, 3), beyond)
        elif shift < _EARLIER:
            a = max(a - 1, first)
        while a > first and s.position[s.lane[a - 1]] >= high:
            a -= 1
        while a < beyond and s.position[s.lane[a]] <= low:
            a += 1
        at = high
        if a < beyond and s.position[s.lane[a]] < high:
            at = s.position[s.lane[a]]
        latency, begin = elsewhere(t, s, i, new, ready, a)
        return i, new, at, latency, begin, ready, 0, 1
    return -1, 0, -1, 0.0, 0.0, 0.0, 0, 0


@kernel
def offer(t, s, width, chooser):
    """Draw moves 1..width, as far as ``chooser`` has to know them; choice 0 is to stay.

    Those whose score is ``_HOPELESS`` below the best one's are withdrawn.
    """
    s.which[0] = -1
    best = -np.inf
    scale = _SIMULATED * HAND_SCALE if t.simulated else HAND_SCALE
    for k in range(1, width + 1):
        i, new, at, latency, begin, ready, places, num = propose(t, s, k, chooser)
        s.which[k] = i
        if i < 0:
            continue
        s.group[k], s.to[k], s.at[k] = t.group[i], new, at
        if chooser == UNIFORM:
            continue
        rests = _REST + _REST_MORE * uniform(s.random) if chooser == TABU else 0.0
        if s.moved[i] > 0 and s.step - s.moved[i] < rests and latency >= s.best_s:
            s.which[k] = -1
            continue
        drawn = s.drawn[k]
        drawn[0], drawn[1], drawn[2], drawn[3], drawn[4] = latency, begin, ready, places, num
        change = min(latency, NEVER) / max(s.cost_s, 1e-300) - 1.0
        # Off the critical chain an operator can only make way for others later.
        gained = max(change, _GAIN if s.on_chain[i] else 0.0)
        score = max(-3.0 * BOUND, min(3.0 * BOUND, -gained / scale))
        s.offered[k, 0] = score
        best = max(best, score)
    if chooser == UNIFORM:
        return
    s.offered[0, 0] = 0.0
    for k in range(1, width + 1):
        if s.offered[k, 0] < best - _HOPELESS and chooser != TABU:
            s.which[k] = -1
    if chooser == POLICY:
        _describe(t, s, width)


@kernel
def _describe(t, s, width):
    """Fill ``SEARCH_FEATURES``, and ``MOVE_FEATURES`` of the offered moves but the first."""
    u = s.search
    n, num_devices = t.compute_s.shape
    cost = max(s.cost_s, 1e-300)
    most = max(s.load[largest(s.load, num_devices)], 1e-300)
    mean = average(s.load)
    typical = max(mean * num_devices / n, 1e-300)
    log_steps = np.log(s.step + 2.0)
    u[0] = s.used
    u[1] = np.log10(max(s.temperature, 1e-9)) / 5.0
    u[2] = bounded(100.0 * np.log(cost / max(s.best_s, 1e-300)))
    u[3] = bounded(10.0 * np.log(max(s.best_s, 1e-300) / max(s.first_s, 1e-300)))
    u[4] = np.log(s.step - s.best_step + 1.0) / 10.0
    u[5] = mean / most
    u[6] = bounded(mean / cost)
    u[7] = s.num_chain / n
    u[8] = np.log(n + 1.0) / 10.0
    u[9] = np.log(num_devices) / 3.0
    s.offered[0, 1] = 1.0
    for k in range(1, width + 1):
        i, new, f = s.which[k], s.to[k], s.offered[k]
        if i < 0:
            f[:] = 0.0
            continue
        old = s.place[i]
        latency, begin, ready, places, num = s.drawn[k]
        change = min(latency, NEVER) / cost - 1.0
        f[2] = bounded(100.0 * change)
        f[3] = bounded(1000.0 * change)
        f[4] = new == old
        f[5] = np.sign(places) * np.log(1.0 + abs(places))
        f[6] = s.on_chain[i]
        f[7] = bounded(1.0 - (s.end_s[i] + s.after_s[i]) / cost)
        f[8] = bounded(s.start_s[i] / cost)
        now_s = t.compute_s[i, old]
        f[9] = bounded(
            np.log(max(t.compute_s[i, new], 1e-3 * typical) / max(now_s, 1e-3 * typical))
        )
        f[10] = bounded(now_s / typical)
        f[11] = s.load[old] / most
        f[12] = s.load[new] / most
        f[13], f[14] = _near(t, s, i, old, new)
        f[15] = bounded(100.0 * (ready - s.start_s[i]) / cost)
        f[16] = bounded(100.0 * (begin - ready) / cost)
        f[17] = np.log(1.0 + s.refused[i, new])
        f[18] = np.log(s.step - s.moved[i] + 1.0) / log_steps
        f[19] = np.log(num)


@kernel
def _near(t, s, i, old, new):
    """Shares of the neighbours of ``i`` on ``new`` and on ``old``."""
    in_ptr, in_src = t.in_ptr, t.in_src
    edge_ptr, edge_dst = t.edge_ptr, t.edge_dst
    n, count, there, here = len(s.place), 0, 0, 0
    for m in range(in_ptr[i], in_ptr[i + 1]):
        src = in_src[m]
        if src < n:
            count += 1
            there += s.place[src] == new
            here += s.place[src] == old
    for e in range(edge_ptr[i], edge_ptr[i + 1]):
        count += 1
        there += s.place[edge_dst[e]] == new
        here += s.place[edge_dst[e]] == old
    return there / max(count, 1), here / max(count, 1)
