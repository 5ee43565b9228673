"""Workload files as problems; the format is told from the content.

* ``problem_file``: our own, everything of a problem (what ``save`` and ``placement import``
  write); also compressed (``.gz``)
* ``dnn_partitioning``: JSON of github.com/msr-fiddle/dnn-partitioning
* ``pipedream``: ``graph.txt`` of github.com/msr-fiddle/pipedream
* ``doppler``: ``compute_graph/*.txt`` of github.com/xinyuyao/Doppler
* ``moirai``: JSON with times on several devices and a transfer matrix per tensor
* ``shop``: flexible job shops, the JSON of github.com/ScheduleOpt/benchmarks and ``.fjs`` texts
* ``stg``: standard task graphs, ``.stg``
* ``neusight``: operators measured on a GPU, the CSV files of github.com/sitar-lab/NeuSight
* ``wfformat``: workflows, the JSON of github.com/wfcommons
* ``onnx_model``: an ONNX model (needs the package onnx); its times are predicted
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

from placement.importers import (
    dnn_partitioning,
    doppler,
    moirai,
    neusight,
    onnx_model,
    pipedream,
    shop,
    stg,
    wfformat,
)
from placement.importers._read import FormatError
from placement.problem import Problem
from placement.tools.files import model_file, parse_json, short

__all__ = ["FormatError", "load", "save"]

MAX_BYTES = 2**30  # of a compressed file's content, and no more than text compresses to
_MAX_RATIO = 50

KNOWN = (
    "formats are problem files (problem_version), dnn-partitioning JSON (nodes with fpgaLatency, "
    "maxFPGAs), Moirai JSON (nodes with a list 'time', num_devices), PipeDream graph.txt "
    "(node1 -- Conv2d -- forward_compute_time=...), DOPPLER graphs (a count, three lists, then "
    "'compute,transfer' per operator), flexible job shops (JSON with operations, precedences, or "
    ".fjs), standard task graphs (.stg: a count, then 'number time predecessors ...'), NeuSight's "
    "CSV (columns _input_nodes, fw_latency), WfCommons' JSON (workflow) and ONNX (binary)"
)
_TEXTS: tuple[tuple[Any, str], ...] = (
    (pipedream, "PipeDream files"),
    (doppler, "DOPPLER graphs"),
    (neusight, "NeuSight's files"),
    (shop, "shops"),
    (stg, "standard task graphs"),
)
_OBJECTS: tuple[tuple[Any, str], ...] = (
    (dnn_partitioning, "dnn-partitioning files"),
    (moirai, "Moirai files"),
    (shop, "shops"),
    (wfformat, "workflows"),
)


class Options(onnx_model.Options, total=False):
    """What a file does not say: of ONNX models, and of PipeDream's and DOPPLER's graphs."""

    mode: str | None


def load(
    path: str | Path,
    *,
    objective: str | None = None,
    **options: Unpack[Options],
) -> Problem:
    """The problem in a workload file.

    ``objective`` defaults to the problem file's; to ``max_load`` for dnn-partitioning files, for
    which ``latency`` is the analytic ``piecewise_latency`` their authors mean; to ``latency``
    for graphs of DOPPLER, shops, task graphs, workflows and NeuSight's files; otherwise to
    ``period``. The other options, of which None is not given, are for files that say nothing
    about devices: see ``pipedream.read`` (``devices``, ``bandwidth``, ``memory``, ``mode``),
    ``doppler.read`` and ``stg.read`` (``devices``), ``neusight.read`` and ``wfformat.read``
    (``devices``, ``bandwidth``) and ``onnx_model.read`` (all but ``mode``).

    Raises:
        FormatError: not readable, not a format we know, an option that the format does not
            take, or a mistake in the file: the message names file, field and node.
    """
    given: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    if content[:2] == b"\x1f\x8b":  # gzip
        content = _unpacked(content, path)
    if onnx_model.looks_like(content):
        _check_options(given, onnx_model.Options.__annotations__, path, "ONNX files")
        return onnx_model.read(content, str(path), objective=objective, **given)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        what = model_file(path, content) or f"not UTF-8 text ({error}); {KNOWN}"
        raise FormatError(f"{path}: {what}") from error
    if not text.strip():
        raise FormatError(f"{path}: the file is empty; {KNOWN}")
    if text.lstrip()[0] not in "{[":
        for module, files in _TEXTS:
            if module.looks_like(text):
                _check_options(given, module.read.__kwdefaults__, path, files)
                return module.read(text, str(path), objective=objective, **given)
        raise FormatError(f"{path}: {model_file(path, content) or f'unknown format; {KNOWN}'}")
    try:
        data = parse_json(text, infinite=True)  # which each format refuses by name
    except ValueError as error:
        raise FormatError(f"{path}: not valid JSON: {error}") from error
    if isinstance(data, dict) and "problem_version" in data:
        from placement.importers import problem_file  # pydantic is slow to import

        _check_options(given, problem_file.read.__kwdefaults__ or (), path, "problem files")
        return problem_file.read(text, str(path), objective=objective)
    for module, files in _OBJECTS:
        if module.looks_like(data):
            _check_options(given, module.read.__kwdefaults__, path, files)
            return module.read(data, str(path), objective=objective, **given)
    if isinstance(data, dict) and "assignment" in data:
        raise FormatError(
            f"{path} is a plan, not a problem: placement show, run, replan and export take plans"
        )
    found = short(sorted(data)) if isinstance(data, dict) else type(data).__name__
    raise FormatError(f"{path}: unknown JSON format (top level: {found}); {KNOWN}")


def save(problem: Problem, path: str | Path) -> None:
    """Write ``problem`` as a file that ``load`` reads; see ``placement.importers.problem_file``.

    A program that the graph was captured with is left out. The file is written whole or not at
    all; it is compressed if its name ends in ``.gz``.

    Raises:
        FormatError: a time of the profile is not a number.
        FileError: it cannot be written there.
    """
    from placement.importers import problem_file

    problem_file.save(problem, path)


def _unpacked(content: bytes, path: str | Path) -> bytes:
    """What is in a gzip file."""
    unpack = zlib.decompressobj(wbits=31)
    most = min(MAX_BYTES, 2**24 + _MAX_RATIO * len(content))
    try:
        data = unpack.decompress(content, most)
    except zlib.error as error:
        raise FormatError(f"{path}: damaged: {error}") from error
    if not unpack.eof:
        why = "is cut off" if len(data) < most else f"holds more than {most} bytes"
        raise FormatError(f"{path}: the compressed file {why}")
    return data


def _check_options(
    given: Mapping[str, Any], known: Iterable[str], path: str | Path, files: str
) -> None:
    """Raise ``FormatError`` unless all options that are ``given`` are among those ``known``."""
    taken = [k for k in known if k != "objective"]
    wrong = [k for k in given if k not in taken]
    if given and not taken:
        raise FormatError(
            f"{path}: {', '.join(given)} cannot be set: the file itself describes its devices"
        )
    if wrong:
        raise FormatError(
            f"{path}: {', '.join(wrong)} cannot be set: {files} take {', '.join(taken)}"
        )
