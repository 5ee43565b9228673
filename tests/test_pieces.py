"""Operators in pieces: rules that are known, the best cuts against brute force, results, plans."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import placement
from experiments.pieces_equality import in_random_pieces
from placement import exporters, pieces, planners
from placement.cluster import Cluster, Device
from placement.costs.calibration import _for_calibration
from placement.executor import RunnerError
from placement.executor.distributed import save_weights, with_weights
from placement.pieces.choose import Factor, least
from placement.pieces.decide import Moves, Options, decide, options_of
from placement.pieces.rules import SUM, WHOLE, Rule, Window, bounds, known_rules, rules_of, sizes
from placement.pieces.split import cut_graph
from placement.plan import PlanMismatch, make_plan
from placement.plan.checking import inconsistencies
from placement.problem import Solution
from placement.program import run_program
from tests.machine import problem_of, random_placement
from tests.modules import module_of

aten = torch.ops.aten
HALVES = (0.5, 0.5)
# How the operators of two linear layers with a ReLU between them are cut as Megatron does.
COLUMNS, ROWS = Rule((WHOLE, 0, 0), (), (1,)), Rule((1, 1, SUM), (), (SUM,))
BOTH = {"linear": COLUMNS, "relu": Rule((1,), (), (1,)), "linear_1": ROWS}


class Attention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.norm(x)).split(c, 2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(x)))


def convolutions(m: nn.Module, x: Tensor) -> Tensor:
    x = F.relu(m.norm(m.a(x)), inplace=True)
    x = F.max_pool2d(x + m.b(x), 3, 2, 1)
    return m.head(F.adaptive_avg_pool2d(x, 1).flatten(1)).softmax(-1)


def models() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4))
    convs = {"a": nn.Conv2d(3, 8, 5, padding=3, stride=2), "norm": nn.BatchNorm2d(8)}
    convs |= {"b": nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=8), "head": nn.Linear(8, 5)}
    convs["norm"].running_var.uniform_(0.5, 2.0)
    return {
        "mlp": (mlp.eval(), (torch.randn(5, 6),)),
        "attention": (Attention().eval(), (torch.randn(1, 7, 16),)),  # 7 tokens: uneven
        "convolutions": (module_of(convolutions, **convs).eval(), (torch.randn(2, 3, 15, 12),)),
    }


def devices() -> Cluster:
    return Cluster("two", tuple(Device(f"cpu:{i}", cores=(i,)) for i in range(2)))


def in_halves(module: nn.Module, inputs: tuple[Tensor, ...], **rules: Rule) -> placement.OpGraph:
    return pieces.split(placement.capture(module, inputs), pieces.Pieces(HALVES, rules))


@pytest.mark.parametrize("size, shares, expected", [
    (8, HALVES, (0, 4, 8)),
    (7, HALVES, (0, 4, 7)),  # 3.5 rounds to even
    (12, (0.25, 0.75), (0, 3, 12)),
    (3, (0.25,) * 4, (0, 1, 2, 2, 3)),  # one piece would be empty: no rule cuts there
])  # fmt: skip
def test_where_pieces_begin(size, shares, expected):
    assert bounds(size, shares) == expected
    assert sum(sizes(size, shares)) == size


def test_a_small_constant_is_added_once() -> None:
    """Of a norm's variance, which may be as small: in summands each piece would add it."""
    x = torch.randn(4, 6)
    for added, summands in ((1e-5, False), (0.5 * x, True)):
        rules = rules_for(aten.add.Tensor, x, added)
        assert {0, 1} <= {r.outputs[0] for r in rules}
        assert any(SUM in r.inputs for r in rules) is summands


def rules_for(target, *args, outputs=None, params=0, shares=HALVES) -> list[Rule]:
    """In halves; the last ``params`` of the tensors are parameters."""
    is_param = [False] * (sum(isinstance(x, Tensor) for x in args) - params) + [True] * params
    return rules_of(target, (args, {}), is_param, outputs, shares)


