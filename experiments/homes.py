"""Language models on clusters that people have at home: planned, and split as is done today.

    python -m experiments.homes [--clusters 200]

Two to six devices drawn from the library, on up to three hosts joined by Ethernet, of whose memory
60 to 95 % is needed: Llama 3.1 8B and 70B whole layer by whole layer, Mixtral 8x7B with its experts
apart, seconds for a token at a context of 8,192. Nothing is measured: all planners are judged by
the same predictions. Writes ``experiments/results/homes.csv`` and ``.md``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.study import Option, Options, Rows, Study, run
from experiments.tables import Column, groups, table
from placement.cluster import Cluster, Device, Link
from placement.costs.serving import Phase, Serving, memory, serving_problem
from placement.devices import library
from placement.importers.decoder import Decoder
from placement.importers.hf_config import read
from placement.planners import load
from placement.problem import Problem

_LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, object]] = {
    "Llama 3.1 8B": _LLAMA,
    "Llama 3.1 70B": _LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "Mixtral 8x7B": _LLAMA | {
        "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}  # fmt: skip
PLANNERS = ("by_memory", "even_layers", "llama_cpp_split", "contiguous_dp", "layer_dp", "best_of")
_CONTEXT, _SLOT = 8192, (15e-6, 2e10)
_NETWORKS = ((1e-4, 1.2e8), (1e-4, 3e8), (5e-5, 1.2e9))  # 1, 2.5 and 10 Gbit/s


@dataclass(frozen=True)
class Row:
    """Seconds for a token by a planner on a cluster; inf: nothing that fits was found."""

    seed: int
    model: str
    devices: int
    planner: str
    decode_s: float
    over_memory: bool
    planned_s: float


def decoder(model: str) -> Decoder:
    """The model, from its numbers."""
    return read(MODELS[model], "config.json", model)


def home(seed: int, model: str) -> Problem:
    """A cluster for the model, and a token of it."""
    rng = np.random.default_rng(seed)
    likes = rng.choice(sorted(library()), int(rng.integers(2, 7)), replace=False).tolist()
    hosts = rng.integers(0, 3, len(likes)).tolist()
    share = rng.uniform(0.3, 1.0, len(likes)).tolist()
    network = _NETWORKS[int(rng.integers(len(_NETWORKS)))]
    needed = rng.uniform(0.6, 0.95)
    serving = Serving(Phase.DECODE, _CONTEXT, whole_layers="Mixtral" not in model)

    def problem(factor: float) -> Problem:
        devices = [
            Device(f"{like}/{i}", facts.kind, like=like, model=like,
                   memory_bytes=int(factor * share[i] * facts.memory_bytes))
            for i, like in enumerate(likes)
            for facts in [library()[like]]
        ]  # fmt: skip
        links = [
            Link(a.name, b.name, *(_SLOT if hosts[i] == hosts[j] else network))
            for i, a in enumerate(devices)
            for j, b in enumerate(devices)
            if i != j
        ]
        return serving_problem(
            decoder(model), Cluster("home", tuple(devices), tuple(links)), serving
        )

    roomy = problem(1.0)
    whole = float(roomy.graph.param_bytes.sum())
    return problem(whole / needed / float(roomy.memory_bytes.sum()))


def rows(options: Options) -> Iterator[Row]:
    """A row per cluster and planner."""
    for seed in range(options.clusters):
        model = list(MODELS)[seed % len(MODELS)]
        problem = home(seed, model)
        for name in options.planners:
            began = time.process_time()
            solution = load(name)(problem)
            took = time.process_time() - began
            held = memory(problem, solution.placement).values()
            over = any(x["needed_bytes"] > x["there_bytes"] for x in held)
            yield Row(
                seed, model, problem.num_devices, name, float(solution.value_s),
                bool(over and np.isfinite(solution.value_s)), took,
            )  # fmt: skip


def parts(rows: Rows, options: Options) -> dict[str, str]:
    """A line per planner and model, against the split by memory."""
    by = {(r.seed, r.planner): r for r in rows}

    def gains(own: Sequence[Row]) -> np.ndarray:
        base = np.array([by[r.seed, "by_memory"].decode_s for r in own])
        mine = np.array([r.decode_s for r in own])
        both = np.isfinite(base)
        return base[both] / mine[both]

    def share(own: Sequence[Row], of: float) -> float | None:
        ratios = gains(own)
        return float(np.quantile(ratios, of)) if len(ratios) else None

    every = {("all", planner): own for planner, own in groups(rows, "planner").items()}
    of = groups(rows, "model", "planner") | every
    return {
        "table": table(
            of,
            Column("model", lambda key: key[0]),
            Column("planner", lambda key: key[1]),
            Column("fits on", lambda key: int(np.isfinite([r.decode_s for r in of[key]]).sum())),
            Column("of", lambda key: len(of[key])),
            Column("slower than by memory on", lambda key: int((gains(of[key]) < 1 - 1e-9).sum())),
            Column("median gain", lambda key: share(of[key], 0.5), 2, unit="x"),
            Column("quarter with most", lambda key: share(of[key], 0.75), 2, unit="x"),
            Column(
                "most processor seconds",
                lambda key: max(r.planned_s for r in of[key]),
                2,
                unit=" s",
            ),
        ),
        "over": str(sum(r.over_memory for r in rows)),
    }


STUDY = Study(
    name="homes",
    rows=rows,
    parts=parts,
    row=Row,
    options={
        "clusters": Option(200, "seeds from 0"),
        "planners": Option(PLANNERS, "by name"),
    },
    wrong=lambda rows, options: [r for r in rows if r.over_memory],
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
