"""Activation recomputation: a training step that computes activations again in its backward.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174 (2016): what the
backward of a block reads from its own forward is not kept, but computed a second time from the
block's inputs. Memory falls, and the block's forward is paid for twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.graph import OpGraph
from placement.program import CaptureError, Program, Ref, Step

_OF_THE_BATCH = "aten.batch_norm.default"


def recompute(graph: OpGraph, blocks: Sequence[str]) -> OpGraph:
    """The same training step with the activations inside ``blocks`` computed again.

    ``blocks`` are module paths, e.g. ``layers.3``. The second forward of a block waits for the
    gradient that its backward begins with, and is colocated like the first. Kept are what other
    modules read, and the results of operators that read a buffer which the step changes, except
    batch normalisation's. Parameters, buffers, losses and gradients are the same.

    ::

        before:  F1 F2 F3 . . . B3 B2 B1     F1's result is kept from F1 to B1
        after:   F1 F2 F3 . . . F1' B3 ...   with block (1, 2, 3): F1' F2' follow the gradient

    Raises:
        CaptureError: no training step, no such module, a step that draws random numbers, or a
            block that no gradient enters from outside.
    """
    program = graph.program
    if not isinstance(program, Program) or not program.gradients:
        raise CaptureError("recompute is for training steps: capture(..., mode='training')")
    if blocks and program.is_random:
        raise CaptureError(
            "the step draws random numbers (dropout): computed again they would be others; set "
            "the dropout rates to 0, or recompute nothing"
        )
    for block in blocks:
        graph = _recompute(graph, block)
    return graph


def _recompute(graph: OpGraph, block: str) -> OpGraph:
    program: Program = graph.program
    inside = np.array([m == block or m.startswith(f"{block}.") for m in graph.op_module], bool)
    if not inside.any():
        modules = sorted({m for m in graph.op_module if m})
        raise CaptureError(f"no module {block!r} to recompute; modules are {', '.join(modules)}")
    src, backward = graph.tensor_src, graph.is_backward
    made_by = np.where(src >= 0, src, 0)
    of_forward = (src >= 0) & (inside & ~backward)[made_by]
    reader, read = graph.use_dst, graph.use_tensor
    by_backward = (inside & backward)[reader]

    entering = read[by_backward & (src[read] >= 0) & (backward & ~inside)[made_by[read]]]
    if not len(entering):
        raise CaptureError(
            f"no gradient enters {block!r} from another module: its activations are needed at "
            "once; recompute blocks before it"
        )
    trigger = int(entering[src[entering].argmin()])
    stays = np.zeros(graph.num_tensors, bool)
    stays[graph.output_tensor] = True
    stays[read[backward[reader] & ~by_backward]] = True  # stored for others anyway
    changed = [p for p, _ in program.new_buffers]
    fixed = np.zeros(graph.num_ops, bool)
    fixed[graph.param_use_op[np.isin(graph.param_use, changed)]] = True
    # What batch normalisation makes of a batch depends on that alone: others get the statistics.
    fixed &= [kind != _OF_THE_BATCH for kind in graph.op_kind]
    stays |= fixed[made_by] & (src >= 0)

    wanted = set(np.unique(read[by_backward & of_forward[read] & ~stays[read]]).tolist())
    again = _needed(graph, wanted, of_forward & ~stays)
    return _with_copies(graph, program, sorted(again), int(src[trigger]), trigger, by_backward)


def _needed(graph: OpGraph, wanted: Collection[int], free: NDArray[np.bool_]) -> set[int]:
    """Operators to run again for the tensors ``wanted``, from tensors that are not ``free``."""
    ops: set[int] = set()
    left = list(wanted)
    inputs: dict[int, list[int]] = {}
    for t, n in zip(graph.use_tensor.tolist(), graph.use_dst.tolist(), strict=True):
        inputs.setdefault(n, []).append(t)
    while left:
        op = int(graph.tensor_src[left.pop()])
        if op not in ops:
            ops.add(op)
            left += [t for t in inputs.get(op, ()) if free[t]]
    return ops


def _with_copies(
    graph: OpGraph,
    program: Program,
    again: list[int],
    after: int,
    trigger: int,
    by_backward: NDArray[np.bool_],
) -> OpGraph:
    """The graph with copies of the operators ``again``, numbered right behind ``after``."""
    if not again:
        return graph
    order = [*range(after + 1), *again, *range(after + 1, graph.num_ops)]
    is_copy = np.zeros(len(order), bool)
    is_copy[after + 1 : after + 1 + len(again)] = True
    place = {(op, bool(c)): i for i, (op, c) in enumerate(zip(order, is_copy, strict=True))}
    old = np.array([place[op, False] for op in range(graph.num_ops)])

    tensor_src = np.where(graph.tensor_src >= 0, old[graph.tensor_src], -1).tolist()
    size, root = graph.tensor_bytes.tolist(), graph.tensor_root.tolist()
    copy: dict[int, int] = {}  # tensor -> the same, computed again
    for op in again:
        for t in np.flatnonzero(graph.tensor_src == op).tolist():
            copy[t] = len(tensor_src)
            tensor_src.append(place[op, True])
            size.append(size[t])
            root.append(copy.get(root[t], root[t]) if root[t] != t else copy[t])

    uses, readers = [], dict.fromkeys(again, 0)
    pairs = zip(graph.use_tensor.tolist(), graph.use_dst.tolist(), by_backward, strict=True)
    for t, n, late in pairs:
        uses.append((copy[t] if late and t in copy else t, int(old[n])))
        if n in readers:
            uses.append((copy.get(t, t), place[n, True]))
            readers[n] += t in copy
    # A copy that reads no other copy could run at once: it waits for the gradient.
    uses += [(trigger, place[op, True]) for op, count in readers.items() if count == 0]

    late_ops = {int(n) for n, late in zip(graph.use_dst, by_backward, strict=True) if late}
    steps = []
    for op, copied in zip(order, is_copy.tolist(), strict=True):
        step = program.steps[op]
        if copied:
            outputs = tuple(copy[t] for t in step.outputs)
            step = replace(_reading(step, copy), outputs=outputs)
        elif op in late_ops:
            step = _reading(step, copy)
        steps.append(step)
    param_uses = [
        (int(old[n]), p)
        for n, p in zip(graph.param_use_op.tolist(), graph.param_use.tolist(), strict=True)
    ]
    num_params, changed = len(program.params), {p for p, _ in program.new_buffers}
    for op in again:
        mine = graph.param_use[graph.param_use_op == op].tolist()
        param_uses += [(place[op, True], p) for p in mine if p < num_params and p not in changed]
    taken = set(graph.op_name)

    def name(op: int, copied: bool) -> str:
        if not copied:
            return graph.op_name[op]
        return next(x for i in range(len(again) + 1) if (x := _again(graph, op, i)) not in taken)

    return OpGraph.build(
        graph.name,
        [name(op, c) for op, c in zip(order, is_copy.tolist(), strict=True)],
        tensor_src,
        size,
        uses,
        op_kind=[graph.op_kind[op] for op in order],
        op_module=[graph.op_module[op] for op in order],
        op_signature=[graph.op_signature[op] for op in order],
        tensor_root=root,
        param_bytes=graph.param_bytes,
        param_uses=param_uses,
        group=graph.group[order],
        is_backward=graph.is_backward[order] | is_copy,
        output_tensor=graph.output_tensor,
        program=replace(program, steps=tuple(steps)),
    )


def _again(graph: OpGraph, op: int, i: int) -> str:
    return f"{graph.op_name[op]}_again{i + 1 if i else ''}"


def _reading(step: Step, copy: Mapping[int, int]) -> Step:
    """The step with copies of tensors in the place of those that were copied."""

    def other(x: Any) -> Any:
        if isinstance(x, Ref):
            return Ref(copy.get(x.tensor, x.tensor))
        if isinstance(x, list | tuple):
            return type(x)(other(y) for y in x)
        if isinstance(x, dict):
            return {k: other(y) for k, y in x.items()}
        return x

    return replace(step, args=other(step.args), kwargs=other(step.kwargs))
