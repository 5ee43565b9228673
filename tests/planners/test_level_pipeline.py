"""Levels, balanced over teams of devices that form a pipeline."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.graph import levels
from placement.planners import load
from placement.planners.level_balance import balance
from placement.planners.level_pipeline import level_s, stages
from placement.testing import check_planner
from tests.problems import DIAMOND, chain, random_problem, small_problem


@settings(max_examples=60, deadline=None)
@given(num_stages=st.integers(1, 4), num_levels=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_stages_have_the_least_slowest_stage(num_stages: int, num_levels: int, seed: int) -> None:
    seconds = np.random.default_rng(seed).integers(0, 5, (num_stages, num_levels)).astype(float)

    def slowest(stage: np.ndarray) -> float:
        return max(seconds[s, stage == s].sum() for s in range(num_stages))

    stage_of = stages(seconds)
    every = itertools.combinations_with_replacement(range(num_stages), num_levels)
    assert (np.diff(stage_of) >= 0).all() and stage_of.min() >= 0 and stage_of.max() < num_stages
    assert slowest(stage_of) == min(slowest(np.array(stage)) for stage in every)


def test_seconds_of_a_level_on_a_team() -> None:
    # Level 0: 6 s on d0 or 3 s on d1: together 2 s, but one operator takes 3. Level 1: two
    # operators of 4 s on either: 4 s. Level 2: only d2 can, which is not of the team.
    inf = np.inf
    problem = small_problem([[6, 3, 1], [4, 4, 1], [4, 4, 1], [inf, inf, 7]], DIAMOND)
    team = np.array([True, True, False])
    level = levels(problem.graph.edges, problem.num_ops)
    assert level_s(problem, level, team).tolist() == [3, 4, 0]


def test_chains_become_a_pipeline_where_level_balance_cannot() -> None:
    # A chain has one operator in each level: level balance deals them out in turn and pays for
    # every hand-over; the pipeline pays once.
    #   d0 | op0 1  op1 2  op2 3 | op0 ...
    #   d1 |                     | op3 4  op4 2
    seconds = [[1, 1], [2, 2], [3, 3], [4, 4], [2, 2]]
    problem = small_problem(seconds, chain(5), link=(0.5,))
    solution = load("level_pipeline")(problem)
    assert solution.placement.tolist() == [0, 0, 0, 1, 1]
    assert solution.value_s == pytest.approx(6)


def test_wide_levels_stay_whole_where_that_is_better() -> None:
    # One level of four unequal operators: nothing to cut, one team of both devices.
    problem = small_problem([[3, 3], [2, 2], [2, 2], [1, 1]])
    solution = load("level_pipeline")(problem)
    assert solution.value_s == pytest.approx(4)
    assert solution.placement.tolist() == load("level_balance")(problem).placement.tolist()


def test_two_teams_of_two() -> None:
    # Four levels of two operators, 1 s each, every hand-over dear: two teams, each with two
    # chains. d0 and d1 have the levels 0 and 1, d2 and d3 the others.
    edges = [(a, a + 2) for a in range(6)]
    problem = small_problem(np.ones((8, 4)), edges, link=(0.4,))
    level = levels(problem.graph.edges, problem.num_ops)
    team = np.repeat(np.array([[1, 1, 0, 0], [0, 0, 1, 1]], bool), 2, axis=0)
    choice = balance(problem, level, team=team)
    assert [set(choice[level == k].tolist()) for k in range(4)] == [{0, 1}] * 2 + [{2, 3}] * 2
    assert choice[0] == choice[2] and choice[4] == choice[6]  # chains stay where they are


def test_a_group_that_its_team_cannot_run_goes_elsewhere() -> None:
    problem = small_problem([[1, np.inf], [np.inf, 1]], [(0, 1)])
    team = np.array([[False, True], [True, False]])
    level = levels(problem.graph.edges, problem.num_ops)
    assert balance(problem, level, team=team).tolist() == [0, 1]


@pytest.mark.parametrize("seed", range(12))
def test_contract_and_never_worse_than_level_balance(seed: int) -> None:
    problem = random_problem(seed, grouped=seed % 2 == 1, unsupported=seed % 3 == 0)
    check_planner(load("level_pipeline"), [problem, problem.with_objective("latency")])
    if not problem.memory_may_bind:
        alone = load("level_balance")(problem).value_s
        assert load("level_pipeline")(problem).value_s <= alone * (1 + 1e-12)
