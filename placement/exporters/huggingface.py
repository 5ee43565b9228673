"""Hugging Face ``device_map``: module path -> device."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from placement.exporters import Exported, ExportError
from placement.exporters._modules import Forward, require_torch_devices
from placement.plan import Plan, ancestry, whole_modules
from placement.problem import Problem


@dataclass(frozen=True)
class Huggingface:
    """JSON object for ``accelerate.dispatch_model`` and ``from_pretrained(device_map=...)``.

    Format: ``accelerate.utils.check_device_map`` (accelerate 1.15): keys are paths of modules, or
    of parameters that a split module owns itself; every name of ``state_dict`` is covered by
    exactly one of them. Modules run where they are mapped. Operators that a split module runs
    itself (a residual addition) run where their inputs are, so they must be planned beside an
    operator before or behind them. accelerate runs devices one after another: no pipeline.

    ``cpu`` beside a GPU means offloaded to accelerate, which then computes on the GPU; and all
    groups of cores are one device to torch. So a plan is on GPUs, or on one CPU device.
    """

    def __call__(self, plan: Plan, problem: Problem | None = None) -> Exported:
        forward = Forward.of(plan)
        if not plan.graph.parameters:
            raise ExportError(
                f"the plan of {plan.graph.name!r} does not know the model's parameters: make it "
                "again from the model, placement plan package.module:function --out plan.json"
            )
        require_torch_devices(plan, forward.device)
        merged = _one_host(forward)
        device = _possible(forward, merged)
        hosts = "torch has one CPU device, and accelerate computes on GPUs where there are some"
        whole = "a module with parameters has one device"
        forward.require(device, "a device_map", whole if merged == list(forward.device) else hosts)
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        entries = {
            path: "cpu" if kinds[name] == "cpu" else name
            for path, name in _covering(forward, device).items()
        }
        return Exported(
            {"": json.dumps(entries, indent=1) + "\n"},
            "give the object in this file as device_map to from_pretrained or dispatch_model",
        )


def _one_host(forward: Forward) -> list[str]:
    """``[F]`` devices without CPU devices beside others: the device with most operators instead."""
    host = {d.name for d in forward.plan.cluster.devices if d.kind == "cpu"}
    others = [name for name in forward.device if name not in host]
    most = Counter(others or forward.device).most_common(1)[0][0]
    return [most if name in host else name for name in forward.device]


def _possible(forward: Forward, device: list[str]) -> list[str]:
    """``[F]`` devices that a device_map can give, nearest to ``device``."""
    parameters, device = forward.plan.graph.parameters, list(device)
    running, containers = set(forward.module), {x for m in forward.module for x in ancestry(m)[:-1]}
    owners = {max(running & {*ancestry(name)}, key=len, default="") for name in parameters}
    reads = {i for ops in parameters.values() for i in ops}
    found: dict[str, Counter[str]] = {}
    for path, name in zip(forward.module, device, strict=True):
        found.setdefault(path, Counter())[name] += 1
    free = []  # they run where their inputs are
    for i, path in enumerate(forward.module):
        if path in containers:
            if forward.number[i] not in reads:
                free.append(i)
        elif path in owners:
            device[i] = found[path].most_common(1)[0][0]
        elif len(found[path]) > 1:
            free.append(i)
    for i in free:
        beside = [device[j] for j in (i - 1, i + 1) if 0 <= j < len(device)]
        if beside and device[i] not in beside:
            device[i] = beside[0]
    return device


def _covering(forward: Forward, device: list[str]) -> dict[str, str]:
    """``whole_modules``, and an entry for every parameter that is in none of them."""
    entries = whole_modules(forward.module, device)
    running = {x for m in forward.module for x in ancestry(m)}
    at = dict(zip(forward.number, device, strict=True))
    for name, readers in forward.plan.graph.parameters.items():
        inside = ancestry(name)
        if any(x in entries for x in inside):
            continue
        here = [at[i] for i in readers if i in at]
        unused = [x for x in inside if x not in running]  # outermost first; the last is ``name``
        entries[name if here else unused[0]] = here[0] if here else device[-1]
    return entries
