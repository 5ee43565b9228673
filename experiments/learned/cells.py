"""One planner, one seed, one problem: run under its budget in a process of its own, and kept."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray

from experiments import _study
from experiments._study import GIB, limited, say
from placement.compare import describe, problem_fingerprint
from placement.files import write_atomic
from placement.planners import PlannerError
from placement.planners._search import Search
from placement.problem import Placement, Planner, Problem, Solution
from placement.simulator import score, value_of

Floats = NDArray[np.float64]
SLACK = 1.02  # of a budget of seconds: the clock is looked at between slices of work
MEMORY_BYTES = 16 * GIB
MARGIN_S = 120.0  # beyond the budget before a run is ended: kernels and policies are loaded


@dataclass(frozen=True)
class Cell:
    """How one run ended; seconds are processor seconds, None where not known.

    ``group``: what the study files it under. ``value_s``: the best placement that was found
    within the budget, scored by the simulator. ``found_s``: when. ``used_s``,
    ``used_evaluations``: by the end. ``curve``: (seconds, evaluations, best value so far).
    """

    group: str
    problem: str
    objective: str
    operators: int
    devices: int
    planner: str
    seed: int | None
    budget_s: float | None
    budget_evaluations: int | None
    value_s: float | None
    found_s: float | None
    used_s: float
    used_evaluations: int | None
    status: str
    note: str
    curve: tuple[tuple[float, int, float], ...] = ()


class Cells:
    """The finished cells of a study, a JSON file each: any number of processes may add to them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self,
        group: str,
        name: str,
        problem: Problem,
        label: str,
        planner: Planner,
        seed: int | None = None,
        seconds: float | None = None,
        evaluations: int | None = None,
    ) -> Cell:
        """The cell, from its file if there is one for this planner, problem, seed and budget.

        ``seconds`` and ``evaluations`` are given to the planner where it has such a field, and
        hold for its answer in any case: what it found later does not count.
        """
        given = {"seed": seed, "seconds": seconds, "evaluations": evaluations}
        ready = with_options(planner, **given)
        what = [problem_fingerprint(problem), group, name, label, describe(ready), given]
        if getattr(ready, "policy", label) is None:  # released: may be another now
            what.append(policy_digests(released_folder()))
        key = digest(*what)
        path = self.folder / f"{_slug(name)}-{_slug(label)}-{key[:16]}.json"
        if path.is_file():
            saved = json.loads(path.read_text(encoding="utf-8"))
            return Cell(**saved | {"curve": tuple(tuple(p) for p in saved["curve"])})
        say(f"{group}: {name}: {label}" + ("" if seed is None else f", seed {seed}"))
        cell = Cell(
            group=group,
            problem=name,
            objective=problem.objective,
            operators=problem.num_ops,
            devices=problem.num_devices,
            planner=label,
            seed=seed,
            budget_s=seconds,
            budget_evaluations=evaluations,
            **_outcome(problem, ready, seconds, evaluations),
        )
        if cell.status != "failed":  # a mistake of ours: the next run tries again
            write_atomic(path, json.dumps(asdict(cell)))
        return cell


def _outcome(
    problem: Problem, planner: Planner, seconds: float | None, evaluations: int | None
) -> dict[str, Any]:
    score(problem, np.zeros(problem.num_ops, np.int32))  # what is derived from a problem, once
    limit_s = 10.0 * (seconds or 60.0) + MARGIN_S
    run = limited(lambda: _on_processor_time(planner, problem), limit_s, MEMORY_BYTES)
    if run.value is None:
        return {
            "value_s": None,
            "found_s": None,
            "used_s": run.seconds,
            "used_evaluations": None,
            "status": run.status,
            "note": run.note,
        }
    solution, used_s = run.value
    value_s = value_of(problem, solution)
    counted = solution.stats.get("evaluations")
    used_s = float(solution.stats.get("seconds", used_s))
    curve = solution.stats.get("curve") or [(used_s, counted or 1, value_s)]
    curve = [(float(s), int(e), max(float(v), value_s)) for s, e, v in curve if np.isfinite(v)]
    in_time = [
        point
        for point in curve
        if point[0] <= SLACK * (seconds or np.inf) and point[1] <= (evaluations or np.inf)
    ]
    best = min((point[2] for point in in_time), default=None)
    return {
        "value_s": best,
        "found_s": next((s for s, _, v in in_time if v == best), None),
        "used_s": used_s,
        "used_evaluations": counted,
        "status": "ok" if best is not None else "infeasible" if not curve else "over budget",
        "note": str(solution.stats.get("message") or solution.stats.get("infeasible") or ""),
        "curve": tuple(curve),
    }


