"""CUDA graphs: a run of operators is launched at once, instead of kernel by kernel.

A graph reads and writes the same memory in every replay, and micro-batches overlap. So what a run
reads is copied to where its graph reads it, and what it makes is copied from where the graph writes
it: to everybody else a run is what it was. What cannot be a graph is launched as before, by itself,
and ``Graphs.eager`` says why.

While one thread captures, PyTorch's random generator of that GPU is the graph's: what another
thread draws there, or replays, is refused. Graphs of this module take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from placement.executor.backend import TURN
from placement.executor.constants import is_known
from placement.executor.generated import Call, Generated
from placement.executor.share import Share
from placement.program import Param, Program, Ref, Step, leaves_of
from placement.tools.clock import nothing_collected

LEAST = 3  # kernels: copying what a shorter run reads and makes takes as many launches
_DEPENDS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
# Graphs whose capture has failed: PyTorch's allocators ask them for ever what is theirs.
_failed: list[Any] = []
_STREAMS: dict[torch.device, Any] = {}  # on which graphs are captured


class Graphs:
    """Those of one device.

    Attributes:
        eager: the first operator of each run that is no graph, and why not.
        captured: how many are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.eager: dict[int, str] = {}
        self.captured = 0
        self.pool: Any = None  # memory of all graphs: one runs at a time

    def of(
        self,
        program: Program,
        runs: Sequence[tuple[int, ...]],
        share: Share,
        generated: Generated,
        streamed: frozenset[int],
        known: Container[int] = (),
    ) -> Generated:
        """The runs of a ``fused`` share, replayed where that can be.

        Operators that are ``streamed`` read their parameters where they are this time. Those whose
        outputs are ``known`` launch nothing.
        """
        calls = dict(generated.calls)
        for run in runs:
            if not streamed.isdisjoint(run):
                self.eager[run[0]] = "parameters are copied from host memory meanwhile"
            elif why := _obstacle(program, run[0], set(), known):
                self.eager[run[0]] = why
            elif sum(launches(program.steps[op], known) for op in run) < LEAST:
                self.eager[run[0]] = f"fewer than {LEAST} operators that compute something"
            else:
                reads, makes = share.inputs[run[0]], share.outputs[run[0]]
                calls[run[0]] = Replayed(self, run[0], calls[run[0]], reads, makes)
        return replace(generated, calls=calls)


def pieces_of(
    program: Program, runs: Sequence[tuple[int, ...]], known: Container[int] = ()
) -> list[tuple[int, ...]]:
    """The runs, cut so that each operator that no graph can hold is by itself.

    Those of a training step are of functional kernels, and stay whole.
    """
    if program.gradients:
        return list(runs)
    pieces: list[list[int]] = []
    for run in runs:
        own: set[int] = set()  # tensors in memory that the piece has made
        closed = True
        for op in run:
            step = program.steps[op]
            if _obstacle(program, op, own, known):
                pieces.append([op])
                own, closed = set(), True
                continue
            if closed:
                pieces.append([])
            pieces[-1].append(op)
            closed = False
            read = {x.tensor for x in leaves_of((step.args, step.kwargs)) if isinstance(x, Ref)}
            held = any(isinstance(x, Param) for x in leaves_of((step.args, step.kwargs)))
            if not _may_alias(step.target) or (read <= own and not held):
                own.update(step.outputs)
    return [tuple(piece) for piece in pieces]


def _may_alias(target: Any) -> bool:
    """Whether what an operator makes may be in the memory of what it reads."""
    # Normalisation has the tag for the statistics that it may write.
    tagged = torch.Tag.maybe_aliasing_or_mutating in target.tags and "norm" not in str(target)
    return tagged or any(x.alias_info is not None for x in target._schema.returns)


def launches(step: Step, known: Container[int]) -> bool:
    """Whether an operator launches a kernel whatever it reads: no view, and nothing ``known``."""
    target = step.target
    if not isinstance(target, OpOverload):
        return True
    if is_known(step, known):
        return False
    return target._schema.is_mutable or not _may_alias(target)


def _obstacle(program: Program, op: int, own: set[int], known: Container[int]) -> str:
    """Why no graph can hold an operator, as far as that is known before it runs.

    It may write to the tensors ``own``, which its graph has made.
    """
    if program.gradients:
        return "the step draws random numbers" if program.is_random else ""
    step = program.steps[op]
    target = step.target
    if is_known(step, known):
        return ""
    if not isinstance(target, OpOverload):
        return f"{getattr(target, '__name__', target)} is not one operator of PyTorch"
    arguments = target._schema.arguments
    values = {x.name: x.default_value for x in arguments if x.has_default_value()}
    values |= dict(zip((x.name for x in arguments), step.args, strict=False)) | step.kwargs
    written = [values.get(x.name) for x in arguments if x.alias_info and x.alias_info.is_write]
    if not all(isinstance(x, Ref) and x.tensor in own for x in leaves_of(written)):
        return f"{target} writes to what it reads"
    if any(tag in target.tags for tag in _DEPENDS):
        return f"the form of what {target} makes may be another every time"
    # Attention, dropout and recurrent layers draw only if they are to drop something.
    is_off = any(values.get(name) == 0 for name in ("dropout_p", "dropout")) or any(
        values.get(name) is False for name in ("train", "training")
    )
    if torch.Tag.nondeterministic_seeded in target.tags and not is_off:
        return f"{target} draws random numbers"  # each micro-batch has its own
    return ""


