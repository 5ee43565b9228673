"""``GuidedSearch-v0``: choose a macro move in an annealed search."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs import guided_kernels
from envs.base import PlacementEnv
from envs.guided_kernels import (
    BEGIN,
    BOUND,
    NUM_MOVE_FEATURES,
    NUM_SEARCH_FEATURES,
    TAKE,
    State,
    Tables,
    Tried,
    play,
)
from envs.problems import MAX_ID, EnvError, Floats, ProblemSet, choice_of
from envs.rewards import log_speedup
from envs.rules import Numbers, Observation, Rng, Rules, check_range, id_space
from placement.planners import PlannerError, load
from placement.problem import Placement, Problem
from placement.search.chooser import no_network
from placement.search.evaluation import INFEASIBLE, can_move, neighbours
from placement.search.macro import draws_of
from placement.simulator import kernels, score
from placement.simulator.analytic_kernels import blocks, move_state, move_tables, piecewise_tables

# Ways of cooling down: temperature at first and at last, log2 of p at first and at last. Energies
# of max_load are sums of p-th powers; other objectives are annealed as their logarithm.
ROUNDS = {
    True: ((0.05, 2e-3, 4, 4), (1.0, 1e-4, 2, 7), (0.02, 1e-4, 4, 8), (0.05, 2e-3, 2, 2)),
    False: ((0.02, 1e-5, 0, 0), (0.005, 1e-5, 0, 0)),
}

NO_NETWORK = no_network(NUM_SEARCH_FEATURES, NUM_MOVE_FEATURES)


def tables_of(problem: Problem) -> Tables:
    """What the kernels need of a problem.

    Raises:
        PlannerError: a device streams, and the objective is a formula: those do not know of it.
    """
    g, objective, streaming = problem.graph, problem.objective, problem.cluster.streaming
    if streaming and objective.is_analytic:
        name = problem.cluster.device_names[streaming[0]]
        raise PlannerError(
            f"guided search for {objective} does not know where device {name!r} keeps parameters: "
            "use best_of or macro_search, or leave that device out of the cluster"
        )
    kind = {
        "max_load": guided_kernels.LOAD,
        "piecewise_latency": guided_kernels.PIECEWISE,
        "energy": guided_kernels.ENERGY,
    }.get(objective, guided_kernels.TIMELINE)
    runs = not objective.is_analytic
    m = problem.num_run if runs else 1
    window, track = min(m, problem.max_in_flight), bool(problem.memory_may_bind and runs)
    rank = g.per_group(problem.upward_rank_s, np.maximum)
    sent = len(g.use_dst) * m if runs else -1
    power, library = problem.cluster.power, problem.profile.library_bytes if track else None
    return Tables(
        kind=kind,
        moves=move_tables(problem, blocks(problem, g.group)),
        graph=neighbours(problem),
        simulator=kernels.tables(problem),
        run=kernels.state_of(problem, m, window, track, None, sent),
        pieces=piecewise_tables(problem),
        group=g.group.astype(np.int32),
        group_s=problem.group_compute_s,
        rank=(rank / max(rank.max(), 1e-300)).astype(np.float32),
        mean_transfer_s=problem.mean_transfer_s,
        busy_w=power.busy_w,
        idle_w=power.idle_w,
        second_j=problem.second_j,
        read_bytes=g.op_param_bytes if streaming else np.zeros(0, np.int64),
        library_bytes=np.zeros((0, problem.num_devices), np.int64) if library is None else library,
    )


def state_of(tables: Tables, width: int) -> State:
    """Room for one episode of ``width`` moves per step."""
    groups, devices = tables.group_s.shape
    body = min(64, groups) if tables.kind == guided_kernels.LOAD else groups
    sizes = {"G": groups, "D": devices, "C": width, "L": body}
    sizes |= {"F": NUM_MOVE_FEATURES, "S": NUM_SEARCH_FEATURES}
    return State.fresh(
        sizes,
        draws=draws_of(tables.group_s, tables.graph, 0, guided_kernels.SHARE, 0.0, body),
        moves=move_state(tables.moves, np.argmin(tables.group_s, axis=1).astype(np.int32)),
        tried=Tried.fresh({}),
    )


def begin(
    tables: Tables,
    state: State,
    choice: NDArray[np.int32],
    number: int,
    rng: np.random.Generator,
    step: int = 0,
    used: float = 0.0,
) -> None:
    """Start at ``choice`` int32 ``[G]``, to cool down in the way of round ``number``.

    ``rng`` seeds what is drawn from now on. The first ``step`` steps, and the share ``used`` of
    the budget, count as made.
    """
    state.draws.random[0] = rng.integers(1, 2**64, dtype=np.uint64)
    rounds = ROUNDS[tables.kind == guided_kernels.LOAD]
    warm, cold, first, last = rounds[number % len(rounds)]
    state.warm, state.cold, state.power_first, state.power_last = warm, cold, first, last
    state.moves.device[:] = choice
    play(tables, state, BEGIN, step, NO_NETWORK, used, used)


def start_choices(
    problems: ProblemSet, starts: Sequence[Placement] | None
) -> list[NDArray[np.int32]]:
    """The device of each group, int32 ``[G]`` per problem, at ``starts``; None: ``best_of``."""
    if starts is None:
        starts = [load("best_of")(p).placement for p in problems.problems]
    if len(starts) != len(problems.problems):
        raise EnvError(f"{len(starts)} starts for {len(problems.problems)} problems")
    return [choice_of(p, w) for p, w in zip(problems.problems, starts, strict=True)]


Choice = NDArray[np.int32]


class OfferingRules(Rules):
    """``B`` searches, each an annealing of ``moves`` steps: moves are offered, one is chosen.

    Choice 0 is to stay.

    Args:
        problems: what is placed; values are predictions.
        num_envs: ``B``.
        starts: placement int32 ``[N]`` per problem that searches begin at; None: ``best_of``.
        moves: steps of an episode.
        width: ``C``, moves offered at each step.
        again: share of the episodes that begin at the best placement met so far instead, and
            anywhere in the cooling: that is where most of a long search happens.

    Raises:
        EnvError: values do not come from the simulator, a number is out of its range, or a
            problem cannot be searched.
    """

    name: ClassVar[str]
    num_features: ClassVar[tuple[int, int]]  # of a move, and of the search

    def __init__(
        self,
        problems: ProblemSet,
        num_envs: int,
        starts: Sequence[Placement] | None = None,
        moves: int = 256,
        width: int = 16,
        again: float = 0.0,
    ) -> None:
        if problems.evaluator is not score:
            raise EnvError(f"{self.name} evaluates in its own kernel: leave evaluator out")
        check_range("moves", moves, 1)
        check_range("width", width, 1)
        check_range("again", again, 0, 1)
        super().__init__(problems, num_envs)
        self.moves, self.width, self.again = moves, width, again
        self._states: list[dict[int, Any]] = [{} for _ in range(num_envs)]
        self._worth = np.zeros(num_envs)  # of each best, if the reward is not ours
        rows, (of_move, of_search) = width + 1, self.num_features
        self.observation_space = spaces.Dict(
            {
                "problem": id_space(MAX_ID),
                "moves": spaces.Box(-3 * BOUND, 3 * BOUND, (rows, of_move), np.float32),
                "search": spaces.Box(-BOUND, BOUND, (of_search,), np.float32),
                "group": spaces.Box(0, MAX_ID, (rows,), np.int64),
                "to_device": spaces.Box(0, MAX_ID, (rows,), np.int64),
                "mask": spaces.Box(0, 1, (rows,), np.int8),
            }
        )
        self.action_space = spaces.Discrete(rows)
        for problem in problems.problems:
            if reason := self._why_not(problem):
                raise EnvError(f"graph {problem.graph.name!r}: {reason}")
        self._prepare(start_choices(problems, starts))

    @abstractmethod
    def _why_not(self, problem: Problem) -> str:
        """Why a problem cannot be searched, and what to do; empty if it can."""

    @abstractmethod
    def _prepare(self, starts: list[Choice]) -> None:
        """Make what episodes need: tables of the problems, and where they start."""

    @abstractmethod
    def _new_state(self, p: int) -> Any:
        """Room for an episode of problem ``p``."""

    @abstractmethod
    def _begin(self, b: int, p: int, at_best: bool, step: int, rng: Rng) -> None:
        """Begin episode ``b``, at the best met of problem ``p``; ``step`` steps count as made."""

    @abstractmethod
    def _take(self, b: int, p: int, action: int) -> tuple[float, float]:
        """Try a move: the kernel's gain, and the share of the moves that is made."""

    @abstractmethod
    def _best_of(self, b: int) -> tuple[float, Choice]:
        """The best of episode ``b`` so far: seconds, and the device of each group, ``[G]``."""

    def start(self, rows: Numbers, ids: Numbers, rng: Rng | None = None) -> None:
        rng = np.random.default_rng(0) if rng is None else rng
        for b, p in zip(rows.tolist(), ids.tolist(), strict=True):
            self.ids[b] = p
            if p not in self._states[b]:
                self._states[b][p] = self._new_state(p)
            again = rng.random() < self.again
            step = int(rng.integers(self.moves)) if again else 0
            self._begin(b, p, again and bool(np.isfinite(self.best_s[p])), step, rng)
            self._earned(b, 0.0)
            self.num_evaluations += 1

    def act(self, actions: NDArray[Any]) -> tuple[Floats, NDArray[np.bool_]]:
        rewards, done = np.zeros(len(self.ids)), np.zeros(len(self.ids), bool)
        taken = np.where((actions >= 0) & (actions <= self.width), actions, 0)
        for b, (p, action) in enumerate(zip(self.ids.tolist(), taken.tolist(), strict=True)):
            gain, used = self._take(b, p, action)
            rewards[b] = self._earned(b, gain)
            if used >= 1.0:
                done[b] = True
                self._finish(b)
        return rewards, done

    def _finish(self, b: int) -> None:
        self.value_s[b], best = self._best_of(b)
        self.choices[b] = -1
        self.choices[b, : len(best)] = best
        self.keep(self.ids[b : b + 1], self.choices[b : b + 1], self.value_s[b : b + 1])

    def _earned(self, b: int, gain: float) -> float:
        """What a step earns: the kernel's ``gain``, or what the reward makes of it."""
        if self.problems.reward is log_speedup:
            return gain
        before = self._worth[b]
        value_s, choice = self._best_of(b)
        ids, values = self.ids[b : b + 1], np.array([value_s])
        self._worth[b] = self.problems.rewards(ids, values, choice[None])[0]
        return float(self._worth[b] - before)

    @abstractmethod
    def _offered(self, b: int) -> tuple[NDArray[np.bool_], Choice, Choice]:
        """Of episode ``b``: which choices are moves, what moves first, and where; ``[C + 1]``."""

    def observe(self) -> Observation:
        count, rows = len(self.ids), self.width + 1
        seen: Observation = {
            "problem": self.ids[:, None].copy(),
            "moves": np.empty((count, rows, self.num_features[0]), np.float32),
            "search": np.empty((count, self.num_features[1]), np.float32),
            "group": np.empty((count, rows), np.int64),
            "to_device": np.empty((count, rows), np.int64),
            "mask": self.masks().astype(np.int8),
        }
        for b in range(count):
            state = self._state(b)
            seen["moves"][b] = state.offered
            seen["search"][b] = state.search
            moves, group, device = self._offered(b)
            seen["group"][b] = np.where(moves, group, 0)  # others hold what an earlier offer left
            seen["to_device"][b] = np.where(moves, device, 0)
        return seen

    def _state(self, b: int) -> Any:
        return self._states[b][int(self.ids[b])]


