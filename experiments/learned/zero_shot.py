"""One evaluation, and four: what networks construct on graphs of kinds that they never saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from experiments.grid import Cell, Task, best_cells, compare, gain, to_known
from experiments.learned import problems as families
from experiments.learned.study import (
    further,
    learned_study,
    untrained_dispatcher,
    wants,
)
from experiments.study import RESULTS, Option, Options
from experiments.tables import (
    DASH,
    Column,
    Mean,
    geometric,
    geometric_mean,
    groups,
    number,
    read_csv,
    share,
    table,
)
from placement.objective import Objective
from placement.planners import load
from placement.problem import Problem, Solution
from placement.search.evaluation import Search
from placement.workloads import synthetic

ONE, PIPELINES, FOUR = "one evaluation", "pipelines, one evaluation", "pipelines, four evaluations"
LATENCIES = "latencies, one evaluation"
EVALUATIONS = {PIPELINES: 1, FOUR: 4}
TRAINED, UNTRAINED, HAND = "trained", "untrained", "by hand"
# One rule each, no search and no budget: what one forward pass is compared with.
HEURISTICS = ("single_device", "heft", "peft", "m_etf", "m_sct", "m_topo", "contiguous_dp")
SINGLE, ORDERS, LIST = "contiguous_dp", "contiguous_dp, 24 orders", "heft"
DECODE = ", one decode"
EVERY = "all seven"
SEARCH, SEARCHED = "order_search, 2,000 evaluations", 2_000
WHO = (TRAINED, UNTRAINED, TRAINED + DECODE, UNTRAINED + DECODE, LIST, "single_device", SEARCH)
# Families that no network ever saw, six seeds of each: what training is judged by.
NEVER = "never drawn"
NEVER_DRAWN = ("layered", "layered_wide", "towers", "lstm_grid", "butterfly", "mixture_of_experts",
               "u_net")  # fmt: skip
TIMED = 300  # operators
RELEASED_SEED = 2  # of the trainings of the network of waits


def problems(options: Options) -> families.Problems:
    """``family: problem``; and those that decide: pipelines, and the latency of the same graphs."""
    chosen = {
        f"{family}: {name}": problem
        for family in families.FAMILIES
        if wants(options, f"{family}: ")
        for name, problem in families.family(
            family, options.data, options.graphs, options.repeats
        ).items()
    }
    seeds = range(families.HELD_OUT, families.HELD_OUT + options.pipelines)
    for family in NEVER_DRAWN if wants(options, f"{NEVER}: ") else ():
        for seed in seeds:
            name, problem = f"{NEVER}: {family}-{seed}", synthetic.families()[family](seed)
            chosen |= {name: problem, f"{name} latency": problem.with_objective(Objective.LATENCY)}
    return chosen


@dataclass(frozen=True)
class OneDecode:
    """The greedy decode of a policy that dispatches."""

    policy: str
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        from agents.dispatch import evaluate
        from agents.trained import TrainedPolicy
        from envs.dispatch import Dispatcher

        net, search = TrainedPolicy.load(self.policy).net, Search(problem)
        episode = Dispatcher(problem)
        episode.construct(net.weights(problem), net.config.finish_weight)
        evaluate(search, episode)
        return search.solution()


def untrained(options: Options) -> str:
    """The file of a network that foresees waits, in which nothing was trained."""
    from agents.foresee import WaitsNet

    path = options.work / "untrained_waits.safetensors"
    if not path.is_file():
        WaitsNet().save(path, {})
    return str(path)


def tasks(options: Options, name: str, problem: Problem) -> Iterator[Task]:
    from agents.planner import RELEASED

    trained: list[dict[str, Any]] = [{"foresight": path} for path in further(options).values()]
    pipeline, decides = problem.objective is Objective.PERIOD, name.startswith(f"{NEVER}: ")
    one = (PIPELINES if pipeline else LATENCIES) if decides else ONE
    for rule in HEURISTICS:
        yield Task(one, rule, load(rule))
    yield Task(one, ORDERS, load("contiguous_dp", orders=24), evaluations=1)
    new = {"foresight": untrained(options)} if pipeline else {}  # of loads no network decides
    if problem.objective is Objective.LATENCY:
        new = {"policy": untrained_dispatcher(options)}
    if one == LATENCIES:
        yield Task(one, SEARCH, load("order_search"), 0, evaluations=SEARCHED)
        for label, file in ((TRAINED, RELEASED), (UNTRAINED, new["policy"])):
            yield Task(one, label + DECODE, OneDecode(str(file)), 0, evaluations=1)
    for group, evaluations in EVALUATIONS.items() if one == PIPELINES else ((one, 1),):
        for seed, networks in enumerate((trained or [{}]) if pipeline else [{}]):
            planner = load("policy", margin=0.0, **networks)
            yield Task(group, TRAINED, planner, seed, evaluations=evaluations)
        planner = load("policy", margin=0.0, **new)
        yield Task(group, UNTRAINED, planner, 0, evaluations=evaluations)
        if pipeline:
            planner = load("policy", margin=0.0, foresight="untrained")
            yield Task(group, HAND, planner, 0, evaluations=evaluations)


def rows(options: Options, chosen: families.Problems) -> Iterator[Cell]:
    yield from compare(chosen, partial(tasks, options), options.finished, options.processes)
    best = best_of_few()
    yield from (best[name] for name in chosen if name in best)


def best_of_few() -> dict[str, Cell]:
    """The best cell of each graph in the study of few evaluations."""
    best = best_cells(read_csv(Cell, RESULTS / "learned_few.csv"))
    return {n: replace(c, group=ONE, planner=f"{c.planner}, learned_few") for n, c in best.items()}


def of_group(cells: Sequence[Cell], group: str) -> list[Cell]:
    """Those of a group; with four evaluations the rules are those of the other one."""
    rules = (*HEURISTICS, ORDERS) if group == FOUR else ()
    return [c for c in cells if c.group == group or (c.group == PIPELINES and c.planner in rules)]


def against(
    cells: Sequence[Cell], other: str, planner: str = TRAINED, of_families: bool = False
) -> Mean:
    """Of the planner's values over another's."""
    ratios = gain(cells, planner, [other])
    return geometric(ratios, family=family_of if of_families else None)


def family_of(problem: str) -> str:
    """Of a drawn problem: ``layered`` of ``never drawn: layered-900 latency``."""
    return problem.rpartition(": ")[2].rpartition("-")[0]


def by_family(cells: Sequence[Cell]) -> str:
    """What training adds in each family of ``NEVER_DRAWN``, and what that says of others."""

    def mean(name: str, group: str, other: str) -> str:
        mine = [c for c in of_group(cells, group) if name in (EVERY, family_of(c.problem))]
        return against(mine, other, of_families=name == EVERY).percent()

    columns = ((PIPELINES, HAND), (PIPELINES, UNTRAINED), (LATENCIES, UNTRAINED), (LATENCIES, LIST))
    return table(
        (*NEVER_DRAWN, EVERY),
        Column("family", str),
        *(
            Column(f"{g.partition(',')[0]}, against {o}", partial(mean, group=g, other=o))
            for g, o in columns
        ),
    )


def against_single(cells: Sequence[Cell], planner: str = TRAINED) -> tuple[str, dict[str, float]]:
    """The rule that is best over all graphs, and the planner's mean ratio to it by problem."""
    means = {h: geometric(to_known(cells, h)).value for h in HEURISTICS}
    best = min(means, key=lambda h: means[h])
    return best, {n: geometric_mean(v) for n, v in gain(cells, planner, [best]).items()}


