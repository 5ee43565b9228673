"""The search of ``order_search``: moves are offered, one is chosen and tried, and kept or not.

Numba kernels; ``begin`` and ``play`` are the entries. ``order_times`` says what a sequence is, and
what it takes, ``order_estimates`` what a move would bring, ``order_moves`` which there are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np

from placement.search.macro import uniform
from placement.search.order_moves import offer
from placement.search.order_times import (
    NEVER,
    evaluate,
    fill_tails,
    forget,
    keep,
    line_up,
    pass_on,
    put_in_order,
    timetable,
)
from placement.search.perceptron import choose
from placement.tools.jit import copy, kernel, largest


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
        pass_on(t, s, s.room[m], d)


@kernel
def _least(s, width):
    """The offered move of the least estimate; 0: none is."""
    k, least = 0, np.inf
    for j in range(1, width + 1):
        if s.which[j] >= 0 and s.estimate_s[j] < least:
            k, least = j, s.estimate_s[j]
    return k


@kernel
def _go_back(t, s):
    """Begin again at the best, with nobody at rest."""
    copy(s.place, s.best_place)
    copy(s.sequence, s.best_sequence)
    s.cost_s = evaluate(t, s)
    s.moved[:] = 0
    s.num_back += 1


@kernel
def _take(t, s, k, always):
    """Try move ``k`` (0: stay).

    It is kept with probability ``min(1, exp(-log(after / before) / temperature))``, or ``always``.
    """
    s.step += 1
    i = s.which[k]
    if i < 0:
        return
    old, new, at = np.int64(s.place[i]), np.int64(s.to[k]), np.int64(s.at[k])
    limit = np.inf
    if s.cost_s < NEVER and not always:
        limit = s.cost_s * (1.0 - uniform(s.random)) ** -s.temperature
    num = _members(t, s, k)
    first, moved = _concerned(t, s, k, num)
    _put(s, num, new)
    back = _shift(s, i, at) if at >= 0 else at
    cost = timetable(t, s, first, moved, limit)
    if cost > limit:
        forget(t, s)
        if at >= 0:
            _shift(s, i, back)
        _put(s, num, old)
        return
    s.cost_s = cost
    s.num_kept += 1
    s.moved[i] = s.step
    if cost < s.best_s * (1.0 - 1e-12):
        s.best_s = cost
        s.best_step = s.step
        s.num_back = 0
        copy(s.best_place, s.place)
        copy(s.best_sequence, s.sequence)
    keep(t, s)
    _touch(t, s, num, old)
    line_up(t, s)
    _touch(t, s, num, new)
    if t.simulated:  # any time may have changed
        s.stale[:] = True
        moved = np.int64(len(s.place) - 1)
    fill_tails(t, s, moved)
    if s.num_kept % 64 == 0:
        put_in_order(t, s)


@kernel
def begin(t, s):
    """Forget everything but ``s.place`` and ``s.sequence``, evaluate them, and offer moves."""
    s.on_chain[:] = False
    s.num_chain = s.num_kept = s.num_back = 0
    s.cost_s = evaluate(t, s)
    put_in_order(t, s)
    s.step = s.best_step = 0
    s.best_s = s.cost_s
    s.moved[:] = 0
    copy(s.best_place, s.place)
    copy(s.best_sequence, s.sequence)
    _cool(s, 0.0)
    offer(t, s, len(s.which) - 1, False)


@kernel
def play(t, s, steps, tabu, used):
    """Make ``steps`` steps, as cool as where ``used`` 0..1 of the budget is spent.

    A ``tabu`` search takes the move of the least estimate among those that are not at rest;
    otherwise the softmax of the scores says with which probability each move is tried.
    """
    width = len(s.which) - 1
    for _ in range(steps):
        k = _least(s, width) if tabu else _drawn(s, width)
        _take(t, s, k, tabu)
        if tabu and s.step - s.best_step > 150.0 * (1.0 + s.num_back) ** 2:  # the next time later
            _go_back(t, s)
        _cool(s, used)
        offer(t, s, width, tabu)


@kernel
def _drawn(s, width):
    """A move with the probabilities of the softmax of the scores; 0: there is none to make."""
    logits = s.logits
    for j in range(width + 1):
        logits[j] = s.score[j] if s.which[j] >= 0 else -np.inf
    if s.which[largest(logits, width + 1)] < 0:
        logits[0] = 0.0
    return choose(s.random, logits, width)


@kernel
def _cool(s, used):
    """The temperature where ``used`` 0..1 of the budget is spent."""
    s.temperature = s.warm * (s.cold / s.warm) ** used
