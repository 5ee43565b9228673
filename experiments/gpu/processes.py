"""The sections, each in a process that is forked from this one, and what they have left over."""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import experiments.gpu
from experiments.gpu.bench import LONGEST_S, Bench
from experiments.gpu.checks import correct, errors, facts, index, kernels, train, warm_up
from experiments.gpu.learning import learning
from experiments.gpu.memory import memory, streaming
from experiments.gpu.models import CHECKED, PREDICTED, PROFILED, Model, captured
from experiments.gpu.pieces import one_matrix
from experiments.gpu.plans import compile_ahead, compiled, energy, plans
from experiments.gpu.predictions import each, fidelity, profile
from experiments.gpu.training import policy, training
from experiments.gpu_goals import table
from experiments.study import ROOT, StudyError, launch
from placement.executor import kernels as kernels_module
from placement.tools.files import write_atomic

# Into so many parts CPU cores are shared out at most. Of two sections with the same part, one has
# little to do.
BESIDE = 7
FORK = multiprocessing.get_context("fork")
SECTIONS: dict[str, Callable[[Bench], None]] = {
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
    **{f"ahead_{i + 1}": partial(compile_ahead, part=i) for i in range(len(PROFILED))},
    "compiled": each(tuple(PROFILED), compiled),
    "streaming": streaming,
    "pieces": one_matrix,
    "learning": learning,
}
# Parts of the time, by command. The last section measures as often as what the others have left
# over allows.
TIMED = {
    "profile": 55, "plans": 80, "memory": 40, "training": 26, "energy": 12, "policy": 15,
    "fidelity": 60,
}  # fmt: skip
MORE = {"compiled": 125, "streaming": 130, "pieces": 15, "learning": 85}
# These time nothing: they run beside each other, first.
AHEAD = tuple(name for name in SECTIONS if name.startswith("ahead"))
CHECKS = tuple(name for name in SECTIONS if name not in {*TIMED, *MORE, *AHEAD})


def rounds_of(more: bool, emulated: bool = False) -> list[tuple[tuple[str, ...], float]]:
    """Sections that run beside each other, and their part of the time; emulated: of all."""
    first, timed = (("facts", "kernels", *AHEAD), MORE) if more else (CHECKS, TIMED)
    if emulated and not more:
        first, timed = (*CHECKS, AHEAD[0]), TIMED | MORE
    return [(first, 55 if more else 40), *(((name,), part) for name, part in timed.items())]


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

            stack.enter_context(emulated_gpu.emulated(library_bytes=2**15))
            # What compiles for a real one: a graph is run as it is.
            for target, of, stand_in in (
                (kernels_module, "inductor", lambda graph, inputs: graph),
                (torch, "compile", lambda module, **_: module),
                (torch.compiler, "cudagraph_mark_step_begin", lambda: None),
            ):
                stack.enter_context(patch.object(target, of, stand_in))
            # Or ``module.to`` would put its tensors, which are of another class, into parameters.
            set_overwrite = torch.__future__.set_overwrite_module_params_on_conversion
            stack.callback(set_overwrite, False)
            set_overwrite(True)
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

    Sections are forked from this process. While the first of them check, it captures the models
    that others time and loads the planners' kernels. It never asks CUDA for anything: a process
    that has cannot be forked.

    Raises:
        StudyError: a section that is none.
    """
    there = [name for names, _ in rounds_of(options.more, options.emulated) for name in names]
    if unknown := set(options.sections) - set(there):
        raise StudyError(f"--sections {sorted(unknown)}: there are {there}")
    options.out.mkdir(parents=True, exist_ok=True)
    options.work = Path(tempfile.mkdtemp(prefix="placement-gpu-"))
    torch.set_num_threads(1)  # threads do not survive a fork
    models: dict[str, Model] = {}
    prepare(models, ("bert_tiny",), options)  # libraries are imported once, not by every section
    rounds = _rounds(options)
    for i, (names, limit_s) in enumerate(rounds):
        # What earlier sections have left over, and not what later ones need.
        later = sum(limit_s for _, limit_s in rounds[i + 1 :])
        left = _left_s(options)
        limit_s = min(left - 3, max(limit_s, left - later))
        if limit_s < 5:
            for name in names:
                _emit(options, name, status="no time was left")
            continue
        began, running = time.perf_counter(), _started(names, limit_s, models, options)
        if i == 0 and len(rounds) > 1:  # for the sections to come, while these check
            prepare(models, ("tiny_mlp",) if options.emulated else PROFILED, options)
            warm_up(options.emulated, training=False)  # that would ask CUDA for something
            threads = len(os.listdir("/proc/self/task"))
            _bench(options, "prepare").emit("models and kernels", threads=threads)
        watched(running, began, limit_s, options)
        with zipfile.ZipFile(options.work / "profiles", "w") as file:
            for path in sorted((*options.work.glob("*.npz"), *options.work.glob("*.json.gz"))):
                file.write(path, path.name)
        shutil.copy(options.work / "profiles", options.out / "profiles.zip")
    shutil.rmtree(options.work, ignore_errors=True)
    text = table((options.out / "gpu.jsonl").read_text(encoding="utf-8").splitlines())
    write_atomic(options.out / "gpu.md", text)
    print(text)
    return 0


def _left_s(options: argparse.Namespace) -> float:
    return options.seconds - (time.perf_counter() - options.began)


def _rounds(options: argparse.Namespace) -> list[tuple[list[str], float]]:
    """Those of the sections that are wanted, with seconds of the time that is left."""
    wanted, every = options.sections or list(SECTIONS), rounds_of(options.more, options.emulated)
    rounds = [([name for name in names if name in wanted], part) for names, part in every]
    scale = (_left_s(options) - 3) / sum(part for names, part in rounds if names)
    return [(names, scale * part) for names, part in rounds if names]


def _started(
    names: Sequence[str], limit_s: float, models: dict[str, Model], options: argparse.Namespace
) -> dict[str, Any]:
    """The processes of sections that run beside each other."""
    running = {}
    for i, name in enumerate(names):
        known = {"models": models, "part": (i % BESIDE, min(len(names), BESIDE))}
        running[name] = FORK.Process(target=child, args=(name, limit_s, options), kwargs=known)
        with warnings.catch_warnings():  # of threads of libraries: these are not used any more
            warnings.simplefilter("ignore", DeprecationWarning)
            running[name].start()
    return running


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
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gpu", description=experiments.gpu.__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--sections", nargs="*", default=[], metavar="NAME", help="only these")
    parser.add_argument("--more", action="store_true", help="the second command")
    parser.add_argument("--seconds", type=float, default=LONGEST_S, help="in all: 470")
    parser.add_argument("--emulated", action="store_true", help="tiny models, no real GPU")
    options = parser.parse_args(argv)
    options.out, options.began = options.out.resolve(), time.perf_counter()
    # Or the first question for a GPU would be one that a forked process cannot ask again.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "3")  # of each section that compiles
    return launch(lambda: run(options))
