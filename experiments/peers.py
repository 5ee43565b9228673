"""Our pipeline beside other frameworks', on the same machine in the same run.

    python -m experiments.peers pipelining [--rounds 9] [--micro-batches 16]

``torch.distributed.pipelining``: two processes over gloo, each pinned to one core with one
thread, stages cut at the middle block, ``ScheduleGPipe`` without gradients. Against it our
``Runner`` on two one-core devices with the same cut, and with the cut of our own planner. All
run the same number of micro-batches, filling and draining included, and their outputs are
compared with the plain module's. Rounds are interleaved: in every round each of them runs once,
while the others wait; ratios are medians over rounds.
Writes ``experiments/results/peers.json`` and ``.md``.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.runs import in_turns, measured_problem
from experiments.study import Option, Options, Study, StudyError, run
from experiments.tables import DASH, Column
from placement import planners
from placement.capturing import capture
from placement.cluster import Cluster
from placement.executor import Runner
from placement.executor.equality import Tolerance, difference
from placement.graph import OpGraph
from placement.runs.ways import inferring, timed, torch_compiled
from placement.tools.threads import torch_threads

PEER, SAME, OWN, PLAIN = "torch.distributed.pipelining", "same cut", "own cut", "plain, all cores"
COMPILED = "torch.compile, all cores"


class Block(nn.Module):
    """A transformer block, normalisation first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, w // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).reshape(b, s, w))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


