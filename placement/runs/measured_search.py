"""Search with few real measurements: the simulator proposes, measurement decides."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.planners import PlannerError, load
from placement.planners.macro_search import MacroSearch
from placement.problem import Placement, Solution
from placement.runs.trials import KNOWN, BudgetSpent, TrialError, Trials
from placement.search.evaluation import (
    Choice,
    can_move,
    moves,
    random_placements,
    single_devices,
)
from placement.simulator import score
from placement.tools.progress import Progress

Floats = NDArray[np.float64]

# Placements of other kinds than a search's, which are many small pieces: the simulator may be
# wrong about what these have in common.
_OTHERS = ("contiguous_dp", "balanced_split", "pipedream", "level_balance", "heft")


class MeasuredParams(NamedTuple):
    """The numbers of ``search_measured``."""

    start: int = 8  # times as many simulated placements go into the first answer as into a round
    design: float = 0.12  # of the measurements are of other kinds, before anything is chosen
    batch: int = 4  # new measurements of a round, beside the two fastest
    drawn: float = 0.25  # of the proposals of a round are random placements
    parents: int = 16  # the best so far, from which proposals come
    children: int = 64  # proposals between two looks at who is best
    final: float = 0.3  # of the measurements are for the finalists, who take turns


PARAMS = MeasuredParams()


def search_measured(
    trials: Trials,
    start: ArrayLike | None = None,
    *,
    evaluations: int = 1024,
    seed: int = 0,
    progress: Progress | None = None,
) -> Solution:
    """The fastest placement that the budget of ``trials`` finds.

    First run: what was given to start with, the answer of ``macro_search`` on the simulator, every
    single device, and an eighth of the budget of other kinds: constructed placements, and the
    best simulated of random cuts and scatterings. Then, round after round, ``evaluations``
    placements, random ones and macro moves around the best, are simulated, and the fastest of
    those that have not run are measured beside the two fastest. The rest of the budget is for the
    finalists, who take turns. The answer has the lowest level of those that have run. (To choose
    by a learned ratio of measured to simulated time was no better: experiments/LOG.md.)

    No decision depends on the clock: with a file, ``Trials`` continue where they were.

    Args:
        trials: with a budget, of a problem whose objective is measured.
        start: int32 ``[K, N]`` placements to begin with, e.g. a planner's answer.
        evaluations: simulated placements per round.
        seed: of the proposals.
        progress: told what is being done.

    Returns:
        Solution: ``value_s`` is simulated; ``stats`` has ``measured_s`` and
        ``measured_single_s`` (of the best single device, inf if none fits), ``measurements``,
        ``seconds``, ``evaluations`` (simulated ones) and ``curve`` (measurements, measured
        seconds of the incumbent then).

    Raises:
        TrialError: no budget, or nothing fits in memory.
    """
    if trials.measurements is None:
        raise TrialError("trials need a budget: Trials(..., measurements=100)")
    state = _State(trials, evaluations, seed)
    say = progress or (lambda what, share: None)
    first = state.first(start)
    say("measuring the starts", 0.0)
    try:
        trials.measure(first)
        state.learn()
        while trials.used < 1.0 - PARAMS.final and can_move(trials.problem):
            fastest = f"fastest {state.best_s:.4g} s"
            say(f"{trials.num_measurements} measurements, {fastest}", trials.used)
            chosen = state.choose()
            if not len(chosen):
                break
            trials.measure(np.stack([*trials.fastest(KNOWN), *chosen]))
            state.learn()
        while trials.take_turn():
            state.learn()
            say(f"finalists, fastest {state.best_s:.4g} s", trials.used)
    except BudgetSpent:  # other runs than these are in the file, and their answer is the answer
        state.learn()
    if not np.isfinite(state.best_s):
        raise TrialError(
            f"none of {len(trials.samples.placements)} placements that ran fits in memory: fewer "
            "micro-batches in flight need less, and so does a smaller batch"
        )
    stats = {
        "measured_s": state.best_s,
        "measured_single_s": trials.single_s,
        "measurements": trials.num_measurements,
        "seconds": time.perf_counter() - state.began,
        "evaluations": state.num_evaluations,
        "curve": state.curve,
    }
    value_s = float(score(trials.problem, state.incumbent)[0])
    return Solution(state.incumbent, value_s, None, stats)


class _State:
    """What is known in the middle of a search.

    Attributes:
        incumbent: int32 ``[N]`` with the lowest level, ``best_s``.
    """

    def __init__(self, trials: Trials, evaluations: int, seed: int) -> None:
        self.began = time.perf_counter()
        self.trials = trials
        self.evaluations = evaluations
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.num_evaluations = 0
        self.curve: list[tuple[int, float]] = []
        self.incumbent: Placement
        self.best_s = np.inf
        self._propose = moves(trials.problem) if can_move(trials.problem) else None

    def first(self, start: ArrayLike | None) -> Placement:
        """int32 ``[K, N]`` what is measured first, without repetitions and what does not fit."""
        problem = self.trials.problem
        answer = MacroSearch(evaluations=PARAMS.start * self.evaluations, seed=self.seed)(problem)
        self.num_evaluations += int(answer.stats["evaluations"])
        starts = [] if start is None else list(np.atleast_2d(start))
        singles = list(single_devices(problem)[:, problem.graph.group])
        rows = [*starts, answer.placement, *singles, *self.others()]
        rows = [problem.check_placement(p) for p in rows]
        distinct = list({p.tobytes(): p for p in rows}.values())
        fit = np.isfinite(self.simulate(distinct))
        if not fit.any():
            why = answer.stats.get("infeasible", "no placement that fits was found")
            raise TrialError(f"nothing to measure: {why}")
        return np.array(distinct)[fit]

    def others(self) -> list[Placement]:
        """Constructed placements, and of random cuts and scatterings those simulated best."""
        problem, most = self.trials.problem, int(PARAMS.design * self.trials.num_left)
        rows: list[Placement] = []
        for name in _OTHERS[:most]:
            with suppress(PlannerError):
                rows.append(load(name)(problem).placement)
        drawn = random_placements(problem, self.evaluations, self.rng)
        order = np.argsort(self.simulate(list(drawn)), kind="stable")
        for kind in range(2):
            rows += list(drawn[order[order % 2 == kind][: max(0, most - len(_OTHERS)) // 2]])
        return rows

    def simulate(self, placements: Sequence[Placement]) -> Floats:
        """float64 ``[B]`` the simulator's seconds, worked out once each."""
        before = self.trials.num_simulated
        seconds = self.trials.simulate(placements)
        self.num_evaluations += self.trials.num_simulated - before
        return seconds

    def learn(self) -> None:
        """Note what has been measured."""
        levels = self.trials.levels
        best = int(np.argmin(levels))
        self.incumbent, self.best_s = self.trials.samples.placements[best], float(levels[best])
        self.curve.append((self.trials.num_measurements, self.best_s))

    def choose(self) -> list[Placement]:
        """What to measure next beside the fastest: the best ``batch`` that have not run.

        Proposals come from the best so far, at first those that measured fastest.
        """
        assert self._propose is not None
        group = self.trials.problem.graph.group
        first = np.unique(group, return_index=True)[1]
        ran = self.trials.samples.placements
        costs: dict[bytes, float] = {}
        choices: dict[bytes, Choice] = {}

        def add(rows: list[Choice]) -> None:
            new = {c.tobytes(): c for c in rows if c.tobytes() not in costs}
            if new:
                choices.update(new)
                simulated = self.simulate(list(np.array(list(new.values()))[:, group]))
                costs.update(zip(new, simulated.tolist(), strict=True))

        add(list(ran[np.argsort(self.trials.levels, kind="stable")[: PARAMS.parents]][:, first]))
        drawn = int(PARAMS.drawn * self.evaluations)
        add(list(random_placements(self.trials.problem, drawn, self.rng)[:, first]))
        left = self.evaluations - drawn
        while left > 0:
            parents = sorted(costs, key=costs.__getitem__)[: PARAMS.parents]
            rows = []
            for _ in range(min(PARAMS.children, left)):
                # The better half of the parents has three quarters of the children.
                choice = choices[parents[int(len(parents) * self.rng.random() ** 2)]].copy()
                for _ in range(min(4, self.rng.geometric(0.6))):
                    groups, device = self._propose(self.rng, choice)
                    choice[groups] = device
                rows.append(choice)
            add(rows)
            left -= len(rows)
        barred = {p.tobytes() for p in ran}
        best = sorted((k for k in costs if np.isfinite(costs[k])), key=costs.__getitem__)
        fastest = (np.ascontiguousarray(choices[k][group]) for k in best)
        return list(islice((p for p in fastest if p.tobytes() not in barred), PARAMS.batch))
