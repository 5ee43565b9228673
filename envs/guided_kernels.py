"""Numba kernels of ``GuidedSearch-v0``: offer macro moves, describe them, try one, anneal.

One step is to draw ``C`` moves and describe them, then to try one of them. A search makes many
steps with the choice inside: a policy's network, a hand-written score, or chance.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np

from placement.search.chooser import BOUND, HAND, POLICY, UNIFORM, bounded, choose, network
from placement.search.evaluation import INFEASIBLE
from placement.search.macro import (
    Draws,
    Neighbours,
    below,
    energy_change,
    propose_from,
    uniform,
)
from placement.simulator import kernels
from placement.simulator.analytic_kernels import (
    Moves,
    Pieces,
    Placed,
    apply_moves,
    fill_state,
    piecewise_one,
    undo_moves,
)
from placement.timeline import MOST_PATTERN
from placement.tools.jit import Struct, allocating, array, average, copy, inlined, kernel, largest

Array = Any

LOAD, TIMELINE, ENERGY, PIECEWISE = range(4)  # how a placement is evaluated
BEGIN, RESUME, TAKE, SEARCH = range(4)  # jobs of play; SEARCH + who chooses

MOVE_FEATURES = (
    "hand: the hand-written score; for max_load, minus the change of energy over the temperature",
    "none: 1 for the choice to stay",
    "largest load after over before, log, times 10 (exact for max_load)",
    "load of the device left, over the largest",
    "load of the device left after the move, over the largest",
    "load of the target, over the largest",
    "load of the target after the move, over the largest",
    "log number of groups that move over log number of groups",
    "seconds that move over those of their device",
    "log seconds at the target over seconds now",
    "communication saved, over the mean load",
    "parameter bytes on the target after the move, over its memory",
    "share of the first group's neighbours on the target",
    "share of the first group's neighbours on the device left",
    "share of what moves on the critical chain",
    "when the first group begins, over the makespan",
    "longest path from the first group to the end, over that of the graph",
    "log times that this group was refused this target",
    "log moves since this group last moved, over log steps",
    "1 if the first group is from the critical chain",
    "1 if the first group is from the busiest device",
    "1 if it is a single group",
    "1 if it is a run on a device",
    "1 if it is a chain of successors",
    "1 if it is a grown neighbourhood",
    "1 if two groups swap",
)
SEARCH_FEATURES = (
    "budget used, 0..1",
    "log10 temperature over 5",
    "power of the energy over 8 (0: the objective itself)",
    "log current value over the best, times 10",
    "log best value over the first, times 10",
    "log moves since the best was found over 10",
    "mean load over the largest",
    "communication over all load",
    "log number of groups over 10",
    "log number of devices over 3",
    "1 if the objective is max_load",
    "1 if it is of a pipelined timeline",
)
# Columns of State.offered and State.search.
(
    SCORE,
    STAY,
    LARGEST,
    LEFT_BEFORE,
    LEFT_AFTER,
    TARGET_BEFORE,
    TARGET_AFTER,
    GROUPS,
    SECONDS,
    SLOWER,
    SAVED,
    MEMORY,
    THERE,
    HERE,
    CHAINED,
    BEGINS,
    RANK,
    REFUSED,
    RESTED,
    FROM_CHAIN,
    FROM_HOTTEST,
    IS_SINGLE,
    IS_RUN,
    IS_CHAIN,
    IS_GROWTH,
    IS_SWAP,
) = range(len(MOVE_FEATURES))
(
    USED,
    TEMPERATURE,
    POWER,
    OVER_BEST,
    BELOW_FIRST,
    SINCE_BEST,
    EVEN,
    COMMUNICATION,
    NUM_GROUPS,
    NUM_DEVICES,
    IS_LOAD,
    IS_PIPELINED,
) = range(len(SEARCH_FEATURES))
NUM_MOVE_FEATURES, NUM_SEARCH_FEATURES = len(MOVE_FEATURES), len(SEARCH_FEATURES)

# Of each kind of move, cumulated: single, run, chain, growth; the rest are swaps.
SHARE = np.array([0.4, 0.55, 0.7, 0.9, 1.0])
_FROM_CHAIN, _FROM_HOT = 0.5, 0.7  # cumulated: where the first group of a move comes from
_HOT = 0.25  # the same where there is no chain
_TRIES = 16
_CROWDED = 64  # times in one bucket: then a general sort is faster


class Tables(Struct):
    """One problem, and room to evaluate a placement of it."""

    kind: int  # LOAD, TIMELINE, ENERGY or PIECEWISE
    moves: Moves  # of the colocation groups
    graph: Neighbours
    simulator: kernels.Tables
    run: kernels.State
    pieces: Pieces
    group: Array  # int32 [N]
    group_s: Array  # float64 [G, D]
    rank: Array  # float32 [G] longest path to the end over the graph's
    mean_transfer_s: Array  # float64 [T]
    busy_w: Array  # float64 [D]
    idle_w: Array  # float64 [D]
    second_j: float
    read_bytes: Array  # int64 [N] parameters of each operator, or [0]: no device streams
    library_bytes: Array  # int64 [N, D] that libraries keep, or [0, D]: nothing


class Tried(Struct):
    """What a move would do to the device that it leaves and to its target."""

    left_before: float  # load, as are the next
    target_before: float
    left_after: float
    target_after: float
    largest_after: float  # of all devices
    held_after: int  # bytes on the target
    seconds_before: float  # of what moves
    seconds_after: float
    chained: float  # how many of those that move are on the critical chain


class State(Struct):
    """One episode of one problem."""

    draws: Draws
    moves: Placed
    best: Array = array("G", np.int32)
    cost: float
    best_cost: float
    first_cost: float
    step: int
    found: int  # step at which the best was found
    used: float  # share of the budget
    temperature: float
    warm: float  # temperature at first
    cold: float  # and at last
    power: float  # of the energy
    power_first: float
    power_last: float
    hottest: int  # the busiest device
    compute_s: float  # of all groups
    num_chain: int
    chain: Array = array("G", np.int32)  # groups of the critical chain, the first num_chain of them
    on_chain: Array = array("G", np.float32)  # 1 = on it
    when: Array = array("G", np.float32)  # begin of the group over the makespan
    refused: Array = array("G, D", np.float32)
    moved: Array = array("G", np.int64)  # step of its last move
    count: Array = array("C+1", np.int64)  # groups that move, 0 = no move
    body: Array = array("C+1, L", np.int32)
    where: Array = array("C+1, L", np.int32)
    tried: Tried
    offered: Array = array("C+1, F", np.float32)
    search: Array = array("S", np.float32)
    which: Array = array("C+1", np.int64)  # negative where there is no move
    logits: Array = array("C+1")


@kernel
def _evaluate(t, s):
    """Cost of the placement in ``s.moves``: its value, or INFEASIBLE * (1 + overflow)."""
    device, load, held = s.moves.device, s.moves.load, s.moves.held
    memory, num_devices, run = t.moves.memory, len(load), t.run
    run.peak[:] = 0
    if t.kind == LOAD:
        value = load[largest(load, num_devices)]
    else:
        placement = run.placement
        for i in range(len(placement)):
            placement[i] = device[t.group[i]]
        if t.kind == PIECEWISE:
            value = piecewise_one(t.pieces, placement, np.inf)
        else:
            most = kernels.durations(t.simulator, run)
            kernels.run(t.simulator, run)
            value = _energy_j(t) if t.kind == ENERGY else _steady(run.finish, most)
    if len(t.read_bytes) > 0 or len(t.library_bytes) > 0:
        _reside(t, s)
    overflow = 0.0
    for d in range(num_devices):
        need = run.peak[d]
        if t.simulator.worker[d] == d:
            need += held[d]
        if need > memory[d]:
            overflow += (need - memory[d]) / memory[d]
    if overflow > 0.0:
        return INFEASIBLE * (1.0 + overflow)
    return min(value, 2.0 * INFEASIBLE)  # inf: pieces that wait for each other


@allocating
def _reside(t, s):
    """Adds to the peaks what ``Problem.resident_bytes_on`` adds to a device's own parameters."""
    device, worker, peak = s.moves.device, t.simulator.worker, t.run.peak
    buffer, library = np.zeros(len(worker), np.int64), np.zeros(len(worker), np.int64)
    for i in range(len(t.group)):
        d = device[t.group[i]]
        if len(t.read_bytes) > 0:
            buffer[d] = max(buffer[d], t.read_bytes[i])
        if len(t.library_bytes) > 0:
            library[worker[d]] = max(library[worker[d]], t.library_bytes[i, d])
    for d in range(len(worker)):
        peak[d] += library[d]
        if worker[d] != d:
            peak[worker[d]] += 2 * buffer[d]
            peak[t.simulator.host] += s.moves.held[d]


