"""Train a policy on problems, with stable-baselines3: ``train``, and the parts that it is made of.

``make_env``, ``make_policy`` and ``make_agent`` make what ``agents.training.callbacks.Training``
watches; each can be replaced by one of yours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import set_random_seed

from agents.encoder import PolicyError
from agents.policy import PlacementPolicy
from agents.trained import Net, TrainedPolicy, make_net
from agents.training.callbacks import Report, Training, between
from agents.training.config import TrainConfig
from agents.training.expert import imitate
from agents.training.tasks import Start, Tasks
from envs.base import Source
from envs.generators import Generator, draw, generator_of
from envs.problem_set import ONE_RUNTIME, find, name_of
from envs.sb3 import PlacementVecEnv
from envs.vector import Episodes, FreshEpisodes, FreshRules
from placement.problem import Placement, Problem
from placement.runs.compare import describe, placement_id, problem_fingerprint
from placement.runs.trials import BudgetSpent
from placement.simulator import score
from placement.tools.files import short
from placement.tools.named import meant
from placement.tools.threads import torch_threads

_ENOUGH = 4  # independent samples for a mean of advantages


def train(
    problems: Sequence[Problem] | Generator | str,
    *,
    config: TrainConfig | None = None,
    policy: TrainedPolicy | None = None,
    held_out: Sequence[Problem] = (),
    resume: bool = False,
    out_dir: str | Path | None = None,
    callback: Report | None = None,
    **start: Any,
) -> TrainedPolicy:
    """Train on ``problems``; the weights of the best greedy check are returned.

    Where problems are ``held_out`` the best check is the best on those: a policy that only fits
    what it is trained on is not kept, nor one that is worse there than before the training.

    The untrained policy starts at ``warm`` (int32 ``[N]`` per problem), or at what ``baseline``
    answers; without either it starts cold. Reward 0 is ``reference_s``, by default the value of
    the warm start, or of the best single device where there is none. Problems whose warm start
    is given are never answered worse: ``best`` begins there.

    Args:
        problems: given ones; or a generator (``envs.generators``), which makes a fresh problem for
            every episode, and ``config.samples`` more beforehand, for the checks. The policy then
            starts cold.
        policy: go on from this one (its formulation and network count).
        held_out: not trained on; they start where ``baseline`` says.
        resume: go on from the checkpoint in ``out_dir``, if there is one, exactly as if training
            had not been interrupted; problems and configuration must be those it began with.
        out_dir: ``metrics.csv``, ``policy.safetensors`` (every better check), ``last.safetensors``,
            ``best.npz`` and ``checkpoint.pt`` (at checks, where every environment
            has ended an episode since the last) go there.
        callback: called with every row of the metrics; return False to stop.
        start: ``baseline``, ``warm``, ``reference_s``, ``solutions`` and ``evaluator``, the fields
            of ``agents.training.tasks.Start``.

    Raises:
        EnvError, PolicyError: wrong problems, references, solutions or configuration.
        ProblemError: a warm start that is no placement of its problem.
        FileError: ``out_dir`` cannot be written.
    """
    begins = Start(**start)
    if not isinstance(policy, TrainedPolicy | None):
        raise PolicyError(f"policy = {short(policy)} is no policy: TrainedPolicy.load(FILE) is one")
    config = _config(config or TrainConfig(), policy, problems)
    several = "problems are held out" if held_out else "a generator makes others"
    if (held_out or config.generator) and hasattr(begins.evaluator, "run"):
        raise PolicyError(ONE_RUNTIME.format(several))
    generator, progress = None, None
    if config.generator:
        are_listed = isinstance(problems, str | Sequence)
        generator = generator_of(config.generator if are_listed else problems)  # type: ignore[arg-type]
        progress = getattr(generator, "progress", None)
        problems = samples_of(config, generator)
    assert not callable(problems) and not isinstance(problems, str)
    tasks = Tasks.of(problems, config, begins)
    held_out_tasks = None
    if held_out:
        others = Start(baseline=begins.baseline, evaluator=begins.evaluator)
        held_out_tasks = Tasks.of(held_out, config, others)
    with torch_threads(1):
        set_random_seed(config.seed)
        net = make_policy(config) if policy is None else deepcopy(policy.net)
        env = make_env(config, tasks, generator)
        others_used = 0 if held_out_tasks is None else held_out_tasks.evaluations
        env.rules.num_evaluations += tasks.evaluations + others_used
        agent = make_agent(config, env, net, tasks)
        origin = _origin(config, tasks, begins, held_out_tasks)
        folder = None if out_dir is None else Path(out_dir)
        parts = config, tasks, held_out_tasks, origin, env, net, folder, generator, callback
        training = Training(*parts)
        try:
            _learn(training, agent, begins.solutions, resume)
        finally:  # or the next training's checks would be drawn by what this one was told
            if progress is not None:
                training.tell(progress)
    return training.trained()


def samples_of(config: TrainConfig, generator: Generator | None = None) -> list[Problem]:
    """The problems of a generator (None: ``config.generator``) that are for the checks alone."""
    source = generator_of(config.generator or "") if generator is None else generator
    rng = np.random.default_rng([config.seed, 1])
    return [draw(source, rng) for _ in range(config.samples)]


def _learn(
    training: Training,
    agent: OnPolicyAlgorithm,
    solutions: Sequence[Placement] | None,
    resume: bool,
) -> None:
    """All steps that are left, watched by ``training``; imitation before the first of them."""
    config = training.config
    went_on = resume and training.load(agent)
    if solutions is not None and not went_on:
        imitate(
            agent.policy,  # type: ignore[arg-type]
            training.tasks.problems,
            solutions,
            epochs=config.imitation_epochs,
            learning_rate=config.imitation_rate,
            seed=config.seed,
        )
    training.tell(agent.num_timesteps / config.total_steps)  # before the first deck
    told: Any = agent
    training.steps, training.updates = told.num_timesteps, told._n_updates
    left = config.total_steps - agent.num_timesteps
    if left <= 0:
        return
    # Without log_interval stable-baselines3 prints nothing and keeps the last figures. A logger of
    # its own making would leave an empty folder in the folder of temporary files.
    agent.set_logger(Logger(folder=None, output_formats=[]))
    try:
        agent.learn(left, training, log_interval=None, reset_num_timesteps=not went_on)  # type: ignore[arg-type]
    except BudgetSpent:  # of measurements: a limit like the others
        training.on_training_end()
    finally:
        training.steps, training.updates = told.num_timesteps, told._n_updates


def make_policy(config: TrainConfig) -> Net:
    """A new network for ``config``, from torch's random state."""
    return make_net(config.network, config.formulation)


