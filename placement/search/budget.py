"""``Budget``: what a planner may spend."""

from __future__ import annotations

from dataclasses import dataclass

from placement.planners import PlannerError


@dataclass(frozen=True)
class Budget:
    """At most so many seconds, and so many evaluated placements; None is no limit.

    Raises:
        PlannerError: one of them is not positive.
    """

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        for what in ("seconds", "evaluations"):
            limit = getattr(self, what)
            if limit is not None and not limit > 0:
                raise PlannerError(f"{what} = {limit} must be positive; leave it out for no limit")


NO_LIMIT = Budget()
