"""Episodes in workers: equal wherever they are played, nothing left behind.

Workers import this file: it imports neither torch nor stable-baselines3, which take long.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.episodes import Episodes
from envs.guided import GuidedSearchRules
from envs.placement import OneShotRules
from envs.problems import EnvError, Floats, Measured, ProblemSet
from envs.rules import Rules
from envs.sequential import SequentialRules
from envs.workers import Workers
from placement.problem import Placement, Problem
from placement.simulator import score
from placement.tools.parallel import ParallelError
from tests.problems import random_problem

PROBLEMS = [random_problem(seed, 8, 3) for seed in range(3)]


def deadly(problem: Problem, placements: Placement) -> Floats:
    """``score``, except while there are certain files in the folder that the graph is named."""
    folder = Path(problem.graph.name)
    if (folder / "refuse").exists():
        raise EnvError("not today")
    if (folder / "kill").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return score(problem, placements)


def mortals(folder: Path, *sizes: int) -> list[Rules]:
    """Episodes of one step, which ``folder`` decides about."""
    problem = replace(PROBLEMS[0], graph=replace(PROBLEMS[0].graph, name=str(folder)))
    problems = ProblemSet.build([problem], [1e6], evaluator=deadly)
    return [OneShotRules(problems, n) for n in sizes]


def shares(kind: str, *sizes: int) -> list[Rules]:
    problems = ProblemSet.build(PROBLEMS)
    if kind == "sequential":
        return [SequentialRules(problems, n) for n in sizes]
    return [GuidedSearchRules(problems, n, moves=5, again=0.5) for n in sizes]


def played(env: Episodes | Workers, steps: int) -> list[Any]:
    """All that a random policy sees and finds; half-way it goes on as from a checkpoint."""
    rng = np.random.default_rng(0)
    env.allowed = np.array([0, 1])
    seen: list[Any] = [env.reset()]
    for i in range(steps):
        if i == steps // 2:
            env.allowed = np.array([1, 2])
            env.rules.keep(np.array([2]), np.zeros((1, 8), np.int32), np.array([1e-9]))
            env.restore(env.state())
            seen.append(env.reset())
        masks = env.masks()
        obs, rewards, dones, infos = env.step((masks * rng.random(masks.shape)).argmax(axis=1))
        for info in infos:
            info.get("episode", {}).pop("t", None)
        seen.append((obs, rewards, dones, infos))
    env.close()
    return [*seen, env.rules.best_s, env.rules.best_choices, env.rules.num_evaluations]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return bool(a == b)


def test_where_shares_are_played_does_not_matter() -> None:
    """The best so far is what searches go on from: who knows which best matters, too."""
    here = played(Workers(shares("guided_search", 3, 2), 5), 24)
    assert equal(played(Workers(shares("guided_search", 3, 2), 5, "processes"), 24), here)
    assert not equal(played(Workers(shares("guided_search", 2, 3), 5), 24), here)


@pytest.mark.parametrize("kind", ["sequential", "guided_search"])
def test_one_share_is_what_it_is_without_workers(kind: str) -> None:
    assert equal(
        played(Workers(shares(kind, 4), 5), 24), played(Episodes(*shares(kind, 4), seed=5), 24)
    )


def test_shares_deal_on_their_own() -> None:
    env = Workers([OneShotRules(ProblemSet.build(PROBLEMS), 9) for _ in range(2)], 5)
    dealt = env.reset()["problem"][:, 0]
    assert not np.array_equal(dealt[:9], dealt[9:])
    env.seed(6)
    assert not np.array_equal(env.reset()["problem"][:, 0], dealt)
    env.seed(5)
    assert np.array_equal(env.reset()["problem"][:, 0], dealt)


@pytest.mark.timeout(120)
def test_a_worker_that_dies_ends_the_run(tmp_path: Path) -> None:
    env = Workers(mortals(tmp_path, 2, 1), 0, "processes")
    act = np.zeros((3, 8), np.int64)
    try:
        env.reset()
        _, rewards, dones, _ = env.step(act)
        assert dones.all() and (rewards != 0).all() and env.rules.num_evaluations == 3
        (tmp_path / "refuse").touch()
        with pytest.raises(EnvError, match=r"^not today"):
            env.step(act)
        (tmp_path / "refuse").unlink()
        (tmp_path / "kill").touch()
        with pytest.raises(ParallelError, match=r"worker \d died .*-9.*resume=true"):
            env.step(act)
    finally:
        env.close()
    assert not multiprocessing.active_children()


def test_what_cannot_be_played_in_workers() -> None:
    def of(evaluator: Any) -> list[Rules]:
        problems = ProblemSet.build(PROBLEMS, [1.0] * 3, evaluator=evaluator)
        return [OneShotRules(problems, 1) for _ in range(2)]

    with pytest.raises(EnvError, match="2 workers would measure placements side by side"):
        Workers(of(Measured(lambda _: None)))  # type: ignore[arg-type, return-value]
    with pytest.raises(ParallelError, match=r"cannot be sent to a worker .* a module defines"):
        Workers(of(lambda p, x: score(p, x)), 0, "processes")
    with pytest.raises(ParallelError, match=r"'ray': .* use serial or processes"):
        Workers(of(score), 0, "ray")
