"""Objects in a notebook: well-formed, escaped, small, and without colours of their own."""

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from placement.plan import make_plan
from placement.planners.contiguous_dp import ContiguousDp
from placement.problem import Problem, Solution
from placement.runs.compare import compare
from placement.simulator import simulate
from placement.timeline import Timeline
from placement.tools.shown import byte_size, count, lanes, print_table, seconds, table, text_lanes
from tests.problems import chain, small_problem

EVIL = '<script>alert("1")</script>'
NAMES = [f"{EVIL}{i}" for i in range(6)]


def tags_and_text(page: str) -> tuple[set[str], str]:
    """Of a well-formed page; others are an error."""
    root = ElementTree.fromstring(f"<page>{page}</page>")
    return {element.tag for element in root.iter()}, " ".join(root.itertext())


@pytest.fixture(scope="module")
def problem() -> Problem:
    facts = {"graph": {"name": EVIL, "op_name": NAMES}, "device": {"kind": "npu"}}
    names = [f"{EVIL}a", f"{EVIL}b"]
    return small_problem(np.full((6, 2), 1e-3), chain(6), tensor_bytes=8, devices=names, **facts)


@pytest.fixture(scope="module")
def objects(problem: Problem, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    solution = ContiguousDp()(problem)
    folder = tmp_path_factory.mktemp("compare")
    comparison = compare({EVIL: problem}, {EVIL: ContiguousDp()}, (0,), out_dir=folder)
    return {
        "graph": problem.graph,
        "solution": solution,
        "timeline": simulate(problem, solution.placement),
        "plan": make_plan(problem, solution, planner=EVIL),
        "comparison": comparison,
    }


@pytest.mark.parametrize("name", ["graph", "solution", "timeline", "plan", "comparison"])
def test_objects_show_themselves(name: str, objects: dict[str, Any]) -> None:
    page = objects[name]._repr_html_()
    tags, text = tags_and_text(page)
    assert "table" in tags and "script" not in tags
    assert len(page) < 40_000
    # Dark or light is the page's decision, and nothing is loaded from anywhere.
    assert not re.search(r"(?<![-\w])(color|background):(?!transparent|inherit)", page)
    assert "http" not in page and "src=" not in page
    if name != "solution":  # which knows no names
        assert EVIL in text.replace(" ", ""), "shown, as text"


def test_what_is_shown(objects: dict[str, Any]) -> None:
    # Three operators of 1 ms on each of two devices, one after another: 6 ms, every 3 ms.
    texts = {name: tags_and_text(x._repr_html_())[1] for name, x in objects.items()}
    text = {name: " ".join(x.split()) for name, x in texts.items()}
    assert "operators 6 edges 5" in text["graph"] and "op 6" in text["graph"]
    assert "objective 0.003" in text["solution"]
    assert "operators on device 0 3 operators on device 1 3" in text["solution"]
    assert "predicted: micro-batch 0 6 ms, period 3 ms, 32 micro-batches" in text["timeline"]
    assert "latency 6 ms" in text["plan"] and "period 3 ms" in text["plan"]
    assert "single:" in text["comparison"] and "speed-up" in text["comparison"]


def test_a_drawing_of_two_devices() -> None:
    """0: the first half of the time micro-batch 0, then 1. 1: idle, then micro-batch 0."""
    tracks = [
        ("<one>", np.array([0.5, 0.0]), np.array([1.0, 0.5]), np.array([1, 0]), 1.0),
        ("two", np.array([0.5]), np.array([1.0]), np.array([0]), 0.5),
        ("idle", np.zeros(0), np.zeros(0), np.zeros(0, int), 0.0),
    ]
    assert text_lanes(tracks, 2.0, 5 + 9 + 16).splitlines() == [
        "<one> │00001111········│ 100 %",
        "  two │····0000········│  50 %",
        " idle │················│   0 %",
        "       0            2 s",
    ]
    drawn = lanes("<t>", tracks, 1.0)
    assert "pre" in tags_and_text(drawn)[0] and "&lt;one&gt;" in drawn
    many = lanes("many", [(f"d{i}", *tracks[0][1:]) for i in range(40)], 1.0)
    assert len(many) < 4000 and "the first 16 of 40" in many


def test_tables_stay_small() -> None:
    rows = [[str(i), "x"] for i in range(1000)]
    shown = table("t", ["a", "b"], rows)
    assert shown.count("<tr>") == 41 and "and 960 more" in shown


def test_a_narrow_table_cuts_no_figure(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    row = ["cuda:0", "10,986.4 MiB", "768.0 MiB", "132.5 MiB", "11,886.9 MiB", "12,052.8 MiB"]
    print_table("memory", ["device", "weights", "KV cache", "buffers", "needed", "of"], [row])
    assert set(" ".join(row).split()) <= set(capsys.readouterr().out.split())


def test_a_measured_timeline_without_memory() -> None:
    begin, end = np.array([[1.0]]), np.array([[3.0]])
    one = Timeline(("d",), np.zeros(1, np.int32), begin, end, measured=True)
    page = one._repr_html_()
    assert "measured: latency 2 s" in page and f"│{'0' * 110}│ 100 %" in page


def test_an_infeasible_solution() -> None:
    assert "inf" in Solution(np.zeros(3, np.int32), float("inf"))._repr_html_()


def test_units() -> None:
    assert [count(n, "planner") for n in (0, 1, 2)] == ["0 planners", "1 planner", "2 planners"]
    shown = ["0 µs", "0.3 µs", "42 µs", "12.3 ms", "1 s", "2000 s"]
    assert [seconds(x) for x in (0.0, 3e-7, 4.2e-5, 0.01234, 0.9996, 2000.0)] == shown
    assert [seconds(x) for x in (9.997e-4, 9.99e-4, 9.9949e-4)] == ["1 ms", "999 µs", "999 µs"]
    assert (byte_size(2**20), byte_size(2**63 - 1)) == ("1.0 MiB", "unlimited")
    assert (byte_size(0), byte_size(100), byte_size(110_000)) == ("0.0 MiB", "0.1 KiB", "0.1 MiB")
