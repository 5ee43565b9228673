"""The input pipeline: order, bounds, and errors in their place."""

import sys
import threading
import time
from itertools import islice
from unittest.mock import Mock

import pytest
import torch

from placement.executor import loader
from placement.executor.loader import InputPipeline, is_dataset, num_bytes
from tests.machine import alive

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_running")]

PAUSE_S = 0.002  # of a loader that is worth a thread


class Squares:
    """A map-style data set; ``busy`` is how many threads are in it, ``most`` the maximum."""

    def __init__(self, size: int, pause_s: float = PAUSE_S) -> None:
        self.size, self.pause_s = size, pause_s
        self.busy = self.most = 0
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.busy += 1
            self.most = max(self.most, self.busy)
        time.sleep(self.pause_s * (1 + index % 3) / 2)  # the later may be ready first
        with self.lock:
            self.busy -= 1
        return index * index


def slowly(count: int, pause_s: float = PAUSE_S):
    for i in range(count):
        time.sleep(pause_s)
        yield i


@pytest.mark.parametrize("workers", [None, 0, 1, 3])
def test_items_come_in_order_from_a_data_set(workers):
    data = Squares(40)
    with InputPipeline(data, workers=workers) as items:
        assert list(items) == [i * i for i in range(40)]
        assert list(items) == []  # and it stays at its end
    assert data.most <= max(workers or 0, 1)


def test_a_second_interrupt_while_threads_end_leaves_the_process_as_it_was(monkeypatch):
    before, items = sys.getswitchinterval(), InputPipeline(Squares(40), workers=1)
    assert next(items) == 0 and sys.getswitchinterval() < before
    (thread,) = items._threads
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(thread, "join", Mock(side_effect=KeyboardInterrupt))
        items.close()
    assert sys.getswitchinterval() == before
    thread.join()


@pytest.mark.parametrize("workers", [2, 3])
def test_several_threads_are_in_a_data_set_at_once(workers):
    together = threading.Barrier(workers, timeout=30)

    class Meeting(Squares):
        def __getitem__(self, index: int) -> int:
            if index < workers:
                together.wait()
            return super().__getitem__(index)

    with InputPipeline(Meeting(10), workers=workers) as items:
        assert list(items) == [i * i for i in range(10)]


@pytest.mark.parametrize("workers", [None, 0, 1])
def test_an_iterator_is_read_by_one_thread_at_a_time(workers):
    """A generator that two threads entered would raise."""
    with InputPipeline(slowly(30), workers=workers) as items:
        assert list(items) == list(range(30))


def test_preprocessing_of_an_iterators_items_runs_in_several_threads():
    seen = set()
    together = threading.Barrier(3, timeout=30)

    def prepare(i):
        seen.add(threading.current_thread().name)
        if i < 3:
            together.wait()
        return -i

    with InputPipeline(iter(range(30)), preprocess=prepare, workers=3) as items:
        assert list(items) == [-i for i in range(30)]
    assert len(seen) == 3


def test_what_costs_nothing_is_loaded_by_the_caller(monkeypatch):
    monkeypatch.setattr(loader, "WORTH_A_THREAD_S", 60.0)  # however busy the machine is
    with InputPipeline([1, 2, 3] * 20) as items:
        for _ in items:
            assert alive() == []


def test_what_costs_something_is_loaded_ahead():
    taken = []

    def source():
        for i in slowly(1000):
            taken.append(i)
            yield i

    with InputPipeline(source(), prefetch=5) as items:
        for i, _ in zip(range(10), items, strict=False):
            time.sleep(2 * PAUSE_S)
            assert len(taken) <= i + 1 + 5
        while len(taken) < 15:  # it runs ahead as far as it may, and stops there
            time.sleep(PAUSE_S)
        time.sleep(5 * PAUSE_S)
        assert len(taken) == 15
        assert alive() == ["placement-loader-0"]


@pytest.mark.parametrize("options", [{}, {"workers": 2, "prefetch": 50}])
def test_items_ahead_stay_within_the_memory_limit(options):
    loaded = []

    def prepare(i):
        time.sleep(PAUSE_S / 4)
        loaded.append(i)
        return torch.zeros(1000)  # 4000 bytes

    options |= {"prefetch_bytes": 13_000}
    with InputPipeline(range(10**6), preprocess=prepare, **options) as items:
        for count, _ in enumerate(islice(items, 100), 1):
            time.sleep(PAUSE_S / 4)
            if count > 60:  # it knows what an item weighs, and has handed out what came before
                assert len(loaded) - count <= 3
        assert items.ahead == (3 if options.get("prefetch") else 2)


