"""One episode of some rules as a Gymnasium environment, and what all environments are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from inspect import Parameter, signature
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.generators import Generator, draw, generator_of, room_of, small_problems
from envs.graphs import GraphArrays
from envs.perturbation import Perturbation
from envs.problem_set import (
    MAX_ID,
    ONE_RUNTIME,
    EnvError,
    Evaluator,
    ProblemSet,
    Runtime,
    Sizes,
    find,
)
from envs.rewards import Reward, log_speedup
from envs.rules import Observation, Rules, numbers
from placement.problem import Placement, Planner, Problem, ProblemError
from placement.simulator import score, simulate
from placement.timeline import Timeline
from placement.tools.files import short
from placement.tools.named import meant

RENDER_MODES = ("ansi", "rgb_array")


class PlacementEnv(gym.Env[Observation, Any]):
    """One episode of some ``Rules`` as a Gymnasium environment (see its subclasses).

    **Observation**, **action**, **reward** and **termination** are in the docstring of each. With
    ``observe="graph"`` every observation has the seven arrays of ``envs.graphs`` besides. **Info**
    of every step: ``problem`` and ``action_mask``, see ``reset``.

    Args:
        problems: the problems to choose from; ``reset(options={"problem": i})`` takes one. Or a
            generator (``rng -> Problem``, or ``package.module:name``): a fresh problem at every
            reset (``envs.generators``). None: some small generated ones.
        reference_s: ``[P]`` seconds of reward 0; by default what ``baseline`` reaches, and
            without a baseline the best single device.
        baseline: see there.
        evaluator: ``placement.simulator.score``, or ``Measured(Executor)``, or, of one problem,
            a ``placement.runs.trials.Runtime``.
        perturbation: also play on other machines than the problems' own; the variants are
            problems ``P``, ``P + 1``, ... and need no reference.
        reward: what a value earns (``envs.rewards``), or its name ``package.module:name``.
        observe: ``number``: which problem it is, for a policy that keeps the graphs; ``graph``:
            the graph itself too (``envs.graphs``).
        render_mode: what ``render()`` returns of the last placement: ``ansi`` its Gantt chart as
            text, ``rgb_array`` as a picture, uint8 ``[height, width, 3]`` (needs matplotlib).

    Further arguments are for the environment's rules.

    Raises:
        EnvError: no problems, wrong references, one runtime for several problems, an unknown
            render mode, name or problem number.
    """

    rules_of: ClassVar[Callable[..., Rules]]
    metadata: dict[str, Any] = {  # noqa: RUF012 (Gymnasium declares it so)
        "render_modes": list(RENDER_MODES),
        "render_fps": 1,
    }

    def __init__(
        self,
        problems: Problems = None,
        *,
        render_mode: str | None = None,
        **arguments: Any,
    ) -> None:
        if render_mode not in (None, *RENDER_MODES):
            raise EnvError(f"render_mode = {render_mode!r} is unknown; use one of {RENDER_MODES}")
        self._source = Source.of(type(self).rules_of, problems, **arguments)
        self._drawn = 0  # of the generator
        if self._source.generator is None:
            self.rules = self._source.rules(1)
        else:
            self.rules = self._source.fresh(self._source.draw(np.random.default_rng(0)))
        self.observation_space: spaces.Dict = self.rules.seen_space  # type: ignore[assignment]
        self.action_space = self.rules.action_space
        self.problems = self.rules.problems
        self.render_mode = render_mode
        self._last: tuple[Problem, Placement] | None = None
        self._begun = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode with a random problem, or with number ``options["problem"]``.

        ``info`` has ``problem`` (int; of a generator: how many came before, since a seed) and
        ``action_mask`` as ``action_space.sample`` takes it: int8 ``[A]``, or, where an action is
        several numbers, a tuple of one such row for each.

        Raises:
            EnvError: there is no problem of that number, or an option of another name.
        """
        super().reset(seed=seed)
        if seed is not None:
            self._drawn = 0  # the same seed, the same observations
        check_reset(options, ("problem",))
        chosen = (options or {}).get("problem")
        if self._source.generator is not None:
            if chosen is not None:
                raise EnvError("options['problem'] is for given problems, not those of a generator")
            self.rules = self._source.fresh(self._source.draw(self.np_random))
            self.problems = self.rules.problems
            self._drawn += 1
            chosen = 0
        count = len(self.problems.problems)
        if chosen is None:
            chosen = self.np_random.integers(count)
        is_number = isinstance(chosen, int | np.integer) and not isinstance(chosen, bool)
        if not is_number or not 0 <= chosen < count:
            raise EnvError(f"options['problem'] = {chosen!r}, there are {count} (0..{count - 1})")
        problem = int(chosen)
        self.rules.start(np.array([0]), np.array([problem]), self.np_random)
        self._begun = True
        return self._observation(), self._info()

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """``info`` as of ``reset``; of the last step with ``value_s`` and ``placement`` too.

        ``placement`` is a tuple, as vector environments of Gymnasium expect arrays to be of one
        shape, and problems are of several.

        Raises:
            EnvError: an action of another shape than the space's, or not of integers; no ``reset``.
        """
        if not self._begun:
            raise EnvError("an episode begins with reset(): call it before step()")
        rewards, over = self.rules.act(numbers(action, self.action_space.shape or ())[None])
        done = bool(over[0])
        observation, info = self._observation(), self._info()
        if done:
            number = int(self.rules.ids[0])
            placement = self.problems.placements(number, self.rules.choices)[0]
            info["value_s"] = float(self.rules.value_s[0])
            info["placement"] = tuple(placement.tolist())
            self._last = self.problems.problems[number], placement
        return observation, float(rewards[0]), done, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """bool ``[A]`` legal actions, flat (sb3-contrib's ``MaskablePPO`` asks for this)."""
        return self.rules.masks()[0]

    def render(self) -> Any:
        """The last finished episode: text, a picture, or None without a ``render_mode``."""
        if self.render_mode is None:
            return None
        from placement.report.gantt import picture, text_gantt

        if self._last is None:
            timeline, caption = None, "no placement yet: finish an episode first"
        else:
            timeline, caption = _timeline(*self._last)
        if self.render_mode == "ansi":
            return f"{caption}\n" if timeline is None else text_gantt(timeline, 100)
        return picture(timeline, caption, self.problems.max_devices)

    def _number(self) -> int:
        generated = self._source.generator is not None
        return (self._drawn - 1) % (MAX_ID + 1) if generated else int(self.rules.ids[0])

    def _info(self) -> dict[str, Any]:
        mask = mask_of(self.action_space, self.rules.masks())[0]
        rows = mask if mask.ndim == 1 else tuple(mask)
        return {"problem": self._number(), "action_mask": rows}

    def _observation(self) -> Observation:
        seen = self.rules.seen()
        seen["problem"][0] = self._number()
        return {key: rows[0].copy() for key, rows in seen.items()}


