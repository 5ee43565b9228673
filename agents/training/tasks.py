"""What a training is for: problems, where policies start on them, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents.dispatch.network import answer
from agents.encoder import PolicyError
from agents.store import GraphStore
from agents.trained import Net, decode, walk
from agents.training.config import TrainConfig
from envs.base import check_called, reward_of
from envs.problem_set import (
    Evaluator,
    ProblemSet,
    Runtime,
    canonical,
    check_problems,
    choice_of,
    single_device_s,
)
from envs.rules import Rules
from placement.planners import load
from placement.problem import Placement, Planner, Problem
from placement.search.evaluation import single_devices
from placement.simulator import score


@dataclass(frozen=True)
class Start:
    """Where policies start, and what reward 0 is; the arguments of ``agents.training.train``.

    Attributes:
        baseline: warm starts are its answers.
        warm: int32 ``[N]`` per problem, warm starts instead.
        reference_s: ``[P]`` seconds of reward 0; None: of the warm start, or of the best device.
        solutions: int32 ``[N]`` per problem: imitate these first (``agents.training.expert``).
        evaluator: simulator (default), ``envs.problem_set.Measured(Executor)``, or a runtime.

    Raises:
        EnvError: a ``baseline`` or an ``evaluator`` that cannot be called.
    """

    baseline: Planner | None = None
    warm: Sequence[Placement | None] | None = None
    reference_s: Sequence[float] | None = None
    solutions: Sequence[Placement] | None = None
    evaluator: Evaluator | Runtime = score

    def __post_init__(self) -> None:
        check_called(self)


@dataclass(frozen=True, eq=False)
class Tasks:
    """Problems, their graphs, where policies start, and float64 ``[P]`` what that is worth.

    Attributes:
        problems: what is placed.
        store: their graphs.
        starts: int32 ``[N]`` per problem, devices renamed; None: no start.
        start_s: float64 ``[P]``, inf: no start.
        evaluations: that this took.
    """

    problems: ProblemSet
    store: GraphStore
    starts: Sequence[Placement | None]
    start_s: NDArray[np.float64]
    evaluations: int = 0

    @classmethod
    def of(cls, problems: Sequence[Problem], config: TrainConfig, start: Start) -> Tasks:
        """``problems``, started where ``start`` says.

        Raises:
            EnvError, PolicyError: wrong problems, references or warm starts.
        """
        check_problems(problems)
        starts = [
            None if w is None else canonical(p, p.check_placement(w))
            for p, w in zip(problems, _warm_starts(problems, config, start), strict=True)
        ]
        chosen = ProblemSet.build(problems, [1.0] * len(problems), evaluator=start.evaluator)
        start_s = np.full(len(problems), np.inf)
        for i, placement in enumerate(starts):
            if placement is not None:
                start_s[i] = chosen.values(i, choice_of(problems[i], placement)[None])[0]
        reference_s, evaluations = start.reference_s, sum(s is not None for s in starts)
        if reference_s is None:
            alone = (p for p, s in zip(problems, start_s, strict=True) if not np.isfinite(s))
            evaluations += sum(len(single_devices(p)) for p in alone)
            reference_s = [
                max(s, 1e-12) if np.isfinite(s) else single_device_s(p, chosen.evaluator)
                for p, s in zip(problems, start_s.tolist(), strict=True)
            ]
        chosen = ProblemSet.build(problems, reference_s, evaluator=chosen.evaluator)
        chosen = replace(chosen, reward=reward_of(config.reward))
        # ``dispatch`` decodes without a start, so it learns without one.
        seen = None if "whose" in config.kind.sees else starts
        return cls(chosen, GraphStore(problems, seen), starts, start_s, evaluations)

    def rules(self, config: TrainConfig, num_envs: int) -> Rules:
        """The rules that ``config`` plays by; what improves placements begins at the starts."""
        options: dict[str, Any] = {}
        if not config.kind.builds:
            options["starts"] = [
                load("single_device")(p).placement if s is None else s
                for p, s in zip(self.problems.problems, self.starts, strict=True)
            ]
        return config.kind.rules(self.problems, num_envs, **options)

    def answers(
        self, config: TrainConfig, net: Net
    ) -> tuple[NDArray[np.int32], NDArray[np.float64], int]:
        """One answer per problem: choices int32 ``[P, G]``, seconds ``[P]``, evaluations used."""
        ids = np.arange(len(self.problems.problems))
        if config.formulation == "dispatch" and self.problems.evaluator is score:  # in a kernel
            answers = [answer(net, p) for p in self.problems.problems]
            choices = np.full((len(ids), self.problems.max_groups), -1, np.int32)
            for row, (choice, _) in zip(choices, answers, strict=True):
                row[: len(choice)] = choice
            return choices, np.array([seconds for _, seconds in answers]), len(ids)
        if config.kind.builds:
            choices = decode(net, self.problems, self.store, ids)
            return choices, self.problems.seconds(ids, choices), len(ids)
        rules = self.rules(config, len(ids))
        generator = torch.Generator().manual_seed(config.seed)
        choices, seconds = walk(net, self.store, rules, generator)
        return choices, seconds, rules.num_evaluations

    def described(self) -> list[dict[str, Any]]:
        """What they are, for a policy's card."""
        return [
            {
                "graph": p.graph.name,
                "fingerprint": p.graph.fingerprint,
                "devices": list(p.cluster.device_names),
                "objective": p.objective,
            }
            for p in self.problems.problems
        ]


def _warm_starts(
    problems: Sequence[Problem], config: TrainConfig, start: Start
) -> Sequence[Placement | None]:
    """The warm starts of all problems, int32 ``[N]`` each, as they are given."""
    if config.cold:
        return [None] * len(problems)
    if start.warm is None:
        baseline = start.baseline
        return [None if baseline is None else baseline(p.one_phase).placement for p in problems]
    if len(start.warm) != len(problems):
        raise PolicyError(f"{len(start.warm)} warm starts for {len(problems)} problems")
    for i, warm in enumerate(start.warm):
        if warm is not None and np.ndim(warm) == 2 and len(warm) > 1:
            raise PolicyError(
                f"warm start {i} takes turns in {len(warm)} phases, and episodes have one: "
                f"give a placement [N]"
            )
    return start.warm
