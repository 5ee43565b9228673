"""Timelines as one Chrome/Perfetto trace file: a process per timeline, a track per device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from placement.timeline import Timeline
from placement.tools.files import write_atomic


def write_trace(
    path: str | Path, timelines: Mapping[str, Timeline], op_name: tuple[str, ...] | None = None
) -> Path:
    """Write named timelines, e.g. ``{"predicted": ..., "measured": ...}``, as one trace.

    Open the file at https://ui.perfetto.dev or chrome://tracing.

    Raises:
        FileError: it cannot be written there.
    """
    events: list[dict[str, Any]] = []
    for pid, (name, timeline) in enumerate(timelines.items()):
        args = {"name": name}
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": args})
        events += [e | {"pid": pid} for e in timeline.to_trace(op_name)["traceEvents"]]
    return write_atomic(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
