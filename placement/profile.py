"""Measured (or imported, or predicted) costs of a graph's operators on a cluster's devices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.cluster import Cluster, Link, from_record
from placement.graph import OpGraph
from placement.tools.files import parse_json, read_arrays, short, write_arrays
from placement.tools.limits import MOST

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]

ARRAYS: dict[str, tuple[type, str]] = {  # their types, and their axes: as in ``Profile``
    "compute_s": (np.float64, "ND"),
    "spread_s": (np.float64, "ND"),
    "loaded_s": (np.float64, "ND"),
    "transfer_s": (np.float64, "TDD"),
    "io_s": (np.float64, "TD"),
    "workspace_bytes": (np.int64, "N"),
    "library_bytes": (np.int64, "ND"),
    "overhead_s": (np.float64, "D"),
    "predicted": (np.bool_, "ND"),
}


class ProfileError(ValueError):
    """The profile does not fit, is damaged, or lacks a measurement."""


def _check(
    what: str, array: NDArray[Any], shape: Sequence[int | None], excused: NDArray[np.bool_] | bool
) -> None:
    """Raise unless ``array`` has this shape, and holds sizes (times, bytes) where not excused."""
    if len(shape) != array.ndim or any(
        x not in (None, y) for x, y in zip(shape, array.shape, strict=True)
    ):
        expected = ", ".join("T" if x is None else str(x) for x in shape)
        raise ProfileError(f"{what} has shape {array.shape}, expected [{expected}]")
    limit, unit = MOST.seconds, "a time in seconds"
    if what.endswith("_bytes"):
        limit, unit = MOST.graph_bytes, "a number of bytes"
    bad = ~((array >= 0) & (array <= limit) | excused)  # comparisons with NaN are false
    if bad.any():
        at = tuple(np.argwhere(bad)[0].tolist())
        raise ProfileError(f"{what}{list(at)} = {array[at]} is not {unit} of 0 to {limit:g}")


@dataclass(frozen=True, eq=False)
class Profile:
    """Seconds per operator and device, link fits, and where they come from.

    Attributes:
        device_names: ``[D]``.
        compute_s: float64 ``[N, D]`` median seconds alone on the machine; inf = cannot run there,
            which no large number says (of any time at most 1e12 are allowed).
        spread_s: float64 ``[N, D]`` interquartile range over the repeats.
        loaded_s: float64 ``[N, D]`` seconds while every *other* device is busy too (shared
            caches, memory bandwidth, interpreter), or None where that was not measured.
        links: fitted links; a missing pair costs nothing.
        batch_s: seconds that each micro-batch of a pipelined run costs the devices together,
            besides its operators: to be let in, and to hand its results out.
        transfer_s: float64 ``[T, D, D]`` seconds per tensor and device pair, for workloads
            that give a matrix instead of bytes and links; replaces ``links``.
        io_s: float64 ``[T, D]`` seconds a device needs to write a tensor to host memory, or to
            read it from there (0 where it shares that memory), for workloads that state it;
            the analytic objectives use it (see ``placement.simulator.analytic``).
        workspace_bytes: int64 ``[N]`` memory an operator needs only while it runs.
        library_bytes: int64 ``[N, D]`` memory that libraries keep once an operator has run on a
            device, one and the same for all (see ``Problem.resident_bytes_on``).
        overhead_s: float64 ``[D]`` seconds that a call takes besides its first operator to its
            last where all is on that device: to wake it and to hand inputs and results over (see
            ``Problem.overhead_s``).
        predicted: bool ``[N, D]`` entries that were predicted, not measured.
        graph_fingerprint: of the measured graph.
        provenance: when, where, versions, repeats, ``order``.
    """

    device_names: tuple[str, ...]
    compute_s: Floats
    spread_s: Floats
    links: tuple[Link, ...] = ()
    loaded_s: Floats | None = None
    batch_s: float = 0.0
    transfer_s: Floats | None = None
    io_s: Floats | None = None
    workspace_bytes: NDArray[np.int64] | None = None
    library_bytes: NDArray[np.int64] | None = None
    overhead_s: Floats | None = None
    predicted: NDArray[np.bool_] | None = None
    graph_fingerprint: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_names", tuple(self.device_names))
        if np.ndim(self.compute_s) != 2 or np.shape(self.compute_s)[1] != len(self.device_names):
            raise ProfileError(
                f"compute_s has shape {np.shape(self.compute_s)}, expected "
                f"[N, {len(self.device_names)}] for devices {list(self.device_names)}"
            )
        n, d = np.shape(self.compute_s)
        cannot = np.isposinf(self.compute_s)
        # What the kernels read without looking: shape, and which entries need not be a time. And
        # one memory layout: for another one they would be compiled again, and within a budget.
        sizes = {"N": n, "D": d, "T": None}
        for what, (dtype, axes) in ARRAYS.items():
            array = getattr(self, what)
            if array is not None:
                array = np.require(array, dtype, ["C", "W"])
                any_value = what in ("spread_s", "predicted")
                excused = cannot if what in ("compute_s", "loaded_s") else any_value
                _check(what, array, [sizes[axis] for axis in axes], excused)
                object.__setattr__(self, what, array)
        if not 0 <= self.batch_s < MOST.seconds:
            raise ProfileError(f"batch_s = {self.batch_s} is not a time below {MOST.seconds:g} s")
        stuck = np.flatnonzero(np.isinf(self.compute_s).all(axis=1))
        if len(stuck):
            raise ProfileError(f"operator {int(stuck[0])} can run on no device of the profile")

    @property
    def order(self) -> str:
        """In which order the operators ran, and will: ``"rank"``, ``"reuse"``, ``"graph"`` or
        ``"even"``.

        See ``Problem.priority``.
        """
        return str(self.provenance.get("order", "rank"))

    @property
    def error(self) -> float:
        """By which share predictions of placements miss what runs; 0 where none were run.

        On average over placements that ran for the profile, one relative to another (see
        ``costs.calibration.calibrated``): of two values that differ by less, either may be the
        better one.
        """
        return error_in(self.provenance)

    def for_cluster(self, cluster: Cluster) -> Profile:
        """This profile with the columns of ``cluster``, in its order.

        A device that ``streams`` has the column of the one that it shares.
        A device with ``like``/``speed`` is scaled from the measured device it names, and has
        its links; links that the cluster declares replace measured ones. Two devices like the
        same one have no measured link: it costs nothing unless it is declared.

        Raises:
            ProfileError: a device of the cluster was not measured.
        """
        columns, factors = [], []
        workers = [cluster.devices[w] for w in cluster.worker]
        for device in workers:
            source = device.measured_as
            if source not in self.device_names:
                like = f" is like {source!r}, which" if source != device.name else ""
                raise ProfileError(
                    f"device {device.name!r}{like} was not measured (profile has "
                    f"{list(self.device_names)}); run: placement profile, or give it "
                    f"'like: <measured device>' and 'speed: <factor>', or predict it: "
                    "--predict roofline"
                )
            columns.append(self.device_names.index(source))
            factors.append(1.0 / device.speed if source == device.like else 1.0)
        scale = np.asarray(factors)
        measured = {(x.src, x.dst): x for x in self.links}
        links = [
            replace(measured[pair], src=a.name, dst=b.name)
            for i, a in enumerate(cluster.devices if measured else ())
            for j, b in enumerate(cluster.devices)
            if (pair := (workers[i].measured_as, workers[j].measured_as)) in measured
            and not cluster.joins[i, j]
        ]
        taken = self.take(columns, cluster.device_names, (*links, *cluster.links))
        return replace(
            taken,
            compute_s=taken.compute_s * scale,
            spread_s=taken.spread_s * scale,
            loaded_s=None if taken.loaded_s is None else taken.loaded_s * scale,
        )

    def take(
        self, columns: Sequence[int] | Ints, names: Sequence[str], links: Iterable[Link]
    ) -> Profile:
        """The profile of devices of these ``names``, each as that of a column, with ``links``."""

        arrays = {what: array for what in ARRAYS if (array := getattr(self, what)) is not None}
        for what in arrays:
            for axis in (i for i, size in enumerate(ARRAYS[what][1]) if size == "D"):
                arrays[what] = arrays[what].take(columns, axis)
        return replace(self, device_names=tuple(names), links=tuple(links), **arrays)

    def check(self, graph: OpGraph) -> None:
        """Raise ``ProfileError`` unless this profile was made for ``graph``."""
        if self.compute_s.shape[0] != graph.num_ops:
            raise ProfileError(
                f"profile has {self.compute_s.shape[0]} operators, graph {graph.name!r} has "
                f"{graph.num_ops}; measure it: placement profile"
            )
        for what in ("transfer_s", "io_s"):
            array = getattr(self, what)
            if array is not None and len(array) != graph.num_tensors:
                raise ProfileError(
                    f"{what} is for {len(array)} tensors, graph {graph.name!r} has "
                    f"{graph.num_tensors}"
                )
        if self.graph_fingerprint and self.graph_fingerprint != graph.fingerprint:
            raise ProfileError(
                f"profile is of graph {self.graph_fingerprint[:12]}, not of {graph.name!r} "
                f"{graph.fingerprint[:12]}; measure it: placement profile"
            )

    def save(self, path: str | Path) -> None:
        """Write one ``.npz`` file, atomically (arrays and JSON text; no pickle).

        Raises:
            FileError: the folder is read-only, or the disk is full.
        """
        arrays = {k: getattr(self, k) for k in ARRAYS if getattr(self, k) is not None}
        head = json.dumps(
            {
                "device_names": self.device_names,
                "links": [asdict(x) for x in self.links],
                "batch_s": self.batch_s,
                "graph_fingerprint": self.graph_fingerprint,
                "provenance": self.provenance,
            }
        )
        write_arrays(path, head=np.array(head), **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a file written by ``save``.

        Raises:
            ProfileError: missing, truncated or not a profile.
        """
        try:
            arrays = read_arrays(path)
            head = parse_json(str(arrays.pop("head")), infinite=True)
            for what, kind in (("device_names", list), ("links", list), ("provenance", dict)):
                if not isinstance(head[what], kind):
                    raise ValueError(f"{what} = {short(head[what])} is of another kind")
            if not all(
                isinstance(x, str) for x in (head["graph_fingerprint"], *head["device_names"])
            ):
                raise ValueError("graph_fingerprint and device_names must be texts")
            lacking = [k for k in ("compute_s", "spread_s") if k not in arrays]
            strange = sorted(set(arrays) - set(ARRAYS))
            if lacking or strange:
                raise ValueError(f"it lacks {lacking}" if lacking else f"unknown arrays {strange}")
            return cls(
                device_names=tuple(head["device_names"]),
                links=tuple(from_record(Link, x) for x in head["links"]),
                batch_s=head.get("batch_s", 0.0),  # profiles of before have none
                graph_fingerprint=head["graph_fingerprint"],
                provenance=head["provenance"],
                **arrays,
            )
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}; measure again: placement profile") from error
        except OSError as error:
            raise ProfileError(f"{path}: cannot be read: {error.strerror or error}") from error
        except Exception as error:  # zip, json and numpy each raise their own kinds
            raise ProfileError(
                f"{path}: not a readable profile ({error}); measure again: placement profile"
            ) from error


def error_in(provenance: Mapping[str, Any]) -> float:
    """``Profile.error`` of a profile with this provenance."""
    error = provenance.get("error", 0.0)
    return float(error) if isinstance(error, int | float) and 0 <= error < np.inf else 0.0
