"""How well times of operators are predicted, and what plans made from predictions are worth.

    python -m experiments.prediction [--seconds 1000] [--dataset FOLDER]

*Measuring*, on an idle machine: a data set of small models with one and with two threads
(``placement dataset``; an existing folder is taken as it is and extended), then placements of some
models on two devices, planned from predictions and from measurements, all run for real. What is
finished lies in ``runs/prediction``: the same command continues; ``--seconds`` bounds the time of
one call. *Analysing*: families of models are left out ten parts at a time, and predicted from the
others by every method. Writes ``experiments/results/prediction.csv`` and ``prediction.md``.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.runs import Floats, in_turns
from experiments.study import ROOT, Option, Options, Study, StudyError, run, say
from experiments.tables import DASH, Column, groups, table
from placement import planners, workloads
from placement.capturing import capture
from placement.cluster import Cluster
from placement.costs import predictors
from placement.costs.features import features
from placement.costs.measure import measure
from placement.costs.measure_within import correction
from placement.costs.predictors import Sample
from placement.executor import Executor
from placement.problem import Placement, Problem
from placement.profile import Profile
from placement.report.table import spearman
from placement.search.evaluation import random_placements
from placement.simulator import evaluate
from placement.tools.files import write_atomic
from placement.workloads import dataset

METHODS = ("roofline", "polynomial", "trees")
PLACED = ("Bert", "GPT2", "ViT", "ResNet", "T5", "ConvNext")
NUM_PARTS = 10
NUM_RANDOM = 10  # random placements that run
NUM_RANKED = 500  # and that are simulated with measured and with predicted times
RUNS = 8  # micro-batches of a measured placement
ROUNDS = 6  # of all placements, in turns
SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.33, 0.5)
SEARCH_S = 3.0


@dataclass(frozen=True)
class Row:
    """One model on one device by one method: seconds of the whole model, and errors.

    ``repeat_error``: by how much two halves of the measured rounds differ.
    """

    model: str
    family: str
    kind: str
    threads: int
    method: str
    num_ops: int
    measured_s: float
    predicted_s: float
    error: float
    repeat_error: float


@dataclass(frozen=True, eq=False)
class Case:
    """A measured graph of the data set on one device."""

    name: str
    family: str
    kind: str
    sample: Sample
    repeat_error: float


# --- measuring -----------------------------------------------------------------------------------


def entries() -> list[dataset.Entry]:
    """The models of the data set, one of every kind in turn, so that any number is a mixture."""
    by_kind: dict[str, list[dataset.Entry]] = {}
    for entry in dataset.default_entries():
        if entry.kind != "toy":
            by_kind.setdefault(entry.kind, []).append(entry)
    longest = max(map(len, by_kind.values()))
    return [kind[i] for i in range(longest) for kind in by_kind.values() if i < len(kind)]


def cases(folder: Path) -> list[Case]:
    """What the data set has measured on the processors of one machine.

    This one, or else that of which there is most: times of two are never mixed.
    """
    problems = dataset.load(folder)
    of = Counter(name.partition("/")[0] for name in problems)
    here = dataset.this_machine().name
    machine = here if here in of else of.most_common(1)[0][0]
    every = []
    for name, problem in problems.items():
        if name.partition("/")[0] != machine:
            continue
        facts = problem.profile.provenance
        for d, device in enumerate(problem.cluster.devices):
            if device.kind != "cpu":
                continue
            rounds = np.array(facts["whole_s"][device.name])
            halves = [np.median(rounds[i::2]) for i in range(2)] if len(rounds) > 1 else [1, 1]
            seconds = problem.profile.compute_s[:, d]
            spread, loaded = problem.profile.spread_s[:, d], np.full(len(seconds), np.nan)
            sample = Sample(problem.graph, device, seconds, spread, loaded)
            error = float(abs(halves[0] / halves[1] - 1))
            about = name.rpartition("/")[2], facts["family"], facts["kind"]
            every.append(Case(*about, sample, error))
    return every


def place(entry: dataset.Entry, others: Sequence[Sample]) -> dict[str, Any]:
    """Plan one model from its measured profile and from predictions; run all placements.

    The predictors learn from ``others``: they have not seen the model's family.
    """
    module, inputs = workloads.load(entry.spec, **entry.options)
    graph = capture(module, inputs, name=entry.name)
    cluster = Cluster.detect(max_cpu_devices=2, gpus=False)
    profile = measure(graph, cluster, repeats=6)
    problem = Problem(graph, cluster, profile, num_microbatches=RUNS)
    profiles = {"measured": profile} | {m: guessed(m, problem, others) for m in METHODS}
    rng = np.random.default_rng(0)
    placements = plans(problem, profiles, rng)
    executor = Executor(problem)

    def once(placement: Placement) -> list[float]:
        alone = executor.run(placement, num_microbatches=3, max_in_flight=1)
        return [float(np.median(alone.span_s)), executor.run(placement).period_s]

    measured = in_turns({n: partial(once, p) for n, p in placements.items()}, ROUNDS, warm_up=0)
    batch = np.stack(list(placements.values()))
    drawn = random_placements(problem, NUM_RANKED, rng)
    simulated, periods = {}, {}
    for method, times in profiles.items():
        there = replace(problem, profile=times)
        values = evaluate(there, batch)
        pairs = np.stack([values.latency_s, values.period_s], axis=1).tolist()
        simulated[method] = dict(zip(placements, pairs, strict=True))
        periods[method] = evaluate(there, drawn).period_s
    return {
        "model": entry.name,
        "family": entry.family,
        "ranks": {m: spearman(said_s, periods["measured"]) for m, said_s in periods.items()},
        "measured": {name: np.median(m, axis=0).tolist() for name, m in measured.items()},
        "simulated": simulated,
    }


def guessed(method: str, problem: Problem, others: Sequence[Sample]) -> Profile:
    """What a method says of the operators, with the machine's own links and slowing down."""
    profile = problem.profile
    predictor = predictors.load(method).fit(others)
    guess = predictors.profile_of(problem.graph, problem.cluster, predictor, links=profile.links)
    # What a busy neighbour costs is the machine's, as links are: taken from the profile.
    loaded = profile.loaded_s / np.maximum(profile.compute_s, 1e-9)  # type: ignore[operator]
    return replace(guess, loaded_s=guess.compute_s * np.median(loaded, axis=0))


