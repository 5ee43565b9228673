"""The plan: a decision as a file that other programs and other machines can trust.

A plan is JSON of a strict, versioned schema (``docs/plan.schema.json``). It is data and nothing
else: loading one imports nothing that it names. It knows operators and devices by *name*, and
holds fingerprints, so that it is refused, with the reason, for a model or a machine that it was
not made for.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from placement.bounds import lower_bound, lower_bounds
from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.objective import Objective, ObjectiveName
from placement.problem import MOST_PHASES, ROUNDING, Placement, Problem, Solution
from placement.profile import error_in
from placement.tools.files import model_file, parse_json, short, write_atomic
from placement.tools.named import meant
from placement.tools.ownership import version

if TYPE_CHECKING:
    from placement.executor import Runner, Trainer
    from placement.schedule import Schedule
    from placement.timeline import Timeline

SCHEMA_VERSIONS = (1, 2)  # 2: with phases
MAX_FILE_BYTES = 256 * 2**20

# Names are shown in terminals and pages: control and direction-changing characters are refused.
_PRINTABLE = r"^[^\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]*$"
Name = Annotated[str, Field(max_length=1024, pattern=_PRINTABLE)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{12,64}$")]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Source = Annotated[int, Field(ge=-1, le=2**63 - 1)]
Seconds = Annotated[FiniteFloat, Field(ge=0)]

_SAME_MEMORY = 0.95  # of the planned bytes of a device: with less, it is another device
_PARTS = {
    "names": "the operators' names",
    "operators": "kinds, shapes, dtypes or constants of operators",
    "structure": "which operator uses which tensor",
    "tensors": "tensor sizes",
    "parameters": "parameter sizes or their users",
    "colocation": "colocation groups",
    "backward": "which operators are backward",
}


class PlanError(ValueError):
    """The plan file is damaged or inconsistent; the message says where."""


class PlanMismatch(PlanError):
    """The plan is for another model or other devices; the message names the parts that differ."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PlannerInfo(_Strict):
    """Which planner decided, with which hyper-parameters."""

    name: Name
    parameters: dict[Name, JsonValue] = {}


class GraphInfo(_Strict):
    """The model: ``fingerprint`` of the whole, ``parts`` of what it consists of.

    ``optimizer`` is the class of ``torch.optim`` whose state counts as memory in training.
    ``modules`` is the path of each operator's module; ``sources`` says whose tensors each operator
    reads (by number; -1 is an input of the model; where one hands on its whole input, also whose
    that is), and ``outputs`` whose tensors leave the model; ``parameters`` says which operators (by
    number) read each parameter or buffer; ``backward`` numbers the backward operators.
    """

    name: Name
    fingerprint: Hash
    num_ops: Annotated[int, Field(ge=1)]
    parts: dict[Name, Hash]
    workload: Name | None = None
    input_spec: dict[str, JsonValue] | None = None
    mode: Literal["inference", "training"] = "inference"
    optimizer: Name | None = None
    modules: tuple[Name, ...] = ()
    sources: tuple[tuple[Source, ...], ...] = ()
    outputs: tuple[Source, ...] = ()
    parameters: dict[Name, tuple[Count, ...]] = {}
    backward: tuple[Count, ...] = ()

    @classmethod
    def of(
        cls, graph: OpGraph, workload: str | None, input_spec: dict[str, Any] | None
    ) -> GraphInfo:
        """From a graph; ``input_spec`` that of its program if not given."""
        program = graph.program
        if input_spec is None and program is not None:
            input_spec = program.input_spec
        return cls(
            name=graph.name,
            fingerprint=graph.fingerprint,
            num_ops=graph.num_ops,
            parts=graph_parts(graph),
            workload=workload,
            input_spec=input_spec,
            mode="training" if graph.is_backward.any() else "inference",
            optimizer=None if program is None else program.optimizer,
            modules=graph.op_module,
            sources=_sources(graph),
            outputs=tuple(sorted({*graph.tensor_src[graph.output_tensor].tolist()})),
            parameters=_readers(graph),
            backward=tuple(np.flatnonzero(graph.is_backward).tolist()),
        )


class DeviceInfo(_Strict):
    """As ``placement.cluster.Device``."""

    name: Name
    kind: Name
    cores: tuple[Count, ...]
    threads: Count
    memory_bytes: Count
    busy_w: Seconds | None
    idle_w: Seconds | None
    like: Name | None
    speed: FiniteFloat
    model: Name
    power_source: Literal["declared", "measured"] = "declared"
    flops_per_s: FiniteFloat | None = None
    bytes_per_s: FiniteFloat | None = None
    call_s: Seconds | None = None
    streams: Name | None = None


class LinkInfo(_Strict):
    """As ``placement.cluster.Link``; no bandwidth is an unlimited one. Measured or declared."""

    src: Name
    dst: Name
    latency_s: Seconds
    bandwidth_bytes_per_s: FiniteFloat | None
    blocking: bool
    channel: Name | None
    wake_s: Seconds = 0.0
    send_s: Seconds = 0.0
    send_s_per_byte: Seconds = 0.0
    receive_s: Seconds = 0.0
    declared: bool


