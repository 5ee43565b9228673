"""As Gymnasium and stable-baselines3 are meant: what a user of theirs does works, on every id."""

import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as gymnasium_check
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback
from stable_baselines3.common.env_checker import check_env as sb3_check
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

import envs
from agents.encoder import NetworkConfig, PlacementNet, PolicyError
from agents.planner import PolicyPlanner
from agents.policy import PlacementPolicy
from agents.store import GraphStore, ObservedGraphs
from agents.trained import TrainedPolicy, make_net
from agents.training import TrainConfig, train
from envs.formulations import FORMULATIONS, Formulation, formulation_in
from envs.generators import Layered, small_problems
from envs.graphs import to_data
from envs.problem_set import EnvError, Sizes
from envs.rewards import Outcome, improvement, log_speedup
from envs.sb3 import PlacementVecEnv
from placement.problem import Problem
from placement.simulator import score
from placement.tools.threads import torch_threads

IDS = [f"envs/{name}" for name in envs.IDS]
OBSERVED = ("number", "graph")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.mark.parametrize("name", envs.IDS)
def test_every_spelling_works_without_arguments(name: str) -> None:
    """``envs/NAME``: all other tests."""
    spelled = [gym.make(x) for x in (f"envs:envs/{name}", f"envs:{name}")]
    assert len({type(env.unwrapped) for env in spelled}) == 1
    assert gym.spec(f"envs/{name}").to_json()
    shown = spelled[0].observation_space.spaces
    assert not shown.keys() & {"device", "dtype", "shape", "space"}  # TorchRL takes these names
    first, second = (env.reset(seed=3)[0] for env in spelled)
    assert all(np.array_equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("observe", [*OBSERVED, "fresh"])
@pytest.mark.parametrize("name", IDS)
def test_both_checkers_pass_with_every_observation(name: str, observe: str) -> None:
    fresh: Any = {"observe": "graph", "problems": "envs.generators:Layered"}
    options = fresh if observe == "fresh" else {"observe": observe}
    env = gym.make(name, render_mode="rgb_array", **options).unwrapped
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", message=".*(unconventional shape|image).*")
        gymnasium_check(env, skip_render_check=True)
        sb3_check(env, skip_render_check=True)


def test_pictures_are_of_one_size() -> None:
    pytest.importorskip("matplotlib")
    env: Any = gym.make("envs/DevicePlacement-v0", render_mode="rgb_array")
    env.reset(seed=0)
    before = env.render()
    env.step(env.action_space.sample())
    after = env.render()
    assert before.shape == after.shape and before.dtype == np.uint8 and (before != after).any()


@pytest.mark.parametrize("observe", OBSERVED)
@pytest.mark.parametrize("name", IDS)
def test_random_episodes(name: str, observe: str) -> None:
    """Random legal actions: observations in their space, masks that tell the truth, rewards."""
    env: Any = gym.make(name, problems=Layered(depth=4), observe=observe)
    env.action_space.seed(0)
    for seed in range(6):
        obs, info = env.reset(seed=seed)
        earned, over = 0.0, False
        while not over:
            assert obs in env.observation_space
            mask = info["action_mask"]
            assert np.array_equal(np.ravel(mask).astype(bool), env.unwrapped.action_masks())
            obs, reward, over, truncated, info = env.step(env.action_space.sample(mask))
            assert not truncated
            earned += reward
        problem, placement = env.unwrapped.problems.problems[0], info["placement"]
        problem.check_placement(placement)
        value_s = info["value_s"]
        if "Dispatch" not in name:  # that decides an order too
            assert value_s == pytest.approx(float(score(problem, placement)[0]))
        reference_s = env.unwrapped.problems.reference_s[0]
        assert earned == pytest.approx(max(np.log(reference_s / value_s), -4.0))


def test_the_observed_graph_is_the_problems() -> None:
    problems = small_problems()
    env: Any = gym.make("envs/SequentialDevicePlacement-v0", problems=problems, observe="graph")
    store = GraphStore(problems)
    for i, problem in enumerate(problems):
        obs, _ = env.reset(options={"problem": i})
        groups, devices = problem.graph.num_groups, problem.num_devices
        assert obs["sizes"].tolist()[::2] == [groups, devices]
        assert (obs["edges"][:, obs["sizes"][1] :] == -1).all()
        data = to_data(obs)
        assert torch.equal(data.x, store.batch((i,)).x)
        assert torch.equal(data.edge_index, store.batch((i,)).edge_index)
        pairs = {tuple(x) for x in problem.graph.group[problem.graph.edges] if x[0] != x[1]}
        assert {tuple(x) for x in data.edge_index.T.tolist()} == pairs
        supported = np.isfinite(problem.group_compute_s)
        assert np.array_equal(obs["supported"][:groups, :devices], supported)


@pytest.mark.parametrize("encoder", ["sage", "gat", "dag"])
def test_a_policy_answers_the_same_from_observed_and_from_kept_graphs(encoder: str) -> None:
    problems = small_problems()
    network = {"hidden": 16, "layers": 2, "encoder": encoder}
    for name in ("Sequential", ""):
        env = gym.make_vec(f"envs/{name}DevicePlacement-v0", 8, problems=problems, observe="graph")
        seen = {k: torch.as_tensor(v) for k, v in env.reset(seed=0)[0].items()}
        some = env.single_observation_space, env.single_action_space, lambda _: 1e-3
        one = PlacementPolicy(*some, network=network)
        two = PlacementPolicy(*some, net=one.net, store=GraphStore(problems))
        actions = one._predict(seen, deterministic=True)
        first, second = (x.evaluate_actions(seen, actions) for x in (one, two))
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert len(ObservedGraphs(seen)) == len(problems)


def test_problems_of_several_environments_are_told_apart() -> None:
    """Each counts its own from 0."""
    graphs = {"problems": Layered(), "observe": "graph"}
    env = make_vec_env("envs/DevicePlacement-v0", 4, env_kwargs=graphs)
    seen = {k: torch.as_tensor(v) for k, v in env.reset().items()}
    assert seen["problem"].unique().tolist() == [0]
    graphs = ObservedGraphs(seen)
    assert len(graphs) == 4 and len(graphs.row.unique()) == 4
    twice = {k: torch.cat([v, v]) for k, v in seen.items()}
    assert torch.equal(ObservedGraphs(twice).row, torch.cat([graphs.row, graphs.row]))


@pytest.mark.parametrize("kind", [PPO, A2C])
@pytest.mark.parametrize("name", ["SequentialDevicePlacement-v0", "DevicePlacement-v0"])
def test_stable_baselines_as_it_is_meant(kind: Any, name: str, tmp_path: Path) -> None:
    arguments = {"observe": "graph"}
    env = make_vec_env(f"envs/{name}", 2, env_kwargs=arguments)
    other = make_vec_env(f"envs/{name}", 1, env_kwargs=arguments)
    small = {"network": {"hidden": 8, "layers": 1}}
    agent = kind(PlacementPolicy, env, n_steps=32, policy_kwargs=small)
    best, saved = tmp_path / "best", tmp_path / "kept"
    once = {"eval_freq": 32, "n_eval_episodes": 1, "verbose": 0}
    checked = EvalCallback(other, best_model_save_path=str(best), **once)
    agent.learn(64, [checked, CheckpointCallback(32, str(saved))])
    assert (best / "best_model.zip").is_file() and len(list(saved.iterdir())) == 1
    agent.save(tmp_path / "agent.zip")
    again = kind.load(tmp_path / "agent.zip", env=env)
    obs = env.reset()
    first, second = (a.predict(obs, deterministic=True)[0] for a in (agent, again))
    assert np.array_equal(first, second)
    again.learn(64)
    again.set_parameters(agent.get_parameters())
    for a, b in zip(agent.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_policy_with_a_store_is_saved_too(tmp_path: Path) -> None:
    problems = small_problems()
    env = make_vec_env("envs/DevicePlacement-v0", 2, env_kwargs={"problems": problems})
    store = GraphStore(problems)
    store.batch((0, 1))
    assert pickle.loads(pickle.dumps(store))._batches == {}
    agent = PPO(PlacementPolicy, env, n_steps=16, policy_kwargs={"store": store})
    agent.learn(32).save(tmp_path / "agent.zip")
    PPO.load(tmp_path / "agent.zip").predict(env.reset())
    with pytest.raises(PolicyError, match="make it with observe='graph'"):
        PPO(PlacementPolicy, env)
    with pytest.raises(PolicyError, match=r"net_arch = \[64\] is not for PlacementPolicy"):
        PPO(PlacementPolicy, env, policy_kwargs={"store": store, "net_arch": [64]})


def test_maskable_ppo_of_the_contrib_package() -> None:
    contrib = pytest.importorskip("sb3_contrib")
    for name in ("SequentialDevicePlacement-v0", "DevicePlacement-v0"):
        env = make_vec_env(f"envs/{name}", 2)
        contrib.MaskablePPO("MultiInputPolicy", env, n_steps=16, batch_size=16).learn(32)


def test_gymnasiums_own_vector_environment_has_problems_of_different_sizes() -> None:
    some = {"problems": Layered(), "observe": "graph"}
    env = gym.make_vec("envs/DevicePlacement-v0", 4, vectorization_mode="sync", **some)
    env.reset(seed=0)
    placements = env.step(env.action_space.sample())[4]["placement"]
    assert len({len(x) for x in placements}) > 1


@pytest.mark.parametrize("problems", [None, Layered(depth=3)])
@pytest.mark.parametrize("name", ["SequentialDevicePlacement-v0", "DevicePlacement-v0"])
def test_the_vector_environment(name: str, problems: Any) -> None:
    env = gym.make_vec(f"envs/{name}", 3, problems=problems, observe="graph")
    assert isinstance(env, gym.vector.VectorEnv)
    assert env.autoreset_mode is env.metadata["autoreset_mode"]  # TorchRL asks for the first
    assert env.autoreset_mode is gym.vector.AutoresetMode.SAME_STEP
    obs, info = env.reset(seed=4)
    finished = []
    for _ in range(40):
        assert obs in env.observation_space
        obs, rewards, over, truncated, info = env.step(info["action_mask"].argmax(axis=-1))
        assert rewards.shape == over.shape == truncated.shape == (3,)
        for b in np.flatnonzero(over):
            assert info["final_obs"][b] in env.single_observation_space
            finished.append(int(info["final_info"]["problem"][b]))
            assert np.isfinite(info["final_info"]["value_s"][b])
    if problems is not None:  # every episode has a problem of its own
        assert sorted(finished) == sorted(set(finished)) and len(finished) > 5
    again, _ = env.reset(seed=4)
    first, _ = gym.make_vec(f"envs/{name}", 3, problems=problems, observe="graph").reset(seed=4)
    assert all(np.array_equal(again[k], first[k]) for k in first)
    adapted = PlacementVecEnv(env)
    assert adapted.reset()["nodes"].shape[0] == 3
    assert adapted.env_is_wrapped(Monitor) == [True] * 3  # else evaluate_policy warns
    assert adapted.has_attr("action_masks")  # as sb3-contrib asks whether there are masks


def test_fresh_problems_every_episode() -> None:
    env: Any = gym.make("envs/DevicePlacement-v0", problems=Layered(), observe="graph")
    seen = [env.reset(seed=0 if i == 0 else None) for i in range(6)]
    assert [info["problem"] for _, info in seen] == list(range(6))
    assert len({obs["nodes"].tobytes() for obs, _ in seen}) == 6
    assert env.reset(seed=0)[0]["nodes"].tobytes() == seen[0][0]["nodes"].tobytes()
    with pytest.raises(EnvError, match="for given problems"):
        env.reset(options={"problem": 1})


def test_what_generators_get_wrong() -> None:
    def too_large(rng: np.random.Generator) -> Problem:
        return Layered(depth=6)(rng)

    too_large.sizes = Sizes(4, 3, 9)
    with pytest.raises(EnvError, match="room for"):
        gym.make("envs/DevicePlacement-v0", problems=too_large).unwrapped.reset()
    too_large.sizes = (4, 3)
    with pytest.raises(EnvError, match=r"sizes = \(4, 3\) must be envs.problem_set.Sizes"):
        gym.make("envs/DevicePlacement-v0", problems=too_large)
    with pytest.raises(EnvError, match="made no Problem: int"):
        gym.make("envs/DevicePlacement-v0", problems=lambda rng: 3)
    with pytest.raises(EnvError, match=r"generator 'envs.generators:Layred' cannot be imported"):
        gym.make("envs/DevicePlacement-v0", problems="envs.generators:Layred")
    with pytest.raises(EnvError, match="observe = 'pixels' is unknown"):
        gym.make("envs/DevicePlacement-v0", observe="pixels")
    with pytest.raises(EnvError, match="baseline = 'heft' must be a planner"):
        gym.make("envs/DevicePlacement-v0", baseline="heft")
    for reward in (lambda _: [np.nan], lambda _: 0.0, lambda _: "good"):
        env: Any = gym.make("envs/DevicePlacement-v0", reward=reward)
        env.reset(seed=0)
        with pytest.raises(EnvError, match=r"must return as many finite numbers, float64 \[1\]"):
            env.step(env.action_space.sample())
    for evaluator in (lambda *_: [np.nan], lambda *_: 1.0, lambda *_: [-1.0]):
        env = gym.make("envs/DevicePlacement-v0", evaluator=evaluator, reference_s=[1.0] * 8)
        _, info = env.reset(seed=0)
        with pytest.raises(EnvError, match=r"evaluator .*as many seconds, inf .*, float64 \[1\]"):
            env.step(env.action_space.sample(info["action_mask"]))
    with pytest.raises(EnvError, match="num_envs = 0 must be at least 1"):
        gym.make_vec("envs/DevicePlacement-v0", 0)


def test_only_what_is_better_than_the_reference_earns_much() -> None:
    seconds = np.array([0.97, 0.99, 1.0, 1.001, 1.05, 4.0, np.inf])
    earned = improvement(Outcome(small_problems()[0], np.zeros((7, 1), np.int32), seconds, 1.0))
    assert earned[0] == pytest.approx(np.log1p(np.exp(1.523)), abs=0.001)  # 3 % better
    assert earned[0] > earned[1] > earned[3] > earned[4] > 0.0  # nearly as good is more than bad
    assert earned[2] == earned[6] == 0.0 and earned[5] < 1e-9  # known; cannot run; far too long


# Seams: what is named "test_rl:..." below is code of somebody's own.


def slower_is_better(outcome: Outcome) -> np.ndarray:
    assert outcome.placements.shape == (len(outcome.value_s), outcome.problem.num_ops)
    return -2.0 * log_speedup(outcome)


class OwnLayer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.own = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, batch: Any, waves: Any) -> torch.Tensor:
        return x + torch.relu(self.own(x))


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()


class Halved(nn.Identity):
    def forward(self, x: torch.Tensor, batch: Any, waves: Any) -> torch.Tensor:
        return x[:, ::2]


class Crooked(OwnLayer):
    def forward(self, x: torch.Tensor, batch: Any, waves: Any) -> torch.Tensor:
        return x @ torch.ones(3, 3)


class Double(OwnLayer):
    def forward(self, x: torch.Tensor, batch: Any, waves: Any) -> torch.Tensor:
        return x.double()


class Divides(OwnLayer):
    def forward(self, x: torch.Tensor, batch: Any, waves: Any) -> torch.Tensor:
        return super().forward(x, batch, waves) / 0


class OwnNet(PlacementNet):
    pass


class OwnA2C(A2C):
    def __init__(self, *args: Any, twice: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.twice = twice


own = Formulation(
    "test_rl:own", "envs.sequential:SequentialDevicePlacementEnv", network="test_rl:OwnNet"
)
NAMES = {"formulation": "test_rl:own", "reward": "test_rl:slower_is_better"}
NAMES |= {"algorithm": "test_rl:OwnA2C", "generator": "envs.generators:Layered"}


@pytest.mark.parametrize("name", IDS)
def test_a_reward_of_ones_own_on_every_id(name: str) -> None:
    """It is paid at the end, or for the difference that a step makes."""
    earned = {}
    for reward in ("envs.rewards:log_speedup", "test_rl:slower_is_better"):
        env: Any = gym.make(name, reward=reward)
        env.reset(seed=1, options={"problem": 1})
        total, over = 0.0, False
        while not over:
            masks = env.unwrapped.action_masks().reshape(*env.action_space.shape, -1)
            _, paid, over, _, _ = env.step(masks.argmax(axis=-1))
            total += paid
        earned[reward] = total
    ours, own_one = earned.values()
    if "Search" in name and ours < 1e-9:
        assert own_one == pytest.approx(0.0)
    else:
        assert own_one == pytest.approx(-2.0 * ours)


def test_everything_of_ones_own_by_name(tmp_path: Path) -> None:
    network = NetworkConfig(hidden=8, layers=1, encoder="test_rl:OwnLayer")
    more = {"network": network, "algorithm_options": {"twice": 2}}
    config = TrainConfig(total_steps=200, num_envs=4, **more, **NAMES)
    policy = train([], config=config, out_dir=tmp_path)
    file = tmp_path / "policy.safetensors"
    assert {k: policy.card["config"][k] for k in NAMES} == NAMES
    for missing in ([], ["test_rl:own"], ["test_rl:OwnLayer"]):
        with pytest.raises(PolicyError, match=r"needs test_rl:\w+, which is not ours"):
            TrainedPolicy.load(file, missing)
        with pytest.raises(PolicyError, match="which is not ours"):
            PolicyPlanner(file, allow=tuple(missing))(small_problems()[0])
    allowed = ("test_rl:own", "test_rl:OwnLayer")
    again = TrainedPolicy.load(file, allowed)
    assert type(again.net) is OwnNet
    assert again.card["config"] == policy.card["config"]
    problem = small_problems()[0]
    assert np.array_equal(again.place(problem), policy.place(problem))
    assert PolicyPlanner(file, allow=allowed)(problem).stats["best_of_k_evaluations"] > 1


def test_samples_may_be_smaller_than_what_is_played() -> None:
    config = TrainConfig(total_steps=64, formulation="one_shot", samples=1, num_envs=8)
    draw = Layered(depth=12)
    assert train(draw, config=config).best[0].placement.size < draw.sizes.groups


def test_a_training_on_fresh_problems_is_resumed_exactly(tmp_path: Path) -> None:
    steps = {"num_envs": 4, "steps_per_env": 20, "num_checks": 4, "samples": 3}
    config = TrainConfig(400, **steps, network=NetworkConfig(hidden=8, layers=1))
    whole = train(Layered(depth=3), config=config)
    rows: list[Any] = []

    def stop(row: Any) -> bool:
        rows.append(row)
        return len(rows) < 3

    train(Layered(depth=3), config=config, out_dir=tmp_path, callback=stop)
    again = train(Layered(depth=3), config=config, out_dir=tmp_path, resume=True)
    for a, b in zip(whole.net.parameters(), again.net.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("formulation", sorted(FORMULATIONS))
def test_the_network_learns_on_a_gpu(formulation: str, tmp_path: Path) -> None:
    problems = small_problems()
    network = NetworkConfig(hidden=8, layers=1, encoder="dag")
    config = TrainConfig(64, formulation, device="cuda", network=network, num_envs=4)
    solutions = None
    if FORMULATIONS[formulation].builds and formulation != "group_place":
        solutions = [np.zeros(p.num_ops, np.int32) for p in problems]
    for source in (problems, "envs.generators:Layered"):
        known = solutions if source is problems else None
        policy = train(source, config=config, solutions=known, out_dir=tmp_path)
        assert next(policy.net.parameters()).device.type == "cpu"
        TrainedPolicy.load(tmp_path / "policy.safetensors")
    train("envs.generators:Layered", config=config, out_dir=tmp_path, resume=True)


def test_what_users_of_seams_get_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = NetworkConfig(encoder="test_rl:OwnLayer", hidden=8)
    TrainedPolicy(make_net(own, "sequential")).save(tmp_path / "own.safetensors")
    monkeypatch.delattr(sys.modules["test_rl"], "OwnLayer")
    with pytest.raises(PolicyError, match=r"code 'test_rl:OwnLayer' cannot be imported.*; run it"):
        TrainedPolicy.load(tmp_path / "own.safetensors", [own.encoder])
    for encoder, why in (
        ("sagee", " is unknown"),
        ("nowhere:Layer", " cannot be imported"),
        ("test_rl:slower_is_better", ".* must be a class of torch.nn.Module"),
        ("test_rl:Narrow", r": forward must take \(x, batch, waves\), it has"),
        ("test_rl:Bare", r": __init__ must take \(hidden\), it has"),
    ):
        with pytest.raises(PolicyError, match=f"encoder '{encoder}'{why}"):
            make_net(NetworkConfig(encoder=encoder), "sequential")
    shape = r"float32 \[\d+, 64\]"
    for layer, kind, why in (
        ("Halved", PolicyError, rf"encoder Halved: forward gives .*, 32\] for x {shape}"),
        ("Double", PolicyError, rf"encoder Double: forward gives float64 .* for x {shape}"),
        ("Crooked", RuntimeError, "shapes cannot be multiplied"),
    ):
        net = make_net(NetworkConfig(encoder=f"test_rl:{layer}"), "sequential")
        with pytest.raises(kind, match=why) as caught:
            TrainedPolicy(net).place(small_problems()[0])
    (note,) = caught.value.__notes__
    assert re.match(f"encoder Crooked was given x {shape}, edge_index .* must give {shape}", note)
    no_numbers = TrainConfig(network=NetworkConfig(encoder="test_rl:Divides"))
    with pytest.raises(PolicyError, match=r"no finite numbers: the learning rate .* divides by 0"):
        train(small_problems(), config=no_numbers)
    env = make_vec_env("envs/SequentialDevicePlacement-v0", 2, env_kwargs={"observe": "graph"})
    agent = PPO(PlacementPolicy, env, n_steps=8, policy_kwargs={"formulation": "one_shot"})
    with pytest.raises(PolicyError, match=r"OneShotNet.evaluate gives .* Discrete.3.: .*\[B, 3\]"):
        agent.learn(8)
    with pytest.raises(PolicyError, match=r"a dispatch network does not read .*devices.*problem"):
        PPO(PlacementPolicy, env, policy_kwargs={"formulation": "dispatch"})
    for wrong, why in (
        ({"network": {"hiden": 8}}, r"no 'hiden'; did you mean 'hidden'.* fields of NetworkConfig"),
        ({"net": "policy.safetensors"}, r"is no network: TrainedPolicy.load\(FILE\).net is"),
    ):
        with pytest.raises(PolicyError, match=why):
            PPO(PlacementPolicy, env, policy_kwargs=wrong)
    store = {"store": GraphStore(small_problems()[:1])}
    with pytest.raises(PolicyError, match=r"has a problem \d, and the store 1 graphs"):
        PPO(PlacementPolicy, env, n_steps=64, policy_kwargs=store).learn(64)
    with pytest.raises(EnvError, match=r"is not many episodes: gym.make_vec\(ID, B\) makes them"):
        PlacementVecEnv(gym.make("envs/Dispatch-v0"))
    with pytest.raises(PolicyError, match=r"q_net, which .*for others use MultiInputPolicy"):
        DQN(PlacementPolicy, env, buffer_size=8)
    with pytest.raises(PolicyError, match="is for the environments of envs"):
        PPO(PlacementPolicy, "CartPole-v1")
    for name in ("Dispatch-v0", "SequentialDevicePlacement-v0"):
        several = make_vec_env(f"envs/{name}", 2, env_kwargs={"observe": "graph"})
        agent = PPO(PlacementPolicy, VecNormalize(several), n_steps=8)
        with pytest.raises(PolicyError, match=r"a wrapper changes observations.*norm_obs=False"):
            agent.learn(8)
    with pytest.raises(PolicyError, match=r"'test_rl:OwnNet' must be an envs.formulations.Form"):
        TrainConfig(formulation="test_rl:OwnNet")
    with pytest.raises(PolicyError, match="must be an on-policy algorithm"):
        train(small_problems(), config=TrainConfig(algorithm="stable_baselines3:DQN"))
    with pytest.raises(EnvError, match="reward 'test_rl:no' cannot be imported"):
        train(small_problems(), config=TrainConfig(reward="test_rl:no"))
    with pytest.raises(EnvError, match=r"reward 'math:pi' is 3.14.*must be a function of an"):
        train(small_problems(), config=TrainConfig(reward="math:pi"))
    with pytest.raises(EnvError, match="reward 'math:pi' is 3"):
        gym.make("envs/Dispatch-v0", reward="math:pi")


def test_a_formulation_is_known_by_what_it_observes() -> None:
    for name, formulation in FORMULATIONS.items():
        env: Any = gym.make(f"envs/{next(k for k, v in envs.IDS.items() if v == formulation.env)}")
        assert formulation_in(env.observation_space).name == name
    other = spaces.Dict({"problem": spaces.Discrete(3), "colour": spaces.Discrete(3)})
    with pytest.raises(EnvError, match="observations with colour are of none of sequential, "):
        formulation_in(other)
