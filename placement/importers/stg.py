"""Standard task graphs (Kasahara and others), ``.stg``: tasks on equal processors."""

from __future__ import annotations

import re
from itertools import islice

import numpy as np

from placement.importers._read import (
    DECIMAL,
    FormatError,
    Tasks,
    check_table,
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
    operators in turn, the two of no time too. Between processors nothing takes time, but where the
    seconds of communication follow each predecessor, in the task's line or one of its own: any
    number of them at once. What follows a ``#`` is a comment. The objective is ``latency`` (the
    makespan) if not given.

    Raises:
        FormatError: naming the file, the line and what is wrong.
    """
    (first, head), *lines = numbered(text)
    rows: list[tuple[int, list[str]]] = []
    for i, words in lines:
        if rows and len(words) == 2:  # a predecessor and what it sends
            rows[-1][1].extend(words)
        else:
            rows.append((i, words))
    count = _number(head[0], f"{path}, line {first}", _WHOLE)
    low = int(min(1, _number(rows[0][1][0], f"{path}, line {rows[0][0]}", _WHOLE)))
    sent: dict[tuple[int, int], float] = {}
    took = []
    for k, (i, words) in enumerate(rows):
        where = f"{path}, line {i}"
        many = int(_number(words[2], where, _WHOLE)) if len(words) > 2 else len(words)
        step = 2 if len(words) == 3 + 2 * many else 1
        if _number(words[0], where, _WHOLE) != k + low or len(words) != 3 + step * many:
            raise FormatError(
                f"{where}: expected task {k + low}, its time, how many predecessors, and their "
                f"numbers; found {' '.join(words)[:60]!r}"
            )
        took.append(_number(words[1], where, DECIMAL))
        for at in range(3, len(words), step):
            before = int(_number(words[at], where, _WHOLE)) - low
            if not 0 <= before < len(rows):
                raise FormatError(f"{where}: task {words[0]} waits for {words[at]}, which is none")
            sent[before, k] = _number(words[at + 1], where, DECIMAL) if step == 2 else 0.0
    if len(rows) not in (count, count + 2 - low):
        raise FormatError(
            f"{path}: {count:.0f} tasks are told, and {len(rows)} lines of tasks found; they must "
            "be as many, or two more (a first and a last task of no time; the last if the first is "
            "1)"
        )
    if len(rows) == count and low == took[0] == 0 and (took[-1] > 0 or count == 1):
        raise FormatError(
            f"{path}, line {rows[-1][0]}: the file ends: a first task of no time needs a last one"
        )
    cluster = named_devices(path, "stg", "processor", devices, len(rows))
    names = [words[0] for _, words in rows]
    seconds = np.repeat(np.array(took)[:, None], devices, axis=1)
    if not any(sent.values()):
        tasks = Tasks("stg", stem(path), names, seconds, [*sent])
        return task_problem(path, tasks, cluster, objective)
    check_table(path, len(sent), devices)
    transfer_s = np.array([*sent.values()])[:, None, None] * ~np.eye(devices, dtype=bool)
    tensors = [(u, 0, [v]) for u, v in sent]
    tasks = Tasks("stg", stem(path), names, seconds, [*sent], tensors=tensors)
    costs = {"transfer_s": transfer_s}
    return task_problem(path, tasks, cluster, objective, costs, contention=False)


def _number(word: str, where: str, kind: re.Pattern[str]) -> float:
    if not kind.fullmatch(word):
        what = "whole number" if kind is _WHOLE else "number"
        raise FormatError(f"{where}: {word[:60]!r} is not a {what}")
    return float(word)