def median_ms(cells: Sequence[Cell], planner: str) -> float:
    """Processor milliseconds of an answer."""
    return 1e3 * float(np.median([c.used_s for c in cells if c.planner == planner]))


def is_timed(num_ops: int) -> bool:
    return 0.5 * TIMED <= num_ops <= 1.5 * TIMED


def plan_s(cells: Sequence[Cell]) -> float:
    """Median processor seconds of one evaluation of pipelines of about ``TIMED`` operators."""
    mine = [c for c in of_group(cells, PIPELINES) if c.planner == TRAINED]
    used = [c.used_s for c in mine if is_timed(c.operators) and c.seed == RELEASED_SEED]
    return float(np.median(used)) if used else np.nan


def parts(cells: Sequence[Cell], options: Options) -> dict[str, Any]:
    mine = of_group(cells, ONE)
    single, ratios = against_single(mine)
    kinds = groups(mine, "objective")

    def over(planner: str, objective: str) -> str:
        return geometric(to_known(kinds.get(objective, mine), planner)).ratio()

    def better(objective: str) -> str:
        names = {c.problem for c in kinds.get(objective, mine)}
        p, low, high = (100 * x for x in share([v < 1 for n, v in ratios.items() if n in names]))
        return f"{p:.0f} % ({low:.0f} to {high:.0f})"

    def learned(who: tuple[str, str], other: str) -> str:
        if who[0] == other:
            return DASH
        return against(of_group(cells, who[1]), other, who[0]).percent()

    others = (SINGLE, ORDERS, UNTRAINED, HAND)
    pipelines = of_group(cells, FOUR)
    decided = of_group(cells, LATENCIES)
    return {
        "latencies": table(
            [(p, LATENCIES) for p in WHO],
            Column("who", lambda x: f"{HAND}, {LIST}" if x[0] == LIST else x[0]),
            Column("over the best known", lambda x: geometric(to_known(decided, x[0])).ratio()),
            *(
                Column(f"against {o}", partial(learned, other=o))
                for o in (SINGLE, LIST, UNTRAINED, UNTRAINED + DECODE)
            ),
            Column("processor ms", lambda x: median_ms(decided, x[0]), 0),
        ),
        "families": by_family(cells),
        "never": len({c.problem for c in pipelines}),
        "trainings": len({c.seed for c in pipelines if c.planner == TRAINED}),
        "learned": table(
            [(p, g) for g in EVALUATIONS for p in (TRAINED, UNTRAINED, HAND)],
            Column("who", lambda x: x[0]),
            Column("evaluations", lambda x: EVALUATIONS[x[1]]),
            *(Column(f"against {o}", partial(learned, other=o)) for o in others),
        ),
        "single": single,
        "known": table(
            [*kinds, "all"],
            Column("objective", str),
            Column("graphs", lambda x: len({c.problem for c in kinds.get(x, mine)})),
            Column("policy", partial(over, TRAINED)),
            *(Column(p, partial(over, p)) for p in (SINGLE, ORDERS)),
            Column(f"policy better than {single}", better),
        ),
        "timed": TIMED,
        "ms": number(plan_s(cells), 0, 1e3),
    }


STUDY = learned_study(
    "zero_shot",
    {
        "graphs": Option(1, "seeds HELD_OUT.. of each synthetic family"),
        "pipelines": Option(6, "of each family that was never drawn"),
        "repeats": Option(10, "of the profiles that have to be measured"),
    },
    problems,
    rows,
    parts=parts,
)
