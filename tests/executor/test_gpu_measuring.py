"""Measuring operators and links of emulated CUDA devices."""

import copy
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import placement.costs.measure as measure_module
from experiments.runs import two_cores
from placement.capturing import capture
from placement.capturing.training import mean_of_outputs
from placement.cluster import Cluster, ClusterError
from placement.costs import calibration, transfers
from placement.costs.links import devices_here
from placement.costs.measure import measure
from placement.executor import Executor, Runner, Trainer
from placement.executor.alone import is_short, lacks_kernel
from placement.executor.backend import CudaBackend
from placement.planners.heft import Heft
from placement.problem import Problem
from placement.simulator import simulate
from tests import emulated_gpu
from tests.executor.on_gpu import BOTH, CPU, GPU, all_on, linears, two_layers


class Wide(nn.Module):
    """A table that is larger than the rest, and layers around it."""

    def __init__(self, rows, width):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.table = nn.Embedding.from_pretrained(torch.ones(rows, width))

    def forward(self, x, at):
        return self.last(torch.relu(self.first(x) + self.table(at)))


@pytest.fixture
def briefly(monkeypatch):
    """Measuring without what is the same for every model, and with fewer runs."""
    monkeypatch.setattr(measure_module, "measure_links", lambda cluster, repeats: ())
    monkeypatch.setattr(measure_module, "batch_seconds", lambda cluster, repeats: 0.0)
    monkeypatch.setattr(measure_module, "EFFORT", measure_module.MeasuringEffort(patience=1))
    few = calibration.CalibrationEffort(runs=(2, 3), run_s=0.0, cuts=(1, 3), rounds=1, steps=1)
    monkeypatch.setattr(calibration, "EFFORT", few)


def wide(rows=100, width=16):
    torch.manual_seed(0)
    module, inputs = Wide(rows, width).eval(), (torch.randn(8, width), torch.arange(8))
    return module, inputs, capture(module, inputs)


@pytest.mark.parametrize("rows", [1_000, 10_000])
def test_a_model_larger_than_the_gpu_is_measured_in_parts_and_can_be_planned(rows, briefly):
    """40 MB for two layers of 19 MB and a table of 9 MB, or of 88 MB: that has no room alone."""
    module, inputs, graph = wide(rows, 2200)
    table = [n for n, name in enumerate(graph.op_name) if "embedding" in name]
    with emulated_gpu.emulated(memory_bytes=40_000_000) as gpu:
        profile = measure(graph, BOTH, repeats=1)
        assert profile.provenance["in_parts"] == ["cuda:0"]
        lacking = np.flatnonzero(np.isinf(profile.compute_s[:, 1])).tolist()
        assert lacking == (table if rows == 10_000 else [])
        assert (profile.compute_s > 0).all()
        with pytest.raises(torch.OutOfMemoryError), Runner(graph, BOTH, all_on(graph, 1)) as runner:
            runner(*inputs)
        small = Cluster("small", (CPU, replace(GPU, memory_bytes=gpu.memory_bytes)))
        placement = Heft()(Problem(graph, small, profile)).placement
        with Runner(graph, small, placement) as runner:
            torch.testing.assert_close(runner(*inputs), module(*inputs))


def test_a_model_larger_than_the_gpu_that_stands_first_is_measured(briefly):
    *_, graph = wide(1_000, 2200)
    with emulated_gpu.emulated(memory_bytes=40_000_000):
        profile = measure(graph, Cluster("gpu first", (GPU, CPU)), repeats=1)
    assert profile.provenance["in_parts"] == ["cuda:0"]
    assert np.isfinite(profile.compute_s).all()


@pytest.mark.parametrize("cluster", [BOTH, Cluster("gpu first", (GPU, CPU))])
def test_a_gpu_that_can_run_nothing_of_a_model_is_infinite(cluster, briefly):
    graph = capture(nn.ReLU(), torch.ones(4))
    with emulated_gpu.emulated(missing={"aten.relu.default"}):
        profile = measure(graph, cluster, repeats=1)
    gpu = cluster.index("cuda:0")
    assert np.isinf(profile.compute_s[:, gpu]).all()
    assert (Heft()(Problem(graph, cluster, profile)).placement == 1 - gpu).all()


