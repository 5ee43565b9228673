"""The executor: the plain module's numbers, the simulator's rules, and clean ends."""

import gc
import multiprocessing
import os
import threading
import time
import weakref
from contextlib import ExitStack, closing
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import placement.executor.executor as executor_module
import placement.executor.runner as runner_module
from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.executor import Executor, Runner, RunnerError
from placement.executor.backend import Carrier, CpuBackend, backend_for
from placement.executor.loader import LoaderError
from placement.program import InputError, run_program, split_inputs
from placement.schedule import Schedule, ScheduleError
from placement.simulator import list_schedule, simulate
from placement.workloads import tiny
from tests.machine import CORES, THREE, alive, problem_of, random_placement

pytestmark = pytest.mark.usefixtures("nothing_left_running")


def mlp():
    module, inputs = tiny.tiny_mlp()
    return module, inputs, capture(module, inputs)


@pytest.mark.parametrize(
    "make", [tiny.tiny_mlp, tiny.tiny_cnn, tiny.tiny_branches, tiny.tiny_views]
)
def test_random_placements_compute_what_the_module_computes(make):
    module, inputs = make()
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        expected = module(*args, **kwargs)
    graph = capture(module, inputs)
    for seed in range(4):
        with Runner(graph, THREE, random_placement(graph, seed)) as runner:
            torch.testing.assert_close(runner(*args, **kwargs), expected)
            for outputs in runner.stream([inputs] * 5):
                torch.testing.assert_close(outputs, expected)


def test_results_come_in_order_and_inputs_are_taken_as_there_is_room():
    module, _ = tiny.tiny_mlp(batch=1)
    items = [torch.full((1, 16), float(i)) for i in range(20)]
    graph = capture(module, items[0])
    taken = []

    def source():
        for i, x in enumerate(items):
            taken.append(i)
            yield x

    with Runner(graph, THREE, random_placement(graph, 0), max_in_flight=3) as runner:
        # Loading in this thread, however slow the machine makes it look.
        for i, y in enumerate(runner.stream(source(), workers=0)):
            torch.testing.assert_close(y, module(items[i]).detach())
            # Three in flight, and three finished ones at most that wait to be handed out.
            assert len(taken) <= i + 1 + 2 * 3
    assert len(taken) == 20


def rewritten(buffer, count):
    for i in range(count):
        yield buffer.fill_(float(i))


def views(buffer, count):
    return (x[:1] for x in rewritten(buffer, count))


@pytest.mark.parametrize("items", [rewritten, views])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_writes_its_buffer_again_is_told_so(items, workers):
    module, _ = tiny.tiny_mlp(batch=1)
    graph = capture(module, torch.zeros(1, 16))
    placement = random_placement(graph, 0)
    written = threading.Event()

    def source():
        for i, x in enumerate(items(torch.zeros(1, 16), 6)):
            if i == 1:  # a loader may ask for no more of them
                written.set()
            yield x

    with Runner(graph, THREE, placement) as runner:
        runner.call_on({d: lambda: None for d in runner._used})
        for d in runner._used:
            runner.workers[d].inbox.put(lambda: written.wait(60))
        with pytest.raises((InputError, LoaderError), match=r"(micro-batch|item) 0 .*was written"):
            list(runner.stream(source(), workers=workers, prefetch=workers * 4 or None))
        same = torch.zeros(1, 16)  # again and again, as it is
        for y in runner.stream([same] * 4):
            torch.testing.assert_close(y, module(same).detach())
    with Runner(graph, THREE, placement, max_in_flight=1) as runner:
        for i, y in enumerate(runner.stream(items(torch.zeros(1, 16), 6), workers=0)):
            torch.testing.assert_close(y, module(torch.full((1, 16), float(i))).detach())


