"""A graph on one device, measured operator by operator, as far as the device can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from placement.cluster import Cluster
from placement.executor.executor import batched
from placement.executor.memory import needed_bytes
from placement.executor.parts import part
from placement.executor.runner import Runner
from placement.graph import OpGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def on_one_device(
    graph: OpGraph, cluster: Cluster, device: int, priority: Sequence[int] | NDArray[np.int32]
) -> Runner:
    """A runner of everything on one device, in the order of ``priority`` ``[N]``."""
    return placed(graph, cluster, [device] * graph.num_ops, priority)


def placed(
    graph: OpGraph,
    cluster: Cluster,
    placement: list[int],
    priority: Sequence[int] | NDArray[np.int32] | None = None,
) -> Runner:
    """A recording runner for one micro-batch at a time."""
    return Runner(graph, cluster, placement, max_in_flight=1, priority=priority, record=True)


def run_seconds(runner: Alone, inputs: Sequence[Tensor], times: int) -> Floats:
    """float64 ``[N]`` seconds of each operator in the last of ``times`` runs."""
    for _ in runner.stream_tensors(inputs for _ in range(times)):
        pass
    return last_seconds(runner, range(runner.next_batch - 1, runner.next_batch))


def last_seconds(runner: Alone, batches: range) -> Floats:
    """float64 ``[N]`` mean seconds of each operator in these; what is recorded is forgotten.

    Operators that wait for their turn are all slower by that.
    """
    if isinstance(runner, InParts):
        seconds = np.mean([runner.runs[b] for b in batches], axis=0)
        runner.runs.clear()
        return seconds
    seconds, waited_s = np.zeros(runner.graph.num_ops), 0.0
    for worker in runner.workers:
        clock = worker.backend.resolve_ns
        for b, op, begin, end in batched(worker.slices, 4):
            if b in batches:
                seconds[op] += (clock(end) - clock(begin)) * 1e-9
        waited_s += sum(ns for b, ns in batched(worker.waits, 2) if b in batches) * 1e-9
        for recorded in (worker.slices, worker.arrivals, worker.waits):
            recorded.clear()
    if waited_s:
        seconds *= 1 + waited_s / seconds.sum()
    return seconds / max(len(batches), 1)


class InParts:
    """A graph on a device that cannot hold it, or lacks kernels: one part after another.

    Used like a recording ``Runner``; what its parts read from each other was computed in host
    memory.

    Attributes:
        missing: operators that cannot run there: without a kernel, or too large by themselves.
        needed: int64 ``[N, 2]``, see ``memory.needed_bytes``.
        runs: seconds float64 ``[N]`` by micro-batch.
    """

    def __init__(self, graph: OpGraph, cluster: Cluster, device: int) -> None:
        self.graph = graph
        self.next_batch = 0
        self.missing: set[int] = set()
        self.needed = np.zeros((graph.num_ops, 2), np.int64)
        self.runs: dict[int, Floats] = {}
        self._cluster, self._device = cluster, device
        self._parts: list[tuple[list[int], OpGraph]] = []
        todo = [list(range(graph.num_ops))]
        while todo:
            todo = [ops for ops in self._try(todo) if ops]

    def _try(self, todo: list[list[int]]) -> list[list[int]]:
        """Try the last of the parts; what is left to do."""
        *rest, ops = todo
        graph, steps = self.graph, self.graph.program.steps
        whole = len(ops) == graph.num_ops
        piece = graph if whole else part(graph, ops, joined=True)
        runner = on_one_device(piece, self._cluster, self._device, range(piece.num_ops))
        try:
            run_seconds(runner, piece.program.timing_inputs(), 1)
            self.needed[ops] = needed_bytes(piece, self._cluster.devices[self._device])
        except RuntimeError as error:
            failed = runner.failed_op
            if is_short(error) and len(ops) > 1:
                middle = _half(graph, ops)
                return [*rest, ops[middle:], ops[:middle]]
            if is_short(error):
                self.missing.update(ops)
                return rest
            if failed is None or not lacks_kernel(error, self._cluster, self._device):
                raise
            target = steps[ops[failed]].target
            self.missing |= {n for n, step in enumerate(steps) if step.target is target}
            return [[n for n in some if n not in self.missing] for some in todo]
        finally:
            runner.close()
        self._parts.append((ops, piece))
        return rest

    def stream_tensors(self, inputs: Iterable[Sequence[Tensor]]) -> Iterator[None]:
        """Run every part twice for each of the micro-batches, and keep the second time."""
        for _ in inputs:
            seconds = np.zeros(self.graph.num_ops)
            for ops, piece in self._parts:
                order = range(piece.num_ops)
                with on_one_device(piece, self._cluster, self._device, order) as runner:
                    seconds[ops] = run_seconds(runner, piece.program.timing_inputs(), 2)
            self.runs[self.next_batch] = seconds
            self.next_batch += 1
            yield

    def close(self) -> None:
        """Forget the parts."""
        self._parts.clear()


Alone = Runner | InParts


def as_it_can(
    graph: OpGraph,
    cluster: Cluster,
    device: int,
    priority: NDArray[np.int32],
    inputs: Sequence[Tensor],
) -> tuple[Alone, Ints]:
    """The whole graph on a device, warm, and ``memory.needed_bytes``; in parts if it must be.

    Raises:
        Exception: what an operator raised on a CPU that has a kernel for it.
    """
    runner = on_one_device(graph, cluster, device, priority)
    try:
        run_seconds(runner, inputs, 2)
        return runner, needed_bytes(graph, cluster.devices[device])
    except BaseException as error:
        runner.close()
        lacks = runner.failed_op is not None and lacks_kernel(error, cluster, device)
        if not (is_short(error) or lacks):
            raise
    parts = InParts(graph, cluster, device)
    return parts, parts.needed


def is_short(error: BaseException) -> bool:
    """Whether a GPU had no memory for it, in the words of PyTorch, cuBLAS or cuDNN.

    cuDNN finds no engine where none gets its workspace.
    """
    words = ("out of memory", "ALLOC_FAILED", "unable to find an engine")
    return isinstance(error, RuntimeError) and any(x in str(error) for x in words)


def lacks_kernel(error: BaseException, cluster: Cluster, device: int) -> bool:
    """Whether that is how an operator fails for which another kind of device may have a kernel."""
    if isinstance(error, NotImplementedError):
        return len({d.kind for d in cluster.devices}) > 1
    on_gpu = cluster.devices[device].kind == "cuda"
    # After an error of the device itself, everything fails there; not after one of a library.
    broken = "CUDA error" in str(error) and "CUBLAS" not in str(error)
    return on_gpu and isinstance(error, RuntimeError) and not broken


def _half(graph: OpGraph, ops: list[int]) -> int:
    """Where to cut: about as much memory before as after, and something on both sides."""
    produced = graph.tensor_src >= 0
    made = np.bincount(graph.tensor_src[produced], graph.tensor_bytes[produced], graph.num_ops)
    so_far = np.cumsum((graph.op_param_bytes + made)[ops])
    return int(np.clip(np.searchsorted(so_far, so_far[-1] / 2) + 1, 1, len(ops) - 1))
