"""Tensor parallelism of PyTorch as planned: each rank has its part of every module in ``PLAN``.

    torchrun --nproc-per-node RANKS THIS_FILE package.module:function

The function returns ``(module, inputs)``. Exit code 1: torch cannot run it, as one line says, or it
computes something else than the plain module. In a program of your own, on every rank alike:
``parallelize(module)``, which then is called as before, with the same inputs everywhere.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils import _pytree as pytree

from placement.exporters._ranks import arguments, differs, model, on_rank, to

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel", "Shard", "parallelize"]

# Devices of the ranks, and how modules are cut.
RANKS: list[dict[str, Any]] = []
PLAN: dict[str, ParallelStyle] = {}


def parallelize(module: torch.nn.Module, mesh: DeviceMesh | None = None) -> torch.nn.Module:
    """The module with its parts on the ranks of ``mesh``; whole tensors go in and come out.

    What is not in ``PLAN`` runs on whatever parts its inputs are, as ``DTensor`` decides.
    """
    if mesh is None:
        mesh = init_device_mesh(RANKS[0]["kind"], (len(RANKS),))
    whole = partial(pytree.tree_map_only, torch.Tensor, partial(known, mesh))
    for path in PLAN:  # or a style may take what was made within forward for a part
        module.get_submodule(path).register_forward_pre_hook(lambda _, args: whole(args))
    parallelize_module(module, mesh, PLAN)
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = whole((args, kwargs))
        with implicit_replication():
            return pytree.tree_map_only(DTensor, DTensor.full_tensor, forward(*args, **kwargs))

    module.forward = run
    return module


@register_sharding(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(
    query: Any, key: Any, value: Any, *_: Any, attn_mask: Any = None, **__: Any
) -> list[tuple[list[Any], list[Any]]]:
    """By sequence or by head, which torch 2.13 knows of kernels of GPUs only."""
    ways = []
    for how in (Replicate(), Shard(0), Shard(1)):
        ways.append(([how] * 2, [how] * 3 + [None] * len(_)))
        if attn_mask is not None:
            d = getattr(how, "dim", 0)
            mask = how if attn_mask.ndim == 4 and attn_mask.shape[d] > 1 else Replicate()
            ways[-1][1].append(mask)
    return ways


def known(mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
    """As a tensor that every rank has."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])


def main() -> int:
    return on_rank(RANKS, "torch.distributed.tensor", check)


def check(rank: int, device: torch.device) -> int:
    """Rank 0 prints whether results are the plain module's, and seconds of a call of either."""
    module, example = model()
    module = module.eval().to(device)
    args, kwargs = arguments(to(example, device))
    with torch.no_grad():
        expected, plain_s = timed(module, args, kwargs)
        actual, parallel_s = timed(parallelize(module), args, kwargs)
    wrong = differs(actual, expected, rtol=1e-4, atol=1e-4)
    if rank == 0:
        seconds = {"seconds": parallel_s, "plain_seconds": plain_s}
        print(json.dumps({"modules": len(PLAN), "equal": not wrong, **seconds, "wrong": wrong}))
    return 1 if wrong else 0


def timed(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, float]:
    """What the module computes, and seconds of its second call."""
    module(*args, **kwargs)
    dist.barrier()
    began = time.perf_counter()
    result = module(*args, **kwargs)
    dist.barrier()
    return result, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
