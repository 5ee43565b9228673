"""Standard task graphs (Kasahara and others), ``.stg``: tasks on equal processors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from placement.importers._read import FormatError, Tasks, named_devices, task_problem
from placement.problem import Problem

_FIRST = re.compile(r"\s*\d{1,9}[ \t]*\r?\n[ \t]*\d{1,9}[ \t]+\d{1,18}[ \t]+\d{1,9}\b")


def looks_like(text: str) -> bool:
    """Whether a count is followed by a line of at least three numbers: task, time, predecessors."""
    return _FIRST.match(text) is not None


def read(text: str, path: str, *, objective: str | None = None, devices: int = 4) -> Problem:
    """The problem of a file on ``devices`` equal processors ``processor:0..``.

    The first line counts the tasks, without the two that begin and end all and take no time; then
    a line for each: its number, its seconds, how many predecessors, and their numbers. Task ``k``
    is operator ``k``, and the two are operators of no time. Between processors nothing takes
    time. What follows a ``#`` is a comment. The objective is ``latency`` (the makespan) if not
    given.

    Raises:
        FormatError: naming the file, the line and what is wrong.
    """
    lines = [
        (i, words)
        for i, line in enumerate(text.splitlines(), start=1)
        if (words := line.partition("#")[0].split())
    ]
    for i, words in lines:
        wrong = [word for word in words if not re.fullmatch(r"\d{1,18}", word)]
        if wrong:
            raise FormatError(f"{path}, line {i}: {wrong[0][:60]!r} is not a whole number")
    rows = [(i, [int(word) for word in words]) for i, words in lines[1:]]
    count = int(lines[0][1][0])
    if len(rows) not in (count, count + 2):
        raise FormatError(
            f"{path}: {count} tasks are told, and {len(rows)} lines of tasks found; they must be "
            "as many, or two more (a first and a last task of no time)"
        )
    pairs = []
    for k, (i, row) in enumerate(rows):
        if len(row) < 3 or row[0] != k or row[2] != len(row) - 3:
            raise FormatError(
                f"{path}, line {i}: expected task {k}, its time, how many predecessors, and their "
                f"numbers; found {' '.join(map(str, row))[:60]!r}"
            )
        for before in row[3:]:
            if before >= len(rows):
                raise FormatError(f"{path}, line {i}: task {k} waits for {before}, which is none")
            pairs.append((before, k))
    cluster = named_devices(path, "stg", "processor", devices, len(rows))
    names = [str(k) for k in range(len(rows))]
    seconds = np.repeat(np.array([[row[1]] for _, row in rows], np.float64), devices, axis=1)
    tasks = Tasks("stg", Path(path).stem, names, seconds, pairs)
    return task_problem(path, tasks, cluster, objective)
