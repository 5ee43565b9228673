"""Sections that check: results, training, errors. Nothing is timed, so they run side by side."""

from __future__ import annotations

import gc
import platform
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from experiments.gpu.bench import GIB, Bench
from experiments.gpu.models import (
    CHECKED,
    all_on,
    captured,
    expected_of,
    others_like,
    scattered,
    tf32,
)
from experiments.gpu.training import steps_per_s
from experiments.runs import warm
from placement.capturing import capture
from placement.capturing.training import mean_of_outputs
from placement.cli.train import difference as training_difference
from placement.executor import Runner, Trainer
from placement.executor.equality import Tolerance, error
from placement.graph import OpGraph
from placement.workloads import load


def facts(bench: Bench) -> None:
    """The machine, the versions and the time: what the other rows are about."""
    for d in replace(bench, part=(0, 1)).cluster.devices:
        gib = d.memory_bytes / GIB
        bench.emit(d.name, model=d.model, cores=len(d.cores), threads=d.threads, promised_gib=gib)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numba", "numpy", "transformers", "accelerate", "pynvml"):
        with suppress(Exception):
            versions[name] = __import__(name).__version__
    bench.emit("versions", **versions, cuda=str(torch.version.cuda))
    bench.emit("run", began=datetime.now(UTC).isoformat(timespec="minutes"))
    with bench.item("nvidia-smi"):
        keys = "name,mig.mode.current,driver_version,clocks.max.sm,clocks.sm,power.limit"
        command = ["nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True)
        bench.emit("nvidia-smi", text=answer.stdout)


def correct(bench: Bench, part: int) -> None:
    """Placements compute what the model does in float64; a stream twice gives the same bits."""
    names = CHECKED[0][part : part + 1] if bench.emulated else CHECKED[part]
    for i, name in enumerate(names):
        with bench.item(name, bench.part_s(len(names) - i)):
            _check_model(bench, name)
    if part == 0:
        with bench.item("many micro-batches"):
            module, inputs, graph = bench.model("tiny_branches")
            items = [others_like(inputs, seed) for seed in range(10 if bench.emulated else 300)]
            expected, _ = expected_of(module, items)
            runner = Runner(graph, bench.cluster, scattered(graph, 0), max_in_flight=8)
            with tf32(False), runner:
                off, same = errors_of(runner, items, expected)
            ok = off <= 1e-5 and same
            bench.emit("many micro-batches", count=len(items), error=off, bitwise_again=same, ok=ok)


def _check_model(bench: Bench, name: str) -> None:
    """All of it on the GPU, and scattered over both devices; with CUDA graphs and without."""
    module, inputs, graph = bench.model(name)
    items = [others_like(inputs, seed) for seed in range(3 if bench.emulated else 8)]
    expected, reference = expected_of(module, items, None if bench.emulated else bench.gpu)
    limit = Tolerance.of(module.state_dict().values(), bench.cluster).relative
    ways = {"all on the GPU": all_on(graph, 1), "as CUDA graphs": all_on(graph, 1)}
    ways |= {f"random {seed}": scattered(graph, seed) for seed in range(1 if bench.emulated else 3)}
    ways["random 0 as CUDA graphs"] = ways["random 0"]
    for way, placement in ways.items():
        for allowed in (False, True) if placement.all() else (False,):
            with bench.item(f"{name}, {way}, tf32={allowed}"), tf32(allowed):
                with Runner(graph, bench.cluster, placement, max_in_flight=4) as runner:
                    runner.cuda_graphs = way.endswith("as CUDA graphs")
                    off, same = errors_of(runner, items, expected)
                    reasons = list(runner.not_graphed.values())
                # A capture that failed is no graph, and nothing was shown of it.
                failed = [reason for reason in reasons if "Error: " in reason]
                bench.emit(
                    name,
                    way=way,
                    tf32=allowed,
                    error=off,
                    allowed=limit,
                    ok=off <= limit and same and not failed,
                    bitwise_again=same,
                    reference=reference,
                    not_graphed=len(reasons),
                    why=next(iter([*failed, *reasons]), ""),
                )


def errors_of(
    runner: Runner, items: Sequence[Any], expected: Sequence[Sequence[Any]]
) -> tuple[float, bool]:
    """Largest error of a stream of ``items``, and whether its bits are the same a second time."""
    if runner.cuda_graphs:  # graphs are captured before bits are compared
        list(runner.stream(items[:3]))
    first = [pytree.tree_leaves(outputs) for outputs in runner.stream(items)]
    again = [pytree.tree_leaves(outputs) for outputs in runner.stream(items)]
    worst, same = 0.0, True
    for outputs in zip(first, again, expected, strict=True):
        for x, y, exact in zip(*outputs, strict=True):
            if isinstance(exact, Tensor):
                worst = max(worst, error(x, exact))
                same = same and torch.equal(x, y)
    return worst, same


def train(bench: Bench) -> None:
    """Losses, gradients and parameters of two steps equal plain PyTorch's."""
    names = ("tiny_mlp", "resnet_tiny", "convnext_tiny", "gpt2_tiny", "dlrm_tiny")
    for name in ("tiny_mlp",) if bench.emulated else names:
        for label in ("all on the GPU", "as CUDA graphs", "random"):
            with bench.item(f"{name}, {label}"):
                module, inputs = load(name)
                for part in module.modules():
                    if isinstance(part, nn.Dropout):
                        part.p = 0.0
                module.train()
                optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
                example = (inputs, None)
                graph = capture(
                    module, example, mode="training", loss=mean_of_outputs, optimizer=optimizer
                )
                placement = scattered(graph, 1) if label == "random" else all_on(graph, 1)
                with tf32(False), Trainer(graph, bench.cluster, placement, optimizer) as trainer:
                    trainer.runner.cuda_graphs = label == "as CUDA graphs"
                    wrong = training_difference(trainer, module, example, mean_of_outputs, 3)
                bench.emit(f"{name}, {label}", ok=not wrong, difference=wrong)


def errors(bench: Bench) -> None:
    """What goes wrong on a GPU is said, with the operator, and leaves nothing behind."""
    with bench.item("closed in the midst"):
        _, inputs, graph = captured("tiny_mlp")
        runner = Runner(graph, bench.cluster, all_on(graph, 1))
        stream = runner.stream([inputs] * 20)
        next(stream)
        stream.close()
        again = len(list(runner.stream([inputs] * 3)))
        runner.close()
        bench.emit("closed in the midst", ok=again == 3)
    with bench.item("out of memory"):
        large = nn.Sequential(nn.Linear(4, 2**10), nn.Linear(2**10, 4)).eval()
        inputs = torch.ones(2**16, 4)
        graph = capture(large, inputs)  # 256 MiB in between
        before = torch.cuda.memory_allocated()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(0.125 * GIB / total)
        message = _failure(bench, graph, inputs)
        torch.cuda.set_per_process_memory_fraction(1.0)
        left = torch.cuda.memory_allocated() - before
        bench.emit("out of memory", said=message, left_bytes=left, ok="out of memory" in message)


def index(bench: Bench) -> None:
    """What an assertion of a kernel says; the process is of no use afterwards, and may be ended."""
    with bench.item("an index out of range"):
        table = capture(nn.Embedding(10, 4).eval(), torch.arange(4))
        message = _failure(bench, table, torch.tensor([1, 2, 3, 99]))
        bench.emit("an index out of range", said=message, ok="CUDA error" in message)


def _failure(bench: Bench, graph: OpGraph, inputs: Tensor) -> str:
    """What is raised by a call on the GPU, with its notes; ``nothing`` where nothing is."""
    try:
        with Runner(graph, bench.cluster, all_on(graph, 1)) as runner:
            runner(inputs)
    except Exception as failure:
        notes = getattr(failure, "__notes__", ())
        return " ".join(" ".join([str(failure)[:100], *notes]).split())
    return "nothing"


def kernels(bench: Bench) -> None:
    """Planners, the simulator and environments compiled, where that did not travel along."""
    began = time.perf_counter()
    warm_up(bench.emulated)
    from numba.core.dispatcher import Dispatcher

    dispatchers = [x for x in gc.get_objects() if issubclass(type(x), Dispatcher)]
    loaded, compiled = (
        sum(sum(getattr(x.stats, name).values()) for x in dispatchers)
        for name in ("cache_hits", "cache_misses")
    )
    bench.emit("kernels", loaded=loaded, compiled=compiled, seconds=time.perf_counter() - began)


def warm_up(emulated: bool = False, training: bool = True) -> None:
    """Compile, or load, all kernels that sections use."""
    warm(("heft",) if emulated else ("best_of", "heft"))
    if training and not emulated:
        with suppress(ImportError):  # then the section says what is missing
            steps_per_s("cpu", 16, 1)
