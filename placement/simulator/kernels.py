"""The simulator's numba kernels. What they compute is defined in ``placement.simulator``.

``tables`` lays a problem out as flat arrays once (cached on the problem); ``run`` simulates
one placement, ``run_batch`` many. Both work in a ``State`` that is allocated once.

What makes it fast: the operators that are ready on a device are a two-level bit set in
priority order, those whose inputs are still on the way a nearly sorted queue; a local
delivery is a transfer over a link that costs nothing, so that no branch depends on the
placement; memory is counted by references while the run goes on, so that nothing is sorted.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba.extending import intrinsic

from placement.simulator.copy_kernels import (
    FAR,
    begin_copies,
    copy,
    end_call,
    give_back,
    mean_call,
    next_copy_s,
    take,
)
from placement.simulator.memory_kernels import free, hold, hold_local, hold_sent, release, remember
from placement.simulator.run_state import State, Tables, room, state_of, tables
from placement.tools.jit import inlined, kernel

__all__ = ["State", "Tables", "durations", "room", "run", "run_batch", "state_of", "tables"]


@intrinsic
def _lowest_bit(typingctx: Any, x: Any) -> Any:
    """Number of the lowest set bit of a uint64 that is not 0 (one machine instruction)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from llvmlite import ir

        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return nb.int64(nb.uint64), codegen


@kernel
def _await(s, d, time, batch, op):
    """``op`` of ``batch`` can run on ``d`` from ``time`` on: into the device's sorted queue.

    Equal times stand by key. Times come nearly in order, so the walk from the back is short.
    The queue has twice the room of the most that can wait: moving it to its front is rare.
    """
    times, keys = s.later_s, s.later
    key = (np.int64(batch) << 32) | op
    head, tail = s.head[d], s.tail[d]
    if tail == s.base[d + 1]:
        begin = s.base[d]
        for i in range(tail - head):
            times[begin + i] = times[head + i]
            keys[begin + i] = keys[head + i]
        tail = begin + tail - head
        head = begin
        s.head[d] = head
    i = tail
    while i > head and (times[i - 1] > time or (times[i - 1] == time and keys[i - 1] > key)):
        times[i] = times[i - 1]
        keys[i] = keys[i - 1]
        i -= 1
    times[i] = time
    keys[i] = key
    s.tail[d] = tail + 1


@kernel
def _set_ready(t, s, d, slot, op):
    """``op`` of the micro-batch in ``slot`` can run on ``d`` now."""
    low, high, bit = s.low, s.high, t.priority[op]
    words = (len(t.priority) + 63) >> 6
    row = d * s.window + slot
    one = np.uint64(1)
    low[row * words + (bit >> 6)] |= one << np.uint64(bit & 63)
    tops = (words + 63) >> 6
    high[row * tops + (bit >> 12)] |= one << np.uint64((bit >> 6) & 63)  # one bit per word of low
    s.num_ready[d] += 1


@kernel
def _pop_ready(t, s, row):
    """Remove and return the lowest bit of the bit set ``row``; -1 if it is empty."""
    low, high = s.low, s.high
    words = (len(t.priority) + 63) >> 6
    one = np.uint64(1)
    tops = (words + 63) >> 6
    for v in range(tops):
        top = high[row * tops + v]
        if top != 0:
            w = (v << 6) + _lowest_bit(top)
            word = low[row * words + w]
            bit = _lowest_bit(word)
            word &= word - one
            low[row * words + w] = word
            high[row * tops + v] = top if word != 0 else top & (top - one)
            return (w << 6) + bit
    return -1


@kernel
def _record_transfer(t, s, tensor, batch, src, dst, begin, arrives_s):
    x = s.num_sent
    s.num_sent += 1
    s.transfers[x, 0] = tensor
    s.transfers[x, 1] = batch
    s.transfers[x, 2] = t.host if src == len(s.held) else src
    s.transfers[x, 3] = dst
    s.transfer_start[x] = begin
    s.transfer_end[x] = arrives_s


