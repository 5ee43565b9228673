"""Numba kernels of ``SequentialDevicePlacement-v0``: describe a group's choices, place it.

``construct`` makes whole placements with a policy's network inside: what ``agents.encoder`` scores
one group at a time through torch, in less than a tenth of the time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba as nb
import numpy as np
from numpy.typing import NDArray

from envs.problems import ProblemSet, choice_of, group_order
from placement.planners._search import device_classes
from placement.problem import Placement, Problem
from placement.simulator import host_of

Array = NDArray[Any]

DEVICE_FEATURES = (
    "log finish: earliest finish above the best device's, in mean group seconds, log1p",
    "finish: earliest finish over the lower bound of the critical path",
    "load: seconds of work with this group, over the total work per device",
    "load growth: how far the group raises the largest load, in mean group seconds, log1p",
    "transfer: seconds to bring the group's inputs here, in mean group seconds, log1p",
    "local: share of the input bytes that are already here",
    "memory: parameters with this group, over the device's capacity",
    "empty: 1 if no group is here yet",
    "progress: share of the groups that are placed",
    "log path: longest path through the group, on to where its users are or will be, above that "
    "through the best device, in mean group seconds, log1p",
    "path: the same path over the plan's longest",
    "planned growth: largest load once all are placed, above that with the best device, in mean "
    "group seconds, log1p",
    "planned load: this device's load once all are placed, over the total work per device",
    "sent: seconds to bring the group's outputs to where their users are or will be, in mean "
    "group seconds, log1p",
)
NUM_DEVICE_FEATURES = len(DEVICE_FEATURES)
FEATURE_BOUND = 20.0


class Tables(NamedTuple):
    """Every problem of a set, one after another; ``*_at [P + 1]`` is where each begins."""

    num_groups: Array  # int64 [P]
    num_devices: Array  # int64 [P]
    op_at: Array  # int64 [P + 1]
    tensor_at: Array
    group_at: Array
    order: Array  # int32 [sum G] groups by priority
    group_ptr: Array  # int32 [sum (G + 1)] operators of a group, topological
    group_op: Array  # int32 [sum N]
    group_of: Array  # int32 [sum N]
    param_ptr: Array  # int32 [sum (G + 1)] distinct parameters of a group
    param_at: Array  # int64 [P + 1] into group_param
    group_param: Array
    size_at: Array  # int64 [P + 1] into param_bytes
    param_bytes: Array  # float64
    in_ptr: Array  # int32 [sum (N + 1)]
    use_at: Array  # int64 [P + 1] into in_tensor and use_dst
    in_tensor: Array  # int32
    out_ptr: Array  # int32 [sum (N + 1)]
    made_at: Array  # int64 [P + 1] into out_tensor
    out_tensor: Array  # int32
    dst_ptr: Array  # int32 [sum (T + 1)] into use_dst
    use_dst: Array  # int32
    tensor_src: Array  # int32
    tensor_bytes: Array  # float64
    compute_s: Array  # float64 [sum N, D]
    group_s: Array  # float64 [sum G, D]
    latency_s: Array  # float64 [P, D, D]
    s_per_byte: Array  # float64 [P, D, D]
    matrix_at: Array  # int64 [P] into matrix, -1 = use latency and bandwidth
    matrix: Array  # float64
    capacity: Array  # float64 [P, D]
    device_class: Array  # int32 [P, D]
    host: Array  # int64 [P]
    shares_host: Array  # bool [P, D]
    optimistic_s: Array  # float64 [sum N] finish if everything were at its fastest
    unit_s: Array  # float64 [P] mean seconds of a group at its fastest
    path_s: Array  # float64 [P] lower bound of the critical path
    work_s: Array  # float64 [P] all groups at their fastest
    plan: Array  # int32 [sum G] where a group will be if nothing else is decided, -1 = not known
    rank_s: Array  # float64 [sum N] from an operator's start to the end, everything as planned
    send_s: Array  # float64 [sum T] a transfer where one end is not known
    rest_s: Array  # float64 [P, D] work of the plan on each device; of none: equal shares
    planned: Array  # bool [P, D] the plan uses the device
    longest_s: Array  # float64 [P] of the plan: its longest path or its largest load


class State(NamedTuple):
    """``B`` episodes."""

    ids: Array  # int64 [B]
    step: Array  # int64 [B]
    choice: Array  # int32 [B, G]
    finish_s: Array  # float64 [B, N] (optimistic until placed)
    free_s: Array  # float64 [B, D]
    load_s: Array  # float64 [B, D]
    rest_s: Array  # float64 [B, D] work that the plan still has there
    param_bytes: Array  # float64 [B, D]
    held: Array  # bool [B, parameters, D]
    num_here: Array  # int32 [B, D]


def tables_of(chosen: ProblemSet, plans: Sequence[Placement | None] | None = None) -> Tables:
    """Tables of ``chosen``; ``plans[i]`` int32 ``[N]`` or None is what its policy starts from."""
    problems, width = chosen.problems, chosen.max_devices

    def starts(sizes: list[int]) -> Array:
        return np.cumsum([0, *sizes]).astype(np.int64)

    def devices(rows: list[Array], fill: float) -> Array:
        padded = [
            np.pad(
                np.asarray(r, np.float64),
                [(0, 0)] * (np.ndim(r) - 1) + [(0, width - np.shape(r)[-1])],
                constant_values=fill,
            )
            for r in rows
        ]
        return np.concatenate(padded) if np.ndim(rows[0]) == 2 else np.stack(padded)

    def square(rows: list[Array]) -> Array:
        return np.stack([np.pad(r, (0, width - len(r))) for r in rows]).astype(np.float64)

    def flat(rows: list[Array], dtype: type) -> Array:
        return np.concatenate([np.reshape(r, -1) for r in rows]).astype(dtype)

    by_group = [np.argsort(p.graph.group, kind="stable") for p in problems]
    group_ptr = [
        np.searchsorted(p.graph.group[ops], np.arange(p.graph.num_groups + 1))
        for p, ops in zip(problems, by_group, strict=True)
    ]
    pairs = [
        np.unique(np.stack([p.graph.group[p.graph.param_use_op], p.graph.param_use], 1), axis=0)
        for p in problems
    ]
    param_ptr = [
        np.searchsorted(q[:, 0], np.arange(p.graph.num_groups + 1))
        for p, q in zip(problems, pairs, strict=True)
    ]
    matrices = [p.profile.transfer_s for p in problems]
    sizes = [0 if m is None else m.size for m in matrices]
    matrix_at = np.where([m is None for m in matrices], -1, starts(sizes)[:-1])
    fastest = [p.group_compute_s.min(axis=1) for p in problems]
    finish = [_optimistic_finish_s(p) for p in problems]
    hosts = [host_of(p) for p in problems]
    given = plans or [None] * len(problems)
    planned = [_planned(p, plan) for p, plan in zip(problems, given, strict=True)]
    return Tables(
        num_groups=chosen.num_groups.astype(np.int64),
        num_devices=chosen.num_devices.astype(np.int64),
        op_at=starts([p.num_ops for p in problems]),
        tensor_at=starts([p.graph.num_tensors for p in problems]),
        group_at=starts([p.graph.num_groups for p in problems]),
        order=flat([group_order(p) for p in problems], np.int32),
        group_ptr=flat(group_ptr, np.int32),
        group_op=flat(by_group, np.int32),
        group_of=flat([p.graph.group for p in problems], np.int32),
        param_ptr=flat(param_ptr, np.int32),
        param_at=starts([len(q) for q in pairs]),
        group_param=flat([q[:, 1] for q in pairs], np.int32),
        size_at=starts([len(p.graph.param_bytes) for p in problems]),
        param_bytes=flat([p.graph.param_bytes for p in problems], np.float64),
        in_ptr=flat([p.graph.in_ptr for p in problems], np.int32),
        use_at=starts([len(p.graph.in_tensor) for p in problems]),
        in_tensor=flat([p.graph.in_tensor for p in problems], np.int32),
        out_ptr=flat([p.graph.out_ptr for p in problems], np.int32),
        made_at=starts([len(p.graph.out_tensor) for p in problems]),
        out_tensor=flat([p.graph.out_tensor for p in problems], np.int32),
        dst_ptr=flat([p.graph.use_ptr for p in problems], np.int32),
        use_dst=flat([p.graph.use_dst for p in problems], np.int32),
        tensor_src=flat([p.graph.tensor_src for p in problems], np.int32),
        tensor_bytes=flat([p.graph.tensor_bytes for p in problems], np.float64),
        compute_s=devices([p.compute_s for p in problems], np.inf),
        group_s=devices([p.group_compute_s for p in problems], np.inf),
        latency_s=square([p.link_latency_s for p in problems]),
        s_per_byte=square([p.link_s_per_byte for p in problems]),
        matrix_at=matrix_at.astype(np.int64),
        matrix=flat([m for m in matrices if m is not None] or [np.zeros(0)], np.float64),
        capacity=devices([p.memory_bytes for p in problems], 1.0),
        device_class=devices([device_classes(p) for p in problems], -1).astype(np.int32),
        host=np.array([h for h, _ in hosts], np.int64),
        shares_host=devices([s for _, s in hosts], 1.0).astype(bool),
        optimistic_s=flat(finish, np.float64),
        unit_s=np.array([max(f.mean(), 1e-15) for f in fastest]),
        path_s=np.array([max(f.max(), 1e-15) for f in finish]),
        work_s=np.array([max(f.sum(), 1e-15) for f in fastest]),
        plan=flat([choice for choice, _, _ in planned], np.int32),
        rank_s=flat([rank for _, rank, _ in planned], np.float64),
        send_s=flat([p.mean_transfer_s for p in problems], np.float64),
        rest_s=devices([rest for _, _, rest in planned], 0.0),
        planned=devices(
            [
                np.isin(np.arange(p.num_devices), c)
                for p, (c, _, _) in zip(problems, planned, strict=True)
            ],
            0.0,
        ).astype(bool),
        longest_s=np.array([max(r.max(), w.max(), 1e-15) for _, r, w in planned]),
    )


def _planned(problem: Problem, plan: Placement | None) -> tuple[Array, Array, Array]:
    """A plan: device of each group ``[G]``, path to the end ``[N]``, work per device ``[D]``.

    Without a plan: -1, HEFT's upward rank, and equal shares of the work.
    """
    g, devices = problem.graph, problem.num_devices
    seconds = problem.group_compute_s
    if plan is None:
        share = seconds.min(axis=1).sum() / devices
        return np.full(g.num_groups, -1), problem.upward_rank_s, np.full(devices, share)
    choice = choice_of(problem, plan)
    here = seconds[np.arange(g.num_groups), choice]
    rest = np.bincount(choice, np.where(np.isfinite(here), here, 0.0), devices)
    rank = problem.compute_s[np.arange(g.num_ops), plan]
    rank = np.where(np.isfinite(rank), rank, 0.0)  # a plan that cannot run says nothing
    for n in range(g.num_ops - 1, -1, -1):
        tail = 0.0
        for t in g.out_tensor[g.out_ptr[n] : g.out_ptr[n + 1]]:
            for user in g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]]:
                moved = problem.transfer_s(int(t), int(plan[n]), int(plan[user]))
                tail = max(tail, moved + rank[user])
        rank[n] += tail
    return choice, rank, rest


def _optimistic_finish_s(problem: Problem) -> Array:
    """float64 ``[N]`` earliest end of each operator if transfers were free."""
    fastest = np.where(problem.supported, problem.compute_s, np.inf).min(axis=1)
    ready = np.zeros(problem.num_ops)
    finish = np.empty(problem.num_ops)
    edges = problem.graph.edges
    ends = np.searchsorted(edges[:, 0], np.arange(problem.num_ops + 1))
    for n in range(problem.num_ops):
        finish[n] = ready[n] + fastest[n]
        users = edges[ends[n] : ends[n + 1], 1]
        ready[users] = np.maximum(ready[users], finish[n])
    return finish


@nb.njit(cache=True, nogil=True)
def _transfer_s(t, p, tensor, a, b):
    if a == b:
        return 0.0
    if t.matrix_at[p] >= 0:
        d = t.num_devices[p]
        return t.matrix[t.matrix_at[p] + (tensor * d + a) * d + b]
    return t.latency_s[p, a, b] + t.tensor_bytes[t.tensor_at[p] + tensor] * t.s_per_byte[p, a, b]


@nb.njit(cache=True, nogil=True)
def _finish_on(t, s, b, group, device, scratch):
    """Run ``group`` on ``device`` after what is there: (end, transfer seconds, local, total bytes).

    ``scratch`` receives the end of each of the group's operators. An input whose producer is
    not placed yet arrives when it would at its fastest, without transfer. Channels are taken
    to be free: this is HEFT's estimate without insertion, not the simulator.
    """
    p = s.ids[b]
    op0, tensor0, use0 = t.op_at[p], t.tensor_at[p], t.use_at[p]
    group_ptr0 = t.group_at[p] + p
    clock = s.free_s[b, device]
    moved_s = local = total = 0.0
    for i in range(t.group_ptr[group_ptr0 + group], t.group_ptr[group_ptr0 + group + 1]):
        op = t.group_op[op0 + i]
        ready = 0.0
        for k in range(t.in_ptr[op0 + p + op], t.in_ptr[op0 + p + op + 1]):
            tensor = t.in_tensor[use0 + k]
            src = t.tensor_src[tensor0 + tensor]
            size = t.tensor_bytes[tensor0 + tensor]
            if src < 0:
                if not t.shares_host[p, device]:
                    cost = _transfer_s(t, p, tensor, t.host[p], device)
                    moved_s += cost
                    ready = max(ready, cost)
                continue
            producer = t.group_of[op0 + src]
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
        clock = max(clock, ready) + t.compute_s[op0 + op, device]
        scratch[op] = clock
    return clock, moved_s, local, total


@nb.njit(cache=True, nogil=True)
def _path_from(t, s, b, group, device, scratch):
    """After ``_finish_on``: (longest path through ``group``, seconds that its outputs travel).

    Users that are not placed yet are where the plan has them; without a plan a transfer takes
    its mean time, and what follows it the upward rank.
    """
    p = s.ids[b]
    op0, tensor0, use0, group0 = t.op_at[p], t.tensor_at[p], t.use_at[p], t.group_at[p]
    longest = sent_s = 0.0
    for i in range(t.group_ptr[group0 + p + group], t.group_ptr[group0 + p + group + 1]):
        op = t.group_op[op0 + i]
        longest = max(longest, scratch[op])
        for k in range(t.out_ptr[op0 + p + op], t.out_ptr[op0 + p + op + 1]):
            tensor = t.out_tensor[t.made_at[p] + k]
            farthest = 0.0
            for j in range(t.dst_ptr[tensor0 + p + tensor], t.dst_ptr[tensor0 + p + tensor + 1]):
                user = t.use_dst[use0 + j]
                other = t.group_of[op0 + user]
                if other == group:
                    continue
                where = s.choice[b, other]
                if where < 0:
                    where = t.plan[group0 + other]
                if where < 0:
                    cost = t.send_s[tensor0 + tensor]
                else:
                    cost = _transfer_s(t, p, tensor, device, where)
                farthest = max(farthest, cost)
                longest = max(longest, scratch[op] + cost + t.rank_s[op0 + user])
            sent_s += farthest
    return longest, sent_s


@nb.njit(cache=True, nogil=True)
def _new_param_bytes(t, s, b, group, device):
    """Bytes of the group's parameters that ``device`` does not hold yet."""
    p = s.ids[b]
    at = t.group_at[p] + p + group
    new = 0.0
    for i in range(t.param_ptr[at], t.param_ptr[at + 1]):
        param = t.group_param[t.param_at[p] + i]
        if not s.held[b, param, device]:
            new += t.param_bytes[t.size_at[p] + param]
    return new


