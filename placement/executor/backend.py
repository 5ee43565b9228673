"""What differs between kinds of device: where tensors live, how they leave, which clock counts.

A worker launches operators through its backend and never asks which kind it has. On a CPU
device a tensor is handed over by reference. A CUDA device runs behind its launching thread, so
whatever leaves it goes through a *courier*: a thread that waits until the device has produced
the value, and its copy in host memory is complete, and then delivers it. What comes in goes through
a *porter*: a thread that copies it into pinned memory, and from there to the device, before the
launching thread sees it. What is small takes no time beside that of a thread or stream that waits
for another: the launching thread copies it, where it computes. Computing, leaving and arriving have
a stream each, and so have parameters that come from host memory (``streamed``).

Streams and threads of a CUDA device stay when a runner ends, for the next one: libraries keep what
they have planned by thread, and memory by stream.
"""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from placement.cluster import Device
from placement.executor.awake import wait_exactly

_SMALL_BYTES = 2**16  # are copied in less time than it takes to wake a thread that does it

Deliver = Callable[[Any], None]
# Of who captures a CUDA graph, or replays one, or says that a stream uses a tensor: PyTorch takes
# what is said meanwhile, by any thread, for said of the graph, and forgets it when the tensor goes.
TURN = threading.Lock()


class CpuBackend:
    """A pinned group of cores. Tensors are handed over by reference; the host clock counts.

    What is said of its methods holds for every backend; they are for the worker's thread only.
    """

    def __init__(self, device: Device) -> None:
        self.torch_device = torch.device("cpu")
        self._cores = device.cores
        self._threads = device.threads
        self._threads_before = torch.get_num_threads()  # of the caller, not of another worker

    def begin(self) -> None:
        """Called before ``run``, in the thread that starts the worker."""

    def run(self, work: Callable[[], None]) -> None:
        """Call ``work`` in the thread that launches operators, and wait for its end."""
        work()

    def inbox(self) -> Any:
        """A queue of messages to the worker."""
        return queue.SimpleQueue()

    def admit(self, value: Tensor) -> Any:
        """An input of the model, in the caller's thread, as the inbox takes it."""
        # What another stream still computes would be read too early.
        return value.cpu()

    def follow(self, mark: Any) -> None:
        """Launch nothing more before ``mark`` has happened."""

    def enter(self, stack: ExitStack) -> None:
        """Prepare the calling thread; what must be undone goes on ``stack``."""
        set_own_num_threads(self._threads)
        # New threads of the process inherit the last setting: put it back.
        stack.callback(torch.set_num_threads, self._threads_before)
        stay_on(self._cores)

    def receive(self, value: Any) -> Tensor:
        """A tensor out of the inbox, as one that operators of this device can read."""
        return value  # type: ignore[no-any-return]

    def ship(self, value: Any, deliver: Deliver, *, stay: bool = False) -> None:
        """Call ``deliver(value in host memory)`` once the device has produced it, in order.

        ``stay``: in device memory, as it is.
        """
        deliver(value)

    def give(self, value: Any, deliver: Deliver) -> None:
        """``ship`` for an output of the model, which the caller may keep."""
        self.ship(value, deliver)

    def mark(self) -> Any:
        """A point in this device's time: after what was launched so far."""
        return time.perf_counter_ns()

    def resolve_ns(self, mark: Any) -> int:
        """A mark on the host clock (``time.perf_counter_ns``); after everything has ended."""
        return mark  # type: ignore[no-any-return]


