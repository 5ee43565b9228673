"""Profiles of which only a part is measured, and what the commands make of predictions."""

from pathlib import Path

import numpy as np
import pytest

from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.costs.corpus import Corpus, remember, this_machine
from placement.costs.measure import measure
from placement.costs.measure_within import choose, measure_within, part, predict_here
from placement.costs.predictors import LatencyError
from placement.costs.predictors.roofline import Roofline
from placement.profile import Profile, ProfileError
from placement.program import run_program
from placement.workloads import load
from tests.problems import written

RATES = Roofline(flops_per_s=1e10, bytes_per_s=5e9, call_s=5e-6)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "home"))


def graph_of(workload: str):
    module, inputs = load(workload)
    return capture(module, inputs, name=workload)


def one_device() -> Cluster:
    return Cluster("one", Cluster.detect().devices[:1])


def test_the_least_certain_are_chosen_once_per_signature() -> None:
    graph = graph_of("tiny_branches")  # equal products in several branches
    seconds, spread = np.full((graph.num_ops, 1), 1e-3), np.full((graph.num_ops, 1), 1e-6)
    products = [n for n, kind in enumerate(graph.op_kind) if "linear" in kind]
    spread[products] = 1e-3
    ops = choose(graph, seconds, spread, seconds=4.5e-3)  # one operator, 1 + 3 times
    assert ops.tolist() == products[:1]
    everything = choose(graph, seconds, spread, seconds=100.0)
    signatures = [graph.op_signature[n] for n in everything]
    assert sorted(signatures) == sorted(set(graph.op_signature))
    assert len(choose(graph, seconds, spread, seconds=1e-9)) == 0


@pytest.mark.parametrize("workload", ["tiny_views", "tiny_cnn", "bert_tiny"])
def test_a_part_computes_what_it_does_in_the_model(workload: str) -> None:
    graph = graph_of(workload)
    ops = range(0, graph.num_ops, 2)
    smaller = part(graph, ops)
    assert smaller.op_signature == tuple(graph.op_signature[n] for n in ops)
    assert smaller.op_param_bytes.tolist() == graph.op_param_bytes[list(ops)].tolist()
    # Inputs have the shapes and dtypes that the operators read in the model.
    sizes = [x.nbytes for x in smaller.program.example_tensors]
    assert sizes == smaller.tensor_bytes[[*smaller.program.input_tensors]].tolist() and sizes
    assert run_program(smaller.program, smaller.program.timing_inputs()) == []


def test_a_profile_within_seconds() -> None:
    graph, cluster = graph_of("bert_tiny"), one_device()
    profile = measure_within(graph, cluster, 0.01, method=RATES)
    profile.check(graph)
    measured = ~profile.predicted[:, 0]
    assert measured.any()
    # Equal operators are one measurement.
    signatures = {s for s, m in zip(graph.op_signature, measured, strict=True) if m}
    assert all(m == (s in signatures) for s, m in zip(graph.op_signature, measured, strict=True))
    assert profile.provenance["measured_signatures"] == len(signatures)
    nothing = measure_within(graph, cluster, 1e-9, method=RATES)
    assert nothing.predicted is not None and nothing.predicted.all()
    assert nothing.compute_s[:, 0] == pytest.approx(RATES.predict(graph, cluster.devices[0])[0])
    with pytest.raises(LatencyError, match=r"seconds = -1.*positive"):
        measure_within(graph, cluster, -1)
    with pytest.raises(LatencyError, match="no program"):
        measure_within(graph.without_program(), cluster, 1.0)
    far = Device("far", "cpu", like="amd/epyc-7763")
    with pytest.raises(LatencyError, match=r"devices \['far'\] are described"):
        measure_within(graph, Cluster("c", (*cluster.devices, far)), 1.0, method=RATES)
    with pytest.raises(ProfileError, match=r"'cpu:9' uses cores \[10000\]"):
        measure_within(graph, Cluster("c", (Device("cpu:9", "cpu", (10_000,)),)), 1.0, method=RATES)


def test_what_was_measured_in_one_model_is_known_in_the_next() -> None:
    cluster, graph = one_device(), graph_of("bert_tiny")
    measured = measure(graph, cluster, repeats=2)
    remember(graph, cluster, measured)
    again = predict_here(graph, cluster, RATES)
    assert again.predicted is not None and again.predicted.all()
    assert again.compute_s.sum() == pytest.approx(measured.compute_s.sum())
    assert again.provenance["machine"] == this_machine()
    # Without a method: learned from what is there.
    other = predict_here(graph_of("vit_tiny"), cluster)
    assert other.provenance["predictor"] == "_Remembering"
    assert np.isfinite(other.compute_s).all()


def test_plan_from_predictions(says, tmp_path):
    path = written(tmp_path / "one.yaml", "devices: [{name: a, kind: cpu, cores: [0]}]")
    command = ["plan", "tiny_mlp", "--planner", "heft", "--cluster", str(path), "--json"]
    said = says([*command, "--predict", "polynomial"], 2).err
    assert "nothing was measured on this machine yet" in said
    said = says([*command, "--predict", "roofline"])
    assert said.json["feasible"] and "predicted from their description, not measured" in said.err
    says(["profile", "tiny_mlp", "--cluster", path, "--repeats", "2"])
    assert Corpus.of(this_machine()).samples
    says([*command, "--predict", "polynomial"])
    for wrong, message in (
        (["--predict", "nonsense"], "no predictor 'nonsense'"),
        (["--predict", "roofline", "--profile", "x.npz"], "either predicted or measured"),
    ):
        assert message in says([*command, *wrong], 2).err


def test_profile_within_seconds_as_a_command(says) -> None:
    assert "must be positive" in says(["profile", "tiny_mlp", "--seconds", "0"], 2).err
    says(["profile", "tiny_mlp", "--seconds", "1", "--mode", "training"], 2)


def test_damaged_measurements_are_a_message(says, tmp_path: Path) -> None:
    written(tmp_path / "home" / "measured" / this_machine() / "damaged.json.gz", "no problem")
    command = ["plan", "tiny_mlp", "--planner", "heft", "--predict", "roofline"]
    assert "remove that file, and measure again" in says(command, 2).err


def test_features_as_a_command(says, tmp_path: Path) -> None:
    csv = tmp_path / "features.csv"
    answer = says(["profile", "tiny_cnn", "--features", "--json", "--out", csv]).json
    assert answer["num_ops"] == len(answer["operators"]) == len(csv.read_text().splitlines()) - 1
    first = answer["operators"][0]
    assert first["class"] == "convolution" and first["flops"] > 0
    assert any(row["critical"] for row in answer["operators"])
    assert "on the critical path" in says(["profile", "tiny_cnn", "--features"]).out
    says(["profile", "no_such.json", "--features"], 2)


def test_features_where_the_device_cannot_run_an_operator(says, tmp_path: Path) -> None:
    graph = graph_of("tiny_mlp")
    times = np.full((graph.num_ops, 2), 1e-3)
    times[2, 0] = np.inf
    profile = Profile(("a", "b"), times, np.zeros_like(times), graph_fingerprint=graph.fingerprint)
    profile.save(tmp_path / "profile.npz")
    words = ["profile", "tiny_mlp", "--features", "--profile", tmp_path / "profile.npz"]
    said = says([*words, "--json"])
    row = said.json["operators"][2]
    assert row["seconds"] is None and row["slack_s"] is None and row["critical"] == 0
    assert said.json["critical_path_s"] is None and "Warning" not in said.err
    assert "nan" not in says(words).out
