"""The same number of layers for every device."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.problem import Problem, Solution
from placement.search.evaluation import Search, supported_choice

_LAYER = re.compile(r"(?:.*?\.)??[0-9]+(?=\.|$)")


@dataclass(frozen=True)
class EvenLayers:
    """Consecutive layers, the same number on each device in the cluster's order.

    What vLLM and Megatron-LM do unless told otherwise; what runs before and behind the layers is
    with the first and the last. Deviation: where it does not come out even the first devices get
    one more; with vLLM these are the last ones but the very last, and Megatron-LM refuses it.
    Memory is not looked at: where it does not fit, that is the answer.
    """

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        unit = layer_units(problem)
        count = int(unit.max()) + 1
        bounds = np.ceil(np.arange(1, problem.num_devices) * count / problem.num_devices)
        device = np.searchsorted(bounds, np.arange(count), "right")
        search.costs(supported_choice(problem, device[unit]))
        return search.solution(num_layers=count)


def layer_units(problem: Problem) -> NDArray[np.int32]:
    """int32 ``[G]``: the layer of each colocation group, 0, 1, ..., never less than the one before.

    A layer is the item of a list that an operator's module is in, the outermost one
    (``model.layers.3`` of ``model.layers.3.mlp``). Groups of no layer are with the one before, at
    the beginning with the first; without layers every group is one.
    """
    graph = problem.graph
    # The first operator of a group that is in a layer: a group may begin with the embedding.
    names: list[str | None] = [None] * graph.num_groups
    for g, module in zip(graph.group.tolist(), graph.op_module, strict=True):
        if names[g] is None and (match := _LAYER.match(module)):
            names[g] = match[0]
    if not any(names):
        return np.arange(graph.num_groups, dtype=np.int32)
    unit = np.zeros(graph.num_groups, np.int32)
    at, last = -1, None
    for g, name in enumerate(names):
        if name is not None and name != last:
            at, last = at + 1, name
        unit[g] = max(at, 0)
    return unit
