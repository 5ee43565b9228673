"""Random small modules from a grammar: ``parts`` for hypothesis, ``build`` for the module.

Every part maps ``[BATCH, WIDTH]`` to the same. A sentence is plain data, so a failing one can be
read, made smaller and typed in again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.modules import module_of

BATCH, WIDTH = 4, 6


class Part(NamedTuple):
    """A word of the grammar.

    Attributes:
        kind: a key of ``LEAVES`` or ``AROUND``.
        inside: the parts that it is around.
        frozen: whether its own parameters have ``requires_grad=False``.
        evaluation: whether it is in evaluation mode.
    """

    kind: str
    inside: tuple[Part, ...] = ()
    frozen: bool = False
    evaluation: bool = False


# ---------------------------------------------------------------- custom functions


class Reverse(torch.autograd.Function):
    """Of domain adaptation: the gradient comes back with the other sign."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


class Round(torch.autograd.Function):
    """Straight-through estimator, in the style with ``setup_context``."""

    @staticmethod
    def forward(x, steps):
        return (x * steps).round() / steps

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1), None


class Split(torch.autograd.Function):
    """Two inputs, one may need no gradient; two outputs and one that cannot have one."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        largest = x.argmax(-1)
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return x * weight, x + 1, largest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, of_product, of_sum, _):
        x, weight = ctx.saved_tensors
        zero = torch.zeros_like(x)
        of_product = zero if of_product is None else of_product
        of_x = of_product * weight + (zero if of_sum is None else 2 * of_sum)
        return of_x, (of_product * x).sum(0) * 3 if ctx.needs_input_grad[1] else None


class Double(torch.autograd.Function):
    """Works in place; its backward is not its derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-0.01, 0.01)


# ---------------------------------------------------------------- leaves


