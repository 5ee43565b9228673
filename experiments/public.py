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
from experiments.runs import GIB, limited, warm
from experiments.study import Option, Options, Study, StudyError, run, say
from experiments.tables import Column, finite, groups, table
from placement import importers, planners
from placement.bounds import lower_bound
from placement.plan import proved_bound_s
from placement.problem import Problem
from placement.simulator import score, value_of
from placement.workloads.suites import bounds_of

MEMORY_BYTES = 8 * GIB  # address space of a planner
TOLERANCE = 1e-5  # of the bounds in truth.json
LIMIT_S = 600.0  # of one run, over its budget: none is expected to need it
Truth = list[dict[str, Any]]  # records of truth.json
DNN_FILES = ("dnn_partitioning/throughput/*/*.json", "dnn_partitioning/latency/*/*.json")


# --- one planner on one problem ------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One run of a planner; seconds throughout, None where there is none.

    ``value_s``: in the simulator, or in the analytic model. ``bound_s``: proved, for every
    placement; ``restricted_bound_s``: for one piece per accelerator only. ``status``: ``ok``, or
    what stopped it, see ``note``.
    """

    file: str
    objective: str
    operators: int
    devices: int
    planner: str
    seed: int | None
    budget_s: float | None
    value_s: float | None
    bound_s: float | None
    restricted_bound_s: float | None
    seconds: float
    evaluations: int | None
    peak_bytes: int | None
    status: str
    note: str


def answer(
    options: Options,
    file: str,
    problem: Problem,
    planner: str,
    budget_s: float | None = None,
    seed: int | None = None,
) -> Row:
    """The row of a run: one that is finished, or made now."""
    about = {"file": file, "objective": problem.objective, "operators": problem.num_ops,
             "devices": problem.num_devices, "planner": planner, "seed": seed,
             "budget_s": budget_s}  # fmt: skip
    make = partial(_answer, problem, about)
    return options.finished.row(Row, list(about.values()), make, f"{file}-{planner}")


def _answer(problem: Problem, about: Mapping[str, Any]) -> Row:
    say("; ".join(f"{name} {value}" for name, value in about.items() if value is not None))
    settings = {"seconds": about["budget_s"], "seed": about["seed"]}
    ready = planners.load(about["planner"], **{k: v for k, v in settings.items() if v is not None})
    score(problem, np.zeros(problem.num_ops, np.int32))  # what is derived from a problem, once
    done = limited(lambda: ready(problem), (about["budget_s"] or 0.0) + LIMIT_S, MEMORY_BYTES)
    stats: Mapping[str, Any] = done.value.stats if done.value else {}
    value_s, bound_s = np.inf, lower_bound(problem)
    if done.value is not None:
        problem.check_placement(done.value.placement)
        value_s = value_of(problem, done.value)
        bound_s = proved_bound_s(problem, done.value)
    stages = [f"{x['num_ops']} on {len(x['devices'])}" for x in stats.get("stages", ())]
    notes = [done.note, ", ".join(stages)]
    notes += [str(stats.get(key, "")) for key in ("message", "infeasible")]
    return Row(
        **about,
        value_s=finite(value_s),
        bound_s=bound_s,
        restricted_bound_s=stats.get("one_piece_bound_s"),
        seconds=done.seconds,
        evaluations=stats.get("evaluations"),
        peak_bytes=done.peak_bytes,
        status=done.status,
        note="; ".join(x for x in notes if x),
    )


@dataclass(frozen=True)
class Case:
    """All runs on one problem: what the tables have a line for."""

    rows: Sequence[Row]

    @property
    def file(self) -> str:
        """Its path, without what all have in common."""
        return short(self.rows[0].file)

    def of(self, planner: str) -> Row | None:
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


def cases(rows: Sequence[Row]) -> list[Case]:
    return [Case(mine) for mine in groups(rows, "file", "objective").values()]


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


def search(options: Options) -> Iterator[Row]:
    files = chosen(options, *DNN_FILES)
    num_loads = sum("/throughput/" in f for f in files)
    took_s = len(files) * (options.seeds * options.seconds + options.exact_seconds)
    took_s += num_loads * options.exact_seconds
    say(f"{len(files)} files: about {took_s / 60:.0f} minutes")
    warm(["macro_search", "ideal_dp", "cp_sat", "mip"], ["max_load", "piecewise_latency"])
    for file, path in files.items():
        problem, is_load = split_problem(file, path), "/throughput/" in file
        for seed in range(options.seeds):
            yield answer(options, file, problem, "macro_search", options.seconds, seed)
        for name in ("cp_sat", "mip") if is_load else ("cp_sat",):  # mip: for loads alone
            yield answer(options, file, problem, name, options.exact_seconds)
        yield answer(options, file, problem, "ideal_dp")


def split_problem(file: str, path: Path) -> Problem:
    return importers.load(path, objective="max_load" if "/throughput/" in file else "latency")


def with_bounds(rows: Sequence[Row], options: Options) -> list[Row]:
    """The rows with the bounds of today, where these are higher than what was proved then."""
    files = chosen(options, *DNN_FILES)
    now = {file: lower_bound(split_problem(file, path)) for file, path in files.items()}
    # What holds for every placement holds for those of one piece per accelerator.
    return [
        replace(
            r,
            bound_s=study.higher(r.bound_s, now[r.file]),
            restricted_bound_s=r.restricted_bound_s
            and study.higher(r.restricted_bound_s, now[r.file]),
        )
        for r in rows
    ]


def known(data: Path) -> Truth:
    """``truth.json``; empty where there is none."""
    path = data / "dnn_partitioning" / "truth.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def below_a_bound(rows: Sequence[Row], options: Options) -> list[str]:
    """Files on which a value is less than what is proved for every split: a mistake."""
    truth = known(options.data)

    def proved_s(case: Case) -> float:
        low, _ = case.known(truth)
        return max(case.bound_s * (1 - 1e-9), (low or 0.0) * (1 - TOLERANCE))

    return [c.rows[0].file for c in cases(rows) if c.value_s() < proved_s(c)]


def search_parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
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


def replicas(options: Options) -> Iterator[Row]:
    files = chosen(options, *LOADS)
    say(f"{len(files)} files: about {len(files) * (2 * options.seconds + 2) / 60:.0f} minutes")
    warm(["macro_search", "single_device"], ["max_load"])
    for file, path in files.items():
        problem = importers.load(path, objective="max_load")
        yield answer(options, file, problem, "single_device")
        yield answer(options, file, problem, "macro_search", options.seconds, 0)
        free = replace(problem, max_phases=options.phases)
        for name in TURNS:
            budget = (options.seconds, 0) if name == "phase_search" else ()
            yield answer(options, file, free, name, *budget)


def below_its_bound(rows: Sequence[Row], options: Options) -> list[str]:
    """Runs whose value is less than what is proved for as many phases: a mistake."""
    wrong = [r for r in rows if (r.value_s or np.inf) < (r.bound_s or 0.0) * (1 - 1e-9)]
    return [f"{r.file} by {r.planner}" for r in wrong]


def replicas_parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
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


def _study(word: str, row: type, options: Mapping[str, Any], **more: Any) -> Study:
    words = Option((), "only files with it in the path", word=True, metavar="WORD")
    about = {"name": f"public_{word}", "word": word, "module": "experiments.public"}
    return Study(**about, row=row, options={"words": words, **options}, **more)


SEARCH = {
    "seconds": Option(10.0, "of a search"),
    "seeds": 5,
    "exact_seconds": Option(60.0, "of cp_sat and mip"),
}
REPLICAS = {
    "seconds": Option(10.0, "of a search"),
    "phases": Option(12, "most that replicas take turns in"),
}
STUDIES = (
    _study(
        "search",
        Row,
        SEARCH,
        rows=search,
        parts=search_parts,
        wrong=below_a_bound,
        again=study.Again("bounds", study.ONLY_BOUNDS, with_bounds),
    ),
    _study("replicas", Row, REPLICAS, rows=replicas, parts=replicas_parts, wrong=below_its_bound),
)

if __name__ == "__main__":
    raise SystemExit(run(STUDIES))
