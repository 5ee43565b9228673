"""Recurrent grids: recognised from structure, cut along time, layers, diagonals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from placement.capturing import capture
from placement.graph import OpGraph
from placement.planners import load
from placement.planners.time_slices import blocks
from placement.problem import Problem
from placement.search.grid import NoGrid, recognise
from placement.testing import check_planner
from placement.workloads import load as workload
from placement.workloads.lstm import lstm
from tests.modules import module_of
from tests.problems import altered, graph_of, problem_on


def unrolled(layers, steps, *, step_major=False, hoisted=False, feedback=False, skip_first=False):
    """A grid without PyTorch; every cell is ``w`` (reads W_l), ``u`` (reads U_l), ``f`` (none).

    ::

        split > w(l, t) > f(l, t) > w(l + 1, t)           f of the last layer > join
                u(l, t) > f(l, t) > u(l, t + 1)

    ``hoisted``: operators ``p`` of the parameters alone make U_l before the first step.
    ``feedback``: the last layer leads to the first one of the next step. ``skip_first``: no
    ``u`` at step 0, as there is no state.
    """
    cells = [(ly, t) for ly in range(layers) for t in range(steps)]
    if step_major:
        cells.sort(key=lambda cell: cell[::-1])
    ops, params, edges = [("split", "split")], [], []
    for ly in range(layers if hoisted else 0):
        ops.append((f"p{ly}", "transpose"))
        params.append((f"p{ly}", 2 * ly + 1))
    for ly, t in cells:
        at = f"{ly},{t}"
        edges += [(f"f{ly - 1},{t}" if ly else "split", f"w{at}"), (f"w{at}", f"f{at}")]
        params.append((f"w{at}", 2 * ly))
        ops.append((f"w{at}", "linear"))
        if t or not skip_first:
            ops.append((f"u{at}", "linear"))
            edges.append((f"u{at}", f"f{at}"))
            if hoisted:
                edges.append((f"p{ly}", f"u{at}"))
            else:
                params.append((f"u{at}", 2 * ly + 1))
            if t:
                edges.append((f"f{ly},{t - 1}", f"u{at}"))
        if feedback and not ly and t:
            edges.append((f"f{layers - 1},{t - 1}", f"w{at}"))
        ops.append((f"f{at}", "tanh"))
    edges += [(f"f{layers - 1},{t}", "join") for t in range(steps)]
    names, kinds = zip(*ops, ("join", "join"), strict=True)
    number = {name: n for n, name in enumerate(names)}
    facts = {"op_name": names, "op_kind": kinds, "output_tensor": [number["join"]]}
    facts |= {"param_uses": [(number[name], param) for name, param in params]}
    uses = [(number[a], number[b]) for a, b in edges]
    return graph_of(len(names), uses, 8, param_bytes=[100] * (2 * layers), **facts)


def problem_of(graph: OpGraph, compute_s, send_s: float = 0.0) -> Problem:
    """``compute_s`` float ``[N, D]``, or ``[N]`` or one number for two equal devices."""
    seconds = np.asarray(compute_s, dtype=np.float64)
    if seconds.ndim < 2:
        seconds = np.broadcast_to(seconds, (2, graph.num_ops)).T
    return problem_on(graph, seconds, link=(send_s,))


# --- grids -------------------------------------------------------------------------------------


def test_a_grid_of_two_layers_and_three_steps() -> None:
    #             step 0            step 1        step 2
    #   layer 0   split w u f       w u f         w u f
    #   layer 1   w u f             w u f         w u f join
    grid = recognise(unrolled(2, 3))
    assert (grid.num_layers, grid.num_steps) == (2, 3)
    assert grid.layer.tolist() == [0, *[0] * 9, *[1] * 9, 1]
    assert grid.step.tolist() == [0, *[0, 0, 0, 1, 1, 1, 2, 2, 2] * 2, 2]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(3, 9), st.booleans(), st.booleans())
def test_cells_are_found_whatever_the_size_and_the_order(layers, steps, step_major, hoisted):
    graph = unrolled(layers, steps, step_major=step_major, hoisted=hoisted)
    grid = recognise(graph)
    for name, layer, step in zip(graph.op_name, grid.layer, grid.step, strict=True):
        expected = {"split": "s0,0", "join": f"j{layers - 1},{steps - 1}"}.get(name, name)
        if expected.startswith("p"):
            expected += ",0"  # a parameter's transpose is ready for the first step
        assert f"{layer},{step}" == expected[1:], name
    src, dst = graph.edges.T
    assert (grid.layer[src] <= grid.layer[dst]).all()
    assert (grid.step[src] <= grid.step[dst]).all()
    assert (grid.num_layers, grid.num_steps) == (layers, steps)


def test_layers_that_feed_back_are_one() -> None:
    # f(1, t) > w(0, t + 1): both layers depend on each other.
    grid = recognise(unrolled(2, 4, step_major=True, feedback=True))
    assert (grid.num_layers, grid.num_steps) == (1, 4)


def test_a_first_step_without_state_joins_the_second() -> None:
    # u is read three times in four steps: the chain that counts has three.
    graph = unrolled(2, 4, skip_first=True)
    grid = recognise(graph)
    assert (grid.num_layers, grid.num_steps) == (2, 3)
    step = dict(zip(graph.op_name, grid.step.tolist(), strict=True))
    assert [step[f"f1,{t}"] for t in range(4)] == [0, 0, 1, 2]


def loop(kind: type[nn.Module], sizes: tuple[int, ...]) -> nn.Module:
    """Cells in a loop as users write it: step by step, a different size per layer."""

    def forward(self, x):
        states = [x.new_zeros(x.shape[0], size) for size in sizes[1:]]
        memory = list(states)
        outputs = []
        for t in range(x.shape[1]):
            y = x[:, t]
            for i, cell in enumerate(self.cells):
                if kind is nn.LSTMCell:
                    states[i], memory[i] = cell(y, (states[i], memory[i]))
                else:
                    states[i] = cell(y, states[i])
                y = states[i].relu()
            outputs.append(self.head(y))
        return torch.stack(outputs, 1)

    cells = nn.ModuleList(kind(a, b) for a, b in itertools.pairwise(sizes))
    return module_of(forward, cells=cells, head=nn.Linear(sizes[-1], 2)).eval()


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_loops_over_cells_of_pytorch_are_grids(cell: type[nn.Module]) -> None:
    graph = capture(loop(cell, (4, 5, 3)), (torch.randn(2, 4, 4),))
    grid = recognise(graph)
    assert (grid.num_layers, grid.num_steps) == (2, 4)
    cells = ["_cell" in kind for kind in graph.op_kind]
    assert grid.layer[cells].tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert grid.step[cells].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    # The head is applied in every step: it is in the cells of the last layer.
    head = [n for n in range(graph.num_ops) if graph.op_module[n] == "head"]
    assert grid.layer[head].tolist() == [1] * 4 and grid.step[head].tolist() == [0, 1, 2, 3]


def test_a_loop_over_bare_parameters_is_a_grid() -> None:
    """Written out, with a learned first state and a transpose in every step."""

    def forward(self, x):
        h = self.first
        for row in x.unbind(1):
            h = torch.tanh(row @ self.w.T + h @ self.u.T)
        return h

    shapes = {"w": (5, 4), "u": (5, 5), "first": (1, 5)}
    parts = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    grid = recognise(capture(module_of(forward, **parts).eval(), (torch.randn(2, 6, 4),)))
    assert (grid.num_layers, grid.num_steps) == (1, 6)


def test_the_workload_is_a_grid_of_equal_cells() -> None:
    graph = capture(*workload("lstm_tiny"))
    grid = recognise(graph)
    assert (grid.num_layers, grid.num_steps) == (2, 3)
    layer_of_module = [int(m.split(".")[1]) if m else None for m in graph.op_module]
    known = [n for n, layer in enumerate(layer_of_module) if layer is not None]
    assert grid.layer[known].tolist() == [layer_of_module[n] for n in known]
    # 13 operators in a cell; unbind and zeros before the first, stack after the last.
    sizes = np.zeros((2, 3), int)
    np.add.at(sizes, (grid.layer, grid.step), 1)
    assert sizes.tolist() == [[15, 13, 13], [13, 13, 14]]


# --- no grids ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet_tiny", "bert_tiny", "gpt2_tiny", "tiny_branches"])
def test_other_models_are_no_grids(name: str) -> None:
    with pytest.raises(NoGrid, match="no parameter is read by a chain of at least 3"):
        recognise(capture(*workload(name)))


def test_two_uses_of_the_same_parameters_are_no_time() -> None:
    with pytest.raises(NoGrid, match="unroll the cells"):
        recognise(unrolled(2, 2))


def two_ways(layers: int) -> nn.Module:
    """Bidirectional layers: each reads both directions of the one before."""

    def forward(self, x):
        rows = list(x.unbind(1))
        for i in range(0, len(self.cells), 2):
            sides = []
            for cell, sequence in ((self.cells[i], rows), (self.cells[i + 1], rows[::-1])):
                h, out = x.new_zeros(x.shape[0], 4), []
                for row in sequence:
                    h = cell(row, h)
                    out.append(h)
                sides.append(out)
            rows = [torch.cat(pair, 1) for pair in zip(sides[0], sides[1][::-1], strict=True)]
        return torch.stack(rows, 1)

    cells = (nn.GRUCell(4 if i < 2 else 8, 4) for i in range(2 * layers))
    return module_of(forward, cells=nn.ModuleList(cells))


def test_one_bidirectional_layer_is_two_rows_and_two_are_no_grid() -> None:
    x = (torch.randn(1, 4, 4),)
    # The directions do not depend on each other: both advance one cell per step.
    assert recognise(capture(two_ways(1).eval(), x)).num_layers == 2
    # The second layer begins where a direction of the first one ends.
    with pytest.raises(NoGrid, match=r"'gru_cell_\d+' of step 0 depends on step 3"):
        recognise(capture(two_ways(2).eval(), x))


def test_cells_that_differ_are_no_grid() -> None:
    graph = unrolled(1, 5)
    kinds = list(graph.op_kind)
    kinds[graph.op_name.index("f0,2")] = "relu"
    why = r"step 1\) and \(layer 0, step 2\) differ in {'tanh': 1, 'relu': 1}"
    with pytest.raises(NoGrid, match=why):
        recognise(replace(graph, op_kind=tuple(kinds)))


def test_a_norm_shared_by_three_unlike_blocks_is_no_grid() -> None:
    norm = nn.LayerNorm(4)
    shared = nn.Sequential(*(part for _ in "abc" for part in (nn.Linear(4, 4), norm)))
    with pytest.raises(NoGrid, match="reads a parameter that other steps do not"):
        recognise(capture(shared.eval(), (torch.randn(1, 4),)))


# --- the planner ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (0.0, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (0.5, [[0, 1, 2, 4], [3, 5, 6, 7]]),
        (1.0, [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_orders_of_the_cells(weight: float, expected: list[list[int]]) -> None:
    graph = unrolled(2, 4)
    grid, cells = recognise(graph), np.zeros((2, 4), int)
    cells[grid.layer, grid.step] = blocks(problem_of(graph, 1.0), grid, weight)
    assert cells.tolist() == expected


@settings(max_examples=20, deadline=None)
@given(layers=st.integers(1, 5), steps=st.integers(3, 9), weight=st.floats(0, 1))
def test_orders_never_run_against_an_edge(layers: int, steps: int, weight: float) -> None:
    graph = unrolled(layers, steps)
    block = blocks(problem_of(graph, 1.0), recognise(graph), weight)
    src, dst = graph.edges.T
    assert (block[src] <= block[dst]).all()
    assert sorted(set(block)) == list(range(layers * steps))


def test_many_cells_share_blocks() -> None:
    graph = unrolled(3, 200)
    block = blocks(problem_of(graph, 1.0), recognise(graph), 0.0)
    assert np.bincount(block).max() <= 2 * 3 + 1
    assert int(block.max()) + 1 == 400


def test_time_alone_cuts_into_slices_of_equal_time() -> None:
    # 8 slices of 3 operators (split and join take nothing); a slice takes 3 s on d0, 4.8 on d1:
    #   d0 | 0 1 2 3 4         15.0 s
    #   d1 |           5 6 7   14.4 s
    graph = unrolled(1, 8)
    seconds = np.array([[1.0, 1.6]] * graph.num_ops)
    seconds[[0, -1]] = 0.0
    solution = load("time_slices", num_directions=1)(problem_of(graph, seconds))
    step = recognise(graph).step
    device = [set(solution.placement[step == t].tolist()) for t in range(8)]
    assert all(len(d) == 1 for d in device)
    assert sum(d == {0} for d in device) == 5
    assert sum(a != b for a, b in itertools.pairwise(device)) == 1
    assert solution.value_s == pytest.approx(15)
    assert solution.stats["cut"] == "time"
    assert (solution.stats["num_layers"], solution.stats["num_steps"]) == (1, 8)


@pytest.mark.parametrize(
    ("layers", "steps", "sent", "cut"),
    [
        # Along time: the sequence, two states, and the outputs of three steps before the last;
        # along layers it would be 8 outputs.
        (2, 8, 6, "time"),
        # Along layers: three outputs; along time the sequence and four states at least.
        (4, 3, 3, "layers"),
    ],
)
def test_the_cut_with_the_cheapest_transfers_wins(layers, steps, sent, cut):
    graph = unrolled(layers, steps)
    problem = problem_of(graph, np.where(np.array(graph.op_kind) == "linear", 3.0, 0.0))
    problem = altered(problem, links={"latency_s": 0.1, "blocking": True})
    solution = load("time_slices")(problem)
    assert solution.value_s == pytest.approx(3.0 * layers * steps + 0.1 * sent, rel=3e-3)
    assert solution.stats["cut"] == cut


def test_unequal_layers_are_cut_along_time() -> None:
    # Layer 0 takes 9 of 12 seconds per step: no cut between the layers is balanced.
    graph = unrolled(2, 4)
    linear, layer = np.array(graph.op_kind) == "linear", recognise(graph).layer
    seconds = np.where(linear, np.where(layer == 0, 4.5, 1.5), 0.0)
    solution = load("time_slices")(problem_of(graph, seconds))
    assert solution.value_s == pytest.approx(24)
    assert solution.stats["cut"] == "time"


def test_where_there_is_no_grid_the_best_single_device_is_the_answer() -> None:
    graph = capture(*workload("tiny_branches"))
    solution = load("time_slices")(problem_of(graph, 1.0))
    assert len(set(solution.placement)) == 1
    assert "unroll the cells" in solution.stats["no_grid"]
    assert solution.stats["cut"] == "none"


def test_contract_on_grids() -> None:
    graph = capture(*lstm(layers=3, steps=4, hidden=4)).without_program()
    rng = np.random.default_rng(0)
    problem = problem_of(graph, rng.random((graph.num_ops, 3)), send_s=0.1)
    tight = altered(problem, {"memory_bytes": 3000})
    check_planner(load("time_slices"), [problem, problem.with_objective("latency"), tight])
