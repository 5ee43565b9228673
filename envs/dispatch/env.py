"""``Dispatch-v0``: pick a ready operator and its device, both at once, as a list scheduler does."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.base import PlacementEnv
from envs.dispatch import kernels
from envs.problem_set import MAX_ID, EnvError, ProblemSet
from envs.rules import BuildingRules, Numbers, Observation, Rng, id_space
from placement.planners import order_search
from placement.problem import Placement, Problem
from placement.search import order_times
from placement.search.list_schedule import state_of as placed_of
from placement.search.list_schedule import tables_of as list_tables_of
from placement.simulator import score
from placement.tools.files import short

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Weights = tuple[NDArray[np.float32], ...]
Past = tuple[Ints, Ints]  # what was chosen in turn int32 [N], and the device of each operator

# Weights of the rule, ``envs.dispatch.kernels.Tables.rule``: HEFT itself, and where policies start.
HEFT = (2.0, 2.0, 0.0, 0.0, 0.0)
MIXED = (0.5, 2.0, 0.25, 1.0, 1.0)
BOUND = 20.0


def no_network() -> Weights:
    """``net`` of ``envs.dispatch.kernels.judge`` that leaves the rule alone."""
    into = (kernels.NUM_PAIR_FEATURES, 0)
    shapes = ((0,), into, (0,), (0, 0), (0,), (0, 0), (0, 0), (0, 0), (0,))
    return tuple(np.zeros(shape, np.float32) for shape in shapes)


def notes_of(pairs: int, decisions: int) -> kernels.Notes:
    """Room for the notes of so many ``pairs`` and ``decisions``."""
    return kernels.Notes.fresh({"C": pairs, "S": decisions, "F": kernels.NUM_PAIR_FEATURES})


_NOTHING = notes_of(0, 0)


class Dispatcher:
    """One problem, and one episode on it at a time.

    Args:
        problem: what is placed.
        rule: what is best without a network.
        activations: how often a device must hold what its groups produce
            (``placement.search.list_schedule.first_that_fits``).
        backward: operators are dealt out from the last to the first (``order_search.turned``), and
            run in the order that this gives; only where orders can be timed.

    Attributes:
        played: ``problem``, or what it is turned to: a network that encodes graphs sees this one.
    """

    def __init__(
        self,
        problem: Problem,
        rule: tuple[float, ...] = MIXED,
        activations: int = 0,
        backward: bool = False,
    ) -> None:
        self.problem, self.backward = problem, backward
        why = order_search.why_not(problem) or order_search.why_simulated(problem)
        self.ordered = not why
        self.played = order_search.turned(problem) if backward else problem
        self._group = self.played.graph.group
        self.tables, self.state = _tables_of(self.played, rule, activations), _state_of(self.played)
        self._timed: Any = None

    def construct(
        self,
        net: Weights,
        scale: float,
        seed: int | None = None,
        notes: kernels.Notes = _NOTHING,
        keep: float = 0.0,
    ) -> int:
        """Play an episode with a network, greedily where there is no ``seed``.

        A share ``keep`` of its decisions goes into ``notes``; how many did.
        """
        self.state.anew, self.state.kept = 0, self.problem.num_ops
        return self._construct(net, scale, seed, notes, keep)

    def again(
        self, net: Weights, scale: float, seed: int, past: Past, first: int, last: int
    ) -> None:
        """Play the ``past`` episode, but draw the decisions from ``first`` to ``last`` anew.

        Later operators follow in the past order, on the past devices.
        """
        self.state.past[:], self.state.past_at[:] = past
        self.state.anew, self.state.kept = first, last
        self._construct(net, scale, seed, _NOTHING, 0.0)

    def _construct(
        self, net: Weights, scale: float, seed: int | None, notes: kernels.Notes, keep: float
    ) -> int:
        self.state.random[0] = 2 * (seed or 0) + 1
        noted: int = kernels.construct(
            self.tables, self.state, net, scale, seed is None, keep, notes
        )
        return noted

    @property
    def past(self) -> Past:
        """What ``again`` needs of the episode that is over."""
        return self.state.sequence.copy(), self.state.placed.choice[self._group]

    @property
    def placement(self) -> Placement:
        """int32 ``[N]`` of the episode that is over."""
        choice: Placement = self.state.placed.choice[self._group]
        return choice[::-1].copy() if self.backward else choice

    @property
    def sequence(self) -> Ints:
        """int32 ``[N]`` all operators by when they begin in it."""
        s, chosen = self.state, np.empty(self.problem.num_ops, np.int64)
        chosen[s.sequence] = np.arange(len(chosen))
        if self.backward:  # what ends there begins here, and operators are numbered from the end
            order = np.lexsort((chosen, s.start_s, s.placed.finish_s))
            return (len(chosen) - 1 - order[::-1]).astype(np.int32)
        return np.lexsort((chosen, s.placed.finish_s, s.start_s)).astype(np.int32)

    def value_s(self) -> float:
        """Its seconds, in its own order where one pass can time it (``order_search``)."""
        problem = self.problem
        if not self.ordered:
            return float(score(problem, self.placement[None])[0])
        if self._timed is None:
            self._timed = order_search.tables_of(problem), order_search.state_of(problem, 1)
        tables, state = self._timed
        state.place[:], state.sequence[:] = self.placement, self.sequence
        return float(order_times.timetable(tables, state, -1, problem.num_ops, np.inf))


def _tables_of(problem: Problem, rule: Any, activations: int) -> kernels.Tables:
    g, n, devices = problem.graph, problem.num_ops, problem.num_devices
    seconds = np.where(problem.supported, problem.compute_s, np.inf)
    mean_s = problem.mean_compute_s
    num_able = problem.supported.sum(axis=1).astype(np.float64)
    finite = np.where(problem.supported, problem.compute_s, 0.0)
    unit = max(float(mean_s.mean()), 1e-15)
    fastest = seconds.min(axis=1)
    move = problem.mean_transfer_s.mean() / unit if g.num_tensors else 0.0
    spread = float(np.mean((finite.max(axis=1) - fastest) / (fastest + 1e-3 * unit)))
    fixed = [np.mean(1.0 / num_able), move / (1 + move), spread / (1 + spread), np.log(devices) / 3]
    tables = kernels.Tables.fresh(
        {"N": n, "D": devices},
        listed=list_tables_of(problem, activations),
        before=np.bincount(g.edges[:, 1], minlength=n).astype(np.int64),
        fastest_s=fastest,
        mean_s=mean_s,
        num_able=num_able,
        contended=bool(problem.contention),
        demand_s=(finite / num_able[:, None]).sum(axis=0),
        unit_s=unit,
        path_s=1.0,
        fixed=np.array(fixed, np.float32),
        rule=np.array(rule, np.float64),
    )
    after = np.zeros((n, n // 64 + 1), np.uint64)
    kernels.fill_static(
        tables, g.out_ptr, g.out_tensor, g.use_ptr, g.use_dst, problem.mean_transfer_s, seconds,
        after,
    )  # fmt: skip
    tables.position[np.lexsort((np.arange(n), -tables.rank_s))] = np.arange(n)
    tables.hops[:] /= tables.hops.max()
    tables.path_s = max(float(tables.rank_s.max()), 1e-15)
    return tables


def _state_of(problem: Problem) -> kernels.State:
    sizes = {"N": problem.num_ops, "D": problem.num_devices, "OPS": kernels.OPS}
    sizes |= {"PAIRS": kernels.PAIRS, "F": kernels.NUM_PAIR_FEATURES}
    return kernels.State.fresh(sizes, placed=placed_of(problem, busy=True), kept=problem.num_ops)


class DispatchRules(BuildingRules):
    """``B`` episodes; at each step a ready operator goes to a device."""

    def __init__(
        self, problems: ProblemSet, num_envs: int, rule: tuple[float, ...] = MIXED
    ) -> None:
        if np.shape(rule) != np.shape(MIXED) or not all(isinstance(w, int | float) for w in rule):
            raise EnvError(f"rule = {short(rule)} must be {len(MIXED)} weights, as MIXED = {MIXED}")
        super().__init__(problems, num_envs)
        self._rule = rule
        self._made: list[dict[int, Dispatcher]] = [{} for _ in range(num_envs)]
        pairs, features = kernels.PAIRS, kernels.NUM_PAIR_FEATURES
        self.observation_space = spaces.Dict(
            {
                "problem": id_space(MAX_ID),
                "pairs": spaces.Box(-BOUND, BOUND, (pairs, features), np.float32),
                "score": spaces.Box(-1e6, 0.0, (pairs,), np.float32),
                "mask": spaces.Box(0, 1, (pairs,), np.int8),
                "whose": spaces.Box(0, MAX_ID, (pairs, 2), np.int64),
            }
        )
        self.action_space = spaces.Discrete(pairs)

    def start(self, rows: Numbers, ids: Numbers, rng: Rng | None = None) -> None:
        for b, p in zip(rows.tolist(), ids.tolist(), strict=True):
            self.ids[b] = p
            if p not in self._made[b]:
                self._made[b][p] = Dispatcher(self.problems.problems[p], self._rule)
            episode = self._made[b][p]
            kernels.begin(episode.tables, episode.state)
            kernels.offer(episode.tables, episode.state)
            self.choices[b] = -1

    def episode(self, b: int) -> Dispatcher:
        """The one of row ``b``."""
        return self._made[b][int(self.ids[b])]

    def observe(self) -> Observation:
        seen: Observation = {
            key: np.zeros((len(self.ids), *space.shape), space.dtype)  # type: ignore[misc]
            for key, space in self.observation_space.items()
        }
        seen["problem"][:, 0] = self.ids
        for b in range(len(self.ids)):
            s = self.episode(b).state
            n = s.count
            np.clip(s.features[:n], -BOUND, BOUND, out=seen["pairs"][b, :n])
            np.maximum(s.score[:n], -1e6, out=seen["score"][b, :n], casting="same_kind")
            seen["mask"][b, : max(n, 1)] = 1  # over, and not started again: anything will do
            group = self.episode(b).played.graph.group
            seen["whose"][b, :n] = np.stack([group[s.op[:n]], s.device[:n]], axis=1)
        return seen

    def masks(self) -> NDArray[np.bool_]:
        counts = np.array([max(self.episode(b).state.count, 1) for b in range(len(self.ids))])
        return np.arange(kernels.PAIRS) < counts[:, None]

    def decide(self, actions: NDArray[Any]) -> NDArray[np.bool_]:
        done = np.zeros(len(self.ids), bool)
        for b, action in enumerate(actions.tolist()):
            episode = self.episode(b)
            t, s = episode.tables, episode.state
            if not 0 <= action < s.count:
                if s.count:  # all groups may have a device, and operators are left
                    self.choices[b] = -1
                done[b] = True
                continue
            done[b] = kernels.take(t, s, action)
            choice = s.placed.choice
            self.choices[b, : len(choice)] = choice
            s.count = 0
            if not done[b]:
                kernels.offer(t, s)
        return done

    def values(self, rows: Numbers) -> Floats:
        """Of the order that was made, where one pass can time it."""
        if self.problems.evaluator is not score:  # all at once: one round, if they run
            return super().values(rows)
        values = np.empty(len(rows))
        for k, b in enumerate(rows.tolist()):
            episode, p = self.episode(b), int(self.ids[b])
            if episode.state.num_placed == episode.problem.num_ops:
                values[k] = episode.value_s()
            else:
                values[k] = self.problems.values(p, self.choices[b : b + 1])[0]
        return values


class DispatchEnv(PlacementEnv):
    """Pick one of the ready operators and its device, as list schedulers do.

    Offered are at most 20 ready operators by falling upward rank, each on the at most 3 devices
    that end it first (``envs.dispatch.kernels``); the operator goes into the earliest gap there. So
    an episode decides the order, too.

    **Observation** ``Dict``, padded to ``K = 60`` pairs of an operator and a device:

    * ``problem`` int64 ``[1]``: which of ``problems`` this is.
    * ``pairs`` float32 ``[K, 42]`` in -20..20: ``envs.dispatch.kernels.PAIR_FEATURES``.
    * ``score`` float32 ``[K]``, at most 0: the rule's; its best one is what HEFT does, or the
      ``rule``.
    * ``mask`` int8 ``[K]``: 1 = legal.
    * ``whose`` int64 ``[K, 2]``: the group and the device of each pair.

    **Action** ``Discrete(K)``.

    **Reward** float: 0 until the last step, then ``log(reference_s / value_s)``, at least -4;
    -5 where the placement cannot run, or at once for an illegal action. The value is that of the
    order that was made, where one pass can time it (``placement.planners.order_search``:
    ``why_not``, ``why_simulated``), otherwise the list scheduler's.

    **Termination**: when every operator is placed, or after an illegal action. Never truncated.

    ``info`` of the last step has ``problem`` (int), ``value_s`` (float, inf if it cannot run) and
    ``placement`` (``N`` numbers, -1 = not decided).

    Arguments are those of ``PlacementEnv``, and ``rule``: five weights, ``HEFT`` or ``MIXED``.
    """

    rules_of = DispatchRules
