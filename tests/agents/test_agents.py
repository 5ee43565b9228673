"""Features, network, saved policies and ``PolicyPlanner``: what does not need learning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from agents.dispatch.decodes import PROMISES, draws
from agents.encoder import ILLEGAL, NetworkConfig, PlacementNet, PolicyError, greedy, sample
from agents.planner import RELEASED, PolicyPlanner, _warm_up
from agents.policy import PlacementPolicy
from agents.store import GraphStore
from agents.trained import TrainedPolicy, actions, make_net
from agents.training import TrainConfig, train
from envs.dispatch import Dispatcher
from envs.features import DEVICE_FEATURES, GROUP_FEATURES, PAIR_FEATURES, features
from envs.one_shot import OneShotRules
from envs.problem_set import ProblemSet, canonical
from envs.sequential import SequentialRules
from placement.planners import PlannerError, load
from placement.problem import Problem
from placement.search.evaluation import Search
from placement.simulator import score, value_of
from placement.testing import check_planner
from placement.workloads.synthetic import families, giph
from tests.agents.test_learning import layered
from tests.envs.test_envs import chain
from tests.problems import DIAMOND, altered, graph_of, problems, random_placement, random_problem

FORMULATIONS = ("one_shot", "sequential")


def untrained(formulation: Any = "sequential", **config: Any) -> TrainedPolicy:
    torch.manual_seed(0)
    return TrainedPolicy(make_net(NetworkConfig(hidden=16, layers=2, **config), formulation))


def scaled(problem: Problem, seconds: float, size: int) -> Problem:
    """Everything takes ``seconds`` times as long and weighs ``size`` times as much."""
    g, given_s = problem.graph, problem.profile.transfer_s
    graph = replace(g, tensor_bytes=g.tensor_bytes * size, param_bytes=g.param_bytes * size)
    devices = {"memory_bytes": lambda d: d.memory_bytes * size}
    links = {"latency_s": lambda x: x.latency_s * seconds}
    links |= {"bandwidth_bytes_per_s": lambda x: x.bandwidth_bytes_per_s * (size / seconds)}
    times = {"compute_s": problem.profile.compute_s * seconds}
    times |= {"transfer_s": None if given_s is None else given_s * seconds}
    return altered(replace(problem, graph=graph), devices, links, **times)


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
    named = dict(zip(PAIR_FEATURES, f.pair.transpose(2, 0, 1), strict=True))
    assert named["1 if the warm start puts it here"].tolist() == [[1, 0], [0, 1]]
    here = named["log seconds here over the fastest device"]
    assert here == pytest.approx(np.log([[1, 2], [2, 1]]))
    # Each group has all its neighbours on the other's device.
    here = named["share of the neighbours' bytes that the warm start has here"]
    assert here.tolist() == [[0, 1], [1, 0]]
    top = f.group[:, GROUP_FEATURES.index("top level over the critical path (longest way here)")]
    # Mean seconds 1.5, 3, 1.5 and two transfers of 0.5: the path is 7; b begins at 2.
    assert top[1] == pytest.approx(2 / 7)
    slack = f.group[:, GROUP_FEATURES.index("slack over the critical path")]
    assert slack == pytest.approx([0, 0], abs=1e-6)


def test_a_policy_sees_the_objective() -> None:
    """The same graph is placed otherwise for a latency than for a pipeline of four in flight."""
    expected = {"latency": [0, 0, 0], "piecewise_latency": [0, 1, 0], "max_load": [1, 1, 0]}
    expected |= {"period": [1, 0, np.log(4)]}
    problem = chain([[1, 2], [4, 2]])
    for objective, row in expected.items():
        f = features(replace(problem, objective=objective, max_in_flight=4))
        assert f.group[:, -3:] == pytest.approx(np.array([row, row]))
        assert f.device[:, -3:] == pytest.approx(np.array([row, row]))


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
    net, store = untrained("one_shot").net, GraphStore(chosen.problems)
    spaces = rules.observation_space, rules.action_space
    policy = PlacementPolicy(*spaces, lambda _: 1e-3, net=net, store=store)
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
    net.encode = lambda *a: calls.append(1) or encode(*a)
    spaces = rules.observation_space, rules.action_space
    policy = PlacementPolicy(*spaces, lambda _: 0.1, net=net, store=store)
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


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), warm=st.booleans())
def test_the_kernel_decodes_as_the_network_does(seed: int, warm: bool) -> None:
    """Whole placements in one kernel equal those that torch scores one group at a time."""
    rng = np.random.default_rng(seed)
    problems = [random_problem(seed), chain(rng.random((7, 4)))]
    plans = [random_placement(p, seed) for p in problems]
    starts = [canonical(p, x) if warm else None for p, x in zip(problems, plans, strict=True)]
    chosen, store = ProblemSet.build(problems), GraphStore(problems, starts)
    torch.manual_seed(seed)
    net = PlacementNet(NetworkConfig(hidden=16, layers=1), "sequential")
    torch.nn.init.normal_(net.score[-1].weight)  # far from its start
    ids = np.array([0, 1, 1])
    rules = SequentialRules(chosen, 3)
    rules.start(np.arange(3), ids)
    done = np.zeros(3, bool)
    for taken in actions(net, store, rules, torch.ones(3, dtype=torch.bool), None):
        done = rules.decide(taken)
        if done.all():
            break
    fast = SequentialRules(chosen, 3)
    fast.start(np.arange(3), ids)
    every, none = np.ones(3, bool), np.random.default_rng(0)
    fast.construct(net.weights(store), store.pair.numpy(), store.warm.numpy(), every, none)
    assert np.array_equal(fast.choices, rules.choices)


class Last(PlacementNet):
    """Takes the last device that is legal, whatever the group."""

    def step_logits(self, *args: Any) -> torch.Tensor:
        logits = super().step_logits(*args)
        return torch.where(logits > ILLEGAL, torch.arange(logits.shape[1]) * 1.0, logits)


def test_a_network_that_scores_differently_is_asked() -> None:
    problem = chain(np.ones((3, 3)) * [1, 2, 3])
    policy = TrainedPolicy(Last(NetworkConfig(hidden=16, layers=1), "sequential"))
    assert policy.place(problem).tolist() == [[2, 2, 2]]


def test_the_kernel_draws_from_the_softmax() -> None:
    problem = chain(np.ones((1, 2)) * [1, 2])
    net = untrained().net
    store, chosen = GraphStore([problem]), ProblemSet.build([problem])
    rules = SequentialRules(chosen, 20_000)
    rules.start(np.arange(20_000), np.zeros(20_000, np.int64))
    obs = {k: torch.from_numpy(v) for k, v in rules.observe().items()}
    every = torch.tensor([0])
    with torch.no_grad():
        row, encoded = torch.from_numpy(rules.ids), net.encode(store, every)
        logits = net.evaluate(store, every, encoded, row, obs)[0]
    rng = np.random.default_rng(0)
    drawn = np.zeros(20_000, bool)
    rules.construct(net.weights(store), store.pair.numpy(), store.warm.numpy(), drawn, rng)
    expected = torch.softmax(logits, dim=-1)[0, 1].item()
    assert (rules.choices[:, 0] == 1).mean() == pytest.approx(expected, abs=0.01)


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
        network = NetworkConfig(hidden=8, layers=1)
        config = TrainConfig(total_steps=200, formulation=formulation, network=network)
        policy = train([random_problem(0, n, d)], config=config)
        other = random_problem(1, m, e, grouped=True, unsupported=True)
        for row in policy.place(other, num_samples=2):
            other.check_placement(row)


def test_files_that_are_not_policies(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    with pytest.raises(PolicyError, match=r"not a readable policy.*placement-train"):
        TrainedPolicy.load(path)
    untrained().save(path)
    whole = path.read_bytes()
    for part in (whole[: len(whole) // 2], whole[:4], b"", whole + b"more"):
        path.write_bytes(part)
        with pytest.raises(PolicyError, match="not a readable policy"):
            TrainedPolicy.load(path)


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.path,)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    path, sprung = tmp_path / "p.safetensors", tmp_path / "sprung"
    with path.open("wb") as file:
        np.savez(file, head=np.array([Trap(sprung)], dtype=object))
    with pytest.raises(PolicyError, match="not a readable policy"):
        TrainedPolicy.load(path)
    torch.save(Trap(sprung), path)
    with pytest.raises(PolicyError, match="not a readable policy"):
        TrainedPolicy.load(path)
    assert not sprung.exists()


CODE = r"unknown|is not ours|does not fit|do not fit"
HEAD = {"format": 3, "formulation": "sequential", "network": {"hidden": 16, "layers": 2}}


@pytest.mark.parametrize(
    ("change", "weights", "message"),
    [
        ({"format": 99}, {}, "format 99, this version reads 3; train again"),
        ({"formulation": "other"}, {}, "formulation 'other' is unknown"),
        ({"formulation": None}, {}, "formulation None is unknown"),
        ({"formulation": ["sequential"]}, {}, "unknown"),
        ({"formulation": "os:system"}, {}, CODE),  # what names code runs none
        ({"network": {"encoder": "subprocess:Popen"}}, {}, CODE),
        ({"network": {"encoder": "os:nothing"}}, {}, CODE),
        ({"network": {"encoder": ["sage"]}}, {}, CODE),
        ({}, {"more": np.zeros(3)}, r"weights do not fit .*other layers: \['more'\]"),
        ({"network": {"hidden": 4000000000}}, {}, "weights do not fit"),  # nothing is allocated
        ({"network": {"layers": 10**9}}, {}, "layers = 1000000000 must be 0 to 64"),
        ({"network": {"changes": 0.0}}, {}, "changes = 0.0 must be 1e-06 to 1e.09"),
        ({"network": {"hidden": "16"}}, {}, "weights do not fit"),
        ({"network": {"width": 1}}, {}, "PlacementNet has no 'width'"),
        ({"network": []}, {}, "weights do not fit"),
        ({"card": 3}, {}, "weights do not fit"),
        ({"card": {"config": []}}, {}, "the card's config is no object"),
        ({"network": {"finish_weight": "4"}}, {}, "finish_weight = '4' is not of type float"),
        ({}, {"value.2.bias": np.zeros(2, np.float32)}, r"value.2.bias is .*\[2\], not .*\[1\]"),
        ({}, {"value.2.bias": np.zeros(1)}, "value.2.bias is torch.float64"),
        (
            {},
            {"value.2.bias": np.full(1, np.nan, np.float32)},
            "value.2.bias has a weight that is no number, or above 10000",
        ),
        ({}, {"value.2.bias": np.full(1, 1e6, np.float32)}, "no number, or above 10000"),
    ],
)
def test_heads_and_weights_that_do_not_fit(tmp_path, change, weights, message):
    good = {k: v.numpy() for k, v in untrained().net.state_dict().items()}
    head = {**HEAD, "card": {}, **change}
    path = tmp_path / "p.safetensors"
    save_file({**good, **weights}, path, {"policy": json.dumps(head)})
    with pytest.raises(PolicyError, match=message):
        TrainedPolicy.load(path)
    save_file(good, path)
    with pytest.raises(PolicyError, match="not a readable policy"):
        TrainedPolicy.load(path)


@pytest.mark.parametrize(
    ("k", "search", "evaluations"), [(0, False, None), (40, False, 30), (4, True, 60)]
)
def test_the_planner_contract(k: int, search: bool, evaluations: int | None) -> None:
    check_planner(PolicyPlanner(untrained("one_shot"), k, search, evaluations=evaluations))


@settings(max_examples=12)
@given(
    problem=problems(grouped=True, unsupported=True),
    samples=st.sampled_from([0, 5]),
    formulation=st.sampled_from(FORMULATIONS),
)
def test_never_worse_than_the_baseline(problem: Problem, samples: int, formulation: Any) -> None:
    """Even a policy of nonsense weights: the baseline is a candidate, and counted."""
    policy = untrained(formulation)
    with torch.no_grad():
        for weights in policy.net.parameters():
            weights.mul_(10.0)
    baseline = load("best_of")(problem)
    assume(baseline.value_s > 0)  # nothing is better than nothing, and nothing is decoded
    answer = PolicyPlanner(policy, samples, search=False)(problem)
    assert answer.value_s <= baseline.value_s
    assert answer.value_s == score(problem, answer.placement)[0]
    stats = answer.stats
    assert stats["baseline_value_s"] == baseline.value_s
    assert stats["best_value_s"] == answer.value_s
    best = stats["best_of_k_value_s"] if samples else stats["greedy_value_s"]
    assert answer.value_s == min(best, baseline.value_s)
    sampled = stats["best_of_k_evaluations"] if samples else 1
    assert stats["evaluations"] == stats["baseline_evaluations"] + sampled
    assert sampled == samples + 1


@pytest.mark.parametrize("search", [True, False])
def test_less_than_predictions_err_is_no_gain(search: bool) -> None:
    problem = random_problem(3, 20, 3)
    options: dict[str, Any] = {"policy": "untrained", "search": search, "evaluations": 400}
    options |= {"baseline": "round_robin"}
    start = load("round_robin")(problem)
    best = PolicyPlanner(**options)(problem)
    gain = 1 - best.value_s / start.value_s
    assert gain > 0.05
    for error, taken in ((0.9 * gain, True), (1.1 * gain, False)):
        profile = replace(problem.profile, provenance={"error": error})
        answer = PolicyPlanner(**options)(replace(problem, profile=profile))
        assert answer.stats["best_value_s"] == best.value_s
        expected = best if taken else start
        assert answer.value_s == expected.value_s
        np.testing.assert_array_equal(answer.placement, expected.placement)
        assert ("margin" in answer.stats) is not taken
        assert answer.stats["curve"][-1][2] == answer.value_s
        # Whoever asks for it gets the best in any case, or another margin.
        anyway = PolicyPlanner(**options, margin=0.0)(replace(problem, profile=profile))
        assert anyway.value_s == best.value_s
    assert PolicyPlanner(**options, margin=1.1 * gain)(problem).value_s == start.value_s
    # Predictions that err by more than everything tell no gain; what fits they tell.
    profile = replace(problem.profile, provenance={"error": 1.5})
    assert PolicyPlanner(**options)(replace(problem, profile=profile)).value_s == start.value_s
    scored = Search(problem)
    nowhere, stats = PolicyPlanner(**options)._start(scored, "round_robin")
    scored.problem = replace(problem, profile=profile)
    nowhere = replace(nowhere, value_s=np.inf)
    assert PolicyPlanner(**options)._answer(scored, nowhere, stats).value_s == start.value_s
    ordered = {"policy": None, "margin": 0.99}
    answer = PolicyPlanner(**options | ordered)(layered(133, 3, 3, 2).with_objective("latency"))
    assert "list_order_value_s" not in answer.stats
    for margin in (-0.1, 1.0):
        with pytest.raises(PolicyError, match=f"margin = {margin} must be a share, 0 <= margin"):
            PolicyPlanner(margin=margin)


def test_the_planner_from_a_command_line(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    untrained().save(path)
    planner = load("policy", policy=str(path), search="false", k="2", seconds="30")
    assert planner(random_problem(3)).stats["best_of_k_evaluations"] == 3
    with pytest.raises(PlannerError, match="mode"):
        load("policy", mode="zero_shot")
    with pytest.raises(PolicyError, match="not a readable policy"):
        PolicyPlanner(tmp_path / "none.safetensors")(random_problem(3))


def test_a_graph_without_tensors_or_devices_to_choose_from() -> None:
    problem = replace(chain([[1.0]]), graph=graph_of(1, [], tensor_src=[]))
    for formulation in FORMULATIONS:
        assert untrained(formulation).place(problem).tolist() == [[0]]


ENCODERS = ("sage", "gat", "dag")


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("deep", [False, True])
def test_every_encoder_sees_the_graph_alone(encoder: Any, deep: bool) -> None:
    small, large = random_problem(1, 4, 2, grouped=True), random_problem(2, 12, 4)
    if deep:  # more levels than there are waves
        small, large = chain(np.ones((40, 2))), chain(np.ones((200, 2)))
    net = untrained(encoder=encoder).net
    alone, both = GraphStore([small]), GraphStore([large, small])
    with torch.no_grad():
        a = net.encode(alone, torch.tensor([0]))
        b = net.encode(both, torch.tensor([0, 1]))
    g, d = small.group_compute_s.shape
    assert torch.allclose(a.groups[0], b.groups[1, :g], atol=1e-5)
    assert torch.allclose(a.graph[0], b.graph[1], atol=1e-5)
    assert torch.allclose(a.devices[0], b.devices[1, :d], atol=1e-5)


def test_one_layer_of_dag_sees_every_ancestor_and_descendant() -> None:
    """In a chain of 10 what is told of the first reaches the last, and the other way round."""
    problem = chain(np.ones((10, 2)))
    for encoder, reaches in (("dag", 9), ("sage", 1), ("gat", 1)):
        torch.manual_seed(0)
        config = NetworkConfig(encoder=encoder, hidden=16, layers=1)
        net, store = make_net(config, "sequential"), GraphStore([problem])
        with torch.no_grad():
            for end in (0, 9):
                before = net.encode(store, torch.tensor([0])).groups[0].clone()
                store.batch((0,)).x[end] += 5.0
                change = (net.encode(store, torch.tensor([0])).groups[0] - before).abs().amax(1)
                store.batch((0,)).x[end] -= 5.0
                far = torch.arange(10) if end == 0 else torch.arange(9, -1, -1)
                assert (change[far[: reaches + 1]] > 0).all()
                assert (change[far[reaches + 1 :]] == 0).all()


def test_waves_follow_the_levels() -> None:
    # a -> b -> d, a -> c -> d: waves {a}, {b, c}, {d}, and back.
    store = GraphStore([replace(chain([[1, 1]] * 4), graph=graph_of(4, DIAMOND, 1))])
    along, against = store.waves((0,))
    assert [nodes.tolist() for nodes, _, _ in along] == [[0], [1, 2], [3]]
    assert [nodes.tolist() for nodes, _, _ in against] == [[3], [1, 2], [0]]
    _, sources, targets = along[1]
    assert sorted(zip(sources.tolist(), targets.tolist(), strict=True)) == [(0, 0), (0, 1)]
    _, sources, targets = against[2]
    assert sorted(zip(sources.tolist(), targets.tolist(), strict=True)) == [(1, 0), (2, 0)]
    # However deep a graph is, there are not more waves than that.
    deep = GraphStore([chain(np.ones((500, 2)))])
    assert len(deep.waves((0,))[0]) == 48


def test_cut_costs_by_hand() -> None:
    # a -> b -> c, and a -> c: after a one tensor is alive, after b two, after c none.
    graph = graph_of(3, [(0, 1), (1, 2), (0, 2)], 10)
    f = features(replace(chain([[1, 1]] * 3), graph=graph))
    names = [text.split(" (")[0] for text in GROUP_FEATURES]
    cut = f.group[:, names.index("log transfer seconds of all that is alive after it")]
    assert np.exp(cut) == pytest.approx([0.5, 1.0, 1e-3], rel=1e-4)
    so_far = f.group[:, names.index("share of the seconds up to it")]
    assert so_far == pytest.approx([1 / 3, 2 / 3, 1])
    assert f.edge.shape == (3, 2)
    assert np.exp(f.edge[:, 0]) == pytest.approx([0.5] * 3)


def test_seconds_may_be_over_when_the_network_has_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it places then is not evaluated, and the start is the answer."""
    problem, policy = layered(0, 3, 3, 2), untrained()
    search, place = Search(problem, 0.05), policy.place

    def slow(*asked: Any) -> Any:
        while search.left:
            pass
        return place(*asked)

    start = search.run_start("single_device", "baseline", 1.0)
    monkeypatch.setattr(TrainedPolicy, "place", lambda _, *asked: slow(*asked))
    assert PolicyPlanner(policy)._decode(policy, search, start.placement, 5) == {}


