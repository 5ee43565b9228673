"""T5 (Raffel et al., JMLR 2020): encoder and decoder with relative positions."""

from __future__ import annotations

from typing import Any

import torch

from placement.workloads import import_transformers, seeded


def t5(batch: int = 1, length: int = 128) -> tuple[Any, Any]:
    """T5-small: 6 + 6 layers of hidden size 512, 61 M parameters."""
    return _t5(batch, length)


def t5_tiny(batch: int = 1, length: int = 16) -> tuple[Any, Any]:
    """One layer of hidden size 32 on each side."""
    return _t5(
        batch, length, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=99
    )


def _t5(batch: int, length: int, **config: Any) -> tuple[Any, Any]:
    transformers = import_transformers()
    settings = transformers.T5Config(use_cache=False, **config)
    with seeded():
        module = transformers.T5ForConditionalGeneration(settings).eval()
        source, target = (torch.randint(settings.vocab_size, (batch, length)) for _ in range(2))
        return module, {"input_ids": source, "decoder_input_ids": target}
