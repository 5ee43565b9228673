"""What a module says to autograd itself: kept in the exported graph, said again in the joint one.

``torch.export`` records operators. What a module tells autograd beside them it leaves out without
a word: the backward of an ``autograd.Function``, a hook on a tensor, ``torch.autograd.grad`` in the
forward. While ``replayed`` is active each of these calls becomes a node that holds the call;
whoever runs the graph makes the call again, under autograd. What cannot be said again is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from placement.program import CaptureError

_apply_of = torch.autograd.function._SingleLevelFunction  # what every Function.apply calls


class _AutogradCall(torch._ops.HigherOrderOperator):  # type: ignore[misc]
    """Target of the nodes that hold a call: its name, then the tensors among its arguments."""

    def __init__(self) -> None:
        super().__init__("autograd_call")

    def __call__(self, name: str, *tensors: Tensor) -> Any:
        raise AssertionError(f"{name} is called by who runs the graph")


autograd_call = _AutogradCall()
fx.node.has_side_effect(autograd_call)  # or a hook, whose result nobody reads, would be dropped
IN_CHECKPOINT = "in_checkpoint"
Calls = dict[str, Callable[..., Any]]  # by the name in the node


def refuse(what: str) -> NoReturn:
    raise CaptureError(what)


class _Handle:
    """Of a hook that the graph holds."""

    def remove(self) -> None:
        refuse("a hook is removed while the module runs: leave it in place")


class _Watch(TorchFunctionMode):
    """Keeps, or refuses, the functions by which a module speaks with autograd."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.autograd.grad:
            return _keep(self._calls, "grad", func, args, kwargs)
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func in _OF_LEAVES and isinstance(args[0], nn.Parameter):
            refuse(f"{_OF_LEAVES[func]} of a parameter is set while the module runs: set it before")
        if func == Tensor.register_hook:
            _keep(self._calls, "hook", _hooked, args, kwargs)
            return _Handle()
        if func in _OF_LEAVES:
            return _keep(self._calls, "requires_grad", Tensor.requires_grad_, args, kwargs)
        if func in _REFUSED and isinstance(args[0], nn.Parameter) and "grad_fn" in _REFUSED[func]:
            refuse("a parameter is made while the module runs: make it in the module's __init__")
        if func in _REFUSED:
            refuse(_REFUSED[func])
        return func(*args, **kwargs)


_OF_LEAVES = {
    Tensor.requires_grad_: "requires_grad",
    Tensor.requires_grad.__set__: "requires_grad",  # type: ignore[attr-defined]
    Tensor.register_hook: "a hook on the gradient",
}
_BACKWARD = (
    "backward() is called while the module runs: use torch.autograd.grad there, or call it in the "
    "training loop"
)
_REFUSED = {
    Tensor.backward: _BACKWARD,
    torch.autograd.backward: _BACKWARD,
    Tensor.register_post_accumulate_grad_hook: "a hook on the accumulation of a gradient is "
    "registered while the module runs: let an autograd.Function do that",
    Tensor.grad_fn.__get__: "grad_fn is read while the module runs, e.g. for a hook: use "  # type: ignore[union-attr]
    "Tensor.register_hook, or an autograd.Function",
    Tensor.data.__set__: "data is assigned to while the module runs: use "  # type: ignore[attr-defined]
    "x = x + (value - x).detach()",
}


def _hooked(x: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    x.register_hook(hook)
    return x


@contextmanager
def replayed(module: nn.Module) -> Iterator[Calls]:
    """Trace with the calls that speak with autograd as nodes; they are given by name.

    The second forward of a checkpoint is left out, and what ``save_on_cpu`` moves stays: both
    change where activations are kept, but no number.

    Raises:
        CaptureError: a hook of the module changes gradients, or (while the module runs) a call
            cannot be made again.
    """
    _check_hooks(module)
    calls: Calls = {}

    def apply(cls: Any, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            return super(_apply_of, cls).apply(*args)

        if cls is checkpoint.CheckpointFunction:
            with _marked():
                return _once(*args)
        return _keep(calls, cls.__qualname__, run, args, {})

    def only_forward(
        function: Any, preserve: Any, context_fn: Any, *_: Any, **__: Any
    ) -> Iterator[None]:
        with _marked(), context_fn()[0] if torch.is_grad_enabled() else nullcontext():
            yield

    def enter_saved(self: Any) -> None:
        if not isinstance(self, torch.autograd.graph.save_on_cpu):
            refuse("saved_tensors_hooks change what the backward reads: do without them")

    def enter_inference(self: Any) -> None:
        self.was_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def refuse_transform(*_: Any, **__: Any) -> None:
        refuse(
            "a gradient of torch.func (grad, vjp, jacrev, hessian) is taken while the module runs: "
            "use torch.autograd.grad(..., create_graph=True)"
        )

    with (
        mock.patch.object(_apply_of, "apply", classmethod(apply), create=True),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", only_forward),
        mock.patch.multiple(
            torch.autograd.graph.saved_tensors_hooks,
            __enter__=enter_saved,
            __exit__=lambda self, *_: None,
        ),
        mock.patch.multiple(
            torch.inference_mode,
            __enter__=enter_inference,
            __exit__=lambda self, *_: torch.set_grad_enabled(self.was_enabled),
        ),
        mock.patch.multiple(
            torch._functorch.eager_transforms,
            grad_and_value_impl=refuse_transform,
            _vjp_with_argnums=refuse_transform,
        ),
        _Watch(calls),
    ):
        yield calls


def _keep(calls: Calls, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What the call gives; a node of the graph that is being traced holds the call."""
    mode = torch._ops._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None:
        return function(*args, **kwargs)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    constants = [None if isinstance(x, Tensor) else x for x in leaves]

    def again(*tensors: Tensor) -> Any:
        filled = list(constants)
        for i, x in zip(at, tensors, strict=True):
            filled[i] = x
        args, kwargs = pytree.tree_unflatten(filled, tree)
        return function(*args, **kwargs)

    key = f"{name}_{len(calls)}"
    calls[key] = again
    operands = [mode.tracer.unwrap_proxy(leaves[i]) for i in at]
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        out = function(*args, **kwargs)
    proxy = mode.tracer.create_proxy(
        "call_function", autograd_call, (key, *operands), {}, name=name.rpartition(".")[2].lower()
    )
    return track_tensor_tree(out, proxy, constant=None, tracer=mode.tracer)


@contextmanager
def _marked() -> Iterator[None]:
    """Write into the nodes that are traced meanwhile that they belong to a checkpoint."""
    mode = torch._ops._get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)
    if mode is None or not torch.is_grad_enabled():
        yield
        return
    before = set(mode.tracer.graph.nodes)
    yield
    for node in mode.tracer.graph.nodes:
        if node not in before:
            node.meta["custom"] = {**node.meta.get("custom", {}), IN_CHECKPOINT: True}


def _once(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """A reentrant checkpoint without its second forward: no gradient flows if no input has one."""
    wanted = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
        return function(*args)


def _check_hooks(module: nn.Module) -> None:
    everywhere = nn.modules.module
    for path, m in module.named_modules():
        own = m._backward_hooks or m._backward_pre_hooks
        if own or everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks:
            refuse(
                f"module {path!r} ({type(m).__name__}) has a backward hook, which would not run: "
                "remove it, or write it as an autograd.Function in the forward"
            )
