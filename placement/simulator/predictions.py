"""Seconds, timelines and values of placements, by the kernel; what they mean is in the package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isclose
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.buffer import CALLS, NOT_LONGER
from placement.objective import Objective
from placement.problem import ROUNDING, Placement, Problem, Solution
from placement.schedule import Schedule, ScheduleError
from placement.timeline import Timeline, steady_period

if TYPE_CHECKING:
    from placement.simulator import kernels

Floats = NDArray[np.float64]


def durations(problem: Problem, placement: Placement, num_microbatches: int) -> Floats:
    """float64, as ``placement``: seconds each operator takes in a run of ``num_microbatches``.

    In a run of one these are the least: see ``beside``.
    """
    from placement.simulator import kernels

    phases = placement.size // problem.num_ops
    run = kernels.state_of(problem, min(num_microbatches, 2), 1, False, num_phases=phases)
    run.placement[:] = placement.ravel()
    kernels.durations(kernels.tables(problem), run)
    return run.seconds.reshape(placement.shape)


def beside(problem: Problem, placement: Placement, num_microbatches: int) -> Floats:
    """float64 ``[N]`` seconds more for each other device that runs when an operator begins."""
    rows, problem = np.arange(problem.num_ops), problem.without_copies
    alone = problem.compute_s[rows, placement]
    if num_microbatches > 1 or not np.isfinite(alone).all():
        return np.zeros(problem.num_ops)
    slower: Floats = problem.loaded_s[rows, placement] - alone
    return slower / max(problem.num_workers - 1, 1)


def simulate(
    problem: Problem,
    placement: ArrayLike,
    schedule: Schedule | None = None,
    num_microbatches: int | None = None,
) -> Timeline:
    """Predicted ``Timeline`` of a placement int32 ``[N]`` or ``[K, N]`` (peak memory included).

    ``num_microbatches`` defaults to the schedule's, else to the problem's.

    Raises:
        ProblemError: the placement is not one (shape, device, support, colocation).
        ScheduleError: the schedule does not fit, is of another number of micro-batches, or
            deadlocks.
    """
    from placement.simulator import kernels

    placed, m = checked(problem, placement, schedule, num_microbatches)
    num_phases = min(placed.size // problem.num_ops, m)
    if schedule is None:
        window = min(m, problem.max_in_flight)
        with kernels.room(problem, m, window, True, True, num_phases) as run:
            return _run(problem, placed, run)
    most_sent = len(problem.graph.use_dst) * m
    order = _flat_order(schedule, CALLS if m == 1 and problem.cluster.streaming else 1)
    run = kernels.state_of(problem, m, m, True, order, most_sent, num_phases)
    return _run(problem, placed, run)


def _run(problem: Problem, placement: Placement, run: kernels.State) -> Timeline:
    from placement.simulator import kernels

    tables = kernels.tables(problem)
    phases = run.placement.size // problem.num_ops
    run.placement[:] = np.atleast_2d(placement)[:phases].ravel()
    kernels.durations(tables, run)
    status = kernels.run(tables, run)
    assert status == 0, "a topological order cannot deadlock, and schedules were checked"
    sent, copied, m = run.num_sent, run.num_copied, run.num_batches
    if copied > len(run.copies):  # parameters that came were overwritten by others, over and over
        order = run.order, run.order_ptr
        count = 1 if run.alone else m
        more = len(run.transfers), phases, copied
        again = kernels.state_of(problem, count, run.window, True, order, *more)
        return _run(problem, placement, again)
    return timeline_of(
        problem,
        placement,
        run.start[:m].copy(),
        run.end[:m].copy(),
        (run.transfers[:sent], run.transfer_start[:sent], run.transfer_end[:sent]),
        run.peak + problem.resident_bytes_on(placement),
        (run.copies[:copied], run.copy_start[:copied], run.copy_end[:copied]),
        run.round_s,
        are_calls=run.alone and run.streams,
    )


Rows = tuple[NDArray[np.int32], Floats, Floats]  # of transfers or copies: begins and ends


def timeline_of(
    problem: Problem,
    placement: Placement,
    start_s: Floats,
    end_s: Floats,
    transfers: Rows,
    peak_bytes: NDArray[np.int64],
    copies: Rows,
    round_s: float,
    *,
    are_calls: bool,
) -> Timeline:
    """With what replicas add up behind the ``transfers``: int32 ``[X, 4]``, begins and ends.

    ``round_s``: that copies for a micro-batch take. If ``are_calls``, one after another, a call is
    as long as those after the first are on average, and so long at least. The longest of them that
    is not longer is shown: what it lacks is before its first operator.
    """
    called_s = 0.0 if len(copies[0]) else None  # the first operator may wait for its parameters
    if are_calls:
        finish_s = end_s.max(axis=1)
        took_s, mean_s = np.diff(finish_s), (finish_s[-1] - finish_s[0]) / (len(finish_s) - 1)
        m = 1 + int(np.where(took_s <= mean_s * NOT_LONGER, took_s, -1.0).argmax())
        since_s = float(finish_s[m] - max(mean_s, round_s))
        called_s = 0.0
        start_s, end_s = start_s[m : m + 1] - since_s, end_s[m : m + 1] - since_s
        transfers = _since(since_s, *transfers, transfers[0][:, 1] == m)
        transfers[0][:, 1] = 0
        is_late = (copies[2] > finish_s[m - 1]) & (copies[1] < finish_s[m])
        rows, began_s, came_s = _since(since_s, *copies, is_late)
        copies = rows, np.maximum(began_s, 0.0), came_s  # what was under way, from then on
    phases = np.atleast_2d(placement)[: len(end_s)]
    sums = summing(problem, phases, len(end_s), float(end_s.max()))
    both = [np.concatenate([a, b]) for a, b in zip(transfers, sums, strict=True)]
    streaming = np.array(problem.cluster.streaming, np.int32)
    return Timeline(
        device_names=problem.cluster.device_names,
        placement=problem.worker[placement],
        start_s=start_s,
        end_s=end_s,
        transfers=both[0],
        transfer_start_s=both[1],
        transfer_end_s=both[2],
        peak_bytes=peak_bytes,
        power=problem.power,
        copies=np.stack([copies[0][:, 0], streaming[copies[0][:, 1]]], axis=1),
        copy_start_s=copies[1].copy(),
        copy_end_s=copies[2].copy(),
        called_s=called_s,
        round_s=round_s,
    )


def _since(
    since_s: float, rows: NDArray[np.int32], start_s: Floats, end_s: Floats, of: Any
) -> Rows:
    """Those rows, in seconds since then."""
    return rows[of].copy(), start_s[of] - since_s, end_s[of] - since_s


def summing(
    problem: Problem, placement: Placement, num_microbatches: int, after_s: float
) -> tuple[NDArray[np.int32], Floats, Floats]:
    """Transfers of gradients, and then of new values, after a training step of replicas.

    ``placement`` ``[K, N]``. Returns, as ``Timeline`` has them, int32 ``[X, 4]`` (of the last
    micro-batch), and when each begins and ends.
    """
    g = problem.graph
    memory = [d.kind == "cpu" or -i for i, d in enumerate(problem.cluster.devices)]
    # Tensor, from, to; no transfer twice, in the order in which they are made.
    there: dict[tuple[int, int, int], None] = {}
    back: dict[tuple[int, int, int], None] = {}
    sources = problem.worker[placement][:, g.tensor_src[g.gradient_tensor]]
    for s in np.flatnonzero((sources != sources[0]).any(axis=0)).tolist():
        t, (home, *others) = int(g.gradient_tensor[s]), dict.fromkeys(sources[:, s].tolist())
        away = [d for d in others if memory[d] != memory[home]]
        there |= dict.fromkeys((t, d, home) for d in away)
        back |= dict.fromkeys((t, home, d) for d in {memory[d]: d for d in away}.values())
    begin: list[float] = []
    end: list[float] = []
    for sent in (there, back):
        free: dict[int, float] = {}
        first_s = max(end, default=after_s)
        for t, a, b in sent:
            channel = int(problem.link_channel[a, b]) if problem.contention else len(end)
            begin.append(free.get(channel, first_s))
            end.append(begin[-1] + problem.transfer_s(t, a, b))
            free[channel] = end[-1]
    rows = [(t, num_microbatches - 1, a, b) for t, a, b in (*there, *back)]
    return np.array(rows, np.int32).reshape(-1, 4), np.array(begin), np.array(end)


@dataclass(frozen=True, eq=False)
class Values:
    """What a batch of ``B`` placements is worth, float64 ``[B]``; inf = cannot run.

    ``energy_j`` is joules per micro-batch, None where power is unknown; ``peak_bytes`` is int64
    ``[B, D]``, or None where memory cannot bind; ``feasible`` is bool ``[B]``: supported
    everywhere and within the memory of every device.
    """

    latency_s: Floats
    period_s: Floats
    energy_j: Floats | None
    peak_bytes: NDArray[np.int64] | None
    feasible: NDArray[np.bool_]


def evaluate(problem: Problem, placements: ArrayLike) -> Values:
    """Latency (one micro-batch), period and energy of placements int32 ``[B, N]``, ``[B, K, N]``.

    The latency of a periodic placement is that of its slowest phase. Colocation is not checked
    here (searches move whole groups).

    Raises:
        ProblemError: placements of another length, or an unknown device.
    """
    alone, m = _batch(problem, placements, 1), problem.num_microbatches
    many = alone if m == 1 else _batch(problem, placements, m)
    energy = None if problem.power is None else _energy_j(problem, many)
    fits = [_fits(problem, runs.peak_bytes) & np.isfinite(runs.period_s) for runs in (alone, many)]
    return Values(alone.period_s, many.period_s, energy, many.peak_bytes, fits[0] & fits[1])


def worth(problem: Problem, placements: ArrayLike) -> tuple[Floats, NDArray[np.int64] | None]:
    """The problem's objective of placements int32 ``[B, N]`` or ``[B, K, N]``, and their bytes.

    Returns float64 ``[B]``, inf where an operator is unsupported, pieces wait for each other, or a
    buffer moves; and int64 ``[B, D]`` the most that devices hold, None where memory cannot bind.
    """
    if problem.objective.is_analytic:
        from placement.simulator import analytic

        return analytic.evaluate(problem, placements)
    runs = _batch(problem, placements, problem.num_run)
    value = runs.period_s
    if problem.objective is Objective.ENERGY:  # joules, and what the seconds are worth
        worth_j = problem.second_j * runs.run_s if problem.second_j else 0.0
        value = _energy_j(problem, runs) + worth_j
    return value, runs.peak_bytes


def score(problem: Problem, placements: ArrayLike) -> Floats:
    """The problem's objective of placements int32 ``[B, N]`` or ``[B, K, N]``: float64 ``[B]``.

    inf where an operator is unsupported or memory is exceeded.

    Raises:
        ProblemError: placements of another length, or an unknown device.
    """
    value, held_bytes = worth(problem, placements)
    return np.where(_fits(problem, held_bytes), value, np.inf)


def _fits(problem: Problem, held_bytes: NDArray[np.int64] | None) -> NDArray[np.bool_]:
    """bool ``[B]`` of ``[B, D]``: within the memory of every device; None: whatever it is."""
    fits = True if held_bytes is None else (held_bytes <= problem.memory_bytes).all(axis=1)
    return np.asarray(fits)


@dataclass(frozen=True, eq=False)
class _Runs:
    """Of ``B`` placements, float64 ``[B]``: the period, and seconds of the run per micro-batch
    (inf: it cannot run); ``busy_s [B, D]`` of the whole run; ``peak_bytes`` as in ``Values``."""

    period_s: Floats
    run_s: Floats
    busy_s: Floats
    peak_bytes: NDArray[np.int64] | None


def _batch(problem: Problem, placements: ArrayLike, num_microbatches: int) -> _Runs:
    """Placements int32 ``[B, N]`` or ``[B, K, N]``, each run with so many micro-batches.

    A single micro-batch is run in each of the phases, of which the slowest counts.
    """
    from placement.simulator import kernels

    m, track = num_microbatches, problem.memory_may_bind
    batch = problem.as_batch(placements)
    batch = batch.reshape(len(batch), -1, problem.num_ops)
    num_phases = batch.shape[1]
    rows = batch.reshape(-1, 1, problem.num_ops) if m == 1 else np.ascontiguousarray(batch[:, :m])
    finish, busiest = np.empty((len(rows), m)), np.empty(len(rows))
    peak = np.zeros((len(rows), problem.num_devices), np.int64)
    busy = np.zeros((len(rows), problem.num_devices))
    tables, window = kernels.tables(problem), min(m, problem.max_in_flight)
    with kernels.room(problem, m, window, track, num_phases=rows.shape[1]) as state:
        flat = rows.reshape(len(rows), -1)
        kernels.run_batch(tables, state, flat, finish, busiest, busy, peak)
    ran = np.isfinite(busiest)
    value = np.full(len(rows), np.inf)
    value[ran] = steady_period(finish[ran], busiest[ran], num_phases)
    run_s = np.where(ran, finish.max(axis=1) / m, np.inf)
    if rows.shape[1] > 1 and len(problem.graph.gradient_tensor):
        summing_s = [max(summing(problem, row, m, 0.0)[2], default=0.0) / m for row in rows]
        value, run_s = value + summing_s, run_s + summing_s
    each = max(len(rows) // max(len(batch), 1), 1)
    for i in np.flatnonzero(ran) if track else ():
        peak[i] += problem.resident_bytes_on(batch[i // each])
    if len(problem.graph.carried_op):
        moves = np.repeat(~problem.buffers_stay(batch), each)
        value[moves] = run_s[moves] = np.inf
    if each == 1:
        return _Runs(value, run_s, busy, peak if track else None)
    at = value.reshape(-1, each).argmax(axis=1)  # the slowest run of each; what any of them holds
    at += np.arange(len(at)) * each
    most = peak.reshape(-1, each, problem.num_devices).max(axis=1) if track else None
    return _Runs(value[at], run_s[at], busy[at], most)


def _energy_j(problem: Problem, runs: _Runs) -> Floats:
    """float64 ``[B]`` joules per micro-batch (``Timeline.energy_j / M``); inf: it cannot run."""
    assert problem.power is not None, "the problem was checked"
    m = problem.num_microbatches
    energy = np.full(len(runs.run_s), np.inf)
    for i in np.flatnonzero(np.isfinite(runs.run_s)):
        energy[i] = problem.power.energy_j(runs.run_s[i], runs.busy_s[i] / m)
    return energy


def value_of(problem: Problem, solution: Solution) -> float:
    """The objective of an answer: in its own order, if it has one; inf: it cannot run."""
    if solution.schedule is None or problem.objective.is_analytic:
        return float(score(problem, problem.check_placement(solution.placement)[None])[0])
    timeline = simulate(problem, solution.placement, solution.schedule)
    peak = timeline.peak_bytes
    if peak is not None and (peak > problem.memory_bytes).any():
        return float("inf")
    return value_in(problem, timeline)


def value_in(problem: Problem, timeline: Timeline) -> float:
    """The objective of a timeline: of latency, period and energy, which timelines have."""
    if problem.objective is Objective.LATENCY:
        return timeline.latency_s
    if problem.objective is Objective.PERIOD:
        return timeline.period_s
    assert timeline.energy_j is not None, "the problem was checked"
    return (timeline.energy_j + problem.second_j * timeline.makespan_s) / timeline.num_microbatches


def as_simulated(problem: Problem, solution: Solution) -> Solution:
    """The answer with the value that the simulator gives it, whatever its planner says of it.

    A ``lower_bound_s`` above that value proves nothing and is dropped.
    """
    value_s = value_of(problem, solution)
    if isclose(value_s, solution.value_s, rel_tol=ROUNDING):
        value_s = solution.value_s
    bound = solution.lower_bound_s
    if bound is not None and bound > value_s * (1 + ROUNDING):
        bound = None
    return replace(solution, value_s=value_s, lower_bound_s=bound)


def list_schedule(problem: Problem, placement: ArrayLike, num_microbatches: int) -> Schedule:
    """The order in which the list scheduler would run ``placement``, made explicit."""
    timeline = simulate(problem, placement, num_microbatches=num_microbatches)
    batch, op = np.divmod(
        np.lexsort((timeline.end_s.ravel(), timeline.start_s.ravel())), problem.num_ops
    )
    rows, on = np.stack([op, batch], axis=1), timeline.device_of[batch, op]
    return Schedule(tuple(rows[on == d] for d in range(problem.num_devices)), num_microbatches)


def checked(
    problem: Problem, placement: ArrayLike, schedule: Schedule | None, num_microbatches: int | None
) -> tuple[Placement, int]:
    """The placement, and the number of micro-batches; raises as ``simulate``."""
    p = problem.check_placement(placement)
    if schedule is not None:
        schedule.check(problem.graph, problem.cluster, p)
        if num_microbatches not in (None, schedule.num_microbatches):
            raise ScheduleError(
                f"num_microbatches = {num_microbatches}, but the schedule is for "
                f"{schedule.num_microbatches}"
            )
        return p, schedule.num_microbatches
    if num_microbatches is not None and num_microbatches != problem.num_microbatches:
        problem = replace(problem, num_microbatches=num_microbatches)
    return p, problem.num_microbatches


def _flat_order(schedule: Schedule, times: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Orders of all devices one after another ``[K, 2]``, and where each begins ``[D + 1]``.

    An order of one micro-batch is that of each of so many.
    """
    orders = [
        np.concatenate([rows + np.array([0, m]) for m in range(times)]) for rows in schedule.order
    ]
    flat, sizes = np.concatenate(orders).astype(np.int32), [len(rows) for rows in orders]
    return flat, np.cumsum([0, *sizes]).astype(np.int32)
