"""What every environment stands on: a set of problems, what a placement is worth, the reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.rewards import Outcome, Reward, log_speedup, log_speedups
from placement.problem import Placement, Planner, Problem
from placement.runs.trials import Runtime, Trials, fingerprint
from placement.search.evaluation import device_classes, single_devices
from placement.simulator import score
from placement.tools.files import short
from placement.tools.named import imported

Floats = NDArray[np.float64]
Evaluator = Callable[[Problem, Placement], Floats]  # placements [B, N] -> seconds [B]

MAX_ID = 2**24 - 1  # the largest integer that survives stable-baselines3's cast to float32


ONE_RUNTIME = (
    "a runtime runs one problem, and {}: give Measured(runtime_of), a function of the problem"
)


class EnvError(ValueError):
    """An environment was given something it cannot use; the message says what to give."""


find = partial(imported, error=EnvError)


def name_of(target: Any) -> str:
    """``package.module:name`` of a function, a class, or an instance's class; a name is itself."""
    if isinstance(target, str):
        return target
    named = target if hasattr(target, "__qualname__") else type(target)
    return f"{named.__module__}:{named.__qualname__}"


@dataclass(frozen=True)
class Measured:
    """An ``Evaluator`` that runs placements for real: ``Measured(Executor, measurements=500)``.

    A placement runs once; the two fastest so far run again with every batch, so that drift of the
    machine cancels, and values of what has run follow (see ``placement.runs.trials.Trials``).

    Attributes:
        runtime: called once per problem; makes what runs its placements.
        repeats: interleaved rounds per new placement.
        measurements: most runs per problem, None: no limit. Beyond them a new placement is an
            error, so an environment ends with what it has.
        folder: keeps what has run, a file per problem; the same training continues from it.
            None: nothing is kept.
        limit_s: seconds of a run, beyond which the placement is worth inf (see ``Trials``).
        final: share of the ``measurements`` that is for ``finals``.
    """

    runtime: Callable[[Problem], Runtime]
    repeats: int = 1
    measurements: int | None = None
    folder: str | Path | None = None
    limit_s: float | None = None
    final: float = 0.0
    _made: dict[int, Trials] = field(default_factory=dict, repr=False)

    def __call__(self, problem: Problem, placements: Placement) -> Floats:
        """Seconds float64 ``[B]`` of placements int32 ``[B, N]``; inf where memory is exceeded.

        Raises:
            TrialError: the problem's objective is one that only a formula gives, or the budget
                is spent.
        """
        return self.trials(problem)(placements)

    def trials(self, problem: Problem) -> Trials:
        """All that has run of a problem."""
        if id(problem) not in self._made:  # trials keep the problem, so that its id stays taken
            path = None
            if self.folder is not None:
                path = Path(self.folder) / f"{fingerprint(problem)[:16]}.jsonl"
            self._made[id(problem)] = Trials(
                problem,
                self.runtime(problem),
                rounds=self.repeats,
                measurements=None if self.measurements is None else self.measurements - self._last,
                path=path,
                limit_s=self.limit_s,
            )
        return self._made[id(problem)]

    @property
    def _last(self) -> int:
        """How many runs are for the finals."""
        return int(self.final * (self.measurements or 0))

    def release(self) -> None:
        """What was kept for ``finals`` may be used."""
        for trials in self._made.values():
            trials.measurements = self.measurements

    def finals(self, problem: Problem) -> None:
        """The fastest of a problem take turns with the runs that were kept: luck is found out."""
        trials = self.trials(problem)
        if self.measurements is not None:
            trials.measurements = min(self.measurements, trials.num_measurements + self._last)
            while trials.take_turn():
                pass


class Sizes(NamedTuple):
    """Room for problems: the most groups ``G``, devices ``D``, and edges between groups ``E``."""

    groups: int
    devices: int
    edges: int


