"""The parts of a plan: types of its keys, and what follows from an assignment.

Docstrings of these classes are in ``docs/plan.schema.json``, which is what other programs read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.problem import Problem

# Names are shown in terminals and pages: control and direction-changing characters are refused.
_PRINTABLE = r"^[^\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]*$"
Name = Annotated[str, Field(max_length=1024, pattern=_PRINTABLE)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{12,64}$")]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Source = Annotated[int, Field(ge=-1, le=2**63 - 1)]
Seconds = Annotated[FiniteFloat, Field(ge=0)]


class PlanError(ValueError):
    """The plan file is damaged or inconsistent; the message says where."""


class PlanMismatch(PlanError):
    """The plan is for another model or other devices; the message names the parts that differ."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PlannerInfo(Strict):
    """Which planner decided, with which hyper-parameters."""

    name: Name
    parameters: dict[Name, JsonValue] = {}


class GraphInfo(Strict):
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
    def of(cls, graph: OpGraph, workload: str | None) -> GraphInfo:
        """From a graph."""
        program = graph.program
        return cls(
            name=graph.name,
            fingerprint=graph.fingerprint,
            num_ops=graph.num_ops,
            parts=graph_parts(graph),
            workload=workload,
            input_spec=None if program is None else program.input_spec,
            mode="training" if graph.is_backward.any() else "inference",
            optimizer=None if program is None else program.optimizer,
            modules=graph.op_module,
            sources=sources_of(graph),
            outputs=tuple(sorted({*graph.tensor_src[graph.output_tensor].tolist()})),
            parameters=readers_of(graph),
            backward=tuple(np.flatnonzero(graph.is_backward).tolist()),
        )


_Dim = Annotated[int, Field(ge=0, le=64)]
_Rows = Annotated[int, Field(ge=1, le=2**31)]
Cut = Literal["whole", "sum"] | _Dim
Window = tuple[_Dim, _Rows, _Rows, Count, bool]  # as ``placement.pieces.rules.Window``


class CutInfo(Strict):
    """How an operator is cut into pieces.

    ``inputs`` says it of each tensor that it reads: along a dimension (its number), not at all
    (``whole``: each piece reads it), as summands (``sum``), or in the rows that a sliding window
    reads: ``[dimension, rows of the window, stride, padding, whether that is -inf]``. ``outputs``
    says it of each that it makes.
    ``numbers`` are the places among its arguments of sizes that are those of the piece, ``zeros``
    those of numbers that are 0 in a piece; ``bounds``
    says where pieces begin and end along the dimension that is cut.
    """

    inputs: tuple[Cut | Window, ...]
    numbers: tuple[Count, ...] = ()
    zeros: tuple[Count, ...] = ()
    outputs: tuple[Cut, ...]
    bounds: tuple[Count, ...]


class PiecesInfo(Strict):
    """Which operators of the model are cut, by name, all into pieces of these ``shares``."""

    shares: Annotated[tuple[Seconds, ...], Field(min_length=2, max_length=64)]
    operators: dict[Name, CutInfo]

    @classmethod
    def of(cls, graph: OpGraph) -> PiecesInfo | None:
        """Those of a graph, if it has any."""
        pieces = None if graph.program is None else graph.program.pieces
        if pieces is None:
            return None
        cuts = {
            op: CutInfo(**vars(rule), bounds=pieces.bounds[op]) for op, rule in pieces.rules.items()
        }
        return cls(shares=pieces.shares, operators=cuts)


