"""From a PyTorch module to an operator graph, and the program that runs the graph."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from placement.exported import (
    CaptureError,
    calls_of,
    check_static,
    describe,
    dtype_name,
    export,
    first_transformed,
    first_unsafe,
    functionalise,
    is_random,
    leaves_of,
    module_path,
    node_line,
    signature_of,
    storage_of,
)
from placement.graph import OpGraph
from placement.numerics import check_numbers


class InputError(ValueError):
    """The inputs of a call are not those the program was captured for."""


@dataclass(frozen=True)
class Ref:
    """In a template: graph tensor number ``tensor``."""

    tensor: int


@dataclass(frozen=True)
class Param:
    """In a template: ``program.params[index]``."""

    index: int


@dataclass(frozen=True, eq=False)
class Step:
    """One operator call.

    Attributes:
        target: the operator, e.g. ``torch.ops.aten.linear.default``.
        args, kwargs: its arguments, with ``Ref`` and ``Param`` in the place of tensors, at any
            depth of lists, tuples and dicts. A ``torch.device`` among them is the one the module
            was captured on: whoever runs the step elsewhere puts the device there.
        outputs: graph tensors that the call produces; unused elements of a tuple are left out.
        multi: whether the call returns a tuple or list, of which
        output_index: ``outputs[i]`` is element ``output_index[i]``.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    multi: bool
    output_index: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """What executes an ``OpGraph`` with ``N`` operators and ``P`` parameters.

    Attributes:
        steps: ``[N]`` operator calls; step ``n`` is operator ``n``.
        params: ``[P]`` the module's own parameters, buffers and constants (not copies).
        param_names: ``[P]`` the first name of each in the module.
        state_names: all names of the module's ``state_dict``, also those of what nobody reads.
        input_tensors: graph tensor numbers of the tensors among the inputs, in input order.
        input_names: names of the module's arguments, as the example gave them.
        arg_names: names of the arguments that a call may give by position.
        input_spec: the inputs as JSON; see ``inputs_from_spec``.
        leaf_names: name of every leaf of the inputs, e.g. ``input_ids`` or ``state[0]``.
        example_leaves: every leaf of the example inputs: a tensor (the caller's own) or a constant.
        output_leaves: every leaf of the outputs: ``Ref``, ``Param`` or a constant.
        in_tree, out_tree: the structures (``torch.utils._pytree``) around these leaves.
        gradients: of a training step, (parameter, graph tensor that is its gradient); whoever runs
            the program adds them up over the micro-batches.
        new_buffers: (buffer, graph tensor that is its new value), e.g. a running mean; written
            back before the next micro-batch reads the buffer.
        optimizer: class of the optimizer whose state the graph counts as memory.
        is_random: whether operators draw random numbers (e.g. dropout in training mode).
    """

    steps: tuple[Step, ...]
    params: tuple[Tensor, ...]
    param_names: tuple[str, ...]
    input_tensors: tuple[int, ...]
    input_names: tuple[str, ...]
    arg_names: tuple[str, ...]
    input_spec: dict[str, Any]
    leaf_names: tuple[str, ...]
    example_leaves: tuple[Any, ...]
    output_leaves: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    gradients: tuple[tuple[int, int], ...] = ()
    new_buffers: tuple[tuple[int, int], ...] = ()
    optimizer: str | None = None
    is_random: bool = False
    state_names: tuple[str, ...] = ()

    @property
    def example_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the example inputs, by reference, in the order of ``input_tensors``."""
        return tuple(x for x in self.example_leaves if isinstance(x, Tensor))

    def flatten_inputs(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Tensor]:
        """The tensors of a call, in the order of ``input_tensors``.

        An argument may be given by position or by name, whichever the example used.

        Raises:
            InputError: an argument is missing or unknown, or a tensor's shape or dtype or a
                constant is not that of the example.

        A tensor with other strides than the example's is copied: what was captured may rely on
        them (``torch.export`` leaves out what they make needless, and keeps them as constants).
        """
        given = self._by_name(args, kwargs or {})
        leaves, tree = pytree.tree_flatten([given[name] for name in self.input_names])
        if tree != self.in_tree:
            raise InputError(
                f"inputs are nested as {tree}, but were captured as {self.in_tree}: give them as "
                "captured, or capture the module again with inputs like these"
            )
        tensors = []
        for name, example, got in zip(self.leaf_names, self.example_leaves, leaves, strict=True):
            if isinstance(example, Tensor):
                if not isinstance(got, Tensor):
                    raise InputError(f"input {name!r} must be a tensor, got {type(got).__name__}")
                if got.shape != example.shape or got.dtype != example.dtype:
                    raise InputError(
                        f"input {name!r} is {describe(got)}, but was captured as "
                        f"{describe(example)}: give that, or capture the module again"
                    )
                tensors.append(_laid_out_as(example, got))
            elif isinstance(got, Tensor) or type(got) is not type(example) or got != example:
                shown = describe(got) if isinstance(got, Tensor) else repr(got)
                raise InputError(
                    f"input {name!r} is {shown}, but was captured with the constant {example!r}: "
                    "capture the module again to change it"
                )
        return tensors

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        expected = ", ".join(self.input_names)
        if len(args) > len(self.arg_names):
            raise InputError(f"{len(args)} positional inputs given, expected ({expected})")
        given = dict(zip(self.arg_names, args, strict=False))
        twice = sorted(given.keys() & kwargs.keys())
        given.update(kwargs)
        missing = [name for name in self.input_names if name not in given]
        unknown = [name for name in given if name not in self.input_names]
        for what, names in (("given twice", twice), ("missing", missing), ("unknown", unknown)):
            if names:
                raise InputError(
                    f"input {names[0]!r} is {what}: the module was captured with ({expected}); "
                    "give these, or capture it again"
                )
        return given

    def timing_inputs(self) -> list[Tensor]:
        """Copies of the example inputs, laid out alike, for a timing run.

        Of the same values: an index, a probability or a matrix to factorise cannot be any number.
        """
        return [_laid_out_as(x, x.detach().clone()) for x in self.example_tensors]

    def unflatten_outputs(self, leaves: Sequence[Any]) -> Any:
        """The module's own output structure around ``leaves`` (one per ``output_leaves``)."""
        return pytree.tree_unflatten(list(leaves), self.out_tree)


