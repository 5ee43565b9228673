"""Flexible job shops: which machine runs an operation, and when.

Read are the JSON of github.com/ScheduleOpt/benchmarks (``fajsp``: any precedences) and the text
files ``.fjs`` that Brandimarte (1993) and Hurink et al. (1994) are passed on in (jobs are chains).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from placement.importers._read import (
    FormatError,
    Tasks,
    field,
    named_devices,
    number,
    task_problem,
    whole,
)
from placement.problem import Problem

_FIRST = re.compile(r"\s*\d{1,9}[ \t]+\d{1,9}([ \t]+\d{1,9}(\.\d*)?)?[ \t\r]*\n[\d \t\r]+(\n|$)")
Option = tuple[int, int, float]  # operation, machine, duration


def looks_like(content: Any) -> bool:
    """Whether parsed JSON, or a text, is (or wants to be) a shop."""
    if isinstance(content, str):
        return _FIRST.match(content) is not None
    return isinstance(content, dict) and "operations" in content and "precedences" in content


def read(content: Any, path: str, *, objective: str | None = None) -> Problem:
    """The problem of a text or of parsed JSON: a unit of the file is a second.

    Operation ``k`` of the file is the operator ``k``, machine ``m`` the device ``machine:m``;
    it cannot run (infinite seconds) on a machine that the file does not name for it. Between
    machines nothing takes time. The objective is ``latency`` (the makespan) if not given.

    Raises:
        FormatError: naming the file, the operation or line, and what is wrong.
    """
    options, pairs = _text(content, path) if isinstance(content, str) else _json(content, path)
    known = {op for op, _, _ in options}
    count, machines = max(known) + 1, max(m for _, m, _ in options) + 1
    if count > len(known):  # before anything as large as a number in the file is made
        missing = min(set(range(len(known) + 1)) - known)
        raise FormatError(f"{path}: no machine may run operation {missing}, of {count}")
    cluster = named_devices(path, "shop", "machine", machines, count)
    seconds = np.full((count, machines), np.inf)
    for op, machine, duration in options:  # of several ways on one machine the fastest
        seconds[op, machine] = min(seconds[op, machine], duration)
    name = str(content.get("instance", "")) if isinstance(content, dict) else ""
    tasks = Tasks("shop", name or Path(path).stem, [str(op) for op in range(count)], seconds, pairs)
    return task_problem(path, tasks, cluster, objective)


def _json(data: Any, path: str) -> tuple[list[Option], list[tuple[int, int]]]:
    records, precedences = data["operations"], data["precedences"]
    if not isinstance(records, list) or not isinstance(precedences, list) or not records:
        raise FormatError(f"{path}: 'operations' must be a non-empty list and 'precedences' a list")
    options = []
    for i, record in enumerate(records):
        where = f"{path}: operations[{i}]"
        op, machine = (
            whole(field(record, key, where), f"{where}: {key}") for key in ("operation", "machine")
        )
        options.append(
            (op, machine, number(field(record, "duration", where), f"{where}: duration"))
        )
    known, pairs = {op for op, _, _ in options}, []
    for i, record in enumerate(precedences):
        where = f"{path}: precedences[{i}]"
        ends = [whole(field(record, key, where), f"{where}: {key}") for key in ("before", "after")]
        for end in ends:
            if end not in known:
                raise FormatError(f"{where}: there is no operation {end}")
        pairs.append((ends[0], ends[1]))
    return options, pairs


def _text(text: str, path: str) -> tuple[list[Option], list[tuple[int, int]]]:
    """Jobs, machines, then per job: operations, and for each the machines with their durations.

    Machines are numbered from 1. Lines mean nothing.
    """
    first, _, rest = text.strip().partition("\n")
    jobs, machines = (int(word) for word in first.split()[:2])
    words = iter(rest.split())

    def take(what: str, low: int, most: int = 10**12) -> int:
        word = next(words, None)
        if word is None:
            raise FormatError(f"{path}: the file ends before {what}")
        if not re.fullmatch(r"\d{1,18}", word):
            raise FormatError(f"{path}: {what} = {word[:60]!r} is not a whole number")
        return whole(int(word), f"{path}: {what}", low, most)

    options: list[Option] = []
    pairs: list[tuple[int, int]] = []
    op = 0
    for job in range(jobs):
        many = take(f"number of operations of job {job}", 0)
        for k in range(many):
            where = f"operation {k} of job {job}"
            for _ in range(take(f"number of machines of {where}", 1, machines)):
                machine = take(f"a machine of {where}", 1, machines)
                options.append((op, machine - 1, float(take(f"a duration of {where}", 0))))
            if k:
                pairs.append((op - 1, op))
            op += 1
    left = next(words, None)
    if left is not None or not options:
        raise FormatError(
            f"{path}: {jobs} jobs have {op} operations"
            + ("" if left is None else f", but then comes {left[:60]!r}")
        )
    return options, pairs
