"""What a plan file says: its keys, and what follows from them alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from placement.graph import OpGraph
from placement.objective import ObjectiveName
from placement.plan import parts
from placement.plan.parts import Count, Name, Seconds
from placement.schedule import Schedule
from placement.tools.limits import MOST


class Content(parts.Strict):
    """The keys of a plan, as ``Plan`` describes them."""

    schema_version: Literal[1, 2, 3] = 1
    planner: parts.PlannerInfo
    graph: parts.GraphInfo
    cluster: parts.ClusterInfo
    objective: ObjectiveName
    num_microbatches: Annotated[int, Field(ge=1, le=2**31 - 1)]
    max_in_flight: Annotated[int, Field(ge=1, le=2**31 - 1)]
    cuda_graphs: bool = False
    compiled: bool = False
    second_j: Seconds = 0.0
    assignment: dict[Name, Name]
    phases: Annotated[tuple[dict[Name, Name], ...], Field(max_length=MOST.phases - 1)] = ()
    priority: tuple[Count, ...]
    order: dict[Name, tuple[tuple[Name, Count], ...]] | None = None
    pieces: parts.PiecesInfo | None = None
    stages: tuple[parts.Stage, ...]
    device_map: dict[Name, Name]
    predicted: parts.Predicted
    measured: parts.Measured | None = None
    lower_bound_s: dict[Name, Seconds]
    limits: parts.Limits
    fallback: parts.Fallback | None = None
    provenance: parts.Provenance

    @model_serializer(mode="wrap")
    def _as_of_version(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        # Older versions do not know these.
        for name in ("phases", "cuda_graphs", "compiled", "pieces"):
            if not getattr(self, name):
                data.pop(name, None)
        if not self.predicted.overhead_s:
            data["predicted"].pop("overhead_s", None)
        return data

    @property
    def assignments(self) -> tuple[dict[str, str], ...]:
        """Operator name -> device name in each phase; one, unless micro-batches take turns."""
        return (self.assignment, *(self.assignment | phase for phase in self.phases))

    @property
    def goal(self) -> str:
        """What was asked for: the objective, or of what a language model's ``latency`` is."""
        asked = self.provenance.profile.get("objective")
        return asked if asked in ("prefill", "decode", "serve") else self.objective

    @property
    def devices_in_use(self) -> set[str]:
        """Names of the devices that run anything."""
        return {device for phase in self.assignments for device in phase.values()}

    def measured_s(self, what: str) -> float | None:
        """The measured ``latency`` or ``period``; None if it was not measured."""
        spread: parts.Spread | None = getattr(self.measured, f"{what}_s", None)
        return None if spread is None else spread.median_s

    def schedule(self, graph: OpGraph) -> Schedule | None:
        """The order, if the plan has one, with operators by number in ``graph``."""
        if self.order is None:
            return None
        number = {name: i for i, name in enumerate(graph.op_name)}
        entries = [
            [(number[op], batch) for op, batch in self.order.get(d.name, ())]
            for d in self.cluster.devices
        ]
        rows = tuple(np.array(row).reshape(-1, 2) for row in entries)
        return Schedule(rows, self.num_microbatches)
