"""A constructor of orders and devices, trained and untrained, on problems that it never saw."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.study import Option, Options, Study
from experiments.tables import Column, geometric, groups, table, to_csv
from placement.objective import Objective
from placement.planners import load
from placement.problem import Problem
from placement.report import gantt
from placement.simulator import value_of
from placement.workloads import suites
from placement.workloads.synthetic import families, giph

NAME = "learned_dispatch"
FAMILIES = ("layered", "layered_wide", "towers", "lstm_grid", "butterfly", "mixture_of_experts",
            "u_net")  # fmt: skip
RULES = ("heft", "peft", "critical_path_first", "m_etf")
UNTRAINED, TRAINED, LINEAR, UNIFORM = "untrained", "trained", "linear, trained", "uniform"
SAMPLES = (1, 16, 64)  # 1: one greedy decode


@dataclass(frozen=True)
class Row:
    """The best of so many decodes of one problem, in the problem's seconds.

    ``known_s`` is the best value known, proved or not; None where nobody published any.
    """

    suite: str
    problem: str
    who: str
    seed: int | None
    samples: int
    value_s: float
    known_s: float | None = None

    @property
    def group(self) -> str:
        """Suite and number of decodes: what is compared with each other."""
        return f"{self.suite}, {self.samples}"

    @property
    def planner(self) -> str:
        """As rows of the other studies call who decided."""
        return self.who

    @property
    def objective(self) -> str:
        """That of all problems here."""
        return "latency"


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
    for case in suites.cases("stg", options.data)[::4]:
        yield "stg", f"{case.problem}/{case.devices}", case.load(), case.best_known


def rows(options: Options) -> Iterator[Row]:
    from agents.dispatch import DispatchNet
    from agents.trained import TrainedPolicy, untrained_net
    from envs.dispatch import Dispatcher

    new: DispatchNet = untrained_net(None, "dispatch")
    files = [(TRAINED, i, path) for i, path in enumerate(options.policies)]
    files += [(LINEAR, i, path) for i, path in enumerate(options.linear)]
    nets = [(UNTRAINED, 0, new, 4.0, ""), (UNIFORM, 0, new, 1e-9, "")]
    for who, seed, path in files:
        net = TrainedPolicy.load(path).net
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        nets.append((who, seed, net, net.config.finish_weight, digest))

    def decoded(problem: Problem, net: DispatchNet, scale: float) -> list[float]:
        """The greedy decode, then samples; chance has no greedy one."""
        episode, weights = Dispatcher(problem), net.weights()
        values = []
        for sample in range(max(SAMPLES)):
            episode.construct(weights, scale, None if sample == 0 and scale > 1e-6 else sample)
            values.append(episode.value_s())
        return values

    def ruled(problem: Problem) -> list[float]:
        return [value_of(problem, load(rule)(problem)) for rule in RULES]

    def made(what: list[str], make: Callable[[], list[float]]) -> list[float]:
        name = f"{what[0]}-{what[1]}"
        row = options.finished.row(dict, what, lambda: {"values": make()}, name)
        found: list[float] = row["values"]
        return found

    for suite, name, problem, known_s in problems(options):
        values = made([suite, name, "rules", ""], partial(ruled, problem))
        for rule, value in zip(RULES, values, strict=True):
            yield Row(suite, name, rule, 0, 1, value, known_s)
        for who, seed, net, scale, digest in nets:
            values = made([suite, name, who, digest], partial(decoded, problem, net, scale))
            for samples in SAMPLES:
                yield Row(suite, name, who, seed, samples, min(values[:samples]), known_s)


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
                label = f"{name} (hand-written)" if name in RULES else name
                row: dict[str, Any] = {"who": label, "decodes": samples}
                for suite, mine in suites_of:
                    row[suite] = geometric(over(mine, name, samples, base)).percent()
                made.append(row)
        return made

    known = [suite for suite, mine in suites_of if mine[0].known_s]
    every = [suite for suite, _ in suites_of]
    field = [w for w in dict.fromkeys(r.who for r in rows)]

    def columns(names: Sequence[str]) -> list[Column]:
        return [Column(x, x) for x in ("who", "decodes", *names)]

    return {
        "against": table(lines(UNTRAINED, field), *columns(every)),
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
    from agents.encoder import NetworkConfig
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
        net = DispatchNet(NetworkConfig(scorer=len(state["net"]["pair.bias"])))
        net.load_state_dict(state["net"])
        for suite, ps in chosen.items():
            logs = np.log([answer(net, p)[1] for p in ps])
            ratio = float(np.exp((logs - base[suite]).mean()))
            points.append(Point(file.name.partition(".")[0], int(state["steps"]), suite, ratio))
    return points


def files(rows: Sequence[Row], options: Options) -> dict[str, str]:
    if options.checkpoints is None:
        return {}
    options.points = curve(options)
    return {f"{NAME}_curve.csv": to_csv(options.points)}


def plot(rows: Sequence[Row], path: Path, options: Options) -> None:
    """What was learned by when: a panel for each suite, a line for each run."""
    points = getattr(options, "points", [])
    if not points:
        return
    figure = gantt.figure_class()(figsize=(10, 5.4), dpi=150)
    suites_of = groups(points, "suite")
    panels = figure.subplots(2, 4).flat
    for axis in panels[len(suites_of) :]:
        axis.set_axis_off()
    for axis, (suite, mine) in zip(panels, suites_of.items(), strict=False):
        for colour, line in zip(gantt.COLOURS, groups(mine, "run").values(), strict=False):
            line = sorted(line, key=lambda p: p.steps)
            x = [p.steps / 1e6 for p in line]
            axis.plot(x, [100 * (p.ratio - 1) for p in line], color=colour, lw=1.2)
        axis.axhline(0.0, color=gantt.FAINT, lw=0.8)
        axis.set_title(suite, loc="left", fontsize=10, color=gantt.INK)
        axis.set_xlabel("million steps", fontsize=9, color=gantt.INK)
        axis.set_ylabel("% over untrained", fontsize=9, color=gantt.INK)
        gantt.plain_axis(axis)
    figure.tight_layout()
    gantt.save_figure(figure, path)


STUDY = Study(
    name=NAME,
    word="dispatch",
    module="experiments.learned",
    rows=rows,
    row=Row,
    parts=parts,
    files=files,
    plot=plot,
    options={
        "policies": Option([], "a trained policy, one for each seed", metavar="FILE"),
        "linear": Option([], "one without hidden layers", metavar="FILE"),
        "graphs": Option(6, "of each family"),
        "most": Option(500, "operations of a shop"),
        "checkpoints": Option(None, "folder of checkpoints, for the curve"),
    },
    facts=lambda options: {"policies": options.policies},
)
