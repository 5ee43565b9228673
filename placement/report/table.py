"""A ``Comparison``: its rows, what they say, and its tables.

In the terminal (at most 80 columns), as CSV and as Markdown.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.objective import Objective
from placement.problem import Solution
from placement.report.row import SINGLE, Row, groups
from placement.tools import shown
from placement.tools.files import csv_text, write_atomic
from placement.tools.shown import print_table

Floats = NDArray[np.float64]


class CompareError(ValueError):
    """The comparison as asked for makes no sense; the message says what to change."""


@dataclass(frozen=True)
class Fidelity:
    """How well the simulator predicts, over ``num_placements`` distinct measured placements.

    ``..._mape``: mean absolute error relative to the measurement; ``..._spearman``: mean over
    the workloads of the rank correlation, nan where no workload has two distinct placements.
    """

    num_placements: int
    latency_mape: float
    period_mape: float
    latency_spearman: float
    period_spearman: float


@dataclass(frozen=True)
class Gain:
    """A planner's speed-up over the best single device: geometric mean over workloads x seeds.

    ``low``, ``high``: bootstrap 95 % interval: workloads are drawn, then seeds of each. (Cells of
    both, ``num_cells``, are not independent: more seeds of the same workloads say little more.)
    """

    planner: str
    num_cells: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """All rows, and ``solutions[workload, planner, seed]`` of those that have an answer."""

    rows: tuple[Row, ...]
    solutions: Mapping[tuple[str, str, int | None], Solution]

    def _repr_html_(self) -> str:
        """What a notebook shows: the tables that the terminal shows."""
        return "".join(shown.table(t.title, t.header, t.cells) for t in tables(self))

    def best(self, workload: str) -> Row:
        """The feasible row with the best measured objective, or predicted if none was measured.

        Joules of a comparison are always predicted.

        Raises:
            CompareError: no planner has a feasible answer.
        """
        rows = [r for r in self.rows if r.workload == workload and r.feasible]
        if not rows:
            raise CompareError(f"{workload}: no planner found a placement that fits the cluster")
        measured = [r for r in rows if r.measured_s is not None]
        return min(measured or rows, key=lambda r: r.reached_s)

    def fidelity(self) -> Fidelity | None:
        """Prediction errors over all measured placements; None if nothing was measured."""
        seen = {(r.workload, r.placement_id): r for r in self.rows if r.num_rounds}
        rows = list(seen.values())
        if not rows:
            return None
        of = np.array([r.workload for r in rows])
        figures = {}
        for what in ("latency", "period"):
            predicted = np.array([getattr(r, f"{what}_s") for r in rows])
            measured = np.array([getattr(r, f"measured_{what}_s") for r in rows])
            each = [spearman(predicted[of == w], measured[of == w]) for w in dict.fromkeys(of)]
            ranked = [x for x in each if not np.isnan(x)]
            figures[f"{what}_mape"] = mape(predicted, measured)
            figures[f"{what}_spearman"] = float(np.mean(ranked)) if ranked else float("nan")
        return Fidelity(len(rows), **figures)

    def gains(self) -> tuple[Gain, ...]:
        """One per planner, best first; measured where every workload was, else predicted.

        A planner without an answer somewhere counts as the best single device there: that is
        what its user would run. Where no single device fits (``without_single``) there is
        nothing to compare with, and the workload is left out.
        """
        what = "measured_speedup" if self.is_measured else "speedup"
        left_out = self.without_single()
        rows = [r for r in self.rows if r.workload not in left_out]
        gains = []
        for name, mine in groups(rows, "planner").items():
            if not name.startswith(SINGLE):
                of_workload = groups(mine, "workload").values()
                cells = [[getattr(r, what) or 1.0 for r in seeds] for seeds in of_workload]
                flat = np.concatenate(cells)
                interval = geometric_interval(cells)
                gains.append(Gain(name, len(flat), geometric_mean(flat), *interval))
        return tuple(sorted(gains, key=lambda g: -g.mean))

    def without_single(self) -> list[str]:
        """The workloads that no single device can hold or run: they have no speed-up."""
        held = on_one_device(self.rows)
        return [w for w in dict.fromkeys(r.workload for r in self.rows) if w not in held]

    def reference(self, workload: str) -> tuple[float, float]:
        """Best value found, and what a missing answer counts as: the best single device.

        Where no single device fits, it counts as the worst answer. inf without any answer.
        """
        rows = [r for r in self.rows if r.workload == workload]
        values = [r.value_s for r in rows if np.isfinite(r.value_s)]
        singles = [r.value_s for r in rows if r.planner.startswith(SINGLE)]
        alone = min((v for v in singles if np.isfinite(v)), default=max(values, default=np.inf))
        return min(values, default=np.inf), alone

    def ratios(self) -> dict[str, dict[str, float]]:
        """Value over the best found, by planner and workload: geometric mean over the seeds.

        Workloads without any answer are left out.
        """
        logs: dict[str, dict[str, list[float]]] = {}
        for workload in dict.fromkeys(r.workload for r in self.rows):
            best, otherwise = self.reference(workload)
            for row in self.rows:
                if row.workload == workload and 0 < best < np.inf:
                    value = row.value_s if np.isfinite(row.value_s) else otherwise
                    mine = logs.setdefault(row.planner, {}).setdefault(workload, [])
                    mine.append(float(np.log(value / best)))
        return {
            planner: {w: float(np.exp(np.mean(v))) for w, v in by_workload.items()}
            for planner, by_workload in logs.items()
        }

    @property
    def is_measured(self) -> bool:
        """Every workload was run on real devices."""
        workloads = {r.workload for r in self.rows}
        return workloads == {r.workload for r in self.rows if r.num_rounds}

    def save(self, folder: str | Path) -> None:
        """Write ``compare.csv`` and ``compare.md``.

        Raises:
            FileError: the folder cannot be written.
        """
        write_atomic(Path(folder) / "compare.csv", to_csv(self))
        write_atomic(Path(folder) / "compare.md", to_markdown(self))


@dataclass(frozen=True)
class Table:
    """Text cells; the first column is a name, the others are figures."""

    title: str
    header: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


def tables(comparison: Comparison) -> tuple[Table, ...]:
    """Predicted and (if run) measured of every workload, then what holds over all of them.

    Several seeds of a planner are one line: their median; the CSV file has every seed.
    """
    every: list[Table] = []
    for workload, rows in groups(comparison.rows, "workload").items():
        by_planner = groups(rows, "planner")
        every.append(_predicted(workload, by_planner))
        if any(r.num_rounds for r in rows):
            every.append(_measured(workload, by_planner))
    return (*every, *overall(comparison))


def _predicted(workload: str, by_planner: dict[str, list[Row]]) -> Table:
    first = next(iter(by_planner.values()))[0]
    # Period and latency always have a column; another objective has one of its own.
    own = {"energy": "mJ", "max_load": "load ms", "piecewise_latency": "pieces ms"}
    special = [own[first.objective]] if first.objective in own else []
    lines = [
        (
            name,
            *([_ms(median(rows, "value_s"))] if special else []),
            _ms(median(rows, "period_s")),
            _ms(median(rows, "latency_s")),
            _figure(median(rows, "speedup")),
            _figure(median(rows, "gap"), 1, 100),
            _figure(median(rows, "plan_s")),
            _figure(median(rows, "evaluations"), 0),
        )
        for name, rows in by_planner.items()
    ]
    num_seeds = max(len(rows) for rows in by_planner.values())
    front = [name for name, rows in by_planner.items() if any(r.pareto for r in rows)]
    traded = "latency and period" if first.energy_source is None else "latency, period and energy"
    notes = [f"best trade-offs of {traded}: {', '.join(front)}"] if front else []
    if first.energy_source == "declared":
        notes.append("energy is computed from declared watts, not from measured ones")
    every = [row for rows in by_planner.values() for row in rows]
    overhead_s = max(row.overhead_s or 0.0 for row in every)
    if overhead_s > 0.01 * min(row.latency_s for row in every):
        notes.append(
            "latencies are from a call's first operator to its last; the call takes up to "
            f"{shown.seconds(overhead_s)} more, which plans have"
        )
    error = first.calibration_error
    ran = any(r.num_rounds for rows in by_planner.values() for r in rows)
    if error and not ran:  # what ran has errors of its own, in the next table
        notes.append(
            f"the profile's calibration error is {error:.1%}: of rows that differ by less, either "
            "may be better"
        )
    notes += [f"{name}: {rows[0].note}" for name, rows in by_planner.items() if rows[0].note]
    return Table(
        f"{workload}, predicted: {first.num_ops} operators on {first.num_devices} devices, "
        f"objective {first.objective}" + (f", medians of {num_seeds} seeds" * (num_seeds > 1)),
        ("planner", *special, "period ms", "latency ms", "speed-up", "gap %", "plan s", "evals"),
        tuple(lines),
        tuple(notes),
    )


def _measured(workload: str, by_planner: dict[str, list[Row]]) -> Table:
    lines = [
        (
            name,
            _ms(median(rows, "measured_period_s")),
            _half(median(rows, "measured_period_iqr_s")),
            _figure(median(rows, "period_error"), 1, 100, "+"),
            _ms(median(rows, "measured_latency_s")),
            _figure(median(rows, "latency_error"), 1, 100, "+"),
            _figure(median(rows, "measured_speedup")),
        )
        for name, rows in by_planner.items()
    ]
    rounds = max(r.num_rounds for rows in by_planner.values() for r in rows)
    return Table(
        f"{workload}, measured: medians of {rounds} interleaved rounds, ± half their "
        "interquartile range",
        ("planner", "period ms", "±", "error %", "latency ms", "error %", "speed-up"),
        tuple(lines),
    )


def overall(comparison: Comparison) -> tuple[Table, ...]:
    """What holds over all workloads: speed-ups of the planners, and how true predictions are."""
    every = []
    how = "measured" if comparison.is_measured else "predicted"
    left_out = comparison.without_single()
    cells = tuple(
        (g.planner, _figure(g.mean), _figure(g.low), _figure(g.high), str(g.num_cells))
        for g in comparison.gains()
    )
    if cells:
        every.append(
            Table(
                f"Speed-up over the best single device, {how}: geometric mean over workloads x "
                "seeds, bootstrap 95 % interval over workloads and the seeds of each",
                ("planner", "speed-up", "low", "high", "cells"),
                cells,
                tuple(f"left out: {w}, which fits on no single device" for w in left_out),
            )
        )
    fidelity = comparison.fidelity()
    if fidelity:
        every.append(
            Table(
                f"Prediction against measurement, {fidelity.num_placements} placements",
                ("", "mean abs. error %", "mean Spearman per workload"),
                tuple(
                    (what, _figure(mape, 1, 100), _figure(spearman))
                    for what, mape, spearman in (
                        ("period", fidelity.period_mape, fidelity.period_spearman),
                        ("latency", fidelity.latency_mape, fidelity.latency_spearman),
                    )
                ),
            )
        )
    return tuple(every)


def print_tables(every: Sequence[Table]) -> None:
    """See ``placement.tools.shown.print_table``."""
    for one in every:
        print_table(one.title, one.header, one.cells, one.notes)


def to_markdown(comparison: Comparison) -> str:
    """The same tables as GitHub-flavoured Markdown."""
    return "\n".join(as_markdown(t) for t in tables(comparison))


def as_markdown(table: Table) -> str:
    """``table`` as GitHub-flavoured Markdown."""

    lines = [f"**{table.title}**", "", markdown(table.header, table.cells), ""]
    lines += [note.replace("\n", " ") + "\n" for note in table.notes]
    return "\n".join(lines)


def markdown(header: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is a name, the others are figures."""

    def line(words: Sequence[str]) -> str:
        return "| " + " | ".join(w.replace("|", "\\|").replace("\n", " ") for w in words) + " |"

    rule = "|---|" + "---:|" * (len(header) - 1)
    return "\n".join([line(header), rule, *map(line, cells)])


