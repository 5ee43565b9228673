"""Public workloads against what is known of them.

    python -m experiments.public search       # non-contiguous splits and latency, proved gaps
    python -m experiments.public replicas     # the loads again, where micro-batches take turns

Each writes ``experiments/results/public_NAME.csv`` and ``.md``. Every run has one core and a
process of its own, all kernels loaded. What is finished lies in ``runs/public``: the same command
continues. ``search --bounds`` proves the bounds of its rows again. What is known is
``DATA/dnn_partitioning/truth.json``; without it these columns are empty.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments import study
from experiments.grid import PROCESSES, Cell, Task, bounded_again, compare, every
from experiments.runs import warm
from experiments.study import Option, Options, Study, StudyError, run
from experiments.tables import Column, finite, groups, table
from placement import importers, planners
from placement.problem import Planner, Problem
from placement.workloads.suites import bounds_of

TOLERANCE = 1e-5  # of the bounds in truth.json
Truth = list[dict[str, Any]]  # records of truth.json
DNN_FILES = ("dnn_partitioning/throughput/*/*.json", "dnn_partitioning/latency/*/*.json")


@dataclass(frozen=True)
class Case:
    """All runs on one problem: what the tables have a line for."""

    rows: Sequence[Cell]

    @property
    def file(self) -> str:
        """Its path, without what all have in common."""
        return short(self.rows[0].problem)

    def of(self, planner: str) -> Cell | None:
        return next((r for r in self.rows if r.planner == planner), None)

    def value_s(self, *names: str) -> float:
        """The least of these planners (of all, without one); inf if none has an answer."""
        mine = (r for r in self.rows if r.planner in names or not names)
        return min((r.value_s for r in mine if r.value_s is not None), default=np.inf)

    @property
    def bound_s(self) -> float:
        """The best that is proved."""
        return max(r.bound_s or 0.0 for r in self.rows)

    @property
    def gap(self) -> float:
        return self.value_s() / self.bound_s - 1

    def known(self, truth: Truth) -> tuple[float | None, float | None]:
        """Seconds of ``suites.bounds_of``: what is proved of every split, and the best known."""
        objective = "max_load" if self.rows[0].objective == "max_load" else "latency"
        both = bounds_of(truth, f"{self.file}.json", objective)
        low, best = (None if ms is None else ms / 1e3 for ms in both)
        return low, best


def cases(rows: Sequence[Cell]) -> list[Case]:
    return [Case(mine) for mine in groups(rows, "problem", "objective").values()]


def chosen(options: Options, *patterns: str) -> dict[str, Path]:
    """Public files, those alone whose path contains one of the words of the command line."""
    files = study.public(options.data, *patterns)
    some = {f: p for f, p in files.items() if any(w in f for w in options.words)}
    if options.words and not some:
        raise StudyError(f"no file has {' or '.join(options.words)} in its path")
    return some or files


def short(file: str) -> str:
    return file.removeprefix("dnn_partitioning/").rpartition(".")[0]


def mistake(files: Sequence[str]) -> str:
    return f"\n\n**Below a proved bound, which is a mistake: {', '.join(files)}**" if files else ""


# --- search --------------------------------------------------------------------------------------


# A value counts whenever it comes: what is asked is how good it can be.
LIMITS = {"enforced": False, "bounded": True}


def loaded(*names: str) -> dict[str, Planner]:
    return {name: planners.load(name) for name in names}


def search(options: Options) -> Iterator[Cell]:
    problems = {f: split_problem(f, path) for f, path in chosen(options, *DNN_FILES).items()}
    warm(["macro_search", "ideal_dp", "cp_sat", "mip"], ["max_load", "piecewise_latency"])

    def tasks(file: str, problem: Problem) -> list[Task]:
        # Rows of cp_sat for loads are of before: mip answers for it now.
        exact = "mip" if problem.objective == "max_load" else "cp_sat"
        return [
            *every(loaded("macro_search"), range(options.seeds), seconds=options.seconds, **LIMITS),
            *every(loaded(exact), (0,), seconds=options.exact_seconds, **LIMITS),
            *every(loaded("ideal_dp"), (0,), **LIMITS),
        ]

    return compare(problems, tasks, options.finished, options.processes)


def split_problem(file: str, path: Path) -> Problem:
    return importers.load(path, objective="max_load" if "/throughput/" in file else "latency")


def with_bounds(rows: Sequence[Cell], options: Options) -> list[Cell]:
    """The rows with the bounds of today, where these are higher than what was proved then."""
    files = chosen(options, *DNN_FILES)
    return bounded_again(rows, {f: split_problem(f, path) for f, path in files.items()})


def known(data: Path) -> Truth:
    """``truth.json``; empty where there is none."""
    path = data / "dnn_partitioning" / "truth.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def below_a_bound(rows: Sequence[Cell], options: Options) -> list[str]:
    """Files on which a value is less than what is proved for every split: a mistake."""
    truth = known(options.data)

    def proved_s(case: Case) -> float:
        low, _ = case.known(truth)
        return max(case.bound_s * (1 - 1e-9), (low or 0.0) * (1 - TOLERANCE))

    return [c.rows[0].problem for c in cases(rows) if c.value_s() < proved_s(c)]


def search_parts(rows: Sequence[Cell], options: Options) -> dict[str, Any]:
    truth = known(options.data)

    def searched(reduce: Callable[[Any], Any], case: Case) -> float:
        values = [r.value_s for r in case.rows if r.planner == "macro_search"]
        return float(reduce([np.inf if v is None else v for v in values]))

    def over_known(value: Callable[[Case], float], case: Case) -> float | None:
        _, reference = case.known(truth)
        return value(case) / reference if reference else None

    def of(planner: str, field: str, case: Case) -> float | None:
        run = case.of(planner)
        return None if run is None else getattr(run, field)

    def recorded(method: str, case: Case) -> float | None:
        of = (f"{case.file}.json", "latency", method)
        records = (r for r in truth if (r["file"], r["objective"], r["method"]) == of)
        return next((r["value"] for r in records), None)

    median = partial(searched, np.median)
    columns = (
        Column("file", "file"),
        Column("median ms", median, 4, 1e3),
        Column("worst ms", partial(searched, max), 4, 1e3),
        Column("best known", lambda c: c.known(truth)[1], 4, 1e3),
        Column("median ratio", partial(over_known, median), 4),
        Column("best ratio", partial(over_known, Case.value_s), 4),
        Column("bound ms", "bound_s", 4, 1e3),
        Column("recorded bound", lambda c: c.known(truth)[0], 4, 1e3),
        Column("median gap %", lambda c: median(c) / c.bound_s - 1, 2, 100),
        Column("best gap %", "gap", 2, 100),
    )
    of_loads = (
        Column("contiguous optimum", partial(of, "ideal_dp", "value_s"), 4, 1e3),
        Column("cp_sat", partial(of, "cp_sat", "value_s"), 4, 1e3),
        Column("its bound", partial(of, "cp_sat", "bound_s"), 4, 1e3),
        Column("mip", partial(of, "mip", "value_s"), 4, 1e3),
        Column("its bound", partial(of, "mip", "bound_s"), 4, 1e3),
    )
    of_latencies = (
        Column("max-load split", partial(of, "ideal_dp", "value_s"), 4, 1e3),
        Column("bound, one piece", partial(of, "cp_sat", "restricted_bound_s"), 4, 1e3),
        Column("C++ greedy", partial(recorded, "greedy_cpp"), 4),
        Column("C++ max-load split", partial(recorded, "dp_cpp_split"), 4),
    )
    tables = ""
    if loads := [c for c in cases(rows) if c.rows[0].objective == "max_load"]:
        tables = f"## Max-load\n\n{table(loads, *columns, *of_loads)}\n"
    if others := [c for c in cases(rows) if c.rows[0].objective != "max_load"]:
        tables += f"## Latency of one sample\n\n{table(others, *columns, *of_latencies)}"
        tables += "\nBound, one piece: of placements with one piece per accelerator only."
    wrong = mistake(below_a_bound(rows, options))
    return {"tables": tables, "wrong": wrong}


# --- replicas ------------------------------------------------------------------------------------

TURNS = ("data_parallel", "replicated", "phase_search")
LOADS = ("dnn_partitioning/throughput/*/*.json", "pipedream/vgg16.txt", "pipedream/alexnet.txt")


def replicas(options: Options) -> Iterator[Cell]:
    problems = {
        file: importers.load(path, objective="max_load")
        for file, path in chosen(options, *LOADS).items()
    }
    warm(["macro_search", "single_device"], ["max_load"])

    def tasks(file: str, problem: Problem) -> list[Task]:
        ready = loaded("single_device", "macro_search")
        if problem.max_phases > 1:
            ready = loaded(*TURNS)
        return every(ready, (0,), seconds=options.seconds, **LIMITS)

    for file, problem in problems.items():
        free = replace(problem, max_phases=options.phases)
        for some in ({file: problem}, {file: free}):
            yield from compare(some, tasks, options.finished)


def below_its_bound(rows: Sequence[Cell], options: Options) -> list[str]:
    """Runs whose value is less than what is proved for as many phases: a mistake."""
    wrong = [r for r in rows if (r.value_s or np.inf) < (r.bound_s or 0.0) * (1 - 1e-9)]
    return [f"{r.problem} by {r.planner}" for r in wrong]


def replicas_parts(rows: Sequence[Cell], options: Options) -> dict[str, Any]:
    def value(*names: str) -> Callable[[Case], float | None]:
        return lambda case: finite(case.value_s(*names))

    def bound(planner: str) -> Callable[[Case], float | None]:
        return lambda case: getattr(case.of(planner), "bound_s", None)

    def gain(case: Case) -> float:
        return case.value_s("single_device", "macro_search") / case.value_s()

    rows_of_files = table(
        cases(rows),
        Column("file", "file"),
        Column("devices", lambda c: c.rows[0].devices),
        Column("one device ms", value("single_device"), 2, 1e3),
        Column("one phase ms", value("macro_search"), 2, 1e3),
        Column("its bound", bound("macro_search"), 2, 1e3),
        *(Column(f"{name} ms", value(name), 2, 1e3) for name in TURNS),
        Column("stages of replicated", lambda c: getattr(c.of("replicated"), "note", "")),
        Column("bound", bound("replicated"), 2, 1e3),
        Column("replicas bring", gain, 2, unit="x"),
    )
    gains = [gain(c) for c in cases(rows)]
    helped = f"{sum(x > 1.005 for x in gains)} of {len(gains)}"
    wrong = mistake(below_its_bound(rows, options))
    return {"table": rows_of_files, "helped": helped, "most": max(gains), "wrong": wrong}


def _study(word: str, options: Mapping[str, Any], **more: Any) -> Study:
    words = Option((), "only files with it in the path", word=True, metavar="WORD")
    about = {"name": f"public_{word}", "word": word, "module": "experiments.public"}
    return Study(**about, row=Cell, options={"words": words, **options}, **more)


SEARCH = {
    "seconds": Option(10.0, "of a search"),
    "seeds": 5,
    "exact_seconds": Option(60.0, "of cp_sat and mip"),
} | PROCESSES
REPLICAS = {
    "seconds": Option(10.0, "of a search"),
    "phases": Option(12, "most that replicas take turns in"),
}
STUDIES = (
    _study(
        "search",
        SEARCH,
        rows=search,
        parts=search_parts,
        wrong=below_a_bound,
        again=study.Again("bounds", study.ONLY_BOUNDS, with_bounds),
    ),
    _study("replicas", REPLICAS, rows=replicas, parts=replicas_parts, wrong=below_its_bound),
)

if __name__ == "__main__":
    raise SystemExit(run(STUDIES))