def test_no_rule_is_of_one_mask_or_of_few_numbers() -> None:
    """What holds for the example's mask, for numbers below a limit, or by chance, is no rule."""
    x, y, zeros = torch.randn(8, 8), torch.randn(8, 8), torch.zeros(8, 8, dtype=torch.int64)
    keeps_all, image = zeros == 0, torch.randn(1, 2, 512, 512)
    for rule in rules_for(aten.where.self, keeps_all, x, y):
        assert rule.inputs.count(SUM) in (0, 2)
    assert not any(SUM in r.inputs for r in rules_for(aten.clamp.default, x, -50.0, 50.0))
    assert not any(SUM in r.inputs for r in rules_for(aten.add.Tensor, x, zeros))
    assert not rules_for(aten.sort.default, torch.randn(1, 4), outputs=[0, 1])
    assert not {r.inputs[0] for r in rules_for(aten.group_norm.default, image, 1)} & {1, 2, 3}


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, -65504.0])
def test_what_a_mask_leaves_out_hides_nothing(hidden: float) -> None:
    """A large number beside others: a wrong one among these is seen, and rows can be cut."""
    x, mask = torch.randn(8, 6), torch.rand(8, 6) < 0.5
    rules = rules_for(aten.masked_fill.Scalar, x, mask, hidden)
    assert Rule((0, 0), (), (0,)) in rules
    assert not any(SUM in r.inputs for r in rules) or hidden == -torch.inf


def test_rules_of_a_linear_layer() -> None:
    """By outputs; by rows of the input; by what is added up, where the bias is added once."""
    x, w, b = torch.randn(4, 6), torch.randn(8, 6), torch.randn(8)
    rules = rules_for(aten.linear.default, x, w, b, params=2)
    assert Rule((WHOLE, 0, 0), (), (1,)) in rules
    assert Rule((0, WHOLE, WHOLE), (), (0,)) in rules
    assert Rule((1, 1, SUM), (), (SUM,)) in rules
    assert all(rule.outputs != (WHOLE,) for rule in rules)


def test_sizes_among_the_arguments_shrink() -> None:
    """``view [2, 6] -> [2, 3, 2]`` in halves of its first dimension has a 1 where it had a 2."""
    assert Rule((0,), (1,), (0,)) in rules_for(aten.view.default, torch.randn(2, 6), [2, 3, 2])


def test_rows_of_a_convolution() -> None:
    """Of 11 rows, 3 from one window to the next 2, and one of padding: 6 rows of results.

    The first 3 begin at rows -1, 1, 3 and read up to 5, the others at 5, 7, 9 and up to 11.
    """
    window = Window(2, 3, 2, 1)
    assert window.rows(11, HALVES) == [(-1, 6), (5, 12)]
    x, w, b = torch.randn(1, 3, 11, 9), torch.randn(4, 3, 3, 3), torch.randn(4)
    rules = rules_for(aten.conv2d.default, x, w, b, [2, 2], [1, 1], params=2)
    assert Rule((window, WHOLE, WHOLE), (), (2,), zeros=(5,)) in rules  # the fifth leaf: 1 row
    rules = rules_for(aten.max_pool2d.default, x, [3, 3], [2, 2], [1, 1])
    assert Rule((window._replace(least=True),), (), (2,), zeros=(5,)) in rules


def test_neighbours_hand_over_rows_only(tmp_path: Path) -> None:
    """Two convolutions in halves of the image: of what is made in between one row goes over."""
    torch.manual_seed(0)
    convs = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
    module, x = nn.Sequential(*convs).eval(), torch.randn(1, 2, 8, 8)
    rule = Rule((Window(2, 3, 1, 1), WHOLE, WHOLE), (), (2,), zeros=(5,))
    graph = placement.capture(module, (x,))
    cut = pieces.split(graph, pieces.Pieces(HALVES, dict.fromkeys(graph.op_name, rule)))
    where = cut.piece
    crossing = {
        cut.op_name[cut.tensor_src[t]]: int(cut.tensor_bytes[t])
        for t in range(cut.num_tensors)
        for n in cut.use_dst[cut.use_ptr[t] : cut.use_ptr[t + 1]]
        if cut.tensor_src[t] >= 0 and where[cut.tensor_src[t]] != where[n]
    }
    one_row = 4 * 2 * 8
    assert sorted(crossing.values())[:2] == [one_row, one_row]
    assert len(crossing) == 3  # and a half, for the result
    save_weights(graph, tmp_path / "weights.safetensors")  # in which there is no padding
    read = with_weights(cut, tmp_path / "weights.safetensors", range(len(cut.program.params)))
    for graph in (cut, read):
        with placement.Runner(graph, devices(), where) as runner:
            torch.testing.assert_close(runner(x), module(x))


