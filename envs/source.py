"""What is played: problems that stay, or fresh ones of a generator, and by which rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from inspect import Parameter, signature
from typing import Any, Literal

import numpy as np

from envs.generators import Generator, draw, generator_of, room_of, small_problems
from envs.graphs import GraphArrays
from envs.lookup import find
from envs.perturbation import Perturbation
from envs.problems import ONE_RUNTIME, EnvError, Evaluator, ProblemSet, Runtime, Sizes
from envs.rewards import Reward, log_speedup
from envs.rules import Rules
from placement.problem import Planner, Problem
from placement.simulator import score
from placement.tools.files import short
from placement.tools.named import meant

Observe = Literal["number", "graph"]
Problems = Sequence[Problem] | Generator | str | None
_CALLED = {
    "baseline": "a planner: placement.planners.load('heft')",
    "evaluator": "placement.simulator.score, envs.problems.Measured(Executor), or a runtime",
    "perturbation": "an envs.perturbation.Perturbation",
    "reward": "a function of an envs.rewards.Outcome, or its name package.module:name",
}


class ArgumentError(EnvError, TypeError):
    """There is no such argument; as Python's own error, after which TorchRL tries without."""


def check_called(arguments: object) -> None:
    """Raises: EnvError, one of these fields cannot be called."""
    for what, words in _CALLED.items():
        by_default = getattr(type(arguments), what, None)
        value = getattr(arguments, what, by_default)
        by_name = what == "reward" and isinstance(value, str)
        if not (value is by_default or by_name or callable(value) or hasattr(value, "run")):
            raise EnvError(f"{what} = {short(value)} must be {words}")


def reward_of(name: str) -> Reward:
    """The function of that name.

    Raises:
        EnvError: it cannot be imported, or is none.
    """
    reward: Reward = find(name, "reward")
    if not callable(reward):
        raise EnvError(f"reward {name!r} is {short(reward)}; it must be {_CALLED['reward']}")
    return reward


@dataclass(frozen=True, eq=False)
class Source:
    """The arguments that all environments share; see ``PlacementEnv``.

    Raises:
        EnvError: no problems, wrong references, one runtime for several problems, or a name that
            cannot be imported.
    """

    rules_of: Callable[..., Rules]
    problems: Problems = None
    reference_s: Sequence[float] | None = None
    baseline: Planner | None = None
    evaluator: Evaluator | Runtime = score
    perturbation: Perturbation | None = None
    reward: Reward | str = log_speedup
    observe: Observe = "number"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.observe not in ("number", "graph"):
            raise EnvError(f"observe = {self.observe!r} is unknown; use 'number' or 'graph'")
        check_called(self)
        self._check_options()
        several = self.perturbation is not None or self.generator is not None
        if several and hasattr(self.evaluator, "run"):
            made_by = "a perturbation" if self.generator is None else "a generator"
            raise EnvError(ONE_RUNTIME.format(f"{made_by} makes others"))
        for_listed = self.perturbation is not None or self.reference_s is not None
        if self.generator is not None and for_listed:
            raise EnvError("reference_s and perturbation are for given problems, not a generator")

    def _check_options(self) -> None:
        """Raises: ArgumentError, one that neither this class nor the rules have."""
        own = list(signature(self.rules_of).parameters.values())[2:]  # not: problems, num_envs
        shared = [f.name for f in fields(self)[1:] if f.name != "options"]
        known = [*shared, *(p.name for p in own)]
        for name in self.options:
            if name not in known and all(p.kind is not Parameter.VAR_KEYWORD for p in own):
                near = meant(name, known) or ";"
                raise ArgumentError(
                    f"unexpected keyword argument {name!r}{near} arguments are {', '.join(known)}"
                )

    @classmethod
    def of(cls, rules_of: Callable[..., Rules], problems: Problems, **arguments: Any) -> Source:
        """With the arguments of an environment: those that are not of this class are its rules'."""
        known = {f.name for f in fields(cls)} - {"options"}
        shared = {k: arguments.pop(k) for k in known & arguments.keys()}
        return cls(rules_of, problems, **shared, options=arguments)

    @cached_property
    def generator(self) -> Generator | None:
        """Where fresh problems come from; None: the problems are given."""
        problems = self.problems
        if isinstance(problems, str) or (callable(problems) and not isinstance(problems, Problem)):
            return generator_of(problems)
        return None

    @cached_property
    def room(self) -> Sizes | None:
        """Room for every problem of the generator."""
        return None if self.generator is None else room_of(self.generator)

    @cached_property
    def given(self) -> ProblemSet:
        """The problems that are given, or some small ones."""
        problems: Any = small_problems() if self.problems is None else self.problems
        chosen = self._set(problems)
        if self.perturbation is None:
            return chosen
        return chosen.and_more(self.perturbation(problems)[len(problems) :], self.baseline)

    def rules(self, num_envs: int) -> Rules:
        """Rules of the given problems."""
        return self._ruled(self.given, num_envs)

    def draw(self, rng: np.random.Generator) -> Problem:
        """A fresh problem of the generator."""
        assert self.generator is not None
        return draw(self.generator, rng, self.room)

    def fresh(self, problem: Problem) -> Rules:
        """Rules of one episode with a fresh problem."""
        return self._ruled(self._set([problem]), 1)

    def _set(self, problems: Sequence[Problem]) -> ProblemSet:
        reward = reward_of(self.reward) if isinstance(self.reward, str) else self.reward
        chosen = ProblemSet.build(problems, self.reference_s, self.baseline, self.evaluator)
        return replace(chosen, reward=reward, room=self.room)

    def _ruled(self, chosen: ProblemSet, num_envs: int) -> Rules:
        rules = self.rules_of(chosen, num_envs, **self.options)
        if self.observe == "graph":
            rules.graphs = GraphArrays(chosen.problems, self.room)
        return rules