@kernel
def _begin(t, s):
    """Nothing has happened yet."""
    num_devices = len(s.running)
    begin_copies(t, s)
    for i in range(s.window):
        s.free_slots[i] = s.window - 1 - i
    s.num_free = s.window
    # Device d queues at most its operators in every flight, in [base[d], base[d + 1]).
    s.base[:] = 0
    for i in range(len(s.placement)):
        s.placement[i] = t.worker[s.placement[i]]  # seconds are known
        s.base[s.placement[i] + 1] += 2 * s.window
    for d in range(num_devices):
        s.base[d + 1] += s.base[d]
        s.head[d] = s.base[d]
        s.tail[d] = s.base[d]
        s.num_ready[d] = 0
        s.running[d] = -1
        s.reserved[d] = -1
        s.wake_s[d] = FAR
        s.blocked_s[d] = 0.0
        s.last_arrival_s[d] = -1.0
        s.busy[d] = 0.0
        s.stamp[d] = -1
        s.next_entry[d] = s.order_ptr[d]
        s.held[d] = 0
        s.peak[d] = 0
    s.channel_s[:] = 0.0
    s.num_active = s.num_running = s.num_sent = s.num_events = s.admitted = 0
    s.to_do = len(t.priority) * s.num_batches
    s.now = 0.0


@inlined
def _deliver(t, s, op, src, slot):
    """What ``op`` on device ``src`` has made goes to all that use it (N on D: the model inputs).

    The devices that get it are told when it arrives; the sender is kept for as long as it takes.
    """
    edge_tensor, edge_dst, edge_bytes = t.edge_tensor, t.edge_dst, t.edge_bytes
    channel_s, blocked_s = s.channel_s, s.blocked_s
    num_devices, num_tensors, n = len(s.running), len(t.tensor_src), len(t.priority)
    now, batch, track = s.now, np.int64(s.batch_of[slot]), s.track
    row = np.uint64(s.row[slot])
    has_matrix, fixed = len(t.transfer_s) > 0, len(s.order) > 0
    local_channel = np.uint64(t.local_channel)
    sending_s = 0.0
    # Unsigned indices spare numba's test for negative ones: 10 % of the run.
    for e in range(t.edge_ptr[op], t.edge_ptr[op + 1]):
        tensor, user = np.int64(edge_tensor[e]), np.uint64(edge_dst[e])
        dst = np.uint64(s.placement[row + user])
        to = np.int64(dst)  # a kernel is compiled for every integer type that it is given
        pair = np.uint64(src * num_devices) + dst
        c = np.uint64(t.link_channel[pair])
        if has_matrix:
            cost = t.transfer_s[(tensor * (num_devices + 1) + src) * num_devices + dst]
        else:
            cost = t.link_latency_s[pair] + edge_bytes[e] * t.link_s_per_byte[pair]
        # Sent once per device: the consumers after the first only look up when it arrives.
        mark = batch * num_tensors + tensor
        first = s.stamp[dst] != mark
        free_s = channel_s[c]
        begin = max(now, free_s) if t.contention else now
        arrives_s = begin + cost if first else s.arrives[dst]
        channel_s[c] = arrives_s if first else free_s
        s.arrives[dst] = arrives_s
        s.stamp[dst] = mark
        if t.link_blocking[pair]:
            blocked_s[src] = max(blocked_s[src], arrives_s)
        if first and c != local_channel:
            sending_s += t.link_send_s[pair] + edge_bytes[e] * t.link_send_s_per_byte[pair]
            if s.running[dst] < 0 and blocked_s[dst] <= now and s.last_arrival_s[dst] < now:
                sending_s += t.link_wake_s[pair]
            s.last_arrival_s[dst] = arrives_s
            if s.record:
                _record_transfer(t, s, tensor, batch, src, to, begin, arrives_s)
        if track:
            if c == local_channel:
                hold_local(t, s, slot, tensor, to, op == n)
            elif first:
                hold_sent(t, s, slot, tensor, src, to, begin, arrives_s)
        at = np.uint64(slot * n) + user
        ready_s = max(s.arrival[at], arrives_s)
        s.arrival[at] = ready_s
        s.missing[at] -= 1
        if s.missing[at] == 0 and not fixed:
            if ready_s <= now and not t.by_arrival:
                _set_ready(t, s, to, slot, user)
            else:
                _await(s, to, ready_s, batch, user)
    if sending_s > 0.0:
        blocked_s[src] = max(blocked_s[src], now + sending_s)


