"""ONNX models (onnx.ai) as problems: shapes from the file, times predicted from shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import numpy as np

from placement.cluster import Cluster
from placement.graph import OpGraph
from placement.importers._onnx_sizes import (
    MANY,
    Scope,
    Sizes,
    Tensor,
    attribute,
    graphs,
    kind_of,
    standard,
    stored,
    subgraphs,
)
from placement.importers._read import FormatError, equal_devices, problem_of, stem, topological
from placement.problem import Problem
from placement.tools.limits import MOST
from placement.tools.ownership import needing

RATES = {"flops": 14e12, "memory_bandwidth": 900e9}

_VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
_SHAPE_ONLY = {"Shape", "Size", *_VIEWS}
_READ_A_PART = {"Gather", "GatherElements", "GatherND", "Slice"}  # of their first input


def looks_like(content: bytes) -> bool:
    """Whether the bytes start as a ``ModelProto`` does: field 1, a small version number."""
    return len(content) > 1 and content[0] == 0x08 and 0 < content[1] < 0x80


class Options(TypedDict, total=False):
    """What an ONNX file does not say; None is not given.

    ``devices``, ``bandwidth``, ``memory``: number of accelerators (4), bytes per second of every
    pair both ways (12e9, PCIe 3.0 x16), bytes of each (16 GiB). ``cluster``: instead of those
    three; links that it does not declare cost nothing. ``dims``: sizes of the dimensions that the
    file does not fix: by name, as ``batch``, or by tensor and axis, as ``input.0``; in the file 0,
    -1, ``?`` and no name are such too. ``flops``, ``memory_bandwidth``: rates per second (14e12,
    900e9).
    """

    devices: int | None
    bandwidth: float | None
    memory: int | None
    cluster: Cluster | None
    dims: Mapping[str, int] | None
    flops: float | None
    memory_bandwidth: float | None


def read(
    content: bytes,
    path: str,
    *,
    objective: str | None = None,
    **options: Unpack[Options],
) -> Problem:
    """The problem of an ONNX model, on equal accelerators ``acc:0..`` or on a ``cluster``.

    ONNX holds no times. An operator's seconds are *predicted* (roofline, Williams et al., CACM
    52(4), 2009): the larger of its floating-point operations at ``flops`` per second and the
    bytes that it reads and writes at ``memory_bandwidth`` bytes per second, divided by the
    device's ``speed``. The defaults are the data sheet's peak rates of an NVIDIA V100 for PCIe
    (fp32). Real operators reach a part of such rates, and a dispatch costs time too, so that
    proportions mean more than seconds do. Every entry of ``profile.predicted`` is true.

    Initializers and Constant nodes are parameters, tied ones once, and so is Identity of one;
    nothing is read of weights, nor of external data files, but their sizes. Reshape and its
    like cost nothing and share memory. If, Loop and Scan are one operator each, that reads
    what their subgraphs use; the longer branch of an If counts, unless a constant or the sizes
    choose one, and a Loop whose number of trips is not constant counts once. Functions of the
    model are inlined.

    Sizes follow from those of the inputs, see ``_onnx_sizes``; those that the file declares of
    other tensors count only where nothing else says them and the file gives those of all inputs.
    An output that nothing reads needs none.

    Raises:
        FormatError: the package onnx is missing; or naming the file, the node and the tensor.
    """
    with needing("onnx", f"{path}: reading ONNX needs the package onnx", FormatError):
        import onnx  # noqa: F401
    flops, memory_bandwidth = (
        default if (rate := options.get(what)) is None else float(rate)  # type: ignore[arg-type]
        for what, default in RATES.items()
    )
    dims = options.get("dims") or {}
    if not (flops > 0 and memory_bandwidth > 0):
        raise FormatError(
            f"{path}: flops = {flops} and memory_bandwidth = {memory_bandwidth} must be positive"
        )
    parts = _cluster(path, options)
    model = _readable(content, path, dims)
    try:
        graph, work = _Model(model, path, dims).graph(stem(path))
    except FormatError:
        raise
    except (TypeError, ValueError, LookupError) as error:  # what a damaged file leaves
        raise FormatError(f"{path}: not a valid ONNX model: {error}") from error
    seconds = np.maximum(work[:, 0] / flops, work[:, 1] / memory_bandwidth)
    compute_s = seconds[:, None] / np.array([d.speed for d in parts.devices])
    facts = {"predicted": "roofline", "flops": flops, "memory_bandwidth": memory_bandwidth}
    costs, goal = {"predicted": np.ones(compute_s.shape, bool)}, objective or "period"
    return problem_of(path, "onnx", graph, parts, compute_s, goal, facts=facts, costs=costs)


def _cluster(path: str, options: Options) -> Cluster:
    equal = {"devices": 4, "bandwidth": 12e9, "memory": 16 * 2**30}
    settings: dict[str, Any] = {k: v for k, v in options.items() if k in equal and v is not None}
    cluster = options.get("cluster")
    if cluster is None:
        return equal_devices(path, "onnx", "acc", *(equal | settings).values())
    if settings:
        raise FormatError(f"{path}: give either a cluster or {', '.join(settings)}, not both")
    return cluster


def _readable(content: bytes, path: str, dims: Mapping[str, int]) -> Any:
    """The model with its functions inlined, without the values of large weights."""
    from onnx import inliner, load_model_from_string

    try:
        model: Any = load_model_from_string(content)
    except Exception as error:  # protobuf raises its own kinds
        raise FormatError(f"{path}: not a readable ONNX model (truncated?): {error}") from error
    broken = next(_not_text(model), None)
    if broken is not None:
        raise FormatError(f"{path}: not a valid ONNX model: the name {broken!r:.60} is not UTF-8")
    if not model.graph.node:
        raise FormatError(f"{path}: the ONNX model has no nodes")
    for name, size in dims.items():
        if size < 1:
            raise FormatError(f"{path}: dimension {name} = {size} must be at least 1")
    for graph in graphs(model.graph):
        for weight in graph.initializer:
            if math.prod(weight.dims) > MANY:
                for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data"):
                    weight.ClearField(field)
    try:
        if _num_inlined(model) > MOST.nodes:
            raise FormatError(f"{path}: its functions call each other: over {MOST.nodes:,} nodes")
        return inliner.inline_local_functions(model) if model.functions else model
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"{path}: its functions cannot be inlined: {error}") from error


def _num_inlined(model: Any) -> int:
    """Nodes once functions are in the place of what calls them; no further than ``MOST.nodes``."""
    bodies = {(f.domain, f.name): f for f in model.functions}
    known: dict[tuple[str, str], int] = {}

    def size(graph: Any) -> int:
        return sum(size_of(node) for inner in graphs(graph) for node in inner.node)

    def size_of(node: Any) -> int:
        key = node.domain, node.op_type
        if key in bodies and key not in known:
            known[key] = 0  # calls in a circle are the inliner's to refuse
            known[key] = min(size(bodies[key]), MOST.nodes + 1)
        return known.get(key, 1)

    return size(model.graph)


def _not_text(message: Any) -> Iterator[bytes]:
    """Names that are not UTF-8: protobuf gives them as bytes."""
    for field, value in message.ListFields():
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        several = not isinstance(value, str | bytes) and hasattr(value, "__len__")
        for part in value if several else [value]:
            if field.type == field.TYPE_MESSAGE:
                yield from _not_text(part)
            elif isinstance(part, bytes):
                yield part


class _Model:
    """What the nodes of a model become."""

    def __init__(self, model: Any, path: str, dims: Mapping[str, int]) -> None:
        self.path, self.main = path, model.graph
        self.names = node_names(model.graph.node)
        self.order, _ = topological(self.names, self._edges(), path)
        self.scope = Sizes(model, self.names, path, dims).infer(self.order)
        self.param_bytes: list[int] = []
        self._stored: dict[Any, int] = {}  # external data -> parameter

    def graph(self, name: str) -> tuple[OpGraph, Any]:
        """The operator graph, and float64 ``[N, 2]`` operations and bytes of each operator."""
        nodes, scope = self.main.node, self.scope
        params = self._initializers(self.main)
        tensor_of: dict[str, int] = {}
        sizes: list[int] = []
        src: list[int] = []
        root: list[int] = []
        for value in self.main.input:
            if value.name in params:  # older files list weights among the inputs
                continue
            tensor_of[value.name] = len(src)
            sizes.append(scope.tensor(value.name, f"{self.path}: input of the model").bytes)
            src.append(-1)
            root.append(len(root))

        read = {x for node in nodes for x in _inputs(node)} | {x.name for x in self.main.output}
        ops: list[int] = []
        uses: list[tuple[int, int]] = []
        param_uses: list[tuple[int, int]] = []
        for v in self.order:
            node, where = nodes[v], self._where(v)
            if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
                size = scope.tensor(node.output[0], where).bytes
                params[node.output[0]] = self._add_param(size)
                continue
            if node.op_type == "Identity" and node.input[0] in params:
                params[node.output[0]] = params[node.input[0]]
                continue
            op = len(ops)
            ops.append(v)
            for x in _inputs(node):
                if x in params:
                    param_uses.append((op, params[x]))
                else:
                    uses.append((tensor_of[x], op))
            for inner in subgraphs(node).values():
                for graph in graphs(inner):
                    param_uses += [(op, p) for p in self._initializers(graph).values()]
            for x in filter(None, node.output):
                if x not in read and not scope.known(x):  # as the masks of old Dropouts
                    continue
                tensor_of[x] = len(src)
                shared = tensor_of.get(node.input[0]) if node.op_type in _VIEWS else None
                root.append(len(root) if shared is None else root[shared])
                sizes.append(scope.tensor(x, where).bytes)
                src.append(op)
        if not ops:
            raise FormatError(f"{self.path}: all nodes are constants, there is nothing to place")
        work = [_work(scope, v, self._where(v)) for v in ops]
        graph = OpGraph.build(
            name,
            [self.names[v] for v in ops],
            src,
            sizes,
            uses,
            op_kind=[kind_of(nodes[v]) for v in ops],
            op_signature=[_signature(nodes[v], scope, self._where(v)) for v in ops],
            tensor_root=root,
            param_bytes=self.param_bytes,
            param_uses=param_uses,
            output_tensor=[tensor_of[x.name] for x in self.main.output if x.name in tensor_of],
        )
        return graph, np.array(work, np.float64)

    def _where(self, v: int) -> str:
        return f"{self.path}: node {self.names[v]!r} ({kind_of(self.main.node[v])})"

    def _initializers(self, graph: Any) -> dict[str, int]:
        """Name -> parameter; two that lie at one place of one file are one."""
        scope = Scope(graph)
        numbers = {}
        for weight in graph.initializer:
            size = scope.tensor(weight.name, f"{self.path}: initializer").bytes
            place = tuple(sorted((e.key, e.value) for e in weight.external_data))
            numbers[weight.name] = self._add_param(size, place or None)
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            where = f"{self.path}: sparse initializer"
            size = sum(
                stored(t.data_type, tuple(t.dims), name, where).bytes
                for t in (sparse.values, sparse.indices)
            )
            numbers[name] = self._add_param(size)
        return numbers

    def _add_param(self, size: int, place: Any = None) -> int:
        if place in self._stored:
            return self._stored[place]
        self.param_bytes.append(size)
        if place is not None:
            self._stored[place] = len(self.param_bytes) - 1
        return len(self.param_bytes) - 1

    def _edges(self) -> list[tuple[int, int]]:
        """(producer, consumer) of nodes.

        Raises:
            FormatError: an input that nothing makes, or an output that two nodes make.
        """
        known = {x.name for x in (*self.main.input, *self.main.initializer)}
        known |= {x.values.name for x in self.main.sparse_initializer}
        maker: dict[str, int] = {}
        for v, node in enumerate(self.main.node):
            for x in filter(None, node.output):
                if x in maker or x in known:
                    raise FormatError(f"{self._where(v)}: output {x!r} is made twice")
                maker[x] = v
        edges = []
        for v, node in enumerate(self.main.node):
            for x in _inputs(node):
                if x in maker:
                    edges.append((maker[x], v))
                elif x not in known:
                    raise FormatError(f"{self._where(v)}: input {x!r} is made by no node")
        return edges


def node_names(nodes: Any) -> list[str]:
    """A name for each node: its own, or its first output's, made unique."""
    names: dict[str, None] = {}
    for i, node in enumerate(nodes):
        own = node.name or next(iter(node.output), "") or f"{node.op_type}_{i}"
        name, times = own, 1
        while name in names:
            times += 1
            name = f"{own}#{times}"
        names[name] = None
    return list(names)


