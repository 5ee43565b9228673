"""``placement bench``: every row is checked again from the file, without graph or simulator."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import importers
from placement.cli import BAD_INPUT, DEFECT, INTERRUPTED, NO
from placement.planners.best_of import BestOf
from placement.planners.heft import Heft
from placement.planners.order_search import OrderSearch
from placement.problem import Planner, Problem, Solution
from placement.runs import bench
from placement.workloads.suites import SUITES, Case, SuiteError, cases
from tests.problems import written

Times = Sequence[dict[int, float]]  # of each operation: machine -> duration


def check(times: Times, before: Sequence[tuple[int, int]], row: dict[str, Any]) -> None:
    """A row's ``device`` and ``start`` are a schedule, and ``value`` is when it ends."""
    device, start = row["device"], row["start"]
    assert len(device) == len(start) == len(times)
    took = [times[k][machine] for k, machine in enumerate(device)]  # KeyError: may not run there
    end = [a + b for a, b in zip(start, took, strict=True)]
    near = 1e-9 * max(end)
    assert min(start) >= 0 and row["value"] == pytest.approx(max(end), rel=1e-9)
    for a, b in before:
        assert end[a] <= start[b] + near, f"{b} begins before {a} ends"
    for machine in set(device):
        mine = sorted((start[k], end[k]) for k in range(len(device)) if device[k] == machine)
        for (_, first), (second, _) in pairwise(mine):
            assert first <= second + near, f"machine {machine} does two at once"
    if row["lower_bound"] is not None:
        assert row["value"] >= row["lower_bound"] * (1 - 1e-9)


def read_shop(path: Path) -> tuple[Times, list[tuple[int, int]]]:
    data = json.loads(path.read_text())
    times: list[dict[int, float]] = [{} for _ in {x["operation"] for x in data["operations"]}]
    for x in data["operations"]:
        mine = times[x["operation"]]
        mine[x["machine"]] = min(x["duration"], mine.get(x["machine"], x["duration"]))
    return times, [(x["before"], x["after"]) for x in data["precedences"]]


def read_stg(path: Path, processors: int) -> tuple[Times, list[tuple[int, int]]]:
    lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    rows = [[int(word) for word in line] for line in lines if line][1:]
    times = [dict.fromkeys(range(processors), row[1]) for row in rows]
    return times, [(a, row[0]) for row in rows for a in row[3:]]


