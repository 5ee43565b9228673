"""Models twice as large as a GPU's memory, on the emulated GPU: predicted, run, and the bound.

    python -m experiments.streaming [--calls 5] [--link 4e6]

Each kernel takes as long as what it reads at a rate, each copy as long as its bytes; the CPU takes
no part, as its times would be this machine's. The link is slow, so that what the emulator's threads
take, which no GPU does, is of no account. Operators are whole, or matrices are in two or in four
pieces (columns of what they make), whichever is predicted to be faster. A row has milliseconds of a
call: the least bound of these, what is predicted of the plan, and what it takes on average.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments.gpu_baselines import Decoder
from placement import planners
from placement.capturing import capture
from placement.cluster import Cluster, Device, Link
from placement.executor import Runner
from placement.graph import OpGraph
from placement.pieces import Pieces, split
from placement.pieces.decide import options_of
from placement.pieces.rules import WHOLE
from placement.plan.reached import least_s, reached
from placement.planners.residence import refitted, with_buffers
from placement.problem import Placement, Problem, Solution
from placement.profile import Profile
from placement.program import Param, Ref, leaves_of

PIECES = (2, 4)  # that large matrices may be in
LINK, BEGINS = 4e6, 8e3  # bytes per second, and those of which each copy takes the time besides
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
    """Module, inputs, and how many times as fast as the link a kernel reads."""
    torch.manual_seed(0)
    decoder = Decoder(6, 192).eval()
    tokens = torch.randn(1, 16, 192)
    wide = Unlike().eval(), (torch.randn(8, 768), torch.randn(1024, 96))
    return {
        "decoder, copies take long": (decoder, tokens, 4.0),
        "decoder, kernels take as long": (decoder, tokens, 1.0),
        "decoder, kernels take long": (decoder, tokens, 0.5),
        "wide and narrow layers": (*wide, 4.0),
    }


def measured_link(rate: float) -> tuple[float, float]:
    """Seconds to begin a copy on the emulated GPU, and bytes per second, as they are measured."""
    from placement.executor.streamed import _copying
    from tests import emulated_gpu

    with emulated_gpu.emulated(poison=False, copy_bytes_per_s=rate, copy_s=BEGINS / rate):
        return _copying(Device("cuda:0", "cuda", memory_bytes=2**22))


def in_pieces(graph: OpGraph, count: int) -> OpGraph:
    """The graph with its large matrices, those of half the largest or more, in pieces."""
    shares, large = (1 / count,) * count, graph.op_param_bytes.max() / 2
    rules = {}
    for n, options in enumerate(options_of(graph, shares)):
        step = graph.program.steps[n]
        tensors = [x for x in leaves_of((step.args, step.kwargs)) if isinstance(x, Ref | Param)]
        cut = [i for i, x in enumerate(tensors) if isinstance(x, Param)]
        each = [rule for rule in options.rules if all(rule.inputs[i] != WHOLE for i in cut)]
        if graph.op_param_bytes[n] >= large and each:
            rules[graph.op_name[n]] = each[0]
    return split(graph, Pieces(shares, rules))


def problem_of(graph: OpGraph, rate: float, measured: tuple[float, float], memory: int) -> Problem:
    """A call on a GPU with so many bytes of memory."""
    devices = (
        Device("cpu:0"),
        Device("cuda:0", "cuda", memory_bytes=memory),
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


def planned(problem: Problem, evaluations: int) -> tuple[Problem, Solution]:
    """The best of all planners, and the size of its buffer."""
    problem = with_buffers(problem)
    return refitted(problem, planners.load("best_of", evaluations=evaluations)(problem))


def called_s(
    problem: Problem, placement: Placement, inputs: Any, rates: Mapping[str, float], calls: int
) -> list[float]:
    """Seconds of calls one after another, on the emulated GPU."""
    from tests import emulated_gpu

    args = inputs if isinstance(inputs, tuple) else (inputs,)
    spans = []
    with (
        emulated_gpu.emulated(poison=False, **rates) as gpu,
        Runner(problem.graph, problem.cluster, placement, priority=problem.priority) as runner,
    ):
        for _ in range(calls + 2):
            began = time.perf_counter()
            runner(*args)
            spans.append(time.perf_counter() - began)
        assert not gpu.num_races, "a buffer was written or read too early"
    return spans[2:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--evaluations", type=int, default=8000)
    parser.add_argument("--link", type=float, default=LINK, help="bytes per second")
    parser.add_argument("--no-run", action="store_true", help="predictions only")
    options = parser.parse_args(argv)
    link = measured_link(options.link)
    rates = {"copy_bytes_per_s": options.link, "copy_s": BEGINS / options.link}
    for name, (module, inputs, times) in models().items():
        graph = capture(module, inputs, name="model")
        half = int(graph.param_bytes.sum()) // 2 + int(graph.tensor_bytes.max()) * 3
        problems = {
            count: problem_of(
                in_pieces(graph, count) if count > 1 else graph, times * options.link, link, half
            )
            for count in (1, *PIECES)
        }
        answers = {k: planned(x, options.evaluations) for k, x in problems.items()}
        best = min(answers, key=lambda k: answers[k][1].value_s)
        problem, answer = answers[best]
        bound_s, predicted_s = min(map(least_s, problems.values())), answer.value_s
        line = f"{name} ({'whole' if best == 1 else f'in {best} pieces'}): "
        line += f"bound {bound_s * 1e3:.1f}, predicted {predicted_s * 1e3:.1f} ms "
        line += f"({bound_s / predicted_s:.0%} of the bound)"
        if not options.no_run:
            now = rates | {"kernel_bytes_per_s": times * options.link}
            took = called_s(problem, answer.placement, inputs, now, options.calls)
            took_s = float(np.mean(took))
            line += (
                f", run {took_s * 1e3:.1f} ({min(took) * 1e3:.1f} to {max(took) * 1e3:.1f}; "
                f"{bound_s / took_s:.0%} of the bound, predicted {predicted_s / took_s - 1:+.1%})"
            )
        print(f"{line}\n  {reached(problem, answer)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
