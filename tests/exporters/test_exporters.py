"""Exporters: what real programs read is what the plan says; what they cannot say is refused."""

from __future__ import annotations

import ast
import csv
import io
import json
import operator
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.utils import _pytree as pytree

from placement import exporters, importers, planners, schedulers, workloads
from placement.__main__ import main
from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.costs import predictors
from placement.exporters import Exported, ExportError, Inexpressible, moved
from placement.exporters._modules import Forward
from placement.exporters._torchrun import past_a_stage, send_contiguous, tensors_only
from placement.plan import Plan, make_plan
from placement.problem import Problem, Solution
from placement.schedulers import load as load_scheduler
from placement.testing import ContractError, check_exporter
from tests import consumers
from tests.problems import chain, small_problem

ROOT = Path(__file__).parents[2]
GPUS = ("cuda:0", "cuda:1")

# A decoder of two layers, as capture gives it: operators in the order in which they run. The model
# itself makes positions (0) and a view (9), each layer a residual addition (3 and 6).
LAYERS = [f"layers.{i}{part}" for i in (0, 1) for part in (".attn", "", ".mlp")]
MODULES = ("", "embed", *LAYERS, "norm", "", "head")
NAMES = [{1: "embedding", 2: "attention", 5: "attention_1"}.get(i, f"op{i}") for i in range(11)]
PARAMETERS = {f"{m}.weight": (i,) for i, m in enumerate(MODULES) if m and i not in (3, 6)}


def problem(modules=MODULES, devices=GPUS, names=None, num_backward=0, heavy=()) -> Problem:
    """A chain of operators of 1 s on every device; the last ``num_backward`` are backward.

    ``heavy`` operators have 6 parts in 10 of a device's memory as parameters.
    """
    n = len(modules)
    facts = {"op_module": modules, "is_backward": [i >= n - num_backward for i in range(n)]}
    own = NAMES if modules == MODULES else [f"op{i}" for i in range(n)]
    facts |= {"op_name": names or own, "name": "decoder"}
    facts |= {"param_bytes": [600_000] * len(heavy)}
    facts["param_uses"] = [(op, i) for i, op in enumerate(heavy)]
    kinds = {"kind": [d.partition(":")[0] for d in devices]}
    on = {"devices": devices, "device": kinds, "memory_bytes": 10**6, "num_microbatches": 4}
    seconds = np.ones((n, len(devices)))
    return small_problem(seconds, chain(n), tensor_bytes=8, graph=facts, **on)


def knowing(plan: Plan, **facts: Any) -> Plan:
    """The plan, whose graph has these fields."""
    return plan.model_copy(update={"graph": plan.graph.model_copy(update=facts)})


def plan_of(on: list[int], p: Problem | None = None, **changes: Any) -> Plan:
    """The plan with operators on devices of these numbers; it knows its parameters."""
    p = p or problem()
    plan = make_plan(p, Solution(np.array(on, np.int32), 1.0), planner="by hand", **changes)
    return knowing(plan, parameters=PARAMETERS)


def export(name: str, plan: Plan, problem: Problem | None = None, **options: Any) -> Exported:
    return exporters.load(name, **options)(plan, problem)


CUT = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]  # between the layers
INSIDE = [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]  # in layer 0, before its mlp
TURNS = [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]  # embedding | layer 0 | layer 1 | the rest


# What every exporter promises


def test_found_by_file_name() -> None:
    assert {"huggingface", "vllm", "csv"} <= set(exporters.names())
    for name in exporters.names():
        assert exporters.find(name).__doc__.splitlines()[0]
        assert "Format: " in exporters.find(name).__doc__  # where the grammar is from
    with pytest.raises(ExportError, match="no exporter 'vlm'; did you mean 'vllm'"):
        exporters.load("vlm")
    with pytest.raises(ExportError, match=r"has no option 'layer'.* layers: str"):
        exporters.load("vllm", layer="x")


BY_MODULE = ["huggingface", "vllm", "megatron", "llama_cpp", "torchtitan", "torch_pipelining"]


@pytest.mark.parametrize("name", BY_MODULE)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=len(MODULES), max_size=len(MODULES)))
def test_the_nearest_plan_is_expressible(name: str, on: list[int]) -> None:
    check_exporter(exporters.load(name), [plan_of(on)])


def test_contract_finds_what_is_broken() -> None:
    def refuses(plan: Plan, problem: Problem | None = None) -> Exported:
        raise Inexpressible("never", dict.fromkeys(plan.assignment, "cuda:0"))

    def nameless(plan: Plan, problem: Problem | None = None) -> Exported:
        return Exported({".json": ""}, "")

    with pytest.raises(ContractError, match="its own nearest plan is refused: never"):
        check_exporter(refuses, [plan_of(CUT)])
    with pytest.raises(ContractError, match=r"writes only \['\.json'\]"):
        check_exporter(nameless, [plan_of(CUT)])


@pytest.mark.parametrize("name", BY_MODULE)
def test_plans_without_modules_are_refused(name: str) -> None:
    plan = plan_of([0, 1], problem(("", "")))
    with pytest.raises(ExportError, match="does not know to which modules"):
        export(name, plan)


