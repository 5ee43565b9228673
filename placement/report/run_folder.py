"""What the commands leave in a folder, read back: for pages and other readers of runs."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from placement.problem import Problem, Solution
from placement.report import table, trace
from placement.report.row import SINGLE, Row
from placement.report.saved import placement_id, solution_of
from placement.report.table import Comparison
from placement.timeline import Timeline
from placement.tools.files import parse_json, read_text

if TYPE_CHECKING:
    from placement.plan import Plan

T = TypeVar("T")
Answers = dict[tuple[str, str, int | None], Solution]


class RunFolderError(ValueError):
    """The folder holds nothing to report on; the message says what would be."""


@dataclass(frozen=True, eq=False)
class Workload:
    """One workload of a run.

    Attributes:
        problem: what was decided, None where the run did not save it.
        plan: the best plan, or the folder's only one.
        measured: the recorded ``Timeline`` of placements, by placement id.
        traces: ``predicted`` and ``measured`` of the plan, from trace files.
    """

    name: str
    problem: Problem | None
    plan: Plan | None
    plan_path: Path | None
    measured: dict[str, Timeline]
    traces: dict[str, Timeline]


@dataclass(frozen=True, eq=False)
class RunFolder:
    """A folder of ``placement-compare``, ``placement-train`` or of plans.

    Attributes:
        comparison: rows as in ``compare.csv``, with the solutions in ``cells``; or None.
        metrics: the columns of a training's ``metrics.csv``, in order.
        texts: configuration and versions as they lie there, by file name.
        unread: files that could not be read, with the reason.
    """

    path: Path
    workloads: tuple[Workload, ...]
    comparison: Comparison | None
    metrics: dict[str, list[float]]
    texts: dict[str, str]
    unread: tuple[str, ...]


def read_run(folder: str | Path) -> RunFolder:
    """Everything that can be read; files that are damaged are left out and named.

    Args:
        folder: of a run, or the file of one plan.

    Raises:
        RunFolderError: no such folder, or none of ``compare.csv``, ``metrics.csv`` and plans.
    """
    path, given = Path(folder), None
    if path.is_file():
        path, given = path.parent, path
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such folder; give the folder that a command wrote")
    unread: list[str] = []

    def attempt(read: Callable[[Path], T], file: Path) -> T | None:
        try:
            return read(file) if file.is_file() else None
        except Exception as error:  # csv, numpy and whoever else reads raise their own kinds
            reason = str(error) or type(error).__name__
            unread.append(f"{file.relative_to(path)}: {reason[:200]}")
            return None

    rows = () if given else attempt(_rows, path / "compare.csv") or ()
    metrics = {} if given else attempt(_columns, path / "metrics.csv") or {}
    answers, used = _answers(path, rows, attempt)
    names = list(dict.fromkeys(row.workload for row in rows))
    workloads = [_compared(path, name, used.get(name), attempt) for name in names]
    if not names:
        homes = [path, *(p for p in sorted(path.glob("[!.]*")) if p.is_dir() and not given)]
        workloads = [w for home in homes for w in _planned(home, path, given, attempt)]
    if not (rows or metrics or workloads):
        because = f"; {'; '.join(unread[:3])}" if unread else ""
        raise RunFolderError(
            f"{path}: nothing to report on: there is no compare.csv, metrics.csv or plan"
            f"{because}. Make one, e.g.: placement plan resnet50 --planner best_of "
            f"--out {path / 'plan.json'}"
        )
    hydra = (f".hydra/{name}.yaml" for name in ("config", "overrides", "hydra"))
    read = {name: attempt(read_text, path / name) for name in ("versions.json", *hydra)}
    texts = {name: text for name, text in read.items() if text is not None}
    comparison = Comparison(rows, answers) if rows else None
    return RunFolder(path, tuple(workloads), comparison, metrics, texts, tuple(unread))


Attempt = Callable[[Callable[[Path], Any], Path], Any]


def _answers(path: Path, rows: tuple[Row, ...], attempt: Attempt) -> tuple[Answers, dict[str, str]]:
    """The solution of every row, and the fingerprint of every workload's problem."""
    cells: dict[tuple[str, str, int | None, str], tuple[Solution, str | None]] = {}
    for file in sorted((path / "cells").glob("*.json"), key=lambda f: f.stat().st_mtime):
        cell = attempt(_cell, file)
        if cell is not None:
            cells[cell[0]] = cell[1]
    answers: Answers = {}
    used: dict[str, str] = {}
    alone: dict[str, int] = {}  # single devices are the first rows, in their order
    for row in rows:
        key = (row.workload, row.planner, row.seed)
        if row.planner.startswith(SINGLE):
            device = alone[row.workload] = alone.get(row.workload, -1) + 1
            placement = np.full(row.num_ops, device, np.int32)
            if row.placement_id == placement_id(placement):
                answers[key] = Solution(placement, row.value_s)
        elif (*key, row.placement_id) in cells:
            answers[key], fingerprint = cells[(*key, row.placement_id or "")]
            if fingerprint is not None:
                used[row.workload] = fingerprint
    return answers, used


