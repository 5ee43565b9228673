"""Schedulers: one file per method, ``scheduler(problem, placement, num_microbatches)``.

A scheduler is a frozen dataclass whose fields are its parameters; ``one_f_one_b`` lives in
``one_f_one_b.py`` as the class ``OneFOneB``. ``load`` finds it by the name of the file, or finds
yours by ``package.module:Class``; nothing is registered anywhere.
"""

from __future__ import annotations

from typing import Protocol

from placement.problem import Placement, Problem
from placement.schedule import Schedule
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


_SCHEDULERS: Named[Scheduler] = Named(__name__, "scheduler", SchedulerError)
#: Those of this package by name; and the one of a name, with options.
names, load = _SCHEDULERS.names, _SCHEDULERS.load
