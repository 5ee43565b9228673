"""From how many tokens on it pays to copy weights of the processor to a GPU and compute there."""

from __future__ import annotations

from placement.cluster import Cluster
from placement.costs.serving import PIECE, Phase, Serving, part_seconds, peaks
from placement.importers.decoder import Decoder

MOST = PIECE + 1  # tokens: more than are computed at a time


def min_batch(decoder: Decoder, cluster: Cluster) -> int | None:
    """The least tokens at a time from which on copying a layer's weights pays.

    So many that the copy and the GPU's seconds are fewer than the processor's: ``r* = copy / (CPU -
    GPU)`` of a matrix that is read whole, and of experts those that the tokens are routed to. It
    is of experts where there are some, else of feed-forwards, and of the first processor and the
    GPU with the fastest memory. ``MOST``: it never pays, so
    long as no more are computed at a time (``--ubatch-size``). None: no GPU, processor or link.
    """
    hosts = [d for d, device in enumerate(cluster.devices) if device.kind == "cpu"]
    gpus = [d for d, device in enumerate(cluster.devices) if device.kind != "cpu"]
    kinds = {part.kind: part for part in decoder.parts}
    part = kinds.get("experts") or kinds.get("feed_forward")
    if not hosts or not gpus or part is None:
        return None
    rates = peaks(decoder, cluster)
    host, gpu = hosts[0], max(gpus, key=lambda d: rates[d].bytes_per_s)
    names = cluster.device_names[host], cluster.device_names[gpu]
    link = next((x for x in cluster.links if (x.src, x.dst) == names), None)
    if link is None:
        return None

    def pays(tokens: int) -> bool:
        if tokens == MOST:
            return True
        asked = Serving(Phase.PREFILL, tokens, 1, tokens)
        there, here = (
            part_seconds(part, decoder, asked, rates[d], cluster.devices[d]) for d in (gpu, host)
        )
        copied = part.weight_bytes * part.read(tokens)
        return link.latency_s + copied / link.bandwidth_bytes_per_s + there < here

    tokens = 1
    while tokens < MOST and not pays(tokens):
        tokens = min(2 * tokens, MOST)
    low = tokens // 2
    while tokens - low > 1:
        middle = (low + tokens) // 2
        low, tokens = (low, middle) if pays(middle) else (middle, tokens)
    return tokens