def _laid_out_as(example: Tensor, given: Tensor) -> Tensor:
    strides = example.stride()
    if given.stride() == strides or not given.numel():
        return given
    if _overlaps(example):  # expanded or unfolded: nothing can be written there
        return given
    empty = torch.empty_strided(given.shape, strides, dtype=given.dtype, device=given.device)
    return empty.copy_(given)


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements may share memory."""
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def fill(
    template: Any,
    tensors: Mapping[int, Tensor] | Sequence[Tensor],
    params: Sequence[Tensor],
    device: torch.device | None = None,
) -> Any:
    """``template`` with tensors in the place of ``Ref`` and ``Param``.

    ``device``, if given, takes the place of every ``torch.device``.
    """
    if isinstance(template, Ref):
        return tensors[template.tensor]
    if isinstance(template, Param):
        return params[template.index]
    if isinstance(template, list | tuple):
        return type(template)(fill(x, tensors, params, device) for x in template)
    if isinstance(template, dict):
        return {k: fill(x, tensors, params, device) for k, x in template.items()}
    if device is not None and isinstance(template, torch.device):
        return device
    return template


def run_program(
    program: Program,
    inputs: Sequence[Tensor],
    watch: Callable[[int, Tensor], None] | None = None,
) -> list[Any]:
    """Run every step in order on the devices where the tensors already are.

    Args:
        inputs: flattened input tensors, as ``flatten_inputs`` returns them.
        watch: is given every graph tensor's number and values as they are made.

    Returns:
        One value per output leaf; ``unflatten_outputs`` gives them their structure. A tensor is
        freed after its last use.
    """
    last_use: dict[int, int] = {}
    for n, step in enumerate(program.steps):
        for leaf in leaves_of((step.args, step.kwargs)):
            if isinstance(leaf, Ref):
                last_use[leaf.tensor] = n
    for leaf in program.output_leaves:
        if isinstance(leaf, Ref):
            last_use[leaf.tensor] = len(program.steps)
    dying: dict[int, list[int]] = {}
    for tensor, n in last_use.items():
        dying.setdefault(n, []).append(tensor)

    live = dict(zip(program.input_tensors, inputs, strict=True))
    with torch.no_grad():
        for n, step in enumerate(program.steps):
            value = step.target(
                *fill(step.args, live, program.params), **fill(step.kwargs, live, program.params)
            )
            for tensor, index in zip(step.outputs, step.output_index, strict=True):
                if tensor in last_use:
                    live[tensor] = value[index] if step.multi else value
                    if watch is not None:
                        watch(tensor, live[tensor])
            del value
            for tensor in dying.get(n, ()):
                del live[tensor]
    return [fill(leaf, live, program.params) for leaf in program.output_leaves]


def capture(
    module: nn.Module,
    example_inputs: Any,
    *,
    name: str | None = None,
    mode: Literal["inference", "training"] = "inference",
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    colocate_backward: bool = True,
    split_backward: bool = False,
    recompute: Sequence[str] = (),
) -> OpGraph:
    """The operator graph of ``module`` for inputs shaped like ``example_inputs``.

    *Inference*: the module is captured as it computes in evaluation mode without gradients; its
    own mode is left as it was. ``graph.program`` (a ``Program``) runs it with the module's own
    parameters. Views, and in-place operators, share the colocation group of the operator whose
    memory they use; tied parameters count once; parameters that no operator reads are left out.

    *Training*: what one micro-batch does in a training step: forward, backward, and gradients,
    which are added up where the backward operator runs. The module is captured in training mode
    (submodules in evaluation mode stay so, unless the whole module is). Memory of gradients and
    of the optimizer's state counts like parameters. Run it with ``placement.Trainer``.

    Args:
        example_inputs: a tensor; a tuple of positional arguments; a mapping of keyword arguments;
            or ``(args, kwargs)``, a tuple and a dict. Only shapes, dtypes and constants matter.
            With ``loss``: a pair ``(inputs, target)`` of that and of what the loss takes.
        name: name of the graph; the name of the module's class if not given.
        loss: of training: ``loss(module(inputs), target)`` is the loss of a micro-batch. Without
            it the module returns the loss: itself, as its first output, or as output ``loss``.
        optimizer: of training, over the module's parameters: the bytes it will keep count as
            memory, and only its parameters get gradients.
        colocate_backward: of training: a backward operator is on the device of its forward.
        split_backward: of training: gradients of weights, which nothing waits for, are operators
            of their own (what zero-bubble schedules need); convolutions then run two kernels.
        recompute: of training: modules (e.g. ``layers.3``) whose activations are computed again
            for their backward, not kept: less memory, more work (``placement.recompute``).

    Raises:
        CaptureError: the module fails on these inputs, does not export (data-dependent control
            flow or shapes, unsupported types), or changes its inputs; for inference, if it
            changes its buffers, or computes other numbers when it is called (which is done once);
            for training, if it changes its parameters or there is no loss.
    """
    if mode == "training":
        from placement.training import capture_training

        return capture_training(
            module,
            example_inputs,
            name=name,
            loss=loss,
            optimizer=optimizer,
            colocate_backward=colocate_backward,
            split_backward=split_backward,
            blocks=recompute,
        )
    if mode != "inference":
        raise CaptureError(f"mode {mode!r} is unknown; use 'inference' or 'training'")
    if loss is not None or optimizer is not None or recompute:
        raise CaptureError(
            "loss, optimizer and recompute are for training: capture(..., mode='training')"
        )
    args, kwargs = split_inputs(example_inputs)
    spec = input_spec(example_inputs)
    exported = export(module, args, kwargs)
    if first_transformed(exported) is not None:
        exported = functionalise(exported)
    calls = calls_of(exported)
    check_static(calls)
    if first_unsafe(calls) is not None:
        exported = functionalise(exported)
        unsafe = first_unsafe(calls_of(exported))
        if unsafe is not None:
            raise CaptureError(
                f"{unsafe.target} cannot be made one plain operator{node_line(unsafe)}: rewrite "
                "that line without it"
            )
    arg_names, input_names = argument_names(module, args, kwargs)
    graph = _build(
        exported,
        name or type(module).__name__,
        arg_names=arg_names,
        input_names=input_names,
        values=[*args, *kwargs.values()],
        spec=spec,
    )
    program = graph.program
    assert isinstance(program, Program)
    if not program.is_random:
        example = program.example_tensors
        check_numbers(module, args, kwargs, lambda watch: run_program(program, example, watch))
    return graph


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs in any accepted form as ``(args, kwargs)``.

    Raises:
        CaptureError: neither a tensor, a tuple nor a mapping.
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple):
        if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], Mapping):
            return inputs[0], dict(inputs[1])
        return inputs, {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise CaptureError(
        f"example inputs must be a tensor, a tuple (positional), a dict (keyword) or (tuple, dict)"
        f"; got {type(inputs).__name__}"
    )


def input_spec(inputs: Any) -> dict[str, Any]:
    """``inputs`` as JSON: ``{"args": [...], "kwargs": {...}}``, shapes instead of values.

    A tensor is ``{"shape": [...], "dtype": "float32"}``, a tuple ``{"tuple": [...]}``, a number
    that JSON has no word for ``{"float": "-inf"}``; lists, dicts and constants are themselves.

    Raises:
        CaptureError: an input is of a type that JSON cannot hold.
    """
    args, kwargs = split_inputs(inputs)

    def encode(x: Any, where: str) -> Any:
        if isinstance(x, Tensor):
            return {"shape": list(x.shape), "dtype": dtype_name(x.dtype)}
        if type(x) is float and not math.isfinite(x):
            return {"float": str(x)}
        if x is None or type(x) in (bool, int, float, str):
            return x
        if type(x) in (list, tuple):
            items = [encode(y, f"{where}[{i}]") for i, y in enumerate(x)]
            return items if type(x) is list else {"tuple": items}
        if isinstance(x, dict) and all(isinstance(k, str) for k in x):
            return {k: encode(y, f"{where}[{k!r}]") for k, y in x.items()}
        raise CaptureError(
            f"input {where} is a {type(x).__module__}.{type(x).__qualname__}: inputs must be "
            "tensors, numbers, strings, None, or lists, tuples and dicts of them"
        )

    return {
        "args": [encode(x, f"args[{i}]") for i, x in enumerate(args)],
        "kwargs": {k: encode(x, k) for k, x in kwargs.items()},
    }


def inputs_from_spec(spec: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of the shapes and dtypes of ``input_spec``: integers 0, others 1.

    Raises:
        InputError: the specification is damaged.
    """

    def decode(x: Any) -> Any:
        if isinstance(x, list):
            return [decode(y) for y in x]
        if not isinstance(x, dict):
            return x
        if x.keys() == {"shape", "dtype"}:
            dtype = getattr(torch, str(x["dtype"]), None)
            shape = x["shape"]
            sane = isinstance(shape, list) and all(type(d) is int and d >= 0 for d in shape)
            if not isinstance(dtype, torch.dtype) or not sane:
                raise InputError(
                    f"{x} describes no tensor: expected e.g. "
                    "{'shape': [1, 3, 224, 224], 'dtype': 'float32'}"
                )
            integral = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
            return (torch.zeros if integral else torch.ones)(shape, dtype=dtype)
        if x.keys() == {"tuple"}:
            return tuple(decode(y) for y in x["tuple"])
        if x.keys() == {"float"} and x["float"] in ("inf", "-inf", "nan"):
            return float(x["float"])
        return {k: decode(y) for k, y in x.items()}

    args, kwargs = spec.get("args"), spec.get("kwargs")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise InputError(
            f"input specification must have a list 'args' and a dict 'kwargs', got {sorted(spec)}"
        )
    return tuple(decode(x) for x in args), {k: decode(x) for k, x in kwargs.items()}


