"""A trace for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from placement.exporters import Exported, ExportError
from placement.plan import Plan
from placement.problem import Problem

MAX_EVENTS = 2_000_000  # more would fill the memory, and no viewer opens them


@dataclass(frozen=True)
class ChromeTrace:
    """Chrome/Perfetto trace: the predicted timeline, a track per device.

    Format: Trace Event Format, JSON object form; complete events (``ph: X``), microseconds. With
    the problem (``--model``): when every operator of every micro-batch runs. A plan alone has no
    times of single operators: then how busy each device is in a steady period, from the start of
    the period, for as many periods as there are micro-batches.
    """

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        rows = len(plan.predicted.busy_s) if problem is None else problem.num_ops
        if plan.num_microbatches * rows > MAX_EVENTS:
            raise ExportError(
                f"num_microbatches = {plan.num_microbatches:,} of {rows} events each: a trace has "
                f"at most {MAX_EVENTS:,}"
            )
        if problem is not None:
            trace = plan.timeline(problem).to_trace(problem.graph.op_name)
            return Exported({"": json.dumps(trace)}, "open it at https://ui.perfetto.dev")
        events: list[dict[str, Any]] = [
            _meta("process_name", 0, "busy per period (when within it is not in the plan)")
        ]
        period_s = plan.predicted.period_s
        for tid, (device, busy_s) in enumerate(plan.predicted.busy_s.items()):
            events.append(_meta("thread_name", tid, device))
            events += [
                {"name": f"busy, {busy_s / period_s:.0%}" if period_s else "busy", "ph": "X"}
                | {"ts": m * period_s * 1e6, "dur": busy_s * 1e6, "pid": 0, "tid": tid}
                | {"args": {"micro_batch": m}}
                for m in range(plan.num_microbatches)
                if busy_s
            ]
        return Exported(
            {"": json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})},
            "open it at https://ui.perfetto.dev; only how busy devices are, a plan has no times "
            "of operators: add --model NAME for the timeline",
        )


def _meta(kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
