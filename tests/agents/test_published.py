"""Published methods, as examples: they learn, and lack the defects of the released code."""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env as gymnasium_check
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO

from agents.encoder import NetworkConfig, PolicyError, sample
from agents.planner import PolicyPlanner
from agents.store import GraphStore
from agents.trained import TrainedPolicy, make_net
from agents.training import TrainConfig, train
from agents.training.callbacks import Row
from agents.training.expert import demonstrations
from envs.problem_set import ProblemSet, find
from envs.rewards import INFEASIBLE_REWARD, log_speedups
from envs.sequential import SequentialDevicePlacementEnv
from placement.planners import load as planner
from placement.problem import Problem
from placement.search.coarsen import grouped
from placement.simulator import score
from placement.workloads.synthetic import families, giph
from tests.envs.test_envs import chain, stay_in_their_space
from tests.problems import DIAMOND, graph_of, random_problem, small_problem

METHODS = ("placeto", "gdp", "post", "giph", "hsdag", "doppler", "hdp")
EXAMPLES = Path(__file__).parents[2] / "examples" / "published"
SMALL = NetworkConfig(hidden=8, layers=1)


def drawn(compute_s: Any, edges: Any, *, latency_s: float = 0.0, size: int = 10) -> Problem:
    """Every operator has one tensor; a byte takes 10 ms."""
    link = {"link": (latency_s, 100.0), "objective": "latency"}
    return small_problem(compute_s, edges, tensor_bytes=size, **link)


def identity() -> Problem:
    """Operator i is fast on device i mod 2 only, odd ones take twice as long, nothing is sent:
    6 s at best, 33 s on the best single device.
    """
    parity = np.arange(6)[:, None] % 2
    return drawn(np.where(parity == np.arange(2), 1.0, 9.0) * (1.0 + parity), [])


pytestmark = pytest.mark.usefixtures("published")


def configured(name: str) -> TrainConfig:
    return import_module(name).CONFIG


def small(config: TrainConfig, hidden: int = 8, **changes: Any) -> TrainConfig:
    """The method with a narrow network."""
    return replace(config, network=replace(config.network, hidden=hidden), **changes)


LEARNS = {"placeto": 1200, "gdp": 500, "post": 400, "giph": 1000}  # steps that suffice
LEARNS |= {"hsdag": 500, "doppler": 100, "hdp": 1600}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_where_operators_belong(name: str, tmp_path: Path) -> None:
    rates = {"learning_rate": 1e-2, "last_learning_rate": 1e-3}
    config = small(configured(name), 16, total_steps=LEARNS[name], num_checks=2, num_envs=4)
    config, problem, rows = replace(config, **rates), identity(), list[Row]()
    teacher = getattr(import_module(name), "taught", None)
    solutions = None if teacher is None else [teacher(problem)]
    some = {"solutions": solutions, "callback": rows.append, "out_dir": tmp_path}
    trained = train([problem], config=config, **some)
    again = TrainedPolicy.load(tmp_path / "policy.safetensors", allow=[config.formulation])
    start = planner("round_robin")(giph(0)).value_s
    assert PolicyPlanner(again, k=2, search=False, baseline="round_robin")(giph(0)).value_s <= start
    if name == "hdp":
        # Devices are learned within seconds. Not so the grouper: until it is, one cluster is the
        # likeliest of all groups, so that what is decoded greedily is one device.
        sampled = [row["reward_mean"] for row in rows[1:]]
        assert np.mean(sampled[-9:]) > np.mean(sampled[:9]) + 0.2
        return
    # A greedy decode (or a walk) at the optimum counts as 33 / 6.
    assert trained.card["greedy_speedup"] > 3.0


def test_configurations_are_of_the_published_kind() -> None:
    configs = {name: configured(name) for name in METHODS}
    assert {n for n, c in configs.items() if not c.kind.builds} == {"giph", "placeto"}
    # A reward that comes at the end only is not discounted (DOPPLER: 0.99 over 229 operators).
    for name, config in configs.items():
        assert config.gamma == 1.0 or name == "giph"
        assert config.cold and config.last_learning_rate < config.learning_rate
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*METHODS, "run"}


# -- the parts


