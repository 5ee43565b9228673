"""The shortest repeating pattern by modulo scheduling, with warm-up and cool-down.

``blocks``: one micro-batch as blocks on devices; ``work``: those of a placed graph; ``repetend``:
the pattern that repeats, by CP-SAT (Lin et al., "Tessel", TPDS 2024); ``packing``: patterns where
there are too many blocks for CP-SAT, and where it begins; ``retime``: from a pattern to a schedule
of N micro-batches; ``order_kernels``: its inner loops; ``search``: all of it within a budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.problem import Placement, Problem
from placement.schedule import Schedule
from placement.schedulers import SchedulerError
from placement.schedulers._cut import cut
from placement.schedulers.searched.blocks import BlocksError
from placement.schedulers.searched.search import Answer, search_schedule
from placement.schedulers.searched.work import held_bytes, limited, work_of
from placement.simulator import simulate
from placement.tools.ownership import needing


@dataclass(frozen=True)
class Searched:
    """Modulo scheduling with CP-SAT (after Lin et al., "Tessel", TPDS 35(12) 2024).

    The placed graph is cut into at most 64 blocks (more only where none may be joined, as in a
    chain that changes devices at every step), the pattern of one micro-batch (or several)
    with the shortest period is searched and proved, and all micro-batches follow it as early as
    its order allows; see ``search``. Other than in the published search,
    devices may be unlike, transfers take time (as delays), and patterns may hold several
    micro-batches. Where memory binds, what blocks store for later ones is limited; the simulator
    has the last word, and if it finds more than there is, the search is repeated with less room.

    Attributes:
        unroll: micro-batches per period; None: one, and more where that is shorter.
        seconds: budget of a search, of which there are up to three where memory binds; None:
            0.8 for up to 4 devices, 8 for more.
    """

    unroll: int | None = None
    seconds: float | None = None

    def __call__(self, problem: Problem, placement: Placement, num_microbatches: int) -> Schedule:
        """Raises: SchedulerError, too many blocks, nothing fits into the memory, or no OR-Tools."""
        return self.solve(problem, placement, num_microbatches)[0]

    def solve(
        self, problem: Problem, placement: Placement, num_microbatches: int
    ) -> tuple[Schedule, Answer, float]:
        """The schedule, what is proved about its blocks, and the seconds of their unit of time."""
        p = problem.check_placement(placement)
        pieces = cut(problem, p)
        # The model of all pairs is written before any clock is looked at: several seconds of 512.
        if pieces.num_blocks > 512:
            raise SchedulerError(
                f"searched: the placement changes devices so often that {pieces.num_blocks} blocks "
                f"remain, more than 512; use one_f_one_b, or another placement"
            )
        free, unit_s = work_of(problem, p, pieces, num_microbatches)
        held = held_bytes(problem, pieces)
        room = problem.memory_bytes - problem.resident_bytes_on(p)
        over = np.zeros(problem.num_devices, np.int64)
        for _ in range(3):  # with less memory where the simulator finds too much
            try:
                work = limited(free, held, room, num_microbatches)
                with needing("cp", "searched needs OR-Tools", SchedulerError, ", or list_order"):
                    answer = search_schedule(
                        work, num_microbatches, unroll=self.unroll, seconds=self.seconds
                    )
            except BlocksError as error:
                if (over > 0).any():
                    break  # less room than the simulator asks for does not work either
                raise SchedulerError(f"searched: {error}") from error
            schedule = pieces.schedule(answer.starts)
            peak = simulate(problem, p, schedule).peak_bytes
            assert peak is not None
            over = peak - problem.memory_bytes
            if (over <= 0).all():
                return schedule, answer, unit_s
            room = room - np.maximum(over, 0)
        d = int(np.argmax(over))
        raise SchedulerError(
            f"searched: {problem.cluster.device_names[d]} would need {over[d]} bytes more than its "
            f"{problem.memory_bytes[d]}; use fewer micro-batches or another placement"
        )
