"""The simulator's numba kernels. What they compute is defined in ``placement.simulator``.

``tables`` and ``memory_tables`` lay a problem out as flat arrays once (cached on the
problem); ``run`` simulates one placement, ``run_batch`` many. Every kernel is plain Python
too (``run.py_func``), which is how the tests step through it.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from placement.problem import Problem

_FAR = 1e300  # later than any event


def tables(problem: Problem) -> tuple[Any, ...]:
    """Flat arrays of a problem for ``run``: graph (CSR), priorities, links, host."""
    cached = problem.__dict__.get("_kernel_tables")
    if cached is None:
        from placement.simulator import host_of

        g = problem.graph
        host, shares = host_of(problem)
        by_priority = np.argsort(problem.priority).astype(np.int32)
        given = problem.profile.transfer_s
        matrix = np.zeros((0, 0, 0)) if given is None else np.ascontiguousarray(given, np.float64)
        cached = (
            g.out_ptr,
            g.out_tensor,
            g.use_ptr,
            g.use_dst,
            np.diff(g.in_ptr).astype(np.int32),
            np.flatnonzero(g.tensor_src < 0).astype(np.int32),
            g.tensor_bytes.astype(np.float64),
            problem.priority,
            by_priority,
            problem.link_latency_s,
            problem.link_s_per_byte,
            problem.link_blocking,
            problem.link_channel,
            problem.num_channels,
            matrix,
            host,
            shares,
        )
        problem.__dict__["_kernel_tables"] = cached
    return cached


def memory_tables(problem: Problem) -> tuple[Any, ...]:
    """Flat arrays of a problem for ``peak_bytes``."""
    cached = problem.__dict__.get("_memory_tables")
    if cached is None:
        g = problem.graph
        workspace = problem.profile.workspace_bytes
        cached = (
            g.tensor_src,
            g.tensor_bytes,
            g.tensor_root,
            g.use_ptr,
            g.use_dst,
            g.output_tensor,
            np.zeros(0, np.int64) if workspace is None else workspace.astype(np.int64),
        )
        problem.__dict__["_memory_tables"] = cached
    return cached


@nb.njit(cache=True, nogil=True)
def _push(heap: Any, base: int, size: int, key: int) -> None:
    """Insert ``key`` into the binary min-heap ``heap[base : base + size]``."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if heap[base + parent] <= key:
            break
        heap[base + i] = heap[base + parent]
        i = parent
    heap[base + i] = key


@nb.njit(cache=True, nogil=True)
def _pop(heap: Any, base: int, size: int) -> int:
    """Remove and return the least key of ``heap[base : base + size]``."""
    top = heap[base]
    last = heap[base + size - 1]
    size -= 1
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and heap[base + child + 1] < heap[base + child]:
            child += 1
        if heap[base + child] >= last:
            break
        heap[base + i] = heap[base + child]
        i = child
    heap[base + i] = last
    return top


@nb.njit(cache=True, nogil=True)
def _push_timed(times: Any, keys: Any, base: int, size: int, time: float, key: int) -> None:
    """``_push`` ordered by time, carrying a key."""
    i = size
    while i > 0:
        parent = (i - 1) >> 1
        if times[base + parent] <= time:
            break
        times[base + i] = times[base + parent]
        keys[base + i] = keys[base + parent]
        i = parent
    times[base + i] = time
    keys[base + i] = key


@nb.njit(cache=True, nogil=True)
def _pop_timed(times: Any, keys: Any, base: int, size: int) -> int:
    """Remove the earliest entry and return its key."""
    top = keys[base]
    size -= 1
    time, key = times[base + size], keys[base + size]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and times[base + child + 1] < times[base + child]:
            child += 1
        if times[base + child] >= time:
            break
        times[base + i] = times[base + child]
        keys[base + i] = keys[base + child]
        i = child
    times[base + i] = time
    keys[base + i] = key
    return top


