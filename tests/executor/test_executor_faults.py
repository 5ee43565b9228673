"""What goes wrong in a stream: a clear error, no deadlock, nothing left running, and on it goes.

Every fault is tried on a stream that loads in the calling thread, in one, and in several. The
time limit is what turns a deadlock into a failure.
"""

import gc
import resource
import signal
import threading
import time
import tracemalloc

import pytest
import torch
from torch import nn

from placement.capturing import capture
from placement.executor import Executor, Runner, RunnerError
from placement.executor.loader import LoaderError
from placement.program import InputError
from placement.workloads import tiny
from tests.machine import TWO, alive, problem_of
from tests.modules import module_of

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_running")]

PAUSE_S = 0.001


@pytest.fixture(params=[None, 0, 1, 3])
def workers(request):
    return request.param


PICKY = module_of(
    lambda m, ids: m.head(m.table(ids).relu()), table=nn.Embedding(4, 3), head=nn.Linear(3, 2)
)  # fails on the index 9, in its first operator
GRAPH = capture(PICKY.eval(), torch.zeros(2, dtype=torch.long))
SPLIT = [0, 0, 1]
GOOD, BAD = torch.tensor([0, 3]), torch.tensor([0, 9])


def runner(**options: int) -> Runner:
    return Runner(GRAPH, TWO, SPLIT, **options)


def slowly(item: torch.Tensor) -> torch.Tensor:
    time.sleep(PAUSE_S)
    return item


def works(r: Runner) -> bool:
    """The runner is usable again, for calls and for streams."""
    return r(GOOD).shape == (2, 2) and len(list(r.stream([GOOD] * 9, preprocess=slowly))) == 9


@pytest.mark.parametrize("position", [0, 5])
@pytest.mark.parametrize("in_flight", [1, 4])
def test_an_operator_that_raises(workers, position, in_flight):
    items = [GOOD] * position + [BAD] + [GOOD] * 20
    with runner(max_in_flight=in_flight) as r:
        with pytest.raises(IndexError) as caught:
            list(r.stream(items, preprocess=slowly, workers=workers))
        note = "raised on device 'cpu:0' in operator 'embedding' (module 'table')"
        assert caught.value.__notes__ == [note]
        assert alive() == []
        assert works(r)


@pytest.mark.parametrize("position", [0, 5])
def test_a_loader_that_raises(workers, position):
    """Results of the micro-batches before it come first."""

    def load(i: int) -> torch.Tensor:
        if i == position:
            raise OSError("disk on fire")
        return slowly(GOOD)

    seen = []
    with runner() as r:
        with pytest.raises(OSError, match="disk on fire") as caught:
            for y in r.stream(range(20), preprocess=load, workers=workers):
                seen.append(y)
        assert caught.value.__notes__ == [f"raised for micro-batch {position} of the stream"]
        assert len(seen) == position
        assert alive() == [] and works(r)


@pytest.mark.parametrize("length", [0, 1, 2, 7])
def test_a_loader_that_ends_early(workers, length):
    """Before, while and after the pipeline of four is filled."""
    with runner(max_in_flight=4) as r:
        items = (GOOD for _ in range(length))
        assert len(list(r.stream(items, preprocess=slowly, workers=workers))) == length
        assert not any(name.startswith("placement-loader") for name in alive())
        assert works(r)


def test_a_consumer_that_stops(workers):
    with runner() as r:
        stream = r.stream((GOOD for _ in range(10**9)), preprocess=slowly, workers=workers)
        for _ in range(5):
            next(stream)
        assert alive()
        stream.close()
        assert alive() == [] and works(r)


def test_a_stream_that_is_forgotten(workers):
    with runner() as r:
        stream = r.stream([GOOD] * 1000, preprocess=slowly, workers=workers)
        next(stream)
        del stream
        gc.collect()
        assert alive() == [] and works(r)


def test_a_consumer_that_raises(workers):
    def consume(r: Runner) -> None:
        for i, _ in enumerate(r.stream([GOOD] * 1000, preprocess=slowly, workers=workers)):
            if i == 3:
                raise ZeroDivisionError

    with runner() as r:
        with pytest.raises(ZeroDivisionError):
            consume(r)
        gc.collect()
        assert alive() == [] and works(r)


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.05])
def test_ctrl_c_wherever_the_stream_then_is(workers, delay_s):
    ended = threading.Event()

    def press() -> None:
        time.sleep(delay_s)
        # Again if nothing happens: Python drops what is raised in a callback of the collector.
        while not ended.is_set():
            signal.raise_signal(signal.SIGINT)
            ended.wait(20)

    hand = threading.Thread(target=press)
    with runner() as r:
        with pytest.raises(KeyboardInterrupt):
            items = (GOOD for _ in range(10**9))
            for i, _ in enumerate(r.stream(items, preprocess=slowly, workers=workers)):
                if i == 3:
                    hand.start()
        ended.set()
        hand.join()
        gc.collect()
        assert alive() == [] and works(r)


