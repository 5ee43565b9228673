"""The thread that runs one device's operators.

All state of a device belongs to its thread; devices talk only through inboxes, so there are
no locks to take and none to forget. A worker follows the same rule as the simulator's list
scheduler: of what is ready, the smallest micro-batch, then the highest rank; or it follows a
given ``Schedule``. Operators may run as one function (``share.runs_of``), which stops when a
message comes: what that makes ready may come first. Runs of short operators take turns.

Consecutive operators share their time marks (the end of one is the start of the next, unless
something arrived in between), so the cost of dispatching an operator is part of the operator,
in the profile as in the pipeline.
"""

from __future__ import annotations

import heapq
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placement.executor.awake import wait_exactly
from placement.executor.backend import Backend, CudaBackend, Leaving, is_long
from placement.executor.generated import Call, Generated
from placement.executor.graphs import Replayed
from placement.executor.share import Share

_TURN = threading.Lock()  # of all runners of this process: they share its interpreter


@dataclass
class Failure:
    """What went wrong on a device, and in which operator (None: between operators); raised once."""

    error: BaseException
    device: int
    op: int | None


class _Flight:
    """One micro-batch on one device."""

    __slots__ = ("env", "left", "missing", "share", "uses")

    def __init__(self, share: Share) -> None:
        self.share = share
        self.env: list[Any] = [None] * len(share.users)
        self.missing = share.num_inputs.copy()
        self.uses = share.num_uses.copy()
        self.left = len(share.ops)


class _Whole:
    """A share that is launched from its begin to its end.

    Attributes:
        steps: operators in order, what runs each, results of the model that it makes, and what
            nobody reads any more then.
        has_graphs: whether any of them is a CUDA graph.
        readers: by input of the model, the graph that alone reads it.
    """

    def __init__(self, share: Share, generated: Generated, priority: list[int]) -> None:
        uses, graphs = share.num_uses.copy(), dict[int, Replayed]()
        self.steps: list[tuple[int, Call, list[int], list[int]]] = []
        for op in sorted(share.ops, key=priority.__getitem__):
            call, makes = generated.calls[op], share.outputs[op]
            if isinstance(call, Replayed):
                graphs[op] = call
            results = [t for t in makes if share.results[t]]
            dropped = [t for t in makes if not share.users[t]]
            for t in share.inputs[op]:
                uses[t] -= 1
                if uses[t] == 0:
                    dropped.append(t)
            self.steps.append((op, call, results, dropped))
        self.has_graphs = bool(graphs)
        users = {t: share.users[t] for t in share.model_inputs}
        self.readers = {
            t: graphs.get(ops[0]) if len(ops) == 1 else None for t, ops in users.items()
        }


class _Ready:
    """What can run on a device: by micro-batch and priority, or as a schedule says.

    Operator ``op`` of a micro-batch has the *key* ``batch * num_ops + priority[op]``.
    """

    def __init__(self, priority: list[int], order: Iterable[tuple[int, int]] | None) -> None:
        self._priority, self._num_ops = priority, len(priority)
        self._by_priority = sorted(range(len(priority)), key=priority.__getitem__)
        self._heap: list[int] = []
        self._order = None if order is None else iter(order)
        self._expected: int | None = None  # the key that the schedule has next

    def push(self, batch: int, op: int) -> int:
        """Operator ``op`` of micro-batch ``batch`` can run; its key."""
        key = batch * self._num_ops + self._priority[op]
        heapq.heappush(self._heap, key)
        return key

    def pop(self) -> int | None:
        """The key of what runs next; None: nothing can."""
        if self._order is None:
            return heapq.heappop(self._heap) if self._heap else None
        if self._expected is None and (entry := next(self._order, None)) is not None:
            self._expected = entry[1] * self._num_ops + self._priority[entry[0]]
        key = self._expected
        if key is None or key not in self._heap:
            return None
        self._expected = None
        self._heap.remove(key)
        heapq.heapify(self._heap)
        return key

    def at(self, key: int) -> tuple[int, int]:
        """The micro-batch and the operator of a key."""
        batch, position = divmod(key, self._num_ops)
        return batch, self._by_priority[position]


