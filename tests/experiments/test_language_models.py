"""The rule of language models by hand, and public tables from lines that are written here."""

import json
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import language_models as study
from experiments.language_models import Case, Fit, half_width, summary
from experiments.public_models import Lacking, llama_cpp_file, machine, model_of, shape_of, shapes
from experiments.study import run
from placement.cli import BAD_INPUT, OK
from placement.costs.efficiency import Peak
from placement.costs.runtimes import NOTHING, Cost, Runtime, runtime_of, runtimes
from placement.costs.serving import pass_s
from placement.importers.decoder import Part

OWN = Runtime(0.5, 0.25, 0.5, 0.1, 0.2, 1e-6, 1e-3, 0.1, 0.2)
PEAK = Peak(1e12, 1e11, 2e-6)

LINES = {
    "pipeshard_llamacpp_layers_5090": (
        "model,context,vram_budget_MB,gpu_layers_ngl,ubatch,runs,prompt_tokens,"
        "prompt_tok_s_median,decode_tok_s_median",
        "minitron-4b,1024,2000,3,1024,2,908,1356.4,12.72",
    ),
    "geerling_llm_decode": (
        "model,system,where,tok_s,peak_W,vulkan_note",
        "Llama 3.2:3b,Pi 5 - 16GB,CPU,4.88,11.9,False",
    ),
    "strix_halo_llama_bench": (
        "model,quant,file_GiB,params_B,backend_env,test,context_tokens,tok_s",
        "llama-2-7b.Q4_0,Q4_0,3.56,6.74,rocm-7_2_3,tg128,,50.59",
    ),
    "strix_halo_two_hosts_rpc": (
        "model,size,params,test,tok_s,log",
        "glm4moe 355B.A32B Q4_K - Medium,189.69 GiB,356.79 B,tg128,8.71 ± 0.00,GLM-4.6__rocm6.log",
    ),
    "aiconfigurator_one_gpu_runs": (
        "system,model,backend,weights,prompt,answer,batch,ttft_ms,tpot_ms",
        "h100_sxm,Qwen/Qwen3-32B,vllm,fp8,1024,512,8,263.4,16.18",
    ),
    "pipeshard_table4_5090": (
        "Model,CtxSize,VramMB,Vram,TPS,TTFT(msec)",
        "nemo-4b,1K,12288,12G,116.9,100.0",
    ),
    "pipeshard_figure2_speedups": (
        "Model,CtxK,VramBudget,TTFTSpeedup,TPSSpeedup,E2ELSpeedup",
        "minitron-4b,1K,12G,1.00,1.00,1.00",
    ),
    "diffusers_offload_benchmark": (
        "scenario,params_B,flops_G,time_plain_s,commit",
        "A-group-offload-leaf,11.9,1,1.897,a\nA-bf16,11.9,1,0.532,a",
    ),
    "kt_expert_placement_strategies": (
        "gpu_expert_ratio_pct,random_tok_s,uniform_tok_s,front_loading_tok_s,frequency_tok_s,"
        "dynamic_tok_s",
        "20,58.75,60.28,58.82,61.92,74.73",
    ),
    "sailor_36_runs": (
        "model,stages,dp,tp_per_stage,gpus_by_type,micro_batch,global_batch,layers_per_stage,"
        "iteration_s_measured",
        "OPT-350M,1,1,4,GH-96x4,1,32,26,2.28",
    ),
}


def test_seconds_of_an_operator_by_hand() -> None:
    # 3 us to start; 1e9 operations at half of 1e12/s; 1e6 bytes at half of 1e11/s; 1e8 operations
    # of attention at a fifth of 1e12/s; 5e5 bytes of cache at a quarter of 1e11/s.
    expected = 3e-6 + 2e-3 + 2e-5 + 5e-4 + 2e-5
    assert OWN.seconds(PEAK, "attention", Cost(1e9, 1e6), Cost(1e8, 5e5)) == pytest.approx(expected)
    assert OWN.seconds(PEAK, "experts", Cost(1e9, 0), NOTHING) == pytest.approx(3e-6 + 1e-2)
    # Of measured rates products reach all, and the cache its share of what they reach: a half.
    reached = Peak(1e12, 1e11, 2e-6, is_reached=True)
    taken_s = OWN.seconds(reached, "attention", Cost(1e9, 1e6), Cost(0, 5e5))
    assert taken_s == pytest.approx(3e-6 + 1e-3 + 1e-5 + 1e-5)


