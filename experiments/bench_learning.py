"""Speed of the environments and of training, for ``make bench``.

A row is (name, value, unit, goal, more, note): the arguments of ``experiments.bench.Row``.
Rates are per second of processor time of one thread.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.problem import Problem
from placement.profile import Profile

BenchRow = tuple[str, float, str, float | None, bool, str]


def environment_rows(seconds: float = 2.0) -> list[BenchRow]:
    """Environment steps per second, 64 episodes at once, random legal actions."""
    from envs.placement import OneShotRules
    from envs.problems import ProblemSet
    from envs.sequential import SequentialRules
    from envs.vec import PlacementVecEnv

    problems = ProblemSet.build([_problem(60)])
    rng = np.random.default_rng(0)
    rows = []
    for name, rules, goal in (
        ("DevicePlacement-v0", OneShotRules(problems, 64), None),
        ("SequentialDevicePlacement-v0", SequentialRules(problems, 64), 100_000.0),
    ):
        env = PlacementVecEnv(rules)
        env.reset()
        shape = (64, *(env.action_space.shape or ()))
        env.step(np.zeros(shape, np.int64))  # compiles
        steps, began = 0, time.process_time()
        while time.process_time() - began < seconds:
            masks = rules.masks().reshape(*shape, -1)
            env.step((masks * rng.random(masks.shape)).argmax(axis=-1))
            steps += 64
        rate = steps / (time.process_time() - began)
        note = "60 operators, 4 devices, latency; choosing random actions included"
        rows.append((f"environment steps, {name}", rate, "1/s", goal, True, note))
    return rows


def training_rows(total_steps: int = 20_000) -> list[BenchRow]:
    """Steps of PPO per second, everything included: encoder, environment, updates, checks."""
    from agents.encoder import NetworkConfig
    from agents.training import TrainConfig, train

    problem = _problem(60)
    rows = []
    for formulation, steps, goal in (
        ("sequential", total_steps, None),
        ("one_shot", total_steps // 4, 500.0),
    ):
        for hidden in (32, 64):
            config = TrainConfig(
                total_steps=steps,
                formulation=formulation,  # type: ignore[arg-type]
                network=NetworkConfig(hidden=hidden, layers=2),
                num_checks=1,
            )
            train([problem], config=replace(config, total_steps=1))  # compiles
            began = time.process_time()
            card = train([problem], config=config).card
            rate = card["steps"] / (time.process_time() - began)
            note = f"60 operators, 4 devices, hidden {hidden}, 2 layers, one thread"
            rows.append(
                (f"PPO steps, {formulation}, hidden {hidden}", rate, "1/s", goal, True, note)
            )
    return rows


def _problem(num_ops: int) -> Problem:
    """Random graph: every operator uses up to three of the ten before it."""
    rng = np.random.default_rng(0)
    uses = [
        (int(a), b)
        for b in range(1, num_ops)
        for a in set(rng.integers(max(0, b - 10), b, 3).tolist())
    ]
    graph = OpGraph.build(
        "bench", [f"op{i}" for i in range(num_ops)], range(num_ops), [1000] * num_ops, uses
    )
    cluster = Cluster("bench", tuple(Device(f"cpu:{i}") for i in range(4)))
    names = cluster.device_names
    links = tuple(Link(a, b, 1e-5, 1e8) for a in names for b in names if a != b)
    seconds = rng.uniform(1e-5, 1e-3, (num_ops, 4))
    profile = Profile(names, seconds, np.zeros_like(seconds), links)
    return Problem(graph, cluster, profile, "latency")
