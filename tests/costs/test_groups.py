"""Groups of devices that compute each layer together: seconds, bytes and groups by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from experiments import tensor_parallel
from placement.cli import BAD_INPUT, NO
from placement.cluster import Cluster, Device, Link
from placement.costs.efficiency import Peak
from placement.costs.groups import GroupError, best_groups, grouped, groupings
from placement.costs.runtimes import NOTHING, Cost, runtimes
from placement.costs.serving import Serving, interval, memory, serving_problem, terms
from placement.exporters import ExportError
from placement.exporters import load as load_exporter
from placement.plan import load_plan, make_plan
from placement.planners import load
from placement.problem import Problem, Solution
from tests.problems import written as text_file
from tests.served import LLAMA, MIXTRAL, decoder, written

FOUR = "devices:\n" + "".join(f'- {{name: "cuda:{i}", like: nvidia/a100}}\n' for i in range(4))
FAST = FOUR + 'links:\n- {src: "*", dst: "*", latency_s: 2e-6, bandwidth_bytes_per_s: 2.5e11}\n'
SMALL = LLAMA | {"num_hidden_layers": 4}


def cluster(count: int = 4, link: Link | None = None, **facts: object) -> Cluster:
    likes = {"like": "nvidia/a100", "memory_bytes": 40 * 10**9} | facts
    devices = tuple(Device(f"cuda:{i}", "cuda", **likes) for i in range(count))
    return Cluster("c", devices, () if link is None else (link,))


def test_what_others_measured_of_groups_is_in_their_interval() -> None:
    """Of vLLM on groups of A100 nothing was fitted: its interval is wider than that of one GPU."""
    of = tensor_parallel.decoder("QwQ 32B")
    for _, batch, prompt, answer, ways, measured_s in tensor_parallel.MEASURED:
        serving = Serving("decode", prompt + answer // 2, batch)
        group = grouped(tensor_parallel.CLUSTERS["NVLink"], [tuple(range(ways))])
        placement = np.zeros(len(of.parts), np.int32)
        low, high = interval(of, group, placement)["decode"]
        predicted_s = serving_problem(of, group, serving).compute_s.sum()
        assert low * predicted_s <= measured_s <= high * predicted_s
    assert interval(of, cluster(1), placement)["decode"][1] < high


def test_seconds_of_a_group() -> None:
    """A part's work and bytes over its members, and 2 (k - 1) times a k-th over the ring."""
    link = Link("*", "*", 1e-5, 1e11)
    asked = Serving("decode", 1000, 3)
    model, one = decoder(SMALL), cluster(4, link)
    four = serving_problem(model, grouped(one, [(0, 1, 2, 3)]), asked).compute_s[:, 0]
    peak = Peak.of(one.devices[0], "bf16")
    names = [part.name for part in model.parts]
    ring_s = 6 * (1e-5 + 3 * 4096 * 2 / 4 / 1e11)
    feed = model.parts[names.index("model.layers.1.feed_forward")]
    work, moved = 2 * feed.numel * 3 / 4, feed.weight_bytes / 4 + 2 * 3 * 2 * 4096
    own = runtimes()["vllm/cuda"]
    expected = own.seconds(peak, feed.kind, Cost(work, moved), NOTHING) + ring_s
    assert four[names.index(feed.name)] == pytest.approx(expected)
    head = model.parts[-1]
    gather_s = 3 * (1e-5 + 3 * 128256 * 2 / 4 / 1e11)
    moved = head.weight_bytes / 4 + 2 * 3 * 2 * 4096
    products = Cost(2 * head.numel * 3 / 4, moved)
    expected = own.token_s + own.seconds(peak, head.kind, products, NOTHING) + gather_s
    assert four[-1] == pytest.approx(expected)
    alone = serving_problem(model, one, asked).compute_s[:, 0]
    embedding, norm = names.index("model.embed_tokens"), names.index("model.norm")
    assert four[embedding] == pytest.approx(alone[embedding] + ring_s)
    assert four[norm] == pytest.approx(alone[norm])  # every member has it


