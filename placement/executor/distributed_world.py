"""``World``: the processes of a run that join, exchange tensors, and end together.

Messages go point to point through ``torch.distributed`` (gloo). Every ordered pair of ranks has
one thread that sends and one that receives. A message is a *ticket* of a few integers and at most
one tensor, each under a tag of its own. The sender decides the order, and the ticket tells it, so
the receiver never waits for a tensor that was not sent (see ``docs/distributed.md``).

Between ranks with one GPU each (``Direct``) tensors go from device memory to device memory through
another backend (NCCL), announced by the same tickets. It knows no tags, and what one rank sends and
receives on a communicator happens in turn: so every direction of a pair has a group of its own, and
the ticket goes first, to tell the receiver what to wait for.

Beside them two threads look after the others: one counts heartbeats in the ``TCPStore``, the other
only looks at the clock, because a store behind a dropped link does not answer at all.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import permutations
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placement.executor.awake import let_senders_finish

TIMEOUT_S = 30.0
FOREVER = timedelta(days=365)  # receives end with a message or a broken connection
OF_GROUP = timedelta(0)  # as long as the process group says
POSTED = 2  # receives of a kind that are posted ahead: one arrives while one is handed on
TICKET, LARGE, FIRST = 0, 1, 2  # tags: tickets, pickled objects, then one per kind of tensor
TENSOR, INPUT, ADMIT, RESULT, DONE, PARAM, OBJECT, KIND, PING, PONG, BYE = range(11)

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
        self.who: list[dict[str, Any]] = []
        self._listener: Callable[[RankError], None] | None = None
        self._handler: Handler | None = None
        self._early: list[tuple[int, int, int, list[int], Any]] = []
        self._run = 0
        self.runner: Callable[[], Any] = lambda: None
        self._lock = threading.Lock()
        self._closing = False
        self._wake = threading.Event()
        self._over = threading.Event()
        self._suspicion: dict[str, Any] | None = None
        self._out: dict[int, queue.SimpleQueue[Any]] = {r: queue.SimpleQueue() for r in self.others}
        self._links: list[threading.Thread] = []
        self._threads: list[threading.Thread] = []
        self._agent_keeps = False  # torchrun has the store, not rank 0
        self._keeps = False  # this rank has it, and leaves last
        self._store: Any = None
        self._alive_at = 0.0
        self._culprit: int | None = None  # the rank that failed, if one can be named
        self._device = torch.device("cpu")  # of what goes through ``_groups``
        self._groups: dict[tuple[int, int], Any] = {}  # sending and receiving rank

    @classmethod
    def join(cls, timeout_s: float = TIMEOUT_S, direct: Direct | None = None) -> World:
        """Meet the other ranks, as ``torchrun`` has set the environment.

        ``direct`` names the same ranks and backend on every rank.

        Raises:
            RankError: not started by ``torchrun``; somebody did not come within ``timeout_s``;
                this rank is there already, or the run has ended.
        """
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except (KeyError, ValueError) as error:
            raise RankError(
                f"{error}: the environment does not say which rank this is; start it with "
                "torchrun --nproc-per-node N FILE, or placement run plan.json --distributed"
            ) from None
        world = cls(rank, size, timeout_s)
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        prefix = f"placement/{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        world._agent_keeps = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        world._keeps = rank == 0 and not world._agent_keeps
        limit = timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(
                host, port, is_master=world._keeps, timeout=limit, wait_for_workers=False
            )
            # A connection of its own: a heartbeat must not wait for what else is asked.
            world._store = dist.PrefixStore(
                prefix, dist.TCPStore(host, port, timeout=limit, wait_for_workers=False)
            )
            world._meet()
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise RankError(
                f"rank {rank} cannot reach the store at {host}:{port} within {timeout_s:g} s "
                f"({_first_line(error)}): is the host of rank 0 up, and the port open?"
            ) from error
        world._threads = [
            threading.Thread(target=f, name=f"placement-{n}", daemon=True)
            for f, n in ((world._beat, "heart"), (world._watch, "watch"))
        ]
        for thread in world._threads:
            thread.start()
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"{prefix}/gloo", store),
                rank=rank,
                world_size=size,
                timeout=limit,
            )
            if direct is not None:
                # Longer: that a rank is gone is for the heartbeats to find.
                world._device, world._groups = direct.device, direct.groups(2 * limit)
        except RuntimeError as error:
            cause = world.fault or RankError(
                f"rank {rank} cannot connect to the others ({_first_line(error)}): is "
                "GLOO_SOCKET_IFNAME the interface between the hosts?"
            )
            world.abandon(str(cause))
            raise cause from error
        let_senders_finish()
        for r in world.others:
            for f, n in ((world._send, "send"), (world._receive, "receive")):
                name = f"placement-{n}-{r}"
                thread = threading.Thread(target=f, args=(r,), name=name, daemon=True)
                world._links.append(thread)
                thread.start()
        return world

    def _meet(self) -> None:
        """Wait until every rank is there, and learn who it is."""
        store = self._store
        if store.check(["fault"]):
            ended = json.loads(store.get("fault"))["cause"]
            raise RankError(f"rank {self.rank} comes too late, the run has ended: {ended}")
        if store.add(f"joined/{self.rank}", 1) > 1:
            raise RankError(
                f"rank {self.rank} has joined this run already, and a run takes nobody in later: "
                "end it, and start all ranks again"
            )
        me = {"pid": os.getpid(), "host": socket.gethostname(), "born": _born(os.getpid())}
        store.set(f"who/{self.rank}", json.dumps(me))
        deadline = time.monotonic() + self.timeout_s
        while missing := [r for r in range(self.size) if not store.check([f"who/{r}"])]:
            if time.monotonic() > deadline:
                cause = (
                    f"of {self.size} ranks, {_ranks(missing)} did not join within "
                    f"{self.timeout_s:g} s: was it started, with the same address? "
                    "--timeout gives them longer"
                )
                store.compare_set("fault", "", json.dumps({"cause": cause}))
                raise RankError(cause)
            if store.check(["fault"]):
                raise RankError(json.loads(store.get("fault"))["cause"])
            time.sleep(0.02)
        self.who = [json.loads(store.get(f"who/{r}")) for r in range(self.size)]

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
            kind = -1
            while kind != BYE:
                run, kind, numbers, value = inbox.get()
                numbers = (*numbers, *[0] * (5 - len(numbers)))
                if kind != OBJECT and value is not None:
                    shape = tuple(value.shape)
                    value, strides = dense(value)
                    # Another runner's tensor of this number may be of another kind.
                    key = (kind, *numbers[1:3], shape, strides, value.dtype)
                    tag = tags.get(key)
                    if tag is None:
                        tag = tags[key] = FIRST + len(tags)
                        about = _pickled((tag, shape, strides, value.dtype))
                        self._transmit(rank, (run, KIND, *numbers, LARGE, len(about)), about)
                elif kind == OBJECT:
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
        def post(count: int, dtype: torch.dtype, tag: int) -> tuple[Tensor, Any]:
            buffer = torch.empty(count, dtype=dtype)
            return buffer, dist.irecv(buffer, rank, tag=tag) if buffer.nbytes else None

        def take(posted: deque[tuple[Tensor, Any]]) -> Tensor:
            buffer, work = posted.popleft()
            if work is not None:
                work.wait(FOREVER)
            return buffer

        try:
            kinds: dict[int, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = {}
            posted = {TICKET: deque(post(9, torch.int64, TICKET) for _ in range(POSTED))}
            while True:
                run, kind, *numbers, tag, size = take(posted[TICKET]).tolist()
                posted[TICKET].append(post(9, torch.int64, TICKET))
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
                        move(dist.irecv, value, rank, self._groups[rank, self.rank], FOREVER)
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
                else:
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
        return f"rank {rank} (process {self.who[rank]['pid']} on {self.who[rank]['host']})"

    def _broken(self, rank: int, error: Exception) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
            self._suspect(f"{self.name(rank)} has ended, or its connection broke", rank, error)
        else:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            self._suspect(f"{self.name(self.rank)} cannot talk to rank {rank}: {reason}")

    def _suspect(
        self, cause: str, rank: int | None = None, error: Exception | None = None, hangs: int = 0
    ) -> None:
        """Tell all ranks; what was told first is the cause."""
        if self._closing or self._suspicion is not None:
            return
        detail = f" ({_first_line(error)})" if error is not None else ""
        self._suspicion = {"cause": cause + detail, "rank": rank, "hangs": hangs}
        self._wake.set()

    def _conclude(self, fault: dict[str, Any]) -> None:
        """End the run here; end a rank of this host that hangs, for it cannot do so itself."""
        with self._lock:
            if self.fault is not None or self._closing:
                return
            self.fault = RankError(fault["cause"])
            self._culprit = fault.get("rank")
            listener = self._listener
        rank = fault.get("rank")
        if fault.get("hangs") and rank is not None and rank != self.rank:
            it, me = self.who[rank], self.who[self.rank]
            # The number of a process may be another's by now: look when it was born.
            if it["host"] == me["host"] and it["born"] and _born(it["pid"]) == it["born"]:
                with suppress(OSError):
                    os.kill(it["pid"], signal.SIGKILL)
        if listener is not None:
            listener(self.fault)
        self._over.set()

    def _beat(self) -> None:
        interval = min(1.0, self.timeout_s / 8)
        silent = dict.fromkeys(self.others, 0.0)
        seen: dict[int, bytes] = {}
        self._alive_at = before = time.monotonic()
        try:
            for beat in range(2**62):
                if self._closing or self.fault is not None:
                    return
                self._wake.wait(interval)
                now = time.monotonic()
                # A process that was stopped itself has no right to call others silent.
                passed, before = min(now - before, 2 * interval), now
                self._store.set(f"beat/{self.rank}", str(beat))
                if self._suspicion is not None:
                    suspicion = self._store.compare_set("fault", "", json.dumps(self._suspicion))
                    return self._conclude(json.loads(suspicion))
                if self._store.check(["fault"]):
                    return self._conclude(json.loads(self._store.get("fault")))
                for r in self.others:
                    key = f"beat/{r}"
                    count = self._store.get(key) if self._store.check([key]) else b""
                    silent[r] = 0.0 if count != seen.get(r) else silent[r] + passed
                    seen[r] = count
                    if silent[r] > self.timeout_s:
                        cause = (
                            f"{self.name(r)} has given no sign of life for {self.timeout_s:g} s: "
                            "it hangs, is stopped, or its link is down"
                        )
                        self._suspect(cause, r, hangs=1)
                self._alive_at = time.monotonic()
        except Exception as error:
            self._lost(_first_line(error))

    def _watch(self) -> None:
        interval = min(1.0, self.timeout_s / 8)
        silent, seen, before = 0.0, -1.0, time.monotonic()
        while not self._closing and self.fault is None:
            self._over.wait(interval)
            now = time.monotonic()
            passed, before = min(now - before, 2 * interval), now
            alive_at = self._alive_at
            silent, seen = (0.0 if alive_at != seen else silent + passed), alive_at
            if silent > self.timeout_s + 2 * interval:
                self._lost(f"no answer for {self.timeout_s:g} s")

    def _lost(self, reason: str) -> None:
        """The store does not answer: nobody can be told, and all others find out the same way."""
        keeper = {} if self._agent_keeps else {"rank": 0, "hangs": 1}
        known = self._suspicion or keeper | {
            "cause": f"rank {self.rank} cannot reach the store of the run ({reason}): the host of "
            "rank 0 or the link to it is down, or torchrun has ended"
        }
        self._conclude(known)

    def abandon(self, cause: str) -> None:
        """Leave because of an error here: the others end too, with this cause."""
        if self.fault is None:
            self._suspect(cause, self.rank)
            self._over.wait(2.0)
        self._closing = True
        self._wake.set()
        self._leave(1.0)

    def _leave(self, patience_s: float) -> None:
        """The rank that keeps the store stays until the others have read why, or are gone."""

        def leave() -> None:
            with suppress(RuntimeError):
                left = self._store.add("left", 1)
                deadline = time.monotonic() + patience_s
                while self._keeps and left < self.size and time.monotonic() < deadline:
                    time.sleep(0.01)
                    left = self._store.add("left", 0)

        # A store whose process is stopped never answers: its question is left behind.
        thread = threading.Thread(target=leave, name="placement-leave", daemon=True)
        thread.start()
        thread.join(patience_s + 1.0)

    def close(self) -> None:
        """Leave when all do: waits until every other rank has said so too. Idempotent.

        Raises:
            RankError: the run ended with a fault.
        """
        if self._closing:
            return
        if self.fault is None:
            for r in self.others:
                self.post(r, BYE)
            deadline = time.monotonic() + self.timeout_s
            while any(t.is_alive() for t in self._links) and self.fault is None:
                if time.monotonic() > deadline:
                    self._suspect(f"{self.name(self.rank)} waits in vain for the others to close")
                    self._over.wait(2.0)
                time.sleep(0.002)
        self._closing = True
        self._wake.set()
        self._over.set()
        self._leave(1.0 if self.fault is not None else self.timeout_s)
        if self.fault is not None:
            raise self.fault
        for thread in self._threads:
            thread.join()
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


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _born(pid: int) -> str:
    """When a process of this machine began, as the system counts; empty if it does not say."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
