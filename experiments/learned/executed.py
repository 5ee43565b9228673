"""What the learned planner and the best baselines answer, run for real on this machine."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from experiments import _study
from experiments._study import number, say
from experiments.budgets import BASELINES, Executed
from experiments.learned import problems as made
from experiments.learned.cells import geometric
from placement.compare import SINGLE, compare
from placement.measured_search import search_measured
from placement.planners import PlannerError, load
from placement.problem import Placement, Problem, Solution
from placement.simulator import score
from placement.trials import Trials

to_csv = _study.to_csv
Reference = Literal["measured", "predicted", "single"]
LEARNED, CHOSEN = "policy", "policy, measured"  # without and with runs of its own


@dataclass(frozen=True)
class Row:
    """One answer on one problem; seconds of the problem's objective, predicted and measured.

    ``rounds_s`` are those of each interleaved round, with spaces between; ``measured_s`` is their
    median.
    """

    problem: str
    objective: str
    operators: int
    devices: int
    planner: str
    seed: int | None
    predicted_s: float
    measured_s: float
    rounds_s: str

    @property
    def is_baseline(self) -> bool:
        return self.planner not in (LEARNED, CHOSEN)

    @property
    def each_s(self) -> list[float]:
        return [float(s) for s in self.rounds_s.split()]


@dataclass(frozen=True)
class Measured:
    """The learned planner, and a search of some runs from its answer and those of baselines."""

    baselines: tuple[str, ...]
    seconds: float
    measurements: int
    seed: int = 0

    def __call__(self, problem: Problem) -> Solution:
        from agents.planner import PolicyPlanner
        from placement.executor import Executor

        mine = PolicyPlanner(seconds=self.seconds, seed=self.seed)(problem)
        starts = np.stack([mine.placement, *(answer(name, problem) for name in self.baselines)])
        trials = Trials(problem, Executor(problem), measurements=self.measurements)
        return search_measured(trials, starts, seed=self.seed)


def problems(options: Namespace) -> made.Problems:
    """Captured models on the first two cores, period and latency."""
    budget: Executed = options.budget
    found = made.captured(
        [n for n in budget.workloads.split(",") if options.wants(f"captured/{n}")], budget.repeats
    )
    return found


@cache
def answer(baseline: str, problem: Problem) -> Placement:
    """int32 ``[N]`` what a baseline plans: once, as some take a minute."""
    return load(baseline)(problem).placement


def best_predicted(problem: Problem, count: int) -> list[str]:
    """The ``count`` baselines with the least predicted values, those with equal answers once."""
    values: dict[bytes, tuple[float, str]] = {}
    for name in BASELINES:
        try:
            placement = answer(name, problem)
        except PlannerError:
            continue
        values.setdefault(placement.tobytes(), (float(score(problem, placement[None])[0]), name))
    return [name for _, name in sorted(values.values())[:count]]


def run(options: Namespace, chosen: made.Problems) -> list[Row]:
    """The planner with every seed and the best baselines take turns, with the single devices."""
    from agents.planner import PolicyPlanner
    from placement.executor import Executor

    budget: Executed = options.budget
    rows: list[Row] = []
    for name, problem in chosen.items():
        say(name)
        best = tuple(best_predicted(problem, budget.baselines))
        out = options.work / name.replace("/", "_").replace(" ", "_")
        comparison = compare(
            {name: problem},
            {
                LEARNED: PolicyPlanner(seconds=budget.seconds),
                CHOSEN: Measured(best, budget.seconds, budget.measurements),
                **{n: load(n) for n in best},
            },
            range(budget.seeds),
            out_dir=out,
            executor=Executor,
            rounds=budget.rounds,
            progress=say,
        )
        what = "latency_s" if "latency" in problem.objective else "period_s"
        found = samples(out)
        for row in comparison.rows:
            measured_s = getattr(row, f"measured_{what}")
            if measured_s is not None:
                rows.append(
                    Row(
                        problem=name,
                        objective=problem.objective,
                        operators=problem.num_ops,
                        devices=problem.num_devices,
                        planner=row.planner,
                        seed=row.seed,
                        predicted_s=getattr(row, what),
                        measured_s=measured_s,
                        rounds_s=" ".join(f"{s:.9g}" for s in found[row.placement_id][what]),
                    )
                )
    return rows


def samples(out: Path) -> dict[str, dict[str, list[float]]]:
    """What ``compare`` measured into ``out``: by placement, seconds of every round by figure."""
    found: dict[str, dict[str, list[float]]] = {}
    for path in (out / "measured").glob("*.json"):
        found.update(json.loads(path.read_text(encoding="utf-8"))["samples"])
    return found


def predicted(rows: Sequence[Row], planner: str) -> dict[str, list[float]]:
    """A planner's seconds over the least of all baselines; one per seed, by problem."""
    found: dict[str, list[float]] = {}
    for name in dict.fromkeys(r.problem for r in rows):
        mine = [r for r in rows if r.problem == name]
        least = min(r.predicted_s for r in mine if r.is_baseline)
        found[name] = [r.predicted_s / least for r in mine if r.planner == planner]
    return found


