"""Our plans for a GPU of which little memory may be used, beside NVIDIA's pipelined sharding.

At every budget of its two tables (MLSys 2026 artefact, RTX 5090 and its host): the best plan of
``layer_dp``, its predicted tokens per second, and what the machine can do at most. A plan places
attention, feed-forwards and experts of each layer on the GPU, on the processor, or on ``pcie:0``:
the same GPU, reading what lies in host memory at the rate of its slot, for each token again. Two
buffers of the largest attention with its cache are taken off the GPU's memory for that.

What is compared is a prediction with a measurement: read ``at_least_theirs_at_the_low_end``, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.public_models import (
    Lacking,
    Model,
    accuracy,
    model_of,
    shape_of,
    shapes,
    understood,
)
from placement.cluster import Cluster, Device, Link
from placement.costs.runtimes import runtimes
from placement.costs.serving import Serving, interval, serving_problem
from placement.costs.serving_bound import least
from placement.devices import library
from placement.importers.decoder import Decoder
from placement.planners.layer_dp import LayerDp

TABLES = ("pipeshard_table4_5090", "pipeshard_figure2_speedups")
COLUMNS = {
    TABLES[0]: ("Model", "CtxSize", "VramMB", "TPS"),
    TABLES[1]: ("Model", "CtxK", "VramBudget", "TPSSpeedup"),
}
# Bits of a weight: the files that the artefact's README names (F16, Q4_0, Q2_K).
BITS = {"minitron-4b": 16.0, "minitron-8b": 16.0, "qwen3-30b-a3b": 4.54, "qwen3-235b-a22b": 2.92}
HOST = Device(
    "cpu:0", "cpu", flops_per_s=2.5e12, bytes_per_s=128e9, call_s=2e-6, memory_bytes=192 * 2**30
)  # it is not named: two channels of DDR5-8000
GPU = "nvidia/rtx-5090"
ROUNDED = {TABLES[0]: 0.05, TABLES[1]: 0.005}  # by how much their figures may be rounded up
PART = 0.25  # of the GPU's memory, that buffers take at most


class Planned(NamedTuple):
    """Tokens per second of a plan, those of llama.cpp's own split, and of no plan more."""

    ours: float
    low: float
    llama_cpp: float
    most: float


def decoder_of(model: Model) -> Decoder:
    """The decoder with all its layers."""
    (embedding, _), *inner, (head, _) = model.parts
    groups: dict[int, list[Any]] = {}
    for part, count in inner:
        groups.setdefault(part.layer, []).append((part, count))
    whole = [(f"blk.{i}", part) for i, part in enumerate_layers(list(groups.values()))]
    parts = [
        replace(
            part, name=f"{path}.{kind}", module=path, layer=int(path[4:]),
            weights={f"{path}.{kind}": part.weight_bytes},
        )
        for path, part in whole
        for kind in [part.kind]
    ]  # fmt: skip
    around = [
        replace(x, name=n, module=n) for x, n in ((embedding, "token_embd"), (head, "output"))
    ]
    wide = max(part.numel * part.used / model.hidden for part in parts)
    return Decoder(
        model.name, (around[0], *parts, around[1]), model.hidden, int(5 * model.hidden + wide),
        shapes()[model.name]["vocabulary"], "fp16", "gguf",
    )  # fmt: skip


def enumerate_layers(groups: list[list[Any]]) -> list[tuple[int, Any]]:
    """Parts of all layers with the number of their layer."""
    found, at = [], 0
    for group in groups:
        for i in range(at, at + group[0][1]):
            found += [(i, part) for part, _ in group]
        at += group[0][1]
    return found


def machine(decoder: Decoder, context: int, budget: int) -> Cluster:
    """The GPU with ``budget`` bytes, the host, and the GPU that reads from it."""
    own = max(
        (p.kv_bytes * context + p.weight_bytes for p in decoder.parts if p.kv_bytes), default=0
    )
    room = budget - int(min(2 * own, PART * budget))
    gpu = Device("cuda:0", "cuda", like=GPU, memory_bytes=room)
    slot = library()[GPU].link_bytes_per_s
    over = replace(gpu, name="pcie:0", bytes_per_s=slot, memory_bytes=HOST.memory_bytes)
    names = [device.name for device in (gpu, HOST, over)]
    links = tuple(Link(a, b, 1e-5, slot) for a in names for b in names if a != b)
    return Cluster("5090", (gpu, HOST, over), links)


