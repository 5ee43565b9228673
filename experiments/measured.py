"""Few real measurements: ours with 100 runs against the best of 500 random placements.

    python -m experiments.measured [WORKLOAD[:latency] ...] [--seeds 5]

Written before the first run. Two one-core CPU devices, a captured model in inference, the period
of 16 micro-batches with 4 in flight, or (``:latency``) the latency of one micro-batch alone;
profile of 10 rounds, measured once and kept.

* **One run** is one execution of one placement: 2 micro-batches to warm up, then 16 in a pipeline,
  or the median of 4 alone. Re-measured incumbents and finalists count.
* **measured_search**: 100 runs in all, the single devices and the finals included; seeds 0 to 4.
* **random, 500**: 500 different placements run once each, every second scattered, the others one
  cut in operator order, shares of the devices drawn uniformly; what is spent on re-measuring the
  incumbent (32 runs) is not counted. Its 5 fastest are finalists, and the best of *their final
  medians* counts: it may choose with the final measurement, ours may not.
* **random, by its own runs**: the fastest of the 500, which is what who has no finals would take.
* **random, 100**: the fastest of the first 100 of them (equal budget).
* **no measurement**: ``macro_search`` on the simulator, 8,192 evaluations, seed 0.
* **Finals**: every way's answers and every single device take turns, 15 rounds, first one
  direction, then the other. Gains are ratios within a round; the interval resamples seeds and
  rounds (95 %, 10,000 times). The single device is the one with the lower median.

About 12 minutes for ``bert_tiny_hidden128`` and 45 for ``resnet50`` on an idle machine with 2 cores
at 2.8 GHz (1,800 runs each). What has run lies in ``runs/measured``: after Ctrl-C the same command
continues (with other numbers in another folder: ``--work``). Writes
``experiments/results/measured.csv`` and ``measured.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.runs import Floats, two_cores
from experiments.study import Option, Options, Study, StudyError, run, say
from experiments.tables import Column, number, table
from placement.planners.macro_search import MacroSearch
from placement.problem import Placement, Problem
from placement.runs.measured_search import search_measured
from placement.runs.row import SINGLE
from placement.runs.trials import Runtime, Trials
from placement.search.evaluation import random_placements, single_devices
from placement.simulator import score

# Periods, where one cut in operator order is next to the best there is, so that random cuts find
# it; and a latency, where two devices must work on branches at the same time.
WORKLOADS = ("bert_tiny_hidden128", "inception:latency", "inception")
OURS, RANDOM, NONE = "measured_search", "random", "no measurement"
EQUAL = "random, equal budget"
CHOSEN = "random, by its own runs"
_TOP = 5  # of the random placements are finalists


BUDGET: Mapping[str, Any] = {  # how often everything is done (see the top of this file)
    "measurements": Option(100, "of our search"),
    "random": Option(500, "random placements"),
    "seeds": Option(5, "of both searches"),
    "rounds": Option(15, "of the finals"),
    "evaluations": 1024,
    "repeats": Option(10, "of the profile"),
    "microbatches": 16,
}


@dataclass(frozen=True)
class Row:
    """What one way found with one seed, in the finals.

    Attributes:
        num_runs: what it spent.
        predicted_s, measured_s: the objective; the latter is the median of the final rounds.
        gain, gain_low, gain_high: seconds of the best single device over this one's, and the 95 %
            interval over final rounds.
        against_random: those of the best of the random placements over this one's (likewise).
    """

    workload: str
    way: str
    seed: int
    num_runs: int
    predicted_s: float
    measured_s: float
    gain: float
    gain_low: float
    gain_high: float
    against_random: float
    against_random_low: float
    against_random_high: float


@dataclass(frozen=True)
class Summary:
    """All seeds of a way: geometric means of ``Row``'s ratios, intervals over seeds and rounds."""

    workload: str
    way: str
    num_runs: int
    gain: tuple[float, float, float]
    against_random: tuple[float, float, float]
    num_as_good: int
    num_seeds: int


