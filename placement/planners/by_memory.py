"""Layers by memory alone: what tools for serving do today."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from placement.planners.even_layers import layer_units
from placement.problem import Problem, Solution
from placement.search.evaluation import Search, supported_choice

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ByMemory:
    """Consecutive layers, as many on each device as its memory says.

    ``share``: a share of the bytes that is its share of all memory, largest memory first, as
    ``RingMemoryWeightedPartitioningStrategy`` of exo. ``fill``: devices one after another, each
    until it is full, in the cluster's order, as ``infer_auto_device_map`` of accelerate (whose
    order is GPUs first). A device never gets more than it holds; what is then left over is for
    those behind it, and if it is left at the end, the devices are filled instead.

    Attributes:
        way: ``share`` or ``fill``.
    """

    way: Literal["share", "fill"] = "share"

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        unit = layer_units(problem)
        memory = problem.memory_bytes.astype(np.float64)
        by_size = np.argsort(-memory, kind="stable")
        is_host = np.array([d.kind == "cpu" for d in problem.cluster.devices])
        tries = [(by_size, memory), (by_size, None)] if self.way == "share" else []
        tries.append((np.argsort(is_host, kind="stable"), None))
        for order, shares in tries:
            on = split(problem, unit, order, shares)
            search.costs(supported_choice(problem, on[unit]))
            if search.best_s < np.inf:
                break
        return search.solution(num_layers=int(unit.max()) + 1)


def split(
    problem: Problem, unit: NDArray[np.int32], order: NDArray[np.intp], shares: Floats | None
) -> NDArray[np.int32]:
    """int32 ``[U]``: consecutive layers on devices in ``order``, until share or memory is full.

    What does not fit at the end is on the last one.
    """
    graph = problem.graph
    layer_of = unit[graph.group[graph.param_use_op]]
    params = [graph.param_use[layer_of == u] for u in range(int(unit.max()) + 1)]
    sizes = np.array([graph.param_bytes[p].sum() for p in params], np.float64)
    done = np.append(0.0, np.cumsum(sizes)) / max(sizes.sum(), 1.0)
    ends = np.ones(len(order)) if shares is None else np.cumsum(shares[order]) / shares.sum()
    device = np.full(len(params), order[-1], np.int32)
    at, held = 0, np.zeros(len(graph.param_bytes), bool)
    for u, names in enumerate(params):
        while at < len(order) - 1:
            # A layer belongs to the share that its middle is in.
            is_over = (done[u] + done[u + 1]) / 2 >= ends[at]
            held[names] = True
            if not is_over and graph.param_bytes @ held <= problem.memory_bytes[order[at]]:
                break
            at, held = at + 1, np.zeros_like(held)
        device[u] = order[at]
    return device
