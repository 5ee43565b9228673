"""Mutated files for everything that reads a user's file: a clean error or a right answer.

    python -m tests.fuzz [--count 1000] [--seed 0] [--only plan cluster ...]

Every case is made of a good file by a few changes that the case's number decides, is read, and what
was read is used: planned, simulated, shown, written again. A case ends well if it is *accepted*, or
*refused* by an error of ours in one line. Anything else is a *defect*: another exception, five
seconds of processor time, a GiB of memory, the end of the process, or an answer that is no number.
"""

import argparse
import contextlib
import gzip
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from placement import importers
from placement.cli.schedule import _case, gantt
from placement.cli.serving import fits
from placement.cli.show import show_plan
from placement.cluster import Cluster, Device
from placement.costs.serving import Phase, Serving, largest_context, serving_problem
from placement.importers import load_decoder
from placement.plan import load_plan, make_plan
from placement.planners.expert import Expert
from placement.planners.heft import Heft
from placement.planners.order_search import OrderSearch
from placement.planners.single_device import SingleDevice
from placement.problem import Problem
from placement.profile import Profile
from placement.runs.trials import Trials
from placement.schedulers.searched.blocks import read_work
from placement.schedulers.searched.search import search_schedule
from placement.simulator import simulate
from tests.problems import random_graph, random_problem
from tests.runtimes import Biased
from tests.served import LLAMA, MIXTRAL, gguf_llama

MAX_SECONDS, MAX_BYTES = 5, 2**30
_FORKED = 100  # cases of one process: what it keeps does not add up
Rng = np.random.Generator

# What takes the place of a value; as text, for what JSON cannot say otherwise.
_WORDS = (
    *("0", "-1", "1", "2", "3", "0.5", "-0.0", "1e-320", "1e308", "-1e308", "1e999", "NaN"),
    *("Infinity", "-Infinity", "1000000", "2000000000", "2147483648", "9007199254740992"),
    *("9223372036854775808", "2000000000000000000", "1" + "0" * 400, "9" * 5000),
    *("true", "false", "null", '""', '"x"', '"inf"', '"a"', '"1"', '"\\u00fcn\\u00ef\\u202e\\n"'),
    *('"../../x"', '"*a*a*a*a*a*a*a*a*a*a*a*a*a*a*b"', "[]", "{}", "[[]]", '{"a": 1}', "[1, 2]"),
    *("[0, 0, 0]", "[" * 5000 + "]" * 5000, '{"a":' * 60 + "1" + "}" * 60, '"' + "y" * 3000 + '"'),
)


# --- changes -------------------------------------------------------------------------------------


def json_mutant(value: Any, rng: Rng) -> str:
    """The text of a value with up to three places changed."""
    value = json.loads(json.dumps(value))
    words: dict[str, str] = {}
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        places = list(_places(value))
        if not places:
            break
        inside, key = places[rng.integers(len(places))]
        match rng.choice(["word", "word", "word", "delete", "rename", "again", "other", "scale"]):
            case "word":
                inside[key] = mark = f"@{len(words)}@"
                words[f'"{mark}"'] = str(rng.choice(_WORDS))
            case "delete":
                del inside[key]
            case "rename" if isinstance(inside, dict):
                inside[str(key) + str(rng.choice(["x", " ", "\u0301", "_s"]))] = inside.pop(key)
            case "again" if isinstance(inside, list):
                inside.insert(key, inside[key])
            case "again":
                words[f'"{key}": '] = f'"{key}": 1, "{key}": '
            case "scale" if type(inside[key]) in (int, float):
                factor = rng.choice([-1, 10, 1000, 1e-9, 1e9])
                inside[key] = type(inside[key])(inside[key] * factor)
            case _:
                source, name = places[rng.integers(len(places))]
                inside[key] = json.loads(json.dumps(source[name]))
    text = json.dumps(value)
    for mark, word in words.items():
        text = text.replace(mark, word, 1)
    return text


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All (list or object, index or key) in a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in list(inside):
        yield value, key
        if isinstance(part, dict | list):
            yield from _places(part)


