"""CUDA devices on a machine without one, as far as the executor can tell them from real ones.

Real are: asynchrony (a thread per stream runs kernels in order, after the launching thread has gone
on), events, the order in which memory becomes free (poisoned with NaN by the stream that allocated
it, as soon as Python has dropped it, unless ``record_stream`` says who still uses it; that another
stream uses it then is counted), memory that is full, pinned and pageable host memory (a copy from
the latter waits for the stream, and for the copy), CUDA graphs and what may not be captured, and
NVML's counters. Kernels are the CPU's, of those that a GPU has too; equal values have another order
where nobody promises one. Memory-efficient attention, which only CUDA has, wants tensors of the
form that CUDA's wants, and gives such.

    with emulated_gpu.emulated(memory_bytes=2**30) as gpu:
        ...  # torch.cuda and tensors on cuda:0; ``gpu`` counts what was copied how
"""

from __future__ import annotations

import queue
import re
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torchgen
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_ASKED = {  # operators that tell the host a number
    aten._local_scalar_dense.default: lambda value: value,
    aten.item.default: lambda value: value,
    aten.is_nonzero.default: bool,
}
_here = threading.local()


@dataclass
class Gpu:
    """What the emulated devices are like, and what has happened on them.

    Attributes:
        kernel_s, copy_s: seconds that each kernel, or copy, takes at least; and as long as its
            arguments, or what is copied, take at ``kernel_bytes_per_s``, ``copy_bytes_per_s``.
        missing: names of operators without a kernel, e.g. ``aten.relu.default``.
        scratch: bytes that an operator needs while it runs, by name.
        library_bytes: that cuBLAS keeps for each thread and stream in which it has run.
        poison: whether memory is spoiled when it is free.
        copies: how many of each kind: ``pinned``, ``pageable`` (to a device), ``back`` (to pinned
            memory), ``back and wait``.
        num_streams, num_poisoned, num_replays: so far.
        num_efficient: kernels of memory-efficient attention so far, forward and backward.
        num_races: blocks that were freed while a stream used them that nobody had recorded, or
            used by a stream that did not wait for what the block's own stream had begun before.
        num_aborts: how often the process would have ended: when memory is freed, pinned or of a
            device, an event is recorded on the other streams that have used it, and no destructor
            may raise what that does on a device that has failed.
        open_pools: memory pools of graphs whose capture has not ended for the allocator.
        used_pools: by how many graphs each is used; 0: no other may use it.
        graphs: that were captured into each pool.
        spoiled_pools: those for which the allocator of pinned memory will never see the end.
        captured: the random generator is a graph's, from a capture's begin until one ends well.
        asks_a_graph: pinned memory waits for an event that became part of a graph.
        pools: by device and priority, streams that are given out in turns.
        workspaces: cuBLAS' memory by thread and stream: how far each stream had come that used it.
        allocated, peak: bytes by device number.
    """

    num_devices: int
    memory_bytes: int
    kernel_s: float = 0.0
    copy_s: float = 0.0
    copy_bytes_per_s: float = float("inf")
    kernel_bytes_per_s: float = float("inf")
    missing: set[str] = field(default_factory=set)
    scratch: dict[str, int] = field(default_factory=dict)
    library_bytes: int = 0
    poison: bool = True
    copies: Counter[str] = field(default_factory=Counter)
    num_streams: int = 0
    num_poisoned: int = 0
    num_replays: int = 0
    num_efficient: int = 0
    num_races: int = 0
    num_aborts: int = 0
    open_pools: Counter[Any] = field(default_factory=Counter)
    used_pools: Counter[Any] = field(default_factory=Counter)
    spoiled_pools: set[Any] = field(default_factory=set)
    graphs: defaultdict[Any, Any] = field(default_factory=lambda: defaultdict(weakref.WeakSet))
    captured: bool = False
    asks_a_graph: bool = False
    allocated: Counter[int] = field(default_factory=Counter)
    peak: Counter[int] = field(default_factory=Counter)
    streams: list[Stream] = field(default_factory=list)
    pools: defaultdict[Any, deque[Stream]] = field(default_factory=lambda: defaultdict(deque))
    workspaces: defaultdict[Any, Any] = field(default_factory=lambda: defaultdict(dict))
    defaults: dict[int, Stream] = field(default_factory=dict)
    unused: Any = None  # waits until nobody uses a block any more

    def allocate(self, device: int, num_bytes: int) -> None:
        """Raises: OutOfMemoryError, as torch does."""
        if self.allocated[device] + num_bytes > self.memory_bytes:
            _empty_cache()
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes")
        self.allocated[device] += num_bytes
        self.peak[device] = max(self.peak[device], self.allocated[device])

    def clear_workspaces(self) -> None:
        for _, on in self.workspaces:
            self.allocated[on.index] -= self.library_bytes
        self.workspaces.clear()

    def pinned_is_free(self, used_by: list[Stream]) -> None:
        """Pinned memory is free again, once an event has happened on each stream that used it."""
        self.num_aborts += any(self.has_failed(each.index) for each in used_by)
        self.asks_a_graph |= any(each.graph is not None for each in used_by)

    def has_failed(self, device: int) -> bool:
        return any(x.error for x in self.streams if x.index == device)