def test_a_convolution_without_room_for_its_workspace_is_measured_in_parts(briefly):
    """cuDNN does not say that memory is short."""
    module = nn.Sequential(*[nn.Conv2d(32, 32, 3) for _ in range(4)]).eval()
    graph = capture(module, torch.randn(1, 32, 9, 9))
    scratch = {"aten.conv2d.default": 10**6}
    with emulated_gpu.emulated(memory_bytes=1_100_000, scratch=scratch):
        profile = measure(graph, BOTH, repeats=1)
    assert profile.provenance["in_parts"] == ["cuda:0"]
    assert np.isfinite(profile.compute_s).all()


def test_an_operator_without_a_kernel_is_infinite_there_and_the_rest_is_measured(briefly):
    *_, graph = wide()
    relu = [n for n, name in enumerate(graph.op_name) if "relu" in name]
    with emulated_gpu.emulated(missing={"aten.relu.default"}):
        profile = measure(graph, BOTH, repeats=1)
        assert np.flatnonzero(np.isinf(profile.compute_s[:, 1])).tolist() == relu
        assert np.isfinite(profile.compute_s[:, 0]).all()
        assert (Heft()(Problem(graph, BOTH, profile)).placement[relu] == 0).all()


def test_a_training_step_with_an_operator_for_cpus_only_is_measured(briefly):
    module, x = two_layers()
    graph = capture(module, (x, None), mode="training", loss=mean_of_outputs)
    with emulated_gpu.emulated(missing={"aten.addmm.default", "aten.linear.default"}):
        profile = measure(graph, BOTH, repeats=1)
        lacking = np.isinf(profile.compute_s[:, 1])
        assert lacking.any() and not lacking.all()
        before = copy.deepcopy(module.state_dict())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        placement = Heft()(Problem(graph, BOTH, profile)).placement
        with Trainer(graph, BOTH, placement, optimizer) as trainer:
            trainer.step([(x, None)])
    assert not torch.equal(module.state_dict()["0.weight"], before["0.weight"])


