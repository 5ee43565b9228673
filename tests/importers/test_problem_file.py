"""Our own problem file: what goes in comes out, by hand it is short, and mistakes are named."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from placement.bounds import lower_bounds
from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.importers import FormatError, load, save
from placement.objective import Objective
from placement.problem import Problem
from placement.profile import Profile
from placement.runs.compare import problem_fingerprint
from placement.simulator import evaluate, score
from tests.importers.test_importers import DNN, MOIRAI, PIPEDREAM, change
from tests.problems import problems, random_placement, written

# a (in.0) --t1--> b --t2--> c, and t1 --> c; b and c share a device, b cannot run on y.
SMALL: dict[str, Any] = {
    "problem_version": 1,
    "model": "small",
    "cluster": {
        "name": "two",
        "devices": [{"name": "x"}, {"name": "y", "memory_bytes": 500}],
        "links": [{"src": "x", "dst": "y", "bandwidth_bytes_per_s": 100.0}],
    },
    "operators": [
        {"name": "a", "compute_s": [1, 2.5], "params": [0, 1]},
        {"name": "b", "compute_s": [0.5, "inf"], "group": 7},
        {"name": "c", "compute_s": [2, 1], "group": 7, "params": [1]},
    ],
    "tensors": [
        {"producer": None, "bytes": 8, "consumers": ["a"]},
        {"producer": "a", "bytes": 100, "consumers": ["c", "b"]},
        {"producer": "b", "bytes": 100, "consumers": ["c"], "memory_of": 1},
        {"producer": "c", "bytes": 1},
    ],
    "param_bytes": [30, 40],
    "outputs": [3],
}


CIRCLE = change(SMALL, "tensors", 2, "memory_of", value=3)


def check_same(problem: Problem, again: Problem, seed: int = 0) -> None:
    """Equal in every number: times, values of placements, fingerprints, bounds."""
    assert again.graph.program is None
    assert again.graph.fingerprint == problem.graph.fingerprint
    assert again.graph.op_kind == problem.graph.op_kind
    assert again.graph.op_module == problem.graph.op_module
    assert again.cluster == problem.cluster
    assert again.cluster.fingerprint == problem.cluster.fingerprint
    assert problem_fingerprint(again) == problem_fingerprint(problem)
    np.testing.assert_array_equal(again.profile.spread_s, problem.profile.spread_s)
    np.testing.assert_array_equal(again.priority, problem.priority)
    assert again.profile.provenance == problem.profile.provenance
    placements = np.array([random_placement(problem, seed + k) for k in range(4)])
    before, after = evaluate(problem, placements), evaluate(again, placements)
    for what in ("latency_s", "period_s", "feasible"):
        np.testing.assert_array_equal(getattr(after, what), getattr(before, what))
    np.testing.assert_array_equal(score(again, placements), score(problem, placements))
    assert lower_bounds(again) == lower_bounds(problem)


def test_a_view_of_a_view_has_the_memory_of_the_first(tmp_path: Path) -> None:
    twice = change(SMALL, "tensors", 3, "memory_of", value=2)
    assert load(written(tmp_path / "file.json", twice)).graph.tensor_root.tolist() == [0, 1, 1, 1]


def test_numbers_of_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    problem = load(written(tmp_path / "file.json", SMALL))
    devices = tuple(replace(d, memory_bytes=np.int64(700)) for d in problem.cluster.devices)
    links = (Link("x", "y", np.float32(0.5)),)
    cluster = replace(problem.cluster, devices=devices, links=links)
    provenance = {"rounds": np.int64(7), "flops": np.inf}
    profile = replace(problem.profile, links=links, provenance=provenance)
    counted = replace(problem, cluster=cluster, profile=profile, num_microbatches=np.int64(16))
    save(counted, tmp_path / "again.json")
    again = load(tmp_path / "again.json")
    assert again.num_microbatches == 16 and again.profile.provenance == {
        "rounds": 7,
        "flops": "inf",
    }
    assert again.cluster.fingerprint == counted.cluster.fingerprint


def test_by_hand(tmp_path: Path) -> None:
    problem = load(written(tmp_path / "file.json", SMALL))
    g = problem.graph
    assert (g.name, g.op_name, g.op_kind) == ("small", ("a", "b", "c"), ("op",) * 3)
    assert g.edges.tolist() == [[0, 1], [0, 2], [1, 2]]
    assert g.tensor_src.tolist() == [-1, 0, 1, 2] and g.tensor_root.tolist() == [0, 1, 1, 3]
    assert g.group.tolist() == [0, 1, 1] and g.output_tensor.tolist() == [3]
    assert problem.compute_s.tolist() == [[1, 2.5], [0.5, np.inf], [2, 1]]
    assert problem.supported.tolist() == [[True, True], [True, False], [True, False]]
    assert problem.param_bytes_on(np.array([1, 0, 0])).tolist() == [40, 70]
    # A declared link is the link, the other direction costs nothing; no limit is no limit.
    assert problem.transfer_s(1, 0, 1) == 1.0 and problem.transfer_s(1, 1, 0) == 0.0
    assert problem.memory_bytes.tolist() == [2**63 - 1, 500]
    assert (problem.objective, problem.num_microbatches, problem.max_in_flight) == ("period", 32, 4)
    assert problem.profile.loaded_s is problem.profile.predicted is None
    assert load(tmp_path / "file.json", objective="latency").objective == "latency"
    check_same(problem, resaved(problem, tmp_path))


def resaved(problem: Problem, folder: Path) -> Problem:
    save(problem, folder / "again.json")
    return load(folder / "again.json")


def test_no_field_is_forgotten() -> None:
    """A new field of these classes must be saved too; devices and links bring theirs along."""
    names = {kind: {f.name for f in fields(kind)} for kind in (Problem, OpGraph, Profile, Cluster)}
    assert names[Problem] == {
        "graph", "cluster", "profile", "objective", "num_microbatches", "max_in_flight",
        "contention", "ready_order", "second_j", "max_phases",
    }  # fmt: skip
    assert names[OpGraph] == {
        "name", "op_name", "op_kind", "op_module", "op_signature", "tensor_src", "tensor_bytes",
        "tensor_root", "use_tensor", "use_dst", "param_bytes", "param_use_op", "param_use",
        "group", "is_backward", "output_tensor", "program", "next_readers",
    }  # fmt: skip
    assert names[Profile] == {
        "device_names", "compute_s", "spread_s", "links", "loaded_s", "batch_s", "transfer_s",
        "io_s", "workspace_bytes", "library_bytes", "overhead_s", "predicted", "graph_fingerprint",
        "provenance",
    }  # fmt: skip
    assert names[Cluster] == {"name", "devices", "links"}


def test_every_field_of_devices_and_links(tmp_path: Path) -> None:
    data = copy.deepcopy(SMALL)
    device = {
        "name": "x", "kind": "cuda", "cores": [0, 2], "threads": 3, "memory_bytes": 2**62,
        "busy_w": 200, "idle_w": 10.5, "like": "cuda:0", "speed": 2, "model": "m",
    }  # fmt: skip
    link = {
        "src": "y", "dst": "x", "latency_s": 1e-300, "bandwidth_bytes_per_s": "inf",
        "blocking": True, "channel": "bus",
    }  # fmt: skip
    data["cluster"]["devices"][0], data["links"] = device, [link]
    problem = load(written(tmp_path / "file.json", data))
    assert problem.cluster.devices[0] == Device(**device | {"cores": (0, 2)})
    assert problem.profile.links == (Link(**link | {"bandwidth_bytes_per_s": np.inf}),)
    check_same(problem, resaved(problem, tmp_path))


def test_rows_that_only_some_operators_have(tmp_path: Path) -> None:
    data = change(SMALL, "operators", 0, "loaded_s", value=[3, 4])
    data["operators"][1] |= {"spread_s": [0.1, 0], "predicted": [True, False]}
    data["operators"][2] |= {"workspace_bytes": 5, "library_bytes": [0, 7]}
    profile = load(written(tmp_path / "file.json", data)).profile
    assert profile.loaded_s.tolist() == [[3, 4], [0.5, np.inf], [2, 1]]
    assert profile.spread_s.tolist() == [[0, 0], [0.1, 0], [0, 0]]
    assert profile.predicted.tolist() == [[False, False], [True, False], [False, False]]
    assert profile.workspace_bytes.tolist() == [0, 0, 5]
    assert profile.library_bytes.tolist() == [[0, 0], [0, 0], [0, 7]]


OBJECTIVES = [x for x in Objective if x != "energy"]


@given(problems(grouped=True, unsupported=True), st.sampled_from(OBJECTIVES), st.booleans())
@hypothesis_settings(max_examples=25)
def test_what_is_saved_is_loaded(tmp_path_factory, problem, objective, predicted):
    if predicted:
        marks = problem.compute_s > np.median(problem.compute_s)
        facts = {"provenance": {"when": "now", "repeats": 3, "more": {"x": [0.1, None]}}}
        facts |= {"graph_fingerprint": problem.graph.fingerprint, "predicted": marks}
        facts |= {"overhead_s": np.arange(problem.num_devices) * 1e-5, "batch_s": 0.25}
        spread_s = np.where(np.isfinite(problem.compute_s), problem.compute_s / 7, np.inf)
        profile = replace(problem.profile, spread_s=spread_s, **facts)
        problem = replace(problem, profile=profile)
    problem = replace(problem.with_objective(objective), second_j=2.5 * predicted)
    check_same(problem, resaved(problem, tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("content", [DNN, PIPEDREAM, MOIRAI], ids=["dnn", "pipedream", "moirai"])
def test_importing_twice_is_importing_once(tmp_path: Path, content: Any) -> None:
    problem = load(written(tmp_path / "file.json", content))
    check_same(problem, resaved(problem, tmp_path))


# -- mistakes --------------------------------------------------------------------------------


def add(key: str, value: Any) -> dict[str, Any]:
    return {**SMALL, key: value}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (add("problem_version", 2), "problem_version = 2, this version reads 1"),
        (add("problem_version", True), "problem_version = True"),
        (add("_target_", "os.system"), "unknown key '_target_'"),
        (change(SMALL, "model"), "the key 'model' is missing"),
        (change(SMALL, "operators", value=[]), "operators = []"),
        (change(SMALL, "operators", 1, "name"), "operators[1].name' is missing"),
        (change(SMALL, "operators", 1, "kindd", value="x"), "('b').kindd\"; did you mean 'kind'"),
        (change(SMALL, "operators", 1, "compute_s", value=[0.5]), "'b': compute_s has 1 values"),
        (change(SMALL, "operators", 1, "compute_s", 0, value="1"), "('b').compute_s[0] = '1'"),
        (change(SMALL, "operators", 1, "compute_s", 0, value=True), "('b').compute_s[0] = True"),
        (change(SMALL, "operators", 1, "compute_s", 0, value=-1), "('b').compute_s[0] = -1"),
        (change(SMALL, "operators", 1, "compute_s", 0, value="inf"), "'b': no device can run"),
        (change(SMALL, "operators", 0, "compute_s", 0, value=float("nan")), "NaN is not a number"),
        (change(SMALL, "operators", 0, "spread_s", value=[1]), "operator 'a': spread_s has 1"),
        (change(SMALL, "operators", 1, "name", value="a"), "operators[1].name = 'a' is that of"),
        (change(SMALL, "operators", 2, "params", value=[2]), "'c': params = 2: there are only 2"),
        (change(SMALL, "operators", 0, "params", value=[-1]), "operators[0] ('a').params[0] = -1"),
        (change(SMALL, "tensors", 1, "producer", value="z"), "tensors[1].producer = 'z' is not"),
        (change(SMALL, "tensors", 1, "producer", value="c"), "topological order"),
        (change(SMALL, "tensors", 1, "consumers", value=["z"]), "tensors[1].consumers = 'z'"),
        (change(SMALL, "tensors", 1, "bytes", value=1.5), "tensors[1].bytes = 1.5"),
        (change(SMALL, "tensors", 2, "memory_of", value=9), "tensors[2].memory_of = 9: there are"),
        (change(SMALL, "operators", 0, "next_readers", value=["z"]), "'a': next_readers = 'z' is"),
        (change(CIRCLE, "tensors", 3, "memory_of", value=2), "have each other's memory"),
        (change(SMALL, "tensors", 2, "io_s", value=[1, 2]), "tensors[0]: io_s is missing"),
        (change(SMALL, "outputs", value=[4]), "outputs[0] = 4: there are only 4 tensors"),
        (change(SMALL, "cluster", "devices", 1, "name"), "cluster.devices[1].name' is missing"),
        (change(SMALL, "cluster", "devices", 1, "core", value=[1]), "devices[1] ('y').core"),
        (change(SMALL, "cluster", "devices", 1, "name", value="x"), "device names repeat"),
        (change(SMALL, "cluster", "devices", 1, "memory_bytes", value=2**63), "memory_bytes = 92"),
        (change(SMALL, "cluster", "links", 0, "dst", value="z"), "no device 'z'"),
        (add("links", [{"src": "q", "dst": "x"}]), "no device 'q'"),
        (add("objective", "speed"), "objective = 'speed'"),
        (add("max_in_flight", 0), "max_in_flight = 0"),
        (add("fingerprint", "0" * 64), "remove the key"),
        (add("measured_graph", "0" * 64), "profile is of graph 000000000000"),
        (json.dumps(SMALL).replace('"model"', '"model": "x", "model"', 1), "'model' appears twice"),
        (json.dumps(SMALL)[:-1], "not valid JSON"),
        ('{"problem_version": 1, "model": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, content: Any, message: str) -> None:
    path = written(tmp_path / "file.json", content)
    with pytest.raises(FormatError) as error:
        load(path)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}: ")


def test_tables_per_tensor_are_checked(tmp_path: Path) -> None:
    data = SMALL | {"tensors": [x | {"transfer_s": [[0, 1], [2, 0]]} for x in SMALL["tensors"]]}
    assert load(written(tmp_path / "file.json", data)).transfer_s(3, 1, 0) == 2
    for wrong in ([[0, 1]], [[0], [1]], [[0, 1], [2, 0, 3]]):
        data["tensors"][2]["transfer_s"] = wrong
        with pytest.raises(FormatError, match=r"tensors\[2\]: transfer_s must be 2 lists of 2"):
            load(written(tmp_path / "file.json", data))


def test_what_is_no_time_is_not_saved(tmp_path: Path) -> None:
    problem = load(written(tmp_path / "file.json", SMALL))
    problem.profile.spread_s[1, 0] = np.nan
    with pytest.raises(FormatError, match=r"spread_s\[1, 0\] is not a number"):
        save(problem, tmp_path / "again.json")
    assert not (tmp_path / "again.json").exists()


# -- placement import ------------------------------------------------------------------------


def test_import_for_machines(tmp_path: Path, says: Any) -> None:
    file, out = written(tmp_path / "graph.txt", PIPEDREAM), tmp_path / "problem.json"
    args = ["import", file, "--devices", "2", "--objective", "latency", "--out", out]
    said = says([*args, "--microbatches", "5", "--json"])
    problem = load(out)
    known = {"nodes": 6, "edges": 7, "devices": ["acc:0", "acc:1"], "objective": "latency"}
    derived = {"fingerprint": problem.graph.fingerprint, "lower_bound_s": lower_bounds(problem)}
    assert said.json == known | derived
    assert problem.objective == "latency" and problem.num_microbatches == 5
    assert f"problem written to {out}" in said.err
    assert "latency" in says(args).out


@pytest.mark.parametrize("content", [DNN, PIPEDREAM, MOIRAI], ids=["dnn", "pipedream", "moirai"])
def test_plan_takes_either_file(tmp_path, says, content):
    file, out = written(tmp_path / "file.json", content), tmp_path / "imported.json"
    says(["import", file, "--out", out])
    first, second = (says.answer("plan", x, "--planner", "heft") for x in (file, out))
    assert first | {"seconds": 0} == second | {"seconds": 0}


def test_import_of_a_workload(tmp_path, says, monkeypatch):
    def made_up(graph: Any, cluster: Cluster, **_: Any) -> Profile:
        shape = (graph.num_ops, cluster.num_devices)
        return Profile(cluster.device_names, np.full(shape, 1e-3), np.zeros(shape))

    monkeypatch.setattr("placement.costs.measure.load_or_measure", made_up)
    out = tmp_path / "problem.json"
    got = says.answer("import", "tiny_mlp", "--out", out)
    problem = load(out)
    assert got["nodes"] == problem.num_ops == 6 and problem.graph.op_name[0] == "linear"
    assert problem.graph.program is None and problem.graph.fingerprint == got["fingerprint"]
    said = says(["import", "tiny_mlp", "--dim", "batch=1", "--out", out], 2).err
    assert "--dim is for problem files; 'tiny_mlp' is none" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mode", "inference"], "mode cannot be set: the file itself describes its devices"),
        (["--dim", "batch=1"], "dims cannot be set"),
        (["--dim", "batch"], "--dim batch: give a name and a size"),
        (["--profile", "x.npz"], "--profile is for workloads"),
        (["--out", "/dev/null"], "cannot write /dev/null"),
    ],
)
def test_what_a_wrong_command_says(tmp_path, says, words, message):
    file = written(tmp_path / "file.json", SMALL)
    assert message in says(["import", file, "--out", tmp_path / "out.json", *words], 2).err
    assert not (tmp_path / "out.json").exists()
