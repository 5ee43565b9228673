"""Predicted seconds of language models beside what others measured and published.

    python -m experiments.language_models [--data FOLDER] [--json] [--fit]

One rule (``placement.costs.runtimes``) predicts every row of the tables of ``measured_llm`` that
lie in the folder: decoding (and prompts) of llama.cpp split between an RTX 5090 and its host
(NVIDIA's pipelined sharding, MLSys 2026), on fifty machines (Geerling), on Strix Halo, and of
vLLM, TensorRT-LLM and SGLang on data centre GPUs (AIConfigurator). With ``--json`` it prints one
object and writes nothing: table -> rows, median_error and worst_decile (the 90 % quantile) of
``|predicted / measured - 1|`` of seconds, coverage of the 90 % intervals, and how many rows were
skipped, as they lack what the rule needs; these are of decoding, and ``prefill`` has the same of
prompts. ``--fit`` fits the numbers of ``runtimes.yaml`` to the tables again and writes them.

Shapes of the models are in ``shapes.yaml``, machines that the library lacks in ``machines.yaml``.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, log
from pathlib import Path
from typing import Any

import numpy as np

from experiments.study import Option, Options, Study, StudyError, run
from experiments.tables import Column
from placement.costs.efficiency import Peak
from placement.costs.runtimes import Runtime, runtimes
from placement.devices import library
from placement.importers.decoder import Part
from placement.tools.files import parse_yaml

HERE = Path(__file__).parent
Row = Mapping[str, str]
Runtimes = Mapping[str, Runtime]
PREFILL, DECODE = "prefill", "decode"


class Lacking(ValueError):
    """A row lacks what the rule needs, or names what nobody knows; it is skipped and counted."""


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
            return model_of(name, 16.0, 4.25, 16.0)
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
    known: dict[str, dict[str, Peak]] = {
        kind: {str(k).replace("-", " "): Peak(t * 1e12, b * 1e9, 0.0) for k, (b, t) in x.items()}
        for kind, x in listed.items()
    }
    for name, facts in library().items():
        short = name.partition("/")[2].replace("-", " ")
        for text in {short, short.removeprefix("rtx "), short.removeprefix("rx ")}:
            dtype = "fp32" if facts.kind == "cpu" else "fp16"
            known[facts.kind].setdefault(text, Peak(facts.peak(dtype), facts.bytes_per_s, 0.0))
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


# --- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What was measured, and how it is predicted.

    Attributes:
        table: file that it is in.
        phase: ``decode`` or ``prefill``.
        device, model: one of them is left out of a fit at a time.
        measured_s: seconds of a token, or of a prompt.
        predict: seconds by the runtimes.
        runtime: whose interval it has; those that it needs.
    """

    table: str
    phase: str
    device: str
    model: str
    measured_s: float
    predict: Callable[[Runtimes], float]
    runtime: tuple[str, ...]


def number(row: Row, name: str) -> float:
    """A positive number of a row.

    Raises:
        Lacking: there is none.
    """
    text = (row.get(name) or "").replace("±", " ").split()
    try:
        value = float(text[0])
    except (IndexError, ValueError) as error:
        raise Lacking(f"{name} = {row.get(name)!r} is no number") from error
    if not 0 < value < float("inf"):
        raise Lacking(f"{name} = {value} is not positive")
    return value


def pass_s(
    model: Model, runtime: Runtime, peak: Peak, rows: int, sequences: float, before: float
) -> float:
    """Seconds of a pass through the whole model on one device."""
    return runtime.token_s + sum(
        n * runtime.pass_s(p, model.hidden, peak, rows, sequences, before) for p, n in model.parts
    )


def test_s(test: str, rate: float) -> tuple[str, int, float, float]:
    """Of ``pp512``, ``tg128 @ d32768``: phase, tokens together, before each, measured seconds."""
    match = re.fullmatch(r"(pp|tg)(\d+)(?: @ d(\d+))?", test.strip())
    if not match:
        raise Lacking(f"test {test!r} is neither of prompts nor of answers")
    count, depth = int(match[2]), int(match[3] or 0)
    if match[1] == "tg":
        return DECODE, 1, depth + count / 2, 1 / rate
    return PREFILL, count, depth + count / 2, count / rate


