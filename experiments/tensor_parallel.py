"""Eight A100 in one host: groups and layers that the planner chooses, beside plans by hand.

    python -m experiments.tensor_parallel

Predicted seconds of Llama 3 8B and 70B, for a prompt of 4,096 tokens (prefill) and for a token at
that context (decode), on eight A100 of the library, linked by NVLink and by their slots: TP 8, PP 8
and TP 4 x PP 2, with the same number of layers on each stage, and what ``layer_dp`` chooses with
``--tensor-parallel``. Beside them seconds that others measured with vLLM. Writes
``experiments/results/tensor_parallel.md`` and ``.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.study import Options, Study, run
from experiments.tables import Column, table
from placement.cluster import Cluster, Device, Link
from placement.costs.groups import best_groups, group_problem
from placement.costs.serving import Phase, Serving
from placement.importers.decoder import Decoder
from placement.importers.hf_config import read
from placement.planners import load

GPUS = tuple(Device(f"cuda:{i}", "cuda", (), 1, 80 * 10**9, like="nvidia/a100-80gb")
             for i in range(8))  # fmt: skip
# One step of a ring. NVLink: of the 300 GB/s each way that its maker states what transfers reach, a
# guess; 14 steps of 2 us are the 25 to 30 us of a small all-reduce of NCCL over eight of them.
CLUSTERS = {
    "NVLink": Cluster("nvlink", GPUS, (Link("*", "*", 2e-6, 2.5e11),)),
    "slots": Cluster("slots", GPUS, (Link("*", "*", 1.5e-5, 2.5e10),)),
}
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "Llama 3 8B": LLAMA,
    "Llama 3 70B": LLAMA | {"hidden_size": 8192, "intermediate_size": 28672,
                            "num_hidden_layers": 80, "num_attention_heads": 64},
    "QwQ 32B": LLAMA | {"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
                        "num_hidden_layers": 64, "num_attention_heads": 40, "vocab_size": 152064},
}  # fmt: skip
CONTEXT = 4096
BY_HAND = {"TP 8": 8, "PP 8": 1, "TP 4 x PP 2": 4}
# Model, sequences, prompt, answer, members, seconds of a token: of its benchmark_latency.py, of
# all that it says over the tokens of the answer; vLLM 0.7.2, 8 x A100 80 GB,
# github.com/vllm-project/vllm/issues/16300.
MEASURED = [
    ("QwQ 32B", batch, 1, 200, ways, seconds / 200)
    for batch, rows in ((1, (5.50, 3.91, 3.15)), (16, (6.07, 4.77, 4.25)))
    for ways, seconds in zip((2, 4, 8), rows, strict=True)
]


def decoder(model: str) -> Decoder:
    """The model of a config, on ``meta``."""
    return read(CONFIGS[model], "config.json", model)


def even(model: Decoder, cluster: Cluster, serving: Serving, ways: int) -> float:
    """Seconds of groups of so many, with the same number of layers each."""
    groups = [tuple(range(i, i + ways)) for i in range(0, len(GPUS), ways)]
    return float(load("even_layers")(group_problem(model, cluster, serving, groups)).value_s)


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """One of each link, model and phase; then one of each measurement."""
    layer_dp = load("layer_dp")
    for links, cluster in CLUSTERS.items():
        for name in ("Llama 3 8B", "Llama 3 70B"):
            model = decoder(name)
            for phase in (Phase.PREFILL, Phase.DECODE):
                serving = Serving(phase, CONTEXT)
                problem = best_groups(model, cluster, serving, layer_dp)
                answer = layer_dp(problem)
                used = [problem.cluster.devices[d] for d in sorted({*answer.placement.tolist()})]
                yield {
                    "case": f"{name}, {phase}, {links}",
                    **{how: even(model, cluster, serving, k) for how, k in BY_HAND.items()},
                    "chosen": float(answer.value_s),
                    "groups": " + ".join(str(len(d.members) or 1) for d in used),
                }
    for name, batch, prompt, answer_tokens, ways, measured_s in MEASURED:
        middle = Serving(Phase.DECODE, prompt + answer_tokens // 2, batch)
        group = [tuple(range(ways))]
        problem = group_problem(decoder(name), CLUSTERS["NVLink"], middle, group)
        predicted_s = float(layer_dp(problem).value_s)
        yield {
            "case": f"{name}, {batch} x, TP {ways}",
            "measured": measured_s,
            "predicted": predicted_s,
            "error": predicted_s / measured_s - 1,
        }


def parts(rows: list[dict[str, Any]], options: Options) -> dict[str, str]:
    """The two tables."""
    plans = [row for row in rows if "chosen" in row]
    ms = [Column(how, how, 2, 1e3, " ms") for how in (*BY_HAND, "chosen")]
    measured = [row for row in rows if "measured" in row]
    both = [Column(how, how, 1, 1e3, " ms") for how in ("measured", "predicted")]
    return {
        "table": table(plans, Column("predicted", "case"), *ms, Column("its groups", "groups")),
        "measured": table(
            measured, Column("vLLM", "case"), *both, Column("error", "error", 0, 100, " %")
        ),
    }


def wrong(rows: list[dict[str, Any]], options: Options) -> list[str]:
    """Where a plan by hand is predicted to be better than the planner's."""
    return [
        row["case"]
        for row in rows
        if "chosen" in row and row["chosen"] > min(row[how] for how in BY_HAND) * (1 + 1e-9)
    ]


STUDY = Study(name="tensor_parallel", rows=rows, parts=parts, wrong=wrong)  # type: ignore[arg-type]

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
