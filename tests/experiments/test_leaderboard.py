"""The table of planners on proved optima, and the table of published learners: small runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import leaderboard
from experiments.learned import __main__ as learned
from experiments.learned import published
from experiments.study import run
from placement.runs import bench

SHOP = {
    "operations": [
        {"operation": operation, "machine": machine, "duration": 3 + operation}
        for operation in (0, 1)
        for machine in (0, 1)
    ],
    "precedences": [],
}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    part = leaderboard.Part("shops", "*", "a shop")
    monkeypatch.setattr(leaderboard, "PARTS", (part,))
    monkeypatch.setattr(leaderboard, "ENTRIES", ("heft", "single_device"))
    folder = tmp_path / "data/shops"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(SHOP))
    bounds = {"a": {"lower_bound": 4, "upper_bound": 4}}
    (folder / "best_known.json").write_text(json.dumps(bounds))
    places = {"--data": tmp_path / "data", "--out": tmp_path / "out", "--work": tmp_path / "work"}
    return [str(x) for pair in places.items() for x in pair]


def test_a_row_is_added_and_the_others_stay(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run(leaderboard.STUDY, words) == 0
    first = leaderboard.STUDY.read(tmp_path / "out")
    assert [(r.planner, r.gap, r.optimal) for r in first] == [
        ("heft", 0.0, 1.0),
        ("single_device", 0.75, 0.0),
    ]
    asked: list[Any] = []

    def measured(case: Any, planner: Any) -> bench.BenchRow:
        asked.append(planner)
        return bench.measure(case, planner)

    monkeypatch.setattr(leaderboard, "measure", measured)
    assert run(leaderboard.STUDY, [*words, "--planner", "order_search evaluations=9 width=2"]) == 0
    assert len(asked) == 1 and asked[0].width == 2
    assert run(leaderboard.STUDY, [*words, "--planner", "heft"]) == 0 and len(asked) == 1
    rows = leaderboard.STUDY.read(tmp_path / "out")
    assert rows[:1] == first[:1] and rows[2:] == first[1:]
    assert rows[1].planner == "order_search evaluations=9 width=2"
    assert run(leaderboard.STUDY, [*words, "--planner", "heft", "--again"]) == 0 and len(asked) == 2
    page = (tmp_path / "out/leaderboard.md").read_text()
    assert "### shops `*`: a shop" in page and "| `single_device` | 75.00 % |" in page


def test_published_learners_are_trained_once_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(published, "METHODS", ("post",))
    monkeypatch.setattr(published, "FILES", ())
    monkeypatch.setattr(published, "DRAWN", ())
    monkeypatch.setattr(published, "RULES", ("heft",))
    monkeypatch.setattr(published, "SEARCHES", ("order_search",))
    monkeypatch.setattr("experiments.learned.study.warm", lambda *_: None)
    monkeypatch.setattr(published, "machines", lambda: [published.synthetic.giph(0)])
    words = [
        *("published", "--seeds", "1", "--steps", "32", "--evaluations", "20"),
        *("--seconds", "0.3", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")),
    ]
    assert learned.main(words) == 0
    page = capsys.readouterr().out
    cells = published.STUDY.read(tmp_path / "out")
    trained = [c for c in cells if c.group == published.TRAINING]
    assert [c.planner for c in trained] == ["post"]
    missing = [c for c in cells if c.value_s is None and c.group != published.TRAINING]
    assert not missing, missing
    spent = [c.used_evaluations for c in cells if c.group == "evaluations"]
    assert max(n for n in spent if n is not None) <= 20
    assert page.count("| post | ") == 2 and "Every planner had an answer" in page
    monkeypatch.setattr("agents.training.train", None)
    assert learned.main(words) == 0 and capsys.readouterr().out == page
