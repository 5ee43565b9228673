"""Planners: one file per method, ``planner(problem) -> Solution``.

A planner is a frozen dataclass whose fields are its hyper-parameters; ``heft`` lives in
``heft.py`` as the class ``Heft``. ``load`` finds it by the name of the file, or finds yours
by ``package.module:Class``; nothing is registered anywhere. The learned ``policy`` is found by
name too.
"""

from __future__ import annotations

from typing import Any

from placement.problem import Planner, Problem, Solution
from placement.tools.named import Named


class PlannerError(ValueError):
    """No such planner, or an option it does not have; the message lists those it has."""


_PLANNERS: Named[Planner] = Named(
    __name__, "planner", PlannerError, elsewhere={"policy": "agents.planner:PolicyPlanner"}
)
#: Those of this package by name; the one of a name, with options; and its class.
names, load, find = _PLANNERS.names, _PLANNERS.load, _PLANNERS.find


def solve(planner: Planner, problem: Problem) -> Solution:
    """What the planner answers.

    Raises:
        PlannerError: it is no ``Solution``.
    """
    solution: Any = planner(problem)
    if not isinstance(solution, Solution):
        raise PlannerError(
            f"planner {getattr(planner, '__name__', type(planner).__name__)} returned a "
            f"{type(solution).__name__}, not a placement.Solution(placement, value_s)"
        )
    return solution


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
