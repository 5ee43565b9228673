"""Streams on emulated CUDA devices: results, whose memory they are in, and what is copied."""

import gc
import os
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import nn

from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.executor import Executor, Runner
from placement.executor import backend as backend_module
from placement.workloads import load
from tests import emulated_gpu
from tests.emulated_gpu import CudaTensor
from tests.executor.on_gpu import BOTH, THREE, all_on, linears, on_gpu, stream_all
from tests.machine import problem_of, random_placement


def check_streams(names, cluster, seeds=2, count=6):
    """Placements at random of each workload compute what the plain module does."""
    for name in names:
        module, inputs = load(name)
        graph = capture(module, inputs)
        places = [random_placement(graph, seed, cluster.num_devices) for seed in range(seeds)]
        stream_all(graph, module, inputs, cluster, places, count)


@pytest.mark.parametrize("small", [0, 2**16])
def test_random_placements_compute_what_the_plain_module_does(small, monkeypatch):
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", small)
    with emulated_gpu.emulated(copy_s=5e-4, kernel_s=1e-4) as gpu:
        check_streams(["tiny_mlp", "tiny_branches", "tiny_views", "dlrm_tiny"], THREE)
    assert gpu.num_poisoned > 100
    assert gpu.copies["back"] > 50
    assert gpu.num_races == 0


def test_what_is_equal_has_another_order_on_a_gpu():
    """Results that depend on it are no fault of a placement: the models of the checks have none."""
    with emulated_gpu.emulated():
        values, where = torch.tensor([[2.0, 1.0, 1.0]]).to("cuda:0").sort(1)
        assert values.cpu().tolist() == [[1.0, 1.0, 2.0]]
        assert where.cpu().tolist() == [[2, 1, 0]]
        _, first = torch.tensor([1.0, 2.0, 2.0]).to("cuda:0").topk(1)
        assert first.cpu().tolist() == [2]


def test_the_emulated_gpu_notices_memory_that_is_reused_too_early(monkeypatch):
    """Otherwise the test before says little."""
    monkeypatch.setattr(CudaTensor, "record_stream", lambda self, stream: None)
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", 0)  # each copy on a stream of its own
    with emulated_gpu.emulated(copy_s=2e-3), pytest.raises(AssertionError, match="not close"):
        check_streams(["tiny_branches"], THREE, seeds=4)


def test_what_the_user_launched_before_a_call_has_happened_for_it():
    module, x = nn.Linear(8, 1000, bias=False).eval(), torch.ones(4, 8)
    graph = capture(module, x)
    with emulated_gpu.emulated() as gpu:
        graph = on_gpu(graph)
        (weight,) = graph.program.params
        with Runner(graph, BOTH, all_on(graph, 1)) as runner:
            runner(x)
            gpu.kernel_s = 0.05
            with torch.no_grad():
                weight.fill_(1.0)  # on the user's stream, not waited for
            gpu.kernel_s = 0.0
            assert (runner(x) == 8).all()


def test_inputs_on_the_device_stay_there_and_are_waited_for():
    module, (x,) = load("tiny_branches")
    graph = capture(module, (x,))
    with emulated_gpu.emulated() as gpu:
        for placement in (all_on(graph, 1), random_placement(graph, 1, 2)):
            with Runner(graph, BOTH, placement) as runner:
                runner(x)
                there = [x.to("cuda:0") for _ in range(3)]
                gpu.copies.clear()
                gpu.kernel_s = 5e-3  # what follows is not ready yet when it is given
                items = [y + i for i, y in enumerate(there)]
                del there
                for i, results in enumerate(runner.stream(items)):
                    torch.testing.assert_close(results, module(x + i))
                gpu.kernel_s = 0.0
                if (placement == 1).all():
                    assert gpu.copies.keys() == {"back"}


def test_between_devices_of_one_process_nothing_goes_through_host_memory():
    """The same GPU twice, and two GPUs."""
    module, inputs = load("tiny_branches")
    graph = capture(module, inputs)
    for names in (("a/cuda:0", "b/cuda:0"), ("cuda:0", "cuda:1")):
        cluster = Cluster("two", tuple(Device(name, "cuda") for name in names))
        with emulated_gpu.emulated(num_devices=2, copy_s=1e-3, kernel_s=2e-4) as gpu:
            check_streams(["tiny_branches"], cluster, seeds=1)
            with Runner(graph, cluster, random_placement(graph, 0, cluster.num_devices)) as runner:
                list(runner.stream([inputs] * 2))
                gpu.copies.clear()
                list(runner.stream([inputs] * 5))
            assert gpu.copies["pageable"] == 0
            assert gpu.copies["back"] == 5  # the results
            assert gpu.copies["pinned"] <= 10  # the inputs


def test_what_goes_to_the_device_is_pinned_and_does_not_wait_for_it():
    module, inputs = load("tiny_views")
    graph = capture(module, inputs)
    with emulated_gpu.emulated() as gpu, Runner(graph, THREE, random_placement(graph, 0)) as runner:
        list(runner.stream([inputs] * 2))
        gpu.copies.clear()
        list(runner.stream([inputs] * 4))
        assert gpu.copies["pinned"] and not gpu.copies["pageable"]


