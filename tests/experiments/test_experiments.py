"""The studies: their harness, one small run of each, and the committed pages made again."""

import csv
import importlib
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import agents.cli.compare
import agents.cli.train
from experiments import (
    baselines,
    bench,
    fidelity,
    pipelining,
    prediction,
    public,
    results,
    runs,
    schedules,
    study,
)
from experiments.runs import GIB, ended, in_turns, limited, seconds_per_item
from experiments.study import Finished, Option, Study, StudyError
from experiments.tables import Column, read_csv, table, to_csv
from placement.__main__ import main
from placement.cluster import Cluster
from placement.costs import predictors
from placement.problem import Problem, Solution
from tests.costs.test_latency import sample
from tests.problems import random_problem, written

needs_data = pytest.mark.skipif(
    not (study.DATA / "dnn_partitioning" / "truth.json").exists(),
    reason="the public workloads are not beside the checkout",
)
needs_two_cores = pytest.mark.skipif(Cluster.detect().num_devices < 2, reason="needs two cores")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def _warm_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on whether all kernels were loaded before."""
    monkeypatch.setattr("experiments.runs.WARM_S", 1e-3)


@pytest.fixture
def places(tmp_path: Path) -> list[str]:
    folders = {"--out": tmp_path / "out", "--work": tmp_path / "work"}
    return [str(x) for pair in folders.items() for x in pair]


@pytest.fixture
def no_more_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After it is called, a study that runs anything fails."""
    fail = Mock(side_effect=AssertionError("this was finished already"))

    def forbid() -> None:
        monkeypatch.setattr("placement.executor.Executor.run", fail)
        for module in ("runs", "grid"):
            monkeypatch.setattr(f"experiments.{module}.limited", fail)

    return forbid


# --- planners that end badly: loaded by name, as package.module:Class ----------------------------


@dataclass(frozen=True)
class Refuses:
    def __call__(self, problem: Problem) -> Solution:
        raise StudyError(f"{problem.num_ops} operators are too many")


@dataclass(frozen=True)
class Dies:
    def __call__(self, problem: Problem) -> Solution:
        if problem.graph.name not in runs.WARM:
            os.kill(os.getpid(), signal.SIGKILL)
        raise StudyError("only pretends to be warm")


@dataclass(frozen=True)
class FallsBack:
    def __call__(self, problem: Problem) -> Solution:
        return Solution(np.zeros(problem.num_ops, np.int32), 1.0, stats={"message": "gave up"})


HERE = "tests.experiments.test_experiments"


# --- runs under a limit --------------------------------------------------------------------------


def raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("call", "status", "note"),
    [
        (lambda: 7, "ok", ""),
        (lambda: raises(StudyError("no: 3 > 2")), "refused", "no: 3 > 2"),
        (lambda: raises(ZeroDivisionError("oh")), "failed", "ZeroDivisionError: oh"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed", "SIGKILL"),
        (lambda: os._exit(3), "killed", "exit code 3"),
        (lambda: np.ones(2**40), "out of memory", ""),
        (lambda: time.sleep(60), "out of time", "0.5 s"),
    ],
)
def test_however_a_run_ends_we_go_on(call: Callable[[], Any], status: str, note: str) -> None:
    run = limited(call, 0.5 if status == "out of time" else 30, 64 * GIB)
    assert run.status == status and note in run.note
    assert run.value == (7 if status == "ok" else None)


@pytest.mark.parametrize(("count", "items"), [(12, 4 + 9), (24, 7 + 18), (2, 1 + 9)])
def test_items_of_a_study_are_whole_rounds_of_the_phases(monkeypatch, count, items):
    """Of nine turns eight take 1 s and one 10: 18 s a round, wherever it begins."""
    now, asked = [0.0], list[int]()
    monkeypatch.setattr(runs.time, "perf_counter", lambda: now[0])

    def stream(some: int) -> Iterator[None]:
        asked.append(some)
        for i in range(some):
            now[0] += 10.0 if i % 9 == 5 else 1.0
            yield

    seconds = seconds_per_item(lambda some: ended(stream(some)), count, 9)
    assert seconds == 2.0 and asked == [items]


