"""One family left out of the training, then one greedy decode of each of its graphs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments import _study
from experiments._study import StudyError, number, say
from experiments.budgets import HEURISTICS, ZeroShot
from experiments.learned import problems as made
from experiments.learned.cells import (
    Cell,
    Cells,
    Mean,
    digest,
    geometric,
    least,
    ratios,
    share,
    to_known,
)
from placement.planners import load
from placement.planners._search import Search
from placement.problem import Placement, Problem, Solution

GREEDY, BEST_OF_K, KNOWN = "greedy decode", "best of k", "macro_search"
UNTRAINED = "untrained"  # one greedy decode of the network that every training begins with
TIMED = "time per plan"
SIZES = (300, 2000)
AS_IT_IS = next(iter(made.MACHINES))


def unit(name: str) -> str:
    """What is shared out between processes: a family, with its training."""
    return name.partition(": ")[0]


def problems(options: Namespace) -> made.Problems:
    """``family: problem``; of the families that are asked for."""
    budget: ZeroShot = options.budget
    return {
        f"{family}: {name}": problem
        for family in made.FAMILIES
        if options.wants(f"{family}: ")
        for name, problem in made.family(
            family, options.data, budget.graphs, budget.repeats
        ).items()
    }


@dataclass(frozen=True)
class Decode:
    """The greedy placement of a policy, and ``k`` sampled ones, evaluated; nothing else.

    Attributes:
        policy: its file.
        k: samples.
        warm: it starts at the answer of ``best_of``, whose seconds count.
        seed: of the samples.
    """

    policy: str
    k: int = 0
    warm: bool = False
    seed: int = 0

    def __call__(self, problem: Problem) -> Solution:
        """The best of what was decoded."""
        from agents.trained import TrainedPolicy
        from envs.problems import choice_of

        policy = TrainedPolicy.load(self.policy)
        search = Search(problem)
        start = load("best_of")(problem).placement if self.warm else None
        rows = policy.place(problem, start, self.k, self.seed)
        search.costs(choice_of(problem, rows))
        return search.solution()


def train_without(family: str, seed: int, options: Namespace) -> Path:
    """The file of the policy trained on all other families, trained now if it is not there."""
    from agents.expert import solve
    from agents.training import train
    from envs.perturbation import Perturbation

    budget: ZeroShot = options.budget
    config = recipe(options, seed)
    key = digest(family, seed, repr(budget), repr(config))[:12]
    folder = options.work / f"without_{family.replace(' ', '_')}-{seed}-{key}"
    if (folder / "trained.safetensors").is_file():
        return Path(folder / "trained.safetensors")
    machines: list[Problem] = []
    solutions: list[Placement] = []
    for other in made.FAMILIES:
        if other == family:
            continue
        known = {
            name: p
            for name, p in made.family(other, options.data, budget.graphs, budget.repeats).items()
            if p.num_ops <= budget.largest
        }
        drawn = Perturbation(variants=budget.variants)(list(known.values()))
        names = [*known, *(f"{n}/{i}" for n in known for i in range(budget.variants))]
        every = dict(zip(names, drawn, strict=True))
        say(f"without {family}: {len(every)} problems of {other}")
        if budget.imitation_epochs:
            solutions += solve(
                every,
                load("macro_search", seconds=budget.solve_seconds),
                options.work / f"solutions-{other.replace(' ', '_')}-{budget.solve_seconds:g}.npz",
                lambda name, done: say(f"  {name}") if name.count("/") < 3 else None,
            )
        machines += list(every.values())
    baseline = load("best_of") if budget.warm else None
    policy = train(
        machines,
        config=config,
        baseline=baseline,
        solutions=solutions or None,
        out_dir=folder,
        resume=True,
        callback=lambda row: say(
            f"without {family}: {row['steps']:.0f} steps, {row['seconds']:.0f} s, "
            f"greedy {row['greedy_speedup']:.3f}x"
        ),
    )
    policy.save(folder / "trained.safetensors")
    return Path(folder / "trained.safetensors")


def untrained(options: Namespace) -> Path:
    """The file of a policy whose network nothing was trained in."""
    from agents.trained import TrainedPolicy, untrained_net

    config = recipe(options, seed=0)
    path = Path(options.work / "untrained.safetensors")
    TrainedPolicy(untrained_net(config.network, config.formulation)).save(path)
    return path


def recipe(options: Namespace, seed: int) -> Any:
    """``TrainConfig`` of the training: of the file ``--recipe``, within the written budget."""
    from agents.encoder import NetworkConfig
    from agents.training import TrainConfig

    budget: ZeroShot = options.budget
    limits: dict[str, Any] = {
        "seed": seed,
        "total_steps": budget.total_steps,
        "max_seconds": budget.max_seconds,
        "imitation_epochs": budget.imitation_epochs,
    }
    if options.recipe is None:
        return TrainConfig(
            num_envs=32,
            repeats=8,
            learning_rate=1e-3,
            last_learning_rate=5e-5,
            entropy=0.004,
            last_entropy=0.0005,
            num_checks=30,
            network=NetworkConfig(finish_weight=8.0),
            **limits,
        )
    from omegaconf import OmegaConf

    node: Any = OmegaConf.to_container(OmegaConf.load(options.recipe))
    if "training" not in node:
        raise StudyError(f"{options.recipe}: no node 'training'; see conf/train.yaml")
    given = {k: v for k, v in node["training"].items() if k != "_target_" and k not in limits}
    network = {k: v for k, v in given.pop("network", {}).items() if k != "_target_"}
    return TrainConfig(network=NetworkConfig(**network), **given | limits)


def run(options: Namespace, chosen: made.Problems) -> list[Cell]:
    """Every machine of every problem: the policy, the heuristics and the best known."""
    budget: ZeroShot = options.budget
    cells, done = Cells(options.work / "cells"), []
    begun = Decode(str(untrained(options)), warm=bool(budget.warm))
    for family in dict.fromkeys(map(unit, chosen)):
        mine = {n: p for n, p in chosen.items() if unit(n) == family}
        policies = [str(train_without(family, seed, options)) for seed in range(budget.seeds)]
        for name, problem in mine.items():
            for machine, changed in made.MACHINES.items():
                there = changed(problem)
                for label in HEURISTICS:
                    done.append(cells.run(machine, name, there, label, load(label)))
                done.append(cells.run(machine, name, there, UNTRAINED, begun))
                for seed, path in enumerate(policies):
                    greedy = Decode(path, warm=bool(budget.warm))
                    several = replace(greedy, k=budget.k, seed=seed)
                    done.append(cells.run(machine, name, there, GREEDY, greedy, seed))
                    if machine == AS_IT_IS:
                        done.append(cells.run(machine, name, there, BEST_OF_K, several, seed))
                done.append(
                    cells.run(
                        machine, name, there, KNOWN, load(KNOWN), 0, seconds=budget.known_seconds
                    )
                )
        for size in SIZES:
            for repeat in range(5):
                planner = Decode(policies[0], warm=bool(budget.warm))
                label = f"{GREEDY}, run {repeat}"
                name = f"{family}: {size} operators"
                done.append(cells.run(TIMED, name, made.sized(size), label, planner))
    return done


def against_single(cells: Sequence[Cell], planner: str = GREEDY) -> tuple[str, dict[str, float]]:
    """The heuristic that is best over all graphs, and the planner's mean ratio to it by problem."""
    means = {h: geometric(to_known(cells, h)).value for h in HEURISTICS}
    best = min(means, key=lambda h: means[h])
    return best, _means(ratios(cells, planner, _of(cells, best)))


