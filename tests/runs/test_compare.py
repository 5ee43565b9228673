"""Comparisons: known answers, honesty rules, interruption and resumption, files."""

from __future__ import annotations

import csv
import json
import linecache
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from hashlib import sha256
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from placement.cluster import Link
from placement.planners import PlannerError
from placement.problem import Problem, Solution
from placement.report.table import CompareError, Comparison, geometric_interval, mape, spearman
from placement.runs import compare as module
from placement.runs.compare import compare, describe, problem_fingerprint
from placement.search.planner import Budget
from placement.simulator import simulate
from placement.timeline import Timeline
from placement.tools.files import FileError
from tests.problems import altered, random_problem, small_problem
from tests.problems import chain as edges
from tests.runtimes import Biased


def chain(**changes: Any) -> Problem:
    """Four operators of 1, 2, 3 and 2 s in a row, two equal devices, free transfers.

    One device:  period 8, latency 8.
    0 0 1 1:     period max(1 + 2, 3 + 2) = 5, latency 8.
    Bounds:      period 8 / 2 = 4, latency 8.
    """
    seconds = changes.pop("seconds", np.repeat([[1.0], [2.0], [3.0], [2.0]], 2, axis=1))
    graph = {"name": "chain", "op_name": list("abcd")}
    facts = {"devices": "cpu:{}", "links": (Link("cpu:0", "cpu:1"),), "graph": graph}
    facts |= {"num_microbatches": 16, **changes}
    return small_problem(seconds, edges(4), tensor_bytes=8, **facts)


@dataclass(frozen=True)
class Fixed:
    """Answers one placement, and says ``note``."""

    calls: ClassVar[list[Any]] = []  # of all of them
    placement: tuple[int, ...]
    lower_bound_s: float | None = None
    note: str | None = None

    def __call__(self, problem: Problem) -> Solution:
        self.calls.append(self.placement)
        placement = np.array(self.placement, np.int32)
        # A planner that flatters itself: its own value is not what is reported.
        stats = {"evaluations": 7} | ({"message": self.note} if self.note else {})
        return Solution(placement, 1e-9, self.lower_bound_s, stats)


@dataclass(frozen=True)
class Seeded:
    seed: int = 0
    seconds: float | None = None
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        rng = np.random.default_rng(self.seed)
        placement = rng.integers(problem.num_devices, size=problem.num_ops).astype(np.int32)
        return Solution(placement, 0.0, stats={"evaluations": self.evaluations, "s": self.seconds})


class Slower(Biased):
    """Real devices that take ``factor`` times the prediction; writes down every run in ``log``."""

    def __init__(self, problem: Problem, factor: float, log: list[Any], fail_at: int) -> None:
        super().__init__(problem, lambda run: factor)
        self.log, self.fail_at = log, fail_at

    def run(self, placement: Any, *, num_microbatches: int, **window: Any) -> Timeline:
        if len(self.log) == self.fail_at:
            raise KeyboardInterrupt
        self.log.append((tuple(np.asarray(placement).tolist()), num_microbatches))
        timeline = super().run(placement, num_microbatches=num_microbatches, **window)
        return replace(timeline, measured=True)


def slower(factor: float = 1.25, log: Any = None, fail_at: int = -1) -> Callable[..., Slower]:
    runs: list[Any] = [] if log is None else log
    return lambda problem: Slower(problem, factor, runs, fail_at)


SPLIT = {"split": Fixed((0, 0, 1, 1))}


def row(comparison: Comparison, planner: str) -> module.Row:
    (match,) = [r for r in comparison.rows if r.planner == planner]
    return match


