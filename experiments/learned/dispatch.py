"""A constructor of orders and devices, trained and untrained, on problems that it never saw.

Alone, in the planner ``policy``, and after short trainings that each lack something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from envs.generators import Generator
from experiments.grid import digest_of, least
from experiments.learned.problems import DRAWN, REAL, unseen
from experiments.learned.study import trained, untrained_dispatcher
from experiments.study import RESULTS, Option, Options, Study, digest, say
from experiments.tables import Column, Mean, geometric, groups, read_csv, table, to_csv
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
UNTRAINED, TRAINED, UNIFORM = "untrained", "trained", "uniform"
# Features with ranks, longest paths, or what follows in them (``dispatch_kernels.PAIR_FEATURES``).
AHEAD = [0, 1, 2, 4, 20, 21, 35, 37, 38, 39, 40]
# Short trainings: what is different in the command.
SHORT = {
    "PPO": (),
    "labels": ("+training.algorithm_options.imitate=true",),
    "no look-ahead": (f"+training.algorithm_options.without={AHEAD}",),
    # Of rates of 0.001, 0.005, 0.02 and 0.06 the best by the training's own checks.
    "no hidden layers": ("training.network.scorer=0", "training.learning_rate=2e-2"),
}
TUNED = "rule, tuned"
SAMPLES = (1, 16, 64)  # 1: one greedy decode
SHOPS = ("mk", "edata", "rdata", "vdata", "other shops")
# Of these every so-many-th is searched; of the drawn and real graphs all.
EVERY = {"mk": 1, "edata": 4, "rdata": 4, "vdata": 4, "other shops": 8}
SEARCHED = {
    "shops": SHOPS,
    "graphs of 300 to 1,600 operators": (DRAWN, REAL),
    "drawn ones": (DRAWN,),
    "captured and public ones": (REAL,),
}
EVALUATIONS = 2000  # of the planner
PLANNER, FROZEN = "policy", "policy, untrained"  # the planner


@dataclass(frozen=True)
class Row:
    """The best of so many decodes of one problem, in the problem's seconds.

    ``samples`` of the planner are its evaluations. ``known_s`` is the best value known, proved or
    not; None where nobody published any.
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
            problem = replace(families()[name](seed), objective=Objective.LATENCY)
            yield "families", f"{name}-{seed}", problem, None
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


class Who(NamedTuple):
    """Who decodes: a network, how much the rule counts, and its weights if they are others."""

    name: str
    seed: int
    net: Any
    scale: float
    digest: str  # of what was trained
    rule: tuple[float, ...] = ()


def decoders(options: Options) -> Iterator[Who]:
    """Untrained and uniform ones, the policies, and those that are trained here."""
    from agents.trained import TrainedPolicy, untrained_net

    new = untrained_net(None, "dispatch")
    yield Who(UNTRAINED, 0, new, 4.0, "")
    yield Who(UNIFORM, 0, new, 1e-9, "")
    files = {TRAINED: seeds(options.policies)}
    for name in SHORT:
        files[name] = {k: trained_short(name, k, options) for k in range(options.seeds)}
    for name, paths in files.items():
        for seed, path in paths.items():
            net: Any = TrainedPolicy.load(path).net
            yield Who(name, seed, net, net.config.finish_weight, digest_of(path))
    for seed in range(options.seeds):
        rule = tuned(seed, options)
        yield Who(TUNED, seed, new, 4.0, digest(rule), rule)


def seeds(policies: Sequence[str]) -> dict[int, str]:
    """The policies by the seed of their training."""
    from agents.trained import TrainedPolicy

    return {int(TrainedPolicy.load(p).card["config"]["seed"]): p for p in policies}


def trained_short(name: str, seed: int, options: Options) -> str:
    """The file of one of the ``SHORT`` trainings."""
    from hydra import compose, initialize_config_module
    from hydra.utils import instantiate

    with initialize_config_module("conf", version_base="1.3"):
        cfg = compose("train", ["experiment=released_dispatch", *SHORT[name]])
    config = instantiate(cfg.training, _convert_="all")
    config = replace(config, total_steps=options.steps, seed=seed, num_checks=5)
    return str(trained(name, config, options.work, baseline=load("heft"))[0])


def tuned(seed: int, options: Options) -> tuple[float, ...]:
    """Weights of the rule by differential evolution, for as many steps as a short training."""
    from envs.generators import Latency

    def evolve() -> dict[str, Any]:
        say(f"{TUNED}, seed {seed}")
        return {"weights": evolved(Latency(), seed, options.steps)}

    row = options.finished.row(dict, [TUNED, seed, options.steps], evolve, f"{TUNED}-{seed}")
    return tuple(row["weights"])


