"""ONNX models (onnx.ai) as problems: shapes from the file, times predicted from shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from placement.cluster import Cluster
from placement.graph import OpGraph
from placement.importers._read import FormatError, equal_devices, problem_of, topological
from placement.problem import Problem
from placement.profile import Profile

DEVICES, BANDWIDTH, MEMORY = 4, 12e9, 16 * 2**30

_VIEWS = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
_SHAPE_ONLY = {"Shape", "Size", *_VIEWS}
_READ_A_PART = {"Gather", "GatherElements", "GatherND", "Slice"}  # of their first input
_BITS = {"FLOAT": 32, "DOUBLE": 64, "BOOL": 8}  # other types have a number in their names
_MANY = 512  # elements: larger constants are weights, whose values are of no use here


def looks_like(content: bytes) -> bool:
    """Whether the bytes start as a ``ModelProto`` does: field 1, a small version number."""
    return len(content) > 1 and content[0] == 0x08 and 0 < content[1] < 0x80


def read(
    content: bytes,
    path: str,
    *,
    objective: str | None = None,
    devices: int | None = None,
    bandwidth: float | None = None,
    memory: int | None = None,
    cluster: Cluster | None = None,
    dims: Mapping[str, int] | None = None,
    flops: float = 14e12,
    memory_bandwidth: float = 900e9,
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
    what their subgraphs use; the longer branch of an If counts, and a Loop whose number of
    trips is not constant counts once. Functions of the model are inlined.

    Args:
        devices, bandwidth, memory: number of accelerators (4), bytes per second of every pair
            both ways (12e9, PCIe 3.0 x16), bytes of each (16 GiB).
        cluster: instead of those three; links that it does not declare cost nothing.
        dims: sizes of the dimensions that the file does not fix: by name, as ``batch``, or by
            tensor and axis, as ``input.0``.

    Raises:
        FormatError: the package onnx is missing; or naming the file, the node and the tensor.
    """
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise FormatError(
            f"{path}: reading ONNX needs the package onnx ({error}): "
            'pip install "device-placement-rl[onnx]"'
        ) from error
    if not (flops > 0 and memory_bandwidth > 0):
        raise FormatError(
            f"{path}: flops = {flops} and memory_bandwidth = {memory_bandwidth} must be positive"
        )
    parts = _cluster(path, cluster, devices, bandwidth, memory)
    model = _Model(_with_shapes(content, path, dict(dims or {})), path)
    try:
        graph, work = model.graph(Path(path).stem)
    except FormatError:
        raise
    except (TypeError, ValueError, LookupError) as error:  # what a damaged file leaves
        raise FormatError(f"{path}: not a valid ONNX model: {error}") from error
    seconds = np.maximum(work[:, 0] / flops, work[:, 1] / memory_bandwidth)
    compute_s = seconds[:, None] / np.array([d.speed for d in parts.devices])
    profile = Profile(
        device_names=parts.device_names,
        compute_s=compute_s,
        spread_s=np.zeros_like(compute_s),
        links=parts.links,
        predicted=np.ones(compute_s.shape, bool),
        provenance={
            "format": "onnx",
            "file": Path(path).name,
            "predicted": "roofline",
            "flops": float(flops),
            "memory_bandwidth": float(memory_bandwidth),
        },
    )
    return problem_of(path, graph, parts, profile, objective or "period")


def _cluster(
    path: str,
    cluster: Cluster | None,
    devices: int | None,
    bandwidth: float | None,
    memory: int | None,
) -> Cluster:
    given = {"devices": devices, "bandwidth": bandwidth, "memory": memory}
    if cluster is not None:
        extra = [k for k, v in given.items() if v is not None]
        if extra:
            raise FormatError(f"{path}: give either a cluster or {', '.join(extra)}, not both")
        return cluster
    return equal_devices(
        path,
        "onnx",
        "acc",
        DEVICES if devices is None else devices,
        BANDWIDTH if bandwidth is None else bandwidth,
        MEMORY if memory is None else memory,
    )


