"""Type and size of every tensor of an ONNX model: one pass from its inputs to its outputs.

Sizes that the file declares of tensors between are not believed: tools leave them behind. Each
operator's outputs follow from its inputs, by onnx's own rules; what is computed from constants
and sizes alone (the shape of a Reshape, the end of a Range) is computed, by onnx's reference.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placement.importers._read import FormatError

MANY = 2**16  # elements: values of larger tensors are weights or data, and of no use here

_BITS = {"FLOAT": 32, "DOUBLE": 64, "BOOL": 8}  # other types have a number in their names
_NAMELESS = {"", "?", "-1", "None"}  # what tools write for "any size"
# What is computed where all inputs are known: its cost is that of reading and writing them.
_ARITHMETIC = {
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Compress",
    "Concat", "ConstantOfShape", "CumSum", "Div", "Equal", "Exp", "Expand", "EyeLike",
    "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual",
    "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul",
    "Neg", "NonZero", "Not", "OneHot", "Or", "Pad", "Pow", "Range", "Reciprocal", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round", "Scatter",
    "ScatterElements", "ScatterND", "Sign", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Sum",
    "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Where", "Xor",
}  # fmt: skip
_AT_MOST_ITS_INPUTS = {"Compress", "NonZero", "Unique"}  # elements, times the rank
# Without a rule in onnx (functions, or broadcast as of old), or older than onnx knows them:
# the first output is like the first input.
_LIKE_FIRST = {
    "Add", "Div", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "Max",
    "Mean", "MeanVarianceNormalization", "Min", "Mul", "PRelu", "SimplifiedLayerNormalization",
    "Sub", "Sum",
}  # fmt: skip
_RENAMED = {"GreaterOrEqual": "Greater", "LessOrEqual": "Less"}


class Standard(NamedTuple):
    """The standard operator that computes what another does.

    ``inputs``: which of the other's it takes. ``typed_as``: the input whose type the output has,
    if it is not onnx that says it.
    """

    op_type: str
    inputs: Sequence[int]
    typed_as: int | None


# onnxruntime's own operators.
_MICROSOFT: dict[str, tuple[str, tuple[int, ...], int | None]] = {
    "BiasGelu": ("Add", (0, 1), 0),
    "DequantizeLinear": ("DequantizeLinear", (0, 1, 2), None),
    "DynamicQuantizeMatMul": ("MatMul", (0, 1), 0),
    "DynamicQuantizeLSTM": ("LSTM", (0, 1, 2, 3), 0),
    "FastGelu": ("Relu", (0,), 0),
    "FusedConv": ("Conv", (0, 1, 2), 0),
    "FusedGemm": ("Gemm", (0, 1, 2), 0),
    "FusedMatMul": ("MatMul", (0, 1), 0),
    "Gelu": ("Relu", (0,), 0),
    "MatMulIntegerToFloat": ("MatMul", (0, 1), 2),
    "QLinearAdd": ("Add", (0, 3), 0),
    "QLinearLeakyRelu": ("Relu", (0,), 0),
    "QLinearMul": ("Mul", (0, 3), 0),
    "QLinearSigmoid": ("Relu", (0,), 0),
    "QuantizeLinear": ("QuantizeLinear", (0, 1, 2), None),
    "QuickGelu": ("Relu", (0,), 0),
    "SkipLayerNormalization": ("Relu", (0,), 0),
    "SkipSimplifiedLayerNormalization": ("Relu", (0,), 0),
}


def standard(node: Any) -> Standard | None:
    """The standard operator that computes what ``node`` does; None: unknown."""
    if node.domain == "com.microsoft":
        batched = attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0)
        known = None if batched else _MICROSOFT.get(node.op_type)
        return None if known is None else Standard(*known)
    return Standard(node.op_type, range(len(node.input)), None)


def graphs(graph: Any) -> Iterator[Any]:
    """The graph and all its subgraphs."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node).values():
            yield from graphs(inner)


