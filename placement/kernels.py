"""The simulator's numba kernels. What they compute is defined in ``placement.simulator``.

``tables`` lays a problem out as flat arrays once (cached on the problem); ``run`` simulates
one placement, ``run_batch`` many. Both work in a ``scratch`` that is allocated once.

What makes it fast: the operators that are ready on a device are a two-level bit set in
priority order, those whose inputs are still on the way a nearly sorted queue; a local
delivery is a transfer over a link that costs nothing, so that no branch depends on the
placement; of more than 64 devices those are passed over, 64 at a time, to which nothing has
happened; memory is counted by references while the run goes on, so that nothing is sorted.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba.extending import intrinsic

from placement.jit import allocating, kernel
from placement.problem import Problem

_FAR = 1e300  # later than any event
_LIVE = 1 << 30  # bit of a reference count: the bytes are counted as held


def tables(problem: Problem) -> tuple[Any, ...]:
    """Flat arrays of a problem for ``run``: graph (CSR), priorities, links, memory.

    Links have one more row than devices: row ``D`` is where model inputs come from. Pairs
    that share memory use the last channel and cost nothing.
    """
    cached = problem.__dict__.get("_kernel_tables")
    if cached is not None:
        return cached
    from placement.simulator import host_of

    g, n, d = problem.graph, problem.num_ops, problem.num_devices
    host, shares = host_of(problem)
    # Deliveries of an operator, by tensor and consumer; those of model inputs stand last.
    src = g.tensor_src[g.use_tensor]
    producer = np.where(src >= 0, src, n)
    order = np.lexsort((g.use_dst, g.use_tensor, producer))
    edge_tensor = g.use_tensor[order]

    def with_inputs(a: np.ndarray, local: Any) -> np.ndarray:
        """``a [.., D, D]`` with the row of model inputs, and ``local`` where memory is shared."""
        rows = np.concatenate([a, a[..., host : host + 1, :]], axis=-2).astype(a.dtype)
        rows[..., np.arange(d), np.arange(d)] = local
        rows[..., d, shares] = local
        return rows

    given = problem.profile.transfer_s
    matrix = np.zeros(0) if given is None else with_inputs(np.asarray(given, np.float64), 0.0)
    blocking = with_inputs(problem.link_blocking, False)
    blocking[d] = False
    sending = [problem.link_wake_s, problem.link_send_s, problem.link_send_s_per_byte]
    wake_s, send_s, send_s_per_byte = with_inputs(np.stack(sending), 0.0)
    wake_s[d] = send_s[d] = send_s_per_byte[d] = 0.0
    produced_outputs = g.output_tensor[g.tensor_src[g.output_tensor] >= 0]
    workspace = problem.profile.workspace_bytes
    power = problem.cluster.power
    cached = (
        np.searchsorted(producer[order], np.arange(n + 2)).astype(np.int32),  # edge_ptr
        edge_tensor,
        g.use_dst[order],
        g.tensor_bytes[edge_tensor].astype(np.float64),
        np.diff(g.in_ptr).astype(np.int32),  # num_inputs
        problem.priority,
        np.argsort(problem.priority).astype(np.int32),  # by_priority
        with_inputs(problem.link_latency_s, 0.0).ravel(),
        with_inputs(problem.link_s_per_byte, 0.0).ravel(),
        blocking.ravel(),
        with_inputs(problem.link_channel, problem.num_channels).ravel(),
        problem.num_channels,
        matrix.ravel(),
        host,
        g.out_ptr,
        g.out_tensor,
        g.in_ptr,
        g.in_tensor,
        g.use_ptr,
        g.use_dst,
        g.tensor_src,
        g.tensor_root,
        g.tensor_bytes,
        produced_outputs,
        np.bincount(produced_outputs, minlength=g.num_tensors).astype(np.int32),
        np.zeros(0, np.int64) if workspace is None else workspace.astype(np.int64),
        problem.contention,
        problem.ready_order == "arrival",
        wake_s.ravel(),
        send_s.ravel(),
        send_s_per_byte.ravel(),
        power.sleep_after_s,
        power.sleep_exit_s,
    )
    problem.__dict__["_kernel_tables"] = cached
    return cached


@intrinsic
def _lowest_bit(typingctx: Any, x: Any) -> Any:
    """Number of the lowest set bit of a uint64 that is not 0 (one machine instruction)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        from llvmlite import ir

        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return nb.int64(nb.uint64), codegen


