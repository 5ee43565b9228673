"""Sections that run plans beside one device and plain PyTorch: their times, and their joules."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from experiments.gpu.bench import Bench
from experiments.gpu.memory import peaks
from experiments.gpu.models import PROFILED, all_on, uses
from experiments.gpu.predictions import predicted
from experiments.gpu_baselines import WholeGraph, moved, pinned, ratio, resident
from experiments.runs import in_turns
from placement import planners
from placement.costs import power
from placement.executor import Runner
from placement.executor import compiled as artefacts
from placement.graph import OpGraph
from placement.optimizing import fastest, median_s
from placement.problem import Problem
from placement.program import split_inputs
from placement.runs import ways as measuring
from placement.runs.ways import timed, torch_compiled

LONG_S = 0.25  # a call of so many seconds or more is not made more often than it must be
AUTOTUNED = ("tiny_mlp", "bert_base", "dlrm_b256")  # the convolutions of others take minutes
ENOUGH_S = 2.0  # of a way in all: it has no more turns then
Plain = dict[str, Callable[[Any], list[Tensor]]]  # ways that do without this project
Seconds = Callable[[], Sequence[float]]  # runs a way some times, and says how long each took


def plans(
    bench: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph, compiled: bool = False
) -> None:
    """Plans beside one device, plain PyTorch on the GPU and a CUDA graph of the whole model.

    ``plan`` is what ``placement.optimize`` keeps when it has run the planner's answer beside single
    devices, each as CUDA graphs too (``kept`` says which); ``planned`` that answer. For a latency
    inputs are in pinned memory of the host, and results are wanted there; for a period both are on
    the GPU, except for ways that use the CPU, which are compared with the GPU alone as it is fed
    from there. Ways are compared turn by turn. ``home`` was planned before, of an earlier profile.

    ``compiled``: what is compiled, by us and by ``torch.compile``, beside the CUDA graphs.
    """
    cluster = bench.cluster
    profile = bench.measured(key, graph, cluster, 1 if compiled else 3, calibrate=not compiled)
    problem = Problem(graph, cluster, profile, objective="period", num_microbatches=16)
    plain: Plain = {"eager": resident(module, bench.gpu)}
    with bench.item(f"{key}, CUDA graph of the whole model"):
        plain["graph"] = WholeGraph(plain["eager"], inputs, bench.gpu)
    if compiled:
        plain |= by_torch(bench, key, module, inputs)
    for objective in ("latency", "period"):
        with bench.item(f"{key}, {objective}"):
            posed = replace(problem, objective=objective)
            with fastest(posed, inputs, bench.planning_s, compiled=compiled) as runner:
                answers = {"plan": runner.plan, "planned": runner.planned}
                chosen_s = {way: median_s(m, objective) for way, m in runner.measured.items()}
                kept = "plan_compiled" if runner.compiled else "plan"
                kept = "plan_graphs" if runner.cuda_graphs and not runner.compiled else kept
            placed = {way: plan.placement(graph, cluster) for way, plan in answers.items()}
            home = bench.home(f"{objective}/{key}", graph)
            placed |= {} if home is None or compiled else {"home": home}
            share = 0.25 if objective == "latency" else 0.45
            until = time.perf_counter() + share * bench.fair_s
            turns = compared(bench, posed, placed, plain, inputs, until, compiled)
            seconds = {way: statistics.median(each) for way, each in turns.items()}
            bench.emit(
                f"{key}, {objective}",
                **{f"{k}_ms": v * 1e3 for k, v in seconds.items()},
                **{f"{way}_over_single": over_single(seconds, placed[way], way) for way in placed},
                gpu_over_eager=times_as_fast(turns, "gpu", "eager"),
                graphs_over_graph=times_as_fast(turns, "gpu_graphs", "graph"),
                kept_over_eager=times_as_fast(turns, kept, "eager"),
                kept_over_torch=times_as_fast(turns, kept, "reduce_overhead"),
                kept=kept,
                turns=len(turns.get("gpu", ())),
                **{f"{way}_uses": uses(on) for way, on in placed.items()},
                planned_told_ms=predicted(posed, placed["planned"])[objective == "period"] * 1e3,
                planned=np.packbits(placed["planned"]).tobytes().hex(),  # by operator: 1 the GPU
                chosen_from=", ".join(f"{way} {s * 1e3:.3g} ms" for way, s in chosen_s.items()),
            )
            if uses(placed["planned"]) == "both" and not compiled:
                bench.emit(f"{key}, {objective}, peak", **peaks(problem, placed["planned"]))
    with bench.item(f"{key}, peak") if not compiled else nullcontext():
        bench.emit(f"{key}, peak", **peaks(problem, all_on(graph, 1)))


def compiled(bench: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """``plans`` of what is compiled. Runs on the CPU are not: that takes minutes."""
    no_compiler = patch.object(artefacts, "missing_compiler", lambda: "for this section")
    with no_compiler, patch.object(measuring, "ROUNDS", 2):
        plans(bench, key, module, inputs, graph, compiled=True)


def over_single(seconds: dict[str, float], placement: np.ndarray, way: str) -> float:
    """How many times as fast as the better device, with inputs from where this way has them."""
    gpu = "gpu_fed" if uses(placement) == "both" and "gpu_fed" in seconds else "gpu"
    alone = [seconds[name] for name in ("cpu", gpu) if name in seconds]
    return ratio(min(alone, default=None), seconds.get(way))


def compared(
    bench: Bench,
    problem: Problem,
    plans: dict[str, np.ndarray],
    plain: Plain,
    inputs: Any,
    until: float,
    compiled: bool = False,
) -> dict[str, list[float]]:
    """Seconds by turn: each device alone, the plans, as graphs too, plain PyTorch."""
    graph, latency = problem.graph, problem.objective == "latency"
    host, there = pinned(inputs), moved(inputs, bench.gpu)
    name = f"{graph.name}, {problem.objective}"
    placed = _placements(problem, plans, compiled)
    ways: dict[str, Seconds] = {}
    first: dict[tuple[bytes, bool, str], str] = {}  # of several ways that run the same
    alike: dict[str, str] = {}  # the others of them -> the first
    with ExitStack() as stack:
        for way, on in placed.items():
            is_there = bool(on.all()) and not latency and way != "gpu_fed"
            kind = way.partition("_")[2].removeprefix("fed")
            if (same := (on.tobytes(), is_there, kind)) in first:
                alike[way] = first[same]
                continue
            if not problem.supported[np.arange(graph.num_ops), on].all():
                continue
            with bench.item(f"{name}, {way}", 15):
                stays = "device" if is_there else "host"
                options: dict[str, Any] = {"priority": problem.priority, "outputs": stays}
                runner = stack.enter_context(Runner(graph, problem.cluster, on, **options))
                runner.cuda_graphs, runner.compiled = bool(kind), kind == "compiled"
                item = there if is_there else host
                list(runner.stream([item] * (4 if on.any() else 1)))
                ways[way] = _timer(runner, item, latency)
                first[same] = way
                if kind == "compiled":
                    bench.emit(f"{name}, {way}", **compiling(runner))
        for way, call in plain.items():
            if latency:
                ways[way] = partial(warm_calls, partial(_to_and_fro, call, host, bench.gpu))
            else:
                ways[way] = lambda c=call: [period_of_calls(lambda: c(there), 24)]  # type: ignore[misc]
        # Threads of CPU cores go on for a while, beside what comes next: they come last.
        ways = dict(sorted(ways.items(), key=lambda x: x[0] in placed and not placed[x[0]].all()))
        turns = medians(bench, name, ways, 2 if bench.emulated else 15 if latency else 7, until)
    return turns | {way: turns[same] for way, same in alike.items() if same in turns}


def _placements(
    problem: Problem, plans: dict[str, np.ndarray], compiled: bool
) -> dict[str, np.ndarray]:
    """Each device alone, the plans, and what of these is run as CUDA graphs, or compiled, too.

    In a stream also the GPU ``fed`` from the host, as plans are that use both devices.
    """
    placed = {"cpu": all_on(problem.graph, 0), "gpu": all_on(problem.graph, 1)}
    if problem.objective != "latency" and any(uses(on) == "both" for on in plans.values()):
        placed["gpu_fed"] = placed["gpu"]
    placed |= plans
    if compiled:  # beside graphs and what is launched one by one, which the other section measures
        ways = ("gpu_graphs", "gpu_compiled", "plan", "plan_graphs", "plan_compiled")
        return {way: placed[way.partition("_")[0]] for way in ways}
    return placed | {f"{x}_graphs": placed[x] for x in ("gpu", "plan") if placed[x].any()}


def by_torch(bench: Bench, key: str, module: nn.Module, inputs: Any) -> Plain:
    """What ``torch.compile`` makes of the module on the GPU; how long that took is a row."""
    ways: Plain = {}
    there = copy.deepcopy(module).to(bench.gpu)
    given = moved(inputs, bench.gpu)
    for mode in ("reduce-overhead", *(("max-autotune",) if key in AUTOTUNED else ())):
        with bench.item(f"{key}, {mode}", 0.4 * bench.fair_s):
            one = torch_compiled(there, given, bench.cluster, lambda *_: None, mode)
            if one is not None:
                bench.emit(f"{key}, {mode}", compile_s=one.seconds)
                ways[mode.replace("-", "_")] = partial(_called, one)
    return ways


def _called(call: Callable[..., Any], inputs: Any) -> list[Tensor]:
    args, kwargs = split_inputs(inputs)
    return [x for x in pytree.tree_leaves(call(*args, **kwargs)) if isinstance(x, Tensor)]


def compile_ahead(bench: Bench, part: int) -> None:
    """Fill Inductor's caches with one of the models, beside sections that do it with others."""
    key = "tiny_mlp" if bench.emulated else tuple(PROFILED)[part]
    module, inputs, graph = bench.model(key)
    bench.fair_s = bench.until - time.perf_counter()
    by_torch(bench, key, module, inputs)
    with bench.item(f"{key}, ours"), Runner(graph, bench.cluster, all_on(graph, 1)) as runner:
        runner.compiled = True
        list(runner.stream([inputs] * 2))
        bench.emit(f"{key}, ours", **compiling(runner))


