"""Annealing over macro moves, with exact deltas where the objective allows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.objective import Objective
from placement.planners import PlannerError, check_least
from placement.planners.ideal_dp import IdealDp
from placement.problem import Planner, Problem, Solution
from placement.search import macro
from placement.search.descent import descend
from placement.search.evaluation import Choice, FromStart, Search, can_move, neighbours
from placement.simulator.analytic import load_moves
from placement.simulator.analytic_kernels import Moves, Placed, piecewise_tables

Round = tuple[float, float, int, int]  # temperature at first and at last, log2 of p likewise
_FIND: Round = (0.05, 2e-3, 4, 4)
_POLISH: Round = (0.03, 1e-5, 2, 8)


class MacroParams(NamedTuple):
    """The numbers of ``MacroSearch``."""

    hot: float = 0.2  # of the moves of loads start on the busiest device; with more it digs in
    # Of max_load.
    rounds: tuple[Round, ...] = (_FIND, _POLISH, (1.0, 1e-4, 2, 7), _POLISH, _FIND, _POLISH)
    # Of piecewise_latency: temperatures at first and at last, as a share of the best so far.
    pieces: tuple[tuple[float, float], ...] = ((3e-3, 1e-4), (0.1, 1e-3), (0.01, 1e-4))
    cut: float = 0.2  # of its moves are parts of stages
    warm: tuple[float, float] = (0.02, 0.005)  # temperatures of other objectives, likewise, in turn
    steps: int = 1024  # of loads, between two looks at the clock


PARAMS = MacroParams()


@dataclass(frozen=True)
class MacroSearch(FromStart):
    """Annealed search that moves whole neighbourhoods of colocation groups at once.

    A move that makes it worse by ``delta`` is made with probability ``exp(-delta / T)`` (of
    ``width`` moves, one or none is made with probabilities proportional to it). It starts at
    a group, for ``max_load`` every fifth time on the busiest device, and goes to the device of
    a neighbour or any other. It moves the group alone, a run of consecutive groups on its
    device, a chain of successors, a grown neighbourhood (all of a length drawn
    log-uniformly), or swaps two groups.

    For ``max_load`` deltas are exact, in one kernel; what is annealed is
    ``sum_d (load_d / best) ** p``, because the largest load alone is flat almost everywhere. For
    ``piecewise_latency`` a kernel walks over the pieces; a fifth of its moves take a part of a
    stage, cut off before or behind a group, to a device next to it. Other objectives are
    simulated, ``width`` placements at once, and annealed as they are. Before each round a period is
    improved by its estimate, before the first ``max_load`` too where evaluations are limited
    (``placement.search.descent``).

    The budget is divided into ``rounds`` that cool down. For ``max_load`` each starts from the
    best so far: rounds of small ``p`` see the balance of all devices and find new shapes, those of
    large ``p`` see the busiest one alone and polish. For ``piecewise_latency`` they start in turn
    from each first placement, the last from the best.

    Attributes:
        start: None: ``best_of``, and for the objectives that are formulas the split of
            ``ideal_dp`` for ``max_load`` too, within a fifth of the seconds (of its linearised
            program, where there is no limit).
        rounds: how often it is heated up; None: 8 for ``piecewise_latency``, otherwise 6.
        width: moves among which a step of the simulated objectives chooses.
    """

    start: str | Planner | None = None
    rounds: int | None = None
    width: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "rounds", "width")

    def __call__(self, problem: Problem) -> Solution:
        search, _ = self.begin(problem)
        assert search.best is not None
        starts = [search.best]
        if self.start is None and problem.objective.is_analytic and search.left:
            starts += _run_ideal_dp(search, self.seconds)
        if can_move(problem):
            anneal(self, search, starts)
        return search.solution()


def anneal(planner: MacroSearch, search: Search, starts: list[Choice]) -> None:
    """Anneal by the options of ``planner`` until the budget of ``search`` ends.

    It begins where a descent from its best ends; ``starts`` int32 ``[G]`` are more of them for
    ``piecewise_latency``.
    """
    descend(search, planner.seed)
    if search.problem.objective is Objective.MAX_LOAD:
        _anneal_loads(planner, search)
    elif search.problem.objective is Objective.PIECEWISE_LATENCY:
        _anneal_pieces(planner, search, starts)
    else:
        _anneal_any(planner, search)


def _run_ideal_dp(search: Search, seconds: float | None) -> list[Choice]:
    """Consider the best contiguous split, or the best that a fifth of the time allows.

    Where time is not limited it is the linearised one: it must not depend on the clock.
    """
    try:
        counted = IdealDp(seconds=None, max_steps=2**27, ideals=False)
        planner = counted if seconds is None else IdealDp(seconds=0.2 * seconds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            answer = planner(search.problem.by_loads)
    except PlannerError:  # too many kinds of devices
        return []
    choice = search.choice(answer.placement)
    search.consider(choice, 1)
    return [choice]


def _cooling(search: Search, rounds: int) -> Iterator[tuple[int, float]]:
    """The round, 0..rounds - 1, and the part of it that is over, until the budget ends."""
    begun = search.used
    while search.left:
        progress = (search.used - begun) / max(1.0 - begun, 1e-12) * rounds
        yield min(int(progress), rounds - 1), progress % 1.0


def _anneal_loads(planner: MacroSearch, search: Search) -> None:
    """Anneal the largest load in the kernel until the budget ends."""
    assert search.best is not None
    problem, rounds = search.problem, planner.rounds or 6
    tables, state = load_moves(problem, search.best[problem.graph.group])
    draws = _draws(planner, problem, tables.compute_s, 0.0, 64)

    def anneal(best: Choice, best_s: float, steps: int, this: int, part: float) -> float:
        warm, cold, first, last = PARAMS.rounds[this % len(PARAMS.rounds)]
        temperature = warm * (cold / warm) ** part
        power = min(last, first + int((last - first + 1) * part))
        moves = tables, state, draws, best, best_s, steps
        return float(macro.anneal(*moves, PARAMS.hot, temperature, power))

    _in_rounds(search, state, rounds, PARAMS.steps, [], anneal)


def _anneal_pieces(planner: MacroSearch, search: Search, starts: list[Choice]) -> None:
    """Anneal the latency of pieces in the kernel until the budget ends."""
    assert search.best is not None
    problem, g, rounds = search.problem, search.problem.graph, planner.rounds or 8
    tables, state = load_moves(problem, search.best[g.group])
    tables = Moves(**dict(tables.items(), compute_s=_one_cpu(problem)))
    pieces = piecewise_tables(problem)
    members = macro.Members(ptr=g.group_ptr, op=g.group_op, device=np.empty(g.num_ops, np.int32))
    draws = _draws(planner, problem, tables.compute_s, PARAMS.cut, g.num_groups)

    def anneal(best: Choice, best_s: float, steps: int, this: int, part: float) -> float:
        warm, cold = PARAMS.pieces[0 if this == rounds - 1 else this % len(PARAMS.pieces)]
        level_s = search.best_s if search.best_s < np.inf else 1e3
        temperature = level_s * warm * (cold / warm) ** part
        moves = tables, state, draws, pieces, members, best, best_s, steps
        return float(macro.anneal_pieces(*moves, temperature))

    _in_rounds(search, state, rounds, 16, starts, anneal)


def _draws(
    planner: MacroSearch, problem: Problem, compute_s: NDArray[np.float64], cut: float, most: int
) -> macro.Draws:
    body = min(most, problem.graph.num_groups)  # groups that a move has, at most
    return macro.draws_of(compute_s, neighbours(problem), planner.seed, macro.SHARE, cut, body)


def _in_rounds(
    search: Search,
    state: Placed,
    rounds: int,
    most: int,
    starts: list[Choice],
    anneal: Callable[[Choice, float, int, int, float], float],
) -> None:
    """Anneal in a kernel, at most ``most`` steps between two looks at the budget, until it ends.

    Rounds begin with ``starts`` in turn, the last one (without ``starts`` each) with the best so
    far. ``anneal`` is told that, its value, the steps, the round, and the part of it that is over.
    """
    assert search.best is not None
    best, best_s, current = search.best.copy(), search.best_s, -1
    slowly = max(1, int(min(most, search.num_left / (16 * rounds))))
    for this, part in _cooling(search, rounds):
        if this != current:
            current = this
            at_best = not starts or this == rounds - 1
            state.device[:] = best if at_best else starts[this % len(starts)]
        steps = int(min(slowly, search.num_left))
        found_s = anneal(best, best_s, steps, this, part)
        search.consider(best if found_s < best_s else None, steps)
        best_s = min(best_s, found_s)


def _one_cpu(problem: Problem) -> NDArray[np.float64]:
    """float64 ``[G, D]`` seconds: of CPUs that are alike one that has room for all is the pool."""
    compute_s, room = problem.group_compute_s.copy(), problem.memory_bytes
    pool = [d for d, device in enumerate(problem.cluster.devices) if device.kind == "cpu"]
    if pool and problem.graph.param_bytes.sum() > room[pool[0]]:
        return compute_s
    alike = [d for d in pool[1:] if np.array_equal(compute_s[:, d], compute_s[:, pool[0]])]
    compute_s[:, alike] = np.inf
    return compute_s


def _anneal_any(planner: MacroSearch, search: Search) -> None:
    """Anneal any objective until the budget ends, scoring whole placements."""
    assert search.best is not None
    problem = search.problem
    choose = np.random.default_rng(planner.seed)
    draws = _draws(planner, problem, problem.group_compute_s, 0.0, problem.graph.num_groups)
    width = planner.width
    here, cost, current = search.best, search.best_cost, -1
    for this, part in _cooling(search, planner.rounds or 6):
        if this != current:
            if this:
                descend(search, planner.seed + this)  # of another best, and with other walks
            here, cost, current = search.best, search.best_cost, this
        warm = PARAMS.warm[this % 2]
        temperature = search.best_cost * warm * (1e-5 / warm) ** part
        rows = np.tile(here, (width, 1))
        for row in rows:
            count = macro.propose(draws, here, -1)
            row[draws.group[:count]] = draws.where[:count]
        costs = search.costs(rows)
        if not len(costs):  # the time ended meanwhile
            break
        worse = np.append(costs, cost) - min(costs.min(), cost)
        weight = np.exp(-worse / max(temperature, 1e-300))  # 0: nothing takes time
        chosen = int(np.searchsorted(np.cumsum(weight), choose.random() * weight.sum()))
        if chosen < len(costs):
            here, cost = rows[chosen], float(costs[chosen])