def test_every_piece_has_rows() -> None:
    """Two rows of a result have no quarters, whatever lies between the rows that they read."""
    x, w = torch.randn(1, 2, 3, 6), torch.randn(3, 2, 1, 1)
    rules = rules_for(aten.conv2d.default, x, w, None, [2, 2], params=1, shares=(0.25,) * 4)
    assert not any(isinstance(r.inputs[0], Window) for r in rules)


@pytest.mark.parametrize("call, why", [
    ((aten.relu.default, torch.randn(4)), "the sum of two is not that of the parts"),
    ((aten.softmax.int, torch.randn(1, 4), 1), "each number depends on the whole row"),
    ((aten.rand_like.default, torch.randn(4)), "random numbers"),
])  # fmt: skip
def test_what_cannot_be_cut(call: tuple[object, ...], why: str) -> None:
    rules = rules_for(*call)
    assert not [r for r in rules if SUM in r.inputs or call[0] is not aten.relu.default], why


@given(st.integers(0, 2**32 - 1))
def test_the_least_sum_is_that_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    domains = rng.integers(1, 4, size=6).tolist()
    factors = []
    for _ in range(8):
        scope = tuple(rng.choice(6, size=rng.integers(1, 4), replace=False).tolist())
        table = rng.uniform(size=[domains[v] for v in scope])
        table[rng.uniform(size=table.shape) < 0.1] = np.inf
        factors.append(Factor(scope, table))

    def cost(values: tuple[int, ...]) -> float:
        return sum(float(f.table[tuple(values[v] for v in f.scope)]) for f in factors)

    best = min(map(cost, itertools.product(*map(range, domains))))
    found = cost(tuple(least(domains, factors)))
    assert found == best or found == pytest.approx(best)


