"""Section ``learning``: real runs on the CPU and the GPU decide, for learners, searches, chance."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from experiments import measured
from experiments.gpu.bench import Bench
from placement.executor import Executor
from placement.problem import Problem
from placement.runs.trials import TrialError, Trials
from placement.search.evaluation import random_placements

RUNS, LIMIT_S = 1000, 2.0  # of every way; of a run
FINALS = 0.15  # part of the time
LEARNS = 1.5  # times as long as its runs a way may take


def learning(bench: Bench) -> None:
    """Ways of ``experiments.measured`` with equal numbers of runs, a thousand if there is time.

    All but the one that is trained on the simulator before, for minutes. A way whose time is over
    is cut: its row says how many runs it has made.
    """
    key = "tiny_mlp" if bench.emulated else "dlrm_b256"
    _, _, graph = bench.model(key)
    profile = bench.measured(key, graph, bench.cluster, 1, calibrate=False)
    problem = Problem(graph, bench.cluster, profile, "latency", num_microbatches=1)
    names = [way for way in measured.WAYS if "pre-trained" not in way]
    names = names[:1] if bench.emulated else names  # what others import takes longer
    if not bench.emulated:
        _warm_up(problem)
    run_s = _run_s(problem, 1 if bench.emulated else 8)
    left_s = (1 - FINALS) * (bench.until - time.perf_counter())
    runs = int(np.clip(left_s / len(names) / run_s / LEARNS, 3, 3 if bench.emulated else RUNS))
    bench.emit(f"{key}, a run", seconds=run_s, runs=runs)
    runtime, until = Executor(problem), time.perf_counter() + left_s
    with TemporaryDirectory() as folder:
        done: dict[str, Trials] = {}
        hangs = False
        for i, way in enumerate(names):
            with bench.item(f"{key}, {way}", (until - time.perf_counter()) / (len(names) - i)):
                limits = {"measurements": runs, "limit_s": LIMIT_S}
                trials = done[way] = Trials(problem, runtime, **limits)
                try:
                    measured.spent(measured.WAYS[way], trials, 0)
                except TrialError:  # what hangs disturbs all that would come
                    hangs = True
                    raise
            if way in done and done[way].incumbent is not None:
                ms = float(np.min(done[way].levels)) * 1e3
                bench.emit(f"{key}, {way}", ran=done[way].num_measurements, best_ms=ms)
            if hangs:
                return
        unit = measured.Unit(1, key, runs, 0)
        for row in measured.judged(unit, problem, runtime, done, Path(folder)):
            facts = {"ran": row.ran, "measured_ms": row.measured_s * 1e3, "gain": row.gain}
            bench.emit(f"{key}, {row.way}", **facts, predicted_ms=row.predicted_s * 1e3)


def _warm_up(problem: Problem) -> None:
    """What learners import and compile counts for none of them: a moment of each, simulated."""
    from agents.training import TrainConfig, train

    bare = replace(problem, graph=problem.graph.without_program())
    for recipe in (measured.PPO, measured.GROUP):
        train([bare], config=TrainConfig(total_steps=1, num_checks=1, **recipe))


def _run_s(problem: Problem, count: int) -> float:
    """Seconds of a run, of placements by chance."""
    trials = Trials(problem, Executor(problem), limit_s=LIMIT_S)
    placed = random_placements(problem, count + 1, np.random.default_rng(0))
    trials.measure(placed[:1])
    began = time.perf_counter()
    trials.measure(placed[1:])
    return (time.perf_counter() - began) / count
