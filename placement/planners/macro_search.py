"""Annealing over macro moves, with exact deltas where the objective allows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.objectives import LoadMoves
from placement.planners import PlannerError, _macro
from placement.planners._search import (
    DEFAULT_EVALUATIONS,
    INFEASIBLE,
    Search,
    can_move,
)
from placement.planners.ideal_dp import IdealDp
from placement.planners.local_search import begin
from placement.problem import Planner, Problem, Solution
from placement.profile import Profile

_HOT = 0.2  # of the moves start on the busiest device; more of them, and it digs in there
_SHARE = np.array([0.5, 0.6, 0.7, 0.85, 1.0])  # single, run, chain, growth, swap; cumulated
# Rounds of max_load: temperature at first and at last, log2 of p at first and at last.
_FIND, _POLISH = (0.05, 2e-3, 4, 4), (0.02, 1e-4, 4, 8)
_ROUNDS = (_FIND, (1.0, 1e-4, 2, 7), _POLISH, (0.05, 2e-3, 2, 2), _FIND, _POLISH)
_WARM = (0.02, 0.005)  # of other objectives, in turn, as a share of the best so far
_STEPS = 1024  # between two looks at the clock


@dataclass(frozen=True)
class MacroSearch:
    """Annealed search that moves whole neighbourhoods of colocation groups at once.

    A step draws ``width`` macro moves and takes one of them, or none, with probability
    proportional to ``exp(-delta / T)``. A move starts at a group, every fifth time on the
    busiest device, and goes to the device of a neighbour or any other. It moves the group
    alone, a run of consecutive groups on its device, a chain of successors, a grown
    neighbourhood (all of a length drawn log-uniformly), or swaps two groups.

    For ``max_load`` deltas are exact and incremental, in one kernel; what is annealed is
    ``sum_d (load_d / best) ** p``, because the largest load alone is flat almost everywhere.
    Other objectives are simulated, ``width`` placements at once, and annealed as they are.

    The budget is divided into ``rounds``. Each starts from the best so far and cools down,
    in some while ``p`` grows up to 128 or 256: rounds of small ``p`` see the balance of all
    devices and find new shapes, those of large ``p`` see the busiest one alone and polish.

    Attributes:
        start: planner that gives the first placement (a name or a planner), or ``random``;
            its evaluations count. None: ``best_of``, and for ``max_load`` ``ideal_dp`` too,
            within a fifth of the seconds (its linearised program, where there is no limit).
        rounds: how often it is heated up again.
        width: moves among which a step chooses; None: 1 for ``max_load``, otherwise 16.
        body: most groups a move has; None: 64 for ``max_load``, otherwise all.
        seconds, evaluations: budget; with neither, 2,000 evaluations.
        seed: of the draws.
    """

    start: str | Planner | None = None
    rounds: int = 6
    width: int | None = None
    body: int | None = None
    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0

    def __call__(self, problem: Problem) -> Solution:
        """Raises: PlannerError, ``rounds``, ``width`` or ``body`` below 1."""
        for name in ("rounds", "width", "body"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlannerError(f"macro_search: {name} = {value} must be at least 1")
        _load_kernel()
        search = Search(problem, self.seconds, self.evaluations, DEFAULT_EVALUATIONS)
        if self.start is None:
            search.run("best_of")
            if problem.objective == "max_load" and search.left:
                _run_ideal_dp(search, self.seconds)
        else:
            begin(search, self.start, np.random.default_rng(self.seed))
        if can_move(problem):
            climb = _anneal_loads if problem.objective == "max_load" else _anneal_any
            climb(self, search)
        return search.solution()


def _run_ideal_dp(search: Search, seconds: float | None) -> None:
    """Consider the best contiguous split, or the best that a fifth of the time allows."""
    try:
        planner = IdealDp(memory_bytes=1) if seconds is None else IdealDp(seconds=0.2 * seconds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            answer = planner(search.problem)
    except PlannerError:  # too many kinds of devices
        return
    search.consider(search.choice(answer.placement), 1)


def _neighbours(problem: Problem) -> tuple[NDArray[np.int32], ...]:
    """``graph`` of ``_macro.propose``: (near_ptr, near, after_ptr, after), all int32."""
    g = problem.graph
    pairs = g.group[g.edges] if len(g.edges) else np.zeros((0, 2), np.int32)
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    both = np.unique(np.concatenate([pairs, pairs[:, ::-1]]), axis=0)
    numbers = np.arange(g.num_groups + 1)
    return tuple(
        np.ascontiguousarray(x, dtype=np.int32)
        for edges in (both, pairs)
        for x in (np.searchsorted(edges[:, 0], numbers), edges[:, 1])
    )


def _cooling(search: Search, rounds: int) -> Iterator[tuple[int, float]]:
    """The round, 0..rounds - 1, and the part of it that is over, until the budget ends."""
    begun = search.used
    while search.left:
        progress = (search.used - begun) / max(1.0 - begun, 1e-12) * rounds
        yield min(int(progress), rounds - 1), progress % 1.0


def _anneal_loads(planner: MacroSearch, search: Search) -> None:
    """Anneal the largest load in the kernel until the budget ends."""
    assert search.best is not None
    problem = search.problem
    moves = LoadMoves(problem, search.best[problem.graph.group])
    graph = _neighbours(problem)
    random = _random(planner.seed)
    best = search.best.copy()
    best_s = search.best_cost if search.best_cost < INFEASIBLE else np.inf
    body = min(planner.body or 64, problem.graph.num_groups)
    slowly = max(1, int(min(_STEPS, search.num_left / (16 * planner.rounds))))
    current = -1
    for this, part in _cooling(search, planner.rounds):
        if this != current:
            current = this
            moves.state[0][:] = best
        warm, cold, first, last = _ROUNDS[this % len(_ROUNDS)]
        steps = int(min(slowly, search.num_left))
        found_s = _macro.anneal(
            moves.tables,
            moves.state,
            graph,
            _SHARE,
            random,
            best,
            best_s,
            steps,
            body,
            _HOT,
            warm * (cold / warm) ** part,
            min(last, first + int((last - first + 1) * part)),
        )
        if found_s < best_s:
            search.consider(best, steps)
            best_s = found_s
        else:
            search.num_evaluations += steps


def _anneal_any(planner: MacroSearch, search: Search) -> None:
    """Anneal any objective until the budget ends, scoring whole placements."""
    assert search.best is not None
    problem = search.problem
    graph = _neighbours(problem)
    random = _random(planner.seed)
    choose = np.random.default_rng(planner.seed)
    compute_s = problem.group_compute_s.copy()
    if problem.objective == "piecewise_latency":  # CPUs are one pool: one of them stands for all
        pool = [d for d, device in enumerate(problem.cluster.devices) if device.kind == "cpu"]
        alike = [d for d in pool[1:] if np.array_equal(compute_s[:, d], compute_s[:, pool[0]])]
        compute_s[:, alike] = np.inf
    body = min(planner.body or problem.graph.num_groups, problem.graph.num_groups)
    group, where = np.zeros(body, np.int32), np.zeros(body, np.int32)
    mark = np.zeros(problem.graph.num_groups, np.int32)
    width = planner.width or 16
    here, cost, current = search.best, search.best_cost, -1
    for this, part in _cooling(search, planner.rounds):
        if this != current:
            here, cost, current = search.best, search.best_cost, this
        temperature = search.best_cost * _WARM[this % 2] * (1e-5 / _WARM[this % 2]) ** part
        rows = np.tile(here, (width, 1))
        for row in rows:
            count = _macro.propose(random, here, compute_s, graph, -1, _SHARE, group, where, mark)
            row[group[:count]] = where[:count]
        found = search.costs(rows)
        if not len(found):  # the time ended meanwhile
            break
        weight = np.exp(-(np.append(found, cost) - min(found.min(), cost)) / temperature)
        chosen = int(np.searchsorted(np.cumsum(weight), choose.random() * weight.sum()))
        if chosen < len(found):
            here, cost = rows[chosen], float(found[chosen])


def _random(seed: int) -> NDArray[np.uint64]:
    """State of ``_macro``'s generator, uint64 ``[1]``, never 0."""
    return np.random.default_rng(seed).integers(1, 2**64, 1, dtype=np.uint64)


@cache
def _load_kernel() -> None:
    """Compile the kernel, or read it from its cache: once, and outside of every budget."""
    graph = OpGraph.build("two", ["a", "b"], [0], [1], [(0, 1)])
    cluster = Cluster("two", (Device("a"), Device("b")))
    zeros = np.zeros((2, 2))
    links = (Link("a", "b", 0.0, 1.0), Link("b", "a", 0.0, 1.0))
    problem = Problem(graph, cluster, Profile(("a", "b"), zeros + 1, zeros, links), "max_load")
    search = Search(problem, evaluations=8)
    search.cost(np.zeros(2, np.int32))
    _anneal_loads(MacroSearch(), search)