def leaf(function: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """A function of (itself, x), with a weight, a buffer and a linear layer to use."""
    return lambda: module_of(
        function,
        weight=nn.Parameter(torch.randn(WIDTH)),
        linear=nn.Linear(WIDTH, WIDTH),
        seen=torch.rand(WIDTH) + 0.5,
    )


def split_function(m: Any, x: Tensor) -> Tensor:
    product, more, largest = Split.apply(x, m.weight)
    return product + more * (largest > 2)[:, None]


def changed_slice(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    y[:, ::2].mul_(m.weight[::2]).add_(0.1)
    return y


def hooked(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-0.01, 0.02) * 2)
    return y


def running_mean(m: Any, x: Tensor) -> Tensor:
    m.seen.lerp_(x.detach().mean(0), 0.5)
    return x - m.seen * m.weight


def slice_of_buffer(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.seen[:3].mul_(0.5).add_(0.1)
    return x * m.seen.clone()


def gradient_inside(m: Any, x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(m.linear(y).tanh().sum(), y, create_graph=True)
    return x + grad


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.linear(x).abs().amax() + 1
    return m.linear(x) / scale


def inferred(m: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = m.linear(x).abs().amax() + 1
    return x * m.weight + scale.clone()


def padded(m: Any, x: Tensor) -> Tensor:
    return F.pad(m.linear(x), (2, 1), value=0.5)[:, 1:-2]


def viewed(m: Any, x: Tensor) -> Tensor:
    left, right = (x * m.weight).view(BATCH, 2, 3).transpose(1, 2).unbind(-1)
    return torch.cat([right, left.flip(-1)], -1)


def looked_up(m: Any, x: Tensor) -> Tensor:
    table = torch.stack([m.weight, m.weight * 2, m.weight.detach()])
    return x + F.embedding(x.detach().argmax(-1) % 3, table, padding_idx=1)


def pieces(x: Tensor) -> Tensor:
    return x.view(BATCH, 3, 2)


class Attention(nn.Module):
    """A transformer's layer over three positions, the last of which is padding for some."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True)
        mask = torch.zeros(BATCH, 3, dtype=torch.bool)
        mask[1:, -1] = True
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(pieces(x), src_key_padding_mask=self.mask).flatten(1)


def convolution() -> nn.Module:
    conv = nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular")
    parts = {"conv": conv, "norm": nn.GroupNorm(1, 3)}
    return module_of(
        lambda m, x: F.relu(m.norm(m.conv(pieces(x))), inplace=True).flatten(1), **parts
    )


def recurrent() -> nn.Module:
    gru = nn.GRU(2, 2, batch_first=True)
    return module_of(lambda m, x: m.gru(pieces(x))[0].flatten(1), gru=gru)


def embedding() -> nn.Module:
    table = nn.Embedding(5, WIDTH, padding_idx=0)
    return module_of(
        lambda m, x: x + m.table((x.detach().abs() * 3).long().clamp(max=4)).sum(1), table=table
    )


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "tied": lambda: nn.Linear(WIDTH, WIDTH),  # build gives it the weight of the first linear
    "relu": lambda: nn.ReLU(inplace=True),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch_norm_of_all": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.5),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "attention": Attention,
    "convolution": convolution,
    "recurrent": recurrent,
    "embedding": embedding,
    "reverse": leaf(lambda m, x: Reverse.apply(m.linear(x), 0.5)),
    "round": leaf(lambda m, x: Round.apply(x * m.weight, 4)),
    "split": leaf(split_function),
    "double": leaf(lambda m, x: Double.apply(m.linear(x))),
    "round_detached": leaf(lambda m, x: (y := m.linear(x)) + (y.round() - y).detach()),
    "round_data": leaf(lambda m, x: (y := m.linear(x)) + (y.round() - y).data),
    "hooked": leaf(hooked),
    "changed_slice": leaf(changed_slice),
    "running_mean": leaf(running_mean),
    "slice_of_buffer": leaf(slice_of_buffer),
    "gradient_inside": leaf(gradient_inside),
    "without_gradient": leaf(without_gradient),
    "inferred": leaf(inferred),
    "padded": leaf(padded),
    "viewed": leaf(viewed),
    "looked_up": leaf(looked_up),
}


# ---------------------------------------------------------------- around others


def stopped(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return inner(x)


AROUND: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "residual": lambda inner, x: x + inner(x.clone()),
    "twice": lambda inner, x: inner(inner(x)),
    "detached": lambda inner, x: x + inner(x.clone()).detach(),
    "stopped": lambda inner, x: x * 2 + stopped(inner, x.clone()),
    "checkpoint": lambda inner, x: checkpoint(inner, x.clone(), use_reentrant=False),
    "reentrant": lambda inner, x: checkpoint(inner, x.clone(), use_reentrant=True),
    "branches": lambda inner, x: torch.cat([inner(x.clone())[:, :3], x[:, 3:]], -1),
}


# ---------------------------------------------------------------- sentences


def _words(inside: st.SearchStrategy[tuple[Part, ...]]) -> st.SearchStrategy[Part]:
    return st.builds(Part, st.sampled_from(sorted(AROUND)), inside, st.booleans(), st.booleans())


def _leaves() -> st.SearchStrategy[Part]:
    kinds = st.sampled_from(sorted(LEAVES))
    return st.builds(Part, kinds, st.just(()), st.booleans(), st.booleans())


def parts() -> st.SearchStrategy[tuple[Part, ...]]:
    """Sentences of one to four parts, up to two deep."""
    inner = st.lists(_leaves(), min_size=1, max_size=2).map(tuple)
    return st.lists(_leaves() | _words(inner), min_size=1, max_size=4).map(tuple)


def kinds_of(sentence: tuple[Part, ...]) -> set[str]:
    return {x.kind for x in sentence} | {k for x in sentence for k in kinds_of(x.inside)}


def draws(sentence: tuple[Part, ...], training: bool = True) -> bool:
    """Whether the module draws random numbers."""
    words = [(x, training and not x.evaluation) for x in sentence]
    return any((x.kind == "dropout" and trains) or draws(x.inside, trains) for x, trains in words)


def build(sentence: tuple[Part, ...], seed: int = 0) -> nn.Module:
    """The module, between two linear layers that train; parts in evaluation mode are so."""
    torch.manual_seed(seed)
    first = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, *(_build(x, first) for x in sentence), nn.Linear(WIDTH, WIDTH))


def _build(part: Part, first: nn.Linear) -> nn.Module:
    if part.kind in AROUND:
        inner = nn.Sequential(*(_build(x, first) for x in part.inside))
        module = module_of(lambda m, x: AROUND[part.kind](m.inner, x), inner=inner)
    else:
        module = LEAVES[part.kind]()
        if part.kind == "tied":
            module.weight = first.weight
    for name, p in module.named_parameters():
        if part.frozen and p is not first.weight and name.count(".") < 2:
            p.requires_grad_(False)
    return module.eval() if part.evaluation else module


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets."""
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(BATCH, WIDTH, generator=g), torch.randn(BATCH, WIDTH, generator=g))
        for _ in range(count)
    ]
