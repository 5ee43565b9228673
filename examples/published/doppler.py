"""DOPPLER (Yao et al., ICLR 2026): pick a ready operator, then its device.

It imitates list scheduling along the critical path, then learns in the simulator. How it differs
from the paper: docs/published_methods.md

    python examples/published/run.py doppler
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.encoder import ILLEGAL, Encoded, NetworkConfig, Observations, PlacementNet
from agents.store import Graphs
from agents.training import TrainConfig
from envs.base import PlacementEnv
from envs.features import traffic_of
from envs.formulations import Formulation
from envs.problem_set import MAX_ID, ProblemSet, group_order
from envs.rules import Numbers, Observation, Rng, id_space
from envs.sequential import SequentialRules
from envs.sequential.kernels import FEATURE_BOUND, NUM_DEVICE_FEATURES, describe, place
from placement.planners import load
from placement.problem import Placement, Problem


def taught(problem: Problem) -> Placement:
    """int32 ``[N]`` what is imitated first: list scheduling along the critical path."""
    return load("heft")(problem).placement


class SelectRules(SequentialRules):
    """``B`` episodes; at each step one of the first ``K = window`` ready groups is placed."""

    def __init__(self, problems: ProblemSet, num_envs: int, window: int = 16) -> None:
        super().__init__(problems, num_envs)
        width, groups = problems.max_devices, problems.max_groups
        self._edges = [traffic_of(p).edges for p in problems.problems]  # int64 [E, 2] groups
        self._order = [group_order(p) for p in problems.problems]
        self._waits = np.zeros((num_envs, groups), np.int64)  # producers that are not placed
        self._group = np.full((num_envs, window), -1, np.int64)
        self._mask = np.zeros((num_envs, window, width), np.int8)
        self._room = np.empty(self._state.finish_s.shape[1]), np.empty(width)
        shape = (window, width, NUM_DEVICE_FEATURES)
        self.observation_space = spaces.Dict(
            {
                "problem": id_space(MAX_ID),
                "group": spaces.Box(0, MAX_ID, (window,), np.int64),
                "devices": spaces.Box(0.0, FEATURE_BOUND, shape, np.float32),
                "mask": spaces.Box(0, 1, (window, width), np.int8),
            }
        )
        self.action_space = spaces.Discrete(window * width)

    def start(self, rows: Numbers, ids: Numbers, rng: Rng | None = None) -> None:
        super().start(rows, ids)
        groups = self._waits.shape[1]
        for b, p in zip(rows.tolist(), ids.tolist(), strict=True):
            self._waits[b] = np.bincount(self._edges[p][:, 1], minlength=groups)

    def _ready(self, b: int) -> list[int]:
        """Groups that wait for none, by priority, at most ``K``.

        Where all wait for each other (colocation can close a circle): the first by priority.
        """
        left = [g for g in self._order[self.ids[b]].tolist() if self.choices[b, g] < 0]
        return [g for g in left if self._waits[b, g] == 0][: self._group.shape[1]] or left[:1]

    def observe(self) -> Observation:
        group, mask = np.full_like(self._group, -1), np.zeros_like(self._mask)
        features = np.zeros((*mask.shape, NUM_DEVICE_FEATURES), np.float32)
        finish_s, cost = self._room
        for b in range(len(self.ids)):
            ready = self._ready(b)
            group[b, : len(ready)] = ready
            if not ready:  # over, and not started again: anything legal will do
                mask[b, 0, 0] = 1
            for k, g in enumerate(ready):
                these = self._tables, self._state, b, g, mask[b, k], features[b, k]
                describe(*these, FEATURE_BOUND, cost, finish_s)
        self._group, self._mask = group, mask.copy()
        return {
            "problem": self.ids[:, None].copy(),
            "group": np.maximum(group, 0),
            "devices": features,
            "mask": mask,
        }

    def masks(self) -> NDArray[np.bool_]:
        return super().masks().reshape(len(self.ids), -1)

    def decide(self, actions: NDArray[Any]) -> NDArray[np.bool_]:
        done = np.ones(len(self.ids), bool)
        for b, action in enumerate(actions.tolist()):
            k, d = divmod(action, self._mask.shape[2])
            inside = 0 <= k < self._group.shape[1]
            if not inside or self._group[b, k] < 0 or self._mask[b, k, d] == 0:
                continue
            g, edges = int(self._group[b, k]), self._edges[self.ids[b]]
            place(self._tables, self._state, b, g, d, self._room[0])
            np.add.at(self._waits[b], edges[edges[:, 0] == g, 1], -1)
            done[b] = (self.choices[b, : len(self._order[self.ids[b]])] >= 0).all()
        return done


class SelectEnv(PlacementEnv):
    """Pick one of the groups whose inputs are placed, then its device: a dual policy.

    A group is ready when every group that it uses tensors of is placed (where colocation closes a
    circle, the first by priority is). The first ``K`` ready groups by priority are offered.

    **Observation** ``Dict``, padded to ``D`` devices:

    * ``problem`` int64 ``[1]``: which of ``problems`` this is.
    * ``group`` int64 ``[K]``: the ready groups (0 where there are fewer).
    * ``devices`` float32 ``[K, D, 9]`` in 0..20: what choosing this group and device would mean
      now (``envs.sequential.kernels.DEVICE_FEATURES``); 0 where the device does not support it.
    * ``mask`` int8 ``[K, D]``: 1 = legal; as in ``SequentialDevicePlacement-v0``.

    **Action** ``Discrete(K * D)``: ``k * D + d`` puts group ``group[k]`` on device ``d``. A dual
    policy takes the probability of the group times that of the device given the group.

    **Reward** float: 0 until the last step, then ``log(reference_s / value_s)``, at least -4;
    -5 where the placement cannot run, or at once for an illegal action.

    **Termination**: when every group is placed, or after an illegal action. Never truncated.

    ``info`` of the last step has ``problem`` (int), ``value_s`` (float, inf if it cannot run) and
    ``placement`` (``N`` numbers, -1 = not decided).

    Arguments are those of ``PlacementEnv``, and ``window``: ``K``, 16.
    """

    rules_of = SelectRules


class SelectNet(PlacementNet):
    """A score of the ready groups, too."""

    def more_heads(self) -> Sequence[nn.Sequential]:
        """The score of a ready group."""
        h = self.config.hidden
        self.select = nn.Sequential(
            nn.Linear(2 * h + self.num_state, h), nn.ReLU(), nn.Linear(h, 1)
        )
        return (self.select,)

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probabilities ``[B, K * D]`` of a ready group, times those of its device.

        An untrained network selects the first group, which has the highest priority.
        """
        state, legal = obs["devices"].float(), obs["mask"].bool()
        group = obs["group"].long()
        count, ready, devices, features = state.shape
        many = row[:, None].expand(-1, ready).reshape(-1)
        some = legal.any(dim=2)
        flat = legal.reshape(-1, devices).clone()
        flat[:, 0] |= ~some.reshape(-1)  # a row that is only padding: some device, never selected
        device = self.step_logits(
            store, ids, encoded, many, group.reshape(-1), state.reshape(-1, devices, features), flat
        )
        device = torch.log_softmax(device, dim=-1).reshape(count, ready, devices)
        least = state.masked_fill(~legal[:, :, :, None], -ILLEGAL).amin(dim=2)
        least = least.masked_fill(~some[:, :, None], 0.0)
        seen = [
            encoded.groups[row[:, None], group],
            encoded.graph[row][:, None].expand(-1, ready, -1),
            least,
        ]
        wanted = self.select(torch.cat(seen, dim=2)).squeeze(-1)
        wanted = wanted - torch.arange(ready, device=wanted.device) * 1.0  # as list schedulers do
        select = torch.log_softmax(wanted.masked_fill(~some, ILLEGAL), dim=-1)
        both = (select[:, :, None] + device).masked_fill(~legal, ILLEGAL)
        return both.reshape(count, -1), self.values(encoded, row, state, legal), None


formulation = Formulation(
    "doppler:formulation",
    env="doppler:SelectEnv",
    sees={"group": (1, None), "devices": (3, None), "mask": (2, None)},
    network="doppler:SelectNet",
)
CONFIG = TrainConfig(
    formulation=formulation.name,
    cold=True,
    gae_lambda=1.0,
    epochs=1,  # one step per rollout: REINFORCE with a learned baseline
    minibatches=1,
    learning_rate=1e-4,
    last_learning_rate=1e-5,
    imitation_epochs=50,
    imitation_rate=1e-3,
    # List scheduling is imitated, not given.
    network=NetworkConfig(encoder="sage", layers=6, hidden=128, finish_weight=0.0),
)