class _Flights(dict[int, _Flight]):
    """The micro-batches on one device, by number, and what of them is ready."""

    def __init__(self, shares: Sequence[Share], ready: _Ready, first_batch: int) -> None:
        super().__init__()
        self._shares, self._ready = shares, ready
        # Up to which micro-batch an operator that writes what the next one reads has run.
        self._carried_to = dict.fromkeys(shares[0].carried, first_batch)

    def __missing__(self, batch: int) -> _Flight:
        share = self._shares[batch % len(self._shares)]
        flight = self[batch] = _Flight(share)
        for writer, reached in self._carried_to.items():
            if reached < batch:
                for op in share.carried[writer]:
                    flight.missing[op] += 1
        return flight

    def count_down(self, batch: int, ops: Iterable[int]) -> None:
        """One thing less is missing of each of ``ops`` of micro-batch ``batch``."""
        missing = self[batch].missing
        for op in ops:
            missing[op] -= 1
            if missing[op] == 0:
                self._ready.push(batch, op)

    def ran(self, batch: int, op: int) -> bool:
        """Operator ``op`` has run; True: it was the last."""
        flight = self[batch]
        for t in flight.share.inputs[op]:
            flight.uses[t] -= 1
            if flight.uses[t] == 0:
                flight.env[t] = None
        carried = flight.share.carried
        if op in carried:
            self._carried_to[op] = batch + 1
            if batch + 1 in self:
                self.count_down(batch + 1, carried[op])
        flight.left -= 1
        if flight.left == 0:
            del self[batch]
        return flight.left == 0


class _Turns:
    """Runs of short operators on a CPU, one thread's at a time.

    Every operator lets go of the interpreter's lock while it computes. Where two threads run short
    ones it changes hands after each, and whoever waits must be woken: together they take two to
    five times as long as one after the other, and never the same. A run counts as short in its
    first ten times, and every 64th, and for good once it was; not any more once it took ten times
    as long, which no neighbour explains. Nobody waits long.
    """

    short_ns = 5000  # of an operator: most of it is the interpreter's, two threads gain nothing
    longest_s = 0.01  # that a thread waits

    def __init__(self, num_ops: dict[int, int]) -> None:
        self._num_ops = num_ops
        self._times: dict[int, float] = dict.fromkeys(num_ops, 0)  # -inf: short, inf: long

    def go_on(self, op: int, rest: Iterator[int], whole: bool) -> tuple[int | None, int]:
        """Go on with run ``op``, or begin it (``whole``).

        Returns before which operator it stopped, and the nanoseconds waited for the turn.
        """
        self._times[op] += 1
        if self._times[op] > 10 and self._times[op] % 64:  # (inf % 64 is nan, so true)
            return next(rest, None), 0
        asked_ns = time.perf_counter_ns()
        mine = _TURN.acquire(timeout=self.longest_s)
        try:
            began_ns = time.perf_counter_ns()
            following = next(rest, None)
            took_ns = time.perf_counter_ns() - began_ns
        finally:
            if mine:
                _TURN.release()
        short_ns = self.short_ns * self._num_ops[op]
        if whole and following is None and took_ns < short_ns:
            self._times[op] = -math.inf
        elif self._times[op] > 0 and took_ns > 10 * short_ns:
            self._times[op] = math.inf
        return following, began_ns - asked_ns


