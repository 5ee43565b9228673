"""Stages with replicas: known answers, brute force, and what the command tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from placement.importers import save
from placement.planners.replicated import Replicated, StagePeriods, fewest, numbers, stage_periods
from placement.problem import Problem
from tests.problems import altered, problems, small_problem
from tests.problems import chain as edges


def chain(seconds, num_devices, *, size=0, params=0, memory=2**40, training=False) -> Problem:
    """A chain; links of 1 byte/s without latency, 4 micro-batches."""
    n = len(seconds)
    facts = {"device": {"kind": "npu"}, "graph": {"is_backward": [training] * n}}
    sizes = {"tensor_bytes": size, "param_bytes": params, "memory_bytes": memory}
    settings = {"link": (0.0, 1.0), "num_microbatches": 4, "max_phases": 100}
    table = np.tile(np.array(seconds)[:, None], (1, num_devices))
    return small_problem(table, edges(n), **facts, **sizes, **settings)


def stages(problem: Problem) -> tuple[float, list[tuple[int, int]]]:
    """The period, and (operators, replicas) of each stage."""
    stats = Replicated()(problem).stats
    parts = [(s["num_ops"], len(s["devices"])) for s in stats["stages"]]
    return stats["replicated_period_s"], parts


def test_a_phase_that_does_not_fit_is_said() -> None:
    """Its own bytes, 10 + 4 * 1, fit into 50; with 100 that the operator needs for itself it is
    10 + 1 + 100 in the second phase."""
    room = {"memory_bytes": [1000, 50], "profile": {"workspace_bytes": [100]}}
    problem = small_problem(
        [[1, 1]], tensors=[(0, 1, [])], param_bytes=10, objective="latency", max_phases=2, **room
    )
    solution = Replicated()(problem)
    assert solution.value_s == np.inf
    assert "device 'd1' needs 111 bytes, has 50" in solution.stats["infeasible"]


# --- known answers -------------------------------------------------------------------------------


def test_one_heavy_operator_is_replicated() -> None:
    # 1 s, 6 s, 1 s on eight devices: nothing to send, so everything everywhere is best: 1 s.
    assert stages(chain([1, 6, 1], 8))[0] == pytest.approx(1.0)
    # On five: 8 / 5 = 1.6 s, and no split is better.
    assert stages(chain([1, 6, 1], 5)) == (pytest.approx(1.6), [(3, 5)])
    # 9 bytes between two stages: 9 s alone; all on both devices sends nothing.
    assert stages(chain([3.0, 3.0], 2, size=9)) == (3.0, [(2, 2)])


def test_gradients_are_added_up_once_for_all_micro_batches() -> None:
    # One operator of 4 s, a gradient of 1 byte on 2 devices: 4 / 2 + 2 (there and back) / 4 s.
    problem = chain([4.0], 2, size=1, training=True)
    assert stages(problem) == (pytest.approx(2.5), [(1, 2)])
    assert Replicated()(problem).value_s == pytest.approx(2.5)  # as the simulator counts
    # Where nothing is trained, or in one memory, nothing is sent.
    assert stages(chain([4.0], 2, size=1))[0] == pytest.approx(2.0)
    host_problem = altered(problem, {"kind": "cpu"})
    assert stages(host_problem)[0] == Replicated()(host_problem).value_s == pytest.approx(2.0)
    # Large gradients: one device is better than replicas.
    assert stages(chain([4.0], 2, size=9, training=True)) == (4.0, [(1, 1)])


def test_gradients_are_sent_too() -> None:
    """Backward operators beside their forward ones: activations go ahead, gradients back.

    stage 0: f0 ----9----> f1      stage 1
             b0 <---9---- b1
    """
    facts = {"is_backward": [False, False, True, True], "param_bytes": [100, 100]}
    facts |= {"param_uses": [(0, 0), (1, 1)], "group": [0, 1, 1, 0]}
    some = {"tensor_bytes": [9, 0, 9, 0], "link": (0.0, 1.0), "num_microbatches": 4}
    kind = {"kind": "npu"}
    problem = small_problem(np.ones((4, 2)), edges(4), graph=facts, device=kind, **some)
    table = stage_periods(problem, np.arange(2, dtype=np.int32), np.arange(problem.num_devices))
    # Each stage computes for 2 s, sends 9 s and receives 9 s; both together send nothing.
    assert table.period_s[0, 0, 1] == table.period_s[0, 1, 2] == 9
    assert table.period_s[0, 0, 2] == 4


def test_what_does_not_fit_on_one_device_is_cut() -> None:
    period_s, parts = stages(chain([1.0] * 4, 4, params=10, memory=20))
    assert parts == [(2, 2), (2, 2)] and period_s == pytest.approx(1.0)
    # Not even one operator fits.
    stats = Replicated()(chain([1.0] * 4, 4, params=10, memory=5)).stats
    assert "stages" not in stats and "needs" in stats["infeasible"]


def test_a_hundred_equal_devices() -> None:
    period_s, parts = stages(chain([1.0] * 50, 100))
    assert period_s <= 50 / 100 * 1.1 and sum(r for _, r in parts) <= 100


def test_numbers_of_replicas() -> None:
    assert numbers(3).tolist() == [1, 2, 3]
    many = numbers(4096)
    assert many[0] == 1 and many[31] == 32 and many[-1] == 4096
    assert (many[1:] <= np.ceil(many[:-1] * 1.1)).all() and (np.diff(many) > 0).all()


# --- brute force ---------------------------------------------------------------------------------


def partitions(blocks: int, devices: int) -> Iterator[list[tuple[int, int, int]]]:
    """Every split of ``range(blocks)`` into stages with replicas."""
    if blocks == 0:
        yield []
        return
    for begin in range(blocks):
        for r in range(1, devices + 1):
            for rest in partitions(begin, devices - r):
                yield [*rest, (begin, blocks, r)]


@given(problems(max_ops=6))
@settings(max_examples=60, deadline=None)
def test_no_split_is_better(problem: Problem) -> None:
    graph = replace(problem.graph, is_backward=np.arange(problem.num_ops) % 2 > 0)
    problem = replace(problem, graph=graph, max_phases=12)
    block = np.arange(graph.num_groups, dtype=np.int32)
    table = stage_periods(problem, block, np.arange(problem.num_devices))
    period_s, parts = fewest(table, problem.num_devices)

    def slowest(split: list[tuple[int, int, int]]) -> float:
        return max(float(table.period_s[r - 1, a, b]) for a, b, r in split)

    every = [slowest(s) for s in partitions(len(block), problem.num_devices)]
    assert period_s == pytest.approx(min(every), rel=1e-9)
    if parts:
        assert slowest(parts) <= period_s * (1 + 1e-9)
        assert sum(r for _, _, r in parts) <= problem.num_devices


@given(problems(max_ops=6))
@settings(max_examples=60, deadline=None)
def test_the_table_says_what_a_slow_loop_says(problem: Problem) -> None:
    g = replace(problem.graph, is_backward=np.ones(problem.num_ops, bool))
    problem = replace(problem, graph=g)
    groups, devices = np.arange(g.num_groups, dtype=np.int32), np.arange(problem.num_devices)
    table = stage_periods(problem, groups, devices)
    cost_s = problem.link_latency_s.max() + g.tensor_bytes * problem.link_s_per_byte.max()
    if (matrix := problem.profile.transfer_s) is not None:  # a device sends itself nothing
        cost_s = np.where(np.eye(problem.num_devices), 0.0, matrix).max(axis=(1, 2))
    for a in range(problem.num_ops):
        for b in range(a + 1, problem.num_ops + 1):
            inside = set(range(a, b))
            received = sent = 0.0
            for t in range(g.num_tensors):
                users = set(g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]].tolist())
                src = int(g.tensor_src[t])
                received += cost_s[t] * (src >= 0 and src not in inside and bool(users & inside))
                sent += cost_s[t] * (src in inside and bool(users - inside))
            params = {p for op, p in zip(g.param_use_op, g.param_use, strict=True) if op in inside}
            own = sum(int(g.param_bytes[p]) for p in params)
            summed = 0.0
            if any(d.kind != "cpu" for d in problem.cluster.devices):
                for t in g.gradient_tensor.tolist():
                    summed += 2 * cost_s[t] * (int(g.tensor_src[t]) in inside)
            compute = problem.compute_s.max(axis=1)[a:b].sum()
            for k, r in enumerate(table.replicas.tolist()):
                extra = summed / problem.num_microbatches if r > 1 else 0.0
                wanted = max(compute, received, sent) / r + extra
                if np.isfinite(table.period_s[k, a, b]):
                    assert table.period_s[k, a, b] == pytest.approx(wanted, rel=1e-9, abs=1e-9)
                else:
                    in_flight = problem.max_in_flight * g.tensor_bytes.sum()
                    assert own + in_flight > problem.memory_bytes.min()


def test_an_empty_table() -> None:
    table = StagePeriods(np.array([1]), np.full((1, 3, 3), np.inf))
    assert fewest(table, 1) == (float("inf"), [])


# --- the command ---------------------------------------------------------------------------------


def test_for_machines(tmp_path: Path, says: Any) -> None:
    save(chain([1.0] * 4, 4, params=10, memory=20), tmp_path / "problem.json")
    plan = ["plan", str(tmp_path / "problem.json"), "--planner", "replicated", "--json"]
    got = says(plan).json
    assert got["replicated_period_s"] == pytest.approx(1.0)
    stage = {"first": "op0", "last": "op1", "num_ops": 2, "devices": ["d0", "d1"]}
    assert got["stages"][0] == stage | {"period_s": 1.0}
    assert got["assignment"]["op0"] == "d0" and got["assignment"]["op3"] == "d2"
