"""``Runner``: a module that runs where its placement says, called once or streamed through."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from placement.cluster import Cluster, Device
from placement.executor import weights
from placement.executor.awake import cores_awake
from placement.executor.backend import (
    Backend,
    Carrier,
    CpuBackend,
    CudaBackend,
    Leaving,
    backend_for,
    callers_stream,
    used_on,
)
from placement.executor.compiled import Artefacts, reads_channels_last, with_channels_last
from placement.executor.constants import constants
from placement.executor.generated import Generated, generate
from placement.executor.graphs import Graphs, pieces_of
from placement.executor.kernels import Kernels
from placement.executor.loader import PREFETCH_BYTES, Dataset, InputPipeline, Unwritten
from placement.executor.share import Share, fused, runs_of, shares
from placement.executor.streamed import Streamed
from placement.executor.worker import Failure, Worker
from placement.graph import OpGraph
from placement.problem import whole_numbers
from placement.program import (
    CaptureError,
    InputError,
    Program,
    check_captured,
    fill,
    split_item,
    storage_of,
)
from placement.schedule import Schedule
from placement.timeline import steady_period
from placement.tools.progress import Progress

_CLOSED = "the runner is closed; bind the plan again"
_CLOSED_IN_USE = "the runner was closed while it was in use; bind the plan again"


class RunnerError(RuntimeError):
    """The runner cannot be used this way; the message says what to do."""


class Runner:
    """A captured module on the devices of this machine, one worker per device.

    Args:
        graph: with its program (from ``placement.capture``).
        cluster: devices of this machine.
        placement: int ``[N]`` device of each operator; ``[K, N]``: of micro-batch ``m``, counted
            since the workers were started, that of row ``m % K``.
        max_in_flight: at most this many micro-batches between admission and result; with a
            schedule, at least all of its own, which it may begin before it ends one.
        priority: int ``[N]`` order of preference among ready operators (smallest first), e.g.
            ``problem.priority``; operator number if not given.
        schedule: a fixed order, for runs of exactly its number of micro-batches each.
        record: keep what is needed for a ``Timeline``.
        own_buffers: a training step changes the module's own buffers, not copies of them.
        outputs: where results are: ``host``, or ``device``: those of a GPU stay in its memory, as
            tensors of ``torch.inference_mode`` (``clone`` them to write to them or to train).

    Inputs in the memory of a GPU stay there for the operators of that GPU. Parameters are the
    module's own: what is written to them, or put in their place (``parameter.data = ...``, which is
    refused where operators are in pieces), shows in the next call. Of those in other memory a GPU
    has copies, which are made again then (a write into ``parameter.data`` does not show).

    Attributes:
        cuda_graphs: to be set before the first call: runs of operators on a GPU are replayed as
            CUDA graphs, where they can be (``not_graphed`` says where not). Off, as a GPU has shown
            it for some models only.
        compiled: to be set before the first call, which then compiles (see ``compile``): runs of
            operators are artefacts of PyTorch's Inductor, where they can be, and on a CPU where
            they are faster (``not_compiled`` says where not). Inference only.
        outputs_stay: to be set before the first call: ``outputs`` are on the ``device``.
        has_company: to be set before the first call: another runner of the module is used beside
            this one, and GPUs have its parameters once for both. Else, where a device streams, what
            other runners have there may be in the way.

    Use it as a context manager, or ``close`` it; a runner that is garbage collected ends its
    threads too. Workers start with the first call and stay for the next.

    Raises:
        RunnerError: the graph has no program, or a placement or priority of another length. At
            the first call: a parameter has no values (device ``meta``).
        ProblemError: the placement has what is no whole number, or rows of unequal length.
        ScheduleError: the schedule does not fit, or deadlocks.
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
        own_buffers: bool = False,
        outputs: str = "host",
    ) -> None:
        if outputs not in ("host", "device"):
            raise RunnerError(f"outputs = {outputs!r}: must be 'host' or 'device'")
        check_captured(graph, cluster, RunnerError)
        if max_in_flight < 1:
            raise RunnerError(f"max_in_flight = {max_in_flight}, must be at least 1")
        self.graph = graph
        self.cluster = cluster
        placed = whole_numbers(placement)
        self._placed = _phases(placed, graph, cluster)
        self.num_phases = len(self._placed)
        self.placement = cluster.worker[placed]
        phases = np.atleast_2d(self.placement)
        # An order may begin all of its micro-batches before it ends one.
        least = 1 if schedule is None else schedule.num_microbatches
        self.max_in_flight = max(max_in_flight, least)
        self.workers: list[Worker] = []
        self.admitted_ns: dict[int, int] = {}
        self.loaded_ns: dict[int, tuple[int, int]] = {}
        self._program = graph.program
        self._priority = (
            list(range(graph.num_ops)) if priority is None else np.asarray(priority).tolist()
        )
        if sorted(self._priority) != list(range(graph.num_ops)):
            raise RunnerError(f"priority must hold each of 0..{graph.num_ops - 1} once")
        if schedule is not None:
            schedule.check(graph, cluster, placed)
            if schedule.num_microbatches % len(phases):
                raise RunnerError(
                    f"a schedule of {schedule.num_microbatches} micro-batches runs again and "
                    f"again: make it of a multiple of the {len(phases)} phases of the placement"
                )
        _check_carried(graph, phases)
        self._schedule = schedule
        self._record = record
        self._own_buffers = own_buffers
        self.outputs_stay = outputs == "device"
        self.cuda_graphs = self.compiled = False
        self._graphs: list[Graphs] = []
        self._artefacts: list[Artefacts | Kernels] = []
        self._frozen: list[Tensor] = []  # parameters whose values are part of artefacts
        self._frozen_as: list[weights.State] = []
        self._images_last = False  # compiled runs read inputs with channels last
        self._since = 0.0
        self._report: Progress = lambda *_: None
        self.has_company = False
        self.loaded: dict[tuple[torch.device, int], Tensor] = {}  # parameters by kind of memory
        self._copies = weights.Copies()  # of these, those in other memory than the module
        self.trained = weights.Copies()  # and those that a step changes
        # Of the module's, those that are read where they are, and pieces of them; where they were.
        self._shared: list[tuple[torch.device, int]] = []
        self._cut = _whole_of_pieces(graph.program)
        self._cut_at = weights.places_of([*self._cut.values()])
        self._watched: list[Tensor] = []
        self._places: list[weights.Place] = []
        self._streamed: list[Streamed] = []
        self.gradients: dict[int, Tensor] = {}  # sums over micro-batches, by parameter
        self.partial: dict[tuple[int, int], Tensor] = {}  # of replicas, by device and parameter
        known: dict[bytes, list[Share]] = {}  # phases that are alike have their shares together
        names = [phase.tobytes() for phase in self._placed]
        for name, phase in zip(names, phases, strict=True):
            if name not in known:
                known[name] = shares(graph, phase, cluster.num_devices)
        self._shares = [known[name] for name in names]  # [K][D]
        self._active = [[s.device for s in phase if s.ops] for phase in self._shares]
        takes = [[s for s in phase if s.model_inputs or s.sources] for phase in self._shares]
        self._fed = [[s.device for s in phase] for phase in takes]  # devices, by phase
        self._used = sorted({d for active in self._active for d in active})
        leaves = set(graph.output_tensor.tolist())
        self._through = [t for t in graph.program.input_tensors if t in leaves]
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._alone = self._one_gpu()
        self._caller: threading.Thread | None = None
        self._launcher: threading.Thread | None = None
        self._busy = threading.Lock()
        self._calling = threading.RLock()  # while a call launches: a signal's handler may close
        self.next_batch = 0
        self.failed_op: int | None = None  # in which the last error was raised
        self._closed = False
        self._process = os.getpid()
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs for one call.

        Raises:
            InputError: inputs unlike those the module was captured with.
            RunnerError: closed, or another call or stream is using the runner.
            Exception: what an operator raised, with the operator's name as a note.
        """
        inputs = self._program.flatten_inputs(args, kwargs)
        with _Use(self):
            direct = self._direct(is_call=True)
            if direct is None:
                (outputs,) = self._stream(iter([inputs]), None, None)
                return outputs
            # All that a stream of one would do: each microsecond counts while a GPU waits.
            batch, self.next_batch = self.next_batch, self.next_batch + 1
            unwritten = Unwritten(inputs)
            tensors = dict(zip(self._program.input_tensors, inputs, strict=True))
            outputs = self._passed_on(tensors)
            outputs |= self._launched(direct, partial(direct.call, batch, tensors))
            self._check_unwritten(unwritten, 0)
            return self._assemble(outputs)

    def stream(
        self,
        loader: Iterable[Any] | Dataset,
        *,
        preprocess: Callable[[Any], Any] | None = None,
        workers: int | None = None,
        prefetch: int | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
    ) -> Iterator[Any]:
        """Outputs for each item of ``loader``, in order, computed in a pipeline.

        Each item, or what ``preprocess`` makes of it, is what ``capture`` accepts as example
        inputs, or a list of positional ones; each has tensors of its own, as they are read until
        its outputs are there. A thread loads items while the devices work on earlier ones, where
        an item takes long enough, or as many as ``workers`` says: ``prefetch`` items ahead, of at
        most ``prefetch_bytes``. An iterable is read by one thread at a time; a
        list or map-style data set, and ``preprocess``, are called by several at once
        (``workers=1`` if they cannot bear that; ``workers=0`` loads in the calling thread, as
        the pipeline has room).

        An exception of the loader is raised after the results of all micro-batches before it,
        with the micro-batch as a note. Whatever ends the stream early (an exception on either
        side, Ctrl-C, closing the generator) stops the workers and the loader's threads; the
        next call starts them again.

        Raises:
            InputError: an item unlike the inputs that the module was captured with, or one that
                PyTorch wrote to before its outputs were there.
            LoaderError: an impossible number of workers or of items to prefetch, or an item that
                was written to while later ones were loaded.
            RunnerError: closed, or another call or stream is using the runner.
            Exception: what the loader or an operator raised.
        """
        items = self.load_ahead(
            loader,
            preprocess=preprocess,
            workers=workers,
            prefetch=prefetch,
            prefetch_bytes=prefetch_bytes,
        )
        return self._stream_items(items)

    def period_of(self, results: Iterable[Any]) -> float:
        """Seconds between two results of a stream of this runner, in steady state; drops them.

        Where the calling thread launches, its last ``max_in_flight - 1`` do not count: no launch
        delays them, as it does those before.
        """
        began = time.perf_counter()
        ends = np.array([time.perf_counter() - began for _ in results])
        if self._alone is not None:
            ends = ends[: max(2, len(ends) - self.max_in_flight + 1)]
        return float(steady_period(ends, num_phases=self.num_phases))

    def load_ahead(self, loader: Iterable[Any] | Dataset, **options: Any) -> InputPipeline:
        """The items of ``loader``, loaded as ``stream`` does with these options."""
        return InputPipeline(loader, cores=self._free_cores(), **options)

    def _stream_items(self, items: InputPipeline) -> Iterator[Any]:
        with items:
            yield from self._exclusively(map(self._flatten, items), items)

    def _flatten(self, item: Any) -> Sequence[Tensor]:
        try:
            args, kwargs = split_item(item)
        except CaptureError:
            raise InputError(
                f"an item of the loader is a {type(item).__name__}: give a tensor, a tuple or list "
                "(positional), a dict (keyword) or (tuple, dict)"
            ) from None
        return self._program.flatten_inputs(args, kwargs)

    def stream_tensors(self, inputs: Iterable[Sequence[Tensor]]) -> Iterator[Any]:
        """``stream`` for inputs that are flat already (see ``Program.flatten_inputs``).

        They are taken by the calling thread as the pipeline has room.
        """
        return self._exclusively(iter(inputs), None)

    def _exclusively(
        self, source: Iterator[Sequence[Tensor]], items: InputPipeline | None
    ) -> Iterator[Any]:
        with _Use(self):
            direct = self._direct(is_call=False)  # which lives until the workers have ended
            yield from self._stream(source, items, direct)

    def _stream(
        self,
        source: Iterator[Sequence[Tensor]],
        items: InputPipeline | None,
        direct: _Direct | None,
    ) -> Iterator[Any]:
        if direct is None:
            self._follow_caller()
        flow = _Flow(source, items, self.next_batch)
        while True:
            if self._closed:
                raise RunnerError(_CLOSED_IN_USE)
            while not flow.exhausted and len(flow.pending) < self.max_in_flight:
                self._take(flow, direct)
            if flow.exhausted and flow.following == self.next_batch:
                if flow.failed is not None:
                    raise flow.failed
                return
            if direct is None:
                self._receive(flow)
            else:
                no_more = flow.exhausted or self.max_in_flight == 1
                computed = self._launched(direct, partial(direct.next, no_more))
                flow.pending[flow.following].outputs.update(computed)
                self._finish(flow, flow.following)
            while flow.following in flow.finished:
                value = flow.finished.pop(flow.following)
                flow.following += 1
                yield value

    def _take(self, flow: _Flow, direct: _Direct | None) -> None:
        """The next micro-batch of the source begins, or there is none any more."""
        number = self.next_batch - flow.first
        try:
            item = next(flow.source)
        except StopIteration:
            self._check_whole(number)
            flow.exhausted = True
            return
        except Exception as error:
            error.add_note(f"raised for micro-batch {number} of the stream")
            if self._schedule is not None:
                raise  # what it begins, it ends with the rest of its micro-batches
            flow.failed, flow.exhausted = error, True
            return
        if self._closed:  # while it was loaded
            raise RunnerError(_CLOSED_IN_USE)
        inputs = dict(zip(self._program.input_tensors, item, strict=True))
        batch, self.next_batch = self.next_batch, self.next_batch + 1
        if self._record and flow.items is not None:
            self.loaded_ns[batch] = flow.items.span_ns
        active = set(self._active[batch % self.num_phases])
        flow.pending[batch] = _Pending(self._passed_on(inputs), active, Unwritten(item))
        if direct is None:
            self._admit(batch, inputs)
        else:
            direct.admit(batch, inputs)

    def _receive(self, flow: _Flow) -> None:
        """Wait until the micro-batch that is next is finished, or there is room for another."""
        while flow.following not in flow.finished and flow.pending:
            message = self._results.get()
            if isinstance(message, Failure):
                self._raise(message)
            batch, tensor, value = message
            if batch not in flow.pending:
                continue
            if isinstance(value, Exception):
                raise value
            pending = flow.pending[batch]
            if tensor >= 0:
                pending.outputs[tensor] = value
                continue
            pending.devices_left.discard(value)
            if not pending.devices_left:
                self._finish(flow, batch)
                if not flow.exhausted:
                    return  # there is room in the pipeline: fill it before waiting

    def _finish(self, flow: _Flow, batch: int) -> None:
        pending = flow.pending.pop(batch)
        self._check_unwritten(pending.unwritten, batch - flow.first)
        flow.finished[batch] = self._assemble(pending.outputs)

    def _direct(self, is_call: bool) -> _Direct | None:
        """Where a GPU runs all operators, what launches them in the calling thread.

        A thread that calls, and was not the last that did, leaves that to the worker: libraries
        plan for each thread anew, and others may come.
        """
        is_new = not self.workers
        self._start()
        thread = threading.current_thread()
        launcher = None if is_call and self._caller is not thread else thread  # None: the worker
        self._caller = thread
        if self._alone is None:
            return None
        if launcher is not self._launcher:  # cuBLAS keeps memory for each
            torch._C._cuda_clearCublasWorkspaces()
            self._launcher = launcher
        if launcher is None:
            return None
        program, is_late = self._program, self._refresh
        # Asking every parameter takes as long as many kernels: for a call while they run. Not for
        # what cannot be launched twice.
        once = program.is_random or program.new_buffers or program.gradients or self._streamed
        if once or not is_call:
            is_new |= self._refresh()
            is_late = bool  # never
        direct = _Direct(self.workers[self._alone], is_late)
        if is_new or self._shared:  # parameters may be on their way
            direct.follow_caller()
        return direct

    def _launched(self, direct: _Direct, launch: Callable[[], dict[int, Any]]) -> dict[int, Any]:
        """The outputs of the next micro-batch."""
        with self._calling:
            if self._closed:
                raise RunnerError(_CLOSED_IN_USE)
            try:
                outputs = launch()
            except Exception as error:
                self._raise(direct.worker.failure(error))
        if self._closed:
            raise RunnerError(_CLOSED_IN_USE)
        return outputs

    def _check_unwritten(self, inputs: Unwritten, batch: int) -> None:
        """Raises: InputError, naming the input that was written to while devices read it."""
        if (i := inputs.first_written()) is None:
            return
        leaves = zip(self._program.leaf_names, self._program.example_leaves, strict=True)
        names = [name for name, example in leaves if isinstance(example, Tensor)]
        raise InputError(
            f"input {names[i]!r} of micro-batch {batch} was written to before its outputs were "
            "there, by the loader or by who takes the outputs: give each micro-batch tensors of "
            "its own (x.clone())"
        )

    def _check_whole(self, count: int) -> None:
        """Devices that follow a schedule would wait for micro-batches that do not come."""
        if self._schedule is not None and count % self._schedule.num_microbatches:
            raise RunnerError(
                f"{count} micro-batches given, but the schedule is for "
                f"{self._schedule.num_microbatches} at a time"
            )

    def _admit(self, batch: int, inputs: dict[int, Any]) -> None:
        if self._record:
            self.admitted_ns[batch] = time.perf_counter_ns()
        phase = batch % self.num_phases
        workers = self.workers  # none any more, once another thread has closed the runner
        for d in self._fed[phase] if workers else ():
            admit = workers[d].backend.admit
            mine = {t: admit(inputs[t]) for t in self._shares[phase][d].model_inputs}
            workers[d].inbox.put((batch, -1, mine, -1, None))

    def _follow_caller(self) -> None:
        """GPUs read parameters as they are now, and wait for what the calling thread launched."""
        self._refresh()
        for worker in (self.workers[d] for d in self._used):
            if isinstance(worker.backend, CudaBackend):
                mark = worker.backend.callers_mark()
                if mark is not None:
                    worker.inbox.put((-1, -1, mark, -1, None))

    def _refresh(self) -> bool:
        """Devices read parameters as they are now; whether any was written since the last time."""
        for streamed in self._streamed:
            streamed.refresh()
        was = bool(self.trained.made) and self.trained.refresh()
        return self._copies.refresh() or was

    def _passed_on(self, inputs: dict[int, Any]) -> dict[int, Any]:
        """Inputs that are outputs too, as they are."""
        stay = self.outputs_stay
        return {t: inputs[t] if stay else inputs[t].cpu() for t in self._through}

    def _assemble(self, outputs: dict[int, Any]) -> Any:
        for value in outputs.values() if self.outputs_stay else ():
            if isinstance(value, Tensor) and value.is_cuda:  # made on another stream
                used_on(value, callers_stream(value.device))
        outputs = {t: without_mode(x) for t, x in outputs.items()}
        params = self._program.params
        leaves = [fill(leaf, outputs, params) for leaf in self._program.output_leaves]
        return self._program.unflatten_outputs(leaves)

    def _raise(self, failure: Failure) -> None:
        error = failure.error
        if failure.device >= 0:
            self.failed_op = failure.op
            where = self.cluster.device_names[failure.device]
            what = (
                f"in operator {self.graph.op_name[failure.op]!r} "
                f"(module {self.graph.op_module[failure.op]!r})"
                if failure.op is not None
                else "between operators"
            )
            error.add_note(f"raised on device {where!r} {what}")
        # Frames of the device hold tensors, and whoever catches the error may need their memory; so
        # would those from here on, in a cycle.
        traceback.clear_frames(error.__traceback__)
        del failure.error
        try:
            raise error
        finally:
            del error

    def _free_cores(self) -> set[int]:
        """The cores of this process that no device of the placement uses."""
        if not hasattr(os, "sched_getaffinity"):
            return set()
        used = (self.cluster.devices[d].cores for d in self._used)
        return os.sched_getaffinity(0).difference(*used)

    def _start(self) -> None:
        if self.workers:
            is_same = weights.places_of(self._watched) == self._places
            if is_same and weights.states_of(self._frozen) == self._frozen_as:
                return
            self.stop()  # they would read the memory that their parameters had, as it was seen
        for key in self._shared:  # that may be elsewhere by now
            self.loaded.pop(key, None)
        now_at = weights.places_of([*self._cut.values()])
        for (p, whole), was, now in zip(self._cut.items(), self._cut_at, now_at, strict=True):
            if now != was or storage_of(whole) != storage_of(self._program.params[p]):
                raise RunnerError(
                    f"the parameter of {self._program.param_names[p]!r} has got other memory, or "
                    "is another view of it (parameter.data = ...), which its pieces do not follow: "
                    "write into it (copy_, load_state_dict), or bind the plan again"
                )
        if self.compiled and self._schedule is not None:
            raise RunnerError(
                "an order speaks of single operators, which are not compiled: leave compiled=True "
                "out, or bind the plan without its order (in_order=False)"
            )
        if self.compiled and (self._program.gradients or self._program.new_buffers):
            raise RunnerError(
                "compiled runs are for inference: a training step, or a module in training mode, "
                "is not compiled; leave compiled=True out, or call module.eval() first"
            )
        on_cpus = all(self.cluster.devices[d].kind == "cpu" for d in self._used)
        self._since = time.time()
        self._images_last = self.compiled and on_cpus and reads_channels_last(self._program)
        self._graphs.clear()
        self._artefacts.clear()
        self._streamed.clear()
        self._results = self._mailbox()
        self.next_batch += -self.next_batch % self.num_phases  # they begin with phase 0
        workers = [
            self._worker([phase[d] for phase in self._shares], device)
            for d, device in enumerate(self.cluster.devices)
        ]
        for worker in workers:
            worker.workers = workers
        # Before any starts: they end even if starting them is interrupted. The finalizer must not
        # hold the runner itself, or it would never be collected.
        self._finalizer = weakref.finalize(self, _stop_workers, list(workers))
        self.workers = workers
        params = self._program.params
        self._shared = [
            (where, p)
            for (where, p), x in self.loaded.items()
            if x.data_ptr() == params[p].data_ptr()
        ]
        self._watched = [*(params[p] for _, p in self._shared), *self._cut.values()]
        self._places = weights.places_of(self._watched)
        frozen = set[int]().union(*(x.frozen for x in self._artefacts))
        self._frozen = [params[p] for p in sorted(frozen)]
        self._frozen_as = weights.states_of(self._frozen)
        for d in self._used:
            workers[d].start()
        self._copies.keep(self._program)

    def _mailbox(self) -> Any:
        """Where workers put results."""
        return queue.SimpleQueue()

    def _worker(self, phases: Sequence[Share], device: Device) -> Worker:
        """The worker of a device, not started yet, and its share in each phase."""
        d, ops = phases[0].device, {op for share in phases for op in share.ops}
        # A device that is not used may be one that can only be simulated.
        backend = backend_for(device) if ops else CpuBackend(device)
        away = [
            {op for op in share.ops if on[op] != d}
            for share, on in zip(phases, self._placed, strict=True)
        ]
        resident = {op for i, share in enumerate(phases) for op in share.ops if op not in away[i]}
        params, gradients = self._load(d, sorted(resident), backend.torch_device)
        come: dict[int, Streamed] = {}
        for s in self.cluster.streaming:
            mine = {
                op
                for on, some in zip(self._placed, away, strict=True)
                for op in some
                if on[op] == s
            }
            room = self.cluster.devices[s].buffer_bytes
            first = None
            if self._schedule is not None:
                first = [*dict.fromkeys(self._schedule.order[d][:, 0].tolist())]
            come |= self._from_host(backend, mine, room, first)
        order = None
        if self._schedule is not None:
            order = _repeated(self._schedule, d, self.next_batch)
        # A schedule speaks of operators; else those between which nothing arrives or leaves run
        # as one, and the interpreter has less to do.
        fuse = order is None and self._is_topological()
        if len(phases) > 1 and phases[0].carried:  # by the same operator in every phase
            fuse = False
        marks: list[Any] | None = [] if self._record else None
        clock = None if marks is None else (marks, backend.mark)
        known = constants(self._program, ops, backend.torch_device)
        by_share: dict[int, tuple[Share, Generated]] = {}
        for share, some in zip(phases, away, strict=True):
            if id(share) not in by_share:
                streamed = {op: come[op] for op in some if op in come}
                target = backend.torch_device
                # Operators of a graph end together: nothing tells when each of them did.
                replay = fuse and clock is None and self.cuda_graphs and target.type == "cuda"
                compiles = fuse and self.compiled and bool(ops)
                runs = runs_of(share, self._priority) if fuse else [(op,) for op in share.ops]
                runs = pieces_of(self._program, runs, known) if replay or compiles else runs
                own = share if fuse else None
                generated = generate(
                    self._program, runs, own, params, gradients, target, clock, streamed, known
                )
                whole = fused(share, runs) if fuse else share
                if compiles and target.type == "cuda" and clock is None:
                    kernels = Kernels(self._program, device, target)
                    self._artefacts.append(kernels)
                    generated = kernels.of(runs, whole, generated, params, known, streamed)
                if replay:
                    self._graphs.append(Graphs(target))
                    generated = self._graphs[-1].of(
                        self._program, runs, whole, generated, frozenset(streamed), known
                    )
                elif compiles and target.type == "cpu":
                    facts = params, known, self._images_last, self._since, self._report
                    artefacts = Artefacts(self._program, device, *facts)
                    self._artefacts.append(artefacts)
                    generated = artefacts.of(runs, whole, generated, clock)
                by_share[id(share)] = whole, generated
        worker = Worker(
            device.name,
            [by_share[id(share)][0] for share in phases],
            backend,
            [by_share[id(share)][1] for share in phases],
            self._priority,
            self._results,
            marks,
            order,
            self.next_batch,
        )
        if self._images_last:
            worker.arrange = with_channels_last
        if isinstance(backend, CudaBackend):
            backend.results_stay = self.outputs_stay
        return worker

    def _from_host(
        self, backend: Backend, ops: set[int], room: int | None, order: Sequence[int] | None
    ) -> dict[int, Streamed]:
        """Where those of the operators that read parameters in host memory get them.

        ``order``: of their first use, in a schedule.

        Raises:
            ClusterError: there is not so much pinned memory.
        """
        turn = self._priority if order is None else {op: i for i, op in enumerate(order)}
        every = self.graph.op_params
        reads = {op: every[op] for op in sorted(ops, key=turn.__getitem__) if every[op]}
        for read in reads.values():
            for p in read:
                self._check_values(p)
        if not reads:
            return {}
        assert isinstance(backend, CudaBackend), "no other device streams"
        self._streamed.append(Streamed(backend, self._program, reads, room))
        return dict.fromkeys(reads, self._streamed[-1])

    def _check_values(self, p: int) -> None:
        if self._program.params[p].is_meta:
            raise RunnerError(
                f"parameter {self._program.param_names[p]!r} has no values (it is on the device "
                "'meta'): load them into the module, and capture it then; or use what needs none: "
                "placement plan MODEL --planner heft --predict roofline, and "
                "placement run plan.json --distributed --weights FILE"
            )
        value = self._program.params[p]
        if value.numel() * value.element_size() != self.graph.param_bytes[p]:
            raise RunnerError(
                f"{self._program.param_names[p]!r} is {value.dtype} of shape {tuple(value.shape)} "
                f"now, but was captured with {self.graph.param_bytes[p]} bytes: capture again"
            )

    def _one_gpu(self) -> int | None:
        """The GPU that runs all, so that the calling thread can launch it from begin to end."""
        if len(self._used) != 1 or self._record or self._schedule is not None:
            return None
        (d,) = self._used
        carries = any(phase[d].carried for phase in self._shares)
        is_gpu = self.cluster.devices[d].kind == "cuda"
        return d if is_gpu and self._is_topological() and not carries else None

    @property
    def not_graphed(self) -> dict[str, str]:
        """The first operator of each run that is no CUDA graph, and why not."""
        names = self.graph.op_name
        return {names[n]: why for graphs in self._graphs for n, why in graphs.eager.items()}

    @property
    def num_graphs(self) -> int:
        """How many runs of operators are CUDA graphs by now."""
        return sum(graphs.captured for graphs in self._graphs)

    def compile(self, report: Progress | None = None) -> None:
        """Compile runs of operators now, as the first call does where ``compiled`` is set.

        Those of a GPU are compiled in a call, for which the example inputs are taken.
        What is compiled is kept in the cache folder, for other processes too. A parameter that is
        written later is seen: what was compiled for its values is made again in the next call.

        Args:
            report: called as the work proceeds.

        Raises:
            RunnerError: a training step, running statistics, or a plan with an order, which are not
                compiled; closed, or a call or stream is using the runner.
        """
        with _Use(self):
            if not self.compiled:
                self.stop()  # workers of before, which interpret
            self.compiled, self._report = True, report or self._report
            self._start()
        if any(isinstance(x, Kernels) for x in self._artefacts):
            for _ in self.stream_tensors([self._program.timing_inputs()]):
                pass

    @property
    def not_compiled(self) -> dict[str, str]:
        """The first operator of each run that is interpreted, and why."""
        names = self.graph.op_name
        return {names[n]: why for x in self._artefacts for n, why in x.eager.items()}

    @property
    def num_compiled(self) -> int:
        """How many runs of operators are compiled."""
        return sum(x.compiled for x in self._artefacts)

    @property
    def compile_s(self) -> float:
        """Seconds that compiling took; 0 where all was kept from before."""
        return sum(x.seconds for x in self._artefacts)

    @property
    def packed(self) -> NDArray[np.int64]:
        """int64 ``[P]`` memory of packed weights, beside the module's own parameters."""
        total = np.zeros(len(self.graph.param_bytes))
        for artefacts in self._artefacts:
            total[[*artefacts.packed]] += [*artefacts.packed.values()]
        return np.rint(total).astype(np.int64)

    @property
    def packed_bytes(self) -> int:
        """Of all parameters."""
        return int(self.packed.sum())

    def _is_topological(self) -> bool:
        """Otherwise runs of operators in order of priority could wait for each other."""
        return all(self._priority[u] < self._priority[v] for u, v in self.graph.edges.tolist())

    def _load(
        self, d: int, ops: list[int], device: torch.device
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """What the operators of device ``d`` read, and the gradients that they add up."""
        program, params = self._program, {}
        read = set(self.graph.param_use[np.isin(self.graph.param_use_op, ops)].tolist())
        home = np.atleast_2d(self.placement)[0]
        sources = [(p, int(self.graph.tensor_src[t])) for p, t in program.gradients]
        sources = [(p, op) for p, op in sources if op in ops]
        read.update(p for p, op in sources if home[op] == d)  # a parameter is trained there
        # What is kept of another plan leaves gaps between it: where memory is short, all is freed.
        is_short = self.cluster.streaming and not self.has_company
        weights.forget_others(device, program, set() if is_short else read)
        changed = {p for p, _ in program.new_buffers} if not self._own_buffers else ()
        for p in sorted(read):
            if p >= len(program.params):
                continue  # gradients and optimizer state: bytes, not something to read
            key = (device, p)
            if key not in self.loaded:
                self._check_values(p)
                value = program.params[p].detach()
                if device == value.device or p in changed:
                    self.loaded[key] = value.to(device, copy=p in changed)
                elif program.gradients:  # it is trained there, and nobody else's
                    copy = weights.Copy(value.to(device), weights.state_of(value))
                    self.loaded[key] = copy.tensor
                    self.trained.add(key, program.params[p], copy)
                else:
                    copy = weights.on(device, program, p)
                    self.loaded[key] = copy.tensor
                    self._copies.add(key, program.params[p], copy)
            params[p] = self.loaded[key]
        if device.type == "cuda" and not program.gradients:
            weights.flatten(program, ops, params)
        gradients: dict[int, Tensor] = {}
        for p, op in sources:  # replicas add up what they make, each by itself
            sums: Any = self.gradients if home[op] == d else self.partial
            name = p if home[op] == d else (d, p)
            if name not in sums:
                sums[name] = torch.zeros_like(program.params[p].detach(), device=device)
            gradients[p] = sums[name]
        return params, gradients

    def call_on(self, functions: Mapping[int, Callable[[], None]]) -> None:
        """Call functions in the threads of devices (by number), and wait until all are done.

        Raises:
            RunnerError: closed.
            Exception: what one raised.
        """
        if self._closed:
            raise RunnerError(_CLOSED)
        left = set(functions)
        try:
            self._start()
            self._follow_caller()
            for d, function in functions.items():
                self.workers[d].inbox.put(function)
            while left:
                message = self._results.get()
                if isinstance(message, Failure):
                    self._raise(message)
                _, _, device = message
                if isinstance(device, Exception):  # what its function raised
                    raise device
                left.discard(device)
        except BaseException:  # what is left must not answer to a later call
            self.stop()
            raise

    def stop(self) -> None:
        """End the workers, and what they have begun; the next call starts them again."""
        self.workers = []  # first: an interrupt while they end must not leave them in use
        if self._finalizer is not None:
            self._finalizer()

    def close(self) -> None:
        """End the workers; the runner cannot be used afterwards. Idempotent.

        A call or stream that is using the runner, in another thread too, ends with ``RunnerError``.
        """
        self._closed = True
        if self._busy.locked():
            self._results.put(Failure(RunnerError(_CLOSED_IN_USE), -1, None))
        self.release()
        self.gradients.clear()
        self.partial.clear()

    def release(self) -> None:
        """End the workers, and free parameters in other memory; the next call loads them again."""
        with self._calling:
            self.stop()
        self.loaded.clear()
        self._copies, self.trained = weights.Copies(), weights.Copies()
        self._streamed.clear()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Pending:
    """A micro-batch that devices work on; ``unwritten``: whether its inputs are as they were."""

    outputs: dict[int, Any]
    devices_left: set[int]
    unwritten: Unwritten


@dataclass
class _Flow:
    """A stream: micro-batches from number ``first`` on, of which ``following`` is given next."""

    source: Iterator[Sequence[Tensor]]
    items: InputPipeline | None
    first: int
    pending: dict[int, _Pending] = field(default_factory=dict)
    finished: dict[int, Any] = field(default_factory=dict)
    failed: Exception | None = None  # the source, after the last of them
    exhausted: bool = False

    def __post_init__(self) -> None:
        self.following = self.first


class _Use:
    """One call or stream of a runner; if it is left early the workers stop."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._awake = cores_awake() if len(runner._used) > 1 else None

    def __enter__(self) -> None:
        runner = self._runner
        if runner._closed:
            raise RunnerError(_CLOSED)
        if runner._process != os.getpid():
            raise RunnerError(
                "the runner is another process's, and a fork has no threads: bind the plan in this "
                "process, which should be started by spawn"
            )
        if torch._C._is_any_autocast_enabled():
            raise RunnerError(
                "autocast is on around the call, but what was captured does not follow it: use it "
                "in the module's forward, and capture that; or call the runner outside of it"
            )
        if not runner._busy.acquire(blocking=False):
            raise RunnerError(
                "the runner is in use by another call or stream; finish it, or bind a second one"
            )
        if self._awake is not None:
            try:
                self._awake.__enter__()
            except BaseException:  # Ctrl-C: ``__exit__`` is not called then
                runner._busy.release()
                raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._awake is not None:
                self._awake.__exit__(None, None, None)
            if kind is not None:
                self._runner.stop()
        finally:  # also where Ctrl-C comes again
            self._runner._busy.release()


class _Direct:
    """The micro-batches of a call or stream on the one GPU that runs them, in order.

    Operators are launched by the calling thread; only long inputs are copied by another meanwhile.
    """

    def __init__(self, worker: Worker, is_late: Callable[[], bool]) -> None:
        self.worker, self._is_late = worker, is_late
        assert isinstance(worker.backend, CudaBackend)
        self._backend = worker.backend
        # With the inputs of the model, which keep their memory until their outputs are complete.
        self._coming: deque[tuple[int, dict[int, Any], queue.SimpleQueue[Any]]] = deque()
        self._launched: deque[tuple[Leaving, dict[int, Any]]] = deque()

    def follow_caller(self) -> None:
        """What the calling thread has launched happens first."""
        if (mark := self._backend.callers_mark()) is not None:
            self._backend.follow(mark)

    def admit(self, batch: int, inputs: dict[int, Any]) -> None:
        """Micro-batch ``batch`` comes next, with these inputs of the model."""
        share = self.worker.shares[batch % len(self.worker.shares)]
        mine = {t: inputs[t] for t in share.model_inputs}
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        here = {t: x for t, x in mine.items() if self._backend.holds(x)}
        if here:
            self.follow_caller()
        if len(here) < len(mine):
            mine = {t: x if t in here else x.cpu() for t, x in mine.items()}
            self._backend.bring(mine, arrived.put)
        else:
            arrived.put(mine)
        self._coming.append((batch, here, arrived))

    def call(self, batch: int, inputs: dict[int, Any]) -> dict[int, Any]:
        """Outputs of the only micro-batch, complete."""
        if any(map(self._backend.holds, inputs.values())):
            self.follow_caller()
        return self.worker.launch(batch, inputs, self._is_late, is_last=True).take()

    def next(self, no_more: bool) -> dict[int, Any]:
        """Outputs of the first micro-batch that is left, complete.

        While they are not, what has come is launched; once they are, only what a GPU without work
        waits for delays them.
        """
        while self._coming and not (self._launched and self._is_due()):
            batch, here, arrived = self._coming.popleft()
            if isinstance(inputs := arrived.get(), Exception):
                raise inputs
            is_last = no_more and not self._coming and not self._launched
            self._launched.append((self.worker.launch(batch, inputs, bool, is_last), here))
        outputs, _ = self._launched.popleft()
        return outputs.take()

    def _is_due(self) -> bool:
        """Whether the first that was launched is complete, and what comes may wait.

        It may where the GPU has more to do while the caller uses the outputs, or nothing is here.
        """
        (first, _), (last, _) = self._launched[0], self._launched[-1]
        try:
            return self._coming[0][2].empty() or (first.are_there() and not last.are_there())
        except RuntimeError:  # the GPU has failed, which ``take`` says
            return True


def _whole_of_pieces(program: Program) -> dict[int, Tensor]:
    """By number, of each parameter that is a piece, the module's, of which it is a view."""
    if program.pieces is None:
        return {}
    named = enumerate(zip(program.params, program.param_names, strict=True))
    return {p: x._base for p, (x, name) in named if name.endswith("]") and x._base is not None}


def _phases(placed: NDArray[np.int32], graph: OpGraph, cluster: Cluster) -> NDArray[np.int32]:
    """A placement as ``[K, N]``.

    Raises:
        RunnerError: another shape, or an unknown device.
    """
    phases = np.atleast_2d(placed)
    if phases.ndim != 2 or len(phases) == 0 or phases.shape[1] != graph.num_ops:
        raise RunnerError(
            f"placement has shape {placed.shape}, expected ({graph.num_ops},), or "
            f"(K, {graph.num_ops}) of a periodic one"
        )
    unknown = np.argwhere((phases < 0) | (phases >= cluster.num_devices))
    if len(unknown):
        k, op = map(int, unknown[0])
        raise RunnerError(
            f"operator {op} ({graph.op_name[op]!r}) is on device {phases[k, op]}; devices "
            f"are 0..{cluster.num_devices - 1}"
        )
    return phases


def _check_carried(graph: OpGraph, phases: NDArray[np.int32]) -> None:
    """What one micro-batch writes for the next must be where the next one reads it.

    Raises:
        RunnerError: naming the operator that is elsewhere in another phase.
    """
    for writer, readers in graph.carried.items() if len(phases) > 1 else ():
        for op in (writer, *readers):
            k = int(np.argmax(phases[:, op] != phases[0, writer]))
            if phases[k, op] != phases[0, writer]:
                raise RunnerError(
                    f"operator {op} ({graph.op_name[op]!r}) is on device {phases[k, op]} in phase "
                    f"{k}, but a buffer that it reads or writes, and every micro-batch changes (a "
                    f"running statistic), is on device {phases[0, writer]} in phase 0: keep these "
                    "operators on one device in all phases"
                )


def _repeated(schedule: Schedule, device: int, first: int) -> Iterator[tuple[int, int]]:
    """The order of a device, run after run, from micro-batch ``first`` on."""
    rows = schedule.order[device].tolist()
    for begin in itertools.count(first, schedule.num_microbatches) if rows else ():
        for op, batch in rows:
            yield op, begin + batch


def without_mode(x: Tensor) -> Tensor:
    """The same memory as a tensor that autograd may use, and that anybody may write to.

    Devices compute in ``torch.inference_mode``, which costs less than ``torch.no_grad``. What stays
    on a GPU, and what is asked for in that mode, is as it was made.
    """
    if not x.is_inference() or x.is_cuda or torch.is_inference_mode_enabled():
        return x
    if x.is_conj() or x.is_neg():
        return x.clone()
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return empty.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]


def _stop_workers(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()
    if isinstance(threading.current_thread(), Carrier):
        return  # in which the runner is collected: workers wait for this thread
    for worker in workers:
        # Not started, or the one in which the runner is collected.
        if worker.ident not in (None, threading.get_ident()):
            worker.join()
    for worker in workers:
        worker.workers = []
