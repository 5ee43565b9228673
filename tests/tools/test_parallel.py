"""``parallel_map``: equal results, retries and errors, here and in processes."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.planners.local_search import LocalSearch
from placement.planners.simulated_annealing import SimulatedAnnealing
from placement.runs.compare import compare
from placement.tools.parallel import ParallelError, parallel_map
from tests.problems import random_problem

PROCESSES = "processes"


def draw(seed: int) -> list[float]:
    time.sleep(0.5 if seed == 0 else 0.0)  # who is slow does not change the order
    return np.random.default_rng(seed).random(3).tolist()


def refuse(x: int) -> int:
    if x == 2:
        raise ParallelError("no 2")
    return x


def die_once(folder: str, x: int) -> int:
    """Killed the first time that it gets a 1, as by a system that is out of memory."""
    mark = Path(folder) / "died"
    if x == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 10 * x


def die(x: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def test_results_come_in_order() -> None:
    reported: dict[int, list[float]] = {}
    results = parallel_map(draw, range(4), PROCESSES, done=reported.__setitem__)
    assert results == [draw(x) for x in range(4)] == parallel_map(draw, range(4))
    assert sorted(reported) == [0, 1, 2, 3] and [reported[i] for i in range(4)] == results
    assert parallel_map(draw, [], PROCESSES) == []


@pytest.mark.parametrize("way", [[PROCESSES], []])
def test_errors_are_the_function_s_own(way: list[str]) -> None:
    with pytest.raises(ParallelError, match=r"^no 2$"):
        parallel_map(refuse, range(4), *way)


def test_a_worker_that_died_is_replaced(tmp_path: Path) -> None:
    call = partial(die_once, str(tmp_path))
    assert parallel_map(call, range(3), PROCESSES) == [0, 10, 20]


def test_not_for_ever() -> None:
    with pytest.raises(ParallelError, match="died 3 times at item 0"):
        parallel_map(die, [1], PROCESSES)


def test_unknown_ways() -> None:
    with pytest.raises(ParallelError, match=r"'threads' is unknown.*launcher=ray"):
        parallel_map(draw, [1], "threads")


def test_a_comparison_and_a_data_set_are_the_same(tmp_path: Path) -> None:
    from agents.training.expert import solve  # here: workers import this file, and torch takes long

    problems = {"p": random_problem(0, 8, 3)}  # workers start for each, and that takes long
    planners = {"a": LocalSearch(evaluations=30), "b": SimulatedAnnealing(evaluations=30)}

    def rows(way: str) -> list[Any]:
        comparison = compare(problems, planners, seeds=(0, 1), out_dir=tmp_path / way, parallel=way)
        return [(r.workload, r.planner, r.seed, r.placement_id, r.value_s) for r in comparison.rows]

    assert rows(PROCESSES) == rows("serial")
    placements = [
        [p.tolist() for p in solve(problems, planners["a"], tmp_path / f"{x}.npz", parallel=x)]
        for x in ("serial", PROCESSES)
    ]
    assert placements[0] == placements[1]
