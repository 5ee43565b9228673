"""What the exact planners share: the max-load problem as blocks on stages, and its start."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.bounds import lower_bound
from placement.graph import topological_order
from placement.objective import Objective
from placement.planners import PlannerError, load
from placement.planners.ideal_dp import Edges, contract
from placement.problem import Planner, Problem, Solution
from placement.relaxed import alike
from placement.search.evaluation import Search
from placement.simulator.analytic import device_loads
from placement.simulator.analytic_kernels import Blocks, blocks

Ints = NDArray[np.int32]

START_SHARE, MOST_START_S = 0.1, 5.0  # of the seconds, for the planner that starts
OWN_SHARE = 0.5  # of them, for a search of an objective that no solver here knows


@dataclass(frozen=True, eq=False)
class Stages:
    """Blocks of operators on ``S`` stages, each of which is a device of one kind.

    Without contiguity stage ``d`` is device ``d`` and blocks are the colocation groups. With
    it the stages are in the order of the pipeline, their kinds are open, and blocks are the
    items of ``ideal_dp`` (groups, cycles fused), ordered by ``edges``.

    Attributes:
        block: int32 ``[N]`` the block of each operator.
        costs: the problem over these blocks.
        kinds: devices of each kind; those of a kind may be swapped.
        kind: int32 ``[S]`` the kind of each stage, None if open.
        edges: pairs (a, b): the stage of ``b`` is not before that of ``a``.
        start: int32 ``[I]`` stage of each block in the best placement known, None if unknown.
        start_kind: int32 ``[S]`` kind of each stage there.
        upper_s: the largest load there.
    """

    block: Ints
    costs: Blocks
    kinds: list[list[int]]
    kind: Ints | None
    edges: Edges
    start: Ints | None
    start_kind: Ints | None
    upper_s: float

    def choice(self, problem: Problem, stage: NDArray[np.integer], kind: list[int]) -> Ints:
        """int32 ``[G]``: each stage takes the next device of its kind."""
        if self.kind is not None:
            device = np.arange(problem.num_devices, dtype=np.int32)
        else:
            free = [iter(members) for members in self.kinds]
            device = np.array([next(free[k]) for k in kind], np.int32)
        choice = np.zeros(problem.graph.num_groups, np.int32)
        choice[problem.graph.group] = device[stage][self.block]
        return choice

    def may_run(self, i: int, rank: int, stage: int) -> bool:
        """Whether block ``i``, the ``rank``-th of ``by_weight``, may be on this stage.

        Devices of a kind can be renamed by the heaviest block they hold: the first block needs
        only the first of them, the second block only the first two.
        """
        if self.kind is None:
            return True
        renamed = self.kinds[int(self.kind[stage])].index(stage) <= rank
        return renamed and bool(np.isfinite(self.costs.compute_s[i, stage]))

    def paid_on(self, stage: int) -> Ints:
        """Tensors that cost something to move to or from this stage."""
        io_s = self.costs.io_s
        costly = io_s.max(axis=1) if self.kind is None else io_s[:, stage]
        return np.flatnonzero(costly > 0).astype(np.int32)


def stages(problem: Problem, contiguous: bool, search: Search, split: Ints) -> Stages:
    """The problem over stages, starting from ``split``, which ``begin`` found for ``search``."""
    if contiguous:
        block, edges = contract(problem)
    else:
        block, edges = problem.graph.group, set()
    costs = blocks(problem, block)
    about = np.concatenate(
        [costs.compute_s, costs.io_s, problem.memory_bytes[None].astype(np.float64)]
    )
    kind = alike(about)[1].astype(np.int32)
    kinds = [np.flatnonzero(kind == k).tolist() for k in range(int(kind.max()) + 1)]

    placement = split[problem.graph.group]
    upper_s = float(device_loads(problem, placement).max())
    device = np.full(costs.num_blocks, -1, np.int32)
    device[block] = placement
    whole = np.array_equal(device[block], placement)
    fits = bool((problem.param_bytes_on(placement) <= problem.memory_bytes).all())
    order = _order(device, edges, problem.num_devices) if contiguous and whole else None
    usable = whole and fits and (order is not None or not contiguous)
    if contiguous and not usable:
        search.best_cost = np.inf  # not an answer, unless the solver finds none
        search.curve.clear()
    if not contiguous:
        device = _first_seen(device, kinds, costs)
        return Stages(block, costs, kinds, kind, edges, device if usable else None, kind, upper_s)
    start = start_kind = None
    if usable:
        assert order is not None
        start, start_kind = np.argsort(order)[device].astype(np.int32), kind[order]
    return Stages(block, costs, kinds, None, edges, start, start_kind, upper_s)


def largest_s(s: Stages) -> float:
    """The largest cost of a block or tensor: a unit of seconds where no start is known."""
    finite = np.where(np.isfinite(s.costs.compute_s), s.costs.compute_s, 0.0)
    return max(float(finite.max()), float(s.costs.io_s.max(initial=0.0)), 1e-9)


def by_weight(costs: Blocks) -> NDArray[np.intp]:
    """Blocks, heaviest first: the order in which symmetry of devices is broken."""
    return np.argsort(-costs.compute_s.min(axis=1), kind="stable")


def _first_seen(device: Ints, kinds: list[list[int]], costs: Blocks) -> Ints:
    """The same placement with devices of a kind renamed by their heaviest block."""
    new = np.full(max(max(k) for k in kinds) + 1, -1, np.int32)
    free = [iter(members) for members in kinds]
    kind_of = {d: k for k, members in enumerate(kinds) for d in members}
    for g in by_weight(costs):
        if new[device[g]] < 0:
            new[device[g]] = next(free[kind_of[int(device[g])]])
    return new[device]


def _order(device: Ints, edges: Edges, num_devices: int) -> Ints | None:
    """Devices in the order of the pipeline, int32 ``[D]``; None if they wait in a circle."""
    after = {(int(device[a]), int(device[b])) for a, b in edges if device[a] != device[b]}
    order = topological_order(np.array(sorted(after), int).reshape(-1, 2), num_devices)
    return np.array(order, np.int32) if len(order) == num_devices else None


class OutOfTime(Exception):
    """The seconds are too few to write the program down and solve it."""


def writing(search: Search, reading: float) -> Callable[[], None]:
    """A check for whoever writes a program down, to be called now and then.

    It raises ``OutOfTime`` when a solver would end too late: solvers look at their clock only
    when they have read a program, which takes about ``reading`` times as long as writing it.
    """
    begun = search.seconds
    allowed = search.seconds_left / (1.0 + reading)

    def check() -> None:
        if search.seconds - begun > allowed:
            raise OutOfTime

    return check


def begin(search: Search, start: str | Planner | None, contiguous: bool, seconds: float) -> Ints:
    """Run the planner that gives the first split; the default one in a part of ``seconds``.

    Of an objective that is not the solver's, ``search`` has the answer of a planner that knows it
    first, unless only some splits may answer. Returns the split, devices int32 ``[G]``.
    """
    problem, seconds = search.problem, min(MOST_START_S, START_SHARE * seconds)
    if not (problem.objective.is_analytic or contiguous) and start is None:
        search.run("macro_search", OWN_SHARE, OWN_SHARE, one_phase=True)
    if problem.objective is not Objective.PIECEWISE_LATENCY:
        problem = problem.by_loads
    if start is not None:
        planner = load(start) if isinstance(start, str) else start
    elif contiguous:
        planner = load("ideal_dp", seconds=seconds)
    else:
        moves = problem.graph.num_groups * problem.num_devices
        planner = load("macro_search", seconds=seconds, evaluations=1000 * moves)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the start need not be optimal
        try:
            answer = planner(problem.one_phase)
        except PlannerError:  # ideal_dp: too many kinds of devices
            if start is not None:
                raise
            answer = load("single_device")(problem)
    choice = search.choice(answer.placement)
    search.consider(choice, int(answer.stats.get("evaluations", 1)))
    return choice


def finish(
    search: Search,
    contiguous: bool,
    bound_s: float,
    **stats: object,
) -> Solution:
    """The best found; ``bound_s`` is proved for the splits that were considered."""
    problem = search.problem
    if search.best_cost == np.inf:
        assert search.best is not None
        search.consider(search.best, 0)
        stats["message"] = "no contiguous split that fits was found: this is the start"
    bound = lower_bound(problem)
    if problem.objective is Objective.MAX_LOAD:
        if bound_s > search.best_cost * (1 + 1e-6):
            # A solver that contradicts a placement we hold has proved nothing.
            stats["rejected_bound_s"] = bound_s
        elif contiguous:
            stats["contiguous_bound_s"] = min(bound_s, search.best_cost)
        else:
            bound = max(bound, min(bound_s, search.best_cost))
    return search.solution(bound, solved="max_load", contiguous=contiguous, **stats)


UNWRITTEN = "the seconds were too few to write the program down: this is the start"