def plans(
    problem: Problem, profiles: Mapping[str, Profile], rng: np.random.Generator
) -> dict[str, Placement]:
    """Single devices, searches with every profile, random ones."""
    placements: dict[str, Placement] = {
        name: np.full(problem.num_ops, d, np.int32)
        for d, name in enumerate(problem.cluster.device_names)
    }
    search = planners.load("local_search", seconds=SEARCH_S)
    for method, times in profiles.items():
        placements[f"search, {method}"] = search(replace(problem, profile=times)).placement
    drawn = random_placements(problem, NUM_RANDOM, rng)
    return placements | {f"random {i}": placement for i, placement in enumerate(drawn)}


def measure_all(folder: Path, work: Path, seconds: float) -> None:
    """The data set, in two thirds of the time, then the placements; what is there is kept."""
    began = time.monotonic()
    todo = entries()
    built = dataset.build(
        todo, folder, seconds=seconds * 2 / 3, repeats=10, progress=lambda what, _: say(what)
    )
    say(f"{len(built.made)} measured now, {len(built.kept)} before, {len(built.failed)} failed")
    measured = cases(folder)
    for model in PLACED:
        path = work / f"{model}.json"
        chosen = [e for e in todo if e.options.get("model") == model]
        if path.exists() or not chosen:
            continue
        if time.monotonic() - began > seconds:
            say("out of time: the same command continues")
            return
        entry = chosen[-1]
        say(f"placements of {entry.name}")
        others = [c.sample for c in measured if c.family != entry.family]
        write_atomic(path, json.dumps(place(entry, others)))


