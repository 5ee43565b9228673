"""``RefineDevicePlacement-v0``: re-place one group at a time, from a placement that is good."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.base import PlacementEnv
from envs.guided import NO_NETWORK, begin, start_choices, state_of, tables_of
from envs.guided_kernels import BOUND, RESUME, State, play
from envs.problems import MAX_ID, Floats, ProblemSet, group_order
from envs.rules import Numbers, Observation, Rng, Rules, check_range, id_space
from placement.problem import Placement
from placement.search.evaluation import INFEASIBLE, random_choice
from placement.simulator import score
from placement.simulator.analytic_kernels import load_change
from placement.tools.jit import allocating

PAIR_FEATURES = (
    "1 if the group is here",
    "load of the device after the move, over the largest now",
    "load of the device left after the move, over the largest now",
    "communication saved by the move, over the mean load",
    "share of the group's neighbours here",
    "share of the group's neighbours where it is",
    "log seconds here over seconds where it is",
    "1 if the group is on the critical chain of the predicted timeline",
    "when the group begins, over the makespan",
    "log times that the group was moved here",
)
SEARCH_FEATURES = (
    "share of the moves made",
    "log value over the best, times 10",
    "log best value over the first, times 10",
)


@allocating
def _describe(t, s, pairs):
    """Fill ``pairs [G, D, F]`` of a problem (zeroed before)."""
    device, load = s.moves.device, s.moves.load
    near_ptr, near = t.graph.near_ptr, t.graph.near
    groups, devices = t.group_s.shape
    largest, mean = max(load.max(), 1e-300), max(load.mean(), 1e-300)
    for g in range(groups):
        old = device[g]
        degree = max(near_ptr[g + 1] - near_ptr[g], 1)
        for i in range(near_ptr[g], near_ptr[g + 1]):
            pairs[g, device[near[i]], 4] += 1.0 / degree
        stay = pairs[g, old, 4]
        now_s = t.group_s[g, old]
        for d in range(devices):
            f = pairs[g, d]
            if t.group_s[g, d] == np.inf:
                f[4] = 0.0
                continue
            at_old = at_new = 0.0
            if d != old:
                at_old, at_new = load_change(t.moves, s.moves, g, d)
            floor = 1e-3 * mean / groups
            f[0] = d == old
            f[1] = min((load[d] + at_new) / largest, BOUND)
            f[2] = min((load[old] + at_old) / largest, BOUND)
            f[3] = (t.group_s[g, d] - now_s - at_old - at_new) / mean if d != old else 0.0
            f[3] = max(-BOUND, min(BOUND, f[3]))
            f[5] = stay
            f[6] = np.log(max(t.group_s[g, d], floor) / max(now_s, floor))
            f[6] = max(-BOUND, min(BOUND, f[6]))
            f[7] = s.on_chain[g]
            f[8] = s.when[g]
            f[9] = np.log(1.0 + s.refused[g, d])


class RefineRules(Rules):
    """``B`` episodes, each a walk of ``moves`` re-placements.

    Args:
        problems: what is placed. Values come from its evaluator; what is observed of the
            timeline is always predicted.
        num_envs: ``B``.
        starts: placement int32 ``[N]`` per problem that episodes begin at; None: ``best_of``.
        moves: steps of an episode; None: twice the groups of the problem, or of a sweep as many
            as there are groups.
        best_so_far: reward only what improves on the best of the episode; otherwise every
            change, for better or worse.
        sweep: groups take turns, by priority, and may stay where they are; otherwise any group
            can be moved, and must be.
        random_start: begin each episode at a placement drawn uniformly, not at ``starts``.
    """

    def __init__(
        self,
        problems: ProblemSet,
        num_envs: int,
        starts: Sequence[Placement] | None = None,
        moves: int | None = None,
        best_so_far: bool = True,
        sweep: bool = False,
        random_start: bool = False,
    ) -> None:
        check_range("moves", moves or 0, 0)
        super().__init__(problems, num_envs)
        self.best_so_far, self.random_start = best_so_far, random_start
        default = problems.num_groups if sweep else 2 * problems.num_groups
        self._moves = np.array([moves or int(g) for g in default])
        self._turns = [group_order(p) for p in problems.problems] if sweep else None
        self._starts = start_choices(problems, starts)
        self._tables = [tables_of(p) for p in problems.problems]
        self._states: list[dict[int, State]] = [{} for _ in range(num_envs)]
        groups, devices = problems.max_groups, problems.max_devices
        self._now = np.zeros((num_envs, groups), np.int32)
        self._now_s = np.full(num_envs, np.inf)
        self._first_s = np.full(num_envs, np.inf)
        self._step = np.zeros(num_envs, np.int64)
        self._worth = np.zeros(num_envs)  # what has been earned so far, and by the start
        shape = (groups, devices, len(PAIR_FEATURES))
        self.observation_space = spaces.Dict(
            {
                "problem": id_space(MAX_ID),
                "pairs": spaces.Box(-BOUND, BOUND, shape, np.float32),
                "search": spaces.Box(-BOUND, BOUND, (len(SEARCH_FEATURES),), np.float32),
                "mask": spaces.Box(0, 1, (groups, devices), np.int8),
            }
        )
        self.action_space = spaces.Discrete(groups * devices)

    def start(self, rows: Numbers, ids: Numbers, rng: Rng | None = None) -> None:
        for b, p in zip(rows.tolist(), ids.tolist(), strict=True):
            self.ids[b] = p
            if p not in self._states[b]:
                self._states[b][p] = state_of(self._tables[p], 0)
            state, first = self._states[b][p], self._starts[p]
            if self.random_start:
                allowed = np.isfinite(self.problems.problems[p].group_compute_s)
                first = random_choice(rng or np.random.default_rng(b), allowed)
            begin(self._tables[p], state, first, 0, np.random.default_rng(0))
            self._now[b, : len(first)] = first
            self.choices[b] = -1
            self.choices[b, : len(first)] = first
        self._step[rows] = 0
        self._now_s[rows] = self._values(np.asarray(rows))
        self._first_s[rows] = self.value_s[rows] = self._now_s[rows]
        self._worth[rows] = self.problems.rewards(ids, self._now_s[rows], self._now[rows])

    def observe(self) -> Observation:
        space = self.observation_space.spaces
        pairs = np.zeros((len(self.ids), *(space["pairs"].shape or ())), np.float32)
        search = np.zeros((len(self.ids), len(SEARCH_FEATURES)), np.float32)
        for b, p in enumerate(self.ids.tolist()):
            _describe(self._tables[p], self._states[b][p], pairs[b])
        search[:, 0] = self._step / self._moves[self.ids]
        search[:, 1] = _log(self._now_s, self.value_s)
        search[:, 2] = _log(self.value_s, self._first_s)
        mask = self.masks().reshape(pairs.shape[:3]).astype(np.int8)
        return {
            "problem": self.ids[:, None].copy(),
            "pairs": pairs,
            "search": search,
            "mask": mask,
        }

    def masks(self) -> NDArray[np.bool_]:
        legal = self.problems.legal[self.ids].copy()
        for b, p in enumerate(self.ids.tolist()):
            groups = int(self.problems.num_groups[p])
            legal[b, groups:] = False
            if self._turns is not None:
                legal[b, np.arange(len(legal[b])) != self._turn(b)] = False
                continue
            legal[b, np.arange(groups), self._now[b, :groups]] = False
            if not legal[b].any():  # nothing can move: staying is all there is
                legal[b, 0, self._now[b, 0]] = True
        return legal.reshape(len(self.ids), -1)

    def act(self, actions: NDArray[Any]) -> tuple[Floats, NDArray[np.bool_]]:
        known = (actions >= 0) & (actions < self.problems.max_groups * self.problems.max_devices)
        group, device = np.divmod(np.where(known, actions, 0), self.problems.max_devices)
        rows = np.arange(len(self.ids))
        moves = self._moves[self.ids]
        legal = known & self.problems.legal[self.ids, group, device]
        legal &= self._step < moves  # one that is over, and not started again, stays as it is
        legal &= group < self.problems.num_groups[self.ids]
        if self._turns is not None:
            legal &= group == [self._turn(b) for b in rows.tolist()]
        self._now[rows[legal], group[legal]] = device[legal]
        for b in rows[legal].tolist():
            state = self._states[b][int(self.ids[b])]
            state.moves.device[group[b]] = device[b]
            state.refused[group[b], device[b]] += 1.0
            play(self._tables[self.ids[b]], state, RESUME, 0, NO_NETWORK, 0.0, 0.0)
        self._now_s[legal] = self._values(rows[legal])
        self._step = np.minimum(self._step + 1, moves)
        better = self._now_s < self.value_s
        self.value_s[better] = self._now_s[better]
        self.choices[better] = np.where(self.choices[better] < 0, -1, self._now[better])
        value_s, choices = self._now_s, self._now
        if self.best_so_far:
            value_s, choices = self.value_s, self.choices
        # Of what each is worth, so that ways back to where an episode was earn nothing.
        worth = self.problems.rewards(self.ids, value_s, choices)
        earned, self._worth = worth - self._worth, worth
        return earned, self._step >= moves

    def _turn(self, b: int) -> int:
        """The group that may be moved now, in a sweep."""
        assert self._turns is not None
        order = self._turns[self.ids[b]]
        return int(order[self._step[b] % len(order)])

    def _values(self, rows: NDArray[np.integer[Any]]) -> Floats:
        """Seconds float64 of the placements of episodes ``rows`` now; inf: cannot run."""
        self.num_evaluations += len(rows)
        if self.problems.evaluator is score:
            costs = [self._states[b][int(self.ids[b])].cost for b in rows.tolist()]
            cost = np.array(costs, np.float64)
            return np.where(cost < INFEASIBLE, cost, np.inf)
        return self.problems.seconds(self.ids[rows], self._now[rows])


def _log(value_s: Floats, other_s: Floats) -> Floats:
    """float64 ``[B]`` 10 log(value / other), within the bounds; 0 where neither can run."""
    top = np.where(np.isfinite(value_s), np.maximum(value_s, 1e-300), 1e300)
    bottom = np.where(np.isfinite(other_s), np.maximum(other_s, 1e-300), 1e300)
    return np.clip(10.0 * np.log(top / bottom), -BOUND, BOUND)


class RefineDevicePlacementEnv(PlacementEnv):
    """Move one colocation group at a time, starting from a good placement.

    Every move is made, whatever comes of it; the answer is the best placement met. What GiPH
    (Hu et al. 2023) does, and with ``sweep=True`` Placeto (Addanki et al. 2019), started where
    heuristics end or, with ``random_start=True``, anywhere.

    **Observation** ``Dict``, padded to ``G`` groups and ``D`` devices:

    * ``problem`` int64 ``[1]``: which of ``problems`` this is.
    * ``pairs`` float32 ``[G, D, 10]`` in -10..10: ``PAIR_FEATURES`` of moving each group to each
      device; 0 where it cannot run.
    * ``search`` float32 ``[3]`` in -10..10: ``SEARCH_FEATURES``.
    * ``mask`` int8 ``[G, D]``: 1 = legal: the group can run there and is elsewhere. In a
      ``sweep``: it can run there and it is its turn.

    **Action** ``Discrete(G * D)``: ``g * D + d`` moves group ``g`` to device ``d``. An illegal
    action changes nothing.

    **Reward** float: ``log(best before / best after)`` of the best value of the episode, or, with
    ``best_so_far=False``, ``log(before / after)`` of the current value. A value counts as at most
    ``exp(4)`` times the problem's reference, one that cannot run as ``exp(5)`` times.

    **Termination**: after ``moves`` steps (twice the groups of the problem, in a ``sweep`` once).
    Never truncated.

    ``info`` of the last step has ``problem`` (int), ``value_s`` (float, the best; inf where
    nothing could run) and ``placement`` (``N`` numbers, the best).

    Arguments are those of ``PlacementEnv`` and of ``RefineRules``.
    """

    rules_of = RefineRules
