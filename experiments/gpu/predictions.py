"""Sections that measure operators, and placements beside what is predicted of them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from experiments.gpu.bench import Bench
from experiments.gpu.models import all_on
from experiments.study import StudyError
from placement.cluster import Cluster
from placement.costs.calibration import at_speed, pieces, run_placement
from placement.executor import Runner
from placement.graph import OpGraph
from placement.problem import Problem
from placement.simulator import evaluate

TURNS = 9  # of all placements, at most
EVERY = 10  # placements, then each device alone


def each(
    keys: Sequence[str], one: Callable[[Bench, str, nn.Module, Any, OpGraph], None]
) -> Callable[[Bench], None]:
    """The section that does the same with models."""

    def section(bench: Bench) -> None:
        names = ("tiny_mlp",) if bench.emulated else keys
        for i, key in enumerate(names):
            bench.fair_s = (bench.until - time.perf_counter()) / (len(names) - i)
            with bench.item(key, bench.part_s(len(names) - i)):
                one(bench, key, *bench.model(key))

    return section


def profile(bench: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Where the CPU wins, and what of the GPU's time is dispatch."""
    cluster, is_long = bench.cluster, key.endswith("_b32")
    measured = bench.measured(key, graph, cluster, 1 if is_long else 3, calibrate=not is_long)
    cpu, gpu = measured.compute_s.T
    busy_s = math.nan
    with bench.item(f"{key}, kernels alone"):
        busy_s = kernel_seconds(graph, cluster, inputs, "CPU" if bench.emulated else "CUDA")
    gpu_s = float(gpu[np.isfinite(gpu)].sum())
    bench.emit(
        key,
        cpu_ms=float(cpu.sum() * 1e3),
        gpu_ms=gpu_s * 1e3,
        kernels_ms=busy_s * 1e3,
        dispatch_share=1 - busy_s / gpu_s,
        cpu_faster_share=float((cpu < gpu).mean()),
        cpu_faster_in=commonest(np.array(graph.op_kind)[cpu < gpu]),
        lacking=int(np.isinf(gpu).sum()),
        error=measured.provenance.get("error"),
        seconds=measured.provenance["seconds"],
    )


def commonest(kinds: Iterable[str]) -> str:
    """The three kinds of operators that are there most often, and how often."""
    return ", ".join(f"{n} {kind}" for kind, n in Counter(kinds).most_common(3))