@dataclass(frozen=True, eq=False)
class ProblemSet:
    """``P`` problems of different sizes, padded to ``G`` groups, ``N`` operators, ``D`` devices.

    What is placed is the *colocation group* (operators of a group share a device), so an
    action is a device per group.

    Attributes:
        problems: ``[P]``.
        reference_s: float64 ``[P]`` what reward 0 means.
        evaluator: the seconds of a placement (``placement.simulator.score`` or ``Measured``).
        reward: what these seconds are worth.
        room: padded to this, or more where a problem is larger; None: to the largest.
    """

    problems: tuple[Problem, ...]
    reference_s: Floats
    evaluator: Evaluator = score
    reward: Reward = log_speedup
    room: Sizes | None = None

    @classmethod
    def build(
        cls,
        problems: Sequence[Problem],
        reference_s: Sequence[float] | None = None,
        baseline: Planner | None = None,
        evaluator: Evaluator | Runtime = score,
    ) -> ProblemSet:
        """``reference_s`` if given, else what ``baseline`` reaches, else the best single device.

        Raises:
            EnvError: no problems, references that are not one positive number per problem, or one
                runtime for several problems.
        """
        check_problems(problems)
        if hasattr(evaluator, "run"):
            if len(problems) > 1:
                raise EnvError(ONE_RUNTIME.format(f"there are {len(problems)} problems"))
            runtime: Any = evaluator
            evaluator = Measured(lambda _: runtime)
        if reference_s is None:
            reference_s = [
                single_device_s(p, evaluator)
                if baseline is None
                else _baseline_s(p, baseline, evaluator)
                for p in problems
            ]
        references = np.asarray(reference_s, dtype=np.float64)
        if (
            references.shape != (len(problems),)
            or not (np.isfinite(references) & (references > 0)).all()
        ):
            raise EnvError(
                f"reference_s = {references.tolist()} must be one positive number of seconds for "
                f"each of the {len(problems)} problems"
            )
        return cls(tuple(problems), references, evaluator)

    def and_more(self, problems: Sequence[Problem], baseline: Planner | None) -> ProblemSet:
        """With more problems behind these; the references of those follow from ``baseline``."""
        if not problems:
            return self
        more = ProblemSet.build(problems, None, baseline, self.evaluator)
        reference_s = np.concatenate([self.reference_s, more.reference_s])
        return replace(self, problems=self.problems + more.problems, reference_s=reference_s)

    @cached_property
    def num_groups(self) -> NDArray[np.int64]:
        """int64 ``[P]`` colocation groups of each problem."""
        return np.array([p.graph.num_groups for p in self.problems])

    @cached_property
    def num_devices(self) -> NDArray[np.int64]:
        """int64 ``[P]`` devices of each problem."""
        return np.array([p.num_devices for p in self.problems])

    @cached_property
    def max_groups(self) -> int:
        """``G``."""
        return max(int(self.num_groups.max()), self.room.groups if self.room else 0)

    @cached_property
    def max_devices(self) -> int:
        """``D``."""
        return max(int(self.num_devices.max()), self.room.devices if self.room else 0)

    @cached_property
    def legal(self) -> NDArray[np.bool_]:
        """bool ``[P, G, D]`` where a group can run; a group that is only padding: device 0."""
        mask = np.zeros((len(self.problems), self.max_groups, self.max_devices), bool)
        for i, problem in enumerate(self.problems):
            groups, devices = problem.group_compute_s.shape
            mask[i, :groups, :devices] = np.isfinite(problem.group_compute_s)
            mask[i, groups:, 0] = True
        return mask

    def values(self, problem: int, choices: NDArray[np.integer[Any]]) -> Floats:
        """Seconds float64 ``[B]`` of device choices int ``[B, >= G of the problem]``.

        inf for a choice that cannot run; only the others reach the evaluator.
        """
        groups = int(self.num_groups[problem])
        rows = np.asarray(choices)[:, :groups]
        known = self.legal[problem]
        legal = known[np.arange(groups), np.clip(rows, 0, self.max_devices - 1)].all(axis=1)
        legal &= ((rows >= 0) & (rows < self.max_devices)).all(axis=1)
        seconds = np.full(len(rows), np.inf)
        if legal.any():
            answer = self.evaluator(self.problems[problem], self.placements(problem, rows[legal]))
            if self.evaluator is not score:
                answer = _checked(answer, int(legal.sum()), "evaluator", self.evaluator)
            seconds[legal] = answer
        return seconds

    def seconds(self, ids: NDArray[np.integer[Any]], choices: NDArray[np.integer[Any]]) -> Floats:
        """Seconds float64 ``[B]`` of choices ``[B, G]`` for problems int ``[B]``.

        One evaluator call, so one kernel call, per distinct problem.
        """
        seconds = np.empty(len(ids))
        for i in np.unique(ids):
            rows = np.flatnonzero(ids == i)
            seconds[rows] = self.values(int(i), choices[rows])
        return seconds

    def placements(self, problem: int, choices: NDArray[np.integer[Any]]) -> Placement:
        """int32 ``[B, N]`` device of each operator."""
        return np.asarray(choices)[:, self.problems[problem].graph.group].astype(np.int32)

    def choices(self, placements: Sequence[Placement | None]) -> NDArray[np.int32]:
        """int32 ``[P, G]`` the device of each group of a placement per problem; None: 0."""
        choices = np.zeros((len(self.problems), self.max_groups), np.int32)
        for row, problem, placement in zip(choices, self.problems, placements, strict=True):
            if placement is not None:
                row[: problem.graph.num_groups] = choice_of(problem, placement)
        return choices

    def rewards(
        self, ids: NDArray[np.integer[Any]], seconds: Floats, choices: NDArray[np.integer[Any]]
    ) -> Floats:
        """What ``seconds [B]`` of choices ``[B, G]`` for problems ``[B]`` earn, float64 ``[B]``."""
        if self.reward is log_speedup:
            return log_speedups(seconds, self.reference_s[ids])
        rewards = np.empty(len(ids))
        for i in np.unique(ids).tolist():
            rows = np.flatnonzero(ids == i)
            placements = self.placements(i, choices[rows])
            outcome = Outcome(
                self.problems[i], placements, seconds[rows], float(self.reference_s[i])
            )
            rewards[rows] = _checked(self.reward(outcome), len(rows), "reward", self.reward)
        return rewards

    def speedups(self, seconds: Floats) -> Floats:
        """float64 ``[P]`` log of reference over ``seconds [P]``, whatever the reward is."""
        return log_speedups(seconds, self.reference_s)