def test_the_process_of_a_data_loader_ends_with_the_stream(monkeypatch):
    """After the last item, where the stream is left, and after an error here or there."""
    # So long PyTorch waits for a process whose error is still looked at: 5 s, then it ends it.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    module, _ = tiny.tiny_mlp(batch=1)
    data = TensorDataset(torch.randn(20, 1, 16))
    graph = capture(module, data[0][0])
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch"])  # once for all

    def loader(indices) -> DataLoader:
        options = {"num_workers": 1, "multiprocessing_context": "forkserver"}
        return DataLoader(data, batch_size=None, sampler=indices, **options)

    with Runner(graph, THREE, random_placement(graph, 0)) as runner:
        results = list(runner.stream(loader(range(20))))
        torch.testing.assert_close(results, [module(x).detach() for (x,) in data])
        assert multiprocessing.active_children() == []

        stream = runner.stream(loader(range(20)))
        next(stream)
        assert len(multiprocessing.active_children()) == 1
        stream.close()
        assert multiprocessing.active_children() == []

        with pytest.raises(ZeroDivisionError) as caught:
            list(runner.stream(loader(range(20)), preprocess=lambda x: 1 / 0))
        assert multiprocessing.active_children() == [], f"for as long as we have {caught}"

        results = []
        try:
            results.extend(runner.stream(loader([3, 1, 99, 2])))
        except IndexError as error:
            assert error.__notes__ == ["raised for micro-batch 2 of the stream"]
        torch.testing.assert_close(results, [module(data[i][0]).detach() for i in (3, 1)])
        gc.collect()  # torch keeps it with the error, which others may still look at
        until = time.monotonic() + 30
        while multiprocessing.active_children() and time.monotonic() < until:
            time.sleep(0.01)  # PyTorch 2.11 does not wait for its end
        assert multiprocessing.active_children() == []


def test_each_micro_batch_alone_when_one_is_in_flight():
    graph = capture(*tiny.tiny_mlp())
    problem = problem_of(graph, num_microbatches=6, max_in_flight=1)
    timeline = Executor(problem).run(random_placement(graph, 1))
    assert (timeline.start_s[1:].min(axis=1) >= timeline.end_s[:-1].max(axis=1)).all()


def test_a_fork_says_that_it_has_no_threads():
    _, inputs, graph = mlp()
    with Runner(graph, THREE, random_placement(graph, 0)) as runner:
        runner(*inputs)
        receiver, sender = multiprocessing.Pipe(duplex=False)

        def call() -> None:
            with pytest.raises(RunnerError) as caught:
                runner(*inputs)
            sender.send(str(caught.value))

        child = multiprocessing.get_context("fork").Process(target=call)
        child.start()
        assert receiver.poll(60) and "bind the plan in this process" in receiver.recv()
        child.join()
        runner(*inputs)


def test_one_user_at_a_time():
    module, inputs = tiny.tiny_mlp()
    with Runner(capture(module, inputs), THREE, np.zeros(6, int)) as runner:
        stream = runner.stream([inputs, inputs])
        next(stream)
        with pytest.raises(RunnerError, match="in use"):
            runner(*inputs)
        stream.close()
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(RunnerError, match="autocast is on around the call"),
        ):
            runner(*inputs)


def test_workers_stay_for_the_next_call():
    module, inputs = tiny.tiny_mlp()
    with Runner(capture(module, inputs), THREE, [0, 1, 2, 0, 1, 2]) as runner:
        runner(*inputs)
        workers = list(runner.workers)
        assert len(alive()) == 3
        runner(*inputs)
        assert list(runner.stream([inputs] * 2)) and runner.workers == workers


