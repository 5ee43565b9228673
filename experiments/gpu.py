"""What the executor does on a real GPU beside CPU cores: check it, then measure it.

    python -m experiments.gpu --part check|study --out FOLDER [--emulated] [--sections NAME ...]

Each section is a process of its own with a deadline: what stops one costs no other. Every figure
is a line of ``FOLDER/gpu.jsonl``, written at once; profiles are ``FOLDER/*.npz``, to plan from at
home. The table comes last, and is ``FOLDER/gpu.md`` too. A part takes eight minutes at most.
``--emulated`` runs the same code on tiny models on the emulated GPU of the tests: it shows nothing
but that the script runs to its end. ``experiments/gpu.sh`` builds what a bare machine needs.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import placement.costs.measure as measuring
from experiments.study import ROOT, StudyError, launch, say
from experiments.tables import number, to_table
from placement import planners
from placement.capturing import capture
from placement.capturing.training import mean_of_outputs, plain_step
from placement.cli.train import difference as training_difference
from placement.cluster import Cluster, Device
from placement.costs import power
from placement.costs.measure import measure
from placement.executor import Executor, Runner, Trainer
from placement.executor.equality import Tolerance, error
from placement.graph import OpGraph
from placement.problem import Problem
from placement.profile import Profile
from placement.program import split_inputs
from placement.simulator import evaluate, simulate
from placement.timeline import steady_period
from placement.tools.files import write_atomic
from placement.workloads import load

LONGEST_S = 480.0  # of a part
GIB = 2**30


@dataclass
class Bench:
    """What a section works with: ``emulated``, everything is to be tiny."""

    out: Path
    section: str
    emulated: bool

    def emit(self, item: str, **facts: Any) -> None:
        facts = {k: None if v != v else v for k, v in facts.items()}  # JSON knows no nan
        row = {"section": self.section, "item": item, **facts}
        with (self.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=float) + "\n")
            file.flush()
            os.fsync(file.fileno())
        say(" ".join(f"{k}={shown(v)}" for k, v in row.items()))

    @contextmanager
    def item(self, name: str) -> Iterator[None]:
        """What fails is a row of its own, and the next item goes on."""
        began = time.perf_counter()
        try:
            yield
        except Exception as failure:
            notes = " ".join(getattr(failure, "__notes__", ()))
            text = " ".join(f"{type(failure).__name__}: {failure} {notes}".split())
            self.emit(name, failed=text[:300], seconds=time.perf_counter() - began)

    @property
    def cluster(self) -> Cluster:
        """The CPU cores, and the first GPU."""
        return Cluster("gpu", Cluster.detect().devices[:2])

    @property
    def planning_s(self) -> float:
        return 0.5 if self.emulated else 3.0

    @property
    def gpu(self) -> torch.device:
        return torch.device("cuda:0")

    def graph(self, name: str, **options: Any) -> tuple[nn.Module, Any, OpGraph]:
        module, inputs = load(name, **options)
        return module, inputs, capture(module, inputs, name=name)

    def profile(self, name: str, graph: OpGraph, cluster: Cluster, repeats: int = 3) -> Profile:
        """The profile that an earlier section has written, or a new one."""
        path = self.out / f"{name}.npz"
        if path.exists():
            earlier = Profile.load(path)
            if earlier.graph_fingerprint == graph.fingerprint:
                return earlier
        profile = measure(graph, cluster, repeats=1 if self.emulated else repeats)
        profile.save(path)
        return profile


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def all_on(graph: OpGraph, device: int) -> np.ndarray:
    return np.full(graph.num_ops, device, np.int32)


def scattered(graph: OpGraph, seed: int, num_devices: int = 2) -> np.ndarray:
    chosen = np.random.default_rng(seed).integers(num_devices, size=graph.num_groups)
    return chosen[graph.group].astype(np.int32)


def others_like(inputs: Any, seed: int) -> Any:
    """Inputs of the same form with other values: new floats, integers in another order."""
    draw = torch.Generator().manual_seed(seed)

    def other(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.is_floating_point():
            return torch.randn(x.shape, generator=draw, dtype=x.dtype)
        return x.flatten()[torch.randperm(x.numel(), generator=draw)].view(x.shape)

    return pytree.tree_map(other, inputs)


def expected_of(module: nn.Module, items: Sequence[Any]) -> tuple[list[list[Any]], str]:
    """Outputs in float64, or as the module is where it cannot be so; and which."""

    def run(model: nn.Module, change: Callable[[Any], Any]) -> list[list[Any]]:
        outputs = []
        for item in items:
            args, kwargs = pytree.tree_map(change, split_inputs(item))
            with torch.no_grad():
                outputs.append(pytree.tree_leaves(model(*args, **kwargs)))
        return outputs

    def exact(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    with suppress(Exception):  # a dtype is written down in it
        return run(copy.deepcopy(module).double(), exact), "float64"
    return run(module, lambda x: x), "its own dtype"


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether a GPU may round factors of float32 products to TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])


def timed(call: Callable[[], Any], times: int = 1) -> float:
    """Seconds of a call: the median of so many, after one that does not count."""
    call()
    spans = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        spans.append(time.perf_counter() - began)
    return statistics.median(spans)


def call_seconds(runner: Runner, inputs: Any, times: int) -> float:
    args, kwargs = split_inputs(inputs)
    return timed(lambda: runner(*args, **kwargs), times)


def period_of(runner: Runner, inputs: Any, count: int) -> float:
    began = time.perf_counter()
    ends = [time.perf_counter() - began for _ in runner.stream([inputs] * count)]
    return float(steady_period(np.array(ends)))


def on_gpu(
    module: nn.Module, inputs: Any, device: torch.device
) -> tuple[Callable[..., Any], tuple[Tensor, ...], Any]:
    """Plain PyTorch with parameters and inputs on the GPU: the call, and its arguments."""
    state = {
        k: v.detach().to(device) for k, v in [*module.named_parameters(), *module.named_buffers()]
    }
    args, kwargs = pytree.tree_map(
        lambda x: x.to(device) if isinstance(x, Tensor) else x, split_inputs(inputs)
    )
    return (
        lambda *a, **k: torch.func.functional_call(module, state, a, k, tie_weights=True),
        args,
        kwargs,
    )


# --- check ---------------------------------------------------------------------------------------


def facts(b: Bench) -> None:
    cluster = b.cluster
    for d in cluster.devices:
        gib = d.memory_bytes / GIB
        b.emit(d.name, model=d.model, cores=len(d.cores), threads=d.threads, promised_gib=gib)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numba", "numpy", "transformers"):
        with suppress(Exception):
            versions[name] = __import__(name).__version__
    b.emit("versions", **versions, cuda=str(torch.version.cuda))
    before = Cluster.detect().devices[0].memory_bytes
    b.emit("host memory", grew_bytes=Cluster.detect().devices[0].memory_bytes - before)
    with b.item("nvidia-smi"):
        asked = "name,driver_version,clocks.max.sm,clocks.sm,power.limit,pcie.link.gen.current"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        b.emit("nvidia-smi", text=subprocess.run(command, capture_output=True, text=True).stdout)


def micro(b: Bench) -> None:
    """Copies, launches, waits: what the executor is made of."""
    gpu = b.gpu
    for size in (2**12, 2**20) if b.emulated else (2**12, 2**16, 2**20, 2**24, 2**28):
        with b.item(f"copy {size}"):
            b.emit(f"copy {size}", **copies(size, gpu))
    one = torch.ones(1, device=gpu)
    times = 20 if b.emulated else 2000
    with b.item("launch"):
        torch.cuda.synchronize()
        launch_s = timed(lambda: [one + one for _ in range(times)], 3) / times
        target = torch.ops.aten.add.Tensor
        overload_s = timed(lambda: [target(one, one) for _ in range(times)], 3) / times
        b.emit("launch", python_us=launch_s * 1e6, overload_us=overload_s * 1e6)
    with b.item("event"):
        events = [torch.cuda.Event() for _ in range(times)]
        stream = torch.cuda.current_stream(gpu)
        record_s = timed(lambda: [e.record(stream) for e in events], 3) / times
        made_s = timed(lambda: [torch.cuda.Event().record(stream) for _ in events], 3) / times
        b.emit("event", record_us=record_s * 1e6, make_and_record_us=made_s * 1e6)
    for blocking in (False, True):  # until the thread that waits for an event goes on
        with b.item(f"wake, blocking={blocking}"):
            event = torch.cuda.Event(blocking=blocking)
            wake_s = timed(lambda e=event: (e.record(), e.synchronize()), 50)  # type: ignore[misc]
            b.emit(f"wake, blocking={blocking}", us=wake_s * 1e6)
    if not b.emulated:  # which has no graphs
        with b.item("graph replay"):
            b.emit("graph replay", us_per_kernel=replay_us(one))


def copies(size: int, gpu: torch.device) -> dict[str, float]:
    """Microseconds of copies of so many bytes, and bytes per nanosecond."""
    pageable = torch.ones(size // 4)
    pinned = torch.empty_like(pageable, pin_memory=True).copy_(pageable)
    there = pageable.to(gpu)

    def done(call: Callable[[], Any]) -> float:
        return timed(lambda: (call(), torch.cuda.synchronize()), 5)

    seconds = {
        "to_pageable": done(lambda: there.copy_(pageable)),
        "to_pinned": done(lambda: there.copy_(pinned, non_blocking=True)),
        "from_pinned": done(lambda: pinned.copy_(there, non_blocking=True)),
        "stage": timed(lambda: pinned.copy_(pageable), 5),
    }
    rates = {f"{k}_gb_s": size / s * 1e-9 for k, s in seconds.items()}
    return {f"{k}_us": s * 1e6 for k, s in seconds.items()} | rates


def replay_us(x: Tensor, kernels: int = 200) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(kernels):
            y = y + 1
    return timed(lambda: (graph.replay(), torch.cuda.synchronize()), 10) / kernels * 1e6


CORRECT = (
    "tiny_mlp", "tiny_branches", "tiny_views", "bert_tiny", "resnet50", "bert_base", "gpt2", "vit",
    "convnext", "dlrm", "lstm", "inception",
)  # fmt: skip


def correct(b: Bench) -> None:
    """Placements compute what the model does in float64; a stream twice gives the same bits."""
    cluster = b.cluster
    for name in ("tiny_mlp", "tiny_branches") if b.emulated else CORRECT:
        with b.item(name):
            module, inputs, graph = b.graph(name)
            items = [others_like(inputs, seed) for seed in range(3 if b.emulated else 8)]
            expected, reference = expected_of(module, items)
            ways = {"all on the GPU": all_on(graph, 1)}
            ways |= {f"random {s}": scattered(graph, s) for s in range(1 if b.emulated else 3)}
            for allowed in (False, True):
                worst, same = 0.0, True
                with tf32(allowed):
                    limit = Tolerance.of(module.state_dict().values(), cluster)
                    for placement in ways.values():
                        with Runner(graph, cluster, placement) as runner:
                            first = [pytree.tree_leaves(y) for y in runner.stream(items)]
                            again = [pytree.tree_leaves(y) for y in runner.stream(items)]
                        for a, c, e in zip(first, again, expected, strict=True):
                            for x, y, z in zip(a, c, e, strict=True):
                                if isinstance(z, Tensor):
                                    worst = max(worst, error(x, z))
                                    same = same and torch.equal(x, y)
                b.emit(
                    name,
                    tf32=allowed,
                    error=worst,
                    allowed=limit.relative,
                    ok=worst <= limit.relative,
                    bitwise_again=same,
                    reference=reference,
                )
    with b.item("many micro-batches"):
        module, inputs, graph = b.graph("tiny_branches")
        items = [others_like(inputs, s) for s in range(10 if b.emulated else 300)]
        expected, _ = expected_of(module, items)
        with Runner(graph, cluster, scattered(graph, 0), max_in_flight=8) as runner:
            worst = max(
                error(pytree.tree_leaves(y)[0], z[0])
                for y, z in zip(runner.stream(items), expected, strict=True)
            )
        b.emit("many micro-batches", count=len(items), error=worst, ok=worst <= 3e-3)


def train(b: Bench) -> None:
    """Losses, gradients and parameters of two steps equal plain PyTorch's."""
    cluster = b.cluster
    names = ("tiny_mlp", "resnet_tiny", "convnext_tiny", "gpt2_tiny", "dlrm_tiny")
    for name in ("tiny_mlp",) if b.emulated else names:
        for label in ("all on the GPU", "random"):
            with b.item(f"{name}, {label}"):
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
                place = all_on(graph, 1) if label.startswith("all") else scattered(graph, 1)
                with tf32(False), Trainer(graph, cluster, place, optimizer) as trainer:
                    wrong = training_difference(trainer, module, example, mean_of_outputs, 3)
                b.emit(f"{name}, {label}", ok=not wrong, difference=wrong)


