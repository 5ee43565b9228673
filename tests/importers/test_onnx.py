"""ONNX models as problems: hand-made ones with known sizes and work, and exported ones."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement import cli
from placement.cluster import Cluster, Device
from placement.importers import FormatError, load, save
from placement.problem import Problem
from tests.problems import written

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
from onnx import TensorProto, helper  # noqa: E402

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node


def value(name: str, shape: Sequence[Any] | None, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name: str, *shape: int, kind: int = FLOAT) -> Any:
    return helper.make_tensor(name, kind, shape, np.zeros(int(np.prod(shape)), int))


def numbers(name: str, *values: int) -> Any:
    return helper.make_tensor(name, INT64, [len(values)], values)


def saved(tmp: Path, nodes: Any, inputs: Any, outputs: Any, weights: Any = (), **how: Any) -> Path:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    path = tmp / "model.bin"  # found by content, not by name
    path.write_bytes(helper.make_model(graph, **how).SerializeToString())
    return path


def work_of(path: Path, **options: Any) -> tuple[list[float], list[float]]:
    """Operations and bytes of each operator: seconds where the other costs nothing."""
    operations = load(path, flops=1.0, memory_bandwidth=1e30, **options).compute_s[:, 0]
    moved = load(path, flops=1e30, memory_bandwidth=1.0, **options).compute_s[:, 0]
    return np.round(operations).tolist(), np.round(moved).tolist()


X, Y = [value("x", [3])], [value("y", [3])]


def convnet(tmp_path: Path) -> Path:
    """x [2,3,8,8] -> conv 4 of 3x3 (no padding) -> relu -> flatten -> gemm with 5 outputs."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv"),
        node("Relu", ["c"], ["r"], name="relu"),
        node("Flatten", ["r"], ["f"], name="flat"),
        node("Gemm", ["f", "v"], ["y"], transB=1),
    ]
    weights = [weight("w", 4, 3, 3, 3), weight("b", 4), weight("v", 5, 144)]
    return saved(tmp_path, nodes, [value("x", [2, 3, 8, 8])], [value("y", [2, 5])], weights)


def test_a_convnet(tmp_path: Path) -> None:
    path = convnet(tmp_path)
    problem = load(path)
    g = problem.graph
    assert g.name == "model"
    assert g.op_name == ("conv", "relu", "flat", "y")  # without a name: the first output
    assert g.op_kind == ("Conv", "Relu", "Flatten", "Gemm")
    assert g.op_signature[1] == "Relu(float[2,4,6,6])"
    assert "group = 1" not in g.op_signature[0] and "transB = 1" in g.op_signature[3]
    assert g.edges.tolist() == [[0, 1], [1, 2], [2, 3]]
    assert g.tensor_src.tolist() == [-1, 0, 1, 2, 3]
    assert g.tensor_bytes.tolist() == [1536, 1152, 1152, 1152, 40]  # 4 bytes each
    assert g.tensor_root.tolist() == [0, 1, 2, 2, 4]  # Flatten shares memory
    assert g.output_tensor.tolist() == [4]
    assert g.param_bytes.tolist() == [432, 16, 2880]
    assert problem.param_bytes_on(np.array([0, 0, 0, 1])).tolist() == [448, 2880, 0, 0]
    # 288 outputs x 27 products; the larger of in and out; nothing; 10 outputs x 144 products.
    operations, moved = work_of(path)
    assert operations == [2 * 288 * 27, 288, 0, 2 * 10 * 144]
    assert moved == [1536 + 448 + 1152, 2 * 1152, 0, 1152 + 2880 + 40]
    # The larger of the two counts.
    mixed = load(path, flops=1e3, memory_bandwidth=1e2).compute_s[:, 0]
    np.testing.assert_allclose(mixed, [31.36, 23.04, 0, 40.72])
    assert problem.profile.predicted is not None and problem.profile.predicted.all()
    assert problem.profile.provenance["predicted"] == "roofline"