@allocating
def scratch(n, num_tensors, num_edges, num_devices, num_channels, window, num_batches, track):
    """Everything ``run`` writes while it runs; one run leaves it ready for the next."""
    words = (n + 63) >> 6
    copies = window * num_tensors * num_devices if track else 0
    events = 2 * window * num_edges if track else 0
    return (
        np.empty(num_batches, np.int32),  # slot_of
        np.empty(window, np.int32),  # free_slots
        np.empty(window, np.int32),  # active: slots in the order of their micro-batches
        np.empty(window, np.int32),  # batch_of
        np.empty(window, np.int32),  # left
        np.empty(window * n, np.int32),  # missing
        np.empty(window * n, np.float64),  # arrival
        np.zeros(num_devices * window * words, np.uint64),  # low
        np.zeros(num_devices * window * ((words + 63) >> 6), np.uint64),  # high
        np.empty(num_devices, np.int64),  # num_ready
        np.empty(num_devices + 1, np.int64),  # base
        np.empty(num_devices, np.int64),  # head
        np.empty(num_devices, np.int64),  # tail
        np.empty(2 * window * n, np.float64),  # later_s
        np.empty(2 * window * n, np.int64),  # later
        np.empty(num_devices, np.int64),  # running
        np.empty(num_devices, np.int64),  # running_slot
        np.empty(num_devices),  # wake_s
        np.empty(num_devices, np.int64),  # begun: devices that begin something at this moment
        np.empty((num_devices + 63) >> 6),  # soon_s: the first wake_s of 64 devices
        np.empty(num_devices + 1),  # blocked_s
        np.empty(num_devices),  # told_s: arrival of the last that was sent there
        np.empty(num_devices),  # ended_s: of the last operator
        np.empty(num_channels + 1),  # channel_s
        np.empty(num_devices),  # arrives
        np.empty(num_devices, np.int64),  # stamp
        np.empty(num_devices, np.int32),  # next_entry
        np.zeros(copies, np.int32),  # refs
        np.empty(num_devices, np.int64),  # held
        np.empty(events),  # event_s
        np.empty(events, np.int64),  # event
        np.empty(2, np.int64),  # counts: transfers recorded, memory events waiting
    )


