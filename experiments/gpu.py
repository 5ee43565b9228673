"""What the executor does on a real GPU beside CPU cores: checked, then measured, in eight minutes.

    python -m experiments.gpu --out FOLDER [--emulated] [--sections NAME ...] [--seconds 480]

Each section is a process of its own with a deadline: what stops one costs no other. Every figure
is a line of ``FOLDER/gpu.jsonl``, written at once; ``FOLDER/profiles.zip`` has the profiles, and
with their graphs as problem files, which ``experiments.gpu_results`` takes; ``FOLDER/traces.txt``
where a section was when it failed or was stopped. The table comes last, and is ``FOLDER/gpu.md``
too. ``--emulated`` runs the same code on tiny models on the emulated GPU of the tests: it shows
nothing but that the script runs to its end.
``experiments/gpu.sh`` builds what a bare machine needs.

Sections are forked from one process that has imported everything, captured the models and loaded
the planners' kernels, and has never asked CUDA for anything: a process that has cannot be forked.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import placement.costs.measure as measuring
from experiments.runs import warm
from experiments.study import ROOT, StudyError, launch, say
from experiments.tables import number, to_table
from placement import importers, planners
from placement.capturing import capture
from placement.capturing.training import mean_of_outputs, plain_step
from placement.cli.train import difference as training_difference
from placement.cluster import Cluster, Device
from placement.costs import power
from placement.costs.measure import at_speed, measure, run_placement
from placement.executor import Executor, Runner, Trainer, weights
from placement.executor.equality import Tolerance, error
from placement.executor.graphs import recorded
from placement.executor.streamed import with_streaming
from placement.graph import OpGraph
from placement.problem import Problem
from placement.profile import Profile
from placement.program import split_inputs
from placement.simulator import evaluate, simulate
from placement.timeline import steady_period
from placement.tools.files import write_atomic
from placement.workloads import load

LONGEST_S = 480.0
GIB = 2**30
HOST_BYTES = 96 * GIB  # at least: memory of a lent machine grows as it is used, and says little
CHECKED = (
    "tiny_mlp", "tiny_branches", "tiny_views", "bert_tiny", "resnet50", "bert_base", "gpt2", "vit",
    "convnext", "dlrm", "lstm", "inception",
)  # fmt: skip
PROFILED: dict[str, tuple[str, dict[str, int]]] = {
    "bert_base": ("bert_base", {}),
    "resnet50": ("resnet50", {}),
    "inception": ("inception", {}),
    "lstm": ("lstm", {}),
    "dlrm_b256": ("dlrm", {"batch": 256}),
    "resnet50_b32": ("resnet50", {"batch": 32}),
}
PREDICTED = ("resnet50", "bert_base", "inception")
Model = tuple[nn.Module, Any, OpGraph]

# Of measuring: what is learned once is not measured again, and what costs most is done once.
_QUICK: dict[str, Any] = {
    "_PATIENCE": 1,
    "_CALIBRATION_S": 0.03,
    "_CALIBRATION_CUTS": (1, 3, 7, 15, 31),
    "_CALIBRATION_ROUNDS": 1,
    "_ORDER_ROUNDS": 2,
}
# And where nothing is to be learned from it.
_BRIEF: dict[str, Any] = {
    "_LINK_BYTES": (2**12, 2**16),
    "_LONG_BYTES": 2**18,
    "_STREAMED": 4,
    "_PATIENCE": 1,
    "_CALIBRATION_S": 0.0,
    "_CALIBRATION_RUNS": (2, 3),
    "_CALIBRATION_CUTS": (1, 3),
    "_CALIBRATION_ROUNDS": 1,
    "_CALIBRATION_TRIES": 2,
}


@dataclass
class Bench:
    """What a section works with: ``emulated``, everything is to be tiny.

    Attributes:
        work: a folder for what sections tell each other.
        models: captured before, by name.
        part: which of how many sections that run beside each other this one is.
        until: when it will be stopped.
        fair_s: the part of one model.
    """

    out: Path
    work: Path
    section: str
    emulated: bool
    models: dict[str, Model] = field(default_factory=dict)
    part: tuple[int, int] = (0, 1)
    until: float = field(default_factory=lambda: time.perf_counter() + LONGEST_S)
    fair_s: float = LONGEST_S

    def emit(self, item: str, **facts: Any) -> None:
        facts = {k: None if v != v else v for k, v in facts.items()}  # JSON knows no nan
        row = {"section": self.section, "item": item, **facts}
        with (self.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=float) + "\n")
            file.flush()
            os.fsync(file.fileno())
        say(" ".join(f"{k}={shown(v)}" for k, v in row.items()))

    @contextmanager
    def item(self, name: str, seconds: float = 60.0) -> Iterator[None]:
        """What fails, or takes too long, is a row of its own, and the next item goes on."""

        def late(*_: Any) -> None:
            raise TimeoutError(f"stopped after {seconds:g} s")

        began = time.perf_counter()
        before = signal.signal(signal.SIGALRM, late)
        around_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # of the item that this is in
        if 0 < around_s < seconds:
            signal.setitimer(signal.ITIMER_REAL, around_s)
        try:
            yield
        except Exception as failure:
            notes = " ".join(getattr(failure, "__notes__", ()))
            text = " ".join(f"{type(failure).__name__}: {failure} {notes}".split())
            self.emit(name, failed=text[:300], seconds=time.perf_counter() - began)
            with (self.out / "traces.txt").open("a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        finally:
            left_s = max(around_s - (time.perf_counter() - began), 0.01)
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, left_s if around_s else 0)

    def part_s(self, count: int) -> float:
        """Seconds for one of so many items: not more than twice its part of what is left."""
        return max(1.0, 2 * (self.until - time.perf_counter()) / count)

    @property
    def cluster(self) -> Cluster:
        """The CPU cores, or this section's part of them, and the first GPU."""
        cpu, *cards = Cluster.detect().devices
        if not cards or cards[0].kind != "cuda":
            raise StudyError(f"torch {torch.__version__} sees no CUDA device here")
        card, (i, n) = cards[0], self.part
        if n > 1:  # each of them its own; who launches floats
            some = cpu.cores[i::n] or cpu.cores
            cpu = replace(cpu, cores=some, threads=len(some))
            card = replace(card, cores=())
        if not self.emulated:
            cpu = replace(cpu, memory_bytes=max(cpu.memory_bytes, HOST_BYTES))
        return Cluster("gpu", (cpu, card))

    @property
    def planning_s(self) -> float:
        return 0.5 if self.emulated else 1.5

    @property
    def gpu(self) -> torch.device:
        return torch.device("cuda:0")

    def model(self, key: str) -> Model:
        """As it was captured before; or now, where it was not."""
        if key not in self.models:
            self.models[key] = captured(key)
        return self.models[key]

    def measured(
        self,
        key: str,
        graph: OpGraph,
        cluster: Cluster,
        repeats: int = 3,
        calibrate: bool = True,
    ) -> Profile:
        """The profile that an earlier section has written, or a new one."""
        path = self.work / f"{key}.npz"
        if path.exists():
            earlier = Profile.load(path)
            if earlier.graph_fingerprint == graph.fingerprint:
                return earlier
        with ExitStack() as stack:
            for constant, value in (_BRIEF if self.emulated else _QUICK).items():
                stack.enter_context(patch.object(measuring, constant, value))
            for name in ("measure_links", "_batch_seconds"):  # of the machine, not of a model
                known = partial(once, self.work / f"{name}.pickle", getattr(measuring, name))
                stack.enter_context(patch.object(measuring, name, known))
            if not calibrate:
                stack.enter_context(
                    patch.object(measuring, "calibrated", lambda g, c, found: found)
                )
            profile = measure(graph, cluster, repeats=1 if self.emulated else repeats)
        profile.save(path)
        self.keep(key, Problem(graph, cluster, profile))
        return profile

    def keep(self, key: str, problem: Problem) -> None:
        """As a file that is planned from where the graph cannot be captured: other versions."""
        problem = replace(problem, graph=problem.graph.without_program())
        importers.save(problem, self.work / f"{key}.json.gz")


