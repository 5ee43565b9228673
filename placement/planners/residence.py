"""Which parameters stay on a GPU, which are streamed there, and which the CPU reads where they lie.

And how much of the GPU's memory is the buffer that they are streamed through, in which order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from placement.bounds import lower_bound
from placement.bounds.calls import Call
from placement.bounds.copies import streaming_program
from placement.bounds.memory_lp import own_bytes
from placement.cluster import Cluster
from placement.objective import Objective
from placement.planners import Among, load
from placement.planners.even_layers import layer_units
from placement.problem import Problem, Solution
from placement.search.evaluation import Search, single_devices
from placement.search.list_schedule import room_bytes
from placement.simulator import evaluate, score
from placement.tools.lp import EXACT

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ResidenceParams:
    """The numbers of ``Residence`` and of buffers.

    Attributes:
        prices: of a second of the link, in seconds of a device.
        filled: shares of the memory that are filled; the rest is for tensors.
        golden: multiples of it, less the whole, are spread evenly.
        tries, work: placements for each buffer, and operators in them, at most.
        rooms: of buffers, in the most that an operator reads.
    """

    prices: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0, 2.0)
    filled: tuple[float, ...] = (1.0, 0.95, 0.85, 0.7, 0.5)
    golden: float = (5**0.5 - 1) / 2
    tries: int = 300
    work: int = 60_000
    rooms: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 2.25, 2.5, 3.0, 4.0, 6.0, 8.0)


PARAMS = ResidenceParams()


@dataclass(frozen=True)
class Residence:
    """Every colocation group, or every layer, by one of three rules.

    ``greedy``: what saves most seconds per byte by staying on the GPU stays there, until its memory
    is full; of what saves alike one after another, or spread over the model. The rest is streamed,
    or computed on the CPU, where it costs less at a price for each second of the link (as FlexGen,
    ICML 2023, splits tensors by a linear program, and llama.cpp's ``-ot`` is set by hand). Several
    prices are simulated. ``exact``: the program of ``bounds.calls`` (of a call of two devices) or
    ``bounds.copies`` in whole numbers, by HiGHS: no placement is better in it; what it proves of a
    call holds in the simulator too. Single devices take part, and are all where nothing streams.

    Attributes:
        way: ``greedy`` or ``exact``.
        seconds: budget; None: 10 of the program.
        evaluations: budget, of which a program counts as none.
    """

    way: Literal["greedy", "exact"] = "greedy"
    seconds: float | None = None
    evaluations: int | None = None
    among: ClassVar[Among] = Among(quick=True, several=True)

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, self.seconds, self.evaluations)
        search.costs(single_devices(problem))
        bound = lower_bound(problem)
        if self.way == "exact":
            return search.solution(max(bound, self._exact(search)), way=self.way)
        each = np.arange(problem.graph.num_groups, dtype=np.int32)
        units = [each, layer_units(problem)] if problem.cluster.streaming else []
        rules = product((True, False), PARAMS.prices, PARAMS.filled)
        for unit, (spread, price, filled) in ((u, rule) for rule in rules for u in units):
            if not search.left:
                break
            count = int(unit.max()) + 1
            turn = np.arange(count)
            turn = np.argsort(turn * PARAMS.golden % 1.0) if spread else turn
            search.cost(_by_saving(problem, unit, turn, price, filled))
        return search.solution(bound, way=self.way)

    def _exact(self, search: Search) -> float:
        """Seconds that no placement is better than; the program's answer is scored."""
        problem = search.problem
        if not problem.cluster.streaming:
            return 0.0
        if problem.objective is Objective.LATENCY and problem.num_workers == 2:
            call = Call(problem)
            program, on, unit_s = call.program, call.whole, call.unit_s
        else:
            placed = streaming_program(problem)
            program, on, unit_s = placed.program, placed.on, placed.unit_s
        least = program.whole(on, 10.0 if self.seconds is None else self.seconds)
        if program.answer is not None and search.left:
            search.cost(program.answer[on].argmax(axis=1).astype(np.int32))
        return least * unit_s * EXACT if problem.objective is Objective.LATENCY else 0.0


def _by_saving(
    problem: Problem,
    unit: NDArray[np.integer],
    turn: NDArray[np.integer],
    price: float,
    filled: float,
) -> NDArray[np.int32]:
    """int32 ``[G]``: a device for each unit of groups; of those that save alike by ``turn``."""
    streaming = problem.cluster.streaming
    count = int(unit.max()) + 1

    def of_units(values: Floats) -> Floats:
        total = np.zeros((count, *values.shape[1:]))
        np.add.at(total, unit, values)
        return total

    cost = of_units(problem.without_copies.group_compute_s)
    cost[:, streaming] += price * of_units(problem.graph.per_group(problem.copy_s.T))
    size, room = of_units(own_bytes(problem)), filled * room_bytes(problem)
    kinds = [d.kind for d in problem.cluster.devices]
    cards = [d for d, k in enumerate(kinds) if k != "cpu" and d not in streaming]
    cheap_s = np.delete(cost, cards, axis=1)
    others = np.delete(np.arange(problem.num_devices), cards)
    choice = others[cheap_s.argmin(axis=1)]
    for card in cards:
        with np.errstate(invalid="ignore"):  # inf - inf is of what neither can run
            saved_s = cost[np.arange(count), choice] - cost[:, card]
        each = saved_s / np.maximum(size, 1.0)
        most = each[(size > 0) & np.isfinite(each)].max(initial=1e-300)
        alike = np.round(each / most, 2)
        order = turn[np.argsort(-alike[turn], kind="stable")]
        held = 0.0
        for u in order[saved_s[order] >= 0]:
            if held + size[u] <= room[card]:
                choice[u], held = card, held + size[u]
    choice = choice[unit].astype(np.int32)
    unable = ~np.isfinite(problem.group_compute_s[np.arange(len(choice)), choice])
    choice[unable] = problem.group_compute_s[unable].argmin(axis=1)
    return choice


def with_buffers(problem: Problem) -> Problem:
    """The problem with the size of each buffer, and the order, that are best in a short search.

    Operators run in the order that the problem has, as they are written, or so that copies and
    operators share the time evenly (``Problem.priority``): then copies often come between operators
    that need none. What is said of a buffer is kept; the same problem where nothing streams, or
    nothing fits.
    """
    streaming = problem.cluster.streaming
    if not streaming or problem.objective.is_analytic:
        return problem
    open_ = [d for d in streaming if problem.cluster.devices[d].buffer_bytes is None]
    most = int(problem.copied_bytes.max())
    rooms = PARAMS.rooms if open_ else ()
    orders = {problem.priority.tobytes(): problem}
    for order in ("graph", "even"):
        facts = problem.profile.provenance | {"order": order}
        other = replace(problem, profile=replace(problem.profile, provenance=facts))
        orders.setdefault(other.priority.tobytes(), other)
    tries = []
    for x in orders.values():
        tries += [x, *(_with(x, open_, int(room * most)) for room in rooms)]
    if len(tries) == 1:
        return problem
    values = [_searched(x).value_s for x in tries]
    best = int(np.argmin(values))
    return tries[best] if values[best] < values[0] * (1 - 1e-3) else problem


def _searched(problem: Problem) -> Solution:
    """The answer of a short search that begins with ``Residence``'s."""
    start = Residence()(problem)
    tries = max(30, min(PARAMS.tries, PARAMS.work // problem.num_ops))
    return load("macro_search", start=lambda _: start, evaluations=tries)(problem)


def refitted(
    problem: Problem, solution: Solution, told: Cluster | None = None
) -> tuple[Problem, Solution]:
    """The size of buffers that is best for a placement, with the memory that it leaves.

    A plan is called and streamed through: of sizes that leave room for both, where there are any.
    What ``told`` says of a buffer is kept: the devices as they were before ``with_buffers``.
    """
    streaming, most = problem.cluster.streaming, int(problem.copied_bytes.max())
    if told is not None:
        streaming = [d for d in streaming if told.devices[d].buffer_bytes is None]
    if not streaming or not most or solution.schedule is not None:
        return problem, solution
    tries = [problem, *(_with(problem, streaming, int(room * most)) for room in PARAMS.rooms)]
    values = [float(score(x, solution.placement[None])[0]) for x in tries]
    fits = [bool(evaluate(x, solution.placement[None]).feasible[0]) for x in tries]
    best = min(range(len(tries)), key=lambda i: (not fits[i], values[i]))
    if fits[best] == fits[0] and not values[best] < values[0] * (1 - 1e-3):
        return problem, solution
    return tries[best], replace(solution, value_s=values[best], lower_bound_s=None)


def _with(problem: Problem, streaming: list[int], room: int) -> Problem:
    devices = list(problem.cluster.devices)
    for d in streaming:
        devices[d] = replace(devices[d], buffer_bytes=max(room, 1))
    return replace(problem, cluster=replace(problem.cluster, devices=tuple(devices)))