def compiling(runner: Runner) -> dict[str, Any]:
    """How many runs are compiled, what that took, and what is in the way of others."""
    why = next(iter(runner.not_compiled.values()), "")
    facts = {"compiled": runner.num_compiled, "as_they_are": len(runner.not_compiled), "why": why}
    return {"compile_s": runner.compile_s, **facts}


def _timer(runner: Runner, item: Any, latency: bool) -> Seconds:
    """Calls of a runner, or the period of a stream through it."""
    args, kwargs = split_inputs(item)
    call = partial(runner, *args, **kwargs)
    if latency:
        return partial(warm_calls, call)
    call_s = timed(call)
    if call_s > LONG_S:  # on one device, and as long in a stream
        return lambda: [call_s]
    # Of few that a GPU computes a period may be that of launches: one slow call does not decide.
    items = [item] * counted(min(call_s, timed(call), timed(call)))
    return lambda: [runner.period_of(runner.stream(items))]


def _to_and_fro(call: Callable[[Any], list[Tensor]], host: Any, gpu: torch.device) -> list[Tensor]:
    """Outputs in memory of the host, of inputs there."""
    inputs = host if isinstance(call, WholeGraph) else moved(host, gpu)  # it copies them itself
    return [x.cpu() for x in call(inputs)]


