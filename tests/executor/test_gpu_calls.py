"""Calls of one emulated GPU, which the calling thread launches."""

import gc
import queue
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from placement.capturing import capture
from placement.executor import Runner
from placement.executor import backend as backend_module
from placement.executor import runner as runner_module
from placement.executor import weights as weights_module
from placement.executor.backend import Leaving
from placement.executor.runner import RunnerError
from placement.executor.worker import Worker
from placement.workloads import load
from tests import emulated_gpu
from tests.executor.on_gpu import BOTH, Draws, all_on, graphed, layers, linears, others_like


@pytest.fixture
def sent(monkeypatch):
    """By whom messages are sent between threads of the executor."""
    senders = []

    class Counted(queue.SimpleQueue):
        def put(self, *args):
            senders.append(threading.current_thread().name)
            super().put(*args)

    for module in (backend_module, runner_module):
        monkeypatch.setattr(module, "queue", SimpleNamespace(SimpleQueue=Counted))
    return senders


@pytest.mark.parametrize("small", [0, 2**16])
@pytest.mark.parametrize("graphs", [False, True])
def test_what_one_gpu_runs_is_launched_by_the_calling_thread(graphs, small, sent, monkeypatch):
    """Other threads only copy what a stream has that is long."""
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", small)
    module, items, graph = layers(6)
    threads = set()
    launch = emulated_gpu._launch
    monkeypatch.setattr(
        emulated_gpu, "_launch", lambda *a: (threads.add(threading.get_ident()), launch(*a))[1]
    )
    with emulated_gpu.emulated(copy_s=1e-3, kernel_s=1e-4) as gpu:
        with Runner(graph, BOTH, all_on(graph, 1)) as runner:
            runner.cuda_graphs = graphs
            runner(*items[0])
            sent.clear()
            threads.clear()
            for item in items:
                results = runner(*item)
                torch.testing.assert_close(results, module(*item), rtol=1e-5, atol=1e-5)
            me = threading.current_thread()
            assert threads == {me.ident} and not sent
            assert not any(x.is_inference() or x.is_pinned() for x in results)
            taken = []
            stream = runner.stream_tensors(taken.append(x) or x for x in items)
            for n, (item, results) in enumerate(zip(items, stream, strict=True)):
                assert len(taken) == min(n + runner.max_in_flight, len(items))
                torch.testing.assert_close(results, module(*item), rtol=1e-5, atol=1e-5)
            assert (threads == {me.ident} and {*sent} == {me.name}) == bool(small)
            torch.testing.assert_close(runner(*items[0]), module(*items[0]), rtol=1e-5, atol=1e-5)
        assert bool(gpu.num_replays) == graphs and gpu.num_races == 0


@pytest.fixture
def order(monkeypatch):
    """What a call does: kernels and graphs to launch, and to ask what parameters were written."""
    order = []

    def note(where, name, what):
        does = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a: (order.append(what), does(*a))[1])

    note(emulated_gpu, "_launch", "work")
    note(emulated_gpu.CUDAGraph, "replay", "work")
    note(weights_module.Copies, "refresh", "ask")
    return order


@pytest.mark.parametrize("graphs", [False, True])
def test_whether_parameters_were_written_is_asked_while_the_gpu_computes(graphs, order):
    module, (x,), graph = layers(1)
    weight = module.layers[2].weight
    with emulated_gpu.emulated() as gpu, Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner.cuda_graphs = graphs

        def steps():
            order.clear()
            torch.testing.assert_close(runner(*x), module(*x), rtol=1e-5, atol=1e-5)
            assert order.count("ask") == 1 and order.index("ask") >= 3
            return len(order)

        with torch.inference_mode():  # so are the copies made
            for _ in range(4):
                runner(*x)
        once = steps()
        with torch.no_grad():
            weight.mul_(2)
        assert steps() > once + 3
        assert steps() == once
        weight.data = weight.data + 1
        assert steps() > once + 3
    assert bool(gpu.num_replays) == graphs and gpu.num_races == 0


