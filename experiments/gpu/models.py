"""Models of the sections, where their operators are placed, and what they compute exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from placement.capturing import capture
from placement.graph import OpGraph
from placement.program import split_inputs
from placement.workloads import load

Model = tuple[nn.Module, Any, OpGraph]  # with example inputs
CHECKED = (  # results of these; a process for each line
    ("tiny_mlp", "tiny_branches", "tiny_views", "bert_tiny"),
    *((name,) for name in (
        "dlrm", "inception", "gpt2", "vit", "bert_base", "lstm", "resnet50", "convnext")),
)  # fmt: skip
# The times of these: name -> workload and its options.
PROFILED: dict[str, tuple[str, dict[str, int]]] = {
    "bert_base": ("bert_base", {}),
    "resnet50": ("resnet50", {}),
    "inception": ("inception", {}),
    "lstm_short": ("lstm", {"steps": 4}),
    "dlrm_b256": ("dlrm", {"batch": 256}),
    "resnet50_b32": ("resnet50", {"batch": 32}),  # last: the CPU takes half a second for it
}
PREDICTED = ("resnet50", "bert_base", "inception")  # and times of placements of these


def captured(key: str) -> Model:
    """One of ``PROFILED``, or else a workload."""
    name, options = PROFILED.get(key, (key, {}))
    module, inputs = load(name, **options)
    return module, inputs, capture(module, inputs, name=key)


def all_on(graph: OpGraph, device: int) -> np.ndarray:
    """int32 ``[N]``; 0 is the CPU, 1 the GPU, and 2 the GPU with parameters streamed to it."""
    return np.full(graph.num_ops, device, np.int32)


def scattered(graph: OpGraph, seed: int) -> np.ndarray:
    """int32 ``[N]``: every colocation group on one of the two devices, at random."""
    devices = np.random.default_rng(seed).integers(2, size=graph.num_groups)
    return devices[graph.group].astype(np.int32)


def uses(placement: np.ndarray) -> str:
    """``CPU``, ``GPU`` or ``both``: what runs anything."""
    return {(0,): "CPU", (1,): "GPU"}.get(tuple(np.unique(placement).tolist()), "both")


def others_like(inputs: Any, seed: int) -> Any:
    """Inputs of the same form with other values: new floats, integers in another order."""
    draw = torch.Generator().manual_seed(seed)

    def other(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.is_floating_point():
            return torch.randn(x.shape, generator=draw, dtype=x.dtype)
        return x.flatten()[torch.randperm(x.numel(), generator=draw)].view(x.shape)

    return pytree.tree_map(other, inputs)


def expected_of(
    module: nn.Module, items: Sequence[Any], device: torch.device | None = None
) -> tuple[list[list[Any]], str]:
    """Outputs for each of ``items``, and their dtype in words.

    In float64 on ``device``; where the module cannot be in float64, as it is.
    """

    def run(model: nn.Module, change: Callable[[Any], Any]) -> list[list[Any]]:
        outputs = []
        for item in items:
            args, kwargs = pytree.tree_map(change, split_inputs(item))
            with torch.no_grad():
                outputs.append(pytree.tree_leaves(model(*args, **kwargs)))
        return outputs

    def exact(x: Any) -> Any:
        if isinstance(x, Tensor):
            return (x.double() if x.is_floating_point() else x).to(device)
        return x

    with suppress(Exception):  # of a module that names a dtype in its code
        return run(copy.deepcopy(module).double().to(device), exact), "float64"
    return run(module, lambda x: x), "its own dtype"


def bytes_of(module: nn.Module) -> int:
    """Of its parameters and buffers."""
    return sum(x.nbytes for x in module.state_dict().values())


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether a GPU may round factors of float32 products to TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])