@kernel
def _push_timed(times, keys, size, time, key):
    """Insert into the binary min-heap of times that carries keys."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if times[parent] <= time:
            break
        times[i] = times[parent]
        keys[i] = keys[parent]
        i = parent
    times[i] = time
    keys[i] = key


@kernel
def _pop_timed(times, keys, size):
    """Remove the earliest entry and return its key."""
    top = keys[0]
    size -= 1
    time, key = times[size], keys[size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and times[child + 1] < times[child]:
            child += 1
        if times[child] >= time:
            break
        times[i] = times[child]
        keys[i] = keys[child]
        i = child
    times[i] = time
    keys[i] = key
    return top


@kernel
def _insert_later(times, keys, head, tail, begin, limit, time, key):
    """Insert into the sorted queue ``[head, tail)`` of the region ``[begin, limit)``.

    Equal times stand by key. Times come nearly in order, so the walk from the back is short.
    The region has twice the room of the most that can wait: moving the queue to its front is
    rare. Returns the new head and tail.
    """
    if tail == limit:
        for i in range(tail - head):
            times[begin + i] = times[head + i]
            keys[begin + i] = keys[head + i]
        tail = begin + tail - head
        head = begin
    i = tail
    while i > head and (times[i - 1] > time or (times[i - 1] == time and keys[i - 1] > key)):
        times[i] = times[i - 1]
        keys[i] = keys[i - 1]
        i -= 1
    times[i] = time
    keys[i] = key
    return head, tail + 1


@kernel
def _set_ready(low, high, row, words, bit):
    """Add ``bit`` to the bit set ``row``; ``high`` has one bit per word of ``low``."""
    one = np.uint64(1)
    low[row * words + (bit >> 6)] |= one << np.uint64(bit & 63)
    tops = (words + 63) >> 6
    high[row * tops + (bit >> 12)] |= one << np.uint64((bit >> 6) & 63)


@kernel
def _pop_ready(low, high, row, words):
    """Remove and return the lowest bit of the bit set ``row``; -1 if it is empty."""
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
def _hold(refs, held, key, device, size):
    """Count the bytes of a stored tensor, once."""
    if refs[key] < _LIVE:
        refs[key] += _LIVE
        held[device] += size


@kernel
def _release(refs, held, key, device, size):
    """One user less; the last one frees the bytes."""
    refs[key] -= 1
    if refs[key] == _LIVE:
        refs[key] = 0
        held[device] -= size


@kernel
def _num_users(use_ptr, use_dst, placement, tensor, device):
    """How many operators on ``device`` use ``tensor``."""
    count = 0
    for u in range(use_ptr[tensor], use_ptr[tensor + 1]):
        count += placement[use_dst[u]] == device
    return count


@kernel
def _later_event(event_s, event, counts, time, slot, tensor, device, is_begin):
    """Remember that a transfer begins or ends at ``time``."""
    key = (((np.int64(tensor) << 24) | slot) << 15 | device << 1) | is_begin
    _push_timed(event_s, event, counts[1], time, key)
    counts[1] += 1


@kernel
def run(
    problem_tables,
    state,
    placement,
    seconds,
    beside_s,
    num_batches,
    window,
    order,
    order_ptr,
    finish,
    busy,
    asleep,
    track,
    peak,
    start,
    end,
    transfers,
    transfer_start,
    transfer_end,
):
    """Simulate one placement; fills ``finish [M]``, ``busy [D]`` and ``asleep [D]``, seconds.

    Operators take ``seconds [N]``. In a run of one micro-batch they take ``beside_s [N]`` longer
    for each other device that runs something when they begin.
    If ``track``, also ``peak [D]``: the most bytes of tensors and workspace held. Where ``start``
    has rows, also the last five. ``order [K, 2]``/``order_ptr [D + 1]`` are a flat schedule, or
    empty for list scheduling.
    Returns 0, or 1 if nothing could move although work was left.
    """
    (
        edge_ptr,
        edge_tensor,
        edge_dst,
        edge_bytes,
        num_inputs,
        priority,
        by_priority,
        link_latency_s,
        link_s_per_byte,
        link_blocking,
        link_channel,
        local_channel,
        transfer_s,
        host,
        out_ptr,
        out_tensor,
        in_ptr,
        in_tensor,
        use_ptr,
        use_dst,
        tensor_src,
        tensor_root,
        tensor_bytes,
        output_tensor,
        output_count,
        workspace_bytes,
        contention,
        by_arrival,
        link_wake_s,
        link_send_s,
        link_send_s_per_byte,
        sleep_after_s,
        sleep_exit_s,
    ) = problem_tables
    # Not an argument: numba would compile once for True and once for False.
    record = len(start) > 0
    (
        slot_of,
        free_slots,
        active,
        batch_of,
        left,
        missing,
        arrival,
        low,
        high,
        num_ready,
        base,
        head,
        tail,
        later_s,
        later,
        running,
        running_slot,
        wake_s,
        begun,
        soon_s,
        blocked_s,
        told_s,
        ended_s,
        channel_s,
        arrives,
        stamp,
        next_entry,
        refs,
        held,
        event_s,
        event,
        counts,
    ) = state
    n, num_devices, num_tensors = len(priority), len(running), len(tensor_src)
    words = (n + 63) >> 6
    fixed, many, slows = len(order) > 0, num_devices > 64, num_batches == 1
    has_matrix = len(transfer_s) > 0
    for i in range(window):
        free_slots[i] = window - 1 - i
    num_free = window
    num_active = 0
    # Device d queues at most its operators in every flight, in [base[d], base[d + 1]).
    base[:] = 0
    for i in range(n):
        base[placement[i] + 1] += 2 * window
    for d in range(num_devices):
        base[d + 1] += base[d]
        head[d] = base[d]
        tail[d] = base[d]
        num_ready[d] = 0
        running[d] = -1
        wake_s[d] = _FAR  # next time something happens on the device
        blocked_s[d] = 0.0
        told_s[d] = -1.0
        ended_s[d] = 0.0
        busy[d] = 0.0
        asleep[d] = 0.0
        stamp[d] = -1
        next_entry[d] = order_ptr[d]
        held[d] = 0
        peak[d] = 0
    channel_s[:] = 0.0
    soon_s[:] = 0.0
    counts[:] = 0
    admitted = 0
    to_do = n * num_batches
    num_running = 0
    now = 0.0
    while True:
        # -- ends in device order, then admissions: both deliver (model inputs: N on D)
        src = 0
        while True:
            if src < num_devices:
                if many and src & 63 == 0 and soon_s[src >> 6] != now:
                    src = min(src + 64, num_devices)
                    continue
                if running[src] < 0 or wake_s[src] != now:
                    src += 1
                    continue
                op = running[src]
                slot = running_slot[src]
                running[src] = -1
                num_running -= slows
                ended_s[src] = now
                batch = batch_of[slot]
                if record:
                    end[batch, op] = now
            elif admitted < num_batches and num_free > 0:
                op = n
                batch = admitted
                admitted += 1
                num_free -= 1
                slot = free_slots[num_free]
                slot_of[batch] = slot
                batch_of[slot] = batch
                left[slot] = n
                active[num_active] = slot
                num_active += 1
                soon_s[:] = now
                for i in range(n):
                    missing[slot * n + i] = num_inputs[i]
                    arrival[slot * n + i] = now
                    if num_inputs[i] == 0 and not fixed:
                        d = placement[i]
                        if by_arrival:
                            head[d], tail[d] = _insert_later(
                                later_s,
                                later,
                                head[d],
                                tail[d],
                                base[d],
                                base[d + 1],
                                now,
                                (np.int64(batch) << 32) | i,
                            )
                        else:
                            _set_ready(low, high, d * window + slot, words, priority[i])
                            num_ready[d] += 1
            else:
                break
            sending_s = 0.0
            # Unsigned indices spare numba's test for negative ones: 10 % of the run.
            for e in range(edge_ptr[op], edge_ptr[op + 1]):
                t, user = edge_tensor[e], np.uint64(edge_dst[e])
                dst = np.uint64(placement[user])
                pair = np.uint64(src * num_devices) + dst
                c = np.uint64(link_channel[pair])
                if has_matrix:
                    cost = transfer_s[(np.int64(t) * (num_devices + 1) + src) * num_devices + dst]
                else:
                    cost = link_latency_s[pair] + edge_bytes[e] * link_s_per_byte[pair]
                # Sent once per device: the consumers after the first only look up when it arrives.
                mark = np.int64(batch) * num_tensors + t
                first = stamp[dst] != mark
                free_s = channel_s[c]
                begin = max(now, free_s) if contention else now
                arrives_s = begin + cost if first else arrives[dst]
                channel_s[c] = arrives_s if first else free_s
                arrives[dst] = arrives_s
                stamp[dst] = mark
                if link_blocking[pair]:
                    blocked_s[src] = max(blocked_s[src], arrives_s)
                if first and c != local_channel:
                    sending_s += link_send_s[pair] + edge_bytes[e] * link_send_s_per_byte[pair]
                    if running[dst] < 0 and blocked_s[dst] <= now and told_s[dst] < now:
                        sending_s += link_wake_s[pair]
                    told_s[dst] = arrives_s
                if record and first and c != local_channel:
                    x = counts[0]
                    counts[0] += 1
                    transfers[x, 0] = t
                    transfers[x, 1] = batch
                    transfers[x, 2] = host if op == n else src
                    transfers[x, 3] = dst
                    transfer_start[x] = begin
                    transfer_end[x] = arrives_s
                if track:
                    root = tensor_root[t]
                    if c == local_channel:
                        key = (slot * num_tensors + root) * num_devices + dst
                        refs[key] += 1
                        if op == n:
                            _hold(refs, held, key, dst, tensor_bytes[root])
                    elif first:
                        if begin > now:
                            _later_event(event_s, event, counts, begin, slot, t, dst, 1)
                        else:
                            stored = root if op == n else t
                            key = (slot * num_tensors + stored) * num_devices + dst
                            refs[key] += _num_users(use_ptr, use_dst, placement, t, dst)
                            _hold(refs, held, key, dst, tensor_bytes[stored])
                        if op < n:
                            refs[(slot * num_tensors + root) * num_devices + src] += 1
                            _later_event(event_s, event, counts, arrives_s, slot, root, src, 0)
                if many:
                    soon_s[dst >> np.uint64(6)] = now
                at = np.uint64(slot * n) + user
                ready_s = max(arrival[at], arrives_s)
                arrival[at] = ready_s
                missing[at] -= 1
                if missing[at] == 0 and not fixed:
                    if ready_s <= now and not by_arrival:
                        _set_ready(low, high, dst * window + slot, words, priority[user])
                        num_ready[dst] += 1
                    else:
                        head[dst], tail[dst] = _insert_later(
                            later_s,
                            later,
                            head[dst],
                            tail[dst],
                            base[dst],
                            base[dst + 1],
                            ready_s,
                            (np.int64(batch) << 32) | user,
                        )
            if sending_s > 0.0:
                blocked_s[src] = max(blocked_s[src], now + sending_s)
            if op == n:
                continue
            if track:
                if len(workspace_bytes) > 0:
                    held[src] -= workspace_bytes[op]
                for j in range(out_ptr[op], out_ptr[op + 1]):
                    root = tensor_root[out_tensor[j]]
                    key = (slot * num_tensors + root) * num_devices + src
                    refs[key] += output_count[out_tensor[j]]
                    _release(refs, held, key, src, tensor_bytes[root])
                for j in range(in_ptr[op], in_ptr[op + 1]):
                    t = in_tensor[j]
                    stored = _stored(tensor_src, tensor_root, placement, t, src)
                    key = (slot * num_tensors + stored) * num_devices + src
                    _release(refs, held, key, src, tensor_bytes[stored])
            to_do -= 1
            left[slot] -= 1
            if left[slot] == 0:
                finish[batch] = now
                free_slots[num_free] = slot
                num_free += 1
                num_active -= 1
                k = 0
                while active[k] != slot:
                    k += 1
                while k < num_active:
                    active[k] = active[k + 1]
                    k += 1
                if track:
                    for j in range(len(output_tensor)):
                        t = output_tensor[j]
                        root, home = tensor_root[t], placement[tensor_src[t]]
                        key = (slot * num_tensors + root) * num_devices + home
                        _release(refs, held, key, home, tensor_bytes[root])
            src += 1
        # -- start work on idle devices; of 64 to which nothing has happened none can
        num_begun = 0
        for d in range(num_devices):
            if running[d] >= 0 or (many and soon_s[d >> 6] != now):
                continue
            if blocked_s[d] > now:
                wake_s[d] = blocked_s[d]
                continue
            wake_s[d] = _FAR
            op, slot = -1, 0
            if fixed:
                if next_entry[d] < order_ptr[d + 1]:
                    i = order[next_entry[d], 0]
                    slot = slot_of[order[next_entry[d], 1]]
                    at = slot * n + i
                    if missing[at] == 0:
                        if arrival[at] <= now:
                            next_entry[d] += 1
                            op = i
                        else:
                            wake_s[d] = arrival[at]
            elif by_arrival:
                if head[d] < tail[d]:
                    if later_s[head[d]] <= now:
                        at = later[head[d]]
                        head[d] += 1
                        op = at & 0xFFFFFFFF
                        slot = slot_of[at >> 32]
                    else:
                        wake_s[d] = later_s[head[d]]
            else:
                while head[d] < tail[d] and later_s[head[d]] <= now:
                    at = later[head[d]]
                    head[d] += 1
                    num_ready[d] += 1
                    row = d * window + slot_of[at >> 32]
                    _set_ready(low, high, row, words, priority[at & 0xFFFFFFFF])
                if num_ready[d] > 0:
                    num_ready[d] -= 1
                    for k in range(num_active):
                        slot = active[k]
                        bit = _pop_ready(low, high, d * window + slot, words)
                        if bit >= 0:
                            op = by_priority[bit]
                            break
                elif head[d] < tail[d]:
                    wake_s[d] = later_s[head[d]]
            if op >= 0:
                running[d] = op
                running_slot[d] = slot
                if slows:
                    begun[num_begun] = d
                    num_begun += 1
                begin = now
                if now - ended_s[d] > sleep_after_s[d]:
                    asleep[d] += now - ended_s[d] - sleep_after_s[d]
                    begin = now + sleep_exit_s[d]
                wake_s[d] = begin + seconds[op]
                busy[d] += seconds[op]
                if record:
                    start[batch_of[slot], op] = begin
                if track:
                    if len(workspace_bytes) > 0:
                        held[d] += workspace_bytes[op]
                    for j in range(out_ptr[op], out_ptr[op + 1]):
                        root = tensor_root[out_tensor[j]]
                        key = (slot * num_tensors + root) * num_devices + d
                        refs[key] += 1
                        _hold(refs, held, key, d, tensor_bytes[root])
        num_running += num_begun
        for k in range(num_begun if num_running > 1 else 0):
            d = begun[k]
            longer = (num_running - 1) * beside_s[running[d]]
            wake_s[d] += longer
            busy[d] += longer
        if to_do == 0:
            break
        # -- the next moment at which anything happens
        before = now
        now = _FAR
        if many:
            for block in range(len(soon_s)):
                if soon_s[block] == before:
                    soon_s[block] = _FAR
                    for d in range(block << 6, min((block + 1) << 6, num_devices)):
                        soon_s[block] = min(soon_s[block], wake_s[d])
                now = min(now, soon_s[block])
        else:
            for d in range(num_devices):
                now = min(now, wake_s[d])
        if now == _FAR:
            return 1
        if track:
            # What is held when the clock moves on is what counts: at equal times the order
            # of allocations and frees does not matter.
            while counts[1] > 0 and event_s[0] <= now:
                if event_s[0] > before:
                    before = event_s[0]
                    for d in range(num_devices):
                        peak[d] = max(peak[d], held[d])
                code = _pop_timed(event_s, event, counts[1])
                counts[1] -= 1
                t, slot, d = code >> 39, (code >> 15) & 0xFFFFFF, (code >> 1) & 0x3FFF
                stored = tensor_root[t] if tensor_src[t] < 0 else t
                key = (slot * num_tensors + stored) * num_devices + d
                if code & 1:
                    refs[key] += _num_users(use_ptr, use_dst, placement, t, d)
                    _hold(refs, held, key, d, tensor_bytes[stored])
                else:
                    _release(refs, held, key, d, tensor_bytes[stored])
            if now > before:
                for d in range(num_devices):
                    peak[d] = max(peak[d], held[d])
    for d in range(num_devices):
        asleep[d] += max(0.0, now - ended_s[d] - sleep_after_s[d])
    return 0


@kernel
def _stored(tensor_src, tensor_root, placement, tensor, device):
    """At home a tensor lives in its root's memory; a copy sent elsewhere is its own."""
    src = tensor_src[tensor]
    return tensor_root[tensor] if src < 0 or placement[src] == device else tensor