@cache
def planned(name: str, scale: float, context: int, budget: int) -> Planned:
    """Of a model at a context, with so many bytes of the GPU."""
    model = model_of(name, BITS.get(name, 4.85), scale=scale)
    decoder = decoder_of(model)
    cluster = machine(decoder, context, budget)
    asked = Serving("decode", context, whole_layers=False)  # type: ignore[arg-type]
    problem = serving_problem(decoder, cluster, asked)
    solution = LayerDp()(problem)
    real = replace(
        cluster,
        devices=cluster.devices[:2],
        links=tuple(x for x in cluster.links if "pcie:0" not in (x.src, x.dst)),
    )
    rate, slow = 1 / solution.value_s, interval(decoder, cluster, solution.placement)["decode"][1]
    return Planned(
        rate, rate / slow, llama_cpp(decoder, real, context), 1 / least(decoder, real, asked)
    )


def llama_cpp(decoder: Decoder, cluster: Cluster, context: int) -> float:
    """Tokens per second with as many whole layers at the end on the GPU as fit."""
    problem = serving_problem(decoder, cluster, Serving("decode", context))  # type: ignore[arg-type]
    layers = np.array([part.layer for part in decoder.parts])
    layers[-1], layers[0] = decoder.num_layers, -1
    room = cluster.devices[0].memory_bytes
    graph = problem.graph
    best = np.ones(len(layers), np.int32)
    for first in range(decoder.num_layers, -1, -1):
        placement = np.where(layers >= first, 0, 1).astype(np.int32)
        on = np.zeros(len(graph.param_bytes), bool)
        on[graph.param_use[placement[graph.param_use_op] == 0]] = True
        if int(graph.param_bytes[on].sum()) > room:
            break
        best = placement
    return float(1 / problem.compute_s[np.arange(len(layers)), best].sum())


def thousands(text: str | None, unit: str, name: str) -> float:
    """``4K`` or ``2G`` as a number of them."""
    value = (text or "").strip().upper().removesuffix(unit)
    try:
        number = float(value)
    except ValueError as error:
        raise Lacking(f"{name} = {text!r} is no number of {unit}") from error
    if not 0 < number < 1e6:
        raise Lacking(f"{name} = {text!r} is out of range")
    return number


def row(line: Mapping[str, str], table: str) -> tuple[float, Planned, float]:
    """What they reach, our plan, and by what the plan is to be divided before both are compared."""
    name, scale = shape_of(line.get("Model") or "")
    if table == TABLES[0]:
        context = thousands(line.get("CtxSize"), "K", "CtxSize")
        budget = thousands(line.get("VramMB"), "M", "VramMB") * 2**20
        plan = planned(name, scale, int(1024 * context), int(budget))
        return thousands(line.get("TPS"), "", "TPS"), plan, 1.0
    context = thousands(line.get("CtxK"), "K", "CtxK")
    budget = thousands(line.get("VramBudget"), "G", "VramBudget") * 2**30
    plan = planned(name, scale, int(1024 * context), int(budget))
    return thousands(line.get("TPSSpeedup"), "X", "TPSSpeedup"), plan, plan.llama_cpp


def figures(path: Path) -> dict[str, Any]:
    """What ``--json`` prints: errors are of our speed over theirs, as if ours should be theirs."""
    found, facts = understood(path, lambda line: row(line, path.stem))
    if not found:
        return accuracy((), (), 0.0) | facts
    theirs = np.array([x for x, _, _ in found])
    ours, low, most = (
        np.array([getattr(plan, field) / base for _, plan, base in found])
        for field in ("ours", "low", "most")
    )
    told = accuracy(ours, theirs, runtimes()["llama.cpp/cuda"].decode)
    return (
        told
        | facts
        | {
            "at_least_theirs": float(np.mean(ours + ROUNDED[path.stem] >= theirs)),
            "at_least_theirs_at_the_low_end": float(np.mean(low + ROUNDED[path.stem] >= theirs)),
            "share_of_bound": float(np.median(ours / most)),
            "bound": [round(float(x), 3) for x in most],
        }
    )
