"""vLLM: how many layers each pipeline rank has."""

from __future__ import annotations

from dataclasses import dataclass

from placement.exporters import Exported
from placement.exporters._modules import Forward, decoder_units, gpu_number, members_of
from placement.plan import Plan
from placement.problem import Problem


@dataclass(frozen=True)
class Vllm:
    """Environment file with ``VLLM_PP_LAYER_PARTITION``, layers per pipeline rank.

    Format: ``get_pp_indices`` in ``vllm/distributed/utils.py`` (vllm-project/vllm#6920): integers
    joined by commas, as many as ``--pipeline-parallel-size``, whose sum is the number of layers.
    The embedding is on the first rank, the final normalisation and the head on the last. GPUs
    called ``cuda:N`` are put in the order of the ranks with ``CUDA_VISIBLE_DEVICES``. The last
    rank makes an embedding of its own for a tied head (``vllm/model_executor/models/llama.py``).
    A group of devices is one pipeline rank: ``--tensor-parallel-size``, its members neighbours
    (``initialize_model_parallel`` in ``vllm/distributed/parallel_state.py``).

    Attributes:
        layers: path of the list of layers; None finds it.
    """

    layers: str | None = None

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        forward = Forward.of(plan, problem, groups=True)
        path, unit, num_layers = decoder_units(forward, self.layers, "vLLM")
        tied = forward.tied(unit)
        unit = [u if u < 0 else min(max(u, 1), num_layers) - 1 for u in unit]
        labels = [f"layer {i} of {path!r}" for i in range(num_layers)]
        labels[0] += " and what runs before it"
        labels[-1] += " and what runs behind it"
        parts = forward.chain(unit, labels, "VLLM_PP_LAYER_PARTITION", max_turns=1)
        lines = [f"# rank {i}: {part.device}" for i, part in enumerate(parts)]
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        groups = members_of(plan, parts, "vLLM")
        gpus = [
            gpu_number(name) if kinds[part.device] == "cuda" else None
            for part, members in zip(parts, groups, strict=True)
            for name in members
        ]
        if None not in gpus:
            lines.append(f"CUDA_VISIBLE_DEVICES={','.join(map(str, gpus))}")
        layers = ",".join(str(part.last - part.first + 1) for part in parts)
        lines.append(f"VLLM_PP_LAYER_PARTITION={layers}")
        return Exported(
            {"": "\n".join(lines) + "\n"},
            "env $(grep -v '#' FILE) vllm serve MODEL "
            + f"--tensor-parallel-size {len(groups[0])} " * (len(groups[0]) > 1)
            + f"--pipeline-parallel-size {len(parts)}"
            + "; the last rank has a copy of the tied embedding" * (tied and len(parts) > 1),
        )
