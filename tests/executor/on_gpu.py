"""What tests on emulated CUDA devices share."""

from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.executor import Runner
from placement.program import split_inputs

CPU, GPU = Device("cpu:0"), Device("cuda:0", "cuda")
BOTH = Cluster("both", (CPU, GPU))
THREE = Cluster("three", (CPU, GPU, Device("cpu:1")))


def all_on(graph, device):
    return np.full(graph.num_ops, device, np.int32)


def others_like(inputs, seed):
    """Inputs of the same form, with other values."""

    def other(x):
        return torch.randn_like(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    torch.manual_seed(seed)
    return pytree.tree_map(other, inputs)


def stream_all(graph, module, inputs, cluster, placements, count):
    """Streams of other inputs through each placement give what the module does."""
    items = [others_like(inputs, i) for i in range(count)]
    for placement in placements:
        with Runner(graph, cluster, placement) as runner:
            for item, results in zip(items, runner.stream(items), strict=True):
                args, kwargs = split_inputs(item)
                with torch.no_grad():
                    wanted = pytree.tree_leaves(module(*args, **kwargs))
                leaves = pytree.tree_leaves(results)
                torch.testing.assert_close(leaves, wanted, rtol=1e-4, atol=1e-5)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).train(), torch.randn(3, 4)


def linears(count=2):
    """Layers in a row, in evaluation mode, an input, and their graph."""
    torch.manual_seed(0)
    module, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)]).eval(), torch.randn(3, 8)
    return module, x, capture(module, x)


def on_gpu(graph):
    """The graph of a module whose parameters are on the GPU."""
    params = tuple(p.detach().to("cuda:0") for p in graph.program.params)
    return replace(graph, program=replace(graph.program, params=params))


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


def layers(count):
    """The module, so many inputs of it, and its graph."""
    module = Layers().eval()
    items = [(torch.randn(4, 8) + i, torch.randn(4, 8)) for i in range(count)]
    return module, items, capture(module, items[0])


def graphed(graph, cluster, placement, **options):
    runner = Runner(graph, cluster, placement, **options)
    runner.cuda_graphs = True
    return runner


class Draws(nn.Module):
    def forward(self, x):
        x = torch.tanh(x * 2) + 1
        return torch.relu(x + torch.rand_like(x)) * 2
