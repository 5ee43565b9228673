"""A call at least, where a model does not fit: bytes over what reads them, all at once."""

from __future__ import annotations

from placement.bounds.memory_lp import Placed, either
from placement.problem import Problem
from placement.tools.lp import EXACT


def copied_s(problem: Problem) -> float:
    """Seconds of a call, by ``streaming_program``."""

    def bound(streams: bool | None) -> float:
        placed = streaming_program(problem, streams)
        return placed.program.solve()[0] * placed.unit_s * EXACT

    return either(problem, bound)


def streaming_program(problem: Problem, streams: bool | None = None) -> Placed:
    """A linear program of the shares of groups on devices.

    Each device computes what it has, its parameters within its memory, while links copy what is
    streamed; nothing waits for anything else. Calls follow one another, and all of a call that
    streams is copied in each (see ``placement.buffer``). ``streams``: see ``either``.
    """
    placed = Placed(problem, False, streams=streams)
    seconds = problem.graph.per_group(placed.alone_s)
    for here in placed.sides:
        placed.program.row(0.0, (placed.on[:, here], seconds[:, here]), placed.time)
    placed.copy()
    return placed