def test_a_sweep_visits_every_group_once_and_rewards_every_change() -> None:
    # Park: the last operator is never placed; Placeto: each exactly once per sweep.
    problem = drawn([[1, 2], [4, 1], [1, 1]], [(0, 1), (1, 2)], size=1)
    starts = [np.zeros(3, np.int32)]
    rules = import_module("placeto").SweepRules(ProblemSet.build([problem]), 1, starts)
    rules.start(np.array([0]), np.array([0]))
    moved, rewards, before = [], [], score(problem, np.zeros(3, np.int32))[0]
    for device in (0, 1, 1):
        mask = rules.masks()[0].reshape(3, 2)
        (group,) = np.flatnonzero(mask.any(axis=1))
        assert mask[group].all()  # it may stay
        assert rules.masks()[0].sum() == 2  # it alone
        earned, done = rules.act(np.array([2 * group + device]))
        moved.append(int(group))
        now = score(problem, np.where(np.isin(np.arange(3), moved[1:]), 1, 0).astype(np.int32))[0]
        # Faster is better: the sign of the reward is that of the improvement.
        assert earned[0] == pytest.approx(np.log(before / now))
        before = now
        rewards.append(earned[0])
    assert moved == [0, 1, 2] and done.all()
    assert rewards[1] > 0
    rules.start(np.array([0]), np.array([0]))
    rules.act(np.array([2 * 1 + 1]))  # group 1, but it is the turn of group 0: changes nothing
    assert rules.choices[0].tolist() == [0, 0, 0]


def test_random_starts_are_legal_and_differ() -> None:
    problem = giph(3)
    some, starts = ProblemSet.build([problem]), [planner("heft")(problem).placement]
    rules = import_module("giph").MoveRules(some, 8, starts, random_start=True)
    rules.start(np.arange(8), np.zeros(8, int), np.random.default_rng(0))
    assert np.isfinite(rules.value_s).all()
    assert len({row.tobytes() for row in rules.choices}) == 8


def test_clusters_are_formed_and_placed() -> None:
    # 0 -> 1 -> 3, 0 -> 2 -> 3; 3's heaviest producer is 2, which sends 20 bytes.
    base = drawn(np.array([[1.0, 2], [3, 1], [np.inf, 1], [1, 1]]), [])
    problem = replace(base, graph=graph_of(4, DIAMOND, [5, 10, 20, 1]))
    hdp = import_module("hdp")
    assert hdp.heaviest_producer(problem).tolist() == [-1, 0, 0, 2]
    rules = hdp.ClusterRules(ProblemSet.build([problem]), 1, clusters=0)
    rules.start(np.array([0]), np.array([0]))
    mask = rules.observe()["mask"][0]
    assert mask.tolist() == [[1, 0], [1, 1], [1, 1], [1, 1]]  # the first has nobody to join
    rewards, done = rules.act(np.array([[0, 1, 0, 1]]))
    assert rewards.tolist() == [0] and not done.any()
    assert rules.observe()["cluster"].tolist() == [[0, 0, 2, 2]]
    # Clusters 0 and 2 exist. Operator 2 cannot run on device 0, its cluster's other can.
    assert rules.observe()["mask"][0].tolist() == [[1, 1], [1, 0], [1, 1], [1, 0]]
    rewards, done = rules.act(np.array([[1, 0, 0, 0]]))
    assert done.all() and rules.choices.tolist() == [[1, 1, 1, 0]]
    assert rules.value_s[0] == score(problem, [1, 1, 1, 0])[0]
    # Assigned to clusters, as HDP does: any group to any of them.
    rules = hdp.ClusterRules(ProblemSet.build([problem]), 1, clusters=3)
    rules.start(np.array([0]), np.array([0]))
    assert rules.observe()["mask"].tolist() == [[[1, 1, 1]] * 4]
    rules.act(np.array([[2, 0, 0, 2]]))
    assert rules.observe()["cluster"].tolist() == [[2, 0, 0, 2]]
    rules.act(np.array([[1, 0, 0, 0]]))
    assert rules.choices.tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize("name", ["hsdag", "hdp"])