Entry = tuple[str, int, int]  # way, seed, runs spent


def prepare(workload: str, folder: Path, options: Options) -> Problem:
    """``NAME`` or ``NAME:latency`` on the first two devices of this machine.

    The profile is kept in ``folder``.
    """
    from placement.capturing import capture
    from placement.costs.measure import load_or_measure
    from placement.workloads import load

    name, _, objective = workload.partition(":")
    if objective not in ("", "period", "latency"):
        raise StudyError(f"{workload}: say {name} for its period, or {name}:latency")
    module, inputs = load(name)
    graph, cluster = capture(module, inputs, name=name), two_cores()
    say(f"{workload}: {graph.num_ops} operators")
    profile = load_or_measure(graph, cluster, repeats=options.repeats, folder=folder)
    problem = Problem(graph, cluster, profile, num_microbatches=options.microbatches)
    return problem.with_objective("latency") if objective == "latency" else problem


def compete(
    name: str, problem: Problem, runtime: Runtime, folder: Path, options: Options
) -> tuple[list[Row], list[Summary]]:
    """Everything that is measured of one problem; the trials are kept in ``folder``."""
    entries: dict[Entry, Placement] = {}
    singles = single_devices(problem)[:, problem.graph.group]
    for device, placement in zip(problem.cluster.device_names, singles, strict=True):
        entries[SINGLE + device, 0, 0] = placement
    effort = 8 * options.evaluations
    entries[NONE, 0, 0] = MacroSearch(evaluations=effort, seed=0)(problem).placement
    say(f"{name}: {options.random} random placements")
    drawn = draw(problem, options.random, 0)
    levels = Trials(problem, runtime, path=folder / "random-0.jsonl")(drawn)
    for rank, i in enumerate(np.argsort(levels, kind="stable")[:_TOP]):
        entries[RANDOM, rank, len(drawn)] = drawn[i]
    entries[CHOSEN, 0, len(drawn)] = drawn[np.argmin(levels)]
    few = min(options.measurements, len(drawn))
    entries[EQUAL, 0, few] = drawn[np.argmin(levels[:few])]
    for seed in range(options.seeds):
        say(f"{name}: {OURS}, seed {seed}")
        most, path = options.measurements, folder / f"{OURS}-{seed}.jsonl"
        trials = Trials(problem, runtime, measurements=most, path=path)
        answer = search_measured(trials, evaluations=options.evaluations, seed=seed)
        entries[OURS, seed, most] = answer.placement
    seconds = finals(problem, runtime, entries, folder / "finals.jsonl", options.rounds)
    return judge(name, problem, entries, seconds)


def draw(problem: Problem, count: int, seed: int) -> Placement:
    """int32 ``[count, N]`` different random placements that fit."""
    rng = np.random.default_rng(seed)
    distinct: dict[bytes, Placement] = {}
    for _ in range(100):
        more = random_placements(problem, count, rng)
        fits = np.isfinite(score(problem, more))
        distinct.update((p.tobytes(), p) for p in more[fits])
        if len(distinct) >= count:
            return np.array(list(distinct.values())[:count])
    raise StudyError(f"{problem.graph.name}: no {count} different random placements fit")


def finals(
    problem: Problem, runtime: Runtime, entries: Mapping[Entry, Placement], path: Path, rounds: int
) -> Floats:
    """float64 ``[rounds, entries]``: all take turns; equal placements share a run."""
    keys = [p.tobytes() for p in entries.values()]
    distinct = {k: p for k, p in zip(keys, entries.values(), strict=True)}
    trials = Trials(problem, runtime, path=path)
    for r in range(rounds):
        say(f"finals: round {r + 1} of {rounds}, {len(distinct)} placements")
        trials.measure(np.array(list(distinct.values())))
    samples = trials.samples
    number_of = {p.tobytes(): k for k, p in enumerate(samples.placements)}
    seconds = np.full((rounds, len(samples.placements)), np.nan)
    seconds[samples.round, samples.index] = samples.seconds
    return seconds[:, [number_of[k] for k in keys]]


