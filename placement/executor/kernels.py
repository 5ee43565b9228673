"""Compiled runs of a GPU: what a run launches, as kernels that PyTorch's Inductor writes in Triton.

A run of a CPU is compiled before anything runs (see ``compiled``). One of a GPU is compiled when it
is called first, of the very tensors that it reads then, as CUDA's kernels lay out what they make in
ways of their own; and what its operators made of them is compared with what the compiled run makes.
It reads parameters where they are, so that what is written to them later is seen. What Inductor
compiled it keeps itself, for other processes too.

To others a run is what it was, also to ``graphs``: a CUDA graph of a compiled run is what
``torch.compile(mode="reduce-overhead")`` makes of a whole model. A run that cannot be compiled,
computes something else, or reads what is laid out in another way than before, is launched operator
by operator, and ``Kernels.eager`` says why it always is.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx

from placement.cluster import Cluster, Device
from placement.executor import equality
from placement.executor.backend import TURN
from placement.executor.compiled import (
    Recipe,
    Refused,
    compiled_alone,
    compiling,
    graph_of,
    reason_of,
    recipe,
)
from placement.executor.generated import Call, Generated
from placement.executor.graphs import LEAST, launches
from placement.executor.share import Share
from placement.program import Program

# For other runners of the same program: by what a run computes, and the layout of its operands.
_COMPILED: weakref.WeakKeyDictionary[Program, dict[Any, Callable[..., Any]]] = (
    weakref.WeakKeyDictionary()
)


class Kernels:
    """Compiled runs of one device.

    Attributes:
        eager: the first operator of each run that is not compiled, and why not.
        compiled: how many runs are, by now.
        seconds: spent on compiling.
        packed, frozen: of ``compiled.Artefacts``: a run has no constants of its own here.
    """

    packed: Mapping[int, float] = MappingProxyType({})
    frozen: frozenset[int] = frozenset()

    def __init__(self, program: Program, device: Device, where: torch.device) -> None:
        self.program, self.where = program, where
        self.cluster = Cluster("one", (device,))
        self.eager: dict[int, str] = {}
        self.compiled, self.seconds = 0, 0.0

    def of(
        self,
        runs: Sequence[tuple[int, ...]],
        share: Share,
        generated: Generated,
        params: Mapping[int, Tensor],
        known: Mapping[int, Tensor],
        streamed: Container[int] = (),
    ) -> Generated:
        """The runs of a ``fused`` share, of which each compiles itself in its first call.

        ``params`` are the parameters on this device, ``known`` the tensors that are the same in
        every call: what runs, and not this, keeps them. Runs with operators that are
        ``streamed`` do not: their parameters come and go.
        """
        calls = dict(generated.calls)
        for run in runs:
            first, steps = run[0], self.program.steps
            if any(op in streamed for op in run):
                self.eager[first] = "parameters are copied from host memory meanwhile"
            elif sum(launches(steps[op], known) for op in run) < LEAST:
                self.eager[first] = f"fewer than {LEAST} operators that compute something"
            else:
                own = recipe(self.program, run, share.outputs[first], known)
                fixed = {t: known[t] for t in share.outputs[first] if t in known}
                graph = graph_of(self.program, own, params, known, False, self.where)
                operands = [params[p] for p in own.params] + [known[t] for t in own.known]
                calls[first] = Fused(self, own, graph, operands, fixed, calls[first])
        return replace(generated, calls=calls)


class Fused:
    """A run of operators: as it is and then compiled in its first call, compiled from then on."""

    def __init__(
        self,
        kernels: Kernels,
        run: Recipe,
        graph: fx.GraphModule,
        operands: list[Tensor],
        fixed: Mapping[int, Tensor],
        call: Call,
    ) -> None:
        self.__code__ = call.__code__  # by which an error is traced to its operator
        self._kernels, self._run, self._call, self._fixed = kernels, run, call, fixed
        self._operands, self._forms = operands, list[Any]()
        self._graph: fx.GraphModule | None = graph  # until it is compiled
        self._made: Callable[..., Any] | None = None

    def __call__(self, env: list[Any], nothing_arrived: Callable[[], bool]) -> Iterator[int] | None:
        if self._graph is not None:
            graph, self._graph = self._graph, None
            self._compile(graph, env)
            return None
        reads = [env[t] for t in self._run.reads]
        if self._made is None or [*map(_form, reads)] != self._forms:
            return self._call(env, nothing_arrived)
        outputs = self._made(*reads, *self._operands)
        env_of = zip(self._run.makes, _listed(outputs), strict=True)
        for t, value in (*env_of, *self._fixed.items()):
            env[t] = value
        return None

    def _compile(self, graph: fx.GraphModule, env: list[Any]) -> None:
        """Run the operators, compile them, and compare what both make."""
        kernels, run = self._kernels, self._run
        reads = [env[t] for t in run.reads]
        for _ in self._call(env, lambda: True) or ():
            pass
        expected, began = [env[t] for t in run.makes], time.perf_counter()
        try:
            # No graph is captured while kernels are tried out.
            with TURN, torch.inference_mode(False), torch.no_grad():
                inputs = [*map(_copied, reads), *self._operands]
                known = _COMPILED.setdefault(kernels.program, {})
                key = run.text, *map(_form, inputs)
                made = known[key] if key in known else inductor(graph, inputs)
                outputs = _listed(made(*inputs))
            tolerance = equality.Tolerance.of([*inputs, *expected], kernels.cluster)
            if wrong := equality.difference(outputs, expected, tolerance):
                raise Refused(f"it computes something else: {wrong}")
            if [*map(_form, outputs)] != [*map(_form, expected)]:
                raise Refused("what it makes is laid out in another way")
        except Exception as error:  # of Inductor, Triton, a compiler, or there is no memory
            kernels.eager[run.ops[0]] = reason_of(error)
            return
        finally:
            kernels.seconds += time.perf_counter() - began
        self._made, self._forms = known.setdefault(key, made), [*map(_form, reads)]
        kernels.compiled += 1


def inductor(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """What Inductor makes of a graph for the device of the inputs.

    Raises:
        Exception: Inductor refuses the graph, or what it needs is missing.
    """
    patches = {"fallback_random": True, "triton.cudagraphs": False}  # graphs are captured here
    with compiling():
        return compiled_alone(graph, inputs, patches)


def _copied(x: Tensor) -> Tensor:
    """Laid out alike, and of no inference mode, which Inductor does not trace."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _listed(outputs: Any) -> Sequence[Tensor]:
    return outputs if isinstance(outputs, list | tuple) else (outputs,)


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype
