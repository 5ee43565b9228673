"""The training step of a module as an operator graph: forward, backward, gradients.

**One operator of the graph is one call of the module's forward, or its backward.** The kernels
of a call that autograd splits (``linear`` is a transpose and a matrix product) stay together. A
stored activation is a tensor that a backward operator reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from placement.capturing.builder import Builder
from placement.capturing.errors import module_path
from placement.capturing.exported import (
    argument_names,
    check_static,
    export,
    is_random,
    signature_of,
)
from placement.capturing.joint import Joint, loss_of, trace_step
from placement.capturing.pieces import Piece, compile_piece, cut, results_of, root_of
from placement.capturing.recompute import recompute
from placement.capturing.replay import replayed
from placement.graph import OpGraph
from placement.program import (
    CaptureError,
    InputError,
    Param,
    Program,
    Ref,
    Step,
    input_spec,
    inputs_from_spec,
    split_inputs,
    split_item,
)

TARGET = "target"  # the name of the loss function's second argument among the inputs


class WithLoss(nn.Module):
    """``loss(module(inputs), target)``; positional inputs, keyword inputs and target in a row."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any], keywords: tuple[str, ...]):
        super().__init__()
        self.module = module
        self._loss = loss
        self._keywords = keywords

    def _get_name(self) -> str:
        return f"{self.module._get_name()} with its loss"

    def forward(self, *values: Any) -> Any:
        num_args = len(values) - 1 - len(self._keywords)
        named = dict(zip(self._keywords, values[num_args:-1], strict=True))
        return self._loss(self.module(*values[:num_args], **named), values[-1])


def capture_training(
    module: nn.Module,
    example_inputs: Any,
    *,
    name: str | None,
    loss: Callable[..., Any] | None,
    optimizer: torch.optim.Optimizer | None,
    colocate_backward: bool,
    split_backward: bool,
    blocks: Sequence[str],
) -> OpGraph:
    """See ``placement.capture``."""
    inputs, target = split_example(example_inputs) if loss else (example_inputs, None)
    args, kwargs = split_inputs(inputs)
    spec = input_spec(inputs)
    arg_names, input_names = argument_names(module, args, kwargs)
    values = [*args, *kwargs.values()]
    if loss is None:
        whole, positional, named = module, args, kwargs
    else:
        if TARGET in (*arg_names, *input_names):
            raise CaptureError(
                f"the module has an argument {TARGET!r}, which is what the second argument of the "
                "loss function is called: rename it, or let the module return its loss (loss=None)"
            )
        values.append(target)
        input_names = (*input_names, TARGET)
        spec["kwargs"] |= input_spec({TARGET: target})["kwargs"]
        whole, positional, named = WithLoss(module, loss, tuple(kwargs)), tuple(values), {}
        whole.training = module.training  # not train(): submodules keep their own
    prefix = "module." if loss else ""
    with replayed(module) as replays:
        exported = export(whole, positional, named, training=True, prefix=prefix)
    leaves = pytree.tree_leaves(values)
    check_static([n for n in exported.graph.nodes if n.op == "call_function"])
    joint = trace_step(exported, module, leaves, optimizer, split_backward, replays)
    paths = [f"{module_path(x)}.".removeprefix(prefix).removesuffix(".") for x in joint.calls]
    pieces = recompute(joint, cut(joint, split_backward), paths, blocks)
    builder = _Builder(joint, pieces, paths, colocate_backward)
    # A gradient accumulator and the optimizer's state live where the gradient is added up.
    held = [builder.params[p] for p, _ in builder.gradients]
    state = [x.numel() * x.element_size() + state_bytes(optimizer, x) for x in held]
    made_at = [builder.tensor_src[t] for _, t in builder.gradients]
    return builder.graph(
        name or type(module).__name__,
        values,
        input_names,
        keepers=[*zip(made_at, state, strict=True)],
        input_tensors=tuple(range(joint.num_inputs)),
        arg_names=arg_names,
        input_spec=spec,
        output_leaves=(Ref(builder.loss),),
        out_tree=pytree.tree_structure(0),
        gradients=tuple(builder.gradients),
        new_buffers=tuple(builder.new_buffers),
        has_target=loss is not None,
        optimizer=None if optimizer is None else type(optimizer).__name__,
        is_random=any(is_random(node) for node in joint.kernels),
        state_names=tuple(name.removeprefix(prefix) for name in exported.state_dict),
    )


