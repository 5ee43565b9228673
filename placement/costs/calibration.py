"""Costs between devices, and speeds of devices, from placements that ran: see ``calibrated``."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement import planners
from placement.cluster import Cluster
from placement.executor.alone import is_short
from placement.executor.runner import Runner
from placement.graph import OpGraph
from placement.objective import Objective
from placement.problem import Problem
from placement.profile import Profile
from placement.simulator import evaluate

Floats = NDArray[np.float64]
Way = frozenset[tuple[str, str]]  # pairs of devices, by name


class CalibrationEffort(NamedTuple):
    """What runs, and how costs are found then: more of it takes longer and misses less."""

    # Random placements, and what a planner answers.
    cuts: tuple[int, ...] = (1, 3, 7, 15, 31, 63, 127)  # of each random one
    cut_share: float = 0.25  # of the operators: there are no more cuts
    seed: int = 20
    evaluations: int = 400  # placements that the planner may try
    # How often each of them runs.
    warm: int = 3  # micro-batches that are not counted
    runs: tuple[int, int] = (3, 8)  # micro-batches one by one, and in a pipeline
    run_s: float = 0.05  # what takes less runs more micro-batches ...
    most_times: int = 32  # ... up to so many times as many
    rounds: int = 2  # of which the faster counts, as others disturb one of them
    long_s: float = 20.0  # after which there is no second round: long runs are disturbed alike
    # How costs are found that explain it.
    simulated: int = 16  # micro-batches at most
    steps: int = 12  # at most
    enough: float = 0.99  # share of what is unlikely: a step that leaves more is the last
    slope_step: float = 0.1  # over which slopes are: over small ones they would see one schedule
    damping: tuple[float, ...] = (0.0, 0.3, 3.0, 30.0)  # of slopes; the best step is taken


class Likely(NamedTuple):
    """How far from what was measured a cost is likely to be."""

    error: float = 0.03  # logarithm by which a prediction is off
    # ... and what a GPU takes alone by a part of that. Launched by the calling thread it is faster
    # than beside others, which transfers must explain then: with nothing is more compared.
    sure: float = 3.0
    factor: float = 1.0  # logarithm for what transfers, waking and neighbours cost
    seconds: float = 4e-5  # more, of devices of one kind ...
    unlike_s: float = 2e-4  # ... and of several


EFFORT, LIKELY = CalibrationEffort(), Likely()
LIKELY_TIMES = {"cpu": 0.1, "cuda": 0.5}  # logarithm for all operators of a device of this kind


def calibrated(
    graph: OpGraph,
    cluster: Cluster,
    profile: Profile,
    compiled: Sequence[NDArray[np.int32]] = (),
) -> Profile:
    """The profile with costs between devices, and speeds of devices, as they are in this graph.

    What a transfer, a wake-up and a busy neighbour cost apart from everything else is not what
    they cost in the middle of a model: caches, the interpreter and the sleep of idle cores take
    part. So single devices, replicas and a few placements run as a user runs them, and the costs
    that are most probable are taken, where each is near what was measured, and what ran near what
    is predicted (see ``_most_probable``). Replicas send nothing: of neighbours they tell most.
    With those costs a planner answers, and what it answered runs too: whatever is predicted too
    short by mistake is what a planner finds, and what no other placement may show.

    Of a CPU both speeds count alike: that which was measured, and that it had meanwhile. Of a GPU
    the latter counts: there recording takes the thread that launches as long as many operators do.
    By how much what ran is still missed is the profile's ``error``. A placement that a GPU has no
    memory for tells nothing; where that are all, the profile stays as it is.

    Args:
        compiled: if any, placements that run instead of all these, compiled; periodic ones last.
    """
    least = np.where(np.isfinite(profile.compute_s), profile.compute_s, 0.0)
    many = EFFORT.runs[1] * _repeated(least.sum(axis=0).max())
    few = min(many, EFFORT.simulated)
    problem = Problem(graph, cluster, profile, num_microbatches=few)
    ran, measured = _ran(problem, compiled or _for_calibration(problem), bool(compiled))
    if not ran:
        return profile
    on_gpu = np.array([device.kind == "cuda" for device in cluster.devices])

    def with_costs(costs: Costs) -> Profile:
        return scaled(profile, replace(costs, times=costs.times ** np.where(on_gpu, 1.0, 0.5)))

    costs, missed = _most_probable(problem, ran, measured)
    chosen = [] if compiled else _answers(replace(problem, profile=with_costs(costs)))
    answers, took = _ran(problem, chosen)
    if answers:
        ran, measured = [*answers, *ran], np.concatenate([took, measured])
        costs, missed = _most_probable(problem, ran, measured)
    # What all placements have in common does not make one look better than another.
    known = [x[np.isfinite(x)] for x in missed.T]
    apart = np.concatenate([x - np.median(x) for x in known if len(x)])
    facts = {
        "calibration": {"neighbours": costs.neighbours.tolist(), "waking": costs.waking},
        "ways": [[*sorted(way)[0], *own] for way, own in costs.ways.items()],
        "alone": costs.times.tolist(),
        "error": float(np.abs(apart).mean()),
    }
    profile = replace(with_costs(costs), provenance=profile.provenance | facts)
    calls = [p for p in ran if p.ndim == 1]
    alone_s = evaluate(replace(problem, profile=profile), np.stack(calls)).latency_s
    own_s = _overhead_s(problem, calls, alone_s, measured[: len(calls), 0])
    return replace(profile, overhead_s=own_s)


def _overhead_s(
    problem: Problem, placements: list[NDArray[np.int32]], simulated_s: Floats, measured_s: Floats
) -> Floats:
    """float64 ``[D]``: by how much calls ``[P]`` of single devices took longer than is simulated.

    Where none ran it is what the profile says.
    """
    known = problem.profile.overhead_s
    overhead_s = np.zeros(problem.num_devices) if known is None else known.copy()
    for p, least_s, took_s in zip(placements, simulated_s, measured_s, strict=True):
        if p.ndim == 1 and (p == p[0]).all() and np.isfinite(took_s):
            overhead_s[p[0]] = max(0.0, took_s - least_s)
    return overhead_s


def _repeated(whole_s: float) -> int:
    """How many times as often something runs that takes so long: a GPU is warm late."""
    return int(np.clip(EFFORT.run_s / whole_s, 1, EFFORT.most_times))


def _for_calibration(problem: Problem) -> list[NDArray[np.int32]]:
    """Single devices, cuts, and replicas where every device can hold all.

    Of a graph in pieces, every second one is dealt out: piece ``k`` is ``k`` devices further on.
    """
    singles = np.repeat(np.arange(problem.num_devices, dtype=np.int32)[:, None], problem.num_ops, 1)
    able = problem.supported.all(axis=0)
    replicas = [singles] if able.all() and problem.buffers_stay(singles[None])[0] else []
    parts = pieces(problem, EFFORT.cuts, EFFORT.seed)
    cuts = [*parts]
    if (number := problem.graph.piece) is not None:
        of_group = problem.graph.per_group(number, np.maximum)[problem.graph.group]
        dealt = (np.concatenate([0 * parts[:1], parts[::2]]) + of_group) % problem.num_devices
        fits = np.isfinite(problem.compute_s[np.arange(problem.num_ops), dealt]).all(axis=1)
        cuts = [*dealt[fits].astype(np.int32), *parts[1::2]]
    return [*singles[able], *cuts, *replicas]


def _answers(problem: Problem) -> list[NDArray[np.int32]]:
    """What a planner answers, for a call and for a stream, where it uses several devices."""
    search = planners.load("local_search", evaluations=EFFORT.evaluations)
    answers = {}
    for objective in (Objective.LATENCY, Objective.PERIOD):
        try:
            p = planners.solve(search, replace(problem, objective=objective)).placement
        except planners.PlannerError as error:
            warnings.warn(f"calibrated without it: {error}", RuntimeWarning, stacklevel=2)
            continue
        if (p != p[0]).any():
            answers[p.tobytes()] = p
    return list(answers.values())


def _ran(
    problem: Problem, placements: Sequence[NDArray[np.int32]], compiled: bool = False
) -> tuple[list[NDArray[np.int32]], Floats]:
    """Those of the placements that fit, and what they took: the faster of the rounds.

    Returns float64 ``[P, 2]`` latency and period. Replicas, whose turns are unlike, have no latency
    (nan).
    """
    rows, began = np.arange(problem.num_ops), time.perf_counter()
    rounds = np.full((EFFORT.rounds, len(placements), 2), np.nan)
    for r in range(EFFORT.rounds):
        if r and time.perf_counter() - began > EFFORT.long_s:
            rounds = rounds[:r]
            break
        for i, p in enumerate(placements):
            whole_s = problem.compute_s[rows, p].sum(axis=-1).mean()
            times = _repeated(whole_s)
            alone, many = (runs * times for runs in EFFORT.runs)
            counts = alone if p.ndim == 1 else 1, many, EFFORT.warm * times
            try:
                rounds[r, i] = run_placement(problem, p, *counts, compiled)
            except RuntimeError as error:
                if not is_short(error):
                    raise
            if p.ndim > 1:
                rounds[r, i, 0] = np.nan
    fits = (rounds[:, :, 1] > 0).all(axis=0)  # of few short ones several may end at once
    return [placements[i] for i in np.flatnonzero(fits).tolist()], rounds.min(axis=0)[fits]


def run_placement(
    problem: Problem,
    placement: NDArray[np.int32],
    alone: int,
    many: int,
    warm: int,
    compiled: bool = False,
) -> tuple[float, float]:
    """Latency and period as a user sees them, where nothing is recorded.

    The median seconds of ``alone`` calls, after ``warm`` others, and the steady period of a
    stream of ``many`` micro-batches.
    """
    inputs, spans = problem.graph.program.timing_inputs(), list[float]()
    window, priority = problem.max_in_flight, problem.priority
    where = problem.graph, problem.cluster, placement
    with Runner(*where, max_in_flight=window, priority=priority) as runner:
        if compiled:
            runner.compile()
        for _ in range(warm + alone):
            began = time.perf_counter()
            for _ in runner.stream_tensors([inputs]):
                pass
            spans.append(time.perf_counter() - began)
        period_s = runner.period_of(runner.stream_tensors([inputs] * many))
    return float(np.median(spans[warm:])), period_s


def corrected(problem: Problem, placements: list[NDArray[np.int32]], measured: Floats) -> Profile:
    """The profile with the costs that are most probable after placements have run.

    ``measured`` float64 ``[P, 2]``: latency and period, nan where it is not known. A periodic
    placement is the last.
    """
    few = min(problem.num_microbatches, EFFORT.simulated)
    costs, _ = _most_probable(replace(problem, num_microbatches=few), placements, measured)
    return scaled(problem.profile, costs)


def _most_probable(
    problem: Problem, placements: list[NDArray[np.int32]], measured: Floats
) -> tuple[Costs, Floats]:
    """The most probable costs after ``measured`` float64 ``[P, 2]``, nan where there is nothing.

    Each number is likely within one of its scale (``_costs``) and each measurement within
    ``LIKELY.error`` (of a GPU alone a part of it: ``sure``); what is far from that counts less than
    its square. All are looked for at once: what one takes away another can give. Returns them, and
    float64 ``[P, 2]`` by how much predictions miss then, as logarithms of ratios. Periodic
    placements come last.
    """
    by_ndim = [[p for p in placements if p.ndim == ndim] for ndim in (1, 2)]
    used = [np.unique(p) for p in placements]
    batches = [np.stack(alike) for alike in by_ndim if alike]
    known, (scale, least) = np.isfinite(measured), _scale(problem.cluster)
    gpus = [{d} for d, device in enumerate(problem.cluster.devices) if device.kind == "cuda"]
    sure = np.array([LIKELY.sure if {*p.ravel().tolist()} in gpus else 1.0 for p in placements])

    def missed(numbers: Floats) -> Floats:
        costs = _costs(problem.cluster, numbers * scale)
        guess = replace(problem, profile=scaled(problem.profile, costs))
        each = [evaluate(guess, batch) for batch in batches]
        latency_s = np.concatenate([v.latency_s for v in each])
        overhead_s = _overhead_s(guess, placements, latency_s, measured[:, 0])
        latency_s += [overhead_s[devices].max() for devices in used]
        period_s = np.concatenate([v.period_s for v in each])
        return np.log(np.stack([latency_s, period_s], axis=1) / measured)

    def unlikely(numbers: Floats) -> Floats:
        rows = missed(numbers) * sure[:, None] / LIKELY.error
        return np.concatenate([rows[known], numbers])

    def sum_of(rows: Floats) -> float:
        return float((np.sqrt(1 + rows**2) - 1).sum())  # as squares where small, as sizes where not

    numbers = np.zeros(len(scale))
    rows = unlikely(numbers)
    for _ in range(EFFORT.steps):
        # Levenberg-Marquardt. Slopes of small steps would see one schedule, which changes.
        aside = numbers + EFFORT.slope_step * np.eye(len(numbers))
        slopes = np.stack([unlikely(others) - rows for others in aside], axis=1) / EFFORT.slope_step
        weighted = slopes / np.sqrt(1 + rows**2)[:, None]
        down, curved = weighted.T @ rows, weighted.T @ slopes
        # What is least and would be less stays: else the others would step as if it moved too.
        free = np.flatnonzero((numbers > least) | (down < 0))
        tried = [numbers.copy() for _ in EFFORT.damping]
        for others, damping in zip(tried, EFFORT.damping, strict=True):
            damped = curved[np.ix_(free, free)] + damping * np.eye(len(free))
            step = np.linalg.solve(damped, down[free])
            others[free] = np.maximum(least[free], others[free] - step)
        best = min(tried, key=lambda others: sum_of(unlikely(others)))
        if sum_of(unlikely(best)) > EFFORT.enough * sum_of(rows):
            break
        numbers, rows = best, unlikely(best)
    return _costs(problem.cluster, numbers * scale), missed(numbers)


@dataclass(frozen=True)
class Costs:
    """What changes a profile (see ``scaled``).

    Attributes:
        times: float64 ``[D]`` how many times as long operators take on each device.
        neighbours: float64 ``[D]`` how many times as much they take longer beside busy ones.
        waking: how many times as long waking takes.
        ways: of pairs of devices, by name: how many times as long transfers take, seconds more of
            each, and seconds more that a tensor keeps the sender, and the receiver.
        batch: how many times as long letting a micro-batch in and out takes.
    """

    times: Floats
    neighbours: Floats
    waking: float
    ways: Mapping[Way, tuple[float, ...]]
    batch: float = 1.0


def _costs(cluster: Cluster, numbers: Floats) -> Costs:
    """Of numbers ``[C]`` in the order of ``Costs``: logarithms of factors, and seconds."""
    kinds, ways = [device.kind for device in cluster.devices], _ways(cluster)
    times, by_kind, common, of_ways = np.split(numbers, np.cumsum([len(kinds), len(set(kinds)), 2]))
    neighbours = by_kind[np.unique(kinds, return_inverse=True)[1]]
    each = [(float(np.exp(f)), *more) for f, *more in of_ways.reshape(-1, 4).tolist()]
    own = dict(zip(ways, each, strict=True))
    waking, batch = np.exp(common).tolist()
    return Costs(np.exp(times), np.exp(neighbours), waking, own, batch)


def _scale(cluster: Cluster) -> tuple[Floats, Floats]:
    """Float64 ``[C]`` how far each of these numbers is likely to be from 0, and the least of it."""
    kinds, ways = [device.kind for device in cluster.devices], _ways(cluster)
    seconds = LIKELY.seconds if len(set(kinds)) == 1 else LIKELY.unlike_s
    factors = [LIKELY_TIMES[kind] for kind in kinds] + [LIKELY.factor] * (len(set(kinds)) + 2)
    scale = [*factors, *[LIKELY.factor, *[seconds] * 3] * len(ways)]
    least = [-np.inf] * len(factors) + [-np.inf, *[0.0] * 3] * len(ways)
    return np.array(scale), np.array(least)


def pieces(problem: Problem, counts: Sequence[int], seed: int) -> NDArray[np.int32]:
    """Placements int32 ``[B, N]`` of pieces of the order that runs, with so many cuts each.

    Plans cut at some places only. Where nearly all is cut, all devices are busy too, and what
    crossing costs cannot be told from what neighbours do. Each begins on the next device: what
    sending costs one shows where it has more to do than others. So in every second one a device
    has the longer pieces the faster it is: else the slowest would set all periods.
    """
    graph, devices = problem.graph, problem.num_devices
    rng = np.random.default_rng(seed)
    first = graph.per_group(problem.priority, np.minimum, graph.num_ops)
    most = max(1, int(EFFORT.cut_share * graph.num_ops))
    able = np.isfinite(problem.compute_s)
    speed = 1 / np.maximum(problem.compute_s.sum(axis=0, where=able), 1e-12)
    choices = []
    for i, cuts in enumerate(counts):
        if cuts <= most:
            at = np.sort(rng.choice(max(1, graph.num_ops - 1), cuts, replace=False))
            on = (np.arange(cuts + 1) + i) % devices
            size = np.diff([0, *at, graph.num_ops]) * (speed[on] if i % 2 else 1.0)
            at = np.cumsum(size)[:-1] * (graph.num_ops / size.sum())
            choices.append(on[np.searchsorted(at, first)])
    chosen = np.stack(choices)
    seconds = problem.group_compute_s
    able = np.isfinite(seconds)[np.arange(graph.num_groups), chosen]
    return np.where(able, chosen, seconds.argmin(axis=1))[:, graph.group].astype(np.int32)


def _ways(cluster: Cluster) -> list[Way]:
    """Pairs of devices by kinds of both."""
    by_kinds: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for a, b in itertools.permutations(cluster.devices, 2):
        by_kinds.setdefault((a.kind, b.kind), []).append((a.name, b.name))
    return [frozenset(pairs) for pairs in by_kinds.values()]


def scaled(profile: Profile, costs: Costs) -> Profile:
    """The profile with other costs of operators, of busy neighbours and between devices."""
    links = []
    for x in profile.links:
        own = (own for way, own in costs.ways.items() if (x.src, x.dst) in way)
        factor, later_s, sending_s, receiving_s = next(own, (1.0, 0.0, 0.0, 0.0))
        links.append(
            replace(
                x,
                latency_s=x.latency_s * factor + later_s,
                bandwidth_bytes_per_s=x.bandwidth_bytes_per_s / factor,
                wake_s=x.wake_s * costs.waking,
                send_s=x.send_s + sending_s,
                receive_s=x.receive_s + receiving_s,
            )
        )
    other = replace(
        at_speed(profile, costs.times), links=tuple(links), batch_s=profile.batch_s * costs.batch
    )
    if other.loaded_s is None:
        return other
    able = np.isfinite(other.compute_s)
    more = np.subtract(
        other.loaded_s, other.compute_s, out=np.zeros_like(other.compute_s), where=able
    )
    loaded = other.compute_s + costs.neighbours * more
    # An operator that was measured, by chance, faster beside busy neighbours still takes time.
    return replace(other, loaded_s=np.maximum(loaded, 0.1 * other.loaded_s))


def at_speed(profile: Profile, times: Floats) -> Profile:
    """The profile of devices whose operators take float64 ``times [D]`` as long."""
    loaded = None if profile.loaded_s is None else profile.loaded_s * times
    return replace(profile, compute_s=profile.compute_s * times, loaded_s=loaded)
