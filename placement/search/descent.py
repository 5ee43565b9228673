"""Where evaluations are few: downhill by estimates, and only where that leads is evaluated."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.objective import Objective
from placement.problem import Problem
from placement.search import macro
from placement.search.evaluation import (
    INFEASIBLE,
    Choice,
    Search,
    can_move,
    neighbours,
    two_operators,
)
from placement.search.macro import SHARE, Draws, Offers, draws_of, overflow, propose, uniform
from placement.simulator import kernels
from placement.simulator.analytic import LoadMoves
from placement.simulator.analytic_kernels import (
    TENSOR,
    Moves,
    Placed,
    apply_moves,
    blocks,
    fill_state,
    move_state,
    move_tables,
    undo_moves,
)
from placement.simulator.kernels import Tables
from placement.tools.clock import loads
from placement.tools.jit import Struct, copy, inlined, kernel, largest

Array = NDArray[Any]

_BODY = 64  # most groups of a move
_HOT = 0.2  # of the moves start on the busiest device
_STEPS = 1000  # moves of a walk that are estimated
_SQUARINGS = (2, 4, 8)  # of walks in turn: few see all loads, many see the largest alone
_FIRST, _MOST = 8, 256  # moves that a walk makes
_WAIT, _WAITS = 0.1, 2.0  # periods that a hand-over waits, at first and at most
_VAIN = 40  # walks in a row that lead to nothing better end it
# Of loads: moves that are estimated for one that is evaluated, the share of them that starts on
# the busiest device, and how many that were evaluated in vain, in a row, end it.
_WIDTH, _HOT_LOADS, _REFUSED = 256, 0.8, 128


class Room(Struct):
    """Of a placement that is estimated."""

    window: float  # micro-batches in flight
    wait: float  # seconds that a tensor which is handed over arrives later than its transfer takes
    ptr: Array  # int32 [G + 1] the operators of each group
    op: Array  # int32 [N]
    placement: Array  # int32 [N]
    load: Array  # float64 [D] seconds per micro-batch
    channel: Array  # float64 [channels + 1]
    ready: Array  # float64 [N] when the last input is there
    stamp: Array  # int32 [D] the tensor that was sent there last
    arrives: Array  # float64 [D] when it is there


@kernel
def estimate(t, r):
    """Fill the loads of ``r`` for its placement; the longest path over what is in flight."""
    placement, load, channel, ready = r.placement, r.load, r.channel, r.ready
    stamp, arrives = r.stamp, r.arrives
    num_devices, n = len(load), len(placement)
    load[:] = 0.0
    channel[:] = 0.0
    ready[:] = 0.0
    stamp[:] = -1
    longest = 0.0
    for k in range(-1, n):
        i, src, end = n, np.int64(num_devices), 0.0  # model inputs come first
        if k >= 0:
            i, src = k, np.int64(placement[k])
            seconds = t.loaded_s[k, src]
            load[t.worker[src]] += seconds
            end = ready[k] + seconds
            longest = max(longest, end)
        for e in range(t.edge_ptr[i], t.edge_ptr[i + 1]):
            user = t.edge_dst[e]
            d = np.int64(placement[user])
            at = end
            if d != src:
                tensor = t.edge_tensor[e]
                if stamp[d] != tensor:
                    stamp[d] = tensor
                    link, size = src * num_devices + d, t.edge_bytes[e]
                    if len(t.transfer_s) > 0:
                        sent = t.transfer_s[(tensor * (num_devices + 1) + src) * num_devices + d]
                    else:
                        sent = t.link_latency_s[link] + t.link_s_per_byte[link] * size
                    if t.contention:
                        channel[t.link_channel[link]] += sent
                    if src < num_devices:
                        busy = t.link_send_s[link] + t.link_send_s_per_byte[link] * size
                        load[t.worker[src]] += busy + (sent if t.link_blocking[link] else 0.0)
                    arrives[d] = end + sent + r.wait
                at = arrives[d]
            ready[user] = max(ready[user], at)
    channel[t.local_channel] = 0.0
    return longest / r.window


@inlined
def _power(x, squarings):
    for _ in range(squarings):
        x *= x
    return x


@inlined
def _largest(r, path_s):
    """The estimate."""
    load_s = r.load[largest(r.load, len(r.load))]
    return max(path_s, load_s, r.channel[largest(r.channel, len(r.channel))])


@inlined
def _energy(r, path_s, scale, squarings):
    """Loads and the path, of which the largest is the estimate, in powers: none is flat."""
    total = _power(path_s * scale, squarings)
    for d in range(len(r.load)):
        total += _power(r.load[d] * scale, squarings)
    for c in range(len(r.channel)):
        if r.channel[c] > 0.0:
            total += _power(r.channel[c] * scale, squarings)
    return total


@kernel
def walk(t, m, s, w, r, squarings, most, best):
    """Draw ``_STEPS`` moves of ``s`` and make those that worsen no energy, ``most`` better ones.

    What does not fit costs more than any load. ``best`` int32 ``[G]`` is where the estimate was
    the least, and fits; it is left as it is where that is not below the first.
    """
    device, held, memory = s.device, s.held, m.memory
    random, group, where, ptr, op = w.random, w.group, w.where, r.ptr, r.op
    fill_state(m, s)
    for g in range(len(device)):
        for i in range(ptr[g], ptr[g + 1]):
            r.placement[op[i]] = device[g]
    path_s = estimate(t, r)
    best_s, over = _largest(r, path_s), overflow(held, memory)
    scale = 1.0 / max(best_s, 1e-300)
    energy = _energy(r, path_s, scale, squarings) + 1e3 * over
    hottest, made = np.int64(largest(r.load, len(r.load))), 0
    for _ in range(_STEPS):
        if made == most:
            break
        count = propose(w, device, hottest if uniform(random) < _HOT else np.int64(-1))
        if count == 0:
            continue
        old, new = np.int64(device[group[0]]), np.int64(where[0])
        load_old, load_new, held_old, held_new = s.load[old], s.load[new], held[old], held[new]
        apply_moves(m, s, group, where, count)
        for k in range(count):
            for i in range(ptr[group[k]], ptr[group[k] + 1]):
                r.placement[op[i]] = where[k]
        path_s, over = estimate(t, r), overflow(held, memory)
        then = _energy(r, path_s, scale, squarings) + 1e3 * over
        if then <= energy:
            made += then < energy
            energy = then
            hottest = np.int64(largest(r.load, len(r.load)))
            value_s = _largest(r, path_s)
            if over == 0.0 and value_s < best_s * (1 - 1e-12):
                best_s = value_s
                copy(best, device)
            continue
        undo_moves(m, s, group, where, count, old, new)
        s.load[old], s.load[new], held[old], held[new] = load_old, load_new, held_old, held_new
        for k in range(count):
            for i in range(ptr[group[k]], ptr[group[k] + 1]):
                r.placement[op[i]] = device[group[k]]


class Pipeline:
    """A problem whose period is estimated, and a placement of it."""

    def __init__(self, problem: Problem, seed: int) -> None:
        g, compute_s = problem.graph, problem.group_compute_s
        self.group = g.group
        self.tables: Tables = kernels.tables(problem)
        self.moves: Moves = move_tables(problem, blocks(problem, g.group))
        self.state: Placed = move_state(self.moves, compute_s.argmin(axis=1).astype(np.int32))
        body = min(_BODY, g.num_groups)
        self.draws: Draws = draws_of(compute_s, neighbours(problem), seed, SHARE, 0.0, body)
        self.room = Room(
            window=float(min(problem.num_run, problem.max_in_flight)),
            wait=0.0,
            ptr=g.group_ptr,
            op=g.group_op,
            placement=np.zeros(g.num_ops, np.int32),
            load=np.zeros(problem.num_devices),
            channel=np.zeros(problem.num_channels + 1),
            ready=np.zeros(g.num_ops),
            stamp=np.zeros(problem.num_devices, np.int32),
            arrives=np.zeros(problem.num_devices),
        )

    def walk(self, choice: Choice, wait: float, squarings: int, most: int) -> Choice:
        """The best estimate on a walk of ``most`` moves or fewer from ``choice`` int32 ``[G]``."""
        self.state.device[:], self.room.wait = choice, wait
        best = choice.copy()
        walk(self.tables, self.moves, self.state, self.draws, self.room, squarings, most, best)
        return best

    def estimate(self, choice: Choice, wait: float) -> float:
        """Seconds of the period of ``choice`` int32 ``[G]``."""
        room = self.room
        room.placement[:], room.wait = choice[self.group], wait
        path_s = estimate(self.tables, room)
        return float(max(path_s, room.load.max(), room.channel.max()))

    def wait_of(self, choice: Choice, value_s: float, most: float) -> float:
        """The wait at which the estimate is ``value_s``, seconds in 0 .. ``most``."""
        low, high = 0.0, most
        for _ in range(12):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.estimate(choice, middle) < value_s else (low, middle)
        return high


def descend(search: Search, seed: int) -> None:
    """Improve what ``search`` holds until nothing better is found, or the budget ends.

    For ``max_load`` only where evaluations are limited: annealing makes a million moves in a
    second. Where the objective is another, or a device streams, nothing is done.
    """
    problem = search.problem
    if problem.cluster.streaming or not can_move(problem):
        return
    if problem.objective is Objective.MAX_LOAD and np.isfinite(search.num_left):
        load_kernels()
        _descend_loads(search, seed)
    elif problem.objective is Objective.PERIOD and problem.num_run > 1:
        load_kernels()
        _descend_period(search, seed)


def _descend_loads(search: Search, seed: int) -> None:
    """Of ``_WIDTH`` moves the one of the best estimate is evaluated, and made if it is better.

    An estimate takes each edge between two devices for a tensor of its own that takes both the
    mean of what the two groups send and receive. It ends where ``_REFUSED`` moves in a row were
    no better.
    """
    problem = search.problem
    assert search.best is not None
    position, graph = LoadMoves(problem, search.best[problem.graph.group]), neighbours(problem)
    t, groups = position.tables, problem.graph.num_groups
    draws = draws_of(t.compute_s, graph, seed, SHARE, 0.0, min(_BODY, groups))
    touches = np.diff(t.touch_ptr)
    owner = np.repeat(np.arange(groups), touches)
    total_s = np.bincount(owner, t.io_s.mean(axis=1)[t.touch[:, TENSOR]], groups)
    mean_s = total_s / np.maximum(touches, 1)
    here = np.repeat(np.arange(groups), np.diff(graph.near_ptr))
    offers = Offers(
        near_s=np.minimum(mean_s[here], mean_s[graph.near]),
        group=np.zeros(groups, np.int32),
        where=np.zeros(groups, np.int32),
        refused=np.zeros(_REFUSED, np.int64),
    )
    best, tried, steps = search.best.copy(), 0, 0
    while search.left and tried == steps:
        steps, before_s = int(min(search.num_left, _STEPS)), search.best_s
        given = t, position.state, draws, offers, best, before_s
        found_s, tried = macro.descend(*given, steps, _WIDTH, _HOT_LOADS)
        if found_s < before_s:
            search.consider(best, tried)
        else:
            search.num_evaluations += tried


def _descend_period(search: Search, seed: int) -> None:
    """From the best so far walks go down the estimate, and where they end is evaluated.

    No period is below the load of a device or a channel, nor below the longest path over the
    micro-batches in flight. The estimate is the largest of them, where each hand-over on the path
    waits for what its receiver is doing: ``wait`` periods, fitted to what was evaluated. Walks are
    twice as long after one that was better, and half as long after one that was not. It ends
    where ``_VAIN`` of them in a row lead to nothing better.
    """
    assert search.best is not None
    pipeline = Pipeline(search.problem, seed)
    most, wait, vain, number = _FIRST, _WAIT, 0, 0
    while search.left and vain < _VAIN and search.best_s < np.inf:
        best_s, begin = search.best_s, search.best
        squarings = _SQUARINGS[number % len(_SQUARINGS)]
        number, vain = number + 1, vain + 1
        choice = pipeline.walk(begin, wait * best_s, squarings, most)
        if np.array_equal(choice, begin):
            most, wait = min(2 * most, _MOST), 0.8 * wait
            continue
        value_s, most = search.cost(choice), max(1, most // 2)
        if search.best_s < best_s:
            most, vain = min(4 * most, _MOST), 0
        if value_s < INFEASIBLE:
            estimated_s = pipeline.estimate(choice, wait * best_s)
            if not 0.999 * estimated_s <= value_s <= 1.005 * estimated_s:
                fitted = pipeline.wait_of(choice, value_s, _WAITS * best_s) / best_s
                wait = min(fitted, 4.0 * wait + 0.05)


@loads
def load_kernels() -> None:
    """What walks are made with."""
    choice = np.zeros(2, np.int32)
    pipeline = Pipeline(two_operators(), 0)
    pipeline.walk(choice, 0.0, 1, 1)
    pipeline.estimate(choice, 0.0)
    search = Search(two_operators().with_objective(Objective.MAX_LOAD), evaluations=2)
    search.cost(choice)
    _descend_loads(search, 0)
