"""What a module says to autograd itself, kept in the exported graph and said again in the joint one.

``torch.export`` records operators. What a module tells autograd beside them it leaves out without a
word: the backward of an ``autograd.Function``, a hook on a tensor, ``torch.autograd.grad`` in the
forward. While ``replayed`` is active each of these calls becomes a node that holds the call; whoever
runs the graph makes the call again, under autograd. What cannot be said again is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from placement.exported import CaptureError

_apply_of = torch.autograd.function._SingleLevelFunction  # what every Function.apply calls


class _AutogradCall(torch._ops.HigherOrderOperator):  # type: ignore[misc]
    """Target of the nodes that hold a call: its name, then the tensors among its arguments."""

    def __init__(self) -> None:
        super().__init__("autograd_call")

    def __call__(self, name: str, *tensors: Tensor) -> Any:
        raise AssertionError(f"{name} is called by who runs the graph")


autograd_call = _AutogradCall()
fx.node.has_side_effect(autograd_call)  # or a hook, whose result nobody reads, would be dropped
Calls = dict[str, Callable[..., Any]]  # by the name in the node


class _Handle:
    """Of a hook that the graph holds."""

    def remove(self) -> None:
        raise CaptureError("a hook is removed while the module runs: leave it")


class _Watch(TorchFunctionMode):
    """Keeps, or refuses, the functions by which a module speaks with autograd."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            return _keep(self._calls, "grad", func, args, kwargs)
        if func is Tensor.requires_grad_ or func is Tensor.requires_grad.__set__:
            if isinstance(args[0], nn.Parameter):
                raise CaptureError(
                    "requires_grad of a parameter is set while the module runs: set it before"
                )
            return _keep(self._calls, "requires_grad", _requires_grad, args, kwargs)
        if func is Tensor.register_hook:
            _keep(self._calls, "hook", _hooked, args, kwargs)
            return _Handle()
        if func in (Tensor.backward, torch.autograd.backward):
            raise CaptureError(
                "backward() is called while the module runs: use torch.autograd.grad, or do that "
                "in the training loop"
            )
        return func(*args, **kwargs)


def _requires_grad(x: Tensor, requires_grad: bool = True) -> Tensor:
    return x.requires_grad_(requires_grad)


def _hooked(x: Tensor, hook: Callable[[Tensor], Any]) -> Tensor:
    x.register_hook(hook)
    return x


@contextmanager
def replayed(module: nn.Module) -> Iterator[Calls]:
    """Trace with the calls that speak with autograd as nodes; they are given by name.

    Raises:
        CaptureError: a hook of the module or of a parameter changes gradients, or (while the
            module runs) a call cannot be made again.
    """
    _check_hooks(module)
    calls: Calls = {}

    def apply(cls: Any, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            return super(_apply_of, cls).apply(*args)

        if cls is checkpoint.CheckpointFunction:
            return _not_again(*args)
        return _keep(calls, cls.__qualname__, run, args, {})

    def plain(function: Any, preserve: Any, context_fn: Any, *_: Any, **__: Any) -> Iterator[None]:
        with context_fn()[0] if torch.is_grad_enabled() else nullcontext():
            yield

    def refuse(*_: Any) -> None:
        raise CaptureError("saved_tensors_hooks change what the backward reads: do without them")

    with (
        mock.patch.object(_apply_of, "apply", classmethod(apply), create=True),
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", plain),
        mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__enter__", refuse),
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


def _not_again(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """A reentrant checkpoint without its second forward: no gradient flows if no input has one."""
    wanted = any(isinstance(x, Tensor) and x.requires_grad for x in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and wanted):
        return function(*args)


def _check_hooks(module: nn.Module) -> None:
    for path, m in module.named_modules():
        if m._backward_hooks or m._backward_pre_hooks:
            raise CaptureError(
                f"module {path!r} ({type(m).__name__}) has a backward hook, which would not run: "
                "remove it, or write it as an autograd.Function in the forward"
            )
    for name, p in module.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            raise CaptureError(
                f"parameter {name!r} has a hook on its gradient, which would not run: remove it, "
                "or write it as an autograd.Function in the forward"
            )
