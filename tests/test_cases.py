"""What people brought and what came out wrong, one section a kind: each with the right value."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from problems import random_problem

from placement import importers
from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.planners import load
from placement.planners._search import cannot_fit
from placement.problem import Problem
from placement.profile import Profile
from placement.simulator import score

# --- training ------------------------------------------------------------------------------------

# --- capture -------------------------------------------------------------------------------------

# --- exports -------------------------------------------------------------------------------------

# --- ONNX and tight memory -----------------------------------------------------------------------


def _onnx(
    tmp_path: Path, nodes: Any, x: list[Any], y: list[Any], opset: int = 17, **more: Any
) -> Path:
    """A model of one input x and one output y, with weights w of 4 kernels of 3x3x3."""
    onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
    h, float_ = onnx.helper, onnx.TensorProto.FLOAT
    told = {k: [h.make_tensor_value_info(n, float_, s) for n, s in v] for k, v in more.items()}
    weights = [h.make_tensor("w", float_, [4, 3, 3, 3], np.zeros(108))]
    weights += [onnx.numpy_helper.from_array(np.int64(3), "three")]
    weights += [
        onnx.numpy_helper.from_array(np.float32(v), n) for n, v in (("zero", 0), ("one", 1))
    ]
    graph = h.make_graph(
        [h.make_node(op, reads, makes, **attributes) for op, reads, makes, attributes in nodes],
        "g",
        [h.make_tensor_value_info("x", float_, x)],
        [h.make_tensor_value_info("y", float_, y)],
        weights,
        **told,
    )
    path = tmp_path / "model.onnx"
    onnx.save(h.make_model(graph, opset_imports=[h.make_opsetid("", opset)]), path)
    return path


def test_sizes_that_a_tool_left_behind_are_neither_asked_for_nor_believed(tmp_path: Path) -> None:
    stale = "floor((width - 1)/2) + 1"
    nodes = [
        ("Conv", ["x", "w"], ["a"], {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ("Shape", ["a"], ["s"], {}),
        ("Gather", ["s", "three"], ["n"], {"axis": 0}),
        ("Cast", ["n"], ["f"], {"to": 1}),
        ("Range", ["zero", "f", "one"], ["grid"], {}),
        ("Add", ["a", "grid"], ["y"], {}),
    ]
    declared = [("a", ["batch", 4, "rows", 9]), ("grid", [stale])]
    path = _onnx(tmp_path, nodes, ["batch", 3, "height", "width"], ["batch"], value_info=declared)
    sizes = {"batch": 2, "height": 16, "width": 32}
    assert importers.load(path, dims=sizes).graph.tensor_bytes.tolist() == [
        2 * 3 * 16 * 32 * 4, 2 * 4 * 8 * 16 * 4, 4 * 8, 8, 4, 16 * 4, 2 * 4 * 8 * 16 * 4
    ]  # fmt: skip
    with pytest.raises(importers.FormatError, match=r"= 1 contradicts the size of 'grid'.* is 16"):
        importers.load(path, dims={**sizes, stale: 1})
    with pytest.raises(importers.FormatError, match=r"'x' has no size on axis 3.*--dim width=1"):
        importers.load(path, dims={"batch": 2, "height": 16})


@pytest.mark.parametrize("unsaid", [-1, 0, "?", "", None])
def test_any_size_is_set_by_tensor_and_axis(tmp_path: Path, unsaid: Any) -> None:
    nodes = [("Conv", ["x", "w"], ["y"], {})]
    path = _onnx(tmp_path, nodes, [unsaid, 3, 8, unsaid], [unsaid, 4, 6, unsaid])
    with pytest.raises(importers.FormatError, match=r"axis 0; set it: --dim x\.0=1"):
        importers.load(path, dims={"x.3": 9})
    graph = importers.load(path, dims={"x.0": 2, "x.3": 9}).graph
    assert graph.tensor_bytes.tolist() == [2 * 3 * 8 * 9 * 4, 2 * 4 * 6 * 7 * 4]


def test_an_output_that_nothing_reads_needs_no_size(tmp_path: Path) -> None:
    nodes = [("Dropout", ["x"], ["d", "mask"], {}), ("Conv", ["d", "w"], ["y"], {})]
    path = _onnx(tmp_path, nodes, [1, 3, 8, 8], [1, 4, 6, 6], opset=9)
    assert importers.load(path).num_ops == 2


def _packing(sizes: list[int], memory_bytes: int) -> Problem:
    """A chain of operators with parameters of these sizes, on three devices."""
    n = len(sizes)
    graph = OpGraph.build(
        "packing",
        [f"op{i}" for i in range(n)],
        range(n),
        [0] * n,
        [(i, i + 1) for i in range(n - 1)],
        param_bytes=sizes,
        param_uses=[(i, i) for i in range(n)],
    )
    cluster = Cluster("three", tuple(Device(f"d{i}", memory_bytes=memory_bytes) for i in range(3)))
    names, zeros = cluster.device_names, np.zeros((n, 3))
    links = tuple(Link(a, b, 1e-6, 1e9) for a in names for b in names if a != b)
    return Problem(graph, cluster, Profile(names, zeros + 1, zeros, links))


@pytest.mark.parametrize("objective", ["period", "latency", "max_load"])
def test_best_of_searches_where_no_constructive_method_fits(objective: Any) -> None:
    sizes = [1, 47, 20, 44, 8, 35, 36, 2, 19, 27, 37, 24]  # 300 bytes
    problem = _packing(sizes, 102).with_objective(objective)
    constructive = load("best_of", planners=("heft", "contiguous_dp"))(problem)
    assert np.isfinite(constructive.value_s) and np.isfinite(load("best_of")(problem).value_s)
    assert constructive.stats["winner"] in ("macro_search", "local_search")
    assert load("heft")(problem).value_s == np.inf


def test_not_found_is_told_from_cannot_be() -> None:
    for name in ("best_of", "local_search", "heft", "ideal_dp"):
        said = load(name)(_packing([60, 60, 60, 60], 100)).stats["infeasible"]
        assert "does not prove that no placement fits: a search" in said, name
        assert "--planner local_search --seconds 60" in said
        said = load(name)(_packing([60, 60, 60, 200], 120)).stats["infeasible"]
        assert "nothing can fit in memory: the parameters take 380 bytes" in said, name
        said = load(name)(_packing([60, 60, 101], 100)).stats["infeasible"]
        assert "operator 2 ('op2') needs 101 bytes, the largest device" in said, name
    best = load("best_of")(_packing([60, 60, 101], 100))
    assert best.stats["evaluations"] < 200  # nothing is searched for that cannot be


@given(seed=st.integers(0, 10**6))
def test_what_cannot_fit_fits_nowhere(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, num_ops=4, num_devices=2, grouped=True, unsupported=True)
    used = problem.graph.param_bytes.sum() + problem.graph.tensor_bytes.max(initial=1)
    devices = tuple(
        replace(d, memory_bytes=int(rng.integers(1, used + 2))) for d in problem.cluster.devices
    )
    problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    assume(cannot_fit(problem))
    every = list(itertools.product(range(2), repeat=problem.graph.num_groups))
    placements = np.array(every)[:, problem.graph.group]
    assert np.isinf(score(problem, placements)).all()


# --- hostile files -------------------------------------------------------------------------------