def kernel_seconds(graph: OpGraph, cluster: Cluster, inputs: Any, where: str) -> float:
    """Seconds of the kernels alone that run on ``where``, of a run on the GPU."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with Runner(graph, cluster, all_on(graph, 1)) as runner:
        list(runner.stream([inputs] * 3))
        with record(activities=[getattr(ProfilerActivity, where)]) as run:
            list(runner.stream([inputs] * 5))
    # As they were recorded: to make a tree of them takes PyTorch seconds. Copies are no kernels.
    kernels_ns = [
        e.duration_ns()
        for e in run.profiler.kineto_results.events()
        if e.device_type().name == where and e.name()[:3] != "Mem"
    ]
    if not kernels_ns:
        raise StudyError(f"PyTorch's profiler has seen nothing of {where}")
    return sum(kernels_ns) * 1e-9 / 5


def fidelity(bench: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Predicted and measured latency and period of placements with few cuts and many.

    As a user runs them: nothing is recorded. A virtual machine changes its speed within seconds,
    which no model foresees. So placements run again and again, in turns, and after every few of
    them the whole model on each device, called and streamed alike. Predictions are for devices of
    the speed that these had in the middle; ``plain`` are those for the speed of the profile. By how
    much the second time differs from the first is the ``floor`` of what a prediction can miss, and
    how these two ranks correlate (``rank_again``) is about what its rank can reach.

    Arrays end in latency and period, float64 ``[.., 2]``.
    """
    until, cluster = time.perf_counter() + 0.9 * bench.fair_s, bench.cluster
    problem = Problem(graph, cluster, bench.measured(key, graph, cluster), num_microbatches=8)
    counts = (1, 2, 4, 8, 16, 32, 2, 1, 8, 4, 32, 16, 1, 2, 4, 8, 16, 32, 2, 1)
    placements = list(pieces(problem, counts[: 3 if bench.emulated else None], seed=0))
    singles = [all_on(graph, device) for device in (0, 1)]
    plain = np.array([predicted(problem, placement) for placement in placements])
    plain_alone = np.array([predicted(problem, placement) for placement in singles])

    def run(what: str, placement: np.ndarray, predicted: np.ndarray) -> tuple[float, float]:
        """Latency and period; of quick ones more, as a GPU that was idle is warm late."""
        more = 1 if bench.emulated else int(np.clip(0.03 / predicted[0], 1, 8))
        both = run_placement(problem, placement, 3 * more, 8 * more, 2 * more)
        names = ("latency_s", "period_s", "measured_latency_s", "measured_period_s")
        bench.emit(f"{key}, {what}", **dict(zip(names, [*predicted, *both], strict=True)))
        return both

    runs, runs_alone = list[Any](), list[Any]()
    for n in range(TURNS * len(placements)):
        if n % EVERY == 0:
            devices = zip(cluster.device_names, singles, plain_alone, strict=True)
            runs_alone.append([run(*device) for device in devices])
        i = n % len(placements)
        cuts = int((np.diff(placements[i][np.argsort(problem.priority)]) != 0).sum())
        runs.append(run(f"{cuts} cuts", placements[i], plain[i]))
        if n > 6 and time.perf_counter() > until:  # fewer of each rather than none of the last
            break
    # Of each device, float64 [D, 2]; a machine that stands still for a moment decides no median.
    times = np.exp(np.median(np.log(np.array(runs_alone) / plain_alone), axis=0))
    slower = [replace(problem, profile=at_speed(problem.profile, times[:, k])) for k in (0, 1)]
    followed = np.array([[predicted(slower[k], p)[k] for k in (0, 1)] for p in placements])
    bench.emit(
        key,
        placements=min(len(runs), len(plain)),
        **agreement(plain, followed, np.array(runs)),
        **{f"{name}_speeds": times[d].tolist() for d, name in enumerate(cluster.device_names)},
    )


def predicted(problem: Problem, placement: np.ndarray) -> tuple[float, float]:
    """Predicted seconds of a call, as it is timed from outside, and the predicted period."""
    values = evaluate(problem, placement[None])
    return float(values.latency_s[0]) + problem.overhead_s(placement), float(values.period_s[0])


def agreement(plain: np.ndarray, followed: np.ndarray, took: np.ndarray) -> dict[str, float]:
    """How well predictions ``followed [P, 2]`` of placements agree with what they ``took [R, 2]``.

    They ran in turns: run ``r`` is of placement ``r % P``. Of its turns the middle one counts: a
    virtual machine stands still at times. ``plain [P, 2]`` are other predictions. Errors are of
    logarithms, and medians over placements.
    """
    from scipy.stats import spearmanr

    num, num_ran = len(plain), min(len(plain), len(took))
    middle = np.exp([np.median(np.log(took[i::num]), axis=0) for i in range(num_ran)])
    predicted = followed[:num_ran]
    off, plain_off = (np.abs(np.log(x / middle)) for x in (predicted, plain[:num_ran]))
    again = took[num:][:num]
    floor = np.abs(np.log(took[: len(again)] / again))
    facts = {}
    for k, name in enumerate(("latency", "period")):
        facts[f"{name}_error"] = float(np.median(off[:, k]))
        facts[f"{name}_rank"] = float(spearmanr(predicted[:, k], middle[:, k]).statistic)
        facts[f"{name}_plain_error"] = float(np.median(plain_off[:, k]))
        facts[f"{name}_floor"] = float(np.median(floor[:, k])) if len(floor) else math.nan
        both = took[: len(again), k], again[:, k]
        facts[f"{name}_rank_again"] = (
            float(spearmanr(*both).statistic) if len(again) > 2 else math.nan
        )
    return facts
