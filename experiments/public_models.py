"""Public language models and machines, by the names that people give them.

Shapes of the models are in ``shapes.yaml``, machines that the library of devices lacks in
``machines.yaml``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import log
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from experiments.study import say
from placement.costs.efficiency import Peak
from placement.devices import library
from placement.importers.decoder import Part
from placement.tools.files import parse_yaml, some

HERE = Path(__file__).parent


class Lacking(ValueError):
    """A row lacks what the rule needs, or names what nobody knows; it is skipped and counted."""


# --- tables -------------------------------------------------------------------------------------

T = TypeVar("T")
Row = Mapping[str, str]


def rows_of(path: Path) -> list[Row]:
    """The rows of a CSV."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def understood(path: Path, read: Callable[[Row], T]) -> tuple[list[T], dict[str, Any]]:
    """What ``read`` makes of each row of a CSV, and of those that were skipped how many, and why.

    The reasons are said, with the rows' numbers: 1 is the first under the head.
    """
    found: list[T] = []
    skipped: dict[str, list[str]] = {}
    for number, row in enumerate(rows_of(path), 1):
        try:
            found.append(read(row))
        except (ValueError, ArithmeticError, LookupError) as why:  # whatever a row says
            skipped.setdefault(str(why), []).append(str(number))
    for reason, numbers in skipped.items():
        say(f"{path.name}: skipped row {some(numbers)}: {reason}")
    common = sorted(skipped.items(), key=lambda item: -len(item[1]))[:5]
    counts = {text: len(numbers) for text, numbers in common}
    return found, {"skipped": sum(map(len, skipped.values())), "why": counts}


def accuracy(told: Any, measured: Any, half: Any) -> dict[str, Any]:
    """How far predictions are off, and how many are within ``half`` of an interval (a logarithm).

    None of each where there are no rows.
    """
    told, measured = np.asarray(told), np.asarray(measured)
    if not len(told):
        return {"rows": 0, "median_error": None, "worst_decile": None, "coverage": None}
    error = np.abs(told / measured - 1)
    return {
        "rows": len(told),
        "median_error": float(np.median(error)),
        "worst_decile": float(np.quantile(error, 0.9)),
        "coverage": float(np.mean(np.abs(np.log(told / measured)) <= half)),
    }


# --- models -------------------------------------------------------------------------------------


@cache
def shapes() -> dict[str, Any]:
    """By name: see ``shapes.yaml``."""
    return parse_yaml((HERE / "shapes.yaml").read_text("utf-8"))


