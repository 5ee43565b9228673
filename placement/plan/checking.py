"""What contradicts itself in a plan: one line for each contradiction, with key and value.

Each function below is about one part of the file. A file that was edited by hand, or written by
another program, may say anything that the schema lets pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from math import isclose

from placement.cluster import Cluster
from placement.graph import OpGraph
from placement.plan.content import Content
from placement.plan.parts import PiecesInfo, stages_of, whole_modules
from placement.problem import ROUNDING
from placement.schedule import ScheduleError
from placement.tools.files import some


def inconsistencies(plan: Content) -> list[str]:
    """All of them; of the rest nothing is said where the devices themselves are in doubt."""
    try:
        cluster = plan.cluster.build()
    except ValueError as error:
        return [f"cluster: {error}"]
    lines = []
    if cluster.fingerprint != plan.cluster.fingerprint:
        lines.append(
            f"cluster.fingerprint = {plan.cluster.fingerprint[:12]}..., but the devices listed "
            f"give {cluster.fingerprint[:12]}..."
        )
    lines += [*_of_names(plan), *_of_operators(plan), *_of_what_follows(plan)]
    incomplete = next(_of_tables(plan), None)
    if incomplete is not None:
        return [*lines, incomplete]  # what is below reads these tables device by device
    lines += [*_of_memory(plan), *_of_values(plan)]
    return lines or [*_of_order(plan, cluster)]


def _of_names(plan: Content) -> Iterator[str]:
    """Devices that are not listed, operators that the assignment does not have."""
    devices = [d.name for d in plan.cluster.devices]
    phases = {f"phases[{i}]": phase for i, phase in enumerate(plan.phases)}
    for key, phase in {"assignment": plan.assignment, **phases}.items():
        for op, device in phase.items():
            if device not in devices:
                yield f"{key}[{op!r}] = {device!r}: no such device, there are {devices}"
        unknown = [op for op in phase if op not in plan.assignment]
        if unknown:
            yield f"{key}: no operator {some(unknown)} in assignment"
    expected = 3 if plan.pieces else 2 if plan.phases else 1
    if plan.schema_version != expected:
        yield (
            f"schema_version = {plan.schema_version}, but with {len(plan.phases)} phases and "
            f"{'' if plan.pieces else 'no '}pieces it is {expected}"
        )
    if plan.pieces is not None:
        yield from _of_pieces(plan.pieces, plan.assignment)
    for key, named in (
        ("device_map", plan.device_map.values()),
        ("order", plan.order or ()),
        ("fallback.device", [plan.fallback.device] if plan.fallback else ()),
    ):
        for device in set(named) - {*devices}:
            yield f"{key}: no device {device!r}, there are {devices}"


def _of_pieces(pieces: PiecesInfo, assignment: Mapping[str, str]) -> Iterator[str]:
    """Shares that are no whole, pieces that overlap or leave something out, or are nowhere."""
    if not isclose(sum(pieces.shares), 1.0, rel_tol=ROUNDING):
        yield f"pieces.shares add up to {sum(pieces.shares):g} instead of 1"
    for op, cut in pieces.operators.items():
        if missing := [i for i in range(len(pieces.shares)) if f"{op}#{i}" not in assignment]:
            yield f"pieces.operators[{op!r}]: the assignment has no operator '{op}#{missing[0]}'"
        if not any(isinstance(c, int) for c in (*cut.inputs, *cut.outputs)):
            continue  # of summands each piece has the whole
        rises = all(a < b for a, b in pairwise(cut.bounds))
        if len(cut.bounds) != len(pieces.shares) + 1 or cut.bounds[0] != 0 or not rises:
            yield (
                f"pieces.operators[{op!r}].bounds = {list(cut.bounds)} do not cover the operator: "
                f"{len(pieces.shares)} pieces have {len(pieces.shares) + 1} bounds, which begin "
                "at 0 and rise"
            )


def _of_operators(plan: Content) -> Iterator[str]:
    """Numbers of operators: how many there are, and which."""
    graph, n = plan.graph, plan.graph.num_ops
    if len(plan.assignment) != n:
        yield f"assignment has {len(plan.assignment)} operators, graph.num_ops = {n}"
    elif sorted(plan.priority) != list(range(n)):
        yield f"priority must hold each of 0..{n - 1} once"
    if graph.modules and len(graph.modules) != n:
        yield f"graph.modules has {len(graph.modules)} paths, num_ops = {n}"
    if graph.sources and len(graph.sources) != n:
        yield f"graph.sources is about {len(graph.sources)} operators, num_ops = {n}"
    for i, read in enumerate(graph.sources):
        if max(read, default=-1) >= i:
            yield f"graph.sources: operator {i} reads from operator {max(read)}"
    numbered = {"backward": graph.backward, "outputs": graph.outputs}
    for key, numbers in (graph.parameters | numbered).items():
        if max(numbers, default=0) >= n:
            yield f"graph: {key!r} is about operator {max(numbers)}, num_ops = {n}"


def _of_what_follows(plan: Content) -> Iterator[str]:
    """Stages and whole modules say again what the assignment says."""
    on, modules = list(plan.assignment.values()), plan.graph.modules
    if plan.stages != stages_of(list(plan.assignment), on):
        yield "stages do not follow from assignment"
    if len(modules) == len(on) and plan.device_map != whole_modules(modules, on):
        yield "device_map does not follow from assignment and graph.modules"


def _of_tables(plan: Content) -> Iterator[str]:
    """Tables that have an entry for every device."""
    devices = [d.name for d in plan.cluster.devices]
    for key, table in (
        ("predicted.busy_s", plan.predicted.busy_s),
        ("predicted.peak_bytes", plan.predicted.peak_bytes),
        ("limits.memory_bytes", plan.limits.memory_bytes),
        ("limits.headroom_bytes", plan.limits.headroom_bytes),
    ):
        if set(table) != set(devices):
            yield f"{key} is about {sorted(table)}, devices are {devices}"


def _of_memory(plan: Content) -> Iterator[str]:
    """Of every device: limit, peak and what is free of it."""
    for d in plan.cluster.devices:
        peak, limit = plan.predicted.peak_bytes[d.name], plan.limits.memory_bytes[d.name]
        free = plan.limits.headroom_bytes[d.name]
        if limit != d.memory_bytes:
            yield f"limits.memory_bytes[{d.name!r}] = {limit}, it has {d.memory_bytes}"
        if peak > limit:
            yield f"device {d.name!r} needs {peak} bytes, its limit is {limit}"
        elif free != limit - peak:
            yield (
                f"limits.headroom_bytes[{d.name!r}] = {free}, but {limit} less the peak {peak} "
                f"is {limit - peak}"
            )


def _of_values(plan: Content) -> Iterator[str]:
    """Values that say the objective twice must agree, and none is below a proved bound."""
    twins = {"latency": "latency_s", "period": "period_s"}
    if not plan.second_j:
        twins["energy"] = "energy_j"
    twin = twins.get(plan.objective, "value_s")
    for key, part in (("predicted", plan.predicted), ("fallback", plan.fallback)):
        if part is None:
            continue
        again = getattr(part, twin, None)  # a fallback has no energy_j
        if again is not None and not isclose(part.value_s, again, rel_tol=ROUNDING):
            yield f"{key}.value_s = {part.value_s}, but {key}.{twin} = {again}"
        values = {"latency": part.latency_s, "period": part.period_s}
        for what, value in (values | {plan.objective: part.value_s}).items():
            bound = plan.lower_bound_s.get(what, 0.0)
            if value < bound * (1 - ROUNDING):
                yield f"{key}: {what} {value} is below lower_bound_s.{what} = {bound}"


def _of_order(plan: Content, cluster: Cluster) -> Iterator[str]:
    """An order runs every operator of every micro-batch once, where its phase has it, and ends."""
    names, entries = list(plan.assignment), chain.from_iterable((plan.order or {}).values())
    unknown = {op for op, _ in entries}.difference(names)
    if unknown:
        yield f"order: no operator {some(sorted(unknown))} in assignment"
        return
    uses = {(src, i) for i, read in enumerate(plan.graph.sources) for src in read if src >= 0}
    graph = OpGraph.build(plan.graph.name, names, range(len(names)), [0] * len(names), [*uses])
    yield from order_failures(plan, graph, cluster)


def order_failures(plan: Content, graph: OpGraph, cluster: Cluster) -> list[str]:
    """What is wrong with the order of a plan of ``graph``, if it has one."""
    placed = [[cluster.index(on[op]) for op in graph.op_name] for on in plan.assignments]
    try:
        if (schedule := plan.schedule(graph)) is not None:
            schedule.check(graph, cluster, placed)
    except ScheduleError as error:
        return [f"order: {error}"]
    return []
