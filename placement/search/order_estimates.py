"""What a move of placement or order would bring, estimated: numba kernels of ``order_search``.

From heads and tails: the longest path to an operator, and from it to the end, along the graph and
along the devices (job shops: Taillard 1994, Balas and Vazacopoulos 1998; with a choice of
machines: Mastrolilli and Gambardella 2000).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from placement.search.order_times import sending_s
from placement.tools.jit import inlined, kernel


@inlined
def users_s(t, s, i, d):
    """The longest path from the end of ``i`` on ``d`` through who uses its tensors.

    Marked ones do not count: they move, too, and their own paths are longer.
    """
    edge_ptr, edge_dst = t.edge_ptr, t.edge_dst
    path = 0.0
    for e in range(edge_ptr[i], edge_ptr[i + 1]):
        user = edge_dst[e]
        if s.mark[user]:
            continue
        after = s.from_s[user]
        if s.place[user] != d:
            after += sending_s(t, e, d, s.place[user])
        path = max(path, after)
    return path


@inlined
def inputs_s(t, s, i, d):
    """When the inputs of ``i`` would be on ``d``, where marked ones are and end at ``finish_s``."""
    in_ptr, in_edge, in_src = t.in_ptr, t.in_edge, t.in_src
    n, num_devices = t.compute_s.shape
    ready = 0.0
    for m in range(in_ptr[i], in_ptr[i + 1]):
        e, src = in_edge[m], in_src[m]
        if src == n:
            arrives = sending_s(t, e, num_devices, d)
        elif s.mark[src]:
            arrives = s.finish_s[src]
        else:
            arrives = s.end_s[src]
            if s.place[src] != d:
                arrives += sending_s(t, e, s.place[src], d)
        ready = max(ready, arrives)
    return ready


@kernel
def elsewhere(t, s, i, d, ready, place):
    """The estimated latency with ``i`` on ``d``, at ``place`` in its lane; and when it begins."""
    begin, after = ready, 0.0
    if place > s.lane_ptr[d]:
        before = s.lane[place - 1]
        begin = max(begin, s.end_s[before] + s.hand_s[before])
    if place < s.lane_ptr[d + 1]:
        after = s.from_s[s.lane[place]]
    path = users_s(t, s, i, d)
    if not t.simulated:
        return begin + t.compute_s[i, d] + max(path, after), begin
    end_s = begin + _seconds(t, s, i, d, begin)
    after += _handing_s(t, s, i, d, end_s)
    return max(end_s + max(path, after), _handed_s(t, s, i, d)), begin


@inlined
def _runs(s, d, when, but):
    """Whether ``d`` runs, or hands over, another than ``but`` at that time."""
    at = first_in_lane(s, d, s.start_s, when)
    if at == s.lane_ptr[d] or s.lane[at - 1] == but:
        return False
    before = s.lane[at - 1]
    return s.end_s[before] + s.hand_s[before] > when


@kernel
def _seconds(t, s, i, d, begin):
    """Seconds of ``i`` on ``d`` where it begins then."""
    seconds, others = t.compute_s[i, d], 0
    slower = t.problem.loaded_s[i, d] - seconds
    if slower > 0.0:
        for other in range(len(s.load)):
            others += other != d and _runs(s, other, begin, i)
        seconds += slower * others / max(t.problem.num_workers - 1, 1)
    return seconds


@inlined
def _hand_over_s(t, s, e, i, src, dst, when):
    """Seconds that ``src`` needs to hand over delivery ``e`` of ``i`` to ``dst`` at that time."""
    k = t.problem
    pair = src * len(s.load) + dst
    seconds = k.link_send_s[pair] + t.edge_bytes[e] * k.link_send_s_per_byte[pair]
    if k.link_wake_s[pair] > 0.0 and not _runs(s, dst, when, i):
        seconds += k.link_wake_s[pair]
    if k.link_blocking[pair]:
        seconds = max(seconds, sending_s(t, e, src, dst))
    return seconds


@kernel
def _handing_s(t, s, i, d, when):
    """Seconds that ``d`` needs to hand over what ``i`` made there; marked users move there, too."""
    s.sent[:] = -1
    seconds = 0.0
    for e in range(t.edge_ptr[i], t.edge_ptr[i + 1]):
        to = np.int64(s.place[t.edge_dst[e]])
        if to != d and not s.mark[t.edge_dst[e]] and s.sent[to] != t.edge_tensor[e]:
            s.sent[to] = t.edge_tensor[e]
            seconds += _hand_over_s(t, s, e, i, d, to, when)
    return seconds


@kernel
def _handed_s(t, s, i, d):
    """The longest path through who must hand a tensor over once ``i`` is on ``d``, then goes on."""
    longest = 0.0
    for m in range(t.in_ptr[i], t.in_ptr[i + 1]):
        e, src = t.in_edge[m], t.in_src[m]
        if src == len(s.place) or s.mark[src] or s.place[src] == d:
            continue
        home, known = np.int64(s.place[src]), False
        later = s.in_lane[src] + 1
        later += later < s.lane_ptr[home + 1] and s.lane[later] == i
        for other in range(t.edge_ptr[src], t.edge_ptr[src + 1]):
            there = t.edge_tensor[other] == t.edge_tensor[e] and s.place[t.edge_dst[other]] == d
            known |= there and t.edge_dst[other] != i
        if later < s.lane_ptr[home + 1] and not known:
            end_s = s.end_s[src]
            seconds = s.hand_s[src] + _hand_over_s(t, s, e, i, home, d, end_s)
            longest = max(longest, end_s + seconds + s.from_s[s.lane[later]])
    return longest


@kernel
def reordered(t, s, i, ready, place):
    """The estimated latency with ``i`` where ``place`` is in the lane of its device."""
    d, here = s.place[i], s.in_lane[i]
    first, beyond = s.lane_ptr[d], s.lane_ptr[d + 1]
    seconds = s.end_s[i] - s.start_s[i] if t.simulated else t.compute_s[i, d]
    before = place - 1 if place < here else here - 1
    longest = now = 0.0
    if before >= first:
        now = s.end_s[s.lane[before]] + s.hand_s[s.lane[before]]
    if place < here:
        now = max(ready, now) + seconds
        longest = now + s.users_s[i]
        now += s.hand_s[i]
        for k in range(place, here):
            other = s.lane[k]
            now = max(now, s.start_s[other]) + s.end_s[other] - s.start_s[other]
            longest = max(longest, now + s.users_s[other])
            now += s.hand_s[other]
        last = here
    else:
        for k in range(here + 1, place + 1):
            other = s.lane[k]
            now = max(now, inputs_s(t, s, other, d)) + s.end_s[other] - s.start_s[other]
            longest = max(longest, now + s.users_s[other])
            now += s.hand_s[other]
        now = max(now, ready) + seconds
        longest = max(longest, now + s.users_s[i])
        now += s.hand_s[i]
        last = place
    if last + 1 < beyond:
        later = s.lane[last + 1]
        longest = max(longest, now + s.from_s[later])
    return longest


@kernel
def together(t, s, new, num):
    """As ``elsewhere``, with the operators at positions ``s.room[:num]`` on ``new``.

    They stay where they are in the sequence.
    """
    sequence, room = s.sequence, s.room
    gap = 1  # Shell's sort: few of them are nearly sorted, a large colocation group is not
    while gap < num // 9:
        gap = 3 * gap + 1
    while gap > 0:
        for m in range(gap, num):
            k, place = room[m], m
            while place >= gap and room[place - gap] > k:
                room[place] = room[place - gap]
                place -= gap
            room[place] = k
        gap //= 3
    for m in range(num):
        s.mark[sequence[room[m]]] = True
    longest = free_s = 0.0
    for m in range(num):
        j = np.int64(sequence[room[m]])
        ready = inputs_s(t, s, j, new)
        place = first_in_lane(s, new, s.position, room[m])
        latency, begin = elsewhere(t, s, j, new, max(ready, free_s), place)
        free_s = begin + t.compute_s[j, new]
        s.finish_s[j] = free_s
        longest = max(longest, latency)
    for m in range(num):
        s.mark[sequence[room[m]]] = False
    return longest


@kernel
def first_in_lane(s, d, when, least):
    """The first in the lane of ``d`` whose ``when`` [N] (begin, or position) is not below."""
    a, b = s.lane_ptr[d], s.lane_ptr[d + 1]
    while a < b:
        middle = (a + b) >> 1
        if when[s.lane[middle]] < least:
            a = middle + 1
        else:
            b = middle
    return a
