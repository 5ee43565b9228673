"""Predict earliest finish time: HEFT that looks ahead through an optimistic cost table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.graph import topological_order
from placement.planners import Among
from placement.problem import Problem, Solution
from placement.search.evaluation import Search
from placement.search.list_schedule import schedule_that_fits


@dataclass(frozen=True)
class Peft:
    """PEFT (Arabnejad, Barbosa, IEEE TPDS 25(3), 2014).

    ``OCT[n, d]`` is the longest remaining path after operator ``n`` on device ``d`` if every
    later operator could choose its device freely. Ready operators are taken by falling mean
    of their row; each goes to the device of least finish plus ``OCT``, in the earliest gap
    that is long enough. ``stats["makespan_s"]`` is the length of PEFT's own schedule.

    Deviations: those of ``Heft`` (colocation, support, memory); where the simulator finds
    that activations do not fit, they are counted and the schedule is made again.
    """

    among = Among(quick=True, calls=3)

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        table = optimistic_cost(problem)
        mean = np.where(problem.supported, table, 0.0).sum(axis=1) / problem.supported.sum(axis=1)
        order = topological_order(problem.graph.edges, problem.num_ops, -mean)
        filled = schedule_that_fits(search, lambda schedule: schedule.place(order, table))
        return search.solution(makespan_s=filled.makespan_s)


def optimistic_cost(problem: Problem) -> NDArray[np.float64]:
    """float64 ``[N, D]``: OCT, with mean transfers; 0 for operators that nothing follows."""
    g = problem.graph
    table = np.zeros((problem.num_ops, problem.num_devices))
    seconds = np.where(problem.supported, problem.compute_s, np.inf)
    for n in range(problem.num_ops - 1, -1, -1):
        for t in g.out_tensor[g.out_ptr[n] : g.out_ptr[n + 1]]:
            for user in g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]]:
                stay = table[user] + seconds[user]  # [D] the consumer on the same device
                best = np.minimum(stay, stay.min() + problem.mean_transfer_s[t])
                table[n] = np.maximum(table[n], best)
    return table
