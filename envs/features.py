"""What a policy sees of a problem: numbers without units, so that scale does not matter.

Times are logarithms of ratios to the graph's mean group, or shares of its totals, so that the
same graph on a machine of half the speed, or twice as long a model, looks the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.problem_set import group_order
from placement.problem import Placement, Problem
from placement.search.evaluation import device_classes

OBJECTIVE_FEATURES = (
    "1 if the objective is a throughput",
    "1 if it is of loads alone, without a timeline",
    "log micro-batches in flight, of a pipeline",
)
GROUP_FEATURES = (
    "log seconds over the mean group",
    "share of the seconds",
    "top level over the critical path (longest way here)",
    "bottom level over the critical path (longest way out)",
    "slack over the critical path",
    "log transfer seconds of the outputs over the mean group",
    "log transfer seconds of the inputs over the mean group",
    "log transfer seconds of the outputs over own seconds",
    "share of the parameter bytes",
    "share of the tensor bytes",
    "log slowest over fastest device",
    "log number of producers",
    "log number of consumers",
    "log number of operators",
    "share of backward operators",
    "position by priority",
    "log transfer seconds of all that is alive after it (a cut here) over the mean group",
    "share of the seconds up to it",
    "share of the bytes up to it",
    "log bytes of parameters and outputs over the mean device's memory per group",
    *OBJECTIVE_FEATURES,
)
DEVICE_FEATURES = (
    "log seconds of everything here over the fastest device",
    "log memory over the parameters of everything",
    "log memory over an equal share of all parameters and of the tensors in flight",
    "log mean seconds to send the mean tensor out over the mean group",
    "log mean seconds to receive it",
    "share of the warm start's work",
    "interchangeable devices before this one, over the devices",
    *OBJECTIVE_FEATURES,
)
PAIR_FEATURES = (
    "log seconds here over the fastest device",
    "log seconds here over the mean group",
    "parameters over the device's memory",
    "1 if the warm start puts it here",
    "share of the neighbours' bytes that the warm start has here",
    "log transfer seconds if only this group moved here, over the mean group",
    "1 if there is a warm start",
)


@dataclass(frozen=True, eq=False)
class Features:
    """Features of one problem: ``G`` groups, ``D`` devices, ``E`` edges between groups.

    Attributes:
        group: float32 ``[G, 23]``.
        device: float32 ``[D, 10]``.
        pair: float32 ``[G, D, 7]``.
        edges: int64 ``[2, E]`` producer and consumer, distinct; may have cycles.
        edge: float32 ``[E, 2]`` log transfer seconds over the mean group, share of the bytes.
        legal: bool ``[G, D]``.
    """

    group: NDArray[np.float32]
    device: NDArray[np.float32]
    pair: NDArray[np.float32]
    edges: NDArray[np.int64]
    edge: NDArray[np.float32]
    legal: NDArray[np.bool_]


def features(problem: Problem, warm: Placement | None = None) -> Features:
    """Features of ``problem``; the policy starts at the placement ``warm`` int32 ``[N]``."""
    costs, traffic = _costs(problem), traffic_of(problem)
    choice = np.full(problem.graph.num_groups, -1, np.int64)
    if warm is not None:
        choice[problem.graph.group] = warm
    edge = [
        _log(np.bincount(traffic.which, traffic.move_s, len(traffic.edges)), costs.unit),
        _share(np.bincount(traffic.which, traffic.size, len(traffic.edges))),
    ]
    return Features(
        group=_group_features(problem, costs, traffic).astype(np.float32),
        device=_device_features(problem, costs, choice).astype(np.float32),
        pair=_pair_features(problem, costs, traffic, choice).astype(np.float32),
        edges=np.ascontiguousarray(traffic.edges.T, dtype=np.int64),
        edge=np.stack(edge, axis=1).astype(np.float32),
        legal=costs.legal,
    )


class _Costs(NamedTuple):
    """Seconds of groups, and what they are measured by."""

    finite: NDArray[np.float64]  # [G, D] seconds, 0 where a group cannot run
    legal: NDArray[np.bool_]  # [G, D]
    mean: NDArray[np.float64]  # [G] over the devices where it can run
    fastest: NDArray[np.float64]  # [G]
    unit: float  # seconds of the mean group
    objective: tuple[float, ...]  # OBJECTIVE_FEATURES


def _costs(problem: Problem) -> _Costs:
    seconds = problem.group_compute_s
    legal = np.isfinite(seconds)
    finite = np.where(legal, seconds, 0.0)
    mean = finite.sum(axis=1) / legal.sum(axis=1)
    in_flight = min(problem.max_in_flight, problem.num_microbatches)
    objective = (
        problem.objective.is_throughput,
        problem.objective.is_analytic,
        np.log(in_flight) if problem.objective.is_pipelined else 0.0,
    )
    unit = max(float(mean.mean()), 1e-15)
    return _Costs(finite, legal, mean, seconds.min(axis=1), unit, objective)


class _Traffic(NamedTuple):
    """Tensors between different groups; one counts once per pair, however many operators use it."""

    src: NDArray[Any]  # [K] producing group
    dst: NDArray[Any]  # [K] using group
    move_s: NDArray[np.float64]  # [K] mean transfer seconds
    size: NDArray[np.float64]  # [K] bytes
    edges: NDArray[Any]  # [E, 2] distinct pairs
    which: NDArray[Any]  # [K] the edge of each


def traffic_of(problem: Problem) -> _Traffic:
    """What goes from group to group."""
    g = problem.graph
    src, dst = g.tensor_src[g.use_tensor], g.use_dst
    produced = src >= 0
    tensor = g.use_tensor[produced]
    a, b = g.group[src[produced]], g.group[dst[produced]]
    apart = a != b
    rows = np.unique(np.stack([tensor[apart], a[apart], b[apart]], axis=1), axis=0)
    tensor, a, b = rows[:, 0], rows[:, 1], rows[:, 2]
    edges, which = np.unique(rows[:, 1:], axis=0, return_inverse=True)
    size = g.tensor_bytes[tensor].astype(np.float64)
    return _Traffic(a, b, problem.mean_transfer_s[tensor], size, edges, which.reshape(-1))


def _group_features(problem: Problem, costs: _Costs, traffic: _Traffic) -> NDArray[np.float64]:
    """float64 ``[G, len(GROUP_FEATURES)]``."""
    g, groups = problem.graph, problem.graph.num_groups
    mean, fastest, unit = costs.mean, costs.fastest, costs.unit
    sent_s = np.bincount(traffic.src, traffic.move_s, groups)
    received_s = np.bincount(traffic.dst, traffic.move_s, groups)
    out_bytes = np.bincount(traffic.src, traffic.size, groups)
    top, bottom, through = _levels(problem)
    path = max(float(through.max()), 1e-15)
    position = np.empty(groups)
    position[group_order(problem)] = np.arange(groups)
    params = np.bincount(g.group, g.op_param_bytes, groups)
    count = np.bincount(g.group, minlength=groups)
    columns = [
        _log(mean, unit),
        mean / max(mean.sum(), 1e-15) * groups / 4,
        top / path,
        bottom / path,
        1 - through / path,
        _log(sent_s, unit),
        _log(received_s, unit),
        _log(sent_s, np.maximum(mean, 1e-3 * unit)),
        _share(params),
        _share(out_bytes),
        _log(costs.finite.max(axis=1), np.maximum(fastest, 1e-3 * unit)),
        np.log1p(np.bincount(traffic.edges[:, 1], minlength=groups)),
        np.log1p(np.bincount(traffic.edges[:, 0], minlength=groups)),
        np.log(count),
        np.bincount(g.group, g.is_backward, groups) / count,
        position / groups,
        _log(_cut_s(problem), unit),
        *_so_far(problem, mean, params + out_bytes),
        _log((params + out_bytes) * groups, float(problem.memory_bytes.mean())),
        *(np.full(groups, x) for x in costs.objective),
    ]
    return np.stack(columns, axis=1)


def _device_features(
    problem: Problem, costs: _Costs, choice: NDArray[np.int64]
) -> NDArray[np.float64]:
    """float64 ``[D, len(DEVICE_FEATURES)]``; ``choice`` int64 ``[G]``: of the warm start, or -1."""
    devices, g = problem.num_devices, problem.graph
    in_flight = min(problem.max_in_flight, problem.num_microbatches)
    everything = np.where(costs.legal, costs.finite, costs.fastest[:, None]).sum(axis=0)
    capacity = problem.memory_bytes.astype(np.float64)
    parameters = float(g.param_bytes.sum())
    send_s, receive_s = _link_s(problem)
    load = np.zeros(devices)
    if choice[0] >= 0:
        np.add.at(load, choice, costs.fastest)
    classes = device_classes(problem)
    columns = [
        _log(everything, everything.min()),
        _log(capacity, parameters),
        _log(capacity * devices, parameters + in_flight * g.tensor_bytes.sum()),
        _log(send_s, costs.unit),
        _log(receive_s, costs.unit),
        load / max(load.sum(), 1e-15),
        np.tril(classes[:, None] == classes, -1).sum(axis=1) / devices,
        *(np.full(devices, x) for x in costs.objective),
    ]
    return np.stack(columns, axis=1)


def _pair_features(
    problem: Problem, costs: _Costs, traffic: _Traffic, choice: NDArray[np.int64]
) -> NDArray[np.float64]:
    """float64 ``[G, D, len(PAIR_FEATURES)]``; ``choice`` as in ``_device_features``."""
    shape = groups, devices = costs.legal.shape
    params = np.bincount(problem.graph.group, problem.graph.op_param_bytes, groups)
    held, near, cut_s = np.zeros((3, *shape))
    is_warm = choice[0] >= 0
    if is_warm:
        a, b = traffic.src, traffic.dst
        held[np.arange(groups), choice] = 1.0
        np.add.at(near, (a, choice[b]), traffic.size)
        np.add.at(near, (b, choice[a]), traffic.size)
        near /= np.maximum(near.sum(axis=1, keepdims=True), 1.0)
        for d in range(devices):
            cut_s[:, d] = np.bincount(a, traffic.move_s * (choice[b] != d), groups)
            cut_s[:, d] += np.bincount(b, traffic.move_s * (choice[a] != d), groups)
    columns = [
        _log(costs.finite, np.maximum(costs.fastest, 1e-3 * costs.unit)[:, None]),
        _log(costs.finite, costs.unit),
        np.minimum(params[:, None] / problem.memory_bytes.astype(np.float64), 2.0),
        held,
        near,
        _log(cut_s, costs.unit),
        np.full(shape, float(is_warm)),
    ]
    return np.stack(columns, axis=2)


def _log(value: Any, unit: Any) -> NDArray[np.float64]:
    """log(value / unit), bounded so that nothing and infinity stay numbers."""
    ratio = np.asarray(value, dtype=np.float64) / np.maximum(unit, 1e-280)
    return np.log(np.clip(ratio, 1e-3, 1e4))


def _share(value: NDArray[Any]) -> NDArray[np.float64]:
    """Share of the total, times the number of rows: 1 is the mean; log1p of it."""
    return np.log1p(value / max(float(value.sum()), 1e-300) * len(value))


def _levels(problem: Problem) -> tuple[NDArray[np.float64], ...]:
    """Longest ways at HEFT's mean costs, float64 ``[G]`` each.

    To the first operator of a group; from any of them to the end; through any of them.
    """
    g = problem.graph
    top, bottom = problem.downward_rank_s, problem.upward_rank_s
    first = g.per_group(top, np.minimum, np.inf)
    return first, g.per_group(bottom, np.maximum), g.per_group(top + bottom, np.maximum)


def _cut_s(problem: Problem) -> NDArray[np.float64]:
    """float64 ``[G]`` seconds to move all that is alive after the last operator of each group."""
    g = problem.graph
    n = g.num_ops
    used = np.diff(g.use_ptr) > 0
    last = np.zeros(g.num_tensors, np.int64)
    np.maximum.at(last, g.use_tensor, g.use_dst)
    first = np.maximum(g.tensor_src, -1) + 1  # alive between operator first - 1 and last
    change = np.bincount(first[used], problem.mean_transfer_s[used], n + 1)
    change -= np.bincount(last[used] + 1, problem.mean_transfer_s[used], n + 2)[: n + 1]
    alive = np.maximum(np.cumsum(change)[1:], 0.0)
    return alive[_last_op(problem)]


def _so_far(problem: Problem, *amounts: NDArray[Any]) -> list[NDArray[np.float64]]:
    """Of each amount ``[G]`` its share in the groups that end no later, float64 ``[G]``."""
    order = np.argsort(_last_op(problem), kind="stable")
    shares = []
    for amount in amounts:
        share = np.empty(len(order))
        share[order] = np.cumsum(amount[order]) / max(float(amount.sum()), 1e-300)
        shares.append(share)
    return shares


def _last_op(problem: Problem) -> NDArray[np.int64]:
    return problem.graph.per_group(np.arange(problem.num_ops), np.maximum)


def _link_s(problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64 ``[D]`` mean seconds to send, and to receive, the mean tensor."""
    devices = problem.num_devices
    transfer_s = problem.profile.transfer_s
    if transfer_s is not None:
        seconds = transfer_s.mean(axis=0) if len(transfer_s) else np.zeros((devices, devices))
    else:
        sizes = problem.graph.tensor_bytes
        mean = float(sizes.mean()) if len(sizes) else 0.0
        seconds = problem.link_latency_s + mean * problem.link_s_per_byte
    seconds = np.where(np.eye(devices, dtype=bool), 0.0, seconds)
    others = max(devices - 1, 1)
    return seconds.sum(axis=1) / others, seconds.sum(axis=0) / others
