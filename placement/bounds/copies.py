"""A call at least, where a model does not fit: bytes over what reads them, all at once."""

from __future__ import annotations

from placement.bounds.memory_lp import Placed
from placement.problem import Problem
from placement.tools.lp import EXACT


def copied_s(problem: Problem) -> float:
    """Seconds of a call, by ``streaming_program``."""
    placed = streaming_program(problem)
    return placed.program.solve()[0] * placed.unit_s * EXACT


def streaming_program(problem: Problem) -> Placed:
    """A linear program of the shares of groups on devices.

    Each device computes what it has, its parameters within its memory, while links copy what is
    streamed; nothing waits for anything else. Calls follow one another, and all of a call that
    streams is copied in each (see ``placement.buffer``).
    """
    placed = Placed(problem, False)
    seconds = problem.graph.per_group(placed.alone_s)
    for here in placed.sides:
        placed.program.row(0.0, (placed.on[:, here], seconds[:, here]), placed.time)
    placed.copy()
    return placed
