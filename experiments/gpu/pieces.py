"""Section ``pieces``: one matrix on the CPU and the GPU, where the GPU can hold it and cannot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from experiments.gpu.bench import Bench
from experiments.gpu.memory import memory_of, placements, run
from experiments.gpu.models import bytes_of, expected_of
from experiments.gpu.predictions import predicted
from experiments.gpu_baselines import ratio
from placement import pieces
from placement.capturing import capture
from placement.executor.streamed import with_streaming
from placement.problem import Problem

EQUAL = 8  # pieces, of which a planner deals out as many to each as it can use
COPIED = 8  # pieces that are copied to the GPU in turns, through a buffer for two of them
# Of the memory that the GPU may use: the rest is not promised, or is cuBLAS' and the results'.
USED = 0.75
FREE = pieces.Moves(0.0, math.inf, math.inf)  # it is cut, whether that pays or not


def one_matrix(bench: Bench) -> None:
    """Whole, in equal pieces, and in pieces for each way to it, by the speed of that way.

    With memory for all of it, and for half: there a part stays on the GPU, a part is copied there,
    and a part is read by the CPU where it lies.
    """
    width = 128 if bench.emulated else 16384
    module, inputs = nn.Linear(width, width).eval(), torch.randn(16, width)
    whole, size = capture(module, inputs, name="matrix"), bytes_of(module)
    more = with_streaming(bench.cluster)
    profile = bench.measured("matrix", whole, bench.cluster, calibrate=False)
    cpu_s, gpu_s = profile.compute_s.max(axis=0)
    copied_s = size / more.links[-1].bandwidth_bytes_per_s
    expected = expected_of(module, [inputs])[0][0]
    for name, room in {"all": 3.0, "half": 0.5}.items():
        by_speed = [gpu_s / (cpu_s + gpu_s), cpu_s / (cpu_s + gpu_s)]
        if room < 1:
            by_speed = within(room, copied_s / (cpu_s + copied_s))
        ways = {"whole": None, "equal": [1 / EQUAL] * EQUAL, "by speed": by_speed}
        if bench.emulated:
            ways = {"by speed": by_speed} if name == "half" else {}
        for way, shares in ways.items():
            with bench.item(f"memory for {name}, {way}", bench.part_s(4)):
                graph = whole if shares is None else pieces.split(whole, _whole(shares), moves=FREE)
                own = bench.measured(f"matrix_{way[:2]}_{name}", graph, bench.cluster, 1, False)
                with memory_of(bench, room * size) as capped:
                    cluster = replace(more, devices=(*capped.devices, more.devices[2]))
                    problem = Problem(graph, cluster, own.for_cluster(cluster), "latency",
                                      num_microbatches=1)  # fmt: skip
                    placed = placements(bench, problem, capped, inputs)
                    placed = {key: placed[key] for key in ("planned", "plan")}
                    ms, facts = run(bench, placed, inputs, expected)
                posed, plan = placed["planned"]
                told_s = predicted(posed, plan)[0]
                bench.emit(
                    f"memory for {name}, {way}",
                    **ms,
                    predicted_ms=told_s * 1e3,
                    latency_off=ratio(told_s * 1e3, ms.get("planned_ms")) - 1,
                    shares=", ".join(f"{x:.2f}" for x in shares or ()),
                    bytes_on=", ".join(f"{x:.2f}" for x in read_on(posed, plan)),
                    **facts,
                    ok=facts.get("plan_error", facts.get("planned_error", 0.0)) <= 3e-3,
                )


def within(room: float, on_cpu: float) -> list[float]:
    """Shares of pieces: the CPU's, those that are copied, and what stays on the GPU.

    The GPU has memory for a share of ``room``, in which the buffer is beside what stays. Of what
    does not stay the CPU reads ``on_cpu``.
    """
    buffer = 2 / COPIED * (1 - on_cpu)  # of what does not stay
    stays = (USED * room - buffer) / (1 - buffer)
    cpu, copied = (1 - stays) * on_cpu, (1 - stays) * (1 - on_cpu)
    return [cpu, *[copied / COPIED] * COPIED, stays]


def read_on(problem: Problem, placement: np.ndarray) -> np.ndarray:
    """float64 ``[D]``: the share of parameters that operators of each device read."""
    size = problem.graph.op_param_bytes
    return np.bincount(placement, size, problem.num_devices) / size.sum()


def _whole(shares: Sequence[float]) -> tuple[float, ...]:
    """At least a hundredth each, and together 1."""
    least = [max(x, 0.01) for x in shares]
    return tuple(x / sum(least) for x in least)
