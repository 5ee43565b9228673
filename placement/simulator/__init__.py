"""Predict the timeline of a placement: one numba kernel, and what it means in plain Python.

**Meaning** (``simulate_reference`` is the executable definition; the kernel equals it).

* A placement int32 ``[N]`` holds for every micro-batch. One int32 ``[K, N]`` is *periodic*: row
  ``m % K``, the *phase*, is that of micro-batch ``m``; so replicas take turns.
* A device is a serial worker. A free device takes, among the (operator, micro-batch) whose
  inputs have arrived, the smallest micro-batch, then the first by ``Problem.priority`` (upward
  rank, unless the profile was measured in another order); with ``ready_order="arrival"`` the
  one whose last input arrived first, then the smallest micro-batch, then the smallest operator;
  with a ``Schedule`` it takes the next entry of its order.
* A tensor is sent once per (micro-batch, destination device). It is queued on the channel of
  its device pair when its producer ends and leaves when the channel is free (without
  ``contention``: at once, however many are under way). Tensors of one
  producer are queued by tensor number, then by first consumer. A blocking link keeps the
  sender's worker busy until its transfer ends. Handing tensors over takes it ``send_s`` and
  ``send_s_per_byte`` each, and ``wake_s`` for each receiver that is idle (runs, sends and awaits
  nothing at that moment) and so must be woken, from the end of the producer on. Taking one in
  makes the operator that reads it there take ``receive_s`` longer; of several the one with the
  smallest number.
* At equal times all ends come first, then admissions, then starts, each in device order.
* At most ``max_in_flight`` micro-batches are between first operator and last; the next is
  admitted when one finishes. A given ``Schedule`` limits itself and all are admitted at 0.
* What is placed on a device that ``streams`` runs on its ``Problem.worker``, which alone counts
  from there on.
* Model inputs are present for every device that shares host memory (kind ``cpu``) at
  admission, and are sent to the others from the first CPU device.
* Besides that operators take ``compute_s + share * (loaded_s - compute_s)``. In a run of one
  micro-batch ``share`` is the share of the other devices that run something when the operator
  begins (or begin at the same moment). In a pipelined run it is how much of the time they are
  busy (their mean load over the largest load, and a load the mean over the phases), and
  operators are stretched alike so that all of a micro-batch together take ``batch_s`` longer.
* In training, what replicas have added up travels after the last operator to the device that
  makes the gradient in phase 0, from each device of other memory (those of kind ``cpu`` share
  one); when all is there, new values travel back. Of that the period has the ``M``-th part.
* Memory: parameters, plus every tensor from when its producer is taken (or its transfer begins)
  until its last consumer or outgoing transfer on that device ended (outputs: until their
  micro-batch finished), plus the workspace of running operators. Tensors that share memory
  (views) hold it together, once. Model inputs count from their admission on every CPU device
  that uses them. Frees come before allocations at equal times.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from math import isclose
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.objective import Objective
from placement.problem import ROUNDING, Placement, Problem, Solution, host_of
from placement.schedule import Schedule
from placement.timeline import Timeline, steady_period

if TYPE_CHECKING:
    from placement.simulator import kernels

Floats = NDArray[np.float64]


def durations(problem: Problem, placement: Placement, num_microbatches: int) -> Floats:
    """float64, as ``placement``: seconds each operator takes in a run of ``num_microbatches``.

    In a run of one these are the least: see ``beside``.
    """
    rows = np.arange(problem.num_ops)
    compute_s = problem.compute_s[rows, placement]
    alone = compute_s + receiving(problem, placement)
    if num_microbatches == 1:
        return alone
    phases = placement.size // problem.num_ops
    worker = problem.worker[placement]
    load = np.bincount(worker.ravel(), alone.ravel(), problem.num_devices) / phases
    if not np.isfinite(load).all() or load.max() == 0:
        return alone
    # One device has no neighbours.
    share = (load.sum() - load) / load.max() / max(problem.num_workers - 1, 1)
    seconds = alone + share[worker] * (problem.loaded_s[rows, placement] - compute_s)
    whole = seconds.sum(axis=-1, keepdims=True)
    stretched: Floats = seconds * (1.0 + problem.profile.batch_s / np.where(whole > 0, whole, 1.0))
    return stretched


def receiving(problem: Problem, placement: Placement) -> Floats:
    """float64, as ``placement``: seconds more of operators that take in what other devices made."""
    g, more = problem.graph, np.zeros(np.shape(placement))
    made = g.tensor_src[g.use_tensor] >= 0
    tensor, reader = g.use_tensor[made], g.use_dst[made]
    if not problem.link_receive_s.any():
        return more
    for row, on in zip(np.atleast_2d(more), np.atleast_2d(placement), strict=True):
        worker = problem.worker[on]
        _, first = np.unique(np.stack([tensor, worker[reader]]), axis=1, return_index=True)
        by, source = reader[first], worker[g.tensor_src[tensor[first]]]
        np.add.at(row, by, problem.link_receive_s[source, worker[by]])
    return more


def beside(problem: Problem, placement: Placement, num_microbatches: int) -> Floats:
    """float64 ``[N]`` seconds more for each other device that runs when an operator begins."""
    rows = np.arange(problem.num_ops)
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
        ScheduleError: the schedule does not fit, or deadlocks.
    """
    from placement.simulator import kernels

    p, m = _checked(problem, placement, schedule, num_microbatches)
    phases = min(p.size // problem.num_ops, m)
    if schedule is None:
        window = min(m, problem.max_in_flight)
        with kernels.room(problem, m, window, True, True, phases) as run:
            return _run(problem, p, run)
    sent = len(problem.graph.use_dst) * m
    run = kernels.state_of(problem, m, m, True, _flat_order(schedule), sent, phases)
    return _run(problem, p, run)


def _run(problem: Problem, placement: Placement, run: kernels.State) -> Timeline:
    from placement.simulator import kernels

    m = run.num_batches
    phases = np.atleast_2d(placement)[:m]
    run.placement[:] = phases.ravel()
    run.seconds[:] = durations(problem, phases, m).ravel()
    run.beside_s[:] = beside(problem, phases[0], m)
    status = kernels.run(kernels.tables(problem), run)
    assert status == 0, "a topological order cannot deadlock, and schedules were checked"
    sent = run.num_sent
    transfers = run.transfers[:sent], run.transfer_start[:sent], run.transfer_end[:sent]
    peak = run.peak + problem.param_bytes_on(placement)
    return _timeline(problem, placement, run.start.copy(), run.end.copy(), transfers, peak)


def _timeline(
    problem: Problem,
    placement: Placement,
    start_s: Floats,
    end_s: Floats,
    transfers: tuple[NDArray[np.int32], Floats, Floats],
    peak_bytes: NDArray[np.int64],
) -> Timeline:
    """With what replicas add up behind the ``transfers``: int32 ``[X, 4]``, begins and ends."""
    phases = np.atleast_2d(placement)[: len(end_s)]
    sums = summing(problem, phases, len(end_s), float(end_s.max()))
    both = [np.concatenate([a, b]) for a, b in zip(transfers, sums, strict=True)]
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
    )


