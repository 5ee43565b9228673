"""The published learners under one runtime, beside rules and searches, with equal budgets.

Each method is a file of ``examples/published``, trained on the same drawn graphs for the
same number of environment steps, in the simulator that all are evaluated in; what training costs
is told apart. Then it has, on problems of which none was trained on, as many evaluations as
everybody else, or as many seconds: one that builds placements samples them, one that moves
operators moves them from the best single device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from experiments.grid import Cell, Task, best_known, compare, enforced, ratios
from experiments.learned.problems import HELD_OUT, Problems
from experiments.learned.study import learned_study, trained
from experiments.study import Option, Options
from experiments.tables import Column, geometric, groups, table
from placement.objective import Objective
from placement.planners import load
from placement.problem import Problem
from placement.workloads import suites, synthetic

EXAMPLES = Path(__file__).parents[2] / "examples" / "published"
METHODS = ("placeto", "gdp", "hdp", "hsdag", "giph", "post", "doppler")
TRAINED_ON = ("layered", "series_parallel", "random", "inception", "fork_join", "reduction_tree")
RULES = ("single_device", "m_etf", "peft", "heft", "best_of")
SEARCHES = ("macro_search", "order_search", "policy")
TRAINING = "training"
FILES = (
    ("shops", "mk02", None),
    ("shops", "mk04", None),
    ("shops", "la02_vdata", None),
    ("shops", "la17_rdata", None),
    ("stg", "50_rand0004", 2),
    ("stg", "50_rand0016", 4),
    ("stg", "100_rand0008", 4),
    ("stg", "100_rand0024", 8),
    ("neusight", "bert_large-inf-512-16@NVIDIA_A100-PCIE-40GB", None),
    ("neusight", "gpt2_large-inf-1024-4@AMD_Instinct_MI100", None),
    ("public", "moirai/googlenet", None),
    ("public", "moirai/transformer", None),
)
DRAWN = ("lstm_grid", "chain_with_skips", "towers", "butterfly", "u_net", "transformer")


def problems(options: Options) -> Problems:
    """Twenty: of suites, of families that nothing was trained on, and of GiPH's distribution."""
    chosen = {name: case.load() for name, case in _cases(options).items()}
    drawn = {f"drawn {name}": synthetic.families()[name](HELD_OUT) for name in DRAWN}
    drawn |= {f"giph {seed}": synthetic.giph(seed) for seed in (HELD_OUT, HELD_OUT + 1)}
    for name, problem in drawn.items():  # GiPH's too in the runtime of all others
        latency = problem.with_objective(Objective.LATENCY)
        chosen[name] = replace(latency, contention=True, ready_order="priority")
    return chosen


def _cases(options: Options) -> dict[str, suites.Case]:
    """By name, of the files that are there."""
    by_name = {}
    for suite, name, devices in FILES:
        folder = options.data if suite == "public" else options.data / suite
        (case,) = suites.cases(suite, folder, devices, name)
        by_name[f"{suite} {name}" + (f" on {devices}" if devices else "")] = case
    return by_name


@cache
def train(method: str, seed: int, steps: int, work: Path) -> tuple[Path, dict[str, Any]]:
    """``learned.study.trained`` for this study."""
    module = method_of(method)
    config = replace(module.CONFIG, total_steps=steps, seed=seed, num_checks=4)
    prepared = getattr(module, "prepared", lambda problem: problem)
    drawn, solutions = [prepared(p) for p in machines()], None
    if hasattr(module, "taught"):
        solutions = [module.taught(p) for p in drawn]
    start = {"baseline": load("single_device"), "solutions": solutions}
    return trained(method, config, work, drawn, **start)


def method_of(name: str) -> Any:
    """The module of a method."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return import_module(name)


def machines() -> list[Problem]:
    """What every method is trained on."""
    return [
        synthetic.families()[name](seed).with_objective(Objective.LATENCY)
        for name in TRAINED_ON
        for seed in (0, 1)
    ]


def rows(options: Options, chosen: Problems) -> Iterator[Cell]:
    """What each training cost, then every run."""
    for method in METHODS:
        for seed in range(options.seeds):
            _, cost = train(method, seed, options.steps, options.work)
            spent = {"used_s": cost["seconds"], "used_evaluations": int(cost["steps"])}
            yield Cell(TRAINING, TRAINING, "latency", 0, 0, method, seed, **spent)
    yield from compare(chosen, partial(tasks, options), options.finished, options.processes)


def tasks(options: Options, name: str, problem: Problem) -> Iterator[Task]:
    """Everyone, with so many evaluations, then with so many seconds."""
    from agents.planner import PolicyPlanner

    count = options.evaluations
    budgets = {"evaluations": {"evaluations": count}, "seconds": {"seconds": options.seconds}}
    for group, budget in budgets.items():
        for label in RULES:
            yield Task(group, label, load(label), None, **budget)
        for seed in range(options.seeds):
            for label in SEARCHES:
                yield Task(group, label, load(label), seed, **budget)
            for method in METHODS:
                path, _ = train(method, seed, options.steps, options.work)
                many = count if group == "evaluations" else 10**6
                module = method_of(method)
                kind: Any = getattr(module, "GroupPlanner", PolicyPlanner)
                planner = kind(
                    str(path),
                    many,
                    search=False,
                    baseline="single_device",
                    allow=(module.CONFIG.formulation,),
                )
                yield Task(group, method, planner, seed, **budget)


def parts(cells: Sequence[Cell], options: Options) -> dict[str, Any]:
    """A table per budget, what training cost, and who could not run on what."""
    training = groups((c for c in cells if c.group == TRAINING), "planner")
    runs = [c for c in cells if c.group != TRAINING]
    known = best_known(runs)
    with suppress(suites.SuiteError):
        for name, case in _cases(options).items():
            if name in known and case.best_known is not None:
                known[name] = min(known[name], case.best_known * case.unit_s)

    def field(group: str) -> str:
        mine = [c for c in runs if c.group == group]
        by_planner = groups(mine, "planner")
        means = {
            label: geometric(ratios(mine, label, lambda problem, _: known.get(problem)))
            for label in by_planner
        }

        def cost(label: str) -> float | None:
            spent = training.get(label)
            return _mean_s(spent) if spent else None

        return table(
            sorted(means, key=lambda label: means[label].value),
            Column("planner", str),
            Column("over the best known (95 %)", lambda label: means[label].ratio()),
            Column(
                "runs without an answer",
                lambda label: sum(c.value_s is None for c in by_planner[label]),
            ),
            Column("processor s per run", lambda label: _mean_s(by_planner[label]), 2),
            Column("processor s of training", cost, 0),
        )

    failed = {(c.planner, c.note) for c in runs if c.value_s is None and c.note}
    reasons = "\n".join(f"- {planner}: {note}" for planner, note in sorted(failed))
    return {
        "problems": len(known),
        "evaluations_table": field("evaluations"),
        "seconds_table": field("seconds"),
        "reasons": reasons or "Every planner had an answer on every problem.",
        "enforced": enforced(runs),
    }


def _mean_s(cells: Sequence[Cell]) -> float:
    return sum(c.used_s for c in cells) / len(cells)


STUDY = learned_study(
    "published",
    {
        "steps": Option(20_000, "of each training"),
        "evaluations": Option(100, "of every run"),
        "seconds": Option(2.0, "processor seconds of every run, where these are limited instead"),
        "seeds": Option(3, "trainings of each method, and of every planner that draws"),
    },
    problems,
    rows,
    parts=parts,
)