def subgraphs(node: Any) -> dict[str, Any]:
    """By attribute."""
    return {a.name: a.g for a in node.attribute if a.HasField("g")}


def attribute(node: Any, name: str, default: Any) -> Any:
    """Value of an attribute, ``default`` where it is not given."""
    from onnx import helper

    matches = [a for a in node.attribute if a.name == name]
    return helper.get_attribute_value(matches[0]) if matches else default


@dataclass(frozen=True)
class Tensor:
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


def stored(code: int, shape: tuple[int, ...], name: str, where: str) -> Tensor:
    """A tensor of the element type that onnx gives the number ``code``.

    Raises:
        FormatError: elements of unknown size, or a shape that no tensor has.
    """
    from onnx import TensorProto

    known = code in TensorProto.DataType.values()
    dtype = TensorProto.DataType.Name(code) if known else str(code)
    digits = re.search(r"\d+", dtype)
    if dtype not in _BITS and (digits is None or not known):
        raise FormatError(f"{where}: {name!r} has elements of type {dtype}, of unknown size")
    if min(shape, default=0) < 0 or math.prod(shape) >= 2**55:
        raise FormatError(f"{where}: {name!r} cannot have the shape {list(shape)}")
    return Tensor(dtype, _BITS.get(dtype) or int(digits[0] if digits else 0), shape)