def test_the_clusters_of_a_policy_are_padded_away(name: str) -> None:
    problems = [giph(0), giph(1)]
    chosen = ProblemSet.build(problems)
    store = GraphStore(problems)
    torch.manual_seed(0)
    formulation = import_module(name).formulation
    net, rules = make_net(SMALL, formulation.name), formulation.rules(chosen, 2)
    rules.start(np.arange(2), np.arange(2))
    ids = torch.arange(2)
    for _ in range(2):
        obs = {k: torch.from_numpy(v) for k, v in rules.observe().items()}
        logits, values, real = net.evaluate(store, ids, net.encode(store, ids), ids, obs)
        assert torch.isfinite(values).all() and real is not None and real.any(dim=1).all()
        taken = sample(logits)
        assert obs["mask"].bool().gather(2, taken[:, :, None]).all()
        # Alone, without padding, the same problem has the same probabilities.
        alone, one = GraphStore([problems[0]]), torch.tensor([0])
        count = problems[0].graph.num_groups
        mine = {k: v[:1] if k == "problem" else v[:1, :count] for k, v in obs.items()}
        again = net.evaluate(alone, one, net.encode(alone, one), one, mine)[0]
        torch.testing.assert_close(again[0], logits[0, :count], atol=1e-4, rtol=1e-4)
        rules.decide(taken.numpy())
    assert np.isfinite(rules.problems.seconds(np.arange(2), rules.choices)).all()


def test_grouping_operators_changes_nothing_but_what_moves_together() -> None:
    problem = families()["inception"](0)
    few = grouped(problem, 12)
    assert 1 < few.graph.num_groups <= 12
    rng = np.random.default_rng(0)
    choice = rng.integers(0, few.num_devices, few.graph.num_groups)
    placement = choice[few.graph.group].astype(np.int32)
    assert score(few, placement)[0] == score(problem, placement)[0]
    assert import_module("post").prepared(problem).graph.num_groups <= 100


def test_cold_policies_do_not_see_warm_starts() -> None:
    problem = identity()
    config = TrainConfig(64, "one_shot", cold=True, num_envs=4, network=SMALL)
    trained = train([problem], config=config, baseline=planner("heft"))
    starts = (planner("heft")(problem).placement, np.zeros(6, np.int32), None)
    placements = [trained.place(problem, warm).tolist() for warm in starts]
    assert placements[0] == placements[1] == placements[2]


def test_clusters_are_not_imitated() -> None:
    chosen = ProblemSet.build([identity()])
    with pytest.raises(PolicyError, match="a hdp:formulation policy does not choose devices"):
        demonstrations(chosen, [np.zeros(6, np.int32)], "hdp:formulation")


def test_a_bad_placement_is_no_elite_for_being_alone() -> None:
    # Graph 0: ten placements, the best is row 4. Graphs 1 to 5 have two each: one share of ten.
    ids = np.array([0] * 10 + [1, 2, 3, 4, 5] * 2)
    returns = np.array([0, 1, 2, 3, 9, 5, 6, 7, 8, 4, -5, -4, -3, -2, -1, -9, 2, -8, -7, -6])
    elites = import_module("post").elites
    assert elites(ids, returns, 0.1).tolist() == [16, 4]
    assert elites(ids[10:15], returns[10:15], 0.1).tolist() == [4]  # few of all


@pytest.mark.parametrize("name", ["giph", "placeto", "hdp", "hsdag", "doppler"])
def test_environments_pass_the_checkers_and_stay_in_their_space(name: str) -> None:
    kind = find(import_module(name).formulation.env, "environment")
    for objective in ("latency", "period", "max_load"):
        stay_in_their_space(kind, objective, 4)
    with warnings.catch_warnings(action="error"):
        gymnasium_check(kind(observe="graph"), skip_render_check=True)


@pytest.mark.parametrize("name", ["giph", "placeto"])
def test_actions_outside_the_space_change_nothing(name: str) -> None:
    env: Any = find(import_module(name).formulation.env, "environment")()
    _, info = env.reset(seed=0)
    env.step(env.action_space.sample(info["action_mask"]))
    for action in (-1, env.action_space.n, 10**6):
        before = env.rules.value_s[0], env.rules.choices.copy()
        _, reward, *_ = env.step(np.int64(action))
        assert reward == 0.0
        assert before[0] == env.rules.value_s[0] and np.array_equal(before[1], env.rules.choices)


