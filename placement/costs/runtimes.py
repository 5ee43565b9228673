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

from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from placement.costs.efficiency import Peak

TILE = 32  # tokens of a prompt that are compared with keys and values together


class Cost(NamedTuple):
    """Operations, and bytes that are read."""

    work: float
    read_bytes: float


NOTHING = Cost(0.0, 0.0)


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

    def seconds(self, peak: Peak, kind: str, products: Cost, cache: Cost) -> float:
        """Seconds of an operator on a device.

        Args:
            peak: of the device; of rates that were measured, products reach all.
            kind: of the operator, see ``placement.importers.decoder.Part``.
            products: with weights.
            cache: with keys and values.
        """
        at = self._reaching_all() if peak.is_reached else self
        return (
            peak.call_s
            + at.part_s
            + products.work / ((at.routed if kind == "experts" else at.compute) * peak.flops_per_s)
            + products.read_bytes / (at.weights * peak.bytes_per_s)
            + cache.work / (at.attention * peak.flops_per_s)
            + cache.read_bytes / (at.cache * peak.bytes_per_s)
        )

    def _reaching_all(self) -> Runtime:
        """With shares of what products reach instead of the data sheet's."""
        return replace(
            self,
            weights=1.0,
            cache=self.cache / self.weights,
            compute=1.0,
            routed=self.routed / self.compute,
            attention=self.attention / self.compute,
        )


@cache
def runtimes() -> dict[str, Runtime]:
    """All by name: ``PROGRAM/KIND of device``, e.g. ``llama.cpp/cuda``."""
    from placement.tools.files import parse_yaml

    data = parse_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    names = [field.name for field in fields(Runtime)]
    return {name: Runtime(**{n: float(x[n]) for n in names}) for name, x in data.items()}


def runtime_of(kind: str, gguf: bool) -> Runtime:
    """Of a kind of device: llama.cpp, or vLLM where it is a CUDA device and no GGUF file.

    What nobody measured is taken to be as llama.cpp with Vulkan.
    """
    known = runtimes()
    if kind == "cuda" and not gguf:
        return known["vllm/cuda"]
    return known.get(f"llama.cpp/{kind}", known["llama.cpp/vulkan"])
