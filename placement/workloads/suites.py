"""Suites: problems of others whose optimum is proved, or bounded, to measure planners on.

Nothing is downloaded and nothing of it is part of this package: ``cases(suite, folder)`` reads
what its authors publish from a folder, and ``SUITES`` says where that is. ``synthetic`` needs no
file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from placement import importers
from placement.importers import neusight, shop
from placement.objective import Objective
from placement.problem import Problem
from placement.tools.files import parse_json, read_file, short
from placement.workloads import synthetic

_BOUNDS = ("best_known.json", "bks.json", "instances.json")
_OF_EVERY_SPLIT = (
    "balance_bound",
    "cpsat_noncontig",
    "cpsat_noncontig_tight",
    "critical_path_bound",
)
_ENDING = re.compile(r"\.(json|fjs|txt|stg|csv)(\.gz)?$", re.IGNORECASE)


class SuiteError(ValueError):
    """No such suite, its files are not there, or a file of bounds is damaged; says what to do."""


@dataclass(frozen=True, eq=False)
class Case:
    """One problem of a suite; values are in the file's unit of time.

    Attributes:
        problem: its name: that of its file, without the ending.
        devices: how many were asked for where a file does not say; None where it does.
        load: reads it.
        unit_s: seconds of the problem that are one unit.
        lower_bound: no schedule can be shorter; None: not known.
        best_known: the shortest known to its authors; None: not known.
    """

    problem: str
    load: Callable[[], Problem]
    devices: int | None = None
    unit_s: float = 1.0
    lower_bound: float | None = None
    best_known: float | None = None


@dataclass(frozen=True)
class Suite:
    """Where the files of a suite come from, and what is read of them.

    Attributes:
        about: what its problems are.
        source: who publishes it; empty for what needs no file.
        licence: of the files.
        files: what lies in the folder, or in folders in it, as patterns; also compressed (.gz).
        read: the cases of a folder, with as many devices as are asked for (None: its own).
        takes_devices: whether that can be asked for.
    """

    about: str
    source: str
    licence: str
    files: tuple[str, ...]
    read: Callable[[Path, int | None], Iterator[Case]]
    takes_devices: bool = True


def cases(
    suite: str, data: str | Path | None = None, devices: int | None = None, only: str = "*"
) -> list[Case]:
    """The cases of a suite whose problem's name matches ``only``.

    ``data`` is the folder of the suite's files, or one that has a folder of the suite's name.

    Raises:
        SuiteError: no such suite, no files there, or nothing matches; the message says what to do.
    """
    if suite not in SUITES:
        raise SuiteError(f"no suite {short(suite)}; suites are {', '.join(SUITES)}")
    known = SUITES[suite]
    if devices is not None and not (known.takes_devices and devices >= 1):
        raise SuiteError(
            f"suite {suite}: devices = {devices} must be at least 1"
            if known.takes_devices
            else f"suite {suite}: devices cannot be set: its files describe their devices"
        )
    folder = Path()
    if known.files:
        if data is None:
            raise SuiteError(f"suite {suite} needs the folder of its files. {_where(suite)}")
        folder = Path(data) / suite if (Path(data) / suite).is_dir() else Path(data)
    every = list(known.read(folder, devices))
    if not every:
        raise SuiteError(f"no {' or '.join(known.files)} in {folder}. {_where(suite)}")
    only = _ENDING.sub("", only)
    matching = [
        case
        for case in every
        if fnmatch(case.problem, only) or fnmatch(case.problem.rpartition("/")[2], only)
    ]
    if not matching:
        names = short([case.problem for case in every], 200)
        raise SuiteError(f"suite {suite} has no problem {only!r}; it has {names}")
    return matching


def _where(suite: str) -> str:
    source = SUITES[suite]
    return (
        f"Nothing is downloaded: take {' and '.join(source.files)} from {source.source} "
        f"(licence: {source.licence}), put them into FOLDER/{suite} and name that folder: "
        f"placement bench {suite} --data FOLDER --planner heft"
    )


def _files(folder: Path, *endings: str) -> Iterator[tuple[str, Path]]:
    """Files of these endings ("": none), also compressed, by their path in the folder without it.

    What begins with a dot is left out, with all that is in it.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        ending = _ENDING.search(name)
        of = ending[1].lower() if ending else path.suffix
        if of in endings and not re.search(r"(^|/)\.", name) and path.is_file():
            yield name[: ending.start()] if ending else name, path