def _inputs(node: Any) -> list[str]:
    """What a node reads, the outer names that its subgraphs use included; each once."""
    names = dict.fromkeys(filter(None, node.input))
    for graph in subgraphs(node).values():
        own = {x.name for x in (*graph.input, *graph.initializer)}
        own |= {x.values.name for x in graph.sparse_initializer}
        own |= {x for inner in graph.node for x in inner.output}
        read = [x for inner in graph.node for x in _inputs(inner)]
        read += [x.name for x in graph.output]
        names |= dict.fromkeys(x for x in read if x not in own)
    return list(names)


def _signature(node: Any, scope: Scope, where: str) -> str:
    """Kind, shapes, types and constants."""
    from onnx import helper

    parts = [str(scope.tensor(x, where)) if x else "-" for x in node.input]
    for a in sorted(node.attribute, key=lambda a: a.name):
        if a.HasField("g"):
            parts.append(f"{a.name}=<{', '.join(kind_of(x) for x in a.g.node)}>")
        elif not a.HasField("t") and not a.HasField("sparse_tensor"):
            parts.append(str(helper.printable_attribute(a)))
    return f"{kind_of(node)}({', '.join(parts)})"


def _work(scope: Scope, v: int, where: str) -> tuple[float, float]:
    """Floating-point operations, and bytes read and written, of a node of the scope's graph."""
    node, inner = scope.graph.node[v], scope.inner.get(v)
    if inner:
        each = [_graph_work(body, where) for body in inner.values()]
        times = _trips(node, scope, where)
        return times * max(w[0] for w in each), times * max(w[1] for w in each)
    inputs = [scope.tensor(x, where) if x else None for x in node.input]
    # The first output counts always, others where they are known: graph() asks for what is read.
    known = [x for i, x in enumerate(node.output) if x and (i == 0 or scope.known(x))]
    outputs = [scope.tensor(x, where) for x in known]
    if node.op_type in _SHAPE_ONLY:
        return 0.0, 0.0
    present = [t for t in inputs if t is not None]
    moved = sum(t.bytes for t in (*present, *outputs))
    if node.op_type in _READ_A_PART:
        moved += outputs[0].bytes - present[0].bytes
    name, picks, _ = standard(node) or (node.op_type, range(len(inputs)), None)
    count = _OPERATIONS.get(name)
    try:
        operations = (
            max(t.size for t in (*present, *outputs))
            if count is None
            else count(node, [inputs[i] for i in picks if i < len(inputs)], outputs)
        )
    except (IndexError, AttributeError, KeyError) as error:
        shapes = ", ".join(map(str, present))
        raise FormatError(f"{where}: inputs {shapes} are not what it takes") from error
    return float(operations), float(moved)