def test_workers_whose_start_is_interrupted_end(monkeypatch):
    """Ctrl-C after the first of three has started."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    module, inputs = tiny.tiny_mlp()
    with Runner(capture(module, inputs), THREE, [0, 1, 2, 0, 1, 2]) as runner:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner(*inputs)
        monkeypatch.undo()
        assert alive() == []
        assert runner(*inputs).shape == (2, 16)


def test_a_second_interrupt_while_the_workers_end_leaves_the_runner_usable(monkeypatch):
    end = runner_module._stop_workers

    def interrupted(workers):
        end(workers)
        raise KeyboardInterrupt

    graph = capture(*tiny.tiny_mlp(layers=2))
    (x,) = graph.program.example_tensors
    with Runner(graph, THREE, random_placement(graph, 0)) as runner:
        monkeypatch.setattr(runner_module, "_stop_workers", interrupted)
        stream = runner.stream([x] * 10)
        next(stream)
        with pytest.raises(KeyboardInterrupt):
            stream.close()
        monkeypatch.setattr(runner_module, "_stop_workers", end)
        torch.testing.assert_close(runner(x), run_program(graph.program, [x])[0])


def test_a_parameter_that_is_replaced_shows_in_the_next_call():
    """No copies on a CPU; also where the workers ended before."""
    module, inputs, graph = mlp()
    with Runner(graph, THREE, random_placement(graph, 0)) as runner:
        before = runner(*inputs)
        changes = (lambda x: x.zero_(), lambda x: setattr(x, "data", torch.ones_like(x)))
        for i, change in enumerate(changes * 4):
            if i >= 4:
                with closing(runner.stream([inputs] * 3)) as left_early:
                    next(left_early)
            with torch.no_grad():
                change(next(module.parameters()))
                expected = module(*inputs)
            assert not torch.equal(expected, before)
            torch.testing.assert_close(runner(*inputs), expected)
            workers, before = runner.workers, expected
        runner(*inputs)
        assert runner.workers is workers


def test_a_parameter_that_is_another_view_of_its_memory_shows_in_the_next_call():
    module, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    graph = capture(module, x)
    with Runner(graph, THREE, np.zeros(graph.num_ops, int)) as runner:
        runner(x)
        module.weight.data = module.weight.data.t()
        torch.testing.assert_close(runner(x), module(x).detach())
        module.weight.data = module.weight.data[:2]
        with pytest.raises(RunnerError, match=r"shape \(2, 4\) now, .* capture again"):
            runner(x)


def test_a_parameter_without_values_is_named():
    with torch.device("meta"):
        module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    graph = capture(module, x)
    with (
        Runner(graph, THREE, np.zeros(graph.num_ops)) as runner,
        pytest.raises(RunnerError, match=r"parameter '0\.weight' has no values .*--predict"),
    ):
        runner(x)


def test_an_idle_worker_holds_no_tensor():
    module, inputs = tiny.tiny_mlp()
    with Runner(capture(module, inputs), THREE, [0, 1, 2, 0, 1, 2]) as runner:
        x = inputs[0].clone()
        gone = weakref.ref(x)
        runner(x)
        del x
        assert gone() is None


def test_a_call_between_operators_that_fails_later_reaches_the_caller(monkeypatch):
    class Broken(CpuBackend):
        def ship(self, value, deliver, *, stay=False) -> None:
            deliver(RuntimeError("device-side assert"))

    monkeypatch.setattr(runner_module, "backend_for", Broken)
    module, inputs = tiny.tiny_mlp()
    with Runner(capture(module, inputs), THREE, np.zeros(6, int)) as runner:
        with pytest.raises(RuntimeError, match="device-side assert"):
            runner.call_on({0: lambda: None})
        assert alive() == []


def test_a_forgotten_runner_ends_its_threads():
    module, inputs = tiny.tiny_mlp()
    runner = Runner(capture(module, inputs), THREE, np.zeros(6, int))
    runner(*inputs)
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None
    assert alive() == []


@pytest.mark.parametrize("seed", range(4))
def test_measured_timeline_obeys_the_model(seed):
    """Serial devices, producers before consumers, and exactly the simulator's transfers."""
    module, inputs = tiny.tiny_views() if seed % 2 else tiny.tiny_branches()
    graph = capture(module, inputs)
    problem = problem_of(graph, num_microbatches=5, max_in_flight=3)
    placement = random_placement(graph, seed)
    timeline = Executor(problem).run(placement)
    for d in range(problem.num_devices):
        mine = placement == d
        start, end = timeline.start_s[:, mine].ravel(), timeline.end_s[:, mine].ravel()
        order = np.argsort(start, kind="stable")
        assert (start[order][1:] >= end[order][:-1]).all()
    for a, b in graph.edges:
        assert (timeline.start_s[:, b] >= timeline.end_s[:, a]).all()
    predicted = simulate(problem, placement)
    assert sorted(map(tuple, timeline.transfers)) == sorted(map(tuple, predicted.transfers))
    assert timeline.measured and timeline.period_s > 0


