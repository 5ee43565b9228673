"""Models to place: one file per family, one function per model.

A workload is a function that returns ``(module, inputs)``: a module in evaluation mode with
random weights of a fixed seed, and example inputs as ``placement.capture`` takes them. Every
public function of the files of models is one, and its name is how ``load`` finds it.

Beside them: ``synthetic`` problems, the ``zoo`` of other people's models, the ``dataset`` of the
graphs of all of them with measured times, and the ``suites`` of problems whose optimum is known.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from placement.tools.named import imported, meant
from placement.tools.ownership import is_yours, needing

# Synthetic problems, models of others (two files), their graphs, and problems with known optima.
_NO_MODELS = ("__init__", "synthetic", "zoo", "hugging_face", "dataset", "suites")


class WorkloadError(ValueError):
    """The workload is unknown, cannot be made, or is not a workload."""


def names() -> tuple[str, ...]:
    """The shipped workloads, sorted; reads the files without importing them."""
    return tuple(sorted(family_of()))


def load(spec: str, **options: Any) -> tuple[Any, Any]:
    """Make the workload ``spec``: a shipped name, the user's own ``package.module:function``, or a
    folder that ``save_pretrained`` of transformers wrote.

    Args:
        options: arguments of the workload's function, e.g. ``batch=8``.

    Returns:
        ``(module, inputs)``: a ``torch.nn.Module`` and example inputs for ``capture``.

    Raises:
        WorkloadError: unknown name or option, failing import or function, or a result that is
            neither ``(module, inputs)`` nor ``(module, (inputs, target), loss)``.
    """
    loaded = _make(spec, options)
    return (loaded[0], loaded[1]) if len(loaded) == 2 else (loaded[0], loaded[1][0])


def load_training(spec: str, **options: Any) -> tuple[Any, Any, Any]:
    """As ``load``, for ``capture(module, example, mode="training", loss=loss)``.

    The user's own function gives ``(module, (inputs, target), loss)``, or ``(module, inputs)`` if
    the module returns its loss; ``loss`` is then None. Shipped workloads and folders know no task:
    their loss is the mean of their outputs, a stand-in with the same work.

    Returns:
        ``(module, example, loss)``.

    Raises:
        WorkloadError: as ``load``.
    """
    loaded = _make(spec, options)
    if len(loaded) == 3:
        return loaded
    if ":" in spec:
        return (*loaded, None)
    from placement.capturing.training import mean_of_outputs

    return loaded[0], (loaded[1], None), mean_of_outputs


def is_default(spec: str, options: Mapping[str, Any]) -> bool:
    """Whether ``load(spec, **options)`` makes what ``load(spec)`` does.

    Raises:
        WorkloadError: unknown name, or failing import.
    """
    parameters = inspect.signature(_function(spec)).parameters
    return all(k in parameters and parameters[k].default == v for k, v in options.items())


def _make(spec: str, options: dict[str, Any]) -> Any:
    function = _function(spec)
    _check_options(spec, function, options)
    try:
        loaded = function(**options)
    except WorkloadError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        mine = [frame for frame in frames[1:] if is_yours(frame.filename)] or frames[-1:]
        at = f"{mine[-1].filename}:{mine[-1].lineno}"
        raise WorkloadError(
            f"workload {spec!r}: the function failed at {at}: {type(error).__name__}: {error}"
        ) from error

    from torch import nn

    of = len(loaded) if isinstance(loaded, tuple) else 0
    trained = of == 3 and callable(loaded[2]) and isinstance(loaded[1], tuple | list)
    if not ((of == 2 or (trained and len(loaded[1]) == 2)) and isinstance(loaded[0], nn.Module)):
        shown = type(loaded).__name__
        if isinstance(loaded, tuple):
            shown = f"({', '.join(type(x).__name__ for x in loaded)})"
        raise WorkloadError(
            f"workload {spec!r} returned {shown}, expected (module, inputs): a torch.nn.Module "
            "and a tensor, a tuple of arguments or a dict of keyword arguments; or, to train it, "
            "(module, (inputs, target), loss)"
        )
    return loaded


def _function(spec: str) -> Any:
    """The function of a workload, not called."""
    if ":" in spec:
        name = spec
    else:
        families = family_of()
        if spec not in families and os.path.isdir(spec):
            return partial(_function(f"{__name__}.hugging_face:pretrained"), spec)
        if spec not in families:
            stem = spec.removesuffix(".py")
            here = f"; {stem}.py is here: name a function of it, {stem}:function;"
            near = here if os.path.isfile(f"{stem}.py") else meant(spec, families) or ";"
            if home := _defined_here(spec):
                near = f"; {home}.py has a function of that name: {home}:{spec};"
            raise WorkloadError(
                f"unknown workload {spec[:80]!r}{near} choose one of "
                f"{', '.join(sorted(families))}, or give your own as package.module:function, or a "
                "folder that save_pretrained of transformers wrote"
            )
        name = f"{__name__}.{families[spec]}:{spec}"
    return imported(name, "workload", WorkloadError)


def _defined_here(function: str) -> str | None:
    """The module of this folder in which a function of that name is defined."""
    begin = f"def {function}("
    for path in sorted(Path().glob("*.py")):
        with suppress(OSError):
            if any(x.startswith(begin) for x in path.read_text("utf-8", "replace").splitlines()):
                return path.stem
    return None


def _check_options(spec: str, function: Any, options: dict[str, Any]) -> None:
    is_module = hasattr(function, "forward") and not isinstance(function, type)
    if is_module or not callable(function):
        kind = type(function).__name__
        raise WorkloadError(
            f"workload {spec!r} is of type {kind}, not a function: name one that returns "
            "(module, inputs)"
        )
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise WorkloadError(
            f"workload {spec!r}: {error}; it takes {inspect.signature(function)}"
        ) from error


def family_of() -> dict[str, str]:
    """Workload name -> file (without ``.py``) that defines it."""
    return {
        node.name: file.stem
        for file in Path(__file__).parent.glob("*.py")
        if file.stem not in _NO_MODELS
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Random weights and inputs inside are those of ``seed``; the caller's stream is untouched."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def import_transformers() -> Any:
    """The optional package ``transformers``.

    Raises:
        WorkloadError: it is not installed.
    """
    with needing("models", "this workload needs the package transformers", WorkloadError):
        return importlib.import_module("transformers")
