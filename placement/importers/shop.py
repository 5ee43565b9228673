"""Flexible job shops: which machine runs an operation, and when.

Read are the JSON of github.com/ScheduleOpt/benchmarks (``fajsp``: any precedences) and, for jobs
that are chains, the text files ``.fjs`` that Brandimarte (1993) and Hurink et al. (1994) are passed
on in, those of classical job shops, and the JSON of github.com/SchedulingLab/fjsp-instances.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from placement.importers._read import (
    FormatError,
    Tasks,
    field,
    named_devices,
    number,
    numbered,
    task_problem,
    whole,
)
from placement.problem import Problem

_COUNT = re.compile(r"\d{1,9}")
_NUMBER = re.compile(r"\d{1,18}(\.\d*)?")
Option = tuple[int, int, float]  # operation, machine, duration
Pairs = list[tuple[int, int]]
Jobs = list[list[list[tuple[int, float]]]]  # of every operation: machines, and how long there


def looks_like(content: Any) -> bool:
    """Whether parsed JSON, or a text, is (or wants to be) a shop."""
    if isinstance(content, str):
        rows = [words for _, words in islice(numbered(content), 2)]
        begin = [word for row, most in zip(rows, (2, 1), strict=False) for word in row[:most]]
        return len(begin) == 3 and len(rows[0]) <= 3 and all(map(_COUNT.fullmatch, begin))
    return isinstance(content, dict) and (
        {"operations", "precedences"} <= content.keys() or {"machines", "jobs"} == content.keys()
    )


def read(content: Any, path: str, *, objective: str | None = None) -> Problem:
    """The problem of a text or of parsed JSON: a unit of the file is a second.

    Operation ``k`` of the file is the operator ``k``, machine ``m`` the device ``machine:m``;
    it cannot run (infinite seconds) on a machine that the file does not name for it. Between
    machines nothing takes time. The objective is ``latency`` (the makespan) if not given.

    Raises:
        FormatError: naming the file, the operation or line, and what is wrong.
    """
    if isinstance(content, dict) and "operations" in content:
        options, pairs = _json(content, path)
    else:
        options, pairs = _chains(
            _text(content, path) if isinstance(content, str) else _nested(content, path)
        )
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


def _json(data: Any, path: str) -> tuple[list[Option], Pairs]:
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


def _chains(jobs: Jobs) -> tuple[list[Option], Pairs]:
    """Operations numbered through; each but the first of a job waits for the one before."""
    options: list[Option] = []
    pairs: Pairs = []
    op = 0
    for job in jobs:
        pairs += [(k - 1, k) for k in range(op + 1, op + len(job))]
        for ways in job:
            options += [(op, machine, duration) for machine, duration in ways]
            op += 1
    return options, pairs


def _nested(data: Any, path: str) -> Jobs:
    """Jobs as lists of operations, which are lists of ways; machines are numbered from 0."""

    def items(value: Any, where: str) -> Iterator[tuple[str, Any]]:
        if not isinstance(value, list) or not value:
            raise FormatError(f"{where} is not a list, or an empty one")
        return ((f"{where}[{i}]", item) for i, item in enumerate(value))

    def way(where: str, item: Any) -> tuple[int, float]:
        machine = whole(field(item, "machine", where), f"{where}: machine")
        return machine, number(field(item, "processing", where), f"{where}: processing")

    return [
        [[way(*item) for item in items(ways, at)] for at, ways in items(job, where)]
        for where, job in items(data["jobs"], f"{path}: jobs")
    ]


def _text(text: str, path: str) -> Jobs:
    """Jobs, machines, then per job: operations, and for each the machines with their durations.

    Lines mean nothing, but for classical job shops. Machines are numbered from 1, or from 0 if
    one of them is 0.
    """
    (_, first), *lines = numbered(text)
    jobs, machines, rows = int(first[0]), int(first[1]), [words for _, words in lines]
    try:
        found = _flexible(chain.from_iterable(rows), jobs, machines, path)
    except FormatError:
        found = _classical(rows, jobs, machines)
        if not found:
            raise
    used = {machine for job in found for ways in job for machine, _ in ways}
    lowest = 0 if 0 in used else 1
    if max(used) - lowest >= machines:
        raise FormatError(
            f"{path}: of {machines} machines, one is 0 and one is {max(used)}: they must be "
            f"numbered from 0 to {machines - 1}, or from 1 to {machines}"
        )
    return [[[(m - lowest, t) for m, t in ways] for ways in job] for job in found]


def _flexible(words: Iterator[str], jobs: int, machines: int, path: str) -> Jobs:
    def take(what: str) -> float:
        word = next(words, None)
        if word is None:
            raise FormatError(f"{path}: the file ends before {what}")
        if not _NUMBER.fullmatch(word):
            raise FormatError(f"{path}: {what} = {word[:60]!r} is not a number of at least 0")
        return int(word) if word.isdecimal() else float(word)

    def count(what: str, low: int, most: int = 10**12) -> int:
        return whole(take(what), f"{path}: {what}", low, most)

    found: Jobs = []
    for job in range(jobs):
        found.append([])
        for k in range(count(f"number of operations of job {job}", 0)):
            where = f"operation {k} of job {job}"
            ways = range(count(f"number of machines of {where}", 1, machines))
            machine, duration = f"a machine of {where}", f"a duration of {where}"
            found[-1].append([(count(machine, 0, machines), take(duration)) for _ in ways])
    left = next(words, None)
    if left is not None or not any(found):
        raise FormatError(
            f"{path}: {jobs} jobs have {sum(map(len, found))} operations"
            + ("" if left is None else f", but then comes {left[:60]!r}")
        )
    return found


def _classical(rows: list[list[str]], jobs: int, machines: int) -> Jobs:
    """A line for each job, which visits every machine once: machine, duration, ...; else none."""
    if len(rows) != jobs or any(len(row) != 2 * machines for row in rows):
        return []
    every = [{str(m) for m in range(k, k + machines)} for k in (0, 1)]
    if not all(map(_NUMBER.fullmatch, chain.from_iterable(rows))) or not any(
        all(set(row[::2]) == names for row in rows) for names in every
    ):
        return []
    return [
        [[(int(m), float(t))] for m, t in zip(row[::2], row[1::2], strict=True)] for row in rows
    ]
