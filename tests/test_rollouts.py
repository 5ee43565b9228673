"""Training with its rollouts in workers: the same policy, resumed anywhere, whatever dies."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_learning import layered
from test_workers import needs_ray

from agents.encoder import NetworkConfig, PolicyError
from agents.trained import TrainedPolicy
from agents.training import Row, TrainConfig, train
from placement.parallel import ParallelError
from placement.planners import load

PROBLEMS = [layered(0, 3, 3, 2), layered(1, 4, 3, 3), layered(2, 2, 3, 2)]


def config(**options: Any) -> TrainConfig:
    """Four updates of guided search, in two shares."""
    given: dict[str, Any] = {
        "total_steps": 4 * 64,
        "formulation": "guided_search",
        "num_envs": 4,
        "steps_per_env": 16,
        "workers": 2,
        "moves": 10,
        "curriculum": 0.5,
        "num_checks": 4,
        "network": NetworkConfig(hidden=16, layers=1, embed=True),
    }
    return TrainConfig(**given | options)


def run(
    settings: TrainConfig, way: str, stop_at: float = np.inf, **options: Any
) -> tuple[TrainedPolicy, list[Row]]:
    """A training, and its metrics without the times."""
    rows: list[Row] = []

    def keep(row: Row) -> bool:
        rows.append(row | {"seconds": 0.0})
        return row["steps"] < stop_at

    problems = PROBLEMS
    if settings.formulation == "order_search":
        problems = [p.with_objective("latency") for p in problems]
    policy = train(
        problems, config=settings, baseline=load("heft"), callback=keep, parallel=way, **options
    )
    return policy, rows


def same_policy(a: TrainedPolicy, b: TrainedPolicy) -> bool:
    first, second = a.net.state_dict(), b.net.state_dict()
    answers = zip(a.best, b.best, strict=True)
    return all(torch.equal(first[k], second[k]) for k in first) and all(
        np.array_equal(x.placement, y.placement) and x.stats == y.stats for x, y in answers
    )


@pytest.mark.parametrize("way", ["processes", pytest.param("ray", marks=needs_ray)])
def test_the_policy_is_the_same(way: str) -> None:
    """Here, in processes, and on a Ray that the training starts and ends itself."""
    here, there = run(config(), "serial"), run(config(), way)
    assert same_policy(here[0], there[0]) and repr(here[1]) == repr(there[1])
    assert not same_policy(here[0], run(config(workers=1), "serial")[0])
    if way == "ray":
        import ray

        assert not ray.is_initialized()


@pytest.mark.parametrize("formulation", ["guided_search", "order_search"])
def test_resuming_is_exact_and_elsewhere_too(formulation: str, tmp_path: Path) -> None:
    """Two updates in processes, an interruption, and two more here make the policy of four."""
    settings = config(formulation=formulation, again=0.9)
    whole, every = run(settings, "serial")
    _, before = run(settings, "processes", out_dir=tmp_path, stop_at=128)
    assert len(before) < len(every)
    parts, after = run(settings, "serial", out_dir=tmp_path, resume=True)
    assert same_policy(whole, parts) and repr(after) == repr(every[-len(after) :])
    with pytest.raises(PolicyError, match=r"another training .it differs in: configuration"):
        run(replace(settings, workers=4), "serial", out_dir=tmp_path, resume=True)


@pytest.mark.timeout(120)
def test_a_training_survives_a_death() -> None:
    """What is lost has reward 0 and the value of what was seen last: an advantage of about 0."""
    victims: list[int] = []

    def kill(row: Row) -> None:
        if not victims:
            victims.append(multiprocessing.active_children()[0].pid or 0)
            os.kill(victims[0], signal.SIGKILL)

    with pytest.warns(RuntimeWarning, match=r"died \(exit code -9\) .* its episodes begin anew"):
        policy = train(PROBLEMS, config=config(), callback=kill, parallel="processes")  # type: ignore[arg-type]
    assert policy.card["steps"] == config().total_steps
    assert all(bool(torch.isfinite(x).all()) for x in policy.net.state_dict().values())
    assert not multiprocessing.active_children()


def test_ctrl_c_leaves_nothing_behind() -> None:
    def stop(row: Row) -> bool:
        assert len(multiprocessing.active_children()) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(PROBLEMS, config=config(), callback=stop, parallel="processes")
    assert not multiprocessing.active_children()


def test_what_users_get_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match="workers = 0 must be at least 1"):
        config(workers=0)
    with pytest.raises(PolicyError, match=r"'processes' with one worker.*training.workers=2"):
        run(config(workers=1), "processes")
    with pytest.raises(PolicyError, match="workers = 5, but 4 episodes"):
        run(config(workers=5), "serial")
    with pytest.raises(ParallelError, match="'threads' is unknown; use one of serial, processes"):
        run(config(), "threads")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ParallelError, match=r"pip install 'device-placement-rl\[ray\]'"):
        run(replace(config(), workers=2), "ray")
