"""Runs of operators as Python functions, which are generated as source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import BuiltinFunctionType, MethodDescriptorType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from placement.executor.constants import is_known, with_constants
from placement.executor.share import Share
from placement.program import Param, Program, Ref, Step, leaves_of

if TYPE_CHECKING:
    from placement.executor.streamed import Streamed

# Arguments that PyTorch's own functions take in another form, or read another default of: their
# parser takes the mean, the default of losses, for 0, no reduction; and no None in a list.
_OPTIONS = ("dtype", "layout", "device", "memory_format", "generator", "reduction")
_GAPS = "List[Optional[Tensor]]"
Call = Callable[[list[Any], Callable[[], bool]], Iterator[int] | None]


@dataclass(frozen=True)
class Generated:
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
        at, own = error.__traceback__, getattr(self.calls[op], "__code__", None)
        while at is not None:
            if at.tb_frame.f_code is own:
                return self.op_at[at.tb_lineno - 1]
            at = at.tb_next
        return op


def generate(
    program: Program,
    runs: Sequence[tuple[int, ...]],
    share: Share | None,
    params: dict[int, Tensor],
    gradients: dict[int, Tensor],
    device: torch.device,
    marks: tuple[list[Any], Callable[[], Any]] | None = None,
    streamed: Mapping[int, Streamed] | None = None,
    known: Mapping[int, Tensor] | None = None,
) -> Generated:
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
    writer = _Writer(program, params, device, streamed or {}, known or {})
    if marks is not None:
        writer.names["marks"], writer.names["mark"] = marks
    written: dict[int, list[tuple[Tensor, Callable[..., Any]]]] = {}
    for p, t in program.gradients:
        if p in gradients:
            written.setdefault(t, []).append((gradients[p], torch._foreach_add_))
    for p, t in program.new_buffers:
        if p in params:
            written.setdefault(t, []).append((params[p], torch._foreach_copy_))
    lines: list[str] = []
    op_at: list[int] = []
    for run in runs:
        dropped = {} if share is None else writer.keep_local(run, share)
        lines.append(f"def op{run[0]}(e, nothing_arrived):")
        op_at.append(run[0])
        late: dict[Any, list[tuple[Tensor, int]]] = {}  # to be written, 1 MiB at a launch
        drops: list[int] = []
        for op in run:
            body = [] if op == run[0] else [f"if not nothing_arrived(): yield {op}"]
            body += writer.operator(op)
            for tensor in program.steps[op].outputs:
                for destination, how in written.get(tensor, ()):
                    late.setdefault((how, destination.dtype), []).append((destination, tensor))
            if op == run[-1] or sum(x.nbytes for v in late.values() for x, _ in v) > 2**20:
                body += [writer.written(how, pairs) for (how, _), pairs in late.items()]
                late.clear()
            stay = {t for pairs in late.values() for _, t in pairs}
            drops += dropped.get(op, ())
            body += [f"{writer.name(t)} = None" for t in drops if t not in stay]
            drops = [t for t in drops if t in stay]
            if marks is not None:  # a flat list: tuples would keep the garbage collector busy
                body += [f"marks.append({op})", "marks.append(mark())"]
            lines += [f"    {line}" for line in body]
            op_at += [op] * len(body)
    names = writer.names
    exec(compile("\n".join(lines), "<operators>", "exec"), names)
    # A function that its own globals name would keep the parameters until cycles are collected.
    calls = {run[0]: names.pop(f"op{run[0]}") for run in runs}
    return Generated(calls, op_at, {run[0]: len(run) for run in runs})


@dataclass
class _Writer:
    """Operators as source, of which ``names`` are the globals; arguments as ``generate``'.

    Tensors are in the list ``e``, those of ``local`` in variables of the function.
    """

    program: Program
    params: Mapping[int, Tensor]
    device: torch.device
    streamed: Mapping[int, Streamed]
    known: Mapping[int, Tensor]

    def __post_init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.local: set[int] = set()

    def keep_local(self, run: tuple[int, ...], share: Share) -> dict[int, list[int]]:
        """What no other run reads is local where this one makes it; what is dropped after whom."""
        own = {t for op in run for t in self.program.steps[op].outputs}
        last = {t: op for op in run for t in (*share.inputs[op], *share.outputs[op])}
        self.local, dropped = set(), dict[int, list[int]]()
        for t, op in last.items():
            if share.peers[t] or share.results[t] or not set(share.users[t]).issubset(run):
                continue
            if t in own:
                self.local.add(t)
            dropped.setdefault(op, []).append(t)
        return dropped

    def operator(self, op: int) -> list[str]:
        """The statements that run it."""
        step, source = with_constants(self.program.steps[op], self.known), self.streamed.get(op)
        if is_known(step, self.known):
            return [f"{self.name(t)} = {self._bind(self.known[t])}" for t in step.outputs]
        come = () if source is None else source.reads[op]
        arguments = [self._argument(x, come) for x in step.args]
        arguments += [f"{k}={self._argument(x, come)}" for k, x in step.kwargs.items()]
        call = f"{self._bind(quickest(step.target))}({', '.join(arguments)})"
        if source is None:
            return self._assigned(step, call)
        take, own, back = map(self._bind, (source.take, source.own, source.give_back))
        return [f"p = {take}({op})", *self._assigned(step, f"{own}({call})"), f"{back}({op})"]

    def _assigned(self, step: Step, call: str) -> list[str]:
        if not step.outputs:
            return [call]
        if not step.multi:
            return [f"{self.name(step.outputs[0])} = {call}"]
        each = zip(step.outputs, step.output_index, strict=True)
        return [f"v = {call}", *(f"{self.name(t)} = v[{i}]" for t, i in each), "del v"]

    def written(self, how: Callable[..., Any], pairs: Sequence[tuple[Tensor, int]]) -> str:
        """The statement that adds or copies values to tensors of one dtype."""
        values = ", ".join(self.name(t) for _, t in pairs)
        return f"{self._bind(how)}({self._bind([x for x, _ in pairs])}, [{values}])"

    def name(self, tensor: int) -> str:
        return f"t{tensor}" if tensor in self.local else f"e[{tensor}]"

    def _bind(self, value: Any) -> str:
        self.names[name := f"k{len(self.names)}"] = value
        return name

    def _argument(self, template: Any, come: Sequence[int]) -> str:
        """``come``: parameters of the operator that are streamed, by their place in ``p``."""
        if isinstance(template, list | tuple) and any(
            isinstance(x, Ref | Param | torch.device) for x in leaves_of(template)
        ):
            items = "".join(self._argument(x, come) + "," for x in template)
            return f"[{items}]" if isinstance(template, list) else f"({items})"
        if isinstance(template, Ref):
            return self.name(template.tensor)
        if isinstance(template, Param) and template.index in come:
            return f"p[{come.index(template.index)}]"
        if isinstance(template, Param):
            return self._bind(self.params[template.index])
        return self._bind(self.device if isinstance(template, torch.device) else template)


@cache
def quickest(target: Any) -> Any:
    """The operator as PyTorch's own function of that name, where there is one that takes the same.

    It finds its operator without asking schemas: a microsecond less, as long as some kernels.
    """
    if type(target) is not OpOverload or target.namespace != "aten":
        return target
    if any(x.name in _OPTIONS or str(x.type) == _GAPS for x in target._schema.arguments):
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