@allocating
def durations(placement, compute_s, loaded_s, batch_s, num_batches, seconds, beside_s, load):
    """As ``simulator.durations``: fills ``seconds [N]``, and ``load [D]`` per micro-batch.

    Of a run of one micro-batch also ``beside_s [N]``, see ``run``, which does not read it in
    others. Returns the largest load, inf where an operator cannot run on its device: then there
    is nothing to run.
    """
    num_devices, n = len(load), len(placement)
    load[:] = 0.0
    for i in range(n):
        seconds[i] = compute_s[i, placement[i]]
        load[placement[i]] += seconds[i]
    total, most = load.sum(), load.max()
    if not np.isfinite(total):
        return most
    if num_batches == 1:
        for i in range(n):
            slower = loaded_s[i, placement[i]] - seconds[i]
            beside_s[i] = slower / max(num_devices - 1, 1)
        return most
    if most == 0.0:
        return most
    whole = 0.0
    for i in range(n):
        d = placement[i]
        share = (total - load[d]) / most / max(num_devices - 1, 1)
        seconds[i] += share * (loaded_s[i, d] - seconds[i])
        whole += seconds[i]
    stretch = 1.0 + batch_s / whole
    load[:] = 0.0
    for i in range(n):
        seconds[i] *= stretch
        load[placement[i]] += seconds[i]
    return load.max()


