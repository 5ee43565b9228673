"""Operators measured on a GPU: the CSV files of NeuSight (Lee et al., ASPLOS 2025).

``<GPU>/<model>-<inf|train>-<sequence>-<batch>.csv`` of github.com/sitar-lab/NeuSight.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Device
from placement.importers._read import (
    FormatError,
    Tasks,
    all_joined,
    decimal,
    equal_devices,
    number,
    stem,
    task_problem,
)
from placement.problem import Problem
from placement.tools.files import read_text
from placement.tools.limits import MOST

MS = ("fw_latency", "bw_latency", "acc_latency")
COLUMNS = ("op", "Name", "_input_nodes", *MS, "output_shape", "dtype")


def looks_like(text: str) -> bool:
    """Whether the first line names the columns that no other format has."""
    first = text.lstrip().partition("\n")[0]
    return "_input_nodes" in first and "fw_latency" in first


def read(
    text: str,
    path: str,
    *,
    objective: str | None = None,
    devices: int = 1,
    bandwidth: float = float("inf"),
) -> Problem:
    """The problem of a file on ``devices`` GPUs that are all the measured one, ``gpu:0..``.

    An operator per line, ``Name``, takes the milliseconds of ``fw_latency``, ``bw_latency`` and
    ``acc_latency`` together. Its output has the bytes of ``output_shape`` and ``dtype``; links are
    not measured: moving it takes no time unless a ``bandwidth`` (bytes per second) is given. The
    objective is ``latency`` if not given.

    Raises:
        FormatError: naming the file, the line, the column and what is wrong.
    """
    tasks = _tasks(text, path)
    cluster = equal_devices(path, "neusight", "gpu", devices, bandwidth)
    tasks = replace(tasks, seconds=np.repeat(tasks.seconds, devices, axis=1))
    return task_problem(path, tasks, cluster, objective)


def joined(paths: Sequence[Path]) -> Problem:
    """One problem of files that ``traces`` puts together: a device for each, after its folder.

    Raises:
        FormatError: see ``read``.
    """
    first, *others = (_tasks(read_text(path), str(path)) for path in paths)
    gpus = [Device(path.parent.name, "gpu") for path in paths]
    cluster = all_joined("neusight", gpus, float("inf"))
    seconds = np.concatenate([tasks.seconds for tasks in (first, *others)], axis=1)
    return task_problem(str(paths[0]), replace(first, seconds=seconds), cluster, None)


def traces(paths: Sequence[Path]) -> list[list[Path]]:
    """The files of one model by what was traced: the library's version decides that too.

    Those of a group have the same operators in turn, and the same of them wait for each other.

    Raises:
        FormatError: see ``read``.
    """
    groups: dict[object, list[Path]] = {}
    for path in paths:
        tasks = _tasks(read_text(path), str(path))
        groups.setdefault((*tasks.names, frozenset(tasks.pairs)), []).append(path)
    return list(groups.values())


def _tasks(text: str, path: str) -> Tasks:
    try:
        lines = csv.DictReader(io.StringIO(text.strip(), newline=None))
        rows = [row for row in lines if any(map(str.strip, filter(None, map(row.get, COLUMNS))))]
    except csv.Error as error:
        raise FormatError(f"{path}: not a CSV file: {error}") from error
    if not rows:
        raise FormatError(f"{path}: there are columns, but no operators")
    missing = [name for name in COLUMNS if rows[0].get(name) is None]
    if missing:
        raise FormatError(f"{path}: column {missing[0]!r} is missing")
    names: list[str] = []
    at: dict[str, int] = {}
    for i, row in enumerate(rows):
        name = row["Name"] or ""
        if not name or name in at:
            raise FormatError(f"{path}, operator {i}: Name = {name[:60]!r} is empty, or used twice")
        at[name] = i
        names.append(name)
    pairs: list[tuple[int, int]] = []
    seconds: NDArray[np.float64] = np.zeros((len(rows), 1))
    sizes = []
    for i, row in enumerate(rows):
        where = f"{path}, operator {names[i][:60]!r}"
        for word in (row["_input_nodes"] or "").strip("{} ").split(","):
            before = word.partition(":")[0].strip()
            if before and before not in at:
                raise FormatError(f"{where}: _input_nodes has {before[:60]!r}, which is no Name")
            if before:
                pairs.append((at[before], i))
        took_ms = sum(decimal(row[key] or "", f"{where}: {key}") for key in MS)
        seconds[i] = number(took_ms, f"{where}: {' + '.join(MS)}") / 1e3
        sizes.append(_bytes(row["output_shape"] or "", row["dtype"] or "", where))
    users: dict[int, list[int]] = {}
    for u, v in sorted(set(pairs)):
        users.setdefault(u, []).append(v)
    tensors = [(u, sizes[u], mine) for u, mine in users.items()]
    kinds = [row["op"] or "op" for row in rows]
    return Tasks("neusight", stem(path), names, seconds, pairs, kinds, tensors)


def _bytes(shape: str, dtype: str, where: str) -> int:
    """Of a tensor; what has no ``dtype`` is a number, or a list, in the host's memory."""
    if not dtype:
        return 0
    bits = re.search(r"\d{1,3}$", dtype)
    sides = [int(word) for word in re.findall(r"\d{1,18}", shape)]
    size = prod(sides) * (int(bits[0]) // 8 if bits else 1)
    if size > MOST.graph_bytes:
        raise FormatError(f"{where}: output_shape = {shape[:60]!r} is larger than any memory")
    return size