@kernel
def _admit(t, s):
    """A micro-batch takes a free slot, which is returned."""
    n = len(t.priority)
    batch = s.admitted
    s.admitted += 1
    s.num_free -= 1
    slot = np.int64(s.free_slots[s.num_free])
    s.slot_of[batch] = slot
    s.batch_of[slot] = batch
    row = batch * n % len(s.placement)
    s.row[slot] = row
    s.left[slot] = n
    s.active[s.num_active] = slot
    s.num_active += 1
    for i in range(n):
        s.missing[slot * n + i] = t.num_inputs[i]
        s.arrival[slot * n + i] = s.now
        if t.num_inputs[i] == 0 and len(s.order) == 0:
            d = np.int64(s.placement[row + i])
            if t.by_arrival:
                _await(s, d, s.now, batch, np.uint64(i))
            else:
                _set_ready(t, s, d, slot, np.uint64(i))
    return slot


@kernel
def _finish(t, s, slot):
    """A micro-batch has ended: its slot is free."""
    s.finish[s.batch_of[slot]] = s.now
    if s.alone and s.streams:
        end_call(t, s, np.int64(s.batch_of[slot]))
    s.free_slots[s.num_free] = slot
    s.num_free += 1
    s.num_active -= 1
    k = 0
    while s.active[k] != slot:
        k += 1
    while k < s.num_active:
        s.active[k] = s.active[k + 1]
        k += 1
    if s.track:
        for j in range(len(t.output_tensor)):
            tensor = t.output_tensor[j]
            home = np.int64(s.placement[s.row[slot] + t.tensor_src[tensor]])
            release(t, s, slot, np.int64(t.tensor_root[tensor]), home, 1)


@inlined
def _sender(t, s, d):
    """Who delivers now: operator, device and slot; operator -1: nobody.

    From device ``d`` on those whose operator ends, then model inputs (N on D) that are admitted.
    """
    running, wake_s, num_devices, now = s.running, s.wake_s, len(s.running), s.now
    while d < num_devices and (running[d] < 0 or wake_s[d] != now):
        d += 1
    op, slot = np.int64(-1), np.int64(0)
    if d < num_devices:
        op, slot = running[d], s.running_slot[d]
    elif s.num_free > 0 and s.admitted < s.num_batches:
        op, slot = np.int64(len(t.priority)), _admit(t, s)
    return op, d, slot


@inlined
def _end(t, s, op, d, slot):
    """An operator has ended."""
    s.running[d] = -1
    s.num_running -= s.alone
    if s.streams and s.streamed[s.row[slot] + op] >= 0:
        give_back(t, s, np.int64(s.streamed[s.row[slot] + op]), op)
    if s.record:
        s.end[s.batch_of[slot], op] = s.now


@inlined
def _leave(t, s, op, d, slot):
    """What an operator made is delivered."""
    if s.track:
        free(t, s, op, d, slot)
    if s.record:
        s.released[s.batch_of[slot], op] = max(s.now, s.blocked_s[d])
    s.to_do -= 1
    s.left[slot] -= 1
    if s.left[slot] == 0:
        _finish(t, s, slot)


