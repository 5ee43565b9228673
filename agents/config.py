"""``TrainConfig``: everything that a training is decided by, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from agents.encoder import NetworkConfig, PolicyError
from envs.formulations import FORMULATIONS, Formulation, formulation_of
from envs.problems import EnvError
from envs.rules import check_range
from placement.tools.named import convert_fields, meant

# What a formulation does not set for itself (``Formulation.training``): for building placements.
DEFAULTS: Mapping[str, float] = MappingProxyType(
    {
        "learning_rate": 3e-3,
        "last_learning_rate": 1e-4,
        "entropy": 0.02,
        "last_entropy": 0.003,
        "gamma": 1.0,
        "gae_lambda": 0.99,
    }
)
_POSITIVE = ("total_steps", "epochs", "minibatches", "width", "samples", "num_checks", "workers",
             "repeats")  # fmt: skip
_SHARES = ("gamma", "gae_lambda", "curriculum", "again", "elite")


@dataclass(frozen=True)
class TrainConfig:
    """``total_steps`` is the dial; everything else has a default that follows from it.

    Attributes:
        total_steps: environment steps (one-shot: one placement, ``group_place``: half of one;
            otherwise one group or move).
        formulation: a name of ``envs.formulations``, or ``package.module:name`` of one of yours.
        seed: the same seed gives the same policy.
        num_envs: episodes side by side; 0 = 4 to 16, for about 20 updates in all.
        steps_per_env: steps of each between updates; 0 = about as many as there are groups
            (one-shot: 4 to 64, for about 20 updates; the two searches: 128).
        learning_rate, last_learning_rate: from the first step to the last, linearly. None, of these
            and the next four: the formulation's (``envs.formulations``), or those in ``DEFAULTS``.
        entropy, last_entropy: the same for the weight of the entropy.
        epochs, minibatches: passes over a rollout, and equal parts of at least 32 steps that it
            is cut into, if it is large enough.
        gamma, gae_lambda: discount, and its trace. Where placements are built the reward comes at
            the end: gamma is 1. Searches, ``refine`` and ``sweep`` are rewarded at every step.
        num_checks: greedy evaluations of all problems, and of those held out, during training.
        patience: stop after so many checks without a better greedy or best placement; 0 = never.
        max_seconds: stop when the next update would end later than this; 0 = no limit.
        max_evaluations: stop after so many evaluated placements; 0 = no limit. (The measurements
            of ``envs.Measured`` end a training, too: its answer is what ran until then.)
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
        reward: ``package.module:name`` of what a placement earns (``envs.rewards``).
        generator: ``package.module:name`` of where fresh problems come from, one for every episode
            (``envs.generators``); None: the problems that ``train`` is given.
        samples: of a generator: problems that are drawn beforehand for the checks alone.
        algorithm: ``package.module:Class``: an on-policy algorithm of stable-baselines3, or a
            subclass of one. It gets those of the arguments above that it has.
        algorithm_options: its other arguments, by name.
        device: where the network learns: ``cpu``, ``cuda``, or ``auto``.
        network: kind and size of a new network (ignored when training goes on from a policy).
    """

    total_steps: int = 20_000
    formulation: str = "sequential"
    seed: int = 0
    num_envs: int = 0
    steps_per_env: int = 0
    learning_rate: float | None = None
    last_learning_rate: float | None = None
    entropy: float | None = None
    last_entropy: float | None = None
    epochs: int = 4
    minibatches: int = 4
    gamma: float | None = None
    gae_lambda: float | None = None
    num_checks: int = 10
    patience: int = 0
    max_seconds: float = 0.0
    max_evaluations: int = 0
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
    reward: str = "envs.rewards:log_speedup"
    generator: str | None = None
    samples: int = 16
    algorithm: str = "stable_baselines3:PPO"
    algorithm_options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    network: NetworkConfig = field(default_factory=NetworkConfig)

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
        if unknown := sorted(self.kind.training.keys() - DEFAULTS.keys()):
            raise PolicyError(
                f"formulation {self.formulation!r}: training has {unknown[0]!r}"
                f"{meant(unknown[0], DEFAULTS) or ';'} it may have {', '.join(DEFAULTS)}"
            )
        other = self.kind.steps != 1 or self.algorithm != type(self).algorithm
        if self.elite == 1.0 or (self.elite and other):
            raise PolicyError(
                f"elite = {self.elite} must be a share below 1, and 0 unless the formulation is "
                f"one_shot and the algorithm PPO: it is {self.formulation}, {self.algorithm}"
            )
        if self.groups and not self.kind.builds:
            building = sorted(n for n, f in FORMULATIONS.items() if f.builds)
            raise PolicyError(
                f"groups = {self.groups} must be 0 unless the formulation is one of "
                f"{building}: it is {self.formulation}"
            )
        if self.generator is not None and (self.groups or self.workers > 1 or self.curriculum):
            raise PolicyError(
                "a generator's problems are neither merged (groups) nor shared (workers), and "
                "a curriculum is its own affair (an attribute progress)"
            )

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

    def resolved(self) -> TrainConfig:
        """With the defaults of the formulation instead of None."""
        known = {**DEFAULTS, **self.kind.training}
        return replace(self, **{k: known[k] for k in DEFAULTS if getattr(self, k) is None})

    def rollout(self, mean_groups: float) -> tuple[int, int]:
        """Environments, and steps of each between two updates."""
        if self.kind.mode == "guided_search":
            return self.num_envs or 16, self.steps_per_env or 128
        length = self.kind.steps or max(1, round(mean_groups))
        num_envs = self.num_envs or min(max(self.total_steps // (80 * length) * 4, 4), 16)
        if self.steps_per_env:
            return num_envs, self.steps_per_env
        if self.kind.steps == 1:
            return num_envs, min(max(self.total_steps // (20 * num_envs), 4), 64)
        return num_envs, max(length, 4)
