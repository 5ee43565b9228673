"""KTransformers: how many experts of each layer the GPU has."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Any

from placement.exporters import Exported, ExportError, Inexpressible
from placement.exporters._modules import Forward
from placement.plan import Plan
from placement.problem import Problem


@dataclass(frozen=True)
class Ktransformers:
    """Options of ``python -m sglang.launch_server``: ``--kt-num-gpu-experts`` and the strategy.

    Format: options of the command line.
    ``--kt-num-gpu-experts`` is times the number of layers with experts; where that leaves some
    over, ``--kt-gpu-experts-ratio`` is the share of all. The experts are the most
    frequent of all layers (``frequency``, of a plan with ``--experts``), or those of the first
    layers (``front-loading``): ``doc/en/kt-kernel/experts-sched-Tutorial.md`` and
    ``generate_gpu_experts_masks`` in ``kt-kernel/python/experts_base.py``
    (kvcache-ai/ktransformers@95009ea). Everything else is on one GPU.
    """

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        forward = Forward.of(plan, problem)
        experts: Any = plan.provenance.profile.get("num_experts")
        are_counts = isinstance(experts, list) and {*map(type, experts)} == {int}
        if not are_counts or len(experts) != len(forward.name) or not any(experts):
            raise ExportError(
                "KTransformers places experts: plan the config.json or GGUF file of a model that "
                "has some"
            )
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        pairs = list(zip(forward.name, forward.device, experts, strict=True))
        gpus = sorted({d for _, d, _ in pairs if kinds[d] != "cpu"})
        if len(gpus) != 1:
            raise ExportError(
                f"the plan uses {len(gpus)} GPUs: KTransformers cuts every layer over all of them "
                "(--tensor-parallel-size); plan for a cluster of one GPU and the processor"
            )
        # The embedding may be where the plan has it or not: its rows are a few bytes.
        astray = [name for name, d, num in pairs[1:] if not num and kinds[d] == "cpu"]
        if astray:
            raise Inexpressible(
                f"KTransformers leaves experts alone to the processor; operator {astray[0]!r}, and "
                f"{len(astray) - 1} more, are planned there. --nearest exports the nearest plan it "
                "can express",
                {name: d if num else gpus[0] for name, d, num in pairs},
            )
        layers = len({name.partition("#")[0] for name, _, num in pairs if num})
        there = sum(num for _, d, num in pairs if d == gpus[0])
        counted = any("#" in name for name, _, _ in pairs)
        words = f"--kt-num-gpu-experts {there // layers} "
        if there % layers:  # the share of all experts, which then counts
            words += f"--kt-gpu-experts-ratio {floor(there / sum(experts) * 1e4) / 1e4:g} "
        words += "--kt-expert-placement-strategy "
        words += "frequency" if counted else "front-loading"
        note = (
            "python -m sglang.launch_server --model MODEL $(cat FILE) --kt-weight-path WEIGHTS "
            "--kt-method METHOD --kt-cpuinfer CORES"
        )
        if counted:
            note += " --init-expert-location STATISTICS.pt, the counts as the server records them"
        return Exported({"": words + "\n"}, note)