@inlined
def _energy_j(t):
    """Joules per micro-batch of the run, with the worth of its seconds."""
    run, m = t.run, t.run.num_batches
    value = t.second_j
    for d in range(len(run.busy)):
        value += t.idle_w[d]
    value *= run.finish[largest(run.finish, m)] / m
    for d in range(len(run.busy)):
        value += run.busy[d] / m * (t.busy_w[d] - t.idle_w[d])
    return value


@allocating
def _steady(finish_s, busiest_s):
    """``placement.timeline.steady_period`` of one run."""
    m = len(finish_s)
    if m == 1:
        return max(finish_s[0], busiest_s)
    finish = np.sort(finish_s)
    first = (m - 1) // 2
    gaps = m - 1 - first
    period = (finish[m - 1] - finish[first]) / gaps
    tolerance = 1e-9 * max(finish[m - 1] / m, 1e-300)
    for k in range(1, min(m // 4, gaps // 2, MOST_PATTERN) + 1):  # the shortest pattern wins
        repeats = True
        for i in range(first + k, m - 1):
            gap = (finish[i + 1] - finish[i]) - (finish[i + 1 - k] - finish[i - k])
            repeats &= abs(gap) <= tolerance
        if repeats:
            return max((finish[m - 1] - finish[m - 1 - k]) / k, busiest_s)
    return max(period, busiest_s)


@allocating
def _look(t, s):
    """The busiest device; for timelines the critical chain and when groups begin."""
    load = s.moves.load
    s.hottest = largest(load, len(load))
    if t.kind != TIMELINE and t.kind != ENERGY:
        return
    for i in range(s.num_chain):
        s.on_chain[s.chain[i]] = 0.0
    batch = t.run.num_batches // 2
    start, end, placement = t.run.start[batch], t.run.end[batch], t.run.placement
    n = len(placement)
    begins, last = start[0], 0
    for i in range(n):
        begins = min(begins, start[i])
        if end[i] > end[last]:
            last = i
    span = max(end[last] - begins, 1e-300)
    s.when[:] = 1.0
    for i in range(n):
        s.when[t.group[i]] = min(s.when[t.group[i]], (start[i] - begins) / span)
    # The chain: from the last end back, to what each operator waited for.
    before = np.full(n, -1, np.int32)  # on its device
    latest = np.full(len(load), -1, np.int32)
    for i in _by_time(start, begins, span):  # at equal times producers come first
        before[i] = latest[placement[i]]
        latest[placement[i]] = i
    in_ptr, in_tensor, tensor_src = t.pieces.in_ptr, t.pieces.in_tensor, t.pieces.tensor_src
    count = 0
    op = last
    while op >= 0:
        g = t.group[op]
        if s.on_chain[g] == 0.0:
            s.on_chain[g] = 1.0
            s.chain[count] = g
            count += 1
        waited, until = -1, begins
        for i in range(in_ptr[op], in_ptr[op + 1]):
            src = tensor_src[in_tensor[i]]
            if src >= 0:
                arrives = end[src]
                if placement[src] != placement[op]:
                    arrives += t.mean_transfer_s[in_tensor[i]]
                if arrives >= until:
                    waited, until = src, arrives
        held_up = before[op]
        if held_up >= 0 and end[held_up] >= start[op] - 1e-12 * span and until < start[op]:
            waited = held_up
        op = waited
    s.num_chain = count


@allocating
def _by_time(times, first, span):
    """int64 ``[N]`` order of times ``first .. first + span``, equal ones as they stand.

    Sorts by buckets, as many as times: linear, which a general sort is not. (What is not finite
    counts in the first bucket: no memory is written outside.)
    """
    n = len(times)
    scale = (n - 1) / span
    after = np.zeros(n + 1, np.int64)  # where the next of a bucket goes, from after[bucket]
    for i in range(n):
        after[max(0, int((times[i] - first) * scale)) + 1] += 1
    if after.max() > _CROWDED:
        return np.argsort(times, kind="mergesort")
    for k in range(n):
        after[k + 1] += after[k]
    order = np.empty(n, np.int64)
    for i in range(n):
        bucket = max(0, int((times[i] - first) * scale))
        order[after[bucket]] = i
        after[bucket] += 1
    for end in range(1, n):  # what is out of order is in the same bucket
        i, k = order[end], end
        while k > 0 and times[order[k - 1]] > times[i]:
            order[k] = order[k - 1]
            k -= 1
        order[k] = i
    return order


@kernel
def _cool(s, used):
    """Temperature and power of the energy where ``used`` 0..1 of the budget is spent."""
    s.used = used
    s.temperature = s.warm * (s.cold / s.warm) ** used
    first, last = s.power_first, s.power_last
    s.power = min(last, first + np.floor((last - first + 1.0) * used))


@kernel
def _first_group(s):
    """The group that a move starts from, and whether it is of the chain (1), the busiest (2)."""
    device, random = s.moves.device, s.draws.random
    num_groups = len(device)
    kind = uniform(random)
    num_chain = s.num_chain
    if num_chain > 0:
        if kind < _FROM_CHAIN:
            return np.int64(s.chain[below(random, num_chain)]), 1
        hot = kind < _FROM_HOT
    else:
        hot = kind < _HOT
    g = below(random, num_groups)
    if hot:
        hottest = s.hottest
        for _ in range(_TRIES):
            if device[g] == hottest:
                return g, 2
            g = below(random, num_groups)
    return g, 0


@kernel
def _offer(t, s, width, described):
    """Draw moves 1..width and describe them; choice 0 is to stay. Fills count, body, offered.

    Not ``described``, of ``max_load`` only the score is written, otherwise nothing.
    """
    if described:
        _describe_search(t, s)
        s.offered[:] = 0.0
    s.offered[0] = 0.0
    s.offered[0, STAY] = 1.0
    s.count[0] = 0
    for k in range(1, width + 1):
        g, origin = _first_group(s)
        count = propose_from(s.draws, s.moves.device, g, s.body[k], s.where[k])
        s.count[k] = count
        if count == 0 or (t.kind != LOAD and not described):
            continue
        energy = _try(t, s, k, described)
        if t.kind == LOAD:
            score = max(-3.0 * BOUND, min(3.0 * BOUND, -energy / s.temperature))
            s.offered[k, SCORE] = score
        if described:
            _describe(t, s, k, origin)
            if t.kind != LOAD:
                s.offered[k, SCORE] = _hand_score(s.offered[k])


@kernel
def _describe_search(t, s):
    """Fill ``SEARCH_FEATURES``."""
    num_groups, num_devices = t.group_s.shape
    u, load = s.search, s.moves.load
    mean = max(average(load), 1e-300)
    u[USED] = s.used
    u[TEMPERATURE] = np.log10(max(s.temperature, 1e-9)) / 5.0
    u[POWER] = int(s.power) / 8.0 if t.kind == LOAD else 0.0
    u[OVER_BEST] = bounded(10.0 * np.log(max(s.cost, 1e-300) / max(s.best_cost, 1e-300)))
    u[BELOW_FIRST] = bounded(10.0 * np.log(max(s.best_cost, 1e-300) / max(s.first_cost, 1e-300)))
    u[SINCE_BEST] = np.log(s.step - s.found + 1.0) / 10.0
    u[EVEN] = mean / max(load[s.hottest], 1e-300)
    u[COMMUNICATION] = bounded(max(0.0, 1.0 - s.compute_s / (mean * num_devices)))
    u[NUM_GROUPS] = np.log(num_groups + 1.0) / 10.0
    u[NUM_DEVICES] = np.log(num_devices) / 3.0
    u[IS_LOAD] = t.kind == LOAD
    u[IS_PIPELINED] = t.run.num_batches > 1 and t.kind != LOAD and t.kind != PIECEWISE


@kernel
def _try(t, s, k, described):
    """What move ``k`` adds to the energy of max_load; fills ``s.tried`` where ``described``."""
    device, load, held = s.moves.device, s.moves.load, s.moves.held
    body, where, count = s.body[k], s.where[k], s.count[k]
    old, new = np.int64(device[body[0]]), np.int64(where[0])
    highest_s = max(load[s.hottest], 1e-300)
    before = after = chained = 0.0
    if described:
        for i in range(count):
            h = body[i]
            before += t.group_s[h, device[h]]
            after += t.group_s[h, where[i]]
            chained += s.on_chain[h]
    apply_moves(t.moves, s.moves, body, where, count)
    energy = 0.0
    if t.kind == LOAD:
        # Where operators cost nothing the best load may be 0, and rounding makes loads of about 0.
        highest = s.best_cost
        if not 1e-300 < highest < INFEASIBLE:
            highest = highest_s
        scale, power = 1.0 / highest, int(s.power)
        energy = energy_change(t.moves, s.moves, scale, power)
    if described:
        r = s.tried
        r.left_before, r.target_before = s.moves.load_before[0], s.moves.load_before[1]
        r.left_after, r.target_after, r.held_after = load[old], load[new], held[new]
        r.largest_after = load[largest(load, len(load))]
        r.seconds_before, r.seconds_after, r.chained = before, after, chained
    undo_moves(t.moves, s.moves, body, where, count)
    return energy


@kernel
def _describe(t, s, k, origin):
    """Fill ``MOVE_FEATURES`` of move ``k``, which was tried, but the score."""
    f, r, body, count = s.offered[k], s.tried, s.body[k], s.count[k]
    device, load, num_groups = s.moves.device, s.moves.load, len(t.group_s)
    g, new = body[0], s.where[k, 0]
    old = device[g]
    highest = max(load[s.hottest], 1e-300)
    mean = max(average(load), 1e-300)
    before, after = r.seconds_before, r.seconds_after
    swap = count == 2 and s.where[k, 1] == old
    near_ptr, near = t.graph.near_ptr, t.graph.near
    there = here = 0
    degree = near_ptr[g + 1] - near_ptr[g]
    for i in range(near_ptr[g], near_ptr[g + 1]):
        there += device[near[i]] == new
        here += device[near[i]] == old
    f[LARGEST] = bounded(10.0 * np.log(r.largest_after / highest))
    f[LEFT_BEFORE] = bounded(r.left_before / highest)
    f[LEFT_AFTER] = bounded(r.left_after / highest)
    f[TARGET_BEFORE] = bounded(r.target_before / highest)
    f[TARGET_AFTER] = bounded(r.target_after / highest)
    f[GROUPS] = np.log(count) / np.log(num_groups + 1.0)
    f[SECONDS] = bounded(before / max(r.left_before, 1e-300)) if not swap else 0.0
    least = 1e-3 * mean / num_groups
    f[SLOWER] = bounded(np.log(max(after, least) / max(before, least)))
    saved = (r.left_before + r.target_before - before) - (r.left_after + r.target_after - after)
    f[SAVED] = bounded(saved / mean)
    f[MEMORY] = bounded(r.held_after / max(t.moves.memory[new], 1))
    f[THERE] = there / max(degree, 1)
    f[HERE] = here / max(degree, 1)
    f[CHAINED] = r.chained / count
    f[BEGINS] = s.when[g]
    f[RANK] = t.rank[g]
    f[REFUSED] = np.log(1.0 + s.refused[g, new])
    f[RESTED] = np.log(s.step - s.moved[g] + 1.0) / np.log(s.step + 2.0)
    f[FROM_CHAIN] = origin == 1
    f[FROM_HOTTEST] = origin == 2
    f[_kind_of(body, count, swap)] = 1.0


@inlined
def _kind_of(body, count, swap):
    """What a move is, not how it was drawn: a run is consecutive."""
    kind = IS_SWAP if swap else IS_SINGLE
    if not swap and count > 1:
        kind = IS_RUN
        for i in range(1, count):
            if abs(body[i] - body[i - 1]) != 1:
                kind = IS_GROWTH
    return kind


@kernel
def _hand_score(f):
    """Written by hand: to its neighbours, off the chain, not where it was refused or too much."""
    score = f[CHAINED] + 2.0 * (f[THERE] - f[HERE]) + 2.0 * min(max(f[SAVED], -1.0), 1.0)
    score -= 1.0 * max(f[LARGEST], 0.0) + 1.0 * f[SLOWER] + 1.5 * f[REFUSED]
    return bounded(score)


@kernel
def _take(t, s, k):
    """Try move ``k`` (0: stay); returns the improvement of log(best), 0 if there is none.

    For max_load it is made, whatever it is worth: its energy was known. Otherwise it is
    evaluated, and kept with probability ``min(1, exp(-log(after / before) / temperature))``.
    """
    s.step += 1
    count = s.count[k]
    if count == 0:
        return 0.0
    body, where, device = s.body[k], s.where[k], s.moves.device
    growth = 0.0
    for i in range(count):
        growth += t.group_s[body[i], where[i]] - t.group_s[body[i], device[body[i]]]
    apply_moves(t.moves, s.moves, body, where, count)
    cost = _evaluate(t, s)
    if t.kind != LOAD and cost > s.cost:
        worse = np.log(cost / max(s.cost, 1e-300))
        if worse > -s.temperature * np.log(1.0 - uniform(s.draws.random)):
            undo_moves(t.moves, s.moves, body, where, count)
            s.refused[body[0], where[0]] += 1.0
            return 0.0
    s.cost = cost
    s.compute_s += growth
    for i in range(count):
        s.moved[body[i]] = s.step
    s.refused[body[0]] = 0.0
    _look(t, s)
    gain = 0.0
    if cost < s.best_cost * (1.0 - 1e-12):
        gain = min(np.log(s.best_cost / max(cost, 1e-300)), 1.0)
        s.best_cost = cost
        s.found = s.step
        copy(s.best, device)
    return gain


@kernel
def play(t, s, job, number, net, used, then):
    """The one entry: what calls the simulator is compiled once more with each level of calls.

    * BEGIN: evaluate the placement in ``s.moves.device``, forget everything else, offer moves for
      step ``number``, where ``used`` of the budget is spent.
    * RESUME: evaluate that placement again, and look at it (drift of many moves is gone then).
    * TAKE: try move ``number``, then offer the next ones where ``then`` of the budget is spent;
      returns the improvement of log(best).
    * SEARCH + chooser: ``number`` steps while ``used`` of the budget becomes ``then``. POLICY
      chooses by the softmax of ``network``, HAND by that of the hand-written score alone. For
      UNIFORM one move is drawn, and for max_load made as annealing does. Staying is a choice
      for max_load only.
    """
    width, random = len(s.count) - 1, s.draws.random
    chooser = job - SEARCH
    # What nobody looks at costs most of the time of a search for max_load.
    described = job <= TAKE or chooser == POLICY or (chooser == HAND and t.kind != LOAD)
    if job < TAKE:
        fill_state(t.moves, s.moves)
        s.on_chain[:] = 0.0
        s.when[:] = 0.0
        s.num_chain = 0
        s.compute_s = 0.0
        for g in range(len(t.group_s)):
            s.compute_s += t.group_s[g, s.moves.device[g]]
        s.cost = _evaluate(t, s)
        _look(t, s)
        if job == BEGIN:
            s.step = s.found = number
            s.refused[:] = 0.0
            s.moved[:] = number
            s.best_cost = s.first_cost = s.cost
            copy(s.best, s.moves.device)
            _cool(s, used)
            _offer(t, s, width, described)
        return 0.0
    gain = 0.0
    steps = 1 if job == TAKE else number
    logits = s.logits
    for i in range(steps):
        k = 1
        if job == TAKE:
            k = number
        elif chooser == UNIFORM:
            if t.kind == LOAD and np.log(1.0 - uniform(random)) > s.offered[1, SCORE]:
                k = 0
        else:
            if chooser == POLICY:
                for j in range(width + 1):
                    s.which[j] = s.count[j] - 1
                network(net, s.search, s.offered, s.which, width, logits)
            else:
                for j in range(width + 1):
                    logits[j] = s.offered[j, SCORE] if j == 0 or s.count[j] > 0 else -np.inf
            if t.kind != LOAD and s.count[largest(s.count, width + 1)] > 0:
                logits[0] = -np.inf
            k = choose(random, logits, width)
        gain += _take(t, s, k)
        _cool(s, used + (then - used) * (i + 1) / steps)
        _offer(t, s, 1 if job == SEARCH + UNIFORM else width, described)
    return gain
