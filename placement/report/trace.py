"""Timelines as one Chrome/Perfetto trace file: a process per timeline, a track per device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from placement.files import write_atomic
from placement.timeline import Timeline


def merge_traces(
    timelines: Mapping[str, Timeline], op_name: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """One trace of named timelines, e.g. ``{"predicted": ..., "measured": ...}``."""
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        args = {"name": name}
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": args})
        events += [e | {"pid": pid} for e in timeline.to_trace(op_name)["traceEvents"]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(
    path: str | Path, timelines: Mapping[str, Timeline], op_name: tuple[str, ...] | None = None
) -> Path:
    """Write ``merge_traces``; open the file at https://ui.perfetto.dev or chrome://tracing.

    Raises:
        FileError: it cannot be written there.
    """
    return write_atomic(path, json.dumps(merge_traces(timelines, op_name)))