_gpu: Gpu


def _number(device: Any = None) -> int:
    if device is None:
        return getattr(_here, "device", 0)
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


class Stream:
    """A thread that runs what is launched on it, in order."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.index, self.error = _number(device), None
        self.stream_id, self.device_index, self.device_type = self, self.index, 1
        self.device = torch.device("cuda", self.index)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.num_launched = self.num_done = 0
        self.seen: dict[Stream, int] = {}  # how far it has waited for others
        self.waited_for = 0  # how far somebody has waited for it
        self.graph: CUDAGraph | None = None  # that is being captured
        _gpu.num_streams += 1
        _gpu.streams.append(self)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        for launched in iter(self._queue.get, None):
            try:
                launched()
            except BaseException as error:  # shown to whoever waits, from then on
                self.error = self.error or error.with_traceback(None)  # which holds memory
            launched = None
            self.num_done += 1

    def launch(self, work: Any) -> None:
        if self.graph is not None:
            self.graph.work.append(work)
            return
        self.num_launched += 1
        self._queue.put(work)

    def may_wait(self) -> None:
        """Raises: RuntimeError, the stream is being captured, or any is and forbids it to all."""
        for graph in [each.graph for each in _gpu.streams if each.graph is not None]:
            mine = graph.stream is self or graph.thread == threading.get_ident()
            if mine or graph.mode == "global":
                graph.failed = True
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if self.graph is not None and event.graph is not self.graph:
            self.graph.failed = True  # even where the event has happened
            raise RuntimeError("CUDA error: dependency on uncaptured work in another stream")
        for other, count in event.seen.items():
            self.seen[other] = max(self.seen.get(other, 0), count)
        self.launch(event.done.wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        done = self.num_done == self.num_launched
        if done:
            self.record_event().synchronize()
        return done

    def synchronize(self) -> None:
        self.may_wait()
        self.record_event().synchronize()


class Pooled(Stream):
    """One of 32 of its priority that PyTorch has, and gives out again and again."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Any:
        pool = _gpu.pools[_number(device), priority]
        if len(pool) < 32:
            pool.append(Stream(device))
        else:
            pool.rotate(-1)
        return pool[-1]  # is no instance of this class, and so is not begun again


