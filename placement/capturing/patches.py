"""What of torch is replaced while a module is traced, each with what makes that needless."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.fx.experimental import proxy_tensor
from torch.nn.modules import transformer
from torch.utils._python_dispatch import _disable_current_modes

from placement.program import CaptureError


class Patch(NamedTuple):
    """``owner.name`` is ``value`` while a module is traced.

    ``until``: number of the issue or change of pytorch/pytorch that the patch stands for: with a
    torch that has it, the patch can go if its tests pass without it; None: none is known.
    """

    owner: Any
    name: str
    value: Any
    until: int | None
    in_training: bool = True


def patched(training: bool) -> ExitStack:
    """All patches, of a trace with or without training."""
    stack = ExitStack()
    for patch in PATCHES:
        if patch.in_training or not training:
            create = patch.owner is proxy_tensor  # a private name, which not every torch has
            stack.enter_context(mock.patch.object(*patch[:3], create=create))
    return stack


_encode, _likelihood = nn.TransformerEncoder.forward, nn.functional.gaussian_nll_loss
_distribution = torch.distributions.Distribution.__init__


def _encoder(
    self: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    """As a call computes it: padded positions come out as zeros.

    A call makes nested tensors of padded sequences, which a trace leaves out.
    """
    first, padding = self.layers[0], src_key_padding_mask
    is_nested = (
        torch.backends.mha.get_fastpath_enabled()
        and getattr(self, "use_nested_tensor", False)
        and not first.training
        and src.dim() == 3
        and padding is not None
        and mask is None
        and not torch.is_autocast_enabled()
        and not (
            torch.is_grad_enabled() and any(x.requires_grad for x in (src, *first.parameters()))
        )
    )
    if not is_nested:
        return _encode(self, src, mask, padding, is_causal)
    norm, self.norm, self.use_nested_tensor = self.norm, None, False
    try:
        output = _encode(self, src, None, padding, is_causal)
    finally:
        self.norm, self.use_nested_tensor = norm, True
    assert padding is not None
    padded = padding if padding.dtype == torch.bool else padding != 0
    if getattr(self, "mask_check", True):  # only if all are padded at their ends
        padded = padded & (padded[:, 1:] >= padded[:, :-1]).all()
    output = output.masked_fill(padded[..., None], 0.0)
    return output if norm is None else norm(output)


def _is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """A call compares the mask with the causal one for the sake of a faster kernel."""
    return is_causal is True


def _unchecked(self: Any, *args: Any, **kwargs: Any) -> None:
    """Without the checks of parameters, which are values that a trace does not have."""
    _distribution(self, *args[:2], **kwargs | {"validate_args": False})


def _of_any_variance(*args: Any, **kwargs: Any) -> Tensor:
    """Without the check that no variance is negative."""
    with mock.patch.object(torch, "any", lambda _: False):  # all that it is asked for
        return _likelihood(*args, **kwargs)


def _convert(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """Of tensors that are as asked already.

    Torch would replace each of them, which a trace cannot follow.

    Raises:
        CaptureError: something else is asked.
    """
    with _disable_current_modes():
        for x in chain(self.parameters(recurse), self.buffers(recurse)):
            like = torch.empty((0,) * x.dim(), dtype=x.dtype, device=x.device)
            if function(like) is not like:
                raise CaptureError(
                    f"a {type(self).__name__} is converted while the module runs (to, half, cuda, "
                    "...): convert it before it is captured"
                )
    return self


PATCHES = (
    Patch(nn.TransformerEncoder, "forward", _encoder, 178677),
    Patch(transformer, "_detect_is_causal_mask", _is_causal_mask, 91171),
    Patch(torch.distributions.Distribution, "__init__", _unchecked, 135061),
    Patch(nn.functional, "gaussian_nll_loss", _of_any_variance, None),
    # ``to``, ``float``, ``cuda``, ... of a module in a forward.
    Patch(nn.Module, "_apply", _convert, 153056),
    # Words that switch gradients on and off stay in the graph, though nobody asks for gradients; of
    # ``torch.set_grad_enabled`` without a ``with`` torch makes a region that it cannot remove. What
    # is left of such words is autocast's.
    Patch(
        proxy_tensor,
        "_side_effectful_need_to_be_preserved_pre_dispatch",
        (torch.amp._enter_autocast, torch.amp._exit_autocast),
        106137,
        in_training=False,
    ),
)