def once(path: Path, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``call`` gave the first time, in whichever process."""
    import pickle

    if not path.exists():
        write_atomic(path, pickle.dumps(call(*args, **kwargs)))
    return pickle.loads(path.read_bytes())


def captured(key: str) -> Model:
    name, options = PROFILED.get(key, (key, {}))
    module, inputs = load(name, **options)
    return module, inputs, capture(module, inputs, name=key)


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


def expected_of(
    module: nn.Module, items: Sequence[Any], device: torch.device | None = None
) -> tuple[list[list[Any]], str]:
    """Outputs in float64 (on ``device``), or as the module is where it cannot be so; and which."""

    def run(model: nn.Module, change: Callable[[Any], Any]) -> list[list[Any]]:
        outputs = []
        for item in items:
            args, kwargs = pytree.tree_map(change, split_inputs(item))
            with torch.no_grad():
                found = pytree.tree_leaves(model(*args, **kwargs))
            outputs.append([x.cpu() if isinstance(x, Tensor) else x for x in found])
        return outputs

    def exact(x: Any) -> Any:
        if isinstance(x, Tensor):
            return (x.double() if x.is_floating_point() else x).to(device)
        return x

    with suppress(Exception):  # a dtype is written down in it
        return run(copy.deepcopy(module).double().to(device), exact), "float64"
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


def resident(module: nn.Module, inputs: Any, device: torch.device) -> Callable[..., list[Tensor]]:
    """Plain PyTorch with parameters on the GPU: a call of the flat inputs, by default these."""
    state = {
        k: v.detach().to(device) for k, v in [*module.named_parameters(), *module.named_buffers()]
    }
    leaves, spec = pytree.tree_flatten(split_inputs(inputs))

    def call(given: Sequence[Any] = leaves) -> list[Tensor]:
        args, kwargs = pytree.tree_unflatten(list(given), spec)
        found = torch.func.functional_call(module, state, args, kwargs, tie_weights=True)
        return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]

    return call


def moved(inputs: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs)


class WholeGraph:
    """A CUDA graph of all that a call of ``resident`` launches."""

    def __init__(self, call: Callable[..., list[Tensor]], inputs: Any, device: torch.device):
        self.inputs = [x.to(device) for x in _tensors(inputs)]
        flat = pytree.tree_leaves(split_inputs(inputs))
        some = iter(self.inputs)
        given = [next(some) if isinstance(x, Tensor) else x for x in flat]
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries choose kernels, and get memory that is not the graph's
                call(given)
            side.synchronize()
            pool = torch.cuda.graph_pool_handle()
            self.graph, self.outputs = recorded(lambda: call(given), pool, device)
        side.synchronize()

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        for x, y in zip(self.inputs, given, strict=True):
            x.copy_(y, non_blocking=True)
        self.graph.replay()
        return [x.clone() for x in self.outputs]


def _tensors(inputs: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(split_inputs(inputs)) if isinstance(x, Tensor)]


def period_of_calls(call: Callable[[], Any], count: int) -> float:
    """Seconds of each of so many calls that nobody waits for."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


# --- check ---------------------------------------------------------------------------------------


def facts(b: Bench) -> None:
    cluster = b.cluster
    for d in cluster.devices:
        gib = d.memory_bytes / GIB
        b.emit(d.name, model=d.model, cores=len(d.cores), threads=d.threads, promised_gib=gib)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numba", "numpy", "transformers", "accelerate", "pynvml"):
        with suppress(Exception):
            versions[name] = __import__(name).__version__
    b.emit("versions", **versions, cuda=str(torch.version.cuda))
    before = Cluster.detect().devices[0].memory_bytes
    b.emit("host memory", grew_bytes=Cluster.detect().devices[0].memory_bytes - before)
    with b.item("nvidia-smi"):
        asked = "name,mig.mode.current,driver_version,clocks.max.sm,clocks.sm,power.limit"
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
    with b.item("graph replay"):
        many = 5 if b.emulated else 200
        graph = WholeGraph(lambda x: [x[0] + i for i in range(many)], one, gpu)
        replay_s = timed(lambda: (graph.graph.replay(), torch.cuda.synchronize()), 10) / many
        b.emit("graph replay", us_per_kernel=replay_s * 1e6)


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


def correct(b: Bench, third: int) -> None:
    """Placements compute what the model does in float64; a stream twice gives the same bits."""
    cluster = b.cluster
    names = (CHECKED[:3] if b.emulated else CHECKED)[third::3]
    for i, name in enumerate(names):
        with b.item(name, b.part_s(len(names) - i)):
            module, inputs, graph = captured(name)
            items = [others_like(inputs, seed) for seed in range(3 if b.emulated else 8)]
            expected, reference = expected_of(module, items, None if b.emulated else b.gpu)
            ways = {"all on the GPU": all_on(graph, 1), "as CUDA graphs": all_on(graph, 1)}
            ways |= {f"random {s}": scattered(graph, s) for s in range(1 if b.emulated else 3)}
            for way, placement in ways.items():
                for allowed in (False, True) if placement.all() else (False,):
                    with b.item(f"{name}, {way}, tf32={allowed}"), tf32(allowed):
                        graphs = way == "as CUDA graphs"
                        off, same, eager = errors_of(
                            graph, cluster, placement, items, expected, graphs
                        )
                        limit = Tolerance.of(module.state_dict().values(), cluster)
                        b.emit(
                            name,
                            way=way,
                            tf32=allowed,
                            error=off,
                            allowed=limit.relative,
                            ok=off <= limit.relative and same,
                            bitwise_again=same,
                            reference=reference,
                            not_graphed=len(eager),
                            why=next(iter(eager.values()), ""),
                        )
    if third == 0:
        with b.item("many micro-batches"):
            module, inputs, graph = captured("tiny_branches")
            items = [others_like(inputs, s) for s in range(10 if b.emulated else 300)]
            expected, _ = expected_of(module, items)
            with tf32(False):
                placement = scattered(graph, 0)
                off, same, _ = errors_of(graph, cluster, placement, items, expected, False, 8)
            ok = off <= 1e-5 and same
            b.emit("many micro-batches", count=len(items), error=off, bitwise_again=same, ok=ok)


def errors_of(
    graph: OpGraph,
    cluster: Cluster,
    placement: np.ndarray,
    items: Sequence[Any],
    expected: Sequence[Sequence[Any]],
    graphs: bool,
    max_in_flight: int = 4,
) -> tuple[float, bool, dict[str, str]]:
    """Largest error of a stream, whether it is the same twice, and what was no CUDA graph."""
    with Runner(graph, cluster, placement, max_in_flight=max_in_flight) as runner:
        runner.cuda_graphs = graphs
        list(runner.stream(items[:3]))  # what is captured is captured, before bits are compared
        first = [pytree.tree_leaves(y) for y in runner.stream(items)]
        again = [pytree.tree_leaves(y) for y in runner.stream(items)]
        eager = runner.not_graphed
    worst, same = 0.0, True
    for a, c, e in zip(first, again, expected, strict=True):
        for x, y, z in zip(a, c, e, strict=True):
            if isinstance(z, Tensor):
                worst = max(worst, error(x, z))
                same = same and torch.equal(x, y)
    return worst, same, eager


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
    _, inputs, graph = captured("tiny_mlp")
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
        big = capture(large, torch.ones(2**16, 4))  # 256 MiB in between
        before = torch.cuda.memory_allocated()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(0.125 * GIB / total)
        said = "nothing"
        try:
            with Runner(big, cluster, all_on(big, 1)) as runner:
                runner(torch.ones(2**16, 4))
        except torch.OutOfMemoryError as failure:
            said = " ".join([str(failure)[:60], *getattr(failure, "__notes__", ())])
        torch.cuda.set_per_process_memory_fraction(1.0)
        left = torch.cuda.memory_allocated() - before
        b.emit("out of memory", said=said, left_bytes=left, ok="out of memory" in said)


def index(b: Bench) -> None:
    """What an assertion of a kernel says; the process is of no use afterwards, and may be ended."""
    with b.item("an index out of range"):
        table = capture(nn.Embedding(10, 4).eval(), torch.arange(4))
        said = "nothing"
        try:
            with Runner(table, b.cluster, all_on(table, 1)) as runner:
                runner(torch.tensor([1, 2, 3, 99]))
        except Exception as failure:
            said = " ".join([str(failure)[:100], *getattr(failure, "__notes__", ())])
        b.emit("an index out of range", said=" ".join(said.split()), ok="CUDA error" in said)


def kernels(b: Bench) -> None:
    """Planners and the simulator compiled, where that did not travel along; what it took."""
    began = time.perf_counter()
    warm_up(b.emulated)
    b.emit("kernels", seconds=time.perf_counter() - began)


def warm_up(emulated: bool = False, training: bool = True) -> None:
    """Compile, or load, all kernels that sections use."""
    warm(("heft",) if emulated else ("best_of", "heft"))
    if training and not emulated:
        with suppress(ImportError):  # then the section says what is missing
            steps_per_s("cpu", 16, 64)


# --- study ---------------------------------------------------------------------------------------

One = Callable[["Bench", str, nn.Module, Any, OpGraph], None]


def each(keys: Sequence[str], one: One) -> Callable[[Bench], None]:
    """The section that does the same with models."""

    def section(b: Bench) -> None:
        names = ("tiny_mlp",) if b.emulated else keys
        for i, key in enumerate(names):
            seconds = b.part_s(len(names) - i)
            b.fair_s = seconds / 2
            with b.item(key, seconds):
                one(b, key, *b.model(key))

    return section


def profile(b: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Where the CPU wins, and what of the GPU's time is dispatch."""
    cluster = b.cluster
    measured = b.measured(key, graph, cluster)
    cpu, gpu = measured.compute_s.T
    busy_s = math.nan
    with b.item(f"{key}, kernels alone"):
        busy_s = kernel_seconds(graph, cluster, inputs, "CPU" if b.emulated else "CUDA")
    gpu_s = float(gpu[np.isfinite(gpu)].sum())
    b.emit(
        key,
        cpu_ms=float(cpu.sum() * 1e3),
        gpu_ms=gpu_s * 1e3,
        kernels_ms=busy_s * 1e3,
        dispatch_share=1 - busy_s / gpu_s,
        cpu_faster_share=float((cpu < gpu).mean()),
        cpu_faster_in=commonest(np.array(graph.op_kind)[cpu < gpu]),
        lacking=int(np.isinf(gpu).sum()),
        error=measured.provenance.get("error"),
        seconds=measured.provenance["seconds"],
    )


def commonest(kinds: Iterable[str]) -> str:
    """The three kinds of operators that are there most often, and how often."""
    return ", ".join(f"{n} {kind}" for kind, n in Counter(kinds).most_common(3))


def kernel_seconds(graph: OpGraph, cluster: Cluster, inputs: Any, where: str) -> float:
    """Seconds of the kernels alone that run on ``where``, of a run on the GPU."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with Runner(graph, cluster, all_on(graph, 1)) as runner:
        list(runner.stream([inputs] * 3))
        with record(activities=[getattr(ProfilerActivity, where)], acc_events=True) as run:
            list(runner.stream([inputs] * 5))
    # What launches a kernel tells its time too; copies are no kernels.
    seen = [e for e in run.events() if e.device_type.name == where and e.name[:3] != "Mem"]
    if not seen:
        raise StudyError(f"PyTorch's profiler has seen nothing of {where}")
    what = {"CUDA": "self_device_time_total", "CPU": "self_cpu_time_total"}[where]
    return sum(getattr(e, what) for e in seen) * 1e-6 / 5


def fidelity(b: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Predicted and measured latency and period of placements with few cuts and many.

    As a user runs them: nothing is recorded. A virtual machine changes its speed within seconds,
    which no model foresees. So the whole model also runs on each device, before and after every few
    placements, and predictions are for devices of that speed; ``plain`` are those for the speed of
    the profile. All placements run twice, in turns: by how much one differs from itself is the
    ``floor`` of what a prediction can miss.
    """
    cluster = b.cluster
    problem = Problem(graph, cluster, b.measured(key, graph, cluster), num_microbatches=8)
    placements = cut(problem, (0, 0, 1, 2) if b.emulated else (0, 0, *(1, 2, 4, 8, 16, 32) * 3))
    singles = np.stack([all_on(graph, d) for d in (0, 1)])
    alone_s, until = evaluate(problem, singles).period_s, time.perf_counter() + b.fair_s

    def times() -> np.ndarray:
        return np.array([run_placement(problem, p, 1, 8)[1] for p in singles]) / alone_s

    plain = np.array([said(problem, p) for p in placements])
    seen, turns, took = [times()], list[tuple[int, int]](), list[tuple[float, float]]()
    for n in range(2 * len(placements)):
        i = n % len(placements)
        turns.append((i, len(seen)))
        took.append(run_placement(problem, placements[i], 4, 8))
        cuts = int((np.diff(placements[i][np.argsort(problem.priority)]) != 0).sum())
        names = ("latency_s", "period_s", "measured_latency_s", "measured_period_s")
        b.emit(f"{key}, {cuts} cuts", **dict(zip(names, [*plain[i], *took[-1]], strict=True)))
        late = n > 6 and time.perf_counter() > until  # fewer of each rather than none of the last
        if n % 4 == 3 or late or n + 1 == 2 * len(placements):
            seen.append(times())
        if late:
            break
    guessed = []
    for i, k in turns:
        there = at_speed(problem.profile, np.sqrt(seen[k - 1] * seen[k]))
        guessed.append(said(replace(problem, profile=there), placements[i]))
    which = np.array(turns)[:, 0]
    b.emit(
        key,
        placements=len(set(which)),
        **agreement(which, plain, np.array(guessed), np.array(took)),
    )


def cut(problem: Problem, counts: Sequence[int]) -> list[np.ndarray]:
    """Placements with so many cuts of the order that runs, at random places."""
    graph, rng, placements = problem.graph, np.random.default_rng(0), []
    first = np.full(graph.num_groups, graph.num_ops)
    np.minimum.at(first, graph.group, problem.priority)
    for i, cuts in enumerate(counts):
        at = np.sort(rng.choice(graph.num_ops - 1, min(cuts, graph.num_ops - 1), replace=False))
        chosen = (np.searchsorted(at, first) + i + i // 8) % 2
        placements.append(np.where(problem.supported.all(axis=1), chosen[graph.group], 0))
    return [p.astype(np.int32) for p in placements]


def said(problem: Problem, placement: np.ndarray) -> tuple[float, float]:
    """Predicted seconds of a call, and the predicted period."""
    guess, one = evaluate(problem, placement[None]), (placement == placement[0]).all()
    call_s = 0.0 if one else problem.profile.provenance.get("call_s", 0.0)
    return float(guess.latency_s[0]) + call_s, float(guess.period_s[0])


def agreement(
    which: np.ndarray, plain: np.ndarray, guessed: np.ndarray, took: np.ndarray
) -> dict[str, float]:
    """How well predictions ``guessed [R, 2]`` of runs agree with what they took.

    ``which [R]`` are their placements, of which ``plain [P, 2]`` are other predictions.
    """
    from scipy.stats import spearmanr

    _, at, times = np.unique(which, return_index=True, return_counts=True)
    last = len(which) - 1 - np.unique(which[::-1], return_index=True)[1]
    total = [np.exp(np.log(x[at] * x[last]) / 2) for x in (guessed, took)]
    off = np.abs(np.log(total[0] / total[1]))
    plain_off = np.abs(np.log(plain[which[at]] / total[1]))
    floor = np.abs(np.log(took[at] / took[last]))[times > 1]
    facts = {}
    for k, name in enumerate(("latency", "period")):
        facts[f"{name}_error"] = float(np.median(off[:, k]))
        facts[f"{name}_rank"] = float(spearmanr(total[0][:, k], total[1][:, k]).statistic)
        facts[f"{name}_plain_error"] = float(np.median(plain_off[:, k]))
        facts[f"{name}_floor"] = float(np.median(floor[:, k])) if len(floor) else math.nan
    return facts


def plans(b: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Plans beside one device, plain PyTorch on the GPU and a CUDA graph of the whole model.

    For a latency inputs are in host memory, and results are wanted there; for a period both are on
    the GPU, except for ways that use the CPU.
    """
    cluster = b.cluster
    measured = b.measured(key, graph, cluster)
    problem = Problem(graph, cluster, measured, objective="period", num_microbatches=16)
    planner = planners.load("best_of", seconds=b.planning_s)
    call, host, there = resident(module, inputs, b.gpu), _tensors(inputs), moved(inputs, b.gpu)
    flat, flat_there = (pytree.tree_leaves(split_inputs(x)) for x in (inputs, there))
    whole: WholeGraph | None = None
    with b.item(f"{key}, CUDA graph of the whole model"), torch.inference_mode():
        whole = WholeGraph(call, inputs, b.gpu)
    for objective in ("latency", "period"):
        latency, count = objective == "latency", 8 if b.emulated else 40
        solution = planner(replace(problem, objective=objective))
        seconds: dict[str, float] = {}
        ways = {"cpu": all_on(graph, 0), "gpu": all_on(graph, 1), "plan": solution.placement}
        ways |= {f"{way}_graphs": ways[way] for way in ("gpu", "plan") if ways[way].any()}
        for way, placement in ways.items():
            if not problem.supported[np.arange(graph.num_ops), placement].all():
                continue
            alike = way.replace("plan", "cpu" if not placement.any() else "gpu")
            if alike in seconds and (placement == placement[0]).all():
                seconds[way] = seconds[alike]  # the plan is to use one device
                continue
            stays = "device" if placement.all() and not latency else "host"
            options: dict[str, Any] = {"priority": problem.priority, "outputs": stays}
            with (
                b.item(f"{key}, {objective}, {way}", 30),
                Runner(graph, cluster, placement, **options) as runner,
            ):
                runner.cuda_graphs = way.endswith("_graphs")
                list(runner.stream([inputs] * 4))
                if latency:
                    seconds[way] = call_seconds(runner, inputs, 7)
                else:
                    given = there if stays == "device" else inputs
                    seconds[way] = period_of(runner, given, count)
        with b.item(f"{key}, {objective}, plain PyTorch"), torch.inference_mode():
            if latency:
                seconds["eager"] = timed(lambda: [x.cpu() for x in call(moved(flat, b.gpu))], 10)
            else:
                seconds["eager"] = period_of_calls(lambda: call(flat_there), count)
            if whole is not None and latency:
                seconds["graph"] = timed(lambda: [x.cpu() for x in whole(host)], 10)
            elif whole is not None:
                seconds["graph"] = period_of_calls(lambda: whole(_tensors(there)), count)
        single = min(seconds[w] for w in ("cpu", "gpu") if w in seconds)
        uses = np.unique(solution.placement).tolist()
        b.emit(
            f"{key}, {objective}",
            **{f"{k}_ms": v * 1e3 for k, v in seconds.items()},
            plan_over_single=_ratio(single, seconds.get("plan")),
            gpu_over_eager=_ratio(seconds.get("eager"), seconds.get("gpu")),
            graphs_over_graph=_ratio(seconds.get("graph"), seconds.get("gpu_graphs")),
            plan_uses={(0,): "CPU", (1,): "GPU"}.get(tuple(uses), "both"),
        )
        if len(uses) > 1:
            with b.item(f"{key}, {objective}, peak"):
                b.emit(f"{key}, {objective}, peak", **peaks(problem, solution.placement))
    with b.item(f"{key}, peak"):
        b.emit(f"{key}, peak", **peaks(problem, all_on(graph, 1)))


def _ratio(a: float | None, b: float | None) -> float:
    return a / b if a is not None and b else math.nan


def peaks(problem: Problem, placement: np.ndarray) -> dict[str, float]:
    """Predicted and allocator's peak of a GPU, in MiB, without what else is in its memory."""
    weights.forget_others(torch.device("cuda:0"), problem.graph.program, set())
    before = torch.cuda.memory_allocated(0)
    line = Executor(problem).run(placement, num_microbatches=6)
    found = float(line.peak_bytes[1] - before) / 2**20
    alike = replace(problem, num_microbatches=6)
    predicted = float(simulate(alike, placement).peak_bytes[1]) / 2**20
    off = _ratio(predicted - found, found)
    return {"predicted_mib": predicted, "allocator_mib": found, "predicted_off": off}


class Layer(nn.Module):
    """Attention and a perceptron; PyTorch's own may take another way where nothing is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Layers that are equal in form."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        one = Layer(width)  # drawing numbers for each would take longer than all that is measured
        self.layers = nn.ModuleList(copy.deepcopy(one) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def streamed(model: Decoder, x: Tensor, device: torch.device, kept: int) -> Callable[[], Tensor]:
    """The strong alternative: some layers stay, the rest comes from pinned memory, one ahead."""
    stays = set(np.linspace(0, len(model.layers) - 1, kept).astype(int).tolist())
    there = {i: moved(dict(model.layers[i].state_dict()), device) for i in stays}
    come = [i for i in range(len(model.layers)) if i not in stays]
    pinned = {
        i: {
            k: torch.empty_like(v, pin_memory=True).copy_(v)
            for k, v in model.layers[i].state_dict().items()
        }
        for i in come
    }
    slots = [moved(pinned[come[0]], device) for _ in range(2)]
    copies, compute = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    arrived, used = ([torch.cuda.Event() for _ in slots] for _ in range(2))

    def fetch(n: int) -> None:
        """The ``n``-th of those that come, to its slot."""
        with torch.cuda.stream(copies):
            copies.wait_event(used[n % 2])
            for k, v in pinned[come[n]].items():
                slots[n % 2][k].copy_(v, non_blocking=True)
            arrived[n % 2].record(copies)

    def run() -> Tensor:
        y, n = x.to(device), 0
        fetch(0)
        for i, layer in enumerate(model.layers):
            if i in stays:
                y = torch.func.functional_call(layer, there[i], (y,))
                continue
            if n + 1 < len(come):
                fetch(n + 1)
            compute.wait_event(arrived[n % 2])
            y = torch.func.functional_call(layer, slots[n % 2], (y,))
            used[n % 2].record(compute)
            n += 1
        return y.cpu()

    return run


def as_many_kept(
    model: Decoder, x: Tensor, device: torch.device, most: int
) -> tuple[Callable[[], Tensor], int]:
    """``streamed`` with as many layers that stay as there is room for, and how many."""
    for kept in range(most, -1, -1):
        with suppress(torch.OutOfMemoryError):
            call = streamed(model, x, device, kept)
            call()
            return call, kept
        call = None  # or what did not fit stays in the way
        torch.cuda.empty_cache()
    raise torch.OutOfMemoryError("there is no room for two layers and what they make")


def memory(b: Bench) -> None:
    """Models twice as large as the memory that the GPU may use."""
    with b.item("measured in parts"):
        _in_parts(b)
    width, layers = (128, 8) if b.emulated else (2048, 12)
    shape = {"tables": 3, "rows": 20_000, "batch": 16} if b.emulated else {
        "tables": 26, "rows": 200_000, "batch": 512}  # fmt: skip
    decoder = Decoder(layers, width).eval()
    few, many = (1, 16), (2, 64) if b.emulated else (2, 256)
    models: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "decoder, few tokens": lambda: (decoder, torch.randn(*few, width)),
        "dlrm": lambda: load("dlrm", dim=64, lookups=1, **shape),
        "decoder, many tokens": lambda: (decoder, torch.randn(*many, width)),
    }
    for i, (name, make) in enumerate(models.items()):
        with b.item(name, b.part_s(len(models) - i)):
            _capped(b, name, *make())


def _in_parts(b: Bench) -> None:
    """A model that the GPU cannot hold is measured all the same, and a plan of it runs."""
    width = 1024 if b.emulated else 4096
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).eval()
    inputs = torch.randn(8, width)
    graph = capture(module, inputs, name="parts")
    with memory_of(b, 0.6 * sum(x.nbytes for x in module.state_dict().values())) as cluster:
        profile = b.measured("parts", graph, cluster, 1, calibrate=False)
        problem = Problem(graph, cluster, profile, num_microbatches=1)
        solution = planners.load("heft")(problem)
        with Runner(graph, cluster, solution.placement) as runner:
            off = error(runner(inputs), expected_of(module, [inputs])[0][0][0])
    parts = profile.provenance.get("in_parts")
    used = float((solution.placement == 1).mean())
    b.emit("measured in parts", parts=str(parts), error=off, on_gpu=used, ok=off < 1e-2)


@contextmanager
def memory_of(b: Bench, num_bytes: float) -> Iterator[Cluster]:
    """The GPU can allocate so much, and is promised less: blocks, and libraries' workspaces."""
    cpu, card = b.cluster.devices
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(num_bytes / total)
    workspaces = 0 if b.emulated else 2**26
    promised = max(1, int(0.85 * num_bytes) - workspaces)
    try:
        yield Cluster("capped", (cpu, replace(card, memory_bytes=promised)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _capped(b: Bench, name: str, module: nn.Module, inputs: Any) -> None:
    """One model: measured without the cap, which would take longer; then all ways under it."""
    graph, size = capture(module, inputs, name=name), sum(
        x.nbytes for x in module.state_dict().values()
    )  # fmt: skip
    short = "many" not in name  # else the processor takes about a second for each run
    key = name.replace(", ", "_").replace(" ", "_")
    profile = b.measured(key, graph, b.cluster, 1, calibrate=short)
    expected = [x.clone() for x in _tensors_of(module, inputs)]
    ways: dict[str, float] = {}
    facts: dict[str, Any] = {}
    weights.forget_others(b.gpu, graph.program, set())
    with memory_of(b, 0.5 * size) as cluster:
        more = with_streaming(cluster)
        alike = {"objective": "latency", "num_microbatches": 1}
        problem = Problem(graph, more, profile.for_cluster(more), **alike)
        b.keep(f"{key}_half", problem)
        planner = planners.load("best_of", seconds=b.planning_s)
        placed = {"cpu": all_on(graph, 0), "plan": planner(problem).placement}
        if evaluate(problem, all_on(graph, 2)[None]).feasible.all():  # two buffers have room
            placed["stream"] = all_on(graph, 2)
        # The best without the third choice: what stays on the CPU is computed there.
        placed["cut"] = planner(Problem(graph, cluster, profile, **alike)).placement
        for way, placement in placed.items():
            with (
                b.item(f"{name}, {way}", 30),
                Runner(graph, more, placement, priority=problem.priority) as runner,
            ):
                ways[f"{way}_ms"] = call_seconds(runner, inputs, 3) * 1e3
                args, kwargs = split_inputs(inputs)
                got = pytree.tree_leaves(runner(*args, **kwargs))
                off = max(error(x, y) for x, y in zip(got, expected, strict=True))
                facts[f"{way}_error"] = off
        with b.item(f"{name}, peak"):
            facts |= peaks(problem, placed["plan"])
        weights.forget_others(b.gpu, graph.program, set())
        torch.cuda.empty_cache()
        if isinstance(module, Decoder):
            most = int(cluster.devices[1].memory_bytes / size * len(module.layers)) - 2
            with b.item(f"{name}, streamed", 30), torch.inference_mode():
                call, kept = as_many_kept(module, inputs, b.gpu, most)
                ways["streamed_ms"] = timed(call, 3) * 1e3
                facts |= {"streamed_error": error(call(), expected[0]), "streamed_kept": kept}
                del call
        torch.cuda.empty_cache()
        with b.item(f"{name}, accelerate", 30), torch.no_grad():
            room = cluster.devices[1].memory_bytes
            limits = {"cpu": 2**40} if b.emulated else {0: room, "cpu": 2**40}
            offloaded = offloaded_seconds(copy.deepcopy(module), inputs, limits)
            ways["accelerate_ms"] = offloaded * 1e3
    b.emit(
        name,
        model_mib=size / 2**20,
        **ways,
        plan_over_accelerate=_ratio(ways.get("accelerate_ms"), ways.get("plan_ms")),
        plan_over_streamed=_ratio(ways.get("streamed_ms"), ways.get("plan_ms")),
        plan_over_cut=_ratio(ways.get("cut_ms"), ways.get("plan_ms")),
        better=min(("cut", "stream", "streamed"), key=lambda w: ways.get(f"{w}_ms", math.inf)),
        predicted_ms=float(evaluate(problem, placed["plan"][None]).latency_s[0]) * 1e3,
        on_gpu=float((problem.worker[placed["plan"]] == 1).mean()),
        from_host_mib=float(problem.param_bytes_on(placed["plan"])[0]) / 2**20,
        **facts,
        ok=all(v <= 3e-3 for k, v in facts.items() if k.endswith("_error")),
    )


def _tensors_of(module: nn.Module, inputs: Any) -> list[Tensor]:
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        return [x for x in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(x, Tensor)]


def offloaded_seconds(module: nn.Module, inputs: Any, limits: dict[Any, int]) -> float:
    """Seconds with accelerate, which keeps what fits first and copies the rest for every call."""
    import accelerate

    args, kwargs = split_inputs(inputs)
    whole = ["Layer", "EmbeddingBag"]
    where = accelerate.infer_auto_device_map(module, limits, no_split_module_classes=whole)
    accelerate.dispatch_model(module, where, main_device=next(iter(limits)))
    return timed(
        lambda: pytree.tree_map(Tensor.cpu, pytree.tree_leaves(module(*args, **kwargs))), 3
    )


def training(b: Bench) -> None:
    """A step on the GPU beside plain PyTorch's there, and with memory for half of it."""
    cluster = b.cluster
    name, options = ("tiny_mlp", {"batch": 64}) if b.emulated else ("resnet50", {"batch": 8})
    module, inputs = load(name, **options)
    plain = copy.deepcopy(module).train()
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    example = (inputs, None)
    graph = capture(module, example, mode="training", loss=mean_of_outputs, optimizer=optimizer)
    peak, kept = 2**20, 2**19
    with b.item("all on the GPU"), Trainer(graph, cluster, all_on(graph, 1), optimizer) as trainer:
        trainer.step([example] * 2)
        kept = torch.cuda.memory_allocated()  # parameters, gradients, the optimizer's state
        torch.cuda.reset_peak_memory_stats()
        step_s = timed(lambda: trainer.step([example] * 2), 3)
        peak = torch.cuda.max_memory_allocated()
        sizes = {"peak_mib": peak / 2**20, "kept_mib": kept / 2**20}
        b.emit("all on the GPU", step_ms=step_s * 1e3, **sizes)
    with b.item("half of the activations"):
        torch.cuda.empty_cache()
        profile = b.measured("training", graph, cluster, 1, calibrate=False)
        room = kept + 0.5 * (peak - kept)
        with memory_of(b, room) as capped:
            problem = Problem(graph, capped, profile, objective="period", num_microbatches=2)
            solution = planners.load("best_of", seconds=b.planning_s)(problem)
            fresh = torch.optim.AdamW(module.parameters(), lr=1e-3)
            with Trainer(graph, capped, solution.placement, fresh) as trainer:
                with tf32(False):
                    wrong = training_difference(trainer, module, example, mean_of_outputs, 2)
                step_s = timed(lambda: trainer.step([example] * 2), 3)
        b.emit(
            "half of the activations",
            step_ms=step_s * 1e3,
            room_mib=room / 2**20,
            on_gpu=float((solution.placement == 1).mean()),
            ok=not wrong,
            difference=wrong,
        )
    with b.item("eager"):
        gpu = torch.device("cpu") if b.emulated else b.gpu  # whose tensors autograd does not know
        plain.to(gpu)
        mine = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        given = [moved(example, gpu)] * 2
        step_s = timed(lambda: plain_step(plain, mine, given, mean_of_outputs).cpu(), 3)
        b.emit("eager", step_ms=step_s * 1e3)


def policy(b: Bench) -> None:
    """Steps per second of PPO, with the network on the CPU and on the GPU."""
    steps = 64 if b.emulated else 2048
    for hidden in (16,) if b.emulated else (64, 256):
        rates = {}
        for device in ("cpu",) if b.emulated else ("cpu", "cuda"):
            with b.item(f"hidden {hidden}, {device}", 20):
                steps_per_s(device, hidden, 64)  # contexts, kernels
                rates[f"{device}_steps_per_s"] = steps_per_s(device, hidden, steps)
        ratio = _ratio(rates.get("cuda_steps_per_s"), rates.get("cpu_steps_per_s"))
        b.emit(f"hidden {hidden}", **rates, gpu_over_cpu=ratio)


def steps_per_s(device: str, hidden: int, steps: int) -> float:
    """Of a training on a graph of 64 operators and two devices."""
    from agents.config import TrainConfig
    from agents.encoder import NetworkConfig
    from agents.training import train as learn

    ops = np.arange(64)
    rng = np.random.default_rng(0)
    edges = [(int(rng.integers(max(0, j - 6), j)), j) for j in ops[1:].tolist()]
    sizes = rng.integers(1, 100, len(ops))
    graph = OpGraph.build("random", [f"op{n}" for n in ops], ops, sizes, edges)
    seconds = rng.uniform(1e-3, 1e-2, (len(ops), 2))
    cluster = Cluster("two", (Device("a", "acc"), Device("b", "acc")))
    problem = Problem(graph, cluster, Profile(("a", "b"), seconds, 0 * seconds))
    network = NetworkConfig(hidden=hidden)
    options = {"num_envs": 16, "num_checks": 1, "cold": True}
    config = TrainConfig(total_steps=steps, device=device, network=network, **options)
    began = time.perf_counter()
    learn([problem], config=config)
    return steps / (time.perf_counter() - began)


def streams(b: Bench) -> None:
    """The same GPU as two devices: do branches gain from two streams?"""
    card = b.cluster.devices[1]
    two = Cluster("two", tuple(Device(f"{h}/cuda:0", "cuda", card.cores) for h in "ab"))
    _, inputs, graph = b.model("tiny_branches" if b.emulated else "inception")
    for name, placement in {"one": all_on(graph, 0), "two": scattered(graph, 0)}.items():
        with b.item(name), Runner(graph, two, placement) as runner:
            list(runner.stream([inputs] * 3))
            b.emit(name, period_ms=period_of(runner, inputs, 10 if b.emulated else 40) * 1e3)


def energy(b: Bench) -> None:
    """Joules per micro-batch by NVML: at rest with a context, and at work."""
    meter = gpu_meter()
    if meter is None:
        b.emit("no meter", ok=False)
        return
    cluster, key = b.cluster, "tiny_mlp" if b.emulated else "resnet50"
    _, inputs, graph = b.model(key)
    profile = b.measured(key, graph, cluster, repeats=1)
    problem = Problem(graph, cluster, profile, objective="period", num_microbatches=16)
    plan = planners.load("best_of", seconds=b.planning_s)(problem).placement
    torch.ones(1, device=b.gpu)
    rest_s, work_s = (0.2, 0.2) if b.emulated else (4.0, 5.0)
    before, began = meter.read_j(), time.perf_counter()
    time.sleep(rest_s)
    idle_w = meter.since_j(before) / (time.perf_counter() - began)
    b.emit("rest, with a context", watts=idle_w, meter=meter.name)
    for name, placement in {"CPU": all_on(graph, 0), "GPU": all_on(graph, 1), "plan": plan}.items():
        with b.item(name), Runner(graph, cluster, placement) as runner:
            list(runner.stream([inputs] * 8))
            before, began, count = meter.read_j(), time.perf_counter(), 0
            while (took := time.perf_counter() - began) < work_s:
                count += sum(1 for _ in runner.stream([inputs] * 16))
            joules = meter.since_j(before)
            b.emit(name, watts=joules / took, gpu_j_per_microbatch=joules / count, count=count)


def gpu_meter() -> power.Meter | None:
    """NVML's counter of joules; or its watts, added up, where a virtual machine hides that."""
    with suppress(power.PowerError):
        return next(iter(power.nvml_meters()), None)
    import threading

    import pynvml

    handle, joules = pynvml.nvmlDeviceGetHandleByIndex(0), [0.0]

    def add_up() -> None:
        at = time.perf_counter()
        while True:
            time.sleep(0.05)
            at, before = time.perf_counter(), at
            joules[0] += pynvml.nvmlDeviceGetPowerUsage(handle) * 1e-3 * (at - before)

    threading.Thread(target=add_up, daemon=True).start()
    return power.Meter("watts, added up", "cuda", lambda: joules[0])


# --- processes -----------------------------------------------------------------------------------

Section = Callable[[Bench], None]
SECTIONS: dict[str, Section] = {
    "facts": facts,
    **{f"correct_{i + 1}": partial(correct, third=i) for i in range(3)},
    "train": train,
    "errors": errors,
    "index": index,
    "kernels": kernels,
    "micro": micro,
    "profile": each(tuple(PROFILED), profile),
    "plans": each(tuple(PROFILED), plans),
    "memory": memory,
    "fidelity": each(PREDICTED, fidelity),
    "training": training,
    "energy": energy,
    "policy": policy,
    "streams": streams,
}
# Sections that run beside each other, as nothing is timed in them; and seconds for them.
ROUNDS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("facts",), 20),
    (("correct_1", "correct_2", "correct_3", "train", "errors", "index", "kernels"), 75),
    (("micro",), 15),
    (("profile",), 85),
    (("plans",), 70),
    (("memory",), 65),
    (("fidelity",), 50),
    (("training",), 40),
    (("energy",), 32),
    (("policy",), 20),
    (("streams",), 8),
)


def section(name: str, limit_s: float, options: argparse.Namespace, **known: Any) -> None:
    """One section, in a process of its own."""
    traces = (options.out / "traces.txt").open("a", encoding="utf-8")
    faulthandler.enable(traces)
    faulthandler.dump_traceback_later(limit_s * 0.95, exit=False, file=traces)
    until = time.perf_counter() + limit_s
    bench = Bench(options.out, options.work, name, options.emulated, until=until, **known)
    with ExitStack() as stack:
        if options.emulated:
            sys.path.insert(0, str(ROOT / "tests"))
            import emulated_gpu

            stack.enter_context(emulated_gpu.emulated())
        ended = False
        with bench.item("outside of items", 2 * limit_s):
            SECTIONS[name](bench)
            ended = True
        if not ended:
            raise SystemExit(1)
    faulthandler.cancel_dump_traceback_later()
    faulthandler.disable()
    traces.close()


def forked(name: str, limit_s: float, options: argparse.Namespace, **known: Any) -> int:
    """The process of a section; from this one, or where CUDA forbids that, a new one."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        if not options.emulated and not cuda_works():
            words = ["-m", "experiments.gpu", "--one", name, "--limit", f"{limit_s:g}"]
            words += ["--out", str(options.out), "--work", str(options.work)]
            words += ["--part", *map(str, known["part"])]
            os.execv(sys.executable, [sys.executable, *words])
        section(name, limit_s, options, **known)
        code = 0
    except BaseException:
        traceback.print_exc()
        with (options.out / "traces.txt").open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def cuda_works() -> bool:
    """Whether this process can use a GPU that is there; not if the one before it had asked."""
    try:
        torch.cuda.init()
    except Exception:
        return False
    return True


def run(options: argparse.Namespace) -> int:
    """All sections, then the table.

    Raises:
        StudyError: a section that is none.
    """
    if unknown := set(options.sections) - set(SECTIONS):
        raise StudyError(f"--sections {sorted(unknown)}: there are {list(SECTIONS)}")
    began = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    options.work = Path(tempfile.mkdtemp(prefix="placement-gpu-"))
    torch.set_num_threads(1)  # threads do not survive a fork
    rounds = []
    for names, limit_s in ROUNDS:
        if wanted := [n for n in names if not options.sections or n in options.sections]:
            rounds.append((wanted, limit_s * options.seconds / LONGEST_S))
    models: dict[str, Model] = {}
    for i, (names, limit_s) in enumerate(rounds):
        # What earlier sections have left over, and not what later ones need.
        later = sum(limit_s for _, limit_s in rounds[i + 1 :])
        left = options.seconds - (time.perf_counter() - began)
        limit_s = min(left - 3, max(limit_s, left - later))
        if limit_s < 5:
            for name in names:
                _emit(options, name, status="no time was left")
            continue
        at = time.perf_counter()
        running = {
            forked(name, limit_s, options, models=models, part=(k, len(names))): name
            for k, name in enumerate(names)
        }
        if i == 0:
            prepare({}, ("tiny_mlp", "bert_tiny"), options)  # imports, for all to come
        elif i == 1 and not options.emulated:
            prepare(models, PROFILED, options)
        done = watched(running, at, limit_s, options)
        if "kernels" in done:
            # An optimizer asks whether a CUDA graph is being captured: that is for others.
            warm_up(options.emulated, training=False)
        with zipfile.ZipFile(options.work / "profiles", "w") as file:
            for path in sorted((*options.work.glob("*.npz"), *options.work.glob("*.json.gz"))):
                file.write(path, path.name)
        shutil.copy(options.work / "profiles", options.out / "profiles.zip")
    shutil.rmtree(options.work, ignore_errors=True)
    text = table((options.out / "gpu.jsonl").read_text(encoding="utf-8").splitlines())
    write_atomic(options.out / "gpu.md", text)
    print(text)
    return 0


def prepare(models: dict[str, Model], keys: Iterable[str], options: argparse.Namespace) -> None:
    """Capture, for the sections to come, while others run; what fails they do themselves."""
    for key in keys:
        try:
            models[key] = captured(key)
        except Exception as failure:
            _emit(options, "prepare", status=f"{key}: {type(failure).__name__}: {failure}")


def watched(
    running: dict[int, str], at: float, limit_s: float, options: argparse.Namespace
) -> set[str]:
    """Wait for processes begun at ``at``, and stop what is late; the sections that are done."""
    done, until = set(), at + limit_s
    stopped: dict[int, str] = {}
    while running or stopped:
        now = time.perf_counter()
        for pid, name in list((running | stopped).items()):
            ended, code = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            took = {"seconds": now - at}
            if running.pop(pid, None) is not None:
                number = os.waitstatus_to_exitcode(code)
                status = "done" if number == 0 else f"exit code {number}"
                _emit(options, name, status=status, **took)
                done |= {name} if number == 0 else set()
            stopped.pop(pid, None)
        if now > until:
            for pid, name in running.items():
                with suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                _emit(options, name, status="stopped", seconds=now - at)
            stopped, running = stopped | running, {}
        if now > until + 5:
            break  # a driver may keep a process that was killed
        time.sleep(0.02)
    return done


def _emit(options: argparse.Namespace, name: str, **facts: Any) -> None:
    Bench(options.out, options.work, name, options.emulated).emit("section", **facts)


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
    return "\n".join(texts) + "\n### goals\n\n" + goals([json.loads(line) for line in lines])


def goals(rows: Sequence[dict[str, Any]]) -> str:
    """What was to be shown, what was, and whether that is enough."""

    def of(section: str, name: str, item: str = "") -> list[float]:
        mine = [r for r in rows if r["section"].split("_")[0] == section and item in r["item"]]
        return [r[name] for r in mine if isinstance(r.get(name), int | float)]

    def span(values: Sequence[float], scale: float = 1.0, unit: str = "") -> str:
        low, high = (number(f(values), 3, scale, unit) for f in (min, max))
        return low if low == high else f"{low} to {high}"

    lines: list[tuple[str, str, str, bool | None]] = []

    def add(
        what: str, goal: str, section: str, values: Sequence[Any], reached: Any, met: Any = None
    ) -> None:
        """``reached`` and ``met`` of the values; what failed in the section is said too."""
        failed = sum(
            "failed" in r or (r["item"] == "section" and r.get("status") != "done")
            for r in rows
            if r["section"].split("_")[0] == section
        )
        text = reached(values) if values else "nothing"
        text += f"; {failed} failed or stopped" if failed else ""
        enough = None if met is None else bool(values and met(values) and not failed)
        lines.append((what, goal, text, enough))

    def counted(oks: Sequence[Any]) -> str:
        return f"{sum(oks)} of {len(oks)}"

    add("results of 12 models", "all equal, the same bits twice", "correct",
        of("correct", "ok"), counted, all)  # fmt: skip
    add("300 micro-batches", "no fault", "correct", of("correct", "ok", "many"), counted, all)
    add("training: losses and parameters", "all equal", "train",
        of("train", "ok"), counted, all)  # fmt: skip
    add("errors are said (the third may end its process)", "3", "errors",
        of("errors", "ok") + of("index", "ok"), counted, lambda v: sum(v) == 3)  # fmt: skip
    shares = of("profile", "dispatch_share"), of("profile", "cpu_faster_share")
    add("profile: share of GPU time that is dispatch", "6 models", "profile",
        shares[0], partial(span, scale=100, unit=" %"), lambda v: len(v) == 6)  # fmt: skip
    add("profile: share of operators that the CPU does faster", "6 models", "profile",
        shares[1], partial(span, scale=100, unit=" %"), lambda v: len(v) == 6)  # fmt: skip
    for what in ("latency", "period"):
        add(f"{what} predicted, median error", "at most 10 %, aim 5 %", "fidelity",
            of("fidelity", f"{what}_error"), partial(span, scale=100, unit=" %"),
            lambda v: max(v) <= 0.10)  # fmt: skip
        add(f"{what} predicted, rank correlation", "at least 0.95", "fidelity",
            of("fidelity", f"{what}_rank"), span, lambda v: min(v) >= 0.95)  # fmt: skip
        add(f"{what}: GPU alone over eager PyTorch", "at least 0.95x", "plans",
            of("plans", "gpu_over_eager", what), span, lambda v: min(v) >= 0.95)  # fmt: skip
        add(f"{what}: graphs per run over one graph", "at least 0.8x", "plans",
            of("plans", "graphs_over_graph", what), span, lambda v: min(v) >= 0.8)  # fmt: skip
        add(f"{what}: plan over the best device", "at least 0.98x (published: 1.125x)",
            "plans", of("plans", "plan_over_single", what), span,
            lambda v: min(v) >= 0.98)  # fmt: skip
    add("half of the memory: results", "all equal", "memory",
        of("memory", "ok"), counted, all)  # fmt: skip
    add("half of the memory: plan over accelerate", "faster", "memory",
        of("memory", "plan_over_accelerate"), span, lambda v: min(v) > 1)  # fmt: skip
    add("half of the memory: better of cut and stream", "named", "memory",
        [f"{r['item']}: {r['better']}" for r in rows if "better" in r], "; ".join)  # fmt: skip
    add("half of the memory: plan over a stream by hand", "named", "memory",
        of("memory", "plan_over_streamed"), span)  # fmt: skip
    add("peak memory predicted", "within 10 % of the allocator's", "plans",
        of("plans", "predicted_off") + of("memory", "predicted_off"),
        partial(span, scale=100, unit=" %"), lambda v: max(map(abs, v)) <= 0.10)  # fmt: skip
    add("training with half of the activations", "runs, losses equal", "training",
        of("training", "ok"), counted, all)  # fmt: skip
    steps = [number(x, 1, unit=" ms") for i in ("eager", "all", "half")
             for x in of("training", "step_ms", i)]  # fmt: skip
    add("training step: eager, GPU, half", "named", "training", steps, ", ".join)
    add("watts at rest, with a context", "named", "energy", of("energy", "watts", "rest"), span)
    add("joules per micro-batch: CPU, GPU, plan", "named", "energy",
        of("energy", "gpu_j_per_microbatch"),
        lambda v: ", ".join(number(x, 3) for x in v))  # fmt: skip
    add("learning on the GPU over the CPU", "named", "policy",
        of("policy", "gpu_over_cpu"), span)  # fmt: skip
    met = {True: "yes", False: "no", None: "–"}
    return to_table(("what", "goal", "reached", "met"), [(*x[:3], met[x[3]]) for x in lines])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--sections", nargs="*", default=[], metavar="NAME", help="only these")
    parser.add_argument("--seconds", type=float, default=LONGEST_S, help="in all: 480")
    parser.add_argument("--emulated", action="store_true", help="tiny models, no real GPU")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--limit", type=float, default=LONGEST_S, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    # Or the first question for a GPU would be one that a forked process cannot ask again.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if options.one:
        section(options.one, options.limit, options, part=tuple(options.part))
        return 0
    return launch(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
