"""vLLM: how many layers each pipeline rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from placement.exporters import Exported, moved
from placement.exporters._modules import Forward, decoder_units, gpu_number, members_of
from placement.plan import Plan
from placement.problem import Problem

# Segments of names of parameters, by what is left to the processor.
_SEGMENTS = {"experts": "experts", "feed_forward": "mlp"}


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

    Where a language model's plan has GPUs and leaves weights of layers to the processor, so many
    are offloaded (``.args``): ``--cpu-offload-gb``, GiB of each rank, and where these are experts
    or feed-forwards alone ``--cpu-offload-params``, whole segments of names
    (``vllm/config/offload.py``, ``vllm/model_executor/offloader/uva.py``). The first layers of a
    rank are offloaded first. The GPU reads them over its link; no processor computes.

    Attributes:
        layers: path of the list of layers; None finds it.
    """

    layers: str | None = None

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        forward = Forward.of(plan, problem, groups=True)
        path, unit, num_layers = decoder_units(forward, self.layers, "vLLM")
        tied = forward.tied(unit)
        layers_of = list(unit)
        unit = [u if u < 0 else min(max(u, 1), num_layers) - 1 for u in unit]
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        left = [i for i, d in enumerate(forward.device) if kinds[d] == "cpu"]
        sizes: Any = plan.provenance.profile.get("weights_bytes")
        if offloads := _are_sizes(sizes, len(unit)) and 0 < len(left) < len(unit):
            on = dict(zip(forward.name, _gpus(forward.device, left), strict=True))
            forward = Forward.of(moved(plan, on), problem, groups=True)
            left = [
                i for i in left if 1 <= layers_of[i] <= num_layers
            ]  # layers alone are offloaded
        labels = [f"layer {i} of {path!r}" for i in range(num_layers)]
        labels[0] += " and what runs before it"
        labels[-1] += " and what runs behind it"
        parts = forward.chain(unit, labels, "VLLM_PP_LAYER_PARTITION", max_turns=1)
        lines = [f"# rank {i}: {part.device}" for i, part in enumerate(parts)]
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
        files = {"": "\n".join(lines) + "\n"}
        options = f"--tensor-parallel-size {len(groups[0])} " * (len(groups[0]) > 1)
        options += f"--pipeline-parallel-size {len(parts)}"
        note = f"env $(grep -v '#' FILE) vllm serve MODEL {options}"
        if offloads and left:
            ranks = [range(part.first, part.last + 1) for part in parts]
            most = max(sum(sizes[i] for i in left if unit[i] in rank) for rank in ranks)
            most /= len(groups[0])  # vLLM asks what each GPU offloads
            options += f" --cpu-offload-gb {ceil(most / 2**30 * 100) / 100:g}"
            last = {forward.name[i].rpartition(".")[2].partition("#")[0] for i in left}
            if len(last) == 1 and (word := last.pop()) in _SEGMENTS:
                options += f" --cpu-offload-params {_SEGMENTS[word]}"
            files[".args"] = options + "\n"
            note = (
                "env $(grep -v '#' FILE) vllm serve MODEL $(cat FILE.args); the GPU reads what is "
                "offloaded over its link, where the plan has the processor compute: seconds are "
                "those of another program"
            )
        note += "; the last rank has a copy of the tied embedding" * (tied and len(parts) > 1)
        return Exported(files, note, _bench(plan, [x for x in lines if x[0] != "#"], options))


def _are_sizes(sizes: Any, count: int) -> bool:
    """Whether what a plan's file says are so many numbers of bytes."""
    return isinstance(sizes, list) and [*map(type, sizes)] == [int] * count


def _gpus(devices: Sequence[str], left: Sequence[int]) -> tuple[str, ...]:
    """The device of each operator, of those that are left to the processor the GPU's before."""
    on = list(devices)
    first = next(d for i, d in enumerate(on) if i not in set(left))
    for i in left:
        on[i] = on[i - 1] if i else first
    return tuple(on)


def _bench(plan: Plan, environment: Sequence[str], options: str) -> str:
    """What measures the plan: ``vllm/benchmarks/latency.py``."""
    asked = plan.provenance.profile
    context, batch, prompt = (asked.get(name) for name in ("context", "batch", "prompt"))
    if not (isinstance(context, int) and isinstance(batch, int) and isinstance(prompt, int)):
        return ""
    prompt = min(prompt, context - 1)
    answer = 1 if asked.get("objective") == "prefill" else context - prompt
    return (
        f"{' '.join(environment)} vllm bench latency --model MODEL {options} --input-len {prompt} "
        f"--output-len {answer} --batch-size {batch} --max-model-len {context}"
    )
