"""Who should choose the moves: a policy, an untrained one, a rule, chance; or another search?"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import _study
from experiments.budgets import Guided
from experiments.learned import problems as made
from experiments.learned.cells import (
    Cell,
    Cells,
    best_known,
    enforced,
    geometric,
    least,
    policy_file,
    ratios,
    to_known,
    with_options,
)
from placement.planners import load
from placement.planners.best_of import BestOf
from placement.problem import Planner, Problem

POLICY, FROZEN, HAND, UNIFORM = "policy", "frozen", "hand", "uniform"
ALONE = "policy, placements only"  # in the list scheduler's order
ANNEALING = {
    "annealing": 0.02,
    "annealing, colder": 0.001,
    "annealing, warmer": 0.2,
}
FIELD = ("heft", "m_etf", "contiguous_dp", "local_search", *ANNEALING)  # what is to be beaten
DP = "ideal_dp"
EXACT = (DP, "antichain_dp", "contiguous_dp")  # dynamic programs
LATENCY, LOAD = "latency", "load"
START = BestOf(("single_device", "round_robin", "heft", "contiguous_dp"))


def problems(options: Namespace) -> made.Problems:
    """Large latency graphs, and throughput operator graphs."""
    found = made.large(options.budget.graphs)
    if options.wants("throughput/"):
        found |= {
            n: p
            for n, p in made.family("operator graphs", options.data).items()
            if p.objective == "max_load"
        }
    return found


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
    chosen: dict[str, Planner] = {
        name: PolicyPlanner(path, mode) for name, path in zip(policies, files, strict=True)
    }
    chosen[FROZEN] = PolicyPlanner(replace(first, net=untrained_net(first.net.config, kind)), mode)
    # Rules see as many moves at a step as the policy does.
    chosen[HAND] = PolicyPlanner(mode=mode, chooser="hand", width=first.width)
    chosen[UNIFORM] = PolicyPlanner(mode=mode, chooser="uniform", width=first.width)
    if kind != mode:
        chosen[ALONE] = PolicyPlanner(mode=mode, order=False)
    for name in ("macro_search", "local_search"):
        chosen[name] = load(name)
    for name, accept in ANNEALING.items():
        chosen[name] = load("simulated_annealing", accept=accept)
    return chosen


def run(options: Namespace, chosen: made.Problems) -> list[Cell]:
    """Groups ``latency seconds``, ``evaluations`` and ``few evaluations``; two of ``load``."""
    budget: Guided = options.budget
    cells, done = Cells(options.work), []
    for name, problem in chosen.items():
        field = planners(options.policies, problem)
        kind = LOAD if problem.objective == "max_load" else LATENCY
        seconds = budget.load_seconds if kind == LOAD else budget.seconds
        evaluations = budget.load_evaluations if kind == LOAD else budget.evaluations
        limits = {f"{kind} evaluations": evaluations}
        if kind == LATENCY:
            limits[f"{kind} few evaluations"] = budget.few
        for label in dict.fromkeys(("heft", "m_etf", *EXACT)):
            if kind == LATENCY and label not in FIELD:
                continue
            for group in (f"{kind} seconds", *limits):
                done.append(cells.run(group, name, problem, label, load(label), None, seconds))
        for seed in range(budget.seeds):
            for label, planner in field.items():
                done.append(
                    cells.run(f"{kind} seconds", name, problem, label, planner, seed, seconds)
                )
                # Without a clock the start costs no more than this: the same for everyone.
                same = with_options(planner, start=START, baseline=START)
                for group, most in limits.items():
                    done.append(
                        cells.run(group, name, problem, label, same, seed, evaluations=most)
                    )
    return done


def of_group(cells: Sequence[Cell], group: str) -> list[Cell]:
    """The cells of one."""
    return [c for c in cells if c.group == group]


def gain(cells: Sequence[Cell], planner: str, others: Sequence[str]) -> dict[str, list[float]]:
    """The planner's values over the least of the others with the same seed, by problem."""
    return ratios(cells, planner, least(cells, others))


