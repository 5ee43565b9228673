"""Some operators of a captured graph, as a graph that runs by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from placement.graph import OpGraph
from placement.program import Program, Ref, run_program


def part(
    graph: OpGraph, ops: Sequence[int] | NDArray[np.int64], *, joined: bool = False
) -> OpGraph:
    """A graph of these operators alone, in their order; its inputs are what they read in the model.

    ``joined``: what one of them makes, the others read from it, and it is no input.
    """
    program: Program = graph.program
    chosen = [int(n) for n in ops]
    position = {n: i for i, n in enumerate(chosen)}
    read = {t for n in chosen for t in _read(graph, n).tolist()}
    outputs = [t for n in chosen for t in program.steps[n].outputs]
    # What is read keeps its number; what is made and not read from there gets another.
    number = {t: t if joined else graph.num_tensors + i for i, t in enumerate(outputs)}
    values = _values(graph, read - number.keys() if joined else read)
    sources = np.full(graph.num_tensors if joined else graph.num_tensors + len(outputs), -1)
    for t, own in number.items():
        sources[own] = position[int(graph.tensor_src[t])]
    size = (
        graph.tensor_bytes if joined else np.append(graph.tensor_bytes, graph.tensor_bytes[outputs])
    )
    steps = [program.steps[n] for n in chosen]
    names = tuple(f"input{i}" for i in range(len(values)))
    uses = np.isin(graph.param_use_op, chosen)
    return OpGraph.build(
        f"part of {graph.name}",
        [graph.op_name[n] for n in chosen],
        sources,
        size,
        [(t, i) for n, i in position.items() for t in _read(graph, n).tolist()],
        op_kind=[graph.op_kind[n] for n in chosen],
        op_signature=[graph.op_signature[n] for n in chosen],
        param_bytes=graph.param_bytes,
        param_uses=[
            (position[int(n)], p)
            for n, p in zip(graph.param_use_op[uses], graph.param_use[uses], strict=True)
        ],
        program=replace(
            program,
            steps=tuple(replace(x, outputs=tuple(number[t] for t in x.outputs)) for x in steps),
            input_tensors=tuple(values),
            input_names=names,
            arg_names=names,
            leaf_names=names,
            example_leaves=tuple(values.values()),
            output_leaves=(),
            in_tree=pytree.tree_structure([*names]),
            out_tree=pytree.tree_structure([]),
            gradients=tuple((p, number[t]) for p, t in program.gradients if t in number),
            new_buffers=tuple((p, number[t]) for p, t in program.new_buffers if t in number),
        ),
    )


def _read(graph: OpGraph, n: int) -> NDArray[np.int32]:
    return graph.in_tensor[graph.in_ptr[n] : graph.in_ptr[n + 1]]


def _values(graph: OpGraph, wanted: set[int]) -> dict[int, torch.Tensor]:
    """Tensors of a run of the program as far as it must go for them, by number."""
    program: Program = graph.program
    last = max((int(graph.tensor_src[t]) for t in wanted), default=-1)
    leaves = tuple(Ref(t) for t in sorted(wanted))
    begin = replace(program, steps=program.steps[: last + 1], output_leaves=leaves)
    return dict(zip(sorted(wanted), run_program(begin, program.timing_inputs()), strict=True))
