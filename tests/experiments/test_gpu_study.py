"""The script for a real GPU runs to its end on an emulated one: no minute is lost to a typo."""

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from experiments import gpu_baselines, gpu_goals
from experiments.gpu import bench, memory, models, plans, predictions, processes
from experiments.gpu import pieces as one_matrix
from experiments.gpu.bench import Bench
from experiments.pieces import Cut
from experiments.study import ROOT, StudyError
from placement import pieces
from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.simulator import evaluate
from tests.problems import graph_of, problem_on

# What the emulated device, or this machine, cannot do; and it frees late where the machine is busy.
EXCUSED = ("nvidia-smi", "half of the activations")


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]


def script(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: this one has threads, which a forked one would miss."""
    command = [sys.executable, "-m", "experiments.gpu", "--out", str(out), *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


def test_every_section_runs_to_its_end(tmp_path: Path) -> None:
    names = [n for names, _ in processes.rounds_of(False, emulated=True) for n in names]
    done = script(tmp_path, "--emulated")
    assert done.returncode == 0, done.stderr
    results = rows(tmp_path)
    failed = [r for r in results if "failed" in r and not r["item"].endswith(EXCUSED)]
    assert not failed
    status = {r["section"]: r["status"] for r in results if r["item"] == "section"}
    assert status == dict.fromkeys(names, "done")
    wrong = [r for r in results if r.get("ok") is False]
    assert not wrong
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"### {name}" in text for name in names)
    assert done.stdout.endswith(text + "\n") and "### goals" in text
    with zipfile.ZipFile(tmp_path / "profiles.zip") as file:
        assert {"training.npz", "tiny_mlp.npz"} <= set(file.namelist())
    # What comes back from a lent machine is eight files at most.
    made = {p.name for p in tmp_path.iterdir()}
    assert made == {"gpu.jsonl", "gpu.md", "profiles.zip", "traces.txt"}


def options(out: Path) -> argparse.Namespace:
    facts = {"sections": [], "emulated": True, "began": time.perf_counter()}
    return argparse.Namespace(out=out, work=out, **facts)


def test_a_section_that_hangs_or_dies_costs_no_other(tmp_path: Path) -> None:
    """Processes that end well, with an error, by a signal, and not at all."""

    works: dict[str, Any] = {
        "facts": lambda: None,
        "micro": lambda: os._exit(3),
        "correct": lambda: os.kill(os.getpid(), 9),
        "train": lambda: time.sleep(60),
    }
    running = {name: processes.FORK.Process(target=work) for name, work in works.items()}
    for process in running.values():
        process.start()
    began = time.perf_counter()
    processes.watched(running, began, 1.0, options(tmp_path))
    ends = {"facts": "done", "micro": "exit code 3", "correct": "exit code -9", "train": "stopped"}
    assert {r["section"]: r["status"] for r in rows(tmp_path)} == ends


def test_an_item_that_fails_or_takes_too_long_is_a_row(tmp_path: Path) -> None:
    work = Bench(tmp_path, tmp_path, "micro", True)
    with work.item("slow", 0.1):
        time.sleep(10)
    with work.item("wrong"):
        raise RuntimeError("CUDA error: unspecified launch failure")
    work.emit("right", value=float("nan"))
    slow, wrong, right = rows(tmp_path)
    assert slow["failed"] == "stopped, as 0.1 s for 'slow' were over"
    assert 0.1 <= slow["at"] <= wrong["at"] <= right["at"] < 60  # since the script began
    assert "unspecified launch failure" in wrong["failed"]
    assert right["value"] is None
    assert "unspecified launch failure" in (tmp_path / "traces.txt").read_text()
    assert "| slow |" in gpu_goals.table((tmp_path / "gpu.jsonl").read_text().splitlines())


def test_every_goal_says_what_was_reached_and_whether_that_is_enough() -> None:
    def line(what: str, *rows: dict[str, Any]) -> str:
        return next(x for x in gpu_goals.goals(rows).splitlines() if x.startswith(f"| {what} |"))

    def row(section: str, item: str, **facts: Any) -> dict[str, Any]:
        return {"section": section, "item": item, **facts}

    what = "period predicted, median error"
    good, bad = (row("fidelity", f"m{e}", period_error=e) for e in (0.031, 0.12))
    assert "| nothing; 0 of 3 were done | no |" in line(what)
    assert "| 3.100 % | yes |" in line(what, good, good, good)
    assert "| 3.100 %; 1 of 3 were done | no |" in line(what, good)
    assert "| 3.100 % to 12.000 % | no |" in line(what, good, bad, good)
    equal = row("correct_1", "bert", ok=True, way="random 0")
    many = row("correct_5", "many micro-batches", ok=True)
    failed = row("correct_2", "vit", failed="stopped, as 9 s for 'vit' were over")
    what = "results of 12 models"
    assert "| 95 of 95; 95 of 96 were done | no |" in line(what, *[equal] * 95, many, failed)
    assert "| 96 of 96 | yes |" in line(what, *[equal] * 96)
    graphs = row("correct_1", "bert", ok=True, way="random 0 as CUDA graphs")
    trained, other = (row("train", f"mlp, {x}", ok=True) for x in ("as CUDA graphs", "random"))
    ran = [*[graphs] * 36, *[trained] * 5, equal, other]
    assert "| 41 of 41 | – |" in line("CUDA graphs: results", *ran)
    assert "| 1 of 1 | yes |" in line("300 micro-batches", equal, many, failed)
    training = row("training", "half of the activations", ok=False, step_ms=7.0)
    for what, shown in (
        ("training: losses and parameters", "| nothing; 0 of 15 were done | no |"),
        ("training with half of the activations", "| 0 of 1; 1 of 2 were done | no |"),
    ):
        assert shown in line(what, training)
    kept = [row("compiled", f"m{i}, latency", kept_over_torch=x) for i, x in enumerate([0.96, 2.0])]
    what = "latency: what optimize keeps, compiled too, over reduce-overhead"
    assert "| 0.960 to 2.000 | yes |" in line(what, *kept * 3)  # 0.95 is a 1.05th
    short = row("compiled", "m, latency", kept_over_torch=0.95)
    assert "| 0.950 to 2.000 | no |" in line(what, *kept * 3, short)
    over = [row("streaming", f"m{i}, half", plan_over_others=x) for i, x in enumerate([1.3, 1, 2])]
    what = "memory for a half: plan over the best of the others"
    assert "| 1.300x, 1.000x, 2.000x | yes |" in line(what, *over)
    assert "| no |" in line(what, over[0], over[1], over[1])
    ran = row("memory", "dlrm, half", model_mib=1.0)
    short = row("streaming", "moe, optimize", failed="OutOfMemoryError: CUDA out of memory")
    what = "another plan where memory is short"
    assert "| 14 of 14 | yes |" in line(what, *[ran] * 14)
    assert "| 13 of 14 | no |" in line(what, *[ran] * 13, short)
    assert "| 14 of 15 | no |" in line(what, *[ran] * 14, short)
    # The first command has two models, and no row of a way to a plan that did not fail.
    two = [row("memory", x, model_mib=1.0, cpu_ms=2.0, plan_ms=1.0) for x in ("decoder", "dlrm")]
    late = row("memory", "dlrm, optimize", failed="stopped, as 20 s for 'optimize' were over")
    assert "| 2 of 2 | yes |" in line(what, *two, late)
    assert "| 1 of 1; 1 of 2 were done | no |" in line(what, two[0], late)
    assert "| 2.000 | yes |" in line("half of the memory: plan over the CPU alone", *two)
    slow = row("profile", "resnet50_b32", kernels_ms=4.0)
    what = "resnet50_b32: period, launched one by one, over its kernels"
    for ms, met in ((4.0, "1.000 | yes"), (3.9, "0.975 | no")):
        assert f"| {met} |" in line(what, slow, row("plans", "resnet50_b32, period", gpu_ms=ms))
    facts = (
        row("facts", "cuda:0", model="NVIDIA H200"),
        row("facts", "cpu:0", model="Xeon", cores=14),
        row("facts", "nvidia-smi", text="NVIDIA H200, Disabled, 580.159.04, 1980 MHz\n"),
        row("facts", "versions", torch="2.11.0+cu130"),
        row("facts", "run", began="2026-11-27T03:52+00:00", at=301.2),
    )
    begins = "Run of 2026-11-27T03:52+00:00, 301 s: NVIDIA H200 beside 14 cores of Xeon, driver "
    assert gpu_goals.goals(facts).startswith(f"{begins}580.159.04, torch 2.11.0+cu130.\n")
    assert "unknown" in gpu_goals.goals([])


def test_an_item_within_another_leaves_it_its_time(tmp_path: Path) -> None:
    work = Bench(tmp_path, tmp_path, "plans", True)
    with work.item("around", 30):
        with work.item("short", 30):
            pass
        with work.item("long", 0.1):
            time.sleep(10)
        work.emit("after")
    assert [r["item"] for r in rows(tmp_path)] == ["long", "after"]


def test_an_item_whose_time_is_over_takes_what_is_in_it_along(tmp_path: Path) -> None:
    """What swallows errors, in the library or in an item, does not go on then."""
    work, began = Bench(tmp_path, tmp_path, "plans", True), time.perf_counter()
    with work.item("around", 0.2):
        for _ in range(100):
            with work.item("within", 30):
                try:
                    time.sleep(10)
                except Exception:
                    time.sleep(10)
    with work.item("next", 30):
        work.emit("next")
    first, second = rows(tmp_path)
    assert first["item"] == "around" and second["item"] == "next"
    assert first["failed"] == "stopped, as 0.2 s for 'around' were over"
    assert time.perf_counter() - began < 9


def test_a_profile_that_there_is_no_time_to_calibrate_is_taken_as_it_is(tmp_path: Path) -> None:
    def calibrated(graph: Any, cluster: Any, profile: Any) -> Any:
        time.sleep(0.1 if graph == "quick" else 10)
        return f"{profile}, calibrated"

    work = Bench(tmp_path, tmp_path, "profile", True, fair_s=0.5)
    args: Any = ("quick", None, "measured")
    assert work._calibrated("m", calibrated, *args) == "measured, calibrated"
    assert work._calibrated("m", None, *args) == "measured" and not [*tmp_path.iterdir()]
    assert work._calibrated("m", calibrated, "slow", *args[1:]) == "measured"
    (row,) = rows(tmp_path)
    assert row["item"] == "m, calibration" and "stopped, as 0.4 s" in row["failed"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_is_enforced_again_where_nobody_could_be_told(tmp_path, monkeypatch):
    class Deaf:
        def __del__(self) -> None:
            time.sleep(0.4)  # an exception in here is dropped by Python

    work = Bench(tmp_path, tmp_path, "plans", True)
    monkeypatch.setattr(bench, "AGAIN_S", 0.5)
    with work.item("around", 0.2):
        Deaf()
        time.sleep(20)
    assert rows(tmp_path)[0]["seconds"] < 15


def test_capturing_in_the_first_process_asks_cuda_for_nothing(tmp_path, monkeypatch):
    """It would begin there, and no forked process could use it: transformers asks for a stream."""
    asked = Mock(side_effect=AssertionError("CUDA was asked"))
    captured: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    monkeypatch.setattr(processes, "captured", lambda _: torch.cuda.is_current_stream_capturing())
    processes.prepare(captured, ["bert_tiny"], options(tmp_path))
    assert captured == {"bert_tiny": False}


def test_ways_take_turns_and_what_fails_stops_no_other(tmp_path: Path) -> None:
    work, called = Bench(tmp_path, tmp_path, "plans", True), []

    def way(name: str, seconds: list[float]) -> list[float]:
        called.append(name)
        return [seconds.pop(0)]

    fails = Mock(side_effect=RuntimeError("no kernel"))
    a, b = [3.0, 1.0, 2.0], [5.0, 4.0, 9.0]
    ways = {"a": lambda: way("a", a), "bad": fails, "b": lambda: way("b", b)}
    took = plans.medians(work, "m", ways, 4, until=0.0)
    assert took == {"a": [3, 1, 2], "b": [5, 4, 9]} and called == ["a", "b", "b", "a", "a", "b"]
    assert plans.times_as_fast(took, "a", "b") == 4.0  # of 5 / 3, 4 / 1, 9 / 2
    assert np.isnan(plans.times_as_fast(took, "bad", "b"))
    (row,) = rows(tmp_path)
    assert row["item"] == "m, bad" and "no kernel" in row["failed"]


def test_a_section_that_fails_outside_of_its_items_says_why(tmp_path, monkeypatch):
    fails = Mock(side_effect=StudyError("torch sees no CUDA device here"))
    watching: list[str] = []
    for name in ("enable", "dump_traceback_later"):  # pytest's own goes on
        monkeypatch.setattr(
            processes.faulthandler, name, lambda *_, n=name, **__: watching.append(n)
        )
    for name in ("disable", "cancel_dump_traceback_later"):
        monkeypatch.setattr(processes.faulthandler, name, watching.pop)
    monkeypatch.setitem(processes.SECTIONS, "facts", fails)
    with pytest.raises(SystemExit):
        processes.section("facts", 20.0, options(tmp_path))
    assert not watching  # or a thread would read this process's frames later, which may crash it
    (row,) = rows(tmp_path)
    assert row["failed"] == "StudyError: torch sees no CUDA device here"


def test_predictions_are_compared_with_the_middle_turn_of_placements() -> None:
    """Of three turns the second takes twice as long; predictions are 10 % too long."""
    plain = np.random.default_rng(0).uniform(1.0, 2.0, (20, 2))
    took = np.repeat([1.0, 2.0, 1.0], 20)[:, None] * plain[np.arange(60) % 20]
    facts = predictions.agreement(2 * plain, 1.1 * plain, took)
    assert facts["latency_error"] == pytest.approx(np.log(1.1)) == facts["period_error"]
    assert facts["period_plain_error"] == pytest.approx(np.log(2))
    assert facts["latency_floor"] == pytest.approx(np.log(2)) and facts["latency_rank"] > 0.999
    once = predictions.agreement(plain, plain, took[:8])
    assert once["latency_error"] == 0.0 and np.isnan(once["latency_floor"])
    assert facts["latency_rank_again"] > 0.999 and np.isnan(once["latency_rank_again"])


def test_predicted_seconds_of_a_call_are_those_from_outside() -> None:
    """Also of random placements of pieces, which are timed as whole calls."""
    graph = graph_of(2, [(0, 1)])
    profile = {"overhead_s": np.array([1e-3, 2e-3])}
    problem = problem_on(graph, [[0.5, 0.25]] * 2, profile=profile, num_microbatches=1)
    assert predictions.predicted(problem, models.all_on(graph, 0)) == (1.001, 1.0)
    assert predictions.predicted(problem, models.all_on(graph, 1)) == (0.502, 0.5)
    both = np.array([0, 1], np.int32)
    assert predictions.predicted(problem, both)[0] == pytest.approx(0.752)
    assert Cut(graph, problem, both).latency_s == pytest.approx(0.752)


def test_accelerate_copies_for_every_call_where_nothing_stays_on_the_gpu(monkeypatch):
    """It would hold no layer there, as it leaves room for the largest; it is not the CPU's time."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs = gpu_baselines.Decoder(4, 64).eval(), torch.randn(1, 8, 64)
    offload, dispatch, asked = accelerate.cpu_offload, accelerate.dispatch_model, []

    def beside(module: Any, execution_device: Any) -> None:
        asked.append((execution_device, module))
        offload(module, "cpu")  # there is no GPU

    monkeypatch.setattr(accelerate, "cpu_offload", beside)
    monkeypatch.setattr(accelerate, "dispatch_model", Mock(wraps=dispatch))
    room = int(1.5 * models.bytes_of(model.layers[0]))
    assert gpu_baselines.offloaded_seconds(model, inputs, {0: room, "cpu": 2**40}) > 0
    ((device, module),) = asked
    assert device == 0 and all(x.is_meta for x in module.parameters())
    accelerate.dispatch_model.assert_not_called()
    gpu_baselines.offloaded_seconds(model, inputs, {"cpu": 2**40})  # as on the emulated GPU
    assert len(asked) == accelerate.dispatch_model.call_count == 1


@pytest.mark.parametrize("on_cpu", [0.05, 0.66, 0.95])
def test_pieces_by_speed_fit_where_they_are_meant_to_be(on_cpu: float) -> None:
    """In half of the memory: what stays, the buffer, and what cuBLAS keeps of a GiB."""
    module = torch.nn.Linear(1024, 1024)
    shares = tuple(one_matrix.within(0.5, on_cpu))
    whole = capture(module, torch.randn(1, 1024), name="matrix")
    graph = pieces.split(whole, shares, moves=one_matrix.FREE)
    size, seconds = models.bytes_of(module), np.ones((graph.num_ops, 3))
    gpu = Device("cuda:0", "cuda", memory_bytes=int(memory.PROMISED * 0.5 * size))
    streams = Device("streamed/cuda:0", "cuda", streams="cuda:0", memory_bytes=2**30)
    cluster = Cluster("gpu", (Device("cpu:0", memory_bytes=2**30), gpu, streams))
    kept = np.full((graph.num_ops, 3), size * 33 // 1024) * [0, 1, 1]
    problem = problem_on(graph, seconds, cluster=cluster, profile={"library_bytes": kept},
                         objective="latency", num_microbatches=1)  # fmt: skip
    placement = np.zeros(graph.num_ops, np.int32)
    reads = np.flatnonzero(graph.op_param_bytes)
    placement[reads] = [0, *[2] * one_matrix.COPIED, 1]
    assert evaluate(problem, placement[None]).feasible.all()
    cpu, *copied, stays = shares
    there = one_matrix.read_on(problem, placement)
    np.testing.assert_allclose(there, [cpu, stays, sum(copied)], atol=5e-3)
    assert cpu / (1 - stays) == pytest.approx(on_cpu) and stays > 0.15


def test_all_sections_take_less_than_eight_minutes(tmp_path: Path) -> None:
    first, second = map(processes.rounds_of, (False, True))
    assert sum(part for _, part in first) <= 330 and sum(part for _, part in second) <= 420
    assert bench.LONGEST_S == 470
    both = {name for names, _ in first + second for name in names}
    assert both == {*processes.SECTIONS}  # and these only are in both
    in_first, in_second = ({n for names, _ in x for n in names} for x in (first, second))
    assert in_first & in_second == {"facts", "kernels"}
    assert len({name for names in models.CHECKED for name in names}) == 12
    assert len(models.PROFILED) == 6 and len(models.PREDICTED) == 3
    assert processes.main(["--out", str(tmp_path), "--sections", "nothing"]) == 2


def test_a_plan_is_compared_with_devices_that_have_their_inputs_where_it_has_them() -> None:
    """One on the GPU with what is there; one on both with what comes from the host."""
    seconds = {"cpu": 9.0, "gpu": 2.0, "gpu_fed": 3.0, "plan": 2.0, "planned": 2.5}
    gpu_only, both = np.ones(3, np.int32), np.array([0, 1, 1], np.int32)
    uses = [models.uses(x) for x in (gpu_only, both, 0 * both)]
    assert uses == ["GPU", "both", "CPU"]
    assert plans.over_single(seconds, gpu_only, "plan") == 1.0
    assert plans.over_single(seconds, both, "planned") == 1.2
    assert plans.over_single({"cpu": 9.0, "gpu": 2.0, "plan": 4.0}, both, "plan") == 0.5
    assert np.isnan(plans.over_single({"plan": 4.0}, both, "plan"))
