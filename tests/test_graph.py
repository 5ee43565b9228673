"""The operator graph: what it derives, what it refuses, what its fingerprint sees."""

import pickle
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from placement.graph import GraphError, OpGraph

#  x ──▶ A ──a──▶ B ──b──▶ D      tensors: x 0, a 1, b 2, c 3 (made by C), d 4 (the output)
#  └────────────▶ C ──c──▶ D      a is used by B and C
GOOD: dict[str, Any] = {"name": "diamond", "op_name": ["A", "B", "C", "D"], "output_tensor": [4]}
GOOD |= {"tensor_src": [-1, 0, 1, 2, 3], "tensor_bytes": [1, 2, 3, 4, 5]}
GOOD |= {"uses": [(1, 2), (0, 0), (0, 2), (1, 1), (3, 3), (2, 3)]}
GOOD |= {"param_bytes": [10, 20], "param_uses": [(0, 0), (1, 0), (1, 1)]}


def build(**changes: Any) -> OpGraph:
    return OpGraph.build(**{**GOOD, **changes})


def test_what_is_derived() -> None:
    g = build()
    assert (g.num_ops, g.num_tensors, g.num_groups) == (4, 5, 4)
    assert g.edges.tolist() == [[0, 1], [0, 2], [1, 3], [2, 3]]  # x is no operator's

    def rows(values, ptr):
        return [values[a:b].tolist() for a, b in pairwise(ptr)]

    assert rows(g.use_dst, g.use_ptr) == [[0, 2], [1, 2], [3], [3], []]
    assert rows(g.in_tensor, g.in_ptr) == [[0], [1], [0, 1], [2, 3]]
    assert rows(g.out_tensor, g.out_ptr) == [[1], [2], [3], [4]]
    assert g.op_param_bytes.tolist() == [10, 30, 0, 0]
    assert g.tensor_root.tolist() == [0, 1, 2, 3, 4]
    assert "4 operators, 5 tensors, 4 edges" in repr(g)
    one = OpGraph.build("one", ["A"], [], [], [])  # the smallest
    assert (one.num_ops, one.num_tensors, len(one.edges)) == (1, 0, 0)
    # Repeated uses are merged, groups renumbered.
    assert len(build(uses=[*GOOD["uses"], (1, 2), (1, 2)]).use_dst) == 6
    assert build(group=[7, -3, 7, 5]).group.tolist() == [0, 1, 0, 2]


def test_arrays_have_one_memory_layout() -> None:
    """However they were given: for each other one the kernels would be compiled again."""
    equal = np.broadcast_to(np.int64(3), 5)
    frozen = np.array([10, 20])
    frozen.setflags(write=False)
    g = build(tensor_bytes=equal, param_bytes=frozen)
    every_second = np.arange(10, dtype=np.int32)[::2] // 2
    g = replace(g, tensor_root=every_second, output_tensor=np.array([4]))
    for field in fields(g):
        array = getattr(g, field.name)
        if isinstance(array, np.ndarray):
            assert array.flags.c_contiguous and array.flags.writeable, field.name
    assert g.tensor_root.tolist() == [0, 1, 2, 3, 4]
    assert g.output_tensor.dtype == np.int32


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"op_name": [], "tensor_src": [], "tensor_bytes": [], "uses": []}, "has no operators"),
        ({"op_name": ["A", "B", "A", "D"]}, r"must be unique; repeated: \['A'\]"),
        ({"tensor_bytes": [1, 2]}, "tensor_bytes has 2 entries, expected 5"),
        ({"tensor_root": [0, 1]}, "tensor_root has 2 entries, expected 5"),
        ({"op_kind": ["x"]}, "op_kind has 1 entries, expected 4"),
        ({"group": [0]}, "group has 1 entries, expected 4"),
        ({"is_backward": [True]}, "is_backward has 1 entries, expected 4"),
        ({"tensor_src": [-2, 0, 1, 2, 3]}, r"tensor_src\[0\] = -2 is outside -1..3"),
        ({"uses": [(1, 4)]}, r"use_dst\[0\] = 4 is outside 0..3"),
        ({"uses": [(9, 1)]}, r"use_tensor\[0\] = 9 is outside 0..4"),
        ({"tensor_root": [0, 1, 2, 3, 5]}, r"tensor_root\[4\] = 5 is outside 0..4"),
        ({"param_uses": [(0, 2)]}, r"param_use\[0\] = 2 is outside 0..1"),
        ({"param_uses": [(4, 0)]}, r"param_use_op\[0\] = 4 is outside 0..3"),
        ({"output_tensor": [5]}, r"output_tensor\[0\] = 5 is outside 0..4"),
        ({"tensor_bytes": [1, 2, -3, 4, 5]}, "must not be negative"),
        ({"param_bytes": [2**62, 2**62]}, "param_bytes must not .* together 9223372036854775808"),
        ({"uses": [(3, 1)]}, r"operator 1 \('B'\) uses a tensor of operator 2 \('C'\)"),
        ({"uses": [(2, 1)]}, "numbered in topological order"),  # its own output
    ],
)
def test_what_is_no_graph(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        build(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"op_name": ["A", "B", "C", "E"]},
        {"op_signature": ["op", "op", "op", "op(3)"]},
        {"tensor_src": [-1, 0, 1, 1, 3]},
        {"tensor_bytes": [1, 2, 3, 4, 6]},
        {"tensor_root": [0, 1, 1, 3, 4]},
        {"uses": GOOD["uses"][1:]},
        {"param_bytes": [10, 21]},
        {"param_uses": [(0, 0), (1, 1)]},
        {"group": [0, 0, 1, 2]},
        {"is_backward": [False, False, False, True]},
        {"output_tensor": [3]},
        {"output_tensor": [3, 4]},
    ],
)
def test_the_fingerprint_sees_every_change(changes: dict[str, Any]) -> None:
    assert build(**changes).fingerprint != build().fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"uses": GOOD["uses"][::-1]},
        {"group": [9, 8, 7, 6]},
        {"op_module": ["layer.0"] * 4},
        {"program": object()},
        {"tensor_bytes": np.array([1, 2, 3, 4, 5], np.int16)},
    ],
)
def test_the_fingerprint_does_not_depend_on_the_way_of_writing(changes: dict[str, Any]) -> None:
    assert build(**changes).fingerprint == build().fingerprint


def test_pure_data_can_be_sent_elsewhere() -> None:
    g = build(program=lambda: None)
    copy = pickle.loads(pickle.dumps(g.without_program()))
    assert copy.fingerprint == g.fingerprint
    assert copy.program is None