@pytest.mark.parametrize(("limit_s", "before"), [(np.inf, 8), (0.0, 1)])
def test_what_is_measured_begins_warm(monkeypatch, limit_s, before):
    """Eight micro-batches run first; of a model too slow for that, one."""
    ran = []
    whole = Runner.stream_tensors

    def counted(runner, inputs):
        ran.append(0)
        for result in whole(runner, inputs):
            ran[-1] += 1
            yield result

    monkeypatch.setattr(Runner, "stream_tensors", counted)
    monkeypatch.setattr(executor_module, "_WARM_UP_S", limit_s)
    problem = problem_of(capture(*tiny.tiny_mlp()))
    line = Executor(problem).run(np.zeros(problem.num_ops, int), num_microbatches=3)
    assert ran == [before, 3]
    assert line.start_s.shape == (3, problem.num_ops)


def test_a_schedule_is_followed_to_the_letter():
    """
    Two branches on one device. The list scheduler would run micro-batch 0 first; the schedule
    runs the first operators of both, then the second ones:

        cpu:0   a0 a1 b0 b1 ...        (letters: operators, digits: micro-batches)
    """
    module, inputs = tiny.tiny_mlp(layers=2)
    graph = capture(module, inputs)
    problem = problem_of(graph)
    placement = np.zeros(graph.num_ops, np.int32)
    rows = [(op, batch) for op in range(graph.num_ops) for batch in range(2)]
    nothing = np.zeros((0, 2), np.int32)
    schedule = Schedule((np.array(rows, np.int32), nothing, nothing), 2)
    timeline = Executor(problem).run(placement, schedule)
    order = np.argsort(timeline.start_s.T.ravel(), kind="stable")
    assert order.tolist() == list(range(len(rows)))


def test_a_list_schedule_made_explicit_runs():
    module, inputs = tiny.tiny_branches()
    graph = capture(module, inputs)
    problem = problem_of(graph, num_microbatches=4)
    placement = random_placement(graph, 1)
    schedule = list_schedule(problem, placement, 4)
    timeline = Executor(problem).run(placement, schedule)
    for d, rows in enumerate(schedule.order):
        start = [timeline.start_s[b, op] for op, b in rows]
        assert start == sorted(start), f"device {d}"


def test_an_error_that_shows_only_later_reaches_the_caller(monkeypatch):
    """A GPU reports a failed kernel when somebody waits for its result."""

    class Broken(CpuBackend):
        def enter(self, stack: ExitStack) -> None:
            super().enter(stack)
            self.courier = Carrier("courier")
            stack.callback(self.courier.close)

        def ship(self, value, deliver, *, stay=False) -> None:
            self.courier.carry(Mock(side_effect=RuntimeError("device-side assert")), deliver)

    backends = {"cpu:1": Broken}
    monkeypatch.setattr(runner_module, "backend_for", lambda d: backends.get(d.name, CpuBackend)(d))
    _, inputs, graph = mlp()
    for placement in ([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 0, 1]):  # on the way, and at the end
        with (
            Runner(graph, THREE, placement) as runner,
            pytest.raises(RuntimeError, match="device-side assert"),
        ):
            runner(*inputs)


def test_a_runner_that_another_thread_closes_ends_its_stream():
    """The thread waits for results that do not come."""
    _, inputs, graph = mlp()
    runner = Runner(graph, THREE, random_placement(graph, 2))
    ended = []

    def run() -> None:
        with pytest.raises(RunnerError, match="closed while it was in use"):
            for out in runner.stream(inputs for _ in range(10**9)):
                ended.append(out)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not ended:
        time.sleep(0.001)
    runner.close()
    thread.join(30)
    assert not thread.is_alive()


