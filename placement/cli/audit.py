"""``placement audit``: what a runtime did with a plan, as its log tells."""

from __future__ import annotations

import argparse
import re
from bisect import bisect
from collections.abc import Mapping
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

Exit code 1: an operator is elsewhere than planned, or the log does not say where any is.
"""
MOST_BYTES = 2**28
_LONGEST = 2**14  # of a line
_LAYER = re.compile(r"load_tensors: layer +(\d{1,6}) assigned to device (\S+?),? ")
_OVERRIDE = re.compile(r"tensor (\S+) \(.*\) buffer type overridden to (\S+)")
_BUFFER = re.compile(r": +(\S+) +(model|KV|RS|compute|output) buffer size = +([0-9.]+) MiB")
_PLACED = re.compile(r"(Node\(s\)|All nodes) placed on \[(\w+)\]")
_AFFINITY = re.compile(r'label="([^"\\]+)\\n[^"]*\\ndevice=([^"\\]+)"')
_NODE = re.compile(r"^(?:.*?\W)?(\w+) \(([^()]+)\)\s*$")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="plan.json")
    parser.add_argument("--log", metavar="FILE", required=True, help="what the runtime printed")
    parser.add_argument(
        "--rpc",
        action="append",
        metavar="NODE=HOST:PORT",
        help="servers of llama.cpp, as for its exporter; may be repeated",
    )
    parser.add_argument(
        "--devices",
        action="append",
        metavar="DEVICE=NAME",
        help="what OpenVINO calls devices, as for its exporter; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    from placement.plan import load_plan

    plan = load_plan(args.plan)
    try:
        with open(args.log, "rb") as file:
            lines = file.read(MOST_BYTES).decode("utf-8", "replace").splitlines()
        text = "\n".join(line[:_LONGEST] for line in lines)  # what else is in them does not matter
    except OSError as error:
        raise cli.UsageError(f"{args.log}: cannot be read: {error.strerror}") from error
    names, nodes, memory = _read(text, plan, args)
    planned = {op: names[device] for op, device in plan.assignment.items()}
    known = {op: where for op, where in nodes.items() if op in planned}
    elsewhere = {op: [planned[op], where] for op, where in known.items() if where != planned[op]}
    answer = {
        "operators": len(planned),
        "told": len(known),
        "elsewhere": elsewhere,
        "memory": memory,
    }
    if args.json:
        cli.print_json(answer)
    else:
        rows = [[op, *pair] for op, pair in list(elsewhere.items())[:20]]
        if rows:
            title = f"{len(elsewhere)} operators are elsewhere"
            cli.print_table(title, ["operator", "planned", "log"], rows, figures=False)
        for name, sizes in memory.items():
            print(f"{name}: " + ", ".join(f"{k} {v:,.1f} MiB" for k, v in sizes.items()))
    if not known:
        cli.say(
            f"{args.log} does not say where any operator of the plan is: llama.cpp says it with "
            "--verbose, ONNX Runtime with log_severity_level = 0, OpenVINO's HETERO in "
            "hetero_affinity_MODEL.dot with OPENVINO_HETERO_VISUALIZE=1"
        )
        return cli.NO
    cli.say(f"{len(known) - len(elsewhere)} of {len(known)} operators are where they were planned")
    return cli.NO if elsewhere else cli.OK


_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def _read(
    text: str, plan: Plan, args: argparse.Namespace
) -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, float]]]:
    """The runtime's name of each device, where operators are, and MiB of each of its devices."""
    from placement.exporters.llama_cpp import Backends
    from placement.exporters.openvino import Openvino

    used = set(plan.assignment.values())
    if _PLACED.search(text):
        kinds = {d.name: d.kind for d in plan.cluster.devices}
        providers = {name: _PROVIDERS.get(kinds[name], name) for name in used}
        return providers, onnxruntime_nodes(text, plan), {}
    if _AFFINITY.search(text):
        return (
            Openvino(devices=tuple(args.devices or ())).labels(plan),
            openvino_nodes(text, plan),
            {},
        )
    backends = Backends(plan, args.rpc or ())
    text = last_load(text)
    memory = llama_cpp_buffers(text)
    if plan.predicted.peak_bytes is not None:
        for name in used & set(plan.predicted.peak_bytes):
            sizes = memory.get(backends.buffer(name))
            if sizes is not None:
                peak = plan.predicted.peak_bytes[name]
                sizes["planned"] = round(sizes.get("planned", 0.0) + peak / 2**20, 2)
    return {name: backends.buffer(name) for name in used}, llama_cpp_operators(text, plan), memory


def openvino_nodes(text: str, plan: Plan) -> dict[str, str]:
    """Operator -> device, from the graph that HETERO writes of a model before it is compiled.

    One node of ONNX becomes several of OpenVINO, whose names begin with its own.
    """
    devices_of: dict[str, set[str]] = {}
    for name, device in _AFFINITY.findall(text):
        op = name if name in plan.assignment else name.rpartition("/")[0]
        devices_of.setdefault(op, set()).add(device)
    return {op: "+".join(sorted(devices)) for op, devices in devices_of.items()}


def onnxruntime_nodes(text: str, plan: Plan) -> dict[str, str]:
    """Node -> execution provider, from the lines below ``Node(s) placed on [...]``."""
    provider_of: dict[str, str] = {}
    provider = None
    for line in text.splitlines():
        begun = _PLACED.search(line)
        node = _NODE.match(line)
        if begun and begun[1] == "All nodes":  # it does not list them then
            provider_of |= dict.fromkeys(plan.assignment, begun[2])
        elif begun:
            provider = begun[2]
        elif node and provider is not None:
            provider_of[node[2]] = provider
        else:
            provider = None
    return provider_of


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


def llama_cpp_operators(text: str, plan: Plan) -> dict[str, str]:
    """Operator -> buffer type: its tensors', or where all of its layer is.

    Tensors of an operator that are in several buffers have the names of all, joined by ``+``.
    """
    layers = {int(i): _plain(where) for i, where in _LAYER.findall(text)}
    moved = {name: _plain(where) for name, where in _OVERRIDE.findall(text)}
    if not layers and not moved:
        return {}
    return {op: _where(op, layers, moved) or "CPU" for op in plan.assignment}


def _where(op: str, layers: Mapping[int, str], moved: Mapping[str, str]) -> str | None:
    """The device of an operator of a decoder; embeddings are on the processor unless moved."""
    part = op.rpartition(".")[2]
    number = re.search(r"\.(\d+)\.\w+$", op)
    if number is None:
        is_embedding = "embed" in op or "wte" in op or "embd" in op or "wpe" in op
        name = "token_embd.weight" if is_embedding else "output.weight"
        return moved.get(name, None if is_embedding else layers.get(max(layers, default=0)))
    prefix = f"blk.{number[1]}."
    inside = {name: where for name, where in moved.items() if name.startswith(prefix)}
    routed = {n: w for n, w in inside.items() if "_exps" in n}
    dense = {n: w for n, w in inside.items() if ".ffn_" in n and n not in routed}
    rest = {n: w for n, w in inside.items() if ".ffn_" not in n}
    own = {"experts": routed, "feed_forward": dense, "router": dense}.get(part, rest)
    return "+".join(sorted(set(own.values()))) or layers.get(int(number[1]))


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