def against_each(cells: Sequence[Cell], planner: str = GREEDY) -> dict[str, float]:
    """Mean ratio to the least of all heuristics, by problem."""
    return _means(ratios(cells, planner, least(cells, HEURISTICS)))


def _of(cells: Sequence[Cell], heuristic: str) -> Any:
    return least(cells, [heuristic])


def _means(by_problem: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {n: float(np.exp(np.mean(np.log(v)))) for n, v in by_problem.items()}


def plan_seconds(cells: Sequence[Cell], size: int) -> Mean:
    """Median processor seconds of one greedy plan, over families and runs, and its quartiles."""
    used = [
        c.used_s for c in cells if c.group == TIMED and c.problem.endswith(f": {size} operators")
    ]
    if not used:
        return Mean(np.nan, np.nan, np.nan, 0)
    low, middle, high = np.percentile(used, [25, 50, 75])
    return Mean(float(middle), float(low), float(high), len(used))


def report(cells: Sequence[Cell]) -> str:
    """A table per machine, and how long a plan takes."""
    parts = []
    for machine in made.MACHINES:
        mine = [c for c in cells if c.group == machine]
        if not mine:
            continue
        single, _ = against_single(mine)
        rows = []
        families = list(dict.fromkeys(unit(c.problem) for c in mine))
        for family in (*families, "all"):
            some = [c for c in mine if family in ("all", unit(c.problem))]
            to_single = _means(ratios(some, GREEDY, _of(some, single)))
            to_each = against_each(some)
            p, low, high = share([v < 1 for v in to_single.values()])
            each = np.mean([v < 1 for v in to_each.values()])
            rows.append(
                [
                    family,
                    str(len(to_single)),
                    geometric(to_known(some, GREEDY)).ratio(),
                    geometric(to_known(some, BEST_OF_K)).ratio(),
                    geometric(to_known(some, UNTRAINED)).ratio(),
                    geometric(to_known(some, single)).ratio(),
                    f"{100 * p:.0f} % ({100 * low:.0f} to {100 * high:.0f})",
                    f"{100 * each:.0f} %",
                ]
            )
        table = _study.to_table(
            ["family left out", "graphs", "greedy over best known (95 %)", "best of k",
             "untrained", single, f"greedy better than {single}", "than every heuristic"],
            rows,
        )  # fmt: skip
        parts.append(f"## {machine.capitalize()}\n\n{table}")
    times = [
        f"{size} operators: {number(t.value, 0, 1e3)} ms "
        f"({number(t.low, 0, 1e3)} to {number(t.high, 0, 1e3)})"
        for size in SIZES
        if (t := plan_seconds(cells, size)).count
    ]
    return f"""# Zero-shot: one family left out

For every family a policy is trained on the other five, then decodes each graph of that family
greedily, once; nothing is searched. `best of k` evaluates sampled placements too; `untrained` is
the greedy decode of the network as each training begins with it: a list scheduler. Best known is
the least value of all runs, `{KNOWN}` among them. The heuristic named in a table is the one that is
best over all its graphs. An answer that does not fit in memory counts as ten times the best known.
Median processor time of one plan, features included (quartiles): {"; ".join(times) or "–"}.

{chr(10).join(parts)}"""
