"""``InputPipeline``: items are loaded and prepared while the devices work on earlier ones.

The first items are loaded in the thread that asks for them, and timed. Where that costs next to
nothing it stays so: handing an item from thread to thread costs more. Otherwise one thread loads
ahead, or as many as ``workers`` says.

As in ``worker.py`` threads talk through queues only. A worker takes a permit from one queue,
loads the next item and puts it into the other; the consumer puts items back in order and gives a
permit for every item it hands out. So the number of permits is the number of items that are
loaded ahead, and an interrupted consumer leaves no lock behind.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from placement.executor.backend import set_own_num_threads, stay_on
from placement.program import leaves_of

PREFETCH_BYTES = 2**28
WORTH_A_THREAD_S = 2e-4  # a few times what a handover between threads costs


class LoaderError(ValueError):
    """The loader cannot be used this way; the message says what to give."""


class Dataset(Protocol):
    """What several workers can read at once."""

    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


class Unwritten:
    """Notices what PyTorch writes to tensors from now on; it keeps none of them.

    What numpy or another process writes does not show, nor what is written to a tensor of
    ``torch.inference_mode``.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._seen = []
        for i, x in enumerate(tensors):
            if not x.is_inference():
                base = x if x._base is None else x._base  # views count with what they are of
                self._seen.append((i, weakref.ref(base), base._version))

    def first_written(self) -> int | None:
        """Which tensor was written to, the first by number; None: none that is still there."""
        for i, base, version in self._seen:
            if (x := base()) is not None and x._version != version:
                return i
        return None


@dataclass(slots=True)
class _Loaded:
    """One item: its value, or the error in its place, or neither after the last one.

    Attributes:
        num_bytes, unwritten: of one that is loaded ahead.
    """

    index: int
    value: Any = None
    error: BaseException | None = None
    is_last: bool = False
    start_ns: int = 0
    end_ns: int = 0
    num_bytes: int = 0
    unwritten: Unwritten | None = None


class _Source:
    """Items one after another: taken by one thread at a time, prepared by many."""

    def __init__(
        self, items: Iterable[Any] | Dataset, preprocess: Callable[[Any], Any] | None
    ) -> None:
        self._items: Any = items if is_dataset(items) else None
        self._iterator = iter(range(len(items)) if is_dataset(items) else items)  # type: ignore
        self._preprocess = preprocess
        self._taken = 0
        self._turn = threading.Lock()
        self.ended = False  # as after a ``for`` loop: nothing is asked after the end or an error

    def load(self, ahead: bool) -> _Loaded | None:
        """The next item, ready for use, now or later (``ahead``); None after the end."""
        with self._turn:
            if self.ended:
                return None
            index, begin = self._taken, time.perf_counter_ns()
            self._taken += 1
            try:
                item = next(self._iterator)
            except StopIteration:
                self.ended = True
                return _Loaded(index, is_last=True)
            except BaseException as error:
                self.ended = True
                return _Loaded(index, error=error)
        try:
            if self._items is not None:
                item = self._items[item]
            if self._preprocess is not None:
                item = self._preprocess(item)
            loaded = _Loaded(index, item, start_ns=begin)
            if ahead:
                loaded.num_bytes = num_bytes(item)
                tensors = (x for x in leaves_of(item) if isinstance(x, Tensor))
                loaded.unwritten = Unwritten(tensors)
        except BaseException as error:
            self.ended = True
            return _Loaded(index, error=error)
        loaded.end_ns = time.perf_counter_ns()
        return loaded

    def let_go(self) -> None:
        """Of the iterator: a ``DataLoader``'s ends its processes when nobody has it any more."""
        self._iterator = iter(())


