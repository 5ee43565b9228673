"""What devices take, at least, in view of all that they write and read: minimum cuts."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.bounds.loads import alike
from placement.problem import Floats, Problem
from placement.simulator.analytic_kernels import Blocks, blocks
from placement.tools.jit import Struct, array, kernel
from placement.tools.lp import EXACT

Array = NDArray[Any]


class CutEffort(NamedTuple):
    """What may be spent on the cuts of a problem: more of it raises the bound by little."""

    looks: int = 60_000_000  # at arcs (0.3 s); a third for groups alone, half before some are put
    counted: int = 4  # groups per device, of which it is asked how many one device can run
    placed: int = 200  # answers that are looked at, where some groups are put on devices
    least: float = 1e-13  # of all capacities, that a path is worth


EFFORT = CutEffort()


class _Arcs(Struct):
    """Arcs between nodes, the last two of which are source and sink; room for ``_augment``."""

    begin: Array  # int64 [V + 1] where the arcs from each node begin in ``arcs``
    arcs: Array  # int64 [A] by the node that they are from; arc ``a ^ 1`` is the other way
    head: Array  # int64 [A] the node that each is to
    level: Array = array("V", np.int64)  # in the end -1 on the sink's side
    queue: Array = array("V", np.int64)
    at: Array = array("V", np.int64)
    path: Array = array("V", np.int64)
    looks: int  # at arcs


@kernel
def _augment(net, left, least):
    """The flow that is added (Dinic 1970); ``left``: what each arc can carry still."""
    begin, arcs, head = net.begin, net.arcs, net.head
    level, queue, at, path = net.level, net.queue, net.at, net.path
    sink = len(begin) - 2
    source, total = sink - 1, 0.0
    while True:
        for u in range(len(level)):
            level[u], at[u] = -1, begin[u]
        level[source], queue[0], num = 0, source, 1
        for k in range(len(queue)):
            if k == num:
                break
            for i in range(begin[queue[k]], begin[queue[k] + 1]):
                v = head[arcs[i]]
                if level[v] < 0 and left[arcs[i]] > least:
                    level[v], queue[num] = level[queue[k]] + 1, v
                    num += 1
        if level[sink] < 0:
            return total
        net.looks += len(arcs)
        u, depth = source, 0
        while True:
            net.looks += 1
            while at[u] < begin[u + 1]:
                a = arcs[at[u]]
                if left[a] > least and level[head[a]] == level[u] + 1:
                    break
                at[u] += 1
                net.looks += 1
            if at[u] < begin[u + 1]:
                path[depth], u = arcs[at[u]], head[arcs[at[u]]]
                depth += 1
            elif depth:
                depth -= 1
                u = head[path[depth] ^ 1]
                at[u] += 1
            else:
                break
            if u == sink:
                amount = np.inf
                net.looks += depth
                for i in range(depth):
                    amount = min(amount, left[path[i]])
                total += amount
                for i in range(depth - 1, -1, -1):
                    left[path[i]] -= amount
                    left[path[i] ^ 1] += amount
                    if left[path[i]] <= least:  # go on from where the first that is full begins
                        depth, u = i, head[path[i] ^ 1]


@dataclass(frozen=True, eq=False)
class _Flow:
    """The least seconds of a device; with which groups; what the arcs can carry still."""

    seconds: float
    there: NDArray[np.bool_]
    left: Floats


class _Network:
    """Cuts in it are sets of groups, and cost what a device takes that runs these.

    Groups are nodes; those that the device runs are on the source's side. It pays for a tensor that
    it makes where a node is not there that all users pull, and for one that it reads where a node
    is there that any user pulls.
    """

    def __init__(self, b: Blocks) -> None:
        groups, tensors = np.arange(b.num_blocks), np.arange(len(b.src))
        write = len(groups) + tensors
        read = write + len(tensors)
        source = len(groups) + 2 * len(tensors)
        which, made = np.repeat(tensors, np.diff(b.use_ptr)), b.src >= 0
        source_of = np.where(made, b.src, source + 1)
        none = np.zeros(len(groups), int)
        tail = groups, source + none, b.src[made], write[which], b.use_dst, read
        head = source + 1 + none, groups, write[made], b.use_dst, read[which], source_of
        self.groups, self.made, self.many = len(groups), made, len(which)
        ends = np.stack([np.concatenate(tail), np.concatenate(head)], axis=1).astype(np.int64)
        arcs = np.argsort(ends.ravel(), kind="stable")
        self.arcs = _Arcs.fresh(
            {"V": source + 2},
            begin=np.searchsorted(ends.ravel()[arcs], np.arange(source + 3)),
            arcs=arcs,
            head=ends[:, ::-1].ravel().copy(),
        )

    def nothing(self, compute_s: Floats, io_s: Floats) -> _Flow:
        """A device with no group; what it runs takes ``[G]``, what it writes or reads ``[H]``."""
        free = np.full(self.many, np.inf)
        can = compute_s, np.zeros(self.groups), io_s[self.made], free, free, io_s
        left = np.zeros(len(self.arcs.head))
        left[::2] = np.concatenate(can)
        return _Flow(0.0, np.zeros(self.groups, np.bool_), left)

    def more(self, flow: _Flow, inside: Any, outside: Any, price: float = np.inf) -> _Flow:
        """With more groups that the device runs, or pays for, and more that it does not."""
        left = flow.left.copy()
        left[2 * outside], left[2 * (self.groups + inside)] = np.inf, price
        least = EFFORT.least * float(left[np.isfinite(left)].sum())
        seconds = flow.seconds + _augment(self.arcs, left, least)
        return _Flow(seconds, self.arcs.level[: self.groups] >= 0, left)

    def many_s(self, alone: _Flow, groups: Any, many: int, all_s: float) -> float:
        """What a device takes, at least, that runs ``many`` of ``groups``, all in ``all_s``.

        It is offered to pay for groups instead: what is cheapest then is no more than the load of
        any such set and the price of the other groups.
        """
        low, high = (0, 0.0), (len(groups), all_s)
        while True:
            price = (high[1] - low[1]) / (high[0] - low[0])
            flow = self.more(alone, groups, groups[:0], price)
            here = int(flow.there[groups].sum())
            if here in (low[0], high[0], many):
                return (flow.seconds - price * (len(groups) - many)) * EXACT
            point = here, flow.seconds - price * (len(groups) - here)
            low, high = (point, high) if here < many else (low, point)


def _counted_s(
    net: _Network, alone: dict[int, _Flow], kind: list[int], took_s: Floats, least_s: float
) -> float:
    """The largest load, from ``least_s`` up: of some groups a device runs only so many in it, and
    devices run all.

    Each of these groups is one that, besides those before it, takes devices longest: no device
    counts for more than ``least_s``. ``took_s [G, D]``: of each group alone.
    """
    none = chosen = np.zeros(0, int)
    every, many = alone, dict.fromkeys(alone, 0)
    heap = [(-s, g, 0) for g, s in enumerate(np.minimum(took_s, least_s).sum(axis=1).tolist())]
    heapify(heap)
    while heap and len(chosen) < EFFORT.counted * len(kind) and net.arcs.looks < EFFORT.looks / 2:
        _, g, when = heappop(heap)
        more = {k: net.more(every[k], np.array([g]), none) for k in alone}
        if when < len(chosen):  # it takes less since
            longer = (min(more[k].seconds - every[k].seconds, least_s) for k in kind)
            heappush(heap, (-sum(longer), g, len(chosen)))
            continue
        every, chosen = more, np.append(chosen, g)
        while len(chosen) > sum(many[k] for k in kind):
            longer_s = {
                k: net.many_s(alone[k], chosen, many[k] + 1, every[k].seconds)
                for k in alone
                if many[k] < len(chosen)
            }
            least_s = max(least_s, min(longer_s.values()))
            for k in longer_s:
                many[k] += longer_s[k] <= least_s
    return least_s


def cut_load_s(problem: Problem, prices: Floats, least_s: float) -> float:
    """The largest load (``max_load``, one phase), from ``least_s`` up.

    Which groups go well with one that a device runs, and without those that others run, is a
    minimum cut of a network, whatever happens to the rest (Stone 1977). The loads of all at
    ``prices [D]`` are no less than what every group costs where that is cheapest, and what is paid
    besides, which is a cut as well. Groups are put wherever they can be, those first that make a
    device busiest; what can become least is looked at first.
    """
    b, devices = blocks(problem, problem.graph.group), problem.num_devices
    if not b.io_s.any() or devices == 1:
        return least_s
    net, can = _Network(b), np.isfinite(b.compute_s)
    priced = np.where(can, np.where(can, b.compute_s, 0.0) * prices, np.inf)
    cheapest = priced.min(axis=1)
    above = priced - cheapest[:, None]
    room_bytes = problem.memory_bytes.astype(np.float64)
    room_bytes[problem.cluster.streaming] = np.inf  # the host holds them
    facts = np.concatenate([b.compute_s, b.io_s, room_bytes[None]])
    kinds = alike(facts)[1]
    kind: list[int] = np.unique(kinds, return_index=True)[1][kinds].tolist()  # the first of each
    took_s = np.where(can, b.compute_s, b.compute_s[can].sum() + b.io_s.sum())  # never, but finite
    alone = {k: net.nothing(took_s[:, k], b.io_s[:, k]) for k in set(kind)}
    spent = {k: net.nothing(above[:, k], prices[k] * b.io_s[:, k]) for k in set(kind)}
    none, io = np.zeros(0, int), b.io_s.max(axis=0) > 0
    covered = np.zeros(b.num_blocks, np.bool_)
    for g in np.argsort(-took_s.min(axis=1), kind="stable").tolist():
        if covered[g] or net.arcs.looks > EFFORT.looks / 3:
            continue  # it may be with a group that takes as long
        ways = {k: net.more(alone[k], np.array([g]), none) for k in alone if io[k]}
        for k in ways:
            took_s[g, kinds == kinds[k]] = ways[k].seconds
        if ways:
            covered |= np.array([way.there for way in ways.values()]).all(axis=0)
    order = np.argsort(-took_s.min(axis=1), kind="stable")
    least_s = max(least_s, float(took_s.min(axis=1).max()) * EXACT)
    least_s, all_s = _counted_s(net, alone, kind, took_s, least_s), float(cheapest.sum())
    # A bound, minus the groups that are put, a number, their devices, two flows of each device.
    begun: Any = least_s, 0, 0, none, [(alone[k], spent[k]) for k in kind]
    open_, number = [begun], 0
    for _ in range(EFFORT.placed):
        bound_s, put, _, device, flows = open_[0]
        if -put == len(order) or net.arcs.looks > EFFORT.looks:
            break
        heappop(open_)
        group, tried = int(order[-put]), set()
        for d in range(devices):
            here = np.append(device, d)
            members = [order[: 1 - put][here == e] for e in range(devices)]
            same = kind[d], d if len(members[d]) > 1 else -1
            full = b.own_bytes[members[d]].sum() > room_bytes[d]
            if not can[group, d] or full or same in tried:
                continue
            tried.add(same)
            new, loads_s, spent_s = [], bound_s, all_s
            for e in range(devices):
                others = order[: 1 - put][here != e]
                both = tuple(
                    flow if not len(members[e]) or flow.there[group] == (e == d)
                    else net.more(flow, members[e], others)
                    for flow in flows[e]
                )  # fmt: skip
                new.append(both)
                loads_s = max(loads_s, both[0].seconds * EXACT)
                spent_s += both[1].seconds
            number += 1
            heappush(open_, (max(loads_s, spent_s * EXACT), put - 1, number, here, new))
        if not open_:  # nothing fits
            return bound_s
    return open_[0][0]
