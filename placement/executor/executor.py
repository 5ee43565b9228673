"""``Executor``: run a placement for real and return the measured ``Timeline``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from placement.executor.runner import Runner
from placement.problem import Placement, Problem
from placement.schedule import Schedule
from placement.timeline import Timeline


def batched(flat: list[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Rows of ``size`` of a flat list."""
    return zip(*(flat[i::size] for i in range(size)), strict=True)


class Executor:
    """The real counterpart of ``placement.simulator.simulate`` for a captured graph.

    Args:
        problem: whose graph has a program and whose cluster is this machine.
        warmup: micro-batches that run before the measured ones.
    """

    def __init__(self, problem: Problem, *, warmup: int = 2) -> None:
        self.problem = problem
        self.warmup = warmup

    def run(
        self,
        placement: ArrayLike,
        schedule: Schedule | None = None,
        num_microbatches: int | None = None,
        max_in_flight: int | None = None,
    ) -> Timeline:
        """Measured timeline of ``num_microbatches`` (default: the schedule's or the problem's).

        ``max_in_flight`` defaults to the problem's. With 1, every micro-batch runs alone, and
        the median of ``timeline.span_s`` is the latency.

        Raises:
            ProblemError: the placement is not one of this problem.
            ScheduleError: the schedule does not fit, or deadlocks.
        """
        problem = self.problem
        p = problem.check_placement(placement)
        if schedule is not None:
            schedule.check(problem, p)
            num_microbatches = schedule.num_microbatches
        m = num_microbatches or problem.num_microbatches
        window = m if schedule is not None else max_in_flight or problem.max_in_flight
        inputs = problem.graph.program.random_inputs()
        if schedule is not None:
            # The schedule is for exactly m micro-batches, so the warm-up runs without it.
            with self._runner(p, None, m) as runner:
                _drain(runner, inputs, self.warmup)
        with self._runner(p, schedule, window) as runner:
            if schedule is None:
                _drain(runner, inputs, self.warmup)
            first = runner.next_batch
            _drain(runner, inputs, m)
            return measured_timeline(problem, runner, first, m)

    def _runner(self, placement: Placement, schedule: Schedule | None, window: int) -> Runner:
        problem = self.problem
        return Runner(
            problem.graph,
            problem.cluster,
            placement,
            max_in_flight=window,
            priority=problem.priority,
            schedule=schedule,
            record=True,
        )


def _drain(runner: Runner, inputs: Sequence[Tensor], num_microbatches: int) -> None:
    for _ in runner.stream_tensors(inputs for _ in range(num_microbatches)):
        pass


def measured_timeline(
    problem: Problem, runner: Runner, first: int, num_microbatches: int
) -> Timeline:
    """The ``Timeline`` of micro-batches ``first ...`` that a recording runner has run.

    Time 0 is the admission of the first of them.
    """
    n, m = problem.num_ops, num_microbatches
    zero = runner.admitted_ns[first]
    start, end = np.full((m, n), np.nan), np.full((m, n), np.nan)
    moved: list[tuple[int, int, int, int, float, float]] = []
    for worker in runner.workers:
        clock = worker.backend.resolve_ns
        for batch, op, begin, until in batched(worker.slices, 4):
            if batch >= first:
                start[batch - first, op] = (clock(begin) - zero) * 1e-9
                end[batch - first, op] = (clock(until) - zero) * 1e-9
        here = worker.share.device
        for batch, tensor, source, sent, received in batched(worker.arrivals, 5):
            if batch >= first:
                left = runner.workers[source].backend.resolve_ns(sent)
                moved.append(
                    (tensor, batch - first, source, here, left - zero, clock(received) - zero)
                )
    assert not np.isnan(end).any(), "every operator ran"
    moved.sort(key=lambda row: row[4])
    devices = problem.cluster.devices
    known = all(d.busy_w is not None and d.idle_w is not None for d in devices)
    return Timeline(
        device_names=problem.cluster.device_names,
        placement=runner.placement,
        start_s=start,
        end_s=end,
        transfers=np.array([row[:4] for row in moved], np.int32).reshape(-1, 4),
        transfer_start_s=np.array([row[4] for row in moved]) * 1e-9,
        transfer_end_s=np.array([row[5] for row in moved]) * 1e-9,
        measured=True,
        busy_w=np.array([d.busy_w for d in devices], float) if known else None,
        idle_w=np.array([d.idle_w for d in devices], float) if known else None,
    )
