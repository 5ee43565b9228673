"""Every planner on every problem, equal budgets, predicted and measured: one table.

Nothing is excluded to look good: every single-device placement is a row of its own, a planner
that fails is a row with the reason, and gains are reported against the best single device.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.bounds import lower_bound
from placement.objective import Objective
from placement.planners import solve
from placement.problem import Placement, Planner, Problem, Solution
from placement.report.row import SINGLE, Row
from placement.report.saved import as_json, digest, placement_id, solution_of
from placement.report.table import CompareError, Comparison, pareto_front
from placement.runs.trials import LATENCY_RUNS, Runtime
from placement.search.planner import NO_LIMIT, Budget, options_of, prepared
from placement.simulator import as_simulated, evaluate, score, value_of
from placement.tools.clock import clock
from placement.tools.files import parse_json, read_text, write_atomic
from placement.tools.ownership import PACKAGES, is_yours
from placement.tools.parallel import parallel_map

Floats = NDArray[np.float64]
Progress = Callable[[str], None]  # told what is being done


def compare(
    problems: Mapping[str, Problem],
    planners: Mapping[str, Planner],
    seeds: Sequence[int] = (0,),
    *,
    out_dir: str | Path,
    executor: Callable[[Problem], Runtime | None] | None = None,
    rounds: int = 5,
    budget: Budget = NO_LIMIT,
    progress: Progress | None = None,
    parallel: str = "serial",
) -> Comparison:
    """Run every planner with every seed on every problem, and measure what they answer.

    An interrupted comparison continues where it stopped when it is started again with the same
    ``out_dir``: what is finished lies in ``out_dir/cells`` and ``out_dir/measured`` under a
    digest of the problem, the planner with its parameters and your code of it, and the seed.
    ``compare.csv`` and ``compare.md`` are written after every workload. ``out_dir/problems`` and
    the timelines of the last round in ``out_dir/measured`` are for ``placement.report.html``.

    Args:
        executor: makes the runtime of a problem (``placement.executor.Executor``), or None for
            one that cannot be run; None: only predict. All placements of a workload take turns,
            ``rounds`` times; equal ones share one measurement.
        budget: of every planner that has such fields; what is not limited is left to its own.
        parallel: where planners run: ``serial`` or ``processes`` (see
            ``placement.tools.parallel``). The answers are the same, unless a budget of seconds ends
            a search; measurements never run side by side.

    Raises:
        CompareError: no problems, no seeds, or a planner named like a single device.
        FileError: ``out_dir`` cannot be written.
    """
    if not problems or not seeds or rounds < 1:
        raise CompareError("compare needs at least one problem, one seed and one round")
    wrong = [name for name in planners if name.startswith(SINGLE)]
    if wrong:
        raise CompareError(f"planner {wrong[0]!r}: names with {SINGLE!r} are taken, rename it")
    folder, say = Path(out_dir), progress or (lambda _: None)
    comparison = Comparison((), {})
    for workload, problem in problems.items():
        cells = _plan_all(workload, problem, planners, seeds, budget, folder, say, parallel)
        placements = {c.placement_id: c.solution.placement for c in cells if c.solution}
        samples: dict[str, Any] = {}
        if executor is not None:
            samples = _measure(workload, problem, placements, executor, rounds, folder, say)
        rows = (*comparison.rows, *_rows(workload, problem, cells, samples))
        answers = {(workload, c.planner, c.seed): c.solution for c in cells if c.solution}
        comparison = Comparison(rows, {**comparison.solutions, **answers})
        comparison.save(folder)
    return comparison


@dataclass(frozen=True, eq=False)
class _Cell:
    """What one planner answered."""

    planner: str
    seed: int | None
    solution: Solution | None
    plan_s: float
    note: str = ""

    @property
    def placement_id(self) -> str:
        assert self.solution is not None
        return placement_id(self.solution.placement)


def _plan_all(
    workload: str,
    problem: Problem,
    planners: Mapping[str, Planner],
    seeds: Sequence[int],
    budget: Budget,
    folder: Path,
    say: Progress,
    parallel: str,
) -> list[_Cell]:
    from placement import importers

    cells = _single_devices(problem)
    fingerprint = problem_fingerprint(problem)
    saved_problem = folder / "problems" / f"{fingerprint[:12]}.json"
    if not saved_problem.is_file():
        importers.save(problem, saved_problem)
    results: list[_Cell | None] = []
    todo: list[tuple[int, Path, str, _Task]] = []
    for name, planner in planners.items():
        for seed in seeds if "seed" in options_of(planner) else (None,):
            ready = prepared(planner, seed, budget)
            key = digest(fingerprint, workload, name, describe(ready), seed)
            path = folder / "cells" / f"{_slug(workload)}-{_slug(name)}-{key[:12]}.json"
            results.append(_saved_cell(_read(path, key), name, seed, problem))
            if results[-1] is None:
                todo.append((len(results) - 1, path, key, (name, seed, ready, problem)))

    def keep(number: int, cell: _Cell) -> None:
        at, path, key, (_, _, ready, _) = todo[number]
        head = {"key": key, "workload": workload, "problem": fingerprint}
        head |= {"parameters": describe(ready)}
        write_atomic(path, as_json({**head, **asdict(cell)}))
        results[at] = cell

    def announced() -> Iterator[_Task]:
        for *_, task in todo:
            name, seed, ready, _ = task
            say(f"{workload}: {name}" + ("" if seed is None else f", seed {seed}"))
            # Workers take no program: it cannot be sent, and planners decide on data.
            bare = replace(problem, graph=problem.graph.without_program())
            yield task if parallel == "serial" else (name, seed, ready, bare)

    parallel_map(_plan, announced(), parallel, done=keep)
    return cells + [cell for cell in results if cell is not None]


def _saved_cell(
    saved: dict[str, Any] | None, name: str, seed: int | None, problem: Problem
) -> _Cell | None:
    """What ``_read`` found as a cell; None if there is nothing, or it is damaged."""
    if saved is None:
        return None
    try:
        solution = None if saved["solution"] is None else solution_of(saved["solution"])
        if solution is not None:
            problem.check_placement(solution.placement)
        return _Cell(name, seed, solution, float(saved["plan_s"]), str(saved["note"]))
    except (ValueError, LookupError, TypeError):
        return None


_Task = tuple[str, int | None, Planner, Problem]


def _plan(task: _Task) -> _Cell:
    name, seed, planner, problem = task
    lower_bound(problem)  # no planner is to pay for it: it is kept, and shown beside all answers
    began = clock()
    try:
        solution = solve(planner, problem)
        took_s = clock() - began
        # What is reported is what the simulator says of a placement that holds what it must.
        solution = replace(solution, placement=problem.check_placement(solution.placement))
        solution = as_simulated(problem, solution)
    except ValueError as error:  # infeasible, or a planner that cannot do this objective
        return _Cell(name, seed, None, clock() - began, str(error))
    return _Cell(name, seed, solution, took_s)


def _single_devices(problem: Problem) -> list[_Cell]:
    cells = []
    for d, device in enumerate(problem.cluster.device_names):
        placement = np.full(problem.num_ops, d, np.int32)
        stuck = np.flatnonzero(~problem.supported[:, d])
        if len(stuck):
            note = f"operator {problem.graph.op_name[stuck[0]]!r} cannot run on it"
            cells.append(_Cell(SINGLE + device, None, None, 0.0, note))
        else:
            value = float(score(problem, placement)[0])
            cells.append(_Cell(SINGLE + device, None, Solution(placement, value), 0.0))
    return cells


def _measure(
    workload: str,
    problem: Problem,
    placements: Mapping[str, Placement],
    executor: Callable[[Problem], Runtime | None],
    rounds: int,
    folder: Path,
    say: Progress,
) -> dict[str, Any]:
    """Samples of latency and period of every feasible placement, by placement id.

    The key holds the whole set of placements: ratios compare only what took turns. What a GPU has
    no memory for is worth inf, and does not run again.
    """
    todo = {k: p for k, p in placements.items() if evaluate(problem, p).feasible[0]}
    key = digest(problem_fingerprint(problem), sorted(todo))
    path = folder / "measured" / f"{_slug(workload)}-{key[:12]}.json"
    saved = _read(path, key)
    samples = _saved_samples(saved, todo) or {k: {"latency_s": [], "period_s": []} for k in todo}
    runtime: Runtime | None = None
    for r in range(rounds):
        for number, (name, placement) in enumerate(todo.items(), 1):
            if len(samples[name]["latency_s"]) > r or np.inf in samples[name]["latency_s"]:
                continue
            say(f"{workload}: round {r + 1} of {rounds}, placement {number} of {len(todo)}")
            runtime = runtime or executor(problem)
            if runtime is None:
                return {}
            took_s = np.inf, np.inf
            try:
                alone = runtime.run(placement, num_microbatches=LATENCY_RUNS, max_in_flight=1)
                pipelined = runtime.run(placement, num_microbatches=problem.num_microbatches)
                took_s = float(np.median(alone.span_s)), pipelined.period_s
                pipelined.save(path.with_name(f"{path.stem}-{name}.npz"))
            except RuntimeError as error:
                from placement.executor.alone import is_short

                if not is_short(error):
                    raise
            for what, seconds in zip(_SAMPLED, took_s, strict=True):
                samples[name][what].append(seconds)
            write_atomic(path, as_json({"key": key, "workload": workload, "samples": samples}))
    return samples


def _saved_samples(
    saved: dict[str, Any] | None, ids: Iterable[str]
) -> dict[str, dict[str, list[float]]] | None:
    """What ``_read`` found as samples of these placements; None if it is not that, or nothing."""
    try:
        return {
            k: {what: [float(x) for x in saved["samples"][k][what]] for what in _SAMPLED}  # type: ignore[index]
            for k in ids
        }
    except (ValueError, LookupError, TypeError):
        return None


_SAMPLED = ("latency_s", "period_s")
_SHORT = "was short of memory when it ran"


def _rows(
    workload: str, problem: Problem, cells: Sequence[_Cell], samples: Mapping[str, Any]
) -> list[Row]:
    bounds = [lower_bound(problem)]
    if problem.max_phases == 1:  # planners prove theirs for placements with one phase
        bounds += [c.solution.lower_bound_s or 0.0 for c in cells if c.solution is not None]
    rows = [_row(workload, problem, cell, samples, max(bounds)) for cell in cells]
    # Speed-ups are ratios of times that can be measured, also for the analytic objectives.
    what = "latency_s" if "latency" in problem.objective else "period_s"

    def best(column: str) -> float | None:
        singles = [getattr(r, column) for r in rows if r.planner.startswith(SINGLE) and r.feasible]
        return min((x for x in singles if x is not None), default=None)

    predicted, measured = best(what), best(f"measured_{what}")
    on_front = pareto_front(_values(rows))
    return [
        replace(
            row,
            pareto=bool(front),
            speedup=_ratio(predicted, getattr(row, what) if row.feasible else None),
            measured_speedup=_ratio(measured, getattr(row, f"measured_{what}")),
        )
        for row, front in zip(rows, on_front, strict=True)
    ]


def _values(rows: Sequence[Row]) -> Floats:
    """float64 ``[K, 3]`` latency, period and energy; inf where infeasible, 0 where not known."""
    figures = [(r.latency_s, r.period_s, 0.0 if r.energy_j is None else r.energy_j) for r in rows]
    feasible = np.array([r.feasible for r in rows])
    return np.where(feasible[:, None], np.array(figures, float), np.inf)


def _row(
    workload: str, problem: Problem, cell: _Cell, samples: Mapping[str, Any], bound_s: float
) -> Row:
    row = Row(
        workload=workload,
        planner=cell.planner,
        seed=cell.seed,
        objective=problem.objective,
        num_ops=problem.num_ops,
        num_devices=problem.num_devices,
        placement_id=None,
        feasible=False,
        value_s=np.inf,
        latency_s=np.inf,
        period_s=np.inf,
        bound_s=bound_s,
        plan_s=cell.plan_s,
        note=cell.note,
        calibration_error=problem.profile.error or None,
    )
    if cell.solution is None:
        return row
    values = evaluate(problem, cell.solution.placement[None])
    value_s, feasible = value_of(problem, cell.solution), bool(values.feasible[0])
    ordered = cell.solution.schedule is not None and problem.objective is Objective.LATENCY
    feasible = feasible and (np.isfinite(value_s) or not ordered)  # memory, in its own order
    row = replace(
        row,
        placement_id=cell.placement_id,
        evaluations=cell.solution.stats.get("evaluations"),
        note=cell.note or _said(cell.solution, feasible, value_s),
    )
    if not feasible:  # the seconds of what cannot run are no prediction
        return row
    row = replace(
        row,
        feasible=True,
        overhead_s=problem.overhead_s(cell.solution.placement),
        value_s=value_s,
        latency_s=value_s if ordered else float(values.latency_s[0]),
        period_s=float(values.period_s[0]),
        energy_j=None if values.energy_j is None else float(values.energy_j[0]),
        energy_source=problem.cluster.power_source,
        gap=value_s / bound_s - 1 if bound_s > 0 and np.isfinite(value_s) else None,
    )
    sample = samples.get(cell.placement_id)
    if sample is None:
        return row
    if np.inf in sample["latency_s"]:
        return replace(row, note="; ".join([row.note] * bool(row.note) + [_SHORT]))
    latency_s, latency_iqr_s = _median_iqr(sample["latency_s"])
    period_s, period_iqr_s = _median_iqr(sample["period_s"])
    return replace(
        row,
        measured_latency_s=latency_s,
        measured_latency_iqr_s=latency_iqr_s,
        measured_period_s=period_s,
        measured_period_iqr_s=period_iqr_s,
        num_rounds=len(sample["latency_s"]),
        latency_error=row.latency_s / latency_s - 1,
        period_error=row.period_s / period_s - 1,
    )


def _said(solution: Solution, feasible: bool, value_s: float) -> str:
    """What a planner says of its answer: that it fell back, or why it does not fit."""
    said = [solution.stats.get("message", "")]
    if not feasible:
        said.append(solution.stats.get("infeasible") or "does not fit in memory")
    elif not np.isfinite(value_s):  # no timeline: see placement.simulator.analytic
        said.append("cannot run: its pieces wait for each other, or do not fit in memory")
    return "; ".join(x for x in said if x)


def problem_fingerprint(problem: Problem) -> str:
    """SHA-256 (hex) of everything that a planner's answer or a measurement depends on."""
    costs = {f.name: getattr(problem.profile, f.name) for f in fields(problem.profile)}
    del costs["provenance"], costs["spread_s"]
    values = {f.name: getattr(problem, f.name) for f in fields(problem)}
    del values["graph"], values["cluster"], values["profile"]
    parts = [part for item in (*costs.items(), *values.items()) for part in item]
    return digest(problem.graph.fingerprint, problem.cluster.fingerprint, *parts)


