"""What the executor does on a real GPU beside CPU cores: checked, then measured, in eight minutes.

    python -m experiments.gpu --out FOLDER [--emulated] [--sections NAME ...] [--seconds 470]

Each section is a process of its own with a deadline: what stops one costs no other. Every figure
is a line of ``FOLDER/gpu.jsonl``, written at once; ``FOLDER/profiles.zip`` has the profiles, and
with their graphs as problem files, which ``experiments.gpu_results`` takes; ``FOLDER/traces.txt``
where a section was when it failed or was stopped. The table comes last, and is ``FOLDER/gpu.md``
too. ``--emulated`` runs the same code on tiny models on the emulated GPU of the tests: it shows
nothing but that the script runs to its end.
``experiments/gpu.sh`` builds what a bare machine needs.

Sections are forked from one process that, while the first of them check, captures the models that
others time and loads the planners' kernels. It has never asked CUDA for anything: a process that
has cannot be forked.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import json
import math
import multiprocessing
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
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import placement.costs.measure as measuring
from experiments.gpu_baselines import (
    Decoder,
    WholeGraph,
    moved,
    offloaded_seconds,
    pinned,
    resident,
    streamed,
    tensors_of,
    timed,
    timed_once,
)
from experiments.gpu_goals import table
from experiments.runs import warm
from experiments.study import ROOT, StudyError, launch, say
from placement import importers, optimizing, planners
from placement.capturing import capture
from placement.capturing.recompute import recompute
from placement.capturing.training import mean_of_outputs
from placement.cli.train import difference as training_difference
from placement.cluster import Cluster, Device
from placement.costs import power
from placement.costs.measure import at_speed, measure, pieces, run_placement
from placement.executor import Executor, Runner, Trainer, weights
from placement.executor.equality import Tolerance, error
from placement.executor.streamed import with_streaming
from placement.graph import OpGraph
from placement.optimizing import fastest, median_s
from placement.problem import Problem
from placement.profile import Profile
from placement.program import split_inputs
from placement.simulator import evaluate, simulate
from placement.timeline import streamed_period
from placement.tools.files import write_atomic
from placement.workloads import load

BEGAN = time.perf_counter()
LONGEST_S = 470.0
BESIDE = 7  # parts of the CPU cores at most: of two sections that share one, one has little to do
LONG_S = 0.25  # of a call: it is not made more often than it must be
AGAIN_S = 5.0  # until somebody whose time is over is told once more: a destructor hears nothing
FORK = multiprocessing.get_context("fork")
GIB = 2**30
HOST_BYTES = 96 * GIB  # at least: memory of a lent machine grows as it is used, and says little
CHECKED = (  # a process each
    ("tiny_mlp", "tiny_branches", "tiny_views", "bert_tiny"),
    *((name,) for name in (
        "dlrm", "inception", "gpt2", "vit", "bert_base", "lstm", "resnet50", "convnext")),
)  # fmt: skip
PROFILED: dict[str, tuple[str, dict[str, int]]] = {
    "bert_base": ("bert_base", {}),
    "resnet50": ("resnet50", {}),
    "inception": ("inception", {}),
    "lstm_short": ("lstm", {"steps": 4}),
    "dlrm_b256": ("dlrm", {"batch": 256}),
    "resnet50_b32": ("resnet50", {"batch": 32}),  # last: the CPU takes half a second for it
}
PREDICTED = ("resnet50", "bert_base", "inception")
_TURNS, _EVERY, _STEADY_S = 4, 5, 5.0  # at most; and of how a device's speed is followed meanwhile
Model = tuple[nn.Module, Any, OpGraph]

# Of measuring: what is learned once is not measured again, and what costs most is done once.
_QUICK: dict[str, Any] = {
    "_PATIENCE": 1,
    "_CALIBRATION_S": 0.02,
    "_CALIBRATION_CUTS": (1, 3, 7, 15, 31),
    "_CALIBRATION_ROUNDS": 1,
    "_LIKELY_ERROR": 0.08,  # of one run on a virtual machine
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
    "_CALIBRATION_SEARCH": 20,
}


@dataclass(eq=False)
class Limit:
    """When an item has to end; and whether that time has come, as somebody was told."""

    until: float
    is_over: bool = False


class Late(BaseException):
    """The time of an item is over. What an item is made of goes on after an ``Exception``."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit


