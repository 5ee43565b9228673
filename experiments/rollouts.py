"""The same training with its rollouts in one process, in two processes, and on a local Ray.

    python -m experiments.rollouts

PPO on one large synthetic problem, with as many workers as cores: the policies must be equal, and
only the wall-clock time may differ, the start of the workers included. Writes
``experiments/results/rollouts.md``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import torch

from agents.encoder import NetworkConfig
from agents.training import Row, TrainConfig, train
from experiments import _study
from experiments._study import say
from placement.files import write_atomic
from placement.parallel import check
from placement.planners import load
from placement.problem import Problem
from placement.workloads.synthetic import Family, layered

WIDTH = 50  # operators of a layer


def trained(problem: Problem, config: TrainConfig, way: str) -> tuple[float, Any, list[Row]]:
    """Wall-clock seconds of a training, its weights, and its metrics without their times."""
    rows: list[Row] = []
    began = time.perf_counter()
    policy = train(
        [problem], config=config, baseline=load("heft"), callback=rows.append, parallel=way
    )
    took = time.perf_counter() - began
    return took, policy.net.state_dict(), [r | {"seconds": 0.0} for r in rows]


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    _study.common_options(parser, "rollouts")
    parser.add_argument("--operators", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1024, help="of every training")
    parser.add_argument("--ways", nargs="+", default=["serial", "processes", "ray"])
    parser.add_argument("--formulations", nargs="+", default=["one_shot", "guided_search"])
    options = parser.parse_args(argv)
    workers = max(2, len(os.sched_getaffinity(0)))

    def work() -> None:
        for way in options.ways:
            check(way)
        family = Family(layered(options.operators // WIDTH, WIDTH, 0.05), num_devices=4)
        problem = family(0)
        rows: list[list[str]] = []
        for formulation in options.formulations:
            config = TrainConfig(
                total_steps=options.steps,
                formulation=formulation,
                num_envs=16,
                steps_per_env=max(1, options.steps // 64),
                num_checks=1,
                workers=workers,
                moves=64,
                network=NetworkConfig(hidden=32, layers=2),
            )
            small = Family(layered(2, 2, 0.5), num_devices=4)(0)
            trained(small, TrainConfig(32, formulation, moves=4), "serial")  # compiles
            first: tuple[float, Any, list[Row]] | None = None
            for way in options.ways:
                now = trained(problem, config, way)
                first = first or now
                equal = all(torch.equal(now[1][k], v) for k, v in first[1].items())
                equal &= repr(now[2]) == repr(first[2])
                rows.append(
                    [
                        formulation,
                        way,
                        f"{now[0]:.1f} s",
                        f"{first[0] / now[0]:.2f}",
                        "yes" if equal else "NO",
                    ]
                )
                say(" ".join(rows[-1]))
        head = ["formulation", "way", "wall clock", "times as fast", "equal policies"]
        table = _study.to_table(head, rows)
        write_atomic(
            options.out / "rollouts.md",
            f"""# Rollouts side by side

`{_study.command_line("experiments.rollouts", argv)}`

A training of {options.steps:,} steps, 16 episodes in {workers} shares, on one problem of
{problem.num_ops:,} operators on four devices; updates, checks and the start of the workers are part
of the time.

{table}
{_study.provenance()}""",
        )
        print(table)

    return _study.launch(work)


if __name__ == "__main__":
    sys.exit(main())
