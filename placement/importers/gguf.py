"""The header of a GGUF file (llama.cpp's) as a decoder: every tensor with its quantised bytes.

Only the header is read: a file whose tensors are cut off is as good. The format is that of
``gguf-py`` (ggml-org/llama.cpp), versions 2 and 3.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

from placement.importers._read import FormatError
from placement.importers.decoder import Decoder, Part
from placement.tools.limits import MOST

MAGIC = b"GGUF"
# By type of a value: how ``struct`` reads it.
_FORMATS = {**dict(enumerate("BbHhIif?")), **dict(enumerate("Qqd", start=10))}
_Type = IntEnum("_Type", {"STRING": 8, "ARRAY": 9})  # of a value that is not one number
# Elements of a block and its bytes, by type of a tensor (GGML_QUANT_SIZES).
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 40), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17),
    40: (64, 36), 41: (128, 18),
}  # fmt: skip
# Architectures of which every so manieth layer looks back without end, the others over a window;
# of others llama.cpp knows none, whatever the header says (as of Phi 3).
_GLOBAL_EVERY = {
    **dict.fromkeys(("cohere2", "llama4", "olmo2", "exaone4", "exaone-moe", "afmoe"), 4),
    **{"gemma2": 2, "gpt-oss": 2, "gemma3n": 5, "gemma3": 6},
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of the header: its dimensions, the one that is contiguous first, and bytes."""

    name: str
    dims: tuple[int, ...]
    size: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.dims)


@dataclass
class Header:
    """What a file says before its tensors: values by key (long lists left out), and tensors."""

    values: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)


def looks_like(content: bytes) -> bool:
    """Whether the bytes begin as a GGUF file does."""
    return content[:4] == MAGIC


def read(path: str | Path) -> Decoder:
    """The decoder in a file, and in the other files where it is split.

    Raises:
        FormatError: cut off, of another version, or not of a decoder with attention.
    """
    path = Path(path)
    header = read_header(path)
    count = header.values.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        for other in _siblings(path, count):
            header.tensors += read_header(other).tensors
    return _Model(header, str(path)).decoder(path.stem)


def read_header(path: Path) -> Header:
    """The header of one file.

    Raises:
        FormatError: see ``read``.
    """
    try:
        with path.open("rb") as file:
            return _header(_Bytes(file, str(path)))
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from error