def describe(planner: Any) -> Any:
    """A planner as JSON: its class and all its parameters, planners inside it included.

    Weights of a network, the content of a file that a parameter names, and that of the file which
    defines a class or function of the user's (``package.module:name`` too) count by digest: a
    policy trained further is another planner, and so is one whose code was edited.
    """
    if is_dataclass(planner) and not isinstance(planner, type):
        inside = {f.name: describe(getattr(planner, f.name)) for f in fields(planner) if f.init}
        kind = type(planner)
        return {"class": f"{kind.__module__}.{kind.__qualname__}", **_own_code(kind), **inside}
    if isinstance(planner, list | tuple):
        return [describe(x) for x in planner]
    if isinstance(planner, Mapping):
        target = str(planner.get("_target_", ""))
        return {str(k): describe(v) for k, v in planner.items()} | _own_code(
            target.rpartition(".")[0]
        )
    if isinstance(planner, np.ndarray):
        return digest(planner)
    if hasattr(planner, "state_dict"):  # a torch module; torch is not imported here
        weights = {k: v.detach().cpu().numpy() for k, v in planner.state_dict().items()}
        return {"network": str(planner), "weights": describe(weights)}
    if isinstance(planner, str | Path) and Path(planner).is_file():
        return {"file": str(planner), "sha256": file_digest(planner)}
    if planner is None or isinstance(planner, bool | int | float):
        return planner
    name, code = str(planner), {}
    if isinstance(planner, str) and re.fullmatch(r"[\w.]+:\w+", planner):
        code = _own_code(planner.partition(":")[0])
    elif hasattr(planner, "__qualname__"):
        name, code = f"{planner.__module__}.{planner.__qualname__}", _own_code(planner)
    return {"name": name, **code} if code else name


