"""Who ran what, when: the one type that the simulator predicts and the executor measures."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.cluster import Power
from placement.tools.files import parse_json, read_arrays, write_arrays
from placement.tools.limits import MOST
from placement.tools.shown import Track, byte_size, lanes, seconds, table

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
_NO_MORE = ("sleep_w", "sleep_after_s", "sleep_exit_s")  # arrays of older files, ignored
MOST_PATTERN = 256  # micro-batches of a pattern that is looked for: all of them would take M * M


class TimelineError(ValueError):
    """A file is not a timeline; the message names it."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """``M`` micro-batches of ``N`` operators on ``D`` devices; all times in seconds from 0.

    Attributes:
        device_names: ``[D]``.
        placement: int32 ``[N]``, or ``[K, N]``: that of micro-batch ``m`` is row ``m % K``.
        start_s, end_s: float64 ``[M, N]``.
        transfers: int32 ``[X, 4]``: tensor, micro-batch, source device, destination device.
        transfer_start_s, transfer_end_s: float64 ``[X]``.
        peak_bytes: int64 ``[D]``, or None where memory was not tracked.
        measured: True if it comes from real devices.
        power: what the devices draw, or None when unknown.
        load_s: float64 ``[M, 2]`` begin and end of loading each micro-batch on the host (several
            may be loaded at once), or None where there is no loader. Loading is before the run
            of a micro-batch: no other figure counts it.
        copies: int32 ``[C, 2]``: operator, and the device that streams its parameters: as they come
            from host memory (predicted).
        copy_start_s, copy_end_s: float64 ``[C]``.
        called_s: when micro-batch 0 is called, where its first operator may have to wait for
            parameters; None: when it starts, or its input does.
        round_s: that copies for a micro-batch take on the slowest link (0: several may share them).
    """

    device_names: tuple[str, ...]
    placement: Ints
    start_s: Floats
    end_s: Floats
    transfers: Ints = field(default_factory=lambda: np.zeros((0, 4), np.int32))
    transfer_start_s: Floats = field(default_factory=lambda: np.zeros(0))
    transfer_end_s: Floats = field(default_factory=lambda: np.zeros(0))
    peak_bytes: NDArray[np.int64] | None = None
    measured: bool = False
    power: Power | None = None
    load_s: Floats | None = None
    copies: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int32))
    copy_start_s: Floats = field(default_factory=lambda: np.zeros(0))
    copy_end_s: Floats = field(default_factory=lambda: np.zeros(0))
    called_s: float | None = None
    round_s: float = 0.0

    def _repr_html_(self) -> str:
        """What a notebook shows: figures, and who was busy when."""
        rows = []
        for d, name in enumerate(self.device_names):
            peak = "-" if self.peak_bytes is None else byte_size(float(self.peak_bytes[d]))
            share = f"{100 * self.utilisation[d]:.0f} %"
            counts = " / ".join(f"{n}" for n in (np.atleast_2d(self.placement) == d).sum(axis=1))
            rows.append([name, counts, seconds(self.busy_s[d]), share, peak])
        first = "micro-batch 0" if self.num_microbatches > 1 else "latency"
        title = (
            f"Timeline, {'measured' if self.measured else 'predicted'}: {first} "
            f"{seconds(self.latency_s)}, period {seconds(self.period_s)}, "
            f"{self.num_microbatches} micro-batches"
        )
        return lanes(title, self.tracks(), self.makespan_s) + table(
            "devices", ["device", "operators", "busy", "share", "peak memory"], rows
        )

    def tracks(self) -> list[Track]:
        """What each device runs, from when the run begins."""
        batch = np.broadcast_to(np.arange(self.num_microbatches)[:, None], self.start_s.shape)
        start, end, on = self.start_s - self.begin_s, self.end_s - self.begin_s, self.device_of
        each = enumerate(zip(self.device_names, self.utilisation.tolist(), strict=True))
        return [
            (name, start[on == d], end[on == d], batch[on == d], share) for d, (name, share) in each
        ]

    def check(self) -> None:
        """Raise ``TimelineError`` where a part is not what the others make it; for what is read."""
        names, shape = self.device_names, np.shape(self.start_s)
        if not (names and all(type(x) is str for x in names) and isinstance(self.measured, bool)):
            raise TimelineError("device_names must be texts, and measured true or false")
        if len(shape) != 2 or 0 in shape:
            raise TimelineError(f"start_s has shape {shape}, expected [M, N]")
        (m, n), d, x = shape, len(names), len(np.atleast_1d(self.transfers))
        phases = np.shape(self.placement)[:-1]
        if len(phases) > 1 or 0 in phases:
            raise TimelineError(f"placement has shape {np.shape(self.placement)}, expected [K, N]")
        times, watts = (-MOST.seconds, MOST.seconds), (0.0, np.inf)
        power = {} if self.power is None else vars(self.power)
        for what, array, kind, expected, (low, high) in (
            ("placement", self.placement, "i", (*phases, n), (0, d - 1)),
            ("start_s", self.start_s, "f", (m, n), times),
            ("end_s", self.end_s, "f", (m, n), times),
            ("transfers", self.transfers, "i", (x, 4), (0, 2**31 - 1)),
            ("transfers of a micro-batch", self.transfers[..., 1:2], "i", (x, 1), (0, m - 1)),
            ("transfers of a device", self.transfers[..., 2:], "i", (x, 2), (0, d - 1)),
            ("transfer_start_s", self.transfer_start_s, "f", (x,), times),
            ("transfer_end_s", self.transfer_end_s, "f", (x,), times),
            ("copies", self.copies, "i", (len(self.copies), 2), (0, max(n, d) - 1)),
            ("copy_start_s", self.copy_start_s, "f", (len(self.copies),), times),
            ("copy_end_s", self.copy_end_s, "f", (len(self.copies),), times),
            ("peak_bytes", self.peak_bytes, "i", (d,), (0, 2**63 - 1)),
            ("load_s", self.load_s, "f", (m, 2), times),
            *((key, array, "f", (d,), watts) for key, array in power.items()),
        ):
            if array is None:
                continue
            if array.dtype.kind != kind or array.shape != expected:
                raise TimelineError(f"{what} is {array.dtype} {array.shape}, expected {expected}")
            if not ((array >= low) & (array <= high)).all():  # comparisons with NaN are false
                raise TimelineError(f"{what} must be from {low:g} to {high:g}")
        called_s = 0.0 if self.called_s is None else self.called_s
        for what, value, low in ("called_s", called_s, times[0]), ("round_s", self.round_s, 0.0):
            if not (isinstance(value, int | float) and low <= value <= MOST.seconds):
                raise TimelineError(f"{what} = {value!r}: must be from {low:g} to {MOST.seconds:g}")
        if (self.end_s < self.start_s).any() or (self.transfer_end_s < self.transfer_start_s).any():
            raise TimelineError("something ends before it starts")

    @property
    def num_microbatches(self) -> int:
        """``M``."""
        return self.start_s.shape[0]

    @cached_property
    def device_of(self) -> Ints:
        """int32 ``[M, N]``: the device of each operator of each micro-batch."""
        phases = np.atleast_2d(self.placement)
        if len(phases) == 1:
            return np.broadcast_to(phases, self.start_s.shape)
        return phases[np.arange(self.num_microbatches) % len(phases)]

    @cached_property
    def begin_s(self) -> float:
        """When the first operator, or the transfer of its input, starts."""
        first = float(self.start_s.min())
        first = first if self.called_s is None else min(first, self.called_s)
        return min(first, float(self.transfer_start_s.min(initial=first)))

    @cached_property
    def makespan_s(self) -> float:
        """First start to last end of the whole run."""
        return float(self.end_s.max()) - self.begin_s + self.summing_s

    @cached_property
    def summing_s(self) -> float:
        """Seconds after the last operator in which gradients of replicas travel (predicted)."""
        last = float(self.end_s.max())
        return 0.0 if self.measured else float(self.transfer_end_s.max(initial=last)) - last

    @cached_property
    def span_s(self) -> Floats:
        """float64 ``[M]`` first start (or input transfer) to last end of each micro-batch."""
        first = self.start_s.min(axis=1)
        np.minimum.at(first, self.transfers[:, 1], self.transfer_start_s)
        first[0] = min(first[0], first[0] if self.called_s is None else self.called_s)
        return self.end_s.max(axis=1) - first

    @cached_property
    def latency_s(self) -> float:
        """First start to last end of micro-batch 0: the latency of an item if ``M == 1``.

        With more, the others take its devices in between.
        """
        return float(self.span_s[0])

    @cached_property
    def period_s(self) -> float:
        """Steady-state seconds per micro-batch (see ``steady_period``)."""
        # Of the last half: the first micro-batches of a measured run may be cold.
        m, phases = self.num_microbatches, np.atleast_2d(self.placement)
        first = min((m - 1) // 2, max(m - len(phases), 0))
        took = self.end_s - self.start_s
        load = np.zeros(len(self.device_names))
        for k, phase in enumerate(phases[:m]):
            mine = took[first + (k - first) % len(phases) :: len(phases)]
            load += np.bincount(phase, mine.mean(axis=0), len(load))
        busiest = load.max() / min(m, len(phases))
        finish_s = self.end_s.max(axis=1) - self.begin_s
        steady_s = float(steady_period(finish_s, max(busiest, self.round_s), len(phases)))
        return steady_s + self.summing_s / m

    @cached_property
    def busy_s(self) -> Floats:
        """float64 ``[D]`` seconds each device spent in operators."""
        busy = np.zeros(len(self.device_names))
        took = self.end_s - self.start_s
        phases = np.atleast_2d(self.placement)
        for k, phase in enumerate(phases):
            np.add.at(busy, phase, took[k :: len(phases)].sum(axis=0))
        return busy

    @cached_property
    def utilisation(self) -> Floats:
        """float64 ``[D]`` ``busy_s`` as a share of the makespan."""
        return self.busy_s / max(self.makespan_s, 1e-30)

    @cached_property
    def energy_j(self) -> float | None:
        """``busy_w * busy_s``, and ``idle_w`` for the rest of the makespan, summed over devices;
        None if power is unknown."""
        if self.power is None:
            return None
        return float(self.power.energy_j(self.makespan_s, self.busy_s))

    @property
    def kind(self) -> str:
        """``"measured"`` or ``"predicted"``."""
        return "measured" if self.measured else "predicted"

    def to_trace(self, op_name: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Chrome/Perfetto trace: a process named after the timeline's ``kind``, with a track per
        device, per pair of devices that talk, per loader.

        Times are microseconds. Load it at https://ui.perfetto.dev or chrome://tracing.
        """
        names = op_name or tuple(f"op{n}" for n in range(self.start_s.shape[1]))
        on = self.device_of
        devices = self.device_names
        pairs = sorted({(int(a), int(b)) for _, _, a, b in self.transfers})
        tid = {pair: len(devices) + i for i, pair in enumerate(pairs)}
        tracks = [*devices, *(f"{devices[a]} -> {devices[b]}" for a, b in pairs)]
        events = [_named("process_name", 0, self.kind)]
        events += [_named("thread_name", i, name) for i, name in enumerate(tracks)]
        for m in range(self.num_microbatches):
            for n, name in enumerate(names):
                args = {"micro_batch": m, "operator": n}
                ends = self.start_s[m, n], self.end_s[m, n]
                events.append(_slice(name, int(on[m, n]), *ends, args))
        for (t, m, a, b), start, end in zip(
            self.transfers.tolist(), self.transfer_start_s, self.transfer_end_s, strict=True
        ):
            args = {"micro_batch": m, "tensor": t}
            events.append(_slice(f"tensor {t}", tid[a, b], start, end, args))
        for d in np.unique(self.copies[:, 1]).tolist():
            mine = self.copies[:, 1] == d
            columns = self.copies[mine, 0], self.copy_start_s[mine], self.copy_end_s[mine]
            events.append(_named("thread_name", len(tracks), f"parameters -> {devices[d]}"))
            for n, start, end in zip(*columns, strict=True):
                args = {"operator": int(n)}
                events.append(_slice(f"parameters of {names[n]}", len(tracks), start, end, args))
            tracks.append(devices[d])
        if self.load_s is not None:
            base = len(tracks)
            lanes = side_by_side(self.load_s)
            for lane in range(int(lanes.max()) + 1):
                name = f"loader {lane}" if lane else "loader"
                events.append(_named("thread_name", base + lane, name))
            for m, (start, end) in enumerate(self.load_s):
                args = {"micro_batch": m}
                events.append(_slice(f"load {m}", base + int(lanes[m]), start, end, args))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write one ``.npz`` file, atomically (arrays and JSON text; no pickle).

        Raises:
            FileError: it cannot be written there.
        """
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays: dict[str, Any] = {k: v for k, v in values.items() if isinstance(v, np.ndarray)}
        arrays |= {} if self.power is None else vars(self.power)
        names = "device_names", "measured", "called_s", "round_s"
        head = json.dumps({name: values[name] for name in names})
        write_arrays(path, head=np.array(head), **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read a file written by ``save``.

        Raises:
            TimelineError: missing, truncated or not a timeline.
        """
        try:
            arrays = read_arrays(path)
            head = parse_json(str(arrays.pop("head")))
            head["device_names"] = tuple(head["device_names"])
            watts = {f.name: arrays.pop(f.name) for f in fields(Power) if f.name in arrays}
            power = Power(**watts) if watts else None
            for name in _NO_MORE:
                arrays.pop(name, None)
            line = cls(power=power, **head, **arrays)
            line.check()
            return line
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise TimelineError(f"{path}: not a readable timeline ({error})") from error


