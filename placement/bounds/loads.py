"""Loads balanced in fractions: a linear program, and the prices that prove its optimum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement.problem import Floats
from placement.tools.lp import Columns, Program

LP_SIZE = 200_000  # variables of the programs of loads: seconds


def alike(columns: Floats) -> tuple[Floats, NDArray[np.intp], NDArray[np.intp]]:
    """``[R, K]`` of ``columns [R, D]``: one of those that are equal, as they first come; the number
    ``[D]`` of each, and how many there are ``[K]``."""
    number: dict[bytes, int] = {}
    kind = np.array([number.setdefault(c.tobytes(), len(number)) for c in columns.T.copy()])
    return columns[:, np.unique(kind, return_index=True)[1]], kind, np.bincount(kind)


def spread(seconds: Floats, count: NDArray[np.integer]) -> tuple[Program, Columns, float]:
    """A program of the largest load, its shares of rows of ``seconds [G, K]``, and its unit;
    ``count [K]``: devices of each kind."""
    can, program = np.isfinite(seconds), Program()
    on, taken_s = program.shares(can), np.where(can, seconds, 0.0)
    for k, many in enumerate(count.tolist()):
        time = np.zeros(1, np.intp), -many * taken_s.sum()
        program.row(0.0, (on[:, k], taken_s[:, k]), time)
    return program, on, float(taken_s.sum())


def balanced(seconds: Floats) -> NDArray[np.intp]:
    """A device ``[G]`` for each row of ``seconds [G, D]``: loads are about as even as can be.

    In fractions they are, and fewer rows than there are devices are split. Of these the heaviest is
    first, each where the load is then least.
    """
    program, on, _ = spread(seconds, np.ones(seconds.shape[1], int))
    program.solve()
    share = np.where(np.isfinite(seconds), program.values[on], -1.0)
    device, split = share.argmax(axis=1), share.max(axis=1) < 1.0 - 1e-6
    load_s = np.bincount(device[~split], seconds[~split, device[~split]], seconds.shape[1])
    for g in np.flatnonzero(split)[np.argsort(-seconds[split].min(axis=1), kind="stable")]:
        device[g] = (load_s + seconds[g]).argmin()
        load_s[device[g]] += seconds[g, device[g]]
    return device


def priced(seconds: Floats, prices: Floats) -> Floats:
    """float64 ``[G]``: each row of ``seconds [G, D]`` where it is cheapest; inf entries are out."""
    finite = np.isfinite(seconds)
    return np.where(finite, np.where(finite, seconds, 0.0) * prices, np.inf).min(axis=1)


def balance_prices(seconds: Floats, lp_size: int = LP_SIZE) -> Floats:
    """float64 ``[D]`` prices ``y >= 0`` of a second on each device, ``sum y = 1``.

    For *any* such prices ``sum_g min_d y_d * seconds[g, d]`` is at most the largest load of
    every assignment; these make it largest (the dual of the fractional load balance). Equal
    devices get equal prices; with two kinds of device the optimum is one of the rows' ratios,
    with more kinds HiGHS solves the LP, unless it has more than ``lp_size`` variables: it may
    take minutes, and all prices are equal then.
    """
    s = np.asarray(seconds, dtype=np.float64)
    s = s[s.min(axis=1) > 0]
    kinds, kind, count = alike(s)
    if len(s) == 0 or len(count) == 1 or (len(count) > 2 and kinds.size > lp_size):
        return np.full(s.shape[1], 1.0 / s.shape[1])
    return (_two_prices if len(count) == 2 else _lp_prices)(kinds, count)[kind]


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
    """Prices of several kinds of device, float64 ``[K]``, from the program's multipliers."""
    prices = spread(s, count)[0].solve()[1][-len(count) :]
    total = float(prices @ count)
    return prices / total if total > 0 else np.full(len(count), 1.0 / count.sum())
