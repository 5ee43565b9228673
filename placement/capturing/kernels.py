"""Kernels that only CPUs have, for every device: elsewhere they are made of others.

PyTorch chooses kernels by the device of a tensor, and a training step is traced on a CPU. What
these make, and read again in the backward, means the same on all devices: forward and backward may
be on different ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_LSTM_BACKWARD = _aten.mkldnn_rnn_layer_backward.default


def kernel_of(target: Any) -> Callable[..., Any]:
    """What to call for the target of a traced node, with tensors of any device."""
    elsewhere = _ELSEWHERE.get(target)
    if elsewhere is None:
        return target  # type: ignore[no-any-return]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # Without a workspace the forward was elsewhere.
        if args[0].device.type != "cpu" or (target is _LSTM_BACKWARD and not args[-1].numel()):
            return elsewhere(*args, **kwargs)
        with torch.enable_grad():  # or recurrent layers keep nothing for their backward
            return target(*args, **kwargs)

    return kernel


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention without dropout, and the logarithm of what its softmax divides by."""
    scores = _scores(query, key, *_, **options)
    total = scores.logsumexp(-1)
    total = total.masked_fill(total == -torch.inf, 0.0)  # a position that may look nowhere
    weights = (scores - total.unsqueeze(-1)).exp()
    output = torch.matmul(weights, value.to(weights.dtype)).to(query.dtype)
    return _by_position(output), _by_position(total)


def _attention_backward(gradient: Tensor, *read: Any, **options: Any) -> tuple[Tensor, ...]:
    query, key, value, output, total, *rest = read
    weights = (_scores(query, key, *rest, **options) - total.unsqueeze(-1)).exp()
    q, k, v, g, o = (x.to(weights.dtype) for x in (query, key, value, gradient, output))
    of_weights = torch.matmul(g, v.mT) - (g * o).sum(-1, keepdim=True)
    of_scores = weights * of_weights * _scale(query, options)
    results = (
        torch.matmul(of_scores, k),
        torch.matmul(of_scores.mT, q),
        torch.matmul(weights.mT, g),
    )
    return tuple(_by_position(x.to(query.dtype)) for x in results)


def _scores(
    query: Tensor,
    key: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """``[B, H, L, S]``, in float32 at least."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = torch.matmul(query.to(dtype) * _scale(query, options), key.to(dtype).mT)
    if (mask := options.get("attn_mask")) is not None:
        scores = scores + mask.to(dtype)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _scale(query: Tensor, options: dict[str, Any]) -> float:
    scale = options.get("scale")
    return query.shape[-1] ** -0.5 if scale is None else float(scale)


def _by_position(x: Tensor) -> Tensor:
    """As the kernel for CPUs lays out ``[B, H, L, ...]``: head beside head."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _lstm(x: Tensor, *read: Any) -> tuple[Tensor, ...]:
    """One layer, in one direction, of ``[T, B, I]``: outputs, last states, no workspace."""
    *weights, h0, c0, is_reverse, _, _, _, _, has_biases, _, _, _ = read
    hidden, cells, _ = _lstm_states(x, weights, h0, c0, is_reverse, has_biases)
    output = torch.stack(hidden[1:])
    return (
        output.flip(0) if is_reverse else output,
        hidden[-1].reshape(h0.shape).clone(),
        cells[-1].reshape(c0.shape).clone(),
        x.new_empty(0, dtype=torch.uint8),
    )


def _lstm_backward(x: Tensor, *read: Any) -> tuple[Tensor, ...]:
    *weights, h0, c0 = read[:6]
    of_output, of_h, of_c, is_reverse, _, _, _, has_biases = read[9:17]
    hidden, cells, gates = _lstm_states(x, weights, h0, c0, is_reverse, has_biases)
    zero = torch.zeros_like(hidden[0])
    of_h = zero if of_h is None else of_h.reshape(zero.shape)
    of_c = zero if of_c is None else of_c.reshape(zero.shape)
    of_step = [zero] * len(gates) if of_output is None else of_output.unbind(0)
    of_gates = []
    for t in reversed(range(len(gates))):
        i, f, g, o = gates[t]
        of_h = of_h + of_step[len(gates) - 1 - t if is_reverse else t]
        bent = cells[t + 1].tanh()
        of_c = of_c + of_h * o * (1 - bent * bent)
        of_each = (
            of_c * g * i * (1 - i),
            of_c * cells[t] * f * (1 - f),
            of_c * i * (1 - g * g),
            of_h * bent * o * (1 - o),
        )
        of_gates.append(torch.cat(of_each, -1))
        of_h, of_c = torch.matmul(of_gates[-1], weights[1]), of_c * f
    every = torch.stack(of_gates if is_reverse else of_gates[::-1])  # in the order of the input
    before = torch.stack(hidden[-2::-1] if is_reverse else hidden[:-1])
    flat = every.flatten(0, 1)
    of_bias = flat.sum(0)
    return (
        torch.matmul(every, weights[0]),
        torch.matmul(flat.T, x.flatten(0, 1)),
        torch.matmul(flat.T, before.flatten(0, 1)),
        of_bias,
        of_bias.clone(),
        of_h.reshape(h0.shape),
        of_c.reshape(c0.shape),
    )


def _lstm_states(
    x: Tensor,
    weights: list[Tensor],
    h0: Tensor,
    c0: Tensor,
    is_reverse: bool,
    has_biases: bool,
) -> tuple[list[Tensor], list[Tensor], list[tuple[Tensor, ...]]]:
    """Hidden states and cells before and after every step, and the gates of each, as they come."""
    hidden, cells = [h0.flatten(0, -2)], [c0.flatten(0, -2)]
    gates: list[tuple[Tensor, ...]] = []
    ahead = torch.matmul(x, weights[0].mT)
    steps = (ahead + (weights[2] + weights[3]) if has_biases else ahead).unbind(0)
    for step in reversed(steps) if is_reverse else steps:
        i, f, g, o = (step + torch.matmul(hidden[-1], weights[1].mT)).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        gates.append((i, f, g, o))
        cells.append(f * cells[-1] + i * g)
        hidden.append(o * cells[-1].tanh())
    return hidden, cells, gates


_ELSEWHERE: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _aten.mkldnn_rnn_layer.default: _lstm,
    _LSTM_BACKWARD: _lstm_backward,
}