def evolved(draw: Generator, seed: int, steps: int, count: int = 100) -> list[float]:
    """Weights of the rule, by differential evolution over ``count`` problems, in so many steps."""
    from scipy.optimize import differential_evolution

    from envs.dispatch import MIXED, Dispatcher, no_network

    rng = np.random.default_rng(seed)
    episodes = [Dispatcher(draw(rng)) for _ in range(count)]
    members = 4 * len(MIXED)
    generation = members * sum(e.problem.num_ops for e in episodes)

    def mean_log(weights: Any) -> float:
        for episode in episodes:
            episode.tables.rule[:] = weights
            episode.construct(no_network(), 1.0)
        values = np.array([e.value_s() for e in episodes])
        return float(np.log(np.where(np.isfinite(values), values, 1e9)).mean())

    # Above 0 the last one says that channels are busy.
    bounds = [(0.0, 4.0)] * (len(MIXED) - 1) + [(-1.0, 1.0)]
    fit = differential_evolution(
        mean_log, bounds, popsize=4, maxiter=max(1, steps // generation - 1), x0=MIXED,
        rng=seed, polish=False, tol=0.0,
    )  # fmt: skip
    weights: list[float] = fit.x.tolist()
    return weights


def searched(options: Options) -> Iterator[tuple[str, str, Problem, float | None]]:
    """What the planner is run on: some of the shops, and larger graphs."""
    seen: Counter[str] = Counter()
    for suite, name, problem, known_s in problems(options):
        if suite in EVERY:
            if seen[suite] % EVERY[suite] == 0:
                yield suite, name, problem, known_s
            seen[suite] += 1
    for suite, more in unseen(options.data).items():
        for name, problem in more.items():
            yield suite, name, problem, None


def decodes_of(who: str) -> tuple[int, ...]:
    """How many of each problem."""
    return SAMPLES[: 1 if who in RULES else 2 if who in (*SHORT, TUNED) else 3]


def finished(options: Options, what: list[Any], make: Callable[[], list[float]]) -> list[float]:
    """Values of a problem that are decided by ``what``."""
    name = f"{what[0]}-{what[1]}"
    row = options.finished.row(dict, what, lambda: {"values": make()}, name)
    values: list[float] = row["values"]
    return values


def rows(options: Options) -> Iterator[Row]:
    """Of the planner, then of one decode and more; what is not asked for stays as it is."""
    committed = [] if options.only is None else STUDY.read(RESULTS)
    for part in (planned, decoded):
        if options.only in (None, part.__name__):
            yield from part(options)
        else:
            yield from (r for r in committed if (r.samples == EVALUATIONS) is (part is planned))


def planned(options: Options) -> Iterator[Row]:
    """The planner with every trained constructor, and with the seed of each untrained."""

    def plan(problem: Problem, **settings: Any) -> list[float]:
        return [load("policy", evaluations=EVALUATIONS, **settings)(problem).value_s]

    new = untrained_dispatcher(options)
    for suite, name, problem, known_s in searched(options):
        for seed, path in seeds(options.policies).items():
            for planner, file in ((PLANNER, path), (FROZEN, new)):
                what = [suite, name, planner, digest_of(file), seed]
                (value,) = finished(options, what, partial(plan, problem, policy=file, seed=seed))
                yield Row(suite, name, planner, seed, EVALUATIONS, value, known_s)


def decoded(options: Options) -> Iterator[Row]:
    """Rules, and decodes of all others."""
    from envs.dispatch import Dispatcher

    def decodes(problem: Problem, who: Who) -> list[float]:
        """The greedy decode, then samples; chance has no greedy one."""
        episode = Dispatcher(problem, who.rule) if who.rule else Dispatcher(problem)
        weights = who.net.weights(problem)
        values = []
        for sample in range(decodes_of(who.name)[-1]):
            greedy = sample == 0 and who.name != UNIFORM
            episode.construct(weights, who.scale, None if greedy else sample)
            values.append(episode.value_s())
        return values

    def ruled(problem: Problem) -> list[float]:
        return [value_of(problem, load(rule)(problem)) for rule in RULES]

    values_of = partial(finished, options)
    deciding = list(decoders(options))
    for suite, name, problem, known_s in problems(options):
        values = values_of([suite, name, "rules", ""], partial(ruled, problem))
        for rule, value in zip(RULES, values, strict=True):
            yield Row(suite, name, rule, 0, 1, value, known_s)
        for who in deciding:
            values = values_of([suite, name, who.name, who.digest], partial(decodes, problem, who))
            for samples in decodes_of(who.name):
                yield Row(suite, name, who.name, who.seed, samples, min(values[:samples]), known_s)


def over(rows: Sequence[Row], who: str, samples: int, base: str | None) -> dict[str, list[float]]:
    """Values over those of ``base`` with as many samples (None: over the best known).

    Over that of the same seed, where ``base`` has several.
    """
    some = [r for r in rows if r.samples == samples]
    theirs = least(some, [base or ""])  # type: ignore[arg-type]
    ratios: dict[str, list[float]] = {}
    for name, mine in groups((r for r in some if r.who == who), "problem").items():
        references = [theirs(name, r.seed) if base else r.known_s for r in mine]
        values = [r.value_s for r in mine]
        if all(references) and np.isfinite([*values, *references]).all():
            ratios[name] = [v / x for v, x in zip(values, references, strict=True)]
    return ratios


def searches(rows: Sequence[Row], which: Sequence[str]) -> Mean:
    """The planner over itself untrained, in these suites."""
    return geometric(over([r for r in rows if r.suite in which], PLANNER, EVALUATIONS, FROZEN))


def trainings(rows: Sequence[Row], who: str) -> int:
    """How many are in the rows."""
    return len({r.seed for r in rows if r.who == who})


def parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    """All tables."""
    decodes = [r for r in rows if r.samples in SAMPLES]
    suites_of = list(groups(decodes, "suite").items())

    def lines(base: str | None, who: Sequence[str]) -> list[dict[str, Any]]:
        table_rows = []
        for name in who:
            for samples in decodes_of(name):
                label = f"{name} (hand-written)" if name in RULES else name
                row: dict[str, Any] = {"who": label, "decodes": samples}
                for suite, mine in suites_of:
                    row[suite] = geometric(over(mine, name, samples, base)).percent()
                table_rows.append(row)
        return table_rows

    known = [suite for suite, mine in suites_of if mine[0].known_s]
    every = [suite for suite, _ in suites_of]
    there = {r.who for r in decodes}
    field = [w for w in (*RULES, UNTRAINED, UNIFORM, TRAINED) if w in there]
    short = [w for w in (*SHORT, TUNED) if w in there]

    def columns(names: Sequence[str]) -> list[Column]:
        return [Column(x, x) for x in ("who", "decodes", *names)]

    return {
        "against": table(lines(UNTRAINED, field), *columns(every)),
        "short": table(lines(UNTRAINED, short), *columns(every)),
        "short_ppo": table(lines("PPO", short[1:]), *columns(every)),
        "short_seeds": trainings(rows, TUNED),
        "gaps": table(lines(None, field), *columns(known)),
        "counts": ", ".join(f"{suite} {len(groups(mine, 'problem'))}" for suite, mine in suites_of),
        "seeds": trainings(rows, TRAINED),
        "searched": table(
            list(SEARCHED.items()),
            Column("problems", lambda x: x[0]),
            Column("number", lambda x: searches(rows, x[1]).count),
            Column("trainings", lambda x: trainings(rows, PLANNER)),
            Column("trained against untrained", lambda x: searches(rows, x[1]).percent()),
        ),
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
    from agents.dispatch import DispatchConfig, DispatchNet, answer
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
        net = DispatchNet(DispatchConfig(scorer=len(state["net"]["pair.bias"])))
        net.load_state_dict(state["net"])
        for suite, ps in chosen.items():
            logs = np.log([answer(net, p)[1] for p in ps])
            ratio = float(np.exp((logs - base[suite]).mean()))
            points.append(Point(file.name.partition(".")[0], int(state["steps"]), suite, ratio))
    return points


def files(rows: Sequence[Row], options: Options) -> dict[str, str]:
    name = f"{NAME}_curve.csv"
    if options.checkpoints is None:
        return {}
    points = curve(options)
    seen = {(p.run, p.steps) for p in points}
    # Points of checkpoints that are no longer there stay.
    committed = [p for p in read_csv(Point, RESULTS / name) if (p.run, p.steps) not in seen]
    options.points = sorted(committed + points, key=lambda p: (p.run, p.steps, p.suite))
    return {name: to_csv(options.points)}


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
            y = [100 * (p.ratio - 1) for p in line]
            axis.plot(x, y, color=colour, lw=1.2, label=f"seed {line[0].run[-1]}")
        axis.axhline(0.0, color=gantt.FAINT, lw=0.8)
        axis.set_title(suite, loc="left", fontsize=10, color=gantt.INK)
        axis.set_xlabel("million steps", fontsize=9, color=gantt.INK)
        axis.set_ylabel("% over untrained", fontsize=9, color=gantt.INK)
        gantt.plain_axis(axis)
    figure.tight_layout()
    figure.legend(*axis.get_legend_handles_labels(), loc=(0.8, 0.15), frameon=False, fontsize=9)
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
        "only": Option(None, "make these rows alone", choices=("planned", "decoded")),
        "steps": Option(5_000_000, "of each short training"),
        "seeds": Option(3, "of each of these"),
        "graphs": Option(6, "of each family"),
        "most": Option(500, "operations of a shop"),
        "checkpoints": Option(None, "folder of checkpoints, for the curve"),
    },
    facts=lambda options: {"policies": options.policies},
)
