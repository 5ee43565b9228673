"""Train a policy on a set of problems with stock stable-baselines3 PPO."""

from __future__ import annotations

import csv
import io
import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import stable_baselines3
import torch
from numpy.typing import NDArray
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback

from agents.encoder import MOVING, Formulation, NetworkConfig, PolicyError
from agents.expert import imitate
from agents.policy import PlacementPolicy
from agents.store import GraphStore
from agents.trained import (
    BUILDING,
    CHOOSING,
    Net,
    TrainedPolicy,
    building_rules,
    decode,
    make_net,
    one_thread,
    walk,
)
from envs.base import Rules
from envs.guided import GuidedSearchRules
from envs.order_search import OrderSearchRules
from envs.problems import (
    ONE_RUNTIME,
    Evaluator,
    ProblemSet,
    Runtime,
    canonical,
    choice_of,
    single_device_s,
)
from envs.refine import RefineRules
from envs.vec import PlacementVecEnv
from placement.planners import load
from placement.problem import Placement, Planner, Problem, Solution
from placement.runs.compare import placement_id, problem_fingerprint
from placement.runs.trials import BudgetSpent
from placement.search.coarsen import grouped
from placement.simulator import score
from placement.tools.files import write_atomic

Row = dict[str, float]
CHECKPOINT = "checkpoint.pt"
_ENOUGH = 4  # independent samples for a mean of advantages


