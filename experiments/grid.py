"""One grid for all studies of planners: deciders on problems, with seeds, at equal budgets.

Every run has a process of its own on one core, whose clock is its processor time, and its cell is
kept: ``compare`` makes only those that are missing. A planner that fails is a cell with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs import GIB, limited
from experiments.study import Finished, Option, StudyError, say
from experiments.tables import finite, geometric_mean, groups
from placement.bounds import lower_bound
from placement.plan import proved_bound_s
from placement.planners import solve
from placement.problem import Planner, Problem, Solution
from placement.runs.compare import describe, file_digest, problem_fingerprint
from placement.search.planner import Budget, options_of, prepared
from placement.simulator import score, value_of

SLACK = 1.02  # of a budget of seconds: the clock is looked at between slices of work
MEMORY_BYTES = 16 * GIB
MARGIN_S = 120.0  # beyond ten times the budget, as kernels and policies are loaded
NO_ANSWER = 10.0  # times the reference: what a run without an answer counts as
PROCESSES = {"processes": Option(1, "so many, each on a core and with every n-th problem")}


@dataclass(frozen=True)
class Cell:
    """How one run ended; seconds are processor seconds, None where not known.

    ``group``: what the study files it under. ``value_s``: the best placement that was found
    within the budget, scored by the simulator. ``found_s``: when. ``used_s``,
    ``used_evaluations``: by the end. ``status``: ``ok``, ``infeasible``, ``over budget``, or as a
    ``Run`` ended. ``bound_s``: proved for every placement, ``restricted_bound_s``: for one piece
    per accelerator only. ``curve``: (seconds, evaluations, best value so far).
    """

    group: str
    problem: str
    objective: str
    operators: int
    devices: int
    planner: str
    seed: int | None
    budget_s: float | None = None
    budget_evaluations: int | None = None
    value_s: float | None = None
    found_s: float | None = None
    used_s: float = 0.0
    used_evaluations: int | None = None
    status: str = "ok"
    note: str = ""
    bound_s: float | None = None
    restricted_bound_s: float | None = None
    curve: tuple[tuple[float, int, float], ...] = field(default=(), metadata={"csv": False})


@dataclass(frozen=True)
class Task:
    """What is to be run on a problem.

    ``seed``, ``seconds`` and ``evaluations`` go to the planner where it has such a field; if they
    are ``enforced`` they hold for its answer in any case: what it found later does not count.
    ``bounded``: what is proved of the problem is part of the cell.
    """

    group: str
    label: str
    planner: Planner
    seed: int | None = None
    seconds: float | None = None
    evaluations: int | None = None
    enforced: bool = True
    bounded: bool = False

    def run(self, finished: Finished, name: str, problem: Problem) -> Cell:
        """The cell, from its file if there is one for this planner, problem, seed and budget."""
        limits = {"seed": self.seed, "seconds": self.seconds, "evaluations": self.evaluations}
        ready = prepared(self.planner, self.seed, Budget(self.seconds, self.evaluations))
        what = [problem_fingerprint(problem), self.group, name, self.label, describe(ready), limits]
        if getattr(ready, "policy", self.label) is None:  # released: may be another now
            what.append(policy_digests(released_folder()))
        make = partial(self._cell, name, problem, ready)
        # A mistake of ours is not kept: the next run tries again.
        file, keep = f"{name}-{self.label}", lambda cell: cell.status != "failed"
        return finished.row(_from_json, what, make, file, keep)

    def _cell(self, name: str, problem: Problem, planner: Planner) -> Cell:
        drawn = "" if self.seed is None else f", seed {self.seed}"
        say(f"{self.group or 'run'}: {name}: {self.label}{drawn}")
        of = problem.objective, problem.num_ops, problem.num_devices
        asked = self.label, self.seed, self.seconds, self.evaluations
        return Cell(self.group, name, *of, *asked, **self._outcome(problem, planner))

    def _outcome(self, problem: Problem, planner: Planner) -> dict[str, Any]:
        score(problem, np.zeros(problem.num_ops, np.int32))  # what is derived from it, once
        bound_s = lower_bound(problem) if self.bounded else None  # no planner is to pay for it
        limit_s = 10.0 * (self.seconds or 60.0) + MARGIN_S
        run = limited(lambda: solve(planner, problem), limit_s, MEMORY_BYTES, processor_time=True)
        outcome: dict[str, Any] = {"used_s": run.seconds, "bound_s": bound_s}
        if run.value is None:
            return outcome | {"status": run.status, "note": run.note}
        solution: Solution = run.value
        stats = solution.stats
        try:
            problem.check_placement(solution.placement)
        except ValueError as error:
            return outcome | {"status": "failed", "note": str(error)}
        value_s = value_of(problem, solution)
        counted = stats.get("evaluations")
        used_s = float(stats.get("seconds", run.seconds))
        curve = stats.get("curve") or [(used_s, counted or 1, value_s)]
        curve = [(float(s), int(e), max(float(v), value_s)) for s, e, v in curve]
        curve = [point for point in curve if np.isfinite(point[2])]
        budgets = (self.seconds, self.evaluations) if self.enforced else (None, None)
        in_time = [
            point
            for point in curve
            if point[0] <= SLACK * (budgets[0] or np.inf) and point[1] <= (budgets[1] or np.inf)
        ]
        best = min((point[2] for point in in_time), default=None)
        if self.bounded:
            outcome["bound_s"] = proved_bound_s(problem, solution)
            outcome["restricted_bound_s"] = stats.get("one_piece_bound_s")
        return outcome | {
            "value_s": best if self.enforced else finite(value_s),
            "found_s": next((s for s, _, v in in_time if v == best), None),
            "used_s": used_s,
            "used_evaluations": counted,
            "status": "ok" if best is not None else "infeasible" if not curve else "over budget",
            "note": _said(problem, stats),
            "curve": tuple(curve),
        }


def _said(problem: Problem, stats: Mapping[str, Any]) -> str:
    """What a planner says of its answer: that it fell back, why it does not fit, its stages."""
    solved = str(stats.get("solved", problem.objective))
    texts = [str(stats.get("message") or stats.get("infeasible") or "")]
    texts += [", ".join(f"{x['num_ops']} on {len(x['devices'])}" for x in stats.get("stages", ()))]
    texts += [f"solved for {solved}"] * (not solved.startswith(problem.objective))
    return "; ".join(x for x in texts if x)


def _from_json(curve: Iterable[Sequence[Any]], **saved: Any) -> Cell:
    return Cell(**saved, curve=tuple((s, e, v) for s, e, v in curve))


def every(planners: Mapping[str, Planner], seeds: Sequence[int], **limits: Any) -> list[Task]:
    """A task for each planner, and for each of the seeds where it searches; the same ``limits``."""
    return [
        Task(label=label, planner=planner, seed=seed, **{"group": ""} | limits)
        for label, planner in planners.items()
        for seed in (seeds if {"seed", "evaluations"} <= options_of(planner) else (None,))
    ]


Tasks = Callable[[str, Problem], Iterable[Task]]  # of a problem and its name


def compare(
    problems: Mapping[str, Problem], tasks: Tasks, finished: Finished, processes: int = 1
) -> Iterator[Cell]:
    """The cells of all problems; those that are finished are not run again."""
    if processes > 1:
        large_first = sorted(problems, key=lambda name: -problems[name].num_ops)
        parts = [{n: problems[n] for n in large_first[k::processes]} for k in range(processes)]
        context = get_context("fork")
        workers = [
            context.Process(target=_part, args=(number, part, tasks, finished))
            for number, part in enumerate(parts)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise StudyError("a process ended early, see above; the same command continues")
    for name, problem in problems.items():
        for task in tasks(name, problem):
            yield task.run(finished, name, problem)


def _part(number: int, problems: Mapping[str, Problem], tasks: Tasks, finished: Finished) -> None:
    """One of several processes, on a core of its own."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    for _ in compare(problems, tasks, finished):
        pass


