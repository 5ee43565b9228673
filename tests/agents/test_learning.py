"""Training through the real PPO: files, resuming, imitation, and that it learns.

The smallest learning tests are in ``test_smallest_learning.py``.
"""

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gymnasium import spaces

from agents.encoder import NetworkConfig, PolicyError
from agents.store import GraphStore
from agents.trained import TrainedPolicy, make_net
from agents.training import TrainConfig, train
from agents.training.callbacks import Row
from agents.training.expert import _batches, demonstrations, load_solutions, solve
from agents.training.tasks import Start, Tasks
from agents.training.trainer import PerGraphBuffer
from envs.problem_set import Measured, ProblemSet, Sizes, canonical
from experiments.study import ROOT
from placement import workloads
from placement.capturing import capture
from placement.executor import Executor
from placement.planners import load
from placement.problem import Problem
from placement.simulator import score
from tests import emulated_gpu
from tests.envs.test_envs import chain
from tests.executor.on_gpu import BOTH
from tests.problems import problem_on, small_problem, written
from tests.runtimes import Biased

FILES = ["best.npz", "checkpoint.pt", "last.safetensors", "metrics.csv", "policy.safetensors"]
SMALL = NetworkConfig(hidden=32, layers=2, finish_weight=0.0)  # no help from list scheduling


def layered(seed: int, width: int, depth: int, devices: int) -> Problem:
    """Layers of operators with random edges between neighbours; each likes another device."""
    rng = np.random.default_rng(seed)
    n = width * depth
    seconds = rng.uniform(0.5, 1.5, (n, 1)) * rng.lognormal(0, 0.7, (n, devices))
    uses = [
        (a + (layer - 1) * width, b + layer * width)
        for layer in range(1, depth)
        for a in range(width)
        for b in range(width)
        if rng.random() < 0.25
    ]
    link = {"link": (0.1, 400.0), "num_microbatches": 8}
    return small_problem(seconds, uses, tensor_bytes=100, **link)


def test_learning_beats_what_it_starts_from() -> None:
    """It starts at list scheduling, greedy 9.63; it reaches 6.05, and 5.92 at best. HEFT reaches
    6.76, the best of all constructive planners 6.27. Frozen: ``test_smallest_learning``.
    """
    problem, network = layered(3, 6, 5, 3), NetworkConfig(hidden=32, layers=2)
    rates = {"learning_rate": 6e-3, "last_learning_rate": 2e-4}
    policy = train([problem], config=TrainConfig(total_steps=4000, network=network, **rates))
    assert score(problem, policy.place(problem)[0])[0] < load("heft")(problem).value_s
    assert policy.best[0].value_s < load("best_of")(problem).value_s


def test_files_of_a_run(tmp_path: Path) -> None:
    problems = [layered(0, 3, 3, 2), layered(1, 4, 3, 3)]
    config = TrainConfig(total_steps=600, network=SMALL)
    rows: list[Row] = []
    some = {"baseline": load("heft"), "out_dir": tmp_path, "callback": rows.append}
    policy = train(problems, config=config, **some)
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES
    with (tmp_path / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows)
    assert [int(r["steps"]) for r in table] == [r["steps"] for r in rows]
    best = [float(r["best_speedup"]) for r in table]
    assert best == sorted(best)
    # The first row is the untrained policy: exactly its warm start.
    assert rows[0]["steps"] == 0
    assert rows[0]["greedy_speedup"] == pytest.approx(1.0)
    saved = TrainedPolicy.load(tmp_path / "policy.safetensors")
    warm = load("heft")(problems[1]).placement
    assert np.array_equal(saved.place(problems[1], warm, 3), policy.place(problems[1], warm, 3))
    with np.load(tmp_path / "best.npz") as data:
        for i, (problem, answer) in enumerate(zip(problems, policy.best, strict=True)):
            assert np.array_equal(data[f"placement_{i}"], answer.placement)
            assert answer.value_s == score(problem, answer.placement)[0]
            assert answer.value_s <= load("heft")(problem).value_s * (1 + 1e-9)
    assert policy.card["problems"][1]["fingerprint"] == problems[1].graph.fingerprint


