"""The decision problem: a graph on a cluster, with costs, micro-batches and an objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, wraps
from numbers import Integral, Real
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placement.buffer import ALIGNED
from placement.cluster import Cluster, Ends, Link, Power, joined, pairs_of
from placement.graph import OpGraph, even_position, reuse_position
from placement.objective import Objective
from placement.profile import Profile
from placement.schedule import Schedule
from placement.tools.limits import MOST

Floats = NDArray[np.float64]
Placement = NDArray[np.int32]  # [N] device of each operator, or [K, N]: in each phase
ROUNDING = 1e-6  # by which sums in another order, and what solvers prove, may differ
ReadyOrder = Literal["priority", "arrival"]
T = TypeVar("T")


_KINDS: dict[str, tuple[type, str]] = {
    "graph": (OpGraph, "a placement.OpGraph (placement.capture gives one, a problem has one)"),
    "cluster": (Cluster, "a placement.Cluster (e.g. Cluster.detect())"),
    "profile": (Profile, "a placement.Profile"),
    "contention": (bool, "True or False"),
    "second_j": (Real, "a number"),
    "num_microbatches": (Integral, "a whole number"),
    "max_in_flight": (Integral, "a whole number"),
    "max_phases": (Integral, "a whole number"),
}


class ProblemError(ValueError):
    """The problem, or a placement for it, is not valid; the message has the numbers."""


def check_kinds(error: type[Exception], **values: Any) -> None:
    """Raises: ``error``, one of these arguments of a problem is of another kind."""
    for name, value in values.items():
        kind, what = _KINDS[name]
        if not isinstance(value, kind):
            is_of = type(value).__name__
            raise error(f"{name} must be {what}, not {value!r:.60} (of type {is_of})")


@dataclass(frozen=True, eq=False)
class Problem:
    """``N`` operators on ``D`` devices.

    Attributes:
        graph, cluster, profile: what, where, and at which cost.
        objective: what a planner minimises, an ``Objective`` or its name.
        num_microbatches: ``M`` of a pipelined run.
        max_in_flight: at most this many micro-batches between first and last operator.
        contention: a channel carries one tensor at a time; False: any number, each at full
            bandwidth.
        ready_order: which of the operators that are ready a free device takes: the first by
            ``priority`` (of the smallest micro-batch), or the first by ``arrival`` of its last
            input. The simulators of GiPH and DOPPLER have no contention, and order by arrival.
        second_j: joules that a second is worth to the objective ``energy``: 0 counts joules
            alone, much counts time alone, and what lies between weighs one against the other.
        max_phases: a planner may answer with a periodic placement ``[K, N]`` of at most so many
            phases, in which replicas take turns; 1: all micro-batches run alike.
    """

    graph: OpGraph
    cluster: Cluster
    profile: Profile
    objective: Objective = Objective.PERIOD
    num_microbatches: int = 32
    max_in_flight: int = 4
    contention: bool = True
    ready_order: ReadyOrder = "priority"
    second_j: float = 0.0
    max_phases: int = 1

    def __post_init__(self) -> None:
        check_kinds(ProblemError, **{name: getattr(self, name) for name in _KINDS})
        for name in ("num_microbatches", "max_in_flight", "max_phases"):  # numpy's, too
            object.__setattr__(self, name, int(getattr(self, name)))
        self.profile.check(self.graph)
        if self.profile.device_names != self.cluster.device_names:
            raise ProblemError(
                f"profile is for devices {list(self.profile.device_names)}, the cluster has "
                f"{list(self.cluster.device_names)}; use profile.for_cluster(cluster)"
            )
        try:
            object.__setattr__(self, "objective", Objective(self.objective))
        except ValueError:
            raise ProblemError(
                f"objective {self.objective!r} is unknown; use one of {tuple(map(str, Objective))}"
            ) from None
        if self.ready_order not in get_args(ReadyOrder):
            raise ProblemError(
                f"ready_order {self.ready_order!r} is unknown; use one of {get_args(ReadyOrder)}"
            )
        self._check_numbers()
        self._check_devices()

    def _check_numbers(self) -> None:
        """Raises: ProblemError, a number is out of its range, or all are too much to simulate."""
        if self.num_microbatches < 1 or self.max_in_flight < 1:
            raise ProblemError(
                f"num_microbatches = {self.num_microbatches} and max_in_flight = "
                f"{self.max_in_flight} must be at least 1"
            )
        if not 1 <= self.max_phases <= MOST.phases:
            raise ProblemError(
                f"max_phases = {self.max_phases} must be from 1 (all micro-batches run alike) to "
                f"{MOST.phases}"
            )
        waiting = self.num_microbatches * min(self.num_microbatches, self.max_in_flight)
        if (
            self.num_microbatches * self.num_ops > MOST.runs
            or waiting > MOST.waiting
            or self.max_in_flight >= 2**31
        ):
            raise ProblemError(
                f"num_microbatches = {self.num_microbatches} of {self.num_ops} operators, "
                f"max_in_flight = {self.max_in_flight}: too many to simulate, at most {MOST.runs} "
                f"runs of an operator, and {MOST.waiting} micro-batches x in flight"
            )
        if not 0 <= self.second_j < np.inf:
            raise ProblemError(f"second_j = {self.second_j} must be a number of at least 0")

    def _check_devices(self) -> None:
        """Raises: ProblemError, the devices cannot run the graph, or lack what is asked for."""
        if self.objective is Objective.ENERGY and self.power is None:
            silent = [d.name for d in self.cluster.devices if d.busy_w is None or d.idle_w is None]
            raise ProblemError(
                f"objective 'energy' needs the power of every device, unknown for {silent}; "
                "state busy_w and idle_w (watts) in the cluster's YAML file"
            )
        name = next((d.name for d in self.cluster.devices if d.streams is not None), None)
        if name is not None and self.objective.is_analytic:
            raise ProblemError(
                f"objective {self.objective} is a formula of devices that work by themselves, "
                f"{name!r} has no time of its own: leave that device out, or use objective period"
            )
        if name is not None and self.graph.is_backward.any():
            raise ProblemError(
                f"device {name!r} copies parameters from host memory for each operator, which is "
                f"for inference: a training step changes them; leave {name!r} out of the cluster"
            )
        self._check_buffers()
        homeless = np.flatnonzero(~np.isfinite(self.group_compute_s).any(axis=1))
        if len(homeless):
            ops = np.flatnonzero(self.graph.group == homeless[0])
            names = [self.graph.op_name[i] for i in ops[:4]]
            raise ProblemError(f"no device can run every operator of colocation group {names}")

    def _check_buffers(self) -> None:
        """Raises: ProblemError, a buffer is smaller than the parameters of an operator."""
        size = self.copied_bytes
        for d in self.cluster.streaming:
            device = self.cluster.devices[d]
            able = np.isfinite(self.profile.compute_s[:, d])
            op = int(np.where(able, size, -1).argmax())
            if device.buffer_bytes is not None and able[op] and size[op] > device.buffer_bytes:
                raise ProblemError(
                    f"device {device.name!r}: buffer_bytes = {device.buffer_bytes:,}, but operator "
                    f"{op} ({self.graph.op_name[op]!r}) has {size[op]:,} bytes of parameters: give "
                    "it that many or more, or leave buffer_bytes out"
                )

    def pinned(self, where: Mapping[str, str]) -> Problem:
        """The same problem, where some operators may run on one device only.

        Args:
            where: the device's name by what is pinned to it: an operator, or a module with all
                that is below it; as shell patterns, ``{"encoder.layer.*": "cpu:0"}``. Operators
                that must share a device with these go along. A view follows the operator that made
                its memory where views of that memory are pinned to several devices.

        Raises:
            ProblemError: no such device, nothing of that name, or no device is left for something.
        """
        g, compute_s = self.graph, self.profile.compute_s.copy()
        pins: dict[int, tuple[str, str]] = {}  # operator -> device, and who says so
        for pattern, name in where.items():
            if name not in self.cluster.device_names:
                devices = list(self.cluster.device_names)
                raise ProblemError(f"{pattern}={name}: no such device; use one of {devices}")
            ops = [
                i
                for i, (op, module) in enumerate(zip(g.op_name, g.op_module, strict=True))
                if any(fnmatchcase(*x) for x in ((op, pattern), (f"{module}.", f"{pattern}.*")))
            ]
            if not ops:
                some = sorted({m for m in g.op_module if m}, key=lambda m: (m.count("."), m))[:6]
                some = some or list(g.op_name[:6])
                raise ProblemError(
                    f"{pattern}={name}: no operator and no module has that name; some that are "
                    f"there: {', '.join(some)}"
                )
            able = np.isfinite(compute_s[ops, self.cluster.device_names.index(name)]).all()
            if not able or any(pins.get(i, (name,))[0] != name for i in ops):
                raise ProblemError(f"{pattern}={name}: cannot run there, or is pinned to another")
            pins |= dict.fromkeys(ops, (name, f"--on {pattern}={name}"))
        for i, (name, _) in _one_device_a_group(g, pins).items():
            compute_s[i, np.arange(self.num_devices) != self.cluster.index(name)] = np.inf
        return replace(self, profile=replace(self.profile, compute_s=compute_s))

    @property
    def num_run(self) -> int:
        """Micro-batches of a run that the objective is of: one alone, or ``M`` in a pipeline."""
        return 1 if self.objective is Objective.LATENCY else self.num_microbatches

    @property
    def num_ops(self) -> int:
        """``N``."""
        return self.graph.num_ops

    @property
    def num_devices(self) -> int:
        """``D``."""
        return self.cluster.num_devices

    @property
    def worker(self) -> NDArray[np.int32]:
        """int32 ``[D]``: the device whose time and memory what is placed on each one takes.

        A device that ``streams`` has none of its own: placed there means that an operator runs on
        ``worker``, with parameters from host memory. They are copied while operators before it run,
        as the buffer has room (see ``placement.buffer``). Simulators count the operator, and its
        tensors, on ``worker``, as they do the buffer; its parameters in the memory of the host
        (``host_of``), and on the device that streams, whose memory is what may be page-locked.
        """
        return self.cluster.worker

    @cached_property
    def num_workers(self) -> int:
        """Devices with time of their own."""
        return self.num_devices - len(self.cluster.streaming)

    @cached_property
    def compute_s(self) -> Floats:
        """float64 ``[N, D]`` seconds alone; inf = cannot run there.

        On a device that streams at least as long as copying takes: an estimate, as if each operator
        was among others like it. Simulators, and what is proved, have the seconds of
        ``without_copies`` and copies on the link.
        """
        return self._with_copies(self.profile.compute_s)

    @cached_property
    def loaded_s(self) -> Floats:
        """float64 ``[N, D]`` seconds while other devices are busy (``compute_s`` if unknown)."""
        loaded = self.profile.loaded_s
        return self.compute_s if loaded is None else np.maximum(loaded, self.compute_s)

    def _with_copies(self, seconds: Floats) -> Floats:
        """``seconds [N, D]``, where parameters are copied at least for as long as that takes."""
        if not self.cluster.streaming:
            return seconds
        seconds = seconds.copy()
        for d, copied_s in zip(self.cluster.streaming, self.copy_s, strict=True):
            seconds[:, d] = np.maximum(seconds[:, d], copied_s)
            seconds[self.graph.carried_op, d] = np.inf  # it writes where nobody reads it
        return seconds

    @cached_property
    def copied_bytes(self) -> NDArray[np.int64]:
        """int64 ``[N]`` bytes of a buffer that the parameters of each operator take there.

        Of a captured graph each parameter begins at a multiple of ``buffer.ALIGNED``.
        """
        g, step = self.graph, 1 if self.graph.program is None else ALIGNED
        held = np.zeros(self.num_ops, np.int64)
        np.add.at(held, g.param_use_op, (-(-g.param_bytes // step) * step)[g.param_use])
        return held

    @cached_property
    def copy_s(self) -> Floats:
        """float64 ``[S, N]`` seconds to copy the parameters of each operator to each device that
        streams, in the order of ``cluster.streaming``.

        They come as tensors do, unless a link says how fast they are.
        """
        g, (host, _) = self.graph, host_of(self)
        streaming = np.array(self.cluster.streaming, np.intp)
        told = joined(self._ends, self.num_devices)[host, streaming]
        to = np.where(told, streaming, self.worker[streaming])
        latency_s = self._of_links(_latency_s)[host, to, None]
        s_per_byte = self._of_links(_s_per_byte)[host, to, None]
        copies = np.bincount(g.param_use_op, minlength=self.num_ops)
        seconds: Floats = latency_s * copies + g.op_param_bytes * s_per_byte
        return seconds

    @cached_property
    def without_copies(self) -> Problem:
        """The same problem, where parameters of devices that stream come in no time."""
        if not self.cluster.streaming:
            return self
        names, (host, _) = self.cluster.device_names, host_of(self)
        free = (Link(names[host], names[d]) for d in self.cluster.streaming)
        return replace(self, profile=replace(self.profile, links=(*self.profile.links, *free)))

    def buffers_of(self, placement: Placement) -> NDArray[np.int64]:
        """int64 ``[S]`` bytes of the buffer of each device that streams; 0 where nothing does."""
        devices, size = self.cluster.devices, self.copied_bytes
        most = [int(np.where(placement == d, size, 0).max()) for d in self.cluster.streaming]
        given = (devices[d].buffer_bytes for d in self.cluster.streaming)
        return np.array(
            [m and (2 * m if b is None else b) for m, b in zip(most, given, strict=True)], np.int64
        )

    @cached_property
    def group_compute_s(self) -> Floats:
        """float64 ``[G, D]`` summed seconds of each colocation group."""
        return self.graph.per_group(self.compute_s)

    @cached_property
    def supported(self) -> NDArray[np.bool_]:
        """bool ``[N, D]``: the operator *and its whole colocation group* can run there."""
        return np.isfinite(self.group_compute_s)[self.graph.group]

    @cached_property
    def link_latency_s(self) -> Floats:
        """float64 ``[D, D]``; 0 on the diagonal."""
        return self._of_workers(self._of_links(_latency_s))

    @cached_property
    def link_s_per_byte(self) -> Floats:
        """float64 ``[D, D]``; 0 on the diagonal."""
        return self._of_workers(self._of_links(_s_per_byte))

    @cached_property
    def link_blocking(self) -> NDArray[np.bool_]:
        """bool ``[D, D]``: the sender's worker is busy during the transfer."""
        return self._of_workers(self._of_links(lambda x: x.blocking)) > 0

    @cached_property
    def link_wake_s(self) -> Floats:
        """float64 ``[D, D]``: waking an idle receiver keeps the sender's worker busy so long."""
        return self._of_workers(self._of_links(lambda x: x.wake_s))

    @cached_property
    def link_send_s(self) -> Floats:
        """float64 ``[D, D]``: handing over a tensor keeps the sender's worker busy so long."""
        return self._of_workers(self._of_links(lambda x: x.send_s))

    @cached_property
    def link_send_s_per_byte(self) -> Floats:
        """float64 ``[D, D]``: and each of its bytes so much longer."""
        return self._of_workers(self._of_links(lambda x: x.send_s_per_byte))

    @cached_property
    def link_receive_s(self) -> Floats:
        """float64 ``[D, D]``: taking a tensor in keeps the receiver's worker busy so long."""
        return self._of_workers(self._of_links(lambda x: x.receive_s))

    def _of_links(self, value: Callable[[Link], float]) -> Floats:
        """float64 ``[D, D]`` of a link between each two devices; 0 where there is none."""
        values = np.zeros((self.num_devices, self.num_devices))
        for a, b, link in self._ends:
            values[a, b] = value(link)
        np.fill_diagonal(values, 0.0)
        return values

    def _of_workers(self, pairs: NDArray[Any]) -> NDArray[Any]:
        """``[.., D, D]`` between the devices that run what is placed on others."""
        on = self.worker
        return pairs[..., on[:, None], on] if self.cluster.streaming else pairs

    @cached_property
    def link_channel(self) -> NDArray[np.int32]:
        """int32 ``[D, D]``: the serial channel of each ordered pair, 0..num_channels-1."""
        return self._channels[0]

    @cached_property
    def copy_channel(self) -> NDArray[np.int32]:
        """int32 ``[S]``: the channel that parameters for each device that streams come on.

        That of tensors from the host to its worker, unless a link names another one for it.
        """
        return self._channels[1]

    @cached_property
    def _channels(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        d, (host, _) = self.num_devices, host_of(self)
        own = np.arange(d * d, dtype=np.int32).reshape(d, d)
        channel = own.copy()
        named: dict[str, int] = {}
        for a, b, link in self._ends:
            if link.channel is None:
                channel[a, b] = own[a, b]
            else:
                channel[a, b] = named.setdefault(link.channel, d * d + len(named))
        np.fill_diagonal(channel, own.diagonal())
        copies = channel[host, self.cluster.streaming]
        unnamed = copies < d * d
        copies[unnamed] = channel[host, self.worker[self.cluster.streaming]][unnamed]
        both = np.append(self._of_workers(channel), copies)
        dense = np.unique(both, return_inverse=True)[1].astype(np.int32)
        return dense[: d * d].reshape(d, d), dense[d * d :]

    @cached_property
    def num_channels(self) -> int:
        """Number of serial channels."""
        return int(max(x.max(initial=0) for x in self._channels)) + 1

    @cached_property
    def _ends(self) -> tuple[Ends, ...]:
        return tuple(pairs_of(self.profile.links, self.cluster.device_names))

    def transfer_s(self, tensor: int, src: int, dst: int) -> float:
        """Seconds to move ``tensor`` from device ``src`` to ``dst`` (0 when equal)."""
        if self._stated_s is not None:
            return float(self._stated_s[tensor, src, dst])
        size = float(self.graph.tensor_bytes[tensor])
        return float(self.link_latency_s[src, dst] + size * self.link_s_per_byte[src, dst])

    def transfers_s(self, of: Callable[[Floats], Any]) -> Any:
        """Seconds to move every tensor: ``[T, ..]``, where ``of`` makes ``[..]`` of ``[.., D, D]``.

        ``of`` picks pairs of devices (from, to), adds them up, or takes the most of them. From a
        device to itself nothing takes time.
        """
        if self._stated_s is not None:
            return of(self._stated_s)
        size = self.graph.tensor_bytes.astype(np.float64)
        return of(self.link_latency_s) + np.multiply.outer(size, of(self.link_s_per_byte))

    @cached_property
    def _stated_s(self) -> Floats | None:
        """float64 ``[T, D, D]``, where the profile states them."""
        if self.profile.transfer_s is None:
            return None
        same = np.eye(self.num_devices, dtype=bool)
        return np.where(same, 0.0, self._of_workers(self.profile.transfer_s))

    @cached_property
    def io_s(self) -> Floats:
        """float64 ``[T, D]`` seconds device ``d`` is busy to send a tensor off, or to receive it.

        The profile's ``io_s`` where the workload states it, otherwise the mean transfer to and
        from the other devices. Model inputs come from host memory, free where that is shared.
        """
        if self.profile.io_s is not None:
            return self.profile.io_s
        host, shares_host = host_of(self)
        scale = 1.0 / max(1, 2 * (self.num_devices - 1))
        between = scale * self.transfers_s(lambda x: (x + x.swapaxes(-1, -2)).sum(axis=-2))
        from_host = np.where(shares_host, 0.0, self.transfers_s(lambda x: x[..., host, :]))
        return np.where(self.graph.tensor_src[:, None] >= 0, between, from_host)

    @cached_property
    def mean_transfer_s(self) -> Floats:
        """float64 ``[T]`` transfer seconds averaged over ordered pairs of devices that compute."""
        if self.num_workers == 1:
            return np.zeros(self.graph.num_tensors)
        own = self.worker == np.arange(self.num_devices)
        off = ~np.eye(self.num_devices, dtype=bool) & own & own[:, None]
        seconds: Floats = self.transfers_s(lambda x: x[..., off].mean(axis=-1))
        return seconds

    @cached_property
    def mean_compute_s(self) -> Floats:
        """float64 ``[N]`` seconds averaged over the devices that can run the operator.

        Of those that compute: a copy of parameters is work of a link, ahead of their use.
        """
        compute_s = self.compute_s[:, self.worker == np.arange(self.num_devices)]
        finite = np.isfinite(compute_s)
        return np.where(finite, compute_s, 0.0).sum(axis=1) / np.maximum(finite.sum(axis=1), 1)

    @cached_property
    def upward_rank_s(self) -> Floats:
        """float64 ``[N]`` longest remaining path of mean compute plus mean transfer (HEFT)."""
        return self.mean_compute_s + self._longest_s(back=True)

    @cached_property
    def downward_rank_s(self) -> Floats:
        """float64 ``[N]`` longest path before each operator, mean compute plus mean transfer."""
        return self._longest_s(back=False)

    def _longest_s(self, back: bool) -> Floats:
        """float64 ``[N]`` longest path before each operator, or ``back`` from the end to it."""
        g = self.graph
        ends = [g.tensor_src[g.use_tensor], g.use_dst]
        first, then = ends[::-1] if back else ends
        order = np.argsort(-then if back else then, kind="stable")
        order = order[ends[0][order] >= 0]
        own_s, sent_s = self.mean_compute_s.tolist(), self.mean_transfer_s[g.use_tensor[order]]
        far_s = [0.0] * self.num_ops  # lists: a loop over arrays takes long
        for a, b, s in zip(*(x.tolist() for x in (first[order], then[order], sent_s)), strict=True):
            far_s[b] = max(far_s[b], far_s[a] + own_s[a] + s)
        return np.array(far_s)

    @cached_property
    def rank_position(self) -> NDArray[np.int32]:
        """int32 ``[N]`` position of each operator by (highest upward rank, smallest number)."""
        order = np.lexsort((np.arange(self.num_ops), -self.upward_rank_s))
        return np.argsort(order).astype(np.int32)

    @cached_property
    def priority(self) -> NDArray[np.int32]:
        """int32 ``[N]`` which ready operator of a micro-batch goes first (smallest).

        The order that the profile was measured in, as the order decides what caches hold:
        ``rank_position``, or ``reuse_position(graph)`` where that was found to be faster; of a
        graph in pieces its own, where what is sent comes before what waits for others. Where
        parameters are copied meanwhile it may be the graph's own, too, or one in which copies and
        operators share the time ``even``-ly.
        """
        if self.profile.order == "graph":
            return np.arange(self.num_ops, dtype=np.int32)
        if self.profile.order == "even" and self.cluster.streaming:
            seconds = self.without_copies.compute_s[:, self.worker[self.cluster.streaming]]
            work = np.where(np.isfinite(seconds), seconds, 0.0).max(axis=1)
            return even_position(self.graph, self.copy_s.max(axis=0), work)
        return reuse_position(self.graph) if self.profile.order == "reuse" else self.rank_position

    @cached_property
    def memory_bytes(self) -> NDArray[np.int64]:
        """int64 ``[D]`` capacity of each device; of one that streams, for what is page-locked."""
        most = np.array([d.memory_bytes for d in self.cluster.devices], np.int64)
        pinned = self.cluster.devices[host_of(self)[0]].pinned_bytes
        if (streaming := self.cluster.streaming) and pinned is not None:
            most[streaming] = np.minimum(most[streaming], pinned // len(streaming))
        return most

    @cached_property
    def power(self) -> Power | None:
        """What the devices draw; None unless known for every device."""
        return None if self.cluster.power_source is None else self.cluster.power

    @cached_property
    def memory_may_bind(self) -> bool:
        """False when the device of least memory can hold all, of all micro-batches in flight."""
        g, flights = self.graph, min(self.max_in_flight, self.num_microbatches)
        everything = int(g.param_bytes.sum()) + flights * int(g.tensor_bytes.sum())
        besides = self.profile.workspace_bytes, self.profile.library_bytes
        everything += sum(int(x.max()) for x in besides if x is not None)
        return everything > int(self.memory_bytes.min()) or bool(self.cluster.streaming)

    def param_bytes_on(self, placement: Placement) -> NDArray[np.int64]:
        """int64 ``[D]`` parameter bytes each device holds, of all phases.

        Tied parameters, and those of several phases, are held once per device. Those of a device
        that streams the host holds too, and the device where they are read has the buffer.
        """
        g = self.graph
        held = np.zeros((len(g.param_bytes), self.num_devices), bool)
        held[g.param_use, placement[..., g.param_use_op]] = True
        held_bytes: NDArray[np.int64] = g.param_bytes @ held
        if streaming := self.cluster.streaming:
            np.add.at(held_bytes, self.worker[streaming], self.buffers_of(placement))
            held_bytes[host_of(self)[0]] += held_bytes[streaming].sum()
        return held_bytes

    def overhead_s(self, placement: ArrayLike | None = None) -> float:
        """Seconds that a call takes besides its first operator to its last, which is simulated.

        Those of the device in use that has most; without a placement no call takes less.
        """
        each = self.profile.overhead_s
        if each is None:
            return 0.0
        return float(each.min() if placement is None else each[np.unique(placement)].max())

    def called_s(self, placement: ArrayLike | None = None) -> float:
        """What of the objective is not simulated: ``overhead_s`` of a call, 0 of other objectives.

        ``simulate`` and ``score`` leave it out, plans have it.
        """
        return self.overhead_s(placement) if self.objective is Objective.LATENCY else 0.0

    def resident_bytes_on(self, placement: Placement) -> NDArray[np.int64]:
        """int64 ``[D]`` bytes each device holds all the time: parameters, and what libraries keep.

        That is of a device the most that any of its operators makes them keep.
        """
        most = np.zeros(self.num_devices, np.int64)
        if self.profile.library_bytes is not None:
            each = self.profile.library_bytes[np.arange(self.num_ops), placement]
            np.maximum.at(most, self.worker[placement], each)
        return self.param_bytes_on(placement) + most

    def as_batch(self, placements: ArrayLike) -> NDArray[np.int32]:
        """One or more placements as int32 ``[B, N]``, for kernels that read without looking.

        Periodic ones are ``[B, K, N]``.

        Raises:
            ProblemError: wrong length, an unknown device, or no whole number.
        """
        p = np.ascontiguousarray(np.atleast_2d(whole_numbers(placements)))
        if p.ndim > 3 or p.shape[-1] != self.num_ops or 0 in p.shape[1:]:
            raise ProblemError(
                f"placements have shape {p.shape}, expected (B, {self.num_ops}), or "
                f"(B, K, {self.num_ops}) of periodic ones"
            )
        if p.size and (p.min() < 0 or p.max() >= self.num_devices):
            b, *_, n = at = np.argwhere((p < 0) | (p >= self.num_devices))[0].tolist()
            raise ProblemError(
                f"placement {b}: operator {n} ({self.graph.op_name[n]!r}) is on device "
                f"{p[tuple(at)]}; there are {self.num_devices}"
            )
        return p

    def check_placement(self, placement: ArrayLike) -> Placement:
        """``placement`` as int32 ``[N]``; a periodic one as ``[K, N]``, of one phase as ``[N]``.

        Raises:
            ProblemError: wrong length, unknown device, no whole number, unsupported operator or a
                colocation group that is split, or in turns on several devices although it changes a
                buffer for the next micro-batch; the message names the operator, and the phase.
        """
        p = np.array(whole_numbers(placement))  # of its own, whoever changes the caller's
        if p.ndim == 2 and 1 <= len(p) <= MOST.phases:
            p = np.stack([self._check_phase(row, f" in phase {k}") for k, row in enumerate(p)])
            ops, names = self.graph.carried_op, self.cluster.device_names
            for k, i in np.argwhere(p[:, ops] != p[0, ops])[:1]:
                n = ops[i]
                raise ProblemError(
                    f"operator {n} ({self.graph.op_name[n]!r}) changes a buffer for the next "
                    f"micro-batch (a running statistic): it is on {names[p[0, n]]!r} in phase 0, "
                    f"on {names[p[k, n]]!r} in phase {k}; keep it on one device"
                )
            return p[0] if len(p) == 1 else p
        return self._check_phase(p)

    def _check_phase(self, p: NDArray[np.int32], phase: str = "") -> NDArray[np.int32]:
        if p.shape != (self.num_ops,):
            raise ProblemError(
                f"placement has shape {p.shape}, expected ({self.num_ops},), or "
                f"(K, {self.num_ops}) of a periodic one with at most {MOST.phases} phases"
            )
        if p.min() < 0 or p.max() >= self.num_devices:
            n = int(np.flatnonzero((p < 0) | (p >= self.num_devices))[0])
            raise ProblemError(
                f"operator {n} ({self.graph.op_name[n]!r}) is on device {p[n]}{phase}; "
                f"there are {self.num_devices}"
            )
        bad = np.flatnonzero(~np.isfinite(self.compute_s[np.arange(self.num_ops), p]))
        if len(bad):
            n = int(bad[0])
            raise ProblemError(
                f"operator {n} ({self.graph.op_name[n]!r}) cannot run on "
                f"{self.cluster.device_names[p[n]]!r}{phase}"
            )
        first = np.full(self.graph.num_groups, -1, np.int32)
        first[self.graph.group[::-1]] = p[::-1]
        split = np.flatnonzero(first[self.graph.group] != p)
        if len(split):
            n = int(split[0])
            names = self.cluster.device_names
            raise ProblemError(
                f"operator {n} ({self.graph.op_name[n]!r}) is on {names[p[n]]!r}, the rest of its "
                f"colocation group, which must stay together, on "
                f"{names[first[self.graph.group[n]]]!r}{phase}"
            )
        return p

    def buffers_stay(self, placements: NDArray[np.int32]) -> NDArray[np.bool_]:
        """bool ``[B]`` of ``[B, K, N]``: ``graph.carried_op`` are where phase 0 has them."""
        at = placements[..., self.graph.carried_op]
        same: NDArray[np.bool_] = (at == at[:, :1]).all(axis=(1, 2))
        return same

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What functions that are called ``once`` made of this problem, by their names."""
        return {}

    @cached_property
    def one_phase(self) -> Problem:
        """The same problem, for planners that answer with one phase only."""
        return self if self.max_phases == 1 else replace(self, max_phases=1)

    @property
    def by_loads(self) -> Problem:
        """The same for ``max_load``, by which searches for other objectives begin.

        A device that streams has time of its own there: this is an estimate, not to be asked for.
        """
        if not self.cluster.streaming:
            return self.with_objective(Objective.MAX_LOAD)
        devices = tuple(replace(d, streams=None, buffer_bytes=None) for d in self.cluster.devices)
        return replace(
            self,
            cluster=replace(self.cluster, devices=devices),
            profile=replace(self.profile, compute_s=self.compute_s, io_s=self.io_s),
            objective=Objective.MAX_LOAD,
        )

    def with_objective(self, objective: Objective) -> Problem:
        """The same problem with another objective; itself, with its caches, if it has that one."""
        return self if objective == self.objective else replace(self, objective=objective)


def once(make: Callable[[Problem], T]) -> Callable[[Problem], T]:
    """``make``, called once for each problem, which keeps what was made."""
    name = f"{make.__module__}.{make.__qualname__}"

    @wraps(make)
    def kept(problem: Problem) -> T:
        if name not in problem.kept:
            problem.kept[name] = make(problem)
        known: T = problem.kept[name]
        return known

    return kept


@dataclass(frozen=True, eq=False)
class Solution:
    """A planner's answer.

    Attributes:
        placement: int32 ``[N]``, or ``[K, N]`` if periodic, with K of at least 2.
        value_s: the problem's objective of ``placement`` (in the order of ``schedule``) in the
            simulator; inf if infeasible.
        lower_bound_s: no placement with one phase can be better; None unless proved. What
            ``bounds.lower_bound`` gives holds for all of the problem's ``max_phases``.
        stats: ``seconds``, ``evaluations`` and whatever else the planner counts.
        schedule: the order that ``value_s`` is of, where the planner decided one; None: the list
            scheduler's.
    """

    placement: Placement
    value_s: float
    lower_bound_s: float | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", whole_numbers(self.placement))

    def _repr_html_(self) -> str:
        """What a notebook shows: the value, what is proved, and operators per device number."""
        from placement.tools.shown import table

        # Whether seconds or joules, the problem knows.
        rows = [["objective", f"{self.value_s:.4g}"]]
        if self.lower_bound_s is not None:
            rows.append(["proved bound", f"{self.lower_bound_s:.4g}"])
        rows += [[str(k), str(v)[:100]] for k, v in self.stats.items()]
        phases = np.atleast_2d(self.placement)
        for d in np.unique(phases).tolist():
            counts = [f"{n:,}" for n in (phases == d).sum(axis=1)]
            rows.append([f"operators on device {d}", " / ".join(counts)])
        return table("Solution", ["", ""], rows)


class Planner(Protocol):
    """``planner(problem) -> Solution``; a frozen dataclass whose fields are its parameters."""

    def __call__(self, problem: Problem) -> Solution: ...


def whole_numbers(placements: ArrayLike) -> NDArray[np.int32]:
    """Device numbers as int32.

    Raises:
        ProblemError: rows of unequal length, or one that is no whole number, or larger than any.
    """
    try:
        values = np.asarray(placements)
    except ValueError:
        raise ProblemError(
            "rows of a placement have unequal lengths: each has the device of every operator"
        ) from None
    if values.dtype == np.int32:
        return values
    if values.dtype.kind not in "biuf":
        raise ProblemError(
            "a placement holds the numbers of devices, 0, 1, ..., not "
            f"{placements!r:.60} (of a name: cluster.index(NAME), of a solution: .placement)"
        )
    with np.errstate(invalid="ignore"):  # nan and infinity are among what is refused
        p = values.astype(np.int32)
    wrong = p != values
    if wrong.any():
        raise ProblemError(
            f"a placement holds the numbers of devices, 0, 1, ...: {values[wrong][0]} is none"
        )
    return p


def _one_device_a_group(
    g: OpGraph, pins: Mapping[int, tuple[str, str]]
) -> dict[int, tuple[str, str]]:
    """``pins`` without views whose memory is pinned to several devices, which follow its maker.

    Raises:
        ProblemError: operators that make or change the same memory are pinned to several.
    """
    maker = g.tensor_src[g.tensor_root]
    views = {i for i in g.tensor_src[maker != g.tensor_src].tolist() if not _in_place(g.op_kind[i])}
    devices: dict[int, set[str]] = {}
    for i, (name, _) in pins.items():
        devices.setdefault(int(g.group[i]), set()).add(name)
    pins = {i: x for i, x in pins.items() if len(devices[int(g.group[i])]) == 1 or i not in views}
    first: dict[int, int] = {}
    for i, (name, said) in pins.items():
        other = first.setdefault(int(g.group[i]), i)
        if pins[other][0] != name:
            raise ProblemError(
                f"{pins[other][1]} and {said}: operators {g.op_name[other]!r} of module "
                f"{g.op_module[other]!r} and {g.op_name[i]!r} of {g.op_module[i]!r} work on the "
                "same memory, which is on one device; pin both modules to one"
            )
    return dict(pins)


def _in_place(kind: str) -> bool:
    """Whether a kind of operator, e.g. ``aten.relu_.default``, writes to what it is given."""
    return kind.rpartition(".")[0].endswith("_")


def _latency_s(link: Link) -> float:
    return link.latency_s


def _s_per_byte(link: Link) -> float:
    return 1.0 / link.bandwidth_bytes_per_s


def host_of(problem: Problem) -> tuple[int, NDArray[np.bool_]]:
    """The device that model inputs come from, and bool ``[D]`` which share its memory."""
    is_cpu = np.array([d.kind == "cpu" for d in problem.cluster.devices])
    if not is_cpu.any():
        return 0, np.ones(problem.num_devices, bool)
    return int(np.argmax(is_cpu)), is_cpu
