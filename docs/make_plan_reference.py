"""Write the tables of ``docs/plan.md`` from ``docs/plan.schema.json``.

    python docs/make_plan_reference.py

Keys, types and which of them are required come from the schema; what they mean is written here.
A key without a meaning, or a meaning without a key, is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"

# The order of the tables, and what each object is.
OBJECTS = {
    "Plan": "The file",
    "PlannerInfo": "`planner`: who decided",
    "GraphInfo": "`graph`: which model",
    "ClusterInfo": "`cluster`: which devices",
    "DeviceInfo": "`cluster.devices[]`",
    "LinkInfo": "`cluster.links[]`",
    "Stage": "`stages[]`",
    "Predicted": "`predicted`: what the simulator says",
    "Measured": "`measured`: what a run gave",
    "Spread": "`measured.latency_s`, `measured.period_s`",
    "Limits": "`limits`: memory",
    "Fallback": "`fallback`: the best single device",
    "Provenance": "`provenance`: where the plan comes from",
}
MEANINGS = {
    "Plan.schema_version": "Version of this format. A file with another version is refused.",
    "Plan.planner": "Who decided.",
    "Plan.graph": "The model that the plan is for.",
    "Plan.cluster": "The devices that the plan is for.",
    "Plan.objective": "What the planner minimised.",
    "Plan.num_microbatches": "Micro-batches of the pipelined run that `predicted` is about.",
    "Plan.max_in_flight": "At most so many micro-batches are begun and not yet finished.",
    "Plan.second_j": "The objective `energy` minimised joules + `second_j` × seconds.",
    "Plan.assignment": "The decision: operator name → device name, by operator number.",
    "Plan.phases": "Only where micro-batches take turns between K placements: micro-batch m runs "
    "as phase m mod K. `assignment` is phase 0. The list has one map for each of the phases 1 to "
    "K - 1: operator name → device name, for operators that are elsewhere than in `assignment`. A "
    "file with phases has version 2.",
    "Plan.priority": "Rank of each operator, by operator number. Of several ready operators of "
    "one micro-batch, a device takes the one with the smallest rank. Each of 0..N-1 once.",
    "Plan.order": "For every device, the (operator, micro-batch) in the order they run. Without "
    "it, `priority` decides.",
    "Plan.stages": "The assignment again, as maximal runs of operators on one device.",
    "Plan.device_map": "Module path → device name, for the outermost modules that live whole on "
    'one device. The module path `""` is the whole model. Modules that are split are not in it.',
    "Plan.predicted": "What the simulator says.",
    "Plan.measured": "What a run on real devices gave. `placement run --out` fills it, and so does "
    "`placement plan --measurements`.",
    "Plan.lower_bound_s": "Objective → seconds: in the simulator no placement is faster, which is "
    "proved. Without `phases` the bound speaks of plans without `phases` only.",
    "Plan.limits": "Memory of the devices.",
    "Plan.fallback": "The best single device that can run everything, if one can.",
    "Plan.provenance": "Where the plan comes from.",
    "PlannerInfo.name": "The planner's name, e.g. `heft`; `measured_search` after "
    "`placement plan --measurements`, `replan` after `placement replan`.",
    "PlannerInfo.parameters": "Its fields and their values.",
    "GraphInfo.name": "For people.",
    "GraphInfo.fingerprint": "Hash of names, shapes, dtypes, structure and colocation. Weights "
    "are not part of it.",
    "GraphInfo.num_ops": "Number of operators, N.",
    "GraphInfo.parts": "A short hash of each part of the fingerprint, so that a message can name "
    "what differs: `names`, `operators`, `structure`, `tensors`, `parameters`, `colocation`, "
    "`backward`.",
    "GraphInfo.workload": "How the model is found: a shipped name, or `package.module:function`. "
    "A function of yours is not called because a file names it; give it with `--model`.",
    "GraphInfo.input_spec": "Shapes, dtypes and constants of the inputs. In training with a loss "
    "function, the keyword argument `target` is the target of the loss.",
    "GraphInfo.mode": "`inference`, or `training`: forward, backward and gradients of a "
    "micro-batch.",
    "GraphInfo.optimizer": "In training: the class of `torch.optim` whose state counts as memory.",
    "GraphInfo.modules": 'Path of each operator\'s module, by operator number; `""` is the model '
    "itself. Empty: not known.",
    "GraphInfo.sources": "Numbers of the operators whose tensors each operator reads, by operator "
    "number; -1 is an input of the model. Some exporters refuse a plan without it.",
    "GraphInfo.outputs": "Numbers of the operators whose tensors the model returns; -1 is an "
    "input.",
    "GraphInfo.parameters": "Name of a parameter or buffer → numbers of the operators that "
    "read it.",
    "GraphInfo.backward": "Numbers of the backward operators.",
    "ClusterInfo.name": "For people.",
    "ClusterInfo.fingerprint": "Hash of the devices and the declared links.",
    "ClusterInfo.devices": "In the order of device numbers.",
    "ClusterInfo.links": "Links that the plan was made with. A missing pair costs nothing.",
    "DeviceInfo.name": "Unique.",
    "DeviceInfo.kind": "`cpu`, `cuda`, or another word for a device that is only simulated.",
    "DeviceInfo.cores": "Core numbers that the worker is pinned to. Empty: not pinned.",
    "DeviceInfo.threads": "Threads within one operator.",
    "DeviceInfo.memory_bytes": "Capacity.",
    "DeviceInfo.busy_w": "Watts while working, if known.",
    "DeviceInfo.idle_w": "Watts while waiting, if known.",
    "DeviceInfo.power_source": "Whether a meter measured the watts, or somebody declared them.",
    "DeviceInfo.flops_per_s": "Peak rate for predictions, where it is stated.",
    "DeviceInfo.bytes_per_s": "Peak rate of its memory for predictions, where it is stated.",
    "DeviceInfo.call_s": "Seconds to start an operator, for predictions, where it is stated.",
    "DeviceInfo.streams": "It runs what is placed here, with parameters from host memory.",
    "DeviceInfo.like": "The measured device that this one is described by.",
    "DeviceInfo.speed": "It is this many times as fast as `like`.",
    "DeviceInfo.model": "Model of the hardware, for people.",
    "LinkInfo.src": "Name of the sending device, or a pattern: `*` stands for any text.",
    "LinkInfo.dst": "Name of the receiving device.",
    "LinkInfo.latency_s": "Seconds of a transfer without bytes.",
    "LinkInfo.bandwidth_bytes_per_s": "Null: unlimited.",
    "LinkInfo.blocking": "The sender's worker is busy during the transfer.",
    "LinkInfo.channel": "Links with the same channel share it. Null: a channel of its own.",
    "LinkInfo.wake_s": "Seconds that the sender's worker spends on waking an idle receiver.",
    "LinkInfo.send_s": "Seconds that the sender's worker spends on handing over a tensor.",
    "LinkInfo.send_s_per_byte": "Further seconds of that for each byte of the tensor.",
    "LinkInfo.declared": "True: from the cluster's description. False: measured.",
    "Stage.device": "Name of the device.",
    "Stage.first": "Name of the first operator.",
    "Stage.last": "Name of the last operator, included.",
    "Stage.num_ops": "Number of operators.",
    "Predicted.value_s": "Value of the objective: seconds, for `energy` joules.",
    "Predicted.latency_s": "One micro-batch alone.",
    "Predicted.period_s": "Per micro-batch in the steady state of a pipelined run.",
    "Predicted.energy_j": "Joules per micro-batch in a pipelined run. Null: the power of a "
    "device is unknown.",
    "Predicted.busy_s": "Device → seconds in operators per micro-batch.",
    "Predicted.peak_bytes": "Device → the most memory in use at any time. For the objectives "
    "`max_load` and `piecewise_latency`: parameters only.",
    "Measured.latency_s": "One micro-batch alone. Null: not measured.",
    "Measured.period_s": "Per micro-batch in a pipelined run. Null: not measured.",
    "Measured.n": "Number of repeats.",
    "Measured.when": "Date and time, ISO 8601.",
    "Measured.machine": "Host name.",
    "Spread.median_s": "Median of the repeats. After `placement plan --measurements`: an estimate "
    "from all runs, corrected for drift of the machine.",
    "Spread.iqr_s": "Interquartile range of the repeats.",
    "Limits.memory_bytes": "Device → capacity.",
    "Limits.headroom_bytes": "Device → capacity less the predicted peak.",
    "Fallback.device": "Name of the device.",
    "Fallback.value_s": "Predicted value of the objective.",
    "Fallback.latency_s": "Predicted.",
    "Fallback.period_s": "Predicted.",
    "Provenance.version": "Version of the package that wrote the plan.",
    "Provenance.git_commit": "Its commit, if it ran from a checkout.",
    "Provenance.created": "Date and time, ISO 8601.",
    "Provenance.profile": "When, where and with which versions the costs were measured.",
}


def tables(schema: dict[str, Any]) -> str:
    """One Markdown table per object of the schema.

    Raises:
        KeyError: an object or a key that nothing is written about.
    """
    objects = {"Plan": schema} | {k: v for k, v in schema["$defs"].items() if "properties" in v}
    for name in objects:
        if name not in OBJECTS:
            raise KeyError(f"{name}: add it to OBJECTS")
    parts = []
    for name, title in OBJECTS.items():
        if name not in objects:
            continue
        required = objects[name].get("required", [])
        rows = [f"### {title}\n", "| key | type | required | meaning |", "|---|---|---|---|"]
        for key, value in objects[name]["properties"].items():
            if f"{name}.{key}" not in MEANINGS:
                raise KeyError(f"{name}.{key}: add it to MEANINGS")
            needed = "yes" if key in required else "no"
            rows.append(f"| `{key}` | {_type(value)} | {needed} | {MEANINGS[f'{name}.{key}']} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def unused(schema: dict[str, Any]) -> list[str]:
    """Meanings of keys that the schema does not have."""
    objects = {"Plan": schema} | schema["$defs"]
    keys = {f"{name}.{key}" for name, o in objects.items() for key in o.get("properties", ())}
    return sorted(set(MEANINGS) - keys)


def _type(value: dict[str, Any]) -> str:
    """A type of the schema in words."""
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[1]
        return "any JSON" if name == "JsonValue" else f"[{name}](#{_anchor(OBJECTS[name])})"
    if "const" in value:
        return f"{value['const']}"
    if "enum" in value:
        return " or ".join(f"`{x}`" for x in value["enum"])
    if "anyOf" in value:
        return " or ".join(_type(x) for x in value["anyOf"])
    kind = value["type"]
    if kind == "array" and "prefixItems" in value:
        return "(" + ", ".join(_type(x) for x in value["prefixItems"]) + ")"
    if kind == "array":
        return f"list of {_type(value['items'])}"
    if kind == "object":
        inner = [*value.get("patternProperties", {}).values(), value.get("additionalProperties")]
        return f"map to {_type(inner[0])}"
    if kind == "string":
        return "hex digits" if "0-9a-f" in value.get("pattern", "") else "text"
    if kind in ("integer", "number") and "minimum" in value:
        return f"{kind} ≥ {value['minimum']}"
    return str(kind)


def _anchor(title: str) -> str:
    """The heading as a link target, as GitHub makes it."""
    letters = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return letters.replace(" ", "-")


def updated(page: str) -> str:
    """The page with new tables between its two marks."""
    schema = json.loads((DOCS / "plan.schema.json").read_text(encoding="utf-8"))
    if unused(schema):
        raise KeyError(f"{unused(schema)}: not in the schema, remove them from MEANINGS")
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{tables(schema)}\n{END}{after}"


if __name__ == "__main__":
    PAGE = DOCS / "plan.md"
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
