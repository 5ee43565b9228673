"""The executor on emulated CUDA devices: streams, memory, copies and errors as on real ones."""

from __future__ import annotations

import copy
import gc
import os
import queue
import threading
import time
import warnings
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils import _pytree as pytree

import placement.costs.measure as measure_module
from experiments.runs import two_cores
from placement import optimizing
from placement.capturing import capture
from placement.capturing.kernels import kernel_of
from placement.capturing.training import mean_of_outputs, plain_step
from placement.cli.train import difference as train_difference
from placement.cluster import Cluster, ClusterError, Device
from placement.costs.links import devices_here
from placement.costs.measure import cached_path, measure
from placement.executor import Executor, Runner, Trainer
from placement.executor import backend as backend_module
from placement.executor import runner as runner_module
from placement.executor import weights as weights_module
from placement.executor.alone import is_short, lacks_kernel
from placement.executor.backend import CudaBackend
from placement.executor.graphs import Replayed, pieces_of, recorded
from placement.executor.runner import RunnerError
from placement.executor.streamed import with_streaming
from placement.executor.weights import forget_others
from placement.plan import Measured, Spread, now
from placement.planners.heft import Heft
from placement.problem import Problem
from placement.profile import Profile
from placement.program import split_inputs
from placement.workloads import load
from tests import emulated_gpu
from tests.emulated_gpu import CudaTensor
from tests.machine import problem_of

CPU, GPU = Device("cpu:0"), Device("cuda:0", "cuda")
BOTH = Cluster("both", (CPU, GPU))
THREE = Cluster("three", (CPU, GPU, Device("cpu:1")))


def scattered(graph, cluster, seed):
    groups = np.random.default_rng(seed).integers(cluster.num_devices, size=graph.num_groups)
    return groups[graph.group]


def all_on(graph, device):
    return np.full(graph.num_ops, device, np.int32)


def others_like(inputs, seed):
    """Inputs of the same form, with other values."""
    torch.manual_seed(seed)
    return pytree.tree_map(
        lambda x: (
            torch.randn_like(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        ),
        inputs,
    )


def check_streams(names, cluster, seeds=2, count=6):
    """Placements at random of each workload compute what the plain module does."""
    for name in names:
        module, inputs = load(name)
        graph = capture(module, inputs)
        items = [others_like(inputs, i) for i in range(count)]
        expected = []
        for item in items:
            args, kwargs = split_inputs(item)
            with torch.no_grad():
                expected.append(pytree.tree_leaves(module(*args, **kwargs)))
        for seed in range(seeds):
            with Runner(graph, cluster, scattered(graph, cluster, seed)) as runner:
                for found, wanted in zip(runner.stream(items), expected, strict=True):
                    torch.testing.assert_close(
                        pytree.tree_leaves(found), wanted, rtol=1e-4, atol=1e-5
                    )


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
    with (
        emulated_gpu.emulated(copy_s=2e-3),
        pytest.raises(AssertionError, match="not close"),
    ):
        check_streams(["tiny_branches"], THREE, seeds=4)


# --- training ------------------------------------------------------------------------------------


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).train(), torch.randn(3, 4)


ASKED = {
    "an event of the capture": (
        lambda x: torch.cuda.current_stream().record_event().query(),
        "last",
    ),
    "work before it": (lambda x: torch.cuda.current_stream().wait_event(x.event), "uncaptured"),
    "the device": (lambda x: torch.cuda.synchronize(), "permitted"),
    "memory that others keep": (lambda x: torch.cuda.empty_cache(), "previous error"),
}


@pytest.mark.parametrize("what", ASKED)
def test_the_emulated_gpu_knows_what_who_captures_a_graph_may_not_ask_for(what):
    ask, said = ASKED[what]
    with emulated_gpu.emulated():
        x = torch.ones(3, device="cuda:0")
        x.event = torch.cuda.current_stream().record_event()
        with pytest.raises(RuntimeError, match=said):
            recorded(lambda: (x + 1, ask(x)), torch.cuda.graph_pool_handle(), x.device)


def test_the_emulated_gpu_spoils_what_later_graphs_of_a_pool_made_when_one_is_replayed():
    """They may have memory that was free when they were captured, and that it writes to."""
    with emulated_gpu.emulated():
        x, pool = torch.ones(3, device="cuda:0"), torch.cuda.graph_pool_handle()
        (first, a), (second, b) = (recorded(lambda: x + 1, pool, x.device) for _ in range(2))
        first.replay()
        second.replay()
        assert a.cpu().tolist() == b.cpu().tolist() == [2, 2, 2]
        first.replay()
        assert a.cpu().tolist() == [2, 2, 2] and b.cpu().isnan().all()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("name", ["tiny_mlp", "dlrm_tiny"])
def test_training_equals_plain_pytorch(name, kind):
    module, inputs = load(name)
    module.train()
    plain = copy.deepcopy(module)
    mine, other = kind(module.parameters(), lr=1e-2), kind(plain.parameters(), lr=1e-2)
    graph = capture(module, (inputs, None), mode="training", loss=mean_of_outputs, optimizer=mine)
    with emulated_gpu.emulated(copy_s=2e-4):
        with Trainer(graph, THREE, scattered(graph, THREE, 1), mine) as trainer:
            for _ in range(2):
                losses = trainer.step([(inputs, None)] * 3)
                expected = plain_step(plain, other, [(inputs, None)] * 3, mean_of_outputs)
                torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(module.state_dict()[key], value, rtol=1e-3, atol=1e-3)


class Speech(nn.Module):
    """Recurrent layers in both directions, then attention of positions to those before them."""

    def __init__(self, bias):
        super().__init__()
        self.both = nn.LSTM(6, 4, num_layers=2, bidirectional=True, batch_first=True, bias=bias)
        self.join = nn.Linear(8, 8)

    def forward(self, x):
        x, (last, _) = self.both(x)
        q = self.join(x).unflatten(-1, (2, 4)).transpose(1, 2)
        x = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return x.transpose(1, 2).flatten(2) + last.mean()


def plain_bert():
    module, inputs = load("bert_tiny")
    for part in module.modules():
        part.p = 0.0  # dropout draws others than plain PyTorch
    return module, inputs


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        plain_bert,
        lambda: (Speech(bias=True), torch.randn(3, 5, 6)),
        lambda: (Speech(bias=False), torch.randn(3, 5, 6)),
    ],
)
def test_what_only_a_cpu_has_a_kernel_for_is_trained_on_a_gpu_too(make, apart):
    """Attention and recurrent layers; ``apart``: the backward is where the forward is not."""
    torch.manual_seed(0)
    module, inputs = make()
    module.train()
    plain = copy.deepcopy(module)
    mine, other = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (module, plain))
    options = {"mode": "training", "loss": mean_of_outputs, "optimizer": mine}
    graph = capture(module, (inputs, None), colocate_backward=not apart, **options)
    places = [graph.is_backward, ~graph.is_backward] if apart else [True]
    with emulated_gpu.emulated() as gpu:
        for on_gpu in places:
            placement = np.broadcast_to(on_gpu, graph.num_ops).astype(np.int32)
            with Trainer(graph, BOTH, placement, mine) as trainer:
                trainer.step([(inputs, None)])
            plain_step(plain, other, [(inputs, None)], mean_of_outputs)
    assert gpu.num_efficient
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], value, rtol=1e-4, atol=1e-5)


FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention_kernels(mask, of_booleans):
    """What is called for attention and its backward, where PyTorch or the user made the mask."""
    graph = fx.Graph()
    number = torch.ops.aten.scalar_tensor.default
    nodes = [graph.call_function(number, (x,)) for x in (0.0, -torch.inf)]
    made = graph.call_function(torch.ops.aten.where.self, (graph.placeholder("m"), *nodes))
    given = {"attn_mask": None if mask is None else made if of_booleans else graph.placeholder("x")}
    return [kernel_of(graph.call_function(x, (), given)) for x in (FORWARD, BACKWARD)]


def laid_out(device, shape, dtype, how):
    """Random numbers: ``[B, H, L, E]`` as they are, heads side by side, or cut out of others."""
    b, h, n, e = shape
    base = torch.randn(b, h, n, e) if how == 0 else torch.randn(b, n, h, e + 4)
    x = base.to(dtype).to(device)
    return x if how == 0 else x.narrow(3, how - 1, e).transpose(1, 2)


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (3, 3, 40, 40))),
    width=st.sampled_from([6, 8, 8, 16]),
    dtype=st.sampled_from([*[torch.float32] * 4, torch.bfloat16, torch.float64]),
    masked=st.sampled_from(["", "causal", "booleans", "lowest"]),
    rows=st.integers(0, 3),
    hows=st.tuples(*[st.sampled_from([0, 0, 1, 2, 5])] * 4),
    scale=st.sampled_from([None, 0.3]),
    places=st.tuples(st.booleans(), st.booleans()),
)
def test_attention_and_its_backward_are_the_cpus_wherever_they_run(
    sizes, width, dtype, masked, rows, hows, scale, places
):
    b, h, n, m = sizes
    mask, causal = None, masked == "causal"
    if masked in ("booleans", "lowest"):
        hidden = torch.rand([(n, m), (b, 1, n, m), (b, h, n, m), (1, 1, 1, m)][rows]) < 0.5
        hidden[..., 0, :] = True  # the first position looks nowhere
        low = -torch.inf if masked == "booleans" else torch.finfo(dtype).min
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, low)
    kernels = attention_kernels(mask, masked == "booleans")

    def run(*on):
        forward, backward = (torch.device("cuda:0" if x else "cpu") for x in on)
        torch.manual_seed(rows)
        shapes = ((b, h, n, width), (b, h, m, width), (b, h, m, width), (b, h, n, width))
        *read, g = (laid_out(forward, x, dtype, how) for x, how in zip(shapes, hows, strict=True))
        given = {"attn_mask": None if mask is None else mask.to(forward), "scale": scale}
        made = kernels[0](*read, 0.0, causal, **given)
        given["attn_mask"] = None if mask is None else mask.to(backward)
        g, *read = (x.to(backward) for x in (g, *read, *made))
        found = (*made, *kernels[1](g, *read, 0.0, causal, **given))
        steps = [[s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in found]
        return [x.cpu() for x in found], steps

    expected, strides = run(False, False)
    with emulated_gpu.emulated() as gpu:
        found, others = run(*places)
        suits = masked != "lowest" and dtype != torch.float64 and width * dtype.itemsize % 16 == 0
        assert gpu.num_efficient == (sum(places) if suits else 0)
    rough = 3e-2 if dtype == torch.bfloat16 else 1e-4
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=rough, atol=rough)
    assert others == strides


@pytest.mark.parametrize(("name", "kind"), [("tiny_mlp", "AdamW"), ("dlrm_tiny", "SGD")])
def test_replicas_in_different_memory_add_up_their_gradients(name, kind):
    module, inputs = load(name)
    module.train()
    plain = copy.deepcopy(module)
    kind = getattr(torch.optim, kind)
    mine, other = kind(module.parameters(), lr=1e-2), kind(plain.parameters(), lr=1e-2)
    graph = capture(module, (inputs, None), mode="training", loss=mean_of_outputs, optimizer=mine)
    batches = [(others_like(inputs, i), None) for i in range(5)]
    cluster = Cluster("four", (CPU, GPU, Device("cpu:1"), Device("cuda:1", "cuda")))
    phases = np.stack([scattered(graph, cluster, seed) for seed in range(3)])
    with emulated_gpu.emulated(2, copy_s=2e-4):
        with Trainer(graph, cluster, phases, mine) as trainer:
            for _ in range(3):
                losses = trainer.step(batches)
                expected = plain_step(plain, other, batches, mean_of_outputs)
                torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
            trainer.accumulate(batches[:2])
            found = trainer.gradients()
            trainer.zero_gradients()
            assert not any(g.any() for g in trainer.gradients().values())
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(module.state_dict()[key], value, rtol=1e-3, atol=1e-3)
        other.zero_grad()
        for x, _ in batches[:2]:
            args, kwargs = split_inputs(x)
            (mean_of_outputs(plain(*args, **kwargs), None) / 2).backward()
        for key, value in plain.named_parameters():
            torch.testing.assert_close(found[key], value.grad, rtol=1e-3, atol=1e-4)


def on_gpu(graph):
    """The graph of a module whose parameters are on the GPU."""
    params = tuple(p.detach().to("cuda:0") for p in graph.program.params)
    return replace(graph, program=replace(graph.program, params=params))


@pytest.mark.parametrize("device", [0, 1])
def test_a_module_on_the_gpu_is_trained_wherever_its_operators_run(device):
    module, x = two_layers()
    graph = capture(module, (x, None), mode="training", loss=mean_of_outputs)
    plain = copy.deepcopy(module)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    with emulated_gpu.emulated():
        graph = on_gpu(graph)
        params = dict(zip(graph.program.param_names, graph.program.params, strict=True))
        optimizer = torch.optim.AdamW(params.values(), lr=0.1)
        with Trainer(graph, BOTH, all_on(graph, device), optimizer) as trainer:
            for _ in range(2):
                trainer.step([(x, None)])
                plain_step(plain, other, [(x, None)], mean_of_outputs)
        for name, expected in plain.named_parameters():
            p = params[name]
            torch.testing.assert_close(p.cpu(), expected.detach())
            assert optimizer.state[p]["exp_avg"].is_cuda
            assert not optimizer.state[p]["step"].is_cuda


