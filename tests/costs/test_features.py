"""What an operator costs by its description, and where the critical path runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.costs.features import CLASSES, features, parameters, parse, slack
from placement.graph import OpGraph
from tests.problems import DIAMOND, graph_of, random_problem


def one(signature: str, written_bytes: int) -> dict[str, float]:
    """The columns of a graph of one operator."""
    known = features(graph_of(1, [], written_bytes, op_signature=[signature], op_kind=["op"]))
    numbers = {name: float(values[0]) for name, values in known.columns.items()}
    return numbers | {"class": CLASSES[known.op_class[0]]}


@pytest.mark.parametrize(
    ("signature", "written_bytes", "flops", "shape", "op_class"),
    [
        # Products are batch x (rows x inner) @ (inner x outer), 2 operations each.
        ("aten.linear.default(f32[2,8,16], f32[32,16], f32[32])", 4 * 2 * 8 * 32,
         2 * 16 * 16 * 32, (1, 16, 16, 32), "product"),
        ("aten.addmm.default(f32[96], f32[16,32], f32[32,96])", 4 * 16 * 96,
         2 * 16 * 32 * 96, (1, 16, 32, 96), "product"),
        ("aten.bmm.default(f32[3,4,8], f32[3,8,5])", 4 * 3 * 4 * 5,
         2 * 3 * 4 * 8 * 5, (3, 4, 8, 5), "product"),
        # 8 x 16 x 16 results of 3 x 7 x 7 products each
        ("aten.conv2d.default(f32[1,3,32,32], f32[8,3,7,7], None, [2, 2], [3, 3])",
         4 * 8 * 256, 2 * 8 * 256 * 147, (1, 256, 147, 8), "convolution"),
        # depthwise: 8 groups of one channel
        ("aten.conv2d.default(f32[1,8,4,4], f32[8,1,3,3], None, [1, 1], [1, 1], [1, 1], 8)",
         4 * 8 * 16, 2 * 8 * 16 * 9, (8, 16, 9, 1), "convolution"),
        # 2 heads: queries by keys, softmax of 12 a score, by values
        ("aten.scaled_dot_product_attention.default(f32[1,2,16,8], f32[1,2,10,8], f32[1,2,10,8])",
         4 * 2 * 16 * 8, 4 * 2 * 16 * 10 * 8 + 12 * 2 * 16 * 10, (2, 16, 8, 10), "attention"),
        # each of 64 x 56 x 56 results is the largest of 9; a window is no larger than its input
        ("aten.max_pool2d.default(f32[1,64,112,112], [3, 3], [2, 2], [1, 1])",
         4 * 64 * 56 * 56, 64 * 56 * 56 * 9, (1, 64 * 56 * 56, 9, 1), "other"),
        ("aten.avg_pool2d.default(f32[1,640,3,3], [640, 640], [640, 640], [0, 0], True)",
         4 * 640, 640 * 9, (1, 640, 9, 1), "other"),
        ("aten.adaptive_avg_pool1d.default(f32[1,256,9], [1])", 4 * 256,
         256 * 9, (1, 256, 9, 1), "other"),
        ("aten.add.Tensor(f32[4,8], f32[8])", 4 * 32, 32, (4, 1, 8, 1), "other"),
    ],
)  # fmt: skip
def test_work_of_an_operator(signature, written_bytes, flops, shape, op_class):
    values = one(signature, written_bytes)
    assert values["flops"] == flops
    assert tuple(values[x] for x in ("batch", "rows", "inner", "outer")) == shape
    assert values["class"] == op_class
    assert values["written_bytes"] == written_bytes


def test_bytes_of_an_operator() -> None:
    linear = one("aten.linear.default(f32[2,16], f32[32,16], f32[32])", 4 * 64)
    assert linear["read_bytes"] == 4 * (32 + 512 + 32)
    assert linear["intensity"] == 2 * 2 * 16 * 32 / (4 * (32 + 512 + 32 + 64))
    # A look-up reads its rows and indices, not the table.
    lookup = one("aten.embedding.default(f32[1000,32], i64[1,16])", 4 * 16 * 32)
    assert lookup["read_bytes"] == 4 * 16 * 32 + 8 * 16
    # 2 bags of 6 rows together; the table is as large as it likes.
    bags = "aten.embedding_bag.padding_idx(f32[{},32], i64[6], i64[2], False, 0)"
    values = one(bags.format(1000), 4 * 2 * 32)
    assert values["read_bytes"] == 4 * 6 * 32 + 8 * 6 + 8 * 2
    assert values["flops"] == 6 * 32
    assert one(bags.format(10**6), 4 * 2 * 32) == values
    view = one("aten.transpose.int(f32[1,16,2,16], 1, 2)", 4 * 512)
    assert view["read_bytes"] == view["written_bytes"] == view["flops"] == 0
    assert view["class"] == "view"


def test_a_signature_taken_apart() -> None:
    call = parse("aten.cat.default([bf16[1,4], b[1,8], i64[]], 1)")
    assert call.kind == "cat"
    assert call.tensors == ((2, (1, 4)), (1, (1, 8)), (8, ()))
    assert parse("op").tensors == ()  # a graph whose kinds are not torch's


@given(st.text(max_size=40), st.integers(0, 10**6), st.booleans())
def test_any_signature_has_finite_parameters(text: str, size: int, shares: bool) -> None:
    _, values = parameters(text, float(size), shares)
    assert np.isfinite(values).all()
    assert min(values) >= 0


@given(
    st.sampled_from(["linear", "mm", "bmm", "conv2d", "matmul", "add", "lstm", "embedding"]),
    st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=4),
)
def test_any_shapes_have_finite_parameters(kind: str, shapes: list[list[int]]) -> None:
    tensors = ", ".join(f"f32[{','.join(map(str, s))}]" for s in shapes)
    _, values = parameters(f"aten.{kind}.default({tensors})", 64.0, False)
    assert np.isfinite(values).all()


def test_what_is_touched_before_parameters_and_code_are_used_again() -> None:
    # Two layers, weights w (100 bytes) and v (40 bytes), over two time steps: a0 -> b0, a0 -> a1,
    # a1 -> b1, b0 -> b1. An a touches 10 bytes, a b 20. In an order that reads parameters while
    # they are cached, again and again:
    #   a0 a1 b0 b1 | a0 a1 b0 b1
    #   10 10 20 20
    facts = {"param_bytes": [100, 40], "param_uses": [(0, 0), (2, 0), (1, 1), (3, 1)]}
    facts |= {"op_kind": ["aten.a", "aten.b"] * 2, "op_name": ["a0", "b0", "a1", "b1"]}
    facts |= {"op_signature": ["aten.a.default()", "aten.b.default()"] * 2}
    graph = graph_of(4, [(0, 1), (0, 2), (2, 3), (1, 3)], [10, 20, 10, 20], **facts)
    values = features(graph)
    assert (values.read_bytes + values.written_bytes).tolist() == [10, 20, 10, 20]
    assert values.param_gap_bytes.tolist() == [40, 20, 0, 0]
    assert values.kind_gap_bytes.tolist() == values.param_gap_bytes.tolist()
    plain = features(OpGraph.build("plain", ["a"], [0], [8], []))
    assert plain.param_gap_bytes.tolist() == [0]  # no parameters


def test_dependencies() -> None:
    #  a(1) -> b(2) -> d(1)     path a b d: 4 s; c may start 1.5 s later
    #     \--> c(0.5) -/
    graph = graph_of(4, DIAMOND, 1)
    values = features(graph)
    assert values.fan_in.tolist() == [0, 1, 1, 2]
    assert values.fan_out.tolist() == [2, 1, 1, 0]
    assert values.level.tolist() == [0, 1, 1, 2]
    where = slack(graph, np.array([1.0, 2.0, 0.5, 1.0]))
    assert where.path_s == 4.0
    assert where.start_s.tolist() == [0, 1, 1, 3]
    assert where.slack_s.tolist() == [0, 0, 1.5, 0]
    assert where.critical.tolist() == [True, True, False, True]


@pytest.mark.parametrize("seed", range(5))
def test_slack_is_how_much_longer_an_operator_may_take(seed: int) -> None:
    problem = random_problem(seed)
    graph, seconds = problem.graph, problem.profile.compute_s[:, 0]
    where = slack(graph, seconds)
    for n in range(graph.num_ops):
        longer = seconds.copy()
        longer[n] += where.slack_s[n]
        assert slack(graph, longer).path_s == pytest.approx(where.path_s)
        longer[n] += 1.0
        assert slack(graph, longer).path_s == pytest.approx(where.path_s + 1.0)
