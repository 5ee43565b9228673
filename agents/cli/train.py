"""``placement-train``: train one policy on all the workloads, then compare it with its baseline,
and with what it was before."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before anything else is imported, as Ctrl-C may come meanwhile
    from placement import commands

    sys.exit(commands.train())

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from agents.cli.entries import planner_of, workloads_of
from agents.cli.job import (
    OF_PROBLEMS,
    AppError,
    Job,
    job,
    launch,
    make_problems,
    metric_s,
    save_best,
    save_report,
    seeds_of,
    show,
)
from agents.cli.sweeps import is_best_of_sweep, once
from placement.cli import say, search_here, seconds
from placement.planners import PlannerError
from placement.problem import Placement, Planner, Problem, Solution
from placement.runs.compare import describe, prepared, problem_fingerprint
from placement.tools.files import write_atomic

if TYPE_CHECKING:
    from agents.trained import TrainedPolicy
    from agents.training.callbacks import Row
    from agents.training.config import TrainConfig
    from envs.problem_set import Evaluator, Measured


MEASURED = "measured"
RAN = "ran"  # in the table: the fastest placement that has run


def app(cfg: DictConfig) -> float:
    """One training; returns the policy's objective in seconds."""
    return once(cfg, _train)


def _train(cfg: DictConfig) -> float:
    from agents.planner import PolicyPlanner
    from agents.trained import TrainedPolicy, untrained_net
    from envs.perturbation import Perturbation
    from envs.problem_set import Measured
    from placement.report.table import geometric_mean
    from placement.runs.compare import compare
    from placement.search.planner import Budget
    from placement.tools.parallel import check

    check(cfg.parallel)
    if not isinstance(cfg.seed, int):
        raise AppError(
            f"seed = {cfg.seed}: a training has one; several: placement-train -m seed=0,1"
        )
    seeds_of(cfg.seed)
    own = [cfg.training[x] for x in ("reward", "generator", "algorithm", "formulation")]
    for name in (*own, cfg.training.network.encoder, *cfg.allow):
        search_here(str(name))  # before the settings are read: a formulation is imported then
    config = instantiate(cfg.training, _convert_="all")
    baseline, expert = (
        prepared(planner_of(name, cfg[name]), cfg.seed) for name in ("baseline", "expert")
    )
    chosen = workloads_of(cfg.workload)
    if cfg.warm_start not in ("baseline", "imitation"):
        raise AppError(f"warm_start = {cfg.warm_start} is unknown; use baseline or imitation")
    if cfg.evaluator not in ("simulator", MEASURED):
        raise AppError(f"evaluator = {cfg.evaluator} is unknown; use simulator or {MEASURED}")
    policy = None if cfg.policy is None else TrainedPolicy.load(cfg.policy, cfg.allow)
    with job(cfg, "train") as run:
        fresh = config.generator is not None
        problems = _samples(cfg, config) if fresh else make_problems(run, chosen)
        held_out = [] if fresh else _held_out(problems, cfg.held_out, cfg.seed)
        machines = {n: p for n, p in problems.items() if n not in held_out}
        if cfg.variants:
            names = [f"{n}/{i}" for n in machines for i in range(cfg.variants)]
            drawn = Perturbation(variants=cfg.variants, seed=cfg.seed)(list(machines.values()))
            machines |= dict(zip(names, drawn[len(machines) :], strict=True))
        others = [problems[name] for name in held_out]
        evaluator = _evaluator(run, problems)
        trained = _trained(run, config, machines, others, policy, baseline, expert, evaluator)
        file, card = run.folder / "policy.safetensors", run.folder / "card.json"
        trained.save(file)
        write_atomic(card, json.dumps(trained.card, indent=1))
        run.mirror.table("eval/problems", ("problem", "best_s"), _best(machines, trained))
        allow = (trained.formulation, getattr(trained.net.config, "encoder", "sage"))
        before = "untrained" if policy is None else "given"
        if policy is None:
            new = untrained_net(trained.net.config, trained.formulation, cfg.seed)
            policy = TrainedPolicy(new, {"config": trained.card["config"]})
        policy.save(run.folder / f"{before}.safetensors")
        planners = {"baseline": baseline}
        for name in (before, "policy"):
            weights = run.folder / f"{name}.safetensors"
            planners[name] = PolicyPlanner(
                weights, search=False, allow=allow, seed=cfg.seed, baseline=baseline
            )
        ran = {RAN: _Ran.of(evaluator, problems)} if isinstance(evaluator, Measured) else {}
        comparison = compare(
            problems,
            planners | ran,
            [cfg.seed],
            budget=Budget(cfg.seconds, cfg.evaluations),
            out_dir=run.folder,
            progress=lambda what: run.report(what, None),
        )
        run.mirror.comparison(comparison)
        mine = [row for row in comparison.rows if row.planner == "policy"]
        best = ["best"] if all(is_best_of_sweep(run.folder, row) for row in mine) else []
        run.mirror.artifact("policy", "policy", file, card, aliases=best)
        contents = "policy.safetensors, metrics.csv, compare.csv, compare.md"
        if not fresh:  # of drawn samples nobody runs a plan: the table says it all
            told = [row for row in comparison.rows if not ran or row.planner == RAN]
            save_best(run, replace(comparison, rows=tuple(told)), problems, planners, chosen)
            save_report(run)
            contents += ", report.html" * (run.folder / "report.html").is_file() + ", plans"
    if isinstance(evaluator, Measured):
        _say_measured(evaluator, machines)
        if trained.card["updates"] == 0:
            say(
                f"the runs ended within the first rollout, so nothing was learned: "
                f"training.total_steps = {config.total_steps} decides how long a rollout is; of "
                f"one_shot about as many as measurements = {cfg.measurements}"
            )
        contents += ", measured/*.jsonl"
    show(run, comparison, contents)
    if isinstance(evaluator, Measured):
        return geometric_mean(s.value_s for s in trained.best)
    return metric_s(replace(comparison, rows=tuple(mine)))


