"""Cutting an order into stages: what a stage of each device costs, and the best cuts.

``cut`` is the dynamic program of all planners of contiguous stages: they bring an order of blocks
(``merge_blocks``, ``topological_orders``), the devices in one order or every set of them
(``in_order``, ``sets_of_devices``), and the seconds of every stage (``Stages``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.graph import OpGraph
from placement.objective import Objective
from placement.problem import Problem, host_of
from placement.search import contiguous_kernels as kernels
from placement.search.evaluation import INFEASIBLE, Choice, Search, device_classes
from placement.search.list_schedule import memory_counts

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Stage = tuple[int, int, int]  # device, first block, block after the last
State = list[tuple[range, int]]  # (states before, device of the stage that leads here)


def score_splits(
    search: Search,
    blocks: Iterable[Ints],
    max_states: int = 512,
    each: int = 32,
    candidates: int = 32,
) -> dict[str, Any]:
    """Cut every order of ``blocks``, int32 ``[G]`` each, and score the cheapest splits of all.

    Of an order ``each`` at most, and no further order is cut where the budget has ended. See
    ``planners.contiguous_dp``.

    Returns:
        ``bottleneck_s``, the slowest stage of the best split (None: there is none),
        ``all_orders`` and ``num_blocks``.
    """
    problem = search.problem
    counts = memory_counts(problem)
    stages = Stages(problem, max_states)
    bottleneck_s, drawn = None, list[Ints]()
    for count in [*counts, None]:
        known = search.best_cost
        if (count is None and known < INFEASIBLE) or (drawn and not search.left):
            break
        cuts: list[Split] = []
        for block in tuple(drawn) or blocks:
            drawn += [block] * (count == counts[0])
            cuts += splits(stages, block, count, each)
            if search.used >= 1.0:  # also where no order had a split yet
                break
        cuts.sort(key=lambda split: split.cost_s)
        if not cuts:
            continue
        costs = search.costs([split.choice for split in cuts[:candidates]])
        if search.best_cost < known or bottleneck_s is None:
            bottleneck_s = min(split.slowest_s for split in cuts)
        # Whether anything fits says little: one device often does. The best split has to.
        if not len(costs) or costs[0] < INFEASIBLE:
            break
    num_blocks = int(drawn[0].max()) + 1
    return {
        "bottleneck_s": bottleneck_s,
        "all_orders": stages.all_orders,
        "num_blocks": num_blocks,
    }


class Split(NamedTuple):
    """What a split costs by the program's own arithmetic, its slowest stage, and its devices."""

    cost_s: float
    slowest_s: float
    choice: Choice


def splits(
    stages: Stages, block: Ints, activations: int | None, most: int | None = None
) -> list[Split]:
    """The best split of ``block`` int32 ``[G]`` for each set of devices: the ``most`` cheapest.

    Nothing is evaluated. ``activations``: of how many micro-batches must fit; None: nothing has to.
    """
    costs, kind, states = stages.costs(block), stages.kind, stages.states
    latency, size = stages.problem.objective is Objective.LATENCY, int(block.max()) + 2
    in_turn: list[tuple[float, list[Stage]]] = []
    if latency:
        seconds = costs.seconds(activations, np.add)
        in_turn = cut(lambda d: seconds[kind[d]], size, states, np.add)
    seconds = costs.seconds(activations)
    best = cut(lambda d: seconds[kind[d]], size, states)
    if latency:
        distinct = {tuple(x): x for _, x in in_turn + best}.values()
        best = sorted(((costs.latency_s(x), x) for x in distinct), key=lambda split: split[0])
    best = best[:most]
    slowest_s = (max(seconds[kind[d], j, i] for d, j, i in x) for _, x in best)
    return [
        Split(cost_s, float(slow_s), _choice(x, block, kind))
        for (cost_s, x), slow_s in zip(best, slowest_s, strict=True)
    ]


