"""What no input and no parameter decides is computed once: masks, positions, sizes.

A model that is traced builds its masks in every call, where the module itself, called as it is,
may see that it needs none. Attention under a mask that hides nothing, or only what comes later, is
told so: kernels need no mask then, and none has to be converted in every layer.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from placement.program import Param, Program, Ref, Step, fill, leaves_of, storage_of

_MOST_BYTES = 2**24  # of a device, all together: nobody has planned for them
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def constants(program: Program, ops: Set[int], device: torch.device) -> dict[int, Tensor]:
    """Tensors that ``ops`` make or read and that are the same in every call, on ``device``.

    Nobody writes to them. None of a training step: there what is saved for the backward may be
    changed.
    """
    if program.gradients or program.new_buffers:
        return {}
    constant, sizes = dict[int, Tensor](), dict[int, int]()
    for n in sorted(_constant_steps(program)):
        step = program.steps[n]
        # One that fails does so again where it runs, with its name.
        with (
            suppress(Exception),
            torch.inference_mode(),
            torch._C._DisableAutocast(),  # the caller's, as a default device is
            torch._C.DisableTorchFunction(),
        ):
            value = step.target(
                *fill(step.args, constant, (), device), **fill(step.kwargs, constant, (), device)
            )
            values = [value[i] for i in step.output_index] if step.multi else [value]
            more = sizes | {storage_of(x): x.untyped_storage().nbytes() for x in values}
            if sum(more.values()) <= _MOST_BYTES:
                sizes = more
                constant |= zip(step.outputs, values, strict=True)
    near = {t for n in ops for t in program.steps[n].outputs}
    near |= {x.tensor for n in ops for x in _leaves(program.steps[n]) if isinstance(x, Ref)}
    return {t: x for t, x in constant.items() if t in near}


def _constant_steps(program: Program) -> set[int]:
    """Steps that read nothing but what others of them make, and whose memory nobody else has."""
    steps = program.steps
    made_by = {t: n for n, step in enumerate(steps) for t in step.outputs}
    reads: list[list[int]] = []  # the steps before, -1 for inputs and parameters
    readers: dict[int, list[int]] = {n: [] for n in range(-1, len(steps))}
    for n, step in enumerate(steps):
        leaves = _leaves(step)
        reads.append([made_by.get(x.tensor, -1) if isinstance(x, Ref) else -1 for x in leaves])
        for m in reads[n]:
            readers[m].append(n)
    shown = {made_by.get(x.tensor, -1) for x in program.output_leaves if isinstance(x, Ref)}
    left = {n for n, step in enumerate(steps) if _is_pure(step.target)} - shown
    while True:
        gone = {
            n
            for n in left
            if not left.issuperset(reads[n])
            or any(_may_share(steps[m], {*steps[n].outputs}) for m in readers[n] if m not in left)
        }
        if not gone:
            return left
        left -= gone


def _leaves(step: Step) -> list[Ref | Param]:
    return [x for x in leaves_of((step.args, step.kwargs)) if isinstance(x, Ref | Param)]


def _is_pure(target: Any) -> bool:
    return (
        isinstance(target, OpOverload)
        and target.namespace == "aten"
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _may_share(step: Step, tensors: Set[int]) -> bool:
    """Whether a step may write to one of these ``tensors``, or make what is in its memory.

    Of operators that are made of others schemas do not always say so: ``dropout``, ``meshgrid`` or
    ``einsum`` may return what they are given first, or a view of it.
    """
    target = step.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return True
    if target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        at = int(target is torch.ops.aten.einsum.default)  # behind its equation
        given = leaves_of(step.args[at : at + 1])
        return any(isinstance(x, Ref) and x.tensor in tensors for x in given)
    returns_it = any(x.alias_info is not None for x in target._schema.returns)
    return returns_it or torch.Tag.maybe_aliasing_or_mutating in target.tags


def is_known(step: Step, known: Container[int]) -> bool:
    """Whether nothing is left for a step to do: all that it makes is among ``constants``."""
    return bool(step.outputs) and all(t in known for t in step.outputs)


def with_constants(step: Step, known: Mapping[int, Tensor]) -> Step:
    """The step, attention without a mask that hides nothing, or just what comes later."""
    if step.target is not _ATTENTION:
        return step
    names = [x.name for x in _ATTENTION._schema.arguments]
    arguments = dict(zip(names, step.args, strict=False)) | step.kwargs
    mask = arguments.get("attn_mask")
    value = known.get(mask.tensor) if isinstance(mask, Ref) else None
    if value is None or value.dtype is not torch.bool or arguments.get("is_causal"):
        return step
    is_causal = not value.all()
    # PyTorch has no word for what it means where that is not square.
    if is_causal and (value.ndim < 2 or value.shape[-1] != value.shape[-2]):
        return step
    if is_causal and not (value == torch.ones_like(value).tril()).all():
        return step
    arguments |= {"attn_mask": None, "is_causal": bool(is_causal)}
    return replace(step, args=tuple(arguments.pop(x) for x in names[:3]), kwargs=arguments)
