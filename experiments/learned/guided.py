"""Who should choose the moves: a policy, an untrained one, a rule, chance; or another search?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.budgets import GUIDED
from experiments.learned import problems as families
from experiments.learned.cells import (
    Cell,
    Task,
    enforced,
    gain,
    policy_file,
    run_tasks,
    to_known,
)
from experiments.learned.study import learned_study, policies, wants
from experiments.study import Options
from experiments.tables import Column, geometric, groups, table
from placement.planners import load
from placement.planners.best_of import BestOf
from placement.problem import Planner, Problem
from placement.search.budget import options_of

POLICY, FROZEN, HAND, UNIFORM = "policy", "frozen", "hand", "uniform"
ALONE = "policy, placements only"  # in the list scheduler's order
ANNEALING = {"annealing": 0.02, "annealing, colder": 0.001, "annealing, warmer": 0.2}
FIELD = ("heft", "m_etf", "contiguous_dp", "local_search", *ANNEALING)  # what is to be beaten
DP = "ideal_dp"
EXACT = (DP, "antichain_dp", "contiguous_dp")  # dynamic programs
LATENCY, LOAD = "latency", "load"
START = BestOf(("single_device", "round_robin", "heft", "contiguous_dp"))


def problems(options: Options) -> families.Problems:
    chosen = families.large(options.graphs)
    if wants(options, "throughput/"):
        files = families.family("operator graphs", options.data)
        chosen |= {n: p for n, p in files.items() if p.objective == "max_load"}
    return chosen


def planners(policies: Mapping[str, str | None], problem: Problem) -> dict[str, Planner]:
    """All that draw, by label; the first of ``policies`` is the one that is ablated."""
    from agents.planner import PolicyPlanner, kind_of, released
    from agents.trained import TrainedPolicy, untrained_net

    mode: Any = "guided_search"
    kind = kind_of(problem)
    files = [policy_file(path, problem) for path in policies.values()]
    ships = files[0] or released(kind, problem.objective)
    new = TrainedPolicy(untrained_net(None, kind))
    first = TrainedPolicy.load(ships) if Path(ships).is_file() else new
    field: dict[str, Planner] = {
        name: PolicyPlanner(path, mode) for name, path in zip(policies, files, strict=True)
    }
    field[FROZEN] = PolicyPlanner(replace(first, net=untrained_net(first.net.config, kind)), mode)
    # Rules see as many moves at a step as the policy does.
    field[HAND] = PolicyPlanner(mode=mode, chooser="hand", width=first.width)
    field[UNIFORM] = PolicyPlanner(mode=mode, chooser="uniform", width=first.width)
    if kind != mode:
        field[ALONE] = PolicyPlanner(mode=mode, order=False)
    for name in ("macro_search", "local_search"):
        field[name] = load(name)
    for name, accept in ANNEALING.items():
        field[name] = load("simulated_annealing", accept=accept)
    return field


def from_start(planner: Planner) -> Planner:
    """Without a clock the start costs no more than ``START``: the same for everyone."""
    own = {"start", "baseline"} & options_of(planner)
    return replace(planner, **dict.fromkeys(own, START))  # type: ignore[type-var]


def tasks(options: Options, name: str, problem: Problem) -> Iterator[Task]:
    """Groups ``latency seconds``, ``evaluations`` and ``few evaluations``; two of ``load``."""
    kind = LOAD if problem.objective == "max_load" else LATENCY
    seconds = options.load_seconds if kind == LOAD else options.seconds
    evaluations = options.load_evaluations if kind == LOAD else options.evaluations
    limits = {f"{kind} evaluations": evaluations}
    if kind == LATENCY:
        limits[f"{kind} few evaluations"] = options.few
    for label in dict.fromkeys(("heft", "m_etf", *EXACT)):
        if kind == LATENCY and label not in FIELD:
            continue
        for group in (f"{kind} seconds", *limits):
            yield Task(group, label, load(label), seconds=seconds)
    field = planners(policies(options), problem)
    for seed in range(options.seeds):
        for label, planner in field.items():
            yield Task(f"{kind} seconds", label, planner, seed, seconds)
            for group, most in limits.items():
                yield Task(group, label, from_start(planner), seed, evaluations=most)


def of_group(cells: Sequence[Cell], group: str) -> list[Cell]:
    return [c for c in cells if c.group == group]


def of_budget(cells: Sequence[Cell]) -> str:
    runs = groups(cells, "planner")
    exact = [c for c in EXACT if c in runs]
    over = {planner: geometric(to_known(cells, planner)).ratio() for planner in runs}

    def against(others: Sequence[str], digits: int, planner: str) -> str:
        return geometric(gain(cells, planner, others)).percent(digits)

    def evaluations(planner: str) -> float | None:
        counted = [c.used_evaluations for c in runs[planner] if c.used_evaluations]
        return float(np.median(counted)) if counted else None

    return table(
        sorted(runs, key=lambda k: float(over[k].split()[0])),
        Column("chooser or search", str),
        Column("over best known (95 %)", over.get),
        Column("against the field", lambda k: against([c for c in FIELD if c != k], 2, k)),
        Column("against dynamic programs", partial(against, exact, 1)),
        Column("against the hand score", partial(against, [HAND], 2)),
        Column("against macro_search", partial(against, ["macro_search"], 2)),
        Column("evaluations", evaluations, 0),
        Column("seconds", lambda k: float(np.median([c.used_s for c in runs[k]])), 2),
    )


def parts(cells: Sequence[Cell], options: Options) -> dict[str, Any]:
    tables = []
    for group, mine in groups(cells, "group").items():
        sizes = sorted({c.operators for c in mine})
        kind, _, limit = group.partition(" ")
        tables.append(
            f"## {kind.capitalize()}: equal {limit}\n\n"
            f"{len({c.problem for c in mine})} graphs of {sizes[0]} to {sizes[-1]} operators, "
            f"{len({c.seed for c in mine} - {None})} seeds.\n\n{of_budget(mine)}"
        )
    return {"enforced": enforced(cells), "groups": "\n".join(tables)}


STUDY = learned_study(
    "guided",
    GUIDED,
    problems,
    partial(run_tasks, tasks),
    row=Cell,
    parts=parts,
)