def merge_blocks(problem: Problem, max_blocks: int, position: Ints | None = None) -> Ints:
    """int32 ``[G]``: the block of each group, all of about equal seconds.

    They do not fall along ``position`` int32 ``[G]``, a permutation; None: along the numbers.
    """
    groups = problem.graph.num_groups
    position = np.arange(groups, dtype=np.int32) if position is None else position
    if groups <= max_blocks:
        return position
    seconds = problem.group_compute_s.min(axis=1)
    weight = (seconds / max(seconds.sum(), 1e-300) + 1.0 / groups)[np.argsort(position)]
    middle = np.cumsum(weight) - weight / 2
    block = np.floor(middle / weight.sum() * max_blocks).astype(np.int32)
    return np.unique(block, return_inverse=True)[1].astype(np.int32)[position]


def topological_orders(problem: Problem, count: int, seed: int = 0) -> Iterator[Ints]:
    """``count`` drawn orders: int32 ``[G]`` position of each group, that of its first operator.

    In turn the next operator is, of the ready ones, the one that leaves the fewest bytes to be
    sent over a cut behind it (each one's times a drawn factor), any, and the one that became
    ready last, as in a search in depth.
    """
    g, rng = problem.graph, np.random.default_rng(seed)
    inner = [set(g.in_tensor[a:b].tolist()) for a, b in pairwise(g.in_ptr.tolist())]
    inner = [{t for t in tensors if g.tensor_src[t] >= 0} for tensors in inner]
    users = [set(g.use_dst[a:b].tolist()) for a, b in pairwise(g.use_ptr.tolist())]
    inner_ptr, inner_row = _flat(inner)
    users_ptr, users_row = _flat(users)
    tables = kernels.Graph.fresh(
        {"N": g.num_ops, "T": g.num_tensors},
        group=g.group,
        inner_ptr=inner_ptr,
        inner=inner_row,
        output_ptr=g.out_ptr,
        output=g.out_tensor,
        users_ptr=users_ptr,
        users=users_row,
        size=g.tensor_bytes,
    )
    for rule in range(count):
        factor = np.exp(0.5 * rng.standard_normal(g.num_ops))
        first = rng.permutation(g.num_ops)
        position = np.full(g.num_groups, -1, np.int32)
        last = 16  # of the ready operators, those that became so last
        kernels.topological_order(tables, rule % 3, factor, first, last, rng, position)
        yield position


@dataclass(frozen=True, eq=False)
class StageCosts:
    """What the stage of blocks ``[j, i)`` costs; arrays are ``[C + 1, C + 1]``, ``j < i``.

    Attributes:
        kind: int32 ``[D]`` class of each device, of ``K``: what may be swapped costs the same.
        compute: float64 ``[K, C + 1, C + 1]`` seconds, inf where not supported.
        blocked: float64, the same shape: blocking sends of the stage's outputs.
        received: float64, the same shape: transfers of the stage's inputs.
        room: float64, the same shape, for what is returned by ``seconds``.
        binds: whether memory may; where it cannot the bytes are left out, 0.
        param_bytes: float64 parameters, tied ones once.
        activation_bytes: float64 tensors produced or used, of one micro-batch.
        memory_bytes: int64 ``[K]``.
    """

    kind: Ints
    compute: Floats
    blocked: Floats
    received: Floats
    room: Floats
    binds: bool
    param_bytes: Floats
    activation_bytes: Floats
    memory_bytes: NDArray[np.int64]

    def seconds(self, activations: int | None, join: np.ufunc = np.maximum) -> Floats:
        """float64 ``[K, C + 1, C + 1]`` cost of a stage, in ``room``; inf where it is too large.

        ``join`` is ``np.add`` where it receives before it computes, and nothing else waits.

        Memory is parameters and ``activations`` times the activations; None: no limit.
        """
        cost, work = self.room, self.compute
        if join is np.maximum:
            work = np.add(work, self.blocked, out=cost)
        join(work, self.received, out=cost)
        if activations is not None and self.binds:
            need = self.param_bytes + activations * self.activation_bytes
            cost[need > self.memory_bytes[:, None, None]] = np.inf
        return cost

    def latency_s(self, stages: list[Stage]) -> float:
        """One micro-batch through the stages, each waiting for the one before."""
        at = [(self.kind[d], begin, end) for d, begin, end in stages]
        return sum(float(self.compute[s] + self.received[s]) for s in at)