def errors(b: Bench) -> None:
    """What goes wrong on a GPU is said, with the operator, and leaves nothing behind."""
    cluster = b.cluster
    _, inputs, graph = b.graph("tiny_mlp")
    with b.item("closed in the midst"):
        runner = Runner(graph, cluster, all_on(graph, 1))
        stream = runner.stream([inputs] * 20)
        next(stream)
        stream.close()
        again = len(list(runner.stream([inputs] * 3)))
        runner.close()
        b.emit("closed in the midst", ok=again == 3)
    with b.item("out of memory"):
        large = nn.Sequential(nn.Linear(4, 2**10), nn.Linear(2**10, 4)).eval()
        big = capture(large, torch.ones(2**16 if b.emulated else 2**23, 4))
        before = torch.cuda.memory_allocated()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(GIB / 8 / total)
        said = "nothing"
        try:
            with Runner(big, cluster, all_on(big, 1)) as runner:
                runner(torch.ones(2**16 if b.emulated else 2**23, 4))
        except torch.OutOfMemoryError as failure:
            said = " ".join([str(failure)[:60], *getattr(failure, "__notes__", ())])
        torch.cuda.set_per_process_memory_fraction(1.0)
        left = torch.cuda.memory_allocated() - before
        b.emit("out of memory", said=said, left_bytes=left, ok="out of memory" in said)
    with b.item("an index out of range"):  # last: a real device is of no use afterwards
        table = capture(nn.Embedding(10, 4).eval(), torch.arange(4))
        said = "nothing"
        try:
            with Runner(table, cluster, all_on(table, 1)) as runner:
                runner(torch.tensor([1, 2, 3, 99]))
        except Exception as failure:
            said = " ".join([str(failure)[:100], *getattr(failure, "__notes__", ())])
        b.emit("an index out of range", said=" ".join(said.split()), ok=said != "nothing")


