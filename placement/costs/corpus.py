"""What was measured on any machine, kept in one SQLite file: the memory of all profiles.

One row per operator signature, device and graph, with the summary of its repeats. A device is
known by what it is (kind, model, threads, the machine's processor, cores and version of torch),
never by its name or the host's, so two machines of one name are never mixed up.
"""

from __future__ import annotations

import hashlib
import io
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from placement.cluster import Cluster, Device, Link
from placement.costs.predictors import Floats, Sample
from placement.graph import OpGraph
from placement.profile import Profile
from placement.tools.files import cache_folder

VERSION = 1
_TABLES = """
CREATE TABLE graphs (fingerprint TEXT PRIMARY KEY, name TEXT NOT NULL, arrays BLOB NOT NULL);
CREATE TABLE devices (signature TEXT PRIMARY KEY, machine TEXT NOT NULL, device TEXT NOT NULL);
CREATE TABLE operators (
    signature TEXT NOT NULL,            -- of the operator: kind, shapes, dtypes
    device TEXT NOT NULL REFERENCES devices(signature),
    graph TEXT NOT NULL REFERENCES graphs(fingerprint),
    instances INTEGER NOT NULL,         -- operators of that signature in the graph
    repeats INTEGER NOT NULL,
    compute_s REAL NOT NULL,            -- mean over the instances of the median over repeats
    spread_s REAL NOT NULL,
    loaded_s REAL,                      -- NULL where not measured
    measured_at TEXT NOT NULL,
    PRIMARY KEY (signature, device, graph)
) WITHOUT ROWID;
CREATE TABLE links (
    machine TEXT NOT NULL, devices TEXT NOT NULL, graph TEXT NOT NULL, links TEXT NOT NULL,
    PRIMARY KEY (machine, devices, graph)
) WITHOUT ROWID;
"""


class CorpusError(ValueError):
    """The store cannot be read or written; the message says which file and what to do."""


@dataclass(frozen=True)
class Corpus:
    """A store of measurements in one file, made when something is first added.

    Attributes:
        path: of the file.
    """

    path: Path

    @classmethod
    def default(cls) -> Corpus:
        """The store that every profile of this user feeds, beside the saved profiles."""
        return cls(cache_folder() / "corpus.sqlite")

    def add(self, graph: OpGraph, cluster: Cluster, profile: Profile) -> int:
        """Keep what ``profile`` has measured; returns the number of rows.

        An older measurement of the same graph on the same device is replaced. Predicted entries
        and devices that are only described (``like``) are left out.

        Raises:
            CorpusError: the file cannot be written, or is not a store.
        """
        profile.check(graph)
        machine = machine_of(profile.provenance)
        facts = profile.provenance
        repeats, when = int(facts.get("repeats", 1)), str(facts.get("when", ""))
        predicted = profile.predicted
        rows, devices = [], []
        for device in cluster.devices:
            if device.like is not None:
                continue
            d = profile.device_names.index(device.name)
            signature = device_signature(device, machine)
            measured = np.isfinite(profile.compute_s[:, d])
            if predicted is not None:
                measured &= ~predicted[:, d]
            members: dict[str, list[int]] = {}
            for n in np.flatnonzero(measured).tolist():
                members.setdefault(graph.op_signature[n], []).append(n)
            if members:
                devices.append((signature, machine, json.dumps(asdict(device))))
            for operator, ops in members.items():
                means = [
                    None if seconds is None else float(seconds[ops, d].mean())
                    for seconds in (profile.compute_s, profile.spread_s, profile.loaded_s)
                ]
                where = operator, signature, graph.fingerprint
                rows.append((*where, len(ops), repeats, *means, when))
        if not rows:
            return 0
        links = json.dumps([asdict(x) for x in profile.links])
        with self._open(write=True) as store:
            store.execute(
                "INSERT OR REPLACE INTO graphs VALUES (?, ?, ?)",
                (graph.fingerprint, graph.name, _packed(graph)),
            )
            store.executemany("INSERT OR REPLACE INTO devices VALUES (?, ?, ?)", devices)
            store.executemany(
                f"INSERT OR REPLACE INTO operators VALUES ({', '.join('?' * 9)})", rows
            )
            if profile.links:
                store.execute(
                    "INSERT OR REPLACE INTO links VALUES (?, ?, ?, ?)",
                    (machine, _group(cluster), graph.fingerprint, links),
                )
        return len(rows)

    def samples(self, machine: str | None = None) -> tuple[Sample, ...]:
        """Every graph on every device that has measured each of its operators.

        Args:
            machine: only of this one (see ``machine_of``); None: of all.

        Raises:
            CorpusError: the file is damaged, or of another version.
        """
        with self._open() as store:
            if store is None:
                return ()
            graphs = {
                key: _unpacked(name, arrays)
                for key, name, arrays in store.execute("SELECT * FROM graphs ORDER BY fingerprint")
            }
            devices = {
                signature: Device(**_device(text))
                for signature, of, text in store.execute("SELECT * FROM devices")
                if machine in (None, of)
            }
            rows: dict[tuple[str, str], dict[str, tuple[float, float, float]]] = {}
            measured = store.execute(
                "SELECT graph, device, signature, compute_s, spread_s, loaded_s FROM operators"
            )
            for graph, device, operator, compute, spread, loaded in measured:
                beside = np.nan if loaded is None else loaded
                rows.setdefault((graph, device), {})[operator] = (compute, spread, beside)
        samples = []
        for (graph, device), values in sorted(rows.items()):
            if device not in devices or not set(graphs[graph].op_signature) <= values.keys():
                continue
            table = np.array([values[s] for s in graphs[graph].op_signature])
            samples.append(Sample(graphs[graph], devices[device], *table.T))
        return tuple(samples)

    def known(self, graph: OpGraph, device: Device, machine: str) -> tuple[Floats, Floats]:
        """What is known of operators with the signatures of ``graph`` from any graph.

        Returns:
            Seconds float64 ``[N]``, nan where the signature was never measured on such a device,
            and their spread: over repeats, and between graphs where there are several.

        Raises:
            CorpusError: the file is damaged, or of another version.
        """
        rows: dict[str, list[tuple[float, float]]] = {}
        with self._open() as store:
            measured = (
                ()
                if store is None
                else store.execute(
                    "SELECT signature, compute_s, spread_s FROM operators WHERE device = ?",
                    (device_signature(device, machine),),
                )
            )
            for signature, compute, spread in measured:
                rows.setdefault(signature, []).append((compute, spread))
        seconds, spreads = np.full(graph.num_ops, np.nan), np.full(graph.num_ops, np.nan)
        for n, signature in enumerate(graph.op_signature):
            if signature in rows:
                times, within = np.array(rows[signature]).T
                seconds[n] = np.median(times)
                spreads[n] = np.hypot(within.mean(), times.std())
        return seconds, spreads

    def links(self, cluster: Cluster, machine: str) -> tuple[Link, ...]:
        """Links between the measured devices of ``cluster``: medians over graphs; () if unknown.

        Raises:
            CorpusError: the file is damaged, or of another version.
        """
        with self._open() as store:
            if store is None:
                return ()
            texts = store.execute(
                "SELECT links FROM links WHERE machine = ? AND devices = ?",
                (machine, _group(cluster)),
            ).fetchall()
        pairs: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for (text,) in texts:
            for link in json.loads(text):
                pairs.setdefault((link["src"], link["dst"]), []).append(link)
        numbers = [x.name for x in fields(Link) if x.type == "float"]

        def median(all_: list[dict[str, Any]], key: str) -> float:
            return float(np.median([x.get(key, 0.0) for x in all_]))  # older ones lack some

        return tuple(
            Link(**(all_[0] | {key: median(all_, key) for key in numbers}))
            for all_ in pairs.values()
        )

    @contextmanager
    def _open(self, write: bool = False) -> Iterator[Any]:
        """A connection whose changes are kept together or not at all; None if there is no file."""
        if not write and not self.path.exists():
            yield None
            return
        store = None
        try:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CorpusError(
                    f"{self.path.parent}: measurements cannot be kept there ({error.strerror}); "
                    "set PLACEMENT_HOME to a folder of yours"
                ) from error
            store = sqlite3.connect(self.path, timeout=30.0)
            with store:
                if write:
                    store.execute("BEGIN IMMEDIATE")  # two profiles may be the first
                version = store.execute("PRAGMA user_version").fetchone()[0]
                empty = not store.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
                if empty and write:
                    for statement in _TABLES.split(";"):
                        store.execute(statement)
                    store.execute(f"PRAGMA user_version = {VERSION}")
                elif empty:
                    yield None
                    return
                elif version != VERSION:
                    raise CorpusError(
                        f"{self.path}: a store of version {version}, this program reads "
                        f"{VERSION}; move it away and measure again: placement profile MODEL"
                    )
                yield store
        except (sqlite3.Error, OSError) as error:
            if "full" in str(error):  # SQLite's words; it is not damaged
                raise CorpusError(f"{self.path}: {error}: free some space") from error
            raise CorpusError(
                f"{self.path}: not a readable store of measurements ({error}); move it away, it "
                "is filled again by: placement profile MODEL; or set PLACEMENT_HOME to another "
                "folder"
            ) from error
        finally:
            if store is not None:
                store.close()


