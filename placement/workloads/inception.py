"""An Inception-style branching network (Szegedy et al., "Going deeper with convolutions", 2015).

GoogLeNet's nine blocks of four branches, with batch normalisation and without the auxiliary
classifiers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from placement.workloads import seeded

# Channels of the branches: 1x1; 1x1, 3x3; 1x1, 5x5; pooling, 1x1. None halves the image.
_GOOGLENET: tuple[tuple[int, ...] | None, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)


def inception(batch: int = 1, image: int = 224) -> tuple[Any, Any]:
    """GoogLeNet: nine blocks, 7 M parameters."""
    with seeded():
        module = Inception(_GOOGLENET, stem=64, classes=1000).eval()
        return module, (torch.randn(batch, 3, image, image),)


def inception_tiny(batch: int = 1, image: int = 32) -> tuple[Any, Any]:
    """Two blocks of few channels."""
    with seeded():
        blocks = ((4, 4, 8, 2, 4, 4), None, (8, 4, 8, 2, 4, 4))
        return Inception(blocks, stem=8, classes=10).eval(), (torch.randn(batch, 3, image, image),)


class Inception(nn.Module):
    def __init__(self, blocks: tuple[tuple[int, ...] | None, ...], stem: int, classes: int):
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, stem, 7, stride=2),
            nn.MaxPool2d(3, 2, 1),
            _conv(stem, stem, 1),
            _conv(stem, 3 * stem, 3),
            nn.MaxPool2d(3, 2, 1),
        )
        channels = 3 * stem
        layers: list[nn.Module] = []
        for block in blocks:
            layers.append(nn.MaxPool2d(3, 2, 1) if block is None else Block(channels, *block))
            if block is not None:
                channels = block[0] + block[2] + block[4] + block[5]
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.blocks(self.stem(image))
        scores: Tensor = self.head(x.mean((2, 3)))
        return scores


class Block(nn.Module):
    def __init__(
        self, channels: int, one: int, to3: int, three: int, to5: int, five: int, pool: int
    ):
        super().__init__()
        self.one = _conv(channels, one, 1)
        self.three = nn.Sequential(_conv(channels, to3, 1), _conv(to3, three, 3))
        self.five = nn.Sequential(_conv(channels, to5, 1), _conv(to5, five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(channels, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def _conv(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    )
