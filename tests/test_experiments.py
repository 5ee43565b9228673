"""The studies: runs that end badly, rows that survive, small studies from the command line."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import _study, baselines, public, scale
from experiments._study import Store, StudyError, limited
from placement.problem import Problem, Solution

needs_data = pytest.mark.skipif(
    not (_study.DATA / "dnn_partitioning" / "truth.json").exists(),
    reason="the public workloads are not beside the checkout",
)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    folders = {"--out": tmp_path / "out", "--work": tmp_path / "work"}
    return [str(x) for pair in folders.items() for x in pair]


@pytest.fixture
def no_more_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After it is called, a study that runs anything fails."""

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("this was finished already")

    def forbid() -> None:
        for module in (_study, public, scale):
            monkeypatch.setattr(module, "limited", fail)

    return forbid


# --- planners that end badly: loaded by name, as package.module:Class ----------------------------


@dataclass(frozen=True)
class Refuses:
    def __call__(self, problem: Problem) -> Solution:
        raise StudyError(f"{problem.num_ops} operators are too many")


@dataclass(frozen=True)
class Dies:
    def __call__(self, problem: Problem) -> Solution:
        if problem.graph.name != "warm":
            os.kill(os.getpid(), signal.SIGKILL)
        raise StudyError("only pretends to be warm")


@dataclass(frozen=True)
class Sleeps:
    def __call__(self, problem: Problem) -> Solution:
        if problem.graph.name != "warm":
            time.sleep(60)
        raise StudyError("only pretends to be warm")


@dataclass(frozen=True)
class FallsBack:
    def __call__(self, problem: Problem) -> Solution:
        return Solution(np.zeros(problem.num_ops, np.int32), 1.0, stats={"message": "gave up"})


HERE = "tests.test_experiments"


# --- runs under a limit --------------------------------------------------------------------------


def test_what_a_run_returns_and_holds() -> None:
    size = 256 * 2**20

    def use() -> int:
        return int(np.ones(size, np.uint8).sum())

    np.ones(31 * 2**20, np.uint8)  # freed at once: from now on glibc cuts such blocks from its heap
    freed = [np.ones(20 * 2**20, np.uint8) for _ in range(20)]
    above = [bytes(3000) for _ in range(2000)]  # small blocks, so that the heap cannot shrink
    del freed
    run = limited(use, 30)
    assert (run.status, run.value, run.note) == ("ok", size, "")
    assert run.peak_bytes is not None and run.grown_bytes is not None
    assert size <= run.grown_bytes <= run.peak_bytes
    assert above


def raises(error: BaseException) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "status", "note"),
    [
        (raises(StudyError("no: 3 > 2")), "refused", "no: 3 > 2"),
        (raises(ZeroDivisionError("oh")), "failed", "ZeroDivisionError: oh"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed", "SIGKILL"),
        (lambda: os._exit(3), "killed", "exit code 3"),
        (lambda: np.ones(2**40), "out of memory", ""),
        (lambda: time.sleep(60), "out of time", "0.5 s"),
    ],
)
def test_however_a_run_ends_we_go_on(call: Callable[[], Any], status: str, note: str) -> None:
    run = limited(call, 0.5 if status == "out of time" else 30, 64 * _study.GIB)
    assert run.status == status and note in run.note and run.value is None


# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    name: str
    value: float | None


def test_rows_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    store = Store(path, Cell)
    store.add(Cell("a", 1.5))
    store.add(Cell("b", None))
    path.write_text(path.read_text()[:-5])
    again = Store(path, Cell)
    assert again.rows == [Cell("a", 1.5)] and again.find(name="b") is None
    again.add(Cell("c", float("inf")))
    assert Store(path, Cell).rows == [Cell("a", 1.5), Cell("c", float("inf"))]
    assert Store(path, Cell, fresh=True).rows == [] == Store(path, Cell).rows


def test_rows_of_another_version_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"name": "a", "value": 1, "more": 2}\n{"name": "b", "value": 2}\n[]\n')
    assert Store(path, Cell).rows == [Cell("b", 2)]