def text_mutant(text: str, rng: Rng) -> str:
    """A text with a line, a number or a character changed."""
    lines = text.split("\n")
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        at = int(rng.integers(len(lines)))
        match rng.choice(["number", "number", "number", "delete", "again", "swap", "letter"]):
            case "number":
                numbers = list(re.finditer(r"-?\d+\.?\d*(e-?\d+)?", lines[at]))
                if numbers:
                    a, b = numbers[rng.integers(len(numbers))].span()
                    lines[at] = lines[at][:a] + str(rng.choice(_WORDS)) + lines[at][b:]
            case "delete":
                lines[at] = ""
            case "again":
                lines.insert(at, lines[at])
            case "swap":
                other = int(rng.integers(len(lines)))
                lines[at], lines[other] = lines[other], lines[at]
            case _:
                k = int(rng.integers(len(lines[at]) + 1))
                letters = ["\x00", "\u202e", "ü", '"', ",", "[", "-", " ", "&a ", "*a"]
                lines[at] = lines[at][:k] + str(rng.choice(letters)) + lines[at][k:]
    return "\n".join(lines)


def bytes_mutant(data: bytes, rng: Rng) -> bytes:
    """Bytes with some cut off, changed, put in or taken out."""
    mutant = bytearray(data)
    match rng.choice(["cut", "flip", "flip", "insert", "take", "zero"]):
        case "cut":
            del mutant[int(rng.integers(len(mutant) + 1)) :]
        case "flip":
            for k in rng.integers(0, max(1, len(mutant)), int(rng.choice([1, 2, 8, 64]))):
                if mutant:
                    mutant[k] ^= 1 << int(rng.integers(8))
        case "insert":
            at = int(rng.integers(len(mutant) + 1))
            mutant[at:at] = rng.bytes(int(rng.choice([1, 4, 100])))
        case "take":
            at = int(rng.integers(len(mutant) + 1))
            del mutant[at : at + int(rng.choice([1, 4, 100]))]
        case _:
            at = int(rng.integers(len(mutant) + 1))
            size = len(mutant[at : at + 16])
            mutant[at : at + 16] = bytes(size)
    return bytes(mutant)


