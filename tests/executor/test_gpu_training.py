"""Training on emulated CUDA devices, and its kernels."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from placement.capturing import capture
from placement.capturing.kernels import kernel_of
from placement.capturing.training import mean_of_outputs, plain_step
from placement.cli.train import difference as train_difference
from placement.cluster import Cluster, Device
from placement.executor import Trainer
from placement.executor.graphs import recorded
from placement.program import split_inputs
from placement.workloads import load
from tests import emulated_gpu
from tests.executor.on_gpu import BOTH, CPU, GPU, THREE, all_on, on_gpu, others_like, two_layers
from tests.machine import random_placement
from tests.modules import module_of

ASKED = {
    "its own event": (lambda x: torch.cuda.current_stream().record_event().query(), "last"),
    "work before it": (lambda x: torch.cuda.current_stream().wait_event(x.event), "uncaptured"),
    "the device": (lambda x: torch.cuda.synchronize(), "permitted"),
    "memory that others keep": (lambda x: torch.cuda.empty_cache(), "previous error"),
}


@pytest.mark.parametrize("what", ASKED)
def test_the_emulated_gpu_knows_what_who_captures_a_graph_may_not_ask_for(what):
    ask, message = ASKED[what]
    with emulated_gpu.emulated():
        x = torch.ones(3, device="cuda:0")
        x.event = torch.cuda.current_stream().record_event()
        with pytest.raises(RuntimeError, match=message):
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
        with Trainer(graph, THREE, random_placement(graph, 1), mine) as trainer:
            for _ in range(2):
                losses = trainer.step([(inputs, None)] * 3)
                expected = plain_step(plain, other, [(inputs, None)] * 3, mean_of_outputs)
                torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-3)


def test_what_is_written_between_steps_counts_on_a_gpu_too():
    module, inputs = load("tiny_mlp")
    module.train()
    plain = copy.deepcopy(module)
    mine, other = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (module, plain))
    graph = capture(module, (inputs, None), mode="training", loss=mean_of_outputs, optimizer=mine)
    with emulated_gpu.emulated(), Trainer(graph, BOTH, all_on(graph, 1), mine) as trainer:
        for _ in range(3):
            trainer.step([(inputs, None)])
            plain_step(plain, other, [(inputs, None)], mean_of_outputs)
            trainer.sync()
            for x in (*module.parameters(), *plain.parameters()):
                with torch.no_grad():
                    x.mul_(0.5)
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-3)


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
@pytest.mark.parametrize("bias", [None, True, False])
def test_what_only_a_cpu_has_a_kernel_for_is_trained_on_a_gpu_too(bias, apart):
    """Attention and recurrent layers; ``apart``: the backward is where the forward is not."""
    torch.manual_seed(0)
    module, inputs = plain_bert() if bias is None else (Speech(bias), torch.randn(3, 5, 6))
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
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention_kernels(mask, of_booleans):
    """What is called for attention and its backward, where PyTorch or the user made the mask."""
    graph = fx.Graph()
    number = torch.ops.aten.scalar_tensor.default
    nodes = [graph.call_function(number, (x,)) for x in (0.0, -torch.inf)]
    where = graph.call_function(torch.ops.aten.where.self, (graph.placeholder("m"), *nodes))
    made = where if of_booleans else graph.placeholder("x")
    options = {"attn_mask": None if mask is None else made}
    return [kernel_of(graph.call_function(x, (), options)) for x in (FORWARD, BACKWARD)]


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
        options = {"attn_mask": None if mask is None else mask.to(forward), "scale": scale}
        outputs = kernels[0](*read, 0.0, causal, **options)
        options["attn_mask"] = None if mask is None else mask.to(backward)
        g, *read = (x.to(backward) for x in (g, *read, *outputs))
        results = (*outputs, *kernels[1](g, *read, 0.0, causal, **options))
        steps = [[s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in results]
        return [x.cpu() for x in results], steps

    expected, strides = run(False, False)
    with emulated_gpu.emulated() as gpu:
        results, others = run(*places)
        suits = masked != "lowest" and dtype != torch.float64 and width * dtype.itemsize % 16 == 0
        assert gpu.num_efficient == (sum(places) if suits else 0)
    rough = 3e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(results, expected, rtol=rough, atol=rough)
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
    phases = random_placement(graph, 0, 4, 3)
    with emulated_gpu.emulated(2, copy_s=2e-4):
        with Trainer(graph, cluster, phases, mine) as trainer:
            for _ in range(3):
                losses = trainer.step(batches)
                expected = plain_step(plain, other, batches, mean_of_outputs)
                torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
            trainer.accumulate(batches[:2])
            gradients = trainer.gradients()
            trainer.zero_gradients()
            assert not any(g.any() for g in trainer.gradients().values())
        torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-3)
        other.zero_grad()
        for x, _ in batches[:2]:
            args, kwargs = split_inputs(x)
            (mean_of_outputs(plain(*args, **kwargs), None) / 2).backward()
        expected = {key: p.grad for key, p in plain.named_parameters()}
        torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)


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
    scaled = module_of(lambda m, x: x * m.scale, scale=nn.Parameter(torch.tensor(2.0)))
    module, x = scaled.train(), torch.ones(3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    graph = capture(module, (x, None), mode="training", loss=mean_of_outputs, optimizer=optimizer)
    module(x).sum().backward()
    optimizer.step()  # there is a state already, to be brought to the device
    optimizer.zero_grad()
    optimizer.zero_grad()
    with emulated_gpu.emulated(), Trainer(graph, BOTH, all_on(graph, 1), optimizer) as trainer:
        trainer.step([(x, None)])
        (own,) = trainer._optimizers.values()
        (state,) = own.state.values()
        assert state["exp_avg"].is_cuda and not state["step"].is_cuda


def test_state_of_another_shape_is_beside_its_parameter() -> None:
    """Adafactor keeps a row and a column for each matrix."""
    module, x = two_layers()
    optimizer = torch.optim.Adafactor(module.parameters())
    graph = capture(module, (x, None), mode="training", loss=mean_of_outputs, optimizer=optimizer)
    plain = copy.deepcopy(module)
    other = torch.optim.Adafactor(plain.parameters())
    with emulated_gpu.emulated():
        for device in (1, 0):  # the second goes on with what the first wrote back
            with Trainer(graph, BOTH, all_on(graph, device), optimizer) as trainer:
                trainer.step([(x, None)])
                plain_step(plain, other, [(x, None)], mean_of_outputs)
    for p, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, expected)
        assert {v.device for v in optimizer.state[p].values()} == {p.device}


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
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_a_training_step_is_compared_by_what_rounding_allows():
    """Adam makes whole steps of a gradient that is nothing but rounding."""
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).train()
    x = torch.randn(16, 8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    graph = capture(module, (x, None), mode="training", loss=mean_of_outputs, optimizer=optimizer)
    with emulated_gpu.emulated():
        with Trainer(graph, BOTH, random_placement(graph, 1, 2), optimizer) as trainer:
            assert train_difference(trainer, module, (x, None), mean_of_outputs, 2) == ""
        with Trainer(graph, BOTH, random_placement(graph, 1, 2), optimizer) as trainer:
            real = trainer.gradients
            trainer.gradients = lambda: {k: g * 1.1 for k, g in real().items()}
            wrong = train_difference(trainer, module, (x, None), mean_of_outputs, 2)
            assert "not close" in wrong and "gradients" in wrong