def test_a_known_comparison(tmp_path: Path) -> None:
    comparison = compare({"w": chain()}, SPLIT, out_dir=tmp_path)
    single, split = row(comparison, "single:cpu:0"), row(comparison, "split")
    assert (single.period_s, single.latency_s, single.speedup) == pytest.approx((8, 8, 1))
    assert (split.period_s, split.latency_s, split.value_s) == pytest.approx((5, 8, 5))
    assert split.speedup == pytest.approx(8 / 5)
    assert split.bound_s == pytest.approx(4) and split.gap == pytest.approx(5 / 4 - 1)
    assert split.evaluations == 7 and split.measured_period_s is None and not comparison.is_measured
    assert comparison.best("w").planner == "split"


def test_the_note_is_what_the_planner_said(tmp_path: Path) -> None:
    planners = SPLIT | {"fell back": Fixed((0, 0, 1, 1), note="too little time")}
    comparison = compare({"w": chain()}, planners, out_dir=tmp_path)
    assert [row(comparison, name).note for name in planners] == ["", "too little time"]


def test_every_single_device_is_a_row_though_nobody_asked(tmp_path: Path) -> None:
    comparison = compare({"w": chain()}, {}, out_dir=tmp_path)
    assert [r.planner for r in comparison.rows] == ["single:cpu:0", "single:cpu:1"]


def test_measurements_errors_and_ratios(tmp_path: Path) -> None:
    comparison = compare({"w": chain()}, SPLIT, out_dir=tmp_path, executor=slower(1.25))
    split = row(comparison, "split")
    # Measured 6.25 s per micro-batch where 5 s were predicted: 5 / 6.25 - 1 = -20 %.
    assert split.measured_period_s == pytest.approx(6.25)
    assert split.period_error == pytest.approx(-0.2) == split.latency_error
    assert split.measured_latency_s == pytest.approx(10)
    assert split.measured_period_iqr_s == 0 and split.num_rounds == 5
    assert split.measured_speedup == pytest.approx(10 / 6.25)
    fidelity = comparison.fidelity()
    assert fidelity is not None and fidelity.num_placements == 3
    assert fidelity.period_mape == pytest.approx(0.2)
    assert fidelity.period_spearman == pytest.approx(1) and np.isnan(fidelity.latency_spearman)
    (gain,) = comparison.gains()
    assert (gain.mean, gain.low, gain.high) == pytest.approx((1.6, 1.6, 1.6))


def test_equal_placements_share_one_measurement_and_all_take_turns(tmp_path: Path) -> None:
    runs: list[Any] = []
    planners = {"a": Fixed((0, 0, 1, 1)), "b": Fixed((0, 0, 1, 1)), "c": Fixed((0, 0, 0, 0))}
    compare({"w": chain()}, planners, out_dir=tmp_path, executor=slower(1, runs), rounds=2)
    one = [(p, m) for p in ((0,) * 4, (1,) * 4, (0, 0, 1, 1)) for m in (4, 16)]
    assert runs == one + one  # round by round, not placement by placement


def test_speedup_of_latency_where_that_is_the_objective(tmp_path: Path) -> None:
    slow_second = np.array([[1.0, 2], [2, 4], [3, 1], [2, 1]])
    problem = chain(seconds=slow_second, objective="latency")
    comparison = compare({"w": problem}, SPLIT, out_dir=tmp_path)
    # 1 + 2 + 1 + 1 = 5 s, the best single device takes min(8, 8) s, the critical path 5 s.
    split = row(comparison, "split")
    assert (split.value_s, split.speedup, split.gap) == pytest.approx((5, 1.6, 0))


def test_a_planner_without_answer_is_a_row_with_the_reason(tmp_path: Path) -> None:
    planners = {"wrong": Fixed((0, 0, 1, 2))} | SPLIT
    comparison = compare({"w": chain()}, planners, out_dir=tmp_path, executor=slower())
    wrong = row(comparison, "wrong")
    assert not wrong.feasible and np.isinf(wrong.value_s) and "device 2" in wrong.note
    assert wrong.num_rounds == 0 and wrong.speedup is None
    # It counts as the best single device: leaving it out would flatter it.
    assert {g.planner: g.mean for g in comparison.gains()}["wrong"] == 1.0


