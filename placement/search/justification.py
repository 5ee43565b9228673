"""Numba kernels of forward-backward improvement, also called double justification.

A schedule is read from its end: each operator, the last to end first, goes to the device where it
can begin latest; then from its beginning, the first to begin first, to where it ends earliest
(Li and Willis 1992; Valls, Ballestín and Quintanilla 2005). That packs a schedule more densely than
one list schedule can. Where it brings nothing more, the order is shaken and it begins again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from placement.search.macro import uniform
from placement.search.order_times import sending_s, timetable
from placement.tools.jit import copy, kernel


@kernel
def justify(t, s, passes, until, bound_s):
    """Improve ``s.best_place`` in ``s.best_sequence``, which are worth ``s.best_s``.

    What is worth the same replaces them, and counts in ``s.num_kept``. After ``passes`` passes over
    all operators (0: the order is not shaken at first) it goes on as long as a round surely ends
    before ``until`` of them, or comes to ``bound_s``. Returns those made; ``play`` has to begin
    anew then.
    """
    n = len(s.sequence)
    while passes + 3 <= until and s.best_s > bound_s:
        begun = passes
        copy(s.place, s.best_place)
        copy(s.sequence, s.best_sequence)
        if passes > 0:
            _shake(t, s)
            _deal(t, s, False)
            passes += 1
        least = np.inf
        while True:
            latency = timetable(t, s, np.int64(-1), np.int64(n), np.inf)
            if passes > begun and latency <= s.best_s:
                s.best_s = latency
                s.num_kept += 1
                copy(s.best_place, s.place)
                copy(s.best_sequence, s.sequence)
            if latency >= least * (1.0 - 1e-12) or passes + 2 > until:
                break
            least = latency
            _sort(s, s.try_end_s)
            _deal(t, s, True)
            _deal(t, s, False)
            passes += 2
    return passes


@kernel
def _deal(t, s, back):
    """List schedule in the order of ``s.sequence``, which is in order of time afterwards.

    Each operator goes to the device where it ends first, with the rest of its group if it is the
    first of it; of those to the one that is free last. ``back``: the same from the end.
    """
    n, num_devices = t.compute_s.shape
    free_s, when_s = s.free_s, s.try_start_s
    free_s[:] = 0.0
    s.mark[:] = False  # of groups: whether it has a device
    for k in range(n):
        i = s.sequence[n - 1 - k if back else k]
        g = t.group[i]
        best, least_s, begin_s = -1, np.inf, 0.0
        for d in range(num_devices):
            if s.mark[g]:
                if d != s.place[i]:
                    continue
                reach_s = t.compute_s[i, d]
            else:
                reach_s = 0.0
                for m in range(t.op_ptr[g], t.op_ptr[g + 1]):
                    reach_s += t.compute_s[t.op[m], d]
            if reach_s == np.inf:
                continue
            start_s = max(_ready_s(t, s, i, d, back), free_s[d])
            reach_s += start_s
            if best < 0 or reach_s < least_s or (reach_s == least_s and free_s[d] > free_s[best]):
                best, least_s, begin_s = d, reach_s, start_s
        if not s.mark[g]:
            s.mark[g] = True
            for m in range(t.op_ptr[g], t.op_ptr[g + 1]):
                s.place[t.op[m]] = best
        s.finish_s[i] = begin_s + t.compute_s[i, best]
        free_s[best] = s.finish_s[i]
        when_s[i] = -s.finish_s[i] if back else begin_s
    s.mark[:] = False
    _sort(s, when_s)


@kernel
def _ready_s(t, s, i, d, back):
    """When the inputs of ``i`` would be on ``d``; ``back``: when its users would have its tensors.

    Times are of ``s.finish_s``, and no channel is busy.
    """
    n, num_devices = t.compute_s.shape
    ready_s = 0.0
    if back:
        for e in range(t.edge_ptr[i], t.edge_ptr[i + 1]):
            user = t.edge_dst[e]
            sent_s = sending_s(t, e, d, s.place[user]) if s.place[user] != d else 0.0
            ready_s = max(ready_s, s.finish_s[user] + sent_s)
        return ready_s
    for m in range(t.in_ptr[i], t.in_ptr[i + 1]):
        src = t.in_src[m]
        home = num_devices if src == n else np.int64(s.place[src])
        made_s = 0.0 if src == n else s.finish_s[src]
        sent_s = sending_s(t, t.in_edge[m], home, d) if home != d else 0.0
        ready_s = max(ready_s, made_s + sent_s)
    return ready_s


@kernel
def _shake(t, s):
    """Move each operator in the sequence by some places, as far as its producers let it.

    By 15 % of all places at most, or by less, down to ``e ** -3`` of that.
    """
    n = len(s.sequence)
    far = 2.0 * 0.15 * n * np.exp(-3.0 * uniform(s.random))
    for k in range(n):
        i = s.sequence[k]
        place = k + far * (uniform(s.random) + uniform(s.random) + uniform(s.random) - 1.5)
        for m in range(t.in_ptr[i], t.in_ptr[i + 1]):
            if t.in_src[m] < n:
                place = max(place, s.finish_s[t.in_src[m]])
        s.finish_s[i] = place
    _sort(s, s.finish_s)


@kernel
def _sort(s, key):
    """Put the sequence in the order of ``key`` float64 ``[N]``; equal ones stay as they are."""
    sequence, room = s.sequence, s.room
    n, length = len(sequence), 1
    while length < n:  # merge runs of that length
        for first in range(0, n, 2 * length):
            middle, beyond = min(first + length, n), min(first + 2 * length, n)
            a, b = first, middle
            for k in range(first, beyond):
                if a < middle and (b == beyond or key[sequence[a]] <= key[sequence[b]]):
                    room[k] = sequence[a]
                    a += 1
                else:
                    room[k] = sequence[b]
                    b += 1
        copy(sequence, room)
        length *= 2
