"""GPT-2 (Radford et al., 2019): a decoder whose input and output embeddings are tied."""

from __future__ import annotations

from typing import Any

import torch

from placement.workloads import import_transformers, seeded


def gpt2(batch: int = 1, length: int = 128) -> tuple[Any, Any]:
    """GPT-2 small: 12 layers of hidden size 768, 124 M parameters."""
    return _gpt2(batch, length)


def gpt2_tiny(batch: int = 1, length: int = 16) -> tuple[Any, Any]:
    """Two layers of hidden size 32."""
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100}
    return _gpt2(batch, length, **size, bos_token_id=0, eos_token_id=0)


def _gpt2(batch: int, length: int, **config: Any) -> tuple[Any, Any]:
    transformers = import_transformers()
    # A key/value cache is for generation, token by token; here a prompt is read at once.
    settings = transformers.GPT2Config(use_cache=False, **config)
    with seeded():
        module = transformers.GPT2LMHeadModel(settings).eval()
        return module, {"input_ids": torch.randint(settings.vocab_size, (batch, length))}
