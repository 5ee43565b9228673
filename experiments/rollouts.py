"""The same training with its rollouts in one process, in two processes, and on a local Ray.

    python -m experiments.rollouts

PPO on one large synthetic problem, with as many workers as cores: the policies must be equal, and
only the wall-clock time may differ, the start of the workers included. Writes
``experiments/results/rollouts.md`` and ``.json``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from agents.encoder import NetworkConfig
from agents.training import Row, TrainConfig, train
from experiments.side_by_side import COLUMNS, WAYS, in_ways
from experiments.study import Option, Options, Rows, Study, run
from experiments.tables import Column, table
from placement.parallel import check
from placement.planners import load
from placement.problem import Problem
from placement.workloads.synthetic import Family, layered

WIDTH = 50  # operators of a layer


def workers() -> int:
    """As many as cores, and at least two."""
    return max(2, len(os.sched_getaffinity(0)))


def trained(problem: Problem, config: TrainConfig, way: str) -> tuple[Any, str]:
    """The weights of a training, and its metrics without their times."""
    metrics: list[Row] = []
    policy = train(
        [problem], config=config, baseline=load("heft"), callback=metrics.append, parallel=way
    )
    return policy.net.state_dict(), repr([m | {"seconds": 0.0} for m in metrics])


def equal(ours: tuple[Any, str], first: tuple[Any, str]) -> bool:
    """Whether two trainings are the same."""
    return ours[1] == first[1] and all(torch.equal(ours[0][k], v) for k, v in first[0].items())


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """A row per formulation and way."""
    for way in options.ways:
        check(way)
    problem = Family(layered(options.operators // WIDTH, WIDTH, 0.05), num_devices=4)(0)
    small = Family(layered(2, 2, 0.5), num_devices=4)(0)
    for formulation in options.formulations:
        config = TrainConfig(
            total_steps=options.steps,
            formulation=formulation,
            num_envs=16,
            steps_per_env=max(1, options.steps // 64),
            num_checks=1,
            workers=workers(),
            moves=64,
            network=NetworkConfig(hidden=32, layers=2),
        )
        trained(small, TrainConfig(32, formulation, moves=4), "serial")  # compiles
        for row in in_ways(options.ways, partial(trained, problem, config), equal):
            yield {"formulation": formulation, **row}


def parts(rows: Rows, options: Options) -> dict[str, Any]:
    columns = (Column("formulation", "formulation"), *COLUMNS, Column("equal policies", "equal"))
    size = options.operators // WIDTH * WIDTH
    return {"workers": workers(), "size": size, "table": table(rows, *columns)}


STUDY = Study(
    name="rollouts",
    rows=rows,
    parts=parts,
    options={
        "operators": 2000,
        "steps": Option(1024, "of every training"),
        "ways": WAYS,
        "formulations": ("one_shot", "guided_search"),
    },
)
main = partial(run, (STUDY,))

if __name__ == "__main__":
    sys.exit(main())