def test_heads_of_keys_are_whole() -> None:
    """Of two heads of keys four members keep four, so that they read and have twice the cache."""
    few = decoder(SMALL, num_key_value_heads=2)
    asked = Serving("decode", 4096, 8)
    one = serving_problem(few, cluster(), asked)
    four = serving_problem(few, grouped(cluster(), [(0, 1, 2, 3)]), asked)
    kept = [memory(p, np.zeros(p.num_ops, np.int32)) for p in (one, four)]
    own, share = (next(iter(x.values())) for x in kept)
    assert share["kv_cache_bytes"] == 2 * own["kv_cache_bytes"]
    assert share["weights_bytes"] == own["weights_bytes"]


def test_memory_of_a_group_is_that_of_its_members_without_their_copies() -> None:
    smaller = Device("cuda:2", "cuda", like="nvidia/a100", memory_bytes=30 * 10**9)
    unlike = Cluster("c", (*cluster(2).devices, smaller))
    (group,) = grouped(unlike, [(0, 1, 2)], 10**9).devices
    assert (group.memory_bytes, group.name) == (3 * 30 * 10**9 - 2 * 10**9, "cuda:0..cuda:2")
    assert group.members == ("cuda:0", "cuda:1", "cuda:2") and group.ring_bytes_per_s is None


def test_the_slowest_link_of_the_ring_counts() -> None:
    """Four devices of two hosts: pairs within them are fast, a ring of all crosses twice."""
    devices = tuple(Device(f"{h}/cuda:{i}", "cuda", like="nvidia/a100") for h in "ab" for i in "01")
    own = [Link(f"{h}/*", f"{h}/*", 1e-6, 2e11) for h in "ab"]
    links = (Link("*", "*", 1e-4, 1e9), *own)
    two_hosts = Cluster("hosts", devices, links)
    (all_of_them,) = grouped(two_hosts, [(0, 1, 2, 3)]).devices
    assert (all_of_them.ring_latency_s, all_of_them.ring_bytes_per_s) == (1e-4, 1e9)
    pairs = grouped(two_hosts, [(0, 1), (2, 3)])
    assert [(d.ring_latency_s, d.ring_bytes_per_s) for d in pairs.devices] == [(1e-6, 2e11)] * 2
    ends = {f"{h}/cuda:0..{h}/cuda:1" for h in "ab"}
    assert {(x.src, x.latency_s) for x in pairs.links} == {(end, 1e-4) for end in ends}
    shared = Link("*", "*", 1e-6, 2e11, channel="bus")  # four send one after another
    assert grouped(cluster(4, shared), [(0, 1, 2, 3)]).devices[0].ring_bytes_per_s == 5e10


def test_ways_to_make_groups() -> None:
    """Of seven devices with 32 heads: sizes 4, 2 and 1, and smaller ones of what is left."""
    sizes = [[len(g) for g in groups] for groups in groupings(decoder(SMALL), cluster(7))]
    assert sizes == [[4, 2, 1], [2, 2, 2, 1], [1] * 7]
    (only,) = groupings(decoder(SMALL), cluster(7), 4)
    assert [len(g) for g in only] == [4, 1, 1, 1]
    others = (("slow", "t4"), ("x:0", "l4"), ("x:1", "l4"))
    unlike = [Device(name, "cuda", like=f"nvidia/{like}") for name, like in others]
    mixed = Cluster("c", (*cluster(2).devices, *unlike))
    assert groupings(decoder(SMALL), mixed) == [
        [(0, 1), (2,), (3, 4)],
        [(0, 1), (2,), (3,), (4,)],
        [(0,), (1,), (2,), (3, 4)],
        [(0,), (1,), (2,), (3,), (4,)],
    ]


