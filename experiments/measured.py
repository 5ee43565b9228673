"""Learning from the clock: equal numbers of real runs, for learners, searches and chance.

    python -m experiments.measured [WORKLOAD[:latency] ...] [--runs 100 1000] [--seeds 5]

**Written before the first run.** A simulator errs, so what is fast is decided by running it. On the
first two cores of this machine, each a device: three captured models in inference, the period of 16
micro-batches with 4 in flight, or (``:latency``) the latency of one alone. One *run* is one
execution of one placement (``placement.runs.trials``); the fastest so far run again with every
batch, and those runs count. Every way has ``--runs`` of them in all:

* ``random``: random cuts and scatterings, each once;
* ``measured search``: ``placement.runs.measured_search``, which ``placement plan --measurements``
  uses;
* ``bandit``: the best ``ARMS`` placements by the simulator, of searches with several seeds and of
  rules; sequential halving (Karnin, Koren and Somekh, ICML 2013) decides which runs again. With
  100 runs the first round has 16 to 20 of them, so others never run;
* ``PPO``: ``sequential`` with message passing, stable-baselines3, warm-started at ``best_of``;
* ``group-relative``: ``dispatch`` with message passing, from the untrained network, a rule;
* ``group-relative, pre-trained``: the same after ``PRETRAINED`` steps on the same problem in the
  simulator, which count as no run.

Then the answers of all ways and the single devices take turns, ``ROUNDS`` rounds, and the ratio to
the best single device within a round is what counts. What ``placement plan --measurements`` does
changes only if a learner is ahead of ``measured search`` by more than chance over three models and
five seeds, with 100 runs and with 1,000. What has run lies in ``runs/measured``: after Ctrl-C the
same command goes on. A row that is in ``results/measured_learning.csv`` is not made again; ways of
a seed that are run later (``--ways``) have finals of their own. Another machine has another number
(``--machine``): ways are compared within a seed on one machine, and seeds of all are in the table.

(Changed before the first run of the third model: ``lstm`` in place of ``resnet50``, of which 1,000
runs of six ways take over an hour a seed. Changed before the rows of the second machine, which is
noisy: chance and learners, too, have their finalists take turns with the last 30 % of the runs, and
the two fastest run again with every batch. With one of them, a lucky run became the fastest, its
next run was taken for a slow round, and the answers of learners were 10 to 50 % slower than what
they had found. Changed before the rows of the fourth machine: levels were a median polish, whose
errors added up, and the search had one known placement in a round; earlier rows are gone.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.runs import two_cores
from experiments.study import Option, Options, Study, StudyError, run, say
from experiments.tables import Column, geometric, groups, table, to_csv
from placement.planners import load
from placement.problem import Placement, Problem
from placement.runs.measured_search import PARAMS, search_measured
from placement.runs.trials import BudgetSpent, Runtime, Trials
from placement.search.evaluation import random_placements, single_devices
from placement.simulator import score
from placement.tools.files import write_atomic
from placement.tools.parallel import parallel_map

NAME = "measured_learning"
WORKLOADS = ("bert_tiny_hidden128", "inception:latency", "lstm")
ARMS, PRETRAINED, ROUNDS = 50, 200_000, 15
LIMIT_S, MORE = 60.0, 5  # of a run; episodes of a learner for each run that it has
RULES = ("heft", "peft", "contiguous_dp", "m_etf", "level_balance", "balanced_split")


@dataclass(frozen=True)
class Row:
    """What a way came to: seconds in the finals, and of the best single device in the same rounds.

    ``ran``: measurements that it made; ``placements``: different ones among them. ``machine``: a
    number; only what took turns on one is compared.
    """

    machine: int
    workload: str
    way: str
    runs: int
    seed: int
    ran: int
    placements: int
    predicted_s: float
    measured_s: float
    single_s: float
    gain: float


def prepare(workload: str, options: Options) -> Problem:
    """``NAME`` or ``NAME:latency`` on the first two cores of this machine, its profile kept."""
    from placement.capturing import capture
    from placement.costs.measure import load_or_measure
    from placement.workloads import load as model

    name, _, objective = workload.partition(":")
    if objective not in ("", "period", "latency"):
        raise StudyError(f"{workload}: say {name} for its period, or {name}:latency")
    module, inputs = model(name)
    graph, cluster = capture(module, inputs, name=name), two_cores("two cores")
    say(f"{workload}: {graph.num_ops} operators")
    profile = load_or_measure(graph, cluster, repeats=options.repeats)
    problem = Problem(graph, cluster, profile, "period", num_microbatches=16)
    return problem.with_objective(objective or "period")


def by_chance(trials: Trials, seed: int) -> None:
    """Different random placements, each once."""
    rng = np.random.default_rng(seed)
    while trials.num_left >= 1:
        before = trials.num_measurements
        trials(random_placements(trials.problem, 8, rng))
        if trials.num_measurements == before:
            return  # there are no others


def by_search(trials: Trials, seed: int) -> None:
    """What ships."""
    search_measured(trials, seed=seed)


def searched(problem: Problem, seed: int, number: int) -> Placement:
    """What one of the searches finds, of so many with more and more evaluations."""
    search = load("macro_search", evaluations=200 + 20 * number, seed=seed + number)
    return search(problem).placement


def by_bandit(trials: Trials, seed: int) -> None:
    """Sequential halving among what searches on the simulator find."""
    problem = trials.problem
    found = [load(rule)(problem).placement for rule in RULES]
    bare = replace(problem, graph=problem.graph.without_program())  # which cannot be sent
    found += parallel_map(partial(searched, bare, seed * ARMS), range(ARMS), "processes")
    distinct = np.unique(np.stack(found), axis=0)
    values = score(problem, distinct)
    left = distinct[np.argsort(values, kind="stable")][np.sort(np.isfinite(values))[::-1]][:ARMS]
    phases = max(1, int(np.ceil(np.log2(len(left)))))
    share = trials.num_left / phases
    while trials.num_left >= 1:
        until = trials.num_measurements + share
        while trials.num_left >= 1 and trials.num_measurements + 1 <= until:
            trials.measure(left[: int(max(1, min(len(left), until - trials.num_measurements)))])
        level_of = zip(trials.samples.placements, trials.levels.tolist(), strict=True)
        order = {p.tobytes(): seconds for p, seconds in level_of}
        ranked = sorted(left, key=lambda p: order.get(p.tobytes(), np.inf))
        left = np.stack(ranked[: max(1, -(-len(ranked) // 2))])


def by_learning(recipe: Mapping[str, Any], pretrained: int) -> Callable[..., None]:
    """A training whose every value is a run."""

    def learn(trials: Trials, seed: int) -> None:
        from agents.training import TrainConfig, train

        config = TrainConfig(seed=seed, num_checks=1, total_steps=max(1, pretrained), **recipe)
        start: dict[str, Any] = {"baseline": load("best_of", evaluations=500)}
        policy = train([trials.problem], config=config, **start) if pretrained else None
        # The budget ends the training; a policy that proposes only what has run ends by steps.
        steps = int(MORE * trials.num_left * trials.problem.graph.num_groups)
        config = replace(config, total_steps=steps)
        steady = {"last_learning_rate": config.learning_rate}
        train(
            [trials.problem], config=replace(config, **steady), policy=policy,
            evaluator=lambda _, placements: trials(placements), **start,
        )  # fmt: skip

    return learn


def spent(work: Callable[[Trials, int], None], trials: Trials, seed: int) -> None:
    """The work of a way, which ends with its runs."""
    with suppress(BudgetSpent):
        work(trials, seed)


def with_finals(work: Callable[[Trials, int], None]) -> Callable[[Trials, int], None]:
    """The work; then finalists take turns, with as many of the runs as in ``measured search``."""

    def both(trials: Trials, seed: int) -> None:
        runs = trials.measurements or 0
        trials.measurements = runs - int(PARAMS.final * runs)
        spent(work, trials, seed)
        trials.measurements = runs
        while trials.take_turn():
            pass

    return both


PPO = {"network": {"hidden": 32, "layers": 2}, "num_envs": 8, "learning_rate": 3e-3}
GROUP = {
    "formulation": "dispatch",
    "algorithm": "agents.dispatch.train:GroupRelative",
    "algorithm_options": {"episodes": 8, "keep": 0.5},
    "network": {"scorer": 32, "encoder": "sage", "layers": 2},
    "num_envs": 1,
    "epochs": 2,
    "entropy": 0.0,
    "last_entropy": 0.0,
    "learning_rate": 5e-3,
}
SEARCH = "measured search"
WAYS: dict[str, Callable[[Trials, int], None]] = {
    "random": with_finals(by_chance),
    SEARCH: by_search,
    "bandit": by_bandit,
    "PPO": with_finals(by_learning(PPO, 0)),
    "group-relative": with_finals(by_learning(GROUP, 0)),
    "group-relative, pre-trained": with_finals(by_learning(GROUP, PRETRAINED)),
}


class Unit(NamedTuple):
    """Whose ways have finals together."""

    machine: int
    workload: str
    runs: int
    seed: int


def unit_of(row: Row) -> Unit:
    """The unit of a row."""
    return Unit(row.machine, row.workload, row.runs, row.seed)


def compete(
    unit: Unit,
    problem: Problem,
    runtime: Runtime,
    folder: Path,
    ways: Mapping[str, Callable[[Trials, int], None]] = WAYS,
) -> Iterator[Row]:
    """Every way with so many runs, then the finals."""
    done: dict[str, Trials] = {}
    for way, work in ways.items():
        say(f"{unit.workload}: {way}, {unit.runs} runs, seed {unit.seed}")
        path = folder / f"{way}-{unit.runs}-{unit.seed}.jsonl"
        done[way] = Trials(problem, runtime, measurements=unit.runs, path=path, limit_s=LIMIT_S)
        spent(work, done[way], unit.seed)
    yield from judged(unit, problem, runtime, done, folder)


def judged(
    unit: Unit, problem: Problem, runtime: Runtime, done: Mapping[str, Trials], folder: Path
) -> Iterator[Row]:
    """The finals: answers of the ways, and single devices."""
    answers = {way: x.incumbent for way, x in done.items() if x.incumbent is not None}
    ran = {way: (x.num_measurements, len(x.samples.placements)) for way, x in done.items()}
    singles = single_devices(problem)[:, problem.graph.group]
    path = folder / f"finals-{unit.runs}-{unit.seed} {' + '.join(answers)}.jsonl"
    seconds = finals(problem, runtime, [*singles, *answers.values()], path)
    alone = seconds[:, int(np.argmin(np.median(seconds[:, : len(singles)], axis=0)))]
    for (way, placement), mine in zip(answers.items(), seconds.T[len(singles) :], strict=True):
        yield Row(
            unit.machine, unit.workload, way, unit.runs, unit.seed, *ran[way],
            float(score(problem, placement[None])[0]), float(np.median(mine)),
            float(np.median(alone)), float(np.median(alone / mine)),
        )  # fmt: skip


def finals(
    problem: Problem, runtime: Runtime, placements: Sequence[Placement], path: Path
) -> np.ndarray:
    """float64 ``[ROUNDS, K]`` seconds: all take turns; equal placements share a run."""
    keys = [p.tobytes() for p in placements]
    distinct = np.stack(list({k: p for k, p in zip(keys, placements, strict=True)}.values()))
    trials = Trials(problem, runtime, path=path)
    for _ in range(ROUNDS):
        trials.measure(distinct)
    samples = trials.samples
    seconds = np.full((ROUNDS, len(samples.placements)), np.nan)
    seconds[samples.round, samples.index] = samples.seconds
    number_of = {p.tobytes(): k for k, p in enumerate(samples.placements)}
    return seconds[:, [number_of[k] for k in keys]]


def rows(options: Options) -> Iterator[Row]:
    import torch

    from placement.executor import Executor

    torch.set_num_threads(1)
    done = STUDY.read(options.out)
    for workload in options.workloads:
        problem: Problem | None = None
        for runs in options.runs:
            for seed in range(options.seeds):
                unit = Unit(options.machine, workload, runs, seed)
                there = {r.way for r in done if unit_of(r) == unit}
                ways = {way: WAYS[way] for way in options.ways or WAYS if way not in there}
                if not ways:
                    continue
                problem = problem or prepare(workload, options)
                folder = options.work / f"{options.machine}" / workload.replace(":", "-")
                folder.mkdir(parents=True, exist_ok=True)
                done += compete(unit, problem, Executor(problem), folder, ways)
                write_atomic(options.out / f"{NAME}.csv", to_csv(done))
    return iter(done)


Line = tuple[int, str]  # of the table: runs, way


def parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    search = {unit_of(r): r.gain for r in rows if r.way == SEARCH}

    def of(x: Line) -> dict[str, list[Row]]:
        return groups([r for r in rows if (r.runs, r.way) == x], "workload")

    def gain(x: Line, workload: str | None = None) -> str:
        mine = {k: v for k, v in of(x).items() if workload in (None, k)}
        return geometric({k: [r.gain for r in v] for k, v in mine.items()}).ratio()

    def against(x: Line) -> str:
        mine = of(x).items()
        return geometric({k: [search[unit_of(r)] / r.gain for r in v] for k, v in mine}).percent()

    workloads = dict.fromkeys(r.workload for r in rows)
    units = groups(sorted({unit_of(r) for r in rows}), "runs", "workload")
    return {
        "table": table(
            sorted(dict.fromkeys((r.runs, r.way) for r in rows), key=lambda x: x[0]),
            Column("runs", lambda x: f"{x[0]:,}"),
            Column("way", lambda x: x[1]),
            *(Column(w, partial(gain, workload=w)) for w in workloads),
            Column("all", gain),
            Column(f"seconds against {SEARCH}", against),
        ),
        "finished": "; ".join(
            f"{workload}, {runs:,} runs: {len(mine)}" for (runs, workload), mine in units.items()
        ),
    }


STUDY = Study(
    name=NAME,
    module="experiments.measured",
    rows=rows,
    row=Row,
    parts=parts,
    options={
        "workloads": Option(WORKLOADS, word=True, metavar="WORKLOAD"),
        "runs": Option((100, 1000), "of every way, re-measured incumbents included"),
        "seeds": Option(5, "of every way"),
        "ways": Option((), "these alone", choices=[*WAYS]),
        "machine": Option(1, "number of this machine, on which each seed is another"),
        "repeats": Option(10, "of the profile"),
    },
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