def test_counters_of_an_optimizer_stay_where_they_are_for_a_parameter_without_dimensions_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.scale

    module, x = Scaled().train(), torch.ones(3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    graph = capture(module, (x, None), mode="training", loss=mean_of_outputs, optimizer=optimizer)
    module(x).sum().backward()
    optimizer.step()  # there is a state already, to be brought to the device
    optimizer.zero_grad()
    with emulated_gpu.emulated(), Trainer(graph, BOTH, all_on(graph, 1), optimizer) as trainer:
        trainer.step([(x, None)])
        (own,) = trainer._optimizers.values()
        (state,) = own.state.values()
        assert state["exp_avg"].is_cuda and not state["step"].is_cuda


def test_memory_that_is_full_while_parameters_are_loaded_is_said():
    module, x = two_layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    graph = capture(module, (x, None), mode="training", loss=mean_of_outputs, optimizer=optimizer)
    before = copy.deepcopy(module.state_dict())
    with (
        emulated_gpu.emulated(memory_bytes=100),
        pytest.raises(torch.OutOfMemoryError, match="out of memory"),
        Trainer(graph, BOTH, all_on(graph, 1), optimizer) as trainer,
    ):
        trainer.step([(x, None)])
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key])


# --- whose stream, whose memory ------------------------------------------------------------------


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


def test_results_are_in_ordinary_memory():
    module, x = two_layers()
    module.eval()
    with emulated_gpu.emulated(), Runner(graph := capture(module, x), BOTH, all_on(graph, 1)) as r:
        assert not r(x).is_pinned()
        torch.testing.assert_close(r(x), module(x))


def test_results_may_stay_on_the_device():
    module, inputs = load("tiny_branches")
    graph = capture(module, inputs)
    with (
        emulated_gpu.emulated(copy_s=1e-3) as gpu,
        Runner(graph, BOTH, all_on(graph, 1), outputs="device") as runner,
    ):
        (x,) = inputs
        found = [runner(x + i) for i in range(3)]
        assert all(y.is_cuda for y in found)
        assert not gpu.copies["back"]
        for i, y in enumerate(found):
            torch.testing.assert_close(y.cpu(), module(x + i))


def test_inputs_on_the_device_stay_there_and_are_waited_for():
    module, (x,) = load("tiny_branches")
    graph = capture(module, (x,))
    with emulated_gpu.emulated() as gpu:
        for placement in (all_on(graph, 1), scattered(graph, BOTH, 1)):
            with Runner(graph, BOTH, placement) as runner:
                runner(x)
                there = [x.to("cuda:0") for _ in range(3)]
                gpu.copies.clear()
                gpu.kernel_s = 5e-3  # what follows is not ready yet when it is given
                items = [y + i for i, y in enumerate(there)]
                del there
                for i, found in enumerate(runner.stream(items)):
                    torch.testing.assert_close(found, module(x + i))
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
            with Runner(graph, cluster, scattered(graph, cluster, 0)) as runner:
                list(runner.stream([inputs] * 2))
                gpu.copies.clear()
                list(runner.stream([inputs] * 5))
            assert gpu.copies["pageable"] == 0
            assert gpu.copies["back"] == 5  # the results
            assert gpu.copies["pinned"] <= 10  # the inputs


# --- what is copied, and what stays --------------------------------------------------------------


def test_what_goes_to_the_device_is_pinned_and_does_not_wait_for_it():
    module, inputs = load("tiny_views")
    graph = capture(module, inputs)
    with (
        emulated_gpu.emulated() as gpu,
        Runner(graph, THREE, scattered(graph, THREE, 0)) as runner,
    ):
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
    module, x = two_layers()
    with emulated_gpu.emulated():
        with Runner(graph := capture(module.eval(), x), BOTH, all_on(graph, 1)) as runner:
            runner(x)
        assert any(backend_module._IDLE.values())
        if (child := os.fork()) == 0:
            os._exit(len(backend_module._IDLE))
        assert os.waitpid(child, 0)[1] == 0


def test_threads_streams_and_parameters_stay_for_the_next_runner():
    module, x = two_layers()
    graph = capture(module.eval(), x)
    with emulated_gpu.emulated() as gpu:
        with Runner(graph, BOTH, all_on(graph, 1)) as runner:
            runner(x)
        before = gpu.num_streams, threading.active_count()
        gpu.copies.clear()
        for device in (1, 0, 1):
            with Runner(graph, BOTH, all_on(graph, device)) as runner:
                torch.testing.assert_close(runner(x), module(x))
        assert (gpu.num_streams, threading.active_count()) == before
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
    module, x = two_layers()
    inputs = x, torch.cat([x, x])
    graphs = [capture(module.eval(), y) for y in inputs]
    with emulated_gpu.emulated() as gpu, ExitStack() as stack:
        runners = [stack.enter_context(Runner(g, BOTH, all_on(g, 1))) for g in graphs]
        for written in (False, True):
            for runner, y in zip(runners, inputs, strict=True):
                torch.testing.assert_close(runner(y), module(y))
            first, second = (runner.loaded for runner in runners)
            assert all(first[key] is second[key] for key in first)
            assert gpu.copies["pageable"] == 4 + 2 * written  # each asks by itself
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


# --- memory and cores ----------------------------------------------------------------------------


@pytest.mark.parametrize("stays", [False, True])
def test_a_device_that_has_failed_does_not_end_the_process(stays):
    """Which frees what it was to write, and memory that several streams have used, later on."""

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, at):
            return self.table(at), at + 1

    module = Looks().eval()
    graph = capture(module, torch.arange(4))
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
                with Trainer(step, BOTH, scattered(step, BOTH, 1), optimizer) as trainer:
                    trainer.step([(inputs, None)] * 2)
                del trainer
            cluster = with_streaming(BOTH) if way == "streamed" else BOTH
            place = scattered(graph, cluster, 3) if way == "streamed" else all_on(graph, 1)
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
    module, x = two_layers()
    graph = capture(module.eval(), x)
    with emulated_gpu.emulated() as gpu:
        gpu.scratch = {"aten.linear.default": 10**6, "aten.addmm.default": 10**6}
        line = Executor(problem_of(graph, BOTH)).run(all_on(graph, 1), num_microbatches=2)
        assert line.peak_bytes[0] == 0
        assert 10**6 < line.peak_bytes[1] < 10**6 + 10**4
        mixed = Executor(problem_of(graph, BOTH)).run([0, 1], num_microbatches=2).peak_bytes
        assert 0 < mixed[0] < 10**4 and mixed[1] > 10**6


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


# --- commands ------------------------------------------------------------------------------------


