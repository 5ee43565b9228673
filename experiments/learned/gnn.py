"""The released message-passing policies: how they are trained, chosen, and what they are worth.

**Written down before the training.** ``gnn-latency`` and ``gnn-period`` are ``sequential``
policies: two layers of GraphSAGE (PyTorch Geometric), trained by PPO (stable-baselines3), the
network of the arm ``PPO`` of ``experiments.learned.folds``. Those folds keep the best greedy check
of a training, of which the untrained network is the first, and that mostly stayed: a greedy decode
begins at the answer of the rules, which is hard to beat. So here

* a placement earns ``envs.rewards:improvement``: what it is worth beside the rules' answer, which
  the planner keeps anyway. Nothing is earned by staying;
* 128 episodes are played side by side, eight of each problem, for ``STEPS`` steps, with seed 0;
* weights are kept at ``CHECKS`` equal steps. The released ones are those, of a step after the
  first, whose best of 1 + ``SAMPLES`` decodes is the shortest on *other families of the training
  folds* (every ``VALIDATED``-th). So what is released was changed by training, whatever that did.

**Graphs.** The measured graphs and folds of ``experiments.learned.folds``. Trained on: of each
family of four folds that does not choose, ``GRAPHS`` graphs of at most ``MOST`` operators, one on
four devices, one on a machine that ``Perturbation`` draws. Judged on: one graph, drawn, of each
family of fold ``FOLD``, on four devices and on unlike ones. No judged family is trained on or
chooses.

**Endpoint**, of each objective by itself: the best of 1 + ``SAMPLES`` decodes from the rules'
answer, over that of the network before its training with the same seed. Training helps where the
upper end of the 95 % interval, with families resampled, is below 0; else the card says that it is
not seen to. A test runs both on 20 of these graphs and asserts no more. Beside it: the same at 100
ms of processor time, rules and decodes, as in the folds; both against the best of all seven rules;
and on how many graphs the greedy decode leaves them. The recipe was chosen when two seeds of the
folds had been seen, of which five families are judged here, too; no trial of it was run before.

``--train latency`` (or ``period``) trains, chooses and releases, about four minutes of a core; the
same command goes on. Without it what is released is judged.

(Written after: the machine was wanted by others, so the trainings were stopped, and the weights of
until then compared, after 5,013,504 steps for latency and 4,505,600 for periods.)

**Written down before the other trainings.** The released ones are of one fold and one seed, and by
them the recipe is known to do something. Whether it does elsewhere: it is run as it is, to
6,000,000 steps, for other folds (``--folds``) and seeds (``--seeds``), with judged families and
those that choose drawn anew for each fold. A training is judged in one go with its network before
it, of the same seed, and the rules. The endpoint is that above over these trainings alone, at 33
decodes, with families, then problems, then seeds resampled; 100 ms stands beside it. Folds 0 to 3
with seed 0 come first, then all folds with seed 1, and so on: as many as there is time for.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.perturbation import Perturbation
from envs.problem_set import canonical
from experiments.learned.folds import (
    BEST_RULE,
    DATASET,
    FOLDS,
    FOUR,
    LEAST,
    OBJECTIVES,
    PPO_NETWORK,
    RULES,
    SPLIT_SEED,
    UNLIKE,
    UNTRAINED,
    RulesThenDecodes,
    answered,
    best_by,
    families,
    folds,
    measured,
    others,
    percent,
    policy_of,
    rounded,
    untrained,
)
from experiments.runs import warm
from experiments.study import Option, Options, Study, StudyError, say
from experiments.tables import Column, Mean, geometric, groups, table, to_csv
from placement.objective import Objective
from placement.problem import Problem, Solution
from placement.report.table import geometric_interval
from placement.simulator import value_of
from placement.tools.files import write_atomic

if TYPE_CHECKING:
    from agents.trained import TrainedPolicy
    from agents.training import TrainConfig

NAME = "learned_gnn"
TRAINED = "trained"
FOLD = 4  # that what is released is judged by; its seed is 0
VALIDATED, GRAPHS, MOST = 6, 2, 250
STEPS, CHECKS, SAMPLES = 6_000_000, 12, 32
SECONDS = 0.1


@dataclass(frozen=True)
class Row:
    """What an arm answers on a graph, in the problem's seconds.

    Of ``rules`` the best of all, by whatever time that takes. ``few_s``: the best of the start, a
    greedy decode and the samples; ``leaves``: whether the greedy one is another placement.
    """

    objective: str
    fold: int
    seed: int
    machine: str
    problem: str
    family: str
    operators: int
    arm: str
    few_s: float
    leaves: int | None
    by_100_ms: float | None


@dataclass(frozen=True)
class Unit:
    """A training: of an objective, for a fold, with a seed."""

    objective: str
    fold: int = FOLD
    seed: int = 0

    @property
    def is_released(self) -> bool:
        return (self.fold, self.seed) == (FOLD, 0)

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.objective if self.is_released else f"{self.objective}-{self.fold}-{self.seed}"


@dataclass(frozen=True, eq=False)
class Case:
    """A problem that is judged, or chooses."""

    machine: str
    name: str
    family: str
    problem: Problem


def drawn(family: str, unit: Unit, count: int, most: int) -> list[Case]:
    """Of a family so many graphs, drawn: the first on four devices, others on unlike ones.

    Fewer where fewer have ``LEAST`` to ``most`` operators.
    """
    objective = unit.objective
    rng = np.random.default_rng([SPLIT_SEED, unit.fold, list(families()).index(family)])
    able = [p for p in families()[family] if LEAST <= measured(p, objective).num_ops <= most]
    cases: list[Case] = []
    for which in rng.permutation(len(able))[:count].tolist():
        name = str(able[which].relative_to(DATASET)).removesuffix(".json.gz")
        case = Case(FOUR, name, family, measured(able[which], objective))
        cases.append(case if not cases else on_unlike(case, rng))
    return cases


def on_unlike(case: Case, rng: np.random.Generator) -> Case:
    """The same graph on a machine that is drawn."""
    return replace(case, machine=UNLIKE, problem=Perturbation().draw(case.problem, rng))


def judged(unit: Unit) -> list[Case]:
    """One graph of each family that is judged, on four devices, then on unlike ones."""
    cases = [c for name in folds()[unit.fold] for c in drawn(name, unit, 1, 10**9)]
    rng = np.random.default_rng([SPLIT_SEED, unit.fold])
    return [*cases, *(on_unlike(case, rng) for case in cases)]


def chosen(unit: Unit, choosing: bool) -> list[Case]:
    """Those of the training folds: of families that choose, or that are trained on."""
    pairs = enumerate(others(unit.fold))
    names = [name for k, name in pairs if (k % VALIDATED == 0) == choosing]
    return [case for name in names for case in drawn(name, unit, GRAPHS, MOST)]


# --- training ------------------------------------------------------------------------------------


def configured(unit: Unit, options: Options) -> TrainConfig:
    """What is trained."""
    from agents.training import TrainConfig

    return TrainConfig(
        total_steps=options.steps, seed=unit.seed, num_envs=128, steps_per_env=128, repeats=8,
        epochs=3, minibatches=4, num_checks=CHECKS, learning_rate=1e-3, last_learning_rate=5e-5,
        entropy=0.01, last_entropy=0.002, gae_lambda=1.0, reward="envs.rewards:improvement",
        algorithm_options={"vf_coef": 0.05}, network=PPO_NETWORK,
    )  # fmt: skip


def trained(unit: Unit, options: Options) -> list[Path]:
    """Weights of every check after the first, by step; an interrupted training goes on."""
    from agents.training import train

    folder = options.work / unit.name
    last = folder / "last.safetensors"
    seen = {last.stat().st_mtime_ns} if last.is_file() else set()  # of before an interruption

    def keep(row: dict[str, float]) -> None:
        written = last.stat().st_mtime_ns
        if row["steps"] and written not in seen:
            shutil.copy(last, folder / f"check-{int(row['steps']):09}.safetensors")
            say(f"{unit.name}: {row['steps']:,.0f} steps, greedy {row['greedy_speedup']:.4f}x")
        seen.add(written)

    if not (folder / "done").is_file():
        say(f"{unit.name}: training")
        problems = [case.problem for case in chosen(unit, False)]
        train(
            problems, config=configured(unit, options), baseline=RulesThenDecodes(), out_dir=folder,
            resume=True, callback=keep,
        )  # fmt: skip
        write_atomic(folder / "done", "")
    return sorted(folder.glob("check-*.safetensors"))


def few(policy: TrainedPolicy, problem: Problem, start: Solution, seed: int = 0) -> Solution:
    """The best of the start, a greedy decode and samples from it; ``stats`` tell them apart."""
    from agents.planner import PolicyPlanner

    planner = PolicyPlanner(
        policy, k=SAMPLES, search=False, seed=seed, baseline=lambda _: start, margin=0.0
    )
    return planner(problem)


def before(unit: Unit, options: Options) -> Path:
    """The file of its network before the training."""
    return untrained(options, "sequential", unit.seed)


def best(unit: Unit, options: Options) -> Path:
    """The file of the weights that are chosen; trained now if they are not."""
    from agents.trained import TrainedPolicy

    path: Path = options.work / unit.name / "chosen.safetensors"
    if path.is_file():
        return path
    files = [before(unit, options), *trained(unit, options)]
    cases = chosen(unit, True)
    starts = [RulesThenDecodes()(case.problem) for case in cases]

    def gain(file: Path) -> float:
        policy = TrainedPolicy.load(file)
        pairs = zip(cases, starts, strict=True)
        logs = [np.log(few(policy, c.problem, s).value_s / s.value_s) for c, s in pairs]
        return float(np.mean(logs))

    gains = {file.stem: gain(file) for file in files}
    for name, value in gains.items():
        say(f"{unit.name}, {name}: {100 * np.expm1(value):+.3f} % on {len(cases)} that choose")
    policy = TrainedPolicy.load(min(files[1:], key=lambda file: gains[file.stem]))
    policy.card["chosen"] = gains
    policy.save(path)
    return path


def release(objective: str, options: Options) -> None:
    """Train, choose among the weights that were kept, and put them where they ship."""
    from agents.trained import RELEASED

    shutil.copy(best(Unit(objective), options), RELEASED / f"gnn-{objective}.safetensors")


# --- judging -------------------------------------------------------------------------------------


def by_100_ms(planner: RulesThenDecodes, problem: Problem, seed: int) -> float | None:
    """The least value by so much processor time."""
    run = answered(planner, seed, problem, SECONDS)
    if run.value is None:
        return None
    curve = run.value.stats["curve"]
    return rounded(best_by(SECONDS, curve, value_of(problem, run.value)))


def files_of(unit: Unit, options: Options) -> dict[str, Path]:
    """The files of both arms.

    Raises:
        StudyError: none is released.
    """
    from agents.trained import PolicyError, file_of

    if not unit.is_released:
        return {UNTRAINED: before(unit, options), TRAINED: best(unit, options)}
    try:
        file = file_of(f"gnn-{unit.objective}")
    except PolicyError as error:
        raise StudyError(f"{error}; python -m experiments.learned gnn --train") from error
    return {UNTRAINED: before(unit, options), TRAINED: file}


def rows(options: Options) -> list[Row] | None:
    """Those that are there, and those that are missing; with ``--train`` None, and a release."""
    import torch

    torch.set_num_threads(1)
    for objective in options.train:
        release(objective, options)
    if options.train:
        return None
    there = STUDY.read(options.out)
    for seed, fold, objective in product(range(options.seeds), options.folds, options.objectives):
        unit = Unit(objective, fold, seed)
        if any(unit_of(row) == unit for row in there):
            continue
        made = list(rows_of(unit, options))
        # Another process may have added others meanwhile.
        there = [*STUDY.read(options.out), *made]
        there.sort(key=lambda r: (not unit_of(r).is_released, r.seed, r.fold, r.objective))
        write_atomic(options.out / f"{NAME}.csv", to_csv(there))
    return there


def unit_of(row: Row) -> Unit:
    """The training of a row."""
    return Unit(row.objective, row.fold, row.seed)


def rows_of(unit: Unit, options: Options) -> Iterator[Row]:
    """Of one training."""
    files = files_of(unit, options)
    # Before processes are forked, and before their clocks.
    policies = {arm: policy_of(str(path)) for arm, path in files.items()}
    warm(RULES, [Objective(unit.objective)])
    for number, case in enumerate(judged(unit)):
        if not number:  # kernels, before processes are forked
            RulesThenDecodes(str(files[UNTRAINED]), builds=True, seconds=0.5)(case.problem)
        say(f"{unit.name}, {case.machine}, {case.name}")
        start = RulesThenDecodes()(case.problem)
        row = partial(
            Row, unit.objective, unit.fold, unit.seed, case.machine, case.name, case.family,
            case.problem.num_ops,
        )  # fmt: skip
        rules_s = by_100_ms(RulesThenDecodes(), case.problem, unit.seed)
        yield row(BEST_RULE, float(f"{start.value_s:.6g}"), None, rules_s)
        for arm, policy in policies.items():
            value_s = few(policy, case.problem, start, unit.seed).value_s
            decodes = RulesThenDecodes(str(files[arm]), builds=True)
            by_s = by_100_ms(decodes, case.problem, unit.seed)
            moved = int(leaves(policy, case.problem, start))
            yield row(arm, float(f"{value_s:.6g}"), moved, by_s)


def leaves(policy: TrainedPolicy, problem: Problem, start: Solution) -> bool:
    """Whether a greedy decode is another placement than the start."""
    greedy = policy.place(problem, start.placement)[0]
    return bool((greedy != canonical(problem, start.placement)).any())


# --- the page ------------------------------------------------------------------------------------


def against(rows: Sequence[Row], arm: str, base: str, column: str, trainings: bool = False) -> Mean:
    """Values of an arm over those of another; the rules have as long as they need.

    ``trainings``: these are drawn first, with all that they judge, and families of each then.
    """
    key = "few_s" if base == BEST_RULE else column
    values = {(unit_of(r), r.machine, r.problem): getattr(r, key) for r in rows if r.arm == base}
    ratios: dict[tuple[str, ...], list[float]] = {}
    judged_by: dict[Unit, dict[str, list[float]]] = {}
    for r in rows:
        value, other = getattr(r, column), values.get((unit_of(r), r.machine, r.problem))
        if r.arm == arm and value is not None and other is not None:
            ratios.setdefault((r.family, r.machine, r.problem), []).append(value / other)
            judged_by.setdefault(unit_of(r), {}).setdefault(r.family, []).append(value / other)
    mean = geometric(ratios, family=lambda problem: problem[0])
    if trainings:
        nested = [list(families.values()) for families in judged_by.values()]
        mean = Mean(mean.value, *geometric_interval(nested, 4000), mean.count)
    return mean


def parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    lines = [(o, c) for o in OBJECTIVES for c in ("few_s", "by_100_ms")]
    released = [r for r in rows if unit_of(r).is_released]
    others = [r for r in rows if not unit_of(r).is_released]

    def compared(rows: Sequence[Row], several: bool) -> str:
        def of(line: tuple[str, str], arm: str, base: str, by: bool = False) -> str:
            mine = [r for r in rows if r.objective == line[0]]
            return percent(against(mine, arm, base, line[1], by))

        drawn = [Column("trainings drawn first", lambda x: of(x, TRAINED, UNTRAINED, True))]
        return table(
            lines,
            Column("objective", lambda x: x[0]),
            Column("budget", lambda x: "33 decodes" if x[1] == "few_s" else "100 ms"),
            Column("trained against untrained", lambda x: of(x, TRAINED, UNTRAINED)),
            *(drawn if several else ()),
            Column("trained against the best of rules", lambda x: of(x, TRAINED, BEST_RULE)),
            Column("untrained against the best of rules", lambda x: of(x, UNTRAINED, BEST_RULE)),
        )

    def leaving(objective: str, arm: str) -> str:
        mine = [r.leaves for r in released if (r.objective, r.arm) == (objective, arm)]
        return f"{sum(filter(None, mine))} of {len(mine)}"

    def trainings(objective: str) -> str:
        units = {unit_of(r) for r in others if r.objective == objective}
        by_fold = groups(sorted(units, key=lambda u: (u.fold, u.seed)), "fold")
        told = (f"fold {k} seeds {[u.seed for u in v]}" for k, v in by_fold.items())
        return f"{objective} {len(units)} times ({', '.join(told)})"

    return {
        "table": compared(released, False),
        "leaves": "; ".join(
            f"{o} {leaving(o, TRAINED)}, untrained {leaving(o, UNTRAINED)}" for o in OBJECTIVES
        ),
        "graphs": len({(r.machine, r.problem) for r in released}),
        "families": len({r.family for r in released}),
        "others": compared(others, True),
        "trainings": "; ".join(map(trainings, OBJECTIVES)),
    }


STUDY = Study(
    name=NAME,
    word="gnn",
    module="experiments.learned",
    rows=rows,
    row=Row,
    parts=parts,
    options={
        "train": Option((), "latency, period: train and release them, and judge nothing"),
        "steps": Option(STEPS, "of a training"),
        "objectives": Option(OBJECTIVES, "of what is judged; any number of processes may share"),
        "folds": Option(tuple(range(FOLDS)), "that are judged by"),
        "seeds": Option(1, "of every fold, 0 and on"),
    },
)
