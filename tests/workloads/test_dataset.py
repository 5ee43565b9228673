"""The data set: what is built is what can be loaded, and nothing stops at one bad model."""

import gzip
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from placement import importers
from placement.__main__ import main
from placement.cluster import Cluster, Device
from placement.importers import FormatError
from placement.planners import load as planner
from placement.tools import files
from placement.workloads import WorkloadError, dataset, zoo
from placement.workloads.dataset import DatasetError, Entry
from tests.machine import CORES
from tests.problems import random_problem

HERE = Cluster("here", tuple(Device(name, cores=(CORES[0],)) for name in ("cpu-a", "cpu-b")))
LIST = "tiny_mlp batch=2  # a comment\n\nnot_there\ntiny_mlp batch=4\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dataset.Built]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "models.txt").write_text(LIST)
    entries = dataset.read_list(folder / "models.txt")
    return folder / "set", dataset.build(entries, folder / "set", cluster=HERE, repeats=2)


@pytest.fixture
def links(built: tuple[Path, dataset.Built], tmp_path: Path) -> None:
    """Links that were measured before: measuring them is what takes the time."""
    (tmp_path / "here").mkdir()
    content = (built[0] / "here" / "machine.json").read_bytes()
    (tmp_path / "here" / "machine.json").write_bytes(content)


def test_a_model_that_fails_is_named_and_the_others_are_there(built) -> None:
    folder, report = built
    assert report.made == ("tiny_mlp-batch2", "tiny_mlp-batch4")
    assert report.kept == report.left == ()
    assert list(report.failed) == ["not_there"]
    assert report.failed["not_there"].startswith("WorkloadError: unknown workload 'not_there'")
    assert list(dataset.load(folder)) == ["here/tiny_mlp-batch2", "here/tiny_mlp-batch4"]


def test_a_graph_is_a_problem_with_its_provenance_and_a_planner_takes_it(built) -> None:
    folder, _ = built
    problem = dataset.load(folder)["here/tiny_mlp-batch2"]
    facts = problem.profile.provenance
    assert (facts["spec"], facts["options"], facts["dataset"]) == ("tiny_mlp", {"batch": 2}, 1)
    assert "host" not in facts  # a machine's name is nobody's business
    assert facts["order"] in ("rank", "reuse") and facts["repeats"] == 2
    # What operators take adds up to the median run of each device, as ``typical`` promises: of two
    # runs the slower does not count where it was disturbed.
    for d, name in enumerate(problem.cluster.device_names):
        whole = facts["whole_s"][name]
        assert len(whole) == 2
        undisturbed = [s for s in whole if s <= 1.15 * np.percentile(whole, 25)]
        assert problem.compute_s[:, d].sum() == pytest.approx(np.median(undisturbed), rel=0.01)
    assert problem.link_latency_s[0, 1] >= 0 and len(problem.profile.links) == 2
    assert planner("heft")(problem).value_s > 0


def test_devices_that_are_not_at_hand_are_described_by_those_that_were_measured(built) -> None:
    folder, _ = built
    four = Cluster("four", tuple(Device(f"d{i}", like="cpu-a", speed=i + 1.0) for i in range(4)))
    problem = dataset.load(folder, four)["here/tiny_mlp-batch4"]
    assert problem.num_devices == 4
    assert problem.compute_s[:, 0] == pytest.approx(4 * problem.compute_s[:, 3])


def test_batch_normalisations_take_the_statistics_of_the_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    x = 1e-2 * torch.randn(64, 2, 8, 8, generator=generator) + 5
    module = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout(1.0), nn.ReLU()).eval()
    assert module(x).std() < 2e-2
    dataset.settle(module, (x,))
    norm = module[0]
    torch.testing.assert_close(norm.running_mean, x.mean((0, 2, 3)))
    assert (norm.training, norm.momentum) == (False, 0.1)
    assert module(x).std() > 0.5 and module(x).max() > 2  # and nothing else was trained
    # One value in a channel has no variance: it stays as it was.
    dataset.settle(module, (x[:1, :, :1, :1],))
    torch.testing.assert_close(norm.running_mean, x.mean((0, 2, 3)))
    assert not norm.training


def test_what_is_there_is_kept_and_what_is_damaged_is_measured_again(built, tmp_path) -> None:
    folder, _ = built
    copy = tmp_path / "here"
    copy.mkdir()
    for path in (folder / "here").iterdir():
        content = path.read_bytes()
        broken = path.name.startswith("tiny_mlp-batch4")
        (copy / path.name).write_bytes(content[:-20] if broken else content)
    with pytest.raises(FormatError, match=r"tiny_mlp-batch4.json.gz: .*the compressed file is cut"):
        dataset.load(tmp_path)
    summary = dataset.summary(tmp_path)
    assert list(summary.damaged) == ["here/tiny_mlp-batch4"] and summary.num_graphs == 1
    assert main(["dataset", "show", str(tmp_path)]) == 1
    before = (copy / "machine.json").read_text()

    entries = [Entry("tiny_mlp", {"batch": b}) for b in (2, 4, 8)]
    again = dataset.build(entries[:2], tmp_path, cluster=HERE, repeats=5)
    assert (again.kept, again.made) == (("tiny_mlp-batch2",), ("tiny_mlp-batch4",))
    assert (copy / "machine.json").read_text() == before  # links are measured once
    # The time is over before the next graph begins, and that is no failure.
    late = dataset.build(entries, tmp_path, cluster=HERE, seconds=1e-9)
    assert (late.made, late.failed, late.left) == ((), {}, ("tiny_mlp-batch8",))


