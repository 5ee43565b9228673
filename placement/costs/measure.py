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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from placement.cluster import Cluster, Device, cpu_model
from placement.costs.calibration import calibrated
from placement.costs.corpus import remember
from placement.costs.transfers import batch_seconds, measure_links
from placement.executor.alone import (
    Alone,
    InParts,
    as_it_can,
    is_short,
    lacks_kernel,
    last_seconds,
    on_one_device,
    run_seconds,
)
from placement.executor.awake import cores_stay_awake
from placement.executor.backend import is_cuda_here
from placement.executor.runner import Runner
from placement.graph import OpGraph, reuse_position
from placement.problem import Problem
from placement.profile import Profile, ProfileError
from placement.program import check_captured
from placement.tools.clock import nothing_collected
from placement.tools.files import FileError, cache_folder
from placement.tools.progress import Progress

Floats = NDArray[np.float64]


class MeasuringEffort(NamedTuple):
    """How often a graph runs: more often takes longer, and is less disturbed by others."""

    patience: int = 3  # times as many rounds as are asked for: others disturb for seconds at a time
    spread: float = 0.15  # by which the middle half of the rounds may differ: else more follow
    # A graph that takes long has fewer rounds than it was to have.
    enough_s: float = 10.0  # after which no more begin ...
    fewest: int = 3  # ... but for the first
    rising_s: float = 0.03  # in which a GPU's clock rises before a round ...
    most_runs: int = 50  # ... and runs meanwhile, at most
    least_share: float = 0.5  # of an operator's seconds stays without those of recording it
    together_s: float = 0.02  # at least, in which devices run the graph beside each other
    order_rounds: int = 5  # in which two orders of the operators take turns ...
    clearly: float = 0.95  # ... the second is taken where it needs less than this share of the time


EFFORT = MeasuringEffort()
_RULES = 14  # to be raised with what profiles of this machine say, or ``simulate`` makes of them


