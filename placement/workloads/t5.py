"""T5 (Raffel et al., JMLR 2020): encoder and decoder with relative positions."""

from __future__ import annotations

from typing import Any

from placement.workloads.hugging_face import from_config

_CLASSES = "T5ForConditionalGeneration", "T5Config"


def t5(batch: int = 1, length: int = 128) -> tuple[Any, Any]:
    """T5-small: 6 + 6 layers of hidden size 512, 61 M parameters."""
    return from_config(*_CLASSES, batch, length, {"use_cache": False})


def t5_tiny(batch: int = 1, length: int = 16) -> tuple[Any, Any]:
    """One layer of hidden size 32 on each side."""
    size = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    return from_config(*_CLASSES, batch, length, size | {"vocab_size": 99, "use_cache": False})
