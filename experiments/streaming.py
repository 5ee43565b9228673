"""Models twice as large as a GPU's memory, on the emulated GPU: predicted, run, and the bound.

    python -m experiments.streaming [--calls 5] [--before FILE]

Each kernel takes as long as what it reads at a rate, each copy as long as its bytes; the CPU takes
no part, as its times would be this machine's. A row has milliseconds of a call: the bound, what is
predicted of the plan and what it takes, and the same of ``before``: the placements of another
checkout, which ``--write-before FILE`` writes there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.gpu_baselines import Decoder
from placement import planners
from placement.bounds import lower_bound
from placement.capturing import capture
from placement.cluster import Cluster, Device, Link
from placement.executor import Runner
from placement.graph import OpGraph
from placement.problem import Problem
from placement.profile import Profile
from placement.simulator import evaluate

LINK, LATENCY_S = 4e7, 2e-4  # bytes per second, and seconds for each copy
NAMES = ("cpu:0", "cuda:0")


class Unlike(nn.Module):
    """Wide layers, whose weights take long to come, between many narrow ones."""

    def __init__(self, count: int = 4, width: int = 768, narrow: int = 96) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.narrow = nn.ModuleList(nn.Linear(narrow, narrow) for _ in range(4 * count))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.wide):
            x = torch.relu(layer(x))
            for each in self.narrow[4 * i : 4 * i + 4]:
                y = torch.relu(each(y))
        return x.sum() + y.sum()


def models() -> dict[str, tuple[nn.Module, Any, float]]:
    """Module, inputs, and bytes per second that a kernel reads."""
    torch.manual_seed(0)
    decoder = Decoder(6, 192).eval()
    tokens = torch.randn(1, 16, 192)
    wide = Unlike().eval(), (torch.randn(8, 768), torch.randn(1024, 96))
    return {
        "decoder, copies take long": (decoder, tokens, 4 * LINK),
        "decoder, kernels take as long": (decoder, tokens, LINK),
        "decoder, kernels take long": (decoder, tokens, LINK / 2),
        "wide and narrow layers": (*wide, 4 * LINK),
    }


def measured_link() -> tuple[float, float]:
    """Seconds to begin a copy on the emulated GPU, and bytes per second, as they are measured."""
    from placement.executor.streamed import _copying
    from tests import emulated_gpu

    with emulated_gpu.emulated(poison=False, copy_bytes_per_s=LINK, copy_s=LATENCY_S):
        return _copying(Device("cuda:0", "cuda", memory_bytes=2**22))


def problem_of(graph: OpGraph, rate: float, measured: tuple[float, float]) -> Problem:
    """A call on a GPU with half of the memory that parameters take."""
    half = int(graph.param_bytes.sum()) // 2 + int(graph.tensor_bytes.max()) * 3
    devices = (
        Device("cpu:0"),
        Device("cuda:0", "cuda", memory_bytes=half),
        Device("streamed/cuda:0", "cuda", streams="cuda:0"),
    )
    link = Link("cpu:0", "cuda:0", *measured)
    links = (link, replace(link, dst="streamed/cuda:0"), replace(link, src="cuda:0", dst="cpu:0"))
    cluster = Cluster("half", devices, links)
    read = graph.op_param_bytes.astype(np.float64)
    np.add.at(read, graph.use_dst, graph.tensor_bytes[graph.use_tensor])
    made = graph.tensor_root[graph.out_tensor] == graph.out_tensor
    makes = np.bincount(np.repeat(np.arange(graph.num_ops), np.diff(graph.out_ptr))[made],
                        minlength=graph.num_ops) > 0  # fmt: skip
    gpu_s = np.where(makes, read / rate, 0.0) + OVERHEAD_S
    seconds = np.stack([np.full(graph.num_ops, np.inf), gpu_s], axis=1)
    profile = Profile(NAMES, seconds, np.zeros_like(seconds)).for_cluster(cluster)
    return Problem(graph, cluster, profile, "latency", num_microbatches=1)


OVERHEAD_S = 3e-4  # of a kernel on the emulated GPU: a thread that wakes up, and Python


def called_s(problem: Problem, placement: Any, inputs: Any, rate: float, calls: int) -> float:
    """The median of calls one after another, on the emulated GPU."""
    from tests import emulated_gpu

    args = inputs if isinstance(inputs, tuple) else (inputs,)
    rates = {"copy_bytes_per_s": LINK, "kernel_bytes_per_s": rate, "copy_s": LATENCY_S}
    spans = []
    with (
        emulated_gpu.emulated(poison=False, **rates),
        Runner(problem.graph, problem.cluster, placement, priority=problem.priority) as runner,
    ):
        for _ in range(calls + 2):
            began = time.perf_counter()
            runner(*args)
            spans.append(time.perf_counter() - began)
    return float(np.median(spans[2:]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--evaluations", type=int, default=8000)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--write-before", type=Path)
    parser.add_argument("--no-run", action="store_true", help="predictions only")
    options = parser.parse_args(argv)
    before = json.loads(options.before.read_text()) if options.before else {}
    written: dict[str, Any] = {}
    solve: Callable[..., Any] = planners.load("best_of", evaluations=options.evaluations)
    link = measured_link()
    for name, (module, inputs, rate) in models().items():
        graph = capture(module, inputs, name="model")
        problem = problem_of(graph, rate, link)
        if options.write_before:
            answer = solve(problem)
            written[name] = [answer.placement.tolist(), answer.value_s]
            options.write_before.write_text(json.dumps(written))
            continue
        from placement.plan.reached import least_s, reached
        from placement.planners.residence import Residence, refitted, with_buffers

        own, answer = refitted(*(lambda p: (p, solve(p)))(with_buffers(problem)))
        row: dict[str, Any] = {
            "bound": least_s(own),
            "greedy": Residence()(problem).value_s,
            "predicted": answer.value_s,
        }
        if name in before:
            placed = np.array(before[name][0], np.int32)
            row["before, as predicted then"] = before[name][1]
            row["before, predicted"] = float(evaluate(problem, placed[None]).latency_s[0])
        if not options.no_run:
            row["run"] = called_s(own, answer.placement, inputs, rate, options.calls)
            if name in before:
                row["before, run"] = called_s(problem, placed, inputs, rate, options.calls)
        size = graph.param_bytes.sum() / 2**20
        room = own.cluster.devices[2].buffer_bytes
        figures = ", ".join(f"{key} {value * 1e3:.1f}" for key, value in row.items())
        print(f"{name} ({size:.0f} MiB, buffer {room}): {figures} ms", flush=True)
        print(
            f"  {reached(own, answer)}; {lower_bound(own) * 1e3:.1f} with this buffer", flush=True
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