class GuidedSearchRules(OfferingRules):
    """Searches over placements: moves of groups. A problem where nothing can move is refused."""

    name = "GuidedSearch"
    num_features = NUM_MOVE_FEATURES, NUM_SEARCH_FEATURES

    def _why_not(self, problem: Problem) -> str:
        if can_move(problem):
            return ""
        return (
            "no operator has a choice of devices, there is nothing to search; leave this problem "
            "out"
        )

    def _prepare(self, starts: list[Choice]) -> None:
        self._starts, self._tables = starts, [tables_of(p) for p in self.problems.problems]

    def _new_state(self, p: int) -> State:
        return state_of(self._tables[p], self.width)

    def _begin(self, b: int, p: int, at_best: bool, step: int, rng: Rng) -> None:
        choice, used = self._starts[p], step / self.moves
        if at_best:
            choice = self.best_choices[p, : len(choice)]
        begin(self._tables[p], self._state(b), choice, int(rng.integers(12)), rng, step, used)

    def _offered(self, b: int) -> tuple[NDArray[np.bool_], Choice, Choice]:
        state = self._state(b)
        return state.count > 0, state.body[:, 0], state.where[:, 0]

    def masks(self) -> NDArray[np.bool_]:
        mask = np.zeros((len(self.ids), self.width + 1), bool)
        for b, p in enumerate(self.ids):
            mask[b] = self._state(b).count > 0
            mask[b, 0] = self._tables[p].kind == guided_kernels.LOAD or not mask[b].any()
        return mask

    def _take(self, b: int, p: int, action: int) -> tuple[float, float]:
        tables, state = self._tables[p], self._state(b)
        exact = tables.kind == guided_kernels.LOAD
        self.num_evaluations += self.width if exact else int(state.count[action] > 0)
        used = (state.step + 1.0) / self.moves
        return play(tables, state, TAKE, action, NO_NETWORK, used, used), used

    def _best_of(self, b: int) -> tuple[float, Choice]:
        state = self._state(b)
        cost = float(state.best_cost)
        return cost if cost < INFEASIBLE else np.inf, state.best


