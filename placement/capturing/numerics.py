"""Whether what was captured computes what its module computes, and if it does not, why.

A trace may take another way than a call: code can ask whether it is traced, torch has fast paths
that no trace takes, and Python's own state is read once. Only numbers tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from placement.capturing.errors import calls_from_user, fails_itself
from placement.capturing.exported import (
    left_as_it_was,
    quiet,
)
from placement.program import CaptureError

_QUESTIONS = (
    torch.compiler.is_exporting,
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
)
_UNKNOWN = (
    "It asks for what only a trace has (torch.jit.is_tracing(), the type of a tensor), or reads "
    "what changes outside of it"
)

Watch = Callable[[int, Tensor], None]  # gets a tensor's number in the graph, and its values


def check_numbers(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[[Watch | None], list[Any]],
) -> None:
    """Compare a call of the module, in evaluation mode, with ``run(None)``: the same outputs, flat.

    Nothing is compared where the module has no values (device ``meta``), or has an operator that
    only another kind of device has, or that few values suit (an inverse): a plan's inputs are ones.

    Raises:
        CaptureError: the module fails, or the numbers are others; the message names a cause and a
            remedy.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    if any(x.is_meta for x in (*module.parameters(), *module.buffers(), *leaves) if _is_tensor(x)):
        return

    def call(times: int = 1) -> tuple[list[Any], str]:
        return _call(module, args, kwargs, times)

    try:
        own, attribute = call()
    except (NotImplementedError, torch.linalg.LinAlgError):
        return
    except Exception as error:
        raise fails_itself(module, error) from error
    outputs = run(None)
    wrong = difference(outputs, own)
    if not wrong and not (attribute and difference(outputs, call(2)[0])):
        return
    if difference(own, call(2)[0]):
        raise CaptureError(
            "two calls of the module with the same inputs give other numbers: "
            + (
                f"it keeps {attribute!r} between them. Make that an input and an output"
                if attribute
                else "it counts them, reads what nobody wrote (torch.empty), or draws from "
                "Python's or numpy's random numbers. Make that an input, write it, or draw "
                "with torch"
            )
        )
    where = _first_module(module, args, kwargs, run)
    what = f"the module gives other numbers when it is called than torch.export traces: {wrong}"
    what += f", first in module {where!r}" if where else ""
    if not difference(outputs, _without_fast_path(call)):
        raise CaptureError(
            f"{what}. Only the call takes torch's fast path of attention: switch it off, with "
            "torch.backends.mha.set_fastpath_enabled(False), and capture the module again"
        )
    with calls_from_user(_QUESTIONS) as questions:
        call()
    raise CaptureError(
        f"{what}. "
        + (f"It asks whether it is traced{questions[0][1]}" if questions else _UNKNOWN)
        + ": make both ways compute the same"
    )


def _call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], times: int
) -> tuple[list[Any], str]:
    """Outputs of the last of so many calls, flat, and an attribute that the calls changed."""
    with left_as_it_was(module), torch.random.fork_rng(devices=[]), quiet():
        for m in module.modules():
            m.training = False
        with left_as_it_was(module) as replaced:
            for _ in range(times):
                outputs = module(*args, **kwargs)
    return pytree.tree_leaves(outputs), next((path for path, _ in replaced), "")


def _without_fast_path(call: Callable[[], tuple[list[Any], str]]) -> list[Any]:
    was = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        return call()[0]
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def _first_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: Callable[[Watch | None], list[Any]],
) -> str:
    """Path of the first submodule that gives what no operator gives; empty if there is none."""
    path = {id(m): p for p, m in module.named_modules()}
    tensors = [x.detach().clone() for x in pytree.tree_leaves((args, kwargs)) if _is_tensor(x)]
    run(lambda _, x: tensors.append(x.clone()))
    paths: list[str] = []

    def compare(m: nn.Module, _: Any, result: Any) -> None:
        values = [x for x in pytree.tree_leaves(result) if _is_tensor(x) and not x.is_nested]
        if not all(any(not difference([y], [x]) for y in tensors) for x in values):
            paths.append(path.get(id(m), ""))

    with register_module_forward_hook(compare):
        _call(module, args, kwargs, 1)
    return next(filter(None, paths), "")


def difference(got: list[Any], expected: list[Any]) -> str:
    """How values differ by more than rounding, in words; empty if they do not.

    Rounding reaches the root of the type's precision, of the largest value; what ``expected``
    has no number for (NaN) may be anything.
    """
    if len(got) != len(expected):
        return f"{len(got)} outputs instead of {len(expected)}"
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if _is_tensor(a) and _is_tensor(b):
            wrong = _tensors_differ(a, b)
        else:
            wrong = "" if type(a) is type(b) and (a is b or a == b or b != b) else f"{a} for {b}"
        if wrong:
            return f"output {i} is {wrong}"
    return ""


def _tensors_differ(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype}{list(a.shape)} for {b.dtype}{list(b.shape)}"
    if not (a.is_floating_point() or a.is_complex()):
        wrong = int((a != b).sum())
        return f"another in {wrong} of {a.numel()} elements" if wrong else ""
    precise = torch.complex128 if a.is_complex() else torch.float64
    rounding = torch.finfo(a.dtype).eps ** 0.5
    a, b = a.detach().to(precise), b.detach().to(precise)
    numeric = ~b.isnan()
    a, b = a[numeric], b[numeric]
    finite = b[b.isfinite()].abs()
    reach = float(finite.max()) if finite.numel() else 0.0
    far = ~torch.isclose(a, b, rtol=0.0, atol=rounding * max(reach, 1e-30))
    if not far.any():
        return ""
    most = float((a - b)[far].abs().max())
    return (
        f"off by up to {most:.3g} in {int(far.sum())} of {far.numel()} numbers (up to {reach:.3g})"
    )


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)