def test_keys_and_values_of_a_pass_by_hand() -> None:
    part = Part("a", "attention", "m", 0, {"w": 2000}, 1000.0, kv_bytes=100, width=50.0)
    zero = Part("a", "attention", "m", 0, {"w": 2000}, 1000.0)

    def more(rows: int, sequences: int, before: float) -> float:
        tokens = rows, sequences, before
        return pass_s(part, 8, OWN, PEAK, tokens) - pass_s(zero, 8, OWN, PEAK, tokens)

    # One token: 4 * 50 * 300 operations at 2e11/s, 300 * 100 bytes at 2.5e10/s.
    assert more(1, 1, 300) == pytest.approx(6e4 / 2e11 + 3e4 / 2.5e10)
    # 320 tokens of one sequence read them ten times, 32 together.
    assert more(320, 1, 300) == pytest.approx(320 * 6e4 / 2e11 + 10 * 3e4 / 2.5e10)
    head = Part("h", "head", "h", -2, {"w": 2000}, 1000.0)
    body = Part("h", "feed_forward", "h", 0, {"w": 2000}, 1000.0)
    of_head, of_body = (pass_s(part, 8, OWN, PEAK, (1, 1, 0)) for part in (head, body))
    assert of_head == pytest.approx(of_body + 1e-3)


def test_runtimes_of_devices() -> None:
    known = runtimes()
    assert runtime_of("cuda", False) is known["vllm/cuda"]
    assert runtime_of("cuda", True) is known["llama.cpp/cuda"]
    assert runtime_of("npu", True) is known["llama.cpp/vulkan"]
    for own in known.values():
        shares = own.weights, own.cache, own.compute, own.routed, own.attention
        assert all(0 < x <= 1 for x in shares) and 0.1 < own.decode < own.prefill + 1


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("DeepSeek R1 14b", "qwen2.5-14b"), ("DeepSeek R1 671b", "deepseek-v3-671b"),
        ("Llama 3.2:3b", "llama-3.2-3b"), ("llama3.1:8b", "llama-3.1-8b"),
        ("Qwen3-30B-A3B-BF16", "qwen3-30b-a3b"), ("gpt-oss:120b", "gpt-oss-120b"),
        ("Qwen3-Coder-30B-A3B-Instruct-UD-Q4_K_XL", "qwen3-30b-a3b"), ("qwen-30b", "qwen3-30b-a3b"),
        ("nemo-8b", "minitron-8b"), ("glm4moe 106B.A12B Q4_K", "glm-4.5-air-106b"),
        ("Llama-4-Scout-17B-16E-Instruct", "llama-4-scout-109b-a17b"),
        ("MiniMax-M2-UD-Q6_K_XL", "minimax-m2-230b-a10b"), ("gemma-3-27b-it", "gemma-3-27b"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", "nemotron-3-nano-30b-a3b"),
        ("Meta-Llama-3.1-70B", "llama-3.1-70b"), ("mistral:7b", "mistral-7b"),
    ],
)  # fmt: skip
def test_names_of_models(text: str, shape: str) -> None:
    assert shape_of(text) == (shape, 1.0)


def test_models_that_nobody_knows_are_like_the_nearest() -> None:
    name, scale = shape_of("Newcomer-33B")  # dense
    assert scale * model_of(name, 16.0).numel == pytest.approx(33e9)
    assert not any(p.kind == "experts" for p, _ in model_of(name, 16.0).parts)
    routed, _ = shape_of("Newcomer-33B-A3B")
    assert any(p.kind == "experts" for p, _ in model_of(routed, 16.0).parts)
    with pytest.raises(Lacking, match="neither its shape nor its size"):
        shape_of("Newcomer")


def test_files_are_as_large_as_they_are_said_to_be() -> None:
    files = ("llama-2-7b", "Q4_0", 3.8e9), ("gpt-oss-120b", "MXFP4", 63.4e9)
    for text, quant, size in (*files, ("gemma-3-27b", "BF16", 54e9)):
        model = llama_cpp_file(text, quant, size, None)
        tied = shapes()[model.name]["tied"] * model.parts[0][0].weight_bytes
        assert model.weight_bytes - tied == pytest.approx(size, rel=1e-3)


def test_names_of_machines() -> None:
    found = machine("Pi CM5 - 16GB (Nvidia RTX 4070 Ti)", False)
    assert found == ("cuda", Peak(80e12, 504e9, 9e-6))
    assert machine("Mac Studio (M3 Ultra 512GB)", False)[0] == "metal"
    assert machine("AmpereOne A192-32X (512GB)", True)[1].call_s == pytest.approx(576e-6)
    with pytest.raises(Lacking, match="abacus"):
        machine("an abacus", True)