def _graph_work(scope: Scope, where: str) -> tuple[float, float]:
    each = [
        _work(scope, v, f"{where}, inner node {x.name or x.output[0]!r}")
        for v, x in enumerate(scope.graph.node)
        if x.op_type != "Constant"
    ]
    return sum(w[0] for w in each), sum(w[1] for w in each)


def _trips(node: Any, scope: Scope, where: str) -> int:
    """How often the body runs; 1 where the file does not say."""
    if node.op_type == "Loop":
        trips = scope.value(node.input[0]) if node.input[0] else None
        return 1 if trips is None else max(0, int(trips.item()))
    if node.op_type == "Scan":
        count = attribute(node, "num_scan_inputs", 1)
        axis = [*attribute(node, "scan_input_axes", []), 0][0]
        return scope.tensor(node.input[len(node.input) - count], where).shape[axis]
    return 1


Count = Callable[[Any, Sequence[Any], Sequence[Tensor]], int]


def _conv(weight: int) -> Count:
    """Every output element takes a product with the kernel; ``weight``: which input that is."""
    return lambda node, x, y: 2 * y[0].size * math.prod(x[weight].shape[1:])


def _matmul(node: Any, x: Sequence[Tensor], y: Sequence[Tensor]) -> int:
    # Only com.microsoft.FusedMatMul has transA.
    return 2 * y[0].size * x[0].shape[-2 if _turned(node) else -1]


