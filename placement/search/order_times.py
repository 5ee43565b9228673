"""When each operator of a sequence runs: numba kernels of ``order_search``.

A *sequence* is an order of all operators in which producers come before consumers. With a
placement it says everything: every device runs its operators in that order and every channel
sends in that order, so one pass over the sequence gives the timetable, as exact as the
simulator's (``timetable``) and ten times as fast, because nothing has to be put in order. A move
changes nothing before the first operator that it concerns, so the pass begins there, at the
last *row* that was noted of devices and channels; and behind the last one that it concerns the
tails of what was kept still hold, so most of what will be refused is known to be soon.

Where times depend on what else happens meanwhile (operators slow each other down, receivers are
woken, channels are shared) the simulator plays the sequence instead, from its beginning.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import numpy as np

from placement.simulator import kernels
from placement.tools.jit import copy, inlined, kernel, largest

NEVER = 1e30  # instead of inf, which has no logarithm: where a link is missing


@kernel
def timetable(t, s, first, moved, limit):
    """Latency in seconds of ``s.place`` in ``s.sequence``; ``NEVER`` where it is above ``limit``.

    Operators at positions below ``first`` (-1: and model inputs) do as they did in what was kept;
    those beyond ``moved`` are who and where they were. Fills ``try_start_s``, ... from
    ``s.begun`` on, up to where the limit is known to be passed.
    """
    if t.simulated:
        return _simulate(t, s)
    edge_ptr, edge_tensor, edge_dst = t.edge_ptr, t.edge_tensor, t.edge_dst
    edge_in, in_ptr, in_src = t.edge_in, t.in_ptr, t.in_src
    latency_s, s_per_byte = t.problem.link_latency_s, t.problem.link_s_per_byte
    channel, local, matrix, contention = t.channel, t.local, t.problem.transfer_s, t.contention
    place, sequence = s.place, s.sequence
    start_s, end_s, waited = s.try_start_s, s.try_end_s, s.try_waited
    free_s, last, sent, sent_s = s.free_s, s.last, s.sent, s.sent_s
    arrival_s, after_s = s.try_arrival_s, s.after_s
    n, num_devices = t.compute_s.shape
    width = np.uint64(num_devices)
    has_matrix = len(matrix) > 0
    every = _between_rows(s)
    limit *= 1.0 + 1e-12  # tails are added up in another order
    begin = -1
    if first < 0:
        free_s[:] = 0.0
        last[:] = -1
    else:
        begin = first // every * every
        copy(free_s, s.row_s[0, first // every])
        copy(last, s.row_last[0, first // every])
    noted = max(begin, 0)
    was_s, pending = s.arrival_s, 0
    s.begun = begin
    sent[:] = -1
    # Unsigned indices, here and below, spare numba's test for negative ones: a third of the pass.
    for k in range(begin, n):
        if k < 0:  # model inputs
            op, src, now = np.uint64(n), np.uint64(num_devices), 0.0
        else:
            if k == noted:
                if k > begin:
                    if k > moved and pending == 0 and _same(s, k // every):
                        s.ended = k
                        return s.cost_s
                    copy(s.row_s[1, k // every], free_s)
                    copy(s.row_last[1, k // every], last)
                noted += every
            op = np.uint64(sequence[k])
            src = np.uint64(place[op])
            now, waits_for = 0.0, -1
            for m in range(in_ptr[op], in_ptr[op + 1]):
                there_s = arrival_s[m]
                pending -= there_s != was_s[m]
                if there_s > now:
                    now, waits_for = there_s, m
            if waits_for >= 0:
                waits_for = in_src[waits_for]
                if waits_for == n:
                    waits_for = -1
            if free_s[src] > now or waits_for < 0:
                now = max(now, free_s[src])
                waits_for = last[src]
            start_s[op] = now
            waited[op] = waits_for
            now += t.compute_s[op, src]
            end_s[op] = now
            free_s[src] = now
            last[src] = op
            if now + (after_s[op] if k > moved else 0.0) > limit:
                s.ended = k
                return NEVER
        for e in range(edge_ptr[op], edge_ptr[op + 1]):
            dst = np.uint64(place[np.uint64(edge_dst[e])])
            pair = src * width + dst
            c = np.uint64(channel[pair])
            there_s = now
            if c != np.uint64(local):
                tensor = edge_tensor[e]
                if sent[dst] != tensor:
                    if has_matrix:
                        row = np.uint64(tensor) * (width + np.uint64(1)) + src
                        cost = matrix[row * width + dst]
                    else:
                        cost = latency_s[pair] + t.edge_bytes[e] * s_per_byte[pair]
                    if contention:
                        there_s = max(now, free_s[width + c])
                    there_s += cost
                    free_s[width + c] = there_s
                    sent_s[dst] = there_s
                    sent[dst] = tensor
                there_s = sent_s[dst]
            slot = np.uint64(edge_in[e])
            arrival_s[slot] = there_s
            pending += there_s != was_s[slot]
    s.ended = n
    return min(free_s[largest(free_s, num_devices)], NEVER)


@kernel
def _simulate(t, s):
    """As ``timetable``, of everything, by the simulator."""
    run, n, num_devices = s.run, len(s.place), len(s.load)
    s.begun, s.ended = -1, n
    copy(run.placement, s.place)
    at, last, free_s = s.sent, s.last, s.free_s
    run.order_ptr[:] = 0
    for i in range(n):
        run.order_ptr[s.place[i] + 1] += 1
    for d in range(num_devices):
        at[d] = run.order_ptr[d]
        run.order_ptr[d + 1] += at[d]
        last[d], free_s[d] = -1, 0.0
    for k in range(n):
        d = s.place[s.sequence[k]]
        run.order[at[d], 0] = s.sequence[k]
        at[d] += 1
    if not np.isfinite(kernels.durations(t.problem, run)) or kernels.run(t.problem, run) != 0:
        for i in range(n):  # an operator cannot run there, or a link is missing
            d = s.place[i]
            s.try_waited[i], s.try_start_s[i], s.try_end_s[i] = -1, 0.0, t.compute_s[i, d]
            last[d], free_s[d] = i, NEVER
        return NEVER
    for k in range(n):
        i = s.sequence[k]
        d, waits_for, latest_s = s.place[i], np.int64(last[s.place[i]]), -1.0
        start_s = run.start[0, i]
        if waits_for < 0 or start_s <= run.arrival[i]:
            for m in range(t.in_ptr[i], t.in_ptr[i + 1]):
                src = t.in_src[m]
                if src < n:
                    there_s = run.end[0, src]
                    if s.place[src] != d:
                        there_s += sending_s(t, t.in_edge[m], s.place[src], d)
                    if there_s > latest_s:
                        latest_s, waits_for = there_s, src
        s.try_waited[i] = waits_for
        s.try_start_s[i], s.try_end_s[i] = start_s, run.end[0, i]
        s.try_hand_s[i] = run.released[0, i] - run.end[0, i]
        last[d], free_s[d] = i, run.end[0, i]
    return min(free_s[largest(free_s, num_devices)], NEVER)


@inlined
def _same(s, row):
    """Devices and channels are as they were kept at this row."""
    same = True
    for i in range(len(s.free_s)):
        same &= s.free_s[i] == s.row_s[0, row, i]
    for d in range(len(s.last)):
        same &= s.last[d] == s.row_last[0, row, d]
    return same


@inlined
def _between_rows(s):
    """Positions from one row to the next."""
    rows = s.row_s.shape[1]
    return (len(s.sequence) + rows - 1) // rows


@inlined
def sending_s(t, e, src, dst):
    """Seconds of delivery ``e`` when the channel is free; ``src = D``: a model input."""
    num_devices = t.compute_s.shape[1]
    pair = src * num_devices + dst
    if t.channel[pair] == t.local:
        return 0.0
    k = t.problem
    if len(k.transfer_s) > 0:
        return k.transfer_s[(t.edge_tensor[e] * (num_devices + 1) + src) * num_devices + dst]
    return k.link_latency_s[pair] + t.edge_bytes[e] * k.link_s_per_byte[pair]


@kernel
def forget(t, s):
    """What was tried last is not kept."""
    for k in range(s.begun, s.ended):
        op = s.sequence[k] if k >= 0 else len(s.sequence)
        for e in range(t.edge_ptr[op], t.edge_ptr[op + 1]):
            s.try_arrival_s[t.edge_in[e]] = s.arrival_s[t.edge_in[e]]


@kernel
def keep(t, s):
    """Keep what was tried last: its times, and the critical chain."""
    n, num_devices = t.compute_s.shape
    sequence, edge_ptr, edge_in = s.sequence, t.edge_ptr, t.edge_in
    begin, ended = s.begun, s.ended
    for k in range(begin, ended):
        op = np.uint64(n)
        if k >= 0:
            op = np.uint64(sequence[k])
            s.start_s[op], s.end_s[op] = s.try_start_s[op], s.try_end_s[op]
            s.waited[op], s.hand_s[op] = s.try_waited[op], s.try_hand_s[op]
        for e in range(edge_ptr[op], edge_ptr[op + 1]):
            m = np.uint64(edge_in[e])
            s.arrival_s[m] = s.try_arrival_s[m]
    every = _between_rows(s)
    for row in range(begin // every + 1, (ended + every - 1) // every):
        copy(s.row_s[0, row], s.row_s[1, row])
        copy(s.row_last[0, row], s.row_last[1, row])
    for k in range(s.num_chain):
        s.on_chain[s.chain[k]] = False
    # Where nothing changes from ``ended`` on, what ends last is who it was.
    op, count = s.chain[0] if ended < n else s.last[largest(s.free_s, num_devices)], 0
    while op >= 0:
        s.chain[count] = op
        s.on_chain[op] = True
        count += 1
        op = s.waited[op]
    s.num_chain = count


@kernel
def line_up(t, s):
    """Fill the lanes, and loads."""
    n, num_devices = t.compute_s.shape
    place, sequence = s.place, s.sequence
    lane_ptr, lane, in_lane, load = s.lane_ptr, s.lane, s.in_lane, s.load
    load[:] = 0.0
    lane_ptr[:] = 0
    for i in range(n):
        d = place[i]
        lane_ptr[d + 1] += 1
        load[d] += t.compute_s[i, d]
    at = s.sent
    for d in range(num_devices):
        at[d] = lane_ptr[d]
        lane_ptr[d + 1] += lane_ptr[d]
    for k in range(n):
        i = sequence[k]
        d = place[i]
        lane[at[d]] = i
        in_lane[i] = at[d]
        at[d] += 1


@kernel
def fill_tails(t, s, moved):
    """Compute tails that are stale, and those that hang on one that changes.

    None is at a position beyond ``moved``.
    """
    width = np.uint64(t.compute_s.shape[1])
    place, sequence = s.place, s.sequence
    lane_ptr, lane, in_lane = s.lane_ptr, s.lane, s.in_lane
    edge_ptr, edge_tensor, edge_dst = t.edge_ptr, t.edge_tensor, t.edge_dst
    latency_s, s_per_byte = t.problem.link_latency_s, t.problem.link_s_per_byte
    channel, local, matrix = t.channel, t.local, t.problem.transfer_s
    has_matrix = len(matrix) > 0
    from_s, stale = s.from_s, s.stale
    for k in range(moved, -1, -1):
        i = np.uint64(sequence[k])
        if not stale[i]:
            continue
        stale[i] = False
        d = np.uint64(place[i])
        path = 0.0
        for e in range(edge_ptr[i], edge_ptr[i + 1]):  # as ``users_s``, at twice its pace
            user = np.uint64(edge_dst[e])
            after = from_s[user]
            dst = np.uint64(place[user])
            pair = d * width + dst
            if channel[pair] != local:
                if has_matrix:
                    row = np.uint64(edge_tensor[e]) * (width + np.uint64(1)) + d
                    after += matrix[row * width + dst]
                else:
                    after += latency_s[pair] + t.edge_bytes[e] * s_per_byte[pair]
            path = max(path, after)
        s.users_s[i] = path
        if in_lane[i] + 1 < lane_ptr[d + 1]:
            path = max(path, s.hand_s[i] + from_s[lane[in_lane[i] + 1]])
        s.after_s[i] = path
        path += s.end_s[i] - s.start_s[i] if t.simulated else t.compute_s[i, d]
        if path != from_s[i]:
            from_s[i] = path
            pass_on(t, s, i, d)


@inlined
def pass_on(t, s, i, d):
    """The tails of those before ``i``, in the graph and on ``d``, are to be computed."""
    for m in range(t.in_ptr[i], t.in_ptr[i + 1]):
        s.stale[t.in_src[m]] = True
    if s.in_lane[i] > s.lane_ptr[d]:
        s.stale[s.lane[s.in_lane[i] - 1]] = True


@kernel
def put_in_order(t, s):
    """Put the sequence in order of time, which changes no time, and look at it anew."""
    sequence, when = s.sequence, s.finish_s
    n = len(sequence)
    copy(when, s.start_s)
    if len(s.free_s) == t.compute_s.shape[1]:  # no channel: the middle of when each could begin
        for i in range(n):
            when[i] -= s.from_s[i]
    for k in range(1, n):  # nearly sorted: by insertion, equal times stay as they stand
        op, place_of = sequence[k], k
        while place_of > 0 and when[sequence[place_of - 1]] > when[op]:
            sequence[place_of] = sequence[place_of - 1]
            place_of -= 1
        sequence[place_of] = op
    return evaluate(t, s)


@kernel
def evaluate(t, s):
    """Evaluate ``s.place`` in ``s.sequence`` as if nothing had been kept."""
    n = len(s.sequence)
    for k in range(n):
        s.position[s.sequence[k]] = k
    cost = timetable(t, s, np.int64(-1), np.int64(n), np.inf)
    keep(t, s)
    line_up(t, s)
    s.stale[:] = True
    fill_tails(t, s, np.int64(n - 1))
    return cost
