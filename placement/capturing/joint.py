"""Loss and gradients of an exported module as one list of kernel calls.

The step is traced *through autograd itself*: ``make_fx`` runs the exported module and
``torch.autograd.grad`` on fake tensors and records every kernel below autograd. So the graph
holds the very kernels that eager training calls, forward and backward, and no decompositions
(``torch.export``'s own joint graph decomposes, e.g., the backward of batch normalisation into a
dozen element-wise operators). A second trace removes in-place operators, because a distributed
run keeps no other order than that of the edges; new values of buffers become results.

The kernels are those that a CPU runs, wherever the module is; ``kernels`` says what another device
runs instead of those that it lacks.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.utils import _pytree as pytree

from placement.capturing.errors import first_line, user_line
from placement.capturing.exported import (
    left_as_it_was,
    parameters_of,
    quiet,
)
from placement.capturing.replay import IN_CHECKPOINT, Calls, autograd_call
from placement.program import CaptureError, Param, Ref, storage_of, view_of

_aten = torch.ops.aten
_higher = torch.ops.higher_order
_CPU = torch.device("cpu")
Owner = tuple[int, bool]  # (number of the call in the forward, whether it is its backward)


class _Recorder:
    """Writes into every traced node to which call of the forward it belongs."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self._tracer, self._graph = mode.tracer, mode.tracer.graph
        self._owner: Owner | None = None
        self.switch(None)

    def switch(self, owner: Owner | None) -> None:
        """What was traced since the last switch is its owner's; what follows is ``owner``'s."""
        for node in reversed(self._graph.nodes):
            if "owner" in node.meta:
                break
            node.meta["owner"] = self._owner
        self._owner = owner

    def beside(self, made: Tensor) -> None:
        """What follows belongs to whose kernel has ``made`` this."""
        self.switch(self._owner)
        traced = get_proxy_slot(made, self._tracer, None)
        owner = None if traced is None else traced.proxy.node.meta["owner"]
        self._owner = owner or self._owner


