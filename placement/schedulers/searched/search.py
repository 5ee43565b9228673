"""Pattern, then schedule: the whole search within one budget of seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from placement.schedulers.searched import retime
from placement.schedulers.searched.blocks import BlocksError, Ints, Work
from placement.schedulers.searched.repetend import Outcome, search, solve
from placement.tools.limits import MOST


@dataclass(frozen=True, eq=False)
class Answer:
    """A schedule of ``N`` micro-batches and what is proved about it.

    Attributes:
        starts: int64 ``[N, n]``.
        outcome: the pattern it was made from, with its bound.
        makespan: end of the last block.
        seconds: of the search, imports and compilation not counted.
    """

    starts: Ints
    outcome: Outcome
    makespan: int
    seconds: float

    @property
    def period(self) -> Fraction:
        """Time per micro-batch in steady state."""
        return self.outcome.pattern.per_micro_batch


def default_seconds(work: Work) -> float:
    """Budget of a search: just under 1 second for up to 4 devices, under 10 for more."""
    return 0.8 if work.num_devices <= 4 else 8.0


def search_schedule(
    work: Work,
    num_micro_batches: int,
    *,
    unroll: int | None = None,
    seconds: float | None = None,
) -> Answer:
    """A schedule of ``N`` micro-batches with the shortest period, and short as a whole.

    At most half of the ``seconds`` (None: ``default_seconds``) go to the period and its proof,
    the rest to warm-up and cool-down; it ends sooner where everything is proved.

    Raises:
        BlocksError: no micro-batch fits into the memory, or nothing was found in time.
        ImportError: OR-Tools is not installed.
    """
    from ortools.sat.python import cp_model  # noqa: F401  (its import is not part of the search)

    if num_micro_batches * work.num_blocks > MOST.block_runs:
        raise BlocksError(
            f"{num_micro_batches} micro-batches of {work.num_blocks} blocks: at most "
            f"{MOST.block_runs} runs of a block are possible; ask for fewer micro-batches"
        )
    retime.warm_up()
    budget = default_seconds(work) if seconds is None else seconds
    began = time.perf_counter()
    outcome = search(work, unroll, 0.5 * budget)
    patterns = [outcome.pattern]
    for options in ({"shortest_flow": True}, {"seed": 1}, {"seed": 2}, {"seed": 3}):
        left = began + budget - time.perf_counter()
        if left <= 0:
            break
        similar, _ = solve(
            work, outcome.pattern.unroll, outcome.pattern.period, 0.1 * left, **options
        )
        if similar is not None:
            patterns.append(similar)
    patterns += outcome.others
    left = began + budget - time.perf_counter()
    starts = retime.shortest(work, patterns, num_micro_batches, left)
    took = time.perf_counter() - began
    assert not work.errors(starts), work.errors(starts)
    makespan = int((starts + np.array([b.time for b in work.blocks])).max())
    return Answer(starts, outcome, makespan, took)
