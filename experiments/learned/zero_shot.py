"""One family left out of the training, then one greedy decode of each of its graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.budgets import HEURISTICS, ZERO_SHOT
from experiments.learned import problems as families
from experiments.learned.cells import Cell, Task, gain, to_known
from experiments.learned.study import learned_study, wants
from experiments.study import Options, digest, say
from experiments.tables import DASH, Column, Mean, geometric, geometric_mean, number, share, table
from placement.planners import load
from placement.problem import Problem, Solution
from placement.search.evaluation import Search

GREEDY, BEST_OF_K, KNOWN = "greedy decode", "best of k", "macro_search"
UNTRAINED = "untrained"  # one greedy decode of the network that every training begins with
TIMED = "time per plan"
SIZES = (300, 2000)
AS_IT_IS = next(iter(families.MACHINES))


def unit(name: str) -> str:
    """What is shared out between processes: a family, with its training."""
    return name.partition(": ")[0]


def problems(options: Options) -> families.Problems:
    """``family: problem``; of the families that are asked for."""
    return {
        f"{family}: {name}": problem
        for family in families.FAMILIES
        if wants(options, f"{family}: ")
        for name, problem in _family(family, options).items()
    }


def _family(name: str, options: Options) -> families.Problems:
    return families.family(name, options.data, options.graphs, options.repeats)


@dataclass(frozen=True)
class Decode:
    """The greedy placement of a policy, and ``k`` sampled ones, evaluated; nothing else.

    Attributes:
        policy: its file.
        k: samples.
        seed: of the samples.
    """

    policy: str
    k: int = 0
    seed: int = 0

    def __call__(self, problem: Problem) -> Solution:
        """The best of what was decoded."""
        from agents.trained import TrainedPolicy
        from envs.problems import choice_of

        search = Search(problem)
        rows = TrainedPolicy.load(self.policy).place(problem, None, self.k, self.seed)
        search.costs(choice_of(problem, rows))
        return search.solution()


def train_without(family: str, seed: int, options: Options) -> str:
    """The file of the policy trained on all other families, trained now if it is not there."""
    from agents.training import train

    config = recipe(options, seed)
    key = digest(family, seed, repr(options.budget), repr(config))[:12]
    folder = options.work / f"without_{family.replace(' ', '_')}-{seed}-{key}"
    path: Path = folder / "trained.safetensors"
    if path.is_file():
        return str(path)

    def tell(row: Mapping[str, float]) -> None:
        say(
            f"without {family}: {row['steps']:.0f} steps, {row['seconds']:.0f} s, "
            f"greedy {row['greedy_speedup']:.3f}x"
        )

    machines = trained_on(family, options)
    train(machines, config=config, out_dir=folder, resume=True, callback=tell).save(path)
    return str(path)


def trained_on(family: str, options: Options) -> list[Problem]:
    """Graphs of all other families, not too large, also on other machines."""
    from envs.perturbation import Perturbation

    machines: list[Problem] = []
    for other in families.FAMILIES:
        if other == family:
            continue
        some = [p for p in _family(other, options).values() if p.num_ops <= options.largest]
        drawn = Perturbation(variants=options.variants)(some)
        say(f"without {family}: {len(drawn)} problems of {other}")
        machines += drawn
    return machines


def untrained(options: Options) -> str:
    """The file of a policy whose network nothing was trained in."""
    from agents.trained import TrainedPolicy, untrained_net

    config = recipe(options, seed=0)
    path = options.work / "untrained.safetensors"
    TrainedPolicy(untrained_net(config.network, config.formulation)).save(path)
    return str(path)


def recipe(options: Options, seed: int) -> Any:
    """``TrainConfig`` of the training, within the written budget."""
    from agents.encoder import NetworkConfig
    from agents.training import TrainConfig

    rates = {"learning_rate": 1e-3, "last_learning_rate": 5e-5}
    rates |= {"entropy": 0.004, "last_entropy": 0.0005}
    counts = {"num_envs": 32, "repeats": 8, "num_checks": 30, "imitation_epochs": 0}
    limits = {"total_steps": options.total_steps, "max_seconds": options.max_seconds}
    network = NetworkConfig(finish_weight=8.0)
    return TrainConfig(network=network, seed=seed, **rates, **counts, **limits)


def rows(options: Options, chosen: families.Problems) -> Iterator[Cell]:
    begun = Decode(untrained(options))
    for family in dict.fromkeys(map(unit, chosen)):
        decodes = [Decode(train_without(family, seed, options)) for seed in range(options.seeds)]
        for name in (n for n in chosen if unit(n) == family):
            for machine, changed in families.MACHINES.items():
                there = changed(chosen[name])
                for task in tasks(options, machine, begun, decodes):
                    yield task.run(options.finished, name, there)
        for size in SIZES:
            for repeat in range(5):
                task = Task(TIMED, f"{GREEDY}, run {repeat}", decodes[0])
                name = f"{family}: {size} operators"
                yield task.run(options.finished, name, families.sized(size))


def tasks(
    options: Options, machine: str, begun: Decode, decodes: Sequence[Decode]
) -> Iterator[Task]:
    for label in HEURISTICS:
        yield Task(machine, label, load(label))
    yield Task(machine, UNTRAINED, begun)
    for seed, decode in enumerate(decodes):
        yield Task(machine, GREEDY, decode, seed)
        if machine == AS_IT_IS:
            yield Task(machine, BEST_OF_K, replace(decode, k=options.k, seed=seed), seed)
    yield Task(machine, KNOWN, load(KNOWN), 0, seconds=options.known_seconds)


def against_single(cells: Sequence[Cell], planner: str = GREEDY) -> tuple[str, dict[str, float]]:
    """The heuristic that is best over all graphs, and the planner's mean ratio to it by problem."""
    means = {h: geometric(to_known(cells, h)).value for h in HEURISTICS}
    best = min(means, key=lambda h: means[h])
    return best, against(cells, [best], planner)


