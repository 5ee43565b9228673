"""Studies of the learned planner: cells, budgets, statistics, and the page of results."""

import os
import re
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents import training
from experiments import grid as cells
from experiments import measured as by_clock
from experiments import results, study
from experiments.grid import Cell, Task, least, ratios
from experiments.learned import dispatch, folds, resched, split
from experiments.learned import problems as made
from experiments.study import Finished
from experiments.tables import geometric, share, to_csv
from placement import importers
from placement.problem import Problem, Solution
from placement.simulator import score
from placement.workloads.synthetic import Family, layered
from tests.experiments.test_experiments import needs_data
from tests.problems import altered, small_problem, written
from tests.runtimes import Biased
from tests.runtimes import layered as layered_problem

SMALL = Family(layered(3, 3, 0.5), num_devices=2)(0)


@dataclass(frozen=True)
class Late:
    """Finds device 0 at once, and after its budget a better placement."""

    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0

    def __call__(self, problem: Problem) -> Solution:
        first, better = np.zeros((2, problem.num_ops), np.int32)
        better[-1] = 1
        values = score(problem, np.stack([first, better]))
        curve = [(0.1, 1, 2 * values.max()), (0.2, 2, values.max()), (9.0, 3, values[1])]
        stats = {"seconds": 9.0, "evaluations": 3, "curve": curve}
        return Solution(better, float(values[1]), None, stats)


@dataclass(frozen=True)
class Fails:
    def __call__(self, problem: Problem) -> Solution:
        raise ZeroDivisionError("oh")


@dataclass(frozen=True)
class Busy:
    """Works for as long as its own clock says."""

    seconds: float | None = None

    def __call__(self, problem: Problem) -> Solution:
        began = time.perf_counter()
        while time.perf_counter() - began < (self.seconds or 0.0):
            time.sleep(0.001)
        here = np.zeros(problem.num_ops, np.int32)
        stats = {"seconds": time.perf_counter() - began, "evaluations": 1}
        return Solution(here, float(score(problem, here)[0]), None, stats)


def cell(problem: str, planner: str, seed: int | None, value_s: float | None, **more: Any) -> Cell:
    usual: dict[str, Any] = {"group": "load seconds", "objective": "latency", "note": "a, b"}
    usual |= {"operators": 9, "devices": 2, "budget_s": 1.0, "budget_evaluations": None}
    usual |= {"found_s": None, "used_s": 0.5, "used_evaluations": 10, "status": "ok"}
    return Cell(problem=problem, planner=planner, seed=seed, value_s=value_s, **usual | more)


def run(folder: Path, task: Task, problem: Problem = SMALL) -> Cell:
    return task.run(Finished(folder), "p", problem)


# --- cells ---------------------------------------------------------------------------------------


def test_what_is_found_after_the_budget_does_not_count(tmp_path: Path) -> None:
    whole = run(tmp_path, Task("g", "late", Late()))
    in_time = run(tmp_path, Task("g", "late", Late(), seconds=1.0))
    few = run(tmp_path, Task("g", "late", Late(), evaluations=2))
    none = run(tmp_path, Task("g", "late", Late(), seconds=0.01))
    assert whole.value_s is not None and in_time.value_s is not None
    assert whole.value_s < in_time.value_s == few.value_s
    assert (in_time.found_s, in_time.used_s, in_time.used_evaluations) == (0.2, 9.0, 3)
    assert none.value_s is None and none.status == "over budget"
    text = cells.enforced([whole, in_time, few])
    assert "2 of 3 runs" in text and "9.000 of its seconds" in text


def test_finished_cells_are_not_run_again_and_mistakes_are(tmp_path: Path) -> None:
    task = Task("g", "late", Late(), 3)
    first = run(tmp_path, task)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"ok"', '"kept"'))
    assert run(tmp_path, task) == replace(first, status="kept")
    # Another seed, problem, budget or planner is another cell.
    run(tmp_path, replace(task, seed=4))
    run(tmp_path, task, SMALL.with_objective("latency"))
    assert len(list(tmp_path.iterdir())) == 3
    failed = run(tmp_path, Task("g", "fails", Fails()))
    assert (failed.status, failed.value_s) == ("failed", None)
    assert "ZeroDivisionError: oh" in failed.note
    assert len(list(tmp_path.iterdir())) == 3


