"""The learned planner against every constructive method and dynamic program, problem by problem."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from experiments import _study
from experiments._study import number
from experiments.budgets import BASELINES, CAPTURED, Against
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
)
from placement import workloads
from placement.planners import load

LEARNED, UNHURRIED = "policy", "policy, no clock"
TIES = 1 + 1e-9


def problems(options: Namespace) -> made.Problems:
    """Shipped workloads first: they are measured once, before anything runs."""
    budget: Against = options.budget
    names = [n for n in workloads.names() if options.wants(f"captured/{n}")]
    if options.quick:
        names = [n for n in names if n in CAPTURED or options.patterns]
    found = made.captured(names, budget.repeats)
    if any(options.wants(n) for n in ("throughput/", "latency/", "pipedream/", "moirai/")):
        found |= made.public(options.data)
    return found


def run(options: Namespace, chosen: made.Problems) -> list[Cell]:
    """Every baseline once with the whole budget, the learned planner with every seed."""
    from agents.planner import PolicyPlanner

    budget: Against = options.budget
    cells = Cells(options.work)
    done = []
    for name, problem in chosen.items():
        group = name.partition("/")[0]
        for label in BASELINES:
            planner = load(label)
            done.append(cells.run(group, name, problem, label, planner, seconds=budget.seconds))
        file = policy_file(options.policy, problem)
        # Values are compared as predicted here, whatever a measured profile's error is.
        policy = PolicyPlanner(file, mode="guided_search", margin=0.0)
        for seed in range(budget.seeds):
            for label, seconds in ((LEARNED, budget.seconds), (UNHURRIED, None)):
                done.append(cells.run(group, name, problem, label, policy, seed, seconds))
    return done


def gains(cells: Sequence[Cell], planner: str, objective: str = "") -> dict[str, list[float]]:
    """The planner's values over the least of ``BASELINES``, by problem (of this objective)."""
    some = [c for c in cells if not objective or c.objective == objective]
    return ratios(some, planner, least(some, BASELINES))


def worse(cells: Sequence[Cell], planner: str) -> list[str]:
    """Problems on which a seed was worse than one of ``BASELINES``."""
    return [n for n, v in gains(cells, planner).items() if max(v) > TIES]


def report(cells: Sequence[Cell]) -> str:
    """Two tables: by objective, and by problem."""
    objectives = sorted({c.objective for c in cells})
    rows = []
    for planner in (LEARNED, UNHURRIED):
        for objective in (*objectives, ""):
            found = gains(cells, planner, objective)
            rows.append(
                [
                    f"{planner}, {objective or 'all'}",
                    str(len(found)),
                    geometric(found).percent(),
                    str(sum(max(v) > TIES for v in found.values())),
                    f"{100 * (max(max(v) for v in found.values()) - 1):+.2f} %",
                    str(sum(float(np.mean(v)) < 0.99 for v in found.values())),
                ]
            )
    table = _study.to_table(
        ["planner, objective", "problems", "against the best of all (95 %)", "ever worse on",
         "worst run", "better by 1 % on"],
        rows,
    )  # fmt: skip
    best = least(cells, BASELINES)
    known = best_known(cells)
    each = []
    for name in dict.fromkeys(c.problem for c in cells):
        mine = [c for c in cells if c.problem == name]
        value = best(name, None)
        winner = next(
            (c.planner for c in mine if c.planner in BASELINES and c.value_s == value), "–"
        )
        each.append(
            [
                name,
                mine[0].objective,
                str(mine[0].operators),
                str(mine[0].devices),
                winner,
                number(value, 4, 1e3),
                *(geometric({name: gains(mine, p)[name]}).percent() for p in (LEARNED, UNHURRIED)),
                number(known.get(name), 4, 1e3),
            ]
        )
    problems_table = _study.to_table(
        ["problem", "objective", "operators", "devices", "best baseline", "its ms",
         f"{LEARNED} (95 %)", UNHURRIED, "best ms"],
        each,
    )  # fmt: skip
    return f"""# The learned planner against all constructive methods and dynamic programs

Values over the least of {len(BASELINES)} baselines ({", ".join(BASELINES)}): negative is better,
geometric mean, 95 % interval over problems and seeds. Each of them and `{LEARNED}`, its start
included, had the same processor seconds; `{UNHURRIED}` is the planner as shipped, whose start may
take as long as it needs. {enforced(cells)}

{table}
## Problems

{problems_table}"""
