"""What the commands leave in a folder, read back: for pages and other readers of runs."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from placement.problem import Problem, Solution
from placement.report import table, trace
from placement.report.table import Comparison
from placement.runs.compare import placement_id, solution_of
from placement.runs.row import SINGLE, Row
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
        traces: ``predicted`` and ``measured`` of the plan, or the names of trace files.
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
    path, plans = Path(folder), None
    if path.is_file():
        path, plans = path.parent, [path]
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

    rows = (
        ()
        if plans
        else attempt(lambda file: table.from_csv(read_text(file)), path / "compare.csv") or ()
    )
    answers, used = _answers(path, rows, attempt)
    metrics = {} if plans else attempt(_columns, path / "metrics.csv") or {}
    names = list(dict.fromkeys(row.workload for row in rows))
    workloads = [_compared(path, name, used.get(name), attempt) for name in names]
    if not names:
        workloads = list(_planned(path, plans, attempt))
    if not (rows or metrics or workloads):
        because = f"; {'; '.join(unread[:3])}" if unread else ""
        raise RunFolderError(
            f"{path}: nothing to report on: there is no compare.csv, metrics.csv or plan.json"
            f"{because}. Make one, e.g.: placement plan resnet50 --planner best_of "
            f"--out {path / 'plan.json'}"
        )
    texts = {
        name: text
        for name in ("versions.json", ".hydra/config.yaml", ".hydra/overrides.yaml")
        if (text := attempt(read_text, path / name)) is not None
    }
    job = attempt(read_text, path / ".hydra" / "hydra.yaml")
    if job is not None:
        texts[".hydra/hydra.yaml"] = job
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
    measured: dict[str, Timeline] = {}
    for file in sorted((path / "measured").glob("*.json"), key=lambda f: f.stat().st_mtime):
        about, ids = attempt(_measured_ids, file) or (None, [])
        if about == name:
            for placement in ids:
                timeline = attempt(Timeline.load, file.with_name(f"{file.stem}-{placement}.npz"))
                measured |= {} if timeline is None else {placement: timeline}
    own = path / name
    if not own.resolve().is_relative_to(path.resolve()):  # a name must not lead elsewhere
        return Workload(name, problem, None, None, measured, {})
    if not own.is_dir() and (path / "plan.json").is_file():
        own = path
    return _with_plan(name, own, problem, measured, attempt)


def _planned(path: Path, plans: list[Path] | None, attempt: Attempt) -> Iterator[Workload]:
    """A workload for every plan in the folder, or in a folder in it."""
    files = plans or [
        f for f in (path / "plan.json", *sorted(path.glob("*/plan.json"))) if f.is_file()
    ]
    for file in files:
        workload = _with_plan(file.stem, file.parent, None, {}, attempt, file)
        if workload.plan is not None:
            name = file.parent.name if file.parent != path else workload.plan.graph.name
            yield replace(workload, name=name if len(files) > 1 else workload.plan.graph.name)


def _with_plan(
    name: str,
    folder: Path,
    problem: Problem | None,
    measured: dict[str, Timeline],
    attempt: Attempt,
    file: Path | None = None,
) -> Workload:
    from placement.plan import load_plan

    file = file or folder / "plan.json"
    plan = attempt(load_plan, file)
    if plan is not None and problem is None:
        saved = attempt(_problem, folder / "problem.json")
        names = tuple(d.name for d in plan.cluster.devices)
        about = plan.graph.fingerprint, names
        if saved is not None and about == (saved.graph.fingerprint, saved.cluster.device_names):
            problem = saved
    traces: dict[str, Timeline] = {}
    for each in sorted(folder.glob("*trace*.json")):
        read = attempt(trace.read_traces, each) or {}
        traces |= {what or each.stem: timeline for what, timeline in read.items()}
    return Workload(name, problem, plan, None if plan is None else file, measured, traces)


def _problem(file: Path) -> Problem:
    from placement import importers

    return importers.load(file)


def _columns(file: Path) -> dict[str, list[float]]:
    rows = list(csv.DictReader(read_text(file).splitlines()))
    return {name: [float(row[name]) for row in rows] for name in (rows[0] if rows else ())}
