"""``TrainConfig``: everything that a training is decided by, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from agents.encoder import PolicyError
from agents.trained import network_config
from envs.formulations import FORMULATIONS, Formulation, formulation_of
from envs.problem_set import EnvError, find
from envs.rules import check_range
from placement.tools.named import convert_fields

_POSITIVE = ("total_steps", "epochs", "minibatches", "samples", "num_checks", "repeats")
_SHARES = ("gamma", "gae_lambda")


@dataclass(frozen=True)
class TrainConfig:
    """``total_steps`` is the dial; everything else has a default that follows from it.

    Attributes:
        total_steps: environment steps (one-shot: one placement; otherwise one group or move).
        formulation: a name of ``envs.formulations``, or ``package.module:name`` of one of yours.
        seed: the same seed gives the same policy.
        num_envs: episodes side by side; 0 = 4 to 16, for about 20 updates in all.
        steps_per_env: steps of each between updates; 0 = about as many as there are groups
            (one-shot: 4 to 64, for about 20 updates).
        learning_rate, last_learning_rate: from the first step to the last, linearly.
        entropy, last_entropy: the same for the weight of the entropy.
        epochs, minibatches: passes over a rollout, and equal parts of at least 32 steps that it
            is cut into, if it is large enough.
        gamma, gae_lambda: discount, and its trace. Where placements are built the reward comes at
            the end: gamma is 1.
        num_checks: greedy evaluations of all problems, and of those held out, during training.
        max_seconds: stop when the next update would end later than this; 0 = no limit. (The
            measurements of ``envs.Measured`` end a training, too: its answer is what ran until
            then.)
        repeats: episodes of a problem that follow one another, so that each rollout has several of
            few problems, not one of many: 8 where there are more problems than ``num_envs``.
        imitation_epochs: passes over the solutions that ``train`` is given, before PPO.
        imitation_rate: learning rate meanwhile.
        cold: no warm starts: the policy neither begins at a baseline's placements nor sees them.
        reward: ``package.module:name`` of what a placement earns (``envs.rewards``).
        generator: ``package.module:name`` of where fresh problems come from, one for every episode
            (``envs.generators``); None: the problems that ``train`` is given.
        samples: of a generator: problems that are drawn beforehand for the checks alone.
        algorithm: ``package.module:Class``: an on-policy algorithm of stable-baselines3, or a
            subclass of one. It gets those of the arguments above that it has. What it names
            ``unused`` must be as it is here.
        algorithm_options: its other arguments, by name.
        device: where the network learns: ``cpu``, ``cuda``, or ``auto``.
        network: kind and size of a new network: ``agents.encoder.NetworkConfig``, or what its class
            calls ``Config``, or fields of that (ignored when training goes on from a policy).
    """

    total_steps: int = 20_000
    formulation: str = "sequential"
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
    max_seconds: float = 0.0
    repeats: int = 1
    imitation_epochs: int = 20
    imitation_rate: float = 1e-3
    cold: bool = False
    reward: str = "envs.rewards:log_speedup"
    generator: str | None = None
    samples: int = 16
    algorithm: str = "stable_baselines3:PPO"
    algorithm_options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    network: Any = None

    def __post_init__(self) -> None:
        convert_fields(self, PolicyError)
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None or type(value) not in (int, float):
                continue
            least, most = int(f.name in _POSITIVE), 1.0 if f.name in _SHARES else math.inf
            check_range(f.name, value, least, most, PolicyError)
        if self.seed >= 2**32:
            raise PolicyError(f"seed = {self.seed} must be a whole number from 0 to 2**32 - 1")
        if self.formulation not in FORMULATIONS and ":" not in self.formulation:
            raise PolicyError(
                f"formulation {self.formulation!r} is unknown; use one of {sorted(FORMULATIONS)}, "
                f"or your own as package.module:name"
            )
        asked = self.network
        if isinstance(asked, Mapping):  # of a command line: all there are, most of them None
            asked = {name: value for name, value in asked.items() if value is not None}
        try:
            network = network_config(find(self.kind.network, "network"), asked)
        except EnvError as error:
            raise PolicyError(str(error)) from error
        object.__setattr__(self, "network", network)

    @property
    def kind(self) -> Formulation:
        """The formulation itself.

        Raises:
            PolicyError: it cannot be imported.
        """
        try:
            return formulation_of(self.formulation)
        except EnvError as error:
            raise PolicyError(str(error)) from error

    def rollout(self, mean_groups: float) -> tuple[int, int]:
        """Environments, and steps of each between two updates."""
        length = self.kind.steps or max(1, round(mean_groups))
        num_envs = self.num_envs or min(max(self.total_steps // (80 * length) * 4, 4), 16)
        if self.steps_per_env:
            return num_envs, self.steps_per_env
        if self.kind.steps == 1:
            return num_envs, min(max(self.total_steps // (20 * num_envs), 4), 64)
        return num_envs, max(length, 4)