class _Bytes:
    """Little-endian values, one after another."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.file, self.path = file, path

    def take(self, size: int) -> bytes:
        at = self.file.tell()
        data = self.file.read(size)
        if len(data) < size:
            raise FormatError(
                f"{self.path}: the GGUF file is cut off within its header: {size} bytes are needed "
                f"at byte {at}, {len(data)} are there"
            )
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def count(self, what: str, most: int) -> int:
        total: int = self.number("Q")
        if total > most:
            raise FormatError(f"{self.path}: damaged GGUF header: {total} {what}, at most {most}")
        return total

    def text(self) -> str:
        return self.take(self.count("bytes of a text", MOST.text_bytes)).decode("utf-8", "replace")

    def value(self, kind: int, key: str) -> Any:
        """A value; None for a list that is too long to matter, or of texts."""
        if kind == _Type.STRING:
            return self.text()
        if kind in _FORMATS:
            return self.number(_FORMATS[kind])
        if kind != _Type.ARRAY:
            raise FormatError(f"{self.path}: damaged GGUF header: {key[:60]!r} is of type {kind}")
        inner = self.number("I")
        length = self.count(f"items of {key[:60]!r}", MOST.items)
        if inner in _FORMATS:
            form = f"<{length}{_FORMATS[inner]}"
            data = self.take(struct.calcsize(form))
            return list(struct.unpack(form, data)) if length <= MOST.read_items else None
        if inner != _Type.STRING:
            raise FormatError(f"{self.path}: damaged GGUF header: {key[:60]!r} lists type {inner}")
        for _ in range(length):
            self.take(self.count("bytes of a text", MOST.text_bytes))
        return None


def _header(reader: _Bytes) -> Header:
    path, header = reader.path, Header()
    if reader.take(4) != MAGIC:
        raise FormatError(f"{path}: not a GGUF file")
    version = reader.number("I")
    if version not in (2, 3):
        raise FormatError(f"{path}: GGUF version {version}, only 2 and 3 (little-endian) are known")
    num_tensors = reader.count("tensors", MOST.tensors)
    num_values = reader.count("keys", MOST.tensors)
    for _ in range(num_values):
        key = reader.text()
        header.values[key] = reader.value(reader.number("I"), key)
    for _ in range(num_tensors):
        name = reader.text()
        rank = reader.number("I")
        if rank > 8:
            raise FormatError(f"{path}: tensor {name[:60]!r} has {rank} dimensions")
        dims = tuple(reader.number("Q") for _ in range(rank))
        kind = reader.number("I")
        reader.number("Q")  # where it is
        if kind not in _BLOCKS or math.prod(dims) > MOST.elements:
            raise FormatError(
                f"{path}: tensor {name[:60]!r} of type {kind} and dimensions {list(dims)[:8]}: "
                f"types are {sorted(_BLOCKS)}, and at most {MOST.elements} elements"
            )
        block, size = _BLOCKS[kind]
        rows = math.prod(dims[1:])
        header.tensors.append(Tensor(name, dims, rows * -(-math.prod(dims[:1]) // block) * size))
    return header


def _siblings(path: Path, count: int) -> list[Path]:
    """The other files of a model that is split."""
    named = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not named or int(named[3]) != count or count > 999:
        raise FormatError(f"{path}: is a part of {count} without a name like x-00001-of-00002.gguf")
    paths = [path.with_name(f"{named[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise FormatError(f"{path}: is part {int(named[2])} of {count}; {missing[0]} is not there")
    return [p for p in paths if p != path]


class _Model:
    """Tensors by layer, and the numbers of the architecture."""

    def __init__(self, header: Header, path: str) -> None:
        self.values, self.path = header.values, path
        name = self.values.get("general.architecture")
        if not isinstance(name, str):
            raise FormatError(f"{path}: the GGUF header names no general.architecture")
        self.name = name
        blocks = self._number("block_count", 1, MOST.layers)
        self.num_layers = blocks - self._optional("nextn_predict_layers", 0, low=0)
        self.hidden = self._number("embedding_length", 1)
        self.layers: list[list[Tensor]] = [[] for _ in range(self.num_layers)]
        self.before: list[Tensor] = []
        self.behind: list[Tensor] = []
        for tensor in header.tensors:
            block = re.match(r"blk\.(\d{1,6})\.", tensor.name)
            if block and int(block[1]) < self.num_layers:
                self.layers[int(block[1])].append(tensor)
            elif block and int(block[1]) < blocks:
                continue  # it guesses further tokens, beside the passes that are predicted here
            elif tensor.name.startswith("output"):
                self.behind.append(tensor)
            else:
                self.before.append(tensor)
        table = next((t for t in self.before if t.name == "token_embd.weight"), None)
        empty = [i for i, tensors in enumerate(self.layers or [[]]) if not tensors]
        if (
            table is None
            or len(table.dims) != 2
            or empty
            or self.values.get(f"{name}.attention.causal") is False
            or "wkv" in name
        ):
            what = f"layer {empty[0]} has no tensors" if empty else "no tokens, or no cache of them"
            raise FormatError(f"{path}: the architecture {name[:60]!r} is not a decoder's: {what}")
        self.table = table

    def _value(self, key: str, layer: int = 0) -> Any:
        """A number; of a list that of a layer."""
        value = self.values.get(f"{self.name}.{key}")
        if isinstance(value, list):
            value = value[layer] if layer < len(value) else None
        return value

    def _number(self, key: str, low: int, most: int = 2**24, layer: int = 0) -> int:
        value = self._value(key, layer)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
            raise FormatError(
                f"{self.path}: {self.name[:60]}.{key} = {str(value)[:40]} must be a whole number "
                f"from {low} to {most}: the architecture is not known, or the header is damaged"
            )
        return value

    def _optional(self, key: str, default: int, layer: int = 0, low: int = 1) -> int:
        return default if self._value(key, layer) is None else self._number(key, low, layer=layer)

    def decoder(self, name: str) -> Decoder:
        parts = tuple(self._parts())
        vocabulary = self.table.dims[1]
        return Decoder(name, parts, self.hidden, self._widest(), vocabulary, "fp16", "gguf")

    def _parts(self) -> Iterator[Part]:
        held = {t.name: t.size for t in self.before}
        yield Part("token_embd", "embedding", "token_embd", -1, held)
        for i, tensors in enumerate(self.layers):
            yield from self._layer(i, tensors)
        norms = {t.name: t.size for t in self.behind if t.name != "output.weight"}
        if norms:
            yield Part("output_norm", "head", "output_norm", -2, norms)
        head = next((t for t in self.behind if t.name == "output.weight"), self.table)
        yield Part("output", "head", "output", -2, {head.name: head.size}, float(head.numel))

    def _layer(self, i: int, tensors: list[Tensor]) -> Iterator[Part]:
        path = f"blk.{i}"
        experts = [t for t in tensors if "_exps" in t.name]
        feeds = [t for t in tensors if t not in experts and ".ffn_" in t.name]
        rest = [t for t in tensors if t not in experts and t not in feeds]

        def of(tensors: list[Tensor]) -> tuple[dict[str, int], float]:
            work = sum(t.numel for t in tensors if len(t.dims) > 1)
            return {t.name: t.size for t in tensors}, float(work)

        (kv, width, heads, kv_heads), window = self._attention(i, rest), self._window(i)
        if any(".ssm_" in t.name for t in rest):
            if kv:
                raise FormatError(
                    f"{self.path}: {path} has both attention and a recurrent state: the "
                    f"architecture {self.name[:60]!r} is not known"
                )
            kv, window = self._state_bytes(i), 1  # kept once, whatever the context
        own = *of(rest), 1.0, kv, window, width
        name = f"{path}.attention"
        yield Part(name, "attention", path, i, *own, heads=heads, kv_heads=kv_heads)
        kind = "router" if experts else "feed_forward"
        if feeds:
            yield Part(f"{path}.{kind}", "feed_forward", path, i, *of(feeds))
        if experts:
            count = self._number("expert_count", 1, MOST.experts, i)
            used = self._number("expert_used_count", 1, count, i)
            name, share = f"{path}.experts", used / count
            yield Part(name, "experts", path, i, *of(experts), share, num_experts=count)

    def _attention(self, i: int, tensors: list[Tensor]) -> tuple[int, float, int, int]:
        """Bytes that are kept of a token, at 2 a number; ``width``, ``heads``, ``kv_heads``."""
        names = {t.name.partition(".attn_")[2] for t in tensors}
        linear = any(".ssm_" in t.name for t in tensors)  # whose own input is called qkv too
        keys = "k.", "kv_a_mqa.", "k_b.", "k." if linear else "qkv."
        if not any(x.startswith(keys) for x in names):
            return 0, 0.0, 0, 0
        heads = self._number("attention.head_count", 1, layer=i)
        size = self.hidden // heads
        if any(x.startswith("kv_a_mqa.") for x in names):
            rank = self._number("attention.kv_lora_rank", 1)
            rope = self._number("rope.dimension_count", 1)
            return 2 * (rank + rope), float(heads * (rank + rope / 2)), heads, 1
        kv_heads = self._optional("attention.head_count_kv", heads, i)
        key = self._optional("attention.key_length", size)
        value = self._optional("attention.value_length", key)
        if self._window(i) is not None:  # whose heads may be smaller
            key = self._optional("attention.key_length_swa", key)
            value = self._optional("attention.value_length_swa", value)
        # The last layers may read what an earlier one keeps.
        own = self.num_layers - self._optional("attention.shared_kv_layers", 0, low=0)
        kept = 2 * kv_heads * (key + value) if i < own else 0
        return kept, heads * (key + value) / 2, heads, kv_heads

    def _state_bytes(self, i: int) -> int:
        """Of a sequence in a layer that is recurrent (Mamba, linear attention), 4 a number."""
        inner = self._number("ssm.inner_size", 1, layer=i)
        state = self._number("ssm.state_size", 1, 2**12, i)
        groups = self._optional("ssm.group_count", 0, i)
        before = self._number("ssm.conv_kernel", 1, 2**8, i) - 1
        return 4 * (before * (inner + 2 * groups * state) + state * inner)

    def _window(self, i: int) -> int | None:
        window = self._value("attention.sliding_window", i)
        if self.name == "llama4" and window != 0:
            window = 8192  # which no header says
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            return None
        pattern = self._value("attention.sliding_window_pattern", i)
        is_list = isinstance(self.values.get(f"{self.name}.attention.sliding_window_pattern"), list)
        if isinstance(pattern, bool) or (is_list and pattern is not None):
            return window if pattern else None
        every = _GLOBAL_EVERY.get(self.name)
        if isinstance(pattern, int) and pattern > 0:
            every = pattern
        return window if every is not None and (i + 1) % every else None

    def _widest(self) -> int:
        """See ``Decoder.widest``."""
        used = self._value("expert_used_count") or 1

        def many(t: Tensor, dim: int) -> int:
            return t.dims[dim] * (used if "_exps" in t.name else 1) if len(t.dims) > 1 else 0

        def of(tensors: list[Tensor]) -> int:
            feeds = [t for t in tensors if ".ffn_" in t.name and "_inp" not in t.name]
            down = [t for t in feeds if "down" in t.name]
            inner = sum(many(t, 0) for t in down)  # what goes into it; before it gate and up
            wide = sum(many(t, 1) for t in feeds if t not in down)
            routed = sum(many(t, 0) + many(t, 1) for t in down if "_exps" in t.name)
            attention = sum(
                many(t, 1) for t in tensors if ".attn_" in t.name and "_out" not in t.name
            )
            return max(attention, wide + inner, routed)

        return 5 * self.hidden + max(map(of, self.layers[:1] + self.layers[-1:]))
