"""The best contiguous split, exactly: dynamic programming over downward-closed sets."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.bounds import lower_bound
from placement.bounds.loads import alike, balance_prices, priced
from placement.graph import components, csr, topological_order
from placement.planners import Among, PlannerError, check_least
from placement.problem import Problem, Solution
from placement.search import ideal_kernels
from placement.search.evaluation import NO_PROOF, cannot_fit, why_infinite
from placement.simulator import score
from placement.simulator.analytic import device_loads
from placement.simulator.analytic_kernels import Blocks, blocks, move_tables
from placement.tools.clock import clock
from placement.tools.lp import load_solver

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Stage = tuple[int, NDArray[np.intp]]  # kind of device, items

_FAR = 1e300  # a load that every split beats
_STATE_BYTES = 13  # of the tables, for an ideal and a set of devices


@dataclass(frozen=True)
class IdealDp:
    """Least ``max_load`` of all contiguous splits (Tarnawski et al., NeurIPS 2020).

    The forward graph is cut by a chain of ideals (downward-closed sets), at most one stage per
    device, backward operators go with their forward mates. First the authors' reductions:
    colocation groups become items, groups of backward operators alone are ordered by the
    mirror image of their edges, cycles are fused, forward items that cost nothing and have
    one neighbour join it (not one that other devices support, nor one that reads a model input
    which some device waits for: deviations). Where parameters that were joined so might fit
    only apart, it is proved that no such split is better, or they stay apart.

    Then every stage is met once: see ``ideal_kernels.extend``. Loads not below that of the best
    linearised split (one topological order: ideals are prefixes) are never followed. So the
    time depends on how good that is; there is no limit on graphs or ideals, but on memory and
    time. Where a limit is hit the answer is the best split found so far, at least the
    linearised one (of 50 runs of items, if time is short), with a warning and
    ``stats["contiguous_optimum"]`` False.

    Under another objective the split is the same and is scored by that objective. Equal
    devices are interchangeable; unlike ones are used in every order (``max_states``).
    ``lower_bound_s`` holds for every split with one phase, contiguous or not.

    Attributes:
        memory_bytes: of the ideals and the tables over them.
        seconds: budget, from the problem to the answer; None is no limit. The reductions and
            the linearised split of 50 runs are made in any case: less than a second for
            10,000 operators.
        max_states: sets of devices, ``prod(devices of a kind + 1)``.
        max_steps: of the programs over prefixes and ideals, as ``extend`` counts them;
            None is no limit. With it and without ``seconds`` the answer is the same on every
            machine: a hundred million take half a second. The linearised split of 50 runs is
            made in any case.
        ideals: False: the answer is the best linearised split.
    """

    among = Among(times=5.0, loads=0, pieces=0)

    memory_bytes: int = 1_073_741_824  # 1 GiB; conf/ reads literals
    seconds: float | None = 60.0
    max_states: int = 4096
    max_steps: int | None = None
    ideals: bool = True

    def __post_init__(self) -> None:
        check_least(self, 1, "memory_bytes", "max_states", "max_steps")
        check_least(self, 0, "seconds")

    def __call__(self, problem: Problem) -> Solution:
        """Raises: PlannerError, more than ``max_states`` sets of devices."""
        load_solver()
        started = clock()
        left = _Left(
            started + (np.inf if self.seconds is None else self.seconds),
            np.inf if self.max_steps is None else self.max_steps,
        )
        reduced, best = _reduced(problem, True), _Best()
        dp_started = clock()
        self._improve(best, problem, reduced, left)
        if not best.proved and (best.load_s == _FAR or not best.message):
            self._improve(best, problem, _reduced(problem, False), left)
        ended = clock()
        stats: dict[str, Any] = {
            "seconds": ended - started,
            "dp_seconds": ended - dp_started,
            "evaluations": 1,
            "num_items": best.num_items,
            "ideals": best.num_ideals,
            "sets": left.sets,
            "linearised_s": best.linear_s if best.linear_s < _FAR else np.inf,
            "contiguous_optimum": not best.message,
        }
        if best.message:
            stats["message"] = f"{best.message}: the best split found, not proved optimal"
            warnings.warn(f"ideal_dp: {stats['message']}", RuntimeWarning, stacklevel=2)
        bound = lower_bound(problem)
        if best.placement is None:
            verb = "is known to fit" if best.message else "fits"
            stats["infeasible"] = _nothing_fits(problem, verb)
            allowed = np.isfinite(problem.group_compute_s)
            anywhere = allowed.argmax(axis=1).astype(np.int32)[problem.graph.group]
            return Solution(anywhere, np.inf, bound, stats)
        stats["max_load_s"] = float(device_loads(problem, best.placement).max())
        value = float(score(problem, best.placement)[0])
        if not np.isfinite(value):  # the split counts parameters, a timeline activations too
            stats["infeasible"] = why_infinite(problem, best.placement)
        return Solution(best.placement, value, bound, stats)

    def _improve(self, best: _Best, problem: Problem, reduced: _Reduced, left: _Left) -> None:
        """Look for a better split of these items."""
        item, edges = reduced.item, reduced.edges
        b = blocks(problem, item)
        # Items without the parameters of what joined them: what bounds these bounds every split.
        loose = blocks(reduced.without_joined(problem), item) if reduced.holds else b
        kinds = _kinds(problem, loose, self.max_states)
        best.num_items, best.num_ideals, best.message, best.proved = b.num_blocks, 0, "", True
        if not np.isfinite(kinds.floor_s):
            return
        has_room = (b.num_blocks + 1) * _STATE_BYTES * kinds.num_states <= self.memory_bytes
        orders = _orders(b.num_blocks, edges) if has_room else ()
        lines = [_linearised(problem, b, o, kinds, left) for o in orders]
        linear = min(lines, key=_load, default=_Split())
        if linear.load_s == _FAR and not (lines and all(line.complete for line in lines)):
            linear = _coarse(problem, item, b, kinds)
        best.linear_s = min(best.linear_s, linear.load_s)
        best.take(linear, item, kinds)
        ideals: _Ideals | int = 0
        if left and self.ideals:
            ideals = _enumerate(b.num_blocks, edges, kinds, self.memory_bytes, left.deadline)
        if isinstance(ideals, int):
            best.proved = False
            if not self.ideals:
                best.message = "ideals = False"
            elif ideals >= self.memory_bytes:
                best.message = f"the ideals need more than memory_bytes = {self.memory_bytes}"
            else:
                best.message = f"{left.over(self)} are too few for the ideals"
            return
        best.num_ideals = ideals.count
        exact = _solve(problem, b, ideals, kinds, best.load_s, left)
        best.take(exact, item, kinds)
        complete = exact.complete
        if complete and reduced.holds:
            less_s = (1 - 1e-9) * best.load_s  # than sums in another order are
            better = _solve(problem, loose, ideals, kinds, less_s, left)
            complete, best.proved = better.complete, better.load_s == _FAR
        if not complete:
            best.proved = False
            best.message = f"{left.over(self)} were over before all stages were seen"


@dataclass
class _Best:
    """The best split so far, and what is known of it.

    Attributes:
        load_s: its largest load, ``_FAR`` without a split.
        placement: int32 ``[N]``, None without a split.
        linear_s: of the best linearised split.
        num_items, num_ideals: of the last program.
        message: which limit was hit in it; empty: this is the best split of its items.
        proved: no split of other items is better either.
    """

    load_s: float = _FAR
    placement: Ints | None = None
    linear_s: float = _FAR
    num_items: int = 0
    num_ideals: int = 0
    message: str = ""
    proved: bool = True

    def take(self, split: _Split, item: Ints, kinds: _Kinds) -> None:
        """A split that was found, if it is better: each stage takes the next device of its kind."""
        if split.load_s < self.load_s:
            free = [iter(members) for members in kinds.members]
            device = np.empty(int(item.max()) + 1, np.int32)
            for kind, items in split.stages:
                device[items] = next(free[kind])
            self.load_s, self.placement = split.load_s, device[item]


@dataclass
class _Left:
    """What is left of a budget: until when (of ``clock``), and how many steps.

    ``sets``: how many sets of items were met in the programs over ideals.
    """

    deadline: float = np.inf
    steps: float = np.inf
    sets: int = 0

    def __bool__(self) -> bool:
        return self.steps > 0 and clock() < self.deadline

    def over(self, planner: IdealDp) -> str:
        """The limit that was hit."""
        what = "seconds" if self.steps > 0 else "max_steps"
        return f"{what} = {getattr(planner, what)}"


@dataclass(frozen=True, eq=False)
class _Reduced:
    """Operators as items.

    Attributes:
        item: int32 ``[N]`` the item of each operator, numbered topologically.
        edges: int64 ``[E, 2]`` between items, that order them, sorted.
        joined: bool ``[N]``: it costs nothing, and was added to the item of a neighbour.
        holds: whether those read parameters that it may matter to have beside the neighbour's.
    """

    item: Ints
    edges: NDArray[np.int64]
    joined: NDArray[np.bool_]
    holds: bool

    def without_joined(self, problem: Problem) -> Problem:
        """The same problem where operators that were ``joined`` read no parameters."""
        g = problem.graph
        stays = ~self.joined[g.param_use_op]
        return replace(
            problem,
            graph=replace(g, param_use_op=g.param_use_op[stays], param_use=g.param_use[stays]),
        )


def contract(problem: Problem) -> tuple[Ints, NDArray[np.int64]]:
    """The item of each operator, int32 ``[N]``, and edges int64 ``[E, 2]`` that order items.

    Items are numbered topologically; edges are those of the forward operators, and the mirrored
    ones of backward operators without a forward mate. Items that cost nothing, and no device
    anything to feed or to hold, join their only neighbour: no split is lost that is better than
    all others.
    """
    reduced = _reduced(problem, False)
    return reduced.item, reduced.edges


def _reduced(problem: Problem, join_holders: bool) -> _Reduced:
    """See ``contract``; ``join_holders``: whatever parameters an item holds, it joins."""
    g = problem.graph
    group, back, n = g.group, g.is_backward, g.num_groups
    u, v = g.edges[:, 0], g.edges[:, 1]
    a, b = group[u], group[v]
    forward = ~back[u] & ~back[v] & (a != b)
    meets_backward = np.zeros(n, bool)  # a forward operator of the group has a backward neighbour
    mixed = back[u] != back[v]
    meets_backward[np.where(back[u], b, a)[mixed]] = True
    orphan = np.ones(n, bool)
    orphan[group[~back]] = False
    mirrored = back[u] & back[v] & (a != b) & (orphan[a] | orphan[b])
    true_edges = np.unique(np.stack([a, b], axis=1)[forward], axis=0)
    mirror_edges = np.unique(np.stack([b, a], axis=1)[mirrored], axis=0)
    seconds = np.where(np.isfinite(problem.compute_s), problem.compute_s, 0.0).max(axis=1)
    forward_s = np.bincount(group[~back], weights=seconds[~back], minlength=n)
    backward_s = np.bincount(group[back], weights=seconds[back], minlength=n)

    # Cycles between groups become one item.
    item = components(np.concatenate([true_edges, mirror_edges]), n, strong=True)
    num_items = int(item.max()) + 1
    cost_s = np.maximum(
        np.bincount(item, weights=forward_s, minlength=num_items),
        np.bincount(item, weights=backward_s, minlength=num_items),
    )
    fed = (g.tensor_src[g.use_tensor] < 0) & (problem.io_s[g.use_tensor] > 0).any(axis=1)
    holders = item[group[g.param_use_op[g.param_bytes[g.param_use] > 0]]]
    if int(g.param_bytes.sum()) <= int(problem.memory_bytes.min()):
        holders = holders[:0]  # everything fits everywhere
    dear = [item[meets_backward], item[group[g.use_dst[fed]]]] + [holders] * (not join_holders)
    trivial_s = min(1e-9, 1e-6 * float(cost_s.mean()))  # of an item that takes no time
    cheap = (cost_s <= trivial_s) & ~np.isin(np.arange(num_items), np.concatenate(dear))
    can_run = np.ones((num_items, problem.num_devices), bool)
    np.logical_and.at(can_run, item, np.isfinite(problem.group_compute_s))
    # A pair joined by an edge of each sort counts as two neighbours, as in the original.
    edges = [np.unique(item[e], axis=0) for e in (true_edges, mirror_edges) if len(e)]
    joined = np.concatenate([np.zeros((0, 2), np.int64), *edges])
    joined = joined[joined[:, 0] != joined[:, 1]]
    into = _merge_trivial(num_items, joined.tolist(), cheap, can_run)
    moved = into != np.arange(num_items)
    number, order = _number(into[item[group]], into[joined])
    return _Reduced(number, order, moved[item[group]], bool(moved[holders].any()))


def _merge_trivial(
    n: int, edges: list[list[int]], cheap: NDArray[np.bool_], can_run: NDArray[np.bool_]
) -> NDArray[np.intp]:
    """For each of ``n`` nodes the one it ends up in: cheap ones join their only neighbour."""
    near: list[Counter[int]] = [Counter() for _ in range(n)]
    for a, b in edges:
        near[a][b] += 1
        near[b][a] += 1
    into = np.arange(n)
    todo = [v for v in range(n) if cheap[v]]
    while todo:
        v = todo.pop()
        if into[v] != v or near[v].total() != 1:
            continue
        w = next(iter(near[v]))
        if (can_run[v] != can_run[w]).any():
            continue
        into[v] = w
        del near[w][v]
        if cheap[w]:
            todo.append(w)
    while (into[into] != into).any():
        into = into[into]
    return into


def _number(item: NDArray[Any], pairs: NDArray[Any]) -> tuple[Ints, NDArray[np.int64]]:
    """Items ``[N]`` numbered topologically, those whose first operator comes first before others;
    and the ``pairs [P, 2]`` of unlike ones in these numbers, sorted, each once."""
    used, first = np.unique(item, return_index=True)
    rank = np.zeros(int(used[-1]) + 1, np.int64)
    rank[used] = np.argsort(np.argsort(first))
    edges = np.unique(rank[pairs[pairs[:, 0] != pairs[:, 1]]], axis=0)
    order = topological_order(edges, len(used))
    assert len(order) == len(used), "cycles were fused"
    number = np.argsort(order)
    return number[rank[item]].astype(np.int32), np.unique(number[edges], axis=0)


@dataclass(frozen=True, eq=False)
class _Kinds:
    """Devices that may be swapped are one of ``K`` kinds; a state counts devices of each.

    Attributes:
        members: devices of each kind.
        count, step: int64 ``[K]`` devices, and how far apart states are that differ by one.
        memory_bytes: int64 ``[K]``.
        price: float64 ``[K]`` of a second (see ``bounds.loads.balance_prices``).
        work: float64 ``[M]`` priced seconds of each item.
        floor_s: no split has a smaller load: all items at these prices, and the heaviest item.
    """

    members: list[list[int]]
    count: NDArray[np.int64]
    step: NDArray[np.int64]
    memory_bytes: NDArray[np.int64]
    price: Floats
    work: Floats
    floor_s: float

    @property
    def num_states(self) -> int:
        """Number of sets of devices."""
        return _num_sets(self.count)

    @property
    def used(self) -> NDArray[np.int64]:
        """int64 ``[S, K]`` devices of each kind in a state."""
        return np.arange(self.num_states)[:, None] // self.step % (self.count + 1)


def _num_sets(count: NDArray[np.int64]) -> int:
    """Sets of devices of which there are so many of each kind; equal ones are not told apart."""
    return math.prod(int(c) + 1 for c in count)


def _kinds(problem: Problem, b: Blocks, max_states: int) -> _Kinds:
    """Raises: PlannerError, before any work, where they make more sets than ``max_states``."""
    about = np.concatenate([b.compute_s, b.io_s, problem.memory_bytes[None].astype(np.float64)])
    _, kind, count = alike(about)
    members = [np.flatnonzero(kind == k).tolist() for k in range(len(count))]
    first = [group[0] for group in members]
    if _num_sets(count) > max_states:
        raise PlannerError(
            f"{len(count)} kinds of devices make {_num_sets(count)} sets of devices, more than "
            f"max_states = {max_states}; use local_search, or raise max_states"
        )
    step = [_num_sets(count[:k]) for k in range(len(count))]
    fits = b.own_bytes[:, None] <= problem.memory_bytes
    alone = np.where(fits, b.compute_s, np.inf)
    prices = balance_prices(alone)
    work = priced(alone, prices)
    floor_s = max(float(alone.min(axis=1).max()), float(work.sum())) * (1 - 1e-12)
    return _Kinds(
        members=members,
        count=count,
        step=np.array([min(s, 2**62) for s in step], np.int64),
        memory_bytes=problem.memory_bytes[first],
        price=prices[first],
        work=work,
        floor_s=floor_s,
    )


@dataclass(frozen=True, eq=False)
class _Ideals:
    """Ideals of a DAG, smaller ones first (see ``ideal_kernels.enumerate_ideals``).

    ``work_s [I]`` is the priced work inside; ``bits`` None says that ideal ``i`` is the first
    ``i`` items.
    """

    count: int
    spans: Ints
    links: Ints
    work_s: Floats
    bits: NDArray[np.uint64] | None = None

    def between(self, small: int, large: int) -> NDArray[np.intp]:
        """Items of ideal ``large`` that are not in ``small``."""
        if self.bits is None:
            return np.arange(small, large)
        words = (self.bits[large] & ~self.bits[small]).astype("<u8")
        return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


@dataclass(frozen=True, eq=False)
class _Split:
    """A chain of stages and its largest load (``_FAR`` if there is none).

    ``complete`` tells whether all sets of items that matter were met to find it.
    """

    load_s: float = _FAR
    stages: list[Stage] = field(default_factory=list)
    complete: bool = True


def _load(split: _Split) -> float:
    return split.load_s


def _enumerate(
    n: int, edges: NDArray[np.int64], kinds: _Kinds, memory_bytes: int, deadline: float
) -> _Ideals | int:
    """The ideals of ``n`` items, or a number of bytes that they and their tables exceed."""
    # Bits, hash, origin and work of each; two to four slots of the hash table; value, ideal and
    # kind of each state. Arrays grow by doubling and exist twice while they do.
    bytes_each = 8 * (-(-n // 64)) * 2 + 56 + _STATE_BYTES * kinds.num_states
    # A kernel cannot look at the clock: try with little memory, which is soon full, then more.
    limit = memory_bytes if deadline == np.inf else min(memory_bytes, 2**24)
    while True:
        began = clock()
        count, bits, spans, links, *made = ideal_kernels.ideals_of(edges, n, bytes_each, limit)
        if count > 0:
            break
        ended = clock()
        if limit == memory_bytes or ended + 4 * (ended - began) > deadline:
            return limit
        limit = min(memory_bytes, 4 * limit)
    work_s = np.zeros(count)
    ideal_kernels.add_up(*made, kinds.work, work_s)
    return _Ideals(count, spans, links, work_s, bits)


def _orders(n: int, edges: NDArray[np.int64]) -> Iterator[NDArray[np.intp]]:
    """Two topological orders: breadth first, as items are numbered, and depth first."""
    yield np.arange(n)
    ptr, after = csr(edges[:, 0], n), edges[:, 1]
    missing = np.bincount(after, minlength=n).tolist()
    ready = [v for v in range(n - 1, -1, -1) if missing[v] == 0]
    order = []
    while ready:
        v = ready.pop()
        order.append(v)
        for w in after[ptr[v] : ptr[v + 1]][::-1].tolist():
            missing[w] -= 1
            if missing[w] == 0:
                ready.append(w)
    yield np.array(order, np.intp)


def _linearised(
    problem: Problem, b: Blocks, order: NDArray[np.intp], kinds: _Kinds, left: _Left
) -> _Split:
    """The best split of items in this order; the first guesses of its load keep it short."""
    n, rank = len(order), np.argsort(order).astype(np.int32)
    line = Blocks.of(
        b,
        compute_s=b.compute_s[order],
        src=np.where(b.src >= 0, rank[b.src], -1).astype(np.int32),
        use_dst=rank[b.use_dst],
        own_bytes=b.own_bytes[order],
        tied_dst=rank[b.tied_dst],
    )
    in_order = replace(kinds, work=kinds.work[order])
    prefixes = _Ideals(
        count=n + 1,
        spans=np.array([[i, i + 1, i] for i in range(n)] + [[n, n, -1]], np.int32),
        links=np.array([[i, i + 1] for i in range(n)], np.int32),
        work_s=np.append(0.0, np.cumsum(in_order.work)),
    )
    least = prefixes.work_s[-1]
    split = _Split()
    for guess in (1.01 * least, 1.05 * least, 1.2 * least, 2 * least, 8 * least, _FAR):
        split = _solve(problem, line, prefixes, in_order, guess, left)
        if split.load_s < _FAR or not split.complete:
            break
    return replace(split, stages=[(kind, order[items]) for kind, items in split.stages])


def _coarse(problem: Problem, item: Ints, b: Blocks, kinds: _Kinds) -> _Split:
    """The best linearised split into stages of whole runs of items, or of items if there is none.

    This is what there is always time for, except where operators run on few devices.
    """
    n = b.num_blocks
    run = np.arange(n) * min(n, 50) // n
    runs = blocks(problem, run[item].astype(np.int32))
    work = np.bincount(run, weights=kinds.work).astype(np.float64)
    order = np.arange(runs.num_blocks)
    split = _linearised(problem, runs, order, replace(kinds, work=work), _Left())
    if split.load_s == _FAR:
        return _linearised(problem, b, np.arange(n), kinds, _Left())
    stages = [(kind, np.flatnonzero(np.isin(run, members))) for kind, members in split.stages]
    return replace(split, stages=stages)


def _solve(
    problem: Problem, b: Blocks, ideals: _Ideals, kinds: _Kinds, below_s: float, left: _Left
) -> _Split:
    """The best split whose load is below ``below_s``."""
    tables = move_tables(problem, b)
    devices = [group[0] for group in kinds.members]
    used = kinds.used
    total = ideals.work_s[-1]
    # The slack is for rounding: a state must not be dropped because of it.
    remaining = np.maximum(total - ideals.work_s - 1e-9 * total, 0.0)
    sizes = {"I": ideals.count, "S": kinds.num_states, "K": len(devices), "M": b.num_blocks}
    program = ideal_kernels.Program.fresh(
        sizes | {"H": len(b.io_s), "Q": len(b.tied_bytes)},
        spans=ideals.spans,
        links=ideals.links,
        compute=np.ascontiguousarray(b.compute_s[:, devices]),
        own_bytes=b.own_bytes,
        io_s=np.ascontiguousarray(b.io_s[:, devices]),
        tied_bytes=b.tied_bytes,
        touch_ptr=tables.touch_ptr,
        touch=tables.touch,
        tied_ptr=tables.tied_ptr,
        tied=tables.tied,
        memory=kinds.memory_bytes,
        used=used,
        count=kinds.count,
        step=kinds.step,
        work_left=remaining,
        price_left=(kinds.count - used) @ kinds.price,
        best=np.array([below_s]),
    )
    value, from_ideal, from_kind = program.value, program.from_ideal, program.from_kind
    # Below what no split can beat, loads need not be told apart: fewer devices then win.
    value[0, 0] = kinds.floor_s
    at = 0
    while at < ideals.count and left:  # which looks at the clock
        at, met, steps = ideal_kernels.extend(program, at, int(min(2_000_000, left.steps)))
        left.sets += 0 if ideals.bits is None else met
        left.steps -= steps
    complete = at >= ideals.count
    state = int(value[-1].argmin())
    if not value[-1, state] < below_s:
        return _Split(complete=complete)
    stages: list[Stage] = []
    load_s, here = float(value[-1, state]), ideals.count - 1
    while here > 0:
        kind = int(from_kind[here, state])
        if kind >= len(kinds.count):  # a device that stays empty
            state -= int(kinds.step[kind - len(kinds.count)])
            continue
        before = int(from_ideal[here, state])
        stages.append((kind, ideals.between(before, here)))
        here, state = before, state - int(kinds.step[kind])
    return _Split(load_s, stages[::-1], complete)


def _nothing_fits(problem: Problem, verb: str) -> str:
    devices = ", ".join(f"{d.name} {d.memory_bytes}" for d in problem.cluster.devices)
    need = int(problem.graph.param_bytes.sum())
    why = f"no contiguous split of {need} bytes of parameters {verb} in memory (bytes: {devices})"
    return f"{why}; {cannot_fit(problem) or NO_PROOF}"
