"""A ``Comparison`` as tables: in the terminal (at most 80 columns), as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from placement.runs.row import Row, groups
from placement.tools.files import csv_text
from placement.tools.shown import print_table

if TYPE_CHECKING:
    from placement.runs.compare import Comparison


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
    shown = [own[first.objective]] if first.objective in own else []
    lines = [
        (
            name,
            *([_ms(median(rows, "value_s"))] if shown else []),
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
    notes = [f"best trade-offs of {_traded(first)}: {', '.join(front)}"] if front else []
    if first.energy_source == "declared":
        notes.append("energy is computed from declared watts, not from measured ones")
    error = first.prediction_error
    ran = any(r.num_rounds for rows in by_planner.values() for r in rows)
    if error and not ran:  # what ran has errors of its own, in the next table
        notes.append(
            f"predictions err by {error:.1%}: of rows that differ by less, either may be better"
        )
    notes += [f"{name}: {rows[0].note}" for name, rows in by_planner.items() if rows[0].note]
    return Table(
        f"{workload}, predicted: {first.num_ops} operators on {first.num_devices} devices, "
        f"objective {first.objective}" + (f", medians of {num_seeds} seeds" * (num_seeds > 1)),
        ("planner", *shown, "period ms", "latency ms", "speed-up", "gap %", "plan s", "evals"),
        tuple(lines),
        tuple(notes),
    )


def _traded(row: Row) -> str:
    """What the Pareto front is of."""
    return "latency and period" if row.energy_source is None else "latency, period and energy"


def _measured(workload: str, by_planner: dict[str, list[Row]]) -> Table:
    lines = [
        (
            name,
            _ms(median(rows, "measured_period_s")),
            _ms(median(rows, "measured_period_iqr_s")),
            _figure(median(rows, "period_error"), 1, 100, "+"),
            _ms(median(rows, "measured_latency_s")),
            _figure(median(rows, "latency_error"), 1, 100, "+"),
            _figure(median(rows, "measured_speedup")),
        )
        for name, rows in by_planner.items()
    ]
    rounds = max(r.num_rounds for rows in by_planner.values() for r in rows)
    return Table(
        f"{workload}, measured: medians of {rounds} interleaved rounds",
        ("planner", "period ms", "± iqr", "error %", "latency ms", "error %", "speed-up"),
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
    from placement.objective import Objective

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


def _ms(seconds: float | None) -> str:
    if seconds is None or not np.isfinite(seconds):
        return "–"
    return f"{1e3 * seconds:#.3g}".rstrip(".") if seconds < 1 else f"{1e3 * seconds:.0f}"


def _figure(value: float | None, digits: int = 2, scale: float = 1.0, sign: str = "") -> str:
    return "–" if value is None or np.isnan(value) else f"{scale * value:{sign}.{digits}f}"