# --- policies ------------------------------------------------------------------------------------


def released_folder() -> Path:
    """Where the policies are that ship with the package."""
    import agents

    return Path(agents.__file__).with_name("released")


digest_of = cache(file_digest)  # of a policy


def policy_digests(path: Path) -> dict[str, str]:
    """``digest_of`` a policy, or of every one in a folder, by the file's name."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {f.name: digest_of(f) for f in files}


# --- statistics ----------------------------------------------------------------------------------

Reference = Callable[[str, int | None], float | None]  # of a problem and a seed


def to_known(cells: Sequence[Cell], planner: str) -> dict[str, list[float]]:
    """``planner``'s values over the best of all cells, one per seed, by problem."""
    best = best_known(cells)
    return ratios(cells, planner, lambda name, _: best.get(name))


def gain(cells: Sequence[Cell], planner: str, others: Sequence[str]) -> dict[str, list[float]]:
    """The planner's values over the least of the others with the same seed, by problem."""
    return ratios(cells, planner, least(cells, others))


def ratios(cells: Sequence[Cell], planner: str, reference: Reference) -> dict[str, list[float]]:
    """``planner``'s value over ``reference(problem, seed)``, one per seed, by problem.

    A run without an answer counts as 1 where the reference has none either, else as 10: it is
    not left out.
    """

    def ratio(cell: Cell) -> float:
        other = reference(cell.problem, cell.seed)
        if other is None:
            return 1.0
        return NO_ANSWER if cell.value_s is None else cell.value_s / other

    mine = groups((c for c in cells if c.planner == planner), "problem")
    return {name: [ratio(cell) for cell in runs] for name, runs in mine.items()}


