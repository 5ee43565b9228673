"""What an operator costs by its description: work, bytes and shapes, and how others depend on it.

Nothing runs here. The parameters of an operator come from its signature (kind, shapes, dtypes) and
the bytes of its results, so a graph that was loaded as data has them too.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from placement.graph import OpGraph, levels, reuse_position

Floats = NDArray[np.float64]
Shape = tuple[int, ...]

_TENSOR = re.compile(r"\b(bf|[fiuc]|b)(\d*)(?:e\dm\d\w*)?\[([\d,]*)\]")
_WINDOW = re.compile(r"[( ]\[([\d, ]+)\]")  # the first list of integers
_PRODUCTS = {"linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "mv", "einsum"}
_CONVOLUTIONS = ("conv", "mkldnn_convolution", "_convolution")
_ATTENTION = "scaled_dot_product"
_RECURRENT = {"lstm", "gru", "mkldnn_rnn_layer", "rnn_tanh", "rnn_relu"}
_VIEWS = {
    "view", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split",
    "chunk", "unbind", "alias", "detach", "t", "expand_as", "split_with_sizes", "movedim", "narrow",
    "unfold", "view_as", "swapaxes", "diagonal", "_unsafe_view",
}  # fmt: skip
_LOOKUPS = ("embedding", "index", "gather", "take", "slice_copy")
# Arithmetic operations for an element that is not a plain addition; only the order matters.
_OPERATIONS = {
    "exp": 10, "log": 10, "tanh": 10, "sigmoid": 10, "gelu": 12, "silu": 11, "erf": 10, "sin": 10,
    "cos": 10, "pow": 10, "sqrt": 4, "rsqrt": 4, "div": 4, "softmax": 12, "_softmax": 12,
    "log_softmax": 14, "layer_norm": 8, "native_layer_norm": 8, "group_norm": 8, "batch_norm": 4,
    "rms_norm": 6, "softplus": 20, "mish": 30, "sort": 20, "topk": 20, "cumsum": 2, "hardswish": 4,
}  # fmt: skip
CLASSES = ("product", "convolution", "attention", "recurrent", "view", "other")


@dataclass(frozen=True, eq=False)
class Features:
    """Parameters of ``N`` operators, float64 ``[N]`` each unless said otherwise.

    Attributes:
        kind: ``[N]`` kinds without overload and namespace, e.g. ``conv2d``.
        op_class: int ``[N]`` number in ``CLASSES``: what decides which parameters matter.
        flops: floating-point operations; a multiplication with its addition counts 2.
        read_bytes: of inputs and parameters; of a look-up only the rows that are read.
        written_bytes: of results; a view reads and writes nothing.
        param_bytes: of the parameters among what is read.
        batch, rows, inner, outer: the operator as ``batch`` products of ``rows x inner`` by
            ``inner x outer`` matrices: of a convolution, groups, output positions, channels times
            window and output channels; of attention, heads, queries, width and keys; of a pool 1,
            results, elements of the window, and 1. Of any other,
            the leading dimension, the elements over it and the last, the last dimension, and 1.
        item_bytes: bytes of an element.
        num_inputs: tensors that it reads.
        param_gap_bytes: what operators read and write between two reads of its largest parameter,
            where the graph runs again and again (in the order of ``reuse_position``): whether
            caches still have it. 0 without parameters.
        kind_gap_bytes: the same between two operators of its kind: whether its code is cached.
        fan_in, fan_out: distinct operators that it waits for, and that wait for it.
        level: operators before it on the longest path in front of it.
    """

    kind: tuple[str, ...]
    op_class: NDArray[np.int64]
    flops: Floats
    read_bytes: Floats
    written_bytes: Floats
    param_bytes: Floats
    batch: Floats
    rows: Floats
    inner: Floats
    outer: Floats
    item_bytes: Floats
    num_inputs: Floats
    param_gap_bytes: Floats
    kind_gap_bytes: Floats
    fan_in: Floats
    fan_out: Floats
    level: Floats

    @cached_property
    def intensity(self) -> Floats:
        """float64 ``[N]`` operations per byte that is read or written (0 where there is none)."""
        moved = self.read_bytes + self.written_bytes
        return np.divide(self.flops, moved, out=np.zeros_like(moved), where=moved > 0)

    @cached_property
    def columns(self) -> dict[str, Floats]:
        """Every numeric column by name, in a fixed order: the input of predictors and policies."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "kind"}
        return named | {"op_class": self.op_class.astype(float), "intensity": self.intensity}


@dataclass(frozen=True, eq=False)
class Slack:
    """Where time is critical, for operators of given seconds and free transfers.

    Attributes:
        start_s: float64 ``[N]`` earliest start.
        slack_s: float64 ``[N]`` how much later it may start without a longer critical path.
        critical: bool ``[N]`` on a longest path.
        path_s: seconds of that path.
    """

    start_s: Floats
    slack_s: Floats
    critical: NDArray[np.bool_]
    path_s: float


