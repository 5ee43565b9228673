"""Public workload files as problems; the format is told from the content.

* ``dnn_partitioning``: JSON of github.com/msr-fiddle/dnn-partitioning
* ``pipedream``: ``graph.txt`` of github.com/msr-fiddle/pipedream
* ``moirai``: JSON with times on several devices and a transfer matrix per tensor
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from placement.importers import dnn_partitioning, moirai, pipedream
from placement.importers._read import FormatError
from placement.problem import Problem

__all__ = ["FormatError", "load"]

KNOWN = (
    "formats are dnn-partitioning JSON (nodes with fpgaLatency, maxFPGAs), Moirai JSON (nodes "
    "with a list 'time', num_devices) and PipeDream graph.txt "
    "(node1 -- Conv2d -- forward_compute_time=...)"
)


def load(
    path: str | Path,
    *,
    objective: str | None = None,
    devices: int | None = None,
    bandwidth: float | None = None,
    memory: int | None = None,
    mode: str | None = None,
) -> Problem:
    """The problem in a workload file.

    ``objective`` defaults to ``max_load`` for dnn-partitioning files, for which ``latency`` is
    the analytic ``piecewise_latency`` their authors mean; otherwise to ``period``. The other
    options are for PipeDream files, which say nothing about devices (see ``pipedream.read``).

    Raises:
        FormatError: not readable, not a format we know, an option that the format does not
            take, or a mistake in the file: the message names file, field and node.
    """
    options = {"devices": devices, "bandwidth": bandwidth, "memory": memory, "mode": mode}
    given: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8 text ({error}); {KNOWN}") from error
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    if not text.strip():
        raise FormatError(f"{path}: the file is empty; {KNOWN}")
    if text.lstrip()[0] not in "{[":
        if pipedream.looks_like(text):
            return pipedream.read(text, str(path), objective=objective, **given)
        raise FormatError(f"{path}: unknown format; {KNOWN}")
    if given:
        raise FormatError(
            f"{path}: {', '.join(given)} cannot be set: the file itself describes its devices"
        )
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise FormatError(f"{path}: not valid JSON: {error}") from error
    if dnn_partitioning.looks_like(data):
        return dnn_partitioning.read(data, str(path), objective=objective)
    if moirai.looks_like(data):
        return moirai.read(data, str(path), objective=objective)
    found = sorted(data)[:8] if isinstance(data, dict) else type(data).__name__
    raise FormatError(f"{path}: unknown JSON format (top level: {found}); {KNOWN}")
