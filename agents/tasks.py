"""What a training is for: problems, where policies start on them, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents.config import TrainConfig
from agents.dispatch import answer
from agents.encoder import PolicyError
from agents.store import GraphStore
from agents.trained import Net, decode, walk
from envs.problems import (
    Evaluator,
    ProblemSet,
    Runtime,
    canonical,
    check_problems,
    choice_of,
    single_device_s,
)
from envs.rules import Rules
from envs.source import check_called, reward_of
from placement.planners import load
from placement.problem import Placement, Planner, Problem, Solution
from placement.search.coarsen import grouped
from placement.simulator import score


@dataclass(frozen=True)
class Start:
    """Where policies start, and what reward 0 is; the arguments of ``agents.training.train``.

    Attributes:
        baseline: warm starts are its answers.
        warm: int32 ``[N]`` per problem, warm starts instead.
        reference_s: ``[P]`` seconds of reward 0; None: of the warm start, or of the best device.
        solutions: int32 ``[N]`` per problem: imitate these first (``agents.expert``).
        evaluator: simulator (default), ``envs.problems.Measured(Executor)``, or a runtime.

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
        problems: as they are placed: with operators merged into ``config.groups``.
        store: their graphs.
        warm_starts: int32 ``[N]`` per problem, as they were given.
        starts: the same with whole groups, devices renamed; None: no start.
        start_s: float64 ``[P]``, inf: no start.
        known: the warm starts as they were given, with their values: no answer may be worse.
        evaluations: that all this took.
    """

    problems: ProblemSet
    store: GraphStore
    warm_starts: Sequence[Placement | None]
    starts: Sequence[Placement | None]
    start_s: NDArray[np.float64]
    known: dict[int, Solution]
    evaluations: int

    @classmethod
    def of(cls, whole: Sequence[Problem], config: TrainConfig, start: Start) -> Tasks:
        """``whole`` problems, started where ``start`` says.

        Raises:
            EnvError, PolicyError: wrong problems, references or warm starts.
        """
        check_problems(whole)
        problems = [grouped(p, config.groups) for p in whole] if config.groups else whole
        warm_starts = _warm_starts(whole, problems, config, start)
        starts = [
            None if w is None else canonical(p, _unsplit(p, w))
            for p, w in zip(problems, warm_starts, strict=True)
        ]
        chosen = ProblemSet.build(problems, [1.0] * len(problems), evaluator=start.evaluator)
        start_s = np.full(len(problems), np.inf)
        for i, placement in enumerate(starts):
            if placement is not None:
                start_s[i] = chosen.values(i, choice_of(problems[i], placement)[None])[0]
        reference_s = start.reference_s
        if reference_s is None:
            reference_s = [
                max(s, 1e-12) if np.isfinite(s) else single_device_s(p, chosen.evaluator)
                for p, s in zip(problems, start_s.tolist(), strict=True)
            ]
        chosen = ProblemSet.build(problems, reference_s, evaluator=chosen.evaluator)
        chosen = replace(chosen, reward=reward_of(config.reward))
        known, evaluations = _known(whole, warm_starts, chosen, starts, start_s)
        return cls(
            chosen, GraphStore(problems, starts), warm_starts, starts, start_s, known, evaluations
        )

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
        rules = make_rules(config, self, len(ids), again=0.0)
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


def make_rules(
    config: TrainConfig, tasks: Tasks, num_envs: int, again: float | None = None
) -> Rules:
    """The rules that ``config`` plays by on these tasks; searches begin at their starts."""
    options = rule_options(config)
    if not config.kind.builds:
        options["starts"] = [
            load("single_device")(p).placement if s is None else s
            for p, s in zip(tasks.problems.problems, tasks.starts, strict=True)
        ]
    if again is not None and "again" in options:
        options["again"] = again
    return config.kind.rules(tasks.problems, num_envs, **options)


def rule_options(config: TrainConfig) -> dict[str, Any]:
    """What the rules of a formulation are given besides starts."""
    options: dict[str, Any] = config.kind.options_of(config.network)
    if config.kind.builds:
        return options
    refines = config.kind.mode == "refine"
    names = ["best_so_far", "random_start"] if refines else ["width", "again"]
    if config.moves:  # else as many as the rules make
        names.append("moves")
    return options | {name: getattr(config, name) for name in names}


def _warm_starts(
    whole: Sequence[Problem], problems: Sequence[Problem], config: TrainConfig, start: Start
) -> list[Placement | None]:
    """The warm starts of all problems, int32 ``[N]`` each, as they are given."""
    warm = start.warm
    if config.cold:
        warm = [None] * len(problems)
    if warm is None:
        baseline = start.baseline
        warm = [None if baseline is None else baseline(p).placement for p in problems]
    if len(warm) != len(problems):
        raise PolicyError(f"{len(warm)} warm starts for {len(problems)} problems")
    return [None if w is None else p.check_placement(w) for p, w in zip(whole, warm, strict=True)]


def _known(
    whole: Sequence[Problem],
    warm_starts: Sequence[Placement | None],
    chosen: ProblemSet,
    starts: Sequence[Placement | None],
    start_s: NDArray[np.float64],
) -> tuple[dict[int, Solution], int]:
    """The warm starts with their values, by problem, and the evaluations that these took."""
    known: dict[int, Solution] = {}
    num_split = 0
    for i, (placement, start) in enumerate(zip(warm_starts, starts, strict=True)):
        if placement is None or start is None:
            continue
        if np.array_equal(placement, _unsplit(chosen.problems[i], placement)):
            known[i] = Solution(start, float(start_s[i]))
        else:
            value_s = float(chosen.evaluator(whole[i], placement[None])[0])
            known[i] = Solution(placement, value_s)
            num_split += 1
    return known, len(known) + num_split


def _unsplit(problem: Problem, placement: Placement) -> Placement:
    """int32 ``[N]`` with whole groups: those of ``config.groups`` a warm start may split."""
    return choice_of(problem, placement)[problem.graph.group]