def test_ways_take_turns() -> None:
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    values = in_turns(ways, 2, warm_up=1)
    assert "".join(order) == "abccbaabc"
    found = {name: v.tolist() for name, v in values.items()}
    assert found == {"a": [6, 7], "b": [5, 8], "c": [4, 9]}


# --- the harness ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    name: str
    value: float | None
    more: dict[str, float] | None = None


def test_finished_rows_are_not_made_again(tmp_path: Path) -> None:
    finished, calls = Finished(tmp_path / "new"), list[str]()

    def make(name: str, value: float) -> Cell:
        calls.append(name)
        return finished.row(Cell, name, lambda: calls.append("!") or Cell(name, value), name)

    assert make("a", 1.5) == make("a", 2.5) == Cell("a", 1.5)
    assert make("b", float("inf")).value == float("inf") and calls.count("!") == 2
    # Of another version, or half a file: made again; not to be kept: made every time.
    (path,) = (tmp_path / "new").glob("a-*")
    path.write_text('{"title": "a"}')
    assert make("a", 3.5) == Cell("a", 3.5)
    path.write_text('{"name": "a", "va')
    assert make("a", 4.5) == Cell("a", 4.5)
    for value in (1.0, 2.0):
        row = finished.row(Cell, "c", lambda v=value: Cell("c", v), keep=lambda row: False)
        assert row.value == value


def test_tables(tmp_path: Path) -> None:
    rows = [Cell("a,b|c", None), Cell("d", 0.0123456, {"x": 1.5})]
    assert to_csv(rows) == "name,value,more\n\"a,b|c\",,\nd,0.0123456,{'x': 1.5}\n"
    (tmp_path / "x.csv").write_text(to_csv(rows))
    assert read_csv(Cell, tmp_path / "x.csv") == rows and read_csv(Cell, tmp_path / "y.csv") == []
    columns = (Column("n", "name"), Column("v", "value", 2, 1e3, " ms"), Column("2", lambda r: 2))
    assert table(rows, *columns).splitlines() == [
        "| n | v | 2 |",
        "|---|---:|---:|",
        "| a,b\\|c | – | 2 |",
        "| d | 12.35 ms | 2 |",
    ]


def test_a_study_from_its_command_line(tmp_path, places, monkeypatch, capsys):
    (tmp_path / "pages.md").write_text("<!-- it -->\n# Of {count:,}\n\n{table}\n\nThe {word}.\n")
    monkeypatch.setattr(study, "PAGES", tmp_path / "pages.md")

    def rows(options: Any) -> Any:
        if options.count == 13:
            raise StudyError("13 are too many")
        if options.count == 14:
            raise KeyboardInterrupt
        return ({"x": x} for x in options.several)

    one = Study(
        name="it", word="first", rows=rows, columns=(Column("x", "x"),),
        options={"count": 2000, "several": (1.0,), "word": "end"},
        facts=lambda options: {"count": options.count},
        wrong=lambda rows, options: [r for r in rows if r["x"] < 0],
    )  # fmt: skip
    words = ["first", "--several", "2", "3.5", *places]
    assert study.run((one,), words) == 0
    page = (tmp_path / "out" / "it.md").read_text()
    command = "python -m experiments.it first --several 2 3.5 --out out --work work"
    start = f"# Of 2,000\n\n`{command}`\n\n"
    assert page.startswith(start + "| x |\n|---|\n| 2.000 |\n| 3.500 |\n\nThe end.\n\n- when: ")
    assert page.endswith("- count: 2000\n") and "- numpy: " in page
    assert json.loads((tmp_path / "out" / "it.json").read_text())["rows"] == [{"x": 2}, {"x": 3.5}]
    assert capsys.readouterr().out.startswith(start)
    assert study.run((one,), ["first", "--several", "-1", *places]) == 1
    assert study.run((one,), ["first", "--count", "13", *places]) == 2
    assert "error: 13 are too many" in capsys.readouterr().err
    assert study.run((one,), ["first", "--count", "14", *places]) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert Option((), word=True) and study.parse((one,), ["first"]).several == (1.0,)


def all_studies() -> dict[str, tuple[Study, tuple[Study, ...]]]:
    names = [p.stem for p in Path(study.__file__).parent.glob("*.py")] + ["learned.__main__"]
    modules = [importlib.import_module(f"experiments.{name}") for name in names]
    return {one.name: (one, all_of(m)) for m in modules for one in all_of(m)}


