"""Devices and orders by constraint programming, with a proved bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from placement.bounds import lower_bound
from placement.bounds.grain import grain_s
from placement.objective import Objective
from placement.planners import PlannerError, check_least, load
from placement.planners.mip import UNWRITTEN, Mip
from placement.planners.order_search import (
    sequence_of,
    start,
    state_of,
    tables_of,
    why_not,
    why_simulated,
)
from placement.problem import Planner, Problem, Solution
from placement.search import windows
from placement.search.evaluation import Search
from placement.simulator.analytic_kernels import Blocks, blocks
from placement.tools import cpsat
from placement.tools.ownership import needing

# The start's value in integer units. Not more: OR-Tools 9.15 has been seen to call programs with
# coefficients near 10**9 infeasible in presolve that it solves without.
_UNITS = 10**7


@dataclass(frozen=True)
class CpSat:
    """Devices and orders together, by OR-Tools CP-SAT: ``latency`` and ``piecewise_latency``.

    A ``latency`` is solved wherever ``order_search`` has exact times without the simulator, which
    it starts from; transfers take their time there but no channel, so the bound holds, and the
    answer is best where channels do not wait. ``piecewise_latency`` is solved with one piece per
    accelerator (the latency program of Tarnawski et al., NeurIPS 2020); the bound of that goes to
    ``stats["one_piece_bound_s"]``, as a placement with more pieces may be better. Seconds
    become integers: of a ``latency`` 2**-20 of the start's value and rounded, so its bound has a
    unit less for each operator; of pieces 1e-7 of it and rounded down. Bounds hold exactly.

    Whatever has no such program is answered by ``mip``: its split of least ``max_load``.

    Attributes:
        start: planner of the first placement, which is improved on; None: ``order_search``, or
            ``macro_search`` for pieces, for ``start_share`` of the seconds.
        seconds: budget. The problem is read and the start is made in any case; where too little
            is left for the program, the start is the answer (``stats["status"]``).
        threads: of the solver.
        seed: of the solver.
        start_share, most_start_s: of the seconds, for the start, and its seconds at most.
        reading: CP-SAT looks at its clock after this times the seconds of writing it a program.
    """

    start: str | Planner | None = None
    seconds: float = 60.0
    threads: int = 1
    seed: int = 0
    start_share: float = 0.1
    most_start_s: float = 5.0
    reading: float = 0.5

    def __post_init__(self) -> None:
        check_least(self, 0, "threads", "seed")

    def __call__(self, problem: Problem) -> Solution:
        """The best devices and order within the time.

        Raises:
            PlannerError: OR-Tools is not installed.
        """
        with needing("cp", "cp_sat needs OR-Tools", PlannerError, ", or use mip"):
            from ortools.sat.python import cp_model  # noqa: F401
        search = Search(problem, self.seconds)
        if problem.objective is Objective.PIECEWISE_LATENCY:
            return _latency(self, search)
        if why_not(problem) or why_simulated(problem):
            return Mip(start=self.start, seconds=self.seconds)(problem)
        return _orders(self, search)


class _OutOfTime(Exception):
    """The seconds are too few to write the program down and solve it."""


def _begin(planner: CpSat, search: Search, default: str | Planner) -> None:
    share = min(planner.most_start_s, planner.start_share * planner.seconds) / planner.seconds
    search.run(planner.start or default, share, share)


def _writing(planner: CpSat, search: Search) -> Callable[[], None]:
    """A check for whoever writes a program down, to be called now and then.

    It raises ``_OutOfTime`` when the solver would end too late, as it looks at its clock only when
    it has read the program.
    """
    begun = search.seconds
    allowed = search.seconds_left / (1.0 + planner.reading)

    def check() -> None:
        if search.seconds - begun > allowed:
            raise _OutOfTime

    return check


def _orders(planner: CpSat, search: Search) -> Solution:
    """Least latency over devices and orders: one window over everything (``search.windows``)."""
    problem = search.problem
    _begin(planner, search, "order_search")
    assert search.best is not None
    place = search.best[problem.graph.group]
    tables, state = tables_of(problem), state_of(problem, 1)
    rng, grain = np.random.default_rng(planner.seed), grain_s(problem)
    if search.best_cost <= 0.0:  # nothing is less, and times are counted in parts of it
        return search.solution(0.0, solved="latency", closed=True)
    start(tables, state, place, sequence_of(problem, place, search.schedule), rng)
    bound_s = lower_bound(problem)
    try:
        answer = windows.solve(
            tables,
            state,
            range(problem.num_ops),
            grain,
            planner.seed,
            evaluations=np.inf,
            seconds=search.seconds_left,
            threads=planner.threads,
            check=_writing(planner, search),
        )
    except _OutOfTime:
        return search.solution(bound_s, status=UNWRITTEN)
    if answer.place is not None and answer.sequence is not None:
        start(tables, state, answer.place, answer.sequence, rng)
        search.num_evaluations += 1
        best_s = state.best_s
        search.consider_order(state.best_place, state.best_sequence, best_s)
    return search.solution(max(bound_s, answer.bound_s), solved="latency", closed=answer.closed)


def _crosses(model: Any, here: Any, users: Iterable[Any]) -> Any:
    """Whether a device sends a tensor or receives it: ``here`` says whether it makes it."""
    pays = model.new_bool_var("")
    for there in users:
        model.add(pays >= there - here)
        model.add(pays >= here - there)
    return pays


def _held(model: Any, b: Blocks, on: list[Any]) -> Any:
    """Bytes on a device: ``on[i]`` says whether block ``i`` is there, None: it cannot be."""
    held = sum(int(b.own_bytes[i]) * v for i, v in enumerate(on) if v is not None)
    for q, size in enumerate(b.tied_bytes.tolist()):
        holds = model.new_bool_var(f"q{q}")
        for i in b.tied_dst[b.tied_ptr[q] : b.tied_ptr[q + 1]]:
            if on[i] is not None:
                model.add_implication(on[i], holds)
        held += size * holds
    return held


def _latency(planner: CpSat, search: Search) -> Solution:
    """Least piecewise latency with at most one piece per accelerator; CPUs are one pool."""
    from ortools.sat.python import cp_model

    problem = search.problem
    moves = problem.graph.num_groups * problem.num_devices
    _begin(planner, search, load("macro_search", evaluations=1000 * moves))
    assert search.best is not None
    path_s, fits = lower_bound(problem), search.best_s < np.inf
    possible = problem.group_compute_s[np.isfinite(problem.group_compute_s)]
    scale_s = max(search.best_cost if fits else float(possible.max()), 1e-9)
    program = _Pieces(problem, cp_model.CpModel(), _UNITS if fits else 2**40, scale_s / _UNITS)
    try:
        x, latest = program.write(_writing(planner, search))
    except _OutOfTime:
        return search.solution(path_s, status=UNWRITTEN, branches=0)
    program.model.minimize(latest)
    for row, device in zip(x, search.best.tolist(), strict=True):
        for d, variable in row.items():
            program.model.add_hint(variable, int(device == d))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.05, search.seconds_left)
    solver.parameters.num_workers = planner.threads
    solver.parameters.random_seed = planner.seed % 2**31  # an int32
    status = cpsat.solve(solver, program.model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        choice = [next(d for d, v in row.items() if solver.value(v)) for row in x]
        search.consider(np.array(choice, np.int32), 1)
    return search.solution(
        path_s,
        solved="piecewise_latency, one piece per accelerator",
        one_piece_bound_s=max(path_s, solver.best_objective_bound * program.unit_s),
        status=solver.status_name(status),
        branches=solver.num_branches,
    )


@dataclass(frozen=True)
class _Pieces:
    """The program of ``piecewise_latency``; times are whole ``unit_s``, ``horizon`` at most."""

    problem: Problem
    model: Any
    horizon: int
    unit_s: float

    def write(self, check: Callable[[], None]) -> tuple[list[dict[int, Any]], Any]:
        """Variables: is group ``g`` on device ``d`` (``x[g][d]``), and the latency."""
        problem, model, g = self.problem, self.model, self.problem.graph
        end = [self._time() for _ in range(problem.num_ops)]
        x = []
        for group_s in problem.group_compute_s:
            check()
            able = np.flatnonzero(group_s < np.inf).tolist()
            x.append({d: model.new_bool_var("") for d in able})
            model.add_exactly_one(x[-1].values())
        at = [x[group] for group in g.group]
        latest = self._time()
        model.add_max_equality(latest, end)
        preds: list[set[int]] = [set() for _ in range(problem.num_ops)]
        for u, v in g.edges.tolist():
            preds[v].add(u)
        is_cpu = [device.kind == "cpu" for device in problem.cluster.devices]
        for v in range(problem.num_ops):
            check()
            for d in (d for d, cpu in enumerate(is_cpu) if cpu and d in at[v]):
                runs = _units(problem.compute_s[v, d], self.unit_s)
                for bound in [end[u] + runs for u in preds[v]] or [runs]:
                    model.add(end[v] >= bound).only_enforce_if(at[v][d])
        for d in (d for d, cpu in enumerate(is_cpu) if not cpu):
            self._piece(d, at, end, preds, check)
        b = blocks(problem, g.group)
        for d, capacity in enumerate(problem.memory_bytes.tolist()):
            if b.own_bytes.sum() + b.tied_bytes.sum() > capacity:
                model.add(_held(model, b, [row.get(d) for row in x]) <= capacity)
        return x, latest

    def _piece(
        self,
        d: int,
        at: list[dict[int, Any]],
        end: list[Any],
        preds: list[set[int]],
        check: Callable[[], None],
    ) -> None:
        """An accelerator begins when all is there that it reads, and hands over all at once."""
        model, g = self.model, self.problem.graph
        begins, ends = self._time(), self._time()
        total: Any = begins
        for v in range(self.problem.num_ops):
            check()
            if d not in at[v]:
                continue
            total += _units(self.problem.compute_s[v, d], self.unit_s) * at[v][d]
            model.add(end[v] >= ends).only_enforce_if(at[v][d])
            for u in preds[v]:
                if at[u] is not at[v]:
                    outside = [at[u][d].negated()] if d in at[u] else []
                    model.add(begins >= end[u]).only_enforce_if([at[v][d], *outside])
        for t in range(g.num_tensors):
            src = int(g.tensor_src[t])
            here = at[src].get(d, 0) if src >= 0 else 0
            there = {id(at[u]): at[u].get(d, 0) for u in g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]]}
            check()
            if self.problem.io_s[t, d] > 0 and there:
                crosses = _crosses(model, here, there.values())
                total += _units(self.problem.io_s[t, d], self.unit_s) * crosses
        model.add(ends >= total)

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")


def _units(seconds: float, unit_s: float) -> int:
    """Rounded down. More than the start's value cannot be part of a better placement."""
    return min(int(seconds / unit_s), _UNITS + 1)