def test_nearest_moves_as_few_operators_as_possible() -> None:
    """Against every way to cut the units between two devices in the plan's order."""
    random = np.random.default_rng(0)
    for _ in range(50):
        on = random.integers(2, size=len(MODULES)).tolist()
        forward = Forward.of(plan_of(on))
        unit = [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        try:
            forward.chain(unit, "abcd", "x", max_turns=1)
            continue
        except Inexpressible as error:
            moves = sum(error.nearest[op] != d for op, d in forward.plan.assignment.items())
        order = forward._by_position(unit)
        best = min(
            sum(order[row[u]] != d for u, d in zip(unit, forward.device, strict=True))
            for row in combinations_with_replacement(range(len(order)), 4)
        )
        assert moves == best


def test_error_says_which_operator_is_in_the_way() -> None:
    with pytest.raises(Inexpressible) as caught:
        export("vllm", plan_of(INSIDE))
    assert str(caught.value) == (
        "VLLM_PP_LAYER_PARTITION cannot express this plan: it keeps layer 0 of 'layers' and what "
        "runs before it on one device; operator 'op4' of module 'layers.0.mlp' is planned on "
        "'cuda:1', it would run on 'cuda:0'. --nearest exports the nearest plan it can express"
    )
    assert [op for op, d in caught.value.nearest.items() if d == "cuda:0"] == NAMES[:5]


def test_backward_goes_with_its_forward() -> None:
    names = ("embedding", "softmax", "softmax_backward", "embedding_backward")
    p = problem(("layers.0", "layers.1", "layers.1", "layers.0"), names=names, num_backward=2)
    assert export("vllm", plan_of([0, 1, 1, 0], p)).files[""].endswith("=1,1\n")
    with pytest.raises(Inexpressible, match=r"'softmax_backward' of module 'layers\.1'") as caught:
        export("vllm", plan_of([0, 1, 0, 0], p))
    assert list(caught.value.nearest.values()) == ["cuda:0", "cuda:1", "cuda:1", "cuda:0"]


# Tables and traces


def test_csv_is_a_row_per_operator() -> None:
    text = export("csv", plan_of(CUT)).files[""]
    rows = list(csv.DictReader(io.StringIO(str(text))))
    assert [r["operator"] for r in rows] == NAMES
    assert [r["module"] for r in rows] == list(MODULES)
    assert [GPUS.index(r["device"]) for r in rows] == CUT
    assert [int(r["stage"]) for r in rows] == CUT
    # It holds no formulas.
    plan = plan_of([0] * 3, problem(("m",) * 3, names=("=1+1", '@x,"y"', "-z")))
    rows = list(csv.reader(io.StringIO(str(export("csv", plan).files[""]))))
    assert [r[1] for r in rows[1:]] == ["'=1+1", '\'@x,"y"', "'-z"]


# Hugging Face


def test_device_map_covers_every_parameter() -> None:
    def entries(on: list[int], **more: tuple[int, ...]) -> Any:
        plan = knowing(plan_of(on), parameters=PARAMETERS | more)
        return json.loads(export("huggingface", plan).files[""])

    assert entries([0] * 11) == {"": "cuda:0"}
    first = dict.fromkeys(["embed", "layers.0"], "cuda:0")
    assert entries(CUT) == first | dict.fromkeys(["layers.1", "norm", "head"], "cuda:1")
    more = {
        "layers.0.spare": (),  # nobody reads it, in a module that is split itself
        "layers.1.attn.bias": (),  # nobody reads it, in a module that is mapped
        "pooler.dense.weight": (),  # of a module that never runs: with the last operator
        "spare": (),
    }
    mapped = entries(INSIDE, **more)
    assert mapped["layers.0.attn"] == "cuda:0"
    assert mapped["layers.0.mlp"] == mapped["pooler"] == mapped["spare"] == "cuda:1"
    assert mapped["layers.0.spare"] == "cuda:1" and "layers.1.attn.bias" not in mapped
    assert "layers.0" not in mapped


@pytest.mark.parametrize(("on", "nearest"), [([0, 1, 1], [0, 0, 1]), ([0, 1, 0], [0, 0, 0])])
def test_device_map_keeps_modules_with_parameters_whole(on: list[int], nearest: list[int]) -> None:
    plan = plan_of(on, problem(("a", "a", "b") if on[2] else ("a", "a", "a")))
    split = {"a.weight": (0,), "b.weight": (2,)} if on[2] else {"a.weight": (0,)}
    with pytest.raises(Inexpressible, match="a module with parameters has one device") as caught:
        export("huggingface", knowing(plan, parameters=split))
    assert list(caught.value.nearest.values()) == [GPUS[d] for d in nearest]


@pytest.mark.parametrize("devices", [("cpu:0", "cpu:1"), ("cpu:0", "cuda:0")])
def test_device_map_has_one_host(devices: tuple[str, ...]) -> None:
    """Torch has one CPU device, from which accelerate would offload, not compute."""
    with pytest.raises(Inexpressible, match="torch has one CPU device") as caught:
        export("huggingface", plan_of(CUT, problem(devices=devices)))
    assert list(caught.value.nearest.values()) == [devices[1]] * 11


@pytest.mark.parametrize("name", consumers.FAMILIES)
def test_accelerate_runs_any_cut(name: str, monkeypatch: Any) -> None:
    """A sample of all contiguous cuts, on pretended GPUs; and both in turns."""
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    module, inputs = consumers.family(name)
    p = consumers.problem_of(consumers.captured(name))
    with torch.no_grad():
        expected = consumers.tensors(module(**inputs))
    random = np.random.default_rng(0)
    plans = [*consumers.cuts(p, random.integers(1, p.num_ops, 12))]
    turns = np.cumsum(random.random(p.num_ops) < 0.05) % 2
    plans.append(consumers.placed(p, turns))
    maps = {str(export("huggingface", nearest_of("huggingface", plan)).files[""]) for plan in plans}
    assert len(maps) > 2
    for text in maps:
        where, again = json.loads(text), consumers.family(name)[0]
        accelerate.utils.check_device_map(again, where)
        results = consumers.run_in_accelerate(again, where, (), inputs, monkeypatch)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def nearest_of(name: str, plan: Plan, problem: Problem | None = None) -> Plan:
    """The plan itself where it can be expressed, else the nearest."""
    try:
        export(name, plan, problem)
    except Inexpressible as error:
        return moved(plan, error.nearest)
    return plan


# Layers: vLLM, Megatron-LM, llama.cpp


def test_vllm() -> None:
    assert export("vllm", plan_of(CUT)).files[""] == (
        "# rank 0: cuda:0\n# rank 1: cuda:1\n"
        "CUDA_VISIBLE_DEVICES=0,1\nVLLM_PP_LAYER_PARTITION=1,1\n"
    )
    turned = export("vllm", plan_of([1 - d for d in CUT]))
    assert "CUDA_VISIBLE_DEVICES=1,0\n" in str(turned.files[""])
    with pytest.raises(Inexpressible, match="one device; operator 'op"):
        export("vllm", plan_of(TURNS))
    with pytest.raises(ExportError, match="no list of layers 'h'; there are layers: layers=NAME"):
        export("vllm", plan_of(CUT), layers="h")


def test_names_of_devices_are_no_shell_code() -> None:
    """The file is read by a shell; names are free, and only ``cuda:N`` says which GPU it is."""
    for names in (("cuda:0;touch x;", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "h1/cuda:0")):
        text = str(export("vllm", plan_of(CUT, problem(devices=names))).files[""])
        settings = [line for line in text.splitlines() if not line.startswith("# rank ")]
        assert settings == ["VLLM_PP_LAYER_PARTITION=1,1"], names
    for name in ("cuda:0,.*=CPU", "cuda", "npu:0"):
        with pytest.raises(ExportError, match=r"no buffer type of llama\.cpp is known for"):
            export("llama_cpp", plan_of(CUT, problem(devices=(name, "cuda:1"))))


@pytest.mark.parametrize("name", ["huggingface", "torch_pipelining"])
def test_devices_that_torch_does_not_have_are_refused(name: str) -> None:
    for device in ("fast", "cuda", "cuda:x", "npu:0"):
        with pytest.raises(ExportError, match=f"torch has no device '{device}' of kind"):
            export(name, plan_of(CUT, problem(devices=(device, "cuda:1"))))
    both = plan_of(CUT, problem(devices=("cpu:0", "cuda:1")))
    gloo = r"Gloo \(CPU cores, 'cpu:0'\) or over NCCL"
    with pytest.raises(ExportError, match="has one CPU" if name == "huggingface" else gloo):
        export(name, both)
    # A device that is not in use is nothing that anybody must know.
    assert export(name, plan_of([1] * 11, problem(devices=("npu:0", "cuda:1"))))


@pytest.mark.parametrize("name", sorted({*BY_MODULE} - {"llama_cpp"}))  # it names the device
def test_weights_that_stay_in_host_memory_are_no_second_gpu(name: str) -> None:
    p = problem(devices=("cpu:0", "cuda:0"))
    streams = Device("streamed/cuda:0", "cuda", streams="cuda:0")
    cluster = replace(p.cluster, devices=(*p.cluster.devices, streams))
    p = replace(p, cluster=cluster, profile=p.profile.for_cluster(cluster))
    with pytest.raises(ExportError, match="'streamed/cuda:0' computes with weights that stay in h"):
        export(name, plan_of([1] * 5 + [2] * 6, p))
    export(name, plan_of([1] * 11, p))


def test_a_list_may_have_other_modules_beside_its_layers_which_must_run_in_order() -> None:
    names = ("embedding", "softmax", "linear")
    p = problem(("0", "1", "head"), names=names)  # nn.Sequential with add_module("head", ...)
    assert "VLLM_PP_LAYER_PARTITION=1,1\n" in str(export("vllm", plan_of([0, 1, 1], p)).files[""])
    with pytest.raises(ExportError, match="do not run one after the other"):
        export("vllm", plan_of([0, 0, 0], problem(("layers.0", "layers.1", "layers.0"))))


def megatron_stages(layout: str) -> list[str]:
    """As Megatron-LM reads it: commas are nothing, ``x*n`` is n times x, ``|`` ends a stage."""
    unrolled = re.sub(r"(.)\*(\d+)", lambda x: x[1] * int(x[2]), layout.strip().replace(",", ""))
    assert set(unrolled) <= set("EtL|")
    return unrolled.split("|")


def test_megatron() -> None:
    def stages(on: list[int]) -> list[str]:
        return megatron_stages(str(export("megatron", plan_of(on)).files[""]))

    assert stages([0] * 11) == ["EttL"]
    assert stages(CUT) == ["Et", "tL"]
    assert stages(TURNS) == ["E", "t", "t", "L"]  # virtual stages: ranks 0, 1, 0, 1
    assert stages([0] * 8 + [1] * 3) == ["Ett", "L"]
    with pytest.raises(Inexpressible, match="keeps layer 0 of 'layers'"):
        stages(INSIDE)


def test_llama_cpp() -> None:
    where = consumers.first_match
    files = export("llama_cpp", plan_of(TURNS, problem(devices=("cpu:0", "cuda:1")))).files
    text = str(files[""])
    # The embedding and layer 1 are on the CPU; keys and values of layer 0 as the nearest can be.
    assert files[".args"] == "-ngl 2 -dev CUDA1 -ts 2\n"
    assert text == "^blk\\.(1)\\.=CPU,^token_embd=CPU,^blk\\.(0)\\.=CUDA1,^output=CUDA1\n"
    assert where(text, "token_embd.weight") == where(text, "blk.1.attn_q.weight") == "CPU"
    assert where(text, "output_norm.weight") == where(text, "blk.0.ffn_up.weight") == "CUDA1"
    assert where(text, "blk.10.ffn_up.weight") is None
    with pytest.raises(Inexpressible, match="one CPU device"):
        export("llama_cpp", plan_of(CUT, problem(devices=("cpu:0", "cpu:1"))))


SDPA = ("scaled_dot_product_attention", "scaled_dot_product_attention_1")
NETS = {  # not a decoder: operators by module, and what is said
    "convolutions": (("down.0", "down.1", "up"), ("conv2d", "conv2d_1", "conv2d_2"), "looks tok"),
    "labelled": (("label", "down.0", "down.1"), ("embedding", "conv2d", "softmax"), "are convol"),
    "recommender": (("table", "top.0", "top.1"), ("embedding", "linear", "relu"), "no attention"),
    "vision transformer": (("patch", "layers.0", "layers.1"), ("conv2d", *SDPA), "looks tokens up"),
    "encoder": (("embed", "encoder.0", "encoder.1"), ("embedding", *SDPA), r"has .* \('encoder'\)"),
}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", ["vllm", "llama_cpp", "megatron"])
def test_programs_for_language_models_refuse_other_models(name: str, net: str) -> None:
    modules, names, why = NETS[net]
    with pytest.raises(ExportError, match=f"is for language models with decoder layers.*{why}"):
        export(name, plan_of([0, 0, 1], problem(modules, names=names)))


@pytest.mark.parametrize("name", consumers.FAMILIES)
def test_real_decoders_are_told_from_others(name: str) -> None:
    pytest.importorskip("transformers")
    p = consumers.problem_of(consumers.captured(name))
    plan = consumers.placed(p, [0] * p.num_ops)
    for program in ("vllm", "llama_cpp", "megatron"):
        if name in ("llama", "gpt2"):
            assert export(program, plan).files
        else:
            with pytest.raises(ExportError, match="is for language models with decoder layers"):
                export(program, plan)


@pytest.mark.parametrize("name", ["dlrm_tiny", "convnext_tiny", "lstm_tiny", "t5_tiny"])
def test_shipped_models_that_are_no_decoders(name: str) -> None:
    p = consumers.problem_of(capture(*workloads.load(name)))
    for program in ("vllm", "llama_cpp", "megatron"):
        with pytest.raises(ExportError, match=r"decoder layers|no list of layers|do not run one"):
            export(program, consumers.placed(p, [0] * p.num_ops))


def test_deepspeed_says_what_the_layers_are() -> None:
    """``PipelineModule`` takes any list of layers; whose is for the reader to make."""
    modules, names, _ = NETS["convolutions"]
    exported = export("deepspeed", plan_of([0, 1, 1], problem(modules, names=names)))
    layers = ["down.0", "down.1", "behind down.1"]
    expected = {"num_stages": 2, "parts": [0, 1, 3], "layers": layers}
    assert json.loads(exported.files[""]) == expected
    assert "whose layers are those that the file names" in exported.note


# Shared tensors: what each program does with them, as docs/exporters.md says


def tied(on: list[int], devices: tuple[str, ...] = GPUS, mode: str = "") -> Plan:
    """A plan of the decoder, whose head reads the embedding's weight."""
    readers = {k: v for k, v in PARAMETERS.items() if k != "head.weight"}
    readers["embed.weight"] = (1, 10)
    plan = plan_of(on, problem(devices=devices))
    return knowing(plan, parameters=readers, **({"mode": mode} if mode else {}))


def test_torchtitan_has_no_tied_parameters_in_a_pipeline() -> None:
    for on in (CUT, TURNS):
        with pytest.raises(Inexpressible, match=r"'embed' to 'head' \(they share 'embed\.w") as no:
            export("torchtitan", tied(on))
        assert len(set(no.value.nearest.values())) == 1
        config = json.loads(export("torchtitan", moved(tied(on), no.value.nearest)).files[""])
        modules = ["embed", "layers.0", "layers.1", "norm", "head"]
        assert config["module_fqns_per_model_part"] == [modules]


NOTES = [  # an exporter, a plan, and what the note says or does not
    ("megatron", plan_of(CUT), "--untie-embeddings-and-output-weights;", True),
    ("megatron", tied(CUT), "--untie", False),
    ("megatron", tied(CUT), "the last stage has a copy of the tied embedding", True),
    ("vllm", tied(CUT), "last rank has a copy of the tied embedding", True),
    ("vllm", plan_of(CUT), "copy", False),
    ("vllm", tied([0] * 11), "copy", False),
    ("torch_pipelining", plan_of(CUT), "copy", False),
    ("torch_pipelining", tied(CUT), "each of its stages has a copy of embed.weight", True),
    ("torch_pipelining", tied(CUT, mode="training"), "add the gradients of the copies up", True),
]


@pytest.mark.parametrize(("name", "plan", "text", "is_said"), NOTES)
def test_notes_say_what_becomes_of_a_tied_parameter(name, plan, text, is_said):
    assert (text in export(name, plan).note) == is_said


def test_deepspeed_names_layers_that_must_be_tied() -> None:
    exported = export("deepspeed", tied(CUT))
    assert json.loads(exported.files[""])["tied"] == {"embed.weight": [0, 3]}
    assert "layers that share embed.weight are TiedLayerSpec with one key" in exported.note
    assert "tied" not in json.loads(export("deepspeed", plan_of(CUT)).files[""])


def test_torch_gives_stages_copies_whose_gradients_nobody_adds_up() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    pipe = pipeline(model, (torch.arange(6),), split_spec={"1": SplitPoint.BEGINNING})
    first, last = pipe.get_stage_module(0), pipe.get_stage_module(1)
    a, b = first.get_parameter("0.weight"), last.get_parameter("2.weight")
    assert a is not b and torch.equal(a, b)
    last(*pytree.tree_leaves(first(torch.arange(6))))[0].square().sum().backward()
    assert a.grad is not None and b.grad is not None and not torch.equal(a.grad, b.grad)


def test_llama_cpp_makes_a_tied_head_of_the_embedding() -> None:
    mixed = ("cpu:0", "cuda:1")
    on = [0, 0, *[1] * 9]  # the embedding on the CPU, the head on the GPU: no rule for either
    exported = export("llama_cpp", tied(on, mixed))
    rules = str(exported.files[""])
    assert consumers.first_match(rules, "token_embd.weight") is None
    assert exported.files[".args"] == "-ngl 3 -dev CUDA1 -ts 3\n"
    assert "the tied head is on CUDA1" in exported.note
    for both, args in (
        ([0] * 11, "-ngl 0\n"),  # on one device: one rule
        ([0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0], "-ngl 3 -dev CUDA1 -ts 3\n"),
    ):
        exported = export("llama_cpp", tied(both, mixed))
        assert consumers.first_match(str(exported.files[""]), "token_embd.weight") == "CPU"
        assert exported.files[".args"] == args and "elsewhere" not in exported.note
    with pytest.raises(Inexpressible, match=r"a rule for token_embd\.weight moves both") as no:
        export("llama_cpp", tied(CUT))
    assert [op for op, d in no.value.nearest.items() if d == "cuda:0"] == NAMES[2:5]
    # In turns, the head's device is the last that the options name.
    devices = ("cpu:0", "cuda:0", "cuda:1")
    turned = export("llama_cpp", tied([0, 0, 1, 1, 1, 2, 2, 2, 1, 1, 1], devices))
    assert turned.files[".args"] == "-ngl 3 -dev CUDA1,CUDA0 -ts 1,2\n"


@pytest.mark.parametrize("name", ["vllm", "megatron", "llama_cpp", "torchtitan", "huggingface"])
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=len(MODULES), max_size=len(MODULES)))
def test_the_nearest_plan_of_a_tied_model_is_expressible(name: str, on: list[int]) -> None:
    check_exporter(exporters.load(name), [tied(on), tied(on, ("cpu:0", "cuda:0"))])