def test_a_bug_in_a_planner_is_not_swallowed(tmp_path: Path) -> None:
    def broken(problem: Problem) -> Solution:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compare({"w": chain()}, {"broken": broken}, out_dir=tmp_path)


def test_what_does_not_fit_is_infeasible_and_never_run(tmp_path: Path) -> None:
    runs: list[Any] = []
    seconds = np.array([[1.0, 1], [2, 2], [3, 3], [2, np.inf]])
    some = {"w": chain(seconds=seconds)}
    comparison = compare(some, {}, out_dir=tmp_path, executor=slower(1, runs), rounds=1)
    assert row(comparison, "single:cpu:1").note == "operator 'd' cannot run on it"
    assert {p for p, _ in runs} == {(0, 0, 0, 0)}

    tight = compare({"w": chain(memory_bytes=1)}, {}, out_dir=tmp_path, executor=slower(1, runs))
    assert not any(r.feasible for r in tight.rows) and len(runs) == 2
    assert row(tight, "single:cpu:0").note == "does not fit in memory"
    alone = row(tight, "single:cpu:0")
    assert (alone.period_s, alone.latency_s, alone.energy_j) == (inf, inf, None)
    with pytest.raises(CompareError, match="no planner found a placement that fits"):
        tight.best("w")


def test_a_workload_that_no_single_device_fits_has_no_speedup(tmp_path: Path) -> None:
    # Either device lacks one operator: only a split can run, and there is nothing to compare with.
    seconds = np.array([[1.0, 1], [2, np.inf], [np.inf, 3], [2, 2]])
    planners = SPLIT | {"wrong": Fixed((0, 0, 0, 0))}
    split_only = chain(seconds=seconds)
    alone = compare({"w": split_only}, planners, out_dir=tmp_path / "a")
    assert row(alone, "split").speedup is None and alone.gains() == ()

    both = compare({"w": split_only, "v": chain()}, planners, out_dir=tmp_path / "b")
    assert both.without_single() == ["w"]
    means = {g.planner: (g.num_cells, g.mean) for g in both.gains()}
    assert means == {"split": (1, pytest.approx(8 / 5)), "wrong": (1, pytest.approx(1.0))}
    assert "left out: w" in (tmp_path / "b" / "compare.md").read_text()


def test_a_proved_bound_of_one_planner_serves_all(tmp_path: Path) -> None:
    planners = {"a": Fixed((0, 0, 1, 1), lower_bound_s=4.5), "b": Fixed((0, 1, 0, 1))}
    comparison = compare({"w": chain()}, planners, out_dir=tmp_path)
    assert {r.bound_s for r in comparison.rows} == {4.5}
    # A bound above the value of its own answer (5 s) proves nothing: nobody's gap is of it.
    planners |= {"liar": Fixed((0, 0, 1, 1), lower_bound_s=6.0)}
    comparison = compare({"w": chain()}, planners, out_dir=tmp_path)
    assert {r.bound_s for r in comparison.rows} == {4.5}
    liar = comparison.solutions["w", "liar", None]
    assert liar.value_s == pytest.approx(5.0) and liar.lower_bound_s is None


def test_seeds_and_budgets_are_set_where_a_planner_has_them(tmp_path: Path) -> None:
    planners = {"seeded": Seeded(), "fixed": Fixed((0, 0, 1, 1))}
    comparison = compare({"w": chain()}, planners, (3, 5), budget=Budget(2.0, 9), out_dir=tmp_path)
    keys = [(r.planner, r.seed, r.evaluations) for r in comparison.rows if r.planner in planners]
    assert keys == [("seeded", 3, 9), ("seeded", 5, 9), ("fixed", None, 7)]
    assert comparison.solutions["w", "seeded", 3].stats["s"] == 2.0
    assert {g.planner: g.num_cells for g in comparison.gains()} == {"seeded": 2, "fixed": 1}


