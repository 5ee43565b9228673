"""Leave-architecture-out on measured graphs: does a network that was trained decide better?

**Written down before the first run.** The measured graphs of ``dataset`` (576 of 169 models, 153
families) in five folds by family: a family is in one fold, whatever its sizes, batches and
machines. Networks for a fold are trained on the other four, and judged on graphs of the fold:

* ``four``: each of the two devices twice (``problems.twice_the_devices``);
* ``unlike``: the same on a machine that ``Perturbation`` draws (devices missing, faster, slower);
* ``gpu``: graphs that were measured on an H100 and its CPU, by the networks that never saw their
  family; no network was trained on a machine with a GPU.

Which graphs: ``TESTED`` families of each fold, the first by a seed, and of each one graph, by the
same seed; on the H100 all whose devices are both real. Objectives: latency, and period.

**Arms.** Every arm asks the same seven rules first (``RULES``), then decodes with what is left of
its seconds: greedily, then samples, then parts of the best drawn anew (``agents.dispatch.decode``).
It is never worse than the rules, and what training adds is the difference to ``untrained``.

* ``message passing``: trained on the training folds, three layers of GraphSAGE (PyG);
* ``perceptron``: the same features, learner, steps and layers, which pass no messages;
* ``drawn``: the same network on problems of ``envs.generators:Latency``, of the objective;
* ``labels``: message passing that imitates what searches find on the training folds
  (``order_search`` of latencies, ``macro_search`` of periods, ``LABEL_EVALUATIONS`` each);
* ``tuned rule``: five weights of the rule by differential evolution on the training folds;
* ``untrained``: the network of ``message passing`` before its training, which is the rule.

* ``PPO``: the formulation ``sequential``, stable-baselines3's PPO, two layers of GraphSAGE, trained
  on one graph of each training family from the answer of ``contiguous_dp``; after the rules it
  decodes from their best, greedily and by samples. (Written down later than the others, when
  ``untrained`` had been judged, which for periods never improves on the rules, and before the first
  training of this arm. ``PPO, untrained`` is its network before.)

``message passing``, ``perceptron`` and ``drawn`` learn by ``agents.dispatch.train:GroupRelative``.
Beside them ``rules``, ``contiguous_dp``, ``order_search`` (of latencies), ``best_of`` and
``cp_sat``, each with the whole of every budget.

**Judged** at 10 ms and 100 ms of processor time, on ``four`` at 1 s too, and there the first
``LONG`` graphs of each fold, with seed 0, at 10 s. The network's own time is counted, and that of
the rules; loading packages and kernels is not.

**Endpoint.** ``message passing`` at 100 ms on ``four`` and ``unlike`` together, each objective by
itself: its value over that of the best of all rules (they have ended by then). Reached where the
upper end of the 95 % interval is at or below -1 %: means over seeds, then graphs; the interval
resamples architectures, then seeds. That training is the cause is said only where it is clear of 0
against ``untrained``, too. Secondary: message passing against perceptron; all arms, all budgets.

**Seeds** 0 to 9, in order; a session makes as many as it has time for, and what is finished is in
``results/learned_folds.csv``: the same command goes on with what is missing. ``STEPS`` steps of
training were chosen so that a training takes about 20 seconds of a core, and a seed of all about 20
minutes. The learning rate was chosen before any fold was trained or judged; trials of it and of the
speed saw 19 of the graphs, of any fold, without asking how they are decided there.

(Changed after ten seeds of the endpoint's arms, and all rows made again on one machine: networks
that were trained loaded their file within their seconds, and ``untrained``, which was loaded before
processes are forked, did not; samples of nearby seeds shared most of their draws; searches had the
seconds of their own lower bound in their budget.)
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from envs.generators import Generator, Latency, Pipelines
from envs.perturbation import Perturbation
from envs.problem_set import Sizes, choice_of
from experiments import study
from experiments.grid import MEMORY_BYTES, SLACK
from experiments.learned.dispatch import evolved
from experiments.learned.problems import twice_the_devices
from experiments.learned.study import trained
from experiments.runs import Run, limited, warm
from experiments.study import Option, Options, Study, say
from experiments.tables import DASH, Column, Mean, geometric, groups, table, to_csv
from placement import importers
from placement.bounds import lower_bound
from placement.objective import Objective
from placement.planners import load, solve
from placement.problem import Placement, Planner, Problem, Solution
from placement.report import gantt
from placement.search.evaluation import Search
from placement.search.planner import Budget, prepared
from placement.simulator import value_of
from placement.tools.files import write_atomic

if TYPE_CHECKING:
    from agents.trained import TrainedPolicy

NAME = "learned_folds"
DATASET = study.ROOT / "experiments" / "dataset"
MACHINES = ("intel-r-xeon-r-processor-2-80ghz-d97a5c16", "intel-r-xeon-r-processor-b65e2a3b")
CARD = "nvidia-h100-80gb-hbm3-14-cores"
FOLDS, TESTED, LONG = 5, 5, 1
SPLIT_SEED = 61  # of folds and tested graphs
LEAST = 20  # operators of a graph that is judged
MOST = 500  # of one that is trained on
FOUR, UNLIKE, GPU = "four", "unlike", "gpu"
OBJECTIVES = ("latency", "period")
RULES = ("single_device", "contiguous_dp", "heft", "peft", "m_topo", "m_etf", "m_sct")
BUDGETS_S = (0.01, 0.1, 1.0)
LONG_S = 10.0
STEPS = 1_200_000
ROLLOUT, SAMPLED, CHECKS, RATE = 20_000, 48, 5, 4e-3
LABEL_EVALUATIONS, EPOCHS, IMITATION_RATE = 500, 12, 2e-3
PPO_STEPS, AT_ONCE = 150_000, 8  # of the arm PPO; samples of it side by side
PPO_NETWORK = {"encoder": "sage", "hidden": 32, "layers": 2}
LONGEST_S = 3600.0  # of the wall: the machine may be busy with others
SAMPLES = 64  # before parts of the best are drawn anew
GOAL = -0.01
MESSAGES, PERCEPTRON, DRAWN, LABELS = "message passing", "perceptron", "drawn", "labels"
PPO, PPO_UNTRAINED = "PPO", "PPO, untrained"
TUNED, UNTRAINED, BEST_RULE, ONE_DEVICE = "tuned rule", "untrained", "rules", "single_device"
LEARNED = (UNTRAINED, MESSAGES, PERCEPTRON, DRAWN, LABELS, TUNED, PPO_UNTRAINED, PPO)
OTHERS = ("contiguous_dp", "order_search", "best_of", "cp_sat")
DECIDE = (UNTRAINED, MESSAGES, PERCEPTRON)  # what the endpoint is about


@dataclass(frozen=True)
class Row:
    """One run: the least value, in the problem's seconds, by so much processor time.

    None: no answer by then, or not run so long. ``first_s``: one greedy decode of the network.
    ``training_s``: processor seconds of the training, its labels not counted.
    """

    machine: str
    problem: str
    family: str
    fold: int
    objective: str
    operators: int
    arm: str
    seed: int | None
    training_s: float | None
    first_s: float | None
    by_10_ms: float | None
    by_30_ms: float | None
    by_100_ms: float | None
    by_300_ms: float | None
    by_1_s: float | None
    by_10_s: float | None

    def by(self, seconds: float) -> float | None:
        """The least value by then."""
        value: float | None = getattr(self, COLUMNS[seconds])
        return value

    @property
    def end(self) -> float | None:
        """The least value of all."""
        values = [v for s in COLUMNS if (v := self.by(s)) is not None]
        return min(values, default=None)

    @property
    def key(self) -> tuple[Any, ...]:
        """What decides it."""
        return self.machine, self.problem, self.objective, self.arm, self.seed


COLUMNS = {0.01: "by_10_ms", 0.03: "by_30_ms", 0.1: "by_100_ms", 0.3: "by_300_ms", 1.0: "by_1_s",
           10.0: "by_10_s"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """A problem that arms are judged by."""

    machine: str
    name: str
    family: str
    fold: int
    problem: Problem
    seconds: tuple[float, ...]  # it is judged by; after the first with seed 0 alone


@cache
def families() -> dict[str, tuple[Path, ...]]:
    """The measured graphs of each family, in the order of their names."""
    by_family: dict[str, list[Path]] = {}
    for machine in MACHINES:
        for path in sorted((DATASET / machine).glob("*.json.gz")):
            by_family.setdefault(family_of(path), []).append(path)
    return {name: tuple(by_family[name]) for name in sorted(by_family)}


def family_of(path: Path) -> str:
    """The architecture of a measured graph, as its file says."""
    family: str = json.loads(gzip.decompress(path.read_bytes()))["provenance"]["family"]
    return family


@cache
def folds() -> tuple[tuple[str, ...], ...]:
    """The families of each fold, drawn."""
    names = np.random.default_rng(SPLIT_SEED).permutation(list(families())).tolist()
    return tuple(tuple(names[k::FOLDS]) for k in range(FOLDS))


def others(fold: int) -> list[str]:
    """The families that networks for a fold are trained on."""
    return [name for k, names in enumerate(folds()) for name in names if k != fold]


@cache
def measured(path: Path, objective: str) -> Problem:
    """A measured graph on each of its devices twice."""
    return twice_the_devices(importers.load(path, objective=objective))


@cache
def cases(objective: str) -> tuple[Case, ...]:
    """All that arms are judged by; what they are is drawn, once and for all seeds."""
    made: list[Case] = []
    for fold, names in enumerate(folds()):
        rng = np.random.default_rng([SPLIT_SEED, fold])
        for number, family in enumerate(names[:TESTED]):
            paths = families()[family]
            path = paths[int(rng.integers(len(paths)))]
            four, name = measured(path, objective), path.name.removesuffix(".json.gz")
            unlike = Perturbation().draw(four, np.random.default_rng([SPLIT_SEED, fold, number]))
            long = (1.0, LONG_S) if number < LONG else (1.0,)
            made.append(Case(FOUR, name, family, fold, four, long))
            made.append(Case(UNLIKE, name, family, fold, unlike, (0.3,)))
    fold_of = {family: fold for fold, names in enumerate(folds()) for family in names}
    for path in sorted((DATASET / CARD).glob("*.json.gz")):
        problem, family = importers.load(path, objective=objective), family_of(path)
        if problem.num_devices == 2 and problem.num_ops >= LEAST:
            name = path.name.removesuffix(".json.gz")
            made.append(Case(GPU, name, family, fold_of.get(family, 0), problem, (0.3,)))
    return tuple(made)


class Machines:
    """Fresh problems of families: one of the graphs, half the time on a drawn machine."""

    def __init__(self, families: Iterable[Sequence[Problem]], most: int) -> None:
        small = ([p for p in problems if p.num_ops <= most] for problems in families)
        self.families = [problems for problems in small if problems]
        self.sizes = Sizes(most, 4, 4 * most)

    def __call__(self, rng: np.random.Generator) -> Problem:
        """A fresh problem."""
        problems = self.families[int(rng.integers(len(self.families)))]
        problem = problems[int(rng.integers(len(problems)))]
        return problem if rng.random() < 0.5 else Perturbation().draw(problem, rng)


@cache
def training_problems(fold: int, objective: str) -> Machines:
    """Of all folds but one."""
    paths = (families()[name] for name in others(fold))
    return Machines(([measured(path, objective) for path in some] for some in paths), MOST)


@dataclass(frozen=True)
class RulesThenDecodes:
    """All rules, the cheapest first, then decodes of a network, as long as there are seconds.

    Attributes:
        policy: the file of one that dispatches; None: the rules alone.
        rule: what the network is added to.
        builds: it is one of ``sequential``, which places group after group from a warm start.
    """

    policy: str | None = None
    rule: tuple[float, ...] = ()
    builds: bool = False
    seconds: float | None = None
    seed: int = 0

    def __call__(self, problem: Problem) -> Solution:
        from agents.dispatch import decode
        from envs.dispatch import MIXED

        search, stats = Search(problem, self.seconds), dict[str, Any]()
        for rule in RULES:
            if search.left or search.best is None:
                search.run(rule)
        if self.policy is not None and self.builds:
            stats = self.sequentially(search)
        elif self.policy is not None and search.left:
            rule_ = self.rule or MIXED
            stats = decode(net_of(self.policy), search, SAMPLES, self.seed, np.inf, rule_)
        return search.solution(**stats)

    def sequentially(self, search: Search) -> dict[str, Any]:
        """Decodes from the best so far: the greedy one, then samples."""
        assert search.best is not None and self.policy is not None
        problem, stats = search.problem, dict[str, Any]()
        policy = policy_of(self.policy)
        warm = search.best[problem.graph.group]
        drawn = 0
        while search.left:
            rows = policy.place(problem, warm, AT_ONCE, 1_000_000 * self.seed + drawn)
            costs = search.costs(choice_of(problem, rows[min(drawn, 1) :]))
            if not drawn and len(costs):
                stats["greedy_value_s"] = float(costs[0])
            drawn += AT_ONCE
        return stats


@cache
def policy_of(path: str) -> TrainedPolicy:
    """The policy in a file."""
    from agents.trained import TrainedPolicy

    return TrainedPolicy.load(path)


@cache
def net_of(path: str) -> Any:
    """The network in a file."""
    return policy_of(path).net


class Asked(NamedTuple):
    """An arm for a fold: its planner, and what its training took."""

    planner: Planner
    training_s: float | None = None


def asked(unit: Unit, options: Options) -> Asked:
    """The planner of an arm; trained now if it is not."""
    arm, objective, fold, seed = unit.arm, unit.objective, unit.fold, unit.seed or 0
    if arm == BEST_RULE:
        return Asked(RulesThenDecodes())
    if arm in (ONE_DEVICE, *OTHERS):
        return Asked(load(arm))
    if arm == TUNED:
        begun = time.process_time()
        weights = evolved(training_problems(fold, objective), seed, options.steps, 40)
        new = str(untrained(options))
        return Asked(RulesThenDecodes(new, tuple(weights)), time.process_time() - begun)
    if arm == UNTRAINED:
        return Asked(RulesThenDecodes(str(untrained(options))))
    if arm == PPO_UNTRAINED:
        return Asked(RulesThenDecodes(str(untrained(options, "sequential")), builds=True))
    path, cost = network(arm, objective, fold, seed, options)
    return Asked(RulesThenDecodes(str(path), builds=arm == PPO), cost["seconds"])


def network_of(arm: str) -> dict[str, Any]:
    """Kind and size of an arm's network."""
    encoder = "perceptron" if arm == PERCEPTRON else "sage"
    return {"scorer": 32, "finish_weight": 4.0, "encoder": encoder, "layers": 3}