def _shops(folder: Path, devices: int | None) -> Iterator[Case]:
    """A case for each file, or for each shop in a text of several."""
    files = [path for name in _BOUNDS if (path := folder / name).is_file()]
    known = {key: (path, record) for path in files for key, record in _records(path).items()}
    for name, path in _files(folder, "json", "fjs", "txt", ""):
        if path.name in _BOUNDS:
            continue
        several = [(name, "")]
        if Path(path.name.removesuffix(".gz")).suffix in (".txt", ""):  # about anything
            text = _text(path)
            if not shop.looks_like(text):
                continue
            several = shop.parts(text, name)
        for case, part in several:
            where, record = _of(known, case, path) or (path, shop.bounds(part))
            low, most = (
                _bound(record, key, f"{where}: {case}") for key in ("lower_bound", "upper_bound")
            )
            if low is not None and most is not None and low > most:
                raise SuiteError(f"{where}: {case}: lower_bound {low} > upper_bound {most}")
            load = partial(importers.load, path)
            if len(several) > 1:
                load = partial(shop.read, part, f"{path}: {case.rpartition('/')[2]}")
            yield Case(case, load, None, 1.0, low, most)


def _stg(folder: Path, devices: int | None) -> Iterator[Case]:
    where = folder / "optimal.json"
    known = _records(where)
    for name, path in _files(folder, "stg"):
        record = _of(known, name, path)
        for count in (2, 4, 8, 16) if devices is None else (devices,):
            best = _bound(record, str(count), f"{where}: {name}")
            load = partial(importers.load, path, devices=count)
            yield Case(name, load, count, 1.0, best, best)


def _neusight(folder: Path, devices: int | None) -> Iterator[Case]:
    """A case for each trace of a model, called after the first GPU if there are several."""
    models: dict[str, list[Path]] = {}
    for name, path in _files(folder, "csv"):
        models.setdefault(name.rpartition("/")[2], []).append(path)
    for name, files in sorted(models.items()):
        traces = neusight.traces(files)
        for paths in traces:
            mark = f"@{paths[0].parent.name}" if len(traces) > 1 else ""
            some = paths[:devices]
            load = partial(neusight.joined, some)
            yield Case(name + mark, load, len(some), 1e-3)


def _wfformat(folder: Path, devices: int | None) -> Iterator[Case]:
    count = 4 if devices is None else devices
    for name, path in _files(folder, "json"):
        yield Case(name, partial(importers.load, path, devices=count), count)


def _public(folder: Path, devices: int | None) -> Iterator[Case]:
    """``devices`` are those of PipeDream's profiles: the other files have their own."""
    path = folder / "dnn_partitioning" / "truth.json"
    truth = _truth(path) if path.is_file() else []
    for name, path in _files(folder / "dnn_partitioning", "json"):
        if name.count("/") < 2:  # what is known of them
            continue
        latency = name.startswith("latency")
        objective = Objective.PIECEWISE_LATENCY if latency else Objective.MAX_LOAD
        low, best = bounds_of(truth, f"{name}.json", "latency" if latency else "max_load")
        # Solvers prove to within 1e-5, and some values are below what they say.
        low = None if low is None else low * (1 - 1e-5)
        load = partial(importers.load, path, objective=objective)
        yield Case(f"dnn_partitioning/{name}", load, None, 1e-3, low, best)
    count = 4 if devices is None else devices
    for name, path in _files(folder / "pipedream", "txt"):
        load = partial(importers.load, path, devices=count)
        yield Case(f"pipedream/{name}", load, count, 1e-3)
    for name, path in _files(folder / "moirai", "json"):
        load = partial(importers.load, path, objective=Objective.LATENCY)
        yield Case(f"moirai/{name}", load, None, 1e-3)


def _truth(path: Path) -> list[dict[str, Any]]:
    truth = _json(path)
    keys = {"file", "objective", "method", "status", "value", "lower_bound"}
    records = truth if isinstance(truth, list) else [truth]
    for i, record in enumerate(records):
        if not isinstance(record, dict) or not keys <= record.keys():
            raise SuiteError(f"{path}: record {i} = {short(record)} lacks a key of {sorted(keys)}")
        for key in ("value", "lower_bound"):
            _bound(record, key, f"{path}: record {i}")
    return records


