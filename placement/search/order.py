"""Numba kernels of ``order_search``: where operators run and in which order, searched together.

A *sequence* is an order of all operators in which producers come before consumers. With a
placement it says everything: every device runs its operators in that order and every channel
sends in that order, so one pass over the sequence gives the timetable, as exact as the
simulator's (``timetable``) and ten times as fast, because nothing has to be put in order. A move
changes nothing before the first operator that it concerns, so the pass begins there, at the
last *row* that was noted of devices and channels; and behind the last one that it concerns the
tails of what was kept still hold, so most of what will be refused is known to be soon.

Where times depend on what else happens meanwhile (operators slow each other down, receivers are
woken, channels are shared) the simulator plays the sequence instead, from its beginning.

What a move would bring is estimated from heads and tails: the longest path to an operator, and
from it to the end, along the graph and along the devices (job shops: Taillard 1994, Balas and
Vazacopoulos 1998; with a choice of machines: Mastrolilli and Gambardella 2000).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np

from placement.search.chooser import choose, network
from placement.search.macro import below, uniform
from placement.simulator import kernels
from placement.tools.jit import Struct, array, average, copy, inlined, kernel, largest

Array = Any

POLICY, HAND, UNIFORM, TABU = range(4)  # who chooses
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
_SIMULATED = 10.0  # times that where the simulator tells times: estimates know less of them
_GAIN = -0.02  # estimates below say only that the path through the move is not the longest

_FROM_CHAIN = 0.8  # of the moves begin with an operator of the critical chain
_NEAR, _ANY = 0.35, 0.65  # cumulated: to a neighbour's device, to any; the rest: order only
_LATER, _EARLIER = 0.3, 0.5  # cumulated: some places off where inputs are there
_ALONE = 0.5  # of the moves to another device; others take neighbours along
_FAR = 2.5  # order only: log of how many places at most, beside one
# Tabu search: an operator rests for so many steps and up to so many more, unless a better best is
# estimated; after so many steps in vain it goes back to the best, and the next time later.
_REST, _REST_MORE, _IN_VAIN = 8.0, 12.0, 5000.0
_SORT_EVERY = 64  # moves kept, until the sequence is put in order of time again
_TRIES = 4
_HOPELESS = 12.0  # so much below the best score a move is chosen six times in a million
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
    BACK,  # times that a tabu search went back to the best
    BEGUN,  # position at which the pass that was tried last begins; -1: with the model inputs
    ENDED,  # and beyond the one where it ends
    NUM_X,
) = range(15)


class Tables(Struct):
    """One problem."""

    edge_ptr: Array  # int32 [N + 2] deliveries of each operator, by tensor; then of the inputs
    edge_tensor: Array  # int32
    edge_dst: Array  # int32
    edge_bytes: Array  # float64
    edge_in: Array  # int32 where each delivery stands among those to its user
    in_ptr: Array  # int32 [N + 1] deliveries to each operator
    in_edge: Array  # int32
    in_src: Array  # int32 who sends; N: a model input
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
    simulated: bool  # times depend on what else happens meanwhile: the simulator tells them
    problem: kernels.Tables


class State(Struct):
    """A search, and room to evaluate in."""

    random: Array = array("1", np.uint64, 1)
    x: Array = array("X")
    place: Array = array("N", np.int32)
    sequence: Array = array("N", np.int32)
    position: Array = array("N+1", np.int32, -1)  # of each in it; the last: -1, of model inputs
    best_place: Array = array("N", np.int32)
    best_sequence: Array = array("N", np.int32)
    start_s: Array = array("N")  # of what was kept last, as are the next
    end_s: Array = array("N")
    after_s: Array = array("N")  # longest path from the end of each to the end of all
    users_s: Array = array("N")  # the same through those that use its tensors
    from_s: Array = array("N")  # from its begin
    hand_s: Array = array("N")  # that its device hands over what it made; 0 if not simulated
    waited: Array = array("N", np.int32)  # whom each operator waited for; -1: nobody
    lane: Array = array("N", np.int32)  # operators of each device, in order
    lane_ptr: Array = array("D+1", np.int32)
    in_lane: Array = array("N", np.int32)  # where each operator is there
    load: Array = array("D")  # seconds of each device
    chain: Array = array("N", np.int32)  # the critical chain, the first NUM_CHAIN
    on_chain: Array = array("N", np.bool_)
    refused: Array = array("N, D", np.float32)
    moved: Array = array("N", np.int64)  # step of the last move
    arrival_s: Array = array("E")  # of what was kept, in the order of ``in_edge``
    row_s: Array = array("2, R, D+channels")  # when each is free, at R positions; the same
    row_last: Array = array("2, R, D", np.int32)  # operator that each device ran last there
    try_start_s: Array = array("N")  # of what was tried last, as are the next
    try_end_s: Array = array("N")
    try_hand_s: Array = array("N")
    try_waited: Array = array("N", np.int32)
    try_arrival_s: Array = array("E")  # as ``arrival_s`` when nothing is being tried
    mark: Array = array("N", np.bool_)  # scratch, False
    stale: Array = array("N+1", np.bool_)  # tails to be computed; the last: model inputs, False
    room: Array = array("N", np.int32)
    finish_s: Array = array("N")  # room of _together (mark and room too), _gather, _members
    free_s: Array = array("D+channels")  # when each is free
    last: Array = array("D", np.int32)  # operator that a device ran last
    sent: Array = array("D", np.int32)  # tensor that was sent to each last
    sent_s: Array = array("D")  # when it arrived
    drawn: Array = array("C+1, 5")  # what ``_propose`` returns of each move from latency on
    which: Array = array("C+1", np.int32, -1)  # operator that each move begins with; -1: no move
    group: Array = array("C+1", np.int32)  # its group
    to: Array = array("C+1", np.int32)  # device
    count: Array = array("C+1", np.int32)  # groups that move
    body: Array = array("C+1, L", np.int32)  # those groups
    at: Array = array("C+1", np.int32)  # before whom in the sequence; -1: where it is
    offered: Array = array("C+1, F", np.float32)
    search: Array = array("S", np.float32)
    logits: Array = array("C+1")
    run: kernels.State  # in an order that is given; of two operators where nothing is simulated


@kernel
def timetable(t, s, first, moved, limit):
    """Latency in seconds of ``s.place`` in ``s.sequence``; ``_NEVER`` where it is above ``limit``.

    Operators at positions below ``first`` (-1: and model inputs) do as they did in what was kept;
    those beyond ``moved`` are who and where they were. Fills ``try_start_s``, ... from
    ``x[BEGUN]`` on, up to where the limit is known to be passed.
    """
    if t.simulated:
        return _simulate(t, s)
    edge_ptr, edge_tensor, edge_dst = t.edge_ptr, t.edge_tensor, t.edge_dst
    edge_in, in_ptr, in_src = t.edge_in, t.in_ptr, t.in_src
    latency_s, s_per_byte, channel = t.latency_s, t.s_per_byte, t.channel
    local, matrix, contention = t.local, t.matrix, t.contention
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
    s.x[BEGUN] = begin
    sent[:] = -1
    # Unsigned indices, here and below, spare numba's test for negative ones: a third of the pass.
    for k in range(begin, n):
        if k < 0:  # model inputs
            op, src, now = np.uint64(n), np.uint64(num_devices), 0.0
        else:
            if k == noted:
                if k > begin:
                    if k > moved and pending == 0 and _same(s, k // every):
                        s.x[ENDED] = k
                        return s.x[COST]
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
                s.x[ENDED] = k
                return _NEVER
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
    s.x[ENDED] = n
    return min(free_s[largest(free_s, num_devices)], _NEVER)


@kernel
def _simulate(t, s):
    """As ``timetable``, of everything, by the simulator."""
    run, n, num_devices = s.run, len(s.place), len(s.load)
    s.x[BEGUN], s.x[ENDED] = -1, n
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
            last[d], free_s[d] = i, _NEVER
        return _NEVER
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
    return min(free_s[largest(free_s, num_devices)], _NEVER)


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
    matrix = t.matrix
    if len(matrix) > 0:
        return matrix[(t.edge_tensor[e] * (num_devices + 1) + src) * num_devices + dst]
    return t.latency_s[pair] + t.edge_bytes[e] * t.s_per_byte[pair]


@kernel
def _forget(t, s):
    """What was tried last is not kept."""
    for k in range(int(s.x[BEGUN]), int(s.x[ENDED])):
        op = s.sequence[k] if k >= 0 else len(s.sequence)
        for e in range(t.edge_ptr[op], t.edge_ptr[op + 1]):
            s.try_arrival_s[t.edge_in[e]] = s.arrival_s[t.edge_in[e]]


@kernel
def _keep(t, s):
    """Keep what was tried last: its times, and the critical chain."""
    n, num_devices = t.compute_s.shape
    sequence, edge_ptr, edge_in = s.sequence, t.edge_ptr, t.edge_in
    begin, ended = int(s.x[BEGUN]), int(s.x[ENDED])
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
    for k in range(int(s.x[NUM_CHAIN])):
        s.on_chain[s.chain[k]] = False
    # Where nothing changes from ``ended`` on, what ends last is who it was.
    op, count = s.chain[0] if ended < n else s.last[largest(s.free_s, num_devices)], 0
    while op >= 0:
        s.chain[count] = op
        s.on_chain[op] = True
        count += 1
        op = s.waited[op]
    s.x[NUM_CHAIN] = count


@kernel
def _line_up(t, s):
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
def _tails(t, s, moved):
    """Compute tails that are stale, and those that hang on one that changes.

    None is at a position beyond ``moved``.
    """
    width = np.uint64(t.compute_s.shape[1])
    place, sequence = s.place, s.sequence
    lane_ptr, lane, in_lane = s.lane_ptr, s.lane, s.in_lane
    edge_ptr, edge_tensor, edge_dst = t.edge_ptr, t.edge_tensor, t.edge_dst
    latency_s, s_per_byte, channel = t.latency_s, t.s_per_byte, t.channel
    local, matrix = t.local, t.matrix
    has_matrix = len(matrix) > 0
    from_s, stale = s.from_s, s.stale
    for k in range(moved, -1, -1):
        i = np.uint64(sequence[k])
        if not stale[i]:
            continue
        stale[i] = False
        d = np.uint64(place[i])
        path = 0.0
        for e in range(edge_ptr[i], edge_ptr[i + 1]):  # as ``_users_s``, at twice its pace
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
            _pass_on(t, s, i, d)


@inlined
def _pass_on(t, s, i, d):
    """The tails of those before ``i``, in the graph and on ``d``, are to be computed."""
    for m in range(t.in_ptr[i], t.in_ptr[i + 1]):
        s.stale[t.in_src[m]] = True
    if s.in_lane[i] > s.lane_ptr[d]:
        s.stale[s.lane[s.in_lane[i] - 1]] = True


@kernel
def _sort(t, s):
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
    return _begin(t, s)


@kernel
def _begin(t, s):
    """Evaluate ``s.place`` in ``s.sequence`` as if nothing had been kept."""
    n = len(s.sequence)
    for k in range(n):
        s.position[s.sequence[k]] = k
    cost = timetable(t, s, np.int64(-1), np.int64(n), np.inf)
    _keep(t, s)
    _line_up(t, s)
    s.stale[:] = True
    _tails(t, s, np.int64(n - 1))
    return cost


@inlined
def _users_s(t, s, i, d):
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
def _inputs_s(t, s, i, d):
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
def _elsewhere(t, s, i, d, ready, place):
    """The estimated latency with ``i`` on ``d``, at ``place`` in its lane; and when it begins."""
    begin, after = ready, 0.0
    if place > s.lane_ptr[d]:
        before = s.lane[place - 1]
        begin = max(begin, s.end_s[before] + s.hand_s[before])
    if place < s.lane_ptr[d + 1]:
        after = s.from_s[s.lane[place]]
    path = _users_s(t, s, i, d)
    if not t.simulated:
        return begin + t.compute_s[i, d] + max(path, after), begin
    end_s = begin + _seconds(t, s, i, d, begin)
    after += _handing_s(t, s, i, d, end_s)
    return max(end_s + max(path, after), _handed_s(t, s, i, d)), begin


@inlined
def _runs(s, d, when, but):
    """Whether ``d`` runs, or hands over, another than ``but`` at that time."""
    at = _first_in_lane(s, d, s.start_s, when)
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
def _reordered(t, s, i, ready, place):
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
            now = max(now, _inputs_s(t, s, other, d)) + s.end_s[other] - s.start_s[other]
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
    n, count, found = len(s.place), 0, -1
    for m in range(in_ptr[i], in_ptr[i + 1]):
        src = in_src[m]
        if src < n and way != 1 and not s.mark[src] and (device < 0 or s.place[src] == device):
            count += 1
            if below(s.random, count) == 0:
                found = src
    if way == 0:
        return found
    for e in range(edge_ptr[i], edge_ptr[i + 1]):
        user = edge_dst[e]
        if not s.mark[user] and (device < 0 or s.place[user] == device):
            count += 1
            if below(s.random, count) == 0:
                found = user
    return found


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
def _together(t, s, i, new, num):
    """As ``_elsewhere``, with the operators at positions ``s.room[:num]`` on ``new``.

    They stay where they are in the sequence. Also when ``i`` begins, and its inputs are there.
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
    longest = free_s = begin_i = ready_i = 0.0
    for m in range(num):
        j = np.int64(sequence[room[m]])
        ready = _inputs_s(t, s, j, new)
        place = _first_in_lane(s, new, s.position, room[m])
        latency, begin = _elsewhere(t, s, j, new, max(ready, free_s), place)
        free_s = begin + t.compute_s[j, new]
        s.finish_s[j] = free_s
        longest = max(longest, latency)
        if j == i:
            begin_i, ready_i = begin, ready
    for m in range(num):
        s.mark[sequence[room[m]]] = False
    return longest, begin_i, ready_i


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
def _propose(t, s, k, chooser):
    """Draw move ``k``; of ``TABU``, one of the critical chain.

    Returns its first operator (-1: none was found), device, before whom in the sequence (-1: all
    stay where they are there), the estimated latency, when the operator begins, when its inputs
    are there, places that it moves on its device, and operators that move.
    """
    n = len(s.place)
    for _ in range(_TRIES):
        i = below(s.random, n)
        if chooser == TABU or uniform(s.random) < _FROM_CHAIN:
            i = s.chain[below(s.random, int(s.x[NUM_CHAIN]))]
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
            ready = _inputs_s(t, s, i, old)
            latency = _reordered(t, s, i, ready, place)
            at = s.position[s.lane[place]] + (place > here)
            s.count[k], s.body[k, 0] = 1, t.group[i]
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
        latency, begin = _elsewhere(t, s, i, new, ready, a)
        return i, new, at, latency, begin, ready, 0, 1
    return -1, 0, -1, 0.0, 0.0, 0.0, 0, 0


