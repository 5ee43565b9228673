"""Are predicted seconds for a token those of a decoder that runs, its cache included?

    python -m experiments.decoding [--layers 12] [--contexts 256 1024] [--tokens 64]

A Llama-like decoder with random weights on one-core devices of this machine, each with a limit of
memory so that no device can hold it all. One operator of each kind is measured on each device (all
layers are equal), ``layer_dp`` plans from that, and the layers run on threads that are pinned to
the cores of their devices, a token at a time, with keys and values of a full context. What is
compared are seconds by the clock, and processor seconds, which other programs of the machine change
least. Writes ``experiments/results/decoding.json`` and ``.md``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from experiments import study
from experiments.study import Option, Options, Study
from experiments.tables import Column
from placement.cluster import Cluster
from placement.costs.serving import Phase, Serving, memory, serving_problem
from placement.importers.decoder import Part
from placement.importers.hf_config import read
from placement.planners import load
from placement.problem import Problem

Step = Callable[[Tensor], Tensor]


def step_of(part: Part, config: dict[str, Any], context: int) -> Step:
    """What a part of the decoder does with a token, weights and cache included."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = hidden // heads

    def weight(*dims: int) -> Tensor:
        return torch.randn(*dims) * 0.01

    if part.kind == "embedding":
        rows = weight(config["vocab_size"], hidden)
        return lambda token: F.embedding(token.argmax(-1) % len(rows), rows).view(1, hidden)
    if part.kind == "attention":
        qkv, out = weight((heads + 2 * kv_heads) * size, hidden), weight(hidden, hidden)
        keys, values = weight(1, kv_heads, context, size), weight(1, kv_heads, context, size)

        def attention(x: Tensor) -> Tensor:
            projected = F.linear(F.rms_norm(x, (hidden,)), qkv).view(heads + 2 * kv_heads, 1, size)
            q, k, v = projected.split((heads, kv_heads, kv_heads))
            keys[0, :, -1:], values[0, :, -1:] = k, v  # the last token of a full context
            y = F.scaled_dot_product_attention(q[None], keys, values, enable_gqa=True)
            return x + F.linear(y.reshape(1, hidden), out)

        return attention
    if part.kind == "feed_forward":
        both, down = weight(2 * inner, hidden), weight(hidden, inner)

        def feed_forward(x: Tensor) -> Tensor:
            gate, up = F.linear(F.rms_norm(x, (hidden,)), both).chunk(2, dim=-1)
            return x + F.linear(F.silu(gate) * up, down)

        return feed_forward
    if part.numel == 0.0:
        return lambda x: F.rms_norm(x, (hidden,))
    head = weight(config["vocab_size"], hidden)
    return lambda x: F.linear(x, head)


def thread_on(cores: tuple[int, ...]) -> ThreadPoolExecutor:
    """A thread that is pinned to ``cores``."""

    def begin() -> None:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(1)

    return ThreadPoolExecutor(1, initializer=begin)


@torch.inference_mode()
def run(steps: Sequence[Step], x: Tensor) -> tuple[Tensor, float]:
    """What comes of the steps, one after another, and their processor seconds."""
    begun = time.thread_time()
    for step in steps:
        x = step(x)
    return x, time.thread_time() - begun


def measured_s(step: Step, x: Tensor, cores: tuple[int, ...], times: int = 9) -> float:
    """Median processor seconds of a step on a thread pinned to ``cores``, caches cold."""
    flush = torch.empty(2**24)

    def once() -> float:
        flush.fill_(1.0)  # what ran before in a whole model has taken the caches
        return run([step], x)[1]

    with thread_on(cores) as thread:
        took = [thread.submit(once).result() for _ in range(times)]
    return float(np.median(took[1:]))


def measured(problem: Problem, steps: Sequence[Step], hidden: int) -> Problem:
    """The problem with measured seconds: of equal operators one is measured, on every device."""
    known: dict[tuple[str, int], float] = {}
    seconds = np.zeros_like(problem.compute_s)
    for n, signature in enumerate(problem.graph.op_signature):
        for d, device in enumerate(problem.cluster.devices):
            if (signature, d) not in known:
                known[signature, d] = measured_s(steps[n], torch.randn(1, hidden), device.cores)
            seconds[n, d] = known[signature, d]
    profile = replace(problem.profile, compute_s=seconds, predicted=None)
    return replace(problem, profile=profile)


def seconds_per_token(
    steps: Sequence[Step], cores: Sequence[tuple[int, ...]], tokens: int
) -> tuple[list[float], float]:
    """Seconds of each token through the steps, step ``i`` on a thread pinned to ``cores[i]``.

    Also processor seconds of a token, on average over all but the first.
    """
    stages = [
        (at, [steps[i] for i, _ in group])
        for at, group in groupby(enumerate(cores), lambda pair: pair[1])
    ]
    took, busy, token = [], [], torch.zeros(1, 4)
    with ExitStack() as opened:
        threads = [opened.enter_context(thread_on(at)) for at, _ in stages]
        for _ in range(tokens):
            begun, busy_s = time.perf_counter(), 0.0
            for thread, (_, mine) in zip(threads, stages, strict=True):
                token, seconds = thread.submit(run, mine, token).result()
                busy_s += seconds
            took.append(time.perf_counter() - begun)
            busy.append(busy_s)
    return took, sum(busy[1:]) / max(1, tokens - 1)


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """A row per context."""
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden, "num_hidden_layers": options.layers,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 8192,
        "torch_dtype": "float32",
    }  # fmt: skip
    decoder = read(config, "config.json", "small decoder")
    for context in options.contexts:
        serving = Serving(Phase.DECODE, context)
        here = Cluster.detect()
        whole = int(serving_problem(decoder, here, serving).graph.param_bytes.sum())
        limit = int(whole * options.share)
        limited = tuple(replace(d, memory_bytes=limit) for d in here.devices)
        steps = [step_of(part, config, context) for part in decoder.parts]
        problem = serving_problem(decoder, replace(here, devices=limited), serving)
        problem = measured(problem, steps, options.hidden)
        solution = load("layer_dp")(problem)
        cores = [limited[d].cores for d in solution.placement]
        took, busy_s = seconds_per_token(steps, cores, options.tokens)
        held = memory(problem, solution.placement)
        yield {
            "context": context,
            "predicted_s": float(solution.value_s),
            "measured_s": float(np.median(took[options.tokens // 4 :])),
            "processor_s": busy_s,
            "devices": len(set(solution.placement.tolist())),
            "limit_bytes": limit,
            "needed_bytes": {name: x["needed_bytes"] for name, x in held.items()},
        }


STUDY = Study(
    name="decoding",
    rows=rows,
    columns=(
        Column("context", "context"),
        Column("devices", "devices"),
        Column("predicted", "predicted_s", 2, 1e3, " ms"),
        Column("measured, processor", "processor_s", 2, 1e3, " ms"),
        Column("error", lambda r: r["predicted_s"] / r["processor_s"] - 1, 1, 100, " %"),
        Column("measured, wall clock", "measured_s", 2, 1e3, " ms"),
        Column("error", lambda r: r["predicted_s"] / r["measured_s"] - 1, 1, 100, " %"),
    ),
    options={
        "layers": 12,
        "hidden": 1024,
        "contexts": (256, 1024, 4096),
        "tokens": Option(64, "of each context; the first quarter is not counted"),
        "share": Option(0.7, "of what is needed that a device has"),
    },
)

if __name__ == "__main__":
    raise SystemExit(study.run(STUDY))