def to_csv(comparison: Comparison) -> str:
    """One line per ``Row``, one column per field, full precision; empty where not known."""
    return csv_text([f.name for f in fields(Row)], map(astuple, comparison.rows))


def from_csv(text: str) -> tuple[Row, ...]:
    """The rows that ``to_csv`` wrote; a column that an older version did not have is unknown.

    Raises:
        ValueError: a value of the wrong kind, or a column that is missing.
    """
    kinds = {f.name: str(f.type) for f in fields(Row)}
    rows: list[Row] = []
    for record in csv.DictReader(io.StringIO(text)):
        values = {k: _parsed(kinds[k], v) for k, v in record.items() if k in kinds and v != ""}
        empty = {k: None for k, v in record.items() if v == "" and "None" in kinds.get(k, "")}
        try:
            row = Row(**values | empty)
        except TypeError as error:
            raise ValueError(f"line {len(rows) + 2}: {error}") from error
        for name, value in vars(row).items():
            least = -1 if name in ("latency_error", "period_error", "gap") else 0
            if type(value) in (int, float) and not least <= value:  # comparisons with NaN are false
                raise ValueError(f"line {len(rows) + 2}: {name} = {value} must be at least {least}")
        if row.objective not in list(Objective):
            raise ValueError(f"line {len(rows) + 2}: objective {row.objective!r} is unknown")
        rows.append(row)
    return tuple(rows)


