"""The operator graph: what runs, what flows between operators, what it weighs.

Everything else in the project stands on one convention made here: **operators are
numbered in topological order**, so every algorithm is a forward loop and nobody sorts.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.tools.limits import MOST

Ints = NDArray[np.int32]


_ARRAYS = {  # of a graph: their types, in the order in which the fingerprint has them
    "tensor_src": np.int32,
    "tensor_bytes": np.int64,
    "tensor_root": np.int32,
    "use_tensor": np.int32,
    "use_dst": np.int32,
    "param_bytes": np.int64,
    "param_use_op": np.int32,
    "param_use": np.int32,
    "group": np.int32,
    "is_backward": np.bool_,
    "output_tensor": np.int32,
}


_PIECE = re.compile(r"#(\d{1,2})$")


class GraphError(ValueError):
    """The graph is not a valid operator graph; the message says where."""


class Facts(TypedDict, total=False):
    """What ``OpGraph.build`` is told of a graph beside operators, tensors and uses.

    ``op_kind``, ``op_module``, ``op_signature`` and ``is_backward`` have one entry per operator;
    ``tensor_root`` one per tensor; ``group`` is any integer per operator, equal for operators
    that share a device; ``param_uses`` is ``[U, 2]`` (operator, parameter). The rest: ``OpGraph``.
    """

    op_kind: Sequence[str] | None
    op_module: Sequence[str] | None
    op_signature: Sequence[str] | None
    tensor_root: ArrayLike | None
    param_bytes: ArrayLike
    param_uses: ArrayLike
    group: ArrayLike | None
    is_backward: ArrayLike | None
    output_tensor: ArrayLike
    program: Any
    next_readers: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class OpGraph:
    """An operator graph with ``N`` operators, ``T`` tensors, ``E`` uses and ``P`` parameters.

    A *tensor* has one producer and any number of consumers; on each device it is sent to
    once however many consumers it has there. ``tensor_src == -1`` marks a model input,
    which is present in host memory when its micro-batch is admitted.

    Attributes:
        name: human name of the model.
        op_name: ``[N]`` unique operator names.
        op_kind: ``[N]`` kinds, e.g. ``aten.conv2d.default``.
        op_module: ``[N]`` path of the module the operator belongs to (``""`` = root).
        op_signature: ``[N]`` kind with shapes, dtypes and constants: what decides the cost.
        tensor_src: int32 ``[T]`` producing operator, -1 for a model input.
        tensor_bytes: int64 ``[T]`` size.
        tensor_root: int32 ``[T]`` the tensor whose memory this one shares (itself if none).
        use_tensor, use_dst: int32 ``[E]`` the uses, unique, sorted by (tensor, consumer).
        param_bytes: int64 ``[P]`` size of each distinct parameter or buffer; tied ones once.
        param_use_op, param_use: int32 ``[U]`` which operator reads which parameter.
        group: int32 ``[N]`` colocation group; operators of a group share a device.
        is_backward: bool ``[N]`` operators of the backward pass of a training step.
        output_tensor: int32 ``[O]`` tensors that leave the model.
        program: what executes the graph (see ``placement.capture``), or None.
        next_readers: what ``carried`` is where there is no program. No part of the fingerprint.
    """

    name: str
    op_name: tuple[str, ...]
    op_kind: tuple[str, ...]
    op_module: tuple[str, ...]
    op_signature: tuple[str, ...]
    tensor_src: Ints
    tensor_bytes: NDArray[np.int64]
    tensor_root: Ints
    use_tensor: Ints
    use_dst: Ints
    param_bytes: NDArray[np.int64]
    param_use_op: Ints
    param_use: Ints
    group: Ints
    is_backward: NDArray[np.bool_]
    output_tensor: Ints
    program: Any = field(default=None, repr=False, compare=False)
    next_readers: Mapping[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # One memory layout: for another one every kernel would be compiled again.
        for what, dtype in _ARRAYS.items():
            object.__setattr__(self, what, np.require(getattr(self, what), dtype, ["C", "W"]))

    def _repr_html_(self) -> str:
        """What a notebook shows: how much there is of what."""
        from placement.tools.shown import byte_size, table

        sizes = [
            ["operators", f"{self.num_ops:,}"],
            ["edges", f"{len(self.edges):,}"],
            ["colocation groups", f"{self.num_groups:,}"],
            ["parameters", byte_size(float(self.param_bytes.sum()))],
            ["backward operators", f"{int(self.is_backward.sum()):,}"],
        ]
        kinds = Counter(self.op_kind).most_common(8)
        return table(f"Operator graph {self.name}", ["", ""], sizes) + table(
            "most frequent operators", ["kind", "number"], [[k, f"{n:,}"] for k, n in kinds]
        )

    @classmethod
    def build(
        cls,
        name: str,
        op_name: Sequence[str],
        tensor_src: ArrayLike,
        tensor_bytes: ArrayLike,
        uses: ArrayLike,
        **facts: Unpack[Facts],
    ) -> OpGraph:
        """Build and check a graph; ``uses`` is ``[E, 2]`` (tensor, consumer) in any order.

        Duplicate uses are merged; colocation labels are renumbered 0, 1, ... by first appearance.

        Raises:
            GraphError: lengths differ, a number is out of range, names repeat, or a use
                points backwards (operators must be numbered in topological order).
        """
        unknown = facts.keys() - Facts.__annotations__.keys()
        if unknown:
            raise TypeError(f"OpGraph.build() takes {sorted(Facts.__annotations__)}, not {unknown}")
        n = len(op_name)
        texts: dict[str, tuple[str, ...]] = {}
        for what, default in (("op_kind", "op"), ("op_module", ""), ("op_signature", "op")):
            value: Any = facts.get(what)
            texts[what] = (default,) * n if value is None else tuple(value)

        def fact(what: str, otherwise: ArrayLike, dtype: Any = None) -> NDArray[Any]:
            value: Any = facts.get(what)
            value = otherwise if value is None else value
            return np.asarray(value, dtype or _ARRAYS[what]).reshape(-1)

        src = np.asarray(tensor_src, np.int32).reshape(-1)
        pairs, reads = (
            np.unique(np.asarray(rows, np.int32).reshape(-1, 2), axis=0)
            for rows in (uses, facts.get("param_uses", ()))
        )
        graph = cls(
            name=name,
            op_name=tuple(op_name),
            **texts,  # type: ignore[arg-type]
            tensor_src=src,
            tensor_bytes=np.asarray(tensor_bytes, np.int64).reshape(-1),
            tensor_root=fact("tensor_root", np.arange(len(src))),
            param_bytes=fact("param_bytes", ()),
            group=_renumber(fact("group", np.arange(n), np.int64)),
            is_backward=fact("is_backward", np.zeros(n)),
            output_tensor=fact("output_tensor", ()),
            use_tensor=pairs[:, 0],
            use_dst=pairs[:, 1],
            param_use_op=reads[:, 0],
            param_use=reads[:, 1],
            program=facts.get("program"),
            next_readers=facts.get("next_readers", {}),
        )
        graph._check()
        return graph

    def _check(self) -> None:
        n, t, p = self.num_ops, self.num_tensors, len(self.param_bytes)
        if n == 0:
            raise GraphError(f"graph {self.name!r} has no operators")
        lengths = dict.fromkeys(("op_kind", "op_module", "op_signature", "group", "is_backward"), n)
        for what, count in {**lengths, "tensor_bytes": t, "tensor_root": t}.items():
            if len(getattr(self, what)) != count:
                raise GraphError(f"{what} has {len(getattr(self, what))} entries, expected {count}")
        if len(set(self.op_name)) != n:
            twice = sorted({x for x in self.op_name if self.op_name.count(x) > 1})
            raise GraphError(f"operator names must be unique; repeated: {twice[:5]}")
        for what, low, high in (
            ("tensor_src", -1, n),
            ("tensor_root", 0, t),
            ("use_tensor", 0, t),
            ("use_dst", 0, n),
            ("param_use_op", 0, n),
            ("param_use", 0, p),
            ("output_tensor", 0, t),
        ):
            a = getattr(self, what)
            if len(a) and (a.min() < low or a.max() >= high):
                bad = int(np.flatnonzero((a < low) | (a >= high))[0])
                raise GraphError(f"{what}[{bad}] = {a[bad]} is outside {low}..{high - 1}")
        for what in ("tensor_bytes", "param_bytes"):
            sizes = getattr(self, what).tolist()
            if min(sizes, default=0) < 0 or sum(sizes) > MOST.graph_bytes:
                raise GraphError(
                    f"{what} must not be negative, nor more than {MOST.graph_bytes} together; they "
                    f"reach from {min(sizes)} to {max(sizes)}, together {sum(sizes)}"
                )
        back = np.flatnonzero(self.tensor_src[self.use_tensor] >= self.use_dst)
        if len(back):
            e = int(back[0])
            a, b = int(self.tensor_src[self.use_tensor[e]]), int(self.use_dst[e])
            raise GraphError(
                f"operator {b} ({self.op_name[b]!r}) uses a tensor of operator {a} "
                f"({self.op_name[a]!r}): operators must be numbered in topological order"
            )

    @property
    def num_ops(self) -> int:
        """``N``."""
        return len(self.op_name)

    @property
    def num_tensors(self) -> int:
        """``T``."""
        return len(self.tensor_src)

    @cached_property
    def num_groups(self) -> int:
        """Number of colocation groups; groups are numbered 0..num_groups-1."""
        return int(self.group.max()) + 1

    @cached_property
    def group_ptr(self) -> Ints:
        """int32 ``[G + 1]``: group g is ``group_op[group_ptr[g]:group_ptr[g+1]]``."""
        return csr(np.sort(self.group), self.num_groups)

    @cached_property
    def group_op(self) -> Ints:
        """int32 ``[N]``: operators, by group and then by number."""
        return np.argsort(self.group, kind="stable").astype(np.int32)

    @cached_property
    def use_ptr(self) -> Ints:
        """int32 ``[T + 1]``: the consumers of tensor t are ``use_dst[use_ptr[t]:use_ptr[t+1]]``."""
        return csr(self.use_tensor, self.num_tensors)

    @cached_property
    def out_ptr(self) -> Ints:
        """int32 ``[N + 1]``: operator n produces ``out_tensor[out_ptr[n]:out_ptr[n+1]]``."""
        return csr(np.sort(self.tensor_src[self.tensor_src >= 0]), self.num_ops)

    @cached_property
    def out_tensor(self) -> Ints:
        """int32 ``[T - inputs]``: produced tensors, by producer and then by number."""
        order = np.argsort(self.tensor_src, kind="stable").astype(np.int32)
        return order[self.tensor_src[order] >= 0]

    @cached_property
    def in_ptr(self) -> Ints:
        """int32 ``[N + 1]``: operator n consumes ``in_tensor[in_ptr[n]:in_ptr[n+1]]``."""
        return csr(np.sort(self.use_dst), self.num_ops)

    @cached_property
    def in_tensor(self) -> Ints:
        """int32 ``[E]``: consumed tensors, by consumer and then by number."""
        return self.use_tensor[np.lexsort((self.use_tensor, self.use_dst))]

    @cached_property
    def gradient_tensor(self) -> Ints:
        """int32 ``[S]``: gradients, tensors of backward operators that no operator reads."""
        is_gradient = np.append(self.is_backward, False)[self.tensor_src]
        is_gradient[self.use_tensor] = is_gradient[self.output_tensor] = False
        return np.flatnonzero(is_gradient).astype(np.int32)

    @cached_property
    def piece(self) -> Ints | None:
        """int32 ``[N]``: which piece each operator is, or works for; 0 for those that are whole.

        None: no operator is cut (see ``placement.pieces``, which names them so).
        """
        numbers = [_PIECE.search(name) for name in self.op_name]
        if not any(numbers):
            return None
        return np.array([0 if m is None else int(m[1]) for m in numbers], np.int32)

    @cached_property
    def carried(self) -> dict[int, tuple[int, ...]]:
        """Operator that writes a buffer -> operators that read it in the next micro-batch."""
        if self.program is None:
            return dict(self.next_readers)
        carried: dict[int, tuple[int, ...]] = {}
        for param, tensor in getattr(self.program, "new_buffers", ()):
            writer = int(self.tensor_src[tensor])
            readers = self.param_use_op[self.param_use == param].tolist()
            carried[writer] = tuple(dict.fromkeys((*carried.get(writer, ()), *readers)))
        return carried

    @cached_property
    def carried_op(self) -> Ints:
        """int32 ``[C]``: operators whose group changes a buffer that the next micro-batch reads."""
        return np.array(sorted(self.carried), np.int32)

    @cached_property
    def edges(self) -> Ints:
        """int32 ``[E', 2]``: distinct (producer, consumer) pairs, sorted; inputs left out."""
        src = self.tensor_src[self.use_tensor]
        pairs = np.stack([src, self.use_dst], axis=1)[src >= 0]
        return np.unique(pairs, axis=0).astype(np.int32).reshape(-1, 2)

    @cached_property
    def op_param_bytes(self) -> NDArray[np.int64]:
        """int64 ``[N]``: bytes of the parameters each operator reads (tied ones at each)."""
        total = np.zeros(self.num_ops, np.int64)
        np.add.at(total, self.param_use_op, self.param_bytes[self.param_use])
        return total

    @cached_property
    def op_params(self) -> list[list[int]]:
        """``[N]``: numbers of the parameters each operator reads."""
        params: list[list[int]] = [[] for _ in self.op_name]
        for op, param in zip(self.param_use_op.tolist(), self.param_use.tolist(), strict=True):
            params[op].append(param)
        return params

    def per_group(self, rows: NDArray[Any], by: np.ufunc = np.add, start: float = 0) -> Any:
        """``[G, ...]``: the ``rows [N, ...]`` of each group added up, or what else ``by`` does."""
        total = np.full((self.num_groups, *rows.shape[1:]), start, rows.dtype)
        by.at(total, self.group, rows)
        return total

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of structure, shapes, dtypes and colocation; never of weights.

        The operators' names are part of it, because a plan refers to operators by name; the
        name of the model is not.
        """
        h = hashlib.sha256(b"opgraph-1")
        for text in (*self.op_name, *self.op_signature):
            h.update(text.encode() + b"\0")
        for what in _ARRAYS:
            h.update(getattr(self, what).astype("<i8").tobytes() + b"|")
        return h.hexdigest()

    def without_program(self) -> OpGraph:
        """The same graph as pure data (picklable, small)."""
        return replace(self, program=None, next_readers=self.carried)

    def __repr__(self) -> str:
        mib = self.param_bytes.sum() / 2**20
        return (
            f"OpGraph({self.name!r}, {self.num_ops} operators, {self.num_tensors} tensors, "
            f"{len(self.edges)} edges, {mib:.1f} MiB parameters, {self.fingerprint[:12]})"
        )


def csr(sorted_keys: NDArray[np.integer[Any]], size: int) -> Ints:
    """int32 ``[size + 1]``: where each of the keys ``0..size-1`` begins, and the end."""
    return np.searchsorted(sorted_keys, np.arange(size + 1)).astype(np.int32)


def topological_order(
    edges: NDArray[np.integer[Any]], count: int, key: NDArray[np.float64] | None = None
) -> list[int]:
    """Vertices ``0..count-1`` in topological order, of several ready ones the smallest first.

    ``edges`` int ``[E, 2]`` are sorted by their first column. Those of a circle, and behind one,
    are left out. Of unlike ``key [count]``, the ready one of the least is first.
    """
    missing = np.bincount(edges[:, 1], minlength=count).tolist()
    first = csr(edges[:, 0], count).tolist()
    users = edges[:, 1].tolist()  # lists: a loop over arrays takes long
    keys = [0.0] * count if key is None else key.tolist()
    heap = [(keys[v], v) for v in range(count) if missing[v] == 0]
    heapq.heapify(heap)
    order = []
    while heap:
        u = heapq.heappop(heap)[1]
        order.append(u)
        for v in users[first[u] : first[u + 1]]:
            missing[v] -= 1
            if missing[v] == 0:
                heapq.heappush(heap, (keys[v], v))
    return order


def components(edges: NDArray[np.integer[Any]], count: int, strong: bool = False) -> Ints:
    """int32 ``[count]``: the connected component of each vertex, numbered from 0.

    ``strong``: vertices are in one that reach each other along ``edges`` ``[E, 2]``.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    table = csr_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(count, count))
    label = connected_components(table, strong, "strong" if strong else "weak")[1]
    return np.asarray(label, np.int32)


