"""Replicas as planners' answers: turns by speed, what takes no part, and what others make of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.bounds import lower_bound
from placement.importers import save
from placement.plan import load_plan, make_plan
from placement.planners import PlannerError, load
from placement.planners.data_parallel import deal
from placement.planners.phase_search import unrolled
from placement.problem import Problem
from placement.replan import remaining
from placement.runs.compare import compare
from placement.simulator import score
from placement.testing import check_planner
from tests.problems import altered, random_placement, random_problem, small_problem
from tests.problems import chain as edges


def chain(seconds: list[list[float]], *, params: int = 0, memory: int = 2**40) -> Problem:
    """A chain on CPU devices of one memory: nothing that is sent takes time."""
    sizes = {"tensor_bytes": 8, "param_bytes": params, "memory_bytes": memory}
    return small_problem(seconds, edges(len(seconds)), devices="cpu:{}", max_phases=16, **sizes)


def test_a_device_of_a_third_of_the_speed_takes_every_fourth() -> None:
    solution = load("data_parallel")(chain([[1.0, 3.0], [2.0, 6.0]]))
    assert solution.stats["turns"] == {"cpu:0": 3, "cpu:1": 1}
    assert solution.placement.tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]
    assert solution.value_s == 9 / 4
    # The best device alone, where others do not help.
    solution = load("data_parallel")(chain([[1.0, 100.0]]))
    assert solution.placement.tolist() == [0] and solution.value_s == 1.0
    # Joules decide which turns are best, and seconds how they are dealt: 15 J and 18 J a turn.
    watts = {"busy_w": lambda d: 10.0 if d.name == "cpu:0" else 1.0, "idle_w": 5.0}
    energy = altered(chain([[1.0, 3.0]]), watts).with_objective("energy")
    assert load("data_parallel")(energy).stats["turns"] == {"cpu:0": 3, "cpu:1": 1}
    few = replace(chain([[1.0, 3.0]]), max_phases=3)  # with every third its turns take 3 / 3
    assert load("data_parallel")(few).value_s == 1.0


def test_who_cannot_run_or_hold_it_all_takes_no_part() -> None:
    problem = chain([[1.0, 1.0, 1.0], [1.0, np.inf, 1.0]], params=10, memory=100)
    problem = altered(problem, {"memory_bytes": lambda d: 15 if d.name == "cpu:2" else 100})
    solution = load("data_parallel")(problem)
    assert solution.placement.tolist() == [0, 0] and solution.value_s == 2.0
    # Replicas of stages help: what the second and third device can take, they take.
    assert load("best_of")(problem).value_s < 2.0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_no_deal_is_better(seconds: list[int], most: int) -> None:
    turn = deal(np.array(seconds, float), most)

    def period(turns: Any) -> float:
        count = np.bincount(turns, minlength=len(seconds))
        return float((count * seconds).max()) / len(turns)

    lists = (itertools.product(range(len(seconds)), repeat=k) for k in range(1, most + 1))
    least = min(map(period, itertools.chain.from_iterable(lists)))
    assert period(turn) == pytest.approx(least)
    assert len(turn) <= most


def test_it_says_why_it_has_no_answer() -> None:
    with pytest.raises(PlannerError, match="objective latency is of one alone"):
        load("data_parallel")(chain([[1.0, 1.0]]).with_objective("latency"))


@pytest.mark.parametrize("name", ["data_parallel", "replicated", "best_of", "phase_search"])
def test_contracts(name: str) -> None:
    options = {"start": "heft", "evaluations": 200} if name == "phase_search" else {}
    for seed, objective in enumerate(("period", "energy", "max_load")):
        problem = random_problem(seed, objective=objective)
        check_planner(load(name, **options), [replace(problem, max_phases=6)])


@pytest.mark.parametrize("evaluations", range(1, 10))
def test_a_search_over_phases_keeps_to_few_evaluations(evaluations: int) -> None:
    problem = replace(chain([[1.0, 1.0]] * 2), max_phases=4)
    check_planner(load("phase_search", start="heft", evaluations=evaluations), [problem])


@given(st.integers(0, 10_000), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_copies_of_a_graph_have_the_loads_of_its_phases(seed: int, phases: int) -> None:
    problem = random_problem(seed, objective="max_load", grouped=True)
    p = np.stack([random_placement(problem, seed + k) for k in range(phases)])
    (value,) = score(problem, [p])
    assert score(unrolled(problem, phases), p.ravel())[0] == pytest.approx(value, rel=1e-9)


def test_a_search_over_phases_uses_a_slow_device_for_what_it_is_good_at() -> None:
    # Two devices; the third is slow, but for the last operator, which it takes in some phases.
    seconds = [[3.0, 3.0, 90.0], [5.0, 5.0, 90.0], [2.0, 2.0, 2.0]]
    problem = chain(seconds).with_objective("max_load")
    before = load("best_of")(problem)
    solution = load("phase_search", seed=0)(problem)
    assert before.value_s == 5.0  # one operator of 5 s, or 3 + 5 + 2 on two replicas
    assert solution.value_s == pytest.approx(4.0)  # 3 + 5 in turns, and 2 on the third
    with pytest.raises(PlannerError, match="phases = 99, the problem allows 16"):
        load("phase_search", phases=99)(problem)


@given(st.integers(0, 10_000))
@settings(max_examples=6, deadline=None)
def test_best_of_is_no_worse_with_replicas_and_searches_start_without(seed: int) -> None:
    problem = random_problem(seed, num_devices=2)
    free = replace(problem, max_phases=4)
    solution, before = load("best_of")(free), load("best_of")(problem)
    assert solution.value_s <= before.value_s * (1 + 1e-9)
    assert solution.lower_bound_s == lower_bound(free)
    search = load("local_search", evaluations=40, seed=0)(free)
    assert search.placement.ndim == 1
    if np.isfinite(solution.value_s):
        assert solution.value_s == pytest.approx(score(free, solution.placement[None])[0])
        plan = make_plan(free, solution, planner="best_of")
        assert plan.inconsistencies() == []


def test_a_heavy_stage_is_replicated_by_turns() -> None:
    # 1 s, 6 s, and parameters that fit once: the heavy operator on three of four devices.
    problem = chain([[2.0] * 4, [6.0] * 4], params=10, memory=60)
    solution = load("replicated")(problem)
    assert solution.value_s == 2.0
    assert solution.placement.tolist() == [[0, 1], [0, 2], [0, 3]]


def test_a_comparison_takes_no_replica_for_a_defect(tmp_path: Path) -> None:
    problems = {"one": chain([[1.0, 1.0]])}
    planners = {x: load(x) for x in ("data_parallel", "single_device", "best_of")}
    rows = compare(problems, planners, out_dir=tmp_path).rows
    by_name = {row.planner: row for row in rows}
    assert by_name["data_parallel"].value_s == 0.5 and by_name["data_parallel"].gap < 1e-6
    assert by_name["single_device"].gap == pytest.approx(1.0)
    again = compare(problems, planners, out_dir=tmp_path)
    assert again.solutions["one", "data_parallel", None].placement.shape == (2, 1)


def test_replicas_go_on_without_a_device_that_is_lost() -> None:
    problem = chain([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    solution = load("data_parallel")(problem)
    left = remaining(problem, ["cpu:1"])
    again = load("best_of")(left)
    assert solution.value_s == 1.0 and again.value_s == 1.5
    assert again.placement.tolist() == [[0, 0], [1, 1]] and left.cluster.num_devices == 2
    alone = load("best_of")(remaining(problem, ["cpu:0", "cpu:2"]))
    assert alone.placement.tolist() == [0, 0] and alone.value_s == 3.0


def test_the_command(tmp_path: Path, says: Any) -> None:
    save(chain([[1.0, 3.0], [2.0, 6.0]]).one_phase, tmp_path / "problem.json")
    plan = ["plan", str(tmp_path / "problem.json"), "--planner", "data_parallel"]
    assert "--max-phases 16" in says(plan, 2).err
    says([*plan, "--max-phases", "0"], 2)
    out = str(tmp_path / "plan.json")
    answer = says([*plan, "--max-phases", "8", "--json", "--out", out]).json
    assert answer["turns"] == {"cpu:0": 3, "cpu:1": 1}
    assert answer["phases"] == [{}, {}, {"op0": "cpu:1", "op1": "cpu:1"}]
    assert len(load_plan(out).assignments) == 4
    for command, text in (
        (["show", out], "take turns in 4 phases"),
        (["validate", out], "valid"),
        (["diff", out, out], "every operator is on the same device"),
    ):
        assert text in says(command).out
    model = ["plan", "tiny_mlp", "--planner", "heft"]
    said = says([*model, "--max-phases", "8", "--measurements", "9"], 2).err
    assert "use --max-phases 1 with it" in said
    for name in ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "searched"):
        text = says([*plan, "--max-phases", "8", "--scheduler", name], 2).err
        assert "4 phases" in text and "list_order" in text
    ordered = [*plan, "--max-phases", "8", "--scheduler", "list_order", "--out", out]
    assert "add --microbatches 12" in says([*ordered, "--microbatches", "9"], 2).err
    says([*ordered, "--microbatches", "12"])
    assert load_plan(out).order is not None
    says(["validate", out])
    says([*plan, "--max-phases", "8", "--out", out])
    says(["report", out, "--out", tmp_path / "report.html"])
    table = tmp_path / "x.csv"
    assert "micro-batches take turns" in says(["export", out, "--to", "csv", "--out", table], 1).err
    says(["export", out, "--to", "csv", "--out", table, "--nearest"])
    assert "cpu:0" in table.read_text()


def test_a_buffer_that_changes_stays_where_memory_is_tight_too() -> None:
    problem = chain([[1.0, 1.0], [1.0, 1.0]], params=10, memory=60)
    assert problem.memory_may_bind
    program = SimpleNamespace(new_buffers=[(0, 1)])  # what op1 makes
    problem = replace(problem, graph=replace(problem.graph, program=program))
    assert load("data_parallel")(problem).placement.tolist() == [0, 0]
    assert np.isinf(score(problem, [[[0, 0], [1, 1]]])).all()
    problem.check_placement(load("phase_search", evaluations=100)(problem).placement)