def arrays_mutant(data: bytes, rng: Rng) -> bytes:
    """An ``.npz`` file with an array of other values, another type or shape."""
    with np.load(io.BytesIO(data)) as file:
        arrays = {name: file[name] for name in file.files}
    for _ in range(int(rng.choice([1, 1, 2]))):
        name = str(rng.choice(list(arrays)))
        array = arrays[name]
        if array.dtype.kind == "U" and rng.random() < 0.8:
            with contextlib.suppress(ValueError):
                arrays[name] = np.array(json_mutant(json.loads(str(array)), rng))
            continue
        match rng.choice(["type", "shape", "value", "value", "value", "delete", "rename"]):
            case "type":
                kind = rng.choice(["O", "U8", "?", "i1", "u8", "f2", "c16", ">f8", "S3", "M8[s]"])
                with contextlib.suppress(TypeError, ValueError):
                    arrays[name] = array.astype(str(kind))
            case "shape":
                flat = array.ravel()
                shapes = [flat, array[None], flat[:0], flat[:-1], array.T]
                arrays[name] = shapes[int(rng.integers(len(shapes)))]
            case "value" if array.size and array.dtype.kind in "if":
                flat = array.copy().ravel()
                worst: Any = [np.nan, np.inf, -np.inf, -1, 1e308, 0]
                if array.dtype.kind == "i":
                    worst = [-1, 0, np.iinfo(array.dtype).max, np.iinfo(array.dtype).min]
                flat[rng.integers(flat.size)] = worst[int(rng.integers(len(worst)))]
                arrays[name] = flat.reshape(array.shape)
            case "rename":
                arrays[name + "x"] = arrays.pop(name)
            case _:
                del arrays[name]
                if not arrays:
                    break
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def weights_mutant(data: bytes, rng: Rng) -> bytes:
    """A safetensors file with another header, another card, or other weights."""
    size = int.from_bytes(data[:8], "little")
    head, body = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    match rng.choice(["card", "card", "header", "weights"]):
        case "card":
            about = json.loads(head["__metadata__"]["policy"])
            part = str(rng.choice(list(about)))
            if part == "network" or rng.random() < 0.5:  # what is read of it is a small part
                about["network"] = json.loads(json.dumps(about["network"]))
                text = json_mutant(about["network"], rng)
                about["network"] = "@"
                head["__metadata__"]["policy"] = json.dumps(about).replace('"@"', text)
            else:
                head["__metadata__"]["policy"] = json_mutant(about, rng)
        case "header":
            packed = json_mutant(head, rng).encode()
            return len(packed).to_bytes(8, "little") + packed + bytes(body)
        case _:
            numbers = np.frombuffer(body, np.float32).copy()
            at = int(rng.integers(len(numbers)))
            wide = int(rng.choice([1, 1000, len(numbers)]))
            with np.errstate(all="ignore"):
                numbers[at : at + wide] *= rng.choice([1e3, 1e9, 1e38, 0.0, -1e5, np.nan, np.inf])
            body = bytearray(numbers.tobytes())
    packed = json.dumps(head).encode()
    return len(packed).to_bytes(8, "little") + packed + bytes(body)


def lines_mutant(data: bytes, rng: Rng) -> bytes:
    """JSON lines with one of them changed."""
    lines = data.decode().split("\n")
    at = int(rng.integers(len(lines)))
    if lines[at]:
        lines[at] = json_mutant(json.loads(lines[at]), rng)
    return "\n".join(lines).encode()


def onnx_mutant(data: bytes, rng: Rng) -> bytes:
    """An ONNX model with a field of a node, a tensor or a shape changed."""
    import onnx

    model = onnx.load_model_from_string(data)
    graph = model.graph
    numbers = [0, -1, 1, 3, 7, 10**6, 2**31, 2**40, 2**62]
    number = numbers[int(rng.integers(len(numbers)))]
    node = graph.node[int(rng.integers(len(graph.node)))]
    changes = ["dim", "dim", "dims", "attribute", "input", "kind", "delete", "type", "name"]
    match rng.choice(changes):
        case "dim":
            values = [*graph.input, *graph.output, *graph.value_info]
            dims = values[int(rng.integers(len(values)))].type.tensor_type.shape.dim
            if dims:
                dim = dims[int(rng.integers(len(dims)))]
                if rng.random() < 0.3:
                    dim.dim_param = str(rng.choice(["?", "-1", "N", "", "N+1"]))
                else:
                    dim.dim_value = number
        case "dims":
            dims = graph.initializer[int(rng.integers(len(graph.initializer)))].dims
            if dims:
                dims[int(rng.integers(len(dims)))] = number
        case "attribute" if node.attribute:
            attribute = node.attribute[int(rng.integers(len(node.attribute)))]
            attribute.i = number
            if attribute.ints:
                attribute.ints[int(rng.integers(len(attribute.ints)))] = number
            if rng.random() < 0.2:
                attribute.type = int(rng.integers(14))
        case "input" if node.input:
            names = ["", "nowhere", *node.output, *(x for n in graph.node for x in n.output)]
            node.input[int(rng.integers(len(node.input)))] = str(rng.choice(names))
        case "kind":
            kinds = [n.op_type for n in graph.node] + ["Nothing", "If", "Loop"]
            node.op_type = str(rng.choice(kinds))
        case "type":
            tensor = graph.initializer[int(rng.integers(len(graph.initializer)))]
            tensor.data_type = int(rng.integers(25))
        case "name":
            node.output[0] = str(rng.choice([x.name for x in graph.initializer] + ["", "y"]))
        case _:
            graph.node.remove(node)
    return model.SerializeToString()