def _cell(file: Path) -> tuple[Any, tuple[Solution, str | None]] | None:
    saved = parse_json(read_text(file), infinite=True)
    answer = saved["solution"]
    if answer is None:
        return None
    solution, fingerprint = solution_of(answer), saved.get("problem")
    name, planner, seed = saved["workload"], saved["planner"], saved["seed"]
    if not (
        isinstance(name, str)
        and isinstance(planner, str)
        and (seed is None or type(seed) is int)
        and (fingerprint is None or re.fullmatch("[0-9a-f]{64}", fingerprint))
    ):
        raise ValueError("workload, planner, seed or problem is of another kind")
    return (name, planner, seed, placement_id(solution.placement)), (solution, fingerprint)


def _measured_ids(file: Path) -> tuple[str, list[str]]:
    """The workload of a file of ``measured``, and the ids of the placements that ran."""
    saved = parse_json(read_text(file), infinite=True)
    ids = list(saved["samples"])
    if not all(re.fullmatch("[0-9a-f]+", x) for x in ids):  # parts of the names of files
        raise ValueError("samples must be by the ids of placements")
    return saved["workload"], ids


def _compared(path: Path, name: str, fingerprint: str | None, attempt: Attempt) -> Workload:
    """A workload of a comparison: its own folder, and its part of ``problems``, ``measured``."""
    problem = None
    if fingerprint is not None:
        problem = attempt(_problem, path / "problems" / f"{fingerprint[:12]}.json")
    measured = measured_timelines(path, name, attempt)
    own = path / name if (path / name).is_dir() else path
    file = own / "plan.json"
    inside = (path / name).resolve().is_relative_to(path.resolve())  # a name may lead elsewhere
    plan = next(_planned(own, path, file, attempt), None) if inside and file.is_file() else None
    if plan is None:
        return Workload(name, problem, None, None, measured, {})
    return replace(plan, name=name, problem=problem or plan.problem, measured=measured)


def measured_timelines(
    path: Path, workload: str, attempt: Attempt = lambda read, file: read(file)
) -> dict[str, Timeline]:
    """What a comparison in ``path`` recorded of a workload in its last round, by placement id."""
    measured: dict[str, Timeline] = {}
    for file in sorted((path / "measured").glob("*.json"), key=lambda f: f.stat().st_mtime):
        about, ids = attempt(_measured_ids, file) or (None, [])
        if about == workload:
            for placement in ids:
                timeline = attempt(Timeline.load, file.with_name(f"{file.stem}-{placement}.npz"))
                measured |= {} if timeline is None else {placement: timeline}
    return measured


def _planned(home: Path, path: Path, given: Path | None, attempt: Attempt) -> Iterator[Workload]:
    """A workload for every plan among the JSON files of ``home``; of ``given`` alone, if given.

    What a plan was measured as (``run --out``) is the same plan with more in it. Which plan a
    trace is of is told by its devices and its placement.
    """
    from placement.plan import load_plan

    plans: dict[str, tuple[Path, Plan]] = {}
    traces: list[tuple[Path, Timeline]] = []
    files = [f for f in home.glob("*.json") if f.is_file() and f != given]
    files.sort(key=lambda f: f.stat().st_mtime)
    files += [] if given is None else [given]
    for file in files:
        text = attempt(read_text, file) or ""
        if re.search(r'"traceEvents"\s*:', text):
            traces += [(file, t) for t in attempt(trace.read_traces, file) or ()]
        elif file != given and not re.search(r'"schema_version"\s*:', text):
            continue
        elif plan := attempt(load_plan, file):
            key = plan.model_copy(update={"measured": None}).model_dump_json()
            before = plans.get(key)
            if plan.measured is None and before is not None:
                plan = before[1]
            plans[key] = file, plan
    if given is not None:
        plans = {key: one for key, one in plans.items() if one[0] == given}
    others = traces
    for file, plan in plans.values():
        names = [d.name for d in plan.cluster.devices]
        problem = attempt(_problem, home / "problem.json")
        if problem is not None and (
            plan.graph.fingerprint != problem.graph.fingerprint
            or names != list(problem.cluster.device_names)
        ):
            problem = None
        on = np.array([[names.index(d) for d in phase.values()] for phase in plan.assignments])
        mine = {t.kind: t for _, t in traces if _is_of(t, names, on)}  # the latest of each kind
        others = [one for one in others if not _is_of(one[1], names, on)]
        name = plan.graph.name if len(plans) == 1 and home == path else home.name
        if len(plans) > 1:
            name = file.stem if home == path else f"{home.name}/{file.stem}"
        yield Workload(name, problem, plan, file, {}, mine)
    if given is None and plans:
        for file, _ in others:
            attempt(_of_no_plan, file)


def _of_no_plan(file: Path) -> None:
    raise RunFolderError("a timeline of no plan that is here")


def _is_of(timeline: Timeline, device_names: list[str], on: NDArray[np.int64]) -> bool:
    """Whether a timeline is of the placement int ``[K, N]`` on these devices."""
    turns = on[np.arange(timeline.num_microbatches) % len(on)]
    return list(timeline.device_names) == device_names and np.array_equal(timeline.device_of, turns)


def _problem(file: Path) -> Problem:
    from placement import importers

    return importers.load(file)


def _rows(file: Path) -> tuple[Row, ...]:
    return table.from_csv(read_text(file))


def _columns(file: Path) -> dict[str, list[float]]:
    rows = list(csv.DictReader(read_text(file).splitlines()))
    return {name: [float(row[name]) for row in rows] for name in (rows[0] if rows else ())}
