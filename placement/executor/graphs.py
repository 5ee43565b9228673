"""CUDA graphs: a run of operators is launched at once, instead of kernel by kernel.

A graph reads and writes the same memory in every replay, and micro-batches overlap. So what a run
reads is copied to where its graph reads it, and what it makes is copied from where the graph writes
it: to everybody else a run is what it was. What cannot be a graph is launched as before, and
``Graphs.eager`` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from placement.executor.share import Call, Compiled, Share
from placement.program import Program

_WARM_CALLS = 2  # in which libraries choose kernels, and get memory that is not the graph's
_LEAST = 3  # operators: copying what a shorter run reads and makes takes as many launches
_NOT_REPLAYED = (
    torch.Tag.data_dependent_output,  # what a graph makes has the same form every time
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,  # each micro-batch has its own state of the generator
)


class Graphs:
    """Those of one device.

    Attributes:
        eager: the first operator of each run that is no graph, and why not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.eager: dict[int, str] = {}
        self.pool: Any = None  # memory of all graphs: one runs at a time

    def of(
        self,
        program: Program,
        runs: Sequence[tuple[int, ...]],
        share: Share,
        compiled: Compiled,
        streamed: frozenset[int],
    ) -> Compiled:
        """The compiled runs of a ``fused`` share, replayed where that can be.

        Operators that are ``streamed`` read their parameters where they are this time.
        """
        calls = dict(compiled.calls)
        for run in runs:
            if not streamed.isdisjoint(run):
                self.eager[run[0]] = "parameters are copied from host memory meanwhile"
            elif why := _obstacle(program, run):
                self.eager[run[0]] = why
            else:
                reads, makes = share.inputs[run[0]], share.outputs[run[0]]
                calls[run[0]] = _Replayed(self, run[0], calls[run[0]], reads, makes)
        return replace(compiled, calls=calls)


def _obstacle(program: Program, run: tuple[int, ...]) -> str:
    """Why a run of operators cannot be a graph, as far as that is known before it runs."""
    if len(run) < _LEAST:
        return f"fewer than {_LEAST} operators"
    for op in run:
        target = program.steps[op].target
        if not isinstance(target, OpOverload):
            return f"{getattr(target, '__name__', target)} is not one operator of PyTorch"
        if target._schema.is_mutable:
            return f"{target} writes to what it reads"
        if any(tag in target.tags for tag in _NOT_REPLAYED):
            return f"{target} draws random numbers, or its result has another form every time"
    return ""


class _Replayed:
    """A run of operators: called as it is at first, then captured, and replayed from then on."""

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
        self._calls = 0
        self._graph: Any = None
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []

    def __call__(self, env: list[Any], nothing_arrived: Callable[[], bool]) -> Iterator[int] | None:
        self._calls += 1
        if self._calls == _WARM_CALLS + 1:
            self._capture(env)
        if self._graph is None:
            return self._call(env, nothing_arrived)
        if self._inputs:
            torch._foreach_copy_(self._inputs, [env[t] for t in self._reads])
        self._graph.replay()
        for t, output in zip(self._makes, self._outputs, strict=True):
            env[t] = output.clone()
        return None

    def _capture(self, env: list[Any]) -> None:
        graphs, inputs = self._graphs, [env[t] for t in self._reads]
        if not all(isinstance(x, Tensor) and x.is_cuda for x in inputs):
            graphs.eager[self._first] = "it reads what is not in the memory of the GPU"
            return
        self._inputs = [x.clone() for x in inputs]
        if graphs.pool is None:
            graphs.pool = torch.cuda.graph_pool_handle()
        own: list[Any] = [None] * len(env)
        for t, x in zip(self._reads, self._inputs, strict=True):
            own[t] = x
        graph = torch.cuda.CUDAGraph()
        # Other threads copy meanwhile, and ask for pinned memory: that is none of this capture's.
        graph.capture_begin(pool=graphs.pool, capture_error_mode="thread_local")
        try:
            for _ in self._call(own, lambda: True) or ():
                pass
            outputs = [own[t] for t in self._makes]
            graph.capture_end()
        except Exception as error:
            with suppress(Exception):  # says once more that it has failed
                graph.capture_end()
            # PyTorch leaves the pool open then, and would no longer free what streams share.
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(self._index(), graphs.pool)
            self._inputs = []
            graphs.eager[self._first] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return
        if not all(isinstance(x, Tensor) and x.is_cuda for x in outputs):
            self._inputs = []
            graphs.eager[self._first] = "it makes what is not in the memory of the GPU"
            return
        self._graph, self._outputs = graph, outputs

    def _index(self) -> int:
        return self._graphs.device.index or 0