@pytest.mark.parametrize("both", [False, True])
def test_copies_follow_a_parameter_whose_memory_comes_back(both):
    """As averaged weights do for an evaluation. Two runners of a module share the copies."""
    module, (x,), graph = layers(1)
    weight = module.layers[2].weight
    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as first:

        def check(runner):
            torch.testing.assert_close(runner(*x), module(*x), rtol=1e-5, atol=1e-5)

        check(first)
        with Runner(graph, BOTH, all_on(graph, 1)) as second:
            if both:
                check(second)
            own = weight.data
            weight.data = own + 1
            check(first)
            if not both:
                first.close()
            weight.data = own
            check(second)


def test_copies_follow_a_parameter_that_is_another_view_of_its_memory():
    module, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    graph = capture(module, x)
    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner(x)
        module.weight.data = module.weight.data.t()
        torch.testing.assert_close(runner(x), module(x), rtol=1e-5, atol=1e-5)
        module.weight.data = module.weight.data[:1]  # which could be copied to each row
        with pytest.raises(ValueError, match=r"shape \(1, 4\) now, .* \(4, 4\): capture"):
            runner(x)


def test_a_call_in_which_the_device_fails_does_not_end_the_process(monkeypatch):
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", 0)
    graph = capture(nn.Embedding(10, 4).eval(), torch.arange(4))
    with emulated_gpu.emulated(kernel_s=1e-2) as gpu, Runner(graph, BOTH, all_on(graph, 1)) as run:
        run(torch.arange(4))
        with pytest.raises(RuntimeError, match="CUDA error"):
            run(torch.tensor([1, 2, 3, 99]))
        gc.collect()
        assert gpu.num_aborts == 0


@pytest.mark.parametrize("written", [False, True])
def test_what_fails_with_parameters_as_they_were_is_launched_with_those_that_are(written):
    (module, x, graph), fails = linears(), []
    *steps, last = graph.program.steps

    def once(*args):
        if fails:
            raise ArithmeticError(fails.pop())
        return last.target(*args)

    steps.append(replace(last, target=once))
    graph = replace(graph, program=replace(graph.program, steps=tuple(steps)))
    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner(x)
        fails.append("now")
        with torch.no_grad():
            for weight in [module[0].weight] * written:
                weight.mul_(2)
        with nullcontext() if written else pytest.raises(ArithmeticError, match="now"):
            torch.testing.assert_close(runner(x), module(x))


def test_what_draws_random_numbers_asks_first_and_is_launched_once(order):
    module, x = nn.Sequential(nn.Linear(4, 4), Draws()).eval(), torch.randn(3, 4)
    graph = capture(module, x)
    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner(x)
        lengths = []
        for _ in range(2):
            order.clear()
            runner(x)
            lengths.append(len(order))
            assert order.index("ask") < 2
            with torch.no_grad():
                module[0].weight.mul_(2)
        assert lengths[1] == lengths[0] + 1  # the copy that is made again


@pytest.mark.parametrize("small", [0, 2**16])
@pytest.mark.parametrize("stays", ["host", "device"])
def test_results_of_a_call_are_the_callers_and_so_is_its_stream(stays, small, monkeypatch):
    """Of a graph, which writes over what it has made; on the GPU that is not the current one."""
    monkeypatch.setattr(backend_module, "_SMALL_BYTES", small)
    module, items, graph = layers(6)
    with emulated_gpu.emulated(2, kernel_s=1e-4) as gpu:
        with graphed(graph, BOTH, all_on(graph, 1), outputs=stays) as runner:
            results = [runner(*item) for item in items[:4]]
            torch.cuda.set_device(1)
            mine = torch.cuda.Stream(0)
            torch.cuda.set_stream(mine)
            torch.cuda.set_device(1)
            assert all(x.is_cuda == (stays == "device") for one in results for x in one)
            assert bool(gpu.copies["back"]) == (stays == "host")
            gpu.copies.clear()
            results += [runner(*item) for item in items]
            assert torch.cuda.current_device() == 1 and torch.cuda.current_stream(0) is mine
            torch.cuda.set_device(0)
            assert not gpu.copies["pageable"]
            for item, one in zip([*items[:4], *items], results, strict=True):
                assert not any(x.is_inference() or x.is_pinned() for x in one if not x.is_cuda)
                here = [x.cpu() for x in one]
                torch.testing.assert_close(here, [*module(*item)], rtol=1e-5, atol=1e-5)
        assert gpu.num_races == 0 and gpu.num_replays > 6


