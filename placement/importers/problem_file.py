"""The problem file: everything of a ``Problem`` as strict, versioned JSON.

It is data and nothing else: loading one imports nothing that it names, and the program of a
captured graph is left out. Operators, devices and producers are named, tensors and parameters
are numbered in the order of their lists; seconds that are infinite are written ``"inf"``.
Numbers come back exactly. What is left out has the default of the classes below, so that a
file written by hand, or by another program, needs little::

    {"problem_version": 1, "model": "tiny",
     "cluster": {"name": "two", "devices": [{"name": "a"}, {"name": "b"}],
                 "links": [{"src": "a", "dst": "b", "bandwidth_bytes_per_s": 1e9}]},
     "operators": [{"name": "first", "compute_s": [0.1, 0.2]},
                   {"name": "second", "compute_s": [0.3, "inf"], "params": [0]}],
     "tensors": [{"producer": "first", "bytes": 4000, "consumers": ["second"]}],
     "param_bytes": [1000]}
"""

from __future__ import annotations

import gzip
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    create_model,
)

from placement.cluster import Cluster, ClusterError, Device, Link, changed_fields
from placement.graph import GraphError, OpGraph
from placement.importers._read import FormatError, labels
from placement.objective import ObjectiveName
from placement.problem import Problem, ProblemError, ReadyOrder
from placement.profile import ARRAYS, Profile, ProfileError
from placement.tools.files import as_data, parse_json, short, write_atomic
from placement.tools.limits import MOST
from placement.tools.strict import explain

VERSION = 1
_SIZES = ("num_microbatches", "max_in_flight")  # of a problem; they are always written
_SETTINGS = ("contention", "ready_order", "second_j", "max_phases")  # where they are not usual


def _number(value: Any) -> Any:
    if isinstance(value, int) and abs(value) >= 2**1023:
        raise ValueError("is too large a number")
    return float("inf") if value == "inf" else value


Number = Annotated[int | float, BeforeValidator(_number)]
Whole = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
PerDevice = tuple[Seconds, ...]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _record(kind: type) -> Any:
    """A strict model with the fields and defaults of a dataclass; infinite numbers are allowed."""
    limited: dict[Any, Any] = {float: Number, float | None: Number | None, int: Whole}
    definitions: dict[str, Any] = {}
    for f in fields(kind):
        hint = get_type_hints(kind)[f.name]
        definitions[f.name] = (limited.get(hint, hint), ... if f.default is MISSING else f.default)
    return create_model(kind.__name__, __base__=_Strict, **definitions)


class ClusterRecord(_Strict):
    """As ``placement.cluster.Cluster``; devices and links have the fields they have there."""

    name: str
    devices: tuple[_record(Device), ...]  # type: ignore[valid-type]
    links: tuple[_record(Link), ...] = ()  # type: ignore[valid-type]


class OperatorRecord(_Strict):
    """One operator, and its row of the profile: a number for each device, in their order.

    Attributes:
        group: operators with the same number share a device; null is a group of its own.
        params: numbers in ``param_bytes``.
        next_readers: names of operators that read in the next micro-batch what this one writes: a
            buffer, which stays on one device.
        loaded_s: as ``compute_s`` where it is left out, if another operator has it.
        spread_s, predicted, workspace_bytes, library_bytes: 0 or false where left out.
    """

    name: str
    kind: str = "op"
    module: str = ""
    signature: str = "op"
    group: int | None = None
    backward: bool = False
    params: tuple[Count, ...] = ()
    next_readers: tuple[str, ...] = ()
    compute_s: PerDevice
    spread_s: PerDevice | None = None
    loaded_s: PerDevice | None = None
    workspace_bytes: Count | None = None
    library_bytes: tuple[Count, ...] | None = None
    predicted: tuple[bool, ...] | None = None


class TensorRecord(_Strict):
    """One tensor.

    Attributes:
        producer: name of an operator; null is an input of the model.
        memory_of: number of the tensor whose memory this one shares.
        transfer_s, io_s: as in ``placement.profile.Profile``; all tensors have it, or none.
    """

    producer: str | None
    bytes: Count
    consumers: tuple[str, ...] = ()
    memory_of: Count | None = None
    transfer_s: tuple[PerDevice, ...] | None = None
    io_s: PerDevice | None = None