def test_reasons_to_stop() -> None:
    problem = layered(0, 3, 3, 2)

    def steps(callback: Any = None, **limits: Any) -> float:
        config = TrainConfig(total_steps=2000, network=SMALL, **limits)
        return float(train([problem], config=config, callback=callback).card["steps"])

    assert steps(lambda row: row["steps"] < 500) < 1000
    assert steps(max_seconds=1e-6) < 500


def test_the_learning_rate_ends_where_it_should_though_a_rollout_goes_beyond_the_end() -> None:
    rows: list[Row] = []
    rates = {"learning_rate": 1e-2, "last_learning_rate": 1e-3}
    rollout = {"total_steps": 100, "num_envs": 4, "steps_per_env": 16, "network": SMALL}
    train([layered(0, 3, 3, 2)], config=TrainConfig(**rollout, **rates), callback=rows.append)
    assert rows[-1]["steps"] == 128  # of 100: a straight line would be at -0.0015
    assert rows[-1]["learning_rate"] == pytest.approx(1e-3)


def test_going_on_from_a_policy() -> None:
    problem = layered(0, 3, 3, 2)
    first = train([problem], config=TrainConfig(total_steps=200, network=SMALL))
    before = {k: v.clone() for k, v in first.net.state_dict().items()}
    frozen = TrainConfig(200, "one_shot", learning_rate=0.0, last_learning_rate=0.0)
    second = train([problem], config=frozen, policy=first)
    assert second.formulation == "sequential"  # the policy's, not the configuration's
    recorded = second.card["config"]
    assert (recorded["formulation"], recorded["network"]) == ("sequential", asdict(SMALL))
    assert all(torch.equal(before[k], v) for k, v in second.net.state_dict().items())
    # The policy that training began with is left as it was.
    train([problem], config=TrainConfig(total_steps=200), policy=first)
    assert all(torch.equal(before[k], v) for k, v in first.net.state_dict().items())


def test_a_spent_budget_of_measurements_ends_the_training(tmp_path: Path) -> None:
    problem = chain([[2, 1], [1, 3], [2, 2]], latency_s=0.1)
    few = Measured(Biased, measurements=6)  # everything runs as it is predicted
    config = TrainConfig(total_steps=4000, network=SMALL)
    policy = train([problem], config=config, evaluator=few, out_dir=tmp_path)
    ran = few.trials(problem)
    assert ran.num_measurements == 6 and policy.card["steps"] < 4000
    best = policy.best[0]
    assert best.value_s == pytest.approx(score(problem, best.placement)[0], rel=0.02)
    assert (tmp_path / "policy.safetensors").is_file() and (tmp_path / "best.npz").is_file()


def test_a_lucky_run_is_not_the_answer_of_a_training() -> None:
    # Two groups, two devices: (0, 1) is the fastest of four. What runs first, the start, is lucky:
    # a tenth of its time. It takes turns with the others, and loses.
    problem = chain([[1, 9], [9, 1]], latency_s=0.1)
    lucky = partial(Biased, slow=lambda run: 0.1 if run == 0 else 1.0)
    measured = Measured(lucky, measurements=40, final=0.5)
    config = TrainConfig(total_steps=200, network=SMALL)
    start = np.zeros(2, np.int32)
    policy = train([problem], config=config, warm=[start], evaluator=measured)
    ran = measured.trials(problem)
    assert ran.num_measurements > 20 and ran.samples.of(start)[0] < score(problem, [0, 1])[0]
    assert policy.best[0].placement.tolist() == [0, 1]
    assert policy.best[0].value_s == ran.levels.min()


def test_a_training_runs_placements_on_a_gpu() -> None:
    """Every placement runs in a pipeline of the CPU and an emulated GPU, the incumbent again."""
    graph = capture(*workloads.load("tiny_branches"), name="tiny")
    some = {"cluster": BOTH, "link": (1e-5, 1e9), "num_microbatches": 2}
    problem = problem_on(graph, np.full((graph.num_ops, 2), 1e-4), **some)
    measured = Measured(Executor, measurements=10, limit_s=60)
    recipes: list[dict[str, Any]] = [
        {"formulation": "one_shot", "network": {"hidden": 8, "layers": 1}},
        {"formulation": "dispatch", "algorithm": "agents.dispatch.train:GroupRelative"},
    ]
    with emulated_gpu.emulated() as gpu:
        for recipe in recipes:
            measured = replace(measured, _made={})
            config = TrainConfig(total_steps=500, num_envs=1, num_checks=1, **recipe)
            policy = train([problem], config=config, evaluator=measured)
            ran = measured.trials(problem)
            assert ran.num_measurements == 10 and gpu.copies["pinned"] > 0
            assert (policy.best[0].placement == ran.samples.placements).all(axis=1).any()