@dataclass(frozen=True)
class TrainConfig:
    """``total_steps`` is the dial; everything else has a default that follows from it.

    Attributes:
        total_steps: environment steps (one-shot: one placement, ``group_place``: half of one;
            otherwise one group or move).
        formulation: ``sequential``, ``one_shot``, ``select_place``, ``group_place``, ``refine``,
            ``sweep``, ``guided_search`` or ``order_search``: the environment.
        seed: the same seed gives the same policy.
        num_envs: episodes side by side; 0 = 4 to 16, for about 20 updates in all.
        steps_per_env: steps of each between updates; 0 = about as many as there are groups
            (one-shot: 4 to 64, for about 20 updates; the two searches: 128).
        learning_rate, last_learning_rate: from the first step to the last, linearly.
        entropy, last_entropy: the same for the weight of the entropy.
        epochs, minibatches: passes over a rollout, and equal parts of at least 32 steps that it
            is cut into, if it is large enough.
        gamma, gae_lambda: where placements are built the reward comes at the end: keep gamma at 1.
            Searches, ``refine`` and ``sweep`` are rewarded at every step: give them 0.97 and 0.95,
            and an entropy of 0.002 to 0 (as the released choosers had; with the defaults, which
            are for building, they learned nothing).
        num_checks: greedy evaluations of all problems, and of those held out, during training.
        patience: stop after so many checks without a better greedy or best placement; 0 = never.
        max_seconds: stop when the next update would end later than this; 0 = no limit.
        max_evaluations: stop after so many evaluated placements; 0 = no limit. (The measurements
            of ``envs.Measured`` end a training, too: its answer is what ran until then.)
        per_graph: normalise advantages over the steps of each graph in a rollout, not over all:
            graphs whose rewards spread more do not drown out the others.
        repeats: episodes of a problem that follow one another, so that each rollout has several of
            few problems, not one of many: 8 where there are more problems than ``num_envs``.
        curriculum: share of the training in which larger graphs join: at first the smallest
            quarter is played, at the end of this share all; 0: all from the beginning.
        imitation_epochs: passes over the solutions that ``train`` is given, before PPO.
        imitation_rate: learning rate meanwhile.
        moves: steps of an episode of the two searches (256), ``refine`` (twice the groups) or
            ``sweep`` (as many as there are groups); 0: these defaults.
        width: moves that the two searches offer at each step.
        again: share of the episodes of the two searches that begin at the best met so far.
        cold: no warm starts: the policy neither begins at a baseline's placements nor sees them.
        groups: operators are merged into so many groups that share a device
            (``placement.search.coarsen``), and those are placed; 0: as the graph has them.
        elite: of ``one_shot``: after each update, also imitate this share of each graph's
            placements in the rollout, the best ones: the cross-entropy method (Post). 0: not.
            Graphs with fewer than ``1 / elite`` of them have one share together.
        workers: the episodes are played in so many shares, which ``train(parallel=...)`` plays side
            by side. Like the seed it decides the policy that results.
        best_so_far, random_start: of ``refine`` and ``sweep``: see ``envs.refine.RefineRules``.
        network: kind and size of a new network (ignored when training goes on from a policy).
    """

    total_steps: int = 20_000
    formulation: Formulation = "sequential"
    seed: int = 0
    num_envs: int = 0
    steps_per_env: int = 0
    learning_rate: float = 3e-3
    last_learning_rate: float = 1e-4
    entropy: float = 0.02
    last_entropy: float = 0.003
    epochs: int = 4
    minibatches: int = 4
    gamma: float = 1.0
    gae_lambda: float = 0.99
    num_checks: int = 10
    patience: int = 0
    max_seconds: float = 0.0
    max_evaluations: int = 0
    per_graph: bool = True
    repeats: int = 1
    curriculum: float = 0.0
    imitation_epochs: int = 20
    imitation_rate: float = 1e-3
    moves: int = 0
    width: int = 16
    again: float = 0.5
    cold: bool = False
    groups: int = 0
    elite: float = 0.0
    workers: int = 1
    best_so_far: bool = True
    random_start: bool = False
    network: NetworkConfig = field(default_factory=NetworkConfig)

    def __post_init__(self) -> None:
        sizes = ("total_steps", "epochs", "minibatches", "width")
        positive = (*sizes, "num_checks", "workers", "repeats")
        limits = ("patience", "max_seconds", "max_evaluations")
        for what in (*positive, *limits, "num_envs", "steps_per_env", "imitation_epochs", "moves"):
            least = int(what in positive)
            if getattr(self, what) < least:
                raise PolicyError(f"{what} = {getattr(self, what)} must be at least {least}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise PolicyError(f"seed = {self.seed} must be a whole number from 0 to 2**32 - 1")
        if self.formulation not in get_args(Formulation):
            raise PolicyError(
                f"formulation {self.formulation!r} is unknown; use one of {get_args(Formulation)}"
            )
        if not 0.0 <= self.curriculum <= 1.0:
            raise PolicyError(f"curriculum = {self.curriculum} must be a share, 0..1")
        if not 0.0 <= self.elite < 1.0 or (self.elite and self.formulation != "one_shot"):
            raise PolicyError(
                f"elite = {self.elite} must be a share, 0..1, and 0 unless the formulation is "
                f"one_shot: it is {self.formulation}"
            )
        if self.groups < 0 or (self.groups and self.formulation not in BUILDING):
            raise PolicyError(
                f"groups = {self.groups} must be 0 or more, and 0 unless the formulation is one "
                f"of {sorted(BUILDING)}: it is {self.formulation}"
            )

    def rollout(self, formulation: Formulation, mean_groups: float) -> tuple[int, int]:
        """Environments, and steps of each between two updates."""
        if formulation in CHOOSING:
            return self.num_envs or 16, self.steps_per_env or 128
        length = {"one_shot": 1, "group_place": 2}.get(formulation, max(1, round(mean_groups)))
        num_envs = self.num_envs or min(max(self.total_steps // (80 * length) * 4, 4), 16)
        if self.steps_per_env:
            return num_envs, self.steps_per_env
        if formulation == "one_shot":
            return num_envs, min(max(self.total_steps // (20 * num_envs), 4), 64)
        return num_envs, max(length, 4)


def train(
    problems: Sequence[Problem],
    *,
    config: TrainConfig | None = None,
    baseline: Planner | None = None,
    warm: Sequence[Placement | None] | None = None,
    reference_s: Sequence[float] | None = None,
    policy: TrainedPolicy | None = None,
    solutions: Sequence[Placement] | None = None,
    held_out: Sequence[Problem] = (),
    evaluator: Evaluator | Runtime = score,
    resume: bool = False,
    out_dir: str | Path | None = None,
    callback: Callable[[Row], bool | None] | None = None,
    progress: bool = False,
    parallel: str = "serial",
) -> TrainedPolicy:
    """Train on ``problems``; the weights of the best greedy check are returned.

    Where problems are ``held_out`` the best check is the best on those: a policy that only fits
    what it is trained on is not kept, nor one that is worse there than before the training.

    The untrained policy starts at ``warm`` (int32 ``[N]`` per problem), or at what ``baseline``
    answers; without either it starts cold. Reward 0 is ``reference_s``, by default the value of
    the warm start, or of the best single device where there is none. Problems whose warm start
    is given are never answered worse: ``best`` begins there. One that splits some of
    ``config.groups`` is in ``best`` as it is; the policy starts at it with these groups whole.

    Args:
        policy: go on from this one (its formulation and network count).
        solutions: int32 ``[N]`` per problem: imitate these first (``agents.expert``).
        held_out: not trained on; they start where ``baseline`` says.
        resume: go on from the checkpoint in ``out_dir``, if there is one, exactly as if training
            had not been interrupted; problems and configuration must be those it began with.
        evaluator: simulator (default), ``envs.problems.Measured(Executor)``, or a runtime.
        out_dir: ``metrics.csv``, ``policy.safetensors`` (every better check), ``best.npz`` and
            ``checkpoint.pt`` (every check) go there.
        callback: called with every row of the metrics; return False to stop.
        progress: show a progress bar.
        parallel: where the episodes of ``config.workers`` workers are played: ``serial`` (in this
            process) or ``processes``. The policy that results is the same. Not for measured values.

    Raises:
        EnvError, PolicyError: wrong problems, references, solutions or configuration.
        ProblemError: a warm start that is no placement of its problem.
        ParallelError: ``parallel`` is unknown, or a worker died.
        FileError: ``out_dir`` cannot be written.
    """
    config = config or TrainConfig()
    if parallel != "serial" and config.workers == 1:
        raise PolicyError(
            f"parallel = {parallel!r} with one worker is slower than serial: give TrainConfig "
            f"workers=2 or more (training.workers=2), about one per core"
        )
    if policy is not None:  # options of another formulation are an error
        config = replace(config, formulation=policy.formulation, network=policy.net.config)
    if held_out and hasattr(evaluator, "run"):
        raise PolicyError(ONE_RUNTIME.format("problems are held out"))
    whole, problems = problems, _merged(problems, config)
    given = _given(whole, problems, config, baseline, warm)
    tasks = _tasks(problems, given, reference_s, evaluator)
    kept = _held_out(held_out, config, baseline, evaluator)
    origin = _origin(config, problems, given, reference_s, kept)
    known, evaluations = _known(whole, given, tasks)
    with one_thread():
        _seed(config.seed)
        formulation = config.formulation
        net = make_net(config.network, formulation) if policy is None else deepcopy(policy.net)
        num_envs, steps = config.rollout(formulation, float(tasks.problems.num_groups.mean()))
        env = _make_env(config, tasks, num_envs, parallel)
        with closing(env):
            choices = tasks.problems.choices(tasks.starts)
            env.rules.keep(np.arange(len(choices)), choices, tasks.start_s)
            env.rules.num_evaluations += evaluations
            model = _make_ppo(config, env, steps, net, tasks.store)
            watch = _Watch(
                config, tasks, kept, origin, known, env, net, out_dir, callback, progress
            )
            went_on = resume and watch.load(model)
            if solutions is not None and not went_on:
                imitate(
                    model.policy,  # type: ignore[arg-type]
                    tasks.problems,
                    solutions,
                    epochs=config.imitation_epochs,
                    learning_rate=config.imitation_rate,
                    seed=config.seed,
                )
            watch.deal(model.num_timesteps / config.total_steps)  # before the first deck
            left = config.total_steps - model.num_timesteps
            if left > 0:
                # Without log_interval stable-baselines3 prints nothing and keeps the last figures.
                try:
                    model.learn(left, watch, log_interval=None, reset_num_timesteps=not went_on)  # type: ignore[arg-type]
                except BudgetSpent:  # of measurements: a limit like the others
                    watch.write()
                finally:
                    if watch.bar is not None:  # it has a thread
                        watch.bar.stop()
    return watch.trained()


def _merged(problems: Sequence[Problem], config: TrainConfig) -> Sequence[Problem]:
    """What is placed: the problems, with operators merged into ``config.groups``."""
    return [grouped(p, config.groups) for p in problems] if config.groups else problems


def _given(
    whole: Sequence[Problem],
    problems: Sequence[Problem],
    config: TrainConfig,
    baseline: Planner | None,
    warm: Sequence[Placement | None] | None,
) -> list[Placement | None]:
    """The warm starts of all problems, int32 ``[N]`` each, as they are given."""
    if config.cold:
        warm = [None] * len(problems)
    if warm is None:
        warm = [None if baseline is None else baseline(p).placement for p in problems]
    if len(warm) != len(problems):
        raise PolicyError(f"{len(warm)} warm starts for {len(problems)} problems")
    return [None if w is None else p.check_placement(w) for p, w in zip(whole, warm, strict=True)]


def _known(
    whole: Sequence[Problem], given: Sequence[Placement | None], tasks: _Tasks
) -> tuple[dict[int, Solution], int]:
    """The warm starts with their values, by problem, and the evaluations that these took."""
    known: dict[int, Solution] = {}
    num_split = 0
    for i, (placement, start) in enumerate(zip(given, tasks.starts, strict=True)):
        if placement is None or start is None:
            continue
        if np.array_equal(placement, _unsplit(tasks.problems.problems[i], placement)):
            known[i] = Solution(start, float(tasks.start_s[i]))
        else:
            value_s = float(tasks.problems.evaluator(whole[i], placement[None])[0])
            known[i] = Solution(placement, value_s)
            num_split += 1
    return known, len(known) + num_split


def _make_env(config: TrainConfig, tasks: _Tasks, num_envs: int, parallel: str) -> PlacementVecEnv:
    """``num_envs`` episodes side by side, in ``config.workers`` shares."""
    if config.workers > num_envs:
        raise PolicyError(
            f"workers = {config.workers}, but {num_envs} episodes are played side by side: "
            f"use fewer workers, or a larger num_envs"
        )
    shares = [
        make_rules(config, config.formulation, tasks.problems, len(part), tasks.starts)
        for part in np.array_split(np.arange(num_envs), config.workers)
    ]
    rules = shares if len(shares) > 1 else shares[0]
    return PlacementVecEnv(rules, config.seed, parallel, repeats=config.repeats)


def _make_ppo(
    config: TrainConfig, env: PlacementVecEnv, steps: int, net: Net, store: GraphStore
) -> PPO:
    """PPO that updates ``net`` after every ``steps`` of each episode."""
    model = (CrossEntropyPPO if config.elite else PPO)(
        PlacementPolicy,  # type: ignore[arg-type]  # it has what PPO needs of a policy
        env,
        learning_rate=lambda left: _between(config.last_learning_rate, config.learning_rate, left),
        n_steps=steps,
        batch_size=_part(steps * env.num_envs, config.minibatches),
        n_epochs=config.epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        ent_coef=config.entropy,
        normalize_advantage=not config.per_graph,
        rollout_buffer_class=PerGraphBuffer if config.per_graph else None,
        policy_kwargs={"net": net, "store": store},
        seed=config.seed,
        device="cpu",
    )
    if isinstance(model, CrossEntropyPPO):
        model.elite = config.elite
    return model


def make_rules(
    config: TrainConfig,
    formulation: Formulation,
    problems: ProblemSet,
    num_envs: int,
    starts: Sequence[Placement | None],
    again: float | None = None,
) -> Rules:
    """The rules of the environment that a formulation acts in; searches begin at ``starts``."""
    if formulation in BUILDING:
        return building_rules(config.network, formulation, problems, num_envs)
    given = [
        load("single_device")(p).placement if s is None else s
        for p, s in zip(problems.problems, starts, strict=True)
    ]
    if formulation in MOVING:
        return RefineRules(
            problems,
            num_envs,
            given,
            config.moves or None,
            config.best_so_far,
            formulation == "sweep",
            config.random_start,
        )
    share = config.again if again is None else again
    moves = config.moves or 256
    kind = OrderSearchRules if formulation == "order_search" else GuidedSearchRules
    return kind(problems, num_envs, given, moves, config.width, share)


def elites(ids: NDArray[np.integer[Any]], returns: NDArray[Any], share: float) -> NDArray[np.intp]:
    """Rows int64 of the ``share`` with the highest ``returns`` ``[B]``, of each graph of ``ids``.

    Graphs with fewer than ``1 / share`` rows have one share together: the best of two may be bad.
    """
    parts = np.where(np.bincount(ids)[ids] * share >= 1, ids, -1)
    best = []
    for part in np.unique(parts):
        mine = np.flatnonzero(parts == part)
        ranked = mine[np.argsort(-returns[mine], kind="stable")]
        best.append(ranked[: max(1, round(share * len(mine)))])
    return np.concatenate(best)


class CrossEntropyPPO(PPO):
    """PPO on placements made in one step, then one step per epoch towards the best of them.

    Post (Gao et al., NeurIPS 2018) joins the two: PPO learns from every placement, minimising
    the cross-entropy to the ``elite`` share with the highest reward, of each graph, from these.
    """

    elite: float = 0.0

    def train(self) -> None:
        super().train()
        seen: Any = self.rollout_buffer
        ids = seen.observations["problem"].astype(int).ravel()
        rows = elites(ids, seen.returns.ravel(), self.elite)
        obs = {k: torch.from_numpy(v[rows]) for k, v in seen.observations.items()}
        actions = torch.from_numpy(seen.actions[rows])
        self.policy.set_training_mode(True)
        for _ in range(self.n_epochs):
            loss = -self.policy.evaluate_actions(obs, actions)[1].mean()  # type: ignore[arg-type]
            self.policy.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
            self.policy.optimizer.step()


class PerGraphBuffer(DictRolloutBuffer):
    """A rollout whose advantages have mean 0 and deviation 1 over the steps of each graph.

    Steps of one episode say nearly the same of it: over those of a single one the mean *is* what
    it earned, and taking that off would leave nothing to learn. Graphs with fewer than ``_ENOUGH``
    independent samples therefore share one mean and one deviation: every episode counts as a
    sample, and so do ``1 / (1 - gamma * lambda)`` steps, as far as an advantage looks ahead.
    """

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: Any) -> None:
        super().compute_returns_and_advantage(last_values, dones)
        ids = self.observations["problem"].reshape(self.advantages.shape).astype(np.int64)
        begins = self.episode_starts.astype(bool)
        begins[0] = True  # or it began in the rollout before
        steps = np.bincount(ids.ravel())
        episodes = np.bincount(ids[begins], minlength=len(steps))
        enough = episodes + (1 - self.gamma * self.gae_lambda) * steps >= _ENOUGH
        parts = np.where(enough[ids], ids, -1)
        whole = self.advantages.std() + 1e-8
        for part in np.unique(parts):
            these = self.advantages[parts == part]
            # A graph with few steps, or nothing to choose from, has no deviation of its own.
            scale = these.std() if len(these) >= 16 else whole
            self.advantages[parts == part] = (these - these.mean()) / max(scale, 1e-3 * whole)


class _Watch(BaseCallback):
    """After every update: metrics, schedules, greedy checks, files, reasons to stop."""

    def __init__(
        self,
        config: TrainConfig,
        tasks: _Tasks,
        kept: _Tasks | None,
        origin: dict[str, str],
        known: dict[int, Solution],
        env: PlacementVecEnv,
        net: Net,
        out_dir: str | Path | None,
        report: Callable[[Row], bool | None] | None,
        progress: bool,
    ) -> None:
        super().__init__()
        self.config, self.env, self.net = config, env, net
        self.tasks, self.problems, self.kept = tasks, tasks.problems, kept
        self.origin = origin
        self.known = known  # what no answer may be worse than
        self.out_dir = None if out_dir is None else Path(out_dir)
        self.report = report
        self.progress = progress
        self.rows: list[Row] = []
        self.stop = False
        self.best_greedy = -np.inf
        self.best_weights = deepcopy(net.state_dict())
        self.greedy_s = np.full(len(self.problems.problems), np.inf)
        self.held_out = np.nan  # mean reward on the problems held out
        self.checks = 0
        self.idle_checks = 0
        self.best_seen = -np.inf
        self.rewards: list[float] = []
        self.started = time.perf_counter()
        self.resumed: dict[str, Any] | None = None
        self.sizes = np.argsort(self.problems.num_groups, kind="stable")
        self.update_began = self.started
        self.update_s = 0.0
        self.bar: Any = None

    def _on_training_start(self) -> None:
        if self.progress:
            from rich.progress import Progress

            self.bar = Progress(transient=True)
            self.bar.start()
            self.task = self.bar.add_task("training", total=self.config.total_steps)

    def _on_rollout_start(self) -> None:
        left = max(0.0, 1.0 - self.num_timesteps / self.config.total_steps)
        self.model.ent_coef = _between(  # type: ignore[attr-defined]
            self.config.last_entropy, self.config.entropy, left
        )
        self.deal(1.0 - left)
        if self.resumed is not None:
            self._begin_again(self.resumed)
            self.resumed = None
        elif self._record():
            self._begin_again(self._save())
        now = time.perf_counter()
        self.update_s, self.update_began = now - self.update_began, now

    def deal(self, done: float) -> None:
        """Limit the problems that are played to those of the curriculum, ``done`` of it all."""
        if self.config.curriculum:
            share = min(1.0, 0.25 + 0.75 * done / self.config.curriculum)
            self.env.allowed = self.sizes[: max(1, round(share * len(self.sizes)))]

    def _on_step(self) -> bool:
        self.rewards += [i["episode"]["r"] for i in self.locals["infos"] if "episode" in i]
        config = self.config
        end = max(time.perf_counter(), self.update_began + self.update_s)
        # Here, not in the check: what patience ended is at its end when it is resumed, too.
        if config.patience and self.idle_checks >= config.patience:
            self.stop = True
        if config.max_seconds and end - self.started > config.max_seconds:
            self.stop = True
        if config.max_evaluations and self.env.rules.num_evaluations >= config.max_evaluations:
            self.stop = True
        return not self.stop

    def _on_training_end(self) -> None:
        self._record(last=True)

    def _save(self) -> dict[str, Any]:
        """All that the rest of the training depends on (tensors, numbers and text), written."""
        generator: Any = np.random.get_state()
        kind, keys, at, has_gauss, gauss = generator
        assert kind == "MT19937"
        state = {
            "format": 1,
            "origin": self.origin,
            "steps": self.model.num_timesteps,
            "updates": self.model._n_updates,  # type: ignore[attr-defined]
            "net": self.net.state_dict(),
            "optimizer": self.model.policy.optimizer.state_dict(),
            "torch": torch.get_rng_state(),
            "numpy": [torch.from_numpy(keys.astype(np.int64)), at, has_gauss, gauss],
            "env": json.dumps(self.env.state()),
            "best_s": torch.from_numpy(self.env.rules.best_s),
            "best_choices": torch.from_numpy(self.env.rules.best_choices),
            "evaluations": self.env.rules.num_evaluations,
            "rows": json.dumps(self.rows),
            "best_weights": self.best_weights,
            "greedy_s": torch.from_numpy(self.greedy_s),
            "figures": [self.best_greedy, self.best_seen, self.checks, self.idle_checks],
            "held_out": self.held_out,
            "seconds": time.perf_counter() - self.started,
        }
        if self.out_dir is not None:
            file = io.BytesIO()
            torch.save(state, file)
            write_atomic(self.out_dir / CHECKPOINT, file.getvalue())
        return state

    def load(self, model: PPO) -> bool:
        """Prepare to go on from the checkpoint of ``out_dir``; False: there is none.

        Raises:
            PolicyError: it is not readable, or of another training.
        """
        path = None if self.out_dir is None else self.out_dir / CHECKPOINT
        if path is None or not path.is_file():
            return False
        try:
            state = torch.load(path, weights_only=True)
            version = state["format"]
        except Exception as error:  # zip, pickle and torch each raise their own kinds
            raise PolicyError(
                f"{path}: not a readable checkpoint ({error}); delete it to begin anew"
            ) from error
        begun = state.get("origin", {})  # versions before this one kept no such thing
        other = [what for what, value in self.origin.items() if begun.get(what) != value]
        if version != 1 or other:
            raise PolicyError(
                f"{path}: a checkpoint of another training (it differs in: {', '.join(other)}"
                f"{_differences(begun, self.origin)}); resume with what it began with, go on from "
                f"its policy with other settings (policy=), or delete it to begin anew"
            )
        self.resumed = state
        model.num_timesteps, model._n_updates = state["steps"], state["updates"]
        self.net.load_state_dict(state["net"])
        model.policy.optimizer.load_state_dict(state["optimizer"])
        rules = self.env.rules
        rules.best_s[:], rules.best_choices[:] = state["best_s"], state["best_choices"]
        rules.num_evaluations = state["evaluations"]
        self.rows, self.best_weights = json.loads(state["rows"]), state["best_weights"]
        self.greedy_s = state["greedy_s"].numpy()
        self.best_greedy, self.best_seen, self.checks, self.idle_checks = state["figures"]
        self.held_out = state["held_out"]
        self.started = time.perf_counter() - state["seconds"]
        return True

    def _begin_again(self, state: dict[str, Any]) -> None:
        """Begin all episodes anew, after a checkpoint and after resuming from it alike."""
        torch.set_rng_state(state["torch"])
        keys, at, has_gauss, gauss = state["numpy"]
        np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), at, has_gauss, gauss))
        self.env.restore(json.loads(state["env"]))
        self.env.rules.num_evaluations = state["evaluations"]
        self.model._last_obs = self.env.reset()  # type: ignore[assignment]  # may evaluate starts
        self.model._last_episode_starts = np.ones(self.env.num_envs, bool)

    def _record(self, last: bool = False) -> bool:
        """One row of metrics; a greedy check where one is due: whether there was one."""
        due = self.checks * self.config.total_steps // self.config.num_checks
        checks = last or self.num_timesteps >= due
        if checks:
            self._check()
        values = self.model.logger.name_to_value
        row: Row = {
            "steps": self.num_timesteps,
            "seconds": time.perf_counter() - self.started,
            "evaluations": self.env.rules.num_evaluations,
            "reward_mean": float(np.mean(self.rewards)) if self.rewards else np.nan,
            "greedy_speedup": self._speedup(self.greedy_s),
            "best_speedup": self._speedup(self.env.rules.best_s),
            "held_out_speedup": float(np.exp(self.held_out)),
            "entropy": -float(values.get("train/entropy_loss", np.nan)),
            "approx_kl": float(values.get("train/approx_kl", np.nan)),
            "clip_fraction": float(values.get("train/clip_fraction", np.nan)),
            "value_loss": float(values.get("train/value_loss", np.nan)),
            "policy_loss": float(values.get("train/policy_gradient_loss", np.nan)),
            "explained_variance": float(values.get("train/explained_variance", np.nan)),
            "learning_rate": float(values.get("train/learning_rate", np.nan)),
        }
        row |= {f"best_s_{i}": float(v) for i, v in enumerate(self.env.rules.best_s)}
        self.rewards = []
        self.rows.append(row)
        self._write_metrics()
        if self.bar is not None:
            text = f"training  greedy {row['greedy_speedup']:.3f}x  best {row['best_speedup']:.3f}x"
            self.bar.update(self.task, completed=self.num_timesteps, description=text)
        if self.report is not None and self.report(row) is False:
            self.stop = True
        return checks

    def _check(self) -> None:
        """Decode greedily, or search a little; keep the weights if they are the best so far."""
        self.checks += 1
        choices, self.greedy_s, used = _answers(self.config, self.net, self.tasks)
        self.env.rules.num_evaluations += used
        self.env.rules.keep(np.arange(len(choices)), choices, self.greedy_s)
        greedy = _mean_reward(self.problems, self.greedy_s)
        if self.kept is not None:
            held_s = _answers(self.config, self.net, self.kept)[1]
            greedy = self.held_out = _mean_reward(self.kept.problems, held_s)
        better = greedy > self.best_greedy
        if better:
            self.best_greedy = greedy
            self.best_weights = deepcopy(self.net.state_dict())
        seen = self._speedup(self.env.rules.best_s)
        self.idle_checks = 0 if better or seen > self.best_seen else self.idle_checks + 1
        self.best_seen = max(self.best_seen, seen)
        self.write(policy=better)

    def _speedup(self, seconds: Any) -> float:
        """Geometric mean over the problems of reference over ``seconds``."""
        return float(np.exp(_mean_reward(self.problems, seconds)))

    def _write_metrics(self) -> None:
        if self.out_dir is not None:
            text = io.StringIO()
            writer = csv.DictWriter(text, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
            write_atomic(self.out_dir / "metrics.csv", text.getvalue())

    def write(self, policy: bool = True) -> None:
        """The best placements, and the policy of the best check, where there is a folder."""
        if self.out_dir is None:
            return
        if policy:
            self.trained().save(self.out_dir / "policy.safetensors")
        best, file = self._best(), io.BytesIO()
        arrays: dict[str, Any] = {f"placement_{i}": s.placement for i, s in enumerate(best)}
        np.savez_compressed(file, value_s=[s.value_s for s in best], **arrays)
        write_atomic(self.out_dir / "best.npz", file.getvalue())

    def _best(self) -> tuple[Solution, ...]:
        stats = {"evaluations": self.env.rules.num_evaluations}
        found = [
            Solution(
                self.problems.placements(i, self.env.rules.best_choices[i : i + 1])[0],
                float(self.env.rules.best_s[i]),
                None,
                stats,
            )
            for i in range(len(self.problems.problems))
        ]
        if self.net.formulation == "order_search":  # an order is no part of what is returned
            found = [
                replace(s, value_s=float(score(p, s.placement)[0]))
                for s, p in zip(found, self.problems.problems, strict=True)
            ]
        # The environment may not know one: it splits groups, or an order was better meanwhile.
        for i, start in self.known.items():
            if start.value_s < found[i].value_s:
                found[i] = replace(start, stats=stats)
        return tuple(found)

    def trained(self) -> TrainedPolicy:
        """The policy of the best check."""
        net = deepcopy(self.net)  # of whatever class it is
        net.load_state_dict(self.best_weights)
        last = self.rows[-1] if self.rows else {}
        card = {
            "config": asdict(self.config),
            "problems": _described(self.problems.problems),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "stable_baselines3": stable_baselines3.__version__,
            },
            "steps": self.num_timesteps,
            "seconds": time.perf_counter() - self.started,
            "evaluations": self.env.rules.num_evaluations,
            "greedy_speedup": float(np.exp(self.best_greedy)),
            "held_out": [] if self.kept is None else _described(self.kept.problems.problems),
            "best_speedup": float(last.get("best_speedup", np.nan)),
        }
        return TrainedPolicy(net, card, self._best())


def _origin(
    config: TrainConfig,
    problems: Sequence[Problem],
    starts: Sequence[Placement | None],
    reference_s: Sequence[float] | None,
    kept: _Tasks | None,
) -> dict[str, str]:
    """What a training's values depend on, as text: a checkpoint goes on only with the same."""

    def ids(starts: Sequence[Placement | None]) -> list[str | None]:
        return [None if s is None else placement_id(s) for s in starts]

    held = [] if kept is None else kept.problems.problems
    found = {
        "configuration": asdict(config),
        "problems": [problem_fingerprint(p) for p in problems],
        "warm starts": ids(starts),
        # Those that follow from the problems may be measured: they differ each time.
        "reference_s": None if reference_s is None else [float(s) for s in reference_s],
        "held-out problems": [problem_fingerprint(p) for p in held],
        "their warm starts": ids([] if kept is None else kept.starts),
    }
    return {what: json.dumps(value) for what, value in found.items()}


def _differences(begun: dict[str, str], now: dict[str, str]) -> str:
    """Which fields of the configuration differ, as text: of a checkpoint, and now."""

    def fields(origin: dict[str, str]) -> dict[str, Any]:
        config = json.loads(origin.get("configuration", "{}"))
        inner = config.pop("network", {})
        return config | {f"network.{what}": value for what, value in inner.items()}

    was = fields(begun)
    other = [f"{k} = {was.get(k)}, now {v}" for k, v in fields(now).items() if was.get(k) != v]
    return f": {'; '.join(other)}" if was and other else ""


class _Tasks(NamedTuple):
    """Problems, their graphs, where policies start, and float64 ``[P]`` what that is worth."""

    problems: ProblemSet
    store: GraphStore
    starts: Sequence[Placement | None]
    start_s: NDArray[np.float64]  # inf: no start


def _held_out(
    problems: Sequence[Problem],
    config: TrainConfig,
    baseline: Planner | None,
    evaluator: Evaluator | Runtime,
) -> _Tasks | None:
    """The problems that are only checked."""
    if not problems:
        return None
    problems = _merged(problems, config)
    return _tasks(problems, _given(problems, problems, config, baseline, None), None, evaluator)


def _answers(
    config: TrainConfig, net: Net, tasks: _Tasks
) -> tuple[NDArray[np.int32], NDArray[np.float64], int]:
    """One answer per problem: choices int32 ``[P, G]``, seconds ``[P]``, evaluations used."""
    problems = tasks.problems
    ids = np.arange(len(problems.problems))
    if net.formulation in BUILDING:
        choices = decode(net, problems, tasks.store, ids)
        return choices, problems.outcomes(ids, choices)[0], len(ids)
    rules = make_rules(config, net.formulation, problems, len(ids), tasks.starts, again=0.0)
    generator = torch.Generator().manual_seed(config.seed)
    choices, seconds = walk(net, tasks.store, rules, generator)
    return choices, seconds, rules.num_evaluations


def _mean_reward(problems: ProblemSet, seconds: NDArray[np.float64]) -> float:
    return float(np.mean([problems.rewards(i, seconds[i : i + 1])[0] for i in range(len(seconds))]))


def _described(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    return [
        {
            "graph": p.graph.name,
            "fingerprint": p.graph.fingerprint,
            "devices": list(p.cluster.device_names),
            "objective": p.objective,
        }
        for p in problems
    ]


def _unsplit(problem: Problem, placement: Placement) -> Placement:
    """int32 ``[N]`` with whole groups: those of ``config.groups`` a warm start may split."""
    return choice_of(problem, placement)[problem.graph.group]


def _tasks(
    problems: Sequence[Problem],
    given: Sequence[Placement | None],
    reference_s: Sequence[float] | None,
    evaluator: Evaluator | Runtime,
) -> _Tasks:
    """The problems with their references, started where warm starts are ``given``."""
    starts = [
        None if w is None else canonical(p, _unsplit(p, w))
        for p, w in zip(problems, given, strict=True)
    ]
    chosen = ProblemSet.build(problems, [1.0] * len(problems), evaluator=evaluator)
    start_s = np.full(len(problems), np.inf)
    for i, start in enumerate(starts):
        if start is not None:
            start_s[i] = chosen.values(i, choice_of(problems[i], start)[None])[0]
    if reference_s is None:
        reference_s = [
            max(seconds, 1e-12) if np.isfinite(seconds) else single_device_s(p, chosen.evaluator)
            for p, seconds in zip(problems, start_s.tolist(), strict=True)
        ]
    chosen = ProblemSet.build(problems, reference_s, evaluator=chosen.evaluator)
    return _Tasks(chosen, GraphStore(problems, starts), starts, start_s)


def _part(rollout: int, minibatches: int) -> int:
    """Steps of a mini-batch: a whole fraction of the rollout, 32 or more if possible."""
    most = max(1, min(minibatches, rollout // 32))
    return rollout // max(n for n in range(1, most + 1) if rollout % n == 0)


def _between(last: float, first: float, left: float) -> float:
    """``first`` where all progress is ``left`` (1), ``last`` where none is (0)."""
    return last + (first - last) * left


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