def untrained(options: Options, formulation: str = "dispatch", seed: int = 0) -> Path:
    """The file of the network of ``MESSAGES``, or of ``PPO``, in which nothing was trained."""
    from agents.trained import TrainedPolicy, untrained_net

    path: Path = options.work / f"untrained-{formulation}-{seed}.safetensors"
    if not path.is_file():
        config = network_of(MESSAGES) if formulation == "dispatch" else PPO_NETWORK
        TrainedPolicy(untrained_net(config, formulation, seed)).save(path)
    return path


def network(
    arm: str, objective: str, fold: int, seed: int, options: Options
) -> tuple[Path, dict[str, Any]]:
    """The file of a trained network, and what it cost."""
    from agents.training import TrainConfig

    if arm == PPO:
        chosen = [one_of(family, objective) for family in others(fold)]
        config = TrainConfig(
            total_steps=PPO_STEPS, seed=seed, network=PPO_NETWORK, num_envs=16, repeats=8,
            num_checks=3, learning_rate=1e-3, last_learning_rate=1e-4, entropy=0.005,
            last_entropy=0.001,
        )  # fmt: skip
        problems = [p for p in chosen if p.num_ops <= MOST]
        return trained(
            f"{arm}-{objective}-{fold}", config, options.work, problems,
            baseline=load("contiguous_dp"),
        )  # fmt: skip
    name = f"{arm}-{objective}-{fold}"
    if arm == LABELS:
        problems, solutions = labels(objective, others(fold), options)
        config = TrainConfig(
            total_steps=1, cold=True, num_checks=1, imitation_epochs=EPOCHS,
            imitation_rate=IMITATION_RATE, **group_relative(arm, seed),
        )  # fmt: skip
        return trained(name, config, options.work, problems, solutions=solutions)
    if arm == DRAWN:
        drawn = {"latency": Latency, "period": Pipelines}[objective]()
        return by_groups(arm, f"{arm}-{objective}", seed, drawn, options)
    return by_groups(arm, name, seed, training_problems(fold, objective), options)


