"""How fast programs run language models: the rule for the seconds of a token, and of a prompt.

A pass of some tokens through the decoder reads every weight that one of them needs, once, and the
keys and values of what is before them; it computes with both. Each operator takes

    call_s + part_s + operations / (compute x peak) + weight bytes / (weights x bandwidth)
                    + operations / (attention x peak) + cache bytes / (cache x bandwidth)

and each pass ``token_s`` more. Reading and computing add up, as kernels overlap them in part at
best; so the rule is linear in what is fitted. The shares differ by program and kind of device;
they are fitted to public measurements, with intervals from devices and models that the fit did
not see (``runtimes.yaml``, ``experiments.language_models``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from placement.costs.efficiency import Peak
from placement.importers.decoder import Part

TILE = 32  # tokens of a prompt that are compared with keys and values together


@dataclass(frozen=True)
class Runtime:
    """A program on a kind of device.

    Attributes:
        weights, cache: shares of the memory's bandwidth that reading weights, and keys and values,
            reaches.
        compute, routed, attention: shares of the peak of operations that products of many tokens
            reach, those of experts, and comparing tokens with the ones before.
        part_s: seconds per operator (attention, feed-forward, experts), whatever its size.
        token_s: seconds per pass through the model.
        decode, prefill: half of the 90 % interval of predicted seconds, as a logarithm: they are
            within a factor of ``exp(decode)``.
    """

    weights: float
    cache: float
    compute: float
    routed: float
    attention: float
    part_s: float
    token_s: float
    decode: float
    prefill: float

    def pass_s(
        self, part: Part, hidden: int, peak: Peak, rows: int, sequences: float, before: float
    ) -> float:
        """Seconds of a part for ``rows`` tokens.

        Args:
            part: of the decoder.
            hidden: numbers that a token is between layers, 2 bytes each.
            peak: of the device.
            rows: tokens that go through together.
            sequences: that they are of: keys and values are read once for each.
            before: tokens of its sequence that each is compared with, on average.
        """
        moved = 4.0 * rows * hidden
        if part.kind == "embedding":
            return peak.call_s + self.part_s + 2 * moved / (self.weights * peak.bytes_per_s)
        share = self.routed if part.kind == "experts" else self.compute
        seconds = (
            peak.call_s
            + self.part_s
            + 2.0 * part.numel * part.used * rows / (share * peak.flops_per_s)
            + (part.weight_bytes * part.read(rows) + moved) / (self.weights * peak.bytes_per_s)
        )
        if part.kv_bytes:
            seen = before if part.window is None else min(before, part.window)
            reads = sequences if part.window == 1 else max(sequences, rows / TILE)
            seconds += 4.0 * part.width * rows * seen / (self.attention * peak.flops_per_s)
            seconds += seen * part.kv_bytes * reads / (self.cache * peak.bytes_per_s)
        return seconds


@cache
def runtimes() -> dict[str, Runtime]:
    """All by name: ``PROGRAM/KIND``, e.g. ``llama.cpp/cuda``."""
    from placement.tools.files import parse_yaml

    data = parse_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    names = [field.name for field in fields(Runtime)]
    return {name: Runtime(**{n: float(x[n]) for n in names}) for name, x in data.items()}