def test_closing_the_runner_in_mid_stream():
    r = runner()
    stream = r.stream([GOOD] * 1000, preprocess=slowly, workers=2)
    next(stream)
    stream.close()
    r.close()
    assert alive() == []
    for again in (lambda: r(GOOD), lambda: list(r.stream([GOOD])), r.close):
        if again == r.close:
            again()  # as often as one likes
        else:
            with pytest.raises(RunnerError, match="the runner is closed; bind the plan again"):
                again()


@pytest.mark.parametrize(
    "item, says",
    [
        (torch.zeros(3, dtype=torch.long), r"input 'ids' is i64\[3\].*captured as i64\[2\]"),
        (torch.zeros(2), r"input 'ids' is f32\[2\].*captured as i64\[2\]"),
        ((GOOD, GOOD), r"2 positional inputs given, expected \(ids\)"),
        ((), r"input 'ids' is missing: the module was captured with \(ids\)"),
        ({"x": GOOD}, r"input 'ids' is missing"),
        ((3,), r"input 'ids' must be a tensor, got int"),
        ("text", r"an item of the loader is a str: give a tensor"),
    ],
)
def test_a_micro_batch_of_another_shape_type_or_number_of_inputs(workers, item, says):
    with runner() as r:
        stream = r.stream([GOOD, GOOD, item, GOOD], workers=workers)
        assert [next(stream).shape, next(stream).shape] == [(2, 2)] * 2
        with pytest.raises(InputError, match=says) as caught:
            next(stream)
        assert caught.value.__notes__ == ["raised for micro-batch 2 of the stream"]
        with pytest.raises(InputError, match=says):
            r.stream([item]).__next__()
        if isinstance(item, torch.Tensor):
            with pytest.raises(InputError, match=says):
                r(item)
        assert alive() == [] and works(r)


def test_what_a_stream_refuses_before_it_begins():
    with runner() as r:
        with pytest.raises(LoaderError, match="workers = -2: give 0 to load in the calling thread"):
            r.stream([GOOD], workers=-2)
        with pytest.raises(LoaderError, match="prefetch = 0: give at least 1"):
            r.stream([GOOD], prefetch=0)
        with pytest.raises(LoaderError, match="an iterator, which one worker reads"):
            r.stream(iter([GOOD]), workers=2)
        assert works(r)


def test_a_torch_data_loader_streams():
    data = torch.utils.data.TensorDataset(torch.arange(20) % 4)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    with runner() as r, torch.no_grad():
        outputs = list(r.stream(loader))  # items are lists of one tensor
        expected = [r(ids) for (ids,) in loader]
    torch.testing.assert_close(outputs, expected)


def test_a_loader_is_a_track_of_the_measured_timeline():
    problem = problem_of(GRAPH, TWO)

    class Data:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> torch.Tensor:
            return slowly(GOOD)

    timeline = Executor(problem).run(SPLIT, loader=Data())
    assert timeline.load_s.shape == (12, 2) and timeline.start_s.shape == (12, 3)
    begin, end = timeline.load_s.T
    assert begin[0] == 0 and (end - begin >= PAUSE_S).all()
    assert (end <= timeline.start_s.min(axis=1)).all(), "loaded before it runs"
    events = timeline.to_trace()["traceEvents"]
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert "loader" in tracks
    assert Executor(problem).run(SPLIT, num_microbatches=2).load_s is None
    with pytest.raises(LoaderError, match="gave no items"):
        Executor(problem).run(SPLIT, loader=[])


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "placement, workers, count",
    [([0, 0], None, 20_000), ([0, 1], None, 10_000), ([0, 1], 1, 10_000)],
)
def test_memory_is_flat_over_many_micro_batches(placement, workers, count):
    graph = capture(*tiny.tiny_mlp(batch=1, width=4, layers=1))
    item = torch.zeros(1, 4)
    with Runner(graph, TWO, placement, max_in_flight=64) as r:

        def stream(count: int) -> None:
            done = sum(1 for _ in r.stream((item for _ in range(count)), workers=workers))
            assert done == count
            gc.collect()

        stream(2000)
        before = resident_bytes()
        tracemalloc.start()
        stream(500)
        traced = tracemalloc.get_traced_memory()[0]
        stream(500)
        assert tracemalloc.get_traced_memory()[0] - traced < 20_000  # 40 bytes each would show
        tracemalloc.stop()
        stream(count - 3000)
        assert resident_bytes() - before < 8 * 2**20
