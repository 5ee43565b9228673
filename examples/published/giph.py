"""GiPH (Hu et al., MLSys 2023): choose a group and its device, again and again, 2 N times.

Episodes begin at a random placement, every move is made, and every change of the value is rewarded;
the answer is the best placement met. How it differs from the paper: docs/published_methods.md

    python examples/published/run.py giph
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor

from agents.encoder import ILLEGAL, Encoded, NetworkConfig, Observations, PlacementNet
from agents.store import Graphs
from agents.training import TrainConfig
from envs.base import PlacementEnv
from envs.features import traffic_of
from envs.formulations import Formulation
from envs.problem_set import MAX_ID, Floats, ProblemSet, choice_of
from envs.rules import Numbers, Observation, Rng, Rules, id_space
from placement.planners import load
from placement.problem import Placement, Problem, ProblemError
from placement.search.evaluation import random_choice
from placement.simulator import simulate

BOUND = 10.0
PAIR_FEATURES = (
    "1 if the group is here",
    "seconds of work of the device after the move, over the largest now",
    "seconds of work of the device left after the move, over the largest now",
    "seconds of transfers that the move saves, over the mean work of a device",
    "share of the group's neighbours here",
    "log seconds here over seconds where it is",
    "when the group begins, over the end of all",
    "log times that the group was moved here",
)
WALK_FEATURES = (
    "share of the moves made",
    "log value over the best, times 10",
    "log best value over the first, times 10",
)


class _Facts:
    """What moves of one problem are described by: seconds of groups and of what they exchange."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.group_s = problem.group_compute_s  # [G, D], inf where it cannot run
        traffic = traffic_of(problem)
        self.a, self.b = traffic.edges.T  # int64 [E] groups
        self.move_s = np.bincount(traffic.which, traffic.move_s, len(traffic.edges))  # [E]

    def pairs(self, device: NDArray[np.int32], visits: Floats) -> Floats:
        """``PAIR_FEATURES`` float64 ``[G, D, F]`` of a placement int32 ``[G]`` of groups."""
        groups, devices = self.group_s.shape
        able, every = np.isfinite(self.group_s), np.arange(groups)
        seconds = np.where(able, self.group_s, 0.0)
        here = device[:, None] == np.arange(devices)
        load = (seconds * here).sum(axis=0)
        largest, mean = max(load.max(), 1e-300), max(load.mean(), 1e-300)
        there = np.zeros((2, groups, devices))  # neighbours, and seconds of what they exchange
        for g, other in ((self.a, self.b), (self.b, self.a)):
            np.add.at(there[0], (g, device[other]), 1.0)
            np.add.at(there[1], (g, device[other]), self.move_s)
        now_s = seconds[every, device][:, None]
        floor = 1e-3 * mean / groups
        graph = self.problem.graph
        begin, end_s = np.zeros(groups), 1.0
        with suppress(ProblemError):  # of what cannot run nothing begins
            timeline = simulate(self.problem, device[graph.group], num_microbatches=1)
            end_s = max(float(timeline.end_s[0].max()), 1e-300)
            begin = graph.per_group(timeline.start_s[0], np.minimum, np.inf)
        f = np.zeros((groups, devices, len(PAIR_FEATURES)))
        f[..., 0] = here
        f[..., 1] = (load + np.where(here, 0.0, seconds)) / largest
        f[..., 2] = (load[device][:, None] - np.where(here, 0.0, now_s)) / largest
        f[..., 3] = (there[1] - there[1][every, device][:, None]) / mean
        f[..., 4] = there[0] / np.maximum(there[0].sum(axis=1, keepdims=True), 1.0)
        f[..., 5] = np.log(np.maximum(seconds, floor) / np.maximum(now_s, floor))
        f[..., 6] = np.nan_to_num(begin / end_s, posinf=0.0)[:, None]
        f[..., 7] = np.log1p(visits)
        return np.clip(f * able[:, :, None], -BOUND, BOUND)


