"""PipeDream's planner: stages of a line of operators, transfers being stages of their own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.planners import Among, check_least
from placement.problem import Problem, Solution
from placement.search.evaluation import Choice, Search, supported_choice
from placement.search.list_schedule import first_that_fits
from placement.search.stages import (
    StageCosts,
    Stages,
    cut_in_order,
    made_and_used,
    merge_blocks,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Pipedream:
    """The planner of PipeDream (Narayanan et al., SOSP 2019), without replication.

    The operators in their order are cut into stages; ``A(j, d)``, the slowest of stages and
    transfers up to operator ``j`` with devices ``0..d``, is the least over the last cut ``i`` of
    ``max(A(i, d - 1), transfer over i, seconds of i..j on d)``. ``stats["bottleneck_s"]`` is
    the optimum, in which compute and transfers overlap.

    Deviations: no replication of stages (a device holds one model part here); the devices have
    their own seconds and are used in the cluster's order, any of them may be left out; the
    transfer over a cut is that of every tensor which crosses it, at the receiver's mean
    seconds; a colocation group is placed whole, at its first operator.

    Attributes:
        max_blocks: groups are merged into this many blocks of about equal seconds first.
    """

    among = Among(quick=True, loads=6)

    max_blocks: int = 400

    def __post_init__(self) -> None:
        check_least(self, 1, "max_blocks")

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        block = merge_blocks(problem, self.max_blocks)
        costs = Stages(problem).costs(block)
        transfer = crossing_s(problem, block)

        def plan(activations: int) -> tuple[Choice, float]:
            bottleneck_s, device = _stages(costs, transfer, activations)
            if np.isinf(bottleneck_s):  # no split has room: the least bad one, without limits
                device = _stages(costs, transfer, None)[1]
            return supported_choice(problem, device[block]), bottleneck_s

        bottleneck_s = first_that_fits(search, plan)
        return search.solution(bottleneck_s=bottleneck_s, num_blocks=int(block.max()) + 1)


def crossing_s(problem: Problem, block: Ints) -> Floats:
    """float64 ``[D, C + 1]``: to send ``D`` whatever crosses the cut before each block."""
    size = int(block.max()) + 2
    tensor, at = made_and_used(problem.graph, block[problem.graph.group])
    first, last = np.full(problem.graph.num_tensors, size), np.full(problem.graph.num_tensors, -1)
    np.minimum.at(first, tensor, at)
    np.maximum.at(last, tensor, at)
    produced = np.flatnonzero(problem.graph.tensor_src >= 0)
    total = np.zeros((problem.num_devices, size))
    for d in range(problem.num_devices):
        np.add.at(total[d], first[produced] + 1, problem.io_s[produced, d])
        np.add.at(total[d], last[produced] + 1, -problem.io_s[produced, d])
    return np.maximum(total.cumsum(axis=1), 0.0)


def _stages(costs: StageCosts, transfer: Floats, activations: int | None) -> tuple[float, Ints]:
    """The slowest stage or transfer, and int32 ``[C]`` the device of each block, -1 without one."""
    num_devices, size = transfer.shape
    seconds = costs.compute.copy()
    if activations is not None:
        need = costs.param_bytes + activations * costs.activation_bytes
        seconds[need > costs.memory_bytes[:, None, None]] = np.inf

    def stage_s(d: int) -> Floats:
        return np.maximum(transfer[d][:, None], seconds[costs.kind[d]])

    device = np.full(size - 1, -1, np.int32)
    slowest_s, stages = cut_in_order(stage_s, size, range(num_devices))
    for d, begin, end in stages:
        device[begin:end] = d
    return slowest_s, device