def all_of(module: Any) -> tuple[Study, ...]:
    """Those of a module."""
    return getattr(module, "STUDIES", (module.STUDY,) if hasattr(module, "STUDY") else ())


STUDIES = all_studies()
# Dashes for figures that are not there, where the committed page has nothing or what it counted.
EXPLAINED = {"training": r"\|  \|", "baselines": r"operator/bert_l-(12|3)_inference"}
FROM_MORE_THAN_ROWS = ("prediction",)


def test_every_study_has_a_page() -> None:
    sections = re.findall(r"^<!-- (\w+) -->$", study.PAGES.read_text(), re.MULTILINE)
    assert sorted(sections) == sorted([*STUDIES, "results", "optima"])


@pytest.mark.parametrize("name", sorted(set(STUDIES) - set(FROM_MORE_THAN_ROWS)))
def test_the_committed_page_follows_from_the_committed_rows(name: str) -> None:
    one, group = STUDIES[name]
    path = study.RESULTS / f"{name}.md"
    if name.startswith(("public_search", "learned_published")) and not study.DATA.exists():
        pytest.skip("needs what is known of the public workloads")
    try:
        rows = one.read()
    except (FileNotFoundError, KeyError):
        rows = []
    if not rows or not path.exists():
        pytest.skip("made before rows were written in this form")
    committed = path.read_text()
    words, _ = study.origin(committed)
    if one.word and words[:1] != [one.word]:
        words = [one.word, *words]
    page = one.page(rows, study.parse(group, words))

    def lines(text: str) -> list[str]:
        text = text.partition("\n- when: ")[0]
        rest = [x for x in text.splitlines() if x and not re.fullmatch(r"\|[-:|]+\|", x)]
        skipped = EXPLAINED.get(name, "$^")
        return [re.sub(r"^# .*", "", x) for x in rest if not re.search(skipped, x.replace("–", ""))]

    assert lines(page) == lines(committed)


def test_the_first_table_compares_what_is_kept_with_the_best_of_pytorch(tmp_path: Path) -> None:
    file = json.loads((study.RESULTS / "compiled.json").read_text())
    took = {"plain, 2 core_s": 0.01, "compiled, 2 core_s": 0.008, "kept_s": 0.005}
    first = {k: v for k, v in file["rows"][0].items() if "copies" not in k} | took
    changes = {}, {"compiled, 2 core_s": None}, {"plain, 2 copies_s": 6e-3}
    file["rows"] = [first | change for change in changes]
    (tmp_path / "compiled.json").write_text(json.dumps(file))
    head, _, compiled, without, copies = results.first_table(tmp_path).splitlines()
    assert "| compiled, 2 cores | compiled, 2 copies | ours, 1 core | ours, 2 cores |" in head
    assert "| 8.00 ms |" in compiled and compiled.endswith("| 1.60x |")  # 8 over 5 ms
    assert "| – |" in without and without.endswith("| 2.00x |")
    assert "| 6.00 ms |" in copies and copies.endswith("| 1.20x |")


# --- small runs ----------------------------------------------------------------------------------

SMALL = {
    "bench": "",
    "learned.__main__": "zero_shot 'synthetic: synthetic/fork_join-900 period' --pipelines 0",
    "pipelining": "tiny_mlp tiny_mlp:0.6 tiny_mlp:latency --rounds 1 --count 8",
    "training": "resnet_tiny --steps 1 --rounds 1 --microbatches 2 --seconds 0.2 "
    "--planner contiguous_dp",
    "peers": "pipelining --tiny --rounds 1 --micro-batches 2 --repeats 1",
    "fidelity": "tiny_cnn --placements 9 --rounds 1 --minutes 0 --repeats 1",
}
RESUMED = ("fidelity", "learned.__main__")
SAYS = {
    "learned.__main__": r"\| period \| 1 \| 1\.\d+ \(",
    "bench": r"\| problem and its tables \| [\d.]+ \| ms \| ≤ 300 [✓✗] \|",
    "pipelining": r"\| tiny_mlp \| 6 \| .* ms \| .*x \| (?s:.*)tiny_mlp:0.6 \| 6 \| – \| – \|",
    "training": r"\| resnet_tiny \| \d+ \| .* \| 1 \| [01]\.\de[+-]0\d \| (?s:.*)\| searched \|",
    "peers": r"\| tiny \| 30 \| .* ms \| .*x \(",
    "fidelity": r"\| tiny_cnn \| 9 \| 1 \|(?s:.*)without slowing down of busy neighbours",
}


