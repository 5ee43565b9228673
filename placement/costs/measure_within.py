"""Profiles that are predicted, or measured only where that tells most.

A profile within a time budget measures the operators whose predictions are least certain, all
others are predicted from what was measured before on this machine (``placement.costs.predictors``).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster, Device, Link
from placement.costs.corpus import Corpus, this_machine
from placement.costs.features import features
from placement.costs.measure import check_here, measure_links, provenance, typical
from placement.costs.predictors import Floats, LatencyError, Method, Predictor, profile_of
from placement.costs.predictors.polynomial import Polynomial
from placement.costs.predictors.roofline import Roofline
from placement.executor.alone import on_one_device, run_seconds
from placement.executor.parts import part
from placement.graph import OpGraph
from placement.profile import Profile
from placement.program import check_captured
from placement.tools.progress import Progress

_FEWEST_ROUNDS = 3  # in which each chosen operator runs once


def predict_here(graph: OpGraph, cluster: Cluster, method: Method | None = None) -> Profile:
    """A predicted profile from what this machine has measured so far.

    Operators whose signature was measured in any graph have that time. Links are those of
    earlier profiles; where there are none they are measured now, in seconds.

    Args:
        method: None: ``Polynomial``, or ``Roofline`` where nothing was measured yet.

    Raises:
        LatencyError: nothing was measured that ``method`` could learn from.
        CorpusError: what was measured cannot be read.
    """
    corpus = Corpus.of(this_machine())
    predictor, links = _predictor(method, corpus), _links(cluster, corpus)
    profile = profile_of(graph, cluster, predictor, links=links, samples=corpus.samples)
    facts = {"num_samples": len(corpus.samples), "machine": this_machine()}
    return replace(profile, provenance=provenance(**profile.provenance, **facts))


def measure_within(
    graph: OpGraph,
    cluster: Cluster,
    seconds: float,
    *,
    method: Method | None = None,
    progress: Progress | None = None,
) -> Profile:
    """A profile of which as much is measured as ``seconds`` allow, where it tells most.

    Operators are chosen by the seconds that their predictions may err, over all operators of the
    same signature and all devices. Those chosen take turns, in the order of the graph, with the
    inputs that they have in the model. What else operators of their class took, relative to the
    predictions, corrects those that were not chosen.

    Args:
        seconds: for measuring; one run of the model comes on top. Others: see ``predict_here``.

    Raises:
        LatencyError: not a positive time, a described device, no captured graph, or that of a
            training step.
        ProfileError: a device is not on this machine.
        CorpusError: what was measured cannot be read.
    """
    if not seconds > 0:
        raise LatencyError(f"seconds = {seconds}: the time to measure must be positive")
    check_captured(graph, cluster, LatencyError)
    if described := [d.name for d in cluster.devices if d.like is not None]:
        raise LatencyError(
            f"devices {described} are described ('like') and not here to be measured: leave them "
            "out, or predict all: placement plan --predict roofline"
        )
    check_here(cluster)
    if graph.program.gradients:
        raise LatencyError(
            f"graph {graph.name!r} is a training step, so that its operators cannot be "
            "measured one by one; measure it as a whole: placement profile without --seconds"
        )
    say = progress or (lambda what, share: None)
    began = time.monotonic()
    say("predicting", 0.0)
    corpus = Corpus.of(this_machine())
    predictor = _predictor(method, corpus)
    guesses = [predictor.predict(graph, device) for device in cluster.devices]
    predicted = np.stack([s for s, _ in guesses], axis=1)
    spread = np.stack([s for _, s in guesses], axis=1)
    ops = choose(graph, predicted, spread, seconds)
    compute, within = predicted.copy(), spread.copy()
    is_predicted = np.ones(predicted.shape, bool)
    rounds = 0
    if len(ops):
        say(f"measuring {len(ops)} of {graph.num_ops} operators", 0.1)
        samples_s = _measure(part(graph, ops), cluster, seconds)
        rounds = len(samples_s)
        low, high = np.percentile(samples_s, [25, 75], axis=0)
        at = {graph.op_signature[n]: i for i, n in enumerate(ops.tolist())}
        row = np.array([at.get(s, -1) for s in graph.op_signature])
        is_measured = row >= 0
        compute[is_measured] = typical(samples_s)[row[is_measured]]
        within[is_measured] = (high - low)[row[is_measured]]
        is_predicted[is_measured] = False
        compute[~is_measured] *= correction(graph, compute, predicted, is_measured)[~is_measured]
    facts = {
        "predictor": type(predictor).__name__,
        "repeats": rounds,
        "measured_signatures": len(ops),
        "seconds": round(time.monotonic() - began, 2),
    }
    known, links = _Known(compute, within, cluster), _links(cluster, corpus)
    profile = profile_of(graph, cluster, known, links=links, samples=corpus.samples)
    return replace(profile, predicted=is_predicted, provenance=provenance(**facts))


def choose(graph: OpGraph, predicted: Floats, spread: Floats, seconds: float) -> NDArray[np.int64]:
    """Operators to measure, one of each signature, int ``[K]`` in the order of the graph.

    Args:
        predicted, spread: float64 ``[N, D]``.
        seconds: all chosen ones, on all devices, ``_FEWEST_ROUNDS`` times and once to warm up,
            are expected to take no longer.
    """
    _, first, row = np.unique(graph.op_signature, return_index=True, return_inverse=True)
    gain = np.bincount(row, spread.sum(axis=1))
    cost = (1 + _FEWEST_ROUNDS) * predicted.sum(axis=1)[first]
    order = np.argsort(-gain, kind="stable")
    affordable = np.cumsum(cost[order]) <= seconds
    return np.sort(first[order[affordable]])


def _measure(graph: OpGraph, cluster: Cluster, seconds: float) -> Floats:
    """float64 ``[R, N, D]`` seconds of every operator; devices take turns."""
    inputs = graph.program.timing_inputs()
    order = range(graph.num_ops)
    rounds: list[Floats] = []
    with ExitStack() as stack:
        each = [on_one_device(graph, cluster, d, order) for d in range(cluster.num_devices)]
        runners = [stack.enter_context(runner) for runner in each]
        for runner in runners:
            run_seconds(runner, inputs, 1)
        began = time.monotonic()
        while len(rounds) < _FEWEST_ROUNDS or (
            len(rounds) < 10 and time.monotonic() - began < seconds
        ):
            rounds.append(np.stack([run_seconds(runner, inputs, 1) for runner in runners], axis=1))
    return np.stack(rounds)


def correction(
    graph: OpGraph, compute: Floats, predicted: Floats, is_measured: NDArray[np.bool_]
) -> Floats:
    """float64 ``[N, D]``: what measured operators of the same class took over their prediction."""
    factor = np.ones_like(predicted)
    op_class = features(graph).op_class
    for c in np.unique(op_class):
        alike = op_class == c
        known = alike & is_measured
        if known.sum() >= 3:  # which tell how fast the machine is now
            factor[alike] = compute[known].sum(axis=0) / predicted[known].sum(axis=0)
    return factor


class _Remembering:
    """A predictor that knows what was measured: of equal operators it gives their time."""

    def __init__(self, predictor: Predictor, corpus: Corpus) -> None:
        self.predictor, self.corpus = predictor, corpus

    def predict(self, graph: OpGraph, device: Device) -> tuple[Floats, Floats]:
        seconds, spread = self.predictor.predict(graph, device)
        recorded, within = self.corpus.known(graph, device)
        known = np.isfinite(recorded)
        return np.where(known, recorded, seconds), np.where(known, within, spread)


class _Known:
    """A predictor of what is known already: float64 ``[N, D]`` seconds, and how far they vary."""

    def __init__(self, seconds: Floats, spread: Floats, cluster: Cluster) -> None:
        self.seconds, self.spread, self.cluster = seconds, spread, cluster

    def predict(self, graph: OpGraph, device: Device) -> tuple[Floats, Floats]:
        d = self.cluster.index(device.name)
        return self.seconds[:, d], self.spread[:, d]


def _predictor(method: Method | None, corpus: Corpus) -> Predictor:
    chosen = method or (Polynomial() if corpus.samples else Roofline())
    return _Remembering(chosen.fit(corpus.samples), corpus)


def _links(cluster: Cluster, corpus: Corpus) -> tuple[Link, ...]:
    """Of the measured devices: from earlier profiles, or measured now."""
    devices = tuple(d for d in cluster.devices if d.like is None)
    if len(devices) < 2 or any(d.kind not in ("cpu", "cuda") for d in devices):
        return ()
    return corpus.links(cluster) or measure_links(Cluster("here", devices))
