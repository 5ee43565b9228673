"""What no placement can be better than, proved by arithmetic and by linear programs.

| file | proves | decides where |
| --- | --- | --- |
| here | the longest path, each operator where it is fastest, transfers free | branches are short |
| `loads` | the fractional load balance at the prices of its dual (LP) | devices are busy |
| `paths` | the earliest end of all, with every transfer, between forks and joins | calls |
| `cuts` | the largest load with all that is written and read (minimum cuts) | `max_load` |
| `memory_lp` | a period: memory, busy devices slowed, two devices' traffic (LP) | memory is short |
| `calls` | a call of two devices: all of these at once (LP) | a CPU beside a GPU |
| `copies` | memory, loads, and what is copied to devices that stream (LP) | a model does not fit |
| `grain` | latencies are multiples of it: bounds are rounded up | task graphs, shops |
| `pieces` | which groups can share an accelerator (LP) | `piecewise_latency` |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.bounds.calls import call_s
from placement.bounds.copies import copied_s
from placement.bounds.grain import grain_s
from placement.bounds.loads import LP_SIZE, balance_prices, priced
from placement.bounds.memory_lp import busy_s, columns_of, period_s
from placement.bounds.pieces import pieces_s
from placement.objective import Objective
from placement.problem import Floats, Problem, once
from placement.timeline import longest_flight
from placement.tools.clock import loads
from placement.tools.lp import EXACT


class Effort(NamedTuple):
    """How much may be spent on a bound; programs with more variables are not asked."""

    load_lp: int = LP_SIZE  # variables of a program of loads. 0: none asks for loads
    call_lp: int = 20_000  # of a call; 5,000 take a moment
    period_lp: int = LP_SIZE  # of a period, in all of its programs; 20,000 take a second
    end_work: int = 250_000_000  # numbers looked at for the earliest end of a call: 0.3 s
    flight_work: int = 3_000_000  # ... and of a micro-batch of a stream: 5 ms


_QUICK = Effort(call_lp=5_000, period_lp=20_000)


def lower_bounds(problem: Problem) -> dict[str, float]:
    """Bounds that hold for every placement, by objective: seconds, joules for ``energy``.

    Period and largest load: the load balance, the heaviest group where it is fastest (unless
    replicas may take turns), parameters within memory. The period also: devices that slow each
    other, and how long a micro-batch may be under way. The largest load, where it is the problem's
    objective, also: what devices write and read. Latency: loads, paths, the earliest end of all,
    rounded up where all seconds are multiples of one number and nothing takes time to send.
    Piecewise latency: paths, and what cannot be together on accelerators. Energy (where power is
    known): every operator where it adds least, and every device idle for the shortest possible
    run, whose seconds are worth ``second_j``.
    """
    return _bounds(problem, tuple(Objective), Effort())


@once
def lower_bound(problem: Problem) -> float:
    """That of ``lower_bounds`` for the problem's own objective; for latency without a long LP.

    Searches ask for it, and those that they begin with.
    """
    own = problem.objective
    load_lp = {"latency": _QUICK.call_lp, "piecewise_latency": 0}.get(own, LP_SIZE)
    return _bounds(problem, (own,), _QUICK._replace(load_lp=load_lp))[own]


def _bounds(problem: Problem, wanted: Sequence[Objective], effort: Effort) -> dict[str, float]:
    bare = problem.without_copies  # all that does not ask for them holds beside them
    prices = balance_prices(bare.group_compute_s, effort.load_lp)
    path_s = float(fastest_end_s(bare).max())

    @cache
    def load_s(tensors: bool = True) -> float:
        return _load_bound_s(bare, prices, effort.load_lp, tensors) if effort.load_lp else 0.0

    of: dict[Objective, Callable[[], float]] = {
        Objective.LATENCY: lambda: _latency_bound_s(problem, path_s, load_s(), effort),
        Objective.PERIOD: lambda: _period_bound_s(problem, path_s, load_s(), effort),
        Objective.MAX_LOAD: lambda: _max_load_bound_s(problem, load_s(tensors=False), prices),
        Objective.PIECEWISE_LATENCY: lambda: max(path_s, pieces_s(problem)),
    }
    if problem.power is not None:
        of[Objective.ENERGY] = lambda: _energy_bound_j(problem, path_s, load_s())
    return {own.value: bound() for own, bound in of.items() if own in wanted}


def fastest_end_s(problem: Problem) -> Floats:
    """float64 ``[N]``: when each operator could end if transfers were free."""
    own_s = np.where(problem.supported, problem.compute_s, np.inf).min(axis=1).tolist()
    edges: NDArray[np.integer] = problem.graph.edges
    begin = [0.0] * len(own_s)  # lists: a loop over arrays takes long
    for src, dst in edges[np.argsort(edges[:, 1], kind="stable")].tolist():
        begin[dst] = max(begin[dst], begin[src] + own_s[src])
    return np.array(begin) + np.array(own_s)


def _energy_bound_j(problem: Problem, path_s: float, load_s: float) -> float:
    assert problem.power is not None
    busy, least = problem.power.busy_w, np.minimum(problem.power.busy_w, problem.power.idle_w)
    # What streams works on the device that it streams to, at that one's watts.
    seconds, more = problem.without_copies.compute_s, (busy - least)[problem.worker]
    added = np.where(problem.supported, seconds, 0.0) * more
    added = np.where(problem.supported, added, np.inf).min(axis=1).sum()
    run_s = max(path_s / problem.num_microbatches, load_s)
    return float(added + (least.sum() + problem.second_j) * run_s) * EXACT


def _latency_bound_s(problem: Problem, path_s: float, load_s: float, effort: Effort) -> float:
    bound_s = max(path_s, load_s)  # a load that is one number is exact, but for its sum
    if problem.num_workers > 1:
        bound_s = max(bound_s, _earliest_end_s(problem.without_copies, effort.end_work))
    if problem.cluster.streaming and columns_of(problem) <= effort.call_lp:
        bound_s = max(bound_s, copied_s(problem))
    if problem.num_workers == 2 and columns_of(problem) <= effort.call_lp:
        bound_s = max(bound_s, call_s(problem, bound_s))
    grain = 0.0 if problem.cluster.streaming else grain_s(problem)
    return float(np.ceil(bound_s / grain - 1e-6)) * grain if grain else bound_s


def _period_bound_s(problem: Problem, path_s: float, load_s: float, effort: Effort) -> float:
    """Loads, and that a micro-batch ends before too many others begin (``longest_flight``)."""
    bound_s = busy_s(problem, load_s, effort.period_lp)
    periods = longest_flight(problem.num_microbatches, problem.max_in_flight)
    if problem.max_phases > 1 or not np.isfinite(periods):
        return bound_s
    if periods == 1.0:  # a call, each time
        quick = effort._replace(call_lp=min(effort.period_lp, _QUICK.call_lp))
        return max(bound_s, _latency_bound_s(problem, path_s, load_s, quick))
    bound_s = max(bound_s, path_s / periods * EXACT)
    bare = problem.without_copies
    alone_s = bare.compute_s.sum(axis=0).min()  # a call, at most
    if problem.num_workers > 1 and alone_s > periods * bound_s:
        bound_s = max(bound_s, _earliest_end_s(bare, effort.flight_work) / periods)
    return bound_s


@loads
def _load(kernels: str) -> None:
    """Reports and plans that are shown need no compiler."""
    importlib.import_module(f"placement.bounds.{kernels}")


def _earliest_end_s(problem: Problem, work: int) -> float:
    _load("paths")
    from placement.bounds.paths import earliest_end_s

    return earliest_end_s(problem, work)


def _max_load_bound_s(problem: Problem, load_s: float, prices: Floats) -> float:
    """Of a problem that asks for it also with all that is written and read."""
    if problem.objective is not Objective.MAX_LOAD or problem.max_phases > 1:
        return load_s
    _load("cuts")
    from placement.bounds.cuts import cut_load_s

    return cut_load_s(problem, prices, load_s)


def _load_bound_s(problem: Problem, prices: Floats, lp_size: int, tensors: bool) -> float:
    groups = problem.group_compute_s
    least_s = float(priced(groups, prices).sum()) * EXACT
    if problem.max_phases == 1:
        least_s = max(least_s, float(groups.min(axis=1).max()))
    full = problem.graph.param_bytes.sum() > problem.memory_bytes
    if full.any() and not problem.cluster.streaming and groups.size <= lp_size:
        least_s = max(least_s, period_s(problem, sends=False, tensors=tensors))
    return least_s