def report(cells: Sequence[Cell]) -> str:
    """A table per group."""
    parts = []
    for group in dict.fromkeys(c.group for c in cells):
        mine = of_group(cells, group)
        exact = [c for c in EXACT if any(x.planner == c for x in mine)]
        rows = []
        for planner in dict.fromkeys(c.planner for c in mine):
            others = [c for c in FIELD if c != planner]
            runs = [c for c in mine if c.planner == planner]
            counted = [c.used_evaluations for c in runs if c.used_evaluations]
            rows.append(
                [
                    planner,
                    geometric(to_known(mine, planner)).ratio(),
                    geometric(gain(mine, planner, others)).percent(2),
                    geometric(gain(mine, planner, exact)).percent(1),
                    geometric(gain(mine, planner, [HAND])).percent(2),
                    geometric(gain(mine, planner, ["macro_search"])).percent(2),
                    f"{np.median(counted):.0f}" if counted else "–",
                    f"{np.median([c.used_s for c in runs]):.2f}",
                ]
            )
        rows.sort(key=lambda r: float(r[1].split()[0]))
        table = _study.to_table(
            ["chooser or search", "over best known (95 %)", "against the field",
             "against dynamic programs", "against the hand score", "against macro_search",
             "evaluations", "seconds"],
            rows,
        )  # fmt: skip
        sizes = sorted({c.operators for c in mine})
        parts.append(
            f"## {group.partition(' ')[0].capitalize()}: equal {group.partition(' ')[2]}\n\n"
            f"{len({c.problem for c in mine})} graphs of {sizes[0]} to {sizes[-1]} operators, "
            f"{len({c.seed for c in mine} - {None})} seeds.\n\n{table}"
        )
    return f"""# Who should choose the moves

`policy` is the planner as it ships: the trained chooser for latency, and for load, where none is
released, the hand-written score. `frozen` is the network untrained (it begins near that score),
`hand` the score alone (for `max_load` softmax of minus the exact delta over the temperature),
`uniform` chance; the others are searches of their own. The field is
{", ".join(FIELD[:-2])} (also {FIELD[-2].split()[-1]} and {FIELD[-1].split()[-1]}), the best of
them with the same seed: an oracle that no single one of them is.
With a clock everyone begins as shipped, on that clock; where evaluations are limited all begin at
the best of {", ".join(START.planners)}.
Negative is better; intervals over graphs and seeds. {enforced(cells)}

{chr(10).join(parts)}"""


def curves(cells: Sequence[Cell], points: int = 40) -> dict[str, dict[str, list[float]]]:
    """Best so far over the best known, by group and planner that draws.

    Geometric means over problems and seeds at ``at``: ``points`` seconds or evaluations, the last
    the budget.
    """
    made_curves: dict[str, dict[str, list[float]]] = {}
    for group in dict.fromkeys(c.group for c in cells):
        mine = of_group(cells, group)
        known = best_known(mine)
        by_seconds = group.endswith("seconds")
        limit = max((c.budget_s if by_seconds else c.budget_evaluations) or 0 for c in mine)
        grid = np.geomspace(limit / 1000, limit, points)
        lines = {"at": [float(f"{at:.4g}") for at in grid]}
        for planner in dict.fromkeys(c.planner for c in mine if c.seed is not None):
            rows = []
            for cell in (c for c in mine if c.planner == planner and c.curve):
                when = np.array([p[0] if by_seconds else p[1] for p in cell.curve])
                value = np.minimum.accumulate([p[2] for p in cell.curve])
                at = np.clip(np.searchsorted(when, grid, side="right") - 1, 0, None)
                rows.append(np.log(value[at] / known[cell.problem]))
            if rows:
                lines[planner] = [float(f"{x:.5f}") for x in np.exp(np.mean(rows, axis=0))]
        made_curves[group] = lines
    return made_curves