def test_resume_after_an_interruption_in_planning(tmp_path: Path) -> None:
    Fixed.calls.clear()
    good = {f"p{i}": Fixed((0, 0, i, 1)) for i in (0, 1)}

    def interrupt(problem: Problem) -> Solution:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare({"w": chain()}, {**good, "stop": interrupt}, out_dir=tmp_path)
    assert len(Fixed.calls) == 2
    ends = {**good, "stop": Seeded()}
    again = compare({"w": chain()}, ends, out_dir=tmp_path)
    assert len(Fixed.calls) == 2, "what was finished is not planned again"
    fresh = compare({"w": chain()}, ends, out_dir=tmp_path / "fresh")
    assert [replace(r, plan_s=0) for r in again.rows] == [replace(r, plan_s=0) for r in fresh.rows]
    assert again.solutions["w", "p1", None].placement.dtype == np.int32


def test_what_a_gpu_has_no_memory_for_is_a_row_with_the_reason_and_does_not_run_again(tmp_path):
    runs: list[Any] = []

    class Short(Slower):
        def run(self, placement: Any, **options: Any) -> Timeline:
            timeline = super().run(placement, **options)
            if len({*np.asarray(placement).tolist()}) > 1:
                raise RuntimeError("CUDA out of memory")
            return timeline

    short = lambda problem: Short(problem, 1.0, runs, -1)  # noqa: E731
    for _ in range(2):
        comparison = compare({"w": chain()}, SPLIT, out_dir=tmp_path, executor=short, rounds=2)
        split = row(comparison, "split")
        assert split.note == "was short of memory when it ran" and split.measured_period_s is None
        assert row(comparison, "single:cpu:0").measured_period_s == pytest.approx(8)
        assert comparison.fidelity().num_placements == 2
        assert runs.count(((0, 0, 1, 1), 4)) == 1


def test_resume_after_an_interruption_in_measuring(tmp_path: Path) -> None:
    problems, runs, again = {"w": chain()}, list[Any](), list[Any]()
    # 3 placements x 2 runs: the eighth run is the second one of round 2.
    with pytest.raises(KeyboardInterrupt):
        compare(problems, SPLIT, out_dir=tmp_path, executor=slower(1, runs, 7), rounds=3)
    assert len(runs) == 7
    comparison = compare(problems, SPLIT, out_dir=tmp_path, executor=slower(1, again), rounds=3)
    # 9 samples in all, 3 of them complete before; the half of the fourth is repeated.
    assert len(again) == 2 * (9 - 3)
    assert {r.num_rounds for r in comparison.rows} == {3}


def test_another_set_of_placements_is_measured_anew(tmp_path: Path) -> None:
    # Ratios must not compare what ran today with what ran yesterday.
    runs: list[Any] = []
    one, two = {"a": Fixed((0, 0, 1, 1))}, {"b": Fixed((0, 1, 1, 1))}
    compare({"w": chain()}, one, out_dir=tmp_path, executor=slower(1, runs), rounds=1)
    before = len(runs)
    compare({"w": chain()}, one | two, out_dir=tmp_path, executor=slower(1, runs), rounds=1)
    assert len(runs) - before == 2 * 4


def test_another_problem_or_parameter_is_not_resumed(tmp_path: Path) -> None:
    changes = {"objective": "latency", "num_microbatches": 8, "max_in_flight": 2}
    changes |= {"memory_bytes": 2**41, "seconds": np.ones((4, 2))}
    others = [(chain(**{name: value}), Seeded()) for name, value in changes.items()]
    runs = [(chain(), Seeded()), *others, (chain(), Seeded(evaluations=1))]
    for count, (problem, planner) in enumerate(runs, 1):
        compare({"w": problem}, {"p": planner}, out_dir=tmp_path)
        assert len(list((tmp_path / "cells").iterdir())) == count