def test_what_users_get_wrong() -> None:
    with pytest.raises(PolicyError, match="total_steps = 0"):
        TrainConfig(total_steps=0)
    assert type(TrainConfig(total_steps=1e4).total_steps) is int
    for what in ("num_envs", "steps_per_env", "imitation_epochs", "max_seconds"):
        with pytest.raises(PolicyError, match=rf"{what} = -3(\.0)? must be at least 0"):
            TrainConfig(**{what: -3})
    with pytest.raises(PolicyError, match="'other' is unknown; use one of"):
        TrainConfig(formulation="other")
    runtime: Any = SimpleNamespace(run=None)
    with pytest.raises(PolicyError, match="one problem, and problems are held out: give Measured"):
        train([chain([[1]])], evaluator=runtime, held_out=[chain([[2]])])
    with pytest.raises(PolicyError, match="1 warm starts for 2 problems"):
        train([chain([[1]]), chain([[1]])], warm=[None])
    one: Any = chain([[1, 2]])
    for given, why in (
        ({"problems": one}, r"problems=\[problem\]"),
        ({"held_out": one}, r"problems=\[problem\]"),
        ({"baseline": "heft"}, "baseline = 'heft' must be a planner"),
        ({"evaluator": 3}, "evaluator = 3 must be"),
        ({"policy": "a.safetensors"}, r"policy = 'a.safetensors' is no policy: TrainedPolicy.load"),
        ({"solutions": [1]}, r"solution 0 has shape \[\], and there are 1 operators"),
        ({"solutions": [[7]]}, "device 7"),
    ):
        with pytest.raises(ValueError, match=why):
            train(**({"problems": [one]} | given))


@pytest.mark.parametrize("formulation", ["sequential", "one_shot", "dispatch"])
def test_resuming_is_exact(formulation: Any, tmp_path: Path) -> None:
    """Two iterations, an interruption, and two more make the policy of four in a row."""
    problems = [layered(0, 3, 3, 2), layered(1, 4, 3, 3), layered(2, 2, 3, 2)]
    network: Any = NetworkConfig(hidden=16, layers=1)
    if formulation == "dispatch":
        network = {"scorer": 8, "encoder": "sage", "layers": 1}
    steps = {"total_steps": 4 * 64, "num_envs": 4, "steps_per_env": 16, "num_checks": 4}
    config = TrainConfig(formulation=formulation, network=network, **steps)

    def run(folder: str, stop_at: float = np.inf, resume: bool = False) -> TrainedPolicy:
        facts = {"config": config, "baseline": load("heft"), "out_dir": tmp_path / folder}
        return train(problems, **facts, resume=resume, callback=lambda row: row["steps"] < stop_at)

    whole = run("whole")
    run("parts", stop_at=128)
    table = (tmp_path / "parts" / "metrics.csv").read_text().splitlines()
    assert 3 <= len(table) < 6
    parts = run("parts", resume=True)
    first, second = whole.net.state_dict(), parts.net.state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    for a, b in zip(whole.best, parts.best, strict=True):
        assert np.array_equal(a.placement, b.placement)
        assert a.stats == b.stats
    rows = []
    for folder in ("whole", "parts"):
        with (tmp_path / folder / "metrics.csv").open() as file:
            told = csv.DictReader(file)
            rows.append([{k: v for k, v in r.items() if k != "seconds"} for r in told])
    assert rows[0] == rows[1]
    # Finished: nothing is left to do, and the answer is the same.
    again = run("parts", resume=True)
    assert all(torch.equal(first[k], v) for k, v in again.net.state_dict().items())
    other = train(problems, config=replace(config, seed=1), baseline=load("heft")).net.state_dict()
    assert not all(torch.equal(first[k], v) for k, v in other.items())