def test_an_answer_that_does_not_fit_is_infeasible(tmp_path: Path) -> None:
    """Whatever its planner says of it: the simulator decides."""
    row = run(tmp_path, Task("g", "late", Late()), altered(SMALL, {"memory_bytes": 1}))
    assert (row.status, row.value_s, row.curve) == ("infeasible", None, ())


def test_seconds_are_processor_seconds(tmp_path: Path) -> None:
    """A planner that sleeps uses little of its budget: it goes on for longer."""
    clock = time.perf_counter
    began = time.perf_counter()
    row = run(tmp_path, Task("g", "busy", Busy(), seconds=0.02))
    assert time.perf_counter() - began > 2 * row.used_s >= 2 * 0.02
    assert time.perf_counter is clock


# --- statistics ----------------------------------------------------------------------------------


def test_ratios_by_hand() -> None:
    some = [cell("p", "ours", 0, 2.0), cell("p", "ours", 1, 3.0), cell("q", "ours", 0, None)]
    some += [cell("p", "theirs", 0, 4.0), cell("p", "theirs", 1, 1.0)]
    some += [cell("p", "rule", None, 2.5), cell("q", "rule", None, 5.0)]
    best = least(some, ["theirs", "rule"])
    assert (best("p", 0), best("p", 1), best("q", 0), best("r", 0)) == (2.5, 1.0, 5.0, None)
    assert least([cell("p", "theirs", 3, 4.0)], ["theirs"])("p", 0) == 4.0  # its only seed
    # Without an answer it counts as ten times the other; it is not left out.
    assert ratios(some, "ours", best) == {"p": [0.8, 3.0], "q": [10.0]}
    assert cells.to_known(some, "rule") == {"p": [2.5], "q": [1.0]}


def test_geometric_means_and_their_intervals() -> None:
    mean = geometric({"p": [1.0, 4.0], "q": [1.0]})
    assert mean.value == pytest.approx(2**0.5) and mean.count == 2
    assert mean.low < mean.value < mean.high
    assert geometric({"p": [0.9]}).percent() == "-10.0 % (-10.0 to -10.0)"
    assert geometric({}).count == 0
    # 95 % of intervals hold the truth, about; one seed each is worth as much as the problems are.
    rng = np.random.default_rng(0)
    held = 0
    for drawn in np.exp(rng.normal(0.0, 0.1, (400, 6, 1))).tolist():
        estimate = geometric(dict(enumerate(drawn)), 400)
        held += estimate.low <= 1.0 <= estimate.high
    assert 360 <= held <= 395
    # Problems of a family that are all alike are worth one: 5 times as many say no more.
    alike = {(family, k): [0.8 + 0.1 * family] for family in range(5) for k in range(5)}
    one_each = {name: v for name, v in alike.items() if name[1] == 0}
    known, of_graphs = geometric(one_each), geometric(alike)
    estimate = geometric(alike, family=lambda name: name[0])
    assert estimate.value == pytest.approx(known.value) and estimate.count == 25
    assert (estimate.low, estimate.high) == pytest.approx((known.low, known.high), rel=0.02)
    assert of_graphs.high - of_graphs.low < 0.6 * (estimate.high - estimate.low)


def test_shares() -> None:
    assert share([True] * 8 + [False] * 2) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    assert share([True] * 10)[2] == pytest.approx(1.0)


# --- problems ------------------------------------------------------------------------------------


def test_twice_the_devices() -> None:
    problem = Family(layered(4, 4, 0.5), 3, speeds=(1.0, 2.0, 4.0))(0)
    twice = made.twice_the_devices(problem)
    assert twice.num_devices == 6
    assert np.array_equal(twice.compute_s, np.tile(problem.compute_s, (1, 2)))
    assert (twice.link_s_per_byte[~np.eye(6, dtype=bool)] > 0).all()
    rng = np.random.default_rng(0)
    placements = rng.integers(0, 3, (5, problem.num_ops)).astype(np.int32)
    # The first half of the devices is the machine as it was.
    assert score(twice, placements) == pytest.approx(score(problem, placements))


@needs_data
def test_families_from_files() -> None:
    count = {f: len(made.family(f, study.DATA)) for f in made.FAMILIES if f != "captured"}
    synthetic = {"synthetic": 2 * 20, "operator graphs": 4 + 2, "layer graphs": 6 + 3}
    assert count == synthetic | {"pipedream": 2 * 9, "moirai": 2 * 2}


