"""Numba kernels of ``Dispatch-v0``: which ready operator goes where next, and what can be seen.

A step offers pairs of a ready operator and a device, at most ``OPS`` operators by falling upward
rank and ``DEVICES`` devices of each, those that end it first. Operators go into the earliest gap
that is long enough (``placement.search.list_kernels``). ``rule`` says what is best without a
network; the first two weights alone are HEFT.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np

from placement.search import list_kernels
from placement.search.list_kernels import fill_able, gap, need, place, transfer_s
from placement.search.macro import uniform
from placement.search.perceptron import add_rows, choose, output
from placement.tools.jit import Struct, allocating, array, copy, inlined, kernel, largest

Array = Any

OPS, DEVICES = 20, 3  # offered at a step, at most
PAIRS = OPS * DEVICES
# Weights of the rule: of the rank, of the end among the operator's devices, of the optimistic cost
# of what follows in that end (PEFT), of the start among all pairs, and 1 if channels are busy. What
# is lost counts by its logarithm, so that a network can outweigh it.

PAIR_FEATURES = (
    "rank below that of the first offered",
    "rank over the longest path",
    "end and what follows, beyond the most critical of those offered",
    "end above that on the operator's best device",
    "the same with the optimistic cost of what follows",
    "start after the first that can start",
    "end after the first that can end",
    "idle time before it",
    "1 if it fills a gap",
    "how long its inputs wait for the device",
    "seconds over those on its fastest device",
    "seconds over its mean",
    "seconds over the mean operator",
    "one over the devices that it can run on",
    "regret: end on the second-best device above the best",
    "when the device is free, above the mean device",
    "when the device will have done what may come, above the mean device",
    "the same over the largest",
    "what may come to the device, over the mean",
    "offered operators whose best device this is",
    "rank above the largest of its rivals for the device",
    "longest path in operators over the graph's",
    "consumers",
    "consumers that wait for nothing else",
    "share of operators that are placed",
    "operators that are ready",
    "devices",
    "transfers of its inputs",
    "share of the inputs that are there",
    "waiting for channels",
    "memory used with it",
    "memory used by all",
    "end beyond the latest end so far",
    "mean of one over devices per operator",
    "mean transfer",
    "path bound over load bound of what is left",
    "spread of seconds over devices",
    "seconds of what follows it over all that is left",
    "end and the least that follows, beyond the bound of all",
    "rank of the most urgent other that could begin here before its end, above its own",
    "how long that would have to wait",
    "share of its consumers' other inputs that are there",
)
NUM_PAIR_FEATURES = len(PAIR_FEATURES)


class Tables(Struct):
    """A problem."""

    listed: list_kernels.Tables
    position: Array = array("N", np.int32)  # by falling rank
    rank_s: Array = array("N")  # HEFT's upward rank
    follow_s: Array = array("N, D")  # PEFT's optimistic cost of what follows
    hops: Array = array("N")  # longest path to the end in operators, over the graph's
    below_s: Array = array("N")  # seconds of all direct and indirect consumers
    before: Array  # int64 [N] operators that each waits for
    fastest_s: Array  # float64 [N]
    mean_s: Array  # float64 [N]
    num_able: Array  # float64 [N]
    contended: bool  # transfers of a channel wait for each other
    demand_s: Array  # float64 [D] what may come: seconds over the devices of each operator
    unit_s: float  # the mean operator
    path_s: float  # the longest path
    fixed: Array  # float32 [4] mean of one over devices, transfer, spread, log devices
    rule: Array  # float64 [5]


class State(Struct):
    """An episode, and what is offered."""

    placed: list_kernels.State
    random: Array = array("1", np.uint64, 1)
    waits: Array = array("N", np.int64)
    ready: Array = array("N", np.int64)  # by position
    num_ready: int
    num_placed: int
    start_s: Array = array("N")
    sequence: Array = array("N", np.int32)  # operators as they were chosen
    past: Array = array("N", np.int32)  # the same of an episode that is followed,
    past_at: Array = array("N", np.int32)  # its devices by operator,
    anew: int  # but in the decisions from here
    kept: int  # to here
    done: Array = array("N", np.bool_)  # placed, while it is followed
    demand_s: Array = array("D")
    arrive_s: Array = array("D")  # room, as are the next
    able: Array = array("D", np.bool_)
    begin_s: Array = array("OPS, D")  # earliest start of each operator offered; inf: not able
    reach_s: Array = array("OPS, D")  # end of its group there
    best_at: Array = array("OPS", np.int64)  # the device that ends it first
    best_s: Array = array("OPS")  # its end there, and on the second best
    second_s: Array = array("OPS")
    least_key: Array = array("OPS")  # the end there with what the rule adds
    most_s: Array = array("OPS")  # the least end with the optimistic cost of what follows
    popular: Array = array("D")  # operators whose best device it is
    rival: Array = array("D, 2")  # the two highest ranks among them
    rival_row: Array = array("D", np.int64)  # whose is the first
    near: Array = array("OPS, D")
    first_start: float
    first_end: float
    critical: float
    bound_s: float
    last: float
    mean_free: float
    mean_done: float
    most_done: float
    left: float
    used: float
    capacity: float
    bound: float
    count: int
    op: Array = array("PAIRS", np.int64)
    device: Array = array("PAIRS", np.int64)
    row: Array = array("PAIRS", np.int64)
    score: Array = array("PAIRS")  # the rule's
    features: Array = array("PAIRS, F", np.float32)
    logits: Array = array("PAIRS")


class Notes(Struct):
    """Decisions of an episode, for who learns from them."""

    features: Array = array("C, F", np.float32)  # of the pairs of each, one decision after another
    score: Array = array("C", np.float32)
    whose: Array = array("C, 2", np.int32)  # group and device of each pair
    count: Array = array("S", np.int32)  # pairs of each
    taken: Array = array("S", np.int32)  # which of them was
    log: Array = array("S", np.float32)  # of its probability


@kernel
def fill_static(t, out_ptr, out_tensor, use_ptr, use_dst, move_s, compute_s, after):
    """Ranks, optimistic costs, hops and seconds below of ``t``, all zero before.

    ``compute_s`` is inf where a group cannot run; ``after`` uint64 ``[N, words]``, zero, is room.
    """
    n, num_devices = compute_s.shape
    one = np.uint64(1)
    for op in range(n - 1, -1, -1):
        tail = 0.0
        for k in range(out_ptr[op], out_ptr[op + 1]):
            tensor = out_tensor[k]
            longest, some = 0.0, False
            for j in range(use_ptr[tensor], use_ptr[tensor + 1]):
                user = use_dst[j]
                longest = max(longest, t.rank_s[user])
                some = True
                after[op, user >> 6] |= one << np.uint64(user & 63)
                for w in range(user >> 6, after.shape[1]):
                    after[op, w] |= after[user, w]
                t.hops[op] = max(t.hops[op], t.hops[user])
                least = np.inf
                for d in range(num_devices):
                    least = min(least, t.follow_s[user, d] + compute_s[user, d])
                for d in range(num_devices):
                    stay = t.follow_s[user, d] + compute_s[user, d]
                    t.follow_s[op, d] = max(t.follow_s[op, d], min(stay, least + move_s[tensor]))
            if some:
                tail = max(tail, move_s[tensor] + longest)
        t.rank_s[op] = t.mean_s[op] + tail
        t.hops[op] += 1.0
        for user in range(op + 1, n):
            if after[op, user >> 6] >> np.uint64(user & 63) & one:
                t.below_s[op] += t.mean_s[user]


@kernel
def begin(t, s):
    """Nothing is placed."""
    p = s.placed
    p.choice[:] = -1
    p.finish_s[:] = 0.0
    p.free_s[:] = 0.0
    p.used[:] = 0
    p.missing[:] = True
    p.head[:] = -1
    p.tail[:] = -1
    p.channel_s[:] = 0.0
    p.arrival_s[:] = -1.0
    s.num_ready = 0
    s.num_placed = 0
    for d in range(len(s.demand_s)):
        s.demand_s[d] = t.demand_s[d]
    for op in range(len(t.before)):
        s.waits[op] = t.before[op]
        if s.waits[op] == 0:
            _make_ready(t, s, op)


@kernel
def _make_ready(t, s, op):
    at = s.num_ready
    while at > 0 and t.position[s.ready[at - 1]] > t.position[op]:
        s.ready[at] = s.ready[at - 1]
        at -= 1
    s.ready[at] = op
    s.num_ready += 1


@kernel
def _arrivals(t, s, op, arrive):
    """When the last input of ``op`` is on each device; channels are busy if the rule says so."""
    p, x = s.placed, t.listed
    busy = t.contended and t.rule[4] > 0.0
    arrive[:] = 0.0
    for i in range(x.in_ptr[op], x.in_ptr[op + 1]):
        tensor = x.in_tensor[i]
        src = x.tensor_src[tensor]
        home = np.int64(x.host if src < 0 else p.choice[x.group[src]])
        made_s = 0.0 if src < 0 else p.finish_s[src]
        for d in range(len(arrive)):
            if src < 0 and x.shares_host[d]:
                continue
            there = made_s
            cost = transfer_s(x, tensor, home, d)
            if busy and p.arrival_s[tensor, d] >= 0.0:
                there = p.arrival_s[tensor, d]
            elif cost > 0.0:
                if busy:
                    there = max(there, p.channel_s[x.channel[home, d]])
                there += cost
            arrive[d] = max(arrive[d], there)


@inlined
def _soft(x):
    return x / (1.0 + abs(x))


@inlined
def _softer(x):
    return x / (5.0 + abs(x))


@kernel
def _near(t, s, op, near):
    """Shares ``[D]`` of what the consumers of ``op`` use of others that are placed."""
    p, x = s.placed, t.listed
    total = 0.0
    for m in range(x.user_ptr[op], x.user_ptr[op + 1]):
        user = x.user[m]
        for i in range(x.in_ptr[user], x.in_ptr[user + 1]):
            src = x.tensor_src[x.in_tensor[i]]
            if src >= 0 and src != op and p.choice[x.group[src]] >= 0:
                size = x.tensor_bytes[x.in_tensor[i]]
                near[p.choice[x.group[src]]] += size
                total += size
    if total > 0.0:
        for d in range(len(near)):
            near[d] /= total


@kernel
def _offer_device(s, at, d, key):
    """Among the ``DEVICES`` of least key, in order, from pair ``at``; of equal ones the first."""
    k = s.count
    while k > at and s.score[k - 1] > key:
        k -= 1
    if k < at + DEVICES:
        for m in range(min(s.count, at + DEVICES - 1), k, -1):
            s.score[m], s.device[m] = s.score[m - 1], s.device[m - 1]
        s.score[k], s.device[k] = key, d
        s.count = min(s.count + 1, at + DEVICES)


@kernel
def _look(t, s, i):
    """Where the ``i``-th ready operator could go, and when; offer the best of its devices."""
    p, x = s.placed, t.listed
    num_devices = len(p.free_s)
    op = s.ready[i]
    group = x.group[op]
    _arrivals(t, s, op, s.arrive_s)
    fill_able(x, p, group, s.able)
    new = p.choice[group] < 0
    s.best_s[i], s.second_s[i], s.best_at[i], s.least_key[i] = np.inf, np.inf, 0, np.inf
    at = s.count
    least = np.inf
    for d in range(num_devices):
        s.begin_s[i, d] = np.inf
        if not s.able[d]:
            continue
        start = gap(x, p, op, d, s.arrive_s[d])
        end = start + (x.group_s[group, d] if new else x.compute_s[op, d])
        s.begin_s[i, d], s.reach_s[i, d] = start, end
        s.first_start = min(s.first_start, start)
        s.first_end = min(s.first_end, start + x.compute_s[op, d])
        if end < s.best_s[i]:
            s.second_s[i] = s.best_s[i]
            s.best_s[i], s.best_at[i] = end, d
        elif end < s.second_s[i]:
            s.second_s[i] = end
        least = min(least, end + t.follow_s[op, d])
        key = end + t.rule[2] * t.follow_s[op, d]
        s.least_key[i] = min(s.least_key[i], key)
        _offer_device(s, at, d, key)
    for k in range(at, s.count):
        s.op[k], s.row[k] = op, i
    s.bound_s = max(s.bound_s, least)
    s.most_s[i] = least
    _near(t, s, op, s.near[i])
    tail = t.rank_s[op] - t.mean_s[op]
    s.critical = max(s.critical, s.best_s[i] + tail)
    d = s.best_at[i]
    s.popular[d] += 1.0
    if t.rank_s[op] > s.rival[d, 0]:
        s.rival[d, 1] = s.rival[d, 0]
        s.rival[d, 0], s.rival_row[d] = t.rank_s[op], i
    elif t.rank_s[op] > s.rival[d, 1]:
        s.rival[d, 1] = t.rank_s[op]


@kernel
def _inputs(t, s, op, d):
    """Of the inputs of ``op``: when all are on ``d``, the seconds that they are moved, how long
    they wait for a channel, the share of their bytes that is there.
    """
    p, x = s.placed, t.listed
    ready, moved, wait, local, total = 0.0, 0.0, 0.0, 0.0, 0.0
    for m in range(x.in_ptr[op], x.in_ptr[op + 1]):
        tensor = x.in_tensor[m]
        src = x.tensor_src[tensor]
        if src < 0:
            continue
        home = np.int64(p.choice[x.group[src]])
        total += x.tensor_bytes[tensor]
        there = p.finish_s[src] if home == d else p.arrival_s[tensor, d]
        if home == d or there >= 0.0:
            local += x.tensor_bytes[tensor]
            ready = max(ready, there)
            continue
        cost = transfer_s(x, tensor, home, d)
        moved += cost
        if t.contended and cost > 0.0:
            wait = max(wait, p.channel_s[x.channel[home, d]] - p.finish_s[src])
        ready = max(ready, p.finish_s[src] + cost)
    return ready, moved, wait, local / total if total > 0.0 else 0.0


@kernel
def _describe(t, s, k):
    """Score and features of pair ``k``, when all pairs are known."""
    p, x, unit = s.placed, t.listed, t.unit_s
    num_devices = len(p.free_s)
    op, d, i = s.op[k], s.device[k], s.row[k]
    group = x.group[op]
    start, seconds, reach = s.begin_s[i, d], x.compute_s[op, d], s.reach_s[i, d]
    end = start + seconds
    tail = t.rank_s[op] - t.mean_s[op]
    s.score[k] = (
        -t.rule[0] * np.log1p((t.rank_s[s.ready[0]] - t.rank_s[op]) / unit)
        - t.rule[1] * np.log1p((s.score[k] - s.least_key[i]) / unit)
        - t.rule[3] * np.log1p((start - s.first_start) / unit)
    )
    f = s.features[k]
    f[0] = _softer((t.rank_s[s.ready[0]] - t.rank_s[op]) / unit)
    f[1] = t.rank_s[op] / t.path_s
    f[2] = _softer((reach + tail - s.critical) / unit)
    f[3] = _soft((reach - s.best_s[i]) / unit)
    f[4] = _soft((reach + t.follow_s[op, d] - s.most_s[i]) / unit)
    f[5] = _soft((start - s.first_start) / unit)
    f[6] = _soft((end - s.first_end) / unit)
    f[7] = _soft(max(0.0, start - p.free_s[d]) / unit)
    f[8] = 1.0 if end <= p.free_s[d] and p.free_s[d] > 0.0 else 0.0
    ready, moved, wait, local = _inputs(t, s, op, d)
    f[9] = _soft(max(0.0, start - ready) / unit)
    f[10] = _soft((seconds - t.fastest_s[op]) / (t.fastest_s[op] + 1e-3 * unit))
    f[11] = _soft((seconds - t.mean_s[op]) / (t.mean_s[op] + 1e-3 * unit))
    f[12] = _soft(seconds / unit)
    f[13] = 1.0 / t.num_able[op]
    f[14] = _soft(min(s.second_s[i] - s.best_s[i], 1e3 * unit) / unit)
    f[15] = _softer((p.free_s[d] - s.mean_free) / unit)
    done = p.free_s[d] + s.demand_s[d]
    f[16] = _softer((done - s.mean_done) / unit)
    f[17] = done / (s.most_done + 1e-12)
    f[18] = _soft(s.demand_s[d] * num_devices / (s.left + 1e-12))
    f[19] = _softer(s.popular[d])
    other = s.rival[d, 1] if s.rival_row[d] == i else s.rival[d, 0]
    f[20] = _softer((t.rank_s[op] - other) / unit) if other >= 0.0 else 1.0
    f[21] = t.hops[op]
    waiting = opens = 0.0
    for m in range(x.user_ptr[op], x.user_ptr[op + 1]):
        waiting += 1.0
        opens += s.waits[x.user[m]] == 1
    f[22] = _soft(waiting)
    f[23] = _soft(opens)
    f[24] = s.num_placed / len(t.rank_s)
    f[25] = s.num_ready / (s.num_ready + num_devices)
    f[26] = t.fixed[3]
    f[27] = _soft(moved / unit)
    f[28] = local
    f[29] = _soft(max(0.0, wait) / unit)
    f[30] = f[31] = 0.0
    if x.may_bind:
        taken = p.used[d] if p.choice[group] >= 0 else need(x, p, group, d)
        f[30] = min(2.0, taken / (x.capacity[d] + 1.0))
        f[31] = s.used / (s.capacity + 1.0)
    f[32] = _soft((end - s.last) / unit)
    f[33] = t.fixed[0]
    f[34] = t.fixed[1]
    f[35] = min(2.0, max(-2.0, s.bound))
    f[36] = t.fixed[2]
    f[37] = min(1.0, t.below_s[op] / (s.left + 1e-12))
    f[38] = _softer((reach + t.follow_s[op, d] - max(s.bound_s, s.last)) / unit)
    urgent, late = -1.0, 0.0
    for j in range(min(s.num_ready, OPS)):
        if j != i and s.begin_s[j, d] < end and t.rank_s[s.ready[j]] > urgent:
            urgent, late = t.rank_s[s.ready[j]], end - s.begin_s[j, d]
    f[39] = _softer((urgent - t.rank_s[op]) / unit) if urgent >= 0.0 else -1.0
    f[40] = _soft(late / unit)
    f[41] = s.near[i, d]


@kernel
def offer(t, s):
    """Fill what is offered: ``op``, ``device``, ``score`` and ``features``, ``count`` of them."""
    p, x = s.placed, t.listed
    num_devices = len(p.free_s)
    s.first_start = s.first_end = np.inf
    s.critical = s.last = s.bound_s = 0.0
    s.popular[:] = 0.0
    s.rival[:] = -1.0
    s.rival_row[:] = -1
    s.near[:] = 0.0
    s.count = 0
    for i in range(min(s.num_ready, OPS)):
        _look(t, s, i)
    s.mean_free = s.mean_done = s.most_done = s.left = s.used = s.capacity = 0.0
    for d in range(num_devices):
        done = p.free_s[d] + s.demand_s[d]
        s.last = max(s.last, p.free_s[d])
        s.mean_free += p.free_s[d] / num_devices
        s.mean_done += done / num_devices
        s.most_done = max(s.most_done, done)
        s.left += s.demand_s[d]
        if x.may_bind:
            s.used += p.used[d]
            s.capacity += x.capacity[d]
    s.bound = np.log((max(s.critical, s.last) + 1e-12) / (s.mean_done + 1e-12))
    for k in range(s.count):
        _describe(t, s, k)


@kernel
def take(t, s, k):
    """Place what was offered as ``k``; True if it was the last."""
    p, x = s.placed, t.listed
    op, d = s.op[k], s.device[k]
    busy = t.contended and t.rule[4] > 0.0
    start = s.begin_s[s.row[k], d]
    for m in range(x.in_ptr[op], x.in_ptr[op + 1]):
        tensor = x.in_tensor[m]
        src = x.tensor_src[tensor]
        home = np.int64(x.host if src < 0 else p.choice[x.group[src]])
        if home == d or (src < 0 and x.shares_host[d]):
            continue
        made_s = 0.0 if src < 0 else p.finish_s[src]
        c, cost = x.channel[home, d], transfer_s(x, tensor, home, d)
        if cost == 0.0 or p.arrival_s[tensor, d] >= 0.0:
            continue
        there = max(made_s, p.channel_s[c]) + cost
        p.channel_s[c] = p.arrival_s[tensor, d] = there
        if busy and there > start:
            start = gap(x, p, op, d, there)
    place(x, p, op, d, start)
    s.start_s[op] = start
    s.sequence[s.num_placed] = op
    s.num_placed += 1
    for e in range(len(s.demand_s)):
        if np.isfinite(x.group_s[x.group[op], e]):
            s.demand_s[e] -= x.compute_s[op, e] / t.num_able[op]
    at = 0
    while s.ready[at] != op:
        at += 1
    s.num_ready -= 1
    for m in range(at, s.num_ready):
        s.ready[m] = s.ready[m + 1]
    for m in range(x.user_ptr[op], x.user_ptr[op + 1]):
        user = np.int64(x.user[m])
        s.waits[user] -= 1
        if s.waits[user] == 0:
            _make_ready(t, s, user)
    return s.num_placed == len(t.rank_s)


@allocating
def judge(t, s, net, scale, first, second):
    """Logits of what is offered: ``scale`` times the rule's score, and the network's.

    What an encoder says of groups float32 ``[G, H]`` and devices ``[D, H]`` goes into the first
    layer; both are empty where none does. ``first`` float32 ``[PAIRS, H]`` and ``second`` float32
    ``[H]`` are room.
    """
    linear, into, bias, hidden, hidden_bias, around, of_group, of_device, out = net
    size = len(bias)
    common = hidden_bias.copy()
    for k in range(s.count if size > 0 else 0):
        x = first[k]
        copy(x, bias)  # not x[:] = bias: copies of arrays compile for a second
        add_rows(x, s.features[k], into)
        if len(of_group) > 0:
            group, d = t.listed.group[s.op[k]], s.device[k]
            for j in range(size):
                x[j] += of_group[group, j] + of_device[d, j]
        for j in range(size):
            x[j] = max(x[j], np.float32(0.0))
            second[j] = x[j] + (second[j] if k > 0 else np.float32(0.0))
    if len(around) > 0:
        share = np.float32(1.0 / s.count)
        for i in range(size):
            a = second[i] * share
            for j in range(size):
                common[j] += a * around[i, j]
    for k in range(s.count):
        value = scale * s.score[k]
        for i in range(len(linear)):
            value += s.features[k, i] * linear[i]
        if size > 0:
            value += output(np.float32(0.0), first[k], second, hidden, common, out)
        s.logits[k] = value


@kernel
def _log_of(s, k):
    """Of its probability."""
    total = 0.0
    for m in range(s.count):
        total += np.exp(s.logits[m] - s.logits[k])
    return -np.log(total)


@kernel
def _follow(t, s, op):
    """Place an operator where it was in the past episode; True if it was the last."""
    home = np.int64(s.placed.choice[t.listed.group[op]])
    d = home if home >= 0 else np.int64(s.past_at[op])
    _arrivals(t, s, op, s.arrive_s)
    s.op[0], s.device[0], s.row[0] = op, d, 0
    s.begin_s[0, d] = gap(t.listed, s.placed, op, d, s.arrive_s[d])
    return take(t, s, 0)


@allocating
def construct(t, s, net, scale, greedy, keep, notes):
    """A whole episode; how many decisions were noted, a share ``keep`` of those with a choice.

    They go into ``notes`` until one of its arrays is full. Decisions before ``anew`` and from
    ``kept`` on are those of the past episode, as far as their operators are not placed yet.
    """
    begin(t, s)
    s.done[:] = False
    size = len(net[2])
    first, second = np.empty((PAIRS, size), np.float32), np.empty(size, np.float32)
    noted, at, past, over = 0, 0, 0, False
    while not over:
        if not s.anew <= s.num_placed < s.kept:
            while s.done[s.past[past]]:
                past += 1
            over = _follow(t, s, np.int64(s.past[past]))
            s.done[s.sequence[s.num_placed - 1]] = True
            continue
        offer(t, s)
        judge(t, s, net, scale, first, second)
        best = largest(s.logits, s.count)
        k = best if greedy else choose(s.random, s.logits, s.count - 1)
        noting = s.count > 1 and keep > 0.0 and uniform(s.random) < keep
        if noting and noted < len(notes.count) and at + s.count <= len(notes.score):
            for m in range(s.count):
                for i in range(NUM_PAIR_FEATURES):
                    notes.features[at + m, i] = s.features[m, i]
                notes.score[at + m] = s.score[m]
                notes.whose[at + m, 0] = t.listed.group[s.op[m]]
                notes.whose[at + m, 1] = s.device[m]
            notes.count[noted], notes.taken[noted], notes.log[noted] = s.count, k, _log_of(s, k)
            at += s.count
            noted += 1
        over = take(t, s, k)
        s.done[s.sequence[s.num_placed - 1]] = True
    return noted