def test_what_a_move_is_described_by() -> None:
    """Two operators in a chain, both on device 0: 2 and 3 s there, 1 and 5 s on device 1."""
    giph = import_module("giph")
    problem = chain([[2, 1], [3, 5]], latency_s=0.5)
    env = giph.MoveEnv([problem], starts=[np.zeros(2, np.int32)])
    obs, _ = env.reset(seed=0)
    named = dict(zip(giph.PAIR_FEATURES, obs["pairs"].transpose(2, 0, 1), strict=True))
    # The first goes to device 1, which then works 1 s; device 0 keeps 3 of its 5.
    after = named["seconds of work of the device after the move, over the largest now"]
    assert after == pytest.approx(np.array([[1.0, 0.2], [1.0, 1.0]]))
    left = named["seconds of work of the device left after the move, over the largest now"]
    assert left == pytest.approx(np.array([[1.0, 0.6], [1.0, 0.4]]))
    saved = named["seconds of transfers that the move saves, over the mean work of a device"]
    assert saved == pytest.approx(np.array([[0.0, -0.5 / 2.5]] * 2))  # the tensor must be sent
    begins = named["when the group begins, over the end of all"]
    assert begins == pytest.approx(np.array([[0.0, 0.0], [0.4, 0.4]]))


def test_moves_by_hand() -> None:
    problem = chain([[2, 1], [2, 4]])  # [0, 0] takes 4, [1, 0] 3.5, [1, 1] 5
    env = import_module("giph").MoveEnv([problem], starts=[np.zeros(2, np.int32)])
    env.reset(seed=0)
    assert env.action_masks().tolist() == [False, True, False, True]
    _, reward, over, _, _ = env.step(0 * 2 + 1)
    assert (reward, over) == (pytest.approx(np.log(4 / 3.5)), False)
    _, reward, over, _, _ = env.step(1 * 2 + 1)
    assert (reward, over) == (pytest.approx(np.log(3.5 / 5)), False)
    for action in (2, 3):
        *_, over, _, info = env.step(action)
    assert over and info["value_s"] == pytest.approx(3.5) and info["placement"] == (1, 0)


def test_a_walk_pays_for_no_way_round() -> None:
    """Out of memory and back, or slow by steps and fast at once: the sum is of the two ends."""
    seconds = [[1.0, 1e3], [1.0, 1e2], [1.0, 10.0]]
    for memory_bytes, way in ((250, [1, 3, 5, 4, 2, 0]), (10**9, [1, 3, 5, 0, 2, 4])):
        problem = chain(seconds, memory_bytes=memory_bytes)  # 100 bytes each
        problems = ProblemSet.build([problem])
        start = np.array([0, 0, 1], np.int32)
        rules = import_module("giph").MoveRules(problems, 1, [start])
        rules.start(np.array([0]), np.array([0]))
        values, earned = [score(problem, start)[0]], []
        now = start.copy()
        for action in way:
            group, now[group] = action // 2, action % 2
            earned.append(float(rules.act(np.array([action]))[0][0]))
            values.append(score(problem, now)[0])
            ends = log_speedups(np.array([values[0], values[-1]]), problems.reference_s[0])
            assert sum(earned) == pytest.approx(ends[1] - ends[0], abs=1e-6)
        assert np.isinf(values).any() == (memory_bytes == 250)


def test_walks_with_another_evaluator() -> None:
    def count(problem: Problem, placements: np.ndarray) -> np.ndarray:
        """As many seconds as operators on device 0."""
        return 1.0 + (placements == 0).sum(axis=1)

    problem = chain([[1, 1]] * 3)
    start = np.zeros(3, np.int32)
    env = import_module("giph").MoveEnv([problem], starts=[start], evaluator=count, reference_s=[1])
    env.reset(seed=0)
    assert env.step(1)[1] == pytest.approx(np.log(4 / 3))
    assert env.rules.num_evaluations == 2


