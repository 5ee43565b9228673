"""Features, network, saved policies and ``PolicyPlanner``: what does not need learning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems, random_problem
from test_envs import chain

from agents.encoder import ILLEGAL, NetworkConfig, PlacementNet, greedy, sample
from agents.features import DEVICE_FEATURES, GROUP_FEATURES, PAIR_FEATURES, features
from agents.planner import PolicyPlanner
from agents.policy import OneShotPolicy, SequentialPolicy
from agents.store import GraphStore
from agents.trained import PolicyError, TrainedPolicy
from agents.training import TrainConfig, train
from envs.placement import OneShotRules
from envs.problems import ProblemSet, canonical
from envs.sequential import SequentialRules
from placement.cluster import Cluster
from placement.graph import OpGraph
from placement.planners import PlannerError, load
from placement.problem import Problem
from placement.simulator import score
from placement.testing import check_planner

FORMULATIONS = ("one_shot", "sequential")


def untrained(formulation: Any = "sequential", **config: Any) -> TrainedPolicy:
    torch.manual_seed(0)
    return TrainedPolicy(PlacementNet(NetworkConfig(hidden=16, layers=2, **config)), formulation)


def scaled(problem: Problem, seconds: float, size: int) -> Problem:
    """Everything takes ``seconds`` times as long and weighs ``size`` times as much."""
    g, profile, cluster = problem.graph, problem.profile, problem.cluster
    graph = replace(g, tensor_bytes=g.tensor_bytes * size, param_bytes=g.param_bytes * size)
    devices = tuple(replace(d, memory_bytes=d.memory_bytes * size) for d in cluster.devices)
    links = tuple(
        replace(
            x,
            latency_s=x.latency_s * seconds,
            bandwidth_bytes_per_s=x.bandwidth_bytes_per_s * size / seconds,
        )
        for x in profile.links
    )
    given_s = profile.transfer_s
    return replace(
        problem,
        graph=graph,
        cluster=Cluster(cluster.name, devices),
        profile=replace(
            profile,
            compute_s=profile.compute_s * seconds,
            links=links,
            transfer_s=None if given_s is None else given_s * seconds,
        ),
    )


@settings(max_examples=30)
@given(problem=problems(grouped=True, unsupported=True))
def test_features_are_finite_bounded_and_free_of_scale(problem: Problem) -> None:
    groups, devices = problem.group_compute_s.shape
    warm = load("single_device")(problem).placement
    f = features(problem, warm)
    assert f.group.shape == (groups, len(GROUP_FEATURES))
    assert f.device.shape == (devices, len(DEVICE_FEATURES))
    assert f.pair.shape == (groups, devices, len(PAIR_FEATURES))
    for array in (f.group, f.device, f.pair):
        assert np.isfinite(array).all()
        assert np.abs(array).max(initial=0) < 50
    other = features(scaled(problem, 1e-3, 7), warm)
    for name in ("group", "device", "pair"):
        assert getattr(other, name) == pytest.approx(getattr(f, name), abs=1e-4)


def test_features_by_hand() -> None:
    # Groups a = {op0, op2} and b = {op1}: the chain goes a -> b -> a.
    problem = chain([[1, 2], [4, 2], [1, 2]], group=[0, 1, 0])
    f = features(problem, np.array([0, 1, 0], np.int32))
    assert f.edges.tolist() == [[0, 1], [1, 0]]
    assert f.warm.tolist() == [0, 1]
    named = dict(zip(PAIR_FEATURES, f.pair.transpose(2, 0, 1), strict=True))
    assert named["1 if the warm start puts it here"].tolist() == [[1, 0], [0, 1]]
    here = named["log seconds here over the fastest device"]
    assert here == pytest.approx(np.log([[1, 2], [2, 1]]))
    # Each group has all its neighbours on the other's device.
    assert named["share of the neighbours' bytes that the warm start has here"].tolist() == [
        [0, 1],
        [1, 0],
    ]
    top = f.group[:, GROUP_FEATURES.index("top level over the critical path (longest way here)")]
    # Mean seconds 1.5, 3, 1.5 and two transfers of 0.5: the path is 7; b begins at 2.
    assert top[1] == pytest.approx(2 / 7)
    slack = f.group[:, GROUP_FEATURES.index("slack over the critical path")]
    assert slack == pytest.approx([0, 0], abs=1e-6)


def test_graphs_do_not_see_their_neighbours_or_their_padding() -> None:
    small, large = random_problem(1, 4, 2), random_problem(2, 12, 4)
    net = untrained().net
    alone, both = GraphStore([small]), GraphStore([large, small])
    with torch.no_grad():
        a = net.all_logits(alone, torch.tensor([0]), net.encode(alone, torch.tensor([0])))
        ids = torch.tensor([0, 1])
        b = net.all_logits(both, ids, net.encode(both, ids))[1:]
    g, d = small.group_compute_s.shape
    assert b[:, :g, :d].numpy() == pytest.approx(a.numpy(), abs=1e-5)
    assert (b[:, :g, d:] == ILLEGAL).all()
    # A group that is only padding has one device, so it weighs nothing in a log-probability.
    assert torch.log_softmax(b[:, g:], dim=-1)[..., 0].abs().max() < 1e-6


def test_samples_follow_the_softmax_and_never_the_illegal() -> None:
    logits = torch.tensor([1.0, 0.0, ILLEGAL]).expand(20_000, 3)
    drawn = sample(logits, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=3) / len(drawn)
    assert share.numpy() == pytest.approx([0.7311, 0.2689, 0.0], abs=0.01)
    assert greedy(logits).unique().tolist() == [0]


def test_log_probabilities_are_means_over_the_real_groups() -> None:
    chosen = ProblemSet.build([chain([[1, 1]] * 3), chain([[1, 1, 1]] * 5)])
    rules = OneShotRules(chosen, 2)
    rules.start(np.arange(2), np.arange(2))
    net, store = untrained().net, GraphStore(chosen.problems)
    policy = OneShotPolicy(
        rules.observation_space, rules.action_space, lambda _: 1e-3, net=net, store=store
    )
    obs = {k: torch.from_numpy(v) for k, v in rules.observe().items()}
    actions, values, log_prob = policy(obs)
    again, same, entropy = policy.evaluate_actions(obs, actions)
    assert torch.allclose(same, log_prob, atol=1e-5)
    assert torch.allclose(again, values, atol=1e-5)
    # Nearly uniform when untrained: log 2 with two devices, log 3 with three.
    assert entropy.detach().numpy() == pytest.approx(np.log([2, 3]), abs=0.02)
    assert (actions[0, 3:] == 0).all()


def test_the_encoding_is_kept_until_the_network_changes() -> None:
    chosen = ProblemSet.build([chain([[1, 2]] * 3)])
    rules = SequentialRules(chosen, 2)
    rules.start(np.arange(2), np.zeros(2, np.int64))
    store, calls = GraphStore(chosen.problems), []
    net = untrained().net
    encode = net.encode
    net.encode = lambda *a: calls.append(1) or encode(*a)  # type: ignore[method-assign]
    policy = SequentialPolicy(
        rules.observation_space, rules.action_space, lambda _: 0.1, net=net, store=store
    )
    obs = {k: torch.from_numpy(v) for k, v in rules.observe().items()}
    with torch.no_grad():
        before = policy(obs)[1]
        policy(obs)
    assert len(calls) == 1
    policy.evaluate_actions(obs, torch.zeros(2))[0].sum().backward()
    policy.optimizer.step()
    with torch.no_grad():
        after = policy(obs)[1]
    assert len(calls) == 3
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("formulation", FORMULATIONS)
@settings(max_examples=15)
@given(seed=st.integers(0, 1000))
def test_an_untrained_policy_starts_at_its_warm_start(formulation: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(1, 20)), int(rng.integers(1, 5))
    problem = chain(rng.random((n, 1)) * rng.integers(1, 3, d))
    warm = rng.integers(0, d, n).astype(np.int32)
    placements = untrained(formulation).place(problem, warm, num_samples=3, seed=seed)
    assert placements.shape == (4, n)
    assert np.array_equal(placements[0], canonical(problem, warm))
    for row in placements:
        problem.check_placement(row)


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_samples_stay_near_the_warm_start_whatever_the_size(formulation: Any) -> None:
    for n in (40, 160):
        problem = chain(np.ones((n, 4)) * [1, 2, 3, 4])  # four kinds: no symmetry
        warm = np.arange(n, dtype=np.int32) * 4 // n
        rows = untrained(formulation, changes=4.0).place(problem, warm, num_samples=60)
        changed = (rows[1:] != warm).sum(axis=1).mean()
        assert 3 < changed < 5.5


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_other_sizes_and_numbers_of_devices(formulation: Any) -> None:
    """Trained on 6 groups and 2 devices, it acts on 15 and 4, and the other way round."""
    sizes = [(6, 2), (15, 4)]
    for (n, d), (m, e) in (sizes, sizes[::-1]):
        config = TrainConfig(
            total_steps=200, formulation=formulation, network=NetworkConfig(hidden=8, layers=1)
        )
        policy = train([random_problem(0, n, d)], config=config)
        other = random_problem(1, m, e, grouped=True, unsupported=True)
        for row in policy.place(other, num_samples=2):
            other.check_placement(row)


def test_save_and_load(tmp_path: Path) -> None:
    policy = replace(untrained("one_shot"), card={"note": "x"})
    policy.save(tmp_path / "new" / "policy.npz")
    again = TrainedPolicy.load(tmp_path / "new" / "policy.npz")
    assert again.formulation == "one_shot"
    assert again.card == {"note": "x"}
    problem = random_problem(5, 12, 3)
    before = policy.place(problem, num_samples=5, seed=1)
    assert np.array_equal(again.place(problem, num_samples=5, seed=1), before)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["policy.npz"]


def test_files_that_are_not_policies(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    with pytest.raises(PolicyError, match=r"not a readable policy.*placement-train"):
        TrainedPolicy.load(path)
    untrained().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(PolicyError, match="not a readable policy"):
        TrainedPolicy.load(path)
    np.savez(path, head=np.array(json.dumps({"format": 99})))
    with pytest.raises(PolicyError, match="format 99, this version reads 1"):
        TrainedPolicy.load(path)
    head = {"format": 1, "formulation": "sequential", "network": {}, "card": {}}
    np.savez(path, head=np.array(json.dumps(head)), weight=np.zeros(3))
    with pytest.raises(PolicyError, match="weights do not fit"):
        TrainedPolicy.load(path)
    np.savez(path, head=np.array(json.dumps(head | {"formulation": "other"})))
    with pytest.raises(PolicyError, match="formulation"):
        TrainedPolicy.load(path)
    np.savez(path, head=np.array([{}], dtype=object))  # a pickle: refused, not executed
    with pytest.raises(PolicyError, match="not a readable policy"):
        TrainedPolicy.load(path)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "zero_shot"},
        {"mode": "best_of_k", "k": 40, "evaluations": 30},
        {"mode": "finetune", "steps": 40, "k": 4, "evaluations": 60},
    ],
)
def test_the_planner_contract(options: dict[str, Any]) -> None:
    check_planner(PolicyPlanner(policy=untrained("one_shot"), **options))


@settings(max_examples=25)
@given(
    problem=problems(grouped=True, unsupported=True),
    mode=st.sampled_from(["zero_shot", "best_of_k"]),
    formulation=st.sampled_from(FORMULATIONS),
)
def test_never_worse_than_the_baseline(problem: Problem, mode: Any, formulation: Any) -> None:
    """Even a policy of nonsense weights: the baseline is a candidate, and counted."""
    policy = untrained(formulation)
    with torch.no_grad():
        for weights in policy.net.parameters():
            weights.mul_(10.0)
    baseline = load("best_of")(problem)
    answer = PolicyPlanner(policy, mode, k=5)(problem)
    assert answer.value_s <= baseline.value_s
    assert answer.value_s == score(problem, answer.placement)[0]
    stats = answer.stats
    assert stats["baseline_value_s"] == baseline.value_s
    assert stats["best_value_s"] == answer.value_s
    best = stats["greedy_value_s"] if mode == "zero_shot" else stats["best_of_k_value_s"]
    assert answer.value_s == min(best, baseline.value_s)
    made = 1 if mode == "zero_shot" else stats["best_of_k_evaluations"]
    assert stats["evaluations"] == stats["baseline_evaluations"] + made
    assert made == (1 if mode == "zero_shot" else 6)


def test_finetune_keeps_the_best_of_training(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    problem = chain(rng.random((12, 3)), latency_s=0.01)
    answer = PolicyPlanner(None, "finetune", k=4, steps=300, baseline="single_device")(problem)
    stats = answer.stats
    assert stats["training_evaluations"] > 0
    assert answer.value_s == stats["best_value_s"]
    assert answer.value_s <= min(stats["best_of_k_value_s"], stats["greedy_value_s"])
    assert answer.value_s < 0.95 * stats["baseline_value_s"]


def test_the_planner_from_a_command_line(tmp_path: Path) -> None:
    path = tmp_path / "policy.npz"
    untrained().save(path)
    planner = load("agents.planner:PolicyPlanner", policy=str(path), mode="zero_shot", seconds="30")
    assert planner(random_problem(3)).stats["mode"] == "zero_shot"
    with pytest.raises(PlannerError, match="mode"):
        load("agents.planner:PolicyPlanner", mode="magic")
    with pytest.raises(PolicyError, match="zero_shot, best_of_k or finetune"):
        PolicyPlanner(mode="magic")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="not a readable policy"):
        PolicyPlanner(tmp_path / "none.npz")(random_problem(3))


def test_a_graph_without_tensors_or_devices_to_choose_from() -> None:
    graph = OpGraph.build("one", ["op"], [], [], [])
    lone = chain([[1.0]])
    problem = replace(lone, graph=graph)
    for formulation in FORMULATIONS:
        assert untrained(formulation).place(problem).tolist() == [[0]]
