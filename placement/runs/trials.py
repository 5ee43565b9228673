"""``Trials``: placements run for real, as an objective that environments and searches share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.objective import Objective
from placement.problem import Placement, Problem
from placement.runs.levels import levels_and_drift
from placement.simulator import score
from placement.timeline import Timeline
from placement.tools.files import append, parse_json, read_text, short, write_atomic
from placement.tools.limits import MOST

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LATENCY_RUNS = 4  # micro-batches alone, one after another; their median is the latency
FINALISTS = 5  # take turns with the last runs of a budget
KNOWN = 2  # the fastest run again with every batch: one alone does not tell luck from a slow round


class TrialError(ValueError):
    """Placements cannot be tried as asked for, one hangs, or the budget is spent."""


class BudgetSpent(TrialError):
    """No placement can be tried any more; what has run stays known."""


class Runtime(Protocol):
    """What tries placements: ``placement.executor.Executor`` is one."""

    def run(
        self, placement: ArrayLike, *, num_microbatches: int, max_in_flight: int | None = None
    ) -> Timeline: ...


@dataclass(frozen=True, eq=False)
class Round:
    """Placements that ran one after another: int32 ``[K, N]``, and float64 ``[K]`` seconds."""

    placements: Placement
    seconds: Floats

    @property
    def keys(self) -> list[bytes]:
        """``[K]``: equal for equal placements."""
        return [p.tobytes() for p in self.placements]


@dataclass(frozen=True, eq=False)
class Samples:
    """``S`` runs of ``K`` distinct placements in ``R`` rounds.

    Attributes:
        placements: int32 ``[K, N]`` in order of their first run.
        index: int64 ``[S]`` which of them ran.
        round: int64 ``[S]`` in which round, ascending.
        seconds: float64 ``[S]`` the objective, inf where memory was exceeded.
    """

    placements: Placement
    index: Ints
    round: Ints
    seconds: Floats

    def of(self, placement: Placement) -> Floats:
        """float64 ``[runs]``: what the runs of this placement took, in their order."""
        same = (self.placements == placement).all(axis=1)
        return self.seconds[same[self.index]]


class Trials:
    """The latency or period of placements, measured; a callable ``[B, N] -> [B]`` seconds.

    Placements run in *rounds*, one after another. Every round holds the two fastest so far, so
    what slows the machine down for a while shows in them too and cancels in the ratio to them
    (see ``levels``), and a placement that was lucky is found out beside the one that it replaced.
    On a noisy machine some of the budget is for the ``fastest`` taking turns at the end, as
    ``search_measured`` does. A placement that has run is not run again unless
    ``measure`` is asked to: its value is kept. A placement that the simulator knows not to fit
    is worth inf and never runs. One run of one placement, re-measured incumbents included, is
    one *measurement* of the budget.

    After every round the runs so far are in the file at ``path``. Trials that are made again
    with the same file play them back as long as the same rounds are asked for, so whatever
    decides by measured values alone (``search_measured``) continues where it was interrupted.
    If other rounds are asked for, all that the file holds is known at once.

    Args:
        problem: objective ``latency`` (the median of ``LATENCY_RUNS`` micro-batches, each
            alone) or ``period`` (of ``problem.num_microbatches``).
        runtime: ``Executor(problem)``, or whatever runs placements.
        rounds: a call measures every new placement so often.
        measurements: most runs. None: no limit.
        path: of the file (JSON lines). None: nothing is kept.
        limit_s: seconds of a run, its start and its warm-up included. A placement that takes
            longer is worth inf; the next one waits for its end, four times as long at most.
            None: no limit.

    Raises:
        TrialError: another objective, a budget or a limit that is not positive, or a file of trials
            of another problem.
        FileError: the file cannot be written.
    """

    def __init__(
        self,
        problem: Problem,
        runtime: Runtime,
        *,
        rounds: int = 1,
        measurements: int | None = None,
        path: str | Path | None = None,
        limit_s: float | None = None,
    ) -> None:
        if not problem.objective.is_measurable:
            raise TrialError(
                f"a runtime measures period and latency, not {problem.objective}; use "
                f"problem.with_objective('period')"
            )
        limits = ("rounds", rounds), ("measurements", measurements), ("limit_s", limit_s)
        for what, limit in limits:
            if limit is not None and not limit > 0:
                raise TrialError(f"{what} = {limit} must be positive; leave it out for no limit")
        self.problem = problem
        self.runtime = runtime
        self.rounds = rounds
        self.measurements = measurements
        self.limit_s = limit_s
        self.path = None if path is None else Path(path)
        self._rounds = [] if self.path is None else list(_load(self.path, problem))
        self._played = 0  # rounds that count; those behind are played back when asked for
        if self.path is not None:  # without what an interruption cut off
            text = _line({"problem": fingerprint(problem)})
            write_atomic(self.path, text + "".join(map(_round_line, self._rounds)))
        self._known: tuple[int, Samples, Floats, Floats] | None = None
        self._simulated: dict[bytes, float] = {}

    @property
    def num_measurements(self) -> int:
        """Runs so far."""
        return sum(len(r.seconds) for r in self._rounds[: self._played])

    @property
    def num_left(self) -> float:
        """Runs that may still be made; inf where nothing limits their number."""
        return np.inf if self.measurements is None else self.measurements - self.num_measurements

    @property
    def used(self) -> float:
        """Share of the budget that is spent, 0..1."""
        return min(1.0, self.num_measurements / (self.measurements or np.inf))

    @property
    def samples(self) -> Samples:
        """All runs."""
        return self._facts()[0]

    @property
    def levels(self) -> Floats:
        """float64 ``[K]`` seconds of ``samples.placements``, without what drift did to them.

        ``log seconds = level + drift of the round + noise`` (see ``levels_and_drift``): what ran
        often keeps its mean, what ran once is drawn to the mean of all.
        """
        return self._facts()[1]

    @property
    def drift(self) -> Floats:
        """float64 ``[R]``: how many times slower than usual the machine was in each round."""
        return self._facts()[2]

    @property
    def incumbent(self) -> Placement | None:
        """int32 ``[N]`` with the lowest level, None before the first that fits."""
        return next(iter(self.fastest(1)), None)

    def fastest(self, count: int) -> Placement:
        """int32 ``[<= count, N]`` that ran, and fit, with the lowest levels; the fastest first."""
        able = int(np.isfinite(self.levels).sum())
        order = np.argsort(self.levels, kind="stable")
        return self.samples.placements[order[:able][:count]]

    @property
    def single_s(self) -> float:
        """The lowest level of a device alone, seconds; inf: none has run, or fits."""
        from placement.search.evaluation import single_devices

        alone = single_devices(self.problem)[:, self.problem.graph.group]
        singles = {p.tobytes() for p in alone}
        ran = zip(self.samples.placements, self.levels.tolist(), strict=True)
        return min((s for p, s in ran if p.tobytes() in singles), default=np.inf)

    def take_turn(self) -> bool:
        """Run the ``FINALISTS`` once more, as a round; False: no run is left, or nothing fits."""
        finalists = self.fastest(FINALISTS)
        if self.num_left < 1 or not len(finalists):
            return False
        self.measure(finalists)
        return True

    def measure(self, placements: ArrayLike) -> None:
        """Run placements int32 ``[K, N]``, each once, as one round; as many as the budget allows.

        Raises:
            TrialError: the budget is spent.
            ProblemError: a placement is not one of this problem.
        """
        rows = np.stack([self.problem.check_placement(p) for p in np.atleast_2d(placements)])
        allowed = self.num_left
        if allowed < 1:
            raise BudgetSpent(
                f"the budget is spent: {self.num_measurements} of {self.measurements} runs; allow "
                "more, or use the simulator"
            )
        rows = rows[: int(min(allowed, len(rows)))]
        if self._played < len(self._rounds):
            if self._is_next(rows):
                self._played += 1
                return
            self._played = len(self._rounds)
            return self.measure(rows)
        seconds = np.full(len(rows), np.nan)
        # Every second round backwards: who follows whom, and who is first, changes.
        for i in np.arange(len(rows))[:: -1 if self._played % 2 else 1]:
            seconds[i], left = self._in_time(rows[i])
            if left is not None and not _ends(left, 4 * (self.limit_s or 0.0)):
                # What has run is kept, and that this one hangs: who goes on does not run it again.
                at = np.isfinite(seconds)
                at[i] = True
                self._keep(Round(rows[at], np.where(np.isnan(seconds[at]), np.inf, seconds[at])))
                raise TrialError(
                    f"a placement has not ended after {5 * (self.limit_s or 0):g} s, "
                    f"and disturbs what would run next: end this process, and go on in a new one "
                    f"(placement-train: resume=true), which knows it and does not run it again"
                )
        self._keep(Round(rows, seconds))

    def _keep(self, latest: Round) -> None:
        self._rounds.append(latest)
        self._played += 1
        if self.path is not None:
            append(self.path, _round_line(latest))

    def _in_time(self, placement: Placement) -> tuple[float, Thread | None]:
        """Seconds of a run, inf beyond the limit; and what of it still runs."""
        if self.limit_s is None:
            return self._run(placement), None
        outcome: list[float | BaseException] = []

        def work() -> None:
            try:
                outcome.append(self._run(placement))
            except BaseException as error:  # the caller's, as without a thread
                outcome.append(error)

        thread = Thread(target=work, daemon=True)  # a process can end while it hangs
        thread.start()
        thread.join(self.limit_s)
        if thread.is_alive():
            return np.inf, thread
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0], None

    def __call__(self, placements: ArrayLike) -> Floats:
        """Seconds float64 ``[B]`` of placements int32 ``[B, N]``; inf where they do not fit.

        What has not run yet runs now, ``rounds`` times, together with the two fastest so far.

        Raises:
            TrialError: the budget does not suffice.
            ProblemError: a placement is not one of this problem.
        """
        rows = self.problem.as_batch(placements)
        ran = {p.tobytes() for p in self.samples.placements}
        distinct = {p.tobytes(): p for p in rows if p.tobytes() not in ran}
        fits = np.isfinite(self.simulate(list(distinct.values())))
        new = [p for p, good in zip(distinct.values(), fits, strict=True) if good]
        for at in range(0, len(new), 16):  # between two looks at the fastest
            batch = [*self.fastest(KNOWN), *new[at : at + 16]]
            if self._played < len(self._rounds) and not self._is_next(batch):
                self._played = len(self._rounds)
                return self(rows)
            for _ in range(self.rounds):
                self.measure(batch)
        level_of = dict(
            zip((p.tobytes() for p in self.samples.placements), self.levels, strict=True)
        )
        short = len(new) - sum(p.tobytes() in level_of for p in new)
        if short:
            raise BudgetSpent(
                f"the budget is spent before {short} placements have run: allow more than "
                f"{self.measurements} measurements"
            )
        return np.array([level_of.get(p.tobytes(), np.inf) for p in rows])

    def _is_next(self, placements: Sequence[Placement] | Placement) -> bool:
        """Whether the file goes on with a round of these."""
        return self._rounds[self._played].keys == [p.tobytes() for p in placements]

    def _run(self, placement: Placement) -> float:
        alone = self.problem.objective is Objective.LATENCY
        some: Any = {"num_microbatches": self.problem.num_microbatches}
        if alone:
            some = {"num_microbatches": LATENCY_RUNS, "max_in_flight": 1}
        try:
            line = self.runtime.run(placement, **some)
        except RuntimeError as error:
            from placement.executor.alone import is_short

            if is_short(error):  # of a GPU: it does not fit
                return np.inf
            raise
        seconds = float(np.median(line.span_s)) if alone else line.period_s
        peak = line.peak_bytes
        fits = peak is None or bool((peak <= self.problem.memory_bytes).all())
        return seconds if fits else np.inf

    def _facts(self) -> tuple[Samples, Floats, Floats]:
        """Samples, levels and drift, worked out once per round."""
        if self._known is None or self._known[0] != self._played:
            samples = _samples(self._rounds[: self._played], self.problem.num_ops)
            self._known = (self._played, samples, *_levels(samples, self._played))
        return self._known[1:]

    def simulate(self, placements: Sequence[Placement] | Placement) -> Floats:
        """float64 ``[K]`` the simulator's seconds of placements, worked out once each."""
        keys = [p.tobytes() for p in placements]
        new = {k: p for k, p in zip(keys, placements, strict=True) if k not in self._simulated}
        if new:
            values = score(self.problem, np.array(list(new.values())))
            self._simulated.update(zip(new, values.tolist(), strict=True))
        return np.array([self._simulated[k] for k in keys])

    @property
    def num_simulated(self) -> int:
        """Placements that were simulated."""
        return len(self._simulated)


