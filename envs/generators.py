"""Where fresh problems come from: any ``generator(rng) -> Problem``, drawn from at every episode.

A generator may state its ``sizes`` (``envs.problems.Sizes``): spaces are made for these. Of one
that does not, some problems are drawn first, and there is room for half as much again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from envs.features import features
from envs.lookup import find, name_of
from envs.problems import EnvError, Sizes
from placement.objective import Objective
from placement.problem import Problem
from placement.workloads.synthetic import Family, layered

Generator = Callable[[np.random.Generator], Problem]
_LOOK = 32  # problems that are drawn to see how large they are


@dataclass(frozen=True)
class Layered:
    """Small layered graphs with drawn costs, on devices that are fast for different operators.

    Attributes:
        depth, width: most layers, and most operators of one; at least 2 of each.
        devices: ``D``.
        ccr: mean transfer seconds of a tensor over the mean seconds of an operator.
        objective: of the problems.
    """

    depth: int = 6
    width: int = 3
    devices: int = 3
    ccr: float = 0.3
    objective: Objective = Objective.LATENCY

    def __post_init__(self) -> None:
        for what in ("depth", "width", "devices"):
            if getattr(self, what) < 2:
                raise EnvError(f"{what} = {getattr(self, what)} must be at least 2")

    @property
    def sizes(self) -> Sizes:
        """Room for the largest."""
        edges = (self.depth - 1) * self.width**2
        return Sizes(self.depth * self.width, self.devices, edges)

    def __call__(self, rng: np.random.Generator) -> Problem:
        """A fresh problem."""
        depth, width = rng.integers(2, self.depth + 1), rng.integers(2, self.width + 1)
        shape = layered(int(depth), int(width), density=0.3)
        family = Family(shape, self.devices, self.ccr, heterogeneity=1.5)
        return replace(family(int(rng.integers(2**32))), objective=self.objective)


def small_problems(count: int = 8) -> list[Problem]:
    """What environments play where nobody says what: the same problems every time."""
    draw, rng = Layered(), np.random.default_rng(0)
    return [draw(rng) for _ in range(count)]


def generator_of(given: str | Generator) -> Generator:
    """A generator, or what ``package.module:name`` names: one, or a class of them.

    Raises:
        EnvError: it cannot be imported, or is none.
    """
    found: Any = find(given, "generator") if isinstance(given, str) else given
    found = found() if isinstance(found, type) else found
    if not callable(found):
        raise EnvError(
            f"generator {given!r} must be a function of a numpy Generator: rng -> Problem"
        )
    generator: Generator = found
    return generator


def draw(generator: Generator, rng: np.random.Generator, room: Sizes | None = None) -> Problem:
    """A fresh problem.

    Raises:
        EnvError: it is no problem, or larger than ``room``.
    """
    problem = generator(rng)
    if not isinstance(problem, Problem):
        raise EnvError(
            f"generator {name_of(generator)} made a {type(problem).__name__}, not a Problem"
        )
    if room is not None and any(np.array(sizes_of(problem)) > room):
        raise EnvError(
            f"generator {name_of(generator)} made a problem of {sizes_of(problem)}, and there is "
            f"room for {room}: give it an attribute sizes = envs.problems.Sizes(...) of its largest"
        )
    return problem


def room_of(generator: Generator) -> Sizes:
    """What ``generator`` states as its ``sizes``, or half as much again as some that it makes."""
    stated = getattr(generator, "sizes", None)
    if stated is not None:
        return Sizes(*stated)
    rng = np.random.default_rng(0)
    seen = np.max([sizes_of(draw(generator, rng)) for _ in range(_LOOK)], axis=0)
    groups, devices, edges = seen.tolist()
    return Sizes(groups + groups // 2, devices, edges + edges // 2 + 1)


def sizes_of(problem: Problem) -> Sizes:
    """Groups, devices, and edges between groups."""
    num_edges = features(problem).edges.shape[1]
    return Sizes(problem.graph.num_groups, problem.num_devices, num_edges)
