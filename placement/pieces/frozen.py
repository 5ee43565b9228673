"""What an operator takes as part of a compiled run, whose weights are packed for the processor.

Convolutions and linear layers are called as such a run calls them. What a compiler fuses with its
neighbours is not timed but taken for a part of what it takes by itself: to decide what to cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from placement.tools.linears import linear_calls

_aten = torch.ops.aten
_LINEAR = {  # places of the input, the weights and the bias; whether weights are transposed
    _aten.linear.default: (0, 1, 2, False),
    _aten.addmm.default: (1, 2, 0, True),
    _aten.mm.default: (0, 1, None, True),
}
_CONVOLUTIONS = _aten.conv2d.default, _aten.convolution.default
_FOLDED = _aten.batch_norm.default, _aten._native_batch_norm_legit_no_training.default
_FUSED = 0.25  # of its time takes what is one kernel with others
_mkldnn = torch.ops.mkldnn

Call = Callable[[], Any]


def share_of(target: Any) -> float:
    """Of the time of an operator by itself, what is left of it in a compiled run."""
    if target in _FOLDED:
        return 0.0
    return _FUSED if torch.Tag.pointwise in getattr(target, "tags", ()) else 1.0


def frozen_calls(target: Any, args: Sequence[Any], is_param: Sequence[bool]) -> list[Call]:
    """The kernels that may stand for a call in a compiled run, the faster does; empty: the same.

    Args:
        args: positional ones; there are no others.
        is_param: of each tensor among them.
    """
    if not torch.backends.mkldnn.is_available():
        return []
    if target in _LINEAR:
        return _linears(args, is_param, *_LINEAR[target])
    return _convolutions(target, args, is_param) if target in _CONVOLUTIONS else []


def _linears(
    args: Sequence[Any], is_param: Sequence[bool], at: int, weights: int, bias: int | None, t: bool
) -> list[Call]:
    x, w = args[at], args[weights]
    b = args[bias] if bias is not None and len(args) > bias else None
    if not is_param[weights] or w.dtype != torch.float32 or w.ndim != 2:
        return []
    if b is not None and b.ndim != 1:
        return []
    x, w = x.reshape(-1, x.shape[-1]).contiguous(), w.t() if t else w
    return [*linear_calls(x, w, b).values()]


def _convolutions(target: Any, args: Sequence[Any], is_param: Sequence[bool]) -> list[Call]:
    names = [x.name for x in target._schema.arguments]
    found = {x.name: x.default_value for x in target._schema.arguments if x.has_default_value()}
    found |= dict(zip(names, args, strict=False))
    x, w, b = found["input"], found["weight"], found["bias"]
    if not is_param[1] or w.dtype != torch.float32 or x.ndim != 4 or found.get("transposed"):
        return []
    numbers = [found[name] for name in ("padding", "stride", "dilation")]
    pairs = [[n, n] if isinstance(n, int) else [*n] * (2 // len(n)) for n in numbers]
    how = *pairs, found["groups"]
    x = x.contiguous(memory_format=torch.channels_last)
    packed = _mkldnn._reorder_convolution_weight(w, *how, x.shape)
    return [lambda: _mkldnn._convolution_pointwise(x, packed, b, *how, "none", [], "")]
