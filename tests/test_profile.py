"""Profiles: scaled to other clusters, saved, loaded, and refused when damaged."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.profile import ARRAYS, Profile, ProfileError
from placement.tools.files import FileError

GRAPH = OpGraph.build("two", ["A", "B"], [0], [8], [(0, 1)])


def make(**changes: Any) -> Profile:
    values: dict[str, Any] = {
        "device_names": ("cpu:0", "cuda:0"),
        "compute_s": np.array([[4.0, 1.0], [2.0, np.inf]]),
        "spread_s": np.array([[0.4, 0.1], [0.2, 0.0]]),
        "links": (Link("cpu:0", "cuda:0", 0.5, 4.0, channel="pcie"), Link("cuda:0", "cpu:0", 0.1)),
        "loaded_s": np.array([[5.0, 1.0], [3.0, np.inf]]),
        "transfer_s": np.arange(4.0).reshape(1, 2, 2),
        "workspace_bytes": np.array([1, 2]),
        "library_bytes": np.array([[0, 3], [0, 4]]),
        "predicted": np.array([[False, True], [False, True]]),
        "graph_fingerprint": GRAPH.fingerprint,
        "provenance": {"when": "today", "repeats": 3},
    }
    return Profile(**{**values, **changes})


def assert_same(a: Profile, b: Profile) -> None:
    assert a.device_names == b.device_names
    assert a.links == b.links
    assert a.graph_fingerprint == b.graph_fingerprint
    assert a.provenance == b.provenance
    for what in ARRAYS:  # strictly equal: None too, and types
        np.testing.assert_array_equal(getattr(a, what), getattr(b, what), what, strict=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"compute_s": np.ones((2, 3))}, r"shape \(2, 3\), expected \[N, 2\]"),
        ({"compute_s": np.ones(2)}, r"shape \(2,\), expected"),
        ({"compute_s": np.array([[1.0, -1.0]])}, r"compute_s\[0, 1\] = -1.0 is not a time"),
        ({"compute_s": np.array([[1.0, 1.0], [np.nan, 1.0]])}, r"compute_s\[1, 0\] = nan"),
        ({"compute_s": np.array([[1.0, 1.0], [np.inf] * 2])}, "operator 1 can run on no device"),
        ({"compute_s": np.array([[1.0, 2e20]])}, r"compute_s\[0, 1\] = 2e\+20 is not .* to 1e\+12"),
        ({"loaded_s": np.ones((2, 1))}, r"loaded_s has shape \(2, 1\), expected \[2, 2\]"),
        ({"loaded_s": np.full((2, 2), np.inf)}, r"loaded_s\[0, 0\] = inf is not a time"),
        ({"transfer_s": np.full((1, 2, 2), np.nan)}, r"transfer_s\[0, 0, 0\] = nan"),
        ({"transfer_s": np.ones((1, 2))}, r"expected \[T, 2, 2\]"),
        ({"workspace_bytes": np.ones(1, np.int64)}, r"\(1,\), expected \[2\]"),
        ({"library_bytes": np.ones(2, np.int64)}, r"\(2,\), expected \[2, 2\]"),
        ({"workspace_bytes": np.array([1, 2**60])}, r"\[1\] = \d+ is not a number of bytes"),
    ],
)
def test_what_is_no_profile(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        make(**changes)


def test_it_belongs_to_one_graph() -> None:
    make().check(GRAPH)
    other = OpGraph.build("other", ["A", "B"], [0], [9], [(0, 1)])
    with pytest.raises(ProfileError, match=r"not of 'other' .*; measure it: placement profile"):
        make().check(other)
    make(graph_fingerprint="").check(other)  # costs from elsewhere fit any graph of that size
    three = OpGraph.build("three", ["A", "B"], [0, 0, 1], [9, 9, 9], [(0, 1)])
    with pytest.raises(ProfileError, match="transfer_s is for 1 tensors, graph 'three' has 3"):
        make(graph_fingerprint="").check(three)
    with pytest.raises(ProfileError, match="has 2 operators, graph 'one' has 1"):
        make().check(OpGraph.build("one", ["A"], [], [], []))


def test_for_cluster_takes_the_devices_in_the_cluster_s_order() -> None:
    profile = make().for_cluster(Cluster("c", (Device("cuda:0"), Device("cpu:0"))))
    assert profile.device_names == ("cuda:0", "cpu:0")
    assert profile.compute_s.tolist() == [[1, 4], [np.inf, 2]]
    assert profile.loaded_s.tolist() == [[1, 5], [np.inf, 3]]
    assert profile.transfer_s.tolist() == [[[3, 2], [1, 0]]] and profile.predicted[:, 0].all()
    assert set(profile.links) == set(make().links)
    one = make().for_cluster(Cluster("c", (Device("cpu:0"),)))  # the others and their links go
    assert one.compute_s.tolist() == [[4], [2]] and one.links == ()


def test_arrays_are_as_the_kernels_were_compiled_for() -> None:
    """``a[:, columns]`` of NumPy lies column by column, and a frombuffer cannot be written."""
    swapped = make().for_cluster(Cluster("c", (Device("cuda:0"), Device("cpu:0"))))
    read_only = np.frombuffer(np.ones(4, np.float32).tobytes(), np.float32).reshape(2, 2)
    whole = make(compute_s=read_only, loaded_s=None, transfer_s=read_only.reshape(1, 2, 2))
    for profile in (swapped, whole):
        for what in ("compute_s", "spread_s", "transfer_s", "predicted"):
            array = getattr(profile, what)
            assert array.flags.c_contiguous and array.flags.writeable, what
        assert profile.compute_s.dtype == profile.transfer_s.dtype == np.float64


def test_a_device_like_another_is_scaled_and_has_its_links() -> None:
    fast = Device("fast", "cuda", like="cuda:0", speed=2.0)
    profile = make().for_cluster(Cluster("c", (Device("cpu:0"), fast)))
    assert profile.compute_s.tolist() == [[4, 0.5], [2, np.inf]]
    assert profile.spread_s.tolist() == [[0.4, 0.05], [0.2, 0]]
    links = Link("cpu:0", "fast", 0.5, 4.0, channel="pcie"), Link("fast", "cpu:0", 0.1)
    assert set(profile.links) == set(links)
    half = Cluster("half", (Device("cpu:0", like="cpu:0", speed=0.5),))  # like the measured one
    assert make().for_cluster(half).compute_s.tolist() == [[8], [4]]
    own = Cluster("own", (Device("cpu:0", speed=0.5),))  # measured as it is
    assert make().for_cluster(own).compute_s.tolist() == [[4], [2]]


@pytest.mark.parametrize("declared", [Link("cpu:0", "cuda:0", 9.0), Link("cpu:*", "*", 9.0)])
def test_declared_links_replace_all_measured_ones_that_they_cover(declared: Link) -> None:
    cluster = Cluster("c", (Device("cpu:0"), Device("cuda:0")), (declared,))
    assert make().for_cluster(cluster).links == (Link("cuda:0", "cpu:0", 0.1), declared)


def test_a_device_that_was_not_measured() -> None:
    for device, message in (
        (Device("tpu"), r"'tpu' was not measured .* run: placement profile"),
        (Device("x", like="cuda:7"), r"'x' is like 'cuda:7', which was not measured"),
        (Device("cuda:9", like="nvidia/a100"), "device 'cuda:9' was not measured"),
    ):
        with pytest.raises(ProfileError, match=message):
            make().for_cluster(Cluster("c", (device,)))


@pytest.mark.parametrize(
    "changes",
    [{}, {"loaded_s": None, "transfer_s": None, "workspace_bytes": None, "predicted": None}],
)
def test_saved_and_loaded_is_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    profile = make(**changes)
    path = tmp_path / "new" / "folder" / "p.npz"
    profile.save(path)
    assert_same(Profile.load(path), profile)
    profile.save(path)  # over itself
    assert os.listdir(path.parent) == ["p.npz"]


@pytest.mark.parametrize("keep", [0, 10, 200, -1])
def test_a_damaged_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "p.npz"
    make().save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ProfileError, match=r"p.npz: not a readable profile .* measure again"):
        Profile.load(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        Profile.load(tmp_path / "missing.npz")
    pickled = np.array([{}], dtype=object)  # which could run code: never read
    for arrays in ({"a": np.zeros(3)}, {"head": pickled}):
        np.savez(tmp_path / "other.npz", **arrays)
        with pytest.raises(ProfileError, match="not a readable profile"):
            Profile.load(tmp_path / "other.npz")


def test_a_profile_that_was_edited_by_hand_is_refused_with_the_number(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    make().save(path)
    with np.load(path) as data:
        arrays = dict(data)
    arrays["compute_s"][0, 0] = -1
    np.savez(path, **arrays)
    wrong = r"p.npz: compute_s\[0, 0\] = -1.0 is not a time .*; measure again: placement"
    with pytest.raises(ProfileError, match=wrong):
        Profile.load(path)
    arrays["compute_sec"] = arrays.pop("compute_s")
    np.savez(path, **arrays)
    with pytest.raises(ProfileError, match=r"p.npz: not a readable .* lacks \['compute_s'\]"):
        Profile.load(path)
    np.savez(path, **arrays, compute_s=arrays["spread_s"])
    with pytest.raises(ProfileError, match=r"unknown arrays \['compute_sec'\]"):
        Profile.load(path)


def test_a_full_disk_leaves_the_old_profile_and_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "p.npz"
    old = make()
    old.save(path)

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(FileError, match="no space left"):
        make(provenance={"when": "tomorrow"}).save(path)
    assert os.listdir(tmp_path) == ["p.npz"]
    assert_same(Profile.load(path), old)
