"""Which experts are with their layer, and which elsewhere: decided once, by how often."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster
from placement.costs.serving import Serving, peaks, serving_problem
from placement.importers.decoder import Decoder
from placement.importers.routing import hottest, split
from placement.planners.layer_dp import LayerDp
from placement.problem import Placement, Problem


def with_hot_experts(
    decoder: Decoder, cluster: Cluster, serving: Serving
) -> tuple[Decoder, Problem]:
    """The decoder whose layers keep their hot experts, the others apart, and its problem.

    All devices but the one of the slowest memory have room for so many experts, the hottest of
    all layers (``hottest``). Of fewer, ``layer_dp`` keeps some layers whole, which saves the way to
    the other device. Where it finds no faster plan than with all experts of a layer together, the
    decoder is as it was; so it is with one device, with experts that are all alike, and where
    layers are whole.

    Raises:
        ServingError, RatesError: see ``serving_problem``.
    """
    best = decoder, serving_problem(decoder, cluster, serving)
    routed = [part for part in decoder.parts if part.num_experts]
    if serving.whole_layers or cluster.num_devices == 1 or not any(p.shares for p in routed):
        return best
    planner = LayerDp()
    least_s = planner(best[1]).value_s
    slowest = min(peaks(decoder, cluster), key=lambda peak: peak.bytes_per_s)
    at = peaks(decoder, cluster).index(slowest)
    room = sum(d.memory_bytes for i, d in enumerate(cluster.devices) if i != at)
    expert_bytes = sum(part.weight_bytes for part in routed)
    others = int(best[1].graph.param_bytes.sum()) - expert_bytes
    num = sum(part.num_experts for part in routed)
    count = min(num, max(0, (room - others) * num // expert_bytes))
    shares = (1.0, 0.98, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2)  # whole layers do not fill every device
    for tried in sorted({int(count * share) for share in shares} - {0, num}, reverse=True):
        hot = hottest(decoder, tried)
        for _ in range(2):  # and again with the layers whole that it keeps whole
            parted = split(decoder, hot)
            problem = serving_problem(parted, cluster, serving)
            solution = planner(problem)
            if solution.value_s < least_s:
                best, least_s = (parted, problem), solution.value_s
            hot = _rejoined(hot, parted, solution.placement)
    return best


def _rejoined(
    hot: Mapping[int, NDArray[np.bool_]], parted: Decoder, placement: Placement
) -> dict[int, NDArray[np.bool_]]:
    """Layers whose two parts are on one device have hot experts only."""
    on: dict[int, set[int]] = {}
    for part, device in zip(parted.parts, placement.tolist(), strict=True):
        if part.num_experts:
            on.setdefault(part.layer, set()).add(device)
    return {layer: mask | (len(on[layer]) == 1) for layer, mask in hot.items()}