@pytest.mark.parametrize("formulation", ["giph:formulation", "sequential"])
@pytest.mark.usefixtures("published")
def test_every_evaluation_is_counted(formulation: Any) -> None:
    problem, total = layered(0, 3, 3, 2), 0

    def count(problem: Problem, placements: Any) -> Any:
        nonlocal total
        total += len(placements)
        return score(problem, placements)

    config = TrainConfig(128, formulation, num_envs=4, steps_per_env=8, num_checks=4)
    warm = [load("heft")(problem).placement]
    policy = train([problem], config=config, warm=warm, evaluator=count)
    assert policy.card["evaluations"] == total
    total = 0  # no start, so that devices alone are the references; and what is held out
    policy = train([problem], config=config, held_out=[layered(1, 3, 3, 2)], evaluator=count)
    assert policy.card["evaluations"] == total


def test_problems_much_larger_than_the_others_earn_rewards() -> None:
    """Episodes begin anew after a checkpoint, and not before the longest can have ended."""
    seen = Counter[int]()

    def count(problem: Problem, placements: Any) -> Any:
        seen[problem.num_ops] += len(placements)
        return score(problem, placements)

    some = [chain([[1, 2]] * 2) for _ in range(5)]
    train([*some, chain([[1, 2]] * 60)], config=TrainConfig(2000, network=SMALL), evaluator=count)
    assert seen[60] > 2 + 11  # devices alone, and checks


def test_episodes_longer_than_their_graph_end_before_they_begin_anew() -> None:
    """Those of GiPH have two moves for each group, and a rollout has as many steps as groups."""
    rows: list[Row] = []
    long = TrainConfig(600, "giph:formulation", num_envs=2, steps_per_env=30)
    train([chain([[1, 2]] * 30)], config=long, callback=rows.append)
    assert np.isfinite([row["reward_mean"] for row in rows]).sum() >= 4


def test_a_start_has_one_phase() -> None:
    problem = replace(chain([[1, 1]] * 3), objective="period", max_phases=2)
    phases = np.array([[0] * 3, [1] * 3], np.int32)
    train([problem], config=TrainConfig(64, network=SMALL), baseline=load("best_of", evaluations=9))
    with pytest.raises(PolicyError, match="warm start 0 takes turns in 2 phases"):
        train([problem], config=TrainConfig(64, network=SMALL), warm=[phases])


@pytest.mark.parametrize("wrong", [{"without": [42]}, {"episodes": 1}, {"keep": 0.0}])
def test_options_of_group_relative_are_checked(wrong: dict[str, Any]) -> None:
    groups = {"algorithm": "agents.dispatch.train:GroupRelative", "algorithm_options": wrong}
    with pytest.raises(PolicyError, match=r"must be at least 2.*numbers from 0 to 41"):
        train([layered(0, 2, 2, 2)], config=TrainConfig(64, "dispatch", **groups))


def test_dispatch_learns_from_the_graphs_that_it_decodes() -> None:
    """Its decodes know no start, so what it learns from has none."""
    problem = layered(0, 3, 3, 2)
    network = {"scorer": 8, "encoder": "sage", "layers": 1}
    config = TrainConfig(64, "dispatch", network=network)
    tasks = Tasks.of([problem], config, Start(baseline=load("heft")))
    assert tasks.starts[0] is not None
    net = make_net(config.network, "dispatch")
    ids = torch.zeros(1, dtype=torch.long)
    learned, decoded = (net.encode(s, ids).devices for s in (tasks.store, GraphStore([problem])))
    assert torch.equal(learned, decoded)
    larger = layered(0, 5, 6, 4)
    for weights in net.parameters():
        torch.nn.init.normal_(weights, std=2.0)
    policy = TrainedPolicy(net, {"config": {"cold": False}})
    start = load("heft")(larger).placement
    assert np.array_equal(policy.place(larger, start), policy.place(larger))


class Growing:
    """Deeper problems the further a training is; as ``examples/own_generator.py``."""

    progress, sizes = 0.0, Sizes(7, 2, 6)

    def __call__(self, rng: np.random.Generator) -> Problem:
        return chain(rng.random((3 + int(4 * self.progress), 2)))