def test_a_pair_of_linear_layers_is_cut_as_megatron_does() -> None:
    """Columns, then rows, and one sum: nothing is moved in between."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    graph = placement.capture(module, (torch.randn(3, 8),))
    options = [Options(1.0, o.rules, (0.5,) * len(o.rules)) for o in options_of(graph, HALVES)]
    free = Moves(hop_s=0.1, bytes_per_s=np.inf, copied_per_s=np.inf)
    chosen = decide(graph, HALVES, options, free).rules
    assert chosen.keys() == BOTH.keys()
    cut = cut_graph(graph, pieces.Pieces(HALVES, BOTH))
    assert list(cut.op_name) == [*(f"{x}#{i}" for x in BOTH for i in (0, 1)), "linear_1.3.add0"]
    assert cut.num_groups == 7


@pytest.mark.parametrize("shares", [HALVES, (0.25, 0.75), (0.25,) * 4], ids=str)
@pytest.mark.parametrize("name", models())
def test_pieces_compute_what_the_module_does(name: str, shares: tuple[float, ...]) -> None:
    """Whatever is cut and wherever pieces are, also with sizes that no number of pieces divides."""
    module, inputs = models()[name]
    graph = placement.capture(module, inputs)
    expected, found = module(*inputs), options_of(graph, shares)
    for seed in range(4):
        chosen = in_random_pieces(graph, found, shares, seed)
        cut = cut_graph(graph, chosen)
        (result,) = run_program(cut.program, cut.program.timing_inputs())
        torch.testing.assert_close(result, expected)
        with placement.Runner(cut, devices(), random_placement(cut, seed, 2)) as runner:
            torch.testing.assert_close(runner(*inputs), expected)


def test_a_view_and_a_mean_of_what_is_cut() -> None:
    """Whole, ``relu`` keeps its input's strides; put together of pieces, it does not.

    The mean of 6 numbers, in two pieces, is that of sums of 3 over 6, added up.
    """
    x = torch.randn(6, 4)
    # ``relu`` is in memory as the input is: a view can be taken.
    module = module_of(lambda self, x: F.relu(x.t()).t().view(-1).view(4, -1).pow(2).mean(-1))
    cut = in_halves(module, (x,), relu=Rule((0,), (), (0,)), mean=Rule((1,), (), (SUM,)))
    kinds = dict(zip(cut.op_name, cut.op_kind, strict=True))
    assert kinds["view"] == "aten.reshape.default" and kinds["view_1"] == "aten.view.default"
    assert kinds["mean#1"] == "aten.sum.dim_IntList" and kinds["mean.mean#1"] == "aten.div.Scalar"
    (result,) = run_program(cut.program, [x])
    torch.testing.assert_close(result, module(x))
    y = torch.randn(4, 8)
    for shares in (HALVES, (0.25, 0.75)):  # or along the rows, whose parts have unlike sizes then
        found = rules_for(aten.mean.dim, y, [-1], shares=shares)
        assert Rule((1,), (), (SUM,)) in found and Rule((0,), (), (0,)) in found
    assert {r.inputs for r in rules_for(aten.mean.default, y)} == {(0,), (1,), (SUM,)}


def test_rules_are_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal call is not run again; another mask, or a damaged file, is looked at anew."""
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path))
    x, mask = torch.randn(1, 2, 8, 8), torch.tensor([True, False])
    window = aten.conv2d.default, ((x, torch.randn(4, 2, 3, 3)), {}), [False, True], None, HALVES
    found = known_rules(*window)
    assert any(isinstance(rule.inputs[0], Window) for rule in found)
    (path,) = (tmp_path / "rules").iterdir()
    monkeypatch.setattr("placement.pieces.rules.rules_of", lambda *_: [])
    assert known_rules(*window) == found
    fill = (torch.zeros(3, 2), mask, 1.0), {}
    masked = aten.masked_fill.Scalar, fill, [False] * 2, None, HALVES
    known_rules(*masked)
    mask[1] = True
    known_rules(*masked)
    assert len([*(tmp_path / "rules").iterdir()]) == 3
    path.write_text("[[1]]", encoding="utf-8")
    assert known_rules(*window) == []  # by the function that finds none


def test_pieces_of_parameters_are_views_so_that_one_that_is_written_to_is_seen() -> None:
    module, inputs = models()["mlp"]
    cut = in_halves(module, inputs, linear=COLUMNS)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert {p.untyped_storage().data_ptr() for p in cut.program.params} == own
    assert cut.param_bytes.sum() == sum(p.nbytes for p in module.parameters())
    with torch.no_grad():
        module[0].weight.mul_(2.0)
    with placement.Runner(cut, devices(), cut.piece) as runner:
        torch.testing.assert_close(runner(*inputs), module(*inputs))
        before = module[0].weight.data
        for data in (torch.ones(64, 64), before.t()):  # other memory, or another view of it
            module[0].weight.data = data
            for _ in range(2):
                with pytest.raises(RunnerError, match=r"weight\[0:0\]' has got other memory"):
                    runner(*inputs)
        module[0].weight.data = before
        torch.testing.assert_close(runner(*inputs), module(*inputs))


def test_round_robin_deals_pieces_out() -> None:
    module, inputs = models()["mlp"]
    cut = in_halves(module, inputs, linear=COLUMNS, relu=BOTH["relu"])
    answer = planners.load("round_robin")(problem_of(cut, devices(), objective="latency"))
    on = dict(zip(cut.op_name, answer.placement.tolist(), strict=True))
    alike = {"linear#0": 0, "linear#1": 1, "relu#0": 0, "relu#1": 1}
    assert on == alike | {"relu.2.cat": 0, "linear_1": 0}


def test_calibration_runs_pieces_on_devices_of_their_own() -> None:
    module, inputs = models()["attention"]
    graph = placement.capture(module, inputs)
    cut = pieces.split(graph, in_random_pieces(graph, options_of(graph, HALVES), HALVES, 1))
    problem = problem_of(cut, devices(), objective="latency")
    where = planners.load("round_robin")(problem).placement
    assert any(np.array_equal(p, where) for p in _for_calibration(problem))