def partitions(items: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """All ways to cut a list into runs of 1, 2, 4 and 8."""
    sizes = [k for k in (1, 2, 4, 8) if k <= len(items)]
    cuts = [[tuple(items[:k]), *rest] for k in sizes for rest in partitions(items[k:])]
    return cuts if items else [[]]


@pytest.mark.parametrize("latency_s", [1e-6, 1.5e-5, 1e-4])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("memory_gb", [3, 40])
def test_no_other_groups_are_better(phase: str, latency_s: float, memory_gb: int) -> None:
    """Groups of one size, against every way to make groups of five devices, mixed ones too."""
    asked = Serving(phase, 2048)
    model, solve = decoder(SMALL, num_hidden_layers=12), load("layer_dp", helpers=False)
    devices = cluster(5, Link("*", "*", latency_s, 2e10), memory_bytes=memory_gb * 10**9)
    best = solve(best_groups(model, devices, asked, solve)).value_s
    all_ways = [grouped(devices, groups) for groups in partitions(range(5))]
    values = [solve(serving_problem(model, c, asked)).value_s for c in all_ways]
    assert np.isfinite(best) and best <= min(values) * (1 + 1e-9)


def test_eight_devices_answer_as_well_as_plans_by_hand() -> None:
    """TP 8, PP 8 and TP 4 x PP 2, each with the same number of layers a stage."""
    eight = cluster(8, Link("*", "*", 2e-6, 2.5e11))
    model, layer_dp = decoder(), load("layer_dp")
    for phase in ("prefill", "decode"):
        asked = Serving(phase, 4096)
        best = layer_dp(best_groups(model, eight, asked, layer_dp)).value_s
        for k in (8, 1, 4):
            groups = [tuple(range(i, i + k)) for i in range(0, 8, k)]
            by_hand = load("even_layers")(serving_problem(model, grouped(eight, groups), asked))
            assert best <= by_hand.value_s * (1 + 1e-9)


def test_more_members_are_faster_until_latency_counts() -> None:
    def seconds(latency_s: float) -> list[float]:
        devices = cluster(8, Link("*", "*", latency_s, 2.5e11))
        found = []
        for k in (1, 2, 4, 8):
            group = grouped(devices, [tuple(range(k))])
            problem = serving_problem(decoder(), group, Serving("decode", 1024))
            found.append(load("layer_dp")(problem).value_s)
        return found

    assert all(a > b for a, b in pairwise(seconds(1e-7)))
    assert all(a < b for a, b in pairwise(seconds(1e-3)))


def test_experts_and_recurrent_layers() -> None:
    """A router adds nothing up; a recurrent layer is whole on each member."""
    link, asked = Link("*", "*", 1e-2, 1e11), Serving("decode", 100)
    model = decoder(MIXTRAL, num_hidden_layers=2)
    pair = serving_problem(model, grouped(cluster(2, link), [(0, 1)]), asked).compute_s[:, 0]
    slow = [model.parts[i].name.rpartition(".")[2] for i in np.flatnonzero(pair > 1e-2)]
    assert slow == ["embed_tokens", *["attention", "experts"] * 2, "lm_head"]
    mamba = decoder({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64,
                     "vocab_size": 100, "torch_dtype": "float16"})  # fmt: skip
    clusters = cluster(2, link), grouped(cluster(2, link), [(0, 1)])
    one, two = (serving_problem(mamba, c, asked) for c in clusters)
    assert one.compute_s[1, 0] == two.compute_s[1, 0]
    on = np.zeros(one.num_ops, np.int32)
    assert two.param_bytes_on(on)[0] > one.param_bytes_on(on)[0]


@pytest.mark.parametrize("size, message", [
    (3, "groups of 3 devices cannot share 32 heads (8 of keys and values) evenly; "
        "of at most 4 these can: 1, 2, 4"),
    (8, "groups of 8 devices: members must be alike, and of 4 devices there are 4 as 'cuda:0': "
        "at most 4"),
    (1, "groups of 1 devices: a group has at least 2"),
])  # fmt: skip
def test_groups_that_cannot_be(size: int, message: str) -> None:
    with pytest.raises(GroupError) as error:
        groupings(decoder(SMALL), cluster(), size)
    assert message in str(error.value)


def planned(problem: Problem) -> object:
    return make_plan(problem, load("even_layers")(problem), planner="even_layers")


def test_exports() -> None:
    asked = Serving("decode", 1024)
    small = cluster(4, Link("*", "*", 1e-6, 2e11))
    plan = planned(serving_problem(decoder(SMALL), grouped(small, [(0, 1), (2, 3)]), asked))
    vllm = load_exporter("vllm")(plan)
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3\n" in str(vllm.files[""])
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 2" in vllm.note
    megatron = load_exporter("megatron")(plan)
    assert "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2" in megatron.note
    titan = json.loads(load_exporter("torchtitan")(plan).files[""])
    assert (titan["tensor_parallel_degree"], titan["pipeline_parallel_degree"]) == (2, 2)
    with pytest.raises(ExportError, match=r"'cuda:0..cuda:1' is a group of devices"):
        load_exporter("huggingface")(plan)
    # A layer on the processor: each GPU of the group offloads half of it.
    host = Device("cpu:0", like="amd/epyc-7763", memory_bytes=40 * 10**9)
    mixed = grouped(replace(small, devices=(*small.devices[:2], host)), [(0, 1), (2,)])
    both = serving_problem(decoder(SMALL), mixed, asked)
    on = (both.graph.group == both.graph.group[3]).astype(np.int32)
    plan = make_plan(both, Solution(on, 1.0), planner="by hand")
    half = np.array(plan.provenance.profile["weights_bytes"])[on == 1].sum() / 2
    options = str(load_exporter("vllm")(plan).files[".args"]).split()
    assert options[:4] == ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "1"]
    assert float(options[5]) == ceil(half / 2**30 * 100) / 100
    unequal = serving_problem(decoder(SMALL), grouped(small, [(0, 1, 2), (3,)]), asked)
    for name in ("vllm", "megatron", "torchtitan"):
        with pytest.raises(ExportError, match=r"groups of one size: .* has 3 devices, and .* 1"):
            load_exporter(name)(planned(unequal))