@nb.njit(cache=True, nogil=True)
def run(
    out_ptr,
    out_tensor,
    use_ptr,
    use_dst,
    num_inputs,
    model_inputs,
    tensor_bytes,
    priority,
    by_priority,
    link_latency_s,
    link_s_per_byte,
    link_blocking,
    link_channel,
    num_channels,
    transfer_s,
    host,
    shares_host,
    placement,
    seconds,
    num_batches,
    window,
    order,
    order_ptr,
    finish,
    record,
    start,
    end,
    transfers,
    transfer_start,
    transfer_end,
):
    """Simulate one placement; fills ``finish[M]`` and, if ``record``, the other outputs.

    ``order [K, 2]``/``order_ptr [D + 1]`` are a flat schedule, or empty for list scheduling.
    Returns 0, or 1 if nothing could move although work was left.
    """
    n, num_devices = len(priority), len(link_latency_s)
    fixed = len(order) > 0
    has_matrix = transfer_s.shape[0] > 0
    # Micro-batches in flight live in slots; (slot, operator) indexes the state below.
    slot_of = np.empty(num_batches, np.int32)
    free_slots = np.arange(window - 1, -1, -1).astype(np.int32)
    num_free = window
    missing = np.empty(window * n, np.int32)
    arrival = np.empty(window * n, np.float64)
    left = np.empty(window, np.int32)
    # Heaps of device d occupy [base[d], base[d + 1]): at most its operators in every flight.
    base = np.zeros(num_devices + 1, np.int64)
    for i in range(n):
        base[placement[i] + 1] += window
    for d in range(num_devices):
        base[d + 1] += base[d]
    ready = np.empty(base[num_devices], np.int64)
    num_ready = np.zeros(num_devices, np.int64)
    later_s = np.empty(base[num_devices], np.float64)
    later = np.empty(base[num_devices], np.int64)
    num_later = np.zeros(num_devices, np.int64)
    running = np.full(num_devices, -1, np.int64)  # key of the running (operator, batch)
    wake_s = np.full(num_devices, _FAR)  # next time something happens on the device
    blocked_s = np.zeros(num_devices)
    channel_s = np.zeros(num_channels)
    arrives = np.zeros(num_devices)
    stamp = np.full(num_devices, -1, np.int64)
    next_entry = order_ptr[:-1].copy()
    tick = 0
    num_sent = 0
    admitted = 0
    to_do = n * num_batches
    now = 0.0
    while True:
        # -- admit micro-batches (before the first event, and whenever one has finished)
        while admitted < num_batches and num_free > 0:
            batch = admitted
            admitted += 1
            num_free -= 1
            slot = free_slots[num_free]
            slot_of[batch] = slot
            left[slot] = n
            for i in range(n):
                missing[slot * n + i] = num_inputs[i]
                arrival[slot * n + i] = now
                if num_inputs[i] == 0 and not fixed:
                    d = placement[i]
                    _push(ready, base[d], num_ready[d], batch * n + priority[i])
                    num_ready[d] += 1
            for j in range(len(model_inputs)):
                t = model_inputs[j]
                tick += 1
                for u in range(use_ptr[t], use_ptr[t + 1]):
                    i = use_dst[u]
                    dst = placement[i]
                    if stamp[dst] != tick:
                        stamp[dst] = tick
                        arrives[dst] = now
                        if not shares_host[dst]:
                            cost = (
                                transfer_s[t, host, dst]
                                if has_matrix
                                else link_latency_s[host, dst]
                                + tensor_bytes[t] * link_s_per_byte[host, dst]
                            )
                            c = link_channel[host, dst]
                            begin = max(now, channel_s[c])
                            channel_s[c] = begin + cost
                            arrives[dst] = begin + cost
                            if record:
                                transfers[num_sent, 0] = t
                                transfers[num_sent, 1] = batch
                                transfers[num_sent, 2] = host
                                transfers[num_sent, 3] = dst
                                transfer_start[num_sent] = begin
                                transfer_end[num_sent] = begin + cost
                                num_sent += 1
                    at = slot * n + i
                    arrival[at] = max(arrival[at], arrives[dst])
                    missing[at] -= 1
                    if missing[at] == 0 and not fixed:
                        if arrival[at] <= now:
                            _push(ready, base[dst], num_ready[dst], batch * n + priority[i])
                            num_ready[dst] += 1
                        else:
                            _push_timed(
                                later_s,
                                later,
                                base[dst],
                                num_later[dst],
                                arrival[at],
                                batch * n + priority[i],
                            )
                            num_later[dst] += 1
        # -- start work on idle devices
        for d in range(num_devices):
            if running[d] >= 0:
                continue
            if blocked_s[d] > now:
                wake_s[d] = blocked_s[d]
                continue
            wake_s[d] = _FAR
            if fixed:
                if next_entry[d] < order_ptr[d + 1]:
                    i = order[next_entry[d], 0]
                    batch = order[next_entry[d], 1]
                    at = slot_of[batch] * n + i
                    if missing[at] == 0:
                        if arrival[at] <= now:
                            next_entry[d] += 1
                            running[d] = batch * n + priority[i]
                        else:
                            wake_s[d] = arrival[at]
            else:
                while num_later[d] > 0 and later_s[base[d]] <= now:
                    key = _pop_timed(later_s, later, base[d], num_later[d])
                    num_later[d] -= 1
                    _push(ready, base[d], num_ready[d], key)
                    num_ready[d] += 1
                if num_ready[d] > 0:
                    running[d] = _pop(ready, base[d], num_ready[d])
                    num_ready[d] -= 1
                elif num_later[d] > 0:
                    wake_s[d] = later_s[base[d]]
            if running[d] >= 0:
                i = by_priority[running[d] % n]
                wake_s[d] = now + seconds[i]
                if record:
                    start[running[d] // n, i] = now
        if to_do == 0:
            return 0
        # -- the next moment at which anything happens
        now = _FAR
        for d in range(num_devices):
            if wake_s[d] < now:
                now = wake_s[d]
        if now == _FAR:
            return 1
        # -- ends
        for d in range(num_devices):
            if running[d] < 0 or wake_s[d] != now:
                continue
            key = running[d]
            running[d] = -1
            batch = key // n
            slot = slot_of[batch]
            op = by_priority[key % n]
            if record:
                end[batch, op] = now
            for j in range(out_ptr[op], out_ptr[op + 1]):
                t = out_tensor[j]
                tick += 1
                for u in range(use_ptr[t], use_ptr[t + 1]):
                    i = use_dst[u]
                    dst = placement[i]
                    if stamp[dst] != tick:
                        stamp[dst] = tick
                        arrives[dst] = now
                        if dst != d:
                            cost = (
                                transfer_s[t, d, dst]
                                if has_matrix
                                else link_latency_s[d, dst]
                                + tensor_bytes[t] * link_s_per_byte[d, dst]
                            )
                            c = link_channel[d, dst]
                            begin = max(now, channel_s[c])
                            channel_s[c] = begin + cost
                            arrives[dst] = begin + cost
                            if link_blocking[d, dst]:
                                blocked_s[d] = max(blocked_s[d], begin + cost)
                            if record:
                                transfers[num_sent, 0] = t
                                transfers[num_sent, 1] = batch
                                transfers[num_sent, 2] = d
                                transfers[num_sent, 3] = dst
                                transfer_start[num_sent] = begin
                                transfer_end[num_sent] = begin + cost
                                num_sent += 1
                    at = slot * n + i
                    if arrives[dst] > arrival[at]:
                        arrival[at] = arrives[dst]
                    missing[at] -= 1
                    if missing[at] == 0 and not fixed:
                        if arrival[at] <= now:
                            _push(ready, base[dst], num_ready[dst], batch * n + priority[i])
                            num_ready[dst] += 1
                        else:
                            _push_timed(
                                later_s,
                                later,
                                base[dst],
                                num_later[dst],
                                arrival[at],
                                batch * n + priority[i],
                            )
                            num_later[dst] += 1
            to_do -= 1
            left[slot] -= 1
            if left[slot] == 0:
                finish[batch] = now
                free_slots[num_free] = slot
                num_free += 1


@nb.njit(cache=True, nogil=True)
def peak_bytes(
    tensor_src,
    tensor_bytes,
    tensor_root,
    use_ptr,
    use_dst,
    output_tensor,
    workspace_bytes,
    placement,
    fixed_bytes,
    start,
    end,
    transfers,
    transfer_start,
    transfer_end,
):
    """int64 ``[D]`` peak memory of a recorded run; ``fixed_bytes [D]`` are the parameters.

    A tensor stored on a device is an interval: alloc and free events are sorted by time with
    frees first, and summed.
    """
    m, n = start.shape
    num_tensors, num_devices = len(tensor_src), len(fixed_bytes)
    peak = fixed_bytes.copy()
    begin_s = np.empty((num_devices, num_tensors))
    until_s = np.empty((num_devices, num_tensors))
    most = 2 * (num_tensors * num_devices + len(workspace_bytes)) * m
    size = np.empty(most // 2, np.int64)
    first_s = np.empty(most // 2)
    last_s = np.empty(most // 2)
    where = np.empty(most // 2, np.int32)
    count = 0
    # Transfers are recorded in time order; index them by micro-batch once.
    by_batch = np.argsort(transfers[:, 1], kind="mergesort")
    at = 0
    for batch in range(m):
        begin_s[:] = _FAR
        until_s[:] = -1.0
        done = end[batch].max()
        for t in range(num_tensors):
            src = tensor_src[t]
            root = tensor_root[t]
            home = placement[src] if src >= 0 else -1
            if src >= 0:
                begin_s[home, root] = min(begin_s[home, root], start[batch, src])
                until_s[home, root] = max(until_s[home, root], end[batch, src])
            for u in range(use_ptr[t], use_ptr[t + 1]):
                i = use_dst[u]
                d = placement[i]
                stored = root if src < 0 or d == home else t
                begin_s[d, stored] = min(begin_s[d, stored], start[batch, i])
                until_s[d, stored] = max(until_s[d, stored], end[batch, i])
        for j in range(len(output_tensor)):
            t = output_tensor[j]
            if tensor_src[t] >= 0:
                home, root = placement[tensor_src[t]], tensor_root[t]
                until_s[home, root] = max(until_s[home, root], done)
        while at < len(by_batch) and transfers[by_batch[at], 1] == batch:
            x = by_batch[at]
            at += 1
            t, a, b = transfers[x, 0], transfers[x, 2], transfers[x, 3]
            src = tensor_src[t]
            stored = tensor_root[t] if src < 0 or placement[src] == b else t
            begin_s[b, stored] = min(begin_s[b, stored], transfer_start[x])
            until_s[b, stored] = max(until_s[b, stored], transfer_end[x])
            if src >= 0:
                root = tensor_root[t]
                until_s[a, root] = max(until_s[a, root], transfer_end[x])
        for d in range(num_devices):
            for t in range(num_tensors):
                if until_s[d, t] >= 0.0:
                    size[count] = tensor_bytes[t]
                    first_s[count] = begin_s[d, t]
                    last_s[count] = until_s[d, t]
                    where[count] = d
                    count += 1
        for i in range(len(workspace_bytes)):
            size[count] = workspace_bytes[i]
            first_s[count] = start[batch, i]
            last_s[count] = end[batch, i]
            where[count] = placement[i]
            count += 1
    # Frees stand before allocs, and the sort is stable: frees come first at equal times.
    times = np.concatenate((last_s[:count], first_s[:count]))
    held = np.zeros(num_devices, np.int64)
    highest = np.zeros(num_devices, np.int64)
    for e in np.argsort(times, kind="mergesort"):
        if e < count:
            held[where[e]] -= size[e]
        else:
            d = where[e - count]
            held[d] += size[e - count]
            highest[d] = max(highest[d], held[d])
    return peak + highest


@nb.njit(cache=True, nogil=True)
def run_batch(
    problem_tables,
    memory,
    placements,
    compute_s,
    loaded_s,
    num_batches,
    window,
    track_memory,
    finish,
    peak,
):
    """``run`` for placements ``[B, N]``: fills ``finish [B, M]`` (inf: unsupported), ``peak [B, D]``.

    ``peak`` holds activations and workspace only, and only if ``track_memory``.
    """
    num_devices = compute_s.shape[1]
    num_placements, n = placements.shape
    order = np.zeros((0, 2), np.int32)
    order_ptr = np.zeros(num_devices + 1, np.int32)
    rows = num_batches if track_memory else 0
    start = np.empty((rows, n))
    end = np.empty((rows, n))
    room = len(problem_tables[3]) * rows + len(problem_tables[5]) * num_devices * rows
    transfers = np.empty((room, 4), np.int32)
    transfer_start = np.empty(room)
    transfer_end = np.empty(room)
    seconds = np.empty(n)
    load = np.empty(num_devices)
    nothing = np.zeros(num_devices, np.int64)
    for b in range(num_placements):
        placement = placements[b]
        load[:] = 0.0
        for i in range(n):
            seconds[i] = compute_s[i, placement[i]]
            load[placement[i]] += seconds[i]
        total = load.sum()
        if not np.isfinite(total):
            finish[b, :] = np.inf
            continue
        busiest = load.max()
        if num_batches > 1 and num_devices > 1 and busiest > 0.0:
            for i in range(n):
                d = placement[i]
                share = (total - load[d]) / busiest / (num_devices - 1)
                seconds[i] += share * (loaded_s[i, d] - seconds[i])
        transfers[:, 1] = num_batches  # rows that stay unused belong to no micro-batch
        run(
            *problem_tables,
            placement,
            seconds,
            num_batches,
            window,
            order,
            order_ptr,
            finish[b],
            track_memory,
            start,
            end,
            transfers,
            transfer_start,
            transfer_end,
        )
        if track_memory:
            peak[b] = peak_bytes(
                *memory,
                placement,
                nothing,
                start,
                end,
                transfers,
                transfer_start,
                transfer_end,
            )
