"""Numba kernels of the list-scheduling planners: what may go where, when, and the first gap.

Intervals of each device are kept in two linked lists, by number of the operator that began them:
list 0 has every operator that takes time, list 1 those without a gap between them as one. -1
ends a list, and stands for no device and no operator.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.tools.jit import Struct, allocating, array, kernel

Array = NDArray[Any]
_OPERATORS, _TOUCHING = range(2)


class Tables(Struct):
    """The problem."""

    group: Array  # int32 [N]
    in_ptr: Array  # int32 [N + 1]
    in_tensor: Array  # int32
    user_ptr: Array  # int64 [N + 1] into user
    user: Array  # int32 consumers of each operator
    tensor_src: Array  # int32 [T]
    tensor_bytes: Array  # float64 [T]
    compute_s: Array  # float64 [N, D]
    group_s: Array  # float64 [G, D]
    latency_s: Array  # float64 [D, D]
    s_per_byte: Array  # float64 [D, D]
    matrix_s: Array  # float64 [T, D, D], or [0, 0, 0]: latency and bandwidth
    host: int
    shares_host: Array  # bool [D]
    may_bind: bool  # whether bytes need be counted
    capacity: Array  # int64 [D]
    param_ptr: Array  # int64 [G + 1] into param
    param: Array  # int64 distinct parameters of each group
    param_bytes: Array  # int64 [P]
    produced: Array  # int64 [G] bytes of activations
    channel: Array  # int32 [D, D]
    busy: bool  # whether transfers wait for their channel


class State(Struct):
    """What is placed so far."""

    choice: Array = array("G", np.int32, -1)
    finish_s: Array = array("N")
    free_s: Array = array("D")
    used: Array = array("D", np.int64)
    missing: Array = array("D, P", np.bool_, True)  # parameters that a device does not hold
    head: Array = array("2, D", np.int32, -1)
    tail: Array = array("2, D", np.int32, -1)
    begin_s: Array = array("2, N")
    end_s: Array = array("2, N")
    before: Array = array("2, N", np.int32)
    after: Array = array("2, N", np.int32)
    channel_s: Array = array("channels")  # when each is free, if transfers wait
    arrival_s: Array = array("T, D", value=-1.0)  # when a tensor is there, -1: not sent


@kernel
def transfer_s(t, tensor, src, dst):
    if src == dst:
        return 0.0
    if len(t.matrix_s):
        return t.matrix_s[tensor, src, dst]
    return t.latency_s[src, dst] + t.tensor_bytes[tensor] * t.s_per_byte[src, dst]


@kernel
def fill_ready(t, s, op, ready):
    """When the last input of ``op`` is on each device, float64 ``[D]``."""
    ready[:] = 0.0
    for i in range(t.in_ptr[op], t.in_ptr[op + 1]):
        tensor = t.in_tensor[i]
        src = t.tensor_src[tensor]
        home = t.host if src < 0 else s.choice[t.group[src]]
        made_s = 0.0 if src < 0 else s.finish_s[src]
        for d in range(len(ready)):
            if src >= 0 or not t.shares_host[d]:
                ready[d] = max(ready[d], _arrives(t, s, tensor, home, d, made_s))


@kernel
def _arrives(t, s, tensor, home, d, made_s):
    """When ``tensor`` is on ``d``, or would be if it was sent next."""
    if t.busy and home != d:
        if s.arrival_s[tensor, d] >= 0.0:
            return s.arrival_s[tensor, d]
        made_s = max(made_s, s.channel_s[t.channel[home, d]])
    return made_s + transfer_s(t, tensor, home, d)


@kernel
def _send(t, s, op, device):
    """Send what ``op`` needs on ``device`` and is not there."""
    for i in range(t.in_ptr[op], t.in_ptr[op + 1]):
        tensor = t.in_tensor[i]
        src = t.tensor_src[tensor]
        if src >= 0 and s.choice[t.group[src]] != device and s.arrival_s[tensor, device] < 0.0:
            home = s.choice[t.group[src]]
            there_s = _arrives(t, s, tensor, home, device, s.finish_s[src])
            s.arrival_s[tensor, device] = there_s
            s.channel_s[t.channel[home, device]] = there_s


@kernel
def need(t, s, group, device):
    """Bytes on ``device`` if ``group`` went there too."""
    total = s.used[device] + t.produced[group]
    for i in range(t.param_ptr[group], t.param_ptr[group + 1]):
        if s.missing[device, t.param[i]]:
            total += t.param_bytes[t.param[i]]
    return total


@kernel
def fill_able(t, s, group, able):
    """Where ``group`` may go: where it is, or wherever it can run, with room if any has room."""
    room = False
    for d in range(len(able)):
        able[d] = np.isfinite(t.group_s[group, d])
        if s.choice[group] >= 0:
            able[d] = d == s.choice[group]
        elif able[d] and t.may_bind:
            room |= need(t, s, group, d) <= t.capacity[d]
    if room:
        for d in range(len(able)):
            able[d] &= need(t, s, group, d) <= t.capacity[d]


@kernel
def gap(t, s, op, device, start):
    """The earliest time from ``start`` at which ``device`` is idle for as long as ``op`` takes."""
    length = t.compute_s[op, device]
    if start >= s.free_s[device]:
        return start
    # What takes no time fits between two intervals that touch, anything else does not.
    which = _TOUCHING if length > 0.0 else _OPERATORS
    head = s.head[which, device]
    if head < 0 or s.begin_s[which, head] >= start + length:
        return start
    then, node = -1, s.tail[which, device]
    while node >= 0 and s.end_s[which, node] > start:
        then, node = node, s.before[which, node]
    while then >= 0 and s.begin_s[which, then] < start + length:
        start = max(start, s.end_s[which, then])
        then = s.after[which, then]
    return start


@kernel
def _join(s, which, device, left, right):
    """``right`` comes next after ``left`` in a list; -1: the list begins, or ends, there."""
    if left >= 0:
        s.after[which, left] = right
    else:
        s.head[which, device] = right
    if right >= 0:
        s.before[which, right] = left
    else:
        s.tail[which, device] = left


@kernel
def _occupy(s, which, device, op, start, end):
    """Add an interval to a list, in order of begin."""
    right, left = np.int64(-1), np.int64(s.tail[which, device])
    while left >= 0 and s.begin_s[which, left] > start:
        right, left = left, np.int64(s.before[which, left])
    s.begin_s[which, op], s.end_s[which, op] = start, end
    _join(s, which, device, left, op)
    _join(s, which, device, op, right)
    if which == _OPERATORS:
        return
    if right >= 0 and s.begin_s[which, right] == end:
        s.end_s[which, op] = s.end_s[which, right]
        _join(s, which, device, op, np.int64(s.after[which, right]))
    if left >= 0 and s.end_s[which, left] == start:
        s.begin_s[which, op] = s.begin_s[which, left]
        _join(s, which, device, np.int64(s.before[which, left]), op)


@kernel
def hold(t, s, group, device):
    """``group`` is on ``device`` from now on."""
    if t.may_bind:
        s.used[device] = need(t, s, group, device)
        for i in range(t.param_ptr[group], t.param_ptr[group + 1]):
            s.missing[device, t.param[i]] = False
    s.choice[group] = device


@kernel
def place(t, s, op, device, start):
    """Run ``op`` on ``device`` from ``start``, and fix its group there."""
    if s.choice[t.group[op]] < 0:
        hold(t, s, t.group[op], device)
    end = start + t.compute_s[op, device]
    s.finish_s[op] = end
    s.free_s[device] = max(s.free_s[device], end)
    if end > start:  # what takes no time occupies nothing
        for which in range(2):
            _occupy(s, which, device, op, start, end)


@kernel
def _reach(t, s, op, device, start):
    """What to compare devices by: the end of ``op`` there, or of its whole group.

    Where ``op`` is the first of its group, the seconds of the others follow it: they will have
    to run on the same device.
    """
    group = t.group[op]
    return start + (t.group_s[group, device] if s.choice[group] < 0 else t.compute_s[op, device])


@allocating
def place_in_order(t, s, order, extra_s, device_of):
    """Place operators ``order`` one by one, each in the earliest gap.

    Each goes where ``reach`` plus ``extra_s`` float64 ``[N, D]`` is least, or to the device
    ``device_of`` int64 ``[N]`` where it may go there.
    """
    ready = np.empty(len(s.free_s))
    able = np.empty(len(s.free_s), np.bool_)
    for op in order:
        fill_ready(t, s, op, ready)
        fill_able(t, s, t.group[op], able)
        best, least, begin = device_of[op], np.inf, 0.0
        if best >= 0 and able[best]:
            begin = gap(t, s, op, best, ready[best])
        else:
            for d in range(len(able)):
                if able[d]:
                    start = gap(t, s, op, d, ready[d])
                    reach = _reach(t, s, op, d, start) + extra_s[op, d]
                    if reach < least:
                        best, least, begin = d, reach, start
        if t.busy:
            _send(t, s, op, best)
        place(t, s, op, best, begin)


@kernel
def _everywhere(t, op, ready):
    """When the inputs of ``op`` are on every device that can run its group."""
    last = 0.0
    for d in range(len(ready)):
        if np.isfinite(t.group_s[t.group[op], d]):
            last = max(last, ready[d])
    return last


@allocating
def place_first_to_start(t, s, rank_s, favourite):
    """Place all operators, each time the one that can start first, where it can (no gaps).

    Of equal starts the highest ``rank_s`` float64 ``[N]`` wins. A device waits for the
    ``favourite`` int32 ``[N]`` consumer of what it ran last, if it has one: until that is
    placed, another operator gets the device only when its inputs have arrived wherever it may
    run.
    """
    num_ops, num_devices = t.compute_s.shape
    missing = np.zeros(num_ops, np.int64)
    for op in t.user:
        missing[op] += 1
    arrive_s = np.zeros((num_ops, num_devices))  # when the inputs are on a device
    everywhere_s = np.zeros(num_ops)
    awaited = np.full(num_devices, -1)
    able = np.empty(num_devices, np.bool_)
    rows, count = np.empty(num_ops, np.int64), 0
    for op in range(num_ops):
        if missing[op] == 0:
            fill_ready(t, s, op, arrive_s[op])
            everywhere_s[op] = _everywhere(t, op, arrive_s[op])
            rows[count] = op
            count += 1
    while count:
        at, first_s = -1, np.inf
        for i in range(count):
            op, fixed = rows[i], s.choice[t.group[rows[i]]]
            start_s = np.inf
            for d in range(num_devices):
                if fixed == d or (fixed < 0 and np.isfinite(t.group_s[t.group[op], d])):
                    here = max(arrive_s[op, d], s.free_s[d])
                    if fixed < 0 and awaited[d] >= 0 and awaited[d] != op:
                        here = max(here, everywhere_s[op])
                    start_s = min(start_s, here)
            if at >= 0 and start_s == first_s:
                other = rows[at]
                first = rank_s[op] > rank_s[other] or (rank_s[op] == rank_s[other] and op < other)
            else:
                first = start_s < first_s
            if first:
                at, first_s = i, start_s
        op = rows[at]
        fixed = s.choice[t.group[op]]
        # What has no room where it could start first is looked at now that it is chosen.
        fill_able(t, s, t.group[op], able)
        device, first_s, least = -1, np.inf, np.inf
        for d in range(num_devices):
            if able[d]:
                here = max(arrive_s[op, d], s.free_s[d])
                if fixed < 0 and awaited[d] >= 0 and awaited[d] != op:
                    here = max(here, everywhere_s[op])
                reach = _reach(t, s, op, d, here)
                if here < first_s or (here == first_s and reach < least):
                    device, first_s, least = d, here, reach
        place(t, s, op, np.int64(device), first_s)
        count -= 1
        rows[at] = rows[count]
        for d in range(num_devices):
            if awaited[d] == op:
                awaited[d] = -1
        child = favourite[op]
        free = child >= 0 and (s.choice[t.group[child]] in (-1, device))
        awaited[device] = child if free else -1
        for i in range(t.user_ptr[op], t.user_ptr[op + 1]):
            user = np.int64(t.user[i])
            missing[user] -= 1
            if missing[user] == 0:
                fill_ready(t, s, user, arrive_s[user])
                everywhere_s[user] = _everywhere(t, user, arrive_s[user])
                rows[count] = user
                count += 1


@allocating
def balance_levels(t, s, order, level, team):
    """Give groups to devices so that the load of each level, compute and receiving, is even.

    ``order``: operators, level by level; the first of a group places it. ``team`` bool
    ``[L, D]``: the devices of each level; a group that none of them can run goes to any.
    """
    num_devices = len(s.free_s)
    able = np.empty(num_devices, np.bool_)
    load_s, total_s, cost_s = np.zeros((3, num_devices))
    current = -1
    for op in order:
        group = t.group[op]
        if s.choice[group] >= 0:
            continue
        if level[op] != current:
            load_s[:], current = 0.0, level[op]
        for d in range(num_devices):  # copies of arrays would compile for a second
            cost_s[d] = t.group_s[group, d]
        for i in range(t.in_ptr[op], t.in_ptr[op + 1]):
            tensor = t.in_tensor[i]
            src = t.tensor_src[tensor]
            if src >= 0:
                for d in range(num_devices):
                    cost_s[d] += transfer_s(t, tensor, np.int64(s.choice[t.group[src]]), d)
        fill_able(t, s, group, able)
        within = (able & team[current]).any()
        device, least, least_total = -1, np.inf, np.inf
        for d in range(num_devices):
            if able[d] and (team[current, d] or not within):
                here, all_here = load_s[d] + cost_s[d], total_s[d] + cost_s[d]
                if here < least or (here == least and all_here < least_total):
                    device, least, least_total = d, here, all_here
        hold(t, s, group, np.int64(device))
        load_s[device] += cost_s[device]
        total_s[device] += cost_s[device]