@dataclass
class Bench:
    """What a section works with: ``emulated``, everything is to be tiny.

    Attributes:
        work: a folder for what sections tell each other.
        models: captured before, by name.
        part: which of how many sections that run beside each other this one is.
        until: when it will be stopped.
        fair_s: the part of one model.
        began: when the script did.
        limits: of each item that is under way; the outermost first.
    """

    out: Path
    work: Path
    section: str
    emulated: bool
    models: dict[str, Model] = field(default_factory=dict)
    part: tuple[int, int] = (0, 1)
    until: float = field(default_factory=lambda: time.perf_counter() + LONGEST_S)
    fair_s: float = LONGEST_S
    began: float = field(default_factory=time.perf_counter)
    limits: list[Limit] = field(default_factory=list)

    def emit(self, item: str, **facts: Any) -> None:
        facts = {k: None if v != v else v for k, v in facts.items()}  # JSON knows no nan
        at = round(time.perf_counter() - self.began, 2)
        row = {"section": self.section, "item": item, **facts, "at": at}
        with (self.out / "gpu.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, default=float) + "\n")
            file.flush()
            os.fsync(file.fileno())
        say(" ".join(f"{k}={shown(v)}" for k, v in row.items()))

    @contextmanager
    def item(self, name: str, seconds: float = 60.0) -> Iterator[None]:
        """What fails, or takes too long, is a row of its own, and the next item goes on.

        Whose time is over ends at once, with all items in it.
        """
        began = time.perf_counter()
        mine = Limit(began + seconds)
        self.limits.append(mine)
        self._wait_for_limit()
        try:
            yield
        except (Exception, Late) as failure:
            if isinstance(failure, Late) and failure.limit is not mine:
                raise
            notes = " ".join(getattr(failure, "__notes__", ()))
            text = " ".join(f"{type(failure).__name__}: {failure} {notes}".split())
            if isinstance(failure, Late):
                text = f"stopped, as {seconds:.3g} s for {name!r} were over"
            self.emit(name, failed=text[:300], seconds=time.perf_counter() - began)
            with (self.out / "traces.txt").open("a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
        finally:
            self.limits.remove(mine)
            self._wait_for_limit()

    def _wait_for_limit(self) -> None:
        """``Late`` when the first of the limits is over; and again, if nobody could raise it."""

        def late(*_: Any) -> None:
            for limit in self.limits:
                if limit.until <= time.perf_counter():
                    limit.is_over = True
                    raise Late(limit)

        waits_s = 0.0
        for limit in self.limits:
            left_s = AGAIN_S if limit.is_over else max(limit.until - time.perf_counter(), 1e-3)
            waits_s = min(waits_s or left_s, left_s)
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, waits_s, AGAIN_S)

    def part_s(self, count: int) -> float:
        """Seconds for one of so many items: not more than 1.5 times its part of what is left."""
        return max(1.0, (1.5 if count > 1 else 1) * (self.until - time.perf_counter()) / count)

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
        return 0.2 if self.emulated else 1.0

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
    """Outputs in float64, on ``device``, or as the module is where it cannot be so; and which."""

    def run(model: nn.Module, change: Callable[[Any], Any]) -> list[list[Any]]:
        outputs = []
        for item in items:
            args, kwargs = pytree.tree_map(change, split_inputs(item))
            with torch.no_grad():
                found = pytree.tree_leaves(model(*args, **kwargs))
            outputs.append(found)
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


def call_seconds(runner: Runner, inputs: Any, times: int) -> float:
    args, kwargs = split_inputs(inputs)
    return timed(lambda: runner(*args, **kwargs), times)


def period_of_calls(call: Callable[[], Any], count: int) -> float:
    """Seconds of each of so many calls that nobody waits for."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def in_turns(
    b: Bench, name: str, ways: dict[str, Callable[[], Sequence[float]]], turns: int, until: float
) -> dict[str, list[float]]:
    """Seconds of each way by turn. What disturbs the machine for a while disturbs all alike.

    What takes long is seldom compared closely: a way that has taken two seconds has no more turns.
    After ``until`` there are no more than three.
    """
    found: dict[str, list[float]] = {way: [] for way in ways}
    spent = dict.fromkeys(ways, 0.0)
    for turn in range(turns):
        if turn >= 3 and time.perf_counter() > until:
            break
        for way, call in [*ways.items()][:: -1 if turn % 2 else 1]:  # each is after others
            if spent[way] < 2:
                began, before, spent[way] = time.perf_counter(), spent[way], math.inf
                with b.item(f"{name}, {way}", 15):
                    found[way].append(statistics.median(call()))
                    spent[way] = before + time.perf_counter() - began
    return {way: seconds for way, seconds in found.items() if seconds}


def times_as_fast(turns: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """How many times as fast ``one`` is as the other, in the middle turn of those that both had."""
    both = zip(turns.get(one, ()), turns.get(other, ()), strict=False)
    return statistics.median([b / a for a, b in both] or [math.nan])


def warm_calls(call: Callable[[], Any]) -> list[float]:
    """Seconds of three calls, after others in which the clock of a GPU rises."""
    until = time.perf_counter() + 0.03
    while (took_s := timed_once(call)) and time.perf_counter() < until:
        pass
    return [took_s] if took_s > LONG_S else [timed_once(call) for _ in range(3)]


# --- check ---------------------------------------------------------------------------------------


def facts(b: Bench) -> None:
    cluster = replace(b, part=(0, 1)).cluster
    for d in cluster.devices:
        gib = d.memory_bytes / GIB
        b.emit(d.name, model=d.model, cores=len(d.cores), threads=d.threads, promised_gib=gib)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numba", "numpy", "transformers", "accelerate", "pynvml"):
        with suppress(Exception):
            versions[name] = __import__(name).__version__
    b.emit("versions", **versions, cuda=str(torch.version.cuda))
    b.emit("run", began=datetime.now(UTC).isoformat(timespec="minutes"))
    with b.item("nvidia-smi"):
        asked = "name,mig.mode.current,driver_version,clocks.max.sm,clocks.sm,power.limit"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        b.emit("nvidia-smi", text=subprocess.run(command, capture_output=True, text=True).stdout)


def correct(b: Bench, part: int) -> None:
    """Placements compute what the model does in float64; a stream twice gives the same bits."""
    cluster = b.cluster
    names = CHECKED[0][part % 4 :][:1] if b.emulated else CHECKED[part]
    for i, name in enumerate(names):
        with b.item(name, b.part_s(len(names) - i)):
            module, inputs, graph = b.model(name)
            items = [others_like(inputs, seed) for seed in range(3 if b.emulated else 8)]
            expected, reference = expected_of(module, items, None if b.emulated else b.gpu)
            ways = {"all on the GPU": all_on(graph, 1), "as CUDA graphs": all_on(graph, 1)}
            ways |= {f"random {s}": scattered(graph, s) for s in range(1 if b.emulated else 3)}
            ways["random 0 as CUDA graphs"] = ways["random 0"]
            for way, placement in ways.items():
                for allowed in (False, True) if placement.all() else (False,):
                    with b.item(f"{name}, {way}, tf32={allowed}"), tf32(allowed):
                        graphs = way.endswith("as CUDA graphs")
                        off, same, eager = errors_of(
                            graph, cluster, placement, items, expected, graphs
                        )
                        # A capture that failed is no graph, and nothing was shown of it.
                        refused = [why for why in eager.values() if "Error: " in why]
                        limit = Tolerance.of(module.state_dict().values(), cluster)
                        b.emit(
                            name,
                            way=way,
                            tf32=allowed,
                            error=off,
                            allowed=limit.relative,
                            ok=off <= limit.relative and same and not refused,
                            bitwise_again=same,
                            reference=reference,
                            not_graphed=len(eager),
                            why=next(iter([*refused, *eager.values()]), ""),
                        )
    if part == 0:
        with b.item("many micro-batches"):
            module, inputs, graph = b.model("tiny_branches")
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
        if graphs:  # what is captured is captured, before bits are compared
            list(runner.stream(items[:3]))
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
        for label in ("all on the GPU", "as CUDA graphs", "random"):
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
                place = scattered(graph, 1) if label == "random" else all_on(graph, 1)
                with tf32(False), Trainer(graph, cluster, place, optimizer) as trainer:
                    trainer.runner.cuda_graphs = label == "as CUDA graphs"
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
    """Planners, the simulator and environments compiled, where that did not travel along."""
    began = time.perf_counter()
    warm_up(b.emulated)
    from numba.core.dispatcher import Dispatcher

    found = [x for x in gc.get_objects() if issubclass(type(x), Dispatcher)]
    loaded, compiled = (
        sum(sum(getattr(x.stats, name).values()) for x in found)
        for name in ("cache_hits", "cache_misses")
    )
    b.emit("kernels", loaded=loaded, compiled=compiled, seconds=time.perf_counter() - began)


def warm_up(emulated: bool = False, training: bool = True) -> None:
    """Compile, or load, all kernels that sections use."""
    warm(("heft",) if emulated else ("best_of", "heft"))
    if training and not emulated:
        with suppress(ImportError):  # then the section says what is missing
            steps_per_s("cpu", 16, 1)


# --- study ---------------------------------------------------------------------------------------

One = Callable[["Bench", str, nn.Module, Any, OpGraph], None]


def each(keys: Sequence[str], one: One) -> Callable[[Bench], None]:
    """The section that does the same with models."""

    def section(b: Bench) -> None:
        names = ("tiny_mlp",) if b.emulated else keys
        for i, key in enumerate(names):
            b.fair_s = (b.until - time.perf_counter()) / (len(names) - i)
            with b.item(key, b.part_s(len(names) - i)):
                one(b, key, *b.model(key))

    return section


def profile(b: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Where the CPU wins, and what of the GPU's time is dispatch."""
    cluster = b.cluster
    is_long = key.endswith("_b32")
    measured = b.measured(key, graph, cluster, 1 if is_long else 3, calibrate=not is_long)
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
        with record(activities=[getattr(ProfilerActivity, where)]) as run:
            list(runner.stream([inputs] * 5))
    # As they were recorded: to make a tree of them takes PyTorch seconds. Copies are no kernels.
    seen = [
        e.duration_ns()
        for e in run.profiler.kineto_results.events()
        if e.device_type().name == where and e.name()[:3] != "Mem"
    ]
    if not seen:
        raise StudyError(f"PyTorch's profiler has seen nothing of {where}")
    return sum(seen) * 1e-9 / 5


def fidelity(b: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Predicted and measured latency and period of placements with few cuts and many.

    As a user runs them: nothing is recorded. A virtual machine changes its speed within seconds,
    which no model foresees. So after every few placements the whole model also runs on each device,
    called and streamed alike, and predictions are for devices of that speed (see ``speeds_at``);
    ``plain`` are those for the speed of the profile. Placements run again and again, in turns: by
    how much the second time differs from the first is the ``floor`` of what a prediction can miss.
    """
    until, cluster = time.perf_counter() + 0.9 * b.fair_s, b.cluster
    problem = Problem(graph, cluster, b.measured(key, graph, cluster), num_microbatches=8)
    counts = (1, 2, 4, 8, 16, 32, 2, 1, 8, 4, 32, 16, 1, 2, 4, 8, 16, 32, 2, 1)
    placements = list(pieces(problem, counts[: 3 if b.emulated else None], seed=0))
    singles = [all_on(graph, d) for d in (0, 1)]
    plain, alone = (np.array([said(problem, p) for p in some]) for some in (placements, singles))

    def run(what: str, placement: np.ndarray, predicted: np.ndarray) -> tuple[float, Any]:
        """When, and latency and period; of quick ones more, as a GPU that was idle is warm late."""
        more = 1 if b.emulated else int(np.clip(0.05 / predicted[0], 1, 8))
        began = time.perf_counter()
        both = run_placement(problem, placement, 3 * more, 8 * more, 2 * more)
        ended = time.perf_counter()
        names = ("latency_s", "period_s", "measured_latency_s", "measured_period_s")
        b.emit(f"{key}, {what}", **dict(zip(names, [*predicted, *both], strict=True)))
        return (began + ended) / 2, both

    ran, alone_ran = list[Any](), list[Any]()
    for n in range(_TURNS * len(placements)):
        if n % _EVERY == 0:
            each_device = zip(cluster.device_names, singles, alone, strict=True)
            alone_ran.append([run(*some) for some in each_device])
        i = n % len(placements)
        cuts = int((np.diff(placements[i][np.argsort(problem.priority)]) != 0).sum())
        ran.append(run(f"{cuts} cuts", placements[i], plain[i]))
        if n > 6 and time.perf_counter() > until:  # fewer of each rather than none of the last
            break
    at, measured = (np.array([x[k] for x in ran]) for k in (0, 1))
    alone_at, alone_s = (np.array([[x[k] for x in both] for both in alone_ran]) for k in (0, 1))
    guessed = np.empty_like(measured)
    for n, times in enumerate(speeds_at(at, alone_at, alone_s / alone)):
        for k in (0, 1):
            there = replace(problem, profile=at_speed(problem.profile, times[:, k]))
            guessed[n, k] = said(there, placements[n % len(placements)])[k]
    b.emit(key, placements=min(len(ran), len(plain)), **agreement(plain, guessed, measured))


def speeds_at(at: np.ndarray, timed_at: np.ndarray, times: np.ndarray) -> np.ndarray:
    """``times [R, D, K]``, as they were at ``timed_at [R, D]``, at other times: ``[N, D, K]``.

    Means of the logarithms; those of some seconds before or after count most.
    """
    weights = np.exp(-np.abs(at[:, None, None] - timed_at) / _STEADY_S)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.exp(np.einsum("nrd,rdk->ndk", weights, np.log(times)))


def said(problem: Problem, placement: np.ndarray) -> tuple[float, float]:
    """Predicted seconds of a call, and the predicted period."""
    guess, one = evaluate(problem, placement[None]), (placement == placement[0]).all()
    call_s = 0.0 if one else problem.profile.provenance.get("call_s", 0.0)
    return float(guess.latency_s[0]) + call_s, float(guess.period_s[0])


def agreement(plain: np.ndarray, guessed: np.ndarray, took: np.ndarray) -> dict[str, float]:
    """How well predictions ``guessed [R, 2]`` of runs agree with what they took.

    Placements, of which ``plain [P, 2]`` are other predictions, ran in turns.
    """
    from scipy.stats import spearmanr

    num, there = len(plain), min(len(plain), len(took))
    total = [
        np.exp([np.log(x[i::num]).mean(axis=0) for i in range(there)]) for x in (guessed, took)
    ]
    off, plain_off = (np.abs(np.log(x / total[1])) for x in (total[0], plain[:there]))
    again = took[num:][:num]
    floor = np.abs(np.log(took[: len(again)] / again))
    facts = {}
    for k, name in enumerate(("latency", "period")):
        facts[f"{name}_error"] = float(np.median(off[:, k]))
        facts[f"{name}_rank"] = float(spearmanr(total[0][:, k], total[1][:, k]).statistic)
        facts[f"{name}_plain_error"] = float(np.median(plain_off[:, k]))
        facts[f"{name}_floor"] = float(np.median(floor[:, k])) if len(floor) else math.nan
    return facts


def plans(b: Bench, key: str, module: nn.Module, inputs: Any, graph: OpGraph) -> None:
    """Plans beside one device, plain PyTorch on the GPU and a CUDA graph of the whole model.

    ``plan`` is what ``placement.optimize`` keeps when it has run the planner's answer beside single
    devices, each as CUDA graphs too (``kept`` says which); ``planned`` that answer. For a latency
    inputs are in pinned memory of the host, and results are wanted there; for a period both are on
    the GPU, except for ways that use the CPU, which are compared with the GPU alone as it is fed
    from there. Ways are compared turn by turn.
    """
    cluster = b.cluster
    measured = b.measured(key, graph, cluster)
    problem = Problem(graph, cluster, measured, objective="period", num_microbatches=16)
    plain: dict[str, Callable[[Any], list[Tensor]]] = {"eager": resident(module, b.gpu)}
    with b.item(f"{key}, CUDA graph of the whole model"):
        plain["graph"] = WholeGraph(plain["eager"], inputs, b.gpu)
    for objective in ("latency", "period"):
        with b.item(f"{key}, {objective}"), patch.object(optimizing, "TRY_GRAPHS", True):
            posed = replace(problem, objective=objective)
            with fastest(posed, inputs, b.planning_s) as runner:
                both = {"plan": runner.plan, "planned": runner.planned}
                chosen_s = {way: median_s(m, objective) for way, m in runner.measured.items()}
                kept = "plan_graphs" if runner.cuda_graphs else "plan"
            placed = {way: plan.placement(graph, cluster) for way, plan in both.items()}
            share = 0.25 if objective == "latency" else 0.45
            until = time.perf_counter() + share * b.fair_s
            turns = _compared(b, posed, placed, plain, inputs, until)
            seconds = {way: statistics.median(each) for way, each in turns.items()}
            b.emit(
                f"{key}, {objective}",
                **{f"{k}_ms": v * 1e3 for k, v in seconds.items()},
                **{f"{way}_over_single": over_single(seconds, placed[way], way) for way in placed},
                gpu_over_eager=times_as_fast(turns, "gpu", "eager"),
                graphs_over_graph=times_as_fast(turns, "gpu_graphs", "graph"),
                kept_over_eager=times_as_fast(turns, kept, "eager"),
                kept=kept,
                turns=len(turns.get("gpu", ())),
                **{f"{way}_uses": uses(on) for way, on in placed.items()},
                planned_told_ms=said(posed, placed["planned"])[objective == "period"] * 1e3,
                planned=np.packbits(placed["planned"]).tobytes().hex(),  # by operator: 1 the GPU
                chosen_from=", ".join(f"{way} {s * 1e3:.3g} ms" for way, s in chosen_s.items()),
            )
            if uses(placed["planned"]) == "both":
                b.emit(f"{key}, {objective}, peak", **peaks(problem, placed["planned"]))
    with b.item(f"{key}, peak"):
        b.emit(f"{key}, peak", **peaks(problem, all_on(graph, 1)))


def uses(placement: np.ndarray) -> str:
    return {(0,): "CPU", (1,): "GPU"}.get(tuple(np.unique(placement).tolist()), "both")


def over_single(seconds: dict[str, float], placement: np.ndarray, way: str) -> float:
    """How many times as fast as the better device, with inputs from where this way has them."""
    gpu = "gpu_fed" if uses(placement) == "both" and "gpu_fed" in seconds else "gpu"
    alone = [seconds[name] for name in ("cpu", gpu) if name in seconds]
    return _ratio(min(alone, default=None), seconds.get(way))


def _compared(
    b: Bench,
    problem: Problem,
    plans: dict[str, np.ndarray],
    plain: dict[str, Callable[[Any], list[Tensor]]],
    inputs: Any,
    until: float,
) -> dict[str, list[float]]:
    """Seconds by turn: each device alone, the plans, as graphs too, plain PyTorch."""
    graph, latency = problem.graph, problem.objective == "latency"
    host, there = pinned(inputs), moved(inputs, b.gpu)
    name = f"{graph.name}, {problem.objective}"
    placed = {"cpu": all_on(graph, 0), "gpu": all_on(graph, 1)}
    if not latency and any(uses(on) == "both" for on in plans.values()):
        placed["gpu_fed"] = placed["gpu"]
    placed |= plans
    placed |= {f"{way}_graphs": placed[way] for way in ("gpu", "plan") if placed[way].any()}
    ways: dict[str, Callable[[], Sequence[float]]] = {}
    made: dict[tuple[bytes, bool, bool], str] = {}
    alike: dict[str, str] = {}  # the same in other words
    with ExitStack() as stack:
        for way, on in placed.items():
            is_there = bool(on.all()) and not latency and way != "gpu_fed"
            graphs = way.endswith("_graphs")
            if (known := (on.tobytes(), is_there, graphs)) in made:
                alike[way] = made[known]
                continue
            if not problem.supported[np.arange(graph.num_ops), on].all():
                continue
            with b.item(f"{name}, {way}", 15):
                stays = "device" if is_there else "host"
                options: dict[str, Any] = {"priority": problem.priority, "outputs": stays}
                runner = stack.enter_context(Runner(graph, problem.cluster, on, **options))
                runner.cuda_graphs = graphs
                given = there if is_there else host
                list(runner.stream([given] * (4 if on.any() else 1)))
                args, kwargs = split_inputs(given)
                call_s = 0.0 if latency else timed_once(partial(runner, *args, **kwargs))
                if latency:
                    ways[way] = partial(warm_calls, partial(runner, *args, **kwargs))
                elif call_s > LONG_S:  # on one device, and as long in a stream
                    ways[way] = lambda seconds=call_s: [seconds]  # type: ignore[misc]
                else:
                    count = counted(call_s)
                    ways[way] = lambda r=runner, g=[given] * count: [streamed_period(r.stream(g))]  # type: ignore[misc]
                made[known] = way
        for way, call in plain.items():
            if latency:
                ways[way] = partial(warm_calls, partial(_to_and_fro, call, host, b.gpu))
            else:
                ways[way] = lambda c=call: [period_of_calls(lambda: c(there), 24)]  # type: ignore[misc]
        # Threads of CPU cores go on for a while, beside what comes next: they come last.
        ways = dict(sorted(ways.items(), key=lambda x: x[0] in placed and not placed[x[0]].all()))
        found = in_turns(b, name, ways, 2 if b.emulated else 15, until)
    return found | {way: found[same] for way, same in alike.items() if same in found}


def _to_and_fro(call: Callable[[Any], list[Tensor]], host: Any, gpu: torch.device) -> list[Tensor]:
    given = host if isinstance(call, WholeGraph) else moved(host, gpu)  # it copies them itself
    return [x.cpu() for x in call(given)]


def counted(seconds: float) -> int:
    """Micro-batches that tell a period, where a call takes so long: 0.2 s of short ones."""
    return int(np.clip(0.2 / seconds, 6, 40))


def _ratio(a: float | None, b: float | None) -> float:
    return a / b if a is not None and b else math.nan


def peaks(problem: Problem, placement: np.ndarray) -> dict[str, float]:
    """Predicted and allocator's peak of a GPU, in MiB, without what else is in its memory."""
    forget(problem.graph)
    before = torch.cuda.memory_allocated(0)
    line = Executor(problem).run(placement, num_microbatches=6)
    found = float(line.peak_bytes[1] - before) / 2**20
    return beside(replace(problem, num_microbatches=6), placement, found)


def beside(problem: Problem, placement: np.ndarray, found: float) -> dict[str, float]:
    """The predicted peak of a GPU beside the one that was found, in MiB.

    It is off by a part of what was found, or of a MiB where that is less.
    """
    predicted = float(simulate(problem, placement).peak_bytes[1]) / 2**20
    off = (predicted - found) / max(found, 1.0)
    return {"predicted_mib": predicted, "allocator_mib": found, "predicted_off": off}


def memory(b: Bench) -> None:
    """Models twice as large as the memory that the GPU may use."""
    with b.item("copies to the GPU"):
        _copies(b)
    with b.item("measured in parts"):
        _in_parts(b)
    width, layers = (128, 6) if b.emulated else (2048, 8)
    shape = {"tables": 3, "rows": 20_000, "batch": 16} if b.emulated else {
        "tables": 26, "rows": 100_000, "batch": 512}  # fmt: skip
    decoder = Decoder(layers, width).eval()
    few, many = (1, 16), (1, 32 if b.emulated else 256)
    models: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "decoder, few tokens": lambda: (decoder, torch.randn(*few, width)),
        "dlrm": lambda: load("dlrm", dim=64, lookups=1, **shape),
        "decoder, many tokens": lambda: (decoder, torch.randn(*many, width)),
    }
    for i, (name, make) in enumerate(models.items()):
        with b.item(name, b.part_s(len(models) - i)):
            _capped(b, name, *make())


def _copies(b: Bench) -> None:
    """GB/s to the GPU of what is pinned, and of what is not: staged by us, in whole or in parts."""
    x, threads = torch.ones(2**18 if b.emulated else 2**24), torch.get_num_threads()
    there, pin = x.to(b.gpu), pinned(x)
    parts = [*zip(there.chunk(64), pin.chunk(64), x.chunk(64), strict=True)]
    ways: dict[str, Callable[[], Any]] = {
        "pinned": lambda: there.copy_(pin, non_blocking=True),
        "pageable": lambda: there.copy_(x),
        "staged": lambda: there.copy_(pin.copy_(x), non_blocking=True),
        "in_parts": lambda: [a.copy_(p.copy_(y), non_blocking=True) for a, p, y in parts],
    }
    for count in (1, 2, threads):
        torch.set_num_threads(count)
        took = {
            way: timed(lambda c=call: (c(), torch.cuda.synchronize()), 3)
            for way, call in ways.items()
        }
        b.emit(
            f"copies to the GPU, {count} threads",
            **{w: x.nbytes / s * 1e-9 for w, s in took.items()},
        )
    torch.set_num_threads(threads)


def _in_parts(b: Bench) -> None:
    """A model that the GPU cannot hold is measured all the same, and a plan of it runs."""
    width = 1024 if b.emulated else 4096
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).eval()
    inputs = torch.randn(8, width)
    graph = capture(module, inputs, name="parts")
    with memory_of(b, 0.6 * bytes_of(module)) as cluster:
        profile = b.measured("parts", graph, cluster, 1, calibrate=False)
        problem = Problem(graph, cluster, profile, num_microbatches=1)
        solution = planners.load("heft")(problem)
        with Runner(graph, cluster, solution.placement) as runner:
            off = error(runner(inputs), expected_of(module, [inputs])[0][0][0])
    parts = profile.provenance.get("in_parts")
    used = float((solution.placement == 1).mean())
    b.emit("measured in parts", parts=str(parts), error=off, on_gpu=used, ok=off < 1e-2)


