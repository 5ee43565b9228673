"""DOPPLER's four graphs on four devices, simulated as it does, at equal budgets."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from experiments import _study
from experiments.budgets import Doppler
from experiments.learned import problems as made
from experiments.learned.cells import (
    Cell,
    Cells,
    best_known,
    enforced,
    geometric,
    least,
    ratios,
    with_options,
)
from experiments.learned.guided import ANNEALING, HAND, POLICY, START, planners
from placement import importers
from placement.planners import load

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


def problems(options: Namespace) -> made.Problems:
    """The four graphs; links carry any number of tensors at once, ready operators run in order."""
    return {
        name: importers.load(path)
        for name in GRAPHS
        for path in _study.public(options.data, f"doppler/{name}.txt").values()
    }


def run(options: Namespace, chosen: made.Problems) -> list[Cell]:
    """Everyone with few evaluations, with many, and with the same processor seconds."""
    budget: Doppler = options.budget
    limits = {
        f"{budget.evaluations} evaluations": (None, budget.evaluations),
        f"{budget.many} evaluations": (None, budget.many),
        f"{budget.seconds:g} seconds": (budget.seconds, None),
    }
    cells, done = Cells(options.work), []
    for name, problem in chosen.items():
        # Without a clock the start costs no more than this: the same for everyone.
        field = {
            label: with_options(planner, start=START, baseline=START)
            for label, planner in planners(options.policies, problem).items()
        } | {
            CLIMBING: load("local_search", start="random"),
            ANNEALED: load("simulated_annealing", start="random"),
        }
        done += [cells.run("rules", name, problem, label, load(label)) for label in RULES]
        for group, limit in limits.items():
            for seed in range(budget.seeds):
                for label, planner in field.items():
                    done.append(cells.run(group, name, problem, label, planner, seed, *limit))
        for label in ("macro_search", HAND):
            long = cells.run(
                "known", name, problem, f"{label}, long", field[label], 0, None, budget.known
            )
            done.append(long)
    return done


def report(cells: Sequence[Cell]) -> str:
    """A table per budget."""
    known = best_known(cells)
    names = [n for n in GRAPHS if n in known]
    rules = [c for c in cells if c.group == "rules"]
    budgets = dict.fromkeys(c.group for c in cells if c.group not in ("rules", "known"))
    parts = []
    for group in budgets:
        mine = [c for c in cells if c.group == group] + rules
        others = least(mine, [*SEARCHES, *RULES])
        rows = []
        for label in dict.fromkeys(c.planner for c in mine):
            runs = [c for c in mine if c.planner == label]
            over = geometric(ratios(runs, label, lambda name, _: known[name]))
            chooses = label not in (*SEARCHES, *RULES)
            rows.append(
                [
                    label,
                    *(_median([c for c in runs if c.problem == n]) for n in names),
                    over.ratio(),
                    geometric(ratios(mine, label, others)).percent(1) if chooses else "–",
                    f"{np.median([c.used_s for c in runs]):.2f}",
                ]
            )
        rows.sort(key=lambda r: float(r[1 + len(names)].split()[0]))
        rows += [
            [f"*{label}*", *(f"{values[GRAPHS.index(n)]:g}" for n in names), "–", "–", "–"]
            for label, values in REACHED.items()
            if label.endswith(group)
        ]
        table = _study.to_table(
            ["chooser, search or rule", *(n.rpartition("_")[0] for n in names),
             "over best known (95 %)", "against the best of the others", "processor s"],
            rows,
        )  # fmt: skip
        parts.append(f"## {group.capitalize()}\n\n{table}")
    best = _study.to_table(
        ["graph", "operators", "best known", "policy, all budgets"],
        [
            [
                n,
                str(next(c.operators for c in cells if c.problem == n)),
                f"{known[n]:.2f}",
                f"{best_known([c for c in cells if c.planner == POLICY])[n]:.2f}",
            ]
            for n in names
        ],
    )
    return f"""# DOPPLER's own graphs

The four 4-GPU graphs of the released system (Yao et al., ICLR 2026), in its cost units /
1e10, under its simulator's rules: links carry any number of tensors at once, a device
runs operators in the order in which they become ready. Medians over seeds. `policy` is the released
chooser of moves, which saw none of these graphs in training, `frozen` the same network untrained,
`hand` its score, `uniform` chance. *The others* are all other searches and rules, the best with the
same seed.
{" and ".join(f"*{label}*" for label in REACHED)} are figures known before these
runs; ours of that kind are `{CLIMBING}` and `{ANNEALED}`; the others start
at the best of {", ".join(START.planners)}.
{enforced([c for c in cells if c.group in budgets])}

{chr(10).join(parts)}
## Best known

{best}"""


def _median(runs: Sequence[Cell]) -> str:
    """Of the values; what did not fit counts as infinite."""
    return f"{np.median([np.inf if c.value_s is None else c.value_s for c in runs]):.1f}"