def _parsed(kind: str, text: str) -> Any:
    if kind == "bool":
        return text == "True"
    return {"int": int, "float": float, "str": str}[kind.split(" ")[0]](text)


def median(rows: Sequence[Row], column: str) -> float | None:
    """Over the seeds; None where a seed has no answer, so that failures are not averaged away."""
    values: list[Any] = [getattr(r, column) for r in rows]
    return None if any(v is None for v in values) else float(np.median(values))


def _half(iqr_s: float | None) -> str:
    """Milliseconds behind ±: half the interquartile range, as everywhere."""
    return "–" if iqr_s is None else f"{1e3 * iqr_s / 2:.2g}"


def _ms(seconds: float | None) -> str:
    if seconds is None or not np.isfinite(seconds):
        return "–"
    return f"{1e3 * seconds:#.3g}".rstrip(".") if seconds < 1 else f"{1e3 * seconds:.0f}"


def _figure(value: float | None, digits: int = 2, scale: float = 1.0, sign: str = "") -> str:
    return "–" if value is None or np.isnan(value) else f"{scale * value:{sign}.{digits}f}"


# --- statistics ----------------------------------------------------------------------------------


def on_one_device(rows: Iterable[Row]) -> set[str]:
    """The workloads that a single device holds and runs: the others have no speed-up."""
    return {r.workload for r in rows if r.planner.startswith(SINGLE) and r.feasible}


