"""By what a plan knows graph, cluster and machine again; in what others are not those of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster, Device
from placement.graph import OpGraph
from placement.tools.files import some

if TYPE_CHECKING:
    from placement.plan.document import Plan

# A device with less than this share of the planned bytes is another device. What is free, or what
# the machine says that it has, is never quite the same.
_SAME_MEMORY = 0.95
_PART_NAMES = {
    "names": "the operators' names",
    "operators": "kinds, shapes, dtypes or constants of operators",
    "structure": "which operator uses which tensor",
    "tensors": "tensor sizes",
    "parameters": "parameter sizes or their users",
    "colocation": "colocation groups",
    "backward": "which operators are backward",
}


def graph_differences(plan: Plan, graph: OpGraph) -> list[str]:
    """In which parts ``graph`` is not the one of the plan; empty if it is."""
    planned = plan.graph
    if graph.fingerprint == planned.fingerprint:
        names = set(graph.op_name) ^ set(plan.assignment)
        return [f"operators without a device: {some(sorted(names))}"] if names else []
    text = f"the model {graph.name!r} ({graph.fingerprint[:12]}) "
    if graph.num_ops != planned.num_ops:
        text += f"is another: {planned.num_ops} operators in the plan, {graph.num_ops} here"
    else:
        here = graph_parts(graph)
        parts = [name for key, name in _PART_NAMES.items() if here[key] != planned.parts.get(key)]
        text += f"differs in {', '.join(parts) or 'its fingerprint'}"
    new = [name for name in graph.op_name if name not in plan.assignment]
    return [text + (f" (not in the plan: {some(new)})" if new else "")]


def cluster_differences(plan: Plan, cluster: Cluster) -> list[str]:
    """In which devices and links ``cluster`` is not the one of the plan; empty if it is."""
    planned = plan.cluster.build()
    differences: list[str] = []
    here = {d.name: d for d in cluster.devices}
    for device in planned.devices:
        if device.name in here:
            differences += _device_differences(device, here[device.name])
        else:
            differences.append(f"there is no device {device.name!r}, only {list(here)}")
    added = [name for name in here if name not in planned.device_names]
    if added:
        differences.append(f"device {added[0]!r} is new")
    if not differences and planned.device_names != cluster.device_names:
        differences.append(f"devices are in the order {list(here)}")
    if set(planned.links) != set(cluster.links):
        differences.append("declared links differ")
    return differences


def _device_differences(planned: Device, here: Device) -> Iterator[str]:
    for field in fields(Device):
        then, now = getattr(planned, field.name), getattr(here, field.name)
        if then == now or (field.name == "memory_bytes" and now >= _SAME_MEMORY * then):
            continue
        yield f"device {planned.name!r} has {field.name} {now!r}, planned {then!r}"


def missing_devices(plan: Plan) -> list[str]:
    """Why this machine cannot run the plan: one line per device in use that it lacks."""
    used, missing = plan.devices_in_use, []
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    for d in plan.cluster.build().devices:
        if d.name not in used:
            continue
        if d.like is not None or d.kind not in ("cpu", "cuda"):
            missing.append(f"device {d.name!r} ({d.kind}) exists in the simulator only")
        elif d.kind == "cpu" and cores is not None and not set(d.cores) <= cores:
            missing.append(
                f"device {d.name!r} needs the cores {list(d.cores)}; "
                f"this process may use {sorted(cores)}"
            )
        elif d.kind == "cuda":
            import torch

            from placement.executor.backend import is_cuda_here

            if not is_cuda_here(d.name):
                count = torch.cuda.device_count()
                missing.append(f"device {d.name!r} is not there; {count} CUDA devices")
    return missing


def graph_parts(graph: OpGraph) -> dict[str, str]:
    """A short hash of each part of the graph's fingerprint, so that a difference has a name."""

    g = graph
    uses = (g.tensor_src, g.tensor_root, g.use_tensor, g.use_dst, g.output_tensor)
    return {
        "names": _hash(g.op_name),
        "operators": _hash(g.op_signature),
        "structure": _hash(*uses),
        "tensors": _hash(g.tensor_bytes),
        "parameters": _hash(g.param_bytes, g.param_use_op, g.param_use),
        "colocation": _hash(g.group),
        "backward": _hash(g.is_backward),
    }


def _hash(*items: tuple[str, ...] | NDArray[Any]) -> str:
    """12 hex digits of names and of arrays, as little-endian int64 on every machine."""
    digest = hashlib.sha256()
    for item in items:
        if isinstance(item, tuple):
            digest.update("\0".join(item).encode() + b"\0\0")
        else:
            digest.update(np.ascontiguousarray(item).astype("<i8").tobytes() + b"|")
    return digest.hexdigest()[:12]


def sources_of(graph: OpGraph) -> tuple[tuple[int, ...], ...]:
    """Numbers of the operators that each operator reads from; -1 stands for the model's inputs.

    What hands on its whole input (``x.to(x.dtype)``) is read along with where that is from: it may
    return ``x`` itself, and the trace then names it in the place of ``x`` from there on.
    """
    src, root, size = graph.tensor_src, graph.tensor_root, graph.tensor_bytes

    def origins(tensor: int) -> Iterator[int]:
        while True:
            op = int(src[tensor])
            yield op
            inputs = graph.in_tensor[graph.in_ptr[op] : graph.in_ptr[op + 1]] if op >= 0 else ()
            same = [t for t in inputs if root[t] == root[tensor] and size[t] == size[tensor]]
            if not same:
                return
            tensor = same[0]

    return tuple(
        tuple(sorted({op for t in graph.in_tensor[a:b] for op in origins(t)}))
        for a, b in pairwise(graph.in_ptr.tolist())
    )


def readers_of(graph: OpGraph) -> dict[str, tuple[int, ...]]:
    """Name of each parameter -> numbers of the operators that read it."""
    if graph.program is None:
        return {}
    program = graph.program
    readers: dict[str, list[int]] = {
        name: [] for name in (*program.state_names, *program.param_names)
    }
    for op, p in zip(graph.param_use_op.tolist(), graph.param_use.tolist(), strict=True):
        if p < len(program.param_names):  # gradients and state of the optimizer have no name
            readers[program.param_names[p]].append(op)
    return {name: tuple(ops) for name, ops in readers.items()}