@dataclass(frozen=True)
class Call:
    """A signature taken apart.

    Attributes:
        kind: without overload and namespace; in-place operators end with ``_``.
        tensors: ``(bytes of an element, shape)`` of every tensor argument, in order.
        window: the first list of integers: what a pool slides over its input.
    """

    kind: str
    tensors: tuple[tuple[int, Shape], ...]
    window: Shape


def features(graph: OpGraph) -> Features:
    """The parameters of every operator of ``graph``."""
    n = graph.num_ops
    shared = np.zeros(n, bool)
    own = graph.tensor_root == np.arange(graph.num_tensors)
    produced = graph.tensor_src >= 0
    written = np.bincount(graph.tensor_src[produced], graph.tensor_bytes[produced], n)
    shared[graph.tensor_src[produced & ~own]] = True
    rows = [parameters(graph.op_signature[i], float(written[i]), bool(shared[i])) for i in range(n)]
    table = np.array([values for _, values in rows]).reshape(n, len(PARAMETERS))
    columns = dict(zip(PARAMETERS, table.T, strict=True))
    kinds = tuple(kind for kind, _ in rows)
    param_gap, kind_gap = _gaps(graph, kinds, columns["read_bytes"] + columns["written_bytes"])
    edges = graph.edges
    return Features(
        kind=kinds,
        param_gap_bytes=param_gap,
        kind_gap_bytes=kind_gap,
        op_class=columns.pop("op_class").astype(np.int64),
        param_bytes=graph.op_param_bytes.astype(float),
        fan_in=np.bincount(edges[:, 1], minlength=n).astype(float),
        fan_out=np.bincount(edges[:, 0], minlength=n).astype(float),
        level=levels(edges, n).astype(float),
        **columns,
    )


def _gaps(graph: OpGraph, kinds: tuple[str, ...], moved: Floats) -> tuple[Floats, Floats]:
    """``param_gap_bytes`` and ``kind_gap_bytes`` of ``Features``, float64 ``[N]`` each."""
    order = np.argsort(reuse_position(graph))
    after = np.zeros(graph.num_ops)
    after[order] = np.cumsum(moved[order])
    size = graph.param_bytes.tolist()
    largest = [max(read, key=size.__getitem__, default=-1) for read in graph.op_params]
    total = moved.sum()

    def gaps(label: Sequence[Hashable]) -> Floats:
        gap = np.zeros(graph.num_ops)
        last = {label[op]: after[op] - total for op in order}  # of the run before
        for op in order:
            gap[op] = after[op] - moved[op] - last[label[op]]
            last[label[op]] = after[op]
        return np.maximum(gap, 0.0)

    return np.where(np.array(largest) >= 0, gaps(largest), 0.0), gaps(kinds)


def slack(graph: OpGraph, seconds: Floats) -> Slack:
    """Earliest starts and slack where operator ``n`` takes ``seconds[n]`` and transfers nothing.

    Where an operator cannot run (inf), no slack is finite and nothing is critical.
    """
    ready = np.zeros(graph.num_ops)
    tail = np.zeros(graph.num_ops)
    pairs = graph.edges[np.argsort(graph.edges[:, 1], kind="stable")].tolist()
    for src, dst in pairs:  # by consumer: a producer's own start is final
        ready[dst] = max(ready[dst], ready[src] + seconds[src])
    for src, dst in sorted(pairs, reverse=True):
        tail[src] = max(tail[src], tail[dst] + seconds[dst])
    path = float((ready + seconds + tail).max())
    with np.errstate(invalid="ignore"):
        free = np.maximum(path - (ready + seconds + tail), 0.0)
    return Slack(ready, free, np.isfinite(free) & (free <= 1e-9 * path), path)


PARAMETERS = (
    "op_class", "flops", "read_bytes", "written_bytes", "batch", "rows", "inner", "outer",
    "item_bytes", "num_inputs",
)  # fmt: skip


