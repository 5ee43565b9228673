"""Measure a captured graph on the devices of this machine: operators in situ, and links.

Operators are timed where they will run: the whole graph runs on each device through the same
workers as a placed pipeline, so caches are as warm, threads as many and dispatch as dear as
they will be. Devices take turns, round after round, so drift of the machine falls on all alike.
"""

from __future__ import annotations

import itertools
import os
import platform
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from placement import planners
from placement.capturing import capture
from placement.cluster import Cluster, Device, Link
from placement.costs.corpus import Corpus, CorpusError
from placement.executor.alone import (
    Alone,
    InParts,
    as_it_can,
    is_short,
    lacks_kernel,
    last_seconds,
    on_one_device,
    placed,
    run_seconds,
)
from placement.executor.awake import cores_stay_awake
from placement.executor.backend import is_cuda_here
from placement.executor.executor import batched
from placement.executor.runner import Runner
from placement.graph import OpGraph, reuse_position
from placement.objective import Objective
from placement.problem import Problem
from placement.profile import Profile, ProfileError
from placement.simulator import evaluate
from placement.timeline import streamed_period
from placement.tools.clock import nothing_collected
from placement.tools.files import FileError, cache_folder
from placement.tools.progress import Progress

Floats = NDArray[np.float64]
Way = frozenset[tuple[str, str]]  # pairs of devices, by name

_LINK_BYTES = (2**12, 2**16, 2**20, 2**23)  # of tensors over links
_LONG_BYTES = 2**26  # besides, where a GPU is: its link is not full before
_CHAIN_OPS, _CHAIN_SIZE = 17, 2**17  # of the chain that tells what waking costs
_STREAMED, _STREAM_SIZE = 64, 2**6  # micro-batches, and of a chain that tells what each costs
# Calibration: which placements run, and how long (see ``calibrated``).
_CALIBRATION_CUTS, _CUT_SHARE = (1, 3, 7, 15, 31, 63, 127), 0.25  # at most a share of the operators
_CALIBRATION_WARM, _CALIBRATION_RUNS = 3, (3, 8)  # micro-batches one by one, and in a pipeline
_CALIBRATION_S, _CALIBRATION_MOST = 0.05, 32  # of shorter ones more, until they take so long
_CALIBRATION_SIMULATED = 16  # micro-batches at most when costs are tried
_CALIBRATION_ROUNDS = 2  # of which the faster counts: others disturb one of them
_CALIBRATION_SEED = 20  # of the places of the cuts
_CALIBRATION_SEARCH = 400  # placements that the planner tries whose answers run
_CALIBRATION_TRIES, _CALIBRATION_ENOUGH = 12, 0.99  # at most so many, while each brings so much
_CALIBRATION_STEP, _CALIBRATION_DAMPING = 0.1, (0.0, 0.3, 3.0, 30.0)
# How far from what was measured a cost is likely to be, each as far as a prediction by the error:
_LIKELY_ERROR, _LIKELY_FACTOR = 0.03, 1.0  # logarithms, of transfers, of waking, of neighbours
_LIKELY_TIMES = {"cpu": 0.1, "cuda": 0.5}  # of all operators of a device
_LIKELY_S, _LIKELY_UNLIKE_S = 4e-5, 2e-4  # more, of one kind of devices and of several
# Others disturb a core for seconds at a time: rounds go on while the middle half of them differ by
# so much, up to so many times as many.
_SPREAD, _PATIENCE = 0.15, 3
_RULES = 12  # to be raised with what profiles of this machine say, or ``simulate`` makes of them
_RISING_S, _MOST_RUNS = 0.03, 50  # in which a GPU's clock rises, and runs meanwhile at most
_TOGETHER_S = 0.02  # at least, in which devices run the graph beside each other
_ORDER_ROUNDS = 5  # two orders of the operators take turns so often ...
_CLEARLY = 0.95  # ... and the second is taken where it needs less than this share of the time