def test_a_graph_is_constructed_before_it_is_searched() -> None:
    problem = giph(3).with_objective("latency")
    planner = PolicyPlanner(evaluations=120, baseline="heft")
    stats = planner(problem).stats
    # Of 120 evaluations HEFT has one, the greedy placement and the rule's two, samples a quarter
    # of those left, parts that are drawn anew half of the rest.
    assert (stats["baseline_evaluations"], stats["best_of_k_evaluations"]) == (1, 2 + 29)
    assert stats["policy"] == stats["network"] == "dispatch-latency.safetensors"
    # Devices run what arrives first: there is no order to search for.
    assert 100 < stats["evaluations"] <= 120 and stats["search"] == "macro_search"
    assert stats["again_value_s"] <= stats["best_of_k_value_s"]
    assert replace(planner, k=5)(problem).stats["best_of_k_evaluations"] == 2 + 5
    alone = replace(planner, search=False)(problem).stats
    assert alone["best_of_k_evaluations"] == 2 + 32 and "search" not in alone
    period = random_problem(1, 40, 3)
    foreseen = planner(period).stats  # the two placements that promise the least
    assert foreseen["network"] == "waits-period.safetensors"
    assert foreseen["best_of_k_evaluations"] == 2 and foreseen["search"] == "macro_search"
    assert replace(planner, foresight="untrained")(period).stats["network"] == "none"
    five = PolicyPlanner(evaluations=5)(period).stats  # one of them the fastest device's
    assert (five["evaluations"], five["best_of_k_evaluations"]) == (5, 5)
    few = PolicyPlanner(evaluations=6)(problem).stats  # no search comes to anything
    assert few["best_of_k_evaluations"] == 6 and "search" not in few
    assert "search" not in PolicyPlanner(seconds=0.2, k=3)(problem).stats
    new = replace(planner, policy="untrained")(problem).stats
    assert new["policy"] == "untrained" and new["best_of_k_evaluations"] == 1 + 29
    assert new["network"] == "none"
    with pytest.raises(PolicyError, match="k = -1 must be at least 0"):
        replace(planner, k=-1)


