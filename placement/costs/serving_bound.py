"""What a machine can do at most for a language model, and where a plan's seconds beyond that go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster, pairs_of
from placement.costs.efficiency import Peak
from placement.costs.serving import Phase, Serving, peaks, serving_problem
from placement.importers.decoder import Decoder, Part
from placement.problem import Placement

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """Seconds of one phase.

    Attributes:
        least_s: no placement of the weights is faster, whatever runs at the same time.
        slow_s: of a plan, what operators take beyond their bytes, or operations, at the full
            rates of their device: starting them, and kernels that do not reach these rates.
        turns_s: beyond ``least_s`` at full rates: devices wait for each other, and memory that is
            slower holds what a faster one could.
        handing_s: what handing on between devices takes.
    """

    least_s: float
    slow_s: float
    turns_s: float
    handing_s: float

    @property
    def share(self) -> float:
        """Of what the machine can do at most, what the plan does."""
        return self.least_s / (self.least_s + self.slow_s + self.turns_s + self.handing_s)


def bound(
    decoder: Decoder, cluster: Cluster, serving: Serving, placement: Placement, phase: Phase
) -> Bound:
    """Of a placement int32 ``[N]`` in the phase ``prefill`` or ``decode``."""
    from placement.simulator import simulate

    one = replace(serving, phase=phase, prompt=serving.tokens)
    problem = serving_problem(decoder, cluster, one)
    taken_s = float(simulate(problem, placement).latency_s)
    rates = _rates(decoder, cluster)
    busy_s = float(problem.compute_s[np.arange(len(placement)), placement].sum())
    full_s = sum(
        _full_s(part, rates[d], one)
        for part, d in zip(decoder.parts, placement.tolist(), strict=True)
    )
    least_s = least(decoder, cluster, one)
    return Bound(least_s, busy_s - full_s, full_s - least_s, taken_s - busy_s)


def least(decoder: Decoder, cluster: Cluster, serving: Serving) -> float:
    """Seconds that no placement is below, of ``prefill`` or ``decode``.

    All devices work at the same time at their full rates. Bytes that are not in the memory of the
    faster ones are read out of the other devices' memory: by these, and over the links from there.
    For every number of the fastest memories, they hold what is read most for its bytes.
    """
    rates = _rates(decoder, cluster)
    order = sorted(range(len(rates)), key=lambda d: -rates[d].bytes_per_s)
    held, read = _bytes(decoder, serving)
    hottest = np.argsort(-read / np.maximum(held, 1.0), kind="stable")
    upto = np.append(0.0, np.cumsum(held[hottest]))
    served = np.append(0.0, np.cumsum(read[hottest]))
    work = sum(_work(part, serving) for part in decoder.parts)
    least_s = work / sum(peak.flops_per_s for peak in rates)
    link_rates = np.zeros((len(order), len(order)))
    for a, b, link in pairs_of(cluster.links, cluster.device_names):  # of a pair the last counts
        link_rates[a, b] = link.bandwidth_bytes_per_s
    for count in range(len(order)):
        fast, others = order[:count], order[count:]
        room = sum(cluster.devices[d].memory_bytes for d in fast)
        rate = sum(rates[d].bytes_per_s for d in others)
        rate += link_rates[np.ix_(others, fast)].sum()
        least_s = max(least_s, (served[-1] - np.interp(room, upto, served)) / rate)
    return float(least_s)


def _rates(decoder: Decoder, cluster: Cluster) -> list[Peak]:
    """``[D]`` full rates; of a group of devices those of all its members together."""
    ways = (max(1, len(device.members)) for device in cluster.devices)
    return [
        replace(peak, flops_per_s=peak.flops_per_s * k, bytes_per_s=peak.bytes_per_s * k)
        for peak, k in zip(peaks(decoder, cluster), ways, strict=True)
    ]


def _rows(serving: Serving) -> int:
    """Tokens that go through a layer."""
    return serving.batch * (serving.tokens if serving.phase is Phase.PREFILL else 1)


def _bytes(decoder: Decoder, serving: Serving) -> tuple[Floats, Floats]:
    """Bytes that are held, and of them those that are read at least once."""
    pairs = [pair for part in decoder.parts for pair in _held(part, serving)]
    held, read = np.array([*zip(*pairs, strict=True)], np.float64)
    return held, read


def _held(part: Part, serving: Serving) -> Iterator[tuple[float, float]]:
    rows = _rows(serving)
    if part.num_experts and part.shares:
        size = part.weight_bytes / part.num_experts
        yield from ((size, size * (1.0 - (1.0 - p) ** rows)) for p in part.shares)
    elif part.kind != "embedding":
        yield part.weight_bytes, part.weight_bytes * part.read(rows)
    cache = _cache(part, serving)
    yield cache, cache


def _cache(part: Part, serving: Serving) -> float:
    """Bytes of keys and values that are read."""
    if serving.phase is Phase.PREFILL:
        return 0.0
    seen = serving.context if part.window is None else min(serving.context, part.window)
    return float(serving.batch * seen * part.kv_bytes)


def _work(part: Part, serving: Serving) -> float:
    """Operations."""
    rows = serving.batch if part.kind == "head" else _rows(serving)
    return 2.0 * part.numel * part.used * rows


def _full_s(part: Part, peak: Peak, serving: Serving) -> float:
    """Seconds at the full rates of a device."""
    read = sum(pair[1] for pair in _held(part, serving))
    return max(read / peak.bytes_per_s, _work(part, serving) / peak.flops_per_s)