@dataclass(frozen=True)
class _Ran:
    """The fastest placement that has run, by fingerprint of the problem."""

    fastest: Mapping[str, Placement]

    @classmethod
    def of(cls, measured: Measured, problems: Mapping[str, Problem]) -> _Ran:
        found = {problem_fingerprint(p): measured.trials(p).incumbent for p in problems.values()}
        return cls({key: placement for key, placement in found.items() if placement is not None})

    def __call__(self, problem: Problem) -> Solution:
        if (found := self.fastest.get(problem_fingerprint(problem))) is None:
            raise PlannerError("no placement that fits has run")
        return Solution(found, np.nan)


def _trained(
    run: Job,
    config: TrainConfig,
    machines: Mapping[str, Problem],
    held_out: Sequence[Problem],
    policy: TrainedPolicy | None,
    baseline: Planner,
    expert: Planner,
    evaluator: Evaluator,
) -> TrainedPolicy:
    """The policy, after it has imitated the expert where the configuration says so."""
    from agents.training import train
    from agents.training.callbacks import CHECKPOINT
    from agents.training.expert import solve

    cfg = run.cfg
    goes_on = cfg.resume and (run.folder / CHECKPOINT).is_file()
    logged = _last_step(run.folder / "metrics.csv") if goes_on else -1.0

    def progress(row: Row) -> None:
        if row["steps"] > logged:  # a run that goes on repeats what followed its checkpoint
            run.mirror.log(named(row), step=int(row["steps"]))
        text = f"training: greedy {row['greedy_speedup']:.3f}x, best {row['best_speedup']:.3f}x"
        run.report(text, min(1.0, row["steps"] / config.total_steps))

    solutions = None
    if cfg.warm_start == "imitation":
        path = run.folder / "solutions.npz"
        if not cfg.resume:
            path.unlink(missing_ok=True)
        solutions = solve(
            {f"{name} {_digest(p, expert)}": p for name, p in machines.items()},
            expert,
            path,
            lambda key, part: run.report(f"{key.rpartition(' ')[0]}: expert", part),
            parallel=cfg.parallel,
        )
    return train(
        list(machines.values()) if config.generator is None else config.generator,
        config=config,
        baseline=_remembered(baseline, run.folder / "starts.npz", cfg.resume),
        policy=policy,
        solutions=solutions,
        held_out=held_out,
        evaluator=evaluator,
        resume=cfg.resume,
        out_dir=run.folder,
        callback=progress,
    )


def _evaluator(run: Job, problems: Mapping[str, Problem]) -> Evaluator:
    """The simulator; or runs on this machine, which a file for each problem keeps.

    Raises:
        AppError: a problem that cannot be run here.
    """
    from envs.problem_set import Measured
    from placement.executor import Executor
    from placement.runs.measured_search import PARAMS
    from placement.simulator import score

    if run.cfg.evaluator != MEASURED:
        if run.cfg.measurements is not None:
            raise AppError(
                f"measurements = {run.cfg.measurements} counts runs, and the simulator makes none: "
                f"evaluator={MEASURED}, or leave it out"
            )
        return score
    for name, problem in problems.items():
        described = [d.name for d in problem.cluster.devices if d.like is not None]
        can_run = problem.graph.program is not None and not described and not run.cfg.variants
        if not can_run or not problem.objective.is_measurable:
            raise AppError(
                f"evaluator={MEASURED} runs placements: {name} must be a model on devices of this "
                f"machine, for objective=period or latency, without variants and generators"
            )
    folder, kept = run.folder / MEASURED, PARAMS.final
    if not run.cfg.resume:  # runs of another training would be charged to this one
        shutil.rmtree(folder, ignore_errors=True)
    limits = {"measurements": run.cfg.measurements, "limit_s": run.cfg.limit_s}
    return Measured(Executor, folder=folder, final=kept, **limits)