def group_relative(arm: str, seed: int) -> dict[str, Any]:
    """What trainings of ``dispatch`` have in common."""
    return {
        "formulation": "dispatch",
        "algorithm": "agents.dispatch.train:GroupRelative",
        "seed": seed,
        "num_envs": 1,
        "epochs": 1,
        "entropy": 0.0,
        "last_entropy": 0.0,
        "network": network_of(arm),
    }


def by_groups(
    arm: str, name: str, seed: int, problems: Generator, options: Options
) -> tuple[Path, dict[str, Any]]:
    """The file of the network of an arm that is trained on fresh problems, and what it cost."""
    from agents.training import TrainConfig

    config = TrainConfig(
        total_steps=options.steps, steps_per_env=ROLLOUT, minibatches=8, samples=SAMPLED,
        num_checks=CHECKS, learning_rate=RATE, last_learning_rate=RATE / 10,
        **group_relative(arm, seed),
    )  # fmt: skip
    return trained(name, config, options.work, problems)


def one_of(family: str, objective: str) -> Problem:
    """A graph of a family, drawn, on four devices."""
    rng = np.random.default_rng([SPLIT_SEED, list(families()).index(family)])
    paths = families()[family]
    return measured(paths[int(rng.integers(len(paths)))], objective)


def labels(
    objective: str, names: Sequence[str], options: Options
) -> tuple[list[Problem], list[Placement]]:
    """A problem of each family, on four devices or unlike ones, and what a search finds on it."""
    from agents.training.expert import solve

    problems: dict[str, Problem] = {}
    for number, family in enumerate(families()):
        problem, rng = one_of(family, objective), np.random.default_rng([SPLIT_SEED, number, 1])
        if problem.num_ops <= MOST:
            problems[family] = problem if number % 2 else Perturbation().draw(problem, rng)
    expert = "order_search" if objective == "latency" else "macro_search"
    teacher = load(expert, evaluations=LABEL_EVALUATIONS)
    found = solve(problems, teacher, options.work / f"labels-{objective}.npz")
    chosen = [
        (problem, placement)
        for (family, problem), placement in zip(problems.items(), found, strict=True)
        if family in names
    ]
    return [p for p, _ in chosen], [x for _, x in chosen]


