"""Tables, Gantt pictures and traces: drawn expectations, known numbers, hostile names."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.cluster import Cluster, Device, Link
from placement.report import gantt, table, trace
from placement.report.gantt import PlotError, merged, plot_gantt, text_gantt
from placement.report.pareto import plot_pareto
from placement.report.row import Row
from placement.report.table import Comparison
from placement.simulator import simulate
from placement.timeline import Timeline
from tests import problems as by_hand


def pipeline(num_microbatches: int = 3) -> Timeline:
    """Two operators of 1 s, one per device, handed over at once.

    cpu:0  0 1 2 .
    cpu:1  . 0 1 2
    """
    first = np.arange(num_microbatches, dtype=float)[:, None]
    start = first + np.array([[0.0, 1.0]])
    batches = np.arange(num_microbatches)
    sent = np.stack([0 * batches, batches, 0 * batches, 0 * batches + 1], axis=1)
    place, sent = np.array([0, 1], np.int32), sent.astype(np.int32)
    times = start, start + 1, sent, batches + 0.9, batches + 1.0
    return Timeline(("cpu:0", "cpu:1"), place, *times)


def random_timeline(seed: int) -> Timeline:
    rng = np.random.default_rng(seed)
    num_ops, num_microbatches, num_devices = rng.integers(1, [21, 13, 6]).tolist()
    start = np.sort(rng.random((num_microbatches, num_ops)), axis=1)
    names = tuple(f"d{i}" for i in range(num_devices))
    place, begin = rng.integers(num_devices, size=num_ops).astype(np.int32), start + 0.5
    return Timeline(names, place, begin, begin + rng.random(start.shape) / num_ops)


def test_text_gantt_draws_the_pipeline() -> None:
    # 22 columns: 5 for the name, 2 for the bars and spaces left of the lane, 7 right: 8 cells.
    drawn = ["cpu:0 │001122··│  75 %", "cpu:1 │··001122│  75 %", "       0    4 s"]
    assert text_gantt(pipeline(), width=22).splitlines() == drawn
    # Micro-batches beyond nine show their last digit.
    top = text_gantt(pipeline(12), width=14 + 13).splitlines()[0]
    assert top.startswith("cpu:0 │012345678901·│")


def test_text_gantt_shows_the_largest_share_and_idle_below_half() -> None:
    # Four cells of 1 s: batch 0 for 0.8 s and 1 for 0.2 s; 1 for 0.4 s; nothing; 1 for 0.6 s.
    begin, end = np.array([[0.0, 8.0], [0.8, 3.4]]), np.array([[0.8, 8.0], [1.4, 4.0]])
    timeline = Timeline(("d",), np.zeros(2, np.int32), begin, end)
    row = text_gantt(timeline, width=18).splitlines()[0]
    assert row.startswith("d │0··1····│")


@given(st.integers(0, 999), st.integers(20, 200))
def test_text_gantt_keeps_its_width(seed, width):
    timeline = random_timeline(seed)
    lines = text_gantt(timeline, width).splitlines()
    assert len(lines) == len(timeline.device_names) + 1
    assert all(len(line) <= width for line in lines)
    assert len({len(line) for line in lines[:-1]}) == 1


def test_merged_joins_small_gaps_and_keeps_large_ones() -> None:
    start, end = np.array([5.0, 0.0, 1.1, 1.2]), np.array([6.0, 1.0, 3.0, 1.3])
    assert merged(start, end, 0.2) == [(0.0, 3.0), (5.0, 6.0)]
    assert merged(start, end, 0.05) == [(0.0, 1.0), (1.1, 3.0), (5.0, 6.0)]
    assert merged(start[:0], end[:0], 1.0) == []


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 3)), max_size=30), st.floats(0, 1))
def test_merged_covers_every_slice_and_leaves_gaps(slices, gap_s):
    start = np.array([a for a, _ in slices])
    end = np.array([a + b for a, b in slices])
    bars = merged(start, end, gap_s)
    assert all(any(a <= s and e <= b for a, b in bars) for s, e in zip(start, end, strict=True))
    assert all(after[0] - bar[1] > gap_s for bar, after in pairwise(bars))


def test_a_loader_has_a_lane_of_its_own(tmp_path: Path) -> None:
    # Micro-batch 0 is loaded before the run, 1 and 2 together while it runs.
    loaded = replace(pipeline(), load_s=np.array([[-2.0, 0.0], [0.0, 1.0], [0.5, 2.0]]))
    assert text_gantt(loaded, width=23).splitlines() == [
        " cpu:0 │001122··│  75 %",
        " cpu:1 │··001122│  75 %",
        "loader │1122····│  62 %",
        "        0    4 s",
    ]
    without = png_size(plot_gantt(pipeline(), None, tmp_path / "one.png"))
    assert png_size(plot_gantt(loaded, None, tmp_path / "two.png"))[1] > without[1]
    axis = gantt.figure_class()().subplots()
    gantt._draw_loader(axis, loaded.load_s, 2, 1.0)
    boxes = [path.get_extents() for c in axis.collections for path in c.get_paths()]
    # Two rows of half a lane: 0 and 1 in the first, 2 in the second.
    drawn = [(b.x0, b.x1, round(b.y0, 2), round(b.y1, 2)) for b in boxes]
    assert drawn == [(-2, 0, 1.64, 2.0), (0, 1, 1.64, 2.0), (0.5, 2, 2.0, 2.36)]


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def test_plot_gantt_grows_with_its_lanes(tmp_path: Path) -> None:
    one = png_size(plot_gantt(pipeline(), None, tmp_path / "one.png", "title"))
    two = png_size(plot_gantt(pipeline(), pipeline(), tmp_path / "new" / "two.png"))
    assert two[1] > one[1] and two[0] == one[0]


def test_a_lane_is_a_few_bars_however_many_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    # 600 operators x 8 micro-batches back to back: one bar per micro-batch, not 4,800.
    start = np.arange(4800.0).reshape(8, 600)
    timeline = Timeline(("d",), np.zeros(600, np.int32), start, start + 1)
    figure = gantt.figure_class()()
    axis = figure.subplots()
    gantt._draw(axis, timeline, 1.0, resolution_s=4800 / 1500)
    bars = [path for c in axis.collections for path in c.get_paths()]
    assert len(bars) == 8 and len(axis.texts) == 8


def rows(workload: str = "w", measured: bool = True, **changes: Any) -> list[Row]:
    base = Row(workload, "single:cpu:0", None, "period", 4, 2, "x", True, 8.0, 8.0, 8.0)
    base = replace(base, speedup=1.0, bound_s=4.0, gap=1.0)
    split = replace(
        base, planner="split", seed=0, placement_id="y", value_s=5e-3, period_s=5e-3,
        latency_s=8e-3, speedup=1.6, gap=0.25, plan_s=0.123, evaluations=1234,
    )  # fmt: skip
    if measured:
        split = replace(
            split, measured_period_s=6.25e-3, measured_period_iqr_s=1e-4, period_error=-0.2,
            measured_latency_s=10e-3, measured_latency_iqr_s=2e-4, latency_error=-0.2,
            num_rounds=5, measured_speedup=1.7,
        )  # fmt: skip
    return [base, replace(split, **changes)]


def comparison(*cells: Row) -> Comparison:
    return Comparison(tuple(cells), {})


def test_tables_hold_the_figures_in_their_units() -> None:
    predicted, measured, gain, fidelity = table.tables(comparison(*rows()))
    assert predicted.cells[1] == ("split", "5.00", "8.00", "1.60", "25.0", "0.12", "1234")
    assert measured.cells[1] == ("split", "6.25", "0.05", "-20.0", "10.0", "-20.0", "1.70")
    assert measured.cells[0] == ("single:cpu:0", *6 * ("–",))
    assert gain.cells == (("split", "1.70", "1.70", "1.70", "1"),)
    assert "bootstrap" in gain.title and "seeds" in gain.title
    assert fidelity.cells[0] == ("period", "20.0", "–")
    # Without measurements there is no measured table.
    titles = [t.title for t in table.tables(comparison(*rows(measured=False)))]
    assert len(titles) == 2 and "predicted" in titles[0] and "predicted" in titles[1]


def test_seeds_are_one_line_their_median_and_a_failed_seed_is_not_averaged_away() -> None:
    base, split = rows(measured=False)
    seeds = [replace(split, seed=i, period_s=p) for i, p in enumerate((1e-3, 2e-3, 9e-3))]
    first = table.tables(comparison(base, *seeds))[0]
    assert len(first.cells) == 2 and first.cells[1][1] == "2.00" and "3 seeds" in first.title
    failed = replace(seeds[0], speedup=None, note="too large")
    first = table.tables(comparison(base, failed, *seeds[1:]))[0]
    assert first.cells[1][3] == "–" and first.notes == ("split: too large",)


def test_the_terminal_table_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    long = rows(
        planner="a_planner_with_a_very_long_name_indeed", period_s=123.456, latency_s=123.456,
        measured_period_s=123.456, measured_latency_s=123.456, evaluations=10**7, plan_s=3600.0,
        period_error=-0.999, latency_error=12.345, gap=12.3, note="[bold]no markup[/bold] " * 9,
    )  # fmt: skip
    table.print_tables(table.tables(comparison(*long)))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "123456" in out and "10000000" in out and "1234.5" in out, "figures are never cut"
    assert "[bold]" in out


def test_a_narrow_terminal_breaks_headers_and_names_and_cuts_nothing(capsys, monkeypatch):
    for columns in ("60", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        table.print_tables(table.tables(comparison(*rows(planner="local_search"))))
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 60 and "…" not in out
        assert out.count("local_search") == 3 and "6.25" in out and "-20.0" in out


def test_predictions_that_nothing_ran_for_say_how_far_they_are_off() -> None:
    note = (
        "the profile's calibration error is 12.3%: of rows that differ by less, either may be "
        "better"
    )
    for measured in (False, True):
        known = [replace(r, calibration_error=0.123) for r in rows(measured=measured)]
        assert (note in table.tables(comparison(*known))[0].notes) is not measured


def test_what_a_call_takes_besides_its_operators_is_said_where_it_counts() -> None:
    for share, is_said in ((0.5, True), (0.001, False)):
        row, *others = rows()
        known = replace(row, overhead_s=share * min(r.latency_s for r in (row, *others)))
        notes = table.tables(comparison(known, *others))[0].notes
        assert any("which plans have" in note for note in notes) is is_said


def test_markdown_escapes_what_would_break_a_table() -> None:
    text = table.to_markdown(comparison(*rows(planner="a|b\nc", note="line\nbreak")))
    assert "| a\\|b c |" in text and "line break" in text
    widths = [line.replace("\\|", "").count("|") for line in text.splitlines() if "a\\|b" in line]
    assert widths[0] == 8


def test_names_with_dollars_are_no_mathematics(tmp_path: Path) -> None:
    """matplotlib would draw two of them as a formula, and fail on one that is none."""
    name = "a$^$b"
    renamed = [replace(r, workload=name, planner=r.planner + "$_$") for r in rows()]
    assert plot_pareto(comparison(*renamed), tmp_path / "c.png").stat().st_size > 1000
    plan = replace(pipeline(), device_names=("x$^$", "y"))
    assert plot_gantt(plan, None, tmp_path / "g.png", name).stat().st_size > 1000


def test_trace_has_a_process_per_timeline_and_a_track_per_device(tmp_path: Path) -> None:
    predicted = pipeline()
    measured = replace(predicted, end_s=predicted.end_s + 0.25, measured=True)
    path = trace.write_trace(tmp_path / "trace.json", [predicted, measured], ("up", "down"))
    events = json.loads(path.read_text())["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert process == {0: "predicted", 1: "measured"}
    tracks = {(e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"}
    assert set(tracks) == {(p, n) for p in (0, 1) for n in ("cpu:0", "cpu:1", "cpu:0 -> cpu:1")}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 2 * (3 * 2 + 3)
    down = [e for e in slices if e["name"] == "down" and e["args"]["micro_batch"] == 2]
    expected = [(0, tracks[0, "cpu:1"], 3e6, 1e6), (1, tracks[1, "cpu:1"], 3e6, 1.25e6)]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in down] == expected


def test_a_trace_with_streamed_parameters_is_read(tmp_path: Path) -> None:
    gpu = Device("gpu", "cuda"), Device("s", "cuda", streams="gpu", buffer_bytes=100)
    cluster = Cluster("c", (Device("cpu"), *gpu), (Link("cpu", "s", 0.0, 5.0),))
    facts = {"tensor_bytes": 8, "param_bytes": 20, "num_microbatches": 2}
    problem = by_hand.small_problem(np.ones((3, 3)), by_hand.chain(3), cluster=cluster, **facts)
    line = simulate(problem, np.array([2, 2, 0]))
    assert len(line.copies), "it streams"
    (again,) = trace.read_traces(trace.write_trace(tmp_path / "trace.json", [line]))
    assert again.device_names == line.device_names
    assert again.placement.tolist() == line.placement.tolist()
    np.testing.assert_allclose(again.start_s, line.start_s)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"pip install 'device-placement-rl\[plots\]'"):
        plot_gantt(pipeline(), None, tmp_path / "x.png")