def measured(rows: Sequence[Row], planner: str, against: Reference) -> dict[str, list[float]]:
    """A planner's seconds over those of the best baseline, or single device.

    One per seed, by problem: the median over the rounds. The best is chosen without the round in
    which it is compared: the least of several noisy medians is less than any of them takes. Or
    it is the baseline that looked best before anything was run (``predicted``).
    """
    found: dict[str, list[float]] = {}
    for name in dict.fromkeys(r.problem for r in rows):
        mine = [r for r in rows if r.problem == name]
        ours = np.array([r.each_s for r in mine if r.planner == planner])
        baselines = [r for r in mine if r.is_baseline]
        if against == "single":
            baselines = [r for r in baselines if r.planner.startswith(SINGLE)]
        elif against == "predicted":
            baselines = [min(baselines, key=lambda r: r.predicted_s)]
        others = np.array([r.each_s for r in baselines])
        ratios = []
        for k in range(ours.shape[1]):
            best = np.median(np.delete(others, k, axis=1), axis=1).argmin()
            ratios.append(ours[:, k] / others[best, k])
        found[name] = np.exp(np.median(np.log(ratios), axis=0)).tolist()
    return found


def report(rows: Sequence[Row]) -> str:
    """Both objectives, then problem by problem."""
    table = []
    for planner in (LEARNED, CHOSEN):
        for objective in ("period", "latency", ""):
            some = [r for r in rows if not objective or r.objective == objective]
            if some:
                table.append(
                    [
                        planner,
                        objective or "all",
                        str(len(predicted(some, planner))),
                        geometric(predicted(some, planner)).percent(),
                        geometric(measured(some, planner, "measured")).percent(),
                        geometric(measured(some, planner, "predicted")).percent(),
                        geometric(measured(some, planner, "single")).percent(),
                    ]
                )
    summary = _study.to_table(
        ["", "objective", "problems", "predicted, against the best baseline (95 %)",
         "measured, against the best measured one", "against the best predicted one",
         "against the best single device"],
        table,
    )  # fmt: skip
    lines = []
    for name in dict.fromkeys(r.problem for r in rows):
        mine = [r for r in rows if r.problem == name]
        best = min((r for r in mine if r.is_baseline), key=lambda r: r.measured_s)
        line = [name, str(best.operators), best.planner, number(best.measured_s, 2, 1e3)]
        for planner in (LEARNED, CHOSEN):
            ours = [r for r in mine if r.planner == planner]
            line += [
                " ".join(number(r.measured_s, 2, 1e3) for r in ours),
                geometric(measured(mine, planner, "measured")).percent(),
            ]
        lines.append(line)
    each = _study.to_table(
        ["problem", "operators", "best measured baseline", "its ms", "policy, ms by seed",
         "against it", "policy, measured, ms by seed", "against it"],
        lines,
    )  # fmt: skip
    return f"""# The learned planner's placements, executed

Every placement runs on two one-core devices in the pipelined runtime, in {len(rows[0].each_s)}
interleaved rounds. Negative is better. The baselines that run are those with the least predicted
values of {len(BASELINES)}, and every single device; the best of them is chosen by what was
measured, in all rounds but the one in which it is compared; of the rounds the median counts.
*policy* knows predictions only, as whoever takes the best predicted baseline; it answers with
that one unless something is predicted to be better by more than the predictions of this machine's
profile err (`Profile.error`).
*policy, measured* (as `placement plan ... --planner policy --measurements K`, with these
baselines as starts too) runs its own answer, theirs, and what a search of moves proposes, and
answers with what it then believes to be the fastest; those runs are others than the rounds of
this table. Milliseconds are medians.

{summary}
## Problems

{each}"""