def test_ready_groups_are_offered_what_is_ready() -> None:
    """op0 and op1 feed op2; op2 is ready when both are placed. Two kinds of device."""
    lone = chain([[1, 2]] * 3)
    problem = Problem(graph_of(3, [(0, 2), (1, 2)], 1), lone.cluster, lone.profile, "latency")
    env = import_module("doppler").SelectEnv([problem], window=4)
    obs, _ = env.reset(seed=0)
    assert obs["mask"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert obs["group"].tolist() == [0, 1, 0, 0]
    obs = env.step(1 * 2 + 0)[0]  # b on device 0
    assert obs["mask"].tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert obs["group"][0] == 0
    obs, reward, over, _, _ = env.step(0 * 2 + 1)  # a on device 1
    assert (obs["group"][0], reward, over) == (2, 0.0, False)
    _, reward, over, _, info = env.step(0)
    assert over
    assert info["placement"] == (1, 0, 0)
    # a ends at 2 on device 1, is sent in 0.5, c takes 1: 3.5; the best single device takes 3.
    assert reward == pytest.approx(np.log(3 / 3.5))
    env.reset(seed=0)
    assert env.step(2 * 2)[1:3] == (INFEASIBLE_REWARD, True)  # c is not ready


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_picking_in_any_order_sees_what_the_sequential_one_does(seed: int) -> None:
    """With a window of one it is the sequential environment, where nothing waits in a circle."""
    problem = random_problem(seed, unsupported=True)
    one = import_module("doppler").SelectEnv([problem], window=1)
    other = SequentialDevicePlacementEnv([problem])
    rng = np.random.default_rng(seed)
    (a, _), (b, _) = one.reset(seed=0), other.reset(seed=0)
    for _ in range(problem.graph.num_groups):
        assert a["group"][0] == b["group"][0]
        assert np.array_equal(a["devices"][0], b["devices"])
        assert np.array_equal(a["mask"][0], b["mask"])
        action = int(rng.choice(np.flatnonzero(b["mask"])))
        (a, r, over, _, _), (b, r2, over2, _, _) = one.step(action), other.step(action)
        assert (r, over) == (r2, over2)
    assert over


@pytest.mark.parametrize("sweep", [False, True])
def test_a_walk_that_is_over_evaluates_nothing(sweep: bool) -> None:
    problems = ProblemSet.build([chain([[1, 2]] * n) for n in (2, 7)])
    kind = import_module("placeto").SweepRules if sweep else import_module("giph").MoveRules
    rules = kind(problems, 2, [np.zeros(n, np.int32) for n in (2, 7)])
    rules.start(np.arange(2), np.arange(2))
    moves, over = (7, 2) if sweep else (14, 4), []
    for _ in range(moves[0]):
        over.append(rules.act(rules.masks().argmax(axis=1))[1].tolist())
        assert all(rules.observation_space[k].contains(v[0]) for k, v in rules.observe().items())
    assert over == [[i >= moves[1], i >= moves[0]] for i in range(1, moves[0] + 1)]
    assert rules.num_evaluations == 2 + sum(moves)


def test_a_pick_is_a_group_then_its_device() -> None:
    """The probabilities of all pairs are those of the groups times those of the devices."""
    chosen = ProblemSet.build([random_problem(s, 8, 3, unsupported=True) for s in range(4)])
    rules = import_module("doppler").SelectRules(chosen, 4, window=5)
    rules.start(np.arange(4), np.arange(4))
    net = make_net(NetworkConfig(hidden=16, layers=2), "doppler:formulation")
    store = GraphStore(chosen.problems)
    obs = {k: torch.from_numpy(v) for k, v in rules.observe().items()}
    ids = torch.arange(4)
    with torch.no_grad():
        logits = net.evaluate(store, ids, net.encode(store, ids), ids, obs)[0]
    p = logits.exp().reshape(obs["mask"].shape)
    assert p.sum(dim=(1, 2)).numpy() == pytest.approx(np.ones(4), abs=1e-5)
    assert (p[obs["mask"] == 0] == 0).all()
    # Untrained, of those that are ready the first is the most likely.
    ready = obs["mask"].bool().any(dim=2)
    assert (p.sum(dim=2).argmax(dim=1) == 0).all() and ready[:, 0].all()


# -- what the released code does wrong, and ours does not


def test_a_reward_does_not_depend_on_what_was_tried_before() -> None:
    """DOPPLER subtracts the mean of all episodes so far, this one included: the first earns 0."""
    rules = import_module("doppler").SelectRules(ProblemSet.build([identity()], [6.0]), 1)

    def earned(devices: list[int]) -> float:
        rules.start(np.array([0]), np.array([0]))
        for device in devices:
            rules.observe()
            rewards, _ = rules.act(np.array([device]))
        return float(rewards[0])

    first = earned([0] * 6)
    earned([0, 1, 0, 1, 0, 1])
    assert earned([0] * 6) == first != 0


def test_the_learning_rate_falls_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """DOPPLER sets ``optimizer.lr``, an attribute that nobody reads."""
    used = []
    step = torch.optim.Adam.step

    def recorded(self: torch.optim.Adam, *args: Any, **kwargs: Any) -> Any:
        used.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", recorded)
    options: Any = {"num_envs": 4, "steps_per_env": 8, "network": SMALL, "cold": True}
    rates = {"learning_rate": 1e-3, "last_learning_rate": 1e-5}
    train([identity()], config=TrainConfig(320, "one_shot", epochs=1, **rates, **options))
    once = len(used)
    assert used[0] > 9e-4 and used[-1] < 2e-4 and (np.diff(used) <= 0).all()
    # HSDAG names the epochs and the clipping of PPO, and uses neither.
    train([identity()], config=TrainConfig(320, "one_shot", epochs=3, **rates, **options))
    assert len(used) - once == 3 * once


def test_an_operator_begins_when_its_inputs_are_there() -> None:
    """DOPPLER's environment takes the sum of work on a device for the time that it is free."""
    # d0  A          A ends at 1 and takes 10 s to send; d1 has no work before B, but waits.
    # d1  ..........B
    problem = drawn([[1, 1], [1, 1], [1, 1]], [(0, 1), (1, 2)], size=1000)
    rules = import_module("doppler").SelectRules(ProblemSet.build([problem]), 1)
    rules.start(np.array([0]), np.array([0]))
    for device in (0, 1):
        rules.observe()
        rules.act(np.array([device]))
    seen = rules.observe()["devices"][0, 0, :, 1] * 3  # finish over the critical path of 3 s
    assert seen.tolist() == pytest.approx([1 + 10 + 1 + 10 + 1, 1 + 10 + 1 + 1])


PARTS = {"hdp": ("group.", "attention", "score"), "gdp": ("encoder.attention",)}
PARTS |= {"hsdag": ("group.", "encoder.layers"), "doppler": ("select.", "score")}


@pytest.mark.parametrize("name", PARTS)
def test_every_part_of_a_network_is_trained(name: str) -> None:
    """The hierarchical placer beside GiPH never gives its attention to the optimizer."""
    config = small(configured(name), total_steps=128, num_envs=4, num_checks=1, learning_rate=1e-2)
    before, after, learn = dict[str, torch.Tensor](), dict[str, torch.Tensor](), PPO.learn

    def looked(self: PPO, *args: Any, **kwargs: Any) -> Any:
        before.update({k: v.clone() for k, v in self.policy.state_dict().items()})
        done = learn(self, *args, **kwargs)
        after.update(self.policy.state_dict())
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPO, "learn", looked)
        train([giph(0)], config=config)
    mine = [k for k in before if any(k.startswith(f"net.{p}") for p in PARTS[name])]
    assert len(mine) > 3
    still = [k for k in mine if torch.equal(before[k], after[k]) and "in_proj_bias" not in k]
    assert not still


def test_the_policy_that_is_kept_is_the_best_one() -> None:
    """HSDAG keeps a reference to the weights that it goes on changing."""
    problem = identity()
    options: Any = {"cold": True, "num_envs": 4, "steps_per_env": 16, "network": SMALL}
    config = TrainConfig(1500, "one_shot", learning_rate=0.05, num_checks=8, **options)
    trained = train([problem], config=config, reference_s=[6.0])
    value = score(problem, trained.place(problem)[0])[0]
    assert 6.0 / value == pytest.approx(trained.card["greedy_speedup"])
