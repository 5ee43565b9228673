"""Clusters: found on this machine, or described in a file that may be wrong."""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from placement import cluster as module
from placement.cluster import Cluster, ClusterError, Device, Link, between
from placement.graph import OpGraph
from tests.problems import problem_on, written

GOOD = """\
name: office
devices:
  - {name: "cpu:0", cores: [0, 1], threads: 2, memory_bytes: 8e9, busy_w: 65, idle_w: 10}
  - {name: "gpu", kind: cuda, like: "cuda:0", speed: 1.5}
links:
  - {src: "cpu:0", dst: gpu, latency_s: 2e-5, bandwidth_bytes_per_s: 1e10, blocking: true}
  - {src: gpu, dst: "cpu:0", latency_s: 2e-5, bandwidth_bytes_per_s: 1e10, channel: pcie}
"""


def read(folder: Path, text: str) -> Cluster:
    return Cluster.from_yaml(written(folder / "cluster.yaml", text))


def test_a_file(tmp_path: Path) -> None:
    cluster = read(tmp_path, GOOD)
    cpu = Device("cpu:0", "cpu", (0, 1), 2, 8 * 10**9, 65.0, 10.0)
    gpu = Device("gpu", "cuda", like="cuda:0", speed=1.5)
    to = Link("cpu:0", "gpu", 2e-5, 1e10, blocking=True)
    back = Link("gpu", "cpu:0", 2e-5, 1e10, channel="pcie")
    assert cluster == Cluster("office", (cpu, gpu), (to, back))
    assert cluster.num_devices == 2 and cluster.device_names == ("cpu:0", "gpu")
    assert cluster.index("gpu") == 1
    with pytest.raises(ClusterError, match=r"no device 'tpu' in cluster 'office'; it has"):
        cluster.index("tpu")
    # No name and no links are needed.
    assert read(tmp_path, "devices: [{name: a}]") == Cluster("cluster", (Device("a"),))


