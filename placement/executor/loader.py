"""``InputPipeline``: items are loaded and prepared while the devices work on earlier ones.

The first items are loaded in the thread that asks for them, and timed. Where that costs next to
nothing it stays so: handing an item from thread to thread costs more. Otherwise threads load
ahead. ``Tuning`` chooses how many and how far from what is measured: the time of an item, the
time of a step, what items weigh, and whether more threads have made the stream faster.

As in ``worker.py`` threads talk through queues only. A worker takes a permit from one queue,
loads the next item and puts it into the other; the consumer puts items back in order and gives a
permit for every item it hands out. So the number of permits is the number of items that are
loaded ahead, and an interrupted consumer leaves no lock behind.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from placement.executor.backend import set_own_num_threads, stay_on
from placement.program import leaves_of

PREFETCH_BYTES = 2**28
MAX_WORKERS = 16
WORTH_A_THREAD_S = 2e-4  # a few times what a handover between threads costs
_STARVED = 0.05  # of the time, that devices wait for items before workers are added
_SPARE = 1.1  # so many times the workers that would just do
_WORTH = 1.05  # times the rate before, or added workers are taken away
SWITCH_S = 1e-5  # how long a thread may keep the interpreter that another one asks for


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


@dataclass(frozen=True)
class Window:
    """What was measured while ``num_items`` were handed out, in ``elapsed_s``.

    Attributes:
        waited_s: the consumer waited so long for items.
        busy_s: the busiest device worked so long.
        load_s, slowest_s: mean and longest time that one worker took for an item.
        item_bytes: the largest item.
    """

    num_items: int
    elapsed_s: float
    waited_s: float
    busy_s: float
    load_s: float
    slowest_s: float
    item_bytes: int


@dataclass(frozen=True)
class Tuning:
    """How many workers load, and how many items ahead of the consumer; ``after`` is the next.

    Workers are added while the devices wait for the loader, as many as the measured times ask
    for. What did not make the stream 5 % faster is taken back (the cores are busy, or the source
    is the limit), and tried again only after 1, 2, 4, ... windows.
    """

    workers: int = 1
    ahead: int = 2
    before: tuple[int, float] | None = None  # workers and items per second before they were added
    pause: int = 0  # windows until more workers are tried again
    next_pause: int = 1

    def after(self, seen: Window, max_workers: int, memory_bytes: int) -> Tuning:
        """The choice for the next window; pure."""
        rate = seen.num_items / seen.elapsed_s
        # At least 1 % of the time, for devices that only pass items on.
        step_s = max(seen.busy_s, 0.01 * seen.elapsed_s) / seen.num_items
        workers, before = self.workers, None
        pause, next_pause = max(self.pause - 1, 0), self.next_pause
        if self.before is not None and rate < _WORTH * self.before[1]:
            workers, pause, next_pause = self.before[0], next_pause, 2 * next_pause
        starved = min(seen.waited_s, seen.elapsed_s - seen.busy_s) > _STARVED * seen.elapsed_s
        if starved and pause == 0 and workers < max_workers:
            before = (workers, rate)
            workers = max(workers + 1, math.ceil(_SPARE * seen.load_s / step_s))
        room = max(1, memory_bytes // max(seen.item_bytes, 1))
        workers = min(workers, max_workers, room)
        # What is ready must last for as long as the slowest item may take.
        ahead = min(workers + math.ceil(seen.slowest_s / step_s), 4 * MAX_WORKERS, room)
        return Tuning(workers, max(ahead, workers), before, pause, next_pause)


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
        workers: threads that load; None chooses, 0 loads in the calling thread. What a
            ``DataLoader`` with processes of its own gives is loaded ahead already: None is 0.
        prefetch: items that are loaded ahead, ready or being loaded; None chooses.
        prefetch_bytes: they weigh at most this (as far as tensors and arrays among them tell),
            but one is always loaded.
        busy_s: tells how long the busiest device has worked so far; without it, all time
            between two items counts as work.
        cores: where the threads run; none given: anywhere.

    A context manager; ``close`` ends the threads after the item they are at. Items that were
    loaded ahead are lost then. An exception of the loader is raised in the place of its item.

    Attributes:
        span_ns: begin and end of loading the item that was handed out last.
        waited_ns: how long the consumer has waited for items so far.
        peak_bytes: most that was loaded and not handed out at any time.
        tuning: the current choice.

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
        busy_s: Callable[[], float] | None = None,
        cores: Collection[int] = (),
    ) -> None:
        if workers is not None and workers < 0:
            raise LoaderError(f"workers = {workers}: give 0 to load in the calling thread, or more")
        if prefetch is not None and prefetch < 1:
            raise LoaderError(f"prefetch = {prefetch}: give at least 1, or workers=0 for none")
        if workers is None and preprocess is None and getattr(items, "num_workers", 0) > 0:
            workers = 0  # a ``DataLoader`` whose processes load ahead: a thread between only delays
        parallel = preprocess is not None or is_dataset(items)
        if workers is not None and workers > 1 and not parallel:
            raise LoaderError(
                f"workers = {workers}, but {type(items).__name__} is an iterator, which one worker "
                "reads: give a data set with __getitem__ and __len__, or preprocess="
            )
        self.span_ns = (0, 0)
        self.waited_ns = 0
        self.peak_bytes = 0
        self.tuning = Tuning(workers or 1, prefetch or 2 * (workers or 1))
        self._fixed: dict[str, Any] = {
            name: value
            for name, value in (("workers", workers), ("ahead", prefetch))
            if value is not None
        }
        self._max_workers = workers or (MAX_WORKERS if parallel else 1)
        self._memory_bytes = prefetch_bytes
        self._busy_s = busy_s or self._consumer_busy_s
        self._cores = frozenset(cores)
        self._source = _Source(items, preprocess)
        self._permits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[_Loaded] = queue.SimpleQueue()
        self._ready: dict[int, _Loaded] = {}
        self._ready_bytes = 0
        self._num_taken = 0  # items handed out
        self._permitted = 0  # items that threads have loaded or may load
        self._num_slow = 0  # of the last items loaded in the calling thread
        self._threads: list[threading.Thread] = []
        self._num_working = 0  # threads that were not told to end
        self._torch_threads = torch.get_num_threads()
        self._open_window()

    def __next__(self) -> Any:
        if self._source.ended and not self._threads:
            raise StopIteration
        asked_ns = time.perf_counter_ns()
        if self._threads or self._wants_threads():
            item = self._next_loaded()
        else:
            item = self._next_inline()
        self.waited_ns += time.perf_counter_ns() - asked_ns
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
            self._observe(item)
            self._direct()
        return item.value

    def close(self) -> None:
        """End the threads, after the item they are at. Idempotent."""
        self._source.ended = True
        for _ in self._threads:
            self._permits.put(False)
        for thread in self._threads:
            # Not started for an interrupt, or the one in which a forgotten one is collected.
            if thread.ident not in (None, threading.get_ident()):
                thread.join()
        if self._threads:
            _SWITCHES.restore()
        self._threads = []
        self._ready.clear()
        self._source.let_go()

    def __enter__(self) -> InputPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wants_threads(self) -> bool:
        if "workers" in self._fixed:
            return self._fixed["workers"] > 0
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
            self._direct()
            self._open_window()
        while not self._loaded.empty() or self._num_taken not in self._ready:
            item = self._loaded.get()
            self._ready[item.index] = item
            self._ready_bytes += item.num_bytes
        self.peak_bytes = max(self.peak_bytes, self._ready_bytes)
        item = self._ready.pop(self._num_taken)
        self._ready_bytes -= item.num_bytes
        return item

    def _direct(self) -> None:
        """Give permits, start and end threads as ``tuning`` says."""
        for _ in range(self._permitted, self._num_taken + self.tuning.ahead):
            self._permits.put(True)
            self._permitted += 1
        for _ in range(self.tuning.workers, self._num_working):
            self._permits.put(False)
        if not self._threads:
            # A loader that computes in Python keeps the interpreter until it is asked for it:
            # by default after 5 ms, for which a device would wait after every operator.
            _SWITCHES.shorten()
        for _ in range(self._num_working, self.tuning.workers):
            name = f"placement-loader-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()
        self._num_working = self.tuning.workers

    def _work(self) -> None:
        stay_on(self._cores)
        set_own_num_threads(1)  # several threads load: each works alone, as in a DataLoader
        try:
            while self._permits.get() and (item := self._source.load(ahead=True)) is not None:
                self._loaded.put(item)
        finally:
            torch.set_num_threads(self._torch_threads)  # new threads of the process inherit it

    def _open_window(self) -> None:
        self._window = (time.perf_counter_ns(), self.waited_ns, self._busy_s())
        self._load_s: list[float] = []
        self._item_bytes = 0

    def _observe(self, item: _Loaded) -> None:
        self._load_s.append((item.end_ns - item.start_ns) * 1e-9)
        self._item_bytes = max(self._item_bytes, item.num_bytes)
        self.tuning = self._within_memory(self.tuning)
        if len(self._load_s) < max(8, 2 * self.tuning.ahead):
            return
        began_ns, waited_ns, busy_s = self._window
        seen = Window(
            num_items=len(self._load_s),
            elapsed_s=(time.perf_counter_ns() - began_ns) * 1e-9,
            waited_s=(self.waited_ns - waited_ns) * 1e-9,
            busy_s=self._busy_s() - busy_s,
            load_s=sum(self._load_s) / len(self._load_s),
            slowest_s=max(self._load_s),
            item_bytes=self._item_bytes,
        )
        chosen = self.tuning.after(seen, self._max_workers, self._memory_bytes)
        self.tuning = self._within_memory(replace(chosen, **self._fixed))
        self._open_window()

    def _within_memory(self, tuning: Tuning) -> Tuning:
        """At most so many threads, and items ahead, as their bytes allow."""
        room = max(1, self._memory_bytes // max(self._item_bytes, 1))
        return replace(tuning, workers=min(tuning.workers, room), ahead=min(tuning.ahead, room))

    def _consumer_busy_s(self) -> float:
        return (time.perf_counter_ns() - self.waited_ns) * 1e-9


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
                sys.setswitchinterval(min(self._before_s, SWITCH_S))
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
