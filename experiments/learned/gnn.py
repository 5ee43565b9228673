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
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.perturbation import Perturbation
from envs.problem_set import canonical
from experiments.learned.folds import (
    BEST_RULE,
    DATASET,
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
    rounded,
    untrained,
)
from experiments.runs import warm
from experiments.study import Option, Options, Study, StudyError, say
from experiments.tables import Column, Mean, geometric, table
from placement.objective import Objective
from placement.problem import Problem, Solution
from placement.simulator import value_of
from placement.tools.files import write_atomic

if TYPE_CHECKING:
    from agents.trained import TrainedPolicy
    from agents.training import TrainConfig

NAME = "learned_gnn"
TRAINED = "trained"
FOLD = 4  # that is judged
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
    machine: str
    problem: str
    family: str
    operators: int
    arm: str
    few_s: float
    leaves: int | None
    by_100_ms: float | None


@dataclass(frozen=True, eq=False)
class Case:
    """A problem that is judged, or chooses."""

    machine: str
    name: str
    family: str
    problem: Problem


def drawn(family: str, objective: str, count: int, most: int) -> list[Case]:
    """Of a family so many graphs, drawn: the first on four devices, others on unlike ones.

    Fewer where fewer have ``LEAST`` to ``most`` operators.
    """
    rng = np.random.default_rng([SPLIT_SEED, FOLD, list(families()).index(family)])
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


def judged(objective: str) -> list[Case]:
    """One graph of each family that is judged, on four devices, then on unlike ones."""
    cases = [c for name in folds()[FOLD] for c in drawn(name, objective, 1, 10**9)]
    rng = np.random.default_rng([SPLIT_SEED, FOLD])
    return [*cases, *(on_unlike(case, rng) for case in cases)]


def chosen(objective: str, choosing: bool) -> list[Case]:
    """Those of the training folds: of families that choose, or that are trained on."""
    names = [name for k, name in enumerate(others(FOLD)) if (k % VALIDATED == 0) == choosing]
    return [case for name in names for case in drawn(name, objective, GRAPHS, MOST)]


# --- training ------------------------------------------------------------------------------------


def configured(options: Options) -> TrainConfig:
    """What is trained."""
    from agents.training import TrainConfig

    return TrainConfig(
        total_steps=options.steps, num_envs=128, steps_per_env=128, repeats=8, epochs=3,
        minibatches=4, num_checks=CHECKS, learning_rate=1e-3, last_learning_rate=5e-5,
        entropy=0.01, last_entropy=0.002, gae_lambda=1.0, reward="envs.rewards:improvement",
        algorithm_options={"vf_coef": 0.05}, network=PPO_NETWORK,
    )  # fmt: skip


def trained(objective: str, options: Options) -> list[Path]:
    """Weights of every check after the first, by step; an interrupted training goes on."""
    from agents.training import train

    folder = options.work / objective
    last, seen = folder / "last.safetensors", set[int]()

    def keep(row: dict[str, float]) -> None:
        written = last.stat().st_mtime_ns
        if row["steps"] and written not in seen:
            shutil.copy(last, folder / f"check-{int(row['steps']):09}.safetensors")
            say(f"{objective}: {row['steps']:,.0f} steps, greedy {row['greedy_speedup']:.4f}x")
        seen.add(written)

    if not (folder / "done").is_file():
        say(f"{objective}: training")
        problems = [case.problem for case in chosen(objective, False)]
        train(
            problems, config=configured(options), baseline=RulesThenDecodes(), out_dir=folder,
            resume=True, callback=keep,
        )  # fmt: skip
        write_atomic(folder / "done", "")
    return sorted(folder.glob("check-*.safetensors"))


def few(policy: TrainedPolicy, problem: Problem, start: Solution) -> Solution:
    """The best of the start, a greedy decode and samples from it; ``stats`` tell them apart."""
    from agents.planner import PolicyPlanner

    planner = PolicyPlanner(policy, k=SAMPLES, search=False, baseline=lambda _: start, margin=0.0)
    return planner(problem)


def release(objective: str, options: Options) -> None:
    """Train, choose among the weights that were kept, and put them where they ship."""
    from agents.trained import RELEASED, TrainedPolicy

    cases = chosen(objective, True)
    starts = [RulesThenDecodes()(case.problem) for case in cases]

    def gain(path: Path) -> float:
        policy = TrainedPolicy.load(path)
        pairs = zip(cases, starts, strict=True)
        logs = [np.log(few(policy, c.problem, s).value_s / s.value_s) for c, s in pairs]
        return float(np.mean(logs))

    files = [untrained(options, "sequential"), *trained(objective, options)]
    gains = {path.stem: gain(path) for path in files}
    for name, value in gains.items():
        say(f"{objective}, {name}: {100 * np.expm1(value):+.3f} % on {len(cases)} that choose")
    best = min(files[1:], key=lambda path: gains[path.stem])
    policy = TrainedPolicy.load(best)
    policy.card["chosen"] = gains
    policy.save(RELEASED / f"gnn-{objective}.safetensors")


