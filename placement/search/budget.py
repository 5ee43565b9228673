"""``Budget``: what a planner may spend, and the planner that may spend so much."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from placement.problem import Planner
from placement.search.planner import PlannerError


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


def options_of(planner: Any) -> set[str]:
    """Names of what can be set of a planner, or of its class."""
    return {f.name for f in fields(planner) if f.init} if is_dataclass(planner) else set()


def prepared(planner: Planner, seed: int | None = None, budget: Budget = NO_LIMIT) -> Planner:
    """The planner with this seed and this budget, where it has such fields."""
    options, own = {"seed": seed, **asdict(budget)}, options_of(planner)
    values = {k: v for k, v in options.items() if v is not None and k in own}
    return replace(planner, **values) if values else planner  # type: ignore[type-var]