def test_an_onnx_initializer_has_no_device_of_its_own(tmp_path: Path) -> None:
    """Both readers of ``w`` say where they run; a runtime gives each of their devices a copy."""
    path, plan = onnx_plan(tmp_path, ("cpu:0", "cuda:1"), [0, 1, 1, 1])
    import onnx

    model = onnx.load_from_string(export("onnx", plan, model=path).files[""])
    named = {s.tensor_name for n in model.graph.node for c in n.device_configurations
             for s in c.sharding_spec}  # fmt: skip
    assert [x.name for x in model.graph.initializer] == ["w"] and "w" not in named
    annotated = onnx.load_from_string(export("onnxruntime", plan, model=path).files[""]).graph
    assert [len(n.metadata_props) for n in annotated.node if "w" in n.input] == [1, 1]
    assert [x.name for x in annotated.initializer] == ["w"]


# torchtitan and torch.distributed.pipelining


def test_torchtitan() -> None:
    def config(on: list[int]) -> Any:
        return json.loads(export("torchtitan", plan_of(on)).files[""])

    assert config(CUT) == {
        "module_fqns_per_model_part": [["embed", "layers.0"], ["layers.1", "norm", "head"]],
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": "1F1B",
    }
    turns, parts = config(TURNS), [["embed"], ["layers.0"], ["layers.1"], ["norm", "head"]]
    assert turns["module_fqns_per_model_part"] == parts
    assert turns["pipeline_parallel_schedule"] == "Interleaved1F1B"
    with pytest.raises(Inexpressible, match=r"keeps 'layers\.0' on one device"):
        config(INSIDE)