def test_calls_and_streams_take_turns_in_the_phases_of_a_placement():
    module, inputs = load("tiny_branches")
    graph = capture(module, inputs)
    phases = np.stack([all_on(graph, 1)] * 3)
    items = [others_like(inputs, i) for i in range(9)]
    with emulated_gpu.emulated(), Runner(graph, BOTH, phases) as runner:
        results = [runner(*items[0]), *runner.stream(items[1:5]), runner(*items[5])]
        results += [*runner.stream(items[6:8]), runner(*items[8])]
        assert runner.next_batch == 9
    for item, one in zip(items, results, strict=True):
        torch.testing.assert_close(one, module(*item))


def test_a_loaders_error_comes_after_the_results_before_it():
    module, inputs = load("tiny_branches")
    graph, results = capture(module, inputs), []

    def items():
        yield from [inputs] * 3
        raise ArithmeticError("no more")

    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as runner:
        with pytest.raises(ArithmeticError, match="no more") as raised:
            results.extend(runner.stream(items()))
        assert raised.value.__notes__ == ["raised for micro-batch 3 of the stream"]
        torch.testing.assert_close([*results, runner(*inputs)], [module(*inputs)] * 4)


def test_an_error_of_a_call_names_its_operator_and_the_next_call_works():
    module, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.randn(3, 4)
    graph = capture(module, x)
    with emulated_gpu.emulated() as gpu, Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner(x)
        gpu.missing = {str(graph.program.steps[1].target)}
        gc.disable()
        try:
            before = gpu.allocated[0]
            with pytest.raises(NotImplementedError) as raised:
                runner(x)
            name = graph.op_name[1]
            note = f"raised on device 'cuda:0' in operator {name!r} (module '1')"
            assert raised.value.__notes__ == [note]
            del raised
            assert gpu.allocated[0] == before  # at once, as there is no cycle
        finally:
            gc.enable()
        gpu.missing = set()
        torch.testing.assert_close(runner(x), module(x))


