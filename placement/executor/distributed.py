"""``DistributedRunner`` and ``DistributedTrainer``: a plan's devices spread over processes.

Every rank makes the same runner and runs the workers of its own devices; the others' are stand-ins
whose inbox is the network. Rank 0 is called like a ``Runner``; the other ranks ``serve``:

    pin(cluster)
    with World.join(direct=direct(cluster)) as world:
        runner = DistributedRunner(graph, cluster, placement, world=world)
        if world.rank == 0:
            results = list(runner.stream(items))
            runner.close()
        else:
            runner.serve()
"""

from __future__ import annotations

import functools
import json
import os
import queue
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

from placement.cluster import Cluster, ClusterError, Device
from placement.executor.backend import stay_on
from placement.executor.distributed_world import (
    ADMIT,
    DONE,
    INPUT,
    OBJECT,
    PARAM,
    PING,
    PONG,
    RESULT,
    TENSOR,
    Direct,
    RankError,
    World,
)
from placement.executor.loader import InputPipeline
from placement.executor.runner import Runner, RunnerError
from placement.executor.share import Share
from placement.executor.trainer import Trainer, synchronize
from placement.executor.worker import Failure, Worker
from placement.graph import OpGraph
from placement.pieces import rules
from placement.pieces.split import PADDING
from placement.program import Program
from placement.tools.files import write_atomic

VALUE, SUM = range(2)  # what comes of a parameter
MARKER = "checkpoint.json"
_PART = re.compile(r"(.*)\[(\w+):(\d+)\]", re.DOTALL)  # name of a piece of a parameter


