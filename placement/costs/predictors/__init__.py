"""Predict what operators cost that nobody measured: one file per method.

A method is a frozen dataclass of hyper-parameters, found by the name of its file as planners are.
``load("polynomial").fit(samples)`` learns from measured graphs and gives a ``Predictor``::

    predict(graph, device) -> (seconds float64 [N], spread float64 [N])

``profile_of`` makes a ``Profile`` of that, which the simulator and every planner take like a
measured one; its entries are marked as predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster, Device, Link
from placement.costs.features import CLASSES, features
from placement.graph import OpGraph
from placement.profile import Profile
from placement.tools.named import Named

Floats = NDArray[np.float64]


class LatencyError(ValueError):
    """A prediction cannot be made; the message says what is missing and what to type."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A graph measured on a device.

    Attributes:
        graph: without its program.
        device: kind, model and threads count; its name does not.
        compute_s: float64 ``[N]`` seconds of each operator.
        spread_s: float64 ``[N]`` interquartile range over the repeats.
        loaded_s: float64 ``[N]`` seconds while other devices are busy; nan where unknown.
    """

    graph: OpGraph
    device: Device
    compute_s: Floats
    spread_s: Floats
    loaded_s: Floats


class Predictor(Protocol):
    """Tells what operators cost."""

    def predict(self, graph: OpGraph, device: Device) -> tuple[Floats, Floats]:
        """Seconds float64 ``[N]``, and by how many seconds (one standard deviation) they may err.

        Raises:
            LatencyError: nothing is known of such a device.
        """
        ...


class Method(Protocol):
    """How a predictor is made: hyper-parameters."""

    def fit(self, samples: Sequence[Sample]) -> Predictor:
        """A predictor that has seen these measurements.

        Raises:
            LatencyError: there are too few of them.
        """
        ...


_METHODS: Named[Method] = Named(__name__, "predictor", LatencyError)
#: The methods of this package by name; and the one of a name, with options.
names, load = _METHODS.names, _METHODS.load


def profile_of(
    graph: OpGraph,
    cluster: Cluster,
    predictor: Predictor,
    *,
    links: tuple[Link, ...] = (),
    samples: Sequence[Sample] = (),
) -> Profile:
    """The profile of ``graph`` on ``cluster`` as ``predictor`` has it.

    Args:
        links: of the cluster's measured devices; those that the cluster declares go first.
        samples: from which to learn what a busy neighbour costs (see ``slowdown``).

    Raises:
        LatencyError: nothing is known of one of the devices.
    """
    measured = [d for d in cluster.devices if d.measured_as == d.name]
    names = tuple(d.name for d in measured)
    sources = [d.measured_as for d in cluster.devices if d.measured_as not in names]
    if sources:
        raise LatencyError(
            f"devices {sources}, in terms of which others are described ('like'), are not in the "
            "cluster: add them to it, so that their times can be predicted"
        )
    guesses = [predictor.predict(graph, device) for device in measured]
    compute = np.stack([seconds for seconds, _ in guesses], axis=1)
    spread = np.stack([s for _, s in guesses], axis=1)
    loaded = None
    if len(measured) > 1:
        loaded = compute * slowdown(samples)[features(graph).op_class][:, None]
    profile = Profile(
        device_names=names,
        compute_s=compute,
        spread_s=spread,
        links=links,
        loaded_s=loaded,
        predicted=np.ones(compute.shape, bool),
        graph_fingerprint=graph.fingerprint,
        provenance={"predictor": type(predictor).__name__},
    )
    return profile.for_cluster(cluster)


def slowdown(samples: Sequence[Sample]) -> Floats:
    """float64 ``[len(CLASSES)]``: how many times longer operators take beside busy devices.

    The ratio of the summed seconds over the samples, at least 1; 1 for what none has measured.
    """
    alone, beside = np.zeros(len(CLASSES)), np.zeros(len(CLASSES))
    for sample in samples:
        here = np.isfinite(sample.loaded_s) & np.isfinite(sample.compute_s)
        at = features(sample.graph).op_class[here]
        np.add.at(alone, at, sample.compute_s[here])
        np.add.at(beside, at, sample.loaded_s[here])
    return np.maximum(np.divide(beside, alone, out=np.ones_like(alone), where=alone > 0), 1.0)
