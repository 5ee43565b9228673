"""Many episodes at once, as a ``VecEnv`` of stable-baselines3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from envs.episodes import Episodes, Fresh, Step
from envs.problems import EnvError
from envs.rules import Observation, Rules
from envs.vector import PlacementVectorEnv
from envs.workers import Workers
from placement.problem import Problem


class PlacementVecEnv(VecEnv):
    """``B`` episodes as a ``VecEnv``. Finished ones start again at once.

    Problems are dealt like cards: a shuffled deck of all of them, then the next deck.

    Args:
        played: a ``PlacementVectorEnv``; or rules, which are played in this process; or a sequence
            of rules, the share of each worker.
        seed: of the deals, where rules are given.
        parallel: where several workers are (``envs.workers``).
        repeats: every problem is dealt so many times in a row (``envs.episodes``).

    Attributes:
        rules: what is played; its ``best_s`` and ``best_choices`` are kept up to date. Of several
            workers: the first one's, which is not played itself, but keeps the best of all.

    Raises:
        EnvError, ParallelError: see ``envs.workers.Workers``.
    """

    def __init__(
        self,
        played: PlacementVectorEnv | Fresh | Rules | Sequence[Rules],
        seed: int = 0,
        parallel: str = "serial",
        repeats: int = 1,
    ) -> None:
        self._episodes: Episodes | Fresh | Workers
        if isinstance(played, PlacementVectorEnv):
            self._episodes = played.episodes
        elif isinstance(played, Fresh):
            self._episodes = played
        elif isinstance(played, Rules):
            self._episodes = Episodes(played, seed, repeats)
        else:
            self._episodes = Workers(played, seed, parallel, repeats)
        self.rules = self._episodes.rules
        self.render_mode = None
        shown = getattr(self._episodes, "graphs", None)
        owner = getattr(self._episodes, "spaces", self.rules)
        seen = {**owner.observation_space.spaces, **({} if shown is None else shown.spaces)}
        super().__init__(self._episodes.num_envs, spaces.Dict(seen), owner.action_space)
        self._actions: NDArray[Any] = np.zeros(0)

    @property
    def allowed(self) -> NDArray[np.int64]:
        """int64 problems that are dealt; at first all. Holds from the next deal."""
        return self._episodes.allowed

    @allowed.setter
    def allowed(self, problems: NDArray[np.int64]) -> None:
        self._episodes.allowed = problems

    def reset(self) -> Observation:
        """Start every episode; observations ``[B, ...]``."""
        return self._episodes.reset()

    def step_async(self, actions: NDArray[Any]) -> None:
        """Remember the actions ``[B, ...]``."""
        self._actions = np.asarray(actions)

    def step_wait(self) -> Step:
        """Observations, rewards float32 ``[B]``, dones bool ``[B]``, and infos.

        The info of a finished episode has ``problem``, ``value_s``, ``terminal_observation``
        and ``episode`` (what stable-baselines3's ``Monitor`` reports).
        """
        return self._episodes.step(self._actions)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seed the choice of problems (one generator deals for all episodes of a worker)."""
        self._episodes.seed(seed)
        return [seed] * self.num_envs

    def draw(self) -> Problem:
        """The problem that comes next, for who plays whole episodes without this environment."""
        if isinstance(self._episodes, Workers):
            raise EnvError("whole episodes are played in this process: use workers = 1")
        return self._episodes.draw()

    def state(self) -> dict[str, Any]:
        """What ``restore`` needs to go on from the next ``reset``, as JSON values."""
        return self._episodes.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Deal the problems that followed when ``state()`` was taken; then ``reset()``."""
        self._episodes.restore(state)

    def close(self) -> None:
        """End the workers, if there are any."""
        self._episodes.close()

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
        return list(self.action_masks()[self._rows(indices)])

    def action_masks(self) -> NDArray[np.bool_]:
        """bool ``[B, A]`` legal actions, flat."""
        return self._episodes.masks()

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Never."""
        return [False] * len(self._rows(indices))

    def _rows(self, indices: int | Iterable[int] | None) -> list[int]:
        return list(self._get_indices(indices))
