"""Graphs of DOPPLER (Yao et al., ICLR 2026), ``compute_graph/*.txt`` of its repository.

The repository is github.com/xinyuyao/Doppler; what its simulator does is ``Problem``'s
``contention=False`` and ``ready_order="arrival"``.
"""

from __future__ import annotations

import re

import numpy as np

from placement.importers._read import FormatError, Tasks, equal_devices, stem, task_problem
from placement.problem import Problem

COST_PER_S = 1e10  # its simulator divides costs by this, and so do its tables
_ROW = re.compile(r"(\d{1,18})\s*,\s*(\d{1,18})\s*(?:,\s*(.*))?$")


def looks_like(text: str) -> bool:
    """Whether the first line is a count and the second a list of node numbers."""
    lines = [line.strip() for line in text.splitlines()[:2]]
    return (
        len(lines) == 2
        and "," in text  # which task graphs have none of, whose second line may be blank
        and re.fullmatch(r"\d{1,18}", lines[0]) is not None
        and re.fullmatch(r"(\d{1,18},\s*)*\d{0,18}", lines[1]) is not None
    )


def read(text: str, path: str, *, objective: str | None = None, devices: int = 4) -> Problem:
    """The problem of a file on ``devices`` equal accelerators ``gpu:0..``.

    Line 1 counts all nodes, line 2 lists the inputs among them, which cost nothing and are no
    operators here; lines 3 and 4 list the producer and the consumer of each edge; every further
    line is one operator: its compute cost, the cost to send its output to one other device, and
    perhaps its kind. ``COST_PER_S`` of either is a second; tensors have as many bytes as sending
    them costs. Nothing is said about memory: it is unlimited.

    The objective is ``latency`` if not given.

    Raises:
        FormatError: naming the file, the line and what is wrong.
    """
    cluster = equal_devices(path, "doppler", "gpu", devices, COST_PER_S)
    lines = [line.strip() for line in text.rstrip().splitlines()]
    if len(lines) < 5:
        raise FormatError(f"{path}: {len(lines)} lines: there must be four, and one per operator")
    # Longer numbers fall apart into several, which do not fit to the others.
    inputs, sources, targets = (
        [int(x) for x in re.findall(r"\d{1,18}", line)] for line in lines[1:4]
    )
    count = int(lines[0]) - len(inputs)
    rows = [line for line in lines[4:] if line]
    if len(rows) != count:
        raise FormatError(
            f"{path}: {lines[0]} nodes, {len(inputs)} of them inputs, but {len(rows)} lines of "
            "operators"
        )
    if len(sources) != len(targets):
        raise FormatError(
            f"{path}: {len(sources)} producers in line 3, {len(targets)} consumers in line 4"
        )
    pairs = sorted(set(zip(sources, targets, strict=True)))
    outside = [pair for pair in pairs if max(pair) >= count]
    if outside:
        raise FormatError(f"{path}: edge {outside[0]}: operators are numbered 0..{count - 1}")
    users: list[list[int]] = [[] for _ in range(count)]
    for producer, consumer in pairs:
        users[producer].append(consumer)
    seconds, kinds, tensors = [], [], []
    for n, row in enumerate(rows):
        match = _ROW.match(row)
        if not match:
            raise FormatError(
                f"{path}, line {n + 5}: {row[:60]!r} is not 'compute,transfer[,kind]'"
            )
        seconds.append([int(match[1]) / COST_PER_S] * devices)
        kinds.append(match[3] or "op")
        tensors.append((n, int(match[2]), users[n]))
    names = [str(n) for n in range(count)]
    tasks = Tasks("doppler", stem(path), names, np.array(seconds), pairs, kinds, tensors)
    return task_problem(path, tasks, cluster, objective, contention=False, ready_order="arrival")
