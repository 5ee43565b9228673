"""Parameters of devices that stream, in a simulated run: ``placement.buffer`` as numba kernels."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from placement.buffer import CALLS, NOT_LONGER
from placement.tools.jit import inlined, kernel

FAR = 1e300  # later than any event


@kernel
def begin_copies(t, s):
    """Nothing is copied yet; which operators each device streams, and in which order."""
    n = len(t.priority)
    s.streams, s.num_copied, s.round_s = False, 0, 0.0
    s.num_coming[:] = 0
    s.first_coming[:] = 0
    for i in range(len(s.streamed)):
        k = t.twin[s.placement[i]]
        s.streamed[i] = k if k >= 0 and t.copied_bytes[i % n] > 0 else -1
        s.streams |= s.streamed[i] >= 0
    if s.alone:
        s.num_batches = CALLS if s.streams else 1
    for k in range(len(t.twin_worker)):
        s.num_uses[k] = s.num_there[k] = s.first_there[k] = s.turn[k] = s.end_bytes[k] = 0
        s.wanted[k], s.copier_s[k] = -1, 0.0
        for i in range(n):
            s.turn_of[k * n + i] = s.there[k * n + i] = -1
            s.promised[k * n + i] = False
        d = t.twin_worker[k]
        if len(s.order) > 0:
            for entry in range(s.order_ptr[d], s.order_ptr[d + 1]):
                _use(s, k, np.int64(s.order[entry, 0]), n)
        else:
            for i in range(n):
                _use(s, k, np.int64(t.by_priority[i]), n)
        most, total, total_s = 0, 0, 0.0
        for u in range(s.num_uses[k]):
            op = s.use[k * n + u]
            most = max(most, t.copied_bytes[op])
            total += t.copied_bytes[op]
            total_s += t.copy_s[k * n + op]
        s.room[k] = t.buffer_bytes[k] if t.buffer_bytes[k] > 0 else 2 * most
        if total > s.room[k] and s.window == 1 and len(s.placement) == n:
            s.round_s = max(s.round_s, total_s)
        if s.num_uses[k] > 0:
            launch(t, s, k)


@kernel
def _use(s, k, op, n):
    """``op`` is next in the order of use, if device ``k`` streams it in any phase."""
    if s.turn_of[k * n + op] >= 0:
        return
    for at in range(op, len(s.streamed), n):
        if s.streamed[at] == k:
            s.turn_of[k * n + op] = s.num_uses[k]
            s.use[k * n + s.num_uses[k]] = op
            s.num_uses[k] += 1
            return


@kernel
def take(t, s, op, slot):
    """A device takes ``op``: when its parameters are there; it is not known yet: ``FAR``."""
    k = np.int64(s.streamed[s.row[slot] + op])
    at = k * len(t.priority) + op
    if s.there[at] < 0:
        s.wanted[k] = op
    s.promised[at] = True
    launch(t, s, k)
    return s.here_s[at]


@kernel
def give_back(t, s, k, op):
    """What ``op`` read may be overwritten."""
    s.promised[k * len(t.priority) + op] = False
    launch(t, s, k)


@kernel
def _next(s, k, n):
    """The first operator in turn that is not there; -1: all are."""
    while True:
        op = np.int64(s.use[k * n + s.turn[k]])
        if s.there[k * n + op] < 0:
            return op
        if s.promised[k * n + op]:
            return np.int64(-1)
        s.promised[k * n + op] = True
        s.turn[k] = (s.turn[k] + 1) % s.num_uses[k]


@kernel
def _has_room(s, k, n, least):
    """Whether nothing is promised of what lies before ``least``."""
    for i in range(s.num_there[k]):
        at = k * n + s.oldest[k * n + (s.first_there[k] + i) % n]
        if s.there[at] >= least:
            break
        if s.promised[at]:
            return False
    return True


@kernel
def launch(t, s, k):
    """All copies that may begin, as far as is known, wait for their turn on the link."""
    n, room = len(t.priority), s.room[k]
    while True:
        op = s.wanted[k] if s.wanted[k] >= 0 else _next(s, k, n)
        if op < 0:
            return
        begin, size = s.end_bytes[k], t.copied_bytes[op]
        if begin % room + size > room:
            begin += room - begin % room
        least = begin + size - room
        if s.wanted[k] < 0 and not _has_room(s, k, n, least):
            return
        while s.num_there[k] > 0:
            at = k * n + s.oldest[k * n + s.first_there[k]]
            if s.there[at] >= least:
                break
            s.there[at], s.promised[at] = -1, False
            s.first_there[k] = (s.first_there[k] + 1) % n
            s.num_there[k] -= 1
        at = k * n + op
        s.oldest[k * n + (s.first_there[k] + s.num_there[k]) % n] = op
        s.num_there[k] += 1
        s.there[at], s.promised[at], s.wanted[k] = begin, True, -1
        s.end_bytes[k], s.here_s[at] = begin + size, FAR
        s.turn[k] = (s.turn_of[at] + 1) % s.num_uses[k]
        # What was overwritten before it came is at most all but one, before the one wanted.
        last = 2 * k * n + (s.first_coming[k] + s.num_coming[k]) % (2 * n)
        s.coming[last], s.coming_to[last] = op, begin
        s.num_coming[k] += 1


@kernel
def copy(t, s):
    """Parameters begin to come, where nothing else does."""
    n, now = len(t.priority), s.now
    for k in range(len(t.twin_worker)):
        while s.num_coming[k] > 0 and s.copier_s[k] <= now:
            first = 2 * k * n + s.first_coming[k]
            op, to = np.int64(s.coming[first]), s.coming_to[first]
            s.first_coming[k] = (s.first_coming[k] + 1) % (2 * n)
            s.num_coming[k] -= 1
            at, channel, d = k * n + op, t.copy_channel[k], t.twin_worker[k]
            begin_s = max(now, s.channel_s[channel]) if t.contention else now
            here_s = begin_s + t.copy_s[at]
            s.channel_s[channel] = s.copier_s[k] = here_s
            if s.num_copied < len(s.copies):
                s.copies[s.num_copied, 0], s.copies[s.num_copied, 1] = op, k
                s.copy_start[s.num_copied], s.copy_end[s.num_copied] = begin_s, here_s
            s.num_copied += 1
            if s.there[at] != to:
                continue  # it is overwritten, and comes again
            s.here_s[at] = here_s
            if s.reserved[d] == op:
                s.wake_s[d] = here_s


@kernel
def end_call(t, s, batch):
    """A call has ended: it is the last if what is in the buffers is where it was after the first.

    What was computed in it is kept.
    """
    n, again = len(t.priority), batch > 0
    for k in range(len(t.twin_worker)):
        if s.num_uses[k] > 0:
            at = s.end_bytes[k] % s.room[k], s.turn[k]
            if batch == 0:
                s.first_end[k], s.first_turn[k] = at
            again &= s.first_end[k] == at[0] and s.first_turn[k] == at[1]
    if again:
        s.to_do -= n * (s.num_batches - batch - 1)
        s.num_batches = batch + 1
    num_devices = len(s.busy)
    for d in range(num_devices):
        s.busy_in[batch * num_devices + d] = s.busy[d]
        s.busy[d] = 0.0


@kernel
def mean_call(s):
    """Seconds of a call of those after the first; devices were busy as in the one that is shown."""
    last = s.num_batches - 1
    mean_s = (s.finish[last] - s.finish[0]) / last
    shown, longest_s = 1, -1.0
    for m in range(1, last + 1):
        took_s = s.finish[m] - s.finish[m - 1]
        if longest_s < took_s <= mean_s * NOT_LONGER:
            shown, longest_s = m, took_s
    num_devices = len(s.busy)
    for d in range(num_devices):
        s.busy[d] = s.busy_in[shown * num_devices + d]
    return max(mean_s, s.round_s)


@inlined
def next_copy_s(s):
    """When the next copy ends."""
    soon_s = FAR
    for k in range(len(s.copier_s)):
        if s.copier_s[k] > s.now:
            soon_s = min(soon_s, s.copier_s[k])
    return soon_s
