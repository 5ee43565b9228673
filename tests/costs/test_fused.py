"""Costs of compiled runs: what shares a kernel, where parts end, what seconds become."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from placement import capture
from placement.cluster import Cluster, Device
from placement.costs import fused as fused_module
from placement.costs.fused import _begins, fused, load_or_measure_compiled, measure_compiled
from placement.executor import Runner, compiled
from placement.executor.inductor import kernel_seconds
from placement.graph import OpGraph
from placement.pieces import Pieces, Rule, split
from placement.pieces.rules import WHOLE
from placement.profile import Profile
from tests.modules import module_of

TWO = Cluster("two", (Device("cpu:0", cores=(0,)), Device("cpu:1", cores=(0,))))


def captured(forward: Any, layers: str = "ab") -> OpGraph:
    module = module_of(forward, **{name: nn.Linear(16, 16) for name in layers})
    return capture(module.eval(), torch.randn(4, 16))


def net() -> OpGraph:
    """linear | gelu, mul | linear | softmax, add, cos: the bars are between kernels."""
    return captured(lambda m, x: (m.b(nn.functional.gelu(m.a(x)) * 2).softmax(-1) + 1).cos())


@pytest.mark.usefixtures("compiler")
def test_operators_of_a_kernel_are_a_group() -> None:
    graph = fused(net())
    kinds = ["linear", "gelu", "mul", "linear", "softmax", "add", "cos"]
    assert [kind.split(".")[1] for kind in graph.op_kind] == kinds
    assert graph.group.tolist() == [0, 1, 1, 2, 3, 3, 3]


def test_what_is_part_of_a_kernel_with_packed_weights_goes_with_it() -> None:
    """A linear layer whose activation its kernel computes has no seconds of its own."""
    seconds = np.array([0, 3, 1, 2, 1, 0, 1]) * 1e-3
    assert fused(net(), seconds=seconds).group.tolist() == [0, 0, 0, 1, 2, 2, 2]

    # Where two read from it, it is nobody's part: it stays.
    def forward(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = m.a(x)
        return m.b(x), m.c(x).softmax(-1)

    both = captured(forward, "abc")
    assert fused(both, seconds=np.array([0, 1, 1, 1e-3])).group[0] == 0
    assert (fused(both, seconds=np.array([0, 1, 1, 1e-3])).group == 0).sum() == 1


def test_parts_end_between_groups() -> None:
    graph = replace(net(), group=np.array([0, 1, 1, 2, 3, 3, 3]))
    order = np.arange(7, dtype=np.int32)
    assert _begins(graph, order, np.full(7, 1e-2), 1).tolist() == [0]
    assert _begins(graph, order, np.full(7, 1e-2), 12).tolist() == [0, 1, 3, 4]
    # Half of 2.1 ms is within gelu and mul, which are not parted.
    seconds = np.array([0.1, 1, 0.4, 0.2, 0.1, 0.1, 0.2]) * 1e-3
    assert _begins(graph, order, seconds, 2).tolist() == [0, 3]


def test_seconds_of_runs_are_divided_as_kernels_take_them(monkeypatch):
    graph, group = net(), np.array([0, 1, 1, 2, 3, 3, 3], np.int32)
    monkeypatch.setattr(fused_module, "fused", lambda g, *_: replace(g, group=group))
    kernels = np.array([1, 1, 2, 1, 1, 1, 1]) * 1e-4
    monkeypatch.setattr(fused_module, "kernel_seconds", lambda *_: kernels)
    ran: list[list[list[int]]] = []

    def as_it_was(graph, cluster, profile, placements):
        ran.append([p.tolist() for p in placements])
        return profile

    monkeypatch.setattr(fused_module, "calibrated", as_it_was)
    monkeypatch.setattr(Runner, "compile", lambda self, report: None)
    monkeypatch.setattr(Runner, "num_compiled", 1)
    # Of each run all is the first operator's, as compiled runs record it.
    took = np.array([[6, 0, 0, 8, 0, 0, 0], [3, 0, 0, 4, 0, 0, 0]], float).T * 1e-3
    monkeypatch.setattr(fused_module, "measured_rounds", lambda *_: ([took] * 3, [2 * took] * 3))
    alone = np.full((7, 2), 1e-2)
    profile = Profile(TWO.device_names, alone, 0 * alone, loaded_s=alone)
    got = measure_compiled(graph, TWO, profile)
    # 6 ms in shares of 1, 1, 2; 8 ms in four equal ones.
    expected = np.array([1.5, 1.5, 3, 2, 2, 2, 2]) * 1e-3
    np.testing.assert_allclose(got.compute_s, np.stack([expected, expected / 2], axis=1))
    np.testing.assert_allclose(got.loaded_s, 2 * got.compute_s)
    assert got.provenance["compiled"] and got.provenance["groups"] == group.tolist()
    # Alone; parted after a third (of 14 ms), where a group ends, beginning on each; replicas.
    alone, parted = [[0] * 7, [1] * 7], [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]
    assert ran == [[*alone, *parted, alone]]


@pytest.mark.usefixtures("compiler")
def test_kernels_are_timed_inside_of_their_run() -> None:
    """The wide layer has nearly all of it, and the sum is about what the run takes."""
    wide = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1024), nn.Linear(1024, 1024))
    graph = capture(wide.eval(), torch.randn(256, 8))
    seconds = kernel_seconds(graph.program, 1)
    assert seconds.shape == (4,) and (seconds >= 0).all()
    assert seconds.argmax() == 3 and seconds[3] > 0.5 * seconds.sum() > 0


@pytest.mark.usefixtures("compiler")
def test_pieces_are_fused_and_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled together, a compiler would make one kernel of both pieces, which none could part."""
    module = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Tanh()).eval()
    rows, each = Rule((0, WHOLE, WHOLE), (), (0,)), Rule((0,), (), (0,))
    cuts = {"linear": rows, "gelu": each, "tanh": each}
    graph = split(capture(module, torch.randn(4, 16)), Pieces((0.5, 0.5), cuts))
    ran: list[np.ndarray] = []

    def took(runner: Runner, *_: object) -> np.ndarray:
        ran.append(runner.placement)
        # All of a run is its first operator's, as compiled runs record it: device 1 takes longer.
        seconds, first = np.zeros(graph.num_ops), graph.op_name.index
        for k in (0, 1):
            seconds[first(f"linear#{k}")] = (2 + runner.placement[first(f"linear#{k}")]) * 1e-3
        return seconds

    monkeypatch.setattr(Runner, "compile", lambda self, report: None)
    monkeypatch.setattr(Runner, "num_compiled", 1)
    monkeypatch.setattr(fused_module, "run_seconds", took)
    monkeypatch.setattr(fused_module, "calibrated", lambda graph, cluster, profile, _: profile)
    alone = np.full((graph.num_ops, 2), 1e-2)
    profile = Profile(TWO.device_names, alone, 0 * alone, loaded_s=2 * alone)
    got = measure_compiled(graph, TWO, profile, repeats=1)
    piece = graph.piece
    assert piece is not None and len(ran) == 2 and (ran[0][piece == 1] == 1).all()
    assert (ran[1] == 1 - ran[0]).all()  # each piece on every device
    group = np.array(got.provenance["groups"])
    at = {name: n for n, name in enumerate(graph.op_name)}
    for k in (0, 1):
        assert group[at[f"gelu#{k}"]] == group[at[f"tanh#{k}"]]  # one kernel
    assert group[at["gelu#0"]] != group[at["gelu#1"]]
    own = [at[f"{x}#1"] for x in ("linear", "gelu", "tanh")]
    np.testing.assert_allclose(got.loaded_s[own].sum(axis=0), [2e-3, 3e-3], rtol=0.5)
    np.testing.assert_allclose(got.compute_s, got.loaded_s / 2)  # as operators alone


