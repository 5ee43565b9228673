"""Memory of a simulated run, counted by references while it goes on: numba kernels."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from placement.tools.jit import inlined, kernel

_LIVE = 1 << 30  # bit of a reference count: the bytes are counted as held


@kernel
def _push_event(s, time, key):
    """Insert into the binary min-heap of memory events."""
    times, keys = s.event_s, s.event
    i = s.num_events
    s.num_events += 1
    while i > 0:
        parent = (i - 1) >> 1
        if times[parent] <= time:
            break
        times[i] = times[parent]
        keys[i] = keys[parent]
        i = parent
    times[i] = time
    keys[i] = key


@kernel
def _pop_event(s):
    """Remove the earliest memory event and return its key."""
    times, keys = s.event_s, s.event
    top = keys[0]
    s.num_events -= 1
    size = s.num_events
    time, key = times[size], keys[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and times[child + 1] < times[child]:
            child += 1
        if times[child] >= time:
            break
        times[i] = times[child]
        keys[i] = keys[child]
        i = child
    times[i] = time
    keys[i] = key
    return top


@inlined
def _key(t, s, slot, tensor, device):
    """Where ``refs`` counts a stored tensor."""
    return np.uint64((slot * len(t.tensor_src) + tensor) * len(s.held) + device)


@kernel
def hold(t, s, slot, tensor, device, users):
    """``users`` more of a stored tensor, whose bytes count once."""
    key = _key(t, s, slot, tensor, device)
    count = s.refs[key] + users
    if count < _LIVE:
        count += _LIVE
        s.held[device] += t.tensor_bytes[tensor]
    s.refs[key] = count


@kernel
def release(t, s, slot, tensor, device, users):
    """``users`` less; the last one frees the bytes."""
    key = _key(t, s, slot, tensor, device)
    count = s.refs[key] - users
    if count == _LIVE:
        count = 0
        s.held[device] -= t.tensor_bytes[tensor]
    s.refs[key] = count


@kernel
def _num_users(t, s, slot, tensor, device):
    """How many operators on ``device`` use ``tensor``."""
    use_dst, placement, row = t.use_dst, s.placement, s.row[slot]
    count = 0
    for u in range(t.use_ptr[tensor], t.use_ptr[tensor + 1]):
        count += placement[row + use_dst[u]] == device
    return count


@kernel
def _stored(t, s, slot, tensor, device):
    """At home a tensor lives in its root's memory; a copy sent elsewhere is its own."""
    src = t.tensor_src[tensor]
    if src < 0 or s.placement[s.row[slot] + src] == device:
        return np.int64(t.tensor_root[tensor])
    return tensor


@kernel
def _push_transfer(s, time, slot, tensor, device, is_begin):
    """Remember that a transfer begins or ends at ``time``.

    The key holds what ``remember`` takes apart: from bit 39 on the tensor, then 24 bits of the
    slot, 14 of the device, and the lowest for a begin.
    """
    _push_event(s, time, (((np.int64(tensor) << 24) | slot) << 15 | device << 1) | is_begin)


@kernel
def hold_local(t, s, slot, tensor, device, is_input):
    """Memory, when a tensor is delivered where it is: one user more; a model input begins."""
    root = np.int64(t.tensor_root[tensor])
    if is_input:
        hold(t, s, slot, root, device, 1)
    else:
        s.refs[_key(t, s, slot, root, device)] += 1


@kernel
def hold_sent(t, s, slot, tensor, src, dst, begin, arrives_s):
    """Memory, when a tensor is sent: a copy there from its begin, its sender's until its end."""
    root, is_input = np.int64(t.tensor_root[tensor]), src == len(s.held)
    if begin > s.now:
        _push_transfer(s, begin, slot, tensor, dst, 1)
    else:
        stored = root if is_input else tensor
        hold(t, s, slot, stored, dst, _num_users(t, s, slot, tensor, dst))
    if not is_input:
        s.refs[_key(t, s, slot, root, src)] += 1
        _push_transfer(s, arrives_s, slot, root, src, 0)


@kernel
def free(t, s, op, d, slot):
    """Memory, when an operator ends: its workspace, its inputs, and outputs that nobody uses."""
    if len(t.workspace_bytes) > 0:
        s.held[d] -= t.workspace_bytes[op]
    for j in range(t.out_ptr[op], t.out_ptr[op + 1]):
        tensor = t.out_tensor[j]
        root = np.int64(t.tensor_root[tensor])
        release(t, s, slot, root, d, 1 - np.int64(t.output_count[tensor]))
    for j in range(t.in_ptr[op], t.in_ptr[op + 1]):
        release(t, s, slot, _stored(t, s, slot, np.int64(t.in_tensor[j]), d), d, 1)


@inlined
def _raise_peak(s):
    for d in range(len(s.peak)):
        s.peak[d] = max(s.peak[d], s.held[d])


@kernel
def remember(t, s, before):
    """Memory, when the clock has moved on from ``before``: transfers begin and end meanwhile.

    What is held when it moves is what counts: at equal times the order of allocations and frees
    does not matter.
    """
    while s.num_events > 0 and s.event_s[0] <= s.now:
        if s.event_s[0] > before:
            before = s.event_s[0]
            _raise_peak(s)
        code = _pop_event(s)
        tensor, slot, d = code >> 39, (code >> 15) & 0xFFFFFF, (code >> 1) & 0x3FFF
        stored = np.int64(t.tensor_root[tensor]) if t.tensor_src[tensor] < 0 else tensor
        if code & 1:
            hold(t, s, slot, stored, d, _num_users(t, s, slot, tensor, d))
        else:
            release(t, s, slot, stored, d, 1)
    if s.now > before:
        _raise_peak(s)
