"""``placement audit``: what a runtime did with a plan, as its log tells."""

from __future__ import annotations

import argparse
import codecs
import re
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from placement import cli

if TYPE_CHECKING:
    from placement.plan import Plan

EXAMPLE = """examples:
  llama-server -m model.gguf $(cat plan.args) -ot "$(cat plan.ot)" --verbose 2> llama.log
  placement audit plan.json --log llama.log
  placement audit plan.json --log onnxruntime.log       (session.log_severity_level = 0)
  OPENVINO_HETERO_VISUALIZE=1 ./program
  placement audit plan.json --log hetero_affinity_MODEL.dot --devices cuda:0=GPU.0

Exit code 1: an operator is elsewhere than planned, or the log does not say where any is, or says it
in words that are not known.
"""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Before May 2025 nothing followed the device.
_LAYER = re.compile(
    r"load_tensors: layer +(\d{1,6}) assigned to device (\S+?)(?:,.*)?[ \t]*$", re.M
)
# As ik_llama.cpp spells it, too.
_OVERRIDE = re.compile(
    r"[Tt]ensor (\S+) (?:\(.*\) )?buffer type overridd?en to (\S+)[ \t]*$", re.MULTILINE
)
_BUFFER = re.compile(r": +(\S+) +(model|KV|RS|compute|output) buffer size = +([0-9.]+) MiB")
# What a line about the place of a tensor or layer has, and what others have.
_ABOUT = re.compile(
    r"\blayer +(\d{1,6})\b|\bblk\.(\d{1,6})\.|\b(token_embd|output(?:_norm)?)\.weight"
)
_PLACES = re.compile(r"\b(?:assigned|placed|overrid\w+|buffer type)\b", re.I)
_OTHER = re.compile(r"cannot be used with preferred buffer type|Flash Attention tensor")
_PLACED = re.compile(r"(Node\(s\)|All nodes) placed on \[(\w+)\](?:\. Number of nodes: (\d{1,9}))?")
_AFFINITY = re.compile(r'label="([^"\\]+)\\n[^"]*\\ndevice=([^"\\]+)"')
_NODE = re.compile(r"^(?:.*?\W)?(\w+) \(([^()]+)\)\s*$")


def configure(parser: argparse.ArgumentParser) -> None:
    add = cli.adding(parser)
    add("plan plan.json")
    add("--log FILE", "what the runtime printed", required=True)
    add("--rpc NODE=HOST:PORT", "servers of llama.cpp, as for its exporter; may be repeated", list)
    add(
        "--devices DEVICE=NAME",
        "what OpenVINO calls devices, as for its exporter; may be repeated",
        list,
    )


def run(args: argparse.Namespace) -> int:
    from placement.plan import load_plan

    plan = load_plan(args.plan)
    try:
        with open(args.log, "rb") as file:
            lines = text_of(file.read(cli.LIMITS.log_bytes)).splitlines()
        text = "\n".join(line[: cli.LIMITS.log_line] for line in lines)
    except OSError as error:
        raise cli.UsageError(f"{args.log}: cannot be read: {error.strerror}") from error
    seen = _read(text, plan, args)
    planned = {op: seen.names[device] for op, device in plan.assignment.items()}
    known = {op: where for op, where in seen.where.items() if op in planned}
    elsewhere = {op: [planned[op], where] for op, where in known.items() if where != planned[op]}
    answer = {
        "operators": len(planned),
        "told": len(known),
        "elsewhere": elsewhere,
        "memory": seen.memory,
        "unknown": seen.unknown[: cli.LIMITS.rows],
    }
    if args.json:
        cli.print_json(answer)
    else:
        rows = [[op, *pair] for op, pair in list(elsewhere.items())[: cli.LIMITS.rows]]
        if rows:
            title = f"{len(elsewhere)} operators are elsewhere"
            cli.print_table(title, ["operator", "planned", "log"], rows, figures=False)
        for name, sizes in seen.memory.items():
            print(f"{name}: " + ", ".join(f"{k} {v:,.1f} MiB" for k, v in sizes.items()))
    if seen.unknown:
        cli.say(
            f"{len(seen.unknown)} lines of {args.log} say where something is in words that are not "
            f"known, and what they are about is not counted; the first: {seen.unknown[0][:160]!r}"
        )
    if not known:
        cli.say(
            f"{args.log} does not say where any operator of the plan is: llama.cpp says it with "
            "--verbose, ONNX Runtime with log_severity_level = 0, OpenVINO's HETERO in "
            "hetero_affinity_MODEL.dot with OPENVINO_HETERO_VISUALIZE=1"
        )
        return cli.NO
    agree, untold = len(known) - len(elsewhere), len(planned) - len(known)
    cli.say(
        f"{agree} of {len(known)} operators are where they were planned"
        + (f"; the log does not say where {untold} others are" if untold else "")
        + seen.note
    )
    return cli.NO if elsewhere or seen.unknown else cli.OK


