"""Published methods as configurations: they learn, and lack the defects of the released code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import DictConfig
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from agents.algorithms import elites
from agents.app import make_planner
from agents.callbacks import Row
from agents.encoder import NetworkConfig, PolicyError, sample
from agents.expert import demonstrations
from agents.planner import PolicyPlanner
from agents.store import GraphStore
from agents.trained import TrainedPolicy, make_net
from agents.training import TrainConfig, train
from envs.group_place import GroupPlaceRules, heaviest_producer
from envs.problems import ProblemSet
from envs.refine import RefineRules
from envs.select_place import SelectPlaceRules
from placement.graph import OpGraph
from placement.planners import load as planner
from placement.problem import Problem
from placement.search.coarsen import grouped
from placement.simulator import score
from placement.workloads.synthetic import families, giph
from tests.problems import small_problem

METHODS = ("placeto", "gdp", "post", "giph", "hsdag", "doppler", "hdp")
CONF = Path(__file__).parents[2] / "conf"
SMALL = NetworkConfig(hidden=8, layers=1)


def drawn(
    compute_s: Any, edges: list[tuple[int, int]], *, latency_s: float = 0.0, size: int = 10
) -> Problem:
    """Every operator has one tensor; a byte takes 10 ms."""
    link = {"link": (latency_s, 100.0), "objective": "latency"}
    return small_problem(compute_s, edges, tensor_bytes=size, **link)


def identity() -> Problem:
    """Operator i is fast on device i mod 2 only, odd ones take twice as long, nothing is sent:
    6 s at best, 33 s on the best single device.
    """
    parity = np.arange(6)[:, None] % 2
    return drawn(np.where(parity == np.arange(2), 1.0, 9.0) * (1.0 + parity), [])


@pytest.fixture
def hydra_conf() -> Iterator[None]:
    with initialize_config_module("conf", version_base="1.3"):
        yield


def configured(name: str, *words: str) -> tuple[DictConfig, TrainConfig]:
    cfg = compose("train", [f"experiment={name}", *words])
    return cfg, instantiate(cfg.training, _convert_="all")


LEARNS = {  # environment steps that suffice
    "placeto": 1200,
    "gdp": 500,
    "post": 400,
    "giph": 1000,
    "hsdag": 500,
    "doppler": 100,
    "hdp": 1600,
}


@pytest.mark.usefixtures("hydra_conf")
@pytest.mark.parametrize("name", METHODS)
def test_every_method_learns_where_operators_belong(name: str, tmp_path: Path) -> None:
    rates = ["training.learning_rate=1e-2", "training.last_learning_rate=1e-3"]
    small = [f"training.total_steps={LEARNS[name]}", "training.network.hidden=16"]
    cfg, config = configured(name, *rates, *small)
    problem = identity()
    solutions = None
    if cfg.warm_start == "imitation":
        solutions = [make_planner(cfg.expert)(problem).placement]
    rows: list[Row] = []
    config = replace(config, num_checks=2, num_envs=4)
    trained = train(
        [problem], config=config, solutions=solutions, callback=rows.append, out_dir=tmp_path
    )
    again = TrainedPolicy.load(tmp_path / "policy.safetensors")
    start = planner("round_robin")(giph(0)).value_s
    assert PolicyPlanner(again, k=2, steps=9, baseline="round_robin")(giph(0)).value_s <= start
    if name == "hdp":
        # Devices are learned within seconds. Not so the grouper: until it is, one cluster is the
        # likeliest of all groups, so that what is decoded greedily is one device.
        sampled = [row["reward_mean"] for row in rows[1:]]
        assert np.mean(sampled[-9:]) > np.mean(sampled[:9]) + 0.2
        return
    # A greedy decode (or a walk) at the optimum counts as 33 / 6.
    assert trained.card["greedy_speedup"] > 3.0


@pytest.mark.usefixtures("hydra_conf")
def test_configurations_are_of_the_published_kind() -> None:
    configs = {name: configured(name)[1] for name in METHODS}
    assert {n: c.formulation for n, c in configs.items()} == {
        "placeto": "sweep",
        "gdp": "one_shot",
        "post": "one_shot",
        "giph": "refine",
        "hsdag": "group_place",
        "doppler": "select_place",
        "hdp": "group_place",
    }
    # A reward that comes at the end only is not discounted (DOPPLER: 0.99 over 229 operators).
    for name, config in configs.items():
        assert config.resolved().gamma == 1.0 or config.formulation == "refine", name
        assert config.cold and config.last_learning_rate < config.learning_rate
    assert {path.stem for path in (CONF / "experiment").glob("*.yaml")} >= set(METHODS)


# -- the parts


def test_a_sweep_visits_every_group_once_and_rewards_every_change() -> None:
    # Park: the last operator is never placed; Placeto: each exactly once per sweep.
    problem = drawn([[1, 2], [4, 1], [1, 1]], [(0, 1), (1, 2)], size=1)
    rules = RefineRules(
        ProblemSet.build([problem]), 1, [np.zeros(3, np.int32)], best_so_far=False, sweep=True
    )
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
    rules = RefineRules(
        ProblemSet.build([problem]), 8, [planner("heft")(problem).placement], random_start=True
    )
    rules.start(np.arange(8), np.zeros(8, int), np.random.default_rng(0))
    assert np.isfinite(rules.value_s).all()
    assert len({row.tobytes() for row in rules.choices}) == 8


def test_clusters_are_formed_and_placed() -> None:
    # 0 -> 1 -> 3, 0 -> 2 -> 3; 3's heaviest producer is 2, which sends 20 bytes.
    graph = OpGraph.build(
        "diamond", list("abcd"), range(4), [5, 10, 20, 1], [(0, 1), (0, 2), (1, 3), (2, 3)]
    )
    base = drawn(np.array([[1.0, 2], [3, 1], [np.inf, 1], [1, 1]]), [])
    problem = replace(base, graph=graph)
    assert heaviest_producer(problem).tolist() == [-1, 0, 0, 2]
    rules = GroupPlaceRules(ProblemSet.build([problem]), 1)
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
    rules = GroupPlaceRules(ProblemSet.build([problem]), 1, clusters=3)
    rules.start(np.array([0]), np.array([0]))
    assert rules.observe()["mask"].tolist() == [[[1, 1, 1]] * 4]
    rules.act(np.array([[2, 0, 0, 2]]))
    assert rules.observe()["cluster"].tolist() == [[2, 0, 0, 2]]
    rules.act(np.array([[1, 0, 0, 0]]))
    assert rules.choices.tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize("clusters", [0, 3])
def test_the_clusters_of_a_policy_are_padded_away(clusters: int) -> None:
    problems = [giph(0), giph(1)]
    chosen = ProblemSet.build(problems)
    store = GraphStore(problems)
    torch.manual_seed(0)
    net = make_net(replace(SMALL, clusters=clusters, attention=1), "group_place")
    rules = GroupPlaceRules(chosen, 2, clusters)
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
    config = TrainConfig(64, "one_shot", groups=12, cold=True, num_envs=4, network=SMALL)
    trained = train([problem], config=config)
    for placement in trained.place(problem, num_samples=3):
        few.check_placement(placement)


def test_cold_policies_do_not_see_warm_starts() -> None:
    problem = identity()
    config = TrainConfig(64, "one_shot", cold=True, num_envs=4, network=SMALL)
    trained = train([problem], config=config, baseline=planner("heft"))
    starts = (planner("heft")(problem).placement, np.zeros(6, np.int32), None)
    placements = [trained.place(problem, warm).tolist() for warm in starts]
    assert placements[0] == placements[1] == placements[2]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"elite": 0.1}, "elite = 0.1 must be a share.*unless the formulation is one_shot"),
        ({"elite": 1.0, "formulation": "one_shot"}, "elite = 1.0 must be a share"),
        ({"groups": 9, "formulation": "refine"}, "groups = 9 must be 0 unless.*it is refine"),
    ],
)
def test_options_that_do_not_go_together(wrong: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        TrainConfig(**wrong)


def test_grouping_is_not_imitated() -> None:
    chosen = ProblemSet.build([identity()])
    with pytest.raises(PolicyError, match="a group_place policy does not place one group"):
        demonstrations(chosen, [np.zeros(6, np.int32)], "group_place")


def test_a_bad_placement_is_no_elite_for_being_alone() -> None:
    # Graph 0: ten placements, the best is row 4. Graphs 1 to 5 have two each: one share of ten.
    ids = np.array([0] * 10 + [1, 2, 3, 4, 5] * 2)
    returns = np.array([0, 1, 2, 3, 9, 5, 6, 7, 8, 4, -5, -4, -3, -2, -1, -9, 2, -8, -7, -6])
    assert elites(ids, returns, 0.1).tolist() == [16, 4]
    assert elites(ids[10:15], returns[10:15], 0.1).tolist() == [4]  # few of all


# -- what the released code does wrong, and ours does not


def test_a_reward_does_not_depend_on_what_was_tried_before() -> None:
    """DOPPLER subtracts the mean of all episodes so far, this one included: the first earns 0."""
    rules = SelectPlaceRules(ProblemSet.build([identity()], [6.0]), 1)

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
    rules = SelectPlaceRules(ProblemSet.build([problem]), 1)
    rules.start(np.array([0]), np.array([0]))
    for device in (0, 1):
        rules.observe()
        rules.act(np.array([device]))
    seen = rules.observe()["devices"][0, 0, :, 1] * 3  # finish over the critical path of 3 s
    assert seen.tolist() == pytest.approx([1 + 10 + 1 + 10 + 1, 1 + 10 + 1 + 1])


@pytest.mark.usefixtures("hydra_conf")
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hdp", ("group.", "attention", "score")),
        ("gdp", ("encoder.attention",)),
        ("hsdag", ("group.", "encoder.layers")),
        ("doppler", ("select.", "score")),
    ],
)
def test_every_part_of_a_network_is_trained(name: str, parts: tuple[str, ...]) -> None:
    """The hierarchical placer beside GiPH never gives its attention to the optimizer."""
    words = ["training.total_steps=128", "training.network.hidden=8", "training.num_envs=4"]
    config = replace(configured(name, *words)[1], num_checks=1, learning_rate=1e-2)
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            return True

    learn = PPO.learn

    def looked(self: PPO, *args: Any, **kwargs: Any) -> Any:
        before.update({k: v.clone() for k, v in self.policy.state_dict().items()})
        done = learn(self, *args, **kwargs)
        after.update(self.policy.state_dict())
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPO, "learn", looked)
        train([giph(0)], config=config)
    mine = [k for k in before if any(k.startswith(f"net.{p}") for p in parts)]
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
