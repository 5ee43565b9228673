"""Kernels of a training step as operators: those of a call together, those of its backward too.

Views cost nothing and are made again where they are read, so what flows between operators are
tensors with memory of their own.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import torch
from torch import fx

from placement.capturing.joint import Joint
from placement.capturing.kernels import kernel_of

_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Piece:
    """Kernels that are one operator.

    Attributes:
        call: number of the call in the forward.
        suffix: empty, ``_backward`` or ``_weight_backward``.
        first: the piece that this one runs a second time.
        after: a tensor for which it waits beside those that it reads.
    """

    call: int
    suffix: str
    kernels: list[fx.Node]
    first: Piece | None = None
    after: fx.Node | None = None

    @property
    def is_late(self) -> bool:
        """Whether it belongs to the backward."""
        return bool(self.suffix) or self.first is not None


def _is_view(node: fx.Node) -> bool:
    """Whether the node's value is memory of its first argument."""
    if node.target is operator.getitem:
        assert isinstance(node.args[0], fx.Node)
        return _is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is _aten._unsafe_view.default:
        return True
    return any(r.alias_info is not None for r in node.target._schema.returns)


def root_of(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` is a view of: itself, unless it is a view."""
    while node.op == "call_function" and _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def made_by(node: fx.Node) -> fx.Node | None:
    """The kernel that makes a root, or None if it is given."""
    if node.op == "placeholder":
        return None
    return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]


def reads_of(piece: Piece) -> list[fx.Node]:
    """The roots that a piece reads and other pieces make."""
    own = {None, *piece.kernels}
    roots = dict.fromkeys(root_of(x) for kernel in piece.kernels for x in kernel.all_input_nodes)
    return [root for root in roots if made_by(root) not in own]


def cut(joint: Joint, split_backward: bool) -> list[Piece]:
    """The kernels that are needed, as operators: those of one call, and of its backward.

    Operators come in a topological order. Kernels of one part are split where together they
    would close a cycle through another operator.
    """
    ends = [joint.loss, *(n for _, n in (*joint.gradients, *joint.new_buffers))]
    needed: set[fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    kernels = [
        n
        for n in joint.kernels
        if n in needed and n.target is not operator.getitem and not _is_view(n)
    ]
    of_weights = _of_weights(joint, needed) if split_backward else set()
    piece_of: dict[fx.Node, int] = {}
    pieces: list[Piece] = []
    after: list[set[int]] = []
    latest: dict[tuple[int, str], int] = {}

    def leads_to(a: int, b: int) -> bool:
        seen, waiting = {a}, [a]
        while waiting:
            for c in after[waiting.pop()] - seen:
                if c == b:
                    return True
                seen.add(c)
                waiting.append(c)
        return False

    for kernel in kernels:
        producers = [made_by(root_of(x)) for x in kernel.all_input_nodes]
        before = {piece_of[p] for p in producers if p is not None}
        call, backward = kernel.meta["owner"]
        weights = "_weight" if kernel in of_weights else ""
        part = (call, f"{weights}_backward" if backward else "")
        mine = latest.get(part)
        if mine is None or any(p != mine and leads_to(mine, p) for p in before):
            mine = latest[part] = len(pieces)
            pieces.append(Piece(*part, []))
            after.append(set())
        pieces[mine].kernels.append(kernel)
        piece_of[kernel] = mine
        for p in before - {mine}:
            after[p].add(mine)
    missing = Counter(b for bs in after for b in bs)
    ready = [i for i in range(len(pieces)) if not missing[i]]
    order = []
    while ready:  # numbers are by first kernel, so this keeps as close to the trace as it can
        i = heappop(ready)
        order.append(pieces[i])
        for j in after[i]:
            missing[j] -= 1
            if not missing[j]:
                heappush(ready, j)
    assert len(order) == len(pieces), "pieces are free of cycles"
    return order


def _of_weights(joint: Joint, needed: set[fx.Node]) -> set[fx.Node]:
    """Kernels whose results go into gradients of parameters and into no other call's backward."""
    results = {n for _, n in joint.gradients}
    others = {joint.loss, *(n for _, n in joint.new_buffers)}
    weights: set[fx.Node] = set()
    for node in reversed(joint.kernels):
        readers = [x for x in node.users if x in needed and x.op == "call_function"]
        own = all(x in weights and x.meta["owner"] == node.meta["owner"] for x in readers)
        if own and node in needed - others and (readers or node in results):
            weights.add(node)
    return weights


def results_of(joint: Joint, pieces: list[Piece]) -> list[list[fx.Node]]:
    """Of every piece: the roots that others read, then views that are results of the step."""
    piece_of: dict[Any, int] = {
        kernel: n for n, piece in enumerate(pieces) for kernel in piece.kernels
    }
    results: list[dict[fx.Node, None]] = [{} for _ in pieces]
    for root in (root for piece in pieces for root in reads_of(piece)):
        results[piece_of[made_by(root)]][root] = None
    for node in (joint.loss, *(n for _, n in (*joint.gradients, *joint.new_buffers))):
        producer = made_by(root_of(node))
        assert producer is not None, "gradients have memory of their own"
        results[piece_of[producer]][node] = None
    assert all(results), "all kernels are needed"
    return [sorted(nodes, key=_is_view) for nodes in results]


def compile_piece(
    piece: list[fx.Node], results: list[fx.Node]
) -> tuple[Callable[..., Any], list[fx.Node]]:
    """A function of (device, operands...) that runs the kernels, and the operands.

    Source is generated as in ``placement.executor.share``; a value is dropped after its last use.
    """
    order: list[fx.Node] = []  # kernels, and views in front of their readers
    operands: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    mine = set(piece)

    def visit(node: fx.Node) -> None:
        if node in seen:
            return
        seen.add(node)
        producer = made_by(root_of(node))
        if node is root_of(node) and (producer is None or producer not in mine):
            operands[node] = None
            return
        for x in node.all_input_nodes:
            visit(x)
        order.append(node)

    for node in (*piece, *results):
        visit(node)
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        last[node] = i
        for x in node.all_input_nodes:
            last[x] = i
    for node in results:
        last[node] = len(order)
    names: dict[str, Any] = {}

    def bind(value: Any) -> str:
        names[name := f"k{len(names)}"] = value
        return name

    variable = {x: f"a{i}" for i, x in enumerate(operands)}
    variable |= {x: f"v{i}" for i, x in enumerate(order)}

    def source(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return variable[arg]
        if isinstance(arg, torch.device):
            return "device"
        if arg is None or type(arg) in (bool, int):
            return repr(arg)
        if isinstance(arg, list | tuple):
            items = "".join(source(x) + "," for x in arg)
            return f"[{items}]" if isinstance(arg, list) else f"({items})"
        return bind(arg)

    lines = [f"def run(device, {', '.join(variable[x] for x in operands)}):"]
    for i, node in enumerate(order):
        if node.target is operator.getitem:
            lines.append(f"    {variable[node]} = {source(node.args[0])}[{node.args[1]}]")
        else:
            arguments = [source(x) for x in node.args]
            arguments += [f"{k}={source(x)}" for k, x in node.kwargs.items()]
            lines.append(f"    {variable[node]} = {bind(kernel_of(node))}({', '.join(arguments)})")
        done = [variable[x] for x in dict.fromkeys((*node.all_input_nodes, node)) if last[x] == i]
        if done:
            lines.append(f"    del {', '.join(done)}")
    returned = ", ".join(variable[x] for x in results)
    lines.append(f"    return {returned}")
    exec("\n".join(lines), names)
    return names["run"], list(operands)
