"""``SelectPlaceDevicePlacement-v0``: pick a ready group, then its device."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.base import PlacementEnv
from envs.features import traffic_of
from envs.problems import MAX_ID, ProblemSet
from envs.rules import BuildingRules, Numbers, Observation, Rng, check_range, id_space
from envs.sequential_kernels import (
    FEATURE_BOUND,
    NUM_DEVICE_FEATURES,
    begin,
    describe,
    place,
    stacked,
    state_of,
    tables_of,
)
from placement.tools.jit import allocating, kernel


@kernel
def _ready(t, s, b, num_before, group):  # type: ignore[no-untyped-def]
    """Fill ``group [K]``: groups that wait for none, by priority, then -1; how many there are.

    Where all wait for each other (colocation can close a circle): the first by priority.
    """
    p = s.ids[b]
    count, first = 0, -1
    group[:] = -1
    for i in range(t.num_groups[p]):
        g = t.order[p, i]
        if s.choice[b, g] >= 0:
            continue
        first = g if first < 0 else first
        if num_before[b, g] == 0 and count < len(group):
            group[count] = g
            count += 1
    if count == 0 and first >= 0:
        group[0], count = first, 1
    return count


@allocating
def _observe(t, s, num_before, group, mask, features, bound):  # type: ignore[no-untyped-def]
    """Fill group ``[B, K]``, mask ``[B, K, D]``, features ``[B, K, D, F]`` (zeroed before)."""
    scratch = np.empty(s.finish_s.shape[1])
    cost = np.empty(mask.shape[2])
    for b in range(len(s.ids)):
        count = _ready(t, s, b, num_before, group[b])
        if count == 0:  # over, and not started again: anything legal will do
            mask[b, 0, 0] = 1
        for k in range(count):
            describe(t, s, b, group[b, k], mask[b, k], features[b, k], bound, cost, scratch)


@allocating
def _act(t, s, num_before, after_ptr, after, actions, group, mask, done):  # type: ignore[no-untyped-def]
    scratch = np.empty(s.finish_s.shape[1])
    width = mask.shape[2]
    for b in range(len(s.ids)):
        p, k, d = s.ids[b], actions[b] // width, actions[b] % width
        legal = 0 <= k < mask.shape[1] and group[b, k] >= 0 and mask[b, k, d] == 1
        if not legal:
            done[b] = True
            continue
        g = group[b, k]
        place(t, s, b, g, d, scratch)
        for i in range(after_ptr[p, g], after_ptr[p, g + 1]):
            num_before[b, after[p, i]] -= 1
        done[b] = s.step[b] == t.num_groups[p]


class SelectPlaceRules(BuildingRules):
    """``B`` episodes; at each step one of the first ``K = window`` ready groups is placed."""

    def __init__(self, problems: ProblemSet, num_envs: int, window: int = 16) -> None:
        check_range("window", window, 1)
        super().__init__(problems, num_envs)
        width = problems.max_devices
        self._tables, self._state = tables_of(problems), state_of(problems, num_envs)
        pairs = [traffic_of(p).edges for p in problems.problems]
        ends = [np.arange(p.graph.num_groups + 1) for p in problems.problems]
        ptrs = [np.searchsorted(x[:, 0], end) for x, end in zip(pairs, ends, strict=True)]
        self._after_ptr, self._after = stacked(ptrs), stacked([x[:, 1] for x in pairs])
        self._num_before = [
            np.bincount(rows[:, 1], minlength=problems.max_groups).astype(np.int32)
            for rows in pairs
        ]
        self._waits = np.zeros((num_envs, problems.max_groups), np.int32)
        self._group = np.full((num_envs, window), -1, np.int64)
        self._mask = np.zeros((num_envs, window, width), np.int8)
        self.ids, self.choices = self._state.ids, self._state.choice
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
        begin(self._tables, self._state, np.asarray(rows, np.int64), np.asarray(ids, np.int64))
        for b, p in zip(rows.tolist(), ids.tolist(), strict=True):
            self._waits[b] = self._num_before[p]

    def observe(self) -> Observation:
        group = np.empty(self._group.shape, np.int64)
        mask = np.zeros(self._mask.shape, np.int8)
        features = np.zeros((*mask.shape, NUM_DEVICE_FEATURES), np.float32)
        _observe(self._tables, self._state, self._waits, group, mask, features, FEATURE_BOUND)
        self._group, self._mask = group, mask.copy()
        return {
            "problem": self.ids[:, None].copy(),
            "group": np.maximum(group, 0),
            "devices": features,
            "mask": mask,
        }

    def masks(self) -> NDArray[np.bool_]:
        return self._mask.astype(bool).reshape(len(self.ids), -1)

    def decide(self, actions: NDArray[Any]) -> NDArray[np.bool_]:
        done = np.zeros(len(self.ids), bool)
        _act(
            self._tables,
            self._state,
            self._waits,
            self._after_ptr,
            self._after,
            actions.astype(np.int64),
            self._group,
            self._mask,
            done,
        )
        return done


class SelectPlaceDevicePlacementEnv(PlacementEnv):
    """Pick one of the groups whose inputs are placed, then its device: a dual policy.

    As in DOPPLER (Yao et al. 2025), which selects an operator, then places it. A group is ready
    when every group that it uses tensors of is placed (where colocation closes a circle, the
    first by priority is). The first ``K`` ready groups by priority are offered.

    **Observation** ``Dict``, padded to ``D`` devices:

    * ``problem`` int64 ``[1]``: which of ``problems`` this is.
    * ``group`` int64 ``[K]``: the ready groups (0 where there are fewer).
    * ``devices`` float32 ``[K, D, 9]`` in 0..20: what choosing this group and device would mean
      now (``envs.sequential_kernels.DEVICE_FEATURES``); 0 where the device does not support it.
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

    rules_of = SelectPlaceRules