class _Forward(fx.Interpreter):
    """Runs the exported graph; notes for every kernel, and every autograd node, whose it is."""

    def __init__(
        self,
        module: Any,
        recorder: _Recorder,
        calls: list[fx.Node],
        seen: set[Any],
        replays: Calls,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._recorder, self._calls, self._known = recorder, calls, seen
        self._replays = replays

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        call = len(self._calls)
        self._calls.append(n)
        self._recorder.switch((call, False))
        result = super().run_node(n)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._follow(tensor.grad_fn, call)
        return result

    def _follow(self, node: Any, call: int) -> None:
        """The autograd nodes from ``node`` on that are new are those of ``call``."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._known:
                continue
            self._known.add(node)
            node.register_prehook(lambda _: self._recorder.switch((call, True)))
            waiting.extend(following for following, _ in node.next_functions)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _higher.wrap_with_set_grad_enabled:
            enabled, body, *operands = args
            with torch.set_grad_enabled(enabled):
                return self._nested(body, operands)
        if target is _higher.wrap_with_autocast:
            device_type, dtype, enabled, _, body, *operands = args
            with torch.autocast(device_type, dtype, enabled, cache_enabled=False):
                return self._nested(body, operands)
        if target is autograd_call:
            name, *tensors = args
            return self._replays[name](*tensors)
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: _CPU, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _nested(self, body: Any, operands: Sequence[Any]) -> Any:
        inner = _Forward(body, self._recorder, self._calls, self._known, self._replays)
        return inner.run(*operands)


class _Functional(fx.Interpreter):
    """Runs the traced step again, for the trace without in-place operators."""

    def __init__(self, module: Any, recorder: _Recorder, split_backward: bool) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._recorder = recorder
        self._split_backward = split_backward

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            self._recorder.switch(n.meta["owner"])
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # Its schema does not say that it writes to the running statistics.
        if target is _aten.native_batch_norm.default and args[3] is not None and args[5]:
            *values, mean, var = _aten._native_batch_norm_legit_functional.default(*args, **kwargs)
            args[3].copy_(mean)
            args[4].copy_(var)
            return tuple(values)
        if target is _aten.native_batch_norm_backward.default and args[7]:
            args = (*args[:3], None, None, *args[5:])  # the batch's own statistics are used
        if target is _aten.convolution_backward.default and self._split_backward:
            *first, (of_input, of_weight, of_bias) = args
            if of_input and (of_weight or of_bias):
                of_data, *_ = target(*first, (True, False, False))
                _, *trained = target(*first, (False, of_weight, of_bias))
                return (of_data, *trained)
        return super().call_function(target, args, kwargs)


@dataclass(frozen=True, eq=False)
class Joint:
    """The loss and its gradients as one list of functional kernel calls.

    Attributes:
        kernels: in order; ``meta["owner"]`` says whose they are. Views and getitems included.
        calls: the calls of the exported forward, by number.
        params, param_names: distinct parameters, buffers and constants.
        source: what a placeholder is: ``Param``, or ``Ref`` of an input tensor.
        num_inputs: tensors among the inputs.
        loss: its node.
        gradients, new_buffers: (number in ``params``, node).
    """

    kernels: list[fx.Node]
    calls: list[fx.Node]
    params: list[Tensor]
    param_names: list[str]
    source: dict[fx.Node, Param | Ref]
    num_inputs: int
    loss: fx.Node
    gradients: list[tuple[int, fx.Node]]
    new_buffers: list[tuple[int, fx.Node]]


def trace_step(
    exported: Any,
    module: nn.Module,
    leaves: list[Any],
    optimizer: torch.optim.Optimizer | None,
    split_backward: bool,
    replays: Calls,
) -> Joint:
    """Trace loss and gradients of an exported program whose inputs have these leaves."""
    signature = exported.graph_signature
    placeholders = [n.name for n in exported.graph.nodes if n.op == "placeholder"]
    params, param_names, param_at = parameters_of(exported, module, unread=bool(replays))
    own = {param_at[name] for name in signature.inputs_to_parameters if name in param_at}
    trainable = _trainable(params, own, optimizer)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    flat = _on_cpu([*params, *tensors])
    calls: list[fx.Node] = []
    with_gradient: list[int] = []

    def step(*arguments: Tensor) -> list[Tensor]:
        recorder = _Recorder()
        for i in trainable:
            arguments[i].requires_grad_()
        _put_into(module, dict(zip(map(view_of, params), arguments, strict=False)))
        rest = iter(arguments[len(params) :])
        operands = [
            arguments[param_at[name]] if name in param_at else None
            for name in placeholders[: len(placeholders) - len(leaves)]
        ]
        operands += [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        values = _Forward(exported.graph_module, recorder, calls, set(), replays).run(*operands)
        loss = loss_of(pytree.tree_unflatten(values, exported.call_spec.out_spec))
        recorder.switch((len(calls) - 1, True))
        own_of = torch.autograd.grad(loss, [arguments[i] for i in trainable], allow_unused=True)
        memory, gradients = {storage_of(x) for x in arguments}, []
        for i, own_gradient in zip(trainable, own_of, strict=True):
            parts = [x for x in (own_gradient, arguments[i].grad) if x is not None]
            if parts:  # a function's backward may add to gradients by itself, as reversible layers'
                recorder.beside(parts[0])  # hooks run where the gradient is made
                g = _hooked(params[i], sum(parts[1:], parts[0]))
                gradients.append(g.clone() if storage_of(g) in memory else g)
                with_gradient.append(i)
        recorder.switch(None)
        return [loss, *gradients]

    def functional(*arguments: Tensor) -> Any:
        recorder = _Recorder()
        results = _Functional(traced, recorder, split_backward).run(*arguments)
        recorder.switch(None)
        return results

    try:
        # What the user's hooks and functions leave in the module is undone.
        with quiet(), torch.enable_grad(), left_as_it_was(module):
            traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)
            _lift_constants(traced, params, param_names)
            flat = _on_cpu([*params, *tensors])
            pure = make_fx(
                torch.func.functionalize(functional, remove="mutations"), tracing_mode="fake"
            )(*flat)
    except CaptureError:
        raise
    except Exception as error:
        is_sparse = "SparseTensorImpl" in str(error)
        advice = ". Gradients must be dense: nn.Embedding(..., sparse=False)" if is_sparse else ""
        raise CaptureError(
            f"autograd cannot be traced through the module{user_line(error)}: "
            f"{type(error).__name__}: {first_line(error)}{advice}"
        ) from error
    nodes = list(pure.graph.nodes)
    entries = [n for n in nodes if n.op == "placeholder"]
    written = [n for n in nodes if n.target is _aten.copy_.default]
    loss, *gradients = nodes[-1].args[0]
    new_buffers = [(entries.index(node.args[0]), _copied(node.args[1])) for node in written]
    for at, node in new_buffers:
        _check_change(param_names[at] if at < len(params) else None, at in own, node, calls)
    _check_apart(params, param_names, {*trainable, *(i for i, _ in new_buffers)})
    return Joint(
        kernels=[n for n in nodes if n.op == "call_function" and n not in written],
        calls=calls,
        params=params,
        param_names=param_names,
        source={
            n: Param(i) if i < len(params) else Ref(i - len(params)) for i, n in enumerate(entries)
        },
        num_inputs=len(tensors),
        loss=loss,
        gradients=list(zip(with_gradient, gradients, strict=True)),
        new_buffers=new_buffers,
    )


def _copied(value: fx.Node) -> fx.Node:
    """The new statistics themselves, where ``value`` is no more than a copy of them."""
    source: Any = value.args[1] if value.target is _aten.copy.default else value
    operation = source.target is operator.getitem and source.args[0].target
    return source if operation is _aten._native_batch_norm_legit_functional.default else value


def _on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """For a trace: as they are, or like them, but on a CPU, where one of them is not."""
    if all(x.device == _CPU for x in tensors):
        return [x.detach() for x in tensors]
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in tensors]


def _trainable(
    params: list[Tensor], own: set[int], optimizer: torch.optim.Optimizer | None
) -> list[int]:
    """Which of the parameters ``own`` get gradients."""
    trained = {id(p) for g in optimizer.param_groups for p in g["params"]} if optimizer else None
    numbers = [
        i
        for i, p in enumerate(params)
        if i in own and p.requires_grad and (trained is None or id(p) in trained)
    ]
    if not numbers:
        raise CaptureError(
            "there is nothing to train: no parameter that the module uses has requires_grad=True"
            + (" and belongs to the optimizer" if optimizer else "")
        )
    return numbers


def _check_change(name: str | None, is_param: bool, value: fx.Node, calls: list[fx.Node]) -> None:
    """A step may change buffers, once.

    Raises:
        CaptureError: it changes a parameter, an input (which has no name), or changes a buffer in
            a checkpoint.
    """
    if name is None or is_param:
        what = "input" if name is None else f"parameter {name!r}"
        raise CaptureError(
            f"the module changes its {what} in place: let it work on a copy (x = x.clone())"
        )
    call, _ = value.meta["owner"]
    if IN_CHECKPOINT in calls[call].meta.get("custom", {}):
        raise CaptureError(
            f"the buffer {name!r} changes in a checkpoint, where plain PyTorch changes it once "
            "more in the backward: call that module without checkpoint(), and name it in "
            "recompute=[...]"
        )


def _put_into(module: nn.Module, tensors: dict[Any, Tensor]) -> None:
    """Let hooks and functions that hold the module find the tensors of the trace in it."""
    for m in module.modules():
        for held in (m._parameters, m._buffers):
            for name, x in held.items():
                if x is not None and view_of(x) in tensors:
                    held[name] = tensors[view_of(x)]  # type: ignore[assignment]


def _hooked(param: Tensor, gradient: Tensor) -> Tensor:
    """The gradient as the parameter's own hooks leave it."""
    if param._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        raise CaptureError(
            "a parameter has a hook on the accumulation of its gradient, which would not run: use "
            "register_hook, or do that in the optimizer"
        )
    for hook in (param._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _lift_constants(traced: fx.GraphModule, params: list[Tensor], param_names: list[str]) -> None:
    """Make tensors that hooks and functions hold by themselves parameters: placeholders too."""
    at = {view_of(x): i for i, x in enumerate(params)}
    entries = [n for n in traced.graph.nodes if n.op == "placeholder"]
    behind = entries[len(params) - 1]
    for node in [n for n in traced.graph.nodes if n.op == "get_attr"]:
        real = getattr(traced, node.target)
        if isinstance(real, FakeTensor):
            raise CaptureError(
                "a hook, or the argument of an autograd.Function, holds a tensor that the forward "
                "made: give it to an autograd.Function as an argument of its own"
            )
        if view_of(real) not in at:
            at[view_of(real)] = len(params)
            params.append(real.detach())
            param_names.append(node.target)
            with traced.graph.inserting_after(behind):
                behind = traced.graph.placeholder(node.target)
            behind.meta.update(node.meta)
            entries.insert(len(params) - 1, behind)
        node.replace_all_uses_with(entries[at[view_of(real)]])
        traced.graph.erase_node(node)
    traced.recompile()


def _check_apart(params: list[Tensor], names: list[str], changed: set[int]) -> None:
    """What changes shares its memory with nothing else that is read.

    Raises:
        CaptureError: it does; tied parameters are one ``Parameter``.
    """

    def bounds(x: Tensor) -> tuple[int, int]:
        reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
        first = int(x.storage_offset()) * x.element_size()
        return first, first + int(reach) * x.element_size()

    sharing: dict[int, list[int]] = {}
    for i, x in enumerate(params):
        if x.numel():
            sharing.setdefault(storage_of(x), []).append(i)
    for i, j in (pair for group in sharing.values() for pair in combinations(group, 2)):
        (a, b), (c, d) = bounds(params[i]), bounds(params[j])
        if max(a, c) < min(b, d) and changed & {i, j}:
            raise CaptureError(
                f"{names[i]!r} and {names[j]!r} are two tensors in the same memory, and training "
                "changes it: make them one (as tied parameters are: b.weight = a.weight), or copies"
            )


def loss_of(outputs: Any) -> Tensor:
    """The loss among what the module, or the loss function, returned."""
    loss = outputs
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        loss = outputs[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        shown = (
            f"a {loss.dtype} tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else (f"a {type(loss).__name__}")
        )
        raise CaptureError(
            "training needs a loss, one floating-point number: from the loss function, or as what "
            f"the module returns (itself, its first output or its output 'loss'); got {shown}. "
            "Give one: capture(module, (inputs, target), mode='training', "
            "loss=torch.nn.functional.cross_entropy)"
        )
    if not loss.requires_grad:
        raise CaptureError("the loss depends on no parameter that has requires_grad=True")
    return loss
