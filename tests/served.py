"""Language models without weights, and clusters, for tests."""

import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from placement.importers.decoder import Decoder
from placement.importers.hf_config import read

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"vocab_size": 128256, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
MIXTRAL = LLAMA | {"model_type": "mixtral", "vocab_size": 32000, "sliding_window": None}
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2}
HOME = """
devices:
- {name: "cuda:0", like: nvidia/rtx-4090}
- {name: "cuda:1", like: nvidia/rtx-3060}
- {name: "cpu:0", like: amd/ryzen-7950x}
"""


def decoder(config: Mapping[str, Any] = LLAMA, **changes: Any) -> Decoder:
    """The decoder of a config with these changes, read once."""
    return _read(json.dumps({**config, **changes}))


@cache
def _read(text: str) -> Decoder:
    return read(json.loads(text), "c.json", "c")


def written(folder: Path, config: Mapping[str, Any], cluster: str = HOME) -> tuple[str, str]:
    """Paths of a config and of a cluster file."""
    model, home = folder / "model.json", folder / "home.yaml"
    model.write_text(json.dumps(config))
    home.write_text(cluster)
    return str(model), str(home)


def gguf(values: Mapping[str, Any], tensors: Sequence[tuple[str, tuple[int, ...], int]]) -> bytes:
    """The header of a GGUF file; a tensor is its name, dimensions and type."""

    def text(word: str) -> bytes:
        data = word.encode()
        return struct.pack("<Q", len(data)) + data

    def value(x: Any) -> bytes:
        if isinstance(x, bool):
            return struct.pack("<I?", 7, x)
        if isinstance(x, int):
            return struct.pack("<II", 4, x)
        if isinstance(x, str):
            return struct.pack("<I", 8) + text(x)
        if x and isinstance(x[0], str):
            return struct.pack("<IIQ", 9, 8, len(x)) + b"".join(map(text, x))
        return struct.pack(f"<IIQ{len(x)}I", 9, 4, len(x), *x)

    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
    parts += [text(key) + value(x) for key, x in values.items()]
    for name, dims, kind in tensors:
        parts.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, 0))
    return b"".join(parts)


def gguf_llama(layers=4, experts=0, tied=False, sizes=(256, 512, 1024, 8, 2), kinds=(12, 14)):
    """The header of a small llama, ``Q4_K`` but for ``Q6_K`` values and ``F32`` norms.

    ``sizes``: hidden, inner, vocabulary, heads, and heads of keys and values.
    """
    (hidden, inner, vocabulary, heads, kv_heads), (q4, q6), f32 = sizes, kinds, 0
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.embedding_length": hidden,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(50)],
    }
    if experts:
        values |= {"llama.expert_count": experts, "llama.expert_used_count": 2}
    tensors = [("token_embd.weight", (hidden, vocabulary), q4)]
    for i in range(layers):
        parts: list[tuple[str, tuple[int, ...], int]] = [
            ("attn_norm", (hidden,), f32),
            ("attn_q", (hidden, hidden), q4),
            ("attn_k", (hidden, hidden // heads * kv_heads), q4),
            ("attn_v", (hidden, hidden // heads * kv_heads), q6),
            ("attn_output", (hidden, hidden), q4),
            ("ffn_norm", (hidden,), f32),
        ]
        if experts:
            parts.append(("ffn_gate_inp", (hidden, experts), f32))
        for name in ("gate", "up", "down"):
            dims = (inner, hidden) if name == "down" else (hidden, inner)
            many = (*dims, experts) if experts else dims
            parts.append((f"ffn_{name}{'_exps' if experts else ''}", many, q4))
        tensors += [(f"blk.{i}.{name}.weight", dims, kind) for name, dims, kind in parts]
    tensors.append(("output_norm.weight", (hidden,), f32))
    if not tied:
        tensors.append(("output.weight", (hidden, vocabulary), q6))
    return gguf(values, tensors)