def side_by_side(spans_s: Floats) -> Ints:
    """int32 ``[K]``: the first lane that is free for each span float64 ``[K, 2]``."""
    lanes = np.zeros(len(spans_s), np.int32)
    free_s: list[float] = []
    for k in np.argsort(spans_s[:, 0], kind="stable"):
        begin, end = spans_s[k]
        lane = next((i for i, t in enumerate(free_s) if t <= begin), len(free_s))
        free_s[lane : lane + 1] = [end]
        lanes[k] = lane
    return lanes


def joined(key: ArrayLike, begin: Floats, until: Floats, gap: float = 0.0) -> tuple[Any, ...]:
    """Spans ``[K]`` of one key that are at most ``gap`` apart as one: keys, begins and ends."""
    key = np.asarray(key)
    order = np.lexsort((begin, key))
    key, begin, reach = key[order], begin[order], until[order].copy()
    same = np.append(False, np.diff(key) == 0)[: len(key)]
    for k in np.flatnonzero(same):  # in order: what reaches furthest is carried along
        reach[k] = max(reach[k], reach[k - 1])
    fresh = ~same
    fresh[1:] |= begin[1:] - reach[:-1] > gap
    first = np.flatnonzero(fresh)
    last = np.append(first, len(fresh))[1:] - 1
    return key[first], begin[first], reach[last]


