"""DeepSpeed: which layers are in which pipeline stage."""

from __future__ import annotations

import json
from dataclasses import dataclass

from placement.exporters import Exported
from placement.exporters._modules import Forward, layer_chain, layer_units
from placement.plan import Plan
from placement.problem import Problem
from placement.tools.files import some


@dataclass(frozen=True)
class Deepspeed:
    """JSON with ``parts``, the boundaries of ``PipelineModule``'s stages; also what layers are.

    Format: ``PipelineModule._partition_layers`` in ``deepspeed/runtime/pipe/module.py``: stage
    ``i`` has ``layers[parts[i]:parts[i + 1]]``. ``layers`` names them: all before the repeated
    layers is one, each of those, and all behind them is one. Those that share a parameter
    (``tied``) have to be ``TiedLayerSpec`` with one key: each of their stages then has a copy, and
    ``allreduce_tied_weight_gradients`` adds the gradients up. ``partition_method`` cannot say
    parts of one's own (deepspeedai/DeepSpeed#2974); a subclass can, whose ``_partition_layers``
    gives ``self.parts`` and calls ``self._set_bounds(self.parts[i], self.parts[i + 1])``.

    Attributes:
        layers: path of the list of layers; None finds it.
    """

    layers: str | None = None

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        forward = Forward.of(plan, problem)
        path, unit, num_layers = layers = layer_units(forward, self.layers)
        parts, units = layer_chain(forward, layers, "PipelineModule", max_turns=1)
        inside = [f"{path}.{i}".lstrip(".") for i in range(num_layers)]
        names = [f"before {inside[0]}", *inside, f"behind {inside[-1]}"]
        parted: dict[str, object] = {
            "num_stages": len(parts),
            "parts": [*(p.first for p in parts), len(units)],
            "layers": names[units.start : units.stop],
        }
        note = (
            f"parts of a PipelineModule with num_stages={len(parts)}, whose layers are those that "
            f"the file names; ranks are {', '.join(p.device for p in parts)}"
        )
        if tied := forward.shared(unit):
            parted["tied"] = {name: [u - units.start for u in us] for name, us in tied.items()}
            note += f"; layers that share {some(list(tied))} are TiedLayerSpec with one key"
        return Exported({"": json.dumps(parted, indent=1) + "\n"}, note)
