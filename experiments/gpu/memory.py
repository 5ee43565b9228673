"""Section ``memory``: models twice as large as the memory that the GPU may use; and peaks."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from experiments.gpu.bench import Bench
from experiments.gpu.models import all_on, bytes_of, expected_of
from experiments.gpu_baselines import (
    Decoder,
    offloaded_seconds,
    ratio,
    streamed,
    tensors_of,
    timed,
)
from placement import planners
from placement.capturing import capture
from placement.cluster import Cluster
from placement.executor import Executor, Runner, weights
from placement.executor.equality import error
from placement.executor.streamed import with_streaming
from placement.graph import OpGraph
from placement.optimizing import fastest
from placement.problem import Problem
from placement.program import split_inputs
from placement.runs import ways
from placement.simulator import evaluate, simulate
from placement.workloads import load

PROMISED = 0.85  # the rest is for what a plan does not count, as how the allocator cuts blocks


def memory(bench: Bench) -> None:
    """Models twice as large as the memory that the GPU may use."""
    with bench.item("measured in parts"):
        _in_parts(bench)
    width, layers = (128, 6) if bench.emulated else (2048, 8)
    shape = {"tables": 3, "rows": 20_000, "batch": 16} if bench.emulated else {
        "tables": 26, "rows": 100_000, "batch": 512}  # fmt: skip
    decoder = Decoder(layers, width).eval()
    models: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "decoder, few tokens": lambda: (decoder, torch.randn(1, 16, width)),
        "dlrm": lambda: load("dlrm", dim=64, lookups=1, **shape),
        "decoder, many tokens": lambda: (decoder, torch.randn(1, 256, width)),
    }
    names = list(models)[: 2 if bench.emulated else 3]
    for i, name in enumerate(names):
        with bench.item(name, bench.part_s(len(names) - i)):
            _capped(bench, name, *models[name]())


def _in_parts(bench: Bench) -> None:
    """A model that the GPU cannot hold is measured all the same, and a plan of it runs."""
    width = 1024 if bench.emulated else 4096
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).eval()
    inputs = torch.randn(8, width)
    graph = capture(module, inputs, name="parts")
    with memory_of(bench, 0.6 * bytes_of(module)) as cluster:
        profile = bench.measured("parts", graph, cluster, 1, calibrate=False)
        problem = Problem(graph, cluster, profile, num_microbatches=1)
        solution = planners.load("heft")(problem)
        with Runner(graph, cluster, solution.placement) as runner:
            off = error(runner(inputs), expected_of(module, [inputs])[0][0][0])
    parts = profile.provenance.get("in_parts")
    used = float((solution.placement == 1).mean())
    bench.emit("measured in parts", parts=str(parts), error=off, on_gpu=used, ok=off < 1e-2)


def forget(graph: OpGraph | None = None) -> None:
    """Free the GPU of a graph's parameters, cuBLAS' workspaces, and what the allocator keeps."""
    if graph is not None:
        weights.forget_others(torch.device("cuda:0"), graph.program, set())
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextmanager
def memory_of(bench: Bench, num_bytes: float) -> Iterator[Cluster]:
    """The GPU can allocate ``num_bytes``, of which it is promised ``PROMISED``."""
    cpu, card = bench.cluster.devices
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()  # accelerate leaves modules that hold themselves
    forget()
    torch.cuda.set_per_process_memory_fraction(num_bytes / total)
    held = torch.cuda.memory_allocated() / 2**20  # of what should have gone
    bench.emit("memory that is held", held_mib=held, allowed_mib=num_bytes / 2**20)
    try:
        promised = max(1, int(PROMISED * num_bytes))
        yield Cluster("capped", (cpu, replace(card, memory_bytes=promised)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _capped(bench: Bench, name: str, module: nn.Module, inputs: Any) -> None:
    """One model: measured without the cap, which would take longer; then all ways under it."""
    graph, size = capture(module, inputs, name=name), bytes_of(module)
    key = name.replace(", ", "_").replace(" ", "_")
    profile = bench.measured(key, graph, bench.cluster, calibrate=False)
    streaming = with_streaming(bench.cluster)  # whose copies are measured with memory of their own
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        expected = [x.clone() for x in tensors_of(module(*args, **kwargs))]
    forget(graph)
    with memory_of(bench, 0.5 * size) as cluster:
        more = replace(streaming, devices=(*cluster.devices, streaming.devices[2]))
        alike = {"objective": "latency", "num_microbatches": 1}
        problem = Problem(graph, more, profile.for_cluster(more), **alike)
        bench.keep(f"{key}_half", problem)
        placed = _placements(bench, problem, Problem(graph, cluster, profile, **alike), inputs)
        ms, facts = _run(bench, problem, placed, inputs, expected)
        forget(graph)
        if isinstance(module, Decoder):
            with bench.item(f"{name}, streamed", 30):
                by_hand, num_stay = streamed(module, inputs, bench.gpu)
                ms["streamed_ms"] = timed(by_hand, 5) * 1e3
                facts |= {"streamed_error": error(by_hand(), expected[0])}
                facts["streamed_kept"] = num_stay
            by_hand = None  # or its memory would be held
        forget()
        with bench.item(f"{name}, accelerate", 30), torch.no_grad():
            limits = {} if bench.emulated else {0: cluster.devices[1].memory_bytes}
            offloaded_s = offloaded_seconds(module, inputs, limits | {"cpu": 2**40})
            ms["accelerate_ms"] = offloaded_s * 1e3
    plan = placed["planned"]
    others = ("cpu", "accelerate", "streamed", "cut")
    bench.emit(
        name,
        model_mib=size / 2**20,
        **ms,
        **{f"plan_over_{way}": ratio(ms.get(f"{way}_ms"), ms.get("plan_ms")) for way in others},
        better=min(("cut", "stream", "streamed"), key=lambda way: ms.get(f"{way}_ms", math.inf)),
        predicted_ms=float(evaluate(problem, plan[None]).latency_s[0]) * 1e3,
        on_gpu=float((problem.worker[plan] == 1).mean()),
        from_host_mib=float(problem.param_bytes_on(plan)[0]) / 2**20,
        link_gb_per_s=streaming.links[-1].bandwidth_bytes_per_s * 1e-9,
        **facts,
        ok=all(value <= 3e-3 for key, value in facts.items() if key.endswith("_error")),
    )


def _placements(
    bench: Bench, problem: Problem, two_choices: Problem, inputs: Any
) -> dict[str, np.ndarray]:
    """By the way to it: ``plan`` is what ``placement.optimize`` keeps, ``planned`` the planner's.

    ``cut`` is the best of ``two_choices``: what stays on the CPU is computed there.
    """
    graph, cluster = problem.graph, problem.cluster
    planner = planners.load("best_of", seconds=bench.planning_s)
    placed: dict[str, np.ndarray] = {}
    with (
        bench.item(f"{graph.name}, optimize", 20),
        patch.object(ways, "ROUNDS", 2),
        fastest(problem, inputs, 2 * bench.planning_s) as runner,
    ):
        placed["planned"] = runner.planned.placement(graph, cluster)
        placed["plan"] = runner.plan.placement(graph, cluster)
    if "plan" not in placed:
        placed["planned"] = placed["plan"] = planner(problem).placement
    placed["cpu"] = all_on(graph, 0)
    if evaluate(problem, all_on(graph, 2)[None]).feasible.all():  # two buffers have room
        placed["stream"] = all_on(graph, 2)
    return placed | {"cut": planner(two_choices).placement}


def _run(
    bench: Bench,
    problem: Problem,
    placed: dict[str, np.ndarray],
    inputs: Any,
    expected: list[torch.Tensor],
) -> tuple[dict[str, float], dict[str, Any]]:
    """Milliseconds of a call and errors of each way; and memory beside what was predicted."""
    graph, (args, kwargs) = problem.graph, split_inputs(inputs)
    ms: dict[str, float] = {}
    facts: dict[str, Any] = {}
    ran: dict[bytes, str] = {}
    for way, placement in placed.items():
        if same := ran.get(placement.tobytes()):
            ms |= {f"{way}_ms": ms[f"{same}_ms"]} if f"{same}_ms" in ms else {}
            continue
        ran[placement.tobytes()] = way
        forget(graph)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with (
            bench.item(f"{graph.name}, {way}", 30),
            Runner(graph, problem.cluster, placement, priority=problem.priority) as runner,
        ):
            outputs = tensors_of(runner(*args, **kwargs))
            errors = [error(x, exact) for x, exact in zip(outputs, expected, strict=True)]
            facts[f"{way}_error"] = max(errors)
            call = partial(runner, *args, **kwargs)
            times = 1 if bench.emulated else int(np.clip(0.2 / timed(call), 3, 40))
            ms[f"{way}_ms"] = timed(call, times) * 1e3
        if way == "planned":
            peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
            facts |= beside(problem, placement, peak_mib)
    return ms, facts


def peaks(problem: Problem, placement: np.ndarray) -> dict[str, float]:
    """Predicted and allocator's peak of a GPU, in MiB, without what else is in its memory."""
    forget(problem.graph)
    before = torch.cuda.memory_allocated(0)
    line = Executor(problem).run(placement, num_microbatches=6)
    measured_mib = float(line.peak_bytes[1] - before) / 2**20
    return beside(replace(problem, num_microbatches=6), placement, measured_mib)


def beside(problem: Problem, placement: np.ndarray, measured_mib: float) -> dict[str, float]:
    """The predicted peak of a GPU beside the one that was measured, in MiB.

    It is off by a part of what was measured, or of a MiB where that is less.
    """
    predicted = float(simulate(problem, placement).peak_bytes[1]) / 2**20
    off = (predicted - measured_mib) / max(measured_mib, 1.0)
    return {"predicted_mib": predicted, "allocator_mib": measured_mib, "predicted_off": off}
