"""What people brought and what came out wrong, one section a kind: each with the right value."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

from placement import exporters
from placement.cluster import Cluster, Device, Link
from placement.exporters import Inexpressible, moved
from placement.nearest import simulate_split
from placement.planners import load as load_planner
from placement.problem import Problem
from placement.profile import Profile
from placement.program import capture
from placement.simulator import simulate
from tests import consumers

# --- training ------------------------------------------------------------------------------------

# --- capture -------------------------------------------------------------------------------------

# --- exports -------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parts in a row or beside each other, which it adds, concatenates, or multiplies itself."""

    def __init__(self, how: str, *parts: nn.Module) -> None:
        super().__init__()
        self.how, self.parts = how, nn.ModuleList(parts)
        self.scale = nn.Parameter(torch.ones(())) if how == "scale" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "split":
            outs = [part(x) for part in self.parts]
            return torch.stack(outs).sum(0)
        y = x
        for part in self.parts:
            y = part(y).tanh()
        if self.how == "row":
            return y
        if self.how == "scale":
            return self.scale * y
        return x + y if self.how == "add" else x.to(x.dtype) * y


def mixed(rows: Any) -> nn.Module:
    """A module from nested lists: a number is a layer, a list is how its parts are mixed."""
    if isinstance(rows, int):
        return [nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.1), nn.ReLU()][rows]
    return Mixed(rows[0], *map(mixed, rows[1]))


MIXED = st.recursive(
    st.integers(0, 3),
    lambda inner: st.tuples(
        st.sampled_from(["row", "add", "times", "split", "scale"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
@example([0, 0], "add", 0)
@given(st.lists(MIXED, min_size=2, max_size=4), st.sampled_from(["row", "add"]), st.integers(0, 99))
def test_any_device_map_runs_in_accelerate(rows: list[Any], how: str, seed: int) -> None:
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    module, x = Mixed(how, nn.Linear(4, 4), *map(mixed, rows)).eval(), torch.randn(2, 4)
    p = consumers.problem_of(capture(module, x))
    random = np.random.default_rng(seed)
    cut = np.arange(p.num_ops) >= random.integers(1, p.num_ops)
    for on in (cut, random.integers(2, size=p.num_ops), random.integers(2, size=p.num_ops)):
        plan, exporter = consumers.placed(p, on), exporters.load("huggingface")
        try:
            text = exporter(plan).files[""]
        except Inexpressible as error:
            text = exporter(moved(plan, error.nearest)).files[""]
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            expected = module(x)
            again = Mixed(how, nn.Linear(4, 4), *map(mixed, rows)).eval()
            again.load_state_dict(module.state_dict())
            found = consumers.run_in_accelerate(again, json.loads(text), (x,), {}, patch)
        assert torch.equal(found[0], expected)


class Decoder(nn.Module):
    """Layers that all take a view of one tensor, as rotary embeddings are."""

    def __init__(self, num_layers: int, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Turned(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        turn = (x * 2).cos()
        for layer in self.layers:
            x = layer(x, turn)
        return self.head(x)


class Turned(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x * turn.unsqueeze(0)[0])


def layered_problem(num_layers: int, memory: tuple[int, ...] = (10**9,) * 3) -> Problem:
    graph = capture(Decoder(num_layers).eval(), torch.randint(20, (1, 4)))
    names = tuple(f"cuda:{i}" for i in range(len(memory)))
    links = tuple(Link(a, b, 2e-5, 1e10) for a in names for b in names if a != b)
    devices = tuple(Device(n, "cuda", memory_bytes=m) for n, m in zip(names, memory, strict=True))
    seconds = np.full((graph.num_ops, len(names)), 1e-3)
    profile = Profile(names, seconds, 0 * seconds, links)
    return Problem(graph, Cluster("gpus", devices, links), profile, num_microbatches=8)


@pytest.mark.parametrize("name", ["vllm", "megatron", "torchtitan", "huggingface", "llama_cpp"])
def test_the_nearest_plan_is_the_best_of_whole_layers(name: str) -> None:
    """14, 2 and 2 layers, and one of those cut: far from even, which few moves would keep."""
    p = layered_problem(18)
    path = [m.split(".") for m in p.graph.op_module]
    layer = np.array([int(m[1]) if m[0] == "layers" else -1 for m in path])
    layer[np.maximum.accumulate(layer) < 0] = 0
    layer = np.maximum.accumulate(layer)
    plan = consumers.placed(p, (layer > 13).astype(int) + (layer > 15))
    with pytest.raises(Inexpressible) as error:
        exporters.load(name)(plan, p)
    exporters.load(name)(moved(plan, error.value.nearest), p)
    on = [p.cluster.index(d) for d in error.value.nearest.values()]
    free = replace(p, graph=replace(p.graph, group=np.arange(p.num_ops)))
    best = load_planner("contiguous_dp")(free).value_s
    assert simulate_split(p, on).period_s <= 1.15 * best


def test_views_that_are_split_are_simulated_as_copies() -> None:
    """Else the nearest plan of a model with rotary embeddings is checked against no limit."""
    p = layered_problem(2)
    whole = np.zeros(p.num_ops, np.int32)
    one, free = simulate(p, whole), simulate_split(p, whole)
    assert (one.period_s, one.peak_bytes.tolist()) == (free.period_s, free.peak_bytes.tolist())
    last = np.array(["layers.1" in m or m == "head" for m in p.graph.op_module], np.int32)
    assert (simulate_split(p, last).peak_bytes[:2] > 0).all()


class Skipped(nn.Module):
    """The last layer reads the model's own input again; or an early layer makes an output."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        outs = [x]
        for layer in self.layers:
            outs.append(layer(outs[-1]).tanh())
        return self.layers[3](x + outs[3]) if self.how == "input" else (outs[4], outs[1])


@pytest.mark.parametrize(("how", "why"), [("input", "reads an input"), ("output", "an output")])
def test_pipelining_refuses_what_torch_cannot_run(how: str, why: str) -> None:
    p = consumers.problem_of(capture(Skipped(how).eval(), torch.randn(2, 4)), ("cpu:0", "cpu:1"))
    plan = consumers.placed(p, np.arange(p.num_ops) >= p.graph.op_module.index("layers.2"))
    with pytest.raises(Inexpressible, match=why) as error:
        exporters.load("torch_pipelining")(plan)
    files = exporters.load("torch_pipelining")(moved(plan, error.value.nearest)).files
    points = json.loads(files[".json"])["split_points"]
    assert not {"layers.2", "layers.3"} & {*points}


# --- ONNX and tight memory -----------------------------------------------------------------------

# --- hostile files -------------------------------------------------------------------------------