@inlined
def _choose(t, s, d):
    """The operator that an idle device takes now, and its slot; -1: none, ``wake_s`` says when.

    The smallest micro-batch is first, then the highest priority, or who was ready first, or what
    the schedule says.
    """
    n, now = len(t.priority), s.now
    op, slot = np.int64(-1), np.int64(0)
    if len(s.order) > 0:
        at = s.next_entry[d]
        if at < s.order_ptr[d + 1] and s.order[at, 1] < s.admitted:
            i = np.int64(s.order[s.next_entry[d], 0])
            slot = np.int64(s.slot_of[s.order[s.next_entry[d], 1]])
            if s.missing[slot * n + i] == 0:
                if s.arrival[slot * n + i] <= now:
                    s.next_entry[d] += 1
                    op = i
                else:
                    s.wake_s[d] = s.arrival[slot * n + i]
    elif t.by_arrival:
        if s.head[d] < s.tail[d]:
            if s.later_s[s.head[d]] <= now:
                at = s.later[s.head[d]]
                s.head[d] += 1
                op = at & 0xFFFFFFFF
                slot = np.int64(s.slot_of[at >> 32])
            else:
                s.wake_s[d] = s.later_s[s.head[d]]
    else:
        while s.head[d] < s.tail[d] and s.later_s[s.head[d]] <= now:
            at = s.later[s.head[d]]
            s.head[d] += 1
            _set_ready(t, s, d, np.int64(s.slot_of[at >> 32]), np.uint64(at & 0xFFFFFFFF))
        if s.num_ready[d] > 0:
            s.num_ready[d] -= 1
            for k in range(s.num_active):
                slot = np.int64(s.active[k])
                bit = _pop_ready(t, s, d * s.window + slot)
                if bit >= 0:
                    op = np.int64(t.by_priority[bit])
                    break
        elif s.head[d] < s.tail[d]:
            s.wake_s[d] = s.later_s[s.head[d]]
    return op, slot


@inlined
def _start(t, s):
    """Idle devices begin what they can."""
    running, wake_s = s.running, s.wake_s
    now, slows, num_begun = s.now, s.alone, 0
    for d in range(len(running)):
        if running[d] >= 0:
            continue
        if s.reserved[d] >= 0:
            op, slot = s.reserved[d], s.running_slot[d]
        else:
            if s.blocked_s[d] > now:
                wake_s[d] = s.blocked_s[d]
                continue
            wake_s[d] = FAR
            op, slot = _choose(t, s, d)
            if op < 0:
                continue
        if s.streams and s.streamed[s.row[slot] + op] >= 0:
            here_s = take(t, s, op, slot)
            s.reserved[d] = op if here_s > now else -1
            if here_s > now:
                s.running_slot[d] = slot
                wake_s[d] = here_s
                continue
        running[d] = op
        s.running_slot[d] = slot
        if slows:
            s.begun[num_begun] = d
            num_begun += 1
        seconds = s.seconds[s.row[slot] + op]
        wake_s[d] = now + seconds
        s.busy[d] += seconds
        if s.record:
            s.start[s.batch_of[slot], op] = now
        if s.track:
            if len(t.workspace_bytes) > 0:
                s.held[d] += t.workspace_bytes[op]
            for j in range(t.out_ptr[op], t.out_ptr[op + 1]):
                hold(t, s, slot, np.int64(t.tensor_root[t.out_tensor[j]]), d, 1)
    s.num_running += num_begun
    for k in range(num_begun if s.num_running > 1 else 0):
        d = s.begun[k]
        longer = (s.num_running - 1) * s.beside_s[running[d]]
        wake_s[d] += longer
        s.busy[d] += longer


@inlined
def _next(s):
    """The next moment at which anything happens."""
    wake_s, now = s.wake_s, FAR
    for d in range(len(wake_s)):
        now = min(now, wake_s[d])
    return min(now, next_copy_s(s)) if s.streams else now


@kernel
def run(t, s):
    """Simulate one placement; returns 0, or 1 if nothing could move although work was left."""
    n = len(t.priority)
    _begin(t, s)
    while True:
        d = 0
        while True:  # all ends come first, then admissions, then starts
            op, d, slot = _sender(t, s, d)
            if op < 0:
                break
            if op < n:
                _end(t, s, op, d, slot)
            _deliver(t, s, op, d, slot)
            if op < n:
                _leave(t, s, op, d, slot)
        _start(t, s)
        if s.streams:
            copy(t, s)
        if s.to_do == 0:
            break
        before = s.now
        s.now = _next(s)
        if s.now == FAR:
            return 1
        if s.track:
            remember(t, s, before)
    return 0


