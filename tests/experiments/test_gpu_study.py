"""The script for a real GPU runs to its end on an emulated one: no minute is lost to a typo."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from experiments import gpu

# What the emulated device, or this machine, cannot do.
EXCUSED = {("facts", "nvidia-smi")}


def options(out: Path, part: str, *sections: str) -> argparse.Namespace:
    return argparse.Namespace(out=out, part=part, sections=list(sections), emulated=True)


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("part", gpu.SECTIONS)
def test_every_section_runs_to_its_end(tmp_path: Path, part: str) -> None:
    for name in gpu.SECTIONS[part]:
        gpu.section(name, 250.0, options(tmp_path, part))
    found = rows(tmp_path)
    failed = [r for r in found if "failed" in r and (r["section"], r["item"]) not in EXCUSED]
    assert not failed
    assert {r["section"] for r in found} == set(gpu.SECTIONS[part])
    wrong = [r for r in found if r.get("ok") is False and r["item"] != "no meter"]
    assert not wrong
    text = gpu.table((tmp_path / "gpu.jsonl").read_text().splitlines())
    assert all(f"### {name}" in text for name in gpu.SECTIONS[part])


def test_sections_are_processes_and_the_table_comes_last(tmp_path: Path, capfd: Any) -> None:
    words = ["--part", "check", "--out", str(tmp_path), "--emulated", "--sections", "facts"]
    assert gpu.main(words) == 0
    assert rows(tmp_path)[-1] | {"seconds": 0} == {
        "section": "facts", "item": "section", "status": "done", "seconds": 0,
    }  # fmt: skip
    assert (tmp_path / "gpu.md").read_text() in capfd.readouterr().out
    assert gpu.main([*words[:-1], "profile"]) == 2


def test_a_section_that_hangs_or_dies_costs_no_other(tmp_path: Path, monkeypatch: Any) -> None:
    def end(command: list[str], timeout: float, **_: Any) -> Any:
        name = command[command.index("--one") + 1]
        if name == "micro":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 139 if name == "correct" else 0)

    monkeypatch.setattr(gpu.subprocess, "run", end)
    gpu.run(options(tmp_path, "check"))
    said = {r["section"]: r["status"] for r in rows(tmp_path)}
    assert said == {
        "facts": "done",
        "micro": "stopped after 40 s",
        "correct": "exit code 139",
        "train": "done",
        "errors": "done",
    }
    monkeypatch.setattr(gpu, "LONGEST_S", 30.0)
    monkeypatch.setattr(gpu.time, "perf_counter", iter(range(0, 10**6, 10)).__next__)
    gpu.run(options(tmp_path, "check", "facts", "train", "errors"))
    assert rows(tmp_path)[-1]["status"] == "no time was left"


def test_a_part_takes_eight_minutes_at_most() -> None:
    for part in gpu.SECTIONS.values():
        assert sum(limit_s for _, limit_s in part.values()) <= 560
    assert gpu.LONGEST_S == 480
