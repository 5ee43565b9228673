"""Planners on suites with proved optima: the committed table that anybody may extend.

    python -m experiments.leaderboard                        # what is not in the table yet
    python -m experiments.leaderboard --planner 'my_package.my_module:MyPlanner width=3'

A row is a planner with its options and budget on a part of a suite, as ``placement bench`` measures
it. Rows of ``experiments/results/leaderboard.csv`` stay as they are, with ``--again`` those of the
planners that are asked for are made again. ``python -m experiments.results`` then writes the page
``docs/bench.md``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

from agents.cli.entries import planner_of
from experiments.study import Option, Options, Rows, Study, run, say
from experiments.tables import Column, groups, table
from placement.runs.bench import mean_of, measure
from placement.workloads.suites import SUITES, cases

EVALUATIONS = 2000
SEARCHES = ("order_search", "policy", "macro_search")
RULES = (
    *("single_device", "m_topo", "m_etf", "heft", "peft"),
    *("critical_path_greedy", "critical_path_first", "best_of"),
)
ENTRIES = (*RULES, *(f"{name} evaluations={EVALUATIONS}" for name in SEARCHES))


class Part(NamedTuple):
    """Of a suite: problems whose names match ``only``."""

    suite: str
    only: str
    title: str


PARTS = (
    Part("shops", "mk*", "Brandimarte's flexible job shops"),
    Part("shops", "la*_vdata", "Hurink's flexible job shops, vdata"),
    Part("stg", "*rand00[0-4]?", "standard task graphs on 2, 4, 8 and 16 processors"),
    Part("neusight", "*", "BERT and GPT-2 over measured GPUs"),
)


@dataclass(frozen=True)
class Row:
    """A planner on a part of a suite; ``gap`` with its 95 % interval, see ``BenchMean``.

    ``cpu_s``: processor seconds of all problems, reading them included.
    """

    suite: str
    only: str
    planner: str
    problems: int
    gap: float | None
    low: float | None
    high: float | None
    optimal: float
    unsolved: int
    cpu_s: float


def rows(options: Options) -> Iterator[Row]:
    """The rows of the table, and those that it lacks; per part the best first."""
    by_key = {(r.suite, r.only, r.planner): r for r in STUDY.read(options.out)}
    for part in PARTS:
        for entry in options.planner or ENTRIES:
            key = (part.suite, part.only, entry)
            if options.again or key not in by_key:
                make = partial(_row, options, part, entry)
                name = f"{part.suite}-{entry}"
                by_key[key] = (
                    make() if options.again else options.finished.row(Row, key, make, name)
                )
    for part in PARTS:
        mine = [r for r in by_key.values() if (r.suite, r.only) == (part.suite, part.only)]
        yield from sorted(mine, key=lambda r: (r.gap is None, r.gap, r.planner))


def _row(options: Options, part: Part, entry: str) -> Row:
    planner, scores, began = planner_of("planner", entry), [], time.process_time()
    for case in cases(part.suite, options.data, only=part.only):
        scores.append(measure(case, planner))
        if scores[-1].impossible:
            say(f"{case.problem}: {scores[-1].value} is below the bound {scores[-1].lower_bound}")
    mean = mean_of(scores)
    say(f"{part.suite} {part.only}: {entry}: {mean}")
    facts = asdict(mean)
    count, cpu_s = facts.pop("count"), time.process_time() - began
    return Row(part.suite, part.only, entry, problems=count, cpu_s=cpu_s, **facts)


def suites() -> str:
    """A table of all suites."""
    return table(
        SUITES,
        Column("suite", lambda name: f"`{name}`"),
        Column("what", lambda name: SUITES[name].about),
        Column(
            "files in the folder", lambda name: ", ".join(map("`{}`".format, SUITES[name].files))
        ),
        Column("from", lambda name: SUITES[name].source),
        Column("licence", lambda name: SUITES[name].licence),
    )


def tables(rows: Rows) -> str:
    """A table for each part."""
    parts = groups(rows, "suite", "only")
    return "\n".join(
        f"### {part.suite} `{part.only}`: {part.title}\n\n{_table(parts[part.suite, part.only])}"
        for part in PARTS
        if (part.suite, part.only) in parts
    )


def _table(rows: Rows) -> str:
    def interval(row: Row) -> str:
        if row.low is None or row.high is None:
            return "–"
        return f"{100 * row.low:.1f} to {100 * row.high:.1f}"

    return table(
        rows,
        Column("planner", lambda r: f"`{r.planner}`"),
        Column("gap", "gap", 2, 100, " %"),
        Column("95 %", interval),
        Column("proved optimal", "optimal", 0, 100, " %"),
        Column("problems", "problems"),
        Column("without an answer", "unsolved"),
        Column("processor s", "cpu_s", 1),
    )


STUDY = Study(
    name="leaderboard",
    rows=rows,
    row=Row,
    parts=lambda rows, options: {"tables": tables(rows)},
    options={
        "planner": Option([], "with options, e.g. 'heft' (again and again); default: all"),
        "again": Option(False, "also if the table has the row"),
    },
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
