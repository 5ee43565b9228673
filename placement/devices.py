"""The library of devices: peak rates, memory and power of common hardware, by ``vendor/model``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_WIDER = {"fp8": "fp16", "fp16": "fp32", "bf16": "fp32"}


@dataclass(frozen=True)
class Facts:
    """A device of the library.

    Attributes:
        kind: as ``placement.cluster.Device`` has it.
        flops_per_s: peak floating-point operations per second by type, e.g. ``fp16``.
        bytes_per_s: of its memory; ``memory_bytes`` is how much there is.
        call_s: to start an operator.
        link_bytes_per_s: of its slot or socket, one way.
        busy_w, idle_w: watts.
        source: pages that state them.
    """

    kind: str
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: int
    call_s: float
    link_bytes_per_s: float
    busy_w: float
    idle_w: float
    source: str

    def peak(self, dtype: str) -> float:
        """Operations per second of ``dtype``, or of the next wider type that it computes in."""
        while dtype not in self.flops_per_s:
            dtype = _WIDER.get(dtype, "fp32")
        return self.flops_per_s[dtype]


@cache
def library() -> Mapping[str, Facts]:
    """All devices by name."""
    from placement.tools.files import parse_yaml

    data = parse_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

    def facts(fields: dict[str, object]) -> Facts:
        rates = {k: float(v) for k, v in fields.pop("flops_per_s").items()}  # type: ignore[attr-defined]
        kind, source = str(fields.pop("kind")), str(fields.pop("source"))
        memory = int(float(fields.pop("memory_bytes")))  # type: ignore[arg-type]
        numbers = {k: float(v) for k, v in fields.items()}  # type: ignore[arg-type]
        return Facts(kind, rates, memory_bytes=memory, source=source, **numbers)

    return {name: facts(fields) for name, fields in data.items()}


def nearest(name: str, count: int = 3) -> list[str]:
    """The names of the library that are most like ``name``, best first; all if none is."""
    text = name.lower().replace("_", "-").replace(" ", "-")

    def likeness(known: str) -> float:
        ends = ((text, known), (text.rpartition("/")[2], known.partition("/")[2]))
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in ends)

    alike = [known for known in library() if likeness(known) >= 0.6]
    return sorted(alike, key=likeness, reverse=True)[:count] or sorted(library())