def _with_shapes(content: bytes, path: str, dims: dict[str, int]) -> Any:
    """The model with its functions inlined, ``dims`` filled in, and shapes inferred."""
    from onnx import inliner, load_model_from_string
    from onnx.shape_inference import infer_shapes

    try:
        model: Any = load_model_from_string(content)
    except Exception as error:  # protobuf raises its own kinds
        raise FormatError(f"{path}: not a readable ONNX model (truncated?): {error}") from error
    if not model.graph.node:
        raise FormatError(f"{path}: the ONNX model has no nodes")
    for name, size in dims.items():
        if size < 1:
            raise FormatError(f"{path}: dimension {name} = {size} must be at least 1")
    for graph in _graphs(model.graph):
        for weight in graph.initializer:
            if math.prod(weight.dims) > _MANY:
                for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data"):
                    weight.ClearField(field)
    try:
        if model.functions:
            model = inliner.inline_local_functions(model)
        known = _bind(model, dims)
        model = infer_shapes(model, data_prop=True)
        # Sizes that inference needs and does not find: of dimensions as NonZero's, of loops.
        while (found := _bind(model, dims)) | _carry(model):
            known |= found
            model = infer_shapes(model, data_prop=True)
    except Exception as error:
        raise FormatError(f"{path}: shape inference failed: {error}") from error
    unknown = set(dims) - known
    if unknown:
        open_dims = sorted({d.dim_param for _, _, d in _dims(model) if d.dim_param})
        raise FormatError(
            f"{path}: there is no dimension {sorted(unknown)[0]!r} to set; without a size are "
            f"{open_dims or 'none'}"
        )
    return model


def _bind(model: Any, dims: Mapping[str, int]) -> set[str]:
    """Set dimensions that have no size; returns the names in ``dims`` that were of use."""
    found = set()
    for name, axis, dim in _dims(model):
        for key in (dim.dim_param, f"{name}.{axis}"):
            if key in dims and not dim.HasField("dim_value"):
                dim.dim_value = dims[key]
                found.add(key)
    return found


def _carry(model: Any) -> set[str]:
    """What a Loop carries has the shape that its body gives it; returns the names of changed ones.

    Inference leaves it open, because a body may change the shape from trip to trip.
    """
    changed = set()
    for graph in _graphs(model.graph):
        values = {v.name: v for v in (*graph.value_info, *graph.output)}
        for node in graph.node:
            if node.op_type != "Loop":
                continue
            for name, inside in zip(node.output, _subgraphs(node)["body"].output[1:], strict=False):
                if name not in values or name not in node.output[: len(node.input) - 2]:
                    continue
                kind, known = values[name].type.tensor_type, inside.type.tensor_type
                if known.HasField("shape") and not kind.HasField("shape"):
                    kind.shape.CopyFrom(known.shape)
                    changed.add(name)
    return changed


def _dims(model: Any) -> Iterator[tuple[str, int, Any]]:
    for graph in _graphs(model.graph):
        for value in (*graph.input, *graph.value_info, *graph.output):
            for axis, dim in enumerate(value.type.tensor_type.shape.dim):
                yield value.name, axis, dim


def _graphs(graph: Any) -> Iterator[Any]:
    """The graph and all its subgraphs."""
    yield graph
    for node in graph.node:
        for inner in _subgraphs(node).values():
            yield from _graphs(inner)


def _subgraphs(node: Any) -> dict[str, Any]:
    return {a.name: a.g for a in node.attribute if a.HasField("g")}


@dataclass(frozen=True)
class _Tensor:
    """Type and shape; ``bits`` of an element."""

    dtype: str
    bits: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.size * self.bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype.lower()}[{','.join(map(str, self.shape))}]"


