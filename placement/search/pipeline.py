"""Placements of a pipeline without the simulator: what a period is likely to be, and walks down.

No period is below the load of a device or a channel, nor below the longest path over the
micro-batches in flight: its *bound*. What it takes beyond that, because micro-batches wait for each
other, is foreseen: by hand, each hand-over on the path waits a share of the period; or by a network
that sees ``FEATURES`` (``agents.foresee``). All of them come from one pass over the operators.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.objective import Objective
from placement.problem import Problem
from placement.search.evaluation import Choice, can_move, device_classes, neighbours
from placement.search.list_schedule import memory_counts
from placement.search.macro import SHARE, Draws, draws_of, overflow, propose, uniform
from placement.search.perceptron import add_rows, output
from placement.search.stages import (
    Split,
    Stages,
    merge_blocks,
    splits,
    topological_orders,
)
from placement.simulator import kernels
from placement.simulator.analytic import load_moves
from placement.simulator.analytic_kernels import apply_moves, fill_state, undo_moves
from placement.simulator.kernels import Tables
from placement.tools.jit import Struct, array, copy, inlined, kernel, largest

Array = NDArray[Any]

# Ratios, as pipelines of any size and speed look alike.
FEATURES = (
    "the second largest load over the largest",
    "the third largest over the largest",
    "the mean load over the largest",
    "the largest channel over the bound",
    "the longest path over the bound, by the micro-batches in flight",
    "the same where hand-overs wait",
    "one micro-batch with the devices to itself, over the bound, by those in flight",
    "from a device's first operator of it to its last, mean of the busiest devices, the same",
    "most hand-overs in a row, by the micro-batches in flight",
    "hand-overs of a device, logarithm",
    "seconds of transfers over the bound, of a device",
    "the longest operator over the bound",
    "devices, logarithm",
    "micro-batches in flight, logarithm",
)
NUM_FEATURES = len(FEATURES)
WAITED = 5  # of them; it is what is foreseen by hand, and where networks begin
WAITS = 0.3  # of the bound, that hand-overs wait in it
SQUARINGS = (2, 4, 8)  # of walks in turn: few see all loads, many see the largest alone
MOST = 256  # moves that a walk makes


class WalkEffort(NamedTuple):
    """The numbers of walks, but for those that networks are trained with."""

    rounds: int = 6  # walks in a row; by hand twice as many
    steps: int = 1000  # moves of a walk that are estimated
    body: int = 64  # most groups of a move
    hot: float = 0.2  # of the moves start on the busiest device
    rounding: float = 1e-9  # of energies
    hand_waits: float = 0.1  # of the bound, that hand-overs wait in it by hand
    promise: float = 0.1  # of the period: by hand a walk is trusted where it saves as much


EFFORT = WalkEffort()


class Net(Struct):
    """Two hidden layers of ``H``; with ``H = 0`` what is foreseen is so by hand."""

    into: Array  # float64 [F, H]
    bias: Array  # float64 [H]
    hidden: Array  # float64 [H, H]
    hidden_bias: Array  # float64 [H]
    out: Array  # float64 [H]
    last: float
    first: Array  # float64 [H] room, as is the next
    second: Array


def net_of(
    into: Array, bias: Array, hidden: Array, hidden_bias: Array, out: Array, last: float
) -> Net:
    """With these weights."""
    first, second = np.zeros((2, len(bias)))
    weights = {"into": into, "bias": bias, "hidden": hidden, "hidden_bias": hidden_bias, "out": out}
    arrays = {k: np.ascontiguousarray(v, np.float64) for k, v in weights.items()}
    return Net(**arrays, last=float(last), first=first, second=second)


def no_net() -> Net:
    """None: by hand."""
    none = np.zeros(0)
    return net_of(np.zeros((NUM_FEATURES, 0)), none, np.zeros((0, 0)), none, none, 0.0)


class Room(Struct):
    """Of a placement that is estimated."""

    window: float  # micro-batches in flight
    group_s: Array  # float64 [G, D] seconds of the operators of each group
    work: Array = array("D")  # that part of the loads
    memory_binds: bool
    wait: float  # seconds that a tensor which is handed over arrives later than its transfer takes
    ptr: Array  # int32 [G + 1] the operators of each group
    op: Array  # int32 [N]
    placement: Array = array("N", np.int32)
    load: Array = array("D")  # seconds per micro-batch
    channel: Array = array("channels+1")
    stamp: Array = array("D", np.int32)  # the tensor that was sent there last
    # When the last input of each operator is there, and when that tensor is: without waits, with
    # them, and where devices and channels do one thing at a time.
    ready: Array = array("N, 3")
    arrives: Array = array("D, 3")
    level: Array = array("N", np.int64)  # most hand-overs before it
    busy: Array = array("D")  # until then the device does one thing at a time, the next too
    carried: Array = array("channels+1")
    begin: Array = array("D")  # when it begins the first operator
    path_s: float  # the longest, without waits and with them
    waited_s: float
    alone_s: float  # one micro-batch alone
    longest_s: float  # operator
    moved_s: float
    handed: float
    deepest: float
    bound_s: float
    features: Array = array("F")
    net: Net


@kernel
def measure(t, r):
    """Fill loads and paths of ``r`` for its placement; without a network what both ways need."""
    placement, load, channel, ready = r.placement, r.load, r.channel, r.ready
    stamp, arrives, level = r.stamp, r.arrives, r.level
    num_devices, n = len(load), len(placement)
    learned = len(r.net.bias) > 0
    load[:] = 0.0
    channel[:] = 0.0
    ready[:] = 0.0
    level[:] = 0
    stamp[:] = -1
    r.busy[:] = 0.0
    r.carried[:] = 0.0
    r.begin[:] = np.inf
    path = waited = alone = longest = moved = 0.0
    handed, deepest = 0, np.int64(0)
    for k in range(-1, n):
        i, src, end, late, done = np.int64(n), np.int64(num_devices), 0.0, 0.0, 0.0
        depth = np.int64(0)
        if k >= 0:  # model inputs come first
            i = np.int64(t.by_priority[k])
            src = np.int64(placement[i])
            seconds = t.loaded_s[i, src]
            load[t.worker[src]] += seconds
            end, late = ready[i, 0] + seconds, ready[i, 1] + seconds
            path, waited = max(path, end), max(waited, late)
            if learned:
                start = max(ready[i, 2], r.busy[src])
                done = start + seconds
                r.busy[src] = done
                r.begin[src] = min(r.begin[src], start)
                alone, longest = max(alone, done), max(longest, seconds)
                depth = level[i]
                deepest = max(deepest, depth)
        for e in range(t.edge_ptr[i], t.edge_ptr[i + 1]):
            user = t.edge_dst[e]
            d = np.int64(placement[user])
            at, late_at, done_at, deep, receive_s = end, late, done, depth, 0.0
            if d != src:
                tensor = t.edge_tensor[e]
                if stamp[d] != tensor:
                    stamp[d] = tensor
                    link, size = src * num_devices + d, t.edge_bytes[e]
                    if len(t.transfer_s) > 0:
                        sent = t.transfer_s[(tensor * (num_devices + 1) + src) * num_devices + d]
                    else:
                        sent = t.link_latency_s[link] + t.link_s_per_byte[link] * size
                    c, free = t.link_channel[link], done
                    if t.contention:
                        channel[c] += sent
                        if sent > 0.0:
                            free = max(done, r.carried[c])
                            r.carried[c] = free + sent
                    if src < num_devices:
                        busy = t.link_send_s[link] + t.link_send_s_per_byte[link] * size
                        load[t.worker[src]] += busy + (sent if t.link_blocking[link] else 0.0)
                        if len(t.link_receive_s) > 0:
                            receive_s = t.link_receive_s[link]
                            load[t.worker[d]] += receive_s
                        handed += 1
                        moved += sent
                    arrives[d, 0] = end + sent
                    arrives[d, 1] = late + sent + r.wait
                    arrives[d, 2] = free + sent
                at, late_at, done_at = arrives[d, 0], arrives[d, 1], arrives[d, 2]
                deep = depth + (src < num_devices)
            ready[user, 0] = max(ready[user, 0], at + receive_s)
            ready[user, 1] = max(ready[user, 1], late_at + receive_s)
            ready[user, 2] = max(ready[user, 2], done_at + receive_s)
            level[user] = max(level[user], deep)
    channel[t.local_channel] = 0.0
    r.path_s, r.waited_s, r.alone_s = path, waited, alone
    r.longest_s, r.moved_s, r.handed, r.deepest = longest, moved, handed, deepest


@kernel
def describe(r):
    """Fill the features of ``r`` when it is measured, and its bound."""
    load, f, num_devices = r.load, r.features, len(r.load)
    most = second = third = total = carried = span = share = 0.0
    for d in range(num_devices):
        x = load[d]
        total += x
        if x > most:
            most, second, third = x, most, second
        elif x > second:
            second, third = x, second
        else:
            third = max(third, x)
    for d in range(num_devices):
        if r.busy[d] > 0.0:
            weight = (load[d] / most) ** 8
            span += weight * (r.busy[d] - r.begin[d])
            share += weight
    for c in range(len(r.channel)):
        carried = max(carried, r.channel[c])
    r.bound_s = max(most, carried, r.path_s / r.window)
    bound = max(r.bound_s, 1e-300)
    most = max(most, 1e-300)
    f[0], f[1], f[2] = second / most, third / most, total / num_devices / most
    f[3] = carried / bound
    f[4] = r.path_s / (r.window * bound)
    f[5] = r.waited_s / (r.window * bound)
    f[6] = r.alone_s / (r.window * bound)
    f[7] = span / max(share, 1e-300) / (r.window * bound)
    f[8] = r.deepest / r.window
    f[9] = np.log1p(r.handed / num_devices)
    f[10] = r.moved_s / (num_devices * bound)
    f[11] = r.longest_s / bound
    f[12] = np.log(num_devices)
    f[13] = np.log(r.window)
    for i in range(len(f)):
        f[i] = min(f[i], 20.0)


@kernel
def judge(r):
    """The logarithm of the period over the bound that the network foresees for the features."""
    net, first, second = r.net, r.net.first, r.net.second
    copy(first, net.bias)
    add_rows(first, r.features, net.into)
    by_hand = net.last + np.log(max(1.0, r.features[WAITED]))
    return max(0.0, output(by_hand, first, second, net.hidden, net.hidden_bias, net.out))


@kernel
def foresee(t, r):
    """Fill ``bound_s`` of ``r``; the logarithm of the period over it."""
    measure(t, r)
    if len(r.net.bias) > 0:
        describe(r)
        return judge(r)
    load_s = r.load[largest(r.load, len(r.load))]
    channel_s = r.channel[largest(r.channel, len(r.channel))]
    r.path_s = r.waited_s
    r.bound_s = max(r.path_s / r.window, load_s, channel_s)
    return 0.0


@inlined
def _power(x, squarings):
    for _ in range(squarings):
        x *= x
    return x


@inlined
def _energy(r, extra, over, scale, squarings):
    """Loads and the path, of which the largest is the bound, in powers: none is flat."""
    total = _power(r.path_s / r.window * scale, squarings)
    for d in range(len(r.load)):
        total += _power(r.load[d] * scale, squarings)
    for c in range(len(r.channel)):
        if r.channel[c] > 0.0:
            total += _power(r.channel[c] * scale, squarings)
    return np.log(total + 1e-300) / 2.0**squarings + extra + 1e3 * over


@inlined
def _transfer(t, r, group, old, new):
    """Count the operators of ``group`` as work of the device ``new``, not ``old``."""
    r.work[t.worker[old]] -= r.group_s[group, old]
    r.work[t.worker[new]] += r.group_s[group, new]


@inlined
def _worked(r, scale, squarings):
    """The part of the sum in ``_energy`` that is operators: it is never below this."""
    total = 0.0
    for d in range(len(r.work)):
        total += _power(r.work[d] * scale, squarings)
    return total


@kernel
def walk(t, m, s, w, r, squarings, most, best):
    """Draw ``steps`` moves of ``s`` and make those that worsen no energy, ``most`` better ones.

    What does not fit costs more than any load. ``best`` int32 ``[G]`` is where what is foreseen
    was the least, and fits; it is left as it is where that is not below the first.
    """
    device, held, memory = s.device, s.held, m.memory
    random, group, where, ptr, op = w.random, w.group, w.where, r.ptr, r.op
    fill_state(m, s)
    r.work[:] = 0.0
    for g in range(len(device)):
        r.work[t.worker[device[g]]] += r.group_s[g, device[g]]
        for i in range(ptr[g], ptr[g + 1]):
            r.placement[op[i]] = device[g]
    extra = foresee(t, r)
    over = overflow(held, memory)
    best_s = r.bound_s * np.exp(extra)
    scale = 1.0 / max(r.bound_s, 1e-300)
    energy = _energy(r, extra, over, scale, squarings)
    most_work = np.exp((energy + EFFORT.rounding) * 2.0**squarings)
    hottest, num_better = np.int64(largest(r.load, len(r.load))), 0
    for _ in range(EFFORT.steps):
        if num_better == most:
            break
        count = propose(w, device, hottest if uniform(random) < EFFORT.hot else np.int64(-1))
        if count == 0:
            continue
        old, new = np.int64(device[group[0]]), np.int64(where[0])
        for k in range(count):
            _transfer(t, r, group[k], device[group[k]], where[k])
        if _worked(r, scale, squarings) > most_work:  # whatever else it costs
            for k in range(count):
                _transfer(t, r, group[k], where[k], device[group[k]])
            continue
        if r.memory_binds:
            apply_moves(m, s, group, where, count)
        for k in range(count):
            device[group[k]] = where[k]
            for i in range(ptr[group[k]], ptr[group[k] + 1]):
                r.placement[op[i]] = where[k]
        extra = foresee(t, r)
        over = overflow(held, memory)
        then = _energy(r, extra, over, scale, squarings)
        if then <= energy:
            num_better += then < energy
            energy = then
            most_work = np.exp((energy + EFFORT.rounding) * 2.0**squarings)
            hottest = np.int64(largest(r.load, len(r.load)))
            value_s = r.bound_s * np.exp(extra)
            if over == 0.0 and value_s < best_s * (1 - 1e-12):
                best_s = value_s
                copy(best, device)
            continue
        if r.memory_binds:
            undo_moves(m, s, group, where, count)
        for k in range(count):
            device[group[k]] = old if where[k] == new else new
            _transfer(t, r, group[k], where[k], device[group[k]])
            for i in range(ptr[group[k]], ptr[group[k] + 1]):
                r.placement[op[i]] = device[group[k]]


class Pipeline:
    """A problem whose period is foreseen, and a placement of it.

    Args:
        problem: a pipeline.
        seed: of the moves of walks.
        net: what foresees; None: by hand.
    """

    def __init__(self, problem: Problem, seed: int, net: Net | None = None) -> None:
        g, compute_s = problem.graph, problem.group_compute_s
        self.problem, self.learned = problem, net is not None
        self._share = EFFORT.hand_waits if net is None else WAITS
        self.tables: Tables = kernels.tables(problem)
        self.moves, self.state = load_moves(problem, compute_s.argmin(axis=1)[g.group])
        body = min(EFFORT.body, g.num_groups)
        self.draws: Draws = draws_of(compute_s, neighbours(problem), seed, SHARE, 0.0, body)
        sizes = {"N": g.num_ops, "D": problem.num_devices, "channels": problem.num_channels}
        self.room = Room.fresh(
            sizes | {"F": NUM_FEATURES},
            window=float(min(problem.num_run, problem.max_in_flight)),
            group_s=g.per_group(problem.loaded_s),
            memory_binds=problem.memory_may_bind,
            ptr=g.group_ptr,
            op=g.group_op,
            net=net or no_net(),
        )

    def walk(self, choice: Choice, wait: float, squarings: int, most: int) -> Choice:
        """The best estimate on a walk of ``most`` moves or fewer from ``choice`` int32 ``[G]``."""
        self.state.device[:], self.room.wait = choice, wait
        best = choice.copy()
        walk(self.tables, self.moves, self.state, self.draws, self.room, squarings, most, best)
        return best

    def estimate(self, choice: Choice, wait: float) -> float:
        """Seconds of the period of ``choice`` int32 ``[G]``, where hand-overs wait so long."""
        room = self.room
        room.placement[:], room.wait = choice[self.problem.graph.group], wait
        extra = foresee(self.tables, room)
        return float(room.bound_s * np.exp(extra))

    def bound(self, choice: Choice) -> float:
        """Seconds that no period of ``choice`` int32 ``[G]`` is below."""
        self.estimate(choice, 0.0)
        return float(self.room.bound_s)

    def foresee(self, choice: Choice) -> float:
        """Seconds of the period of ``choice`` int32 ``[G]``, waits as a share of its bound."""
        return self.estimate(choice, self._share * self.bound(choice))

    def descend(self, choice: Choice) -> Choice:
        """Where walks from ``choice`` int32 ``[G]`` end; by hand only if that promises much."""
        end = choice
        for k in range(EFFORT.rounds if self.learned else 2 * EFFORT.rounds):
            wait = self._share * self.bound(end)
            end = self.walk(end, wait, SQUARINGS[k % len(SQUARINGS)], MOST)
        promise = 0.0 if self.learned else EFFORT.promise
        return end if self.foresee(end) < (1 - promise) * self.foresee(choice) else choice

    def describe(self, choice: Choice) -> tuple[float, Array]:
        """The bound of ``choice`` int32 ``[G]`` in seconds, its ``FEATURES`` float64 ``[F]``."""
        self.foresee(choice)
        return float(self.room.bound_s), self.room.features.copy()

    def wait_of(self, choice: Choice, value_s: float, most: float) -> float:
        """The wait at which the estimate is ``value_s``, seconds in 0 .. ``most``."""
        low, high = 0.0, most
        for _ in range(12):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.estimate(choice, middle) < value_s else (low, middle)
        return high


def can_foresee(problem: Problem) -> bool:
    """Whether it is a pipeline whose period can be foreseen."""
    pipelined = problem.objective is Objective.PERIOD and problem.num_run > 1
    return pipelined and not problem.cluster.streaming and can_move(problem)


def cheapest(problem: Problem, most: int = 24) -> list[Split]:
    """The cheapest contiguous splits of ``most`` orders (``contiguous_dp``), none evaluated."""
    kinds = np.bincount(device_classes(problem))
    sets = float(min(np.prod(kinds + 1.0), 512)) * len(kinds)
    num_blocks = 200
    steps = sets * min(problem.graph.num_groups, num_blocks) ** 2
    most = int(min(most, max(2, 3e8 / steps)))  # fewer where they take long
    orders = topological_orders(problem, most - 1)
    positions, stages = [None, *orders], Stages(problem)
    for count in reversed(memory_counts(problem)):  # what surely fits, if there is any
        cuts: list[Split] = []
        for position in positions:
            block = merge_blocks(problem, num_blocks, position)
            cuts += splits(stages, block, count, 3)
        if cuts:
            return sorted(cuts, key=lambda split: split.cost_s)[:24]
    return []


def constructed(problem: Problem, net: Net | None, seed: int = 0) -> Iterator[Choice]:
    """Placements int32 ``[G]`` that are worth an evaluation, the most promising first.

    Nothing is evaluated. By hand and, where there is one, with the network walks go down from the
    split of the least period that is foreseen; the network decides which of the two ends is first.
    Then come the cheapest split itself, and walks from further splits. The fastest device alone,
    where all surely fits there, is before all others if that is faster than what is foreseen.
    """
    starts = [split.choice for split in cheapest(problem)]
    alone_s = problem.group_compute_s.sum(axis=0) + problem.profile.batch_s
    alone = np.full(problem.graph.num_groups, np.argmin(alone_s), np.int32)
    ways = [Pipeline(problem, seed, x) for x in ([None] if net is None else [net, None])]
    begins = [sorted(starts, key=way.foresee) for way in ways]

    def walked(number: int) -> list[Choice]:
        ends = (way.descend(begin[number]) for way, begin in zip(ways, begins, strict=True))
        return sorted(ends, key=ways[0].foresee)

    seen = set()
    for number in range(len(starts)):
        ends = walked(number)
        surely = number == 0 and not problem.memory_may_bind
        first = [alone] if surely and alone_s.min() < ways[0].foresee(ends[0]) else []
        for choice in (*first, *ends, *starts[: number == 0]):
            if choice.tobytes() not in seen:
                seen.add(choice.tobytes())
                yield choice
