"""``World``: the processes of a run that join, exchange tensors, and end together.

Messages go point to point through ``torch.distributed`` (gloo). Every ordered pair of ranks has
one thread that sends and one that receives. A message is a *ticket* of a few integers and at most
one tensor, each under a tag of its own. The sender decides the order, and the ticket tells it, so
the receiver never waits for a tensor that was not sent (see ``docs/distributed.md``).

Between ranks with one GPU each (``Direct``) tensors go from device memory to device memory through
another backend (NCCL), announced by the same tickets. It knows no tags, and what one rank sends and
receives on a communicator happens in turn: so every direction of a pair has a group of its own, and
the ticket goes first, to tell the receiver what to wait for.

Who has nothing to send says so now and then, so that each ticket can have a time limit: a rank that
dies breaks its connections, one that hangs is silent. Whoever notices tells the others. Processes
are started, and ended when one of them ends badly, by ``torchrun`` (or ``cli.ranks.spawn``).
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placement.executor.awake import let_senders_finish

FOREVER = timedelta(days=365)  # for what is sent: that nobody takes it is seen by what is received
OF_GROUP = timedelta(0)  # as long as the process group says
POSTED = 2  # receives of a kind that are posted ahead: one arrives while one is handed on
TICKET, LARGE, FIRST = range(3)  # tags: tickets, pickled objects, then one per kind of tensor
TENSOR, INPUT, ADMIT, RESULT, DONE, PARAM, OBJECT, KIND, PING, PONG = range(10)
ALIVE, FAULT, BYE = range(10, 13)  # nothing to send; why the run ends; nothing more is sent

Handler = Callable[[int, int, list[int], Any], None]  # rank, kind, its five numbers, value


class RankError(RuntimeError):
    """A rank is gone, hangs, or cannot be reached; the message says which, and what to do.

    Attributes:
        num_finished: results that were handed out before, where a stream was running.
    """

    num_finished: int | None = None


@dataclass(frozen=True)
class Direct:
    """Ranks between which tensors stay in device memory.

    Attributes:
        backend: of ``torch.distributed``, for tensors on these devices.
        ranks: two or more; each has one device.
        device: that of this rank, if it is one of them.
    """

    backend: str
    ranks: tuple[int, ...]
    device: torch.device

    def groups(self, timeout: timedelta) -> dict[tuple[int, int], Any]:
        """A group for each direction, by sending and receiving rank; every rank must call this."""
        return {
            pair: dist.new_group(pair, timeout=timeout, backend=self.backend)
            for pair in permutations(self.ranks, 2)
        }


def dense(value: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The elements in the order in which they lie in memory ``[numel]``, and their strides.

    ``elements.as_strided(value.shape, strides)`` is ``value`` again. What operators read may
    rely on its strides: a view that is made on the receiver exists for some only.
    """
    value = value.detach().resolve_conj().resolve_neg()
    strides = torch.empty_like(value, device="meta").stride()  # its own if nothing overlaps
    if value.stride() != strides:
        packed = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
        value = packed.copy_(value)
    return value.as_strided((value.numel(),), (1,)), strides


