"""The study of many devices, small; and that of searches side by side."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from experiments import scale_out, side_by_side


def test_nodes_share_an_interface() -> None:
    made = scale_out.build(100, 16)
    assert made.cluster.joins.sum() == 16 * 16
    channel, s_per_byte = made.link_channel, made.link_s_per_byte
    assert channel[0, 8] == channel[7, 11] != channel[8, 0]  # out of a node
    assert (channel == channel[0, 7]).sum() == 1  # within
    assert s_per_byte[0, 1] < s_per_byte[0, 8]


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
    # Layers of 50 operators have more ideals than memory holds, and every search's start fills it.
    small = ["--ways", "serial", "--evaluations", "2", "--layers", "2", "--width", "4"]
    assert side_by_side.main([*small, "--out", str(tmp_path), "--work", str(tmp_path)]) == 0
    assert "| serial |" in (tmp_path / "side_by_side.md").read_text()
