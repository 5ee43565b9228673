"""Workload files: hand-made ones with known content, mistakes, and the published ones."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.importers import FormatError, load
from placement.simulator import simulate
from tests.problems import written


def node(key: int, cpu: float = 20.0, acc: float = 2.0, **more: Any) -> dict[str, Any]:
    times = {"supportedOnFpga": True, "cpuLatency": cpu, "fpgaLatency": acc}
    return {"id": key, "isBackwardNode": False, **times, **more}


def edge(src: int, dst: int, cost: float) -> dict[str, Any]:
    return {"sourceId": src, "destId": dst, "cost": cost}


# 7 --> 3 --> 5, and 7 --> 5; 9 is the backward node of 3. Listed out of order.
DNN: dict[str, Any] = {
    "maxSizePerFPGA": 1000.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        node(5, 40, 4, supportedOnFpga=False),
        node(3, colorClass=12, size=300.0),
        node(9, isBackwardNode=True, colorClass=12, size=0.5),
        node(7, 10, 1, name="embedding"),
    ],
    "edges": [edge(7, 3, 0.25), edge(3, 5, 0.5), edge(7, 5, 0.25), edge(5, 9, 0.125)],
}
MOIRAI: dict[str, Any] = {
    "model": "tiny",
    "num_devices": 2,
    "nodes": [{"id": 4, "time": [3, 6]}, {"id": 1, "time": [1, 2]}, {"id": 6, "time": [0, 5]}],
    "edges": [{"src": 1, "dst": k, "transfer": [[0, 0.5], [0.25, 0]]} for k in (4, 6)],
}
PIPEDREAM = """\
node2 -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=2.0, backward_compute_time=4.0, \
activation_size=100.0, parameter_size=40.0
node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=8.000, \
parameter_size=0.000
node3 -- Odd -- name -- forward_compute_time=1.0, backward_compute_time=3.0, \
activation_size=[10.0; 20.5], parameter_size=0.000 -- stage_id=1
\tnode1 -- node2
\tnode2 -- node3
"""


def test_dnn_partitioning(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.txt", DNN)
    problem = load(path)
    assert problem.graph.op_name == ("7", "3", "5", "9")  # topological, ids as in the file
    assert problem.graph.edges.tolist() == [[0, 1], [0, 2], [1, 2], [2, 3]]
    assert problem.cluster.device_names == ("acc:0", "acc:1", "cpu:0")
    assert problem.memory_bytes.tolist() == [1000, 1000, 2**63 - 1]
    inf = np.inf
    compute_ms = [[1, 1, 10], [2, 2, 20], [inf, inf, 40], [2, 2, 20]]
    np.testing.assert_allclose(problem.compute_s * 1e3, compute_ms)
    io_ms = [[0.25, 0.25, 0], [0.5, 0.5, 0], [0.125, 0.125, 0], [0, 0, 0]]
    np.testing.assert_allclose(problem.io_s * 1e3, io_ms)
    assert problem.graph.group.tolist() == [0, 1, 2, 1]
    assert problem.graph.is_backward.tolist() == [False, False, False, True]
    assert problem.param_bytes_on(np.array([0, 1, 2, 1])).tolist() == [0, 301, 0]
    # On a timeline a transfer between accelerators goes through host memory: both ends pay.
    assert problem.transfer_s(0, 0, 1) == pytest.approx(0.5e-3)
    assert problem.transfer_s(0, 0, 2) == problem.transfer_s(0, 2, 0) == pytest.approx(0.25e-3)
    assert problem.transfer_s(0, 1, 1) == 0
    meant = {None: "max_load", "latency": "piecewise_latency"}
    for asked in (None, "max_load", "latency", "piecewise_latency", "period"):
        assert load(path, objective=asked).objective == meant.get(asked, asked)


def test_pipedream_training(tmp_path: Path) -> None:
    problem = load(written(tmp_path / "tiny.txt", PIPEDREAM), devices=2, bandwidth=1e6, memory=500)
    g = problem.graph
    forward, back = ["node1", "node2", "node3"], ["node3", "node2", "node1"]
    assert list(g.op_name) == forward + [f"{x}.backward" for x in back]
    assert g.op_kind[:3] == ("Input0", "Conv2d", "Odd -- name")
    np.testing.assert_allclose(problem.compute_s[:, 0] * 1e3, [0, 2, 1, 3, 4, 0])
    assert g.group.tolist() == [0, 1, 2, 2, 1, 0]
    assert g.is_backward.tolist() == [False] * 3 + [True] * 3
    assert problem.memory_bytes.tolist() == [500, 500]
    # Activations 8, 100 and 31 (two, added up and rounded up), then the gradients of 8 and 100.
    assert g.tensor_bytes.tolist() == [8, 100, 31, 8, 100]
    assert g.tensor_src.tolist() == [0, 1, 2, 4, 3]
    # Forward, the activation that a backward operator needs, and the gradients.
    assert g.edges.tolist() == [[0, 1], [0, 5], [1, 2], [1, 4], [2, 3], [3, 4], [4, 5]]
    assert problem.param_bytes_on(np.array([0, 1, 1, 1, 1, 0])).tolist() == [0, 40]
    for several in ("[10.0, 20.5]", "[10.0,20.5]", "[ 10.0 ;20.5 ]"):
        text = PIPEDREAM.replace("[10.0; 20.5]", several)
        assert load(written(tmp_path / "tiny.txt", text)).graph.fingerprint == g.fingerprint
    # node1 | node2 and node3: 8 bytes there and back at 1 byte per microsecond.
    timeline = simulate(problem, [0, 1, 1, 1, 1, 0], num_microbatches=1)
    assert timeline.latency_s == pytest.approx(10e-3 + 16e-6)
    assert problem.io_s[1].tolist() == pytest.approx([100e-6, 100e-6])


def test_pipedream_inference(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.txt", f"\n# one GPU -- ms\n{PIPEDREAM} # end\n")
    problem = load(path, mode="inference", objective="max_load")
    assert problem.graph.op_name == ("node1", "node2", "node3")
    assert problem.num_devices == 4 and problem.objective == "max_load"
    assert problem.graph.edges.tolist() == [[0, 1], [1, 2]]


def test_moirai(tmp_path: Path) -> None:
    problem = load(written(tmp_path / "tiny.txt", MOIRAI), objective="latency")
    assert problem.graph.op_name == ("1", "4", "6")
    assert problem.graph.num_tensors == 1  # equal matrices: one tensor with two consumers
    assert problem.transfer_s(0, 0, 1) == pytest.approx(0.5e-3)
    assert problem.transfer_s(0, 1, 0) == pytest.approx(0.25e-3)
    assert problem.objective == "latency"
    assert simulate(problem, [0, 1, 0], num_microbatches=1).latency_s == pytest.approx(7.5e-3)
    unlike = copy.deepcopy(MOIRAI)
    unlike["edges"][1]["transfer"] = [[0, 1], [0.25, 0]]
    unlike["nodes"][1]["id"], unlike["edges"][0]["src"] = 1.0, "1"  # as some languages write 1
    assert load(written(tmp_path / "tiny.txt", unlike)).graph.num_tensors == 2


def change(base: dict[str, Any], *path: Any, value: Any = None) -> dict[str, Any]:
    """A copy with one value replaced, or removed where ``value`` is None."""
    data = copy.deepcopy(base)
    at: Any = data
    for step in path[:-1]:
        at = at[step]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


def with_node(extra: Any) -> dict[str, Any]:
    return {**DNN, "nodes": [*DNN["nodes"], extra]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; formats are"),
        ("   \n", "is empty"),
        ("hello", "unknown format; formats are"),
        ('{"a": 1}', "unknown JSON format (top level: ['a'])"),
        ("[1, 2]", "unknown JSON format (top level: list)"),
        ('{"maxFPGAs": 1,', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        (change(DNN, "maxCPUs"), "field 'maxCPUs' is missing"),
        (change(DNN, "maxFPGAs", value=1.5), "maxFPGAs = 1.5 must be a whole number"),
        (change(change(DNN, "maxFPGAs", value=0), "maxCPUs", value=0), "no device"),
        (change(DNN, "maxSizePerFPGA", value=-1), "maxSizePerFPGA = -1"),
        (change(DNN, "nodes", value=[]), "non-empty list"),
        (change(DNN, "nodes", value={"id": 1}), "non-empty list"),
        (with_node(node(3)), "node 3: the id is used twice"),
        (with_node("x"), "nodes[4]: expected an object"),
        (change(DNN, "nodes", 1, "id"), "nodes[1]: field 'id' is missing"),
        (change(DNN, "nodes", 1, "id", value=[1]), "nodes[1]: id"),
        (change(DNN, "nodes", 1, "cpuLatency"), "node 3: field 'cpuLatency' is missing"),
        (change(DNN, "nodes", 1, "fpgaLatency", value=-2), "node 3: fpgaLatency = -2"),
        (change(DNN, "nodes", 1, "fpgaLatency", value="2"), "node 3: fpgaLatency = '2'"),
        (change(DNN, "nodes", 1, "size", value=float("inf")), "node 3: size = inf"),
        (change(DNN, "nodes", 1, "size", value=1e17), "node 3: size = 100000000000000000 is too"),
        (change(DNN, "nodes", value=[node(i, size=2.0**52) for i in (3, 5, 7, 9)]), "together"),
        (change(DNN, "nodes", 1, "isBackwardNode", value="no"), "node 3: isBackwardNode = 'no'"),
        (change(DNN, "nodes", 1, "colorClass", value=[2]), "node 3: colorClass"),
        (change(DNN, "edges", 0, "cost"), "edge 7 -> 3: field 'cost' is missing"),
        (change(DNN, "edges", 0, "sourceId", value=77), "edges[0]: sourceId = 77 is not the id"),
        (change(DNN, "edges", 0, "cost", value=-0.25), "edge 7 -> 3: cost = -0.25"),
        (change(DNN, "edges", 0, "cost", value=0.26), "edge 7 -> 5: cost = 0.25, but another"),
        (DNN | {"edges": [edge(7, 5, 0.25), edge(5, 7, 0.125)]}, "form a cycle: 7 -> 5 -> 7"),
        (change(DNN, "maxCPUs", value=0), "node 5: supportedOnFpga is false, but maxCPUs is 0"),
        (change(MOIRAI, "num_devices", value=0), "num_devices = 0"),
        (change(MOIRAI, "nodes", 0, "time"), "node 4: field 'time' is missing"),
        (change(MOIRAI, "nodes", 0, "time", value=[1]), "node 4: time = [1] must be a list of 2"),
        (change(MOIRAI, "nodes", 0, "time", 1, value=-6), "node 4: time[1] = -6"),
        (change(MOIRAI, "nodes", 0, "id", value=1), "node 1: the id is used twice"),
        (change(MOIRAI, "edges", 0, "dst", value=8), "edges[0]: dst = 8"),
        (change(MOIRAI, "edges", 0, "transfer", value=[[0, 1]]), "edge 1 -> 4: transfer"),
        (change(MOIRAI, "edges", 0, "transfer", 1, value=[1]), "edge 1 -> 4: transfer[1]"),
        (change(MOIRAI, "edges", 0, "transfer", 0, 1, value="x"), "transfer[0][1] = 'x'"),
        (PIPEDREAM.replace("backward_compute_time=4.0", "b=4"), "node node2: field 'backward"),
        (PIPEDREAM.replace("=2.0", "=-2.0"), "line 1: node node2: forward_compute_time = -2"),
        (PIPEDREAM.replace("=40.0", "=1e30"), "line 1: node node2: parameter_size = 1"),
        (PIPEDREAM.replace("=2.0", "=two"), "node node2: forward_compute_time = 'two'"),
        (PIPEDREAM.replace("node1 -- Input0", "node2 -- Input0"), "node node2 is described twice"),
        (PIPEDREAM + "\tnode3 -- node9\n", "line 6: edge node3 -- node9: no node node9"),
        (PIPEDREAM + "what is this\n", "line 6: neither"),
        ("\tnode1 -- node2\n", "edges but no nodes"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, content: Any, message: str) -> None:
    path = written(tmp_path / "tiny.txt", content)
    with pytest.raises(FormatError) as error:
        load(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_compressed_files_may_be_joined(tmp_path: Path) -> None:
    """What one is split into and compressed apart; of the first part alone there is a graph too."""
    nodes, edges = PIPEDREAM.split("\tnode1", 1)
    path = tmp_path / "graph.txt.gz"
    packed = [gzip.compress(part.encode()) for part in (nodes, "", "\tnode1" + edges)]
    path.write_bytes(b"".join(packed) + b"\0" * 9)
    plain = load(written(tmp_path / "graph.txt", PIPEDREAM))
    assert load(path).graph.fingerprint == plain.graph.fingerprint
    for wrong in (packed[2][:-3], b"what is this"):
        path.write_bytes(packed[0] + wrong)
        with pytest.raises(FormatError, match=r"graph\.txt\.gz: .*(cut off|damaged)"):
            load(path)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda p: p.write_bytes(b"\xff\xfe\x00node"), {}, "not UTF-8"),
        (lambda p: p.mkdir(), {}, "cannot be read"),
        (lambda p: None, {}, "cannot be read: No such file"),
        (lambda p: p.write_text(json.dumps(DNN)), {"devices": 2}, "devices cannot be set"),
        (lambda p: p.write_text(PIPEDREAM), {"devices": 0}, "devices = 0"),
        (lambda p: p.write_text(PIPEDREAM), {"bandwidth": 0.0}, "bandwidth = 0.0"),
        (lambda p: p.write_text(PIPEDREAM), {"mode": "test"}, "mode = 'test'"),
        (lambda p: p.write_text(PIPEDREAM), {"objective": "speed"}, "'speed' is unknown"),
    ],
)
def test_files_and_options(tmp_path, make, options, message):
    path = tmp_path / "file.bin"
    make(path)
    with pytest.raises(FormatError, match=r"file\.bin") as error:
        load(path, **options)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "num_nodes", "num_edges", "num_backward", "devices"),
    [
        ("throughput/layer/bert24_inference", 32, 55, 0, (6, 1)),
        ("throughput/layer/bert24_training", 64, 110, 32, (6, 1)),
        ("throughput/layer/inceptionv3_inference", 326, 363, 0, (6, 1)),
        ("throughput/operator/bert_l-3_training", 600, 817, 365, (3, 1)),
        ("throughput/operator/bert_L-12_training", 2012, 2751, 1229, (6, 1)),
        ("latency/layer/resnet50_inference", 177, 193, 0, (14, 8)),
    ],
)
def test_published_dnn_partitioning(shared, name, num_nodes, num_edges, num_backward, devices):
    problem = load(shared / "data" / "dnn_partitioning" / f"{name}.json")
    assert (problem.num_ops, len(problem.graph.edges)) == (num_nodes, num_edges)
    assert problem.graph.is_backward.sum() == num_backward
    kinds = [d.kind for d in problem.cluster.devices]
    assert (kinds.count("acc"), kinds.count("cpu")) == devices


def test_published_pipedream_and_moirai(shared: Path) -> None:
    data = shared / "data"
    pipedream, moirai = (sorted(data.glob(x)) for x in ("pipedream/*.txt", "moirai/*.json"))
    assert pipedream and moirai
    for path in pipedream:
        text = path.read_text()
        num_nodes = sum(" -- forward_compute_time" in line for line in text.splitlines())
        assert load(path, mode="inference").num_ops == num_nodes
        assert load(path, devices=8).num_ops == 2 * num_nodes
    for path in moirai:
        problem = load(path)
        data = json.loads(path.read_text())
        assert problem.num_ops == len(data["nodes"])
        assert len(problem.graph.edges) == len({(e["src"], e["dst"]) for e in data["edges"]})
