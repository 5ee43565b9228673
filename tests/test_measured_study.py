"""The study of few real measurements: what it counts, resumes and reports."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from runtimes import Biased, layered, noise, with_errors

from experiments import measured
from experiments._study import StudyError
from experiments.measured import OURS, QUICK, RANDOM, RANKED, SINGLE


def test_a_rehearsal_and_the_same_command_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["tiny_cnn", "--quick", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    assert measured.main(command) == 0
    text = capsys.readouterr().out
    assert re.search(rf"\| tiny_cnn \| {OURS} \| 12 \| \d\.\d+ \(\d", text)
    assert f"| tiny_cnn | {RANDOM} | 20 |" in text
    with (tmp_path / "measured.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {r["way"] for r in rows} > {OURS, RANKED, RANDOM, f"{SINGLE}cpu:0", f"{SINGLE}cpu:1"}
    assert len((tmp_path / "measured_curves.csv").read_text().splitlines()) > 4

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("this was finished already")

    monkeypatch.setattr("placement.executor.Executor.run", fail)
    assert measured.main(command) == 0
    assert capsys.readouterr().out == text


def test_an_interruption_is_told_and_what_has_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = layered(12)
    folder = tmp_path / "work" / "quick" / "it"
    monkeypatch.setattr(measured, "prepare", lambda *_: problem)

    class Interrupted(Biased):
        def __init__(self, problem: object) -> None:
            super().__init__(problem)  # type: ignore[arg-type]

        def run(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            if len(self.runs) == 40:
                raise KeyboardInterrupt
            return super().run(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("placement.executor.Executor", Interrupted)
    command = ["it", "--quick", "--out", str(tmp_path), "--work", str(tmp_path / "work")]
    assert measured.main(command) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert (folder / "random-0.jsonl").exists() and not (folder / "finals.jsonl").exists()


def test_ours_against_random_on_a_machine_unlike_the_simulator(tmp_path: Path) -> None:
    problem = layered(24, seed=5)
    hidden = with_errors(problem, 0.3, seed=5)
    budget = replace(QUICK, measurements=40, random=100, seeds=2, evaluations=256)
    runtime = Biased(hidden, noise(0.01, 0.05, 0))
    rows, summaries, points = measured.compete("it", problem, runtime, tmp_path, budget)
    by_way = {s.way: s for s in summaries}
    assert by_way[OURS].against_random[0] > 1.0
    assert by_way[OURS].gain[0] > 1.5  # of two devices
    assert by_way[RANDOM].against_random == (1.0, 1.0, 1.0)
    assert max(by_way[f"{SINGLE}{d}"].gain[0] for d in "ab") == pytest.approx(1.0)
    assert [r.num_runs for r in rows if r.way == OURS] == [40, 40]
    assert len({(p.way, p.seed) for p in points}) == 4
    # 100 random ones and their incumbents, 4 searches, and at most 13 finalists three times.
    assert 100 + 6 + 4 * 40 < len(runtime.runs) <= 100 + 6 + 4 * 40 + 3 * 13


def test_ratios_and_their_intervals() -> None:
    # Twice as fast in every round and seed; then seeds 2 and 8 times: 4 on average, 2 to 8.
    assert measured.interval(np.full((5, 3), np.log(2))) == pytest.approx((2.0, 2.0, 2.0))
    logs = np.log(np.tile([2.0, 8.0], (5, 1)))
    assert measured.interval(logs) == pytest.approx((4.0, 2.0, 8.0))
    # One interrupted round of five does not count.
    assert measured.interval(np.array([[0.0], [0.0], [5.0], [0.0], [0.0]]))[0] == 1.0


def test_who_is_compared_with_whom() -> None:
    problem = layered(3)
    eye = np.eye(3, dtype=np.int32)
    entries = {
        (f"{SINGLE}a", 0, 0): eye[0],
        (f"{SINGLE}b", 0, 0): eye[1],
        (RANDOM, 0, 500): eye[2],
        (RANDOM, 1, 500): 1 - eye[2],
        (OURS, 0, 100): 1 - eye[1],
    }
    seconds = np.tile([6.0, 4.0, 3.0, 2.0, 1.0], (3, 1)) * np.array([[1.0], [2.0], [1.0]])
    rows, summaries = measured.judge("it", problem, entries, seconds)
    assert rows[-1].measured_s == 1.0
    assert rows[-1].gain == pytest.approx(4.0) and rows[-1].against_random == pytest.approx(2.0)
    assert [s.way for s in summaries] == [f"{SINGLE}a", f"{SINGLE}b", RANDOM, OURS]
    assert [s.num_as_good for s in summaries] == [0, 0, 1, 1]  # of all random ones, the best


def test_random_placements_are_different() -> None:
    problem = layered(10)
    drawn = measured.draw(problem, 50, 0)
    assert len(np.unique(drawn, axis=0)) == 50
    assert not np.array_equal(drawn, measured.draw(problem, 50, 1))
    with pytest.raises(StudyError, match="no 9 different random placements fit"):
        measured.draw(layered(3), 9, 0)
