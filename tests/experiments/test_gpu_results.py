"""What a run on a GPU left becomes results and problems, and these are planned from without one."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.cli.train import main as learn
from experiments import gpu_results, study
from experiments.gpu import bench
from experiments.grid import Cell
from placement import importers
from placement.__main__ import main
from placement.cluster import Cluster, Device
from placement.problem import Problem
from placement.workloads import dataset
from tests.problems import graph_of, problem_on

COMMITTED = sorted(gpu_results.DATASET.glob("*-cores/*.json.gz"))
FACTS: tuple[dict[str, Any], ...] = (
    {"section": "facts", "item": "cpu:0", "model": "Some CPU", "cores": 6},
    {"section": "facts", "item": "cuda:0", "model": "ACME G (1)", "cores": 2},
    {"section": "facts", "item": "versions", "python": "3.12.3", "torch": "2.11", "numpy": "2.5"},
    {"section": "facts", "item": "nvidia-smi",
     "text": "ACME G, Disabled, 580.1, 1980 MHz, 1900 MHz, 700.00 W\n"},
    {"section": "plans", "item": "m, latency", "gpu_ms": 2.0, "eager_ms": 1.5, "cpu_ms": 9.0},
    {"section": "correct_1", "item": "m", "way": "x", "error": float("inf"), "ok": False},
)  # fmt: skip

MORE: tuple[dict[str, Any], ...] = (
    {"section": "compiled", "item": "m, latency", "eager_ms": 4.0, "gpu_compiled_ms": 1.0,
     "kept": "gpu_compiled", "kept_over_torch": 1.25},
    {"section": "streaming", "item": "dense, half", "model_mib": 8.0, "plan_ms": 2.0,
     "plan_over_others": 1.5},
    {"section": "pieces", "item": "memory for half, equal", "plan_ms": 3.5, "shares": "0.5, 0.5",
     "bytes_on": "0.4, 0.6, 0.0"},
    {"section": "learning", "item": "m, bandit", "ran": 7, "measured_ms": 2.5, "gain": 1.75},
)  # fmt: skip


def problem(name: str) -> Problem:
    graph = graph_of(2, [(0, 1)], 8, name=name)
    cluster = Cluster("gpu", (Device("cpu:0"), Device("cuda:0", "cuda")))
    seconds = [[1.0, 0.5], [np.inf, 0.5]]
    facts = {"when": "2026-11-27T01:50:05+00:00", "cpu": "Some CPU", "cores": 8, "host": "secret"}
    profile = {"provenance": facts}
    return problem_on(graph, seconds, cluster=cluster, link=(1e-3,), profile=profile)


def folder_of_a_run(tmp_path: Path, *keys: str) -> Path:
    folder = tmp_path / f"run-{'-'.join(keys)}"
    folder.mkdir()
    (folder / "gpu.jsonl").write_text("".join(json.dumps(x) + "\n" for x in FACTS))
    with zipfile.ZipFile(folder / "profiles.zip", "w") as file:
        for key in keys:
            importers.save(problem(key), tmp_path / "x.json.gz")
            file.write(tmp_path / "x.json.gz", f"{key}.json.gz")
            file.writestr(f"{key}.npz", b"not read")
    return folder


def test_a_run_becomes_rows_a_page_and_problems(tmp_path: Path, capsys: Any) -> None:
    out, data = tmp_path / "out", tmp_path / "data"
    words = ["--out", str(out), "--dataset", str(data), "--work", str(tmp_path / "work")]
    assert gpu_results.main(["run", str(folder_of_a_run(tmp_path, "old", "resnet50")), *words]) == 0
    later = folder_of_a_run(tmp_path, "resnet50")
    lines = (later / "gpu.jsonl").read_text()
    (later / "gpu.jsonl").write_text("".join(json.dumps(x) + "\n" for x in MORE) + lines)
    assert gpu_results.main(["run", str(later), *words]) == 0
    read = json.loads((out / "gpu.json").read_text())
    assert read["rows"][-1] == FACTS[-1] | {"error": None, "run": "unknown"}
    about = read["provenance"]
    assert (about["card"], about["driver"], about["clock"]) == ("ACME G (1)", "580.1", "1900 MHz")
    assert (about["torch"], about["cores"], about["when"][:10]) == ("2.11", 8, "2026-11-27")
    page = capsys.readouterr().out
    assert "m, latency, operator by operator (0.75x)" in page
    assert "| 1.00 ms | gpu, compiled | 1.25x |" in page and "| 1.50x |" in page
    assert "| 3.50 ms | – | 0.5, 0.5 | 0.4, 0.6, 0.0 |" in page
    assert "| m, bandit | 7 | – | 2.50 ms | 1.75x |" in page
    reached = "0 of 1; 1 of 96 were done | no |"
    assert f"| results of 12 models | all equal, the same bits twice | {reached}" in page
    # What the run before had measured is gone; the rest names the card, and not the host.
    (name, problem), *others = dataset.load(data).items()
    assert name == "acme-g-1-6-cores/resnet50" and not others
    facts = problem.profile.provenance
    assert (facts["spec"], facts["kind"], facts["clock"]) == ("resnet50", "cnn", "1900 MHz")
    assert "secret" not in json.dumps(facts) + (data / "acme-g-1-6-cores/machine.json").read_text()
    rows = dataset.operators(dataset.load(data))
    assert {r.device for r in rows} == {"cpu:0", "cuda:0"}
    assert {r.machine for r in rows} == {"acme-g-1-6-cores"}


def test_a_later_run_replaces_sections_of_an_earlier_one(tmp_path: Path, capsys: Any) -> None:
    """The first compares and checks; the second compares again, and knows another model."""
    words = ["--out", str(tmp_path), "--dataset", str(tmp_path), "--work", str(tmp_path / "work")]
    folders = [folder_of_a_run(tmp_path, key) for key in ("one", "two")]
    runs = ("10:00", 2.0, 90), ("12:00", 3.0, 50)
    for folder, (began, ms, at) in zip(folders, runs, strict=True):
        run = {"section": "facts", "item": "run", "began": began, "at": at}
        rows = [run, *FACTS[:-2], FACTS[-2] | {"gpu_ms": ms}, *FACTS[-1:][: ms == 2.0]]
        (folder / "gpu.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    assert gpu_results.main(["run", *map(str, folders), *words]) == 0
    page = capsys.readouterr().out
    assert "Runs of 10:00, 90 s (facts, correct); 12:00, 50 s (facts, plans): ACME G (1)" in page
    assert "| 3.00 ms |" in page and "| 2.00 ms |" not in page and "0 of 1; 1 of 96" in page
    assert {*dataset.load(tmp_path)} == {f"acme-g-1-6-cores/{x}" for x in ("one", "two")}
    some = [str(folders[0]), f"{folders[1]}:correct"]
    assert gpu_results.main(["run", *some, *words]) == 2
    assert "there is no section correct" in capsys.readouterr().err
    assert gpu_results.main(["run", str(folders[1]), f"{folders[0]}:correct", *words]) == 0
    page = capsys.readouterr().out
    assert "Runs of 12:00, 50 s (facts, plans); 10:00, 90 s (facts, correct)" in page
    assert "| 3.00 ms |" in page and "0 of 1; 1 of 96" in page
    text = (folders[1] / "gpu.jsonl").read_text().replace("ACME G (1)", "ACME H")
    (folders[1] / "gpu.jsonl").write_text(text)
    assert gpu_results.main(["run", *map(str, folders), *words]) == 2
    assert "of ACME G (1) and ACME H: give those of one card" in capsys.readouterr().err


def test_the_table_of_a_half_has_no_rows_of_a_quarter(tmp_path: Path) -> None:
    file = json.loads((study.RESULTS / "gpu.json").read_text())
    for item, budget in (("moe, half", 0.5), ("moe, quarter", 0.25)):
        row = {"section": "streaming", "item": item, "budget": budget, "plan_ms": 2.0}
        file["rows"].append(row)
    (tmp_path / "gpu.json").write_text(json.dumps(file))
    for name in ("gpu_plans.csv", "gpu_plans.md"):
        (tmp_path / name).write_bytes((study.RESULTS / name).read_bytes())
    text = gpu_results.headlines(tmp_path)
    assert "| moe, half | 2.0 ms |" in text and "quarter" not in text


@pytest.mark.parametrize("lacks", ["gpu.jsonl", "profiles.zip", "problems"])
def test_a_folder_that_is_none_of_a_run_is_refused(tmp_path: Path, lacks: str, capsys: Any) -> None:
    folder = folder_of_a_run(tmp_path, *([] if lacks == "problems" else ["m"]))
    (folder / lacks).unlink(missing_ok=True)
    assert gpu_results.main(["run", str(folder), "--dataset", str(tmp_path / "data")]) == 2
    assert f"error: {folder}: " in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_the_best_plan_is_beside_the_better_device() -> None:
    def row(planner: str, value_s: float | None) -> Cell:
        ended = (None, 0.1, 1, "ok", "", 0.5)
        return Cell("", "latency/m", "latency", 2, 2, planner, None, None, None, value_s, *ended)

    some = [row("single:cpu:0", 9.0), row("single:cuda:0", 2.0), row("heft", 1.5)]
    assert "| -25.0 % | 500.000 ms |" in gpu_results.gains(some)
    assert "| +0.0 % |" in gpu_results.gains(some[:2])
    assert gpu_results.change([*some, row("mip", None)]) == pytest.approx(-0.25)


def test_the_committed_problems_are_planned_without_a_gpu(tmp_path: Path) -> None:
    """They are read without the module, and planners see that the GPU is the faster device."""
    assert {p.name for p in COMMITTED} >= {"bert_base.json.gz", "resnet50.json.gz"}
    for path in COMMITTED:
        problem = importers.load(path)
        assert problem.cluster.name == path.parent.name
        facts = problem.profile.provenance
        assert {"card", "driver", "clock", "torch", "when", "cpu"} <= set(facts)
        assert "host" not in facts
        assert problem.profile.graph_fingerprint == problem.graph.fingerprint
        assert path.parent.name in (study.ROOT / "docs" / "latency.md").read_text()
    path = next(p for p in COMMITTED if p.name == "resnet50.json.gz")
    plan = tmp_path / "plan.json"
    words = ["plan", str(path), "--planner", "single_device", "--objective", "latency"]
    assert main([*words, "--out", str(plan)]) == 0
    assert set(json.loads(plan.read_text())["assignment"].values()) == {"cuda:0"}


def test_a_policy_learns_on_a_committed_problem(tmp_path: Path) -> None:
    smallest = min(COMMITTED, key=lambda p: p.stat().st_size)
    words = [f"workload=[{smallest}]", "objective=latency", "debug=tiny"]
    assert learn([*words, f"hydra.run.dir={tmp_path}"]) == 0
    assert (tmp_path / "policy.safetensors").is_file()


def test_planners_are_compared_on_the_committed_problems(tmp_path: Path, capsys: Any) -> None:
    places = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    words = ["plans", "latency/resnet50", "--planners", "critical_path_greedy", *places]
    assert gpu_results.main(words) == 0
    assert "| latency/resnet50 |" in capsys.readouterr().out
    assert study.run(gpu_results.STUDIES, ["plans", "latency/nothing", *places]) == 2
    assert "latency/nothing" in capsys.readouterr().err


def test_plans_are_made_at_home_for_the_same_graph(tmp_path, monkeypatch):
    """Both operators are faster on the GPU, and one runs nowhere else."""
    posed = problem("m").with_objective("latency")
    (tmp_path / "card").mkdir()
    monkeypatch.setattr(gpu_results, "last_home", lambda: tmp_path / "card")
    monkeypatch.setattr(gpu_results, "problems", lambda patterns: {"latency/m": posed})
    monkeypatch.setattr(bench, "DATASET", tmp_path)
    assert gpu_results.main(["plans", "--home", "--seconds", "5"]) == 0
    there = bench.Bench(tmp_path, tmp_path, "plans", emulated=False)
    placement = there.home("latency/m", posed.graph)
    assert placement is not None and placement.tolist() == [1, 1]
    assert there.home("period/m", posed.graph) is None
    other = graph_of(3, [(0, 1), (1, 2)], 8, name="m")
    assert there.home("latency/m", other) is None
