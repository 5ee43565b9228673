"""The best split by constraint programming, with a proved bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from placement.bounds import grain_s, lower_bound
from placement.objective import Objective
from placement.planners import PlannerError, check_least
from placement.planners.order_search import (
    sequence_of,
    start,
    state_of,
    tables_of,
    why_not,
    why_simulated,
)
from placement.problem import Planner, Problem, Solution
from placement.search import exact, windows
from placement.search.evaluation import Search
from placement.simulator.analytic_kernels import Blocks, blocks
from placement.tools import cpsat

# The start's value in integer units. Not more: OR-Tools 9.15 has been seen to call programs with
# coefficients near 10**9 infeasible in presolve that it solves without.
_UNITS = 10**7
_READING = 0.5  # CP-SAT looks at its clock after this times the seconds of writing it a program


@dataclass(frozen=True)
class CpSat:
    """Least ``max_load`` over all splits, or over all contiguous ones, by OR-Tools CP-SAT.

    A bool for each group and device; a tensor is paid by a device where its producer and one
    of its users differ in being there. For contiguous splits the stages are ordered, a block
    is never before one it depends on, and the kind of device of each stage is open, so that
    the splits are those of ``ideal_dp`` (Tarnawski et al., NeurIPS 2020, restrict each device
    to be convex, which allows more). Seconds are rounded down to integers, 1e-7 of the
    start's value: bounds hold exactly, optima up to that for each operator and tensor.

    ``piecewise_latency`` is solved with one piece per accelerator (their latency program);
    the bound of that goes to ``stats["one_piece_bound_s"]``, as a placement with more pieces
    may be better. For ``latency`` it decides devices and order together wherever ``order_search``
    has exact times without the simulator, which it starts from; transfers take their time there
    but no channel, so the bound holds, and the answer is best where channels do not wait. For
    other objectives of the timeline there is no program: the split of least ``max_load`` is scored
    by them, ``stats["solved"]`` says so.

    ``lower_bound_s`` holds for every split with one phase; what is proved for contiguous ones only
    goes to ``stats["contiguous_bound_s"]``.

    Attributes:
        contiguous: only splits along the pipeline.
        start: planner of the first placement, which is improved on; None: ``macro_search``,
            for orders ``order_search``, or, if contiguous, ``ideal_dp``, for a tenth of the
            seconds, at most 5. Before it, where the objective has no program, ``macro_search``
            has half of them for that.
        seconds: budget. The problem is read and the start is made in any case; where too little
            is left for the program, the start is the answer (``stats["status"]``).
        threads: of the solver.
        seed: of the solver.
    """

    contiguous: bool = False
    start: str | Planner | None = None
    seconds: float = 60.0
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 0, "threads", "seed")

    def __call__(self, problem: Problem) -> Solution:
        """Raises: PlannerError, OR-Tools is not installed, or a latency that is contiguous."""
        try:
            from ortools.sat.python import cp_model
        except ImportError as error:
            raise PlannerError(
                "cp_sat needs OR-Tools: pip install 'device-placement-rl[cp]', or use mip"
            ) from error
        search = Search(problem, self.seconds)
        if not (self.contiguous or why_not(problem) or why_simulated(problem)):
            return _orders(self, search)
        split = exact.begin(search, self.start, self.contiguous, self.seconds)
        if problem.objective is Objective.PIECEWISE_LATENCY:
            try:
                return _latency(self, cp_model, search, exact.writing(search, _READING))
            except exact.OutOfTime:
                bound_s = lower_bound(problem)
                return search.solution(bound_s, status=exact.UNWRITTEN, branches=0)
        stages = exact.stages(problem, self.contiguous, search, split)
        unit_s = (
            stages.upper_s / _UNITS
            if stages.start is not None and stages.upper_s > 0
            else exact.largest_s(stages) / _UNITS
        )
        model = cp_model.CpModel()
        load = model.new_int_var(0, 2**40, "load")
        try:
            check = exact.writing(search, _READING)
            x, kind = _stages(model, load, problem, stages, unit_s, check)
            check()
        except exact.OutOfTime:
            return exact.finish(search, self.contiguous, 0.0, status=exact.UNWRITTEN, branches=0)
        model.minimize(load)
        if stages.start is not None:
            model.add(load <= _UNITS)
            _hint(model, x, stages.start)
            for stage, row in enumerate(kind):
                assert stages.start_kind is not None
                for k, chosen in enumerate(row):
                    model.add_hint(chosen, int(stages.start_kind[stage] == k))
        solver, status = _solve(self, cp_model, model, search)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            at = [next(c for c, v in row.items() if solver.value(v)) for row in x]
            chosen_kind = [next(k for k, v in enumerate(r) if solver.value(v)) for r in kind]
            search.consider(stages.choice(problem, np.array(at), chosen_kind), 1)
        bound_s = max(0.0, solver.best_objective_bound) * unit_s * (1 - 1e-12)
        return exact.finish(
            search,
            self.contiguous,
            bound_s,
            status=solver.status_name(status),
            branches=solver.num_branches,
        )


def _orders(planner: CpSat, search: Search) -> Solution:
    """Least latency over devices and orders: one window over everything (``search.windows``)."""
    problem = search.problem
    share = min(exact.MOST_START_S, exact.START_SHARE * planner.seconds) / planner.seconds
    search.run(planner.start or "order_search", share, share)
    assert search.best is not None
    place = search.best[problem.graph.group]
    tables, state = tables_of(problem), state_of(problem, 1)
    rng, grain = np.random.default_rng(planner.seed), grain_s(problem)
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
            check=exact.writing(search, _READING),
        )
    except exact.OutOfTime:
        return search.solution(bound_s, status=exact.UNWRITTEN)
    if answer.place is not None and answer.sequence is not None:
        start(tables, state, answer.place, answer.sequence, rng)
        search.num_evaluations += 1
        best_s = state.best_s
        search.consider_order(state.best_place, state.best_sequence, best_s)
    return search.solution(max(bound_s, answer.bound_s), solved="latency", closed=answer.closed)


def _solve(planner: CpSat, cp_model: Any, model: Any, search: Search) -> tuple[Any, Any]:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.05, planner.seconds - search.seconds)
    solver.parameters.num_workers = planner.threads
    solver.parameters.random_seed = planner.seed % 2**31  # an int32
    return solver, cpsat.solve(solver, model)


def _hint(model: Any, x: list[dict[int, Any]], start: Any) -> None:
    for g, row in enumerate(x):
        for c, variable in row.items():
            model.add_hint(variable, int(start[g] == c))


def _stages(
    model: Any,
    load: Any,
    problem: Problem,
    stages: exact.Stages,
    unit_s: float,
    check: Callable[[], None],
) -> tuple[list[dict[int, Any]], list[list[Any]]]:
    """Variables: is block ``i`` on stage ``c`` (``x[i][c]``), is stage ``c`` of kind ``k``."""
    blocks, num_stages = stages.costs, problem.num_devices
    rank = np.argsort(exact.by_weight(blocks))
    x: list[dict[int, Any]] = []
    for i in range(blocks.num_blocks):
        check()
        x.append(
            {
                c: model.new_bool_var("")
                for c in range(num_stages)
                if stages.may_run(i, int(rank[i]), c)
            }
        )
        model.add_exactly_one(x[i].values())
    kind: list[list[Any]] = []
    if stages.kind is None:
        kind = [[model.new_bool_var("") for _ in stages.kinds] for _ in range(num_stages)]
        for kinds in kind:
            model.add_exactly_one(kinds)
        for k, members in enumerate(stages.kinds):
            model.add(sum(kinds[k] for kinds in kind) == len(members))
        # up[i][c]: block i is on stage c or before.
        up = [[model.new_bool_var("") for _ in range(num_stages)] for _ in range(blocks.num_blocks)]
        for i, row in enumerate(up):
            check()
            model.add(row[-1] == 1)
            for c in range(num_stages):
                model.add(row[c] - (row[c - 1] if c else 0) == x[i][c])
        for first, then in stages.edges:
            check()
            for c in range(num_stages):
                model.add_implication(up[then][c], up[first][c])
    total_bytes = int(blocks.own_bytes.sum() + blocks.tied_bytes.sum())
    for c in range(num_stages):
        paid = []
        for t in stages.paid_on(c):
            check()
            here = x[blocks.src[t]].get(c, 0) if blocks.src[t] >= 0 else 0
            users = blocks.use_dst[blocks.use_ptr[t] : blocks.use_ptr[t + 1]]
            paid.append((t, _crosses(model, here, [x[u].get(c, 0) for u in users])))
        on = [row.get(c) for row in x]
        for k in range(len(stages.kinds)) if stages.kind is None else [int(stages.kind[c])]:
            d = stages.kinds[k][0]
            runs = np.isfinite(blocks.compute_s[:, d])
            used = [(i, v) for i, v in enumerate(on) if v is not None]
            total = sum(_units(blocks.compute_s[i, d], unit_s) * v for i, v in used if runs[i])
            total += sum(_units(blocks.io_s[t, d], unit_s) * v for t, v in paid)
            rows = [model.add(total <= load)]
            if total_bytes > problem.memory_bytes[d]:
                rows.append(model.add(_held(model, blocks, on) <= int(problem.memory_bytes[d])))
            rows += [model.add(v == 0) for i, v in used if not runs[i]]
            if stages.kind is None:
                for row in rows:
                    row.only_enforce_if(kind[c][k])
    return x, kind


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


def _latency(planner: CpSat, cp_model: Any, search: Search, check: Callable[[], None]) -> Solution:
    """Least piecewise latency with at most one piece per accelerator; CPUs are one pool."""
    problem = search.problem
    if planner.contiguous:
        raise PlannerError(
            "cp_sat: contiguous = True is about max_load; for piecewise_latency every "
            "accelerator has one piece anyway, leave it out"
        )
    assert search.best is not None
    fits = search.best_s < np.inf
    possible = problem.group_compute_s[np.isfinite(problem.group_compute_s)]
    scale_s = max(search.best_cost if fits else float(possible.max()), 1e-9)
    program = _Pieces(problem, cp_model.CpModel(), _UNITS if fits else 2**40, scale_s / _UNITS)
    x, latest = program.write(check)
    program.model.minimize(latest)
    _hint(program.model, x, search.best)
    solver, status = _solve(planner, cp_model, program.model, search)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        choice = [next(d for d, v in row.items() if solver.value(v)) for row in x]
        search.consider(np.array(choice, np.int32), 1)
    path_s = lower_bound(problem)
    bound_s = max(path_s, solver.best_objective_bound * program.unit_s)
    return search.solution(
        path_s,
        solved="piecewise_latency, one piece per accelerator",
        one_piece_bound_s=bound_s,
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
