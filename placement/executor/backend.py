"""What differs between kinds of device: where tensors live, how they leave, which clock counts.

A worker launches operators through its backend and never asks which kind it has. On a CPU
device a tensor is handed over by reference. A CUDA device runs behind its launching thread, so
whatever leaves it goes through a *courier*: a thread that waits until the device has produced
the value, copies it to host memory on a stream of its own, and then delivers it.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from placement.cluster import Device

FAR_MS = 100.0  # CUDA tells times as float32: further apart it loses fractions of a microsecond

Deliver = Callable[[Any], None]


class Backend(Protocol):
    """One device as its worker sees it; used from the worker's thread only."""

    torch_device: torch.device

    def enter(self, stack: ExitStack) -> None:
        """Prepare the calling thread; what must be undone goes on ``stack``."""
        ...

    def receive(self, value: Tensor) -> Tensor:
        """A tensor in host memory, as one that operators of this device can read."""
        ...

    def ship(self, value: Any, deliver: Deliver, *, stay: bool = False) -> None:
        """Call ``deliver(value in host memory)`` once the device has produced it, in order.

        ``stay``: in device memory, as it is.
        """
        ...

    def mark(self) -> Any:
        """A point in this device's time: after what was launched so far."""
        ...

    def resolve_ns(self, mark: Any) -> int:
        """A mark on the host clock (``time.perf_counter_ns``); after everything has ended."""
        ...


class CpuBackend:
    """A pinned group of cores. Tensors are handed over by reference; the host clock counts."""

    def __init__(self, device: Device) -> None:
        self.torch_device = torch.device("cpu")
        self._cores = device.cores
        self._threads = device.threads
        self._threads_before = torch.get_num_threads()  # of the caller, not of another worker

    def enter(self, stack: ExitStack) -> None:
        set_own_num_threads(self._threads)
        # New threads of the process inherit the last setting: put it back.
        stack.callback(torch.set_num_threads, self._threads_before)
        if self._cores and hasattr(os, "sched_setaffinity"):
            with suppress(OSError):  # a container may forbid it; the worker then floats
                os.sched_setaffinity(0, self._cores)

    def receive(self, value: Tensor) -> Tensor:
        return value

    def ship(self, value: Any, deliver: Deliver, *, stay: bool = False) -> None:
        deliver(value)

    def mark(self) -> int:
        return time.perf_counter_ns()

    def resolve_ns(self, mark: int) -> int:
        return mark


def set_own_num_threads(count: int) -> None:
    """Give PyTorch ``count`` threads in the calling thread.

    The first question of a thread takes over the last setting of any thread, so it comes first.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


class CudaBackend:
    """One CUDA device with a stream of its own; CUDA events are its clock."""

    def __init__(self, device: Device) -> None:
        self.torch_device = torch.device(device.name.rpartition("/")[2])  # without its host

    def enter(self, stack: ExitStack) -> None:
        torch.cuda.set_device(self.torch_device)
        self._stream = torch.cuda.Stream(self.torch_device)
        self._copies = torch.cuda.Stream(self.torch_device)
        # Parameters were copied on the default stream, before this thread began.
        self._stream.wait_stream(torch.cuda.default_stream(self.torch_device))
        stack.enter_context(torch.cuda.stream(self._stream))
        self._courier = Courier()
        stack.callback(self._courier.close)
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record(self._stream)
        self._base.synchronize()
        self._base_ns = time.perf_counter_ns()

    def receive(self, value: Tensor) -> Tensor:
        if value.is_cuda:  # from another process, received on another stream
            value.record_stream(self._stream)
        return value.to(self.torch_device, non_blocking=True)

    def ship(self, value: Any, deliver: Deliver, *, stay: bool = False) -> None:
        produced = torch.cuda.Event()
        produced.record(self._stream)
        if stay or not isinstance(value, Tensor):
            self._courier.send(produced.synchronize, value, deliver)
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(produced)
            value.record_stream(self._copies)
            host = torch.empty_like(value, device="cpu", pin_memory=True)  # with its strides
            host.copy_(value, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._copies)
        self._courier.send(copied.synchronize, host, deliver)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def resolve_ns(self, mark: Any) -> int:
        if isinstance(mark, int):  # of another process, which has resolved it
            return mark
        mark.synchronize()
        since_ms = self._base.elapsed_time(mark)
        found = self._base_ns + round(since_ms * 1e6)
        if since_ms > FAR_MS:
            self._base, self._base_ns = mark, found
        return found


class Courier:
    """A thread that delivers values in order, each after its ``wait`` returned."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Any, Deliver] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="placement-courier", daemon=True)
        self._thread.start()

    def send(self, wait: Callable[[], None], value: Any, deliver: Deliver) -> None:
        self._queue.put((wait, value, deliver))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            wait, value, deliver = item
            try:
                wait()
            except Exception as error:  # a kernel failed: say so where the value is awaited
                value = error
            deliver(value)

    def close(self) -> None:
        """Deliver what was sent, then end the thread."""
        self._queue.put(None)
        self._thread.join()


def is_cuda_here(name: str) -> bool:
    """Whether this machine has a CUDA device of this name, e.g. ``cuda:0`` or ``host/cuda:0``."""
    number = re.fullmatch(r"(?:.*/)?cuda:(\d+)", name)
    return number is not None and int(number[1]) < torch.cuda.device_count()


def backend_for(device: Device) -> Backend:
    """The backend of a device of this machine.

    Raises:
        ValueError: a kind of device that can only be simulated.
    """
    if device.kind == "cpu":
        return CpuBackend(device)
    if device.kind == "cuda":
        return CudaBackend(device)
    raise ValueError(
        f"device {device.name!r} is of kind {device.kind!r}: it can be simulated, not run; "
        "operators can be executed on devices of kind 'cpu' and 'cuda'"
    )