def test_until_one_is_weighed_each_thread_loads_one_item() -> None:
    loaded = []

    def prepare(i):
        loaded.append(i)
        return torch.zeros(1000)  # 4000 bytes

    options = {"workers": 2, "prefetch": 50, "prefetch_bytes": 4000}
    with InputPipeline(range(100), preprocess=prepare, **options) as items:
        next(items)
        time.sleep(5 * PAUSE_S)
        assert len(loaded) == 2


@pytest.mark.parametrize("workers", [None, 0, 1, 4])
def test_errors_are_raised_in_the_place_of_their_item(workers):
    def prepare(i):
        time.sleep(PAUSE_S)
        if i == 7:
            raise OSError("disk on fire")
        return i

    seen = []
    with (
        InputPipeline(range(100), preprocess=prepare, workers=workers) as items,
        pytest.raises(OSError, match="disk on fire"),
    ):
        for x in items:
            seen.append(x)
    assert seen == list(range(7))
    assert list(items) == [] and alive() == []


@pytest.mark.parametrize("error", [StopIteration, SystemExit, KeyError])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_exception_ends_the_items_silently(error, workers):
    def prepare(i):
        raise error

    with (
        InputPipeline([1], preprocess=prepare, workers=workers) as items,
        pytest.raises(RuntimeError if error is StopIteration else error),
    ):
        list(items)


def test_an_iterator_that_raises_is_not_asked_again():
    asked = []

    class Once:
        def __iter__(self):
            return self

        def __next__(self):
            asked.append(1)
            raise OSError

    for workers in (0, 1):
        with InputPipeline(Once(), workers=workers) as items, pytest.raises(OSError):
            next(items)
    assert len(asked) == 2


@pytest.mark.parametrize("workers", [1, 4])
def test_closing_in_mid_stream_ends_the_threads(workers):
    items = InputPipeline(Squares(10**9), workers=workers)
    assert next(items) == 0
    assert alive()
    items.close()
    assert alive() == [] and list(items) == []
    items.close()


def test_what_several_threads_may_read():
    class Indexed(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return index

        def __len__(self):
            return 3

    loader = torch.utils.data.DataLoader(Indexed())
    assert [is_dataset(x) for x in ([1], (1,), range(3), Indexed())] == [True] * 4
    assert [is_dataset(x) for x in (loader, iter([1]), {0: 1}, torch.zeros(3))] == [False] * 4


def test_what_processes_load_ahead_is_taken_by_the_caller():
    class Slow(torch.utils.data.IterableDataset):  # as a loader with processes, but without them
        num_workers = 1

        def __iter__(self):
            for i in range(4):
                time.sleep(2 * loader.WORTH_A_THREAD_S)
                yield i, threading.current_thread() is threading.main_thread()

    assert list(InputPipeline(Slow())) == [(i, True) for i in range(4)]
    # Who asks for a thread gets one, and what is done with the items here is worth some.
    by_thread = [x for _, x in InputPipeline(Slow(), workers=1)]
    assert by_thread == [False] * 4
    prepared = [x for _, x in InputPipeline(Slow(), preprocess=lambda item: item)]
    assert prepared == [True, True, False, False]


def test_num_bytes_of_nested_items():
    x = torch.zeros(3, dtype=torch.float64)
    assert num_bytes({"a": x, "b": [x.numpy(), (x, "text", None)]}) == 3 * 24
    assert num_bytes([x.to_sparse(), x]) == 24  # what does not tell counts nothing


def test_an_item_that_cannot_be_weighed_is_an_error_in_its_place():
    endless: list = []
    endless.append(endless)
    with InputPipeline([1, endless], workers=1) as items:
        assert next(items) == 1
        with pytest.raises(RecursionError):
            next(items)


def test_loader_threads_leave_the_callers_thread_count_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        changed = threading.Event()

        def prepare(i):
            if i > 0:  # once another thread has changed its own
                assert changed.wait(30)
                return torch.get_num_threads()

        with InputPipeline(range(4), preprocess=prepare, workers=2, prefetch=1) as items:
            next(items)
            torch.set_num_threads(2)
            changed.set()
            assert list(items) == [1] * 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_threads_that_load_give_the_interpreter_away_sooner() -> None:
    """While they run; afterwards it is as it was."""
    before = sys.getswitchinterval()
    with InputPipeline(list(range(20)), workers=1) as items:
        assert next(items) == 0
        assert sys.getswitchinterval() < before
        assert list(items) == list(range(1, 20))
        assert sys.getswitchinterval() == before


def test_several_loaders_at_once_leave_the_interval_as_it_was() -> None:
    before = sys.getswitchinterval()
    first, second = (InputPipeline(list(range(9)), workers=1) for _ in range(2))
    assert next(first) == next(second) == 0
    first.close()
    assert sys.getswitchinterval() < before  # the second still loads
    second.close()
    assert sys.getswitchinterval() == before
