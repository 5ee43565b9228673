"""Runs of studies: under a limit, in turns, on two cores; and kernels that are warm."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.study import StudyError, say
from placement import planners
from placement.cluster import Cluster
from placement.graph import OpGraph
from placement.objective import Objective
from placement.problem import Problem
from placement.search.planner import options_of
from placement.testing import small_problems

Floats = NDArray[np.float64]
GIB = 2**30
# Small problems: memory is never too small, so that orders are searched; and it may be.
WARM = ("unlike", "tight")
SURE_ROUNDS = 3  # which every way has, whatever the time
WARM_S = 0.2  # enough for a planner to call all its kernels

# --- runs under a limit --------------------------------------------------------------------------

Status = str  # ok, refused, failed, out of time, out of memory, killed


@dataclass(frozen=True)
class Run:
    """How a call in a process of its own ended.

    Attributes:
        status: ``ok``; ``refused``, it raised a ``ValueError``; ``failed``, another error;
            ``out of time``; ``out of memory``; ``killed``, the process ended without an answer.
        value: what it returned, None unless ``ok``.
        seconds: it took.
        note: the error's text.
    """

    status: Status
    value: Any
    seconds: float
    note: str = ""


def limited(
    call: Callable[[], Any],
    seconds: float,
    memory_bytes: int | None = None,
    processor_time: bool = False,
) -> Run:
    """Run ``call`` in a forked process on one core, for so long and with so much memory.

    Whatever happens to that process, this one goes on. ``memory_bytes`` limits its address
    space, which is larger than what is resident. With ``processor_time`` the clock of that process
    is its processor time: a budget of seconds in ``call`` is the same work whatever else the
    machine does meanwhile. ``seconds`` are always those of the wall clock.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, call, memory_bytes, processor_time))
    began = time.perf_counter()
    process.start()
    send.close()
    try:
        if not receive.poll(seconds):
            return Run("out of time", None, seconds, note=f"ended after {seconds:g} s")
        try:
            return Run(*receive.recv())
        except EOFError:
            process.join()
            code = process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            took = time.perf_counter() - began
            return Run("killed", None, took, note=f"the process ended by {how}")
    finally:
        process.kill()
        process.join()
        receive.close()


def _child(
    send: Any, call: Callable[[], Any], memory_bytes: int | None, processor_time: bool
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers it
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if memory_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    gc.freeze()  # the parent's objects are not the call's garbage, and to look at them takes long
    if processor_time:  # this process runs one call and ends: nobody else reads its clock
        time.perf_counter = time.process_time  # type: ignore[assignment]
    value, status, note = None, "ok", ""
    began = time.perf_counter()
    try:
        value = call()
    except MemoryError as error:
        status, note = "out of memory", str(error)
    except ValueError as error:
        status, note = "refused", str(error)
    except Exception as error:  # a study reports mistakes, ours included, and goes on
        status, note = "failed", f"{type(error).__name__}: {error}"
    send.send((status, value, time.perf_counter() - began, note))


# --- runs in turns -------------------------------------------------------------------------------


def in_turns(
    ways: Mapping[str, Callable[[], Any]],
    rounds: int,
    warm_up: int = 1,
    *,
    guard: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    enough_s: float = np.inf,
    until: float = np.inf,
) -> dict[str, Floats]:
    """What each way returns in every round, float64 ``[rounds, ...]``; all run in every round.

    So whatever else the machine does in a round concerns all of them. The first ``warm_up`` rounds
    do not count. Every other round is backwards: nobody always runs after the same.

    Args:
        guard: a context for each run of a way, by its name. Where it swallows an exception, the way
            has no more turns.
        enough_s: nor has one that has taken so long in all.
        until: from then on (``time.perf_counter``) there are ``SURE_ROUNDS`` at most.
    """
    values: dict[str, list[Any]] = {name: [] for name in ways}
    spent_s = dict.fromkeys(ways, 0.0)
    for r in range(-warm_up, rounds):
        if r >= SURE_ROUNDS and time.perf_counter() > until:
            break
        for name, way in [*ways.items()][:: -1 if (r + warm_up) % 2 else 1]:
            if spent_s[name] < enough_s:
                before_s, began = spent_s[name], time.perf_counter()
                spent_s[name] = np.inf  # and so it stays if it fails
                with guard(name):
                    value = way()
                    spent_s[name] = before_s + time.perf_counter() - began
                    if r >= 0:
                        values[name].append(value)
    return {name: np.array(v) for name, v in values.items() if v}


def ended(stream: Iterable[Any]) -> list[float]:
    """When each item of a stream ended."""
    return [time.perf_counter() for _ in stream]


def seconds_per_item(
    ends_of: Callable[[int], Sequence[float]], count: int, num_phases: int = 1
) -> float:
    """Steady seconds per item of a stream, ``ends_of`` so many; its first quarter does not count.

    Whole rounds of the phases do, at least ``count`` items with that quarter.
    """
    skip = count // 4
    counted = -(-(count - 1 - skip) // num_phases) * num_phases
    ends = ends_of(skip + 1 + counted)
    return (ends[-1] - ends[skip]) / counted


def two_cores(name: str = "two") -> Cluster:
    """The first two cores of this machine, each a device.

    Raises:
        StudyError: it has one.
    """
    cluster = replace(Cluster.detect(max_cpu_devices=2, gpus=False), name=name)
    if cluster.num_devices < 2:
        raise StudyError("this study needs two cores, and this process may use one; see taskset")
    return cluster


def measured_problem(graph: OpGraph, repeats: int = 10, **options: Any) -> Problem:
    from placement.costs.measure import measure

    cluster = two_cores()
    return Problem(graph, cluster, measure(graph, cluster, repeats=repeats), **options)


# --- planners ------------------------------------------------------------------------------------


def warm(names: Sequence[str], objectives: Sequence[Objective] = tuple(Objective)) -> None:
    """Compile, or load, every kernel now: processes that are forked later inherit them."""
    problems = [p for p in small_problems()[::2] if p.graph.name in WARM]
    for problem, objective, name in itertools.product(problems, objectives, names):
        try:
            planner = planners.load(name)
            options = {"seconds", "lp_seconds"} & options_of(planner)
            short = replace(planner, **dict.fromkeys(options, WARM_S)) if options else planner
            short(problem.with_objective(objective))
        except Exception as error:  # will come up again where it is reported
            say(f"{name} cannot do {objective}: {error}")