class ProblemRecord(_Strict):
    """The file.

    Attributes:
        operators: in topological order.
        outputs: numbers of the tensors that leave the model.
        links: as measured; null: those that the cluster declares.
        fingerprint: of the graph; if given, it must be the one that the file's graph has.
        measured_graph: fingerprint of the graph that was measured, or "".
        batch_s, overhead_s: as in ``placement.profile.Profile``.
        provenance: where the seconds come from.
    """

    problem_version: Literal[1]
    model: str
    objective: ObjectiveName = "period"
    num_microbatches: Positive = Problem.num_microbatches
    max_in_flight: Positive = Problem.max_in_flight
    contention: bool = Problem.contention
    ready_order: ReadyOrder = Problem.ready_order
    second_j: Seconds = Problem.second_j
    max_phases: Annotated[int, Field(ge=1, le=MOST.phases)] = Problem.max_phases
    fingerprint: str | None = None
    measured_graph: str = ""
    batch_s: Seconds = Profile.batch_s
    overhead_s: PerDevice | None = None
    provenance: dict[str, JsonValue] = {}
    cluster: ClusterRecord
    links: tuple[_record(Link), ...] | None = None  # type: ignore[valid-type]
    operators: Annotated[tuple[OperatorRecord, ...], Field(min_length=1)]
    tensors: tuple[TensorRecord, ...] = ()
    param_bytes: tuple[Count, ...] = ()
    outputs: tuple[Count, ...] = ()


def save(problem: Problem, path: str | Path) -> None:
    """Write the file, whole or not at all; ``placement.importers.load`` reads it.

    It is compressed if its name ends in ``.gz``.

    Raises:
        FormatError: a time is not a number.
        FileError: it cannot be written there.
    """
    lines = []
    for key, value in _document(problem).items():
        text = _json(value)
        if key in ("operators", "tensors"):  # a line each
            text = "[\n" + ",\n".join(map(_json, value)) + "\n]" if value else "[]"
        lines.append(f"{_json(key)}: {text}")
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    packed = Path(path).suffix == ".gz"
    write_atomic(path, gzip.compress(text.encode(), mtime=0) if packed else text)


def read(text: str, path: str, *, objective: str | None = None) -> Problem:
    """The problem of a file that ``save`` wrote, or that follows ``ProblemRecord``.

    ``objective`` replaces the file's.

    Raises:
        FormatError: another version, unknown or missing keys, wrong values, or parts that
            contradict each other; the message names the file, the field and the operator.
    """
    try:
        data = parse_json(text)
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from error
    version = data["problem_version"]
    if version != VERSION or isinstance(version, bool):
        raise FormatError(
            f"{path}: problem_version = {short(version)}, this version reads {VERSION}: "
            "install the version that wrote the file, or import it again: placement import"
        )
    try:
        record = ProblemRecord.model_validate_json(text)
    except ValidationError as error:
        raise FormatError(f"{path}: {explain(error, _Strict, data)}") from error
    try:
        return _problem(record, objective)
    except (FormatError, ClusterError, GraphError, ProfileError, ProblemError) as error:
        raise FormatError(f"{path}: {error}") from error


