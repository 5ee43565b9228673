"""The script for a real GPU runs to its end on an emulated one: no minute is lost to a typo."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from experiments import gpu
from experiments.study import ROOT
from tests import emulated_gpu

# What the emulated device, or this machine, cannot do; and it frees late where the machine is busy.
EXCUSED = ("nvidia-smi", "half of the activations")


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]


def script(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: this one has threads, which a forked one would miss."""
    command = [sys.executable, "-m", "experiments.gpu", "--out", str(out), *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize("half", [0, 1])
def test_every_section_runs_to_its_end(tmp_path: Path, half: int) -> None:
    names = [n for names, _ in gpu.ROUNDS[4 * half : 4 + 7 * half] for n in names]
    done = script(tmp_path, "--emulated", "--sections", *names)
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path)
    failed = [r for r in found if "failed" in r and not r["item"].endswith(EXCUSED)]
    assert not failed
    status = {r["section"]: r["status"] for r in found if r["item"] == "section"}
    assert status == dict.fromkeys(names, "done")
    wrong = [r for r in found if r.get("ok") is False]
    assert not wrong
    text = (tmp_path / "gpu.md").read_text()
    assert all(f"### {name}" in text for name in names)
    assert done.stdout.endswith(text + "\n") and "### goals" in text
    with zipfile.ZipFile(tmp_path / "profiles.zip") as file:
        assert {"training.npz" if half else "tiny_mlp.npz"} <= set(file.namelist())
    # What comes back from a lent machine is eight files at most.
    assert {p.name for p in tmp_path.iterdir()} == {
        "gpu.jsonl", "gpu.md", "profiles.zip", "traces.txt",
    }  # fmt: skip


def options(out: Path) -> argparse.Namespace:
    return argparse.Namespace(out=out, work=out, sections=[], emulated=True)


def test_a_section_that_hangs_or_dies_costs_no_other(tmp_path: Path) -> None:
    """Processes that end well, with an error, by a signal, and not at all."""

    def forked(work: Any) -> int:
        if pid := os.fork():
            return pid
        os.setpgid(0, 0)
        try:
            work()
        finally:
            os._exit(3)

    running = {
        forked(lambda: os._exit(0)): "facts",
        forked(lambda: None): "micro",
        forked(lambda: os.kill(os.getpid(), 9)): "correct",
        forked(lambda: time.sleep(60)): "train",
    }
    began = time.perf_counter()
    assert gpu.watched(running, began, 1.0, options(tmp_path)) == {"facts"}
    assert {r["section"]: r["status"] for r in rows(tmp_path)} == {
        "facts": "done",
        "micro": "exit code 3",
        "correct": "exit code -9",
        "train": "stopped",
    }


def test_an_item_that_fails_or_takes_too_long_is_a_row(tmp_path: Path) -> None:
    bench = gpu.Bench(tmp_path, tmp_path, "micro", True)
    with bench.item("slow", 0.1):
        time.sleep(10)
    with bench.item("wrong"):
        raise RuntimeError("CUDA error: unspecified launch failure")
    bench.emit("right", value=float("nan"))
    slow, wrong, right = rows(tmp_path)
    assert slow["failed"] == "TimeoutError: stopped after 0.1 s"
    assert "unspecified launch failure" in wrong["failed"]
    assert right["value"] is None
    assert "unspecified launch failure" in (tmp_path / "traces.txt").read_text()
    assert "| slow |" in gpu.table((tmp_path / "gpu.jsonl").read_text().splitlines())


def test_every_goal_says_what_was_reached_and_whether_that_is_enough() -> None:
    def line(what: str, *rows: dict[str, Any]) -> str:
        return next(x for x in gpu.goals(rows).splitlines() if x.startswith(f"| {what} |"))

    def row(section: str, item: str, **facts: Any) -> dict[str, Any]:
        return {"section": section, "item": item, **facts}

    what = "period predicted, median error"
    good, bad = (row("fidelity", f"m{e}", period_error=e) for e in (0.031, 0.12))
    assert "| nothing | no |" in line(what)
    assert "| 3.100 % | yes |" in line(what, good)
    assert "| 3.100 % to 12.000 % | no |" in line(what, good, bad)
    failed = row("fidelity", "m", failed="TimeoutError: stopped after 9 s")
    assert "| 3.100 %; 1 failed or stopped | no |" in line(what, good, failed)
    stopped = row("correct_2", "section", status="stopped")
    equal = row("correct_1", "bert", ok=True), row("correct_2", "vit", ok=True)
    assert "| 2 of 2; 1 failed or stopped | no |" in line("results of 12 models", *equal, stopped)
    training = row("training", "half of the activations", ok=False, step_ms=7.0)
    assert "| nothing | no |" in line("training: losses and parameters", training)
    assert "| 0 of 1 | no |" in line("training with half of the activations", training)


def test_an_item_within_another_leaves_it_its_time(tmp_path: Path) -> None:
    bench = gpu.Bench(tmp_path, tmp_path, "plans", True)
    with bench.item("around", 0.3):
        with bench.item("short", 30):
            pass
        with bench.item("long", 30):
            time.sleep(10)
        time.sleep(10)
    assert [r["item"] for r in rows(tmp_path)] == ["long", "around"]


def test_a_section_that_fails_outside_of_its_items_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: gpu.Bench) -> None:
        raise gpu.StudyError("torch sees no CUDA device here")

    monkeypatch.setitem(gpu.SECTIONS, "facts", fails)
    with pytest.raises(SystemExit):
        gpu.section("facts", 20.0, options(tmp_path))
    (row,) = rows(tmp_path)
    assert row["failed"] == "StudyError: torch sees no CUDA device here"


def test_watts_are_added_up_where_joules_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_gpu.emulated():
        monkeypatch.setitem(sys.modules, "pynvml", emulated_gpu.nvml(1, tells_energy=False))
        meter = gpu.gpu_meter()
        assert meter is not None and meter.name == "watts, added up"
        before, began = meter.read_j(), time.perf_counter()
        while (joules := meter.since_j(before)) == 0 and time.perf_counter() - began < 30:
            time.sleep(0.02)
        assert 0 < joules <= 100 * (time.perf_counter() - began + 0.2)


def test_a_process_that_cannot_use_the_gpu_after_a_fork_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def began(path: str, words: list[str]) -> None:
        (tmp_path / "began").write_text(" ".join(words[1:]))

    monkeypatch.setattr(gpu, "cuda_works", lambda: False)
    monkeypatch.setattr(gpu, "section", lambda *_, **__: None)
    monkeypatch.setattr(os, "execv", began)
    given = argparse.Namespace(out=tmp_path, work=tmp_path, emulated=False)
    pid = gpu.forked("correct_2", 20, given, part=(1, 3), models={})
    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "began").read_text() == (
        f"-m experiments.gpu --one correct_2 --limit 20 --out {tmp_path} --work {tmp_path} "
        "--part 1 3"
    )


def test_all_sections_take_eight_minutes_at_most(tmp_path: Path) -> None:
    assert sum(limit_s for _, limit_s in gpu.ROUNDS) <= gpu.LONGEST_S == 480
    assert [n for names, _ in gpu.ROUNDS for n in names] == list(gpu.SECTIONS)
    assert len(gpu.CHECKED) == 12 and len(gpu.PROFILED) == 6 and len(gpu.PREDICTED) == 3
    assert gpu.main(["--out", str(tmp_path), "--sections", "nothing"]) == 2
