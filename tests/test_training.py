"""Training: gradients and updated parameters are those of plain PyTorch."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from placement.cluster import Cluster, Device
from placement.executor import Trainer
from placement.program import capture

pytestmark = pytest.mark.timeout(60)

CORES = sorted(os.sched_getaffinity(0))
CLUSTER = Cluster(
    "tests", tuple(Device(f"cpu:{i}", "cpu", (CORES[i % len(CORES)],)) for i in range(2))
)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


class Net(nn.Module):
    """Convolution, batch normalisation, in-place operators, views, tied and unused parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.head = nn.Linear(4, 5)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, x):
        y = F.relu(self.norm(self.conv(x)), inplace=True)
        y = y.mean((2, 3)) * self.frozen
        z = y + self.one(y).tanh()
        z[:, 0] *= 2
        return self.head(self.two(z.view(-1, 4)))


def data(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(2, 3, 6, 6, generator=g), torch.randint(5, (2,), generator=g))
        for _ in range(count)
    ]


def made(seed=0):
    torch.manual_seed(seed)
    return Net()


def plain_step(module, optimizer, microbatches, loss=F.cross_entropy):
    """One step of plain PyTorch: mean of the gradients over the micro-batches."""
    losses = []
    for x, y in microbatches:
        value = loss(module(x), y)
        (value / len(microbatches)).backward()
        losses.append(value.detach())
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses), gradients


def random_placement(graph, seed):
    groups = np.random.default_rng(seed).integers(0, 2, graph.num_groups)
    return groups[graph.group].astype(np.int32)


@pytest.mark.parametrize("colocate", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_plain_pytorch(name, colocate):
    module = made()
    plain = copy.deepcopy(module).train()
    optimizer, expected = (
        OPTIMIZERS[name](module.parameters()),
        OPTIMIZERS[name](plain.parameters()),
    )
    batches = data(12)
    graph = capture(
        module,
        batches[0],
        mode="training",
        loss=F.cross_entropy,
        optimizer=optimizer,
        colocate_backward=colocate,
    )
    with Trainer(graph, CLUSTER, random_placement(graph, 3), optimizer) as trainer:
        for i in range(3):
            mine = batches[4 * i : 4 * i + 4]
            losses = trainer.accumulate(mine)
            gradients = trainer.gradients()
            trainer.update()
            plain_losses, plain_gradients = plain_step(plain, expected, mine)
            torch.testing.assert_close(losses, plain_losses)
            assert gradients.keys() == plain_gradients.keys()
            for key, value in gradients.items():
                torch.testing.assert_close(value, plain_gradients[key])
    for (key, a), b in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=key)
    assert module.norm.num_batches_tracked == 12
