"""Many episodes at once, in this process: of given problems, or each of a fresh one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.graphs import GraphArrays, space_of
from envs.problems import MAX_ID
from envs.rules import Observation, Rules
from envs.source import Source
from placement.problem import Problem

# Observations [B, ...], rewards float32 [B], dones bool [B], and an info for each of B episodes.
Step = tuple[Observation, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]


class Episodes:
    """``B`` episodes of ``rules``. Finished ones start again at once.

    Problems are dealt like cards: a shuffled deck of all of them, then the next deck. With
    ``repeats`` every card is in the deck so many times, one behind the other: episodes of one
    problem are played side by side, and say of each other which went well. Needs no
    stable-baselines3, so that a worker (``envs.workers``) starts in a second and stays small.

    Attributes:
        rules: what is played; its ``best_s`` and ``best_choices`` are kept up to date.
        observation_space, action_space: of one episode.
        allowed: int64 problems that are dealt; at first all. Holds from the next deal.
        num_envs: ``B``.
    """

    def __init__(
        self,
        rules: Rules,
        seed: int | Sequence[int] | None = 0,
        repeats: int = 1,
        graphs: GraphArrays | None = None,
    ) -> None:
        self.rules = rules
        self.repeats = repeats
        self.graphs = graphs
        self.observation_space, self.action_space = space_of(rules, graphs), rules.action_space
        self.allowed = np.arange(len(rules.problems.problems))
        self.num_envs = len(rules.ids)
        self._rng = np.random.default_rng(seed)
        self._deck: list[int] = []
        self._length = np.zeros(self.num_envs, np.int64)
        self._return = np.zeros(self.num_envs)
        self._started = time.perf_counter()

    def reset(self) -> Observation:
        """Start every episode; observations ``[B, ...]``."""
        self._begin(np.arange(self.num_envs))
        return self._observe()

    def step(self, actions: NDArray[Any]) -> Step:
        """Take actions ``[B, ...]``. See ``envs.vec.PlacementVecEnv.step_wait`` for the infos."""
        earned, done = self.rules.act(actions)
        self._length += 1
        self._return += earned
        rewards = earned.astype(np.float32)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        over = np.flatnonzero(done)
        if len(over) == 0:
            return self._observe(), rewards, done, infos
        ids, seconds = self.rules.ids[over].copy(), self.rules.value_s[over].copy()
        self.rules.keep(ids, self.rules.choices[over], seconds)
        last = self._observe()
        elapsed = round(time.perf_counter() - self._started, 6)
        for b, problem, value in zip(over.tolist(), ids.tolist(), seconds.tolist(), strict=True):
            infos[b] = {
                "problem": problem,
                "value_s": value,
                "terminal_observation": {k: rows[b] for k, rows in last.items()},
                "episode": {"r": float(self._return[b]), "l": int(self._length[b]), "t": elapsed},
            }
        self._begin(over)
        return self._observe(), rewards, done, infos

    def _observe(self) -> Observation:
        seen = self.rules.observe()
        return seen if self.graphs is None else seen | self.graphs(self.rules.ids)

    def draw(self) -> Problem:
        """The problem that is dealt next, for somebody else to play."""
        return self.rules.problems.problems[self._deal(1)[0]]

    def _deal(self, count: int) -> NDArray[np.int64]:
        while len(self._deck) < count:
            cards = self._rng.permutation(self.allowed)
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
        """Seed the choice of problems (one generator deals for all episodes)."""
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

    def close(self) -> None:
        """Nothing to free."""


class Fresh:
    """``B`` episodes of fresh problems: the interface of ``Episodes``.

    What must be known of a problem is computed when its episode begins, so a step takes ``B``
    calls. Every problem is played in ``repeats`` episodes that begin one after another.

    Attributes:
        observation_space, action_space: of every episode, with room for the largest problem.
        rules: not played; who trains keeps the best of its own problems in it.
        num_envs: ``B``.
    """

    def __init__(
        self,
        source: Source,
        num_envs: int,
        seed: int | None = 0,
        rules: Rules | None = None,
        repeats: int = 1,
    ) -> None:
        self.num_envs, self.repeats = num_envs, repeats
        self._source = source
        self._rng = np.random.default_rng(seed)
        first, graphs = source.fresh(source.draw(np.random.default_rng(0)))
        self.observation_space, self.action_space = space_of(first, graphs), first.action_space
        self._problem: Problem | None = None
        self._left = 0  # episodes that it is still to be played in
        self.rules = first if rules is None else rules
        self.allowed = np.zeros(0, np.int64)
        self._drawn = 0
        self._numbers = np.zeros(num_envs, np.int64)
        self._episodes: list[Episodes] = [Episodes(first, graphs=graphs)] * num_envs

    def reset(self) -> Observation:
        """Start every episode; observations ``[B, ...]``."""
        self._left = 0
        return self._joined([self._begin(b) for b in range(self.num_envs)])

    def step(self, actions: NDArray[Any]) -> Step:
        """Take actions ``[B, ...]``."""
        seen, rewards, dones, infos = [], [], [], []
        for b in range(self.num_envs):
            episode, evaluated = self._episodes[b], self._episodes[b].rules.num_evaluations
            obs, reward, done, info = episode.step(actions[b : b + 1])
            self.rules.num_evaluations += episode.rules.num_evaluations - evaluated
            if done[0]:
                info[0]["problem"] = int(self._numbers[b])
                info[0]["terminal_observation"]["problem"][0] = self._numbers[b]
                obs = self._begin(b)
            seen.append(obs)
            rewards.append(reward)
            dones.append(done)
            infos += info
        return self._joined(seen), np.concatenate(rewards), np.concatenate(dones), infos

    def masks(self) -> NDArray[np.bool_]:
        """bool ``[B, A]``, see ``Rules.masks``."""
        return np.concatenate([x.masks() for x in self._episodes])

    def seed(self, seed: int | Sequence[int] | None) -> None:
        """Seed the generator."""
        self._rng = np.random.default_rng(seed)

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs to go on from the next ``reset``, as JSON values."""
        return {"rng": self._rng.bit_generator.state, "drawn": self._drawn}

    def restore(self, state: dict[str, Any]) -> None:
        """Draw the problems that followed when ``state()`` was taken; then ``reset()``."""
        self._rng.bit_generator.state = state["rng"]
        self._drawn = state["drawn"]

    def close(self) -> None:
        """Nothing to free."""

    def draw(self) -> Problem:
        """A fresh problem, for somebody else to play."""
        self._drawn += 1
        return self._source.draw(self._rng)

    def _begin(self, b: int) -> Observation:
        if self._problem is None or self._left == 0:
            self._problem, self._left = self.draw(), self.repeats
        self._left -= 1
        rules, graphs = self._source.fresh(self._problem)
        self._episodes[b] = Episodes(rules, int(self._rng.integers(2**32)), graphs=graphs)
        self._numbers[b] = (self._drawn - 1) % (MAX_ID + 1)
        return self._episodes[b].reset()

    def _joined(self, seen: list[Observation]) -> Observation:
        joined = {key: np.concatenate([x[key] for x in seen]) for key in seen[0]}
        joined["problem"] = self._numbers[:, None].copy()
        return joined
