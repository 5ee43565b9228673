"""The best answer of several planners."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from placement.bounds import lower_bound
from placement.objective import Objective
from placement.planners import PlannerError, load
from placement.planners.contiguous_dp import ContiguousDp
from placement.planners.critical_path_greedy import CriticalPathGreedy
from placement.planners.ideal_dp import IdealDp
from placement.problem import Planner, Problem, Solution
from placement.search.budget import options_of
from placement.search.evaluation import (
    DEFAULT_EVALUATIONS,
    INFEASIBLE,
    Search,
    can_move,
    cannot_fit,
)

# A planner is begun only if this many times what the slowest without a clock took is left.
_PRUDENCE = 2.0
# These are linear in the graph: where seconds are limited they come first,
_QUICK = ("single_device", "heft", "busy_heft", "peft", "critical_path_first", "level_balance",
          "balanced_split", "pipedream", "m_topo", "round_robin", "m_etf",
          "level_pipeline")  # fmt: skip
# and these last, which take long whatever they are given. They and ideal_dp need at least so many
# times what the slowest of the others took (of 5,000 operators): they are begun if that is left.
_LATE = {"m_sct": 15.0, "coarsened": 15.0, "antichain_dp": 8.0}
_AT_LEAST = {"ideal_dp": 5.0, **_LATE}
_ORDERS = 8  # that contiguous_dp cuts
# What ideal_dp gets at most of limited seconds, as on wide graphs it would take any time; and where
# they are not limited: a second or less, and the same on every machine.
_IDEAL_SECONDS = 15.0
_IDEALS: dict[str, Any] = {"seconds": None, "memory_bytes": 2**26, "max_steps": 2**27}
# Where the load of devices counts splits come first, where one micro-batch does list schedules. One
# device is second: a list schedule can be several times worse, and it costs one evaluation to know.
_SPLITS = ("ideal_dp", "single_device", "data_parallel", "antichain_dp", "level_balance",
           "balanced_split", "pipedream", "m_topo", "contiguous_dp", "level_pipeline",
           "critical_path_greedy")  # fmt: skip
_LISTS = ("heft", "single_device", "busy_heft", "peft", "critical_path_first", "level_balance",
          "level_pipeline", "m_etf", "m_sct", "critical_path_greedy")  # fmt: skip
# These take part where micro-batches may take turns, and that helps.
_REPLICAS = ("data_parallel", "replicated")
_WALKS = ("critical_path_greedy",)  # it walks on as long as it may
# Of evaluations that are limited these get a share of what is left.
_SHARES = {"single_device": 0.1, "critical_path_greedy": 0.25, "contiguous_dp": 0.5}
_SEARCH_SHARE = 0.75  # of seconds, for searches; of any budget where nothing fits
_ENOUGH = 1000  # evaluations of a search, for each group and other device
_LATENCY_SHARE = 0.8  # of seconds that are limited: for latency it wins most often
# These evaluate several placements: of few evaluations the others of the lists above come first.
_SEVERAL = ("busy_heft", "level_pipeline", "contiguous_dp", "critical_path_greedy")


@dataclass(frozen=True)
class BestOf:
    """Runs ``planners`` one after another and keeps the best: the start of every search.

    Heuristics complement each other: list scheduling fails where memory is tight, contiguous
    splits fail on wide graphs. So by default these are all constructive planners and dynamic
    programs, the cheap ones first: splits for pipelines, list schedules for latency.
    ``contiguous_dp`` cuts several orders. Where the problem's ``max_phases`` lets micro-batches
    take turns, ``data_parallel`` and ``replicated`` take part for pipelines.
    ``stats["winner"]`` names the planner that won, ``stats["values_s"]`` has the value of each
    that was run, ``stats["skipped"]`` says why others were not (an optional package, more sets
    of devices than a program takes, not enough memory, no time), and ``lower_bound_s`` is
    ``placement.problem.lower_bound``.

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
            where several times what the slowest took is left. The comments above say who is first
            and who gets which share.
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
        tries = 3 if problem.memory_may_bind else 1  # see _list_schedule.first_that_fits
        for i, (name, planner) in enumerate(chosen):
            own = options_of(planner)
            nothing_fits = search.best_s == np.inf
            anyway = name in _WALKS or (nothing_fits and name not in _LATE)
            needed_s = max(_PRUDENCE * slowest_s, _AT_LEAST.get(name, 0.0) * quick_s)
            in_time = anyway or search.seconds_left > needed_s
            in_number = "evaluations" in own or search.num_left >= tries or not values
            for_search = nothing_fits and may_search and name not in _QUICK
            # A late beginning, as of compiling, is no reason to answer with what fits nowhere.
            is_owed = name == "single_device" and nothing_fits and self.evaluations is None
            may_run = is_owed or (search.left and in_time and in_number)
            if (for_search and search.used >= 1.0 - _SEARCH_SHARE) or not may_run:
                skipped[name] = "nothing is left of the budget"
                continue
            # The last one gets all, unless a search for something that fits may have to follow.
            is_last = i + 1 == len(chosen) and not nothing_fits
            share = self._share(name, planner, search, is_last)
            planner = self._told(planner, search)
            before, began = search.best_cost, search.seconds
            try:
                with warnings.catch_warnings():  # a program that ended early says so: it may lose
                    warnings.simplefilter("ignore", RuntimeWarning)
                    values[name] = search.run(planner, share, _SHARES.get(name, 1.0)).value_s
            except PlannerError as error:
                skipped[name] = _why_skipped(error)
                continue
            took_s = search.seconds - began
            if "seconds" not in own:
                slowest_s = max(slowest_s, took_s)
            if name in _QUICK:
                quick_s = max(quick_s, took_s)
            winner = name if search.best_cost < before else winner
        if not values:
            raise PlannerError("; ".join(skipped.values()) or "best_of: no planners were named")
        if search.best_s == np.inf and may_search:
            winner = _search_on(search, values, skipped) or winner
        bound = lower_bound(problem)
        return search.solution(bound, winner=winner, values_s=values, skipped=skipped)

    def _share(self, name: str, planner: Planner, search: Search, is_last: bool) -> float:
        """Of what is left of the budget."""
        share = 1.0 if is_last else 0.5
        if name in _WALKS and search.problem.objective is Objective.LATENCY:
            share = max(share, _LATENCY_SHARE)
        if isinstance(planner, IdealDp) and self.seconds is not None:
            share = min(share, _IDEAL_SECONDS / max(search.seconds_left, 1e-9))
        return share

    def _told(self, planner: Planner, search: Search) -> Planner:
        """The planner, with what others found, or with limits that it has not by itself."""
        if isinstance(planner, CriticalPathGreedy) and np.isfinite(search.seconds_left):
            return replace(planner, beat=search.best_cost)
        if isinstance(planner, ContiguousDp):
            return replace(planner, orders=_ORDERS)
        if isinstance(planner, IdealDp) and self.seconds is None:
            return replace(planner, **_IDEALS)
        return planner

    def _and_search(self, problem: Problem) -> Solution:
        """The planners within a quarter of the seconds; then searches, with all that is left."""
        search = Search(problem, self.seconds, self.evaluations)
        stats = search.run(replace(self, search_on=False), 1.0 - _SEARCH_SHARE).stats
        search.bound_s = lower_bound(problem)
        others = {k: stats[k] for k in ("values_s", "skipped")}
        winner = _search_on(search, **others) or stats["winner"]
        return search.solution(search.bound_s, winner=winner, **others)

    def _order(self, problem: Problem) -> list[str]:
        """Who comes first where not all of them may come."""
        loads = problem.objective.is_throughput
        replicas = loads and problem.max_phases > 1
        first: tuple[str, ...] = _SPLITS if loads else _LISTS
        if problem.objective is Objective.PIECEWISE_LATENCY:
            first = ("ideal_dp", "antichain_dp", "contiguous_dp", *_LISTS)
        names = [name for name in self.planners if replicas or name not in _REPLICAS]
        order = sorted(names, key=lambda name: (*first, name).index(name))
        if self.seconds is not None:
            order.sort(key=lambda name: (name in _LATE) - (name in _QUICK))
        if self.evaluations is not None:
            order.sort(key=lambda name: name in _SEVERAL if name in first else 2)
        return order


def _why_skipped(error: PlannerError) -> str:
    """The message; of a planner that lacked memory also as a warning, as more memory may help."""
    if isinstance(error.__cause__, MemoryError):
        warnings.warn(f"best_of goes on without one: {error}", RuntimeWarning, stacklevel=3)
    return str(error)


def _search_on(search: Search, values_s: dict[str, float], skipped: dict[str, str]) -> str:
    """Search from the best, or closest, placement; the name of who found a better one that fits."""
    search.limit(DEFAULT_EVALUATIONS)
    winner = ""
    for name, share in (("macro_search", 0.7), ("local_search", 1.0)):
        if search.left and search.best is not None:
            placement, before = search.best[search.problem.graph.group], search.best_cost
            moves = search.problem.graph.num_groups * (search.problem.num_devices - 1)
            most = _ENOUGH * moves if np.isfinite(search.best_s) else None
            start = {"start": lambda _, p=placement: Solution(p, np.inf)}
            searcher = load(name, **start, evaluations=most)
            try:
                values_s[name] = search.run(searcher, share, share).value_s
            except PlannerError as error:
                skipped[name] = _why_skipped(error)
            winner = name if search.best_cost < min(before, INFEASIBLE) else winner
    return winner
