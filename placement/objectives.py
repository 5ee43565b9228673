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

Memory is that of parameters (tied ones once per device); what activations need depends on
the order of events and is the timeline's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.problem import Placement, Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

ANALYTIC = ("max_load", "piecewise_latency")


def evaluate(problem: Problem, placements: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """The problem's objective of placements int32 ``[B, N]``, and the bytes they hold.

    Returns float64 ``[B]`` seconds, inf where an operator is unsupported or pieces wait for
    each other, and int64 ``[B, D]`` parameter bytes. Colocation is taken for granted.
    """
    from placement import objective_kernels as kernels

    p = problem.as_batch(placements)
    value = np.empty(len(p))
    held = np.empty((len(p), problem.num_devices), np.int64)
    kernels.param_bytes_batch(*kernels.param_tables(problem), p, held)
    if problem.objective == "max_load":
        load = np.empty((len(p), problem.num_devices))
        kernels.load_batch(*kernels.load_tables(problem), p, load)
        value = load.max(axis=1)
    else:
        assert problem.objective == "piecewise_latency", problem.objective
        kernels.piecewise_batch(*kernels.piecewise_tables(problem), p, value)
    return value, held


def score(problem: Problem, placements: ArrayLike) -> Floats:
    """``evaluate``, with inf where a device would hold more than its memory."""
    value, held = evaluate(problem, placements)
    return np.where((held <= problem.memory_bytes).all(axis=1), value, np.inf)


def device_loads(problem: Problem, placement: Placement) -> Floats:
    """float64 ``[D]`` load of each device; their maximum is ``max_load``. Plain and slow."""
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
    from placement import objective_kernels as kernels

    g = problem.graph
    p = np.ascontiguousarray(placement, dtype=np.int32)
    scratch = kernels.piecewise_scratch(problem.num_ops, problem.num_devices)
    if np.isfinite(kernels.piecewise_one(kernels.piecewise_tables(problem), p, scratch, np.inf)):
        return []
    piece, missing = scratch[0][3][: problem.num_ops], scratch[0][7]
    src, dst = piece[g.edges[:, 0]], piece[g.edges[:, 1]]
    stuck = (src != dst) & (missing[src] > 0) & (missing[dst] > 0)
    waits_for = dict(zip(dst[stuck].tolist(), src[stuck].tolist(), strict=True))
    # What never ran waits for something that never ran, so that this walk ends where it was.
    walk = [next(iter(waits_for))]
    while (then := waits_for[walk[-1]]) not in walk:
        walk.append(then)
    found = [np.flatnonzero(piece == q).astype(np.int32) for q in walk[walk.index(then) :]]
    return [(int(p[ops[0]]), ops) for ops in found]


@dataclass(frozen=True, eq=False)
class Blocks:
    """A problem seen as ``I`` blocks of operators that are placed whole.

    Tensors that stay within a block are left out; those with the same producer and the same
    users are one, ``H`` in all.

    Attributes:
        compute_s: float64 ``[I, D]``; inf = cannot run there.
        src: int32 ``[H]`` producing block, -1 for model inputs.
        use_ptr: int32 ``[H + 1]`` and use_dst: int32: other blocks that use each tensor.
        io_s: float64 ``[H, D]``.
        own_bytes: int64 ``[I]`` parameters that only this block reads.
        tied_ptr, tied_dst: int32, like ``use``: blocks that read each parameter of several.
        tied_bytes: int64 ``[Q]`` its size.
    """

    compute_s: Floats
    src: Ints
    use_ptr: Ints
    use_dst: Ints
    io_s: Floats
    own_bytes: NDArray[np.int64]
    tied_ptr: Ints
    tied_dst: Ints
    tied_bytes: NDArray[np.int64]

    @property
    def num_blocks(self) -> int:
        """``I``."""
        return len(self.compute_s)


def blocks(problem: Problem, block: Ints) -> Blocks:
    """The problem with operator ``n`` in block ``block[n]``, int32 ``[N]``, numbered from 0."""
    g = problem.graph
    num_blocks = int(block.max()) + 1
    compute = np.zeros((num_blocks, problem.num_devices))
    np.add.at(compute, block, problem.compute_s)

    src = np.where(g.tensor_src >= 0, block[g.tensor_src], -1)
    pairs = np.stack([g.use_tensor, block[g.use_dst]], axis=1)
    pairs = np.unique(pairs[pairs[:, 1] != src[pairs[:, 0]]], axis=0)
    merged: dict[bytes, int] = {}
    io: list[Floats] = []
    users: list[Ints] = []
    producer, ptr = [], [0]
    begin = np.searchsorted(pairs[:, 0], np.arange(g.num_tensors + 1))
    for t in np.unique(pairs[:, 0]):
        used_by = pairs[begin[t] : begin[t + 1], 1]
        key = np.append(src[t], used_by).tobytes()
        if key in merged:
            io[merged[key]] = io[merged[key]] + problem.io_s[t]
            continue
        merged[key] = len(io)
        io.append(problem.io_s[t])
        producer.append(src[t])
        users.append(used_by)
        ptr.append(ptr[-1] + len(used_by))

    reads = np.unique(np.stack([g.param_use, block[g.param_use_op]], axis=1), axis=0)
    readers = np.bincount(reads[:, 0], minlength=len(g.param_bytes))
    alone = readers[reads[:, 0]] == 1
    own = np.zeros(num_blocks, np.int64)
    np.add.at(own, reads[alone, 1], g.param_bytes[reads[alone, 0]])
    tied = np.flatnonzero(readers > 1)
    return Blocks(
        compute_s=compute,
        src=np.array(producer, np.int32),
        use_ptr=np.array(ptr, np.int32),
        use_dst=np.concatenate([np.zeros(0, np.int32), *users]).astype(np.int32),
        io_s=np.array(io).reshape(-1, problem.num_devices),
        own_bytes=own,
        tied_ptr=np.append(0, np.cumsum(readers[tied])).astype(np.int32),
        tied_dst=reads[~alone, 1].astype(np.int32),
        tied_bytes=g.param_bytes[tied],
    )


class LoadMoves:
    """Largest load after moving one block, without looking at the others.

    Only the loads of the two devices concerned change, by what the block's own tensors cost
    there, so a move costs time in the number of these tensors and of the devices.

    >>> moves = LoadMoves(problem, placement)     # blocks are the colocation groups
    >>> moves.trial(group, device)                # seconds after the move; inf if not possible
    >>> moves.apply(group, device)                # make it

    Searches that run inside numba call ``objective_kernels.trial_move`` and ``apply_move`` on
    ``tables`` and ``state`` directly.
    """

    def __init__(self, problem: Problem, placement: ArrayLike) -> None:
        """Start from ``placement`` int32 ``[N]``.

        Raises:
            ProblemError: it is not a placement (see ``Problem.check_placement``).
        """
        from placement import objective_kernels as kernels

        self._kernels = kernels
        self.problem = problem
        self.tables = kernels.move_tables(problem, blocks(problem, problem.graph.group))
        p = problem.check_placement(placement)
        device = np.zeros(problem.graph.num_groups, np.int32)
        device[problem.graph.group] = p
        self.state = kernels.move_state(self.tables, device)

    @property
    def placement(self) -> Placement:
        """int32 ``[N]``."""
        return self.state[0][self.problem.graph.group]

    @property
    def load_s(self) -> Floats:
        """float64 ``[D]`` loads now (a copy)."""
        return self.state[1].copy()

    @property
    def held_bytes(self) -> NDArray[np.int64]:
        """int64 ``[D]`` parameter bytes now (a copy)."""
        return self.state[2].copy()

    def trial(self, group: int, device: int) -> float:
        """``max_load`` if ``group`` were on ``device``; inf: unsupported, or too large for it."""
        return float(self._kernels.trial_move(self.tables, self.state, group, device))

    def apply(self, group: int, device: int) -> None:
        """Move ``group`` to ``device``."""
        self._kernels.apply_move(self.tables, self.state, group, device)
