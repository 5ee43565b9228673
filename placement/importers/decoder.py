"""A language model without its weights: what its tensors weigh, and what a token costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

CLASSES = ("embedding", "attention", "feed_forward", "experts", "head")


@dataclass(frozen=True)
class Part:
    """Tensors that are read together: an operator of the decoder.

    Attributes:
        name: of the operator, e.g. ``model.layers.0.attention``.
        kind: one of ``CLASSES``.
        module: path of the module that it belongs to: layers are whole.
        layer: number of the layer; -1 before them, -2 behind.
        weights: bytes by name; of a tied name there is one copy on a device.
        numel: weights that a token is multiplied with; of experts of all of them.
        used: share of them that a token uses: of experts, those that it is routed to.
        kv_bytes: of keys and values of one token.
        window: attention looks back at most so many tokens; None: at all.
        width: heads times their size: what a token compares with each one before it.
        num_experts: experts, all of one size; 0 of other parts.
        shares: of each expert, which share of the tokens reads it, as counted; their mean is
            ``used``. Empty: all alike.
        heads, kv_heads: of attention, and of its keys and values.
        experts: the numbers of those that are in it where others of the layer are in another part.
    """

    name: str
    kind: str
    module: str
    layer: int
    weights: Mapping[str, int]
    numel: float = 0.0
    used: float = 1.0
    kv_bytes: int = 0
    window: int | None = None
    width: float = 0.0
    num_experts: int = 0
    shares: tuple[float, ...] = ()
    heads: int = 0
    kv_heads: int = 0
    experts: tuple[int, ...] = ()

    @property
    def can_be_cut(self) -> bool:
        """Whether several devices may have a part of it each; a recurrent one is whole on each."""
        return bool(self.heads) or not self.kv_bytes

    @property
    def weight_bytes(self) -> int:
        """Of all its tensors."""
        return sum(self.weights.values())

    def read(self, rows: float) -> float:
        """Share of its bytes that ``rows`` tokens read, each routed as if by chance."""
        shares = np.array(self.shares or [self.used])
        return float(np.mean(1.0 - (1.0 - shares) ** rows))


@dataclass(frozen=True)
class Decoder:
    """A decoder: its parts in the order in which they run.

    Attributes:
        name: of the model.
        parts: embedding, layers and head.
        hidden: numbers that a token is between layers.
        widest: numbers that a token is within a layer at most: five times the hidden ones, and
            what attention or the feed-forward makes (llama.cpp reserves so much, or 15 % less).
        vocabulary: numbers that the head makes of a token.
        dtype: that it computes in, e.g. ``fp16``.
        format: of the file: ``config.json`` or ``gguf``.
    """

    name: str
    parts: tuple[Part, ...]
    hidden: int
    widest: int
    vocabulary: int
    dtype: str
    format: str

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return 1 + max(part.layer for part in self.parts)

    def class_bytes(self) -> dict[str, int]:
        """Bytes of each class of tensors, tied ones once."""
        held = dict.fromkeys(CLASSES, 0)
        seen: set[str] = set()
        for part in self.parts:
            held[part.kind] += sum(b for name, b in part.weights.items() if name not in seen)
            seen |= set(part.weights)
        return {kind: size for kind, size in held.items() if size}