def check_row(folder: Path, suite: str, row: dict[str, Any]) -> None:
    if suite == "shops":
        check(*read_shop(folder / f"{row['problem']}.json"), row)
    else:
        check(*read_stg(folder / f"{row['problem']}.stg", row["devices"]), row)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two shops and two graphs, drawn; of some the optimum is known."""
    rng = np.random.default_rng(3)
    for name in ("a", "b"):
        operations, precedences = drawn(rng, 12, 3)
        written(tmp_path / f"shops/{name}.json", shop(operations, precedences))
        lines = [f"  {12 - 2}"]
        for k, times in enumerate(operations):
            waits = [a for a, b in precedences if b == k]
            lines.append(" ".join(map(str, [k, min(times.values()), len(waits), *waits])))
        written(tmp_path / f"stg/{name}.stg", "\n".join([*lines, "# a comment"]))
    bounds = {"a": {"lower_bound": 1, "upper_bound": 20, "status": "open"}}
    written(tmp_path / "shops/best_known.json", bounds)
    written(tmp_path / "stg/optimal.json", {"a.stg": {"2": 1}})
    return tmp_path


def drawn(rng: Any, many: int, machines: int) -> tuple[Times, list[tuple[int, int]]]:
    """Operations in any order: numbers do not follow precedence."""
    rank = rng.permutation(many)

    def able() -> Any:
        return rng.choice(machines, rng.integers(1, machines + 1), replace=False)

    operations = [{int(m): int(rng.integers(1, 9)) for m in able()} for _ in range(many)]
    pairs = rng.integers(0, many, (2 * many, 2))
    return operations, sorted({(int(a), int(b)) for a, b in pairs if rank[a] < rank[b]})


def shop(operations: Times, precedences: list[tuple[int, int]]) -> str:
    options = [
        {"operation": k, "machine": machine, "duration": duration}
        for k, times in enumerate(operations)
        for machine, duration in times.items()
    ]
    pairs = [{"before": a, "after": b} for a, b in precedences]
    return json.dumps({"operations": options, "precedences": pairs})


# -- what machines read ---------------------------------------------------------------------------

KEYS = {"problem", "value", "lower_bound", "best_known", "gap", "evaluations", "seconds"}
KEYS |= {"feasible", "device", "start"}


@pytest.mark.parametrize("suite", ["shops", "stg"])
@pytest.mark.parametrize(
    "planner", [("heft",), ("order_search", "--evaluations", "200"), ("m_topo",)]
)
def test_the_contract(suite: str, planner: tuple[str, ...], data: Path, says: Any) -> None:
    got = says.answer("bench", suite, "--data", str(data), "--planner", *planner)
    assert got["suite"] == suite and got["planner"] == planner[0]
    assert len(got["rows"]) == (2 if suite == "shops" else 8)
    ratios = []
    for row in got["rows"]:
        assert row.keys() >= KEYS
        assert row["feasible"] is True
        check_row(data / suite, suite, row)
        assert isinstance(row["value"], int), "durations of the file are whole"
        best = row["best_known"] or row["lower_bound"]
        assert row["gap"] == pytest.approx(row["value"] / best - 1)
        if row["best_known"] is not None:
            ratios.append(row["value"] / best)
    assert got["gap"] == pytest.approx(np.exp(np.log(ratios).mean()) - 1)
    first = got["rows"][0]
    known = 20 if suite == "shops" else 1
    assert first["problem"] == "a" and first["best_known"] == known


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 14), st.integers(1, 4))
def test_every_schedule_is_one(tmp_path_factory: Any, seed: int, many: int, machines: int) -> None:
    folder = tmp_path_factory.mktemp("shop")
    path = written(folder / "s.json", shop(*drawn(np.random.default_rng(seed), many, machines)))
    case = Case("s", partial(importers.load, path))
    for planner in (Heft(), OrderSearch(evaluations=60)):
        row = bench.measure(case, planner)
        check(*read_shop(path), row.__dict__)
        assert not row.impossible


def test_milliseconds_of_measured_operators(tmp_path: Path, says: Any) -> None:
    head = "op,Name,_input_nodes,fw_latency,bw_latency,acc_latency,output_shape,dtype\n"
    slow, fast = [f"m,{name},{{{inputs}}},{ms},0,0,," for name, inputs, ms in (
        ("a", "", 0.1), ("b", "a: None", 0.7), ("c", "a: None", 0.3))], []  # fmt: skip
    fast = [line.replace("0.7", "0.2") for line in slow]
    written(tmp_path / "A/m-inf-1-1.csv", head + "\n".join(slow))
    written(tmp_path / "B/m-inf-1-1.csv", head + "\n".join(fast))
    (row,) = says.answer("bench", "neusight", "--data", str(tmp_path), "--planner", "heft")["rows"]
    assert row["problem"] == "m-inf-1-1" and row["value"] == pytest.approx(0.4)
    check([{0: 0.1, 1: 0.1}, {0: 0.7, 1: 0.2}, {0: 0.3, 1: 0.3}], [(0, 1), (0, 2)], row)


def test_devices_and_names(data: Path, says: Any) -> None:
    argv = ["stg", "--data", str(data), "--planner", "heft", "--devices", "4", "--only", "b*"]
    (row,) = says.answer("bench", *argv)["rows"]
    assert row["problem"] == "b" and row["devices"] == 4 and row["best_known"] is None
    assert [c.devices for c in cases("stg", data, only="a")] == [2, 4, 8, 16]
    assert [c.problem for c in cases("shops", data, only="a*.json")] == ["a"], "or of the file"
    assert [c.problem for c in cases("shops", data / "shops")] == ["a", "b"], "or the folder itself"


def test_files_as_they_are_passed_on(tmp_path: Path) -> None:
    """In folders, compressed, of several formats; bounds as a list, or by the file's name."""
    text = "1 2\n2 1 1 3 1 2 4\n"
    written(tmp_path / "shops/mk/Mk1.fjs", text)
    written(tmp_path / "shops/mk/mk2.txt", text)
    written(tmp_path / "shops/README.txt", "read me")
    (tmp_path / "shops/mk3.FJS.gz").write_bytes(gzip.compress(text.encode()))
    bounds = [{"instance": "Mk1", "lower_bound": 7, "upper_bound": 7}, {"instance": "none"}]
    written(tmp_path / "shops/best_known.json", bounds)
    loaded = cases("shops", tmp_path)
    assert [case.problem for case in loaded] == ["mk/Mk1", "mk/mk2", "mk3"]
    assert [case.best_known for case in loaded] == [7, None, None]
    assert [bench.measure(case, Heft()).value for case in loaded] == [7, 7, 7]
    for only in ("mk/Mk1", "Mk*", "Mk1.fjs"):
        assert [case.problem for case in cases("shops", tmp_path, only=only)] == ["mk/Mk1"]
    written(tmp_path / "shops/best_known.json", '{"mk2.txt": {"lower_bound": 0}, "mk3": 7}')
    loaded = cases("shops", tmp_path)
    assert [case.lower_bound for case in loaded] == [None, None, 7], "0 says nothing"


