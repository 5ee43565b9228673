"""The rules of an environment, written once for ``B`` episodes at a time, and its two faces.

``Rules`` play ``B`` episodes side by side. ``PlacementEnv`` shows one of them as a Gymnasium
environment; ``envs.vec.PlacementVecEnv`` shows all of them to stable-baselines3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.perturbation import Perturbation
from envs.problems import ONE_RUNTIME, EnvError, Evaluator, Floats, ProblemSet, Runtime
from placement.problem import Planner, Problem, ProblemError
from placement.simulator import score, simulate

Observation = dict[str, NDArray[Any]]


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
    """

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
    def start(
        self,
        rows: NDArray[np.integer[Any]],
        ids: NDArray[np.integer[Any]],
        rng: np.random.Generator | None = None,
    ) -> None:
        """Begin new episodes in ``rows`` with problems ``ids``; ``rng`` is for their draws."""

    @abstractmethod
    def observe(self) -> Observation:
        """Observations ``[B, ...]``, in new arrays every time."""

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
            self.value_s[over], rewards[over] = self.problems.outcomes(
                self.ids[over], self.choices[over]
            )
            self.num_evaluations += len(over)
        return rewards, done


class PlacementEnv(gym.Env[Observation, Any]):
    """One episode of some ``Rules`` as a Gymnasium environment (see its subclasses).

    Args:
        problems: the problems to choose from; ``reset(options={"problem": i})`` takes one.
        reference_s: ``[P]`` seconds of reward 0; by default what ``baseline`` reaches, and
            without a baseline the best single device.
        baseline: see there.
        evaluator: ``placement.simulator.score``, or ``Measured(Executor)``, or, of one problem,
            a ``placement.runs.trials.Runtime``.
        perturbation: also play on other machines than the problems' own; the variants are
            problems ``P``, ``P + 1``, ... and need no reference.
        render_mode: ``"ansi"``: ``render()`` returns the last placement's Gantt chart as text.
        options: what the environment's rules take besides.

    Raises:
        EnvError: no problems, wrong references, one runtime for several problems, an unknown
            render mode or problem number.
    """

    rules_of: ClassVar[Callable[..., Rules]]
    metadata: dict[str, Any] = {  # noqa: RUF012 (Gymnasium declares it so)
        "render_modes": ["ansi"],
        "render_fps": 1,
    }

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        reference_s: Sequence[float] | None = None,
        baseline: Planner | None = None,
        evaluator: Evaluator | Runtime = score,
        perturbation: Perturbation | None = None,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise EnvError(f"render_mode = {render_mode!r} is unknown; use 'ansi' or None")
        if perturbation is not None and hasattr(evaluator, "run"):
            raise EnvError(ONE_RUNTIME.format("a perturbation makes others"))
        self.problems = ProblemSet.build(problems, reference_s, baseline, evaluator)
        if perturbation is not None:
            self.problems = self.problems.and_more(
                perturbation(problems)[len(problems) :], baseline
            )
        self.rules = type(self).rules_of(self.problems, 1, **options)
        self.observation_space: spaces.Dict = self.rules.observation_space  # type: ignore[assignment]
        self.action_space = self.rules.action_space
        self.render_mode = render_mode
        self._last: tuple[int, NDArray[np.int32]] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode with a random problem, or with number ``options["problem"]``.

        Raises:
            EnvError: there is no problem of that number.
        """
        super().reset(seed=seed)
        count = len(self.problems.problems)
        chosen = (options or {}).get("problem")
        problem = int(self.np_random.integers(count)) if chosen is None else int(chosen)
        if not 0 <= problem < count:
            raise EnvError(f"options['problem'] = {problem}, there are {count} (0..{count - 1})")
        self.rules.start(np.array([0]), np.array([problem]), self.np_random)
        return self._observation(), {"problem": problem}

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """``info`` of the last step has ``problem``, ``value_s`` and ``placement``."""
        rewards, over = self.rules.act(np.asarray(action)[None])
        done = bool(over[0])
        problem = int(self.rules.ids[0])
        info: dict[str, Any] = {"problem": problem}
        if done:
            placement = self.problems.placements(problem, self.rules.choices)[0]
            info |= {"value_s": float(self.rules.value_s[0]), "placement": placement}
            self._last = problem, placement
        return self._observation(), float(rewards[0]), done, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """bool ``[A]`` legal actions (sb3-contrib's ``MaskablePPO`` asks for this)."""
        return self.rules.masks()[0]

    def render(self) -> str | None:  # type: ignore[override]
        """Gantt chart of the last finished episode as text."""
        if self.render_mode is None:
            return None
        if self._last is None:
            return "no placement yet: finish an episode first\n"
        from placement.report.gantt import text_gantt

        number, placement = self._last
        problem = self.problems.problems[number]
        try:
            timeline = simulate(problem, placement, num_microbatches=problem.num_run)
        except ProblemError as error:
            return f"the last placement cannot run: {error}\n"
        return text_gantt(timeline, 100)

    def _observation(self) -> Observation:
        return {key: rows[0].copy() for key, rows in self.rules.observe().items()}


def id_space(high: int) -> spaces.Box:
    """int64 ``[1]``: a number 0..high that stable-baselines3 carries exactly, and as a number."""
    return spaces.Box(0, high, (1,), np.int64)
