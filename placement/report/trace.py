"""Timelines as one Chrome/Perfetto trace file: a process per timeline, a track per device."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from placement.timeline import Timeline, TimelineError
from placement.tools.files import parse_json, read_text, write_atomic
from placement.tools.limits import MOST


def write_trace(
    path: str | Path, timelines: Iterable[Timeline], op_name: tuple[str, ...] | None = None
) -> Path:
    """Timelines as one trace, each a process that says whether it was predicted or measured.

    It opens at https://ui.perfetto.dev and chrome://tracing.

    Raises:
        FileError: it cannot be written there.
    """
    events: list[dict[str, Any]] = []
    for pid, timeline in enumerate(timelines):
        events += [e | {"pid": pid} for e in timeline.to_trace(op_name)["traceEvents"]]
    return write_atomic(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def read_traces(path: str | Path) -> list[Timeline]:
    """The timelines of a file that ``write_trace`` wrote, or ``Timeline.to_trace`` gave.

    Of loaders and of parameters that are streamed nothing is read. Peak memory is not in a trace,
    and times are rounded to what microseconds in floating point hold.

    Raises:
        TimelineError: it cannot be read, is not such a trace, or does not say whether it was
            predicted or measured.
    """
    try:
        events = parse_json(read_text(path))["traceEvents"]
        by_pid: dict[int, list[dict[str, Any]]] = {}
        for event in events:
            by_pid.setdefault(event["pid"], []).append(event)
        return [_timeline(events) for events in by_pid.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TimelineError(f"{path}: not a trace of ours ({error!r})") from error


def _is_run(event: dict[str, Any]) -> bool:
    """Of an operator; what is sent or loaded has no operator, parameters no micro-batch."""
    return {"operator", "micro_batch"} <= event["args"].keys()


def _timeline(events: list[dict[str, Any]]) -> Timeline:
    """What the tracks of one process say."""
    named = {e["name"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    ran = [e for e in slices if _is_run(e)]
    sent = [e for e in slices if "tensor" in e["args"]]
    # Devices come first; then a track "a -> b" per pair of devices that talk, those of parameters
    # that are streamed, and the loader.
    others = {e["tid"] for e in slices if not _is_run(e)}
    devices = [name for tid, name in sorted(tracks.items()) if tid < min(others, default=np.inf)]
    if len(devices) > MOST.joined:
        raise ValueError(f"{len(devices)} devices, at most {MOST.joined} are read")
    pairs = {f"{a} -> {b}": (i, j) for i, a in enumerate(devices) for j, b in enumerate(devices)}
    batch = np.array([e["args"]["micro_batch"] for e in ran], np.int64)
    op = np.array([e["args"]["operator"] for e in ran], np.int64)
    if (batch.max() + 1) * (op.max() + 1) > len(ran) or min(batch.min(), op.min()) < 0:
        raise ValueError("an operator is missing in a micro-batch")
    start = np.full((batch.max() + 1, op.max() + 1), np.nan)
    end, on = start.copy(), np.zeros(start.shape, np.int32)
    start[batch, op] = np.array([e["ts"] for e in ran]) * 1e-6
    end[batch, op] = np.array([e["ts"] + e["dur"] for e in ran]) * 1e-6
    on[batch, op] = [e["tid"] for e in ran]
    if np.isnan(end).any():
        raise ValueError("an operator is missing in a micro-batch")
    kind, m = named.get("process_name"), np.arange(len(on))
    if kind not in ("predicted", "measured"):
        raise ValueError("it does not say whether it was predicted or measured: write it again")
    num_phases = next(k for k in range(1, len(on) + 1) if np.array_equal(on, on[m % k]))
    transfers = [
        (e["args"]["tensor"], e["args"]["micro_batch"], *pairs[tracks[e["tid"]]]) for e in sent
    ]
    line = Timeline(
        tuple(devices),
        on[0] if num_phases == 1 else on[:num_phases],
        start,
        end,
        np.array(transfers, np.int32).reshape(-1, 4),
        np.array([e["ts"] for e in sent]) * 1e-6,
        np.array([e["ts"] + e["dur"] for e in sent]) * 1e-6,
        measured=kind == "measured",
    )  # fmt: skip
    line.check()
    return line
