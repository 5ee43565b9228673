"""Vision Transformer (Dosovitskiy et al., ICLR 2021)."""

from __future__ import annotations

from typing import Any

from placement.workloads.hugging_face import from_config

_CLASSES = "ViTForImageClassification", "ViTConfig"


def vit(batch: int = 1, image: int = 224) -> tuple[Any, Any]:
    """ViT-B/16: 12 layers of hidden size 768, 87 M parameters."""
    return from_config(*_CLASSES, batch, image, {"image_size": image, "num_labels": 1000})


def vit_tiny(batch: int = 1, image: int = 32) -> tuple[Any, Any]:
    """Two layers of hidden size 32, patches of 8 x 8."""
    width = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    patches = {"image_size": image, "patch_size": 8, "num_hidden_layers": 2}
    return from_config(*_CLASSES, batch, image, patches | width)