def test_all_files_may_be_compressed(data: Path) -> None:
    """Cases, their problems and what is known of them stay the same."""
    two = "".join(f"instance {x}\n2 2\n0 3 1 {x}\n1 2 0 4\n" for x in (5, 6))
    written(data / "shops/two.txt", two)
    row = 'fc,{},{{}},{},0,0,"(1, 2)",torch.float32\n'
    for name, took in (("P4", 3), ("T4", 2)):
        head = "op,Name,_input_nodes,fw_latency,bw_latency,acc_latency,output_shape,dtype\n"
        written(data / f"neusight/{name}/m-inf-8-1.csv", head + row.format("a", took) + " \r\n")
    node = "node1 -- Conv2d(3) -- forward_compute_time=1.0, backward_compute_time=2.0, "
    written(data / "public/pipedream/vgg.txt", f"{node}activation_size=8, parameter_size=4\n")
    named = {"nodes": [{"id": 1, "time": [1, 2]}], "edges": [], "num_devices": 2}
    written(data / "public/moirai/small.json", named)

    workflow = {"workflow": {"tasks": [{"name": "t", "runtime": 1}]}}
    written(data / "wfformat/w.json", workflow)

    def told() -> list[Any]:
        every = [case for name in SUITES for case in cases(name, data) if SUITES[name].files]
        problems = [case.load() for case in every]
        known = [(c.problem, c.devices, c.lower_bound, c.best_known) for c in every]
        return [known, *((p.graph.name, p.compute_s.tolist()) for p in problems)]

    plain = told()
    assert len(plain[0]) == len(plain) - 1 == 2 + 2 + 2 * 4 + 1 + 2 + 1
    for path in (x for x in data.rglob("*.*") if x.name not in ("best_known.json", "optimal.json")):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert told() == plain


def test_devices_are_in_the_order_of_the_file(tmp_path: Path, says: Any) -> None:
    nodes = [{"id": name, "time": [a, b]} for name, a, b in (("c", 1, 9), ("a", 9, 2), ("b", 4, 4))]
    ends = [("a", "b", [[0, 5], [5, 0]]), ("b", "c", [[0, 1], [1, 0]])]
    edges = [{"src": a, "dst": b, "transfer": c} for a, b, c in ends]
    text = json.dumps({"num_devices": 2, "nodes": nodes, "edges": edges})
    written(tmp_path / "moirai/m.json", text)
    (row,) = says.answer("bench", "public", "--data", str(tmp_path), "--planner", "heft")["rows"]
    assert row["device"] == [0, 1, 1] and row["start"] == pytest.approx([7, 0, 2])