class MoveRules(Rules):
    """``B`` episodes, each a walk of as many moves as ``length`` says.

    Args:
        problems: what is placed. Values come from its evaluator; what is observed of the timeline
            is always predicted.
        num_envs: ``B``.
        starts: placement int32 ``[N]`` per problem; None: the best single device.
        random_start: begin at a placement drawn uniformly instead, where there is a generator to
            draw with: a planner has none.
    """

    def __init__(
        self,
        problems: ProblemSet,
        num_envs: int,
        starts: Sequence[Placement] | None = None,
        random_start: bool = False,
    ) -> None:
        super().__init__(problems, num_envs)
        self.random_start = random_start
        if starts is None:
            starts = [load("single_device")(p).placement for p in problems.problems]
        self._starts = [choice_of(p, s) for p, s in zip(problems.problems, starts, strict=True)]
        self._facts = [_Facts(p) for p in problems.problems]
        self._moves = np.array([self.length(p) for p in problems.problems])
        groups, devices = problems.max_groups, problems.max_devices
        self._now = np.zeros((num_envs, groups), np.int32)
        self._visits = np.zeros((num_envs, groups, devices))
        self._now_s = np.full(num_envs, np.inf)
        self._first_s = np.full(num_envs, np.inf)
        self._step = np.zeros(num_envs, np.int64)
        self._worth = np.zeros(num_envs)
        shape = (groups, devices, len(PAIR_FEATURES))
        self.observation_space = spaces.Dict(
            {
                "problem": id_space(MAX_ID),
                "pairs": spaces.Box(-BOUND, BOUND, shape, np.float32),
                "search": spaces.Box(-BOUND, BOUND, (len(WALK_FEATURES),), np.float32),
                "mask": spaces.Box(0, 1, (groups, devices), np.int8),
            }
        )
        self.action_space = spaces.Discrete(groups * devices)

    def length(self, problem: Problem) -> int:
        """Moves of an episode."""
        return 2 * problem.graph.num_groups

    def movable(self, b: int, p: int) -> NDArray[np.bool_]:
        """bool ``[G, D]`` legal moves of episode ``b`` on problem ``p``: to another device."""
        groups = int(self.problems.num_groups[p])
        legal = self.problems.legal[p].copy()
        legal[groups:] = False
        legal[np.arange(groups), self._now[b, :groups]] = False
        if not legal.any():  # nothing can move: staying is all there is
            legal[0, self._now[b, 0]] = True
        return legal

    def start(self, rows: Numbers, ids: Numbers, rng: Rng | None = None) -> None:
        for b, p in zip(rows.tolist(), ids.tolist(), strict=True):
            first = self._starts[p]
            if self.random_start and rng is not None:
                first = random_choice(rng, np.isfinite(self._facts[p].group_s))
            self._now[b, : len(first)] = first
            self.choices[b] = -1
            self.choices[b, : len(first)] = first
        self.ids[rows], self._step[rows], self._visits[rows] = ids, 0, 0.0
        self.num_evaluations += len(rows)
        self._now_s[rows] = self.problems.seconds(self.ids[rows], self._now[rows])
        self._first_s[rows] = self.value_s[rows] = self._now_s[rows]
        self._worth[rows] = self.problems.rewards(ids, self._now_s[rows], self._now[rows])

    def observe(self) -> Observation:
        space: Any = self.observation_space.spaces
        pairs = np.zeros((len(self.ids), *space["pairs"].shape), np.float32)
        for b, p in enumerate(self.ids.tolist()):
            groups, devices = self._facts[p].group_s.shape
            visits = self._visits[b, :groups, :devices]
            pairs[b, :groups, :devices] = self._facts[p].pairs(self._now[b, :groups], visits)
        of_walk = (
            self._step / self._moves[self.ids],
            _log(self._now_s, self.value_s),
            _log(self.value_s, self._first_s),
        )
        return {
            "problem": self.ids[:, None].copy(),
            "pairs": pairs,
            "search": np.stack(of_walk, axis=1).astype(np.float32),
            "mask": self.masks().reshape(pairs.shape[:3]).astype(np.int8),
        }

    def masks(self) -> NDArray[np.bool_]:
        legal = [self.movable(b, p) for b, p in enumerate(self.ids.tolist())]
        return np.stack(legal).reshape(len(legal), -1)

    def act(self, actions: NDArray[Any]) -> tuple[Floats, NDArray[np.bool_]]:
        rows, masks = np.arange(len(self.ids)), self.masks()
        inside = (actions >= 0) & (actions < masks.shape[1])
        moves = self._moves[self.ids]
        legal = inside & masks[rows, np.where(inside, actions, 0)] & (self._step < moves)
        group, device = np.divmod(actions, self.problems.max_devices)
        self._now[rows[legal], group[legal]] = device[legal]
        self._visits[rows[legal], group[legal], device[legal]] += 1.0
        self._step += 1
        self.num_evaluations += int(legal.sum())
        if legal.any():
            moved = rows[legal]
            self._now_s[moved] = self.problems.seconds(self.ids[moved], self._now[moved])
        better = self._now_s < self.value_s
        self.value_s[better] = self._now_s[better]
        real = np.arange(self.choices.shape[1]) < self.problems.num_groups[self.ids][:, None]
        self.choices[better] = np.where(real, self._now, -1)[better]
        # Of what each is worth, so that ways back to where an episode was earn nothing.
        worth = self.problems.rewards(self.ids, self._now_s, self._now)
        earned, self._worth = worth - self._worth, worth
        return earned, self._step >= moves


