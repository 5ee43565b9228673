"""Workloads of Moirai (github.com/moirai-placement/moirai) as JSON: unlike devices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster, Device
from placement.importers._read import (
    FormatError,
    Tasks,
    check_table,
    ends_of,
    field,
    nodes_and_edges,
    number,
    stem,
    task_problem,
    whole_of,
)
from placement.problem import Problem
from placement.tools.files import short


def looks_like(data: Any) -> bool:
    """Whether parsed JSON is (or wants to be) a file of this format."""
    return isinstance(data, dict) and ("num_devices" in data) and ("nodes" in data)


def read(data: Any, path: str, *, objective: str | None = None) -> Problem:
    """The problem of a parsed file: devices ``device:0..``, times and transfers in seconds.

    ``nodes`` have an ``id`` and a list ``time`` of milliseconds per device, ``edges`` a ``src``,
    a ``dst`` and a matrix ``transfer`` of milliseconds from device to device. Edges of a node
    that carry equal matrices carry the same tensor; with unlike ones, a tensor each. Nothing is
    said about memory: it is unlimited, and tensors have no bytes.

    Raises:
        FormatError: naming the file, the field and the node.
    """
    num_devices = whole_of(data, "num_devices", path, 1)
    records, edges = nodes_and_edges(data, path)
    check_table(path, len(edges), num_devices)
    at = {key: v for v, key in enumerate(records)}
    times: list[list[float]] = []
    for key, node in records.items():
        where = f"{path}: node {key[:60]}"
        row = field(node, "time", where)
        if not isinstance(row, list) or len(row) != num_devices:
            raise FormatError(
                f"{where}: time = {short(row)} must be a list of {num_devices} numbers"
            )
        times.append([number(x, f"{where}: time[{d}]") / 1e3 for d, x in enumerate(row)])

    names = list(at)
    pairs: list[tuple[int, int]] = []
    matrices: list[NDArray[np.float64]] = []
    for i, edge in enumerate(edges):
        u, v = ends_of(edge, ("src", "dst"), at, f"{path}: edges[{i}]")
        where = f"{path}: edge {names[u][:60]} -> {names[v][:60]}"
        pairs.append((u, v))
        matrices.append(_matrix(field(edge, "transfer", where), num_devices, where))

    users: dict[tuple[int, bytes], list[int]] = {}
    for (u, v), matrix in zip(pairs, matrices, strict=True):
        users.setdefault((u, matrix.tobytes()), []).append(v)
    shape = (-1, num_devices, num_devices)
    transfer_s = np.frombuffer(b"".join(m for _, m in users), np.float64).reshape(shape)
    tensors = [(u, 0, mine) for (u, _), mine in users.items()]
    name = str(data.get("model", stem(path)))
    tasks = Tasks("moirai", name, names, np.array(times), pairs, tensors=tensors)
    cluster = Cluster(
        "moirai", tuple(Device(f"device:{d}", "accelerator") for d in range(num_devices))
    )
    return task_problem(path, tasks, cluster, objective or "period", {"transfer_s": transfer_s})


def _matrix(rows: Any, num_devices: int, where: str) -> NDArray[np.float64]:
    """float64 ``[D, D]`` seconds; what a file says of the diagonal is ignored."""
    if not isinstance(rows, list) or len(rows) != num_devices:
        raise FormatError(f"{where}: transfer must be {num_devices} lists of {num_devices} numbers")
    matrix = np.zeros((num_devices, num_devices))
    for a, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != num_devices:
            raise FormatError(f"{where}: transfer[{a}] must be a list of {num_devices} numbers")
        for b, x in enumerate(row):
            matrix[a, b] = number(x, f"{where}: transfer[{a}][{b}]") / 1e3 if a != b else 0.0
    return matrix
