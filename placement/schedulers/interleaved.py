"""Interleaved 1F1B (Narayanan et al., "Efficient large-scale language model training", SC 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from placement.problem import Placement, Problem
from placement.schedule import Schedule, ScheduleError
from placement.schedulers import SchedulerError
from placement.schedulers._cut import cut


@dataclass(frozen=True)
class Interleaved:
    """1F1B where every device has several model chunks: shorter warm-up, smaller bubbles.

    Micro-batches go through in groups of ``D``, each group through one chunk of a device after
    the other. Device ``s`` begins with ``2 (D - s - 1) + (v - 1) D`` forward pieces and one more,
    then backward and forward take turns. Two devices, ``v = 2`` chunks each, 4 micro-batches of
    forward (1) and backward (1); second chunks are underlined with ', capitals are backward:

        device 0  a  b  a' b' c  .  A' d  B' c' A  d' B  C' D' C  D
        device 1  .  a  b  a' A' b' B' c  A  d  B  c' C' d' D' C  D

    (Times follow from the order; drawn here are the orders.) Without backward pieces the order is
    that of the forward ones.
    """

    def __call__(self, problem: Problem, placement: Placement, num_microbatches: int) -> Schedule:
        """Raises: SchedulerError, devices with unlike numbers of chunks, or M no multiple of D."""
        pieces = cut(problem, placement)
        used = sorted({int(d) for d in pieces.device}, key=lambda d: pieces.visits(d, False)[:1])
        chunks = {d: (pieces.visits(d, False), pieces.visits(d, True)) for d in used}
        counts = {len(f) for f, _ in chunks.values()}
        backs = {len(b) for _, b in chunks.values()}
        if len(counts) != 1 or len(backs) != 1 or not backs <= {0, *counts}:
            raise SchedulerError(
                "interleaved needs as many forward and backward pieces on every device; "
                + ", ".join(
                    f"{problem.cluster.device_names[d]} has {len(f)} and {len(b)}"
                    for d, (f, b) in chunks.items()
                )
                + "; use one_f_one_b or searched"
            )
        if num_microbatches % len(used):
            raise SchedulerError(
                f"interleaved runs groups of {len(used)} micro-batches (one per device), "
                f"{num_microbatches} are no multiple; use one_f_one_b or searched"
            )
        key = np.zeros((num_microbatches, pieces.num_blocks))
        for s, d in enumerate(used):
            forward, backward = chunks[d]
            order = virtual_order(s, len(used), len(forward), num_microbatches, bool(backward))
            for at, (chunk, batch, back) in enumerate(order):
                level = backward[chunk] if back else forward[chunk]
                here = (pieces.device == d) & (pieces.level == level) & (pieces.backward == back)
                key[batch, here] = at
        schedule = pieces.schedule(key)
        try:
            schedule.check(problem.graph, problem.cluster, placement)
        except ScheduleError as error:  # rounds that visit devices in another order
            raise SchedulerError(
                f"interleaved needs rounds that visit the devices in one order ({error}); use "
                "one_f_one_b or searched"
            ) from error
        return schedule


def virtual_order(
    stage: int, num_stages: int, num_chunks: int, num_microbatches: int, training: bool
) -> list[tuple[int, int, bool]]:
    """(chunk in the order it is visited in its direction, micro-batch, backward) of a device."""
    pieces = [
        (chunk, batch)
        for group in range(0, num_microbatches, num_stages)
        for chunk in range(num_chunks)
        for batch in range(group, group + num_stages)
    ]
    forward = [(chunk, batch, False) for chunk, batch in pieces]
    if not training:
        return forward
    backward = [(chunk, batch, True) for chunk, batch in pieces]
    ahead = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for i, back in enumerate(backward):
        order += forward[ahead + i : ahead + i + 1]
        order.append(back)
    return order