def plan_of(graph: placement.OpGraph) -> placement.Plan:
    problem = problem_of(graph, devices(), objective="latency")
    answer = Solution(np.asarray(graph.piece, np.int32), 1.0)
    return make_plan(problem, answer, planner="by hand")


@pytest.mark.parametrize("name", ["attention", "convolutions"])
def test_a_plan_with_pieces_binds_to_an_unchanged_module(name: str, tmp_path) -> None:
    module, inputs = models()[name]
    graph = placement.capture(module, inputs)
    cut = pieces.split(graph, in_random_pieces(graph, options_of(graph, HALVES), HALVES, 1))
    plan_of(cut).save(tmp_path / "plan.json")
    plan = placement.load_plan(tmp_path / "plan.json")
    assert plan.schema_version == 3 and not plan.inconsistencies()
    with plan.bind(module, inputs) as runner:
        assert runner.graph.fingerprint == cut.fingerprint
        torch.testing.assert_close(runner(*inputs), module(*inputs))


def edited(plan: placement.Plan, op: str, **changes: object) -> placement.Plan:
    data = json.loads(plan.model_dump_json())
    data["pieces"]["operators"][op] |= changes
    return placement.Plan.model_validate_json(json.dumps(data))


def test_plans_whose_pieces_do_not_fit_are_refused() -> None:
    module, inputs = models()["mlp"]
    cut = in_halves(module, inputs, linear=COLUMNS)
    plan = plan_of(cut)
    assert plan.pieces is not None and plan.pieces.operators["linear"].bounds == (0, 5, 10)
    with pytest.raises(PlanMismatch, match=r"10 elements .* \[0, 5, 10\], not at \[0, 4, 10\]"):
        edited(plan, "linear", bounds=[0, 4, 10]).bind(module, inputs)
    assert "do not cover" in edited(plan, "linear", bounds=[0, 5]).inconsistencies()[0]
    for wrong in ({"inputs": ["whole", 5, 0]}, {"outputs": [5]}):
        with pytest.raises(PlanMismatch, match="dimension 5 of a tensor with 2"):
            edited(plan, "linear", **wrong).bind(module, inputs)
    with pytest.raises(PlanMismatch, match="argument 7 of operator 'linear', which has 3"):
        edited(plan, "linear", numbers=[7]).bind(module, inputs)
    with pytest.raises(PlanMismatch, match="linear"):  # a weight cut along what it adds up
        edited(plan, "linear", inputs=["whole", 1, "whole"]).bind(module, inputs)


@pytest.mark.parametrize("program", ["torch_pipelining", "huggingface", "onnxruntime"])
def test_programs_that_place_modules_say_so(program: str) -> None:
    module, inputs = models()["mlp"]
    cut = in_halves(module, inputs, linear=COLUMNS)
    with pytest.raises(exporters.ExportError, match="1 operators in pieces, the first is 'linear'"):
        exporters.load(program)(plan_of(cut))


@pytest.mark.parametrize("ways, message", [
    (0, "0 pieces: give a number from 2 to 64"),
    (1, "1 pieces"),
    (100, "100 pieces"),
    (20, "20 pieces of 'Sequential': its largest dimension has 10 elements"),
    ((0.5, 0.6), "add up to 1.1"),
    ((1.5, -0.5), "must be positive"),
    ((0.5, float("nan")), "add up to nan"),
])  # fmt: skip
def test_ways_out_of_range(ways: object, message: str) -> None:
    module, inputs = models()["mlp"]
    graph = placement.capture(module, inputs)
    with pytest.raises(pieces.PiecesError, match=message):
        pieces.split(graph, ways)


def test_training_steps_are_refused() -> None:
    module, inputs = models()["mlp"]
    example = inputs, torch.randn(5, 4)
    graph = placement.capture(module, example, mode="training", loss=F.mse_loss)
    with pytest.raises(pieces.PiecesError, match="training step"):
        pieces.split(graph, 2)


