"""Public workloads against what is known of them.

    python -m experiments.public exact [--reference FOLDER]   # ideal_dp, and the C++ program
    python -m experiments.public search       # non-contiguous splits and latency, proved gaps
    python -m experiments.public pipedream    # speed-up over one device of 4 and 8 equal ones
    python -m experiments.public moirai       # four unlike devices against the best one

Each writes ``experiments/results/public_NAME.csv`` and ``.md``. Every run has one core and a
process of its own, all kernels loaded. What is finished lies in ``runs/public``: the same command
continues. What is known is ``DATA/dnn_partitioning/truth.json``; without it these columns are
empty. The C++ program is that of github.com/msr-fiddle/dnn-partitioning, compiled by
``g++ -O2 throughput-dp/dp.cpp -o dp.exe`` (its folder is ``--reference``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments import _study
from experiments._study import GIB, Store, limited, number, say
from placement import importers, planners
from placement.files import write_atomic
from placement.planners.order_search import load_kernel
from placement.problem import Problem, lower_bound
from placement.simulator import score, value_of

MEMORY_BYTES = 8 * GIB  # address space of a planner
REFERENCE_BYTES = 16 * GIB
TOLERANCE = 1e-5  # of the bounds in truth.json
LIMIT_S = 600.0  # of one run, over its budget: none is expected to need it


# --- what is known -------------------------------------------------------------------------------

Truth = Mapping[tuple[str, str, str], Mapping[str, Any]]  # (file, objective, method) -> record


def known(data: Path) -> Truth:
    """``truth.json``; empty where there is none."""
    path = data / "dnn_partitioning" / "truth.json"
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return {(r["file"], r["objective"], r["method"]): r for r in records}


def fact(truth: Truth, file: str, objective: str, method: str, field: str = "value") -> Any:
    """One of them, None where it is not known; ``file`` is relative to the data folder."""
    return truth.get((file.removeprefix("dnn_partitioning/"), objective, method), {}).get(field)


def best_known_s(truth: Truth, file: str, objective: str) -> float | None:
    """The best value of a split that fits."""
    values = [
        r["value"]
        for (f, o, _), r in truth.items()
        if f == file.removeprefix("dnn_partitioning/")
        and o == objective
        and r["status"] in ("feasible", "optimal")
        and r["value"] is not None
    ]
    return min(values) / 1e3 if values else None


def known_bound_s(truth: Truth, file: str, objective: str) -> float | None:
    """The best bound that holds for every split."""
    methods = ("balance_bound", "cpsat_noncontig", "cpsat_noncontig_tight", "critical_path_bound")
    bounds = [fact(truth, file, objective, m, "lower_bound") for m in methods]
    return max((b / 1e3 for b in bounds if b is not None), default=None)


# --- one planner on one problem ------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One run of a planner; seconds throughout, None where there is none.

    ``settings``: what the file does not say of the problem. ``value_s``: in the simulator, or
    in the analytic model. ``bound_s``: proved, for every placement; ``restricted_bound_s``: for
    one piece per accelerator only. ``status``: ``ok``, or what stopped it, see ``note``.
    """

    file: str
    settings: str
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
    store: Store[Row],
    file: str,
    problem: Problem,
    planner: str,
    budget_s: float | None = None,
    seed: int | None = None,
    settings: str = "",
) -> Row:
    """The row of a run: from the store, or made now."""
    key: dict[str, Any] = {
        "file": file,
        "settings": settings,
        "objective": problem.objective,
        "planner": planner,
        "seed": seed,
        "budget_s": budget_s,
    }
    found = store.find(**key)
    if found is not None:
        return found
    text = f"{file}, {problem.objective}, {problem.num_devices} devices: {planner}"
    say(text + (f", seed {seed}" if seed is not None else ""))
    given = {"seconds": budget_s, "seed": seed}
    made = planners.load(planner, **{k: v for k, v in given.items() if v is not None})
    score(problem, np.zeros(problem.num_ops, np.int32))  # what is derived from a problem, once
    run = limited(lambda: made(problem), (budget_s or 0.0) + LIMIT_S, MEMORY_BYTES)
    stats: Mapping[str, Any] = run.value.stats if run.value else {}
    value_s, bound_s = np.inf, lower_bound(problem)
    if run.value is not None:
        problem.check_placement(run.value.placement)
        value_s = value_of(problem, run.value)
        bound_s = max(bound_s, run.value.lower_bound_s or 0.0)
    said = [run.note, str(stats.get("message", "")), str(stats.get("infeasible", ""))]
    return store.add(
        Row(
            **key,
            operators=problem.num_ops,
            devices=problem.num_devices,
            value_s=value_s if np.isfinite(value_s) else None,
            bound_s=bound_s,
            restricted_bound_s=stats.get("one_piece_bound_s"),
            seconds=run.seconds,
            evaluations=stats.get("evaluations"),
            peak_bytes=run.peak_bytes,
            status=run.status,
            note="; ".join(x for x in said if x),
        )
    )


