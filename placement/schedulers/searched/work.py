"""The blocks of a placed graph, with whole numbers for their times and memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from placement.problem import Placement, Problem
from placement.schedulers._cut import Cut
from placement.schedulers.searched.blocks import Block, Work
from placement.simulator import durations

_UNITS = 2000  # of time in the load of the busiest device, and of memory in a limit


def work_of(
    problem: Problem, placement: Placement, pieces: Cut, num_microbatches: int
) -> tuple[Work, float]:
    """The blocks with integer times, and the seconds of a unit; memory is not limited.

    Transfers from one block to another wait for each other: their seconds are the delay between
    them, or part of the first block where the link is blocking.
    """
    g = problem.graph
    seconds, on = durations(problem, placement, num_microbatches), problem.worker[placement]
    busy = np.bincount(pieces.label, weights=seconds, minlength=pieces.num_blocks)
    delay: dict[tuple[int, int], float] = {(int(u), int(v)): 0.0 for u, v in pieces.edges}
    sent: set[tuple[int, int]] = set()  # (tensor, device)
    arrived: set[tuple[int, int]] = set()  # (tensor, block): several operators of it may wait
    for tensor, op in zip(g.use_tensor.tolist(), g.use_dst.tolist(), strict=True):
        src = int(g.tensor_src[tensor])
        if src < 0 or on[src] == on[op]:
            continue
        u, v = int(pieces.label[src]), int(pieces.label[op])
        takes = problem.transfer_s(tensor, int(on[src]), int(on[op]))
        if not problem.link_blocking[on[src], on[op]]:
            if (tensor, v) not in arrived:
                delay[u, v] += takes
            arrived.add((tensor, v))
        elif (tensor, int(on[op])) not in sent:
            busy[u] += takes
        sent.add((tensor, int(on[op])))
    load = np.bincount(pieces.device, weights=busy)
    unit_s = max(float(load.max()) / _UNITS, 1e-12)
    preds: list[list[tuple[int, int]]] = [[] for _ in range(pieces.num_blocks)]
    for (u, v), takes in delay.items():
        preds[v].append((u, round(takes / unit_s)))
    blocks = tuple(
        Block((int(pieces.device[b]),), max(1, round(busy[b] / unit_s)), 0, tuple(preds[b]))
        for b in range(pieces.num_blocks)
    )
    return Work(blocks, problem.num_devices), unit_s


def held_bytes(problem: Problem, pieces: Cut) -> list[tuple[int, int, int]]:
    """(block, later block of the same device, bytes): what is produced and last used there.

    Tensors that share memory count once. What a block sends away or receives is held only
    around it, and is not in the list.
    """
    g = problem.graph
    span: dict[int, tuple[int, int]] = {}
    for tensor, op in zip(g.use_tensor.tolist(), g.use_dst.tolist(), strict=True):
        root = int(g.tensor_root[tensor])
        src = int(g.tensor_src[root])
        if src < 0:
            continue
        u, v = int(pieces.label[src]), int(pieces.label[op])
        if pieces.device[u] != pieces.device[v]:
            continue
        span[root] = u, max(v, span.get(root, (u, u))[1])
    total: dict[tuple[int, int], int] = {}
    for root, (u, v) in span.items():
        if v > u:
            total[u, v] = total.get((u, v), 0) + int(g.tensor_bytes[root])
    return [(u, v, size) for (u, v), size in sorted(total.items())]


def limited(
    work: Work, held: list[tuple[int, int, int]], room_bytes: NDArray[np.int64], num: int
) -> Work:
    """The same work where ``held`` has to fit into ``room_bytes`` int64 ``[D]``.

    Without limits if ``num`` micro-batches fit at a time.
    """
    per_batch = np.zeros(work.num_devices, np.int64)
    for u, _, size in held:
        per_batch[work.blocks[u].devices[0]] += size
    if (num * per_batch <= room_bytes).all():
        return work
    memory = np.zeros(work.num_blocks, np.int64)
    for u, v, size in held:
        unit = max(1.0, room_bytes[work.blocks[u].devices[0]] / _UNITS)
        memory[u] += round(size / unit)
        memory[v] -= round(size / unit)
    limit = tuple(int(room / max(1.0, room / _UNITS)) for room in room_bytes)
    blocks = tuple(
        Block(b.devices, b.time, int(m), b.preds) for b, m in zip(work.blocks, memory, strict=True)
    )
    return Work(blocks, work.num_devices, limit)
