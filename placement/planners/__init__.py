"""Planners: one file per method, ``planner(problem) -> Solution``.

A planner is a frozen dataclass whose fields are its hyper-parameters; ``heft`` lives in
``heft.py`` as the class ``Heft``. ``load`` finds it by the name of the file, or finds yours
by ``package.module:Class``; nothing is registered anywhere.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from placement.problem import Planner


class PlannerError(ValueError):
    """No such planner, or an option it does not have; the message lists those it has."""


def names() -> list[str]:
    """The planners of this package by name (no planner is imported)."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def load(name: str, **options: Any) -> Planner:
    """The planner called ``name`` (``heft``, or ``package.module:Class``) with these options.

    Options that are strings, as they come from a command line, are read as the type of the
    field they set: ``load("local_search", seconds="2.5", seed="3")``.

    Raises:
        PlannerError: no such planner, no such option, or a value of the wrong type; the
            message lists the planners, or the planner's fields with types and defaults.
    """
    planner = find(name)
    configurable = is_dataclass(planner)
    if not configurable:
        if options:
            raise PlannerError(f"{name} is not a dataclass and takes no options, got {options}")
        made: Planner = planner() if isinstance(planner, type) else planner
        return made
    known = {f.name: f for f in fields(planner) if f.init}
    hints = typing.get_type_hints(planner)
    values = {}
    for key, value in options.items():
        if key not in known:
            raise PlannerError(f"planner {name!r} has no option {key!r}; {_describe(planner)}")
        try:
            values[key] = _convert(value, hints[key])
        except (TypeError, ValueError):
            raise PlannerError(
                f"planner {name!r}: {key} = {value!r} is not of type {known[key].type}; "
                f"{_describe(planner)}"
            ) from None
    try:
        made = planner(**values)
    except TypeError as error:
        raise PlannerError(f"planner {name!r}: {error}; {_describe(planner)}") from error
    return made


def find(name: str) -> Any:
    """The class (or function) that ``load`` would build the planner from.

    Raises:
        PlannerError: there is none.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        if name not in names():
            raise PlannerError(
                f"no planner {name!r}; planners are {', '.join(names())}, "
                f"or your own as package.module:Class"
            )
        module, attribute = f"{__name__}.{name}", name.title().replace("_", "")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlannerError(f"planner {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise PlannerError(f"planner {name!r} is a {type(found).__name__}, not a planner")
    return found


def _describe(planner: Any) -> str:
    """``its options are seed: int = 0, ...``."""
    options = [_text(f) for f in fields(planner) if f.init]
    return "its options are " + ", ".join(options) if options else "it has no options"


def _text(field: Field[Any]) -> str:
    default = "" if field.default is MISSING else f" = {field.default!r}"
    return f"{field.name}: {field.type}{default}"


def _convert(value: Any, hint: Any) -> Any:
    """``value`` as the type ``hint``; strings are parsed. Raises ValueError or TypeError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in sorted(arguments, key=lambda a: a is str):  # a string is the last resort
            try:
                return _convert(value, option)
            except (TypeError, ValueError):
                continue
        raise ValueError(value)
    if origin is typing.Literal:
        for option in arguments:
            if value == option or str(option) == value:
                return option
        raise ValueError(value)
    if origin is tuple:
        items = [x for x in value.split(",") if x] if isinstance(value, str) else list(value)
        return tuple(_convert(x, arguments[0]) for x in items)
    if hint is type(None):
        if value is None or value in ("None", "none", "null"):
            return None
        raise ValueError(value)
    if hint is bool:
        if isinstance(value, bool):
            return value
        return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
    if hint in (int, float):
        if isinstance(value, bool):
            raise TypeError(value)
        number = hint(value)
        if hint is int and not isinstance(value, str) and number != value:
            raise ValueError(value)
        return number
    if hint is str and not isinstance(value, str):
        raise TypeError(value)
    if isinstance(hint, type) and not getattr(hint, "_is_protocol", False):
        if not isinstance(value, hint):
            raise TypeError(value)
    elif isinstance(value, str) or not callable(value):  # a Planner
        raise TypeError(value)
    return value
