"""``optimize``: one call from a module to a runner, and what it decides from measurements."""

import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import placement
from placement import optimizing, pieces, planners
from placement.__main__ import main
from placement.capturing import CaptureError
from placement.cli import BAD_INPUT
from placement.cluster import Cluster, ClusterError, Device
from placement.executor import Runner, RunnerError
from placement.executor.weights import states_of
from placement.optimizing import OptimizeError, optimize, verdict
from placement.pieces import Moves, PiecesError
from placement.plan import Measured, Spread, load_plan
from placement.problem import Problem, Solution
from placement.profile import ProfileError
from placement.program import InputError
from placement.runs.ways import TorchCompiled, _state, torch_compiled
from placement.simulator import score
from placement.tools.shown import count
from tests import emulated_gpu
from tests.modules import module_of

INPUT = torch.arange(16.0).reshape(2, 8)
pytestmark = pytest.mark.usefixtures("quick_profiles")
needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()).eval()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the profile of ``module()`` on this machine, once it is measured."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _cached(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_HOME", str(home))


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plans alternate between all devices, and ways take so many seconds, or so much, varied."""

    def alternating(problem: Problem) -> Solution:
        return Solution((problem.graph.group % problem.num_devices).astype(np.int32), 1.0)

    def set_seconds(single: float = 0.0, **took: float | Measured) -> None:
        load = planners.load
        monkeypatch.setattr(
            planners, "load", lambda n, **o: alternating if n == "best_of" else load(n, **o)
        )
        monkeypatch.setattr(optimizing, "parameters_of", lambda planner: {})
        measure = lambda ways, _: {w: measured(took.get(w, single)) for w in ways}  # noqa: E731
        monkeypatch.setattr(optimizing, "measure", measure)

    return set_seconds


def measured(took: float | Measured, iqr_s: float = 0.0) -> Measured:
    if isinstance(took, Measured):
        return took
    spread = Spread(median_s=took, iqr_s=iqr_s)
    return Measured(latency_s=spread, period_s=spread, n=5, when="now", machine="here")


def test_a_runner_that_computes_what_the_module_does(tmp_path, capsys):
    """Nothing is replaced: it measures, plans, runs, and says in a line what came out."""
    net = module()
    with placement.optimize(net, INPUT, seconds=0.3) as runner:
        assert isinstance(runner, placement.Runner)
        torch.testing.assert_close(runner(INPUT), net(INPUT))
        assert len(list(runner.stream([(INPUT,)] * 3))) == 3
        plan, took = runner.plan, runner.measured
    assert {"plan", "plain"} <= set(took) <= {"plan", "plain", "single"}
    assert plan.measured in took.values() and plan.objective == "period"
    fastest = min((m.period_s for m in took.values()), key=lambda x: x.median_s)
    assert took[runner.kept].period_s == fastest
    stderr = capsys.readouterr().err.splitlines()[-1]
    assert stderr == f"placement: {verdict(runner)}" and "measured between two results: " in stderr
    plan.save(tmp_path / "plan.json")
    with load_plan(tmp_path / "plan.json").bind(net) as again:
        torch.testing.assert_close(again(INPUT), net(INPUT))


@needs_two
@pytest.mark.parametrize("objective", ["period", "latency"])
def test_one_device_where_several_do_not_pay(objective: str, in_turns: Callable[..., None]) -> None:
    in_turns(plan=2e-3, single=2e-3, plain=3e-3)  # equal: the simpler one
    with optimize(module(), INPUT, objective=objective, quiet=True) as runner:
        assert len(set(runner.plan.assignment.values())) == 1
        assert len(np.unique(runner.placement)) == 1
        assert runner.plan.planner.name == "single_device"
        assert runner.plan.measured == runner.measured["single"]
        torch.testing.assert_close(runner(INPUT), module()(INPUT))
        assert runner.kept == "single"
    assert verdict(runner).startswith("several devices do not pay here, so cpu:")
    assert "the module itself" not in verdict(runner)


@needs_two
@pytest.mark.parametrize(
    ("took_s", "iqr_s", "choice"),
    [(1.85e-3, 0.05e-3, "plan"), (1.85e-3, 0.3e-3, "single"), (1.95e-3, 0.01e-3, "single")],
)
def test_several_devices_only_if_they_are_clearly_faster(took_s, iqr_s, choice, in_turns):
    """By some percent, and by more than what one of them measured varies."""
    in_turns(plan=measured(took_s, iqr_s), single=2e-3, plain=9e-3)
    with optimize(module(), INPUT, quiet=True) as runner:
        assert runner.kept == choice
        assert len(np.unique(runner.placement)) == (2 if choice == "plan" else 1)
        assert len(set(runner.planned.assignment.values())) == 2


@needs_two
@pytest.mark.parametrize("planner_uses", ["both", "one"])
def test_devices_of_another_kind_are_tried_where_the_profile_finds_them_close(
    planner_uses: str, in_turns: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a profile says of two devices that are nearly alike may be the other way round."""
    first, second = Cluster.detect().devices[:2]
    cluster = Cluster("two", (first, replace(second, model="another")))
    in_turns(**{"plan": 3e-3, first.name: 4e-3, second.name: 2e-3, "plain": 9e-3})
    if planner_uses == "one":
        alone = Solution(np.zeros(4, np.int32), 1.0)
        monkeypatch.setattr(planners, "load", lambda *_, **__: lambda problem: alone)
    monkeypatch.setattr(optimizing, "PARAMS", replace(optimizing.PARAMS, close=np.inf))
    with optimize(module(), INPUT, devices=cluster, quiet=True) as runner:
        assert runner.kept == "single" and set(runner.plan.assignment.values()) == {second.name}
        assert runner.plan.measured.period_s.median_s == 2e-3
        torch.testing.assert_close(runner(INPUT), module()(INPUT))
        message = verdict(runner)
    assert f"2 ms on {second.name}" in message and "3 ms as it was planned" in message
    monkeypatch.setattr(optimizing, "PARAMS", replace(optimizing.PARAMS, close=0.0))
    in_turns(**{"plan": 3e-3, "plain": 9e-3})  # nothing else is measured
    with optimize(module(), INPUT, devices=cluster, quiet=True) as runner:
        assert runner.kept == "plan" and set(runner.measured) == {"plan", "plain"}
    assert "times as fast as plain" in verdict(runner) or "alone; " in verdict(runner)