def test_a_call_is_interrupted_like_any_other(monkeypatch):
    module, x, graph = linears()
    with emulated_gpu.emulated() as gpu, Runner(graph, BOTH, all_on(graph, 1)) as runner:
        runner(x)
        launch = emulated_gpu._launch

        def interrupted(func, *rest):
            if func is graph.program.steps[-1].target:
                raise KeyboardInterrupt
            return launch(func, *rest)

        monkeypatch.setattr(emulated_gpu, "_launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner(x)
        monkeypatch.undo()
        torch.testing.assert_close(runner(x), module(x))
    assert gpu.num_races == 0


def test_a_thread_that_calls_once_leaves_launching_to_the_one_that_has_planned(monkeypatch):
    module, x, graph = linears()
    here = set()
    launch = emulated_gpu._launch

    def noted(func, *rest):
        if func is graph.program.steps[0].target:
            here.add(threading.current_thread())
        return launch(func, *rest)

    monkeypatch.setattr(emulated_gpu, "_launch", noted)
    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as runner:
        for _ in range(3):
            caller = threading.Thread(target=runner, args=(x,))
            caller.start()
            caller.join()
            assert caller not in here
        for _ in range(2):
            torch.testing.assert_close(runner(x), module(x))
        assert threading.current_thread() in here


def test_closing_waits_for_a_call_of_another_thread_which_then_says_so():
    _, x, graph = linears()
    with emulated_gpu.emulated() as gpu:
        runner = Runner(graph, BOTH, all_on(graph, 1))
        runner(x)
        gpu.kernel_s, messages, gpu.peak[0] = 0.1, [], 0

        def call():
            try:
                runner(x)
            except RunnerError as error:
                messages.append(str(error))

        caller = threading.Thread(target=call)
        caller.start()
        while not gpu.peak[0]:
            time.sleep(1e-3)  # until it is in the midst of it
        runner.close()
        caller.join()
    assert messages == ["the runner was closed while it was in use; bind the plan again"]
    assert gpu.num_races == 0


def test_a_thread_captures_no_graph_before_its_libraries_are_ready():
    """Two calls by one thread and the next by another: cuBLAS knows only the first."""
    module, (x,), graph = layers(1)
    with emulated_gpu.emulated() as gpu, graphed(graph, BOTH, all_on(graph, 1)) as runner:
        list(runner.stream([x] * 2))
        for _ in range(4):
            torch.testing.assert_close(runner(*x), module(*x), rtol=1e-5, atol=1e-5)
        assert all("fewer than 3" in why for why in runner.not_graphed.values())
        assert gpu.num_replays >= 2
        for results in runner.stream([x] * 3):  # replays what the other thread has captured
            torch.testing.assert_close(results, module(*x), rtol=1e-5, atol=1e-5)
        assert gpu.num_replays >= 5


@pytest.mark.parametrize(
    ("launch_s", "compute_s", "use_s", "period_s"),
    [(3, 2, 0, 3), (3, 4, 0, 4), (4, 5, 0, 5), (1, 10, 10, 11), (1, 5, 10, 11), (1, 12, 10, 12)],
)
def test_a_period_is_the_longer_of_launching_and_computing(
    launch_s, compute_s, use_s, period_s, monkeypatch
):
    """Where the GPU takes longer it falls behind by four at first: of 3 and 4 s, at 12 s.

    Micro-batches 0 to 2, complete at 7, 11 and 15 s, are handed out at 9, 12 and 15, where each had
    waited for a launch at 12, 15 and 18. While the caller uses what it gets (``use_s``), the GPU
    computes.
    """
    item, clock, until = torch.ones(2, 4), [0.0], [0.0]
    graph = capture(nn.Linear(4, 4), item)
    ticking = SimpleNamespace(**vars(time) | {"perf_counter": lambda: clock[0]})
    launch = Worker.launch

    def slowly(self, *args):
        clock[0] += launch_s
        until[0] = done_s = max(clock[0], until[0]) + compute_s
        outputs = launch(self, *args).take()

        def take():
            clock[0] = max(clock[0], done_s)
            return outputs

        return Leaving(take, (SimpleNamespace(query=lambda: clock[0] >= done_s),))

    def used(results):
        for result in results:
            yield result
            clock[0] += use_s

    with emulated_gpu.emulated(), Runner(graph, BOTH, all_on(graph, 1)) as runner:
        monkeypatch.setattr(runner_module, "time", ticking)
        monkeypatch.setattr(Worker, "launch", slowly)
        for count in (8, 16, 32):
            clock[0] = until[0] = 0.0
            measured_s = runner.period_of(used(runner.stream([item] * count)))
            # Of few, the first and the last that count may have waited for a launch.
            assert abs(measured_s - period_s) <= launch_s / (count // 2 - 2)


@pytest.mark.parametrize("graphs", [False, True])
def test_inputs_that_nobody_else_has_keep_their_memory_until_a_gpu_has_read_them(graphs):
    module, items, graph = layers(8)
    with emulated_gpu.emulated(kernel_s=2e-3) as gpu:
        with Runner(graph, BOTH, all_on(graph, 1)) as runner:
            runner.cuda_graphs = graphs
            for _ in range(2):
                stream = runner.stream(tuple(x.to("cuda:0") for x in item) for item in items)
                for item, results in zip(items[:5], stream, strict=False):
                    torch.testing.assert_close(results, module(*item), rtol=1e-5, atol=1e-5)
                    results = None
                stream.close()  # in the midst of others
                results = runner(*(x.to("cuda:0") for x in items[0]))
                torch.testing.assert_close(results, module(*items[0]), rtol=1e-5, atol=1e-5)
        assert bool(gpu.num_replays) == graphs and gpu.num_races == 0