def training(scheduler: str) -> Plan:
    """Two layers, forward and backward, of which a scheduler makes the order."""
    names = ("a", "b", "b_backward", "a_backward")
    p = problem(("layers.0", "layers.1", "layers.1", "layers.0"), names=names, num_backward=2)
    on = np.array([0, 1, 1, 0], np.int32)
    schedule = load_scheduler(scheduler)(p, on, p.num_microbatches)
    return plan_of(on.tolist(), p, schedule=schedule)


def accepted_by_torch(plan: Plan) -> list[str]:
    """The actions of each rank, once torch has found them complete and in order."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows = str(export("torchtitan", plan).files[".csv"]).splitlines()
    actions = {k: [*map(schedules._Action.from_str, x.split(","))] for k, x in enumerate(rows)}
    assert schedules._validate_schedule(actions, 2, 2, plan.num_microbatches) == {0: 0, 1: 1}
    return rows


def test_order_as_actions_of_torch() -> None:
    plan = training("one_f_one_b")
    # a: |0F0 0F1 0B0 0F2 0B1 ...|  with the last stage one forward, one backward
    rows = ["0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3", "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"]
    assert accepted_by_torch(plan) == rows
    schedule = json.loads(export("torchtitan", plan).files[""])["pipeline_parallel_schedule"]
    assert schedule == "_PipelineScheduleRuntime"
    accepted_by_torch(training("gpipe"))


def test_gradients_that_run_together_are_one_backward() -> None:
    """Torch wants weights' behind inputs', which the first stage may not have."""
    names = ("a", "b", "b_backward", "b_weight_backward", "a_weight_backward")
    p = problem([f"layers.{x.startswith('b'):d}" for x in names], names=names, num_backward=3)
    late = [("b", 0), (names[2], 0), ("b", 1), (names[3], 0), (names[2], 1), (names[3], 1)]
    order = {
        "cuda:0": tuple((op, m) for m in range(4) for op in (names[0], names[4])),
        "cuda:1": (*late, *((op, m) for m in (2, 3) for op in names[1:4])),
    }
    plan = plan_of([0, 1, 1, 1, 0], p).model_copy(update={"order": order})
    rows = ["0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3", "1F0,1I0,1F1,1W0,1B1,1F2,1B2,1F3,1B3"]
    assert accepted_by_torch(plan) == rows


def test_an_order_that_leaves_a_stage_half_way_is_refused() -> None:
    p = problem(("layers.0", "layers.0", "layers.1", ""), num_backward=1)
    plan = plan_of([0, 0, 1, 1], p)
    order = {
        "cuda:0": tuple((op, m) for op in ("op0", "op1") for m in range(4)),
        "cuda:1": tuple((op, m) for m in range(4) for op in ("op2", "op3")),
    }
    plan = plan.model_copy(update={"order": order})
    with pytest.raises(Inexpressible, match="leaves 0F0 on 'cuda:0' half-way") as caught:
        export("torchtitan", plan)
    assert ".csv" not in export("torchtitan", moved(plan, caught.value.nearest)).files


def test_split_points() -> None:
    def points(on: list[int]) -> Any:
        data = json.loads(export("torch_pipelining", plan_of(on)).files[".json"])
        return data["split_points"], data["schedule"]

    assert points(CUT) == (["layers.1.attn"], "GPipe")
    assert points(INSIDE) == (["layers.0.mlp"], "GPipe")
    assert points(TURNS) == (["layers.0.attn", "layers.1.attn", "norm"], "LoopedBFS")
    with pytest.raises(Inexpressible, match=r"it keeps what runs from 'layers\.0\.attn' to the"):
        points([0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])  # no module begins at the addition


def test_who_trains_brings_the_target_to_the_loss() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    example = torch.randn(2, 8), torch.randn(2, 8)
    graph = capture(layers, example, mode="training", loss=nn.functional.mse_loss)
    p = consumers.problem_of(graph, ("cpu:0", "cpu:1"))
    plan = consumers.placed(p, [int(module not in ("0", "1")) for module in graph.op_module])
    data = json.loads(export("torch_pipelining", plan).files[".json"])
    assert data["split_points"] == ["2"] and len(data["ranks"]) == 2


def test_torch_is_not_asked_for_1f1b_of_fewer_micro_batches_than_it_takes() -> None:
    for turns, counts in ([0, 1], {1: "GPipe", 2: "1F1B"}), ([0, 1, 0, 1], {4: "Int", 5: "Loop"}):
        names = [f"op{i}" for i in range(len(turns))]
        names += [f"{x}_backward" for x in names[::-1]]
        layers = [f"layers.{i}" for i in range(len(turns))]
        p = problem(layers + layers[::-1], names=names, num_backward=len(turns))
        plan = plan_of(turns + turns[::-1], p)
        for count, schedule in counts.items():
            some = plan.model_copy(update={"num_microbatches": count})
            exported = export("torch_pipelining", some)
            assert json.loads(exported.files[".json"])["schedule"].startswith(schedule)


@pytest.mark.parametrize("name", consumers.FAMILIES)
def test_torch_pipelining_splits_any_cut(name: str) -> None:
    """A sample of all contiguous cuts: torch finds the stages; they compute what the model does."""
    pytest.importorskip("transformers")
    module, inputs = consumers.family(name)
    p = consumers.problem_of(consumers.captured(name), ("cpu:0", "cpu:1"))
    with torch.no_grad():
        expected = consumers.tensors(module(**inputs))
    random, seen = np.random.default_rng(1), set()
    for plan in consumers.cuts(p, random.integers(1, p.num_ops, 2)):
        exported = export("torch_pipelining", nearest_of("torch_pipelining", plan))
        seen.add(tuple(json.loads(exported.files[".json"])["split_points"]))
    for points in seen:
        with torch.no_grad():
            split = dict.fromkeys(points, SplitPoint.BEGINNING)
            again = consumers.family(name)[0]
            args = tensors_only(again, inputs | {"return_dict": True})
            pipe = pipeline(again, args, split_spec=split)
            for i in range(pipe.num_stages):
                send_contiguous(pipe.get_stage_module(i))
            results = consumers.tensors(pipe(*args))
        assert pipe.num_stages == len(points) + 1 and past_a_stage(pipe.split_gm.graph) is None
        torch.testing.assert_close(results, expected)
        stages = [n for n in pipe.split_gm.graph.nodes if n.op == "call_module"]
        assert all(x.op != "placeholder" for n in stages[1:] for x in n.all_input_nodes)


HOSTILE = "x'); __import__('os').system('touch pwned'); ('"


def test_hostile_names_are_data_in_scripts() -> None:
    p = problem(("a", f'{HOSTILE}"', "c"), names=("a", '"""', f"${{{HOSTILE}}}"))
    exported = export("torch_pipelining", plan_of([0, 1, 1], p))
    script = str(exported.files[""])
    ast.parse(script)
    assert script == str(export("torch_pipelining", plan_of(CUT)).files[""])  # the same for all
    assert json.loads(exported.files[".json"])["split_points"] == [f'{HOSTILE}"']


