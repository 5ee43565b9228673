"""Numba kernels of ``order_search``: anneal where operators run and in which order, together.

A *sequence* is an order of all operators in which producers come before consumers. With a
placement it says everything: every device runs its operators in that order and every channel
sends in that order, so one pass over the sequence gives the timetable, as exact as the
simulator's (``timetable``) and ten times as fast, because nothing has to be put in order.

What a move would bring is estimated from heads and tails: the longest path to an operator, and
from it to the end, along the graph and along the devices (job shops: Taillard 1994, Balas and
Vazacopoulos 1998; with a choice of machines: Mastrolilli and Gambardella 2000).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np

from placement.planners._chooser import choose, network
from placement.planners._macro import _below, _uniform

Array = Any

POLICY, HAND, UNIFORM = range(3)  # who chooses
BEGIN, TAKE, SEARCH = range(3)  # jobs of play; SEARCH + who chooses

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
BOUND = 10.0
HAND_SCALE = 3e-4  # of the latency: what the hand-written score calls much
_GAIN = -0.02  # estimates below say only that the path through the move is not the longest

_FROM_CHAIN = 0.8  # of the moves begin with an operator of the critical chain
_NEAR, _ANY = 0.35, 0.65  # cumulated: to a neighbour's device, to any; the rest: order only
_LATER, _EARLIER = 0.3, 0.5  # cumulated: some places off where inputs are there
_ALONE = 0.5  # of the moves to another device; others take neighbours along
_FAR = 2.5  # order only: log of how many places at most, beside one
_SORT_EVERY = 64  # moves kept, until the sequence is put in order of time again
_TRIES = 4
_NEVER = 1e30  # instead of inf, which has no logarithm: where a link is missing

# Numbers of a search, State.x
(
    COST,
    BEST,
    FIRST,
    STEP,
    FOUND,
    USED,
    TEMPERATURE,
    WARM,
    COLD,
    KEPT,
    NUM_CHAIN,
    NUM_X,
) = range(12)


class Tables(NamedTuple):
    """One problem."""

    edge_ptr: Array  # int32 [N + 2] deliveries of each operator, by tensor; then of the inputs
    edge_tensor: Array  # int32
    edge_dst: Array  # int32
    edge_bytes: Array  # float64
    in_ptr: Array  # int32 [N + 1]
    in_tensor: Array  # int32
    tensor_src: Array  # int32 [T]
    tensor_bytes: Array  # int64 [T]
    latency_s: Array  # float64 [(D + 1) D], as are the next: the last row is for model inputs
    s_per_byte: Array  # float64
    channel: Array  # int32
    local: int  # the channel of what shares memory
    matrix: Array  # float64 [T (D + 1) D] seconds, where a profile states them
    contention: bool
    compute_s: Array  # float64 [N, D]
    group: Array  # int32 [N]
    op_ptr: Array  # int32 [G + 1]
    op: Array  # int32 [N] operators of each group


class State(NamedTuple):
    """A search, and room to evaluate in."""

    random: Array  # uint64 [1]
    x: Array  # float64 [NUM_X]
    place: Array  # int32 [N]
    sequence: Array  # int32 [N]
    position: Array  # int32 [N] of each operator in it
    best_place: Array  # int32 [N]
    best_sequence: Array  # int32 [N]
    start_s: Array  # float64 [N] of what was kept last, as are the next
    end_s: Array  # float64 [N]
    after_s: Array  # float64 [N] longest path from the end of each to the end of all
    users_s: Array  # float64 [N] the same through those that use its tensors
    from_s: Array  # float64 [N] from its begin
    waited: Array  # int32 [N] whom each operator waited for; -1: nobody
    lane: Array  # int32 [N] operators of each device, in order
    lane_ptr: Array  # int32 [D + 1]
    in_lane: Array  # int32 [N] where each operator is there
    load: Array  # float64 [D] seconds of each device
    chain: Array  # int32 [N] the critical chain, the first NUM_CHAIN
    on_chain: Array  # bool [N]
    refused: Array  # float32 [N, D]
    moved: Array  # int64 [N] step of the last move
    try_start_s: Array  # float64 [N] of what was tried last, as are the next
    try_end_s: Array  # float64 [N]
    try_waited: Array  # int32 [N]
    ready_s: Array  # float64 [N]
    mark: Array  # bool [N] scratch, False
    room: Array  # int32 [N]
    finish_s: Array  # float64 [N], as the two before room of _gather and _together
    free_s: Array  # float64 [2, D] of devices, and arrivals there
    last: Array  # int32 [2, D] operator that a device ran last, tensor that it was sent last
    channel_s: Array  # float64 [number of channels + 1]
    which: Array  # int32 [C + 1] operator that each offered move begins with; -1: no move
    group: Array  # int32 [C + 1] its group
    to: Array  # int32 [C + 1] device
    count: Array  # int32 [C + 1] groups that move
    body: Array  # int32 [C + 1, L] those groups
    at: Array  # int32 [C + 1] before whom in the sequence; -1: where it is
    offered: Array  # float32 [C + 1, F]
    search: Array  # float32 [S]


@nb.njit(cache=True, nogil=True)
def timetable(t, s):
    """Latency in seconds of ``s.place`` in ``s.sequence``; fills ``try_start_s``, ..."""
    edge_ptr, edge_tensor, edge_dst = t.edge_ptr, t.edge_tensor, t.edge_dst
    latency_s, s_per_byte, channel = t.latency_s, t.s_per_byte, t.channel
    local, matrix, contention = t.local, t.matrix, t.contention
    place, sequence = s.place, s.sequence
    start_s, end_s, waited, ready_s = s.try_start_s, s.try_end_s, s.try_waited, s.ready_s
    free_s, arrives = s.free_s[0], s.free_s[1]
    last, sent = s.last
    n, num_devices = t.compute_s.shape
    has_matrix = len(matrix) > 0
    ready_s[:] = 0.0
    s.channel_s[:] = 0.0
    free_s[:] = 0.0
    last[:] = -1
    sent[:] = -1
    latest = 0.0
    waited[:] = -1
    for k in range(-1, n):
        if k < 0:  # model inputs
            op, src, now = n, num_devices, 0.0
        else:
            op = sequence[k]
            src = place[op]
            now = ready_s[op]
            if free_s[src] > now or waited[op] < 0:
                now = max(now, free_s[src])
                waited[op] = last[src]
            start_s[op] = now
            now += t.compute_s[op, src]
            end_s[op] = now
            free_s[src] = now
            last[src] = op
            latest = max(latest, now)
        for e in range(edge_ptr[op], edge_ptr[op + 1]):
            user = edge_dst[e]
            dst = place[user]
            pair = src * num_devices + dst
            c = channel[pair]
            there_s = now
            if c != local:
                tensor = edge_tensor[e]
                if sent[dst] != tensor:
                    if has_matrix:
                        cost = matrix[(tensor * (num_devices + 1) + src) * num_devices + dst]
                    else:
                        cost = latency_s[pair] + t.edge_bytes[e] * s_per_byte[pair]
                    if contention:
                        there_s = max(now, s.channel_s[c])
                    there_s += cost
                    s.channel_s[c] = there_s
                    arrives[dst] = there_s
                    sent[dst] = tensor
                there_s = arrives[dst]
            if there_s > ready_s[user]:
                ready_s[user] = there_s
                waited[user] = op if op < n else -1
    return min(latest, _NEVER)


@nb.njit(cache=True, nogil=True, inline="always")
def _sending_s(t, tensor, src, dst):
    """Seconds to send ``tensor`` when the channel is free; ``src = D``: a model input."""
    num_devices = t.compute_s.shape[1]
    pair = src * num_devices + dst
    if t.channel[pair] == t.local:
        return 0.0
    matrix = t.matrix
    if len(matrix) > 0:
        return matrix[(tensor * (num_devices + 1) + src) * num_devices + dst]
    return t.latency_s[pair] + t.tensor_bytes[tensor] * t.s_per_byte[pair]


@nb.njit(cache=True, nogil=True)
def _look(t, s):
    """Keep what was tried last: its times, the critical chain, lanes and tails."""
    n, num_devices = t.compute_s.shape
    place, sequence, position = s.place, s.sequence, s.position
    start_s, end_s, after_s, users_s = s.start_s, s.end_s, s.after_s, s.users_s
    from_s = s.from_s
    start_s[:] = s.try_start_s
    end_s[:] = s.try_end_s
    s.waited[:] = s.try_waited
    if int(s.x[KEPT]) % _SORT_EVERY == 0:
        for k in range(1, n):  # nearly sorted: by insertion, equal times stay as they stand
            op, place_of = sequence[k], k
            while place_of > 0 and start_s[sequence[place_of - 1]] > start_s[op]:
                sequence[place_of] = sequence[place_of - 1]
                place_of -= 1
            sequence[place_of] = op
        for k in range(n):
            position[sequence[k]] = k
    for k in range(int(s.x[NUM_CHAIN])):
        s.on_chain[s.chain[k]] = False
    op, count = np.argmax(end_s), 0
    while op >= 0:
        s.chain[count] = op
        s.on_chain[op] = True
        count += 1
        op = s.waited[op]
    s.x[NUM_CHAIN] = count
    s.load[:] = 0.0
    s.lane_ptr[:] = 0
    for i in range(n):
        s.lane_ptr[place[i] + 1] += 1
        s.load[place[i]] += t.compute_s[i, place[i]]
    at, follows = s.last
    for d in range(num_devices):
        s.lane_ptr[d + 1] += s.lane_ptr[d]
        at[d] = s.lane_ptr[d + 1]
        follows[d] = -1
    edge_ptr, edge_tensor, edge_dst = t.edge_ptr, t.edge_tensor, t.edge_dst
    latency_s, s_per_byte, channel = t.latency_s, t.s_per_byte, t.channel
    local, matrix = t.local, t.matrix
    has_matrix = len(matrix) > 0
    for k in range(n - 1, -1, -1):
        i = sequence[k]
        d = place[i]
        at[d] -= 1
        s.lane[at[d]] = i
        s.in_lane[i] = at[d]
        path = 0.0
        for e in range(edge_ptr[i], edge_ptr[i + 1]):  # as ``_users_s``, at twice its pace
            user = edge_dst[e]
            after = from_s[user]
            pair = d * num_devices + place[user]
            if channel[pair] != local:
                if has_matrix:
                    key = (edge_tensor[e] * (num_devices + 1) + d) * num_devices + place[user]
                    after += matrix[key]
                else:
                    after += latency_s[pair] + t.edge_bytes[e] * s_per_byte[pair]
            path = max(path, after)
        users_s[i] = path
        later = follows[d]
        if later >= 0:
            path = max(path, from_s[later])
        after_s[i] = path
        from_s[i] = path + end_s[i] - start_s[i]
        follows[d] = i


@nb.njit(cache=True, nogil=True, inline="always")
def _users_s(t, s, i, d):
    """The longest path from the end of ``i`` on ``d`` through who uses its tensors.

    Marked ones do not count: they move, too, and their own paths are longer.
    """
    edge_ptr, edge_tensor, edge_dst = t.edge_ptr, t.edge_tensor, t.edge_dst
    path = 0.0
    for e in range(edge_ptr[i], edge_ptr[i + 1]):
        user = edge_dst[e]
        if s.mark[user]:
            continue
        after = s.from_s[user]
        if s.place[user] != d:
            after += _sending_s(t, edge_tensor[e], d, s.place[user])
        path = max(path, after)
    return path


@nb.njit(cache=True, nogil=True, inline="always")
def _inputs_s(t, s, i, d):
    """When the inputs of ``i`` would be on ``d``, where marked ones are and end at ``finish_s``."""
    in_ptr, in_tensor, tensor_src = t.in_ptr, t.in_tensor, t.tensor_src
    num_devices = t.compute_s.shape[1]
    ready = 0.0
    for m in range(in_ptr[i], in_ptr[i + 1]):
        tensor = in_tensor[m]
        src = tensor_src[tensor]
        if src < 0:
            arrives = _sending_s(t, tensor, num_devices, d)
        elif s.mark[src]:
            arrives = s.finish_s[src]
        else:
            arrives = s.end_s[src]
            if s.place[src] != d:
                arrives += _sending_s(t, tensor, s.place[src], d)
        ready = max(ready, arrives)
    return ready


@nb.njit(cache=True, nogil=True)
def _elsewhere(t, s, i, d, ready, place):
    """The estimated latency with ``i`` on ``d``, at ``place`` in its lane; and when it begins."""
    begin = ready
    if place > s.lane_ptr[d]:
        begin = max(begin, s.end_s[s.lane[place - 1]])
    path = _users_s(t, s, i, d)
    if place < s.lane_ptr[d + 1]:
        path = max(path, s.from_s[s.lane[place]])
    return begin + t.compute_s[i, d] + path, begin


@nb.njit(cache=True, nogil=True)
def _reordered(t, s, i, ready, place):
    """The estimated latency with ``i`` where ``place`` is in the lane of its device."""
    d, here = s.place[i], s.in_lane[i]
    first, beyond = s.lane_ptr[d], s.lane_ptr[d + 1]
    longest = 0.0
    if place < here:
        now = ready
        if place > first:
            now = max(now, s.end_s[s.lane[place - 1]])
        now += t.compute_s[i, d]
        longest = now + s.users_s[i]
        for k in range(place, here):
            other = s.lane[k]
            now = max(now, s.start_s[other]) + s.end_s[other] - s.start_s[other]
            longest = max(longest, now + s.users_s[other])
        last = here
    else:
        now = s.end_s[s.lane[here - 1]] if here > first else 0.0
        for k in range(here + 1, place + 1):
            other = s.lane[k]
            now = max(now, _inputs_s(t, s, other, d)) + s.end_s[other] - s.start_s[other]
            longest = max(longest, now + s.users_s[other])
        now = max(now, ready) + t.compute_s[i, d]
        longest = max(longest, now + s.users_s[i])
        last = place
    if last + 1 < beyond:
        later = s.lane[last + 1]
        longest = max(longest, now + s.from_s[later])
    return longest


@nb.njit(cache=True, nogil=True)
def _window(t, s, i):
    """Positions between which ``i`` may be: of its last producer, and of its first user."""
    in_ptr, in_tensor, tensor_src = t.in_ptr, t.in_tensor, t.tensor_src
    edge_ptr, edge_dst = t.edge_ptr, t.edge_dst
    low, high = -1, len(s.place)
    for m in range(in_ptr[i], in_ptr[i + 1]):
        src = tensor_src[in_tensor[m]]
        if src >= 0:
            low = max(low, s.position[src])
    for e in range(edge_ptr[i], edge_ptr[i + 1]):
        high = min(high, s.position[edge_dst[e]])
    return low, high


@nb.njit(cache=True, nogil=True)
def _neighbour(t, s, i, way, device):
    """A random operator that makes (``way`` 0) or uses (1) a tensor of ``i``, or either (2).

    One that is on ``device`` (-1: any) and not marked; -1: there is none.
    """
    in_ptr, in_tensor, tensor_src = t.in_ptr, t.in_tensor, t.tensor_src
    edge_ptr, edge_dst = t.edge_ptr, t.edge_dst
    count, found = 0, -1
    for m in range(in_ptr[i], in_ptr[i + 1]):
        src = tensor_src[in_tensor[m]]
        if src >= 0 and way != 1 and not s.mark[src] and (device < 0 or s.place[src] == device):
            count += 1
            if _below(s.random, count) == 0:
                found = src
    if way == 0:
        return found
    for e in range(edge_ptr[i], edge_ptr[i + 1]):
        user = edge_dst[e]
        if not s.mark[user] and (device < 0 or s.place[user] == device):
            count += 1
            if _below(s.random, count) == 0:
                found = user
    return found


@nb.njit(cache=True, nogil=True)
def _gather(t, s, k, i, new):
    """Fill the body of move ``k``: the group of ``i``, and perhaps neighbours on its device.

    Returns how many operators that is; 0: one of them cannot run on ``new``.
    """
    body, old = s.body[k], np.int64(s.place[i])
    most = 1
    if _uniform(s.random) >= _ALONE:
        most = 1 + int(np.exp(_uniform(s.random) * np.log(float(len(body) - 1))))
    way = _below(s.random, 3)
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


@nb.njit(cache=True, nogil=True)
def _together(t, s, i, new, num):
    """As ``_elsewhere``, with the operators at positions ``s.room[:num]`` on ``new``.

    They stay where they are in the sequence. Also when ``i`` begins, and its inputs are there.
    """
    positions = s.room[:num]
    positions.sort()
    for k in positions:
        s.mark[s.sequence[k]] = True
    longest = free_s = begin_i = ready_i = 0.0
    for k in positions:
        j = np.int64(s.sequence[k])
        ready = _inputs_s(t, s, j, new)
        place = _first_in_lane(s, new, s.position, k)
        latency, begin = _elsewhere(t, s, j, new, max(ready, free_s), place)
        free_s = begin + t.compute_s[j, new]
        s.finish_s[j] = free_s
        longest = max(longest, latency)
        if j == i:
            begin_i, ready_i = begin, ready
    for k in positions:
        s.mark[s.sequence[k]] = False
    return longest, begin_i, ready_i


@nb.njit(cache=True, nogil=True)
def _propose(t, s, k):
    """Draw move ``k``.

    Returns its first operator (-1: none was found), device, before whom in the sequence (-1: all
    stay where they are there), the estimated latency, when the operator begins, when its inputs
    are there, places that it moves on its device, and operators that move.
    """
    n, num_devices = t.compute_s.shape
    for _ in range(_TRIES):
        i = _below(s.random, n)
        if _uniform(s.random) < _FROM_CHAIN:
            i = s.chain[_below(s.random, int(s.x[NUM_CHAIN]))]
        old = s.place[i]
        new = old
        kind = _uniform(s.random)
        if kind < _NEAR:
            # Casts, here and elsewhere: a kernel is compiled for every integer type it is given.
            other = _neighbour(t, s, i, np.int64(2), np.int64(-1))
            if other >= 0:
                new = s.place[other]
        elif kind < _ANY:
            new = _below(s.random, num_devices)
        first, beyond = s.lane_ptr[new], s.lane_ptr[new + 1]
        if new == old:
            low, high = _window(t, s, i)
            here = s.in_lane[i]
            far = 1 + int(np.exp(_uniform(s.random) * _FAR))
            if _uniform(s.random) < 0.5:
                place = max(first, here - far)
                while place < here and s.position[s.lane[place]] <= low:
                    place += 1
            else:
                place = min(beyond - 1, here + far)
                while place > here and s.position[s.lane[place]] >= high:
                    place -= 1
            if place == here:
                continue
            ready = _inputs_s(t, s, i, old)
            latency = _reordered(t, s, i, ready, place)
            at = s.position[s.lane[place]] + (place > here)
            s.count[k] = 0
            return i, old, at, latency, s.start_s[i], ready, place - here, 1
        num = _gather(t, s, k, i, new)
        if num == 0:
            continue
        if num > 1:
            latency, begin, ready = _together(t, s, i, new, num)
            return i, new, -1, latency, begin, ready, 0, num
        low, high = _window(t, s, i)
        ready = _inputs_s(t, s, i, new)
        a = _first_in_lane(s, new, s.start_s, ready)  # when the inputs are there
        shift = _uniform(s.random)
        if shift < _LATER:
            a = min(a + _below(s.random, 3), beyond)
        elif shift < _EARLIER:
            a = max(a - 1, first)
        while a > first and s.position[s.lane[a - 1]] >= high:
            a -= 1
        while a < beyond and s.position[s.lane[a]] <= low:
            a += 1
        at = high
        if a < beyond and s.position[s.lane[a]] < high:
            at = s.position[s.lane[a]]
        latency, begin = _elsewhere(t, s, i, new, ready, a)
        return i, new, at, latency, begin, ready, 0, 1
    return -1, 0, -1, 0.0, 0.0, 0.0, 0, 0


@nb.njit(cache=True, nogil=True)
def _first_in_lane(s, d, when, least):
    """The first in the lane of ``d`` whose ``when`` [N] (begin, or position) is not below."""
    a, b = s.lane_ptr[d], s.lane_ptr[d + 1]
    while a < b:
        middle = (a + b) >> 1
        if when[s.lane[middle]] < least:
            a = middle + 1
        else:
            b = middle
    return a


@nb.njit(cache=True, nogil=True, inline="always")
def _bounded(value):
    return max(-BOUND, min(BOUND, value))


@nb.njit(cache=True, nogil=True)
def _offer(t, s, width, described):
    """Draw moves 1..width and, if ``described``, describe them; choice 0 is to stay."""
    x = s.x
    n, num_devices = t.compute_s.shape
    cost = max(x[COST], 1e-300)
    largest = max(s.load.max(), 1e-300)
    mean = s.load.mean()
    log_steps = np.log(x[STEP] + 2.0)
    if described:
        u = s.search
        u[0] = x[USED]
        u[1] = np.log10(max(x[TEMPERATURE], 1e-9)) / 5.0
        u[2] = _bounded(100.0 * np.log(cost / max(x[BEST], 1e-300)))
        u[3] = _bounded(10.0 * np.log(max(x[BEST], 1e-300) / max(x[FIRST], 1e-300)))
        u[4] = np.log(x[STEP] - x[FOUND] + 1.0) / 10.0
        u[5] = mean / largest
        u[6] = _bounded(mean / cost)
        u[7] = x[NUM_CHAIN] / n
        u[8] = np.log(n + 1.0) / 10.0
        u[9] = np.log(num_devices) / 3.0
        s.offered[:] = 0.0
        s.offered[0, 1] = 1.0
    s.which[0] = -1
    for k in range(1, width + 1):
        i, new, at, latency, begin, ready, places, num = _propose(t, s, k)
        s.which[k] = i
        if i < 0:
            continue
        s.group[k], s.to[k], s.at[k] = t.group[i], new, at
        if not described:
            continue
        old = s.place[i]
        change = min(latency, _NEVER) / cost - 1.0
        f = s.offered[k]
        # Off the critical chain an operator can only make way for others later.
        gained = max(change, _GAIN if s.on_chain[i] else 0.0)
        f[0] = max(-3.0 * BOUND, min(3.0 * BOUND, -gained / HAND_SCALE))
        f[2] = _bounded(100.0 * change)
        f[3] = _bounded(1000.0 * change)
        f[4] = new == old
        f[5] = np.sign(places) * np.log(1.0 + abs(places))
        f[6] = s.on_chain[i]
        f[7] = _bounded(1.0 - (s.end_s[i] + s.after_s[i]) / cost)
        f[8] = _bounded(s.start_s[i] / cost)
        now_s = t.compute_s[i, old]
        typical = max(mean * num_devices / n, 1e-300)
        f[9] = _bounded(
            np.log(max(t.compute_s[i, new], 1e-3 * typical) / max(now_s, 1e-3 * typical))
        )
        f[10] = _bounded(now_s / typical)
        f[11] = s.load[old] / largest
        f[12] = s.load[new] / largest
        f[13], f[14] = _near(t, s, i, old, new)
        f[15] = _bounded(100.0 * (ready - s.start_s[i]) / cost)
        f[16] = _bounded(100.0 * (begin - ready) / cost)
        f[17] = np.log(1.0 + s.refused[i, new])
        f[18] = np.log(x[STEP] - s.moved[i] + 1.0) / log_steps
        f[19] = np.log(num)


@nb.njit(cache=True, nogil=True)
def _near(t, s, i, old, new):
    """Shares of the neighbours of ``i`` on ``new`` and on ``old``."""
    in_ptr, in_tensor, tensor_src = t.in_ptr, t.in_tensor, t.tensor_src
    edge_ptr, edge_dst = t.edge_ptr, t.edge_dst
    count = there = here = 0
    for m in range(in_ptr[i], in_ptr[i + 1]):
        src = tensor_src[in_tensor[m]]
        if src >= 0:
            count += 1
            there += s.place[src] == new
            here += s.place[src] == old
    for e in range(edge_ptr[i], edge_ptr[i + 1]):
        count += 1
        there += s.place[edge_dst[e]] == new
        here += s.place[edge_dst[e]] == old
    return there / max(count, 1), here / max(count, 1)


@nb.njit(cache=True, nogil=True)
def _shift(s, i, at):
    """Put ``i`` before who is at ``at`` now; returns who ``i`` stood before, as ``at`` to undo."""
    sequence, position = s.sequence, s.position
    here = position[i]
    if at > here:
        for k in range(here, at - 1):
            sequence[k] = sequence[k + 1]
            position[sequence[k]] = k
        sequence[at - 1], position[i] = i, at - 1
        return here
    for k in range(here, at, -1):
        sequence[k] = sequence[k - 1]
        position[sequence[k]] = k
    sequence[at], position[i] = i, at
    return here + 1


@nb.njit(cache=True, nogil=True)
def _put(t, s, k, device):
    """All that move ``k`` moves to ``device``."""
    for i in range(s.count[k]):
        g = s.body[k, i]
        for m in range(t.op_ptr[g], t.op_ptr[g + 1]):
            s.place[t.op[m]] = device


@nb.njit(cache=True, nogil=True)
def _take(t, s, k):
    """Try move ``k`` (0: stay); returns the improvement of log(best), 0 if there is none.

    It is kept with probability ``min(1, exp(-log(after / before) / temperature))``.
    """
    x = s.x
    x[STEP] += 1.0
    i = s.which[k]
    if i < 0:
        return 0.0
    old, new, at = s.place[i], s.to[k], np.int64(s.at[k])
    _put(t, s, k, new)
    back = _shift(s, i, at) if at >= 0 else at
    cost = timetable(t, s)
    if cost > x[COST]:
        worse = np.log(cost / max(x[COST], 1e-300))
        if worse > -x[TEMPERATURE] * np.log(1.0 - _uniform(s.random)):
            if at >= 0:
                _shift(s, i, back)
            _put(t, s, k, old)
            s.refused[i, new] += 1.0
            return 0.0
    x[COST] = cost
    x[KEPT] += 1.0
    s.moved[i] = int(x[STEP])
    s.refused[i] = 0.0
    gain = 0.0
    if cost < x[BEST] * (1.0 - 1e-12):
        gain = min(np.log(x[BEST] / max(cost, 1e-300)), 1.0)
        x[BEST] = cost
        x[FOUND] = x[STEP]
        s.best_place[:] = s.place
        s.best_sequence[:] = s.sequence
    _look(t, s)
    return gain


@nb.njit(cache=True, nogil=True)
def play(t, s, job, number, net, used, then):
    """The one entry.

    * BEGIN: forget everything but ``s.place`` and ``s.sequence``, evaluate them, offer moves for
      step ``number``, where ``used`` of the budget is spent.
    * TAKE: try move ``number``, then offer the next ones where ``then`` of the budget is spent;
      returns the improvement of log(best).
    * SEARCH + chooser: ``number`` steps while ``used`` of the budget becomes ``then``. POLICY
      chooses by the softmax of its network, HAND by that of the hand-written score alone, for
      UNIFORM one move is drawn.
    """
    x, width = s.x, len(s.which) - 1
    chooser = job - SEARCH
    described = chooser != UNIFORM
    if job == BEGIN:
        for k in range(len(s.sequence)):
            s.position[s.sequence[k]] = k
        s.on_chain[:] = False
        x[NUM_CHAIN] = x[KEPT] = 0.0
        x[COST] = timetable(t, s)
        _look(t, s)
        x[STEP] = x[FOUND] = number
        x[BEST] = x[FIRST] = x[COST]
        s.refused[:] = 0.0
        s.moved[:] = number
        s.best_place[:] = s.place
        s.best_sequence[:] = s.sequence
        _cool(s, used)
        _offer(t, s, width, described)
        return 0.0
    gain = 0.0
    steps = 1 if job == TAKE else number
    logits = np.empty(width + 1)
    for step in range(steps):
        k = 1
        if job == TAKE:
            k = number
        elif chooser != UNIFORM:
            if chooser == POLICY:
                network(net, s.search, s.offered, s.which, s.group, s.to, width, logits)
            else:
                for j in range(width + 1):
                    logits[j] = s.offered[j, 0] if s.which[j] >= 0 else -np.inf
            logits[0] = -np.inf if s.which.max() >= 0 else 0.0
            k = choose(s.random, logits, width)
        gain += _take(t, s, k)
        _cool(s, used + (then - used) * (step + 1) / steps)
        _offer(t, s, width if described else 1, described)
    return gain


@nb.njit(cache=True, nogil=True)
def _cool(s, used):
    """The temperature where ``used`` 0..1 of the budget is spent."""
    s.x[USED] = used
    s.x[TEMPERATURE] = s.x[WARM] * (s.x[COLD] / s.x[WARM]) ** used
