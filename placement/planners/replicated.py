"""Stages with replicas: pipeline and data parallelism together, for many equal devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.planners import Among, check_least
from placement.problem import ROUNDING, Problem, Solution
from placement.search.contiguous_kernels import fill_costs
from placement.search.evaluation import Search, supported_choice
from placement.search.stages import held_bytes, merge_blocks, uses_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Replicated:
    """Contiguous stages, each on as many devices as it needs, in the manner of PipeDream
    (Narayanan et al., SOSP 2019) and Piper (Tarnawski et al., NeurIPS 2021).

    The ``r`` devices of a stage take turns with the micro-batches. Per micro-batch it takes the
    larger of its seconds on a device, of what it receives and of what it sends, each over ``r``;
    where gradients are added up in different memory, they travel, and new values back, once per
    ``num_microbatches``. The period is that of the slowest stage; the least possible one is found
    by bisection over a program that needs the fewest devices for a given period.

    The answer is a periodic placement, whose phases are a common multiple of the replicas of all
    stages: every ``K`` up to ``max_phases`` of the problem is tried with its divisors as numbers of
    replicas. One phase means a pipeline without replicas. ``stats["stages"]`` lists ``first`` and
    ``last`` operator and the ``devices`` of each stage, ``stats["replicated_period_s"]`` is what
    the program counts for them; ``value_s`` is the simulator's.

    Deviations: devices count as the slowest of those that are used, which are the fastest, or those
    and the second fastest, and so on; links count as the slowest too; gradients are added up on one
    device of a stage, as the trainer does, not in a ring; nodes are not told apart,
    devices of one speed are used in the cluster's order; parameters, and the activations
    of the micro-batches in flight, must fit on the smallest device.

    Attributes:
        max_blocks: groups are merged into this many blocks of about equal seconds first.
    """

    among = Among(turns=True)

    max_blocks: int = 150

    def __post_init__(self) -> None:
        check_least(self, 1, "max_blocks")

    def __call__(self, problem: Problem) -> Solution:
        search = Search(problem)
        block = merge_blocks(problem, self.max_blocks)
        tried = []
        for devices in by_speed(problem):
            table = stage_periods(problem, block, devices)
            period_s, stages = fewest_in_turns(table, len(devices), problem.max_phases)
            tried.append((period_s, stages, table, devices))
        period_s, stages, table, devices = min(tried, key=lambda x: x[0])
        phases = math.lcm(*(r for *_, r in stages)) if stages else 1
        choice = np.zeros((phases, problem.graph.num_groups), np.int32)
        described, free = [], 0
        number = block[problem.graph.group]
        for begin, end, replicas in stages:
            mine = devices[free : free + replicas]
            turn = mine[np.arange(phases) % replicas]
            choice[:, (block >= begin) & (block < end)] = turn[:, None]
            ops = np.flatnonzero((number >= begin) & (number < end))
            op_name = problem.graph.op_name
            described.append(
                {
                    "first": op_name[ops[0]],
                    "last": op_name[ops[-1]],
                    "num_ops": len(ops),
                    "devices": [problem.cluster.device_names[d] for d in mine],
                    "period_s": float(table.period_s[table.at(replicas), begin, end]),
                }
            )
            free += replicas
        rows = np.stack([supported_choice(problem, row) for row in choice])
        search.consider(rows[0] if phases == 1 else rows, 1)
        facts: dict[str, Any] = {}
        if stages:
            facts = {"stages": described, "replicated_period_s": period_s}
        return search.solution(**facts)


@dataclass(frozen=True, eq=False)
class StagePeriods:
    """Seconds per micro-batch of blocks ``[j, i)`` on a number of replicas.

    Attributes:
        replicas: int ``[R]`` ascending numbers that are tried.
        period_s: float64 ``[R, C + 1, C + 1]``; inf where empty, not supported or too large.
    """

    replicas: NDArray[np.int64]
    period_s: Floats

    def at(self, replicas: int) -> int:
        """Index of a number of replicas."""
        return int(np.searchsorted(self.replicas, replicas))


def numbers(most: int) -> NDArray[np.int64]:
    """Which numbers of replicas are tried: all up to 32, then steps of a tenth, and the most."""
    counts = list(range(1, min(most, 32) + 1))
    while counts[-1] < most:
        counts.append(min(most, int(np.ceil(counts[-1] * 1.1))))
    return np.array(counts, np.int64)


def by_speed(problem: Problem) -> list[NDArray[np.intp]]:
    """The fastest devices, those and the second fastest, ... and all, by what the whole takes."""
    whole_s = problem.compute_s.sum(axis=0)
    order = np.argsort(whole_s, kind="stable")
    slower = np.flatnonzero(whole_s[order][1:] > whole_s[order][:-1] * (1 + ROUNDING)) + 1
    return [order[:count] for count in (*slower.tolist(), len(order))]


def stage_periods(problem: Problem, block: Ints, devices: NDArray[np.intp]) -> StagePeriods:
    """All stages on ``devices``, ``block`` int32 ``[G]`` being the block of each group."""
    g, size = problem.graph, int(block.max()) + 2
    at = block[g.group]
    slowest = problem.compute_s[:, devices].max(axis=1)  # any device must be able to take any stage
    tensor_s = problem.transfers_s(lambda x: x.max(axis=(-2, -1)))  # over the slowest link
    uses = uses_of(g, slowest[None], tensor_s[None], 0 * tensor_s[None], tensor_s[None])
    compute, sent, received = np.empty((3, 1, size, size))
    fill_costs(uses, at, compute, sent, received)
    moved = np.maximum(received[0], sent[0])

    def within(block: Ints, weight: NDArray[Any]) -> Floats:
        """``[C + 1, C + 1]``: what of the blocks ``[K]`` is in ``[j, i)``."""
        total = np.append(0.0, np.cumsum(np.bincount(block, weight, size - 1)))
        return total - total[:, None]

    produced = np.flatnonzero(g.tensor_src >= 0)
    in_time = problem.memory_may_bind and not problem.objective.is_analytic
    flights = problem.max_in_flight if in_time else 0
    need = held_bytes(g, at, size)[0]
    need += flights * within(at[g.tensor_src[produced]], g.tensor_bytes[produced])
    impossible = np.tri(size, dtype=bool) | (need > problem.memory_bytes[devices].min())
    # In one place, as buffers that micro-batches change.
    stays = within(at[g.carried_op], np.ones(len(g.carried_op))) > 0
    replicas = numbers(min(len(devices), problem.max_phases))
    grad = g.gradient_tensor
    summed_s = 2 * within(at[g.tensor_src[grad]], tensor_s[grad]) / problem.num_microbatches
    if problem.objective.is_analytic or all(d.kind == "cpu" for d in problem.cluster.devices):
        summed_s[:] = 0.0
    period = np.empty((len(replicas), size, size))
    for k, r in enumerate(replicas.tolist()):
        period[k] = np.maximum(compute[0], moved) / r + (summed_s if r > 1 else 0.0)
        period[k][impossible | (stays & (r > 1))] = np.inf
    return StagePeriods(replicas, period)


def fewest(table: StagePeriods, num_devices: int) -> tuple[float, list[tuple[int, int, int]]]:
    """The least period, and its stages (first block, block after the last, replicas).

    inf and no stages where nothing fits.
    """
    values = table.period_s[np.isfinite(table.period_s)]
    best: list[tuple[int, int, int]] = []
    if not len(values):
        return float("inf"), best
    low, high = 0.0, float(values.max())
    best = _cover(table, high, num_devices)
    for _ in range(60 if best else 0):
        middle = (low + high) / 2
        stages = _cover(table, middle, num_devices)
        if stages:
            best = stages
            # No stage of it is slower than this: the next step begins there.
            high = max(float(table.period_s[table.at(r), a, b]) for a, b, r in stages)
        else:
            low = middle
        if high - low <= 1e-12 * high:
            break
    return (high, best) if best else (float("inf"), best)


def fewest_in_turns(
    table: StagePeriods, num_devices: int, max_phases: int
) -> tuple[float, list[tuple[int, int, int]]]:
    """``fewest`` with numbers of replicas that all divide one number, ``max_phases`` at most."""
    best: tuple[float, list[tuple[int, int, int]]] = (float("inf"), [])
    # Half of it and less: what divides that also divides its double.
    divisors = {
        (k % table.replicas == 0).tobytes() for k in range(max_phases // 2 + 1, max_phases + 1)
    }
    for some in sorted(divisors, key=lambda x: (-x.count(1), x)):
        rows = np.frombuffer(some, bool)
        part = StagePeriods(table.replicas[rows], table.period_s[rows])
        if not best[1] or _cover(part, best[0] * (1 - ROUNDING), num_devices):
            best = min(best, fewest(part, num_devices), key=lambda split: split[0])
    return best


def _cover(table: StagePeriods, limit_s: float, num_devices: int) -> list[tuple[int, int, int]]:
    """Stages of at most ``limit_s`` that need the fewest devices; empty: there are too few."""
    fine = table.period_s <= limit_s
    some = fine.any(axis=0)
    needs = np.where(some, table.replicas[fine.argmax(axis=0)], num_devices + 1)
    size = needs.shape[0]
    total, cut = np.full(size, num_devices + 1, np.int64), np.zeros(size, np.int64)
    total[0] = 0
    for end in range(1, size):
        column = total[:end] + needs[:end, end]
        cut[end] = column.argmin()
        total[end] = min(int(column[cut[end]]), num_devices + 1)
    if total[-1] > num_devices:
        return []
    ends = [size - 1]
    while ends[-1] > 0:
        ends.append(int(cut[ends[-1]]))
    return [(a, b, int(needs[a, b])) for a, b in pairwise(reversed(ends))]
