"""Best-so-far curves: known steps, honesty about what planners claim, the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.problem import Solution
from placement.report.curves import best_so_far, plot_curves
from placement.report.row import Row
from placement.report.table import Comparison


def row(planner: str, value_s: float, seed: int | None = None, workload: str = "w") -> Row:
    known = bool(np.isfinite(value_s))
    facts = ("period", 4, 2, "x" if known else None, known, value_s, value_s, value_s)
    return Row(workload, planner, seed, *facts, plan_s=1.0)


def comparison(*cells: tuple[Row, Any]) -> Comparison:
    solutions = {}
    for r, curve in cells:
        if np.isfinite(r.value_s):
            stats = {} if curve is None else {"curve": curve}
            found = Solution(np.zeros(4, np.int32), r.value_s, stats=stats)
            solutions[r.workload, r.planner, r.seed] = found
    return Comparison(tuple(r for r, _ in cells), solutions)


SINGLE = (row("single:d", 8.0), None)


def test_a_curve_is_steps_over_the_best_found() -> None:
    # One device: 8, best: 2. "search" answers 6 after 0.1 s and 2 after 0.5 s; "once" has 4
    # after its 1.0 s.            0.05   0.1   0.4   0.5   1.0
    search = row("search", 2.0, 0), [(0.1, 1, 6.0), (0.5, 9, 2.0)]
    compared = comparison(SINGLE, search, (row("once", 4.0), None))
    curves = best_so_far(compared, np.array([0.05, 0.1, 0.4, 0.5, 1.0]))
    assert curves["search"].tolist() == pytest.approx([4, 3, 3, 1, 1])
    assert curves["once"].tolist() == pytest.approx([4, 4, 4, 4, 2])
    assert "single:d" not in curves


def test_seeds_and_workloads_are_averaged_geometrically() -> None:
    # In w 2 / 1 and 8 / 1, in v 1 / 1: (2 * 8 * 1) ** (1 / 3).
    rows = row("s", 2.0, 0), row("s", 8.0, 1), row("best", 1.0), row("s", 5.0, 0, "v")
    compared = comparison(SINGLE, *((r, None) for r in rows))
    assert best_so_far(compared, np.array([2.0]))["s"][0] == pytest.approx(16 ** (1 / 3))


def test_no_answer_counts_as_the_best_single_device() -> None:
    compared = comparison(SINGLE, (row("fails", np.inf), None), (row("good", 2.0), None))
    assert best_so_far(compared, np.array([9.0]))["fails"].tolist() == pytest.approx([4])
    assert compared.reference("w") == (2.0, 8.0)
    assert compared.ratios()["fails"] == {"w": pytest.approx(4)}
    # Where no single device fits either, it counts as the worst answer.
    values = {"single:d": np.inf, "fails": np.inf, "bad": 6.0, "good": 2.0}
    tight = comparison(*((row(planner, value), None) for planner, value in values.items()))
    assert tight.reference("w") == (2.0, 6.0)
    assert best_so_far(tight, np.array([9.0]))["fails"].tolist() == pytest.approx([3])


def test_a_workload_without_answers_is_left_out() -> None:
    compared = comparison((row("single:d", np.inf), None), (row("p", np.inf), None))
    assert compared.ratios() == {} and best_so_far(compared, np.array([1.0])) == {}


def test_neither_claims_below_the_simulated_value_nor_what_fits_nowhere_is_believed() -> None:
    compared = comparison(SINGLE, (row("liar", 4.0, 0), [(0.1, 1, 1e-9)]))
    assert best_so_far(compared, np.array([0.2]))["liar"].tolist() == pytest.approx([1])
    compared = comparison(SINGLE, (row("p", 4.0, 0), [(0.1, 1, np.inf), (0.5, 2, 4.0)]))
    assert best_so_far(compared, np.array([0.2, 0.6]))["p"].tolist() == pytest.approx([2, 1])


POINTS = st.lists(st.tuples(st.floats(0, 9), st.floats(0.1, 9)), min_size=1, max_size=5)


@given(st.lists(POINTS, min_size=1, max_size=4))
def test_curves_fall_and_end_where_the_table_says(runs: list[list[tuple[float, float]]]) -> None:
    cells: list[Any] = [SINGLE]
    for seed, points in enumerate(runs):
        points = sorted(points)
        value = min(v for _, v in points)
        cells.append((row("p", value, seed), [(t, i, v) for i, (t, v) in enumerate(points)]))
    compared = comparison(*cells)
    curve = best_so_far(compared, np.linspace(0, 10, 50))["p"]
    assert (np.diff(curve) <= 1e-12).all()
    assert curve[-1] == pytest.approx(compared.ratios()["p"]["w"])


def test_the_picture(tmp_path: Path) -> None:
    many = [(row(f"seeded{k}", 2.0 + k, 0), [(0.1, 1, 6.0 + k)]) for k in range(10)]
    once = [(row(f"once{k}", 4.0), None) for k in range(6)]
    path = plot_curves(comparison(SINGLE, *many, *once), tmp_path / "new" / "c.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    # Nobody has an answer: still a picture.
    plot_curves(comparison((row("p", np.inf, 0), None)), tmp_path / "none.png")