class Unit(NamedTuple):
    """What is run at once: an arm, an objective, a fold and a seed."""

    arm: str
    objective: str
    fold: int
    seed: int | None


def units(options: Options) -> Iterator[Unit]:
    """All, in order: rules, the arms of the first seed, searches, the arms of the other seeds."""

    def some(arms: Sequence[str], seed: int | None) -> Iterator[Unit]:
        for arm in arms:
            for objective in OBJECTIVES:
                if (arm, objective) != ("order_search", "period"):
                    yield from (Unit(arm, objective, fold, seed) for fold in range(FOLDS))

    yield from some((BEST_RULE,), None)
    for seed in range(options.seeds):
        yield from some(LEARNED, seed)
        if seed == 0:
            yield from some(OTHERS, None)


def rows(options: Options) -> Iterator[Row]:
    """Those that are there, and those that there is time for."""
    return judge(STUDY, units(options), lambda unit: cases(unit.objective), asked, options)


def judge(
    study: Study,
    units: Iterable[Unit],
    cases_of: Callable[[Unit], Iterable[Case]],
    ask: Callable[[Unit, Options], Asked],
    options: Options,
) -> Iterator[Row]:
    """The rows of a study, and those that there is time for; all are written after every unit."""
    done = {row.key: row for row in study.read(options.out)}
    begun = spent_s()
    is_warm = False
    for unit in units:
        if options.arms and unit.arm not in options.arms:
            continue
        cases = [case for case in cases_of(unit) if case.fold == unit.fold]
        missing = [
            case
            for case in cases
            if (case.machine, case.name, unit.objective, unit.arm, unit.seed) not in done
        ]
        if not missing:
            continue
        if spent_s() - begun > 60 * options.minutes:
            say("no time for more: the same command goes on")
            break
        if not is_warm:
            load_all(cases, options)
            is_warm = True
        say(f"{unit.arm}, {unit.objective}, fold {unit.fold}, seed {unit.seed}")
        planner, training_s = ask(unit, options)
        if isinstance(planner, RulesThenDecodes) and planner.policy is not None:
            policy_of(planner.policy)  # loaded before processes are forked, and before their clocks
        for case in missing:
            row = judged(case, unit, planner, training_s)
            if row is not None:
                done[row.key] = row
        # Another process may have added others meanwhile.
        done = {row.key: row for row in study.read(options.out)} | done
        write_atomic(options.out / f"{study.name}.csv", to_csv(in_order(done.values())))
    return iter(in_order(done.values()))