def recorded(work: Callable[[], Any], pool: Any, device: torch.device) -> tuple[Any, Any]:
    """A CUDA graph of what ``work`` launches on the current stream, and what it has returned.

    That is another stream than the caller's: where a thread frees pinned memory PyTorch records an
    event on the streams that have used it, and could not ask for one that is part of a graph. It is
    nobody else's: of most streams PyTorch has 32, and who asks for more gets one that others use.

    Raises:
        Exception: what ``work`` did that cannot be captured; PyTorch is as it was before.
    """
    graph = torch.cuda.CUDAGraph()
    with TURN, ExitStack() as stack:
        # A runner that is collected here waits for threads that wait for a turn.
        stack.enter_context(nothing_collected())
        if device not in _STREAMS:
            _STREAMS[device] = torch.cuda.Stream(device, priority=-1)
        stack.enter_context(torch.cuda.stream(_STREAMS[device]))
        # Else another runner's graphs would have cuBLAS' workspace in this one's memory.
        stack.callback(torch._C._cuda_clearCublasWorkspaces)
        try:
            # Other threads copy meanwhile, and ask for pinned memory: that is none of this capture.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            outputs = work()
            graph.capture_end()
        except BaseException:
            try:
                graph.capture_end()
            except Exception:  # says once more that it has failed
                _failed.append(graph)
                with suppress(Exception):
                    _abandon(pool, device)
            raise
    return graph, outputs


def _abandon(pool: Any, device: torch.device) -> None:
    """What ``capture_end`` leaves undone where it fails (seen in PyTorch 2.11)."""
    with suppress(Exception):  # else nothing that streams share would be freed any more
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
        torch._C._cuda_releasePool(device.index or 0, pool)
    # Until a capture ends well the random generator is taken for captured, and graphs that were
    # captured before cannot be replayed.
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
    torch.zeros(1, device=device)
    graph.capture_end()


class Replayed:
    """A run of operators: called as it is at first, then captured, and replayed from then on.

    Attributes:
        slots: by tensor, where the graph reads it.
    """

    def __init__(
        self,
        graphs: Graphs,
        first: int,
        call: Call,
        reads: Sequence[int],
        makes: Sequence[int],
    ) -> None:
        self.__code__ = call.__code__  # by which an error is traced to its operator
        self._graphs, self._first, self._call = graphs, first, call
        self._reads, self._makes = list(reads), list(makes)
        self._warm, self._tried = threading.local(), False
        self._graph: Any = None
        self.slots: dict[int, Tensor] = {}
        self._outputs: list[Tensor] = []

    def __call__(self, env: list[Any], nothing_arrived: Callable[[], bool]) -> Iterator[int] | None:
        rest = self.launch(env, nothing_arrived)
        if self._graph is not None:
            for t in self._makes:
                env[t] = env[t].clone()
        return rest

    def launch(self, env: list[Any], nothing_arrived: Callable[[], bool]) -> Iterator[int] | None:
        """As when it is called, but the next replay writes over what it has made.

        What is in its slot is read there.
        """
        if not self._tried:
            self._warm.calls = calls = getattr(self._warm, "calls", 0) + 1
            # In two calls of a thread its libraries choose kernels, and get memory of their own.
            if calls > 2:
                self._tried = True
                self._capture(env)
        if self._graph is None:
            return self._call(env, nothing_arrived)
        come = {t: slot for t, slot in self.slots.items() if env[t] is not slot}
        if come:
            torch._foreach_copy_([*come.values()], [env[t] for t in come])
        with TURN:
            self._graph.replay()
        for t, output in zip(self._makes, self._outputs, strict=True):
            env[t] = output
        return None

    def _capture(self, env: list[Any]) -> None:
        graphs, inputs = self._graphs, [env[t] for t in self._reads]
        if not all(isinstance(x, Tensor) and x.is_cuda for x in inputs):
            graphs.eager[self._first] = "it reads what is not in the memory of the GPU"
            return
        slots = {t: x.clone() for t, x in zip(self._reads, inputs, strict=True)}
        if graphs.pool is None:
            graphs.pool = torch.cuda.graph_pool_handle()
        own: list[Any] = [None] * len(env)
        for t, x in slots.items():
            own[t] = x

        def run() -> list[Any]:
            for _ in self._call(own, lambda: True) or ():
                pass
            return [own[t] for t in self._makes]

        try:
            graph, outputs = recorded(run, graphs.pool, graphs.device)
        except RuntimeError as error:  # not what a signal's handler raises in the calling thread
            graphs.pool = None  # that one is spoiled
            graphs.eager[self._first] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return
        if not all(isinstance(x, Tensor) and x.is_cuda for x in outputs):
            graphs.eager[self._first] = "it makes what is not in the memory of the GPU"
            graphs.pool = None  # perhaps of this graph alone, and gone with it
            return
        self._graph, self._outputs, self.slots = graph, outputs, slots
        graphs.captured += 1
