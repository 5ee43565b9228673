"""What llama.cpp does by default."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.planners.even_layers import layer_units
from placement.problem import Problem, Solution
from placement.search.evaluation import Search, supported_choice


@dataclass(frozen=True)
class LlamaCppSplit:
    """The default split of llama.cpp (``load_tensors`` in ``src/llama-model.cpp``).

    The last layers (``-ngl``) are on the accelerators, in their order, as many on each as its
    share of their memory together; the layers before them on the processor. As users do, the
    most layers are taken that fit. The token embedding is on the processor if there is one.

    Deviation: what runs behind the layers is with the last of them.
    """

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        unit = layer_units(problem)
        count = int(unit.max()) + 1
        is_host = np.array([d.kind == "cpu" for d in problem.cluster.devices])
        hosts, gpus = np.flatnonzero(is_host), np.flatnonzero(~is_host)
        if not len(gpus):
            hosts, gpus = hosts[:0], hosts
        ends = np.cumsum(problem.memory_bytes[gpus].astype(np.float64))
        embeds = np.zeros(problem.graph.num_groups, bool)
        kinds = (kind.removeprefix("aten.").partition(".")[0] for kind in problem.graph.op_kind)
        embeds[problem.graph.group] = [kind == "embedding" for kind in kinds]
        taken = count  # where nothing fits: what is closest to it
        for on_gpus in range(count, -1 if len(hosts) else count - 1, -1):
            layer = np.arange(count) - (count - on_gpus)
            share = np.maximum(layer, 0) / max(on_gpus, 1) * ends[-1]
            device = gpus[np.searchsorted(ends, share, "right").clip(max=len(gpus) - 1)]
            if len(hosts):
                device = np.where(layer < 0, hosts[0], device)
            choice = supported_choice(problem, device[unit])
            if len(hosts):
                choice[embeds & np.isfinite(problem.group_compute_s[:, hosts[0]])] = hosts[0]
            before = search.best_cost
            if search.cost(choice) < before:
                taken = on_gpus
            if search.best_s < np.inf:
                break
        return search.solution(layers_on_accelerators=taken)