def cores_plan(mode: str) -> Plan:
    """The three layers of a small model on two cores: in turns, or to be trained by 1F1B."""
    module, example, loss = workloads.load_training("tiny_mlp")
    how = {"mode": "training", "loss": loss} if mode == "training" else {}
    graph = capture(module, example if how else example[0], **how)
    p = consumers.problem_of(graph, ("cpu:0", "cpu:1"))
    first = {"0", "1", "2" if how else "4"}
    return consumers.placed(p, [int(m not in first) for m in graph.op_module])


def test_torchrun_trains_as_the_module_does(tmp_path: Path) -> None:
    """Two processes over gloo: losses are those of the plain module.

    Inference in turns: ``tests/executor/test_distributed.py``.
    """
    plan, script = tmp_path / "plan.json", tmp_path / "run.py"
    cores_plan("training").save(plan)
    assert main(["export", str(plan), "--to", "torch_pipelining", "--out", str(script)]) == 0
    assert json.loads(script.with_suffix(".json").read_text())["split_points"] == ["3"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(script), "placement.workloads.tiny:tiny_mlp"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=env)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["stages"], answer["schedule"]) == (2, "1F1B") and answer["equal"]


def test_connections_past_a_stage_are_found() -> None:
    def stages(*reads: tuple[int, ...]) -> fx.Graph:
        """Stage i + 1 reads one of the outputs of each of the stages ``reads[i]``."""
        graph = fx.Graph()
        nodes = [graph.call_module("submod_0", (graph.placeholder("x"),))]
        for i, sources in enumerate(reads):
            parts = [graph.call_function(operator.getitem, (nodes[s], 0)) for s in sources]
            nodes.append(graph.call_module(f"submod_{i + 1}", tuple(parts)))
        graph.output(nodes[-1])
        return graph

    assert past_a_stage(stages((0,), (1,), (2,))) is None
    assert past_a_stage(stages((0,), (1,), (2, 0))) == (0, 3)
    assert past_a_stage(stages((0,), (1, 0), (2,))) == (0, 2)


