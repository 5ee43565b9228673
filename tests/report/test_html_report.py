"""The page of a run folder: its numbers are those of the run's files, and names are only text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from placement import importers
from placement.plan import Measured, Spread, make_plan
from placement.plan.parts import PiecesInfo
from placement.planners.heft import Heft
from placement.planners.local_search import LocalSearch
from placement.planners.round_robin import RoundRobin
from placement.problem import Problem, Solution
from placement.report import html, table, trace, usage
from placement.report.html import page, page_data, write_report
from placement.report.run_folder import RunFolderError, read_run
from placement.report.table import Comparison
from placement.runs.compare import compare, placement_id
from placement.simulator import simulate
from placement.simulator.memory import largest, memory_steps
from placement.timeline import Timeline, TimelineError
from tests.problems import altered, chain, graph_of, random_placement, random_problem, written
from tests.runtimes import Biased, with_errors

EVIL = '</script><img src=x onerror="window.hacked=1">'


class Noisy(Biased):
    """A runtime that is the simulator, with other times."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(with_errors(problem, 0.2, seed=0))

    def run(self, placement: ArrayLike, **limits: Any) -> Timeline:
        return replace(super().run(placement, **limits), measured=True)


def modular(num_ops: int, num_devices: int = 2, evil: bool = False, seed: int = 1) -> Problem:
    """A chain of blocks of five operators, every block a module, some names hostile."""
    problem = random_problem(seed, num_ops, num_devices)
    names = [f"{EVIL if evil and n % 7 == 0 else 'op'} {n}" for n in range(num_ops)]
    modules = [f"body.{n // 50}.{n // 5}" + (EVIL if evil else "") for n in range(num_ops)]
    facts = {"op_name": names, "op_module": modules, "op_kind": ["aten.mul"] * num_ops}
    name = EVIL if evil else "modular"
    graph = graph_of(num_ops, chain(num_ops), 4000, name=name, **facts)
    rng = np.random.default_rng(seed)
    nothing = dict.fromkeys(("loaded_s", "transfer_s", "workspace_bytes", "library_bytes"))
    seconds = rng.uniform(1e-4, 1e-3, (num_ops, num_devices))
    links = {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}
    problem = altered(problem, {"memory_bytes": 2**40}, links, compute_s=seconds, **nothing)
    return replace(problem, graph=graph, num_microbatches=6, max_in_flight=3)


def compared(folder: Path, problems: dict[str, Problem], measured: bool = True) -> Comparison:
    planners = {"heft": Heft(), "local_search": LocalSearch(evaluations=30)}
    planners |= {"round_robin": RoundRobin()}
    runtime = Noisy if measured else None
    return compare(problems, planners, [0, 1], out_dir=folder, executor=runtime, rounds=2)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    compared(folder, {"first": modular(20), "second net": modular(12, 3, evil=True, seed=2)})
    return folder


@pytest.fixture(scope="module")
def data(run_dir: Path) -> dict[str, Any]:
    return page_data(read_run(run_dir))


