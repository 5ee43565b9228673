"""The order decision: for every device, the sequence of (operator, micro-batch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.cluster import Cluster
from placement.graph import OpGraph, topological_order
from placement.tools.files import short


class ScheduleError(ValueError):
    """A schedule that is not an order of this problem's work, or that would deadlock."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """``order[d]`` int32 ``[K_d, 2]``: the (operator, micro-batch) of device d in their order.

    Raises:
        ScheduleError: a row is no pair of whole numbers, or there is no micro-batch.
    """

    order: tuple[NDArray[np.int32], ...]
    num_microbatches: int

    def __post_init__(self) -> None:
        if not isinstance(self.num_microbatches, Integral) or self.num_microbatches < 1:
            raise ScheduleError(
                f"num_microbatches = {self.num_microbatches!r} must be a whole number, at least 1"
            )
        object.__setattr__(self, "order", tuple(map(_pairs, self.order)))

    def check(self, graph: OpGraph, cluster: Cluster, placement: ArrayLike) -> None:
        """Every (operator, micro-batch) once, on its device, and no cyclic waiting.

        ``placement`` is ``[N]`` or ``[K, N]``. What one micro-batch writes for the next (a running
        statistic) is waited for, too.

        Raises:
            ScheduleError: naming the device and the operator.
        """
        n, m, num_devices = graph.num_ops, self.num_microbatches, cluster.num_devices
        phases = np.atleast_2d(cluster.worker[np.asarray(placement)])
        if len(self.order) != num_devices:
            raise ScheduleError(
                f"schedule is for {len(self.order)} devices, problem has {num_devices}"
            )
        entries = sum(map(len, self.order))
        if m * n > 10 * entries + 2**20:  # before anything as large as that is made
            raise ScheduleError(
                f"schedule has {entries} entries, expected {n} operators x {m} micro-batches"
            )
        op, batch = np.concatenate(self.order).astype(np.int64).T
        device = np.repeat(np.arange(num_devices), [len(rows) for rows in self.order])
        for d in device[(np.minimum(op, batch) < 0) | (op >= n) | (batch >= m)][:1]:
            raise ScheduleError(f"device {d}: an entry is outside {n} operators x {m} batches")
        on = phases[batch % len(phases), op]
        for i in np.flatnonzero(on != device)[:1]:
            raise ScheduleError(
                f"device {device[i]} is told to run operator {op[i]} ({graph.op_name[op[i]]!r}), "
                f"which is placed on device {on[i]}"
            )
        times = np.bincount(batch * n + op, minlength=m * n)
        for b, i in zip(*np.divmod(np.flatnonzero(times != 1)[:1], n), strict=True):
            raise ScheduleError(
                f"operator {i} ({graph.op_name[i]!r}) of micro-batch {b} is scheduled "
                f"{times[b * n + i]} times, expected once"
            )
        self._check_no_deadlock(graph)

    def named(
        self, graph: OpGraph, devices: Sequence[str]
    ) -> dict[str, tuple[tuple[str, int], ...]]:
        """``(operator, micro-batch)`` of each device in their order, by name."""
        return {
            device: tuple((graph.op_name[op], batch) for op, batch in rows.tolist())
            for device, rows in zip(devices, self.order, strict=True)
        }

    def _check_no_deadlock(self, g: OpGraph) -> None:
        """What waits for its inputs, and for what its device runs before it, is no circle."""
        n, m = g.num_ops, self.num_microbatches
        each = [rows[:, 0] + n * rows[:, 1].astype(np.int64) for rows in self.order]
        lines = [np.stack([x[:-1], x[1:]], axis=1) for x in each]
        next_ones = [(writer, n + op) for writer, ops in g.carried.items() for op in ops]
        carried = np.array(next_ones, np.int64).reshape(-1, 2)
        within = [g.edges + n * b for b in range(m)]
        edges = np.concatenate([*lines, *within, *(carried + n * b for b in range(m - 1))])
        done = np.zeros(n * m, bool)
        done[topological_order(edges[np.argsort(edges[:, 0], kind="stable")], n * m)] = True
        for d, line in enumerate(each):
            for batch, op in zip(*np.divmod(line[~done[line]][:1], n), strict=True):
                reads = f", or for a buffer that micro-batch {batch - 1} changes" if batch else ""
                raise ScheduleError(
                    f"schedule deadlocks: device {d} waits at operator {op} "
                    f"({g.op_name[op]!r}) of micro-batch {batch} for work that comes later"
                    + (reads if n + op in carried[:, 1] else "")
                )


def _pairs(rows: ArrayLike) -> NDArray[np.int32]:
    """int32 ``[K, 2]``; raises ScheduleError where ``rows`` are none."""
    try:
        values = np.asarray(rows)
    except ValueError:  # of unequal lengths
        values = np.zeros(1)
    values = values if values.size else np.zeros((0, 2), np.int32)
    if values.dtype.kind in "iu" and values.ndim == 2 and values.shape[1] == 2:
        pairs = values.astype(np.int32)
        if (pairs == values).all():
            return pairs
    raise ScheduleError(
        "the order of a device has rows (operator, micro-batch) of whole numbers, not "
        + short(rows.tolist() if isinstance(rows, np.ndarray) else rows)
    )


def in_sequence(
    placement: NDArray[np.int32], sequence: NDArray[np.int32], num_devices: int
) -> Schedule:
    """One micro-batch whose operators run in ``sequence`` int32 ``[N]``, each on its device."""
    on = placement[sequence]
    rows = np.stack([sequence, np.zeros_like(sequence)], axis=1)
    return Schedule(tuple(rows[on == d] for d in range(num_devices)), 1)