# --- files, and what is done with them -----------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What reads a file: ``files`` are good ones by name, ``use`` reads and uses one."""

    files: Mapping[str, bytes]
    use: Callable[[Path], None]


def _mutant(name: str, data: bytes, rng: Rng) -> bytes:
    """By the kind of the file, or, seldom, as if it were only bytes."""
    if rng.random() < 0.12:
        return bytes_mutant(data, rng)
    suffix = Path(name).suffix
    if suffix in (".npz", ".safetensors", ".onnx", ".jsonl", ".gz"):
        if suffix == ".gz":
            return gzip.compress(_mutant("x.json", gzip.decompress(data), rng), 1)
        kinds = {".npz": arrays_mutant, ".safetensors": weights_mutant, ".onnx": onnx_mutant}
        return kinds.get(suffix, lines_mutant)(data, rng)
    text = data.decode()
    if suffix in (".json", ".yaml") and text.startswith(("{", "[")) and rng.random() < 0.85:
        return json_mutant(json.loads(text), rng).replace("\\ud", "").encode()
    return text_mutant(text, rng).encode("utf-8", "replace")


def write_case(targets: Mapping[str, Target], name: str, number: int, home: Path) -> Path:
    """The mutated file (or folder) of a case, in an empty folder."""
    target, rng = targets[name], np.random.default_rng([number, sum(name.encode())])
    if next(iter(target.files)).startswith("run/"):
        changed = rng.choice(list(target.files), int(rng.choice([1, 1, 2])))
        for file, data in target.files.items():
            path = home / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if file in changed and rng.random() < 0.05:
                continue  # it is not there
            path.write_bytes(_mutant(file, data, rng) if file in changed else data)
        return home / "run"
    file = str(rng.choice(list(target.files)))
    path = home / file
    if rng.random() < 0.03:  # a file of another kind under its name
        other = targets[str(rng.choice(list(targets)))].files
        path.write_bytes(other[str(rng.choice(list(other)))])
    else:
        path.write_bytes(_mutant(file, target.files[file], rng))
    return path


def _solved(problem: Any) -> None:
    """Plan, simulate, show and save a problem, and load it again."""
    for planner in (Heft(), SingleDevice()):
        solution = planner(problem)
        assert not np.isnan(solution.value_s) and solution.value_s >= 0, solution.value_s
    line = simulate(problem, solution.placement)
    assert np.isfinite([line.latency_s, line.period_s]).all()
    line._repr_html_()
    with tempfile.TemporaryDirectory() as folder:
        importers.save(problem, Path(folder) / "again.json")
        again = importers.load(Path(folder) / "again.json")
    assert again.graph.fingerprint == problem.graph.fingerprint


def made_targets(names: Sequence[str] = ()) -> dict[str, Target]:
    """Those of ``NAMES`` that are asked for, or all."""
    problem = random_problem(5, num_ops=8, num_devices=2, grouped=True)
    return {name: _MAKERS[name](problem) for name in names or NAMES}


def _saved(save: Callable[[Path], Any], name: str = "file") -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


def _imported(files: Mapping[str, bytes]) -> Target:
    return Target(files, lambda path: _solved(importers.load(path)))


def _problem_files(problem: Any) -> Target:
    names = ("p.json", "p.json.gz")
    return _imported({n: _saved(lambda path: importers.save(problem, path), n) for n in names})


def _sample(file: str, module: str, name: str) -> Callable[[Any], Target]:
    """What a test of importers reads under this name."""

    def make(_: Any) -> Target:
        content = getattr(import_module(f"tests.importers.{module}"), name)
        text = content if isinstance(content, str) else json.dumps(content)
        return _imported({file: text.encode()})

    return make