@nb.njit(cache=True, nogil=True)
def begin(t, s, rows, ids):
    """Start episodes ``rows`` with problems ``ids``: nothing is placed."""
    for r in range(len(rows)):
        b, p = rows[r], ids[r]
        s.ids[b] = p
        s.step[b] = 0
        s.choice[b] = -1
        s.free_s[b] = 0.0
        s.load_s[b] = 0.0
        s.rest_s[b] = t.rest_s[p]
        s.param_bytes[b] = 0.0
        s.held[b] = False
        s.num_here[b] = 0
        for n in range(t.op_at[p + 1] - t.op_at[p]):
            s.finish_s[b, n] = t.optimistic_s[t.op_at[p] + n]


@nb.njit(cache=True, nogil=True)
def _plan_to_here(t, s, b, g, sign):
    """Take group ``g`` out of what the plan still has to do (``sign`` -1), or put it back."""
    p = s.ids[b]
    at, devices = t.group_at[p] + g, t.num_devices[p]
    d = t.plan[at]
    if d < 0:
        s.rest_s[b, :devices] += sign * t.group_s[at, :devices].min() / devices
    elif np.isfinite(t.group_s[at, d]):
        s.rest_s[b, d] += sign * t.group_s[at, d]


@nb.njit(cache=True, nogil=True)
def describe(t, s, b, g, mask, features, bound, room, scratch):
    """Fill mask ``[D]`` and features ``[D, F]`` of placing group ``g`` now (zeroed before).

    ``room`` float64 ``[3, D]`` and ``scratch`` float64 ``[N]`` are to work in.
    """
    p = s.ids[b]
    devices = t.num_devices[p]
    unit = t.unit_s[p]
    largest = s.load_s[b, :devices].max()
    end, path, peak = room[0], room[1], room[2]
    best = shortest = lowest = np.inf
    fits = 0
    _plan_to_here(t, s, b, g, -1.0)
    highest = second = 0.0  # planned load of the fullest device without the group, of the next
    fullest = -1
    for d in range(devices):
        load = s.load_s[b, d] + s.rest_s[b, d]
        if load > highest:
            highest, second, fullest = load, highest, d
        else:
            second = max(second, load)
    for d in range(devices):
        seconds = t.group_s[t.group_at[p] + g, d]
        end[d] = np.inf
        if not np.isfinite(seconds):
            continue
        held = s.param_bytes[b, d] + _new_param_bytes(t, s, b, g, d)
        first = True
        if s.num_here[b, d] == 0 and not t.planned[p, d]:
            for e in range(d):
                same = t.device_class[p, e] == t.device_class[p, d]
                if same and s.num_here[b, e] == 0 and not t.planned[p, e]:
                    first = False
        if first:
            mask[d] = 2 if held <= t.capacity[p, d] else 1
            fits += mask[d] == 2
        end[d], moved_s, local, total = _finish_on(t, s, b, g, d, scratch)
        path[d], sent_s = _path_from(t, s, b, g, d, scratch)
        best, shortest = min(best, end[d]), min(shortest, path[d])
        load = s.load_s[b, d] + seconds
        peak[d] = max(load + s.rest_s[b, d], second if d == fullest else highest)
        lowest = min(lowest, peak[d])
        f = features[d]
        f[1] = end[d] / t.path_s[p]
        f[2] = load * devices / t.work_s[p]
        f[3] = np.log1p(max(0.0, load - largest) / unit)
        f[4] = np.log1p(moved_s / unit)
        f[5] = local / total if total > 0.0 else 0.0
        f[6] = held / t.capacity[p, d]
        f[7] = 1.0 if s.num_here[b, d] == 0 else 0.0
        f[8] = s.step[b] / t.num_groups[p]
        f[10] = path[d] / t.longest_s[p]
        f[12] = (load + s.rest_s[b, d]) * devices / t.work_s[p]
        f[13] = np.log1p(sent_s / unit)
    _plan_to_here(t, s, b, g, 1.0)
    for d in range(devices):
        # Where a parameter fits nowhere, every device that can run the group is legal.
        mask[d] = 1 if mask[d] == 2 or (fits == 0 and mask[d] == 1) else 0
        if np.isfinite(end[d]):
            features[d, 0] = np.log1p((end[d] - best) / unit)
            features[d, 9] = np.log1p((path[d] - shortest) / unit)
            features[d, 11] = np.log1p((peak[d] - lowest) / unit)
        for i in range(features.shape[1]):
            features[d, i] = min(features[d, i], bound)


