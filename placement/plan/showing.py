"""A plan as tables, for the terminal and for notebooks."""

from __future__ import annotations

from placement.objective import Objective
from placement.plan.content import Content
from placement.tools.shown import byte_size, count, seconds


def tables(plan: Content) -> list[tuple[str, list[str], list[list[str]]]]:
    """``(title, header, rows)`` of the values, of what each device does, and of the stages."""
    values = [_values(plan, "latency"), _values(plan, "period")]
    runs = f"{plan.num_microbatches} micro-batch{'es' * (plan.num_microbatches > 1)}"
    runs += f", {plan.max_in_flight} in flight"
    if plan.goal != plan.objective:  # a language model's, without a pipeline
        facts = plan.provenance.profile
        runs = f"a context of {facts.get('context')} x {facts.get('batch')}"
        values = [_values(plan, "latency", plan.goal)]
    energy_j = plan.predicted.energy_j
    weight = f" and {plan.second_j:g} J/s" if plan.objective == "energy" and plan.second_j else ""
    if energy_j is not None and (plan.objective != "energy" or weight):
        values.append(["energy", seconds(energy_j, "J"), *["-"] * 4])
    if not Objective(plan.objective).is_measurable:
        values.insert(0, _values(plan, plan.objective, "weighted" if weight else ""))
    ran = any(row[2] != "-" for row in values)
    has_groups = any(d.members for d in plan.cluster.devices)
    on = [list(phase.values()) for phase in plan.assignments]
    devices = []
    for device in (d.name for d in plan.cluster.devices):
        counts = [f"{phase.count(device)}" for phase in on]
        if len(on) > 4:  # which show how they repeat
            counts[4:] = ["..."]
        operators = " / ".join(counts)
        stages = str(sum(s.device == device for s in plan.stages))
        memory = (x.get(device, 0) for x in (plan.predicted.peak_bytes, plan.limits.memory_bytes))
        busy = seconds(plan.predicted.busy_s.get(device, 0.0))
        devices.append([device, operators, stages, busy, *map(byte_size, memory)])
    return [
        (
            f"{plan.graph.name} ({count(plan.graph.num_ops, 'operator')}) by {plan.planner.name}, "
            f"for {plan.goal}{weight}, {runs}",
            ["", "predicted", *["measured"] * ran, "proved bound", "gap", "one device"],
            values if ran else [[*row[:2], *row[3:]] for row in values],
        ),
        (
            "devices"
            + f"; micro-batches take turns in {len(on)} phases" * (len(on) > 1)
            + "; those with .. are groups that compute each layer together" * has_groups
            + "; GPUs replay CUDA graphs" * plan.cuda_graphs
            + "; runs are compiled" * plan.compiled,
            ["device", "operators", "stages", "busy", "peak memory", "memory"],
            devices,
        ),
        (
            "stages",
            ["device", "first operator", "last operator", "operators"],
            [[s.device, s.first, s.last, f"{s.num_ops}"] for s in plan.stages],
        ),
    ]


def _values(plan: Content, what: str, name: str = "") -> list[str]:
    """A row: predicted, measured, proved, by how much above that, and of one device."""
    unit = Objective(what).unit
    key = f"{what}_s" if what in ("latency", "period") else "value_s"
    value, alone = getattr(plan.predicted, key), getattr(plan.fallback, key, None)
    bound = plan.lower_bound_s.get(what)
    measured, proved, single = (
        "-" if x is None else seconds(x, unit) for x in (plan.measured_s(what), bound, alone)
    )
    gap = f"{value / bound - 1:.1%}" if bound else "-"
    return [name or what, seconds(value, unit), measured, proved, gap, single]
