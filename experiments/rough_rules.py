"""Two tables that say too little for the rule of language models: one number is fitted to each.

**Diffusers' offloading**: layers that lie in host memory are copied to the GPU one by one while
others run. A pass takes as long as without, and what a copy at ``COPY`` bytes per second takes
beyond the part of it that is hidden: none is, as measured. The GPU is not named, links are not
either; rows without a plain row of the same model, and of other ways to save memory, are skipped.

**Sailor's training runs**: an iteration takes ``micro-batches + stages - 1`` times the slowest
stage, of whose layers each takes ``LAYER_S`` and ``NUMBER_S`` for each sequence and hidden number:
what the GPUs of a layer exchange grows so, and takes most of the time. Flaws of the table:
sequences are of unknown length, lists of layers do not add up in some rows, some rows are equal,
which kinds of GPU share a stage is not said, and waiting for gradients is in some times and not in
others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.public_models import Lacking, Row, accuracy, rows_of, understood

DIFFUSERS, SAILOR = "diffusers_offload_benchmark", "sailor_36_runs"
TABLES = (DIFFUSERS, SAILOR)
COLUMNS = {
    DIFFUSERS: ("scenario", "params_B", "time_plain_s"),
    SAILOR: ("model", "stages", "dp", "tp_per_stage", "gpus_by_type", "micro_batch",
             "global_batch", "layers_per_stage", "iteration_s_measured"),
}  # fmt: skip
COPY = 19e9
LAYER_S, NUMBER_S = 1.76e-3, {"gh": 0.92e-6, "other": 50e-6}
WIDTH = {DIFFUSERS: 0.35, SAILOR: 0.4}  # half of a 90 % interval, as a logarithm
_HIDDEN = {"125m": 768, "350m": 1024, "1.3b": 2048, "2.7b": 2560, "6.7b": 4096, "7b": 4096,
           "8b": 4096, "13b": 5120, "20b": 6144, "30b": 7168, "66b": 9216, "70b": 8192}  # fmt: skip


def positive(row: Row, name: str) -> float:
    try:
        value = float(row.get(name) or "")
    except ValueError as error:
        raise Lacking(f"{name} = {row.get(name)!r} is no number") from error
    if not 0 < value < 1e15:
        raise Lacking(f"{name} = {value} is out of range")
    return value


def diffusers(row: Row, rows: Sequence[Row]) -> tuple[float, float]:
    """Predicted and measured seconds of a pass with offloading, from the plain one."""
    name, _, way = (row.get("scenario") or "").partition("-group-offload")
    if not way:
        raise Lacking(f"scenario {row.get('scenario')!r} copies no weights")
    plain = [
        r for r in rows
        if r.get("scenario") == f"{name}-bf16" and r.get("commit") == row.get("commit")
    ] or [r for r in rows if r.get("scenario") == f"{name}-bf16"]  # fmt: skip
    if not plain:
        raise Lacking(f"no plain row of {name!r}")
    copied = 2e9 * positive(row, "params_B") / COPY
    return positive(plain[0], "time_plain_s") + copied, positive(row, "time_plain_s")


def sailor(row: Row, rows: Sequence[Row]) -> tuple[float, float]:
    """Predicted and measured seconds of an iteration."""
    size = re.findall(r"[0-9.]+[mb](?![a-z])", (row.get("model") or "").lower())
    layers, copies = (
        [float(x) for x in re.findall(r"[0-9.]+", row.get(name) or "")]
        for name in ("layers_per_stage", "dp")
    )
    gpus = (row.get("gpus_by_type") or "").lower()
    if not (size and size[-1] in _HIDDEN and layers and copies and min(copies) > 0 and gpus):
        raise Lacking("model, layers, copies or GPUs of a row are not said")
    micro = positive(row, "micro_batch")
    count = max(1.0, positive(row, "global_batch") / (micro * min(copies)))
    number_s = NUMBER_S["gh" if gpus.startswith("gh") else "other"]
    layer_s = LAYER_S + number_s * micro * _HIDDEN[size[-1]]
    total = (count + len(layers) - 1) * max(layers) * layer_s
    return total, positive(row, "iteration_s_measured")


def figures(path: Path) -> dict[str, Any]:
    """What ``--json`` prints."""
    rows, rule = rows_of(path), diffusers if path.stem == DIFFUSERS else sailor
    found, facts = understood(path, lambda row: rule(row, rows))
    told, measured = zip(*found, strict=True) if found else ((), ())
    return accuracy(told, measured, WIDTH[path.stem]) | facts