@needs_two_cores
@pytest.mark.usefixtures("quick_profiles")
@pytest.mark.parametrize("name", SMALL)
def test_a_small_run(name, places, no_more_runs, says, monkeypatch):
    monkeypatch.setattr("experiments.bench.SECTIONS", (bench.problem_tables,))
    monkeypatch.setitem(bench.medians_s.__kwdefaults__, "rounds", 1)
    cut = dict.fromkeys(("best cut", "best found"), "contiguous_dp")
    monkeypatch.setattr("experiments.pipelining.PLANNED", pipelining.PLANNED | cut)
    monkeypatch.setattr("experiments.pipelining.ROUND_S", 0.0)
    monkeypatch.setattr(runs.measured_problem, "__defaults__", (2,))
    module = importlib.import_module(f"experiments.{name}")
    main = getattr(module, "main", partial(study.run, all_of(module)))
    words = [*shlex.split(SMALL[name]), *places]
    text = says(words, 0, main).out
    assert re.search(SAYS[name], text)
    if name in RESUMED:  # nothing is left to do: the same figures again
        no_more_runs()
        assert says(words, 0, main).out == text


def test_schedules_of_cases(tmp_path: Path, places: list[str]) -> None:
    pytest.importorskip("ortools")
    rows = [(0, [0], 1, 1, []), (1, [1], 1, 1, [0]), (2, [1], 3, -1, [1]), (3, [0], 3, -1, [2])]
    keys = ("id", "devices", "time", "memory", "deps")
    case = {"ndevs": 2, "mode": "train", "blocks": [dict(zip(keys, r, strict=True)) for r in rows]}
    record = {"case": "v", "memory": 2, "period": 4, "best_makespan": {"8": [36, "known"]}}
    written(tmp_path / "data/schedules/cases.json", {"cases": {"v": case}})
    written(tmp_path / "data/schedules/truth.json", {"records": [record]})
    words = ["--data", str(tmp_path / "data"), *places]
    assert study.run(schedules.STUDY, words) == 0
    text = (tmp_path / "out" / "schedules.md").read_text()
    # GPipe would hold 32 micro-batches; 1F1B two.
    assert "| v | 2 | 4 | 4 | 4 |" in text and "| 36 / 36 | 68 / – | 132 / – | – | 132 |" in text
    assert "period of truth.json reached or less: 1 of 1" in text
    assert study.run(schedules.STUDY, [*words, "--cases", "nix"]) == 2


def test_a_family_is_predicted_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(f"model {seed}", "abc"[seed % 3], "mlp") for seed in range(6)]
    cases = [prediction.Case(*x, sample(seed), 0.02) for seed, x in enumerate(names)]
    family_of = {id(c.sample): c.family for c in cases}
    seen: list[set[str]] = []

    class Spy:
        def fit(self, samples):
            seen.append({family_of[id(s)] for s in samples})
            return self

        def predict(self, graph, device):
            return np.ones(graph.num_ops), np.ones(graph.num_ops)

    monkeypatch.setattr(predictors, "load", lambda name, **_: Spy())
    answers = prediction.answers(cases, ["spy"])
    assert sorted(a.case.name for a in answers) == sorted(c.name for c in cases)
    assert sorted(map(sorted, seen)) == [["a", "b"], ["a", "c"], ["b", "c"]]
    with pytest.raises(StudyError, match="models of 1 family"):
        prediction.answers(cases[:1], ["roofline"])
    # All are 30 % too low: measuring some operators corrects the others.
    wrong = [prediction.Answer(c, "polynomial", 0.7 * c.sample.compute_s, c.sample.compute_s)
             for c in cases]  # fmt: skip
    assert prediction.row_of(wrong[0]).error == pytest.approx(-0.3)
    lines = prediction.saved(wrong).splitlines()
    assert lines[2].split("|")[3].strip() == "30.0" and float(lines[-1].split("|")[3]) < 1.0
    assert prediction.saved([]).count("\n") == 2


