"""By what a plan knows graph, cluster and machine again; in what others are not those of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

from placement.cluster import Cluster, Device
from placement.graph import OpGraph
from placement.plan.content import Content
from placement.plan.parts import graph_parts
from placement.tools.files import some

_PART_NAMES = {
    "names": "the operators' names",
    "operators": "kinds, shapes, dtypes or constants of operators",
    "structure": "which operator uses which tensor",
    "tensors": "tensor sizes",
    "parameters": "parameter sizes or their users",
    "colocation": "colocation groups",
    "backward": "which operators are backward",
}


def graph_differences(plan: Content, graph: OpGraph) -> list[str]:
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


def cluster_differences(plan: Content, cluster: Cluster) -> list[str]:
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
        # What is free, or what the machine says that it has, is never quite the same.
        if then == now or (field.name == "memory_bytes" and now >= 0.95 * then):
            continue
        yield f"device {planned.name!r} has {field.name} {now!r}, planned {then!r}"


def missing_devices(plan: Content) -> list[str]:
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