def check_problems(problems: Any) -> None:
    """Raises: EnvError, they are no problems."""
    listed = isinstance(problems, Sequence) and len(problems) > 0
    if not listed or not all(isinstance(p, Problem) for p in problems):
        raise EnvError("problems must be a list with at least one Problem: problems=[problem]")


def _checked(values: Any, count: int, what: str, made_by: Any) -> Floats:
    """Raises: EnvError, they are not ``count`` numbers: a network would learn to be nan."""
    try:
        numbers = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        numbers = np.full(count, np.nan)
    able = np.isfinite(numbers) if what == "reward" else numbers >= 0
    if numbers.shape != (count,) or not able.all():
        name = getattr(made_by, "__qualname__", type(made_by).__name__)
        kind = "finite numbers" if what == "reward" else "seconds, inf where a placement cannot run"
        raise EnvError(
            f"{what} {name} made {short(values)} of {count} placements; it must return as many "
            f"{kind}, float64 [{count}]"
        )
    return numbers


def single_device_s(problem: Problem, evaluator: Evaluator) -> float:
    """Seconds of the best single device; where none has the memory, of all the work in a row."""
    best = float(np.min(evaluator(problem, single_devices(problem)[:, problem.graph.group])))
    fallback = float(problem.group_compute_s.min(axis=1).sum())
    return max(best if np.isfinite(best) else fallback, 1e-12)


def _baseline_s(problem: Problem, baseline: Planner, evaluator: Evaluator) -> float:
    seconds = float(evaluator(problem, baseline(problem).placement[None])[0])
    return max(seconds, 1e-12) if np.isfinite(seconds) else single_device_s(problem, evaluator)


def choice_of(problem: Problem, placement: Placement) -> NDArray[np.int32]:
    """int32 ``[..., G]`` device of each group of placements ``[..., N]`` that obey colocation."""
    choice = np.zeros((*np.shape(placement)[:-1], problem.graph.num_groups), np.int32)
    choice[..., problem.graph.group] = placement
    return choice


def group_order(problem: Problem) -> NDArray[np.int32]:
    """int32 ``[G]`` groups by the highest priority (upward rank) of their operators."""
    first = problem.graph.per_group(problem.priority, np.minimum, problem.num_ops)
    return np.argsort(first, kind="stable").astype(np.int32)


def canonical(problem: Problem, placement: Placement) -> Placement:
    """int32 ``[N]`` the same placement with interchangeable devices in order of first use.

    Of the empty devices of one class only the first is legal in the sequential environment;
    this is the one of the equivalent placements that it can express.
    """
    classes = device_classes(problem)
    choice = choice_of(problem, placement)
    used = list(dict.fromkeys(choice[group_order(problem)].tolist()))
    used += [d for d in range(problem.num_devices) if d not in used]
    renamed = np.empty(problem.num_devices, np.int32)
    for c in range(int(classes.max()) + 1):
        renamed[[d for d in used if classes[d] == c]] = np.flatnonzero(classes == c)
    return renamed[placement]