@nb.njit(cache=True, nogil=True)
def place(t, s, b, g, d, scratch):
    """Put group ``g`` of episode ``b`` on device ``d``."""
    p = s.ids[b]
    s.param_bytes[b, d] += _new_param_bytes(t, s, b, g, d)
    s.free_s[b, d] = _finish_on(t, s, b, g, d, scratch)[0]
    at = t.group_at[p] + p + g
    for i in range(t.group_ptr[at], t.group_ptr[at + 1]):
        op = t.group_op[t.op_at[p] + i]
        s.finish_s[b, op] = scratch[op]
    for i in range(t.param_ptr[at], t.param_ptr[at + 1]):
        s.held[b, t.group_param[t.param_at[p] + i], d] = True
    s.load_s[b, d] += t.group_s[t.group_at[p] + g, d]
    _plan_to_here(t, s, b, g, -1.0)
    s.num_here[b, d] += 1
    s.choice[b, g] = d
    s.step[b] += 1


@nb.njit(cache=True, nogil=True)
def observe(t, s, group, mask, features, bound):
    """Fill group ``[B, 1]``, mask ``[B, D]`` and features ``[B, D, F]`` (zeroed by the caller)."""
    scratch = np.empty(s.finish_s.shape[1])
    room = np.empty((3, mask.shape[1]))
    for b in range(len(s.ids)):
        p = s.ids[b]
        if s.step[b] >= t.num_groups[p]:  # over, and not started again: anything legal will do
            mask[b, 0] = 1
            continue
        g = t.order[t.group_at[p] + s.step[b]]
        group[b, 0] = g
        describe(t, s, b, g, mask[b], features[b], bound, room, scratch)


