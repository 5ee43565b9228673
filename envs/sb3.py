"""Many episodes at once, as a ``VecEnv`` of stable-baselines3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from envs.problem_set import EnvError
from envs.rules import Observation
from envs.vector import Episodes, PlacementVectorEnv, Step
from placement.tools.files import short


class PlacementVecEnv(VecEnv):
    """``B`` episodes as a ``VecEnv``. Finished ones start again at once.

    Args:
        played: a ``PlacementVectorEnv``, as ``gym.make_vec`` makes it, or episodes.

    Attributes:
        episodes: what is played.
        rules: their rules; ``best_s`` and ``best_choices`` are kept up to date.

    Raises:
        EnvError: it is something else.
    """

    def __init__(self, played: PlacementVectorEnv | Episodes) -> None:
        self.episodes = played.episodes if isinstance(played, PlacementVectorEnv) else played
        if not isinstance(self.episodes, Episodes):
            raise EnvError(
                f"played = {short(played)} is not many episodes: gym.make_vec(ID, B) makes them; "
                "for one environment there is make_vec_env of stable-baselines3"
            )
        self.rules = self.episodes.rules
        self.render_mode = None
        super().__init__(
            self.episodes.num_envs, self.episodes.observation_space, self.episodes.action_space
        )
        self._actions: NDArray[Any] = np.zeros(0)

    def reset(self) -> Observation:
        """Start every episode; observations ``[B, ...]``."""
        return self.episodes.reset()

    def step_async(self, actions: NDArray[Any]) -> None:
        """Remember the actions ``[B, ...]``."""
        self._actions = np.asarray(actions)

    def step_wait(self) -> Step:
        """Observations, rewards float32 ``[B]``, dones bool ``[B]``, and infos.

        The info of a finished episode has ``problem``, ``value_s``, ``terminal_observation``
        and ``episode`` (what stable-baselines3's ``Monitor`` reports).
        """
        return self.episodes.step(self._actions)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seed the choice of problems (one generator deals for all episodes)."""
        self.episodes.seed(seed)
        return [seed] * self.num_envs

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
        return list(self.action_masks()[self._rows(indices)])

    def action_masks(self) -> NDArray[np.bool_]:
        """bool ``[B, A]`` legal actions, flat."""
        return self.episodes.masks()

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Only as by a ``Monitor``: infos have what that reports."""
        return [wrapper_class is Monitor] * len(self._rows(indices))

    def _rows(self, indices: int | Iterable[int] | None) -> list[int]:
        return list(self._get_indices(indices))