def split_example(example: Any) -> tuple[Any, Any]:
    """``(inputs, target)`` of an example for training with a loss function.

    Raises:
        CaptureError: it is not a pair.
    """
    if isinstance(example, tuple | list) and len(example) == 2:
        return example[0], example[1]
    raise CaptureError(
        "with a loss function an example is a pair (inputs, target), as a data loader gives it, "
        f"and the loss is loss(module(inputs), target); got {type(example).__name__}"
    )


def flatten_example(program: Program, example: Any) -> list[Tensor]:
    """The tensors of a micro-batch, given like the example that the step was captured with.

    Raises:
        InputError: it is unlike that example.
    """
    has_target = program.has_target
    try:
        inputs, target = split_example(example) if has_target else (example, None)
        args, kwargs = split_item(inputs)
    except CaptureError as error:
        raise InputError(str(error)) from None
    return program.flatten_inputs(args, {**kwargs, TARGET: target} if has_target else kwargs)


def example_from_spec(spec: Mapping[str, Any]) -> Any:
    """A pair for a loss function like the one whose ``Program.input_spec`` is given.

    Raises:
        InputError: the specification is damaged, or has no target.
    """
    args, kwargs = inputs_from_spec(spec)
    if TARGET not in kwargs:
        raise InputError("the plan is of a module that returns its loss: leave loss out")
    target = kwargs.pop(TARGET)
    return (args, kwargs), target


def plain_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[Any],
    loss: Callable[..., Any] | None,
) -> Tensor:
    """What a step means: plain PyTorch on the same micro-batches; their losses, ``[M]``."""
    losses = []
    for example in microbatches:
        inputs, target = split_example(example) if loss else (example, None)
        args, kwargs = split_item(inputs)
        outputs = module(*args, **kwargs)
        value = loss_of(loss(outputs, target) if loss else outputs)
        value.backward()
        losses.append(value.detach().reshape(()))
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if p.grad is not None:
            p.grad /= len(microbatches)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses)


def mean_of_outputs(outputs: Any, target: Any = None) -> Tensor:
    """The mean of all floating-point outputs: a stand-in where only the work counts, not what
    is learned."""
    tensors = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    tensors = [x.mean() for x in tensors if x.is_floating_point()]
    if not tensors:
        raise CaptureError("the module has no floating-point output to make a loss of")
    return torch.stack(tensors).mean()


def state_bytes(optimizer: torch.optim.Optimizer | None, param: Tensor) -> int:
    """Bytes that ``optimizer`` keeps for ``param`` after a step, found out on a tiny stand-in.

    Raises:
        CaptureError: the optimizer cannot take such a step.
    """
    group = (
        next((g for g in optimizer.param_groups if any(x is param for x in g["params"])), None)
        if optimizer is not None
        else None
    )
    if group is None:
        return 0
    small = nn.Parameter(torch.zeros((2,) * param.dim(), dtype=param.dtype))
    small.grad = torch.zeros_like(small)
    try:
        probe = optimizer_like(optimizer, [{**group, "params": [small]}])
        probe.step()
    except CaptureError:
        raise
    except Exception as error:  # each optimizer has its own conditions
        raise CaptureError(
            f"{type(optimizer).__name__} cannot train one parameter by itself from its gradient "
            f"({type(error).__name__}: {error}): use another optimizer, e.g. torch.optim.AdamW"
        ) from error
    state = [x for x in probe.state[small].values() if isinstance(x, Tensor)]
    each = sum(x.element_size() for x in state if x.shape == small.shape)
    fixed = sum(x.numel() * x.element_size() for x in state if x.shape != small.shape)
    return each * param.numel() + fixed