def test_devices(tmp_path: Path) -> None:
    path = convnet(tmp_path)
    problem = load(path)
    assert problem.cluster.device_names == ("acc:0", "acc:1", "acc:2", "acc:3")
    problem = load(path, devices=2, bandwidth=1152.0, memory=10**6, objective="latency")
    assert problem.num_devices == 2 and problem.objective == "latency"
    assert problem.memory_bytes.tolist() == [10**6, 10**6]
    assert problem.transfer_s(1, 0, 1) == problem.transfer_s(1, 1, 0) == 1.0
    cluster = Cluster("unlike", (Device("slow", speed=0.5), Device("fast", speed=2.0)))
    unlike = load(path, cluster=cluster)
    np.testing.assert_allclose(unlike.compute_s, problem.compute_s[:, :1] / [0.5, 2.0])
    for options, message in (
        ({"devices": 0}, "devices = 0"),
        ({"flops": 0.0}, "flops = 0.0"),
        ({"cluster": cluster, "memory": 5}, "give either a cluster or memory"),
        ({"mode": "training"}, "mode cannot be set: ONNX files take devices, bandwidth, memory"),
        ({"objective": "speed"}, "'speed' is unknown"),
    ):
        with pytest.raises(FormatError, match=r"model\.bin") as error:
            load(path, **options)
        assert message in str(error.value)


def einsum(equation: str) -> Any:
    return node("Einsum", ["a", "b"], ["y"], equation=equation)


@pytest.mark.parametrize(
    ("operator", "shapes", "out", "operations"),
    [
        (node("MatMul", ["a", "b"], ["y"]), [(7, 2, 3), (3, 5)], [7, 2, 5], 2 * 70 * 3),
        (node("Gemm", ["a", "b"], ["y"], transA=1), [(3, 2), (3, 5)], [2, 5], 2 * 10 * 3),
        (node("Conv", ["a", "b"], ["y"], group=2, pads=[1, 1]), [(1, 4, 9), (6, 2, 3)],
         [1, 6, 9], 2 * 54 * 6),
        (node("ConvTranspose", ["a", "b"], ["y"], strides=[2, 2]), [(1, 3, 4, 4), (3, 2, 2, 2)],
         [1, 2, 8, 8], 2 * 48 * 8),
        (einsum("bij,jk->bik"), [(2, 3, 4), (4, 5)], [2, 3, 5], 240),
        (einsum("ij, jk"), [(3, 4), (4, 5)], [3, 5], 120),
        (einsum("...ij,...jk->...ik"), [(2, 3, 4), (2, 4, 5)], [2, 3, 5], 240),
        (node("Add", ["a", "b"], ["y"]), [(2, 3), (3,)], [2, 3], 6),
        (node("ReduceSum", ["a"], ["y"], keepdims=0), [(2, 3)], [], 6),
    ],
)  # fmt: skip
def test_operations(tmp_path, operator, shapes, out, operations):
    inputs = [value(x, shape) for x, shape in zip("ab", shapes, strict=False)]
    assert work_of(saved(tmp_path, [operator], inputs, [value("y", out)]))[0] == [operations]


def test_recurrent(tmp_path: Path) -> None:
    # 6 steps of 2 rows: 4 gates of 5 from 3 inputs and 5 states.
    lstm = node("LSTM", ["x", "w", "r"], ["y", "", "c"], hidden_size=5)
    weights = [weight("w", 1, 20, 3), weight("r", 1, 20, 5)]
    path = saved(tmp_path, [lstm], [value("x", [6, 2, 3])], [value("y", [6, 1, 2, 5])], weights)
    assert work_of(path)[0] == [2 * 12 * (60 + 100)]
    assert load(path).graph.tensor_bytes.tolist() == [144, 240, 40]  # the left out output is none


