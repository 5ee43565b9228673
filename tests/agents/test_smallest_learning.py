"""The smallest learning tests, for every formulation: what fails them learns nothing larger.

A bandit of two operators, operators that are each fast on one device only, and one captured model
on which a frozen policy (learning rate 0) must stay clearly behind.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest

from agents.encoder import NetworkConfig
from agents.training import TrainConfig, train
from agents.training.callbacks import Row
from envs.formulations import FORMULATIONS
from placement import workloads
from placement.capturing import capture
from placement.problem import Problem
from tests.envs.test_envs import chain
from tests.problems import problem_on

SMALL = NetworkConfig(hidden=32, layers=2, finish_weight=0.0)  # no help from list scheduling


def rows_of(problem: Problem, formulation: Any, **options: Any) -> tuple[Any, list[Row]]:
    """The trained policy, and its metrics."""
    usual: dict[str, Any] = {"learning_rate": 1e-2, "num_checks": 2}
    if formulation != "dispatch":
        usual["network"] = SMALL
    config = TrainConfig(formulation=formulation, **usual | options)
    rows: list[Row] = []
    return train([problem], config=config, callback=rows.append), rows


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_two_operator_bandit(formulation: Any) -> None:
    # [1, 0] takes 1 + 0.1 + 1 = 2.1 s; [0, 0] 3 (the best device), [1, 1] 4, [0, 1] 5.1.
    problem = chain([[2, 1], [1, 3]], latency_s=0.1)
    policy, rows = rows_of(problem, formulation, total_steps=512)
    assert rows[-1]["steps"] <= 600
    assert policy.best[0].value_s == pytest.approx(2.1)
    assert policy.best[0].placement.tolist() == [1, 0]
    # Not by luck: what is sampled by the end is the optimum nearly always.
    assert rows[-1]["reward_mean"] > 0.8 * np.log(3 / 2.1)


@cache
def captured() -> Problem:
    """An Inception captured by ``torch.export`` on three unlike devices, times drawn once."""
    graph = capture(*workloads.load("inception_tiny"), name="inception_tiny")
    rng = np.random.default_rng(0)
    kind, size = np.unique([n.rstrip("_0123456789") for n in graph.op_name], return_inverse=True)
    # Convolutions cost most, and each kind of operator has a device that suits it.
    base = np.where(np.char.startswith(kind, "conv"), 1e-3, 1e-4)
    seconds = (base[:, None] * rng.uniform(0.5, 2.0, (len(kind), 3)))[size]
    seconds *= rng.lognormal(0.0, 0.5, (graph.num_ops, 1))
    return problem_on(graph, seconds, link=(2e-5, 1e9), objective="latency")


# Untrained, a dispatcher is a list scheduler: what it learns needs more than 1,200 steps.
@pytest.mark.parametrize("formulation", [f for f in FORMULATIONS if f != "dispatch"])
def test_the_frozen_policy_is_clearly_worse(formulation: Any) -> None:
    sampled = {}
    for rate in (0.0, 1e-2):
        options: dict[str, Any] = {"learning_rate": rate, "last_learning_rate": rate / 10}
        options |= {"total_steps": 1200, "num_checks": 1, "epochs": 4 if rate else 1}
        _, rows = rows_of(captured(), formulation, **options)
        sampled[rate] = np.nanmean([r["reward_mean"] for r in rows[-6:-1]])
    assert sampled[1e-2] > sampled[0.0] + 0.03
