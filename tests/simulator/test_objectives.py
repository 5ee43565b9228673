"""Analytic objectives: drawn examples, and kernels against what they mean in plain Python."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement import importers, planners, simulator
from placement.bounds import fastest_end_s, lower_bounds
from placement.bounds.loads import balance_prices, priced
from placement.problem import Problem, ProblemError
from placement.simulator import analytic
from placement.simulator.analytic import device_loads, load_moves, piecewise_latency
from placement.simulator.analytic_kernels import apply_move
from tests.problems import (
    DIAMOND,
    altered,
    every_placement,
    random_placement,
    random_problem,
    small_problem,
)


def make(edges, acc_s, cpu_s, cost_s, *, accelerators=2, cpus=1, **more) -> Problem:
    """Operators 0, 1, ... on equal accelerators and CPUs; ``cost_s`` to move an output once."""
    names = [f"acc:{i}" for i in range(accelerators)] + [f"cpu:{i}" for i in range(cpus)]
    on_acc = np.array([name.startswith("acc") for name in names])
    seconds = np.where(on_acc, np.array(acc_s)[:, None], np.array(cpu_s)[:, None])
    on = {"devices": names, "device": {"kind": [name[:3] for name in names]}}
    on |= {"memory_bytes": np.where(on_acc, more.pop("memory_bytes", 2**40), 2**63 - 1)}
    facts = {"graph": {"op_name": [str(i) for i in range(len(acc_s))]}, "objective": "max_load"}
    facts |= {"profile": {"io_s": np.array(cost_s)[:, None] * on_acc}}
    return small_problem(seconds, edges, **facts | on | more)


def draw_problem(seed: int, num_ops: int | None = None) -> Problem:
    """Random, with little memory; in half of them devices write and read tensors, as stated."""
    rng = np.random.default_rng(seed)
    options = {"grouped": True, "unsupported": True, "objective": "max_load"}
    problem = random_problem(seed, num_ops, **options)
    shape = problem.graph.num_tensors, problem.num_devices
    io_s = rng.random(shape) if rng.random() < 0.5 else None
    devices = {"kind": lambda d: ["acc", "acc", "acc", "cpu"][int(rng.integers(4))]}
    devices |= {"memory_bytes": lambda d: int(rng.integers(60, 400))}
    return altered(problem, devices, io_s=io_s)


def draw_placements(problem: Problem, seed: int) -> np.ndarray:
    return np.array([random_placement(problem, seed + k) for k in range(5)])


def test_max_load_of_a_drawn_example() -> None:
    #   0 --> 1 --> 3       costs 1, 2, 4, 8 to move the output of 0, 1, 2, 3 once
    #    \--> 2 --> 3       acc:0 has 0, 1;  acc:1 has 2;  cpu:0 has 3
    problem = make(DIAMOND, [10, 20, 30, 40], [100, 200, 300, 400], [1, 2, 4, 8])
    placement = np.array([0, 0, 1, 2])
    # acc:0: compute 30, sends 0 (to 2) and 1 (to 3): 33.  acc:1: 30, receives 0, sends 2: 35.
    # The CPU computes 400 and never pays for a transfer.
    assert device_loads(problem, placement).tolist() == [33, 35, 400]
    assert simulator.score(problem, placement).tolist() == [400]
    # Both consumers on one other device: 0 is sent once, and received once.
    assert device_loads(problem, np.array([0, 1, 1, 1])).tolist() == [11, 91, 0]
    # Consumers on two other devices: the producer still pays once, each receiver once.
    three = make([(0, 1), (0, 2)], [10, 20, 30], [0, 0, 0], [1, 0, 0], accelerators=3)
    assert device_loads(three, np.array([0, 1, 2])).tolist() == [11, 21, 31, 0]


def test_piecewise_latency_of_drawn_examples() -> None:
    chain = [(0, 1), (1, 2), (2, 3)]
    times = ([1, 2, 3, 4], [10, 20, 30, 40], [0.1, 0.2, 0.3, 0.4])

    def value(edges: list[tuple[int, int]], placement: list[int]) -> float:
        problem = make(edges, *times, objective="piecewise_latency")
        scored = float(simulator.score(problem, placement)[0])
        assert scored == pytest.approx(piecewise_latency(problem, np.array(placement)))
        return scored

    # One piece: nothing is moved.
    assert value(chain, [0, 0, 0, 0]) == pytest.approx(1 + 2 + 3 + 4)
    # acc:0 has 0 and 2, 3, cut by 1 on the CPU into two pieces of one accelerator:
    # [0 computes 1, writes .1] [1 on the CPU 20] [reads .2, 2 and 3 compute 7]
    assert value(chain, [0, 2, 0, 0]) == pytest.approx(1.1 + 20 + 0.2 + 7)
    # CPUs run side by side however many operators they have.
    assert value([(0, 3), (1, 3), (2, 3)], [2, 2, 2, 2]) == pytest.approx(30 + 40)
    # 1 and 2 are one call, which waits for 0 although 1 needs nothing.
    assert value([(0, 2), (1, 3), (2, 3)], [2, 0, 0, 0]) == pytest.approx(10 + 0.1 + 9)
    # acc:0 {0, 3} waits for 2, acc:1 {1, 2} waits for 0: neither call can start.
    assert value([(0, 1), (2, 3)], [0, 1, 1, 0]) == np.inf


def test_pieces_that_wait_for_each_other_are_named() -> None:
    # acc:0 {0, 3} waits for 2, acc:1 {1, 2} waits for 0; 4 only waits for them.
    times = ([1] * 5, [1] * 5, [0] * 5)
    problem = make([(0, 1), (2, 3), (3, 4)], *times, objective="piecewise_latency")
    circles = analytic.circle(problem, [0, 1, 1, 0, 2])
    assert sorted((d, ops.tolist()) for d, ops in circles) == [(0, [0, 3]), (1, [1, 2])]
    # Dealt out like cards over three accelerators: 0 3 | 1 4 | 2 wait as 0 -> 4, 1 -> 3.
    problem = make([(0, 4), (1, 3)], *times, accelerators=3, cpus=0, objective="piecewise_latency")
    stderr = planners.load("round_robin")(problem).stats["infeasible"]
    assert "2 pieces wait for each other" in stderr and "memory" not in stderr
    assert "2 operators of 'acc:0' from 0 ('0')" in stderr and "'acc:1' from 1 ('1')" in stderr


@given(st.integers(0, 10**6))
def test_a_circle_is_told_where_and_only_where_the_latency_is_inf(seed: int) -> None:
    problem = draw_problem(seed).with_objective("piecewise_latency")
    edges = set(map(tuple, problem.graph.edges.tolist()))
    for placement in draw_placements(problem, seed):
        circles = analytic.circle(problem, placement)
        assert bool(circles) == np.isinf(piecewise_latency(problem, placement))
        for (_, piece), (_, awaited) in zip(circles, [*circles[1:], *circles[:1]], strict=True):
            assert any((int(a), int(b)) in edges for a in awaited for b in piece)
            assert not set(piece) & set(awaited)


@given(st.integers(0, 10**6))
def test_kernels_equal_the_references(seed: int) -> None:
    problem = draw_problem(seed)
    rows = draw_placements(problem, seed)
    loads, held = analytic.evaluate(problem, rows)
    expected = [device_loads(problem, p).max() for p in rows]
    np.testing.assert_allclose(loads, expected, rtol=1e-12)
    assert held.tolist() == [problem.param_bytes_on(p).tolist() for p in rows]
    fits = (held <= problem.memory_bytes).all(axis=1)
    scores = simulator.score(problem, rows)
    np.testing.assert_array_equal(np.isfinite(scores), fits & np.isfinite(expected))

    latency = analytic.evaluate(problem.with_objective("piecewise_latency"), rows)[0]
    np.testing.assert_allclose(latency, [piecewise_latency(problem, p) for p in rows], rtol=1e-12)


@given(st.integers(0, 10**6))
def test_moves_equal_evaluation_from_scratch(seed: int) -> None:
    problem = draw_problem(seed)
    rng = np.random.default_rng(seed)
    group = problem.graph.group
    tables, state = load_moves(problem, random_placement(problem, seed))
    for _ in range(12):
        g, device = (int(rng.integers(x)) for x in problem.group_compute_s.shape)
        if not np.isfinite(problem.group_compute_s[g, device]):
            continue
        moved = np.where(group == g, device, state.device[group])
        apply_move(tables, state, g, device)
        np.testing.assert_allclose(state.load, device_loads(problem, moved), atol=1e-12)
        assert state.held.tolist() == problem.param_bytes_on(moved).tolist()
        assert state.device[group].tolist() == moved.tolist()


def test_memory_and_support() -> None:
    sizes = dict(param_bytes=[60, 50], memory_bytes=100)
    problem = make([(0, 1)], [1, 1], [5, 5], [0, 0], **sizes)
    # Only accelerators are limited: 110 bytes do not fit on one, but do on the CPU.
    assert simulator.score(problem, [[0, 0], [0, 1], [2, 2]]).tolist() == [np.inf, 1, 10]
    only_cpu = make([(0, 1)], [np.inf, 1], [5, 5], [0, 0])
    assert simulator.score(only_cpu, [[0, 0], [2, 0]]).tolist() == [np.inf, 5]
    with pytest.raises(ProblemError, match="cannot run"):
        load_moves(only_cpu, [0, 0])
    with pytest.raises(ProblemError, match="unknown; use one of"):
        problem.with_objective("speed")


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_bounds_hold_for_every_placement(seed: int) -> None:
    problem = draw_problem(seed, num_ops=5)
    rows = every_placement(problem)
    bounds = lower_bounds(problem)
    for objective in ("max_load", "piecewise_latency"):
        best = simulator.score(problem.with_objective(objective), rows).min()
        assert bounds[objective] <= best * (1 + 1e-12)


def test_values_of_the_original_programs(shared: Path) -> None:
    """Everything on one accelerator or on the CPUs, and both bounds, for every file."""
    methods = ("one_accelerator", "all_cpu", "balance_bound", "critical_path_bound")
    folder = shared / "data" / "dnn_partitioning"
    truth = json.loads((folder / "truth.json").read_text())
    rows = [row for row in truth if row["method"] in methods]
    assert len(rows) >= 40
    for row in rows:
        problem = importers.load(folder / row["file"], objective=row["objective"])
        device = 0 if row["method"] == "one_accelerator" else problem.num_devices - 1
        everything = np.full(problem.num_ops, device)
        if row["method"] == "critical_path_bound":
            bound_s = float(fastest_end_s(problem).max())
        elif row["method"] == "balance_bound":
            seconds = problem.group_compute_s
            bound_s = priced(seconds, balance_prices(seconds)).sum()
        else:
            bound_s = analytic.evaluate(problem, everything)[0][0]
            fits = np.isfinite(simulator.score(problem, everything)[0])
            assert fits == (row["status"] == "feasible")
        assert bound_s * 1e3 == pytest.approx(row["value"], rel=1e-9), row
