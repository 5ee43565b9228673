"""When results on other devices are equal: by how much rounding may make them differ.

Two correct runs of a model add up in other orders, and a GPU may round the factors of products to
ten binary digits (TF32). So tensors are compared as a whole, by the norm of their difference, and
every element by what one of them may stray.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from placement.cluster import Cluster

# Largest norm of a difference, relative to the norm of the result. ResNet-50 in float32 is 5e-7
# from float64, and 4e-4 with factors in TF32.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Tolerance:
    """``relative``: of norms; ``what``: for which arithmetic, in words."""

    relative: float
    what: str

    @classmethod
    def of(cls, tensors: Iterable[Any], cluster: Cluster) -> Tolerance:
        """For the coarsest floating dtype of ``tensors``, and TF32 where a GPU may use it."""
        dtypes = {x.dtype for x in tensors if isinstance(x, Tensor) and x.is_floating_point()}
        eight_bits = 0.1
        dtype = max(dtypes or {torch.float32}, key=lambda d: TOLERANCES.get(d, eight_bits))
        name = str(dtype).removeprefix("torch.")
        chosen = cls(TOLERANCES.get(dtype, eight_bits), name)
        on_gpu = any(d.kind == "cuda" for d in cluster.devices)
        if on_gpu and dtype == torch.float32 and tf32_is_allowed():
            return cls(3e-3, "float32 with TF32 allowed on a GPU")
        return chosen


def tf32_is_allowed() -> bool:
    """Whether a GPU may multiply float32 in TF32: convolutions may, unless somebody forbade it."""
    try:
        return torch.backends.cudnn.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set for some operators and not for others
        return True


def error(actual: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """By how much ``actual`` differs, relative to ``expected`` or, if larger, ``scale``.

    The norm of the difference over the norm; or a tenth of the largest difference of an element,
    over its size plus the typical size, if that is more. inf: of another shape, not a number or
    infinite in other places, or integers that are not the same. Computed where ``expected`` is.
    """
    if _unlike(actual, expected):
        return float("inf")
    if not expected.is_floating_point() and not expected.is_complex():
        return 0.0
    a, b = _exact(actual, expected)
    finite = torch.isfinite(b)
    if not finite.all():
        a, b = a[finite], b[finite]
    if not len(b):
        return 0.0
    typical = max(b.abs().square().mean().sqrt().item(), scale) or 1.0
    apart = (a - b).abs()
    whole = apart.square().mean().sqrt().item() / typical
    return max(whole, (apart / (typical + b.abs())).max().item() / 10)


def _unlike(actual: Tensor, expected: Tensor) -> str:
    """Where two tensors differ so that no number tells how far; empty if one does."""
    if actual.shape != expected.shape:
        return f"it has shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not expected.is_floating_point() and not expected.is_complex():
        others = int((actual.cpu() != expected.cpu()).sum())
        choice = "among equal values, or nearly equal ones, another device may choose another"
        return f"{others} of {actual.numel()} integers are others ({choice})" if others else ""
    a, b = _exact(actual, expected)
    alike = torch.where(torch.isfinite(b), torch.isfinite(a), (a == b) | (a.isnan() & b.isnan()))
    others = int(alike.logical_not().sum().item())
    return f"{others} of {len(b)} numbers are not finite in the same way" if others else ""


def _exact(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Flat, in float64, where the last is; it is complex, or they are real."""
    last = tensors[-1]
    dtype = torch.complex128 if last.is_complex() else torch.float64
    return tuple(x.detach().to(last.device).to(dtype).flatten() for x in tensors)


def difference(actual: Sequence[Any], expected: Sequence[Any], tolerance: Tolerance) -> str:
    """Which of the tensors is not as expected, and by how much; empty if all are."""
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(b, Tensor) and error(a, b) > tolerance.relative:
            return said(f"output {i}", a, b, tolerance)
    return ""


def said(
    what: str, actual: Tensor, expected: Tensor, tolerance: Tolerance, scale: float = 0.0
) -> str:
    """The sentence about a tensor that is not close."""
    if unlike := _unlike(actual, expected):
        return f"{what} is not close: {unlike}"
    return (
        f"{what} is not close: relative error {error(actual, expected, scale):.2g}, at most "
        f"{tolerance.relative:g} is allowed ({tolerance.what})"
    )


def module_difference(
    run: Any, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], cluster: Cluster
) -> str:
    """How what ``run`` computes differs from what the plain module does; empty if it is equal.

    Where the difference might be rounding, the module's own too, float64 decides: the module is
    copied and run in it, unless it is larger than 2 GiB or cannot.
    """
    with torch.no_grad():
        expected = pytree.tree_leaves(module(*args, **kwargs))
    actual = pytree.tree_leaves(run(*args, **kwargs))
    state = [*module.parameters(), *module.buffers()]
    tolerance = Tolerance.of([*state, *expected], cluster)
    wrong = difference(actual, expected, tolerance)
    close = Tolerance(1e3 * tolerance.relative, "")  # what is beyond is wrong
    if not wrong or difference(actual, expected, close):
        return wrong
    if sum(x.nbytes for x in state) > 2**31:
        return wrong

    def exact(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    try:
        with torch.no_grad():
            a, k = pytree.tree_map(exact, (list(args), kwargs))
            exactly = pytree.tree_leaves(copy.deepcopy(module).double()(*a, **k))
    except Exception:  # e.g. a dtype is written down in it: then its own precision has to do
        return wrong
    still = difference(actual, exactly, tolerance)
    return still and f"{still}, in float64 too"
