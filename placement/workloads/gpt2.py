"""GPT-2 (Radford et al., 2019): a decoder whose input and output embeddings are tied."""

from __future__ import annotations

from typing import Any

from placement.workloads.hugging_face import from_config

# A key/value cache is for generation, token by token; here a prompt is read at once.
_CLASSES = "GPT2LMHeadModel", "GPT2Config"


def gpt2(batch: int = 1, length: int = 128) -> tuple[Any, Any]:
    """GPT-2 small: 12 layers of hidden size 768, 124 M parameters."""
    return from_config(*_CLASSES, batch, length, {"use_cache": False})


def gpt2_tiny(batch: int = 1, length: int = 16) -> tuple[Any, Any]:
    """Two layers of hidden size 32."""
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return from_config(*_CLASSES, batch, length, {"use_cache": False} | size | ends)
