"""Real runs as an objective: cache, budget, drift, interruption."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.problem import ProblemError
from placement.runs.trials import TrialError, Trials, fingerprint, two_way
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
        assert trials([A, B]) == pytest.approx(score(problem, [A, B]))


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


def test_rounds_are_interleaved_and_their_median_counts() -> None:
    # Runs: A B | B A | A B. One of A is interrupted: its median does not notice.
    runtime = Biased(PROBLEM, lambda run: 3.0 if run == 3 else 1.0)
    medians = Trials(PROBLEM, runtime, rounds=3)([A, B])
    assert runtime.runs == [tuple(x) for x in (A, B, B, A, A, B)]
    expected = score(PROBLEM, [A, B])
    assert medians == pytest.approx(expected, rel=5e-3)
    assert medians[1] / medians[0] == pytest.approx(expected[1] / expected[0], rel=1e-3)


def test_drift_cancels_in_the_ratio_to_the_incumbent() -> None:
    truth = score(PROBLEM, [A, B, C, D])
    # From the third round on everything takes 1.5 times as long.
    runtime = Biased(PROBLEM, lambda run: 1.0 if run < 5 else 1.5)
    trials = Trials(PROBLEM, runtime)
    for batch in ([A, B], [A, B, C], [A, D], [A, B]):
        trials.measure(batch)
    assert trials.levels / truth == pytest.approx(np.full(4, trials.levels[0] / truth[0]), rel=1e-3)
    assert trials.drift[2:] / trials.drift[0] == pytest.approx([1.5, 1.5], rel=1e-3)


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
    assert trials([A, C]) == pytest.approx(score(PROBLEM, [A, C]))
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


def test_drift_cancels_where_the_incumbent_changes() -> None:
    # Rounds:   0     1     2     3     4      of placements 0, 1, 2: 10, 8 and 5 seconds
    #           0 1   0 1   1 2   1 2   2 3    on a machine that gets slower by 20 % each time
    index = np.array([0, 1, 0, 1, 1, 2, 1, 2, 2, 3])
    where = np.repeat(np.arange(5), 2)
    seconds = np.array([10.0, 8.0, 5.0, 6.0])[index] * 1.2**where
    level, drift = two_way(index, where, np.log(seconds))
    assert np.exp(level - level[0]) == pytest.approx([1.0, 0.8, 0.5, 0.6], rel=1e-3)
    assert np.exp(np.diff(drift)) == pytest.approx(np.full(4, 1.2), rel=1e-3)


def test_another_order_is_another_problem() -> None:
    assert fingerprint(PROBLEM) != fingerprint(altered(PROBLEM, provenance={"order": "reuse"}))


@pytest.mark.parametrize("slow", [1.6, 0.8])
def test_what_ran_before_tells_how_slow_a_round_is(slow: float) -> None:
    """In round 2 all takes 1.6 times as long; of its new placements nothing else says so."""
    #  rounds   0        1        2              seconds of 0..5
    index = np.array([0, 1, 0, 2, 0, 3, 4, 5])
    where = np.array([0, 0, 1, 1, 2, 2, 2, 2])
    usual = np.array([5.0, 6.0, 7.0, 7.5, 8.0, 6.5])
    seconds = usual[index] * np.where(where == 2, slow, 1.0)
    level, drift = two_way(index, where, np.log(seconds))
    assert np.exp(level) == pytest.approx(usual)
    assert np.exp(drift) == pytest.approx([1.0, 1.0, slow])
    # Where nothing runs again, nothing is known of the machine.
    level, drift = two_way(np.arange(4), np.array([0, 0, 1, 1]), np.arange(4.0))
    assert level.tolist() == [0.0, 1.0, 2.0, 3.0] and not drift.any()


@given(st.integers(0, 10_000))
def test_levels_of_a_steady_machine_are_medians(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 6))  # of two it may be the round as well
    rounds = 2 * int(rng.integers(1, 4)) + 1
    index = np.tile(np.arange(count), rounds)
    values = np.array([3.0, 1.0, 2.0, 7.0, 5.0])[index]
    spoiled = rng.permutation(rounds)[: rounds // 2]  # one placement, in fewer than half of them
    values[spoiled * count] += rng.exponential(2.0, len(spoiled))
    level, drift = two_way(index, np.repeat(np.arange(rounds), count), values)
    assert level == pytest.approx([3.0, 1.0, 2.0, 7.0, 5.0][:count], abs=0.01)
    assert drift == pytest.approx(np.zeros(rounds), abs=0.01)


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