def test_parts_of_large_inputs(tmp_path: Path) -> None:
    gather = [node("Gather", ["table", "i"], ["e"]), node("Shape", ["e"], ["s"])]
    table = [weight("table", 1000, 8)]
    path = saved(tmp_path, gather, [value("i", [3], INT64)], [value("s", [2], INT64)], table)
    # Three indices, and three rows read and written; of a shape nothing is read.
    assert work_of(path)[1] == [24 + 2 * 96, 0]
    assert load(path).graph.param_bytes.tolist() == [32000]


def test_parameters(tmp_path: Path) -> None:
    """Tied by name, through Identity, or by one place in a data file; constants; half bytes."""
    external = weight("far", 4, 4)
    external.ClearField("float_data")
    external.data_location = TensorProto.EXTERNAL
    for key, text in (("location", "none.data"), ("offset", "64"), ("length", "64")):
        external.external_data.add(key=key, value=text)
    same = TensorProto()
    same.CopyFrom(external)
    same.name = "same"
    packed = TensorProto(name="packed", data_type=TensorProto.INT4, dims=[5], raw_data=b"\0\0\0")
    constant = helper.make_tensor("", FLOAT, [4], [1.0] * 4)
    nodes = [
        node("Constant", [], ["k"], value=constant),
        node("Identity", ["w"], ["alias"]),
        node("MatMul", ["x", "w"], ["a"]),
        node("MatMul", ["a", "alias"], ["b"]),
        node("MatMul", ["b", "far"], ["c"]),
        node("MatMul", ["c", "same"], ["d"]),
        node("Add", ["d", "k"], ["e"]),
        node("Cast", ["packed"], ["f"], to=FLOAT),
    ]
    inputs = [value("x", [2, 4]), value("w", [4, 4])]  # older files list weights as inputs too
    outputs, weights = [value("e", [2, 4]), value("f", [5])], [weight("w", 4, 4), external]
    g = load(saved(tmp_path, nodes, inputs, outputs, [*weights, same, packed])).graph
    assert g.op_name == ("a", "b", "c", "d", "e", "f")
    assert g.tensor_src.tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert g.param_bytes.tolist() == [64, 64, 3, 16]
    uses = np.stack([g.param_use_op, g.param_use], axis=1)
    assert uses.tolist() == [[0, 0], [1, 0], [2, 1], [3, 1], [4, 3], [5, 2]]


def test_dimensions(tmp_path: Path) -> None:
    """x [batch, 3, 4] is reshaped to what Shape and Concat say, [batch, 12], and multiplied."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Concat", ["n", "rest"], ["to"], axis=0),
        node("Reshape", ["x", "to"], ["flat"]),
        node("MatMul", ["flat", "w"], ["y"]),
    ]
    weights = [numbers("zero", 0), numbers("rest", -1), weight("w", 12, 5)]
    outputs = [value("y", ["batch", 5])]
    path = saved(tmp_path, nodes, [value("x", ["batch", 3, 4])], outputs, weights)
    why = "'x' has no size on axis 0, which is called 'batch'; set it: --dim batch=1"
    with pytest.raises(FormatError, match=why):
        load(path)
    assert load(path, dims={"batch": 6}).graph.tensor_bytes.tolist() == [288, 24, 8, 16, 288, 120]
    with pytest.raises(FormatError, match="no dimension 'bacth' to set; without a size are"):
        load(path, dims={"bacth": 6})
    with pytest.raises(FormatError, match="batch = 0 must be at least 1"):
        load(path, dims={"batch": 0})
    nameless = saved(tmp_path, nodes, [value("x", [None, 3, 4])], [value("y", None)], weights)
    with pytest.raises(FormatError, match=r"--dim x\.0=1"):
        load(nameless)
    assert load(nameless, dims={"x.0": 6}).graph.tensor_bytes[-1] == 120


def test_dimensions_that_depend_on_data(tmp_path: Path) -> None:
    nodes = [node("NonZero", ["x"], ["at"], name="nz"), node("Cast", ["at"], ["y"], to=FLOAT)]
    path = saved(tmp_path, nodes, [value("x", [3, 4])], [value("y", None)])
    with pytest.raises(FormatError, match=r"node 'nz' \(NonZero\): 'at' has no size on axis 1"):
        load(path)
    # The size is passed on to what follows.
    assert load(path, dims={"at.1": 7}).graph.tensor_bytes.tolist() == [48, 112, 56]


def sizes_of(path: Path, **options: Any) -> dict[str, int]:
    """Bytes of the first output of each operator, by the operator's name."""
    g = load(path, **options).graph
    pairs = zip(g.tensor_src, g.tensor_bytes, strict=True)
    return {g.op_name[op]: int(size) for op, size in pairs if op >= 0}