def forget(graph: OpGraph | None = None) -> None:
    """The GPU's memory is free: of a graph's parameters, of what PyTorch's allocator keeps.

    And of cuBLAS' workspaces, 32 MiB for each thread and stream that has launched.
    """
    if graph is not None:
        weights.forget_others(torch.device("cuda:0"), graph.program, set())
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextmanager
def memory_of(b: Bench, num_bytes: float, share: float = 0.85) -> Iterator[Cluster]:
    """The GPU can allocate so much, and is promised less: blocks, and libraries' workspaces."""
    cpu, card = b.cluster.devices
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()  # accelerate leaves modules that hold themselves
    forget()
    torch.cuda.set_per_process_memory_fraction(num_bytes / total)
    held = torch.cuda.memory_allocated() / 2**20  # of what should have gone
    b.emit("memory that is held", held_mib=held, allowed_mib=num_bytes / 2**20)
    workspaces = 0 if b.emulated else 2**26  # of the calling thread and the one that launches
    promised = max(1, int(share * num_bytes) - workspaces)
    try:
        yield Cluster("capped", (cpu, replace(card, memory_bytes=promised)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _capped(b: Bench, name: str, module: nn.Module, inputs: Any) -> None:
    """One model: measured without the cap, which would take longer; then all ways under it."""
    graph, size = capture(module, inputs, name=name), bytes_of(module)
    key = name.replace(", ", "_").replace(" ", "_")
    profile = b.measured(key, graph, b.cluster, 1, calibrate=False)
    streaming = with_streaming(b.cluster)  # whose copies are measured with memory of their own
    expected = [x.clone() for x in _tensors_of(module, inputs)]
    ways: dict[str, float] = {}
    facts: dict[str, Any] = {}
    forget(graph)
    with memory_of(b, 0.5 * size) as cluster:
        more = replace(streaming, devices=(*cluster.devices, streaming.devices[2]))
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
            forget(graph)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with (
                b.item(f"{name}, {way}", 30),
                Runner(graph, more, placement, priority=problem.priority) as runner,
            ):
                args, kwargs = split_inputs(inputs)
                got = pytree.tree_leaves(runner(*args, **kwargs))
                off = max(error(x, y) for x, y in zip(got, expected, strict=True))
                facts[f"{way}_error"] = off
                ways[f"{way}_ms"] = call_seconds(runner, inputs, 3) * 1e3
            if way == "plan":
                found = (torch.cuda.max_memory_allocated() - before) / 2**20
                facts |= beside(problem, placement, found)
        forget(graph)
        if isinstance(module, Decoder):
            with b.item(f"{name}, streamed", 30):
                call, kept = streamed(module, inputs, b.gpu)
                ways["streamed_ms"] = timed(call, 5) * 1e3
                facts |= {"streamed_error": error(call(), expected[0]), "streamed_kept": kept}
            call = None
        forget()
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


def bytes_of(module: nn.Module) -> int:
    return sum(x.nbytes for x in module.state_dict().values())


def _tensors_of(module: nn.Module, inputs: Any) -> list[Tensor]:
    args, kwargs = split_inputs(inputs)
    with torch.no_grad():
        return [x for x in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(x, Tensor)]


def training(b: Bench) -> None:
    """Steps on the GPU beside plain PyTorch's there; and with memory for half of the activations.

    How far gradients are from float64's is compared with how far plain PyTorch's are: rounding
    alone makes 2 % of those of an untrained ResNet-50.
    """
    cluster, (module, inputs, _) = b.cluster, b.model("resnet_tiny" if b.emulated else "resnet50")
    module = copy.deepcopy(module).train()
    inputs = pytree.tree_map(lambda x: torch.randn(8, *x.shape[1:]), inputs)
    gpu = torch.device("cpu") if b.emulated else b.gpu  # whose tensors autograd does not know
    example, begin = (moved(inputs, gpu), None), copy.deepcopy(module.state_dict())
    with tf32(False):
        exact, mine = (loss_and_gradients(module, inputs, gpu, x) for x in ("double", "float"))
    allowed = max(4 * apart(mine, exact), 1e-5)

    def row(name: str, graph: OpGraph, where: Cluster, placement: np.ndarray, **facts: Any) -> None:
        def trainer() -> Trainer:
            module.load_state_dict(begin)
            fresh = torch.optim.AdamW(module.parameters(), lr=1e-3)
            found = Trainer(graph, where, placement, fresh, max_in_flight=2)
            found.runner.cuda_graphs = "graphs" in name
            return found

        with tf32(False), trainer() as checked:
            losses = checked.accumulate([example] * 4)
            named = checked.gradients()
            ours = [named[k].double().flatten().cpu() for k, _ in module.named_parameters()]
            facts["error"] = apart((float(losses[-1]), torch.cat(ours)), exact)
            facts["not_graphed"] = ", ".join(checked.runner.not_graphed.values())
        with trainer() as stepping:
            stepping.step([example] * 2)
            torch.cuda.synchronize()
            facts["kept_mib"] = torch.cuda.memory_allocated() / 2**20
            torch.cuda.reset_peak_memory_stats()
            step_s = timed(lambda: stepping.step([example] * 2), times if placement.all() else slow)
            facts["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        sizes.update({name: (facts["kept_mib"], facts["peak_mib"])})
        facts |= {"on_gpu": float((placement == 1).mean()), "allowed": allowed}
        b.emit(name, step_ms=step_s * 1e3, **facts, ok=facts["error"] <= allowed)

    sizes, times = dict[str, tuple[float, float]](), 1 if b.emulated else 5
    slow = min(times, 2)  # where CPU cores take part
    with b.item("eager"):
        step_s = timed(eager_step(module, example, gpu), times)
        b.emit("eager", step_ms=step_s * 1e3, error=apart(mine, exact))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    graph = capture(
        module, (inputs, None), mode="training", loss=mean_of_squares, optimizer=optimizer
    )
    for name in ("all on the GPU", "as CUDA graphs"):
        with b.item(name):
            row(name, graph, cluster, all_on(graph, 1))
    kept, peak = sizes["all on the GPU"]
    room = (kept + 0.5 * (peak - kept)) * 2**20
    with b.item("recomputed, half of the activations"), memory_of(b, room) as capped:
        kinds = ("ResNetEmbeddings", "ResNetBottleNeckLayer")
        blocks = [k for k, x in module.named_modules() if type(x).__name__ in kinds]
        again = recompute(graph, blocks)
        facts = {"room_mib": room / 2**20}
        row("recomputed, half of the activations", again, capped, all_on(again, 1), **facts)
    with b.item("CPU and GPU, half of the activations"):
        profile = b.measured("training", graph, cluster, 1, calibrate=False)
        for share in (0.85, 0.7, 0.55):  # as who plans would who is told that memory is short
            with memory_of(b, room, share) as capped:
                problem = Problem(graph, capped, profile, objective="period", num_microbatches=2)
                placement = planners.load("best_of", seconds=b.planning_s)(problem).placement
                predicted = float(simulate(problem, placement).peak_bytes[1]) / 2**20
                facts = {"room_mib": room / 2**20, "share": share, "predicted_mib": predicted}
                try:
                    row("CPU and GPU, half of the activations", graph, capped, placement, **facts)
                except torch.OutOfMemoryError as failure:
                    said_so = " ".join(str(failure).split())[:300]
                    b.emit("CPU and GPU, out of memory", said=said_so, **facts)
                else:
                    return
        raise StudyError("no placement of a planner runs within the memory")


def mean_of_squares(outputs: Any, target: Any = None) -> Tensor:
    """A loss that is not the difference of large numbers."""
    return mean_of_outputs([x.square() for x in tensors_of(outputs)])


def loss_and_gradients(
    module: nn.Module, inputs: Any, device: torch.device, dtype: str
) -> tuple[float, Tensor]:
    """Plain PyTorch's, the gradients of all parameters as one vector of float64."""
    plain = getattr(copy.deepcopy(module).to(device), dtype)()
    args, kwargs = split_inputs(pytree.tree_map(lambda x: getattr(x.to(device), dtype)(), inputs))
    loss = mean_of_squares(plain(*args, **kwargs))
    loss.backward()
    gradients = [x.grad.double().flatten().cpu() for x in plain.parameters()]  # type: ignore[union-attr]
    return loss.item(), torch.cat(gradients)


def apart(found: tuple[float, Tensor], exact: tuple[float, Tensor]) -> float:
    """How far gradients are off; or the loss, of which one is 1e-3 as much."""
    of_loss = abs(found[0] / exact[0] - 1)
    return max(float((found[1] - exact[1]).norm() / exact[1].norm()), 1e3 * of_loss)


def eager_step(module: nn.Module, example: Any, device: torch.device) -> Callable[[], Any]:
    """Plain PyTorch's step of two micro-batches."""
    plain = copy.deepcopy(module).to(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    args, kwargs = split_inputs(example[0])

    def step() -> list[float]:
        losses = [mean_of_squares(plain(*args, **kwargs)) / 2]
        losses[0].backward()
        losses.append(mean_of_squares(plain(*args, **kwargs)) / 2)
        losses[1].backward()
        optimizer.step()
        optimizer.zero_grad()
        return [x.item() for x in losses]

    return step


def policy(b: Bench) -> None:
    """Steps per second of PPO, with the network on the CPU (one core) and on the GPU.

    Episodes are played on the CPU in any case: of a small network's training about a third.
    """
    for hidden, num_ops in ((16, 8),) if b.emulated else ((64, 64), (256, 512)):
        rates, name = {}, f"hidden {hidden}, {num_ops} operators"
        for device in ("cpu",) if b.emulated else ("cpu", "cuda"):
            with b.item(f"{name}, {device}", 20):
                steps_per_s(device, hidden, 1)  # contexts, kernels
                rates[f"{device}_steps_per_s"] = steps_per_s(device, hidden, 2, num_ops)
        ratio = _ratio(rates.get("cuda_steps_per_s"), rates.get("cpu_steps_per_s"))
        b.emit(name, **rates, gpu_over_cpu=ratio)


def steps_per_s(device: str, hidden: int, updates: int, num_ops: int = 64) -> float:
    """Of a training with so many updates on a graph of so many operators and two devices."""
    from agents.config import TrainConfig
    from agents.encoder import NetworkConfig
    from agents.training import train as learn

    ops, rng = np.arange(num_ops), np.random.default_rng(0)
    edges = [(int(rng.integers(max(0, j - 6), j)), j) for j in ops[1:].tolist()]
    sizes = rng.integers(1, 100, len(ops))
    graph = OpGraph.build("random", [f"op{n}" for n in ops], ops, sizes, edges)
    seconds = rng.uniform(1e-3, 1e-2, (len(ops), 2))
    cluster = Cluster("two", (Device("a", "acc"), Device("b", "acc")))
    problem = Problem(graph, cluster, Profile(("a", "b"), seconds, 0 * seconds))
    network = NetworkConfig(hidden=hidden)
    options, steps = {"num_envs": 16, "num_checks": 1, "cold": True}, updates * 16 * num_ops
    config = TrainConfig(total_steps=steps, device=device, network=network, **options)
    began = time.perf_counter()
    learn([problem], config=config)
    return steps / (time.perf_counter() - began)


def energy(b: Bench) -> None:
    """Joules of the GPU per micro-batch by NVML: at rest with a context, and at work."""
    meter, *_ = power.nvml_meters()
    cluster, key = b.cluster, "tiny_mlp" if b.emulated else "resnet50"
    _, inputs, graph = b.model(key)
    profile = b.measured(key, graph, cluster, repeats=1, calibrate=False)
    problem = Problem(graph, cluster, profile, objective="period", num_microbatches=16)
    plan = planners.load("best_of", seconds=b.planning_s)(problem).placement
    there, long_s = moved(inputs, b.gpu), 0.2 if b.emulated else 1.5
    before, began = meter.read_j(), time.perf_counter()
    time.sleep(long_s)
    idle_w = meter.since_j(before) / (time.perf_counter() - began)
    b.emit("rest, with a context", watts=idle_w, meter=meter.name)
    ways = {"CPU": all_on(graph, 0), "GPU": all_on(graph, 1), "GPU, CUDA graphs": all_on(graph, 1)}
    if uses(plan) == "both":  # else it is one of these
        ways["plan"] = plan
    for name, placement in ways.items():
        stays = "device" if placement.all() else "host"
        with b.item(name), Runner(graph, cluster, placement, outputs=stays) as runner:
            runner.cuda_graphs = name != "GPU"
            given = there if placement.all() else inputs
            list(runner.stream([given] * 8))
            before, began = meter.read_j(), time.perf_counter()
            count, until = 0, began + long_s
            while time.perf_counter() < until:
                count += sum(1 for _ in runner.stream([given] * (64 if placement.all() else 16)))
            joules, took = meter.since_j(before), time.perf_counter() - began
            b.emit(
                name,
                watts=joules / took,
                gpu_j_per_microbatch=joules / count,
                ms=took / count * 1e3,
                count=count,
            )
    b.emit("plan", uses=uses(plan))


# --- processes -----------------------------------------------------------------------------------

Section = Callable[[Bench], None]
SECTIONS: dict[str, Section] = {
    **{f"correct_{i + 1}": partial(correct, part=i) for i in range(len(CHECKED))},
    "train": train,
    "facts": facts,
    "errors": errors,
    "index": index,
    "kernels": kernels,
    "profile": each(tuple(PROFILED), profile),
    "plans": each(tuple(PROFILED), plans),
    "memory": memory,
    "training": training,
    "energy": energy,
    "policy": policy,
    "fidelity": each(PREDICTED, fidelity),
}
# Sections that run beside each other, as nothing is timed in them; and their parts of the time. The
# last one measures as often as what the others have left over allows.
TIMED = {
    "profile": 36, "plans": 74, "memory": 38, "training": 30, "energy": 12, "policy": 15,
    "fidelity": 50,
}  # fmt: skip
ROUNDS: tuple[tuple[tuple[str, ...], float], ...] = (
    (tuple(name for name in SECTIONS if name not in TIMED), 40),
    *(((name,), part) for name, part in TIMED.items()),
)


def section(name: str, limit_s: float, options: argparse.Namespace, **known: Any) -> None:
    """One section, in a process of its own."""
    until = time.perf_counter() + limit_s * 0.95
    bench = _bench(options, name, until=until, **known)
    with ExitStack() as stack:
        traces = stack.enter_context((options.out / "traces.txt").open("a", encoding="utf-8"))
        stack.callback(faulthandler.disable)
        faulthandler.enable(traces)
        # Reading the frames of running threads may crash: not after the section has ended.
        stack.callback(faulthandler.cancel_dump_traceback_later)
        faulthandler.dump_traceback_later(limit_s * 0.98, exit=False, file=traces)
        if options.emulated:
            sys.path.insert(0, str(ROOT / "tests"))
            import emulated_gpu

            stack.enter_context(emulated_gpu.emulated())
            replaces = torch.__future__.set_overwrite_module_params_on_conversion
            stack.callback(replaces, False)
            replaces(True)
        ended = False
        with bench.item(name, limit_s * 0.95):
            SECTIONS[name](bench)
            ended = True
        if not ended:
            raise SystemExit(1)


def child(name: str, limit_s: float, options: argparse.Namespace, **known: Any) -> None:
    """The process of a section: with a group of its own, which is stopped together."""
    os.setpgid(0, 0)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // known["part"][1]))
    section(name, limit_s, options, **known)
    sys.stdout.flush()
    os._exit(0)  # after a kernel's assertion nothing else ends well


def run(options: argparse.Namespace) -> int:
    """All sections, then the table.

    Raises:
        StudyError: a section that is none.
    """
    if unknown := set(options.sections) - set(SECTIONS):
        raise StudyError(f"--sections {sorted(unknown)}: there are {list(SECTIONS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    options.work = Path(tempfile.mkdtemp(prefix="placement-gpu-"))
    torch.set_num_threads(1)  # threads do not survive a fork
    wanted = options.sections or list(SECTIONS)
    rounds = [([n for n in names if n in wanted], part) for names, part in ROUNDS]
    models: dict[str, Model] = {}
    prepare(models, ("bert_tiny",), options)  # libraries are imported once, not by every section
    left = options.seconds - (time.perf_counter() - options.began) - 3
    scale = left / sum(part for names, part in rounds if names)
    rounds = [(names, scale * part) for names, part in rounds if names]
    for i, (names, limit_s) in enumerate(rounds):
        # What earlier sections have left over, and not what later ones need.
        later = sum(limit_s for _, limit_s in rounds[i + 1 :])
        left = options.seconds - (time.perf_counter() - options.began)
        limit_s = min(left - 3, max(limit_s, left - later))
        if limit_s < 5:
            for name in names:
                _emit(options, name, status="no time was left")
            continue
        at, parts, running = time.perf_counter(), min(len(names), BESIDE), {}
        for k, name in enumerate(names):
            known = {"models": models, "part": (k % BESIDE, parts)}
            running[name] = FORK.Process(target=child, args=(name, limit_s, options), kwargs=known)
            with warnings.catch_warnings():  # of threads of libraries: these are not used any more
                warnings.simplefilter("ignore", DeprecationWarning)
                running[name].start()
        if i == 0 and len(rounds) > 1:  # for the sections to come, while these check
            prepare(models, ("tiny_mlp",) if options.emulated else PROFILED, options)
            warm_up(options.emulated, training=False)  # that would ask CUDA for something
            threads = len(os.listdir("/proc/self/task"))
            _bench(options, "prepare").emit("models and kernels", threads=threads)
        watched(running, at, limit_s, options)
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
        # transformers asks this about every attention mask, and CUDA begins.
        with patch.object(torch.cuda, "is_current_stream_capturing", lambda: False):
            try:
                models[key] = models[key] if key in models else captured(key)
            except Exception as failure:
                _emit(options, "prepare", status=f"{key}: {type(failure).__name__}: {failure}")


def watched(
    running: Mapping[str, Any], at: float, limit_s: float, options: argparse.Namespace
) -> None:
    """Wait for processes begun at ``at``, and stop what is late."""
    for name, process in running.items():
        process.join(max(0.0, at + limit_s - time.perf_counter()))
        status = {None: "stopped", 0: "done"}.get(process.exitcode, f"exit code {process.exitcode}")
        if process.exitcode is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        _emit(options, name, status=status, seconds=time.perf_counter() - at)
    for process in running.values():
        process.join(5)  # a driver may keep one that was killed


def _bench(options: argparse.Namespace, name: str, **known: Any) -> Bench:
    return Bench(options.out, options.work, name, options.emulated, began=options.began, **known)


def _emit(options: argparse.Namespace, name: str, **facts: Any) -> None:
    _bench(options, name).emit("section", **facts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--sections", nargs="*", default=[], metavar="NAME", help="only these")
    parser.add_argument("--seconds", type=float, default=LONGEST_S, help="in all: 470")
    parser.add_argument("--emulated", action="store_true", help="tiny models, no real GPU")
    options = parser.parse_args(argv)
    options.out, options.began = options.out.resolve(), BEGAN
    # Or the first question for a GPU would be one that a forked process cannot ask again.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return launch(lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