@needs_data
def test_graphs_for_the_constructor_are_none_that_it_was_trained_on() -> None:
    problems = made.unseen(study.DATA)
    assert {k: len(v) for k, v in problems.items()} == {made.DRAWN: 14, made.REAL: 11}
    for problem in (p for some in problems.values() for p in some.values()):
        assert 300 <= problem.num_ops <= 1600 and problem.objective == "latency"
    assert {n.rpartition("-")[0] for n in problems[made.DRAWN]} == set(dispatch.FAMILIES)


# --- reports -------------------------------------------------------------------------------------


def test_constructors_are_compared_with_the_same_seed_where_there_are_several() -> None:
    def row(suite: str, who: str, seed: int, samples: int, value_s: float) -> dispatch.Row:
        return dispatch.Row(suite, f"of {suite}", who, seed, samples, value_s, 1.0)

    many = dispatch.EVALUATIONS
    rows = []
    for suite, untrained_s, trained_s in (("families", 2.0, 1.8), ("mk", 1.2, 1.1)):
        rows.append(row(suite, dispatch.UNTRAINED, 0, 1, untrained_s))
        rows += [row(suite, dispatch.TRAINED, k, 1, trained_s) for k in range(5)]
    for seed, planner_s, frozen_s in ((0, 1.0, 1.25), (1, 1.2, 1.5)):
        rows.append(row("mk", dispatch.PLANNER, seed, many, planner_s))
        rows.append(row("mk", dispatch.FROZEN, seed, many, frozen_s))
    ratios = dispatch.over(rows, dispatch.PLANNER, many, dispatch.FROZEN)
    assert ratios == {"of mk": pytest.approx([0.8, 0.8])}
    # 0.9 with each of five seeds against the only untrained one; 0.8 in the planner.
    parts = dispatch.parts(rows, Namespace())
    assert parts["seeds"] == 5 and "| trained | 1 | -10.0 % (" in parts["against"]
    assert "| shops | 1 | 2 | -20.0 % (" in parts["searched"]


def test_short_trainings_are_made_once_and_what_is_not_asked_for_stays(tmp_path, monkeypatch):
    chain = SMALL.with_objective("latency")
    monkeypatch.setattr(dispatch, "problems", lambda options: [("mk", "chain", chain, None)])
    few = ("PPO", "no look-ahead")
    small = {name: (*dispatch.SHORT[name], "training.samples=2") for name in few}
    monkeypatch.setattr(dispatch, "SHORT", small)
    monkeypatch.setattr(dispatch, "RESULTS", tmp_path)
    earlier = dispatch.Row("mk", "chain", dispatch.PLANNER, 0, dispatch.EVALUATIONS, 1.0)
    (tmp_path / f"{dispatch.NAME}.csv").write_text(to_csv([earlier]), encoding="utf-8")
    words = ["dispatch", "--only", "decoded", "--steps", "2000", "--seeds", "1"]
    options = study.parse([dispatch.STUDY], [*words, "--work", str(tmp_path)])
    rows = list(dispatch.rows(options))
    assert rows[0] == earlier
    short = [r for r in rows if r.who in (*small, dispatch.TUNED)]
    assert [r.samples for r in short] == [1, 16] * 3 and all(np.isfinite(r.value_s) for r in short)
    page = dispatch.STUDY.page(rows, options)
    assert "2,000 steps and 1 seeds" in page and page.count("\n| no look-ahead | 16 |") == 2
    monkeypatch.setattr(training, "train", None)
    assert list(dispatch.rows(options)) == rows


def test_one_decode_is_compared_with_a_published_network() -> None:
    """Of two files of each kind: ours 10 % above the best known, ReSched 20 %."""
    rows = [
        resched.Row(kind, f"{kind}{k}", who, known, known * ratio, 0.1)
        for kind in resched.SHOPS
        for who, ratio in ((resched.TRAINED, 1.1), (resched.PUBLISHED, 1.2))
        for k, known in enumerate((40.0, 600.0))
    ]
    parts = resched.parts(rows, Namespace())
    lines = {x.split("|")[1].strip(): x for x in parts["table"].splitlines()}
    assert lines[resched.TRAINED].count("| +10.0 % (") == 4
    assert lines[resched.PUBLISHED].count("| +20.0 % (") == 4
    assert parts["beside"].count("| -8.3 % (") == 4  # 1.1 / 1.2


# --- the page ------------------------------------------------------------------------------------