def _doppler(_: Any) -> Target:
    return _imported({"doppler.txt": b"5\n0,\n0,1,1,\n1,2,3,\n10,20\n30,40,matmul\n50,60\n70,80\n"})


def _shop(_: Any) -> Target:
    ways = [(0, 0, 3), (0, 1, 5), (1, 1, 2), (2, 0, 4)]
    content = {"instance": "s", "precedences": [{"before": 1, "after": 0, "job": 0}]}
    names = ("operation", "machine", "duration")
    content |= {"operations": [dict(zip(names, way, strict=True)) for way in ways]}
    text = b"2 3 1.5\n2 1 1 3 2 2 5 3 4\n1 3 1 1 2 2 3 3\n"
    return _imported({"s.json": json.dumps(content).encode(), "s.fjs": text})


def _wfformat(_: Any) -> Target:
    tasks = [
        {"name": "a", "id": "a1", "parents": [], "children": ["b1"], "outputFiles": ["f"]},
        {"name": "b", "id": "b1", "parents": ["a1"], "children": [], "inputFiles": ["f"]},
    ]
    new = {"tasks": tasks, "files": [{"id": "f", "sizeInBytes": 100}]}
    ran = {"tasks": [{"id": k, "runtimeInSeconds": 1.5} for k in ("a1", "b1")]}
    old = [
        {"name": "a", "runtime": 2, "files": [{"link": "output", "name": "f", "size": 7}]},
        {"name": "b", "runtime": 3, "files": [{"link": "input", "name": "f", "size": 7}]},
    ]
    old[1]["parents"] = ["a"]
    content = {"workflow": {"specification": new, "execution": ran}}
    files = {"w.json": content, "v.json": {"workflow": {"jobs": old}}}
    return _imported({name: json.dumps(x).encode() for name, x in files.items()})


def _onnx(_: Any) -> Target:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.zeros((4, 3, 3, 3), np.float32), "w")
    dense = numpy_helper.from_array(np.zeros((4 * 64, 10), np.float32), "v")
    shape = numpy_helper.from_array(np.array([0, -1], np.int64), "s")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv", pads=[1, 1, 1, 1], strides=[1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Reshape", ["b", "s"], ["c"], name="flat"),
        helper.make_node("MatMul", ["c", "v"], ["d"], name="dense"),
        helper.make_node("Softmax", ["d"], ["e"], name="soft", axis=1),
        helper.make_node("Concat", ["d", "e"], ["y"], name="both", axis=1),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 8, 8])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 20])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight, dense, shape])
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph))
    return _imported({"model.onnx": model.SerializeToString()})


def _decoders(files: Mapping[str, bytes]) -> Target:
    gpu = Device("cuda:0", "cuda", like="nvidia/l4", memory_bytes=10**10)
    cluster = Cluster("two", (gpu, Device("cpu:0", like="amd/epyc-7763", memory_bytes=10**11)))

    def use(path: Path) -> None:
        decoder, asked = load_decoder(path), Serving(Phase.DECODE, 4096, 2, whole_layers=False)
        problem = serving_problem(decoder, cluster, asked)
        if problem.num_ops <= 200:
            _solved(problem)
            if not fits(problem):

                def at(serving: Serving) -> Any:
                    return serving_problem(decoder, cluster, serving)

                assert largest_context(at, asked, fits) < asked.context

    return Target(files, use)


def _configs(_: Any) -> Target:
    sizes = {"num_hidden_layers": 3, "quantization_config": {"quant_method": "awq", "bits": 4}}
    more = {"model_type": "qwen2_moe", "layer_types": ["full_attention"] * 3}
    more |= {"mlp_only_layers": [1], "moe_intermediate_size": 64}
    more |= {"shared_expert_intermediate_size": 64}
    files = {"a.json": LLAMA | sizes, "b.json": MIXTRAL | sizes | more}
    return _decoders({name: json.dumps(x).encode() for name, x in files.items()})


