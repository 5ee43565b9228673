"""Parameters of devices that stream, in a simulated run: ``placement.buffer`` as numba kernels."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from placement.tools.jit import inlined, kernel

FAR = 1e300  # later than any event


@kernel
def begin_copies(t, s):
    """Nothing is copied yet; which operators each device streams, and in which order."""
    n = len(t.priority)
    s.streams, s.num_copied, s.round_s = False, 0, 0.0
    for i in range(len(s.streamed)):
        k = t.twin[s.placement[i]]
        s.streamed[i] = k if k >= 0 and t.copied_bytes[i % n] > 0 else -1
        s.streams |= s.streamed[i] >= 0
    if s.alone:
        s.num_batches = 2 if s.streams else 1
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
        return FAR
    s.promised[at] = True
    return s.here_s[at]


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
def copy(t, s):
    """Parameters begin to come, where nothing else does and there is room."""
    n, now = len(t.priority), s.now
    for k in range(len(t.twin_worker)):
        while s.num_uses[k] > 0 and s.copier_s[k] <= now:
            op = s.wanted[k] if s.wanted[k] >= 0 else _next(s, k, n)
            if op < 0:
                break
            begin, room, size = s.end_bytes[k], s.room[k], t.copied_bytes[op]
            if begin % room + size > room:
                begin += room - begin % room
            least = begin + size - room
            if s.wanted[k] < 0 and not _has_room(s, k, n, least):
                break
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
            s.end_bytes[k] = begin + size
            s.turn[k] = (s.turn_of[at] + 1) % s.num_uses[k]
            channel, d = t.copy_channel[k], t.twin_worker[k]
            begin_s = max(now, s.channel_s[channel]) if t.contention else now
            here_s = begin_s + t.copy_s[at]
            s.channel_s[channel] = s.copier_s[k] = s.here_s[at] = here_s
            if s.num_copied < len(s.copies):
                s.copies[s.num_copied, 0], s.copies[s.num_copied, 1] = op, k
                s.copy_start[s.num_copied], s.copy_end[s.num_copied] = begin_s, here_s
            s.num_copied += 1
            if s.reserved[d] == op:
                s.wake_s[d] = here_s
                s.soon_s[d >> 6] = min(s.soon_s[d >> 6], here_s)


@inlined
def next_copy_s(s):
    """When the next copy ends."""
    soon_s = FAR
    for k in range(len(s.copier_s)):
        if s.copier_s[k] > s.now:
            soon_s = min(soon_s, s.copier_s[k])
    return soon_s
