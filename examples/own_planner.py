"""Write a planner of your own, check that it keeps its promises, and compare it.

    python examples/own_planner.py

On the command line it is found by its name, from the folder that it is in:

    placement plan resnet50 --planner own_planner:Rounds rounds=3
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from placement import Problem, Solution, importers, planners
from placement.report.table import print_tables, tables
from placement.runs.compare import compare
from placement.simulator import score
from placement.testing import check_planner


@dataclass(frozen=True)
class Rounds:
    """Move one operator after another to the device where it is best, a few times around.

    Attributes:
        rounds: over all colocation groups; stops earlier where nothing moves.
    """

    rounds: int = 5

    def __call__(self, problem: Problem) -> Solution:
        began, evaluations = time.perf_counter(), 0
        # Every planner begins with the best single device: it can then never be worse.
        best = planners.load("single_device")(problem)
        placement, value = best.placement.copy(), best.value_s
        for _ in range(self.rounds):
            before = value
            for group in range(problem.graph.num_groups):
                # One row per device; the simulator scores them all at once.
                tried = np.repeat(placement[None], problem.num_devices, axis=0)
                tried[:, problem.graph.group == group] = np.arange(problem.num_devices)[:, None]
                values = score(problem, tried)
                evaluations += len(values)
                if values.min() < value:
                    placement, value = tried[values.argmin()], float(values.min())
            if value == before:
                break
        stats = {"seconds": time.perf_counter() - began, "evaluations": evaluations}
        if "infeasible" in best.stats and not np.isfinite(value):
            stats["infeasible"] = best.stats["infeasible"]  # the numbers that do not fit
        return Solution(placement, value, stats=stats)


def main() -> None:
    check_planner(Rounds())  # valid placements, its value is the simulator's, repeatable, ...
    problem = importers.load(Path(__file__).with_name("branches.json"))
    compared = {"rounds": Rounds(), "heft": planners.load("heft")}
    print_tables(tables(compare({"branches": problem}, compared, (0,), out_dir="runs/rounds")))


if __name__ == "__main__":
    main()
