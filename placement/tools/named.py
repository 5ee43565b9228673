"""What is found by the name of its file: planners, schedulers, exporters, predictors."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

from placement.tools.files import short

T = TypeVar("T")


@dataclass(frozen=True)
class Named(Generic[T]):
    """The callables of a package, one file each; nothing is registered anywhere.

    ``heft`` lives in ``heft.py`` as the class ``Heft``. Files whose name begins with an
    underscore are not meant.

    Attributes:
        package: its full name.
        what: one of them in words, for messages.
        error: the class of what is raised.
        elsewhere: names of what lives in a package that this one must not import, as
            ``package.module:Class``.
    """

    package: str
    what: str
    error: type[ValueError]
    elsewhere: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Those of the package, and of ``elsewhere``, by name (none is imported)."""
        files = (m.name for m in pkgutil.iter_modules(sys.modules[self.package].__path__))
        return sorted([*(name for name in files if not name.startswith("_")), *self.elsewhere])

    def where(self, name: str) -> str:
        """``package.module:Class`` of one of ``names()``."""
        own = f"{self.package}.{name}:{name.title().replace('_', '')}"
        return self.elsewhere.get(name, own)

    def load(self, name: str, /, **options: Any) -> T:
        """The one called ``name`` (``heft``, or ``package.module:Class``) with these options.

        Options that are strings, as they come from a command line, are read as the type of the
        field they set: ``planners.load("local_search", seconds="2.5", seed="3")``.

        Raises:
            ValueError: (``error``) none of that name, no such option, or a value of the wrong
                type; the message lists the names, or the fields with types and defaults.
        """
        kind: Any = self.find(name)
        configurable = is_dataclass(kind)
        if not configurable:
            if options:
                raise self.error(f"{name} is not a dataclass and takes no options, got {options}")
            return kind() if isinstance(kind, type) else kind
        options_of = {f.name: f for f in fields(kind) if f.init}
        hints = typing.get_type_hints(kind)
        values = {}
        for key, value in options.items():
            if key not in options_of:
                near = meant(key, options_of) or ";"
                raise self.error(
                    f"{self.what} {name!r} has no option {key!r}{near} {_describe(kind)}"
                )
            try:
                values[key] = _convert(value, hints[key])
            except (TypeError, ValueError):
                raise self.error(
                    f"{self.what} {name!r}: {key} = {value!r} is not "
                    f"{_expected(value, hints[key], options_of[key])}; {_describe(kind)}"
                ) from None
        try:
            return kind(**values)
        except TypeError as error:
            raise self.error(f"{self.what} {name!r}: {error}; {_describe(kind)}") from error

    def find(self, name: str) -> Any:
        """The class (or function) that ``load`` would build it from.

        Raises:
            ValueError: (``error``) there is none.
        """
        if ":" not in name:
            if name not in self.names():
                near = meant(name, self.names()) or ";"
                raise self.error(
                    f"no {self.what} {name!r}{near} {self.what}s are {', '.join(self.names())}, "
                    f"or your own as package.module:Class"
                )
            name = self.where(name)
        target = imported(name, self.what, self.error)
        if not callable(target):
            kind = type(target).__name__
            raise self.error(f"{self.what} {name!r} is of type {kind}, not a {self.what}")
        return target


def imported(name: str, what: str, error: type[ValueError]) -> Any:
    """The object ``package.module:name``, which may be the user's; importing executes the module.

    ``what``: in words what it should be, for messages.

    Raises:
        ValueError: (``error``) there is none, or the module fails, also by ending the process.
    """
    module, _, attribute = name.partition(":")
    cannot = f"{what} {name!r} cannot be imported"
    if not attribute:
        raise error(f"{cannot}: it names no object; write package.module:name")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as cause:
        hint = ""
        if isinstance(cause, AttributeError) and module in sys.modules:
            hint = meant(attribute, vars(sys.modules[module]))
        elif isinstance(cause, SystemExit):
            hint = ". Keep what a script does behind: if __name__ == '__main__'"
        elif module.endswith(".py"):
            hint = f". Name it without .py: {module[:-3].replace('/', '.')}:{attribute}"
        elif isinstance(cause, ModuleNotFoundError) and f"{module}.".startswith(f"{cause.name}."):
            hint = ". Is its folder on PYTHONPATH?"
        why = f"{type(cause).__name__}: {cause}".rstrip(": ")
        raise error(f"{cannot}: {why}{hint}") from cause


def convert_fields(values: Any, error: type[ValueError]) -> None:
    """Make every field of a frozen dataclass of its type: 2e4 is a whole number, ``"4"`` is none.

    Raises:
        ValueError: (``error``) one has no such value.
    """
    hints = typing.get_type_hints(type(values))
    for f in fields(values):
        value, hint = getattr(values, f.name), hints[f.name]
        try:
            if isinstance(value, str) and str not in (hint, *typing.get_args(hint)):
                raise TypeError(value)
            object.__setattr__(values, f.name, _convert(value, hint))
        except (TypeError, ValueError, OverflowError):
            raise error(f"{f.name} = {short(value)} is not {_expected(value, hint, f)}") from None


def meant(name: str, names: Iterable[str]) -> str:
    """``; did you mean 'heft'?`` for what is most like ``name``, or nothing."""
    bare = {x.lstrip("-"): x for x in names}  # what all options begin with makes none alike
    near = difflib.get_close_matches(name.lstrip("-"), bare, 1)
    return f"; did you mean {bare[near[0]]!r}?" if near else ""


def _describe(kind: Any) -> str:
    """``its options are seed: int = 0, ...``."""
    options = [_text(f) for f in fields(kind) if f.init]
    return "its options are " + ", ".join(options) if options else "it has no options"


def _text(field: Field[Any]) -> str:
    default = "" if field.default is MISSING else f" = {field.default!r}"
    return f"{field.name}: {_type(field)}{default}"


def _type(field: Field[Any]) -> str:
    """As it is written: the annotation is a class where its module does not postpone them."""
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def _expected(value: Any, hint: Any, option: Field[Any]) -> str:
    """``one of 'a', 'b'`` where the values can be listed, otherwise the type."""
    if typing.get_origin(hint) is not typing.Literal:
        return f"of type {_type(option)}"
    values = typing.get_args(hint)
    return f"one of {', '.join(map(repr, values))}{meant(str(value), map(str, values))}"


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
    if hint is Any:
        return value
    if origin is dict:
        return _convert(value, dict)
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
        words = {"true": True, "1": True, "false": False, "0": False}
        if str(value).lower() not in words:
            raise ValueError(value)
        return words[str(value).lower()]
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