def measure(
    graph: OpGraph,
    cluster: Cluster,
    *,
    repeats: int = 10,
    progress: Progress | None = None,
) -> Profile:
    """Profile of ``graph`` (with its program) on every device of ``cluster``.

    Args:
        repeats: rounds; in each, every device runs the graph alone, then all devices run it
            at the same time (``loaded_s``). Where rounds differ by much, as somebody else uses
            the machine for a while, up to three times as many are made.
        progress: called as the work proceeds.

    A GPU that cannot hold the graph runs it in parts, one after another. An operator that has no
    kernel on a device, or no room, takes inf there.

    Raises:
        ProfileError: a device of the cluster is not on this machine, or no device can run an
            operator.
    """
    say = progress or (lambda what, share: None)
    check_here(cluster)
    inputs = graph.program.timing_inputs()
    devices = range(cluster.num_devices)
    facts: dict[str, Any] = {}
    began = time.time()
    say("looking for the better order", None)
    order, priority = better_order(graph, cluster, inputs)
    runners: list[Alone] = []
    workspace = np.zeros(graph.num_ops, np.int64)
    alone, loaded = list[Floats](), list[Floats]()
    try:
        for d in devices:
            say(f"warming up {cluster.device_names[d]}", 0.0)
            runner, needed = as_it_can(graph, cluster, d, priority, inputs)
            runners.append(runner)
            workspace = np.maximum(workspace, needed)
        runs = [_runs(runner, 0.0) for runner in runners]
        # What a round has recorded is dropped at its end, and the next makes as many objects: so
        # collections would interrupt the same operator in each, which no median takes out.
        with nothing_collected():
            while len(alone) < repeats or (
                len(alone) < _PATIENCE * repeats and not (_steady(alone) and _steady(loaded))
            ):
                done = len(alone)
                of = f"{repeats}"
                if done >= repeats:
                    most = _PATIENCE * repeats
                    of = f"at most {most}, as rounds differ by more than {_SPREAD:.0%}"
                say(f"measuring, round {done + 1} of {of}", min(1.0, done / repeats))
                # The first of the two finds the caches as another device left them.
                each = [run_seconds(runners[d], inputs, runs[d]) for d in devices]
                alone.append(np.stack(each, axis=1))
                runs = [_runs(r, s.sum()) for r, s in zip(runners, each, strict=True)]
                if cluster.num_devices > 1:
                    whole_s = float(alone[-1].sum(axis=0).mean())
                    loaded.append(_run_together(runners, inputs, whole_s))
        say("measuring links", None)
        links = measure_links(cluster, repeats=max(3, repeats // 2))
        marks_s = np.array([_mark_seconds(r, priority, inputs, min(repeats, 5)) for r in runners])
    finally:
        for runner in runners:
            runner.close()
    say("measuring streams", None)
    batch_s = _batch_seconds(cluster, repeats=max(3, repeats // 2))
    low, high = np.percentile(alone, [25, 75], axis=0)
    lacking = np.zeros((graph.num_ops, cluster.num_devices))  # inf: what cannot run there
    in_parts = {d: r for d, r in enumerate(runners) if isinstance(r, InParts)}
    for d, r in in_parts.items():
        lacking[list(r.missing), d] = np.inf
    if in_parts:
        facts["in_parts"] = [cluster.device_names[d] for d in in_parts]

    def unmarked(rounds: list[Floats]) -> Floats:
        seconds = typical(np.array(rounds))
        return np.maximum(seconds - marks_s, 0.5 * seconds) + lacking

    profile = Profile(
        device_names=cluster.device_names,
        compute_s=unmarked(alone),
        spread_s=high - low,
        links=links,
        loaded_s=unmarked(loaded) if cluster.num_devices > 1 else None,
        batch_s=batch_s,
        workspace_bytes=workspace if workspace.any() else None,
        graph_fingerprint=graph.fingerprint,
        provenance=provenance(order=order, repeats=repeats, rounds=len(alone), **facts),
    )
    if cluster.num_devices > 1:
        say("running some placements, to calibrate", None)
        profile = calibrated(graph, cluster, profile)
    seconds = round(time.time() - began, 2)
    return replace(profile, provenance=profile.provenance | {"seconds": seconds})


def _runs(runner: Alone, whole_s: float) -> int:
    """How many runs to make, of which the last counts, where one takes ``whole_s`` (0: unknown).

    A GPU that was idle while another device was measured takes a while to raise its clock. A graph
    in parts runs each of them twice by itself.
    """
    if isinstance(runner, InParts):
        return 1
    rising = _RISING_S / whole_s if whole_s and _on_gpu(runner) else 0.0
    return int(np.clip(2 + rising, 2, _MOST_RUNS))


def _mark_seconds(
    runner: Alone, priority: NDArray[np.int32], inputs: Sequence[Tensor], times: int
) -> float:
    """By how much recording makes an operator of a GPU longer, on average; 0 on a CPU.

    There a mark is an event, which takes the thread that launches about as long as a kernel. Where
    kernels are longer than launching them the thread is ahead, and it shows in no run.
    """
    if isinstance(runner, InParts) or not _on_gpu(runner):
        return 0.0
    graph, cluster, placement = runner.graph, runner.cluster, runner.placement
    more = []
    with Runner(graph, cluster, placement, max_in_flight=1, priority=priority) as plain:
        for _ in range(2 + times):
            seconds = []
            for each in (plain, runner):
                begin = time.perf_counter()
                for _ in each.stream_tensors([inputs]):
                    pass
                seconds.append(time.perf_counter() - begin)
            more.append(seconds[1] - seconds[0])
    last_seconds(runner, range(0))  # nothing of it is kept
    return max(0.0, float(np.median(more[2:]))) / graph.num_ops


def _on_gpu(runner: Runner) -> bool:
    return any(w.backend.torch_device.type == "cuda" for w in runner.workers if w.shares[0].ops)


def _steady(rounds: Sequence[Floats]) -> bool:
    """Whether the middle half of the rounds ``[N, D]`` agree on the whole graph's seconds."""
    if not rounds:
        return True
    whole = [r.sum(axis=0) for r in rounds]
    low, middle, high = np.percentile(whole, [25, 50, 75], axis=0)
    return bool(np.all(high - low <= _SPREAD * middle))


def calibrated(graph: OpGraph, cluster: Cluster, profile: Profile) -> Profile:
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
    """
    least = np.where(np.isfinite(profile.compute_s), profile.compute_s, 0.0)
    many = _CALIBRATION_RUNS[1] * _repeated(least.sum(axis=0).max())
    few = min(many, _CALIBRATION_SIMULATED)
    problem = Problem(graph, cluster, profile, num_microbatches=few)
    ran, measured = _ran(problem, _for_calibration(problem))
    if not ran:
        return profile
    on_gpu = np.array([device.kind == "cuda" for device in cluster.devices])

    def with_costs(costs: Costs) -> Profile:
        return scaled(profile, replace(costs, times=costs.times ** np.where(on_gpu, 1.0, 0.5)))

    costs, missed = _most_probable(problem, ran, measured)
    answers, took = _ran(problem, _answers(replace(problem, profile=with_costs(costs))))
    if answers:
        ran, measured = [*answers, *ran], np.concatenate([took, measured])
        costs, missed = _most_probable(problem, ran, measured)
    there = [x[np.isfinite(x)] for x in missed.T]
    facts = {
        "calibration": {"neighbours": costs.neighbours.tolist(), "waking": costs.waking},
        "ways": [[*sorted(way)[0], *own] for way, own in costs.ways.items()],
        "alone": costs.times.tolist(),
        "call_s": costs.call_s,
        # What all placements have in common does not make one look better than another.
        "error": float(np.abs(np.concatenate([x - np.median(x) for x in there if len(x)])).mean()),
    }
    return replace(with_costs(costs), provenance=profile.provenance | facts)


def _repeated(whole_s: float) -> int:
    """How many times as often something runs that takes so long: a GPU is warm late."""
    return int(np.clip(_CALIBRATION_S / whole_s, 1, _CALIBRATION_MOST))


def _for_calibration(problem: Problem) -> list[NDArray[np.int32]]:
    """Single devices, cuts, and replicas where every device can hold all."""
    singles = np.repeat(np.arange(problem.num_devices, dtype=np.int32)[:, None], problem.num_ops, 1)
    able = problem.supported.all(axis=0)
    replicas = [singles] if able.all() and problem.buffers_stay(singles[None])[0] else []
    cuts = pieces(problem, _CALIBRATION_CUTS, _CALIBRATION_SEED)
    return [*singles[able], *cuts, *replicas]


def _answers(problem: Problem) -> list[NDArray[np.int32]]:
    """What a planner answers, for a call and for a stream, where it uses several devices."""
    search = planners.load("local_search", evaluations=_CALIBRATION_SEARCH)
    found = (
        search(replace(problem, objective=objective)).placement
        for objective in (Objective.LATENCY, Objective.PERIOD)
    )
    return list({p.tobytes(): p for p in found if (p != p[0]).any()}.values())


def _ran(
    problem: Problem, placements: list[NDArray[np.int32]]
) -> tuple[list[NDArray[np.int32]], Floats]:
    """Those of the placements that fit, and what they took: the faster of the rounds.

    Returns float64 ``[P, 2]`` latency and period. Single devices, and replicas, whose turns are
    unlike, have no latency (nan): what a call of one device costs besides its operators is not what
    one of several does.
    """
    rows = np.arange(problem.num_ops)
    rounds = np.full((_CALIBRATION_ROUNDS, len(placements), 2), np.nan)
    for r in range(_CALIBRATION_ROUNDS):
        for i, p in enumerate(placements):
            whole_s = problem.compute_s[rows, p].sum(axis=-1).mean()
            times = _repeated(whole_s)
            one = p.ndim > 1 or bool((p == p[0]).all())
            alone, many = (runs * times for runs in _CALIBRATION_RUNS)
            warm = _CALIBRATION_WARM * times
            try:
                rounds[r, i] = run_placement(problem, p, 1 if one else alone, many, warm)
            except RuntimeError as error:
                if not is_short(error):
                    raise
            if one:
                rounds[r, i, 0] = np.nan
    fits = (rounds[:, :, 1] > 0).all(axis=0)  # of few short ones several may end at once
    return [placements[i] for i in np.flatnonzero(fits)], rounds.min(axis=0)[fits]


def run_placement(
    problem: Problem, placement: NDArray[np.int32], alone: int, many: int, warm: int
) -> tuple[float, float]:
    """Latency and period as a user sees them, where nothing is recorded (see ``run_plain``)."""
    window = problem.max_in_flight
    with Runner(
        problem.graph, problem.cluster, placement, max_in_flight=window, priority=problem.priority
    ) as runner:
        return run_plain(runner, alone, many, warm)


def run_plain(runner: Runner, alone: int, many: int, warm: int) -> tuple[float, float]:
    """The median seconds of ``alone`` calls, after ``warm`` others, and the steady period of a
    stream of ``many`` micro-batches.
    """
    inputs, spans = runner.graph.program.timing_inputs(), list[float]()
    for _ in range(warm + alone):
        began = time.perf_counter()
        for _ in runner.stream_tensors([inputs]):
            pass
        spans.append(time.perf_counter() - began)
    period_s = streamed_period(runner.stream_tensors([inputs] * many), runner.num_phases)
    return float(np.median(spans[warm:])), period_s


def corrected(problem: Problem, placements: list[NDArray[np.int32]], measured: Floats) -> Profile:
    """The profile with the costs that are most probable after placements have run.

    ``measured`` float64 ``[P, 2]``: latency and period, nan where it is not known. A periodic
    placement is the last.
    """
    few = min(problem.num_microbatches, _CALIBRATION_SIMULATED)
    costs, _ = _most_probable(replace(problem, num_microbatches=few), placements, measured)
    return scaled(problem.profile, costs)


def _most_probable(
    problem: Problem, placements: list[NDArray[np.int32]], measured: Floats
) -> tuple[Costs, Floats]:
    """The most probable costs after ``measured`` float64 ``[P, 2]``, nan where there is nothing.

    Each number is likely within one of its scale (``_costs``) and each measurement within
    ``_LIKELY_ERROR``; what is far from that counts less than its square. All are looked for at
    once: what one takes away another can give. Returns them, and float64 ``[P, 2]`` by how much
    predictions miss then, as logarithms of ratios. Periodic placements come last.
    """
    by_ndim = [[p for p in placements if p.ndim == ndim] for ndim in (1, 2)]
    batches = [np.stack(alike) for alike in by_ndim if alike]
    there, (scale, least) = np.isfinite(measured), _scale(problem.cluster)

    def missed(numbers: Floats) -> Floats:
        costs = _costs(problem.cluster, numbers * scale)
        guess = replace(problem, profile=scaled(problem.profile, costs))
        each = [evaluate(guess, batch) for batch in batches]
        latency_s = np.concatenate([v.latency_s for v in each]) + costs.call_s
        period_s = np.concatenate([v.period_s for v in each])
        return np.log(np.stack([latency_s, period_s], axis=1) / measured)

    def unlikely(numbers: Floats) -> Floats:
        return np.concatenate([missed(numbers)[there] / _LIKELY_ERROR, numbers])

    def sum_of(rows: Floats) -> float:
        return float((np.sqrt(1 + rows**2) - 1).sum())  # as squares where small, as sizes where not

    found = np.zeros(len(scale))
    rows = unlikely(found)
    for _ in range(_CALIBRATION_TRIES):
        # Levenberg-Marquardt. Slopes of small steps would see one schedule, which changes.
        aside = found + _CALIBRATION_STEP * np.eye(len(found))
        slopes = np.stack([unlikely(x) - rows for x in aside], axis=1) / _CALIBRATION_STEP
        weighted = slopes / np.sqrt(1 + rows**2)[:, None]
        down, curved = weighted.T @ rows, weighted.T @ slopes
        # What is least and would be less stays: else the others would step as if it moved too.
        free = np.flatnonzero((found > least) | (down < 0))
        tried = [found.copy() for _ in _CALIBRATION_DAMPING]
        for x, damping in zip(tried, _CALIBRATION_DAMPING, strict=True):
            damped = curved[np.ix_(free, free)] + damping * np.eye(len(free))
            x[free] = np.maximum(least[free], x[free] - np.linalg.solve(damped, down[free]))
        best = min(tried, key=lambda x: sum_of(unlikely(x)))
        if sum_of(unlikely(best)) > _CALIBRATION_ENOUGH * sum_of(rows):
            break
        found, rows = best, unlikely(best)
    return _costs(problem.cluster, found * scale), missed(found)


@dataclass(frozen=True)
class Costs:
    """What changes a profile (see ``scaled``).

    Attributes:
        times: float64 ``[D]`` how many times as long operators take on each device.
        neighbours: float64 ``[D]`` how many times as much they take longer beside busy ones.
        waking: how many times as long waking takes.
        ways: of pairs of devices, by name: how many times as long transfers take, seconds more of
            each, and seconds more that a tensor keeps the sender, and the receiver.
        call_s: of a call of several devices, besides its first operator to its last.
    """

    times: Floats
    neighbours: Floats
    waking: float
    ways: Mapping[Way, tuple[float, ...]]
    call_s: float = 0.0


def _costs(cluster: Cluster, numbers: Floats) -> Costs:
    """Of numbers ``[C]`` in the order of ``Costs``: logarithms of factors, and seconds."""
    kinds, ways = [device.kind for device in cluster.devices], _ways(cluster)
    times, by_kind, (waking,), of_ways, (call_s,) = np.split(
        numbers, np.cumsum([len(kinds), len(set(kinds)), 1, 4 * len(ways)])
    )
    neighbours = by_kind[np.unique(kinds, return_inverse=True)[1]]
    each = [(float(np.exp(f)), *more) for f, *more in of_ways.reshape(-1, 4).tolist()]
    own = dict(zip(ways, each, strict=True))
    return Costs(np.exp(times), np.exp(neighbours), float(np.exp(waking)), own, float(call_s))


def _scale(cluster: Cluster) -> tuple[Floats, Floats]:
    """Float64 ``[C]`` how far each of these numbers is likely to be from 0, and the least of it."""
    kinds, ways = [device.kind for device in cluster.devices], _ways(cluster)
    seconds = _LIKELY_S if len(set(kinds)) == 1 else _LIKELY_UNLIKE_S
    factors = [_LIKELY_TIMES[kind] for kind in kinds] + [_LIKELY_FACTOR] * (len(set(kinds)) + 1)
    scale = [*factors, *[_LIKELY_FACTOR, *[seconds] * 3] * len(ways), seconds]
    least = [-np.inf] * len(factors) + [-np.inf, *[0.0] * 3] * len(ways) + [0.0]
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
    first = np.full(graph.num_groups, graph.num_ops)
    np.minimum.at(first, graph.group, problem.priority)
    most = max(1, int(_CUT_SHARE * graph.num_ops))
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
    other = replace(at_speed(profile, costs.times), links=tuple(links))
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


def typical(rounds: Floats) -> Floats:
    """float64 ``[N, D]`` from ``[R, N, D]``: medians that add up to the median run.

    Interruptions hit a small share of the operators in every run, so medians of operators
    alone add up to less than any run takes (by 5 to 30 % where operators take microseconds).
    Each device's medians are scaled to the median over rounds of the whole graph's time.

    Rounds in which a device was clearly slower than in its fastest quarter do not count for it:
    while others use the hardware that a core shares, all of its operators take up to 1.6 times
    as long, and that may be most of the rounds.
    """
    whole: Floats = rounds.sum(axis=1)
    disturbed = whole > (1 + _SPREAD) * np.percentile(whole, 25, axis=0)
    calm = np.where(disturbed[:, None], np.nan, rounds)
    middle = np.nanmedian(calm, axis=0)
    total: Floats = np.nanmedian(np.where(disturbed, np.nan, whole), axis=0)
    return middle * (total / middle.sum(axis=0))


def load_or_measure(
    graph: OpGraph,
    cluster: Cluster,
    *,
    repeats: int | None = None,
    progress: Progress | None = None,
    folder: str | Path | None = None,
) -> Profile:
    """The saved profile of this graph on this cluster's devices, or a new one, then saved.

    ``repeats`` asks for a profile of at least so many rounds: one of fewer is measured again. None
    is content with any, and measures 10 where there is none.

    A cluster may hold devices that are described in terms of a measured one (``like``); those
    that are measured must be on this machine. A profile that cannot be saved (no space, no
    permission) is returned all the same, with a warning.
    """
    is_like = any(d.like is not None for d in cluster.devices)
    if is_like or cluster.streaming:
        options: dict[str, Any] = {"repeats": repeats, "progress": progress, "folder": folder}
        here = Cluster.detect() if is_like else cluster.workers
        return load_or_measure(graph, here, **options).for_cluster(cluster)
    path = cached_path(graph, cluster, folder)
    if path.exists():
        profile = Profile.load(path)
        profile.check(graph)
        if repeats is None or profile.provenance.get("repeats", 0) >= repeats:
            return profile.for_cluster(cluster)
    profile = measure(graph, cluster, repeats=repeats or 10, progress=progress)
    try:
        profile.save(path)
    except FileError as error:
        warnings.warn(
            f"the profile is not saved ({error}), so it will be measured again next time; or set "
            "PLACEMENT_HOME to another folder",
            stacklevel=2,
        )
    else:
        remember(graph, cluster, profile, folder)
    return profile.for_cluster(cluster)


def remember(
    graph: OpGraph, cluster: Cluster, profile: Profile, folder: str | Path | None = None
) -> None:
    """Keep what was measured for predictions of other models; a warning where that fails."""
    try:
        Corpus(Path(folder or cache_folder()) / "corpus.sqlite").add(graph, cluster, profile)
    except CorpusError as error:
        warnings.warn(f"predictors will not know this profile: {error}", stacklevel=2)


def cached_path(graph: OpGraph, cluster: Cluster, folder: str | Path | None = None) -> Path:
    """Where ``load_or_measure`` keeps a profile: by fingerprint of graph and cluster.

    And by the rules of the simulator, for which costs between devices are calibrated. How much
    memory a device has does not matter to a profile; of a GPU it is another every time.
    """
    home = Path(folder or cache_folder())
    devices = tuple(replace(d, memory_bytes=Device.memory_bytes) for d in cluster.devices)
    cluster = replace(cluster, devices=devices)
    name = f"{graph.fingerprint[:16]}-{cluster.fingerprint[:16]}-{_RULES}.npz"
    return home / "profiles" / name


def measure_links(cluster: Cluster, *, repeats: int = 5) -> tuple[Link, ...]:
    """Latency and bandwidth of every ordered pair of devices, fitted over tensor sizes.

    A chain of two operators runs on one device, and split over the pair; what the split costs
    more is the transfer: handing over, waking the other worker, and reading memory that the
    other device wrote. It is at least what passes until the tensor is there: on one device the
    second operator also frees the tensor, which takes as long as some transfers. A line through the
    medians gives latency and bandwidth. How long waking the receiver keeps the sender busy
    (``Link.wake_s``) shows in a longer chain whose every operator has a quick reader on the other
    device, or none.
    """
    pairs = [(a, b) for a in range(cluster.num_devices) for b in range(cluster.num_devices)]
    on_gpu = any(d.kind == "cuda" for d in cluster.devices)
    sizes = (*_LINK_BYTES, _LONG_BYTES) if on_gpu else _LINK_BYTES
    extra: dict[tuple[int, int], Floats] = {
        (a, b): np.empty(len(sizes)) for a, b in pairs if a != b
    }
    for i, size in enumerate(sizes):
        graph = capture(_Chain(), torch.ones(size // 4), name="link")
        inputs = graph.program.timing_inputs()
        apart = {pair: placed(graph, cluster, list(pair)) for pair in extra}
        together = {b: placed(graph, cluster, [b, b]) for _, b in extra}
        try:
            spans: dict[Any, list[tuple[float, float]]] = {key: [] for key in (*apart, *together)}
            for _ in range(repeats + 1):
                for key, runner in (*apart.items(), *together.items()):
                    spans[key].append(_span(runner, inputs))
            middle = {key: np.median(v[1:], axis=0) for key, v in spans.items()}
        finally:
            for runner in (*apart.values(), *together.values()):
                runner.close()
        for a, b in extra:
            more_s, on_way_s = middle[a, b] - middle[b]
            extra[a, b][i] = max(more_s, on_way_s, 0.0)
    wake_s = _wake_seconds(cluster, list(extra), repeats)
    return tuple(
        replace(
            fit_link(cluster.device_names[a], cluster.device_names[b], sizes, seconds),
            wake_s=wake_s[a, b],
        )
        for (a, b), seconds in extra.items()
    )


def _wake_seconds(
    cluster: Cluster, pairs: list[tuple[int, int]], repeats: int
) -> dict[tuple[int, int], float]:
    """Seconds that waking an idle receiver keeps the sender busy, by (sender, receiver)."""
    x = torch.ones(_CHAIN_SIZE)
    watched = capture(_Watched(True), x, name="watched")
    chain = [i for i, kind in enumerate(watched.op_kind) if "add" in kind]
    waking, silent = {}, {}
    spans: dict[Any, list[float]] = {}
    try:
        for a, b in pairs:
            placement = [a if i in chain else b for i in range(watched.num_ops)]
            waking[a, b] = placed(watched, cluster, placement)
        plain = capture(_Watched(False), x, name="chain")
        for a in {a for a, _ in pairs}:
            silent[a] = on_one_device(plain, cluster, a, range(plain.num_ops))
        for _ in range(repeats + 1):
            for key, runner in (*waking.items(), *silent.items()):
                ops = chain if key in waking else range(plain.num_ops)
                # Nothing is sent before the first; the others each begin with sending.
                seconds = run_seconds(runner, [x], 1)[list(ops)[1:]]
                spans.setdefault(key, []).append(float(np.median(seconds)))
    finally:
        for runner in (*waking.values(), *silent.values()):
            runner.close()
    middle = {key: float(np.median(v[1:])) for key, v in spans.items()}
    return {(a, b): max(middle[a, b] - middle[a], 0.0) for a, b in pairs}


def _batch_seconds(cluster: Cluster, repeats: int) -> float:
    """By how much the period of a stream of a tiny model on one device exceeds its operators.

    Whoever lets micro-batches in and hands results out competes for the interpreter's lock. Of
    unlike kinds of devices the one that this costs most counts: what a GPU is asked to do it does
    later, and its period hides what the threads cost.
    """
    x = torch.ones(_STREAM_SIZE)
    graph = capture(_Watched(False), x, name="chain")
    inputs, more = graph.program.timing_inputs(), dict[str, list[float]]()
    for d, device in enumerate(cluster.devices):
        with (
            on_one_device(graph, cluster, d, range(graph.num_ops)) as alone,
            Runner(graph, cluster, [d] * graph.num_ops) as streaming,
        ):
            for r in range(3 * repeats + 1):
                period_s = streamed_period(streaming.stream([x] * _STREAMED))
                operators_s = run_seconds(alone, inputs, _STREAMED // 4).sum()
                if r:
                    excess = period_s - operators_s
                    more.setdefault(device.kind, []).append(excess)
    # Others only ever make a stream longer.
    return max(0.0, *(float(np.percentile(of_kind, 25)) for of_kind in more.values()))


def fit_link(src: str, dst: str, sizes: Sequence[int], seconds: Floats) -> Link:
    """Least squares of ``latency_s + bytes / bandwidth`` with both terms at least 0.

    Relative errors count, so that the small transfers decide the latency; where by chance nothing
    was seen of one, those to what it would take in proportion to the longest. What took less than
    half as long as smaller ones, or more than twice as long as larger ones, does not count.
    """
    from scipy.optimize import nnls

    size, kept = np.asarray(sizes, np.float64), np.arange(len(sizes))
    while True:
        against = np.triu(seconds[kept] < 0.5 * seconds[kept, None])
        number = against.sum(axis=0) + against.sum(axis=1)
        if not number.any():
            break
        kept = np.delete(kept, len(kept) - 1 - number[::-1].argmax())
    size, seconds = size[kept], seconds[kept]
    weight = 1.0 / np.maximum.reduce([seconds, seconds.max() * size / size.max(), 0 * size + 1e-6])
    # Scaled columns: bytes and ones differ by seven orders of magnitude.
    (latency, slope), _ = nnls(
        np.stack([weight, weight * size / size.max()], axis=1), seconds * weight
    )
    per_byte = slope / size.max()
    return Link(src, dst, float(latency), float(1.0 / per_byte) if per_byte > 0 else float("inf"))


def provenance(**facts: Any) -> dict[str, Any]:
    """When and where a measurement was made, with which versions."""
    from placement.cluster import cpu_model

    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "cores_stay_awake": cores_stay_awake(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **facts,
    }


class _Watched(nn.Module):
    """A chain of operators; each but the last has a second, cheap reader if ``watched``."""

    def __init__(self, watched: bool) -> None:
        super().__init__()
        self.watched = watched

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for _ in range(_CHAIN_OPS):
            x = x + 1.0
            if self.watched:
                seen.append(x[:1])
        return torch.cat(seen) if self.watched else x


class _Chain(nn.Module):
    """Produce a tensor, read it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1.0).sum()


def check_here(cluster: Cluster) -> None:
    """Raises: ProfileError, this machine does not have one of the devices."""
    can_tell = hasattr(os, "sched_getaffinity")
    cores = os.sched_getaffinity(0) if can_tell else set(range(os.cpu_count() or 1))
    for device in cluster.devices:
        why = ""
        if device.kind == "cpu" and (missing := sorted(set(device.cores) - cores)):
            why = f" uses cores {missing}, this machine offers {sorted(cores)}:"
        elif device.kind == "cuda" and not torch.cuda.is_available():
            why = f": torch {torch.__version__} sees no CUDA device here:"
        elif device.kind == "cuda" and not is_cuda_here(device.name):
            why = (
                f" is not one of the {torch.cuda.device_count()} CUDA devices here: name it "
                "cuda:0, cuda:1, ...; or"
            )
        elif device.kind not in ("cpu", "cuda"):
            why = f" of kind {device.kind!r} cannot be measured:"
        if why:
            raise ProfileError(
                f"device {device.name!r}{why} describe it with 'like: <measured device>' and "
                "'speed: <factor>'"
            )


def better_order(
    graph: OpGraph, cluster: Cluster, inputs: Sequence[Tensor]
) -> tuple[str, NDArray[np.int32]]:
    """The order in which a pipeline will run the operators, and int32 ``[N]`` their positions.

    The order decides what the caches hold. An unrolled LSTM run time step by time step, which
    is what upward ranks do, takes up to twice as long as layer by layer, because every step
    reads the weights of all layers. So upward rank, the better order across devices, is left
    where reading parameters again while they are cached is clearly faster on one kind of device,
    and not clearly slower on another.
    """
    with on_one_device(graph, cluster, 0, range(graph.num_ops)) as runner:
        seconds = run_seconds(runner, inputs, 2)[:, None]
    one = Cluster("one", cluster.devices[:1])
    rank = Problem(graph, one, Profile(one.device_names, seconds, seconds * 0)).rank_position
    forward = ~graph.is_backward[graph.param_use_op]
    if np.bincount(graph.param_use[forward]).max(initial=0) < 2:
        return "rank", rank  # nothing is read twice, but by a backward, which is far
    reuse = reuse_position(graph)
    first = {device.kind: d for d, device in reversed(list(enumerate(cluster.devices)))}
    ratios = [_takes_of(graph, cluster, d, reuse, rank, inputs) for d in sorted(first.values())]
    better = min(ratios) < _CLEARLY and max(ratios) < 1 / _CLEARLY
    return ("reuse", reuse) if better else ("rank", rank)


def _takes_of(
    graph: OpGraph,
    cluster: Cluster,
    d: int,
    order: NDArray[np.int32],
    other: NDArray[np.int32],
    inputs: Sequence[Tensor],
) -> float:
    """What share of the time of the other order one takes on a device; 1 where neither can run."""
    with on_one_device(graph, cluster, d, other) as a, on_one_device(graph, cluster, d, order) as b:
        try:
            ratios = [
                run_seconds(b, inputs, 2).sum() / run_seconds(a, inputs, 2).sum()
                for _ in range(_ORDER_ROUNDS)
            ]
        except Exception as error:
            if not (is_short(error) or lacks_kernel(error, cluster, d)):
                raise
            return 1.0
    return float(np.median(ratios))


def _run_together(runners: Sequence[Alone], inputs: Sequence[Tensor], whole_s: float) -> Floats:
    """float64 ``[N, D]`` mean seconds of the middle third of runs that all devices do at once.

    Each does three at least, more of short ones, as threads do not begin at the same moment, and
    goes on until the others have too: a fast one that ended early would be measured, and measure
    others, beside nobody. Each is at another place of the graph, which takes ``whole_s``, as in a
    pipeline. In step they would read the same parameters at the same time, and one would find in
    the cache that they share what the other has just fetched.
    """
    means = np.empty((runners[0].graph.num_ops, len(runners)))
    times = max(3, int(_TOGETHER_S / max(whole_s, 1e-4)))
    gate = threading.Barrier(len(runners))
    busy = set(range(len(runners)))

    def runs(d: int) -> Iterator[Sequence[Tensor]]:
        for i in itertools.count():
            if i == times:
                busy.discard(d)
            if i >= times and not busy:
                return
            yield inputs

    def work(d: int) -> None:
        gate.wait()
        time.sleep(whole_s * d / len(runners))
        try:
            count = sum(1 for _ in runners[d].stream_tensors(runs(d)))
        finally:
            busy.discard(d)
        end, third = runners[d].next_batch, count // 3
        means[:, d] = last_seconds(runners[d], range(end - count + third, end - third))

    with ThreadPoolExecutor(len(runners)) as pool:
        try:
            for future in [pool.submit(work, d) for d in range(len(runners))]:
                future.result()
        except BaseException:  # Ctrl-C too: nobody may be left waiting for the others
            gate.abort()
            busy.clear()
            for runner in runners:
                runner.close()
            raise
    return means


def _span(runner: Runner, inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Seconds from the end of the first operator to that of the second; of them, on the way."""
    for _ in runner.stream_tensors([inputs]):
        pass
    end, on_way_ns = {}, 0
    for worker in runner.workers:
        clock = worker.backend.resolve_ns
        for _, op, _, until in batched(worker.slices, 4):
            end[op] = clock(until)
        for _, _, source, sent, received in batched(worker.arrivals, 5):
            on_way_ns = clock(received) - runner.workers[source].backend.resolve_ns(sent)
        worker.slices.clear()
        worker.arrivals.clear()
    return (end[1] - end[0]) * 1e-9, on_way_ns * 1e-9