def arrays(timeline: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """What the page unpacks: start and end float64 ``[K, N]`` and transfers ``[X, 4]``."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(timeline["bars"])), "<u4")
    k, n, x = timeline["num_shown"], timeline["num_ops"], timeline["num_transfers"]
    start = np.cumsum(raw[: k * n].reshape(k, n), axis=0, dtype=np.uint32)
    took = raw[k * n : 2 * k * n].reshape(k, n)
    rest = raw[2 * k * n :]
    assert len(rest) == 6 * x
    tick = timeline["tick_s"]
    return start * tick, (start.astype(np.int64) + took) * tick, rest[: 4 * x].reshape(x, 4)


def placement(decision: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(decision["placement"]), "<u2").astype(np.int32)


def test_the_table_has_the_medians_of_the_csv_file(run_dir: Path, data: dict[str, Any]) -> None:
    rows = table.from_csv((run_dir / "compare.csv").read_text())
    for workload in data["workloads"]:
        mine = [r for r in rows if r.workload == workload["name"]]
        names = [p["name"] for p in workload["planners"]]
        assert names == list(dict.fromkeys(r.planner for r in mine))
        for line in workload["planners"]:
            of = [r for r in mine if r.planner == line["name"]]
            assert line["seeds"] == len(of)
            for column in ("period_s", "measured_period_s", "speedup", "period_error", "gap"):
                assert line[column] == np.median([getattr(r, column) for r in of]), column
    assert data["workloads"][0]["bound_s"] == rows[0].bound_s


def test_what_holds_overall_is_what_the_comparison_says(run_dir, data):
    comparison = read_run(run_dir).comparison
    fidelity = comparison.fidelity()
    overall = data["overall"]
    assert fidelity is not None and overall["fidelity"]["period_mape"] == fidelity.period_mape
    assert [g["planner"] for g in overall["gains"]] == [g.planner for g in comparison.gains()]
    points = data["scatter"]
    assert len(points) == fidelity.num_placements
    errors = [abs(p["latency"][0] / p["latency"][1] - 1) for p in points]
    assert np.mean(errors) == pytest.approx(fidelity.latency_mape, rel=1e-12)


def test_reading_back_gives_the_comparison(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {"net": modular(10)}, measured=False)
    read = read_run(tmp_path).comparison
    assert read is not None and read.rows == comparison.rows
    assert read.solutions.keys() == comparison.solutions.keys()
    for key, solution in comparison.solutions.items():
        np.testing.assert_array_equal(read.solutions[key].placement, solution.placement)


def test_every_planner_has_its_timelines(run_dir: Path, data: dict[str, Any]) -> None:
    run = read_run(run_dir)
    for workload, shown in zip(run.workloads, data["workloads"], strict=True):
        problem = workload.problem
        assert all(p["decision"] is not None for p in shown["planners"])
        for decision in shown["decisions"]:
            p = placement(decision)
            expected = {"measured": workload.measured[placement_id(p)]}
            expected |= {"predicted": simulate(problem, p)}
            for kind, timeline in expected.items():
                start, end, transfers = arrays(decision[kind])
                tick = decision[kind]["tick_s"]
                np.testing.assert_allclose(start, timeline.start_s - timeline.begin_s, atol=tick)
                np.testing.assert_allclose(end, timeline.end_s - timeline.begin_s, atol=tick)
                np.testing.assert_array_equal(transfers, timeline.transfers)
                assert decision[kind]["period_s"] == timeline.period_s
                busy = np.mean(decision[kind]["busy"], axis=1)
                np.testing.assert_allclose(busy, timeline.utilisation, atol=1e-3)
            peak = np.max(decision["predicted"]["memory"], axis=1)
            np.testing.assert_array_equal(peak, expected["predicted"].peak_bytes)


def test_curves_end_at_the_value_of_the_table(run_dir: Path, data: dict[str, Any]) -> None:
    rows = {(r.workload, r.planner, r.seed): r for r in read_run(run_dir).comparison.rows}
    for workload in data["workloads"]:
        assert {c["planner"] for c in workload["curves"]} == {"heft", "local_search", "round_robin"}
        for curve in workload["curves"]:
            row = rows[workload["name"], curve["planner"], curve["seed"]]
            assert curve["points"][-1][1] == pytest.approx(row.value_s, rel=1e-12)
            values = [v for _, v in curve["points"]]
            assert values == sorted(values, reverse=True)


def test_the_graph_has_the_edges_and_bytes_of_the_problem(run_dir, data):
    problem = read_run(run_dir).workloads[0].problem
    shown = data["workloads"][0]["graph"]
    edges = np.array(shown["edges"]).reshape(-1, 3)
    np.testing.assert_array_equal(edges[:, :2], problem.graph.edges)
    assert (edges[:, 2] == 4000).all()
    assert [shown["modules"][m] for m in shown["module"]] == list(problem.graph.op_module)


class Elements(HTMLParser):
    """Every tag of a page with its attributes, and the text of the element called ``data``."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, text: str) -> None:
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        key = attributes.get("id") or tag
        self.texts[key] = self.texts.get(key, "") + text


def test_hostile_names_are_text(data: dict[str, Any]) -> None:
    text = page(data)
    parsed = Elements(text)
    tags = [tag for tag, _ in parsed.elements]
    assert tags.count("script") == 2 and "img" not in tags
    for workload in data["workloads"]:  # which is no data, but a picture on the page itself
        assert workload["picture"] in text
    shown = [{k: v for k, v in w.items() if k != "picture"} for w in data["workloads"]]
    assert json.loads(parsed.texts["data"]) == data | {"workloads": shown}
    assert EVIL in data["workloads"][1]["graph"]["ops"][0]
    assert "onerror=" not in re.sub(r'"application/json">.*?</script>', "", text, flags=re.S)


def test_nothing_is_loaded_and_only_our_script_runs(data: dict[str, Any]) -> None:
    text = page(data)
    parsed = Elements(text)
    assert not [a for _, attributes in parsed.elements for a in attributes if a in ("src", "style")]
    assert all(a["href"].startswith("#") for _, a in parsed.elements if a.get("href"))
    (policy,) = [a["content"] for _, a in parsed.elements if "http-equiv" in a]
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = hashlib.sha256(script.encode()).digest()
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'" in str(policy)
    assert str(policy).startswith("default-src 'none';") and "unsafe" not in str(policy)


def test_the_same_folder_gives_the_same_page(run_dir: Path, data: dict[str, Any]) -> None:
    again = page_data(read_run(run_dir))
    assert again | {"made": ""} == data | {"made": ""}


def test_many_bars_are_the_first_micro_batches(run_dir, monkeypatch):
    # 20 operators x 5 decisions and 12 x 6, twice each: 344 bars per micro-batch.
    monkeypatch.setattr("placement.report.html.MAX_BARS", 1000)
    run = read_run(run_dir)
    shown = page_data(run)["workloads"][0]["decisions"][0]["predicted"]
    assert 1 <= shown["num_shown"] < 6 == shown["num_microbatches"]
    assert shown["makespan_s"] == pytest.approx(max(arrays(shown)[1].max(), shown["makespan_s"]))


def test_a_damaged_cell_is_left_out_and_named(tmp_path: Path) -> None:
    compared(tmp_path, {"net": modular(10)}, measured=False)
    cell = sorted((tmp_path / "cells").glob("*heft*.json"))[0]
    cell.write_text("{")
    report = write_report(tmp_path)
    assert [cell.name in line for line in report.unread] == [True]
    (workload,) = page_data(read_run(tmp_path))["workloads"]
    decision = {p["name"]: p["decision"] for p in workload["planners"]}
    heft = decision["heft"]
    assert heft is None or "round_robin" in workload["decisions"][heft]["planners"]
    assert decision["local_search"] is not None


def test_a_workload_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    problem = modular(6)
    solution = Heft()(problem)
    make_plan(problem, solution, planner="heft").save(tmp_path / "outside" / "plan.json")
    compared(folder, {"../outside": problem}, measured=False)
    (workload,) = read_run(folder).workloads
    assert workload.plan is None and workload.problem is not None


def test_a_folder_from_before_problems_were_saved_has_the_timelines_of_its_trace(tmp_path):
    problem = modular(10)
    comparison = compared(tmp_path, {"net": problem})
    for file in (*tmp_path.glob("problems/*"), *tmp_path.glob("measured/*.npz")):
        file.unlink()
    best = next(row for row in comparison.rows if row.planner == "heft")  # the same for all seeds
    solution = comparison.solutions["net", best.planner, best.seed]
    make_plan(problem, solution, planner=best.planner).save(tmp_path / "net" / "plan.json")
    timelines = {"predicted": simulate(problem, solution.placement)}
    timelines |= {"measured": Noisy(problem).run(solution.placement, num_microbatches=6)}
    trace.write_trace(tmp_path / "net" / "trace.json", timelines.values(), problem.graph.op_name)
    (shown,) = page_data(read_run(tmp_path))["workloads"]
    index = next(p["decision"] for p in shown["planners"] if p["name"] == best.planner)
    for i, decision in enumerate(shown["decisions"]):
        for kind, timeline in timelines.items():
            assert (decision[kind] is not None) == (i == index)
            if i == index:
                period_s = decision[kind]["period_s"]
                assert period_s == pytest.approx(timeline.period_s, rel=1e-6)
    assert shown["graph"]["edges"] is None and len(shown["graph"]["ops"]) == 10


def test_a_plan_alone(tmp_path: Path) -> None:
    problem = modular(10)
    plan = make_plan(problem, Heft()(problem), planner="heft")
    plan.save(tmp_path / "plan.json")
    shown = page_data(read_run(tmp_path))
    (workload,) = shown["workloads"]
    (line,) = workload["planners"]
    assert line["period_s"] == plan.predicted.period_s
    assert line["speedup"] == plan.fallback.period_s / plan.predicted.period_s
    assert workload["decisions"][0]["predicted"] is None
    assert shown["commands"][-1]["command"] == f"placement report {tmp_path}"
    # With the problem beside it, there is a timeline and a graph.
    importers.save(problem, tmp_path / "problem.json")
    (workload,) = page_data(read_run(tmp_path / "plan.json"))["workloads"]
    assert workload["decisions"][0]["predicted"]["period_s"] == plan.predicted.period_s
    assert workload["graph"]["edges"]


def test_a_plan_under_any_name_as_measured_and_both_traces(tmp_path: Path) -> None:
    """The folder of the quickstart: plan --trace, run --trace --out; beside it another plan."""
    problem = modular(10)
    solution = Heft()(problem)
    plan = make_plan(problem, solution, planner="heft")
    plan.save(tmp_path / "p.json")
    spread = Spread(median_s=0.5, iqr_s=0.1)
    measured = Measured(latency_s=spread, period_s=spread, n=5, when="now", machine="here")
    plan.model_copy(update={"measured": measured}).save(tmp_path / "measured.json")
    predicted = simulate(problem, solution.placement)
    run = Noisy(problem).run(solution.placement, num_microbatches=6)
    for name, timeline in (("t1", predicted), ("t2", run)):
        trace.write_trace(tmp_path / f"{name}.json", [timeline], problem.graph.op_name)
    for source in (tmp_path, tmp_path / "p.json"):
        (workload,) = page_data(read_run(source))["workloads"]
        (line,) = workload["planners"]
        (decision,) = workload["decisions"]
        assert (line["measured_period_s"], line["rounds"]) == (0.5, 5)
        assert decision["predicted"]["period_s"] == pytest.approx(predicted.period_s, rel=1e-6)
        assert decision["measured"]["period_s"] == pytest.approx(run.period_s, rel=1e-6)
    report = write_report(tmp_path)
    assert (report.num_workloads, report.num_planners) == (1, 1)
    assert (report.num_predicted, report.num_measured, report.unread) == (1, 1, ())
    text = report.path.read_text()
    assert "heft, predicted: " in text and "heft, measured, one run: " in text

    # Another plan in the folder has neither; a timeline of no plan is left out, and named.
    on_one = np.zeros(problem.num_ops, np.int32)
    make_plan(problem, Solution(on_one, 1.0), planner="other").save(tmp_path / "o.json")
    trace.write_trace(tmp_path / "t3.json", [simulate(problem, 1 - on_one)])
    both = read_run(tmp_path)
    traces = {w.name: sorted(w.traces) for w in both.workloads}
    assert traces == {"measured": ["measured", "predicted"], "o": []}
    assert both.unread == ("t3.json: a timeline of no plan that is here",)


def test_a_training(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("steps,best_speedup,entropy\n10,1.0,nan\n20,1.5,0.5\n")
    shown = page_data(read_run(tmp_path))
    rows = {"steps": [10.0, 20.0], "best_speedup": [1.0, 1.5], "entropy": [None, 0.5]}
    assert shown["training"] == rows
    assert shown["workloads"] == []


def test_the_picture_has_the_name_of_what_it_shows(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {"net": modular(10)}, measured=False)
    best = comparison.best("net").planner
    for cell in tmp_path.glob(f"cells/*-{best}-*"):
        cell.write_text("damaged")
    (workload,) = page_data(read_run(tmp_path))["workloads"]
    assert workload["best"] == best
    assert ", predicted: " in workload["picture"] and f">{best}, " not in workload["picture"]


def test_commands_plan_what_the_plan_is() -> None:
    problem = random_problem(0, 4, 2)
    turns = Solution(np.array([[0] * 4, [1] * 4], np.int32), 1.0)
    plan = make_plan(problem, turns, planner="data_parallel")
    again = html._plan_command(plan, "net").split()
    assert again[again.index("--max-phases") + 1] == "2" and "--pieces" not in again
    for shares, words in (((1 / 3,) * 3, "3"), ((0.25, 0.75), "0.25,0.75")):
        cut = plan.model_copy(update={"pieces": PiecesInfo(shares=shares, operators={})})
        again = html._plan_command(cut, "net").split()
        assert again[again.index("--pieces") + 1] == words


def test_commands_are_those_that_hydra_was_given(tmp_path: Path) -> None:
    tmp_path /= "run"
    tmp_path.mkdir()
    (tmp_path / "metrics.csv").write_text("steps\n1\n")
    written(tmp_path / ".hydra" / "overrides.yaml", "- workload=[a,b]\n- seed=1\n")
    written(tmp_path / ".hydra" / "hydra.yaml", "hydra: {job: {name: placement-train}}\n")
    first, second = page_data(read_run(tmp_path))["commands"][:2]
    assert first["command"] == "placement-train 'workload=[a,b]' seed=1"
    # Without resume it would begin anew, over what is there.
    assert second["command"] == f"{first['command']} hydra.run.dir={tmp_path} resume=true"
    there = tmp_path.rename(tmp_path.with_name("é"))  # which Hydra's grammar wants in quotes
    second = page_data(read_run(there))["commands"][1]
    assert f""" 'hydra.run.dir="{there}"' resume=true""" in second["command"]


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir()])
def test_nothing_to_report_on(tmp_path: Path, make: Any, says: Any) -> None:
    make(tmp_path / "run")
    with pytest.raises(RunFolderError, match="run"):
        read_run(tmp_path / "run")
    assert len(says(["report", tmp_path / "run"], 2).err.splitlines()) == 1