def _on_processor_time(planner: Planner, problem: Problem) -> tuple[Solution, float]:
    """Runs in a process of its own, whose clock is that of its processor time.

    So a budget of seconds is the same work whatever else the machine does meanwhile.
    """
    clock, time.perf_counter = time.perf_counter, time.process_time
    began = time.process_time()
    try:
        solution = planner(problem)
        return solution, time.process_time() - began
    finally:
        time.perf_counter = clock


def with_options(planner: Planner, **options: Any) -> Planner:
    """The planner with those of the options that it has and that are given."""
    if not is_dataclass(planner) or isinstance(planner, type):
        return planner
    known = {f.name for f in fields(planner)}
    given = {k: v for k, v in options.items() if v is not None and k in known}
    return replace(planner, **given)  # type: ignore[type-var]


def digest(*what: Any) -> str:
    """SHA-256 (hex) of JSON values."""
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)[-60:]


# --- planners of the studies ---------------------------------------------------------------------


@dataclass(frozen=True)
class AllOf:
    """The best answer of several planners; one that cannot do a problem is left out.

    Attributes:
        planners: names.
        seconds, evaluations: of all together; of the seconds that are left each has an equal
            share.
    """

    planners: tuple[str, ...]
    seconds: float | None = None
    evaluations: int | None = None

    def __call__(self, problem: Problem) -> Solution:
        """Raises: PlannerError, none of them has an answer."""
        search = Search(problem, self.seconds, self.evaluations)
        notes = []
        for i, name in enumerate(self.planners):
            if search.left:
                try:
                    search.run(name, 1.0 / (len(self.planners) - i))
                except ValueError as error:
                    notes.append(f"{name}: {error}")
        if search.best is None:
            raise PlannerError("; ".join(notes))
        return search.solution()


@dataclass(frozen=True, eq=False)
class Given:
    """An answer that is known already: where a search starts at no cost.

    Attributes:
        placement: int32 ``[N]``.
    """

    placement: Placement

    def __call__(self, problem: Problem) -> Solution:
        """The placement and its value."""
        value_s = float(score(problem, self.placement)[0])
        return Solution(self.placement, value_s, None, {"evaluations": 1})


def policy_file(given: str | None, problem: Problem) -> str | None:
    """The policy that searches a problem; of a folder the file that is named as the released one.

    None is the released policy, which the planner itself finds.
    """
    from agents.planner import kind_of, released

    if given is None or not Path(given).is_dir():
        return given
    return str(Path(given) / released(kind_of(problem), problem.objective).name)


def released_folder() -> Path:
    """Where the policies are that ship with the package."""
    import agents

    return Path(agents.__file__).with_name("released")


@cache
def policy_digests(path: Path) -> dict[str, str]:
    """SHA-256 (hex) of a policy, or of every one in a folder, by the file's name."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def warm_up(objectives: Sequence[Any], names: Sequence[str]) -> None:
    """Compile or load all kernels, and touch torch, before processes are forked."""
    import torch

    from agents.guided import load_kernel
    from agents.trained import load_constructor

    torch.set_num_threads(1)
    _study.warm(names, objectives)
    load_kernel()
    load_constructor()


# --- tables --------------------------------------------------------------------------------------


def to_csv(cells: Sequence[Cell]) -> str:
    """One line per cell, without its curve."""
    text = _study.to_csv([replace(c, curve=()) for c in cells])
    return (
        "\n".join(line.removesuffix(",()") for line in text.splitlines()).replace(
            ",note,curve", ",note", 1
        )
        + "\n"
    )


def read_csv(path: Path) -> list[Cell]:
    """What ``to_csv`` wrote; no cells where there is no such file."""
    if not path.is_file():
        return []
    kinds = get_type_hints(Cell)
    cells = []
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            cells.append(Cell(**{k: _value(v, str(kinds[k])) for k, v in row.items()}))
    return cells


def _value(text: str, kind: str) -> Any:
    if "str" in kind:
        return text
    if text == "":
        return None
    return float(text) if "float" in kind else int(text)


def to_known(cells: Sequence[Cell], planner: str) -> dict[str, list[float]]:
    """``planner``'s values over the best of all cells, one per seed, by problem."""
    known = best_known(cells)
    return ratios(cells, planner, lambda name, _: known.get(name))


