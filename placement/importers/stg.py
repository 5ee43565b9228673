"""Standard task graphs (Kasahara and others), ``.stg``: tasks on equal processors."""

from __future__ import annotations

import re
from itertools import islice

import numpy as np

from placement.importers._read import (
    DECIMAL,
    FormatError,
    Tasks,
    named_devices,
    numbered,
    stem,
    task_problem,
)
from placement.problem import Problem

_WHOLE = re.compile(r"\d{1,18}")


def looks_like(text: str) -> bool:
    """Whether a count is followed by a line of at least three numbers: task, time, predecessors.

    A number of processors may follow the count: then the first task must wait for none.
    """
    rows = [words for _, words in islice(numbered(text), 2)]
    if len(rows) < 2 or not all(map(DECIMAL.fullmatch, rows[1][:3])):
        return False
    head, first = rows
    if not all(map(_WHOLE.fullmatch, (*head, first[0], *first[2:3]))):
        return False
    return first[2:] == ["0"] if len(head) == 2 else len(head) == 1 and len(first) >= 3


def read(text: str, path: str, *, objective: str | None = None, devices: int = 4) -> Problem:
    """The problem of a file on ``devices`` equal processors ``processor:0..``.

    The first line counts the tasks, without the two that begin and end all and take no time (a
    number of processors may follow); then a line for each: its number, its seconds, how many
    predecessors, and their numbers. The first is task 0, or 1 where none begins all. Lines are
    operators in turn, the two of no time too. Between processors nothing takes time. What follows
    a ``#`` is a comment. The objective is ``latency`` (the makespan) if not given.

    Raises:
        FormatError: naming the file, the line and what is wrong.
    """
    lines = list(numbered(text))
    for i, words in lines:
        for k, word in enumerate(words):
            if not (DECIMAL if k == 1 else _WHOLE).fullmatch(word):
                what = "number" if k == 1 else "whole number"
                raise FormatError(f"{path}, line {i}: {word[:60]!r} is not a {what}")
    rows = [(i, [int(word) for word in words[:1] + words[2:]]) for i, words in lines[1:]]
    took = [float(words[1]) if len(words) > 1 else 0.0 for _, words in lines[1:]]
    count = int(lines[0][1][0])
    low = min(1, rows[0][1][0])
    if len(rows) not in (count, count + 2 - low):
        raise FormatError(
            f"{path}: {count} tasks are told, and {len(rows)} lines of tasks found; they must be "
            "as many, or two more (a first and a last task of no time; the last if the first is 1)"
        )
    pairs = []
    for k, (i, row) in enumerate(rows, start=low):
        if len(row) < 2 or row[0] != k or row[1] != len(row) - 2:
            raise FormatError(
                f"{path}, line {i}: expected task {k}, its time, how many predecessors, and their "
                f"numbers; found {' '.join(lines[1 + k - low][1])[:60]!r}"
            )
        for before in row[2:]:
            if not low <= before < low + len(rows):
                raise FormatError(f"{path}, line {i}: task {k} waits for {before}, which is none")
            pairs.append((before - low, k - low))
    if len(rows) == count and low == took[0] == 0 and took[-1] > 0:
        raise FormatError(
            f"{path}, line {rows[-1][0]}: the file ends: a first task of no time needs a last one"
        )
    cluster = named_devices(path, "stg", "processor", devices, len(rows))
    names = [str(row[0]) for _, row in rows]
    seconds = np.repeat(np.array(took)[:, None], devices, axis=1)
    tasks = Tasks("stg", stem(path), names, seconds, pairs)
    return task_problem(path, tasks, cluster, objective)