def _ends(thread: Thread, seconds: float) -> bool:
    """Whether it has ended after so long."""
    thread.join(seconds)
    return not thread.is_alive()


def fingerprint(problem: Problem) -> str:
    """SHA-256 (hex) of what a measurement depends on: no prediction is part of it."""
    parts: tuple[str, ...] = (
        problem.graph.fingerprint,
        problem.cluster.fingerprint,
        problem.objective,
        str(problem.num_microbatches),
        str(problem.max_in_flight),
    )
    if problem.profile.order != "rank":  # as it was before there was another
        parts += (problem.profile.order,)
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def _levels(samples: Samples, rounds: int) -> tuple[Floats, Floats]:
    levels, drift = np.full(len(samples.placements), np.inf), np.zeros(rounds)
    good = np.isfinite(samples.seconds)
    if good.any():
        numbers, index = np.unique(samples.index[good], return_inverse=True)
        there, number = np.unique(samples.round[good], return_inverse=True)
        levels[numbers], drift[there] = levels_and_drift(
            index, number, np.log(samples.seconds[good])
        )
        levels[numbers] = np.exp(levels[numbers])
        levels[samples.index[~good]] = np.inf
    return levels, np.exp(drift)


def _samples(rounds: Sequence[Round], num_ops: int) -> Samples:
    number: dict[bytes, int] = {}
    placements, index, where = [], [], []
    for r, one in enumerate(rounds):
        for p, key in zip(one.placements, one.keys, strict=True):
            if key not in number:
                number[key] = len(number)
                placements.append(p)
            index.append(number[key])
            where.append(r)
    return Samples(
        np.array(placements, np.int32).reshape(-1, num_ops),
        np.array(index, np.int64),
        np.array(where, np.int64),
        np.concatenate([np.zeros(0), *(r.seconds for r in rounds)]),
    )


