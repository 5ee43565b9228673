"""A constructor of orders and devices, trained and untrained, on problems that it never saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.study import Option, Options, Study
from experiments.tables import Column, geometric, groups, to_csv
from placement.objective import Objective
from placement.planners import load
from placement.problem import Problem
from placement.simulator import value_of
from placement.workloads import suites
from placement.workloads.synthetic import families, giph

FAMILIES = ("layered", "layered_wide", "towers", "lstm_grid", "butterfly", "mixture_of_experts",
            "u_net")  # fmt: skip
RULES = ("heft", "peft", "critical_path_first", "m_etf")
UNTRAINED, TRAINED, LINEAR, UNIFORM = "untrained", "trained", "linear, trained", "uniform"
SAMPLES = (1, 16, 128)  # 1: one greedy decode


@dataclass(frozen=True)
class Row:
    """The best of so many decodes of one problem, in the problem's seconds.

    ``known_s`` is the best value known, proved or not; None where nobody published any.
    """

    suite: str
    problem: str
    who: str
    seed: int
    samples: int
    value_s: float
    known_s: float | None = None


def problems(options: Options) -> Iterator[tuple[str, str, Problem, float | None]]:
    """Suite, name, problem and best known value."""
    for name in FAMILIES:
        for seed in range(900, 900 + options.graphs):
            made = replace(families()[name](seed), objective=Objective.LATENCY)
            yield "families", f"{name}-{seed}", made, None
    for seed in range(900, 900 + options.graphs):
        yield "giph", f"giph-{seed}", giph(seed), None
    for kind, pattern in (
        ("mk", "mk*"), ("edata", "la*_edata"), ("rdata", "la*_rdata"), ("vdata", "la*_vdata"),
        ("other shops", "[!lm]*"),
    ):  # fmt: skip
        for case in suites.cases("shops", options.data, only=pattern):
            problem = case.load()
            if case.best_known and problem.num_ops <= options.most:
                yield kind, case.problem, problem, case.best_known * case.unit_s
    for case in suites.cases("stg", options.data):
        yield "stg", f"{case.problem}/{case.devices}", case.load(), case.best_known


def rows(options: Options) -> Iterator[Row]:
    from agents.dispatch import DispatchNet
    from agents.trained import TrainedPolicy, untrained_net
    from envs.dispatch import Dispatcher

    def net_of(path: str) -> DispatchNet:
        return TrainedPolicy.load(path).net

    nets = [(UNTRAINED, 0, untrained_net(None, "dispatch"))]
    nets += [(TRAINED, i, net_of(path)) for i, path in enumerate(options.policies)]
    nets += [(LINEAR, i, net_of(path)) for i, path in enumerate(options.linear)]

    def decoded(problem: Problem, net: Any, scale: float) -> list[float]:
        episode, weights = Dispatcher(problem), net.weights()
        values = []
        for sample in range(max(SAMPLES)):
            seed = None if sample == 0 else sample
            episode.construct(weights, scale, seed)
            values.append(episode.value_s())
        return values

    def answers(problem: Problem) -> dict[str, list[float]]:
        found = {f"{who}:{i}": decoded(problem, n, n.config.finish_weight) for who, i, n in nets}
        found[f"{UNIFORM}:0"] = decoded(problem, nets[0][2], 1e-9)[1:]
        for rule in RULES:
            found[f"{rule}:0"] = [value_of(problem, load(rule)(problem))]
        return found

    for suite, name, problem, known_s in problems(options):
        what = [suite, name, options.policies, options.linear, max(SAMPLES)]
        found = options.finished.row(dict, what, lambda p=problem: answers(p), f"{suite}-{name}")
        for key, values in found.items():
            who, _, seed = key.partition(":")
            for samples in SAMPLES if len(values) > 1 else (1,):
                best = min(values[:samples])
                yield Row(suite, name, who, int(seed), samples, best, known_s)


def over(rows: Sequence[Row], who: str, samples: int, base: str | None) -> dict[str, list[float]]:
    """Values over those of ``base`` with as many samples (None: over the best known)."""
    mine = groups((r for r in rows if r.who == who and r.samples == samples), "problem")
    theirs = groups((r for r in rows if r.who == base and r.samples == samples), "problem")
    ratios: dict[str, list[float]] = {}
    for name, found in mine.items():
        reference = found[0].known_s if base is None else theirs[name][0].value_s
        if reference and all(np.isfinite(r.value_s) for r in found) and np.isfinite(reference):
            ratios[name] = [r.value_s / reference for r in found]
    return ratios


def parts(rows: Sequence[Row], options: Options) -> dict[str, str]:
    """Both tables."""
    suites_of = list(groups(rows, "suite").items())

    def lines(base: str | None, who: Sequence[str]) -> list[dict[str, Any]]:
        made = []
        for name in who:
            for samples in SAMPLES if name not in RULES else (1,):
                row: dict[str, Any] = {"who": name, "decodes": samples}
                for suite, mine in suites_of:
                    row[suite] = geometric(over(mine, name, samples, base)).percent()
                made.append(row)
        return made

    from experiments.tables import table

    known = [suite for suite, mine in suites_of if mine[0].known_s]
    every = [suite for suite, _ in suites_of]
    field = [w for w in dict.fromkeys(r.who for r in rows)]

    def columns(names: Sequence[str]) -> list[Column]:
        return [Column(x, x) for x in ("who", "decodes", *names)]

    return {
        "against": table(lines(UNTRAINED, [w for w in field if w not in (UNTRAINED, *RULES)]),
                         *columns(every)),
        "gaps": table(lines(None, field), *columns(known)),
        "counts": ", ".join(f"{suite} {len(groups(mine, 'problem'))}" for suite, mine in suites_of),
    }  # fmt: skip


@dataclass(frozen=True)
class Point:
    """Greedy decodes of the weights of a moment of a training, over the untrained ones."""

    run: str
    steps: int
    suite: str
    ratio: float


def curve(options: Options) -> list[Point]:
    """Of every checkpoint that was kept, on a few problems of each suite."""
    from agents.dispatch import DispatchNet, answer
    from agents.trained import untrained_net

    chosen: dict[str, list[Problem]] = {}
    for suite, _, problem, _ in problems(options):
        if problem.num_ops <= 300:
            chosen.setdefault(suite, []).append(problem)
    chosen = {s: p[:: max(1, len(p) // 40)] for s, p in chosen.items() if s != "stg"}
    untrained = untrained_net(None, "dispatch")
    base = {s: np.log([answer(untrained, p)[1] for p in ps]) for s, ps in chosen.items()}
    points = []
    for file in sorted(Path(options.checkpoints).glob("*.pt")):
        state = torch.load(file, weights_only=True)
        net = DispatchNet()
        net.load_state_dict(state["net"])
        for suite, ps in chosen.items():
            logs = np.log([answer(net, p)[1] for p in ps])
            ratio = float(np.exp((logs - base[suite]).mean()))
            points.append(Point(file.name.partition(".")[0], int(state["steps"]), suite, ratio))
    return points


def files(rows: Sequence[Row], options: Options) -> dict[str, str]:
    if options.checkpoints is None:
        return {}
    return {"learned_dispatch_curve.csv": to_csv(curve(options))}


STUDY = Study(
    name="learned_dispatch",
    word="dispatch",
    module="experiments.learned",
    rows=rows,
    row=Row,
    parts=parts,
    files=files,
    options={
        "policies": Option([], "a trained policy, one for each seed", metavar="FILE"),
        "linear": Option([], "one without hidden layers", metavar="FILE"),
        "graphs": Option(10, "of each family"),
        "most": Option(500, "operations of a shop"),
        "checkpoints": Option(None, "folder of checkpoints, for the curve"),
    },
    facts=lambda options: {"policies": options.policies, "rows": asdict(Row("", "", "", 0, 1, 0))},
)
