"""Contiguous layers on unlike devices with unlike links: the least latency, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.objective import Objective
from placement.planners import PlannerError, check_least
from placement.planners.even_layers import layer_units
from placement.problem import Problem, Solution, host_of
from placement.search.evaluation import INFEASIBLE, Choice, Search, device_classes, single_devices
from placement.search.stages import held_bytes, merge_blocks

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class LayerDp:
    """The best split of a chain into stages, one for each device that is used, for ``latency``.

    A dynamic program over (devices used, the last of them, groups placed): the latency of a chain
    is the sum of its operators and of what is handed on from each stage to the next, by the link
    of the two, and a stage must fit into its device's memory: its parameters, and where the
    simulator finds that activations do not, all that it makes or uses. Devices that may be
    swapped count as one; with more than ``max_states`` sets of devices they are used in one order,
    fastest first (``stats["all_orders"]`` is False then). A group is placed whole, and of more
    than ``max_blocks`` several together.

    Where layers may be apart (experts beside attention), a second program follows for each
    device as a helper: a stage may leave the last group of some of its layers to it, and what is
    before them, as few as make the stage fit (the first ones), as long as the helper has room,
    and pays its time and the way there and back. The best of all is the answer. Where the second
    program would take too long (some 20 s) ``stats["no_helpers"]`` says so.

    Attributes:
        max_states: sets of devices.
        max_blocks: groups are merged into this many blocks of about equal seconds first.
        helpers: whether to run the second program.
        evaluations: budget; None is no limit.
    """

    max_states: int = 4096
    max_blocks: int = 1000
    helpers: bool = True
    evaluations: int | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "max_states", "max_blocks")

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, evaluations=self.evaluations)
        search.costs(single_devices(problem))
        why = _no_chain(problem)
        if why:
            return search.solution(no_chain=why)
        _, all_orders = _states(problem, device_classes(problem), self.max_states, None)
        unit = layer_units(problem)
        tries: list[tuple[Ints, int | None]] = [(merge_blocks(problem, self.max_blocks), None)]
        facts: dict[str, Any] = {"all_orders": all_orders}
        if self.helpers and int(unit.max()) + 1 < len(unit):
            # What is before the layers is apart.
            parted = unit + (problem.graph.group[0] != np.arange(len(unit), dtype=np.int32))
            parted = np.unique(parted, return_inverse=True)[1].astype(np.int32)  # without a gap
            tries += [(parted, helper) for helper in range(problem.num_devices)]
        for block, helper in tries:
            for activations in (False, True):
                try:
                    choice = self._solve(problem, block, helper, activations)
                except PlannerError as error:
                    facts["no_helpers"] = str(error)
                    break
                if choice is None or search.cost(choice) < INFEASIBLE:
                    break  # the best without them, and it fits with them too
        return search.solution(**facts)

    def _solve(
        self, problem: Problem, block: Ints, helper: int | None, activations: bool
    ) -> Choice | None:
        """int32 ``[G]``: the best devices, blocks whole but for the helper's; None: nothing fits.

        Raises:
            PlannerError: there are more blocks than ``max_blocks``, or too many to count.
        """
        if (most := int(block.max()) + 1) > self.max_blocks:
            raise PlannerError(
                f"layer_dp: {most} layers are more than max_blocks = {self.max_blocks}"
            )
        kind = device_classes(problem).copy()
        if helper is not None:
            kind[helper] = kind.max() + 1  # of a class of its own, last
            kind = np.unique(kind, return_inverse=True)[1].astype(np.int32)
        nodes, _ = _states(problem, kind, self.max_states, helper)
        program = _Program(problem, block, kind, helper, activations, nodes)
        if helper is not None and not program.left.any():
            return None  # as without one
        for n in range(len(nodes)):
            program.fill(n)
        return program.choice()


def _no_chain(problem: Problem) -> str:
    """Why the program does not apply; empty if it does."""
    graph = problem.graph
    if problem.objective is not Objective.LATENCY:
        return f"the objective is {problem.objective}, not latency"
    src, dst = graph.group[graph.edges[:, 0]], graph.group[graph.edges[:, 1]]
    far = np.flatnonzero((dst != src) & (dst != src + 1))
    if len(far):
        a, b = (graph.op_name[n] for n in graph.edges[far[0]])
        return f"{b!r} reads from {a!r}, which is not just before it"
    return ""


def _ways(problem: Problem) -> Floats:
    """float64 ``[G + 1, D, D]``: seconds to hand on what groups before a cut made for it.

    As if a group handed on all that it made when it ends; tensors wait for each other on the link.
    """
    graph, count = problem.graph, problem.num_devices
    way = np.zeros((graph.num_groups + 1, count, count))
    src, dst = graph.tensor_src[graph.use_tensor], graph.group[graph.use_dst]
    crosses = (src >= 0) & (graph.group[src] != dst)
    sent, first = np.unique(graph.use_tensor[crosses], return_index=True)  # each to one group
    cut = dst[crosses][first]
    gather = np.add if problem.contention else np.maximum
    gather.at(way, cut, problem.transfers_s(lambda pairs: pairs)[sent])
    np.add.at(way, cut, problem.link_receive_s)
    return way


def _own(problem: Problem, block: Ints, routed: NDArray[np.bool_]) -> tuple[Floats, float]:
    """``[C]`` bytes of the routed group of each block alone, and bytes that they share."""
    graph = problem.graph
    readers = np.zeros((len(graph.param_bytes), graph.num_groups), bool)
    readers[graph.param_use, graph.group[graph.param_use_op]] = True
    alone = readers.sum(axis=1) == 1
    held = (graph.param_bytes * alone) @ readers[:, routed]
    own = np.bincount(block[routed], held, int(block.max()) + 1).astype(np.float64)
    shared = graph.param_bytes[readers[:, routed].any(axis=1) & ~alone].sum()
    return own, float(shared)


def _stage(
    whole: Floats, excess: Floats, own: Floats, extra: Floats, may: Ints, room: int
) -> tuple[Floats, NDArray[np.intp]]:
    """Seconds ``[C + 1, C + 1]`` of all stages on a device, and how many blocks leave a group.

    ``excess`` are bytes over the device's memory where nothing is left to the helper.
    """
    size = len(whole)
    freed, more = np.append(0.0, np.cumsum(own)), np.append(0.0, np.cumsum(extra))
    leaves = np.zeros(size - 1, np.intp)
    leaves[may] = 1
    number = np.append(0, np.cumsum(leaves))
    begin, end = np.indices((size, size))
    # The first blocks of a stage leave theirs: up to where enough is free.
    enough = np.searchsorted(freed, freed[:, None] + excess - 1e-6)
    upto = np.where(excess <= 0, begin, enough)
    possible = (upto <= end) & (begin < end)
    upto = np.minimum(upto, size - 1)
    count = np.where(possible, number[upto] - number[begin], 0)
    possible &= count <= room
    cost = (whole[end] - whole[begin]) + (more[upto] - more[begin])
    return np.where(possible, cost, np.inf), np.where(possible, count, 0)


Node = tuple[int, list[int]]  # class of the last device, nodes before (-1: the beginning)


def _states(
    problem: Problem, kind: Ints, max_states: int, helper: int | None
) -> tuple[list[Node], bool]:
    """Sets of devices (without the helper) with the last of them, smaller sets first."""
    counts = np.bincount(kind)
    if helper is not None:
        counts[kind[helper]] = 0
    if np.prod(counts + 1.0) > max_states:
        total = np.where(np.isfinite(problem.compute_s), problem.compute_s, 1e30).sum(axis=0)
        order = [kind[d] for d in np.argsort(total, kind="stable") if d != helper]
        return [(k, [-1, *range(i)]) for i, k in enumerate(order)], False
    number: dict[tuple[tuple[int, ...], int], int] = {}
    nodes: list[Node] = []
    for used in product(*(range(c + 1) for c in counts)):
        for k in range(len(counts)):
            if used[k]:
                before = (*used[:k], used[k] - 1, *used[k + 1 :])
                came = [number[before, e] for e in range(len(counts)) if (before, e) in number]
                number[used, k] = len(nodes)
                nodes.append((k, came or [-1]))
    return nodes, True


class _Program:
    """The dynamic program of one device that may help, or of none.

    Attributes:
        block: int32 ``[G]`` of each group; a stage is of blocks ``[j, i)``.
        routed: bool ``[G]``: groups that a stage may leave to the helper; at most one of a block.
        seconds: float64 ``[K, C + 1, C + 1]`` of a stage on a device of each class; inf where it
            does not fit.
        left: int32 ``[K, C + 1, C + 1]``: how many blocks leave their routed group to the helper.
        spent: as ``left``, of the helper's room; 0 where it has room for all.
        ways: float64 ``[C + 1, K, K]``: seconds from one device to the next before block ``i``.
        enter: float64 ``[K]``: seconds until the model's input is there.
        best: float64 ``[nodes, U, C + 1]`` the least seconds of every node, with so many groups
            left to the helper.
    """

    def __init__(
        self,
        problem: Problem,
        block: Ints,
        kind: Ints,
        helper: int | None,
        activations: bool,
        nodes: list[Node],
    ) -> None:
        """``activations``: all tensors that a stage makes or uses count as memory too."""
        graph, size = problem.graph, int(block.max()) + 2
        firsts = np.unique(kind, return_index=True)[1]  # a device of each class
        last = np.append(block[1:] != block[:-1], True)
        routed = last & np.append(True, block[1:] == block[:-1]) & (helper is not None)
        able = np.isfinite(problem.group_compute_s)
        if helper is not None:
            routed &= able[:, helper]
        group_s = np.where(able, problem.group_compute_s, 0.0)
        way = _ways(problem)
        host, shares = host_of(problem)
        inputs = [] if shares.all() else np.flatnonzero(graph.tensor_src < 0).tolist()
        self.enter = np.array([
            0.0 if shares[d] else sum(problem.transfer_s(t, host, d) for t in inputs)
            for d in firsts.tolist()
        ])  # fmt: skip
        params, live = held_bytes(graph, block[graph.group], size)
        held = params + live if activations else params
        own = np.zeros(size - 1)  # bytes that only the routed group of a block has
        shared = 0.0
        if helper is not None:
            own, shared = _own(problem, block, routed)
        room, most = 0, int(routed.sum())  # of the helper, in groups
        if helper is not None and own.any():
            fit = (problem.memory_bytes[helper] - shared) // own.max()
            room = int(min(max(0.0, fit), most))
        counts = room + 1 if room < most else 1
        if counts > 1 and (steps := len(nodes) * counts * size**2) > 2**31:
            raise PlannerError(
                f"layer_dp: {size - 1} layers, of which {room} fit on the helper, and "
                f"{len(nodes)} sets of devices take {steps:.1e} steps, more than 2.1e+09"
            )
        seconds, left = [], []
        for d in firsts:
            whole = np.append(0.0, np.cumsum(np.bincount(block, group_s[:, d], size - 1)))
            need = held - problem.memory_bytes[d]
            extra = np.zeros(size - 1)
            if helper is not None and helper != d:
                g = np.flatnonzero(routed)
                there = way[g, d, helper] + way[g + 1, helper, d]
                extra[block[g]] = group_s[g, helper] - group_s[g, d] + there
            cost, count = _stage(whole, need, own, extra, block[routed], room)
            never = np.append(0, np.cumsum(np.bincount(block[~able[:, d]], minlength=size - 1)))
            cost[never[None, :] > never[:, None]] = np.inf
            seconds.append(cost)
            left.append(count.astype(np.int32))
        cuts = np.flatnonzero(np.append(True, block[1:] != block[:-1]))
        self.block, self.routed, self.helper, self.kind = block, routed, helper, kind
        self.nodes, self.size = nodes, size
        self.seconds, self.left = np.stack(seconds), np.stack(left)
        self.ways = _between(way[np.append(cuts, len(block))], kind)
        self.spent = self.left if counts > 1 else np.zeros_like(self.left)
        self.best = np.full((len(nodes), counts, size), np.inf)

    def entered(self, n: int) -> tuple[Floats, NDArray[np.intp]]:
        """``[U, C + 1]`` seconds until the last device of ``n`` begins, and the node before."""
        k, before = self.nodes[n]
        costs = []
        for p in before:
            if p >= 0:
                costs.append(self.best[p] + self.ways[:, self.nodes[p][0], k])
            else:
                start = np.full(self.best.shape[1:], np.inf)
                start[0, 0] = self.enter[k]
                costs.append(start)
        at = np.argmin(costs, axis=0)
        return np.min(costs, axis=0), np.array(before)[at]

    def ending(self, n: int, enter: Floats, u: int) -> Floats:
        """``[C + 1, C + 1]`` seconds where the last stage is of blocks ``[j, i)``, ``u`` left."""
        before = u - self.spent[self.nodes[n][0]]
        begun = enter[np.maximum(before, 0), np.arange(self.size)[:, None]]
        return np.where(before < 0, np.inf, begun + self.seconds[self.nodes[n][0]])

    def fill(self, n: int) -> None:
        """``best[n]``, when those of the nodes before are there."""
        enter = self.entered(n)[0]
        for u in range(self.best.shape[1]):
            self.best[n, u] = self.ending(n, enter, u).min(axis=0)

    def choice(self) -> Choice | None:
        """int32 ``[G]``: the way back from the best end."""
        ends = self.best[:, :, -1]
        if not np.isfinite(ends).any():
            return None
        n, u = (int(x) for x in np.unravel_index(int(ends.argmin()), ends.shape))
        end = self.size - 1
        free = {k: np.flatnonzero(self.kind == k).tolist() for k in range(int(self.kind.max()) + 1)}
        device = np.empty(len(self.block), np.int32)
        while end > 0:
            k = self.nodes[n][0]
            enter, came = self.entered(n)
            begin = int(self.ending(n, enter, u)[:, end].argmin())
            inside = (self.block >= begin) & (self.block < end)
            device[inside] = free[k].pop(0)
            count = int(self.left[k, begin, end])
            u -= int(self.spent[k, begin, end])
            if count:
                assert self.helper is not None
                device[np.flatnonzero(inside & self.routed)[:count]] = self.helper
            n, end = int(came[u, begin]), begin
        return device


def _between(way: Floats, kind: Ints) -> Floats:
    """float64 ``[C + 1, K, K]``: ways between classes, within one from a device to another."""
    count = int(kind.max()) + 1
    seconds = np.full((len(way), count, count), np.inf)
    for e, k in product(range(count), repeat=2):
        ends = [
            (a, b) for a in np.flatnonzero(kind == e) for b in np.flatnonzero(kind == k) if a != b
        ]
        if ends:
            seconds[:, e, k] = way[:, *ends[0]]
    return seconds