class InputPipeline(Iterator[Any]):
    """The items of a loader in order, loaded ahead by threads where that pays.

    Args:
        items: an iterable, read by one thread at a time; or a data set (``is_dataset``), whose
            items several threads read at once.
        preprocess: called with every item, by several threads at once.
        workers: threads that load; 0 loads in the calling thread. None is one thread, if loading
            takes long enough, and 0 for a ``DataLoader`` with processes of its own, which load
            ahead already.
        prefetch: items that are loaded ahead, ready or being loaded; None is two a thread.
        prefetch_bytes: they weigh at most this (as far as tensors and arrays among them tell),
            but one is always loaded.
        cores: where the threads run; none given: anywhere.

    A context manager; ``close`` ends the threads after the item they are at. Items that were
    loaded ahead are lost then. An exception of the loader is raised in the place of its item.

    Attributes:
        span_ns: begin and end of loading the item that was handed out last.
        ahead: how many items are loaded ahead now.

    Raises:
        LoaderError: a negative number, or more workers than the items can be given to.
    """

    def __init__(
        self,
        items: Iterable[Any] | Dataset,
        *,
        preprocess: Callable[[Any], Any] | None = None,
        workers: int | None = None,
        prefetch: int | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        cores: Collection[int] = (),
    ) -> None:
        if workers is not None and workers < 0:
            raise LoaderError(f"workers = {workers}: give 0 to load in the calling thread, or more")
        if prefetch is not None and prefetch < 1:
            raise LoaderError(f"prefetch = {prefetch}: give at least 1, or workers=0 for none")
        if workers is None and preprocess is None and getattr(items, "num_workers", 0) > 0:
            workers = 0  # a ``DataLoader`` whose processes load ahead: a thread between only delays
        if (workers or 0) > 1 and preprocess is None and not is_dataset(items):
            raise LoaderError(
                f"workers = {workers}, but {type(items).__name__} is an iterator, which one worker "
                "reads: give a data set with __getitem__ and __len__, or preprocess="
            )
        self.span_ns = (0, 0)
        self.ahead = prefetch or 2 * (workers or 1)
        self._workers = workers
        self._memory_bytes = prefetch_bytes
        self._largest_bytes = 0  # of the items so far
        self._cores = frozenset(cores)
        self._source = _Source(items, preprocess)
        self._permits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[_Loaded] = queue.SimpleQueue()
        self._ready: dict[int, _Loaded] = {}
        self._num_taken = 0  # items handed out
        self._permitted = 0  # items that threads have loaded or may load
        self._num_slow = 0  # of the last items loaded in the calling thread
        self._threads: list[threading.Thread] = []
        self._torch_threads = torch.get_num_threads()

    def __next__(self) -> Any:
        if self._source.ended and not self._threads:
            raise StopIteration
        if self._threads or self._wants_threads():
            item = self._next_loaded()
        else:
            item = self._next_inline()
        if item.is_last:
            self.close()
            raise StopIteration
        if item.error is not None:
            self.close()
            if isinstance(item.error, StopIteration):  # would pass for the end of the items
                raise RuntimeError("the loader raised StopIteration") from item.error
            raise item.error
        if item.unwritten is not None and item.unwritten.first_written() is not None:
            self.close()
            raise LoaderError(
                f"item {item.index} of the loader was written to after it was loaded, when later "
                "ones were loaded ahead: let the loader make new tensors for each item (x.clone())"
            )
        self.span_ns = (item.start_ns, item.end_ns)
        self._num_taken += 1
        if self._threads:
            self._largest_bytes = max(1, self._largest_bytes, item.num_bytes)
            self.ahead = max(1, min(self.ahead, self._memory_bytes // self._largest_bytes))
            self._permit()
        return item.value

    def close(self) -> None:
        """End the threads, after the item they are at. Idempotent."""
        self._source.ended = True
        threads, self._threads = self._threads, []
        for _ in threads:
            self._permits.put(False)
        try:
            for thread in threads:
                # Not started for an interrupt, or the one in which a forgotten one is collected.
                if thread.ident not in (None, threading.get_ident()):
                    thread.join()
        finally:  # also where Ctrl-C comes again
            if threads:
                _SWITCHES.restore()
            self._ready.clear()
            self._source.let_go()

    def __enter__(self) -> InputPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wants_threads(self) -> bool:
        if self._workers is not None:
            return self._workers > 0
        return self._num_slow >= 2  # in a row: the first may have opened a file

    def _next_inline(self) -> _Loaded:
        item = self._source.load(ahead=False)
        assert item is not None, "not asked after the end"
        slow = item.end_ns - item.start_ns > 1e9 * WORTH_A_THREAD_S
        self._num_slow = self._num_slow + 1 if slow else 0
        return item

    def _next_loaded(self) -> _Loaded:
        if not self._threads:
            self._permitted = self._num_taken
            self._permit()
            self._start()
        while self._num_taken not in self._ready:
            item = self._loaded.get()
            self._ready[item.index] = item
        return self._ready.pop(self._num_taken)

    def _permit(self) -> None:
        # Before one is known to fit, as few as keep the threads busy.
        ahead = self.ahead if self._largest_bytes else min(self.ahead, self._workers or 1)
        for _ in range(self._permitted, self._num_taken + ahead):
            self._permits.put(True)
            self._permitted += 1

    def _start(self) -> None:
        # A loader that computes in Python keeps the interpreter until it is asked for it:
        # by default after 5 ms, for which a device would wait after every operator.
        _SWITCHES.shorten()
        for i in range(self._workers or 1):
            name = f"placement-loader-{i}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()

    def _work(self) -> None:
        stay_on(self._cores)
        set_own_num_threads(1)  # several threads load: each works alone, as in a DataLoader
        try:
            while self._permits.get() and (item := self._source.load(ahead=True)) is not None:
                self._loaded.put(item)
        finally:
            torch.set_num_threads(self._torch_threads)  # new threads of the process inherit it


class _Switches:
    """Shortens the interpreter's interval while any loader has threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before_s = 0.0

    def shorten(self) -> None:
        with self._lock:
            if self._count == 0:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, 1e-5))
            self._count += 1

    def restore(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                sys.setswitchinterval(self._before_s)


_SWITCHES = _Switches()


def is_dataset(items: Any) -> bool:
    """Whether several threads may read it at once: a sequence, or a map-style data set.

    That has ``__getitem__`` and ``__len__`` and, unlike what chooses its own order, no
    ``__iter__``.
    """
    kind = type(items)
    indexed = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return isinstance(items, Sequence) or (indexed and not hasattr(kind, "__iter__"))


def num_bytes(value: Any) -> int:
    """Bytes of the tensors and arrays in nested containers; 0 of what does not tell."""
    try:
        size = getattr(value, "nbytes", None)
    except RuntimeError:  # a sparse tensor: unknown
        return 0
    if isinstance(size, int):
        return size
    if isinstance(value, Mapping):
        return sum(num_bytes(x) for x in value.values())
    if isinstance(value, list | tuple):
        return sum(num_bytes(x) for x in value)
    return 0