def test_the_command(tmp_path: Path, says) -> None:
    model, home = written(tmp_path, SMALL, FAST)
    out = str(tmp_path / "plan.json")
    line = ["plan", model, "--cluster", home, "--context", "512"]
    answer = says([*line, "--tensor-parallel", "--json", "--out", out]).json
    assert set(answer["assignment"].values()) == {"cuda:0..cuda:3"}
    plan = load_plan(out)
    assert plan.cluster.devices[0].members == tuple(f"cuda:{i}" for i in range(4))
    assert plan.cluster.build().fingerprint == plan.cluster.fingerprint
    says(["validate", out])
    assert "groups that compute each layer together" in says(["show", out]).out
    assert "cannot share 32 heads" in says([*line, "--tensor-parallel", "3"], BAD_INPUT).err
    says([*line, "--tensor-parallel=x"], BAD_INPUT)
    wrong = says(["plan", "tiny_mlp", "--tensor-parallel"], BAD_INPUT).err
    assert "--tensor-parallel is for language models" in wrong
    line[-1] = "2000000000"
    assert "the largest context" in says([*line, "--tensor-parallel", "2"], NO).err


def test_a_cluster_file_keeps_groups(tmp_path: Path) -> None:
    pairs = grouped(Cluster.from_yaml(text_file(tmp_path / "four.yaml", FAST)), [(0, 1), (2, 3)])
    pairs.to_yaml(tmp_path / "pairs.yaml")
    assert Cluster.from_yaml(tmp_path / "pairs.yaml").fingerprint == pairs.fingerprint
    assert terms(decoder(SMALL), pairs, Serving("decode", 64), np.zeros(11, np.int32))
