"""Environments: the checkers, known rewards, masks, and that one episode equals many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.one_shot import DevicePlacementEnv, OneShotRules
from envs.perturbation import Perturbation
from envs.problem_set import EnvError, Measured, ProblemSet, canonical, group_order
from envs.rewards import INFEASIBLE_REWARD, WORST_REWARD
from envs.sb3 import PlacementVecEnv
from envs.sequential import SequentialDevicePlacementEnv, SequentialRules
from envs.sequential.kernels import DEVICE_FEATURES
from envs.vector import Episodes
from placement.objective import Objective
from placement.planners import load
from placement.problem import Problem
from placement.runs.trials import TrialError
from placement.simulator import score, simulate
from tests.problems import chain as edges_of
from tests.problems import random_problem, small_problem, with_twins
from tests.runtimes import Biased

IDS = ("envs:DevicePlacement-v0", "envs:SequentialDevicePlacement-v0", "envs:Dispatch-v0")


def chain(compute_s: Any, *, latency_s: float = 0.5, **settings: Any) -> Problem:
    """A chain; every link takes half a second, every operator has 100 bytes of parameters."""
    facts = {"tensor_bytes": 10, "param_bytes": 100, "memory_bytes": 10**9, "devices": "cpu:{}"}
    some = {"link": (latency_s,), "objective": "latency", "num_microbatches": 4}
    return small_problem(compute_s, edges_of(len(compute_s)), **facts | some | settings)


def mixed() -> list[Problem]:
    return [random_problem(s, grouped=s % 2 == 0, unsupported=s % 3 == 0) for s in range(12)]


def test_reset_is_seeded_and_takes_a_problem() -> None:
    env = DevicePlacementEnv(mixed())
    first = [env.reset(seed=3)[1]["problem"] for _ in range(3)]
    assert len(set(first)) == 1
    env.reset(seed=3)
    drawn = [env.reset()[1]["problem"] for _ in range(20)]
    assert len(set(drawn)) > 3
    assert env.reset(options={"problem": 7})[0]["problem"].tolist() == [7]
    with pytest.raises(EnvError, match=r"= 12, there are 12 \(0\.\.11\)"):
        env.reset(options={"problem": 12})
    with pytest.raises(EnvError, match=r"= 1.5, there are 12"):
        env.reset(options={"problem": 1.5})
    with pytest.raises(EnvError, match="option 'problm' is unknown; known: problem"):
        env.reset(options={"problm": 7})


def test_rewards_by_hand() -> None:
    # device 0: 2 + 2 = 4 s; device 1: 1 + 4 = 5 s. Best single device: 4 s.
    problem = chain([[2, 1], [2, 4]])
    env = DevicePlacementEnv([problem])
    for action, value_s in (([0, 0], 4.0), ([1, 1], 5.0), ([1, 0], 3.5), ([0, 1], 6.5)):
        env.reset(seed=0)
        _, reward, over, _, info = env.step(np.array(action))
        assert over
        assert info["value_s"] == pytest.approx(value_s)
        assert reward == pytest.approx(np.log(4.0 / value_s))


def test_reference_from_numbers_or_a_baseline() -> None:
    problem = chain([[2, 1], [2, 4]])
    env = DevicePlacementEnv([problem], reference_s=[7.0])
    env.reset(seed=0)
    assert env.step(np.array([1, 0]))[1] == pytest.approx(np.log(2.0))
    best = DevicePlacementEnv([problem], baseline=load("best_of"))
    best.reset(seed=0)
    assert best.step(np.array([1, 0]))[1] == pytest.approx(0.0)


def test_rewards_are_bounded() -> None:
    slow = DevicePlacementEnv([chain([[1e-6, 1e6]])])
    slow.reset(seed=0)
    assert slow.step(np.array([1]))[1] == WORST_REWARD
    # 200 bytes of parameters do not fit in 150: every single device is infeasible, a split is not.
    tight = DevicePlacementEnv([chain([[1, 1], [1, 1]], memory_bytes=150)])
    tight.reset(seed=0)
    assert tight.step(np.array([0, 0]))[1] == INFEASIBLE_REWARD
    tight.reset(seed=0)
    assert tight.step(np.array([0, 1]))[1] == pytest.approx(np.log(2.0 / 2.5))


def test_only_supported_placements_reach_the_evaluator() -> None:
    seen: list[np.ndarray] = []

    def evaluator(problem: Problem, placements: np.ndarray) -> np.ndarray:
        seen.append(placements)
        return np.ones(len(placements))

    wide = chain([[1, 1, 1]])
    narrow = chain([[1, np.inf], [1, 1]])
    env = DevicePlacementEnv([narrow, wide], evaluator=evaluator, reference_s=[1, 1])
    for action in ([1, 0], [0, 2]):  # unsupported; a device that only the other problem has
        env.reset(options={"problem": 0})
        assert env.step(np.array(action))[1] == INFEASIBLE_REWARD
    assert seen == []
    env.reset(options={"problem": 0})
    assert env.step(np.array([0, 1]))[1] == 0.0
    assert np.array_equal(seen[0], [[0, 1]])


def test_a_group_is_one_action() -> None:
    problem = chain([[1, 2], [1, 2], [1, 2]], group=[0, 1, 0])
    env = DevicePlacementEnv([problem])
    assert env.action_space.shape == (2,)
    env.reset(seed=0)
    info = env.step(np.array([1, 0]))[4]
    assert info["placement"] == (1, 0, 1)


def test_a_runtime_as_back_end(tmp_path: Path) -> None:
    slow = partial(Biased, slow=lambda run: 2.0)  # everything takes twice as long as predicted
    for objective in ("latency", "period"):
        problem = chain([[2, 1], [2, 4]], objective=objective, latency_s=0.0)
        runtime = slow(problem)
        env = DevicePlacementEnv([problem], evaluator=runtime, reference_s=[1.0])
        for _ in range(2):  # the second time it is known
            env.reset(seed=0)
            info = env.step(np.array([1, 0]))[4]
            assert info["value_s"] == pytest.approx(2 * score(problem, [1, 0])[0])
            assert runtime.runs == [(1, 0)]
    # Three rounds of one placement; then another and the first, for which no run is left.
    few = Measured(slow, repeats=3, measurements=3, folder=tmp_path)
    known = few(problem, np.array([[0, 0]]))
    assert few.trials(problem).num_measurements == 3
    with pytest.raises(TrialError, match="the budget is spent: 3 of 3 runs"):
        few(problem, np.array([[0, 1]]))
    again = Measured(slow, repeats=3, folder=tmp_path)
    assert again(problem, np.array([[0, 0]])) == pytest.approx(known)
    assert again.trials(problem).runtime.runs == []
    with pytest.raises(EnvError, match="one problem, and there are 2 problems: give Measured"):
        DevicePlacementEnv([problem, chain([[2, 1]] * 2)], evaluator=runtime)
    with pytest.raises(EnvError, match="one problem, and a perturbation makes others"):
        DevicePlacementEnv([problem], evaluator=runtime, perturbation=Perturbation())
    with pytest.raises(TrialError, match=r"not max_load; use problem.with_objective\('period'\)"):
        DevicePlacementEnv([problem.with_objective("max_load")], evaluator=runtime)


def test_sequential_masks() -> None:
    # Three equal devices: of the empty ones only the first is legal.
    env = SequentialDevicePlacementEnv([chain([[1, 1, 1]] * 4)], render_mode="ansi")
    env.reset(seed=0)
    assert env.action_masks().tolist() == [True, False, False]
    env.step(0)
    assert env.action_masks().tolist() == [True, True, False]
    env.step(1)
    assert env.action_masks().tolist() == [True, True, True]
    _, reward, over, _, info = env.step(0)
    assert not over
    _, reward, over, _, info = env.step(2)
    assert over
    assert info["placement"] == (0, 1, 0, 2)

    # An illegal device ends the episode; the rest is not decided.
    env.reset(seed=0)
    _, reward, over, _, info = env.step(2)
    assert over
    assert reward == INFEASIBLE_REWARD
    assert info["placement"] == (-1, -1, -1, -1)
    assert "cannot run" in env.render()

    # 250 bytes hold two operators of 100; when nothing fits any more everything is legal.
    tight = SequentialDevicePlacementEnv([chain([[1, 2]] * 5, memory_bytes=250)])
    tight.reset(seed=0)
    for mask, action in (([1, 1], 0), ([1, 1], 0), ([0, 1], 1), ([0, 1], 1), ([1, 1], 0)):
        assert tight.action_masks().tolist() == [bool(m) for m in mask]
        tight.step(action)


def test_sequential_features_by_hand() -> None:
    # op0 on device 0 ends at 2. Then op1: device 0 ends at 2 + 2, device 1 at 2 + 0.5 + 4.
    problem = chain([[2, 1], [2, 4]])
    env = SequentialDevicePlacementEnv([problem])
    env.reset(seed=0)
    obs = env.step(0)[0]
    unit, path, work = 1.5, 3.0, 3.0  # fastest: 1 and 2 seconds
    expected = {
        "log cost": [0.0, np.log1p((6.5 - 4.0) / unit)],
        "finish": [4.0 / path, 6.5 / path],
        "load": [4.0 * 2 / work, 4.0 * 2 / work],
        "load growth": [np.log1p(2.0 / unit), np.log1p(2.0 / unit)],
        "transfer": [0.0, np.log1p(0.5 / unit)],
        "local": [1.0, 0.0],
        "memory": [200 / 1e9, 100 / 1e9],
        "empty": [0.0, 1.0],
        "progress": [0.5, 0.5],
    }
    names = [text.split(":")[0] for text in DEVICE_FEATURES]
    assert names == list(expected)
    rows = np.array([expected[name] for name in names])
    assert pytest.approx(rows, rel=1e-5) == obs["devices"].T


def test_what_a_device_costs_a_throughput_by_hand() -> None:
    # Three operators, 2 s on device 0 and 4 s on device 1; moving one's output takes 0.5 s.
    # All on 0 would be 6 s, all on 1 12 s: equally busy at 1 / (1/6 + 1/12) = 4 s.
    problem = chain([[2, 4], [2, 4], [2, 4]], objective="max_load")
    env = SequentialDevicePlacementEnv([problem])
    expected = [
        [0.0, 2.0],  # nothing moves and nothing is full, but device 1 is 2 s slower
        [0.0, 2.5],  # 4 s on device 0 are even; to device 1 the tensor has to move
        [0.0, 0.5],  # 6 s on device 0 are 2 s too many: 2 against 2.5
    ]
    obs = env.reset(seed=0)[0]
    for cost in expected:
        assert obs["devices"][:, 0] == pytest.approx(np.log1p(np.array(cost) / 2.0), rel=1e-5)
        obs = env.step(0)[0]


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_the_last_finish_time_is_the_latency_where_nothing_contends(seed: int) -> None:
    """A chain has no contention, so the incremental estimate must equal the simulator."""
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(1, 8)), int(rng.integers(1, 4))
    problem = chain(rng.random((n, d)))
    rules = SequentialRules(ProblemSet.build([problem]), 1)
    rules.start(np.array([0]), np.array([0]))
    finish = 0.0
    for _ in range(n):
        obs = rules.observe()
        action = int(rng.choice(np.flatnonzero(obs["mask"][0])))
        finish = float(obs["devices"][0, action, 1]) * rules._tables.path_s[0]
        rules.act(np.array([action]))
    placement = rules.problems.placements(0, rules.choices)[0]
    if finish < 20 * rules._tables.path_s[0]:
        assert finish == pytest.approx(simulate(problem, placement, None, 1).latency_s, rel=1e-5)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_canonical_can_be_replayed(seed: int) -> None:
    """Whatever a planner answers, the sequential environment can express its equivalent."""
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(1, 8)), int(rng.integers(1, 5))
    kinds = rng.integers(1, 3, d)  # two kinds of device, some of them equal
    problem = chain(rng.random((n, 1)) * kinds)
    placement = rng.integers(0, d, n).astype(np.int32)
    same = canonical(problem, placement)
    assert score(problem, same)[0] == pytest.approx(score(problem, placement)[0])
    env = SequentialDevicePlacementEnv([problem])
    env.reset(seed=0)
    for group in group_order(problem):
        _, _, over, _, info = env.step(int(same[problem.graph.group == group][0]))
    assert over
    assert np.array_equal(info["placement"], same)


@pytest.mark.parametrize("rules", [OneShotRules, SequentialRules])
def test_many_episodes_at_once_equal_single_ones(rules: Any) -> None:
    problems = mixed()
    env = {OneShotRules: DevicePlacementEnv, SequentialRules: SequentialDevicePlacementEnv}[rules]
    one = env(problems)
    vec = PlacementVecEnv(Episodes(rules(ProblemSet.build(problems), 5), seed=1))
    rng = np.random.default_rng(0)
    obs = vec.reset()
    actions: list[list[Any]] = [[] for _ in range(5)]
    began = [int(i) for i in obs["problem"][:, 0]]
    finished: list[int] = []
    best = np.full(len(problems), np.inf)
    for _ in range(60):
        masks = np.stack(vec.env_method("action_masks"))
        masks = masks.reshape(5, -1, vec.rules.problems.max_devices)
        taken = np.array([[rng.choice(np.flatnonzero(row)) for row in m] for m in masks])
        taken = taken if rules is OneShotRules else taken[:, 0]
        obs, rewards, done, infos = vec.step(taken)
        for b in range(5):
            actions[b].append(taken[b])
            if done[b]:
                assert infos[b]["problem"] == began[b]
                one.reset(options={"problem": began[b]})
                for action in actions[b]:
                    _, reward, over, _, info = one.step(action)
                assert over
                assert rewards[b] == pytest.approx(reward)
                assert infos[b]["value_s"] == info["value_s"]
                assert infos[b]["episode"]["l"] == len(actions[b])
                best[began[b]] = min(best[began[b]], info["value_s"])
                finished.append(began[b])
                actions[b] = []
                began[b] = int(obs["problem"][b, 0])
    assert np.array_equal(vec.rules.best_s, best)
    assert vec.rules.num_evaluations == len(finished)
    for i in np.flatnonzero(np.isfinite(best)):
        placement = vec.rules.problems.placements(i, vec.rules.best_choices[i : i + 1])[0]
        assert score(problems[i], placement)[0] == best[i]
    # Dealt like cards: after every deck each problem has had its turn.
    if rules is OneShotRules:
        assert set(finished[: len(problems)]) == set(range(len(problems)))


def test_a_problem_is_dealt_several_times_in_a_row() -> None:
    problems = ProblemSet.build(mixed())
    count = len(problems.problems)
    vec = PlacementVecEnv(Episodes(SequentialRules(problems, 2 * count), repeats=2))
    dealt = vec.reset()["problem"].reshape(count, 2)
    assert (dealt[:, 0] == dealt[:, 1]).all()
    assert sorted(dealt[:, 0]) == list(range(count))


def test_observations_are_never_shared() -> None:
    vec = PlacementVecEnv(Episodes(SequentialRules(ProblemSet.build(mixed()), 3)))
    first = vec.reset()
    copies = {k: v.copy() for k, v in first.items()}
    for _ in range(5):
        obs = vec.step(np.argmax(np.stack(vec.env_method("action_masks")), axis=1))[0]
        assert not any(np.shares_memory(obs[k], first[k]) for k in obs)
    assert all(np.array_equal(first[k], copies[k]) for k in first)


def test_render_shows_the_last_placement() -> None:
    env = DevicePlacementEnv([chain([[2, 1], [2, 4]])], render_mode="ansi")
    env.reset(seed=0)
    assert "no placement yet" in env.render()
    env.step(np.array([1, 0]))
    assert "cpu:1" in env.render()
    assert DevicePlacementEnv([chain([[1]])]).render() is None


def test_what_users_get_wrong() -> None:
    problem = chain([[1, 2]])
    for problems, options, why in (
        ([], {}, r"problems=\[problem\]"),
        (problem, {}, r"problems=\[problem\]"),
        ([problem], {"render_mode": "human"}, "render_mode = 'human'"),
        ([problem], {"reference_s": [1.0, 2.0]}, "each of the 1 problems"),
        ([problem], {"reference_s": [np.inf]}, "positive"),
    ):
        for kind in (DevicePlacementEnv, SequentialDevicePlacementEnv):
            with pytest.raises(EnvError, match=why):
                kind(problems, **options)
    env = gym.make_vec("envs:envs/SequentialDevicePlacement-v0", 2)
    env.reset(seed=0)
    for action in (1, [0, 1, 0], [0.0, 1.0], [None, None]):
        with pytest.raises(EnvError, match=r"expected integers \[2\]"):
            env.step(action)
    with pytest.raises(EnvError, match=r"argument 'window'.*arguments are problems") as unknown:
        DevicePlacementEnv(window=3)
    assert isinstance(unknown.value, TypeError)  # or TorchRL's GymEnv, which tries one, gives up
    for rule, why in (
        ((1.0, 2.0), r"\(1.0, 2.0\) must be 5 weights, as MIXED"),
        ("HEFT", "'HEFT' must be 5 weights"),
    ):
        with pytest.raises(EnvError, match=f"rule = {why}"):
            gym.make("envs/Dispatch-v0", rule=rule)
    with pytest.raises(EnvError, match="begins with reset"):
        DevicePlacementEnv([problem]).step(np.array([0]))
    with pytest.raises(EnvError, match=r"options\['problem'\] = True, there are 1"):
        DevicePlacementEnv([problem]).reset(options={"problem": True})


def stay_in_their_space(make: Callable[..., Any], objective: Objective, episodes: int) -> None:
    """Whatever takes how long: operators far less than transfers, or nothing."""
    rng = np.random.default_rng(0)
    seconds = 10.0 ** rng.uniform(-9, -2, (9, 3)) * (rng.random((9, 3)) < 0.9)
    env = make([chain(seconds, objective=objective)], reference_s=[1.0])
    for seed in range(episodes):
        obs, done = env.reset(seed=seed)[0], False
        while not done:
            assert env.observation_space.contains(obs)
            masks = env.unwrapped.action_masks().reshape(*env.action_space.shape, -1)
            legal = masks * rng.random(masks.shape)
            obs, _, done, _, _ = env.step(legal.argmax(axis=-1))


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("objective", ["latency", "period", "max_load"])
def test_observations_stay_in_their_space(name: str, objective: Objective) -> None:
    stay_in_their_space(lambda some, **k: gym.make(name, problems=some, **k), objective, 8)


def test_perturbed_machines() -> None:
    problem = chain([[1, 2, np.inf, 4]] * 5, memory_bytes=10**6)
    seen = Perturbation(drop=0.5, speed=0.2, bandwidth=0.5, variants=20, seed=1)([problem])
    assert seen[0] is problem and len(seen) == 21
    sizes = {p.num_devices for p in seen}
    assert min(sizes) == 2 and len(sizes) == 3
    for p in seen[1:]:
        assert p.graph is problem.graph
        remaining = [problem.cluster.index(name) for name in p.cluster.device_names]
        with np.errstate(invalid="ignore"):
            factor = problem.compute_s[:, remaining] / p.compute_s
        finite = np.isfinite(p.compute_s)
        assert np.array_equal(finite, np.isfinite(problem.compute_s[:, remaining]))
        assert np.ptp(factor[:, finite[0]], axis=0) == pytest.approx(0)
        assert np.isfinite(load("best_of")(p).value_s)
    # Nothing changes where nothing may.
    same = Perturbation(0.0, 0.0, 0.0, 1)([problem])[1]
    assert np.array_equal(same.compute_s, problem.compute_s)
    linked = random_problem(1, 6, 4)
    before = {(x.src, x.dst): x.bandwidth_bytes_per_s for x in linked.profile.links}
    for p in Perturbation(variants=5)([linked])[1:]:
        links = p.profile.links
        factor = [x.bandwidth_bytes_per_s / before[x.src, x.dst] for x in links]
        assert factor == pytest.approx(factor[:1] * len(links))
        assert {d for x in links for d in (x.src, x.dst)} <= set(p.cluster.device_names)
    for seed in range(4):  # a device that streams goes with the one whose memory it shares
        assert len(Perturbation(drop=1.0, variants=10)([with_twins(seed, 6, 4)])) == 11
        streams = Perturbation(drop=0.0, bandwidth=0.0, variants=1)([with_twins(seed, 6, 4)])[1]
        seconds = streams.profile.compute_s  # the same operator on the same device
        assert np.array_equal(seconds, seconds[:, streams.cluster.worker])
    with pytest.raises(EnvError, match="variants = -1 must be at least 0"):
        Perturbation(variants=-1)
    alone = DevicePlacementEnv([problem], perturbation=Perturbation(variants=0))
    assert alone.problems.problems == (problem,)
    # Only device 0 runs this group: it always stays.
    picky = chain([[1, np.inf, np.inf]] * 2)
    drawn = Perturbation(drop=1.0, variants=10)([picky])
    assert all("cpu:0" in p.cluster.device_names and p.num_devices == 2 for p in drawn[1:])
    env = DevicePlacementEnv([problem], perturbation=Perturbation(variants=3))
    assert env.reset(options={"problem": 3})[1]["problem"] == 3
    assert env.action_space.nvec.tolist() == [4] * 5


def test_seeds_in_a_row_are_one_seed_as_gymnasium_spreads_it() -> None:
    name, problems = "envs:envs/SequentialDevicePlacement-v0", "envs.generators:Layered"
    env = gym.make_vec(name, 3, problems=problems)

    def met(seed: int | list[int]) -> list[float]:
        env.reset(seed=seed)
        values: list[float] = []
        while len(values) < 6:
            info = env.step(np.zeros(3, np.int64))[-1]
            values += info.get("final_info", {}).get("value_s", np.zeros(0)).tolist()
        return values

    assert met(7) == met([7, 8, 9]) == met(7) != met([7, 9, 8])
    with pytest.raises(EnvError, match="2 seeds for 3 episodes: give one for each"):
        env.reset(seed=[1, 2])