@pytest.mark.parametrize("objective", ["latency", "period", "max_load"])
def test_the_search_goes_on_from_the_best(objective: Any) -> None:
    """Within its budget, the same again, and at the value that the simulator says."""
    problem = chain(np.random.default_rng(0).random((20, 3)), latency_s=0.01)
    case = problem.with_objective(objective)
    planner = PolicyPlanner("untrained", evaluations=1500, baseline="single_device")
    answer = planner(case)
    assert answer.value_s == pytest.approx(value_of(case, answer))
    assert answer.value_s < 0.95 * answer.stats["baseline_value_s"]
    assert answer.value_s <= answer.stats["best_of_k_value_s"]
    assert answer.stats["evaluations"] <= 1500
    again = planner(case)
    assert np.array_equal(answer.placement, again.placement)


def test_samples_of_two_seeds_have_nothing_in_common() -> None:
    drawn = [set(draws(seed, 64)) for seed in range(10)]
    assert len(set.union(*drawn)) == 640


def test_one_evaluation_is_for_the_decode_that_promises_the_most() -> None:
    net = TrainedPolicy.load(RELEASED).net
    gains = []
    for name in ("butterfly", "towers", "layered", "lstm_grid"):
        problem = families()[name](3).with_objective("latency")
        answer = PolicyPlanner(evaluations=1)(problem)
        assert answer.stats["evaluations"] == answer.stats["best_of_k_evaluations"] == 1
        promises, drawn = [], [*draws(0, PROMISES)]
        for backward in (False, True):
            episode = Dispatcher(problem, backward=backward)
            for seed in (None, *drawn[backward::2]):
                episode.construct(net.weights(episode.played), net.config.finish_weight, seed)
                promises.append((episode.state.placed.finish_s.max(), episode.value_s()))
        assert answer.stats["promised_s"] <= min(promises)[0]
        if answer.stats["promised_s"] == min(promises)[0]:  # otherwise it is the rule's
            assert answer.value_s == min(promises)[1]
        gains.append(answer.value_s / promises[0][1])
    assert np.exp(np.mean(np.log(gains))) < 0.97  # of one decode
    dear = families()["u_net"](3).with_objective("latency")  # transfers are
    assert len(set(PolicyPlanner(evaluations=1)(dear).placement.tolist())) == 1