@kernel
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


@inlined
def bounded(value):
    return max(-BOUND, min(BOUND, value))


@kernel
def _offer(t, s, width, chooser):
    """Draw moves 1..width, as far as ``chooser`` has to know them; choice 0 is to stay.

    Those whose score is ``_HOPELESS`` below the best one's are withdrawn.
    """
    s.which[0] = -1
    best = -np.inf
    scale = _SIMULATED * HAND_SCALE if t.simulated else HAND_SCALE
    for k in range(1, width + 1):
        i, new, at, latency, begin, ready, places, num = _propose(t, s, k, chooser)
        s.which[k] = i
        if i < 0:
            continue
        s.group[k], s.to[k], s.at[k] = t.group[i], new, at
        if chooser == UNIFORM:
            continue
        rests = _REST + _REST_MORE * uniform(s.random) if chooser == TABU else 0.0
        if s.moved[i] > 0 and s.x[STEP] - s.moved[i] < rests and latency >= s.x[BEST]:
            s.which[k] = -1
            continue
        drawn = s.drawn[k]
        drawn[0], drawn[1], drawn[2], drawn[3], drawn[4] = latency, begin, ready, places, num
        change = min(latency, _NEVER) / max(s.x[COST], 1e-300) - 1.0
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
    x, u = s.x, s.search
    n, num_devices = t.compute_s.shape
    cost = max(x[COST], 1e-300)
    most = max(s.load[largest(s.load, num_devices)], 1e-300)
    mean = average(s.load)
    typical = max(mean * num_devices / n, 1e-300)
    log_steps = np.log(x[STEP] + 2.0)
    u[0] = x[USED]
    u[1] = np.log10(max(x[TEMPERATURE], 1e-9)) / 5.0
    u[2] = bounded(100.0 * np.log(cost / max(x[BEST], 1e-300)))
    u[3] = bounded(10.0 * np.log(max(x[BEST], 1e-300) / max(x[FIRST], 1e-300)))
    u[4] = np.log(x[STEP] - x[FOUND] + 1.0) / 10.0
    u[5] = mean / most
    u[6] = bounded(mean / cost)
    u[7] = x[NUM_CHAIN] / n
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
        change = min(latency, _NEVER) / cost - 1.0
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
        f[18] = np.log(x[STEP] - s.moved[i] + 1.0) / log_steps
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