def test_tables_of_predictions_are_those_of_the_committed_rows() -> None:
    committed = (study.RESULTS / "prediction.md").read_text()
    assert prediction.whole_models(prediction.STUDY.read()) in committed


def test_regret_and_rank_correlation() -> None:
    searches = {"measured": [2, 2.0], "roofline": [3, 3.0], "polynomial": [2, 2.2]}
    searches["trees"] = [2, 1.9]
    measured = {f"search, {k}": v for k, v in searches.items()} | {"random 0": [4, 4.0]}
    backwards = {name: [1 / x, 1 / y] for name, (x, y) in measured.items()}
    ranks = {"measured": 1.0, "roofline": 0.5, "polynomial": 0.9, "trees": 0.8}
    simulated = dict.fromkeys(ranks, measured) | {"roofline": backwards}
    plan = {"model": "m", "measured": measured, "simulated": simulated, "ranks": ranks}
    rows = {line.split("|")[1].strip(): line for line in prediction.placed([plan]).splitlines()[2:]}
    assert "| 0.0 | 0.0 | 1.000 | 1.000 | 0.0 | 0.0 |" in rows["measured"]
    assert "| 0.500 | -1.000 | 50.0 | 50.0 |" in rows["roofline"]
    assert "| 0.900 | 1.000 | 10.0 | 10.0 |" in rows["polynomial"]
    assert "| -5.0 | -5.0 |" in rows["trees"]


def test_what_a_correction_takes_away() -> None:
    profile = random_problem(0, 8, 2).profile
    profile = replace(profile, loaded_s=3 * profile.compute_s)
    less = {what: change(profile) for what, change in fidelity.CORRECTIONS.items()}
    assert less["slowing down of busy neighbours"].loaded_s is None
    assert all(x.wake_s == 0 for x in less["waking the receiver"].links)
    assert less["transfers and waking"].links == ()
    same = less["differences between the devices"].compute_s
    assert (same == profile.compute_s.min(axis=1)[:, None]).all() and same.shape == (8, 2)
    # Device 0 needs twice the seconds of its profile, device 1 half of them.
    here = fidelity.as_slow_as(profile, profile.compute_s.sum(axis=0) * [2.0, 0.5])
    np.testing.assert_allclose(here.compute_s, profile.compute_s * [2.0, 0.5])
    np.testing.assert_allclose(here.loaded_s, profile.compute_s * [6.0, 1.5])
    # 1 against median(2, 4) = 3; 2 against 2.5; 4 against 1.5.
    assert fidelity.between_rounds([1.0, 2.0, 4.0]) == pytest.approx((2 / 3 + 0.2 + 5 / 3) / 3)


# --- public files --------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [(baselines, "moirai/*"), (public, "search")])
def test_without_the_files_the_message_says_where_they_are(run, tmp_path, places, capsys):
    assert study.run(all_of(run[0]), [run[1], "--data", str(tmp_path), *places]) == 2
    stderr = capsys.readouterr().err
    assert "github.com/msr-fiddle/dnn-partitioning" in stderr and "--data" in stderr


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
    nodes = [node(i, t) for i, t in enumerate(times)]
    edges = [{"sourceId": i, "destId": i + 1, "cost": 0.25} for i in range(3)]
    chain = {"maxSizePerFPGA": 1e9, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}
    nodes = [{"id": i, "time": [t, 2 * t]} for i, t in enumerate(times)]
    link = [[0, 0.25], [0.25, 0]]
    edges = [{"src": i, "dst": i + 1, "transfer": link} for i in range(3)]
    unlike = {"model": "tiny", "num_devices": 2, "nodes": nodes, "edges": edges}
    profile = "".join(
        f"node{i} -- Op() -- forward_compute_time={t}.0, backward_compute_time={2 * t}.0, "
        f"activation_size=1000.0, parameter_size=10.0\n"
        for i, t in enumerate(times)
    ) + "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(3))
    loads = "throughput/layer/tiny.json", "max_load"
    truth = [
        truth_of(*loads, "own_dp_contiguous", 5.25),
        truth_of(*loads, "dp_cpp", 5.25, seconds=4.0),
        truth_of(*loads, "local_search_10", 1.0, status="unchecked"),
        truth_of("latency/layer/tiny.json", "latency", "greedy_cpp", 8.0),
    ]
    for objective in ("throughput", "latency"):
        written(folder / f"dnn_partitioning/{objective}/layer/tiny.json", chain)
    written(folder / "dnn_partitioning/truth.json", truth)
    written(folder / "moirai/tiny.json", unlike)
    written(folder / "pipedream/tiny.txt", profile)
    return folder


