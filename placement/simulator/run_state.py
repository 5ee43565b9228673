"""What a simulation is given and works in: ``Tables`` of a problem, the ``State`` of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.buffer import CALLS
from placement.problem import Problem, host_of, once
from placement.tools.jit import Struct, array

Array = NDArray[Any]
_SMALL = 1 << 15  # micro-batches times operators times devices of a run whose room is kept


class Tables(Struct):
    """One problem. Deliveries and links have the model inputs as one more sender, the last."""

    edge_ptr: Array  # int32 [N + 2] deliveries of each operator, by tensor and consumer
    edge_tensor: Array  # int32 [E]
    edge_dst: Array  # int32 [E] consumer
    edge_bytes: Array  # float64 [E]
    num_inputs: Array  # int32 [N]
    priority: Array  # int32 [N]
    by_priority: Array  # int32 [N]
    link_latency_s: Array  # float64 [(D + 1) D], as are the other links
    link_s_per_byte: Array  # float64
    link_blocking: Array  # bool
    link_channel: Array  # int32
    link_wake_s: Array  # float64
    link_send_s: Array  # float64
    link_send_s_per_byte: Array  # float64
    link_receive_s: Array  # float64 [D D], or [0]: nothing
    local_channel: int  # of pairs that share memory, which costs nothing; the last channel
    transfer_s: Array  # float64 [T (D + 1) D] where a profile states them, or [0]
    contention: bool
    by_arrival: bool  # operators run in the order in which they become ready
    host: int  # the device that model inputs come from
    worker: Array  # int32 [D] the device that runs what is placed on each
    num_workers: int
    out_ptr: Array  # int32 [N + 1]
    out_tensor: Array  # int32
    in_ptr: Array  # int32 [N + 1]
    in_tensor: Array  # int32
    use_ptr: Array  # int32 [T + 1]
    use_dst: Array  # int32
    tensor_src: Array  # int32 [T]
    tensor_root: Array  # int32 [T]
    tensor_bytes: Array  # int64 [T]
    output_tensor: Array  # int32 outputs of the model that operators produce
    output_count: Array  # int32 [T] how often each tensor is one of those
    workspace_bytes: Array  # int64 [N], or [0]: unknown
    compute_s: Array  # float64 [N, D]
    loaded_s: Array  # float64 [N, D] beside busy devices
    batch_s: float  # seconds that a micro-batch of a pipelined run takes longer
    # Of the S devices that stream.
    twin: Array  # int32 [D] which of them each device is; -1: it does not stream
    twin_worker: Array  # int32 [S]
    buffer_bytes: Array  # int64 [S]; 0: twice the most that an operator there reads
    copy_channel: Array  # int32 [S]
    copy_s: Array  # float64 [S N]
    copied_bytes: Array  # int64 [N]


@once
def tables(problem: Problem) -> Tables:
    """The problem for ``run``: graph (CSR), priorities, links, memory."""
    g, n, d = problem.graph, problem.num_ops, problem.num_devices
    host, shares = host_of(problem)
    # Deliveries of an operator, by tensor and consumer; those of model inputs stand last.
    src = g.tensor_src[g.use_tensor]
    producer = np.where(src >= 0, src, n)
    order = np.lexsort((g.use_dst, g.use_tensor, producer))
    edge_tensor = g.use_tensor[order]

    def with_inputs(a: Array, local: Any) -> Array:
        """``a [.., D, D]`` with the row of model inputs, and ``local`` where memory is shared."""
        rows = np.concatenate([a, a[..., host : host + 1, :]], axis=-2).astype(a.dtype)
        rows[..., np.arange(d), np.arange(d)] = local
        rows[..., d, shares] = local
        return rows

    stated = problem.profile.transfer_s
    matrix = np.zeros(0) if stated is None else with_inputs(np.asarray(stated, np.float64), 0.0)
    blocking = with_inputs(problem.link_blocking, False)
    blocking[d] = False
    sending = [problem.link_wake_s, problem.link_send_s, problem.link_send_s_per_byte]
    wake_s, send_s, send_s_per_byte = with_inputs(np.stack(sending), 0.0)
    wake_s[d] = send_s[d] = send_s_per_byte[d] = 0.0
    receive_s = problem.link_receive_s
    produced_outputs = g.output_tensor[g.tensor_src[g.output_tensor] >= 0]
    workspace = problem.profile.workspace_bytes
    streaming, alone = problem.cluster.streaming, problem.without_copies
    twin = np.full(d, -1, np.int32)
    twin[streaming] = range(len(streaming))
    given = (problem.cluster.devices[s].buffer_bytes for s in streaming)
    return Tables.of(
        g,
        problem,
        edge_ptr=np.searchsorted(producer[order], np.arange(n + 2)).astype(np.int32),
        edge_tensor=edge_tensor,
        edge_dst=g.use_dst[order],
        edge_bytes=g.tensor_bytes[edge_tensor].astype(np.float64),
        num_inputs=np.diff(g.in_ptr).astype(np.int32),
        by_priority=np.argsort(problem.priority).astype(np.int32),
        link_latency_s=with_inputs(problem.link_latency_s, 0.0).ravel(),
        link_s_per_byte=with_inputs(problem.link_s_per_byte, 0.0).ravel(),
        link_blocking=blocking.ravel(),
        link_channel=with_inputs(problem.link_channel, problem.num_channels).ravel(),
        link_wake_s=wake_s.ravel(),
        link_send_s=send_s.ravel(),
        link_send_s_per_byte=send_s_per_byte.ravel(),
        link_receive_s=receive_s.ravel() if receive_s.any() else np.zeros(0),
        local_channel=problem.num_channels,
        transfer_s=matrix.ravel(),
        by_arrival=problem.ready_order == "arrival",
        host=host,
        output_tensor=produced_outputs,
        output_count=np.bincount(produced_outputs, minlength=g.num_tensors).astype(np.int32),
        workspace_bytes=np.zeros(0, np.int64) if workspace is None else workspace.astype(np.int64),
        batch_s=problem.profile.batch_s,
        compute_s=alone.compute_s,
        loaded_s=alone.loaded_s,
        twin=twin,
        twin_worker=problem.worker[streaming],
        buffer_bytes=np.array([b or 0 for b in given], np.int64),
        copy_s=problem.copy_s.ravel() if streaming else np.zeros(0),
        copied_bytes=problem.copied_bytes if streaming else np.zeros(0, np.int64),
    )


class State(Struct):
    """One run: what is given, what comes of it, and room; ``W`` micro-batches are in flight.

    A micro-batch in flight has a *slot*, 0..W - 1. One run leaves the room ready for the next.
    Micro-batch ``m`` is in phase ``m % K``: what it runs is at ``row`` of its slot, and behind it.
    """

    # Given.
    placement: Array = array("K*N", np.int32)
    seconds: Array = array("K*N")  # of each operator
    beside_s: Array = array("N")  # more for each other device that runs, of one micro-batch
    order: Array  # int32 [.., 2] operators and micro-batches of a schedule, or empty
    order_ptr: Array  # int32 [D + 1] where each device's begin there
    num_batches: int
    window: int  # W
    alone: bool  # a run of one micro-batch; where parameters are copied, of one after another
    track: bool  # memory
    record: bool  # when everything begins and ends
    # What comes of it.
    finish: Array = array("M")
    busy: Array = array("D")
    peak: Array = array("D", np.int64)  # the most bytes of tensors and workspace held
    start: Array = array("R, N")  # recorded (``R`` is ``M``, else 0), as are the next
    end: Array = array("R, N")
    released: Array = array("R, N")  # when the device of each has handed over what it made
    transfers: Array = array("X, 4", np.int32)  # tensor, micro-batch, from, to
    transfer_start: Array = array("X")
    transfer_end: Array = array("X")
    copies: Array = array("C, 2", np.int32)  # of parameters: operator, which device streams
    copy_start: Array = array("C")
    copy_end: Array = array("C")
    round_s: float  # that copies for a micro-batch take; 0 where several may share them
    # The clock.
    now: float
    to_do: int  # operators that have not ended
    admitted: int  # micro-batches
    num_free: int  # slots
    num_active: int  # slots
    num_running: int  # devices, in a run of one micro-batch
    num_sent: int  # transfers recorded
    num_copied: int  # copies of parameters, recorded as far as there is room
    num_events: int  # of memory, waiting
    # Micro-batches and slots.
    slot_of: Array = array("M", np.int32)
    free_slots: Array = array("W", np.int32)
    active: Array = array("W", np.int32)  # slots in the order of their micro-batches
    batch_of: Array = array("W", np.int32)
    row: Array = array("W", np.int64, 0)  # where the operators of its phase begin, a multiple of N
    left: Array = array("W", np.int32)  # operators that have not ended
    missing: Array = array("W*N", np.int32)  # inputs that were not sent yet
    arrival: Array = array("W*N")  # of the last input
    # What waits for a device.
    low: Array = array("D*W*words", np.uint64, 0)  # sets of ready operators, by priority
    high: Array = array("D*W*tops", np.uint64, 0)  # which words of ``low`` are not 0
    num_ready: Array = array("D", np.int64)
    base: Array = array("D+1", np.int64)  # where the queue of each device has its room
    head: Array = array("D", np.int64)
    tail: Array = array("D", np.int64)
    later_s: Array = array("2*W*K*N")  # queues of those whose inputs are on the way
    later: Array = array("2*W*K*N", np.int64)  # micro-batch and operator
    next_entry: Array = array("D", np.int32)  # of ``order``
    # Devices and channels.
    running: Array = array("D", np.int64)  # operator; -1: none
    running_slot: Array = array("D", np.int64)
    wake_s: Array = array("D")  # next time something happens on the device
    begun: Array = array("D", np.int64)  # devices that begin something at this moment
    blocked_s: Array = array("D+1")  # end of what keeps the worker from its next operator
    last_arrival_s: Array = array("D")  # of what was sent there
    channel_s: Array = array("channels+1")  # when each is free
    arrives: Array = array("D")  # when what ``stamp`` names is there
    stamp: Array = array("D", np.int64)  # the micro-batch and tensor that were sent there last
    # Memory.
    refs: Array = array("W*T*D", np.int32, 0)  # users of each stored tensor, and ``_LIVE``
    held: Array = array("D", np.int64)  # bytes now
    event_s: Array = array("2*W*E")  # heap of begins and ends of transfers
    event: Array = array("2*W*E", np.int64)
    load: Array = array("D")  # seconds per micro-batch
    # Parameters of devices that stream: a ``placement.buffer.Buffer`` each.
    streams: bool  # any are copied
    streamed: Array = array("A*K*N", np.int32)  # which of the devices has the operator; -1: none
    reserved: Array = array("D", np.int64)  # operator that waits for its parameters; -1: none
    use: Array = array("S*N", np.int32)  # operators in order of use
    turn_of: Array = array("S*N", np.int32)  # where each is in that order
    num_uses: Array = array("S", np.int64)
    room: Array = array("S", np.int64)  # bytes
    there: Array = array("S*N", np.int64)  # where each is in the buffer without end; -1: nowhere
    promised: Array = array("S*N", np.bool_)
    here_s: Array = array("S*N")  # when the parameters of each are there
    oldest: Array = array("S*N", np.int32)  # operators that are there, a ring
    first_there: Array = array("S", np.int64)
    num_there: Array = array("S", np.int64)
    turn: Array = array("S", np.int64)
    end_bytes: Array = array("S", np.int64)  # of what came last
    wanted: Array = array("S", np.int64)  # operator that comes next whatever the order; -1: none
    copier_s: Array = array("S")  # when the copy that is under way ends
    coming: Array = array("2*S*N", np.int32)  # operators whose copies wait for the link, a ring
    coming_to: Array = array("2*S*N", np.int64)  # where each comes to, as ``there``
    first_coming: Array = array("S", np.int64)
    num_coming: Array = array("S", np.int64)
    first_end: Array = array("S", np.int64)  # of the first call: ``end_bytes`` in the buffer
    first_turn: Array = array("S", np.int64)
    busy_in: Array = array("Y*D")  # as ``busy``, of each call


def state_of(
    problem: Problem,
    num_batches: int,
    window: int,
    track: bool,
    order: tuple[Array, Array] | None = None,
    num_transfers: int = -1,
    num_phases: int = 1,
    num_copies: int = -1,
) -> State:
    """Room for a run; where ``num_transfers`` is not negative times are recorded.

    ``order``: the fields ``order`` and ``order_ptr`` of a schedule; None: list scheduling. Where
    devices stream, a run of one micro-batch has room for several in turn. ``num_copies`` of
    parameters have room if times are recorded; negative: twice as many as are needed, mostly.
    """
    g, n, d = problem.graph, problem.num_ops, problem.num_devices
    record, words = num_transfers >= 0, (n + 63) >> 6
    alone, streaming = num_batches == 1, len(problem.cluster.streaming)
    num_calls = CALLS if alone and streaming else 0
    if num_calls:
        num_batches, num_transfers = num_calls, num_calls * num_transfers
    sizes = {"K": num_phases, "N": n, "D": d, "W": window, "M": num_batches}
    sizes |= {"R": num_batches if record else 0, "X": max(num_transfers, 0)}
    sizes |= {"words": words, "tops": (words + 63) >> 6}
    sizes |= {"T": g.num_tensors if track else 0, "E": len(g.use_dst) if track else 0}
    sizes |= {"S": streaming, "A": min(streaming, 1), "C": 0, "Y": num_calls}
    if record and streaming:
        sizes["C"] = 2 * num_batches * n if num_copies < 0 else num_copies
    sizes["channels"] = problem.num_channels
    rows, row_ptr = order or (np.empty((0, 2), np.int32), np.zeros(d + 1, np.int32))
    order_of = {"order": rows, "order_ptr": row_ptr}
    run = {"num_batches": num_batches, "window": window, "track": track, "record": record}
    return State.fresh(sizes, False, **order_of, **run, alone=alone)


@once
def _spare(problem: Problem) -> dict[tuple[Any, ...], list[State]]:
    """Rooms that nobody uses, by what they are for."""
    return {}


@contextmanager
def room(
    problem: Problem,
    num_batches: int,
    window: int,
    track: bool,
    record: bool = False,
    num_phases: int = 1,
) -> Iterator[State]:
    """A ``State`` that nobody else uses meanwhile; a small one is kept for the problem's next run.

    If it is to ``record``, there is room for as many transfers as there can be.
    """
    key = num_batches, window, track, record, num_phases
    spare = _spare(problem).setdefault(key, [])
    try:
        state = spare.pop()
    except IndexError:
        sent = len(problem.graph.use_dst) * num_batches if record else -1
        state = state_of(problem, num_batches, window, track, None, sent, num_phases)
    yield state
    if num_phases * num_batches * problem.num_ops * problem.num_devices < _SMALL:
        spare.append(state)
