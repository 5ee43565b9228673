"""Compiled runs of a GPU, on emulated devices, where a stand-in for Inductor runs a graph as it is;
and their twin on a CPU, where Inductor itself compiles."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch._inductor.config

from placement import capture
from placement.cluster import Device
from placement.executor import kernels
from placement.executor.generated import generate
from placement.executor.graphs import pieces_of
from placement.executor.kernels import Kernels
from placement.executor.share import fused, runs_of, shares
from tests import emulated_gpu
from tests.executor.on_gpu import BOTH, all_on, graphed, layers

refuses = Mock(side_effect=RuntimeError("Triton is not here\nand more"))


def errs(graph, inputs):
    return lambda *values: [x * 1.1 for x in graph(*values)]


def turned(graph, inputs):
    return lambda *values: [
        x.mT.contiguous().mT if x.dim() > 1 else x.clone() for x in graph(*values)
    ]


@pytest.mark.parametrize("with_graphs", [True, False])
@pytest.mark.parametrize("cut", [True, False])
def test_runs_are_compiled_in_their_first_call(monkeypatch, cut, with_graphs):
    calls = []

    def as_it_is(graph, inputs):
        assert not any(x.is_inference() for x in inputs)
        return lambda *values: calls.append(len(values)) or graph(*values)

    monkeypatch.setattr(kernels, "inductor", as_it_is)
    module, items, graph = layers(9)
    place = all_on(graph, 1)
    if cut:
        place[graph.num_ops // 2 :][:2] = 0
    with emulated_gpu.emulated(kernel_s=1e-4) as gpu, graphed(graph, BOTH, place) as runner:
        runner.cuda_graphs, runner.compiled = with_graphs, True
        results = [runner(*items[0])]
        (num,) = {runner.num_compiled}
        assert num == len(calls) >= 1, runner.not_compiled  # each was called once, to be compared
        assert all("fewer than 3" in why for why in runner.not_compiled.values())
        results += runner.stream(items[1:])
        # Graphs are captured after two calls of a thread; else every item is a call.
        assert len(calls) <= 4 * num if with_graphs else len(calls) == num * len(items)
        with torch.no_grad():
            module.layers[0].weight.mul_(-1)  # parameters are read where they are
        again = runner(*items[0])
        assert gpu.num_races == 0
    torch.testing.assert_close(again, module(*items[0]), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        module.layers[0].weight.mul_(-1)
    for item, one in zip(items, results, strict=True):
        torch.testing.assert_close(one, module(*item), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("inductor", "why"),
    [
        (refuses, "RuntimeError: Triton is not here"),
        (errs, "it computes something else"),
        (turned, "what it makes is laid out in another way"),
    ],
)
def test_what_cannot_be_compiled_is_launched_by_name(monkeypatch, inductor, why):
    monkeypatch.setattr(kernels, "inductor", inductor)
    module, (item,), graph = layers(1)
    with emulated_gpu.emulated(), graphed(graph, BOTH, all_on(graph, 1)) as runner:
        runner.compiled = True
        results = [runner(*item) for _ in range(4)]  # the last are replayed
        assert runner.num_compiled == 0 and runner.num_graphs > 0
        assert any(x.startswith(why) for x in runner.not_compiled.values())
    for one in results:
        torch.testing.assert_close(one, module(*item), rtol=1e-5, atol=1e-5)


def test_inductor_compiles_the_same_for_a_cpu(compiler, monkeypatch):
    """The twin: one run, compiled with its operands in inference mode, and what it makes again."""
    module = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(4, 2), torch.nn.Softmax(-1))
    x = torch.randn(3, 4)
    graph = capture(module.eval(), x)
    program, cpu = graph.program, torch.device("cpu")
    (share,) = shares(graph, np.zeros(graph.num_ops, int), 1)
    (run,) = runs = pieces_of(program, runs_of(share, range(graph.num_ops)))
    with torch.inference_mode():
        params = {p: value.clone() for p, value in enumerate(program.params)}
    whole = generate(program, runs, share, params, {}, cpu)
    made = Kernels(program, Device("cpu:0"), cpu)
    call = made.of(runs, fused(share, runs), whole, params, {}).calls[run[0]]
    compile_, calls = kernels.inductor, []

    def counted(graph, inputs):
        with torch._inductor.config.patch(cpp_cache_precompile_headers=False):  # for one, too long
            compiled = compile_(graph, inputs)
        return lambda *values: calls.append(1) or compiled(*values)

    monkeypatch.setattr(kernels, "inductor", counted)
    for item in (x, x + 1, (x.T + 2).contiguous().T):  # the last is laid out in another way
        env = [None] * graph.num_tensors
        with torch.inference_mode():
            env[program.input_tensors[0]] = item.clone()
            for _ in call(env, lambda: True) or ():
                pass
        torch.testing.assert_close(env[program.output_leaves[0].tensor], module(item))
    assert (made.compiled, made.eager) == (1, {}) and made.seconds > 0
    assert len(calls) == 2  # to be compared, and for the second