def bench(
    model: Model, runtime: str, peak: Peak, rows: int, before: float, extra: str | None, all_: Runtimes
) -> float:
    """Seconds of a test of llama-bench, 512 tokens at a time."""
    one = min(rows, 512)
    seconds = ceil(rows / one) * pass_s(model, all_[runtime], peak, one, 1, before)
    return seconds + (ceil(rows / one) * all_[extra].token_s if extra else 0.0)


STRIX = Peak(59.4e12, 256e9, 0.0)


def strix_halo_llama_bench(row: Row) -> Iterator[Case]:
    """Strix Halo (Ryzen AI Max+ 395), ROCm and Vulkan."""
    phase, rows, before, measured = test_s(row.get("test") or "", number(row, "tok_s"))
    env = row.get("backend_env") or ""
    runtime = {"vulkan_amdvlk": "llama.cpp/amdvlk", "vulkan_radv": "llama.cpp/vulkan"}.get(
        env, "llama.cpp/rocm"
    )
    size = number(row, "file_GiB") * 2**30
    text = row.get("model") or ""
    model = llama_cpp_file(text, row.get("quant") or "", size, number(row, "params_B"))
    predict = partial(bench, model, runtime, STRIX, rows, before, None)
    yield Case("", phase, env, model.name, measured, predict, (runtime,))


def strix_halo_two_hosts_rpc(row: Row) -> Iterator[Case]:
    """Half of the layers on each of two Strix Halo that are joined by Ethernet."""
    phase, rows, before, measured = test_s(row.get("test") or "", number(row, "tok_s"))
    text, log_file = row.get("model") or "", row.get("log") or ""
    size = (row.get("size") or "").split()
    if len(size) != 2 or size[1] not in ("GiB", "MiB"):
        raise Lacking(f"size {row.get('size')!r} is not known")
    size_bytes = float(size[0]) * (2**30 if size[1] == "GiB" else 2**20)
    quant = re.search(r"(I?Q\d\w*|BF16|F16|MXFP4)", log_file, re.IGNORECASE)
    model = llama_cpp_file(
        f"{text} {log_file}", quant[1] if quant else "Q4", size_bytes, number(row, "params")
    )
    runtime = "llama.cpp/rocm" if "rocm" in log_file.lower() else "llama.cpp/vulkan"
    predict = partial(bench, model, runtime, STRIX, rows, before, "llama.cpp/rpc")
    yield Case("", phase, log_file, model.name, measured, predict, (runtime, "llama.cpp/rpc"))


def geerling_llm_decode(row: Row) -> Iterator[Case]:
    """ollama's default files on one device of a machine, a short context."""
    system, processor = row.get("system") or "", (row.get("where") or "").upper() == "CPU"
    kind, peak = machine(system, processor)
    if (row.get("vulkan_note") or "").lower() == "true" and kind != "cpu":
        kind = "vulkan"
    text = row.get("model") or ""
    model = llama_cpp_file(text, "Q4_K_M", None, None)
    runtime = f"llama.cpp/{kind}"
    predict = partial(bench, model, runtime, peak, 1, 300.0, None)
    yield Case("", DECODE, system, model.name, 1 / number(row, "tok_s"), predict, (runtime,))


PEAK_5090 = Peak(209.5e12, 1.792e12, 0.0)
HOST = Peak(2.5e12, 0.0896e12, 0.0)  # a desktop of its time: two channels of DDR5-5600
PIPESHARD = {"minitron-4b": 16.0, "minitron-8b": 16.0, "qwen3-30b-a3b": 4.54,
             "qwen3-235b-a22b": 2.92}  # fmt: skip