_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def text_of(content: bytes) -> str:
    """The text of a log in UTF-8, or in UTF-16, which PowerShell writes."""
    for mark, form in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        zeros = content[mark[0] == 0xFF : 2**12 : 2]  # the high bytes of its beginning
        if content.startswith(mark) or zeros.count(0) > len(zeros) // 2:
            return _COLOUR.sub("", content.decode(form, "replace").removeprefix("\ufeff"))
    return _COLOUR.sub("", content.decode("utf-8-sig", "replace"))


@dataclass
class Seen:
    """What a log says.

    Attributes:
        names: device of the plan -> what the runtime calls it.
        where: operator -> the runtime's device.
        memory: the runtime's device -> what -> MiB.
        unknown: lines that say where something is, in words that are not known.
        note: what else the last line of the answer says.
    """

    names: dict[str, str]
    where: dict[str, str]
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    note: str = ""


def _read(text: str, plan: Plan, args: argparse.Namespace) -> Seen:
    """What the log of any of the runtimes says."""
    from placement.exporters.llama_cpp import Backends
    from placement.exporters.openvino import Openvino

    used = set(plan.assignment.values())
    if _PLACED.search(text):
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        providers = {name: _PROVIDERS.get(kinds[name], name) for name in used}
        nodes, unknown = onnxruntime_nodes(text, plan)
        return Seen(providers, nodes, unknown=unknown)
    if _AFFINITY.search(text):
        labels = Openvino(devices=tuple(args.devices or ())).labels(plan)
        lines = [x for x in text.splitlines() if "device=" in x and not _AFFINITY.search(x)]
        return Seen(labels, openvino_nodes(text, plan), unknown=lines)
    backends = Backends(plan, args.rpc or ())
    text = last_load(text)
    seen = llama_cpp_seen(text, plan, {name: backends.buffer(name) for name in used})
    if plan.predicted.peak_bytes is not None:
        for name in used & set(plan.predicted.peak_bytes):
            sizes = seen.memory.get(backends.buffer(name))
            if sizes is not None:
                peak = plan.predicted.peak_bytes[name]
                sizes["planned"] = round(sizes.get("planned", 0.0) + peak / 2**20, 2)
    return seen


def openvino_nodes(text: str, plan: Plan) -> dict[str, str]:
    """Operator -> device, from the graph that HETERO writes of a model before it is compiled.

    One node of ONNX becomes several of OpenVINO, whose names begin with its own.
    """
    devices_of: dict[str, set[str]] = {}
    for name, device in _AFFINITY.findall(text):
        op = name if name in plan.assignment else name.rpartition("/")[0]
        devices_of.setdefault(op, set()).add(device)
    return {op: "+".join(sorted(devices)) for op, devices in devices_of.items()}


def onnxruntime_nodes(text: str, plan: Plan) -> tuple[dict[str, str], list[str]]:
    """Node -> execution provider, from the lines below ``Node(s) placed on [...]``.

    Also those lines among them that are no node's; other threads write in between.
    """
    provider_of: dict[str, str] = {}
    unknown: list[str] = []
    provider, left = "", 0
    for line in text.splitlines():
        begun = _PLACED.search(line)
        node = _NODE.match(line)
        if begun and begun[1] == "All nodes":  # it does not list them then
            provider_of |= dict.fromkeys(plan.assignment, begun[2])
        elif begun:
            provider, left = begun[2], int(begun[3] or plan.graph.num_ops)
        elif left and node:
            provider_of[node[2]] = provider
            left -= 1
        elif "placed on [" in line or (left and "VerifyEachNodeIsAssignedToAnEp" in line):
            unknown.append(line)
    return provider_of, unknown


