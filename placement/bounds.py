"""What no placement can be better than, proved by arithmetic and by an LP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cmp_to_key
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from placement.objective import Objective
from placement.problem import Floats, Problem
from placement.tools.clock import loads


def lower_bounds(problem: Problem) -> dict[str, float]:
    """Bounds that hold for every placement, by objective: seconds, joules for ``energy``.

    Period and largest load: the fractional load balance without communication (an LP), which also
    holds where replicas take turns; and, where they may not (the problem's ``max_phases`` is 1),
    the heaviest colocation group at its cheapest device. Latency: the largest of that, of the
    critical path with every operator at its fastest device, and of what each device alone must run
    (``_one_device_s``); of few operators also the energy of every interval of time
    (``_energetic_bound_s``). It is rounded up where all seconds are multiples of one number and
    nothing takes time to send. Energy (where power is known): every
    operator where it adds least, and every device idle for the shortest possible run, whose
    seconds are worth ``second_j``.
    """
    path_s, load_s = _path_bound_s(problem), _load_bound_s(problem)
    bounds = {
        "latency": _latency_bound_s(problem, path_s, load_s),
        "period": load_s,
        "max_load": load_s,
        "piecewise_latency": path_s,
    }
    if problem.power is not None:
        busy, least = problem.power.busy_w, np.minimum(problem.power.busy_w, problem.power.idle_w)
        added = np.where(problem.supported, problem.compute_s, 0.0) * (busy - least)
        added = np.where(problem.supported, added, np.inf).min(axis=1).sum()
        run_s = max(path_s / problem.num_microbatches, load_s)
        waiting_w = least.sum() + problem.second_j
        bounds["energy"] = float(added + waiting_w * run_s) * (1 - 1e-12)
    return bounds


def lower_bound(problem: Problem) -> float:
    """That of ``lower_bounds`` for the problem's own objective; for latency without a long LP."""
    if problem.objective is Objective.ENERGY:
        return lower_bounds(problem)[problem.objective]
    if problem.objective.is_throughput:
        return _load_bound_s(problem)
    path_s = _path_bound_s(problem)
    if problem.objective is Objective.LATENCY:
        return _latency_bound_s(problem, path_s, _load_bound_s(problem, _QUICK_LP))
    return path_s


def _fastest_s(problem: Problem) -> Floats:
    """float64 ``[N]``: each operator on the fastest device that can run its group."""
    return np.where(problem.supported, problem.compute_s, np.inf).min(axis=1)


def _path_bound_s(problem: Problem) -> float:
    own_s = _fastest_s(problem)
    return float((_heads_s(own_s, problem.graph.edges) + own_s).max())


def _heads_s(own_s: Floats, edges: NDArray[np.integer]) -> Floats:
    """float64 ``[N]``: the longest path of ``own_s`` before each operator.

    ``edges`` ``[E, 2]``: producers have smaller numbers than consumers.
    """
    own, begin = own_s.tolist(), [0.0] * len(own_s)  # lists: a loop over arrays takes long
    for src, dst in edges[np.argsort(edges[:, 1], kind="stable")].tolist():
        begin[dst] = max(begin[dst], begin[src] + own[src])
    return np.array(begin)


def _latency_bound_s(problem: Problem, path_s: float, load_s: float) -> float:
    # A load that is one number is exact, but for its sum; path bounds are sums of few.
    bound_s, grain = max(path_s, load_s, _one_device_s(problem)), grain_s(problem)
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
    return float(longest_s) * (1 - 1e-12)


def grain_s(problem: Problem) -> float:
    """Seconds of which every latency is a multiple: 0 where none above 1e-6 of all is found.

    All seconds of operators are multiples of it, and nothing takes time to be sent.
    """
    sent = problem.profile.transfer_s
    if sent is None:
        off = ~np.eye(problem.num_devices, dtype=bool)
        bytes_s = problem.link_s_per_byte[off].max(initial=0.0) * problem.graph.tensor_bytes.max(
            initial=0
        )
        longest_s = problem.link_latency_s[off].max(initial=0.0) + bytes_s
    else:
        longest_s = sent.max(initial=0.0)
    if longest_s > 0:
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
    bound_s = max(bound_s, float((head_s + own_s + tail_s).max()) * (1 - 1e-12))
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


_LP_SIZE, _QUICK_LP = 200_000, 5_000  # variables; a moment for a search that goes on anyway


def _load_bound_s(problem: Problem, lp_size: int = _LP_SIZE) -> float:
    groups = problem.group_compute_s
    heaviest = float(groups.min(axis=1).max()) if problem.max_phases == 1 else 0.0
    return max(heaviest, balance_bound(groups, lp_size))


def balance_bound(seconds: Sequence[Sequence[float]] | Floats, lp_size: int = _LP_SIZE) -> float:
    """Least largest load when each row of ``[G, D]`` seconds is spread over the devices.

    Summed up from the ``balance_prices``, so that it holds whatever a solver's tolerance.
    """
    s = np.asarray(seconds, dtype=np.float64)
    return float(priced(s, balance_prices(s, lp_size)).sum()) * (1 - 1e-12)


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
    kinds, kind, count = _equal_columns(s)
    if len(s) == 0 or len(count) == 1 or (len(count) > 2 and kinds.size > lp_size):
        return np.full(s.shape[1], 1.0 / s.shape[1])
    return (_two_prices if len(count) == 2 else _lp_prices)(kinds, count)[kind]


def _equal_columns(s: Floats) -> tuple[Floats, NDArray[np.intp], NDArray[np.intp]]:
    """``np.unique(s, axis=1)`` with inverse and counts; that compares rows entry by entry."""
    columns = np.ascontiguousarray(s.T)

    def compare(a: int, b: int) -> int:
        differs = columns[a] != columns[b]
        at = int(differs.argmax()) if len(differs) else 0
        if not differs[at : at + 1].any():
            return 0
        return -1 if columns[a, at] < columns[b, at] else 1

    order = sorted(range(len(columns)), key=cmp_to_key(compare))
    new = [i == 0 or compare(order[i - 1], d) != 0 for i, d in enumerate(order)]
    kind = np.empty(len(columns), np.intp)
    kind[order] = np.cumsum(new) - 1
    return columns[np.array(order)[new]].T, kind, np.bincount(kind)


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


@loads
def _load_solver() -> None:
    """SciPy takes longer to import than a small program to solve."""
    import scipy.optimize
    import scipy.sparse  # noqa: F401


def _lp_prices(s: Floats, count: NDArray[np.intp]) -> Floats:
    """Prices of several kinds of device, float64 ``[K]``, from the LP's marginals."""
    _load_solver()
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    rows, kinds = np.nonzero(np.isfinite(s))
    k, d = len(rows), s.shape[1]
    unit = float(s[rows, kinds].max())
    load = coo_matrix(
        (
            np.append(s[rows, kinds] / unit, -count.astype(np.float64)),
            (np.append(kinds, np.arange(d)), [*range(k), *[k] * d]),
        )
    )
    once = coo_matrix((np.ones(k), (rows, np.arange(k))), shape=(len(s), k + 1))
    answer = linprog(
        np.append(np.zeros(k), 1.0),
        A_ub=load,
        b_ub=np.zeros(d),
        A_eq=once,
        b_eq=np.ones(len(s)),
        method="highs",
    )
    prices = np.maximum(-answer.ineqlin.marginals, 0.0) if answer.success else np.zeros(d)
    total = float(prices @ count)
    return prices / total if total > 0 else np.full(d, 1.0 / count.sum())
