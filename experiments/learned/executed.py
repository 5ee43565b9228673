"""What the learned planner and the best baselines answer, run for real on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.budgets import BASELINES, EXECUTED
from experiments.learned import problems as families
from experiments.learned.study import learned_study, wants
from experiments.study import Options, say, slug
from experiments.tables import Column, geometric, groups, number, table
from placement.planners import PlannerError, load
from placement.problem import Placement, Planner, Problem, Solution
from placement.runs.compare import compare
from placement.runs.measured_search import search_measured
from placement.runs.row import SINGLE
from placement.runs.trials import Trials
from placement.simulator import score

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
    """The planner ``policy``, and a search of some runs from its answer and those of baselines."""

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


def problems(options: Options) -> families.Problems:
    names = [n for n in options.workloads.split(",") if wants(options, f"captured/{n}")]
    return families.captured(names, options.repeats)


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


def rows(options: Options, chosen: families.Problems) -> Iterator[Row]:
    """The planner with every seed and the best baselines take turns, with the single devices."""
    from agents.planner import PolicyPlanner
    from placement.executor import Executor

    for name, problem in chosen.items():
        say(name)
        best = tuple(best_predicted(problem, options.baselines))
        field: dict[str, Planner] = {LEARNED: PolicyPlanner(seconds=options.seconds)}
        field[CHOSEN] = Measured(best, options.seconds, options.measurements)
        out = options.work / slug(name)
        comparison = compare(
            {name: problem},
            field | {n: load(n) for n in best},
            range(options.seeds),
            out_dir=out,
            executor=Executor,
            rounds=options.rounds,
            progress=say,
        )
        what = "latency_s" if "latency" in problem.objective else "period_s"
        rounds = samples(out)
        for row in comparison.rows:
            measured_s = getattr(row, f"measured_{what}")
            if measured_s is not None:
                about = name, problem.objective, problem.num_ops, problem.num_devices
                rounds_s = " ".join(f"{s:.9g}" for s in rounds[row.placement_id][what])
                seconds = getattr(row, what), measured_s, rounds_s
                yield Row(*about, row.planner, row.seed, *seconds)


def samples(out: Path) -> dict[str, dict[str, list[float]]]:
    """What ``compare`` measured into ``out``: by placement, seconds of every round by figure."""
    rounds: dict[str, dict[str, list[float]]] = {}
    for path in (out / "measured").glob("*.json"):
        rounds.update(json.loads(path.read_text(encoding="utf-8"))["samples"])
    return rounds


def predicted(rows: Sequence[Row], planner: str) -> dict[str, list[float]]:
    """A planner's seconds over the least of all baselines; one per seed, by problem."""
    ratios = {}
    for name, mine in groups(rows, "problem").items():
        least = min(r.predicted_s for r in mine if r.is_baseline)
        ratios[name] = [r.predicted_s / least for r in mine if r.planner == planner]
    return ratios


def measured(rows: Sequence[Row], planner: str, against: Reference) -> dict[str, list[float]]:
    """A planner's seconds over those of the best baseline, or single device.

    One per seed, by problem: the median over the rounds. The best is chosen without the round in
    which it is compared: the least of several noisy medians is less than any of them takes. Or
    it is the baseline that looked best before anything was run (``predicted``).
    """
    medians: dict[str, list[float]] = {}
    for name, mine in groups(rows, "problem").items():
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
        medians[name] = np.exp(np.median(np.log(ratios), axis=0)).tolist()
    return medians


def parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    lines = [
        (planner, objective, some)
        for planner in (LEARNED, CHOSEN)
        for objective in ("period", "latency", "")
        if (some := [r for r in rows if not objective or r.objective == objective])
    ]

    def gain(against: Reference, line: tuple[str, str, list[Row]]) -> str:
        return geometric(measured(line[2], line[0], against)).percent()

    summary = table(
        lines,
        Column("", lambda x: x[0]),
        Column("objective", lambda x: x[1] or "all"),
        Column("problems", lambda x: len(groups(x[2], "problem"))),
        Column("predicted, against the best baseline (95 %)",
               lambda x: geometric(predicted(x[2], x[0])).percent()),
        Column("measured, against the best measured one", partial(gain, "measured")),
        Column("against the best predicted one", partial(gain, "predicted")),
        Column("against the best single device", partial(gain, "single")),
    )  # fmt: skip
    runs = groups(rows, "problem")
    best = {
        name: min((r for r in mine if r.is_baseline), key=lambda r: r.measured_s)
        for name, mine in runs.items()
    }

    def by_seed(planner: str, name: str) -> str:
        ours = (r.measured_s for r in runs[name] if r.planner == planner)
        return " ".join(number(s, 2, 1e3) for s in ours)

    def against(planner: str, name: str) -> str:
        return geometric(measured(runs[name], planner, "measured")).percent()

    each = table(
        runs,
        Column("problem", str),
        Column("operators", lambda n: best[n].operators),
        Column("best measured baseline", lambda n: best[n].planner),
        Column("its ms", lambda n: best[n].measured_s, 2, 1e3),
        Column("policy, ms by seed", partial(by_seed, LEARNED)),
        Column("against it", partial(against, LEARNED)),
        Column("policy, measured, ms by seed", partial(by_seed, CHOSEN)),
        Column("against it", partial(against, CHOSEN)),
    )
    num_rounds = len(rows[0].each_s)
    return {"num_rounds": num_rounds, "count": len(BASELINES), "table": summary, "problems": each}


STUDY = learned_study("executed", EXECUTED, problems, rows, row=Row, parts=parts)
