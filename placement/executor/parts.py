"""Some operators of a captured graph, as a graph that runs by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from placement.graph import OpGraph
from placement.program import Param, Program, Ref, Step, fill, run_program


def part(
    graph: OpGraph, ops: Sequence[int] | NDArray[np.int64], *, joined: bool = False
) -> OpGraph:
    """A graph of these operators alone, in their order; its inputs are what they read in the model.

    ``joined``: what one of them makes, the others read from it, and it is no input.
    """
    program: Program = graph.program
    chosen = [int(n) for n in ops]
    inside = {t for n in chosen for t in program.steps[n].outputs} if joined else set()
    wanted = {t for n in chosen for t in _read(graph, n).tolist()} - inside
    values = _values(graph, wanted)
    number = {t: i for i, t in enumerate(sorted(values))}
    inputs = [values[t] for t in sorted(values)]
    params = [Param(i) for i in range(len(program.params))]
    produced: list[int] = []
    steps, sources, edges = [], [-1] * len(inputs), []
    at: dict[int, int] = {}  # of what the operators make
    for i, n in enumerate(chosen):
        step = program.steps[n]
        edges += [(number[t], i) for t in _read(graph, n).tolist()]
        refs = {t: Ref(j) for t, j in number.items()}
        outputs = tuple(range(len(sources), len(sources) + len(step.outputs)))
        at |= dict(zip(step.outputs, outputs, strict=True))
        if joined:
            number |= at
        produced += step.outputs
        sources += [i] * len(outputs)
        args, kwargs = fill(step.args, refs, params), fill(step.kwargs, refs, params)  # type: ignore[arg-type]
        steps.append(Step(step.target, args, kwargs, outputs, step.multi, step.output_index))
    names = tuple(f"input{i}" for i in range(len(inputs)))
    position = {n: i for i, n in enumerate(chosen)}
    uses = np.isin(graph.param_use_op, chosen)
    return OpGraph.build(
        f"part of {graph.name}",
        [graph.op_name[n] for n in chosen],
        sources,
        graph.tensor_bytes[[*sorted(values), *produced]],
        edges,
        op_kind=[graph.op_kind[n] for n in chosen],
        op_signature=[graph.op_signature[n] for n in chosen],
        param_bytes=graph.param_bytes,
        param_uses=[
            (position[int(n)], p)
            for n, p in zip(graph.param_use_op[uses], graph.param_use[uses], strict=True)
        ],
        program=replace(
            program,
            steps=tuple(steps),
            input_tensors=tuple(range(len(inputs))),
            input_names=names,
            arg_names=names,
            leaf_names=names,
            example_leaves=tuple(inputs),
            output_leaves=(),
            in_tree=pytree.tree_flatten(inputs)[1],
            out_tree=pytree.tree_flatten([])[1],
            gradients=tuple((p, at[t]) for p, t in program.gradients if t in at),
            new_buffers=tuple((p, at[t]) for p, t in program.new_buffers if t in at),
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