class Event:
    """A point in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.done, self._at, self._stream = threading.Event(), [0.0], None
        self.done.set()  # one that was not recorded has happened
        self.seen: dict[Stream, int] = {}
        self.graph: CUDAGraph | None = None  # of which it is a part

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream = stream or current_stream()
        self.graph = stream.graph
        done, at = self.done, self._at = threading.Event(), [0.0]

        def happen() -> None:
            at[0] = time.perf_counter()
            done.set()

        stream.launch(happen)
        self.seen = stream.seen | {stream: stream.num_launched}

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        self._may_be_asked()
        return self.done.is_set()

    def _may_be_asked(self) -> None:
        if self.graph is not None:
            raise RuntimeError("CUDA error: the event was last recorded in a capturing stream")

    def synchronize(self) -> None:
        self._may_be_asked()
        self.done.wait()
        for other, count in self.seen.items():
            other.waited_for = max(other.waited_for, count)
        if self._stream is not None and self._stream.error is not None:
            raise RuntimeError(f"CUDA error: {self._stream.error}")

    def elapsed_time(self, other: Event) -> float:
        assert self.query() and other.query(), "both events must have happened"
        return (other._at[0] - self._at[0]) * 1e3


def _name(stream: Stream) -> tuple[Stream, int, int]:
    return stream.stream_id, stream.device_index, stream.device_type


def default_stream(device: Any = None) -> Stream:
    number = _number(device)
    return _gpu.defaults.get(number) or _gpu.defaults.setdefault(number, Stream(number))


def current_stream(device: Any = None) -> Stream:
    chosen = getattr(_here, "streams", {}).get(_number(device))
    return chosen or default_stream(device)


def set_stream(chosen: Stream) -> None:
    before = getattr(_here, "streams", {})
    _here.streams, _here.device = {**before, chosen.index: chosen}, chosen.index


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before, device = getattr(_here, "streams", {}), _number()
    set_stream(chosen)
    try:
        yield
    finally:
        _here.streams, _here.device = before, device


@contextmanager
def _on(device: Any) -> Iterator[None]:
    before, _here.device = _number(), _number(device)
    try:
        yield
    finally:
        _here.device = before


def synchronize(device: Any = None) -> None:
    for each in [s for s in _gpu.streams if device is None or s.index == _number(device)]:
        each.synchronize()


def _spoil(cell: list[Any]) -> None:
    if (value := cell[0]) is not None:
        with torch.inference_mode():
            value.fill_(torch.nan if value.is_floating_point() else 0)


class _Memory:
    """A block of device memory: free when no tensor refers to it."""

    def __init__(self, gpu: Gpu, cell: list[Any], on: Stream, num_bytes: int) -> None:
        gpu.allocate(on.index, num_bytes)
        self.gpu, self.cell, self.on, self.num_bytes = gpu, cell, on, num_bytes
        self.users: set[Stream] = set()
        self.used: dict[Stream, int] = {}  # how far each has come when it has used the block
        self.graph = on.graph  # in whose memory it is
        if on.graph is not None:
            on.graph.cells.append(cell)
        self.since = on.num_launched

    def use(self, stream: Stream) -> None:
        """``stream`` has been asked to read or write it."""
        if stream.graph is not None or self.graph is not None:
            return
        self.used[stream] = stream.num_launched
        known = max(stream.seen.get(self.on, 0), self.on.waited_for)
        if stream is not self.on and known < self.since:
            self.gpu.num_races += 1

    def __del__(self) -> None:
        if not hasattr(self, "num_bytes"):
            return  # there was no room for it
        gpu, cell, on = self.gpu, self.cell, self.on
        gpu.allocated[on.index] -= self.num_bytes
        if self.graph is not None:
            return  # no others get it
        for user, count in self.used.items():
            if user is not on and user not in self.users and user.num_done < count:
                gpu.num_races += 1
        gpu.num_aborts += bool(self.users) and gpu.has_failed(on.index)
        used = [user.record_event().done for user in self.users]

        def unused() -> None:
            for done in used:
                done.wait()
            on.launch(free)

        def free() -> None:
            if gpu.poison and cell[0] is not None:
                _spoil(cell)
                gpu.num_poisoned += 1

        (gpu.unused if used else on).launch(unused)


class CudaTensor(Tensor):
    """``meta`` says what it is like, ``cell`` holds its value once the kernel has run."""

    @staticmethod
    def __new__(cls, meta: Tensor, cell: list[Any], memory: _Memory) -> CudaTensor:
        form = meta.size(), meta.stride(), meta.storage_offset()
        kind = {"dtype": meta.dtype, "device": memory.on.device}
        tensor = Tensor._make_wrapper_subclass(cls, *form, **kind)
        tensor.meta, tensor.cell, tensor.memory = meta, cell, memory
        return tensor

    def record_stream(self, used_by: Stream) -> None:
        if not any(each.graph for each in _gpu.streams if each.index == used_by.index):
            self.memory.users.add(used_by)  # else PyTorch takes it for a use in that graph

    def copy_(self, source: Tensor, non_blocking: bool = False) -> CudaTensor:
        return _dispatch(aten.copy_.default, (self, source, non_blocking), {})

    def contiguous(self) -> Tensor:
        like = torch.contiguous_format
        return self if self.is_contiguous() else self.clone(memory_format=like)

    def untyped_storage(self) -> Any:
        return self.meta.untyped_storage()

    def data_ptr(self) -> int:
        return id(self.memory) + self.meta.storage_offset()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def __repr__(self) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


class Mode(TorchDispatchMode):
    """What makes tensors on a device, or in pinned memory, out of others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.is_pinned.default:
            return hasattr(args[0], "pinned")
        device = kwargs.get("device")
        goes = device is not None and torch.device(device).type == "cuda"
        results = any(isinstance(x, CudaTensor) for x in pytree.tree_leaves((args, kwargs)))
        if goes or results or kwargs.get("pin_memory"):
            return _dispatch(func, args, kwargs)
        return func(*args, **kwargs)