class Scope:
    """Names of one graph, their types, and values where known; subgraphs see those around them.

    Attributes:
        types: onnx's ``TypeProto`` of each name, by ``Sizes``.
        values: arrays of at most ``MANY`` elements.
        inner: of the subgraphs that may run, by number of the node and attribute.
    """

    def __init__(self, graph: Any, outer: Scope | None = None) -> None:
        from onnx import helper

        self.graph, self.outer = graph, outer
        self.types: dict[str, Any] = {}
        self.values: dict[str, NDArray[Any]] = {}
        self.inner: dict[int, dict[str, Scope]] = {}
        for weight in graph.initializer:
            self.types[weight.name] = helper.make_tensor_type_proto(weight.data_type, weight.dims)
            self.values |= _array(weight, weight.name)
        for sparse in graph.sparse_initializer:
            kind = helper.make_tensor_type_proto(sparse.values.data_type, sparse.dims)
            self.types[sparse.values.name] = kind

    def type_of(self, name: str) -> Any:
        """``TypeProto``; None where nothing is known."""
        if name not in self.types and self.outer is not None:
            return self.outer.type_of(name)
        return self.types.get(name)

    def value(self, name: str) -> NDArray[Any] | None:
        """What a name stands for, where that is known."""
        if name not in self.types and self.outer is not None:
            return self.outer.value(name)
        return self.values.get(name)

    def known(self, name: str) -> bool:
        """Whether ``tensor`` can say anything of a name."""
        kind = self.type_of(name)
        which = None if kind is None else kind.WhichOneof("value")
        return which is not None and (which != "tensor_type" or kind.tensor_type.HasField("shape"))

    def tensor(self, name: str, where: str) -> Tensor:
        """Type and shape of a name that ``where`` uses.

        Raises:
            FormatError: unknown, or no dense tensor.
        """
        if not self.known(name):
            raise FormatError(
                f"{where}: the shape of {name!r} cannot be inferred; set the size of every axis: "
                f"--dim {name}.0=1 --dim {name}.1=1 ... (dims={{{name + '.0'!r}: 1, ...}})"
            )
        kind = self.type_of(name)
        if not kind.HasField("tensor_type"):
            word = kind.WhichOneof("value")
            raise FormatError(f"{where}: {name!r} is no tensor but a {word.removesuffix('_type')}")
        for axis, dim in enumerate(kind.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                key = dim.dim_param or f"{name}.{axis}"
                raise FormatError(
                    f"{where}: {name!r} has no size on axis {axis}"
                    + (f", which is called {dim.dim_param!r}" if dim.dim_param else "")
                    + f"; set it: --dim {key}=1 (dims={{{key!r}: 1}})"
                )
        shape = tuple(dim.dim_value for dim in kind.tensor_type.shape.dim)
        return stored(kind.tensor_type.elem_type, shape, name, where)


def _sizes(kind: Any) -> list[int | None] | None:
    """Of a ``TypeProto``: None where there is no shape, or no size on an axis."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else None for d in dims]


def _type(code: int, sizes: Sequence[int | None]) -> Any:
    from onnx import helper

    return helper.make_tensor_type_proto(code, sizes)


class Sizes:
    """The pass over a model.

    Args:
        names: of the nodes, for messages.
        dims: as ``onnx_model.read`` takes them.
    """

    def __init__(self, model: Any, names: Sequence[str], path: str, dims: Mapping[str, int]):
        self.model, self.names, self.path, self.dims = model, names, path, dims
        self.opsets: dict[str, int] = {}
        for opset in model.opset_import:
            domain = "" if opset.domain == "ai.onnx" else opset.domain
            self.opsets[domain] = max(opset.version, self.opsets.get(domain, 0))
        self.opsets.setdefault("", 1)
        self.of_use: set[str] = set()
        self.input_names: set[str] = set()
        self.fixed = True  # whether the file gives the sizes of all inputs

    def infer(self, order: Sequence[int]) -> Scope:
        """The scope of the graph, whose nodes are visited in this order.

        Raises:
            FormatError: an operator that cannot take its inputs, or that is not known, and
                ``dims`` that are not there or contradict the others.
        """
        graph = self.model.graph
        scope = Scope(graph)
        for value in graph.input:
            if value.name not in scope.types:
                scope.types[value.name] = self._of_input(value)
        missing = [
            (d.dim_param or f"{value.name}.{axis}", value.name)
            for value in graph.input
            for axis, d in enumerate(scope.types[value.name].tensor_type.shape.dim)
            if not d.HasField("dim_value")
        ]
        self._check_dims(self._possible() if missing else set(self.dims), missing)
        for _, name in missing:
            scope.tensor(name, f"{self.path}: input of the model")
        self._fill(scope, order, "")
        self._check_dims(self.of_use, missing)
        return scope

    def _possible(self) -> set[str]:
        """Those of ``dims`` that may be of use when the sizes of inputs are known."""
        names, tensors = set(), set()
        for graph in graphs(self.model.graph):
            for value in (*graph.value_info, *graph.output):
                names |= {d.dim_param for d in value.type.tensor_type.shape.dim}
            tensors |= {x for node in graph.node for x in node.output}
            tensors |= {x.name for x in graph.input}
        return self.of_use | {x for x in self.dims if x in names or x.rpartition(".")[0] in tensors}

    def _check_dims(self, known: set[str], missing: Sequence[tuple[str, str]]) -> None:
        unknown = sorted(set(self.dims) - known)
        if unknown:
            raise FormatError(
                f"{self.path}: there is no dimension {unknown[0]!r} to set; without a size are "
                f"{sorted({key for key, _ in missing}) or 'none'}"
            )

    def _of_input(self, value: Any) -> Any:
        """The type of an input of the model, sizes from ``dims`` filled in."""
        kind = deepcopy(value.type)
        for axis, dim in enumerate(kind.tensor_type.shape.dim):
            if dim.dim_param in _NAMELESS and dim.dim_value <= 0:
                dim.Clear()
            keys = [dim.dim_param] if dim.dim_param else []
            self.input_names.update(keys)
            self.fixed &= dim.HasField("dim_value")
            self._set(dim, [*keys, f"{value.name}.{axis}"], f"{value.name!r}, axis {axis}")
        return kind

    def _set(self, dim: Any, keys: Sequence[str], what: str) -> None:
        for key in keys:
            size = self.dims.get(key)
            if size is None:
                continue
            self.of_use.add(key)
            if dim.HasField("dim_value") and dim.dim_value != size:
                raise FormatError(
                    f"{self.path}: dimension {key} = {size} contradicts the size of {what}, "
                    f"which is {dim.dim_value}; leave it out"
                )
            dim.dim_value = size

    def _settle(self, scope: Scope, name: str, kind: Any, declared: Mapping[str, Any]) -> None:
        """Keep what is known of a name: what was inferred, else ``dims``, else the file's word."""
        declaration = declared.get(name)
        shape = declaration.tensor_type.shape.dim if declaration is not None else ()
        if _sizes(kind) is None and declaration is not None and _sizes(declaration) is not None:
            kind = _type(declaration.tensor_type.elem_type, [None] * len(shape))
        elif _sizes(kind) is None and kind is not None and f"{name}.0" in self.dims:
            rank = len(list(takewhile(lambda i: f"{name}.{i}" in self.dims, count())))
            kind = _type(kind.tensor_type.elem_type, [None] * rank)
        if kind is None:
            kind = declaration
        if kind is None:
            return
        kind = deepcopy(kind)
        for axis, dim in enumerate(kind.tensor_type.shape.dim):
            keys = [f"{name}.{axis}"]
            if not dim.HasField("dim_value"):
                dim.Clear()
            if axis < len(shape):
                if shape[axis].dim_param not in _NAMELESS | self.input_names:
                    keys.append(shape[axis].dim_param)
                if self.fixed and not dim.HasField("dim_value") and shape[axis].dim_value > 0:
                    dim.dim_value = shape[axis].dim_value
            self._set(dim, keys, f"{name!r}, axis {axis}")
        scope.types[name] = kind

    def _fill(self, scope: Scope, order: Sequence[int] | None, around: str) -> None:
        """Types and values of all outputs of the nodes of a graph."""
        graph = scope.graph
        declared = {v.name: v.type for v in (*graph.value_info, *graph.output)}
        for v in range(len(graph.node)) if order is None else order:
            node = graph.node[v]
            where = (
                f"{around}, inner node {node.name or (*node.output, node.op_type)[0]!r}"
                if around
                else f"{self.path}: node {self.names[v]!r} ({kind_of(node)})"
            )
            kinds = self._outputs(scope, v, node, where)
            for name, kind in zip(node.output, kinds, strict=False):
                if name:
                    self._settle(scope, name, kind, declared)
            scope.values |= self._values(scope, v, node)

    def _outputs(self, scope: Scope, v: int, node: Any, where: str) -> list[Any]:
        """``TypeProto`` of each output, None where unknown."""
        from onnx import defs

        if node.domain in ("", "ai.onnx") and node.op_type in ("If", "Loop", "Scan"):
            return getattr(self, f"_{node.op_type.lower()}")(scope, v, node, where)  # type: ignore[no-any-return]
        like = standard(node)
        domain = "" if node.domain in ("ai.onnx", "com.microsoft") else node.domain
        version = self.opsets.get(domain)
        try:
            if like is None or version is None:
                raise defs.SchemaError
            schema = defs.get_schema(_RENAMED.get(like.op_type, like.op_type), version, domain)
        except defs.SchemaError:
            if node.domain in ("", "ai.onnx") and node.op_type in _LIKE_FIRST:
                return [scope.type_of(node.input[0])]
            raise FormatError(
                f"{where}: what this operator computes is not known; write the model with "
                "standard operators (from onnxruntime: without its optimisations), or give its "
                "definition as a function of the model"
            ) from None
        if not schema.has_type_and_shape_inference_function:
            if node.op_type in _LIKE_FIRST and node.input:
                return [scope.type_of(node.input[0])]
            return self._outputs_as_later(scope, node, where)
        if like.typed_as is not None:
            return self._outputs_alike(scope, node, like, schema, where)
        if node.op_type == "Einsum" and not _is_equation(attribute(node, "equation", b"")):
            # onnx's rule would look for the end of such a one for ever.
            raise FormatError(f"{where}: {attribute(node, 'equation', b'')!r:.60} is no equation")
        outputs = self._ask(scope, _written(node, like), schema, where)
        if node.op_type == "Dropout" and len(outputs) > 1 and _sizes(outputs[1]) is None:
            outputs[1] = outputs[0]  # the mask
        if node.op_type == "STFT" and _sizes(outputs[0]) is not None:
            outputs[0] = _type(
                outputs[0].tensor_type.elem_type, _stft(scope, node, _sizes(outputs[0]))
            )
        return outputs

    def _outputs_alike(
        self, scope: Scope, node: Any, like: Standard, schema: Any, where: str
    ) -> list[Any]:
        """By the rule of the standard operator; for which all inputs are floats."""
        from onnx import TensorProto

        written = _written(node, like)
        kinds: dict[str, Any] = {}
        for name, i in zip(written.input, like.inputs, strict=False):
            sizes = _sizes(scope.type_of(node.input[i])) if node.input[i] else None
            if not name or sizes is None:
                kinds[name] = None
                continue
            if node.op_type == "FusedMatMul" and attribute(node, ("transA", "transB")[i], 0):
                sizes[-2:] = sizes[:-3:-1]
            kinds[name] = _type(TensorProto.FLOAT, sizes)
        kinds.pop("", None)
        outputs = self._ask(scope, written, schema, where, kinds)
        like_type = scope.type_of(node.input[like.typed_as])
        if outputs[0] is not None and like_type is not None:
            outputs[0].tensor_type.elem_type = like_type.tensor_type.elem_type
        return outputs

    def _outputs_as_later(self, scope: Scope, node: Any, where: str) -> list[Any]:
        """By the rule of the next version that has one, its attributes written as there."""
        from onnx import defs, helper

        if node.domain not in ("", "ai.onnx"):
            return [None] * len(node.output)
        node, extra = deepcopy(node), {}
        if node.op_type == "Reshape":
            shape = np.array(attribute(node, "shape", []), np.int64)
            node.input.append("shape of " + node.output[0])
            extra = {node.input[-1]: shape}
        elif node.op_type == "Upsample":
            scales = [attribute(node, f"{x}_scale", 1.0) for x in ("height", "width")]
            node.attribute.append(helper.make_attribute("scales", [1.0, 1.0, *scales]))
        elif node.op_type == "Concat" and attribute(node, "axis", None) is None:
            node.attribute.append(helper.make_attribute("axis", 1))
        for own in node.attribute:
            own.name = {"paddings": "pads"}.get(own.name, own.name)
        for version in range(self.opsets[""] + 1, self.opsets[""] + 8):
            schema = defs.get_schema(node.op_type, version, "")
            if schema.has_type_and_shape_inference_function:
                for own in [a for a in node.attribute if a.name not in schema.attributes]:
                    node.attribute.remove(own)
                return self._ask(scope, node, schema, where, extra=extra)
        return [None] * len(node.output)

    def _ask(
        self,
        scope: Scope,
        node: Any,
        schema: Any,
        where: str,
        kinds: dict[str, Any] | None = None,
        extra: Mapping[str, NDArray[Any]] | None = None,
    ) -> list[Any]:
        """onnx's rule for the outputs of a node.

        ``kinds``: types of the inputs, if not those of the scope; ``extra``: values of inputs
        that are not in the scope.
        """
        from onnx import numpy_helper
        from onnx.shape_inference import infer_node_outputs

        values = dict(extra or {})
        if kinds is None:
            names = [x for x in node.input if x and x not in values]
            kinds = {x: scope.type_of(x) for x in names}
            values |= {x: a for x in names if (a := scope.value(x)) is not None}
        if any(kind is None for kind in kinds.values()):
            return [None] * len(node.output)
        if node.op_type == "Range":  # runtimes take one element for a scalar
            one = [x for x, kind in kinds.items() if _sizes(kind) == [1]]
            kinds |= {x: _type(kinds[x].tensor_type.elem_type, []) for x in one}
            values |= {x: values[x].reshape(()) for x in one if x in values}
        few = {x: a for x, a in values.items() if a.size <= 512}  # no rule reads larger ones
        data = {x: numpy_helper.from_array(a, x) for x, a in few.items()}
        kinds |= {x: _type(data[x].data_type, data[x].dims) for x in extra or {}}
        imports = [o for o in self.model.opset_import if o.domain != "ai.onnx"]
        try:
            types = infer_node_outputs(schema, node, kinds, data, opset_imports=imports)
        except Exception as error:
            shapes = ", ".join(f"{x} {_sizes(kind)}" for x, kind in kinds.items())
            reason = str(error).removeprefix("[ShapeInferenceError] ").strip()
            raise FormatError(
                f"{where}: shape inference failed: {reason.rstrip('.')}; inputs are "
                f"{shapes or 'none'}{self._of_dims()}"
            ) from error
        return [types.get(x) for x in node.output]

    def _of_dims(self) -> str:
        """What of a message says that ``dims`` may be wrong."""
        settings = ", ".join(f"{name}={size}" for name, size in self.dims.items())
        return f"; the sizes that were set, {settings}, may not suit the model" if settings else ""

    def _values(self, scope: Scope, v: int, node: Any) -> dict[str, NDArray[Any]]:
        """Values of the outputs, where they follow from constants and sizes and are few."""
        if node.domain not in ("", "ai.onnx"):
            return {}
        if node.op_type == "Constant":
            return _constant(node)
        if node.op_type == "If" and len(scope.inner[v]) == 1:
            (body,) = scope.inner[v].values()
            ends = zip(node.output, (body.value(x.name) for x in body.graph.output), strict=False)
            return {x: array for x, array in ends if array is not None}
        if node.op_type in ("Shape", "Size"):
            sizes = _sizes(scope.type_of(node.input[0]))
            if sizes is None or None in sizes:
                return {}
            if node.op_type == "Size":
                return {node.output[0]: np.array(math.prod(filter(None, sizes)) * (0 not in sizes))}
            part = slice(attribute(node, "start", 0), attribute(node, "end", None))
            return {node.output[0]: np.array(sizes[part], np.int64)}
        inputs = {x: scope.value(x) for x in node.input if x}
        if node.op_type not in _ARITHMETIC or any(a is None for a in inputs.values()):
            return {}
        kinds = {x: scope.type_of(x) for x in node.output if x}
        if node.op_type not in _AT_MOST_ITS_INPUTS:
            sizes_of = [_sizes(kind) for kind in kinds.values()]
            if any(s is None or None in s or math.prod(s) > MANY for s in sizes_of):  # type: ignore[arg-type]
                return {}
        outputs = {}
        for name, array in _computed(node, inputs, self.model).items():
            sizes = _sizes(kinds[name])
            if sizes is None or len(sizes) != array.ndim:
                continue
            if all(s in (None, n) for s, n in zip(sizes, array.shape, strict=True)):
                scope.types[name] = _type(kinds[name].tensor_type.elem_type, array.shape)
                outputs[name] = array
        return outputs

    def _body(self, scope: Scope, v: int, node: Any, name: str, kinds: Sequence[Any]) -> Scope:
        """A subgraph whose inputs have these types, as yet without its nodes."""
        graph = subgraphs(node)[name]
        body = Scope(graph, scope)
        scope.inner.setdefault(v, {})[name] = body
        for value, kind in zip(graph.input, kinds, strict=False):
            self._settle(body, value.name, kind, {value.name: value.type})
        return body

    def _if(self, scope: Scope, v: int, node: Any, where: str) -> list[Any]:
        """Of both branches, or of the one that a constant, or what sizes allow, chooses."""
        chosen = scope.value(node.input[0])
        names: tuple[str, ...] = ("then_branch", "else_branch")
        if chosen is not None and chosen.size == 1:
            names = (names[0],) if chosen.item() else (names[1],)
        ends, errors = [], []
        for name in names:
            body = self._body(scope, v, node, name, ())
            try:
                self._fill(body, None, where)
            except FormatError as error:  # with these sizes this branch cannot run
                errors.append(error)
                del scope.inner[v][name]
            else:
                ends.append([body.type_of(x.name) for x in body.graph.output])
        if not ends:
            raise errors[0]
        return [_both(*kinds) if len(kinds) > 1 else kinds[0] for kinds in zip(*ends, strict=False)]

    def _loop(self, scope: Scope, v: int, node: Any, where: str) -> list[Any]:
        """What a body carries has one shape; sizes that it changes are unknown."""
        from onnx import TensorProto

        trips = scope.value(node.input[0]) if node.input[0] else None
        goes = scope.value(node.input[1]) if len(node.input) > 1 and node.input[1] else True
        carried = [scope.type_of(x) for x in node.input[2:]]
        while True:
            first = [_type(TensorProto.INT64, []), _type(TensorProto.BOOL, [])]
            body = self._body(scope, v, node, "body", [*first, *carried])
            if goes is not None and bool(goes):
                body.values[body.graph.input[1].name] = np.array(True)
            self._fill(body, None, where)
            ends = [body.type_of(x.name) for x in body.graph.output]
            together = [_both(a, b) for a, b in zip(carried, ends[1:], strict=False)]
            starts = [body.type_of(x.name) for x in body.graph.input[2:]]
            if [_sizes(x) for x in together] == [_sizes(x) for x in carried]:
                break
            if [_sizes(x) for x in ends[1 : 1 + len(starts)]] == [_sizes(x) for x in starts]:
                together = starts  # as ``dims`` say
                break
            carried = together
        always = body.value(body.graph.output[0].name)
        known = trips is not None and trips.size == 1 and always is not None and bool(always)
        rows = max(0, int(trips.item())) if known and trips is not None else None
        return together + [_stacked(x, 0, rows) for x in ends[1 + len(together) :]]

    def _scan(self, scope: Scope, v: int, node: Any, where: str) -> list[Any]:
        if self.opsets[""] < 9:
            raise FormatError(f"{where}: Scan of opset 8 is not supported; convert to opset 9")
        kinds = [scope.type_of(x) for x in node.input]
        states = len(kinds) - attribute(node, "num_scan_inputs", 1)
        axes = attribute(node, "scan_input_axes", None) or [0] * (len(kinds) - states)
        parts, length = kinds[:states], None
        for kind, axis in zip(kinds[states:], axes, strict=False):
            sizes = _sizes(kind)
            if sizes is None:
                parts.append(None)
                continue
            length = sizes.pop(axis)
            parts.append(_type(kind.tensor_type.elem_type, sizes))
        body = self._body(scope, v, node, "body", parts)
        self._fill(body, None, where)
        ends = [body.type_of(x.name) for x in body.graph.output]
        axes = attribute(node, "scan_output_axes", None) or [0] * (len(ends) - states)
        stacked = zip(ends[states:], axes, strict=False)
        return ends[:states] + [_stacked(kind, axis, length) for kind, axis in stacked]


def kind_of(node: Any) -> str:
    """Operator type, with its domain unless that is onnx's own."""
    return f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def _written(node: Any, like: Standard) -> Any:
    """``node`` as the standard operator that it is like."""
    name = _RENAMED.get(like.op_type, like.op_type)
    if name == node.op_type and node.domain not in ("ai.onnx", "com.microsoft"):
        return node
    written = deepcopy(node)
    written.op_type, written.domain = name, ""
    if node.domain == "com.microsoft":
        from onnx import defs

        schema = defs.get_schema(name)
        inputs = [node.input[i] for i in like.inputs if i < len(node.input)]
        if like.typed_as is not None:
            # By position: one tensor may be two inputs, of which one turned.
            inputs = [str(i) if x else "" for i, x in enumerate(inputs)]
        written.ClearField("input")
        written.input.extend(inputs)
        del written.output[schema.max_output :]
        for own in [a for a in written.attribute if a.name not in schema.attributes]:
            written.attribute.remove(own)
    return written


def _is_equation(text: Any) -> bool:
    term = rb"[A-Za-z]*(\.\.\.)?[A-Za-z]*"
    pattern = rb"%b(,%b)*(->%b)?" % (term, term, term)
    return isinstance(text, bytes) and bool(re.fullmatch(pattern, text.replace(b" ", b"")))


def _stft(scope: Scope, node: Any, sizes: Any) -> list[int | None]:
    """[batch, frames, bins, 2]: onnx's rule forgets that one side is the default."""
    length = scope.value(node.input[3]) if len(node.input) > 3 and node.input[3] else None
    window = _sizes(scope.type_of(node.input[2])) if len(node.input) > 2 and node.input[2] else None
    size = int(length.item()) if length is not None else (window or [None])[0]
    if size is not None and attribute(node, "onesided", 1):
        size = size // 2 + 1
    return [*sizes[:2], size, *sizes[3:]]


def _both(a: Any, b: Any) -> Any:
    """The type of what is either: a size on which they differ is unknown."""
    one, other = _sizes(a), _sizes(b)
    if one is None or other is None or len(one) != len(other):
        if a is None or not a.HasField("tensor_type"):
            return a
        kind = type(a)()
        kind.tensor_type.elem_type = a.tensor_type.elem_type
        return kind
    sizes = [x if x == y else None for x, y in zip(one, other, strict=True)]
    return _type(a.tensor_type.elem_type, sizes)


def _stacked(kind: Any, axis: int, count: int | None) -> Any:
    """The type of ``count`` of them, along a new axis."""
    sizes = _sizes(kind)
    if sizes is None:
        return None
    axis = axis if axis >= 0 else axis + len(sizes) + 1
    return _type(kind.tensor_type.elem_type, [*sizes[:axis], count, *sizes[axis:]])


def _array(tensor: Any, name: str) -> dict[str, NDArray[Any]]:
    """The numbers in a ``TensorProto``, unless they are many, in another file, or damaged."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_location == TensorProto.EXTERNAL or math.prod(tensor.dims) > MANY:
        return {}
    try:
        array = numpy_helper.to_array(tensor)
    except (TypeError, ValueError):  # its size does not depend on them
        return {}
    return {} if array.dtype.kind in "OUS" else {name: array}


def _constant(node: Any) -> dict[str, NDArray[Any]]:
    """The value of a Constant, unless it is large, sparse or text."""
    for own in node.attribute:
        if own.name == "value":
            return _array(own.t, node.output[0])
        elif own.name in ("value_int", "value_ints"):
            return {node.output[0]: np.array(attribute(node, own.name, 0), np.int64)}
        elif own.name in ("value_float", "value_floats"):
            return {node.output[0]: np.array(attribute(node, own.name, 0), np.float32)}
    return {}


def _computed(node: Any, inputs: Mapping[str, Any], model: Any) -> dict[str, NDArray[Any]]:
    """What onnx's reference computes; nothing where it cannot."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    names = [x for x in node.output if x]
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_empty_tensor_value_info(x) for x in inputs],
        [helper.make_empty_tensor_value_info(x) for x in names],
    )
    imports = [o for o in model.opset_import if o.domain != "ai.onnx"]
    one = helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            arrays = ReferenceEvaluator(one).run(None, dict(inputs))
    except Exception:  # whatever an operator of numpy raises: then it is not known
        return {}
    values = {x: np.asarray(a) for x, a in zip(names, arrays, strict=False)}
    return {x: a for x, a in values.items() if a.dtype.kind not in "OUS"}