@kernel
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


@kernel
def _members(t, s, k):
    """Fill ``s.room`` with the operators of the groups that move ``k`` moves; how many they are."""
    num = 0
    for i in range(s.count[k]):
        g = s.body[k, i]
        for m in range(t.op_ptr[g], t.op_ptr[g + 1]):
            s.room[num] = t.op[m]
            num += 1
    return num


@kernel
def _put(s, num, device):
    """The operators ``s.room[:num]`` to ``device``."""
    for m in range(num):
        s.place[s.room[m]] = device


@kernel
def _concerned(t, s, k, num):
    """Positions of the first operator (-1: a model input) and the last that move ``k`` concerns.

    Its operators are ``s.room[:num]``.
    """
    i, at = s.which[k], np.int64(s.at[k])
    first, moved = len(s.place), -1
    if s.to[k] != s.place[i]:
        for m in range(num):
            j = s.room[m]
            first, moved = min(first, s.position[j]), max(moved, s.position[j])
            for e in range(t.in_ptr[j], t.in_ptr[j + 1]):  # who sends elsewhere now
                first = min(first, s.position[t.in_src[e]])
    if at >= 0:
        here: Any = s.position[i]
        lands: Any = at - 1 if at > here else at
        first = min(first, here, lands)
        moved = max(moved, here, lands)
    return first, moved


