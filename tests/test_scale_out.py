"""The study of many devices, small; and those of searches and rollouts side by side."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from experiments import rollouts, scale_out, side_by_side


def test_nodes_share_an_interface() -> None:
    made = scale_out.cluster(16)
    by = {(x.src, x.dst): x for x in made.links}
    assert len(by) == 16 * 15
    assert by["n0:0", "n0:7"].channel is None
    assert by["n0:0", "n1:0"].channel == by["n0:7", "n1:3"].channel == "n0:out"
    assert by["n0:0", "n0:1"].bandwidth_bytes_per_s > by["n0:0", "n1:0"].bandwidth_bytes_per_s


def test_a_small_study(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    where = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    small = ["--devices", "2", "9", "--operators", "100", "--seconds", "0.2"]
    assert scale_out.main([*where, *small]) == 0
    with (tmp_path / "out" / "scale_out.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {r["subject"] for r in rows} == {
        scale_out.BUILD,
        scale_out.SIMULATE,
        scale_out.POLICY,
        *scale_out.PLANNERS,
    }
    assert {r["status"] for r in rows} == {"ok"}
    replicas = [r for r in rows if r["subject"] == "replicated"]
    assert all(float(r["replicated_s"]) > 0 for r in replicas)
    before = (tmp_path / "out" / "scale_out.csv").read_text()
    assert scale_out.main([*where, *small]) == 0  # nothing runs again
    assert (tmp_path / "out" / "scale_out.csv").read_text() == before
    assert (tmp_path / "out" / "scale_out.png").stat().st_size > 1000


def test_searches_side_by_side(tmp_path: Path) -> None:
    ways = ["--ways", "serial", "--evaluations", "2"]
    assert side_by_side.main([*ways, "--out", str(tmp_path), "--work", str(tmp_path)]) == 0
    assert "| serial |" in (tmp_path / "side_by_side.md").read_text()


def test_rollouts_side_by_side(tmp_path: Path) -> None:
    small = ["--ways", "serial", "--operators", "100", "--steps", "64"]
    assert rollouts.main([*small, "--out", str(tmp_path), "--work", str(tmp_path)]) == 0
    assert "| one_shot | serial |" in (tmp_path / "rollouts.md").read_text()
