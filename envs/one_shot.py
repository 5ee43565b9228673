"""``DevicePlacement-v0``: all operators at once."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.base import PlacementEnv
from envs.problem_set import MAX_ID, ProblemSet
from envs.rules import BuildingRules, Numbers, Observation, Rng, id_space


class OneShotRules(BuildingRules):
    """``B`` one-step episodes: the action is the whole placement."""

    def __init__(self, problems: ProblemSet, num_envs: int) -> None:
        super().__init__(problems, num_envs)
        self.observation_space = spaces.Dict({"problem": id_space(MAX_ID)})
        self.action_space = spaces.MultiDiscrete([problems.max_devices] * problems.max_groups)

    def start(self, rows: Numbers, ids: Numbers, rng: Rng | None = None) -> None:
        self.ids[rows] = ids
        self.choices[rows] = -1

    def observe(self) -> Observation:
        return {"problem": self.ids[:, None].copy()}

    def masks(self) -> NDArray[np.bool_]:
        return self.problems.legal[self.ids].reshape(len(self.ids), -1)

    def decide(self, actions: NDArray[Any]) -> NDArray[np.bool_]:
        self.choices[:] = actions
        return np.ones(len(self.ids), bool)


class DevicePlacementEnv(PlacementEnv):
    """Place every operator of a graph in one step.

    Operators of a colocation group share a device, so what is placed is the *group*. Problems
    of different sizes are padded to the largest: ``G`` groups, ``D`` devices.

    **Observation** ``Dict``: ``problem`` int64 ``[1]``, which of ``problems`` this is; a policy
    then keeps the graphs (``agents.store.GraphStore``). With ``observe="graph"`` the graph too.

    **Action** ``MultiDiscrete([D] * G)``: the device of each group. Actions of groups that the
    problem does not have are ignored. ``action_masks()`` is bool ``[G * D]``; a group that is
    only padding has the one legal device 0.

    **Reward** float: ``log(reference_s / value_s)``, at least -4; -5 where the placement cannot
    run (a device that does not exist or does not support an operator, memory exceeded).
    0 is as good as the reference, 0.69 twice as fast.

    **Termination**: after one step. Never truncated. Discount with gamma = 1.

    ``info`` has ``problem`` (int), ``value_s`` (float, inf if it cannot run) and ``placement``
    (``N`` numbers).

    Arguments are those of ``PlacementEnv``.
    """

    rules_of = OneShotRules
