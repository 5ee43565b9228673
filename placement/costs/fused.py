"""Costs of compiled runs: operators of a kernel stay together, and blocks of kernels are measured.

A compiler fuses operators, so that what one takes by itself is no part of what a run takes. The
whole graph is scheduled once by Inductor, which says what shares a kernel; these operators become a
colocation group, so that a cut between groups changes no kernel. Then the graph runs on every CPU
device in blocks, each compiled, of which the ends lie between groups, through the same workers as a
placed pipeline. What a block takes is divided among its operators as they take it uncompiled: sums
over blocks are measured, and what is inside of a block is an estimate. Where blocks meet, layouts
are converted and kernels are not fused, which a placement of few runs hardly has: all is scaled to
what the graph takes as one run. Weights that are packed for the processor are a second copy: its
bytes are counted with the parameter, on every device.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster
from placement.costs.measure import cached_path, measured_rounds, typical
from placement.executor.alone import on_one_device
from placement.executor.compiled import kernels_of
from placement.executor.runner import Runner
from placement.graph import OpGraph, reuse_position
from placement.problem import Problem
from placement.profile import Profile, ProfileError
from placement.tools.progress import Progress

Ints = NDArray[np.int32]

_BLOCK_S, _MOST_BLOCKS = 1e-3, 12  # a block takes so long at least: a call of it takes microseconds


def fused(graph: OpGraph) -> OpGraph:
    """The graph, operators that share a kernel in one colocation group.

    Raises:
        Exception: Inductor refuses the graph.
    """
    group = graph.group.copy()
    for ops in kernels_of(graph.program):
        joined = np.isin(group, group[sorted(ops)])
        group[joined] = group[joined].min()
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
    try:
        joined = fused(graph)
    except Exception as error:  # e.g. of Inductor, of an operator that it does not know
        line = next(iter(str(error).splitlines()), "")[:200]
        raise ProfileError(f"the graph is not compiled: {type(error).__name__}: {line}") from error
    one = Cluster("one", cluster.devices[:1])
    of_one = Problem(graph, one, replace(profile.for_cluster(one), loaded_s=None))
    by_reuse = profile.provenance.get("order") == "reuse"
    priority = reuse_position(graph) if by_reuse else of_one.rank_position
    cpus = [d for d, device in enumerate(cluster.devices) if device.kind == "cpu"]
    begins = _begins(joined, priority, profile.compute_s[:, cpus].mean(axis=1))
    runners: list[Runner] = []
    wholes: list[Runner] = []
    try:
        for d in cpus:
            for begun, into in ((begins.tolist(), runners), ((), wholes)):
                into.append(on_one_device(graph, cluster, d, priority))
                into[-1].begins = frozenset(begun)
                into[-1].compile(say)
        if not any(runner.num_compiled for runner in runners):
            why = next(iter(runners[0].not_compiled.values()), "nothing in it computes")
            raise ProfileError(f"nothing of the graph is compiled: {why}")
        inputs = graph.program.timing_inputs()
        alone, loaded = measured_rounds(runners, inputs, repeats, say)
        whole_s = typical(np.array(measured_rounds(wholes, inputs, repeats, say)[0])).sum(axis=0)
        names = [sorted(runner.not_compiled) for runner in runners]
        packed = np.max([runner.packed for runner in runners], axis=0)
    finally:
        for runner in (*runners, *wholes):
            runner.close()
    scale = whole_s / typical(np.array(alone)).sum(axis=0)
    block = np.searchsorted(np.sort(priority[begins]), priority, side="right")
    compute_s, spread_s = profile.compute_s.copy(), profile.spread_s.copy()
    loaded_s = None if profile.loaded_s is None else profile.loaded_s.copy()

    def divided(seconds: NDArray[np.float64], like: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum of each block [N, D], divided as ``like`` is, as part of one run."""
        sums = [np.zeros((block.max() + 1, x.shape[1])) for x in (seconds, like)]
        for total, x in zip(sums, (seconds, like), strict=True):
            np.add.at(total, block, x)
        return like * (scale * sums[0] / np.maximum(sums[1], 1e-12))[block]

    own = profile.compute_s[:, cpus]
    compute_s[:, cpus] = divided(typical(np.array(alone)), own)
    low, high = np.percentile(alone, [25, 75], axis=0)
    spread_s[:, cpus] = divided(high - low, own)
    if loaded_s is not None and loaded:
        loaded_s[:, cpus] = divided(typical(np.array(loaded)), own)
    facts: dict[str, Any] = {"compiled": True, "groups": joined.group.tolist()}
    facts |= {"blocks": len(begins), "interpreted": names, "packed": packed.tolist()}
    facts |= {"seconds": round(time.time() - began, 2)}
    return replace(
        profile,
        compute_s=compute_s,
        spread_s=spread_s,
        loaded_s=loaded_s,
        provenance=profile.provenance | facts,
    )


def _begins(graph: OpGraph, priority: Ints, seconds: NDArray[np.float64]) -> Ints:
    """The first operators of blocks that take about as long, in the order of ``priority`` [N]."""
    order = np.argsort(priority)
    last = np.zeros(graph.num_groups, np.int64)
    np.maximum.at(last, graph.group, priority)
    open_until = np.maximum.accumulate(last[graph.group[order]])
    may_end = np.flatnonzero(open_until <= np.arange(len(order)))  # no group is begun and not ended
    ends = np.cumsum(seconds[order])
    count = int(np.clip(ends[-1] / _BLOCK_S, 1, _MOST_BLOCKS))
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

    One that was made of another ``profile`` is made again.
    """
    path = cached_path(graph, cluster, folder)
    path = path.with_name(f"{path.stem}-compiled{path.suffix}")
    when = profile.provenance.get("when")
    saved = Profile.load(path) if path.exists() else None
    if saved is None or saved.provenance.get("when") != when or "packed" not in saved.provenance:
        saved = measure_compiled(graph, cluster, profile, progress=progress)
        saved.save(path)
    joined = replace(
        graph,
        group=np.array(saved.provenance["groups"], np.int32),
        param_bytes=graph.param_bytes + np.array(saved.provenance["packed"], np.int64),
    )
    return joined, replace(saved.for_cluster(cluster), graph_fingerprint=joined.fingerprint)