@needs_two
@pytest.mark.parametrize("fits", [True, False])
def test_what_takes_longer_than_predicted_is_planned_again(fits, monkeypatch):
    """The first plan stays where the second runs out of a GPU's memory."""
    posed, took_s = list[Any](), iter([3e-3, 1e-3])
    answers = [np.array(p, np.int32) for p in ([0, 0, 1, 1], [0, 1, 1, 1])]

    def planner(problem: Any) -> Solution:
        answer = answers[len(posed)]
        posed.append(problem)
        return Solution(answer, float(score(problem, answer[None])[0]))

    def fake(ways: Any, report: Any) -> Any:
        if len(posed) == 2 and not fits:
            raise torch.OutOfMemoryError
        return {name: measured(next(took_s) if name == "plan" else 4e-3) for name in ways}

    mine = SimpleNamespace(load=lambda *_, **__: planner, solve=planners.solve)
    monkeypatch.setattr(optimizing, "planners", mine)
    monkeypatch.setattr(optimizing, "measure", fake)
    monkeypatch.setattr(optimizing, "_compiled_costs", lambda *_: None)
    monkeypatch.setattr(optimizing, "_doubt", lambda _: "")  # a profile of a busy machine is unlike
    threads = set(threading.enumerate())
    with optimize(module(), INPUT, quiet=True) as runner:
        assert runner.kept == "plan" and runner.placement.tolist() == answers[fits].tolist()
        assert len(set(runner.planned.assignment.values())) == 2
        torch.testing.assert_close(runner(INPUT), module()(INPUT))
    before, after = (float(score(problem, answers[0][None])[0]) for problem in posed)
    assert after > 1.5 * before  # what has run is not predicted so short once more
    assert set(threading.enumerate()) <= threads