@pytest.mark.parametrize("device", [None, 7, 2**40])
def test_a_damaged_cell_is_planned_again(tmp_path: Path, device: int | None) -> None:
    """One that is cut off, or names a device that is not there."""
    Fixed.calls.clear()
    compare({"w": chain()}, SPLIT, out_dir=tmp_path)
    (cell,) = (tmp_path / "cells").iterdir()
    whole = cell.read_text()
    other = re.sub(r"\[\s*0,", f"[{device},", whole)
    cell.write_text(whole[:40] if device is None else other)
    assert cell.read_text() != whole
    compare({"w": chain()}, SPLIT, out_dir=tmp_path)
    assert len(Fixed.calls) == 2
    assert json.loads(cell.read_text())["solution"]["placement"] == [0, 0, 1, 1]


def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    compare({"../../w": chain()}, {"/etc/p": Fixed((0, 0, 1, 1))}, out_dir=out, executor=slower())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    written = ["cells", "compare.csv", "compare.md", "measured", "problems"]
    assert sorted(p.name for p in out.iterdir()) == written


def test_a_policy_trained_further_is_another_planner(tmp_path: Path) -> None:
    net = nn.Linear(1, 1)  # of which torch prints everything but the weights
    again = deepcopy(net)
    assert describe(again) == describe(net)
    again.weight.data += 1.0
    assert describe(again) != describe(net)
    file = tmp_path / "policy.npz"
    file.write_bytes(b"one")
    before = describe(str(file))
    file.write_bytes(b"two")
    assert describe(str(file)) != before


def test_describe_goes_into_planners_and_names_functions() -> None:
    @dataclass(frozen=True)
    class Outer:
        start: Any
        names: tuple[str, ...] = ("a",)

    description, code = describe(Outer(Seeded(seed=4))), sha256(Path(__file__).read_bytes())
    assert description["start"] == {
        "class": f"{__name__}.Seeded", "code": code.hexdigest(), "seed": 4, "seconds": None,
        "evaluations": None
    }  # fmt: skip
    assert description["names"] == ["a"] and describe(chain)["name"] == f"{__name__}.chain"
    assert describe(describe) == "placement.runs.compare.describe"  # ours does not count


@pytest.mark.parametrize("has_file", [True, False])
def test_a_planner_of_edited_code_is_asked_again(tmp_path, monkeypatch, has_file):
    """The file of a module, or the cell of a notebook, whose lines Python keeps."""
    mine, source = ModuleType("mine"), tmp_path / "mine.py"
    vars(mine)["Fixed"] = Fixed
    if has_file:
        mine.__file__ = str(source)
    monkeypatch.setitem(sys.modules, "mine", mine)

    def periods(device: int) -> list[float]:
        text = f"def answer(problem):\n    return Fixed((0, 0, 0, {device}))(problem)\n"
        source.write_text(text)
        linecache.cache[str(source)] = len(text), None, text.splitlines(True), str(source)
        exec(compile(text, str(source), "exec"), vars(mine))
        compared = compare({"w": chain()}, {"own": mine.answer}, out_dir=tmp_path)
        return [row.period_s for row in compared.rows if row.planner == "own"]

    assert (periods(1), periods(0), periods(1)) == ([6.0], [8.0], [6.0])
    assert len(list((tmp_path / "cells").iterdir())) == 2


def test_fingerprint_ignores_names_and_provenance() -> None:
    again = altered(chain(), provenance={"when": "now"})
    assert problem_fingerprint(chain()) == problem_fingerprint(again)


