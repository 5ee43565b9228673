"""Section ``memory``: models twice as large as the memory that the GPU may use; and peaks."""

from __future__ import annotations

import gc
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from experiments.gpu.bench import Bench
from experiments.gpu.models import all_on, bytes_of, expected_of
from experiments.gpu.predictions import predicted
from experiments.gpu_baselines import (
    Decoder,
    DiffusionTransformer,
    ExpertLayer,
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
from placement.plan.reached import least_s
from placement.planners.residence import refitted
from placement.problem import Problem, Solution
from placement.program import split_inputs
from placement.runs import ways
from placement.simulator import evaluate, simulate
from placement.workloads import load

Models = dict[str, Callable[[], tuple[nn.Module, Any]]]  # by name, with inputs
Placed = dict[str, tuple[Problem, np.ndarray]]  # by way, with the sizes of buffers that it is for
BUDGETS = {"three quarters": 3 / 4, "half": 1 / 2, "quarter": 1 / 4, "eighth": 1 / 8}
OTHERS = ("cpu", "layers", "streamed", "accelerate")  # what does without our plans
# Of the ``config.json`` of facebook/DiT-XL-2-256.
DIT_XL_2 = {"num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72,
            "in_channels": 4, "out_channels": 8, "patch_size": 2}  # fmt: skip
PROMISED = 0.85  # the rest is for what a plan does not count, as how the allocator cuts blocks


def memory(bench: Bench) -> None:
    """Models twice as large as the memory that the GPU may use."""
    with bench.item("measured in parts"):
        _in_parts(bench)
    width, layers = (128, 6) if bench.emulated else (2048, 8)
    shape = {"tables": 3, "rows": 20_000, "batch": 16} if bench.emulated else {
        "tables": 26, "rows": 100_000, "batch": 512}  # fmt: skip
    models: Models = {
        "decoder, few tokens": lambda: (
            Decoder(layers, width).eval(), torch.randn(1, 16, width)
        ),
        "dlrm": lambda: load("dlrm", dim=64, lookups=1, **shape),
    }  # fmt: skip
    _capped(bench, models, {"half": 1 / 2}, skip=1)


def streaming(bench: Bench) -> None:
    """Three models, each with memory for several shares of it: the copies that go ahead."""
    config = dict(DIT_XL_2)
    width, dense, sparse = 1536, 16, 12
    if bench.emulated:
        width, dense, sparse = 64, 2, 2
        config |= {"num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 16}
    size = config["num_attention_heads"] * config["attention_head_dim"]
    tokens, side = (16, 8) if bench.emulated else (256, 32)
    models: Models = {
        "dense decoder": lambda: (Decoder(dense, width).eval(), torch.randn(1, tokens, width)),
        "mixture of experts": lambda: (
            Decoder(sparse, width // 3 * 2, ExpertLayer).eval(),
            torch.randn(1, 16, width // 3 * 2),
        ),
        "diffusion transformer": lambda: (
            DiffusionTransformer(**config).eval(),
            (torch.randn(1, config["in_channels"], side, side), torch.randn(1, 1, size)),
        ),
    }
    _capped(bench, models, {"three quarters": 3 / 4} if bench.emulated else BUDGETS, skip=2)


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


def _capped(bench: Bench, models: Models, shares: Mapping[str, float], skip: int) -> None:
    """Each model measured without a cap, which would take longer; then all ways under each.

    ``skip``: so many of them on an emulated GPU.
    """
    models = dict([*models.items()][skip if bench.emulated else 0 :])
    for i, (name, made) in enumerate(models.items()):
        with bench.item(name, bench.part_s(len(models) - i)):
            module, inputs = made()
            graph, key = capture(module, inputs, name=name), re.sub(r"\W+", "_", name)
            profile = bench.measured(key, graph, bench.cluster, calibrate=False)
            more = with_streaming(bench.cluster)  # whose copies are measured with memory of its own
            args, kwargs = split_inputs(inputs)
            with torch.no_grad():
                expected = [x.clone() for x in tensors_of(module(*args, **kwargs))]
            problem = Problem(graph, more, profile.for_cluster(more), "latency", num_microbatches=1)
            case = Case(module, inputs, problem, expected)
            until = bench.until if i == len(models) - 1 else bench.limits[-1].until
            for j, (budget, share) in enumerate(shares.items()):
                left_s = (until - time.perf_counter()) / (len(shares) - j)
                with bench.item(f"{name}, {budget}", max(left_s, 1.0)):
                    _under(bench, case, budget, share)


@dataclass(frozen=True)
class Case:
    """A model, its problem without a cap, and what it computes."""

    module: nn.Module
    inputs: Any
    problem: Problem
    expected: list[torch.Tensor]
    known: dict[str, float] = field(default_factory=dict)  # milliseconds that no budget changes


def _under(bench: Bench, case: Case, budget: str, share: float) -> None:
    """All ways with memory for a ``share`` of the parameters, and the bound of what they can do."""
    module, graph, size = case.module, case.problem.graph, bytes_of(case.module)
    name, others_of = graph.name, case.problem.cluster.devices
    key = re.sub(r"\W+", "_", f"{name}_{budget}")
    forget(graph)
    with memory_of(bench, share * size) as capped:
        cluster = replace(case.problem.cluster, devices=(*capped.devices, others_of[2]))
        problem = replace(case.problem, cluster=cluster)
        bench.keep(key, problem)
        placed = placements(bench, problem, capped, case.inputs)
        if "cpu_ms" not in case.known:
            placed["cpu"] = problem, all_on(graph, 0)
        if (earlier := bench.home(f"latency/{key}", graph)) is not None:
            own, _ = refitted(problem, Solution(earlier, 0.0))
            placed["home"] = own, earlier
        ms, facts = run(bench, placed, case.inputs, case.expected)
        case.known.update({way: ms[way] for way in ("cpu_ms",) if way in ms})
        ms |= case.known
        forget(graph)
        if isinstance(module, Decoder):
            with bench.item(f"{name}, {budget}, streamed", 30):
                by_hand, num_stay = streamed(module, case.inputs, bench.gpu)
                ms["streamed_ms"] = timed(by_hand, 1 if bench.emulated else 5) * 1e3
                facts |= {"streamed_error": error(by_hand(), case.expected[0])}
                facts["streamed_kept"] = num_stay
            by_hand = None  # or its memory would be held
        forget()
        with bench.item(f"{name}, {budget}, accelerate", 30), torch.no_grad():
            limits = {} if bench.emulated else {0: capped.devices[1].memory_bytes}
            offloaded_s = offloaded_seconds(module, case.inputs, limits | {"cpu": 2**40})
            ms["accelerate_ms"] = offloaded_s * 1e3
    own, plan = placed["planned"]
    others = {way: ms.get(f"{way}_ms", math.inf) for way in OTHERS}
    best = min(others, key=others.__getitem__)
    bound_ms = (least_s(own) + own.called_s()) * 1e3
    told_ms = predicted(own, plan)[0] * 1e3
    bench.emit(
        f"{name}, {budget}",
        model_mib=size / 2**20,
        budget=share,
        **ms,
        **{f"plan_over_{way}": ratio(ms.get(f"{way}_ms"), ms.get("plan_ms")) for way in OTHERS},
        plan_over_others=ratio(ms.get(f"{best}_ms"), ms.get("plan_ms")),
        best_other=best,
        bound_ms=bound_ms,
        of_bound=ratio(bound_ms, ms.get("plan_ms")),
        predicted_ms=told_ms,
        latency_off=ratio(told_ms, ms.get("planned_ms")) - 1,
        on_gpu=float((own.worker[plan] == 1).mean()),
        from_host_mib=float(own.param_bytes_on(plan)[0]) / 2**20,
        link_gb_per_s=own.cluster.links[-1].bandwidth_bytes_per_s * 1e-9,
        **facts,
        ok=all(value <= 3e-3 for key, value in facts.items() if key.endswith("_error")),
    )


def placements(bench: Bench, problem: Problem, capped: Cluster, inputs: Any) -> Placed:
    """By the way to it: ``plan`` is what ``placement.optimize`` keeps, ``planned`` the planner's.

    ``stream`` computes all on the GPU; ``layers`` has the most whole layers there that fit, and
    computes the others on the CPU.
    """
    graph, profile = problem.graph, problem.profile.for_cluster(capped)
    two = replace(problem, cluster=capped, profile=profile)
    planner = planners.load("best_of", seconds=bench.planning_s)
    placed: Placed = {}
    with (
        bench.item(f"{graph.name}, optimize", 20),
        patch.object(ways, "ROUNDS", 2),
        fastest(problem, inputs, 2 * bench.planning_s) as runner,
    ):
        own = replace(problem, cluster=runner.cluster)  # with the buffer that its plan is for
        for way, plan in {"planned": runner.planned, "plan": runner.plan}.items():
            placed[way] = own, plan.placement(graph, own.cluster)
    if "plan" not in placed:
        own, solution = refitted(problem, planner(problem))
        placed["planned"] = placed["plan"] = own, solution.placement
    if evaluate(problem, all_on(graph, 2)[None]).feasible.all():  # two buffers have room
        placed["stream"] = problem, all_on(graph, 2)
    return placed | {"layers": (two, planners.load("llama_cpp_split")(two).placement)}


def run(
    bench: Bench, placed: Placed, inputs: Any, expected: list[torch.Tensor]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Milliseconds of a call and errors of each way; and memory beside what was predicted."""
    args, kwargs = split_inputs(inputs)
    ms: dict[str, float] = {}
    facts: dict[str, Any] = {}
    ran: dict[tuple[bytes, Any], str] = {}
    for way, (problem, placement) in placed.items():
        graph = problem.graph
        buffers = [d.buffer_bytes for d in problem.cluster.devices if (placement == 2).any()]
        same = ran.setdefault((placement.tobytes(), str(buffers)), way)
        if same != way:
            ms |= {f"{way}_ms": ms[f"{same}_ms"]} if f"{same}_ms" in ms else {}
            continue
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
    peak_mib = float(simulate(problem, placement).peak_bytes[1]) / 2**20
    off = (peak_mib - measured_mib) / max(measured_mib, 1.0)
    return {"predicted_mib": peak_mib, "allocator_mib": measured_mib, "predicted_off": off}