def measure(
    graph: OpGraph, cluster: Cluster, *, repeats: int = 10, progress: Progress | None = None
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
        ProfileError: no captured graph, no rounds, a device of the cluster is not on this
            machine, or no device can run an operator.
    """
    if repeats < 1:
        raise ProfileError(f"repeats = {repeats}: must be at least 1")
    say = progress or (lambda what, share: None)
    check_captured(graph, cluster, ProfileError)
    check_here(cluster)
    inputs = graph.program.timing_inputs()
    began = time.time()
    say("looking for the better order", None)
    order, priority = better_order(graph, cluster, inputs)
    runners: list[Alone] = []
    needed = np.zeros((cluster.num_devices, graph.num_ops, 2), np.int64)
    with ExitStack() as stack:
        for d, name in enumerate(cluster.device_names):
            say(f"warming up {name}", 0.0)
            runner, needed[d] = as_it_can(graph, cluster, d, priority, inputs)
            runners.append(runner)
            stack.callback(runner.close)
        alone, loaded = measured_rounds(runners, inputs, repeats, say)
        say("measuring links", None)
        links = measure_links(cluster, repeats=max(3, repeats // 2))
        marks_s = np.array([_mark_seconds(r, priority, inputs, min(repeats, 5)) for r in runners])
    say("measuring streams", None)
    batch_s = batch_seconds(cluster, repeats=max(3, repeats // 2))
    low, high = np.percentile(alone, [25, 75], axis=0)
    workspace, library = needed[:, :, 0].max(axis=0), needed[:, :, 1].T
    facts: dict[str, Any] = {"order": order, "repeats": repeats, "rounds": len(alone)}
    lacking = np.zeros((graph.num_ops, cluster.num_devices))  # inf: what cannot run there
    for d, runner in enumerate(runners):
        if isinstance(runner, InParts):
            lacking[list(runner.missing), d] = np.inf
            facts.setdefault("in_parts", []).append(cluster.device_names[d])

    def unmarked(rounds: list[Floats]) -> Floats:
        seconds = typical(np.array(rounds))
        return np.maximum(seconds - marks_s, EFFORT.least_share * seconds) + lacking

    profile = Profile(
        device_names=cluster.device_names,
        compute_s=unmarked(alone),
        spread_s=high - low,
        links=links,
        loaded_s=unmarked(loaded) if loaded else None,
        batch_s=batch_s,
        workspace_bytes=workspace if workspace.any() else None,
        library_bytes=library if library.any() else None,
        graph_fingerprint=graph.fingerprint,
        provenance=provenance(**facts),
    )
    if cluster.num_devices > 1:
        say("running some placements, to calibrate", None)
        profile = calibrated(graph, cluster, profile)
    seconds = round(time.time() - began, 2)
    return replace(profile, provenance=profile.provenance | {"seconds": seconds})


def measured_rounds(
    runners: Sequence[Alone], inputs: Sequence[Tensor], repeats: int, say: Progress
) -> tuple[list[Floats], list[Floats]]:
    """Seconds of the operators, float64 ``[N, D]`` for each round: alone, and beside all devices.

    There are none of the latter where there is one device. Where a round takes seconds there are
    fewer than ``repeats``.
    """
    alone, loaded = list[Floats](), list[Floats]()
    runs, began = [_runs(runner, 0.0) for runner in runners], time.perf_counter()

    def go_on() -> bool:
        if len(alone) < min(EFFORT.fewest, repeats):
            return True
        if time.perf_counter() - began > EFFORT.enough_s or len(alone) >= EFFORT.patience * repeats:
            return False
        return len(alone) < repeats or not (_steady(alone) and _steady(loaded))

    # What a round has recorded is dropped at its end, and the next makes as many objects: so
    # collections would interrupt the same operator in each, which no median takes out.
    with nothing_collected():
        while go_on():
            done = len(alone)
            of = f"{repeats}"
            if done >= repeats:
                most = EFFORT.patience * repeats
                of = f"at most {most}, as rounds differ by more than {EFFORT.spread:.0%}"
            say(f"measuring, round {done + 1} of {of}", min(1.0, done / repeats))
            # The first of the runs finds the caches as another device left them.
            each = [run_seconds(r, inputs, count) for r, count in zip(runners, runs, strict=True)]
            alone.append(np.stack(each, axis=1))
            runs = [_runs(r, s.sum()) for r, s in zip(runners, each, strict=True)]
            if len(runners) > 1:
                whole_s = float(alone[-1].sum(axis=0).mean())
                loaded.append(_run_together(runners, inputs, whole_s))
    return alone, loaded


def _runs(runner: Alone, whole_s: float) -> int:
    """How many runs to make, of which the last counts, where one takes ``whole_s`` (0: unknown).

    A GPU that was idle while another device was measured takes a while to raise its clock. A graph
    in parts runs each of them twice by itself.
    """
    if isinstance(runner, InParts):
        return 1
    rising = EFFORT.rising_s / whole_s if whole_s and _on_gpu(runner) else 0.0
    return int(np.clip(2 + rising, 2, EFFORT.most_runs))


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
    return bool(np.all(high - low <= EFFORT.spread * middle))


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
    disturbed = whole > (1 + EFFORT.spread) * np.percentile(whole, 25, axis=0)
    calm = np.where(disturbed[:, None], np.nan, rounds)
    middle = np.nanmedian(calm, axis=0)
    total: Floats = np.nanmedian(np.where(disturbed, np.nan, whole), axis=0)
    whole_s = middle.sum(axis=0)  # 0 of a device on which nothing ran
    return middle * np.divide(total, whole_s, out=np.ones_like(total), where=whole_s > 0)


def load_or_measure(
    graph: OpGraph,
    cluster: Cluster,
    *,
    repeats: int | None = None,
    again: bool = False,
    progress: Progress | None = None,
    folder: str | Path | None = None,
) -> Profile:
    """The saved profile of this graph on this cluster's devices, or a new one, then saved.

    ``repeats`` asks for a profile of at least so many rounds: one of fewer is measured again. None
    is content with any, and measures 10 where there is none. ``again``: it is measured in any case.

    A cluster may hold devices that are described in terms of a measured one (``like``); those
    that are measured (see ``measurable``) must be on this machine. A profile that cannot be saved
    (no space, no permission) is returned all the same, with a warning.
    """
    check_captured(graph, cluster, ProfileError)
    here = measurable(cluster)
    if here.devices != cluster.devices:
        options: dict[str, Any] = {"repeats": repeats, "progress": progress, "folder": folder}
        return load_or_measure(graph, here, again=again, **options).for_cluster(cluster)
    path = cached_path(graph, cluster, folder)
    if os.path.exists(path) and not again:  # (Path.exists raises where nothing may be seen)
        profile = Profile.load(path)
        profile.check(graph)
        if repeats is None or profile.provenance.get("repeats", 0) >= repeats:
            return profile.for_cluster(cluster)
    profile = measure(graph, cluster, repeats=repeats or 10, progress=progress)
    if is_saved(profile, path):
        remember(graph, cluster, profile, folder)
    return profile.for_cluster(cluster)


def measurable(cluster: Cluster) -> Cluster:
    """The devices to measure for a cluster: its own, and those here that others are ``like``.

    All devices of this machine where it has none of its own.
    """
    workers = cluster.workers
    own = tuple(d for d in workers.devices if d.like is None)
    if len(own) == workers.num_devices:
        return workers
    here = Cluster.detect()
    names = {d.like for d in workers.devices} - {d.name for d in own}
    others = tuple(d for d in here.devices if d.name in names)
    return replace(here, devices=(*own, *others)) if own else here


def is_saved(profile: Profile, path: Path) -> bool:
    """Save a profile; whether that is possible, with a warning where it is not."""
    try:
        profile.save(path)
    except FileError as error:
        warnings.warn(
            f"the profile is not saved ({error}), so it will be measured again next time; or set "
            "PLACEMENT_HOME to another folder",
            stacklevel=3,
        )
        return False
    return True


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


def provenance(**facts: Any) -> dict[str, Any]:
    """When and where a measurement was made, with which versions."""
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
    and not clearly slower on another. A graph in pieces has an order of its own.
    """
    if graph.piece is not None:
        return "graph", np.arange(graph.num_ops, dtype=np.int32)
    runner, _ = as_it_can(graph, cluster, 0, np.arange(graph.num_ops, dtype=np.int32), inputs)
    with closing(runner):
        seconds = run_seconds(runner, inputs, 1)[:, None]
    one = Cluster("one", cluster.devices[:1])
    rank = Problem(graph, one, Profile(one.device_names, seconds, seconds * 0)).rank_position
    forward = ~graph.is_backward[graph.param_use_op]
    if np.bincount(graph.param_use[forward]).max(initial=0) < 2:
        return "rank", rank  # nothing is read twice, but by a backward, which is far
    reuse = reuse_position(graph)
    first = {device.kind: d for d, device in reversed(list(enumerate(cluster.devices)))}
    ratios = [
        _share_of_time(graph, cluster, d, reuse, rank, inputs) for d in sorted(first.values())
    ]
    better = min(ratios) < EFFORT.clearly and max(ratios) < 1 / EFFORT.clearly
    return ("reuse", reuse) if better else ("rank", rank)


def _share_of_time(
    graph: OpGraph,
    cluster: Cluster,
    d: int,
    order: NDArray[np.int32],
    other: NDArray[np.int32],
    inputs: Sequence[Tensor],
) -> float:
    """What share of the time of the other order one takes on a device; 1 where neither can run."""
    with (
        on_one_device(graph, cluster, d, other) as by_other,
        on_one_device(graph, cluster, d, order) as by_order,
    ):
        try:
            ratios = [
                run_seconds(by_order, inputs, 2).sum() / run_seconds(by_other, inputs, 2).sum()
                for _ in range(EFFORT.order_rounds)
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
    num_ops = runners[0].graph.num_ops
    means = np.zeros((num_ops, len(runners)))
    times = max(3, int(EFFORT.together_s / max(whole_s, 1e-4)))
    able = [  # one that can run nothing would spin until the others end
        d for d, r in enumerate(runners) if not isinstance(r, InParts) or len(r.missing) < num_ops
    ]
    gate, busy = threading.Barrier(max(len(able), 1)), set(able)

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
            for future in [pool.submit(work, d) for d in able]:
                future.result()
        except BaseException:  # Ctrl-C too: nobody may be left waiting for the others
            gate.abort()
            busy.clear()
            for runner in runners:
                runner.close()
            raise
    return means
