"""Numba kernels of ``GuidedSearch-v0``: offer macro moves, describe them, try one, anneal.

One step is to draw ``C`` moves and describe them, then to try one of them. A search makes many
steps with the choice inside: a policy's network, a hand-written score, or chance.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from placement import kernels
from placement.jit import allocating, average, copy, kernel, largest
from placement.objective_kernels import apply_moves, fill_state, piecewise_batch, undo_moves
from placement.planners._chooser import choose, network
from placement.planners._macro import below, energy_term, propose_from, uniform
from placement.planners._order import BOUND, HAND, POLICY, UNIFORM, bounded
from placement.planners._search import INFEASIBLE
from placement.timeline import MOST_PATTERN

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
NUM_MOVE_FEATURES, NUM_SEARCH_FEATURES = len(MOVE_FEATURES), len(SEARCH_FEATURES)

# Of each kind of move, cumulated: single, run, chain, growth; the rest are swaps.
_SHARE = np.array([0.4, 0.55, 0.7, 0.9, 1.0])
_FROM_CHAIN, _FROM_HOT = 0.5, 0.7  # cumulated: where the first group of a move comes from
_HOT = 0.25  # the same where there is no chain
_TRIES = 16
_CROWDED = 64  # times in one bucket: then a general sort is faster

# Numbers of an episode, State.x
(
    COST,
    BEST,
    FIRST,
    STEP,
    FOUND,
    USED,
    TEMPERATURE,
    POWER,
    WARM,
    COLD,
    POWER_FIRST,
    POWER_LAST,
    NUM_CHAIN,
    HOTTEST,
    COMPUTE,
    NUM_X,
) = range(16)


class Tables(NamedTuple):
    """One problem, and room to evaluate a placement of it."""

    kind: int  # LOAD, TIMELINE, ENERGY or PIECEWISE
    moves: tuple[Array, ...]  # objective_kernels.move_tables of the colocation groups
    graph: tuple[Array, ...]  # near_ptr, near, after_ptr, after: of _macro.propose_from
    simulator: tuple[Any, ...]  # kernels.tables
    piecewise: tuple[Array, ...]  # objective_kernels.piecewise_tables
    group: Array  # int32 [N]
    group_s: Array  # float64 [G, D]
    compute_s: Array  # float64 [N, D]
    loaded_s: Array  # float64 [N, D]
    batch_s: float
    rank: Array  # float32 [G] longest path to the end over the graph's
    mean_transfer_s: Array  # float64 [T]
    power: tuple[Array, Array, Array]  # float64 [D] each: busy_w, idle_w, sleep_w
    second_j: float
    num_batches: int
    window: int
    track: bool
    scratch: tuple[Array, ...]
    placement: Array  # int32 [1, N]
    seconds: Array  # float64 [N]
    beside_s: Array  # float64 [N]
    load: Array  # float64 [D]
    value: Array  # float64 [1]
    finish: Array  # float64 [M]
    busy: Array  # float64 [D]
    asleep: Array  # float64 [D]
    peak: Array  # int64 [D]
    start: Array  # float64 [M, N]
    end: Array  # float64 [M, N]
    transfers: Array  # int32 [E * M, 4]
    transfer_start: Array
    transfer_end: Array
    no_order: Array  # int32 [0, 2]
    no_order_ptr: Array  # int32 [D + 1]


class State(NamedTuple):
    """One episode of one problem."""

    random: Array  # uint64 [1]
    moves: tuple[Array, ...]  # objective_kernels.move_state
    best: Array  # int32 [G]
    x: Array  # float64 [NUM_X]
    chain: Array  # int32 [G] groups of the critical chain, the first NUM_CHAIN of them
    on_chain: Array  # float32 [G] 1 = on it
    when: Array  # float32 [G] begin of the group over the makespan
    refused: Array  # float32 [G, D]
    moved: Array  # int64 [G] step of its last move
    mark: Array  # int32 [G]
    count: Array  # int64 [C + 1] groups that move, 0 = no move
    body: Array  # int32 [C + 1, L]
    where: Array  # int32 [C + 1, L]
    offered: Array  # float32 [C + 1, F]
    search: Array  # float32 [S]
    which: Array  # int64 [C + 1] negative where there is no move
    logits: Array  # float64 [C + 1]


@kernel
def _evaluate(t, s):
    """Cost of the placement in ``s.moves``: its value, or INFEASIBLE * (1 + overflow)."""
    device, load, held = s.moves[0], s.moves[1], s.moves[2]
    memory, num_devices = t.moves[8], len(load)
    t.peak[:] = 0
    if t.kind == LOAD:
        value = load[largest(load, num_devices)]
    else:
        placement = t.placement[0]
        for i in range(len(placement)):
            placement[i] = device[t.group[i]]
        if t.kind == PIECEWISE:
            piecewise_batch(*t.piecewise, t.placement, t.value)
            value = t.value[0]
        else:
            most = kernels.durations(
                placement,
                t.compute_s,
                t.loaded_s,
                t.batch_s,
                t.num_batches,
                t.seconds,
                t.beside_s,
                t.load,
            )
            kernels.run(
                t.simulator,
                t.scratch,
                placement,
                t.seconds,
                t.beside_s,
                t.num_batches,
                t.window,
                t.no_order,
                t.no_order_ptr,
                t.finish,
                t.busy,
                t.asleep,
                t.track,
                t.peak,
                t.start,
                t.end,
                t.transfers,
                t.transfer_start,
                t.transfer_end,
            )
            if t.kind == ENERGY:
                busy_w, idle_w, sleep_w = t.power
                value = t.second_j
                for d in range(num_devices):
                    value += idle_w[d]
                value *= t.finish[largest(t.finish, t.num_batches)] / t.num_batches
                for d in range(num_devices):
                    value += t.busy[d] / t.num_batches * (busy_w[d] - idle_w[d])
                    value -= t.asleep[d] / t.num_batches * (idle_w[d] - sleep_w[d])
            else:
                value = _steady(t.finish, most)
    overflow = 0.0
    for d in range(num_devices):
        need = t.peak[d] + held[d]
        if need > memory[d]:
            overflow += (need - memory[d]) / memory[d]
    if overflow > 0.0:
        return INFEASIBLE * (1.0 + overflow)
    return min(value, 2.0 * INFEASIBLE)  # inf: pieces that wait for each other


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
    load = s.moves[1]
    s.x[HOTTEST] = np.argmax(load)
    if t.kind != TIMELINE and t.kind != ENERGY:
        return
    for i in range(int(s.x[NUM_CHAIN])):
        s.on_chain[s.chain[i]] = 0.0
    batch = t.num_batches // 2
    start, end, placement = t.start[batch], t.end[batch], t.placement[0]
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
    in_ptr, in_tensor, _, _, tensor_src = t.piecewise[:5]
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
    s.x[NUM_CHAIN] = count


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
    s.x[USED] = used
    s.x[TEMPERATURE] = s.x[WARM] * (s.x[COLD] / s.x[WARM]) ** used
    first, last = s.x[POWER_FIRST], s.x[POWER_LAST]
    s.x[POWER] = min(last, first + np.floor((last - first + 1.0) * used))


@kernel
def _first_group(s):
    """The group that a move starts from, and whether it is of the chain (1), the busiest (2)."""
    device = s.moves[0]
    num_groups = len(device)
    kind = uniform(s.random)
    num_chain = int(s.x[NUM_CHAIN])
    if num_chain > 0:
        if kind < _FROM_CHAIN:
            return s.chain[below(s.random, num_chain)], 1
        hot = kind < _FROM_HOT
    else:
        hot = kind < _HOT
    g = below(s.random, num_groups)
    if hot:
        hottest = int(s.x[HOTTEST])
        for _ in range(_TRIES):
            if device[g] == hottest:
                return g, 2
            g = below(s.random, num_groups)
    return g, 0


@kernel
def _offer(t, s, width, described):
    """Draw moves 1..width and describe them; choice 0 is to stay. Fills count, body, offered.

    Not ``described``, of ``max_load`` only the first feature is written, otherwise none.
    """
    device, load, held = s.moves[0], s.moves[1], s.moves[2]
    memory, group_s = t.moves[8], t.group_s
    num_groups, num_devices = group_s.shape
    near_ptr, near = t.graph[0], t.graph[1]
    x = s.x
    hottest = int(x[HOTTEST])
    highest = max(load[hottest], 1e-300)
    mean = max(average(load), 1e-300)
    # Where operators cost nothing the best load may be 0, and rounding makes loads of about 0.
    scale = 1.0 / (x[BEST] if t.kind == LOAD and 1e-300 < x[BEST] < INFEASIBLE else highest)
    power = int(x[POWER])
    log_groups = np.log(num_groups + 1.0)
    log_steps = np.log(x[STEP] + 2.0)
    if described:
        u = s.search
        u[0] = x[USED]
        u[1] = np.log10(max(x[TEMPERATURE], 1e-9)) / 5.0
        u[2] = power / 8.0 if t.kind == LOAD else 0.0
        u[3] = bounded(10.0 * np.log(max(x[COST], 1e-300) / max(x[BEST], 1e-300)))
        u[4] = bounded(10.0 * np.log(max(x[BEST], 1e-300) / max(x[FIRST], 1e-300)))
        u[5] = np.log(x[STEP] - x[FOUND] + 1.0) / 10.0
        u[6] = mean / highest
        u[7] = bounded(max(0.0, 1.0 - x[COMPUTE] / (mean * num_devices)))
        u[8] = log_groups / 10.0
        u[9] = np.log(num_devices) / 3.0
        u[10] = t.kind == LOAD
        u[11] = t.num_batches > 1 and t.kind != LOAD and t.kind != PIECEWISE
        s.offered[:] = 0.0
    s.offered[0] = 0.0
    s.offered[0, 1] = 1.0
    s.count[0] = 0
    for k in range(1, width + 1):
        g, origin = _first_group(s)
        body, where = s.body[k], s.where[k]
        count = propose_from(s.random, device, group_s, t.graph, g, _SHARE, body, where, s.mark)
        s.count[k] = count
        if count == 0 or (t.kind != LOAD and not described):
            continue
        old, new = device[g], where[0]
        load_old, load_new, held_old, held_new = load[old], load[new], held[old], held[new]
        before = after = chained = 0.0
        if described:
            for i in range(count):
                h = body[i]
                before += group_s[h, device[h]]
                after += group_s[h, where[i]]
                chained += s.on_chain[h]
        apply_moves(t.moves, s.moves, body, where, count)
        swap = count == 2 and where[1] == old
        then_old, then_new, then_held = load[old], load[new], held[new]
        energy = 0.0
        if t.kind == LOAD:
            energy = energy_term(then_old, held[old], memory[old], scale, power)
            energy += energy_term(then_new, then_held, memory[new], scale, power)
            energy -= energy_term(load_old, held_old, memory[old], scale, power)
            energy -= energy_term(load_new, held_new, memory[new], scale, power)
        most = load[largest(load, num_devices)] if described else 0.0
        undo_moves(t.moves, s.moves, body, where, count, np.int64(old), np.int64(new))
        load[old], load[new], held[old], held[new] = load_old, load_new, held_old, held_new

        f = s.offered[k]
        if t.kind == LOAD:
            f[0] = max(-3.0 * BOUND, min(3.0 * BOUND, -energy / x[TEMPERATURE]))
        if not described:
            continue
        there = here = 0
        degree = near_ptr[g + 1] - near_ptr[g]
        for i in range(near_ptr[g], near_ptr[g + 1]):
            there += device[near[i]] == new
            here += device[near[i]] == old
        f[2] = bounded(10.0 * np.log(most / highest))
        f[3] = bounded(load_old / highest)
        f[4] = bounded(then_old / highest)
        f[5] = bounded(load_new / highest)
        f[6] = bounded(then_new / highest)
        f[7] = np.log(count) / log_groups
        f[8] = bounded(before / max(load_old, 1e-300)) if not swap else 0.0
        least = 1e-3 * mean / num_groups
        f[9] = bounded(np.log(max(after, least) / max(before, least)))
        saved = (load_old + load_new - before) - (then_old + then_new - after)
        f[10] = bounded(saved / mean)
        f[11] = bounded(then_held / max(memory[new], 1))
        f[12] = there / max(degree, 1)
        f[13] = here / max(degree, 1)
        f[14] = chained / count
        f[15] = s.when[g]
        f[16] = t.rank[g]
        f[17] = np.log(1.0 + s.refused[g, new])
        f[18] = np.log(x[STEP] - s.moved[g] + 1.0) / log_steps
        f[19] = origin == 1
        f[20] = origin == 2
        kind = 25 if swap else 21
        if not swap and count > 1:
            # What it is, not how it was drawn: a run is consecutive.
            kind = 24
            run = True
            for i in range(1, count):
                run &= abs(body[i] - body[i - 1]) == 1
            if run:
                kind = 22
        f[kind] = 1.0
        if t.kind != LOAD:
            f[0] = _hand_score(f)


@kernel
def _hand_score(f):
    """Written by hand: to its neighbours, off the chain, not where it was refused or too much."""
    score = 1.0 * f[14] + 2.0 * (f[12] - f[13]) + 2.0 * min(max(f[10], -1.0), 1.0)
    score -= 1.0 * max(f[2], 0.0) + 1.0 * f[9] + 1.5 * f[17]
    return bounded(score)


@kernel
def _take(t, s, k):
    """Try move ``k`` (0: stay); returns the improvement of log(best), 0 if there is none.

    For max_load it is made, whatever it is worth: its energy was known. Otherwise it is
    evaluated, and kept with probability ``min(1, exp(-log(after / before) / temperature))``.
    """
    x = s.x
    x[STEP] += 1.0
    count = s.count[k]
    if count == 0:
        return 0.0
    body, where = s.body[k], s.where[k]
    device, load, held = s.moves[0], s.moves[1], s.moves[2]
    old, new = device[body[0]], where[0]
    load_old, load_new, held_old, held_new = load[old], load[new], held[old], held[new]
    growth = 0.0
    for i in range(count):
        growth += t.group_s[body[i], where[i]] - t.group_s[body[i], device[body[i]]]
    apply_moves(t.moves, s.moves, body, where, count)
    cost = _evaluate(t, s)
    if t.kind != LOAD and cost > x[COST]:
        worse = np.log(cost / max(x[COST], 1e-300))
        if worse > -x[TEMPERATURE] * np.log(1.0 - uniform(s.random)):
            undo_moves(t.moves, s.moves, body, where, count, np.int64(old), np.int64(new))
            load[old], load[new], held[old], held[new] = load_old, load_new, held_old, held_new
            s.refused[body[0], new] += 1.0
            return 0.0
    x[COST] = cost
    x[COMPUTE] += growth
    for i in range(count):
        s.moved[body[i]] = int(x[STEP])
    s.refused[body[0]] = 0.0
    _look(t, s)
    gain = 0.0
    if cost < x[BEST] * (1.0 - 1e-12):
        gain = min(np.log(x[BEST] / max(cost, 1e-300)), 1.0)
        x[BEST] = cost
        x[FOUND] = x[STEP]
        copy(s.best, device)
    return gain


@kernel
def play(t, s, job, number, net, used, then):
    """The one entry: what calls the simulator is compiled once more with each level of calls.

    * BEGIN: evaluate the placement in ``s.moves[0]``, forget everything else, offer moves for
      step ``number``, where ``used`` of the budget is spent.
    * RESUME: evaluate that placement again, and look at it (drift of many moves is gone then).
    * TAKE: try move ``number``, then offer the next ones where ``then`` of the budget is spent;
      returns the improvement of log(best).
    * SEARCH + chooser: ``number`` steps while ``used`` of the budget becomes ``then``. POLICY
      chooses by the softmax of ``network``, HAND by that of the hand-written score alone. For
      UNIFORM one move is drawn, and for max_load made as annealing does. Staying is a choice
      for max_load only.
    """
    x, width = s.x, len(s.count) - 1
    chooser = job - SEARCH
    # What nobody looks at costs most of the time of a search for max_load.
    described = job <= TAKE or chooser == POLICY or (chooser == HAND and t.kind != LOAD)
    if job < TAKE:
        fill_state(t.moves, s.moves)
        s.on_chain[:] = 0.0
        s.when[:] = 0.0
        x[NUM_CHAIN] = 0.0
        x[COMPUTE] = 0.0
        for g in range(len(t.group_s)):
            x[COMPUTE] += t.group_s[g, s.moves[0][g]]
        x[COST] = _evaluate(t, s)
        _look(t, s)
        if job == BEGIN:
            x[STEP] = x[FOUND] = number
            s.refused[:] = 0.0
            s.moved[:] = number
            x[BEST] = x[FIRST] = x[COST]
            copy(s.best, s.moves[0])
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
            if t.kind == LOAD and np.log(1.0 - uniform(s.random)) > s.offered[1, 0]:
                k = 0
        else:
            if chooser == POLICY:
                body, where = s.body[:, 0], s.where[:, 0]
                for j in range(width + 1):
                    s.which[j] = s.count[j] - 1
                network(net, s.search, s.offered, s.which, body, where, width, logits)
            else:
                for j in range(width + 1):
                    logits[j] = s.offered[j, 0] if j == 0 or s.count[j] > 0 else -np.inf
            if t.kind != LOAD and s.count[largest(s.count, width + 1)] > 0:
                logits[0] = -np.inf
            k = choose(s.random, logits, width)
        gain += _take(t, s, k)
        _cool(s, used + (then - used) * (i + 1) / steps)
        _offer(t, s, 1 if job == SEARCH + UNIFORM else width, described)
    return gain