def summing(
    problem: Problem, placement: Placement, num_microbatches: int, after_s: float
) -> tuple[NDArray[np.int32], Floats, Floats]:
    """Transfers of gradients, and then of new values, after a training step of replicas.

    ``placement`` ``[K, N]``. Returns, as ``Timeline`` has them, int32 ``[X, 4]`` (of the last
    micro-batch), and when each begins and ends.
    """
    g = problem.graph
    memory = [d.kind == "cpu" or -i for i, d in enumerate(problem.cluster.devices)]
    there: dict[tuple[int, int, int], None] = {}
    back: dict[tuple[int, int, int], None] = {}
    sources = problem.worker[placement][:, g.tensor_src[g.gradient_tensor]]
    for s in np.flatnonzero((sources != sources[0]).any(axis=0)).tolist():
        t, home, *others = int(g.gradient_tensor[s]), *dict.fromkeys(sources[:, s].tolist())
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

    ``energy_j`` is joules per micro-batch, None where power is unknown, and ``priced_j`` what
    the objective ``energy`` is: with the worth of the run's seconds; ``peak_bytes`` is int64
    ``[B, D]``, or None where memory cannot bind; ``feasible`` is bool ``[B]``: supported
    everywhere and within the memory of every device.
    """

    latency_s: Floats
    period_s: Floats
    energy_j: Floats | None
    priced_j: Floats | None
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
    priced = None if energy is None else _priced(problem, energy, many.run_s)
    ok = alone.feasible & many.feasible
    return Values(alone.period_s, many.period_s, energy, priced, many.peak_bytes, ok)


def score(problem: Problem, placements: ArrayLike) -> Floats:
    """The problem's objective of placements int32 ``[B, N]`` or ``[B, K, N]``: float64 ``[B]``.

    inf where an operator is unsupported or memory is exceeded.

    Raises:
        ProblemError: placements of another length, or an unknown device.
    """
    if problem.objective.is_analytic:
        from placement.simulator import analytic

        return analytic.score(problem, placements)
    m = problem.num_run
    runs = _batch(problem, placements, m)
    value = runs.period_s
    if problem.objective is Objective.ENERGY:
        value = _priced(problem, _energy_j(problem, runs), runs.run_s)
    return np.where(runs.feasible, value, np.inf)


@dataclass(frozen=True, eq=False)
class _Runs:
    """Of ``B`` placements, float64 ``[B]``: the period, and seconds of the run per micro-batch
    (inf: it cannot run); ``busy_s [B, D]`` of the whole run; the rest as in ``Values``."""

    period_s: Floats
    run_s: Floats
    busy_s: Floats
    peak_bytes: NDArray[np.int64] | None
    feasible: NDArray[np.bool_]


def _batch(problem: Problem, placements: ArrayLike, num_microbatches: int) -> _Runs:
    from placement.simulator import kernels

    p = problem.as_batch(placements)
    p = p.reshape(len(p), -1, problem.num_ops)
    m, track = num_microbatches, problem.memory_may_bind
    # Each phase is asked how long it takes alone.
    rows = p.reshape(-1, 1, problem.num_ops) if m == 1 else np.ascontiguousarray(p[:, :m])
    finish, busiest = np.empty((len(rows), m)), np.empty(len(rows))
    peak = np.zeros((len(rows), problem.num_devices), np.int64)
    busy = np.zeros((len(rows), problem.num_devices))
    tables, window = kernels.tables(problem), min(m, problem.max_in_flight)
    with kernels.room(problem, m, window, track, num_phases=rows.shape[1]) as state:
        flat = rows.reshape(len(rows), -1)
        kernels.run_batch(tables, state, flat, finish, busiest, busy, peak)
    ok = np.isfinite(busiest)
    value = np.full(len(rows), np.inf)
    value[ok] = steady_period(finish[ok], busiest[ok], p.shape[1])
    run_s = np.where(ok, finish.max(axis=1) / m, np.inf)
    if rows.shape[1] > 1 and len(problem.graph.gradient_tensor):
        summing_s = [max(summing(problem, row, m, 0.0)[2], default=0.0) / m for row in rows]
        value, run_s = value + summing_s, run_s + summing_s
    runs, each = _Runs(value, run_s, busy, None, ok), len(rows) // max(len(p), 1)
    if track:
        for i in np.flatnonzero(ok):
            peak[i] += problem.param_bytes_on(p[i // each])
        fits = ok & (peak <= problem.memory_bytes).all(axis=1)
        runs = _Runs(value, run_s, busy, peak, fits)
    runs = runs if each <= 1 else _slowest(runs, each)
    return replace(runs, feasible=runs.feasible & problem.buffers_stay(p))


def _slowest(runs: _Runs, each: int) -> _Runs:
    """The slowest of every ``each`` runs, the most that any of them holds, and whether all fit."""
    at = runs.period_s.reshape(-1, each).argmax(axis=1)
    at += np.arange(len(at)) * each
    peak = runs.peak_bytes
    if peak is not None:
        peak = peak.reshape(len(at), each, -1).max(axis=1)
    fits = np.asarray(runs.feasible.reshape(-1, each).all(axis=1))
    return _Runs(runs.period_s[at], runs.run_s[at], runs.busy_s[at], peak, fits)


def _energy_j(problem: Problem, runs: _Runs) -> Floats:
    """float64 ``[B]`` joules per micro-batch (``Timeline.energy_j / M``); inf: it cannot run."""
    assert problem.power is not None, "the problem was checked"
    m = problem.num_microbatches
    energy = np.full(len(runs.run_s), np.inf)
    for i in np.flatnonzero(np.isfinite(runs.run_s)):
        energy[i] = problem.power.energy_j(runs.run_s[i], runs.busy_s[i] / m)
    return energy


def _priced(problem: Problem, energy_j: Floats, run_s: Floats) -> Floats:
    """The objective ``energy``: float64 ``[B]`` joules, and what the seconds are worth."""
    return energy_j + problem.second_j * run_s if problem.second_j else energy_j


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
    rows = np.stack([op, batch], axis=1).astype(np.int32)
    on = timeline.device_of[batch, op]
    return Schedule(tuple(rows[on == d] for d in range(problem.num_devices)), num_microbatches)


def _checked(
    problem: Problem,
    placement: ArrayLike,
    schedule: Schedule | None,
    num_microbatches: int | None,
) -> tuple[Placement, int]:
    p = problem.check_placement(placement)
    if schedule is not None:
        schedule.check(problem, p)
        return p, schedule.num_microbatches
    return p, num_microbatches or problem.num_microbatches


def _flat_order(schedule: Schedule) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Orders of all devices one after another ``[K, 2]``, and where each begins ``[D + 1]``."""
    sizes = [len(rows) for rows in schedule.order]
    flat = np.concatenate([np.reshape(r, (-1, 2)) for r in schedule.order]).astype(np.int32)
    return flat, np.cumsum([0, *sizes]).astype(np.int32)