def judge(
    name: str, problem: Problem, entries: Mapping[Entry, Placement], seconds: Floats
) -> tuple[list[Row], list[Summary]]:
    """Ratios to the best single device and to the best random placement, with intervals."""
    ways = [way for way, *_ in entries]
    middle = np.median(seconds, axis=0)

    def best(kind: Callable[[str], bool]) -> Floats:
        mine = [i for i, way in enumerate(ways) if kind(way)]
        return np.log(seconds[:, mine[int(np.argmin(middle[mine]))]])

    single, random = best(lambda way: way.startswith(SINGLE)), best(lambda way: way == RANDOM)
    logs = np.log(seconds)
    gain, against = single[:, None] - logs, random[:, None] - logs
    predicted = score(problem, np.array(list(entries.values())))
    rows = []
    for i, entry in enumerate(entries):
        seconds_s = float(predicted[i]), float(middle[i])
        rows.append(
            Row(name, *entry, *seconds_s, *interval(gain[:, [i]]), *interval(against[:, [i]]))
        )
    summaries = []
    for way in dict.fromkeys(ways):
        mine = [i for i, w in enumerate(ways) if w == way]
        if way == RANDOM:  # the best in the finals is what the others are compared with
            mine = [min(mine, key=lambda i: middle[i])]
        as_good = sum(rows[i].against_random_high >= 1.0 for i in mine)
        ratios = interval(gain[:, mine]), interval(against[:, mine])
        summaries.append(Summary(name, way, rows[mine[0]].num_runs, *ratios, as_good, len(mine)))
    return rows, summaries


def interval(logs: Floats, num_resamples: int = 10_000) -> tuple[float, float, float]:
    """Ratio and 95 % interval from log ratios float64 ``[rounds, seeds]``.

    Medians over rounds, their geometric mean over seeds; both are resampled.
    """
    rng = np.random.default_rng(0)
    rounds, seeds = logs.shape
    which = rng.integers(rounds, size=(num_resamples, rounds, 1))
    whose = rng.integers(seeds, size=(num_resamples, 1, seeds))
    drawn = np.median(logs[which, whose], axis=1).mean(axis=1)
    low, high = np.exp(np.percentile(drawn, [2.5, 97.5]))
    return float(np.exp(np.median(logs, axis=0).mean())), float(low), float(high)


def rows(options: Options) -> Iterator[Row]:
    import torch

    from placement.executor import Executor

    torch.set_num_threads(1)
    options.summaries = list[Summary]()
    for workload in options.workloads:
        folder = options.work / workload.replace(":", "-")
        problem = prepare(workload, folder, options)
        ways, summaries = compete(workload, problem, Executor(problem), folder, options)
        options.summaries += summaries
        yield from ways


def parts(rows: Sequence[Row], options: Options) -> dict[str, str]:
    def ratio(field: str, summary: Summary) -> str:
        middle, low, high = map(number, getattr(summary, field))
        return f"{middle} ({low} to {high})"

    columns = (
        Column("workload", "workload"),
        Column("way", "way"),
        Column("runs", "num_runs"),
        Column("faster than the best single device", partial(ratio, "gain")),
        Column("than the best random placement", partial(ratio, "against_random")),
        Column("not clearly slower", lambda s: f"{s.num_as_good} of {s.num_seeds}"),
    )
    return {"table": table(options.summaries, *columns)}


STUDY = Study(
    name="measured",
    rows=rows,
    row=Row,
    parts=parts,
    options={"workloads": Option(WORKLOADS, word=True, metavar="WORKLOAD"), **BUDGET},
    facts=lambda options: {name: getattr(options, name) for name in BUDGET},
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