def test_the_pages_are_up_to_date() -> None:
    assert results.main(["--check"]) == 0, "run: python -m experiments.results"


def test_the_page_shows_its_picture_and_short_tables(tmp_path: Path) -> None:
    (tmp_path / "img").mkdir()
    there = ["--docs", str(tmp_path)]
    assert results.main(there) == 0
    page = (tmp_path / "results.md").read_text(encoding="utf-8")
    shown = {x.split(")")[0] for x in page.split("](img/")[1:]}
    assert shown == {p.name for p in (tmp_path / "img").iterdir()}
    assert all((results.DOCS / "img" / name).is_file() for name in shown)
    for question in page.split("\n## ")[1:]:
        assert question.startswith(("Do", "How", "Are", "What"))
        for table in re.findall(r"(?:^\|.*\n)+", question, re.MULTILINE):
            assert len(table.splitlines()) - 2 <= results.MOST_ROWS
    assert results.main([*there, "--check"]) == 0
    (tmp_path / "results.md").write_text(page + "more")
    assert results.main([*there, "--check"]) == 1


def test_a_cell_of_the_released_policy_is_run_again_when_that_is_another(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Learned:
        policy: str | None = None

        def __call__(self, problem: Problem) -> Solution:
            return Late()(problem)

    for weights in ("one", "one", "two"):
        monkeypatch.setattr(cells, "policy_digests", lambda folder, weights=weights: weights)
        run(tmp_path, Task("group", "policy", Learned()))
        run(tmp_path, Task("group", "mine", Learned("mine.safetensors")))
    assert sorted(f.name.split("-")[1] for f in tmp_path.iterdir()) == ["mine", "policy", "policy"]


def test_resched_gets_the_operations_of_a_shop_job_by_job(tmp_path: Path) -> None:
    """Two jobs of two and one operations: 3 s on machine 1 or 5 s on 2, then 2 s on 2; 4 s on 1."""
    path = written(tmp_path / "two.fjs", "2 2 1\n2 2 1 3 2 5 1 2 2\n1 1 1 4\n")
    job, position, seconds, direct, later = resched.their_arrays(importers.load(path))
    assert job.tolist() == [[0, 0, 1]] and position.tolist() == [[0, 1, 0]]
    assert seconds.tolist() == [[[3, 5], [0, 2], [4, 0]]]  # 0: that machine may not
    assert np.argwhere(direct[0]).tolist() == np.argwhere(later[0]).tolist() == [[0, 1]]


def test_a_folder_without_resched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(study.StudyError, match="git clone"):
        list(resched.shops(tmp_path))


# --- folds ---------------------------------------------------------------------------------------


def test_no_network_of_a_fold_is_judged_by_an_architecture_that_it_was_trained_on() -> None:
    every = [name for names in folds.folds() for name in names]
    assert len(every) == len(set(every)) == 153  # families of 576 graphs
    assert sum(map(len, folds.families().values())) == 576
    judged = folds.cases("latency")
    assert [c.machine for c in judged].count(folds.FOUR) == folds.FOLDS * folds.TESTED
    for case in judged:
        assert case.family not in folds.others(case.fold)
        assert len(folds.others(case.fold)) == 153 - len(folds.folds()[case.fold])


def fold_row(family: str, arm: str, seed: int | None, by_100_ms: float | None) -> folds.Row:
    usual: dict[str, Any] = {"machine": "four", "fold": 0, "objective": "latency", "operators": 9}
    usual |= dict.fromkeys(folds.COLUMNS.values()) | {"training_s": None, "first_s": None}
    usual |= {"by_100_ms": by_100_ms, "by_1_s": by_100_ms}
    return folds.Row(problem=family, family=family, arm=arm, seed=seed, **usual)


def test_an_arm_is_compared_with_rules_and_with_another_of_the_same_seed() -> None:
    rows = [fold_row("a", "rules", None, 2.0), fold_row("b", "rules", None, 4.0)]
    for seed, worth in ((0, 1.0), (1, 1.5)):
        rows += [fold_row("a", folds.MESSAGES, seed, worth), fold_row("a", "untrained", seed, 2.0)]
    rows.append(fold_row("b", folds.MESSAGES, 0, None))  # no answer in time
    # (1 / 2 x 1.5 / 2) ** 0.5 of both.
    for base in ("rules", "untrained"):
        mean = folds.over(rows, folds.MESSAGES, 0.1, base)
        assert (mean.value, mean.count) == (pytest.approx(0.375**0.5), 1)
    told = folds.endpoint(rows, "latency")
    assert told["reached"] == told["by_training"] == "yes"  # 0.5 to 0.75 are below 0.99
    same = [fold_row("a", folds.MESSAGES, seed, 2.0) for seed in range(3)]
    assert folds.endpoint([*rows[:2], *same], "latency")["reached"] == "no"
    page = folds.parts(rows, Namespace())
    # Of two graphs that it was judged on it has an answer of one.
    assert (
        "| latency | message passing | 2 | – | -38.76 % (-50.00 to -25.00), 1 graphs |"
        in (page["budgets"])
    )
    assert page["seeds_done"] == 0


def test_a_network_is_loaded_before_its_clock_runs(tmp_path: Path, monkeypatch: Any) -> None:
    """Trained or not: a run has a process of its own, which has what this one has loaded."""
    file = folds.untrained(Namespace(work=tmp_path), seed=7)
    loaded = []

    def judged(case: folds.Case, unit: folds.Unit, planner: Any, _: Any) -> folds.Row:
        misses = folds.policy_of.cache_info().misses
        folds.policy_of(planner.policy)
        loaded.append(folds.policy_of.cache_info().misses == misses)
        return fold_row("a", unit.arm, unit.seed, 1.0)

    monkeypatch.setattr(folds, "load_all", lambda *_: None)
    monkeypatch.setattr(folds, "judged", judged)
    # What ran here before is not of these minutes: processes of other tests took hours.
    monkeypatch.setattr(folds.os, "times", lambda: os.times_result((0, 0, 7200, 0, 0)))
    case = folds.Case("four", "a", "a", 0, small_problem([[1, 2]]), (0.1,))
    unit = folds.Unit(folds.MESSAGES, "latency", 0, 0)
    asked = folds.Asked(folds.RulesThenDecodes(str(file)))
    options = Namespace(arms=[], minutes=1, out=tmp_path, work=tmp_path)
    rows = folds.judge(folds.STUDY, [unit], lambda _: [case], lambda *_: asked, options)
    assert len([*rows]) == 1 and loaded == [True]


def test_headroom_of_pieces_by_hand() -> None:
    def rows_of(machine: str, one: float, rules: float, search: float) -> list[folds.Row]:
        arms = {folds.ONE_DEVICE: one, folds.BEST_RULE: rules, "order_search": search}
        rows = [fold_row("vit", arm, None, value) for arm, value in arms.items()]
        return [replace(row, machine=machine) for row in rows]

    # Whole: 8 s alone, rules 4, search 4. In pieces: 6 and 5, then 3 s.
    rows = [*rows_of(split.WHOLE, 8.0, 4.0, 4.0), *rows_of(folds.FOUR, 6.0, 5.0, 3.0)]
    named, every = split.of_pieces(rows)
    assert named == ("vit", 9, 9, 2.0, 2.0, 1.6, pytest.approx(8 / 3))
    assert every[0] == "all 1" and every[3:] == pytest.approx(named[3:])
    rows += [replace(fold_row("vit", folds.MESSAGES, 0, x), machine=folds.FOUR) for x in (2.9,)]
    page = split.parts(rows, Namespace())
    assert "| order_search | +0.00 % (+0.00 to +0.00) |" in page["budgets"]  # whole, 0.1 s
    assert page["reached"] == "reached" and page["seeds_done"] == 1  # 2.9 is 3.3 % below 3
    rows[-1] = replace(rows[-1], by_1_s=2.98)  # 0.7 % is not enough
    assert not split.reached(rows)


# --- by the clock --------------------------------------------------------------------------------


def test_every_way_has_as_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered_problem(12)
    ways = {name: by_clock.WAYS[name] for name in ("random", "bandit")}
    monkeypatch.setattr(by_clock, "ARMS", 6)
    unit = by_clock.Unit(1, "p", 24, 0)
    rows = list(by_clock.compete(unit, problem, Biased(problem), tmp_path, ways))
    assert [(r.way, r.ran) for r in rows] == [(name, 24) for name in ways]
    assert all(r.gain == pytest.approx(r.single_s / r.measured_s, rel=1e-6) for r in rows)
    again = list(by_clock.compete(unit, problem, Biased(problem), tmp_path, ways))
    assert again == rows  # played back from the files
