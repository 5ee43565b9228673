"""Weight gradients fill the bubbles (Qi et al., "Zero bubble pipeline parallelism", ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from placement.problem import Placement, Problem
from placement.schedule import Schedule
from placement.schedulers import SchedulerError, check_one_phase
from placement.schedulers._cut import cut


@dataclass(frozen=True)
class ZeroBubble:
    """1F1B (their ZB-H1) whose backward is split: gradients of inputs now, of weights later.

    Device ``s`` runs the weight gradients of a micro-batch after the input gradients of the
    ``s``-th after it: no more memory than 1F1B, a third of its bubbles. Three devices, 4
    micro-batches, 1 for each piece; capitals are input, digits (1 = a) weight gradients:

        device 0  a b c . . A 1 d B 2 C 3 D 4
        device 1  . a b . A c B 1 d C 2 D 3 4
        device 2  . . a A b B c C 1 d D 2 3 4

    That is 1F1B's order ``2 m + level`` with the weight gradients of micro-batch ``m`` just behind
    the input gradients of ``m + s``. (Times follow from the order.)

    An operator of the backward graph is a weight gradient if nothing on another device waits for
    it, directly or not.
    """

    def __call__(self, problem: Problem, placement: Placement, num_microbatches: int) -> Schedule:
        """Raises: SchedulerError, the graph does not tell the two gradients apart."""
        check_one_phase(placement)
        late = weight_gradients(problem, placement)
        pieces = cut(problem, placement, kind=problem.graph.is_backward + late.astype(np.int64))
        is_late = np.zeros(pieces.num_blocks, bool)
        is_late[pieces.label[late]] = True
        level = pieces.level.astype(np.float64)
        depth = level.copy()
        for d in range(problem.num_devices):
            here = pieces.device == d
            forward = level[here & ~pieces.backward]
            inputs = level[here & pieces.backward & ~is_late]
            if len(forward):
                # Without input gradients (the first device) they follow at once.
                base = inputs.max() if len(inputs) else level[here].max()
                mine = here & is_late
                # Behind what they wait for, and among them by level: no order can lock up.
                after = np.maximum(base + 2 * forward.min() + 0.5, level[mine] - 0.5)
                depth[mine] = after + 0.25 * level[mine] / (1 + level.max())
        batch = np.arange(num_microbatches)[:, None]
        return pieces.schedule(2 * batch + depth)


def weight_gradients(problem: Problem, placement: Placement) -> NDArray[np.bool_]:
    """bool ``[N]``: backward operators that nothing on another device waits for.

    Raises:
        SchedulerError: there is no backward, or a device but the first has none of them, or
            nothing else.
    """
    g = problem.graph
    if not g.is_backward.any():
        raise SchedulerError(
            "zero_bubble is for training graphs, this one has no backward operators; use gpipe, "
            "one_f_one_b or searched"
        )
    awaited = np.zeros(g.num_ops, bool)
    for u, v in g.edges[::-1]:
        awaited[u] |= awaited[v] or placement[u] != placement[v]
    late = g.is_backward & ~awaited
    for d in sorted(set(placement[g.is_backward].tolist())):
        here = g.is_backward & (placement == d)
        inputs = int((here & awaited).sum())
        if inputs and not (here & late).any():
            raise SchedulerError(
                f"the graph does not separate input from weight gradients: all {inputs} backward "
                f"operators on {problem.cluster.device_names[d]} are waited for by other devices; "
                "use one_f_one_b or searched"
            )
    return late
