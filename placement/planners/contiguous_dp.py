"""Contiguous stages by dynamic programming, on devices in any order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from placement.planners import Among, check_least
from placement.problem import Problem, Solution
from placement.search.evaluation import Search
from placement.search.stages import merge_blocks, score_splits, topological_orders


@dataclass(frozen=True)
class ContiguousDp:
    """Cuts the operators, in one order or several, into D stages or less; the slowest is least.

    The dynamic program over (devices used, operators placed) in the manner of the linearised
    program of Tarnawski et al. (NeurIPS 2020), for unlike devices: every subset and every
    order of the devices is considered, devices that may be swapped count as one. The cost of
    a stage is the larger of

    * compute (``loaded_s`` in a pipeline) plus the blocking sends of its outputs, and
    * the transfers of its inputs, as if they came over one channel,

    where a transfer takes the mean over the other devices: exact where links are alike. Each
    tensor is received once per stage; a blocking send is charged once per tensor, although
    it is repeated for each further stage. Then the best split for each set of devices is
    simulated and the best of those is the answer. For the latency those are added whose sum of
    transfers and compute is least: exact for a chain on alike links, an upper bound for others.

    A colocation group is placed whole, at its first operator. Memory: parameters must fit;
    where the simulator finds that activations do not, they are counted too and the program
    runs again.

    Attributes:
        max_blocks: groups are merged into this many blocks of about equal seconds first; the
            program is exact up to there (``stats["num_blocks"]``, ``stats["num_groups"]``).
        orders: topological orders that are cut, one after another: that of the operators' numbers
            first, then drawn ones (``topological_orders``). The cheapest splits of all orders, by
            the program's own arithmetic, are simulated: with one evaluation the cheapest.
        seed: of the orders that are drawn.
        max_states: with more sets of devices than this, devices are used in one order, by
            total seconds, fastest first (``stats["all_orders"]`` is False then).
        candidates: simulate the splits of at most so many sets of devices, of all orders together.
        seconds, evaluations: budget of the simulations; None is no limit.
    """

    among = Among(loads=8, pieces=2, share=0.5, several=True)

    max_blocks: int = 400
    orders: int = 1
    seed: int = 0
    max_states: int = 512
    candidates: int = 32
    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "max_blocks", "orders", "max_states", "candidates")
        check_least(self, 0, "seed")

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem, self.seconds, self.evaluations)
        orders = topological_orders(problem, self.orders - 1, self.seed)
        blocks = (merge_blocks(problem, self.max_blocks, x) for x in chain([None], orders))
        each = -(-self.candidates // self.orders)
        stats = score_splits(search, blocks, self.max_states, each, self.candidates)
        if search.best is None:  # every device refuses operators in the middle: no split at all
            search.costs(np.argmin(problem.group_compute_s, axis=1))
        return search.solution(**stats, num_groups=problem.graph.num_groups)