# --- judging -------------------------------------------------------------------------------------


def by_100_ms(planner: RulesThenDecodes, problem: Problem) -> float | None:
    """The least value by so much processor time."""
    run = answered(planner, 0, problem, SECONDS)
    if run.value is None:
        return None
    curve = run.value.stats["curve"]
    return rounded(best_by(SECONDS, curve, value_of(problem, run.value)))


def files_of(objective: str, options: Options) -> dict[str, Path]:
    """The files of both arms.

    Raises:
        StudyError: none is released.
    """
    from agents.trained import PolicyError, file_of

    try:
        file = file_of(f"gnn-{objective}")
    except PolicyError as error:
        raise StudyError(f"{error}; python -m experiments.learned gnn --train") from error
    return {UNTRAINED: untrained(options, "sequential"), TRAINED: file}


def rows(options: Options) -> Iterator[Row] | None:
    """Of what is released; with ``--train`` that is made, and None."""
    import torch

    torch.set_num_threads(1)
    for objective in options.train:
        release(objective, options)
    return None if options.train else (row for o in OBJECTIVES for row in rows_of(o, options))


def rows_of(objective: str, options: Options) -> Iterator[Row]:
    """Of one objective."""
    from agents.trained import TrainedPolicy

    files = files_of(objective, options)
    policies = {arm: TrainedPolicy.load(path) for arm, path in files.items()}
    warm(RULES, [Objective(objective)])
    for number, case in enumerate(judged(objective)):
        if not number:  # kernels, before processes are forked
            RulesThenDecodes(str(files[UNTRAINED]), builds=True, seconds=0.5)(case.problem)
        say(f"{objective}, {case.machine}, {case.name}")
        start = RulesThenDecodes()(case.problem)
        facts = (objective, case.machine, case.name, case.family, case.problem.num_ops)
        rules_s = by_100_ms(RulesThenDecodes(), case.problem)
        yield Row(*facts, BEST_RULE, float(f"{start.value_s:.6g}"), None, rules_s)
        for arm, policy in policies.items():
            value_s = few(policy, case.problem, start).value_s
            by_s = by_100_ms(RulesThenDecodes(str(files[arm]), builds=True), case.problem)
            moved = int(leaves(policy, case.problem, start))
            yield Row(*facts, arm, float(f"{value_s:.6g}"), moved, by_s)


def leaves(policy: TrainedPolicy, problem: Problem, start: Solution) -> bool:
    """Whether a greedy decode is another placement than the start."""
    greedy = policy.place(problem, start.placement)[0]
    return bool((greedy != canonical(problem, start.placement)).any())


# --- the page ------------------------------------------------------------------------------------


def against(rows: Sequence[Row], arm: str, base: str, column: str) -> Mean:
    """Values of an arm over those of another; the rules have as long as they need."""
    key = "few_s" if base == BEST_RULE else column
    values = {(r.machine, r.problem): getattr(r, key) for r in rows if r.arm == base}
    ratios = {
        (r.family, r.machine, r.problem): [value / other]
        for r in rows
        if r.arm == arm
        and (value := getattr(r, column)) is not None
        and (other := values[r.machine, r.problem]) is not None
    }
    return geometric(ratios, family=lambda problem: problem[0])


def parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    lines = [(o, c) for o in OBJECTIVES for c in ("few_s", "by_100_ms")]

    def of(line: tuple[str, str], arm: str, base: str) -> str:
        return percent(against([r for r in rows if r.objective == line[0]], arm, base, line[1]))

    def leaving(objective: str, arm: str) -> str:
        mine = [r.leaves for r in rows if (r.objective, r.arm) == (objective, arm)]
        return f"{sum(filter(None, mine))} of {len(mine)}"

    return {
        "table": table(
            lines,
            Column("objective", lambda x: x[0]),
            Column("budget", lambda x: "33 decodes" if x[1] == "few_s" else "100 ms"),
            Column("trained against untrained", lambda x: of(x, TRAINED, UNTRAINED)),
            Column("trained against the best of rules", lambda x: of(x, TRAINED, BEST_RULE)),
            Column("untrained against the best of rules", lambda x: of(x, UNTRAINED, BEST_RULE)),
        ),
        "leaves": "; ".join(
            f"{o} {leaving(o, TRAINED)}, untrained {leaving(o, UNTRAINED)}" for o in OBJECTIVES
        ),
        "graphs": len({(r.machine, r.problem) for r in rows}),
        "families": len({r.family for r in rows}),
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
    },
)