class _Scope:
    """Names and what they stand for in one graph; subgraphs see the names around them."""

    def __init__(self, graph: Any, path: str, outer: _Scope | None = None) -> None:
        self.path, self.outer = path, outer
        self.values = {v.name: v for v in (*graph.value_info, *graph.output, *graph.input)}
        self.constants = {t.name: t for t in graph.initializer} | {
            x.output[0]: a.t
            for x in graph.node
            if x.op_type == "Constant"
            for a in x.attribute
            if a.name == "value"
        }
        self.sparse = {t.values.name: t for t in graph.sparse_initializer}

    def tensor(self, name: str, where: str) -> _Tensor:
        """Type and shape of a name that ``where`` uses.

        Raises:
            FormatError: unknown, or no dense tensor.
        """
        if name in self.constants:
            weight = self.constants[name]
            return self._make(weight.data_type, tuple(weight.dims), name, where)
        if name in self.sparse:
            weight = self.sparse[name]
            return self._make(weight.values.data_type, tuple(weight.dims), name, where)
        if name not in self.values:
            if self.outer is not None:
                return self.outer.tensor(name, where)
            raise FormatError(f"{where}: the shape of {name!r} cannot be inferred")
        kind = self.values[name].type
        if not kind.HasField("tensor_type"):
            word = kind.WhichOneof("value") or "unknown type"
            raise FormatError(f"{where}: {name!r} is no tensor but a {word.removesuffix('_type')}")
        if not kind.tensor_type.HasField("shape"):
            raise FormatError(f"{where}: the shape of {name!r} cannot be inferred")
        shape = []
        for axis, dim in enumerate(kind.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                key = dim.dim_param or f"{name}.{axis}"
                raise FormatError(
                    f"{where}: {name!r} has no size on axis {axis}"
                    + (f", which is called {dim.dim_param!r}" if dim.dim_param else "")
                    + f"; set it: --dim {key}=1 (dims={{{key!r}: 1}})"
                )
            shape.append(dim.dim_value)
        return self._make(kind.tensor_type.elem_type, tuple(shape), name, where)

    def _make(self, code: int, shape: tuple[int, ...], name: str, where: str) -> _Tensor:
        from onnx import TensorProto

        known = code in TensorProto.DataType.values()
        dtype = TensorProto.DataType.Name(code) if known else str(code)
        digits = re.search(r"\d+", dtype)
        if dtype not in _BITS and (digits is None or not known):
            raise FormatError(f"{where}: {name!r} has elements of type {dtype}, of unknown size")
        if min(shape, default=0) < 0 or math.prod(shape) >= 2**55:
            raise FormatError(f"{where}: {name!r} cannot have the shape {list(shape)}")
        return _Tensor(dtype, _BITS.get(dtype) or int(digits[0] if digits else 0), shape)


class _Model:
    """What the nodes of a model become."""

    def __init__(self, model: Any, path: str) -> None:
        self.path, self.main = path, model.graph
        self.scope = _Scope(model.graph, path)
        self.param_bytes: list[int] = []
        self._stored: dict[Any, int] = {}  # external data -> parameter

    @cached_property
    def names(self) -> list[str]:
        return node_names(self.main.node)

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

        order, _ = topological(self.names, self._edges({*tensor_of, *params}), self.path)
        ops: list[int] = []
        uses: list[tuple[int, int]] = []
        param_uses: list[tuple[int, int]] = []
        for v in order:
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
            for inner in _subgraphs(node).values():
                for graph in _graphs(inner):
                    param_uses += [(op, p) for p in self._initializers(graph).values()]
            for x in filter(None, node.output):
                tensor_of[x] = len(src)
                shared = tensor_of.get(node.input[0]) if node.op_type in _VIEWS else None
                root.append(len(root) if shared is None else root[shared])
                sizes.append(scope.tensor(x, where).bytes)
                src.append(op)
        if not ops:
            raise FormatError(f"{self.path}: all nodes are constants, there is nothing to place")
        work = [_work(nodes[v], scope, self._where(v)) for v in ops]
        graph = OpGraph.build(
            name,
            [self.names[v] for v in ops],
            src,
            sizes,
            uses,
            op_kind=[_kind(nodes[v]) for v in ops],
            op_signature=[_signature(nodes[v], scope, self._where(v)) for v in ops],
            tensor_root=root,
            param_bytes=self.param_bytes,
            param_uses=param_uses,
            output_tensor=[tensor_of[x.name] for x in self.main.output if x.name in tensor_of],
        )
        return graph, np.array(work, np.float64)

    def _where(self, v: int) -> str:
        return f"{self.path}: node {self.names[v]!r} ({_kind(self.main.node[v])})"

    def _initializers(self, graph: Any) -> dict[str, int]:
        """Name -> parameter; two that lie at one place of one file are one."""
        scope = _Scope(graph, self.path)
        found = {}
        for weight in graph.initializer:
            size = scope.tensor(weight.name, f"{self.path}: initializer").bytes
            place = tuple(sorted((e.key, e.value) for e in weight.external_data))
            found[weight.name] = self._add_param(size, place or None)
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            where = f"{self.path}: sparse initializer"
            size = sum(
                scope._make(t.data_type, tuple(t.dims), name, where).bytes
                for t in (sparse.values, sparse.indices)
            )
            found[name] = self._add_param(size)
        return found

    def _add_param(self, size: int, place: Any = None) -> int:
        if place in self._stored:
            return self._stored[place]
        self.param_bytes.append(size)
        if place is not None:
            self._stored[place] = len(self.param_bytes) - 1
        return len(self.param_bytes) - 1

    def _edges(self, known: set[str]) -> list[tuple[int, int]]:
        """(producer, consumer) of nodes.

        Raises:
            FormatError: an input that nothing makes, or an output that two nodes make.
        """
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
    found = dict.fromkeys(filter(None, node.input))
    for graph in _subgraphs(node).values():
        own = {x.name for x in (*graph.input, *graph.initializer)}
        own |= {x.values.name for x in graph.sparse_initializer}
        own |= {x for inner in graph.node for x in inner.output}
        read = [x for inner in graph.node for x in _inputs(inner)]
        read += [x.name for x in graph.output]
        found |= dict.fromkeys(x for x in read if x not in own)
    return list(found)


def _kind(node: Any) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def _signature(node: Any, scope: _Scope, where: str) -> str:
    """Kind, shapes, types and constants."""
    from onnx import helper

    said = [str(scope.tensor(x, where)) if x else "-" for x in node.input]
    for a in sorted(node.attribute, key=lambda a: a.name):
        if a.HasField("g"):
            said.append(f"{a.name}=<{', '.join(_kind(x) for x in a.g.node)}>")
        elif not a.HasField("t") and not a.HasField("sparse_tensor"):
            said.append(str(helper.printable_attribute(a)))
    return f"{_kind(node)}({', '.join(said)})"


def _work(node: Any, scope: _Scope, where: str) -> tuple[float, float]:
    """Floating-point operations, and bytes read and written."""
    inner = {name: _graph_work(g, scope, where) for name, g in _subgraphs(node).items()}
    if inner:
        times = _trips(node, scope, where)
        return times * max(w[0] for w in inner.values()), times * max(w[1] for w in inner.values())
    inputs = [scope.tensor(x, where) for x in node.input if x]
    outputs = [scope.tensor(x, where) for x in node.output if x]
    if node.op_type in _SHAPE_ONLY:
        return 0.0, 0.0
    moved = sum(t.bytes for t in (*inputs, *outputs))
    if node.op_type in _READ_A_PART:
        moved += outputs[0].bytes - inputs[0].bytes
    count = _OPERATIONS.get(node.op_type)
    try:
        operations = (
            max(t.size for t in (*inputs, *outputs))
            if count is None
            else count(node, [scope.tensor(x, where) if x else None for x in node.input], outputs)
        )
    except (IndexError, AttributeError, KeyError) as error:
        shapes = ", ".join(map(str, inputs))
        raise FormatError(f"{where}: inputs {shapes} are not what it takes") from error
    return float(operations), float(moved)


def _graph_work(graph: Any, outer: _Scope, where: str) -> tuple[float, float]:
    scope = _Scope(graph, outer.path, outer)
    inside = [x for x in graph.node if x.op_type != "Constant"]
    each = [_work(x, scope, f"{where}, inner node {x.name or x.output[0]!r}") for x in inside]
    return sum(w[0] for w in each), sum(w[1] for w in each)


def _trips(node: Any, scope: _Scope, where: str) -> int:
    """How often the body runs; 1 where the file does not say."""
    from onnx import numpy_helper

    if node.op_type == "Loop" and node.input[0] in scope.constants:
        return max(0, int(numpy_helper.to_array(scope.constants[node.input[0]]).item()))
    if node.op_type == "Scan":
        count = _attribute(node, "num_scan_inputs", 1)
        axis = [*_attribute(node, "scan_input_axes", []), 0][0]
        return scope.tensor(node.input[len(node.input) - count], where).shape[axis]
    return 1


Count = Callable[[Any, Sequence[Any], Sequence[_Tensor]], int]


def _conv(weight: int) -> Count:
    """Every output element takes a product with the kernel; ``weight``: which input that is."""
    return lambda node, x, y: 2 * y[0].size * math.prod(x[weight].shape[1:])


def _matmul(first: int) -> Count:
    return lambda node, x, y: 2 * y[0].size * x[first].shape[-1]


def _gemm(node: Any, x: Sequence[_Tensor], y: Sequence[_Tensor]) -> int:
    return 2 * y[0].size * x[0].shape[0 if _attribute(node, "transA", 0) else 1]


def _recurrent(node: Any, x: Sequence[_Tensor], y: Sequence[_Tensor]) -> int:
    return 2 * math.prod(x[0].shape[:2]) * (x[1].size + x[2].size)


def _einsum(node: Any, x: Sequence[_Tensor], y: Sequence[_Tensor]) -> int:
    """One loop over all letters: those of the output, and those that are summed up."""
    terms, _, result = _attribute(node, "equation", b"").decode().replace(" ", "").partition("->")
    size: dict[str, int] = {}
    for term, tensor in zip(terms.split(","), x, strict=False):
        before, _, after = term.partition("...")
        size |= dict(zip(before, tensor.shape, strict=False))
        size |= dict(zip(reversed(after), reversed(tensor.shape), strict=False))
    summed = set(size) - set(result)
    if "->" not in _attribute(node, "equation", b"").decode():
        summed = {c for c in size if terms.count(c) > 1}
    return 2 * y[0].size * math.prod(size[c] for c in summed)


def _attention(node: Any, x: Sequence[_Tensor], y: Sequence[_Tensor]) -> int:
    """Query times keys, and weights times values."""
    return 4 * x[0].size * x[1].shape[-2]


_OPERATIONS: dict[str, Count] = {
    "Conv": _conv(1),
    "ConvInteger": _conv(1),
    "QLinearConv": _conv(3),
    "ConvTranspose": lambda node, x, y: 2 * x[0].size * math.prod(x[1].shape[1:]),
    "MatMul": _matmul(0),
    "MatMulInteger": _matmul(0),
    "QLinearMatMul": _matmul(0),
    "Gemm": _gemm,
    "Einsum": _einsum,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "Attention": _attention,
}


def _attribute(node: Any, name: str, default: Any) -> Any:
    from onnx import helper

    found = [a for a in node.attribute if a.name == name]
    return helper.get_attribute_value(found[0]) if found else default