def case(model: str, work: float, device_s: float) -> Case:
    def predict(all_: Any) -> float:
        own = all_["llama.cpp/cuda"]
        return float(own.token_s + work / own.weights)

    table = "geerling_llm_decode", "decode"
    return Case(*table, model, model, device_s, predict, ("llama.cpp/cuda",))


def test_a_fit_finds_the_numbers_that_made_the_rows(monkeypatch: Any) -> None:
    monkeypatch.setattr(study, "SURE", 1e-4)
    rows = [case(str(x), x, 2e-3 + x / 0.5) for x in np.geomspace(1e-4, 1e-1, 30)]
    fit = Fit(rows)
    own = fit.runtimes({("llama.cpp/cuda", x): 0.1 for x in ("decode", "prefill")})
    assert own["llama.cpp/cuda"].weights == pytest.approx(0.5, rel=1e-3)
    assert own["llama.cpp/cuda"].token_s == pytest.approx(2e-3, rel=1e-3)
    assert np.abs(fit.log_ratios([c.model for c in rows])).max() < 1e-2
    assert half_width(np.arange(-9.0, 10.0)) == 9.0  # of 19 the 18th: rank 0.9 * 20


@pytest.mark.parametrize("name", sorted(LINES))
def test_a_table_of_two_lines(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.csv"
    head, line = LINES[name]
    empty = "," * head.count(",")
    odd = line.split("\n")[0].replace(",", ",-1", 1)
    path.write_text(f"{head}\n{line}\n{empty}\n{odd}\nx\n", encoding="utf-8")
    found = summary(path)
    assert found["rows"] >= 1 and found["skipped"] >= 2
    assert 0 <= found["median_error"] <= 0.6 and found["worst_decile"] >= found["median_error"]
    assert 0 <= found["coverage"] <= 1
    if name.startswith(("pipeshard_t", "pipeshard_f")):
        assert len(found["bound"]) == found["rows"] and found["at_least_theirs"] == 1.0


def test_a_folder_of_some_tables_with_rows_that_nobody_knows(tmp_path: Path, capsys: Any) -> None:
    """A folder of two tables: what is unknown in a row is said, with its number, and left out."""
    head, line = LINES["geerling_llm_decode"]
    abacus = line.replace("Pi 5 - 16GB", "an abacus")
    rows = f"{head}\n{abacus}\n{line}\n{line.replace('4.88', 'n/a')}\n{abacus}\n"
    (tmp_path / "geerling_llm_decode.csv").write_text(f"\ufeff{rows}", encoding="utf-8")
    head, line = LINES["kt_expert_placement_strategies"]
    (tmp_path / "kt_expert_placement_strategies.csv").write_text(f"{head}\n", encoding="utf-8")
    assert run(study.STUDY, ["--data", str(tmp_path), "--json"]) == OK
    out, said = capsys.readouterr()
    answer = json.loads(out)
    assert list(answer) == ["geerling_llm_decode", "kt_expert_placement_strategies"]
    found, none = answer.values()
    # 3.2e9 weights of 4.8 bits, at 17.1 GB/s: a factor of exp(its interval) at most.
    assert (found["rows"], found["skipped"], found["coverage"]) == (1, 3, 1.0)
    assert found["median_error"] < exp(runtimes()["llama.cpp/cpu"].decode)
    empty = {"rows": 0, "median_error": None, "worst_decile": None, "coverage": None}
    assert empty.items() <= none.items()
    assert said.splitlines() == [
        "geerling_llm_decode.csv: skipped row 1, 4: device 'an abacus' is not known",
        "geerling_llm_decode.csv: skipped row 3: tok_s = 'n/a' is no number",
    ]


@pytest.mark.parametrize("text", [None, "model,tok_s\na,1\n"])
def test_a_mistake_is_one_line(text: str | None, tmp_path: Path, capsys: Any) -> None:
    if text is not None:
        (tmp_path / "geerling_llm_decode.csv").write_text(text)
    assert run(study.STUDY, ["--data", str(tmp_path), "--json"]) == BAD_INPUT
    out, error = capsys.readouterr()
    assert not out and len(error.strip().splitlines()) == 1
    assert ("no table in" if text is None else "no column system, where, vulkan_note") in error
