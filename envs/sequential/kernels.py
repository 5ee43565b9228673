"""Numba kernels of ``SequentialDevicePlacement-v0``: describe a group's choices, place it.

``construct`` makes whole placements with a policy's network inside: what ``agents.encoder`` scores
one group at a time through torch, in less than a tenth of the time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.problem_set import ProblemSet, group_order
from placement.bounds import fastest_end_s
from placement.problem import Problem
from placement.search.evaluation import device_classes
from placement.search.list_schedule import tables_of as list_tables_of
from placement.search.perceptron import add_rows, output
from placement.tools.jit import Struct, allocating, array, kernel

Array = NDArray[Any]

DEVICE_FEATURES = (
    "log cost: what the objective loses here above the best device, in mean group seconds, log1p",
    "finish: earliest finish over the lower bound of the critical path",
    "load: seconds of work with this group, over the total work per device",
    "load growth: how far the group raises the largest load, in mean group seconds, log1p",
    "transfer: seconds to bring the group's inputs here, in mean group seconds, log1p",
    "local: share of the input bytes that are already here",
    "memory: parameters with this group, over the device's capacity",
    "empty: 1 if no group is here yet",
    "progress: share of the groups that are placed",
)
NUM_DEVICE_FEATURES = len(DEVICE_FEATURES)
FEATURE_BOUND = 20.0


class Tables(Struct):
    """Every problem of a set, padded to the largest."""

    num_groups: Array  # int64 [P]
    num_devices: Array  # int64 [P]
    order: Array  # int32 [P, G] groups by priority
    group_ptr: Array  # int32 [P, G + 1] operators of a group, topological
    group_op: Array  # int32 [P, N]
    group: Array  # int32 [P, N] of each operator
    param_ptr: Array  # int64 [P, G + 1] distinct parameters of a group
    param: Array  # int64 [P, ...]
    param_bytes: Array  # int64 [P, parameters]
    in_ptr: Array  # int32 [P, N + 1]
    in_tensor: Array  # int32 [P, ...]
    tensor_src: Array  # int32 [P, T]
    tensor_bytes: Array  # float64 [P, T]
    compute_s: Array  # float64 [P, N, D]
    group_s: Array  # float64 [P, G, D]
    latency_s: Array  # float64 [P, D, D]
    s_per_byte: Array  # float64 [P, D, D]
    matrix_s: Array  # float64 [P, T, D, D], or of nobody [P, 0, 0, 0]
    has_matrix: Array  # bool [P]; without: latency and bandwidth
    capacity: Array  # float64 [P, D]
    device_class: Array  # int32 [P, D]
    host: Array  # int64 [P]
    shares_host: Array  # bool [P, D]
    optimistic_s: Array  # float64 [P, N] finish if everything were at its fastest
    unit_s: Array  # float64 [P] mean seconds of a group at its fastest
    path_s: Array  # float64 [P] lower bound of the critical path
    work_s: Array  # float64 [P] all groups at their fastest
    even_s: Array  # float64 [P] load of every device if all are equally busy; -1 = a latency


_LISTED = ("group", "param_ptr", "param", "param_bytes", "in_ptr", "in_tensor", "tensor_src",
           "tensor_bytes", "compute_s", "group_s", "latency_s", "s_per_byte", "matrix_s", "host",
           "shares_host")  # fmt: skip


class State(Struct):
    """``B`` episodes."""

    ids: Array = array("B", np.int64)
    step: Array = array("B", np.int64)
    choice: Array = array("B, G", np.int32, -1)
    finish_s: Array = array("B, N")  # (optimistic until placed)
    free_s: Array = array("B, D")
    load_s: Array = array("B, D")
    param_bytes: Array = array("B, D")
    held: Array = array("B, parameters, D", np.bool_)
    num_here: Array = array("B, D", np.int32)


def tables_of(chosen: ProblemSet) -> Tables:
    problems = chosen.problems
    listed = [list_tables_of(p, 0) for p in problems]
    fastest = [p.group_compute_s.min(axis=1) for p in problems]
    finish = [fastest_end_s(p) for p in problems]
    return Tables(
        num_groups=chosen.num_groups.astype(np.int64),
        num_devices=chosen.num_devices.astype(np.int64),
        order=stacked([group_order(p) for p in problems]),
        group_ptr=stacked([p.graph.group_ptr for p in problems]),
        group_op=stacked([p.graph.group_op for p in problems]),
        **{name: stacked([getattr(x, name) for x in listed]) for name in _LISTED},
        has_matrix=np.array([p.profile.transfer_s is not None for p in problems]),
        capacity=stacked([p.memory_bytes.astype(np.float64) for p in problems]),
        device_class=stacked([device_classes(p) for p in problems]),
        optimistic_s=stacked(finish),
        unit_s=np.array([max(f.mean(), 1e-15) for f in fastest]),
        path_s=np.array([max(f.max(), 1e-15) for f in finish]),
        work_s=np.array([max(f.sum(), 1e-15) for f in fastest]),
        even_s=np.array([_even_load_s(p) if p.objective.is_throughput else -1.0 for p in problems]),
    )


def stacked(rows: Sequence[Any]) -> Array:
    """``[P, ...]``: arrays of one dtype, padded with zeros that nobody reads."""
    arrays = [np.asarray(x) for x in rows]
    most = np.max([x.shape for x in arrays], axis=0).astype(int)
    padded = np.zeros((len(arrays), *most), arrays[0].dtype)
    for i, x in enumerate(arrays):
        padded[i, ...][tuple(map(slice, x.shape))] = x
    return padded


def _even_load_s(problem: Problem) -> float:
    """Seconds that every device works if each gets a share of all groups by its speed.

    What a device cannot run counts as ten times as long there: it gets less of the rest.
    """
    seconds = problem.group_compute_s
    fastest = seconds.min(axis=1)[:, None]
    everything = np.where(np.isfinite(seconds), seconds, 10.0 * fastest).sum(axis=0)
    return float(1.0 / (1.0 / np.maximum(everything, 1e-15)).sum())


@kernel
def _transfer_s(t, p, tensor, a, b):
    if a == b:
        return 0.0
    if t.has_matrix[p]:
        return t.matrix_s[p, tensor, a, b]
    return t.latency_s[p, a, b] + t.tensor_bytes[p, tensor] * t.s_per_byte[p, a, b]


@kernel
def _finish_on(t, s, b, group, device, scratch):
    """Run ``group`` on ``device`` after what is there: (end, transfer seconds, local, total bytes).

    ``scratch`` receives the end of each of the group's operators. An input whose producer is
    not placed yet arrives when it would at its fastest, without transfer. Channels are taken
    to be free: this is HEFT's estimate without insertion, not the simulator.
    """
    p = s.ids[b]
    clock = s.free_s[b, device]
    moved_s = local = total = 0.0
    for i in range(t.group_ptr[p, group], t.group_ptr[p, group + 1]):
        op = t.group_op[p, i]
        ready = 0.0
        for k in range(t.in_ptr[p, op], t.in_ptr[p, op + 1]):
            tensor = t.in_tensor[p, k]
            src = t.tensor_src[p, tensor]
            size = t.tensor_bytes[p, tensor]
            if src < 0:
                if not t.shares_host[p, device]:
                    cost = _transfer_s(t, p, tensor, np.int64(t.host[p]), device)
                    moved_s += cost
                    ready = max(ready, cost)
                continue
            producer = t.group[p, src]
            if producer == group:
                ready = max(ready, scratch[src])
                continue
            where = s.choice[b, producer]
            cost = 0.0
            total += size
            if where == device:
                local += size
            elif where >= 0:
                cost = _transfer_s(t, p, tensor, where, device)
                moved_s += cost
            ready = max(ready, s.finish_s[b, src] + cost)
        clock = max(clock, ready) + t.compute_s[p, op, device]
        scratch[op] = clock
    return clock, moved_s, local, total


@kernel
def _new_param_bytes(t, s, b, group, device):
    """Bytes of the group's parameters that ``device`` does not hold yet."""
    p = s.ids[b]
    new = 0.0
    for i in range(t.param_ptr[p, group], t.param_ptr[p, group + 1]):
        param = t.param[p, i]
        if not s.held[b, param, device]:
            new += t.param_bytes[p, param]
    return new