def _own_code(target: Any) -> dict[str, str]:
    """``code``: SHA-256 (hex) of the file that defines a class or function, or of that module.

    Nothing of what is ours, or of a library. What a notebook defines has no file: there its own
    source counts.
    """
    module = target if isinstance(target, str) else str(target.__module__)
    if not module or module.partition(".")[0] in PACKAGES:
        return {}
    try:
        loaded = sys.modules.get(module)
        file = (
            getattr(loaded, "__file__", "") if loaded else getattr(find_spec(module), "origin", "")
        )
        if file:
            return {"code": file_digest(file)} if is_yours(file) else {}
        return {"code": digest(getsource(target.__call__ if isinstance(target, type) else target))}
    except (ImportError, OSError, TypeError, ValueError):
        return {}


def file_digest(path: str | Path) -> str:
    """SHA-256 (hex) of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _read(path: Path, key: str) -> dict[str, Any] | None:
    """What was saved under ``key``; None if nothing was, or if the file is damaged."""
    try:
        saved = parse_json(read_text(path), infinite=True)
    except (OSError, ValueError):
        return None
    return saved if isinstance(saved, dict) and saved.get("key") == key else None


def _slug(name: str) -> str:
    """A name as part of a file name; the digest beside it keeps names apart."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip(".-")[:40]


def _median_iqr(samples: Iterable[float]) -> tuple[float, float]:
    low, middle, high = np.percentile(np.fromiter(samples, float), [25, 50, 75])
    return float(middle), float(high - low)


def _ratio(base: float | None, value: float | None) -> float | None:
    return None if base is None or not value else base / value
