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

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments._study import (
    RESULTS,
    ROOT,
    StudyError,
    command_line,
    common_options,
    launch,
    number,
    provenance,
    say,
    to_csv,
    to_table,
)
from placement import dataset, latency, planners, workloads
from placement.cluster import Cluster
from placement.compare import spearman
from placement.executor import Executor
from placement.features import features
from placement.files import write_atomic
from placement.latency import Sample
from placement.latency.roofline import Roofline
from placement.measure import measure
from placement.measure_within import correction
from placement.problem import Placement, Problem
from placement.program import capture
from placement.residual import random_placements
from placement.simulator import evaluate

Floats = NDArray[np.float64]
METHODS = ("roofline", "polynomial", "trees")
PLANNED = ("roofline", "polynomial", "trees")  # those that learn in seconds
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
    return [found[i] for i in range(longest) for found in by_kind.values() if i < len(found)]


def cases(folder: Path) -> list[Case]:
    """What the data set has measured on the processors of one machine.

    This one, or else that of which there is most: times of two are never mixed.
    """
    problems = dataset.load(folder)
    of = Counter(name.partition("/")[0] for name in problems)
    here = dataset.this_machine().name
    machine = here if here in of else of.most_common(1)[0][0]
    found = []
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
            sample = Sample(
                problem.graph,
                device,
                seconds,
                problem.profile.spread_s[:, d],
                np.full(len(seconds), np.nan),
            )
            error = float(abs(halves[0] / halves[1] - 1))
            found.append(
                Case(name.rpartition("/")[2], facts["family"], facts["kind"], sample, error)
            )
    return found


def place(entry: dataset.Entry, known: Sequence[Case]) -> dict[str, Any]:
    """Plan one model from its measured profile and from predictions; run all placements.

    The predictors have not seen the model's family.
    """
    module, inputs = workloads.load(entry.spec, **entry.options)
    graph = capture(module, inputs, name=entry.name)
    cluster = Cluster.detect(max_cpu_devices=2)
    profile = measure(graph, cluster, repeats=6)
    problem = Problem(graph, cluster, profile, num_microbatches=RUNS)
    others = [c.sample for c in known if c.family != entry.family]
    predicted, seconds = {}, {}
    for method in PLANNED:
        predictor = latency.load(method).fit(others)
        began = time.perf_counter()
        guess = latency.profile_of(graph, cluster, predictor, links=profile.links)
        # What a busy neighbour costs is the machine's, as links are: taken from the profile.
        loaded = profile.loaded_s / np.maximum(profile.compute_s, 1e-9)  # type: ignore[operator]
        guess = replace(guess, loaded_s=guess.compute_s * np.median(loaded, axis=0))
        seconds[method] = time.perf_counter() - began
        predicted[method] = guess
    placements: dict[str, Placement] = {
        name: np.full(graph.num_ops, d, np.int32) for d, name in enumerate(cluster.device_names)
    }
    search = planners.load("local_search", seconds=SEARCH_S)
    began = time.perf_counter()
    placements["search, measured"] = search(problem).placement
    seconds["measuring and searching"] = (
        float(profile.provenance["seconds"]) + time.perf_counter() - began
    )
    for method, guess in predicted.items():
        there = replace(problem, profile=guess)
        placements[f"search, {method}"] = search(there).placement
    began = time.perf_counter()
    static = latency.profile_of(graph, cluster, Roofline(), links=profile.links)
    balanced = planners.load("balanced_split")(replace(problem, profile=static))
    seconds["static"] = time.perf_counter() - began
    placements["static"] = balanced.placement
    rng = np.random.default_rng(0)
    for i in range(NUM_RANDOM):
        groups = rng.choice(2, graph.num_groups, p=rng.dirichlet(np.ones(2)))
        groups = np.sort(groups) if i % 2 else groups
        placements[f"random {i}"] = groups[graph.group].astype(np.int32)
    executor = Executor(problem)
    spans: dict[str, list[list[float]]] = {name: [] for name in placements}
    for _ in range(ROUNDS):
        for name, p in placements.items():
            alone = executor.run(p, num_microbatches=3, max_in_flight=1)
            spans[name].append([float(np.median(alone.span_s)), executor.run(p).period_s])
    measured = {name: np.median(found, axis=0).tolist() for name, found in spans.items()}
    batch = np.stack(list(placements.values()))
    profiles = {"measured": profile} | predicted

    def said(of: Any) -> dict[str, list[float]]:
        values = evaluate(replace(problem, profile=of), batch)
        pairs = np.stack([values.latency_s, values.period_s], axis=1).tolist()
        return dict(zip(placements, pairs, strict=True))

    drawn = random_placements(problem, NUM_RANKED, rng)
    periods = {
        m: evaluate(replace(problem, profile=times), drawn).period_s
        for m, times in profiles.items()
    }
    return {
        "model": entry.name,
        "family": entry.family,
        "ranks": {m: spearman(said_s, periods["measured"]) for m, said_s in periods.items()},
        "measured": measured,
        "simulated": {m: said(p) for m, p in profiles.items()},
        "seconds": seconds,
    }


