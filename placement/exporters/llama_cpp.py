"""llama.cpp: the buffer type of each tensor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from placement.exporters import Exported, ExportError
from placement.exporters._modules import Forward, gpu_number, is_numbered, layer_units
from placement.plan import Plan
from placement.problem import Problem


@dataclass(frozen=True)
class LlamaCpp:
    r"""Argument of ``-ot`` (``--override-tensor``): ``blk\.(0|1)\.=CUDA0,blk\.2\.=CPU,...``.

    Format: ``parse_tensor_buffer_overrides`` in ``common/arg.cpp`` (ggml-org/llama.cpp#11397):
    ``<regex>=<buffer type>`` joined by commas, the first match wins. Names of tensors are those
    of GGUF (``gguf-py/gguf/constants.py``): ``token_embd``, ``blk.N.``, ``output``. Every layer
    is whole; what is neither before nor in the layers is ``output``.

    Attributes:
        layers: path of the list of layers; None finds it.
    """

    layers: str | None = None

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        used = set(plan.assignment.values())
        for name in sorted(used):
            if not is_numbered(name, kinds[name]):
                raise ExportError(
                    f"no buffer type of llama.cpp is known for {name[:60]!r}: devices are CPU "
                    "cores (kind cpu) or GPUs (kind cuda) called cuda:0, cuda:1, ..."
                )
        forward = Forward.of(plan, problem)
        _, unit, num_layers = layer_units(forward, self.layers)
        unit = forward.joined(unit)
        host = sorted(name for name in used if kinds[name] == "cpu")
        count: list[Counter[str]] = [Counter() for _ in range(num_layers + 2)]
        for u, name in zip(unit, forward.device, strict=True):
            count[u][host[0] if name in host else name] += 1
        on = [found.most_common(1)[0][0] if found else None for found in count]
        whole = [on[u] or "" for u in unit]
        if whole != list(forward.device):
            found = {u: d for u, d in enumerate(on) if d}
            whole = forward.nearest(unit, found, used - set(host[1:]))
        forward.require(whole, "-ot", "a layer is whole, and llama.cpp has one CPU device")
        rules: dict[str, list[int]] = {}
        for u, device in enumerate(on):
            if device is not None:
                buffer = "CPU" if device in host else f"CUDA{gpu_number(device)}"
                rules.setdefault(buffer, []).append(u)
        text = []
        for buffer, units in rules.items():
            numbers = [str(u - 1) for u in units if 1 <= u <= num_layers]
            if numbers:
                text.append(rf"^blk\.({'|'.join(numbers)})\.={buffer}")
            if 0 in units:
                text.append(f"^token_embd={buffer}")
            if num_layers + 1 in units:
                text.append(f"^output={buffer}")
        return Exported({"": ",".join(text) + "\n"}, f'-ngl {num_layers + 1} -ot "$(cat FILE)"')
