"""Many episodes at once as a ``gymnasium.vector.VectorEnv``: ``gym.make_vec`` reaches it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from envs import IDS
from envs.base import PlacementEnv, check_reset, mask_of
from envs.episodes import Episodes, FreshEpisodes, FreshRules
from envs.lookup import find
from envs.problems import EnvError
from envs.rules import Observation, check_range, numbers
from envs.source import Problems, Source


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
            self.episodes.rules.best_s.fill(np.inf)  # searches may begin at the best met
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
