"""What planners share: scoring under a budget, symmetry of devices, moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph, csr
from placement.objective import Objective
from placement.problem import Placement, Planner, Problem, Solution, host_of, once
from placement.profile import Profile
from placement.schedule import Schedule, in_sequence
from placement.search.macro import Neighbours
from placement.search.planner import (
    Budget,
    PlannerError,
    check_least,
    load,
    options_of,
    prepared,
    solve,
)
from placement.simulator import analytic, score, value_of, worth
from placement.simulator.analytic_kernels import apply_moves, fill_state, undo_moves
from placement.tools.clock import clock

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Choice = NDArray[np.int32]  # [G] device of each colocation group

DEFAULT_EVALUATIONS = 2000
START_SHARE = 0.25  # of a budget, for the planner that a search starts from
NO_PROOF = (
    "that does not prove that no placement fits: a search, or a longer one, may find one, "
    "e.g. --planner local_search --seconds 60"
)
INFEASIBLE = 1e30  # costs above this do not fit: INFEASIBLE * (1 + overflow)


class Search:
    """Scores placements within a budget and remembers the best one and when it was found.

    Planners move whole colocation groups, so a candidate is a *choice* int32 ``[G]``: the
    device of each group. Its *cost* is the objective in seconds where it fits in memory, and
    otherwise larger than every objective and growing with the bytes that do not fit.

    The first evaluation is always made, so that there is always an answer. The clock stands
    still while kernels are loaded.

    Raises:
        PlannerError: a budget that is not positive.
    """

    def __init__(
        self,
        problem: Problem,
        seconds: float | None = None,
        evaluations: int | None = None,
        default_evaluations: int | None = None,
    ) -> None:
        """``default_evaluations`` holds where neither budget is given; None is no limit."""
        Budget(seconds, evaluations)  # or it says which is not positive
        self._evaluations = evaluations
        if seconds is None and evaluations is None:
            evaluations = default_evaluations
        self.problem = problem
        self.allowed: NDArray[np.bool_] = np.isfinite(problem.group_compute_s)  # [G, D]
        self.num_evaluations = 0
        self.best: Choice | None = None
        self.best_cost = np.inf
        self.schedule: Schedule | None = None  # of the best, where it is better than any list's
        self.bound_s = 0.0  # no objective is below; a search that reaches it is over
        self.curve: list[tuple[float, int, float]] = []
        self._max_seconds = np.inf if seconds is None else seconds
        self._max_evaluations = np.inf if evaluations is None else evaluations
        self._seconds_per_evaluation = 0.0
        self._started = clock()

    @property
    def best_s(self) -> float:
        """The best objective in seconds; inf where nothing fits so far."""
        return self.best_cost if self.best_cost < INFEASIBLE else np.inf

    @property
    def seconds(self) -> float:
        """Seconds since the search began, without those in which kernels were loaded."""
        return clock() - self._started

    @property
    def used(self) -> float:
        """Share of the budget that is spent, 0..1 (the scarcer of the two)."""
        return min(
            1.0,
            max(self.num_evaluations / self._max_evaluations, self.seconds / self._max_seconds),
        )

    @property
    def left(self) -> bool:
        """Whether another evaluation may be made, and may find something better."""
        if self.num_evaluations == 0:
            return True
        return self.used < 1.0 and self.best_cost > self.bound_s * (1 + 1e-9)

    @property
    def seconds_left(self) -> float:
        """Of the budget, however many evaluations were made; inf without one."""
        return max(0.0, self._max_seconds - self.seconds)

    @property
    def num_left(self) -> float:
        """Evaluations that may still be made; inf where only time is limited."""
        return self._max_evaluations - self.num_evaluations

    def costs(self, choices: ArrayLike) -> Floats:
        """Costs float64 ``[B]`` of choices int32 ``[B, G]``.

        Fewer than ``B`` where the budget ended: the first of them were scored.
        """
        rows = np.atleast_2d(np.asarray(choices, dtype=np.int32))
        done: list[Floats] = []
        at = 0
        while at < len(rows) and self.left:
            part = rows[at : at + self._chunk()]
            before = clock()
            cost = self._cost(part)
            took = (clock() - before) / len(part)
            self._seconds_per_evaluation = max(took, 0.9 * self._seconds_per_evaluation)
            at += len(part)
            i = int(np.argmin(cost))
            self._keep(part[i], float(cost[i]), self.num_evaluations + i + 1)
            self.num_evaluations += len(part)
            done.append(cost)
        return np.concatenate(done) if done else np.zeros(0)

    def cost(self, choice: Choice) -> float:
        """Cost of one choice; inf where the budget has ended."""
        costs = self.costs(choice)
        return float(costs[0]) if len(costs) else np.inf

    def run(
        self,
        planner: str | Planner,
        share: float = 1.0,
        share_of_evaluations: float = 1.0,
        one_phase: bool = False,
    ) -> Solution:
        """Run another planner on what is left of this budget, and consider its answer.

        Of the seconds that are left it gets a ``share``, where it has such a budget, and of the
        evaluations alike. ``one_phase``: it is to answer with that. A periodic answer that does
        not fit is not kept: a search goes on from the closest placement.

        Raises:
            PlannerError: the planner refuses the problem, or has not enough memory for it.
        """
        seconds = evaluations = None
        if np.isfinite(self._max_seconds):
            seconds = max(1e-3, share * (self._max_seconds - self.seconds))
        if np.isfinite(self._max_evaluations):
            evaluations = max(1, int(share_of_evaluations * self.num_left))
        limits = Budget(seconds, evaluations)
        callee = prepared(load(planner) if isinstance(planner, str) else planner, budget=limits)
        answer = solve(callee, self.problem.one_phase if one_phase else self.problem)
        self.num_evaluations += int(answer.stats.get("evaluations", 1))
        choice = self.choice(answer.placement)
        # What ours say is the simulator's: a large problem is not simulated twice.
        ours = type(callee).__module__.startswith("placement.planners.")
        cost, schedule = answer.value_s, answer.schedule
        if not (ours and np.isfinite(cost)):
            cost, schedule = float(self._cost(choice[None])[0]), None
            in_order = np.inf if answer.schedule is None else value_of(self.problem, answer)
            if in_order < cost:
                cost, schedule = in_order, answer.schedule
        if choice.ndim == 1 or cost < INFEASIBLE:
            self._keep(choice, cost, self.num_evaluations, schedule)
        return answer

    def run_start(
        self, planner: str | Planner, option: str = "start", of_evaluations: float = START_SHARE
    ) -> Solution:
        """Run where a search starts from, with a share of limited evaluations.

        Of limited seconds it gets ``START_SHARE``, and what it leaves of them is the search's.

        Raises:
            PlannerError: it cannot be run with its share, which names the ``option`` it is.
        """
        start = load(planner) if isinstance(planner, str) else planner
        if "search_on" in options_of(start):
            start = replace(start, search_on=False)  # type: ignore[type-var]
        try:
            return self.run(start, START_SHARE, of_evaluations, True)  # with one phase
        except PlannerError as error:
            if self._evaluations is None:
                raise
            raise PlannerError(
                f"{option} = {planner!r} gets {of_evaluations:.0%} of evaluations = "
                f"{self._evaluations}, and at least one: {error}"
            ) from error

    def limit(self, more: int) -> None:
        """Allow so many evaluations more, where neither they nor the seconds are limited."""
        if not np.isfinite(self._max_evaluations) and not np.isfinite(self._max_seconds):
            self._max_evaluations = self.num_evaluations + more

    def consider(self, choice: Choice | None, evaluations: int) -> None:
        """What the planner found with so many evaluations of its own; None: nothing better."""
        self.num_evaluations += evaluations
        if choice is not None:
            self._keep(choice, float(self._cost(choice[None])[0]), self.num_evaluations)

    def consider_order(self, placement: Placement, sequence: Ints, cost: float) -> None:
        """A placement whose devices run their operators in ``sequence`` int32 ``[N]``.

        The evaluations that found it are counted already.
        """
        if cost < self.best_cost * (1.0 - 1e-12):
            schedule = in_sequence(placement, sequence, self.problem.num_devices)
            self._keep(self.choice(placement), cost, self.num_evaluations, schedule)

    def choice(self, placement: Placement) -> Choice:
        """The choice int32 ``[G]`` of a placement that obeys colocation; ``[K, G]`` if periodic."""
        p = self.problem.check_placement(placement)
        choice = np.zeros((*p.shape[:-1], self.problem.graph.num_groups), np.int32)
        choice[..., self.problem.graph.group] = p
        return choice

    def solution(self, lower_bound_s: float | None = None, **stats: Any) -> Solution:
        """The best that was found, with ``seconds``, ``evaluations``, ``curve`` and ``stats``.

        Where nothing fits in memory the least violating placement, worth inf, and a text
        ``infeasible`` with the bytes; for ``piecewise_latency`` it may be the pieces that wait
        for each other.
        """
        assert self.best is not None, "the first evaluation is always made"
        placement = self.best[..., self.problem.graph.group]
        curve = [*self.curve, (self.seconds, self.num_evaluations, self.best_s)]
        if self.best_s == np.inf:
            stats["infeasible"] = why_infinite(self.problem, placement)
        facts: dict[str, Any] = {
            "seconds": self.seconds,
            "evaluations": self.num_evaluations,
            "curve": curve,
        }
        if self.schedule is not None:
            facts["list_order_value_s"] = float(score(self.problem, placement)[0])
        return Solution(placement, self.best_s, lower_bound_s, facts | stats, self.schedule)

    def _keep(
        self, choice: Choice, cost: float, evaluation: int, schedule: Schedule | None = None
    ) -> None:
        if self.best is None or cost < self.best_cost:
            self.best, self.best_cost, self.schedule = choice.copy(), cost, schedule
            self.curve.append((self.seconds, evaluation, self.best_s))

    def _chunk(self) -> int:
        """How many evaluations to make before looking at the clock again."""
        size = min(256.0, max(1.0, self._max_evaluations - self.num_evaluations))
        if np.isfinite(self._max_seconds):
            # A tenth of what is left: the last chunks are single evaluations.
            affordable = 0.1 * (self._max_seconds - self.seconds)
            known = self._seconds_per_evaluation
            size = min(size, max(1.0, affordable / known if known else 1.0))
        return int(size)

    def _cost(self, choices: Choice) -> Floats:
        value_s, need = worth(self.problem, choices[..., self.problem.graph.group])
        capacity = self.problem.memory_bytes
        if need is None or (need <= capacity).all():
            return value_s
        room = np.maximum(capacity, 1)  # of page-locked memory a device may have none
        overflow = (np.maximum(need - capacity, 0) / room).sum(axis=1)
        return np.where(overflow > 0, INFEASIBLE * (1 + overflow), value_s)


class Position:
    """Where a search stands that changes a placement move by move.

    For ``max_load`` a move is scored from the loads of the two devices concerned
    (``analytic.load_moves``), otherwise as a whole placement. Every trial is one evaluation.

    Attributes:
        choice: int32 ``[G]``.
        cost: of the choice, as ``Search.costs`` tells it.
    """

    def __init__(self, search: Search) -> None:
        """Begin at the best choice so far."""
        assert search.best is not None, "a start is always scored"
        self._search = search
        self._moves: tuple[Any, Any] | None = None  # of ``load_moves``
        if search.problem.objective is Objective.MAX_LOAD:
            placement = search.best[search.problem.graph.group]
            self._moves = analytic.load_moves(search.problem, placement)
        self.choice, self.cost = search.best.copy(), search.best_cost
        self._then, self._then_cost = self.choice, self.cost

    def go(self, choice: Choice, cost: float) -> None:
        """Stand at a choice whose cost is known."""
        self.choice, self.cost = choice.copy(), cost
        if self._moves is not None:
            self._moves[1].device[:] = choice
            fill_state(*self._moves)

    def trial(self, groups: NDArray[np.intp], device: int) -> float:
        """Cost if ``groups``, which share a device, were on ``device``; ``keep`` makes it so."""
        self._then = self.choice.copy()
        self._then[groups] = device
        if self._moves is None:
            self._then_cost = self._search.cost(self._then)
        else:
            self._then_cost = self._load_cost(groups, device)
            if self._then_cost < self._search.best_cost:
                self._search.consider(self._then, 1)
            else:
                self._search.num_evaluations += 1
        return self._then_cost

    def keep(self) -> None:
        """Make the move that was tried last."""
        if self._moves is not None:
            moved = np.flatnonzero(self._then != self.choice)
            apply_moves(*self._moves, moved.astype(np.int32), self._then[moved], len(moved))
        self.choice, self.cost = self._then, self._then_cost

    def _load_cost(self, groups: NDArray[np.intp], device: int) -> float:
        assert self._moves is not None
        load_s, held = self._moves[1].load, self._moves[1].held
        where = np.full(len(groups), device, np.int32)
        arguments = *self._moves, groups.astype(np.int32), where, len(groups)
        apply_moves(*arguments)
        capacity = self._search.problem.memory_bytes
        overflow = float((np.maximum(held - capacity, 0) / capacity).sum())
        cost = INFEASIBLE * (1 + overflow) if overflow > 0 else float(load_s.max())
        undo_moves(*arguments)
        return cost


@dataclass(frozen=True)
class FromStart:
    """What planners have in common that search from where another one ends.

    Attributes:
        start: planner that gives the first placement (a name or a planner), or ``random``;
            its evaluations count, and it has at most a quarter of the seconds.
        seconds, evaluations: budget; with neither, 2,000 evaluations.
        seed: of the draws.
    """

    start: str | Planner | None = "best_of"
    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 0, "seed")

    def begin(self, problem: Problem) -> tuple[Search, np.random.Generator]:
        """The search, in which ``start`` (None: ``best_of``) is scored, and the draws.

        Raises:
            PlannerError: a budget that is not positive, or a start that fails with its share.
        """
        search = Search(problem, self.seconds, self.evaluations, DEFAULT_EVALUATIONS)
        rng = np.random.default_rng(self.seed)
        if self.start == "random":
            search.cost(random_choice(rng, search.allowed))
        else:
            search.run_start(self.start or "best_of")
        return search, rng


def two_operators() -> Problem:
    """The smallest problem that has moves."""
    graph = OpGraph.build("two", ["a", "b"], [0], [1], [(0, 1)])
    cluster = Cluster("two", tuple(Device(name, busy_w=1.0, idle_w=0.0) for name in "ab"))
    zeros = np.zeros((2, 2))
    links = (Link("a", "b", 0.0, 1.0), Link("b", "a", 0.0, 1.0))
    return Problem(graph, cluster, Profile(("a", "b"), zeros + 1, zeros, links), Objective.LATENCY)


def why_infinite(problem: Problem, placement: Placement) -> str:
    """Why a placement is worth inf: what does not fit, in bytes, or which pieces cannot run."""
    names, (_, peak) = problem.cluster.device_names, worth(problem, np.asarray(placement)[None])
    over = [
        f"device {names[d]!r} needs {int(peak[0, d])} bytes, has {int(most)}"
        for d, most in enumerate(problem.memory_bytes if peak is not None else ())
        if peak is not None and peak[0, d] > most
    ]
    if over:
        proof, closest = cannot_fit(problem), ", ".join(over)
        if proof:
            return f"{proof}; the closest placement: {closest}"
        return f"no placement found that fits in memory; the closest: {closest}; {NO_PROOF}"
    circles = (analytic.circle(problem, phase) for phase in np.atleast_2d(placement))
    waiting = next(filter(None, circles))  # what fits and can run has a value
    op_name = problem.graph.op_name
    pieces = [
        f"{len(ops)} operators of {names[d]!r} from {int(ops[0])} ({op_name[ops[0]]!r})"
        for d, ops in waiting[:3]
    ]
    return (
        f"no placement found that can run: {len(waiting)} pieces wait for each other in a circle, "
        f"each for the next: {', '.join(pieces)}{', ...' if len(waiting) > 3 else ''}; "
        "use ideal_dp, whose stages do not, or macro_search, which begins with them"
    )


def cannot_fit(problem: Problem) -> str:
    """Why no placement whatever fits in memory; empty where arithmetic alone does not prove it.

    All parameters against all memory, and each colocation group against every device that can
    run it: its parameters and, where activations count, the largest tensor that it produces. The
    memory of a device that streams is for parameters alone.
    """
    g, memory = problem.graph, problem.memory_bytes
    need = int(g.param_bytes[np.unique(g.param_use)].sum())
    have = sum(map(int, memory))
    if need > have:
        return (
            f"nothing can fit in memory: the parameters take {need} bytes, "
            f"all devices together have {have}"
        )
    pairs = np.unique(np.stack([g.group[g.param_use_op], g.param_use], axis=1), axis=0)
    needs = np.zeros((g.num_groups, problem.num_devices), np.int64)
    np.add.at(needs, pairs[:, 0], g.param_bytes[pairs[:, 1], None])
    if not problem.objective.is_analytic:
        largest = np.zeros(g.num_groups, np.int64)
        own = np.flatnonzero((g.tensor_src >= 0) & (g.tensor_root == np.arange(g.num_tensors)))
        np.maximum.at(largest, g.group[g.tensor_src[own]], g.tensor_bytes[own])
        needs += np.outer(largest, problem.worker == np.arange(problem.num_devices))
    never = np.iinfo(np.int64).max
    over = np.where(np.isfinite(problem.group_compute_s), needs - memory, never)
    if (over.min(axis=1) <= 0).all():
        return ""
    group = int(over.min(axis=1).argmax())
    d = int(over[group].argmin())
    first, *others = np.flatnonzero(g.group == group).tolist()
    with_it = f" with the {len(others)} that must share its device" if others else ""
    return (
        f"nothing can fit in memory: operator {first} ({g.op_name[first]!r}){with_it} needs "
        f"{int(needs[group, d])} bytes, the largest device that can run it has {int(memory[d])}"
    )


@once
def device_classes(problem: Problem) -> NDArray[np.int32]:
    """int32 ``[D]``: devices of the same class may be swapped and nothing changes.

    Classes are numbered by first appearance.
    """
    count, power, latency = problem.num_devices, problem.cluster.power, problem.link_latency_s
    host, kinds = host_of(problem)
    by_device = [problem.compute_s, problem.loaded_s, problem.memory_bytes, kinds]
    if problem.profile.io_s is not None:
        by_device.append(problem.profile.io_s)
    if problem.profile.library_bytes is not None and not problem.objective.is_analytic:
        by_device.append(problem.profile.library_bytes)
    if problem.cluster.streaming:  # each goes with the one that runs what is placed there
        shared = np.bincount(problem.worker, minlength=count)[problem.worker] > 1
        by_device.append(np.where(shared, np.arange(count), -1))
    # Of those that share host memory only the first sends model inputs to those that do not, and
    # holds the parameters that are streamed.
    simulated = not problem.objective.is_analytic
    feeds = simulated and not kinds.all() and (problem.graph.tensor_src < 0).any()
    if feeds or problem.cluster.streaming:
        by_device.append(np.arange(count) == host)
    if problem.objective is Objective.ENERGY:
        by_device += [power.busy_w, power.idle_w]
    columns: NDArray[Any] = np.vstack(by_device).T
    alike = np.array([hash(column.tobytes()) for column in columns])
    by_pair: list[NDArray[Any]] = [problem.link_blocking, problem.link_wake_s, problem.link_send_s]
    by_pair += [latency, problem.link_s_per_byte, problem.link_send_s_per_byte]
    by_pair.append(problem.link_receive_s)
    if problem.profile.transfer_s is not None:
        by_pair.append(problem.profile.transfer_s)
    uses = np.bincount(problem.link_channel.ravel())
    classes = np.arange(count, dtype=np.int32)
    for b in range(count):
        first = np.flatnonzero((classes[:b] == np.arange(b)) & (alike[:b] == alike[b]))
        # Their rows differ at most at themselves: this leaves few of many devices.
        near = first[(latency[first] != latency[b]).sum(axis=1) <= 2]
        for a in near.tolist():
            others = np.delete(np.arange(count), [a, b])
            if all(_same(x, a, b, others) for x in by_pair) and _same_channels(
                problem.link_channel, uses, a, b, others
            ):
                classes[b] = a
                break
    return np.unique(classes, return_inverse=True)[1].astype(np.int32)


def _same(x: NDArray[Any], a: int, b: int, others: NDArray[np.intp]) -> bool:
    """Whether ``x [.., D, D]`` is the same with ``a`` and ``b`` swapped."""
    return (
        np.array_equal(x[..., a, others], x[..., b, others])
        and np.array_equal(x[..., others, a], x[..., others, b])
        and np.array_equal(x[..., a, b], x[..., b, a])
        and np.array_equal(x[..., a, a], x[..., b, b])
    )


def _same_channels(
    channel: NDArray[np.int32], uses: NDArray[np.int64], a: int, b: int, others: NDArray[np.intp]
) -> bool:
    """Whether with ``a`` and ``b`` swapped the same pairs share channels, by whatever names.

    ``uses``: pairs of each channel. A channel that other pairs use too must stay what it is, any
    other may become one other.
    """

    def touched(a: int, b: int) -> NDArray[np.int32]:
        own = [channel[a, a], channel[b, b], channel[a, b], channel[b, a]]
        rows = (channel[a, others], channel[b, others], channel[others, a], channel[others, b])
        return np.concatenate([*rows, own])

    before, after = touched(a, b), touched(b, a)
    renamed = np.unique(np.stack([before, after], axis=1), axis=0)
    names, counts = np.unique(before, return_counts=True)
    if len(names) != len(renamed):
        return False
    stays = counts < uses[names]
    return np.array_equal(renamed[stays, 1], names[stays])


def single_devices(problem: Problem) -> Choice:
    """int32 ``[D, G]``: everything on one device; what it cannot run, on the first that can."""
    rows = np.repeat(np.arange(problem.num_devices)[:, None], problem.graph.num_groups, axis=1)
    return np.array([supported_choice(problem, row) for row in rows])


def supported_choice(problem: Problem, choice: NDArray[np.integer[Any]]) -> Choice:
    """``choice``, with what has no device, or cannot run on it, on the first that can run it."""
    able = np.isfinite(problem.group_compute_s)
    bad = (choice < 0) | ~able[np.arange(len(choice)), choice]
    return np.where(bad, able.argmax(axis=1), choice).astype(np.int32)


def random_placements(problem: Problem, count: int, rng: np.random.Generator) -> Placement:
    """int32 ``[count, N]``: every second scattered, the others cut in operator order.

    Both draw a share of the colocation groups for each device from a flat Dirichlet
    distribution. Groups that cannot run where they were put go to the first device that can.
    """
    groups, devices = problem.group_compute_s.shape
    choices = np.empty((count, groups), np.int32)
    for i in range(count):
        share = rng.dirichlet(np.ones(devices))
        choice: NDArray[np.int64] = rng.choice(np.arange(devices), groups, p=share)
        if i % 2:
            choice = rng.permutation(devices)[np.sort(choice)]
        choices[i] = supported_choice(problem, choice)
    return choices[:, problem.graph.group]


def random_choice(rng: np.random.Generator, allowed: NDArray[np.bool_]) -> Choice:
    """int32 ``[G]``: every group on a device drawn uniformly from those that can run it."""
    return np.where(allowed, rng.random(allowed.shape), -1.0).argmax(axis=1).astype(np.int32)


Move = tuple[NDArray[np.intp], int]  # the groups that move, the device they move to
Moves = Callable[[np.random.Generator, Choice], Move]


def moves(problem: Problem) -> Moves:
    """``propose(rng, choice)`` -> a random move from ``choice``.

    A move changes the device of one group, or (every second time) of a run: consecutive
    groups, in operator order, that share its device, of a length drawn log-uniformly. The
    new device is one that a producer or consumer of the group is on (every second time), or
    any other that can run it. Groups that cannot run there stay.
    """
    allowed = np.isfinite(problem.group_compute_s)
    num_groups = len(allowed)
    movable = np.flatnonzero(allowed.sum(axis=1) > 1)
    graph = neighbours(problem)
    start, near = graph.near_ptr, graph.near
    log_groups = np.log(num_groups + 1)

    def propose(rng: np.random.Generator, choice: Choice) -> Move:
        group = int(movable[rng.integers(len(movable))])
        old = choice[group]
        target = old
        if rng.random() < 0.5 and start[group] < start[group + 1]:
            target = choice[near[rng.integers(start[group], start[group + 1])]]
        if target == old or not allowed[group, target]:
            others = np.flatnonzero(allowed[group])
            others = others[others != old]
            target = others[rng.integers(len(others))]
        last = group + 1
        if rng.random() < 0.5:
            stop = min(num_groups, group + int(np.exp(rng.random() * log_groups)))
            while last < stop and choice[last] == old:
                last += 1
        body = np.arange(group, last)
        return body[allowed[body, target]], int(target)

    return propose


def neighbours(problem: Problem) -> Neighbours:
    """Groups that an edge joins, each int32."""
    g = problem.graph
    pairs = g.group[g.edges]
    after = distinct_pairs(pairs, g.num_groups)
    both = distinct_pairs(np.concatenate([pairs, pairs[:, ::-1]]), g.num_groups)
    return Neighbours(
        near_ptr=csr(both[:, 0], g.num_groups),
        near=both[:, 1].astype(np.int32),
        after_ptr=csr(after[:, 0], g.num_groups),
        after=after[:, 1].astype(np.int32),
    )


def distinct_pairs(pairs: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    """int64 ``[P, 2]``: the pairs of unlike numbers below ``count``, sorted, each once."""
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    # One number for each is sorted many times faster than rows are.
    codes = np.sort(pairs[:, 0] * np.int64(count) + pairs[:, 1])
    new = np.append(True, codes[1:] != codes[:-1])[: len(codes)]
    return np.stack(np.divmod(codes[new], count), axis=1)


def can_move(problem: Problem) -> bool:
    """Whether any group has a choice of devices."""
    return bool((np.isfinite(problem.group_compute_s).sum(axis=1) > 1).any())
