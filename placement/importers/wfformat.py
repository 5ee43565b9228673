"""Workflows of WfCommons (github.com/wfcommons/WfFormat), JSON of the versions 1.0 to 1.5."""

from __future__ import annotations

from typing import Any

import numpy as np

from placement.importers._read import (
    FormatError,
    Tasks,
    equal_devices,
    field,
    number_of,
    stem,
    task_problem,
    whole_of,
)
from placement.problem import Problem
from placement.tools.files import short
from placement.tools.limits import MOST


def looks_like(data: Any) -> bool:
    """Whether parsed JSON is (or wants to be) a file of this format."""
    return isinstance(data, dict) and isinstance(data.get("workflow"), dict)


def read(
    data: Any,
    path: str,
    *,
    objective: str | None = None,
    devices: int = 4,
    bandwidth: float = float("inf"),
) -> Problem:
    """The problem of a parsed file on ``devices`` equal machines ``machine:0..``.

    A task is an operator, called by its id, that takes the seconds it took; machines that it
    may have needed more cores of, or that were faster, are not modelled. A file that a task
    writes and another of its children reads is a tensor; between machines it takes no time
    unless a ``bandwidth`` (bytes per second) is given. What a workflow begins with is everywhere.
    The objective is ``latency`` (the makespan) if not given.

    Raises:
        FormatError: naming the file, the task and the field.
    """
    workflow = data["workflow"]
    if "specification" in workflow:
        spec = field(workflow, "specification", f"{path}: workflow")
        done = field(workflow, "execution", f"{path}: workflow")
        records = _list(spec, "tasks", f"{path}: specification")
        ran = _list(done, "tasks", f"{path}: execution")
        files = _list(spec, "files", f"{path}: specification") if "files" in spec else []
    else:  # before 1.5 a task had all of it
        records = ran = _list(workflow, _either("tasks", "jobs", workflow), f"{path}: workflow")
        files = []
    at: dict[str, int] = {}  # by id, or, as parents were told before 1.5, by name
    names: list[str] = []
    for i, task in enumerate(records):
        where = f"{path}: tasks[{i}]"
        names.append(_text(task, _either("id", "name", task), where))
        if names[-1] in at:
            raise FormatError(f"{where}: the id {short(names[-1])} is used twice")
        at[names[-1]] = i
    for i, task in enumerate(records):
        if isinstance(task.get("name"), str):
            at.setdefault(task["name"], i)
    seconds = np.full((len(records), 1), np.nan)
    for i, task in enumerate(ran):
        where = f"{path}: tasks[{i}]"
        mine = i if ran is records else _task(at, _text(task, "id", where), where)
        seconds[mine] = number_of(task, _either("runtimeInSeconds", "runtime", task), where)
    unknown = np.flatnonzero(np.isnan(seconds))
    if len(unknown):
        raise FormatError(f"{path}: task {short(names[unknown[0]])}: nobody says how long it ran")
    pairs = _pairs(records, at, path)
    named = [(f"{path}: files[{i}]", record) for i, record in enumerate(files)]
    sizes = {_text(record, "id", where): _size(record, where) for where, record in named}
    tensors = _tensors(records, pairs, sizes, path)
    cluster = equal_devices(path, "workflow", "machine", devices, bandwidth)
    name = data.get("name")
    tasks = Tasks(
        "wfformat",
        name if isinstance(name, str) and name else stem(path),
        names,
        np.repeat(seconds, devices, axis=1),
        sorted(pairs),
        tensors=tensors,
    )
    return task_problem(path, tasks, cluster, objective)


def _pairs(records: list[Any], at: dict[str, int], path: str) -> set[tuple[int, int]]:
    """(before, after) of every parent and child."""
    pairs = set()
    for i, task in enumerate(records):
        where = f"{path}: tasks[{i}]"
        for key in ("parents", "children"):
            for other in _names(task, key, where):
                end = _task(at, other, f"{where}: {key}")
                pairs.add((end, i) if key == "parents" else (i, end))
    return pairs


def _tensors(
    records: list[Any], pairs: set[tuple[int, int]], sizes: dict[str, int], path: str
) -> list[tuple[int, int, list[int]]]:
    """Every file that a task writes for one of its children."""
    readers: dict[str, list[int]] = {}
    written: list[tuple[int, str]] = []
    for i, task in enumerate(records):
        where = f"{path}: tasks[{i}]"
        read, wrote = (list(_names(task, f"{key}Files", where)) for key in ("input", "output"))
        for k, record in enumerate(_list(task, "files", where) if "files" in task else ()):
            at = f"{where}: files[{k}]"
            file = _text(record, _either("id", "name", record), at)
            sizes[file] = _size(record, at)
            (read if _text(record, "link", at) == "input" else wrote).append(file)
        for file in dict.fromkeys(read):
            readers.setdefault(file, []).append(i)
        written += [(i, file) for file in dict.fromkeys(wrote)]
    tensors = []
    for i, file in written:
        users = [v for v in readers.get(file, ()) if (i, v) in pairs]
        if users:
            tensors.append((i, sizes.get(file, 0), users))
    return tensors


def _size(record: Any, where: str) -> int:
    return whole_of(record, _either("sizeInBytes", "size", record), where, most=MOST.graph_bytes)


def _either(new: str, old: str, record: Any) -> str:
    """What a field is called in this record: it has changed between versions."""
    return new if isinstance(record, dict) and new in record else old


def _task(at: dict[str, int], name: str, where: str) -> int:
    if name not in at:
        raise FormatError(f"{where}: {short(name)} is no task")
    return at[name]


def _names(record: Any, key: str, where: str) -> list[str]:
    """The texts in a field, which may be missing."""
    names = _list(record, key, where) if key in record else []
    wrong = [x for x in names if not isinstance(x, str)]
    if wrong:
        raise FormatError(f"{where}: {key} has {short(wrong[0])}, which is not a text")
    return names


def _text(record: Any, key: str, where: str) -> str:
    value = field(record, key, where)
    if not isinstance(value, str):
        raise FormatError(f"{where}: {key} = {short(value)} is not a text")
    return value


def _list(record: Any, key: str, where: str) -> list[Any]:
    value = field(record, key, where)
    if not isinstance(value, list):
        raise FormatError(f"{where}: {key} = {short(value)} is not a list")
    return value