@cache
def _only_elsewhere() -> frozenset[str]:
    """Operators for which PyTorch has no CUDA kernel, by the list that it comes with."""
    listed = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    kernels: dict[str, str] = {}
    for entry in re.sub(r"#.*", "", listed.read_text("utf-8")).split("\n- func: ")[1:]:
        name, rest = entry.split("(", 1)
        kinds = re.search(r"\n  dispatch:((?:\n    .*)+)", rest)
        base = re.search(r"\n  structured_delegate: (\S+)", rest)
        # Without either it is made of other operators, or by a template for all.
        own = kinds[1] if kinds and "ufunc_inner_loop" not in rest else ""
        kernels[name] = base[1] if base else own or "Composite"
    kernels = {name: kernels.get(kinds, kinds) for name, kinds in kernels.items()}
    lacking = [x for x, kinds in kernels.items() if not re.search(r"\bCUDA\b|Composite", kinds)]
    return frozenset(f"aten.{x}" if "." in x else f"aten.{x}.default" for x in lacking)


_ANY_ORDER = {aten.sort.default: 1, aten.topk.default: 2}  # of what is equal; place of ``dim``


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    at = _ANY_ORDER.get(func)
    if at is None or args[0].dim() == 0:
        return func(*args, **kwargs)
    dim = args[at] if len(args) > at else kwargs.get("dim", -1)
    values, where = func(args[0].flip(dim), *args[1:], **kwargs)
    return values, args[0].shape[dim] - 1 - where


def _moves(func: Any) -> bool:
    return str(func).startswith(("aten._to_copy.", "aten.to.", "aten.copy_."))


def _as_meta(x: Any) -> Any:
    if isinstance(x, CudaTensor):
        return x.meta
    if isinstance(x, Tensor):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


class _Later:
    """A tensor argument of a kernel: what its cell holds when the kernel runs."""

    def __init__(self, cell: list[Any]) -> None:
        self.cell = cell


_forms: dict[Any, Any] = {}  # of results that share no memory with an argument, by those of all