@kernel
def _touch(t, s, num, d):
    """The tails of ``s.room[:num]``, and of those before them on ``d``, are to be computed."""
    for m in range(num):
        s.stale[s.room[m]] = True
        _pass_on(t, s, s.room[m], d)


@kernel
def _least(s, width):
    """The offered move of the least estimate; 0: none is."""
    k, least = 0, np.inf
    for j in range(1, width + 1):
        if s.which[j] >= 0 and s.drawn[j, 0] < least:
            k, least = j, s.drawn[j, 0]
    return k


@kernel
def _go_back(t, s):
    """Begin again at the best, with nobody at rest."""
    copy(s.place, s.best_place)
    copy(s.sequence, s.best_sequence)
    s.x[COST] = _begin(t, s)
    s.moved[:] = 0
    s.x[BACK] += 1.0


@kernel
def _take(t, s, k, always):
    """Try move ``k`` (0: stay); returns the improvement of log(best), 0 if there is none.

    It is kept with probability ``min(1, exp(-log(after / before) / temperature))``, or ``always``.
    """
    x = s.x
    x[STEP] += 1.0
    i = s.which[k]
    if i < 0:
        return 0.0
    old, new, at = np.int64(s.place[i]), np.int64(s.to[k]), np.int64(s.at[k])
    limit = np.inf
    if x[COST] < _NEVER and not always:
        limit = x[COST] * (1.0 - uniform(s.random)) ** -x[TEMPERATURE]
    num = _members(t, s, k)
    first, moved = _concerned(t, s, k, num)
    _put(s, num, new)
    back = _shift(s, i, at) if at >= 0 else at
    cost = timetable(t, s, first, moved, limit)
    if cost > limit:
        _forget(t, s)
        if at >= 0:
            _shift(s, i, back)
        _put(s, num, old)
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
        x[BACK] = 0.0
        copy(s.best_place, s.place)
        copy(s.best_sequence, s.sequence)
    _keep(t, s)
    _touch(t, s, num, old)
    _line_up(t, s)
    _touch(t, s, num, new)
    if t.simulated:  # any time may have changed
        s.stale[:] = True
        moved = np.int64(len(s.place) - 1)
    _tails(t, s, moved)
    if int(x[KEPT]) % _SORT_EVERY == 0:
        _sort(t, s)
    return gain


