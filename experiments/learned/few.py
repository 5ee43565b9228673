"""At most 10 + G / 4 evaluations: the learned planner, its parts, rules and searches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.budgets import FEW, HEURISTICS
from experiments.learned.cells import (
    Cell,
    Task,
    best_cells,
    best_known,
    gain,
    made_again,
    run_tasks,
    to_known,
)
from experiments.learned.study import learned_study, untrained_dispatcher
from experiments.learned.zero_shot import from_files_and_draws, problems, unit, untrained
from experiments.study import RESULTS, Again, Options
from experiments.tables import DASH, Column, Mean, geometric, groups, read_csv, share, table
from placement.objective import Objective
from placement.planners import load
from placement.planners.order_search import why_not
from placement.problem import Problem

POLICY, UNTRAINED, SEARCH, RULES = "policy", "policy, untrained", "search", "best of seven rules"
PLANNERS = (POLICY, UNTRAINED, SEARCH, RULES)
GROUP, KNOWN = "few", "known"
HEADROOM = 1.01  # contiguous_dp over the best known: from here on there is something to gain


def evaluations(problem: Problem) -> int:
    """The budget."""
    return 10 + problem.graph.num_groups // 4


def earlier() -> dict[str, Cell]:
    """The best cell of each public file in the study of equal seconds, five seeds each, by file."""
    cells = read_csv(Cell, RESULTS / "learned_against.csv")
    return best_cells(c for c in cells if not c.problem.startswith("captured"))


def tasks(options: Options, name: str, problem: Problem) -> Iterator[Task]:
    few = evaluations(problem)
    for rule in HEURISTICS:
        yield Task(GROUP, rule, load(rule), evaluations=few)
    searcher = "macro_search" if why_not(problem) else "order_search"
    frozen: dict[str, Any] = {"policy": "untrained", "margin": 0.0}
    if problem.objective is Objective.LATENCY:  # others are not constructed
        frozen["seed_policy"] = untrained_dispatcher(options)
    if problem.objective is Objective.PERIOD:
        frozen["waits"] = untrained(options)
    for seed in range(options.seeds):
        yield Task(GROUP, SEARCH, load(searcher), seed, evaluations=few)
        yield Task(GROUP, POLICY, load("policy", margin=0.0), seed, evaluations=few)
        yield Task(GROUP, UNTRAINED, load("policy", **frozen), seed, evaluations=few)


def planner_again(cells: Sequence[Cell], options: Options) -> list[Cell]:
    """The cells, those of the planner made again, with trained and with untrained networks."""
    again = (
        (name, problem, task)
        for objective in Objective
        for name, problem in from_files_and_draws(options, objective).items()
        for task in tasks(options, name, problem)
        if task.label in (POLICY, UNTRAINED, "heft")
    )
    return made_again(cells, again, options.finished, "heft")


def searches(options: Options, name: str, problem: Problem) -> Iterator[Task]:
    for searcher in ("macro_search", "policy"):
        yield Task(KNOWN, f"{searcher}, long", load(searcher), 0, seconds=options.known_seconds)


def rows(options: Options, chosen: Mapping[str, Problem]) -> Iterator[Cell]:
    files = earlier()
    known = {name: files.get(name.partition(": ")[2]) for name in chosen}
    yield from run_tasks(tasks, options, chosen)
    yield from run_tasks(searches, options, {n: p for n, p in chosen.items() if not known[n]})
    for name, cell in known.items():
        if cell:
            planner = f"{cell.planner}, learned_against"
            yield replace(cell, group=KNOWN, problem=name, planner=planner)


def with_rules(cells: Sequence[Cell]) -> list[Cell]:
    """All cells, and for each problem one of the best rule."""
    best = best_cells(c for c in cells if c.planner in HEURISTICS)
    return [*cells, *(replace(cell, planner=RULES) for cell in best.values())]


def over_known(cells: Sequence[Cell], planner: str) -> Mean:
    """Of values over the best known."""
    return geometric(to_known(with_rules(cells), planner))


def headroom(cells: Sequence[Cell]) -> list[str]:
    """The graphs on which something is known to be ahead of ``contiguous_dp``."""
    return [n for n, r in to_known(cells, "contiguous_dp").items() if r[0] >= HEADROOM]


def ahead(cells: Sequence[Cell], planner: str) -> tuple[float, float, float]:
    """Share of these where every seed is better than ``contiguous_dp``, and its 95 % interval."""
    ratios = gain(with_rules(cells), planner, ["contiguous_dp"])
    return share([max(ratios[n]) < 1 - 1e-9 for n in headroom(cells)])


def behind(cells: Sequence[Cell], planner: str) -> int:
    """The graphs on which a run is worse than the best rule."""
    ratios = gain(with_rules(cells), planner, [RULES])
    return sum(max(r) > 1 + 1e-9 for r in ratios.values())


def parts(cells: Sequence[Cell], options: Options) -> dict[str, Any]:
    known = best_known(cells)
    names = [*dict.fromkeys(unit(n) for n in known), "all"]
    room = headroom(cells)

    def over(planner: str, name: str) -> str:
        return over_known([c for c in cells if name in ("all", unit(c.problem))], planner).ratio()

    def better(planner: str) -> str:
        value, low, high = (100 * x for x in ahead(cells, planner))
        return f"{value:.0f} % ({low:.0f} to {high:.0f})"

    def against(other: str, objective: str) -> str:
        mine = [c for c in cells if objective in ("all", c.objective)]
        return geometric(gain(with_rules(mine), POLICY, [other])).percent()

    return {
        "against": table(
            [*groups(cells, "objective"), "all"],
            Column("objective", str),
            *(Column(f"{POLICY} against {o}", partial(against, o)) for o in PLANNERS[1:]),
        ),
        "known": table(
            names,
            Column("family", str),
            Column("graphs", lambda x: sum(x in ("all", unit(n)) for n in known)),
            *(Column(p, partial(over, p)) for p in PLANNERS),
        ),
        "room": len(room),
        "counts": table(
            PLANNERS,
            Column("who", str),
            Column("better than contiguous_dp", lambda p: better(p) if room else DASH),
            Column("worse than the best rule on", partial(behind, cells)),
        ),
    }


AGAIN = Again("planner", "make runs of policy again, but of captured models", planner_again)
STUDY = learned_study("few", FEW, problems, rows, unit, row=Cell, parts=parts, again=AGAIN)