def _form(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.size(), x.stride(), x.dtype, x.storage_offset()
    return type(x), x


def _metas(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives, without values: slow, so found once for each form of arguments."""
    options = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    leaves, structure = pytree.tree_flatten((args, options))
    key = (func, structure, *map(_form, leaves))
    with torch.inference_mode(False), torch.no_grad():
        if key in _forms:
            forms, spec = _forms[key]
            empty = [torch.empty_strided(*f[:2], dtype=f[2], device="meta") for f in forms]
            return pytree.tree_unflatten(empty, spec)
        metas = list(map(_as_meta, leaves))
        read, options = pytree.tree_unflatten(metas, structure)
        value = func(*read, **options)
    results, spec = pytree.tree_flatten(value)
    old = {x.untyped_storage()._cdata for x in metas if isinstance(x, Tensor)}
    if all(isinstance(x, Tensor) and x.untyped_storage()._cdata not in old for x in results):
        _forms[key] = [_form(x) for x in results], spec
    return value


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, device = str(func), kwargs.get("device")
    if name in _gpu.missing or name in _only_elsewhere():
        raise NotImplementedError(f"Could not run '{name}' with arguments from the 'CUDA' backend")
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    cuda = [x for x in tensors if isinstance(x, CudaTensor)]
    host = [x for x in tensors if not isinstance(x, CudaTensor)]
    if cuda and (errors := [x.error for x in _gpu.streams if x.error]):
        raise RuntimeError(f"CUDA error: {errors[0]}")  # for good
    to_host = device is not None and torch.device(device).type == "cpu"
    with torch._C._DisableTorchDispatch():
        if kwargs.get("pin_memory") and not (device and torch.device(device).type == "cuda"):
            like = _metas(func, args, {**kwargs, "device": torch.device("meta")})
            pinned = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
            for graph in [each.graph for each in _gpu.streams if each.graph is not None]:
                if graph.mode == "global":
                    graph.failed = True  # whoever allocates
            if _gpu.asks_a_graph:
                _gpu.asks_a_graph = False
                raise RuntimeError("CUDA error: invalid argument")  # as which one is free is asked
            pinned.fill_(torch.nan if pinned.is_floating_point() else 0)
            pinned.pinned = []
            weakref.finalize(pinned, _gpu.pinned_is_free, pinned.pinned).atexit = False
            return pinned
        if func in _ASKED:
            current_stream(cuda[0].device).synchronize()
            return _ASKED[func](cuda[0].cell[0].item())
        if to_host or (func is aten.copy_.default and not isinstance(args[0], CudaTensor)):
            return _to_host(func, args, kwargs, cuda[0])
        if device is not None:
            at = _number(device)
        else:
            at = args[0].device.index if isinstance(args[0], CudaTensor) else cuda[0].device.index
        on = current_stream(torch.device("cuda", at))
        copied = host and _moves(func)
        if copied:
            args, kwargs = _from_host(on, args, kwargs, host)
        elif any(x.dim() > 0 for x in host) and "_like" not in name and ".new_" not in name:
            raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
        if any(x.device.index != at for x in cuda):
            if not _moves(func):
                raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
            source = current_stream(cuda[-1].device)  # which copies from GPU to GPU
            source.wait_stream(on)
            value = _launch(func, args, kwargs, [], source, at, True)
            on.wait_stream(source)
            return value
        return _launch(func, args, kwargs, cuda, on, at, bool(copied))


def _to_host(func: Any, args: Any, kwargs: dict[str, Any], source: CudaTensor) -> Any:
    on, cell, gpu = current_stream(source.device), source.cell, _gpu
    memory = source.memory
    inference, in_place = torch.is_inference_mode_enabled(), func is aten.copy_.default
    target, rest = (args[0], ()) if in_place else (None, args[1:])
    late = in_place and (kwargs.get("non_blocking") or args[2:] == (True,))
    if not _moves(func):  # e.g. empty_like: only the form is asked for
        like = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype)
        return func(like, *rest, **kwargs)
    copied: list[Any] = [None]
    del args, source  # a stream holds no memory that Python has dropped

    def copy() -> None:
        time.sleep(gpu.copy_s)
        with torch.inference_mode(inference), torch.no_grad():
            if target is not None:
                copied[0] = target.copy_(cell[0])
            else:
                copied[0] = func(cell[0].clone(), *rest, **kwargs | {"non_blocking": False})

    if not (late and hasattr(target, "pinned")):
        on.may_wait()
    on.launch(copy)
    memory.use(on)
    del memory
    if late and hasattr(target, "pinned"):
        gpu.copies["back"] += 1
        target.pinned.append(on)
        return target
    gpu.copies["back and wait"] += 1
    on.synchronize()
    return copied[0]


def _from_host(on: Stream, args: Any, kwargs: dict[str, Any], host: list[Tensor]) -> Any:
    """Pageable memory is read while the caller waits, after the stream has come so far."""
    if all(hasattr(x, "pinned") for x in host):
        _gpu.copies["pinned"] += 1
        for x in host:
            x.pinned.append(on)
        return args, kwargs
    _gpu.copies["pageable"] += 1
    on.synchronize()  # which a stream that is captured may not
    read = {id(x): x.detach().clone() for x in host}

    def swap(x: Any) -> Any:
        return read.get(id(x), x) if isinstance(x, Tensor) else x

    return pytree.tree_map(swap, args), pytree.tree_map(swap, kwargs)


def _check_library(func: Any, on: Stream) -> None:
    """What cuBLAS and cuDNN need in a thread they cannot get while a graph is captured."""
    known = _here.__dict__.setdefault("libraries", set())
    for library, words in {"cuBLAS": ("linear", "mm"), "cuDNN": ("conv", "lstm")}.items():
        if any(word in str(func) for word in words) and library not in known:
            if on.graph is not None:
                on.graph.failed = True
                raise RuntimeError(f"{library} cannot begin while the stream is capturing")
            known.add(library)
        if library == "cuBLAS" and any(word in str(func) for word in words):
            if (key := (threading.get_ident(), on)) not in _gpu.workspaces:
                _gpu.allocate(on.index, _gpu.library_bytes)
            workspace = _gpu.workspaces[key]
            if on.graph is not None:
                on.graph.workspaces.append(workspace)


def _launch(func, args, kwargs, cuda, on, at, is_copy) -> Any:
    gpu, inference = _gpu, torch.is_inference_mode_enabled()
    owner = {x.meta.untyped_storage()._cdata: x for x in cuda}
    in_place = {id(x.meta): x for x in cuda}
    metas = _metas(func, args, kwargs)
    if not cuda:  # nothing is shared with what comes from elsewhere
        with torch.inference_mode(False):
            metas = pytree.tree_map_only(Tensor, torch.empty_like, metas)
    leaves, spec = pytree.tree_flatten(metas)
    results: list[Any] = []
    cells: list[Any] = []
    for meta in leaves:
        if not isinstance(meta, Tensor) or id(meta) in in_place:
            results.append(in_place.get(id(meta), meta))
            cells.append(None)
            continue
        base = owner.get(meta.untyped_storage()._cdata)
        cell: list[Any] = [None]
        home = current_stream(torch.device("cuda", at))
        num_bytes = meta.untyped_storage().nbytes()
        memory = base.memory if base is not None else _Memory(gpu, cell, home, num_bytes)
        # A view of an ordinary tensor is one, in inference mode too.
        with torch.inference_mode(inference and (base is None or base.is_inference())):
            results.append(CudaTensor(meta, cell, memory))
        cells.append((cell, base is None))
    more = gpu.scratch.get(str(func), 0)
    try:
        gpu.allocate(at, more)
    except torch.OutOfMemoryError:
        if "aten.conv" not in str(func):
            raise
        raise RuntimeError("GET was unable to find an engine to execute this computation") from None
    gpu.allocated[at] -= more
    host = torch.device("cpu")

    def later(x: Any) -> Any:
        if isinstance(x, CudaTensor):
            return _Later(x.cell)
        return host if isinstance(x, torch.device) else x

    arguments = pytree.tree_map(later, (args, kwargs))

    makes = any(cell is not None and cell[1] for cell in cells)
    rate = gpu.copy_bytes_per_s if is_copy else gpu.kernel_bytes_per_s
    read = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    least_s = sum(x.nbytes for x in read[-1:] if is_copy) / rate
    least_s += sum(x.nbytes for x in read if makes and not is_copy) / rate

    def kernel() -> None:
        time.sleep(gpu.copy_s if is_copy else gpu.kernel_s)
        began = time.perf_counter()
        compute()
        time.sleep(max(0.0, began + least_s - time.perf_counter()))

    def compute() -> None:
        a, k = pytree.tree_map(lambda x: x.cell[0] if isinstance(x, _Later) else x, arguments)
        k = {name: v for name, v in k.items() if name != "pin_memory"}
        if "non_blocking" in k:
            k["non_blocking"] = False
        with torch.inference_mode(inference), torch.no_grad():
            values = pytree.tree_leaves(_computed(func, a, k))
            tensors = [x for x in pytree.tree_leaves((a, k)) if isinstance(x, Tensor)]
            read = {x.untyped_storage().data_ptr() for x in tensors}
            for slot, value in zip(cells, values, strict=True):
                if slot is not None:
                    cell, is_new = slot
                    shares = is_new and value.untyped_storage().data_ptr() in read
                    cell[0] = value.clone() if shares else value

    _check_library(func, on)
    if on.graph is None and _draws(func):
        _check_generator()
    on.launch(kernel)
    is_view = all(cell is not None and not cell[1] for cell in cells)  # a kernel only here
    if on.graph is not None and not is_view:
        on.graph.is_empty = False
    # (Between GPUs streams wait for each other once there is memory.)
    for x in () if is_view or on.index != at else (*cuda, *results):
        if isinstance(x, CudaTensor):
            x.memory.use(on)
    return pytree.tree_unflatten(results, spec)


def _may_be_efficient(read: Any, debug: bool = False) -> bool:
    """``torch.backends.cuda.can_use_efficient_attention`` of a recent GPU."""
    q, k, v = tensors = (read.query, read.key, read.value)
    return (
        all(x.device.type == "cuda" and x.dim() == 4 and x.stride(-1) == 1 for x in tensors)
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and q.shape[:2] == k.shape[:2] == v.shape[:2]
        and q.shape[-1] == k.shape[-1]
        and not any(x.shape[-1] * x.element_size() % 16 for x in tensors)
        and all(x.numel() for x in tensors)
    )


def _check_form(*tensors: Tensor | None) -> None:
    """What the kernels check of ``[B, H, L, E]``, or take for granted."""
    _gpu.num_efficient += 1
    for x in tensors:
        if x is not None:
            step = 16 // x.element_size()
            assert x.dtype == tensors[0].dtype and x.stride(3) == 1
            assert not any(at % step for at in (*x.stride()[:3], x.storage_offset()))


def _efficient_scores(q: Tensor, k: Tensor, bias: Any, causal: bool, scale: Any) -> Tensor:
    scores = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        assert bias.shape == scores.shape
        scores = scores + bias * 1.4426950408889634 / 1.4426950408889634  # may be -inf then
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf) if causal else scores


def _efficient(q, k, v, bias, keep, dropout_p=0.0, causal=False, *, scale=None) -> Any:
    _check_form(q, k, v, bias)
    assert keep and dropout_p == 0
    scores = _efficient_scores(q, k, bias, causal, scale)
    sums = scores.logsumexp(-1)
    sums = torch.where(sums == -torch.inf, 0.0, sums)
    padded = torch.full((*q.shape[:2], -(-q.shape[2] // 32) * 32), torch.nan)
    padded[..., : q.shape[2]] = sums
    output = ((scores - sums[..., None]).exp() @ v.float()).to(q.dtype)
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    return output, padded, torch.empty(0), torch.empty(0)


def _efficient_backward(
    gradient, q, k, v, bias, out, sums, seed, offset, dropout_p, wanted, causal=False, *, scale=None
) -> Any:
    _check_form(gradient, q, k, v, bias)
    length = q.shape[2]
    assert dropout_p == 0 and wanted == [True, True, True, False] and sums.is_contiguous()
    assert sums.shape[2] % 32 == 0 and sums[..., length:].isposinf().all()
    assert out.storage_offset() % 4 == 0
    strides = (out.stride(0), out.stride(1), v.shape[1] * v.shape[3], 1)
    out = out.as_strided(out.shape, strides).float()  # the second last is not asked for
    q, k, v, g = (x.float() for x in (q, k, v, gradient))
    weights = (_efficient_scores(q, k, bias, causal, scale) - sums[..., :length, None]).exp()
    of_scores = weights * (g @ v.mT - (g * out).sum(-1, keepdim=True))
    of_scores = of_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    results = (of_scores @ k, of_scores.mT @ q, weights.mT @ g)
    gradients = (x.to(gradient.dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in results)
    return (*gradients, None)


def _draws(func: Any) -> bool:
    return any(word in str(func) for word in ("aten.rand", "aten.bernoulli", "aten.native_dropout"))


class CUDAGraph:
    """What was launched on a stream between two calls, to be launched again."""

    def __init__(self) -> None:
        self.work: list[Any] = []
        self.workspaces: list[dict[Stream, int]] = []
        self.cells: list[list[Any]] = []  # of the memory that it has got
        self.failed, self.ended, self.is_empty = False, False, True

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.stream, self.mode = current_stream(), capture_error_mode
        self.thread, self.pool = threading.get_ident(), pool
        assert self.stream is not default_stream(), "graphs are captured on another stream"
        if pool in _gpu.spoiled_pools or _gpu.open_pools[pool]:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if _gpu.used_pools.get(pool) == 0:
            raise RuntimeError("INTERNAL ASSERT FAILED: it->second->use_count > 0")
        _gpu.open_pools[pool] += 1
        _gpu.used_pools[pool] += 1
        _gpu.captured = True
        self.stream.graph = self

    def capture_end(self) -> None:
        if self.stream.graph is not self:
            raise RuntimeError("CUDA error: the stream is not capturing")
        self.stream.graph = None
        if self.failed:  # and neither allocators nor the generator are told
            _gpu.spoiled_pools.add(self.pool)
            raise RuntimeError("CUDA error: operation failed due to a previous error in capture")
        if self.is_empty:
            warnings.warn("The CUDA Graph is empty.", UserWarning, stacklevel=2)
        _end_allocate(self.stream.index, self.pool)
        _gpu.captured = False
        self.ended = True
        self.later: list[weakref.ref[CUDAGraph]] = []  # of the same pool
        for earlier in _gpu.graphs[self.pool]:
            earlier.later.append(weakref.ref(self))
        _gpu.graphs[self.pool].add(self)

    def replay(self) -> None:
        assert self.ended, "replay without a capture"
        _check_generator()
        _gpu.num_replays += 1
        stream, work = current_stream(), list(self.work)
        # What was free when a later graph of the pool was captured is that one's, and this one's.
        spoiled = [cell for ref in self.later if (x := ref()) is not None for cell in x.cells]
        stream.launch(lambda: [_spoil(cell) for cell in spoiled])
        stream.launch(lambda: [each() for each in work])
        for used in self.workspaces:  # by graphs that run beside this one
            others = used.keys() - {stream, *stream.seen}
            _gpu.num_races += any(other.num_done < used[other] for other in others)
            used[stream] = stream.num_launched


def _end_allocate(device: int, pool: Any) -> None:
    if not _gpu.open_pools[pool]:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    _gpu.open_pools[pool] -= 1


def _release_pool(device: int, pool: Any) -> None:
    _gpu.used_pools[pool] -= 1


def _check_generator() -> None:
    if _gpu.captured:
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(total_memory=_gpu.memory_bytes, name="Emulated GPU", uuid="none")


def nvml(count: int) -> Any:
    """The module ``pynvml`` of GPUs that draw 100 W each."""
    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: "GPU-none",
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: int(1e5 * time.perf_counter()),
        nvmlDeviceGetPowerUsage=lambda handle: 100_000,
    )


def _empty_cache() -> None:
    """Memory is given back to CUDA, for which a thread that captures may not ask."""
    for each in _gpu.streams:
        if each.graph is not None and each.graph.thread == threading.get_ident():
            each.graph.failed = True


def _reset_peak(device: Any = None) -> None:
    _gpu.peak[_number(device)] = _gpu.allocated[_number(device)]


@contextmanager
def emulated(num_devices: int = 1, memory_bytes: int = 2**33, **options: Any) -> Iterator[Gpu]:
    """``num_devices`` emulated GPUs of ``memory_bytes`` each; for ``options`` see ``Gpu``.

    Threads that are started meanwhile see them too.
    """
    global _gpu
    from placement.executor import backend, graphs

    _gpu = gpu = Gpu(num_devices, memory_bytes, **options)
    gpu.unused, _here.streams = Stream(), {}
    start = threading.Thread.start

    def start_in_mode(thread: threading.Thread) -> None:
        run = thread.run

        def run_in_mode() -> None:
            del thread.run  # or the thread would hold itself
            with Mode():
                run()

        if getattr(thread._target, "__func__", None) is not Stream._run:
            thread.run = run_in_mode
        start(thread)

    def limited(share: float, device: Any = None) -> None:
        gpu.memory_bytes = int(share * memory_bytes)

    def free(device: Any = None) -> tuple[int, int]:
        return gpu.memory_bytes - gpu.allocated[_number(device)], memory_bytes

    stand_ins = {
        "is_available": lambda: True,
        "device_count": lambda: num_devices,
        "current_device": _number,
        "get_device_properties": _properties,
        "get_device_name": lambda device=None: "Emulated GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "set_device": lambda device: setattr(_here, "device", _number(device)),
        "set_per_process_memory_fraction": limited,
        "Stream": Pooled,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: current_stream().graph is not None,
        "device": _on,
        "mem_get_info": free,
        "reset_peak_memory_stats": _reset_peak,
        "empty_cache": _empty_cache,
        "_lazy_init": lambda: None,
    }
    for same in (synchronize, Event, CUDAGraph, current_stream, default_stream, set_stream, stream):
        stand_ins[same.__name__] = same
    for kind in ("allocated", "reserved"):
        stand_ins[f"memory_{kind}"] = lambda device=None: gpu.allocated[_number(device)]
        stand_ins[f"max_memory_{kind}"] = lambda device=None: gpu.peak[_number(device)]
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        for name, inner in {
            "_cuda_endAllocateToPool": _end_allocate,
            "_cuda_releasePool": _release_pool,
            "_cuda_clearCublasWorkspaces": gpu.clear_workspaces,
            "_cuda_getCurrentStream": lambda index: _name(current_stream(index)),
            "_cuda_setStream": lambda stream, *_: set_stream(stream),
        }.items():
            stack.enter_context(patch.object(torch._C, name, inner, create=True))
        efficient = "torch.backends.cuda.can_use_efficient_attention"
        stack.enter_context(patch(efficient, _may_be_efficient))
        kernels = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name, kernel in {"": _efficient, "_backward": _efficient_backward}.items():
            kernels.impl(f"_scaled_dot_product_efficient_attention{name}", kernel, "CPU")
        stack.enter_context(patch.object(threading.Thread, "start", start_in_mode))
        # ``patch.dict`` would forget what is imported for the first time meanwhile.
        before = {name: sys.modules[name] for name in ("pynvml",) if name in sys.modules}
        sys.modules["pynvml"] = nvml(num_devices)
        stack.callback(lambda: [sys.modules.pop("pynvml", None), sys.modules.update(before)])
        # Threads and streams that are kept for the next runner.
        stack.enter_context(patch.object(backend, "_IDLE", defaultdict(list)))
        stack.enter_context(patch.object(backend, "_CALLERS", {}))
        stack.enter_context(patch.object(graphs, "_STREAMS", {}))
        stack.enter_context(Mode())
        try:
            yield gpu
        finally:  # a thread in the midst of a kernel would not survive the end of the interpreter
            for idle in chain.from_iterable(backend._IDLE.values()):
                for carrier in (idle.launcher, idle.porter, idle.courier):
                    carrier.close()
            for each in gpu.streams:
                each.launch(None)
