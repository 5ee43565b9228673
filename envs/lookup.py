"""What is found by its full name: rewards, generators, formulations, encoders, algorithms."""

from __future__ import annotations

from typing import Any

from envs.problems import EnvError
from placement.tools.named import imported


def find(name: str, what: str) -> Any:
    """The object ``package.module:name``; importing the module executes it.

    Args:
        what: in words what it should be, for messages.

    Raises:
        EnvError: it is no such name, or cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise EnvError(f"{what} {name!r} names no object; write package.module:name")
    try:
        return imported(module, attribute)
    except ImportError as error:
        raise EnvError(f"{what} {name!r} cannot be imported: {error}") from error


def name_of(target: Any) -> str:
    """``package.module:name`` of a function, a class, or an instance's class; a name is itself."""
    if isinstance(target, str):
        return target
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}:{named.__qualname__}"
