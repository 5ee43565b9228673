"""Watts of this machine's devices, read from its meters: RAPL for processors, NVML for GPUs.

A meter counts joules. Joules while nothing runs, and while one device works, over the seconds
between two readings, give its ``idle_w`` and ``busy_w`` (see ``placement.cluster.Device``). RAPL
is Linux's ``/sys/class/powercap``: it counts whole processor packages (David et al., "RAPL: memory
power estimation and capping", ISLPED 2010). NVML is NVIDIA's library, through the optional package
``nvidia-ml-py``. Where neither is, as on most virtual machines, the watts are declared by hand.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from placement.cluster import Cluster, Device

POWERCAP = Path("/sys/class/powercap")
DECLARE = (
    "state busy_w and idle_w (watts) of every device in the cluster's YAML file, e.g. from data "
    "sheets: they count as declared"
)


class PowerError(ValueError):
    """There is no meter, or it cannot be read; the message says what to do."""


@dataclass(frozen=True)
class Meter:
    """A counter of joules.

    Attributes:
        name: of what it counts, e.g. ``package-0``, ``cuda:0``.
        kind: of the devices that it counts: ``cpu`` or ``cuda``.
        read_j: joules so far.
        wraps_at_j: where the counter begins again at 0; inf: never.
    """

    name: str
    kind: str
    read_j: Callable[[], float]
    wraps_at_j: float = float("inf")

    def since_j(self, before_j: float) -> float:
        """Joules since it read ``before_j``, if the counter began again once at most."""
        used = self.read_j() - before_j
        return used if used >= 0 else used + self.wraps_at_j


def rapl_meters(folder: str | Path = POWERCAP) -> tuple[Meter, ...]:
    """One meter for each processor package that powercap lists; none without powercap.

    Raises:
        PowerError: a counter is there, and may not be read.
    """
    meters = []
    for zone in sorted(Path(folder).glob("intel-rapl:*")):
        name = _text(zone / "name")
        if zone.name.count(":") != 1 or not name.startswith("package"):
            continue  # a part of a package, or the whole board
        counter = zone / "energy_uj"
        _text(counter)  # may it be read?
        wraps = float(_text(zone / "max_energy_range_uj")) * 1e-6
        meters.append(Meter(name, "cpu", partial(_joules, counter), wraps))
    return tuple(meters)


def _joules(counter: Path) -> float:
    return float(_text(counter)) * 1e-6


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except PermissionError as error:
        raise PowerError(
            f"no permission to read {path} (only root may, by default): "
            f"sudo chmod -R a+r {path.resolve().parent}; or {DECLARE}"
        ) from error
    except OSError as error:
        raise PowerError(f"{path}: cannot be read: {error.strerror}; {DECLARE}") from error


def nvml_meters(nvml: Any = None) -> tuple[Meter, ...]:
    """One meter for each NVIDIA GPU; none without the package nvidia-ml-py or its driver.

    Args:
        nvml: the module ``pynvml``, if it is not to be imported.

    Raises:
        PowerError: a GPU whose energy NVML does not count (older than Volta) or may not tell.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()  # no driver, so no GPU
    meters = []
    for i, number in _cuda_numbers(nvml, nvml.nvmlDeviceGetCount()).items():
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(i)
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except nvml.NVMLError as error:
            raise PowerError(
                f"cuda:{number}: NVML does not tell its energy: {error}; {DECLARE}"
            ) from error

        def read_j(handle: Any = handle) -> float:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3  # millijoules

        meters.append(Meter(f"cuda:{number}", "cuda", read_j))
    return tuple(meters)


def _cuda_numbers(nvml: Any, count: int) -> dict[int, int]:
    """CUDA's number of each of NVML's GPUs that this process sees; the same if CUDA cannot tell.

    NVML counts all GPUs, by bus; CUDA those of ``CUDA_VISIBLE_DEVICES``, the fastest first.
    """
    try:
        import torch

        seen = range(torch.cuda.device_count())
        mine = [str(torch.cuda.get_device_properties(i).uuid) for i in seen]
        uuids = {}
        for i in range(count):
            with suppress(nvml.NVMLError):  # of a GPU that this process may not see
                uuid = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(i))
                plain = uuid.decode() if isinstance(uuid, bytes) else uuid
                uuids[i] = plain.removeprefix("GPU-")
    except (ImportError, AttributeError, RuntimeError, AssertionError):
        return {i: i for i in range(count)}
    numbers = {i: mine.index(x) for i, x in uuids.items() if x in mine}
    return numbers or {i: i for i in range(count)}