def _say_measured(evaluator: Measured, problems: Mapping[str, Problem]) -> None:
    """Of each problem the fastest placement that has run, beside the fastest single device."""
    for name, problem in problems.items():
        trials = evaluator.trials(problem)
        alone_s = trials.single_s
        best_s = float(trials.levels.min(initial=np.inf))
        alone = "no single device has run"
        if np.isfinite(alone_s):
            ratio = alone_s / best_s
            alone = f"the fastest single device {seconds(alone_s)}, {ratio:.2f} times"
        say(f"{name}: fastest {seconds(best_s)} in {trials.num_measurements} runs; {alone}")


def _last_step(path: Path) -> float:
    """Steps in the last row of ``metrics.csv``; -1: there is none."""
    rows = path.read_text(encoding="utf-8").splitlines()[1:] if path.is_file() else []
    return float(rows[-1].split(",")[0]) if rows else -1.0


# Where a row's figures are shown: what was played, what an update did, what checks found.
_GROUPS = {
    "rollout": ("reward_mean",),
    "time": ("steps", "seconds", "evaluations"),
    "eval": ("greedy_speedup", "best_speedup", "held_out_speedup"),
}


def named(row: Row) -> dict[str, float]:
    """The figures of a row as ``rollout/``, ``eval/``, ``time/`` and ``train/NAME``; those of
    single problems are in a table by name, at the end.
    """
    group = {name: group for group, names in _GROUPS.items() for name in names}
    return {
        f"{group.get(name, 'train')}/{name}": value
        for name, value in row.items()
        if not name.startswith("best_s_")
    }


def _samples(cfg: DictConfig, config: TrainConfig) -> dict[str, Problem]:
    """The problems of a generator that were drawn for the checks.

    Raises:
        AppError: the configuration asks for something that is of given problems.
    """
    from agents.training import samples_of

    samples = {f"sample-{i}": p for i, p in enumerate(samples_of(config))}
    other = [name for name in ("workload", "synthetic") if cfg.get(name)]
    other += [name for name in ("variants", "held_out") if cfg[name]]
    other += ["warm_start"] * (cfg.warm_start != "baseline")
    typed = {x.lstrip("+").partition("=")[0] for x in HydraConfig.get().overrides.task}
    other += ["cluster"] * ("cluster" in typed)
    for name in typed.intersection(OF_PROBLEMS):
        if any(getattr(p, name) != cfg[name] for p in samples.values()):
            other.append(name)
    if other:
        raise AppError(
            f"training.generator = {config.generator} makes the problems, as it likes: leave out "
            f"{', '.join(other)}" + "; say 'workload=[]'" * ("workload" in other)
        )
    return samples


def _best(problems: Mapping[str, Problem], trained: TrainedPolicy) -> list[tuple[str, float]]:
    """The best value of each problem that was trained on, by name."""
    return [(name, s.value_s) for name, s in zip(problems, trained.best, strict=True)]


def _remembered(planner: Planner, path: Path, resume: bool) -> Planner:
    """A planner whose answers are kept in a file: with a clock it answers differently each time.

    So a training that is resumed begins where it began.
    """
    from agents.training.expert import solve  # and PyTorch: --help does without

    if not resume:
        path.unlink(missing_ok=True)

    def answer(problem: Problem) -> Solution:
        answered = solve({_digest(problem, planner): problem}, planner, path)
        return Solution(answered[0], np.nan)

    return answer


def _digest(problem: Problem, planner: Planner) -> str:
    """SHA-256 (hex) of what an answer depends on."""
    what = json.dumps([problem_fingerprint(problem), describe(planner)], sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()


def _held_out(names: Collection[str], share: float, seed: int) -> list[str]:
    """The ``share`` of the problems that is only checked: at least one, and not all."""
    if not 0.0 <= share < 1.0:
        raise AppError(f"held_out = {share} must be a share of the problems, 0 to below 1")
    if share == 0.0:
        return []
    if len(names) < 2:
        raise AppError(f"held_out = {share}, but there is one problem: give more, or held_out=0")
    count = min(max(1, round(share * len(names))), len(names) - 1)
    return np.random.default_rng(seed).permutation(sorted(names))[:count].tolist()


def main(words: Sequence[str] | None = None) -> int:
    """Entry point."""
    return launch(app, "train", words)