def test_every_device_has_one_stage_if_asked() -> None:
    assert len(json.loads(export("torch_pipelining", plan_of(TURNS)).files[".json"])["ranks"]) == 2
    with pytest.raises(Inexpressible) as caught:
        export("torch_pipelining", plan_of(TURNS), once="true")
    names = list(caught.value.nearest.values())
    again = plan_of([GPUS.index(name) for name in names])
    data = json.loads(export("torch_pipelining", again, once="true").files[".json"])
    assert len(data["split_points"]) == 1 and data["schedule"] == "GPipe"


def test_plans_of_training_know_modules_and_parameters() -> None:
    graph = cores_plan("training").graph
    assert [graph.modules[i] for i in graph.backward][-3:] == ["2", "1", "0"]
    assert graph.parameters["0.weight"] == (graph.modules.index("0"),)
    assert set(graph.parameters) == {f"{i}.{x}" for i in (0, 2, 4) for x in ("weight", "bias")}


# ONNX files


def onnx_plan(folder: Path, devices: tuple[str, ...], on: list[int]) -> tuple[str, Plan]:
    """Gemm, Relu, Gemm with a constant in between, named as a hostile file would; and its plan."""
    onnx = pytest.importorskip("onnx")
    from onnx import helper, numpy_helper

    weight = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    half = numpy_helper.from_array(np.full(4, 0.5, np.float32))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first);cpu(=x"),
        helper.make_node("Constant", [], ["scale"], value=half),
        helper.make_node("Relu", ["a"], ["b"], name="$(touch pwned)"),
        helper.make_node("Mul", ["b", "scale"], ["c"]),
        helper.make_node("MatMul", ["c", "w"], ["y"], name="last"),
    ]
    x, y = (helper.make_tensor_value_info(v, onnx.TensorProto.FLOAT, [2, 4]) for v in "xy")
    graph = helper.make_graph(nodes, "small", [x], [y], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    path = str(folder / "model.onnx")
    onnx.save(model, path)
    described = (Device(d, d.partition(":")[0], like=None, memory_bytes=10**9) for d in devices)
    p = importers.load(path, cluster=Cluster("any", tuple(described)))
    return path, make_plan(p, Solution(np.array(on, np.int32), 1.0), planner="by hand")


X = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_onnx_file_says_where_its_nodes_run(tmp_path: Path) -> None:
    path, plan = onnx_plan(tmp_path, GPUS, [0, 1, 1, 0])
    import onnx
    from onnx.reference import ReferenceEvaluator

    model = onnx.load_from_string(export("onnx", plan, model=path).files[""])
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == 11
    told = [(c.name, c.num_devices, list(c.device)) for c in model.configuration]
    assert told == [("placement", 2, [*GPUS])]
    every = [[(c, s) for c in n.device_configurations for s in c.sharding_spec]
             for n in model.graph.node]  # fmt: skip
    stages = [[(c.pipeline_stage, s.tensor_name, *s.device) for c, s in some] for some in every]
    assert stages == [[(0, "a", 0)], [], [(1, "b", 1)], [(1, "c", 1)], [(2, "y", 0)]]
    before, after = (ReferenceEvaluator(m).run(None, {"x": X}) for m in (onnx.load(path), model))
    np.testing.assert_array_equal(before, after)
    # Written again, the configuration is replaced, another one is kept.
    onnx.save(model, path)
    other = export("onnx", plan, model=path, configuration="other").files[""]
    assert [c.name for c in onnx.load_from_string(other).configuration] == ["placement", "other"]
    again = export("onnx", plan, model=path).files[""]
    assert onnx.load_from_string(again) == model


@pytest.mark.parametrize("name", ["model.json", "model.pbtxt", "model.onnxtxt", "model"])
def test_an_onnx_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    path, plan = onnx_plan(tmp_path, GPUS, [0, 1, 1, 0])
    Path(path).rename(tmp_path / name)
    assert export("onnx", plan, model=str(tmp_path / name)).files
    (tmp_path / name).write_bytes(b"\xff{")
    with pytest.raises(ExportError, match="cannot be read as an ONNX file"):
        export("onnx", plan, model=str(tmp_path / name))


def test_onnx_errors(tmp_path: Path) -> None:
    path, plan = onnx_plan(tmp_path, GPUS, [0, 1, 1, 0])
    with pytest.raises(ExportError, match=r"name the ONNX file .* model=model\.onnx"):
        export("onnx", plan)
    with pytest.raises(ExportError, match="is about another model: 11 of its 11 operators"):
        export("onnx", plan_of(CUT), model=path)


def test_functions_of_an_onnx_file_are_inlined_as_by_the_importer(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx import helper

    inner = [helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Neg", ["b"], ["c"])]
    opset = [helper.make_opsetid("", 18)]
    twice = helper.make_function("own", "Twice", ["a"], ["c"], inner, opset)
    values = [helper.make_tensor_value_info(v, onnx.TensorProto.FLOAT, [2, 4]) for v in "xy"]
    node = helper.make_node("Twice", ["x"], ["y"], name="call", domain="own")
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    sets = [*opset, helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, ir_version=10, opset_imports=sets, functions=[twice])
    path = str(tmp_path / "model.onnx")
    onnx.save(model, path)
    cluster = Cluster("any", tuple(Device(d, "cuda", memory_bytes=10**9) for d in GPUS))
    p = importers.load(path, cluster=cluster)
    plan = make_plan(p, Solution(np.array([0, 1], np.int32), 1.0), planner="by hand")
    written = onnx.load_from_string(export("onnx", plan, model=path).files[""])
    assert [n.op_type for n in written.graph.node] == ["Relu", "Neg"] and not written.functions


def test_onnxruntime_settings(tmp_path: Path) -> None:
    path, plan = onnx_plan(tmp_path, ("cpu:0", "cuda:1"), [0, 1, 1, 0])
    import onnx

    exported = export("onnxruntime", plan, model=path)
    settings = {"session.layer_assignment_settings": "cpu(=placement_0); gpu:1(=placement_1)"}
    assert json.loads(exported.files[".json"]) == settings
    nodes = onnx.load_from_string(exported.files[""]).graph.node
    layers = [{p.key: p.value for p in n.metadata_props}.get("layer_ann") for n in nodes]
    assert layers == [None if d is None else f"placement_{d}" for d in (0, None, 1, 1, 0)]
    _, two = onnx_plan(tmp_path, GPUS, [0, 1, 1, 1])
    with pytest.raises(Inexpressible, match="are one device") as caught:
        export("onnxruntime", two, model=path)
    assert set(caught.value.nearest.values()) == {"cuda:1"}
    _, far = onnx_plan(tmp_path, ("h1/cuda:1",), [0, 0, 0, 0])
    gpus = tuple(d.model_copy(update={"kind": "cuda"}) for d in far.cluster.devices)
    known = far.cluster.model_copy(update={"devices": gpus})
    with pytest.raises(ExportError, match="knows GPUs by number: device 'h1/cuda:1'"):
        export("onnxruntime", far.model_copy(update={"cluster": known}), model=path)
    _, odd = onnx_plan(tmp_path, ("npu:0",), [0, 0, 0, 0])
    with pytest.raises(ExportError, match="no execution provider is known for 'npu:0'"):
        export("onnxruntime", odd, model=path)


def test_onnxruntime_runs_the_annotated_model(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    path, plan = onnx_plan(tmp_path, ("cpu:0",), [0, 0, 0, 0])
    exported = export("onnxruntime", plan, model=path)
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    for key, value in json.loads(exported.files[".json"]).items():
        options.add_session_config_entry(key, value)  # a wrong grammar raises below
    here = ["CPUExecutionProvider"]
    session = runtime.InferenceSession(exported.files[""], options, providers=here)
    plain = runtime.InferenceSession(path, providers=here)
    np.testing.assert_array_equal(session.run(None, {"x": X}), plain.run(None, {"x": X}))


def test_openvino_takes_the_affinities(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    core = openvino.Core()
    path, plan = onnx_plan(tmp_path, ("cpu:0",), [0, 0, 0, 0])
    model = core.read_model(path)
    expected = core.compile_model(path, "CPU")([X])[0]
    affinity = json.loads(export("openvino", plan, model=path).files[""])
    for node in model.get_ordered_ops():
        node.get_rt_info()["affinity"] = affinity[node.get_friendly_name()]
    np.testing.assert_allclose(core.compile_model(model, "HETERO:CPU")([X])[0], expected)


def test_openvino_covers_every_node(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    path, plan = onnx_plan(tmp_path, ("cpu:0", "gpu:1"), [0, 1, 1, 0])
    exported = export("openvino", plan, model=path)
    assert "HETERO:CPU,GPU.1" in exported.note or "HETERO:GPU.1,CPU" in exported.note
    affinity = json.loads(exported.files[""])
    model = openvino.Core().read_model(path)
    of = {x.get_friendly_name(): affinity[x.get_friendly_name()] for x in model.get_ordered_ops()}
    of_type = {x.get_type_name(): of[x.get_friendly_name()] for x in model.get_ordered_ops()}
    assert of_type["Relu"] == of_type["Multiply"] == of["scale"] == "GPU.1"
    assert of_type["Parameter"] == of_type["Result"] == of["last" if "last" in of else "y"] == "CPU"
    named = onnx_plan(tmp_path, GPUS, [0, 0, 1, 1])[1]
    with pytest.raises(ExportError, match="knows no device 'cuda:0'"):
        export("openvino", named, model=path)
    both = export("openvino", named, model=path, devices="cuda:0=GPU.0,cuda:1=CPU")
    assert set(json.loads(both.files[""]).values()) == {"GPU.0", "CPU"}
    with pytest.raises(Inexpressible, match=r"are one device \(CPU\)"):
        export("openvino", named, model=path, devices="cuda:0=CPU,cuda:1=CPU")


# The command


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """A plan that vLLM cannot express, and the problem it is for."""
    p = problem()
    plan_of(INSIDE, p).save(tmp_path / "plan.json")
    importers.save(p, tmp_path / "problem.json")
    return tmp_path / "plan.json", tmp_path / "problem.json"


def test_list(says: Any) -> None:
    listed = says(["export", "--list", "--json"]).json["exporters"]
    assert [row["name"] for row in listed] == exporters.names()
    assert max(map(len, says(["export", "--list"]).out.splitlines())) <= 80


def test_command(saved: tuple[Path, Path], says: Any) -> None:
    plan, model = saved
    out = plan.with_name("out.env")
    assert "operator 'op4'" in says(["export", plan, "--to", "vllm", "--out", out], 1).err
    refused = says(["export", plan, "--to", "vllm", "--out", out, "--json"], 1).json
    assert refused["files"] == [] and "operator 'op4'" in refused["note"]
    assert not out.exists()
    nearest = ["export", str(plan), "--to", "vllm", "--out", str(out), "--nearest", "--json"]
    stderr = says([*nearest, "layers=layers"])
    assert json.loads(stderr.out)["moved"] == {"op4": "cuda:0"}
    assert json.loads(stderr.out)["predicted"] is None  # never a figure that nobody computed
    assert "1 of 11 operators move; what that costs is not known" in stderr.err
    assert "to know: --model MODEL, or --profile FILE" in stderr.err
    assert out.read_text().endswith("VLLM_PP_LAYER_PARTITION=1,1\n")
    # 4 + 7 operators of 1 s against 5 + 6
    predicted = says([*nearest, "--model", model]).json["predicted"]
    assert predicted == {"latency_s": [11.0, 11.0], "period_s": [7.0, 6.0]}


def test_an_option_may_have_any_name() -> None:
    for package in (exporters, planners, schedulers, predictors):
        for option in ("name", "self"):
            with pytest.raises(ValueError, match=f"has no option '{option}'"):
                package.load(package.names()[0], **{option: "x"})


def test_nearest_that_does_not_fit_is_refused(tmp_path: Path, says: Any) -> None:
    p = problem(heavy=(0, 4))  # operator 4 would join operator 0
    plan, model, out = (tmp_path / x for x in ("plan.json", "problem.json", "out"))
    plan_of(INSIDE, p).save(plan)
    importers.save(p, model)
    command = ["export", str(plan), "--to", "vllm", "--out", str(out), "--nearest"]
    answer = says([*command, "--model", model, "--json"], 1)
    assert "does not fit: device 'cuda:0' needs 1,200,0" in answer.err
    assert json.loads(answer.out)["files"] == [] and json.loads(answer.out)["note"] in answer.err
    assert not out.exists()


def test_usage_errors(saved: tuple[Path, Path], says: Any, monkeypatch: Any) -> None:
    plan, model = saved

    def error(*words: str | Path) -> str:
        return str(says(["export", plan, *words], 2).err)

    out = str(plan.with_name("x.json"))
    profile = ["--to", "csv", "--out", out, "--profile", "x.npz"]
    for words, message in (
        ([], "missing: --to NAME, --out FILE; exporters: placement export --list"),
        (["--to", "x", "--out", out], "no exporter 'x'; exporters are"),
        (["layers", "--to", "vllm", "--out", out], "exporter options are given as option=value"),
        (profile, "name the file with --model FILE"),
        ([*profile, "--model", model], "--profile is for models"),
        (["--to", "csv", "--out", str(plan)], "is in use; name another file"),
    ):
        assert message in error(*words)
    for name in ("plan.py", "x.json"):  # never over the plan itself, nor two contents into one file
        said = error("--to", "torch_pipelining", "--out", str(plan.with_name(name)))
        where = f"a .json is written beside it, and {plan.with_name(name).stem}"
        assert where in said.replace(f"{plan.parent}{os.sep}", "")
    assert not Path(out).exists()
    read = plan.with_name("net.onnx")
    read.write_bytes(b"a model")
    monkeypatch.setattr("placement.exporters.onnx.Onnx.__call__", lambda *_: Exported({"": ""}, ""))
    words = [f"model={read}", "--to", "onnx", "--out", str(read)]
    assert "net.onnx is in use; name another file" in error(*words)
    assert read.read_bytes() == b"a model"


def test_export_needs_no_torch(saved: tuple[Path, Path]) -> None:
    code = (
        "import sys; from placement.__main__ import main; "
        f"code = main(['export', {str(saved[0])!r}, '--to', 'huggingface', '--out', "
        f"{str(saved[0].with_name('map.json'))!r}]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