def test_wrong_pieces_are_seen() -> None:
    """A cut that has the right shapes and the wrong numbers: softmax of halves."""
    module = nn.Sequential(nn.Linear(4, 6), nn.Softmax(1)).eval()
    graph = placement.capture(module, (torch.randn(3, 4),))
    with pytest.raises(pieces.PiecesError, match="other results in pieces"):
        pieces.split(graph, pieces.Pieces(HALVES, {"softmax": Rule((1,), (), (1,))}))


def test_styles_of_dtensor() -> None:
    module, inputs = models()["mlp"]
    script = str(exporters.load("dtensor")(plan_of(in_halves(module, inputs, **BOTH))).files[""])
    columns = "    '0': ColwiseParallel(use_local_output=False),\n"
    assert f"{columns}    '2': RowwiseParallel(use_local_output=False),\n}}" in script
    plan = plan_of(in_halves(module, inputs, linear=Rule((0, WHOLE, WHOLE), (), (0,))))
    script = str(exporters.load("dtensor")(plan).files[""])
    assert "    '0': SequenceParallel(sequence_dim=0),\n}" in script


def twice() -> nn.Module:
    """A layer that runs twice, and one whose weight another reads."""
    return module_of(
        lambda self, x: F.linear(self.b(self.a(self.a(x))), self.b.weight),
        a=nn.Linear(6, 6), b=nn.Linear(6, 6),
    )  # fmt: skip


@pytest.mark.parametrize("module, cuts, shares, message", [
    (twice(), {"linear": COLUMNS}, HALVES,
     "operator 'linear_1' reads 'a.weight' whole, which 'linear' has in pieces"),
    (twice(), {"linear_2": COLUMNS}, HALVES, "'linear_3' reads 'b.weight' whole"),
    (twice(), {"linear": COLUMNS, "linear_1": ROWS}, HALVES, "'a' is cut in two ways"),
    (nn.Sequential(nn.Linear(6, 5)), {"linear": COLUMNS}, HALVES,
     r"'linear' is cut at \[0, 2, 5\], DTensor would cut it at \[0, 3, 5\]"),
    (nn.Sequential(nn.Linear(6, 8)), {"linear": COLUMNS}, (0.25, 0.75), "have the shares"),
    (nn.Sequential(nn.Conv1d(3, 4, 1)),
     {"conv1d": COLUMNS}, HALVES, "operator 'conv1d' has its parameters"),
    (nn.Linear(6, 6), {"linear": COLUMNS}, HALVES, "which modules|module of its own"),
])  # fmt: skip
def test_what_dtensor_cannot_say(module, cuts, shares, message):
    shape = (5, 3, 6) if "conv1d" in cuts else (5, 6)
    graph = placement.capture(module.eval(), (torch.randn(*shape),))
    cut = pieces.split(graph, pieces.Pieces(shares, cuts))
    with pytest.raises(exporters.ExportError, match=message):
        exporters.load("dtensor")(plan_of(cut))


def test_dtensor_has_pieces_of_one_number_on_one_device() -> None:
    module, inputs = models()["mlp"]
    plan = plan_of(in_halves(module, inputs, **BOTH))
    moved = exporters.moved(plan, dict(plan.assignment) | {"relu#1": "cpu:0"})
    one = next(iter(plan.pieces.operators.values()))
    for operators, message in (
        ({"ghost": one}, "pieces.operators['ghost']: the assignment has no operator 'ghost#0'"),
        ({"linear": one}, None),
    ):
        wrong = plan.pieces.model_copy(update={"operators": operators})
        said = inconsistencies(plan.model_copy(update={"pieces": wrong}))
        assert (message in said) if message else not any("ghost" in x for x in said)
    nowhere = {n: x.model_copy(update={"bounds": ()}) for n, x in plan.pieces.operators.items()}
    wrong = plan.pieces.model_copy(update={"operators": nowhere})
    with pytest.raises(exporters.ExportError, match="not say where the pieces of operator 'linear"):
        exporters.load("dtensor")(plan.model_copy(update={"pieces": wrong}))
    with pytest.raises(exporters.ExportError, match="no operators in pieces"):
        exporters.load("dtensor")(plan.model_copy(update={"pieces": None}))
    with pytest.raises(exporters.ExportError, match=r"'relu' are on \['cpu:0', 'cpu:0'\]"):
        exporters.load("dtensor")(moved)
