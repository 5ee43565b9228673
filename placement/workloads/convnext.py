"""ConvNeXt (Liu et al., "A ConvNet for the 2020s", CVPR 2022)."""

from __future__ import annotations

from typing import Any

from placement.workloads.hugging_face import from_config

_CLASSES = "ConvNextForImageClassification", "ConvNextConfig"


def convnext(batch: int = 1, image: int = 224) -> tuple[Any, Any]:
    """ConvNeXt-T: depths 3, 3, 9, 3, 28.6 M parameters."""
    return from_config(*_CLASSES, batch, image, {"num_labels": 1000})


def convnext_tiny(batch: int = 1, image: int = 32) -> tuple[Any, Any]:
    """Four stages of one block each and at most 32 channels; not the published ConvNeXt-T."""
    stages = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
    return from_config(*_CLASSES, batch, image, stages)
