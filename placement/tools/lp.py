"""Linear and integer programs, a row of columns at a time, solved by HiGHS in SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.tools.clock import loads

TOLERANCE = 1e-6  # of the solver, for what is whole and for what is proved then
EXACT = 1 - 1e-12  # sums in another order are no more
Floats = NDArray[np.float64]
Columns = NDArray[np.intp]
Terms = tuple[Columns, ArrayLike]  # columns, and what each counts


@loads
def load_solver() -> None:
    """SciPy takes longer to import than a small program to solve."""
    import scipy.optimize
    import scipy.sparse.csgraph  # noqa: F401


class Program:
    """Rows of columns between 0 and 1; the first column is as small as the rows allow.

    ``answer`` has the columns as they then are, None where there is none; ``values`` has 0 there.
    """

    def __init__(self) -> None:
        self.upper, self.limit = np.ones(1), np.zeros(0)
        self.answer: Floats | None = None
        self.status, self.nodes = "", 0
        self._entries: list[tuple[Columns, Columns, Floats]] = []

    def columns(self, upper: ArrayLike) -> Columns:
        """New columns of at most ``upper [K]``, which are 0 or 1."""
        self.upper, before = np.append(self.upper, upper), len(self.upper)
        return np.arange(before, len(self.upper))

    def rows(self, limit: Floats, *terms: Terms) -> NDArray[np.intp]:
        """A row for each of ``limit [R]``: of each term ``[R]`` one entry."""
        first, self.limit = len(self.limit), np.append(self.limit, limit)
        rows = first + np.arange(len(limit))
        self.add(rows, *terms)
        return rows

    def row(self, limit: float, *terms: Terms) -> None:
        """One row of all columns of all terms."""
        first, self.limit = len(self.limit), np.append(self.limit, limit)
        self.add(np.array(first), *terms)

    def add(self, row: NDArray[np.intp], *terms: Terms) -> None:
        """More terms of such rows."""
        for columns, values in terms:
            a, b, c = np.broadcast_arrays(row, columns, np.asarray(values, np.float64))
            self._entries.append((a.ravel(), b.ravel(), c.ravel()))

    def shares(self, can: NDArray[np.bool_]) -> Columns:
        """Columns like ``can [G, D]``, 0 where it is False; those of a row add up to 1."""
        on = self.columns(can.ravel()).reshape(can.shape)
        for sign in (1.0, -1.0):
            self.rows(np.full(len(can), sign), *((column, sign) for column in on.T))
        return on

    def solve(self, seconds: float = np.inf) -> tuple[float, Floats]:
        """The first column, at least, and the multipliers ``[R]`` that prove it.

        It is what they sum up to, whatever the solver's tolerance.
        """
        rows, limit, most = self._scaled()
        from scipy.optimize import linprog

        cost, bounds = np.eye(1, rows.shape[1])[0], np.stack([0 * self.upper, self.upper], axis=1)
        options = {"time_limit": seconds}
        answer = linprog(
            cost, A_ub=rows, b_ub=limit, bounds=bounds, method="highs", options=options
        )
        self.answer = answer.x if answer.success else None
        if not answer.success:
            return 0.0, 0 * limit
        price = np.maximum(-answer.ineqlin.marginals, 0.0)
        left = np.minimum(cost + rows.T @ price, 0.0)
        return float(left @ self.upper - price @ limit), price / most

    def whole(self, columns: Columns, seconds: float) -> float:
        """The first column, at least, where ``columns`` are whole: as far as that is proved, less
        the solver's tolerance; ``status`` is its message.

        HiGHS looks at its clock now and then only.
        """
        rows, limit, _ = self._scaled()
        from scipy.optimize import Bounds, LinearConstraint, milp

        # With presolve HiGHS has been seen to prove more than the optimum where a billionth of the
        # memory decides, or to end in an error; without, it is as fast on programs of these.
        options = {"time_limit": max(0.05, seconds), "mip_rel_gap": TOLERANCE, "presolve": False}
        integrality = np.zeros(len(self.upper))
        integrality[columns.ravel()] = 1
        answer = milp(
            np.eye(1, len(self.upper))[0],
            integrality=integrality,
            bounds=Bounds(0.0, self.upper),
            constraints=LinearConstraint(rows, -np.inf, limit),
            options=options,
        )
        self.answer, self.status = answer.x, answer.message
        self.nodes += int(answer.get("mip_node_count") or 0)
        dual = answer.get("mip_dual_bound")
        known = dual is not None and np.isfinite(dual)
        return max(0.0, float(dual) * (1 - TOLERANCE) - TOLERANCE) if known else 0.0

    def _scaled(self) -> tuple[Any, Floats, Floats]:
        """Rows, sparse, and their limits over the largest number of each; these ``[R]``."""
        load_solver()
        from scipy.sparse import csr_array

        row, column, value = map(np.concatenate, zip(*self._entries, strict=True))
        most = np.full(len(self.limit), 1e-300)
        np.maximum.at(most, row, np.abs(value))
        shape = len(self.limit), len(self.upper)
        return csr_array((value / most[row], (row, column)), shape=shape), self.limit / most, most

    @property
    def values(self) -> Floats:
        """float64, a number for each column."""
        return 0 * self.upper if self.answer is None else self.answer

    @property
    def size(self) -> int:
        """Numbers in all rows."""
        return sum(len(value) for _, _, value in self._entries)
