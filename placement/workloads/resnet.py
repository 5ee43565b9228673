"""ResNet (He et al., "Deep residual learning for image recognition", CVPR 2016)."""

from __future__ import annotations

from typing import Any

from placement.workloads.hugging_face import from_config

_CLASSES = "ResNetForImageClassification", "ResNetConfig"


def resnet50(batch: int = 1, image: int = 224) -> tuple[Any, Any]:
    """ResNet-50: 25.6 M parameters."""
    return from_config(*_CLASSES, batch, image, {"num_labels": 1000})


def resnet_tiny(batch: int = 1, image: int = 32) -> tuple[Any, Any]:
    """Two stages of one bottleneck block."""
    stages = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}
    return from_config(*_CLASSES, batch, image, stages | {"num_labels": 10})
