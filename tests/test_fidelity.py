"""The study of prediction against measurement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from problems import random_problem

from experiments import fidelity


def test_a_tiny_workload_and_the_same_command_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tiny_cnn", "--placements", "9", "--rounds", "1", "--minutes", "0", "--repeats", "1"]
    command += ["--out", str(tmp_path), "--work", str(tmp_path / "work")]
    fidelity.main(command)
    text = capsys.readouterr().out
    assert "| tiny_cnn | 9 |" in text and "| all | 9 |" in text
    assert "without slowing down of busy neighbours" in text
    rows = (tmp_path / "fidelity.csv").read_text().splitlines()
    assert len(rows) == 10 and rows[0].startswith("workload,placement,rounds,predicted")
    fidelity.main(command)  # measures nothing: the same figures again
    assert capsys.readouterr().out == text
    assert (tmp_path / "fidelity.csv").read_text().splitlines() == rows


def test_candidates_are_legal_and_begin_with_single_devices() -> None:
    problem = random_problem(5, 12, 2, grouped=True)
    found = fidelity.candidates(problem, 20)
    assert len(found) == 20
    assert [p.tolist() for p in list(found.values())[:2]] == [[0] * 12, [1] * 12]
    for placement in found.values():
        problem.check_placement(placement)


def test_errors_are_counted_with_and_without_each_correction() -> None:
    #            predicted  measured  without everything
    # latency        2          2            1             0 % and 50 %; plain 3: 50 %
    # period         3          2            2            50 % and  0 %; plain 2:  0 %
    less = dict.fromkeys(fidelity.CORRECTIONS, 1.0), dict.fromkeys(fidelity.CORRECTIONS, 2.0)
    row = fidelity.Row("w", "p", 2, 2.0, 2.0, 3.0, 2.0, 110, 100, 3.0, 2.0, *less, 0.1, 0.2)
    lines = fidelity.summary([row, replace(row, placement="q")]).splitlines()
    cells = [w.strip() for w in lines[2].split("|")]
    assert cells[1] == "w" and cells[3] == "2" and cells[4] == "0.0 (50.0)" and cells[6] == "10.0"
    assert cells[7] == "50.0 (0.0)" and cells[9] == "20.0" and cells[10] == "10.0"
    assert any(
        "the neighbours and the transfers | 50.0" in line and "| 0.0 |" in line for line in lines
    )


def test_what_measuring_again_gives() -> None:
    # 1 against median(2, 4) = 3; 2 against 2.5; 4 against 1.5.
    assert fidelity.between_rounds([1.0, 2.0, 4.0]) == pytest.approx((2 / 3 + 0.2 + 5 / 3) / 3)
    assert fidelity.between_rounds([1.0]) == 0


def test_what_a_correction_takes_away() -> None:
    profile = random_problem(0, 8, 3).profile
    profile = replace(profile, loaded_s=2 * profile.compute_s)
    less = {what: change(profile) for what, change in fidelity.CORRECTIONS.items()}
    assert less["slowing down of busy neighbours"].loaded_s is None
    assert all(x.wake_s == 0 for x in less["waking the receiver"].links)
    assert less["transfers and waking"].links == ()
    both = less["the neighbours and the transfers"]
    assert both.links == () and both.loaded_s is None
    same = less["differences between the devices"].compute_s
    assert (same == profile.compute_s.min(axis=1)[:, None]).all() and same.shape == (8, 3)
    assert np.array_equal(profile.compute_s, random_problem(0, 8, 3).profile.compute_s)


def test_the_speed_beside_a_placement_scales_every_device_by_itself() -> None:
    """Device 0 needs twice the seconds of its profile, device 1 half of them."""
    profile = random_problem(0, 8, 2).profile
    profile = replace(profile, loaded_s=3 * profile.compute_s)
    whole = profile.compute_s.sum(axis=0)
    here = fidelity.as_slow_as(profile, whole * [2.0, 0.5])
    np.testing.assert_allclose(here.compute_s, profile.compute_s * [2.0, 0.5])
    np.testing.assert_allclose(here.loaded_s, profile.compute_s * [6.0, 1.5])