@kernel
def _receive(t, s, row):
    """Adds to ``seconds``, of a phase, what taking in tensors of other devices takes."""
    num_devices, worker, placement = len(s.load), t.worker, s.placement
    s.stamp[:] = -1
    for op in range(len(t.priority)):
        src = np.int64(worker[placement[row + op]])
        for e in range(t.edge_ptr[op], t.edge_ptr[op + 1]):
            at = row + t.edge_dst[e]
            dst = np.int64(worker[placement[at]])
            if s.stamp[dst] != t.edge_tensor[e]:
                s.stamp[dst] = t.edge_tensor[e]
                s.seconds[at] += t.link_receive_s[src * num_devices + dst]


@kernel
def durations(t, s):
    """Fills ``seconds`` for ``placement``, and ``load`` per micro-batch.

    Of a run of one micro-batch also ``beside_s``, which is not read in others. Returns the
    largest load, inf where an operator cannot run on its device: then there is nothing to run.
    """
    placement, seconds, load = s.placement, s.seconds, s.load
    compute_s, loaded_s, worker = t.compute_s, t.loaded_s, t.worker
    num_devices, n = len(load), len(t.priority)
    num_phases = len(placement) // n
    load[:] = 0.0
    for row in range(0, len(placement), n):
        for i in range(n):
            seconds[row + i] = compute_s[i, placement[row + i]]
        if len(t.link_receive_s) > 0:
            _receive(t, s, row)
        for i in range(n):
            load[worker[placement[row + i]]] += seconds[row + i]
    total, most = 0.0, load[0] / num_phases
    for d in range(num_devices):
        load[d] /= num_phases
        total += load[d]
        most = max(most, load[d])
    if not np.isfinite(total):
        return most
    if s.alone:
        for i in range(n):
            slower = loaded_s[i, placement[i]] - compute_s[i, placement[i]]
            s.beside_s[i] = slower / max(t.num_workers - 1, 1)
        return most
    if most == 0.0:
        return most
    for row in range(0, len(placement), n):
        whole = 0.0
        for i in range(row, row + n):
            d = placement[i]
            share = (total - load[worker[d]]) / most / max(t.num_workers - 1, 1)
            seconds[i] += share * (loaded_s[i - row, d] - compute_s[i - row, d])
            whole += seconds[i]
        stretch = 1.0 + t.batch_s / whole if whole > 0.0 else 1.0
        for i in range(row, row + n):
            seconds[i] *= stretch
    load[:] = 0.0
    for i in range(len(placement)):
        load[worker[placement[i]]] += seconds[i]
    most = 0.0
    for d in range(num_devices):
        load[d] /= num_phases
        most = max(most, load[d])
    return most


@kernel
def run_batch(t, s, placements, finish, busiest, busy, peak):
    """``run`` for placements ``[B, K N]``: fills ``finish [B, M]``, ``busiest [B]``, and
    ``busy [B, D]`` and ``peak [B, D]`` (where it is tracked) of the whole run.

    ``busiest`` is the seconds per micro-batch of the busiest device, or link that copies, inf where
    an operator cannot run on its device.
    """
    for b in range(len(placements)):
        for i in range(len(s.placement)):
            s.placement[i] = placements[b, i]
        busiest[b] = durations(t, s)
        if not np.isfinite(busiest[b]):
            continue
        run(t, s)
        if s.alone:
            finish[b, 0] = mean_call(s) if s.streams else s.finish[0]
        else:
            for m in range(len(s.finish)):
                finish[b, m] = s.finish[m]
            busiest[b] = max(busiest[b], s.round_s)
        for d in range(len(s.busy)):
            busy[b, d], peak[b, d] = s.busy[d], s.peak[d]
