"""``SequentialDevicePlacement-v0``: one colocation group per step, by priority."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.base import PlacementEnv
from envs.problem_set import MAX_ID, ProblemSet
from envs.rules import BuildingRules, Numbers, Observation, Rng, id_space
from envs.sequential.kernels import (
    FEATURE_BOUND,
    NUM_DEVICE_FEATURES,
    act,
    begin,
    construct,
    observe,
    state_of,
    tables_of,
)


class SequentialRules(BuildingRules):
    """``B`` episodes, one group per step; every step is one numba call for all of them."""

    def __init__(self, problems: ProblemSet, num_envs: int) -> None:
        super().__init__(problems, num_envs)
        width = problems.max_devices
        self._tables, self._state = tables_of(problems), state_of(problems, num_envs)
        self.ids, self.choices = self._state.ids, self._state.choice
        self._mask = np.zeros((num_envs, width), np.int8)
        shape = (width, NUM_DEVICE_FEATURES)
        self.observation_space = spaces.Dict(
            {
                "problem": id_space(MAX_ID),
                "group": id_space(MAX_ID),
                "devices": spaces.Box(0.0, FEATURE_BOUND, shape, np.float32),
                "mask": spaces.Box(0, 1, (width,), np.int8),
            }
        )
        self.action_space = spaces.Discrete(width)

    def start(self, rows: Numbers, ids: Numbers, rng: Rng | None = None) -> None:
        begin(self._tables, self._state, np.asarray(rows, np.int64), np.asarray(ids, np.int64))

    def observe(self) -> Observation:
        count = len(self.ids)
        group = np.zeros((count, 1), np.int64)
        mask = np.zeros((count, self.problems.max_devices), np.int8)
        features = np.zeros((*mask.shape, NUM_DEVICE_FEATURES), np.float32)
        observe(self._tables, self._state, group, mask, features, FEATURE_BOUND)
        self._mask = mask.copy()
        return {
            "problem": self.ids[:, None].copy(),
            "group": group,
            "devices": features,
            "mask": mask,
        }

    def construct(
        self,
        net: tuple[NDArray[np.float32], ...],
        pair: NDArray[np.float32],
        warm: NDArray[np.bool_],
        greedy: NDArray[np.bool_],
        rng: np.random.Generator,
    ) -> None:
        """Finish all episodes in one call (see ``envs.sequential.kernels.construct``)."""
        construct(self._tables, self._state, net, pair, warm, greedy, rng, FEATURE_BOUND)

    def masks(self) -> NDArray[np.bool_]:
        return self._mask.astype(bool)

    def decide(self, actions: NDArray[Any]) -> NDArray[np.bool_]:
        done = np.zeros(len(self.ids), bool)
        act(self._tables, self._state, actions.astype(np.int64), self._mask, done)
        return done


class SequentialDevicePlacementEnv(PlacementEnv):
    """Place one colocation group per step, by priority (highest upward rank first).

    Problems of different sizes are padded to the largest: ``G`` groups, ``D`` devices.

    **Observation** ``Dict``:

    * ``problem`` int64 ``[1]``: which of ``problems`` this is (a policy keeps the graphs).
    * ``group`` int64 ``[1]``: the colocation group to place now.
    * ``devices`` float32 ``[D, 9]`` in 0..20: what choosing each device would mean now
      (``DEVICE_FEATURES``), kept up to date incrementally; 0 where the device does not support
      the group (where only memory or symmetry forbid it, they are there, and ``mask`` is 0).
    * ``mask`` int8 ``[D]``: 1 = legal. A device is illegal if it does not support the group, if
      the group's parameters do not fit any more (unless they fit nowhere), or if an
      interchangeable device with a smaller number is empty too.

    **Action** ``Discrete(D)``: the device. ``action_masks()`` is ``mask`` as bool ``[D]``.

    **Reward** float: 0 until the last step, then ``log(reference_s / value_s)``, at least -4;
    -5 where the placement cannot run, or at once for an illegal device.

    **Termination**: when every group is placed, or after an illegal action. Never truncated.
    Discount with gamma = 1: an episode has as many steps as the problem has groups.

    ``info`` of the last step has ``problem`` (int), ``value_s`` (float, inf if it cannot run) and
    ``placement`` (``N`` numbers, -1 = not decided).

    Arguments are those of ``PlacementEnv``.
    """

    rules_of = SequentialRules