def measure_all(folder: Path, work: Path, seconds: float) -> None:
    """The data set, in two thirds of the time, then the placements; what is there is kept."""
    began = time.monotonic()
    todo = entries()
    built = dataset.build(
        todo, folder, seconds=seconds * 2 / 3, repeats=10, progress=lambda what, _: say(what)
    )
    say(f"{len(built.made)} measured now, {len(built.kept)} before, {len(built.failed)} failed")
    known = cases(folder)
    for wanted in PLACED:
        path = work / f"{wanted}.json"
        chosen = [e for e in todo if e.options.get("model") == wanted]
        if path.exists() or not chosen:
            continue
        if time.monotonic() - began > seconds:
            say("out of time: the same command continues")
            return
        say(f"placements of {chosen[-1].name}")
        write_atomic(path, json.dumps(place(chosen[-1], known)))


# --- analysing -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Answer:
    """What a method said of a case from a family that it had not seen."""

    case: Case
    method: str
    seconds: Floats
    spread: Floats


def answers(known: Sequence[Case], methods: Sequence[str]) -> list[Answer]:
    """Every case predicted by every method that has not seen its family."""
    families = sorted({c.family for c in known})
    if len(families) < 2:
        raise StudyError(
            f"the data set has models of {len(families)} family: to predict one from others, "
            "measure more: the same command with more --seconds"
        )
    order = np.random.default_rng(0).permutation(len(families))
    found = []
    for number_, at in enumerate(np.array_split(order, min(NUM_PARTS, len(families)))):
        out = {families[i] for i in at}
        inside = [c.sample for c in known if c.family not in out]
        for method in methods:
            say(f"part {number_ + 1}: {method} without {len(out)} families")
            predictor = latency.load(method).fit(inside)
            for case in known:
                if case.family in out:
                    seconds, spread = predictor.predict(case.sample.graph, case.sample.device)
                    found.append(Answer(case, method, seconds, spread))
    return found


def row_of(answer: Answer) -> Row:
    case, total = answer.case, float(answer.case.sample.compute_s.sum())
    said = float(answer.seconds.sum())
    return Row(
        case.name,
        case.family,
        case.kind,
        case.sample.device.threads,
        answer.method,
        case.sample.graph.num_ops,
        total,
        said,
        said / total - 1,
        case.repeat_error,
    )


def whole_models(rows: Sequence[Row]) -> str:
    """Markdown: errors of whole models by method and threads."""
    cells = []
    for method in dict.fromkeys(r.method for r in rows):
        for threads in sorted({r.threads for r in rows}):
            chosen = [r for r in rows if r.method == method and r.threads == threads]
            errors = np.abs([r.error for r in chosen])
            repeat = float(np.median([r.repeat_error for r in chosen]))
            cells.append(
                [
                    f"{method}, {threads} thread{'s' * (threads > 1)}",
                    str(len(chosen)),
                    number(float(np.median(errors)), 1, 100),
                    number(float(errors.mean()), 1, 100),
                    number(float((errors <= 0.1).mean()), 0, 100),
                    number(repeat, 1, 100),
                ]
            )
    cells.append(["published, polynomial (Shang 2023)", "–", "at most 10", "", "", ""])
    header = ["method", "models", "median error %", "mean %", "within 10 %: % of", "repeated %"]
    return to_table(header, cells)


def operators(found: Sequence[Answer], count: int = 14) -> str:
    """Markdown: median error of operators by kind, those that take most time first."""
    total: dict[str, float] = {}
    errors: dict[tuple[str, str], list[float]] = {}
    for answer in found:
        seconds = np.maximum(answer.case.sample.compute_s, 1e-8)
        wrong = np.abs(answer.seconds / seconds - 1)
        kinds = features(answer.case.sample.graph).kind
        for kind, s, e in zip(kinds, seconds.tolist(), wrong.tolist(), strict=True):
            total[kind] = total.get(kind, 0.0) + s
            errors.setdefault((kind, answer.method), []).append(e)
    methods = list(dict.fromkeys(a.method for a in found))
    largest = sorted(total, key=lambda k: -total[k])[:count]
    whole = sum(total.values())
    cells = [
        [kind, number(total[kind] / whole, 1, 100)]
        + [number(float(np.median(errors[kind, m])), 0, 100) for m in methods]
        for kind in largest
    ]
    return to_table(["kind", "% of time", *(f"{m}, median %" for m in methods)], cells)


