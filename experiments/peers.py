"""``torch.distributed.pipelining`` in two processes, and models to run in it."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from placement.graph import OpGraph

PATIENCE_S = 300.0  # a peer that does not answer has failed


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
    Stack("MLP 16 x 1024, batch 32", 16, (32, 1024)),
)
TINY = (Stack("tiny", 2, (2, 8, 16), heads=2),)


def stage(
    rank: int, stack: Stack, num_microbatches: int, core: int, folder: str, pipe: Connection
) -> None:
    """One stage in a process of its own: runs all micro-batches whenever it is told to.

    Answers with the time of its begin (first stage) or end (last stage), on the clock that all
    processes of a machine share, and once with its output.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        blocks = list(stack.build())
        half = len(blocks) // 2
        mine = nn.Sequential(*(blocks[half:] if rank else blocks[:half]))
        inputs = stack.inputs(num_microbatches)
        example = inputs[: stack.item[0]]
        part = PipelineStage(mine, rank, 2, torch.device("cpu"), input_args=(example,))
        schedule = ScheduleGPipe(part, num_microbatches)
        pipe.send("ready")
        while pipe.recv() == "run":
            dist.barrier()
            began = perf_counter()
            with torch.inference_mode():
                outputs = schedule.eval(inputs) if rank == 0 else schedule.eval()
            ended = perf_counter()
            pipe.send((began, None) if rank == 0 else (ended, outputs.numpy()))
    finally:
        dist.destroy_process_group()


class Peer:
    """``torch.distributed.pipelining`` in two processes that wait while others run."""

    def __init__(self, stack: Stack, num_microbatches: int, cores: list[int]) -> None:
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(2):
            here, there = context.Pipe()
            arguments = (rank, stack, num_microbatches, cores[rank], self._folder.name, there)
            process = context.Process(target=stage, args=arguments, daemon=True)
            process.start()
            there.close()  # so that a stage that ends is seen here
            self._pipes.append(here)
            self._processes.append(process)
        self.outputs: Any = None
        for rank in range(2):
            self._answer(rank)

    def _answer(self, rank: int) -> Any:
        if not self._pipes[rank].poll(PATIENCE_S):
            raise RuntimeError(f"stage {rank} has not answered for {PATIENCE_S:.0f} s")
        try:
            return self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join(5)
            code = self._processes[rank].exitcode
            raise RuntimeError(f"stage {rank} ended with code {code}; see its message") from None

    def run(self) -> float:
        """Seconds for all micro-batches."""
        for pipe in self._pipes:
            pipe.send("run")
        began, _ = self._answer(0)
        ended, self.outputs = self._answer(1)
        return float(ended - began)

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send("stop")
            except OSError:
                continue  # it ended by itself
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def same_cut(graph: OpGraph, num_blocks: int) -> np.ndarray[Any, Any]:
    """Int32 ``[N]``: operators of the second half of the blocks on device 1."""
    block = [int(path.split(".")[0]) for path in graph.op_module]
    return (np.array(block) >= num_blocks // 2).astype(np.int32)