class Stages:
    """What stages of a problem cost, in one order of its groups after another.

    Attributes:
        kind: int32 ``[D]`` class of each device, of ``K``: what may be swapped costs the same.
        states: sets of devices, of which no more than ``max_states``.
        all_orders: whether all orders of the devices are among them.
    """

    def __init__(self, problem: Problem, max_states: int = 512) -> None:
        g, kind = problem.graph, device_classes(problem)
        self.problem, self.kind = problem, kind
        self.states, self.all_orders = sets_of_devices(problem, kind, max_states)
        self._firsts = np.unique(kind, return_index=True)[1].tolist()
        pipelined = problem.objective.is_pipelined and problem.num_devices > 1
        run_s = problem.loaded_s if pipelined else problem.compute_s
        priced = [_prices(problem, d) for d in self._firsts]
        prices = (np.stack(each) for each in zip(*priced, strict=True))
        self._uses = uses_of(g, np.ascontiguousarray(run_s[:, self._firsts].T), *prices)
        self._room = np.empty((4, 0, 0, 0))

    def costs(self, block: Ints) -> StageCosts:
        """Of the blocks int32 ``[G]``; its arrays are overwritten by the next call."""
        g, problem, size = self.problem.graph, self.problem, int(block.max()) + 2
        at = block[g.group]  # [N]
        if self._room.shape[-1] != size:  # several megabytes, which are slow to get anew
            self._room = np.empty((4, len(self._firsts), size, size))
        compute, blocked, received, cost = self._room
        kernels.fill_costs(self._uses, at, compute, blocked, received)
        binds = problem.memory_may_bind
        param_bytes = activation_bytes = np.zeros((size, size))
        if binds:
            param_bytes, activation_bytes = held_bytes(g, at, size)
        return StageCosts(
            kind=self.kind,
            compute=compute,
            blocked=blocked,
            received=received,
            room=cost,
            binds=binds,
            param_bytes=param_bytes,
            activation_bytes=activation_bytes,
            memory_bytes=problem.memory_bytes[self._firsts],
        )


def uses_of(
    g: OpGraph, compute_s: Floats, arrive_s: Floats, input_s: Floats, blocking_s: Floats
) -> kernels.Uses:
    """For ``fill_costs``: seconds ``[K, N]`` of operators, and ``[K, T]`` of tensors that move."""
    return kernels.Uses.fresh(
        {"N": g.num_ops, "T": g.num_tensors},
        makes_ptr=g.out_ptr,
        makes=g.out_tensor,
        uses_ptr=g.in_ptr,
        uses=g.in_tensor,
        inner=g.tensor_src >= 0,
        compute_s=compute_s,
        arrive_s=arrive_s,
        input_s=input_s,
        blocking_s=blocking_s,
    )


def held_bytes(g: OpGraph, at: Ints, size: int) -> tuple[Floats, Floats]:
    """float64 ``[size, size]``: parameters of stages ``[j, i)``, and what they make or use.

    Operators are in blocks ``at [N]``; tied parameters, and views, count once.
    """
    inner = made_and_used(g, at)
    params = np.stack([g.param_use, at[g.param_use_op]])
    roots = np.stack([g.tensor_root[inner[0]], inner[1]])
    return touched(params, g.param_bytes, size), touched(roots, g.tensor_bytes, size)


def _prices(problem: Problem, device: int) -> tuple[Floats, Floats, Floats]:
    """Seconds ``[T]`` to receive each tensor, from a device and from the host, and to send it.

    Means over the other devices; what does not block the sender takes it no time.
    """
    host, shares_host = host_of(problem)
    others = np.delete(np.arange(problem.num_devices), device)
    blocks, many = others[problem.link_blocking[device, others]], max(1, len(others))
    arrive_s = problem.transfers_s(lambda x: x[..., others, device].sum(axis=-1)) / many
    send_s = problem.transfers_s(lambda x: x[..., device, blocks].sum(axis=-1)) / many
    from_host_s = problem.transfers_s(lambda x: x[..., host, device])
    return arrive_s, np.zeros(len(arrive_s)) if shares_host[device] else from_host_s, send_s


def made_and_used(g: OpGraph, at: Ints) -> NDArray[np.intp]:
    """``[2, K]`` (tensor, block that makes or uses it) of tensors that operators make.

    Operators are in blocks ``at [N]``.
    """
    produced = np.flatnonzero(g.tensor_src >= 0)
    inner = g.tensor_src[g.use_tensor] >= 0
    makers = np.stack([produced, at[g.tensor_src[produced]]])
    return np.concatenate([makers, [g.use_tensor[inner], at[g.use_dst[inner]]]], axis=1)


