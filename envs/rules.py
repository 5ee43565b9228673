"""The rules of an environment, written once for ``B`` episodes at a time.

``envs.base.PlacementEnv`` shows one of them as a Gymnasium environment,
``envs.vector.PlacementVectorEnv`` all of them, and ``envs.sb3.PlacementVecEnv`` to
stable-baselines3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.graphs import GraphArrays
from envs.problem_set import EnvError, Floats, ProblemSet
from placement.tools.files import short

Observation = dict[str, NDArray[Any]]
Numbers = NDArray[np.integer[Any]]
Rng = np.random.Generator


class Rules(ABC):
    """``B`` episodes over a ``ProblemSet``; row ``b`` of every array belongs to episode ``b``.

    Attributes:
        problems: what is placed.
        observation_space, action_space: of one episode.
        ids: int64 ``[B]`` the problem of each episode.
        choices: int32 ``[B, G]`` the device of each group: when an episode is over, its answer;
            -1 = not decided.
        value_s: float64 ``[B]`` seconds of that answer, inf where it cannot run.
        best_s: float64 ``[P]`` the best value ever seen of each problem, inf at first.
        best_choices: int32 ``[P, G]`` its choice of devices.
        num_evaluations: placements evaluated so far, of all episodes.
        graphs: of the problems, where they are observed, too.
    """

    graphs: GraphArrays | None = None
    observation_space: spaces.Dict
    action_space: spaces.Space[Any]

    def __init__(self, problems: ProblemSet, num_envs: int) -> None:
        count, groups = len(problems.problems), problems.max_groups
        self.problems = problems
        self.ids = np.zeros(num_envs, np.int64)
        self.choices = np.full((num_envs, groups), -1, np.int32)
        self.value_s = np.full(num_envs, np.inf)
        self.best_s = np.full(count, np.inf)
        self.best_choices = np.zeros((count, groups), np.int32)
        self.num_evaluations = 0

    @abstractmethod
    def start(self, rows: Numbers, ids: Numbers, rng: Rng | None = None) -> None:
        """Begin new episodes in ``rows`` with problems ``ids``; ``rng`` is for their draws."""

    @abstractmethod
    def observe(self) -> Observation:
        """Observations ``[B, ...]``, in new arrays every time."""

    def seen(self) -> Observation:
        """The observations with the graphs, ``[B, ...]``."""
        seen = self.observe()
        return seen if self.graphs is None else seen | self.graphs(self.ids)

    @property
    def seen_space(self) -> spaces.Dict:
        """Of one row of ``seen()``."""
        more = {} if self.graphs is None else self.graphs.spaces
        return spaces.Dict({**self.observation_space.spaces, **more})

    @abstractmethod
    def masks(self) -> NDArray[np.bool_]:
        """bool ``[B, A]`` legal actions, flattened as ``MaskablePPO`` wants them."""

    @abstractmethod
    def act(self, actions: NDArray[Any]) -> tuple[Floats, NDArray[np.bool_]]:
        """Take one action per episode: rewards float64 ``[B]``, and bool ``[B]`` which are over."""

    def keep(self, ids: NDArray[np.int64], choices: NDArray[np.int32], seconds: Floats) -> None:
        """Remember the best of choices int32 ``[B, G]`` for problems int64 ``[B]``."""
        for i, problem in enumerate(ids):
            if seconds[i] < self.best_s[problem]:
                self.best_s[problem] = seconds[i]
                self.best_choices[problem] = choices[i]

    def state(self) -> dict[str, Any]:
        """What later episodes depend on, beside ``best_s`` and ``best_choices``: JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027 (most have none)
        """Go on from ``state()``."""


class BuildingRules(Rules):
    """Rules that make a placement and evaluate it once, at the end, against the reference."""

    @abstractmethod
    def decide(self, actions: NDArray[Any]) -> NDArray[np.bool_]:
        """Take one action per episode; bool ``[B]`` which are over. Evaluates nothing."""

    def act(self, actions: NDArray[Any]) -> tuple[Floats, NDArray[np.bool_]]:
        done = self.decide(actions)
        rewards = np.zeros(len(done))
        over = np.flatnonzero(done)
        if len(over):
            self.value_s[over] = self.values(over)
            rewards[over] = self.problems.rewards(
                self.ids[over], self.value_s[over], self.choices[over]
            )
            self.num_evaluations += len(over)
        return rewards, done

    def values(self, rows: Numbers) -> Floats:
        """Seconds float64 ``[R]`` of what episodes int ``rows [R]`` have made."""
        return self.problems.seconds(self.ids[rows], self.choices[rows])


def id_space(high: int) -> spaces.Box:
    """int64 ``[1]``: a number 0..high that stable-baselines3 carries exactly, and as a number."""
    return spaces.Box(0, high, (1,), np.int64)


def check_range(
    what: str,
    value: Any,
    least: float,
    most: float = np.inf,
    kind: type[ValueError] = EnvError,
) -> None:
    """Raises: a ``kind``, an argument is no number from ``least`` to ``most``."""
    if not isinstance(value, int | float | np.number) or not least <= value <= most:
        wanted = f"at least {least:g}" if most == np.inf else f"{least:g} to {most:g}"
        raise kind(f"{what} = {short(value)} must be {wanted}")


def numbers(actions: Any, shape: tuple[int, ...]) -> Numbers:
    """``actions`` as integers of this shape; illegal ones are for the rules to judge.

    Raises:
        EnvError: of another shape, or not integers.
    """
    taken = np.asarray(actions)
    if taken.dtype.kind not in "biu" or taken.shape != shape:
        expected = f"integers {list(shape)}" if shape else "an integer"
        raise EnvError(
            f"action {short(actions)} is {taken.dtype} {list(taken.shape)}, expected {expected}: "
            "env.action_space.sample(info['action_mask']) gives one"
        )
    return taken