def machine_of(provenance: dict[str, Any]) -> str:
    """Identity (16 hex digits) of the machine that a profile's provenance tells of.

    Processor, cores and version of torch; the host's name is no part of it.
    """
    facts = [provenance.get(key) for key in ("cpu", "cores", "torch")]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def this_machine() -> str:
    """``machine_of`` what is measured here."""
    import os

    import torch

    from placement.cluster import cpu_model

    return machine_of({"cpu": cpu_model(), "cores": os.cpu_count(), "torch": torch.__version__})


def device_signature(device: Device, machine: str) -> str:
    """What a device is, whatever its name: machine, kind, model and threads."""
    facts = [machine, device.kind, device.model or "", device.threads]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _group(cluster: Cluster) -> str:
    devices = [d for d in cluster.devices if d.like is None]
    return json.dumps([[d.name, d.kind, d.cores, d.threads, d.model] for d in devices])


def _device(text: str) -> dict[str, Any]:
    names = {f.name for f in fields(Device)}
    values = {key: value for key, value in json.loads(text).items() if key in names}
    return values | {"cores": tuple(values.get("cores", ()))}


_TEXTS = ("op_name", "op_kind", "op_module", "op_signature")


def _packed(graph: OpGraph) -> bytes:
    """The graph as ``.npz`` (arrays and JSON text, no pickle)."""
    texts = {key: getattr(graph, key) for key in _TEXTS}
    arrays = {
        f.name: getattr(graph, f.name)
        for f in fields(graph)
        if f.name not in (*_TEXTS, "name", "program")
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, texts=np.array(json.dumps(texts)), **arrays)
    return buffer.getvalue()


def _unpacked(name: str, data: bytes) -> OpGraph:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            texts = json.loads(str(arrays["texts"]))
            values: dict[str, Any] = {key: arrays[key] for key in arrays.files if key != "texts"}
        values |= {key: tuple(texts[key]) for key in _TEXTS}
        return OpGraph(name, **values)
    except Exception as error:  # zip, json and numpy each raise their own kinds
        raise sqlite3.DatabaseError(f"graph {name!r} is damaged: {error}") from error