def against(
    cells: Sequence[Cell], others: Sequence[str] = HEURISTICS, planner: str = GREEDY
) -> dict[str, float]:
    """Mean ratio to the least of the others, by problem."""
    return {n: geometric_mean(v) for n, v in gain(cells, planner, others).items()}


def plan_seconds(cells: Sequence[Cell], size: int) -> Mean:
    """Median processor seconds of one greedy plan, over families and runs, and its quartiles."""
    name = f": {size} operators"
    used = [c.used_s for c in cells if c.group == TIMED and c.problem.endswith(name)]
    if not used:
        return Mean(np.nan, np.nan, np.nan, 0)
    low, middle, high = np.percentile(used, [25, 50, 75])
    return Mean(float(middle), float(low), float(high), len(used))


def of_machine(cells: Sequence[Cell]) -> str:
    """The table of a machine: a line per family, and one for all."""
    single, _ = against_single(cells)
    names = [*dict.fromkeys(unit(c.problem) for c in cells), "all"]
    by = {name: [c for c in cells if name in ("all", unit(c.problem))] for name in names}

    def over(planner: str, name: str) -> str:
        return geometric(to_known(by[name], planner)).ratio()

    def better(name: str) -> str:
        flags = [v < 1 for v in against(by[name], [single]).values()]
        p, low, high = (100 * x for x in share(flags))
        return f"{p:.0f} % ({low:.0f} to {high:.0f})"

    def than_every(name: str) -> float:
        return float(np.mean([v < 1 for v in against(by[name]).values()]))

    shown = {
        "greedy over best known (95 %)": GREEDY,
        "best of k": BEST_OF_K,
        "untrained": UNTRAINED,
        single: single,
    }
    return table(
        names,
        Column("family left out", str),
        Column("graphs", lambda name: len(against(by[name], [single]))),
        *(Column(head, lambda n, planner=planner: over(planner, n))
          for head, planner in shown.items()),
        Column(f"greedy better than {single}", better),
        Column("than every heuristic", than_every, 0, 100, " %"),
    )  # fmt: skip


def parts(cells: Sequence[Cell], options: Options) -> dict[str, Any]:
    tables = [
        f"## {machine.capitalize()}\n\n{of_machine(mine)}"
        for machine in families.MACHINES
        if (mine := [c for c in cells if c.group == machine])
    ]
    times = [
        f"{size} operators: {number(t.value, 0, 1e3)} ms "
        f"({number(t.low, 0, 1e3)} to {number(t.high, 0, 1e3)})"
        for size in SIZES
        if (t := plan_seconds(cells, size)).count
    ]
    return {"times": "; ".join(times) or DASH, "machines": "\n".join(tables)}


STUDY = learned_study("zero_shot", ZERO_SHOT, problems, rows, unit, row=Cell, parts=parts)