def test_the_command(run_dir: Path, tmp_path: Path, says: Any) -> None:
    out = tmp_path / "page.html"
    answer = says(["report", run_dir, "--out", out, "--json"]).json
    assert answer["path"] == str(out) and answer["num_bytes"] == out.stat().st_size
    assert answer["num_workloads"] == 2 and answer["num_measured"] == answer["num_predicted"] > 0
    assert "it is not a file" in says(["report", run_dir, "--out", tmp_path], 2).err


def test_timelines_survive_their_files(tmp_path: Path) -> None:
    problem = random_problem(3, num_devices=2)
    phases = [[0] * problem.num_ops, [problem.num_devices - 1] * problem.num_ops]
    timeline = replace(simulate(problem, phases), load_s=np.ones((problem.num_microbatches, 2)))
    timeline.save(tmp_path / "t.npz")
    read = Timeline.load(tmp_path / "t.npz")
    assert read.device_names == timeline.device_names and not read.measured
    for name in ("placement", "start_s", "end_s", "transfers", "peak_bytes", "load_s"):
        np.testing.assert_array_equal(getattr(read, name), getattr(timeline, name))
    (tmp_path / "t.npz").write_bytes(b"PK")
    with pytest.raises(TimelineError, match=r"t\.npz"):
        Timeline.load(tmp_path / "t.npz")


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_memory_over_time_peaks_where_the_simulator_says(seed: int) -> None:
    problem = random_problem(seed)
    p = random_placement(problem, seed)
    timeline = simulate(problem, p)
    steps = memory_steps(problem, p, timeline, problem.max_in_flight)
    np.testing.assert_array_equal([held.max() for _, held in steps], timeline.peak_bytes)
    # In the end only parameters and what libraries keep are left; slices of the run keep the peak.
    np.testing.assert_array_equal([held[-1] for _, held in steps], problem.resident_bytes_on(p))
    edges = np.linspace(-1.0, timeline.begin_s + timeline.makespan_s + 1.0, 8)
    np.testing.assert_array_equal([largest(s, edges).max() for s in steps], timeline.peak_bytes)


