"""Loss and gradients of an exported module as one list of kernel calls.

The step is traced *through autograd itself*: ``make_fx`` runs the exported module and
``torch.autograd.grad`` on fake tensors and records every kernel below autograd. So the graph
holds the very kernels that eager training calls, forward and backward, and no decompositions
(``torch.export``'s own joint graph decomposes, e.g., the backward of batch normalisation into a
dozen element-wise operators). A second trace removes in-place operators, because a distributed
run keeps no other order than that of the edges; new values of buffers become results.

The kernels are those of the machine that traces: attention and recurrent layers, for which a CPU
and a GPU have different ones, are captured as a CPU runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from placement.exported import CaptureError, first_line, quiet, storage_of
from placement.program import Param, Ref
from placement.replay import Calls, autograd_call

_aten = torch.ops.aten
_higher = torch.ops.higher_order
Owner = tuple[int, bool]  # (number of the call in the forward, whether it is its backward)


class _Recorder:
    """Writes into every traced node to which call of the forward it belongs."""

    def __init__(self) -> None:
        mode = get_proxy_mode()
        assert mode is not None
        self._graph = mode.tracer.graph
        self._owner: Owner | None = None
        self.switch(None)

    def switch(self, owner: Owner | None) -> None:
        """What was traced since the last switch is its owner's; what follows is ``owner``'s."""
        for node in reversed(self._graph.nodes):
            if "owner" in node.meta:
                break
            node.meta["owner"] = self._owner
        self._owner = owner


class _Forward(fx.Interpreter):
    """Runs the exported graph; notes for every kernel, and every autograd node, whose it is."""

    def __init__(
        self,
        module: Any,
        recorder: _Recorder,
        calls: list[fx.Node],
        known: set[Any],
        replays: Calls,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._recorder, self._calls, self._known = recorder, calls, known
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
                given, *_ = target(*first, (True, False, False))
                _, *trained = target(*first, (False, of_weight, of_bias))
                return (given, *trained)
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
    params, param_names, param_at = _parameters(exported, module)
    own = {param_at[name] for name in signature.inputs_to_parameters if name in param_at}
    trained = {id(p) for g in optimizer.param_groups for p in g["params"]} if optimizer else None
    trainable = [
        i
        for i, p in enumerate(params)
        if i in own and p.requires_grad and (trained is None or id(p) in trained)
    ]
    if not trainable:
        raise CaptureError(
            "there is nothing to train: no parameter that the module uses has requires_grad=True"
            + (" and belongs to the optimizer" if optimizer else "")
        )
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    flat = [x.detach() for x in (*params, *tensors)]
    calls: list[fx.Node] = []
    with_gradient: list[int] = []

    def step(*given: Tensor) -> list[Tensor]:
        recorder = _Recorder()
        for i in trainable:
            given[i].requires_grad_()
        rest = iter(given[len(params) :])
        operands = [
            given[param_at[name]] if name in param_at else None
            for name in placeholders[: len(placeholders) - len(leaves)]
        ]
        operands += [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        values = _Forward(exported.graph_module, recorder, calls, set(), replays).run(*operands)
        loss = loss_of(pytree.tree_unflatten(values, exported.call_spec.out_spec))
        recorder.switch((len(calls) - 1, True))
        found = torch.autograd.grad(loss, [given[i] for i in trainable], allow_unused=True)
        with_gradient.extend(i for i, g in zip(trainable, found, strict=True) if g is not None)
        memory = {storage_of(x) for x in given}
        gradients = [g for g in found if g is not None]
        gradients = [g.clone() if storage_of(g) in memory else g for g in gradients]
        recorder.switch(None)
        return [loss, *gradients]

    def functional(*given: Tensor) -> Any:
        recorder = _Recorder()
        results = _Functional(traced, recorder, split_backward).run(*given)
        recorder.switch(None)
        return results

    try:
        with quiet(), torch.enable_grad():
            traced = make_fx(step, tracing_mode="fake")(*flat)
            pure = make_fx(
                torch.func.functionalize(functional, remove="mutations"), tracing_mode="fake"
            )(*flat)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(
            f"autograd cannot be traced through the module: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error
    nodes = list(pure.graph.nodes)
    given = [n for n in nodes if n.op == "placeholder"]
    written = [n for n in nodes if n.target is _aten.copy_.default]
    loss, *gradients = nodes[-1].args[0]
    new_buffers = []
    for node in written:
        at = given.index(node.args[0])
        if at >= len(params) or at in own:
            what = f"parameter {param_names[at]!r}" if at < len(params) else "input"
            raise CaptureError(
                f"the module changes its {what} in place: let it work on a copy (x = x.clone())"
            )
        new_buffers.append((at, node.args[1]))
    return Joint(
        kernels=[n for n in nodes if n.op == "call_function" and n not in written],
        calls=calls,
        params=params,
        param_names=param_names,
        source={
            n: Param(i) if i < len(params) else Ref(i - len(params)) for i, n in enumerate(given)
        },
        num_inputs=len(tensors),
        loss=loss,
        gradients=list(zip(with_gradient, gradients, strict=True)),
        new_buffers=new_buffers,
    )


def _parameters(exported: Any, module: nn.Module) -> tuple[list[Tensor], list[str], dict[str, int]]:
    """Distinct parameters, buffers and constants, their names, and which a placeholder is.

    The same memory seen the same way is one (tied parameters), by its first name in the module.
    """
    own_name = {id(x): name for name, x in (*module.named_parameters(), *module.named_buffers())}
    signature = exported.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    seen: dict[Any, int] = {}
    params: list[Tensor] = []
    param_names: list[str] = []
    param_at: dict[str, int] = {}
    for node in exported.graph.nodes:
        if node.op != "placeholder" or node.name not in names or not node.users:
            continue
        full_name = names[node.name]
        stored = exported.state_dict
        real = stored[full_name] if full_name in stored else exported.constants[full_name]
        key = (storage_of(real), real.storage_offset(), real.shape, real.stride(), real.dtype)
        if key not in seen:
            seen[key] = len(params)
            params.append(real)
            param_names.append(own_name.get(id(real), full_name))
        param_at[node.name] = seen[key]
    return params, param_names, param_at


def loss_of(outputs: Any) -> Tensor:
    """The loss among what the module, or the loss function, returned."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
        shown = (
            f"a tensor of shape {tuple(found.shape)}"
            if isinstance(found, Tensor)
            else (f"a {type(found).__name__}")
        )
        raise CaptureError(
            "training needs a loss, one floating-point number: from the loss function, or as what "
            f"the module returns (itself, its first output or its output 'loss'); got {shown}. "
            "Give one: capture(module, (inputs, target), mode='training', "
            "loss=torch.nn.functional.cross_entropy)"
        )
    if not found.requires_grad:
        raise CaptureError("the loss depends on no parameter that has requires_grad=True")
    return found
