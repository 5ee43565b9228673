"""The examples run, in an empty folder, as they are in the repository."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "tour.ipynb"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["example"])


def run(name: str) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_tested() -> None:
    assert {p.name for p in EXAMPLES.iterdir() if p.suffix in (".py", ".ipynb")} == {
        "place_your_module.py",
        "compare_planners.py",
        "own_planner.py",
        "tour.ipynb",
    }


def test_place_your_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("place_your_module.py")
    assert "16 results, equal to the plain module's" in capsys.readouterr().out
    assert (tmp_path / "plan.json").exists()


def test_compare_planners(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["example", str(EXAMPLES / "branches.json")])
    run("compare_planners.py")
    out = capsys.readouterr().out
    assert "macro_search" in out and "best: " in out and max(map(len, out.splitlines())) <= 80


def test_own_planner(capsys: pytest.CaptureFixture[str]) -> None:
    run("own_planner.py")
    assert "rounds" in capsys.readouterr().out


def test_the_notebook_shows_what_it_makes() -> None:
    """Its cells are plain Python: no kernel is needed to run them."""
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in cells:
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
            if hasattr(value, "_repr_html_"):
                shown.append(type(value).__name__)
                assert "<table" in value._repr_html_()
    assert shown == ["OpGraph", "Solution", "Timeline", "Timeline", "Plan", "Comparison"]


def test_the_notebook_holds_no_outputs() -> None:
    text = NOTEBOOK.read_text()
    assert len(text) < 20_000
    for cell in json.loads(text)["cells"]:
        assert cell.get("outputs", []) == [] and cell.get("execution_count") is None