def test_a_container_has_the_memory_that_it_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of its host."""
    files = {"/sys/fs/cgroup/memory.max": "max\n"}
    real = Path.read_text

    def fake(self: Path, *args: object, **options: object) -> str:
        if str(self).startswith("/sys/fs/cgroup/memory") and str(self) not in files:
            raise FileNotFoundError(str(self))
        return files.get(str(self)) or real(self, *args, **options)

    monkeypatch.setattr(Path, "read_text", fake)
    whole = Cluster.detect(1).devices[0].memory_bytes
    assert whole == module._machine_memory_bytes()
    files["/sys/fs/cgroup/memory.max"] = str(whole // 4)
    assert Cluster.detect(1).devices[0].memory_bytes == whole // 4
    files.clear()  # the older kind of control group, whose "no limit" is a large number
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    assert Cluster.detect(1).devices[0].memory_bytes == whole


@pytest.mark.parametrize(
    "text, message",
    [
        (GOOD.replace("threads:", "thread:"), r"device 'cpu:0': unknown field \['thread'\]"),
        (GOOD.replace("channel:", "chanel:"), r"link '': unknown field \['chanel'\]"),
        (GOOD.replace("latency_s: 2e-5", "wake_s: soon"), r"wake_s = 'soon' is not a number"),
        (GOOD.replace("links:", "wires:"), r"unknown keys \['wires'\]; keys are name, devices"),
        (GOOD.replace("busy_w: 65", "busy_w: -65"), r"'cpu:0': busy_w = -65.0, must be from 0 to"),
        (GOOD.replace("busy_w: 65", "busy_w: .nan"), r"'cpu:0': busy_w = nan, must be from 0 to"),
        (GOOD.replace("busy_w: 65", "busy_w: .inf"), r"'cpu:0': busy_w = inf, must be from 0 to"),
        (GOOD.replace("idle_w: 10", "idle_w: -0.5"), r"'cpu:0': idle_w = -0.5, must be from 0 to"),
        (GOOD.replace("busy_w: 65", "power_source: x"), r"= 'x', must be declared or measured"),
        (GOOD.replace("busy_w: 65", "busy_w: much"), r"busy_w = 'much' is not a number"),
        (GOOD.replace("8e9", "8GiB"), r"memory_bytes = '8GiB' is not a number, such as 8e9"),
        (GOOD.replace("8e9", ".inf"), r"memory_bytes = .* is not a number"),
        (GOOD.replace("8e9", "0"), r"memory_bytes = 0, must be from 1"),
        (GOOD.replace("cores: [0, 1]", "cores: 2"), r"cores = 2 is not a list"),
        (GOOD.replace("threads: 2", "threads: 0"), r"threads = 0, must be from 1"),
        (GOOD.replace("threads: 2", "threads: two"), r"device .*two"),
        (GOOD.replace("speed: 1.5", "speed: 0"), r"speed = 0.0, must be from"),
        (GOOD.replace("latency_s: 2e-5", "latency_s: -1"), r"latency_s = -1.0, wake_s"),
        (GOOD.replace("latency_s: 2e-5", "latency_s: .inf"), r"latency_s = inf, .*of hours"),
        (GOOD.replace("latency_s: 2e-5", "wake_s: .nan"), r"wake_s = nan,"),
        (GOOD.replace("src: gpu", "src: tpu"), r"link tpu -> cpu:0: no device 'tpu'; devices are"),
        (GOOD.replace('name: "gpu"', 'name: "cpu:0"'), r"device names repeat"),
        (GOOD.replace('name: "gpu", ', ""), r"missing .* 'name'"),
        ("devices: []", r"has no devices"),
        ("devices: [{name: 0}]", r"device 0: name = 0 must be a text: write it in quotes"),
        ("devices: [{name: a, threads: 2.0}]", r"'a': threads = 2.0 must be a whole number"),
        ("devices: [{name: a, model: 2024-01-02}]", r"model = datetime.* must be a text"),
        ("devices: [{name: a, model: 2024-13-45}]", r"cannot be read as a cluster: month must"),
        ("devices: [{name: a, cores: [x]}]", r"cores: 'x' is not a core number"),
        (
            GOOD.replace("blocking: true", "blocking: 'false'"),
            r"blocking = 'false' must be true or false",
        ),
        ("devices: [cpu]", r"a device must be a mapping, not 'cpu'"),
        ("devices: [{name: a}]\nlinks: 3", r"'links:' must be a list, not 3"),
        ("hello", r"needs a list 'devices:'"),
        ("", r"needs a list 'devices:'"),
        ("devices: [", r"cannot be read as a cluster"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "cluster.yaml") in str(caught.value)


def test_what_is_counted_is_a_whole_number() -> None:
    memory = Device("gpu", "cuda", memory_bytes=16e9).memory_bytes
    assert memory == 16 * 10**9 and type(memory) is int
    assert type(Device("cpu", threads=np.float64(2.0)).threads) is int
    with pytest.raises(ClusterError, match=r"'gpu': memory_bytes = 1.5, must be a whole number"):
        Device("gpu", "cuda", memory_bytes=1.5)


def test_a_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"nowhere.yaml: cannot be read as a cluster"):
        Cluster.from_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ClusterError, match=r"binary.yaml: cannot be read as a cluster"):
        Cluster.from_yaml(written(tmp_path / "binary.yaml", b"\xff\xfe\x00\x80"))


def test_fingerprint_sees_devices_and_links_but_not_the_cluster_s_name() -> None:
    a = Cluster("a", (Device("x"), Device("y")), (Link("x", "y", 1.0),))
    assert Cluster("b", a.devices, a.links).fingerprint == a.fingerprint
    assert Cluster("a", a.devices).fingerprint != a.fingerprint
    assert Cluster("a", a.devices, (Link("x", "y", 2.0),)).fingerprint != a.fingerprint
    assert Cluster("a", (Device("x", threads=2), *a.devices[1:]), a.links) != a


def test_links_of_many_devices() -> None:
    # Two nodes of two: 9 s over an interface per node, then 1 s within a node.
    names = ("n0/a", "n0/b", "n1/a", "n1/b")
    links = (
        Link("n0/*", "*", 9.0, channel="out 0"),
        Link("n1/*", "*", 9.0, 4.0, blocking=True, channel="out 1"),
        Link("n0/*", "n0/*", 1.0, send_s=0.5),
        Link("n1/*", "n1/*", 1.0),
        Link("n1/b", "*/b", 7.0),  # the last one counts: also for n1/b -> n0/b
    )
    cluster = Cluster("two nodes", tuple(Device(name) for name in names), links)
    assert cluster.joins.all()
    graph = OpGraph.build("one", ["a"], [0], [8], [])
    problem = problem_on(graph, np.ones((1, 4)), cluster=cluster, links=links)
    expected = [[0, 1, 9, 9], [1, 0, 9, 9], [9, 9, 0, 1], [9, 7, 1, 0]]
    assert problem.link_latency_s.tolist() == expected
    assert problem.link_s_per_byte[2].tolist() == [0.25, 0.25, 0, 0]
    assert problem.link_blocking[2:].tolist() == [[True, True, False, False], [True] + 3 * [False]]
    assert problem.link_send_s.sum() == 1.0 and problem.link_send_s[0, 1] == 0.5
    c = problem.link_channel
    assert c[0, 2] == c[0, 3] == c[1, 2] == c[1, 3] and c[2, 0] == c[2, 1] == c[3, 0]
    # Two interfaces, within nodes four pairs, one pair of its own, four diagonals.
    assert problem.num_channels == 2 + 4 + 1 + 4


def test_links_between_what_is_left() -> None:
    links = (Link("n0/*", "*"), Link("n0/*", "n1/a"), Link("n1/b", "n0/b"))
    assert between(links, ["n0/a", "n1/b"]) == links[:1]
    assert between(links, ["n1/a", "n1/b"]) == ()


@pytest.mark.parametrize("name", ["n2/*", "*c", "a*b", ""])
def test_a_pattern_that_is_no_device(name: str) -> None:
    with pytest.raises(ClusterError, match=r"link \S* -> \S*: no device .*; devices are \['n0/a'"):
        Cluster("c", (Device("n0/a"), Device("n1/b")), (Link("n0/a", name),))


def test_a_name_with_signs_of_patterns_is_a_name() -> None:
    cluster = Cluster("c", (Device("gpu[0]"), Device("gpu*")), (Link("gpu[0]", "gpu*"),))
    assert cluster.joins.tolist() == [[False, True], [False, False]]


def test_detect_pins_one_cpu_device_to_each_core_it_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 5}, raising=False)
    monkeypatch.setattr(module, "_cuda_devices", lambda: ())
    monkeypatch.setattr(module, "_host_memory_bytes", lambda: 900)
    cluster = Cluster.detect()
    assert cluster.device_names == ("cpu:0", "cpu:1", "cpu:2")
    found = [(d.cores, d.threads, d.memory_bytes) for d in cluster.devices]
    assert found == [((core,), 1, 300) for core in (3, 5, 7)]
    assert len(Cluster.detect(max_cpu_devices=2).devices) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert len(Cluster.detect().devices) == 4  # and no more


def test_detect_with_gpus_makes_one_cpu_device_of_all_cores(monkeypatch):
    import torch

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    facts = SimpleNamespace(total_memory=80, name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: facts)
    cluster = Cluster.detect()
    found = [("cpu:0", "cpu"), ("cuda:0", "cuda"), ("cuda:1", "cuda")]
    assert [(d.name, d.kind) for d in cluster.devices] == found
    assert (cluster.devices[0].cores, cluster.devices[0].threads) == ((0, 1, 2), 3)
    assert (cluster.devices[1].memory_bytes, cluster.devices[1].model) == (80, "a GPU")


def test_detect_finds_this_machine() -> None:
    cluster = Cluster.detect()
    assert cluster.num_devices >= 1
    assert all(d.memory_bytes > 0 for d in cluster.devices)
    assert all(set(d.cores) <= os.sched_getaffinity(0) for d in cluster.devices)
