"""What training costs: steps per second, seconds to reach the best baseline, memory."""

from __future__ import annotations

import multiprocessing
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from experiments import _study
from experiments._study import GIB, Store, limited, number
from experiments.budgets import BASELINES, Cost
from experiments.learned import problems as made
from experiments.learned.cells import AllOf
from placement.problem import Problem

to_csv = _study.to_csv
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


def problems(options: Namespace) -> made.Problems:
    """Layered graphs of 100 and 300 operators."""
    return {f"layered {n}": made.sized(n).with_objective("latency") for n in (100, 300)}


def run(options: Namespace, chosen: made.Problems) -> list[Row]:
    """Speed of every formulation on one core and on two, then the time to the best baseline."""
    from agents.encoder import Formulation

    budget: Cost = options.budget
    store = Store(options.work / "rows.jsonl", Row, options.fresh)
    rows = []
    for name, problem in chosen.items():
        for formulation in get_args(Formulation):
            for cores in (1, 2):
                if cores <= len(os.sched_getaffinity(0)):
                    key = {"what": "speed", "problem": name, "formulation": formulation}
                    key |= {"cores": cores, "steps": budget.steps}
                    rows.append(
                        store.find(**key)
                        or store.add(_speed(name, problem, formulation, cores, budget.steps))
                    )
        for formulation in ("sequential", "guided_search"):
            for seed in range(budget.seeds):
                key = {"what": "time", "problem": name, "formulation": formulation}
                key |= {"seed": seed, "limit_s": budget.limit_s}
                rows.append(
                    store.find(**key)
                    or store.add(_time(name, problem, formulation, seed, budget.limit_s))
                )
    return rows


def _config(formulation: str, **options: Any) -> Any:
    from agents.training import TrainConfig

    return TrainConfig(
        formulation=formulation,  # type: ignore[arg-type]
        learning_rate=1e-3,
        last_learning_rate=5e-5,
        **options,
    )


def _speed(name: str, problem: Problem, formulation: str, cores: int, steps: int) -> Row:
    """``cores`` trainings side by side, one per core: a training uses one thread."""
    _study.say(f"{name}: {formulation}, {cores} cores")
    here = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("fork")
    pipe = context.SimpleQueue()
    processes = [
        context.Process(target=_train, args=(problem, formulation, steps, here[k], k, pipe))
        for k in range(cores)
    ]
    for process in processes:
        process.start()
    found = [pipe.get() for _ in processes]
    for process in processes:
        process.join()
    return Row(
        what="speed",
        problem=name,
        formulation=formulation,
        cores=cores,
        seed=0,
        steps=steps,
        limit_s=None,
        steps_per_s=sum(rate for rate, _ in found),
        peak_bytes=sum(peak for _, peak in found),
        baseline_s=None,
        greedy_reached_s=None,
        best_reached_s=None,
    )


def _train(problem: Problem, formulation: str, steps: int, core: int, seed: int, out: Any) -> None:
    import time

    from agents.training import train

    os.sched_setaffinity(0, {core})
    config = _config(formulation, total_steps=steps, seed=seed, num_checks=1)
    train([problem], config=_config(formulation, total_steps=1))  # kernels
    began = time.process_time()
    card = train([problem], config=config).card
    out.put((card["steps"] / (time.process_time() - began), _study.resident_bytes()))


def _time(name: str, problem: Problem, formulation: str, seed: int, limit_s: float) -> Row:
    """From nothing, until as good as the best of all baselines."""
    _study.say(f"{name}: {formulation}, seed {seed}: time to the best baseline")
    target_s = AllOf(BASELINES)(problem).value_s * (1 + 1e-9)

    def reach() -> tuple[float | None, float | None]:
        import time

        from agents.training import train

        time.perf_counter = time.process_time  # type: ignore[assignment]
        greedy_s: list[float] = []
        best_s: list[float] = []

        def look(row: dict[str, float]) -> bool:
            single_s = reference_s / row["greedy_speedup"]
            if single_s <= target_s:
                greedy_s.append(row["seconds"])
            if row["best_s_0"] <= target_s:
                best_s.append(row["seconds"])
            return not greedy_s

        from envs.problems import single_device_s
        from placement.simulator import score

        reference_s = single_device_s(problem, score)
        config = _config(
            formulation, total_steps=10**7, seed=seed, max_seconds=limit_s, num_checks=10**5
        )
        train([problem], config=config, reference_s=[reference_s], callback=look)
        return (greedy_s or [None])[0], (best_s or [None])[0]  # type: ignore[list-item]

    run = limited(reach, 10 * limit_s + LIMIT_S, 8 * GIB)
    greedy, best = run.value or (None, None)
    return Row(
        what="time",
        problem=name,
        formulation=formulation,
        cores=1,
        seed=seed,
        steps=0,
        limit_s=limit_s,
        steps_per_s=None,
        peak_bytes=run.peak_bytes,
        baseline_s=target_s,
        greedy_reached_s=greedy,
        best_reached_s=best,
    )


def report(rows: Sequence[Row]) -> str:
    """Two tables."""
    speed = [
        [
            r.problem,
            r.formulation,
            str(r.cores),
            number(r.steps_per_s, 0),
            number(r.peak_bytes, 0, 2**-20),
        ]
        for r in rows
        if r.what == "speed"
    ]
    reached = []
    for problem, formulation in dict.fromkeys(
        (r.problem, r.formulation) for r in rows if r.what == "time"
    ):
        mine = [
            r for r in rows if (r.what, r.problem, r.formulation) == ("time", problem, formulation)
        ]
        row = [problem, formulation, number(mine[0].baseline_s, 3, 1e3)]
        for found in (
            [r.greedy_reached_s for r in mine],
            [r.best_reached_s for r in mine],
        ):
            # A training that did not get there counts as infinitely long.
            middle = float(np.median([np.inf if s is None else s for s in found]))
            row.append(f"{number(middle, 1)} ({sum(s is not None for s in found)} of {len(found)})")
        row.append(number(max(r.peak_bytes or 0 for r in mine), 0, 2**-20))
        reached.append(row)
    speeds = _study.to_table(["problem", "formulation", "cores", "steps per s", "MiB"], speed)
    times = _study.to_table(
        ["problem", "formulation", "best baseline ms", "greedy, median s (seeds)",
         "best met, median s (seeds)", "MiB"],
        reached,
    )  # fmt: skip
    return f"""# What training costs

Stock PPO, four devices, everything included (environment, encoder, updates), per second of
processor time. Two cores are two trainings side by side, added up: a training uses one thread.
MiB: largest resident memory, all processes together.

{speeds}
## Seconds to the best baseline

Training from nothing on one graph, until its greedy decode (guided search: its search), or the best
placement met so far, is as good as the best of all {len(BASELINES)} constructive methods and
dynamic programs. A dash: the median seed does not get there in {number(rows[-1].limit_s, 0)} s.

{times}"""
