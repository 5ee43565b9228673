"""The table of planners on proved optima, and the table of published learners: small runs."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from experiments import leaderboard
from experiments.learned import __main__ as learned
from experiments.learned import published
from experiments.study import run
from placement.runs import bench
from tests.problems import written

WAYS = [{"operation": k, "machine": m, "duration": 3 + k} for k in (0, 1) for m in (0, 1)]
SHOP = {"operations": WAYS, "precedences": []}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    part = leaderboard.Part("shops", "*", "a shop")
    monkeypatch.setattr(leaderboard, "PARTS", (part,))
    monkeypatch.setattr(leaderboard, "ENTRIES", ("heft", "single_device"))
    written(tmp_path / "data/shops/a.json", SHOP)
    bounds = {"a": {"lower_bound": 4, "upper_bound": 4}}
    written(tmp_path / "data/shops/best_known.json", bounds)
    places = {"--data": tmp_path / "data", "--out": tmp_path / "out", "--work": tmp_path / "work"}
    return [str(x) for pair in places.items() for x in pair]


def test_a_row_is_added_and_the_others_stay(words, tmp_path, monkeypatch):
    assert run(leaderboard.STUDY, words) == 0
    first = leaderboard.STUDY.read(tmp_path / "out")
    found = [(r.planner, r.gap, r.optimal) for r in first]
    assert found == [("heft", 0.0, 1.0), ("single_device", 0.75, 0.0)]
    monkeypatch.setattr(leaderboard, "measure", asked := Mock(wraps=bench.measure))
    assert run(leaderboard.STUDY, [*words, "--planner", "order_search evaluations=9 width=2"]) == 0
    assert asked.call_count == 1 and asked.call_args.args[1].width == 2
    assert run(leaderboard.STUDY, [*words, "--planner", "heft"]) == 0 and asked.call_count == 1
    rows = leaderboard.STUDY.read(tmp_path / "out")
    assert rows[:1] == first[:1] and rows[2:] == first[1:]
    assert rows[1].planner == "order_search evaluations=9 width=2"
    assert run(leaderboard.STUDY, [*words, "--planner", "heft", "--again"]) == 0
    assert asked.call_count == 2
    page = (tmp_path / "out/leaderboard.md").read_text()
    assert "### shops `*`: a shop" in page and "| `single_device` | 75.00 % |" in page


def test_published_learners_are_trained_once_and_run(tmp_path, monkeypatch, capsys):
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