def least(cells: Sequence[Cell], planners: Sequence[str]) -> Reference:
    """(problem, seed) -> the least value of those of ``planners`` with that seed or without one."""
    able = [c for c in cells if c.planner in planners and c.value_s is not None]
    seeds = {c.seed for c in able} - {None}
    if len(seeds) == 1:  # it stands for those of all who are compared with it
        able, seeds = [replace(c, seed=None) for c in able], set()
    values = {
        key: min(c.value_s for c in mine if c.value_s is not None)
        for key, mine in groups(able, "problem", "seed").items()
    }

    def best(problem: str, seed: int | None) -> float | None:
        if seed is None and seeds:  # who does not draw meets all seeds of those who do
            each = [b for s in sorted(seeds) if (b := best(problem, s)) is not None]
            return geometric_mean(each) if each else None
        keys = {(problem, seed), (problem, None)}
        return min((values[k] for k in keys if k in values), default=None)

    return best


def best_cells(cells: Iterable[Cell]) -> dict[str, Cell]:
    """The first of the least value of each problem, of any planner with any seed."""
    able = groups((c for c in cells if c.value_s is not None), "problem")
    return {name: min(mine, key=lambda c: c.value_s or 0.0) for name, mine in able.items()}


def best_known(cells: Iterable[Cell]) -> dict[str, float]:
    """Its value, by problem."""
    return {name: c.value_s for name, c in best_cells(cells).items() if c.value_s is not None}


def bounded_again(cells: Sequence[Cell], problems: Mapping[str, Problem]) -> list[Cell]:
    """The cells with the bounds of today, where these are higher than what was proved then."""
    now_s = {name: lower_bound(problem) for name, problem in problems.items()}

    def higher(then_s: float | None, now_s: float) -> float:  # by more than rounding
        return now_s if then_s is None or now_s > then_s * (1 + 1e-9) else then_s

    # What holds for every placement holds for those of one piece per accelerator.
    return [
        replace(
            c,
            bound_s=higher(c.bound_s, now_s[c.problem]),
            restricted_bound_s=c.restricted_bound_s
            and higher(c.restricted_bound_s, now_s[c.problem]),
        )
        for c in cells
    ]


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