def _round_line(done: Round) -> str:
    return _line({"seconds": done.seconds.tolist(), "placements": done.placements.tolist()})


def _line(value: object) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _load(path: Path, problem: Problem) -> Iterator[Round]:
    """The whole rounds in the file; none if there is no file."""
    if not path.exists():
        return
    try:
        head, *lines = read_text(path).split("\n")
        if parse_json(head)["problem"] != fingerprint(problem):
            raise TrialError(
                f"{path} holds trials of another problem (model, devices, objective, "
                f"micro-batches); name another file, or delete it"
            )
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, TrialError):
            raise
        raise TrialError(f"{path} holds no trials: {error}; name another file") from error
    if lines and not _is_json(lines[-1]):
        del lines[-1]  # an interruption cut it off, or it is the end of the line before
    for i, line in enumerate(lines, start=2):
        try:
            yield _round(parse_json(line, infinite=True), problem)
        except ValueError as error:
            raise TrialError(
                f"{path}, line {i}: {error}; delete the line, or name another file"
            ) from error


def _is_json(text: str) -> bool:
    try:
        parse_json(text, infinite=True)
    except ValueError:
        return False
    return True


def _round(row: Any, problem: Problem) -> Round:
    """Raises: ValueError, it is no round of this problem."""
    # Older files also have what a round took.
    if not isinstance(row, dict) or row.keys() - {"took_s"} != {"seconds", "placements"}:
        raise ValueError(f"{short(row)} is no object of seconds and placements")
    seconds, placements = row["seconds"], row["placements"]
    if not isinstance(seconds, list) or not all(map(_is_time, seconds)):
        raise ValueError(f"seconds = {short(seconds)} must be times")
    if not isinstance(placements, list) or not 0 < len(placements) == len(seconds):
        raise ValueError(f"there must be a placement for each of {len(seconds)} seconds")
    checked = [_placement(p, problem) for p in placements]
    return Round(np.stack(checked), np.array(seconds, np.float64))


def _placement(numbers: Any, problem: Problem) -> Placement:
    if not isinstance(numbers, list) or not all(type(d) is int and abs(d) < 2**31 for d in numbers):
        raise ValueError(f"placement {short(numbers)} is no list of device numbers")
    return problem.check_placement(numbers)


def _is_time(value: Any) -> bool:
    """Seconds above 0; infinite ones are of what did not fit."""
    return type(value) in (int, float) and (0 < value <= MOST.seconds or value == np.inf)