def _log(value_s: Floats, other_s: Floats) -> Floats:
    """float64 ``[B]`` 10 log(value / other), within the bounds; 0 where neither can run."""
    top = np.where(np.isfinite(value_s), np.maximum(value_s, 1e-300), 1e300)
    bottom = np.where(np.isfinite(other_s), np.maximum(other_s, 1e-300), 1e300)
    return np.clip(10.0 * np.log(top / bottom), -BOUND, BOUND)


class MoveEnv(PlacementEnv):
    """Move one colocation group at a time; the answer is the best placement met.

    **Observation** ``Dict``, padded to ``G`` groups and ``D`` devices:

    * ``problem`` int64 ``[1]``: which of ``problems`` this is.
    * ``pairs`` float32 ``[G, D, 8]`` in -10..10: ``PAIR_FEATURES`` of moving each group to each
      device; 0 where it cannot run.
    * ``search`` float32 ``[3]`` in -10..10: ``WALK_FEATURES``.
    * ``mask`` int8 ``[G, D]``: 1 = legal: the group can run there and is elsewhere.

    **Action** ``Discrete(G * D)``: ``g * D + d`` moves group ``g`` to device ``d``. An illegal
    action changes nothing.

    **Reward** float: ``log(before / after)`` of the current value. A value counts as at most
    ``exp(4)`` times the problem's reference, one that cannot run as ``exp(5)`` times.

    **Termination**: after twice as many steps as there are groups. Never truncated.

    Arguments are those of ``PlacementEnv`` and of ``MoveRules``.
    """

    rules_of = MoveRules


class MoveNet(PlacementNet):
    """Scores every pair of a group and a device in the placement as it is."""

    num_state, num_search = len(PAIR_FEATURES), len(WALK_FEATURES)

    def evaluate(
        self, store: Graphs, ids: Tensor, encoded: Encoded, row: Tensor, obs: Observations
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits ``[B, G * D]`` of moving each group to each device."""
        pairs, search, legal = obs["pairs"].float(), obs["search"].float(), obs["mask"].bool()
        x = (
            self.from_group(encoded.groups)[row][:, :, None]
            + self.from_graph(encoded.graph)[row][:, None, None]
            + self.from_device(encoded.devices)[row][:, None]
            + self.from_pair(store.pair[ids[row]])
            + self.from_state(pairs)
        )
        logits = self.score(x).squeeze(-1).masked_fill(~legal, ILLEGAL).flatten(1)
        return logits, self.values(encoded, row, pairs, legal, search), None


formulation = Formulation(
    "giph:formulation",
    env="giph:MoveEnv",
    sees={"pairs": (3, len(PAIR_FEATURES)), "search": (1, len(WALK_FEATURES)), "mask": (2, None)},
    network="giph:MoveNet",
    builds=False,
    options={"random_start": True},
)
CONFIG = TrainConfig(
    formulation=formulation.name,
    cold=True,
    # What a move is worth shows soon: discounted, and with less chance than where one is built.
    gamma=0.97,
    gae_lambda=1.0,
    entropy=0.002,
    last_entropy=0.0,
    epochs=1,  # one step per rollout: REINFORCE with a learned baseline
    minibatches=1,
    learning_rate=1e-2,
    last_learning_rate=1e-3,
    # Along the order of the graph, then against it.
    network=NetworkConfig(encoder="dag", layers=1, hidden=32),
)
