"""``Objective``: what a planner minimises, and what that is."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

ObjectiveName = Literal["period", "latency", "energy", "max_load", "piecewise_latency"]  # in files


class Objective(StrEnum):
    """What a planner minimises; equal to its name, so that ``"latency"`` may be written too.

    ``period``: steady-state seconds per micro-batch of the pipelined run. ``latency``: seconds of
    one micro-batch alone. ``energy``: joules per micro-batch of the pipelined run, and what its
    seconds are worth. Without a timeline: ``max_load`` and ``piecewise_latency``, see
    ``placement.simulator.analytic``.
    """

    PERIOD = "period"
    LATENCY = "latency"
    ENERGY = "energy"
    MAX_LOAD = "max_load"
    PIECEWISE_LATENCY = "piecewise_latency"

    @property
    def unit(self) -> Literal["s", "J"]:
        """Of its values; where the name of a value ends in ``_s``, it is joules for ``energy``."""
        return "J" if self is Objective.ENERGY else "s"

    @property
    def is_pipelined(self) -> bool:
        """Whether it is of micro-batches in a pipeline, ``max_in_flight`` at a time."""
        return self in (Objective.PERIOD, Objective.ENERGY)

    @property
    def is_throughput(self) -> bool:
        """Whether it says how often something ends, not how soon."""
        return self.is_pipelined or self is Objective.MAX_LOAD

    @property
    def is_analytic(self) -> bool:
        """Whether it is a formula of the placement: no timeline, no order of events."""
        return self in (Objective.MAX_LOAD, Objective.PIECEWISE_LATENCY)

    @property
    def is_measurable(self) -> bool:
        """Whether a run on devices measures it: ``period`` and ``latency``."""
        return self in (Objective.PERIOD, Objective.LATENCY)
