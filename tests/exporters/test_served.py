"""Plans of language models without weights, in the formats of what serves them, and read back."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placement.cli import BAD_INPUT, NO, OK
from placement.cli.audit import llama_cpp_buffers, onnxruntime_nodes
from placement.cluster import Cluster, Device
from placement.costs.serving import Serving, serving_problem
from placement.exporters import ExportError, Inexpressible, load
from placement.graph import OpGraph
from placement.importers import load_decoder
from placement.plan import Plan, make_plan
from placement.problem import Solution
from tests.consumers import first_match, placed, problem_of
from tests.served import LLAMA, MIXTRAL, gguf_llama
from tests.served import decoder as read_config

FOUR = {"num_hidden_layers": 4, "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
GPUS = ("cuda:0", "cuda:1")
MIXED = ("cuda:0", "cuda:1", "cpu:0")


def plan_of(config: Any, on: list[int], names: tuple[str, ...] = GPUS) -> Plan:
    """A plan with the parts of a model on these devices."""
    decoder = load_decoder(config) if isinstance(config, str) else read_config(config)
    likes = {"cpu": "amd/epyc-7763", "cuda": "nvidia/rtx-4090", "rocm": "amd/mi210"}
    kinds = [n.rpartition("/")[2].partition(":")[0] for n in names]
    pairs = zip(names, kinds, strict=True)
    devices = tuple(Device(n, k, like=likes[k], memory_bytes=24 * 10**9) for n, k in pairs)
    asked = Serving("decode", 64, whole_layers=False)
    problem = serving_problem(decoder, Cluster("c", devices), asked)
    return make_plan(problem, Solution(np.array(on, np.int32), 1.0), planner="by hand")


DENSE = LLAMA | FOUR
# embedding, four layers of attention and feed-forward, norm, head
HALVES = [0] * 5 + [1] * 6


def test_layers_as_pipelines() -> None:
    plan = plan_of(DENSE, HALVES)
    assert "VLLM_PP_LAYER_PARTITION=2,2\n" in str(load("vllm")(plan).files[""])
    assert load("megatron")(plan).files[""] == "Et*2|t*2L\n"
    layers = [f"model.layers.{i}" for i in range(4)]
    layers = ["before model.layers.0", *layers, "behind model.layers.3"]
    expected = {"num_stages": 2, "parts": [0, 3, 6], "layers": layers}
    assert json.loads(load("deepspeed")(plan).files[""]) == expected
    assert json.loads(load("torchtitan")(plan).files[""])["module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "layers.3", "norm", "lm_head"],
    ]
    split = plan_of(DENSE, [0, 0, 1, *[1] * 8])  # in the middle of a layer
    for name in ("vllm", "megatron", "deepspeed", "torchtitan"):
        with pytest.raises(Inexpressible, match="on one device"):
            load(name)(split)
    # ``PipelineModule``: stage i has ``layers[parts[i]:parts[i + 1]]``; devices come once.
    with pytest.raises(Inexpressible, match="come in the order"):
        load("deepspeed")(plan_of(DENSE, [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1]))


@pytest.mark.parametrize("tied", [False, True])
def test_accelerate_takes_the_device_map(tied: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    import torch

    config = DENSE | {"tie_word_embeddings": tied}
    on = [0] * 5 + [1] * 4 + [0] * 2 if tied else HALVES
    exported = load("huggingface")(plan_of(config, on))
    where = json.loads(exported.files[""])
    with torch.device("meta"):
        described = transformers.AutoConfig.for_model(**config)
        model = transformers.AutoModelForCausalLM.from_config(described)
    accelerate.utils.check_device_map(model, where)  # raises for what is not covered
    assert where["model.layers.1"] == "cuda:0" and where["model.layers.2"] == "cuda:1"
    assert where["lm_head"] == ("cuda:0" if tied else "cuda:1")
    limits = {int(k): v for k, v in json.loads(exported.files[".max_memory.json"]).items()}
    assert limits == {0: 24 * 10**9, 1: 24 * 10**9}
    # What accelerate itself makes of these limits is a map of the same modules.
    whole = {"no_split_module_classes": model._no_split_modules}
    own = accelerate.infer_auto_device_map(model, limits, **whole)
    assert set(own) <= {"", *where, "model", "model.rotary_emb"}


def test_tied_parameters_are_on_one_device() -> None:
    with pytest.raises(Inexpressible, match=r"tensors on|planned on"):
        load("huggingface")(plan_of(DENSE | {"tie_word_embeddings": True}, HALVES))


def test_modules_of_a_gguf_file_are_not_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf_llama())
    plan = plan_of(str(tmp_path / "m.gguf"), HALVES)
    assert "=2,2\n" in str(load("vllm")(plan).files[""])
    with pytest.raises(ExportError, match=r"plan its config\.json"):
        load("huggingface")(plan)
    with pytest.raises(ExportError, match="plan its text_config"):
        load("huggingface")(plan_of({"model_type": "llava", "text_config": DENSE}, HALVES))


# --- llama.cpp -----------------------------------------------------------------------------------


def layer_devices(args: str, num_layers: int) -> list[str]:
    """``get_layer_buft_list`` of llama.cpp: devices of the layers and of the output."""
    words = args.split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    on_gpus = min(int(options["-ngl"]), num_layers + 1)
    names = options.get("-dev", "").split(",")
    ends = np.cumsum([np.float32(x) for x in options.get("-ts", "1").split(",")])
    ends = ends / ends[-1]
    start = max(num_layers + 1 - on_gpus, 0)
    devices = []
    for layer in range(num_layers + 1):
        share = np.float32(layer - start) / np.float32(max(on_gpus, 1))
        is_host = layer < start
        devices.append("CPU" if is_host else names[int(np.searchsorted(ends, share, "right"))])
    return devices


def test_experts_are_rules_of_their_own() -> None:
    # Of Mixtral: embedding, layers of attention, router and experts, norm, head.
    on = [2, *[0, 0, 2], *[0, 0, 1], *[1, 1, 1], *[1, 1, 2], 1, 1]
    exported = load("llama_cpp")(plan_of(MIXTRAL | FOUR, on, MIXED))
    rules, args = str(exported.files[""]), str(exported.files[".args"])
    assert layer_devices(args, 4) == ["CUDA0", "CUDA0", "CUDA1", "CUDA1", "CUDA1"]
    expected = {
        "token_embd.weight": "CPU",
        "blk.0.attn_q.weight": "CUDA0", "blk.0.ffn_gate_inp.weight": "CUDA0",
        "blk.0.ffn_up_exps.weight": "CPU", "blk.0.ffn_down_exps.weight": "CPU",
        "blk.1.ffn_up_exps.weight": "CUDA1", "blk.1.ffn_norm.weight": "CUDA0",
        "blk.2.ffn_up_exps.weight": "CUDA1", "blk.3.ffn_gate_exps.weight": "CPU",
        "blk.3.attn_k.weight": "CUDA1", "output.weight": "CUDA1", "output_norm.weight": "CUDA1",
    }  # fmt: skip
    assert {name: first_match(rules, name) for name in expected} == expected


@pytest.mark.parametrize("first", range(5))
@pytest.mark.parametrize("second", range(5))
def test_any_split_of_layers_is_where_it_should_be(first: int, second: int) -> None:
    """Layers of the processor first, then of one GPU and of the other: keys and values too."""
    if first + second > 4:
        return
    layer = [2] * first + [0] * second + [1] * (4 - first - second)
    on = [2, *(d for d in layer for _ in range(2)), 1, 1]
    exported = load("llama_cpp")(plan_of(DENSE, on, MIXED))
    names = ["CUDA0", "CUDA1", "CPU"]
    devices = layer_devices(str(exported.files[".args"]), 4)
    assert devices == [*(names[d] for d in layer), "CUDA1"]
    assert "elsewhere" not in exported.note


def test_a_device_that_comes_twice_or_has_tensors_alone_is_said() -> None:
    exported = load("llama_cpp")(plan_of(DENSE, [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1]))
    assert "keys and values of some layers are elsewhere" in exported.note
    assert first_match(str(exported.files[""]), "blk.2.attn_q.weight") == "CUDA0"
    exported = load("llama_cpp")(plan_of(DENSE, [0, 0, 1, *[0] * 8]))
    assert exported.files[".args"] == "-ngl 5 -dev CUDA0,CUDA1 -ts 5,0\n"
    assert first_match(str(exported.files[""]), "blk.0.ffn_up.weight") == "CUDA1"
    assert first_match(str(exported.files[""]), "blk.0.attn_q.weight") == "CUDA0"


def test_servers_of_other_hosts() -> None:
    names = ("cuda:0", "attic/cuda:0", "attic/cuda:1", "cellar/cuda:0")
    on = [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
    exporter = load("llama_cpp", rpc="attic=10.0.0.2:50052,cellar=cellar.lan:50053")
    exported = exporter(plan_of(DENSE, on, names))
    assert exported.files[".args"] == (
        "--rpc 10.0.0.2:50052,cellar.lan:50053 -ngl 5 -dev CUDA0,RPC0,RPC1,RPC2 -ts 1,1,1,2\n"
    )
    rules = str(exported.files[""])
    assert first_match(rules, "blk.2.attn_q.weight") == "RPC1[10.0.0.2:50052]"
    assert first_match(rules, "blk.3.attn_q.weight") == "RPC0[cellar.lan:50053]"
    for wrong in ("attic", "attic=10.0.0.2", "attic=$(id):1", "=10.0.0.2:1"):
        with pytest.raises(ExportError, match="give NODE=HOST:PORT"):
            load("llama_cpp", rpc=wrong)(plan_of(DENSE, on, names))
    with pytest.raises(ExportError, match="no buffer type"):
        load("llama_cpp")(plan_of(DENSE, on, names))


# --- what is left to the processor ---------------------------------------------------------------

# Of Mixtral: embedding, layers of attention, router and experts, norm, head.
FIRST_TWO = [0, *[0, 0, 1] * 2, *[0, 0, 0] * 2, 0, 0]
ONE = ("cuda:0", "cpu:0")


def test_llama_cpp_says_from_which_batch_on_copies_pay() -> None:
    plan = plan_of(MIXTRAL | FOUR, FIRST_TWO, ONE)
    exported = load("llama_cpp")(plan)
    assert set(exported.files) == {"", ".args"} and "-ncmoe 2 in place of -ot" in exported.note
    facts = plan.provenance.profile | {"offload_min_batch": 130}
    provenance = plan.provenance.model_copy(update={"profile": facts})
    plan = plan.model_copy(update={"provenance": provenance})
    exported = load("llama_cpp")(plan)
    assert exported.files[".env"] == "GGML_OP_OFFLOAD_MIN_BATCH=130\n"
    assert exported.note.startswith("env $(cat FILE.env) llama-server")
    # tools/llama-bench: lists of one test are apart by "/" and ";".
    assert exported.check == (
        "GGML_OP_OFFLOAD_MIN_BATCH=130 llama-bench -m MODEL -ngl 5 -dev CUDA0 -ts 5 -ot "
        r"'^blk\.(0|1)\.ffn_.*_exps=CPU;^blk\.(0|1|2|3)\.=CUDA0;^token_embd=CUDA0;^output=CUDA0'"
        " -p 0 -n 32 -d 32"
    )
    last = plan_of(MIXTRAL | FOUR, [0, *[0, 0, 0] * 2, *[0, 0, 1] * 2, 0, 0], ONE)
    assert "-ncmoe" not in load("llama_cpp")(last).note


def test_vllm_offloads_what_is_left_to_the_processor() -> None:
    exported = load("vllm")(plan_of(MIXTRAL | FOUR, FIRST_TWO, ONE))
    experts = 2 * 8 * 3 * 64 * 96 * 2  # layers x experts x matrices x size x bytes: 0.0005 GiB
    assert experts < 2**30 / 100
    assert exported.files[".args"] == (
        "--pipeline-parallel-size 1 --cpu-offload-gb 0.01 --cpu-offload-params experts\n"
    )
    whole = "# rank 0: cuda:0\nCUDA_VISIBLE_DEVICES=0\nVLLM_PP_LAYER_PARTITION=4\n"
    assert exported.files[""] == whole
    # The embedding is no layer: it is on the GPU.
    host = load("vllm")(plan_of(MIXTRAL | FOUR, [1, *FIRST_TWO[1:]], ONE))
    assert host.files == exported.files
    # Whole layers: whatever comes first; each GPU by itself.
    halves = plan_of(DENSE, [2, 2, 2, 0, 0, 1, 1, 2, 2, 1, 1], MIXED)
    exported = load("vllm")(halves)
    assert exported.files[".args"] == "--pipeline-parallel-size 2 --cpu-offload-gb 0.01\n"
    assert exported.check == (
        "CUDA_VISIBLE_DEVICES=0,1 VLLM_PP_LAYER_PARTITION=2,2 vllm bench latency --model MODEL "
        "--pipeline-parallel-size 2 --cpu-offload-gb 0.01 --input-len 32 --output-len 32 "
        "--batch-size 1 --max-model-len 64"
    )


@pytest.mark.parametrize("wrong", [[1.5], ["many"] * 15, 7])
def test_what_a_file_says_of_sizes_and_experts_may_be_anything(wrong: Any) -> None:
    plan = plan_of(MIXTRAL | FOUR, FIRST_TWO, ONE)
    said = plan.provenance.profile | {"weights_bytes": wrong, "num_experts": wrong}
    provenance = plan.provenance.model_copy(update={"profile": said})
    hostile = plan.model_copy(update={"provenance": provenance})
    with pytest.raises(ExportError, match="of a model that has some"):
        load("ktransformers")(hostile)
    with pytest.raises(ExportError):  # as of a model of which no sizes are known
        load("vllm")(hostile)


def test_ktransformers_has_experts_on_the_gpu() -> None:
    files = load("ktransformers")(plan_of(MIXTRAL | FOUR, FIRST_TWO, ONE)).files
    assert files[""] == "--kt-num-gpu-experts 4 --kt-expert-placement-strategy front-loading\n"
    over = load("ktransformers")(plan_of(MIXTRAL | FOUR, [1, 0, 0, 0, *[0, 0, 1] * 3, 0, 0], ONE))
    assert str(over.files[""]).startswith("--kt-num-gpu-experts 2 --kt-expert")  # 8 of 4 layers
    with pytest.raises(ExportError, match="a model that has some"):
        load("ktransformers")(plan_of(DENSE, HALVES))
    with pytest.raises(ExportError, match="the plan uses 2 GPUs"):
        load("ktransformers")(plan_of(MIXTRAL | FOUR, [0] * 7 + [1] * 8, MIXED))
    with pytest.raises(Inexpressible, match=r"'model.layers.0.attention', and 1 more") as caught:
        load("ktransformers")(plan_of(MIXTRAL | FOUR, [1, 1, 1, 1, *[0, 0, 1] * 3, 0, 0], ONE))
    assert caught.value.nearest["model.layers.0.attention"] == "cuda:0"
    assert caught.value.nearest["model.layers.0.experts"] == "cpu:0"


# --- what ran ------------------------------------------------------------------------------------


def log_of(plan: Plan) -> str:
    """What llama.cpp prints of a plan that is carried out."""
    exported = load("llama_cpp")(plan)
    on = enumerate(layer_devices(str(exported.files[".args"]), 4))
    lines = [f"load_tensors: layer {i:3d} assigned to device {name}, is_swa = 0" for i, name in on]
    tensors = ["token_embd.weight", "output.weight"]
    for i in range(4):
        tensors += [f"blk.{i}.{x}.weight" for x in ("attn_q", "ffn_norm", "ffn_up_exps")]
    for name in tensors:
        buffer = first_match(str(exported.files[""]), name)
        if buffer:
            lines.append(f"tensor {name} (12 MiB q4_K) buffer type overridden to {buffer}")
    lines += [
        "load_tensors:        CUDA0 model buffer size =   403.50 MiB",
        "load_tensors:   CPU_Mapped model buffer size =    81.25 MiB",
        "load_tensors:    CUDA_Host model buffer size =     1.00 MiB",
        "llama_kv_cache:      CUDA0 KV buffer size =    28.00 MiB",
    ]
    return "\n".join(lines)


@pytest.fixture
def audit(tmp_path: Path, says: Any) -> Any:
    """What ``placement audit --json`` says of a plan and a log."""

    def audited(plan: Plan, log: str | bytes, *more: str, code: int = OK) -> Any:
        plan.save(tmp_path / "plan.json")
        (tmp_path / "log").write_bytes(log if isinstance(log, bytes) else log.encode())
        where = [tmp_path / "plan.json", "--log", tmp_path / "log"]
        return says(["audit", *where, "--json", *more], code)

    return audited


@pytest.mark.parametrize(
    ("to", "program", "typed", "printed"),
    [
        ("llama_cpp", "llama-server -m MODEL", "echo", "-ngl 5 -dev CUDA0,CUDA1 -ts 2,3 -ot ^blk"),
        ("vllm", "vllm serve MODEL", "printenv VLLM_PP_LAYER_PARTITION #", "2,2\n"),
    ],
)
def test_the_command_that_is_said_runs_as_it_stands(tmp_path, says, to, program, typed, printed):
    plan_of(DENSE, HALVES).save(tmp_path / "plan.json")
    out = tmp_path / "a folder" / "plan.of"
    out.parent.mkdir()
    command = says(["export", tmp_path / "plan.json", "--to", to, "--out", out]).err.strip()
    command = command.partition("; ")[2]
    assert program in command
    ran = ["bash", "-c", command.replace(program, typed)]
    done = subprocess.run(ran, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(printed)


def test_audit_of_llama_cpp(tmp_path: Path, audit: Any, says: Any) -> None:
    plan = plan_of(MIXTRAL | FOUR, [2, *[0, 0, 2], *[0, 0, 1], *[1] * 3, *[1, 1, 2], 1, 1], MIXED)
    answer = audit(plan, log_of(plan)).json
    assert answer["elsewhere"] == {} and answer["told"] == answer["operators"] == 15
    sizes = answer["memory"]
    planned = [sizes[name].pop("planned") * 2**20 for name in ("CUDA0", "CPU")]
    peaks = [plan.predicted.peak_bytes[name] for name in ("cuda:0", "cpu:0")]
    np.testing.assert_allclose(planned, peaks, atol=2**14)
    assert sizes == {"CUDA0": {"model": 403.5, "KV": 28.0}, "CPU": {"model": 82.25}}
    lost = "tensor blk.3.ffn_up_exps.weight (12 MiB q4_K) buffer type overridden to CPU\n"
    said = audit(plan, log_of(plan).replace(lost, ""), code=NO)
    assert said.json["elsewhere"] == {"model.layers.3.experts": ["CPU", "CUDA1"]}
    assert "14 of 15 operators are where they were planned" in said.err
    assert "does not say where any operator" in audit(plan, "nothing of interest\n", code=NO).err
    says(["audit", tmp_path / "plan.json", "--log", tmp_path / "missing", "--json"], BAD_INPUT)


def test_logs() -> None:
    where = "[V:onnxruntime:, session_state.cc:1270 VerifyEachNodeIsAssignedToAnEp] "
    text = f"""[I:onnxruntime:] Node(s) placed on [CUDAExecutionProvider]. Number of nodes: 2
{where} Conv (conv1)
{where} Relu (/net/relu)
[I:onnxruntime:] Node(s) placed on [CPUExecutionProvider]. Number of nodes: 1
{where} Gemm (fc)
Something else: in brackets"""
    plan = plan_of(DENSE, HALVES)
    where_of = {"conv1": "CUDAExecutionProvider", "/net/relu": "CUDAExecutionProvider"}
    where_of["fc"] = "CPUExecutionProvider"
    assert onnxruntime_nodes(text, plan) == (where_of, [])
    # Another thread writes in between; a line of nodes in other words is unknown, not the end.
    lines = text.splitlines()
    odd = f"{where} Add: sum1"
    between = [*lines[:2], "[I:other] thread (3)", odd, *lines[2:]]
    nodes, unknown = onnxruntime_nodes("\n".join(between).replace("nodes: 2", "nodes: 4"), plan)
    assert {op: nodes[op] for op in where_of} == where_of and unknown == [odd]
    buffers = llama_cpp_buffers("x:  RPC0[10.0.0.2:50052] model buffer size =  1.50 MiB")
    assert buffers == {"RPC0[10.0.0.2:50052]": {"model": 1.5}}


def test_an_audit_reads_what_versions_and_shells_write(audit: Any) -> None:
    """Before May 2025 no ``is_swa``; ik_llama.cpp's spelling; PowerShell's UTF-16; colours."""
    plan = plan_of(DENSE, [2, *HALVES[1:]], MIXED)
    older = log_of(plan).replace(", is_swa = 0", "").replace("\n", "\r\n")
    spelt = re.sub(r"tensor (\S+) \(.*?\) (.*) overridden", r"Tensor \1 \2 overriden", older)
    assert spelt != older
    coloured = "\x1b[34m" + older.replace("\r\n", "\x1b[0m\n\x1b[34m")
    for content in (
        older.encode(), spelt.encode(), coloured.encode(), b"\xef\xbb\xbf" + older.encode(),
        older.encode("utf-16"), older.encode("utf-16-le"), older.encode("utf-16-be"),
        b"\xfe\xff" + older.encode("utf-16-be"),
    ):  # fmt: skip
        answer = audit(plan, content).json
        assert answer["told"] == answer["operators"] == 11 and answer["unknown"] == []


def test_a_line_that_is_not_known_is_no_agreement_and_no_place(tmp_path, audit, says):
    plan = plan_of(DENSE, [2, *HALVES[1:]], MIXED)
    known = log_of(plan)
    override = "tensor blk.3.attn_q.weight (12 MiB q4_K) buffer type overridden to CUDA1"
    for line, strange, lost in (
        ("load_tensors: layer   1 assigned to device CUDA0, is_swa = 0",
         "load_tensors: layer   1 is assigned: CUDA1", {"model.layers.1"}),
        ("load_tensors: layer   4 assigned to device CUDA1, is_swa = 0",
         "load_tensors: output layer 4 assigned to CUDA1 (default)", {"model.norm", "lm_head"}),
        (override, "blk.3.attn_q.weight: buffer type CUDA0 instead", {"model.layers.3"}),
        (override, "token_embd.weight overridden by user -> CUDA0", {"model.embed_tokens"}),
    ):  # fmt: skip
        assert line in known
        said = audit(plan, known.replace(line, strange), code=NO)
        answer, stderr = said.json, said.err
        assert answer["unknown"] == [strange] and answer["elsewhere"] == {}
        untold = [op for op in plan.assignment if any(op.startswith(x) for x in lost)]
        assert answer["told"] == 11 - len(untold)
        assert f"the log does not say where {len(untold)} others are" in stderr
        assert "in words that are not known" in stderr and strange in stderr
    # Other lines about layers and tensors, of every log, say nothing of places.
    more = (
        "llama_kv_cache: layer   0: dev = CUDA0\n"
        "load_tensors: tensor 'token_embd.weight' (q4_K) (and 98 others) cannot be used with "
        "preferred buffer type CUDA_Host, using CPU instead\n"
        "create_tensor: loading tensor blk.0.attn_norm.weight\n"
        "load_tensors: offloading output layer to GPU\n"
    )
    audit(plan, more + known)
    says(["audit", tmp_path / "plan.json", "--log", tmp_path / "log"])


@pytest.mark.parametrize(
    ("on", "moved", "head"), [(2, "", "CUDA1"), (1, "CUDA1", "CUDA1"), (2, "CPU", "CPU")]
)
def test_an_audit_says_where_a_tied_head_is(audit, on, moved, head):
    """The embedding on the CPU needs no rule, and a rule for it takes the head along."""
    plan = plan_of(DENSE | {"tie_word_embeddings": True}, [on, *HALVES[1:]], MIXED)
    log = [x for x in log_of(plan).splitlines() if "output.weight" not in x]
    wanted = [x for x in log if "token_embd" in x]
    assert [x.rpartition(" ")[2] for x in wanted] == ([moved] if on == 1 else [])
    if moved == "CPU":  # what a rule of one's own does
        log.append("tensor token_embd.weight (12 MiB q4_K) buffer type overridden to CPU")
    said = audit(plan, "\n".join(log), code=NO if moved == "CPU" else OK)
    assert f"the head, of the tied tensor token_embd.weight, is on {head}" in said.err
    elsewhere = {"lm_head": ["CUDA1", "CPU"]} if moved == "CPU" else {}
    assert said.json["elsewhere"] == elsewhere


# What llama.cpp 2026.10 printed of a model of two layers, shortened: it loads twice.
LLAMA_LOG = """
0.00.014.542 D load_tensors: layer   0 assigned to device CPU, is_swa = 0
0.00.014.542 D load_tensors: layer   1 assigned to device CPU, is_swa = 0
0.00.014.543 D load_tensors: layer   2 assigned to device CPU, is_swa = 0
0.00.014.650 D tensor blk.0.attn_k.weight (0 MiB f16) buffer type overridden to CPU
0.00.014.894 I load_tensors:          CPU model buffer size =     0.00 MiB
0.00.016.118 I sched_reserve:        CPU compute buffer size =     1.01 MiB
0.00.020.519 D load_tensors: layer   0 assigned to device CPU, is_swa = 0
0.00.020.519 D load_tensors: layer   1 assigned to device CPU, is_swa = 0
0.00.020.519 D load_tensors: layer   2 assigned to device CPU, is_swa = 0
0.00.020.875 I load_tensors:   CPU_Mapped model buffer size =     0.74 MiB
0.00.021.015 I llama_context:        CPU  output buffer size =     0.01 MiB
0.00.021.046 I llama_kv_cache:        CPU KV buffer size =     0.12 MiB
0.00.021.834 I sched_reserve:        CPU compute buffer size =     1.01 MiB
0.00.022.834 D load_tensors: layer   0 assigned to device CUDA0, is_swa = 0
"""


def test_the_load_that_counts_is_the_last_of_the_whole_model(audit: Any) -> None:
    plan = plan_of(DENSE | {"num_hidden_layers": 2}, [0] * 7, ("cpu:0",))
    held = audit(plan, LLAMA_LOG).json["memory"]["CPU"]
    assert held.pop("planned") > 0
    assert held == {"model": 0.74, "output": 0.01, "KV": 0.12, "compute": 1.01}


# What OpenVINO 2026.4 wrote of Gemm (fc1), Relu and Gemm (y) on HETERO:CPU,AUTO, shortened.
HETERO_DOT = r"""digraph
{
    Add_41 [shape=box color=black label="y\nAdd_41\nopset1::Add\ndevice=AUTO" style=filled]
    Multiply_37 [shape=box label="Multiply_16\nMultiply_37\nopset1::Multiply\ndevice=AUTO"]
    CLONE_1[ shape="box"  style="dashed"  color="black"  label="b2\nConstant_39\nopset1::Constant
{f32}[3]
value: [ 0.637424, 3.48264, -0.109109 ]" ]
    MatMul_35 [shape=box label="y/WithoutBiases\nMatMul_35\nopset1::MatMul\ndevice=AUTO"]
    Relu_33 [shape=box label="relu1\nRelu_33\nopset1::Relu\ndevice=CPU" fillcolor=antiquewhite4]
    Add_32 [shape=box label="fc1\nAdd_32\nopset1::Add\ndevice=CPU" fillcolor=antiquewhite4]
    MatMul_26 [shape=box label="fc1/WithoutBiases\nMatMul_26\nopset1::MatMul\ndevice=CPU"]
}
"""


def test_audit_of_onnx_runtimes(audit: Any) -> None:
    names, where = ("fc1", "relu1", "y"), ("cpu:0", "gpu:0")
    graph = OpGraph.build("onnx", names, [-1, 0, 1, 2], [1] * 4, [(0, 0), (1, 1), (2, 2)])
    plan, auto = placed(problem_of(graph, where), [0, 0, 1]), ("--devices", "gpu:0=AUTO")
    assert audit(plan, HETERO_DOT, *auto).json["told"] == 3
    moved = HETERO_DOT.replace("MatMul\\ndevice=AUTO", "MatMul\\ndevice=CPU")
    assert audit(plan, moved, *auto, code=NO).json["elsewhere"] == {"y": ["AUTO", "AUTO+CPU"]}
    # ONNX Runtime lists no nodes where it has one provider for all of them.
    where = "[V:onnxruntime:, session_state.cc:1601 VerifyEachNodeIsAssignedToAnEp] "
    log = f"{where} All nodes placed on [CPUExecutionProvider]. Number of nodes: 3\n"
    answer = audit(plan, log, code=NO).json
    assert answer["told"] == 3 and set(answer["elsewhere"]) == {"y"}
