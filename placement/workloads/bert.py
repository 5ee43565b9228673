"""BERT (Devlin et al., NAACL 2019): the encoder with its pooler."""

from __future__ import annotations

from typing import Any

import torch

from placement.workloads import import_transformers, seeded


def bert_base(batch: int = 1, length: int = 128) -> tuple[Any, Any]:
    """BERT-base: 12 layers of hidden size 768, 109 M parameters."""
    return _bert(batch, length)


def bert_tiny_hidden128(batch: int = 1, length: int = 128) -> tuple[Any, Any]:
    """As many operators as BERT-base, each very small: 12 layers of hidden size 128."""
    return _bert(batch, length, hidden_size=128, num_attention_heads=2, intermediate_size=512)


def bert_tiny(batch: int = 1, length: int = 16) -> tuple[Any, Any]:
    """Two layers of hidden size 32."""
    width = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    return _bert(batch, length, **width, num_hidden_layers=2, vocab_size=100)


def _bert(batch: int, length: int, **config: Any) -> tuple[Any, Any]:
    transformers = import_transformers()
    settings = transformers.BertConfig(**config)
    with seeded():
        module = transformers.BertModel(settings).eval()
        return module, {"input_ids": torch.randint(settings.vocab_size, (batch, length))}