def saved(found: Sequence[Answer], method: str = "polynomial") -> str:
    """Markdown: error against the share of signatures that are measured, the uncertain first."""
    errors: dict[float, list[float]] = {share: [] for share in SHARES}
    for answer in (a for a in found if a.method == method):
        graph, truth = answer.case.sample.graph, answer.case.sample.compute_s
        _, row = np.unique(graph.op_signature, return_inverse=True)
        order = np.argsort(-np.bincount(row, answer.spread), kind="stable")
        for share in SHARES:
            known = np.isin(row, order[: round(share * len(order))])
            seconds = np.where(known, truth, answer.seconds)[:, None]
            factor = correction(graph, seconds, answer.seconds[:, None], known)
            seconds[~known] *= factor[~known]
            errors[share].append(float(abs(seconds.sum() / truth.sum() - 1)))
    cells = [
        [
            number(share, 0, 100),
            "–" if not share else f"{1 / share:.0f}x",
            number(float(np.median(errors[share])), 1, 100),
            number(float(np.mean(errors[share])), 1, 100),
        ]
        for share in SHARES
        if errors[share]
    ]
    return to_table(["% of signatures measured", "fewer", "median error %", "mean %"], cells)


def placed(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: placements on two devices under predicted and measured profiles."""
    cells = []
    for method in ("measured", *PLANNED):
        errors: list[list[float]] = [[], []]
        ranks, regret = [], []
        random = [case["ranks"][method] for case in found]
        for case in found:
            names = list(case["measured"])
            truth = np.array([case["measured"][n] for n in names])
            said = np.array([case["simulated"][method][n] for n in names])
            by_profile = np.array([case["simulated"]["measured"][n] for n in names])
            for i in range(2):
                errors[i] += np.abs(said[:, i] / truth[:, i] - 1).tolist()
            ranks.append(spearman(said[:, 1], by_profile[:, 1]))
            measured = case["measured"]
            regret.append(measured[f"search, {method}"][1] / measured["search, measured"][1] - 1)
        cells.append(
            [
                method,
                *(number(float(np.median(e)), 1, 100) for e in errors),
                *(number(float(np.median(r))) for r in (random, ranks)),
                *(number(f(regret), 1, 100) for f in (np.median, np.max)),
            ]
        )
    header = [
        "times from",
        "latency error %",
        "period error %",
        "rank correlation",
        "of those that ran",
        "regret of the plan %",
        "worst %",
    ]
    return to_table(header, cells)


def strategies(found: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: seconds of a plan from the static description, and what it loses."""
    cells = []
    for case in found:
        static, search = case["seconds"]["static"], case["seconds"]["measuring and searching"]
        loss = case["measured"]["static"][1] / case["measured"]["search, measured"][1] - 1
        cells.append(
            [
                case["model"],
                number(static, 3),
                number(search, 1),
                number(search / static, 0, unit="x"),
                number(loss, 1, 100),
            ]
        )
    header = ["model", "static s", "measuring and searching s", "faster", "slower plan %"]
    return to_table(header, cells)


def report(
    found: Sequence[Answer], rows: Sequence[Row], plans: Sequence[Mapping[str, Any]], command: str
) -> str:
    """The Markdown of the results."""
    families = len({r.family for r in rows})
    parts = [
        f"# Predicted times of operators\n\n`{command}`\n",
        f"## Whole models of {families} families, each predicted from the others\n",
        "The last column: by how much two halves of the same measurement differ.\n",
        whole_models(rows),
        "## Operators by kind\n",
        operators(found),
        "## Measurement saved\n",
        "Whole-model error where the operators with the largest spread are measured.\n",
        saved(found),
    ]
    if plans:
        parts += [
            f"## Placements on two devices, {len(plans)} models\n",
            "Regret: measured period of the plan searched with these times over that of the plan "
            "searched with measured times. Rank correlation: Spearman's, of the simulated periods "
            f"of {NUM_RANKED} random placements with these and with measured times, and of the "
            "few placements that ran, most of which are about as good; medians over models. The "
            "published bound for periods is 12 %.\n",
            placed(plans),
            "## Plans from the static description alone\n",
            strategies(plans),
        ]
    return "\n".join(parts) + "\n" + provenance()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seconds", type=float, default=1000.0, help="of measuring; 0: none")
    parser.add_argument("--dataset", type=Path, default=ROOT / "runs" / "prediction" / "dataset")
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    common_options(parser, "prediction")
    parser.set_defaults(out=RESULTS)
    options = parser.parse_args(argv)

    def study() -> None:
        torch.set_num_threads(1)
        if options.seconds > 0:
            measure_all(options.dataset, options.work, options.seconds)
        known = cases(options.dataset)
        found = answers(known, options.methods)
        rows = [row_of(a) for a in found]
        files = (options.work / f"{name}.json" for name in PLACED)
        plans = [json.loads(path.read_text()) for path in files if path.exists()]
        write_atomic(options.out / "prediction.csv", to_csv(rows))
        text = report(found, rows, plans, command_line("experiments.prediction", argv))
        write_atomic(options.out / "prediction.md", text)
        print(text)

    return launch(study)


if __name__ == "__main__":
    raise SystemExit(main())
