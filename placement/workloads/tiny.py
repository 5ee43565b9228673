"""Modules of a few operators that run in a millisecond: for tests and first steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from placement.workloads import seeded


def tiny_mlp(batch: int = 2, width: int = 16, layers: int = 3) -> tuple[Any, Any]:
    """A chain: linear, relu, linear, relu, ..."""
    with seeded():
        blocks = [m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*blocks).eval(), (torch.randn(batch, width),)


def tiny_cnn(batch: int = 2, image: int = 8) -> tuple[Any, Any]:
    """Convolution, batch normalisation and in-place relu with a residual, then a classifier."""
    with seeded():
        return TinyCNN().eval(), (torch.randn(batch, 3, image, image),)


def tiny_branches(batch: int = 2, width: int = 16, branches: int = 3) -> tuple[Any, Any]:
    """Independent branches that meet in a sum: what can run side by side."""
    with seeded():
        return TinyBranches(width, branches).eval(), (torch.randn(batch, width),)


def tiny_views(batch: int = 2, width: int = 8) -> tuple[Any, Any]:
    """Operators of several outputs, views, in-place operators, tied weights, nested outputs."""
    with seeded():
        inputs = {"x": torch.randn(batch, width), "mask": torch.rand(batch, width) > 0.5}
        return TinyViews(width).eval(), inputs


class TinyCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.relu(self.stem(image))
        y = self.body(x)
        y += x
        scores: Tensor = self.head(self.relu(y).mean((2, 3)))
        return scores


class TinyBranches(nn.Module):
    def __init__(self, width: int, branches: int):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(branches))
        self.join = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        total = self.branches[0](x).tanh()
        for branch in list(self.branches)[1:]:
            total = total + branch(x).tanh()
        joined: Tensor = self.join(total)
        return joined


class TinyViews(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        y = F.relu(self.one(x), inplace=True)
        y += x * self.get_buffer("scale")
        left, right = y.chunk(2, 1)
        values, where = self.two(y).masked_fill(mask, -1.0).sort(stable=True, dim=1)
        return {"sum": left + right.flip(1), "pair": (values, [where, left]), "mask": mask}