def test_problems_that_need_no_file(says: Any) -> None:
    got = says.answer("bench", "synthetic", "--planner", "m_topo", "--only", "layered*")
    assert [row["problem"] for row in got["rows"]] == ["layered", "layered_wide"]
    row = got["rows"][0]
    assert row["start"] is None and row["objective"] == "period", "of no timetable of one run"
    assert row["lower_bound"] <= row["value"] and len(row["device"]) == 100


# -- a planner that is wrong, a bound that is wrong ------------------------------------------------


def _lies(problem: Problem) -> Solution:
    return replace(Heft()(problem), value_s=1e-9, lower_bound_s=1e9)


def _refuses(problem: Problem) -> Solution:
    raise ValueError("not for this problem")


def _splits(problem: Problem) -> Solution:
    return Solution(np.full(problem.num_ops, 99, np.int32), 1.0)


@pytest.mark.parametrize(
    ("planner", "message"), [(_refuses, "not for this problem"), (_splits, "is on device 99")]
)
def test_no_answer_is_a_row(planner: Planner, message: str, data: Path) -> None:
    rows = [bench.measure(case, planner) for case in cases("shops", data)]
    assert all(message in row.note and row.value is None and not row.feasible for row in rows)
    mean = bench.mean_of(rows)
    assert mean.gap is None and mean.unsolved == 2 and mean.optimal == 0


def _proves(problem: Problem) -> Solution:
    solution = Heft()(problem)
    return replace(solution, lower_bound_s=solution.value_s * (1 - 1e-12))


def test_a_bound_is_whole_where_times_are(data: Path) -> None:
    for case in cases("shops", data):
        row = bench.measure(case, _proves)
        assert isinstance(row.lower_bound, int) and row.lower_bound == row.value and row.optimal


def test_what_a_planner_says_of_itself_does_not_count(data: Path) -> None:
    case = cases("shops", data)[0]
    assert bench.measure(case, _lies).value == bench.measure(case, Heft()).value
    assert not bench.measure(case, _lies).impossible


def test_a_value_below_a_proved_bound_fails_the_run(data: Path, says: Any) -> None:
    for key, message in (("lower_bound", "the proved bound"), ("upper_bound", "the best known")):
        written(data / "shops/best_known.json", {"b": {key: 1000}})
        err = says(["bench", "shops", "--data", data, "--planner", "heft"], DEFECT).err
        assert "b on 3 devices" in err and f"is below {message}, 1000" in err


def test_a_suite_without_any_answer(data: Path, says: Any) -> None:
    words = ["bench", "shops", "--data", data, "--planner", f"{__name__}:_refuses"]
    got = says.answer(*words, code=NO)
    assert got["gap"] is None and got["unsolved"] == 2


def test_a_budget_of_evaluations_is_kept(tmp_path: Path) -> None:
    """Also by planners that run others: some of these try every device."""
    text = shop(*drawn(np.random.default_rng(0), 20, 12))
    written(tmp_path / "s.json", text)
    (case,) = cases("shops", tmp_path)
    for most in (1, 40, 48):
        assert (bench.measure(case, BestOf(evaluations=most)).evaluations or 0) <= most


# -- what people read ------------------------------------------------------------------------------


def test_several_budgets(data: Path, says: Any) -> None:
    argv = ["shops", "--data", str(data), "--planner", "order_search", "--evaluations", "1,50"]
    out = says(["bench", *argv, "--seed", "1", "width=4"]).out
    assert out.count("95 % interval") == 2 and "order_search, 50 evaluations" in out
    assert "one budget" in says.refused(["bench", *argv, "--json"])


def test_ctrl_c_leaves_what_is_finished(data, tmp_path, says, monkeypatch):
    out = str(tmp_path / "rows.json")
    argv = ["bench", "stg", "--data", str(data), "--planner", "heft", "--out", out]
    make, calls = bench.measure, []

    def stops(case: Case, planner: Planner) -> bench.BenchRow:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(case)
        return make(case, planner)

    monkeypatch.setattr(bench, "measure", stops)
    assert "geometric mean of 1 problem;" in says(argv, INTERRUPTED).out
    assert len(json.loads(Path(out).read_text())["rows"]) == 3
    monkeypatch.setattr(bench, "measure", make)
    rows = says([*argv, "--json"]).json["rows"]
    assert rows == json.loads(Path(out).read_text())["rows"] and len(rows) == 8
    other = ["stg", "--data", str(data), "--planner", "m_topo", "--out", out]
    assert "cannot be continued" in says.refused(["bench", *other])
    saved = json.loads(Path(out).read_text())  # as by weights, or code, that changed since
    written(Path(out), json.dumps(saved | {"digest": "another"}))
    assert "another suite, planner, weights, options or" in says.refused(["bench", *argv[1:]])


