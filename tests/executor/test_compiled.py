"""Compiled runs: equal results, kinds, what is kept, and what gets in the way."""

import copy
import sys
import threading
import time
from contextlib import contextmanager
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import fx, nn

from placement import capture
from placement.cluster import Cluster, Device
from placement.executor import Runner, RunnerError, compiled
from placement.executor import runner as runner_module
from placement.schedule import Schedule
from placement.tools.files import FileError
from tests.modules import module_of

CPU = Cluster("here", (Device("cpu:0", cores=(0,)),))
TWO = Cluster("two", (Device("cpu:0", cores=(0,)), Device("cpu:1", cores=(0,))))


def net(seed: int = 0) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    layers = {"first": nn.Linear(16, 32), "second": nn.Linear(32, 12)}
    module = module_of(lambda m, x: m.second(torch.tanh(m.first(x))).softmax(-1), **layers)
    return module, torch.randn(8, 16)


@contextmanager
def compiled_net():
    """A runner that compiles a module, and computes what that does."""
    module, x = net()
    with runner_of(module, x) as runner:
        runner.compile()
        torch.testing.assert_close(runner(x), module(x))
        yield runner


def runner_of(module: nn.Module, x: torch.Tensor, **options) -> Runner:
    graph = capture(module.eval(), x)
    return Runner(graph, CPU, np.zeros(graph.num_ops, int), **options)


def parted(module: nn.Module, x: torch.Tensor, kind: str) -> tuple[Runner, int]:
    """On two devices, of which the second begins with the last operator of a kind, and which."""
    graph = capture(module.eval(), x)
    at = max(n for n, own in enumerate(graph.op_kind) if kind in own)
    return Runner(graph, TWO, (np.arange(graph.num_ops) >= at).astype(int)), at


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """``compiled.build``, which builds a kind of a graph once for all tests here; and its calls."""
    known, calls, build = {}, [], compiled.build

    def once(graph, inputs, threads, frozen, **patches):
        values = [p.sum().item() for p in graph.parameters()]
        key = graph.code, frozen, *values
        calls.append(frozen)
        if key not in known:
            known[key] = build(graph, inputs, threads, frozen, **patches)
        return known[key]

    return once, calls


@pytest.fixture
def prefers(builds, tmp_path, monkeypatch, compiler):
    """An empty cache, a compiler, and a function that says which kind is the fastest."""
    once, calls = builds
    calls.clear()
    monkeypatch.setenv("PLACEMENT_HOME", str(tmp_path))
    monkeypatch.setattr(compiled, "build", once)

    def prefer(kind: str) -> list[bool]:
        def timed(ways):
            return {name: float(name != kind) for name in ways}

        monkeypatch.setattr(compiled, "_timed", timed)
        return calls

    return prefer


@pytest.mark.parametrize("kind", ["plain", "frozen", "frozen by onednn"])
def test_results_are_the_modules_and_a_written_parameter_is_seen(prefers, kind, monkeypatch):
    packs_all = kind == "frozen by onednn"  # MKL's has a bias in it
    kind = "frozen" if packs_all else kind
    monkeypatch.setattr(compiled, "_onednn_is_faster", lambda *_: packs_all)
    calls = prefers(kind)
    module, x = net(int(packs_all))  # another module than the one that MKL's are built of
    with runner_of(module, x) as runner:
        runner.compile()
        assert (runner.num_compiled, runner.not_compiled) == (1, {})
        # Both kinds are built, and take turns, unless a frozen one is far ahead.
        assert calls == ([True] if kind == "frozen" else [True, False])
        assert (runner.packed_bytes > 0) == (kind == "frozen")
        if kind == "plain":  # where both are built from this module
            # Weights are packed again when they are loaded: only what is small is written.
            assert sum(x.stat().st_size for x in compiled.folder().glob("*.bin")) < 1000
        torch.testing.assert_close(runner(x), module(x))
        for outputs in runner.stream([x, x + 1]):
            assert outputs.shape == (8, 12)
        before = runner(x)
        with torch.no_grad():
            module.first.weight.mul_(-1)
        torch.testing.assert_close(runner(x), module(x))
        assert not torch.allclose(runner(x), before)
        # A plain one reads parameters where they are, a frozen one is built again unless it has
        # no values of theirs but those that it packs when it is loaded.
        built = [True] if packs_all else [True, True]
        assert calls == (built if kind == "frozen" else [True, False])
        with torch.no_grad():
            module.first.weight.mul_(-1)
    calls.clear()
    with runner_of(module, x, record=True) as again:  # loads what is kept
        again.compile()
        torch.testing.assert_close(again(x), module(x))
        assert (again.num_compiled, again.compile_s, calls) == (1, 0, [])