@needs_two
def test_several_devices_where_they_pay(in_turns: Callable[..., None]) -> None:
    in_turns(plan=1e-3, single=2e-3, plain=1.5e-3)
    with optimize(module(), INPUT, quiet=True) as runner:
        assert len(np.unique(runner.placement)) > 1 and runner.kept == "plan"
        assert runner.plan.measured == runner.measured["plan"]
    threads = count(torch.get_num_threads(), "thread")
    message = verdict(runner)
    plain = f"plain PyTorch with {threads}"
    assert f" devices are 1.50 times as fast as {plain}, and 2.00 times as fast as one" in message
    assert "; measured between two results: 1 ms on cpu:0 and cpu:1" in message
    assert message.endswith(f", 2 ms on one, 1.5 ms plain PyTorch with {threads}")


@needs_two
@pytest.mark.parametrize("single", [0.9e-3, 2e-3])
def test_plain_pytorch_where_it_is_the_fastest(single, in_turns):
    """The runner calls the module, in the calling thread; the better plan stays at hand."""
    in_turns(plan=1e-3, single=single, plain=0.9e-3)  # equal: the simpler one
    net, threads = module(), set(threading.enumerate())
    called_in = []
    net.register_forward_hook(lambda *_: called_in.append(threading.current_thread()))
    with optimize(net, INPUT, quiet=True) as runner:
        assert runner.kept == "plain" and set(threading.enumerate()) <= threads
        best = "single" if single < 1e-3 else "plan"
        assert runner.plan.measured == runner.measured[best]
        called_in.clear()
        assert torch.equal(runner(INPUT), net(INPUT).detach())
        batches = [INPUT + i for i in range(3)]
        streamed = list(runner.stream(batches, preprocess=lambda x: (x,)))
        for got, x in zip(streamed, batches, strict=True):
            assert torch.equal(got, net(x))
            assert not (got.is_inference() or got.requires_grad)
        assert set(called_in) == {threading.current_thread()} and len(called_in) == 8
        with pytest.raises(InputError, match="was captured as"):
            runner(torch.ones(3, 8))
        with pytest.raises(InputError, match="an item of the loader"):
            list(runner.stream(["x"]))
        with emulated_gpu.emulated():  # where a plan on a GPU left it
            assert torch.equal(runner(INPUT.to("cuda:0")), net(INPUT))
    with pytest.raises(RunnerError, match="closed"):
        runner(INPUT)
    assert " is the fastest here, so the runner calls the module itself; " in verdict(runner)


@needs_two
def test_modes_after_the_capture_are_not_seen_where_plain_pytorch_is_the_fastest(in_turns) -> None:
    """Else what is computed would depend on what was the fastest."""
    in_turns(plan=1e-3, single=2e-3, plain=0.9e-3)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Tanh()).eval()
    with optimize(net, INPUT, quiet=True, compiled=False) as runner:
        assert runner.kept == "plain"
        expected = net(INPUT).detach()
        net.train()
        torch.testing.assert_close(runner(INPUT), expected)
        torch.testing.assert_close([*runner.stream([INPUT] * 2)], [expected] * 2)
        net.eval()
        refused = pytest.raises(RunnerError, match="autocast is on around the call")
        with torch.autocast("cpu", torch.bfloat16), refused:
            runner(INPUT)
        assert torch.equal(runner(INPUT), expected)


