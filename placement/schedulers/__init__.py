"""Schedulers: one file per method, ``scheduler(problem, placement, num_microbatches)``.

A scheduler is a frozen dataclass whose fields are its parameters; ``one_f_one_b`` lives in
``one_f_one_b.py`` as the class ``OneFOneB``. ``load`` finds it by the name of the file, or finds
yours by ``package.module:Class``; nothing is registered anywhere.
"""

from __future__ import annotations

from typing import Protocol

from placement.problem import Placement, Problem
from placement.schedule import Schedule, ScheduleError
from placement.tools.named import Named


class SchedulerError(ValueError):
    """No such scheduler, or one that cannot order this placement; the message says why."""


class Scheduler(Protocol):
    """Orders the work of ``placement`` int32 ``[N]`` for so many micro-batches.

    One of ``[K, N]``, in which they take turns, is refused by those that order stages.
    """

    def __call__(
        self, problem: Problem, placement: Placement, num_microbatches: int
    ) -> Schedule: ...


def check_one_phase(placement: Placement) -> None:
    """Raises: SchedulerError, micro-batches take turns: they go through no stages in common."""
    if placement.ndim > 1:
        raise SchedulerError(
            f"the placement has {len(placement)} phases, in which micro-batches take turns; stages "
            "are ordered in one: use --scheduler list_order, or --max-phases 1"
        )


def without_deadlock(problem: Problem, placement: Placement, schedule: Schedule) -> Schedule:
    """The schedule, whose maker did not ask which buffers one micro-batch changes for the next.

    Raises: SchedulerError, an operator would wait for a buffer that is changed after it.
    """
    if problem.graph.carried:
        try:
            schedule.check(problem.graph, problem.cluster, placement)
        except ScheduleError as error:
            raise SchedulerError(
                "the order does not go with the buffers that each micro-batch changes for the next "
                f"({error}); leave the scheduler out, or run one micro-batch at a time: "
                "--scheduler list_order --in-flight 1"
            ) from error
    return schedule


_SCHEDULERS: Named[Scheduler] = Named(__name__, "scheduler", SchedulerError)
#: Those of this package by name; and the one of a name, with options.
names, load = _SCHEDULERS.names, _SCHEDULERS.load