def test_what_is_kept_is_for_the_shapes_that_it_was_made_for(prefers, monkeypatch) -> None:
    """As where heads and groups of heads are turned by the same operators."""
    prefers("plain")
    with compiled_net() as runner:
        assert runner.num_compiled == 1
    monkeypatch.setattr(compiled, "build", Mock(side_effect=RuntimeError("built anew")))
    module, x = net()
    with runner_of(module, x[:2]) as other:
        other.compile()
        assert [*other.not_compiled.values()] == ["RuntimeError: built anew"]
        torch.testing.assert_close(other(x[:2]), module(x[:2]))


SLOWER = "it takes 0 us eager, 1000000 us frozen, 1000000 us plain"
REFUSED = "RuntimeError: LoweringException: no such operator"
MISSING = "there is no C++ compiler 'no-such-compiler' here: placement doctor"


@pytest.mark.parametrize("why", [SLOWER, REFUSED, MISSING])
def test_what_is_no_faster_or_cannot_be_compiled_is_interpreted(prefers, monkeypatch, why):
    prefers("eager" if why == SLOWER else "plain")
    if why == REFUSED:
        refused = RuntimeError("LoweringException: no such operator\nand a page of more")
        monkeypatch.setattr(compiled, "build", Mock(side_effect=refused))
    if why == MISSING:
        monkeypatch.setenv("CXX", "no-such-compiler")
    module, x = net()
    with runner_of(module, x) as runner:
        runner.compiled = True
        torch.testing.assert_close(runner(x), module(x))
        assert (runner.num_compiled, runner.not_compiled) == (0, {"linear": why})


def test_other_threads_run_while_a_kernel_does(prefers) -> None:
    """Devices are threads: a kernel that held the interpreter's lock would stop the others."""
    prefers("plain")
    x = torch.rand(2**24)  # some 50 ms
    with runner_of(module_of(lambda m, x: x.sin().exp().tanh().cos()), x) as runner:
        runner.compile()
        assert runner.num_compiled == 1
        (call,) = runner.workers[0]._generated[0].calls.values()
        env, state, seen = [x] * runner.graph.num_tensors, [], 0

        def work() -> None:
            with torch.inference_mode():
                state.append("began")
                call(env, lambda: True)
                state.append("ended")

        thread = threading.Thread(target=work)
        before = sys.getswitchinterval()
        sys.setswitchinterval(60)  # nobody takes the lock from who does not let go of it
        try:
            thread.start()
            while len(state) < 2:
                time.sleep(0.001)
                seen += state == ["began"]
        finally:
            sys.setswitchinterval(before)
            thread.join()
    assert seen >= 3  # 0 where the lock is held


def test_a_cache_that_cannot_be_written_is_said_once(prefers, monkeypatch, capsys) -> None:
    prefers("frozen")
    real = compiled.write_atomic

    def write(path, content):
        if "compiled" in str(path):
            raise FileError(f"cannot write {path}: no space left")
        return real(path, content)

    monkeypatch.setattr(compiled, "write_atomic", write)
    with compiled_net() as runner:
        assert runner.num_compiled == 1
    said = capsys.readouterr().err
    assert said.count("compiled runs are not kept") == 1
    assert "no space left" in said


def test_files_that_are_damaged_are_made_again(prefers) -> None:
    calls = prefers("frozen")
    with compiled_net():
        pass
    for damage in (".so", ".json", ".bin"):
        for path in compiled.folder().glob(f"*-*{damage}"):
            path.unlink()  # what is loaded stays as it was
            path.write_bytes(b"")
        for path in compiled.folder().glob("*.kind"):
            assert path.read_text() == '["frozen", ""]'
            path.write_text("null" if damage == ".bin" else '["frozen", ""]')
        calls.clear()
        with compiled_net() as runner:
            # Python has loaded that extension already.
            assert (calls, runner.num_compiled) == ([True] * (damage != ".so"), 1)


def test_a_run_goes_on_while_another_thread_compiles(prefers, monkeypatch) -> None:
    """``build`` puts functions of its own in the place of PyTorch's meanwhile."""
    prefers("plain")
    with compiled_net() as runner:
        for name in (
            "unsafe_alloc_void_ptrs_from_tensors",
            "alloc_tensors_by_stealing_from_void_ptrs",
        ):
            monkeypatch.setattr(torch._C._aoti, name, Mock(side_effect=AssertionError))
        module, x = net()
        torch.testing.assert_close(runner(x), module(x))


