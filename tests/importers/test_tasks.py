"""Shops, standard task graphs, measured operators and workflows: files made by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement import importers
from placement.importers import FormatError, neusight
from placement.planners.heft import Heft
from placement.simulator import simulate
from tests import fuzz
from tests.problems import written

INF = np.inf
FIELDS = ("operation", "option", "machine", "duration")
WAYS = [(1, 0, 0, 2), (0, 0, 3, 5), (0, 1, 3, 4), (2, 0, 0, 7), (2, 1, 1, 6)]
SHOP = {
    "instance": "tiny",
    "operations": [dict(zip(FIELDS, way, strict=True)) for way in WAYS],
    "precedences": [{"before": 1, "after": 0, "job": 0}, {"before": 0, "after": 2, "job": 0}],
}
STG = """  3
  0 0 0
  1 4 1 3   # waits for a later one
  2 5 1 0
  3 6 1 0
  4 0 2 1 2
# a comment
"""
CSV = """op,Name,_input_nodes,fw_latency,bw_latency,acc_latency,output_shape,dtype
placeholder,x,{},0.0,0.0,0,"(16, 512)",torch.int64
call_method,size,{x: None},0.5,0.0,0,"(1,)",
call_module,y,"{x: None, size: None}",1.0,0.25,0.125,"(16, 8)",torch.float32
"""


def test_a_shop(tmp_path: Path) -> None:
    problem = importers.load(written(tmp_path / "s.json", SHOP))
    assert problem.graph.name == "tiny" and problem.objective == "latency"
    assert problem.graph.op_name == ("1", "0", "2")
    assert problem.profile.provenance["file_order"] == [1, 0, 2]
    assert problem.cluster.device_names == tuple(f"machine:{m}" for m in range(4))
    expected = [[2, INF, INF, INF], [INF, INF, INF, 4], [7, 6, INF, INF]]
    assert np.array_equal(problem.compute_s, expected)
    assert problem.graph.edges.tolist() == [[0, 1], [1, 2]]
    assert not problem.mean_transfer_s.any(), "nothing takes time between machines"
    assert Heft()(problem).value_s == 12


@pytest.mark.parametrize(
    ("first", "text"),
    [
        ("2 4", "2 1 1 3  2 2 5\n3 4\n1 3 1 1 2 2 3 3\n\n"),
        ("2 4 1.5", "2 1 1 3.0  2 2 5. 3 4e0\n1 3 1 1 2 2 3 3"),
        ("2\t4\t2,5", "2\t1\t1\t3\t2\t2\t5\t3\t4\t\n\n1 3 1 1 2 2 3 3\t"),
        ("2 4 1\r", "2 1 1 3 2 2 5 3 4\r\n1 3 1 1 2 2 3 3\r\n"),
        ("\ufeff# two jobs\n\n2 4 ", "2 1 1 3 2 2 5 3 4 # the first\n1 3 1 1 2 2 3 3"),
        ("2 4", "2 1 0 3 2 1 5 2 4\n1 3 0 1 1 2 2 3"),
    ],
)
def test_a_shop_as_a_text(first: str, text: str, tmp_path: Path) -> None:
    """Machines are numbered from 1, or from 0 if there is a 0; lines mean nothing."""
    problem = importers.load(written(tmp_path / "s.fjs", f"{first}\n{text}"))
    assert np.array_equal(problem.compute_s, [[3, INF, INF], [INF, 5, 4], [1, 2, 3]])
    assert problem.graph.edges.tolist() == [[0, 1]]


def test_a_standard_task_graph(tmp_path: Path) -> None:
    """Every line is an operator, the two dummies of no time too."""
    path = written(tmp_path / "g.stg", STG)
    problem = importers.load(path, devices=2)
    order = problem.profile.provenance["file_order"]
    assert [problem.graph.op_name[order.index(k)] for k in range(5)] == list("01234")
    assert problem.compute_s[np.argsort(order)].tolist() == [[x] * 2 for x in (0, 4, 5, 6, 0)]
    assert Heft()(problem).value_s == 10
    assert importers.load(path).num_devices == 4
    spaced = importers.load(written(tmp_path / "g.stg", STG.replace("\n", "\r\n\r\n")))
    assert spaced.graph.fingerprint == problem.graph.fingerprint, "blank lines mean nothing"
    last = importers.load(written(tmp_path / "l.stg", "2 8\n1 3 0\n2 4 1 1\n3 0 2 1 2"), devices=1)
    assert last.graph.op_name == ("1", "2", "3") and last.compute_s[:, 0].tolist() == [3, 4, 0]
    assert last.graph.edges.tolist() == [[0, 1], [0, 2], [1, 2]]
    without = importers.load(written(tmp_path / "w.stg", "2\n0 3.25 0\n1 4e-1 1 0\n"))
    assert without.compute_s[:, 0].tolist() == [3.25, 0.4]
    assert without.graph.op_name == ("0", "1") and "file_order" not in without.profile.provenance


@pytest.mark.parametrize("sep", ["\n   ", " "])
def test_task_graphs_with_communication(sep: str, tmp_path: Path) -> None:
    """Task 3 waits for 1 and for what 2 sends in 2.5 s; 1 and 2 for 0, which sends in 7 and 1 s."""
    text = f"2\n0 0 0\n1 4 1{sep}0 7\n2 5 1{sep}0 1\n3 6 2{sep}1 0{sep}2 2.5 # the last\n"
    problem = importers.load(written(tmp_path / "c.stg", text), devices=2)
    line = simulate(problem, [0, 1, 0, 1])  # 0 and 2 on one processor, 1 and 3 on the other
    assert line.start_s[0].tolist() == [0, 7, 0, 11] and line.latency_s == 17
    assert simulate(problem, [0, 0, 0, 0]).latency_s == 15
    at_once = simulate(problem, [0, 1, 1, 1], num_microbatches=1)  # both of what 0 sends
    assert at_once.start_s[0].tolist() == [0, 7, 1, 11]
    with pytest.raises(importers.FormatError, match="line 3: expected task 1, its time"):
        importers.load(written(tmp_path / "c.stg", text.replace("0 7", "0 7 1")))


def test_operators_as_measured(tmp_path: Path) -> None:
    path = written(tmp_path / "A/m-inf-1-1.csv", CSV)
    problem = importers.load(path, devices=2, bandwidth=1e3)
    assert problem.graph.op_name == ("x", "size", "y") and problem.num_devices == 2
    assert problem.compute_s[:, 0] == pytest.approx([0, 5e-4, 1.375e-3])
    assert problem.graph.tensor_bytes.tolist() == [16 * 512 * 8, 0]
    assert problem.transfer_s(0, 0, 1) == pytest.approx(65.536)


def test_several_gpus_are_joined(tmp_path: Path) -> None:
    paths = [
        written(tmp_path / "A/m.csv", CSV),
        written(tmp_path / "B/m.csv", CSV.replace("0.5,", "0.25,")),
        written(tmp_path / "C/m.csv", CSV.replace('"{x: None, size: None}"', "{size: None}")),
    ]
    problem = neusight.joined(paths[:2])
    assert problem.cluster.device_names == ("A", "B")
    assert problem.compute_s[1].tolist() == [5e-4, 2.5e-4]
    assert not problem.mean_transfer_s.any(), "links are not measured"
    assert neusight.traces(paths) == [paths[:2], paths[2:]]


def test_workflows_of_all_versions(tmp_path: Path) -> None:
    files = fuzz.made_targets(["wfformat"])["wfformat"].files
    paths = [written(tmp_path / name, files[name]) for name in ("w.json", "v.json")]
    new, old = (importers.load(path, devices=2, bandwidth=10.0) for path in paths)
    assert new.graph.op_name == ("a1", "b1") and old.graph.op_name == ("a", "b")
    assert new.compute_s.tolist() == [[1.5, 1.5]] * 2 and old.compute_s[:, 0].tolist() == [2, 3]
    for problem, size in ((new, 100), (old, 7)):
        assert problem.graph.edges.tolist() == [[0, 1]]
        assert problem.graph.tensor_bytes.tolist() == [size]
        assert problem.transfer_s(0, 0, 1) == pytest.approx(size / 10)


OPS: Any = SHOP["operations"]


def _shop(operations: Any = OPS, precedences: Any = ()) -> dict[str, Any]:
    return SHOP | {"operations": operations, "precedences": [*precedences]}


PARTED = {"name": "a", "runtime": 1, "parents": ["b"]}
CIRCLE = [{"before": 0, "after": 1}, {"before": 1, "after": 0}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", _shop([]), "'operations' must be a non-empty list"),
        ("a.json", _shop(OPS[1:]), "no machine may run operation 1, of 3"),
        ("a.json", _shop([OPS[0] | {"operation": 10**12}]), "run operation 0, of"),
        ("a.json", _shop([OPS[1] | {"machine": 10**12}]), "devices = 1000000000001"),
        ("a.json", _shop([OPS[1] | {"duration": -1}]), "duration = -1 must be finite"),
        ("a.json", _shop(OPS, [{"before": 0, "after": 9}]), "there is no operation 9"),
        ("a.json", _shop(OPS, CIRCLE), "edges form a cycle: 1 -> 0 -> 1"),
        ("a.fjs", "1 2\n1 1 3 5\n", "a machine of operation 0 of job 0 = 3 is too large"),
        ("a.fjs", "2 2\n1 1 1 5\n", "the file ends before number of operations of job 1"),
        ("a.fjs", "1 2\n1 1 1 5\n7\n", "but then comes '7'"),
        ("a.fjs", "2 2\n1 1 1 5\n1 1 1 -4\n", "line 3: a duration of operation 0 of job 1 = '-4'"),
        ("a.fjs", "1 2\n1 2 0 1 2 1", "of 2 machines, one is 0 and one is 2: they must be"),
        ("a.fjs", "2 2\n0 3 1 5\n1 1 1 2", "line 3: a job does not visit every machine once"),
        ("a.json", {"machines": 2, "jobs": [[[]]]}, "jobs[0][0] is not a list, or an empty one"),
        ("a.stg", "2\n0 0 0\n1 4 1 0\n2 4 1 0\n", "2 tasks are told, and 3 lines of tasks found"),
        ("a.stg", "2\n0 0 0\n1 4 1 5\n", "line 3: task 1 waits for 5, which is none"),
        ("a.stg", "1\n0 0 0\n1 4e999 1 0\n", "line 3: '4e999' is not a number"),
        ("a.stg", "2\n0 0 0\n2 4 1 0\n", "line 3: expected task 1"),
        ("a.csv", CSV.replace("{x: None}", "{z: None}"), "_input_nodes has 'z', which is no Name"),
        ("a.csv", CSV.replace("1.0", "fast"), "fw_latency = 'fast' is not a number"),
        ("a.csv", CSV.replace("0.25,0.125", "1e308,1e308"), "'y': fw_latency + bw_latency + acc"),
        ("a.csv", CSV.replace("acc_latency", "other"), "column 'acc_latency' is missing"),
        ("a.csv", CSV.splitlines()[0], "there are columns, but no operators"),
        ("a.json", {"workflow": {"tasks": [{"name": "a"}]}}, "field 'runtime' is missing"),
        ("a.json", {"workflow": {"tasks": [PARTED]}}, "'b' is no task"),
    ],
)
def test_mistakes_are_named(name: str, content: Any, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, content)
    with pytest.raises(FormatError) as caught:
        importers.load(path)
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_options_of_files_that_describe_their_devices(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", SHOP)
    with pytest.raises(FormatError, match="devices cannot be set: the file itself describes"):
        importers.load(path, devices=2)
    with pytest.raises(FormatError, match="memory cannot be set: standard task graphs take dev"):
        importers.load(written(tmp_path / "g.stg", STG), memory=3)


def test_published_files(shared: Path) -> None:
    """All of them are read, and none is taken for another format."""
    read = {
        "shop": shared.glob("data/shops/*.json"),
        "stg": shared.glob("data/stg/*.stg"),
        "neusight": shared.glob("data/neusight/*/*.csv"),
    }
    for form, paths in read.items():
        for path in list(paths)[::7]:
            if path.name != "best_known.json":
                assert importers.load(path).profile.provenance["format"] == form