def simulate_reference(
    problem: Problem,
    placement: ArrayLike,
    schedule: Schedule | None = None,
    num_microbatches: int | None = None,
) -> Timeline:
    """The same timeline, slowly and readably: an event heap over dictionaries."""
    p, num_batches = _checked(problem, placement, schedule, num_microbatches)
    run = _Reference(problem, p, schedule, num_batches)
    run.admit(0.0)
    while run.events:
        now = run.events[0][0]
        while run.events and run.events[0][0] == now:
            heapq.heappop(run.events)
        for device in range(problem.num_devices):
            run.end_on(device, now)
        run.admit(now)
        run.begin(now)
    sent = np.reshape(np.array(run.sent, float), (-1, 6))
    rows, begin, finish = sent[:, :4].astype(np.int32), sent[:, 4], sent[:, 5]
    peak = run.peak_bytes(rows, begin, finish)
    return _timeline(problem, p, run.start, run.end, (rows, begin, finish), peak)


class _Reference:
    """What has happened until now. A *key* is a micro-batch and an operator."""

    def __init__(
        self, problem: Problem, placement: Placement, schedule: Schedule | None, num_batches: int
    ) -> None:
        g, n, d = problem.graph, problem.num_ops, problem.num_devices
        self.problem, self.placement = problem, placement
        self.schedule, self.num_batches = schedule, num_batches
        placed = np.atleast_2d(placement)[:num_batches]
        self.phases = problem.worker[placed]
        self.window = num_batches if schedule is not None else problem.max_in_flight
        self.seconds = durations(problem, placed, num_batches)
        self.beside_s = beside(problem, placed[0], num_batches)
        self.host, self.shares_host = host_of(problem)
        self.consumers = [g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]] for t in range(g.num_tensors)]
        self.produced = [g.out_tensor[g.out_ptr[i] : g.out_ptr[i + 1]] for i in range(n)]
        self.num_inputs = np.diff(g.in_ptr)
        self.start, self.end = np.empty((2, num_batches, n))
        self.sent: list[tuple[int, int, int, int, float, float]] = []
        self.events: list[tuple[float, int]] = []  # (time, device): something may happen there
        self.missing: dict[tuple[int, int], int] = {}  # inputs that have not been sent off yet
        self.arrival: dict[tuple[int, int], float] = {}  # when the last known input arrives
        self.waiting: list[dict[tuple[int, int], float]] = [{} for _ in range(d)]
        self.running: list[tuple[int, int] | None] = [None] * d
        self.free_at = [0.0] * d  # end of the running operator or of blocking transfers
        self.told_s = [-1.0] * d  # arrival of the last that was sent there
        self.channel_free = [0.0] * problem.num_channels
        self.next_entry = [0] * d
        self.unfinished: dict[int, int] = {}
        self.admitted_s: list[float] = []

    def admit(self, now: float) -> None:
        """Micro-batches begin where there is room, and their inputs are delivered."""
        g = self.problem.graph
        while len(self.admitted_s) < self.num_batches and len(self.unfinished) < self.window:
            batch = len(self.admitted_s)
            self.admitted_s.append(now)
            self.unfinished[batch] = g.num_ops
            for op in range(g.num_ops):
                self.missing[batch, op] = int(self.num_inputs[op])
                self.arrival[batch, op] = now
                if self.num_inputs[op] == 0:
                    self._make_ready((batch, op))
            for tensor in np.flatnonzero(g.tensor_src < 0):
                self._deliver(int(tensor), batch, self.host, now, self.shares_host, 0.0)

    def end_on(self, device: int, now: float) -> None:
        """What runs on ``device`` and ends now is delivered."""
        key = self.running[device]
        if key is None or self.free_at[device] != now:
            return
        batch, op = key
        self.running[device] = None
        self.end[batch, op] = now
        own, sending = np.arange(self.problem.num_devices) == device, 0.0
        for tensor in self.produced[op]:
            until, sending = self._deliver(int(tensor), batch, device, now, own, sending)
            self.free_at[device] = max(self.free_at[device], until, now + sending)
        if self.free_at[device] > now:
            heapq.heappush(self.events, (self.free_at[device], device))
        self.unfinished[batch] -= 1
        if self.unfinished[batch] == 0:
            del self.unfinished[batch]

    def begin(self, now: float) -> None:
        """Free devices take what they run next."""
        begun = []
        for device in range(self.problem.num_devices):
            if self.running[device] is None and self.free_at[device] <= now:
                key = self._choose(device, now)
                if key is not None:
                    del self.waiting[device][key]
                    self.running[device] = key
                    self.start[key] = now
                    begun.append((device, key))
        others = sum(key is not None for key in self.running) - 1
        for device, key in begun:
            batch, op = key
            seconds = self.seconds[batch % len(self.phases), op]
            self.free_at[device] = self.start[key] + seconds + others * self.beside_s[op]
            heapq.heappush(self.events, (self.free_at[device], device))

    def _deliver(
        self,
        tensor: int,
        batch: int,
        src: int,
        now: float,
        local: NDArray[np.bool_],
        sending: float,
    ) -> tuple[float, float]:
        """Send a tensor to every device that needs it.

        Returns when blocking transfers end, and ``sending`` plus the seconds of handing it over.
        """
        problem, told_s = self.problem, self.told_s
        size = float(problem.graph.tensor_bytes[tensor])
        blocked_until = now
        arrives: dict[int, float] = {}
        for op in self.consumers[tensor]:
            dst = self._at(batch, op)
            if dst not in arrives:
                arrives[dst] = now
                if not local[dst]:
                    channel = problem.link_channel[src, dst]
                    begin = max(now, self.channel_free[channel]) if problem.contention else now
                    finish = begin + problem.transfer_s(tensor, src, dst)
                    self.channel_free[channel] = arrives[dst] = finish
                    self.sent.append((tensor, batch, src, dst, begin, finish))
                    sending += float(problem.link_send_s[src, dst])
                    sending += size * float(problem.link_send_s_per_byte[src, dst])
                    free = self.running[dst] is None and self.free_at[dst] <= now
                    if free and told_s[dst] < now:
                        sending += float(problem.link_wake_s[src, dst])
                    told_s[dst] = finish
                    if problem.link_blocking[src, dst]:
                        blocked_until = max(blocked_until, finish)
            key = (batch, int(op))
            self.missing[key] -= 1
            self.arrival[key] = max(self.arrival[key], arrives[dst])
            if self.missing[key] == 0:
                self._make_ready(key)
        return blocked_until, sending

    def _at(self, batch: int, op: int) -> int:
        return int(self.phases[batch % len(self.phases), op])

    def _make_ready(self, key: tuple[int, int]) -> None:
        device = self._at(*key)
        self.waiting[device][key] = self.arrival[key]
        heapq.heappush(self.events, (self.arrival[key], device))

    def _choose(self, device: int, now: float) -> tuple[int, int] | None:
        waiting, schedule = self.waiting[device], self.schedule
        if schedule is None:
            here = [key for key, at in waiting.items() if at <= now]
            if self.problem.ready_order == "arrival":
                return min(here, key=lambda k: (waiting[k], k), default=None)
            priority = self.problem.priority
            return min(here, key=lambda k: (k[0], priority[k[1]]), default=None)
        if self.next_entry[device] == len(schedule.order[device]):
            return None
        op, batch = map(int, schedule.order[device][self.next_entry[device]])
        key = (batch, op)
        if waiting.get(key, np.inf) > now:
            return None
        self.next_entry[device] += 1
        return key

    def peak_bytes(
        self, transfers: NDArray[np.int32], transfer_start_s: Floats, transfer_end_s: Floats
    ) -> NDArray[np.int64]:
        """int64 ``[D]``: each stored tensor is a set of intervals; the largest sum of them.

        At home a tensor lives in its root's memory, which is held while any tensor in it is; a
        copy sent elsewhere is its own.
        """
        problem, start, end = self.problem, self.start, self.end
        g, m = problem.graph, self.num_batches
        at = self.phases[np.arange(m) % len(self.phases)]  # [M, N]
        spans: dict[tuple[int, int, int], list[tuple[float, float]]] = {}

        def users(tensor: int, batch: int, device: int | np.intp) -> NDArray[np.int32]:
            all_users = g.use_dst[g.use_ptr[tensor] : g.use_ptr[tensor + 1]]
            return all_users[at[batch, all_users] == device]

        def hold(
            stored: int, batch: int, device: int | np.intp, begin: float, until: float
        ) -> None:
            spans.setdefault((stored, batch, int(device)), []).append((begin, until))

        for tensor in range(g.num_tensors):
            src, root = int(g.tensor_src[tensor]), int(g.tensor_root[tensor])
            for batch in range(m):
                if src >= 0:
                    home = int(at[batch, src])
                    until = max(end[batch, [src, *users(tensor, batch, home)]])
                    if tensor in g.output_tensor:
                        until = end[batch].max()
                    sent = (transfers[:, :2] == (tensor, batch)).all(axis=1)
                    until = max(until, *transfer_end_s[sent], 0.0)
                    hold(root, batch, home, start[batch, src], until)
                    continue
                for cpu in np.flatnonzero(self.shares_host):
                    if len(here := users(tensor, batch, cpu)):
                        hold(root, batch, cpu, self.admitted_s[batch], max(end[batch, here]))
        for (tensor, batch, _, b), begin in zip(transfers.tolist(), transfer_start_s, strict=True):
            stored = tensor if g.tensor_src[tensor] >= 0 else int(g.tensor_root[tensor])
            hold(stored, batch, b, begin, max(end[batch, users(tensor, batch, b)]))

        peak = problem.param_bytes_on(self.placement)
        for device in range(problem.num_devices):
            changes = []
            for (stored, _, where), lives in spans.items():
                if where == device:
                    size = int(g.tensor_bytes[stored])
                    for begin, until in _union(lives):
                        changes += [(begin, 1, size), (until, 0, -size)]
            if problem.profile.workspace_bytes is not None:
                for batch, op in np.argwhere(at == device):
                    size = int(problem.profile.workspace_bytes[op])
                    changes += [(start[batch, op], 1, size), (end[batch, op], 0, -size)]
            now = most = 0
            for _, _, change in sorted(changes):
                now += change
                most = max(most, now)
            peak[device] += most
        return peak


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same times."""
    merged: list[tuple[float, float]] = []
    for begin, until in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((begin, until))
    return merged
