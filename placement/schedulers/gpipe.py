"""All micro-batches forward, then all backward (Huang et al., "GPipe", NeurIPS 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.problem import Placement, Problem
from placement.schedule import Schedule
from placement.schedulers._cut import cut


@dataclass(frozen=True)
class Gpipe:
    """On every device all micro-batches of its first piece, then all of its next one, ...

    Three devices, 4 micro-batches, forward (1) and backward (1); capitals are backward:

        device 0  a b c d . . . . A B C D
        device 1  . a b c d . . A B C D .
        device 2  . . a b c d A B C D . .

    (GPipe runs the backward of the last micro-batch first; here it is the first, whose gradients
    are then ready earlier. The length is the same.) Inference over a device that is visited
    several times: all micro-batches of the first visit, then all of the second.
    """

    def __call__(self, problem: Problem, placement: Placement, num_microbatches: int) -> Schedule:
        pieces = cut(problem, placement)
        batch = np.arange(num_microbatches)[:, None]
        return pieces.schedule(pieces.level * num_microbatches + batch)
