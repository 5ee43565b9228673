"""What no placement can be better than, proved by arithmetic and by an LP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key

import numpy as np
from numpy.typing import NDArray

from placement.objective import Objective
from placement.problem import Floats, Problem


def lower_bounds(problem: Problem) -> dict[str, float]:
    """Bounds that hold for every placement, by objective: seconds, joules for ``energy``.

    Latency: the critical path with every operator at its fastest device. Period and largest
    load: the fractional load balance without communication (an LP), which also holds where
    replicas take turns; and, where they may not (``max_phases`` of the problem is 1), the heaviest
    colocation group at its cheapest device. Energy (where power is known): every operator
    where it adds least, and every device idle for the shortest possible run, whose seconds are
    worth ``second_j``.
    """
    path_s, load_s = _path_bound_s(problem), _load_bound_s(problem)
    bounds = {"latency": path_s, "period": load_s, "max_load": load_s, "piecewise_latency": path_s}
    if problem.power is not None:
        busy, least = problem.power.busy_w, np.minimum(problem.power.busy_w, problem.power.idle_w)
        added = np.where(problem.supported, problem.compute_s, 0.0) * (busy - least)
        added = np.where(problem.supported, added, np.inf).min(axis=1).sum()
        run_s = max(path_s / problem.num_microbatches, load_s)
        waiting_w = least.sum() + problem.second_j
        bounds["energy"] = float(added + waiting_w * run_s) * (1 - 1e-12)
    return bounds


def lower_bound(problem: Problem) -> float:
    """That of ``lower_bounds`` for the problem's own objective, without the LP for a path."""
    if problem.objective is Objective.ENERGY:
        return lower_bounds(problem)[problem.objective]
    return (_load_bound_s if problem.objective.is_throughput else _path_bound_s)(problem)


def _path_bound_s(problem: Problem) -> float:
    fastest = np.where(problem.supported, problem.compute_s, np.inf).min(axis=1)
    own_s, finish = fastest.tolist(), fastest.tolist()  # lists: a loop over arrays takes long
    edges = problem.graph.edges
    for src, dst in edges[np.argsort(edges[:, 1], kind="stable")].tolist():
        finish[dst] = max(finish[dst], finish[src] + own_s[dst])
    return max(finish)


def _load_bound_s(problem: Problem) -> float:
    groups = problem.group_compute_s
    heaviest = float(groups.min(axis=1).max()) if problem.max_phases == 1 else 0.0
    return max(heaviest, balance_bound(groups))


def balance_bound(seconds: Sequence[Sequence[float]] | Floats) -> float:
    """Least largest load when each row of ``[G, D]`` seconds is spread over the devices.

    Summed up from the ``balance_prices``, so that it holds whatever a solver's tolerance.
    """
    s = np.asarray(seconds, dtype=np.float64)
    return float(priced(s, balance_prices(s)).sum()) * (1 - 1e-12)


def priced(seconds: Floats, prices: Floats) -> Floats:
    """float64 ``[G]``: each row of ``seconds [G, D]`` where it is cheapest; inf entries are out."""
    finite = np.isfinite(seconds)
    return np.where(finite, np.where(finite, seconds, 0.0) * prices, np.inf).min(axis=1)


_LP_SIZE = 200_000


def balance_prices(seconds: Floats) -> Floats:
    """float64 ``[D]`` prices ``y >= 0`` of a second on each device, ``sum y = 1``.

    For *any* such prices ``sum_g min_d y_d * seconds[g, d]`` is at most the largest load of
    every assignment; these make it largest (the dual of the fractional load balance). Equal
    devices get equal prices; with two kinds of device the optimum is one of the rows' ratios,
    with more kinds HiGHS solves the LP, unless it has more than ``_LP_SIZE`` variables: it would
    take minutes, and all prices are equal then.
    """
    s = np.asarray(seconds, dtype=np.float64)
    s = s[s.min(axis=1) > 0]
    kinds, kind, count = _equal_columns(s)
    if len(s) == 0 or len(count) == 1 or (len(count) > 2 and kinds.size > _LP_SIZE):
        return np.full(s.shape[1], 1.0 / s.shape[1])
    return (_two_prices if len(count) == 2 else _lp_prices)(kinds, count)[kind]


def _equal_columns(s: Floats) -> tuple[Floats, NDArray[np.intp], NDArray[np.intp]]:
    """``np.unique(s, axis=1)`` with inverse and counts; that compares rows entry by entry."""
    columns = np.ascontiguousarray(s.T)

    def compare(a: int, b: int) -> int:
        differs = columns[a] != columns[b]
        at = int(differs.argmax()) if len(differs) else 0
        if not differs[at : at + 1].any():
            return 0
        return -1 if columns[a, at] < columns[b, at] else 1

    order = sorted(range(len(columns)), key=cmp_to_key(compare))
    new = [i == 0 or compare(order[i - 1], d) != 0 for i, d in enumerate(order)]
    kind = np.empty(len(columns), np.intp)
    kind[order] = np.cumsum(new) - 1
    return columns[np.array(order)[new]].T, kind, np.bincount(kind)


def _two_prices(s: Floats, count: NDArray[np.intp]) -> Floats:
    """Prices of two kinds of device, float64 ``[2]``: try every row's ratio, and the extremes."""
    first, second = s[:, 0], s[:, 1]
    both = np.isfinite(s).all(axis=1)
    only = [s[~np.isfinite(s[:, 1 - k]), k].sum() for k in (0, 1)]
    a, b = first[both], second[both]
    order = np.argsort(b / a, kind="stable")
    a, b, ratio = a[order], b[order], (b / a)[order]
    # At the ratio r = y_0 / y_1 a row costs min(r * first, second): second where b / a <= r.
    below, above = np.append(0.0, np.cumsum(b))[1:], (a.sum() - np.cumsum(a))
    value = (ratio * (only[0] + above) + only[1] + below) / (ratio * count[0] + count[1])
    best = int(np.argmax(value)) if len(value) else -1
    extremes = (only[0] / count[0], only[1] / count[1])
    if best < 0 or max(extremes) > value[best]:
        return np.where(np.arange(2) == np.argmax(extremes), 1.0 / count, 0.0)
    return np.array([ratio[best], 1.0]) / (ratio[best] * count[0] + count[1])


def _lp_prices(s: Floats, count: NDArray[np.intp]) -> Floats:
    """Prices of several kinds of device, float64 ``[K]``, from the LP's marginals."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    rows, kinds = np.nonzero(np.isfinite(s))
    k, d = len(rows), s.shape[1]
    unit = float(s[rows, kinds].max())
    load = coo_matrix(
        (
            np.append(s[rows, kinds] / unit, -count.astype(np.float64)),
            (np.append(kinds, np.arange(d)), [*range(k), *[k] * d]),
        )
    )
    once = coo_matrix((np.ones(k), (rows, np.arange(k))), shape=(len(s), k + 1))
    answer = linprog(
        np.append(np.zeros(k), 1.0),
        A_ub=load,
        b_ub=np.zeros(d),
        A_eq=once,
        b_eq=np.ones(len(s)),
        method="highs",
    )
    prices = np.maximum(-answer.ineqlin.marginals, 0.0) if answer.success else np.zeros(d)
    total = float(prices @ count)
    return prices / total if total > 0 else np.full(d, 1.0 / count.sum())
