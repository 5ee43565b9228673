"""What no placement can be better than, proved by arithmetic and by an LP."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import pairwise
from operator import mul

import numpy as np
from numpy.typing import NDArray

from placement.objective import Objective
from placement.problem import ROUNDING, Floats, Problem
from placement.relaxed import (
    EXACT,
    alike,
    call_s,
    load_solver,
    own_bytes,
    period_s,
    pieces_s,
    spread,
)
from placement.timeline import longest_flight
from placement.tools.clock import loads


def lower_bounds(problem: Problem) -> dict[str, float]:
    """Bounds that hold for every placement, by objective: seconds, joules for ``energy``.

    Period and largest load: the fractional load balance without communication (an LP), which also
    holds where replicas take turns. Where they may not (the problem's ``max_phases`` is 1): how
    many of the heaviest colocation groups devices can run (``_whole_bound_s``), for the period how
    long a micro-batch may be under way (``_flight_bound_s``), and for the largest load, where it is
    the problem's objective, what devices write and read (``cut_load_s``). Latency: the largest of
    loads, of the critical path with every operator at its fastest device, of what each device
    alone must run (``_one_device_s``), and of the earliest end of all (``earliest_end_s``); of few
    operators also the energy of every interval of time (``_energetic_bound_s``). It is rounded up
    where all seconds are multiples of one number and nothing takes time to send. Piecewise latency:
    the critical path, and what cannot be together on accelerators (``pieces_s``). Energy (where
    power is known): every operator where it adds least, and every device idle for the shortest
    possible run, whose seconds are worth ``second_j``.

    Where parameters do not fit on a device, latency and period know what libraries keep there
    (``_beside_libraries``).
    """
    return _bounds(problem, tuple(Objective), _LP_SIZE, _LONG_LP, _LP_SIZE)


def lower_bound(problem: Problem) -> float:
    """That of ``lower_bounds`` for the problem's own objective; for latency without a long LP.

    Searches ask for it, and those that they begin with: it is kept with the problem.
    """
    bound_s: float | None = problem.__dict__.get("_lower_bound_s")
    if bound_s is None:
        own = problem.objective
        load_lp = {"latency": _QUICK_LP, "piecewise_latency": 0}.get(own, _LP_SIZE)
        bound_s = _bounds(problem, (own,), load_lp, _QUICK_LP, _LONG_LP)[own]
        problem.__dict__["_lower_bound_s"] = bound_s
    return bound_s


def _bounds(
    problem: Problem, wanted: Sequence[Objective], load_lp: int, call_lp: int, item_lp: int
) -> dict[str, float]:
    """Of some objectives; ``lp``: variables of programs of loads (0: none asks), calls, periods."""
    prices = balance_prices(problem.group_compute_s, load_lp)
    path_s = float(fastest_end_s(problem).max())
    load_s = _load_bound_s(problem, prices, load_lp) if load_lp else 0.0
    of: dict[Objective, Callable[[], float]] = {
        Objective.LATENCY: lambda: _latency_bound_s(problem, path_s, load_s, call_lp),
        Objective.PERIOD: lambda: _period_bound_s(problem, load_s, item_lp),
        Objective.MAX_LOAD: lambda: _max_load_bound_s(problem, load_s, prices),
        Objective.PIECEWISE_LATENCY: lambda: max(path_s, pieces_s(problem)),
    }
    if problem.power is not None:
        of[Objective.ENERGY] = lambda: _energy_bound_j(problem, path_s, load_s)
    bounds = {own.value: bound() for own, bound in of.items() if own in wanted}
    simulated = [o for o in wanted if o in (Objective.LATENCY, Objective.PERIOD)]
    less, without_s = _beside_libraries(problem) if simulated else (problem, 0.0)
    if without_s > min((bounds[o] for o in simulated), default=np.inf):
        for own, bound_s in _bounds(less, simulated, load_lp, call_lp, item_lp).items():
            bounds[own] = max(bounds[own], min(bound_s, without_s))
    return bounds


def _energy_bound_j(problem: Problem, path_s: float, load_s: float) -> float:
    assert problem.power is not None
    busy, least = problem.power.busy_w, np.minimum(problem.power.busy_w, problem.power.idle_w)
    added = np.where(problem.supported, problem.compute_s, 0.0) * (busy - least)
    added = np.where(problem.supported, added, np.inf).min(axis=1).sum()
    run_s = max(path_s / problem.num_microbatches, load_s)
    return float(added + (least.sum() + problem.second_j) * run_s) * EXACT


_SUMS = 500_000  # numbers of groups and sums, for what some of the groups hold
_SAME = 0.999  # of a device's memory: a program that is told of it proves no more


def _beside_libraries(problem: Problem) -> tuple[Problem, float]:
    """The problem with so much memory as is left for parameters, where these do not fit.

    What libraries keep is at least half of the most, or none of the operators that make them do so
    is there: then the load is at least the second number. What is left is no more than what some
    of the groups hold.
    """
    kept, group, held = problem.profile.library_bytes, problem.graph.group, own_bytes(problem)
    room, without_s = problem.memory_bytes.copy(), np.inf
    for d in np.flatnonzero((held.sum() > room) & (problem.worker == np.arange(len(room)))):
        here = np.flatnonzero(problem.worker == d)
        if kept is not None and kept[:, here].any():
            least = kept[:, here][2 * kept[:, here] >= kept[:, here].max()].min()
            group_s, room[d] = problem.group_compute_s.copy(), max(room[d] - least, 1)
            for e in here:
                group_s[group[kept[:, e] >= least], e] = np.inf
            if np.isfinite(group_s).any(axis=1).all():
                prices = balance_prices(group_s, _QUICK_LP)
                without_s = min(without_s, float(priced(group_s, prices).sum()) * EXACT)
        if len(here) == 1 and (held == np.rint(held)).all():
            room[d] = _most_held(held.astype(np.int64), int(room[d]))
    if (room > _SAME * problem.memory_bytes).all():
        return problem, 0.0
    cluster, profile = problem.cluster, replace(problem.profile, library_bytes=None)
    both = zip(cluster.devices, room, strict=True)
    less = tuple(replace(x, memory_bytes=int(r)) for x, r in both)
    return replace(problem, cluster=replace(cluster, devices=less), profile=profile), without_s


def _most_held(held: NDArray[np.int64], room: int) -> int:
    """The largest sum of some of ``held`` that is no more than ``room``, or ``room`` itself."""
    sums = np.zeros(1, np.int64)
    for size, count in zip(*np.unique(held, return_counts=True), strict=True):
        sums = np.unique(sums[:, None] + size * np.arange(count + 1))
        sums = sums[sums <= room]
        if len(sums) * len(held) > _SUMS:
            return room
    return max(int(sums[-1]), 1)


def _fastest_s(problem: Problem) -> Floats:
    """float64 ``[N]``: each operator on the fastest device that can run its group."""
    return np.where(problem.supported, problem.compute_s, np.inf).min(axis=1)


def fastest_end_s(problem: Problem) -> Floats:
    """float64 ``[N]``: when each operator could end if transfers were free."""
    own_s = _fastest_s(problem)
    return _heads_s(own_s, problem.graph.edges) + own_s


def _heads_s(own_s: Floats, edges: NDArray[np.integer]) -> Floats:
    """float64 ``[N]``: the longest path of ``own_s`` before each operator.

    ``edges`` ``[E, 2]``: producers have smaller numbers than consumers.
    """
    own, begin = own_s.tolist(), [0.0] * len(own_s)  # lists: a loop over arrays takes long
    for src, dst in edges[np.argsort(edges[:, 1], kind="stable")].tolist():
        begin[dst] = max(begin[dst], begin[src] + own[src])
    return np.array(begin)


def _latency_bound_s(problem: Problem, path_s: float, load_s: float, lp_size: int) -> float:
    # A load that is one number is exact, but for its sum; path bounds are sums of few.
    bound_s = max(path_s, load_s, _one_device_s(problem), _held_bound_s(problem))
    if problem.num_workers > 1:
        bound_s = max(bound_s, _earliest_end_s(problem, _WORK))
    if problem.num_workers == 2 and _columns(problem) <= lp_size:
        bound_s = max(bound_s, call_s(problem, bound_s))
    grain = grain_s(problem)
    if grain:
        bound_s = float(np.ceil(bound_s / grain - 1e-6)) * grain
    if problem.num_ops <= _ENERGETIC:
        bound_s = max(bound_s, _energetic_bound_s(problem, bound_s, grain))
    return bound_s


def _one_device_s(problem: Problem) -> float:
    """What a device takes for what no other can run, as if it could interrupt operators.

    Each may begin when what precedes it can be done, and is followed by what waits for it. Taking
    at any time the one that is followed longest is best (Jackson 1955; Carlier 1982).
    """
    alone = problem.supported.sum(axis=1) == 1
    if problem.num_devices == 1 or not alone.any():
        return 0.0
    own_s, edges = _fastest_s(problem), problem.graph.edges
    head_s = _heads_s(own_s, edges)
    tail_s = _heads_s(own_s[::-1], len(own_s) - 1 - edges[:, ::-1])[::-1]
    longest_s = 0.0
    for device in range(problem.num_devices):
        ops = np.flatnonzero(alone & problem.supported[:, device])
        coming = sorted(zip(head_s[ops], -tail_s[ops], own_s[ops], strict=True), reverse=True)
        waiting: list[tuple[float, float]] = []  # minus its tail, seconds left
        now_s = 0.0
        while coming or waiting:
            if not waiting:
                now_s = max(now_s, coming[-1][0])
            while coming and coming[-1][0] <= now_s:
                heappush(waiting, coming.pop()[1:])
            minus_tail, left_s = heappop(waiting)
            until_s = min(now_s + left_s, coming[-1][0] if coming else np.inf)
            if until_s < now_s + left_s:
                heappush(waiting, (minus_tail, left_s - (until_s - now_s)))
            else:
                longest_s = max(longest_s, until_s - minus_tail)
            now_s = until_s
    return float(longest_s) * EXACT


def grain_s(problem: Problem) -> float:
    """Seconds of which every latency is a multiple: 0 where none above 1e-6 of all is found.

    All seconds of operators are multiples of it, whatever runs beside them, and nothing takes time
    to be sent, handed over or taken in.
    """
    off, size = ~np.eye(problem.num_devices, dtype=bool), problem.graph.tensor_bytes.max(initial=0)
    sent_s = problem.profile.transfer_s
    if sent_s is None:
        sent_s = problem.link_latency_s + size * problem.link_s_per_byte
    handed_s = problem.link_send_s + size * problem.link_send_s_per_byte + problem.link_wake_s
    handed_s = handed_s + problem.link_receive_s
    slower = problem.loaded_s > np.where(problem.supported, problem.compute_s, np.inf)
    if max(x.max(initial=0) for x in (sent_s[..., off], handed_s[off], slower)) > 0:
        return 0.0
    seconds = np.unique(problem.compute_s[np.isfinite(problem.compute_s)])
    seconds = seconds[seconds > 0]
    if not len(seconds):
        return 0.0
    least = 1e-6 * seconds[-1]
    grain = float(seconds[0])
    for value in seconds.tolist():
        while value > least:  # Euclid's algorithm
            grain, value = value, grain % value
            if grain - value < least:  # rounded down
                value = 0.0
        if grain < 1e3 * least:
            return 0.0
    whole = np.rint(seconds / grain)
    # The mean of all says more than the last remainder.
    grain = float(seconds.sum() / whole.sum())
    exact = np.abs(seconds - whole * grain).max() <= 1e-9 * seconds[-1]
    return grain if exact else 0.0


_ENERGETIC = 128  # operators: intervals grow with their square
_ROUNDS = 8  # of a bound that grows


def _energetic_bound_s(problem: Problem, bound_s: float, grain: float) -> float:
    """A latency from ``bound_s`` up that work in no interval of time contradicts.

    Whenever operators run, those that can begin no earlier and no later than so must do so much
    of their work in an interval; all devices together have its length (Fernandez and Bussell 1973).
    Before and after an operator there is time for what precedes and follows it.
    """
    own_s, edges = _fastest_s(problem), problem.graph.edges
    mirrored = len(own_s) - 1 - edges[:, ::-1]
    devices = problem.num_devices
    head_s = _packed_heads_s(own_s, edges, devices, grain)
    tail_s = _packed_heads_s(own_s[::-1], mirrored, devices, grain)[::-1]
    bound_s = max(bound_s, float((head_s + own_s + tail_s).max()) * EXACT)
    for _ in range(_ROUNDS):
        late_s = bound_s - tail_s - own_s  # latest begins
        first = np.unique(np.concatenate([head_s, late_s]))
        last = np.unique(np.concatenate([head_s + own_s, late_s + own_s]))
        length = last[None, :] - first[:, None]
        work = np.zeros_like(length)
        for begin, late, own in zip(head_s, late_s, own_s, strict=True):
            left = np.clip(begin + own - first, 0.0, own)[:, None]
            right = np.clip(last - late, 0.0, own)[None, :]
            work += np.minimum(np.minimum(left, right), np.maximum(length, 0.0))
        lacking = float((work - problem.num_devices * length)[length > 0].max(initial=0.0))
        more_s = lacking / problem.num_devices
        if more_s <= 1e-9 * bound_s:
            break
        # A bound that is more_s larger lets every latest begin be that much later.
        bound_s += float(np.ceil(more_s / grain - 1e-6)) * grain if grain else more_s
    return bound_s


def _packed_heads_s(
    own_s: Floats, edges: NDArray[np.integer], devices: int, grain: float
) -> Floats:
    """float64 ``[N]``: before this no operator can begin, in view of all that precedes it.

    Of what an operator waits for, any part that begins no earlier than ``a`` and from whose ends
    it is no less than ``b`` to the operator lets it begin at ``a + work / devices + b`` or later.
    """
    n = len(own_s)
    producers: list[list[int]] = [[] for _ in range(n)]
    for src, dst in edges.tolist():
        producers[dst].append(src)
    head_s = np.zeros(n)
    path_s = np.full((n, n), -np.inf)  # the longest from the end of one to another
    for i in range(n):
        for src in producers[i]:
            np.maximum(path_s[:, i], path_s[:, src] + own_s[src], out=path_s[:, i])
            path_s[src, i] = max(path_s[src, i], 0.0)
            head_s[i] = max(head_s[i], head_s[src] + own_s[src])
        before = np.flatnonzero(path_s[:, i] >= 0)
        late, far = np.argsort(-head_s[before]), np.argsort(-path_s[before, i])
        part = np.zeros((len(before), len(before)))
        part[np.argsort(late), np.argsort(far)] = own_s[before]
        part = part.cumsum(axis=0).cumsum(axis=1) / devices
        packed = head_s[before[late], None] + part + path_s[before[far], i]
        least_s = float(packed[part > 0].max(initial=0.0))
        if grain:
            least_s = float(np.ceil(least_s / grain - 1e-6)) * grain
        head_s[i] = max(head_s[i], least_s)
    return head_s


_WORK = 250_000_000  # numbers that are looked at for the end of a call (0.3 s)
_PRICED_WORK = 1_000_000  # of these at each price of a byte
_SIZES = 8  # of the largest parameter that is streamed
_PRICES = 18  # of a byte, that are looked at


@loads
def _load(kernels: str) -> None:
    """Reports and plans that are shown need no compiler."""
    importlib.import_module(f"placement.simulator.{kernels}")


def _earliest_end_s(problem: Problem, work: int, seconds: Floats | None = None) -> float:
    _load("between")
    from placement.simulator.between import earliest_end_s

    return earliest_end_s(problem, work, seconds)


def _held_bound_s(problem: Problem) -> float:
    """A latency where devices cannot hold all parameters; otherwise 0.

    A byte has a price on these, by which operators take longer. Done one after another, none can
    be that makes a call longer by more than its price: so the earliest end of all is then no more
    than the call plus the price of all memory, whatever the price. Devices that stream need two
    buffers for the largest that they read: whichever that is, none larger is streamed, and the
    buffers take room.
    """
    g = problem.graph
    compute_s = np.where(problem.supported, problem.compute_s, np.inf)
    share = g.param_bytes / np.maximum(np.bincount(g.param_use, minlength=len(g.param_bytes)), 1)
    own_bytes = np.bincount(g.param_use_op, share[g.param_use], g.num_ops)  # tied: held once
    all_bytes = own_bytes.sum()
    streams = problem.worker != np.arange(problem.num_devices)
    full = (all_bytes > problem.memory_bytes) & ~streams
    if not full.any():
        return 0.0
    load_solver()
    from scipy.optimize import minimize_scalar

    sizes = np.unique(np.append(g.op_param_bytes, 0)) if streams.any() else np.zeros(1)
    ends = np.unique(np.linspace(len(sizes) - 1, -1, _SIZES + 1).astype(int))[::-1]
    longest_s = np.where(np.isfinite(compute_s), compute_s, 0.0).max(axis=1).sum()

    def priced_s(taken_s: Floats, room_bytes: float, power: float) -> float:
        price = 10.0**power * longest_s / all_bytes
        held_s = price * own_bytes[:, None] * full
        return price * room_bytes - _earliest_end_s(problem, _PRICED_WORK, taken_s + held_s)

    least_s, power = np.inf, -1.0
    for most, less in pairwise(ends):  # the largest that is streamed is of these, or there is none
        too_large = streams & (g.op_param_bytes > sizes[most])[:, None]
        buffers = 2 * sizes[less + 1] if full[problem.worker[streams]].all() else 0
        room_bytes = float(problem.memory_bytes[full].sum() - buffers)
        lacking = partial(priced_s, np.where(too_large, np.inf, compute_s), room_bytes)
        if -lacking(power) < least_s:
            options = {"maxiter": _PRICES}
            best = minimize_scalar(lacking, bounds=(-4, 2), method="bounded", options=options)
            least_s, power = min(least_s, -best.fun), best.x
    return least_s * EXACT


_FLIGHT_WORK = 3_000_000  # numbers that are looked at for the end of a micro-batch (5 ms)
_PATHS = 8  # that a program is told of
_PLACED = 200  # of rows put somewhere, that are looked at
_COUNTED = 16  # groups per device: of more, how many a device can run says no more than loads
_LP_SIZE, _LONG_LP, _QUICK_LP = 200_000, 20_000, 5_000  # variables: seconds, one, a moment
_NARROW = 1 / 256  # shares so close are not told apart


def _columns(problem: Problem) -> int:
    """Variables of a program of ``relaxed``, about."""
    crossing = 4 * len(problem.graph.use_dst) + problem.num_ops
    return problem.group_compute_s.size + crossing * (problem.num_workers == 2)


def _period_bound_s(problem: Problem, load_s: float, lp_size: int) -> float:
    flight_s = _flight_bound_s(problem, load_s, lp_size)
    return max(flight_s, _busy_bound_s(problem, load_s, lp_size))


def _busy_bound_s(problem: Problem, load_s: float, lp_size: int) -> float:
    """A period from ``load_s``, a load alone, up: operators are slower beside busy devices.

    Of ``D`` devices with loads ``a[d]`` alone, ``m`` the largest, let
    ``share = (sum a - m) / m / (D - 1)``. No operator is stretched by less (``durations``), and
    ``sum a = m * (1 + (D - 1) * share)``. ``relaxed.period_s`` bounds the period for an interval
    of shares. That of the least bound is halved again and again.

    ``batch_s`` is spread over the operators by their seconds, of which the busiest device has
    ``1 / D`` or more; and, as none of them is stretched by more than ``longer``,
    ``1 / (1 + share * (longer * D - 1))`` or more.
    """
    devices, batch_s = problem.num_workers, problem.profile.batch_s
    if problem.num_microbatches == 1:
        return load_s
    if problem.max_phases > 1 or _fastest_s(problem).sum() == 0.0:
        batch_s = 0.0  # some phases may have less of it, as has what takes no time
    stretches, longer = problem.profile.loaded_s is not None and devices > 1, 1.0
    if stretches:
        took_s, most_s = (
            problem.graph.per_group(np.where(problem.supported, s, 0.0))
            for s in (problem.compute_s, problem.loaded_s)
        )
        longer = float((most_s / np.maximum(took_s, 1e-300))[most_s > 0].max(initial=1.0))

    columns, tells_more = _columns(problem), stretches or devices == 2 or problem.cluster.streaming
    solves = devices > 1 and tells_more and columns <= lp_size

    def between_s(low: float, high: float) -> float:
        more_s = batch_s * max(1 / devices, 1 / (1 + high * (longer * devices - 1)))
        least_s = load_s + more_s * EXACT
        return max(least_s, period_s(problem, low, high, more_s)) if solves else least_s

    parts = [(between_s(0.0, 1.0), 0.0, 1.0)]
    while solves and stretches and parts[0][2] - parts[0][1] > _NARROW and lp_size > 0:
        bound_s, low, high = heappop(parts)
        for ends in (low, (low + high) / 2), ((low + high) / 2, high):
            heappush(parts, (max(bound_s, between_s(*ends)), *ends))
        lp_size -= columns
    return parts[0][0]


def _flight_bound_s(problem: Problem, load_s: float, lp_size: int) -> float:
    """A period at which a micro-batch ends before too many others begin (``longest_flight``).

    No path through it is longer; and devices have a period each, so that where the fast ones are
    kept for a path, slow ones do the rest. Placements in fractions (an LP) tell the longest path,
    which is then a row of theirs.
    """
    periods = longest_flight(problem.num_microbatches, problem.max_in_flight)
    if problem.max_phases > 1 or not np.isfinite(periods):
        return load_s
    path_s = float(fastest_end_s(problem).max())
    if periods == 1.0:  # a call, each time
        return _latency_bound_s(problem, path_s, load_s, min(lp_size, _QUICK_LP))
    bound_s = max(load_s, path_s / periods * EXACT)
    alone_s = problem.compute_s.sum(axis=0).min()  # a call, at most
    if problem.num_workers > 1 and alone_s > periods * bound_s:
        bound_s = max(bound_s, _earliest_end_s(problem, _FLIGHT_WORK) / periods)
    own_s, _, count = alike(np.where(problem.supported, problem.compute_s, np.inf))
    if problem.cluster.streaming or own_s.size > lp_size or len(count) == 1:
        return bound_s
    edges, group = problem.graph.edges, problem.graph.group
    group_s = problem.graph.per_group(own_s)
    own_s[np.isinf(own_s)] = 0.0
    (program, on, unit_s), time = spread(group_s, count), np.zeros(1, np.intp)
    longest_s, path = _longest_path(own_s.max(axis=1), edges)
    for _ in range(_PATHS):
        if longest_s <= periods * bound_s * (1 + ROUNDING):
            break
        bound_s = max(bound_s, program.solve()[0] * unit_s * EXACT)
        longest_s, path = _longest_path((program.values[on][group] * own_s).sum(axis=1), edges)
        program.row(0.0, (on[group[path]], own_s[path]), (time, -periods * unit_s))
    return bound_s


def _longest_path(own_s: Floats, edges: NDArray[np.integer]) -> tuple[float, NDArray[np.intp]]:
    """Its seconds, and its operators."""
    head_s = _heads_s(own_s, edges)
    last, end_s = int((head_s + own_s).argmax()), head_s + own_s
    before = np.full(len(own_s), -1)
    on_time = head_s[edges[:, 1]] == end_s[edges[:, 0]]
    before[edges[on_time, 1]] = edges[on_time, 0]
    path = [last]
    while before[path[-1]] >= 0:
        path.append(int(before[path[-1]]))
    return float(end_s[last]), np.array(path)


def _max_load_bound_s(problem: Problem, load_s: float, prices: Floats) -> float:
    """Of a problem that asks for it also with all that is written and read."""
    if problem.objective is not Objective.MAX_LOAD or problem.max_phases > 1:
        return load_s
    _load("cuts")
    from placement.simulator.cuts import cut_load_s

    return cut_load_s(problem, prices, load_s)


def _load_bound_s(problem: Problem, prices: Floats, lp_size: int = _LP_SIZE) -> float:
    groups = problem.group_compute_s
    least_s = float(priced(groups, prices).sum()) * EXACT
    if problem.max_phases == 1:
        least_s = _whole_bound_s(groups, prices, least_s)
    full = problem.graph.param_bytes.sum() > problem.memory_bytes
    if full.any() and not problem.cluster.streaming and groups.size <= lp_size:
        least_s = max(least_s, period_s(problem, sends=False))
    return least_s


def _whole_bound_s(seconds: Floats, prices: Floats, least_s: float) -> float:
    """The largest load, from ``least_s`` up, where rows of ``[G, D]`` stay whole.

    Of the ``k`` heaviest a device has no more than its fastest ones of them that it can run in a
    load, and all devices must have ``k``. And the heaviest are put wherever they can be, the rest
    in fractions at ``prices``: what can become least is looked at first.
    """
    s = seconds[np.argsort(-seconds.min(axis=1), kind="stable")]
    least_s = max(least_s, float(s[0].min()))
    for k in range(2, min(len(s), _COUNTED * s.shape[1]) + 1):
        ends = np.sort(s[:k], axis=0).cumsum(axis=0)
        least_s = max(least_s, float(np.partition(ends, k - 1, axis=None)[k - 1]) * EXACT)
    kinds = alike(s)[1]
    column = np.argsort(kinds, kind="stable")
    rest = [*priced(s, prices)[::-1].cumsum()[::-1].tolist(), 0.0]
    kind, price, rows = kinds[column].tolist(), prices[column].tolist(), s[:, column].tolist()
    open_ = [(least_s, 0, (0.0,) * len(kind))]  # a bound, minus the rows that are put, loads
    seen = set(open_)
    for _ in range(_PLACED):
        bound_s, put, loads = open_[0]
        if -put == len(rows):
            break
        heappop(open_)
        spent_s = sum(map(mul, price, loads))
        for d, took_s in enumerate(rows[-put]):
            if took_s == np.inf:
                continue
            here = [*loads[:d], loads[d] + took_s, *loads[d + 1 :]]
            least = max(here[d], spent_s + price[d] * took_s + rest[1 - put]) * EXACT
            same = tuple(load for _, load in sorted(zip(kind, here, strict=True)))
            new = max(bound_s, least), put - 1, same
            if new not in seen:
                seen.add(new)
                heappush(open_, new)
    return open_[0][0]


def priced(seconds: Floats, prices: Floats) -> Floats:
    """float64 ``[G]``: each row of ``seconds [G, D]`` where it is cheapest; inf entries are out."""
    finite = np.isfinite(seconds)
    return np.where(finite, np.where(finite, seconds, 0.0) * prices, np.inf).min(axis=1)


def balance_prices(seconds: Floats, lp_size: int = _LP_SIZE) -> Floats:
    """float64 ``[D]`` prices ``y >= 0`` of a second on each device, ``sum y = 1``.

    For *any* such prices ``sum_g min_d y_d * seconds[g, d]`` is at most the largest load of
    every assignment; these make it largest (the dual of the fractional load balance). Equal
    devices get equal prices; with two kinds of device the optimum is one of the rows' ratios,
    with more kinds HiGHS solves the LP, unless it has more than ``lp_size`` variables: it may
    take minutes, and all prices are equal then.
    """
    s = np.asarray(seconds, dtype=np.float64)
    s = s[s.min(axis=1) > 0]
    kinds, kind, count = alike(s)
    if len(s) == 0 or len(count) == 1 or (len(count) > 2 and kinds.size > lp_size):
        return np.full(s.shape[1], 1.0 / s.shape[1])
    return (_two_prices if len(count) == 2 else _lp_prices)(kinds, count)[kind]


def _two_prices(s: Floats, count: NDArray[np.intp]) -> Floats:
    """Prices of two kinds of device, float64 ``[2]``: try every row's ratio, and the extremes."""
    first, second = s[:, 0], s[:, 1]
    both = np.isfinite(s).all(axis=1)
    only = [s[~np.isfinite(s[:, 1 - k]), k].sum() for k in (0, 1)]
    a, b = first[both], second[both]
    order = np.argsort(b / a, kind="stable")
    a, b, ratio = a[order], b[order], (b / a)[order]
    # At the ratio r = y_0 / y_1 a row costs min(r * first, second): second where b / a <= r.
    below, above = np.append(0.0, np.cumsum(b))[1:], (a.sum() - np.cumsum(a))
    value = (ratio * (only[0] + above) + only[1] + below) / (ratio * count[0] + count[1])
    best = int(np.argmax(value)) if len(value) else -1
    extremes = (only[0] / count[0], only[1] / count[1])
    if best < 0 or max(extremes) > value[best]:
        return np.where(np.arange(2) == np.argmax(extremes), 1.0 / count, 0.0)
    return np.array([ratio[best], 1.0]) / (ratio[best] * count[0] + count[1])


def _lp_prices(s: Floats, count: NDArray[np.intp]) -> Floats:
    """Prices of several kinds of device, float64 ``[K]``, from the program's multipliers."""
    prices = spread(s, count)[0].solve()[1][-len(count) :]
    total = float(prices @ count)
    return prices / total if total > 0 else np.full(len(count), 1.0 / count.sum())