@kernel
def begin(t, s, rows, ids):
    """Start episodes ``rows`` with problems ``ids``: nothing is placed."""
    for r in range(len(rows)):
        b, p = rows[r], ids[r]
        s.ids[b] = p
        s.step[b] = 0
        s.choice[b] = -1
        s.free_s[b] = 0.0
        s.load_s[b] = 0.0
        s.param_bytes[b] = 0.0
        s.held[b] = False
        s.num_here[b] = 0
        for n in range(s.finish_s.shape[1]):
            s.finish_s[b, n] = t.optimistic_s[p, n]


@allocating
def describe(t, s, b, g, mask, features, bound, cost, scratch):
    """Fill mask ``[D]`` and features ``[D, F]`` of placing group ``g`` now (zeroed before).

    The cost of a device is when the group would end there, of a latency. Of a throughput it is
    the group's seconds, those that are moved, and by how much the load exceeds an even one:
    devices are filled one after another.
    ``cost`` float64 ``[D]`` and ``scratch`` float64 ``[N]`` are room to work in.
    """
    p = s.ids[b]
    devices = t.num_devices[p]
    unit = t.unit_s[p]
    largest = s.load_s[b, :devices].max()
    best = np.inf
    fits = 0
    for d in range(devices):
        seconds = t.group_s[p, g, d]
        cost[d] = np.inf
        if not np.isfinite(seconds):
            continue
        held = s.param_bytes[b, d] + _new_param_bytes(t, s, b, g, d)
        first = True
        if s.num_here[b, d] == 0:
            for e in range(d):
                same = t.device_class[p, e] == t.device_class[p, d]
                if same and s.num_here[b, e] == 0:
                    first = False
        if first:
            mask[d] = 2 if held <= t.capacity[p, d] else 1
            fits += mask[d] == 2
        end, moved_s, local, total = _finish_on(t, s, b, g, d, scratch)
        load = s.load_s[b, d] + seconds
        cost[d] = end
        if t.even_s[p] > 0.0:
            cost[d] = max(0.0, load - t.even_s[p]) + moved_s + seconds
        best = min(best, cost[d])
        f = features[d]
        f[1] = end / t.path_s[p]
        f[2] = load * devices / t.work_s[p]
        f[3] = np.log1p(max(0.0, load - largest) / unit)
        f[4] = np.log1p(moved_s / unit)
        f[5] = local / total if total > 0.0 else 0.0
        f[6] = held / t.capacity[p, d]
        f[7] = 1.0 if s.num_here[b, d] == 0 else 0.0
        f[8] = s.step[b] / t.num_groups[p]
    for d in range(devices):
        # Where a parameter fits nowhere, every device that can run the group is legal.
        mask[d] = 1 if mask[d] == 2 or (fits == 0 and mask[d] == 1) else 0
        if np.isfinite(cost[d]):
            features[d, 0] = np.log1p((cost[d] - best) / unit)
        for i in range(features.shape[1]):
            features[d, i] = min(features[d, i], bound)