class ClusterInfo(_Strict):
    """The devices that the decision is about, and the links as it was made with them."""

    name: Name
    fingerprint: Hash
    devices: tuple[DeviceInfo, ...]
    links: tuple[LinkInfo, ...]

    @classmethod
    def of(cls, problem: Problem) -> ClusterInfo:
        """From a problem: its devices, and its profile's links."""
        declared = set(problem.cluster.links)
        unlimited = {"bandwidth_bytes_per_s": None}
        info = cls.model_construct(
            name=problem.cluster.name,
            fingerprint="",  # of the cluster that is built from the rest
            devices=tuple(DeviceInfo(**asdict(d)) for d in problem.cluster.devices),
            links=tuple(
                LinkInfo(
                    **asdict(x)
                    | {"declared": x in declared}
                    | ({} if np.isfinite(x.bandwidth_bytes_per_s) else unlimited)
                )
                for x in problem.profile.links
            ),
        )
        return cls(**dict(info) | {"fingerprint": info.build().fingerprint})

    def build(self) -> Cluster:
        """The ``Cluster`` (with declared links only, as it was).

        Raises:
            ClusterError: the description is not a valid cluster.
        """
        devices = tuple(Device(**d.model_dump()) for d in self.devices)
        links = [x.model_dump(exclude={"declared"}) for x in self.links if x.declared]
        for link in links:
            if link["bandwidth_bytes_per_s"] is None:
                link["bandwidth_bytes_per_s"] = float("inf")
        return Cluster(self.name, devices, tuple(Link(**link) for link in links))


class Stage(_Strict):
    """Operators ``first`` to ``last`` (by number, both included): a piece on one device."""

    device: Name
    first: Name
    last: Name
    num_ops: Count


class Predicted(_Strict):
    """What the simulator says; ``value_s`` is of the objective (joules if that is ``energy``).

    ``busy_s`` and ``energy_j`` are per micro-batch; ``energy_j`` is null where the power of a
    device is unknown.
    """

    value_s: Seconds
    latency_s: Seconds
    period_s: Seconds
    energy_j: Seconds | None = None
    busy_s: dict[Name, Seconds]
    peak_bytes: dict[Name, Count]


class Spread(_Strict):
    """Median and interquartile range of repeated measurements."""

    median_s: Seconds
    iqr_s: Seconds

    @classmethod
    def of(cls, seconds: ArrayLike) -> Spread:
        """Of the repeats."""
        low, middle, high = np.percentile(np.asarray(seconds, float), [25, 50, 75])
        return cls(median_s=float(middle), iqr_s=float(high - low))


class Measured(_Strict):
    """What a run on real devices gave: ``n`` repeats, when (ISO 8601) and on what.

    A search with measurements (``placement plan --measurements``) measures the objective alone:
    the other of the two is null.
    """

    latency_s: Spread | None = None
    period_s: Spread | None = None
    n: Count
    when: Name
    machine: Name


class Limits(_Strict):
    """Memory of each device, and what the predicted peak leaves free of it."""

    memory_bytes: dict[Name, Count]
    headroom_bytes: dict[Name, int]


class Fallback(_Strict):
    """The best single device: where to go back to; ``value_s`` is of the objective."""

    device: Name
    value_s: Seconds
    latency_s: Seconds
    period_s: Seconds


class Provenance(_Strict):
    """Which version made the plan, when, and where its profile comes from."""

    version: Name
    git_commit: Name | None
    created: Name
    profile: dict[str, JsonValue]


