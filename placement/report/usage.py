"""What devices do over time: busy share and bytes held, of predicted and measured timelines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from placement.problem import Problem, host_of
from placement.timeline import Timeline, joined

Floats = NDArray[np.float64]
Steps = tuple[Floats, NDArray[np.int64]]  # [K] seconds, and [K] bytes from then on


def busy_share(timeline: Timeline, num_bins: int) -> Floats:
    """float64 ``[D, num_bins]``: busy share of equal slices of the run, from its begin."""
    edges = timeline.begin_s + np.linspace(0.0, timeline.makespan_s, num_bins + 1)
    width = max(timeline.makespan_s / num_bins, 1e-300)
    return np.stack(
        [
            np.diff(_done(timeline, timeline.device_of == d, edges)) / width
            for d in range(len(timeline.device_names))
        ]
    ).clip(0.0, 1.0)


def _done(timeline: Timeline, ran: NDArray[np.bool_], edges: Floats) -> Floats:
    """Seconds that these, of ``[M, N]``, have worked until each edge, float64 ``[len(edges)]``."""
    done = np.zeros(len(edges))
    for times, sign in ((timeline.start_s, 1.0), (timeline.end_s, -1.0)):
        when = np.sort(times[ran])
        before = np.append(0.0, np.cumsum(when))
        k = np.searchsorted(when, edges)
        done += sign * (k * edges - before[k])  # sum of (edge - when) over when < edge
    return done


def memory_steps(problem: Problem, timeline: Timeline, max_in_flight: int) -> list[Steps]:
    """Bytes that each device holds over the run: ``[D]`` step functions.

    The rules are the simulator's: at home a tensor lives in its root's memory, which is held
    while any tensor in it is; a copy sent elsewhere is its own; parameters and what libraries keep
    stay; workspace is held while an operator runs. So the largest step of a predicted timeline is
    its ``peak_bytes``. Of a measured one it says what the graph's tensors take at measured times.
    """
    g = problem.graph
    # What replicas have added up is added where it arrives: no memory beside the gradients'.
    rows = ~np.isin(timeline.transfers[:, 0], g.gradient_tensor)
    timeline = replace(
        timeline,
        transfers=timeline.transfers[rows],
        transfer_start_s=timeline.transfer_start_s[rows],
        transfer_end_s=timeline.transfer_end_s[rows],
    )
    home, away = _local_spans(problem, timeline, max_in_flight), _sent_spans(problem, timeline)
    stored, batch, device, begin, until = map(np.concatenate, zip(home, away, strict=True))
    shape = g.num_tensors, timeline.num_microbatches, problem.num_devices
    key, begin, until = joined(np.ravel_multi_index((stored, batch, device), shape), begin, until)
    stored, _, device = np.unravel_index(key, shape)
    size = g.tensor_bytes[stored]
    if problem.profile.workspace_bytes is not None:
        device = np.append(device, timeline.device_of.ravel())
        begin, until = np.append(begin, timeline.start_s), np.append(until, timeline.end_s)
        workspace = np.broadcast_to(problem.profile.workspace_bytes, timeline.start_s.shape)
        size = np.append(size, workspace.ravel())
    stays = problem.resident_bytes_on(timeline.placement)
    return [
        _steps(begin[device == d], until[device == d], size[device == d], int(stays[d]))
        for d in range(problem.num_devices)
    ]


def _steps(begin: Floats, until: Floats, size: NDArray[np.int64], always: int) -> Steps:
    when, change = np.append(begin, until), np.append(size, -size)
    order = np.lexsort((change, when))  # what is let go at a moment is free for what comes then
    when, held = when[order], always + np.cumsum(change[order])
    return np.append(-np.inf, when), np.append(always, held)


Spans = tuple[NDArray, NDArray, NDArray, Floats, Floats]  # tensor, batch, device, begin, until


def _local_spans(problem: Problem, timeline: Timeline, max_in_flight: int) -> Spans:
    """Where tensors are produced, and model inputs on the devices that share the host's memory."""
    g, on, end = problem.graph, timeline.device_of.T, timeline.end_s
    m, t, d = timeline.num_microbatches, g.num_tensors, problem.num_devices
    batches = np.arange(m)
    until = np.full((t, d, m), -np.inf)  # last local use
    for tensor, op in zip(g.use_tensor, g.use_dst, strict=True):
        at = tensor, on[op], batches
        until[at] = np.maximum(until[at], end[:, op])
    produced = np.flatnonzero(g.tensor_src >= 0)
    src = g.tensor_src[produced]
    last = np.maximum(until[produced[:, None], on[src], batches], end[:, src].T)
    leaves = np.isin(produced, g.output_tensor)
    last[leaves] = np.maximum(last[leaves], end.max(axis=1))
    sent = np.full((t, m), -np.inf)
    np.maximum.at(sent, tuple(timeline.transfers[:, :2].T), timeline.transfer_end_s)
    last = np.maximum(last, sent[produced])
    shares_host = np.flatnonzero(host_of(problem)[1])
    inputs = [
        (x, c)
        for x in np.flatnonzero(g.tensor_src < 0)
        for c in shares_host
        if until[x, c].max() > -np.inf
    ]
    which, cpu = np.array(inputs, np.int64).reshape(-1, 2).T
    admitted = np.broadcast_to(_admitted_s(timeline, max_in_flight), (len(which), m))
    reach = np.append(last, until[which, cpu])
    used = reach > -np.inf  # an input may be used here in some phases only
    return (
        np.repeat(g.tensor_root[np.append(produced, which)], m)[used],
        np.tile(batches, len(produced) + len(which))[used],
        np.append(on[src], np.repeat(cpu, m))[used],
        np.append(timeline.start_s[:, src].T, admitted)[used],
        reach[used],
    )


def _admitted_s(timeline: Timeline, max_in_flight: int) -> Floats:
    """float64 ``[M]``: a micro-batch begins when one of those before it has finished."""
    done = np.sort(timeline.end_s.max(axis=1))
    waits = max(0, timeline.num_microbatches - max_in_flight)
    first = min(0.0, timeline.begin_s)
    return np.append(np.full(timeline.num_microbatches - waits, first), done[:waits])


def _sent_spans(problem: Problem, timeline: Timeline) -> Spans:
    """Copies on other devices, from the begin of the transfer to the last use there."""
    g, on = problem.graph, timeline.device_of
    tensor, batch, _, device = timeline.transfers.astype(np.int64).T
    until = np.full(len(tensor), -np.inf)
    for position in range(int(np.diff(g.use_ptr).max(initial=0))):
        at = g.use_ptr[tensor] + position
        valid = at < g.use_ptr[tensor + 1]
        op = g.use_dst[np.minimum(at, len(g.use_dst) - 1)]
        here = valid & (on[batch, op] == device)
        until[here] = np.maximum(until[here], timeline.end_s[batch[here], op[here]])
    stored = np.where(g.tensor_src[tensor] >= 0, tensor, g.tensor_root[tensor])
    return stored, batch, device, timeline.transfer_start_s, until


def largest(steps: Steps, edges: Floats) -> NDArray[np.int64]:
    """int64 ``[len(edges) - 1]``: the most that is held between two edges."""
    when, held = steps
    first = np.searchsorted(when, edges[:-1], side="right") - 1  # what is held at the left edge
    most = held[first]
    inside = np.searchsorted(edges, when, side="right") - 1
    valid = (inside >= 0) & (inside < len(most))
    np.maximum.at(most, inside[valid], held[valid])
    return most
