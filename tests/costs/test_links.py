"""Links between processes: fits, shared interfaces, clusters, and real processes that measure."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.__main__ import main
from placement.cli import BAD_INPUT
from placement.cluster import Cluster, Device, Link
from placement.costs.links import (
    HANDED,
    SIZES,
    Measured,
    fit,
    host_names,
    joined,
    merged,
    one_way,
    shared_channels,
    trials,
    with_sending,
)
from placement.profile import Profile
from tests.problems import written

ROOT = Path(__file__).parents[2]


# --- fits ----------------------------------------------------------------------------------------


def test_what_comes_back_is_taken_off() -> None:
    # A byte takes 1 ms each way: 2 ms there and back. A large message takes 5 ms.
    assert one_way([2.0, 2.0, 6.0]).tolist() == [1.0, 5.0]
    # Noise: the byte took longer than the message. Half of the way there and back at least.
    assert one_way([9.0, 4.0]).tolist() == [2.0]


def test_a_line_is_found_again() -> None:
    seconds = 2e-4 + np.array(SIZES) / 5e7
    link = fit((0, 3), seconds)
    assert (link.src, link.dst) == ("rank:0", "rank:3")
    assert link.latency_s == pytest.approx(2e-4)
    assert link.bandwidth_bytes_per_s == pytest.approx(5e7)


def test_small_messages_that_slip_through_a_burst() -> None:
    # 50 MB/s, but the first 64 KiB go at 2 GB/s.
    size = np.array(SIZES, float)
    seconds = 1e-4 + np.maximum(size - 2**16, 0) / 5e7 + size / 2e9
    link = fit((0, 1), seconds)
    assert link.bandwidth_bytes_per_s == pytest.approx(5e7, rel=0.05)
    assert link.latency_s < 2e-4


# --- interfaces that are shared ------------------------------------------------------------------


def test_what_is_sent_at_the_same_time() -> None:
    # Hosts may have the same name.
    assert host_names(["k1", "k2", "k1", "k3"], ["a", "a", "a", "b"]) == ("a", "a#2", "a", "b")
    assert trials(["a"] * 4) == {}
    assert trials(["a", "b"]) == {"a <> b": ((0, 1), (1, 0))}
    four = trials(["a", "a", "b", "b"])
    assert four["a:out"] == ((0, 2), (1, 3))  # other senders, other receivers
    assert four["b:out"] == ((2, 0), (3, 1))
    assert four["a <> b"] == ((0, 2), (2, 0)) and len(four) == 3
    three = trials(["a", "b", "c"])
    assert three["a:out"] == ((0, 1), (0, 2)) and len(three) == 6


def test_one_interface_per_host() -> None:
    hosts = ["a", "a", "b", "b"]
    channels = shared_channels(hosts, {"a:out": 2.0, "b:out": 1.9, "a <> b": 1.0})
    of_a = {pair for pair, name in channels.items() if name == "a:out"}
    assert of_a == {(0, 2), (0, 3), (1, 2), (1, 3)}
    assert channels[2, 0] == channels[3, 1] == "b:out" and len(channels) == 8  # none within a host
    # A wire that carries one direction at a time; a host with an interface for each rank.
    assert shared_channels("ab", {"a <> b": 2.1}) == {(0, 1): "a:out", (1, 0): "a:out"}
    channels = shared_channels("aab", {"a:out": 1.05, "b:out": 2.0, "a <> b": 1.0})
    assert channels == {(2, 0): "b:out", (2, 1): "b:out"}


# --- clusters and profiles -----------------------------------------------------------------------


def measured(hosts: tuple[str, ...]) -> Measured:
    """A link of every pair with latency ``10 a + b`` seconds; hosts share interfaces."""
    channels = shared_channels(hosts, {})
    pairs = permutations(range(len(hosts)), 2)
    costs = {(a, b): (f"rank:{a}", f"rank:{b}", 10.0 * a + b, 1e9) for a, b in pairs}
    links = {pair: Link(*x, channel=channels.get(pair)) for pair, x in costs.items()}
    return Measured(hosts, links, {})


def test_a_cluster_of_ranks(tmp_path: Path) -> None:
    # Ranks 0 and 1 on a, each with one device, rank 2 on b with two.
    devices = [Device(x, cores=(0,), memory_bytes=10) for x in "wxyz"]
    cluster = joined(devices, (0, 1, 2, 2), measured(("a", "a", "b")), "made")
    by = {(x.src, x.dst): x for x in cluster.links}
    assert len(by) == 10 and ("y", "z") not in by  # of one process: measured as ever
    assert by["w", "y"].latency_s == by["w", "z"].latency_s == 2.0
    assert by["z", "x"].latency_s == 21.0
    assert by["w", "y"].channel == by["x", "z"].channel == "a:out"
    assert by["w", "x"].channel == "rank:0 > rank:1"
    path = tmp_path / "cluster.yaml"
    cluster.to_yaml(path)
    assert Cluster.from_yaml(path) == cluster
    assert "threads" not in path.read_text(), "defaults are left out"


def test_unlimited_bandwidth_survives_a_file(tmp_path: Path) -> None:
    cluster = Cluster("two", (Device("a"), Device("b", busy_w=3.5)), (Link("a", "b", 1e-6),))
    cluster.to_yaml(tmp_path / "c.yaml")
    assert Cluster.from_yaml(tmp_path / "c.yaml") == cluster


def test_profiles_of_two_hosts_are_one() -> None:
    names = "wxyz"
    cluster = joined([Device(x) for x in names], (0, 0, 1, 2), measured(("a", "b", "c")), "made")
    facts: Any = {"graph_fingerprint": "f", "provenance": {"host": "a"}}
    links, seconds = (Link("w", "x", 7.0), Link("x", "w", 7.0)), np.array([[1.0, 2.0]])
    first = Profile(("w", "x"), seconds, 0 * seconds, links, loaded_s=seconds + 0.5, **facts)
    alone = [Profile((x,), [[s]], [[0.0]], **facts) for x, s in (("y", 3.0), ("z", 4.0))]
    kept, needed = np.array([[64]]), np.array([[5], [7]])
    alone[0] = replace(alone[0], library_bytes=kept, workspace_bytes=needed[0])
    alone[1] = replace(alone[1], workspace_bytes=needed[1])
    whole = merged([first, *alone], cluster)
    assert whole.device_names == tuple(names) and whole.compute_s.tolist() == [[1, 2, 3, 4]]
    assert whole.loaded_s.tolist() == [[1.5, 2.5, 3, 4]] and whole.workspace_bytes.tolist() == [7]
    assert whole.library_bytes.tolist() == [[0, 0, 64, 0]]
    latency = {(x.src, x.dst): x.latency_s for x in whole.links}
    assert latency["w", "x"] == 7.0 and latency["y", "z"] == 12.0 and len(latency) == 12


def test_what_sending_costs_is_a_line_through_two_sizes() -> None:
    (few, _), (many, _) = HANDED
    link = Link("a", "b", 1.0, 2.0)
    fitted = with_sending(link, np.array([3.0 + 0.5 * few, 3.0 + 0.5 * many]))
    assert (fitted.send_s, fitted.send_s_per_byte) == (3.0, 0.5)
    assert (fitted.latency_s, fitted.bandwidth_bytes_per_s) == (1.0, 2.0)
    # Noise: the larger took less. A byte never gives time back.
    fitted = with_sending(link, np.array([3.0, 2.0]))
    assert (fitted.send_s, fitted.send_s_per_byte) == (3.0, 0.0)


# --- real processes ------------------------------------------------------------------------------


def test_two_processes_here(tmp_path: Path, says: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path / "home"))
    cluster = tmp_path / "cluster.yaml"
    where = ["--cluster-out", str(cluster), "--repeats", "2", "--json"]
    got = says(["profile", "tiny_mlp", "--distributed", "2", *where]).json
    assert list(got) == ["hosts", "devices", "links", "slowdown", "cluster", "profile"]
    assert len(set(got["hosts"])) == 1 and got["slowdown"] == {}
    assert [d["rank"] for d in got["devices"]] == [0, 1]
    assert [(x["src"], x["dst"]) for x in got["links"]] == [("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")]
    for link in got["links"]:
        assert 0 <= link["latency_s"] < 1 and link["bandwidth_bytes_per_s"] > 1e6
        # A message takes a processor some microseconds, on both ends.
        assert 1e-6 < link["send_s"] < 1e-1 and 0 <= link["send_s_per_byte"] < 1e-6
    known = Cluster.from_yaml(cluster)
    assert known.links[0].channel == "rank:0 > rank:1"
    assert got["profile"]["devices"] == list(known.device_names)
    # The profile is in the cache: nothing is measured now.
    monkeypatch.setattr("placement.costs.measure.measure", None)
    plan = ["plan", "tiny_mlp", "--cluster", str(cluster), "--planner", "heft", "--json"]
    assert says(plan).json["feasible"] is True


def test_what_ranks_refuse_is_said_once(tmp_path: Path, capfd: Any) -> None:
    where = ["--cluster-out", str(tmp_path / "c.yaml")]
    small = written(tmp_path / "one.yaml", "devices: [{name: a}]")
    words = ["--distributed", "2", "--repeats", "1", "--cluster", str(small), *where]
    assert main(["profile", *words])
    err = capfd.readouterr().err
    assert err.count("2 processes for 1 devices") == 1 and "Traceback" not in err
    assert not (tmp_path / "c.yaml").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "name a model, or measure links"),
        (["--distributed"], "say how many processes to start here"),
        (["--distributed", "1"], "2 or more"),
        (["--distributed", "2", "--cluster-out", "/proc/x/c.yaml"], "cannot write"),
    ],
)
def test_mistakes(more: list[str], message: str, says: Any) -> None:
    assert message in says(["profile", *more], BAD_INPUT).err


def test_no_cluster_file_is_replaced_unasked(tmp_path, monkeypatch, says):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "cluster.yaml", "devices: [{name: a}, {name: b}]")
    for more, message in (
        ([], "cluster.yaml is there already"),
        (["--cluster", str(path), "--cluster-out", "cluster.yaml"], "--cluster reads it"),
    ):
        assert message in says(["profile", "--distributed", "2", *more], BAD_INPUT).err
    assert path.read_text() == "devices: [{name: a}, {name: b}]"


@pytest.fixture
def two_hosts() -> Iterator[list[tuple[str, str]]]:
    """(namespace, interface) of two hosts, joined by a wire of 200 Mbit/s."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, ip and tc")

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True, capture_output=True)

    mark = os.getpid()
    ends = [(f"pla{mark}", f"a{mark}"), (f"plb{mark}", f"b{mark}")]
    try:
        for host, _ in ends:
            run(f"ip netns add {host}")
        (a, x), (b, y) = ends
        run(f"ip link add {x} netns {a} type veth peer name {y} netns {b}")
        for i, (host, end) in enumerate(ends):
            run(f"ip -n {host} addr add 10.77.0.{i + 1}/24 dev {end}")
            run(f"ip -n {host} link set {end} up")
            run(f"ip -n {host} link set lo up")
            limit = "tbf rate 200mbit burst 64kb latency 200ms"
            run(f"ip netns exec {host} tc qdisc add dev {end} root {limit}")
        yield ends
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    finally:
        for host, _ in ends:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def test_two_hosts_with_a_slow_wire(two_hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    shared = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29653", "WORLD_SIZE": "2"}
    words = ["placement", "profile", "--distributed", "--cluster-out", str(path), "--repeats", "2"]
    processes = []
    for rank, (host, end) in enumerate(two_hosts):
        env = os.environ | shared | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": end}
        command = ["ip", "netns", "exec", host, sys.executable, "-m", *words]
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
    try:
        assert [p.wait(120) for p in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    there, back = Cluster.from_yaml(path).links
    for link in (there, back):  # 25 MB/s, of which headers take some
        assert 5e6 < link.bandwidth_bytes_per_s < 50e6
    # Whether both directions share a channel depends on how busy this machine is.
    assert all(str(x.channel).endswith(":out") for x in (there, back))
    assert there.src.partition("/")[0] != there.dst.partition("/")[0]
