"""``OrderSearch-v0``: choose the moves of an annealed search over placement and order together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.base import PlacementEnv
from envs.guided import Choice, OfferingRules
from envs.problems import choice_of
from envs.rules import Rng
from placement.planners.order_search import (
    NO_NETWORK,
    sequence_of,
    start,
    state_of,
    tables_of,
    why_not,
)
from placement.problem import Placement, Problem
from placement.search import order
from placement.search.order_moves import NUM_MOVE_FEATURES, NUM_SEARCH_FEATURES
from placement.search.order_state import State


class OrderSearchRules(OfferingRules):
    """``B`` searches side by side, each an annealing of ``moves`` steps.

    ``best_s`` and ``value_s`` are of the orders that were found; ``best_choices`` and ``choices``
    are where operators run in them.

    Attributes:
        best_sequence: int32 ``[P, N]`` the order of the best of each problem, and
        sequence_s: float64 ``[P]`` its latency: where that is not ``best_s``, the best came from
            elsewhere, in the list scheduler's order.

    Args: as of ``OfferingRules``; ``starts`` are in the list scheduler's order.

    Raises:
        EnvError: as there (``placement.planners.order_search.why_not``).
    """

    name = "OrderSearch"
    num_features = NUM_MOVE_FEATURES, NUM_SEARCH_FEATURES

    def _why_not(self, problem: Problem) -> str:
        reason = why_not(problem)
        return f"{reason}; leave it out, or use GuidedSearch" if reason else ""

    def _prepare(self, starts: list[Choice]) -> None:
        problems = self.problems.problems
        self._starts = [
            (c[p.graph.group], sequence_of(p, c[p.graph.group]))
            for c, p in zip(starts, problems, strict=True)
        ]
        most = max(p.num_ops for p in problems)
        self.best_sequence = np.zeros((len(problems), most), np.int32)
        self.sequence_s = np.full(len(problems), np.inf)
        self._tables = [tables_of(p) for p in problems]

    def _new_state(self, p: int) -> State:
        return state_of(self.problems.problems[p], self.width)

    def _begin(self, b: int, p: int, at_best: bool, step: int, rng: Rng) -> None:
        place, sequence = self._best(p) if at_best else self._starts[p]
        start(self._tables[p], self._state(b), place, sequence, rng, step, step / self.moves)

    def _offered(self, b: int) -> tuple[NDArray[np.bool_], Choice, Choice]:
        state = self._state(b)
        return state.which >= 0, state.group, state.to

    def masks(self) -> NDArray[np.bool_]:
        mask = np.array([self._state(b).which >= 0 for b in range(len(self.ids))])
        mask[:, 0] = ~mask.any(axis=1)
        return mask

    def _take(self, b: int, p: int, action: int) -> tuple[float, float]:
        state = self._state(b)
        self.num_evaluations += int(state.which[action] >= 0)
        used = float(state.step + 1.0) / self.moves
        return order.play(self._tables[p], state, order.TAKE, action, NO_NETWORK, used, used), used

    def _best_of(self, b: int) -> tuple[float, Choice]:
        state, problem = self._state(b), self.problems.problems[int(self.ids[b])]
        return state.best_s, choice_of(problem, state.best_place)

    def _finish(self, b: int) -> None:
        p, state = int(self.ids[b]), self._state(b)
        if state.best_s < self.best_s[p]:
            self.sequence_s[p] = state.best_s
            self.best_sequence[p, : self.problems.problems[p].num_ops] = state.best_sequence
        super()._finish(b)

    def state(self) -> dict[str, Any]:
        return {"orders": self.best_sequence.tolist(), "seconds": self.sequence_s.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        if state:
            self.best_sequence[:], self.sequence_s[:] = state["orders"], state["seconds"]

    def _best(self, p: int) -> tuple[Placement, NDArray[np.int32]]:
        problem = self.problems.problems[p]
        place = self.best_choices[p][problem.graph.group]
        if self.sequence_s[p] == self.best_s[p]:
            return place, self.best_sequence[p, : problem.num_ops]
        return place, sequence_of(problem, place)


class OrderSearchEnv(PlacementEnv):
    """Choose among moves of operators, in a search that cools down over a budget of moves.

    A move takes an operator elsewhere in the order of its device; or its colocation group to
    another device, to a place there where its inputs have come; or, staying where they are in the
    order, neighbours on its device too. It begins with an operator of the critical chain, or any
    other. Its effect is estimated (``placement.search.order_estimates``), and observed; moves whose
    estimate is hopeless beside the best one's are not offered.

    **Observation** ``Dict``, of ``C`` moves and, before them, the choice to stay:

    * ``problem`` int64 ``[1]``: which of ``problems`` this is.
    * ``moves`` float32 ``[C + 1, 20]`` in -30..30: ``MOVE_FEATURES``, logarithms and shares.
    * ``search`` float32 ``[10]`` in -10..10: ``SEARCH_FEATURES``.
    * ``group``, ``to_device`` int64 ``[C + 1]``: the first group that moves, and where to (0, 0 for
      the choice to stay, and where the mask is 0).
    * ``mask`` int8 ``[C + 1]``: 1 = legal.

    **Action** ``Discrete(C + 1)``. The move is made, the latency computed, and kept as annealing
    does: always if better, otherwise with probability ``(before / after) ** (1 / temperature)``.
    Staying is legal only where nothing can move. An illegal action stays.

    **Reward** float: the improvement ``log(best before / best after)`` of the best latency of the
    episode, at most 1, never negative: the return is ``log(first / best)``, unless a step improved
    it by more than ``e``: that earns 1.

    **Termination**: after ``moves`` steps. Never truncated.

    ``info`` of the last step has ``problem`` (int), ``value_s`` (float, the best, in the order that
    was found) and ``placement`` (``N`` numbers).

    Arguments are those of ``PlacementEnv`` and of ``OrderSearchRules``; references only say what
    ``agents`` reports, the reward does not need them.
    """

    rules_of = OrderSearchRules