@kernel
def place(t, s, b, g, d, scratch):
    """Put group ``g`` of episode ``b`` on device ``d``."""
    p = s.ids[b]
    s.param_bytes[b, d] += _new_param_bytes(t, s, b, g, d)
    s.free_s[b, d] = _finish_on(t, s, b, g, d, scratch)[0]
    for i in range(t.group_ptr[p, g], t.group_ptr[p, g + 1]):
        op = t.group_op[p, i]
        s.finish_s[b, op] = scratch[op]
    for i in range(t.param_ptr[p, g], t.param_ptr[p, g + 1]):
        s.held[b, t.param[p, i], d] = True
    s.load_s[b, d] += t.group_s[p, g, d]
    s.num_here[b, d] += 1
    s.choice[b, g] = d
    s.step[b] += 1


@allocating
def observe(t, s, group, mask, features, bound):
    """Fill group ``[B, 1]``, mask ``[B, D]`` and features ``[B, D, F]`` (zeroed by the caller)."""
    scratch = np.empty(s.finish_s.shape[1])
    cost = np.empty(mask.shape[1])
    for b in range(len(s.ids)):
        p = s.ids[b]
        if s.step[b] >= t.num_groups[p]:  # over, and not started again: anything legal will do
            mask[b, 0] = 1
            continue
        g = np.int64(t.order[p, s.step[b]])
        group[b, 0] = g
        describe(t, s, b, g, mask[b], features[b], bound, cost, scratch)


