"""Real runs as an objective: cache, budget, drift, interruption."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.problem import ProblemError
from placement.runs.trials import TrialError, Trials, fingerprint
from placement.simulator import score
from placement.timeline import Timeline
from placement.tools.files import FileError
from tests.problems import altered
from tests.runtimes import Biased, layered, noise

PROBLEM = layered(6)
A, B, C, D = np.eye(4, 6, dtype=np.int32)


def test_latency_is_of_micro_batches_alone_and_period_of_many() -> None:
    for objective in ("latency", "period"):
        problem = layered(6, objective=objective)
        trials = Trials(problem, Biased(problem))
        assert trials([A, B]) == pytest.approx(score(problem, [A, B]), rel=0.02)


def test_what_has_run_is_not_run_again_and_the_two_fastest_are_with_every_batch() -> None:
    runtime = Biased(PROBLEM)
    trials = Trials(PROBLEM, runtime)
    first = trials([A, B, A])
    assert runtime.runs == [tuple(A), tuple(B)] and first[0] == first[2]
    fast, slow = (tuple((A, B)[i]) for i in np.argsort(first[:2]))
    trials([B, C])
    # The second round runs backwards: the new one, then the others, the fastest last.
    assert runtime.runs[2:] == [tuple(C), slow, fast]
    trials([A, B, C])
    assert len(runtime.runs) == 5 == trials.num_measurements
    assert len(trials.samples.index) == 5 and len(trials.samples.placements) == 3


def test_a_lucky_run_is_found_out_beside_what_it_replaced() -> None:
    order = np.argsort(score(PROBLEM, [A, B, C, D]))
    fast, other, new, lucky = np.array([A, B, C, D])[order]
    # Runs: fast | lucky, fast | then by levels. The second one takes a third of its time.
    trials = Trials(PROBLEM, Biased(PROBLEM, lambda run: 1 / 3 if run == 1 else 1.0))
    trials([fast]), trials([lucky])
    assert (trials.incumbent == lucky).all()
    trials([new]), trials([other])
    assert (trials.incumbent == fast).all()


def test_rounds_are_interleaved_and_an_interruption_counts_for_little() -> None:
    # Runs: A B | B A | A B. One of A is interrupted: a mean would be 44 % off, or 67.
    runtime = Biased(PROBLEM, lambda run: 3.0 if run == 3 else 1.0)
    levels = Trials(PROBLEM, runtime, rounds=3)([A, B])
    assert runtime.runs == [tuple(x) for x in (A, B, B, A, A, B)]
    expected = score(PROBLEM, [A, B])
    assert levels == pytest.approx(expected, rel=0.1)


def test_drift_cancels_in_the_ratio_to_the_incumbent() -> None:
    truth = score(PROBLEM, [A, B, C, D])
    # From the third round on everything takes 1.5 times as long.
    runtime = Biased(PROBLEM, lambda run: 1.0 if run < 5 else 1.5)
    trials = Trials(PROBLEM, runtime)
    for batch in ([A, B], [A, B, C], [A, D], [A, B]):
        trials.measure(batch)
    assert trials.levels / truth == pytest.approx(np.full(4, trials.levels[0] / truth[0]), rel=0.02)
    assert trials.drift[2:] / trials.drift[0] == pytest.approx([1.5, 1.5], rel=0.02)


class Sleeps(Biased):
    """Takes ``sleeps_s`` of the wall where operator 1 is on device 1, before it answers."""

    sleeps_s = 0.0

    def run(self, placement: Any, **limits: Any) -> Timeline:
        time.sleep(self.sleeps_s * placement[1])
        return super().run(placement, **limits)


def test_what_runs_beyond_the_limit_is_worth_inf_and_what_hangs_is_known(tmp_path: Path) -> None:
    runtime, file = Sleeps(PROBLEM), tmp_path / "trials.jsonl"
    runtime.sleeps_s = 0.3
    trials = Trials(PROBLEM, runtime, limit_s=0.15)
    assert trials([B]).tolist() == [np.inf]  # B has operator 1 on device 1
    assert trials([A, C]) == pytest.approx(score(PROBLEM, [A, C]), rel=0.02)
    trials([D])
    assert runtime.runs.count(tuple(B)) == 1  # and is not run with every batch
    runtime.sleeps_s = 2.0
    hanging = Trials(PROBLEM, runtime, path=file, limit_s=0.05)
    with pytest.raises(TrialError, match=r"has not ended after 0.25 s.*resume=true"):
        hanging([A, B, C])
    again = Trials(PROBLEM, Biased(PROBLEM), path=file, limit_s=0.05)
    assert again.samples.placements.tolist() == []  # not asked for yet
    assert again([A, B]).tolist() == [pytest.approx(score(PROBLEM, [A])[0]), np.inf]


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(PROBLEM, Biased(PROBLEM, lambda run: 1.0), path=tmp_path / "t.jsonl")
    trials.path = Path("/dev/full")
    with pytest.raises(FileError, match="cannot write /dev/full: no space left"):
        trials.measure([A])


def test_another_order_is_another_problem() -> None:
    assert fingerprint(PROBLEM) != fingerprint(altered(PROBLEM, provenance={"order": "reuse"}))


def test_a_budget_of_measurements_counts_incumbents() -> None:
    runtime = Biased(PROBLEM)
    trials = Trials(PROBLEM, runtime, measurements=5)
    trials([A, B])
    assert trials.num_left == 3 and trials.used == 0.4
    with pytest.raises(TrialError, match="before 1 placements have run: allow more than 5"):
        trials([C, D])  # A, B and C use up what is left
    assert len(runtime.runs) == 5 and trials.num_left == 0
    assert np.isfinite(trials([A, B, C])).all()  # these are known
    with pytest.raises(TrialError, match=r"the budget is spent: 5 of 5 runs"):
        trials.measure([A])


def test_what_does_not_fit_never_runs_and_what_turns_out_not_to_is_worth_inf() -> None:
    problem = layered(6)
    blocked = problem.profile.compute_s.copy()
    blocked[1, 1] = np.inf
    problem = altered(problem, {"memory_bytes": 2**40}, compute_s=blocked)

    class Hungry(Biased):
        def run(self, *args: Any, **kwargs: Any) -> Timeline:
            line = super().run(*args, **kwargs)
            much = np.full(2, 2**41 if self.runs[-1] == tuple(C) else 2**40)
            return replace(line, peak_bytes=much)

    runtime = Hungry(problem)
    trials = Trials(problem, runtime)
    values = trials([A, B, C])
    assert np.isfinite(values).tolist() == [True, False, False]
    assert runtime.runs == [tuple(A), tuple(C)]
    assert (trials.incumbent == A).all() and trials.fastest(5).tolist() == [A.tolist()]
    trials.measurements = 7  # of which A has what is left of them
    while trials.take_turn():
        pass
    assert runtime.runs == [tuple(A), tuple(C), *[tuple(A)] * 5]


def test_what_has_no_memory_on_a_gpu_does_not_fit() -> None:
    class Raises(Biased):
        error = "CUDA out of memory. Tried to allocate 2 GiB"

        def run(self, placement: Any, **limits: Any) -> Timeline:
            if placement[1]:
                raise RuntimeError(self.error)
            return super().run(placement, **limits)

    runtime = Raises(PROBLEM)
    assert np.isfinite(Trials(PROBLEM, runtime)([A, B, C])).tolist() == [True, False, True]
    runtime.error = "an operator is broken"
    with pytest.raises(RuntimeError, match="an operator is broken"):
        Trials(PROBLEM, runtime)([A, B])


def test_interrupted_trials_continue(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"

    def batches(trials: Trials) -> None:
        for batch in ([A, B], [B, C], [C, D]):
            trials.measure(batch)

    whole = Trials(PROBLEM, Biased(PROBLEM, noise(0.1, 0.0, 0)))
    batches(whole)

    def interrupted(run: int) -> float:
        if run == 3:
            raise KeyboardInterrupt
        return drawn(run)

    drawn = noise(0.1, 0.0, 0)
    with pytest.raises(KeyboardInterrupt):
        batches(Trials(PROBLEM, Biased(PROBLEM, interrupted), path=path))
    assert len(path.read_text().splitlines()) == 2  # what they are of, and one whole round
    with path.open("a") as file:
        file.write('{"took_s":1.0,"seco')  # as if it had been killed while it wrote
    rest = Biased(PROBLEM)
    again = Trials(PROBLEM, rest, path=path, measurements=6)
    assert again.num_measurements == 0  # played back as it is asked for
    batches(again)
    assert rest.runs == [tuple(x) for x in (C, B, C, D)] and again.num_measurements == 6
    assert again.samples.seconds[:2] == pytest.approx(whole.samples.seconds[:2])
    none = Biased(PROBLEM)
    third = Trials(PROBLEM, none, path=path)
    batches(third)
    assert not none.runs and np.array_equal(third.samples.seconds, again.samples.seconds)


def test_other_rounds_than_the_file_has_are_run_and_what_it_has_is_known(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    Trials(PROBLEM, Biased(PROBLEM), path=path)([A, B])
    runtime = Biased(PROBLEM)
    trials = Trials(PROBLEM, runtime, path=path)
    assert trials([B, C])[0] > 0  # not what came first in the file, but B is in it
    assert trials.num_measurements == 5 and len(trials([A, B, C])) == 3
    assert runtime.runs[0] == tuple(C) and {*runtime.runs[1:]} == {tuple(A), tuple(B)}
    other = Trials(PROBLEM, runtime, path=path)
    other.measure([D])
    assert other.num_measurements == 6


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    Trials(PROBLEM, Biased(PROBLEM), path=path).measure([A])
    with pytest.raises(TrialError, match="another problem"):
        Trials(PROBLEM.with_objective("latency"), Biased(PROBLEM), path=path)
    path.write_text("hello\n")
    with pytest.raises(TrialError, match="holds no trials"):
        Trials(PROBLEM, Biased(PROBLEM), path=path)


def test_errors() -> None:
    with pytest.raises(TrialError, match=r"not max_load; use problem.with_objective\('period'\)"):
        Trials(PROBLEM.with_objective("max_load"), Biased(PROBLEM))
    for name in ("measurements", "limit_s"):
        with pytest.raises(TrialError, match=f"{name} = 0 must be positive"):
            Trials(PROBLEM, Biased(PROBLEM), **{name: 0})
    for device in (-1, PROBLEM.num_devices, 70):
        with pytest.raises(ProblemError, match=f"is on device {device}"):
            Trials(PROBLEM, Biased(PROBLEM))([[device] * 6])


def test_samples_of_nothing() -> None:
    trials = Trials(PROBLEM, Biased(PROBLEM))
    assert trials.incumbent is None and len(trials.levels) == 0
    assert len(trials.samples.index) == 0 and trials.used == 0.0