def period_of_calls(call: Callable[[], Any], count: int) -> float:
    """Seconds of each of ``count`` calls whose results nobody waits for."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def medians(
    bench: Bench, name: str, ways: Mapping[str, Seconds], turns: int, until: float
) -> dict[str, list[float]]:
    """Seconds of each way by turn: the medians of what the ways return when they are called."""
    runs = {way: lambda call=call: statistics.median(call()) for way, call in ways.items()}
    limits = {"enough_s": ENOUGH_S, "until": until}
    taken = in_turns(runs, turns, 0, guard=lambda way: bench.item(f"{name}, {way}", 15), **limits)
    return {way: seconds.tolist() for way, seconds in taken.items()}


def times_as_fast(turns: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """How many times as fast ``one`` is as the other, in the middle turn of those that both had."""
    both = zip(turns.get(one, ()), turns.get(other, ()), strict=False)
    return statistics.median([other_s / one_s for one_s, other_s in both] or [math.nan])


def warm_calls(call: Callable[[], Any]) -> list[float]:
    """Seconds of three calls, after others in which the clock of a GPU rises; or of a long one."""
    until = time.perf_counter() + 0.03
    while (took_s := timed(call)) and time.perf_counter() < until:
        pass
    return [took_s] if took_s > LONG_S else [timed(call) for _ in range(3)]


def counted(call_s: float) -> int:
    """How many micro-batches tell a period, where a call takes so long: about 0.2 s of them."""
    return int(np.clip(0.2 / call_s, 6, 40))


def energy(bench: Bench) -> None:
    """Joules of the GPU per micro-batch by NVML: at rest with a context, and at work."""
    meter, *_ = power.nvml_meters()
    cluster, key = bench.cluster, "tiny_mlp" if bench.emulated else "resnet50"
    _, inputs, graph = bench.model(key)
    profile = bench.measured(key, graph, cluster, repeats=1, calibrate=False)
    problem = Problem(graph, cluster, profile, objective="period", num_microbatches=16)
    plan = planners.load("best_of", seconds=bench.planning_s)(problem).placement
    there, long_s = moved(inputs, bench.gpu), 0.2 if bench.emulated else 1.5
    before, began = meter.read_j(), time.perf_counter()
    time.sleep(long_s)
    idle_w = meter.since_j(before) / (time.perf_counter() - began)
    bench.emit("rest, with a context", watts=idle_w, meter=meter.name)
    ways = {"CPU": all_on(graph, 0), "GPU": all_on(graph, 1), "GPU, CUDA graphs": all_on(graph, 1)}
    if uses(plan) == "both":  # else it is one of these
        ways["plan"] = plan
    for name, placement in ways.items():
        stays = "device" if placement.all() else "host"
        with bench.item(name), Runner(graph, cluster, placement, outputs=stays) as runner:
            runner.cuda_graphs = name != "GPU"
            item, many = (there, 64) if placement.all() else (inputs, 16)
            list(runner.stream([item] * 8))
            before, began = meter.read_j(), time.perf_counter()
            count, until = 0, began + long_s
            while time.perf_counter() < until:
                count += sum(1 for _ in runner.stream([item] * many))
            joules, took_s = meter.since_j(before), time.perf_counter() - began
            bench.emit(
                name,
                watts=joules / took_s,
                gpu_j_per_microbatch=joules / count,
                ms=took_s / count * 1e3,
                count=count,
            )
    bench.emit("plan", uses=uses(plan))
