"""Idle cores are kept awake where that is permitted, and gloo's thread waits its turn."""

import os
import struct
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.executor import Runner, awake


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a runner does with the file of the machine, in order."""
    file = tmp_path / "latency"
    file.touch()
    monkeypatch.setattr(awake, "_LATENCY_FILE", str(file))
    done: list[str] = []
    really = os.close

    def close(number: int) -> None:
        if os.path.samestat(os.fstat(number), file.stat()):
            done.append(f"asked for {struct.unpack('i', file.read_bytes())[0]} us, ended")
        really(number)

    monkeypatch.setattr(awake.os, "close", close)
    return done


def runner_on(placement: list[int]) -> Runner:
    cluster = Cluster("two", (Device("cpu:0", cores=(0,)), Device("cpu:1", cores=(0,))))
    graph = capture(nn.Sequential(nn.ReLU(), nn.Sigmoid()), torch.ones(3))
    return Runner(graph, cluster, placement)


def stream(placement: list[int], fail: bool = False) -> None:
    with runner_on(placement) as runner:
        outputs = runner.stream([torch.ones(3)] * 2)
        next(outputs)
        if fail:
            raise KeyboardInterrupt
        assert len(list(outputs)) == 1


def test_while_micro_batches_are_under_way(asked: list[str]) -> None:
    assert awake.cores_stay_awake()
    stream([0, 1])
    assert asked == ["asked for 0 us, ended"]


def test_one_device_wakes_nobody(asked: list[str]) -> None:
    stream([0, 0])
    assert asked == []


def test_a_stream_that_is_left_lets_them_sleep(asked: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        stream([0, 1], fail=True)
    assert asked == ["asked for 0 us, ended"]


def test_a_call_that_is_interrupted_while_it_asks_leaves_a_runner_that_works(monkeypatch):
    with runner_on([0, 1]) as runner:
        with monkeypatch.context() as now, pytest.raises(KeyboardInterrupt):
            now.setattr(awake.os, "open", Mock(side_effect=KeyboardInterrupt))
            runner(torch.ones(3))
        assert torch.equal(runner(torch.ones(3)), torch.ones(3).sigmoid())


def test_without_permission_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "_LATENCY_FILE", "/nowhere/latency")
    assert not awake.cores_stay_awake()
    stream([0, 1])


@pytest.mark.skipif(not Path("/proc/self/timerslack_ns").exists(), reason="Linux only")
def test_only_the_threads_of_devices_wait_exactly() -> None:
    before = Path("/proc/self/timerslack_ns").read_text(encoding="utf-8")
    graph = capture(nn.Linear(3, 3), (torch.ones(3),))
    with Runner(graph, Cluster("one", (Device("cpu:0"),)), [0]) as runner:
        runner(torch.ones(3))
        slack = Path(f"/proc/{runner.workers[0].native_id}/timerslack_ns")
        assert slack.read_text(encoding="utf-8") == "1\n" != before
    assert Path("/proc/self/timerslack_ns").read_text(encoding="utf-8") == before


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_only_the_thread_of_gloo_waits_its_turn() -> None:
    policies, named, done = {}, threading.Barrier(3), threading.Event()

    def wait(name: str) -> None:
        task = Path(f"/proc/self/task/{threading.get_native_id()}")
        (task / "comm").write_text(name, encoding="utf-8")
        named.wait(10)
        done.wait(10)
        policies[name] = os.sched_getscheduler(threading.get_native_id())

    threads = [threading.Thread(target=wait, args=(name,)) for name in ("gloo_tcp_loop", "other")]
    for thread in threads:
        thread.start()
    named.wait(10)
    awake.let_senders_finish()
    done.set()
    for thread in threads:
        thread.join()
    assert policies == {"gloo_tcp_loop": os.SCHED_BATCH, "other": os.SCHED_OTHER}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
