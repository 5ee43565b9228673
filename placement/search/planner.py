"""How planners are found by name, asked, refused, and what they may spend.

The methods are in ``placement.planners``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

from placement.problem import Planner, Problem, Solution
from placement.tools.named import Named


class PlannerError(ValueError):
    """No such planner, no such option (the message lists those it has), or too much to plan."""


@dataclass(frozen=True)
class Among:
    """How a planner behaves among others: what its class says of it as ``among``, for ``best_of``.

    Attributes:
        loads, calls, pieces: its turn where the load of devices counts, where one micro-batch
            does, and for ``piecewise_latency`` (else as for calls); None: after those with one.
        quick: it is linear in the graph: where seconds are limited it comes first.
        late: it takes long whatever it is given: where seconds are limited it comes last.
        times: it is begun only where so many times is left what the slowest quick one took.
        turns: it takes part only where micro-batches may take turns, and that helps.
        walks: it walks on as long as it may.
        several: it evaluates several placements: of few evaluations others come first.
        share: of what is left of limited evaluations.
    """

    loads: int | None = None
    calls: int | None = None
    pieces: int | None = None
    quick: bool = False
    late: bool = False
    times: float = 0.0
    turns: bool = False
    walks: bool = False
    several: bool = False
    share: float = 1.0


_PLANNERS: Named[Planner] = Named(
    "placement.planners",
    "planner",
    PlannerError,
    elsewhere={"policy": "agents.planner:PolicyPlanner"},
)
#: All by name; the one of a name, with options; its class; and where that is.
names, load, find, where = _PLANNERS.names, _PLANNERS.load, _PLANNERS.find, _PLANNERS.where


def solve(planner: Planner, problem: Problem) -> Solution:
    """What the planner answers.

    Raises:
        PlannerError: it is no ``Solution``, or there is not enough memory for the planner.
    """
    name = getattr(planner, "__name__", None) or _name(planner)
    try:
        solution: Any = planner(problem)
    except MemoryError as error:
        raise PlannerError(
            f"planner {name}: not enough memory for {problem.num_ops} operators in "
            f"{problem.graph.num_groups} groups on {problem.num_devices} devices "
            f"({error}): use another planner, as heft, or a machine with more memory"
        ) from error
    if not isinstance(solution, Solution):
        raise PlannerError(
            f"planner {name} returned a {type(solution).__name__}, not a "
            "placement.Solution(placement, value_s)"
        )
    return solution


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


def check_least(planner: Any, least: int, *options: str) -> None:
    """Raises: PlannerError, one of these options is below ``least``, or nan; None is fine."""
    for name in options:
        value = getattr(planner, name)
        if value is not None and not value >= least:
            raise PlannerError(f"{_name(planner)}: {name} = {value} must be at least {least}")


def check_shares(planner: Any, *options: str) -> None:
    """Raises: PlannerError, one of these options is outside 0..1, or nan."""
    for name in options:
        value = getattr(planner, name)
        if not 0.0 <= value <= 1.0:
            raise PlannerError(f"{_name(planner)}: {name} = {value} must be within 0..1")


def _name(planner: Any) -> str:
    return type(planner).__module__.rpartition(".")[2]
