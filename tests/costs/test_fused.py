"""Costs of compiled runs: what shares a kernel, where blocks end, what their seconds become."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from placement import capture
from placement.cluster import Cluster, Device
from placement.costs import fused as fused_module
from placement.costs.fused import _begins, fused, load_or_measure_compiled, measure_compiled
from placement.executor import Runner, compiled
from placement.pieces import Pieces, Rule, split
from placement.pieces.rules import WHOLE
from placement.profile import Profile

TWO = Cluster("two", (Device("cpu:0", cores=(0,)), Device("cpu:1", cores=(0,))))


class Net(nn.Module):
    """linear | gelu, mul | linear | softmax, add, cos: the bars are between kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.second(nn.functional.gelu(self.first(x)) * 2).softmax(-1) + 1).cos()


@pytest.mark.usefixtures("compiler")
def test_operators_of_a_kernel_are_a_group() -> None:
    graph = fused(capture(Net().eval(), torch.randn(4, 16)))
    assert [kind.split(".")[1] for kind in graph.op_kind] == [
        "linear", "gelu", "mul", "linear", "softmax", "add", "cos",
    ]  # fmt: skip
    assert graph.group.tolist() == [0, 1, 1, 2, 3, 3, 3]


def test_blocks_end_between_groups() -> None:
    graph = replace(
        capture(Net().eval(), torch.randn(4, 16)), group=np.array([0, 1, 1, 2, 3, 3, 3])
    )
    order = np.arange(7, dtype=np.int32)
    assert _begins(graph, order, np.full(7, 1e-4)).tolist() == [0]  # 0.7 ms are one block
    assert _begins(graph, order, np.full(7, 1e-2)).tolist() == [0, 1, 3, 4]
    # Two blocks of 2.1 ms: half of it is within gelu and mul, which are not parted.
    assert _begins(graph, order, np.array([0.1, 1, 0.4, 0.2, 0.1, 0.1, 0.2]) * 1e-3).tolist() == [
        0,
        3,
    ]


def test_seconds_of_blocks_are_divided_as_operators_take_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = capture(Net().eval(), torch.randn(4, 16))
    group = np.array([0, 1, 1, 2, 3, 3, 3], np.int32)
    monkeypatch.setattr(fused_module, "fused", lambda g, _: replace(g, group=group))
    monkeypatch.setattr(fused_module, "_begins", lambda *_: np.array([0, 3], np.int32))
    monkeypatch.setattr(Runner, "compile", lambda self, report: None)
    monkeypatch.setattr(Runner, "num_compiled", 1)
    # Of each block all is the first operator's, as compiled runs record it.
    took = np.array([[6, 0, 0, 8, 0, 0, 0], [3, 0, 0, 4, 0, 0, 0]], float).T * 1e-3
    # As one run, in which nothing is converted between blocks, it takes nine tenths.
    rounds = iter([([took] * 3, [2 * took] * 3), ([0.9 * took] * 3, [])])
    monkeypatch.setattr(fused_module, "measured_rounds", lambda *_: next(rounds))
    alone = np.array([[1, 1, 2, 1, 1, 1, 1]] * 2, float).T * 1e-2
    profile = Profile(TWO.device_names, alone, 0 * alone, loaded_s=alone)
    got = measure_compiled(graph, TWO, profile)
    # 6 ms in shares of 1, 1, 2; 8 ms in four equal ones.
    expected = 0.9 * np.array([1.5, 1.5, 3, 2, 2, 2, 2]) * 1e-3
    np.testing.assert_allclose(got.compute_s, np.stack([expected, expected / 2], axis=1))
    assert got.loaded_s is not None
    np.testing.assert_allclose(got.loaded_s, 2 * got.compute_s)
    assert got.provenance["compiled"] and got.provenance["groups"] == group.tolist()


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
    assert got.loaded_s is not None
    own = [at[f"{x}#1"] for x in ("linear", "gelu", "tanh")]
    np.testing.assert_allclose(got.loaded_s[own].sum(axis=0), [2e-3, 3e-3], rtol=0.5)
    np.testing.assert_allclose(got.compute_s, got.loaded_s / 2)  # as operators alone


@pytest.mark.usefixtures("compiler")
def test_packed_weights_are_counted_with_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compiled, "_timed", lambda ways: {way: 2.0**-i for i, way in enumerate(ways)}
    )
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(3)))
    graph = capture(net.eval(), torch.randn(1, 8, 9, 9))
    profile = Profile(
        TWO.device_names, np.full((graph.num_ops, 2), 1e-5), np.zeros((graph.num_ops, 2))
    )
    joined, _ = load_or_measure_compiled(graph, TWO, profile)
    more = joined.param_bytes - graph.param_bytes
    weights = graph.param_bytes > 32  # the others are biases of 8 numbers
    assert (more[weights] >= graph.param_bytes[weights]).all()  # a packed copy has as many or more