def make_env(
    config: TrainConfig, tasks: Tasks, generator: Generator | None = None
) -> PlacementVecEnv:
    """Episodes side by side; or fresh ones of a ``generator``."""
    num_envs, _ = config.rollout(_mean_groups(tasks))
    if generator is not None:
        source = Source.of(
            config.kind.rules_of,
            generator,
            evaluator=tasks.problems.evaluator,
            reward=tasks.problems.reward,
            observe="graph",
            **config.kind.options,
        )
        fresh = FreshRules(source, num_envs, config.repeats, tasks.problems)
        return PlacementVecEnv(FreshEpisodes(fresh, config.seed))
    env = PlacementVecEnv(Episodes(tasks.rules(config, num_envs), config.seed, config.repeats))
    choices = tasks.problems.choices(tasks.starts)
    env.rules.keep(np.arange(len(choices)), choices, tasks.start_s)
    return env


def make_agent(
    config: TrainConfig, env: PlacementVecEnv, net: Net, tasks: Tasks
) -> OnPolicyAlgorithm:
    """``config.algorithm`` that updates ``net`` after every rollout in ``env``.

    Raises:
        PolicyError: it cannot be imported, is no on-policy algorithm of stable-baselines3, or has
            no use for something that is configured.
    """
    kind: Any = find(config.algorithm, "algorithm")
    if not (isinstance(kind, type) and issubclass(kind, OnPolicyAlgorithm)):
        raise PolicyError(
            f"algorithm {config.algorithm!r} must be an on-policy algorithm of stable-baselines3: "
            f"PPO, A2C, or a subclass of one"
        )
    unused = getattr(kind, "unused", ())
    for name in unused:
        if getattr(config, name) != getattr(TrainConfig, name):
            raise PolicyError(
                f"{name} = {getattr(config, name)} would count for nothing: {config.algorithm} "
                f"does not use it; leave it out, or take another algorithm"
            )
    _, steps = config.rollout(_mean_groups(tasks))
    first, last = config.learning_rate, config.last_learning_rate
    observed = "nodes" in env.observation_space.spaces  # type: ignore[attr-defined]
    options: dict[str, Any] = {
        # What is left is below 0 in the last update, whose rollout goes beyond the end.
        "learning_rate": lambda left: between(last, first, max(0.0, left)),
        "n_steps": steps,
        "batch_size": _part(steps * env.num_envs, config.minibatches),
        "n_epochs": config.epochs,
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
        "ent_coef": config.entropy,
        "normalize_advantage": False,  # the buffer does it, for each graph
        "rollout_buffer_class": PerGraphBuffer,
        "policy_kwargs": {"net": net, "store": None if observed else tasks.store},
        "seed": config.seed,
        "device": config.device,
    }
    known = _arguments(kind)
    other = sorted(config.algorithm_options.keys() - known)
    if other:
        raise PolicyError(
            f"{config.algorithm} has no {other[0]!r} (algorithm_options){meant(other[0], known)}"
        )
    chosen = {k: v for k, v in options.items() if k in known and k not in unused}
    chosen |= config.algorithm_options
    build: Any = kind
    agent: OnPolicyAlgorithm = build(PlacementPolicy, env, **chosen)
    return agent


