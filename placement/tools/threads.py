"""How many threads PyTorch has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads of PyTorch inside: more only wait for each other where models are small, and
    change rounding."""
    import torch

    before = torch.get_num_threads()  # it takes over the last setting of any thread, so it is first
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
