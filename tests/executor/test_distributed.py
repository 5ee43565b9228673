"""Plans over processes: equal results, any order, no deadlock, and an end whatever fails.

The processes are forked from a server that has imported torch, so that a rank costs little. The
time limit is what turns a deadlock into a failure.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

from placement import workloads
from placement.__main__ import main
from placement.capturing import capture
from placement.capturing.training import plain_step
from placement.cli.ranks import spawn
from placement.cli.show import costless_problem
from placement.cluster import Cluster, ClusterError, Device, Link
from placement.costs.links import hosts_of_ranks, join, measure_ranks
from placement.executor import RunnerError, distributed
from placement.executor.distributed import (
    DistributedRunner,
    DistributedTrainer,
    Remote,
    with_weights,
)
from placement.executor.distributed_world import Direct, RankError, World, dense
from placement.executor.executor import measured_timeline
from placement.exporters import load as load_exporter
from placement.pieces import Moves, split
from placement.pieces.decide import Options, decide, options_of
from placement.plan import load_plan, make_plan
from placement.problem import Solution
from placement.schedule import Schedule
from tests.machine import problem_of, random_placement
from tests.modules import module_of
from tests.test_pieces import Attention

pytestmark = pytest.mark.timeout(300)

CLUSTER = Cluster("tests", tuple(Device(f"cpu:{i}") for i in range(4)))  # not pinned
CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED_IN = os.getpid()
HANGS_S = 3.0  # what the tests of faults wait for a sign of life


def forks(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Branches that meet again, and a tensor that several read."""
    a = self.first(x).relu()
    b, c = self.left(a).sigmoid(), self.right(a).tanh()
    return (b + c) @ a.flip(0).T + b.sum()


def tied() -> nn.Module:
    """One weight that is read at both ends, dropout-free, with running statistics between."""
    return module_of(
        lambda self, ids: self.middle(self.norm(self.embed(ids))).tanh() @ self.embed.weight.T,
        embed=nn.Embedding(7, 5), norm=nn.BatchNorm1d(5), middle=nn.Linear(5, 5),
    )  # fmt: skip


def items(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 6, generator=generator) for _ in range(num)]


torch.manual_seed(0)
SIZES = {"first": 6, "left": 6, "right": 6, "unused": 50}
# Made and captured once, in the process that all ranks are forked from.
MODULE = module_of(forks, **{name: nn.Linear(6, size) for name, size in SIZES.items()}).eval()
GRAPH = capture(MODULE, items(1)[0])