def test_costs_that_cannot_be_kept_or_are_damaged_are_measured_again(tmp_path, monkeypatch):
    graph, calls = net(), list[int]()
    seconds = np.full((graph.num_ops, 2), 1e-5)
    profile = Profile(TWO.device_names, seconds, 0 * seconds)

    def measured(graph: OpGraph, *_: Any, **__: Any) -> Profile:
        calls.append(1)
        packed = [0] * len(graph.param_bytes)
        facts = {"groups": graph.group.tolist(), "packed": packed, "runs": 1}
        return replace(profile, provenance=facts)

    monkeypatch.setattr(fused_module, "measure_compiled", measured)
    with pytest.warns(UserWarning, match="the profile is not saved"):
        load_or_measure_compiled(graph, TWO, profile, folder=os.devnull)
    for num_measured, damaged in ((2, False), (2, True), (3, False)):
        load_or_measure_compiled(graph, TWO, profile, folder=tmp_path)
        assert len(calls) == num_measured
        (kept,) = tmp_path.rglob("*-compiled.npz")
        if damaged:
            kept.write_bytes(kept.read_bytes()[:100])


@pytest.mark.usefixtures("compiler")
def test_packed_weights_are_counted_with_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    faster = lambda ways: {way: 2.0**-i for i, way in enumerate(ways)}  # noqa: E731
    monkeypatch.setattr(compiled, "_timed", faster)
    monkeypatch.setattr(fused_module, "calibrated", lambda graph, cluster, profile, _: profile)
    layers = nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(3)))
    graph = capture(layers.eval(), torch.randn(1, 8, 9, 9))
    seconds = np.full((graph.num_ops, 2), 1e-5)
    profile = Profile(TWO.device_names, seconds, 0 * seconds)
    joined, _ = load_or_measure_compiled(graph, TWO, profile)
    more = joined.param_bytes - graph.param_bytes
    weights = graph.param_bytes > 32  # the others are biases of 8 numbers
    # A packed copy has as many or more. Its bytes are divided over the weight and its bias.
    assert (more > 0).all() and more.sum() >= graph.param_bytes[weights].sum()