def touched(pairs: NDArray, weight: NDArray, size: int) -> Floats:
    """float64 ``[size, size]``: for each ``[j, i)`` the weight of the items with a point in it.

    ``pairs [2, K]``: item, point. Each item is counted once per interval: for its first point at
    or after ``j``, which is the same in rows ``previous point of the item < j <= point``.
    """
    item, at = np.divmod(np.unique(pairs[0] * np.int64(size) + pairs[1]), size)
    same = np.append(False, item[1:] == item[:-1])
    low = np.where(same, np.append(0, at[:-1] + 1), 0)
    grid = np.zeros((size, size))
    if weight.any():
        kernels.sum_up(low, at + 1, weight[item].astype(np.float64), np.zeros(size), grid)
    return grid


def sets_of_devices(problem: Problem, classes: Ints, max_states: int) -> tuple[list[State], bool]:
    """Which sets of devices a set can come from, smaller sets first; state 0 is the empty set.

    A set is how many devices of each class it has; a device stands for its class. The flag
    tells whether these are all sets.
    """
    counts = np.bincount(classes)
    if np.prod(counts + 1.0) <= max_states:
        # Mixed radix: the set with one device less has the smaller number.
        step = np.append(np.cumprod((counts + 1)[::-1])[::-1][1:], 1)
        member = [int(np.flatnonzero(classes == k)[0]) for k in range(len(counts))]
        return [
            [
                (range(s - int(step[k]), s - int(step[k]) + 1), member[k])
                for k in range(len(counts))
                if used[k]
            ]
            for s, used in enumerate(product(*(range(c + 1) for c in counts)))
        ], True
    total = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0).sum(axis=0)
    return in_order(np.argsort(total, kind="stable")), False


def in_order(devices: Iterable[int]) -> list[State]:
    """The states where devices are used in this order, and any may be left out."""
    return [[], *([(range(i + 1), int(d))] for i, d in enumerate(devices))]


def cut_in_order(
    cost: Callable[[int], Floats], size: int, devices: Iterable[int]
) -> tuple[float, list[Stage]]:
    """The split with the least slowest stage where devices are used in this order; inf: none."""
    return next(iter(cut(cost, size, in_order(devices))), (np.inf, []))


def cut(
    cost: Callable[[int], Floats], size: int, states: list[State], join: np.ufunc = np.maximum
) -> list[tuple[float, list[Stage]]]:
    """The split with the least slowest stage for every set of devices, or least sum, best first.

    ``cost`` of a device: float64 ``[size, size]`` of stages of blocks ``[j, i)``; inf: impossible.
    """
    best = np.full((len(states), size), np.inf)
    best[0, 0] = 0.0
    last = np.zeros((len(states), size), np.int64)
    for s, state in enumerate(states):
        for before, device in state:
            which = (s, before.start, before.stop, device)
            kernels.append_stage(cost(device), join is np.add, best, last, *which)

    def stages(state: int) -> Iterator[Stage]:
        end = size - 1
        while end > 0:
            before, device, begin = kernels.last_stage(int(last[state, end]), size)
            yield device, begin, end
            state, end = before, begin

    reached = [s for s in range(1, len(states)) if np.isfinite(best[s, -1])]
    reached.sort(key=lambda s: best[s, -1])
    return [(float(best[s, -1]), list(stages(s))[::-1]) for s in reached]


def _flat(sets: Iterable[Iterable[int]]) -> tuple[Ints, Ints]:
    """All in a row, int32, and where each begins, with the end int32."""
    rows = [list(x) for x in sets]
    ends = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return ends, np.array(list(chain.from_iterable(rows)), np.int32)


def _choice(stages: list[Stage], block: Ints, classes: Ints) -> Choice:
    """int32 ``[G]``: a further stage of the same class takes the next device of that class."""
    free = {k: list(np.flatnonzero(classes == k)) for k in range(int(classes.max()) + 1)}
    device = np.empty(int(block.max()) + 1, np.int32)
    for d, begin, end in stages:
        device[begin:end] = free[int(classes[d])].pop(0)
    return device[block]
