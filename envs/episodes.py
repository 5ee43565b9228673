"""Many episodes at once, in this process: one numba call per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.base import Observation, Rules

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
        allowed: int64 problems that are dealt; at first all. Holds from the next deal.
        num_envs: ``B``.
    """

    def __init__(
        self, rules: Rules, seed: int | Sequence[int] | None = 0, repeats: int = 1
    ) -> None:
        self.rules = rules
        self.repeats = repeats
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
        return self.rules.observe()

    def step(self, actions: NDArray[Any]) -> Step:
        """Take actions ``[B, ...]``. See ``envs.vec.PlacementVecEnv.step_wait`` for the infos."""
        earned, done = self.rules.act(actions)
        self._length += 1
        self._return += earned
        rewards = earned.astype(np.float32)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        over = np.flatnonzero(done)
        if len(over) == 0:
            return self.rules.observe(), rewards, done, infos
        ids, seconds = self.rules.ids[over].copy(), self.rules.value_s[over].copy()
        self.rules.keep(ids, self.rules.choices[over], seconds)
        last = self.rules.observe()
        elapsed = round(time.perf_counter() - self._started, 6)
        for b, problem, value in zip(over.tolist(), ids.tolist(), seconds.tolist(), strict=True):
            infos[b] = {
                "problem": problem,
                "value_s": value,
                "terminal_observation": {k: rows[b] for k, rows in last.items()},
                "episode": {"r": float(self._return[b]), "l": int(self._length[b]), "t": elapsed},
            }
        self._begin(over)
        return self.rules.observe(), rewards, done, infos

    def _begin(self, rows: NDArray[np.integer[Any]]) -> None:
        while len(self._deck) < len(rows):
            cards = self._rng.permutation(self.allowed)
            self._deck += np.repeat(cards, self.repeats).tolist()
        self.rules.start(rows, np.array(self._deck[: len(rows)], np.int64), self._rng)
        self._deck = self._deck[len(rows) :]
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