def check_reset(options: dict[str, Any] | None, known: Sequence[str] = ()) -> None:
    """Raises: EnvError, an option of ``reset`` that nobody reads."""
    for name in options or {}:
        if name not in known:
            raise EnvError(
                f"reset: option {name!r} is unknown; known: {', '.join(known) or 'none'}"
            )


def mask_of(space: spaces.Space[Any], masks: NDArray[np.bool_]) -> NDArray[np.int8]:
    """int8 ``[B, A]``, or ``[B, G, A]`` where an action is ``G`` numbers, of flat ``masks``."""
    rows = masks.astype(np.int8)
    if isinstance(space, spaces.MultiDiscrete):
        return rows.reshape(len(rows), len(space.nvec), -1)
    return rows


def _timeline(problem: Problem, placement: Placement) -> tuple[Timeline | None, str]:
    """What would run, or why nothing does."""
    try:
        return simulate(problem, placement, num_microbatches=problem.num_run), ""
    except ProblemError as error:
        return None, f"the last placement cannot run: {error}"


Observe = Literal["number", "graph"]
Problems = Sequence[Problem] | Generator | str | None
_CALLED = {
    "baseline": "a planner: placement.planners.load('heft')",
    "evaluator": "placement.simulator.score, envs.problem_set.Measured(Executor), or a runtime",
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
