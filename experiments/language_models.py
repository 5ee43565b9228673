"""Predicted seconds of language models beside what others measured and published.

    python -m experiments.language_models [--data FOLDER] [--json] [--fit]

One rule (``placement.costs.runtimes``) predicts every row of the tables of ``measured_llm`` that
lie in the folder: decoding (and prompts) of llama.cpp split between an RTX 5090 and its host
(NVIDIA's pipelined sharding, MLSys 2026), on 31 machines (Geerling), on Strix Halo, and of
vLLM, TensorRT-LLM and SGLang on data centre GPUs (AIConfigurator). KTransformers' strategies for
experts have a rule of their own (``experiments.expert_strategies``). With ``--json`` it prints one
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from experiments import budgets, expert_strategies, rough_rules
from experiments.public_models import (
    Lacking,
    Model,
    Row,
    accuracy,
    llama_cpp_file,
    machine,
    model_of,
    shape_of,
    understood,
)
from experiments.study import Option, Options, Rows, Study, StudyError, run
from experiments.tables import Column, finite, table
from placement.costs import runtimes as runtimes_module
from placement.costs import serving
from placement.costs.efficiency import Peak
from placement.costs.runtimes import Runtime, runtimes
from placement.tools.files import write_atomic

Runtimes = Mapping[str, Runtime]
PREFILL, DECODE = "prefill", "decode"


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


def model_s(
    model: Model, runtime: Runtime, peak: Peak, rows: int, sequences: float, before: float
) -> float:
    """Seconds of a pass through the whole model on one device."""
    return sum(
        n * serving.pass_s(p, model.hidden, runtime, peak, (rows, sequences, before))
        for p, n in model.parts
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
    model: Model,
    runtime: str,
    peak: Peak,
    rows: int,
    before: float,
    extra: str | None,
    all_: Runtimes,
) -> float:
    """Seconds of a test of llama-bench, so many tokens at a time.

    The tests with a context before them were run with ``-ub 2048`` on ROCm, all others with 512
    (``run_benchmarks.sh`` there).
    """
    most = 2048 if before > 2048 and "rocm" in runtime else 512
    one = min(rows, most)
    seconds = ceil(rows / one) * model_s(model, all_[runtime], peak, one, 1, before)
    return seconds + (ceil(rows / one) * all_[extra].token_s if extra else 0.0)


BUILDS = {"2025": "llama.cpp/rocm-2025-12", "2026": "llama.cpp/rocm-2026-01"}  # by year of the run
CALL_S = 9e-6  # of a GPU, as in the library of devices
STRIX = Peak(59.4e12, 256e9, CALL_S)


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
    """Half of the layers on each of two Strix Halo that are joined by Ethernet.

    Prompts depend on when llama.cpp was built: kernels for this GPU, and which of them is taken,
    changed from December 2025 to January 2026 and until the runs on one host (May 2026;
    llama.cpp#17576, #17879, #18666). Tokens do not.
    """
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
    if phase == PREFILL and runtime == "llama.cpp/rocm":
        runtime = BUILDS.get((row.get("date") or "")[-4:], runtime)
    if "amdvlk" in log_file:
        runtime = "llama.cpp/amdvlk"
    if "rocwmma" in log_file and "improved" not in log_file:
        runtime = "llama.cpp/rocwmma"  # kernels that were given up: five times slower at 32768
    predict = partial(bench, model, runtime, STRIX, rows, before, "llama.cpp/rpc")
    yield Case("", phase, log_file, model.name, measured, predict, (runtime, "llama.cpp/rpc"))


def geerling_llm_decode(row: Row) -> Iterator[Case]:
    """ollama's default files on one device of a machine, a short context."""
    system, processor = row.get("system") or "", (row.get("where") or "").upper() == "CPU"
    kind, peak = machine(system, processor)
    if (row.get("vulkan_note") or "").lower() == "true" and kind in ("rocm", "vulkan"):
        kind = "vulkan-pi"
    text = row.get("model") or ""
    model = llama_cpp_file(text, "Q4_K_M", None, None)
    runtime = f"llama.cpp/{kind}"
    predict = partial(bench, model, runtime, peak, 1, 300.0, None)
    yield Case("", DECODE, system, model.name, 1 / number(row, "tok_s"), predict, (runtime,))


PEAK_5090 = Peak(209.5e12, 1.792e12, CALL_S)
HOST = Peak.of(budgets.HOST)


def split_s(model: Model, ngl: int, before: float, all_: Runtimes) -> float:
    """Seconds of a token where the last ``ngl`` layers are on the GPU, the head the last of all."""
    gpu, cpu = all_["llama.cpp/cuda"], all_["llama.cpp/cpu"]
    seconds, layers = 0.0, model.num_layers
    left = max(0, layers - ngl)  # layers on the processor
    for part, count in model.parts:
        on_cpu = min(count, left) if part.layer >= 0 else 0
        if part.kind in ("embedding", "head"):
            on_cpu = int(part.kind == "embedding" or ngl <= layers)
        for n, runtime, peak in ((on_cpu, cpu, HOST), (count - on_cpu, gpu, PEAK_5090)):
            if n:
                seconds += n * serving.pass_s(part, model.hidden, runtime, peak, (1, 1, before))
        # (all layers of these models are equal, so that it is the same which of them are where)
    return seconds


def pipeshard_llamacpp_layers_5090(row: Row) -> Iterator[Case]:
    """llama.cpp as people run it: the last layers on the GPU, the others on the processor."""
    name, scale = shape_of(row.get("model") or "")
    bits = budgets.BITS.get(name, 4.85)
    model = model_of(name, bits, scale=scale)
    prompt = number(row, "prompt_tokens")
    try:
        ngl = int(row.get("gpu_layers_ngl") or "")
    except ValueError as error:
        raise Lacking("gpu_layers_ngl is no number") from error
    predict = partial(split_s, model, ngl, prompt)
    both = ("llama.cpp/cuda", "llama.cpp/cpu")[: 1 + (ngl <= model.num_layers)]
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

    In the long run each of ``batch`` sequences brings a prompt for every ``answer`` tokens that it
    gets, so that a token waits for ``batch / answer`` prompts on average.
    """
    own = all_[runtime]
    decode = model_s(model, own, peak, batch, batch, prompt + answer / 2)
    return decode + batch / answer * model_s(model, own, peak, int(prompt), 1, prompt / 2)


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
    batch, prompt, answer = (number(row, x) for x in ("batch", "prompt", "answer"))
    predict = partial(
        served_s,
        model,
        "vllm/cuda",
        Peak(flops, bytes_per_s, CALL_S),
        int(batch),
        prompt,
        answer,
    )
    yield Case("", DECODE, system, name, number(row, "tpot_ms") / 1e3, predict, ("vllm/cuda",))


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
# Tables with figures of their own, and what makes these.
OTHERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    expert_strategies.TABLE: expert_strategies.figures,
    **dict.fromkeys(budgets.TABLES, budgets.figures),
    **dict.fromkeys(rough_rules.TABLES, rough_rules.figures),
}
COLUMNS: Mapping[str, Sequence[str]] = {
    "pipeshard_llamacpp_layers_5090": (
        "model", "gpu_layers_ngl", "prompt_tokens", "decode_tok_s_median",
    ),
    "geerling_llm_decode": ("model", "system", "where", "tok_s", "vulkan_note"),
    "strix_halo_llama_bench": (
        "model", "quant", "file_GiB", "params_B", "backend_env", "test", "tok_s",
    ),
    "strix_halo_two_hosts_rpc": ("model", "size", "params", "test", "tok_s", "log"),
    "aiconfigurator_one_gpu_runs": (
        "system", "model", "weights", "prompt", "answer", "batch", "tpot_ms",
    ),
    **budgets.COLUMNS,
    **rough_rules.COLUMNS,
    **expert_strategies.COLUMNS,
}  # fmt: skip


def cases(path: Path) -> tuple[list[Case], dict[str, Any]]:
    """Of a file: what is measured, and which rows were skipped (see ``understood``)."""

    def read(row: Row) -> list[Case]:
        some = [replace(c, table=path.stem) for c in TABLES[path.stem](row)]
        any_ = dict.fromkeys((*runtimes(), *BUILDS.values()), PRIOR)  # also those not fitted yet
        if not all(0 < c.predict(any_) < np.inf for c in some):
            raise Lacking("sizes that cannot be")
        return some

    found, skipped = understood(path, read)
    return [case for some in found for case in some], skipped


def folder_of(data: Path) -> list[Path]:
    """The tables in a folder, or in its ``measured_llm``.

    Raises:
        StudyError: there are none, or one lacks a column.
    """
    tables = (*TABLES, *OTHERS)
    for folder in (data, data / "measured_llm"):
        if paths := [p for name in tables if (p := folder / f"{name}.csv").is_file()]:
            for path in paths:
                check_columns(path)
            return paths
    names = ", ".join(f"{name}.csv" for name in tables)
    raise StudyError(f"no table in {data}: --data FOLDER must hold one of {names}")


def check_columns(path: Path) -> None:
    """Raises: StudyError, one that the rule needs is not there."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = next(csv.reader(file), [])
    if missing := [name for name in COLUMNS.get(path.stem, ()) if name not in head]:
        raise StudyError(f"{path}: no column {', '.join(missing)}; there are {', '.join(head)}")


def figures(some: Sequence[Case], all_: Runtimes) -> dict[str, Any]:
    """Rows, errors and coverage."""
    told = np.array([c.predict(all_) for c in some])
    measured = np.array([c.measured_s for c in some])
    half = np.array([max(getattr(all_[r], c.phase) for r in c.runtime) for c in some])
    return accuracy(told, measured, half)


def summary(path: Path) -> dict[str, Any]:
    """What ``--json`` prints of a table."""
    if path.stem in OTHERS:
        return OTHERS[path.stem](path)
    found, skipped = cases(path)
    by = {phase: [c for c in found if c.phase == phase] for phase in (DECODE, PREFILL)}
    facts = figures(by[DECODE], runtimes())
    if by[PREFILL]:
        facts[PREFILL] = figures(by[PREFILL], runtimes())
    return facts | skipped


# --- the fit ------------------------------------------------------------------------------------

SHARES = ("weights", "cache", "compute", "routed", "attention")
FIXED = ("part_s", "token_s")
# Where a fit begins, and where it stays without rows that say more.
PRIOR = Runtime(0.8, 0.7, 0.35, 0.12, 0.15, 1.5e-5, 1e-3, 0.3, 0.6)
PRIORS = {
    "llama.cpp/cpu": Runtime(0.8, 0.5, 0.3, 0.3, 0.02, 1e-5, 1e-3, 0.3, 0.6),
    "llama.cpp/rpc": replace(PRIOR, token_s=5e-3),
    "llama.cpp/vulkan-pi": replace(PRIOR, weights=0.5),
    "llama.cpp/amdvlk": replace(PRIOR, compute=0.1, attention=0.05),  # without matrix units
    "llama.cpp/rocwmma": replace(PRIOR, cache=0.1, attention=0.03),
    "vllm/cuda": Runtime(0.9, 0.9, 0.8, 0.4, 0.3, 1.5e-5, 3e-4, 0.3, 0.6),
}
NOTHING = Runtime(*[np.inf] * 5, 0.0, 0.0, 0.0, 0.0)
SURE = 0.3  # how much the prior weighs, beside the rows of a runtime
LEAST_ERROR = 0.03  # below it errors count squared, above as they are


def design(some: Sequence[Case], names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds for each of what is fitted, as the rule is linear, and those that are given.

    float64 ``[cases, 7 * names]`` and ``[cases]``.
    """
    fixed = np.array([case.predict(dict.fromkeys(names, NOTHING)) for case in some])
    columns = np.zeros((len(some), 7 * len(names)))
    for i, name in enumerate(names):
        users = [k for k, case in enumerate(some) if name in case.runtime]
        for j, field in enumerate(SHARES + FIXED):
            one = dict.fromkeys(names, NOTHING) | {name: replace(NOTHING, **{field: 1.0})}
            columns[users, 7 * i + j] = [some[k].predict(one) for k in users]
            columns[users, 7 * i + j] -= fixed[users]
    return columns, fixed


def solve(columns: np.ndarray, aim: np.ndarray, weight: np.ndarray, prior: np.ndarray) -> Any:
    """The least sum of relative errors, near ``prior``, with no share above 1."""
    from scipy.optimize import nnls

    relative = np.vstack([columns * prior, SURE * np.eye(len(prior))])
    aim = np.append(aim, np.full(len(prior), SURE))
    low = np.tile([1.0] * len(SHARES) + [0.0] * len(FIXED), len(prior) // 7) / prior
    weights = np.append(weight, np.ones(len(prior)))
    for _ in range(20):
        root = np.sqrt(weights)
        found = low + nnls(relative * root[:, None], (aim - relative @ low) * root)[0]
        error = np.abs(relative @ found - aim)[: len(weight)]
        weights[: len(weight)] = weight / np.maximum(error, LEAST_ERROR)
    return found * prior


def values(runtime: Runtime) -> list[float]:
    """What is fitted: seconds, or seconds for each at peak."""
    own = [1 / getattr(runtime, name) for name in SHARES]
    return own + [getattr(runtime, name) for name in FIXED]


class Fit:
    """All runtimes, fitted to all cases or to some.

    Rows of one table for one runtime weigh as much together as the root of their number.
    """

    def __init__(self, some: Sequence[Case]) -> None:
        self.cases = some
        self.names = sorted({name for case in some for name in case.runtime})
        self.columns, self.fixed = design(some, self.names)
        self.measured = np.array([case.measured_s for case in some])
        self.prior = np.concatenate([values(PRIORS.get(n, PRIOR)) for n in self.names])
        count = Counter((case.table, case.runtime) for case in some)
        self.weight = np.array([count[c.table, c.runtime] ** -0.5 for c in some])

    def log_ratios(self, groups: Sequence[str]) -> np.ndarray:
        """float64 ``[cases]``: predicted over measured, by a fit without the group of the case."""
        told, kinds = np.empty(len(self.cases)), np.array(groups)
        for group in set(groups):
            out = kinds == group
            told[out] = self.fixed[out] + self.columns[out] @ self.without(out)
        return np.log(told / self.measured)

    def without(self, out: np.ndarray) -> np.ndarray:
        kept, rest = ~out, 1 - self.fixed / self.measured
        relative = self.columns / self.measured[:, None]
        return solve(relative[kept], rest[kept], self.weight[kept], self.prior)

    def runtimes(self, spread: Mapping[tuple[str, str], float]) -> dict[str, Runtime]:
        """What is fitted to all, with the given halves of intervals by runtime and phase."""
        found = self.without(np.zeros(len(self.cases), bool)).reshape(-1, 7)
        return {
            name: Runtime(*(1 / row[:5]), *row[5:], spread[name, DECODE], spread[name, PREFILL])
            for name, row in zip(self.names, found, strict=True)
        }


BY_BUILD = {("strix_halo_two_hosts_rpc", PREFILL)}  # of one model: left out, nothing is known


def group_of(case: Case) -> str:
    """What is left out together: a machine of Geerling's, a GPU of AIConfigurator's, else a model.

    AIConfigurator's are five GPUs, and plans are for others, too.
    """
    by_device = case.table.startswith(("geerling", "aiconfigurator"))
    own = case.device if by_device else case.model
    return f"{case.table.partition('_')[0]} {own}"


def half_width(ratios: np.ndarray) -> float:
    """Of a 90 % interval for one more row (a logarithm), from those of rows that were left out."""
    rank = min(len(ratios), ceil(0.9 * (len(ratios) + 1)))
    return float(np.sort(np.abs(ratios))[rank - 1])


def fitted(found: Sequence[Case]) -> tuple[dict[str, Runtime], dict[tuple[str, str], Any]]:
    """The runtimes that fit all cases, and by table and phase the errors of what is left out."""
    fit = Fit(found)
    ratios = fit.log_ratios([group_of(c) for c in found])
    by: dict[Any, list[float]] = {}
    for case, ratio in zip(found, ratios.tolist(), strict=True):
        by.setdefault((case.runtime[-1], case.phase), []).append(ratio)
        if (case.table, case.phase) not in BY_BUILD:
            by.setdefault(case.phase, []).append(ratio)
        by.setdefault((case.table, case.phase), []).append(ratio)
    widths = {
        (name, phase): half_width(np.array(own if len(own) > 4 else every))
        for name in fit.names
        for phase in (DECODE, PREFILL)
        for own, every in [(by.get((name, phase), []), by.get(phase) or [getattr(PRIOR, phase)])]
    }
    errors = {key: np.abs(np.exp(x) - 1) for key, x in by.items() if key[0] in TABLES}
    return fit.runtimes(widths), errors


HEAD = """\
# What programs reach of a device's peak rates with a language model, by program and kind of device;
# placement/costs/runtimes.py says what the numbers are. Fitted to public tables, and written, by
#   python -m experiments.language_models --fit
# On github.com: llama.cpp/cuda, metal, cpu: geerlingguy/ai-benchmarks; cuda and cpu also
# deepshnv/pipeshard-mlsys26-ae; rocm, vulkan, amdvlk, rocwmma (kernels that were given up), rpc
# (token_s: two hosts on Ethernet), rocm-2025-12 and -2026-01 (prompts, by llama.cpp of then):
# kyuz0/amd-strix-halo-toolboxes; vulkan-pi: AMD's and Intel's cards on a Raspberry Pi; vllm (also
# TensorRT-LLM and SGLang): ai-dynamo/aiconfigurator.
"""


def text_of(all_: Runtimes) -> str:
    """The content of ``runtimes.yaml``."""
    lines = [
        f"{name}: {{{', '.join(f'{k}: {float(v):.3g}' for k, v in asdict(x).items())}}}"
        for name, x in all_.items()
    ]
    return HEAD + "\n".join(lines) + "\n"


def rows(options: Options) -> list[dict[str, Any]] | None:
    """A row per table and phase; with ``--json`` they are printed and nothing is written."""
    paths = folder_of(options.data)
    if options.json:
        print(json.dumps({path.stem: summary(path) for path in paths}))
        return None
    others = [path for path in paths if path.stem in OTHERS]
    paths = [path for path in paths if path.stem in TABLES]
    found = [case for path in paths for case in cases(path)[0]]
    all_, errors = fitted(found) if found else ({}, {})
    if options.fit:
        write_atomic(Path(runtimes_module.__file__).with_suffix(".yaml"), text_of(all_))
        runtimes.cache_clear()
    made = []
    for path in paths:
        for phase in (DECODE, PREFILL):
            own = [c for c in found if (c.table, c.phase) == (path.stem, phase)]
            if own:
                out = errors.get((path.stem, phase), np.array([np.nan]))
                left = {"left_out": finite(np.median(out)), "tenth": finite(np.quantile(out, 0.9))}
                made.append({"table": path.stem, "phase": phase} | figures(own, runtimes()) | left)
    return made + [summary(path) | {"table": path.stem, "phase": DECODE} for path in others]


def left_out(row: Mapping[str, Any]) -> float | None:
    """The median error of what a fit did not see."""
    own = row.get("left_out")
    return own["median_error"] if isinstance(own, dict) else own


def parts(made: Rows, options: Options) -> dict[str, str]:
    """Both tables of the page."""
    plans = [row for row in made if "at_least_theirs" in row]
    return {
        "table": table(
            made,
            Column("table", lambda r: f"{r['table']}, {r['phase']}"),
            Column("rows", "rows"),
            Column("median error", "median_error", 1, 100, " %"),
            Column("a tenth is above", "worst_decile", 1, 100, " %"),
            Column("left out: median", left_out, 1, 100, " %"),
            Column("a tenth is above", lambda r: r.get("tenth"), 1, 100, " %"),
            Column("in the 90 % interval", "coverage", 0, 100, " %"),
        ),
        "plans": table(
            plans,
            Column("table", "table"),
            Column("budgets", "rows"),
            Column("at least theirs", "at_least_theirs", 0, 100, " %"),
            Column("at the low end, too", "at_least_theirs_at_the_low_end", 0, 100, " %"),
            Column("of the bound, median", "share_of_bound", 0, 100, " %"),
        ),
    }


STUDY = Study(
    name="language_models",
    rows=rows,
    options={
        "json": Option(False, "print one JSON object, write nothing"),
        "fit": Option(False, "fit placement/costs/runtimes.yaml to these tables"),
    },
    parts=parts,
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