def test_what_a_training_tells_a_generator_is_forgotten_after_it(tmp_path: Path) -> None:
    generator, config = Growing(), TrainConfig(400, num_envs=2, network=SMALL, samples=2)
    stop = lambda row: row["steps"] < 200  # noqa: E731
    train(generator, config=config, out_dir=tmp_path, callback=stop)
    assert generator.progress == 0.0
    train(generator, config=config, out_dir=tmp_path, resume=True)  # the same problems for checks


def test_checkpoints_of_something_else(tmp_path: Path) -> None:
    problem = layered(0, 3, 3, 2)
    config = TrainConfig(total_steps=64, network=SMALL)
    train([problem], config=config, out_dir=tmp_path)

    def refused(differs: str, problem: Problem = problem, **changes: Any) -> None:
        with pytest.raises(PolicyError, match=rf"another training \(it differs in: {differs}\)"):
            train([problem], **({"config": config} | changes), out_dir=tmp_path, resume=True)

    refused("problems", layered(1, 3, 3, 2))
    refused("problems", problem.with_objective("max_load"))
    profile = problem.profile
    slow = replace(profile, compute_s=profile.compute_s * 1000)
    refused("problems", replace(problem, profile=slow))
    wider = replace(config, seed=1, network=replace(SMALL, hidden=16))
    refused("configuration: seed = 0, now 1; network.hidden = 32, now 16", config=wider)
    refused("warm starts", warm=[np.zeros(9, np.int32)])
    refused("reference_s", reference_s=[1.0])
    refused("held-out problems, their warm starts", held_out=[problem])
    refused("evaluator", evaluator=lambda _, placements: score(problem, placements))
    train([problem], config=config, out_dir=tmp_path, resume=True)  # what it began with
    # A version before this one had fewer fields.
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    fields = json.loads(state["origin"]["configuration"])
    for new in ("reward", "generator", "samples", "algorithm", "algorithm_options", "device"):
        del fields[new]
    del state["origin"]["evaluator"], state["speedups"]
    state["origin"]["configuration"] = json.dumps(fields)
    torch.save(state, tmp_path / "checkpoint.pt")
    train([problem], config=config, out_dir=tmp_path, resume=True)
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(PolicyError, match="not a readable checkpoint"):
        train([problem], config=config, out_dir=tmp_path, resume=True)
    # Where there is no checkpoint training simply begins.
    train([problem], config=config, out_dir=tmp_path / "new", resume=True)


def test_code_of_ones_own_that_was_edited_is_another_training(tmp_path, monkeypatch):
    """As it is another planner in a comparison; what it was is in the checkpoint."""
    monkeypatch.syspath_prepend(tmp_path)
    code = "from envs.rewards import log_speedup\npaid = lambda x: {} * log_speedup(x)\n"
    file = written(tmp_path / "paying.py", code.format(1))
    config = TrainConfig(total_steps=64, network=SMALL, reward="paying:paid")

    def again() -> None:
        train([layered(0, 3, 3, 2)], config=config, out_dir=tmp_path / "run", resume=True)

    again(), again()
    written(file, code.format(2))
    with pytest.raises(PolicyError, match=r"your code: code of paying:paid = \w{12}, now \w{12}\)"):
        again()


def test_advantages_are_normalised_per_graph() -> None:
    space = spaces.Dict({"problem": spaces.Box(0, 9, (1,), np.int64)})
    buffer = PerGraphBuffer(32, space, spaces.Discrete(2), n_envs=3, gae_lambda=1.0, gamma=1.0)
    rng = np.random.default_rng(0)
    seen, nothing = {"problem": np.array([[0], [1], [2]])}, torch.zeros(3)
    for _ in range(32):
        rewards = rng.normal([0, 50, 3], [1, 20, 0])  # the third graph: nothing to choose from
        buffer.add(seen, np.zeros((3, 1)), rewards, np.ones(3), nothing, nothing)
    buffer.compute_returns_and_advantage(torch.zeros(3), np.ones(3))
    assert buffer.advantages.mean(axis=0) == pytest.approx([0, 0, 0], abs=1e-5)
    assert buffer.advantages.std(axis=0) == pytest.approx([1, 1, 0], abs=1e-4)
    assert buffer.returns.mean(axis=0)[1] > 30  # what the value head learns is not touched


