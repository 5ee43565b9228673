"""Exact windows of ``order_search``: CP-SAT decides devices and order of a piece of a sequence.

A *window* is a run of positions of a sequence. What comes before it keeps its times, which are
release times of the window; what comes after it keeps its devices and their order, and the
longest path from each of them to the end is a tail (``State.from_s``). So the latency of the whole
is that of the window with heads and tails, exactly, where channels do not wait: transfers take
their time here but no channel, and ``timetable`` says what the answer is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.search import order_times
from placement.search.order_state import State, Tables
from placement.tools import cpsat

Ints = NDArray[np.int32]

sending_s: Any = order_times.sending_s.py_func  # of one delivery: not worth a kernel's call


class WindowEffort(NamedTuple):
    """What windows take, in evaluations of the annealing that take as long."""

    most: int = 30_000  # that one may be worth: 0.1 to 0.2 seconds
    per_unit: int = 1_500_000  # of CP-SAT's deterministic time
    per_operator: int = 50  # that is written down


EFFORT = WindowEffort()


@dataclass(frozen=True)
class Window:
    """What came of one window.

    Attributes:
        place, sequence: int32 ``[N]`` as they are with it; None where nothing was found.
        closed: nothing better is in this window.
        evaluations: of the annealing, that would have taken as long.
        bound_s: no latency is below, whatever is in the window.
    """

    place: Ints | None
    sequence: Ints | None
    closed: bool
    evaluations: int
    bound_s: float = 0.0


def available() -> bool:
    """Whether OR-Tools is installed (the extra ``cp``)."""
    try:
        from ortools.sat.python import cp_model  # noqa: F401
    except ImportError:
        return False
    return True


def rest_s(t: Tables, s: State, first: int, beyond: int) -> float:
    """The longest path that has nothing in positions ``first..beyond - 1``."""
    n = len(s.sequence)
    early = s.position < first
    longest = float(s.end_s[early[:n]].max(initial=0.0))
    user = t.edge_dst
    sender = np.repeat(np.arange(len(t.edge_ptr) - 1), np.diff(t.edge_ptr))  # N: a model input
    crossing = early[sender] & (s.position[user] >= beyond)
    for e in np.flatnonzero(crossing).tolist():
        arrives = s.try_arrival_s[t.edge_in[e]]
        longest = max(longest, float(arrives + s.from_s[user[e]]))
    free_s, after_s = _devices(t, s, first, beyond)
    return max(longest, float((free_s + after_s).max()))


def solve(
    t: Tables,
    s: State,
    part: range,
    grain_s: float,
    seed: int,
    evaluations: float = EFFORT.most,
    seconds: float = np.inf,
    threads: int = 1,
    check: Callable[[], None] = lambda: None,
) -> Window:
    """The best devices and order of what is in the positions ``part``.

    Args:
        grain_s: seconds of which everything is a multiple, 0 if there are none.
        evaluations: most that the solver may be worth, besides writing the program down.
        seconds: most that the solver may take; inf: what it answers depends on the seed alone.
        check: called for each operator that is written down; what it raises ends that.
    """
    from ortools.sat.python import cp_model

    cost = s.cost_s
    unit = grain_s or max(cost, 1e-300) / 2**20  # where seconds are multiples of nothing
    model = cp_model.CpModel()
    program = _Program(t, s, part.start, part.stop, unit, model)
    slack = 0 if grain_s else len(part)  # each was rounded
    program.write(round(cost / unit) + slack, check)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = threads
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.max_deterministic_time = evaluations / EFFORT.per_unit
    solver.parameters.linearization_level = 0
    solver.parameters.symmetry_level = 0
    solver.parameters.cp_model_probing_level = 0
    if np.isfinite(seconds):
        solver.parameters.max_time_in_seconds = max(0.01, seconds)
    status = cpsat.solve(solver, model)
    spent = int(solver.response_proto.deterministic_time * EFFORT.per_unit)
    counted = max(1, spent + EFFORT.per_operator * len(part))
    closed = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    bound_s = max(0.0, solver.best_objective_bound - slack) * unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Window(None, None, closed, counted, bound_s if status == cp_model.UNKNOWN else 0.0)
    place, sequence = program.read(solver)
    return Window(place, sequence, closed, counted, bound_s)


class _Program:
    """The constraint program of one window, in whole units."""

    def __init__(
        self, t: Tables, s: State, first: int, beyond: int, unit: float, model: Any
    ) -> None:
        self._t, self._s, self._first, self._beyond = t, s, first, beyond
        self._unit, self._model = unit, model
        self._ops = s.sequence[first:beyond].tolist()
        inside = np.zeros(len(s.sequence) + 1, bool)
        inside[self._ops] = True
        self._inside = inside
        self._able = {i: self._devices_of(i) for i in self._ops}
        self._begin: dict[int, Any] = {}
        self._end: dict[int, Any] = {}
        self._on: dict[tuple[int, int], Any] = {}  # (group, device)

    def _units(self, seconds: float) -> int:
        return round(seconds / self._unit)

    def _devices_of(self, i: int) -> list[int]:
        """Where ``i`` may run: a group with operators outside stays where it is."""
        t = self._t
        g = t.group[i]
        members = t.op[t.op_ptr[g] : t.op_ptr[g + 1]]
        if not self._inside[members].all():
            return [int(self._s.place[i])]
        able: list[int] = np.flatnonzero(np.isfinite(t.compute_s[members]).all(axis=0)).tolist()
        return able

    def write(self, most: int, check: Callable[[], None]) -> None:
        """Least latency, of at most ``most`` units."""
        t, s, model = self._t, self._s, self._model
        latency = model.new_int_var(0, most, "")
        free_s, after_s = _devices(t, s, self._first, self._beyond)
        lanes: list[list[Any]] = [[] for _ in range(len(free_s))]
        for i in self._ops:
            check()
            able, g = self._able[i], int(t.group[i])
            begin = model.new_int_var(0, most, "")
            units = {d: self._units(t.compute_s[i, d]) for d in able}
            alike = len(set(units.values())) == 1
            end = begin + units[able[0]] if alike else model.new_int_var(0, most, "")
            self._begin[i], self._end[i] = begin, end
            model.add_hint(begin, self._units(s.start_s[i]))
            if len(able) > 1 and (g, able[0]) not in self._on:
                for d in able:
                    self._on[g, d] = model.new_bool_var("")
                    model.add_hint(self._on[g, d], int(s.place[i] == d))
                model.add_exactly_one(self._on[g, d] for d in able)
            for d in able:
                on = self._on.get((g, d), True)
                lanes[d].append(model.new_optional_interval_var(begin, units[d], end, on, ""))
                ready_s, tail_s = self._outside(i, d)
                release = self._units(max(ready_s, free_s[d]))
                tail = self._units(max(tail_s, after_s[d]))
                model.add(begin >= release).only_enforce_if(on)
                model.add(end + tail <= latency).only_enforce_if(on)
        for lane in lanes:
            if len(lane) > 1:
                model.add_no_overlap(lane)
        for i in self._ops:
            check()
            for e in range(t.edge_ptr[i], t.edge_ptr[i + 1]):
                if self._inside[t.edge_dst[e]]:
                    self._edge(i, e)
        model.minimize(latency)

    def _outside(self, i: int, d: int) -> tuple[float, float]:
        """When the inputs from outside are on ``d``; the longest path through users outside."""
        t, s = self._t, self._s
        n, num_devices = t.compute_s.shape
        ready = tail = 0.0
        for m in range(t.in_ptr[i], t.in_ptr[i + 1]):
            src = t.in_src[m]
            if not self._inside[src]:
                home = num_devices if src == n else s.place[src]
                produced_s = 0.0 if src == n else s.end_s[src]
                ready = max(ready, produced_s + sending_s(t, t.in_edge[m], home, d))
        for e in range(t.edge_ptr[i], t.edge_ptr[i + 1]):
            user = t.edge_dst[e]
            if not self._inside[user]:
                tail = max(tail, s.from_s[user] + sending_s(t, e, d, s.place[user]))
        return ready, tail

    def _edge(self, i: int, e: int) -> None:
        """The user of delivery ``e`` of ``i`` begins when it has arrived."""
        t, model, user = self._t, self._model, int(self._t.edge_dst[e])
        model.add(self._begin[user] >= self._end[i])
        groups = int(t.group[i]), int(t.group[user])
        for a in self._able[i]:
            on = self._on.get((groups[0], a), True)
            costs = {b: self._units(sending_s(t, e, a, b)) for b in self._able[user] if b != a}
            if len(set(costs.values())) == 1 and a in self._able[user] and len(costs) > 1:
                here = self._on[groups[1], a]
                pairs = [(costs[next(iter(costs))], here.negated())]
            else:
                pairs = [(x, self._on.get((groups[1], b), True)) for b, x in costs.items()]
            for cost, there in pairs:
                if cost > 0:
                    arrived = model.add(self._begin[user] >= self._end[i] + cost)
                    arrived.only_enforce_if(on, there)

    def read(self, solver: Any) -> tuple[Ints, Ints]:
        """int32 ``[N]`` devices and sequence of the answer."""
        place, sequence = self._s.place.copy(), self._s.sequence.copy()
        when = []
        for i in self._ops:
            able, g = self._able[i], int(self._t.group[i])
            if len(able) > 1:
                place[i] = next(d for d in able if solver.value(self._on[g, d]))
            when.append((solver.value(self._begin[i]), solver.value(self._end[i]), i))
        sequence[self._first : self._beyond] = [i for _, _, i in sorted(when)]
        return place, sequence


def _devices(t: Tables, s: State, first: int, beyond: int) -> tuple[Any, Any]:
    """float64 ``[D]`` when each is free for a window, and the path from what it runs afterwards."""
    free_s, after_s = np.zeros((2, t.compute_s.shape[1]))
    early, late = s.sequence[:first], s.sequence[beyond:]
    np.maximum.at(free_s, s.place[early], s.end_s[early])
    np.maximum.at(after_s, s.place[late], s.from_s[late])
    return free_s, after_s
