"""Workloads of Tarnawski et al. (NeurIPS 2020), github.com/msr-fiddle/dnn-partitioning."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from placement.cluster import Cluster, Device
from placement.graph import OpGraph
from placement.importers._read import (
    FormatError,
    check_table,
    field,
    number,
    problem_of,
    topological,
    whole,
)
from placement.problem import Problem
from placement.tools.files import short

_COST_TOLERANCE = 1e-6  # their programs stop above it


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
    num_acc = whole(field(data, "maxFPGAs", path), f"{path}: maxFPGAs")
    num_cpus = whole(field(data, "maxCPUs", path), f"{path}: maxCPUs")
    memory = number(field(data, "maxSizePerFPGA", path), f"{path}: maxSizePerFPGA")
    if num_acc + num_cpus == 0:
        raise FormatError(f"{path}: maxFPGAs and maxCPUs are both 0: there is no device")
    if num_acc and memory < 1:
        raise FormatError(f"{path}: maxSizePerFPGA = {memory} bytes hold nothing")
    records, edges = field(data, "nodes", path), field(data, "edges", path)
    if not isinstance(records, list) or not isinstance(edges, list) or not records:
        raise FormatError(f"{path}: 'nodes' must be a non-empty list and 'edges' a list")
    check_table(path, len(records), num_acc + num_cpus)

    at: dict[Any, int] = {}
    cpu_s, acc_s, size, backward, label, module = [], [], [], [], [], []
    classes: dict[Any, int] = {}
    for i, node in enumerate(records):
        key = field(node, "id", f"{path}: nodes[{i}]")
        if isinstance(key, bool) or not isinstance(key, int | str):
            raise FormatError(f"{path}: nodes[{i}]: id = {short(key)} must be an integer")
        where = f"{path}: node {key}"
        if key in at:
            raise FormatError(f"{where}: the id is used twice (nodes[{at[key]}] and nodes[{i}])")
        at[key] = i
        cpu_s.append(number(field(node, "cpuLatency", where), f"{where}: cpuLatency") / 1e3)
        on_acc = number(field(node, "fpgaLatency", where), f"{where}: fpgaLatency") / 1e3
        supported = _flag(node, "supportedOnFpga", where)
        if not supported and num_cpus == 0:
            raise FormatError(f"{where}: supportedOnFpga is false, but maxCPUs is 0")
        acc_s.append(on_acc if supported else np.inf)
        backward.append(_flag(node, "isBackwardNode", where))
        needs = math.ceil(number(node.get("size", 0), f"{where}: size"))
        size.append(whole(needs, f"{where}: size"))
        colour = node.get("colorClass")
        if colour is not None and (isinstance(colour, bool) or not isinstance(colour, int | str)):
            raise FormatError(f"{where}: colorClass = {short(colour)} must be an integer")
        own = ("node", i) if colour is None else ("class", colour)
        label.append(classes.setdefault(own, len(classes)))
        module.append(str(node.get("name", "")))
    if len({str(key) for key in at}) < len(at):
        raise FormatError(f"{path}: ids differ only in being a number or a text")

    names = [str(key) for key in at]
    pairs: list[tuple[int, int]] = []
    cost: dict[int, float] = {}
    for i, edge in enumerate(edges):
        ends = []
        for end in ("sourceId", "destId"):
            key = field(edge, end, f"{path}: edges[{i}]")
            if not isinstance(key, int | str) or key not in at:
                raise FormatError(
                    f"{path}: edges[{i}]: {end} = {short(key)} is not the id of a node"
                )
            ends.append(at[key])
        where = f"{path}: edge {names[ends[0]]} -> {names[ends[1]]}"
        edge_cost = number(field(edge, "cost", where), f"{where}: cost")
        first = cost.setdefault(ends[0], edge_cost)
        if abs(first - edge_cost) > _COST_TOLERANCE:
            raise FormatError(
                f"{where}: cost = {edge_cost}, but another edge out of node {names[ends[0]]} has "
                f"cost = {first}; all out-edges of a node carry its one output"
            )
        pairs.append((ends[0], ends[1]))

    order, position = topological(names, pairs, path)
    num_ops, num_devices = len(order), num_acc + num_cpus
    is_acc = np.arange(num_devices) < num_acc
    io_s = np.array([cost.get(v, 0.0) for v in order])[:, None] / 1e3 * is_acc
    transfer_s = io_s[:, :, None] + io_s[:, None, :]
    transfer_s[:, np.arange(num_devices), np.arange(num_devices)] = 0.0
    compute_s = np.where(is_acc, np.array(acc_s)[order, None], np.array(cpu_s)[order, None])
    bytes_of = [size[v] for v in order]
    stored = [i for i in range(num_ops) if bytes_of[i] > 0]
    sinks = set(range(num_ops)) - {position[u] for u, _ in pairs}
    graph = OpGraph.build(
        Path(path).stem,
        [names[v] for v in order],
        np.arange(num_ops),
        np.zeros(num_ops, np.int64),
        [(position[u], position[v]) for u, v in pairs],
        op_module=[module[v] for v in order],
        param_bytes=[bytes_of[i] for i in stored],
        param_uses=[(i, k) for k, i in enumerate(stored)],
        group=[label[v] for v in order],
        is_backward=[backward[v] for v in order],
        output_tensor=sorted(sinks),
    )
    holds = min(int(memory), 2**63 - 1)
    cluster = Cluster(
        "dnn-partitioning",
        tuple(Device(f"acc:{i}", "acc", memory_bytes=holds) for i in range(num_acc))
        + tuple(Device(f"cpu:{i}", "cpu") for i in range(num_cpus)),
    )
    meant: Any = {None: "max_load", "latency": "piecewise_latency"}.get(objective, objective)
    costs = {"transfer_s": transfer_s, "io_s": io_s}
    return problem_of(path, "dnn-partitioning", graph, cluster, compute_s, meant, costs=costs)


def _flag(node: dict[str, Any], name: str, where: str) -> bool:
    value = field(node, name, where)
    if not isinstance(value, bool) and value not in (0, 1):
        raise FormatError(f"{where}: {name} = {short(value)} must be true or false")
    return bool(value)
