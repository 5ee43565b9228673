"""DeepSpeed: which layers are in which pipeline stage."""

from __future__ import annotations

import json
from dataclasses import dataclass

from placement.exporters import Exported
from placement.exporters._modules import Forward, layer_units
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
        path, unit, num_layers = layer_units(forward, self.layers)
        shift = min(u for u in unit if u >= 0)  # a model may begin with a layer
        names = [
            "what runs before the layers",
            *(f"layer {i} of {path!r}" for i in range(num_layers)),
        ]
        labels = [*names, "what runs behind the layers"][shift : max(unit) + 1]
        parts = forward.chain(
            [u - shift if u >= 0 else -1 for u in unit], labels, "PipelineModule", max_turns=1
        )
        found = {"num_stages": len(parts), "parts": [*(p.first for p in parts), len(labels)]}
        return Exported(
            {"": json.dumps(found, indent=1) + "\n"},
            f"parts of a PipelineModule with num_stages={len(parts)}; ranks are "
            f"{', '.join(p.device for p in parts)}",
        )
