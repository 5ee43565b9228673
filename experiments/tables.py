"""Tables of studies: columns that are declared once, figures, and the statistics in them."""

from __future__ import annotations

import ast
import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np

from placement.report.row import groups as groups
from placement.report.table import geometric_interval, markdown
from placement.report.table import geometric_mean as geometric_mean
from placement.tools.files import csv_text

R = TypeVar("R")
DASH = "–"


class Column(NamedTuple):
    """A column of a table: its head, and what it shows of a row.

    ``of`` is the name of a field, or a function of the row. A figure has ``digits`` after the
    point, ``scale`` times its value, and a ``unit``; whole numbers without ``digits`` and texts are
    shown as they are, None and what is not finite as a dash.
    """

    head: str
    of: str | Callable[[Any], Any]
    digits: int | None = None
    scale: float = 1.0
    unit: str = ""

    def cell(self, row: Any) -> str:
        if callable(self.of):
            value = self.of(row)
        else:
            value = row[self.of] if isinstance(row, Mapping) else getattr(row, self.of)
        if isinstance(value, str) or (isinstance(value, int) and self.digits is None):
            return str(value)
        return number(value, 3 if self.digits is None else self.digits, self.scale, self.unit)


def table(rows: Iterable[Any], *columns: Column) -> str:
    """A Markdown table; the first column is a name, the others are figures."""
    return to_table([c.head for c in columns], [[c.cell(row) for c in columns] for row in rows])


def to_table(header: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    return markdown(header, cells) + "\n"


def number(value: float | None, digits: int = 3, scale: float = 1.0, unit: str = "") -> str:
    """A figure of a table; a dash where there is none."""
    if value is None or not np.isfinite(value):
        return DASH
    return f"{scale * value:.{digits}f}{unit}"


def finite(value: float) -> float | None:
    """A value of a row; None where there is none."""
    return float(value) if np.isfinite(value) else None


# --- CSV -----------------------------------------------------------------------------------------


def to_csv(rows: Sequence[Any]) -> str:
    """One line per row (a dataclass), one column per field; empty where None.

    A field with ``metadata={"csv": False}`` is left out.
    """
    names = [f.name for f in fields(rows[0]) if f.metadata.get("csv", True)]
    cells = ([asdict(row)[name] for name in names] for row in rows)
    return csv_text(names, ([str(v) if v != v else v for v in row] for row in cells))


def read_csv(kind: type[R], path: Path) -> list[R]:
    """What ``to_csv`` wrote of rows of this kind; none where there is no such file.

    Columns that earlier versions wrote besides are not read.
    """
    return list(_rows(kind, path.read_text("utf-8"))) if path.is_file() else []


@cache
def _rows(kind: type[R], text: str) -> tuple[R, ...]:
    """Once for each content: a page asks for the same files dozens of times."""
    assert is_dataclass(kind)
    hints = {name: str(hint) for name, hint in get_type_hints(kind).items()}
    return tuple(
        kind(**{name: _value(value, hints[name]) for name, value in line.items() if name in hints})
        for line in csv.DictReader(io.StringIO(text, newline=""))
    )


def _value(text: str, kind: str) -> Any:
    if "str" in kind and "dict" not in kind:
        return text
    if not text:
        return None
    return float(text) if kind.startswith(("float", "<class 'float")) else ast.literal_eval(text)


# --- statistics ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """A geometric mean and its 95 % interval; ``count`` problems."""

    value: float
    low: float
    high: float
    count: int

    def percent(self, digits: int = 1) -> str:
        """``-3.3 % (-4.0 to -2.5)``: how far from 1."""
        value, low, high = (100 * (x - 1) for x in (self.value, self.low, self.high))
        return f"{value:+.{digits}f} % ({low:+.{digits}f} to {high:+.{digits}f})"

    def ratio(self, digits: int = 3) -> str:
        """``1.023 (1.010 to 1.041)``; a dash for no problem."""
        if not self.count:
            return DASH
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def geometric(
    by_problem: Mapping[Any, Sequence[float]],
    resamples: int = 4000,
    family: Callable[[Any], Any] | None = None,
) -> Mean:
    """Over seeds, then over problems. The interval resamples problems, then seeds of each.

    With ``family``, of a problem, it resamples families, then problems of each: what it says holds
    for families that were not looked at.
    """
    if not by_problem:
        return Mean(np.nan, np.nan, np.nan, 0)
    values: Any = list(by_problem.values())
    mean = geometric_mean(geometric_mean(seeds) for seeds in values)
    if family is not None:
        names = dict.fromkeys(map(family, by_problem))
        values = [[v for k, v in by_problem.items() if family(k) == name] for name in names]
    return Mean(mean, *geometric_interval(values, resamples), len(by_problem))


def share(flags: Sequence[bool]) -> tuple[float, float, float]:
    """Share of true ones with Wilson's 95 % interval."""
    from scipy.stats import binomtest  # takes a second

    if not flags:
        return np.nan, np.nan, np.nan
    test = binomtest(sum(flags), len(flags))
    low, high = test.proportion_ci(method="wilson")
    return float(test.statistic), float(low), float(high)
