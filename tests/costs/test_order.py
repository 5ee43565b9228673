"""The order of operators within a micro-batch: by rank, or while parameters are cached."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.costs import measure as measure_module
from placement.costs.measure import measure
from placement.executor import Executor
from placement.graph import OpGraph, reuse_position
from placement.plan import make_plan
from placement.planners import load
from placement.problem import Problem
from placement.profile import Profile
from placement.simulator import simulate, simulate_reference
from placement.workloads.lstm import lstm
from placement.workloads.tiny import tiny_cnn
from tests.planners.test_time_slices import unrolled
from tests.problems import altered, random_graph, random_placement, random_problem

CORE = min(os.sched_getaffinity(0))
ONE = Cluster("one", (Device("cpu:0", "cpu", (CORE,)),))


def by_definition(graph: OpGraph) -> list[int]:
    """The order, from the words of ``reuse_position``."""
    params = [set(graph.param_use[graph.param_use_op == n]) for n in range(graph.num_ops)]
    producers = [set(graph.edges[graph.edges[:, 1] == n, 0]) for n in range(graph.num_ops)]
    order: list[int] = []
    while len(order) < graph.num_ops:
        ready = [n for n in range(graph.num_ops) if n not in order and producers[n] <= set(order)]

        def urgency(n: int) -> tuple[float, int]:
            read = [i for i, done in enumerate(order) if params[n] & params[done]]
            return (-np.inf if not params[n] else -max(read, default=-1), n)

        order.append(min(ready, key=urgency))
    return order


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_reuse_is_what_it_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(1, 16)))
    assert np.argsort(reuse_position(graph)).tolist() == by_definition(graph)


def test_cells_run_layer_by_layer_however_the_loops_are_written() -> None:
    # The graph's own order is step by step: w0,0 u0,0 f0,0 w1,0 u1,0 f1,0 w0,1 ...
    graph = unrolled(2, 3, step_major=True)
    order = [graph.op_name[n] for n in np.argsort(reuse_position(graph))]
    # All w of layer 0 are ready first (the sequence is there), then its chain of u and f, and
    # so for layer 1, where w1,0 was ready as soon as f0,0 was done.
    w, chain = ["w0,0", "w0,1", "w0,2"], ["u0,0", "f0,0", "u0,1", "f0,1", "u0,2", "f0,2"]
    assert order[:10] == ["split", *w, *chain]
    assert {name[1] for name in order[10:-1]} == {"1"}


def test_without_shared_parameters_reuse_is_the_order_of_the_graph_in_a_chain() -> None:
    graph = OpGraph.build(
        "chain", list("abcd"), range(3), [1] * 3, [(i, i + 1) for i in range(3)],
        param_bytes=[1, 1], param_uses=[(0, 0), (2, 1)],
    )  # fmt: skip
    assert reuse_position(graph).tolist() == [0, 1, 2, 3]


def reused(problem: Problem) -> Problem:
    return altered(problem, provenance={"order": "reuse"})


def test_problems_run_in_the_order_of_their_profile(tmp_path: Path) -> None:
    problem = random_problem(3, 12, 3)
    assert problem.profile.order == "rank"
    assert problem.priority.tolist() == problem.rank_position.tolist()
    other = reused(problem)
    assert other.priority.tolist() == reuse_position(problem.graph).tolist()
    assert other.rank_position.tolist() == problem.rank_position.tolist()
    # The order goes where the profile goes: into files, to other clusters, into plans.
    other.profile.save(tmp_path / "p.npz")
    assert Profile.load(tmp_path / "p.npz").order == "reuse"
    assert other.profile.for_cluster(other.cluster).order == "reuse"
    easy = reused(random_problem(5, 8, 2))
    plan = make_plan(easy, load("single_device")(easy), planner="single_device")
    assert plan.priority == tuple(reuse_position(easy.graph).tolist())


def test_heft_keeps_its_order_of_ranks() -> None:
    for seed in range(5):
        problem = random_problem(seed, 12, 3)
        a, b = (load("heft")(p).placement.tolist() for p in (problem, reused(problem)))
        assert a == b


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_kernel_equals_reference_in_either_order(seed: int) -> None:
    problem = reused(random_problem(seed))
    placement = random_placement(problem, np.random.default_rng(seed))
    a, b = simulate(problem, placement), simulate_reference(problem, placement)
    np.testing.assert_allclose(a.end_s, b.end_s, rtol=1e-9)
    assert a.transfers.tolist() == b.transfers.tolist()


@pytest.mark.parametrize("order", ["rank", "reuse"])
def test_the_executor_runs_in_that_order(order: str) -> None:
    graph = capture(*lstm(layers=2, steps=3, hidden=4))
    seconds = np.ones((graph.num_ops, 1))
    profile = Profile(ONE.device_names, seconds, seconds * 0, provenance={"order": order})
    problem = Problem(graph, ONE, profile)
    timeline = Executor(problem).run(np.zeros(graph.num_ops, np.int32), num_microbatches=2)
    for start_s in timeline.start_s:
        assert np.argsort(start_s).tolist() == np.argsort(problem.priority).tolist()
    expected = simulate(problem, np.zeros(graph.num_ops, np.int32), num_microbatches=1)
    assert np.argsort(expected.start_s[0]).tolist() == np.argsort(problem.priority).tolist()


@pytest.mark.parametrize(
    ("takes", "order"),
    [
        ((0.5,), "reuse"),
        ((0.99,), "rank"),
        ((2.0,), "rank"),
        # Every kind of device has a say, and the second CPU is not asked.
        ((0.5, 7.0, 1.0), "reuse"),
        ((0.5, 7.0, 1.5), "rank"),
        ((1.0, 7.0, 0.5), "reuse"),
        ((1.0, 7.0, 1.0), "rank"),
    ],
)
def test_the_faster_order_is_measured(monkeypatch, takes, order):
    graph = capture(*lstm(layers=2, steps=3, hidden=4))
    by_reuse = reuse_position(graph).tolist()

    def run(runner, inputs, times):
        slow = takes[int(runner.placement[0])] if runner._priority == by_reuse else 1.0
        return np.full(graph.num_ops, slow)

    monkeypatch.setattr(measure_module, "run_seconds", run)
    devices = (Device("cpu:0"), Device("cpu:1"), Device("cuda:0", "cuda"))[: len(takes)]
    inputs = graph.program.timing_inputs()
    chosen, position = measure_module.better_order(graph, Cluster("c", devices), inputs)
    assert chosen == order
    assert (position.tolist() == by_reuse) == (order == "reuse")


def test_parameters_that_are_read_once_leave_nothing_to_measure(monkeypatch):
    graph, runs = capture(*tiny_cnn()), []

    def run(runner, inputs, times):
        runs.append(runner)
        return np.ones(graph.num_ops)

    monkeypatch.setattr(measure_module, "run_seconds", run)
    assert measure_module.better_order(graph, ONE, graph.program.timing_inputs())[0] == "rank"
    assert len(runs) == 1  # the first look, for the ranks


def test_a_measured_profile_knows_its_order() -> None:
    profile = measure(capture(*lstm(layers=1, steps=3, hidden=4)), ONE, repeats=1)
    assert profile.order in ("rank", "reuse") and profile.provenance["order"] == profile.order