def measured(
    cluster: Cluster,
    *,
    seconds: float = 2.0,
    meters: Sequence[Meter] | None = None,
    work: Callable[[Device, float], None] | None = None,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.perf_counter,
) -> Cluster:
    """The cluster with the watts of every device that has a meter here, marked as measured.

    First nothing runs for ``seconds``, then each device in turn works for so long. A GPU has a
    meter of its own, and has worked a moment before: one that nobody uses draws less than one that
    waits. The devices of the processor share theirs: each has an equal part of what
    the packages draw at rest, and its ``busy_w`` is that part plus what they draw more while it
    works. Other programs are counted too, so the machine must be idle. Devices without a meter,
    or that are described in terms of another, keep what they declare.

    Args:
        meters: by default all of this machine. ``work(device, seconds)``: by default products of
            matrices.

    Raises:
        PowerError: no device has a meter, a meter cannot be read, or a device cannot work.
    """
    if not seconds > 0:
        raise PowerError(f"seconds = {seconds}: measuring needs some")
    if meters is None:
        meters = (*rapl_meters(), *nvml_meters())
    own = {d.name: _meters_of(d, meters) for d in cluster.devices}
    if not any(own.values()):
        raise PowerError(
            f"no power meter on this machine (no packages in {POWERCAP}, no GPU known to NVML; "
            f"virtual machines hide them): {DECLARE}"
        )

    def watts(run: Callable[[], None]) -> dict[str, float]:
        before, began = [m.read_j() for m in meters], clock()
        run()
        used = [m.since_j(j) for m, j in zip(meters, before, strict=True)]
        took = clock() - began
        return {m.name: j / took for m, j in zip(meters, used, strict=True)}

    for device in cluster.devices:
        if device.kind == "cuda" and own[device.name]:
            (work or keep_busy)(device, 0.5)  # it gets its context, and its kernels
    rest = watts(lambda: wait(seconds))
    num_cpus = sum(d.kind == "cpu" and bool(own[d.name]) for d in cluster.devices)
    devices = []
    for device in cluster.devices:
        mine = own[device.name]
        if not mine:
            devices.append(device)
            continue
        while_busy = watts(partial(work or keep_busy, device, seconds))
        idle = sum(rest[m.name] for m in mine)
        more = max(0.0, sum(while_busy[m.name] for m in mine) - idle)
        part = idle / num_cpus if device.kind == "cpu" else idle
        devices.append(replace(device, idle_w=part, busy_w=part + more, power_source="measured"))
    return replace(cluster, devices=tuple(devices))


def _meters_of(device: Device, meters: Sequence[Meter]) -> list[Meter]:
    if device.like is not None:
        return []
    return [
        m for m in meters if m.kind == device.kind and (m.kind == "cpu" or m.name == device.name)
    ]


def keep_busy(device: Device, seconds: float) -> None:
    """Multiply matrices on ``device`` with its own cores and threads for ``seconds``.

    Raises:
        PowerError: it is not on this machine, or has no memory for them.
    """
    import torch

    from placement.executor.backend import set_own_num_threads

    threads_before = torch.get_num_threads()

    def multiply() -> None:
        set_own_num_threads(device.threads)
        if device.kind == "cpu" and device.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, device.cores)  # of this thread
        if device.kind == "cuda":
            # Large, or launching is what takes the time; random, or hardly a bit changes.
            x = torch.randn(8192, 8192, device=device.name, dtype=torch.bfloat16)
            x /= x.float().square().sum().sqrt()  # products neither grow nor overflow
        else:
            x = torch.ones(512, 512) / 512
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for _ in range(16):
                y = x @ x
            y[0, 0].item()  # wait for a GPU

    try:
        with ThreadPoolExecutor(1) as thread:  # which may be bound to cores
            thread.submit(multiply).result()
    except (OSError, RuntimeError) as error:
        raise PowerError(f"device {device.name!r} cannot work here: {error}") from error
    finally:
        torch.set_num_threads(threads_before)  # new threads inherit the last setting