def test_workers_that_interpret_make_room_for_compiled_ones(prefers) -> None:
    calls = prefers("plain")
    module, x = net()
    with runner_of(module, x) as runner:
        torch.testing.assert_close(runner(x), module(x))
        stream = runner.stream([x, x, x])
        next(stream)
        with pytest.raises(RunnerError, match="in use by another call"):
            runner.compile()
        stream.close()
        assert calls == []
        runner.compile()
        torch.testing.assert_close(runner(x), module(x))
        assert runner.num_compiled == 1
    with pytest.raises(RunnerError, match="closed"):
        runner.compile()
    order = [[op, 0] for op in range(runner.graph.num_ops)]
    ordered = Schedule((np.array(order, np.int32),), 1)
    with (
        runner_of(module, x, schedule=ordered) as runner,
        pytest.raises(RunnerError, match="an order speaks of single operators"),
    ):
        runner.compile()


def test_an_artefact_knows_a_parameter_from_what_is_read() -> None:
    """Both subtract second from first, of one shape; in memory they come in another order."""
    texts = set()
    for forward in (lambda m, x: (m.w - x).exp(), lambda m, x: (x - m.w).exp()):
        module = module_of(forward, w=nn.Parameter(torch.randn(8)))
        program = capture(module, torch.randn(8)).program
        made = [x.tensor for x in program.output_leaves]
        texts.add(compiled.recipe(program, range(len(program.steps)), made, {}).text)
    assert len(texts) == 2


@pytest.mark.parametrize("size", [1, 16])
def test_code_with_small_parameters_in_it_is_of_these_values_alone(prefers, monkeypatch, size):
    """Inductor writes up to 8 numbers into it: another value may differ by less than rounding."""
    prefers("frozen")
    asked, no_kernel = [], Mock(side_effect=RuntimeError("no"))
    monkeypatch.setattr(compiled, "build", no_kernel)
    monkeypatch.setattr(
        compiled.Artefacts, "_of_other_values", lambda self, path: asked.append(path) or ()
    )
    module = module_of(lambda m, x: (x * m.w).exp().tanh(), w=nn.Parameter(torch.rand(size)))
    with runner_of(module, torch.randn(4, 16)) as runner:
        runner.compile()
    assert bool(asked) == (size == 16)


def test_code_with_a_number_made_of_a_large_parameter_is_of_its_values_alone(prefers) -> None:
    """Inductor writes the mean of it into the code; an example of zeros does not show that."""
    prefers("frozen")
    gain = nn.Parameter(torch.ones(16))
    module = module_of(lambda m, x: (x * m.gain.mean()).exp().tanh(), gain=gain)
    with runner_of(module, torch.zeros(4, 16)) as runner:
        runner.compile()
        assert runner.num_compiled == 1
        with torch.no_grad():
            gain.fill_(3.0)
        x = torch.randn(4, 16)
        torch.testing.assert_close(runner(x), module(x))


def test_pytorch_that_copies_graphs_is_given_one_that_stays(monkeypatch) -> None:
    """Before 2.13 a graph cannot be donated, and would be copied with its parameters."""

    def older(gm, example_inputs, *, dynamic_shapes="from_graph", options=None, aot=False):
        return copy.deepcopy(gm)

    monkeypatch.setattr(torch._inductor, "standalone_compile", older)
    graph = fx.symbolic_trace(nn.Linear(2, 2))
    assert compiled.compiled_alone(graph, [torch.ones(2)], {}) is graph


def test_an_expanded_example_is_read_as_what_was_compiled_reads_it() -> None:
    x = torch.randn(1, 8).expand(4, 8)
    program = capture(module_of(lambda m, x: x.sin()), x).program
    (given,), (timed,) = program.flatten_inputs((x,)), program.timing_inputs()
    assert given.stride() == timed.stride() == (8, 1) and torch.equal(given, x)


def test_ctrl_c_in_a_compile_leaves_nothing(prefers, monkeypatch) -> None:
    prefers("plain")
    module, x = net()
    with runner_of(module, x) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "build", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                runner.compile()
        assert not compiled.folder().exists()
        torch.testing.assert_close(runner(x), module(x))
        assert runner.num_compiled == 1