def best(rows: Sequence[Row]) -> float:
    """Least value, inf without any."""
    return min((r.value_s for r in rows if r.value_s is not None), default=np.inf)


def bound(rows: Sequence[Row]) -> float:
    """The best bound proved."""
    return max(r.bound_s or 0.0 for r in rows)


# --- exact ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exact:
    """``ideal_dp`` on one file, and the C++ program beside it: medians of rounds that take turns.

    ``seconds``: of the planner; ``whole_s``: processor seconds, reading the file too, as in
    ``reference_s``.
    ``peak_bytes``: resident, of the whole process. ``truth_...``: from ``truth.json``.
    ``speedup``: of ``whole_s`` over ``reference_s``, where that ran, else of ``seconds`` over
    ``truth_reference_s``; where the C++ program did not end it is at least so much.
    """

    file: str
    rounds: int
    reference: str
    operators: int
    devices: int
    value_s: float | None
    truth_s: float | None
    error: float | None
    is_optimum: bool
    ideals: int | None
    truth_ideals: int | None
    seconds: float | None
    whole_s: float | None
    peak_bytes: int | None
    reference_rounds: int = 0
    reference_s: float | None = None
    reference_bytes: int | None = None
    reference_value_s: float | None = None
    reference_status: str = ""
    truth_reference_s: float | None = None
    truth_reference_status: str = ""
    speedup: float | None = None
    note: str = ""


@dataclass(frozen=True)
class _Reference:
    """One run of the C++ program, in processor seconds.

    ``peak_bytes`` is None where it is less than what we held before it ran.
    """

    status: str
    seconds: float
    peak_bytes: int | None
    value_s: float | None


def run_reference(program: Path, file: Path, seconds: float) -> _Reference:
    """``program < file``; its exit code says nothing (it fails its own check on several CPUs)."""
    import resource

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    status, text = "ok", ""
    try:
        with file.open("rb") as source:
            done = subprocess.run(
                [str(program)],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                preexec_fn=begin,
                check=False,
            )
        text = done.stdout.decode(errors="replace")
        if done.returncode < 0:
            status = signal.Signals(-done.returncode).name
    except subprocess.TimeoutExpired:
        status = "out of time"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    # A process inherits the largest size of the one that starts it, which hides smaller ones.
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = 1024 * used.ru_maxrss if used.ru_maxrss > ours else None
    try:
        value = json.JSONDecoder().raw_decode(text.lstrip())[0]["maxLoad"] / 1e3
    except (ValueError, KeyError, TypeError):
        value, status = None, "no answer" if status == "ok" else status
    return _Reference(status, used.ru_utime + used.ru_stime, peak, value)