def ranks_of(cluster: Cluster, num_ranks: int) -> tuple[int, ...]:
    """``[D]`` rank of each device: neighbours together, in the order of the cluster.

    Raises:
        ClusterError: more ranks than devices.
    """
    num_devices = cluster.num_devices
    if not 1 <= num_ranks <= num_devices:
        raise ClusterError(
            f"{num_ranks} processes for {num_devices} devices: each needs one of its own; "
            f"give from 1 to {num_devices}, or name more devices with --cluster"
        )
    return tuple(d * num_ranks // num_devices for d in range(num_devices))


def pin(cluster: Cluster) -> None:
    """Keep this rank, with the threads that it starts from now on, on the cores of its devices.

    To be called before ``World.join``. Else threads that send and receive take whatever core, and
    the device on it, for which all others wait, is slowed down for every rank. Does nothing where
    a device of this rank names no cores, or this process may not choose.
    """
    rank, devices = _by_rank(cluster)
    mine = [d.cores for d in devices.get(rank, ())]
    if all(mine):
        stay_on(set().union(*mine))


def _by_rank(cluster: Cluster) -> tuple[int, dict[int, list[Device]]]:
    """This rank, and the devices of each; none if ``join``, or the runner, is to say why not."""
    devices: dict[int, list[Device]] = {}
    try:
        rank = int(os.environ["RANK"])
        ranks = ranks_of(cluster, int(os.environ["WORLD_SIZE"]))
    except (KeyError, ValueError):
        return -1, devices
    for device, r in zip(cluster.devices, ranks, strict=True):
        devices.setdefault(r, []).append(device)
    return rank, devices


def direct(cluster: Cluster) -> Direct | None:
    """How ``World.join`` lets tensors go from GPU to GPU: NCCL, between ranks with one GPU each.

    None: there are no two such ranks, or no NCCL. All others' tensors go through host memory.
    """
    rank, devices = _by_rank(cluster)
    gpu_ranks = tuple(r for r, ds in devices.items() if [d.kind for d in ds] == ["cuda"])
    if len(gpu_ranks) < 2 or not dist.is_nccl_available():
        return None
    name = devices[rank][0].name.rpartition("/")[2] if rank in gpu_ranks else "cpu"
    return Direct("nccl", gpu_ranks, torch.device(name))


class Remote:
    """A worker of another rank: its inbox is the network, its clock is set right by ``collect``.

    ``takes_from_device``: tensors go there from device memory.
    """

    ident = None  # no thread of this process

    def __init__(
        self, share: Share, rank: int, world: World, fail: Callable[[Failure], None]
    ) -> None:
        self.device, self.rank, self.fail = share.device, rank, fail
        self.workers: list[Any] = []
        self.inbox = self.backend = self
        self.slices: Sequence[Any] = []
        self.arrivals: Sequence[Any] = []
        self.offset_ns = 0
        self.takes_from_device = world.is_direct(world.rank, rank)
        self._world = world

    def put(self, message: Any) -> None:
        """What would go into the worker's inbox."""
        batch, tensor, value, source, sent = message
        device = self.device
        if isinstance(value, Exception):  # it failed on the way out of its device
            text = f"{type(value).__name__}: {value}"
            if self._world.rank == 0:
                self.fail(Failure(value, source, None))
            else:
                self._world.post(0, OBJECT, value=("failed", text, source, None))
        elif tensor >= 0:
            sent_ns = self.workers[source].backend.resolve_ns(sent)
            numbers = (batch, tensor, device, source, sent_ns)
            self._world.post(self.rank, TENSOR, numbers, value)
        else:
            for t, v in value.items():
                self._world.post(self.rank, INPUT, (batch, t, device), v)
            self._world.post(self.rank, ADMIT, (batch, -1, device))

    def admit(self, value: Tensor) -> Tensor:
        """An input of the model, as it is sent."""
        return value.cpu()

    def resolve_ns(self, mark: int) -> int:
        """A time of that rank's clock on this rank's."""
        return int(mark) + self.offset_ns

    def start(self) -> None:
        """Its own rank starts it."""

    def stop(self) -> None:
        """Its own rank stops it."""


class ToRankZero:
    """The results of a rank's workers: rank 0 gets them, but for answers to this rank's calls."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._here: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.get = self._here.get

    def put(self, message: Any) -> None:
        """A worker's message, or why the run ends."""
        if isinstance(message, Failure):
            if isinstance(message.error, RankError):
                self._here.put(message)
                return
            text = f"{type(message.error).__name__}: {message.error}"
            about = ("failed", text, message.device, message.op)
            self._world.post(0, OBJECT, value=about)
            return
        batch, tensor, value = message
        if batch < 0:
            self._here.put(message)
        elif isinstance(value, Exception):
            text = f"{type(value).__name__}: {value}"
            self._world.post(0, OBJECT, value=("failed", text, None, None))
        elif tensor >= 0:
            self._world.post(0, RESULT, (batch, tensor), value)
        else:
            self._world.post(0, DONE, (batch, -1, value))


class DistributedRunner(Runner):
    """A ``Runner`` over processes; all ranks make it alike, in the same order of runners.

    On rank 0 it is used as a ``Runner``, and ``close`` ends it on every rank; the others call
    ``serve``. Inputs are needed on rank 0 only, and results arrive there. A stream that is left
    before its end, or in which an operator fails, ends the run on every rank.

    Args:
        graph, cluster, placement: as for ``Runner``; the same on every rank.
        world: the processes.
        options: as for ``Runner``; the same on every rank.

    Raises:
        ClusterError: more ranks than devices.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        placement: ArrayLike,
        *,
        world: World,
        **options: Any,
    ) -> None:
        super().__init__(graph, cluster, placement, **options)
        if (self._placed != self.placement).any():
            raise RunnerError(
                "the placement has operators whose parameters stay in host memory (device "
                f"{cluster.device_names[cluster.streaming[0]]!r}), which runs in one process only: "
                "leave --distributed out, or plan for a cluster without that device"
            )
        self.world = world
        self.rank_of = ranks_of(cluster, world.size)
        self.clock_error_s = 0.0
        self.on_param: Callable[[int, int, Tensor], None] = lambda what, q, value: None
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self._own = [d for d in range(cluster.num_devices) if self.rank_of[d] == world.rank]
        self._arriving: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = False

    def own_params(self) -> list[int]:
        """Parameters (by number) that operators of this rank read, or outputs of the model are.

        And those that are trained here, where their gradients are made.
        """
        from placement.program import Param

        graph = self.graph
        here = np.isin(np.atleast_2d(self.placement)[:, graph.param_use_op], self._own)
        params = {
            p for p in graph.param_use[here.any(axis=0)].tolist() if p < len(self._program.params)
        }
        first = np.atleast_2d(self.placement)[0]
        params |= {p for p, t in self._program.gradients if first[graph.tensor_src[t]] in self._own}
        if self.world.rank == 0:
            params |= {x.index for x in self._program.output_leaves if isinstance(x, Param)}
        return sorted(params)

    # --- how the parts of a Runner are made ------------------------------------------------------

    def _mailbox(self) -> Any:
        return queue.SimpleQueue() if self.world.rank == 0 else ToRankZero(self.world)

    def _worker(self, phases: Sequence[Share], device: Device) -> Worker:
        share = phases[0]
        if self.rank_of[share.device] != self.world.rank:
            rank = self.rank_of[share.device]
            self._peers.append(Remote(share, rank, self.world, self._fail))
            return self._peers[-1]  # type: ignore[return-value]
        # Of several hosts' devices each is known to its own host by the last part of its name.
        return super()._worker(phases, replace(device, name=device.name.rpartition("/")[2]))

    def _start(self) -> None:
        if self.workers:
            return
        if self._ended:
            raise RunnerError("the run has ended on every rank: make a new runner on all of them")
        if (other := self.world.runner()) is not None and other.workers:
            raise RunnerError(
                "another runner of this world is open, which all ranks serve: close it"
            )
        self.world.runner = weakref.ref(self)
        self._peers: list[Remote] = []
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        super()._start()
        self.world.attach(self._deliver, lambda error: self._fail(Failure(error, -1, None)))
        if self.world.rank == 0:
            self.answers()  # every rank is ready
        else:
            self.world.post(0, OBJECT, value=("answer", self.world.rank, None))

    def _deliver(self, rank: int, kind: int, numbers: list[int], value: Any) -> None:
        batch, tensor, device, source, sent_ns = numbers
        workers = self.workers  # read once: another thread may stop the run
        if kind in (TENSOR, INPUT, ADMIT) and not workers:
            return  # what was on its way when the run ended here
        if kind == TENSOR:
            workers[device].inbox.put((batch, tensor, value, source, sent_ns))
        elif kind == INPUT:
            self._arriving.setdefault((batch, device), {})[tensor] = value
        elif kind == ADMIT:
            inputs = self._arriving.pop((batch, device), {})
            workers[device].inbox.put((batch, -1, inputs, -1, None))
        elif kind == RESULT:
            self._results.put((batch, tensor, value))
        elif kind == DONE:
            self._results.put((batch, -1, device))
        elif kind == PARAM:
            self.on_param(batch, tensor, value)
        elif kind == PONG:
            self._answers.put((rank, (batch, tensor, time.perf_counter_ns())))
        elif value[0] == "failed":
            _, text, device, op = value
            error = RankError(f"{self.world.name(rank)}: {text}")
            self._fail(Failure(error, -1 if device is None else device, op))
        elif value[0] == "answer":
            self._answers.put(value[1:])
        else:
            self._orders.put(value)

    def _fail(self, failure: Failure) -> None:
        """Tell whoever waits, for whatever it is."""
        for inbox in (self._results, self._answers, self._orders):
            inbox.put(replace(failure))
        self.on_failure(failure.error)

    # --- rank 0 ----------------------------------------------------------------------------------

    def _one_gpu(self) -> None:
        """The GPU may be another rank's."""

    def _direct(self, is_call: bool) -> None:
        if self.world.rank != 0:
            raise RunnerError(f"rank {self.world.rank} cannot call: rank 0 does, others serve()")
        super()._direct(is_call)

    def _stream(
        self,
        source: Iterator[Sequence[Tensor]],
        items: InputPipeline | None,
        direct: Any,
    ) -> Iterator[Any]:
        count, first = 0, self.next_batch
        try:
            for value in super()._stream(source, items, direct):
                count += 1
                yield value
        except RankError as error:
            ended = RankError(
                f"{error}\n{count} of {self.next_batch - first} micro-batches that were begun have "
                f"finished{f', 0 to {count - 1}' if count else ''}; the others are lost"
            )
            ended.num_finished = count
            raise ended from None

    def tell(self, name: str, *arguments: Any) -> None:
        """Let every other rank call what it ``serve``s under this name; ``answers`` are due."""
        self._start()
        for r in self.world.others:
            self.world.post(r, OBJECT, value=(name, *arguments))

    def answers(self) -> dict[int, Any]:
        """One answer of every other rank, by rank."""
        by_rank: dict[int, Any] = {}
        while len(by_rank) < len(self.world.others):
            message = self._answers.get()
            if isinstance(message, Failure):
                self._raise(message)
            rank, by_rank[rank] = message
        return by_rank

    def collect(self, first: int = 0) -> None:
        """Bring what the others have recorded since micro-batch ``first`` here, on this clock.

        The offset of a rank's clock is that of the fastest of some exchanges of messages; half
        of the time of that exchange bounds its error (``clock_error_s``, of the worst rank).
        """
        offset_ns: dict[int, int] = {}
        for r in self.world.others:
            best = 2**62
            for _ in range(20):
                self.world.post(r, PING, (time.perf_counter_ns(),))
                message = self._answers.get()
                if isinstance(message, Failure):
                    self._raise(message)
                _, (sent, theirs, received) = message
                if received - sent < best:
                    best = received - sent
                    offset_ns[r] = (sent + received) // 2 - theirs
            self.clock_error_s = max(self.clock_error_s, best * 0.5e-9)
        self.tell("marks", first)
        records = {d: rows for answer in self.answers().values() for d, rows in answer.items()}
        for peer in self._peers:
            peer.offset_ns = offset_ns[peer.rank]
            peer.slices, peer.arrivals = records[peer.device]

    def stop(self) -> None:
        """End the run on every rank."""
        if self.workers and self.world.rank == 0 and not self._ended:
            for r in self.world.others:
                self.world.post(r, OBJECT, value=("stop",))
        self._ended = self._ended or bool(self.workers)
        super().stop()

    # --- the other ranks -------------------------------------------------------------------------

    def serve(self, functions: Mapping[str, Callable[..., Any]] | None = None) -> None:
        """Work for rank 0 until it ends the run. ``functions`` can be called with ``tell``.

        Raises:
            RankError: a rank has failed.
        """
        if self.world.rank == 0:
            raise RunnerError("rank 0 is called, it does not serve")
        known = {"marks": self._marks, **(functions or {})}
        self._start()
        try:
            while True:
                order = self._orders.get()
                if isinstance(order, Failure):
                    self._raise(order)
                name, *arguments = order
                if name == "stop":
                    return
                answer = ("answer", self.world.rank, known[name](*arguments))
                self.world.post(0, OBJECT, value=answer)
        finally:
            self.stop()

    def _marks(self, first: int) -> dict[int, Any]:
        """What the devices of this rank have recorded, on its clock."""
        marks = {}
        for d in self._own:
            worker = self.workers[d]
            clock = worker.backend.resolve_ns
            rows = np.array(worker.slices, dtype=object).reshape(-1, 4)
            rows[:, 2:] = [[clock(a), clock(b)] for a, b in rows[:, 2:]] or rows[:, 2:]
            came = np.array(worker.arrivals, dtype=object).reshape(-1, 5)
            for row in came:
                if self.rank_of[row[2]] == self.world.rank:
                    row[3] = self.workers[row[2]].backend.resolve_ns(row[3])
                row[4] = clock(row[4])
            rows, came = rows[rows[:, 0] >= first], came[came[:, 0] >= first]
            marks[d] = rows.astype(np.int64).ravel(), came.astype(np.int64).ravel()
        return marks


class DistributedTrainer(Trainer):
    """A ``Trainer`` over processes; all ranks make it alike.

    Rank 0 is used as a ``Trainer``; the others call ``serve``. A parameter is updated on the rank
    that adds up its gradient in phase 0: what replicas on other ranks have added up comes there,
    and the new value goes to every other rank that reads it. ``sync`` brings everything to the
    module of rank 0.

    Args: as for ``Trainer``, and the ``world``.
    """

    def __init__(
        self, graph: OpGraph, cluster: Cluster, placement: ArrayLike,
        optimizer: torch.optim.Optimizer, *, world: World, **options: Any,
    ) -> None:  # fmt: skip
        make = functools.partial(DistributedRunner, world=world)
        super().__init__(graph, cluster, placement, optimizer, make_runner=make, **options)
        self.runner: DistributedRunner
        self.world, rank_of = world, self.runner.rank_of
        trained = {id(x) for group in optimizer.param_groups for x in group["params"]}
        self._has_any = {q for q in self._home if id(self._program.params[q]) in trained}
        if not self._has_any:
            raise RunnerError(
                "the optimizer has none of the parameters that were captured: make it from the "
                "parameters() of the captured module"
            )
        readers: dict[int, set[int]] = {}
        phases = np.atleast_2d(self.runner.placement)
        for op, q in zip(graph.param_use_op.tolist(), graph.param_use.tolist(), strict=True):
            if q in self._home:
                readers.setdefault(q, set()).update(rank_of[d] for d in phases[:, op])
        self._rank_of = home = {q: rank_of[d] for q, d in self._home.items()}
        mine = world.rank
        self._num_sums_here = sum(
            rank_of[d] != mine
            for q, t in self._program.gradients
            for d in (np.unique(phases[:, graph.tensor_src[t]]) if home[q] == mine else ())
        )
        self._spread_to = {
            q: sorted(readers.get(q, set()) - {mine}) for q, r in home.items() if r == mine
        }
        self._num_spread_here = sum(
            home[q] != mine and mine in ranks for q, ranks in readers.items()
        )
        self._begun = 0  # the step that it goes on from
        self._came: tuple[queue.SimpleQueue[Any], ...] = queue.SimpleQueue(), queue.SimpleQueue()
        self.runner.on_param = self._take
        self.runner.on_failure = self._fail
        self._home = {q: d for q, d in self._home.items() if rank_of[d] == mine}

    def serve(self) -> None:
        """Work for rank 0 until it closes its trainer.

        Raises:
            RankError: a rank has failed.
        """
        functions: dict[str, Callable[..., Any]] = {
            "update": self._apply,
            "forget": super().zero_gradients,
            "gradients": self._means_here,
            "replace": super()._replace,
            "state": self._state,
            "save": self._write,
            "saved": self._written,
            "begun": lambda: self._begun,
        }
        self.runner.serve(functions)

    def update(self) -> None:
        """As ``Trainer.update``, on every rank."""
        self._take_shown(1)
        if self._num_added == 0:
            raise RunnerError("there are no gradients: call accumulate(microbatches), or step")
        self._check_unchanged()  # before others begin
        settings = [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]
        self.runner.tell("update", self._num_added, settings)
        self._apply(self._num_added, settings)
        self.runner.answers()

    def _apply(self, count: int, settings: list[dict[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(values)
        self._num_added = count
        super().update()
        for q, ranks in self._spread_to.items():
            for r in ranks:
                self.world.post(r, PARAM, (VALUE, q), self._trained(q).cpu())
        for q, value in self._coming(VALUE, self._num_spread_here):
            for (_, p), here in self.runner.loaded.items():
                if p == q:
                    here.copy_(value)

    def _add_up(self) -> None:
        for (_, q), part in self.runner.partial.items():
            if self._rank_of[q] != self.world.rank:
                self.world.post(self._rank_of[q], PARAM, (SUM, q), part.clone().cpu())
                part.zero_()
        super()._add_up()
        for q, value in self._coming(SUM, self._num_sums_here):
            self.runner.gradients[q].add_(value.to(self.runner.gradients[q].device))
        synchronize(self.runner.gradients.values())

    def _fail(self, error: BaseException) -> None:
        for what in (VALUE, SUM):
            self._take(what, -1, error)

    def _take(self, what: int, q: int, value: Tensor | BaseException) -> None:
        self._came[what].put((q, value))

    def _coming(self, what: int, count: int) -> Iterator[tuple[int, Tensor]]:
        """So many parameters, by number, and what comes of them from other ranks."""
        for _ in range(count):
            q, value = self._came[what].get()
            if isinstance(value, BaseException):
                raise value
            yield q, value

    def _split_optimizer(self) -> dict[int, torch.optim.Optimizer]:
        return super()._split_optimizer() if self._has_any & self._home.keys() else {}

    def zero_gradients(self) -> None:
        """As ``Trainer.zero_gradients``, on every rank that still runs."""
        super().zero_gradients()
        if not self.runner._ended:
            self.runner.tell("forget")
            self.runner.answers()

    def _means(self) -> dict[int, Tensor]:
        self.runner.tell("gradients", max(self._num_added, 1))
        means = super()._means()
        for answer in self.runner.answers().values():
            means |= answer
        return means

    def _means_here(self, count: int) -> dict[int, Tensor]:
        self._num_added = count
        return super()._means()

    def _replace(self, sums: Mapping[int, Tensor]) -> None:
        self.runner.tell("replace", sums)
        super()._replace(sums)
        self.runner.answers()

    def _state(self) -> dict[int, tuple[Tensor, dict[str, Any]]]:
        """Values that this rank changes, and the optimizer's state of them, in host memory."""
        super().sync()
        params, place = self._program.params, np.atleast_2d(self.runner.placement)[0]
        changed = dict.fromkeys(self._home)
        for p, t in self._program.new_buffers:
            if self.runner.rank_of[place[self.graph.tensor_src[t]]] == self.world.rank:
                changed[p] = None
        return {q: (params[q].detach(), self.optimizer.state.get(params[q], {})) for q in changed}

    def sync(self) -> None:
        """Bring the module and the optimizer's state of rank 0 up to date."""
        super().sync()
        if self.world.rank != 0 or self.runner._ended:
            return
        self.runner.tell("state")
        params = self._program.params
        with torch.no_grad():
            for answer in self.runner.answers().values():
                for q, (value, state) in answer.items():
                    params[q].copy_(value)
                    if state:
                        self.optimizer.state[params[q]] = state

    # --- checkpoints -----------------------------------------------------------------------------

    def save(self, folder: str | Path, step: int) -> None:
        """Write a checkpoint: every rank what it changes, then rank 0 that it is complete.

        An earlier checkpoint in the folder, or in those of that name on other hosts, stays valid
        until this one is.
        """
        self.runner.tell("save", str(folder), step)
        names = [self._write(str(folder), step), *self.runner.answers().values()]
        marker = json.dumps({"step": step, "files": names}, indent=1) + "\n"
        self._written(str(folder), marker)
        self.runner.tell("saved", str(folder), marker)
        self.runner.answers()

    def _write(self, folder: str, step: int) -> str:
        from safetensors.torch import save

        tensors, plain = {}, {}
        for q, (value, state) in self._state().items():
            name = self._program.param_names[q]
            tensors[f"value/{name}"] = value.contiguous()
            for key, entry in state.items():
                if isinstance(entry, Tensor):
                    tensors[f"state/{key}/{name}"] = entry.cpu().contiguous()
                else:
                    plain[f"state/{key}/{name}"] = entry
        name = f"step{step}-rank{self.world.rank}.safetensors"
        write_atomic(Path(folder) / name, save(tensors, {"plain": json.dumps(plain)}))
        return name

    def _written(self, folder: str, marker: str) -> None:
        """Every rank has written: say so in the folder as this host has it, and tidy up."""
        path = Path(folder) / MARKER
        if not path.is_file() or path.read_text(encoding="utf-8") != marker:
            write_atomic(path, marker)
        files = json.loads(marker)["files"]
        for old in Path(folder).glob(f"step*-rank{self.world.rank}.safetensors"):
            if old.name not in files:
                old.unlink()

    def load(self, folder: str | Path) -> int:
        """On every rank, before the first step: go on from a checkpoint; its step, or 0 if none.

        The ranks may be others than those that saved it, with another placement.

        Raises:
            RunnerError: the checkpoint cannot be read, is of another model, or lacks a parameter
                that this rank needs; or, on rank 0, another rank goes on from another step.
        """
        self._begun = self._loaded(folder)
        if self.world.rank == 0:
            self.runner.tell("begun")
            for rank, step in sorted(self.runner.answers().items()):
                if step != self._begun:
                    raise RunnerError(
                        f"{folder}: rank 0 goes on from step {self._begun}, "
                        f"{self.world.name(rank)} from step {step}, as it finds it in its folder "
                        f"of that name: copy {MARKER} and the files of one checkpoint to every "
                        "host, or remove them everywhere"
                    )
        return self._begun

    def _loaded(self, folder: str | Path) -> int:
        """What this rank needs of the checkpoint that it finds; its step, or 0 if none."""
        about = _complete(folder)
        if not about:
            return 0
        params, names = self._program.params, self._program.param_names
        wanted = {names[q]: q for q in self.runner.own_params()}
        missing = set(self._has_any) & set(wanted.values())
        states: dict[int, dict[str, Any]] = {}
        for file in about["files"]:
            path = Path(folder) / file
            if not path.exists():
                continue  # of another host; what is missing in the end is said below
            with opened(path) as data, torch.no_grad():
                plain = json.loads((data.metadata() or {}).get("plain", "{}"))
                for key in [*data.keys(), *plain]:
                    kind, _, rest = key.partition("/")
                    what, _, name = rest.partition("/") if kind == "state" else ("", "", rest)
                    q = wanted.get(name)
                    if q is None:
                        continue
                    value = plain[key] if key in plain else data.get_tensor(key)
                    if kind == "state":
                        states.setdefault(q, {})[what] = value
                    elif value.shape != params[q].shape:
                        raise RunnerError(
                            f"{path}: {name!r} has shape {tuple(value.shape)}, the model needs "
                            f"{tuple(params[q].shape)}: the checkpoint is of another model; name "
                            "another folder"
                        )
                    else:
                        params[q].copy_(value)
                        missing.discard(q)
        if missing:
            raise RunnerError(
                f"{Path(folder) / MARKER}: the files {about['files']} that are here do not hold "
                f"{names[min(missing)]!r}, which rank {self.world.rank} needs: copy the files of "
                "the other hosts to this folder"
            )
        for q, state in states.items():
            self.optimizer.state[params[q]] = state
        self._optimizers = {}
        return int(about["step"])


def _complete(folder: str | Path) -> dict[str, Any]:
    """What the marker of a checkpoint says; empty if there is none.

    Raises:
        RunnerError: it is damaged.
    """
    path = Path(folder) / MARKER
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
        return {"step": int(marker["step"]), "files": [str(name) for name in marker["files"]]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunnerError(
            f"{path}: cannot be read as a checkpoint ({type(error).__name__}: {error}): put an "
            "intact copy there, or remove it to begin from the first step"
        ) from error


def opened(path: str | Path) -> Any:
    """A safetensors file, to be used as a context manager.

    Raises:
        RunnerError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise RunnerError(f"{path}: cannot be read as safetensors: {error}") from error


def with_weights(graph: OpGraph, path: str | Path, own: Iterable[int]) -> OpGraph:
    """The graph with the parameters ``own`` read from a safetensors file, and no others in memory.

    Only these are read, of a piece its part alone. Parameters have the name that they have in the
    module; a tied one has one name for all.

    Raises:
        RunnerError: the file cannot be read, lacks one of them, or has it in another shape.
    """
    program = graph.program
    params = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in program.params]
    with opened(path) as data:
        there = set(data.keys())
        for q in own:
            name, expected = program.param_names[q], program.params[q]
            if name.endswith(PADDING):  # of the cut graph, not of the module
                params[q] = expected
                continue
            part = _PART.fullmatch(name)
            name = part[1] if part else name
            if name not in there:
                raise RunnerError(
                    f"{path}: there is no tensor {name!r}, only e.g. {sorted(there)[:3]}; write "
                    "the file with placement.executor.distributed.save_weights(graph, path)"
                )
            value = _part(data, part, program, expected) if part else data.get_tensor(name)
            if value.shape != expected.shape:
                raise RunnerError(
                    f"{path}: {name!r} has shape {tuple(value.shape)}, the model needs "
                    f"{tuple(expected.shape)}"
                )
            params[q] = value.to(expected.dtype)
    return replace(graph, program=replace(program, params=tuple(params)))


def _part(data: Any, part: re.Match[str], program: Program, like: Tensor) -> Tensor:
    """That of a piece; of a bias that the first piece has, zeros."""
    name, cut, i = part[1], part[2], int(part[3])
    if cut == rules.SUM:
        return torch.zeros(like.shape, dtype=like.dtype)
    whole, d = data.get_slice(name), int(cut)
    at = rules.bounds(whole.get_shape()[d], program.pieces.shares)
    value: Tensor = whole[(*(slice(None),) * d, slice(at[i], at[i + 1]))]
    return value


def save_weights(graph: OpGraph, path: str | Path) -> None:
    """Write parameters, buffers and constants of a captured module as one safetensors file."""
    from safetensors.torch import save

    program = graph.program
    values = {
        name: x.detach().cpu().clone().contiguous()
        for name, x in zip(program.param_names, program.params, strict=True)
    }
    write_atomic(path, save(values))