def test_tables() -> None:
    assert _study.to_csv([Cell("a,b", None)]) == 'name,value\n"a,b",\n'
    assert _study.to_table(["n", "v"], [["a|b", "1"]]).splitlines() == [
        "| n | v |",
        "|---|---:|",
        "| a\\|b | 1 |",
    ]
    assert _study.number(None) == _study.number(float("inf")) == "–"
    assert _study.number(0.0123456, 2, 1e3, " ms") == "12.35 ms"


# --- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        lambda words: baselines.main(["moirai/*", *words]),
        lambda words: public.main(["exact", *words]),
        lambda words: public.main(["pipedream", *words]),
    ],
)
def test_without_the_files_the_message_says_where_they_are(
    run: Any, tmp_path: Path, places: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--data", str(tmp_path), *places]) == 2
    said = capsys.readouterr().err
    assert "github.com/msr-fiddle/dnn-partitioning" in said and "--data" in said


def node(key: int, acc: float, **more: Any) -> dict[str, Any]:
    base = {"supportedOnFpga": 1, "isBackwardNode": 0, "size": 1.0}
    return {"id": key, "fpgaLatency": acc, "cpuLatency": 10 * acc, **base, **more}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four operators of 1, 2, 3 and 2 ms in a row, transfers of 0.25 ms, in three formats.

    Max-load on two accelerators: 3.25 | 5.25 of the cut 0 0 1 1, the best contiguous one, and
    4.75 | 4.75 of 0 1 0 1, the best of all: 4 and three transfers each. Latency of one sample: 8
    on one accelerator.
    """
    folder = tmp_path / "data"
    times = (1, 2, 3, 2)
    chain = {
        "maxSizePerFPGA": 1e9,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [node(i, t) for i, t in enumerate(times)],
        "edges": [{"sourceId": i, "destId": i + 1, "cost": 0.25} for i in range(3)],
    }
    link = [[0, 0.25], [0.25, 0]]
    unlike = {
        "model": "tiny",
        "num_devices": 2,
        "nodes": [{"id": i, "time": [t, 2 * t]} for i, t in enumerate(times)],
        "edges": [{"src": i, "dst": i + 1, "transfer": link} for i in range(3)],
    }
    profile = "".join(
        f"node{i} -- Op() -- forward_compute_time={t}.0, backward_compute_time={2 * t}.0, "
        f"activation_size=1000.0, parameter_size=10.0\n"
        for i, t in enumerate(times)
    ) + "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(3))
    truth = [
        truth_of("throughput/layer/tiny.json", "max_load", "own_dp_contiguous", 5.25),
        truth_of("throughput/layer/tiny.json", "max_load", "dp_cpp", 5.25, seconds=4.0),
        truth_of("throughput/layer/tiny.json", "max_load", "local_search_10", 1.0, "unchecked"),
        truth_of("latency/layer/tiny.json", "latency", "greedy_cpp", 8.0),
    ]
    files = {
        "dnn_partitioning/throughput/layer/tiny.json": json.dumps(chain),
        "dnn_partitioning/latency/layer/tiny.json": json.dumps(chain),
        "dnn_partitioning/truth.json": json.dumps(truth),
        "moirai/tiny.json": json.dumps(unlike),
        "pipedream/tiny.txt": profile,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def truth_of(
    file: str, objective: str, method: str, value: float, status: str = "optimal", **more: Any
) -> dict[str, Any]:
    record = {"file": file, "objective": objective, "method": method, "value": value}
    return {**record, "status": status, "seconds": 0.0, "lower_bound": None, **more}


# --- baselines -----------------------------------------------------------------------------------


def test_baselines_from_the_command_line(
    data: Path, tmp_path: Path, places: list[str], no_more_runs: Callable[[], None]
) -> None:
    bad = ",".join(f"{HERE}:{kind}" for kind in ("Refuses", "Dies", "FallsBack"))
    words = ["dnn_partitioning/*", "moirai/tiny*", "pipedream/*", "--data", str(data), *places]
    words += ["--planners", f"ideal_dp,random_search,{bad}", "--seconds", "0.3", "--seeds", "2"]
    assert baselines.main(words) == 0
    out = tmp_path / "out"
    rows = rows_of(out / "baselines.csv")
    assert {(r["problem"], r["objective"]) for r in rows} == {
        ("dnn_partitioning/throughput/layer/tiny", "max_load"),
        ("dnn_partitioning/latency/layer/tiny", "piecewise_latency"),
        ("moirai/tiny", "period"),
        ("moirai/tiny latency", "latency"),
        ("pipedream/tiny", "period"),
    }
    mine = {
        (r["planner"].partition(":")[2] or r["planner"], r["seed"]): r
        for r in rows
        if r["problem"] == "dnn_partitioning/throughput/layer/tiny"
        and not r["planner"].startswith("single:")
    }
    assert {k for k in mine if k[0] == "random_search"} == {
        ("random_search", "0"),
        ("random_search", "1"),
    }
    assert float(mine["random_search", "0"]["value_s"]) == pytest.approx(4.75e-3)  # of 81
    assert float(mine["random_search", "0"]["ratio"]) == 1
    assert float(mine["ideal_dp", ""]["ratio"]) == pytest.approx(5.25 / 4.75)
    assert float(mine["FallsBack", ""]["ratio"]) == pytest.approx(8 / 4.75)
    assert mine["FallsBack", ""]["note"] == "gave up"
    assert mine["Refuses", ""]["note"] == "refused: 4 operators are too many"
    assert "SIGKILL" in mine["Dies", ""]["note"] and mine["Dies", ""]["feasible"] == "False"
    text = (out / "baselines.md").read_text()
    # A planner without answers counts as one device: 8 / 4.75 on this problem.
    (line,) = [x for x in text.splitlines() if x.startswith(f"| {HERE}:Dies | ")]
    assert "5 of 5" in line and f"{8 / 4.75:.3f}" in line
    assert "operators are too many" in text and (out / "baselines.png").stat().st_size > 0
    # A second run finds everything; the table is the same.
    no_more_runs()
    assert baselines.main(words) == 0
    assert rows_of(out / "baselines.csv") == rows


def test_baselines_in_two_processes(tmp_path: Path, places: list[str]) -> None:
    words = ["synthetic/layered", "synthetic/u_net", "--planners", "round_robin,balanced_split"]
    assert baselines.main([*words, *places, "--processes", "2"]) == 0
    rows = rows_of(tmp_path / "out" / "baselines.csv")
    # Two problems, each on four single devices and by two planners.
    assert len(rows) == 2 * (4 + 2) and all(float(r["ratio"]) >= 1 for r in rows)
    for name in ("synthetic/layered", "synthetic/u_net"):
        assert min(float(r["ratio"]) for r in rows if r["problem"] == name) == 1


def test_the_estimate_counts_seeds_of_planners_that_draw_alone() -> None:
    assert baselines.estimate_s(["macro_search"], 2.0, 3, 10) == 60
    assert baselines.estimate_s(["heft"], 2.0, 3, 10) == 10  # ends at half its budget or before
    assert baselines.estimate_s(["round_robin"], 2.0, 3, 10) == 2
    assert _study.is_search("brkga") and not _study.is_search("cp_sat")


@needs_data
def test_the_default_baselines_are_48_problems() -> None:
    every = baselines.problems(_study.DATA, [])
    objectives = [p.objective for p in every.values()]
    assert len(every) == 10 + 5 + 9 + 2 * 2 + 20
    assert objectives.count("max_load") == 10 and objectives.count("piecewise_latency") == 5
    assert all(n <= 2502 for n in (p.num_ops for p in every.values()))


# --- public --------------------------------------------------------------------------------------


def program(folder: Path, body: str) -> Path:
    path = folder / "dp.exe"
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return folder


def test_exact_beside_a_reference(
    data: Path, tmp_path: Path, places: list[str], no_more_runs: Callable[[], None]
) -> None:
    # It reads the file, answers, and fails its own check, as the published one does.
    cpp = program(tmp_path, "grep -q maxFPGAs && echo '{\"maxLoad\": 5.25} FAIL'; exit 1")
    words = ["exact", "throughput", "--data", str(data), *places, "--rounds", "2"]
    words += ["--reference", str(cpp), "--reference-seconds", "60"]
    assert public.main(words) == 0
    (row,) = rows_of(tmp_path / "out" / "public_exact.csv")
    assert float(row["value_s"]) == pytest.approx(5.25e-3) and abs(float(row["error"])) < 1e-12
    assert float(row["reference_value_s"]) == pytest.approx(5.25e-3)
    assert row["reference_rounds"] == "2" and row["reference_status"] == "ok"
    text = (tmp_path / "out" / "public_exact.md").read_text()
    assert "--reference" in text and str(tmp_path) not in text and str(tmp_path) not in str(row)
    assert row["is_optimum"] == "True" and float(row["truth_reference_s"]) == 4
    # Nothing changed: nothing runs.
    no_more_runs()
    assert public.main(words) == 0


def test_a_reference_that_takes_too_long_or_says_nothing(tmp_path: Path) -> None:
    source = tmp_path / "file"
    source.write_text("")
    slow = public.run_reference(program(tmp_path, "exec sleep 60") / "dp.exe", source, 0.3)
    assert (slow.status, slow.value_s) == ("out of time", None)
    mute = public.run_reference(program(tmp_path, "echo nonsense") / "dp.exe", source, 30)
    assert (mute.status, mute.value_s) == ("no answer", None)


def test_exact_says_where_the_reference_comes_from(
    data: Path, tmp_path: Path, places: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["exact", "--data", str(data), *places, "--reference", str(tmp_path)]
    assert public.main(words) == 2
    assert "g++" in capsys.readouterr().err


def test_a_value_that_is_not_the_recorded_optimum_is_an_error(
    data: Path, tmp_path: Path, places: list[str]
) -> None:
    path = data / "dnn_partitioning" / "truth.json"
    path.write_text(path.read_text().replace("5.25", "5.2"))
    assert public.main(["exact", "throughput", "--data", str(data), *places, "--rounds", "1"]) == 1
    text = (tmp_path / "out" / "public_exact.md").read_text()
    assert "Not the optimum: dnn_partitioning/throughput/layer/tiny.json" in text


def search_words(data: Path, places: list[str]) -> list[str]:
    budgets = ["--seconds", "0.1", "--seeds", "2", "--exact-seconds", "10"]
    return ["search", "--data", str(data), *places, *budgets]


def test_search_against_what_is_known(data: Path, tmp_path: Path, places: list[str]) -> None:
    assert public.main(search_words(data, places)) == 0
    rows = rows_of(tmp_path / "out" / "public_search.csv")
    found = {(r["objective"], r["planner"], r["seed"]): float(r["value_s"]) for r in rows}
    assert found["max_load", "cp_sat", ""] == pytest.approx(4.75e-3)
    assert found["max_load", "macro_search", "1"] <= 5.25e-3 * (1 + 1e-9)
    assert found["max_load", "ideal_dp", ""] == pytest.approx(5.25e-3)
    assert found["piecewise_latency", "macro_search", "0"] == pytest.approx(8e-3)
    proved = [float(r["bound_s"]) for r in rows if r["planner"] == "cp_sat"]
    assert proved[0] == pytest.approx(4.75e-3, rel=1e-5)
    lines = (tmp_path / "out" / "public_search.md").read_text().splitlines()
    loads, latency = (x for x in lines if x.startswith("| throughput") or x.startswith("| latency"))
    # Best known (that of a tool that ignores memory does not count), and the best ratio to it.
    assert loads.split(" | ")[3] == "5.2500" and loads.split(" | ")[5] == f"{4.75 / 5.25:.4f}"
    assert latency.split(" | ")[1:4] == ["8.0000", "8.0000", "8.0000"]


def test_a_value_below_a_proved_bound_is_an_error(
    data: Path, tmp_path: Path, places: list[str]
) -> None:
    path = data / "dnn_partitioning" / "truth.json"
    records = json.loads(path.read_text())
    file = "throughput/layer/tiny.json"
    records.append(truth_of(file, "max_load", "cpsat_noncontig", 9.0, lower_bound=9.0))
    path.write_text(json.dumps(records))
    assert public.main([*search_words(data, places), "throughput"]) == 1
    assert "Below a proved bound" in (tmp_path / "out" / "public_search.md").read_text()


def test_pipedream_and_moirai(data: Path, tmp_path: Path, places: list[str]) -> None:
    words = ["--data", str(data), *places, "--seconds", "0.2"]
    assert public.main(["pipedream", *words, "--devices", "2"]) == 0
    rows = rows_of(tmp_path / "out" / "public_pipedream.csv")
    period = {r["planner"]: float(r["value_s"]) for r in rows}
    # Forward and backward of 8 operators: 24 ms; 9 | 15 is the best cut of the chain.
    assert period["single_device"] == pytest.approx(24e-3)
    assert period["antichain_dp"] == pytest.approx(15e-3, rel=0.01)
    assert all("in_flight=4" in r["settings"] and "mode=training" in r["settings"] for r in rows)
    assert public.main(["moirai", *words]) == 0
    rows = rows_of(tmp_path / "out" / "public_moirai.csv")
    assert {r["objective"] for r in rows} == {"latency", "period"}
    one = next(r for r in rows if (r["planner"], r["objective"]) == ("single_device", "latency"))
    assert float(one["value_s"]) == pytest.approx(8e-3)


def test_a_word_that_no_file_has(
    data: Path, places: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert public.main(["moirai", "nothing", "--data", str(data), *places]) == 2
    assert "nothing" in capsys.readouterr().err


@needs_data
def test_best_known_values_are_those_of_splits_that_fit() -> None:
    truth = public.known(_study.DATA)
    file = "dnn_partitioning/throughput/layer/bert24_inference.json"
    assert public.best_known_s(truth, file, "max_load") == pytest.approx(17.7147e-3, rel=1e-5)
    assert public.known_bound_s(truth, file, "max_load") == pytest.approx(17.7147e-3, rel=1e-5)
    file = "dnn_partitioning/latency/layer/resnet50_inference.json"
    assert public.best_known_s(truth, file, "latency") == pytest.approx(1156.88e-3, rel=1e-5)
    # Bounds of one piece per accelerator are not bounds of every placement.
    file = "dnn_partitioning/latency/operator/bert_l-3_inference.json"
    assert public.known_bound_s(truth, file, "latency") == pytest.approx(47.8232e-3, rel=1e-5)


# --- scale ---------------------------------------------------------------------------------------


def test_scale_survives_planners_that_do_not(
    tmp_path: Path, places: list[str], no_more_runs: Callable[[], None]
) -> None:
    names = ["round_robin", *(f"{HERE}:{x}" for x in ("Refuses", "Dies", "Sleeps", "FallsBack"))]
    words = [*names, "--operators", "60", "100", "--devices", "2", "--limit", "4", *places]
    assert scale.main(words) == 0
    rows = rows_of(tmp_path / "out" / "scale.csv")
    status = {(r["planner"].partition(":")[2], r["operators"]): r["status"] for r in rows}
    # 60 operators make two layers of 50, as 100 do: these were run once.
    assert status == {
        ("", "100"): "ok",
        ("Refuses", "100"): "refused",
        ("Dies", "100"): "killed",
        ("Sleeps", "100"): "out of time",
        ("FallsBack", "100"): "ok",
    }
    text = (tmp_path / "out" / "scale.md").read_text()
    assert "SIGKILL" in text and "gave up" in text and "N operators are too many" in text
    # What a limit stopped is not tried on more operators.
    more = [*names, "--operators", "100", "150", "--devices", "2", "--limit", "4", *places]
    assert scale.main(more) == 0
    rows = rows_of(tmp_path / "out" / "scale.csv")
    status = {(r["planner"].partition(":")[2], r["operators"]): r["status"] for r in rows}
    assert status["Sleeps", "150"] == status["Dies", "150"] == "not tried"
    assert status["Refuses", "150"] == "refused" and status["", "150"] == "ok"
    assert (tmp_path / "out" / "scale.png").stat().st_size > 0
    no_more_runs()
    assert scale.main(more) == 0


def test_scaled_problems_have_the_size_that_was_asked_for() -> None:
    made = scale.problem(260, 5)
    assert made.num_ops == 300 and made.num_devices == 5
    assert np.ptp(made.compute_s, axis=1).max() == 0  # equal devices