# --- analysing -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Answer:
    """What a method said of a case from a family that it had not seen."""

    case: Case
    method: str
    seconds: Floats
    spread: Floats


def answers(measured_cases: Sequence[Case], methods: Sequence[str]) -> list[Answer]:
    """Every case predicted by every method that has not seen its family."""
    families = sorted({c.family for c in measured_cases})
    if len(families) < 2:
        raise StudyError(
            f"the data set has models of {len(families)} family: to predict one from others, "
            "measure more: the same command with more --seconds"
        )
    order = np.random.default_rng(0).permutation(len(families))
    every = []
    for part, at in enumerate(np.array_split(order, min(NUM_PARTS, len(families)))):
        out = {families[i] for i in at}
        inside = [c.sample for c in measured_cases if c.family not in out]
        for method in methods:
            say(f"part {part + 1}: {method} without {len(out)} families")
            predictor = predictors.load(method).fit(inside)
            for case in measured_cases:
                if case.family in out:
                    seconds, spread = predictor.predict(case.sample.graph, case.sample.device)
                    every.append(Answer(case, method, seconds, spread))
    return every


def rows(options: Options) -> Iterator[Row]:
    torch.set_num_threads(1)
    if options.seconds > 0:
        measure_all(options.dataset, options.work, options.seconds)
    options.answers = answers(cases(options.dataset), options.methods)
    files = (options.work / f"{name}.json" for name in PLACED)
    options.plans = [json.loads(path.read_text()) for path in files if path.exists()]
    yield from map(row_of, options.answers)


def row_of(answer: Answer) -> Row:
    case, sample = answer.case, answer.case.sample
    measured_s, said_s = float(sample.compute_s.sum()), float(answer.seconds.sum())
    about = case.name, case.family, case.kind, sample.device.threads, answer.method
    seconds = sample.graph.num_ops, measured_s, said_s, said_s / measured_s - 1
    return Row(*about, *seconds, case.repeat_error)


# --- the page ------------------------------------------------------------------------------------


def whole_models(rows: Sequence[Row]) -> str:
    lines = groups(sorted(rows, key=lambda r: r.threads), "method", "threads")
    order = {method: i for i, method in enumerate(groups(rows, "method"))}

    def error(reduce: Any, key: tuple[str, int]) -> float:
        return float(reduce(np.abs([r.error for r in lines[key]])))

    def again(key: tuple[str, int]) -> float:
        return float(np.median([r.repeat_error for r in lines[key]]))

    return (
        table(
            sorted(lines, key=lambda key: (order[key[0]], key[1])),
            Column("method", lambda k: f"{k[0]}, {k[1]} thread{'s' * (k[1] > 1)}"),
            Column("models", lambda k: len(lines[k])),
            Column("median error %", partial(error, np.median), 1, 100),
            Column("mean %", partial(error, np.mean), 1, 100),
            Column("within 10 %: % of", partial(error, lambda e: (e <= 0.1).mean()), 0, 100),
            Column("repeated %", again, 1, 100),
        )
        + "| published, polynomial (Shang 2023) | – | at most 10 |  |  |  |\n"
    )


def operators(predicted: Sequence[Answer], count: int = 14) -> str:
    """Median error of operators by kind, those that take most time first."""
    total: dict[str, float] = {}
    errors: dict[tuple[str, str], list[float]] = {}
    for answer in predicted:
        seconds = np.maximum(answer.case.sample.compute_s, 1e-8)
        wrong = np.abs(answer.seconds / seconds - 1)
        kinds = features(answer.case.sample.graph).kind
        for kind, s, e in zip(kinds, seconds.tolist(), wrong.tolist(), strict=True):
            total[kind] = total.get(kind, 0.0) + s
            errors.setdefault((kind, answer.method), []).append(e)
    whole = sum(total.values())

    def median(method: str, kind: str) -> float:
        return float(np.median(errors[kind, method]))

    return table(
        sorted(total, key=lambda k: -total[k])[:count],
        Column("kind", str),
        Column("% of time", lambda kind: total[kind] / whole, 1, 100),
        *(
            Column(f"{m}, median %", partial(median, m), 0, 100)
            for m in groups(predicted, "method")
        ),
    )


