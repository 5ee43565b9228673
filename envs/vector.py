"""Many episodes at once: ``Episodes``, and a ``gymnasium.vector.VectorEnv`` of them.

``gym.make_vec`` reaches the latter; ``envs.sb3`` shows episodes to stable-baselines3.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from envs import IDS
from envs.base import PlacementEnv, Problems, Source, check_reset, mask_of
from envs.problem_set import MAX_ID, EnvError, Floats, ProblemSet, find
from envs.rules import Numbers, Observation, Rng, Rules, check_range, numbers
from placement.problem import Problem

# Observations [B, ...], rewards float32 [B], dones bool [B], and an info for each of B episodes.
Step = tuple[Observation, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]


class Episodes:
    """``B`` episodes of ``rules``. Finished ones start again at once.

    Problems are dealt like cards: a shuffled deck of all of them, then the next deck. With
    ``repeats`` every card is in the deck so many times, one behind the other: episodes of one
    problem are played side by side, and say of each other which went well.

    Attributes:
        rules: what is played; its ``best_s`` and ``best_choices`` are kept up to date.
        observation_space, action_space: of one episode.
        num_envs: ``B``.
    """

    def __init__(
        self, rules: Rules, seed: int | Sequence[int] | None = 0, repeats: int = 1
    ) -> None:
        self.rules = rules
        self.repeats = repeats
        self.observation_space, self.action_space = rules.seen_space, rules.action_space
        self.num_envs = len(rules.ids)
        self._rng = np.random.default_rng(seed)
        self._deck: list[int] = []
        self._length = np.zeros(self.num_envs, np.int64)
        self._return = np.zeros(self.num_envs)
        self._started = time.perf_counter()

    def reset(self) -> Observation:
        """Start every episode; observations ``[B, ...]``."""
        self._begin(np.arange(self.num_envs))
        return self.rules.seen()

    def step(self, actions: NDArray[Any]) -> Step:
        """Take actions ``[B, ...]``. See ``envs.sb3.PlacementVecEnv.step_wait`` for the infos."""
        earned, done = self.rules.act(actions)
        self._length += 1
        self._return += earned
        rewards = earned.astype(np.float32)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        over = np.flatnonzero(done)
        if len(over) == 0:
            return self.rules.seen(), rewards, done, infos
        ids, seconds = self.rules.ids[over].copy(), self.rules.value_s[over].copy()
        last = self._last(over)
        elapsed = round(time.perf_counter() - self._started, 6)
        for i, b in enumerate(over.tolist()):
            infos[b] = {
                "problem": int(ids[i]),
                "value_s": float(seconds[i]),
                "terminal_observation": {k: rows[i] for k, rows in last.items()},
                "episode": {"r": float(self._return[b]), "l": int(self._length[b]), "t": elapsed},
            }
        self._begin(over)
        return self.rules.seen(), rewards, done, infos

    def draw(self) -> Problem:
        """The problem that is dealt next, for somebody else to play."""
        return self.rules.problems.problems[self._deal(1)[0]]

    def _last(self, rows: Numbers) -> Observation:
        """What is seen at the end of these episodes, whose answers are kept."""
        rules = self.rules
        rules.keep(rules.ids[rows], rules.choices[rows], rules.value_s[rows])
        return {key: seen[rows] for key, seen in rules.seen().items()}

    def _deal(self, count: int) -> NDArray[np.int64]:
        while len(self._deck) < count:
            cards = self._rng.permutation(len(self.rules.problems.problems))
            self._deck += np.repeat(cards, self.repeats).tolist()
        dealt, self._deck = self._deck[:count], self._deck[count:]
        return np.array(dealt, np.int64)

    def _begin(self, rows: NDArray[np.integer[Any]]) -> None:
        self.rules.start(rows, self._deal(len(rows)), self._rng)
        self._length[rows] = 0
        self._return[rows] = 0.0

    def masks(self) -> NDArray[np.bool_]:
        """bool ``[B, A]``, see ``Rules.masks``."""
        return self.rules.masks()

    def seed(self, seed: int | Sequence[int] | None) -> None:
        """Seed the choice of problems (one generator deals for all episodes).

        A seed for each episode, as ``[7, 8, 9]``, is that of the first: so Gymnasium spreads 7.

        Raises:
            EnvError: another number of seeds than episodes.
        """
        if isinstance(seed, Sequence):
            if len(seed) != self.num_envs:
                raise EnvError(f"{len(seed)} seeds for {self.num_envs} episodes: give one for each")
            first = seed[0]
            seed = first if [*seed] == [*range(first, first + len(seed))] else seed
        self._rng = np.random.default_rng(seed)
        self._deck = []

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs to go on from the next ``reset``, as JSON values."""
        rng = self._rng.bit_generator.state
        return {"rng": rng, "deck": self._deck, "rules": self.rules.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Deal the problems that followed when ``state()`` was taken; then ``reset()``."""
        self._rng.bit_generator.state = state["rng"]
        self._deck = list(state["deck"])
        self.rules.restore(state.get("rules", {}))  # versions before this one kept none


class FreshRules(Rules):
    """``B`` episodes of fresh problems of a generator; ``ids`` count the problems.

    What must be known of a problem is computed when its episode begins, so a step takes ``B``
    calls. Every problem is played in ``repeats`` episodes that begin one after another.

    Args:
        samples: problems that are not played, whose best is kept.
    """

    def __init__(
        self, source: Source, num_envs: int, repeats: int = 1, samples: ProblemSet | None = None
    ) -> None:
        first = source.fresh(source.draw(np.random.default_rng(0)))
        super().__init__(samples or first.problems, num_envs)
        self.choices = np.full((num_envs, first.problems.max_groups), -1, np.int32)
        self.observation_space, self.action_space = first.seen_space, first.action_space
        self._source, self._repeats = source, repeats
        self._parts = [first] * num_envs
        self._problem: Problem | None = None
        self._left = self._drawn = 0  # episodes that it is still to be played in; problems

    def start(self, rows: Numbers, ids: Numbers, rng: Rng | None = None) -> None:
        assert rng is not None
        one = np.zeros(1, np.int64)
        for b in rows.tolist():
            if self._problem is None or self._left == 0:
                self._problem, self._left = self.draw(rng), self._repeats
            self._left -= 1
            rules = self._parts[b] = self._source.fresh(self._problem)
            rules.start(one, one, np.random.default_rng(int(rng.integers(2**32))))
            self.ids[b] = (self._drawn - 1) % (MAX_ID + 1)

    def draw(self, rng: Rng) -> Problem:
        """A fresh problem."""
        self._drawn += 1
        return self._source.draw(rng)

    def observe(self) -> Observation:
        return self.seen_in(np.arange(len(self.ids)))

    def seen_in(self, rows: Numbers) -> Observation:
        parts = [self._parts[b].seen() for b in rows.tolist()]
        joined = {key: np.concatenate([x[key] for x in parts]) for key in parts[0]}
        return joined | {"problem": self.ids[rows, None].copy()}

    def masks(self) -> NDArray[np.bool_]:
        return np.concatenate([rules.masks() for rules in self._parts])

    def act(self, actions: NDArray[Any]) -> tuple[Floats, NDArray[np.bool_]]:
        earned, done = [], []
        for b, rules in enumerate(self._parts):
            before = rules.num_evaluations
            reward, over = rules.act(actions[b : b + 1])
            self.num_evaluations += rules.num_evaluations - before
            self.value_s[b], self.choices[b] = rules.value_s[0], rules.choices[0]
            earned.append(reward)
            done.append(over)
        return np.concatenate(earned), np.concatenate(done)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def restore(self, state: dict[str, Any]) -> None:
        self._drawn, self._left = state["drawn"], 0


class FreshEpisodes(Episodes):
    """Episodes of ``FreshRules``, which draw their problems: none is dealt, no answer is kept."""

    rules: FreshRules

    def draw(self) -> Problem:
        """See ``Episodes``."""
        return self.rules.draw(self._rng)

    def seed(self, seed: int | Sequence[int] | None) -> None:
        """See ``Episodes``; problems are counted from 0 again."""
        super().seed(seed)
        self.rules.restore({"drawn": 0})

    def _last(self, rows: Numbers) -> Observation:
        return self.rules.seen_in(rows)

    def _deal(self, count: int) -> NDArray[np.int64]:
        return np.zeros(count, np.int64)


class PlacementVectorEnv(VectorEnv[Observation, NDArray[Any], NDArray[Any]]):
    """``B`` episodes of an environment; one that is over starts again in the same step.

    Given problems are dealt like cards, and a step of all episodes is one call of a kernel; those
    of a generator are fresh in every episode.

    **Observation**, **action**, **reward**: of the environment, stacked: ``[B, ...]``. **Info** of
    ``reset`` and ``step``: ``action_mask`` int8 ``[B, ...]``. Where an episode is over:
    ``final_obs`` (object ``[B]``, the last observations), and ``final_info`` with ``problem`` int64
    ``[B]`` and ``value_s`` float64 ``[B]``, as ``gymnasium.vector.SyncVectorEnv`` has them.

    Args:
        env: the class of the environment, or its name ``package.module:Class``.
        num_envs: ``B``.
        seed: of the deals, until ``reset(seed=...)``.

    The other arguments are those of ``PlacementEnv``, and of the environment's rules.

    Raises:
        EnvError: see ``PlacementEnv``.
    """

    autoreset_mode = AutoresetMode.SAME_STEP  # where SyncVectorEnv has it, and TorchRL asks
    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": autoreset_mode}  # type: ignore[misc]

    def __init__(
        self,
        env: type[PlacementEnv] | str,
        num_envs: int = 1,
        problems: Problems = None,
        *,
        seed: int = 0,
        render_mode: str | None = None,
        **arguments: Any,
    ) -> None:
        if render_mode is not None:
            raise EnvError("many episodes are not rendered: leave render_mode out")
        kind: type[PlacementEnv] = find(env, "environment") if isinstance(env, str) else env
        check_range("num_envs", num_envs, 1)
        source = Source.of(kind.rules_of, problems, **arguments)
        self.num_envs = num_envs
        self.render_mode = None
        if source.generator is None:
            self.episodes = Episodes(source.rules(num_envs), seed)
        else:
            self.episodes = FreshEpisodes(FreshRules(source, num_envs), seed)
        self.single_observation_space = self.episodes.observation_space
        self.single_action_space = self.episodes.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start every episode; ``seed`` decides which problems follow.

        Raises:
            EnvError: any option: there are none.
        """
        check_reset(options)
        super().reset(seed=seed if isinstance(seed, int) else None)
        if seed is not None:
            self.episodes.seed(seed)
        return self.episodes.reset(), self._info()

    def step(
        self, actions: NDArray[Any]
    ) -> tuple[Observation, NDArray[Any], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Take actions ``[B, ...]``. Never truncated.

        Raises:
            EnvError: actions of another shape than the space's, or not of integers.
        """
        taken = numbers(actions, self.action_space.shape or ())
        seen, rewards, over, infos = self.episodes.step(taken)
        info = self._info()
        if over.any():
            last = np.full(self.num_envs, None, object)
            final: dict[str, Any] = {}
            for b in np.flatnonzero(over).tolist():
                last[b] = infos[b].pop("terminal_observation")
                outcome = {what: infos[b][what] for what in ("problem", "value_s")}
                final = self._add_info(final, outcome, b)
            info |= {"final_obs": last, "_final_obs": over, "final_info": final}
            info["_final_info"] = over
        return seen, rewards.astype(np.float64), over, np.zeros(self.num_envs, bool), info

    def action_masks(self) -> NDArray[np.bool_]:
        """bool ``[B, A]`` legal actions, flat."""
        return self.episodes.masks()

    def _info(self) -> dict[str, Any]:
        mask = mask_of(self.single_action_space, self.episodes.masks())
        return {"action_mask": mask, "_action_mask": np.ones(self.num_envs, bool)}


def __getattr__(name: str) -> Any:
    """``DevicePlacementEnv`` and the others: many episodes of the environment of that name.

    So Gymnasium finds them by a name, and specifications stay data.
    """
    for env in IDS.values():
        if env.endswith(f":{name}"):
            return partial(PlacementVectorEnv, env)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
