"""Topological levels, balanced over teams of devices that form a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.graph import levels
from placement.planners import Among
from placement.planners.level_balance import balance
from placement.problem import Problem, Solution
from placement.search.evaluation import Choice, Search
from placement.search.list_schedule import first_that_fits

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LevelPipeline:
    """Level balance and pipeline between layers (Wang et al., J. FCST 18(1), 2024).

    Each topological level is balanced over devices as in ``level_balance``; consecutive levels
    form the stages of a pipeline, so that one micro-batch is in the later levels while the next
    is in the earlier ones. Levels are grouped so that the slowest stage is as fast as it can
    be. With ``S`` stages the devices, in their order, form ``S`` teams of about equal size::

        S = 1: every level over d0 d1 d2 d3
        S = 2: levels 0..a over d0 d1 | levels a+1..b over d2 d3
        S = 4: levels 0..a on d0 | a+1..b on d1 | b+1..c on d2 | c+1..e on d3

    All ``S`` from 1 to the number of devices are predicted and the best is the answer.

    Deviations: those of ``level_balance``; the paper does not say how levels become stages,
    here it is the least slowest stage, where a level takes its longest group or its seconds
    over the speed of the team, whichever is more. The paper's pipeline between data loading
    and training is the executor's.

    Attributes:
        evaluations: budget; None is no limit.
    """

    among = Among(quick=True, loads=9, calls=6, several=True)

    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, evaluations=self.evaluations)
        level = levels(problem.graph.edges, problem.num_ops)
        teams = [_teams(problem, level, count + 1) for count in range(problem.num_devices)]

        def plan(activations: int) -> tuple[Choice, None]:
            return np.array([balance(problem, level, activations, team) for team in teams]), None

        first_that_fits(search, plan)
        return search.solution(num_levels=int(level.max()) + 1)


def _teams(problem: Problem, level: NDArray[np.int32], num_stages: int) -> NDArray[np.bool_]:
    """bool ``[L, D]``: the devices of each level."""
    teams = np.zeros((num_stages, problem.num_devices), bool)
    for stage, members in enumerate(np.array_split(np.arange(problem.num_devices), num_stages)):
        teams[stage, members] = True
    return teams[stages(np.stack([level_s(problem, level, team) for team in teams]))]


def level_s(problem: Problem, level: NDArray[np.int32], team: NDArray[np.bool_]) -> Floats:
    """float64 ``[L]`` least seconds of each level on the devices bool ``[D]``.

    What none of them can run counts nothing: it goes elsewhere.
    """
    g = problem.graph
    at = g.per_group(level, np.minimum, int(level.max()))
    seconds = problem.group_compute_s[:, team]
    able = np.isfinite(seconds).any(axis=1)
    fastest = np.where(able, seconds.min(axis=1), 0.0)
    with np.errstate(divide="ignore"):
        speed = np.where(able, (1.0 / seconds).sum(axis=1), 1.0)  # groups per second
    together = np.where(able & (fastest > 0), 1.0 / speed, 0.0)
    total = np.bincount(at, weights=together, minlength=int(level.max()) + 1)
    longest = np.zeros(len(total))
    np.maximum.at(longest, at, fastest)
    return np.maximum(total, longest)


def stages(seconds: Floats) -> NDArray[np.int32]:
    """int32 ``[L]``: the stage of each level, for seconds ``[S, L]`` of each level in each stage.

    Stages are consecutive and in order, and the slowest one is as fast as it can be; a stage
    may be empty.
    """
    num_stages, num_levels = seconds.shape
    upto = np.concatenate([np.zeros((num_stages, 1)), seconds.cumsum(axis=1)], axis=1)
    best = upto[0]  # [L + 1] slowest stage of the first levels; never falls
    begins = []
    for stage in range(1, num_stages):
        # The later the last stage begins, the slower those before and the faster the last one:
        # the best beginning is where they meet, or just before.
        ahead = np.searchsorted(best + upto[stage], upto[stage])
        before = np.maximum(ahead - 1, 0)
        last_s = upto[stage] - upto[stage][before]
        begins.append(np.where(best[ahead] < last_s, ahead, before))
        best = np.minimum(best[ahead], last_s)
    stage_of, end = np.zeros(num_levels, np.int32), num_levels
    for stage in range(num_stages - 1, 0, -1):
        begin = int(begins[stage - 1][end])
        stage_of[begin:end], end = stage, begin
    return stage_of