def _document(problem: Problem) -> dict[str, Any]:
    g, profile, cluster = problem.graph, problem.profile, problem.cluster
    group_size = np.bincount(g.group)
    columns = {
        name: _numbers(table, name)
        for name in ARRAYS
        if (table := getattr(profile, name)) is not None
    }

    def row(name: str, n: int) -> Any:
        return columns[name][n] if name in columns else None

    operators = [
        _changed(
            OperatorRecord,
            name=name,
            kind=g.op_kind[n],
            module=g.op_module[n],
            signature=g.op_signature[n],
            group=int(g.group[n]) if group_size[g.group[n]] > 1 else None,
            backward=bool(g.is_backward[n]),
            params=tuple(g.op_params[n]),
            next_readers=tuple(g.op_name[m] for m in g.carried.get(n, ())),
            compute_s=row("compute_s", n),
            spread_s=row("spread_s", n) if profile.spread_s[n].any() else None,
            loaded_s=row("loaded_s", n),
            workspace_bytes=row("workspace_bytes", n),
            library_bytes=row("library_bytes", n),
            predicted=row("predicted", n),
        )
        for n, name in enumerate(g.op_name)
    ]
    tensors = [
        _changed(
            TensorRecord,
            producer=None if src < 0 else g.op_name[src],
            bytes=int(g.tensor_bytes[t]),
            consumers=tuple(g.op_name[n] for n in g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]]),
            memory_of=None if g.tensor_root[t] == t else int(g.tensor_root[t]),
            transfer_s=row("transfer_s", t),
            io_s=row("io_s", t),
        )
        for t, src in enumerate(g.tensor_src.tolist())
    ]
    links = None if profile.links == cluster.links else [*map(_written, profile.links)]
    return {
        "problem_version": VERSION,
        "model": g.name,
        "objective": problem.objective,
        **{name: getattr(problem, name) for name in _SIZES},
        **_changed(ProblemRecord, **{name: getattr(problem, name) for name in _SETTINGS}),
        "fingerprint": g.fingerprint,
        "measured_graph": profile.graph_fingerprint,
        **_changed(
            ProblemRecord,
            batch_s=profile.batch_s,
            overhead_s=None if profile.overhead_s is None else profile.overhead_s.tolist(),
        ),
        "provenance": as_data(profile.provenance),
        "cluster": {
            "name": cluster.name,
            "devices": [_written(d) for d in cluster.devices],
            "links": [_written(x) for x in cluster.links],
        },
        **_changed(ProblemRecord, links=links),
        "param_bytes": g.param_bytes.tolist(),
        "outputs": g.output_tensor.tolist(),
        "operators": operators,
        "tensors": tensors,
    }


def _changed(kind: type[BaseModel], /, **values: Any) -> dict[str, Any]:
    """The values that are not the defaults of a record."""
    return {k: v for k, v in values.items() if v != kind.model_fields[k].default}


def _json(value: Any) -> str:
    def plain(x: Any) -> Any:
        return x.item() if isinstance(x, np.generic) else str(x)

    return json.dumps(value, allow_nan=False, default=plain)


def _written(item: Device | Link) -> dict[str, Any]:
    return {k: "inf" if v == np.inf else v for k, v in changed_fields(item).items()}


def _numbers(array: NDArray[np.float64], name: str) -> Any:
    """Nested lists; JSON has no word for infinity."""
    if np.isnan(array).any():
        at = np.argwhere(np.isnan(array))[0].tolist()
        raise FormatError(f"{name}{at} is not a number (nan): the problem cannot be saved")
    if np.isfinite(array).all():
        return array.tolist()
    return np.where(np.isfinite(array), array.astype(object), "inf").tolist()


def _problem(record: ProblemRecord, objective: str | None) -> Problem:
    cluster = Cluster(
        record.cluster.name,
        tuple(Device(**dict(d)) for d in record.cluster.devices),
        tuple(Link(**dict(x)) for x in record.cluster.links),
    )
    graph = _graph(record)
    if record.fingerprint not in (None, graph.fingerprint):
        raise FormatError(
            f"fingerprint = {str(record.fingerprint)[:12]!r}, but operators and tensors give "
            f"{graph.fingerprint[:12]!r}: if the graph was changed on purpose, remove the key"
        )
    links = cluster.links
    if record.links is not None:
        links = tuple(Link(**dict(x)) for x in record.links)
        Cluster(cluster.name, cluster.devices, links)  # checks their ends
    profile, goal = _profile(record, cluster, links), objective or record.objective
    settings: dict[str, Any] = {name: getattr(record, name) for name in (*_SIZES, *_SETTINGS)}
    return Problem(graph, cluster, profile, goal, **settings)  # type: ignore[arg-type]


