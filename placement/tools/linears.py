"""Linear layers of float32 whose weights are packed for the processor, by library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_mkl, _mkldnn = torch.ops.mkl, torch.ops.mkldnn
MKL, ONEDNN = "mkl", "onednn"
# What packs the weights of a layer for a number of rows; None: this build has not got it.
PACKS: dict[str, Any] = {
    MKL: getattr(_mkl, "_mkl_reorder_linear_weight", None),
    ONEDNN: getattr(_mkldnn, "_reorder_linear_weight", None),
}


def linear_calls(x: Tensor, weight: Tensor, bias: Tensor | None) -> dict[str, Callable[[], Any]]:
    """By library, a call: ``x`` is ``[rows, width]``, ``weight`` ``[columns, width]``."""
    rows = len(x)
    packed = {name: pack(weight, rows) for name, pack in PACKS.items() if pack is not None}
    calls: dict[str, Callable[[], Any]] = {
        MKL: lambda: _mkl._mkl_linear(x, packed[MKL], weight, bias, rows),
        ONEDNN: lambda: _mkldnn._linear_pointwise(x, packed[ONEDNN], bias, "none", [], ""),
    }
    return {name: calls[name] for name in packed}
