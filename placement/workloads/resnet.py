"""ResNet (He et al., "Deep residual learning for image recognition", CVPR 2016)."""

from __future__ import annotations

from typing import Any

import torch

from placement.workloads import import_transformers, seeded


def resnet50(batch: int = 1, image: int = 224) -> tuple[Any, Any]:
    """ResNet-50: 25.6 M parameters."""
    return _resnet(batch, image)


def resnet_tiny(batch: int = 1, image: int = 32) -> tuple[Any, Any]:
    """Two stages of one bottleneck block."""
    return _resnet(
        batch, image, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10
    )


def _resnet(batch: int, image: int, **config: Any) -> tuple[Any, Any]:
    transformers = import_transformers()
    config.setdefault("num_labels", 1000)
    with seeded():
        module = transformers.ResNetForImageClassification(transformers.ResNetConfig(**config))
        return module.eval(), {"pixel_values": torch.randn(batch, 3, image, image)}
