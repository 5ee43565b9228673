"""The best values of variables that few costs join, as of operators that may be cut.

Variables are eliminated one by one, each into a table
over its neighbours (nonserial dynamic programming, Bertele and Brioschi 1972; for parallel training
Elango, "PaSE", IPDPS 2021): exact, and quick where a graph is narrow, as models are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MOST_CELLS = 2**22  # of a table


@dataclass
class Factor:
    """A cost ``table`` of the variables ``scope``, one axis for each."""

    scope: tuple[int, ...]
    table: Floats


def least(domains: Sequence[int], factors: Sequence[Factor]) -> list[int]:
    """Values of the variables (``domains``: how many each has) with the least sum of all factors.

    A table that would have more than ``_MOST_CELLS`` cells is cut down: the neighbour with the most
    values is fixed to what is best for the factors it is in alone.
    """
    live = [Factor(f.scope, f.table) for f in factors]
    of: dict[int, set[int]] = {v: set() for v in range(len(domains))}
    for i, f in enumerate(live):
        for v in f.scope:
            of[v].add(i)
    decided: list[tuple[int, tuple[int, ...], NDArray[np.intp]]] = []
    left = set(of)
    while left:
        v = min(left, key=lambda v: (_cells(v, of, live, domains), v))
        while _cells(v, of, live, domains) > _MOST_CELLS:
            wide = max(_scope(v, of, live) - {v}, key=lambda u: domains[u])
            _fix(wide, of, live, domains, decided)
            left.discard(wide)
        scope = tuple(sorted(_scope(v, of, live) - {v}))
        table = _joined((v, *scope), [live[i] for i in of[v]], domains)
        decided.append((v, scope, table.argmin(axis=0)))
        for i in tuple(of[v]):
            for u in live[i].scope:
                of[u].discard(i)
        live.append(Factor(scope, table.min(axis=0)))
        for u in scope:
            of[u].add(len(live) - 1)
        left.discard(v)
    values = [0] * len(domains)
    for v, scope, best in reversed(decided):
        values[v] = int(best[tuple(values[u] for u in scope)])
    return values


def _scope(v: int, of: dict[int, set[int]], live: Sequence[Factor]) -> set[int]:
    return {v}.union(*(live[i].scope for i in of[v]))


def _cells(v: int, of: dict[int, set[int]], live: Sequence[Factor], domains: Sequence[int]) -> int:
    cells = 1
    for u in _scope(v, of, live):
        cells *= domains[u]
    return cells


def _joined(scope: tuple[int, ...], factors: Sequence[Factor], domains: Sequence[int]) -> Floats:
    """The sum of factors as a table over ``scope``."""
    total = np.zeros([domains[v] for v in scope])
    at = {v: i for i, v in enumerate(scope)}
    for f in factors:
        order = np.argsort([at[v] for v in f.scope])
        shape = [1] * len(scope)
        for v in f.scope:
            shape[at[v]] = domains[v]
        total += f.table.transpose(order).reshape(shape)
    return total


def _fix(
    v: int,
    of: dict[int, set[int]],
    live: list[Factor],
    domains: Sequence[int],
    decided: list[tuple[int, tuple[int, ...], NDArray[np.intp]]],
) -> None:
    """Decide ``v`` by the best that each of its values allows in each factor alone."""
    hopes = np.zeros(domains[v])
    for i in of[v]:
        f = live[i]
        axis = f.scope.index(v)
        hopes += np.moveaxis(f.table, axis, 0).reshape(domains[v], -1).min(axis=1)
    value = int(hopes.argmin())
    decided.append((v, (), np.asarray(value)))
    for i in of.pop(v):
        f = live[i]
        axis = f.scope.index(v)
        scope = f.scope[:axis] + f.scope[axis + 1 :]
        live[i] = Factor(scope, np.take(f.table, value, axis))
    of[v] = set()