def test_a_training_step_is_compared_by_what_rounding_allows():
    """Adam makes whole steps of a gradient that is nothing but rounding."""
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).train()
    x = torch.randn(16, 8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    graph = capture(module, (x, None), mode="training", loss=mean_of_outputs, optimizer=optimizer)
    with emulated_gpu.emulated():
        with Trainer(graph, BOTH, scattered(graph, BOTH, 1), optimizer) as trainer:
            assert train_difference(trainer, module, (x, None), mean_of_outputs, 2) == ""
        with Trainer(graph, BOTH, scattered(graph, BOTH, 1), optimizer) as trainer:
            real = trainer.gradients
            trainer.gradients = lambda: {k: g * 1.1 for k, g in real().items()}
            wrong = train_difference(trainer, module, (x, None), mean_of_outputs, 2)
            assert "not close" in wrong and "gradients" in wrong


# --- measuring -----------------------------------------------------------------------------------


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
    monkeypatch.setattr(measure_module, "_batch_seconds", lambda cluster, repeats: 0.0)
    monkeypatch.setattr(measure_module, "_CALIBRATION_RUNS", (2, 3))
    monkeypatch.setattr(measure_module, "_CALIBRATION_S", 0.0)
    monkeypatch.setattr(measure_module, "_CALIBRATION_CUTS", (1, 3))
    monkeypatch.setattr(measure_module, "_CALIBRATION_ROUNDS", 1)
    monkeypatch.setattr(measure_module, "_CALIBRATION_TRIES", 1)
    monkeypatch.setattr(measure_module, "_PATIENCE", 1)


def wide(rows=100, width=16):
    torch.manual_seed(0)
    return Wide(rows, width).eval(), (torch.randn(8, width), torch.arange(8))


@pytest.mark.parametrize("rows", [1_000, 10_000])
def test_a_model_larger_than_the_gpu_is_measured_in_parts_and_can_be_planned(rows, briefly):
    """40 MB for two layers of 19 MB and a table of 9 MB, or of 88 MB: that has no room alone."""
    module, inputs = wide(rows, 2200)
    graph = capture(module, inputs)
    table = [n for n, name in enumerate(graph.op_name) if "embedding" in name]
    with emulated_gpu.emulated(memory_bytes=40_000_000) as gpu:
        profile = measure(graph, BOTH, repeats=1)
        assert profile.provenance["in_parts"] == ["cuda:0"]
        lacking = np.flatnonzero(np.isinf(profile.compute_s[:, 1])).tolist()
        assert lacking == (table if rows == 10_000 else [])
        assert (profile.compute_s > 0).all()
        with (
            pytest.raises(torch.OutOfMemoryError),
            Runner(graph, BOTH, all_on(graph, 1)) as runner,
        ):
            runner(*inputs)
        small = Cluster("small", (CPU, replace(GPU, memory_bytes=gpu.memory_bytes)))
        placement = Heft()(Problem(graph, small, profile)).placement
        with Runner(graph, small, placement) as runner:
            torch.testing.assert_close(runner(*inputs), module(*inputs))


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
    module, inputs = wide()
    graph = capture(module, inputs)
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
    ("said", "lacks", "short"),
    [
        ("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`", True, False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", True, True),
        ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED", True, False),
        ("CUDA error: out of memory", False, True),
        ("CUDA error: an illegal memory access was encountered", False, False),
    ],
)
def test_what_a_device_says_is_understood(said, lacks, short):
    assert lacks_kernel(RuntimeError(said), BOTH, 1) is lacks
    assert is_short(RuntimeError(said)) is short
    assert not lacks_kernel(RuntimeError(said), BOTH, 0) and not is_short(ValueError(said))


def test_an_error_that_no_kernel_explains_is_raised():
    module, inputs = wide()
    graph = capture(module, inputs)
    with emulated_gpu.emulated(), pytest.raises((IndexError, RuntimeError, TypeError)):
        steps = list(graph.program.steps)
        broken = replace(steps[0], target=torch.ops.aten.index_select.default)
        program = replace(graph.program, steps=(broken, *steps[1:]))
        measure(replace(graph, program=program), Cluster("cpu", (CPU,)), repeats=1)


def test_workspace_is_measured(briefly):
    module, inputs = wide()
    graph = capture(module, inputs)
    with emulated_gpu.emulated(scratch={"aten.relu.default": 12_345}):
        profile = measure(graph, BOTH, repeats=1)
    relu = [n for n, name in enumerate(graph.op_name) if "relu" in name]
    assert profile.workspace_bytes[relu].tolist() == [12_345]
    assert profile.workspace_bytes.sum() == 12_345


def test_what_recording_costs_a_gpu_is_no_time_of_its_operators(briefly, monkeypatch):
    """A mark takes 10 ms here, and an operator next to nothing: half of it at most is left."""
    module, inputs = wide()
    graph = capture(module, inputs)
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
    monkeypatch.setattr(measure_module, "_LINK_BYTES", (2**12, 2**16))
    monkeypatch.setattr(measure_module, "_LONG_BYTES", 2**20)
    sizes = []
    real = measure_module.fit_link

    def fit(src, dst, some, seconds):
        sizes.append(some)
        return real(src, dst, some, seconds)

    monkeypatch.setattr(measure_module, "fit_link", fit)
    with emulated_gpu.emulated():
        measure_module.measure_links(BOTH, repeats=1)
    assert sizes == [(2**12, 2**16, 2**20)] * 2


def test_two_cores_are_two_cores_beside_a_gpu_too(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    with emulated_gpu.emulated():
        assert two_cores().device_names == ("cpu:0", "cpu:1")
        assert Cluster.detect().device_names == ("cpu:0", "cuda:0")


def test_a_fast_device_is_measured_beside_a_slow_one_that_works(monkeypatch):
    """Ten times as fast, it goes on until the other has done its runs, in the middle of them."""
    module, inputs = two_layers()
    graph = capture(module.eval(), inputs)
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
                told.append((before, backend.resolve_ns(mark), after))

        told = []
        backend.begin()
        emulated_gpu.Event.synchronize = wakes_late
        try:
            backend.run(work)
        finally:
            emulated_gpu.Event.synchronize = real
        ((before, found, after),) = told
        assert before - 2e6 < found < after + 2e6  # 2 ms, of 50


def test_clocks_that_drift_apart_are_compared_again(monkeypatch):
    """The device's goes a hundredth too fast: 7 ms in 0.7 s, of which most is taken away."""
    real = emulated_gpu.Event.elapsed_time
    monkeypatch.setattr(emulated_gpu.Event, "elapsed_time", lambda a, b: 1.01 * real(a, b))
    told = []
    with emulated_gpu.emulated():
        backend = CudaBackend(GPU)

        def work():
            with ExitStack() as stack:
                backend.enter(stack)
                for _ in range(7):
                    time.sleep(0.1)
                    mark = backend.mark()
                    mark.synchronize()
                    told.append((mark, time.perf_counter_ns()))

        backend.begin()
        backend.run(work)
        late = [backend.resolve_ns(mark) - at for mark, at in told]
    assert abs(late[-1]) < 3.5e6


def test_each_process_of_a_host_has_a_gpu_of_its_own():
    with emulated_gpu.emulated(num_devices=2):
        assert [devices_here(r, 2).name for r in range(2)] == ["cuda:0", "cuda:1"]
        with pytest.raises(ClusterError, match=r"3 processes on a host with 2 GPUs.*--cluster"):
            devices_here(0, 3)


# --- CUDA graphs ---------------------------------------------------------------------------------


class Layers(nn.Module):
    """Runs of several operators, with views, two outputs, and something in between on the CPU."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, y):
        x = torch.relu(self.layers[0](x)).view(2, 2, 8).transpose(0, 1) + 1
        seen = x[:, :1]
        y = torch.tanh(self.layers[1](y))
        x = torch.relu(self.layers[2](x + y.view(2, 2, 8))) * 2
        return self.layers[3](x) + seen, y.sum(), seen


def graphed(graph, cluster, placement, **options):
    runner = Runner(graph, cluster, placement, **options)
    runner.cuda_graphs = True
    return runner


@pytest.mark.parametrize("placed", ["all", "cut", "scattered", "twice"])
def test_runs_of_operators_are_replayed_as_cuda_graphs(placed):
    module = Layers().eval()
    items = [(torch.randn(4, 8) + i, torch.randn(4, 8)) for i in range(12)]
    graph = capture(module, items[0])
    cluster, place = BOTH, all_on(graph, 1)
    if placed == "cut":
        place[graph.num_ops // 2 :][:2] = 0
    elif placed == "scattered":
        cluster, place = THREE, scattered(graph, THREE, 3)
    elif placed == "twice":
        cluster = Cluster("two", tuple(Device(f"{h}/cuda:0", "cuda") for h in "ab"))
        place = scattered(graph, cluster, 2)
    with emulated_gpu.emulated(copy_s=1e-3, kernel_s=2e-4) as gpu:
        with graphed(graph, cluster, place) as runner:
            found = [runner(*item) for item in items[:2]]
            found += runner.stream(items[2:])
            assert all("fewer than 3" in why for why in runner.not_graphed.values())
        assert gpu.num_replays >= (8 if placed in ("all", "cut") else 0)
        assert not any(gpu.open_pools.values()) and gpu.num_races == 0
    for item, one in zip(items, found, strict=True):
        torch.testing.assert_close(one, module(*item), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("name", ["tiny_mlp", "resnet_tiny"])
def test_training_steps_are_replayed_as_cuda_graphs(name, everything):
    module, inputs = load(name)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    example, options = (inputs, None), {"loss": mean_of_outputs, "optimizer": optimizer}
    graph = capture(module, example, mode="training", **options)
    place = all_on(graph, 1) if everything else scattered(graph, BOTH, 0)
    with emulated_gpu.emulated(kernel_s=1e-4) as gpu:
        with Trainer(graph, BOTH, place, optimizer) as trainer:
            trainer.runner.cuda_graphs = True
            assert train_difference(trainer, module, example, mean_of_outputs, 4) == ""
            assert all("fewer than 3" in why for why in trainer.runner.not_graphed.values())
        # Of eight micro-batches the first two are launched as they are.
        assert gpu.num_replays == 6 if everything else gpu.num_replays >= 12
        assert gpu.num_races == 0


def test_a_training_step_that_drops_at_random_is_no_graph():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).train()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    example, options = (torch.randn(3, 4), None), {"loss": mean_of_outputs, "optimizer": optimizer}
    graph = capture(module, example, mode="training", **options)
    with emulated_gpu.emulated(), Trainer(graph, BOTH, all_on(graph, 1), optimizer) as trainer:
        trainer.runner.cuda_graphs = True
        losses = trainer.step([example] * 6)
        assert list(trainer.runner.not_graphed.values()) == ["the step draws random numbers"]
        assert len(set(losses.tolist())) == 6


def test_a_parameter_that_was_written_shows_in_a_replay():
    module = Layers().eval()
    x = torch.randn(4, 8), torch.randn(4, 8)
    graph = capture(module, x)
    with emulated_gpu.emulated(), graphed(graph, BOTH, all_on(graph, 1)) as runner:
        for _ in range(4):
            runner(*x)
        with torch.no_grad():
            module.layers[2].weight.mul_(2)
        torch.testing.assert_close(runner(*x), module(*x))


class Waits(nn.Module):
    """Asks the device for a value in the midst of what could be the second graph."""

    def forward(self, x):
        x = torch.sigmoid(x + 1) * 2 - 3
        return torch.relu(torch.cos(x) + 1) * 2 - 3


def test_what_cannot_be_captured_is_launched_as_before_and_named():
    module, x = Waits().eval(), torch.randn(3, 3)
    graph = capture(module, x)
    steps = list(graph.program.steps)
    names = [str(step.target) for step in steps]
    relu, cos = (names.index(f"aten.{name}.default") for name in ("relu", "cos"))

    class Asking(type(steps[relu].target)):
        def __init__(self, target):
            self.__dict__.update(target.__dict__)
            self.target = target

        def __call__(self, value):
            value.cpu()
            return self.target(value)

    steps[relu] = replace(steps[relu], target=Asking(steps[relu].target))
    graph = replace(graph, program=replace(graph.program, steps=tuple(steps)))
    place = all_on(graph, 1)
    place[cos] = 0
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, place) as runner:
        for i in range(6):
            torch.testing.assert_close(runner(x + i), module(x + i))
        why = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
        assert runner.not_graphed == {graph.op_name[cos + 1]: why}
        # PyTorch is as it was: what was captured before is replayed, and random numbers are drawn.
        assert gpu.num_replays >= 4 and not any(gpu.open_pools.values())
        torch.rand(3, device="cuda:0")


def test_a_capture_that_fails_costs_later_ones_nothing():
    with emulated_gpu.emulated() as gpu:
        device, stream = torch.device("cuda:0"), torch.cuda.Stream()
        x = torch.ones(3, device=device)
        with torch.cuda.stream(stream):
            pool = torch.cuda.graph_pool_handle()
            first, _ = recorded(lambda: x + 1, pool, device)
            with pytest.raises(RuntimeError, match="capturing"):
                recorded(lambda: (x + 1).cpu(), pool, device)
            first.replay()
            second, _ = recorded(lambda: x + 1, torch.cuda.graph_pool_handle(), device)
            second.replay()
        assert not any(gpu.open_pools.values()) and gpu.used_pools[pool] == 1


class Draws(nn.Module):
    def forward(self, x):
        x = torch.tanh(x * 2) + 1
        return torch.relu(x + torch.rand_like(x)) * 2


def test_what_draws_or_has_another_form_every_time_is_in_no_graph():
    graph = capture(Draws().eval(), torch.ones(3))
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, all_on(graph, 1)) as runner:
        found = [runner(torch.ones(3)) for _ in range(6)]
        assert "random" in "".join(runner.not_graphed.values()) and gpu.num_replays
    assert len({tuple(x.tolist()) for x in found}) == 6


def test_dropout_that_is_off_is_in_a_graph():
    """Else there would be hardly a model with one."""

    class Usual(nn.Module):
        def forward(self, x):
            y = nn.functional.dropout(x, 0.1, self.training)
            x = torch.relu(x + 1).view(2, 2, 8)
            return nn.functional.scaled_dot_product_attention(x, x, x) + y.view(2, 2, 8)

    module, x = Usual().eval(), torch.randn(4, 8)
    graph = capture(module, x)
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, all_on(graph, 1)) as runner:
        for i in range(6):
            torch.testing.assert_close(runner(x + i), module(x + i))
        assert gpu.num_replays >= 3 and not runner.not_graphed


def test_what_writes_is_in_the_graph_that_made_the_memory():
    program = capture(*load("tiny_views")).program
    ops = tuple(range(len(program.steps)))
    writers = [n for n, step in enumerate(program.steps) if step.target._schema.is_mutable]
    assert writers and pieces_of(program, [ops]) == [ops]
    n = writers[0]
    assert (n,) in pieces_of(program, [ops[:n], ops[n:]])


def test_pinned_memory_is_freed_while_a_graph_is_captured(monkeypatch):
    """An event that is recorded then on the stream that used it must not be a part of the graph."""
    module, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).eval(), torch.randn(3, 8)
    graph = capture(module, x)
    with emulated_gpu.emulated() as gpu, Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner.cuda_graphs = True
        list(runner.stream([x] * 2))
        pinned = [torch.ones(4, pin_memory=True)]
        compute = runner.workers[1].backend._gpu.compute
        ordinary = gpu.pools[0, 0]
        while len(ordinary) < 32 or ordinary[0] is not compute:  # it would be had once more
            torch.cuda.Stream()
        with torch.cuda.stream(compute):
            pinned[0].to("cuda:0", non_blocking=True)
        compute.synchronize()
        end = emulated_gpu.CUDAGraph.capture_end
        monkeypatch.setattr(
            emulated_gpu.CUDAGraph, "capture_end", lambda self: (pinned.clear(), end(self))
        )
        outputs = list(runner.stream([x] * 4))
        assert not pinned and gpu.num_replays and not runner.not_graphed
    with torch.no_grad():
        torch.testing.assert_close(outputs, [module(x)] * 4)


def test_graphs_of_two_runners_share_no_workspace_of_cublas():
    """Both are captured by this thread, on the same stream, and run beside each other."""
    module, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).eval(), torch.randn(3, 8)
    graph = capture(module, x)
    with emulated_gpu.emulated() as gpu, ExitStack() as stack:
        mine, other = (
            stack.enter_context(graphed(graph, BOTH, all_on(graph, 1))) for _ in range(2)
        )
        for runner in (mine, other):
            for _ in range(4):
                runner(x)
        assert gpu.num_replays == 2 and gpu.num_races == 0
        gpu.kernel_s = 5e-3
        results = mine.stream([x] * 4)
        found = [next(results), other(x), *results]
        assert gpu.num_replays == 7 and gpu.num_races == 0
    with torch.no_grad():
        torch.testing.assert_close(found, [module(x)] * 5)


def test_memory_that_another_runner_uses_while_a_graph_is_captured_is_not_free_too_early(
    monkeypatch,
):
    """PyTorch forgets streams that are said to use a tensor while any thread captures."""
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", 0)  # results are copied on another stream
    module, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).eval(), torch.randn(3, 8)
    graph, captures, goes_on = capture(module, x), threading.Event(), threading.Event()
    end = emulated_gpu.CUDAGraph.capture_end

    def ends(self):
        captures.set()
        goes_on.wait(1)
        end(self)

    with emulated_gpu.emulated(copy_s=5e-3) as gpu, ExitStack() as stack:
        first = stack.enter_context(graphed(graph, BOTH, all_on(graph, 1)))
        other = stack.enter_context(Runner(graph, BOTH, all_on(graph, 1)))
        list(first.stream([x] * 2))
        list(other.stream([x] * 2))
        monkeypatch.setattr(emulated_gpu.CUDAGraph, "capture_end", ends)
        capturing = threading.Thread(target=lambda: [list(first.stream([x] * 2)) for _ in range(2)])
        capturing.start()
        assert captures.wait(30)
        streaming = threading.Thread(target=lambda: list(other.stream([x] * 4)))
        streaming.start()
        streaming.join(0.3)
        goes_on.set()
        for thread in (capturing, streaming):
            thread.join()
        assert gpu.num_races == 0


def test_a_replay_does_not_write_over_long_results_that_are_still_copied(monkeypatch):
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", 0)
    module, items = Layers().eval(), [torch.randn(4, 8) + i for i in range(6)]
    graph = capture(module, (items[0], items[0]))
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, all_on(graph, 1)) as runner:
        there = [x.to("cuda:0") for x in items]
        list(runner.stream([(x, x) for x in there]))
        gpu.copy_s = 2e-2  # while inputs are there
        found = list(runner.stream([(x, x) for x in there]))
        assert gpu.num_replays >= 6 and gpu.copies["back"] >= 6
    with torch.no_grad():
        expected = [module(x, x) for x in items]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("graphs", ["are equal", "are slow", "are wrong", "fail", "are untried"])
def test_optimize_keeps_cuda_graphs_that_compute_the_same_and_are_faster(graphs, monkeypatch):
    module, x = Layers().eval(), (torch.randn(4, 8), torch.randn(4, 8))
    graph = capture(module, x)
    seconds = np.tile([1.0, 1e-3], (graph.num_ops, 1))
    problem = Problem(graph, BOTH, Profile(BOTH.device_names, seconds, 0 * seconds))
    monkeypatch.setattr(optimizing, "TRY_GRAPHS", graphs != "are untried")
    monkeypatch.setattr(optimizing, "measure", lambda ways, _: {n: took(n) for n in ways})
    launch, capture_begin = Replayed.launch, emulated_gpu.CUDAGraph.capture_begin

    def took(way):
        seconds = Spread.of([0.96 if graphs == "are slow" else 0.5] if "CUDA" in way else [1.0])
        return Measured(latency_s=seconds, period_s=seconds, n=1, when=now(), machine="")

    def wrong(self, env, nothing_arrived):
        rest = launch(self, env, nothing_arrived)
        if self._graph is not None:
            env[self._makes[-1]] = env[self._makes[-1]] + 1
        return rest

    def fails(self, *rest, **options):
        capture_begin(self, *rest, **options)
        raise RuntimeError("CUDA error: operation not permitted (here)")

    if graphs == "are wrong":
        monkeypatch.setattr(Replayed, "launch", wrong)
    elif graphs == "fail":
        monkeypatch.setattr(emulated_gpu.CUDAGraph, "capture_begin", fails)
    with emulated_gpu.emulated() as gpu, optimizing.fastest(problem, x, 0.5) as runner:
        assert (runner.kept, *optimizing.devices_of(runner.plan)) == ("plan", "cuda:0")
        assert runner.cuda_graphs == (graphs == "are equal")
        assert ("cuda:0 alone as CUDA graphs" in optimizing.verdict(runner)) == runner.cuda_graphs
        before = gpu.num_replays
        found = [runner(*x) for _ in range(6)]
        assert (gpu.num_replays > before) == runner.cuda_graphs
    with torch.no_grad():
        torch.testing.assert_close(found, [module(*x)] * 6)


def test_a_run_of_views_is_no_graph():
    """It would be empty, as PyTorch warns."""

    class Views(nn.Module):
        def forward(self, x):
            y, z = torch.relu(x), torch.sigmoid(x)
            return y.view(2, 2, 8).transpose(0, 1)[:1].unsqueeze(0), torch.relu(z).tanh().cos()

    module, x = Views().eval(), torch.randn(4, 8)
    graph = capture(module, x)
    place = all_on(graph, 1)
    place[:2] = 0
    with (
        emulated_gpu.emulated() as gpu,
        graphed(graph, BOTH, place) as runner,
        warnings.catch_warnings(action="error"),
    ):
        for i in range(6):
            torch.testing.assert_close(runner(x + i), module(x + i))
        why = "fewer than 3 operators that compute something"
        assert gpu.num_replays and runner.not_graphed == {graph.op_name[2]: why}


def test_an_error_in_a_graph_is_traced_to_its_operator():
    module = Layers().eval()
    x = torch.randn(4, 8), torch.randn(4, 8)
    graph = capture(module, x)
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, all_on(graph, 1)) as runner:
        gpu.missing = {"aten.tanh.default"}
        with pytest.raises(NotImplementedError) as raised:
            runner(*x)
        assert "tanh" in raised.value.__notes__[-1]


def test_memory_that_is_still_written_when_an_operator_fails_is_not_given_away():
    module, x = two_layers()
    graph = capture(module, (x, None), mode="training", loss=mean_of_outputs)

    def fails(*_, **__):
        raise ArithmeticError("in the last operator")

    *steps, last = graph.program.steps
    steps.append(replace(last, target=fails))
    graph = replace(graph, program=replace(graph.program, steps=tuple(steps)))
    with emulated_gpu.emulated(kernel_s=2e-2) as gpu:
        with (
            pytest.raises(ArithmeticError) as raised,
            Runner(graph, BOTH, all_on(graph, 1), max_in_flight=1) as runner,
        ):
            list(runner.stream_tensors([graph.program.timing_inputs()]))
        del raised
        gc.collect()
    assert gpu.num_races == 0


# --- a call of one GPU ---------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch):
    """By whom messages are sent between threads of the executor."""
    senders = []

    class Counted(queue.SimpleQueue):
        def put(self, *args):
            senders.append(threading.current_thread().name)
            super().put(*args)

    for module in (backend_module, runner_module):
        monkeypatch.setattr(module, "queue", SimpleNamespace(SimpleQueue=Counted))
    return senders


@pytest.mark.parametrize("small", [0, 2**16])
@pytest.mark.parametrize("graphs", [False, True])
def test_what_one_gpu_runs_is_launched_by_the_calling_thread(graphs, small, sent, monkeypatch):
    """Other threads only copy what a stream has that is long."""
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", small)
    module = Layers().eval()
    items = [(torch.randn(4, 8) + i, torch.randn(4, 8)) for i in range(6)]
    graph = capture(module, items[0])
    threads = set()
    launch = emulated_gpu._launch
    monkeypatch.setattr(
        emulated_gpu, "_launch", lambda *a: (threads.add(threading.get_ident()), launch(*a))[1]
    )
    with emulated_gpu.emulated(copy_s=1e-3, kernel_s=1e-4) as gpu:
        with Runner(graph, BOTH, all_on(graph, 1)) as runner:
            runner.cuda_graphs = graphs
            runner(*items[0])
            sent.clear()
            threads.clear()
            for item in items:
                found = runner(*item)
                torch.testing.assert_close(found, module(*item), rtol=1e-5, atol=1e-5)
            me = threading.current_thread()
            assert threads == {me.ident} and {*sent} == {me.name}
            assert not any(x.is_inference() or x.is_pinned() for x in found)
            taken = []
            stream = runner.stream_tensors(taken.append(x) or x for x in items)
            for n, (item, found) in enumerate(zip(items, stream, strict=True)):
                assert len(taken) == min(n + runner.max_in_flight, len(items))
                torch.testing.assert_close(found, module(*item), rtol=1e-5, atol=1e-5)
            assert (threads == {me.ident} and {*sent} == {me.name}) == bool(small)
            torch.testing.assert_close(runner(*items[0]), module(*items[0]), rtol=1e-5, atol=1e-5)
        assert bool(gpu.num_replays) == graphs and gpu.num_races == 0


@pytest.fixture
def order(monkeypatch):
    """What a call does: kernels and graphs to launch, and to ask what parameters were written."""
    order = []

    def note(where, name, what):
        does = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a: (order.append(what), does(*a))[1])

    note(emulated_gpu, "_launch", "work")
    note(emulated_gpu.CUDAGraph, "replay", "work")
    note(weights_module.Copies, "refresh", "ask")
    return order


@pytest.mark.parametrize("graphs", [False, True])
def test_whether_parameters_were_written_is_asked_while_the_gpu_computes(graphs, order):
    module, x = Layers().eval(), (torch.randn(4, 8), torch.randn(4, 8))
    graph, weight = capture(module, x), module.layers[2].weight
    with emulated_gpu.emulated() as gpu, Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner.cuda_graphs = graphs

        def steps():
            order.clear()
            torch.testing.assert_close(runner(*x), module(*x), rtol=1e-5, atol=1e-5)
            assert order.count("ask") == 1 and order.index("ask") >= 3
            return len(order)

        with torch.inference_mode():  # so are the copies made
            for _ in range(4):
                runner(*x)
        once = steps()
        with torch.no_grad():
            weight.mul_(2)
        assert steps() > once + 3
        assert steps() == once
        weight.data = weight.data + 1
        assert steps() > once + 3
    assert gpu.num_races == 0


def test_a_call_in_which_the_device_fails_does_not_end_the_process(monkeypatch):
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", 0)
    graph = capture(nn.Embedding(10, 4).eval(), torch.arange(4))
    with emulated_gpu.emulated(kernel_s=1e-2) as gpu, Runner(graph, BOTH, all_on(graph, 1)) as run:
        run(torch.arange(4))
        with pytest.raises(RuntimeError, match="CUDA error"):
            run(torch.tensor([1, 2, 3, 99]))
        gc.collect()
        assert gpu.num_aborts == 0


@pytest.mark.parametrize("written", [False, True])
def test_what_fails_with_parameters_as_they_were_is_launched_with_those_that_are(written):
    module, x = two_layers()
    graph, fails = capture(module.eval(), x), []
    *steps, last = graph.program.steps

    def once(*args):
        if fails:
            raise ArithmeticError(fails.pop())
        return last.target(*args)

    steps.append(replace(last, target=once))
    graph = replace(graph, program=replace(graph.program, steps=tuple(steps)))
    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner(x)
        fails.append("now")
        with torch.no_grad():
            for weight in [module[0].weight] * written:
                weight.mul_(2)
        with nullcontext() if written else pytest.raises(ArithmeticError, match="now"):
            torch.testing.assert_close(runner(x), module(x))


def test_what_draws_random_numbers_asks_first_and_is_launched_once(order):
    module, x = nn.Sequential(nn.Linear(4, 4), Draws()).eval(), torch.randn(3, 4)
    graph = capture(module, x)
    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner(x)
        lengths = []
        for _ in range(2):
            order.clear()
            runner(x)
            lengths.append(len(order))
            assert order.index("ask") < 2
            with torch.no_grad():
                module[0].weight.mul_(2)
        assert lengths[1] == lengths[0] + 1  # the copy that is made again


@pytest.mark.parametrize("small", [0, 2**16])
@pytest.mark.parametrize("stays", ["host", "device"])
def test_results_of_a_call_are_the_callers_and_so_is_its_stream(stays, small, monkeypatch):
    """Of a graph, which writes over what it has made; on the GPU that is not the current one."""
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", small)
    module = Layers().eval()
    items = [(torch.randn(4, 8) + i, torch.randn(4, 8)) for i in range(6)]
    graph = capture(module, items[0])
    with emulated_gpu.emulated(2, kernel_s=1e-4) as gpu:
        with graphed(graph, BOTH, all_on(graph, 1), outputs=stays) as runner:
            for item in items[:4]:
                runner(*item)
            torch.cuda.set_device(1)
            mine = torch.cuda.Stream(0)
            torch.cuda.set_stream(mine)
            torch.cuda.set_device(1)
            gpu.copies.clear()
            found = [runner(*item) for item in items]
            assert torch.cuda.current_device() == 1 and torch.cuda.current_stream(0) is mine
            torch.cuda.set_device(0)
            assert not gpu.copies["pageable"]
            for item, one in zip(items, found, strict=True):
                assert not any(x.is_inference() or x.is_pinned() for x in one if not x.is_cuda)
                here = [x.cpu() for x in one]
                torch.testing.assert_close(here, [*module(*item)], rtol=1e-5, atol=1e-5)
        assert gpu.num_races == 0 and gpu.num_replays > 6


def test_calls_and_streams_take_turns_in_the_phases_of_a_placement():
    module, inputs = load("tiny_branches")
    graph = capture(module, inputs)
    phases = np.stack([all_on(graph, 1)] * 3)
    items = [others_like(inputs, i) for i in range(9)]
    with emulated_gpu.emulated(), Runner(graph, BOTH, phases) as runner:
        found = [runner(*items[0]), *runner.stream(items[1:5]), runner(*items[5])]
        found += [*runner.stream(items[6:8]), runner(*items[8])]
        assert runner.next_batch == 9
    for item, one in zip(items, found, strict=True):
        torch.testing.assert_close(one, module(*item))


def test_a_loaders_error_comes_after_the_results_before_it():
    module, inputs = load("tiny_branches")
    graph, found = capture(module, inputs), []

    def items():
        yield from [inputs] * 3
        raise ArithmeticError("no more")

    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as runner:
        with pytest.raises(ArithmeticError, match="no more") as raised:
            found.extend(runner.stream(items()))
        assert raised.value.__notes__ == ["raised for micro-batch 3 of the stream"]
        torch.testing.assert_close([*found, runner(*inputs)], [module(*inputs)] * 4)


def test_an_error_of_a_call_names_its_operator_and_the_next_call_works():
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 4)
    graph = capture(module, x)
    with emulated_gpu.emulated() as gpu, Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner(x)
        gpu.missing = {str(graph.program.steps[1].target)}
        gc.disable()
        try:
            before = gpu.allocated[0]
            with pytest.raises(NotImplementedError) as raised:
                runner(x)
            name = graph.op_name[1]
            assert raised.value.__notes__ == [
                f"raised on device 'cuda:0' in operator {name!r} (module '1')"
            ]
            del raised
            assert gpu.allocated[0] == before  # at once, as there is no cycle
        finally:
            gc.enable()
        gpu.missing = set()
        torch.testing.assert_close(runner(x), module(x))


def test_a_call_is_interrupted_like_any_other(monkeypatch):
    module, x = two_layers()
    graph = capture(module.eval(), x)
    with emulated_gpu.emulated() as gpu, Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner(x)
        launch = emulated_gpu._launch

        def interrupted(func, *rest):
            if func is graph.program.steps[-1].target:
                raise KeyboardInterrupt
            return launch(func, *rest)

        monkeypatch.setattr(emulated_gpu, "_launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner(x)
        monkeypatch.undo()
        torch.testing.assert_close(runner(x), module(x))
    assert gpu.num_races == 0


def test_a_thread_that_calls_once_leaves_launching_to_the_one_that_has_planned(monkeypatch):
    module, x = two_layers()
    graph = capture(module.eval(), x)
    here = set()
    launch = emulated_gpu._launch

    def noted(func, *rest):
        if func is graph.program.steps[0].target:
            here.add(threading.current_thread())
        return launch(func, *rest)

    monkeypatch.setattr(emulated_gpu, "_launch", noted)
    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as runner:
        for _ in range(3):
            caller = threading.Thread(target=runner, args=(x,))
            caller.start()
            caller.join()
            assert caller not in here
        for _ in range(2):
            torch.testing.assert_close(runner(x), module(x))
        assert threading.current_thread() in here


def test_closing_waits_for_a_call_of_another_thread_which_then_says_so():
    module, x = two_layers()
    graph = capture(module.eval(), x)
    with emulated_gpu.emulated() as gpu:
        runner = Runner(graph, BOTH, all_on(graph, 1))
        runner(x)
        gpu.kernel_s, said, gpu.peak[0] = 0.1, [], 0

        def call():
            try:
                runner(x)
            except RunnerError as error:
                said.append(str(error))

        caller = threading.Thread(target=call)
        caller.start()
        while not gpu.peak[0]:
            time.sleep(1e-3)  # until it is in the midst of it
        runner.close()
        caller.join()
    assert said == ["the runner was closed while it was in use; bind the plan again"]
    assert gpu.num_races == 0


def test_a_thread_captures_no_graph_before_its_libraries_are_ready():
    """Two calls by one thread and the next by another: cuBLAS knows only the first."""
    module = Layers().eval()
    x = torch.randn(4, 8), torch.randn(4, 8)
    graph = capture(module, x)
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, all_on(graph, 1)) as runner:
        list(runner.stream([x] * 2))
        for _ in range(4):
            torch.testing.assert_close(runner(*x), module(*x), rtol=1e-5, atol=1e-5)
        assert all("fewer than 3" in why for why in runner.not_graphed.values())
        assert gpu.num_replays >= 2
        for found in runner.stream([x] * 3):  # replays what the other thread has captured
            torch.testing.assert_close(found, module(*x), rtol=1e-5, atol=1e-5)
        assert gpu.num_replays >= 5