def in_order(rows: Iterable[Row]) -> list[Row]:
    """By arm and seed, as they are made."""
    arms = [ONE_DEVICE, BEST_RULE, *LEARNED, *OTHERS]
    return sorted(rows, key=lambda r: (r.seed or 0, arms.index(r.arm), r.objective, r.fold))


def spent_s() -> float:
    """Processor seconds of this process, and of its runs that have ended."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def load_all(cases: Iterable[Case], options: Options) -> None:
    """Packages and kernels, before processes are forked."""
    import torch

    torch.set_num_threads(1)
    warm([*RULES, *OTHERS], [Objective.LATENCY, Objective.PERIOD])
    least = min(cases, key=lambda case: case.problem.num_ops).problem
    for objective in OBJECTIVES:
        smallest = least.with_objective(objective)
        RulesThenDecodes(str(untrained(options)), seconds=0.5)(smallest)
        sequential = str(untrained(options, "sequential"))
        RulesThenDecodes(sequential, builds=True, seconds=0.5)(smallest)


def judged(case: Case, unit: Unit, planner: Planner, training_s: float | None) -> Row | None:
    """The row of an arm on a problem; None: it has to be made again."""
    limits = case.seconds if unit.seed in (0, None) else case.seconds[:1]
    searches = unit.arm in OTHERS and unit.arm != "contiguous_dp"
    # What is decoded does not depend on when it ends, and the longest says all.
    limits = (0.1, *(s for s in limits if s >= 1)) if searches else limits[-1:]
    values: dict[str, float | None] = dict.fromkeys(COLUMNS.values())
    first_s = None
    lower_bound(case.problem)  # kept: no search is to pay for it, as networks do not
    for seconds in limits:
        run = answered(planner, unit.seed, case.problem, seconds)
        if run.value is None:
            say(f"{unit.arm}, {case.machine}, {case.name}: {run.status} {run.note}")
            if run.status in ("out of time", "killed"):
                return None  # of the machine, not of the arm: it is made again
            continue
        value_s, stats = value_of(case.problem, run.value), run.value.stats
        curve = stats.get("curve") or [(stats.get("seconds", run.seconds), 1, value_s)]
        for budget, column in COLUMNS.items():
            reached = best_by(budget, curve, value_s)
            if (budget == seconds if searches else budget <= seconds) and reached is not None:
                values[column] = rounded(reached)
        first_s = stats.get("greedy_value_s")
    return Row(
        case.machine, case.name, case.family, case.fold, unit.objective, case.problem.num_ops,
        unit.arm, unit.seed, rounded(training_s), rounded(first_s), **values,
    )  # fmt: skip


def answered(planner: Planner, seed: int, problem: Problem, seconds: float) -> Run:
    """What a planner answers in a process of its own, in so many processor seconds."""
    ready = prepared(planner, seed, Budget(seconds, None))
    return limited(partial(solve, ready, problem), LONGEST_S, MEMORY_BYTES, True)


def best_by(seconds: float, curve: Iterable[Sequence[float]], value_s: float) -> float | None:
    """The least value of a curve by then; none is less than what the answer is worth."""
    return min((max(v, value_s) for s, _, v in curve if s <= SLACK * seconds), default=None)


def rounded(value: float | None) -> float | None:
    """To six digits."""
    return None if value is None else float(f"{value:.6g}")


# --- the page ------------------------------------------------------------------------------------


def over(rows: Sequence[Row], arm: str, seconds: float, base: str, ended: bool = False) -> Mean:
    """An arm's values by ``seconds`` over those of ``base``, of the same seed where that has seeds.

    The base has as long, or until it has ``ended``. An arm without an answer is left out there,
    and so is what was not run.
    """
    values = {
        (r.machine, r.problem, r.objective, r.seed): value
        for r in rows
        if r.arm == base and (value := r.end if ended else r.by(seconds)) is not None
    }
    ratios: dict[tuple[str, ...], list[float]] = {}
    for r in rows:
        value = r.by(seconds)
        problem = r.machine, r.problem, r.objective
        other = values.get((*problem, r.seed), values.get((*problem, None)))
        if r.arm == arm and value is not None and other is not None:
            ratios.setdefault((r.family, *problem), []).append(value / other)
    finite = {k: v for k, v in ratios.items() if np.isfinite(v).all()}
    return geometric(finite, family=lambda problem: problem[0])


def percent(mean: Mean, graphs: int | None = None) -> str:
    """And on how many graphs, where others have no answer by then."""
    if not mean.count:
        return DASH
    return mean.percent(2) + (f", {mean.count} graphs" if mean.count < (graphs or 0) else "")


def decides(rows: Sequence[Row]) -> list[Row]:
    """Those that the endpoint is about."""
    return [r for r in rows if r.machine in (FOUR, UNLIKE)]


def endpoint(rows: Sequence[Row], objective: str) -> dict[str, Any]:
    """Message passing at 100 ms, and whether that is what was aimed for."""
    mine = [r for r in decides(rows) if r.objective == objective]
    against = over(mine, MESSAGES, 0.1, BEST_RULE, True)
    before = over(mine, MESSAGES, 0.1, UNTRAINED)
    return {
        "objective": objective,
        "rules": percent(against),
        "untrained": percent(before),
        "by_training": "yes" if before.high < 1 else "no",
        "perceptron": percent(over(mine, MESSAGES, 0.1, PERCEPTRON)),
        "first": percent(first_decode(mine)),
        "reached": "yes" if against.high <= 1 + GOAL else "no",
        "graphs": against.count,
    }


def first_decode(rows: Sequence[Row]) -> Mean:
    """One greedy decode of message passing over that of the untrained network."""
    one = [replace(r, by_100_ms=r.first_s) for r in rows]
    return over(one, MESSAGES, 0.1, UNTRAINED)


def parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    judged_by = decides(rows)
    kinds = groups(judged_by, "objective")
    arms = [a for a in (*LEARNED, *OTHERS) if any(r.arm == a for r in rows)]
    seeds = {a: len({r.seed for r in rows if r.arm == a}) for a in arms}

    def line(x: tuple[str, str], seconds: float) -> str:
        mean = over(kinds.get(x[0], []), x[1], seconds, BEST_RULE, True)
        return percent(mean, count(x) if seconds < 1 else None)  # longer ones are of some alone

    def on(x: tuple[str, str], machine: str) -> str:
        mine = [r for r in rows if (r.objective, r.machine) == (x[0], machine)]
        return percent(over(mine, x[1], 0.1, BEST_RULE, True))

    def added(x: tuple[str, str], seconds: float) -> str:
        before = PPO_UNTRAINED if x[1] == PPO else UNTRAINED
        return percent(over(kinds.get(x[0], []), x[1], seconds, before))

    def cost(arm: str) -> float:
        seconds = [r.training_s for r in rows if r.arm == arm and r.training_s is not None]
        return float(np.median(seconds)) if seconds else np.nan

    def count(x: tuple[str, str]) -> int:
        return len({(r.machine, r.problem) for r in kinds.get(x[0], []) if r.arm == x[1]})

    lines = [(o, a) for o in OBJECTIVES for a in arms if count((o, a))]
    return {
        "endpoint": table(
            [endpoint(rows, o) for o in OBJECTIVES],
            Column("objective", "objective"),
            Column("graphs", "graphs"),
            Column("against the best of all rules", "rules"),
            Column("-1 % reached", "reached"),
            Column("against itself untrained", "untrained"),
            Column("training is a cause", "by_training"),
            Column("against the perceptron", "perceptron"),
            Column("one decode, against untrained", "first"),
        ),
        "budgets": table(
            lines,
            Column("objective", lambda x: x[0]),
            Column("arm", lambda x: x[1]),
            Column("graphs", count),
            *(Column(f"{s:g} s", partial(line, seconds=s)) for s in (*BUDGETS_S, LONG_S)),
        ),
        "machines": table(
            [x for x in lines if x[1] in LEARNED],
            Column("objective", lambda x: x[0]),
            Column("arm", lambda x: x[1]),
            *(Column(m, partial(on, machine=m)) for m in (FOUR, UNLIKE, GPU)),
        ),
        "added": table(
            [x for x in lines if x[1] in LEARNED and x[1] not in (UNTRAINED, PPO_UNTRAINED)],
            Column("objective", lambda x: x[0]),
            Column("arm", lambda x: x[1]),
            *(Column(f"{s:g} s", partial(added, seconds=s)) for s in BUDGETS_S),
        ),
        "costs": table(
            [a for a in arms if a in LEARNED],
            Column("arm", lambda a: a),
            Column("seeds", lambda a: seeds[a]),
            Column("processor seconds of a training", cost, 0),
        ),
        "seeds_done": sum(is_finished(rows, seed) for seed in range(10)),
        "decided": done(rows),
    }


def done(rows: Sequence[Row]) -> str:
    """How many seeds of the endpoint's arms are finished, in words."""
    return f"{sum(is_finished(rows, seed, DECIDE) for seed in range(10))} of 10 seeds"