def test_a_pipeline_copies_while_it_computes(monkeypatch):
    """Three operators of 5 ms, 5 ms to the device and 5 ms back: 25 ms, one after another."""
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", 0)
    torch.manual_seed(0)
    module, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)]).eval(), torch.randn(4, 64)
    graph = capture(module, x)
    with emulated_gpu.emulated(kernel_s=5e-3, copy_s=5e-3, poison=False):
        problem = problem_of(graph, BOTH, num_microbatches=12)
        line = Executor(problem).run(all_on(graph, 1))
    begin, end = line.start_s.min(axis=1), line.end_s.max(axis=1)
    assert np.median(begin[6:] - end[5:-1]) < 4e-3  # the copy has come while others computed


def test_a_forked_process_does_not_wait_for_threads_that_it_lacks():
    _, x, graph = linears()
    with emulated_gpu.emulated():
        with Runner(graph, BOTH, all_on(graph, 1)) as runner:
            runner(x)
        assert any(backend_module._IDLE.values())
        if (child := os.fork()) == 0:
            os._exit(len(backend_module._IDLE))
        assert os.waitpid(child, 0)[1] == 0


def test_threads_streams_and_parameters_stay_for_the_next_runner():
    module, x, graph = linears()
    with emulated_gpu.emulated() as gpu:
        with Runner(graph, BOTH, all_on(graph, 1)) as runner:
            runner(x)
        streams, threads = gpu.num_streams, set(threading.enumerate())
        gpu.copies.clear()
        for device in (1, 0, 1):
            with Runner(graph, BOTH, all_on(graph, device)) as runner:
                torch.testing.assert_close(runner(x), module(x))
        assert gpu.num_streams == streams and set(threading.enumerate()) <= threads
        assert gpu.copies["pageable"] == 0
        with torch.no_grad():
            module[0].weight.add_(1.0)
        with Runner(graph, BOTH, all_on(graph, 1)) as runner:
            torch.testing.assert_close(runner(x), module(x))
            with torch.no_grad():
                module[1].weight.add_(1.0)
            torch.testing.assert_close(runner(x), module(x))
            torch.testing.assert_close(runner(x), module(x))
        assert gpu.copies["pageable"] == 2  # the parameters
        gc.disable()  # in cycles a GPU's memory would wait for the collector
        try:
            del runner, graph
            assert gpu.allocated[0] == 0
        finally:
            gc.enable()


def test_runners_of_one_module_for_other_shapes_have_the_same_copies_of_parameters():
    module, x, _ = linears()
    inputs = x, torch.cat([x, x])
    graphs = [capture(module, y) for y in inputs]
    with emulated_gpu.emulated() as gpu, ExitStack() as stack:
        runners = [stack.enter_context(Runner(g, BOTH, all_on(g, 1))) for g in graphs]
        for written in (False, True):
            for runner, y in zip(runners, inputs, strict=True):
                torch.testing.assert_close(runner(y), module(y))
            first, second = (runner.loaded for runner in runners)
            assert all(first[key] is second[key] for key in first)
            assert gpu.copies["pageable"] == 4 + written  # once for both
            with torch.no_grad():
                module[0].weight.mul_(2.0)


@pytest.mark.parametrize(
    ("layer", "form"),
    [
        (nn.LSTM(6, 5, 2), (4, 6, 2, 5, 0, 2, False, False)),
        (nn.LSTM(6, 5, 2, bidirectional=True, proj_size=3), (5, 6, 2, 5, 3, 2, False, True)),
        (nn.GRU(6, 5, bias=False, batch_first=True), (2, 6, 3, 5, 0, 1, True, False)),
        (nn.RNN(6, 5, nonlinearity="relu"), (4, 6, 0, 5, 0, 1, False, False)),
    ],
)
def test_weights_of_recurrent_layers_are_laid_out_for_cudnn_once(monkeypatch, layer, form):
    """As ``flatten_parameters`` of PyTorch's own modules does it."""
    calls = []

    def lay_out(weights, *form):
        calls.append(form)
        flat = torch.empty(sum(x.numel() for x in weights), device="cuda:0")
        parts = flat.split([x.numel() for x in weights])
        for x, part in zip(weights, parts, strict=True):
            part.copy_(x.flatten())
            view = part.view_as(x)
            x.meta, x.cell, x.memory = view.meta, view.cell, view.memory

    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lay_out)
    module = layer.eval()
    x = torch.randn(3, 4, 6)
    graph = capture(module, x)
    with emulated_gpu.emulated():
        for _ in range(2):
            with Runner(graph, BOTH, all_on(graph, 1)) as runner:
                torch.testing.assert_close(runner(x), module(x))
        assert calls == [form]
        with Runner(on_gpu(graph), BOTH, all_on(graph, 1)) as runner:
            torch.testing.assert_close(runner(x), module(x))
        assert calls == [form]  # not what is the module's own
