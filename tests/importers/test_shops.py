"""Job shops as texts: one drawn shop in every format, whole and damaged."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import importers
from placement.__main__ import main
from placement.importers import FormatError, shop, stg
from placement.workloads.suites import cases
from tests.problems import written

Jobs = list[list[list[tuple[int, int]]]]


def _lines(*rows: Any) -> str:
    return "".join(" ".join(map(str, row)) + "\n" for row in rows)


def _ways(ways: list[tuple[int, int]]) -> list[int]:
    return [len(ways), *(x for way in ways for x in way)]


def fjs(jobs: Jobs, m: int) -> str:
    flat = [[len(job), *(x for ways in job for x in _ways(ways))] for job in jobs]
    return _lines([len(jobs), m, 1.5], *flat)


def fajsp(jobs: Jobs, m: int) -> str:
    ends = np.cumsum([len(job) for job in jobs])
    pairs = [(k - 1, k) for k in range(ends[-1]) if k not in {0, *ends}]
    return _lines([ends[-1], len(pairs), m], *pairs, *(_ways(w) for job in jobs for w in job))


def _routes(jobs: Jobs) -> list[list[int]]:
    return [[x for ((machine, time),) in job for x in (machine, time)] for job in jobs]


def classical(jobs: Jobs, m: int) -> str:
    return _lines([len(jobs), m], *_routes(jobs))


def closed(jobs: Jobs, m: int) -> str:
    return _lines([len(jobs), m], *([*row, -1, -1] for row in _routes(jobs)))


def _both(jobs: Jobs) -> tuple[list[list[int]], list[list[int]]]:
    return [row[1::2] for row in _routes(jobs)], [row[::2] for row in _routes(jobs)]


def matrices(jobs: Jobs, m: int) -> str:
    times, machines = _both(jobs)
    return _lines([len(jobs), m], *times, *machines)


def taillard(jobs: Jobs, m: int) -> str:
    times, machines = _both(jobs)
    title = "Nb of jobs, Nb of Machines, Time seed, Machine seed, Upper bound, Lower bound\n"
    head = _lines([len(jobs), m, 84, 39, 99, 7])
    return title + head + "Times\n" + _lines(*times) + "Machines\n" + _lines(*machines)


def or_library(jobs: Jobs, m: int) -> str:
    return f" instance abz5\n\n ++++\n Adams 10x10 instance\n{classical(jobs, m)} ++++\n"


FLEXIBLE, FREE, FULL = (fjs, fajsp), (closed,), (classical, matrices, taillard, or_library)
Write = Callable[[Jobs, int], str]


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Write, Jobs, int]:
    """A format and a shop it can hold; machine 1 has work, so that numbers are from 1."""
    write: Write = draw(st.sampled_from(FLEXIBLE + FREE + FULL))
    m, n = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    time = st.integers(0, 9)
    if write in FULL:
        visits = st.permutations(range(1, m + 1))
        jobs: Jobs = [[[(k, draw(time))] for k in draw(visits)] for _ in range(n)]
        return write, jobs, m
    most = m if write in FLEXIBLE else 1
    some = st.lists(st.integers(1, m), min_size=1, max_size=most, unique=True)
    ways = some.map(lambda machines: [(k, draw(time)) for k in machines])
    job = st.lists(ways, min_size=1, max_size=4)
    return write, [draw(job) for _ in range(n)], m


def _read(text: str) -> Any:
    problem = shop.read(text, "f.txt")
    return problem.compute_s.tolist(), problem.graph.edges.tolist()


@settings(max_examples=120, deadline=None)
@given(drawn(), st.data())
def test_a_damaged_text_is_not_another_shop(instance: tuple[Write, Jobs, int], data: Any) -> None:
    """What is cut off or has more than its counts say is an error that names the line."""
    write, jobs, m = instance
    text = write(jobs, m)
    width = max(machine for job in jobs for ways in job for machine, _ in ways)
    seconds = np.full((sum(map(len, jobs)), width), np.inf)
    for row, ways in zip(seconds, (ways for job in jobs for ways in job), strict=True):
        for machine, time in ways:
            row[machine - 1] = time
    ends = np.cumsum([len(job) for job in jobs])
    edges = [[k - 1, k] for k in range(1, ends[-1]) if k not in ends]
    try:
        got = _read(text)
    except FormatError as error:
        assert "can be read as" in str(error)
        return
    assert got == (seconds.tolist(), edges)
    assert shop.looks_like(text)
    spaced = re.sub(r" ", "\t ", text).replace("\n", " # end\r\n\r\n")
    assert write is or_library or _read(spaced) == got
    words = text.removesuffix(" ++++\n").split(" ") if write is or_library else text.split(" ")
    kind = data.draw(st.sampled_from(["cut", "lines", "more", "row"]))
    lines = text.removesuffix(" ++++\n").splitlines(keepends=True)
    if kind == "cut":
        damaged = " ".join(words[: data.draw(st.integers(0, len(words) - 1))])
    elif kind == "lines":
        damaged = "".join(lines[: data.draw(st.integers(0, len(lines) - 1))])
    elif kind == "more":
        damaged = "".join(lines).rstrip("\n") + f" {data.draw(st.integers(0, 9))}\n"
    else:
        damaged = "".join(lines) + data.draw(st.sampled_from([lines[-1], "1\n", "1 2\n", "x\n"]))
    if not damaged.split() or not shop.looks_like(damaged):
        return
    try:
        assert _read(damaged) == got, "only the mark of an end is gone"
    except FormatError as error:
        assert re.match(r"f\.txt, line \d+: |f\.txt: can be read as", str(error))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2**5)), min_size=1, max_size=5), st.data()
)
def test_a_damaged_task_graph_is_not_another(tasks: list[tuple[int, int]], data: Any) -> None:
    """Lines or words that are missing, or too many, are an error that names the line."""
    rows = [[0, 0, 0]]
    for k, (time, mask) in enumerate([*tasks, (0, 2**6 - 1)], start=1):
        before = [u for u in range(k) if mask >> u & 1] or [0]
        rows.append([k, time, len(before), *before])
    text = _lines([len(tasks)], *rows)
    assert stg.looks_like(text) and stg.read(text, "f.stg").num_ops == len(rows)
    words, lines = text.split(" "), text.splitlines(keepends=True)
    damaged = data.draw(
        st.sampled_from([" ".join(words[:k]) for k in range(1, len(words))])
        | st.sampled_from(["".join(lines[:k]) for k in range(2, len(lines))])
        | st.sampled_from([text + lines[-1], text + "9\n", text[:-1] + " 1\n"])
    )
    if stg.looks_like(damaged):
        with pytest.raises(FormatError, match=r"^f\.stg(, line \d+)?: "):
            stg.read(damaged, "f.stg")


def test_several_in_a_text(tmp_path: Path) -> None:
    """As OR-Library and Taillard pass them on: for bench, each is a problem; loaded, none."""
    jobs: Jobs = [[[(1, 3)], [(2, 5)]], [[(2, 4)], [(1, 2)]]]
    text = or_library(jobs, 2)
    (tmp_path / "two").write_text(text + text.replace("abz5", "abz6").replace("4 1 2", "4 1 x"))
    (tmp_path / "tai.txt").write_text(taillard(jobs, 2) * 2)
    (tmp_path / "LICENSE").write_text("none")
    written(tmp_path / ".git/HEAD", text)
    known = [{"name": "abz5", "optimum": 8}, {"name": "abz6", "bounds": {"upper": 9, "lower": 7}}]
    written(tmp_path / "instances.json", known)
    by_name = {case.problem: case for case in cases("shops", tmp_path)}
    assert list(by_name) == ["tai/1", "tai/2", "two/abz5", "two/abz6"]
    bounds = [(case.lower_bound, case.best_known) for case in by_name.values()]
    assert bounds == [(7, 99), (7, 99), (8, 8), (7, 9)]
    same = [by_name[name].load().compute_s.tolist() for name in ("tai/2", "two/abz5")]
    assert same[0] == same[1]
    with pytest.raises(FormatError, match=r"two: abz6, line 15: a duration = 'x' is not a number"):
        by_name["two/abz6"].load()
    with pytest.raises(FormatError, match="2 shops are in it: placement bench shops"):
        importers.load(tmp_path / "tai.txt")


RECORDS = [
    {"job": job, "operation": op, "machine": machine, "duration": time}
    for job, op, machine, time in ((0, 1, 0, 5), (0, 0, 0, 3), (1, 0, 1, 2))
]
RUNS = [{"machine": m, "processing": time} for m, time in ((0, 3), (0, 5), (1, 2))]
NESTED = [[[RUNS[0]], [RUNS[1]]], [[RUNS[2]]]]


@pytest.mark.parametrize(
    "data",
    [
        {"instance": "x", "machines": 2, "jobs": 2, "data": RECORDS},
        {"name": "x", "duration_matrix": [[3, 5], [2]], "machines_matrix": [[0, 0], [1]]},
        {"machines": 2, "jobs": NESTED},
    ],
)
def test_as_json(data: dict[str, Any], tmp_path: Path) -> None:
    """Of ScheduleOpt, job_shop_lib and SchedulingLab; jobs may visit a machine twice."""
    path = written(tmp_path / "x.json", data)
    problem = importers.load(path)
    assert problem.graph.name == "x" and problem.graph.edges.tolist() == [[0, 1]]
    assert problem.compute_s.tolist() == [[3, np.inf], [5, np.inf], [np.inf, 2]]
    mistakes: list[dict[str, Any]] = [{"machines_matrix": [[0], [1, 1]]}] if "name" in data else []
    if "data" in data:
        mistakes = [{"jobs": 3}, {"machines": 1}, {"data": RECORDS[:1]}, {"data": RECORDS * 2}]
    for mistake in mistakes:
        with pytest.raises(FormatError, match=r"x.json: data.*job|differ in their shape"):
            importers.load(written(path, data | mistake))


def test_several_machines_of_a_matrix_may_run_an_operation(tmp_path: Path) -> None:
    data = {"duration_matrix": [[3, 5]], "machines_matrix": [[[0, 1], [2]]], "name": "x"}
    path = written(tmp_path / "x.json", data)
    inf = np.inf
    assert importers.load(path).compute_s.tolist() == [[3, 3, inf], [inf, inf, 5]]
    with pytest.raises(FormatError, match="release_dates_matrix: an operation that may not begin"):
        importers.load(written(path, data | {"release_dates_matrix": [[0, 4]]}))
    assert importers.load(written(path, data | {"release_dates_matrix": [[0, 0]]})).num_ops == 2


def test_a_flow_shop_in_pairs_is_said_to_be_read_as_a_job_shop(tmp_path, capsys):
    path = written(tmp_path / "flow.txt", "2 3\n0 5 1 8 2 1\n0 7 1 3 2 4\n")
    with pytest.warns(UserWarning, match="in the same order, as in a flow shop.*as a job shop"):
        assert importers.load(path).num_ops == 6
    assert main(["import", str(path), "--out", str(tmp_path / "p.json")]) == 0
    assert "placement: warning: " in (said := capsys.readouterr().err) and "flow shop" in said
    for other in ("2 3\n0 5 1 8 2 1\n0 7 2 3 1 4\n", "1 2\n0 5 1 8\n", "2 1\n0 5\n0 7\n"):
        with warnings.catch_warnings(action="error"):  # another order; one job; one machine
            importers.load(written(path, other))


def test_a_flow_shop_is_refused(tmp_path: Path) -> None:
    title = "number of jobs, number of machines, initial seed, upper bound and lower bound :\n"
    text = f"{title}2 2 87 12 11\nprocessing times :\n5 8\n7 3\n"
    with pytest.raises(FormatError, match="line 1: in a flow shop every machine keeps one order"):
        importers.load(written(tmp_path / "tai20_5.txt", text))
