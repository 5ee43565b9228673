"""DOPPLER's four graphs on four devices, simulated as it does, at equal budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments import study
from experiments.budgets import DOPPLER
from experiments.learned import problems as families
from experiments.learned.cells import (
    Cell,
    Task,
    best_known,
    enforced,
    gain,
    ratios,
    run_tasks,
)
from experiments.learned.guided import ANNEALING, HAND, POLICY, from_start, planners
from experiments.learned.study import learned_study, policies
from experiments.study import Options
from experiments.tables import DASH, Column, geometric, groups, table
from placement import importers
from placement.planners import load
from placement.problem import Problem

GRAPHS = (
    "chain_mm_112nodes",
    "ffnn_192nodes",
    "transformer_block_215nodes",
    "full_transformer_layer_261nodes",
)
RULES = ("single_device", "heft", "peft", "m_etf", "critical_path_first", "contiguous_dp")
CLIMBING, ANNEALED = "hill climbing from random", "annealing from random"
SEARCHES = ("macro_search", "local_search", *ANNEALING, CLIMBING, ANNEALED)
# What others had reached before these runs, in the unit of the tables, in the order of ``GRAPHS``.
REACHED = {
    "hill climbing, 4000 evaluations": (1300.0, 69.4, 179.8, 155.7),
    "annealing, 20000 evaluations": (1200.1, 62.7, 167.2, 137.7),
}


def problems(options: Options) -> families.Problems:
    """The four graphs; links carry any number of tensors at once, ready operators run in order."""
    return {
        name: importers.load(path)
        for name in GRAPHS
        for path in study.public(options.data, f"doppler/{name}.txt").values()
    }


def tasks(options: Options, name: str, problem: Problem) -> Iterator[Task]:
    """Everyone with few evaluations, with many, and with the same processor seconds."""
    limits = {
        f"{options.evaluations} evaluations": (None, options.evaluations),
        f"{options.many} evaluations": (None, options.many),
        f"{options.seconds:g} seconds": (options.seconds, None),
    }
    field = {
        label: from_start(planner)
        for label, planner in planners(policies(options), problem).items()
    } | {
        CLIMBING: load("local_search", start="random"),
        ANNEALED: load("simulated_annealing", start="random"),
    }
    for label in RULES:
        yield Task("rules", label, load(label))
    for group, limit in limits.items():
        for seed in range(options.seeds):
            for label, planner in field.items():
                yield Task(group, label, planner, seed, *limit)
    for label in ("macro_search", HAND):
        yield Task("known", f"{label}, long", field[label], 0, None, options.known)


def parts(cells: Sequence[Cell], options: Options) -> dict[str, Any]:
    best_s = best_known(cells)
    names = [n for n in GRAPHS if n in best_s]
    runs = groups(cells, "group")
    limits = [group for group in runs if group not in ("rules", "known")]
    tables = [
        f"## {group.capitalize()}\n\n{of_budget(group, runs[group] + runs['rules'], best_s)}"
        for group in limits
    ]
    ours_s = best_known([c for c in cells if c.planner == POLICY])
    operators = {c.problem: c.operators for c in cells}
    best = table(
        names,
        Column("graph", str),
        Column("operators", operators.get),
        Column("best known", best_s.get, 2),
        Column("policy, all budgets", ours_s.get, 2),
    )
    return {
        "enforced": enforced([c for c in cells if c.group in limits]),
        "groups": "\n".join(tables),
        "table": best,
    }


def of_budget(group: str, cells: Sequence[Cell], best_s: dict[str, float]) -> str:
    """The table of a budget, the best first; what others had reached last."""
    runs = groups(cells, "planner")
    names = [n for n in GRAPHS if n in best_s]
    over = {label: geometric(ratios(mine, label, lambda n, _: best_s[n]))
            for label, mine in runs.items()}  # fmt: skip
    published = {f"*{k}*": v for k, v in REACHED.items() if k.endswith(group)}

    def median(name: str, label: str) -> str:
        if label in published:
            return f"{published[label][GRAPHS.index(name)]:g}"
        values = [c.value_s for c in runs[label] if c.problem == name]
        return f"{np.median([np.inf if v is None else v for v in values]):.1f}"

    def others(label: str) -> str:
        if label in published or label in (*SEARCHES, *RULES):
            return DASH
        return geometric(gain(cells, label, [*SEARCHES, *RULES])).percent()

    def seconds(label: str) -> float | None:
        return None if label in published else np.median([c.used_s for c in runs[label]])

    return table(
        [*sorted(runs, key=lambda k: float(over[k].ratio().split()[0])), *published],
        Column("chooser, search or rule", str),
        *(Column(n.rpartition("_")[0], partial(median, n)) for n in names),
        Column("over best known (95 %)", lambda k: over[k].ratio() if k in over else DASH),
        Column("against the best of the others", others),
        Column("processor s", seconds, 2),
    )


STUDY = learned_study(
    "doppler", DOPPLER, problems, partial(run_tasks, tasks), row=Cell, parts=parts
)
