"""Kernels that only CPUs have, for every device: elsewhere they are made of others.

PyTorch chooses kernels by the device of a tensor, and a training step is traced on a CPU. What
these make, and read again in the backward, means the same on all devices: forward and backward may
be on different ones. On CUDA, attention is PyTorch's memory-efficient one where PyTorch allows it:
it never holds a score for every pair of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import pad

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_LSTM_BACKWARD = _aten.mkldnn_rnn_layer_backward.default


def kernel_of(node: fx.Node) -> Callable[..., Any]:
    """What to call for a traced node, with tensors of any device."""
    target: Any = node.target
    if target in _VIEWS:
        # What a kernel makes may have other strides than torch's own description of it: where
        # those of the trace allow a view, a copy may be needed.
        return Tensor.reshape
    elsewhere = _ELSEWHERE.get(target)
    if elsewhere is None:
        return target  # type: ignore[no-any-return]
    if target in _EFFICIENT and _of_booleans(node.kwargs.get("attn_mask")):
        elsewhere = _EFFICIENT[target]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # Without a workspace the forward was elsewhere.
        if args[0].device.type != "cpu" or (target is _LSTM_BACKWARD and not args[-1].numel()):
            return elsewhere(*args, **kwargs)
        with torch.enable_grad():  # or recurrent layers keep nothing for their backward
            return target(*args, **kwargs)

    return kernel


def _of_booleans(mask: Any) -> bool:
    """Whether a mask is absent, or 0 and -inf chosen by booleans: PyTorch makes such of those.

    The efficient kernel multiplies by ``log2(e)``: the lowest finite numbers become -inf there, and
    a position whose scores all have one then looks nowhere instead of everywhere.
    """
    if mask is None:
        return True
    numbers = [x.args for x in mask.args[1:]] if mask.target is _aten.where.self else []
    return numbers == [(0.0,), (-torch.inf,)]


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    causal: bool = False,
    **by: Any,
) -> tuple[Tensor, Tensor]:
    if not _suits(query, key, value, by):
        return _attention(query, key, value, dropout_p, causal, **by)
    bias = _bias(query, key, by)
    read = [_aligned(x) for x in (query, key, value)]
    output, total, *_ = _aten._scaled_dot_product_efficient_attention(
        *read, bias, True, 0.0, causal, scale=by.get("scale")
    )
    return _like(query, output), _by_position(total.narrow(-1, 0, query.shape[2]))


def _efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    dropout_p: float,
    causal: bool,
    **by: Any,
) -> tuple[Tensor, ...]:
    if not _suits(query, key, value, by):
        read = (query, key, value, output, total)
        return _attention_backward(gradient, *read, dropout_p, causal, **by)
    bias = _bias(query, key, by)
    # The kernel takes for granted that heads of the output are side by side.
    output = _aligned(output.transpose(1, 2).contiguous()).transpose(1, 2)
    padded = pad(total.contiguous(), (0, -total.shape[2] % 32), value=torch.inf)
    seed = torch.empty((), dtype=torch.int64, device=total.device)  # of dropout: nobody reads it
    results = _aten._scaled_dot_product_efficient_attention_backward(
        *(_aligned(x.to(query.dtype)) for x in (gradient, query, key, value)),
        *(bias, output.to(query.dtype), padded, seed, seed),
        *(0.0, [True, True, True, False], causal),
        scale=by.get("scale"),
    )
    return tuple(results[:3])


def _suits(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether the efficient kernel may be called; always ``False`` without CUDA."""
    read = torch.backends.cuda.SDPAParams(
        *(query, key, value, options.get("attn_mask"), 0.0, False, False)
    )
    return max(query.shape[:2]) < 2**16 and torch.backends.cuda.can_use_efficient_attention(read)


def _aligned(x: Tensor) -> Tensor:
    """``x``, or a copy: the efficient kernel reads 16 bytes at once."""
    step = 16 // x.element_size()
    starts = (x.storage_offset(), *x.stride()[:-1])
    if x.stride(-1) == 1 and not any(start % step for start in starts):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _bias(query: Tensor, key: Tensor, options: dict[str, Any]) -> Tensor | None:
    """The mask as ``[B, H, L, S]``, in rows of a multiple of 16 numbers."""
    mask, length = options.get("attn_mask"), key.shape[2]
    if mask is None:
        return None
    rows = pad(mask.expand(*mask.shape[:-1], length).contiguous(), (0, -length % 16))
    return rows.narrow(-1, 0, length).expand(*query.shape[:3], length)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *how: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention without dropout, and the logarithm of what its softmax divides by."""
    scores = _scores(query, key, *how, **options)
    most = scores.amax(-1, keepdim=True)
    most = most.masked_fill(most == -torch.inf, 0.0)  # a position that may look nowhere
    weights = (scores - most).exp()
    sums = weights.sum(-1, keepdim=True)
    sums = sums.masked_fill(sums == 0, 1.0)
    output = torch.matmul(weights, value.to(weights.dtype)) / sums
    return _like(query, output), _by_position((most + sums.log()).squeeze(-1))


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


def _like(query: Tensor, output: Tensor) -> Tensor:
    """As the kernel for CPUs lays out what it makes: views of it were traced so."""
    like = torch.empty_like(query)
    same = (like.dtype, like.stride()) == (output.dtype, output.stride())
    return output if same else like.copy_(output)


def _by_position(x: Tensor) -> Tensor:
    """The same for gradients and logarithms, ``[B, H, L, ...]``: head beside head."""
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
_EFFICIENT: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _efficient,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _efficient_backward,
}