@allocating
def act(t, s, actions, mask, done):
    scratch = np.empty(s.finish_s.shape[1])
    for b in range(len(s.ids)):
        p, d = s.ids[b], actions[b]
        if s.step[b] >= t.num_groups[p] or d < 0 or d >= mask.shape[1] or mask[b, d] == 0:
            done[b] = True
            continue
        # As int64 everywhere: kernels are compiled for every integer type that they are given.
        place(t, s, b, np.int64(t.order[p, s.step[b]]), d, scratch)
        done[b] = s.step[b] == t.num_groups[p]


def state_of(problems: ProblemSet, num_envs: int) -> State:
    """Room for ``num_envs`` episodes."""
    each = problems.problems
    sizes = {"B": num_envs, "D": problems.max_devices, "G": problems.max_groups}
    sizes |= {"N": max(p.num_ops for p in each)}
    sizes |= {"parameters": max(len(p.graph.param_bytes) for p in each)}
    return State.fresh(sizes)


@allocating
def construct(t, s, net, pair, warm, greedy, rng, bound):
    """Place every group of episodes that have begun, as ``PlacementNet.step_logits`` scores them.

    ``net``: (groups [P, G, H], devices [P, D, H], by_pair [Fp, H], by_state [F, H], hidden [H, H],
    hidden_bias [H], out [H], out_bias and weight of the log finish without a warm start [2],
    share of the groups that leave the warm start [P]), float32; ``pair`` float32
    ``[P, G, D, Fp]``; ``warm`` bool ``[P, G, D]`` where the warm start has a group, if there is
    one. Where ``greedy`` bool ``[B]`` is False the device is drawn from the softmax.
    """
    groups, devices, by_pair, by_state, hidden, hidden_bias, out, constants, moving = net
    size, width = len(hidden_bias), s.free_s.shape[1]
    scratch, cost = np.empty(s.finish_s.shape[1]), np.empty(width)
    mask = np.zeros(width, np.int8)
    features = np.zeros((width, by_state.shape[0]), np.float32)
    first, second = np.empty(size, np.float32), np.empty(size, np.float32)
    for b in range(len(s.ids)):
        p = s.ids[b]
        while s.step[b] < t.num_groups[p]:
            g = np.int64(t.order[p, s.step[b]])
            mask[:] = 0
            features[:] = 0.0
            describe(t, s, b, g, mask, features, bound, cost, scratch)
            others = max(mask.sum() - 1, 1)
            cold = not warm[p, g].any()
            chosen, highest = np.int64(0), -np.inf
            for d in range(t.num_devices[p]):
                if mask[d] == 0:
                    continue
                for j in range(size):
                    first[j] = groups[p, g, j] + devices[p, d, j]
                add_rows(first, pair[p, g, d], by_pair)
                add_rows(first, features[d], by_state)
                score = output(float(constants[0]), first, second, hidden, hidden_bias, out)
                if warm[p, g, d]:
                    score += np.log(others * (1.0 - moving[p]) / moving[p])
                elif cold:
                    score -= constants[1] * features[d, 0]
                if not greedy[b]:
                    score -= np.log(-np.log(min(max(rng.random(), 1e-10), 1.0 - 1e-7)))
                if score > highest:
                    chosen, highest = np.int64(d), score
            place(t, s, b, g, chosen, scratch)