def saved(predicted: Sequence[Answer], method: str = "polynomial") -> str:
    """Error against the share of signatures that are measured, the uncertain first."""
    errors: dict[float, list[float]] = {}
    for answer in (a for a in predicted if a.method == method):
        graph, truth = answer.case.sample.graph, answer.case.sample.compute_s
        _, row = np.unique(graph.op_signature, return_inverse=True)
        order = np.argsort(-np.bincount(row, answer.spread), kind="stable")
        for share in SHARES:
            measured = np.isin(row, order[: round(share * len(order))])
            seconds = np.where(measured, truth, answer.seconds)[:, None]
            factor = correction(graph, seconds, answer.seconds[:, None], measured)
            seconds[~measured] *= factor[~measured]
            errors.setdefault(share, []).append(float(abs(seconds.sum() / truth.sum() - 1)))
    return table(
        errors,
        Column("% of signatures measured", float, 0, 100),
        Column("fewer", lambda share: f"{1 / share:.0f}x" if share else DASH),
        Column("median error %", lambda share: float(np.median(errors[share])), 1, 100),
        Column("mean %", lambda share: float(np.mean(errors[share])), 1, 100),
    )


def placed(models: Sequence[Mapping[str, Any]]) -> str:
    """Placements on two devices under predicted and measured profiles."""

    def error(what: int, method: str) -> float:
        errors = [
            abs(case["simulated"][method][name][what] / seconds[what] - 1)
            for case in models
            for name, seconds in case["measured"].items()
        ]
        return float(np.median(errors))

    def rank_of_runs(method: str) -> float:
        pairs = [(c["simulated"][method], c["simulated"]["measured"]) for c in models]
        periods = [([x[n][1] for n in x], [y[n][1] for n in x]) for x, y in pairs]
        return float(np.median([spearman(np.array(a), np.array(b)) for a, b in periods]))

    def regret(reduce: Any, method: str) -> float:
        runs = [c["measured"] for c in models]
        return float(
            reduce([m[f"search, {method}"][1] / m["search, measured"][1] - 1 for m in runs])
        )

    return table(
        ["measured", *METHODS],
        Column("times from", str),
        Column("latency error %", partial(error, 0), 1, 100),
        Column("period error %", partial(error, 1), 1, 100),
        Column("rank correlation", lambda m: float(np.median([c["ranks"][m] for c in models]))),
        Column("of those that ran", rank_of_runs),
        Column("regret of the plan %", partial(regret, np.median), 1, 100),
        Column("worst %", partial(regret, np.max), 1, 100),
    )


def placements(models: Sequence[Mapping[str, Any]]) -> str:
    """What is said of plans, where some were made."""
    return f"""## Placements on two devices, {len(models)} models

Regret: measured period of the plan searched with these times over that of the plan searched with \
measured times. Rank correlation: Spearman's, of the simulated periods of {NUM_RANKED} random \
placements with these and with measured times, and of the few placements that ran, most of which \
are about as good; medians over models. The published bound for periods is 12 %.

{placed(models)}"""


def parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    return {
        "families": len(groups(rows, "family")),
        "whole_models": whole_models(rows),
        "operators": operators(options.answers),
        "saved": saved(options.answers),
        "placements": placements(options.plans) if options.plans else "",
    }


STUDY = Study(
    name="prediction",
    rows=rows,
    row=Row,
    parts=parts,
    options={
        "seconds": Option(1000.0, "of measuring; 0: none"),
        "dataset": Option(ROOT / "runs" / "prediction" / "dataset", kind=Path),
        "methods": Option(METHODS, choices=METHODS),
    },
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