def split_s(
    model: Model, ngl: int, before: float, all_: Runtimes
) -> float:
    """Seconds of a token where the last ``ngl`` layers are on the GPU, the head the last of all."""
    gpu, cpu = all_["llama.cpp/cuda"], all_["llama.cpp/cpu"]
    seconds, layers = gpu.token_s, model.num_layers
    left = max(0, layers - ngl)  # layers on the processor
    seconds += cpu.token_s if ngl <= layers else 0.0
    for part, count in model.parts:
        on_cpu = min(count, left) if part.layer >= 0 else 0
        if part.kind in ("embedding", "head"):
            on_cpu = int(part.kind == "embedding" or ngl <= layers)
        for n, runtime, peak in ((on_cpu, cpu, HOST), (count - on_cpu, gpu, PEAK_5090)):
            if n:
                seconds += n * runtime.pass_s(part, model.hidden, peak, 1, 1, before)
        # (all layers of these models are equal, so that it is the same which of them are where)
    return seconds


def pipeshard_llamacpp_layers_5090(row: Row) -> Iterator[Case]:
    """llama.cpp as people run it: the last layers on the GPU, the others on the processor."""
    name, scale = shape_of(row.get("model") or "")
    bits = PIPESHARD.get(name, 4.85)
    model = model_of(name, bits, scale=scale)
    prompt = number(row, "prompt_tokens")
    try:
        ngl = int(row.get("gpu_layers_ngl") or "")
    except ValueError as error:
        raise Lacking("gpu_layers_ngl is no number") from error
    predict = partial(split_s, model, ngl, prompt)
    both = ("llama.cpp/cpu" if ngl <= model.num_layers else "llama.cpp/cuda",)
    yield Case("", DECODE, "RTX 5090", name, 1 / number(row, "decode_tok_s_median"), predict, both)


AIC = {"b200": (7.7e12, 2250e12), "b300": (7.75e12, 2250e12), "gb200": (8e12, 2500e12),
       "gb300": (8e12, 2500e12), "h200": (4.8e12, 989e12), "h100": (3.35e12, 989e12),
       "h100_pcie": (2.0e12, 756e12), "a100": (2.039e12, 312e12), "a100_pcie": (1.935e12, 312e12),
       "l40s": (0.864e12, 362e12), "l4": (0.3e12, 121e12), "a30": (0.933e12, 165e12),
       "rtx_pro_6000": (1.792e12, 468e12), "b60": (0.456e12, 98e12)}  # fmt: skip


def served_s(
    model: Model, runtime: str, peak: Peak, batch: int, prompt: float, answer: float, all_: Runtimes
) -> float:
    """Seconds between tokens of a sequence while others' prompts come in.

    Each of ``batch`` sequences brings ``prompt`` tokens for every ``answer`` tokens that it gets, so
    that on average ``batch * prompt / answer`` of them join a pass.
    """
    own = all_[runtime]
    joining = batch * prompt / answer
    decode = pass_s(model, own, peak, batch, batch, prompt + answer / 2)
    rows = max(1, round(joining))
    both = pass_s(model, own, peak, batch + rows, rows / prompt, prompt / 2)
    alone = pass_s(model, own, peak, batch, 0.0, 1.0)
    return decode + max(0.0, both - alone)


