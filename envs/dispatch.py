"""``Dispatch-v0``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs import dispatch_kernels as kernels
from placement.problem import Problem
from placement.search.list_kernels import State as Placed
from placement.search.list_schedule import tables_of as list_tables_of

HEFT = (4.0, 4.0, 0.0, 0.0, 0.0)
MIXED = (1.0, 4.0, 0.25, 2.0, 1.0)


def tables_of(problem: Problem, rule: Any = HEFT, activations: int = 0) -> kernels.Tables:
    g, n, devices = problem.graph, problem.num_ops, problem.num_devices
    seconds = np.where(problem.supported, problem.compute_s, np.inf)
    rank, follow, hops, below = np.zeros(n), np.zeros((n, devices)), np.zeros(n), np.zeros(n)
    after = np.zeros((n, n // 64 + 1), np.uint64)
    mean_s = problem.mean_compute_s
    kernels.fill_static(
        g.out_ptr, g.out_tensor, g.use_ptr, g.use_dst, mean_s, problem.mean_transfer_s, seconds,
        rank, follow, hops, below, after,
    )  # fmt: skip
    num_able = problem.supported.sum(axis=1).astype(np.float64)
    finite = np.where(problem.supported, problem.compute_s, 0.0)
    unit = max(float(mean_s.mean()), 1e-15)
    fastest = seconds.min(axis=1)
    move = problem.mean_transfer_s.mean() / unit if g.num_tensors else 0.0
    spread = float(np.mean((finite.max(axis=1) - fastest) / (fastest + 1e-3 * unit)))
    fixed = [np.mean(1.0 / num_able), move / (1 + move), spread / (1 + spread), np.log(devices) / 3]
    return kernels.Tables(
        listed=list_tables_of(problem, activations),
        position=np.argsort(np.lexsort((np.arange(n), -rank))).astype(np.int32),
        rank_s=rank,
        follow_s=follow,
        hops=hops / hops.max(),
        below_s=below,
        before=np.bincount(g.edges[:, 1], minlength=n).astype(np.int64),
        fastest_s=fastest,
        mean_s=mean_s,
        num_able=num_able,
        channel=np.ascontiguousarray(problem.link_channel),
        contended=bool(problem.contention),
        demand_s=(finite / num_able[:, None]).sum(axis=0),
        unit_s=unit,
        path_s=max(float(rank.max()), 1e-15),
        fixed=np.array(fixed, np.float32),
        rule=np.array(rule, np.float64),
    )


def state_of(problem: Problem) -> kernels.State:
    n, d, g = problem.num_ops, problem.num_devices, problem.graph
    pairs, ops = kernels.PAIRS, kernels.OPS
    return kernels.State(
        placed=Placed(
            choice=np.full(g.num_groups, -1, np.int32),
            finish_s=np.zeros(n),
            free_s=np.zeros(d),
            used=np.zeros(d, np.int64),
            missing=np.ones((d, len(g.param_bytes) if problem.memory_may_bind else 0), bool),
            head=np.full((2, d), -1, np.int32),
            tail=np.full((2, d), -1, np.int32),
            begin_s=np.empty((2, n)),
            end_s=np.empty((2, n)),
            before=np.empty((2, n), np.int32),
            after=np.empty((2, n), np.int32),
        ),
        random=np.ones(1, np.uint64),
        waits=np.zeros(n, np.int64),
        ready=np.zeros(n, np.int64),
        num_ready=0,
        num_placed=0,
        start_s=np.zeros(n),
        sequence=np.zeros(n, np.int32),
        demand_s=np.zeros(d),
        channel_s=np.zeros(problem.num_channels),
        arrive_s=np.zeros(d),
        able=np.zeros(d, bool),
        begin_s=np.zeros((ops, d)),
        reach_s=np.zeros((ops, d)),
        count=0,
        op=np.zeros(pairs, np.int64),
        device=np.zeros(pairs, np.int64),
        row=np.zeros(pairs, np.int64),
        score=np.zeros(pairs),
        features=np.zeros((pairs, kernels.NUM_PAIR_FEATURES), np.float32),
        logits=np.zeros(pairs),
    )