def test_an_order_that_deadlocks_is_refused():
    module, inputs = tiny.tiny_mlp(layers=2)
    graph = capture(module, inputs)
    rows = np.array([(op, 0) for op in range(graph.num_ops)], np.int32)
    nothing = np.zeros((0, 2), np.int32)
    schedule = Schedule((rows[::-1], nothing, nothing), 1)
    with pytest.raises(ScheduleError, match="deadlocks"):
        Runner(graph, THREE, np.zeros(graph.num_ops, int), schedule=schedule)


def test_an_order_has_room_for_all_its_micro_batches():
    """One that runs an operator of all of them before the next needs more than the usual four."""
    module, inputs, graph = mlp()
    rows = np.array([(op, m) for op in range(graph.num_ops) for m in range(8)], np.int32)
    order = Schedule((rows, rows[:0], rows[:0]), 8)
    with Runner(graph, THREE, np.zeros(graph.num_ops, int), schedule=order) as runner:
        results = list(runner.stream([inputs] * 8))
    assert len(results) == 8
    torch.testing.assert_close(results[0], module(*inputs))


def test_any_order_of_preference_gives_the_results():
    """Runs of operators in that order would wait for each other: 0 and 2 for 1, 1 for 0."""
    module, inputs, graph = mlp()
    placement = np.array([0, 1, 0, 0, 1, 0])[: graph.num_ops]
    order = np.arange(graph.num_ops)[::-1]
    with Runner(graph, THREE, placement, priority=order) as runner:
        torch.testing.assert_close(runner(*inputs), module(*inputs))


def test_what_cannot_run_says_so():
    graph = capture(*tiny.tiny_mlp())
    for net, on, options, message in (
        (graph.without_program(), [0] * 6, {}, "no program"),
        (graph, [0, 1], {}, r"expected \(6,\)"),
        (graph, [0] * 6, {"max_in_flight": 0}, "max_in_flight = 0"),
        (graph, [0, 1, -1, 0, 0, 0], {}, r"operator 2 .* on device -1; devices are 0\.\.2"),
        (graph, [0, 1, 3, 0, 0, 0], {}, r"operator 2 .* on device 3; devices are 0\.\.2"),
        (graph, [0] * 6, {"priority": [0] * 6}, r"each of 0\.\.5 once"),
    ):
        with pytest.raises(RunnerError, match=message):
            Runner(net, THREE, on, **options)
    with pytest.raises(ValueError, match="simulated, not run"):
        backend_for(Device("tpu:0", "tpu"))


def test_workers_are_pinned_and_keep_the_callers_threads():
    """The thread count of a device is the worker's own; the caller's does not change."""
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    seen = {}

    class Spy(CpuBackend):
        def enter(self, stack: ExitStack) -> None:
            super().enter(stack)
            seen["threads"] = torch.get_num_threads()
            seen["cores"] = os.sched_getaffinity(0)

    _, inputs, graph = mlp()
    device = Device("cpu:0", "cpu", (CORES[-1],), threads=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "backend_for", Spy)
        with Runner(graph, Cluster("one", (device,)), np.zeros(6, int)) as runner:
            runner(*inputs)
    assert seen == {"threads": 2, "cores": {CORES[-1]}}
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before


def test_new_threads_of_the_process_get_the_callers_thread_count():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        module, inputs = tiny.tiny_mlp()
        with Runner(capture(module, inputs), THREE, [0, 1, 2, 0, 1, 2]) as runner:
            runner(*inputs)
        seen: list[int] = []
        new = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        new.start()
        new.join()
        assert seen == [3]
    finally:
        torch.set_num_threads(before)


def test_memory_limits_do_not_matter_to_the_executor():
    """It runs what it is told; refusing is the planner's and the plan's business."""
    graph = capture(*tiny.tiny_mlp())
    small = Cluster("small", tuple(replace(d, memory_bytes=1) for d in THREE.devices))
    timeline = Executor(problem_of(graph, small)).run(np.zeros(6, int), num_microbatches=1)
    assert timeline.num_microbatches == 1