class World:
    """All ranks of a run, seen from one of them. ``join`` makes it; leave it with ``close``.

    Attributes:
        rank, size: as ``torchrun`` numbers the processes.
        timeout_s: a rank that gives no sign of life for so long has failed.
        fault: what has ended the run, or None.
        runner: gives the runner that has begun last, or None.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        """Use ``join``."""
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.fault: RankError | None = None
        self.others = tuple(r for r in range(size) if r != rank)
        self.who: list[str] = []
        self.runner: Callable[[], Any] = lambda: None
        self._listener: Callable[[RankError], None] | None = None
        self._handler: Handler | None = None
        self._early: list[tuple[int, int, int, list[int], Any]] = []
        self._run = 0
        self._lock = threading.Lock()
        self._closing = False
        self._over = threading.Event()
        self._culprit: int | None = None  # the rank that failed, if one can be named
        self._out: dict[int, queue.SimpleQueue[Any]] = {r: queue.SimpleQueue() for r in self.others}
        self._heard_at: dict[int, float] = {}
        self._senders: list[threading.Thread] = []
        self._receivers: list[threading.Thread] = []
        self._device = torch.device("cpu")  # of what goes through ``_groups``
        self._groups: dict[tuple[int, int], Any] = {}  # sending and receiving rank

    @classmethod
    def join(cls, timeout_s: float = 30.0, direct: Direct | None = None) -> World:
        """Meet the other ranks, as ``torchrun`` has set the environment.

        ``direct`` names the same ranks and backend on every rank.

        Raises:
            RankError: not started by ``torchrun``, or not all came within ``timeout_s``.
        """
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            address = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}"
        except (KeyError, ValueError) as error:
            raise RankError(
                f"{error}: the environment does not say which rank this is; start it with "
                "torchrun --nproc-per-node N FILE, or placement run plan.json --distributed"
            ) from None
        world = cls(rank, size, timeout_s)
        limit = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group("gloo", timeout=limit)
            who: list[Any] = [None] * size
            dist.all_gather_object(who, f"process {os.getpid()} on {socket.gethostname()}")
            if direct is not None:
                # Longer: that a rank is gone is found by tickets that do not come.
                world._device, world._groups = direct.device, direct.groups(2 * limit)
        except RuntimeError as error:
            raise RankError(
                f"rank {rank} has not met all {size} ranks at {address} within {timeout_s:g} s "
                f"({_first_line(error)}): was each started, with this address, and is "
                "GLOO_SOCKET_IFNAME the interface between the hosts? --timeout gives them longer"
            ) from error
        world.who = who
        world._heard_at = dict.fromkeys(world.others, time.monotonic())
        let_senders_finish()
        for r in world.others:
            for work, threads in (
                (world._send, world._senders),
                (world._receive, world._receivers),
            ):
                threads.append(threading.Thread(target=work, args=(r,), daemon=True))
                threads[-1].name = f"placement-{work.__name__[1:]}-{r}"
                threads[-1].start()
        return world

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            self.abandon(f"rank {self.rank} has ended with {reason}")

    # --- messages ---------------------------------------------------------------------------------

    def attach(self, handler: Handler, listener: Callable[[RankError], None]) -> int:
        """Begin the next run: all ranks must, in the same order. Its number.

        ``handler`` gets the messages of this run, in the threads that receive; ``listener`` is
        told why the run ends if a rank fails.
        """
        with self._lock:
            self._run += 1
            self._handler, self._listener = handler, listener
            early, self._early = self._early, []
            for run, *message in early:
                if run == self._run:
                    handler(*message)
            if self.fault is not None:
                listener(self.fault)
            return self._run

    def post(self, rank: int, kind: int, numbers: tuple[int, ...] = (), value: Any = None) -> None:
        """Send without waiting: in order, and only after what the same pair has sent before."""
        self._out[rank].put((self._run, kind, numbers, value))

    def is_direct(self, source: int, target: int) -> bool:
        """Whether the tensors between two ranks stay in device memory."""
        return (source, target) in self._groups

    def _send(self, rank: int) -> None:
        try:
            inbox, tags = self._out[rank], dict[tuple[Any, ...], int]()
            run, kind = 0, -1
            while kind != BYE:
                try:
                    run, kind, numbers, value = inbox.get(timeout=min(1.0, self.timeout_s / 8))
                except queue.Empty:
                    kind, numbers, value = ALIVE, (), None
                numbers = (*numbers, *[0] * (5 - len(numbers)))
                if value is not None and kind not in (OBJECT, FAULT):
                    shape = tuple(value.shape)
                    value, strides = dense(value)
                    # Another runner's tensor of this number may be of another kind.
                    key = (kind, *numbers[1:3], shape, strides, value.dtype)
                    tag = tags.get(key)
                    if tag is None:
                        tag = tags[key] = FIRST + len(tags)
                        about = _pickled((tag, shape, strides, value.dtype))
                        self._transmit(rank, (run, KIND, *numbers, LARGE, len(about)), about)
                elif value is not None:
                    value, tag = _pickled(value), LARGE
                else:
                    tag = TICKET
                size = 0 if value is None else value.nbytes
                ticket = (run, kind, *numbers, tag, size)
                if kind == TENSOR and self.is_direct(self.rank, rank):
                    self._transmit(rank, ticket, None)
                    group = self._groups[self.rank, rank]
                    move(dist.isend, value.to(self._device), rank, group, FOREVER)
                else:
                    self._transmit(rank, ticket, value)
                value = None  # an idle thread must not hold what was sent last
        except Exception as error:
            self._broken(rank, error)

    def _transmit(self, rank: int, ticket: tuple[int, ...], value: Tensor | None) -> None:
        works = []
        if value is not None and value.nbytes:
            works.append(dist.isend(value, rank, tag=ticket[-2]))
        works.append(dist.isend(torch.tensor(ticket), rank, tag=TICKET))
        for work in works:
            work.wait(FOREVER)  # type: ignore[union-attr]

    def _receive(self, rank: int) -> None:
        limit = timedelta(seconds=self.timeout_s)

        def post(count: int, dtype: torch.dtype, tag: int) -> tuple[Tensor, Any]:
            buffer = torch.empty(count, dtype=dtype)
            return buffer, dist.irecv(buffer, rank, tag=tag) if buffer.nbytes else None

        def take(posted: deque[tuple[Tensor, Any]]) -> Tensor:
            buffer, work = posted.popleft()
            if work is not None:
                work.wait(limit)
            return buffer

        try:
            kinds: dict[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
            posted = {TICKET: deque(post(9, torch.int64, TICKET) for _ in range(POSTED))}
            while True:
                run, kind, *numbers, tag, size = take(posted[TICKET]).tolist()
                posted[TICKET].append(post(9, torch.int64, TICKET))
                self._heard_at[rank] = time.monotonic()
                value: Any = None
                if tag == LARGE:
                    value = pickle.loads(
                        take(deque([post(size, torch.uint8, LARGE)])).numpy().tobytes()
                    )
                elif tag != TICKET:
                    shape, strides, dtype = kinds[tag]
                    count = prod(shape)
                    if kind == TENSOR and self.is_direct(rank, self.rank):
                        value = torch.empty(count, dtype=dtype, device=self._device)
                        move(dist.irecv, value, rank, self._groups[rank, self.rank], limit)
                    else:
                        if tag not in posted:
                            posted[tag] = deque(post(count, dtype, tag) for _ in range(POSTED))
                        value = take(posted[tag])
                        posted[tag].append(post(count, dtype, tag))
                    value = value.as_strided(shape, strides)
                if kind == BYE:
                    return
                if kind == KIND:
                    tag, *about = value
                    kinds[tag] = tuple(about)  # type: ignore[assignment]
                elif kind == PING:
                    self.post(rank, PONG, (numbers[0], time.perf_counter_ns()))
                elif kind == FAULT:
                    self._end(*value, tell=False)
                elif kind != ALIVE:
                    self._hand_on(run, rank, kind, numbers, value)
                value = None
        except Exception as error:
            self._broken(rank, error)

    def _hand_on(self, run: int, rank: int, kind: int, numbers: list[int], value: Any) -> None:
        with self._lock:
            if run > self._run:
                self._early.append((run, rank, kind, numbers, value))
            elif run == self._run and self._handler is not None:
                self._handler(rank, kind, numbers, value)

    @property
    def speaks(self) -> bool:
        """Whether it is for this rank to tell a person why the run has ended."""
        return self.rank == 0 or self._culprit in (0, None)

    def why(self, patience_s: float) -> RankError | None:
        """What has ended the run; waits so long to learn it."""
        self._over.wait(patience_s)
        return self.fault

    # --- faults -----------------------------------------------------------------------------------

    def name(self, rank: int) -> str:
        """A rank as a person finds it."""
        return f"rank {rank} ({self.who[rank]})"

    def _broken(self, rank: int, error: Exception) -> None:
        if time.monotonic() - self._heard_at[rank] >= self.timeout_s:
            self._end(
                f"{self.name(rank)} has given no sign of life for {self.timeout_s:g} s: it hangs, "
                "is stopped, or its link is down",
                rank,
            )
        elif isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            self._end(f"{self.name(rank)} has ended, or its connection broke", rank)
        else:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            self._end(f"{self.name(self.rank)} cannot talk to rank {rank}: {reason}")

    def _end(self, cause: str, culprit: int | None = None, *, tell: bool = True) -> None:
        """End the run here, and on the others that do not know; the first cause stays."""
        with self._lock:
            if self.fault is not None or self._closing:
                return
            self.fault, self._culprit, listener = RankError(cause), culprit, self._listener
        for r in self.others if tell else ():
            self.post(r, FAULT, value=(cause, culprit))
        if listener is not None:
            listener(self.fault)
        self._over.set()

    def abandon(self, cause: str) -> None:
        """Leave because of an error here: the others end too, with this cause."""
        self._end(cause, self.rank)
        self._closing = True
        for r in self.others:
            self.post(r, BYE)
        deadline = time.monotonic() + 1.0  # for what is to be told; a rank that hangs takes nothing
        for thread in self._senders:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Leave when all do: waits until every other rank has said so too. Idempotent.

        Raises:
            RankError: the run ended with a fault.
        """
        if self._closing:
            return
        for r in self.others:
            self.post(r, BYE)
        links = self._senders + self._receivers
        deadline = time.monotonic() + self.timeout_s
        while any(t.is_alive() for t in links) and self.fault is None:
            if time.monotonic() > deadline:
                self._end(f"{self.name(self.rank)} waits in vain for the others to close")
            time.sleep(0.002)
        self._closing = True
        self._over.set()
        if self.fault is not None:
            self.abandon(str(self.fault))
            raise self.fault
        dist.destroy_process_group()


def move(
    how: Callable[..., Any],
    value: Tensor,
    rank: int,
    group: Any = None,
    timeout: timedelta = OF_GROUP,
) -> None:
    """Send (``dist.isend``) or receive (``dist.irecv``) a tensor in its memory, and wait for it."""
    if value.nbytes:  # as bytes: NCCL does not know every type
        how(value.view(-1).view(torch.uint8), rank, group=group).wait(timeout)
    if value.is_cuda:  # the above has only let the stream of this thread wait
        torch.cuda.current_stream(value.device).synchronize()


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
