"""GiPH's default test distribution at 2 N evaluations: ours, HEFT, search, the published rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from experiments.budgets import GIPH, HELD_OUT
from experiments.learned import problems as families
from experiments.learned.cells import (
    Cell,
    Task,
    enforced,
    made_again,
    policy_file,
    run_tasks,
    to_known,
)
from experiments.learned.study import learned_study
from experiments.study import Again, Options
from experiments.tables import Column, Mean, geometric, table
from placement.planners import load
from placement.problem import Planner, Problem, Solution
from placement.search.evaluation import Search, random_choice
from placement.simulator import simulate
from placement.workloads.synthetic import giph

POLICY, HAND, HEFT, RULE = "policy", "hand", "heft", "random task, earliest finish"
FROZEN, UNSAMPLED = "frozen", "policy, nothing sampled"
SAMPLES, UNTRAINED = "samples alone", "samples alone, untrained"
SEARCHES = {"local_search": "local_search", "simulated_annealing": "annealing"}
LABELS = (
    *(POLICY, HAND, FROZEN, UNSAMPLED, SAMPLES, UNTRAINED, *SEARCHES.values()),
    *(f"{HEFT}, then {label}" for label in (POLICY, HAND, *SEARCHES.values())),
    *(RULE, "random placements"),
)
SAMPLING = (
    POLICY,
    HAND,
    FROZEN,
    SAMPLES,
    UNTRAINED,
    f"{HEFT}, then {POLICY}",
    f"{HEFT}, then {HAND}",
)


def above_known(cells: Sequence[Cell], planner: str) -> Mean:
    """Geometric mean of the planner's value over the best known of each problem."""
    return geometric(to_known(cells, planner))


@dataclass(frozen=True)
class EarliestFinish:
    """The rule that GiPH is compared with: a random operator goes where it would finish first.

    From a random placement, an operator drawn at random is moved to the device on which it would
    finish earliest if all others stay, again and again (Hu et al., "GiPH: Generalizable placement
    learning for adaptive heterogeneous computing", MLSys 2023: random task, EFT device).
    Each move is one evaluation; which device it goes to is estimated from the times of its
    producers in the timeline of the placement that was evaluated last, and of the device's work.

    Attributes:
        evaluations, seed: budget and draws.
    """

    evaluations: int = 30
    seed: int = 0

    def __call__(self, problem: Problem) -> Solution:
        rng = np.random.default_rng(self.seed)
        search = Search(problem, evaluations=self.evaluations)
        graph, here = problem.graph, random_choice(rng, search.allowed)
        search.cost(here)
        while search.left:
            timeline = simulate(problem, here[graph.group])
            n = int(rng.integers(problem.num_ops))
            here[graph.group[n]] = int(
                np.argmin(_finish_s(problem, here[graph.group], timeline, n))
            )
            search.cost(here)
        return search.solution()


def _finish_s(problem: Problem, placement: np.ndarray, timeline: object, n: int) -> np.ndarray:
    """float64 ``[D]`` when operator ``n`` would finish on each device, all others as they are."""
    graph = problem.graph
    start_s, end_s = timeline.start_s[0], timeline.end_s[0]  # type: ignore[attr-defined]
    finish = np.full(problem.num_devices, np.inf)
    for d in range(problem.num_devices):
        if not problem.supported[n, d]:
            continue
        ready = 0.0
        for t in graph.in_tensor[graph.in_ptr[n] : graph.in_ptr[n + 1]]:
            src = int(graph.tensor_src[t])
            if src >= 0:
                ready = max(ready, end_s[src] + problem.transfer_s(int(t), int(placement[src]), d))
        # Work of the device that begins before it could: it waits for that.
        earlier = (placement == d) & (np.arange(problem.num_ops) != n) & (start_s <= ready)
        ready = max(ready, float(end_s[earlier].max(initial=0.0)))
        finish[d] = ready + problem.compute_s[n, d]
    return finish


def problems(options: Options) -> families.Problems:
    seeds = range(HELD_OUT, HELD_OUT + options.graphs)
    return {f"giph-{s}": giph(s).with_objective("latency") for s in seeds}


def tasks(options: Options, name: str, problem: Problem) -> Iterator[Task]:
    """Everyone gets ``per_operator * N`` evaluations; the best known comes from a long search.

    Searches start as they do by default (a quarter of the evaluations goes to ``best_of``), and
    at HEFT's placement.
    """
    from agents.planner import PolicyPlanner, released
    from agents.trained import TrainedPolicy, untrained_net

    constructor = TrainedPolicy.load(released("best_of_k", "latency"))
    untrained = replace(
        constructor, net=untrained_net(constructor.net.config, constructor.formulation)
    )
    count = options.per_operator * problem.num_ops
    file = policy_file(options.policy, problem)
    field: dict[str, Planner] = {
        FROZEN: PolicyPlanner(chooser="hand", seed_policy=untrained),
        UNSAMPLED: PolicyPlanner(file, k=0),
        SAMPLES: PolicyPlanner(constructor, mode="best_of_k", k=count),
        UNTRAINED: PolicyPlanner(untrained, mode="best_of_k", k=count),
        RULE: EarliestFinish(),
        "random placements": load("random_search"),
    }
    for start, then in (("best_of", ""), (HEFT, f"{HEFT}, then ")):
        field[then + POLICY] = PolicyPlanner(file, mode="guided_search", baseline=start)
        field[then + HAND] = PolicyPlanner(mode="guided_search", chooser="hand", baseline=start)
        for search, label in SEARCHES.items():
            field[then + label] = load(search, start=start)
    yield Task("giph", HEFT, load("heft"), evaluations=count)
    for seed in range(options.seeds):
        for label, planner in field.items():
            yield Task("giph", label, planner, seed, evaluations=count)
    many = options.known_per_operator * problem.num_ops
    long = {label: load(label) for label in ("macro_search", "local_search")}
    long[UNTRAINED] = PolicyPlanner(untrained, mode="best_of_k", k=many)
    for label, planner in long.items():
        yield Task("known", f"{label}, long", planner, 0, evaluations=many)


def sampling_again(cells: Sequence[Cell], options: Options) -> list[Cell]:
    """The cells, those made again of whoever asks a constructor with few evaluations."""
    again = (
        (name, problem, task)
        for name, problem in problems(options).items()
        for task in tasks(options, name, problem)
        if task.group == "giph" and task.label in (*SAMPLING, HEFT)
    )
    return made_again(cells, again, options.finished, HEFT)


def parts(cells: Sequence[Cell], options: Options) -> dict[str, Any]:
    means = {label: above_known(cells, label) for label in (HEFT, *LABELS)}
    means = {label: mean for label, mean in means.items() if mean.count}
    summary = table(
        sorted(means, key=lambda k: float(means[k].percent(2).split()[0])),
        Column("planner", str),
        Column("above best known (95 %)", lambda k: means[k].percent(2)),
        Column("graphs", lambda k: means[k].count),
    )
    operators, devices = ([getattr(c, n) for c in cells] for n in ("operators", "devices"))
    return {
        "least": min(operators),
        "most": max(operators),
        "fewest": min(devices),
        "devices": max(devices),
        "enforced": enforced([c for c in cells if c.group == "giph"]),
        "table": summary,
    }


AGAIN = Again("sampling", "make again who asks a constructor, with few evaluations", sampling_again)
STUDY = learned_study(
    "giph", GIPH, problems, partial(run_tasks, tasks), row=Cell, parts=parts, again=AGAIN
)
