"""Workloads of Tarnawski et al. (NeurIPS 2020), github.com/msr-fiddle/dnn-partitioning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from placement.cluster import Cluster, Device
from placement.importers._read import (
    FormatError,
    check_table,
    ends_of,
    field,
    graph_of,
    id_of,
    labels,
    nodes_and_edges,
    number,
    number_of,
    problem_of,
    stem,
    topological,
    whole,
    whole_of,
)
from placement.problem import Problem
from placement.tools.files import short
from placement.tools.limits import MOST


def looks_like(data: Any) -> bool:
    """Whether parsed JSON is (or wants to be) a file of this format."""
    if not isinstance(data, dict):
        return False
    if {"maxSizePerFPGA", "maxFPGAs", "maxCPUs"} & data.keys():
        return True
    nodes = data.get("nodes")
    return isinstance(nodes, list) and any(
        isinstance(n, dict) and {"fpgaLatency", "cpuLatency"} & n.keys() for n in nodes[:1]
    )


def read(data: Any, path: str, *, objective: str | None = None) -> Problem:
    """The problem of a parsed file: devices ``acc:0..k-1`` and ``cpu:0..l-1``, times in seconds.

    Operators are called by their ``id`` and numbered topologically. Tensor ``t`` is the output
    of operator ``t``; ``profile.io_s`` holds the edges' ``cost`` for accelerators and 0 for
    CPUs, ``transfer_s`` their sum at both ends. A node's ``size`` is charged as parameters
    (rounded up to bytes) and tensors have no bytes: the files count weights and activations
    as one number, limited on accelerators only. Colour classes become colocation groups.

    Raises:
        FormatError: naming the file, the field and the node.
    """
    num_acc, num_cpus = (whole_of(data, name, path) for name in ("maxFPGAs", "maxCPUs"))
    memory = number_of(data, "maxSizePerFPGA", path)
    if num_acc + num_cpus == 0:
        raise FormatError(f"{path}: maxFPGAs and maxCPUs are both 0: there is no device")
    if num_acc and memory < 1:
        raise FormatError(f"{path}: maxSizePerFPGA = {memory} bytes hold nothing")
    records, edges = nodes_and_edges(data, path)
    check_table(path, len(records), num_acc + num_cpus)
    names = list(records)
    nodes = [_node(x, f"{path}: node {key[:60]}", num_cpus) for key, x in records.items()]
    pairs, cost = _joined(edges, names, path)
    order, position = topological(names, pairs, path)
    acc_s, cpu_s, backward, num_bytes, colours, modules = zip(
        *(nodes[v] for v in order), strict=True
    )
    num_ops, num_devices = len(order), num_acc + num_cpus
    is_acc = np.arange(num_devices) < num_acc
    io_s = np.array([cost.get(v, 0.0) for v in order])[:, None] / 1e3 * is_acc
    transfer_s = io_s[:, :, None] + io_s[:, None, :]
    transfer_s[:, np.arange(num_devices), np.arange(num_devices)] = 0.0
    compute_s = np.where(is_acc, np.array([acc_s]).T, np.array([cpu_s]).T)
    stored = np.flatnonzero(num_bytes).tolist()
    graph = graph_of(
        path,
        stem(path),
        [names[v] for v in order],
        np.arange(num_ops),
        np.zeros(num_ops, np.int64),
        [(position[u], position[v]) for u, v in pairs],
        op_module=modules,
        param_bytes=[num_bytes[i] for i in stored],
        param_uses=[(i, k) for k, i in enumerate(stored)],
        group=labels(colours),
        is_backward=backward,
        output_tensor=sorted(set(range(num_ops)) - {position[u] for u, _ in pairs}),
    )
    holds = min(int(memory), 2**63 - 1)
    cluster = Cluster(
        "dnn-partitioning",
        tuple(Device(f"acc:{i}", "acc", memory_bytes=holds) for i in range(num_acc))
        + tuple(Device(f"cpu:{i}", "cpu") for i in range(num_cpus)),
    )
    meant: Any = {None: "max_load", "latency": "piecewise_latency"}.get(objective, objective)
    form, costs = "dnn-partitioning", {"transfer_s": transfer_s, "io_s": io_s}
    return problem_of(path, form, graph, cluster, compute_s, meant, order=order, costs=costs)


def _node(
    record: dict[str, Any], where: str, num_cpus: int
) -> tuple[float, float, bool, int, str | None, str]:
    """Seconds on an accelerator (inf: none runs it) and on a CPU, backward or not, bytes, name.

    And, before the name, the colour: nodes of equal ones share a device.
    """
    cpu_s, acc_s = (number_of(record, x, where) / 1e3 for x in ("cpuLatency", "fpgaLatency"))
    if not _flag(record, "supportedOnFpga", where):
        if num_cpus == 0:
            raise FormatError(f"{where}: supportedOnFpga is false, but maxCPUs is 0")
        acc_s = np.inf
    is_backward = _flag(record, "isBackwardNode", where)
    size = math.ceil(number(record.get("size", 0), f"{where}: size"))
    num_bytes = whole(size, f"{where}: size", most=MOST.graph_bytes)
    own = record.get("colorClass") is None
    colour = None if own else id_of(record, "colorClass", where)
    return acc_s, cpu_s, is_backward, num_bytes, colour, str(record.get("name", ""))


def _joined(
    edges: list[Any], names: list[str], path: str
) -> tuple[list[tuple[int, int]], dict[int, float]]:
    """Edges as pairs of positions in the file, and what sending the output of a node costs."""
    pairs: list[tuple[int, int]] = []
    cost: dict[int, float] = {}
    at = {name: v for v, name in enumerate(names)}
    for i, edge in enumerate(edges):
        u, v = ends_of(edge, ("sourceId", "destId"), at, f"{path}: edges[{i}]")
        where = f"{path}: edge {names[u][:60]} -> {names[v][:60]}"
        edge_cost = number_of(edge, "cost", where)
        first = cost.setdefault(u, edge_cost)
        if abs(first - edge_cost) > 1e-6:  # above which their programs stop
            raise FormatError(
                f"{where}: cost = {edge_cost}, but another edge out of node {names[u][:60]} has "
                f"cost = {first}; all out-edges of a node carry its one output"
            )
        pairs.append((u, v))
    return pairs, cost


def _flag(node: dict[str, Any], name: str, where: str) -> bool:
    value = field(node, name, where)
    if not isinstance(value, bool) and value not in (0, 1):
        raise FormatError(f"{where}: {name} = {short(value)} must be true or false")
    return bool(value)