def _turned(node: Any) -> bool:
    return bool(attribute(node, "transA", 0))


def _recurrent(node: Any, x: Sequence[Tensor], y: Sequence[Tensor]) -> int:
    return 2 * math.prod(x[0].shape[:2]) * (x[1].size + x[2].size)


def _einsum(node: Any, x: Sequence[Tensor], y: Sequence[Tensor]) -> int:
    """One loop over all letters: those of the output, and those that are summed up."""
    terms, _, result = attribute(node, "equation", b"").decode().replace(" ", "").partition("->")
    size: dict[str, int] = {}
    for term, tensor in zip(terms.split(","), x, strict=False):
        before, _, after = term.partition("...")
        size |= dict(zip(before, tensor.shape, strict=False))
        size |= dict(zip(reversed(after), reversed(tensor.shape), strict=False))
    summed = set(size) - set(result)
    if "->" not in attribute(node, "equation", b"").decode():
        summed = {c for c in size if terms.count(c) > 1}
    return 2 * y[0].size * math.prod(size[c] for c in summed)


def _attention(node: Any, x: Sequence[Any], y: Sequence[Tensor]) -> int:
    """Query times keys, and weights times values; cached ones (input 4) come before the new."""
    cached = x[4].shape[-2] if len(x) > 4 and x[4] else 0
    return int(2 * (x[1].shape[-2] + cached) * (x[0].size + y[0].size))


_OPERATIONS: dict[str, Count] = {
    "Conv": _conv(1),
    "ConvInteger": _conv(1),
    "QLinearConv": _conv(3),
    "ConvTranspose": lambda node, x, y: 2 * x[0].size * math.prod(x[1].shape[1:]),
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "QLinearMatMul": _matmul,
    "Gemm": lambda node, x, y: 2 * y[0].size * x[0].shape[0 if _turned(node) else 1],
    "Einsum": _einsum,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "Attention": _attention,
}