def _gguf(_: Any) -> Target:
    return _decoders({"a.gguf": gguf_llama(2), "b.gguf": gguf_llama(2, experts=4, tied=True)})


def _clusters(_: Any) -> Target:
    graph = random_graph(np.random.default_rng(0), 6)
    seconds = np.full((6, 2), 1e-3)
    profile = Profile(("cpu:0", "cpu:1"), seconds, seconds * 0)
    devices = [
        {"name": "a", "like": "cpu:0", "speed": 2.0, "memory_bytes": 10**9, "call_s": 1e-6},
        {"name": "b", "like": "cpu:1", "kind": "npu", "busy_w": 5, "idle_w": 2},
        {"name": "cpu:0", "cores": [0, 1], "busy_w": 5.0, "idle_w": 2.0},
    ]
    every = {"src": "*", "dst": "*", "latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}
    one = {"src": "a", "dst": "b", "channel": "c", "blocking": True, "wake_s": 1e-6}
    content = {"name": "two", "devices": devices, "links": [every, one]}
    block = "name: two\ndevices:\n- &x {name: a, like: cpu:0}\n- {<<: *x, name: b}\nlinks: []\n"

    def use(path: Path) -> None:
        cluster = Cluster.from_yaml(path)
        cluster.to_yaml(path.with_name("again.yaml"))
        assert Cluster.from_yaml(path.with_name("again.yaml")).fingerprint == cluster.fingerprint
        _solved(Problem(graph, cluster, profile.for_cluster(cluster)))

    return Target({"c.yaml": json.dumps(content).encode(), "block.yaml": block.encode()}, use)


def _plans(problem: Any) -> Target:
    plain = replace(problem.profile, loaded_s=None, links=())
    cluster = replace(problem.cluster, links=())
    single = replace(problem, objective="latency", profile=plain, cluster=cluster)
    ordered = OrderSearch(evaluations=20)(single)
    files = {
        "plan.json": _saved(make_plan(problem, Heft()(problem), planner="heft").save),
        "order.json": _saved(make_plan(single, ordered, planner="order_search").save),
    }

    def use(path: Path) -> None:
        plan = load_plan(path)
        show_plan(plan)
        plan.save(path.with_name("again.json"))
        assert load_plan(path.with_name("again.json")) == plan
        if plan.graph.fingerprint == problem.graph.fingerprint:
            with contextlib.suppress(ValueError):  # of devices with other names, say
                plan.timeline(problem)

    return Target(files, use)


def _schedules(_: Any) -> Target:
    ends = [("f0", 0, 1, 1, []), ("f1", 1, 1, 1, [0]), ("b1", 1, 2, -1, [1]), ("b0", 0, 2, -1, [2])]
    keys = ("name", "devices", "time", "memory", "deps", "id")
    rows = [(a, [d], *more, i) for i, (a, d, *more) in enumerate(ends)]
    blocks = [dict(zip(keys, row, strict=True)) for row in rows]
    case = {"name": "v", "ndevs": 2, "mode": "train", "blocks": blocks}

    def use(path: Path) -> None:
        for memory in (None, 2):
            work, _ = read_work(_case(str(path), "a"), memory)
            gantt(work, search_schedule(work, 4, seconds=0.02).starts, 80)

    return Target({"cases.json": json.dumps({"cases": {"a": case}}).encode()}, use)


def _profiles(problem: Any) -> Target:
    def use(path: Path) -> None:
        profile = Profile.load(path)
        profile.save(path.with_name("again.npz"))
        Profile.load(path.with_name("again.npz"))
        if profile.compute_s.shape == problem.compute_s.shape:
            _solved(replace(problem, profile=profile.for_cluster(problem.cluster)))

    return Target({"profile.npz": _saved(problem.profile.save, "profile.npz")}, use)


def _trials(_: Any) -> Target:
    problem = random_problem(9, num_ops=6, num_devices=2)
    able = problem.supported.all(axis=0)
    device = int(np.flatnonzero(able)[0])
    rows = [np.full(6, device), *(np.where(np.arange(6) == k, 1 - device, device) for k in (1, 4))]
    rows = [p for p in rows if all(problem.supported[np.arange(6), p])][:2]

    def save(path: Path) -> None:
        trials = Trials(problem, Biased(problem), path=path)
        trials.measure(rows)
        trials.measure(rows[:1])

    def use(path: Path) -> None:
        trials = Trials(problem, Biased(problem), path=path)
        for _ in range(3):
            trials.measure(rows)
        assert not np.isnan(trials([rows[0]])).any() and trials.incumbent is not None
        assert len(trials.samples.of(rows[0]))

    return Target({"trials.jsonl": _saved(save)}, use)


def _policies(problem: Any) -> Target:
    from agents.dispatch import DispatchConfig
    from agents.encoder import NetworkConfig
    from agents.planner import PolicyPlanner
    from agents.trained import TrainedPolicy, untrained_net

    small = NetworkConfig(hidden=8, layers=1)
    configs = {"sequential": small, "one_shot": small, "dispatch": DispatchConfig(scorer=8)}

    def use(path: Path) -> None:
        policy = TrainedPolicy.load(path)
        solution = PolicyPlanner(policy, k=2, evaluations=12, baseline="heft")(problem)
        assert not np.isnan(solution.value_s)
        policy.save(path.with_name("again.safetensors"))

    policies = {k: TrainedPolicy(untrained_net(c, k), {"config": {}}) for k, c in configs.items()}
    return Target({f"{k}.safetensors": _saved(p.save) for k, p in policies.items()}, use)


def _reports(_: Any) -> Target:
    from placement.report import trace
    from placement.report.html import write_report
    from tests.report.test_html_report import compared, modular

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        problem = modular(8)
        compared(home, {"first": problem})
        (home / "first").mkdir()
        solution = Heft()(problem)
        make_plan(problem, solution, planner="heft").save(home / "first" / "plan.json")
        importers.save(problem, home / "first" / "problem.json")
        line = simulate(problem, solution.placement)
        trace.write_trace(home / "first" / "trace.json", [line, replace(line, measured=True)])
        (home / ".hydra").mkdir()
        (home / ".hydra" / "overrides.yaml").write_text('["planner=[heft]", "seed=1"]')
        (home / ".hydra" / "hydra.yaml").write_text('{"hydra": {"job": {"name": "compare"}}}')
        (home / "versions.json").write_text('{"torch": "2"}')
        (home / "metrics.csv").write_text("steps,reward\n1,0.5\n2,0.75\n")
        paths = [x for x in sorted(home.rglob("*")) if x.is_file()]
        files = {f"run/{x.relative_to(home)}": x.read_bytes() for x in paths}
    # Two of the dozen cells do: more of them would only be changed more often.
    cells = [name for name in files if "/cells/" in name][2:]
    kept = {name: data for name, data in files.items() if name not in cells}
    return Target(kept, lambda path: _check_page(write_report(path, path / "page.html").path))


def _check_page(path: Path) -> None:
    assert "<title>" in path.read_text()


def _experts(problem: Any) -> Target:
    on = [problem.cluster.device_names[d] for d in Heft()(problem).placement]
    split = dict(zip(problem.graph.op_name, on, strict=True))
    files = {"split.json": json.dumps(split).encode()}
    return Target(files, lambda path: _answered(Expert(str(path))(problem).value_s))


def _answered(value_s: float) -> None:
    assert not np.isnan(value_s)


_MAKERS: dict[str, Callable[[Any], Target]] = {
    "problem": _problem_files, "dnn_partitioning": _sample("d.json", "test_importers", "DNN"),
    "moirai": _sample("m.json", "test_importers", "MOIRAI"),
    "pipedream": _sample("graph.txt", "test_importers", "PIPEDREAM"),
    "doppler": _doppler, "config": _configs, "gguf": _gguf, "shop": _shop,
    "stg": _sample("s.stg", "test_tasks", "STG"), "neusight": _sample("n.csv", "test_tasks", "CSV"),
    "wfformat": _wfformat, "onnx": _onnx,
    "cluster": _clusters, "plan": _plans, "schedule": _schedules, "profile": _profiles,
    "trials": _trials, "policy": _policies, "report": _reports, "expert": _experts,
}  # fmt: skip
NAMES = tuple(_MAKERS)


# --- running -------------------------------------------------------------------------------------


def outcome(target: Target, path: Path) -> tuple[str, str]:
    """``accepted``, ``refused`` or ``defect``, and what was said."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            target.use(path)
    except MemoryError:
        return "defect", "more memory than a GiB"
    except Exception as error:
        message = str(error)
        is_ours = type(error).__module__.partition(".")[0] in ("placement", "agents", "envs")
        if not is_ours or not isinstance(error, ValueError):
            return "defect", "".join(traceback.format_exception(error)[-3:])[-600:]
        return "refused", message
    return "accepted", ""


def _limited() -> None:
    """This process, from here on, gets ``MAX_BYTES`` more memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _cases(targets: Mapping[str, Target], name: str, numbers: Sequence[int], pipe: Any) -> None:
    """In a process of its own: what came of each case goes into ``pipe``."""
    _limited()
    for number in numbers:
        with tempfile.TemporaryDirectory() as home:
            path = write_case(targets, name, number, Path(home))
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # of the processor: ends the process
            result = outcome(targets[name], path)
            signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(result)
    os._exit(0)  # threads of libraries are not waited for


def run(targets: Mapping[str, Target], name: str, numbers: Sequence[int]) -> list[Any]:
    """(number, outcome, what was said) of each case."""
    context, results, left = multiprocessing.get_context("fork"), [], list(numbers)
    while left:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_cases, args=(targets, name, left[:_FORKED], there))
        process.start()
        there.close()
        some = left[:_FORKED]
        for number in some:
            try:
                if not here.poll(20 * MAX_SECONDS):
                    process.kill()
                kind, message = here.recv()
            except EOFError:
                process.join()
                why = signal.Signals(-process.exitcode).name if process.exitcode else "ended"
                why = f"{MAX_SECONDS} s of processor time" if why == "SIGPROF" else why
                kind, message = "defect", why
            results.append((number, kind, message))
            left.remove(number)
            if message == "ended" or (process.exitcode is not None and kind == "defect"):
                break
        process.join()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="cases of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", nargs="+", choices=NAMES, help="of those who read")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write defective cases there")
    args = parser.parse_args()
    targets = made_targets(args.only or ())
    bad = 0
    print(f"{'':18}{'accepted':>9}{'refused':>9}{'defects':>9}")
    for name in targets:
        for file, data in targets[name].files.items() if name != "report" else ():
            with tempfile.TemporaryDirectory() as home:  # good files, which also compiles kernels
                (Path(home) / file).write_bytes(data)
                kind, message = outcome(targets[name], Path(home) / file)
                assert kind == "accepted", message
        results = run(targets, name, range(args.seed, args.seed + args.count))
        counts = Counter(kind for _, kind, _ in results)
        print(f"{name:18}" + "".join(f"{counts[k]:9}" for k in ("accepted", "refused", "defect")))
        seen: Counter[str] = Counter()
        for number, kind, message in results:
            if kind == "defect":
                bad += 1
                seen[message] += 1
                if seen[message] == 1 and len(seen) <= 12:
                    print(f"  {name} {number}: {message}")
                if args.keep:
                    home = args.keep / f"{name}-{number}"
                    shutil.rmtree(home, ignore_errors=True)
                    home.mkdir(parents=True)
                    write_case(targets, name, number, home)
        sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
