"""Searching environments: exact differences, the kernel's costs, rewards, who chooses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import typeof

from agents.planner import PolicyPlanner
from envs import guided_kernels
from envs.episodes import Episodes
from envs.guided import (
    NO_NETWORK,
    GuidedSearchEnv,
    GuidedSearchRules,
    begin,
    choice_of,
    state_of,
    tables_of,
)
from envs.guided_kernels import MOVE_FEATURES, SEARCH, TAKE, State, Tables, play
from envs.problems import EnvError, ProblemSet
from envs.refine import PAIR_FEATURES, RefineDevicePlacementEnv, RefineRules
from envs.rewards import log_speedups
from envs.vec import PlacementVecEnv
from placement.objective import Objective
from placement.problem import Problem
from placement.search.chooser import choose
from placement.search.evaluation import INFEASIBLE, Search, can_move
from placement.simulator import score
from placement.simulator.analytic import device_loads
from placement.timeline import steady_period
from tests.envs.test_envs import chain
from tests.executor.test_streamed import with_twins
from tests.problems import random_placement, random_problem, small_problem

RNG = np.random.default_rng


def test_one_compilation_serves_all_problems() -> None:
    """Every layout of arrays would be compiled anew, for a minute."""
    kinds = set()
    for seed in range(12):
        problem = random_problem(seed, grouped=seed % 2 == 0, unsupported=True)
        for objective in objectives_of(problem):
            tables = tables_of(problem.with_objective(objective))
            kinds.add((str(typeof(tables)), str(typeof(state_of(tables, 3)))))
    assert len(kinds) == 1


def objectives_of(problem: Problem) -> list[Any]:
    return [o for o in Objective if o != "energy" or problem.power is not None]


def started(problem: Problem, seed: int, number: int = 0) -> tuple[Tables, State]:
    tables = tables_of(problem)
    state = state_of(tables, 16)
    begin(tables, state, choice_of(problem, random_placement(problem, seed)), number, RNG(seed))
    return tables, state


def test_names() -> None:
    assert MOVE_FEATURES[0].startswith("hand") and MOVE_FEATURES[1].startswith("none")


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_the_kernel_evaluates_as_the_planners_do(seed: int) -> None:
    drawn = random_problem(seed, grouped=True, unsupported=True)
    if not can_move(drawn):
        return
    for objective in objectives_of(drawn):
        check_costs(drawn.with_objective(objective), seed)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_the_kernel_knows_where_the_parameters_are_of_devices_that_stream(seed: int) -> None:
    drawn = with_twins(seed)
    if can_move(drawn):
        check_costs(drawn.with_objective(Objective.PERIOD), seed)
        check_costs(drawn.with_objective(Objective.LATENCY), seed)


def check_costs(problem: Problem, seed: int) -> None:
    tables, state = started(problem, seed)
    for _ in range(3):
        cost = Search(problem).cost(state.moves.device.copy())
        expected = cost if np.isfinite(cost) else 2 * INFEASIBLE
        assert state.cost == pytest.approx(expected, rel=1e-9)
        play(tables, state, TAKE, int(np.argmax(state.count)), NO_NETWORK, 0.5, 0.5)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), m=st.integers(1, 40))
def test_steady_is_steady_period(seed: int, m: int) -> None:
    rng = np.random.default_rng(seed)
    gaps = np.tile(rng.random(int(rng.integers(1, 6))), 40)[:m] + (rng.random() < 0.3) * rng.random(
        m
    )
    finish, busiest = np.cumsum(gaps), float(rng.random())
    assert guided_kernels._steady(finish, busiest) == pytest.approx(
        steady_period(finish, busiest), rel=1e-12
    )


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000))
def test_what_is_offered_for_max_load_is_exact(seed: int) -> None:
    """A move described as changing the largest load by so much changes it by so much."""
    problem = random_problem(seed, grouped=True, unsupported=True, objective="max_load")
    if not can_move(problem):
        return
    _, state = started(problem, seed)
    for k in np.flatnonzero(state.count):
        device = state.moves.device.copy()
        moved = device.copy()
        size = int(state.count[k])
        moved[state.body[k, :size]] = state.where[k, :size]
        before = device_loads(problem, device[problem.graph.group])
        after = device_loads(problem, moved[problem.graph.group])
        f = dict(zip(MOVE_FEATURES, state.offered[k].tolist(), strict=True))
        old, new = int(device[state.body[k, 0]]), int(state.where[k, 0])
        if before.max() > 0:
            assert f["load of the target after the move, over the largest"] == pytest.approx(
                min(after[new] / before.max(), 10), rel=1e-5, abs=1e-6
            )
            assert f["load of the device left after the move, over the largest"] == pytest.approx(
                min(after[old] / before.max(), 10), rel=1e-5, abs=1e-6
            )
        if before.max() > 0 and after.max() > 0:
            named = "largest load after over before, log, times 10 (exact for max_load)"
            change = np.clip(10 * np.log(after.max() / before.max()), -10, 10)
            assert f[named] == pytest.approx(change, abs=1e-4)
    # Describing moves changes nothing.
    assert np.array_equal(state.moves.device, device)
    assert state.moves.load == pytest.approx(before)


def test_the_hand_score_of_max_load_is_the_energy_over_the_temperature() -> None:
    # Device loads 3 and 1; best so far 3; p = 2 ** 4 = 16; moving the operator of one second
    # makes both 2: ((2/3)^16 + (2/3)^16) - (1 + (1/3)^16), over the temperature 0.05.
    problem = chain([[1, 1], [2, 2], [1, 1]], latency_s=0.0).with_objective("max_load")
    tables = tables_of(problem)
    state = state_of(tables, 16)
    begin(tables, state, np.array([0, 0, 1], np.int32), 0, RNG(0))
    expected = -(2 * (2 / 3) ** 16 - 1 - (1 / 3) ** 16) / 0.05
    alone = (state.count == 1) & (state.body[:, 0] == 0)
    assert alone.any()
    assert state.offered[alone, 0] == pytest.approx(min(expected, 30), rel=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 8), min_size=1, max_size=200), st.sampled_from([0.0, 2.0, 1e9]))
def test_times_are_sorted_and_equal_ones_stand_as_they_were(
    times: list[float], more: float
) -> None:
    # ``more`` after the last begin: 2 fills buckets evenly, 1e9 puts all into the first.
    begins = np.round(np.array(times), 1)
    span = max(float(np.ptp(begins)) + more, 1e-300)
    order = guided_kernels._by_time(begins, begins.min(), span)
    assert order.tolist() == np.argsort(begins, kind="stable").tolist()


def test_the_critical_chain_by_hand() -> None:
    # a (4 s) and b (1 s) on two devices feed c: c waits for a; b is not critical.
    facts = {"tensor_bytes": 1, "link": (0.5,), "objective": "latency"}
    problem = small_problem([[4, 4], [1, 1], [1, 1]], [(0, 2), (1, 2)], **facts)
    tables = tables_of(problem)
    state = state_of(tables, 4)
    begin(tables, state, np.array([0, 1, 1], np.int32), 0, RNG(0))
    assert state.cost == pytest.approx(4 + 0.5 + 1)
    assert state.on_chain.tolist() == [1, 0, 1]
    assert state.when.tolist() == pytest.approx([0, 0, 4.5 / 5.5])
    # All on one device: everything waits for the device.
    begin(tables, state, np.array([0, 0, 0], np.int32), 0, RNG(0))
    assert state.on_chain.tolist() == [1, 1, 1]


@pytest.mark.parametrize("objective", ["latency", "period", "max_load", "piecewise_latency"])
def test_returns_are_the_improvement(objective: Any) -> None:
    problems = [random_problem(s, 14, 3, objective=objective) for s in range(4)]
    env = GuidedSearchEnv(problems, moves=40, again=0.0)
    rng = np.random.default_rng(0)
    for i, problem in enumerate(problems):
        obs, _ = env.reset(options={"problem": i})
        first = env.rules._states[0][i].best_cost
        total, over, steps = 0.0, False, 0
        while not over:
            assert obs in env.observation_space
            action = int(rng.choice(np.flatnonzero(obs["mask"])))
            obs, reward, over, _, info = env.step(action)
            assert 0 <= reward <= 1
            total += reward
            steps += 1
        assert steps == 40
        assert info["value_s"] == pytest.approx(score(problem, info["placement"])[0])
        if first < INFEASIBLE and info["value_s"] > 0.1 * first:
            assert total == pytest.approx(np.log(first / info["value_s"]), abs=1e-6)


@pytest.mark.parametrize("objective", ["latency", "max_load"])
@pytest.mark.parametrize(
    "chooser", [guided_kernels.POLICY, guided_kernels.HAND, guided_kernels.UNIFORM]
)
def test_whoever_chooses_finds_the_best_of_a_small_problem(objective: Any, chooser: int) -> None:
    """Seven operators on three devices: the optimum of all 2,187 placements."""
    rng = np.random.default_rng(5)
    problem = chain(rng.random((7, 3)) + 0.2, latency_s=0.1).with_objective(objective)
    every = np.stack(np.meshgrid(*[np.arange(3)] * 7), axis=-1).reshape(-1, 7).astype(np.int32)
    tables = tables_of(problem)
    state = state_of(tables, 8)
    begin(tables, state, np.zeros(7, np.int32), 0, RNG(0))
    first = float(state.cost)
    for number in range(6):
        begin(
            tables,
            state,
            state.best.copy() if number else np.zeros(7, np.int32),
            number,
            RNG(number),
        )
        play(tables, state, SEARCH + chooser, 300, NO_NETWORK, 0.0, 1.0)
    best = float(score(problem, every).min())
    assert best < 0.8 * first
    assert state.best_cost == pytest.approx(best, rel=1e-6)
    assert score(problem, state.best)[0] == pytest.approx(best, rel=1e-6)


def test_the_environment_is_the_kernel() -> None:
    """Actions taken one by one in the environment make the same search as in one call."""
    problem = random_problem(3, 15, 3, objective="latency")
    tables, state = started(problem, 7)
    twin_tables, twin = started(problem, 7)
    for i in range(30):
        logits = np.where(state.count > 0, state.offered[:, 0], -np.inf).astype(np.float64)
        used, move = (i + 1) / 30, choose(state.draws.random, logits, 16)
        play(tables, state, TAKE, move, NO_NETWORK, used, used)
    play(twin_tables, twin, SEARCH + guided_kernels.POLICY, 30, NO_NETWORK, 0.0, 1.0)
    assert np.array_equal(state.offered, twin.offered)
    assert np.array_equal(state.moves.device, twin.moves.device)
    assert (state.cost, state.step) == (twin.cost, twin.step)


def test_episodes_begin_at_the_best_again() -> None:
    problem = random_problem(3, 15, 3, objective="max_load")
    rules = GuidedSearchRules(ProblemSet.build([problem]), 2, moves=20, again=1.0)
    env = PlacementVecEnv(Episodes(rules))
    env.reset()
    best, over, lengths = np.inf, 0, []
    for _ in range(40):
        masks = np.stack(env.env_method("action_masks"))
        _, _, done, infos = env.step(masks.shape[1] - 1 - np.argmax(masks[:, ::-1], axis=1))
        for b in np.flatnonzero(done):
            best = min(best, infos[b]["value_s"])
            lengths.append(infos[b]["episode"]["l"])
            assert rules._states[b][0].first_cost == pytest.approx(best)
        over += int(done.sum())
    assert rules.best_s[0] == best
    assert len(set(lengths)) > 2 and max(lengths) <= 20
    # 1 for each beginning, 16 for each of 80 steps
    assert rules.num_evaluations == 2 + over + 16 * 80


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_what_refine_observes_is_exact(seed: int) -> None:
    problem = random_problem(seed, grouped=True, unsupported=True, objective="max_load")
    env = RefineDevicePlacementEnv([problem], starts=[random_placement(problem, seed)])
    obs, _ = env.reset(seed=0)
    device = env.rules._now[0].copy()
    before = device_loads(problem, device[problem.graph.group])
    names = {text: i for i, text in enumerate(PAIR_FEATURES)}
    for g, d in np.argwhere(obs["mask"]):
        moved = device.copy()
        moved[g] = d
        after = device_loads(problem, moved[problem.graph.group])
        f = obs["pairs"][g, d]
        if before.max() > 0 and can_move(problem):
            load = f[names["load of the device after the move, over the largest now"]]
            assert load == pytest.approx(min(after[d] / before.max(), 10), rel=1e-5, abs=1e-6)


def test_refine_by_hand() -> None:
    problem = chain([[2, 1], [2, 4]])  # [0, 0] takes 4, [1, 0] 3.5, [1, 1] 5
    zeros = np.zeros(2, np.int32)
    for best_so_far, rewards in ((True, [4 / 3.5, 1]), (False, [4 / 3.5, 3.5 / 5])):
        env = RefineDevicePlacementEnv([problem], starts=[zeros], moves=2, best_so_far=best_so_far)
        env.reset(seed=0)
        assert env.action_masks().tolist() == [False, True, False, True]
        _, reward, over, _, _ = env.step(0 * 2 + 1)
        assert (reward, over) == (pytest.approx(np.log(rewards[0])), False)
        _, reward, over, _, info = env.step(1 * 2 + 1)
        assert (reward, over) == (pytest.approx(np.log(rewards[1])), True)
        assert info["value_s"] == pytest.approx(3.5)
        assert info["placement"] == (1, 0)


def test_refine_pays_for_no_way_round() -> None:
    """Out of memory and back, or slow by steps and fast at once: the sum is of the two ends."""
    seconds = [[1.0, 1e3], [1.0, 1e2], [1.0, 10.0]]
    for memory_bytes, way in ((250, [1, 3, 5, 4, 2, 0]), (10**9, [1, 3, 5, 0, 2, 4])):
        problem = chain(seconds, memory_bytes=memory_bytes)  # 100 bytes each
        problems = ProblemSet.build([problem])
        start = np.array([0, 0, 1], np.int32)
        rules = RefineRules(problems, 1, [start], moves=20, best_so_far=False)
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


def test_refine_with_another_evaluator() -> None:
    def count(problem: Problem, placements: np.ndarray) -> np.ndarray:
        """As many seconds as operators on device 0."""
        return 1.0 + (placements == 0).sum(axis=1)

    problem = chain([[1, 1]] * 3)
    start = np.zeros(3, np.int32)
    env = RefineDevicePlacementEnv([problem], starts=[start], evaluator=count, reference_s=[1])
    env.reset(seed=0)
    assert env.step(1)[1] == pytest.approx(np.log(4 / 3))
    assert env.rules.num_evaluations == 2


@pytest.mark.parametrize("objective", ["max_load", "latency"])
def test_operators_of_no_seconds(objective: Any) -> None:
    """The best load may be 0, and a group may take nothing on one device and long on another."""
    seconds = np.zeros((6, 2))
    seconds[:, 1] = np.geomspace(1e-9, 1e9, 6)
    problem = chain(seconds).with_objective(objective)
    env = GuidedSearchEnv([problem], moves=20, width=8, starts=[np.arange(6, dtype=np.int32) % 2])
    for seed in range(5):
        obs, done = env.reset(seed=seed)[0], False
        while not done:
            assert env.observation_space.contains(obs)
            obs, _, done, _, _ = env.step(int(RNG(seed).choice(np.flatnonzero(obs["mask"]))))
    planner = PolicyPlanner("untrained", evaluations=200, baseline="single_device")
    assert planner(problem).value_s == score(problem, np.zeros(6, np.int32))[0]


def test_what_cannot_move_has_no_group_and_no_device() -> None:
    env = GuidedSearchEnv([random_problem(4, 5, 3, unsupported=True)], moves=30, width=8)
    obs, stale = env.reset(seed=0)[0], 0
    for step in range(29):
        off = obs["mask"] == 0
        assert not obs["group"][off].any() and not obs["to_device"][off].any()
        stale += np.count_nonzero(off)
        obs = env.step(int(RNG(step).choice(np.flatnonzero(obs["mask"]))))[0]
    assert stale > 0


def test_what_users_get_wrong() -> None:
    problem = chain([[1, 2]])
    with pytest.raises(EnvError, match="leave evaluator out"):
        GuidedSearchEnv([problem], evaluator=lambda p, x: np.ones(len(x)))
    with pytest.raises(EnvError, match="nothing to search"):
        GuidedSearchEnv([chain([[1]])])
    with pytest.raises(EnvError, match="moves = 0"):
        GuidedSearchEnv([problem], moves=0)
    with pytest.raises(EnvError, match="2 starts for 1 problems"):
        GuidedSearchEnv([problem], starts=[np.zeros(1, np.int32)] * 2)