def _arguments(kind: type) -> set[str]:
    """The arguments of a class, those that it passes on to the classes below it included."""
    known: set[str] = set()
    for base in kind.__mro__:
        init = vars(base).get("__init__")
        if init is not None:
            parameters = signature(init).parameters
            known |= set(parameters)
            if not any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
                break
    return known


def _config(
    config: TrainConfig,
    policy: TrainedPolicy | None,
    problems: Sequence[Problem] | Generator | str,
) -> TrainConfig:
    """Of the policy and the generator that are given."""
    _check_device(config.device)
    if isinstance(problems, str) or callable(problems):
        config = replace(config, generator=name_of(problems))
    if config.generator is not None:
        config = replace(config, cold=True)
    if policy is not None:  # options of another formulation are an error
        config = replace(config, formulation=policy.formulation, network=policy.net.config)
    return config


def _check_device(name: str) -> None:
    """Raises: PolicyError, there is none: stable-baselines3 would take the CPU and say nothing."""
    try:
        usable = name == "auto" or torch.device(name).type != "cuda" or torch.cuda.is_available()
    except RuntimeError:
        usable = False
    if not usable:
        raise PolicyError(f"device = {name!r} is not here; use cpu, cuda (with a GPU) or auto")


def _origin(
    config: TrainConfig, tasks: Tasks, start: Start, held_out: Tasks | None
) -> dict[str, str]:
    """What a training's values depend on, as text: a checkpoint goes on only with the same."""

    def ids(starts: Sequence[Placement | None]) -> list[str | None]:
        return [None if s is None else placement_id(s) for s in starts]

    held = [] if held_out is None else held_out.problems.problems
    evaluator = tasks.problems.evaluator
    reference_s = start.reference_s
    seams = (config.reward, config.generator, config.algorithm, config.formulation)
    described = map(describe, (*seams, getattr(config.network, "encoder", None)))
    facts = {
        "configuration": asdict(config),
        "your code": {x["name"]: x["code"][:12] for x in described if isinstance(x, dict)},
        "evaluator": "simulator" if evaluator is score else type(evaluator).__name__,
        "problems": [problem_fingerprint(p) for p in tasks.problems.problems],
        "warm starts": ids(tasks.starts),
        # Those that follow from the problems may be measured: they differ each time.
        "reference_s": None if reference_s is None else [float(s) for s in reference_s],
        "held-out problems": [problem_fingerprint(p) for p in held],
        "their warm starts": ids([] if held_out is None else held_out.starts),
    }
    return {what: json.dumps(value) for what, value in facts.items()}


def _mean_groups(tasks: Tasks) -> float:
    return float(tasks.problems.num_groups.mean())


def _part(rollout: int, minibatches: int) -> int:
    """Steps of a mini-batch: a whole fraction of the rollout, 32 or more if possible."""
    most = max(1, min(minibatches, rollout // 32))
    return rollout // max(n for n in range(1, most + 1) if rollout % n == 0)


class PerGraphBuffer(DictRolloutBuffer):
    """A rollout whose advantages have mean 0 and deviation 1 over the steps of each graph.

    Steps of one episode say nearly the same of it: over those of a single one the mean *is* what
    it earned, and taking that off would leave nothing to learn. Graphs with fewer than ``_ENOUGH``
    independent samples therefore share one mean and one deviation: every episode counts as a
    sample, and so do ``1 / (1 - gamma * lambda)`` steps, as far as an advantage looks ahead.
    """

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: Any) -> None:
        super().compute_returns_and_advantage(last_values, dones)
        numbers = self.observations["problem"].reshape(self.advantages.shape)
        ids = np.unique(numbers, return_inverse=True)[1].reshape(numbers.shape)
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