def test_operators_that_draw_are_interpreted_and_training_is_refused(prefers) -> None:
    calls = prefers("plain")
    draws = module_of(lambda m, x: x.sin().cos().tanh() + torch.rand_like(x))
    with runner_of(draws, torch.zeros(8)) as runner:
        runner.compile()
        assert (runner.num_compiled, calls) == (1, [False])
        assert "aten.rand_like" in str(runner.not_compiled) or runner.not_compiled
        torch.manual_seed(3)
        first = runner(torch.zeros(8))
        assert not torch.equal(first, runner(torch.zeros(8)))
    module = net()[0].train()
    loss = (torch.randn(8, 16), torch.randn(8, 12))
    graph = capture(module, loss, mode="training", loss=nn.functional.mse_loss)
    runner = Runner(graph, CPU, np.zeros(graph.num_ops, int))
    with runner, pytest.raises(RunnerError, match="compiled runs are for inference"):
        runner.compile()


def images(last: nn.Module) -> nn.Module:
    """Two convolutions, and what the last module makes of them."""
    first, second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, last)


@pytest.mark.parametrize("last", ["mean", "image", "view"])
def test_runs_hand_on_images_with_channels_last(monkeypatch, last) -> None:
    """As compiled convolutions have them: else each run would lay them out twice.

    Not where the module's result, or a view, would be another than the module's.
    """
    found = {}

    def noted(self, first, call):
        found[first] = [self._values[t].stride() for t in self._recipes[first].reads]

    monkeypatch.setattr(compiled, "_LEAST", 1)
    monkeypatch.setattr(compiled.Artefacts, "_fastest", noted)
    ends = {"mean": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), "image": nn.ReLU()}
    module = images(ends.get(last, nn.Unflatten(1, (2, 2)))).eval()
    x = torch.randn(1, 3, 9, 7)
    runner, second = parted(module, x, "conv2d")
    with runner:
        runner.compile()
        torch.testing.assert_close(runner(x), module(x), check_stride=True)
        (strides,) = found[second]
    assert (strides[1] == 1) == (last == "mean")


def test_what_reads_memory_by_strides_of_its_own_gets_it_as_it_is(monkeypatch) -> None:
    monkeypatch.setattr(compiled, "_LEAST", 1)
    patches = (1, 3, 4, 4, 2, 2), (192, 64, 16, 2, 8, 1)  # of 2 x 2 pixels
    module = module_of(
        lambda m, x: (m.conv(x).mean((2, 3)), x.as_strided(*patches).amax((4, 5)).flatten(1)),
        conv=nn.Conv2d(3, 8, 3),
    ).eval()
    x = torch.randn(1, 3, 8, 8)
    with runner_of(module, x) as runner:
        runner.compile()
        torch.testing.assert_close(runner(x), module(x))


def test_inputs_are_laid_out_in_the_threads_of_devices(monkeypatch) -> None:
    """In the caller's, which may have more threads, these spin afterwards on the devices' cores."""
    threads = []

    def noted(x):
        threads.append(threading.current_thread().name)
        return compiled.with_channels_last(x)

    monkeypatch.setattr(runner_module, "with_channels_last", noted)
    monkeypatch.setattr(compiled.Artefacts, "_fastest", lambda *_: None)
    x = torch.randn(1, 3, 9, 7)
    with runner_of(images(nn.Flatten()), x) as runner:
        runner.compile()
        runner(x)
    assert set(threads) == {"placement-cpu:0"}


def test_a_run_in_another_order_is_the_same_artefact(monkeypatch) -> None:
    two = module_of(lambda m, x: (x.sin().exp().tanh(), x.cos().relu().neg()))
    texts = set()

    def noted(self, first, call):
        texts.add(self._recipes[first].text)

    monkeypatch.setattr(compiled.Artefacts, "_fastest", noted)
    for order in ([0, 1, 2, 3, 4, 5], [3, 4, 5, 0, 1, 2]):
        with runner_of(two, torch.randn(8), priority=np.argsort(order)) as runner:
            runner.compile()
    assert len(texts) == 1


def test_operators_of_a_run_read_the_mask_that_another_hands_on(monkeypatch) -> None:
    """Nothing says that attention has none: what an artefact is compared with was wrong then."""

    def masked(m, x):
        mask = torch.ones(8, 8, dtype=torch.bool).tril()[2:]
        return nn.functional.scaled_dot_product_attention(x[:, 2:], x, x, attn_mask=mask)

    compared = []

    def compares(self, first, call):
        run = self._recipes[first]
        expected = compiled.values_of(self._program, set(run.makes))
        for t, value in zip(run.makes, self._interpreted(run, call), strict=True):
            compared.append((bool(run.known), torch.equal(value, expected[t])))

    monkeypatch.setattr(compiled, "_LEAST", 1)
    monkeypatch.setattr(compiled.Artefacts, "_fastest", compares)
    with parted(module_of(masked), torch.randn(2, 8, 4), "attention")[0] as runner:
        runner.compile()
    assert (True, True) in compared and all(same for _, same in compared)
