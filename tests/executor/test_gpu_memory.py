"""Memory of emulated CUDA devices, and the cores beside them."""

import gc
import os
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import nn

from placement.capturing import capture
from placement.capturing.training import mean_of_outputs
from placement.cluster import Cluster
from placement.costs.measure import cached_path
from placement.executor import Executor, Runner, Trainer
from placement.executor.streamed import with_streaming
from placement.executor.weights import forget_others
from placement.workloads import load
from tests import emulated_gpu
from tests.executor.on_gpu import BOTH, CPU, GPU, all_on, linears
from tests.machine import problem_of, random_placement
from tests.modules import module_of


@pytest.mark.parametrize("stays", [False, True])
def test_a_device_that_has_failed_does_not_end_the_process(stays):
    """Which frees what it was to write, and memory that several streams have used, later on."""
    looks = module_of(lambda m, at: (m.table(at), at + 1), table=nn.Embedding(10, 4))
    graph = capture(looks.eval(), torch.arange(4))
    with emulated_gpu.emulated(kernel_s=1e-3) as gpu:
        placement = all_on(graph, 1)
        placement[-1:] = 0 if stays else 1
        mine = torch.ones(4, device="cuda:0")
        mine.record_stream(torch.cuda.Stream())
        with (
            pytest.raises(RuntimeError, match="CUDA error"),
            Runner(graph, BOTH, placement) as runner,
        ):
            list(runner.stream([torch.arange(4), torch.tensor([1, 2, 3, 99]), torch.arange(4)]))
        before = gpu.num_aborts  # what was freed before anybody could know
        del mine
        gc.collect()
        assert gpu.num_aborts == before


@pytest.mark.parametrize("way", ["graphs", "broken off", "fails", "device", "streamed", "trained"])
def test_what_a_closed_runner_had_on_a_gpu_is_free(way):
    """Without a search for cycles; but for the copies that are kept for the next runner."""
    module, inputs = load("dlrm_tiny")
    graph = capture(module, inputs)
    gc.collect()
    gc.disable()
    try:
        with emulated_gpu.emulated() as gpu, ExitStack() as stack:
            if way == "trained":
                optimizer = torch.optim.AdamW(module.train().parameters(), lr=0.1)
                options = {"mode": "training", "loss": mean_of_outputs, "optimizer": optimizer}
                step = capture(module, (inputs, None), **options)
                with Trainer(step, BOTH, random_placement(step, 1, 2), optimizer) as trainer:
                    trainer.step([(inputs, None)] * 2)
                del trainer
            cluster, place = BOTH, all_on(graph, 1)
            if way == "streamed":
                cluster = with_streaming(BOTH)
                place = random_placement(graph, 3, cluster.num_devices)
            runner = stack.enter_context(
                Runner(graph, cluster, place, outputs="device" if way == "device" else "host")
            )
            runner.cuda_graphs = way == "graphs"
            results = list(runner.stream([inputs] * 4))
            assert gpu.allocated[0] > 0
            if way == "fails":
                gpu.missing = {"aten.relu.default"}
                with pytest.raises(NotImplementedError):
                    runner(*inputs)
            if way == "broken off":
                results += [next(runner.stream([inputs] * 5))]
            stack.close()
            del runner, results
            forget_others(torch.device("cuda:0"), graph.program, set())
            assert gpu.allocated[0] == 0
    finally:
        gc.enable()


def test_the_peak_that_is_reported_is_the_allocators():
    *_, graph = linears()
    with emulated_gpu.emulated() as gpu:
        gpu.scratch = {"aten.linear.default": 10**6, "aten.addmm.default": 10**6}
        line = Executor(problem_of(graph, BOTH)).run(all_on(graph, 1), num_microbatches=2)
        assert line.peak_bytes[0] == 0
        assert 10**6 < line.peak_bytes[1] < 10**6 + 10**4
        mixed = Executor(problem_of(graph, BOTH)).run([0, 1], num_microbatches=2).peak_bytes
        assert 0 < mixed[0] < 10**4 and mixed[1] > 10**6


def test_libraries_keep_memory_for_one_launching_thread_at_a_time():
    _, x, graph = linears()
    with emulated_gpu.emulated(library_bytes=10**6) as gpu, Runner(graph, BOTH, [1, 1]) as runner:
        for use in (lambda: runner(x), lambda: runner(x), lambda: list(runner.stream([x] * 3))):
            use()
            assert len(gpu.workspaces) == 1
    assert 10**6 < gpu.peak[0] < 2 * 10**6


@pytest.mark.parametrize(("cores", "host", "own"), [(16, 14, 2), (8, 6, 2), (4, 3, 1), (2, 2, 0)])
def test_a_gpu_has_cores_of_its_own_where_there_are_enough(monkeypatch, cores, host, own):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    with emulated_gpu.emulated():
        cpu, gpu = Cluster.detect().devices
    assert (len(cpu.cores), cpu.threads, len(gpu.cores)) == (host, host, own)
    assert not set(cpu.cores) & set(gpu.cores)


def test_a_gpu_is_promised_what_is_free_less_a_margin():
    with emulated_gpu.emulated(memory_bytes=8 * 2**30):
        free = Cluster.detect().devices[1].memory_bytes
        used = torch.zeros(2**28, device="cuda:0")
        assert Cluster.detect().devices[1].memory_bytes <= free - 0.9 * used.nbytes
    assert 0.85 * 8 * 2**30 < free < 0.95 * 8 * 2**30


def test_a_profile_is_found_again_when_memory_has_another_size(tmp_path):
    graph = capture(*load("tiny_mlp"))
    small = Cluster("small", tuple(replace(d, memory_bytes=2**30) for d in BOTH.devices))
    assert cached_path(graph, small, tmp_path) == cached_path(graph, BOTH, tmp_path)
    slow = Cluster("slow", (replace(CPU, threads=2), GPU))
    assert cached_path(graph, slow, tmp_path) != cached_path(graph, BOTH, tmp_path)
