"""What a search of orders is given, and what it keeps: tables of the problem, and a state."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numpy as np

from placement.simulator import kernels
from placement.tools.jit import Struct, array

Array = Any


class Tables(Struct):
    """One problem."""

    edge_ptr: Array  # int32 [N + 2] deliveries of each operator, by tensor; then of the inputs
    edge_tensor: Array  # int32
    edge_dst: Array  # int32
    edge_bytes: Array  # float64
    edge_in: Array  # int32 where each delivery stands among those to its user
    in_ptr: Array  # int32 [N + 1] deliveries to each operator
    in_edge: Array  # int32
    in_src: Array  # int32 who sends; N: a model input
    channel: Array  # int32 [(D + 1) D]: the last row is for model inputs
    local: int  # the channel of what shares memory
    contention: bool
    compute_s: Array  # float64 [N, D]
    group: Array  # int32 [N]
    op_ptr: Array  # int32 [G + 1]
    op: Array  # int32 [N] operators of each group
    simulated: bool  # times depend on what else happens meanwhile: the simulator tells them
    problem: kernels.Tables  # what links take, and all that the simulator asks


class State(Struct):
    """A search, and room to evaluate in."""

    random: Array = array("1", np.uint64, 1)
    cost_s: float  # latency of what was kept last
    best_s: float  # the least
    step: int
    best_step: int  # in which the best was met
    temperature: float
    warm: float  # the temperature at first
    cold: float  # and at last
    num_kept: int  # moves
    num_chain: int  # operators of the critical chain
    num_back: int  # times that a tabu search went back to the best
    begun: int  # position at which the pass that was tried last begins; -1: with the model inputs
    ended: int  # and beyond the one where it ends
    place: Array = array("N", np.int32)
    sequence: Array = array("N", np.int32)
    position: Array = array("N+1", np.int32, -1)  # of each in it; the last: -1, of model inputs
    best_place: Array = array("N", np.int32)
    best_sequence: Array = array("N", np.int32)
    start_s: Array = array("N")  # of what was kept last, as are the next
    end_s: Array = array("N")
    after_s: Array = array("N")  # longest path from the end of each to the end of all
    users_s: Array = array("N")  # the same through those that use its tensors
    from_s: Array = array("N")  # from its begin
    hand_s: Array = array("N")  # that its device hands over what it made; 0 if not simulated
    waited: Array = array("N", np.int32)  # whom each operator waited for; -1: nobody
    lane: Array = array("N", np.int32)  # operators of each device, in order
    lane_ptr: Array = array("D+1", np.int32)
    in_lane: Array = array("N", np.int32)  # where each operator is there
    load: Array = array("D")  # seconds of each device
    chain: Array = array("N", np.int32)  # the critical chain, the first num_chain
    on_chain: Array = array("N", np.bool_)
    moved: Array = array("N", np.int64)  # step of the last move
    arrival_s: Array = array("E")  # of what was kept, in the order of ``in_edge``
    row_s: Array = array("2, R, D+channels")  # when each is free, at R positions; the same
    row_last: Array = array("2, R, D", np.int32)  # operator that each device ran last there
    try_start_s: Array = array("N")  # of what was tried last, as are the next
    try_end_s: Array = array("N")
    try_hand_s: Array = array("N")
    try_waited: Array = array("N", np.int32)
    try_arrival_s: Array = array("E")  # as ``arrival_s`` when nothing is being tried
    mark: Array = array("N", np.bool_)  # scratch, False
    stale: Array = array("N+1", np.bool_)  # tails to be computed; the last: model inputs, False
    room: Array = array("N", np.int32)
    finish_s: Array = array("N")  # room of estimates (mark and room too) and of moves
    free_s: Array = array("D+channels")  # when each is free
    last: Array = array("D", np.int32)  # operator that a device ran last
    sent: Array = array("D", np.int32)  # tensor that was sent to each last
    sent_s: Array = array("D")  # when it arrived
    estimate_s: Array = array("C+1")  # the latency that each offered move would bring
    which: Array = array("C+1", np.int32, -1)  # operator that each move begins with; -1: no move
    to: Array = array("C+1", np.int32)  # device
    count: Array = array("C+1", np.int32)  # groups that move
    body: Array = array("C+1, L", np.int32)  # those groups
    at: Array = array("C+1", np.int32)  # before whom in the sequence; -1: where it is
    score: Array = array("C+1", np.float32)  # the larger, the likelier it is tried
    logits: Array = array("C+1")
    run: kernels.State  # in an order that is given; of two operators where nothing is simulated