@pytest.mark.parametrize(
    ("message", "lacks", "short"),
    [
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`", True, False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", True, True),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", True, False),
        ("CUDA error: out of memory", False, True),
        ("CUDA error: an illegal memory access was encountered", False, False),
    ],
)
def test_what_a_device_says_is_understood(message, lacks, short):
    assert lacks_kernel(RuntimeError(message), BOTH, 1) is lacks
    assert is_short(RuntimeError(message)) is short
    assert not lacks_kernel(RuntimeError(message), BOTH, 0) and not is_short(ValueError(message))


def test_an_error_that_no_kernel_explains_is_raised():
    *_, graph = wide()
    with emulated_gpu.emulated(), pytest.raises((IndexError, RuntimeError, TypeError)):
        steps = list(graph.program.steps)
        broken = replace(steps[0], target=torch.ops.aten.index_select.default)
        program = replace(graph.program, steps=(broken, *steps[1:]))
        measure(replace(graph, program=program), Cluster("cpu", (CPU,)), repeats=1)


def test_workspace_is_measured(briefly):
    *_, graph = wide()
    options = {"scratch": {"aten.relu.default": 12_345}, "library_bytes": 6_789}
    with emulated_gpu.emulated(**options):
        profile = measure(graph, BOTH, repeats=1)
        problem = Problem(graph, BOTH, profile, max_in_flight=1)
        torch._C._cuda_clearCublasWorkspaces()  # of the threads that have measured
        peak = Executor(problem).run(all_on(graph, 1)).peak_bytes[1]
    predicted = simulate(problem, np.array(all_on(graph, 1))).peak_bytes[1]
    assert predicted == peak
    relu = [n for n, name in enumerate(graph.op_name) if "relu" in name]
    assert profile.workspace_bytes[relu].tolist() == [12_345]
    assert profile.workspace_bytes.sum() == 12_345
    multiplies = [6_789 * ("linear" in name) for name in graph.op_name]
    assert sum(multiplies) and profile.library_bytes.T.tolist() == [[0] * graph.num_ops, multiplies]


def test_what_recording_costs_a_gpu_is_no_time_of_its_operators(briefly, monkeypatch):
    """A mark takes 10 ms here, and an operator next to nothing: half of it at most is left."""
    *_, graph = wide()
    real = CudaBackend.mark

    def mark(self):
        time.sleep(1e-2)
        return real(self)

    monkeypatch.setattr(CudaBackend, "mark", mark)
    monkeypatch.setattr(measure_module, "calibrated", lambda graph, cluster, profile: profile)
    with emulated_gpu.emulated():
        profile = measure(graph, BOTH, repeats=2)
    assert np.median(profile.compute_s[:, 1]) < 8e-3  # on a busy machine too
    assert profile.compute_s[:, 0].sum() < 1e-2 * graph.num_ops


def test_links_of_a_gpu_are_measured_with_long_tensors_too(monkeypatch):
    """Where a copy takes 20 ms from 1 MiB on, sizes up to 64 KiB do not show it."""
    short = transfers.TransferEffort(link_bytes=(2**12, 2**16), long_bytes=2**20)
    monkeypatch.setattr(transfers, "EFFORT", short)
    monkeypatch.setattr(transfers, "fit_link", fit := Mock(wraps=transfers.fit_link))
    with emulated_gpu.emulated():
        transfers.measure_links(BOTH, repeats=1)
    assert [call.args[2] for call in fit.call_args_list] == [(2**12, 2**16, 2**20)] * 2


def test_two_cores_are_two_cores_beside_a_gpu_too(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    with emulated_gpu.emulated():
        assert two_cores().device_names == ("cpu:0", "cpu:1")
        assert Cluster.detect().device_names == ("cpu:0", "cuda:0")


def test_a_fast_device_is_measured_beside_a_slow_one_that_works(monkeypatch):
    """Ten times as fast, it goes on until the other has done its runs, in the middle of them."""
    _, _, graph = linears()
    flat = graph.program.timing_inputs()
    counts = {}

    def runs(self, inputs):
        for _ in inputs:
            time.sleep(0.002 if self.device else 0.02)
            counts[self.device] = counts.get(self.device, 0) + 1
            self.next_batch += 1
            yield

    class Timed:
        next_batch, stream_tensors = 0, runs

        def __init__(self, device):
            self.graph, self.device = graph, device

        def close(self):
            pass

    asked = {}

    def last_seconds(runner, batches):
        asked[runner.device] = batches
        return np.zeros(graph.num_ops)

    monkeypatch.setattr(measure_module, "last_seconds", last_seconds)
    measure_module._run_together([Timed(0), Timed(1)], flat, 0.01)
    assert counts[0] == 3 and counts[1] > 10
    assert asked[0] == range(1, 2) and abs(np.mean(asked[1]) - counts[1] / 2) <= 1


def test_times_of_events_are_on_the_hosts_clock():
    """However late the first wait for an event wakes up: the shortest of some counts."""
    with emulated_gpu.emulated():
        backend = CudaBackend(GPU)
        late = iter([0.05] + [0.0] * 100)
        real = emulated_gpu.Event.synchronize

        def wakes_late(event):
            real(event)
            time.sleep(next(late))

        def work():
            with ExitStack() as stack:
                backend.enter(stack)
                before = time.perf_counter_ns()
                mark = backend.mark()
                real(mark)
                after = time.perf_counter_ns()
                times.append((before, backend.resolve_ns(mark), after))

        times = []
        backend.begin()
        emulated_gpu.Event.synchronize = wakes_late
        try:
            backend.run(work)
        finally:
            emulated_gpu.Event.synchronize = real
        ((before, at, after),) = times
        assert before - 2e6 < at < after + 2e6  # 2 ms, of 50


def test_clocks_that_drift_apart_are_compared_again(monkeypatch):
    """The device's goes a hundredth too fast: 7 ms in 0.7 s, of which most is taken away."""
    real = emulated_gpu.Event.elapsed_time
    monkeypatch.setattr(emulated_gpu.Event, "elapsed_time", lambda a, b: 1.01 * real(a, b))
    marks = []
    with emulated_gpu.emulated():
        backend = CudaBackend(GPU)

        def work():
            with ExitStack() as stack:
                backend.enter(stack)
                for _ in range(7):
                    time.sleep(0.1)
                    mark = backend.mark()
                    mark.synchronize()
                    marks.append((mark, time.perf_counter_ns()))

        backend.begin()
        backend.run(work)
        late = [backend.resolve_ns(mark) - at for mark, at in marks]
    assert abs(late[-1]) < 3.5e6


def test_each_process_of_a_host_has_a_gpu_of_its_own():
    with emulated_gpu.emulated(num_devices=2):
        assert [devices_here(r, 2).name for r in range(2)] == ["cuda:0", "cuda:1"]
        with pytest.raises(ClusterError, match=r"3 processes on a host with 2 GPUs.*--cluster"):
            devices_here(0, 3)
