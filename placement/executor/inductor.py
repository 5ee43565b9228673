"""Which kernels Inductor makes of a graph, and how long each takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch.autograd import profiler_legacy

from placement.executor.compiled import (
    Recipe,
    build,
    called,
    compiled_alone,
    compiling,
    form_of,
    graph_of,
    is_worth,
    reads_channels_last,
    recipe,
    values_of,
)
from placement.program import Program, Ref, leaves_of
from placement.tools.threads import torch_threads

_WARM, _CALLS, _LONG_S = 2, 15, 2.0  # that are timed, but none begins after so long


def kernels_of(program: Program, runs: Sequence[Sequence[int]] | None = None) -> list[set[int]]:
    """Operators by the kernel that Inductor makes of them; of one in several the first counts.

    Args:
        runs: operators that are compiled together, where they are enough; None: all are.

    Raises:
        Exception: Inductor refuses all of it.
    """
    if runs is None:
        runs = [range(len(program.steps))]
    else:
        runs = [run for run in runs if is_worth(program, run, ())]
    recipes = _recipes(program, runs)
    values = values_of(program, {t for own in recipes for t in own.reads})
    params = {p: x.detach() for p, x in enumerate(program.params)}
    known: dict[tuple[str, ...], list[set[int]]] = {}  # of runs that are alike, by their places
    found: list[set[int]] = []
    refused: Exception | None = None
    for own in recipes:
        inputs = [*(values[t] for t in own.reads), *(params[p] for p in own.params)]
        key = own.text, *map(form_of, inputs)
        if key not in known:
            number, kernels = {op: i for i, op in enumerate(own.ops)}, list[set[int]]()
            try:
                kernels = _kernels_of(graph_of(program, own, params, {}, frozen=False), inputs)
            except Exception as error:  # e.g. of an operator that it does not know
                refused = error
            known[key] = [{number[op] for op in ops} for ops in kernels]
        found += [{own.ops[i] for i in places} for places in known[key]]
    if refused is not None and not found:
        raise refused
    return found


def kernel_seconds(program: Program, threads: int) -> NDArray[np.float64]:
    """``[N]``: seconds of the kernels of a graph, compiled as one frozen run, at their last
    operators.

    Measured on the calling thread and its ``threads``, inside of the run: there is nothing between
    kernels that a part of the run would have at its ends.

    Raises:
        Exception: Inductor refuses the graph.
        RuntimeError: other kernels ran than were scheduled.
    """
    from torch._inductor import ir, scheduler
    from torch._inductor.codegen import cpp

    (own,) = _recipes(program, [range(len(program.steps))])
    values = values_of(program, set(own.reads), reads_channels_last(program))
    params = {p: x.detach() for p, x in enumerate(program.params)}
    graph = graph_of(program, own, params, {}, frozen=True)
    is_loop, last = list[bool](), list[int]()  # of each kernel: Inductor's own; its last operator
    extern, flush = scheduler.Scheduler.codegen_extern_call, cpp.CppScheduling.flush

    def noted(loop: bool, nodes: Sequence[Any]) -> None:
        is_loop.append(loop)
        own = {op for node in nodes for op in _ops_of(node)}
        last.append(max(own, default=last[-1] if last else 0))

    def called_outside(self: Any, node: Any) -> None:
        if not isinstance(node.node, ir.MultiOutput):  # which takes a result apart
            noted(False, [node])
        extern(self, node)

    def flushed(self: Any) -> None:
        if self.kernel_group.scheduled_nodes:
            noted(True, self.kernel_group.scheduled_nodes)
        flush(self)

    with torch_threads(threads):
        with (
            mock.patch.object(scheduler.Scheduler, "codegen_extern_call", called_outside),
            mock.patch.object(cpp.CppScheduling, "flush", flushed),
        ):
            inputs = [values[t] for t in own.reads]
            built = build(graph, inputs, threads, True, **{"cpp.enable_kernel_profile": True})
        rounds: list[list[float]] = []
        began = time.perf_counter()
        while len(rounds) < _WARM + _CALLS:
            # The profiler that came after it writes two lines to the terminal each time.
            with profiler_legacy.profile() as seen, torch.inference_mode():
                called(built.entry, built.operands)
            events = sorted(seen.function_events, key=lambda e: e.time_range.start)
            kernels = [e for e in events if "_cpp_" in e.name or e.name.startswith("aoti_torch_")]
            if ["_cpp_" in e.name for e in kernels] != is_loop:
                raise RuntimeError(f"{len(kernels)} kernels ran, {len(is_loop)} were scheduled")
            rounds.append([e.time_range.elapsed_us() * 1e-6 for e in kernels])
            if len(rounds) > _WARM and time.perf_counter() - began > _LONG_S:
                break
    seconds = np.zeros(len(program.steps))
    np.add.at(seconds, last, np.median(rounds[_WARM:], axis=0))
    return seconds


def _recipes(program: Program, runs: Sequence[Sequence[int]]) -> list[Recipe]:
    """Those of runs that hand on what others read."""
    readers: dict[int, set[int]] = {}
    for n, step in enumerate(program.steps):
        for x in leaves_of((step.args, step.kwargs)):
            if isinstance(x, Ref):
                readers.setdefault(x.tensor, set()).add(n)
    leave = {x.tensor for x in program.output_leaves if isinstance(x, Ref)}
    recipes = []
    for run in runs:
        made = [t for op in run for t in program.steps[op].outputs]
        made = [t for t in made if t in leave or readers.get(t, set()) - set(run)]
        recipes.append(recipe(program, run, made, {}))
    return recipes


def _kernels_of(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> list[set[int]]:
    """Operators of a graph by kernel."""
    from torch._inductor import scheduler

    found: list[set[int]] = []

    class Enough(Exception):
        """Nothing has to be compiled."""

    def seen(self: Any) -> None:
        taken: set[int] = set()
        for node in self.nodes:
            ops = _ops_of(node)
            if isinstance(node, scheduler.ExternKernelSchedulerNode) and ops:
                ops = {max(ops)}  # the others have made what it reads
            found.append(ops - taken)
            taken |= ops
        raise Enough

    options = {"cpp_wrapper": True, "fx_graph_cache": False, "compile_threads": 1}
    with compiling(), mock.patch.object(scheduler.Scheduler, "codegen", seen):
        try:
            compiled_alone(graph, inputs, options)
        except Exception:
            if not found:
                raise
    return [ops for ops in found if ops]


def _ops_of(node: Any) -> set[int]:
    """Operators that a node of Inductor's scheduler computes, and some that it reads."""
    origins = {x for part in node.get_nodes() if part.node for x in part.node.origins}
    return {x.meta["custom"]["op"] for x in origins if "op" in x.meta.get("custom", ())}
