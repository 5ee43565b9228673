"""One device's share of a placed program: what it runs, keeps, sends and hands back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from placement.executor.constants import is_known, with_constants
from placement.graph import OpGraph
from placement.program import Param, Program, Ref, leaves_of

if TYPE_CHECKING:
    from placement.executor.streamed import Streamed

# Arguments that PyTorch's own functions take in another form, or read another default of: their
# parser takes the mean, the default of losses, for 0, no reduction.
_OPTIONS = ("dtype", "layout", "device", "memory_format", "generator", "reduction")
Call = Callable[[list[Any], Callable[[], bool]], Iterator[int] | None]

_LATE_BYTES = 2**20  # of gradients and buffers in a run, which are written together: one launch


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
        returning: tensors sent here that depend on something this device has sent.
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
    returning: frozenset[int]


def shares(graph: OpGraph, placement: np.ndarray[Any, Any], num_devices: int) -> list[Share]:
    """The share of every device; pure."""
    place = placement.tolist()
    sources = graph.tensor_src.tolist()
    made_at = [place[s] if s >= 0 else -1 for s in sources]
    inputs = _rows(graph.in_tensor, graph.in_ptr)
    outputs = _rows(graph.out_tensor, graph.out_ptr)
    consumers = _rows(graph.use_dst, graph.use_ptr)
    leaves = set(graph.output_tensor.tolist())
    carried = carried_operators(graph)
    passed = [0] * graph.num_ops  # a bit for each device of an operator and those before it
    for op, read in enumerate(inputs):
        passed[op] = 1 << place[op]
        for t in read:
            if sources[t] >= 0:
                passed[op] |= passed[sources[t]]
    by_device = []
    for d in range(num_devices):
        users = [tuple(op for op in ops if place[op] == d) for ops in consumers]
        by_device.append(
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
                returning=frozenset(
                    t
                    for t, readers in enumerate(users)
                    if readers and made_at[t] not in (-1, d) and passed[sources[t]] >> d & 1
                ),
            )
        )
    return by_device


def carried_operators(graph: OpGraph) -> dict[int, tuple[int, ...]]:
    """Operator that writes a buffer -> operators that read it in the next micro-batch."""
    carried: dict[int, tuple[int, ...]] = {}
    for param, tensor in graph.program.new_buffers if graph.program is not None else ():
        writer = int(graph.tensor_src[tensor])
        readers = graph.param_use_op[graph.param_use == param].tolist()
        carried[writer] = tuple(dict.fromkeys((*carried.get(writer, ()), *readers)))
    return carried


def runs_of(share: Share, priority: Sequence[int]) -> list[tuple[int, ...]]:
    """The operators of a device in order of ``priority``, cut into runs that need no look around.

    All that other devices send to a run is read by its first operator, and only its last makes
    something that they read. The order is topological over all devices, so runs can wait
    for each other in no circle. What comes back may be late because this device is: all operators
    of a run wait, through others here, for the same of it (and for the same writers of buffers in
    the micro-batch before), so that none is held up that could bring on what others wait for.
    """
    outputs = {t for op in share.ops for t in share.outputs[op]}
    leaving = {t for t in outputs if share.peers[t]}  # results of the model can wait for the rest
    here = outputs | set(share.model_inputs)
    # A bit for everything that comes back, and those of each tensor and operator.
    of_tensor = {t: 1 << i for i, t in enumerate(sorted(share.returning))}
    of_op = dict.fromkeys(share.ops, 0)
    for i, (writer, readers) in enumerate(share.carried.items(), len(of_tensor)):
        for op in readers:  # itself it waits for in any run
            of_op[op] |= (op != writer) << i
    runs: list[list[int]] = []
    closed = True
    for op in sorted(share.ops, key=priority.__getitem__):
        for t in share.inputs[op]:
            of_op[op] |= of_tensor.get(t, 0)
        of_tensor |= dict.fromkeys(share.outputs[op], of_op[op])
        if (
            closed
            or of_op[op] != of_op[runs[-1][0]]
            or any(t not in here and t not in share.inputs[runs[-1][0]] for t in share.inputs[op])
        ):
            runs.append([])
        runs[-1].append(op)
        closed = not leaving.isdisjoint(share.outputs[op])
    return [tuple(run) for run in runs]


def fused(share: Share, runs: Sequence[tuple[int, ...]]) -> Share:
    """The share with each run as one operator, by the number of its first."""
    first = {op: run[0] for run in runs for op in run}
    made_in = {t: first[op] for op in share.ops for t in share.outputs[op]}
    users = [
        tuple(dict.fromkeys(first[op] for op in ops if first[op] != made_in.get(t)))
        for t, ops in enumerate(share.users)
    ]
    inputs, outputs, num_inputs = list(share.inputs), list(share.outputs), list(share.num_inputs)
    for run in runs:
        head, own = run[0], {t for op in run for t in share.outputs[op]}
        read = dict.fromkeys(t for op in run for t in share.inputs[op] if t not in own)
        inputs[head] = tuple(read)
        num_inputs[head] = max(1, len(read))
        outputs[head] = tuple(
            t
            for op in run
            for t in share.outputs[op]
            if users[t] or share.peers[t] or share.results[t]
        )
    carried: dict[int, tuple[int, ...]] = {}
    for op, readers in share.carried.items():
        ours = (*carried.get(first[op], ()), *(first[r] for r in readers))
        carried[first[op]] = tuple(dict.fromkeys(ours))
    return replace(
        share,
        ops=tuple(run[0] for run in runs),
        num_inputs=num_inputs,
        inputs=inputs,
        outputs=outputs,
        users=users,
        num_uses=[len(x) for x in users],
        sources=tuple(run[0] for run in runs if not inputs[run[0]]),
        carried=carried,
    )


@dataclass(frozen=True)
class Compiled:
    """Runs of operators as Python functions.

    Attributes:
        calls: by the first operator of a run; reads and writes a list of tensors ``[T]``. What a
            run of several returns is iterated to its end: it stops before an operator, and gives
            its number, where its second argument (whether nothing has arrived) says no.
        op_at: which operator a line of the generated source belongs to.
        num_ops: of each run, by its first.
    """

    calls: dict[int, Call]
    op_at: list[int]
    num_ops: dict[int, int]

    def failed_op(self, error: BaseException, op: int) -> int:
        """Which operator of the run that begins with ``op`` raised ``error``."""
        at = error.__traceback__
        while at is not None:
            if at.tb_frame.f_code is self.calls[op].__code__:
                return self.op_at[at.tb_lineno - 1]
            at = at.tb_next
        return op


def compile_runs(
    program: Program,
    runs: Sequence[tuple[int, ...]],
    share: Share | None,
    params: dict[int, Tensor],
    gradients: dict[int, Tensor],
    device: torch.device,
    marks: tuple[list[Any], Callable[[], Any]] | None = None,
    streamed: Mapping[int, Streamed] | None = None,
    known: Mapping[int, Tensor] | None = None,
) -> Compiled:
    """A Python function per run of operators.

    Generated source costs one call and one list access per tensor; filling argument templates
    at run time costs several microseconds per operator, and so does a look around between two: a
    run only asks whether something has arrived. With the ``share`` of the device, what only one
    run reads stays in its local variables, and is dropped after its last reader; without, every
    tensor is left in the list. ``params`` are the parameters on this device;
    ``device`` takes the place of every ``torch.device`` constant. What operators make that is the
    gradient of a parameter is added to ``gradients``; new values of buffers are written back.
    With ``marks``, a list and a clock, each operator adds its number and the time of its end.
    Operators of ``streamed`` get their parameters from there. Tensors that are ``known`` are not
    computed (see ``constants``).
    """
    written: dict[int, list[tuple[Tensor, Callable[..., Any]]]] = {}
    for p, t in program.gradients:
        if p in gradients:
            written.setdefault(t, []).append((gradients[p], torch._foreach_add_))
    for p, t in program.new_buffers:
        if p in params:
            written.setdefault(t, []).append((params[p], torch._foreach_copy_))
    names: dict[str, Any] = {}
    streamed, known = streamed or {}, known or {}
    come: Sequence[int] = ()  # parameters of the operator that is written, by their place
    if marks is not None:
        names["marks"], names["mark"] = marks
    local: set[int] = set()

    def bind(value: Any) -> str:
        names[name := f"k{len(names)}"] = value
        return name

    def name(tensor: int) -> str:
        return f"t{tensor}" if tensor in local else f"e[{tensor}]"

    def leaf(template: Any) -> str:
        if isinstance(template, Ref):
            return name(template.tensor)
        if isinstance(template, Param) and template.index in come:
            return f"p[{come.index(template.index)}]"
        if isinstance(template, Param):
            return bind(params[template.index])
        return bind(device if isinstance(template, torch.device) else template)

    lines: list[str] = []
    op_at: list[int] = []
    made_at = {t: op for run in runs for op in run for t in program.steps[op].outputs}
    for run in runs:
        dropped: dict[int, list[int]] = {}
        if share is not None:
            local = set()
            last = {t: op for op in run for t in (*share.inputs[op], *share.outputs[op])}
            for t, op in last.items():
                if share.peers[t] or share.results[t] or not set(share.users[t]).issubset(run):
                    continue
                if made_at.get(t) in run:
                    local.add(t)
                dropped.setdefault(op, []).append(t)
        lines.append(f"def op{run[0]}(e, nothing_arrived):")
        op_at.append(run[0])
        late: dict[Any, list[tuple[Tensor, int]]] = {}  # what is to be written
        drops: list[int] = []
        for op in run:
            step, source = with_constants(program.steps[op], known), streamed.get(op)
            come = () if source is None else source.reads[op]
            arguments = [_source(x, leaf) for x in step.args]
            arguments += [f"{k}={_source(x, leaf)}" for k, x in step.kwargs.items()]
            call = f"{bind(quickest(step.target))}({', '.join(arguments)})"
            if source is not None:
                call = f"{bind(source.own)}({call})"
            if is_known(step, known):
                body = [f"{name(t)} = {bind(known[t])}" for t in step.outputs]
            elif not step.outputs:
                body = [call]
            elif not step.multi:
                body = [f"{name(step.outputs[0])} = {call}"]
            else:
                body = [f"v = {call}"]
                for tensor, index in zip(step.outputs, step.output_index, strict=True):
                    body.append(f"{name(tensor)} = v[{index}]")
                body.append("del v")
            if source is not None:
                body = [f"p = {bind(source.take)}({op})", *body, f"{bind(source.give_back)}({op})"]
            for tensor in step.outputs:
                for destination, how in written.get(tensor, ()):
                    late.setdefault((how, destination.dtype), []).append((destination, tensor))
            if op == run[-1] or sum(x.nbytes for v in late.values() for x, _ in v) > _LATE_BYTES:
                for (how, _), pairs in late.items():
                    values = ", ".join(name(t) for _, t in pairs)
                    body.append(f"{bind(how)}({bind([x for x, _ in pairs])}, [{values}])")
                late.clear()
            stay = {t for pairs in late.values() for _, t in pairs}
            drops += dropped.get(op, ())
            body += [f"{name(t)} = None" for t in drops if t not in stay]
            drops = [t for t in drops if t in stay]
            if marks is not None:  # a flat list: tuples would keep the garbage collector busy
                body += [f"marks.append({op})", "marks.append(mark())"]
            if op != run[0]:
                body.insert(0, f"if not nothing_arrived(): yield {op}")
            lines += [f"    {line}" for line in body]
            op_at += [op] * len(body)
    exec(compile("\n".join(lines), "<operators>", "exec"), names)
    # A function that its own globals name would keep the parameters until cycles are collected.
    calls = {run[0]: names.pop(f"op{run[0]}") for run in runs}
    return Compiled(calls, op_at, {run[0]: len(run) for run in runs})


@cache
def quickest(target: Any) -> Any:
    """The operator as PyTorch's own function of that name, where there is one that takes the same.

    It finds its operator without asking schemas: a microsecond less, as long as some kernels.
    """
    if type(target) is not OpOverload or target.namespace != "aten":
        return target
    if any(x.name in _OPTIONS for x in target._schema.arguments):
        return target
    name, own = target._schema.name.removeprefix("aten::"), target._overloadname
    packet = target.overloadpacket
    others = [getattr(packet, other) for other in packet.overloads() if other != own]
    if own != "default" and _needed(target) in map(_needed, others):
        return target  # only arguments that may be left out tell which of them is meant
    for home in (torch._C._VariableFunctions, torch._C._nn, Tensor):
        function = getattr(home, name, None)
        if isinstance(function, BuiltinFunctionType | MethodDescriptorType):
            return function
    return target


def _needed(target: OpOverload) -> list[str]:
    """Types of the arguments that an operator cannot do without."""
    return [str(x.type) for x in target._schema.arguments if not x.has_default_value()]


def _source(template: Any, leaf: Callable[[Any], str]) -> str:
    """An argument as source, its leaves written by ``leaf``."""
    if isinstance(template, list | tuple) and any(
        isinstance(x, Ref | Param | torch.device) for x in leaves_of(template)
    ):
        items = "".join(_source(x, leaf) + "," for x in template)
        return f"[{items}]" if isinstance(template, list) else f"({items})"
    return leaf(template)


def _rows(values: np.ndarray[Any, Any], ptr: np.ndarray[Any, Any]) -> list[tuple[int, ...]]:
    flat, at = values.tolist(), ptr.tolist()
    return [tuple(flat[at[i] : at[i + 1]]) for i in range(len(at) - 1)]