def test_one_episode_of_each_graph_still_teaches() -> None:
    """Graph 0 earned 1 at its end, graph 1 lost 1: all that graph 0 did is better than that."""
    space = spaces.Dict({"problem": spaces.Box(0, 9, (1,), np.int64)})
    buffer = PerGraphBuffer(20, space, spaces.Discrete(2), n_envs=2, gae_lambda=0.99, gamma=1.0)
    for step in range(20):
        rewards, begins = np.array([1.0, -1.0]) * (step == 19), np.full(2, float(step == 0))
        seen, nothing = {"problem": np.array([[0], [1]])}, torch.zeros(2)
        buffer.add(seen, np.zeros((2, 1)), rewards, begins, nothing, nothing)
    buffer.compute_returns_and_advantage(torch.zeros(2), np.ones(2))
    good, bad = buffer.advantages.T
    assert good.min() > 0.5 and bad.max() < -0.5  # and not -0.2 to 0.2, around 0 for each graph
    assert buffer.advantages.std() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("sizes", [[1], [300] * 20, [5, 900, 1, 64, 500]])
def test_a_batch_of_imitation_has_rows_of_few_problems(sizes: list[int]) -> None:
    problem = np.repeat(np.arange(len(sizes)), sizes)
    batches = _batches(np.random.default_rng(0), problem, 512)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(problem)))  # each once
    assert max(map(len, batches)) <= 1.5 * 512
    assert max(len(np.unique(problem[rows])) for rows in batches) <= 8
    again = _batches(np.random.default_rng(1), problem, 512)
    assert len(problem) == 1 or not np.array_equal(np.concatenate(batches), np.concatenate(again))


@pytest.mark.parametrize("formulation", ["one_shot", "sequential", "doppler:formulation"])
@pytest.mark.usefixtures("published")
def test_imitation_reproduces_searched_solutions(formulation: Any, tmp_path: Path) -> None:
    problems = {f"p{i}": layered(i, 3, 4, 2 + i) for i in range(2)}
    expert = load("local_search", evaluations=300)
    solutions = solve(problems, expert, tmp_path / "solutions.npz")
    still = {"total_steps": 1, "learning_rate": 0.0, "last_learning_rate": 0.0}
    imitates = {"imitation_epochs": 150, "imitation_rate": 5e-3}
    network = NetworkConfig(hidden=32, layers=2)
    config = TrainConfig(formulation=formulation, network=network, **still, **imitates)
    policy = train(list(problems.values()), config=config, solutions=solutions)
    for problem, solution in zip(problems.values(), solutions, strict=True):
        same = canonical(problem, solution)
        assert np.mean(policy.place(problem)[0] == same) > 0.9


def test_the_weights_that_are_best_on_what_is_held_out_are_kept() -> None:
    """Trained where device 1 is fast, checked where it is slow: what fits the first is not kept."""
    here, there = chain([[3, 1]] * 4), chain([[1, 3]] * 4)
    rows: list[dict[str, float]] = []
    config = TrainConfig(total_steps=600, num_envs=4, learning_rate=1e-2, num_checks=6)
    start = load("single_device")
    both = [start(here).placement, start(there).placement]
    begin = {"warm": [both[1]], "reference_s": [4.0], "config": config}
    plain = train([here], **begin)
    assert plain.card["greedy_speedup"] > 0.99  # it learns to leave the start for device 1
    policy = train([here], **begin, held_out=[there], baseline=start, callback=rows.append)
    speedups = [row["held_out_speedup"] for row in rows]
    assert policy.card["greedy_speedup"] == pytest.approx(max(speedups)) == pytest.approx(1.0)
    assert [p["graph"] for p in policy.card["held_out"]] == [there.graph.name]


