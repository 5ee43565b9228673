"""The best answer of several planners."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, is_dataclass, replace

from placement.planners import PlannerError, load
from placement.planners._search import Search
from placement.planners.ideal_dp import IdealDp
from placement.problem import Problem, Solution, lower_bounds

# A planner without a clock is begun only if this many times what the slowest took is left.
_PRUDENCE = 3.0
# It walks on as long as it may: of evaluations that are limited it gets this share.
_WALKS = {"critical_path_greedy": 0.25}
# These evaluate one placement per device, or several: of few evaluations the others come first.
_SEVERAL = ("single_device", "level_pipeline")


@dataclass(frozen=True)
class BestOf:
    """Runs ``planners`` one after another and keeps the best: the start of every search.

    Heuristics complement each other: list scheduling fails where memory is tight, contiguous
    splits fail on wide graphs. So by default these are all constructive planners and dynamic
    programs, the cheap ones first: for 2,500 operators the last three take most of the time.
    ``stats["winner"]`` names the planner that won, ``stats["values_s"]`` has the value of each
    that was run, ``stats["skipped"]`` says why others were not (an optional package, more sets
    of devices than a program takes, no time), and ``lower_bound_s`` is
    ``placement.problem.lower_bounds``.

    Attributes:
        planners: names, as ``placement.planners.load`` takes them.
        ideal_seconds: most that ``ideal_dp`` gets: on wide graphs it would take any time. The
            others need about 20 s together for 2,500 operators and far less for hundreds.
        seconds, evaluations: budget of all together; None is no limit. A planner with a clock
            gets half of the seconds that are left, the last one all; one without is begun only
            where several times what the slowest such one took is left. Of limited evaluations
            ``critical_path_greedy`` gets a quarter of those left, and planners that evaluate one
            placement run before those that evaluate several.
    """

    planners: tuple[str, ...] = (
        "single_device",
        "heft",
        "contiguous_dp",
        "peft",
        "critical_path_first",
        "level_balance",
        "round_robin",
        "balanced_split",
        "m_topo",
        "pipedream",
        "metis",
        "m_etf",
        "time_slices",
        "m_sct",
        "coarsened",
        "level_pipeline",
        "antichain_dp",
        "ideal_dp",
        "critical_path_greedy",
    )
    ideal_seconds: float = 15.0
    seconds: float | None = None
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        """Plan ``problem``.

        Raises:
            PlannerError: no such planner, none that can be run, or a budget that is not positive.
        """
        search = Search(problem, self.seconds, self.evaluations)
        last = _SEVERAL if self.evaluations is not None else ()
        chosen = [(name, load(name)) for name in sorted(self.planners, key=last.__contains__)]
        values: dict[str, float] = {}
        skipped: dict[str, str] = {}
        winner, slowest_s = "", 0.0
        tries = 3 if problem.memory_may_bind else 1  # see _list_schedule.first_that_fits
        for i, (name, planner) in enumerate(chosen):
            own: set[str] = {f.name for f in fields(planner)} if is_dataclass(planner) else set()
            in_time = "seconds" in own or search.seconds_left > _PRUDENCE * slowest_s
            in_number = "evaluations" in own or search.num_left >= tries or not values
            if not (search.left and in_time and in_number):
                skipped[name] = "nothing is left of the budget"
                continue
            share = 1.0 if i + 1 == len(chosen) else 0.5
            if isinstance(planner, IdealDp):
                planner = replace(planner, seconds=self.ideal_seconds)
                share = min(share, self.ideal_seconds / max(search.seconds_left, 1e-9))
            before, began = search.best_cost, search.seconds
            try:
                with warnings.catch_warnings():  # a program that ended early says so: it may lose
                    warnings.simplefilter("ignore", RuntimeWarning)
                    values[name] = search.run(planner, share, _WALKS.get(name, 1.0)).value_s
            except PlannerError as error:
                skipped[name] = str(error)
                continue
            if "seconds" not in own:
                slowest_s = max(slowest_s, search.seconds - began)
            winner = name if search.best_cost < before else winner
        if not values:
            raise PlannerError("; ".join(skipped.values()))
        bound = lower_bounds(problem)[problem.objective]
        return search.solution(bound, winner=winner, values_s=values, skipped=skipped)
