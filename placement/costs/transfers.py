"""What sending a tensor costs two devices of this machine, and a stream its threads: measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from placement.capturing import capture
from placement.cluster import Cluster, Link
from placement.executor.alone import on_one_device, placed, run_seconds
from placement.executor.executor import batched
from placement.executor.runner import Runner

Floats = NDArray[np.float64]


class TransferEffort(NamedTuple):
    """What is sent, and which chains of operators run, to learn what sending costs."""

    link_bytes: tuple[int, ...] = (2**12, 2**16, 2**20, 2**23)  # of tensors that are sent
    long_bytes: int = 2**26  # besides, where a GPU is: its link is not full before
    chain_ops: int = 17
    chain_size: int = 2**17  # elements, of the chain that tells what waking costs
    stream_size: int = 2**6  # elements, of the chain that tells what a micro-batch costs
    streamed: int = 64  # micro-batches of it


EFFORT = TransferEffort()


def measure_links(cluster: Cluster, *, repeats: int = 5) -> tuple[Link, ...]:
    """Latency and bandwidth of every ordered pair of devices, fitted over tensor sizes.

    A chain of two operators runs on one device, and split over the pair; what the split costs
    more is the transfer: handing over, waking the other worker, and reading memory that the
    other device wrote. It is at least what passes until the tensor is there: on one device the
    second operator also frees the tensor, which takes as long as some transfers. A line through the
    medians gives latency and bandwidth. How long waking the receiver keeps the sender busy
    (``Link.wake_s``) shows in a longer chain whose every operator has a quick reader on the other
    device, or none.
    """
    pairs = [(a, b) for a in range(cluster.num_devices) for b in range(cluster.num_devices)]
    on_gpu = any(d.kind == "cuda" for d in cluster.devices)
    sizes = (*EFFORT.link_bytes, EFFORT.long_bytes) if on_gpu else EFFORT.link_bytes
    extra: dict[tuple[int, int], Floats] = {
        (a, b): np.empty(len(sizes)) for a, b in pairs if a != b
    }
    for i, size in enumerate(sizes):
        graph = capture(_Chain(), torch.ones(size // 4), name="link")
        inputs = graph.program.timing_inputs()
        apart = {pair: placed(graph, cluster, list(pair)) for pair in extra}
        together = {b: placed(graph, cluster, [b, b]) for _, b in extra}
        try:
            spans: dict[Any, list[tuple[float, float]]] = {key: [] for key in (*apart, *together)}
            for _ in range(repeats + 1):
                for key, runner in (*apart.items(), *together.items()):
                    spans[key].append(_span(runner, inputs))
            middle = {key: np.median(v[1:], axis=0) for key, v in spans.items()}
        finally:
            for runner in (*apart.values(), *together.values()):
                runner.close()
        for a, b in extra:
            more_s, on_way_s = middle[a, b] - middle[b]
            extra[a, b][i] = max(more_s, on_way_s, 0.0)
    wake_s = _wake_seconds(cluster, list(extra), repeats)
    return tuple(
        replace(
            fit_link(cluster.device_names[a], cluster.device_names[b], sizes, seconds),
            wake_s=wake_s[a, b],
        )
        for (a, b), seconds in extra.items()
    )


def _wake_seconds(
    cluster: Cluster, pairs: list[tuple[int, int]], repeats: int
) -> dict[tuple[int, int], float]:
    """Seconds that waking an idle receiver keeps the sender busy, by (sender, receiver)."""
    x = torch.ones(EFFORT.chain_size)
    watched = capture(Watched(True), x, name="watched")
    chain = [i for i, kind in enumerate(watched.op_kind) if "add" in kind]
    waking, silent = {}, {}
    spans: dict[Any, list[float]] = {}
    try:
        for a, b in pairs:
            placement = [a if i in chain else b for i in range(watched.num_ops)]
            waking[a, b] = placed(watched, cluster, placement)
        plain = capture(Watched(False), x, name="chain")
        for a in {a for a, _ in pairs}:
            silent[a] = on_one_device(plain, cluster, a, range(plain.num_ops))
        for _ in range(repeats + 1):
            for key, runner in (*waking.items(), *silent.items()):
                ops = chain if key in waking else range(plain.num_ops)
                # Nothing is sent before the first; the others each begin with sending.
                seconds = run_seconds(runner, [x], 1)[list(ops)[1:]]
                spans.setdefault(key, []).append(float(np.median(seconds)))
    finally:
        for runner in (*waking.values(), *silent.values()):
            runner.close()
    middle = {key: float(np.median(v[1:])) for key, v in spans.items()}
    return {(a, b): max(middle[a, b] - middle[a], 0.0) for a, b in pairs}


def batch_seconds(cluster: Cluster, repeats: int) -> float:
    """By how much the period of a stream of a tiny model on one device exceeds its operators.

    Whoever lets micro-batches in and hands results out competes for the interpreter's lock. Of
    unlike kinds of devices the one that this costs most counts: what a GPU is asked to do it does
    later, and its period hides what the threads cost.
    """
    x = torch.ones(EFFORT.stream_size)
    graph = capture(Watched(False), x, name="chain")
    inputs, more = graph.program.timing_inputs(), dict[str, list[float]]()
    for d, device in enumerate(cluster.devices):
        with (
            on_one_device(graph, cluster, d, range(graph.num_ops)) as alone,
            Runner(graph, cluster, [d] * graph.num_ops) as streaming,
        ):
            for r in range(3 * repeats + 1):
                period_s = streaming.period_of(streaming.stream([x] * EFFORT.streamed))
                operators_s = run_seconds(alone, inputs, EFFORT.streamed // 4).sum()
                if r:
                    excess = period_s - operators_s
                    more.setdefault(device.kind, []).append(excess)
    # Others only ever make a stream longer.
    return max(0.0, *(float(np.percentile(of_kind, 25)) for of_kind in more.values()))


def fit_link(src: str, dst: str, sizes: Sequence[int], seconds: Floats) -> Link:
    """Least squares of ``latency_s + bytes / bandwidth`` with both terms at least 0.

    Relative errors count, so that the small transfers decide the latency; where by chance nothing
    was seen of one, those to what it would take in proportion to the longest. What took less than
    half as long as smaller ones, or more than twice as long as larger ones, does not count.
    """
    from scipy.optimize import nnls

    size, used = np.asarray(sizes, np.float64), np.arange(len(sizes))
    while True:
        against = np.triu(seconds[used] < 0.5 * seconds[used, None])
        number = against.sum(axis=0) + against.sum(axis=1)
        if not number.any():
            break
        used = np.delete(used, len(used) - 1 - number[::-1].argmax())
    size, seconds = size[used], seconds[used]
    weight = 1.0 / np.maximum.reduce([seconds, seconds.max() * size / size.max(), 0 * size + 1e-6])
    # Scaled columns: bytes and ones differ by seven orders of magnitude.
    (latency, slope), _ = nnls(
        np.stack([weight, weight * size / size.max()], axis=1), seconds * weight
    )
    per_byte = slope / size.max()
    return Link(src, dst, float(latency), float(1.0 / per_byte) if per_byte > 0 else float("inf"))


class Watched(nn.Module):
    """A chain of operators; each but the last has a second, cheap reader if ``watched``."""

    def __init__(self, watched: bool) -> None:
        super().__init__()
        self.watched = watched

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for _ in range(EFFORT.chain_ops):
            x = x + 1.0
            if self.watched:
                seen.append(x[:1])
        return torch.cat(seen) if self.watched else x


class _Chain(nn.Module):
    """Produce a tensor, read it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1.0).sum()


def _span(runner: Runner, inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Seconds from the end of the first operator to that of the second; of them, on the way."""
    for _ in runner.stream_tensors([inputs]):
        pass
    end, on_way_ns = {}, 0
    for worker in runner.workers:
        clock = worker.backend.resolve_ns
        for _, op, _, until in batched(worker.slices, 4):
            end[op] = clock(until)
        for _, _, source, sent, received in batched(worker.arrivals, 5):
            on_way_ns = clock(received) - runner.workers[source].backend.resolve_ns(sent)
        worker.slices.clear()
        worker.arrivals.clear()
    return (end[1] - end[0]) * 1e-9, on_way_ns * 1e-9
