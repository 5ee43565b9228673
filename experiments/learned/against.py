"""The planner ``policy`` against all constructive methods and dynamic programs, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.budgets import AGAINST, BASELINES, CAPTURED
from experiments.learned import problems as families
from experiments.learned.cells import (
    Cell,
    Task,
    best_known,
    enforced,
    gain,
    least,
    policy_file,
    run_tasks,
)
from experiments.learned.study import learned_study, wants
from experiments.study import Options
from experiments.tables import DASH, Column, geometric, groups, table
from placement import workloads
from placement.planners import load
from placement.problem import Problem

LEARNED, UNHURRIED = "policy", "policy, no clock"
TIES = 1 + 1e-9


def problems(options: Options) -> families.Problems:
    """Shipped workloads first: they are measured once, before anything runs."""
    names = [n for n in workloads.names() if wants(options, f"captured/{n}")]
    if options.quick:
        names = [n for n in names if n in CAPTURED or options.patterns]
    chosen = families.captured(names, options.repeats)
    if any(wants(options, n) for n in ("throughput/", "latency/", "pipedream/", "moirai/")):
        chosen |= families.public(options.data)
    return chosen


def tasks(options: Options, name: str, problem: Problem) -> Iterator[Task]:
    """Every baseline once with the whole budget, the learned planner with every seed."""
    from agents.planner import PolicyPlanner

    group = name.partition("/")[0]
    for label in BASELINES:
        yield Task(group, label, load(label), seconds=options.seconds)
    file = policy_file(options.policy, problem)
    # Values are compared as predicted here, whatever a measured profile's error is.
    policy = PolicyPlanner(file, mode="guided_search", margin=0.0)
    for seed in range(options.seeds):
        for label, seconds in ((LEARNED, options.seconds), (UNHURRIED, None)):
            yield Task(group, label, policy, seed, seconds)


def gains(cells: Sequence[Cell], planner: str, objective: str = "") -> dict[str, list[float]]:
    """The planner's values over the least of ``BASELINES``, by problem (of this objective)."""
    some = [c for c in cells if not objective or c.objective == objective]
    return gain(some, planner, BASELINES)


def worse(cells: Sequence[Cell], planner: str) -> list[str]:
    """Problems on which a seed was worse than one of ``BASELINES``."""
    return [n for n, v in gains(cells, planner).items() if max(v) > TIES]


def parts(cells: Sequence[Cell], options: Options) -> dict[str, Any]:
    objectives = (*sorted({c.objective for c in cells}), "")
    both = [(p, o, gains(cells, p, o)) for p in (LEARNED, UNHURRIED) for o in objectives]
    summary = table(
        both,
        Column("planner, objective", lambda x: f"{x[0]}, {x[1] or 'all'}"),
        Column("problems", lambda x: len(x[2])),
        Column("against the best of all (95 %)", lambda x: geometric(x[2]).percent()),
        Column("ever worse on", lambda x: sum(max(v) > TIES for v in x[2].values())),
        Column("worst run", lambda x: f"{100 * (max(map(max, x[2].values())) - 1):+.2f} %"),
        Column("better by 1 % on", lambda x: sum(float(np.mean(v)) < 0.99 for v in x[2].values())),
    )
    runs = groups(cells, "problem")
    best, best_s = least(cells, BASELINES), best_known(cells)

    def winner(name: str) -> str:
        baselines = (c for c in runs[name] if c.planner in BASELINES)
        return next((c.planner for c in baselines if c.value_s == best(name, None)), DASH)

    def against(planner: str, name: str) -> str:
        return geometric({name: gains(runs[name], planner)[name]}).percent()

    each = table(
        runs,
        Column("problem", str),
        Column("objective", lambda n: runs[n][0].objective),
        Column("operators", lambda n: runs[n][0].operators),
        Column("devices", lambda n: runs[n][0].devices),
        Column("best baseline", winner),
        Column("its ms", lambda n: best(n, None), 4, 1e3),
        Column(f"{LEARNED} (95 %)", partial(against, LEARNED)),
        Column(UNHURRIED, partial(against, UNHURRIED)),
        Column("best ms", best_s.get, 4, 1e3),
    )
    return {
        "count": len(BASELINES),
        "baselines": ", ".join(BASELINES),
        "enforced": enforced(cells),
        "table": summary,
        "problems": each,
    }


STUDY = learned_study(
    "against", AGAINST, problems, partial(run_tasks, tasks), row=Cell, parts=parts
)
