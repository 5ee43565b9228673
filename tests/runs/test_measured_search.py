"""Search with few real measurements, on machines that are not what the simulator thinks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from placement.cli import BAD_INPUT, INTERRUPTED
from placement.plan import load_plan
from placement.planners.macro_search import MacroSearch
from placement.runs.measured_search import search_measured
from placement.runs.trials import TrialError, Trials
from placement.simulator import score
from placement.timeline import Timeline
from tests.problems import altered, every_placement, written
from tests.runtimes import Biased, layered, with_errors


def test_the_optimum_of_the_machine_is_found() -> None:
    problem = layered(10)
    hidden = with_errors(problem, 0.3, seed=1, link=50)
    best_s = score(hidden, every_placement(hidden)).min()
    answer = search_measured(Trials(problem, Biased(hidden), measurements=60))
    assert score(hidden, answer.placement)[0] == pytest.approx(best_s, rel=0.01)
    assert answer.value_s == pytest.approx(score(problem, answer.placement)[0])
    assert answer.stats["measurements"] == 60
    assert answer.stats["measured_s"] == pytest.approx(best_s, rel=0.03)
    singles = score(hidden, [[0] * 10, [1] * 10])
    assert answer.stats["measured_single_s"] == pytest.approx(singles.min(), rel=0.03)


def test_an_interrupted_search_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    problem = layered(14)
    hidden = with_errors(problem, 0.2, seed=2)
    drawn = np.exp(0.02 * np.random.default_rng(0).standard_normal(40))

    def search(runtime: Biased, path: Path | None) -> object:
        trials = Trials(problem, runtime, measurements=30, path=path)
        return search_measured(trials, evaluations=64, seed=3)

    def interrupted(run: int) -> float:
        if run == 19:
            raise KeyboardInterrupt
        return float(drawn[run])

    whole, path = Biased(hidden, drawn.__getitem__), tmp_path / "trials.jsonl"
    expected = search(whole, None)
    with pytest.raises(KeyboardInterrupt):
        search(Biased(hidden, interrupted), path)
    finished = sum(line.count(",[") + 1 for line in path.read_text().splitlines()[1:])
    assert 0 < finished < 19
    rest = Biased(hidden, lambda run: float(drawn[run + finished]))
    again = search(rest, path)
    assert whole.runs[finished:] == rest.runs
    assert np.array_equal(again.placement, expected.placement)
    assert again.stats["curve"] == expected.stats["curve"]


def test_a_given_start_is_measured_first_and_nothing_slower_is_answered() -> None:
    problem = layered(14)
    hidden = with_errors(problem, 0.2, seed=2)
    start = MacroSearch(evaluations=5000)(hidden).placement
    runtime = Biased(hidden)
    answer = search_measured(Trials(problem, runtime, measurements=20), start, evaluations=64)
    assert runtime.runs[0] == tuple(start.tolist())
    assert score(hidden, answer.placement)[0] <= score(hidden, start)[0] * (1 + 1e-6)
    assert answer.stats["curve"][-1][0] == 20 and len(runtime.runs) == 20


def test_a_budget_smaller_than_the_start_and_problems_without_a_choice() -> None:
    problem = layered(6)
    answer = search_measured(Trials(problem, Biased(problem), measurements=1))
    assert answer.stats["measurements"] == 1
    fixed = altered(problem, compute_s=problem.compute_s * [1.0, np.inf])
    answer = search_measured(Trials(fixed, Biased(fixed), measurements=4))
    assert answer.placement.tolist() == [0] * 6 and answer.stats["measurements"] == 4
    tiny = layered(2)  # four placements: once all have run, the rest of the budget is for finals
    assert search_measured(Trials(tiny, Biased(tiny), measurements=30)).stats["measurements"] == 30


class Full(Biased):
    """A GPU that has no memory for whatever runs."""

    def run(self, placement: Any, **limits: Any) -> Timeline:
        raise RuntimeError("CUDA out of memory")


def test_what_other_runs_have_found_is_the_answer_of_a_budget_that_is_spent(tmp_path) -> None:
    problem, path = layered(6), tmp_path / "trials.jsonl"
    first = Trials(problem, Biased(problem), measurements=9, path=path)
    search_measured(first, [[0] * 3 + [1] * 3], evaluations=64)
    again = Biased(problem)
    trials = Trials(problem, again, measurements=9, path=path)
    answer = search_measured(trials, [[0, 1] * 3], evaluations=64)  # of a planner with a clock
    assert again.runs == [] and answer.stats["measurements"] == 9
    assert np.array_equal(answer.placement, first.incumbent)


def test_errors() -> None:
    problem = layered(6)
    with pytest.raises(TrialError, match=r"need a budget: Trials\(\.\.\., measurements=100\)"):
        search_measured(Trials(problem, Biased(problem)))
    full = altered(problem, {"memory_bytes": 1})
    with pytest.raises(TrialError, match="nothing to measure: nothing can fit in memory"):
        search_measured(Trials(full, Biased(full), measurements=9))
    with pytest.raises(TrialError, match=r"none of \d placements that ran fits in memory"):
        search_measured(Trials(problem, Full(problem), measurements=9))


@pytest.mark.usefixtures("quick_profiles")
def test_the_command_continues_what_was_interrupted(tmp_path, monkeypatch, says):
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path))
    trials, plan = str(tmp_path / "trials.jsonl"), str(tmp_path / "plan.json")
    command = ["plan", "tiny_mlp", "--planner", "heft", "--microbatches", "2", "--json"]
    command += ["--measurements", "8", "--trials", trials, "--out", plan]
    from placement.executor import Executor

    run, runs = Executor.run, list[int]()

    def counted(self: Executor, *args: Any, **kwargs: Any) -> Timeline:
        runs.append(1)
        if len(runs) == 7:
            raise KeyboardInterrupt
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Executor, "run", counted)
    says(command, INTERRUPTED)
    out, err = says(command)
    answer = json.loads(out)
    assert answer["measurements"] == 8 and answer["measured_s"] > 0
    assert "measured" in err and "in 8 runs; the best single device" in err
    saved = load_plan(plan)
    # Who chose is the search, and what it measured is there.
    assert saved.planner.name == answer["planner"] == "measured_search"
    parameters: Any = saved.planner.parameters
    assert parameters["measurements"] == 8 and parameters["start"]["planner"] == "heft"
    measured = saved.measured
    assert measured is not None and measured.latency_s is None and 1 <= measured.n <= 8
    assert saved.measured_s("period") == answer["measured_s"]
    rows = {x.split()[0]: x.split() for x in says(["show", plan]).out.splitlines() if x.strip()}
    assert rows["latency"][3] == "-" and rows["period"][3] != "-"
    assert dict(saved.assignment) == answer["assignment"]
    num_runs = len(runs)
    assert says(command).json["assignment"] == answer["assignment"]
    assert len(runs) == num_runs  # all is known


def test_a_plan_whose_micro_batches_take_turns_is_not_measured_as_one(monkeypatch, says):
    turns = SimpleNamespace(assignments=({"a": "cpu:0"}, {"a": "cpu:1"}))
    monkeypatch.setattr("placement.cli.plan._start", lambda args: turns)
    said = says(["plan", "--start", "turns.json", "--measurements", "4", "tiny_mlp"], BAD_INPUT).err
    assert "--max-phases 2: --measurements moves operators of all micro-batches" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tiny_mlp --trials t.jsonl", "--trials t.jsonl is for --measurements"),
        ("tiny_mlp --measurements 0", "--measurements 0 must be positive"),
        ("tiny_mlp --measurements 9 --objective energy", "period or latency, not energy"),
        ("tiny_mlp --measurements 9 --cluster away.yaml", "['far'] are described"),
        ("problem.json --measurements 9", "--measurements is for models"),
    ],
)
def test_commands_that_cannot_measure(words, message, tmp_path, monkeypatch, says):
    monkeypatch.chdir(tmp_path)
    devices = [{"name": "here"}, {"name": "far", "like": "here", "speed": 2.0}]
    written(tmp_path / "away.yaml", {"devices": devices})  # JSON is YAML
    written(tmp_path / "problem.json", "{}")
    assert message in says(["plan", *words.split(), "--planner", "heft"], BAD_INPUT).err
