"""What training costs: steps per second, seconds to reach the best baseline, memory."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from experiments.budgets import BASELINES, COST
from experiments.learned import problems as families
from experiments.learned.study import learned_study
from experiments.runs import GIB, limited, resident_bytes
from experiments.study import Options, say
from experiments.tables import Column, groups, number, table
from placement.planners import PlannerError, load
from placement.problem import Problem
from placement.simulator import score, value_of

LIMIT_S = 3600.0


@dataclass(frozen=True)
class Row:
    """One training; seconds of processor time, None where not measured.

    ``steps_per_s``: environment steps, all trainings that ran side by side together.
    ``greedy_reached_s``, ``best_reached_s``: until the greedy decode, and the best placement
    met so far, were as good as the best of all baselines; None: not within ``limit_s``.
    """

    what: str
    problem: str
    formulation: str
    cores: int
    seed: int
    steps: int
    limit_s: float | None
    steps_per_s: float | None
    peak_bytes: int | None
    baseline_s: float | None
    greedy_reached_s: float | None
    best_reached_s: float | None


def problems(options: Options) -> families.Problems:
    """Layered graphs of 100 and 300 operators."""
    return {f"layered {n}": families.sized(n).with_objective("latency") for n in (100, 300)}


def rows(options: Options, chosen: families.Problems) -> Iterator[Row]:
    """Speed of every formulation on one core and on two, then the time to the best baseline."""
    from envs.formulations import FORMULATIONS

    for name, problem in chosen.items():
        for formulation in FORMULATIONS:
            for cores in (1, 2):
                if cores <= len(os.sched_getaffinity(0)):
                    what = ("speed", name, formulation, cores, options.steps)
                    make = partial(_speed, problem, *what[1:])
                    yield options.finished.row(Row, what, make, "-".join(map(str, what)))
        for formulation in ("sequential", "guided_search"):
            for seed in range(options.seeds):
                what = ("time", name, formulation, seed, options.limit_s)
                make = partial(_time, problem, *what[1:])
                yield options.finished.row(Row, what, make, "-".join(map(str, what)))


def _config(formulation: str, **options: Any) -> Any:
    from agents.training import TrainConfig

    return TrainConfig(
        formulation=formulation,  # type: ignore[arg-type]
        learning_rate=1e-3,
        last_learning_rate=5e-5,
        **options,
    )


def _speed(problem: Problem, name: str, formulation: str, cores: int, steps: int) -> Row:
    """``cores`` trainings side by side, one per core: a training uses one thread."""
    say(f"{name}: {formulation}, {cores} cores")
    here = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    pipe = context.SimpleQueue()
    processes = [
        context.Process(target=_train, args=(problem, formulation, steps, here[k], k, pipe))
        for k in range(cores)
    ]
    for process in processes:
        process.start()
    answers = [pipe.get() for _ in processes]
    for process in processes:
        process.join()
    rate, peak = map(sum, zip(*answers, strict=True))
    return Row("speed", name, formulation, cores, 0, steps, None, rate, peak, None, None, None)


def _train(problem: Problem, formulation: str, steps: int, core: int, seed: int, out: Any) -> None:
    from agents.training import train

    os.sched_setaffinity(0, {core})
    config = _config(formulation, total_steps=steps, seed=seed, num_checks=1)
    train([problem], config=_config(formulation, total_steps=1))  # kernels
    began = time.process_time()
    card = train([problem], config=config).card
    out.put((card["steps"] / (time.process_time() - began), resident_bytes()))


def _time(problem: Problem, name: str, formulation: str, seed: int, limit_s: float) -> Row:
    """From nothing, until as good as the best of all baselines."""
    say(f"{name}: {formulation}, seed {seed}: time to the best baseline")
    target_s = best_baseline_s(problem) * (1 + 1e-9)
    run = limited(
        lambda: _reach(problem, target_s, _config(
            formulation, total_steps=10**7, seed=seed, max_seconds=limit_s, num_checks=10**5
        )),
        10 * limit_s + LIMIT_S,
        8 * GIB,
        processor_time=True,
    )  # fmt: skip
    reached = run.value or (None, None)
    key = ("time", name, formulation, 1, seed, 0, limit_s)
    return Row(*key, None, run.peak_bytes, target_s, *reached)


def best_baseline_s(problem: Problem) -> float:
    """The least value of all baselines; one that cannot do a problem is left out."""
    values = []
    for name in BASELINES:
        with suppress(PlannerError):
            values.append(value_of(problem, load(name)(problem)))
    return min(values)


def _reach(problem: Problem, target_s: float, config: Any) -> tuple[float | None, float | None]:
    """Seconds until the greedy decode, and the best placement met, take at most ``target_s``."""
    from agents.training import train
    from envs.problems import single_device_s

    greedy_s: list[float] = []
    best_s: list[float] = []
    reference_s = single_device_s(problem, score)

    def look(row: dict[str, float]) -> bool:
        if reference_s / row["greedy_speedup"] <= target_s:
            greedy_s.append(row["seconds"])
        if row["best_s_0"] <= target_s:
            best_s.append(row["seconds"])
        return not greedy_s

    train([problem], config=config, reference_s=[reference_s], callback=look)
    return (greedy_s or [None])[0], (best_s or [None])[0]  # type: ignore[list-item]


def parts(rows: Sequence[Row], options: Options) -> dict[str, Any]:
    """Two tables."""
    speeds = table(
        [r for r in rows if r.what == "speed"],
        Column("problem", "problem"),
        Column("formulation", "formulation"),
        Column("cores", "cores"),
        Column("steps per s", "steps_per_s", 0),
        Column("MiB", "peak_bytes", 0, 2**-20),
    )
    runs = groups((r for r in rows if r.what == "time"), "problem", "formulation")

    def reached(field: str, key: tuple[str, str]) -> str:
        # A training that did not get there counts as infinitely long.
        seconds = [getattr(r, field) or np.inf for r in runs[key]]
        middle = number(float(np.median(seconds)), 1)
        return f"{middle} ({int(np.isfinite(seconds).sum())} of {len(seconds)})"

    times = table(
        runs,
        Column("problem", lambda key: key[0]),
        Column("formulation", lambda key: key[1]),
        Column("best baseline ms", lambda key: runs[key][0].baseline_s, 3, 1e3),
        Column("greedy, median s (seeds)", partial(reached, "greedy_reached_s")),
        Column("best met, median s (seeds)", partial(reached, "best_reached_s")),
        Column("MiB", lambda key: max(r.peak_bytes or 0 for r in runs[key]), 0, 2**-20),
    )
    return {"count": len(BASELINES), "speeds": speeds, "table": times}


STUDY = learned_study("cost", COST, problems, rows, row=Row, parts=parts)
