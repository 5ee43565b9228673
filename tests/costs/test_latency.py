"""Predictors find known laws again, and know what they do not; the store of measurements."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.cluster import Cluster, Device, Link
from placement.costs import predictors
from placement.costs.corpus import Corpus, CorpusError, machine_of, remember
from placement.costs.features import CLASSES, features
from placement.costs.predictors import LatencyError, Sample
from placement.costs.predictors.roofline import Roofline
from placement.graph import OpGraph
from placement.importers import load as load_problem
from placement.problem import Problem
from placement.profile import Profile
from placement.simulator import simulate

CPU = Device("any", "cpu", (0,), 1, model="a processor")
HERE = {"cpu": "a processor", "cores": 2, "torch": "2.13.0", "repeats": 5, "when": "2026-01-01"}


def model(seed: int, layers: int = 12) -> OpGraph:
    """A chain of products of random shapes, each with a cheap operator behind it."""
    rng = np.random.default_rng(seed)
    signatures, sizes = [], []
    for _ in range(layers):
        rows, inner, outer = (int(2 ** rng.integers(4, 10)) for _ in range(3))
        signatures += [
            f"aten.linear.default(f32[{rows},{inner}], f32[{outer},{inner}])",
            f"aten.relu.default(f32[{rows},{outer}])",
        ]
        sizes += [4 * rows * outer] * 2
    return chain(f"model {seed}", sizes, signatures)


def chain(name: str, sizes: list[int], signatures: list[str]) -> OpGraph:
    n, kinds = len(sizes), [s.partition("(")[0] for s in signatures]
    names, edges = [f"op{i}" for i in range(n)], [(i, i + 1) for i in range(n - 1)]
    more: Any = {"op_kind": kinds, "op_signature": signatures}
    return OpGraph.build(name, names, range(n), sizes, edges, **more)


def law(graph: OpGraph, threads: int = 1) -> np.ndarray:
    """Seconds on a processor that reaches 10 GFLOP/s a thread, 5 GB/s, 4 us an operator."""
    values = features(graph)
    moved = values.read_bytes + values.written_bytes
    return 4e-6 + values.flops / 1e10 / threads + moved / 5e9


def sample(seed: int, threads: int = 1, layers: int = 12) -> Sample:
    graph = model(seed, layers)
    seconds = law(graph, threads)
    device = replace(CPU, threads=threads)
    return Sample(graph, device, seconds, 0.01 * seconds, 1.5 * seconds)


def profile_of(graph: OpGraph, seconds: np.ndarray, **facts: object) -> Profile:
    return Profile(("any",), seconds[:, None], 0.01 * seconds[:, None], provenance=HERE | facts)


# --- predictors ----------------------------------------------------------------------------------


def test_methods_are_found_by_name() -> None:
    assert predictors.names() == ["polynomial", "roofline", "trees"]
    with pytest.raises(LatencyError, match="did you mean 'polynomial'"):
        predictors.load("polynom")
    with pytest.raises(LatencyError, match="ridge: float"):
        predictors.load("polynomial", degree=3)


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [("polynomial", {}, 0.05), ("trees", {"iterations": 60}, 0.15)],
)
def test_a_law_is_found_again_in_unseen_models(name: str, options: Any, tolerance: float) -> None:
    if name == "trees":
        pytest.importorskip("sklearn")
    predictor = predictors.load(name, **options).fit([sample(seed) for seed in range(15)])
    for seed in (100, 101, 102):
        graph = model(seed)
        seconds, spread = predictor.predict(graph, CPU)
        assert seconds.shape == spread.shape == (graph.num_ops,)
        assert (seconds > 0).all() and (spread > 0).all()
        assert seconds.sum() == pytest.approx(law(graph).sum(), rel=tolerance)


def test_threads_are_a_parameter() -> None:
    samples = [sample(seed, threads) for seed in range(12) for threads in (1, 4)]
    predictor = predictors.load("polynomial").fit(samples)
    graph = model(100)
    for threads in (1, 4):
        seconds, _ = predictor.predict(graph, replace(CPU, threads=threads))
        assert seconds.sum() == pytest.approx(law(graph, threads).sum(), rel=0.08)


def test_what_is_unlike_anything_measured_is_less_certain() -> None:
    predictor = predictors.load("polynomial").fit([sample(seed) for seed in range(10)])

    def relative(signature: str) -> float:
        seconds, spread = predictor.predict(chain("one", [4 * 64 * 64], [signature]), CPU)
        return float(spread[0] / seconds[0])

    like = relative("aten.linear.default(f32[64,64], f32[64,64])")
    unlike = relative("aten.linear.default(f64[7,3,64,99999], f64[64,99999])")
    assert unlike > 2 * like


def test_far_from_what_was_measured_times_go_on_in_proportion() -> None:
    predictor = predictors.load("polynomial").fit([sample(seed, layers=3) for seed in range(4)])
    for rows, inner, outer in ((2**14, 2**12, 2**12), (2**16, 16, 2**13), (1, 2**15, 2**15)):
        signature = f"aten.linear.default(f32[{rows},{inner}], f32[{outer},{inner}])"
        graph = chain("large", [4 * rows * outer], [signature])
        seconds, spread = predictor.predict(graph, CPU)
        assert 1 / 5 < seconds[0] / law(graph)[0] < 5
        assert spread[0] < 4 * seconds[0]


def test_a_kind_that_was_never_measured_is_predicted_like_its_class() -> None:
    predictor = predictors.load("polynomial").fit([sample(seed) for seed in range(15)])
    graph = model(100)
    renamed = tuple(s.replace("linear", "matmul") for s in graph.op_signature)
    assert any("matmul" in s for s in renamed)
    seconds, _ = predictor.predict(replace(graph, op_signature=renamed), CPU)
    assert np.isfinite(seconds).all() and (seconds > 0).all()


def test_more_kinds_than_trees_tell_apart() -> None:
    pytest.importorskip("sklearn")
    signatures = [f"aten.kind{i}.default(f32[1024])" for i in range(300)]
    graph = chain("kinds", [4096] * 300, signatures)
    seconds = law(graph)
    samples = [Sample(graph, CPU, seconds, 0.01 * seconds, 1.5 * seconds)] * 3
    predicted, _ = predictors.load("trees", iterations=20).fit(samples).predict(graph, CPU)
    assert predicted == pytest.approx(seconds, rel=0.2)


def test_other_kinds_of_devices_are_not_guessed() -> None:
    pytest.importorskip("sklearn")
    for name in ("polynomial", "trees"):
        predictor = predictors.load(name).fit([sample(0), sample(1)])
        with pytest.raises(LatencyError, match=r"'gpu' is of kind 'cuda'.*only \['cpu'\]"):
            predictor.predict(model(0), Device("gpu", "cuda"))
        with pytest.raises(LatencyError, match=r"nothing was measured.*placement profile MODEL"):
            predictors.load(name).fit([])


def test_roofline_with_given_rates() -> None:
    graph = model(0)
    values = features(graph)
    roofline = Roofline(flops_per_s=1e10, bytes_per_s=5e9, call_s=4e-6)
    seconds, spread = roofline.predict(graph, Device("anything", "npu"))
    moved = (values.read_bytes + values.written_bytes) / 5e9
    assert seconds == pytest.approx(4e-6 + np.maximum(values.flops / 1e10, moved))
    assert (spread > 0.5 * seconds).all()
    with pytest.raises(LatencyError, match=r"bytes_per_s = -1\.0 must be positive"):
        Roofline(bytes_per_s=-1.0)
    with pytest.raises(LatencyError, match=r"'npu'.*not on this machine.*Roofline\(flops_per_s="):
        Roofline().predict(graph, Device("npu", "npu"))
    with pytest.raises(LatencyError, match="not on this machine"):
        Roofline().predict(graph, Device("far", "cpu", cores=(65535,)))


def test_a_device_of_the_library_is_not_predicted_from_this_machine() -> None:
    predictor = predictors.load("polynomial").fit([sample(seed) for seed in range(10)])
    with pytest.raises(LatencyError, match=r"'a' is like 'amd/epyc-7763'.*--predict roofline"):
        predictor.predict(model(0), Device("a", "cpu", like="amd/epyc-7763"))


# --- profiles ------------------------------------------------------------------------------------


def test_a_predicted_profile_is_one_for_simulator_and_planners() -> None:
    graph = model(100)
    a, b = replace(CPU, name="a"), replace(CPU, name="b")
    cluster = Cluster("two", (a, b, Device("fast", like="a", speed=2.0)))
    links = (Link("a", "b", 1e-5, 1e9), Link("b", "a", 1e-5, 1e9))
    samples = [sample(seed) for seed in range(10)]
    predictor = predictors.load("polynomial").fit(samples)
    profile = predictors.profile_of(graph, cluster, predictor, links=links, samples=samples)
    assert profile.device_names == ("a", "b", "fast")
    assert profile.predicted is not None and profile.predicted.all()
    assert profile.compute_s[:, 2] == pytest.approx(profile.compute_s[:, 0] / 2)
    assert profile.loaded_s == pytest.approx(1.5 * profile.compute_s)  # as in the samples
    timeline = simulate(Problem(graph, cluster, profile), np.zeros(graph.num_ops, np.int32))
    assert timeline.latency_s == pytest.approx(profile.compute_s[:, 0].sum())
    far = Cluster("far", (Device("x", like="cpu:0"),))  # like one that is not there
    with pytest.raises(LatencyError, match=r"'cpu:0'.*add them"):
        predictors.profile_of(model(0), far, Roofline(1e10, 1e9, 1e-6))


def test_the_speed_of_a_device_of_the_library_counts_once() -> None:
    a = Device("a", "cuda", like="nvidia/l4")
    cluster = Cluster("c", (a, replace(a, name="b", speed=0.5)))
    profile = predictors.profile_of(model(0), cluster, Roofline())
    for again in (profile, profile.for_cluster(cluster)):
        assert again.compute_s[:, 1] == pytest.approx(2 * again.compute_s[:, 0])


def test_slowdown_by_class() -> None:
    first = sample(0)
    product = features(first.graph).op_class == CLASSES.index("product")
    loaded = np.where(product, 3.0, 0.5) * first.compute_s
    slower = predictors.slowdown([replace(first, loaded_s=loaded)])
    assert slower[CLASSES.index("product")] == pytest.approx(3.0)
    assert slower[CLASSES.index("other")] == 1.0  # nobody runs faster beside others
    assert slower[CLASSES.index("attention")] == 1.0


# --- the store -----------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path))
    return tmp_path / "measured" / machine_of(HERE)


def here() -> Corpus:
    return Corpus.of(machine_of(HERE))


def test_what_is_remembered_is_there_again(home: Path) -> None:
    assert here().samples == ()
    graph, cluster = model(0), Cluster("one", (CPU,))
    seconds = law(graph)
    remember(graph, cluster, profile_of(graph, seconds))
    (sample,) = here().samples
    assert sample.graph.fingerprint == graph.fingerprint
    assert sample.device == CPU
    assert sample.compute_s == pytest.approx(seconds)
    assert np.isnan(sample.loaded_s).all()
    # Measured again: replaced, not doubled. Alike devices count once.
    remember(graph, cluster, profile_of(graph, 2 * seconds))
    assert len(list(home.iterdir())) == 1
    twin = Cluster("two", (CPU, replace(CPU, name="twin")))
    later = HERE | {"when": "2026-01-02"}
    both = np.stack([3 * seconds, 4 * seconds], axis=1)
    remember(graph, twin, Profile(("any", "twin"), both, both, provenance=later))
    (sample,) = here().samples
    assert sample.compute_s == pytest.approx(4 * seconds)
    (path, *_) = home.iterdir()
    assert load_problem(path).graph.fingerprint == graph.fingerprint  # every command takes it


def test_equal_operators_of_other_graphs_are_known(home: Path) -> None:
    graph, other = model(0), model(1)
    remember(graph, Cluster("one", (CPU,)), profile_of(graph, law(graph)))
    seconds, spread = here().known(graph, replace(CPU, name="renamed"))
    assert seconds == pytest.approx(law(graph))
    assert np.isfinite(spread).all()
    shared = np.array([s in graph.op_signature for s in other.op_signature])
    seconds, _ = here().known(other, CPU)
    assert (np.isfinite(seconds) == shared).all()
    seconds, _ = here().known(graph, replace(CPU, threads=2))
    assert np.isnan(seconds).all()


def test_two_machines_of_one_name_are_two(home: Path) -> None:
    graph, cluster = model(0), Cluster("this-machine", (CPU,))
    facts = HERE | {"host": "node"}, HERE | {"host": "node", "cpu": "another processor"}
    for about, factor in zip(facts, (1, 9), strict=True):
        remember(graph, cluster, profile_of(graph, factor * law(graph), **about))
    for about, factor in zip(facts, (1, 9), strict=True):
        corpus = Corpus.of(machine_of(about))
        (sample,) = corpus.samples
        assert sample.compute_s == pytest.approx(factor * law(graph))
        assert corpus.known(graph, CPU)[0] == pytest.approx(factor * law(graph))
    assert machine_of(facts[0]) == machine_of(facts[0] | {"host": "renamed"})


def test_predicted_entries_and_described_devices_are_no_measurements(home: Path) -> None:
    graph, cluster = model(0), Cluster("one", (CPU,))
    mask = np.ones((graph.num_ops, 1), bool)
    profile = replace(profile_of(graph, law(graph)), predicted=mask)
    remember(graph, cluster, profile)
    remember(graph, Cluster("far", (replace(CPU, like="cpu:0"),)), profile_of(graph, law(graph)))
    assert not home.exists()
    for n in (0, 1):  # parts of a graph that were measured by and by
        part = mask.copy()
        part[n] = False
        remember(graph, cluster, replace(profile, predicted=part))
    assert np.isfinite(here().known(graph, CPU)[0][:2]).all()
    assert here().samples == ()  # not all of its operators are known
    remember(graph, cluster, profile_of(graph, law(graph)))
    assert len(here().samples) == len(list(home.iterdir())) == 1


def test_trees_leave_out_whole_graphs_to_learn_how_far_they_miss() -> None:
    """The same graph on another device tells everything about it: no spread would be left."""
    pytest.importorskip("sklearn")
    rng = np.random.default_rng(0)
    factor = np.exp(rng.normal(0.0, 0.5, 8))  # of each graph, which nothing could predict

    def missed(copies: int) -> float:
        samples = []
        for seed in range(8):
            graph = model(seed)
            seconds = law(graph) * factor[seed]
            for k in range(copies):
                device = replace(CPU, name=f"c{k}")
                samples.append(Sample(graph, device, seconds, seconds * 0.01, seconds))
        fitted: Any = predictors.load("trees").fit(samples)
        return float(fitted.models["cpu"].noise.mean())

    assert missed(2) == pytest.approx(missed(1), rel=0.3)


def test_links_are_medians_over_graphs(home: Path) -> None:
    cluster = Cluster("two", (replace(CPU, name="a"), replace(CPU, name="b")))
    for seed, latency_s in enumerate((1e-6, 3e-6, 9e-6)):
        graph = model(seed)
        seconds = np.repeat(law(graph)[:, None], 2, axis=1)
        links = (Link("a", "b", latency_s, 1e9, send_s=latency_s, send_s_per_byte=latency_s),)
        remember(graph, cluster, Profile(("a", "b"), seconds, seconds, links, provenance=HERE))
    (link,) = here().links(cluster)
    assert link == Link("a", "b", 3e-6, 1e9, send_s=3e-6, send_s_per_byte=3e-6)
    assert Corpus.of("another machine").links(cluster) == ()


def test_a_damaged_file(home: Path) -> None:
    graph = model(0)
    remember(graph, Cluster("one", (CPU,)), profile_of(graph, law(graph)))
    (path,) = home.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CorpusError, match=f"{path.name}.*; remove that file, and measure again"):
        here()


def test_measurements_where_none_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    graph = model(0)
    with pytest.warns(UserWarning, match="will not know this profile.*PLACEMENT_HOME"):
        remember(graph, Cluster("one", (CPU,)), profile_of(graph, law(graph)), tmp_path / "file")
