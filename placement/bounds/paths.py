"""When operators can begin and end at the earliest, in view of all that is between them."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.bounds.memory_lp import taken_in
from placement.problem import Problem, host_of
from placement.tools.jit import Struct, array, kernel
from placement.tools.lp import EXACT

Array = NDArray[Any]


class PathEffort(NamedTuple):
    """What may be spent on a join, and how exactly its time is known: more raises it by little."""

    forks: int = 8  # before a join, of those that not every way to it leads over
    priced: int = 24  # times that prices of devices' seconds are set anew
    step: float = 1e-3  # of the time since the fork, by which it must grow at once
    near: float = 1e-4  # of it, to which it is known
    sure: float = 1e-11  # of seconds, by which they must be too many


EFFORT = PathEffort()


class _Graph(Struct):
    """``N`` operators and, as the last, the end; ``K`` devices with time of their own; edges ``E``.

    ``start``, ``end``: the earliest on each device. ``rest``: the least time from the end of an
    operator on ``k`` to the begin of a join on ``j``; ``since``: from the end of a fork on ``j`` to
    its begin on ``k``. ``of_join``: the join for which these are so.
    """

    in_ptr: Array  # int64 [N + 2] where the edges to each begin
    src: Array  # int64 [E]
    out_ptr: Array  # int64 [N + 2] where those from each begin in ``out``
    out: Array  # int64 [E]
    dst: Array  # int64 [E]
    sent_s: Array  # float64 [E, K, K]
    own_s: Array  # float64 [N + 1, K]
    start: Array  # float64 [N + 1, K]
    group: Array  # int64 [N]
    price: Array  # float64 [K]
    end: Array = array("N+1, K")
    head: Array = array("N+1, K")
    rest: Array = array("N+1, K, K")
    since: Array = array("N+1, K, K")
    of_join: Array = array("N+1", np.int64, -1)
    after: Array = array("N+1", np.bool_)
    between: Array = array("N+1", np.int64)
    marked: Array = array("N+1", np.int64, -1)
    item: Array = array("N+1", np.int64)
    item_s: Array = array("N+1, K")
    may: Array = array("N+1, K", np.bool_)
    load: Array = array("K")
    room: Array = array("K")
    first: Array = array("K")
    last: Array = array("K")
    mark: int
    work: int
    most: int


@kernel
def _cannot(net, num, head, j, limit):
    """Whether ``num`` operators cannot be between ``head`` and a join on ``j`` at ``limit``.

    Each must be where its time allows, those of a group together. At any prices of a second on each
    device what all cost where they are cheapest is no more than what the devices' seconds cost,
    from when the first of them can begin to when the last must end.
    """
    own, rest, price, may, item_s = net.own_s, net.rest, net.price, net.may, net.item_s
    load, room, first, last = net.load, net.room, net.first, net.last
    devices, count = len(price), 0
    net.mark += 1
    net.work += 10 * num * devices
    for k in range(devices):
        first[k], last[k] = np.inf, np.inf
    for i in range(num):
        w = net.between[i]
        g = net.group[w]
        if net.marked[g] != net.mark:
            net.marked[g], net.item[count] = net.mark, g
            count += 1
            for k in range(devices):
                may[g, k], item_s[g, k] = True, 0.0
        for k in range(devices):
            if head[w, k] + own[w, k] + rest[w, k, j] <= limit:
                item_s[g, k] += own[w, k]
                first[k], last[k] = min(first[k], head[w, k]), min(last[k], rest[w, k, j])
            else:
                may[g, k] = False
    for k in range(devices):
        room[k] = max(limit - first[k] - last[k], 0.0) if first[k] < np.inf else 0.0
    step = 0.7
    for _ in range(EFFORT.priced):
        spent, paid, largest = 0.0, 0.0, 0.0
        for k in range(devices):
            load[k] = 0.0
        for i in range(count):
            g, least, where = net.item[i], np.inf, -1
            for k in range(devices):
                if may[g, k] and price[k] * item_s[g, k] < least:
                    least, where = price[k] * item_s[g, k], k
            if where < 0:
                return True
            spent += least
            load[where] += item_s[g, where]
        for k in range(devices):
            paid += price[k] * room[k]
            largest = max(largest, abs(load[k] - room[k]))
        if spent - paid > EFFORT.sure * spent:
            return True
        if largest == 0.0:
            return False
        total = 0.0
        for k in range(devices):
            price[k] *= 1.0 + step * (load[k] - room[k]) / largest
            total += price[k]
        for k in range(devices):
            price[k] = max(price[k] / total, 1e-12)
        step *= 0.88
    return False


@kernel
def _never(net, num, fork, v, j, limit):
    """Whether the join ``v`` on ``j`` cannot begin by ``limit``, wherever the fork is."""
    if fork < 0:
        return _cannot(net, num, net.start, j, limit)
    for d in range(len(net.price)):
        if net.own_s[fork, d] == np.inf:
            continue
        for i in range(num):
            w = net.between[i]
            for k in range(len(net.price)):
                net.head[w, k] = max(net.start[w, k], net.end[fork, d] + net.since[w, d, k])
        if not _cannot(net, num, net.head, j, limit):
            return False
    return True


@kernel
def _alone(net, num, fork, j):
    """When a join can begin where all are on ``j``."""
    first, last, total = np.inf, np.inf, 0.0
    for i in range(num):
        w = net.between[i]
        head = net.start[w, j]
        if fork >= 0:
            head = max(head, net.end[fork, j] + net.since[w, j, j])
        first, last, total = min(first, head), min(last, net.rest[w, j, j]), total + net.own_s[w, j]
    return first + total + last


@kernel
def _delay(net, fork, v, places):
    """A join begins later, on each of ``places`` devices, where what is between allows no other."""
    devices, num = len(net.price), 0
    for w in range(fork + 1, v):
        net.after[w] = fork < 0 and net.of_join[w] == v
        if fork >= 0 and net.of_join[w] == v:
            net.since[w] = 0.0
            for e in range(net.in_ptr[w], net.in_ptr[w + 1]):
                u = net.src[e]
                if u < fork or (u > fork and not net.after[u]):
                    continue
                net.after[w] = True
                net.work += devices * devices * (devices if u > fork else 1)
                for d in range(devices):
                    for k in range(devices):
                        least = net.sent_s[e, d, k]
                        if u > fork:
                            least = np.inf
                            for x in range(devices):
                                ends = net.since[u, d, x] + net.own_s[u, x]
                                least = min(least, ends + net.sent_s[e, x, k])
                        net.since[w, d, k] = max(net.since[w, d, k], least)
        if net.after[w]:
            net.between[num] = w
            num += 1
    if num < 2:
        return
    since = 0.0
    if fork >= 0:
        since = np.inf
        for d in range(devices):
            since = min(since, net.end[fork, d])
    for j in range(places):
        begin = net.start[v, j]
        step, near = EFFORT.step * (begin - since), EFFORT.near * (begin - since)
        low, high = begin, np.inf
        if net.own_s[v, j] == np.inf or step <= 0.0:
            continue
        for k in range(devices):
            net.price[k] = 1 / devices
        while high - low > near and net.work < net.most:
            limit = low + step if high == np.inf else (low + high) / 2
            if not _never(net, num, fork, v, j, limit):
                high = limit
                if low == begin:  # as far as is worth a look
                    break
            else:
                low, step = limit, 2 * step
        alone = _alone(net, num, fork, j) * (1 - 4 * EFFORT.sure)
        if low < alone < np.inf:
            for k in range(devices):
                net.price[k] = 1.0 if k == j else 0.0
            if _never(net, num, fork, v, j, alone):
                low = alone
        net.start[v, j] = low


@kernel
def _join(net, v, places):
    """Of the forks before a join, from the last back to the one that every way leads over."""
    ways, begins, forks, devices = net.in_ptr[v + 1] - net.in_ptr[v], False, 0, len(net.price)
    for w in range(v - 1, -1, -1):
        to = 0
        for i in range(net.out_ptr[w], net.out_ptr[w + 1]):
            e = net.out[i]
            q = net.dst[e]
            if q != v and (q > v or net.of_join[q] != v):
                continue
            if to == 0:
                net.rest[w] = 0.0
            to += 1
            net.work += devices * places * (devices if q != v else 1)
            for k in range(devices):
                for j in range(places):
                    least = net.sent_s[e, k, j]
                    if q != v:
                        least = np.inf
                        for x in range(devices):
                            takes = net.sent_s[e, k, x] + net.own_s[q, x]
                            least = min(least, takes + net.rest[q, x, j])
                    net.rest[w, k, j] = max(net.rest[w, k, j], least)
        if to == 0:
            continue
        net.of_join[w] = v
        ways -= to
        every = ways == 0 and not begins
        if every or (forks < EFFORT.forks and net.out_ptr[w + 1] - net.out_ptr[w] > 1):
            _delay(net, w, v, places)
            forks += 1
        if every or net.work >= net.most:
            return
        ways += net.in_ptr[w + 1] - net.in_ptr[w]
        begins |= net.in_ptr[w + 1] == net.in_ptr[w]
    _delay(net, -1, v, places)


@kernel
def _end(net):
    """When all have ended, at the earliest."""
    last, devices = len(net.start) - 1, len(net.price)
    for v in range(last + 1):
        for e in range(net.in_ptr[v], net.in_ptr[v + 1]):
            for j in range(devices):
                least = np.inf
                for k in range(devices):
                    least = min(least, net.end[net.src[e], k] + net.sent_s[e, k, j])
                net.start[v, j] = max(net.start[v, j], least)
        if (v == last or net.in_ptr[v + 1] - net.in_ptr[v] > 1) and net.work < net.most:
            _join(net, v, 1 if v == last else devices)
        for k in range(devices):
            net.end[v, k] = net.start[v, k] + net.own_s[v, k]
    return net.start[last, 0]


def earliest_end_s(problem: Problem, work: int) -> float:
    """A latency that is no more than that of any placement, with all transfers.

    Operators begin when what they read can be there, from wherever it is made. What is between a
    fork and a join has time on each device from when it can be there to when it must be sent: for
    each device of the fork and of the join less than it takes is too little. Where every way leads
    over the fork, nothing before it is looked at. ``work``: numbers that are looked at at most; the
    more, the larger it may be (0: paths).
    """
    g, n = problem.graph, problem.num_ops
    own = np.flatnonzero(problem.worker == np.arange(problem.num_devices))
    own_s = np.zeros((n + 1, len(own)))
    seconds = np.where(problem.supported, problem.compute_s, np.inf)
    for k, d in enumerate(own):
        own_s[:n, k] = seconds[:, problem.worker == d].min(axis=1)
    (host, shares_host), ends = host_of(problem), np.ix_(own, own)
    all_s = problem.transfers_s(itemgetter((..., *ends)))
    inner, start = g.tensor_src[g.use_tensor] >= 0, np.zeros((n + 1, len(own)))
    read, reader = g.use_tensor[~inner], g.use_dst[~inner]
    from_host_s = all_s[read, np.searchsorted(own, problem.worker[host])]
    np.maximum.at(start, reader, np.where(shares_host[own], 0.0, from_host_s))
    pairs = np.stack([g.use_dst, g.tensor_src[g.use_tensor]])[:, inner]
    last = np.setdiff1d(np.arange(n), pairs[1])
    pairs = np.concatenate([pairs, [np.full(len(last), n), last]], axis=1).astype(np.int64)
    (dst, src), edge = np.unique(pairs, axis=1, return_inverse=True)
    sent_s = np.zeros((len(src), *all_s.shape[1:]))
    received_s = taken_in(problem)[inner, None, None] * problem.link_receive_s[ends]
    np.maximum.at(sent_s, edge.ravel()[: inner.sum()], all_s[g.use_tensor[inner]] + received_s)
    out = np.argsort(src, kind="stable")
    net = _Graph.fresh(
        {"N": n, "K": len(own)},
        in_ptr=np.searchsorted(dst, np.arange(n + 2)),
        src=src.copy(),
        out_ptr=np.searchsorted(src[out], np.arange(n + 2)),
        out=out,
        dst=dst.copy(),
        sent_s=sent_s,
        own_s=own_s,
        start=start,
        group=g.group.astype(np.int64),
        price=np.full(len(own), 1 / len(own)),
        most=work,
    )
    return float(_end(net)) * EXACT
