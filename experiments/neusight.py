"""How far are predictions for a GPU that nobody measured?

    python -m experiments.neusight

Operators of BERT and GPT-2 that the authors of NeuSight measured on eleven GPUs (forward pass,
fp32). For each GPU the shares of ``placement.costs.efficiency`` are fitted to the others, and its
operators and whole models predicted: from peak rates and these shares, and from peak rates alone.
Beside them what the authors publish of their own predictor. Prints the shares that are fitted to
all eleven.
"""

from __future__ import annotations

import ast
import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.study import Options, Rows, Study, public, run, say
from experiments.tables import Column, table
from placement.cluster import Device
from placement.costs.efficiency import FITTED, Efficiency, Peak

GPUS = {
    "AMD_Instinct_MI100": "amd/mi100",
    "AMD_Instinct_MI210": "amd/mi210",
    "AMD_Instinct_MI250": "amd/mi250",
    "NVIDIA_A100-PCIE-40GB": "nvidia/a100",
    "NVIDIA_A100_80GB_PCIe": "nvidia/a100-80gb",
    "NVIDIA_H100_80GB_HBM3": "nvidia/h100",
    "NVIDIA_L4": "nvidia/l4",
    "Tesla_P100-PCIE-16GB": "nvidia/p100",
    "Tesla_P4": "nvidia/p4",
    "Tesla_T4": "nvidia/t4",
    "Tesla_V100-PCIE-32GB": "nvidia/v100",
}
# Error (%) of whole models in inference, BERT with batch 8 and 16, GPT-2 with 4 and 8: the tables
# scripts/asplos/summary/nvidia_inf.csv and amd_inf.csv of github.com/sitar-lab/NeuSight.
PUBLISHED = {
    "amd/mi100": (17.0, 16.0, 23.1, 15.9),
    "amd/mi210": (14.2, 4.7, 9.3, 5.8),
    "amd/mi250": (17.1, 8.5, 13.3, 9.5),
    "nvidia/a100": (5.4, 4.5, 7.5, 8.7),
    "nvidia/h100": (23.4, 13.2, 3.1, 6.8),
    "nvidia/l4": (14.6, 20.4, 11.0, 10.3),
    "nvidia/p100": (19.5, 4.2, 4.7, 6.9),
    "nvidia/p4": (11.3, 4.7, 65.3),
    "nvidia/t4": (35.3, 32.5, 4.4, 8.1),
    "nvidia/v100": (5.4, 2.9, 3.8, 4.0),
}
# Layers that a file has one of, between the first operator and the last.
LAYERS = {
    "bert_large": (24, "bert_encoder_layer_0_attention_self_query",
                   "bert_encoder_layer_0_output_layer_norm"),
    "gpt2_large": (36, "transformer_h_0_ln_1", "add_15"),
}  # fmt: skip
_ELEMENTWISE = {"add", "mul", "truediv", "div", "sub", "pow", "where", "tanh", "gelu", "relu",
                "masked_fill", "rsub", "neg", "exp", "contiguous"}  # fmt: skip
