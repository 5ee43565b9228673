"""One forward, one backward (Narayanan et al., "PipeDream", SOSP 2019; its flush variant)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.problem import Placement, Problem
from placement.schedule import Schedule
from placement.schedulers._cut import cut


@dataclass(frozen=True)
class OneFOneB:
    """After ``D - s`` forward pieces, device ``s`` of ``D`` runs backward and forward in turns.

    Three devices, 4 micro-batches, forward (1) and backward (1); capitals are backward:

        device 0  a b c . . A d B . C . D
        device 1  . a b . A c B d C . D .
        device 2  . . a A b B c C d D . .

    That is the order of ``2 m + level`` for micro-batch ``m``, where ``level`` counts the pieces
    on the way (0, 1, 2 forward, 3, 4, 5 backward): micro-batches follow each other at a distance
    of two pieces, because a device has two. With ``k`` pieces on a device it is ``k m + level``:
    an inference that goes through the devices and back is treated like forward and backward, one
    that visits every device once is run in the order of micro-batches.
    """

    def __call__(self, problem: Problem, placement: Placement, num_microbatches: int) -> Schedule:
        pieces = cut(problem, placement)
        batch = np.arange(num_microbatches)[:, None]
        return pieces.schedule(pieces.most_visits * batch + pieces.level)