def test_csv_has_every_field_at_full_precision(tmp_path: Path) -> None:
    problem = chain(seconds=np.full((4, 2), 1 / 3))
    some = {"w": problem}, {"p": Seeded()}, (0, 1)
    comparison = compare(*some, out_dir=tmp_path, executor=slower())
    with (tmp_path / "compare.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(comparison.rows) == 4
    for line, made_row in zip(lines, comparison.rows, strict=True):
        assert line["planner"] == made_row.planner
        assert float(line["period_s"]) == made_row.period_s
        assert line["seed"] == ("" if made_row.seed is None else str(made_row.seed))
        assert float(line["measured_latency_s"]) == made_row.measured_latency_s


@pytest.mark.parametrize(
    ("options", "why"),
    [
        *(({k: v}, "at least one") for k, v in (("seeds", ()), ("rounds", 0), ("problems", {}))),
        ({"planners": {"single:cpu:0": Seeded()}}, "single:"),  # it may not pose as one device
    ],
)
def test_what_cannot_be_compared(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    arguments = {"problems": {"w": chain()}, "planners": {}, "out_dir": tmp_path, **options}
    with pytest.raises(CompareError, match=why):
        compare(**arguments)


@pytest.mark.parametrize("budget", [{"seconds": -3.0}, {"seconds": np.nan}, {"evaluations": 0}])
def test_budgets_are_positive(budget: dict[str, Any]) -> None:
    with pytest.raises(PlannerError, match=f"{next(iter(budget))} = .* must be positive"):
        Budget(**budget)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="not a folder"):
        compare({"w": chain()}, {"p": Seeded()}, out_dir=tmp_path / "file")


def test_mape_and_spearman_on_known_numbers() -> None:
    assert mape([1, 2, 3], [2, 2, 2]) == pytest.approx((0.5 + 0 + 0.5) / 3)
    # Two neighbours swapped among n: 1 - 6 * 2 / (n * (n^2 - 1)).
    assert spearman([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(1 - 12 / 60)
    assert spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    # Ties at their mean rank: ranks 1.5 1.5 3 against 1 2 3.
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(np.sqrt(3) / 2)
    assert np.isnan(spearman([1], [1])) and np.isnan(spearman([1, 1], [1, 2]))


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_the_interval_holds_the_mean(values: list[float]) -> None:
    low, high = geometric_interval(values)
    mean = float(np.exp(np.mean(np.log(values))))
    assert min(values) * (1 - 1e-9) <= low <= high <= max(values) * (1 + 1e-9)
    assert low <= mean * (1 + 1e-9) and mean <= high * (1 + 1e-9)


@pytest.mark.parametrize("count", [6, 40])  # of six, plain percentiles cover 86 %
def test_the_interval_covers_as_often_as_it_says(rng: np.random.Generator, count: int) -> None:
    drawn = rng.normal(0.3, 0.2, (600, count))
    ends = np.array([geometric_interval(np.exp(logs), 500) for logs in drawn])
    assert 0.90 <= np.mean((ends[:, 0] <= np.exp(0.3)) & (np.exp(0.3) <= ends[:, 1])) <= 0.98


def test_more_seeds_of_the_same_workloads_are_not_more_workloads(rng: np.random.Generator) -> None:
    each = np.exp(rng.normal(0.3, 0.2, 12))
    once = geometric_interval(list(each), 2000)
    assert geometric_interval([[x] * 5 for x in each], 2000) == pytest.approx(once, rel=0.02)
    seeds = [1.0, 1.2, 1.1]
    alone = geometric_interval(seeds, 2000)
    assert geometric_interval([seeds], 2000) == pytest.approx(alone, rel=0.02)


@pytest.mark.parametrize("seed", range(25))
def test_rows_agree_with_the_simulator(tmp_path: Path, seed: int) -> None:
    problem = random_problem(seed, grouped=True, unsupported=True)
    comparison = compare({"w": problem}, {"p": Seeded()}, out_dir=tmp_path)
    for each in comparison.rows:
        if each.feasible:
            placement = comparison.solutions["w", each.planner, each.seed].placement
            one = simulate(problem, placement, num_microbatches=1)
            assert each.latency_s == pytest.approx(one.latency_s)
            assert each.period_s == pytest.approx(simulate(problem, placement).period_s)
            assert each.gap is None or each.gap >= -1e-9