_COMPUTE, _MEMORY = np.arange(0.3, 1.01, 0.02), np.arange(0.3, 1.01, 0.05)
_POWER, _CALLS = np.arange(0.0, 0.51, 0.1), (1.0, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class Operator:
    """A measured operator: its kind of ``FITTED``, work, bytes, seconds, and how often it runs."""

    kind: str
    flops: float
    moved: float
    seconds: float
    times: int


def kind_of(line: Mapping[str, str]) -> str:
    """The kind of a line of a file."""
    last = line["target"].rpartition(".")[2].lower()
    if line["op"] == "call_module":
        if "drop" in last:  # nothing in inference
            return "view"
        if last.startswith("ln") or "norm" in last:
            return "norm"
        if "embed" in last or last in ("wte", "wpe"):
            return "embedding"
        return "elementwise" if "act" in last or "gelu" in last else "product"
    if not line["op"].startswith("call"):
        return "view"
    match = re.match(r"<(?:built-in (?:function|method)|function) (\w+)", line["target"])
    name = match[1] if match else line["target"]
    if name in ("addmm", "linear"):
        return "product"
    if name in ("matmul", "bmm", "baddbmm"):
        return "batched"
    if "softmax" in name:
        return "softmax"
    return "elementwise" if name in _ELEMENTWISE else "view"


def operators(path: Path) -> Iterator[Operator]:
    """What a file measured, forward."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    times, first, last = LAYERS.get(path.name.partition("-")[0], (1, "", ""))
    names = [line["Name"] for line in lines]
    inside = range(names.index(first), names.index(last) + 1) if first in names else range(0)
    for i, line in enumerate(lines):
        shape = _shape(line["output_shape"])
        inputs = [_shape(str(x)) for x in _value(line["input_shapes"], [])]
        kind, numbers = kind_of(line), math.prod(shape)
        flops = moved = 0.0
        if kind == "product":
            x = inputs[1] if "addmm" in line["target"] else inputs[0]
            flops = 2.0 * numbers * x[-1]
            moved = 4.0 * (numbers + numbers / shape[-1] * x[-1] + x[-1] * shape[-1])
        elif kind == "batched":
            a, b = inputs[-2:]
            flops, moved = 2.0 * numbers * a[-1], 4.0 * (numbers + math.prod(a) + math.prod(b))
        elif kind == "embedding":
            moved = 8.0 * numbers
        elif kind == "elementwise" and numbers <= 4:  # sizes, which the processor computes
            kind = "view"
        elif kind != "view":
            flops = numbers * (5.0 if kind in ("softmax", "norm") else 1.0)
            moved = 4.0 * (numbers + sum(math.prod(s) for s in inputs if math.prod(s) > 1))
        seconds = 1e-3 * float(line["fw_latency"])
        if seconds > 0:
            yield Operator(kind, flops, moved, seconds, times if i in inside else 1)


def _value(text: str, default: Any) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return default


def _shape(text: str) -> tuple[int, ...]:
    sizes = _value(text, ())
    whole = isinstance(sizes, tuple | list) and all(isinstance(x, int) for x in sizes)
    return tuple(sizes) if whole and sizes else (1,)


def predicted(peak: Peak, ops: Sequence[Operator], shares: Mapping[str, Efficiency]) -> np.ndarray:
    """float64 ``[N]`` seconds."""
    kinds = np.array([op.kind for op in ops])
    flops, moved = (np.array([getattr(op, x) for op in ops]) for x in ("flops", "moved"))
    seconds = np.zeros(len(ops))
    for kind in np.unique(kinds).tolist():
        at = kinds == kind
        seconds[at] = peak.seconds(kind, flops[at], moved[at], shares[kind])
    return seconds


def fitted(measured: Mapping[str, Sequence[Operator]]) -> dict[str, Efficiency]:
    """The shares of least mean error of the logarithm, by kind; every GPU counts the same."""
    return {kind: _fit(kind, measured) for kind in FITTED}


def _fit(kind: str, measured: Mapping[str, Sequence[Operator]]) -> Efficiency:
    parts = [(gpu, [op for op in ops if op.kind == kind]) for gpu, ops in measured.items()]
    by_gpu = [(_peak(gpu), ops, np.array([op.seconds for op in ops])) for gpu, ops in parts if ops]
    if kind == "view":
        return Efficiency(1.0, 1.0)
    # Products read large weights as a copy does; that was measured of elementwise operators.
    memory = (0.8,) if kind == "product" else _MEMORY
    is_product = kind in ("product", "batched")
    grid = product(
        _COMPUTE if is_product else (1.0,), memory, _POWER if is_product else (0.0,), _CALLS
    )

    def error(values: tuple[float, ...]) -> float:
        shares = {kind: Efficiency(*values)}
        return float(np.mean([
            np.mean(np.abs(np.log(predicted(peak, ops, shares) / seconds)))
            for peak, ops, seconds in by_gpu
        ]))  # fmt: skip

    return Efficiency(*(round(float(x), 2) for x in min(grid, key=error)))


def _peak(gpu: str) -> Peak:
    return Peak.of(Device("gpu", like=gpu))


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """A row per GPU: errors of its operators and models, when it was left out of the fit."""
    csv.field_size_limit(2**30)
    files: dict[str, dict[str, list[Operator]]] = {}
    for name, path in public(options.data, "neusight/*/*.csv").items():
        gpu = GPUS.get(name.split("/")[1], "")
        if gpu:
            files.setdefault(gpu, {})[path.stem] = list(operators(path))
    measured = {gpu: [op for ops in by.values() for op in ops] for gpu, by in files.items()}
    for gpu, models in files.items():
        shares = fitted({other: ops for other, ops in measured.items() if other != gpu})
        peak, real = _peak(gpu), [op for op in measured[gpu] if op.kind != "view"]
        took = np.array([op.seconds for op in real])
        own = np.abs(predicted(peak, real, shares) / took - 1)
        plain = np.abs(_roofline(peak, real) / took - 1)
        graphs = {}
        for name, ops in models.items():
            if "-inf-" in name:
                times = np.array([op.times for op in ops])
                whole = times @ np.array([op.seconds for op in ops])
                graphs[name] = (
                    float(abs(times @ predicted(peak, ops, shares) / whole - 1)),
                    float(abs(times @ _roofline(peak, ops) / whole - 1)),
                )
        kinds = np.array([op.kind for op in real])
        by_kind = {kind: float(np.median(own[kinds == kind])) for kind in np.unique(kinds).tolist()}
        yield {
            "gpu": gpu,
            "operators": len(real),
            "operator_error": float(np.median(own)),
            "operator_error_roofline": float(np.median(plain)),
            "by_kind": by_kind,
            "graphs": graphs,
            "published": list(PUBLISHED.get(gpu, ())),
            "shares": {kind: list(vars(share).values()) for kind, share in shares.items()},
        }
    final = fitted(measured)
    say(f"fitted to all: {final}")


def _roofline(peak: Peak, ops: Sequence[Operator]) -> np.ndarray:
    return np.array([max(op.flops / peak.flops_per_s, op.moved / peak.bytes_per_s) for op in ops])


def parts(rows: Rows, options: Options) -> dict[str, str]:
    """The table, and medians over GPUs."""

    def graph(which: int) -> Any:
        return lambda r: (
            float(np.median([x[which] for x in r["graphs"].values()])) if r["graphs"] else None
        )

    def theirs(r: Mapping[str, Any]) -> float | None:
        return float(np.median(r["published"])) / 100 if r["published"] else None

    percent: dict[str, Any] = {"digits": 0, "scale": 100, "unit": " %"}
    columns = (
        Column("GPU left out", "gpu"),
        Column("operators", "operators"),
        Column("operator", "operator_error", **percent),
        Column("operator, plain", "operator_error_roofline", **percent),
        Column("model", graph(0), **percent),
        Column("model, plain", graph(1), **percent),
        Column("model, NeuSight", theirs, **percent),
    )
    kinds = sorted({kind for row in rows for kind in row["by_kind"]})
    by_kind = [Column(kind, lambda r, k=kind: r["by_kind"].get(k), **percent) for kind in kinds]

    def median(values: Sequence[float | None]) -> str:
        return f"{100 * np.median([v for v in values if v is not None]):.0f} %"

    ours = [x[0] for r in rows for x in r["graphs"].values() if r["published"]]
    plain = [x[1] for r in rows for x in r["graphs"].values() if r["published"]]
    published = [x / 100 for r in rows for x in r["published"]]
    return {
        "table": table(rows, *columns),
        "kinds": table(rows, Column("GPU left out", "gpu"), *by_kind),
        "operator": median([r["operator_error"] for r in rows]),
        "operator_plain": median([r["operator_error_roofline"] for r in rows]),
        "model": median(ours),
        "model_plain": median(plain),
        "model_published": median(published),
        "models": str(len(ours)),
    }


STUDY = Study(name="neusight", rows=rows, parts=parts)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
