"""What a device really holds: memory behind tensors as found in a run, over measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from placement.cluster import Device
from placement.executor import weights
from placement.executor.generated import generate
from placement.graph import OpGraph
from placement.problem import Problem
from placement.program import Program, Ref, run_program, storage_of
from placement.timeline import joined

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Storages:
    """The memory behind ``T`` tensors, as a run has shown it.

    Attributes:
        of_tensor: int64 ``[T]`` number of the storage each tensor is in; -1: in a parameter.
        num_bytes: int64 ``[S]``.
    """

    of_tensor: Ints
    num_bytes: Ints

    @classmethod
    def of(cls, program: Program, inputs: Sequence[Tensor]) -> Storages:
        """From one run in the calling thread that keeps every tensor, so that no two share one."""
        device = next((x.device for x in program.params), torch.device("cpu"))
        outputs = [t for step in program.steps for t in step.outputs]
        every = range(max((*program.input_tensors, *outputs)) + 1)
        keeps_all = replace(program, output_leaves=tuple(map(Ref, every)))
        with torch.random.fork_rng(devices=[]):
            values = run_program(keeps_all, [x.to(device) for x in inputs], device=device)
        params = {storage_of(x) for x in program.params}
        own = [storage_of(x) for x in values]
        sizes = {k: x.untyped_storage().nbytes() for k, x in zip(own, values, strict=True)}
        number = {k: i for i, k in enumerate(sizes.keys() - params)}
        of_tensor = np.array([number.get(k, -1) for k in own], np.int64)
        return cls(of_tensor, np.array([sizes[k] for k in number], np.int64))


def needed_bytes(graph: OpGraph, on: Device) -> Ints:
    """int64 ``[N, 2]``: what each operator needs on a CUDA device only while it runs, and for good.

    From one run in the calling thread: the most that PyTorch's allocator has held meanwhile, less
    what it holds afterwards; and what cuBLAS, which had nothing before, has of that. A CPU is not
    asked: zeros.
    """
    needed, allocated = np.zeros((graph.num_ops, 2), np.int64), torch.cuda.memory_allocated
    if on.kind != "cuda":
        return needed
    program, device = graph.program, torch.device(on.name.rpartition("/")[2])
    used = [p for p in np.unique(graph.param_use).tolist() if p < len(program.params)]
    params = {p: weights.on(device, program, p).tensor for p in used}
    runs = [(op,) for op in range(graph.num_ops)]
    silent = replace(program, gradients=(), new_buffers=())  # the module stays as it is
    calls = generate(silent, runs, None, params, {}, device).calls
    held: list[Any] = [None] * graph.num_tensors
    for t, value in zip(program.input_tensors, program.timing_inputs(), strict=True):
        held[t] = value.to(device)
    left = np.diff(graph.use_ptr)
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        for op, call in calls.items():
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.reset_peak_memory_stats(device)
            call(held, lambda: True)
            after = allocated(device)
            torch._C._cuda_clearCublasWorkspaces()
            most = torch.cuda.max_memory_allocated(device)
            needed[op] = most - after, after - allocated(device)
            read = graph.in_tensor[graph.in_ptr[op] : graph.in_ptr[op + 1]]
            left[read] -= 1
            for t in (*read.tolist(), *program.steps[op].outputs):
                if not left[t]:
                    held[t] = None
    return needed


def peak_bytes(
    problem: Problem,
    placement: NDArray[np.int32],
    storages: Storages,
    admitted_s: Floats,
    start_s: Floats,
    end_s: Floats,
    transfers: NDArray[np.int32],
    sent_s: Floats,
) -> Ints:
    """int64 ``[D]``: the most that each device held at one time of a measured run.

    A worker holds a tensor from the start of its producer, or from when it was sent, until the
    last of its own operators that reads it has ended; an input from its admission; an output of
    the model until its micro-batch ``[M]`` has finished. Tensors in one storage hold it
    together. Times as in ``Timeline``; ``admitted_s`` float64 ``[M]``.
    """
    graph, num_devices = problem.graph, problem.num_devices
    m, num_tensors = start_s.shape[0], graph.num_tensors
    phases = np.atleast_2d(placement)
    on = phases[np.arange(m) % len(phases)]  # [M, N]
    rows = np.arange(m)[:, None]
    # Lives [M, T, D]: begin, and end by the last reader there; nan where a tensor never is.
    begin = np.full((m, num_tensors, num_devices), np.nan)
    until = np.full((m, num_tensors, num_devices), -np.inf)
    users, read = graph.use_dst, graph.use_tensor
    for b in range(m):
        np.maximum.at(until[b], (read, on[b, users]), end_s[b, users])
    produced = np.flatnonzero(graph.tensor_src >= 0)
    source = graph.tensor_src[produced]
    home = on[:, source]
    begin[rows, produced, home] = start_s[:, source]
    until[rows, produced, home] = np.maximum(until[rows, produced, home], end_s[:, source])
    inputs = np.flatnonzero(graph.tensor_src < 0)
    begin[:, inputs] = np.where(np.isfinite(until[:, inputs]), admitted_s[:, None, None], np.nan)
    begin[transfers[:, 1], transfers[:, 0], transfers[:, 3]] = sent_s
    outputs = graph.output_tensor[graph.tensor_src[graph.output_tensor] >= 0]
    until[rows, outputs, on[:, graph.tensor_src[outputs]]] = end_s.max(axis=1)[:, None]

    peak = problem.resident_bytes_on(placement)
    lives = ~np.isnan(begin) & (storages.of_tensor >= 0)[:, None]
    for d in range(num_devices):
        row, t = np.nonzero(lives[:, :, d])
        key = row * len(storages.num_bytes) + storages.of_tensor[t]
        spans = joined(key, begin[row, t, d], until[row, t, d])
        size = storages.num_bytes[spans[0] % len(storages.num_bytes)]
        at = np.concatenate([spans[2], spans[1]])
        change = np.concatenate([-size, size])  # what ends at the same time goes first
        order = np.argsort(at, kind="stable")
        peak[d] += np.cumsum(change[order]).max(initial=0)
    return peak
