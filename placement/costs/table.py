"""Measured operators as a table that regressions learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Device
from placement.costs.features import Features, features
from placement.costs.predictors import Floats, LatencyError, Sample
from placement.devices import library
from placement.graph import OpGraph

NAMES = (
    "flops", "read_bytes", "written_bytes", "batch", "rows", "inner", "outer", "intensity",
    "num_inputs", "item_bytes", "threads", "param_gap_bytes", "kind_gap_bytes",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Table:
    """Operators of one kind of device (``cpu``, ``cuda``), one row each.

    Attributes:
        kind: ``[N]`` of the operators; in-place ones like the others.
        op_class: int ``[N]``, see ``placement.costs.features.CLASSES``.
        x: float64 ``[N, F]`` logarithms of ``NAMES``.
        guess: float64 ``[N]`` logarithm of the seconds on a device that is nothing special.
        y: float64 ``[N]`` logarithm of measured seconds.
        seconds: float64 ``[N]`` how much of all time the row stands for.
        source: int ``[N]`` number of the graph that the row is from.
    """

    kind: NDArray[np.str_]
    op_class: NDArray[np.int64]
    x: Floats
    guess: Floats
    y: Floats
    seconds: Floats
    source: NDArray[np.int64]


def columns(described: Features, device: Device) -> Floats:
    """float64 ``[N, F]`` logarithms of ``NAMES`` of operators on ``device``."""
    threads = np.full(len(described.kind), float(device.threads) - 1.0)
    values = [threads if name == "threads" else getattr(described, name) for name in NAMES]
    return np.log1p(np.stack(values, axis=1))


def reference_s(described: Features, threads: int = 1) -> Floats:
    """float64 ``[N]`` seconds of operators on a device that is nothing special.

    Times are learned relative to it: it need not be right, only have their shape, so that what no
    sample is like is still predicted in proportion to its work.
    """
    moved = described.read_bytes + described.written_bytes
    flops_per_s, bytes_per_s, call_s = 4e10, 8e9, 3e-6
    work: Floats = described.flops / flops_per_s / threads + moved / bytes_per_s
    return work + call_s


def guess(described: Features, device: Device) -> Floats:
    """float64 ``[N]`` logarithms of seconds on a device that is nothing special."""
    return np.log(reference_s(described, device.threads))


def kinds(described: Features) -> NDArray[np.str_]:
    """``[N]`` kinds; in-place operators like the others."""
    return np.array([kind.rstrip("_") or kind for kind in described.kind])


def tables(samples: Sequence[Sample]) -> dict[str, Table]:
    """One table for each kind of device; equal operators of a graph are one row.

    Raises:
        LatencyError: no samples.
    """
    if not samples:
        raise LatencyError(
            "nothing was measured on this machine yet, so there is nothing to learn from: run "
            "placement profile MODEL for a few models like yours, or predict with roofline"
        )
    parts: dict[str, list[tuple[NDArray, ...]]] = {}
    graphs: dict[str, int] = {}
    for sample in samples:
        described = features(sample.graph)
        _, first, row, count = np.unique(
            sample.graph.op_signature, return_index=True, return_inverse=True, return_counts=True
        )
        measured = np.maximum(sample.compute_s, 1e-8)  # a clock's zero has no logarithm
        mean = np.bincount(row, measured) / count
        x = columns(described, sample.device)
        x = np.stack([np.bincount(row, column) / count for column in x.T], axis=1)
        part = (
            kinds(described)[first],
            described.op_class[first],
            x,
            guess(described, sample.device)[first],
            np.log(mean),
            mean * count,
            np.full(len(first), graphs.setdefault(sample.graph.fingerprint, len(graphs))),
        )
        parts.setdefault(sample.device.kind, []).append(part)
    return {
        kind: Table(*(np.concatenate(arrays) for arrays in zip(*described, strict=True)))
        for kind, described in parts.items()
    }


class Model(Protocol):
    """What was learned of one kind of device."""

    def __call__(self, described: Features, device: Device) -> tuple[Floats, Floats]:
        """float64 ``[N]`` logarithms of seconds over ``guess``, and how far they may be off."""
        ...


@dataclass(frozen=True, eq=False)
class Fitted:
    """A ``Predictor``: a model for each kind of device."""

    models: dict[str, Model]

    def predict(self, graph: OpGraph, device: Device) -> tuple[Floats, Floats]:
        """See ``placement.costs.predictors.Predictor``."""
        if device.kind not in self.models:
            raise LatencyError(
                f"device {device.name!r} is of kind {device.kind!r}, of which nothing was measured "
                f"on this machine (only {sorted(self.models)}): describe it with 'like: <measured "
                "device>' and 'speed: <factor>', or give peak rates to roofline"
            )
        if device.like in library():
            raise LatencyError(
                f"device {device.name!r} is like {device.like!r}, of which nothing was measured on "
                "this machine; from its published rates: --predict roofline"
            )
        described = features(graph)
        value, spread = self.models[device.kind](described, device)
        seconds = np.exp(value + guess(described, device))
        return seconds, seconds * spread