def ratios(
    cells: Sequence[Cell], planner: str, reference: Callable[[str, int | None], float | None]
) -> dict[str, list[float]]:
    """``planner``'s value over ``reference(problem, seed)``, one per seed, by problem.

    A run without an answer counts as 1 where the reference has none either, else as 10: it is
    not left out.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for cell in cells:
        if cell.planner == planner:
            other = reference(cell.problem, cell.seed)
            if cell.value_s is not None and other is not None:
                found[cell.problem].append(cell.value_s / other)
            elif other is not None:
                found[cell.problem].append(10.0)
            else:
                found[cell.problem].append(1.0)
    return dict(found)


def least(
    cells: Sequence[Cell], planners: Sequence[str]
) -> Callable[[str, int | None], float | None]:
    """(problem, seed) -> the least value of those of ``planners`` with that seed or without one."""
    table: dict[tuple[str, int | None], float] = {}
    for cell in cells:
        if cell.planner in planners and cell.value_s is not None:
            key = cell.problem, cell.seed
            table[key] = min(table.get(key, np.inf), cell.value_s)

    seeds = {seed for _, seed in table} - {None}

    def best(problem: str, seed: int | None) -> float | None:
        if seed is None and seeds:  # who does not draw meets all seeds of those who do
            each = [found for s in sorted(seeds) if (found := best(problem, s)) is not None]
            return float(np.exp(np.mean(np.log(each)))) if each else None
        found = [table[k] for k in {(problem, seed), (problem, None)} if k in table]
        return min(found, default=None)

    return best


def best_known(cells: Sequence[Cell]) -> dict[str, float]:
    """The best value of any planner with any seed, by problem."""
    found: dict[str, float] = {}
    for cell in cells:
        if cell.value_s is not None:
            found[cell.problem] = min(found.get(cell.problem, np.inf), cell.value_s)
    return found


@dataclass(frozen=True)
class Mean:
    """A geometric mean and its 95 % interval; ``count`` problems."""

    value: float
    low: float
    high: float
    count: int

    def percent(self, digits: int = 1) -> str:
        """``-3.3 % (-4.0 to -2.5)``: how far from 1."""
        value, low, high = (100 * (x - 1) for x in (self.value, self.low, self.high))
        return f"{value:+.{digits}f} % ({low:+.{digits}f} to {high:+.{digits}f})"

    def ratio(self, digits: int = 3) -> str:
        """``1.023 (1.010 to 1.041)``; a dash for no problem."""
        if not self.count:
            return "–"
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def geometric(by_problem: Mapping[str, Sequence[float]], resamples: int = 4000) -> Mean:
    """Over seeds, then over problems. The interval resamples problems, then seeds of each."""
    logs = [np.log(np.asarray(v, float)) for v in by_problem.values()]
    if not logs:
        return Mean(np.nan, np.nan, np.nan, 0)
    rng = np.random.default_rng(0)
    # Means of resampled seeds for every problem, then of resampled problems.
    means = np.stack([x[rng.integers(len(x), size=(resamples, len(x)))].mean(1) for x in logs], 1)
    chosen = rng.integers(len(logs), size=means.shape)
    drawn = np.take_along_axis(means, chosen, axis=1).mean(axis=1)
    low, high = np.exp(np.percentile(drawn, [2.5, 97.5]))
    return Mean(
        float(np.exp(np.mean([x.mean() for x in logs]))), float(low), float(high), len(logs)
    )


def share(flags: Sequence[bool]) -> tuple[float, float, float]:
    """Share of true ones with Wilson's 95 % interval."""
    n, z = len(flags), 1.959964
    if n == 0:
        return np.nan, np.nan, np.nan
    p = sum(flags) / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return p, max(0.0, float(middle - half)), min(1.0, float(middle + half))


def enforced(cells: Sequence[Cell]) -> str:
    """One sentence: how the budgets were kept."""
    over = [
        c
        for c in cells
        if (c.budget_s and c.used_s > SLACK * c.budget_s)
        or (c.budget_evaluations and (c.used_evaluations or 0) > c.budget_evaluations)
    ]
    worst = max((c.used_s / c.budget_s for c in cells if c.budget_s), default=0.0)
    text = f"{len(over)} of {len(cells)} runs went on past their budget"
    if worst:
        text += f" (the longest used {worst:.3f} of its seconds)"
    return text + "; what they found after it does not count."