def test_busy_share_of_a_drawn_timeline() -> None:
    # 0 1 2 3 s:  batch 0 runs for 1 s, batch 1 from 1.5 s to 2 s, then until 4 s nothing but b.
    begin, end = np.array([[0.0, 1.0], [1.5, 2.0]]), np.array([[1.0, 2.0], [2.0, 4.0]])
    timeline = Timeline(("a", "b"), np.array([0, 1], np.int32), begin, end)
    np.testing.assert_allclose(usage.busy_share(timeline, 4), [[1, 0.5, 0, 0], [0, 1, 1, 1]])


def test_traces_are_read_back(tmp_path: Path) -> None:
    problem = modular(8, 3)
    timeline = simulate(problem, np.arange(8, dtype=np.int32) % 3)
    phases = replace(simulate(problem, [np.arange(8) % 3, np.arange(8) // 3]), measured=True)
    trace.write_trace(tmp_path / "t.json", [timeline, phases])
    predicted, measured = trace.read_traces(tmp_path / "t.json")
    assert [t.kind for t in (predicted, measured)] == ["predicted", "measured"]
    assert predicted.device_names == timeline.device_names
    np.testing.assert_array_equal(predicted.placement, timeline.placement)
    np.testing.assert_array_equal(measured.device_of, phases.device_of)
    np.testing.assert_array_equal(predicted.transfers, timeline.transfers)
    np.testing.assert_allclose(predicted.end_s, timeline.end_s, rtol=1e-9)
    unnamed = [e for e in timeline.to_trace()["traceEvents"] if e["name"] != "process_name"]
    names = {"ph": "M", "pid": 0, "name": "thread_name"}
    many = [names | {"tid": i, "args": {"name": f"d{i}"}} for i in range(1000)]
    wrong = {
        r"t\.json": [{"pid": 0}],
        "1000 devices, at most 512": many,
        "whether it was predicted or measured": unnamed,
    }
    for why, events in wrong.items():
        written(tmp_path / "t.json", {"traceEvents": events})
        with pytest.raises(TimelineError, match=why):
            trace.read_traces(tmp_path / "t.json")


def test_a_csv_file_of_an_older_version(tmp_path: Path) -> None:
    compared(tmp_path, {"net": modular(6)}, measured=False)
    text = (tmp_path / "compare.csv").read_text()
    rows = table.from_csv(text)
    assert table.to_csv(Comparison(rows, {})) == text
    without = "\n".join(",".join(line.split(",")[:-1]) for line in text.splitlines())
    assert [r.note for r in table.from_csv(without)] == [""] * len(rows)
    with pytest.raises(ValueError, match="line 2"):
        table.from_csv("workload,planner\nnet,heft\n")
