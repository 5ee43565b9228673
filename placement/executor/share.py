"""One device's share of a placed program: what it runs, keeps, sends and hands back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from placement.graph import OpGraph


@dataclass(frozen=True, eq=False)
class Share:
    """Static tables of one device; lists are indexed by operator ``[N]`` or tensor ``[T]``.

    Attributes:
        ops: operators placed here, ascending.
        num_inputs: ``[N]`` distinct tensors each operator of this device waits for; one without
            inputs waits for the admission of its micro-batch.
        inputs, outputs: ``[N]`` tensors each operator reads and makes.
        users: ``[T]`` operators of this device that read each tensor.
        peers: ``[T]`` devices that a tensor made here is sent to.
        num_uses: ``[T]`` how many operators of this device read each tensor.
        sources: operators of this device without inputs.
        model_inputs: model inputs read here.
        results: ``[T]`` whether a tensor made here leaves the model.
        carried: an operator here -> those that wait for it from one micro-batch to the next.
        returning: tensors sent here that depend on something this device has sent.
    """

    device: int
    ops: tuple[int, ...]
    num_inputs: list[int]
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    users: list[tuple[int, ...]]
    peers: list[tuple[int, ...]]
    num_uses: list[int]
    sources: tuple[int, ...]
    model_inputs: tuple[int, ...]
    results: list[bool]
    carried: dict[int, tuple[int, ...]]
    returning: frozenset[int]


def shares(graph: OpGraph, placement: np.ndarray[Any, Any], num_devices: int) -> list[Share]:
    """The share of every device; pure."""
    place = placement.tolist()
    sources = graph.tensor_src.tolist()
    made_at = [place[s] if s >= 0 else -1 for s in sources]
    inputs = _rows(graph.in_tensor, graph.in_ptr)
    outputs = _rows(graph.out_tensor, graph.out_ptr)
    consumers = _rows(graph.use_dst, graph.use_ptr)
    leaves = set(graph.output_tensor.tolist())
    passed = [0] * graph.num_ops  # a bit for each device of an operator and those before it
    for op, read in enumerate(inputs):
        passed[op] = 1 << place[op]
        for t in read:
            if sources[t] >= 0:
                passed[op] |= passed[sources[t]]
    by_device = []
    for d in range(num_devices):
        users = [tuple(op for op in ops if place[op] == d) for ops in consumers]
        by_device.append(
            Share(
                device=d,
                ops=tuple(op for op in range(graph.num_ops) if place[op] == d),
                num_inputs=[max(1, len(x)) for x in inputs],
                inputs=inputs,
                outputs=outputs,
                users=users,
                peers=[
                    tuple(dict.fromkeys(place[op] for op in ops if place[op] != d))
                    if made_at[t] == d
                    else ()
                    for t, ops in enumerate(consumers)
                ],
                num_uses=[len(x) for x in users],
                sources=tuple(
                    op for op in range(graph.num_ops) if place[op] == d and not inputs[op]
                ),
                model_inputs=tuple(t for t, src in enumerate(made_at) if src == -1 and users[t]),
                results=[t in leaves and made_at[t] == d for t in range(graph.num_tensors)],
                carried={op: readers for op, readers in graph.carried.items() if place[op] == d},
                returning=frozenset(
                    t
                    for t, readers in enumerate(users)
                    if readers and made_at[t] not in (-1, d) and passed[sources[t]] >> d & 1
                ),
            )
        )
    return by_device


def runs_of(share: Share, priority: Sequence[int]) -> list[tuple[int, ...]]:
    """The operators of a device in order of ``priority``, cut into runs that need no look around.

    All that other devices send to a run is read by its first operator, and only its last makes
    something that they read. The order is topological over all devices, so runs can wait
    for each other in no circle. What comes back may be late because this device is: all operators
    of a run wait, through others here, for the same of it (and for the same writers of buffers in
    the micro-batch before), so that none is held up that could bring on what others wait for.
    """
    outputs = {t for op in share.ops for t in share.outputs[op]}
    leaving = {t for t in outputs if share.peers[t]}  # results of the model can wait for the rest
    here = outputs | set(share.model_inputs)
    # A bit for everything that comes back, and those of each tensor and operator.
    of_tensor = {t: 1 << i for i, t in enumerate(sorted(share.returning))}
    of_op = dict.fromkeys(share.ops, 0)
    for i, (writer, readers) in enumerate(share.carried.items(), len(of_tensor)):
        for op in readers:  # itself it waits for in any run
            of_op[op] |= (op != writer) << i
    runs: list[list[int]] = []
    closed = True
    for op in sorted(share.ops, key=priority.__getitem__):
        for t in share.inputs[op]:
            of_op[op] |= of_tensor.get(t, 0)
        of_tensor |= dict.fromkeys(share.outputs[op], of_op[op])
        if (
            closed
            or of_op[op] != of_op[runs[-1][0]]
            or any(t not in here and t not in share.inputs[runs[-1][0]] for t in share.inputs[op])
        ):
            runs.append([])
        runs[-1].append(op)
        closed = not leaving.isdisjoint(share.outputs[op])
    return [tuple(run) for run in runs]


def fused(share: Share, runs: Sequence[tuple[int, ...]]) -> Share:
    """The share with each run as one operator, by the number of its first."""
    first = {op: run[0] for run in runs for op in run}
    made_in = {t: first[op] for op in share.ops for t in share.outputs[op]}
    users = [
        tuple(dict.fromkeys(first[op] for op in ops if first[op] != made_in.get(t)))
        for t, ops in enumerate(share.users)
    ]
    inputs, outputs, num_inputs = list(share.inputs), list(share.outputs), list(share.num_inputs)
    for run in runs:
        head, own = run[0], {t for op in run for t in share.outputs[op]}
        read = dict.fromkeys(t for op in run for t in share.inputs[op] if t not in own)
        inputs[head] = tuple(read)
        num_inputs[head] = max(1, len(read))
        outputs[head] = tuple(
            t
            for op in run
            for t in share.outputs[op]
            if users[t] or share.peers[t] or share.results[t]
        )
    carried: dict[int, tuple[int, ...]] = {}
    for op, readers in share.carried.items():
        ours = (*carried.get(first[op], ()), *(first[r] for r in readers))
        carried[first[op]] = tuple(dict.fromkeys(ours))
    return replace(
        share,
        ops=tuple(run[0] for run in runs),
        num_inputs=num_inputs,
        inputs=inputs,
        outputs=outputs,
        users=users,
        num_uses=[len(x) for x in users],
        sources=tuple(run[0] for run in runs if not inputs[run[0]]),
        carried=carried,
    )


def _rows(values: np.ndarray[Any, Any], ptr: np.ndarray[Any, Any]) -> list[tuple[int, ...]]:
    flat, at = values.tolist(), ptr.tolist()
    return [tuple(flat[at[i] : at[i + 1]]) for i in range(len(at) - 1)]