def bounds_of(
    truth: list[dict[str, Any]], file: str, objective: str
) -> tuple[float | None, float | None]:
    """The best bound that holds for every split, and the best value of a split that fits, in ms.

    ``truth`` are the records of dnn_partitioning's ``truth.json``, ``file`` is relative to it.
    """
    mine = [r for r in truth if r["file"] == file and r["objective"] == objective]
    bounds = [r["lower_bound"] for r in mine if r["method"] in _OF_EVERY_SPLIT]
    values = [r["value"] for r in mine if r["status"] in ("feasible", "optimal")]
    return (
        max((x for x in bounds if x is not None), default=None),
        min((x for x in values if x is not None), default=None),
    )


def _synthetic(folder: Path, devices: int | None) -> Iterator[Case]:
    for name, family in synthetic.families().items():
        resized = family if devices is None else replace(family, num_devices=devices)
        yield Case(name, partial(resized, 0), resized.num_devices)


def _text(path: Path) -> str:
    return read_file(path).decode("utf-8-sig", "replace")


def _json(path: Path) -> Any:
    try:
        return parse_json(_text(path))
    except ValueError as error:
        raise SuiteError(f"{path}: not valid JSON: {error}") from error


def _records(path: Path) -> Mapping[str, Any]:
    """A file of bounds, by the name of the problem; empty where there is none."""
    if not path.is_file():
        return {}
    records_by_name = _json(path)
    if isinstance(records_by_name, list):  # as ScheduleOpt/benchmarks has them, and JSPLIB
        records = [r for r in records_by_name if isinstance(r, dict)]
        records_by_name = {str(r.get("instance", r.get("name", ""))): _jsplib(r) for r in records}
    if not isinstance(records_by_name, dict):
        raise SuiteError(f"{path}: must be an object, by the name of the problem")
    return records_by_name


def _jsplib(record: dict[str, Any]) -> dict[str, Any]:
    """A record with ``lower_bound`` and ``upper_bound``, which JSPLIB's has in ``bounds``."""
    best, least = record.get("optimum"), record.get("bounds")
    least = least if isinstance(least, dict) else {"lower": best, "upper": best}
    return {f"{key}_bound": value for key, value in least.items()} | record


def _of(known: Mapping[str, Any], name: str, path: Path) -> Any:
    """What is said of a problem: by its path, or by its name with or without the ending."""
    names = (name, path.name.removesuffix(".gz"), name.rpartition("/")[2])
    return next((known[key] for key in names if key in known), None)


def _bound(record: Any, key: str, where: str) -> float | None:
    """A time; None where it is not told, or says nothing (0)."""
    value = record.get(key) if isinstance(record, dict) else record
    if value is None:
        return None
    if type(value) not in (int, float) or not (value >= 0 and isfinite(value)):
        raise SuiteError(f"{where}: {key} = {short(value)} is not a time")
    return float(value) or None


SUITES: dict[str, Suite] = {
    "shops": Suite(
        "job shops, flexible or not: which machine, and in which order",
        "github.com/ScheduleOpt/benchmarks (with its solutions/bks.json) or github.com/tamy0612/"
        "JSPLIB (with its instances.json; or best_known.json, lower_bound and upper_bound by name)",
        "CC BY-SA 4.0; JSPLIB states none",
        ("*.json", "*.fjs", "*.txt"),
        _shops,
        takes_devices=False,
    ),
    "stg": Suite(
        "standard task graphs on equal processors",
        "www.kasahara.cs.waseda.ac.jp/schedule (with optimal.json, from "
        "github.com/thelonesailor/MSP: optimum by file and number of processors)",
        "free to use; of the optima CC0",
        ("*.stg",),
        _stg,
    ),
    "neusight": Suite(
        "operators of BERT and GPT-2 as measured on GPUs, side by side",
        "github.com/sitar-lab/NeuSight",
        "MIT",
        ("*/*.csv",),
        _neusight,
    ),
    "wfformat": Suite(
        "workflows of scientific applications on equal machines",
        "github.com/wfcommons/WfInstances",
        "LGPL-3.0",
        ("*.json",),
        _wfformat,
    ),
    "public": Suite(
        "models as published with other planners: dnn-partitioning, PipeDream, Moirai",
        "github.com/msr-fiddle/dnn-partitioning, github.com/msr-fiddle/pipedream and "
        "github.com/moirai-placement/moirai",
        "MIT",
        ("dnn_partitioning/*/*/*.json", "pipedream/*.txt", "moirai/*.json"),
        _public,
    ),
    "synthetic": Suite("20 families of drawn problems", "", "", (), _synthetic),
}
