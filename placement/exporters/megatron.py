"""Megatron-LM: which layers are in which pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass

from placement.exporters import Exported
from placement.exporters._modules import Forward, decoder_units, layer_chain, members_of
from placement.plan import Plan
from placement.problem import Problem


@dataclass(frozen=True)
class Megatron:
    """Value of ``--pipeline-model-parallel-layout``, e.g. ``Et*2|t*3|t*3L``.

    Format: ``PipelineParallelLayerLayout.parse_str_to_list`` in
    ``megatron/core/transformer/pipeline_parallel_layer_layout.py``: ``E`` embedding, ``t``
    transformer layer, ``L`` final normalisation, head and loss; ``x*n`` repeats; ``|`` ends a
    stage. Stage ``i`` is on pipeline rank ``i`` modulo the number of ranks, so devices may take
    several turns (virtual stages) if they keep their order. Unless told otherwise, the head is tied
    to the embedding: the last stage has a copy, and the gradients of both are added up
    (``megatron/core/models/common/language_module/language_module.py``). A group of devices is one
    pipeline rank, ``--tensor-model-parallel-size`` neighbouring ranks of the world
    (``RankGenerator`` in ``megatron/core/parallel_state.py``).

    Attributes:
        layers: path of the list of layers; None finds it.
    """

    layers: str | None = None

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        forward = Forward.of(plan, problem, groups=True)
        consumer = "the layout of Megatron-LM"
        layers = _, unit, num_layers = decoder_units(forward, self.layers, "Megatron-LM")
        parts, units = layer_chain(forward, layers, consumer)
        stages = []
        for i, part in enumerate(parts):
            count = sum(1 <= u <= num_layers for u in units[part.first : part.last + 1])
            middle = "" if count == 0 else "t" if count == 1 else f"t*{count}"
            begins, ends = "E" if i == 0 else "", "L" if i == len(parts) - 1 else ""
            stages.append(begins + middle + ends)
        ranks = list(dict.fromkeys(part.device for part in parts))
        ways = len(members_of(plan, parts, "Megatron-LM")[0])
        untied = forward.parameters and not forward.tied(unit)
        return Exported(
            {"": "|".join(stages) + "\n"},
            f"--tensor-model-parallel-size {ways} "
            * (ways > 1)
            + f"--pipeline-model-parallel-size {len(ranks)} "
            f'--pipeline-model-parallel-layout "$(cat FILE)"'
            f"{' --untie-embeddings-and-output-weights' if untied else ''}; ranks are "
            f"{', '.join(ranks)}"
            + "; the last stage has a copy of the tied embedding"
            * forward.tied(unit),
        )
