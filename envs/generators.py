"""Where fresh problems come from: any ``generator(rng) -> Problem``, drawn from at every episode.

A generator may state its ``sizes`` (``envs.problem_set.Sizes``): spaces are made for these. Of one
that does not, some problems are drawn first, and there is room for half as much again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from envs.features import features
from envs.problem_set import EnvError, Sizes, find, name_of
from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.objective import Objective
from placement.problem import Problem
from placement.profile import Profile
from placement.workloads.synthetic import (
    Edges,
    Family,
    Shape,
    chain,
    fork_join,
    inception,
    layered,
    random_graph,
    reduction,
    series_parallel,
    transformer,
)

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


class Shops:
    """Flexible job shops of 5 to 20 jobs and 4 to 15 machines, of Brandimarte's and Hurink's kind.

    Seconds are drawn for every machine, or differ by a fifth, or are equal; every machine is
    equally likely. Transfers take no time; the objective is ``latency``.
    """

    sizes = Sizes(340, 15, 340)

    def __call__(self, rng: np.random.Generator) -> Problem:
        """A fresh problem."""
        machines = int(rng.integers(4, 16))
        least = int(rng.integers(3, 8))
        most = least + int(rng.integers(0, 11))
        flexible = int(rng.integers(2, 6)) if rng.random() < 0.8 else max(2, machines // 2)
        kind, longest = int(rng.integers(3)), int(rng.choice([6, 10, 20, 30, 99]))
        rows: list[Any] = []
        edges: Edges = []
        for _ in range(int(rng.integers(5, 21))):
            for k in range(int(rng.integers(least, most + 1))):
                count = machines // 2 if kind == 2 else int(rng.integers(1, flexible + 1))
                able = rng.choice(machines, min(count, machines), replace=False)
                seconds = rng.integers(1, longest + 1, len(able) if kind == 0 else 1)
                spread = rng.uniform(0.8, 1.2, len(able)) if kind == 1 else 1.0
                rows.append(np.full(machines, np.inf))
                rows[-1][able] = np.maximum(1, np.round(seconds * spread))
                if k:
                    edges.append((len(rows) - 2, len(rows) - 1))
        return _without_transfers("shop", np.array(rows), edges)


class TaskGraphs:
    """Graphs of 30 to 110 tasks on 2 to 16 processors, equal ones or of different speeds.

    As the standard task graphs: transfers take no time; the objective is ``latency``.
    """

    sizes = Sizes(128, 16, 2048)

    def __call__(self, rng: np.random.Generator) -> Problem:
        """A fresh problem."""
        n, kind = int(rng.integers(30, 111)), int(rng.integers(3))
        edges: Edges
        if kind == 0:
            shape = random_graph(n, int(rng.integers(5, 60)), float(rng.uniform(1.2, 5.0)))
            n, edges = shape(rng)
        elif kind == 1:
            share = 20.0 / n * float(rng.choice([0.03, 0.06, 0.1, 0.2]))
            drawn = np.triu(rng.random((n, n)) < share, 1)
            edges = [(int(a), int(b)) for a, b in np.argwhere(drawn)]
        else:
            n, edges = series_parallel(n)(rng)
            edges = [edge for edge in edges if rng.random() < 0.9]
        devices = int(rng.choice([2, 4, 8, 16]) if rng.random() < 0.5 else rng.integers(2, 17))
        even = rng.random() < 0.6
        work = rng.integers(1, 11, n) if even else np.ceil(rng.exponential(5.0, n))
        speed = rng.choice([1.0, 2.0, 4.0], devices) if rng.random() < 0.3 else np.ones(devices)
        return _without_transfers("tasks", work[:, None] / speed, edges)


class Models:
    """Graphs of models of ``placement.workloads.synthetic``, with drawn sizes, devices and links.

    Never drawn, so that they can be asked for afterwards: its families ``layered``,
    ``layered_wide``, ``towers``, ``lstm_grid``, ``butterfly``, ``mixture_of_experts`` and
    ``u_net``. Memory binds in a tenth. The objective is ``latency``.
    """

    sizes = Sizes(400, 8, 1200)

    def __call__(self, rng: np.random.Generator) -> Problem:
        """A fresh problem."""

        def whole(low: int, high: int) -> int:
            return int(rng.integers(low, high + 1))

        shapes: tuple[Callable[[], Shape], ...] = (
            lambda: series_parallel(whole(30, 150)),
            lambda: inception(whole(3, 12)),
            lambda: random_graph(whole(30, 150), whole(5, 40), float(rng.uniform(1.2, 5.0))),
            lambda: chain(whole(30, 120), float(rng.uniform(0.02, 0.6))),
            lambda: fork_join(whole(2, 6), whole(3, 8), whole(1, 4)),
            lambda: reduction(whole(16, 64)),
            lambda: transformer(whole(1, 5), whole(2, 4)),
            lambda: transformer(whole(1, 2), 2),
        )
        return replace(_of_shapes(shapes, 0.1, rng), objective=Objective.LATENCY)


class Pipelines:
    """Pipelines of ``Models``' kinds of graphs, of about 30 to 600 operators.

    Two to eight micro-batches are in flight; memory binds in a seventh. The families that are never
    drawn are those of ``Models``. The objective is ``period``.
    """

    sizes = Sizes(1600, 8, 6400)

    def __call__(self, rng: np.random.Generator) -> Problem:
        """A fresh problem."""

        def even(low: int, high: int) -> int:  # in its logarithm
            return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))

        n = even(30, 600)
        shapes: tuple[Callable[[], Shape], ...] = (
            lambda: series_parallel(n),
            lambda: inception(max(2, n // 12)),
            lambda: random_graph(
                n, max(3, even(n // 30 + 2, n // 3)), float(rng.uniform(1.2, 8.0))
            ),
            lambda: chain(n, float(rng.uniform(0.01, 0.6))),
            lambda: fork_join(even(2, max(3, n // 40)), even(3, 10), even(1, 5)),
            lambda: reduction(max(8, n // 2)),
            lambda: transformer(max(1, n // 35), even(2, 4)),
            lambda: transformer(max(1, n // 70), 2),
        )
        problem = _of_shapes(shapes, 0.15, rng)
        return replace(problem, max_in_flight=int(rng.choice([2, 3, 4, 4, 4, 6, 8])))


class Latency:
    """``Shops`` (two fifths of the problems), ``Models`` (half) and ``TaskGraphs``."""

    sizes = Sizes(400, 16, 2048)

    def __call__(self, rng: np.random.Generator) -> Problem:
        """A fresh problem."""
        drawn = rng.random()
        chosen = Shops if drawn < 0.4 else Models if drawn < 0.92 else TaskGraphs
        return chosen()(rng)


def _of_shapes(
    shapes: Sequence[Callable[[], Shape]], tight: float, rng: np.random.Generator
) -> Problem:
    """One of the shapes, the last to be trained, on a drawn machine; memory binds in a share."""
    kind = int(rng.integers(len(shapes)))
    family = Family(
        shapes[kind](),
        int(rng.integers(2, 9)),
        ccr=float(np.exp(rng.uniform(np.log(0.05), np.log(2.0)))),
        heterogeneity=float(rng.choice([0.0, 0.0, 0.5, 1.0, 1.5])),
        speeds=(1.0,) if rng.random() < 0.6 else (1.0, 2.0, 4.0),
        memory=float(rng.uniform(0.4, 0.8)) if rng.random() < tight else None,
        training=kind == len(shapes) - 1,
    )
    return family(int(rng.integers(2**32)))


def _without_transfers(name: str, seconds: Any, edges: Edges) -> Problem:
    """Operators of ``seconds [N, D]`` (inf: not there); every edge is a tensor without bytes."""
    n, d = seconds.shape
    graph = OpGraph.build(
        name,
        [f"op{k}" for k in range(n)],
        tensor_src=[a for a, _ in edges],
        tensor_bytes=[0] * len(edges),
        uses=[(t, b) for t, (_, b) in enumerate(edges)],
    )
    devices = tuple(Device(f"machine:{k}", kind="accelerator") for k in range(d))
    cluster = Cluster(name, devices)
    spread = np.zeros_like(seconds)
    profile = Profile(cluster.device_names, seconds, spread, (Link("*", "*"),))
    return Problem(graph, cluster, profile, Objective.LATENCY)


def small_problems() -> list[Problem]:
    """What environments play where nobody says what: the same eight problems every time."""
    draw, rng = Layered(), np.random.default_rng(0)
    return [draw(rng) for _ in range(8)]


def generator_of(source: str | Generator) -> Generator:
    """A generator, or what ``package.module:name`` names: one, or a class of them.

    Raises:
        EnvError: it cannot be imported, or is none.
    """
    candidate: Any = find(source, "generator") if isinstance(source, str) else source
    candidate = candidate() if isinstance(candidate, type) else candidate
    if not callable(candidate):
        raise EnvError(
            f"generator {source!r} must be a function of a numpy Generator: rng -> Problem"
        )
    generator: Generator = candidate
    return generator


def draw(generator: Generator, rng: np.random.Generator, room: Sizes | None = None) -> Problem:
    """A fresh problem.

    Raises:
        EnvError: it is no problem, or larger than ``room``.
    """
    problem = generator(rng)
    if not isinstance(problem, Problem):
        raise EnvError(f"generator {name_of(generator)} made no Problem: {type(problem).__name__}")
    if room is not None and any(np.array(sizes_of(problem)) > room):
        raise EnvError(
            f"generator {name_of(generator)} made a problem of {sizes_of(problem)}, and there is "
            f"room for {room}: give it an attribute sizes = envs.problem_set.Sizes(...) of "
            f"its largest"
        )
    return problem


def room_of(generator: Generator) -> Sizes:
    """What ``generator`` states as its ``sizes``, or half as much again as some that it makes."""
    stated = getattr(generator, "sizes", None)
    if stated is not None:
        try:
            return Sizes(*stated)
        except TypeError:
            raise EnvError(
                f"generator {name_of(generator)}: sizes = {stated!r} must be "
                f"envs.problem_set.Sizes(groups, devices, edges)"
            ) from None
    rng = np.random.default_rng(0)
    seen = np.max([sizes_of(draw(generator, rng)) for _ in range(_LOOK)], axis=0)
    groups, devices, edges = seen.tolist()
    return Sizes(groups + groups // 2, devices, edges + edges // 2 + 1)


def sizes_of(problem: Problem) -> Sizes:
    """Groups, devices, and edges between groups."""
    num_edges = features(problem).edges.shape[1]
    return Sizes(problem.graph.num_groups, problem.num_devices, num_edges)