@kernel
def play(t, s, job, number, net, used, then):
    """The one entry.

    * BEGIN: forget everything but ``s.place`` and ``s.sequence``, evaluate them, offer moves for
      step ``number``, where ``used`` of the budget is spent.
    * TAKE: try move ``number``, then offer the next ones where ``then`` of the budget is spent;
      returns the improvement of log(best).
    * SEARCH + chooser: ``number`` steps while ``used`` of the budget becomes ``then``. POLICY
      chooses by the softmax of its network, HAND by that of the hand-written score alone, for
      UNIFORM one move is drawn; TABU takes the least estimate of those that are not at rest.
    """
    x, width = s.x, len(s.which) - 1
    chooser = job - SEARCH if job >= SEARCH else POLICY
    if job == BEGIN:
        s.on_chain[:] = False
        x[NUM_CHAIN] = x[KEPT] = x[BACK] = 0.0
        x[COST] = _begin(t, s)
        _sort(t, s)
        x[STEP] = x[FOUND] = number
        x[BEST] = x[FIRST] = x[COST]
        s.refused[:] = 0.0
        s.moved[:] = number
        copy(s.best_place, s.place)
        copy(s.best_sequence, s.sequence)
        _cool(s, used)
        _offer(t, s, width, chooser)
        return 0.0
    gain = 0.0
    steps = 1 if job == TAKE else number
    logits = s.logits
    for step in range(steps):
        k = 1
        if job == TAKE:
            k = number
        elif chooser == TABU:
            k = _least(s, width)
        elif chooser != UNIFORM:
            if chooser == POLICY:
                network(net, s.search, s.offered, s.which, s.group, s.to, width, logits)
            else:
                for j in range(width + 1):
                    logits[j] = s.offered[j, 0] if s.which[j] >= 0 else -np.inf
            logits[0] = -np.inf if s.which[largest(s.which, width + 1)] >= 0 else 0.0
            k = choose(s.random, logits, width)
        gain += _take(t, s, k, chooser == TABU)
        if chooser == TABU and x[STEP] - x[FOUND] > _IN_VAIN * (1.0 + x[BACK]) ** 2:
            _go_back(t, s)
        _cool(s, used + (then - used) * (step + 1) / steps)
        _offer(t, s, 1 if chooser == UNIFORM else width, chooser)
    return gain


@kernel
def _cool(s, used):
    """The temperature where ``used`` 0..1 of the budget is spent."""
    s.x[USED] = used
    s.x[TEMPERATURE] = s.x[WARM] * (s.x[COLD] / s.x[WARM]) ** used
