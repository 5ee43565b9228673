"""ConvNeXt (Liu et al., "A ConvNet for the 2020s", CVPR 2022)."""

from __future__ import annotations

from typing import Any

import torch

from placement.workloads import import_transformers, seeded


def convnext(batch: int = 1, image: int = 224) -> tuple[Any, Any]:
    """ConvNeXt-T: depths 3, 3, 9, 3, 28.6 M parameters."""
    return _convnext(batch, image, num_labels=1000)


def convnext_tiny(batch: int = 1, image: int = 32) -> tuple[Any, Any]:
    """Four stages of one block each and at most 32 channels; not the published ConvNeXt-T."""
    return _convnext(batch, image, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1])


def _convnext(batch: int, image: int, **config: Any) -> tuple[Any, Any]:
    transformers = import_transformers()
    settings = transformers.ConvNextConfig(**config)
    with seeded():
        module = transformers.ConvNextForImageClassification(settings).eval()
        return module, {"pixel_values": torch.randn(batch, 3, image, image)}