def exact_row(
    file: str, path: Path, truth: Truth, rounds: int, program: Path | None, seconds: float
) -> Exact:
    """Our program and the other in turns; the other at most for about ``seconds`` in all."""

    def ours() -> tuple[Any, float]:
        began = time.process_time()
        problem = importers.load(path, objective="max_load")
        solution = planners.load("ideal_dp", seconds=None)(problem)
        return solution, time.process_time() - began

    problem = importers.load(path, objective="max_load")
    runs, others = [], list[_Reference]()
    for _ in range(rounds):
        runs.append(limited(ours, LIMIT_S, MEMORY_BYTES))
        if runs[-1].status != "ok":
            break
        if program is not None and sum(r.seconds for r in others) < 0.2 * seconds:
            other = limited(
                partial(run_reference, program, path, seconds), seconds + 60, REFERENCE_BYTES
            )
            if other.value is None:
                raise _study.StudyError(f"{program}: {other.status}: {other.note}")
            others.append(other.value)
    row = Exact(
        file=file,
        rounds=rounds,
        reference="" if program is None else program.name,
        operators=problem.num_ops,
        devices=problem.num_devices,
        value_s=None,
        truth_s=_seconds(fact(truth, file, "max_load", "own_dp_contiguous")),
        error=None,
        is_optimum=False,
        ideals=None,
        truth_ideals=fact(truth, file, "max_load", "own_dp_contiguous", "ideals"),
        seconds=None,
        whole_s=None,
        peak_bytes=None,
        truth_reference_s=fact(truth, file, "max_load", "dp_cpp", "seconds"),
        truth_reference_status=fact(truth, file, "max_load", "dp_cpp", "status") or "",
    )
    if runs[-1].status != "ok":
        return replace(row, note=f"{runs[-1].status}: {runs[-1].note}")
    solution = runs[0].value[0]
    value_s = float(score(problem, solution.placement)[0])
    row = replace(
        row,
        value_s=value_s,
        error=value_s / row.truth_s - 1 if row.truth_s else None,
        is_optimum=bool(solution.stats["contiguous_optimum"]),
        ideals=solution.stats["ideals"],
        seconds=float(np.median([r.value[0].stats["seconds"] for r in runs])),
        whole_s=float(np.median([r.value[1] for r in runs])),
        peak_bytes=max(r.peak_bytes or 0 for r in runs),
        note=str(solution.stats.get("message", "")),
    )
    assert row.seconds is not None and row.whole_s is not None
    if not others:
        had = row.truth_reference_s
        return replace(row, speedup=had / row.seconds if had else None)
    reference_s = float(np.median([r.seconds for r in others]))
    return replace(
        row,
        reference_rounds=len(others),
        reference_s=reference_s,
        reference_bytes=max((r.peak_bytes for r in others if r.peak_bytes), default=None),
        reference_value_s=others[0].value_s,
        reference_status=others[-1].status,
        speedup=reference_s / row.whole_s,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def exact(options: argparse.Namespace) -> tuple[Sequence[Any], str, bool]:
    """The contiguous optimum, exactly, and how long it takes."""
    files = chosen(
        options, "dnn_partitioning/throughput/*/*.json", "dnn_partitioning/latency/*/*.json"
    )
    program = None
    if options.reference is not None:
        program = (options.reference / "dp.exe").resolve()
        if not os.access(program, os.X_OK):
            raise _study.StudyError(
                f"no program {program}; in a checkout of github.com/msr-fiddle/dnn-partitioning: "
                "g++ -O2 throughput-dp/dp.cpp -o dp.exe"
            )
    truth = known(options.data)
    say(
        f"{len(files)} files, {options.rounds} rounds: a minute"
        + (
            f", and at most {options.reference_seconds:g} s for each file that is hard for the C++ "
            "program"
            if program
            else "; beside the C++ program: --reference FOLDER"
        )
    )
    _study.warm(["ideal_dp"], ["max_load"])
    store = Store(options.work / "exact.jsonl", Exact, options.fresh)
    rows = []
    for file, path in files.items():
        key = {"rounds": options.rounds, "reference": program.name if program else ""}
        row = store.find(file=file, **key)
        if row is None:
            say(file)
            row = store.add(
                exact_row(file, path, truth, options.rounds, program, options.reference_seconds)
            )
        rows.append(row)
    cells = [
        [
            _short(r.file),
            str(r.operators),
            str(r.devices),
            number(r.value_s, 6, 1e3),
            "–" if r.error is None else f"{r.error:+.0e}",
            ("" if r.ideals is None else str(r.ideals))
            + (
                ""
                if r.ideals == r.truth_ideals or r.truth_ideals is None
                else f" ≠ {r.truth_ideals}"
            ),
            number(r.seconds),
            number(r.whole_s),
            number(r.peak_bytes, 0, 2**-20),
            _at_least(r.reference_s, r.reference_status),
            number(r.reference_bytes, 0, 2**-20),
            _at_least(r.truth_reference_s, r.truth_reference_status),
            ("≥ " if "time" in (r.reference_status or r.truth_reference_status) else "")
            + number(r.speedup, 1, 1, "x"),
        ]
        for r in rows
    ]
    table = _study.to_table(
        ["file", "operators", "devices", "optimum ms", "error", "ideals", "planner s", "whole s",
         "MiB", "C++ s", "C++ MiB", "C++ s recorded", "speed-up"],
        cells,
    )  # fmt: skip
    wrong = [
        r.file for r in rows if not r.is_optimum or (r.error is not None and abs(r.error) > 1e-6)
    ]
    text = (
        "The contiguous optimum of max-load by `ideal_dp`, without a limit of time. Error: against "
        "the recorded optimum. Planner: from the problem to the answer; whole: reading the file "
        "too, as the C++ program does. MiB: largest resident memory of the process, Python "
        "included. C++: the published program, run in turns with ours on the same core, medians "
        f"of up to {options.rounds} rounds; like the whole, processor seconds. Recorded: seconds "
        "of its program over ideals alone, in truth.json. Speed-up: of the whole over the C++ "
        "program, where it ran here, else of the planner over what is recorded.\n\n"
        + table
        + (f"\n**Not the optimum: {', '.join(wrong)}**\n" if wrong else "")
    )
    return rows, text, not wrong


def _at_least(seconds: float | None, status: str) -> str:
    return ("> " if "time" in status and seconds is not None else "") + number(seconds)


def _short(file: str) -> str:
    return file.removeprefix("dnn_partitioning/").rpartition(".")[0]


def chosen(options: argparse.Namespace, *patterns: str) -> dict[str, Path]:
    """Public files, those alone whose path contains one of the words of the command line."""
    files = _study.public(options.data, *patterns)
    some = {f: p for f, p in files.items() if any(w in f for w in options.words)}
    if options.words and not some:
        raise _study.StudyError(f"no file has {' or '.join(options.words)} in its path")
    return some or files


# --- search --------------------------------------------------------------------------------------


def search(options: argparse.Namespace) -> tuple[Sequence[Any], str, bool]:
    """Any split, in seconds, against the best known value and against what is proved."""
    files = chosen(
        options, "dnn_partitioning/throughput/*/*.json", "dnn_partitioning/latency/*/*.json"
    )
    truth = known(options.data)
    num_loads = sum("/throughput/" in f for f in files)
    took = len(files) * (options.seeds * options.seconds + options.exact_seconds)
    took += num_loads * options.exact_seconds
    say(f"{len(files)} files: about {took / 60:.0f} minutes")
    store = Store(options.work / "search.jsonl", Row, options.fresh)
    _study.warm(["macro_search", "ideal_dp", "cp_sat", "mip"], ["max_load", "piecewise_latency"])
    rows: list[Row] = []
    cells: dict[str, list[list[str]]] = {"max_load": [], "latency": []}
    wrong: list[str] = []
    for file, path in files.items():
        objective = "max_load" if "/throughput/" in file else "latency"
        problem = importers.load(path, objective=objective)
        mine = [
            answer(store, file, problem, "macro_search", options.seconds, seed)
            for seed in range(options.seeds)
        ]
        proofs = [answer(store, file, problem, "cp_sat", options.exact_seconds)]
        if objective == "max_load":  # for another objective mip has no program
            proofs.append(answer(store, file, problem, "mip", options.exact_seconds))
        split = answer(store, file, problem, "ideal_dp")
        every = [*mine, *proofs, split]
        rows += every
        values = [r.value_s if r.value_s is not None else np.inf for r in mine]
        median, worst = float(np.median(values)), max(values)
        proved, reference = bound(every), best_known_s(truth, file, objective)
        told = known_bound_s(truth, file, objective) or 0.0
        if best(every) < max(proved * (1 - 1e-9), told * (1 - TOLERANCE)):
            wrong.append(file)
        cells[objective].append(
            [
                _short(file),
                number(median, 4, 1e3),
                number(worst, 4, 1e3),
                number(reference, 4, 1e3),
                number(median / reference if reference else None, 4),
                number(best(every) / reference if reference else None, 4),
                number(proved, 4, 1e3),
                number(told or None, 4, 1e3),
                number(median / proved - 1, 2, 100),
                number(best(every) / proved - 1, 2, 100),
                number(split.value_s, 4, 1e3),
                *(
                    [
                        number(proofs[0].restricted_bound_s, 4, 1e3),
                        number(fact(truth, file, "latency", "greedy_cpp"), 4),
                        number(fact(truth, file, "latency", "dp_cpp_split"), 4),
                    ]
                    if objective == "latency"
                    else [
                        number(proofs[0].value_s, 4, 1e3),
                        number(proofs[0].bound_s, 4, 1e3),
                        number(proofs[1].value_s, 4, 1e3),
                        number(proofs[1].bound_s, 4, 1e3),
                    ]
                ),
            ]
        )
    header = ["file", "median ms", "worst ms", "best known", "median ratio", "best ratio",
              "bound ms", "recorded bound", "median gap %", "best gap %"]  # fmt: skip
    text = (
        f"`macro_search`, {options.seconds:g} s, {options.seeds} seeds: median and worst. Bound: "
        f"the best that is proved here for every split: by `cp_sat` and `mip` in "
        f"{options.exact_seconds:g} s each, the fractional load balance or the critical path. "
        "Best ratio, best gap: of the best that any of these planners found. Best known and "
        "recorded bound: truth.json.\n"
    )
    if cells["max_load"]:
        columns = ["contiguous optimum", "cp_sat", "its bound", "mip", "its bound"]
        text += "\n## Max-load\n\n" + _study.to_table([*header, *columns], cells["max_load"])
    if cells["latency"]:
        columns = ["max-load split", "bound, one piece", "C++ greedy", "C++ max-load split"]
        text += (
            "\n## Latency of one sample\n\n"
            + _study.to_table([*header, *columns], cells["latency"])
            + "\nBound, one piece: of placements with one piece per accelerator only.\n"
        )
    if wrong:
        text += f"\n**Below a proved bound, which is a mistake: {', '.join(wrong)}**\n"
    return rows, text, not wrong


# --- pipedream -----------------------------------------------------------------------------------


def pipedream(options: argparse.Namespace) -> tuple[Sequence[Any], str, bool]:
    """Pipelines over equal devices against one of them."""
    files = chosen(options, "pipedream/*.txt")
    constructive, searches = ("antichain_dp", "pipedream"), ("macro_search", "simulated_annealing")
    num_problems = len(files) * len(options.devices) * len(options.bandwidth)
    took = num_problems * (len(searches) * options.seconds + 2)
    say(f"{len(files)} files: about {took / 60:.0f} minutes")
    store = Store(options.work / "pipedream.jsonl", Row, options.fresh)
    _study.warm([*constructive, *searches, "single_device"], ["period"])
    rows, cells = list[Row](), list[list[str]]()
    for bandwidth, file, devices in product(options.bandwidth, files, options.devices):
        path = files[file]
        in_flight = options.in_flight * devices
        problem = replace(
            importers.load(
                path,
                devices=devices,
                bandwidth=bandwidth,
                memory=options.memory,
                mode=options.mode,
            ),
            max_in_flight=in_flight,
            num_microbatches=4 * in_flight,
        )
        settings = (
            f"devices={devices} bandwidth={bandwidth:g} memory={options.memory} "
            f"mode={options.mode} in_flight={in_flight}"
        )
        one = answer(store, file, problem, "single_device", settings=settings)
        made = [answer(store, file, problem, p, settings=settings) for p in constructive]
        found = [answer(store, file, problem, p, options.seconds, 0, settings) for p in searches]
        every = [one, *made, *found]
        rows += every
        alone = one.value_s or np.nan
        cells.append(
            [
                _short(file).removeprefix("pipedream/"),
                str(problem.num_ops),
                f"{bandwidth / 1e9:g}",
                str(devices),
                number(one.value_s, 2, 1e3),
                *(number(alone / (r.value_s or np.nan), 2, 1, "x") for r in (*made, *found)),
                number(alone / best(found), 2, 1, "x"),
                number(alone / bound(every), 2, 1, "x"),
                number(best(every) / bound(every) - 1, 1, 100),
            ]
        )
    header = ["file", "operators", "GB/s", "devices", "one device ms", *constructive, *searches,
              "best search", "at most", "gap %"]  # fmt: skip
    text = (
        f"Period of the pipelined timeline, as a speed-up over one device; {options.mode}, equal "
        "devices, every pair joined at GB/s each way, "
        f"{options.memory / GIB:g} GiB each, up to {options.in_flight} micro-batches per device in "
        f"flight. Searches: {options.seconds:g} s. At most: what the best proved bound leaves.\n\n"
        + _study.to_table(header, cells)
    )
    return rows, text, True


# --- moirai --------------------------------------------------------------------------------------


def moirai(options: argparse.Namespace) -> tuple[Sequence[Any], str, bool]:
    """Unlike devices against the best one of them."""
    files = chosen(options, "moirai/*.json")
    constructive = ("heft", "m_etf", "peft", "contiguous_dp")
    searches = ("macro_search", "simulated_annealing", "order_search")  # the last: latency only
    say(f"{len(files)} files: about {len(files) * 5 * options.seconds / 60 + 0.2:.1f} minutes")
    store = Store(options.work / "moirai.jsonl", Row, options.fresh)
    _study.warm([*constructive, *searches[:-1], "single_device"], ["period", "latency"])
    load_kernel()
    rows, cells = list[Row](), list[list[str]]()
    for file, path in files.items():
        for objective in ("latency", "period"):
            problem = importers.load(path, objective=objective)
            one = answer(store, file, problem, "single_device")
            made = [answer(store, file, problem, p) for p in constructive]
            able = searches if objective == "latency" else searches[:-1]
            found = [answer(store, file, problem, p, options.seconds, 0) for p in able]
            every = [one, *made, *found]
            rows += every
            alone = one.value_s or np.nan
            times = [number(alone / (r.value_s or np.nan), 2, 1, "x") for r in (*made, *found)]
            cells.append(
                [
                    _short(file).removeprefix("moirai/"),
                    str(problem.num_ops),
                    objective,
                    number(one.value_s, 3, 1e3),
                    *times,
                    *["–"] * (len(searches) - len(able)),
                    number(1 - best(found) / alone, 1, 100),
                    number(alone / bound(every), 2, 1, "x"),
                    number(best(every) / bound(every) - 1, 1, 100),
                ]
            )
    header = ["file", "operators", "objective", "best device ms", *constructive, *searches,
              "less time %", "at most", "gap %"]  # fmt: skip
    text = (
        "Four unlike devices: speed-up over the best single one of them, of the latency of one "
        f"sample and of the period of the pipeline. Searches: {options.seconds:g} s. Less time: "
        "of the best search. At most: what the best proved bound leaves.\n\n"
        + _study.to_table(header, cells)
    )
    return rows, text, True


STUDIES = {"exact": exact, "search": search, "pipedream": pipedream, "moirai": moirai}


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit code 1 where a result contradicts what is proved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choice = parser.add_subparsers(dest="study", required=True)
    for name, study in STUDIES.items():
        one = choice.add_parser(name, help=(study.__doc__ or "").rstrip("."))
        _study.common_options(one, "public")
        one.add_argument("words", nargs="*", metavar="WORD", help="only files with it in the path")
        if name == "exact":
            one.add_argument("--rounds", type=int, default=5)
            one.add_argument("--reference", type=Path, help="folder of dp.exe")
            one.add_argument("--reference-seconds", type=float, default=360.0)
        else:
            one.add_argument("--seconds", type=float, default=10.0, help="of a search")
        if name == "search":
            one.add_argument("--seeds", type=int, default=5)
            one.add_argument("--exact-seconds", type=float, default=60.0, help="of cp_sat and mip")
        if name == "pipedream":
            one.add_argument("--devices", type=int, nargs="+", default=[4, 8])
            one.add_argument(
                "--bandwidth",
                type=float,
                nargs="+",
                default=[12e9, 100e9],
                help="bytes per second, of PCIe and of NVLink for example",
            )
            one.add_argument("--memory", type=int, default=2**40, help="bytes of a device")
            one.add_argument("--mode", choices=("training", "inference"), default="training")
            one.add_argument("--in-flight", type=int, default=2, help="micro-batches per device")
    options = parser.parse_args(argv)
    fine = True

    def run() -> None:
        nonlocal fine
        warnings.simplefilter("ignore", RuntimeWarning)  # what they say is in the rows
        study = STUDIES[options.study]
        rows, text, fine = study(options)
        command = _study.command_line("experiments.public", argv)
        title = (study.__doc__ or "").rstrip(".")
        name = f"public_{options.study}"
        write_atomic(options.out / f"{name}.csv", _study.to_csv(rows))
        write_atomic(
            options.out / f"{name}.md",
            f"# {title}\n\n`{command}`\n\n{text}\n{_study.provenance()}",
        )
        print(text)
        say(f"written to {options.out}: {name}.csv, {name}.md")

    code = _study.launch(run)
    return code if code or fine else 1


if __name__ == "__main__":
    sys.exit(main())
