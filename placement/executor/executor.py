"""``Executor``: run a placement for real and return the measured ``Timeline``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from placement.executor.loader import Dataset, LoaderError
from placement.executor.memory import Storages, peak_bytes
from placement.executor.runner import Runner
from placement.problem import Placement, Problem
from placement.schedule import Schedule
from placement.simulator.predictions import checked
from placement.timeline import Timeline

_WARM_UP_S = 0.1  # a model that takes longer spends little time in the interpreter


def batched(flat: list[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Rows of ``size`` of a flat list."""
    return zip(*(flat[i::size] for i in range(size)), strict=True)


class Executor:
    """The real counterpart of ``placement.simulator.simulate`` for a captured graph.

    Args:
        problem: whose graph has a program and whose cluster is this machine.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @cached_property
    def storages(self) -> Storages:
        """The memory behind every tensor, from one run of the program."""
        program = self.problem.graph.program
        return Storages.of(program, program.timing_inputs())

    def run(
        self,
        placement: ArrayLike,
        schedule: Schedule | None = None,
        num_microbatches: int | None = None,
        max_in_flight: int | None = None,
        loader: Iterable[Any] | Dataset | None = None,
    ) -> Timeline:
        """Measured timeline of ``num_microbatches`` (default: the schedule's or the problem's).

        ``max_in_flight`` defaults to the problem's. With 1, every micro-batch runs alone, and
        the median of ``timeline.span_s`` is the latency. The items of a ``loader`` take the
        place of the example, all of them (see ``Runner.stream``). ``timeline.peak_bytes`` of a
        CUDA device is what PyTorch's allocator has held there at most.

        Raises:
            ProblemError: the placement is not one of this problem.
            ScheduleError: the schedule does not fit, or deadlocks.
            LoaderError: the loader is empty.
        """
        problem = self.problem
        p, m = checked(problem, placement, schedule, num_microbatches)
        window = m if schedule is not None else max_in_flight or problem.max_in_flight
        inputs = problem.graph.program.timing_inputs()
        if schedule is not None:
            # The schedule is for exactly m micro-batches, so the warm-up runs without it.
            with self._runner(p, None, m) as runner:
                _warm_up(runner, inputs)
        with self._runner(p, schedule, window) as runner:
            if schedule is None:
                _warm_up(runner, inputs)
            first = runner.next_batch
            on = problem.worker[p]
            gpus = self._gpus(on)
            for gpu in gpus.values():
                torch.cuda.reset_peak_memory_stats(gpu)
            example = runner.stream_tensors(inputs for _ in range(m))
            for _ in example if loader is None else runner.stream(loader):
                pass
            m = runner.next_batch - first
            if m == 0:
                raise LoaderError("the loader gave no items: a timeline needs at least one")
            asked = len(gpus) == len(np.unique(on))  # nothing else to be known about memory
            storages = None if asked else self.storages
            line = measured_timeline(problem, runner, first, m, storages)
            peak = np.zeros(problem.num_devices, np.int64) if asked else line.peak_bytes
            assert peak is not None
            for d, gpu in gpus.items():
                peak[d] = torch.cuda.max_memory_allocated(gpu)
            return replace(line, peak_bytes=peak)

    def _gpus(self, placement: Placement) -> dict[int, torch.device]:
        """CUDA devices that the placement uses, by number; not one that is there twice."""
        devices = self.problem.cluster.devices
        names = ["" if d.streams else d.name.rpartition("/")[2] for d in devices]
        return {
            d: torch.device(names[d])
            for d in np.unique(placement).tolist()
            if self.problem.cluster.devices[d].kind == "cuda" and names.count(names[d]) == 1
        }

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


def _warm_up(runner: Runner, inputs: Sequence[Tensor]) -> None:
    """Before what is measured: CPython has specialised what it interprets after eight runs, and is
    1 to 3 % slower before."""
    began, k = time.perf_counter(), runner.num_phases
    runs = range(-(-8 // k) * k)  # of every phase as many: what follows begins anew
    some = takewhile(lambda i: i < k or i % k or time.perf_counter() - began < _WARM_UP_S, runs)
    for _ in runner.stream_tensors(inputs for _ in some):
        pass


def measured_timeline(
    problem: Problem,
    runner: Runner,
    first: int,
    num_microbatches: int,
    storages: Storages | None = None,
) -> Timeline:
    """The ``Timeline`` of micro-batches ``first ...`` that a recording runner has run.

    Time 0 is the admission of the first of them, or the begin of its loading. Memory is known
    if ``storages`` are given.
    """
    n, m = problem.num_ops, num_microbatches
    batches = range(first, first + m)
    admitted = np.array([runner.admitted_ns[b] for b in batches])
    loaded = np.array([runner.loaded_ns[b] for b in batches if b in runner.loaded_ns])
    zero = min(int(admitted[0]), int(loaded.min(initial=admitted[0])))
    start, end = np.full((m, n), np.nan), np.full((m, n), np.nan)
    moved: list[tuple[int, int, int, int, float, float]] = []
    for worker in runner.workers:
        clock = worker.backend.resolve_ns
        for batch, op, begin, until in batched(worker.slices, 4):
            if batch >= first:
                start[batch - first, op] = (clock(begin) - zero) * 1e-9
                end[batch - first, op] = (clock(until) - zero) * 1e-9
        here = worker.device
        for batch, tensor, source, sent, received in batched(worker.arrivals, 5):
            if batch >= first:
                left = runner.workers[source].backend.resolve_ns(sent)
                moved.append(
                    (tensor, batch - first, source, here, left - zero, clock(received) - zero)
                )
    assert not np.isnan(end).any(), "every operator ran"
    in_order = sorted(moved, key=lambda row: row[4])  # by when they were sent
    table = np.reshape(np.array(in_order, np.float64), (-1, 6))
    transfers = table[:, :4].astype(np.int32)
    sent_s, received_s = table[:, 4] * 1e-9, table[:, 5] * 1e-9
    peak = None
    if storages is not None:
        admitted_s = (admitted - zero) * 1e-9
        peak = peak_bytes(
            problem,
            runner.placement,
            storages,
            admitted_s,
            start,
            end,
            transfers,
            sent_s,
        )
    return Timeline(
        device_names=problem.cluster.device_names,
        placement=runner.placement,
        start_s=start,
        end_s=end,
        transfers=transfers,
        transfer_start_s=sent_s,
        transfer_end_s=received_s,
        peak_bytes=peak,
        measured=True,
        power=problem.power,
        load_s=(loaded - zero) * 1e-9 if len(loaded) == m else None,
    )
