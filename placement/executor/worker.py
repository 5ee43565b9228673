"""The thread that runs one device's operators.

All state of a device belongs to its thread; devices talk only through inboxes, so there are
no locks to take and none to forget. A worker follows the same rule as the simulator's list
scheduler: of what is ready, the smallest micro-batch, then the highest rank; or it follows a
given ``Schedule``. Operators may run as one function (``share.runs_of``), which stops when a
message comes: what that makes ready may come first.

Consecutive operators share their time marks (the end of one is the start of the next, unless
something arrived in between), so the cost of dispatching an operator is part of the operator,
in the profile as in the pipeline.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placement.executor.awake import wait_exactly
from placement.executor.backend import Backend
from placement.executor.share import Compiled, Share


@dataclass(frozen=True)
class Failure:
    """What went wrong on a device, and in which operator (None: between operators)."""

    error: BaseException
    device: int
    op: int | None


class _Flight:
    """One micro-batch on one device."""

    __slots__ = ("env", "left", "missing", "uses")

    def __init__(self, share: Share) -> None:
        self.env: list[Any] = [None] * len(share.users)
        self.missing = share.num_inputs.copy()
        self.uses = share.num_uses.copy()
        self.left = len(share.ops)


class Worker(threading.Thread):
    """Runs the operators of one device.

    Messages in the inbox: ``(batch, tensor, value, source device, mark)`` brings a tensor,
    ``(batch, -1, {tensor: value}, -1, None)`` admits a micro-batch, a function is called between
    operators, None ends the thread.
    Messages to ``results``: ``(batch, tensor, value)`` is an output of the model,
    ``(batch, -1, device)`` says that this device has finished the micro-batch (-1: the function),
    and a ``Failure`` ends the run.

    Attributes:
        slices: batch, operator, start mark, end mark, and so on, if ``record``.
        arrivals: batch, tensor, source device, sent and received mark, and so on, if ``record``.
        idle_ns: how long the thread has waited for messages so far.
        idle_since_ns: since when it waits now; 0 while it works.
    """

    takes_from_device = False  # what is sent here passes through host memory

    def __init__(
        self,
        name: str,
        share: Share,
        backend: Backend,
        compiled: Compiled,
        priority: list[int],
        results: queue.SimpleQueue[Any],
        record: bool,
        order: Iterable[tuple[int, int]] | None,
        first_batch: int = 0,
    ) -> None:
        super().__init__(name=f"placement-{name}", daemon=True)
        self.share = share
        self.backend = backend
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.workers: list[Worker] = []
        self.slices: list[Any] = []
        self.arrivals: list[Any] = []
        self.idle_ns = 0
        self.idle_since_ns = 0
        self._results = results
        self._compiled = compiled
        self._priority = priority
        self._record = record
        self._order = None if order is None else iter(order)
        self._first_batch = first_batch
        self._stopped = False

    def stop(self) -> None:
        """End the thread after the operator that is running now; work in flight is dropped."""
        self._stopped = True
        self.inbox.put(None)

    def run(self) -> None:
        self._running: int | None = None
        wait_exactly()
        try:
            with ExitStack() as stack, torch.inference_mode():
                self.backend.enter(stack)
                self._loop()
        except BaseException as error:
            # The thread ends here; the error goes on in the thread that called.
            op = self._running
            if op is not None:
                op = self._compiled.failed_op(error, op)
            self._results.put(Failure(error, self.share.device, op))

    def _loop(self) -> None:
        share, backend, inbox, record = self.share, self.backend, self.inbox, self._record
        calls, priority = self._compiled.calls, self._priority
        inputs, outputs = share.inputs, share.outputs
        users, results = share.users, share.results
        num_ops = len(priority)
        by_priority = sorted(range(num_ops), key=priority.__getitem__)
        flights: dict[int, _Flight] = {}
        ready: list[int] = []  # heap of batch * num_ops + priority
        expected: int | None = None  # with a schedule: the key that comes next
        order = self._order
        carried, carried_to = share.carried, dict.fromkeys(share.carried, self._first_batch)
        suspended: dict[int, tuple[int, Iterator[int]]] = {}  # by key: a run, and the rest of it
        mark = backend.mark()

        def became_ready(batch: int, op: int) -> None:
            heapq.heappush(ready, batch * num_ops + priority[op])

        def receive(message: Any) -> None:
            if callable(message):
                message()
                self._return(-1, -1, share.device)
                return
            batch, tensor, value, source, sent = message
            flight = flights.get(batch)
            if flight is None:
                flight = flights[batch] = _Flight(share)
                for writer, reached in carried_to.items():
                    if reached < batch:
                        for op in carried[writer]:
                            flight.missing[op] += 1
            if tensor >= 0:
                if isinstance(value, Exception):
                    raise value
                arrived = ((tensor, value),)
            else:
                arrived = tuple(value.items())
                for op in share.sources:
                    flight.missing[op] -= 1
                    if flight.missing[op] == 0:
                        became_ready(batch, op)
            missing = flight.missing
            for t, v in arrived:
                flight.env[t] = backend.receive(v)
                for op in users[t]:
                    missing[op] -= 1
                    if missing[op] == 0:
                        became_ready(batch, op)
            if record:
                nonlocal mark  # what runs next starts after what arrived
                mark = backend.mark()
                if tensor >= 0:
                    self.arrivals += (batch, tensor, source, sent, mark)

        while True:
            while not inbox.empty():
                message = inbox.get()
                if self._stopped:
                    return
                receive(message)
                message = None  # or an idle worker would hold what came last
            if order is not None:
                if expected is None and (entry := next(order, None)) is not None:
                    expected = entry[1] * num_ops + priority[entry[0]]
                runnable = expected is not None and expected in ready
            else:
                runnable = bool(ready)
            if not runnable:
                self.idle_since_ns = time.perf_counter_ns()
                message = inbox.get()
                self.idle_ns += time.perf_counter_ns() - self.idle_since_ns
                self.idle_since_ns = 0
                if self._stopped:
                    return
                receive(message)
                message = None
                continue
            if order is None:
                key = heapq.heappop(ready)
            else:
                assert expected is not None
                key, expected = expected, None
                ready.remove(key)
                heapq.heapify(ready)
            batch, position = divmod(key, num_ops)
            flight = flights[batch]
            env, missing, uses = flight.env, flight.missing, flight.uses
            rest: Iterator[int] | None
            if key in suspended:
                op, rest = suspended.pop(key)
                self._running = op
            else:
                op = self._running = by_priority[position]
                rest = calls[op](env, inbox.empty)
            if rest is not None and (following := next(rest, None)) is not None:
                # Something has arrived, and what it makes ready may come before the rest.
                key = batch * num_ops + priority[following]
                suspended[key] = op, rest
                heapq.heappush(ready, key)
                self._running = None
                continue
            if record:
                begin, mark = mark, backend.mark()
                # Flat, because a list of tuples would keep the garbage collector busy.
                self.slices += (batch, op, begin, mark)
            for t in outputs[op]:
                for user in users[t]:
                    missing[user] -= 1
                    if missing[user] == 0:
                        became_ready(batch, user)
                for peer in share.peers[t]:
                    self._send(peer, batch, t, env[t], mark)
                if results[t]:
                    self._return(batch, t, env[t])
                if not users[t]:
                    env[t] = None
            for t in inputs[op]:
                uses[t] -= 1
                if uses[t] == 0:
                    env[t] = None
            if op in carried:
                carried_to[op] = batch + 1
                after = flights.get(batch + 1)
                if after is not None:
                    for reader in carried[op]:
                        after.missing[reader] -= 1
                        if after.missing[reader] == 0:
                            became_ready(batch + 1, reader)
            flight.left -= 1
            if flight.left == 0:
                del flights[batch]
                self._return(batch, -1, share.device)
            self._running = None

    def _send(self, peer: int, batch: int, tensor: int, value: Tensor, sent: Any) -> None:
        to, source = self.workers[peer], self.share.device
        inbox = to.inbox
        self.backend.ship(
            value, lambda v: inbox.put((batch, tensor, v, source, sent)), stay=to.takes_from_device
        )

    def _return(self, batch: int, tensor: int, value: Any) -> None:
        results = self._results
        self.backend.ship(value, lambda v: results.put((batch, tensor, v)))