def is_finished(rows: Sequence[Row], seed: int, arms: Sequence[str] = LEARNED) -> bool:
    """Whether each of these arms has been judged with it on everything."""
    ran = Counter((r.arm, r.objective) for r in rows if r.seed == seed)
    return all(ran[a, o] == len(cases(o)) for a in arms for o in OBJECTIVES)


def plot(rows: Sequence[Row], path: Path, options: Options) -> None:
    """Value over processor time on four devices, a line for each arm that is judged everywhere."""
    figure = gantt.figure_class()(figsize=(9, 4), dpi=110, layout="constrained")
    axes = figure.subplots(1, len(OBJECTIVES), sharey=True)
    for axis, objective in zip(axes, OBJECTIVES, strict=True):
        mine = [r for r in rows if (r.objective, r.machine) == (objective, FOUR)]
        for number, arm in enumerate((BEST_RULE, *LEARNED, *OTHERS)):
            means = {s: over(mine, arm, s, BEST_RULE, True) for s in COLUMNS if s < LONG_S}
            points = {s: m.value for s, m in means.items() if m.count == FOLDS * TESTED}
            if points:
                style = "-" if arm in LEARNED else "--"
                line = axis.plot(list(points), list(points.values()), style, marker=".", label=arm)
                line[0].set_color(f"C{number}" if number < 10 else "black")
                line[0].set_marker("." if number < 10 else "ovs"[number - 10])
        axis.set(title=objective, xscale="log", xlabel="processor seconds")
        axis.legend(fontsize="x-small")
    axes[0].set_ylabel("value over that of the best of all rules")
    axes[0].set_ylim(0.9, 1.1)
    gantt.save_figure(figure, path)


STUDY = Study(
    name=NAME,
    word="folds",
    module="experiments.learned",
    rows=rows,
    row=Row,
    parts=parts,
    plot=plot,
    options={
        "seeds": Option(10, "of every arm, 0 and on"),
        "steps": Option(STEPS, "of a training"),
        "arms": Option((), "these alone; any number of processes may share the work"),
        "minutes": Option(1e9, "of processor time, after which no further arm is begun; 0: none"),
    },
)
