"""Costs of compiled runs: operators of a kernel stay together, and kernels are timed in their run.

A compiler fuses operators, so that what one takes by itself is no part of what a run takes. The
whole graph is scheduled once by Inductor, which says what shares a kernel; these operators become a
colocation group, so that a cut between groups changes no kernel. Then the graph runs on every CPU
device as it would run alone, compiled, through the same workers as a placed pipeline. What a run
takes there is divided among its operators as their kernels take it, which are timed inside of it.
What parts of it cost beside that, at their ends and between devices, is told by placements of a few
runs (see ``calibrated``). Weights that are packed for the processor are a second copy: its bytes
are counted with the parameter, on every device.

Of a graph in pieces each piece is compiled with its own, as if piece ``k`` was on device ``k``: as
one run, a compiler would fuse what is to be apart. It is measured so, with pieces on every device
in turns, which are beside busy ones then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster
from placement.costs.calibration import calibrated
from placement.costs.measure import EFFORT, cached_path, is_saved, measured_rounds, typical
from placement.executor.alone import on_one_device, placed, run_seconds
from placement.executor.inductor import kernel_seconds, kernels_of
from placement.executor.runner import Runner
from placement.executor.share import runs_of, shares
from placement.graph import OpGraph
from placement.problem import Problem, Solution
from placement.profile import Profile, ProfileError
from placement.simulator import score
from placement.tools.clock import nothing_collected
from placement.tools.progress import Progress

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

_LEAST_S = 1e-9  # of an operator: a run may be of such that take nothing
_PARTS = 1, 3  # runs of the placements by which costs of compiled runs are calibrated
_CLEARLY = 0.97  # of the predicted time of what was measured: else what is planned is no better


def fused(
    graph: OpGraph, runs: Sequence[Sequence[int]] | None = None, seconds: Floats | None = None
) -> OpGraph:
    """The graph, operators that share a kernel in one colocation group.

    Args:
        runs: operators that are compiled together; None: all are.
        seconds: ``[N]`` of kernels, with packed weights; a group without any, as a convolution is
            whose bias and activation are part of the same kernel, goes with the only one that reads
            from it.

    Raises:
        Exception: Inductor refuses the graph.
    """
    group = graph.group.copy()
    for ops in kernels_of(graph.program, runs):
        joined = np.isin(group, group[sorted(ops)])
        group[joined] = group[joined].min()
    if seconds is not None:
        for own in dict.fromkeys(group[::-1].tolist()):
            inside = group == own
            read = np.isin(graph.tensor_src[graph.use_tensor], np.flatnonzero(inside))
            readers = {*group[graph.use_dst[read]].tolist()} - {own}
            if not seconds[inside].any() and len(readers) == 1:
                group[inside] = readers.pop()
    _, numbered = np.unique(group, return_inverse=True)
    first = np.full(numbered.max() + 1, graph.num_ops)
    np.minimum.at(first, numbered, np.arange(graph.num_ops))
    order = np.argsort(np.argsort(first))  # groups are numbered by their first operators
    return replace(graph, group=order[numbered].astype(np.int32))


def measure_compiled(
    graph: OpGraph,
    cluster: Cluster,
    profile: Profile,
    *,
    repeats: int = 5,
    progress: Progress | None = None,
) -> Profile:
    """The profile of compiled runs; ``provenance`` has the ``groups`` of the fused graph,
    and ``packed``, bytes beside each parameter.

    Args:
        graph: with its program; of inference.
        profile: the graph's own on these devices. Columns of GPUs, links and memory are its.
        repeats: rounds, as ``measure`` has them.

    Raises:
        ProfileError: nothing of it can be compiled, and why.
    """
    say = progress or (lambda what, share: None)
    say("asking the compiler what it fuses", None)
    began = time.time()
    cpus = [d for d, device in enumerate(cluster.devices) if device.kind == "cpu"]
    in_pieces = graph.piece is not None and len(cpus) > 1
    runs = like = None
    try:
        if in_pieces:
            runs = _runs(Problem(graph, cluster, profile), dealt(graph, cpus, 0))
        else:
            like = _of_kernels(graph, [cluster.devices[d].threads for d in cpus])
        joined = fused(graph, runs, None if like is None else like.sum(axis=1))
    except Exception as error:  # e.g. of Inductor, of an operator that it does not know
        line = next(iter(str(error).splitlines()), "")[:200]
        raise ProfileError(f"the graph is not compiled: {type(error).__name__}: {line}") from error
    facts: dict[str, Any] = {"compiled": True, "groups": joined.group.tolist()}
    facts_of = cluster, cpus, profile, repeats, say
    got = _in_pieces(graph, *facts_of) if in_pieces else _whole(graph, like, *facts_of)
    compute_s, spread_s = profile.compute_s.copy(), profile.spread_s.copy()
    compute_s[:, cpus], spread_s[:, cpus] = got.compute_s, got.spread_s
    loaded_s = None if profile.loaded_s is None else profile.loaded_s.copy()
    if loaded_s is not None and got.loaded_s is not None:
        loaded_s[:, cpus] = got.loaded_s
    facts |= {"runs": got.runs, "interpreted": got.names, "packed": got.packed.tolist()}
    measured = replace(
        profile,
        compute_s=compute_s,
        spread_s=spread_s,
        loaded_s=loaded_s,
        graph_fingerprint=joined.fingerprint,
        provenance=profile.provenance | facts,
    )
    if 1 < len(cpus) == cluster.num_devices:
        say("running some placements, compiled, to calibrate", None)
        if in_pieces:
            some = [dealt(graph, cpus, d) for d in cpus]
        else:
            some = _parted(joined, cluster, measured)
        measured = calibrated(joined, cluster, measured, some)
    seconds = round(time.time() - began, 2)
    return replace(
        measured,
        graph_fingerprint=profile.graph_fingerprint,
        provenance=measured.provenance | {"seconds": seconds},
    )


@dataclass(frozen=True)
class _Seconds:
    """Of the operators on CPU devices, float64 ``[N, C]``, and how they were measured.

    Attributes:
        loaded_s: beside busy devices, if that was measured.
        runs: how many were timed.
        names: of each runner, the first operators of runs that are interpreted.
        packed: ``[P]`` bytes beside each parameter.
    """

    compute_s: Floats
    spread_s: Floats
    loaded_s: Floats | None
    runs: int
    names: list[list[str]]
    packed: NDArray[np.int64]


def _whole(
    graph: OpGraph,
    like: Floats | None,
    cluster: Cluster,
    cpus: Sequence[int],
    profile: Profile,
    repeats: int,
    say: Progress,
) -> _Seconds:
    """All of the graph on one device after another; runs are divided as ``like`` ``[N, C]`` says,
    or None: as operators take it."""
    one = Cluster("one", cluster.devices[:1])
    priority = Problem(graph, one, replace(profile.for_cluster(one), loaded_s=None)).priority
    if like is None:
        like = profile.compute_s[:, cpus]
    inputs = graph.program.timing_inputs()
    with ExitStack() as stack:
        runners = []
        for d in cpus:
            runners.append(stack.enter_context(on_one_device(graph, cluster, d, priority)))
            runners[-1].compile(say)
        names, packed = _compiled_of(runners)
        alone, loaded = measured_rounds(runners, inputs, repeats, say)
    alone_s, order = typical(np.array(alone)), np.argsort(priority)
    run = np.zeros(graph.num_ops, np.int32)
    run[order] = np.cumsum(alone_s[order].any(axis=1))  # all of its time is the first operator's

    def divided(seconds: Floats) -> Floats:
        return np.stack([_divided(*x, run) for x in zip(seconds.T, like.T, strict=True)], axis=1)

    low, high = np.percentile(alone, [25, 75], axis=0)
    loaded_s = divided(typical(np.array(loaded))) if loaded else None
    return _Seconds(divided(alone_s), divided(high - low), loaded_s, int(run.max()), names, packed)


def _in_pieces(
    graph: OpGraph,
    cluster: Cluster,
    cpus: Sequence[int],
    profile: Profile,
    repeats: int,
    say: Progress,
) -> _Seconds:
    """Pieces on devices beside each other, each on every device in turns."""
    inputs, rows = graph.program.timing_inputs(), np.arange(graph.num_ops)
    problem, began = Problem(graph, cluster, profile), time.perf_counter()
    placements = [dealt(graph, cpus, first) for first in range(len(cpus))]
    rounds: list[list[Floats]] = []
    with ExitStack() as stack:
        runners = []
        for p in placements:
            runner = placed(graph, cluster, p.tolist(), problem.priority)
            runners.append(stack.enter_context(runner))
            runner.compile(say)
        names, packed = _compiled_of(runners)
        with nothing_collected():
            while len(rounds) < repeats:
                say(f"measuring, round {len(rounds) + 1} of {repeats}", len(rounds) / repeats)
                rounds.append([run_seconds(runner, inputs, 2) for runner in runners])
                if len(rounds) >= EFFORT.fewest and time.perf_counter() - began > EFFORT.enough_s:
                    break
    took = np.array(rounds).transpose(0, 2, 1)  # [R, N, C]
    low, high = np.percentile(took, [25, 75], axis=0)
    busy = profile.compute_s if profile.loaded_s is None else profile.loaded_s
    loaded_s, spread_s = np.zeros((2, graph.num_ops, cluster.num_devices))
    num_runs = 0
    for p, each_s, wide_s in zip(placements, typical(took).T, (high - low).T, strict=True):
        block = np.zeros(graph.num_ops, np.int32)
        for num_runs, run in enumerate(_runs(problem, p), 1):
            block[list(run)] = num_runs
        loaded_s[rows, p] = _divided(each_s, busy[rows, p], block)
        spread_s[rows, p] = _divided(wide_s, busy[rows, p], block)
    alike = profile.compute_s / np.maximum(busy, 1e-12)  # what company costs
    compute_s, spread_s, loaded_s = (x[:, cpus] for x in (alike * loaded_s, spread_s, loaded_s))
    return _Seconds(compute_s, spread_s, loaded_s, num_runs, names, packed)


def _divided(seconds: Floats, like: Floats, block: NDArray[Any]) -> Floats:
    """The sum of each block, ``[N]``, divided as ``like`` is."""
    like = np.maximum(like, _LEAST_S)
    total, own = (np.bincount(block, x) for x in (seconds, like))
    return like * (total / np.maximum(own, 1e-12))[block]


def _compiled_of(runners: Sequence[Runner]) -> tuple[list[list[str]], NDArray[np.int64]]:
    """``names`` and ``packed`` of ``_Seconds``.

    Raises:
        ProfileError: nothing is compiled.
    """
    if not any(runner.num_compiled for runner in runners):
        why = next(iter(runners[0].not_compiled.values()), "nothing in it computes")
        raise ProfileError(f"nothing of the graph is compiled: {why}")
    names = [sorted(runner.not_compiled) for runner in runners]
    return names, np.max([runner.packed for runner in runners], axis=0)


def dealt(graph: OpGraph, cpus: Sequence[int], first: int) -> Ints:
    """int32 ``[N]``: piece ``k`` is on the ``first + k``-th of the devices, what is whole as 0."""
    piece = np.zeros(graph.num_ops, np.int32) if graph.piece is None else graph.piece
    number = graph.per_group(piece, np.maximum)[graph.group]
    return np.array(cpus, np.int32)[(number + first) % len(cpus)]


def dealt_or(problem: Problem, solution: Solution) -> Solution:
    """The solution, or piece ``k`` on CPU ``k`` where it is not clearly predicted to be faster.

    So compiled runs of a graph in pieces were measured; of others it is not known what is fused.
    """
    cpus = [d for d, device in enumerate(problem.cluster.devices) if device.kind == "cpu"]
    if problem.graph.piece is None or len(cpus) < 2:
        return solution
    apart = dealt(problem.graph, cpus, 0)
    other_s, apart_s = score(problem, np.stack([solution.placement, apart]))
    return solution if other_s < _CLEARLY * apart_s else Solution(apart, float(apart_s))


def _of_kernels(graph: OpGraph, threads: Sequence[int]) -> Floats | None:
    """``[N, C]``: see ``kernel_seconds``; None: kernels cannot be told apart."""
    try:
        seconds = {k: kernel_seconds(graph.program, k) for k in dict.fromkeys(threads)}
    except Exception:  # of Inductor, which may compile parts of it
        return None
    return np.stack([seconds[k] for k in threads], axis=1)


def _runs(problem: Problem, placement: Ints) -> list[tuple[int, ...]]:
    """Those of all devices."""
    own = shares(problem.graph, placement, problem.num_devices)
    return [run for share in own for run in runs_of(share, problem.priority.tolist())]


def _parted(graph: OpGraph, cluster: Cluster, profile: Profile) -> list[Ints]:
    """Placements ``[N]`` of one and three runs of about as many seconds, on devices in turns,
    beginning with each; the last ``[K, N]`` is replicas."""
    priority, placements = Problem(graph, cluster, profile).priority, list[Ints]()
    for count in _PARTS:
        begins = _begins(graph, priority, profile.compute_s.mean(axis=1), count)
        part = np.searchsorted(np.sort(priority[begins]), priority, side="right") - 1
        some = [(part + d) % cluster.num_devices for d in range(cluster.num_devices)]
        placements += [p.astype(np.int32) for p in some]
    whole = np.arange(cluster.num_devices, dtype=np.int32)
    return [*placements, np.repeat(whole[:, None], graph.num_ops, axis=1)]


def _begins(graph: OpGraph, priority: Ints, seconds: Floats, count: int) -> Ints:
    """The first operators of ``count`` parts that take about as long, in the order of ``priority``
    ``[N]``; fewer where groups are large."""
    order = np.argsort(priority)
    last = np.zeros(graph.num_groups, np.int64)
    np.maximum.at(last, graph.group, priority)
    open_until = np.maximum.accumulate(last[graph.group[order]])
    may_end = np.flatnonzero(open_until <= np.arange(len(order)))  # no group is begun and not ended
    ends = np.cumsum(seconds[order])
    wanted = np.searchsorted(ends[may_end], ends[-1] * np.arange(1, count) / count)
    places = may_end[np.minimum(wanted, len(may_end) - 1)] + 1
    return order[np.unique([0, *places[places < len(order)]])].astype(np.int32)


def load_or_measure_compiled(
    graph: OpGraph,
    cluster: Cluster,
    profile: Profile,
    *,
    progress: Progress | None = None,
    folder: str | Path | None = None,
) -> tuple[OpGraph, Profile]:
    """The fused graph and its profile, saved or new; see ``measure_compiled``.

    One that was made of another ``profile``, or is damaged, is made again.
    """
    path = cached_path(graph, cluster, folder)
    path = path.with_name(f"{path.stem}-compiled{path.suffix}")
    when = profile.provenance.get("when")
    saved = None
    with suppress(ProfileError):  # not there, or damaged
        saved = Profile.load(path)
    if saved is None or saved.provenance.get("when") != when or "runs" not in saved.provenance:
        saved = measure_compiled(graph, cluster, profile, progress=progress)
        is_saved(saved, path)
    joined = replace(
        graph,
        group=np.array(saved.provenance["groups"], np.int32),
        param_bytes=graph.param_bytes + np.array(saved.provenance["packed"], np.int64),
    )
    return joined, replace(saved.for_cluster(cluster), graph_fingerprint=joined.fingerprint)