@allocating
def run_batch(
    problem_tables,
    placements,
    compute_s,
    loaded_s,
    batch_s,
    num_batches,
    window,
    track,
    finish,
    busiest,
    busy,
    asleep,
    peak,
):
    """``run`` for placements ``[B, N]``: fills ``finish [B, M]``, ``busiest [B]``, and
    ``busy [B, D]`` and ``asleep [B, D]`` of the whole run.

    ``busiest`` is the seconds per micro-batch of the busiest device, inf where an operator
    cannot run on its device. If ``track``, also ``peak [B, D]``: the most bytes of tensors and
    workspace held.
    """
    num_devices = compute_s.shape[1]
    num_placements, n = placements.shape
    num_tensors, num_edges = len(problem_tables[20]), len(problem_tables[1])
    state = scratch(
        n, num_tensors, num_edges, num_devices, problem_tables[11], window, num_batches, track
    )
    order = np.zeros((0, 2), np.int32)
    order_ptr = np.zeros(num_devices + 1, np.int32)
    no_times = np.empty((0, n))
    no_transfers = np.empty((0, 4), np.int32)
    no_transfer_times = np.empty(0)
    seconds, beside_s = np.empty(n), np.empty(n)
    load = np.empty(num_devices)
    for b in range(num_placements):
        placement = placements[b]
        busiest[b] = durations(
            placement, compute_s, loaded_s, batch_s, num_batches, seconds, beside_s, load
        )
        if not np.isfinite(busiest[b]):
            continue
        run(
            problem_tables,
            state,
            placement,
            seconds,
            beside_s,
            num_batches,
            window,
            order,
            order_ptr,
            finish[b],
            busy[b],
            asleep[b],
            track,
            peak[b],
            no_times,
            no_times,
            no_transfers,
            no_transfer_times,
            no_transfer_times,
        )
