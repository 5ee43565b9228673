"""``Runner``: a module that runs where its placement says, called once or streamed through."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from placement.cluster import Cluster
from placement.executor.backend import backend_for
from placement.executor.share import compile_calls, shares
from placement.executor.worker import Failure, Worker
from placement.graph import OpGraph
from placement.program import Program, fill, split_inputs
from placement.schedule import Schedule


class RunnerError(RuntimeError):
    """The runner cannot be used this way; the message says what to do."""


class Runner:
    """A captured module on the devices of this machine, one worker per device.

    Args:
        graph: with its program (from ``placement.capture``).
        cluster: devices of this machine.
        placement: int ``[N]`` device of each operator.
        max_in_flight: at most this many micro-batches between admission and result.
        priority: int ``[N]`` order of preference among ready operators (smallest first), e.g.
            ``problem.priority``; operator number if not given.
        schedule: a fixed order, for runs of exactly its number of micro-batches.
        record: keep what is needed for a ``Timeline``.

    Use it as a context manager, or ``close`` it; a runner that is garbage collected ends its
    threads too. Workers start with the first call and stay for the next.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        placement: ArrayLike,
        *,
        max_in_flight: int = 4,
        priority: ArrayLike | None = None,
        schedule: Schedule | None = None,
        record: bool = False,
    ) -> None:
        if not isinstance(graph.program, Program):
            raise RunnerError(
                f"graph {graph.name!r} has no program to run; capture the module: "
                "placement.capture(module, inputs)"
            )
        if max_in_flight < 1:
            raise RunnerError(f"max_in_flight = {max_in_flight}, must be at least 1")
        self.graph = graph
        self.cluster = cluster
        self.placement = np.asarray(placement, dtype=np.int32)
        if self.placement.shape != (graph.num_ops,):
            raise RunnerError(
                f"placement has shape {self.placement.shape}, expected ({graph.num_ops},)"
            )
        self.max_in_flight = max_in_flight
        self.workers: list[Worker] = []
        self.admitted_ns: dict[int, int] = {}
        self._program = graph.program
        self._priority = (
            list(range(graph.num_ops)) if priority is None else np.asarray(priority).tolist()
        )
        self._schedule = schedule
        self._record = record
        self._shares = shares(graph, self.placement, cluster.num_devices)
        self._active = [s.device for s in self._shares if s.ops]
        self._fed = [s.device for s in self._shares if s.model_inputs or s.sources]
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._busy = threading.Lock()
        self.next_batch = 0
        self._closed = False
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs for one call, in host memory.

        Raises:
            InputError: inputs unlike those the module was captured with.
            RunnerError: closed, or another call or stream is using the runner.
            Exception: what an operator raised, with the operator's name as a note.
        """
        for outputs in self.stream([(args, kwargs)]):
            return outputs
        raise AssertionError("one input gives one output")

    def stream(self, inputs: Iterable[Any]) -> Iterator[Any]:
        """Outputs for each of ``inputs``, in order, computed in a pipeline.

        Each item is what ``capture`` accepts as example inputs. Items are taken from the
        iterable as the pipeline has room. Whatever ends the stream early (an exception on
        either side, Ctrl-C, closing the generator) stops the workers; the next call starts
        them again.
        """
        return self.stream_tensors(self._flatten(item) for item in inputs)

    def _flatten(self, item: Any) -> Sequence[Tensor]:
        args, kwargs = split_inputs(item)
        return self._program.flatten_inputs(args, kwargs)

    def stream_tensors(self, inputs: Iterable[Sequence[Tensor]]) -> Iterator[Any]:
        """``stream`` for inputs that are flat already (see ``Program.flatten_inputs``)."""
        if self._closed:
            raise RunnerError("the runner is closed; bind the plan again")
        if not self._busy.acquire(blocking=False):
            raise RunnerError(
                "the runner is in use by another call or stream; finish it, or bind a second one"
            )
        clean = False
        try:
            yield from self._stream(iter(inputs))
            clean = True
        finally:
            if not clean:
                self._stop()
            self._busy.release()

    def _stream(self, source: Iterator[Sequence[Tensor]]) -> Iterator[Any]:
        self._start()
        following = self.next_batch
        pending: dict[int, tuple[dict[int, Any], set[int]]] = {}  # batch: outputs, devices left
        finished: dict[int, Any] = {}
        exhausted = False
        while True:
            while not exhausted and len(pending) < self.max_in_flight:
                try:
                    item = next(source)
                except StopIteration:
                    exhausted = True
                    break
                given = dict(zip(self._program.input_tensors, item, strict=True))
                batch, self.next_batch = self.next_batch, self.next_batch + 1
                pending[batch] = dict(given), set(self._active)
                self._admit(batch, given)
            if following == self.next_batch and exhausted:
                return
            while following not in finished and len(pending) > 0:
                message = self._results.get()
                if isinstance(message, Failure):
                    self._raise(message)
                batch, tensor, value = message
                if batch not in pending:
                    continue
                if isinstance(value, Exception):
                    raise value
                outputs, left = pending[batch]
                if tensor >= 0:
                    outputs[tensor] = value
                    continue
                left.discard(value)
                if not left:
                    del pending[batch]
                    finished[batch] = self._assemble(outputs)
                    if not exhausted:
                        break  # there is room in the pipeline: fill it before waiting
            while following in finished:
                value = finished.pop(following)
                following += 1
                yield value

    def _admit(self, batch: int, given: dict[int, Any]) -> None:
        if self._record:
            self.admitted_ns[batch] = time.perf_counter_ns()
        for d in self._fed:
            mine = {t: given[t] for t in self._shares[d].model_inputs}
            self.workers[d].inbox.put((batch, -1, mine, -1, None))

    def _assemble(self, outputs: dict[int, Any]) -> Any:
        params = self._program.params
        leaves = [fill(leaf, outputs, params) for leaf in self._program.output_leaves]
        return self._program.unflatten_outputs(leaves)

    def _raise(self, failure: Failure) -> None:
        where = self.cluster.device_names[failure.device]
        what = (
            f"in operator {self.graph.op_name[failure.op]!r} "
            f"(module {self.graph.op_module[failure.op]!r})"
            if failure.op is not None
            else "between operators"
        )
        failure.error.add_note(f"raised on device {where!r} {what}")
        raise failure.error

    def _start(self) -> None:
        if self.workers:
            return
        self._results = queue.SimpleQueue()
        loaded: dict[tuple[Any, int], Any] = {}
        for share, device in zip(self._shares, self.cluster.devices, strict=True):
            backend = backend_for(device)
            params = {}
            for p in self.graph.param_use[np.isin(self.graph.param_use_op, share.ops)].tolist():
                key = (backend.torch_device, p)
                if key not in loaded:
                    loaded[key] = self._program.params[p].detach().to(backend.torch_device)
                params[p] = loaded[key]
            calls = compile_calls(self._program, share.ops, params, backend.torch_device)
            order = None
            if self._schedule is not None:
                order = [(int(op), int(b)) for op, b in self._schedule.order[share.device]]
            self.workers.append(
                Worker(
                    device.name,
                    share,
                    backend,
                    calls,
                    self._priority,
                    self._results,
                    self._record,
                    order,
                )
            )
        for worker in self.workers:
            worker.workers = self.workers
        for d in self._active:
            self.workers[d].start()
        # The finalizer must not hold the runner itself, or it would never be collected.
        self._finalizer = weakref.finalize(self, _stop_workers, list(self.workers))

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self.workers = []

    def close(self) -> None:
        """End the workers; the runner cannot be used afterwards. Idempotent."""
        self._closed = True
        self._stop()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop_workers(workers: list[Worker]) -> None:
    started = [w for w in workers if w.ident is not None]
    for worker in started:
        worker.stop()
    for worker in started:
        worker.join()
    for worker in workers:
        worker.workers = []