@pytest.mark.parametrize("formulation", ["sequential", "one_shot", "giph:formulation"])
@pytest.mark.usefixtures("published")
def test_what_a_policy_needs_is_loaded_before_the_clock_runs(formulation, monkeypatch) -> None:
    """It does all of its work once on the smallest problem: once per process and formulation."""
    seen: list[str] = []

    class Recorded(Search):
        def __init__(self, problem: Problem, *budget: Any) -> None:
            seen.append(f"begin {problem.graph.name}")
            super().__init__(problem, *budget)

        def solution(self, *args: Any, **stats: Any) -> Any:
            seen.append(f"end {self.problem.graph.name}")
            return super().solution(*args, **stats)

    monkeypatch.setattr("agents.planner.Search", Recorded)
    _warm_up.cache_clear()
    policy = untrained(formulation)
    planner = PolicyPlanner(policy, k=2, search=False, seconds=1, baseline="single_device")
    problem = chain([[1, 2]] * 3)
    mine = [f"begin {problem.graph.name}", f"end {problem.graph.name}"]
    planner(problem)
    planner(problem)
    assert seen == ["begin two", "end two", *mine, *mine]


@pytest.mark.usefixtures("published")
def test_a_policy_that_improves_placements_plays_from_the_baseline() -> None:
    problem = chain(np.random.default_rng(0).random((12, 3)), latency_s=0.01)
    policy = untrained("giph:formulation")
    answer = PolicyPlanner(policy, search=False, baseline="round_robin")(problem)
    assert answer.value_s < answer.stats["baseline_value_s"]
    # The start of its episode, and two moves of each group.
    assert answer.stats["evaluations"] == answer.stats["baseline_evaluations"] + 1 + 2 * 12
    few = PolicyPlanner(policy, search=False, evaluations=20)(problem)
    assert few.stats["evaluations"] <= 20
    with pytest.raises(PolicyError, match=r"a giph:formulation policy improves.*PolicyPlanner"):
        policy.place(problem)


def test_networks_that_cannot_be() -> None:
    with pytest.raises(PolicyError, match="encoder 'other' is unknown; use one of"):
        NetworkConfig(encoder="other")
    with pytest.raises(PolicyError, match="hidden = 6 must be a positive multiple of 4"):
        NetworkConfig(hidden=6)
    for changes in (0.0, 4e-300, -1.0, float("nan"), float("inf")):
        with pytest.raises(PolicyError, match=f"changes = {changes} must be 1e-06 to 1e.09"):
            NetworkConfig(changes=changes)
    with pytest.raises(PolicyError, match="attention"):
        NetworkConfig(attention=4096)
    for share in (0.0, 1e-30, 1.0, float("nan")):
        with pytest.raises(PolicyError, match=f"max_change = {share} must be 1e-06 to 0.999999"):
            NetworkConfig(max_change=share)
