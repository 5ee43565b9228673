"""What is found by its full name: rewards, generators, formulations, encoders, algorithms."""

from __future__ import annotations

from functools import partial
from typing import Any

from envs.problems import EnvError
from placement.tools.named import imported

find = partial(imported, error=EnvError)


def name_of(target: Any) -> str:
    """``package.module:name`` of a function, a class, or an instance's class; a name is itself."""
    if isinstance(target, str):
        return target
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}:{named.__qualname__}"