def last_load(text: str) -> str:
    """A log of llama.cpp from where it loads the model for good.

    Before that it loads without memory, once or more, to see whether the model fits (``-fit``);
    behind it there may be a smaller model that drafts.
    """
    begun = [(m.start(), int(m[1])) for m in _LAYER.finditer(text)]
    starts = [at for at, layer in begun if layer == 0]
    if not starts:
        return text
    most = max(layer for _, layer in begun)
    last = max((at for at, layer in begun if layer == most and at >= starts[0]), default=starts[0])
    k = bisect(starts, last)
    return text[starts[k - 1] : starts[k] if k < len(starts) else len(text)]


def llama_cpp_seen(text: str, plan: Plan, names: dict[str, str]) -> Seen:
    """Operator -> buffer type: its tensors', or where all of its layer is.

    Tensors of an operator that are in several buffers have the names of all, joined by ``+``. The
    embedding is on the CPU unless it is moved, and so is a tied head then, which has no tensor of
    its own: else it is where the output is. What a line that is not known is about is nowhere.
    """
    from placement.exporters.llama_cpp import layers_of

    unit_of, num_layers, tied = layers_of(plan)
    layers = {int(i): _plain(where) for i, where in _LAYER.findall(text)}
    moved = {name: _plain(where) for name, where in _OVERRIDE.findall(text)}
    seen = Seen(names, {}, llama_cpp_buffers(text))
    doubt: set[int] = set()
    for line in text.splitlines():
        about = _ABOUT.search(line)
        if about is None or not _PLACES.search(line) or _OTHER.search(line):
            continue
        if not (_LAYER.search(line) or _OVERRIDE.search(line)):
            seen.unknown.append(line)
            of_embedding = {0, num_layers + 1} if tied else {0}
            number = about[1] or about[2]
            is_embedding = about[3] == "token_embd"
            doubt |= {int(number or num_layers) + 1} if not is_embedding else of_embedding
    head = next(reversed(unit_of))
    for op, u in unit_of.items():
        where = None
        if u == 0:
            where = moved.get("token_embd.weight", "CPU" if layers else None)
        elif u <= num_layers:
            where = _in_layer(op.rpartition(".")[2], u - 1, moved) or layers.get(u - 1)
        else:
            own = "token_embd" if tied else "output"
            name = f"{own if op == head else 'output_norm'}.weight"
            where = moved.get(name, layers.get(num_layers))
        if where is not None and u not in doubt:
            seen.where[op] = where
    if tied:
        on = seen.where.get(head, "an unknown device")
        seen.note = f"; the head, of the tied tensor token_embd.weight, is on {on}"
    return seen


def _in_layer(part: str, layer: int, moved: Mapping[str, str]) -> str:
    """Where the overridden tensors of a part of a layer are; empty: none is."""
    prefix = f"blk.{layer}."
    inside = {name: where for name, where in moved.items() if name.startswith(prefix)}
    routed = {n: w for n, w in inside.items() if "_exps" in n}
    dense = {n: w for n, w in inside.items() if ".ffn_" in n and n not in routed}
    rest = {n: w for n, w in inside.items() if ".ffn_" not in n}
    own = {"experts": routed, "feed_forward": dense, "router": dense, "attention": rest}
    return "+".join(sorted(set(own.get(part, inside).values())))


def _plain(buffer: str) -> str:
    """Memory of the host has several names."""
    return "CPU" if buffer.startswith("CPU") or buffer.endswith("_Host") else buffer


def llama_cpp_buffers(text: str) -> dict[str, dict[str, float]]:
    """Device -> MiB of model, KV and compute buffers, as the log sums them up."""
    buffers: dict[str, dict[str, float]] = {}
    for name, what, size in _BUFFER.findall(text):
        sizes = buffers.setdefault(_plain(name), {})
        sizes[what] = sizes.get(what, 0.0) + float(size)
    return buffers