def _named(what: str, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}


def _slice(name: str, tid: int, start: float, end: float, args: dict[str, int]) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "ts": float(start) * 1e6,
        "dur": float(end - start) * 1e6,
        "pid": 0,
        "tid": tid,
        "args": args,
    }


def steady_period(finish_s: Floats, busiest_s: ArrayLike = 0.0, num_phases: int = 1) -> Floats:
    """Seconds per micro-batch in steady state, float64 ``[...]``.

    ``finish_s`` float64 ``[..., M]``: when each micro-batch finished, from the begin of the
    run. ``busiest_s`` float64 ``[...]``: seconds per micro-batch of the busiest device (0:
    unknown). It bounds every steady state from below, but not the slope of a short run, which
    may end in a burst of micro-batches that were started long before. With several phases the
    slope is of whole rounds of them: parts of a round are of other devices than the rest.

    Exact where the gaps of the last half repeat with some pattern of ``k <= M // 4`` and at most
    ``MOST_PATTERN`` micro-batches (to 1e-9); otherwise the slope over the last half.
    """
    finish = np.asarray(finish_s, dtype=np.float64)
    # Of several phases some overtake others, and wait to be handed out: results leave in order.
    finish = np.maximum.accumulate(finish, axis=-1) if num_phases > 1 else np.sort(finish, axis=-1)
    m = finish.shape[-1]
    if m == 1:
        return np.maximum(finish[..., 0], busiest_s)
    first = (m - 1) // 2
    if m > num_phases:
        first = min(first, m - 1 - num_phases)
        first += (m - 1 - first) % num_phases
    tail = np.diff(finish[..., first:], axis=-1)
    period = (finish[..., -1] - finish[..., first]) / (m - 1 - first)
    tolerance = 1e-9 * np.maximum(finish[..., -1] / m, 1e-300)
    for k in range(
        min(m // 4, tail.shape[-1] // 2, MOST_PATTERN), 0, -1
    ):  # the shortest pattern wins
        repeats = np.abs(tail[..., k:] - tail[..., :-k]).max(axis=-1) <= tolerance
        period = np.where(repeats, tail[..., -k:].mean(axis=-1), period)
    return np.maximum(period, busiest_s)


def least_window(num_microbatches: int) -> int:
    """The fewest last micro-batches by which ``steady_period`` measures a run of one phase."""
    last, patterns = _windows(num_microbatches)
    return min((last // k * k for k in patterns), default=last)


def _windows(num_microbatches: int) -> tuple[int, range]:
    """The last half of a run of one phase, and the lengths of patterns looked for in it."""
    last = num_microbatches - 1 - (num_microbatches - 1) // 2
    return last, range(1, min(num_microbatches // 4, last // 2, MOST_PATTERN) + 1)


def longest_flight(num_microbatches: int, max_in_flight: int) -> float:
    """Periods, by ``steady_period`` of one phase, that a micro-batch takes at most; inf: any.

    The one that finishes ``max_in_flight`` later begins no sooner than it ends: as often as they
    follow each other in what a period is measured by; on average, where that is a pattern.
    """
    if num_microbatches == 1:
        return 1.0
    last, patterns = _windows(num_microbatches)
    windows = [last, *(last // k * k for k in patterns if k + max_in_flight - 1 > last)]
    if min(windows) < max_in_flight:
        return np.inf
    return max(w / (w // max_in_flight) for w in windows)
