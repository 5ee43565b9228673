"""The best answer of several planners."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from placement.bounds import lower_bound
from placement.objective import Objective
from placement.planners import Among, PlannerError, find, load
from placement.planners.contiguous_dp import ContiguousDp
from placement.planners.critical_path_greedy import CriticalPathGreedy
from placement.planners.ideal_dp import IdealDp
from placement.problem import Planner, Problem, Solution
from placement.search.evaluation import (
    DEFAULT_EVALUATIONS,
    INFEASIBLE,
    Search,
    can_move,
    cannot_fit,
)
from placement.search.planner import options_of

# What ideal_dp gets where seconds are not limited: a second or less, the same on every machine.
_IDEALS: dict[str, Any] = {"seconds": None, "memory_bytes": 2**26, "max_steps": 2**27}


@dataclass(frozen=True)
class BestOf:
    """Runs ``planners`` one after another and keeps the best: the start of every search.

    Heuristics complement each other: list scheduling fails where memory is tight, contiguous
    splits fail on wide graphs. So by default these are all constructive planners and dynamic
    programs, the cheap ones first: splits for pipelines, list schedules for latency.
    ``contiguous_dp`` cuts several orders. Where the problem's ``max_phases`` lets micro-batches
    take turns, ``data_parallel`` and ``replicated`` take part for pipelines; ``residence`` does
    where a device streams.
    ``stats["winner"]`` names the planner that won, ``stats["values_s"]`` has the value of each
    that was run, ``stats["skipped"]`` says why others were not (an optional package, more sets
    of devices than a program takes, not enough memory, no time), and ``lower_bound_s`` is
    ``placement.bounds.lower_bound``.

    Of limited seconds these planners get a quarter. With the rest, and with evaluations that they
    leave, ``macro_search`` and ``local_search`` go on from the best placement until it is proved,
    or they had 1,000 evaluations for each group and other device; not where micro-batches take
    turns. They also go on (for 2,000 evaluations without a budget) where none of the planners finds
    a placement that fits in memory, and arithmetic does not prove that there is none.

    Attributes:
        planners: names, as ``placement.planners.load`` takes them.
        search_on: whether searches go on. One that starts here asks for the planners alone.
        seconds, evaluations: budget of all together; None is no limit, and takes about 20 s for
            2,500 operators and far less for hundreds. A planner with a clock gets half of the
            seconds that are left, the last one all; any other is begun, once something fits, only
            where several times what the slowest took is left. ``Among`` of each says who is first
            and who gets which share.
        prudence: so many times what the slowest without a clock took must be left.
        orders: that ``contiguous_dp`` cuts.
        ideal_seconds: what ``ideal_dp`` gets at most of limited seconds, as on wide graphs it would
            take any time.
        search_share: of the seconds, for searches; of any budget where nothing fits.
        enough: evaluations of a search, for each group and other device.
        latency_share: of limited seconds, for who walks on: for latency that wins most often.
    """

    planners: tuple[str, ...] = (
        "single_device",
        "heft",
        "busy_heft",
        "peft",
        "critical_path_first",
        "level_balance",
        "pipedream",
        "balanced_split",
        "m_topo",
        "round_robin",
        "m_etf",
        "m_sct",
        "contiguous_dp",
        "layer_dp",
        "coarsened",
        "metis",
        "time_slices",
        "level_pipeline",
        "critical_path_greedy",
        "antichain_dp",
        "ideal_dp",
        "replicated",
        "data_parallel",
    )
    search_on: bool = True
    seconds: float | None = None
    evaluations: int | None = None
    prudence: float = 2.0
    orders: int = 8
    ideal_seconds: float = 15.0
    search_share: float = 0.75
    enough: int = 1000
    latency_share: float = 0.8

    def __call__(self, problem: Problem) -> Solution:
        """Plan ``problem``.

        Raises:
            PlannerError: no such planner, none that can be run, or a budget that is not positive.
        """
        may_search = can_move(problem) and not cannot_fit(problem)
        limited = self.seconds is not None or self.evaluations is not None
        if self.search_on and limited and may_search and problem.max_phases == 1:
            return self._and_search(problem)
        search = Search(problem, self.seconds, self.evaluations)
        chosen = [(name, load(name)) for name in self._order(problem)]
        values: dict[str, float] = {}
        skipped: dict[str, str] = {}
        winner, slowest_s, quick_s = "", 0.0, 0.0
        tries = 3 if problem.memory_may_bind else 1  # see list_schedule.first_that_fits
        for i, (name, planner) in enumerate(chosen):
            own, among = options_of(planner), _among(planner)
            nothing_fits = search.best_s == np.inf
            anyway = among.walks or (nothing_fits and not among.late)
            needed_s = max(self.prudence * slowest_s, among.times * quick_s)
            in_time = anyway or search.seconds_left > needed_s
            in_number = "evaluations" in own or search.num_left >= tries or not values
            for_search = nothing_fits and may_search and not among.quick
            # A late beginning, as of compiling, is no reason to answer with what fits nowhere.
            is_owed = name == "single_device" and nothing_fits and self.evaluations is None
            may_run = is_owed or (search.left and in_time and in_number)
            if (for_search and search.used >= 1.0 - self.search_share) or not may_run:
                skipped[name] = "nothing is left of the budget"
                continue
            # The last one gets all, unless a search for something that fits may have to follow.
            is_last = i + 1 == len(chosen) and not nothing_fits
            share = self._share(planner, search, is_last)
            planner = self._told(planner, search)
            before, began = search.best_cost, search.seconds
            try:
                with warnings.catch_warnings():  # a program that ended early says so: it may lose
                    warnings.simplefilter("ignore", RuntimeWarning)
                    values[name] = search.run(planner, share, among.share).value_s
            except PlannerError as error:
                skipped[name] = _why_skipped(error)
                continue
            took_s = search.seconds - began
            if "seconds" not in own:
                slowest_s = max(slowest_s, took_s)
            if among.quick:
                quick_s = max(quick_s, took_s)
            winner = name if search.best_cost < before else winner
        if not values:
            raise PlannerError("; ".join(skipped.values()) or "best_of: no planners were named")
        if search.best_s == np.inf and may_search:
            winner = _search_on(self.enough, search, values, skipped) or winner
        bound = lower_bound(problem)
        return search.solution(bound, winner=winner, values_s=values, skipped=skipped)

    def _share(self, planner: Planner, search: Search, is_last: bool) -> float:
        """Of what is left of the budget."""
        share = 1.0 if is_last else 0.5
        if _among(planner).walks and search.problem.objective is Objective.LATENCY:
            share = max(share, self.latency_share)
        if isinstance(planner, IdealDp) and self.seconds is not None:
            share = min(share, self.ideal_seconds / max(search.seconds_left, 1e-9))
        return share

    def _told(self, planner: Planner, search: Search) -> Planner:
        """The planner, with what others found, or with limits that it has not by itself."""
        if isinstance(planner, CriticalPathGreedy) and np.isfinite(search.seconds_left):
            return replace(planner, beat=search.best_cost)
        if isinstance(planner, ContiguousDp):
            return replace(planner, orders=self.orders)
        if isinstance(planner, IdealDp) and self.seconds is None:
            return replace(planner, **_IDEALS)
        return planner

    def _and_search(self, problem: Problem) -> Solution:
        """The planners within a quarter of the seconds; then searches, with all that is left."""
        search = Search(problem, self.seconds, self.evaluations)
        stats = search.run(replace(self, search_on=False), 1.0 - self.search_share).stats
        search.bound_s = lower_bound(problem)
        others = {k: stats[k] for k in ("values_s", "skipped")}
        winner = _search_on(self.enough, search, **others) or stats["winner"]
        return search.solution(search.bound_s, winner=winner, **others)

    def _order(self, problem: Problem) -> list[str]:
        """Who comes first where not all of them may come."""
        loads = problem.objective.is_throughput
        turns, last = loads and problem.max_phases > 1, 100  # of planners that say none
        streams = ("residence",) if problem.cluster.streaming else ()
        names = dict.fromkeys((*self.planners, *streams))
        among = {name: _among(find(name)) for name in names}

        def turn(name: str) -> int:
            mine = among[name]
            if problem.objective is Objective.PIECEWISE_LATENCY and mine.pieces is not None:
                return mine.pieces - last
            own = mine.loads if loads else mine.calls
            return last if own is None else own

        order = sorted((n for n in names if turns or not among[n].turns), key=turn)
        if self.seconds is not None:
            order.sort(key=lambda name: among[name].late - among[name].quick)
        if self.evaluations is not None:
            order.sort(key=lambda name: 2 if turn(name) == last else among[name].several)
        return order


def _among(planner: Any) -> Among:
    """What a planner, or its class, says of itself."""
    mine = getattr(planner, "among", None)
    return mine if isinstance(mine, Among) else Among()


def _search_on(
    enough: int, search: Search, values_s: dict[str, float], skipped: dict[str, str]
) -> str:
    """Search from the best, or closest, placement; the name of who found a better one that fits."""
    search.limit(DEFAULT_EVALUATIONS)
    winner = ""
    for name, share in (("macro_search", 0.7), ("local_search", 1.0)):
        if search.left and search.best is not None:
            placement, before = search.best[search.problem.graph.group], search.best_cost
            moves = search.problem.graph.num_groups * (search.problem.num_devices - 1)
            most = enough * moves if np.isfinite(search.best_s) else None
            start = {"start": lambda _, p=placement: Solution(p, np.inf)}
            searcher = load(name, **start, evaluations=most)
            try:
                values_s[name] = search.run(searcher, share, share).value_s
            except PlannerError as error:
                skipped[name] = _why_skipped(error)
            winner = name if search.best_cost < min(before, INFEASIBLE) else winner
    return winner


def _why_skipped(error: PlannerError) -> str:
    """The message; of a planner that lacked memory also as a warning, as more memory may help."""
    if isinstance(error.__cause__, MemoryError):
        warnings.warn(f"best_of goes on without one: {error}", RuntimeWarning, stacklevel=3)
    return str(error)