def test_a_graph_without_a_new_operator_runs_fewer_rounds(links, tmp_path) -> None:
    entries = [Entry("tiny_mlp", {"batch": 2}), Entry("tiny_mlp", {"batch": 2, "layers": 3})]
    dataset.build(entries, tmp_path, cluster=HERE, repeats=4)
    rounds = {k: p.profile.provenance["repeats"] for k, p in dataset.load(tmp_path).items()}
    known = dataset.FEW_ROUNDS
    assert rounds == {"here/tiny_mlp-batch2": 4, "here/tiny_mlp-batch2-layers3": known}


def test_an_interrupt_leaves_whole_files_only(links, tmp_path, monkeypatch) -> None:
    dataset.build([Entry("tiny_mlp", {"batch": 2})], tmp_path, cluster=HERE, repeats=1)
    before = sorted((tmp_path / "here").iterdir())
    monkeypatch.setattr(dataset, "_measured", Mock(side_effect=KeyboardInterrupt))
    entries = [Entry("tiny_mlp", {"batch": b}) for b in (2, 4)]
    with pytest.raises(KeyboardInterrupt):
        dataset.build(entries, tmp_path, cluster=HERE)
    assert sorted((tmp_path / "here").iterdir()) == before


def test_signatures_are_counted_once_and_their_times_pooled(tmp_path) -> None:
    """Two graphs, three operators each, of which two have the signature "op(f32[8])".

    graph  compute_s of them on device a   elsewhere
    0      1 3                             one operator "op" on its own
    1      5 7
    The median of 1 3 5 7 is 4.
    """
    for i in range(2):
        p = random_problem(i, 3, 2)
        graph = replace(p.graph, op_signature=("op(f32[8])", "op(f32[8])", "op"))
        seconds = np.array([[1.0, 10], [3, 10], [2, 10]]) + np.array([[4.0 * i, 0]] * 2 + [[0, 0]])
        provenance = {"kind": "toy", "family": f"f{i}", "measure_seconds": 1800.0}
        facts = {"provenance": provenance, "graph_fingerprint": "", "compute_s": seconds}
        nothing = {"loaded_s": None, "transfer_s": None}
        profile = replace(p.profile, spread_s=seconds / 2, **facts, **nothing)
        importers.save(replace(p, graph=graph, profile=profile), tmp_path / "m" / f"g{i}.json.gz")
    rows = {(r.signature, r.device): r for r in dataset.operators(dataset.load(tmp_path))}
    names = dataset.load(tmp_path)["m/g0"].cluster.device_names
    pooled = rows["op(f32[8])", names[0]]
    assert (pooled.seconds, pooled.spread_s, pooled.occurrences, pooled.graphs) == (4, 2, 4, 2)
    assert len(rows) == 4  # two signatures, two devices
    summary = dataset.summary(tmp_path)
    assert summary.kinds == {"toy": (2, 6, 2)}
    assert (summary.num_graphs, summary.num_ops, summary.num_signatures) == (2, 6, 2)
    assert (summary.seconds, summary.spread) == (3600.0, 0.5)
    assert summary.num_bytes == sum(p.stat().st_size for p in (tmp_path / "m").iterdir())