@pytest.mark.parametrize(
    ("took", "kept", "is_compiled"),
    [
        ({"compiled": 1e-3}, "compiled", False),  # torch.compile is the fastest
        ({"single, compiled": 1e-3}, "single", True),
        ({"single, compiled": 4.9e-3}, "single", False),  # not clearly faster than 5 ms
    ],
)
def test_what_is_compiled_takes_turns(in_turns, monkeypatch, took, kept, is_compiled, tmp_path):
    """Several devices take 9 ms, one 5, and the module 9; nothing is really compiled."""
    net, calls = module(), list[str]()

    def by_torch(*_: Any) -> TorchCompiled:
        def call(x: torch.Tensor) -> torch.Tensor:
            calls.append("torch")
            return net(x)

        return TorchCompiled("torch.compile", 1.0, False, call, net, [])

    monkeypatch.setattr(optimizing, "missing_compiler", lambda: "")
    monkeypatch.setattr(optimizing, "torch_compiled", by_torch)
    monkeypatch.setattr(optimizing, "_compiled_costs", lambda *_: None)
    monkeypatch.setattr(placement.Runner, "num_compiled", 1)  # its runs stay as they are
    monkeypatch.setattr(optimizing, "PARAMS", replace(optimizing.PARAMS, close=np.inf))
    single = {k.replace("single", f"cpu:{n}"): s for k, s in took.items() for n in (0, 1)}
    in_turns(5e-3, **({"plan": 9e-3, "plain": 9e-3, "compiled": 9e-3} | single))
    with optimize(net, INPUT, quiet=True) as runner:
        assert (runner.kept, runner.plan.compiled) == (kept, is_compiled)
        assert "compiled" in runner.measured and runner.compiled_as == "torch.compile"
        calls.clear()
        torch.testing.assert_close(runner(INPUT), net(INPUT))
        assert bool(calls) == (kept == "compiled")
        assert (", compiled" in verdict(runner)) == is_compiled
        runner.plan.save(tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json").compiled == is_compiled
    with optimize(net, INPUT, quiet=True, compiled=False) as runner:
        assert "compiled" not in runner.measured and not runner.plan.compiled


def test_outputs_that_the_next_call_writes_over_are_compared_before(monkeypatch) -> None:
    """As those of CUDA graphs: what was made goes when the call is made again."""
    net, made = module(), list[torch.Tensor]()

    def compiled(of: nn.Module, **_: Any) -> Any:
        def call(x: torch.Tensor) -> torch.Tensor:
            for output in made:
                output.fill_(np.nan)
            made.append(of(x))
            return made[-1]

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    assert torch_compiled(net, INPUT, Cluster("c", (Device("cpu:0"),)), lambda *_: None) is not None


def test_frozen_code_is_left_where_parameters_or_buffers_were_written() -> None:
    for written in ("weight", "running_mean"):
        net = nn.BatchNorm1d(8).eval()
        states = states_of(_state(net))
        frozen = TorchCompiled("", 0.0, False, lambda x: "frozen", net, states)
        assert frozen(INPUT) == "frozen"
        with torch.no_grad():
            getattr(net, written).add_(1.0)
        assert torch.equal(frozen(INPUT), net(INPUT))


@needs_two
def test_the_plan_that_ran_stays_where_compiled_runs_do_not_fit(in_turns, monkeypatch) -> None:
    """As where memory holds weights, and not packed copies beside them."""
    nowhere = lambda problem, answer: replace(answer, value_s=np.inf)  # noqa: E731
    monkeypatch.setattr(optimizing, "_compiled_costs", lambda problem, *_: problem)
    monkeypatch.setattr(optimizing, "dealt_or", nowhere)
    in_turns(plan=1e-3, single=2e-3, plain=3e-3)
    with optimize(module(), INPUT, quiet=True) as runner:
        assert runner.kept == "plan" and "inf" not in runner.reached
        torch.testing.assert_close(runner(INPUT), module()(INPUT))


@needs_two
def test_operators_stay_whole_where_nobody_asked_for_pieces_that_cannot_be(in_turns, capsys):
    in_turns(plan=1e-3, single=2e-3, plain=3e-3)
    net, threads = nn.Sequential(nn.PReLU(), nn.Tanh()).eval(), set(threading.enumerate())
    with optimize(net, INPUT, objective="latency") as runner:
        assert runner.plan.pieces is None
        torch.testing.assert_close(runner(INPUT), net(INPUT))
    said = capsys.readouterr().err
    assert "operators stay whole: 2 pieces of 'Sequential': its largest dimension has 1" in said
    with pytest.raises(PiecesError, match="its largest dimension has 1 elements"):
        optimize(net, INPUT, objective="latency", pieces=2, quiet=True)
    assert set(threading.enumerate()) <= threads


@needs_two
def test_a_busy_machine_is_named(in_turns: Callable[..., None]) -> None:
    """One device takes another time than its profile says: the comparison is of a busy moment."""
    in_turns(plan=8e-3, single=9e-3, plain=10e-3)
    with optimize(module(), INPUT, quiet=True) as runner:
        for one_s, busy in ((9e-3, False), (5.9e-3, True), (14e-3, True)):
            runner.measured = {**runner.measured, "single": measured(one_s)}
            runner._alone_s = 9e-3, one_s
            text = f"; one device took {one_s * 1e3:g} ms, by its profile 9 ms"
            assert (text in verdict(runner)) == busy
            if busy:
                assert "placement optimize package.module:function --obj" in verdict(runner)


@needs_two
def test_a_profile_of_a_busy_hour_is_measured_again(in_turns, monkeypatch, capsys):
    """By the first profile an operator takes 20 ms; one device then takes 2 ms, later 200."""
    asked, real = list[bool](), optimizing.load_or_measure

    def profile(*where: Any, again: bool = False, **options: Any) -> Any:
        asked.append(again)
        right = real(*where, **options)
        return right if again else replace(right, compute_s=0 * right.compute_s + 20e-3)

    monkeypatch.setattr(optimizing, "load_or_measure", profile)
    in_turns(plan=3e-3, single=2e-3, plain=9e-3)
    with optimize(module(), INPUT) as runner:
        assert asked == [False, True] and runner.plan.fallback.period_s < 20e-3
    err = capsys.readouterr().err
    assert re.search(r"one device took 2 ms, by its profile 8[\d.]+ ms: measuring the operat", err)
    in_turns(plan=90e-3, single=80e-3, plain=99e-3)  # as the profile says
    with optimize(module(), INPUT):
        assert asked == [False, True, False]


@needs_two
def test_a_device_that_ran_is_compared_with_its_own_prediction(in_turns, monkeypatch) -> None:
    """The plan is the first device alone, 20 ms; one of another kind takes turns, 32 ms."""
    here = Cluster.detect()
    first, second = here.devices[:2]
    cluster = replace(here, devices=(first, replace(second, model="another")))
    asked, real = list[bool](), optimizing.load_or_measure

    def profile(*where: Any, again: bool = False, **options: Any) -> Any:
        asked.append(again)
        right = real(*where, **options)
        return replace(right, compute_s=0 * right.compute_s + [5e-3, 8e-3])

    monkeypatch.setattr(optimizing, "load_or_measure", profile)
    in_turns(plan=20e-3, plain=99e-3, **{second.name: 32e-3})
    alone = lambda p: Solution(np.zeros(p.num_ops, np.int32), 20e-3)  # noqa: E731
    monkeypatch.setattr(planners, "load", lambda *_, **__: alone)
    with optimize(module(), INPUT, cluster, quiet=True) as runner:
        assert asked == [False] and "one device took" not in verdict(runner)


def test_of_two_plans_the_faster_is_kept_where_no_device_holds_the_module() -> None:
    plan: Any = SimpleNamespace(objective="period")
    slow, fast = (
        optimizing._Ran(plan, None, {"plan": measured(s), "plain": measured(1e-3)}, {})  # type: ignore[arg-type]
        for s in (4e-3, 2e-3)
    )
    assert fast.over_single < slow.over_single
    ways = {"plan": measured(4e-3), "cpu": measured(2e-3), "cpu2": measured(1e-3)}
    assert optimizing._Ran(plan, None, ways, {}).over_single == 4.0  # type: ignore[arg-type]


@needs_two
def test_replicas_that_take_turns(in_turns: Callable[..., None]) -> None:
    """Each turn is on one device, and both work."""
    in_turns(plan=1e-3, single=2e-3, plain=3e-3)
    replicas = np.repeat(np.array([[0], [1]], np.int32), 4, axis=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planners, "load", lambda *_, **__: lambda p: Solution(replicas, 1.0))
        runner = optimize(module(), INPUT, quiet=True)
    with runner:
        assert runner.placement.shape == (2, 4)
        torch.testing.assert_close(runner(INPUT), module()(INPUT))
    assert "1 ms in turns on cpu:0 and cpu:1, " in verdict(runner)


def test_named_devices(in_turns: Callable[..., None], capfd: pytest.CaptureFixture[str]) -> None:
    name = Cluster.detect().device_names[0]
    in_turns(plan=1e-3, plain=2e-3)
    with optimize(module(), {"input": INPUT}, devices=[name], seconds=0.3, quiet=True) as runner:
        assert set(runner.plan.assignment.values()) == {name}
        assert set(runner.measured) == {"plan", "plain"}
    assert verdict(runner).startswith(f"the best plan is {name} alone; ")
    assert capfd.readouterr().err == ""


GROWS = module_of(lambda m, x: x + 1 if x.sum() > 0 else x)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"module": torch.relu}, OptimizeError, "not a torch.nn.Module"),
        ({"module": nn.Linear}, OptimizeError, "module is a type"),
        ({"module": nn.Linear(8, 8)}, OptimizeError, r"module\.eval\(\) first"),
        ({"module": GROWS.eval()}, CaptureError, "depends"),
        ({"objective": "latencies"}, OptimizeError, "did you mean 'latency'"),
        ({"objective": "energy"}, OptimizeError, "cannot be measured"),
        ({"objective": ["period"]}, OptimizeError, "cannot be measured"),
        ({"seconds": 0.0}, OptimizeError, "must be positive"),
        ({"seconds": float("nan")}, OptimizeError, "must be positive"),
        ({"seconds": "10"}, OptimizeError, "must be positive"),
        ({"devices": ["tpu:0"]}, ClusterError, "no device 'tpu:0'"),
        ({"devices": []}, ClusterError, "no devices"),
        ({"devices": 2}, OptimizeError, "names"),
        ({"devices": Cluster("x", (Device("x", "cuda"),))}, ProfileError, "x"),
        ({"inputs": {INPUT, "two"}}, CaptureError, "set"),
        ({"inputs": object()}, CaptureError, "object"),
        ({"inputs": torch.ones(2, 3)}, CaptureError, "shape"),
    ],
)
def test_what_is_refused(changes, error, says, home):
    """In a line, before anything is measured."""
    before = sorted(home.rglob("*"))
    arguments = {"module": module(), "inputs": INPUT, "quiet": True} | changes
    with pytest.raises(error, match=says) as caught:
        optimize(**arguments)
    assert isinstance(caught.value, ValueError) and len(str(caught.value)) < 1000
    assert sorted(home.rglob("*")) == before


