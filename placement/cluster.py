"""Devices and the links between them, detected on this machine or described in YAML."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from itertools import permutations
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from placement.devices import library, nearest
from placement.tools.files import parse_yaml, read_text, short, write_atomic
from placement.tools.limits import MOST

Floats = NDArray[np.float64]

_RANGES: dict[str, tuple[float, float]] = {  # of what is said of a device
    "threads": (1, MOST.threads),
    "memory_bytes": (1, 2**63 - 1),
    "speed": (1e-30, 1e30),
    "busy_w": (0, 1e30),
    "idle_w": (0, 1e30),
    "flops_per_s": (1e-30, 1e30),
    "bytes_per_s": (1e-30, 1e30),
    "call_s": (0, 1e30),
    "ring_latency_s": (0, MOST.seconds),
    "ring_bytes_per_s": (1e-30, 1e30),
    "buffer_bytes": (1, 2**63 - 1),
    "pinned_bytes": (1, 2**63 - 1),
}
_WHOLE = {"threads", "memory_bytes", "buffer_bytes", "pinned_bytes"}
_ELSEWHERE = re.compile(r"(.*/)?(cpu|cuda):[0-9]+")  # a device that was measured on another machine
_NUMBER = int | float | np.number
_WORDS = {str: "a text: write it in quotes", int: "a whole number", bool: "true or false"}


class ClusterError(ValueError):
    """The cluster description is wrong; the message names the file, the field and the value."""


@dataclass(frozen=True)
class Device:
    """A serial worker: a pinned group of CPU cores, or one accelerator.

    Attributes:
        name: unique, e.g. ``cpu:0``, ``cuda:0``.
        kind: ``cpu`` (shares host memory with every other CPU device), ``cuda``, or any
            other word for a device that can only be simulated.
        cores: CPU core numbers the worker is pinned to (empty: not pinned); of a CUDA device,
            those of the threads that launch its operators and wait for it.
        threads: intra-operator threads.
        memory_bytes: capacity for parameters, activations and workspace.
        busy_w, idle_w: watts while working and while waiting; None if unknown.
        power_source: where watts come from: ``declared``, or ``measured`` by
            ``placement.costs.power.measured``.
        like, speed: a device that is not at hand: ``speed`` times as fast as device ``like``,
            one that was measured or one of the library (``nvidia/l4``, see ``placement.devices``).
        flops_per_s, bytes_per_s, call_s: peak rates of any type, of its memory, and seconds to
            start an operator, for predictions; None: those of the library, or as measured here.
        model: of the processor or accelerator, as the machine calls it.
        streams: the device whose memory and time it shares: an operator that is placed here runs
            there, but its parameters stay in host memory, and are copied while those before it run
            (see ``Problem.worker``). None: a device of its own.
        members, ring_latency_s, ring_bytes_per_s: of a group of alike devices that compute each
            layer together (``placement.costs.groups``): their names, and the slowest link of the
            ring over which results are added up (None: unlimited). Memory and watts are those of
            all together, everything else is of each.
        buffer_bytes: of a device that streams: memory of the other one for what was copied and is
            still needed; None: twice the parameters of the operator that has most there.
        pinned_bytes: of a CPU: how much of its memory devices may stream from, which is page-locked
            then (in equal parts, if several stream); None: all.
    """

    name: str
    kind: str = "cpu"
    cores: tuple[int, ...] = ()
    threads: int = 1
    memory_bytes: int = 2**63 - 1
    busy_w: float | None = None
    idle_w: float | None = None
    like: str | None = None
    speed: float = 1.0
    model: str = ""
    power_source: str = "declared"
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    call_s: float | None = None
    streams: str | None = None
    members: tuple[str, ...] = ()
    ring_latency_s: float = 0.0
    ring_bytes_per_s: float | None = None
    buffer_bytes: int | None = None
    pinned_bytes: int | None = None

    def __post_init__(self) -> None:
        for what, (least, most) in _RANGES.items():
            value = getattr(self, what)
            is_number = isinstance(value, _NUMBER) and least <= value <= most  # false of NaN
            if value is not None and not is_number:
                raise ClusterError(
                    f"device {short(self.name)}: {what} = {short(value)}, must be from {least} to "
                    f"{most}"
                )
            if isinstance(value, np.number):  # which no file can hold
                object.__setattr__(self, what, value := value.item())
            if isinstance(value, float) and what in _WHOLE:
                if value % 1:
                    raise ClusterError(
                        f"device {short(self.name)}: {what} = {value}, must be a whole number"
                    )
                object.__setattr__(self, what, int(value))
        if not all(0 <= core < MOST.threads for core in self.cores):
            raise ClusterError(
                f"device {short(self.name)}: cores = {short(self.cores)}, must be from 0 to "
                f"{MOST.threads - 1}"
            )
        for what, owner, is_owner in (
            ("buffer_bytes", "streams another", self.streams is not None),
            ("pinned_bytes", "is of kind cpu", self.kind == "cpu"),
        ):
            if getattr(self, what) is not None and not is_owner:
                raise ClusterError(
                    f"device {short(self.name)}: {what} = {short(getattr(self, what))} is said of "
                    f"a device that {owner}, which this one is not"
                )
        if self.power_source not in ("declared", "measured"):
            raise ClusterError(
                f"device {self.name!r}: power_source = {self.power_source!r}, must be declared or "
                "measured"
            )

    @property
    def measured_as(self) -> str:
        """The device that it is ``like``, unless that is one of the library; else itself."""
        return self.name if self.like is None or self.like in library() else self.like


@dataclass(frozen=True, eq=False)
class Power:
    """What ``D`` devices draw, float64 ``[D]`` each; see ``Device``."""

    busy_w: Floats
    idle_w: Floats

    @classmethod
    def of(cls, devices: Sequence[Device]) -> Power:
        """Watts that are not known are nan."""
        watts = [[d.busy_w for d in devices], [d.idle_w for d in devices]]
        return cls(*np.array(watts, np.float64))

    def energy_j(self, run_s: Floats | float, busy_s: Floats) -> Floats:
        """Joules of runs of ``run_s [..]``, in which devices were busy for ``busy_s [.., D]``."""
        waiting_s = np.maximum(np.asarray(run_s)[..., None] - busy_s, 0.0)
        joules: Floats = busy_s @ self.busy_w + waiting_s @ self.idle_w
        return joules


@dataclass(frozen=True)
class Link:
    """One direction between two devices: ``latency_s + bytes / bandwidth_bytes_per_s``.

    ``src`` and ``dst`` are names of devices, or patterns in which ``*`` stands for any text: the
    link then joins every device of the one with every device of the other. Of several links of
    the same pair the last one counts: ``* -> *`` may come first, ``node0/* -> node0/*`` later.

    Links with the same ``channel`` name share one serial channel; without a name each
    ordered pair is its own. ``blocking``: the sender's worker is busy meanwhile. ``wake_s``: how
    long it is kept busy by handing a tensor to a worker that waits idle, and so must be woken;
    ``send_s + bytes * send_s_per_byte``: by handing over any tensor. ``receive_s``: how much longer
    the receiver's worker takes for the first operator that reads what arrives.
    """

    src: str
    dst: str
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = float("inf")
    blocking: bool = False
    channel: str | None = None
    wake_s: float = 0.0
    send_s: float = 0.0
    send_s_per_byte: float = 0.0
    receive_s: float = 0.0

    def __post_init__(self) -> None:
        names = ("latency_s", "wake_s", "send_s", "send_s_per_byte", "receive_s")
        costs = {name: getattr(self, name) for name in names}
        speed = self.bandwidth_bytes_per_s
        # Comparisons with NaN are false.
        are_times = all(isinstance(x, _NUMBER) and 0 <= x < MOST.seconds for x in costs.values())
        if not (are_times and isinstance(speed, _NUMBER) and speed > 1 / MOST.seconds):
            each = ", ".join(f"{name} = {x}" for name, x in costs.items())
            raise ClusterError(
                f"link {self.src} -> {self.dst}: {each} must be >= 0 and below {MOST.seconds:g}, "
                f"and bandwidth_bytes_per_s = {speed} must be > 0 (a link that must not be used: a "
                "latency of hours)"
            )
        for name in (*names, "bandwidth_bytes_per_s"):
            if isinstance(value := getattr(self, name), np.number):
                object.__setattr__(self, name, value.item())


Ends = tuple[int | NDArray[np.intp], int | NDArray[np.intp], Link]


def pairs_of(links: Iterable[Link], names: Sequence[str]) -> Iterator[Ends]:
    """Each link with the numbers of its devices: ``matrix[a, b]`` are the pairs that it joins.

    Raises:
        ClusterError: an end that is no device.
    """
    number = {name: d for d, name in enumerate(names)}

    @cache
    def end(text: str) -> int | NDArray[np.intp]:
        return number[text] if text in number else np.array(_matching(text, names), np.intp)

    for link in links:
        a, b = end(link.src), end(link.dst)
        for text, matched in ((link.src, a), (link.dst, b)):
            if not (isinstance(matched, int) or len(matched)):
                raise ClusterError(
                    f"link {link.src} -> {link.dst}: no device {text!r}; devices are "
                    f"{short(list(names), 200)}"
                )
        yield a if isinstance(a, int) else a[:, None], b, link


def joined(ends: Iterable[Ends], num_devices: int) -> NDArray[np.bool_]:
    """bool ``[D, D]``: a link joins the one device with the other."""
    pairs = np.zeros((num_devices, num_devices), bool)
    for a, b, _ in ends:
        pairs[a, b] = True
    return pairs


def with_hosts(devices: Iterable[Device]) -> list[Device]:
    """Of the devices that are left those that still have what they need.

    One that streams needs the device that it streams for, and one whose memory it streams from.
    """
    left = [*devices]
    names, hosted = {d.name for d in left}, any(d.kind == "cpu" for d in left)
    return [d for d in left if not d.streams or (hosted and d.streams in names)]


def between(links: Iterable[Link], names: Sequence[str]) -> tuple[Link, ...]:
    """Those of the links that join devices where only ``names`` are left."""
    known = set(names)

    @cache
    def is_left(text: str) -> bool:
        return text in known or bool(_matching(text, names))

    return tuple(x for x in links if is_left(x.src) and is_left(x.dst))


def _matching(pattern: str, names: Sequence[str]) -> list[int]:
    """Those that ``pattern`` means: ``*`` is any text, everything else is itself."""
    matches = re.compile(fnmatch.translate(re.sub(r"[?[]", r"[\g<0>]", pattern))).match
    return [d for d, name in enumerate(names) if matches(name)]


@dataclass(frozen=True)
class Cluster:
    """Devices, and declared links where they are not measured (see ``Profile.links``)."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        for what, kind in (("devices", Device), ("links", Link)):
            values = tuple(getattr(self, what))
            object.__setattr__(self, what, values)
            for x in values:
                if not isinstance(x, kind):
                    raise ClusterError(
                        f"cluster {short(self.name)}: {what} holds {x!r:.60} (of type "
                        f"{type(x).__name__}), not a placement.{kind.__name__}"
                    )
        names = [d.name for d in self.devices]
        if not names:
            raise ClusterError(f"cluster {self.name!r} has no devices")
        if len(names) > MOST.devices:
            raise ClusterError(
                f"cluster {short(self.name)} has {len(names)} devices, at most {MOST.devices} are "
                "possible"
            )
        if len(set(names)) != len(names):
            raise ClusterError(
                f"cluster {short(self.name)}: device names repeat: {short(sorted(names))}"
            )
        for _ in pairs_of(self.links, self.device_names):
            pass  # says which end is no device
        real = {d.name for d in self.devices if d.kind != "cpu" and d.streams is None}
        for d in self.devices:
            if d.streams is not None and (d.streams not in real or d.kind == "cpu"):
                raise ClusterError(
                    f"device {short(d.name)}: streams = {short(d.streams)}, must name a device of "
                    f"this cluster with memory of its own: {short(sorted(real))}"
                )
            if d.streams is not None and all(x.kind != "cpu" for x in self.devices):
                raise ClusterError(
                    f"device {short(d.name)} streams from host memory: declare a device of kind cpu"
                )

    @property
    def num_devices(self) -> int:
        """``D``."""
        return len(self.devices)

    @property
    def device_names(self) -> tuple[str, ...]:
        """``[D]``."""
        return tuple(d.name for d in self.devices)

    def index(self, name: str) -> int:
        """Number of the device called ``name``.

        Raises:
            ClusterError: no such device.
        """
        if name not in self.device_names:
            raise ClusterError(
                f"no device {name!r} in cluster {self.name!r}; it has {list(self.device_names)}"
            )
        return self.device_names.index(name)

    @cached_property
    def joins(self) -> NDArray[np.bool_]:
        """bool ``[D, D]``: a link is declared from one device to the other."""
        return joined(pairs_of(self.links, self.device_names), self.num_devices)

    @cached_property
    def worker(self) -> NDArray[np.int32]:
        """int32 ``[D]``: the device that runs what is placed on each; itself, unless it streams."""
        return np.array([self.index(d.streams or d.name) for d in self.devices], np.int32)

    @property
    def streaming(self) -> list[int]:
        """Numbers of the devices whose parameters stay in host memory."""
        return [i for i, d in enumerate(self.devices) if d.streams is not None]

    @property
    def workers(self) -> Cluster:
        """Without the devices that stream: those that can be measured."""
        if not self.streaming:
            return self
        devices = tuple(d for d in self.devices if d.streams is None)
        return replace(self, devices=devices, links=between(self.links, [d.name for d in devices]))

    @cached_property
    def power(self) -> Power:
        """What the devices draw; watts that are not known are nan."""
        return Power.of(self.devices)

    @property
    def power_source(self) -> str | None:
        """Where the watts of all devices come from: ``measured``, ``declared``, None: unknown.

        One device whose watts are declared makes every sum of joules declared.
        """
        if any(d.busy_w is None or d.idle_w is None for d in self.devices):
            return None
        is_measured = all(d.power_source == "measured" for d in self.devices)
        return "measured" if is_measured else "declared"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all fields of the devices (names and watts too) and declared links."""
        # Fields that not every version has count only where they say something.
        devices = [asdict(d) for d in self.devices]
        for device in devices:
            if device["power_source"] == "declared":
                del device["power_source"]
            optional = ("flops_per_s", "bytes_per_s", "call_s", "streams", "members")
            for new in (*optional, "buffer_bytes", "pinned_bytes"):
                if not device[new] and device[new] != 0:
                    del device[new]
            if not device.get("members"):
                del device["ring_latency_s"], device["ring_bytes_per_s"]
        links = [asdict(x) for x in self.links]
        for link in links:
            for new in ("wake_s", "send_s", "send_s_per_byte", "receive_s"):
                if not link[new]:
                    del link[new]
        text = json.dumps([devices, links])
        return hashlib.sha256(text.encode()).hexdigest()

    @classmethod
    def detect(cls, max_cpu_devices: int = 4, *, gpus: bool = True) -> Cluster:
        """This machine.

        Without a GPU, or with ``gpus=False``: one single-thread CPU device per usable core,
        ``max_cpu_devices`` at most. With GPUs: every CUDA device, with two cores of its own where
        there are eight for each (one launches, one waits for what leaves the device), and one CPU
        device with all other cores. Only the cores this process may use are counted. A CUDA device
        is promised what is free there now, less a margin for what is not tensors.
        """
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        if cores is None:
            cores = list(range(os.cpu_count() or 1))
        memory, model = _host_memory_bytes(), cpu_model()
        if cards := _cuda_devices() if gpus else ():
            own = min(2, len(cores) // (4 * len(cards)))
            left = len(cores) - own * len(cards)
            host = Device("cpu:0", "cpu", tuple(cores[:left]), left, memory, model=model)
            starts = range(left, len(cores), own) if own else [left] * len(cards)
            cards = tuple(
                replace(gpu, cores=tuple(cores[at : at + own]))
                for gpu, at in zip(cards, starts, strict=True)
            )
            return cls("this-machine", (host, *cards))
        used = cores[:max_cpu_devices]
        # CPU devices share one memory: each is promised an equal part of it.
        return cls(
            "this-machine",
            tuple(
                Device(f"cpu:{i}", "cpu", (core,), 1, memory // len(used), model=model)
                for i, core in enumerate(used)
            ),
        )

    def to_yaml(self, path: str | Path) -> None:
        """Write the file that ``from_yaml`` reads; what has its default is left out.

        Raises:
            FileError: it cannot be written there.
        """
        import yaml

        data = {
            "name": self.name,
            "devices": [changed_fields(d) for d in self.devices],
            "links": [changed_fields(x) for x in self.links],
        }
        write_atomic(path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))

    @classmethod
    def from_yaml(cls, path: str | Path) -> Cluster:
        """Read ``name``, ``devices`` and ``links`` (fields of ``Device`` and ``Link``).

        What is not said of a device that is ``like`` one of the library is as there; two such
        devices that no link joins have that of the slower slot.

        Raises:
            ClusterError: not readable, not YAML, or a field that is unknown or wrong.
        """
        try:
            data = parse_yaml(read_text(path))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ClusterError(f"{path}: cannot be read as a cluster: {why}") from error
        if not isinstance(data, dict) or not isinstance(data.get("devices"), list):
            raise ClusterError(f"{path}: a cluster file needs a list 'devices:'")
        if not isinstance(data.get("links") or [], list):
            raise ClusterError(f"{path}: 'links:' must be a list, not {short(data['links'])}")
        unknown = set(data) - {"name", "devices", "links"}
        if unknown:
            raise ClusterError(
                f"{path}: unknown keys {short(sorted(map(str, unknown)))}; keys are name, devices, "
                "links"
            )
        try:
            devices = tuple(_described(d) for d in data["devices"])
            links = tuple(from_record(Link, d) for d in data.get("links") or [])
            declared = cls(str(data.get("name", Path(path).stem)), devices, links)
            return replace(declared, links=(*_slots(declared), *links))
        except ClusterError as error:
            raise ClusterError(f"{path}: {error}") from error


def changed_fields(item: Device | Link) -> dict[str, Any]:
    """What a file says of it: the fields that are not at their defaults, tuples as lists."""
    values = {f.name: getattr(item, f.name) for f in fields(item)}
    changed = {f.name: values[f.name] for f in fields(item) if values[f.name] != f.default}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in changed.items()}


def _described(data: Any) -> Device:
    """A device of a file; of the library, what is not said is as there.

    Raises:
        ClusterError: as ``from_record``, or a name that the library does not have.
    """
    like = data.get("like") if isinstance(data, dict) else None
    if not isinstance(like, str) or "/" not in like or _ELSEWHERE.fullmatch(like):
        return from_record(Device, data)  # type: ignore[no-any-return]
    if like not in library():
        raise ClusterError(
            f"device {short(data.get('name', ''))}: like = {short(like)} is not in the library; "
            f"did you mean {', '.join(nearest(like))}? all are in docs/hardware.md; "
            "flops_per_s, bytes_per_s and memory_bytes describe one that is not there"
        )
    known = library()[like]
    facts = {what: getattr(known, what) for what in ("kind", "memory_bytes", "busy_w", "idle_w")}
    return from_record(Device, {**facts, "model": like, **data})  # type: ignore[no-any-return]


def _slots(cluster: Cluster) -> list[Link]:
    """Of each two devices of the library that no declared link joins: through their slots.

    Raises:
        ClusterError: so many devices without links.
    """
    speed = {
        d.name: library()[d.like].link_bytes_per_s
        for d in cluster.devices
        if d.like is not None and d.like in library()
    }
    if not speed or cluster.joins[~np.eye(cluster.num_devices, dtype=bool)].all():
        return []
    if len(speed) > 64:  # each two of them have a link
        raise ClusterError(
            f"{len(speed)} devices of the library in one host, at most 64: declare "
            "links, e.g. {src: '*', dst: '*', bandwidth_bytes_per_s: 1.2e9, latency_s: 5e-5}"
        )
    at = {name: cluster.index(name) for name in speed}
    return [
        Link(a, b, 15e-6, min(speed[a], speed[b]))
        for a, b in permutations(speed, 2)
        if not cluster.joins[at[a], at[b]]
    ]


def from_record(kind: type, data: Any) -> Any:
    """A ``Device`` or a ``Link`` of the fields that a file gives, of the types that they have.

    Raises:
        ClusterError: a field that is unknown, missing, or of another kind.
    """
    what = kind.__name__.lower()
    if not isinstance(data, dict):
        raise ClusterError(f"a {what} must be a mapping, not {short(data)}")
    where = f"{what} {short(data.get('name', ''))}"
    known, hints = {f.name: f for f in fields(kind)}, get_type_hints(kind)
    if unknown := set(data) - set(known):
        raise ClusterError(
            f"{where}: unknown field {short(sorted(map(str, unknown)))}; fields are {sorted(known)}"
        )
    values = {}
    for key, value in data.items():
        if value is None and known[key].default is not None:
            raise ClusterError(f"{where}: {key} must not be empty; leave it out")
        needed = next(x for x in (*get_args(hints[key]), hints[key]) if x is not type(None))
        values[key] = value if value is None else _field(where, key, value, needed)
    try:
        return kind(**values)
    except TypeError as error:
        raise ClusterError(f"{what} {short(data)}: {error}") from error


def _field(where: str, key: str, value: Any, needed: Any) -> Any:
    if key == "members":
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise ClusterError(f"{where}: members = {short(value)} is not a list of names")
        return tuple(value)
    if key == "cores":
        if not isinstance(value, list):
            raise ClusterError(f"cores = {short(value)} is not a list of core numbers")
        for core in value:
            if type(core) is not int:
                raise ClusterError(f"cores: {short(core)} is not a core number")
        return tuple(value)
    if type(value) is needed:  # a float would round a large number of bytes
        return value
    if needed is not float and key != "memory_bytes":
        raise ClusterError(f"{where}: {key} = {short(value)} must be {_WORDS[needed]}")
    try:  # YAML reads 1e9 as a text: accept it, and name the field if it is no number
        if isinstance(value, bool):
            raise TypeError("a word")
        return needed(float(value))
    except (TypeError, ValueError, OverflowError):
        raise ClusterError(f"{key} = {short(value)} is not a number, such as 8e9") from None


def _host_memory_bytes() -> int:
    """Of the machine, or of the container that this is."""
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" is no number
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min([_machine_memory_bytes(), *(x for x in limits if x > 0)])


def _machine_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 2**63 - 1


def cpu_model() -> str:
    """Name of this machine's processor, as far as Linux tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return "unknown cpu"


def _cuda_devices() -> tuple[Device, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    devices = []
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        free = facts.total_memory
        # Promised to no tensor: workspaces of other threads than the one that launches, kernels,
        # and blocks that are cut badly or waited for.
        with suppress(RuntimeError, AssertionError):  # a device that nobody may use tells nothing
            free = int(torch.cuda.mem_get_info(i)[0] * (1 - 0.06)) - 2**28
        devices.append(Device(f"cuda:{i}", "cuda", (), 1, max(free, 1), model=facts.name))
    return tuple(devices)
