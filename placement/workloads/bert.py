"""BERT (Devlin et al., NAACL 2019): the encoder with its pooler."""

from __future__ import annotations

from typing import Any

from placement.workloads.hugging_face import from_config


def bert_base(batch: int = 1, length: int = 128) -> tuple[Any, Any]:
    """BERT-base: 12 layers of hidden size 768, 109 M parameters."""
    return from_config("BertModel", "BertConfig", batch, length, {})


def bert_tiny_hidden128(batch: int = 1, length: int = 128) -> tuple[Any, Any]:
    """As many operators as BERT-base, each very small: 12 layers of hidden size 128."""
    width = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
    return from_config("BertModel", "BertConfig", batch, length, width)


def bert_tiny(batch: int = 1, length: int = 16) -> tuple[Any, Any]:
    """Two layers of hidden size 32."""
    width = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    small = {"num_hidden_layers": 2, "vocab_size": 100}
    return from_config("BertModel", "BertConfig", batch, length, width | small)