def test_neither_results_that_differ_nor_an_interrupt_leave_workers(monkeypatch):
    def interrupted(ways: Any, report: Any) -> Any:
        for once, _ in ways.values():
            once()
        raise KeyboardInterrupt

    threads = set(threading.enumerate())
    for name, fake, error, message in (
        ("difference", lambda *_: "output 0", OptimizeError, "differ from .* module: output 0"),
        ("measure", interrupted, KeyboardInterrupt, "^$"),
    ):
        with monkeypatch.context() as patch, pytest.raises(error, match=message):
            patch.setattr(optimizing, name, fake)
            optimize(module(), INPUT, quiet=True)
        assert set(threading.enumerate()) <= threads


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Any) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["optimize", "tiny_mlp", "--seconds", "0.3", "--objective", "latency"]
    out, err = says([*words, "--out", "plan.json"])
    assert "plain PyTorch" in out
    assert "plan written to plan.json; next: placement run plan.json" in err
    assert load_plan("plan.json").graph.workload == "tiny_mlp"
    got = says([*words, "--json"]).json
    keys = {"kept", "objective", "planner", "assignments", "predicted", "measured"}
    assert set(got) == keys | {"compiled", "compiled_as", "pieces"}
    assert got["objective"] == "latency" and {"plan", "plain"} <= set(got["measured"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["graph.txt"], "placement plan graph.txt"),
        (["tiny_mlp", "--objective", "energy"], "cannot be measured"),
        (["tiny_mlp", "--seconds", "-1"], "must be positive"),
        (["tiny_mlp", "--out", "/dev/null/plan.json"], "/dev/null"),
        (["tiny_mlp", "--objective", "throughput"], "its inverse is the throughput"),
        (["tiny_mpl"], "did you mean 'tiny_mlp'"),
        (["mine.py"], "placement plan mine:function"),
        (["mine"], "mine.py is here: name a function of it, mine:function"),
    ],
)
def test_the_command_refuses(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    assert main(["optimize", *words]) == BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


@needs_two
def test_operators_in_pieces_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same module, whole and cut; what is kept computes what the module does."""
    large = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).eval()
    x = torch.randn(1024, 256)  # some ms of work, for pieces have to hand over
    ran: list[bool] = []

    def faster(whole: Any, cut: Any) -> Any:
        ran.extend(r.graph.program.pieces is not None for r in (whole, cut))
        whole.close()
        return cut

    monkeypatch.setattr("placement.optimizing._faster_of", faster)
    monkeypatch.setattr("placement.optimizing.Moves.of", lambda _: Moves())  # of a quiet machine
    options: Any = {"quiet": True, "compiled": False, "seconds": 1.0, "pieces": 2}
    with optimize(large, (x,), objective="latency", **options) as runner:
        assert ran == [False, True] and runner.plan.pieces is not None
        torch.testing.assert_close(runner(x), large(x))


@needs_two
def test_pieces_are_tried_as_compiled_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cut for such, planned by their costs, and kept where they are the fastest."""
    large = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).eval()
    x = torch.randn(1024, 256)
    cut_for, costs, names = list[bool](), list[bool](), list[str]()

    def cut(graph: Any, shares: Any, **options: Any) -> Any:
        cut_for.append(options["compiled"])
        return pieces.split(graph, shares, **options)

    def built(self: Any, runs: Any, share: Any, generated: Any, clock: Any = None) -> Any:
        return generated

    def measured_compiled(graph: Any, *_: Any, **__: Any) -> Any:
        costs.append(graph.piece is not None)
        raise ProfileError("not measured")

    def fake(ways: Any, report: Any) -> Any:
        names[:] = ways
        took = {w: 1.0 if "compiled" in w and costs == [False, True] else 2.0 for w in ways}
        return {w: measured(s) for w, s in took.items()}

    monkeypatch.setattr("placement.optimizing.missing_compiler", lambda: "")
    monkeypatch.setattr("placement.optimizing._doubt", lambda _: "")
    monkeypatch.setattr("placement.optimizing.torch_compiled", lambda *_: None)
    monkeypatch.setattr("placement.optimizing.split", cut)
    monkeypatch.setattr("placement.optimizing.Moves.of", lambda _: Moves())  # of a quiet machine
    monkeypatch.setattr("placement.optimizing.load_or_measure_compiled", measured_compiled)
    monkeypatch.setattr("placement.optimizing.measure", fake)
    monkeypatch.setattr("placement.executor.compiled.Artefacts.of", built)
    monkeypatch.setattr(Runner, "num_compiled", 1)
    with optimize(large, (x,), objective="latency", quiet=True, seconds=1.0, pieces=2) as runner:
        assert cut_for == [True] and costs == [False, True]
        assert runner.compiled and runner.plan.compiled and runner.plan.pieces is not None
        torch.testing.assert_close(runner(x), large(x))
    # One device alone, beside which pieces run, is compiled with whole operators only.
    assert [name for name in names if "compiled" in name] == ["plan, compiled"]
