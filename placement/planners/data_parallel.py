"""The whole model on every device, and micro-batches that take turns: data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.objective import Objective
from placement.planners import Among, PlannerError
from placement.problem import ROUNDING, Problem, Solution
from placement.search.evaluation import INFEASIBLE, Search, single_devices

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class DataParallel:
    """Every device runs the whole model, and has turns by its speed.

    With ``K`` phases, at most ``max_phases`` of the problem, turns are dealt one after another,
    each to the device that would end it first: one of a third of the speed takes every fourth
    micro-batch. No other deal of ``K`` turns has a smaller largest load. The fastest device, the
    two fastest, and so on are tried, each with the fewest phases whose period is at most 0.5 %
    above the best; the simulator decides. Devices that cannot run every operator, or cannot hold
    the model and its activations, take no part. ``stats["turns"]`` has the turns of each device.

    Attributes:
        seconds, evaluations: budget; None is no limit.
    """

    among = Among(loads=2, turns=True)

    seconds: float | None = None
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        """Plan ``problem``.

        Raises:
            PlannerError: it allows one phase only, or its objective is a latency.
        """
        check_turns("data_parallel", problem)
        search = Search(problem, self.seconds, self.evaluations)
        able = np.flatnonzero(np.isfinite(problem.compute_s).all(axis=0))
        single = single_devices(problem)[able if len(able) else slice(None)]
        seconds = search.costs(single)
        if not len(able):
            return search.solution()
        # Beside devices that work too, which in turns all of them do.
        able = able[: len(seconds)]
        alone, beside = (x[:, able].sum(axis=0) for x in (problem.compute_s, problem.loaded_s))
        if problem.objective is Objective.ENERGY:  # turns are dealt by time, whatever it costs
            seconds = np.where(seconds < INFEASIBLE, beside, seconds)
        else:
            seconds = seconds * np.where(alone > 0, beside / np.where(alone > 0, alone, 1.0), 1.0)
        order = np.argsort(seconds, kind="stable")
        slack = 0.005  # for fewer phases a period may be longer by this share
        for count in range(2, int((seconds < INFEASIBLE).sum()) + 1):
            if not search.left:
                break
            turn = deal(seconds[order[:count]], problem.max_phases, slack)
            if len(turn) > 1:
                search.consider(single[order[turn]], 1)
        assert search.best is not None, "single devices were scored"
        used, turns = np.unique(np.atleast_2d(search.best)[:, 0], return_counts=True)
        names = problem.cluster.device_names
        by_name = {names[d]: int(n) for d, n in zip(used, turns, strict=True)}
        return search.solution(turns=by_name)


def check_turns(planner: str, problem: Problem) -> None:
    """Raises: PlannerError, the problem allows one phase only, or its objective is a latency."""
    if not problem.objective.is_throughput:
        raise PlannerError(
            f"{planner}: micro-batches that take turns end more often, not sooner: "
            f"the objective {problem.objective} is of one alone; use period, energy or max_load"
        )
    if problem.max_phases == 1:
        raise PlannerError(
            f"{planner}: the problem allows one phase, in which all micro-batches run alike: "
            "allow more, --max-phases 16 or replace(problem, max_phases=16)"
        )


def deal(seconds: Floats, most: int, slack: float = 0.0) -> Ints:
    """int32 ``[K]``: whose turn it is, each device's ``seconds [D]`` of one turn being known.

    ``K`` is the least, up to ``most``, whose period is at most ``slack`` above that of the best.
    """
    turns, order, period = np.zeros(len(seconds)), [], []
    for k in range(1, most + 1):
        order.append(int(((turns + 1) * seconds).argmin()))
        turns[order[-1]] += 1
        period.append(float((turns * seconds).max()) / k)
    good = np.array(period) <= min(period) * (1 + slack + ROUNDING)
    return np.array(order[: int(good.argmax()) + 1], np.int32)