@lru_cache(maxsize=65536)
def parse(signature: str) -> Call:
    """Kind and tensors of an operator signature, e.g. ``aten.relu.default(f32[1,8])``."""
    target, _, arguments = signature.partition("(")
    name = target.split(".")
    tensors = tuple(
        (max(1, int(bits or 8) // 8), tuple(int(d) for d in dims.split(",") if d))
        for _, bits, dims in _TENSOR.findall(arguments)
    )
    window = _WINDOW.search(signature)
    sizes = tuple(int(d) for d in window[1].split(",") if d.strip()) if window else ()
    return Call(name[1] if len(name) > 1 else name[0], tensors, sizes)


@lru_cache(maxsize=65536)
def parameters(signature: str, written_bytes: float, shares: bool) -> tuple[str, tuple[float, ...]]:
    """Kind, and the values of ``PARAMETERS``, of one operator.

    Args:
        written_bytes: of its results that somebody reads.
        shares: a result is memory of an input.
    """
    call = parse(signature)
    kind, tensors = call.kind, call.tensors
    base = kind.rstrip("_")
    shapes = [shape for _, shape in tensors]
    item = tensors[0][0] if tensors else 4
    sizes = [prod(shape) * bits for bits, shape in tensors]
    read = float(sum(sizes))
    x = shapes[0] if shapes else ()
    count = written_bytes / item
    op_class, flops = "other", 0.0
    # batch, rows, inner, outer of an operator that is no product
    last = x[-1] if x else 1
    lead = x[0] if len(x) > 1 else 1
    dims: tuple[float, ...] = (lead, max(1.0, prod(x) / max(1, lead * last)), last, 1)
    is_view = base in _VIEWS or (shares and not kind.endswith("_"))
    if base in _PRODUCTS and len(shapes) > 1:
        op_class, dims = "product", _product(base, shapes, count)
        flops = 2.0 * prod(dims)
    elif base.startswith(_CONVOLUTIONS) and _is_convolution(shapes) and "backward" not in base:
        op_class, dims = "convolution", _convolution(x, shapes[1], count, "transpose" in base)
        flops = 2.0 * prod(dims)
    elif _ATTENTION in base and len(shapes) > 2 and min(map(len, shapes[:2])) > 1:
        queries, keys = shapes[0], shapes[1]
        op_class = "attention"
        dims = (prod(queries[:-2]), queries[-2], queries[-1], keys[-2])
        flops = 4.0 * prod(dims) + 12.0 * prod(queries[:-1]) * keys[-2]
    elif base in _RECURRENT and len(shapes) > 2:
        op_class = "recurrent"
        weights = sum(prod(s) for s in shapes[2:] if len(s) == 2)
        steps = max(1.0, prod(x[:-1])) if len(x) > 1 else 1.0
        dims = (1, steps, last, weights / max(1, last))
        flops = 2.0 * steps * weights
    elif "pool" in base and shapes:
        dims = _pool(x, call.window, count, base.startswith("adaptive"))
        flops = prod(dims)
    elif is_view:
        op_class, read, written_bytes = "view", 0.0, 0.0
    else:
        elements = max([count, *(prod(s) for s in shapes)])
        if base.startswith(_LOOKUPS):
            rows = prod(shapes[1]) if base.startswith("embedding_bag") and shapes[1:] else 0
            read = max(written_bytes, float(rows * last * item)) + sum(sizes[1:])
            # The table's own size says nothing: only rows of it are touched.
            elements = max([count, rows * last, *(prod(s) for s in shapes[1:])])
            dims = (1, max(1.0, elements / max(1, last)), last, 1)
        flops = _OPERATIONS.get(base, 1) * elements
    values = (CLASSES.index(op_class), flops, read, written_bytes, *dims, item, len(tensors))
    return kind, tuple(float(v) for v in values)


def _pool(x: Shape, window: Shape, count: float, adaptive: bool) -> tuple[float, ...]:
    """One, results, elements that each is made of, and one."""
    count = max(1.0, count)
    if adaptive:
        each = prod(x) / count
    else:  # a window may be larger than what it slides over
        each = prod(min(a, b) for a, b in zip(window, x[-len(window) :], strict=False))
    return 1, count, max(1.0, each), 1


def _product(base: str, shapes: list[Shape], count: float) -> tuple[float, ...]:
    """Matrices, rows, inner and outer dimension of a matrix product with ``count`` results."""
    if base in ("addmm", "baddbmm"):
        shapes = shapes[1:]
    a = shapes[0]
    inner = a[-1] if a else 1
    rows = a[-2] if len(a) > 1 else 1
    batch = prod(a[:-2])
    if base == "linear":  # every leading dimension is a row
        batch, rows = 1, prod(a[:-1])
    elif len(shapes[1]) <= 2:
        batch, rows = 1, batch * rows
    return batch, rows, inner, max(1.0, count / max(1, batch * rows))


def _is_convolution(shapes: list[Shape]) -> bool:
    """Whether the first two tensors can be an input, batched or not, and a window."""
    if len(shapes) < 2 or len(shapes[1]) < 3:
        return False
    x, weight = shapes[:2]
    return len(weight) - len(x) in (0, 1) and min(*x, *weight) > 0


def _convolution(x: Shape, weight: Shape, count: float, transposed: bool) -> tuple[float, ...]:
    """Groups, positions, channels times window per group, and channels out per group."""
    if transposed:  # every input position is spread over the window
        return 1, prod(x) / weight[0], weight[0], prod(weight[1:])
    channels = x[1] if len(x) == len(weight) else x[0]
    groups = max(1, channels // weight[1])
    return groups, count / weight[0], prod(weight[1:]), weight[0] / groups
