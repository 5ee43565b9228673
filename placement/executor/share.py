"""One device's share of a placed program: what it runs, keeps, sends and hands back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from placement.graph import OpGraph
from placement.program import Param, Program, Ref, leaves_of

Call = Callable[[list[Any]], None]


@dataclass(frozen=True, eq=False)
class Share:
    """Static tables of one device; lists are indexed by operator ``[N]`` or tensor ``[T]``.

    Attributes:
        ops: operators placed here, ascending.
        num_inputs: ``[N]`` distinct tensors each operator of this device waits for; one without
            inputs waits for the admission of its micro-batch.
        inputs, outputs: ``[N]`` tensors each operator reads and makes.
        users: ``[T]`` operators of this device that read each tensor.
        peers: ``[T]`` devices that a tensor made here is sent to.
        num_uses: ``[T]`` how many operators of this device read each tensor.
        sources: operators of this device without inputs.
        model_inputs: model inputs read here.
        results: ``[T]`` whether a tensor made here leaves the model.
        carried: an operator here -> those that wait for it from one micro-batch to the next.
    """

    device: int
    ops: tuple[int, ...]
    num_inputs: list[int]
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    users: list[tuple[int, ...]]
    peers: list[tuple[int, ...]]
    num_uses: list[int]
    sources: tuple[int, ...]
    model_inputs: tuple[int, ...]
    results: list[bool]
    carried: dict[int, tuple[int, ...]]


def shares(graph: OpGraph, placement: np.ndarray[Any, Any], num_devices: int) -> list[Share]:
    """The share of every device; pure."""
    place = placement.tolist()
    made_at = [place[s] if s >= 0 else -1 for s in graph.tensor_src.tolist()]
    inputs = _rows(graph.in_tensor, graph.in_ptr)
    outputs = _rows(graph.out_tensor, graph.out_ptr)
    consumers = _rows(graph.use_dst, graph.use_ptr)
    leaves = set(graph.output_tensor.tolist())
    carried = carried_operators(graph)
    found = []
    for d in range(num_devices):
        users = [tuple(op for op in ops if place[op] == d) for ops in consumers]
        found.append(
            Share(
                device=d,
                ops=tuple(op for op in range(graph.num_ops) if place[op] == d),
                num_inputs=[max(1, len(x)) for x in inputs],
                inputs=inputs,
                outputs=outputs,
                users=users,
                peers=[
                    tuple(dict.fromkeys(place[op] for op in ops if place[op] != d))
                    if made_at[t] == d
                    else ()
                    for t, ops in enumerate(consumers)
                ],
                num_uses=[len(x) for x in users],
                sources=tuple(
                    op for op in range(graph.num_ops) if place[op] == d and not inputs[op]
                ),
                model_inputs=tuple(t for t, src in enumerate(made_at) if src == -1 and users[t]),
                results=[t in leaves and made_at[t] == d for t in range(graph.num_tensors)],
                carried={op: readers for op, readers in carried.items() if place[op] == d},
            )
        )
    return found


def carried_operators(graph: OpGraph) -> dict[int, tuple[int, ...]]:
    """Operator that writes a buffer -> operators that read it in the next micro-batch."""
    found: dict[int, tuple[int, ...]] = {}
    for param, tensor in graph.program.new_buffers if graph.program is not None else ():
        writer = int(graph.tensor_src[tensor])
        readers = graph.param_use_op[graph.param_use == param].tolist()
        found[writer] = tuple(dict.fromkeys((*found.get(writer, ()), *readers)))
    return found


def compile_calls(
    program: Program,
    ops: tuple[int, ...],
    params: dict[int, Tensor],
    gradients: dict[int, Tensor],
    device: torch.device,
) -> dict[int, Call]:
    """A Python function per operator that reads and writes a list of tensors ``[T]``.

    Generated source costs one call and one list access per tensor; filling argument templates
    at run time costs several microseconds per operator. ``params`` are the parameters on this
    device; ``device`` takes the place of every ``torch.device`` constant. An operator that makes
    the gradient of a parameter adds it to ``gradients``; new values of buffers are written back.
    """
    written: dict[int, list[tuple[Tensor, str]]] = {}
    for p, t in program.gradients:
        if p in gradients:
            written.setdefault(t, []).append((gradients[p], "add_"))
    for p, t in program.new_buffers:
        if p in params:
            written.setdefault(t, []).append((params[p], "copy_"))
    names: dict[str, Any] = {}

    def bind(value: Any) -> str:
        names[name := f"k{len(names)}"] = value
        return name

    def source(template: Any) -> str:
        if isinstance(template, Ref):
            return f"e[{template.tensor}]"
        if isinstance(template, Param):
            return bind(params[template.index])
        if isinstance(template, torch.device):
            return bind(device)
        if isinstance(template, list | tuple) and any(
            isinstance(x, Ref | Param | torch.device) for x in leaves_of(template)
        ):
            items = "".join(source(x) + "," for x in template)
            return f"[{items}]" if isinstance(template, list) else f"({items})"
        return bind(template)

    lines = []
    for op in ops:
        step = program.steps[op]
        arguments = [source(x) for x in step.args]
        arguments += [f"{k}={source(x)}" for k, x in step.kwargs.items()]
        call = f"{bind(step.target)}({', '.join(arguments)})"
        lines.append(f"def op{op}(e):")
        if not step.outputs:
            lines.append(f"    {call}")
        elif not step.multi:
            lines.append(f"    e[{step.outputs[0]}] = {call}")
        else:
            lines.append(f"    v = {call}")
            for tensor, index in zip(step.outputs, step.output_index, strict=True):
                lines.append(f"    e[{tensor}] = v[{index}]")
        for tensor in step.outputs:
            for kept, how in written.get(tensor, ()):
                lines.append(f"    {bind(kept)}.{how}(e[{tensor}])")
    exec("\n".join(lines), names)
    return {op: names[f"op{op}"] for op in ops}


def _rows(values: np.ndarray[Any, Any], ptr: np.ndarray[Any, Any]) -> list[tuple[int, ...]]:
    flat, at = values.tolist(), ptr.tolist()
    return [tuple(flat[at[i] : at[i + 1]]) for i in range(len(at) - 1)]