class Worker(threading.Thread):
    """Runs the operators of one device, of micro-batch ``m`` those of share ``m % K``.

    Messages in the inbox: ``(batch, tensor, value, source device, mark)`` brings a tensor,
    ``(batch, -1, {tensor: value}, -1, None)`` admits a micro-batch, ``(-1, -1, mark, -1, None)``
    says what a CUDA device has to wait for, a function is called between operators, None ends the
    thread.
    Messages to ``results``: ``(batch, tensor, value)`` is an output of the model,
    ``(batch, -1, device)`` says that this device has finished the micro-batch (-1: the function),
    and a ``Failure`` ends the run.

    Attributes:
        slices: batch, operator, start mark, end mark, and so on, if there are ``marks``: the list
            in which operators leave their numbers and when they ended.
        arrivals: batch, tensor, source device, sent and received mark, and so on, likewise.
        waits: batch, nanoseconds that it waited for its turn, and so on, likewise.
        takes_from_device: what is sent here may be in the memory of a CUDA device.
        arrange: what is done with an input of the model. Here, as threads of the caller's would
            look for more to do for milliseconds, on the cores of devices.
    """

    def __init__(
        self,
        name: str,
        shares: Sequence[Share],
        backend: Backend,
        generated: Sequence[Generated],
        priority: list[int],
        results: queue.SimpleQueue[Any],
        marks: list[Any] | None,
        order: Iterable[tuple[int, int]] | None,
        first_batch: int = 0,
    ) -> None:
        super().__init__(name=f"placement-{name}", daemon=True)
        self.device = shares[0].device
        self.shares = shares
        self.backend = backend
        self.inbox = backend.inbox()
        self.takes_from_device = isinstance(backend, CudaBackend)
        self.workers: list[Worker] = []
        self.arrange: Callable[[Any], Any] = lambda value: value
        self.slices: list[Any] = []
        self.arrivals: list[Any] = []
        self.waits: list[int] = []
        self._results = results
        self._generated = generated
        self._priority = priority
        self._whole = [_Whole(x, c, priority) for x, c in zip(shares, generated, strict=True)]
        self._marks = marks
        self._order = None if order is None else iter(order)
        self._first_batch = first_batch
        self._stopped = False
        self._running: int | None = None  # an operator, of micro-batch
        self._batch = first_batch

    def stop(self) -> None:
        """End the thread after the operator that is running now; work in flight is dropped."""
        self._stopped = True
        self.inbox.put(None)

    def start(self) -> None:
        """Start the thread."""
        self.backend.begin()
        super().start()

    def run(self) -> None:
        """All that the thread does."""
        self.backend.run(self._work)

    def launch(
        self, batch: int, inputs: dict[int, Any], is_late: Callable[[], bool], is_last: bool
    ) -> Leaving:
        """Launch a micro-batch that is all of this GPU in the calling thread.

        For ``is_late`` and ``is_last`` see ``CudaBackend.call``. Where it cannot be late (``bool``)
        inputs are taken out of ``inputs``, so that their memory is free early; but somebody keeps
        those that are on this GPU already until their outputs are complete. Meanwhile nobody may
        send anything here, and nothing is carried to the next micro-batch.
        """
        backend = self.backend
        assert isinstance(backend, CudaBackend), "CPU devices have cores and threads of their own"
        self._batch, k = batch, batch % len(self.shares)
        share, whole = self.shares[k], self._whole[k]

        def launched() -> dict[int, Any]:
            outputs, nothing_arrived = dict[int, Any](), self.inbox.empty
            env: list[Any] = [None] * len(share.users)
            take = inputs.pop if is_late is bool else inputs.__getitem__
            for t, graph in whole.readers.items():
                slot = None if graph is None else graph.slots.get(t)
                env[t] = backend.receive(take(t), slot, kept=True)
            passes = whole.has_graphs and not backend.results_stay
            for op, call, results, dropped in whole.steps:
                self._running = op
                quick = call.launch if passes and isinstance(call, Replayed) else call
                for _ in quick(env, nothing_arrived) or ():
                    pass
                for t in results:
                    # It is, or is a part of, what the next micro-batch writes over.
                    beside = passes and not is_last and is_long(env[t])
                    outputs[t] = env[t].clone() if beside else env[t]
                for t in dropped:
                    env[t] = None
            self._running = None
            return outputs

        return backend.call(launched, is_late, is_last)

    def failure(self, error: BaseException) -> Failure:
        """``error``, and the operator that was being launched."""
        op = self._running
        if op is not None:
            op = self._generated[self._batch % len(self.shares)].failed_op(error, op)
        return Failure(error, self.device, op)

    def _work(self) -> None:
        wait_exactly()
        try:
            with ExitStack() as stack, torch.inference_mode():
                self.backend.enter(stack)
                self._loop()
        except BaseException as error:
            # The thread ends here; the error goes on in the thread that called.
            self._results.put(self.failure(error))

    def _loop(self) -> None:
        backend, inbox = self.backend, self.inbox
        calls = [generated.calls for generated in self._generated]
        turns = [_Turns(generated.num_ops) for generated in self._generated]
        take_turns = backend.torch_device.type == "cpu"
        self._ready = ready = _Ready(self._priority, self._order)
        self._flights = flights = _Flights(self.shares, ready, self._first_batch)
        suspended: dict[int, tuple[int, Iterator[int]]] = {}  # by key: a run, and the rest of it
        self._mark = backend.mark()
        while True:
            while not inbox.empty():
                if not self._receive(inbox.get()):
                    return
            key = ready.pop()
            if key is None:
                message = inbox.get()
                if not self._receive(message):
                    return
                message = None  # or an idle worker would hold what came last
                continue
            batch, op = ready.at(key)
            self._batch, env = batch, flights[batch].env
            rest: Iterator[int] | None
            resumed = key in suspended
            if resumed:
                op, rest = suspended.pop(key)
                self._running = op
            else:
                self._running = op
                rest = calls[batch % len(calls)][op](env, inbox.empty)
            following = None
            if rest is not None and not take_turns:
                following = next(rest, None)
            elif rest is not None:
                following, waited_ns = turns[batch % len(turns)].go_on(op, rest, not resumed)
                if waited_ns and self._marks is not None:
                    self._mark += waited_ns
                    self.waits += (batch, waited_ns)
            if self._marks:
                self._keep(batch, self._marks)
            if rest is not None and following is not None:
                # Something has arrived, and what it makes ready may come before the rest.
                suspended[ready.push(batch, following)] = op, rest
                self._running = None
                continue
            self._hand_on(batch, op, env)
            self._running = None  # first: whoever hears of the last one may ``call``
            if flights.ran(batch, op):
                self._return(batch, -1, self.device)

    def _keep(self, batch: int, marks: list[Any]) -> None:
        """Note which operators have run, each from the end of the one before it."""
        begin = self._mark
        for op, end in zip(marks[::2], marks[1::2], strict=True):
            # Flat, because a list of tuples would keep the garbage collector busy.
            self.slices += (batch, op, begin, end)
            begin = end
        self._mark = begin
        marks.clear()

    def _receive(self, message: Any) -> bool:
        """Take a message from the inbox; False: the thread is to end."""
        if self._stopped:
            return False
        if callable(message):
            message()
            self._return(-1, -1, self.device)
            return True
        batch, tensor, value, source, sent = message
        if isinstance(value, Exception):
            raise value
        if batch < 0:
            self.backend.follow(value)
            return True
        flights, flight = self._flights, self._flights[batch]
        env, users = flight.env, flight.share.users
        if tensor < 0:
            flights.count_down(batch, flight.share.sources)
        for t, v in ((tensor, value),) if tensor >= 0 else tuple(value.items()):
            received = self.backend.receive(v)
            env[t] = received if tensor >= 0 else self.arrange(received)
            flights.count_down(batch, users[t])
        if self._marks is not None:
            self._mark = self.backend.mark()  # what runs next starts after what arrived
            if tensor >= 0:
                self.arrivals += (batch, tensor, source, sent, self._mark)
        return True

    def _hand_on(self, batch: int, op: int, env: list[Any]) -> None:
        """Give the outputs of ``op`` to who reads them: here, on other devices, in the results."""
        share = self._flights[batch].share
        for t in share.outputs[op]:
            self._flights.count_down(batch, share.users[t])
            for peer in share.peers[t]:
                self._send(peer, batch, t, env[t], self._mark)
            if share.results[t]:
                self._give(batch, t, env[t])
            if not share.users[t]:
                env[t] = None

    def _send(self, peer: int, batch: int, tensor: int, value: Tensor, sent: Any) -> None:
        to, source = self.workers[peer], self.device
        inbox = to.inbox
        self.backend.ship(
            value, lambda v: inbox.put((batch, tensor, v, source, sent)), stay=to.takes_from_device
        )

    def _give(self, batch: int, tensor: int, value: Tensor) -> None:
        results = self._results
        self.backend.give(value, lambda v: results.put((batch, tensor, v)))

    def _return(self, batch: int, tensor: int, value: Any) -> None:
        results = self._results
        self.backend.ship(value, lambda v: results.put((batch, tensor, v)))
