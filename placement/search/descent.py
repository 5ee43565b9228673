"""Where evaluations are few: downhill by estimates, and only where that leads is evaluated."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from placement.bounds.loads import balanced
from placement.objective import Objective
from placement.search import macro
from placement.search.evaluation import (
    INFEASIBLE,
    Choice,
    Search,
    can_move,
    neighbours,
)
from placement.search.macro import SHARE, Offers, draws_of
from placement.search.pipeline import MOST, SQUARINGS, Pipeline, can_foresee
from placement.simulator.analytic import load_moves
from placement.simulator.analytic_kernels import TENSOR


class DescentParams(NamedTuple):
    """The numbers of ``descend``."""

    # Of loads.
    body: int = 64  # most groups of a move
    steps: int = 1000  # between two looks at the budget
    width: int = 256  # moves that are estimated for one that is evaluated
    hot: float = 0.8  # of them start on the busiest device
    refused: int = 128  # moves that were evaluated in vain, in a row, after which it ends
    # Of pipelines, whose walks take as long as ten evaluations.
    first: int = 8  # moves that the first walk makes
    wait: float = 0.1  # periods that a hand-over waits, at first ...
    most_wait: float = 2.0  # ... and at most
    vain: int = 40  # walks in a row that lead to nothing better, after which it ends ...
    lost: float = 0.1  # ... or the share of the seconds left that they take
    first_start: float = 0.6  # of the budget that is left, where there is a second start
    lp_size: int = 20_000  # groups x devices of the largest program of loads: it takes a moment


PARAMS = DescentParams()


def descend(search: Search, seed: int) -> None:
    """Improve what ``search`` holds until nothing better is found, or the budget ends.

    For ``max_load`` only where evaluations are limited: annealing makes a million moves in a
    second. Where the objective is another, or a device streams, nothing is done.
    """
    problem = search.problem
    if can_foresee(problem):
        _descend_period(search, seed)
        return
    counted = problem.objective is Objective.MAX_LOAD and np.isfinite(search.num_left)
    if counted and can_move(problem) and not problem.cluster.streaming:
        _descend_loads(search, seed)


def _descend_loads(search: Search, seed: int) -> None:
    """Of ``width`` moves the one of the best estimate is evaluated, and made if it is better.

    An estimate takes each edge between two devices for a tensor of its own that takes both the
    mean of what the two groups send and receive. It ends where ``refused`` moves in a row were
    no better.
    """
    problem = search.problem
    assert search.best is not None
    t, state = load_moves(problem, search.best[problem.graph.group])
    graph, groups = neighbours(problem), problem.graph.num_groups
    draws = draws_of(t.compute_s, graph, seed, SHARE, 0.0, min(PARAMS.body, groups))
    touches = np.diff(t.touch_ptr)
    owner = np.repeat(np.arange(groups), touches)
    total_s = np.bincount(owner, t.io_s.mean(axis=1)[t.touch[:, TENSOR]], groups)
    mean_s = total_s / np.maximum(touches, 1)
    here = np.repeat(np.arange(groups), np.diff(graph.near_ptr))
    offers = Offers(
        near_s=np.minimum(mean_s[here], mean_s[graph.near]),
        group=np.zeros(groups, np.int32),
        where=np.zeros(groups, np.int32),
        refused=np.zeros(PARAMS.refused, np.int64),
    )
    best, tried, steps = search.best.copy(), 0, 0
    while search.left and tried == steps:
        steps, before_s = int(min(search.num_left, PARAMS.steps)), search.best_s
        args = t, state, draws, offers, best, before_s
        best_s, tried = macro.descend(*args, steps, PARAMS.width, PARAMS.hot)
        search.consider(best if best_s < before_s else None, tried)


def _descend_period(search: Search, seed: int) -> None:
    """Walks from the best so far; after them, where devices are unlike, from balanced loads.

    Whoever found the best so far gave each operator to a device that it is fast on only as far as
    he looked. The linear program of the loads (``bounds.loads.balanced``) looks at all of them.
    """
    assert search.best is not None
    pipeline, seconds = Pipeline(search.problem, seed), search.problem.group_compute_s
    unlike = seconds.size <= PARAMS.lp_size and bool((seconds != seconds[:, :1]).any())
    until = search.used + PARAMS.first_start * (1.0 - search.used) if unlike else 1.0
    if search.best_s < np.inf:
        _walk_down(search, pipeline, search.best, search.best_s, until)
    if unlike and search.left and search.best_s < np.inf:
        even = balanced(seconds).astype(np.int32)
        value_s = search.cost(even)
        if value_s < INFEASIBLE:
            _walk_down(search, pipeline, even, value_s, 1.0)


def _walk_down(
    search: Search, pipeline: Pipeline, here: Choice, here_s: float, until: float
) -> None:
    """From ``here`` walks go down the estimate, and where they end is evaluated.

    No period is below the load of a device or a channel, nor below the longest path over the
    micro-batches in flight. The estimate is the largest of them, where each hand-over on the path
    waits for what its receiver is doing: ``wait`` periods, fitted to what was evaluated. Walks are
    twice as long after one that was better, and half as long after one that was not. It ends
    where ``vain`` of them in a row lead to nothing better, or take ``lost`` of the seconds that
    are left, or that share of the budget is used.
    """
    most, wait, vain, number, since_s = PARAMS.first, PARAMS.wait, 0, 0, search.seconds
    while search.left and search.used < until and vain < PARAMS.vain:
        if search.seconds - since_s > PARAMS.lost * search.seconds_left:
            break
        squarings = SQUARINGS[number % len(SQUARINGS)]
        number, vain = number + 1, vain + 1
        choice = pipeline.walk(here, wait * here_s, squarings, most)
        if np.array_equal(choice, here):
            most, wait = min(2 * most, MOST), 0.8 * wait
            continue
        value_s, most, before_s = search.cost(choice), max(1, most // 2), here_s
        if value_s < here_s:
            most, vain, since_s = min(4 * most, MOST), 0, search.seconds
            here, here_s = choice, value_s
        if value_s < INFEASIBLE:
            estimated_s = pipeline.estimate(choice, wait * before_s)
            if not 0.999 * estimated_s <= value_s <= 1.005 * estimated_s:
                fitted = pipeline.wait_of(choice, value_s, PARAMS.most_wait * before_s) / before_s
                wait = min(fitted, 4.0 * wait + 0.05)