def aiconfigurator_one_gpu_runs(row: Row) -> Iterator[Case]:
    """vLLM, TensorRT-LLM and SGLang on one data centre GPU."""
    system = (row.get("system") or "").lower()
    key = max((k for k in AIC if system.startswith(k)), key=len, default=None)
    if key is None:
        raise Lacking(f"system {system!r} is not known")
    bytes_per_s, flops = AIC[key]
    name, scale = shape_of(row.get("model") or "")
    weights = (row.get("weights") or row.get("gemm") or "").lower()
    bits = 4.5 if "fp4" in weights else 8.0 if "8" in weights else 16.0
    blackwell = key[0] == "b" or key[:2] == "gb" or "pro" in key
    if bits < 16:
        flops *= 2 if key[0] != "a" else 1
    if bits < 8:
        flops *= 2 if blackwell else 0.5
    experts = bits if bits < 16 else None
    plain = bits if bits == 8 or bits == 16 else 16.0 if "oss" in name else bits
    model = model_of(name, plain, experts, 16.0, scale)
    runtime = (row.get("backend") or "").lower()
    runtime = runtime if f"{runtime}/cuda" in runtimes() else "vllm"
    batch, prompt, answer = (number(row, x) for x in ("batch", "prompt", "answer"))
    predict = partial(
        served_s, model, f"{runtime}/cuda", Peak(flops, bytes_per_s, 0.0), int(batch), prompt, answer
    )
    yield Case("", DECODE, system, name, number(row, "tpot_ms") / 1e3, predict, (f"{runtime}/cuda",))


TABLES: Mapping[str, Callable[[Row], Iterator[Case]]] = {
    read.__name__: read
    for read in (
        pipeshard_llamacpp_layers_5090,
        geerling_llm_decode,
        strix_halo_llama_bench,
        strix_halo_two_hosts_rpc,
        aiconfigurator_one_gpu_runs,
    )
}


def cases(path: Path) -> tuple[list[Case], Counter[str]]:
    """Of a file: what is measured, and how often rows were skipped, by reason."""
    found, skipped = [], Counter[str]()
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            try:
                found += [replace(c, table=path.stem) for c in TABLES[path.stem](row)]
            except Lacking as why:
                skipped[str(why)] += 1
    return found, skipped


def folder_of(data: Path) -> list[Path]:
    """The tables in a folder, or in its ``measured_llm``.

    Raises:
        StudyError: there are none.
    """
    for folder in (data, data / "measured_llm"):
        if paths := [p for name in TABLES if (p := folder / f"{name}.csv").is_file()]:
            return paths
    names = ", ".join(f"{name}.csv" for name in TABLES)
    raise StudyError(f"no table in {data}: --data FOLDER must hold one of {names}")


def figures(some: Sequence[Case], all_: Runtimes) -> dict[str, Any]:
    """Rows, errors and coverage."""
    told = np.array([c.predict(all_) for c in some])
    measured = np.array([c.measured_s for c in some])
    half = np.array([max(getattr(all_[r], c.phase) for r in c.runtime) for c in some])
    error = np.abs(told / measured - 1)
    return {
        "rows": len(some),
        "median_error": float(np.median(error)),
        "worst_decile": float(np.quantile(error, 0.9)),
        "coverage": float(np.mean(np.abs(np.log(told / measured)) <= half)),
    }


def summary(path: Path) -> dict[str, Any]:
    """What ``--json`` prints of a table."""
    found, skipped = cases(path)
    by = {phase: [c for c in found if c.phase == phase] for phase in (DECODE, PREFILL)}
    empty = {"rows": 0, "median_error": None, "worst_decile": None, "coverage": None}
    facts = figures(by[DECODE], runtimes()) if by[DECODE] else empty
    if by[PREFILL]:
        facts[PREFILL] = figures(by[PREFILL], runtimes())
    return facts | {"skipped": sum(skipped.values()), "why": dict(skipped.most_common(5))}


def rows(options: Options) -> list[dict[str, Any]] | None:
    """A row per table; with ``--json`` it is printed and nothing is written."""
    found = {path.stem: summary(path) for path in folder_of(options.data)}
    if options.json:
        print(json.dumps(found))
        return None
    return [{"table": name, **x} for name, x in found.items()]


STUDY = Study(
    name="language_models",
    rows=rows,
    options={"json": Option(False, "print one JSON object, write nothing")},
    columns=(
        Column("table", "table"),
        Column("rows", "rows"),
        Column("skipped", "skipped"),
        Column("median error", "median_error", 1, 100, " %"),
        Column("worst tenth", "worst_decile", 1, 100, " %"),
        Column("coverage", "coverage", 1, 100, " %"),
    ),
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
