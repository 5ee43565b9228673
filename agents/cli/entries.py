"""One string an entry: the name of a planner or a workload, and its options as ``key=value``.

``planner=[heft,'policy k=8']``, ``workload=[tiny_*,'vit batch=4','graph.txt devices=8 name=vgg']``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

from placement import cli, planners, workloads
from placement.problem import Planner
from placement.workloads.dataset import value_of


class EntryError(ValueError):
    """An entry cannot be read; the message says what to write."""


@dataclass(frozen=True)
class Entry:
    """A name, and options as they were written.

    Attributes:
        text: all of it.
    """

    name: str
    options: Mapping[str, str]
    text: str

    @classmethod
    def of(cls, setting: str, text: Any) -> Entry:
        """Of ``text`` for ``setting``.

        Raises:
            EntryError: it is no text, or one of its words is no option.
        """
        if not isinstance(text, str):
            raise EntryError(f"{setting}: {text} must be a text, such as 'heft' or 'policy k=8'")
        if Path(text).exists():  # a file or a folder, whose name may have spaces
            return cls(text, {}, text)
        try:
            name, *words = shlex.split(text) or [""]
        except ValueError as error:
            raise EntryError(f"{setting}: {text!r}: {error}") from error
        for word in words:
            if not word.partition("=")[1]:
                raise EntryError(
                    f"{setting}: {text!r}: {word!r} is not an option: write NAME KEY=VALUE ..."
                )
        return cls(name, dict(word.split("=", 1) for word in words), text)


def entries(setting: str, value: Any, known: Sequence[str]) -> list[Entry]:
    """Those of a setting that is one text, or a list; ``tiny_*`` is each of ``known`` alike.

    Raises:
        EntryError: a pattern that nothing matches, or see ``Entry.of``.
    """
    listed = []
    for text in value if isinstance(value, ListConfig | list) else [value]:
        entry = Entry.of(setting, text)
        if "*" not in entry.name:
            listed.append(entry)
            continue
        names = [name for name in known if fnmatchcase(name, entry.name)]
        if not names:
            raise EntryError(
                f"{setting}={entry.name}: nothing matches; there are {', '.join(known)}"
            )
        rest = entry.text.removeprefix(entry.name)
        listed += [Entry(name, entry.options, name + rest) for name in names]
    return listed


def planner_of(setting: str, text: Any) -> Planner:
    """The planner of one entry.

    Raises:
        EntryError: see ``Entry.of``.
        PlannerError: none of that name, no such option, or a value of another type.
    """
    return _planner(Entry.of(setting, text))


def planners_of(setting: str, value: Any) -> dict[str, Planner]:
    """The planners of a list, each by its name, or by all its text where a name occurs twice.

    Raises:
        EntryError, PlannerError: as ``planner_of``.
    """
    listed = entries(setting, value, planners.names())
    names = [entry.name.rpartition(":")[2] for entry in listed]
    return {
        entry.text if names.count(name) > 1 else name: _planner(entry)
        for entry, name in zip(listed, names, strict=True)
    }


def _planner(entry: Entry) -> Planner:
    cli.search_here(entry.name)
    return planners.load(entry.name, **entry.options)


@dataclass(frozen=True)
class Workload:
    """A model or a problem file, by the name of its folder in a run.

    Attributes:
        spec: as ``placement.workloads.load`` takes it, or the path of a file.
        is_file: whether it is a problem file.
        is_default: whether ``load(spec)`` alone makes it.
    """

    name: str
    spec: str
    options: Mapping[str, Any]
    is_file: bool
    is_default: bool


def workloads_of(value: Any) -> list[Workload]:
    """The workloads of a list; an option ``name`` says what one is called.

    Raises:
        EntryError: two of one name, or a name that cannot be that of a folder.
        WorkloadError: none of that name.
    """
    listed = [_workload(entry) for entry in entries("workload", value, workloads.names())]
    names = [workload.name for workload in listed]
    for workload in listed:
        if names.count(workload.name) > 1:
            raise EntryError(
                f"two workloads are called {workload.name!r}; name one otherwise: "
                f"'{workload.spec} name=NAME'"
            )
        if Path(workload.name).name != workload.name or workload.name == "..":
            raise EntryError(
                f"workload: {workload.name!r} cannot name a folder of the run; give a plain name: "
                f"'{workload.spec} name=NAME'"
            )
    return listed


def _workload(entry: Entry) -> Workload:
    from placement import importers

    options = {key: value_of(text) for key, text in entry.options.items()}
    name = str(options.pop("name", ""))
    path = Path(entry.name)
    shipped = entry.name in workloads.names()
    if (
        not shipped
        and (path.is_file() or (path.suffix and ":" not in entry.name))
        and not path.is_dir()
    ):
        return Workload(name or importers.stem(entry.name), entry.name, options, True, False)
    cli.search_here(entry.name)
    is_default = workloads.is_default(entry.name, options)
    own = path.resolve().name if path.is_dir() and not shipped else entry.name.rpartition(":")[2]
    return Workload(name or own, entry.name, options, False, is_default)