# What else a name may have in it, of which model, the first that is found.
ALIASES = (
    (r"r1.*1\.5b", "qwen2.5-1.5b"),
    (r"r1.*7b", "qwen2.5-7b"),
    (r"r1.*(8b)", "llama-3.1-8b"),
    (r"r1.*14b", "qwen2.5-14b"),
    (r"r1.*32b", "qwen2.5-32b"),
    (r"r1.*70b", "llama-3.1-70b"),
    (r"deepseek.*(r1|v3)", "deepseek-v3-671b"),
    (r"deepseek.*lite|deepseek.*16b", "deepseek-v2-lite-16b"),
    (r"kimi.?k2", "kimi-k2-1026b-a32b"),
    (r"code.?llama.*34b", "codellama-34b"),
    (r"llama.*scout|llama.?4.*(109b|17bx16e)", "llama-4-scout-109b-a17b"),
    (r"llama.*maverick|llama.?4.*400b", "llama-4-maverick-400b-a17b"),
    (r"tiny.?llama", "tinyllama-1.1b"),
    (r"nemotron.*super.*120b", "nemotron-3-super-120b-a12b"),
    (r"nemotron.*nano.*30b|nemotron.*30b.?a3b", "nemotron-3-nano-30b-a3b"),
    (r"nemotron.?mini", "nemotron-mini-4b"),
    (r"llama.*minitron.*4b", "llama-minitron-4b"),
    (r"(minitron|nemo).*8b", "minitron-8b"),
    (r"(minitron|nemo).*4b", "minitron-4b"),
    (r"mistral.?nemo|nemo.*12b", "mistral-nemo-12b"),
    (r"(mistral|devstral|magistral).*24b|mistral.?small|devstral|magistral", "mistral-small-24b"),
    (r"(mistral|devstral).*12[0-9]b|mistral.?large", "mistral-large-123b"),
    (r"mixtral.*8x22b", "mixtral-8x22b"),
    (r"mixtral", "mixtral-8x7b"),
    (r"mistral", "mistral-7b"),
    (r"llama.*405b", "llama-3.1-405b"),
    (r"llama.?2.*70b", "llama-2-70b"),
    (r"llama.?2.*13b|code.?llama.*13b", "llama-2-13b"),
    (r"llama.?2|code.?llama", "llama-2-7b"),
    (r"llama.*70b", "llama-3.1-70b"),
    (r"llama.?3\.2.*1b", "llama-3.2-1b"),
    (r"llama.?3\.2|llama.*[^0-9]3b", "llama-3.2-3b"),
    (r"llama.*8b|llama.?3", "llama-3.1-8b"),
    (r"qwen3.?coder.*480b", "qwen3-coder-480b-a35b"),
    (r"qwen3.?(coder.?)?next|qwen3.*80b", "qwen3-next-80b-a3b"),
    (r"qwen3\.[56].*27b", "qwen3.6-27b"),
    (r"qwen3\.[56].*35b", "qwen3.6-35b-a3b"),
    (r"qwen3\.[56].*122b", "qwen3.5-122b-a10b"),
    (r"qwen3\.[56].*397b", "qwen3.5-397b-a17b"),
    (r"qwen.*235b", "qwen3-235b-a22b"),
    (r"qwen.*30b", "qwen3-30b-a3b"),
    (r"qwen3.*0\.6b", "qwen3-0.6b"),
    (r"qwen3.*1\.7b", "qwen3-1.7b"),
    (r"qwen3.*4b", "qwen3-4b"),
    (r"qwen3.*8b", "qwen3-8b"),
    (r"qwen3.*14b", "qwen3-14b"),
    (r"(qwen3|qwq).*32b", "qwen3-32b"),
    (r"(qwen|qwq).*32b|qwq", "qwen2.5-32b"),
    (r"qwen.*0\.5b", "qwen2.5-0.5b"),
    (r"qwen.*1\.5b", "qwen2.5-1.5b"),
    (r"qwen.*72b", "qwen2.5-72b"),
    (r"qwen.*14b", "qwen2.5-14b"),
    (r"qwen.*7b", "qwen2.5-7b"),
    (r"qwen.*3b", "qwen2.5-3b"),
    (r"gemma.?4.*26b", "gemma-4-26b-a4b"),
    (r"gemma.?4.*31b", "gemma-4-31b"),
    (r"gemma.?3.*27b", "gemma-3-27b"),
    (r"gemma.?3.*12b", "gemma-3-12b"),
    (r"gemma.?3.*4b", "gemma-3-4b"),
    (r"gemma.?3.*1b", "gemma-3-1b"),
    (r"gemma.*27b", "gemma-2-27b"),
    (r"gemma.*9b", "gemma-2-9b"),
    (r"gemma.*2b", "gemma-2-2b"),
    (r"phi.?4.*mini", "phi-4-mini-3.8b"),
    (r"phi.?4", "phi-4-14b"),
    (r"phi.?3.*(medium|14b)", "phi-3-medium-14b"),
    (r"phi.?3", "phi-3-mini-3.8b"),
    (r"glm.?4\.[5-9].*flash", "glm-4.7-flash-30b-a3b"),
    (r"glm.?4\.[5-9].?(air|v)|glm.?4.?moe 10[0-9]b", "glm-4.5-air-106b"),
    (r"glm.?4\.[5-9]|glm4moe", "glm-4.6-355b-a32b"),
    (r"glm.?5", "glm-5-744b-a40b"),
    (r"glm.*32b", "glm-4-32b"),
    (r"minimax", "minimax-m2-230b-a10b"),
    (r"hunyuan.*(80b|a13b)", "hunyuan-80b-a13b"),
    (r"mimo.*flash", "mimo-v2-flash-309b-a15b"),
    (r"gpt.?oss.*120b", "gpt-oss-120b"),
    (r"gpt.?oss.*20b|gpt.?oss", "gpt-oss-20b"),
)


@dataclass(frozen=True)
class Model:
    """A decoder whose equal parts are counted instead of listed."""

    name: str
    hidden: int
    parts: tuple[tuple[Part, int], ...]

    @property
    def numel(self) -> float:
        """Weights, a tied one twice."""
        return sum(n * max(p.numel, p.weight_bytes / 2) for p, n in self.parts)

    @property
    def weight_bytes(self) -> float:
        return sum(n * p.weight_bytes for p, n in self.parts)

    @property
    def num_layers(self) -> int:
        return 1 + max(p.layer for p, _ in self.parts)


def billions(text: str) -> tuple[float | None, float | None]:
    """Weights that a name states, and those that a token uses: ``35B-A3B`` has 35 and 3."""
    total = re.findall(r"(?<![a-z0-9.])([0-9]+(?:\.[0-9]+)?) ?b\b", text.lower())
    used = re.findall(r"a([0-9]+(?:\.[0-9]+)?)b\b", text.lower())
    return (float(total[0]) if total else None, float(used[0]) if used else None)


def shape_of(text: str, params: float | None = None) -> tuple[str, float]:
    """The shape of a model by its name, and by what factor its weights are as many.

    A model that nobody knows is like the nearest of those that use as large a share of their
    weights, as its name or ``params`` (billions) say.
    """
    lower = re.sub(r"[_:]", "-", text.lower())
    for pattern, name in ALIASES:
        if re.search(pattern, lower):
            return name, 1.0
    total, used = billions(text)
    total = params or total
    if total is None:
        raise Lacking(f"model {text!r}: neither its shape nor its size is known")
    routed = used is not None and used < 0.7 * total

    def far(name: str) -> float:
        model = model_of(name, 16.0)
        if any(p.kind == "experts" for p, _ in model.parts) != routed:
            return 1e9
        active = sum(n * p.numel * p.used for p, n in model.parts)
        return abs(log(model.numel / total / 1e9)) + (
            abs(log(active / used / 1e9)) if used is not None else 0.0
        )

    nearest = min(shapes(), key=far)
    return nearest, total * 1e9 / model_of(nearest, 16.0).numel


