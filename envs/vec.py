"""Many episodes at once for stable-baselines3, in one process: one numba call per step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from envs.base import Observation, Rules


class PlacementVecEnv(VecEnv):
    """``B`` episodes of ``rules`` as a ``VecEnv``. Finished ones start again at once.

    Problems are dealt like cards: a shuffled deck of all of them, then the next deck.

    Attributes:
        rules: what is played; its ``best_s`` and ``best_choices`` are kept up to date.
        allowed: int64 problems that are dealt; at first all. Holds from the next deal.
    """

    def __init__(self, rules: Rules, seed: int = 0) -> None:
        self.rules = rules
        self.allowed = np.arange(len(rules.problems.problems))
        self.render_mode = None
        super().__init__(len(rules.ids), rules.observation_space, rules.action_space)
        self._rng = np.random.default_rng(seed)
        self._deck: list[int] = []
        self._actions: NDArray[Any] = np.zeros(0)
        self._length = np.zeros(self.num_envs, np.int64)
        self._return = np.zeros(self.num_envs)
        self._started = time.perf_counter()

    def reset(self) -> Observation:
        """Start every episode; observations ``[B, ...]``."""
        self._begin(np.arange(self.num_envs))
        return self.rules.observe()

    def step_async(self, actions: NDArray[Any]) -> None:
        """Remember the actions ``[B, ...]``."""
        self._actions = np.asarray(actions)

    def step_wait(
        self,
    ) -> tuple[Observation, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Observations, rewards float32 ``[B]``, dones bool ``[B]``, and infos.

        The info of a finished episode has ``problem``, ``value_s``, ``terminal_observation``
        and ``episode`` (what stable-baselines3's ``Monitor`` reports).
        """
        earned, done = self.rules.act(self._actions)
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
            self._deck += self._rng.permutation(self.allowed).tolist()
        self.rules.start(rows, np.array(self._deck[: len(rows)], np.int64), self._rng)
        self._deck = self._deck[len(rows) :]
        self._length[rows] = 0
        self._return[rows] = 0.0

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seed the choice of problems (one generator deals for all episodes)."""
        self._rng = np.random.default_rng(seed)
        self._deck = []
        return [seed] * self.num_envs

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs to go on from the next ``reset``, as JSON values."""
        return {"rng": self._rng.bit_generator.state, "deck": self._deck}

    def restore(self, state: dict[str, Any]) -> None:
        """Deal the problems that followed when ``state()`` was taken; then ``reset()``."""
        self._rng.bit_generator.state = state["rng"]
        self._deck = list(state["deck"])

    def close(self) -> None:
        """Nothing to free."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """This environment's attribute, once per episode."""
        return [getattr(self, attr_name)] * len(self._rows(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Not supported: episodes share their rules."""
        raise NotImplementedError("episodes of a PlacementVecEnv share their rules")

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any
    ) -> list[Any]:
        """Only ``action_masks``, which is what stable-baselines3's contrib package asks for."""
        if method_name != "action_masks":
            raise NotImplementedError(f"PlacementVecEnv has no method {method_name!r}")
        return list(self.rules.masks()[self._rows(indices)])

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Never."""
        return [False] * len(self._rows(indices))

    def _rows(self, indices: int | Iterable[int] | None) -> list[int]:
        return list(self._get_indices(indices))