def truth_of(*facts: Any, status: str = "optimal", **more: Any) -> dict[str, Any]:
    record = dict(zip(("file", "objective", "method", "value"), facts, strict=True))
    return {**record, "status": status, "seconds": 0.0, "lower_bound": None, **more}


def test_baselines_from_the_command_line(data, tmp_path, places, no_more_runs, capsys):
    bad = ",".join(f"{HERE}:{kind}" for kind in ("Refuses", "Dies", "FallsBack"))
    words = ["dnn_partitioning/*", "moirai/tiny*", "pipedream/*", "--data", str(data), *places]
    words += ["--planners", f"ideal_dp,random_search,{bad}", "--seconds", "0.1", "--seeds", "2"]
    assert study.run(baselines.STUDY, words) == 0
    out = tmp_path / "out"
    rows = rows_of(out / "baselines.csv")
    assert {(r["problem"], r["objective"]) for r in rows} == {
        ("dnn_partitioning/throughput/layer/tiny", "max_load"),
        ("dnn_partitioning/latency/layer/tiny", "piecewise_latency"),
        ("moirai/tiny", "period"),
        ("moirai/tiny latency", "latency"),
        ("pipedream/tiny", "period"),
    }
    loads = [r for r in rows if r["problem"] == "dnn_partitioning/throughput/layer/tiny"]
    mine = {(r["planner"].partition(":")[2] or r["planner"], r["seed"]): r for r in loads}
    assert sorted(seed for name, seed in mine if name == "random_search") == ["0", "1"]
    assert float(mine["random_search", "0"]["value_s"]) == pytest.approx(4.75e-3)  # of 81
    assert float(mine["ideal_dp", ""]["value_s"]) == pytest.approx(5.25e-3)
    assert float(mine["FallsBack", ""]["value_s"]) == pytest.approx(8e-3)
    assert mine["FallsBack", ""]["note"] == "gave up"
    ended = {who: (mine[who, ""]["status"], mine[who, ""]["note"]) for who in ("Refuses", "Dies")}
    assert ended["Refuses"] == ("refused", "4 operators are too many")
    assert ended["Dies"][0] == "killed" and "SIGKILL" in ended["Dies"][1]
    text = (out / "baselines.md").read_text()
    # A planner without answers counts as one device: 8 / 4.75 on this problem.
    (line,) = [x for x in text.splitlines() if x.startswith(f"| {HERE}:Dies | ")]
    assert "5 of 5" in line and f"{8 / 4.75:.3f}" in line
    assert "operators are too many" in text and (out / "baselines.png").stat().st_size > 0
    # A second run finds everything; the table is the same.
    no_more_runs()
    assert study.run(baselines.STUDY, words) == 0
    assert rows_of(out / "baselines.csv") == rows
    # Bounds alone: what was proved to be less is raised, and the page keeps its command and facts.
    table, page = (out / "baselines.csv").read_text(), (out / "baselines.md").read_text()
    again = ["--bounds", "--data", str(data), *places]
    less = table.replace(mine["ideal_dp", ""]["bound_s"], "0.001")
    for content, code in ((less, 0), (table.replace("0.00475", "0.001"), 1)):
        (out / "baselines.csv").write_text(content)  # the second has a value below its bound
        assert study.run(baselines.STUDY, again) == code
    (out / "baselines.csv").write_text(less)
    assert study.run(baselines.STUDY, again) == 0 and (out / "baselines.csv").read_text() == table
    assert (out / "baselines.md").read_text().partition("- bounds: ")[0] == page
    (out / "baselines.csv").write_text(table.replace("0.008", "0.009"))  # one device's time
    assert study.run(baselines.STUDY, again) == 2
    assert "run the study without --bounds" in capsys.readouterr().err


