"""Objectives that are a formula of the placement: no timeline, no order of events.

Both are the cost models of Tarnawski et al., "Efficient algorithms for device placement of
DNN graph operators" (NeurIPS 2020). Accelerators exchange tensors through host memory and
wait meanwhile; moving tensor ``t`` costs device ``d`` ``problem.io_s[t, d]`` seconds.

* ``max_load``, the seconds per sample of a pipeline: the largest load of a device, which is
  the compute of its operators, plus ``io_s`` once for every tensor made there that some
  other device uses, plus ``io_s`` once for every tensor used there and made elsewhere.
* ``piecewise_latency``, the seconds of one sample alone: devices of kind ``cpu`` are a pool
  with unlimited parallelism and no transfers; the operators of an accelerator are cut into
  *pieces*, each of which is one call: when all its inputs exist it reads them, computes its
  operators one after another, and writes what others use. Every operator of the piece ends
  with it. An operator is in the piece of its *level*: how often a path that ends in it
  enters its accelerator, at most. Of two pieces of one accelerator the later waits for the
  earlier through the operators between them, so they never overlap. Where pieces wait for
  each other in a circle nothing can run: inf.

Of a periodic placement ``[K, N]`` a load is the mean over the phases, and a latency that of the
slowest phase.

Memory is that of parameters (tied ones once per device); what activations need depends on
the order of events and is the timeline's business.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.objective import Objective
from placement.problem import Placement, Problem
from placement.simulator import analytic_kernels as kernels

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def evaluate(problem: Problem, placements: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """The problem's objective of placements int32 ``[B, N]``, ``[B, K, N]``, and what they hold.

    Returns float64 ``[B]`` seconds, inf where an operator is unsupported, pieces wait for each
    other or a buffer moves, and int64 ``[B, D]`` parameter bytes. Colocation is taken for granted.
    """
    p = problem.as_batch(placements)
    p = p if p.ndim == 3 else p[:, None]
    phases, held = p.reshape(-1, problem.num_ops), np.empty((len(p), problem.num_devices), np.int64)
    kernels.param_bytes_batch(*kernels.param_tables(problem), problem.graph.param_bytes, p, held)
    if problem.objective is Objective.MAX_LOAD:
        load = np.empty((len(phases), problem.num_devices))
        kernels.load_batch(*kernels.load_tables(problem), phases, load)
        value = load.reshape(*p.shape[:2], -1).mean(axis=1).max(axis=1)
    else:
        assert problem.objective is Objective.PIECEWISE_LATENCY, problem.objective
        value = np.empty(len(phases))
        kernels.piecewise_batch(kernels.piecewise_tables(problem), phases, value)
        value = value.reshape(p.shape[:2]).max(axis=1)
    if p.shape[1] > 1:
        value = np.where(problem.buffers_stay(p), value, np.inf)
    return value, held


def device_loads(problem: Problem, placement: Placement) -> Floats:
    """float64 ``[D]`` load of each device; their maximum is ``max_load``. Plain and slow."""
    if placement.ndim == 2:
        mean: Floats = np.mean([device_loads(problem, phase) for phase in placement], axis=0)
        return mean
    g = problem.graph
    load = np.zeros(problem.num_devices)
    for n, d in enumerate(placement):
        load[d] += problem.compute_s[n, d]
    for t in range(g.num_tensors):
        home = placement[g.tensor_src[t]] if g.tensor_src[t] >= 0 else None
        users = {int(placement[n]) for n in g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]]}
        elsewhere = users - {home}
        for d in elsewhere:
            load[d] += problem.io_s[t, d]
        if elsewhere and home is not None:
            load[home] += problem.io_s[t, home]
    return load


def piecewise_latency(problem: Problem, placement: Placement) -> float:
    """Seconds of one sample; inf where pieces wait for each other. Plain and slow."""
    g = problem.graph
    preds: list[set[int]] = [set() for _ in range(problem.num_ops)]
    for u, v in g.edges.tolist():
        preds[v].add(u)
    piece: list[tuple[int, int]] = []  # (device, level), or (-1, operator) on the CPU pool
    level = np.zeros((problem.num_devices, problem.num_ops), int)
    for v, d in enumerate(placement):
        for e in range(problem.num_devices):
            enters = [level[e, u] + int(d == e != placement[u]) for u in preds[v]]
            level[e, v] = max([int(d == e), *enters])
        is_cpu = problem.cluster.devices[d].kind == "cpu"
        piece.append((-1, v) if is_cpu else (int(d), int(level[d, v])))

    seconds = dict.fromkeys(piece, 0.0)
    waits: dict[tuple[int, int], set[tuple[int, int]]] = {q: set() for q in piece}
    for v, q in enumerate(piece):
        seconds[q] += problem.compute_s[v, placement[v]]
        waits[q] |= {piece[u] for u in preds[v]} - {q}
    for t in range(g.num_tensors):
        src = g.tensor_src[t]
        home = piece[src] if src >= 0 else (-1, -1)
        users = {piece[n] for n in g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]]}
        elsewhere = users - {home}
        for q in elsewhere | ({home} if elsewhere else set()):
            if q[0] >= 0:
                seconds[q] += problem.io_s[t, q[0]]

    finish: dict[tuple[int, int], float] = {}
    while len(finish) < len(waits):
        ready = [q for q in waits if q not in finish and waits[q] <= finish.keys()]
        if not ready:
            return float("inf")
        for q in ready:
            finish[q] = max((finish[r] for r in waits[q]), default=0.0) + seconds[q]
    return max(finish.values())


def circle(problem: Problem, placement: ArrayLike) -> list[tuple[int, Ints]]:
    """Pieces that wait for each other, each for the next one and the last for the first.

    Each as its device and its operators, int32 and in order; empty where every piece can run.
    """
    g = problem.graph
    p = np.ascontiguousarray(placement, dtype=np.int32)
    pieces = kernels.piecewise_tables(problem)
    if np.isfinite(kernels.piecewise_one(pieces, p, np.inf)):
        return []
    piece, missing = pieces.room.piece, pieces.room.missing
    src, dst = piece[g.edges[:, 0]], piece[g.edges[:, 1]]
    stuck = (src != dst) & (missing[src] > 0) & (missing[dst] > 0)
    waits_for = dict(zip(dst[stuck].tolist(), src[stuck].tolist(), strict=True))
    # What never ran waits for something that never ran, so that this walk ends where it was.
    walk = [next(iter(waits_for))]
    while (then := waits_for[walk[-1]]) not in walk:
        walk.append(then)
    members = [np.flatnonzero(piece == q).astype(np.int32) for q in walk[walk.index(then) :]]
    return [(int(p[ops[0]]), ops) for ops in members]


def load_moves(problem: Problem, placement: ArrayLike) -> tuple[kernels.Moves, kernels.Placed]:
    """Tables, and the state of ``placement`` int32 ``[N]``, for ``analytic_kernels.apply_moves``.

    It moves colocation groups and keeps the loads: a move costs time in the number of tensors of
    the groups that move, not of all.

    Raises:
        ProblemError: it is not a placement (see ``Problem.check_placement``).
    """
    group = problem.graph.group
    tables = kernels.move_tables(problem, kernels.blocks(problem, group))
    device = np.zeros(problem.graph.num_groups, np.int32)
    device[group] = problem.check_placement(placement)
    return tables, kernels.move_state(tables, device)