def test_what_follows_from_sizes_and_constants_is_computed(tmp_path: Path) -> None:
    """Of x [batch, 3, height]: a computed Pad, Range, Slice, Expand, and a mask's NonZero."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "last"], ["n"]),  # height
        node("Mod", ["n", "eight"], ["over"]),
        node("Sub", ["eight", "over"], ["more"]),  # to the next multiple of 8
        node("Concat", ["zeros", "more"], ["pads"], axis=0),
        node("Pad", ["x", "pads"], ["padded"]),
        node("Squeeze", ["n"], ["end"]),
        node("Range", ["zero", "end", "step"], ["grid"]),
        node("Div", ["n", "two"], ["half"]),
        node("Slice", ["x", "zero1", "half", "two"], ["cut"]),
        node("ConstantOfShape", ["n"], ["full"]),
        node("NonZero", ["mask"], ["at"]),
        node("Gather", ["x", "at"], ["picked"], axis=2),
    ]
    weights = [numbers("last", 2), numbers("eight", 8), numbers("zeros", 0, 0, 0, 0, 0)]
    weights += [numbers("two", 2), numbers("zero1", 0), numbers("mask", 1, 0, 1, 1)]
    weights += [helper.make_tensor(x, INT64, [], [v]) for x, v in (("zero", 0), ("step", 2))]
    outputs = [value(x, None) for x in ("padded", "grid", "cut", "picked")]
    path = saved(tmp_path, nodes, [value("x", ["batch", 3, "height"])], outputs, weights)
    sizes = sizes_of(path, dims={"batch": 2, "height": 13})
    assert sizes["padded"] == 2 * 3 * 16 * 4
    assert sizes["grid"] == 7 * 8  # 0, 2, ..., 12
    assert sizes["cut"] == 2 * 3 * 6 * 4
    assert sizes["full"] == 13 * 4
    assert sizes["at"] == 3 * 8 and sizes["picked"] == 2 * 3 * 3 * 4


def test_nothing_large_is_computed(tmp_path: Path) -> None:
    huge = numbers("huge", 2**40)
    nodes = [node("ConstantOfShape", ["huge"], ["z"]), node("Add", ["z", "x"], ["y"])]
    path = saved(tmp_path, nodes, [value("x", [1])], [value("y", None)], [huge])
    assert sizes_of(path) == {"z": 2**42, "y": 2**42}


def old(tmp_path: Path, opset: int, nodes: Any, inputs: Any, weights: Any = ()) -> dict[str, int]:
    outputs, opsets = [value(nodes[-1].output[0], None)], [helper.make_opsetid("", opset)]
    how = {"opset_imports": opsets, "ir_version": 3}
    return sizes_of(saved(tmp_path, nodes, inputs, outputs, weights, **how))


def test_operators_of_old_versions(tmp_path: Path) -> None:
    nodes = [
        node("Relu", ["x"], ["r"], consumed_inputs=[0]),
        node("Add", ["r", "b"], ["a"], broadcast=1, axis=1),
        node("BatchNormalization", ["a", *"bbbb"], ["n", *"ijkl"], consumed_inputs=[0, 0, 0, 1, 1]),
        node("Pad", ["n"], ["p"], paddings=[0, 0, 1, 1, 0, 0, 1, 1]),
        node("Upsample", ["p"], ["u"], height_scale=2.0, width_scale=3.0),
        node("Concat", ["u", "u"], ["c"]),  # axis 1, where none is said
        node("Dropout", ["c"], ["d", "mask"]),
        node("Reshape", ["d"], ["f"], shape=[0, -1]),
    ]
    sizes = old(tmp_path, 1, nodes, [value("x", [2, 3, 4, 4]), value("b", [3])], [weight("b", 3)])
    padded = 2 * 3 * 6 * 6 * 4
    assert sizes["a"] == sizes["n"] == 2 * 3 * 4 * 4 * 4 and sizes["p"] == padded
    assert sizes["u"] == 6 * padded and sizes["c"] == sizes["d"] == sizes["f"] == 12 * padded
    scales = helper.make_tensor("s", FLOAT, [4], [1, 1, 2, 2])
    up = [node("Upsample", ["x", "s"], ["u"])]
    assert old(tmp_path, 9, up, [value("x", [1, 2, 4, 4])], [scales]) == {"u": 2 * 64 * 4}


def test_operators_of_onnxruntime(tmp_path: Path) -> None:
    nodes = [
        node("FusedConv", ["x", "w"], ["c"], domain="com.microsoft", activation="Relu"),
        node("QuickGelu", ["c"], ["q"], domain="com.microsoft"),
        node("FusedMatMul", ["q", "q"], ["y"], domain="com.microsoft", transA=1, alpha=0.5),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    inputs, weights = [value("x", [1, 3, 6, 8])], [weight("w", 4, 3, 3, 3)]
    path = saved(tmp_path, nodes, inputs, [value("y", None)], weights, opset_imports=opsets)
    # [1, 4, 4, 6]; of its 6 columns each with each: sums of 4.
    assert load(path).graph.tensor_bytes.tolist() == [576, 384, 384, 4 * 6 * 6 * 4]
    assert work_of(path)[0] == [2 * 96 * 27, 96, 2 * 144 * 4]


@pytest.mark.parametrize("width", [128, 64])
def test_attention_over_cached_keys(width: int, tmp_path: Path) -> None:
    """Every query with each of 4,096 keys, of which 512 are new; values may be narrower."""
    query = 32 * 512
    shapes = {"q": [1, 32, 512, 128], "k": [1, 8, 512, 128], "v": [1, 8, 512, width]}
    past = {"pk": [1, 8, 3584, 128], "pv": [1, 8, 3584, width]}
    cases = ("qkv", ["y"], shapes, 512), ([*"qkv", "", *past], [*"yab"], shapes | past, 4096)
    for names, results, tensors, keys in cases:
        nodes, opset = [node("Attention", names, results)], [helper.make_opsetid("", 23)]
        inputs = [value(name, shape) for name, shape in tensors.items()]
        path = saved(tmp_path, nodes, inputs, [value("y", None)], opset_imports=opset)
        assert work_of(path)[0] == [2 * query * (128 + width) * keys]


def test_half_a_spectrum_is_the_default(tmp_path: Path) -> None:
    nodes = [node("STFT", ["x", "step", "", "size"], ["y"])]
    weights = [helper.make_tensor(x, INT64, [], [v]) for x, v in (("step", 8), ("size", 16))]
    path = saved(tmp_path, nodes, [value("x", [1, 128, 1])], [value("y", None)], weights)
    assert sizes_of(path) == {"y": 15 * 9 * 2 * 4}


def test_a_branch_that_a_constant_chooses(tmp_path: Path) -> None:
    """And one that the sizes do not allow."""
    wide = body([node("MatMul", ["x", "w"], ["a"])], [], [value("a", None)])
    narrow = body([node("MatMul", ["x", "v"], ["b"])], [], [value("b", None)])
    weights = [weight("w", 4, 5), weight("v", 3, 6), helper.make_tensor("no", BOOL, [], [False])]
    for cond, rows, size in (("no", 3, 6), ("any", 4, 5), ("any", 3, 6)):
        nodes = [node("If", [cond], ["y"], then_branch=wide, else_branch=narrow)]
        inputs = [value("x", [2, rows]), value("any", [], BOOL)]
        path = saved(tmp_path, nodes, inputs, [value("y", None)], weights)
        assert sizes_of(path) == {"y": 2 * size * 4}
        assert work_of(path)[0] == [2 * 2 * size * rows]


def test_a_loop_stacks_what_it_scans(tmp_path: Path) -> None:
    loop = body(
        [node("Add", ["h", "h"], ["h2"]), node("Identity", ["go"], ["go2"])],
        [value("i", [], INT64), value("go", [], BOOL), value("h", None)],
        [value("go2", [], BOOL), value("h2", None), value("h2", None)],
    )
    nodes = [node("Loop", ["trips", "", "x"], ["last", "all"], body=loop)]
    trips = helper.make_tensor("trips", INT64, [], [7])
    path = saved(tmp_path, nodes, [value("x", [3])], [value("all", None)], [trips])
    assert load(path).graph.tensor_bytes.tolist() == [12, 12, 7 * 12]


def test_sizes_that_the_file_declares_count_only_where_all_inputs_have_theirs(tmp_path):
    nodes = [node("NonZero", ["x"], ["at"]), node("Cast", ["at"], ["y"], to=FLOAT)]
    path = saved(tmp_path, nodes, [value("x", [3, 4])], [value("y", [2, 5])])
    with pytest.raises(FormatError, match=r"set it: --dim at\.1=1"):
        load(path)
    path = saved(tmp_path, nodes[:1], [value("x", [3, 4])], [value("at", [2, 5], INT64)])
    assert sizes_of(path) == {"at": 80}
    path = saved(tmp_path, nodes[:1], [value("x", ["n", 4])], [value("at", [2, 5], INT64)])
    with pytest.raises(FormatError, match=r"set it: --dim at\.1=1"):
        load(path, dims={"n": 3})
    with pytest.raises(FormatError, match=r"x\.1 = 5 contradicts the size of 'x', axis 1, .* is 4"):
        load(path, dims={"n": 3, "x.1": 5})


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = saved(tmp_path, [node("Relu", ["x"], ["y"], name="name")], X, Y)
    path.write_bytes(path.read_bytes().replace(b"name", b"n\xffme"))
    with pytest.raises(FormatError, match="is not UTF-8"):
        load(path)


def body(nodes: Any, inputs: Any, outputs: Any, weights: Any = ()) -> Any:
    return helper.make_graph(nodes, "body", inputs, outputs, list(weights))


def test_subgraphs(tmp_path: Path) -> None:
    """A Loop of 7 products with w; an If that uses y and u; a Scan over 9 rows."""
    loop = body(
        [node("MatMul", ["h", "w"], ["h2"]), node("Identity", ["go"], ["go2"])],
        [value("i", [], INT64), value("go", [], BOOL), value("h", [2, 4])],
        [value("go2", [], BOOL), value("h2", [2, 4])],
    )
    adds = [node("MatMul", ["y", "u"], ["t"]), node("Add", ["t", "own"], ["t2"])]
    then = body(adds, [], [value("t2", None)], [weight("own", 4)])
    other = body([node("Relu", ["y"], ["e"])], [], [value("e", None)])
    scan = body(
        [node("Add", ["s", "row"], ["s2"]), node("Identity", ["s2"], ["each"])],
        [value("s", [4]), value("row", [4])],
        [value("s2", [4]), value("each", [4])],
    )
    nodes = [
        node("Constant", [], ["trips"], value=helper.make_tensor("", INT64, [], [7])),
        node("Loop", ["trips", "", "x"], ["y"], body=loop, name="loop"),
        node("If", ["cond"], ["z"], then_branch=then, else_branch=other, name="if"),
        node("Scan", ["s0", "rows"], ["last", "all"], body=scan, num_scan_inputs=1, name="scan"),
    ]
    inputs = [value("x", [2, 4]), value("cond", [], BOOL), value("s0", [4]), value("rows", [9, 4])]
    outputs, weights = [value("z", None), value("all", None)], [weight(x, 4, 4) for x in "wu"]
    path = saved(tmp_path, nodes, inputs, outputs, weights)
    problem = load(path)
    g = problem.graph
    assert g.op_name == ("loop", "if", "scan")
    assert g.edges.tolist() == [[0, 1]]  # only the branches of If read y
    assert g.op_signature[1].endswith("then_branch=<MatMul, Add>)")
    assert g.tensor_bytes.tolist() == [32, 1, 16, 144, 32, 32, 16, 144]
    # w for the loop, u and its own for the If (constants first: 7).
    on_their_own = [problem.param_bytes_on(np.where(np.arange(3) == n, 0, 1))[0] for n in range(3)]
    assert on_their_own == [8 + 64, 64 + 16, 0]
    assert work_of(path)[0] == [7 * 2 * 8 * 4, 2 * 8 * 4 + 8, 9 * 4]


def test_functions_are_inlined(tmp_path: Path) -> None:
    domain = "mine"
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(domain, 1)]
    twice = helper.make_function(
        domain, "Twice", ["a"], ["b"], [node("Relu", ["a"], ["m"]), node("Tanh", ["m"], ["b"])],
        opsets,
    )  # fmt: skip
    nodes = [node("Twice", ["x"], ["y"], domain=domain)]
    path = saved(tmp_path, nodes, X, Y, functions=[twice], opset_imports=opsets)
    assert load(path).graph.op_kind == ("Relu", "Tanh")


def test_functions_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    """Forty, each of which calls the next one twice: 2^40 nodes in a file of 4 KB."""
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]

    def calls(i: int) -> list[Any]:
        if i == 40:
            return [node("Relu", ["a"], ["b"])]
        one, two = ("a", "m"), ("m", "b")
        return [node(f"F{i + 1}", [x], [y], domain="mine") for x, y in (one, two)]

    functions = [
        helper.make_function("mine", f"F{i}", ["a"], ["b"], calls(i), opsets) for i in range(41)
    ]
    nodes = [node("F0", ["x"], ["y"], domain="mine")]
    path = saved(tmp_path, nodes, X, Y, functions=functions, opset_imports=opsets)
    with pytest.raises(FormatError, match=r"its functions call each other: over 1,048,576 nodes"):
        load(path)


def test_nodes_in_any_order_and_with_one_name(tmp_path: Path) -> None:
    nodes = [node("Relu", ["b"], ["y"], name="n"), node("Relu", ["x"], ["b"], name="n")]
    g = load(saved(tmp_path, nodes, X, Y)).graph
    assert g.op_name == ("n#2", "n") and g.edges.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "the ONNX model has no nodes"),
        ([node("Relu", ["q"], ["y"], name="n")], "node 'n' (Relu): input 'q' is made by no node"),
        ([node("Relu", ["x"], ["y"]), node("Tanh", ["x"], ["y"])], "output 'y' is made twice"),
        (
            [node("Identity", [], ["y"])],
            "node 'y' (Identity): shape inference failed: Node with schema(::Identity:",
        ),
        ([node("Relu", ["y"], ["b"]), node("Relu", ["b"], ["y"])], "cycle: "),
        ([node("SequenceConstruct", ["x"], ["s"])], "node 's' (SequenceConstruct): 's' is no"),
        (
            [node("Fancy", ["x"], ["y"], domain="mine")],
            "node 'y' (mine.Fancy): what this operator computes is not known; write the model",
        ),
        (
            [node("Attention", ["x", "x", "x"], ["y"], name="a", domain="com.microsoft")],
            "node 'a' (com.microsoft.Attention): what this operator computes is not known",
        ),
        ([node("Einsum", ["x"], ["y"], equation="\0i")], "(Einsum): b'\\x00i' is no equation"),
        ([node("Constant", [], ["y"], value_floats=[1.0, 2, 3])], "nothing to place"),
        (
            [node("Cast", ["t"], ["y"], to=FLOAT), node("Constant", [], ["t"], value_string="a")],
            "node 't' (Constant): 't' has elements of type STRING",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, nodes: Any, message: str) -> None:
    path = saved(tmp_path, nodes, X, Y)
    with pytest.raises(FormatError) as error:
        load(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = convnet(tmp_path)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(FormatError, match=r"pip install 'device-placement-rl\[onnx\]'"):
        load(path)


def test_commands(tmp_path: Path, says: Any) -> None:
    nodes = [node("MatMul", ["x", "w"], ["y"]), node("Relu", ["y"], ["z"])]
    ends = [value("x", ["n", 4])], [value("z", ["n", 4])]
    path = saved(tmp_path, nodes, *ends, [weight("w", 4, 4)])
    assert "--dim n=1" in says(["plan", path, "--planner", "heft"], cli.BAD_INPUT).err
    args = ["--devices", "2", "--dim", "n=10", "--flops", "1e3", "--memory-bandwidth", "1e2"]
    said = says(["plan", path, "--planner", "heft", *args, "--objective", "latency", "--json"])
    got = said.json
    assert set(got["assignment"]) == {"y", "z"}
    # 160 + 64 + 160 bytes, then 160 + 160, at 100 a second.
    assert got["value_s"] == got["lower_bound_s"] == pytest.approx(3.84 + 3.2)
    assert "the times of 2 of 2 operators are predicted" in said.err
    cluster = written(tmp_path / "cluster.yaml", "devices: [{name: a}, {name: b, speed: 2}]")
    file = tmp_path / "problem.json"
    said = says(["import", path, "--dim", "n=10", "--cluster", cluster, "--out", file])
    problem = load(file)
    assert problem.cluster.device_names == ("a", "b")
    assert problem.profile.predicted is not None and problem.profile.predicted.all()
    assert "predicted from their description" in said.err


def same(a: Problem, b: Problem) -> bool:
    return a.graph.fingerprint == b.graph.fingerprint and np.array_equal(a.compute_s, b.compute_s)


def test_an_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch model: its parameters are those of the module, and its work is what it must be."""
    pytest.importorskip("onnxscript", reason="the package onnxscript is not installed")
    import torch
    from torch import nn

    monkeypatch.chdir(tmp_path)
    first = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    module = nn.Sequential(*first, nn.Linear(8, 64), nn.Linear(64, 8)).eval()
    module[5].weight = nn.Parameter(module[4].weight.detach().T.contiguous())
    x = torch.randn(2, 3, 16, 16)
    shapes = {"input": {0: torch.export.Dim("batch")}}
    exported = torch.onnx.export(module, (x,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    exported.save("inside.onnx")
    exported.save("outside.onnx", external_data=True)
    Path("outside.onnx.data").unlink()  # sizes are known without the weights
    with pytest.raises(FormatError, match="--dim batch=1"):
        load("inside.onnx")
    problem = load("inside.onnx", dims={"batch": 2})
    assert same(problem, load("outside.onnx", dims={"batch": 2}))
    save(problem, "problem.json")
    assert same(problem, load("problem.json"))
    g = problem.graph
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    assert weights <= g.param_bytes.sum() <= weights + 200  # and constants: axes, shapes
    kinds = dict(zip(g.op_kind, work_of(Path("inside.onnx"), dims={"batch": 2})[0], strict=True))
    assert kinds["Conv"] == 2 * (2 * 8 * 16 * 16) * 27 and kinds["Gemm"] == 2 * 2 * 8 * 64
    assert g.op_kind.count("Gemm") == 2