def model_of(
    name: str,
    bits: float,
    experts: float | None = None,
    head: float | None = None,
    scale: float = 1.0,
) -> Model:
    """A model whose weights have so many ``bits``; of experts and of the head others."""
    x = shapes()[name]

    def part(kind: str, layer: int, own: float, numel: float, **more: Any) -> Part:
        size = {kind: int(numel * own * scale / 8)}
        more |= {} if kind == "embedding" else {"numel": numel * scale}
        return Part(kind, kind, kind, layer, size, **more)

    parts = [(part("embedding", -1, bits, x["embedding"]), 1)]
    at = 0
    for layer in x["layers"]:
        used, count = layer.get("experts_used", 1.0), layer["count"]
        kept = {
            "kv_bytes": 2 * layer.get("kv", 0), "window": layer.get("window"),
            "width": float(layer.get("width", 0)),
        }  # fmt: skip
        for kind in ("attention", "feed_forward", "experts"):
            if numel := layer.get(kind, 0):
                own = bits if kind != "experts" or experts is None else experts
                more = kept if kind == "attention" else {}
                share = used if kind == "experts" else 1.0
                parts.append((part(kind, at, own, numel, used=share, **more), count))
        at += count
    parts.append((part("head", -2, head or bits, x["head"]), 1))
    last = replace(parts[-2][0], layer=at - 1)
    parts[-2] = (last, parts[-2][1])
    return Model(name, x["hidden"], tuple(parts))


# Bits of a weight of llama.cpp's types, blocks' scales included, as files of them have on average.
BITS = {
    "f32": 32.0, "bf16": 16.0, "f16": 16.0, "fp16": 16.0, "q8": 8.5, "q6": 6.56, "q5": 5.6,
    "q4-0": 4.55, "q4": 4.85, "iq4": 4.4, "q3": 3.9, "iq3": 3.5, "q2": 2.92, "iq2": 2.5, "iq1": 1.8,
    "mxfp4": 4.25,
}  # fmt: skip


def llama_cpp_file(text: str, quant: str, size_bytes: float | None, params: float | None) -> Model:
    """A model in a GGUF file of ``size_bytes``, or as large as its type makes it."""
    name, scale = shape_of(text, params)
    kind = quant.lower().replace("_", "-")
    bits = next((b for k, b in BITS.items() if kind.removeprefix("ud-").startswith(k)), None)
    if size_bytes is None:
        if bits is None:
            raise Lacking(f"quantisation {quant!r} is not known")
        if "gpt-oss" in name:
            return model_of(name, 8.5, 4.25)
        return model_of(name, bits, None, max(bits, 6.56), scale)
    plain = model_of(name, 8.0, scale=scale)
    experts = sum(n * p.weight_bytes for p, n in plain.parts if p.kind == "experts")
    tied = shapes()[name]["tied"]
    others = plain.weight_bytes - experts - (plain.parts[0][0].weight_bytes if tied else 0)
    if experts and (bits or 4.0) < 8.0:  # what is not routed has eight bits, as a rule
        left = (8 * size_bytes - 8.5 * others) / experts
        if left > 0.5:
            return model_of(name, 8.5, left, scale=scale)
    return model_of(name, 8 * size_bytes / (experts + others), scale=scale)


# --- machines -----------------------------------------------------------------------------------


@cache
def machines() -> dict[str, dict[str, Peak]]:
    """By kind, then by what a name has in it."""
    listed = parse_yaml((HERE / "machines.yaml").read_text("utf-8"))
    call_us = {"cpu": 2.0}  # as in the library
    known: dict[str, dict[str, Peak]] = {
        kind: {
            str(name).replace("-", " "): Peak(
                x[1] * 1e12, x[0] * 1e9, (x[2] if len(x) > 2 else call_us.get(kind, 9.0)) * 1e-6
            )
            for name, x in names.items()
        }
        for kind, names in listed.items()
    }
    for name, facts in library().items():
        short = name.partition("/")[2].replace("-", " ")
        flops = facts.peak("fp32" if facts.kind == "cpu" else "fp16")
        for text in {short, short.removeprefix("rtx "), short.removeprefix("rx ")}:
            known[facts.kind].setdefault(text, Peak(flops, facts.bytes_per_s, facts.call_s))
    return known


def machine(text: str, processor: bool) -> tuple[str, Peak]:
    """The kind and the peaks of the device that a text names: the longest name in it."""
    lower = re.sub(r"[^a-z0-9().]+", " ", text.lower())
    kinds = ["cpu"] if processor else ["cuda", "rocm", "vulkan", "metal"]
    found = [
        (len(name), kind, peak)
        for kind in kinds
        for name, peak in machines()[kind].items()
        if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![0-9])", lower)
    ]
    if not found:
        raise Lacking(f"device {text!r} is not known")
    _, kind, peak = max(found, key=lambda x: x[0])
    return kind, peak
