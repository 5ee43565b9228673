"""What was measured on any machine: a problem file for each profile, the memory of all of them.

A folder for each machine, in it files as a data set has them (``placement.workloads.dataset``):
every command that takes a problem takes one. A machine is known by its processor, cores and version
of torch, a device by its kind, model and threads, never by a name: two machines of one name are
never mixed up.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from placement import importers
from placement.cluster import Cluster, Device, Link, cpu_model
from placement.costs.predictors import Floats, Sample
from placement.graph import OpGraph
from placement.problem import Problem, ProblemError
from placement.profile import Profile
from placement.tools.files import FileError, cache_folder

_FOLDER = "measured"


class CorpusError(ValueError):
    """A file of measurements cannot be read; the message says which, and what to do."""


def remember(
    graph: OpGraph, cluster: Cluster, profile: Profile, folder: str | Path | None = None
) -> None:
    """Keep what was measured for predictions of other models; a warning where that fails.

    Devices that are only described (``like``) are left out. A profile of which a part is predicted
    is kept beside earlier ones of the same graph and devices, a whole one in their place.
    """
    devices, predicted = tuple(d for d in cluster.devices if d.like is None), profile.predicted
    if not devices or (predicted is not None and predicted.all()):
        return
    here = Cluster(cluster.name, devices)
    home = Path(folder or cache_folder()) / _FOLDER / machine_of(profile.provenance)
    name = f"{graph.fingerprint[:16]}-{_digest(_facts(here))}"
    parts = list(home.glob(f"{name}-*{importers.SUFFIX}"))
    whole = predicted is None or not predicted.any()
    path = home / f"{name}{'' if whole else f'-{len(parts)}'}{importers.SUFFIX}"
    try:
        problem = Problem(graph.without_program(), here, profile.for_cluster(here))
        importers.save(problem, path)
        for old in parts if whole else ():
            old.unlink(missing_ok=True)
    except (FileError, importers.FormatError, ProblemError, OSError) as error:
        warnings.warn(
            f"predictors will not know this profile: {error}; or set PLACEMENT_HOME to a folder "
            "of yours",
            stacklevel=3,
        )


@dataclass(frozen=True, eq=False)
class Corpus:
    """All that one machine has measured.

    Attributes:
        problems: graphs with their devices and times, the latest last.
    """

    problems: tuple[Problem, ...]

    @classmethod
    def of(cls, machine: str) -> Corpus:
        """What was kept of a machine (see ``machine_of``).

        Raises:
            CorpusError: a file is damaged, or of another version.
        """
        problems = []
        for path in sorted((cache_folder() / _FOLDER / machine).glob(f"*{importers.SUFFIX}")):
            try:
                problems.append(importers.load(path))
            except importers.FormatError as error:
                raise CorpusError(
                    f"{error}; remove that file, and measure again: placement profile MODEL"
                ) from error
        return cls(tuple(sorted(problems, key=lambda p: str(p.profile.provenance.get("when")))))

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Every graph on every device that has measured each of its operators."""
        graphs = {p.graph.fingerprint: p.graph for p in self.problems}
        devices = {_kind(d): d for p in self.problems for d in p.cluster.devices}
        return tuple(
            Sample(graphs[graph], devices[kind], *np.array([rows[s] for s in signatures]).T)
            for (graph, kind), rows in sorted(self._rows.items())
            if rows.keys() >= set(signatures := graphs[graph].op_signature)
        )

    @cached_property
    def _rows(self) -> dict[tuple[str, str], dict[str, list[float]]]:
        """By graph, kind of device, and signature: seconds, spread, seconds beside busy devices.

        They are means over the operators of a signature, nan where not known. Of a graph on devices
        that are alike the latest measurement counts.
        """
        every: dict[tuple[str, str], dict[str, list[float]]] = {}
        for graph, profile, cluster in ((p.graph, p.profile, p.cluster) for p in self.problems):
            measured = np.isfinite(profile.compute_s)
            if profile.predicted is not None:
                measured &= ~profile.predicted
            columns = (profile.compute_s, profile.spread_s, profile.loaded_s)
            for d, device in enumerate(cluster.devices):
                ops: dict[str, list[int]] = {}
                for n in np.flatnonzero(measured[:, d]).tolist():
                    ops.setdefault(graph.op_signature[n], []).append(n)
                every.setdefault((graph.fingerprint, _kind(device)), {}).update({
                    signature: [np.nan if x is None else float(x[at, d].mean()) for x in columns]
                    for signature, at in ops.items()
                })  # fmt: skip
        return every

    def known(self, graph: OpGraph, device: Device) -> tuple[Floats, Floats]:
        """What is known of operators with the signatures of ``graph`` from any graph.

        Returns:
            Seconds float64 ``[N]``, nan where the signature was never measured on such a device,
            and their spread: over repeats, and between graphs where there are several.
        """
        parts = [rows for (_, kind), rows in self._rows.items() if kind == _kind(device)]
        seconds, spreads = np.full((2, graph.num_ops), np.nan)
        for n, signature in enumerate(graph.op_signature):
            if each := [rows[signature] for rows in parts if signature in rows]:
                times, within, _ = np.array(each).T
                seconds[n] = np.median(times)
                spreads[n] = np.hypot(within.mean(), times.std())
        return seconds, spreads

    def links(self, cluster: Cluster) -> tuple[Link, ...]:
        """Links between the measured devices of ``cluster``: medians over graphs; () if unknown."""
        alike = [p for p in self.problems if _facts(p.cluster) == _facts(cluster)]
        pairs: dict[tuple[str, str], list[Link]] = {}
        for p in {p.graph.fingerprint: p for p in alike}.values():
            for link in p.profile.links:
                pairs.setdefault((link.src, link.dst), []).append(link)
        numbers = [x.name for x in fields(Link) if x.type == "float"]
        return tuple(
            replace(each[0], **{k: np.median([getattr(x, k) for x in each]) for k in numbers})
            for each in pairs.values()
        )


def machine_of(provenance: dict[str, Any]) -> str:
    """Identity (16 hex digits) of the machine that a profile's provenance tells of.

    Processor, cores and version of torch; the host's name is no part of it.
    """
    return _digest([provenance.get(key) for key in ("cpu", "cores", "torch")])


def this_machine() -> str:
    """``machine_of`` what is measured here."""
    import torch

    return machine_of({"cpu": cpu_model(), "cores": os.cpu_count(), "torch": torch.__version__})


def _kind(device: Device) -> str:
    """What a device is, whatever its name."""
    return json.dumps([device.kind, device.model, device.threads])


def _facts(cluster: Cluster) -> list[Any]:
    """Of the devices that are not only described: which they are."""
    devices = (d for d in cluster.devices if d.like is None)
    return [[d.name, d.kind, d.cores, d.threads, d.model] for d in devices]


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