def optimizer_like(optimizer: Any, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the same class, with the same attributes, for other parameters.

    Its class need not be callable with ``lr``; the groups hold all settings.

    Raises:
        CaptureError: it keeps parameters, or another optimizer, beside its groups.
    """
    new: Any = object.__new__(type(optimizer))
    # The rest is made anew; a learning-rate scheduler puts a ``step`` of this optimizer there.
    skipped = {"step", "state", "param_groups", "defaults"}
    attributes = {k: v for k, v in vars(optimizer).items() if k not in skipped}
    for k, v in attributes.items():
        if any(isinstance(x, torch.optim.Optimizer | nn.Parameter) for x in pytree.tree_leaves(v)):
            raise CaptureError(
                f"{type(optimizer).__name__} keeps parameters beside its groups (in {k!r}), and "
                "would change these, not those of a device: use another optimizer, e.g. "
                "torch.optim.AdamW"
            )
    new.__dict__.update(attributes)
    torch.optim.Optimizer.__init__(new, groups, optimizer.defaults)
    return new  # type: ignore[no-any-return]


def looks_at_all(optimizer: torch.optim.Optimizer) -> bool:
    """Whether what it does to a parameter depends on another's gradient; found out on stand-ins."""
    each = [(group, x) for group in optimizer.param_groups for x in group["params"]][:2]

    def after(*numbers: int) -> list[Tensor]:
        params = [stand_in(each[i][1]) for i in numbers]
        mine: dict[int, list[nn.Parameter]] = {}  # by group, of which two may be of one
        for i, x in zip(numbers, params, strict=True):
            mine.setdefault(id(each[i][0]), []).append(x)
        groups = [{**g, "params": mine[id(g)]} for g in optimizer.param_groups if id(g) in mine]
        small = optimizer_like(optimizer, groups)
        for _ in range(2):
            for x, i in zip(params, numbers, strict=True):
                x.grad = 10.0 ** (2 * i) * torch.arange(1, x.numel() + 1).reshape(x.shape).to(x)
            small.step()
        return [x.detach() for x in params]

    def stand_in(param: Tensor) -> nn.Parameter:
        return nn.Parameter(torch.ones((2,) * param.dim(), dtype=param.dtype))

    try:
        together, again = after(*range(len(each))), after(*range(len(each)))
        alone = [x for i in range(len(each)) for x in after(i)]
    except CaptureError:
        raise
    except Exception:  # what it cannot do, it says when it steps
        return False
    is_random = not all(map(torch.equal, together, again))
    return not is_random and not all(map(torch.allclose, together, alone))


class _Builder(Builder):
    """Numbers operators, tensors and parameters of a joint graph."""

    def __init__(
        self, joint: Joint, pieces: list[Piece], paths: Sequence[str], colocate_backward: bool
    ) -> None:
        super().__init__()
        self._joint, self._paths = joint, paths
        self._param_at: dict[int, int] = {}
        self._value: dict[fx.Node, Ref | Param] = {}
        for node, source in joint.source.items():
            if isinstance(source, Ref):
                self._value[node] = Ref(self.add_tensor(-1, node))
        self._number: dict[Piece, int] = {}
        names: Counter[str] = Counter()
        for piece, results in zip(pieces, results_of(joint, pieces), strict=True):
            self._add(piece, results, names)
        number = {
            node: value.tensor for node, value in self._value.items() if isinstance(value, Ref)
        }
        self.loss = number[joint.loss]
        self.gradients = [(self._param(p), number[n]) for p, n in joint.gradients]
        self.new_buffers = [(self._param(p), number[n]) for p, n in joint.new_buffers]
        self.is_backward = [piece.is_late for piece in pieces]
        self.group = self._groups([piece.first or piece for piece in pieces], colocate_backward)

    def _add(self, piece: Piece, results: list[fx.Node], names: Counter[str]) -> None:
        n = self._number[piece] = len(self.steps)
        function, operands = compile_piece(piece.kernels, results)
        args = [self._source(x) for x in operands]
        outputs = []
        for result in results:
            base = self._value.get(root_of(result))
            root = base.tensor if isinstance(base, Ref) else None
            outputs.append(self.add_tensor(n, result, root))
            self._value[result] = Ref(outputs[-1])
        inputs = (torch.device("cpu"), *args)
        index = tuple(range(len(outputs)))
        step = Step(function, inputs, {}, tuple(outputs), len(outputs) != 1, index)
        name, *about = self._names(piece)
        names[name] += 1
        again = names[name]
        if piece.first is not None:
            self.add_step(step, f"{name}{again if again > 1 else ''}", *about)
            # Who runs again reads what the step found in a buffer, not what it leaves there.
            changed = {self._param_at.get(i) for i, _ in self._joint.new_buffers}
            self.param_uses = [x for x in self.param_uses if x[0] != n or x[1] not in changed]
        elif again > 1:
            kind, path, text = about
            self.add_step(step, f"{name}_part{again}", kind, path, f"{text} part {again}")
        else:
            self.add_step(step, name, *about)
        if piece.after is not None:
            waits_for = self._value[piece.after]
            assert isinstance(waits_for, Ref), "gradients are made before they are waited for"
            self.uses.append((waits_for.tensor, n))

    def _names(self, piece: Piece) -> tuple[str, str, str, str]:
        """Name, kind, module and signature."""
        if piece.first is not None:
            n = self._number[piece.first]
            kind, path, text = self.op_kind[n], self.op_module[n], self.op_signature[n]
            return f"{self.op_name[n]}_again", kind, path, text
        node, suffix = self._joint.calls[piece.call], piece.suffix
        text = signature_of(node)
        if suffix:
            text = f"{suffix.strip('_').replace('_', ' ')} of {text}"
        return f"{node.name}{suffix}", f"{node.target}{suffix}", self._paths[piece.call], text

    def _source(self, node: fx.Node) -> Ref | Param:
        if node not in self._value:
            source = self._joint.source[node]
            assert isinstance(source, Param), "tensors are made before they are read"
            self._value[node] = Param(self._param(source.index))
        return self._value[node]

    def _param(self, i: int) -> int:
        """The number of a parameter among those that the graph uses."""
        if i not in self._param_at:
            self._param_at[i] = len(self.params)
            self.params.append(self._joint.params[i])
            self.param_names.append(self._joint.param_names[i])
        return self._param_at[i]

    def _groups(self, pieces: list[Piece], colocate_backward: bool) -> list[int]:
        """A call, its backward and what runs again together; buffers' readers with their writers.

        Who reads the old value of a buffer comes before who writes the new one: an edge says so.
        """
        first: dict[Any, int] = {}
        group = [
            first.setdefault(x.call if colocate_backward else (x.call, x.suffix), n)
            for n, x in enumerate(pieces)
        ]
        for p, tensor in self.new_buffers:
            writer = self.tensor_src[tensor]
            self.param_uses.append((writer, p))
            for op in [op for op, q in self.param_uses if q == p]:
                old, new = group[op], group[writer]
                group = [new if g == old else g for g in group]
                if op > writer:
                    raise CaptureError(
                        f"{self.op_name[op]!r} reads the buffer {self.param_names[p]!r} while "
                        f"{self.op_name[writer]!r} writes it: read a copy (x = x.clone())"
                    )
                if op < writer:
                    self.uses.append((self.steps[op].outputs[0], writer))
        return group