def levels(edges: NDArray[np.integer[Any]], count: int) -> Ints:
    """int32 ``[count]``: number of edges on the longest path to each vertex of a graph without
    circles; ``edges`` as for ``topological_order``."""
    is_numbered = bool((edges[:, 0] < edges[:, 1]).all())
    first, users, level = csr(edges[:, 0], count).tolist(), edges[:, 1].tolist(), [0] * count
    for u in range(count) if is_numbered else topological_order(edges, count):
        for v in users[first[u] : first[u + 1]]:
            level[v] = max(level[v], level[u] + 1)
    return np.array(level, np.int32)


def _renumber(labels: NDArray[Any]) -> Ints:
    """Dense labels 0, 1, ... in order of first appearance."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse.reshape(-1)].astype(np.int32)


def reuse_position(graph: OpGraph) -> NDArray[np.int32]:
    """int32 ``[N]`` position of each operator in an order that reads parameters while cached.

    One after another, of the operators that are ready: first those without parameters, then
    those whose parameters were read last; of equal ones the smallest number. Unrolled cells
    run layer by layer, in whatever order the model's author wrote the loops.
    """
    params = graph.op_params
    readers: list[list[int]] = [[] for _ in graph.param_bytes]  # heaps: ready, or done already
    last_read = [0] * len(readers)
    missing = np.bincount(graph.edges[:, 1], minlength=graph.num_ops)
    first = csr(graph.edges[:, 0], graph.num_ops)
    # (minus when its parameters were read, operator); of each parameter the first reader counts
    heap: list[tuple[int, int]] = []
    position = np.full(graph.num_ops, -1, np.int32)

    def ready(op: int) -> None:
        for param in params[op]:
            heapq.heappush(readers[param], op)
        recent = max((last_read[param] for param in params[op]), default=graph.num_ops + 1)
        heapq.heappush(heap, (-recent, op))

    for op in np.flatnonzero(missing == 0).tolist():
        ready(op)
    for now in range(graph.num_ops):
        op = heapq.heappop(heap)[1]
        while position[op] >= 0:  # an older entry of it
            op = heapq.heappop(heap)[1]
        position[op] = now
        for param in params[op]:
            last_read[param] = now + 1
            waiting = readers[param]
            while waiting and position[waiting[0]] >= 0:
                heapq.heappop(waiting)
            if waiting:
                heapq.heappush(heap, (-now - 1, waiting[0]))
        for user in graph.edges[first[op] : first[op + 1], 1].tolist():
            missing[user] -= 1
            if missing[user] == 0:
                ready(user)
    return position


def even_position(
    graph: OpGraph, read: NDArray[np.float64], work: NDArray[np.float64]
) -> NDArray[np.int32]:
    """int32 ``[N]`` position of each operator in an order in which both are spent evenly.

    One after another, of the operators that are ready: the one after which the parts of all of
    ``read`` and of all of ``work [N]`` that are done differ least; of equal ones the smallest
    number. So what is read for some can come while others work.
    """
    gain = read / max(read.sum(), 1e-300) - work / max(work.sum(), 1e-300)
    missing = np.bincount(graph.edges[:, 1], minlength=graph.num_ops)
    first = np.searchsorted(graph.edges[:, 0], np.arange(graph.num_ops + 1))
    ready, ahead = np.flatnonzero(missing == 0).tolist(), 0.0
    position = np.empty(graph.num_ops, np.int32)
    for now in range(graph.num_ops):
        op = min(ready, key=lambda op: (abs(ahead + gain[op]), op))
        ready.remove(op)
        position[op], ahead = now, ahead + gain[op]
        for user in graph.edges[first[op] : first[op + 1], 1].tolist():
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    return position
