"""DeepSpeed: which layers are in which pipeline stage."""

from __future__ import annotations

import json
from dataclasses import dataclass

from placement.exporters import Exported
from placement.exporters._modules import Forward, layer_chain
from placement.plan import Plan
from placement.problem import Problem


@dataclass(frozen=True)
class Deepspeed:
    """JSON with ``parts``, the boundaries of ``PipelineModule``'s stages, and ``num_stages``.

    Format: ``PipelineModule._partition_layers`` in ``deepspeed/runtime/pipe/module.py``: stage
    ``i`` has ``layers[parts[i]:parts[i + 1]]``. The list of ``layers`` is the embedding, the
    repeated layers, and final normalisation and head as one. ``partition_method`` cannot say
    parts of one's own (deepspeedai/DeepSpeed#2974); a subclass can, whose ``_partition_layers``
    gives ``self.parts`` and calls ``self._set_bounds(self.parts[i], self.parts[i + 1])``.

    Attributes:
        layers: path of the list of layers; None finds it.
    """

    layers: str | None = None

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        forward = Forward.of(plan, problem)
        parts, units, _ = layer_chain(forward, self.layers, "PipelineModule", max_turns=1)
        parted = {"num_stages": len(parts), "parts": [*(p.first for p in parts), len(units)]}
        return Exported(
            {"": json.dumps(parted, indent=1) + "\n"},
            f"parts of a PipelineModule with num_stages={len(parts)}; ranks are "
            f"{', '.join(p.device for p in parts)}",
        )