class DeviceInfo(Strict):
    """As ``placement.cluster.Device``; ``members`` and what follows only of a group."""

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
    members: tuple[Name, ...] = ()
    ring_latency_s: Seconds = 0.0
    ring_bytes_per_s: FiniteFloat | None = None
    buffer_bytes: Count | None = None
    pinned_bytes: Count | None = None

    @model_serializer(mode="wrap")
    def _of_its_kind(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        if not self.members:  # which older versions do not know
            for name in ("members", "ring_latency_s", "ring_bytes_per_s"):
                data.pop(name, None)
        for name in ("buffer_bytes", "pinned_bytes"):
            if getattr(self, name) is None:
                data.pop(name, None)
        return data


class LinkInfo(Strict):
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


class ClusterInfo(Strict):
    """The devices that the decision is about, and the links as it was made with them."""

    name: Name
    fingerprint: Hash
    devices: tuple[DeviceInfo, ...]
    links: tuple[LinkInfo, ...]

    @classmethod
    def of(cls, problem: Problem) -> ClusterInfo:
        """From a problem: its devices, and its profile's links."""
        told, links = problem.cluster.links, problem.profile.links
        rows = [(x, x in told) for x in links]
        if tuple(x for x, is_told in rows if is_told) != told:  # a profile that does not have them
            rows = [(x, True) for x in told] + [(x, False) for x in links]
        unlimited = {"bandwidth_bytes_per_s": None}
        info = cls.model_construct(
            name=problem.cluster.name,
            fingerprint="",  # of the cluster that is built from the rest
            devices=tuple(DeviceInfo(**asdict(d)) for d in problem.cluster.devices),
            links=tuple(
                LinkInfo(
                    **asdict(x)
                    | {"declared": is_told}
                    | ({} if np.isfinite(x.bandwidth_bytes_per_s) else unlimited)
                )
                for x, is_told in rows
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


class Stage(Strict):
    """Operators ``first`` to ``last`` (by number, both included): a piece on one device."""

    device: Name
    first: Name
    last: Name
    num_ops: Count


class Predicted(Strict):
    """What the simulator says; ``value_s`` is of the objective (joules if that is ``energy``).

    Of ``latency_s`` the call itself takes ``overhead_s``, besides its first operator to its last.
    ``busy_s`` and ``energy_j`` are per micro-batch; ``energy_j`` is null where the power of a
    device is unknown.
    """

    value_s: Seconds
    latency_s: Seconds
    period_s: Seconds
    energy_j: Seconds | None = None
    overhead_s: Seconds = 0.0
    busy_s: dict[Name, Seconds]
    peak_bytes: dict[Name, Count]


class Spread(Strict):
    """Median and interquartile range of repeated measurements."""

    median_s: Seconds
    iqr_s: Seconds

    @classmethod
    def of(cls, seconds: ArrayLike) -> Spread:
        """Of the repeats."""
        low, middle, high = np.percentile(np.asarray(seconds, float), [25, 50, 75])
        return cls(median_s=float(middle), iqr_s=float(high - low))


class Measured(Strict):
    """What a run on real devices gave: ``n`` repeats, when (ISO 8601) and on what.

    A search with measurements (``placement plan --measurements``) measures the objective alone:
    the other of the two is null.
    """

    latency_s: Spread | None = None
    period_s: Spread | None = None
    n: Count
    when: Name
    machine: Name


class Limits(Strict):
    """Memory of each device, and what the predicted peak leaves free of it."""

    memory_bytes: dict[Name, Count]
    headroom_bytes: dict[Name, int]


class Fallback(Strict):
    """The best single device: where to go back to; ``value_s`` is of the objective."""

    device: Name
    value_s: Seconds
    latency_s: Seconds
    period_s: Seconds


class Provenance(Strict):
    """Which version made the plan, when, and where its profile comes from."""

    version: Name
    git_commit: Name | None
    created: Name
    profile: dict[str, JsonValue]


def stages_of(names: Sequence[str], on: Sequence[str]) -> tuple[Stage, ...]:
    """The runs of operators, given by name in order, that are on one device."""
    cuts = [0, *(i for i in range(1, len(on)) if on[i] != on[i - 1]), len(on)]
    return tuple(
        Stage(device=on[a], first=names[a], last=names[b - 1], num_ops=b - a)
        for a, b in pairwise(cuts)
        if b > a
    )


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


def ancestry(path: str) -> list[str]:
    """``a.b`` -> ``["", "a", "a.b"]``."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def graph_parts(graph: OpGraph) -> dict[str, str]:
    """A short hash of each part of the graph's fingerprint, so that a difference has a name."""
    g = graph
    uses = (g.tensor_src, g.tensor_root, g.use_tensor, g.use_dst, g.output_tensor)
    return {
        "names": _hash(g.op_name),
        "operators": _hash(g.op_signature),
        "structure": _hash(*uses),
        "tensors": _hash(g.tensor_bytes),
        "parameters": _hash(g.param_bytes, g.param_use_op, g.param_use),
        "colocation": _hash(g.group),
        "backward": _hash(g.is_backward),
    }


def _hash(*items: tuple[str, ...] | NDArray[Any]) -> str:
    """12 hex digits of names and of arrays, as little-endian int64 on every machine."""
    digest = hashlib.sha256()
    for item in items:
        if isinstance(item, tuple):
            digest.update("\0".join(item).encode() + b"\0\0")
        else:
            digest.update(np.ascontiguousarray(item).astype("<i8").tobytes() + b"|")
    return digest.hexdigest()[:12]


def sources_of(graph: OpGraph) -> tuple[tuple[int, ...], ...]:
    """Numbers of the operators that each operator reads from; -1 stands for the model's inputs.

    A loss function's second argument is none of them: whoever trains brings it where it is read.

    What hands on its whole input (``x.to(x.dtype)``) is read along with where that is from: it may
    return ``x`` itself, and the trace then names it in the place of ``x`` from there on.
    """
    src, root, size = graph.tensor_src, graph.tensor_root, graph.tensor_bytes
    targets = frozenset() if graph.program is None else graph.program.target_tensors

    def origins(tensor: int) -> Iterator[int]:
        while tensor not in targets:
            op = int(src[tensor])
            yield op
            inputs = graph.in_tensor[graph.in_ptr[op] : graph.in_ptr[op + 1]] if op >= 0 else ()
            same = [t for t in inputs if root[t] == root[tensor] and size[t] == size[tensor]]
            if not same:
                return
            tensor = same[0]

    return tuple(
        tuple(sorted({op for t in graph.in_tensor[a:b] for op in origins(t)}))
        for a, b in pairwise(graph.in_ptr.tolist())
    )


def readers_of(graph: OpGraph) -> dict[str, tuple[int, ...]]:
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
