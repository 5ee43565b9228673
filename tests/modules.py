"""Small torch modules: a forward as a function, and the parts that it uses."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def module_of(forward: Callable[..., Any], **parts: nn.Module | Tensor) -> nn.Module:
    """A module of ``parts`` (a plain tensor is a buffer) with ``forward(self, inputs...)``."""
    made = type("Net", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
        made.register_buffer(name, part) if buffer else setattr(made, name, part)
    return made