def test_speedups_are_told_whatever_is_paid_for() -> None:
    """``improvement`` pays 0.5 for what is as fast as the start: no logarithm of a speed-up."""
    here, rows, start = chain([[3, 1]] * 4), list[Row](), load("single_device")
    config = TrainConfig(total_steps=64, num_envs=4, reward="envs.rewards:improvement")
    begin = {"config": config, "callback": rows.append}
    policy = train([here], **begin, baseline=start, held_out=[here])
    assert rows[0]["held_out_speedup"] == pytest.approx(1.0)  # the start itself
    assert policy.card["greedy_speedup"] == pytest.approx(max(r["held_out_speedup"] for r in rows))
    # A start that was never seen is not shown when the policy is used.
    assert not policy.card["config"]["cold"]
    assert train([here], config=config).card["config"]["cold"]


def test_solutions_are_kept_and_reused(tmp_path: Path) -> None:
    expert = Mock(side_effect=load("heft"))
    problems = {"a": layered(0, 3, 3, 2), "b": layered(1, 3, 3, 2)}
    path = tmp_path / "solutions.npz"
    first = solve({"a": problems["a"]}, expert, path)
    both = solve(problems, expert, path)
    assert expert.call_count == 2
    assert np.array_equal(first[0], both[0])
    assert sorted(load_solutions(path)) == ["a", "b"]
    # Of another problem by the same name: searched for again.
    solve({"a": layered(2, 4, 4, 3)}, expert, path)
    assert expert.call_count == 3
    # The same problem with a colocation group that the solution splits.
    whole = replace(problems["b"], graph=replace(problems["b"].graph, group=np.zeros(9, np.int32)))
    assert len(np.unique(both[1])) == 2 and len(np.unique(solve({"b": whole}, expert, path))) == 1
    # Any name will do, and files without prefixes of the names are read.
    assert len(solve({"file": problems["a"]}, expert, path)) == 1
    assert sorted(load_solutions(path)) == ["a", "b", "file"]
    np.savez_compressed(path, a=first[0])
    assert np.array_equal(load_solutions(path)["a"], first[0])
    path.write_bytes(b"half")
    with pytest.raises(PolicyError, match="not a readable file of solutions"):
        solve(problems, expert, path)


@pytest.mark.usefixtures("published")
def test_equivalent_solutions_teach_the_same() -> None:
    """Equal devices are renamed in order of first use; what cannot be followed is left out."""
    problem = chain([[1, 1, 1]] * 4)
    chosen = ProblemSet.build([problem])
    for a, b in (([0, 0, 1, 2], [2, 2, 0, 1]), ([1, 1, 1, 1], [2, 2, 2, 2])):
        for formulation in ("one_shot", "sequential", "dispatch", "doppler:formulation"):
            first = demonstrations(chosen, [np.array(a, np.int32)], formulation)
            second = demonstrations(chosen, [np.array(b, np.int32)], formulation)
            assert np.array_equal(first[1], second[1])
            assert len(first[1]) == (1 if formulation == "one_shot" else 4)
            assert all(np.array_equal(first[0][k], second[0][k]) for k in first[0])
    actions = demonstrations(chosen, [np.array([2, 0, 0, 1], np.int32)], "sequential")[1]
    assert actions.tolist() == [0, 1, 1, 2]
    with pytest.raises(PolicyError, match="nothing to imitate"):
        demonstrations(chosen, [np.zeros(4, np.int32)], "giph:formulation")
    with pytest.raises(PolicyError, match="0 solutions for 1 problems"):
        demonstrations(chosen, [], "sequential")


TRAINED = ("placeto", "hsdag", "giph", "post", "doppler", "released_dispatch")
ON_A_DEVICE = """
import sys
import torch
from tests import strict_device
here, there = torch.ones(2), torch.ones(2, device="strict")
print((there + 1).cpu().tolist(), there.device)
for mixed in (lambda: here + there, there.numpy,
              lambda: torch.rand(2, generator=torch.Generator(), device="strict")):
    try:
        mixed()
    except (RuntimeError, TypeError):
        print("refused")
strict_device.main(sys.argv[1:])
"""


def test_every_formulation_trains_on_a_device_that_refuses_to_be_mixed() -> None:
    """One of its own, which cannot be mixed with the CPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    places = (os.environ.get("PYTHONPATH", ""), str(ROOT / "examples" / "published"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-c", ON_A_DEVICE, *TRAINED]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == ["[2.0, 2.0] strict:0", *["refused"] * 3, *TRAINED]