@nb.njit(cache=True, nogil=True)
def act(t, s, actions, mask, done):
    scratch = np.empty(s.finish_s.shape[1])
    for b in range(len(s.ids)):
        p, d = s.ids[b], actions[b]
        if s.step[b] >= t.num_groups[p] or d < 0 or d >= mask.shape[1] or mask[b, d] == 0:
            done[b] = True
            continue
        place(t, s, b, t.order[t.group_at[p] + s.step[b]], d, scratch)
        done[b] = s.step[b] == t.num_groups[p]


def state_of(problems: ProblemSet, num_envs: int) -> State:
    """Room for ``num_envs`` episodes."""
    width, groups = problems.max_devices, problems.max_groups
    ops = max(p.num_ops for p in problems.problems)
    params = max(len(p.graph.param_bytes) for p in problems.problems)
    return State(
        ids=np.zeros(num_envs, np.int64),
        step=np.zeros(num_envs, np.int64),
        choice=np.full((num_envs, groups), -1, np.int32),
        finish_s=np.zeros((num_envs, ops)),
        free_s=np.zeros((num_envs, width)),
        load_s=np.zeros((num_envs, width)),
        rest_s=np.zeros((num_envs, width)),
        param_bytes=np.zeros((num_envs, width)),
        held=np.zeros((num_envs, params, width), bool),
        num_here=np.zeros((num_envs, width), np.int32),
    )