def test_errors_say_what_to_do(data: Path, says: Any, tmp_path: Path) -> None:
    def message(*argv: str) -> str:
        return says.refused(["bench", *argv, "--planner", "heft"])

    assert "suites are shops, stg" in message("shop")
    assert "github.com/ScheduleOpt/benchmarks" in message("shops")
    assert "Nothing is downloaded" in message("stg", "--data", str(tmp_path / "empty"))
    assert "it has ['a', 'b']" in message("shops", "--data", str(data), "--only", "mk*")
    assert "devices cannot be set" in message("shops", "--data", str(data), "--devices", "2")
    assert "devices = 0 must be at least 1" in message("stg", "--data", str(data), "--devices", "0")
    assert "--evaluations many" in message("shops", "--data", str(data), "--evaluations", "many")
    written(data / "shops/best_known.json", '{"a": {"lower_bound": "none"}}')
    assert "lower_bound = 'none' is not a time" in message("shops", "--data", str(data))
    written(data / "shops/best_known.json", '{"a": {"lower_bound": 9, "upper_bound": 8}}')
    assert "a: lower_bound 9.0 > upper_bound 8.0" in message("shops", "--data", str(data))
    written(data / "dnn_partitioning/truth.json", '[{"file": "a"}]')
    for name in ("dnn_partitioning/throughput/layer/a.json", "pipedream/a.txt"):
        written(data / name, "")
    assert "record 0 = {'file': 'a'} lacks a key of [" in message("public", "--data", str(data))
    assert "must be positive and finite" in message("synthetic", "--seconds", "inf")
    with pytest.raises(SuiteError):
        cases("synthetic", only="nothing")


def test_the_others_are_run_where_a_file_is_damaged(data: Path, tmp_path: Path, says: Any) -> None:
    written(data / "shops/aa.json", '{"operations": []')
    out = str(tmp_path / "rows.json")
    argv = ["shops", "--data", str(data), "--planner", "heft"]
    for _ in range(2):  # it is read again
        text, err = says(["bench", *argv, "--json", "--out", out], BAD_INPUT)
        got = json.loads(text)
        assert [row["feasible"] for row in got["rows"]] == [True, False, True]
        assert got["unsolved"] == 1 and "aa.json: not valid JSON" in got["rows"][1]["note"]
        assert "aa: no answer" in err and err.count("\n") == 1
        kept = [row["problem"] for row in json.loads(Path(out).read_text())["rows"]]
        assert kept == ["a", "aa", "b"], "what is finished stays"
    says(["bench", *argv, "--out", out, "--only", "aa"], BAD_INPUT)
    assert len(json.loads(Path(out).read_text())["rows"]) == 3, "also what --only leaves out"


def test_every_suite_says_where_it_is_from() -> None:
    for name, suite in SUITES.items():
        assert name == "synthetic" or (suite.source and suite.licence and suite.files)


# -- published files -------------------------------------------------------------------------------


@pytest.mark.parametrize(("suite", "only"), [("shops", "*[24]"), ("stg", "*00[02]4")])
def test_published_suites(suite: str, only: str, shared: Path, says: Any) -> None:
    folder = shared / "data"
    got = says.answer("bench", suite, "--data", str(folder), "--planner", "heft", "--only", only)
    assert len(got["rows"]) >= 8
    for row in got["rows"]:
        check_row(folder / suite, suite, row)
        assert row["gap"] >= -1e-9
    assert sum(row["best_known"] is not None for row in got["rows"]) > len(got["rows"]) / 2