class GuidedSearchEnv(PlacementEnv):
    """Choose among macro moves, in a search that cools down over a budget of moves.

    A macro move takes a body of colocation groups of one device to another (or swaps two): one
    group, a run of consecutive groups on its device, a chain of successors, or a grown
    neighbourhood. It begins with a group of the critical chain, of the busiest device, or any
    other, and goes to the device of a neighbour, or any other.

    **Observation** ``Dict``, of ``C`` moves and, before them, the choice to stay:

    * ``problem`` int64 ``[1]``: which of ``problems`` this is.
    * ``moves`` float32 ``[C + 1, 26]`` in -30..30: ``MOVE_FEATURES``, logarithms and shares.
    * ``search`` float32 ``[12]`` in -10..10: ``SEARCH_FEATURES``.
    * ``group``, ``to_device`` int64 ``[C + 1]``: the first group that moves, and where to (0, 0 for
      the choice to stay, and where the mask is 0).
    * ``mask`` int8 ``[C + 1]``: 1 = legal.

    **Action** ``Discrete(C + 1)``. The effect of a move on ``max_load`` is known (an exact
    incremental difference): it is made, and 0 stays. Under the other objectives it is
    simulated, and kept as annealing does: always if better, otherwise with probability
    ``(before / after) ** (1 / temperature)``; staying is legal only where nothing can move. An
    illegal action stays.

    **Reward** float: the improvement ``log(best before / best after)`` of the best value of the
    episode, at most 1, never negative: the return is ``log(first / best)``, unless a step improved
    it by more than ``e``, or to the first that fits: that earns 1.

    **Termination**: after ``moves`` steps. Never truncated.

    ``info`` of the last step has ``problem`` (int), ``value_s`` (float, the best; inf where
    nothing fits) and ``placement`` (``N`` numbers).

    Arguments are those of ``PlacementEnv`` and of ``GuidedSearchRules``; references only say
    what ``agents`` reports, the reward does not need them.
    """

    rules_of = GuidedSearchRules