def set_own_num_threads(count: int) -> None:
    """Give PyTorch ``count`` threads in the calling thread.

    The first question of a thread takes over the last setting of any thread, so it comes first.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)


def stay_on(cores: Collection[int]) -> None:
    """Keep the calling thread, and those that it starts, on ``cores``; it floats without any."""
    if cores and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # a container may forbid it
            os.sched_setaffinity(0, cores)


class Leaving(NamedTuple):
    """Outputs of the model that a device has yet to compute, or to copy.

    Attributes:
        take: waits for them, and gives them.
        marks: they are there when all of these have happened.
    """

    take: Callable[[], dict[int, Any]]
    marks: tuple[Any, ...] = ()

    def are_there(self) -> bool:
        """Whether ``take`` waits for nothing. Raises: RuntimeError, the device has failed."""
        return all(mark.query() for mark in self.marks)


class CudaBackend:
    """One CUDA device; CUDA events are its clock.

    Attributes:
        results_stay: outputs of the model are left in device memory.
        drift_ms: in which its clock and the host's drift apart so far that it can be told.
        far_ms: CUDA tells times as float32: further apart they lose fractions of a microsecond.
    """

    results_stay = False
    drift_ms, far_ms = 500.0, 100.0

    def __init__(self, device: Device) -> None:
        self.torch_device = torch.device(device.name.rpartition("/")[2])  # without its host
        self._cores = device.cores

    def begin(self) -> None:
        idle = _IDLE[self.torch_device, self._cores]
        self._gpu = idle.pop() if idle else _Gpu(self.torch_device, self._cores)

    def run(self, work: Callable[[], None]) -> None:
        try:
            self._gpu.launcher.call(work)
        finally:
            _IDLE[self.torch_device, self._cores].append(self._gpu)

    def inbox(self) -> Any:
        return _Inbox(self)

    def admit(self, value: Tensor) -> Any:
        if not self.holds(value):
            return value.cpu()
        mark = self.callers_mark()
        return value if mark is None else _Brought(value, mark)

    def holds(self, value: Tensor) -> bool:
        """Whether the tensor is in this device's memory."""
        return value.device == self.torch_device

    @property
    def parameters(self) -> Any:
        """The stream that copies parameters which stay in host memory."""
        return self._gpu.parameters

    def callers_mark(self) -> Any:
        """After what the calling thread has launched on this device so far; None: all is done."""
        stream = callers_stream(self.torch_device)
        return None if stream.query() else self._gpu.record(stream)

    def enter(self, stack: ExitStack) -> None:
        gpu = self._gpu
        torch.cuda.set_device(self.torch_device)
        stack.callback(gpu.finish)
        stack.enter_context(torch.cuda.stream(gpu.compute))
        stack.callback(gpu.courier.flush)
        stack.callback(gpu.porter.flush)
        self._base, self._base_ns = self._first = self._both_clocks()
        self._rate, self._compared_ns = 1.0, self._base_ns

    def _both_clocks(self) -> tuple[Any, int]:
        """An event, and what the host's clock says at it.

        Waking up from the wait for an event takes a while, and not always the same: of ten tries
        the shortest counts.
        """
        shortest, moment = 2**62, None
        for _ in range(10):
            event = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter_ns()
            event.record(self._gpu.compute)
            event.synchronize()
            took = time.perf_counter_ns() - before
            if took < shortest:
                shortest, moment = took, (event, before + took // 2)
        assert moment is not None
        return moment

    def _compare_clocks(self) -> None:
        """How much faster the host's clock goes than the device's, since the worker began."""
        event, now_ns = self._both_clocks()
        elapsed_ms = self._first[0].elapsed_time(event)
        if elapsed_ms > self.drift_ms:
            self._rate = (now_ns - self._first[1]) / (elapsed_ms * 1e6)
        self._compared_ns = now_ns

    def follow(self, mark: Any) -> None:
        self._gpu.compute.wait_event(mark)
        self._gpu.events.append(mark)

    def call(
        self, launch: Callable[[], dict[int, Any]], is_late: Callable[[], bool], is_last: bool
    ) -> Leaving:
        """Launch outputs of the model in the calling thread.

        No other thread takes part, as waking one takes as long as many kernels. If ``is_late``
        says so, which is asked while the device computes, it is all launched once more. Autocast
        and a default device, which are the thread's own, do not hold for operators of the model.
        ``is_last``: nothing else is under way, nor launched before they are waited for.
        """
        device = torch.cuda.current_device()
        theirs = torch._C._cuda_getCurrentStream(self.torch_device.index)
        try:
            torch._C._cuda_setStream(*self._gpu.name)  # in a fifth of the time of the context
            with (
                torch._C._InferenceMode(True),  # in a fifth of the time of its public context
                torch._C._DisableAutocast(),
                torch._C.DisableTorchFunction(),
            ):
                try:
                    outputs = self._leaving(launch(), is_last)
                except Exception:  # perhaps because it is late
                    if not is_late():
                        raise
                    outputs = self._leaving(launch(), is_last)
                else:
                    outputs = self._leaving(launch(), is_last) if is_late() else outputs
            if is_last:
                made = outputs.take()
                return Leaving(lambda: made)
            return outputs
        finally:
            torch._C._cuda_setStream(*theirs)
            if device != self.torch_device.index:
                torch.cuda.set_device(device)

    def _leaving(self, tensors: dict[int, Any], is_last: bool) -> Leaving:
        """Outputs of the model, in host memory unless they stay.

        If ``is_last``, they are taken while the stream that computes is the current one.
        """
        gpu = self._gpu
        if self.results_stay:
            mark = gpu.record(gpu.compute)
            return Leaving(partial(gpu.wait, mark, tensors), (mark,))
        there = {t: x for t, x in tensors.items() if isinstance(x, Tensor) and x.is_cuda}
        if is_last and sum([x.nbytes for x in there.values()]) <= _SMALL_BYTES:
            # Waits for all before.
            return Leaving(lambda: tensors | {t: x.cpu() for t, x in there.items()})
        copies = {t: self._copied_back(x, is_last) for t, x in there.items()}
        return Leaving(
            lambda: tensors | {t: gpu.wait(*copy).clone() for t, copy in copies.items()},
            tuple([mark for mark, _ in copies.values()]),
        )

    def bring(self, value: Any, deliver: Deliver) -> None:
        """Call ``deliver`` with what ``receive`` takes, once a copy to the device is under way.

        What is small the launching thread copies, in less time than streams wait for each other.
        What is pinned needs no other thread.
        """
        tensors = value.values() if isinstance(value, dict) else (value,)
        away = [x for x in tensors if isinstance(x, Tensor) and not self.holds(x)]
        is_large = sum(x.nbytes for x in away) > _SMALL_BYTES
        if is_large and not all(x.is_pinned() for x in away):
            self._gpu.porter.carry(partial(self._here, value), deliver)
        elif is_large or any(x.is_cuda for x in away):
            _deliver(partial(self._here, value), deliver)
        else:
            deliver(value)

    def _here(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {t: self._here(v) for t, v in value.items()}
        if not isinstance(value, Tensor) or self.holds(value):
            return value
        arrivals = self._gpu.arrivals
        with torch.inference_mode(), torch.cuda.stream(arrivals):
            return _Brought(self.copied(value), self._gpu.record(arrivals))

    def copied(self, value: Tensor, target: Tensor | None = None) -> Tensor:
        """A copy on this device, or in ``target``, on the current stream; nobody waits for it."""
        if value.is_cuda:  # a copy between two devices runs on the other one's stream
            used_on(value, torch.cuda.current_stream(value.device))
        elif not value.is_pinned():
            # From other memory CUDA copies slowly, and only when the stream is idle.
            value = _pinned_like(value).copy_(value)
        if target is None:
            return value.to(self.torch_device, non_blocking=True)
        return target.copy_(value, non_blocking=True)

    def receive(self, value: Any, target: Tensor | None = None, kept: bool = False) -> Tensor:
        """As ``Backend`` says; what has not come yet is copied to ``target``, if that is given.

        What was here before somebody has ``kept`` until all is computed: nobody else can get its
        memory.
        """
        if isinstance(value, _Brought):
            self.follow(value.mark)
            value, kept = value.tensor, False
        if not self.holds(value):
            return self.copied(value, target)
        if not kept:
            used_on(value, self._gpu.compute)  # made on another stream
        return value  # type: ignore[no-any-return]

    def ship(self, value: Any, deliver: Deliver, *, stay: bool = False) -> None:
        gpu = self._gpu
        if stay or not isinstance(value, Tensor) or not value.is_cuda:
            gpu.courier.carry(partial(gpu.wait, gpu.record(gpu.compute), value), deliver)
        else:
            gpu.courier.carry(partial(gpu.wait, *self._copied_back(value)), deliver)

    def give(self, value: Any, deliver: Deliver) -> None:
        if self.results_stay or not isinstance(value, Tensor) or not value.is_cuda:
            self.ship(value, deliver, stay=True)
            return
        gpu = self._gpu
        copied, host = self._copied_back(value)
        # Pinned memory is scarce, and never returned to the system: the caller gets other.
        gpu.courier.carry(lambda: gpu.wait(copied, host).clone(), deliver)

    def _copied_back(self, value: Tensor, is_last: bool = False) -> tuple[Any, Tensor]:
        """A copy in pinned memory, complete when the mark has happened.

        ``is_last``: the device computes nothing meanwhile.
        """
        gpu, host = self._gpu, _pinned_like(value)
        if is_last or not is_long(value):  # in less time than streams wait for each other
            host.copy_(value, non_blocking=True)
            return gpu.record(gpu.compute), host
        produced = gpu.record(gpu.compute)
        with torch.cuda.stream(gpu.copies):
            gpu.copies.wait_event(produced)
            used_on(value, gpu.copies)
            host.copy_(value, non_blocking=True)
            copied = gpu.record(gpu.copies)
        gpu.events.append(produced)
        return copied, host

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._gpu.compute)
        return event

    def resolve_ns(self, mark: Any) -> int:
        if isinstance(mark, int):  # of another process, which has resolved it
            return mark
        mark.synchronize()
        since_ms = self._base.elapsed_time(mark)
        compared_ns = time.perf_counter_ns() - self._compared_ns
        if since_ms > self.far_ms and compared_ns > self.drift_ms * 1e6:
            self._compare_clocks()
        now_ns = self._base_ns + round(since_ms * 1e6 * self._rate)
        if since_ms > self.far_ms:
            self._base, self._base_ns = mark, now_ns
        return now_ns


Backend = CpuBackend | CudaBackend


def callers_stream(device: torch.device) -> Any:
    """``torch.cuda.current_stream``, which makes an object every time."""
    name = torch._C._cuda_getCurrentStream(device.index)
    if (stream := _CALLERS.get(name)) is None:
        stream = _CALLERS[name] = torch.cuda.current_stream(device)
    return stream


def used_on(value: Tensor, stream: Any) -> None:
    """``stream`` was asked to use a tensor that another one has made."""
    with TURN:
        value.record_stream(stream)


def is_long(value: Any) -> bool:
    """Whether it is copied beside what is computed next."""
    return isinstance(value, Tensor) and value.nbytes > _SMALL_BYTES


def _pinned_like(value: Tensor) -> Tensor:
    """Memory of the host that a GPU reads and writes fast, for a tensor with these strides."""
    return torch.empty_like(value, device="cpu", pin_memory=True)


@dataclass(frozen=True, slots=True)
class _Brought:
    """A tensor in device memory, complete when the mark has happened."""

    tensor: Tensor
    mark: Any


class _Inbox:
    """Messages to the worker of a CUDA device; their tensors are brought there first."""

    def __init__(self, backend: CudaBackend) -> None:
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._backend = backend
        self.get, self.empty = self._arrived.get, self._arrived.empty

    def put(self, message: Any) -> None:
        if not isinstance(message, tuple):
            self._arrived.put(message)
            return
        batch, tensor, value, source, sent = message
        self._backend.bring(value, lambda v: self._arrived.put((batch, tensor, v, source, sent)))


class _Gpu:
    """Streams and threads of a CUDA device, used by one worker at a time."""

    def __init__(self, device: torch.device, cores: tuple[int, ...]) -> None:
        self.compute, self.arrivals, self.copies, self.parameters = (
            torch.cuda.Stream(device) for _ in range(4)
        )
        compute = self.compute
        self.name = compute.stream_id, compute.device_index, compute.device_type
        self.launcher, self.porter, self.courier = (
            Carrier(f"placement-{device}-{what}", cores) for what in ("launch", "port", "courier")
        )
        torch.set_num_threads(torch.get_num_threads())  # new threads would have theirs: one
        self.events: deque[Any] = deque()
        self.has_failed = False
        # Waiting without sleeping takes a core: only where it has one beside the launcher's.
        self._new = partial(torch.cuda.Event, blocking=len(cores) < 2)

    def finish(self) -> None:
        """Wait for all that was launched: memory that it reads or writes may go then."""
        # Where the device has failed somebody has been told.
        with suppress(RuntimeError), self.kept_if_it_fails(None):
            self.compute.synchronize()
            self.parameters.synchronize()

    @contextmanager
    def kept_if_it_fails(self, value: Any) -> Iterator[None]:
        """``value``, and all tensors that there are, are never freed if the device fails meanwhile.

        Which is for good. Freeing memory that another stream has used, pinned or not, would ask the
        device for an event, and what that raises in a destructor ends the process. Which is pinned
        nobody can say any more.
        """
        try:
            yield
        except RuntimeError:
            values = [value]
            if not self.has_failed:
                # ``isinstance`` would ask a proxy.
                values += [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
            self.has_failed = True
            for x in values:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
            raise

    def record(self, stream: Any) -> Any:
        """An event, after what was launched on ``stream`` so far."""
        try:
            event = self.events.pop()
        except IndexError:
            event = self._new()
        event.record(stream)
        return event

    def wait(self, event: Any, value: Any) -> Any:
        """``value``, once the event has happened."""
        try:  # not in a context, which takes longer than this
            event.synchronize()
        except RuntimeError as error:
            with self.kept_if_it_fails(value):
                raise error
        self.events.append(event)
        return value


_CALLERS: dict[tuple[int, int, int], Any] = {}  # streams, by what PyTorch calls them
_IDLE: defaultdict[tuple[torch.device, tuple[int, ...]], list[_Gpu]] = defaultdict(list)
if hasattr(os, "register_at_fork"):  # a forked process has none of these threads
    os.register_at_fork(after_in_child=lambda: _IDLE.clear())


class Carrier(threading.Thread):
    """A thread that makes values in order, and delivers each, or the error in its place."""

    def __init__(self, name: str, cores: tuple[int, ...] = ()) -> None:
        super().__init__(name=name, daemon=True)
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Deliver] | None] = (
            queue.SimpleQueue()
        )
        self._cores = cores
        self.start()
        self.flush()

    def carry(self, make: Callable[[], Any], deliver: Deliver) -> None:
        """Call ``deliver(make())``, after all that came before."""
        self._queue.put((make, deliver))

    def call(self, work: Callable[[], Any]) -> Any:
        """``work()``, in this thread."""
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.carry(work, done.put)
        if isinstance(value := done.get(), Exception):
            raise value
        return value

    def flush(self) -> None:
        """Wait until everything is delivered."""
        self.call(lambda: None)

    def run(self) -> None:
        wait_exactly()
        set_own_num_threads(1)
        stay_on(self._cores)
        while (item := self._queue.get()) is not None:
            _deliver(*item)
            del item  # or an idle thread would hold what came last

    def close(self) -> None:
        """Deliver what was sent, then end the thread."""
        self._queue.put(None)
        self.join()


def _deliver(make: Callable[[], Any], deliver: Deliver) -> None:
    try:
        value = make()
    except Exception as error:  # e.g. a kernel failed: say so where the value is awaited
        value = error
    deliver(value)


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