def batches(num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    draw = lambda: torch.randint(7, (4,), generator=generator)  # noqa: E731
    return [(draw(), draw()) for _ in range(num)]


def random_schedule(graph: Any, placement: Any, num_microbatches: int, seed: int) -> Schedule:
    """Any order that a machine could run: repeatedly one of all operators that are ready."""
    rng, turns = np.random.default_rng(seed), np.atleast_2d(placement)
    order: list[list[tuple[int, int]]] = [[] for _ in range(CLUSTER.num_devices)]
    before = [
        {int(s) for s in graph.tensor_src[graph.in_tensor[a:b]] if s >= 0}
        for a, b in zip(graph.in_ptr[:-1], graph.in_ptr[1:], strict=True)
    ]
    left = {(op, m) for op in range(graph.num_ops) for m in range(num_microbatches)}
    while left:
        ready = sorted((n, m) for n, m in left if not any((s, m) in left for s in before[n]))
        op, m = ready[rng.integers(len(ready))]
        left.remove((op, m))
        order[turns[m % len(turns), op]].append((op, m))
    rows = tuple(np.array(x, np.int32).reshape(-1, 2) for x in order)
    return Schedule(rows, num_microbatches)


# --- processes -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    """What ranks are forked from imports this file first.

    Python 3.11 finds it by ``PYTHONPATH`` alone, and is silent where it does not.
    """
    server = multiprocessing.forkserver._forkserver
    server._stop()  # another file's
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        CONTEXT.set_forkserver_preload([__name__])
        server.ensure_running()
    yield
    server._stop()


def _rank(work: Callable[..., Any], rank: int, env: dict[str, str], pipe: Any, args: Any) -> None:
    assert os.getpid() != IMPORTED_IN, "each rank imports torch again"
    os.environ.update(env, RANK=str(rank))
    torch.set_num_threads(1)
    try:
        pipe.send(("value", work(rank, *args)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send((type(error).__name__, str(error)))
        os._exit(1)


class Ranks:
    """Processes that run ``work(rank, *args)``; none is left when the ``with`` ends."""

    def __init__(self, work: Callable[..., Any], size: int, *args: Any, size_said: int = 0) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        self.env = env | {"WORLD_SIZE": str(size_said or size)}
        self.pipes, self.processes = [], []
        for rank in range(size):
            self.add(work, rank, *args)

    def add(self, work: Callable[..., Any], rank: int, *args: Any) -> None:
        here, there = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_rank, args=(work, rank, self.env, there, args))
        process.start()
        there.close()
        self.pipes.append(here)
        self.processes.append(process)

    def answer(self, i: int, limit_s: float = 150.0) -> tuple[str, Any]:
        """("value", what it returned) or the exception; ("", None) if it ended without a word."""
        assert self.pipes[i].poll(limit_s), f"process {i} has not answered for {limit_s} s"
        try:
            return self.pipes[i].recv()
        except EOFError:
            return "", None

    def values(self) -> list[Any]:
        """What they returned; none has failed."""
        answers = [self.answer(i) for i in range(len(self.processes))]
        assert {kind for kind, _ in answers} == {"value"}, answers
        return [value for _, value in answers]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.join(10)
            alive = process.is_alive()
            process.kill()
            process.join()
            assert not alive, "a process was left running"


@pytest.mark.parametrize("content", [None, b"\x10\0\0\0\0\0\0\0{}", b"text"])
def test_weights_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "half.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunnerError, match=r"half.safetensors: cannot be read as safetensors"):
        with_weights(GRAPH, path, [0])


# --- results -------------------------------------------------------------------------------------


def equal_results(rank: int, folder: str, direct: Direct | None) -> int:
    """Everything that inference promises, in one start of two or four ranks."""
    graph = GRAPH
    expected = [MODULE(x).detach() for x in items(8)]
    weights = Path(folder) / "weights.safetensors"
    with World.join(120, direct) as world:
        for seed in range(6):
            place = random_placement(graph, seed, world.size if seed % 2 else 4)
            order = random_schedule(graph, place, 4, seed) if seed > 2 else None
            if seed in (0, 2):  # micro-batches take turns
                place = np.stack([place, random_placement(graph, 10, 4) if seed == 0 else place])
            used = graph
            if seed == 2:  # every rank reads what is its own, and has nothing else
                if rank == 0:
                    distributed.save_weights(graph, weights)
                    (Path(folder) / "ready").touch()
                while not (Path(folder) / "ready").exists():
                    time.sleep(0.01)
                own = DistributedRunner(graph, CLUSTER, place, world=world).own_params()
                used = with_weights(graph, weights, own)
                held = [not p.is_meta for p in used.program.params]
                assert [q for q, here in enumerate(held) if here] == own
                num_held = sum(held)
            runner = DistributedRunner(
                used, CLUSTER, place, world=world, schedule=order, record=seed == 1,
                max_in_flight=4 if order is not None else 3,
            )  # fmt: skip
            if rank:
                runner.serve()
                continue
            torch.testing.assert_close([*runner.stream(items(8))], expected)
            if order is None and seed != 1:
                torch.testing.assert_close(runner(items(1)[0]), expected[0])
            if seed == 1:
                runner.collect()
                timeline = measured_timeline(costless_problem(graph, CLUSTER), runner, 0, 8)
                error_s = 2 * runner.clock_error_s
                # Nothing arrives before it was sent, nor is it used before it arrived.
                times = timeline.transfer_start_s, timeline.transfer_end_s
                for (t, m, _, there), sent, came in zip(timeline.transfers, *times, strict=True):
                    assert timeline.end_s[m, graph.tensor_src[t]] <= sent + error_s
                    assert sent <= came + error_s
                    users = graph.use_dst[graph.use_ptr[t] : graph.use_ptr[t + 1]]
                    users = users[place[users] == there]
                    assert came <= timeline.start_s[m, users].min() + error_s
                tracks = timeline.to_trace(graph.op_name)["traceEvents"]
                names = [e["args"]["name"] for e in tracks if e["name"] == "thread_name"]
                assert names[:4] == list(CLUSTER.device_names)  # of all ranks in one file
            runner.close()
            with pytest.raises(RunnerError, match="closed"):
                runner(items(1)[0])
    return num_held


# As with NCCL, but for the backend.
@pytest.mark.parametrize("size, those", [(2, ()), (4, ()), (2, (0, 1)), (4, (0, 2, 3))])
def test_outputs_equal_the_plain_module_for_random_placements_and_schedules(size, those, tmp_path):
    direct = Direct("gloo", those, torch.device("cpu")) if those else None
    with Ranks(equal_results, size, str(tmp_path), direct) as ranks:
        num_held = ranks.values()
    assert sum(num_held) >= 6 and max(num_held) < 6  # together all of it, nobody everything


def test_a_rank_needs_what_is_trained_on_it_though_it_reads_it_elsewhere() -> None:
    """A bias is read in the forward alone, and its gradient is made in the backward."""
    module, (x,) = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), (torch.randn(2, 4),)
    options = {"mode": "training", "loss": nn.functional.mse_loss, "colocate_backward": False}
    graph = capture(module.train(), ((x,), x), **options)
    rank: Any = SimpleNamespace(
        graph=graph,
        placement=graph.is_backward.astype(np.int32),
        _own=[1],
        _program=graph.program,
        world=SimpleNamespace(rank=1),
    )
    assert DistributedRunner.own_params(rank) == [0, 1, 2, 3]


def in_pieces(rank: int, folder: str) -> list[str]:
    """A block of a transformer, heads and columns on one rank each; values read from a file."""
    module, inputs = block()
    plan = load_plan(Path(folder) / "plan.json")
    graph = plan.cut(capture(module, inputs))
    place = plan.placement(graph, CLUSTER)
    with World.join(120) as world:
        own = DistributedRunner(graph, CLUSTER, place, world=world).own_params()
        read = with_weights(graph, Path(folder) / "weights.safetensors", own)
        for used in (graph, read):
            runner = DistributedRunner(used, CLUSTER, place, world=world)
            if rank:
                runner.serve()
                continue
            for x in (inputs[0], inputs[0] * 2):
                torch.testing.assert_close(runner(x), module(x))
            runner.close()
    return [graph.program.param_names[q] for q in own]


def exported(rank: int, script: str, model: str) -> tuple[int, str]:
    """What ``torchrun`` would run: its exit code, and what it prints."""
    spec = importlib.util.spec_from_file_location("exported", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = [script, model]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return module.main(), printed.getvalue()


def block() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Attention().eval(), (torch.randn(1, 6, 16),)


def test_a_tensor_parallel_plan_over_two_processes(tmp_path: Path) -> None:
    """Pieces are ordinary operators: planned by the piece, equal, and each rank has its half."""
    module, inputs = block()
    whole = capture(module, inputs)
    options = [  # what is read whole costs: weights are cut, not tokens
        Options(1.0, o.rules, tuple(0.5 + 0.1 * rule.inputs.count("whole") for rule in o.rules))
        for o in options_of(whole, (0.5, 0.5))
    ]
    graph = split(whole, decide(whole, (0.5, 0.5), options, Moves(hop_s=0.1)))
    assert any(name.startswith("scaled_dot_product_attention#1") for name in graph.op_name)
    # Device 3 is of the second rank; 0 of the first.
    placement = np.where(np.asarray(graph.piece) == 1, 3, 0).astype(np.int32)
    problem = costless_problem(graph, CLUSTER)
    plan = make_plan(problem, Solution(placement, 1.0), planner="by hand")
    plan.save(tmp_path / "plan.json")
    distributed.save_weights(whole, tmp_path / "weights.safetensors")
    with Ranks(in_pieces, 2, str(tmp_path)) as ranks:
        first, second = ranks.values()
    assert "up.weight[0:1]" in second and "up.weight[0:0]" in first
    assert not {"up.weight", "down.weight", "up.weight[0:0]"} & set(second)
    script = load_exporter("dtensor")(plan).files[""]
    assert "    'up': ColwiseParallel(use_local_output=False),\n" in str(script)
    (tmp_path / "parallel.py").write_text(str(script))
    with Ranks(exported, 2, str(tmp_path / "parallel.py"), f"{__name__}:block") as ranks:
        assert [code for code, _ in ranks.values()] == [0, 0]


def test_an_exported_pipeline_takes_turns(tmp_path: Path) -> None:
    """Four stages on two ranks; a test of exporters has ``torchrun`` start a training."""
    from tests.exporters.test_exporters import cores_plan

    files = load_exporter("torch_pipelining")(cores_plan("inference")).files
    for suffix, text in files.items():
        (tmp_path / f"pipeline{suffix or '.py'}").write_text(str(text))
    module = "placement.workloads.tiny:tiny_mlp"
    with Ranks(exported, 2, str(tmp_path / "pipeline.py"), module) as ranks:
        first, second = ranks.values()
    assert first[0] == second[0] == 0, (first, second)
    answer = json.loads((first[1] or second[1]).splitlines()[-1])
    assert (answer["stages"], answer["schedule"]) == (4, "LoopedBFS") and answer["equal"]


def test_a_rank_stays_on_the_cores_of_its_devices(monkeypatch):
    chosen = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: chosen.append(cores))
    four = Cluster("four", tuple(Device(f"cpu:{i}", cores=(i, i + 4)) for i in range(4)))
    monkeypatch.delenv("RANK", raising=False)
    distributed.pin(four)  # not started by torchrun: ``join`` says so
    for rank, size in ((1, 2), (0, 4), (0, 5)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        distributed.pin(four)  # of five one would have no device: the runner says so
    distributed.pin(Cluster("free", (*four.devices, Device("cpu:4"))))  # its first names cores
    assert chosen == [{2, 3, 6, 7}, {0, 4}, {0, 4}]
    monkeypatch.setenv("RANK", "4")
    distributed.pin(Cluster("free", (*four.devices, Device("cpu:4"))))
    assert len(chosen) == 3


def measured_links(rank: int) -> dict[tuple[int, int], Link]:
    join()
    direct = Direct("gloo", (0, 1), torch.device("cpu"))
    measured = measure_ranks(hosts_of_ranks(), repeats=2, direct=direct)
    torch.distributed.destroy_process_group()
    return dict(measured.links)


def test_links_between_gpus_are_measured_on_the_way_that_tensors_take():
    with Ranks(measured_links, 2) as ranks:
        value, other = ranks.values()
    assert value == other
    for pair in ((0, 1), (1, 0)):
        assert value[pair].bandwidth_bytes_per_s > 1e6 and value[pair].send_s > 0


def test_tensors_go_from_gpu_to_gpu_between_ranks_that_have_one_each(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    names = ("a/cuda:0", "a/cuda:1", "b/cuda:0", "b/cpu:0")
    cluster = Cluster("mixed", tuple(Device(n, n.split("/")[1].split(":")[0]) for n in names))

    def of(rank: int, size: int) -> Direct | None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        return distributed.direct(cluster)

    assert of(1, 4) == Direct("nccl", (0, 1, 2), torch.device("cuda:1"))
    assert of(2, 4) == Direct("nccl", (0, 1, 2), torch.device("cuda:0"))
    assert of(3, 4) == Direct("nccl", (0, 1, 2), torch.device("cpu"))  # takes no part
    # Two ranks have two devices each; of three, one has a GPU of its own; five are too many.
    assert [of(0, size) for size in (2, 3, 5)] == [None] * 3
    monkeypatch.delenv("RANK")
    assert distributed.direct(cluster) is None
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert of(1, 4) is None


def test_devices_go_to_ranks_in_order_and_no_rank_is_without_one():
    # 5 devices on 2 ranks: | 0 0 0 | 1 1 |; the last rank must have one too.
    five = Cluster("five", tuple(Device(f"cpu:{i}") for i in range(5)))
    assert distributed.ranks_of(five, 2) == (0, 0, 0, 1, 1)
    assert distributed.ranks_of(five, 3) == (0, 0, 1, 1, 2)
    assert distributed.ranks_of(five, 5) == (0, 1, 2, 3, 4)
    with pytest.raises(ClusterError, match="6 processes for 5 devices"):
        distributed.ranks_of(five, 6)


# --- training ------------------------------------------------------------------------------------


def train(rank: int, folder: str, died_after: int | None, other: str = "") -> list[list[float]]:
    """Six steps, a checkpoint after each second one; or the rest of them, from the last one.

    ``other``: of the folder on another host.
    """
    torch.manual_seed(0)
    module = tied()
    loss = nn.functional.cross_entropy
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    graph = capture(module, batches(1)[0], mode="training", loss=loss, optimizer=optimizer)
    # The table is read on both ranks: another placement after the restart, in which replicas
    # of both ranks take turns.
    seed = 8 if died_after is None else 9
    place = random_placement(graph, seed, 4)
    assert len({int(d) // 2 for d in place[graph.param_use_op[graph.param_use == 0]]}) == 2
    if died_after is None:
        place = np.stack([place, random_placement(graph, 1, 4), random_placement(graph, 2, 4)])
        for writer, readers in graph.carried.items():  # running statistics stay
            place[:, np.isin(graph.group, graph.group[[writer, *readers]])] = 3
    data = batches(18)
    with World.join(120) as world:
        trainer = DistributedTrainer(graph, CLUSTER, place, optimizer, world=world)
        begin = trainer.load(folder + other * rank)
        if rank:
            trainer.serve()
            return []
        losses = []
        for step in range(begin, 6):
            if step == died_after:
                raise KeyboardInterrupt
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)  # what a scheduler does
            taken = data[3 * step : 3 * step + 3]
            if step % 2:
                losses.append(trainer.accumulate(taken).tolist())
                nn.utils.clip_grad_norm_(module.parameters(), 0.01)
                trainer.update()
                trainer.save(folder, step + 1)
            else:
                losses.append(trainer.step(taken).tolist())
        trainer.sync()
        torch.save(module.state_dict(), Path(folder) / "trained.pt")
        trainer.accumulate(data[:2])
        torch.save(trainer.gradients(), Path(folder) / "gradients.pt")
        trainer.close()
        return losses


def plain_training() -> tuple[nn.Module, list[list[float]]]:
    torch.manual_seed(0)
    module = tied().train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    data, losses, clip = batches(18), [], [0.0]
    optimizer.register_step_pre_hook(
        lambda *_: (nn.utils.clip_grad_norm_(module.parameters(), clip[0]), None)[1]
    )
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        clip[0] = 0.01 if step % 2 else 1e9
        taken = data[3 * step : 3 * step + 3]
        losses.append(plain_step(module, optimizer, taken, nn.functional.cross_entropy).tolist())
    return module, losses


def test_training_equals_plain_pytorch_also_after_a_restart_with_another_placement(tmp_path):
    module, expected = plain_training()
    with Ranks(train, 2, str(tmp_path), 5) as ranks:
        assert ranks.answer(0)[0] == "KeyboardInterrupt"
        assert "rank 0 has ended with KeyboardInterrupt" in ranks.answer(1)[1]
    assert json.loads((tmp_path / "checkpoint.json").read_text())["step"] == 4
    files = {f"step4-rank{rank}.safetensors" for rank in (0, 1)}
    assert {path.name for path in tmp_path.glob("step*")} == files
    with Ranks(train, 2, str(tmp_path), None, "/of-another-host") as ranks:
        kind, said = ranks.answer(0)[:2]
        assert kind == "RunnerError" and "rank 0 goes on from step 4, rank 1 (" in said
        assert "from step 0" in said and "copy checkpoint.json and the files" in said
    with Ranks(train, 2, str(tmp_path), None) as ranks:
        losses, _ = ranks.values()
    np.testing.assert_allclose(losses, expected[4:], rtol=1e-5)
    torch.testing.assert_close(torch.load(tmp_path / "trained.pt"), module.state_dict())
    gradients = torch.load(tmp_path / "gradients.pt")
    for x, y in batches(2):
        (nn.functional.cross_entropy(module(x), y) / 2).backward()
    plain = {name: p.grad for name, p in module.named_parameters()}
    torch.testing.assert_close(gradients, plain, rtol=1e-3, atol=1e-5)


def test_another_host_has_a_checkpoint_until_the_next_is_complete(tmp_path: Path) -> None:
    trainer: Any = SimpleNamespace(world=SimpleNamespace(rank=1))
    for step in (2, 4):
        name = f"step{step}-rank1.safetensors"
        (tmp_path / name).write_bytes(b"")
        marker = json.dumps({"step": step, "files": [f"step{step}-rank0.safetensors", name]})
        DistributedTrainer._written(trainer, str(tmp_path), marker)
        assert (tmp_path / "checkpoint.json").read_text() == marker
        assert [path.name for path in tmp_path.glob("step*")] == [name]


def test_what_fails_on_the_way_from_a_device_of_rank_0_reaches_its_caller() -> None:
    failed, world = list[Any](), SimpleNamespace(rank=0, is_direct=lambda *_: False)
    peer = Remote(SimpleNamespace(device=1), 1, world, failed.append)  # type: ignore[arg-type]
    peer.put((0, 3, RuntimeError("device-side assert"), 0, 0))
    (failure,) = failed
    assert str(failure.error) == "device-side assert" and failure.device == 0


@pytest.mark.parametrize(
    ("marker", "shape", "message"),
    [
        ("{", (10, 4), r"checkpoint\.json: cannot be read as a checkpoint \(JSONDecodeError"),
        ("[]", (10, 4), r"checkpoint\.json: cannot be read as a checkpoint \(TypeError"),
        ('{"step": 3}', (10, 4), r"cannot be read as a checkpoint \(KeyError: 'files'\)"),
        (None, (1, 4), r"'weight' has shape \(1, 4\), the model needs \(10, 4\)"),
        (None, (9, 4), r"'weight' has shape \(9, 4\), the model needs \(10, 4\)"),
        (None, None, r"step3\.safetensors: cannot be read as safetensors"),
        (None, (10, 4), None),
    ],
)
def test_a_checkpoint_that_is_damaged_or_of_another_model(tmp_path, marker, shape, message):
    module = nn.Linear(4, 10, bias=False)
    before = module.weight.detach().clone()
    file = tmp_path / "step3.safetensors"
    file.write_bytes(b"text" if shape is None else save({"value/weight": torch.ones(shape)}))
    known = json.dumps({"step": 3, "files": [file.name]})
    (tmp_path / "checkpoint.json").write_text(marker or known)
    trainer = SimpleNamespace(
        _program=SimpleNamespace(params=(module.weight,), param_names=("weight",)),
        runner=SimpleNamespace(own_params=lambda: [0]),
        world=SimpleNamespace(rank=0),
        _has_any={0},
    )
    if message is None:
        assert DistributedTrainer._loaded(trainer, tmp_path) == 3
        assert torch.equal(module.weight, torch.ones(10, 4))
        return
    with pytest.raises(RunnerError, match=message):
        DistributedTrainer._loaded(trainer, tmp_path)
    assert torch.equal(module.weight, before)


def attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    """What it gives is seen through strides that are not those of its shape."""
    q, k, v = (f(x).view(2, 5, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
    y = nn.functional.scaled_dot_product_attention(q, k, v)
    return self.out(y.transpose(1, 2).reshape(2, 5, 8))


def attending() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    module = module_of(attention, **{name: nn.Linear(8, 8) for name in ("q", "k", "v", "out")})
    return module, (torch.randn(2, 5, 8), torch.randn(2, 5, 8))


def attend(rank: int) -> list[float]:
    """One step with the last projection on the other rank."""
    module, example = attending()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    graph = capture(module, example, mode="training", loss=nn.functional.mse_loss)
    place = np.where(np.array(graph.op_module) == "out", 2, 0)
    place = place[np.unique(graph.group, return_index=True)[1]][graph.group].astype(np.int32)
    with World.join(120) as world:
        trainer = DistributedTrainer(graph, CLUSTER, place, optimizer, world=world)
        if rank:
            trainer.serve()
            return []
        losses = trainer.step([example] * 2).tolist()
        with pytest.raises(RunnerError, match="another runner of this world is open"):
            place = random_placement(GRAPH, 0, 4)
            DistributedRunner(GRAPH, CLUSTER, place, world=world)(items(1)[0])
        trainer.close()
        return losses


def test_tensors_arrive_with_their_strides():
    module, (x, y) = attending()
    expected = nn.functional.mse_loss(module(x), y).item()
    with Ranks(attend, 2) as ranks:
        losses, _ = ranks.values()
    np.testing.assert_allclose(losses, [expected] * 2, rtol=1e-5)


BOX = torch.arange(24.0).view(2, 3, 4)
LAID_OUT = [BOX, BOX.transpose(0, 2), torch.tensor(5.0), torch.empty(0, 3)]
LAID_OUT += [BOX[:, ::2], torch.arange(3.0).expand(4, 3)]  # with gaps, one on another
LAID_OUT.append(torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last))
LAID_OUT.append(torch.view_as_complex(torch.ones(3, 2)).conj())


@pytest.mark.parametrize("value", LAID_OUT)
def test_elements_in_the_order_of_memory(value):
    elements, strides = dense(value)
    assert elements.is_contiguous() and elements.shape == (value.numel(),)
    again = elements.as_strided(value.shape, strides)
    assert torch.equal(again, value.resolve_conj())
    if value.is_contiguous() or value.dim() == 4:
        assert again.stride() == value.stride()


# --- faults --------------------------------------------------------------------------------------


def leave_early(rank: int) -> int:
    """Twenty streams that rank 0 leaves while the other sends: late tensors are no fault.

    Nor are those of a model with other shapes, whose tensors have the same numbers and strides.
    """
    place = random_placement(GRAPH, 0, 4)
    assert any(place[a] >= 2 > place[b] for a, b in GRAPH.edges.tolist())
    shorter = items(1)[0][:4]
    models = (GRAPH, items(1)[0]), (capture(MODULE, shorter), shorter)
    with World.join(60) as world:
        for graph, item in models * 10:
            runner = DistributedRunner(graph, CLUSTER, place, world=world)
            if rank:
                runner.serve()
                continue
            for number, result in enumerate(runner.stream([item] * 1000)):
                if number == 5:
                    torch.testing.assert_close(result, MODULE(item).detach())
                    break
            runner.close()
    return 0


def test_leaving_a_stream_early_is_no_fault():
    with Ranks(leave_early, 2) as ranks:
        assert ranks.values() == [0, 0]


class Failing(torch.optim.SGD):
    """Has no memory for its state, on rank 1."""

    def step(self, closure: Any = None) -> Any:
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
            raise RuntimeError("no memory")
        return super().step(closure)


def fail_in_update(rank: int, dies: bool) -> int:
    torch.manual_seed(0)
    module = tied()
    make = torch.optim.SGD if dies else Failing
    optimizer = make(module.parameters(), lr=0.1)
    loss = nn.functional.cross_entropy
    graph = capture(module, batches(1)[0], mode="training", loss=loss)
    place = random_placement(graph, 8, 4)
    with World.join(HANGS_S) as world:
        trainer = DistributedTrainer(graph, CLUSTER, place, optimizer, world=world)
        assert trainer._home, "each rank updates something, or this shows nothing"
        if dies and any(trainer._spread_to.values()):
            trainer._apply = lambda *arguments: os._exit(1)  # the one with the tied weight
        if rank:
            trainer.serve()
        else:
            trainer.step(batches(2))
    return 0


@pytest.mark.parametrize("dies", [False, True])
def test_an_update_that_fails_elsewhere_ends_the_step(dies):
    with Ranks(fail_in_update, 2, dies) as ranks:
        kinds = {ranks.answer(r, 60)[0] for r in (0, 1)}
        assert "value" not in kinds and "RankError" in kinds


def slowly(item: torch.Tensor) -> Iterator[torch.Tensor]:
    """Without end; the other processes need the cores too."""
    while True:
        time.sleep(0.003)
        yield item


def stream(rank: int, folder: str, timeout_s: float) -> int:
    """A stream without end over two devices."""
    graph = GRAPH
    with World.join(timeout_s) as world:
        place = random_placement(graph, 0, 4)
        runner = DistributedRunner(graph, CLUSTER, place, world=world)
        (Path(folder) / f"pid{rank}").write_text(str(os.getpid()))
        if rank:
            runner.serve()
            return 0
        for n, _ in enumerate(runner.stream(slowly(items(1)[0]))):
            if n == 20:
                (Path(folder) / "flowing").touch()
        return 0


def flowing(folder: Path, num_ranks: int) -> list[int]:
    """Processes of the ranks, once results flow."""
    began = time.monotonic()
    while not (folder / "flowing").exists():
        assert time.monotonic() - began < 150, "no results"
        time.sleep(0.02)
    return [int((folder / f"pid{r}").read_text()) for r in range(num_ranks)]


@pytest.mark.parametrize(
    ("victim", "how", "says"),
    [
        (1, signal.SIGKILL, "rank 1 .* has ended, or its connection broke"),
        (1, signal.SIGSTOP, "rank 1 .* no sign of life for 3 s"),
        (0, signal.SIGSTOP, "rank 0 .* no sign of life for 3 s"),
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_run_on_every_rank_in_time(victim, how, says, tmp_path):
    with Ranks(stream, 2, str(tmp_path), HANGS_S) as ranks:
        pids = flowing(tmp_path, 2)
        began = time.monotonic()
        os.kill(pids[victim], how)
        kind, text = ranks.answer(1 - victim)
        assert kind == "RankError"
        assert re.search(says, text), text
        if victim == 1:
            # The stream tells what it has given out.
            match = re.search(r"(\d+) of (\d+) micro-batches that were begun", text)
            assert match and 20 < int(match[1]) < int(match[2]) <= int(match[1]) + 4
        ranks.processes[1 - victim].join(10)
        assert not ranks.processes[1 - victim].is_alive()
        assert time.monotonic() - began < HANGS_S + 15
        ranks.processes[victim].kill()  # as what has started the ranks does


def test_what_starts_ranks_ends_all_where_one_has_failed(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid$RANK\n[ $RANK = 0 ] || kill -STOP $$\n"
        f"until [ -s {tmp_path}/pid1 ]; do sleep 0.01; done; echo said; exit 3\n"
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    assert spawn(2, ["run"]) == 3
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid1").read_text()), 0)


def join_only(rank: int, timeout_s: float) -> str:
    with World.join(timeout_s) as world:
        return f"{world.rank} of {world.size}"


def test_a_rank_that_does_not_come_and_one_that_comes_too_late(tmp_path):
    with Ranks(join_only, 1, 1.0, size_said=2) as ranks:
        kind, text = ranks.answer(0)
        assert kind == "RankError" and "rank 0 has not met all 2 ranks at 127.0.0.1:" in text
        ranks.add(join_only, 1, 1.0)  # the store has gone with rank 0
        kind, text = ranks.answer(1)
        assert kind == "RankError" and "rank 1 has not met all 2 ranks" in text
    with Ranks(stream, 2, str(tmp_path), HANGS_S) as ranks:
        flowing(tmp_path, 2)
        ranks.add(join_only, 1, 1.0)
        kind, text = ranks.answer(2)
        assert kind == "RankError" and "rank 1 has not met all 2 ranks" in text
        assert all(p.is_alive() for p in ranks.processes[:2])  # it disturbs nobody
        ranks.processes[1].kill()
        assert ranks.answer(0)[0] == "RankError"


def test_without_torchrun_the_message_says_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RankError, match="torchrun --nproc-per-node"):
        World.join()


# --- the command ---------------------------------------------------------------------------------


def commanded(rank: int, folder: str, words: list[str]) -> tuple[int, str]:
    """A rank of ``placement``: its exit code, and what it prints."""
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return main(words), printed.getvalue()


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_command_starts_ranks_compares_and_writes_one_trace(mode, tmp_path, monkeypatch, capfd):
    """In the order of a plan, and of a model that is called in turns."""
    name = "tiny_branches" if mode == "inference" else "tiny_mlp"
    if mode == "inference":
        graph = capture(*workloads.load(name), name=name)
    else:
        module, example, loss = workloads.load_training(name)
        optimizer = torch.optim.AdamW(module.parameters())
        options = {"mode": "training", "loss": loss, "optimizer": optimizer}
        graph = capture(module, example, name=name, **options)
    two = Cluster("two", CLUSTER.devices[:2])
    problem = problem_of(graph, two, num_microbatches=6)
    place = random_placement(graph, 0, 2)
    assert set(place.tolist()) == {0, 1}
    if mode == "inference":
        place = np.stack([place, random_placement(graph, 1, 2), 1 - place])
    order = Schedule(random_schedule(graph, place, 6, 0).order[:2], 6)
    facts = {"planner": "by hand", "workload": name, "schedule": order}
    plan = make_plan(problem, Solution(place, 0.0), **facts)
    plan.save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)

    def forked(count: int, words: list[str], _: Any) -> int:
        with Ranks(commanded, count, str(tmp_path), words) as ranks:
            (code, printed), *others = ranks.values()
        print(printed)
        return max(code, *(code for code, _ in others))

    if mode == "training":  # else processes of their own are started, as users' are
        monkeypatch.setattr("placement.cli.distributed.spawn", forked)
    command = ["run", "plan.json", "--distributed", "--json", "--batches", "6"]
    assert main([*command, "--trace", "trace.json", "--timeout", "120"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["numerics_equal"] is True
    assert "torchrun --nnodes HOSTS" in err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "X"} >= {0, 1}
    for d in (0, 1):
        mine = [e for e in events if e["tid"] == d and "operator" in e["args"]]
        mine.sort(key=lambda e: e["ts"])
        rows = [(e["args"]["operator"], e["args"]["micro_batch"]) for e in mine]
        assert rows == list(map(tuple, order.order[d].tolist()))
    missing = "none.safetensors: cannot be read as safetensors: No such file"
    wrong = {"--processes 3": "--processes 3: the plan has 2 devices"}
    if mode == "inference":
        wrong["--weights none.safetensors"] = missing
    else:
        wrong["--against-single-device"] = "not with --distributed and training"
    for words, message in wrong.items():
        assert main(["run", "plan.json", "--distributed", *words.split()]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("placement: error: ") and message in line