def mape(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Mean absolute error relative to the measurement, a fraction."""
    p, m = np.asarray(predicted, float), np.asarray(measured, float)
    return float(np.abs(p / m - 1).mean())


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Rank correlation, ties at their mean rank; nan for fewer than two distinct values."""
    from scipy.stats import rankdata

    x, y = rankdata(a), rankdata(b)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def geometric_mean(values: Iterable[float]) -> float:
    """Of values that are all above 0."""
    return float(np.exp(np.mean(np.log(list(values)))))


def geometric_interval(values: Any, num_resamples: int = 10_000) -> tuple[float, float]:
    """Bootstrap 95 % interval of the geometric mean of positive values ``[K]``.

    Or of ``K`` lists of values that belong together, or of such lists: of every list as many are
    drawn as it has. Its ends lie further out than the percentiles 2.5 and 97.5 of what is drawn
    (expanded percentiles: Hesterberg, The American Statistician 2015): those know neither that a
    deviation is estimated nor that it is too small, and hold the mean of six in 86 % of all cases.
    """
    from scipy.special import ndtr, stdtrit  # not scipy.stats, which takes a second

    rng = np.random.default_rng(0)

    def drawn(several: Any) -> Floats:
        """float64 ``[num_resamples]``: means of logarithms."""
        each = [drawn(x) if np.iterable(x) else np.full(num_resamples, np.log(x)) for x in several]
        means = np.stack(each, axis=1)
        chosen = rng.integers(len(each), size=means.shape)
        return np.take_along_axis(means, chosen, axis=1).mean(axis=1)

    few = values
    while len(few) == 1 and np.iterable(few[0]):
        few = few[0]
    freedom = max(len(few) - 1, 1)
    tail = 100 * ndtr(np.sqrt(1 + 1 / freedom) * stdtrit(freedom, 0.025))
    low, high = np.exp(np.percentile(drawn(values), [tail, 100 - tail]))
    return float(low), float(high)


def pareto_front(values: ArrayLike) -> NDArray[np.bool_]:
    """bool ``[K]``: which rows of ``values [K, V]``, all to be small, no other row dominates.

    A row dominates another if none of its values is larger and one is smaller; so of equal rows
    all are on the front, or none. A row with an infinite value is not.
    """
    v = np.asarray(values, float)
    no_worse = (v[:, None] <= v[None]).all(axis=2)
    better = (v[:, None] < v[None]).any(axis=2)
    return np.isfinite(v).all(axis=1) & ~(no_worse & better).any(axis=0)