def test_the_command_builds_shows_and_loads(links, tmp_path, says, monkeypatch):
    monkeypatch.setattr(dataset, "this_machine", lambda: HERE)
    (tmp_path / "models.txt").write_text(LIST)
    folder = str(tmp_path)
    build = ["dataset", "build", str(tmp_path / "models.txt"), "--out", folder, "--repeats", "1"]
    answer = says([*build, "--json"], 1).json  # one of them failed
    assert answer["made"] == ["tiny_mlp-batch2", "tiny_mlp-batch4"]
    assert "not_there" in answer["failed"]
    out = says(build, 1)
    assert "0 graphs measured, 2 were there, 1 failed, 0 left" in out.out
    assert "not_there: WorkloadError" in out.err
    shown = says(["dataset", "show", folder, "--json"]).json
    assert shown["num_graphs"] == 2 and shown["machines"] == {"here": ["cpu-a", "cpu-b"]}
    assert "distinct operators" in says(["dataset", "show", folder]).out
    table = tmp_path / "operators.csv"
    assert main(["dataset", "load", folder, "--out", str(table)]) == 0
    lines = table.read_text().splitlines()
    assert lines[0].startswith("signature,kind,machine,device,seconds")
    assert len(lines) == 1 + 2 * shown["num_signatures"]
    graph = f"{folder}/here/tiny_mlp-batch2.json.gz"
    assert main(["plan", graph, "--planner", "heft", "--json"]) == 0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no model"),
        ("# only a comment\n", "names no model"),
        ("resnet50\nresnet50 batch\n", r"models.txt:2: 'batch' is not an option: write key=value"),
        (None, "cannot be read"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(tmp_path, text, complaint) -> None:
    path = tmp_path / "models.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DatasetError, match=complaint):
        dataset.read_list(path)


def test_what_cannot_be_meant_is_refused(tmp_path, says) -> None:
    with pytest.raises(DatasetError, match="no data set"):
        dataset.load(tmp_path)
    for wrong in ({"repeats": 0}, {"seconds": 0.0}, {"seconds": float("nan")}):
        with pytest.raises(DatasetError, match="at least one round"):
            dataset.build([Entry("tiny_mlp")], tmp_path, cluster=HERE, **wrong)
    with pytest.raises(WorkloadError, match="'ResNot' is unknown; there are ResNet, ConvNext"):
        zoo.small("ResNot")
    assert "placement dataset build default" in says(["dataset", "show", tmp_path], 2).err
    assert "--out FOLDER is missing" in says(["dataset", "build", "default"], 2).err


def test_two_models_of_one_name_are_refused(built, links, tmp_path) -> None:
    """One would be dropped, or taken for measured when it is another one that was."""
    for one, other in (
        (Entry("a.models:build"), Entry("b.models:build")),
        (Entry("a:make", {"kind": "small"}), Entry("a:make", {"size": "small"})),
    ):
        with pytest.raises(DatasetError, match=r"in the list are both called '(build|make-small)'"):
            dataset.build([one, other], tmp_path, cluster=HERE)
    twice = [Entry("tiny_mlp", {"batch": 2})] * 2
    assert dataset.build(twice, built[0], cluster=HERE, repeats=1).kept == ("tiny_mlp-batch2",)
    with pytest.raises(DatasetError, match=r"'mine:tiny_mlp batch=2' and 'tiny_mlp batch=2' in /"):
        dataset.build([Entry("mine:tiny_mlp", {"batch": 2})], built[0], cluster=HERE)


def test_options_are_read_as_numbers_where_they_are_and_name_the_file(tmp_path) -> None:
    path = tmp_path / "models.txt"
    path.write_text("a.b:make width=64 rate=0.5 name=x/y on=true sizes=[1,2]\n")
    (entry,) = dataset.read_list(path)
    options = {"width": 64, "rate": 0.5, "name": "x/y", "on": True, "sizes": [1, 2]}
    assert entry.options == options
    assert entry.name == "make-width64-rate0.5-x_y-onTrue-_1_2_"
    assert entry.family == "make"


def test_the_default_list_is_what_the_card_says() -> None:
    entries = dataset.default_entries()
    assert len({e.name for e in entries}) == len(entries) == 2 * (len(zoo.MODELS) + 23)
    assert len(zoo.MODELS) >= 60
    kinds = {m.kind for m in zoo.MODELS}
    assert kinds == {"cnn", "vit", "encoder", "decoder", "encoder-decoder", "audio", "moe"}
    half = len(entries) // 2  # of every kind in the first size, before any in the second
    assert {e.kind for e in entries[:half]} == {e.kind for e in entries[half:]}
    assert all(e.family and e.kind != "other" for e in entries)


@pytest.mark.parametrize("name", ["ResNet", "Bert", "Wav2Vec2"])
def test_small_models_can_be_captured(name) -> None:
    pytest.importorskip("transformers")
    from placement.capturing import capture

    batch, size = next(m.sizes[0] for m in zoo.MODELS if m.name == name)
    module, inputs = zoo.small(name, batch, size)
    assert capture(module, inputs).num_ops > 40
    assert sum(p.numel() for p in module.parameters()) < 10e6


def test_a_compressed_problem_is_the_same_problem(tmp_path, monkeypatch) -> None:
    problem = random_problem(1, 5, 2)
    for name in ("a.json", "a.json.gz", "b.json.gz"):
        importers.save(problem, tmp_path / name)
    packed = (tmp_path / "a.json.gz").read_bytes()
    assert packed == (tmp_path / "b.json.gz").read_bytes()  # no time, no name inside
    assert gzip.decompress(packed) == (tmp_path / "a.json").read_bytes()
    again = importers.load(tmp_path / "a.json.gz")
    assert again.graph.fingerprint == problem.graph.fingerprint
    np.testing.assert_array_equal(again.compute_s, problem.compute_s)
    (tmp_path / "bad.json.gz").write_bytes(packed[:30] + b"xxxx" + packed[34:])
    with pytest.raises(FormatError, match=r"bad.json.gz: .*(damaged|the compressed file|not)"):
        importers.load(tmp_path / "bad.json.gz")
    monkeypatch.setattr(files, "MOST", files.MOST._replace(unpacked_bytes=100))
    with pytest.raises(FormatError, match="holds more than 100 bytes"):
        importers.load(tmp_path / "a.json.gz")