@dataclass(frozen=True)
class Stack:
    """A stack of equal blocks that is cut in the middle; ``item`` is the shape of its input."""

    name: str
    num_blocks: int
    item: tuple[int, ...]
    heads: int = 0  # 0: linear and relu instead of transformer blocks

    def build(self) -> nn.Sequential:
        """The same weights in every process."""
        width = self.item[-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if self.heads:
                blocks: list[nn.Module] = [Block(width, self.heads) for _ in range(self.num_blocks)]
            else:
                blocks = [
                    nn.Sequential(nn.Linear(width, width), nn.ReLU())
                    for _ in range(self.num_blocks)
                ]
        return nn.Sequential(*blocks).eval()

    def inputs(self, num_microbatches: int) -> Tensor:
        """All micro-batches, one after another in the first dimension."""
        generator = torch.Generator().manual_seed(1)
        batch, *rest = self.item
        return torch.randn(num_microbatches * batch, *rest, generator=generator)


STACKS = (
    Stack("transformer 8 x 384, 128 tokens", 8, (1, 128, 384), heads=6),
    Stack("transformer 8 x 128, 32 tokens", 8, (1, 32, 128), heads=4),
    Stack("MLP 16 x 1024, batch 32", 16, (32, 1024)),
)
TINY = (Stack("tiny", 2, (2, 8, 16), heads=2),)


def stage(
    rank: int,
    port: int,
    cores: Sequence[int],
    stack: Stack,
    num_microbatches: int,
    pipe: Connection,
) -> None:
    """A process: one stage, which runs all micro-batches whenever it is told to.

    Answers with the time of its begin (first stage), or of its end and the outputs (last stage), on
    the clock that all processes of a machine share.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    blocks = list(stack.build())
    half = len(blocks) // 2
    mine = nn.Sequential(*(blocks[half:] if rank else blocks[:half]))
    inputs = stack.inputs(num_microbatches)
    example = inputs[: stack.item[0]]
    part = PipelineStage(mine, rank, 2, torch.device("cpu"), input_args=(example,))
    schedule = ScheduleGPipe(part, num_microbatches)
    pipe.send("ready")
    while pipe.recv():
        dist.barrier()
        began = perf_counter()
        with torch.inference_mode():
            outputs = schedule.eval(inputs) if rank == 0 else schedule.eval()
        ended = perf_counter()
        pipe.send((ended, outputs.numpy()) if rank else began)
    dist.destroy_process_group()


class Peer:
    """``torch.distributed.pipelining`` in two processes that wait while others run."""

    def __init__(self, stack: Stack, num_microbatches: int, cluster: Cluster) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes, self.processes = [], []
        for rank, device in enumerate(cluster.devices):
            here, there = context.Pipe()
            work = (rank, port, device.cores, stack, num_microbatches, there)
            process = context.Process(target=stage, args=work, daemon=True)
            process.start()
            there.close()  # so that the end of the process is the end of the pipe
            self.pipes.append(here)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def run(self) -> float:
        """Seconds for all micro-batches.

        Raises:
            EOFError: a process has ended; it said why on standard error.
        """
        for pipe in self.pipes:
            pipe.send(True)
        began, (ended, self.outputs) = (pipe.recv() for pipe in self.pipes)
        return float(ended - began)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with suppress(OSError):
                pipe.send(False)
            process.join(20)
            process.kill()


def same_cut(graph: OpGraph, num_blocks: int) -> np.ndarray[Any, Any]:
    """Int32 ``[N]``: operators of the second half of the blocks on device 1."""
    block = [int(path.split(".")[0]) for path in graph.op_module]
    return (np.array(block) >= num_blocks // 2).astype(np.int32)


def rows(options: Options) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    for stack in TINY if options.tiny else STACKS:
        yield row(stack, options.rounds, options.micro_batches, options.repeats)


def row(stack: Stack, rounds: int, num_microbatches: int, repeats: int) -> dict[str, Any]:
    """Seconds of each way, ratios to the peer (above 1: we are faster), and what was compared."""
    module, inputs = stack.build(), stack.inputs(num_microbatches)
    items = list(inputs.split(stack.item[0]))
    problem = measured_problem(capture(module, items[0], name=stack.name), repeats)
    graph, cluster = problem.graph, problem.cluster
    own = planners.load("best_of")(problem).placement
    cuts = {SAME: same_cut(graph, stack.num_blocks), OWN: own}
    with torch.inference_mode():
        expected = module(inputs)
    outputs: dict[str, Any] = {}

    def ours(name: str, runner: Runner) -> None:
        outputs[name] = torch.cat(list(runner.stream(items)))  # as the peer does

    def called(name: str, call: Callable[..., Any]) -> None:
        outputs[name] = torch.cat([call(x) for x in items])

    def on_all_cores(name: str, call: Callable[..., Any]) -> float:
        with torch_threads(cores):
            return timed(partial(called, name, call))

    cores = Cluster.detect().num_devices
    calls: dict[str, Any] = {PLAIN: inferring(module)}
    with torch_threads(cores):
        by_torch = torch_compiled(module, items[0], cluster, lambda *_: None)
    if by_torch is not None:
        calls[COMPILED] = by_torch.bare
    with ExitStack() as opened:
        peer = opened.enter_context(Peer(stack, num_microbatches, cluster))
        ways = {PEER: peer.run}
        for name, placement in cuts.items():
            runner = opened.enter_context(
                Runner(graph, cluster, placement, priority=problem.priority)
            )
            ways[name] = partial(timed, partial(ours, name, runner))
        ways |= {name: partial(on_all_cores, name, call) for name, call in calls.items()}
        seconds = in_turns(ways, rounds, warm_up=2)
        outputs[PEER] = torch.from_numpy(peer.outputs)
    tolerance = Tolerance.of([expected], cluster)
    for name, output in outputs.items():
        if wrong := difference([output], [expected], tolerance):
            raise StudyError(f"{name}: {wrong}")
    ratios = {name: seconds[PEER] / v for name, v in seconds.items() if name != PEER}
    return {
        "stack": stack.name,
        "operators": graph.num_ops,
        "micro_batches": num_microbatches,
        "seconds": {name: float(np.median(v)) for name, v in seconds.items()},
        "ratio": {name: float(np.median(v)) for name, v in ratios.items()},
        "ratio_iqr": {name: np.percentile(v, [25, 75]).tolist() for name, v in ratios.items()},
        "operators_on_second_device": {name: int(p.sum()) for name, p in cuts.items()},
    }


def against(name: str, row: dict[str, Any]) -> str:
    if name not in row["ratio"]:  # no compiler
        return DASH
    low, high = row["ratio_iqr"][name]
    return f"{row['ratio'][name]:.2f}x ({low:.2f} to {high:.2f})"


STUDY = Study(
    name="peers",
    word="pipelining",
    rows=rows,
    columns=(
        Column("model", "stack"),
        Column("operators", "operators"),
        Column(PEER, lambda r: r["seconds"][PEER] / r["micro_batches"], 2, 1e3, " ms"),
        *(Column(name, partial(against, name)) for name in (SAME, OWN, PLAIN, COMPILED)),
    ),
    options={
        "rounds": 9,
        "micro_batches": 16,
        "repeats": Option(10, "of the profile"),
        "tiny": Option(False, "a model of a millisecond, as a test"),
    },
    facts=lambda options: {"rounds": options.rounds, "micro_batches": options.micro_batches},
)

if __name__ == "__main__":
    raise SystemExit(run(STUDY))