class Plan(_Strict):
    """One decision for one graph on one cluster.

    Attributes:
        assignment: operator name -> device name, in the order of operator numbers.
        phases: of a periodic plan, ``K - 1`` times what differs from ``assignment``: micro-batch
            ``m`` runs as phase ``m % K`` says, phase 0 being ``assignment`` itself. Empty: all
            micro-batches run alike. A file with phases has ``schema_version`` 2.
        second_j: joules that a second was worth to the objective ``energy``.
        priority: ``[N]`` rank of each operator where several are ready (smallest first).
        order: for every device the (operator, micro-batch) in the order they run, or null: then
            the list rule of ``priority`` decides.
        stages: the assignment as maximal runs of operators on one device.
        lower_bound_s: objective -> proved: no placement is better, periodic or not; of a plan
            without phases, none without.
        device_map: module path -> device name, for the outermost modules that live whole on
            one device.
    """

    schema_version: Literal[1, 2] = 1
    planner: PlannerInfo
    graph: GraphInfo
    cluster: ClusterInfo
    objective: ObjectiveName
    num_microbatches: Annotated[int, Field(ge=1, le=2**31 - 1)]
    max_in_flight: Annotated[int, Field(ge=1, le=2**31 - 1)]
    second_j: Seconds = 0.0
    assignment: dict[Name, Name]
    phases: Annotated[tuple[dict[Name, Name], ...], Field(max_length=MOST_PHASES - 1)] = ()
    priority: tuple[Count, ...]
    order: dict[Name, tuple[tuple[Name, Count], ...]] | None = None
    stages: tuple[Stage, ...]
    device_map: dict[Name, Name]
    predicted: Predicted
    measured: Measured | None = None
    lower_bound_s: dict[Name, Seconds]
    limits: Limits
    fallback: Fallback | None = None
    provenance: Provenance

    @model_serializer(mode="wrap")
    def _as_of_version(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        if not self.phases:
            data.pop("phases", None)  # which older versions do not know
        return data

    @property
    def assignments(self) -> tuple[dict[str, str], ...]:
        """Operator name -> device name in each phase; one, unless micro-batches take turns."""
        return (self.assignment, *(self.assignment | phase for phase in self.phases))

    def _repr_html_(self) -> str:
        """What a notebook shows: values, devices and stages."""
        from placement.tools.shown import mebibytes, seconds, table

        def shown(x: float | None) -> str:
            return "-" if x is None else seconds(x)

        values = []
        for what in ("latency", "period"):
            alone = getattr(self.fallback, f"{what}_s") if self.fallback else None
            bound = self.lower_bound_s.get(what)
            row = (getattr(self.predicted, f"{what}_s"), self.measured_s(what), bound, alone)
            values.append([what, *map(shown, row)])
        on = [Counter(phase.values()) for phase in self.assignments]
        counts = {d.name: " / ".join(f"{x[d.name]:,}" for x in on) for d in self.cluster.devices}
        peak, limit = self.predicted.peak_bytes, self.limits.memory_bytes
        devices = [
            [name, number, shown(self.predicted.busy_s.get(name))]
            + [mebibytes(x.get(name, 0)) for x in (peak, limit)]
            for name, number in counts.items()
        ]
        stages = [[s.device, s.first, s.last, f"{s.num_ops:,}"] for s in self.stages]
        title = f"Plan of {self.graph.name} by {self.planner.name}, for {self.objective}"
        return (
            table(title, ["", "predicted", "measured", "proved bound", "one device"], values)
            + table("devices", ["device", "operators", "busy", "peak memory", "of"], devices)
            + table("stages", ["device", "first operator", "last operator", "operators"], stages)
        )

    @property
    def doubt(self) -> str:
        """That one device may do as well, by what was predicted; empty where it ran or may not.

        It is predicted to, or to be worse by less than the profile's error (``Profile.error``).
        """
        alone, used = self.fallback, {d for on in self.assignments for d in on.values()}
        if alone is None or used == {alone.device} or self.measured_s(self.objective) is not None:
            return ""
        gain = 1 - self.predicted.value_s / alone.value_s if alone.value_s else 0.0
        error = error_in(self.provenance.profile)
        if gain > error:
            return ""
        one = f"{alone.device} alone"
        if gain <= 0:
            return f"{one} is predicted to do no worse: --planner best_of tries it too"
        return (
            f"predicted {gain:.1%} better than {one}, and predictions err by {error:.1%}: "
            "placement run --against-single-device tells which is faster"
        )

    def measured_s(self, what: str) -> float | None:
        """The measured ``latency`` or ``period``; None if it was not measured."""
        spread: Spread | None = getattr(self.measured, f"{what}_s", None)
        return None if spread is None else spread.median_s

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            FileError: it cannot be written there.
        """
        write_atomic(path, self.model_dump_json(indent=1) + "\n")

    def placement(
        self, graph: OpGraph, cluster: Cluster, *, other_shapes: bool = False
    ) -> Placement:
        """The assignment as int32 ``[N]`` of ``graph`` on ``cluster``; with phases ``[K, N]``.

        ``other_shapes``: as for ``bind``.

        Raises:
            PlanMismatch: made for another graph or other devices; names the parts that differ.
        """
        by_name = graph.op_name == (*self.assignment,)
        differs = [] if other_shapes and by_name else self.graph_differences(graph)
        differs += self.cluster_differences(cluster)
        if differs:
            raise PlanMismatch(
                f"the plan was made for {self.graph.name!r} ({self.graph.fingerprint[:12]}) on "
                f"{[d.name for d in self.cluster.devices]}: {'; '.join(differs)}. Plan "
                "for the model and devices at hand: "
                "placement plan MODEL --planner best_of --out plan.json"
                + ("; or, as it has these operators: bind(..., other_shapes=True)" * by_name)
            )
        rows = [[cluster.index(on[x]) for x in graph.op_name] for on in self.assignments]
        placed = np.array(rows if self.phases else rows[0], np.int32)
        if not other_shapes:
            return placed
        # Another operator may be a view then: it goes where its memory is.
        return placed[..., graph.group_op[graph.group_ptr[graph.group]]]

    def graph_differences(self, graph: OpGraph) -> list[str]:
        """In which parts ``graph`` is not the one of the plan; empty if it is."""
        if graph.fingerprint == self.graph.fingerprint:
            names = set(graph.op_name) ^ set(self.assignment)
            return [f"operators without a device: {_some(sorted(names))}"] if names else []
        said = f"the model {graph.name!r} ({graph.fingerprint[:12]}) "
        if graph.num_ops != self.graph.num_ops:
            said += f"is another: {self.graph.num_ops} operators in the plan, {graph.num_ops} here"
        else:
            here = graph_parts(graph)
            parts = [text for key, text in _PARTS.items() if here[key] != self.graph.parts.get(key)]
            said += f"differs in {', '.join(parts) or 'its fingerprint'}"
        new = [x for x in graph.op_name if x not in self.assignment]
        return [said + f" (not in the plan: {_some(new)})" * bool(new)]

    def cluster_differences(self, cluster: Cluster) -> list[str]:
        """In which devices and links ``cluster`` is not the one of the plan; empty if it is."""
        planned, differences = self.cluster.build(), []
        here = {d.name: d for d in cluster.devices}
        for device in planned.devices:
            if device.name not in here:
                differences.append(f"there is no device {device.name!r}, only {list(here)}")
                continue
            for f in fields(Device):
                was, now = getattr(device, f.name), getattr(here[device.name], f.name)
                if f.name == "memory_bytes" and now >= _SAME_MEMORY * was:
                    continue  # what is free, or the machine has, is never quite the same
                if was != now:
                    differences.append(
                        f"device {device.name!r} has {f.name} {now!r}, planned {was!r}"
                    )
        added = [name for name in here if name not in planned.device_names]
        if added:
            differences.append(f"device {added[0]!r} is new")
        if not differences and planned.device_names != cluster.device_names:
            differences.append(f"devices are in the order {list(here)}")
        if set(planned.links) != set(cluster.links):
            differences.append("declared links differ")
        return differences

    def missing_devices(self) -> list[str]:
        """Why this machine cannot run the plan: one line per device in use that it lacks."""
        used, missing = {d for on in self.assignments for d in on.values()}, []
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        for d in self.cluster.build().devices:
            if d.name not in used:
                continue
            if d.like is not None or d.kind not in ("cpu", "cuda"):
                missing.append(f"device {d.name!r} ({d.kind}) exists in the simulator only")
            elif d.kind == "cpu" and cores is not None and not set(d.cores) <= cores:
                missing.append(
                    f"device {d.name!r} needs the cores {list(d.cores)}; "
                    f"this process may use {sorted(cores)}"
                )
            elif d.kind == "cuda":
                import torch

                from placement.executor.backend import is_cuda_here

                if not is_cuda_here(d.name):
                    missing.append(
                        f"device {d.name!r} is not there; {torch.cuda.device_count()} CUDA devices"
                    )
        return missing

    def bind(
        self,
        module: Any,
        example_inputs: Any = None,
        *,
        other_shapes: bool = False,
        outputs: str = "host",
        in_order: bool = False,
        record: bool = False,
    ) -> Runner:
        """``module`` on the devices of the plan: call the runner, or stream through it.

        The module is captured with ``example_inputs``, or with inputs of the shapes and dtypes
        of the plan. ``other_shapes``: those of ``example_inputs`` may be others, if the operators
        have the same names; what the plan predicts is not about them. ``outputs`` and ``record``
        are those of ``Runner``. ``in_order``: the runner follows the order of the plan, if it has
        one, and takes exactly its micro-batches at a time; otherwise it uses the list rule, and
        takes any number.

        Raises:
            PlanMismatch: another module than the plan's, or this machine lacks a device.
            CaptureError: the module cannot be captured.
        """
        from placement.executor import Runner
        from placement.program import inputs_from_spec

        if self.graph.mode == "training":
            raise PlanMismatch(
                "the plan is for training: bind_training(module, optimizer, loss=...)"
            )
        graph = self._captured(module, example_inputs, inputs_from_spec)
        cluster = self.cluster.build()
        placement = self.placement(graph, cluster, other_shapes=other_shapes)
        options = self.run_options(graph, in_order=in_order)
        return Runner(graph, cluster, placement, record=record, outputs=outputs, **options)

    def bind_training(
        self,
        module: Any,
        optimizer: Any,
        example_inputs: Any = None,
        *,
        loss: Callable[..., Any] | None = None,
        colocate_backward: bool = True,
        split_backward: bool = False,
        recompute: Sequence[str] = (),
        record: bool = False,
    ) -> Trainer:
        """``module`` on the devices of the plan, to be trained by ``optimizer``.

        ``loss``, how backward is cut and what is recomputed as for ``placement.capture``;
        otherwise as ``bind``. An order of the plan is followed: steps then take exactly its
        micro-batches.

        Raises:
            PlanMismatch: another module, loss or optimizer than the plan's, or this machine lacks
                a device.
            CaptureError: the module cannot be captured.
        """
        from placement.capturing.training import example_from_spec
        from placement.executor import Trainer

        if self.graph.mode != "training":
            raise PlanMismatch(
                "the plan is for inference: bind(module), or plan again from "
                "capture(module, inputs, mode='training')"
            )
        graph = self._captured(
            module,
            example_inputs,
            example_from_spec,
            mode="training",
            loss=loss,
            optimizer=optimizer,
            colocate_backward=colocate_backward,
            split_backward=split_backward,
            recompute=recompute,
        )
        cluster = self.cluster.build()
        return Trainer(
            graph,
            cluster,
            self.placement(graph, cluster),
            optimizer,
            record=record,
            **self.run_options(graph, in_order=True),
        )

    def _captured(
        self, module: Any, example: Any, from_spec: Callable[[Any], Any], **options: Any
    ) -> OpGraph:
        """The graph of ``module`` for ``example`` or the plan's inputs, on a machine that fits."""
        from placement.capturing import capture
        from placement.program import CaptureError

        missing = self.missing_devices()
        if missing:
            raise PlanMismatch(
                f"this machine cannot run the plan: {'; '.join(missing)}. Plan for this machine: "
                f"placement plan {self.graph.workload or 'MODEL'} --planner best_of --out plan.json"
            )
        if example is None and self.graph.input_spec is None:
            raise PlanError("the plan has no input shapes: give bind(module, example_inputs)")
        if example is not None:
            return capture(module, example, **options)
        try:
            return capture(module, from_spec(self.graph.input_spec), **options)
        except CaptureError as error:
            raise CaptureError(
                f"{error} (the plan's inputs are given: it is of {self.graph.name!r})"
            ) from error

    def run_options(self, graph: OpGraph, *, in_order: bool) -> dict[str, Any]:
        """What ``Runner`` and ``Trainer`` are to be told; ``in_order`` as for ``bind``."""
        schedule = self.schedule(graph) if in_order else None
        # An order needs room for all of its micro-batches.
        window = self.max_in_flight if schedule is None else self.num_microbatches
        return {"max_in_flight": window, "priority": self.priority, "schedule": schedule}

    def schedule(self, graph: OpGraph) -> Schedule | None:
        """The order, if the plan has one, with operators by number in ``graph``."""
        from placement.schedule import Schedule

        if self.order is None:
            return None
        number = {name: i for i, name in enumerate(graph.op_name)}
        rows = [
            [(number[op], batch) for op, batch in self.order.get(d.name, ())]
            for d in self.cluster.devices
        ]
        return Schedule(
            tuple(np.array(r, np.int32).reshape(-1, 2) for r in rows), self.num_microbatches
        )

    def timeline(self, problem: Problem, num_microbatches: int | None = None) -> Timeline:
        """What the simulator predicts for so many micro-batches; None: as planned, in its order.

        Raises:
            PlanMismatch: ``problem`` is about another graph or other devices.
            ProblemError: it cannot be placed so.
        """
        from placement.simulator import simulate

        placement = self.placement(problem.graph, problem.cluster)
        if num_microbatches is not None:
            return simulate(problem, placement, num_microbatches=num_microbatches)
        return simulate(problem, placement, self.schedule(problem.graph))

    def inconsistencies(self) -> list[str]:
        """What contradicts itself in the file: one line each, with key and value."""
        wrong = []
        devices = [d.name for d in self.cluster.devices]
        try:
            built = self.cluster.build()
        except ValueError as error:
            return [f"cluster: {error}"]
        if built.fingerprint != self.cluster.fingerprint:
            wrong.append(
                f"cluster.fingerprint = {self.cluster.fingerprint[:12]}..., but the devices listed "
                f"give {built.fingerprint[:12]}..."
            )
        phases = {f"phases[{i}]": on for i, on in enumerate(self.phases)}
        for key, phase in {"assignment": self.assignment, **phases}.items():
            wrong += [
                f"{key}[{op!r}] = {device!r}: no such device, there are {devices}"
                for op, device in phase.items()
                if device not in devices
            ]
            unknown = [op for op in phase if op not in self.assignment]
            if unknown:
                wrong.append(f"{key}: no operator {_some(unknown)} in assignment")
        if (self.schema_version == 2) != bool(self.phases):
            wrong.append(
                f"schema_version = {self.schema_version}, but there are {len(self.phases)} phases: "
                "a plan with phases has version 2, one without has 1"
            )
        for key, named in (
            ("device_map", self.device_map.values()),
            ("order", self.order or ()),
            ("fallback.device", [self.fallback.device] if self.fallback else ()),
        ):
            wrong += [
                f"{key}: no device {d!r}, there are {devices}" for d in set(named) - {*devices}
            ]
        n = self.graph.num_ops
        if len(self.assignment) != n:
            wrong.append(f"assignment has {len(self.assignment)} operators, graph.num_ops = {n}")
        elif sorted(self.priority) != list(range(n)):
            wrong.append(f"priority must hold each of 0..{n - 1} once")
        if self.graph.modules and len(self.graph.modules) != n:
            wrong.append(f"graph.modules has {len(self.graph.modules)} paths, num_ops = {n}")
        sources = self.graph.sources
        if sources and len(sources) != n:
            wrong.append(f"graph.sources is about {len(sources)} operators, num_ops = {n}")
        for i, read in enumerate(sources):
            if max(read, default=-1) >= i:
                wrong.append(f"graph.sources: operator {i} reads from operator {max(read)}")
        numbered = {"backward": self.graph.backward, "outputs": self.graph.outputs}
        for key, numbers in (self.graph.parameters | numbered).items():
            if max(numbers, default=0) >= n:
                wrong.append(f"graph: {key!r} is about operator {max(numbers)}, num_ops = {n}")
        on = list(self.assignment.values())
        if self.stages != stages_of(list(self.assignment), on):
            wrong.append("stages do not follow from assignment")
        modules = self.graph.modules
        if len(modules) == len(on) and self.device_map != whole_modules(modules, on):
            wrong.append("device_map does not follow from assignment and graph.modules")
        for key, table in (
            ("predicted.busy_s", self.predicted.busy_s),
            ("predicted.peak_bytes", self.predicted.peak_bytes),
            ("limits.memory_bytes", self.limits.memory_bytes),
            ("limits.headroom_bytes", self.limits.headroom_bytes),
        ):
            if set(table) != set(devices):
                wrong.append(f"{key} is about {sorted(table)}, devices are {devices}")
                return wrong
        for d in self.cluster.devices:
            peak, limit = self.predicted.peak_bytes[d.name], self.limits.memory_bytes[d.name]
            free = self.limits.headroom_bytes[d.name]
            if limit != d.memory_bytes:
                wrong.append(f"limits.memory_bytes[{d.name!r}] = {limit}, it has {d.memory_bytes}")
            if peak > limit:
                wrong.append(f"device {d.name!r} needs {peak} bytes, its limit is {limit}")
            elif free != limit - peak:
                wrong.append(
                    f"limits.headroom_bytes[{d.name!r}] = {free}, but {limit} less the peak {peak} "
                    f"is {limit - peak}"
                )
        return wrong + self._value_inconsistencies() + self._order_inconsistencies()

    def _value_inconsistencies(self) -> list[str]:
        """Values that say the objective twice must agree, and none is below a proved bound."""
        twins = {"latency": "latency_s", "period": "period_s"}
        if not self.second_j:
            twins["energy"] = "energy_j"
        wrong = []
        twin = twins.get(self.objective, "value_s")
        for key, part in (("predicted", self.predicted), ("fallback", self.fallback)):
            if part is None:
                continue
            again = getattr(part, twin, None)  # a fallback has no energy_j
            if again is not None and not isclose(part.value_s, again, rel_tol=ROUNDING):
                wrong.append(f"{key}.value_s = {part.value_s}, but {key}.{twin} = {again}")
            values = {"latency": part.latency_s, "period": part.period_s}
            for what, value in (values | {self.objective: part.value_s}).items():
                bound = self.lower_bound_s.get(what, 0.0)
                if value < bound * (1 - ROUNDING):
                    wrong.append(f"{key}: {what} {value} is below lower_bound_s.{what} = {bound}")
        return wrong

    def _order_inconsistencies(self) -> list[str]:
        if self.order is None:
            return []
        num_entries = sum(map(len, self.order.values()))
        expected = len(self.assignment) * self.num_microbatches
        if expected > 2 * num_entries:  # too many to name each
            return [
                f"order has {num_entries} entries, {len(self.assignment)} operators x "
                f"{self.num_microbatches} micro-batches are {expected}"
            ]
        wrong, phases = [], self.assignments
        times: Counter[tuple[str, int]] = Counter()
        for device, rows in self.order.items():
            times.update(rows)
            for op, batch in rows:
                planned = phases[batch % len(phases)].get(op)
                if planned != device or batch >= self.num_microbatches:
                    wrong.append(
                        f"order[{device!r}] runs {op!r}, micro-batch {batch}: not its work"
                    )
        for op in self.assignment:
            for batch in range(self.num_microbatches):
                if times[op, batch] != 1:
                    wrong.append(
                        f"order runs {op!r}, micro-batch {batch}, {times[op, batch]} times"
                    )
        return wrong


def make_plan(
    problem: Problem,
    solution: Solution,
    *,
    planner: str,
    parameters: Mapping[str, Any] | None = None,
    schedule: Schedule | None = None,
    workload: str | None = None,
    input_spec: dict[str, Any] | None = None,
    measured: Measured | None = None,
) -> Plan:
    """The plan of a planner's answer, with predictions, proved bounds and fallback.

    Args:
        planner: its name, e.g. ``heft``; ``parameters``: its fields (see ``parameters_of``).
        schedule: an order, if not the one that the planner decided (``solution.schedule``).
            One of a single sample also is the ``priority`` of samples in a pipeline.
        workload: how ``placement.workloads.load`` finds the module.
        input_spec: shapes of the inputs; those of the captured program if not given.

    Raises:
        PlanError: the placement does not fit (with the bytes), or a name cannot be written.
        ProblemError: the placement is not one of this problem.
    """
    from placement.simulator import simulate

    graph, devices = problem.graph, problem.cluster.device_names
    p = problem.check_placement(solution.placement)
    schedule = schedule or solution.schedule
    many = simulate(problem, p, schedule)
    single = schedule is not None and schedule.num_microbatches == 1
    alone = [many] if single else [simulate(problem, x, None, 1) for x in np.atleast_2d(p)]
    one = max(alone, key=lambda line: line.latency_s)  # of the slowest phase
    priority = problem.priority
    if single:
        priority = np.argsort(np.lexsort((one.end_s[0], one.start_s[0]))).astype(np.int32)
    assert one.peak_bytes is not None and many.peak_bytes is not None
    problem = replace(problem, max_phases=max(problem.max_phases, len(alone)))  # of its bounds
    solution = replace(solution, schedule=schedule)
    peak = np.maximum(one.peak_bytes, many.peak_bytes)
    if problem.objective.is_analytic:  # these count parameters only
        peak = problem.param_bytes_on(p)
    excess = memory_excess(problem, peak)
    if excess:
        raise PlanError(f"the placement does not fit: {'; '.join(excess)}")
    on, *others = ([devices[d] for d in row] for row in np.atleast_2d(p))
    bounds = lower_bounds(_in_order(problem, schedule))
    if problem.max_phases == 1:  # planners prove theirs for that
        bounds[problem.objective] = max(bounds[problem.objective], solution.lower_bound_s or 0.0)
    try:
        return Plan(
            schema_version=2 if others else 1,
            planner=PlannerInfo(name=planner, parameters=dict(parameters or {})),
            graph=GraphInfo.of(graph, workload, input_spec),
            cluster=ClusterInfo.of(problem),
            objective=problem.objective.value,
            num_microbatches=many.num_microbatches,
            max_in_flight=problem.max_in_flight,
            second_j=problem.second_j,
            assignment=dict(zip(graph.op_name, on, strict=True)),
            phases=tuple(
                {op: d for op, d, at in zip(graph.op_name, phase, on, strict=True) if d != at}
                for phase in others
            ),
            priority=tuple(priority.tolist()),
            order=None if schedule is None else _named_order(schedule, graph, devices),
            stages=stages_of(graph.op_name, on),
            device_map=module_map(graph, on),
            predicted=Predicted(
                value_s=_value_s(problem, solution, one, many),
                latency_s=one.latency_s,
                period_s=many.period_s,
                energy_j=None if many.energy_j is None else many.energy_j / many.num_microbatches,
                busy_s=_per_device(devices, many.busy_s / many.num_microbatches),
                peak_bytes=_per_device(devices, peak),
            ),
            measured=measured,
            lower_bound_s=bounds,
            limits=Limits(
                memory_bytes=_per_device(devices, problem.memory_bytes),
                headroom_bytes=_per_device(devices, problem.memory_bytes - peak),
            ),
            fallback=_fallback(problem),
            provenance=Provenance(
                version=version(),
                git_commit=_git_commit(),
                created=now(),
                profile=_plain(problem.profile.provenance),
            ),
        )
    except ValidationError as error:
        raise PlanError(f"graph {graph.name!r}: {_explain(error)}") from error


def _value_s(problem: Problem, solution: Solution, one: Timeline, many: Timeline) -> float:
    """The objective in the order of the plan, which need not be the planner's."""
    from placement.simulator import value_in, value_of

    if problem.objective.is_analytic:
        return value_of(problem, solution)
    return value_in(problem, one if problem.objective is Objective.LATENCY else many)


def proved_bound_s(problem: Problem, solution: Solution) -> float:
    """The best lower bound of the objective that is proved, by the planner or in general.

    Planners prove theirs for placements with one phase.
    """
    problem = _in_order(problem, solution.schedule)
    phases = max(problem.max_phases, len(np.atleast_2d(solution.placement)))
    if phases > 1:
        return lower_bound(replace(problem, max_phases=phases))
    return max(lower_bound(problem), solution.lower_bound_s or 0.0)


def _in_order(problem: Problem, schedule: Schedule | None) -> Problem:
    """With as many micro-batches in flight as a schedule admits: all of them."""
    many = 1 if schedule is None else schedule.num_microbatches
    return replace(problem, max_in_flight=max(problem.max_in_flight, many))


def load_plan(path: str | Path) -> Plan:
    """Read a plan and check that it does not contradict itself.

    Raises:
        PlanError: missing, too large, not UTF-8, truncated, of another schema version, with
            unknown keys or wrong values, or inconsistent; the message names the key.
    """
    plan = read_plan(path)
    wrong = plan.inconsistencies()
    if wrong:
        raise PlanError(
            f"{path}: {_some(wrong, sep='; ')}. Was it edited by hand? "
            "Make it again, with placement plan MODEL --out plan.json, or by hand with make_plan "
            "(docs/plan.md)"
        )
    return plan


def read_plan(path: str | Path) -> Plan:
    """As ``load_plan``, without the check for contradictions (see ``Plan.inconsistencies``)."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise PlanError(f"{path}: {size} bytes, a plan has at most {MAX_FILE_BYTES}")
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        what = model_file(path, error.object) or f"byte {error.start} is not UTF-8"
        raise PlanError(f"{path}: not a plan: {what}") from error
    except OSError as error:
        made = ""
        if isinstance(error, FileNotFoundError):
            model = path.name if ":" in path.name else "MODEL"
            made = f"; a plan is a file, and made with: placement plan {model} --out plan.json"
        raise PlanError(f"{path}: cannot be read: {error.strerror}{made}") from error
    try:
        data = parse_json(text)
    except ValueError as error:
        if what := model_file(path, text.encode()):
            raise PlanError(f"{path}: not a plan: {what}") from error
        raise PlanError(
            f"{path}: not valid JSON ({error}): truncated, or edited by hand? "
            "Make it again: placement plan MODEL --out plan.json"
        ) from error
    if _holds_target(data):
        raise PlanError(
            f"{path}: the key '_target_' is not part of a plan: plans hold data, never code"
        )
    if not isinstance(data, dict) or "schema_version" not in data:
        raise PlanError(f"{path}: not a plan: there is no key 'schema_version'")
    version = data["schema_version"]
    if version not in SCHEMA_VERSIONS or isinstance(version, bool):
        raise PlanError(
            f"{path}: schema_version = {short(version)}, this version reads "
            f"{' and '.join(map(str, SCHEMA_VERSIONS))}: "
            "install the version that wrote the plan, or make it again: placement plan"
        )
    try:
        return Plan.model_validate_json(_awake(path, data, text))
    except ValidationError as error:
        raise PlanError(f"{path}: {_explain(error)}") from error


_OF_SLEEP = ("sleep_after_s", "sleep_exit_s")


def _awake(path: Path, data: dict[str, Any], text: str) -> str:
    """Older files say of every device whether it sleeps: of one that does not, it is nothing.

    Raises:
        PlanError: one does, and the plan's values count on it.
    """
    try:
        for device in data["cluster"]["devices"]:
            watts, *_ = [device.pop(key, None) for key in ("sleep_w", *_OF_SLEEP)]
            if watts is not None:
                raise PlanError(
                    f"{path}: device {short(device.get('name'))} has sleep_w = {short(watts)}, but "
                    "devices that sleep are no longer modelled: plan again without it in the "
                    "cluster's file"
                )
    except (LookupError, TypeError, AttributeError):  # told by who reads it next
        pass
    return json.dumps(data) if '"sleep_' in text else text


def schema_text() -> str:
    """The JSON schema of the file, as published in ``docs/plan.schema.json``."""
    schema = Plan.model_json_schema()
    schema["required"].insert(0, "schema_version")  # as the reader demands
    return json.dumps(schema, indent=1) + "\n"


def graph_parts(graph: OpGraph) -> dict[str, str]:
    """A short hash of each part of the graph's fingerprint, so that a difference has a name."""

    def short(*items: Any) -> str:
        h = hashlib.sha256()
        for item in items:
            if isinstance(item, tuple):
                h.update("\0".join(item).encode() + b"\0\0")
            else:
                h.update(np.ascontiguousarray(item).astype("<i8").tobytes() + b"|")
        return h.hexdigest()[:12]

    return {
        "names": short(graph.op_name),
        "operators": short(graph.op_signature),
        "structure": short(
            graph.tensor_src,
            graph.tensor_root,
            graph.use_tensor,
            graph.use_dst,
            graph.output_tensor,
        ),
        "tensors": short(graph.tensor_bytes),
        "parameters": short(graph.param_bytes, graph.param_use_op, graph.param_use),
        "colocation": short(graph.group),
        "backward": short(graph.is_backward),
    }


def module_map(graph: OpGraph, on: Sequence[str]) -> dict[str, str]:
    """``whole_modules`` of a graph; ``on`` is the ``[N]`` device name of each operator."""
    return whole_modules(graph.op_module, on)


def whole_modules(modules: Sequence[str], on: Sequence[str]) -> dict[str, str]:
    """Module path -> device, for the outermost modules whose operators are all on one device.

    Args:
        modules: ``[N]`` path of each operator's module.
        on: ``[N]`` its device name.
    """
    where: dict[str, str | None] = {}
    for path, device in zip(modules, on, strict=True):
        for above in ancestry(path):
            if where.setdefault(above, device) != device:
                where[above] = None
    return {
        path: device
        for path, device in where.items()
        if device is not None and not any(where[x] for x in ancestry(path)[:-1])
    }


def memory_excess(problem: Problem, peak_bytes: Any) -> list[str]:
    """One line for each device whose peak, int64 ``[D]``, is above its memory."""
    return [
        f"device {d.name!r} needs {int(need):,} bytes, it has {d.memory_bytes:,}"
        for d, need in zip(problem.cluster.devices, peak_bytes, strict=True)
        if need > d.memory_bytes
    ]


def parameters_of(planner: Any) -> dict[str, Any]:
    """A planner's fields as JSON (what JSON cannot hold, as text)."""
    return _plain(
        {f.name: getattr(planner, f.name) for f in fields(planner)} if is_dataclass(planner) else {}
    )


def now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def stages_of(names: Sequence[str], on: Sequence[str]) -> tuple[Stage, ...]:
    """The runs of operators, given by name in order, that are on one device."""
    cuts = [0, *(i for i in range(1, len(on)) if on[i] != on[i - 1]), len(on)]
    return tuple(
        Stage(device=on[a], first=names[a], last=names[b - 1], num_ops=b - a)
        for a, b in pairwise(cuts)
        if b > a
    )


def _sources(graph: OpGraph) -> tuple[tuple[int, ...], ...]:
    """Numbers of the operators that each operator reads from; -1 stands for the model's inputs.

    What hands on its whole input (``x.to(x.dtype)``) is read along with where that is from: it may
    return ``x`` itself, and the trace then names it in the place of ``x`` from there on.
    """
    src, root, size = graph.tensor_src, graph.tensor_root, graph.tensor_bytes

    def origins(t: int) -> Iterator[int]:
        while True:
            op = int(src[t])
            yield op
            inputs = graph.in_tensor[graph.in_ptr[op] : graph.in_ptr[op + 1]] if op >= 0 else ()
            same = [u for u in inputs if root[u] == root[t] and size[u] == size[t]]
            if not same:
                return
            t = same[0]

    return tuple(
        tuple(sorted({op for t in graph.in_tensor[a:b] for op in origins(t)}))
        for a, b in pairwise(graph.in_ptr.tolist())
    )


def _readers(graph: OpGraph) -> dict[str, tuple[int, ...]]:
    """Name of each parameter -> numbers of the operators that read it."""
    if graph.program is None:
        return {}
    program = graph.program
    readers: dict[str, list[int]] = {
        name: [] for name in (*program.state_names, *program.param_names)
    }
    for op, p in zip(graph.param_use_op.tolist(), graph.param_use.tolist(), strict=True):
        if p < len(program.param_names):  # gradients and state of the optimizer have no name
            readers[program.param_names[p]].append(op)
    return {name: tuple(ops) for name, ops in readers.items()}


def _named_order(
    schedule: Schedule, graph: OpGraph, devices: Sequence[str]
) -> dict[str, tuple[tuple[str, int], ...]]:
    return {
        device: tuple((graph.op_name[op], batch) for op, batch in rows.tolist())
        for device, rows in zip(devices, schedule.order, strict=True)
    }


def _fallback(problem: Problem) -> Fallback | None:
    """The single device with the best objective that can hold everything."""
    from placement.simulator import evaluate, score

    able = np.flatnonzero(np.isfinite(problem.compute_s).all(axis=0))
    if len(able) == 0:
        return None
    placements = np.repeat(able[:, None], problem.num_ops, axis=1)
    value, values = score(problem, placements), evaluate(problem, placements)
    best = int(value.argmin())
    if not np.isfinite(value[best]):
        return None
    return Fallback(
        device=problem.cluster.device_names[able[best]],
        value_s=float(value[best]),
        latency_s=float(values.latency_s[best]),
        period_s=float(values.period_s[best]),
    )


def _per_device(devices: Sequence[str], values: Any) -> dict[str, Any]:
    return dict(zip(devices, values.tolist(), strict=True))


def ancestry(path: str) -> list[str]:
    """``a.b`` -> ``["", "a", "a.b"]``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def _plain(value: Any) -> Any:
    """``value`` as JSON; what JSON cannot hold becomes text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _git_commit() -> str | None:
    """The commit of the checkout that runs, with ``+changes`` if it was changed; else None."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        answer = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _holds_target(value: Any) -> bool:
    if isinstance(value, dict):
        return "_target_" in value or any(map(_holds_target, value.values()))
    return isinstance(value, list) and any(map(_holds_target, value))


def _explain(error: ValidationError) -> str:
    """Each wrong key with its value and what is expected there."""
    return _some([_explain_one(dict(e)) for e in error.errors(include_url=False)], sep="; ")


def _explain_one(e: dict[str, Any]) -> str:
    where = ".".join(str(x)[:80] for x in e["loc"])
    if e["type"] == "missing":
        return f"the key {where!r} is missing"
    if e["type"] == "extra_forbidden":
        keys = [key for key in _ALL_KEYS if key != e["loc"][-1]]  # known, but not there
        return f"unknown key {where!r}{meant(str(e['loc'][-1]), keys)}"
    return f"{where} = {short(e['input'])}: {e['msg'][:1].lower()}{e['msg'][1:]}"


_ALL_KEYS = sorted({key for kind in [*_Strict.__subclasses__()] for key in kind.model_fields})


def _some(items: Sequence[str], sep: str = ", ") -> str:
    more = len(items) - 5
    return sep.join(items[:5]) + (f"{sep}and {more} more" if more > 0 else "")