def test_baselines_in_two_processes(tmp_path: Path, places: list[str]) -> None:
    words = ["synthetic/layered", "synthetic/u_net", "--planners", "round_robin,balanced_split"]
    assert study.run(baselines.STUDY, [*words, *places, "--processes", "2"]) == 0
    rows = rows_of(tmp_path / "out" / "baselines.csv")
    # Two problems, each on four single devices and by two planners.
    assert len(rows) == 2 * (4 + 2) and all(r["status"] == "ok" for r in rows)


@needs_data
def test_the_default_baselines_are_48_problems() -> None:
    every = baselines.problems(study.DATA, [])
    objectives = [p.objective for p in every.values()]
    assert len(every) == 10 + 5 + 9 + 2 * 2 + 20
    assert objectives.count("max_load") == 10 and objectives.count("piecewise_latency") == 5


def search_words(data: Path, places: list[str]) -> list[str]:
    budgets = ["--seconds", "0.2", "--seeds", "2", "--exact-seconds", "10"]
    return ["search", "--data", str(data), *places, *budgets]


def test_search_against_what_is_known(data: Path, tmp_path: Path, places: list[str]) -> None:
    assert study.run(public.STUDIES, search_words(data, places)) == 0
    rows = rows_of(tmp_path / "out" / "public_search.csv")
    values = {(r["objective"], r["planner"], r["seed"]): float(r["value_s"]) for r in rows}
    assert values["max_load", "mip", ""] == pytest.approx(4.75e-3)
    assert values["max_load", "macro_search", "1"] <= 5.25e-3 * (1 + 1e-9)
    assert values["max_load", "ideal_dp", ""] == pytest.approx(5.25e-3)
    assert values["piecewise_latency", "macro_search", "0"] == pytest.approx(8e-3)
    proved = [float(r["bound_s"]) for r in rows if r["planner"] == "mip"]
    assert proved[0] == pytest.approx(4.75e-3, rel=1e-5)
    lines = (tmp_path / "out" / "public_search.md").read_text().splitlines()
    loads, latency = (x for x in lines if x.startswith("| throughput") or x.startswith("| latency"))
    # Best known (that of a tool that ignores memory does not count), and the best ratio to it.
    assert loads.split(" | ")[3] == "5.2500" and loads.split(" | ")[5] == f"{4.75 / 5.25:.4f}"
    assert latency.split(" | ")[1:4] == ["8.0000", "8.0000", "8.0000"]


def test_a_value_below_a_proved_bound_is_an_error(data, tmp_path, places):
    path = data / "dnn_partitioning" / "truth.json"
    facts = ("throughput/layer/tiny.json", "max_load", "cpsat_noncontig", 9.0)
    written(path, [*json.loads(path.read_text()), truth_of(*facts, lower_bound=9.0)])
    assert study.run(public.STUDIES, [*search_words(data, places), "throughput"]) == 1
    assert "Below a proved bound" in (tmp_path / "out" / "public_search.md").read_text()


@needs_two_cores
@pytest.mark.usefixtures("quick_profiles")
def test_the_demo_goes_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of the Makefile, of a small model and with a small budget."""
    makefile = (study.ROOT / "Makefile").read_text().replace("\\\n", " ")
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    small = {"runs/demo": str(tmp_path), "resnet50": "tiny_mlp", "seconds=20": "seconds=0.3"}
    text = recipe[1].replace("repeats=8", "repeats=1").replace("rounds=3", "rounds=1")
    for old, new in small.items():
        text = text.replace(old, new)
    train, compare, *others = map(shlex.split, text.splitlines())
    assert agents.cli.train.main(train[1:]) == 0
    assert agents.cli.compare.main(compare[1:]) == 0
    assert (tmp_path / "report.html").is_file() and (tmp_path / "tiny_mlp/gantt.png").is_file()
    planners = {r["planner"] for r in rows_of(tmp_path / "compare.csv")}
    assert {"heft", "contiguous_dp", "policy"} <= planners
    for words in others:
        assert main(words[1:]) == 0
    assert "dist" in (tmp_path / "pipeline.py").read_text()
    assert "tiny_mlp" in capsys.readouterr().out