# --- study ---------------------------------------------------------------------------------------

PROFILED: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("bert_base", "bert_base", {}),
    ("resnet50", "resnet50", {}),
    ("resnet50_b32", "resnet50", {"batch": 32}),
    ("inception", "inception", {}),
    ("dlrm_b256", "dlrm", {"batch": 256}),
    ("lstm", "lstm", {}),
)


One = Callable[["Bench", str, nn.Module, Any, OpGraph], None]


def each(most: int | None, one: One) -> Callable[[Bench], None]:
    """The section that does the same with the first ``most`` models."""

    def section(b: Bench) -> None:
        models = (("tiny_mlp", "tiny_mlp", {}),) if b.emulated else PROFILED[:most]
        for key, name, options in models:
            with b.item(key):
                one(b, key, *b.graph(name, **options))

    return section


def profile(b: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Where the CPU wins, and what of the GPU's time is dispatch."""
    cluster = b.cluster
    measured = b.profile(key, graph, cluster)
    cpu, gpu = measured.compute_s.T
    kernels = kernel_seconds(graph, cluster, inputs) if not b.emulated else math.nan
    b.emit(
        key,
        cpu_ms=float(cpu.sum() * 1e3),
        gpu_ms=float(gpu[np.isfinite(gpu)].sum() * 1e3),
        kernels_ms=kernels * 1e3,
        cpu_faster_share=float((cpu < gpu).mean()),
        lacking=int(np.isinf(gpu).sum()),
        error=measured.provenance.get("error"),
        seconds=measured.provenance["seconds"],
    )


def kernel_seconds(graph: OpGraph, cluster: Cluster, inputs: Any) -> float:
    """Seconds of the kernels alone, of a run on the GPU."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with Runner(graph, cluster, all_on(graph, 1)) as runner:
        list(runner.stream([inputs] * 3))
        with record(activities=[ProfilerActivity.CUDA]) as run:
            list(runner.stream([inputs] * 5))
    return sum(e.device_time_total for e in run.key_averages()) * 1e-6 / 5


def fidelity(b: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Predicted and measured latency and period of placements with few cuts and many."""
    from scipy.stats import spearmanr

    cluster = b.cluster
    problem = Problem(graph, cluster, b.profile(key, graph, cluster), num_microbatches=16)
    executor, rng = Executor(problem), np.random.default_rng(0)
    rows = []
    for i in range(4 if b.emulated else 20):
        cuts = [0, 0, 1, 2, 4, 8, 16, 32][i % 8]
        at = np.sort(rng.choice(graph.num_ops, min(cuts, graph.num_ops - 1), replace=False))
        first = np.full(graph.num_groups, graph.num_ops)
        np.minimum.at(first, graph.group, problem.priority)
        chosen = (np.searchsorted(at, first) + i) % 2
        placement = np.where(problem.supported.all(axis=1), chosen[graph.group], 0).astype("i4")
        guess = evaluate(problem, placement[None])
        line = executor.run(placement, num_microbatches=4, max_in_flight=1)
        many = executor.run(placement).period_s
        latency = float(np.median(line.span_s))
        row = (float(guess.latency_s[0]), latency, float(guess.period_s[0]), many)
        rows.append(row)
        names = ("latency_s", "measured_latency_s", "period_s", "measured_period_s")
        b.emit(f"{key}, {cuts} cuts", **dict(zip(names, row, strict=True)))
    whole = {}
    for name, (predicted, measured) in zip(
        ("latency", "period"), np.array(rows).T.reshape(2, 2, -1), strict=True
    ):
        whole[f"{name}_error"] = float(np.median(np.abs(np.log(predicted / measured))))
        whole[f"{name}_rank"] = float(spearmanr(predicted, measured).statistic)
    b.emit(key, **whole)


def plans(b: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Plans beside one device, plain PyTorch on the GPU and a CUDA graph of the whole model."""
    cluster = b.cluster
    measured = b.profile(key, graph, cluster)
    seconds: dict[str, float] = {}
    problem = Problem(graph, cluster, measured, objective="period", num_microbatches=16)
    planner = planners.load("best_of", seconds=b.planning_s)
    for objective in ("latency", "period"):
        solution = planner(replace(problem, objective=objective))
        ways = {"CPU": all_on(graph, 0), "GPU": all_on(graph, 1), "plan": solution.placement}
        for way, placement in ways.items():
            if not problem.supported[np.arange(graph.num_ops), placement].all():
                continue
            with Runner(graph, cluster, placement, priority=problem.priority) as runner:
                if objective == "latency":
                    seconds[way] = call_seconds(runner, inputs, 5)
                else:
                    seconds[way] = period_of(runner, inputs, 12 if b.emulated else 40)
        with b.item(f"{key}, eager"), torch.inference_mode():
            seconds["eager"] = eager_seconds(module, inputs, b.gpu)
        if not b.emulated:
            with b.item(f"{key}, graph"), torch.inference_mode():
                seconds["graph"] = graph_seconds(module, inputs, b.gpu)
        single = min(seconds[w] for w in ("CPU", "GPU") if w in seconds)
        b.emit(
            f"{key}, {objective}",
            **{f"{k}_ms": v * 1e3 for k, v in seconds.items()},
            over_single=single / seconds["plan"],
            over_eager=seconds.get("eager", math.nan) / seconds["plan"],
            on_gpu=float((solution.placement == 1).mean()),
        )


def eager_seconds(module: nn.Module, inputs: Any, device: torch.device) -> float:
    """Seconds of plain PyTorch on the GPU, its results copied to host memory."""
    call, args, kwargs = on_gpu(module, inputs, device)
    return timed(lambda: pytree.tree_map(Tensor.cpu, pytree.tree_leaves(call(*args, **kwargs))), 10)


def graph_seconds(module: nn.Module, inputs: Any, device: torch.device) -> float:
    """Seconds of a CUDA graph of the whole module, its results copied to host memory."""
    call, args, kwargs = on_gpu(module, inputs, device)
    side = torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        for _ in range(3):
            call(*args, **kwargs)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = pytree.tree_leaves(call(*args, **kwargs))
    return timed(lambda: (graph.replay(), [x.cpu() for x in outputs if isinstance(x, Tensor)]), 10)


class Decoder(nn.Module):
    """Layers that are equal in form, as those of a decoder."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def streamed(model: Decoder, x: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """The strong alternative: layers in pinned memory, copied to the GPU one ahead of its turn."""
    pinned = [
        {k: torch.empty_like(v, pin_memory=True).copy_(v) for k, v in layer.state_dict().items()}
        for layer in model.layers
    ]
    copies, compute = torch.cuda.Stream(device), torch.cuda.current_stream(device)

    def fetch(i: int) -> tuple[dict[str, Tensor], Any]:
        with torch.cuda.stream(copies):
            there = {k: v.to(device, non_blocking=True) for k, v in pinned[i].items()}
            arrived = torch.cuda.Event()
            arrived.record(copies)
        return there, arrived

    def run() -> Tensor:
        y, ahead = x.to(device), fetch(0)
        for i, layer in enumerate(model.layers):
            state, arrived = ahead
            if i + 1 < len(pinned):
                ahead = fetch(i + 1)
            compute.wait_event(arrived)
            for v in state.values():
                v.record_stream(compute)
            y = torch.func.functional_call(layer, state, (y,))
        return y.cpu()

    return run


def memory(b: Bench) -> None:
    """Models twice as large as the memory that the GPU may use."""
    cap = 2**25 if b.emulated else 2 * GIB
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap / total)
    rows, width, layers = (100_000, 256, 12) if b.emulated else (1_000_000, 2048, 24)
    tables = 3 if b.emulated else 26
    models: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "decoder 1 x 16": lambda: (Decoder(layers, width).eval(), torch.randn(1, 16, width)),
        "dlrm": lambda: load(
            "dlrm", tables=tables, rows=rows, dim=64, batch=16 if b.emulated else 512, lookups=1
        ),
        "decoder 4 x 64": lambda: (Decoder(layers, width).eval(), torch.randn(4, 64, width)),
    }
    cpu, card = b.cluster.devices
    cluster = Cluster("capped", (cpu, replace(card, memory_bytes=int(0.9 * cap))))
    for name, make in models.items():
        if b.emulated and name == "decoder 4 x 64":
            continue
        with b.item(name):
            module, inputs = make()
            graph = capture(module, inputs, name=name)
            profile = measure(graph, cluster, repeats=1)
            problem = Problem(graph, cluster, profile, objective="latency", num_microbatches=1)
            solution = planners.load("best_of", seconds=b.planning_s)(problem)
            args, kwargs = split_inputs(inputs)
            expected, _ = expected_of(module, [inputs]) if b.emulated else ([[]], "")
            with Runner(graph, cluster, all_on(graph, 0)) as runner:
                cpu_s = call_seconds(runner, inputs, 3)
                plain = pytree.tree_leaves(runner(*args, **kwargs))
            with Runner(graph, cluster, solution.placement, priority=problem.priority) as runner:
                plan_s = call_seconds(runner, inputs, 3)
                got = pytree.tree_leaves(runner(*args, **kwargs))
            off = max(error(x, y) for x, y in zip(got, expected[0] or plain, strict=True))
            line = Executor(problem).run(solution.placement, num_microbatches=2)
            predicted = simulate(problem, solution.placement).peak_bytes
            ways = {"cpu_ms": cpu_s * 1e3, "plan_ms": plan_s * 1e3}
            if isinstance(module, Decoder):
                with b.item(f"{name}, streamed"), torch.inference_mode():
                    ways["streamed_ms"] = timed(streamed(module, inputs, b.gpu), 3) * 1e3
            with b.item(f"{name}, accelerate"), torch.inference_mode():
                if not b.emulated:
                    ways["accelerate_ms"] = offloaded_seconds(module, inputs) * 1e3
            b.emit(
                name,
                **ways,
                on_gpu=float((solution.placement == 1).mean()),
                error=off,
                predicted_peak_mib=float(predicted[1]) / 2**20,
                allocator_peak_mib=float(line.peak_bytes[1]) / 2**20,
                model_mib=sum(x.nbytes for x in module.state_dict().values()) / 2**20,
            )


def offloaded_seconds(module: nn.Module, inputs: Any) -> float:
    """Seconds with accelerate's ``cpu_offload``; the module is of no use afterwards."""
    import accelerate

    args, kwargs = split_inputs(inputs)
    accelerate.cpu_offload(module, execution_device=0)
    return timed(
        lambda: pytree.tree_map(Tensor.cpu, pytree.tree_leaves(module(*args, **kwargs))), 3
    )


def training(b: Bench) -> None:
    """A step on the GPU beside plain PyTorch's there, and with memory for half of it."""
    cluster = b.cluster
    name, options = ("tiny_mlp", {}) if b.emulated else ("resnet50", {"batch": 16})
    module, inputs = load(name, **options)
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    example = (inputs, None)
    graph = capture(module, example, mode="training", loss=mean_of_outputs, optimizer=optimizer)
    seconds: dict[str, float] = {}
    with b.item("all on the GPU"), Trainer(graph, cluster, all_on(graph, 1), optimizer) as trainer:
        torch.cuda.reset_peak_memory_stats()
        seconds["GPU"] = timed(lambda: trainer.step([example] * 2), 3)
        peak = torch.cuda.max_memory_allocated()
        b.emit("all on the GPU", step_ms=seconds["GPU"] * 1e3, peak_mib=peak / 2**20)
    with b.item("half of the memory"):
        profile = measure(graph, cluster, repeats=1)
        cpu, card = cluster.devices
        capped = Cluster("half", (cpu, replace(card, memory_bytes=int(0.5 * peak))))
        problem = Problem(graph, capped, profile, objective="period", num_microbatches=2)
        solution = planners.load("best_of", seconds=b.planning_s)(problem)
        with Trainer(graph, capped, solution.placement, optimizer) as trainer:
            seconds["half"] = timed(lambda: trainer.step([example] * 2), 3)
        on_it = float((solution.placement == 1).mean())
        b.emit("half of the memory", step_ms=seconds["half"] * 1e3, on_gpu=on_it)
    if not b.emulated:  # whose tensors autograd does not know
        with b.item("eager"):
            there = module.to(b.gpu)
            moved = pytree.tree_map(lambda x: x.to(b.gpu) if isinstance(x, Tensor) else x, example)
            mine = torch.optim.AdamW(there.parameters(), lr=1e-3)
            step = lambda: plain_step(there, mine, [moved] * 2, mean_of_outputs).cpu()  # noqa: E731
            b.emit("eager", step_ms=timed(step, 3) * 1e3)


def streams(b: Bench) -> None:
    """The same GPU as two devices: do branches gain from two streams?"""
    card = b.cluster.devices[1]
    two = Cluster("two", tuple(Device(f"{h}/cuda:0", "cuda", card.cores) for h in "ab"))
    _, inputs, graph = b.graph("tiny_branches" if b.emulated else "inception")
    for name, placement in {"one": all_on(graph, 0), "two": scattered(graph, 0)}.items():
        with b.item(name), Runner(graph, two, placement) as runner:
            list(runner.stream([inputs] * 3))
            b.emit(name, period_ms=period_of(runner, inputs, 10 if b.emulated else 40) * 1e3)


def energy(b: Bench) -> None:
    """Joules per micro-batch by NVML: at rest with a context, and at work."""
    cluster, meters = b.cluster, power.nvml_meters()
    if not meters:
        b.emit("no meter", ok=False)
        return
    (meter,) = meters[:1]
    _, inputs, graph = b.graph("resnet50")
    profile = b.profile("resnet50", graph, cluster, repeats=1)
    problem = Problem(graph, cluster, profile, objective="period", num_microbatches=16)
    plan = planners.load("best_of", seconds=b.planning_s)(problem).placement
    torch.ones(1, device=b.gpu)
    before, began = meter.read_j(), time.perf_counter()
    time.sleep(4.0)
    idle_w = meter.since_j(before) / (time.perf_counter() - began)
    b.emit("rest, with a context", watts=idle_w)
    for name, placement in {"CPU": all_on(graph, 0), "GPU": all_on(graph, 1), "plan": plan}.items():
        with b.item(name), Runner(graph, cluster, placement) as runner:
            list(runner.stream([inputs] * 8))
            before, began, count = meter.read_j(), time.perf_counter(), 0
            while (took := time.perf_counter() - began) < 5.0:
                count += sum(1 for _ in runner.stream([inputs] * 16))
            joules = meter.since_j(before)
            b.emit(name, watts=joules / took, gpu_j_per_microbatch=joules / count, count=count)


# --- the parts -----------------------------------------------------------------------------------

SECTIONS: dict[str, dict[str, tuple[Callable[[Bench], None], float]]] = {
    "check": {
        "facts": (facts, 20),
        "micro": (micro, 40),
        "correct": (correct, 180),
        "train": (train, 80),
        "errors": (errors, 30),
    },
    "study": {
        "profile": (each(None, profile), 120),
        "fidelity": (each(3, fidelity), 60),
        "plans": (each(None, plans), 90),
        "memory": (memory, 140),
        "training": (training, 50),
        "streams": (streams, 25),
        "energy": (energy, 40),
    },
}


# Of measuring, where nothing is to be learned from it.
_BRIEF: dict[str, Any] = {
    "_LINK_BYTES": (2**12, 2**16),
    "_STREAMED": 4,
    "_CALIBRATION_RUNS": (2, 3),
    "_CALIBRATION_S": 0.0,
    "_CALIBRATION_CUTS": (1, 3),
    "_CALIBRATION_ROUNDS": 1,
    "_CALIBRATION_FACTORS": (0.5, 1.0),
    "_PATIENCE": 1,
}


def section(name: str, limit_s: float, options: argparse.Namespace) -> None:
    """One section, in a process of its own."""
    faulthandler.dump_traceback_later(limit_s * 0.95, exit=False)
    part = next(p for p in SECTIONS.values() if name in p)
    bench = Bench(options.out, name, options.emulated)
    with ExitStack() as stack:
        if options.emulated:
            sys.path.insert(0, str(ROOT / "tests"))
            import emulated_gpu

            stack.enter_context(emulated_gpu.emulated())
            for constant, value in _BRIEF.items():
                stack.enter_context(patch.object(measuring, constant, value))
        part[name][0](bench)
    faulthandler.cancel_dump_traceback_later()


def run(options: argparse.Namespace) -> int:
    """All sections of a part, one process after another, then the table.

    Raises:
        StudyError: a section that this part does not have.
    """
    chosen = SECTIONS[options.part]
    if unknown := set(options.sections) - set(chosen):
        raise StudyError(f"--sections {sorted(unknown)}: part {options.part!r} has {list(chosen)}")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for name in options.sections or chosen:
        left = LONGEST_S - (time.perf_counter() - began)
        limit_s = min(chosen[name][1], left)
        if limit_s < 5:
            Bench(options.out, name, options.emulated).emit("section", status="no time was left")
            continue
        command = [sys.executable, "-m", "experiments.gpu", "--part", options.part]
        command += ["--out", str(options.out), "--one", name, "--limit", f"{limit_s:g}"]
        command += ["--emulated"] if options.emulated else []
        at = time.perf_counter()
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=limit_s, check=False).returncode
            status = "done" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit_s:g} s"
        took = time.perf_counter() - at
        Bench(options.out, name, options.emulated).emit("section", status=status, seconds=took)
    text = table((options.out / "gpu.jsonl").read_text(encoding="utf-8").splitlines())
    write_atomic(options.out / "gpu.md", text)
    print(text)
    return 0


def table(lines: Sequence[str]) -> str:
    """A table per section and kind of row."""
    sections: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        row = json.loads(line)
        sections.setdefault(row.pop("section"), []).append(row)
    texts = []
    for name, rows in sections.items():
        texts.append(f"\n### {name}\n")
        for columns in dict.fromkeys(map(tuple, rows)):
            alike = [row.values() for row in rows if tuple(row) == columns]
            cells = [[number(v, 4) if isinstance(v, float) else str(v) for v in r] for r in alike]
            texts.append(to_table(columns, cells))
    return "\n".join(texts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu", description=__doc__)
    parser.add_argument("--part", choices=list(SECTIONS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--sections", nargs="*", default=[], metavar="NAME", help="only these")
    parser.add_argument("--emulated", action="store_true", help="tiny models, no real GPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--limit", type=float, default=LONGEST_S, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    if options.one:
        section(options.one, options.limit, options)
        return 0
    return launch(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
