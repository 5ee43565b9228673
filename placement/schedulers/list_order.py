"""The list scheduler's order, made explicit."""

from __future__ import annotations

from dataclasses import dataclass

from placement.problem import Placement, Problem
from placement.schedule import Schedule
from placement.schedulers import without_deadlock
from placement.simulator import list_schedule


@dataclass(frozen=True)
class ListOrder:
    """A free device takes what has arrived: the oldest micro-batch, then the longest way to go.

    This is what the simulator and the executor do without a schedule, with at most
    ``problem.max_in_flight`` micro-batches at a time. Two devices, forward (1) and backward (2)
    of 4 micro-batches, 2 in flight; letters are micro-batches, capitals backward:

        device 0  a b . A A B B c d . C C D D
        device 1  . a A A b B B . c C C d D D
    """

    def __call__(self, problem: Problem, placement: Placement, num_microbatches: int) -> Schedule:
        """Raises: SchedulerError, micro-batches would wait for buffers that later ones change."""
        order = list_schedule(problem, placement, num_microbatches)
        return without_deadlock(problem, placement, order)