def _graph(record: ProblemRecord) -> OpGraph:
    ops, tensors = record.operators, record.tensors
    number: dict[str, int] = {}
    for n, op in enumerate(ops):
        if number.setdefault(op.name, n) != n:
            raise FormatError(
                f"operators[{n}].name = {op.name!r} is that of operators[{number[op.name]}] too"
            )
        if set(op.compute_s) <= {np.inf}:
            raise FormatError(f"operator {op.name!r}: no device can run it")

    def op_number(name: str, where: str) -> int:
        if name not in number:
            raise FormatError(f"{where} = {name!r} is not the name of an operator")
        return number[name]

    def within(value: int, size: int, where: str, what: str) -> int:
        if value >= size:
            raise FormatError(f"{where} = {value}: there are only {size} {what}")
        return value

    src, uses, root = [], [], []
    for t, tensor in enumerate(tensors):
        where = f"tensors[{t}]"
        producer = tensor.producer
        src.append(-1 if producer is None else op_number(producer, f"{where}.producer"))
        uses += [(t, op_number(x, f"{where}.consumers")) for x in tensor.consumers]
        shared = t if tensor.memory_of is None else tensor.memory_of
        root.append(within(shared, len(tensors), f"{where}.memory_of", "tensors"))
    for t in range(len(root)):  # a view of a view has the memory of the first
        seen = {t}
        while root[root[t]] != root[t]:
            root[t] = root[root[t]]
            if root[t] in seen:
                raise FormatError(f"tensors[{t}].memory_of: these tensors have each other's memory")
            seen.add(root[t])
    num_params = len(record.param_bytes)
    return OpGraph.build(
        record.model,
        [op.name for op in ops],
        src,
        [t.bytes for t in tensors],
        uses,
        op_kind=[op.kind for op in ops],
        op_module=[op.module for op in ops],
        op_signature=[op.signature for op in ops],
        tensor_root=root,
        param_bytes=record.param_bytes,
        param_uses=[
            (n, within(p, num_params, f"operator {op.name!r}: params", "param_bytes"))
            for n, op in enumerate(ops)
            for p in op.params
        ],
        group=labels([op.group for op in ops]),
        is_backward=[op.backward for op in ops],
        next_readers={
            n: tuple(op_number(x, f"operator {op.name!r}: next_readers") for x in op.next_readers)
            for n, op in enumerate(ops)
            if op.next_readers
        },
        output_tensor=[
            within(t, len(tensors), f"outputs[{i}]", "tensors")
            for i, t in enumerate(record.outputs)
        ],
    )


def _profile(record: ProblemRecord, cluster: Cluster, links: tuple[Link, ...]) -> Profile:
    num_devices = cluster.num_devices

    def table(name: str, default: NDArray[Any] | None, dtype: type = np.float64) -> Any:
        """``[N, D]``; None where no operator has it."""
        entries = [getattr(op, name) for op in record.operators]
        if default is not None and all(row is None for row in entries):
            return None
        for op, row in zip(record.operators, entries, strict=True):
            if row is not None and len(row) != num_devices:
                raise FormatError(
                    f"operator {op.name!r}: {name} has {len(row)} values for {num_devices} devices "
                    f"{list(cluster.device_names)}"
                )
        rows = [default[n] if row is None else row for n, row in enumerate(entries)]  # type: ignore[index]
        return np.array(rows, dtype)

    compute_s = table("compute_s", None)
    zero = np.zeros_like(compute_s)
    spread_s = table("spread_s", zero)
    bytes_of = [op.workspace_bytes for op in record.operators]
    return Profile(
        device_names=cluster.device_names,
        compute_s=compute_s,
        spread_s=zero if spread_s is None else spread_s,
        links=links,
        loaded_s=table("loaded_s", compute_s),
        batch_s=record.batch_s,
        overhead_s=None if record.overhead_s is None else np.array(record.overhead_s),
        transfer_s=_per_tensor(record, "transfer_s", (num_devices, num_devices)),
        io_s=_per_tensor(record, "io_s", (num_devices,)),
        workspace_bytes=(
            None if set(bytes_of) == {None} else np.array([x or 0 for x in bytes_of], np.int64)
        ),
        library_bytes=table("library_bytes", zero, np.int64),
        predicted=table("predicted", zero, np.bool_),
        graph_fingerprint=record.measured_graph,
        provenance=dict(record.provenance),
    )


def _per_tensor(record: ProblemRecord, name: str, shape: tuple[int, ...]) -> Any:
    """``[T, *shape]``; None where no tensor has it."""
    rows = [getattr(tensor, name) for tensor in record.tensors]
    if all(row is None for row in rows):
        return None
    table = np.empty((len(rows), *shape))
    for t, row in enumerate(rows):
        if row is None:
            raise FormatError(f"tensors[{t}]: {name} is missing, other tensors have it")
        if [len(row), *{len(part) for part in row if isinstance(part, tuple)}] != list(shape):
            what = " lists of ".join(map(str, shape))
            raise FormatError(f"tensors[{t}]: {name} must be {what} numbers, one for each device")
        table[t] = row
    return table
