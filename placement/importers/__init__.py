"""Workload files, also compressed (``.gz``), as problems; the format is told from the content.

* ``problem_file``: our own, everything of a problem (what ``save`` and ``placement import`` write)
* ``dnn_partitioning``: JSON of github.com/msr-fiddle/dnn-partitioning
* ``pipedream``: ``graph.txt`` of github.com/msr-fiddle/pipedream
* ``doppler``: ``compute_graph/*.txt`` of github.com/xinyuyao/Doppler
* ``moirai``: JSON with times on several devices and a transfer matrix per tensor
* ``shop``: job shops, flexible, re-entrant or classical, as JSON and texts of many libraries
* ``stg``: standard task graphs, ``.stg``
* ``neusight``: operators measured on a GPU, the CSV files of github.com/sitar-lab/NeuSight
* ``wfformat``: workflows, the JSON of github.com/wfcommons
* ``onnx_model``: an ONNX model (needs the package onnx); its times are predicted

``load_decoder`` reads a language model without its weights, ``config.json`` or a GGUF file's
header; what it costs on devices, and so its problem, ``placement.costs.serving`` says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack

from placement.importers import (
    dnn_partitioning,
    doppler,
    gguf,
    hf_config,
    moirai,
    neusight,
    onnx_model,
    pipedream,
    shop,
    stg,
    wfformat,
)
from placement.importers._read import FormatError, check_table, stem
from placement.importers.decoder import Decoder
from placement.problem import Problem
from placement.tools.files import model_file, parse_json, read_file, read_json, short
from placement.tools.limits import MOST

__all__ = ["SUFFIX", "FormatError", "check_table", "is_decoder", "load", "load_decoder", "save",
           "stem"]  # fmt: skip

SUFFIX = ".json.gz"  # of our own files where there are many: they are compressed

KNOWN = (
    "formats are problem files (problem_version), dnn-partitioning JSON (nodes with fpgaLatency, "
    "maxFPGAs), Moirai JSON (nodes with a list 'time', num_devices), PipeDream graph.txt "
    "(node1 -- Conv2d -- forward_compute_time=...), DOPPLER graphs (a count, three lists, then "
    "'compute,transfer' per operator), job shops (.fjs, JSPLIB's or Taillard's texts, or JSON with "
    "operations, precedences), standard task graphs (.stg: a count, then 'number time "
    "predecessors ...'), NeuSight's CSV (columns _input_nodes, fw_latency), WfCommons' JSON "
    "(workflow) and ONNX (binary)"
)
_TEXTS: tuple[tuple[Any, str], ...] = (
    (pipedream, "PipeDream files"),
    (doppler, "DOPPLER graphs"),
    (neusight, "NeuSight's files"),
    (stg, "standard task graphs"),
    (shop, "shops"),
)
_OBJECTS: tuple[tuple[Any, str], ...] = (
    (dnn_partitioning, "dnn-partitioning files"),
    (moirai, "Moirai files"),
    (shop, "shops"),
    (wfformat, "workflows"),
)
_SERVED = (
    "a language model without weights: placement plan with --cluster FILE, --context TOKENS and "
    "--objective prefill, decode or serve"
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
    chosen: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    if _is_gguf(path):  # with gigabytes of weights
        raise FormatError(f"{path}: {_SERVED}")
    try:
        content = read_file(path)
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error
    if onnx_model.looks_like(content):
        _check_options(chosen, onnx_model.Options.__annotations__, path, "ONNX files")
        return onnx_model.read(content, str(path), objective=objective, **chosen)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = model_file(path, content) or f"not UTF-8 text ({error}); {KNOWN}"
        raise FormatError(f"{path}: {what}") from error
    if not text.strip():
        raise FormatError(f"{path}: the file is empty; {KNOWN}")
    if text.lstrip()[0] not in "{[":
        for module, files in _TEXTS:
            if module.looks_like(text):
                _check_options(chosen, module.read.__kwdefaults__, path, files)
                return module.read(text, str(path), objective=objective, **chosen)
        raise FormatError(f"{path}: {model_file(path, content) or f'unknown format; {KNOWN}'}")
    try:
        data = parse_json(text, infinite=True)  # which each format refuses by name
    except ValueError as error:
        raise FormatError(f"{path}: not valid JSON: {error}") from error
    if isinstance(data, dict) and "problem_version" in data:
        from placement.importers import problem_file  # pydantic is slow to import

        _check_options(chosen, problem_file.read.__kwdefaults__ or (), path, "problem files")
        return problem_file.read(text, str(path), objective=objective)
    if hf_config.looks_like(data):
        raise FormatError(f"{path}: {_SERVED}")
    for module, files in _OBJECTS:
        if module.looks_like(data):
            _check_options(chosen, module.read.__kwdefaults__, path, files)
            return module.read(data, str(path), objective=objective, **chosen)
    if isinstance(data, dict) and "assignment" in data:
        raise FormatError(
            f"{path} is a plan, not a problem: placement show, run, replan and export take plans"
        )
    keys = short(sorted(data)) if isinstance(data, dict) else type(data).__name__
    raise FormatError(f"{path}: unknown JSON format (top level: {keys}); {KNOWN}")


def is_decoder(path: str | Path) -> bool:
    """Whether the file is one that ``load_decoder`` reads; false of one that cannot be read."""
    try:
        is_small = os.path.isfile(path) and os.path.getsize(path) <= MOST.config_bytes
        return _is_gguf(path) or (
            is_small and hf_config.looks_like(read_json(path, FormatError, infinite=True))
        )
    except (OSError, FormatError):
        return False


def load_decoder(path: str | Path) -> Decoder:
    """The language model that a Hugging Face ``config.json`` or a GGUF file's header describes.

    Raises:
        FormatError: it does not, or not one that is known; the message names file and field.
    """
    if _is_gguf(path):
        return gguf.read(path)
    data = read_json(path, FormatError, infinite=True)
    if not hf_config.looks_like(data):
        raise FormatError(f"{path}: no config of a model: it names no model_type")
    name, folder = stem(str(path)), Path(path).parent.name
    return hf_config.read(data, str(path), folder if name == "config" and folder else name)


def _is_gguf(path: str | Path) -> bool:
    """False of what is no file, as a pipe, which is read once; and of one that cannot be read."""
    with suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                return gguf.looks_like(file.read(len(gguf.MAGIC)))
    return False


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


def _check_options(
    options: Mapping[str, Any], known: Iterable[str], path: str | Path, files: str
) -> None:
    """Raise ``FormatError`` unless all options that are ``options`` are among those ``known``."""
    taken = [k for k in known if k != "objective"]
    wrong = [k for k in options if k not in taken]
    if options and not taken:
        raise FormatError(
            f"{path}: {', '.join(options)} cannot be set: the file itself describes its devices"
        )
    if wrong:
        raise FormatError(
            f"{path}: {', '.join(wrong)} cannot be set: {files} take {', '.join(taken)}"
        )
