"""What the scripts of exporters have in common: a rank of ``torchrun``, and the model it runs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree


def on_rank(ranks: list[Any], library: str, work: Callable[[int, torch.device], int]) -> int:
    """``work`` of this rank on its device; what ``library`` or the module raises is one line."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if len(sys.argv) != 2 or ":" not in sys.argv[1] or world != len(ranks):
        print(f"torchrun --nproc-per-node {len(ranks)} {sys.argv[0]} package.module:name")
        return 2
    device = take(ranks[rank])
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return work(rank, device)
    except Exception as error:  # of torch's own kinds, and of the module's
        reason = (str(error).strip() or "it gives no reason").splitlines()[0]
        print(f"rank {rank}: {library} fails: {type(error).__name__}: {reason}")
        return 1
    finally:
        dist.destroy_process_group()


def take(described: Mapping[str, Any]) -> torch.device:
    """This process on the device of the plan: its cores and threads, or its GPU."""
    if described["kind"] == "cuda":
        device = torch.device(described["name"])
        torch.cuda.set_device(device)
        return device
    cores = set(described["cores"])
    if cores and hasattr(os, "sched_setaffinity") and cores <= os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)
    if described["threads"]:
        torch.set_num_threads(described["threads"])
    return torch.device("cpu")


def model() -> Any:
    """What the function of the command line returns, with the same weights on every rank."""
    sys.path.append(os.getcwd())
    name, _, function = sys.argv[1].partition(":")
    torch.manual_seed(0)
    return getattr(importlib.import_module(name), function)()


def arguments(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Of a call: an example is an argument, a tuple of them, keyword arguments, or both."""
    if isinstance(example, Mapping):
        return (), example
    args = tuple(example) if isinstance(example, tuple | list) else (example,)
    if len(args) == 2 and isinstance(args[0], tuple) and isinstance(args[1], Mapping):
        return args
    return args, {}


def to(value: Any, device: torch.device) -> Any:
    """With its tensors on the device."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), value)


def differs(actual: Any, expected: Any, **tolerance: Any) -> str:
    """Which tensors are not close, and by how much; empty if all are."""
    try:
        torch.testing.assert_close(
            pytree.tree_leaves(actual), pytree.tree_leaves(expected), **tolerance
        )
    except AssertionError as error:
        return str(error)
    return ""
