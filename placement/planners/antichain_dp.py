"""Stages between augmented antichains, by dynamic programming."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.objective import Objective
from placement.planners import Among, check_least
from placement.problem import Problem, Solution
from placement.search import ideal_kernels
from placement.search.coarsen import coarsen
from placement.search.evaluation import Choice, Search, device_classes
from placement.search.list_schedule import first_that_fits, held_bytes
from placement.search.stages import cut_in_order, merge_blocks

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class AntichainDp:
    """Augmented-antichain DP (Ju et al., J. BUAA 50(9), 2024; antichains as in PipeDream).

    An antichain, augmented by the ancestors that still feed something outside, is a state:
    the set of everything up to it, closed downwards. "Add a next operator" leads from state to
    state; the states are ordered by size, which is topological. A stage is what lies between
    two states, one inside the other; the program over (devices used, state) makes the slowest
    stage least. A stage takes the larger of its compute and of the transfers of all tensors
    that cross into it; for ``max_load`` their sum, and those that cross out of it.

    Where there are more than ``max_states`` states, tasks are merged (``placement.search.coarsen``:
    what costs nothing, chains, heavy edges) until the sets of merged tasks are that few at
    most, and the prefixes of one order of all tasks are states too; ``stats["num_tasks"]``
    says how many are left, ``stats["num_states"]`` how many states. Where merging down to
    twice the number of devices does not suffice, the prefixes are the only states, and
    ``stats["linearised"]`` is true. Where nothing was merged the split is the best of all
    contiguous ones for this cost and this order of devices (``stats["bottleneck_s"]``).

    Deviations: a colocation group is one task, and edges between groups point to the one
    that began later; unlike devices have their own seconds and are used in two orders, the
    cluster's and fastest first (or one, if they are all alike), any may be left out;
    parameters and what is produced must fit, tied parameters count where they are first used.

    Attributes:
        max_states: of the dynamic program, which compares all pairs and holds a few numbers
            of each: 2,000 need about 0.3 GiB.
        seconds: to look for states: where they are over, prefixes are the only states. The
            program itself takes up to 2 s for 2,000 states: with less it has at most as many as
            take it about as long. None is no limit.
        evaluations: budget; None is no limit.
    """

    among = Among(late=True, times=8.0, loads=3, pieces=1)

    max_states: int = 2000
    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "max_states")

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, self.seconds, self.evaluations)
        limit = self.max_states
        if self.seconds is not None:  # all pairs are compared
            limit = min(limit, max(50, int(2000 * (self.seconds / 2) ** 0.5)))
        ideals, num_tasks = _states(problem, limit, search)
        inside = _inside(ideals)
        compute = _compute_s(problem, ideals)
        crossing = _crossing_s(problem, ideals)
        classes = device_classes(problem)
        orders = [list(range(problem.num_devices))]
        by_speed = np.argsort(problem.group_compute_s.sum(axis=0), kind="stable").tolist()
        if classes.any() and by_speed != orders[0]:
            orders.append(by_speed)

        def plan(activations: int | None) -> tuple[NDArray[np.int32], float]:
            held = None  # float64 [S]
            if activations is not None:
                need = held_bytes(problem, activations).astype(np.float64)
                held = np.asarray(ideals @ need, dtype=np.float64)
            rows, bottleneck_s = [], np.inf
            for order in orders:
                value, choice = _solve(problem, ideals, inside, compute, crossing, held, order)
                if np.isfinite(value):
                    rows.append(choice)
                    bottleneck_s = min(bottleneck_s, value)
            # No split has room: without limits there is one, unless support forbids it.
            if rows:
                return np.array(rows), bottleneck_s
            fastest = problem.group_compute_s.argmin(axis=1).astype(np.int32)
            return (fastest[None], np.inf) if activations is None else plan(None)

        return search.solution(
            bottleneck_s=first_that_fits(search, plan),
            num_states=len(ideals),
            num_tasks=num_tasks or problem.graph.num_groups,
            linearised=num_tasks is None,
        )


def _edges(problem: Problem) -> NDArray[np.int32]:
    """int32 ``[K, 2]`` between groups, from the one that begins earlier: free of cycles."""
    pairs = np.sort(problem.graph.group[problem.graph.edges], axis=1).reshape(-1, 2)
    return np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0).astype(np.int32)


def _states(problem: Problem, limit: int, search: Search) -> tuple[Bools, int | None]:
    """The states bool ``[S, G]`` and the tasks whose sets they are, None if prefixes alone."""
    groups = problem.graph.num_groups
    exact = enumerate_ideals(_edges(problem), groups, limit)
    if exact is not None:
        return exact, groups
    prefixes = _prefixes(problem, limit // 2)
    first = np.unique(problem.graph.group, return_index=True)[1]
    target = groups
    while (target := 7 * target // 8) >= 2 * problem.num_devices and search.seconds_left > 0:
        coarse, label = coarsen(problem, target)
        if coarse.graph.num_groups > target:  # no more can be merged
            break
        ideals = enumerate_ideals(_edges(coarse), coarse.graph.num_groups, limit - len(prefixes))
        if ideals is not None:
            task = coarse.graph.group[label[first]]
            both = np.unique(np.concatenate([prefixes, ideals[:, task]]), axis=0)
            return both[np.argsort(both.sum(axis=1), kind="stable")], coarse.graph.num_groups
    return _prefixes(problem, limit), None


def _prefixes(problem: Problem, limit: int) -> Bools:
    """bool ``[S, G]``: blocks of consecutive groups, added one after another."""
    block = merge_blocks(problem, max(1, limit - 1))
    return np.array(block[None, :] < np.arange(int(block.max()) + 2)[:, None])


def enumerate_ideals(edges: NDArray[np.int32], num_items: int, limit: int) -> Bools | None:
    """bool ``[S, num_items]``: all downward-closed sets by size, None if more than ``limit``."""
    # Memory counts as numbers of sets: links, eight each, are nothing beside 2 ** 40.
    memory = 2**40, (limit + 1) * 2**40 - 1
    count, words, *_ = ideal_kernels.ideals_of(edges, num_items, *memory)
    if count == 0:
        return None
    data = words.astype("<u8").view(np.uint8)
    bits = np.unpackbits(data, axis=1, count=num_items, bitorder="little").astype(bool)
    return bits[np.lexsort((*words.T, bits.sum(axis=1)))]


def _inside(ideals: Bools) -> Bools:
    """bool ``[S, S]``: ``[i, j]``, is state i a proper part of state j."""
    items = ideals.astype(np.float32)
    size = items.sum(axis=1)
    return np.asarray((items @ items.T == size[:, None]) & (size[:, None] < size))


def _compute_s(problem: Problem, ideals: Bools) -> tuple[Floats, Floats]:
    """float64 ``[S, D]`` seconds of each state, and how many of its groups cannot run there."""
    in_pipeline = problem.objective.is_pipelined and problem.num_devices > 1
    per_op = problem.loaded_s if in_pipeline else problem.compute_s
    seconds = problem.graph.per_group(np.where(np.isfinite(per_op), per_op, 0.0))
    impossible = ~np.isfinite(problem.group_compute_s)
    state = np.asarray(ideals, dtype=np.float64)
    return state @ seconds, state @ impossible


def _crossing_s(problem: Problem, ideals: Bools) -> Floats:
    """float64 ``[S, D]``: for device ``D`` to move every tensor that crosses each state's edge."""
    g = problem.graph
    total = np.zeros((len(ideals), problem.num_devices))
    for t in np.flatnonzero(g.tensor_src >= 0):
        users = g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]]
        at = ideals[:, g.group[np.append(users, g.tensor_src[t])]]
        crosses: Bools = np.asarray(at.any(axis=1) & ~at.all(axis=1))
        total += crosses[:, None] * problem.io_s[t]
    return total


def _solve(
    problem: Problem,
    ideals: Bools,
    inside: Bools,
    compute: tuple[Floats, Floats],
    crossing: Floats,
    held: Floats | None,
    order: list[int],
) -> tuple[float, Choice]:
    """The slowest stage with the devices in ``order``, and the choice int32 ``[G]``; inf: none."""
    seconds, impossible = compute

    def stage_s(d: int) -> Floats:
        stage = seconds[None, :, d] - seconds[:, None, d]
        if problem.objective is Objective.MAX_LOAD:
            stage = stage + crossing[:, None, d] + crossing[None, :, d]
        else:
            stage = np.maximum(stage, crossing[:, None, d])
        may = inside & (impossible[None, :, d] == impossible[:, None, d])
        if held is not None:
            may &= held[None, :] - held[:, None] <= problem.memory_bytes[d]
        return np.where(may, stage, np.inf)

    choice = np.full(problem.graph.num_groups, -1, np.int32)
    slowest_s, stages = cut_in_order(stage_s, len(ideals), order)
    for d, before, state in stages:
        choice[ideals[state] & ~ideals[before]] = d
    return slowest_s, choice