@nb.njit(cache=True, nogil=True)
def construct(t, s, net, pair, greedy, rng, bound):
    """Place every group of episodes that have begun, as ``PlacementNet.step_logits`` scores them.

    ``net``: (groups [P, G, H], devices [P, D, H], by_pair [Fp, H], by_state [F, H], hidden [H, H],
    hidden_bias [H], out [H], out_bias and weight of the log finish where there is no plan [2],
    share of the groups that leave the plan [P]), float32; ``pair`` float32 ``[P, G, D, Fp]``.
    Where ``greedy`` bool ``[B]`` is False the device is drawn from the softmax.
    """
    groups, devices, by_pair, by_state, hidden, hidden_bias, out, constants, moving = net
    size, width = len(hidden_bias), s.free_s.shape[1]
    scratch, room = np.empty(s.finish_s.shape[1]), np.empty((3, width))
    mask = np.zeros(width, np.int8)
    features = np.zeros((width, by_state.shape[0]), np.float32)
    first, second = np.empty(size, np.float32), np.empty(size, np.float32)
    for b in range(len(s.ids)):
        p = s.ids[b]
        while s.step[b] < t.num_groups[p]:
            g = t.order[t.group_at[p] + s.step[b]]
            mask[:] = 0
            features[:] = 0.0
            describe(t, s, b, g, mask, features, bound, room, scratch)
            plan = t.plan[t.group_at[p] + g]
            others = max(mask.sum() - 1, 1)
            chosen, highest = 0, -np.inf
            for d in range(t.num_devices[p]):
                if mask[d] == 0:
                    continue
                for j in range(size):
                    first[j] = groups[p, g, j] + devices[p, d, j]
                for i in range(by_pair.shape[0]):
                    a = pair[p, g, d, i]
                    if a != 0.0:
                        for j in range(size):
                            first[j] += a * by_pair[i, j]
                for i in range(by_state.shape[0]):
                    a = features[d, i]
                    if a != 0.0:
                        for j in range(size):
                            first[j] += a * by_state[i, j]
                second[:] = hidden_bias
                for i in range(size):
                    a = first[i]
                    if a > 0.0:
                        for j in range(size):
                            second[j] += a * hidden[i, j]
                score = float(constants[0])
                for j in range(size):
                    score += max(second[j], np.float32(0.0)) * out[j]
                if plan == d:
                    score += np.log(others * (1.0 - moving[p]) / moving[p])
                elif plan < 0:
                    score -= constants[1] * features[d, 0]
                if not greedy[b]:
                    score -= np.log(-np.log(min(max(rng.random(), 1e-10), 1.0 - 1e-7)))
                if score > highest:
                    chosen, highest = d, score
            place(t, s, b, g, chosen, scratch)
