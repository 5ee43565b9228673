"""Baechi's m-SCT: m-ETF with favourite children from a linear program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.planners import Among, check_least, check_shares
from placement.problem import Problem, Solution
from placement.search.coarsen import edge_seconds
from placement.search.evaluation import Search
from placement.search.list_schedule import schedule_that_fits


@dataclass(frozen=True)
class MSct:
    """m-SCT (Jeon et al., Baechi, SoCC 2020), after SCT (Hanen, Munier, 1995).

    A linear program gives every edge ``x = 0`` (same device, no transfer) or 1, relaxed; an
    operator has at most one favourite child, and a child at most one favourite parent. Edges
    with ``x < threshold`` become favourites, and the schedule is that of ``MEtf``, in which a
    device waits for the favourite child of what it ran last.

    Deviations: those of ``MEtf``; the program is solved by HiGHS with mean seconds over the
    devices and mean transfers (the paper's are equal devices); an awaited child loses its
    claim when another operator is urgent, which the paper lets wait at most one transfer.
    ``stats["favourites"]`` counts them.

    Attributes:
        threshold: of rounding, 0..1 (Baechi takes 0.1; at 0.5 or below favourites are
            unique, because each row of the program leaves at most one unit to share).
        lp_seconds: limit of the linear program; past it there are no favourites, which makes
            it m-ETF (``stats["lp_solved"]`` is False then).
    """

    among = Among(late=True, times=15.0, calls=8)

    threshold: float = 0.1
    lp_seconds: float = 60.0

    def __post_init__(self) -> None:
        check_shares(self, "threshold")
        check_least(self, 0, "lp_seconds")

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        favourite = favourite_children(problem, self.threshold, self.lp_seconds)
        solved = favourite is not None
        child = np.full(problem.num_ops, -1, np.int32) if favourite is None else favourite
        filled = schedule_that_fits(
            search, lambda schedule: schedule.place_first_to_start(problem.upward_rank_s, child)
        )
        count = int((child >= 0).sum())
        return search.solution(makespan_s=filled.makespan_s, favourites=count, lp_solved=solved)


def favourite_children(
    problem: Problem, threshold: float = 0.1, seconds: float = 60.0
) -> NDArray[np.int32] | None:
    """int32 ``[N]``: the favourite child of each operator, -1 if none; None if not solved.

    Minimise ``w`` over starts ``s`` and ``0 <= x <= 1`` with, for every edge ``i -> j``,
    ``s_j >= s_i + p_i + c_ij x_ij``; for every ``i`` the sum of ``x`` over its children is at
    least their number minus one, and likewise over its parents; ``w >= s_i + p_i``.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    n, edges = problem.num_ops, problem.graph.edges
    count = len(edges)
    favourite = np.full(n, -1, np.int32)
    if count == 0:
        return favourite
    transfer_s = edge_seconds(problem)
    unit = max(float(problem.mean_compute_s.max()), float(transfer_s.max()), 1e-300)
    work, send = problem.mean_compute_s / unit, transfer_s / unit

    # Variables: s [N], x [E], w. Rows: precedence [E], ends [N], children [N], parents [N].
    rows, columns, values, limit = [], [], [], []

    def add(row: NDArray, column: NDArray, value: float | NDArray) -> None:
        rows.append(row)
        columns.append(column)
        values.append(np.broadcast_to(np.asarray(value, dtype=np.float64), row.shape))

    e, ops = np.arange(count), np.arange(n)
    add(e, edges[:, 0], 1.0)
    add(e, edges[:, 1], -1.0)
    add(e, n + e, send)
    limit.append(-work[edges[:, 0]])
    add(count + ops, ops, 1.0)
    add(count + ops, np.full(n, n + count), -1.0)
    limit.append(-work)
    for side in (0, 1):
        add(count + n * (1 + side) + edges[:, side], n + e, -1.0)
        # At least (number - 1); operators without edges on this side ask for nothing.
        limit.append(1.0 - np.maximum(np.bincount(edges[:, side], minlength=n), 1))
    index = (np.concatenate(rows), np.concatenate(columns))
    shape = (count + 3 * n, n + count + 1)
    answer = linprog(
        np.append(np.zeros(n + count), 1.0),
        A_ub=csr_array((np.concatenate(values), index), shape=shape),
        b_ub=np.concatenate(limit),
        bounds=[(0, None)] * n + [(0, 1)] * count + [(0, None)],
        method="highs",
        options={"time_limit": seconds},
    )
    if answer.x is None or not answer.success:
        return None
    x = answer.x[n : n + count]
    chosen = edges[np.lexsort((edges[:, 1], x))]
    chosen = chosen[np.sort(x) < threshold]
    has_parent = np.zeros(n, bool)
    for i, j in chosen:
        if favourite[i] < 0 and not has_parent[j]:
            favourite[i], has_parent[j] = j, True
    return favourite