def argument_names(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of forward's positional arguments, and of those that the example gives."""
    positional = []
    for p in inspect.signature(module.forward).parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            positional.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            extra = range(len(args) - len(positional))
            positional.extend(f"{p.name}[{i}]" for i in extra)
    return tuple(positional), (*positional[: len(args)], *kwargs)


def _build(
    exported: Any,
    name: str,
    *,
    arg_names: tuple[str, ...],
    input_names: tuple[str, ...],
    values: list[Any],
    spec: dict[str, Any],
) -> OpGraph:
    """Number operators, tensors and parameters of the exported program."""
    paths, in_tree = pytree.tree_flatten_with_path(values)
    leaf_names = tuple(
        input_names[path[0].idx] + pytree.keystr(path[1:])  # type: ignore[attr-defined]
        for path, _ in paths
    )
    example_leaves = tuple(leaf for _, leaf in paths)

    builder = _Builder(exported)
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    inputs = placeholders[len(placeholders) - len(example_leaves) :]
    for node, leaf in zip(inputs, example_leaves, strict=True):
        builder.add_input(node, leaf)
    input_tensors = tuple(range(len(builder.tensor_src)))
    for node in placeholders[: len(placeholders) - len(example_leaves)]:
        builder.add_param(node)
    calls = calls_of(exported)
    for node in calls:
        builder.add_call(node)
    outputs = tuple(builder.template(x) for x in exported.graph.output_node().args[0])

    if not builder.steps:
        raise CaptureError(f"{name} has no operators: there is nothing to place")
    program = Program(
        steps=tuple(builder.steps),
        params=tuple(builder.params),
        param_names=tuple(builder.param_names),
        input_tensors=input_tensors,
        input_names=input_names,
        arg_names=arg_names,
        input_spec=spec,
        leaf_names=leaf_names,
        example_leaves=example_leaves,
        output_leaves=outputs,
        in_tree=in_tree,
        out_tree=exported.call_spec.out_spec,
        is_random=any(map(is_random, calls)),
        state_names=tuple(exported.state_dict),
    )
    return OpGraph.build(
        name,
        builder.op_name,
        builder.tensor_src,
        builder.tensor_bytes,
        builder.uses,
        op_kind=[str(step.target) for step in builder.steps],
        op_module=builder.op_module,
        op_signature=builder.op_signature,
        tensor_root=builder.tensor_root,
        param_bytes=[p.numel() * p.element_size() for p in builder.params],
        param_uses=builder.param_uses,
        group=builder.group,
        output_tensor=sorted({x.tensor for x in outputs if isinstance(x, Ref)}),
        program=program,
    )


class _Builder:
    """Collects the arrays of the graph while the nodes of the trace pass by once."""

    def __init__(self, exported: Any) -> None:
        self.exported = exported
        self.value: dict[fx.Node, Any] = {}  # what a node is in a template
        self.param_at: dict[Any, int] = {}
        self.params: list[Tensor] = []
        self.param_names: list[str] = []
        self.steps: list[Step] = []
        self.op_name: list[str] = []
        self.op_module: list[str] = []
        self.op_signature: list[str] = []
        self.group: list[int] = []
        self.tensor_src: list[int] = []
        self.tensor_bytes: list[int] = []
        self.tensor_root: list[int] = []
        self.uses: list[tuple[int, int]] = []
        self.param_uses: list[tuple[int, int]] = []

    def add_input(self, node: fx.Node, leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            self.value[node] = Ref(self._add_tensor(-1, node))
        else:
            self.value[node] = leaf

    def add_param(self, node: fx.Node) -> None:
        """A parameter, buffer or constant; the same memory seen the same way is one."""
        signature = self.exported.graph_signature
        names = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }
        if not node.users:
            return
        full_name = names[node.name]
        stored = self.exported.state_dict
        real = stored[full_name] if full_name in stored else self.exported.constants[full_name]
        key = (storage_of(real), real.storage_offset(), real.shape, real.stride(), real.dtype)
        if key not in self.param_at:
            self.param_at[key] = len(self.params)
            self.params.append(real)
            self.param_names.append(full_name)
        self.value[node] = Param(self.param_at[key])

    def add_call(self, node: fx.Node) -> None:
        target = node.target
        if target is operator.getitem:
            return  # folded into its producer
        if target is torch.ops.aten._assert_tensor_metadata.default:
            return  # always true: flatten_inputs checks shapes and dtypes
        assert isinstance(target, torch._ops.OpOverload)
        n = len(self.steps)
        args = tuple(self.template(x) for x in node.args)
        kwargs = {k: self.template(x) for k, x in node.kwargs.items()}
        self.group.append(n)
        outputs, index = self._add_outputs(n, node)
        multi = isinstance(node.meta["val"], list | tuple)
        self.steps.append(Step(target, args, kwargs, outputs, multi, index))
        for leaf in leaves_of((args, kwargs)):
            if isinstance(leaf, Ref):
                self.uses.append((leaf.tensor, n))
            elif isinstance(leaf, Param):
                self.param_uses.append((n, leaf.index))
        self.op_name.append(node.name)
        self.op_module.append(module_path(node))
        self.op_signature.append(signature_of(node))

    def _add_outputs(self, n: int, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        value = node.meta["val"]
        if isinstance(value, Tensor):
            tensor = self._add_tensor(n, node)
            self.value[node] = Ref(tensor)
            return (tensor,), (0,)
        if value is None:
            return (), ()
        readers: dict[int, list[fx.Node]] = {}
        for user in node.users:
            assert user.target is operator.getitem, f"{user} takes all outputs of {node}"
            if user.users:
                readers.setdefault(int(user.args[1]), []).append(user)  # type: ignore[arg-type]
        outputs = []
        for i in sorted(readers):
            outputs.append(self._add_tensor(n, readers[i][0]))
            for user in readers[i]:
                self.value[user] = Ref(outputs[-1])
        return tuple(outputs), tuple(sorted(readers))

    def _add_tensor(self, src: int, node: fx.Node) -> int:
        """Number the tensor of ``node``; if it is a view, operator ``src`` joins its base's group.

        A view of a parameter is free to be anywhere: every device has its own copy of it.
        """
        t = len(self.tensor_src)
        fake = node.meta["val"]
        call = node.args[0] if node.target is operator.getitem else node
        assert isinstance(call, fx.Node)
        bases = [
            self.tensor_root[self.value[arg].tensor]
            for arg in call.all_input_nodes
            if isinstance(self.value[arg], Ref) and arg.meta["memory"] == node.meta["memory"]
        ]
        root = min(bases, default=t)
        self.tensor_src.append(src)
        self.tensor_bytes.append(fake.numel() * fake.element_size())
        self.tensor_root.append(root)
        owner = self.tensor_src[root]
        if owner >= 0 and self.group[owner] != self.group[src]:
            old, new = self.group[src], self.group[owner]
            self.group = [new if g == old else g for g in self.group]
        return t

    def template(self, arg: Any) -> Any:
        """An argument of a node, with ``Ref`` and ``Param`` for nodes and plain containers."""
        if isinstance(arg, fx.Node):
            return self.value[arg]
        if isinstance(arg, list):
            return [self.template(x) for x in arg]
        if isinstance(arg, tuple):
            return tuple(self.template(x) for x in arg)
        if isinstance(arg, dict):
            return {k: self.template(x) for k, x in arg.items()}
        return arg
