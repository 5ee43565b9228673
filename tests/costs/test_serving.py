"""Devices of the library, and decoders that serve on them: seconds and bytes by hand."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from placement.capturing import capture
from placement.cli import BAD_INPUT, NO
from placement.cli.serving import fits
from placement.cluster import Cluster, ClusterError, Device
from placement.costs import serving
from placement.costs.efficiency import FITTED, Peak, RatesError
from placement.costs.predictors import profile_of
from placement.costs.predictors.roofline import Roofline
from placement.costs.runtimes import runtimes
from placement.costs.serving import (
    Serving,
    ServingError,
    largest_context,
    memory,
    serving_problem,
    terms,
)
from placement.devices import library, nearest
from placement.importers import load_decoder
from placement.planners import load
from placement.simulator import simulate
from tests import problems
from tests.served import HOME, LLAMA, MIXTRAL, decoder, gguf_llama, written


def cluster(text: str, folder: Path) -> Cluster:
    return Cluster.from_yaml(problems.written(folder / "c.yaml", text))


def home(folder: Path) -> Cluster:
    return cluster(HOME, folder)


# --- the library ---------------------------------------------------------------------------------


def test_the_library_says_all_of_every_device() -> None:
    some = {"nvidia/l4", "nvidia/a100", "nvidia/t4", "amd/mi210", "apple/m2-ultra"}
    assert some <= set(library())
    for name, facts in library().items():
        assert name == name.lower() and name.count("/") == 1
        assert facts.kind in ("cuda", "rocm", "metal", "cpu") and "https://" in facts.source
        assert facts.flops_per_s["fp32"] > 1e12 and 5e10 < facts.bytes_per_s < 1e13, name
        assert 4e9 < facts.memory_bytes < 1e12 and facts.idle_w < facts.busy_w
        assert facts.peak("fp8") >= facts.peak("fp16") >= facts.peak("fp32")
    assert library()["nvidia/t4"].peak("bf16") == 8.1e12  # it has none: as fp32


def test_the_page_lists_the_library() -> None:
    page = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (`[a-z]+/[\w-]+` \| \d+ \| .*) \|$", page, re.MULTILINE)
    assert listed == [
        f"`{name}` | {x.memory_bytes / 1e9:.0f} | {x.bytes_per_s / 1e9:,.0f}"
        f" | {x.peak('fp32') / 1e12:.4g} | {x.peak('fp16') / 1e12:.4g} | {x.busy_w:.0f}"
        for name, x in library().items()
    ]


def test_a_device_like_one_of_the_library(tmp_path: Path) -> None:
    machine = cluster(
        "devices:\n- {name: a, like: nvidia/l4}\n- {name: b, like: nvidia/t4, memory_bytes: 8e9,"
        " busy_w: 50, speed: 2}\n- {name: c, like: nvidia/l4, bytes_per_s: 1e11}\n"
        "links:\n- {src: a, dst: b, bandwidth_bytes_per_s: 1e9}\n",
        tmp_path,
    )
    a, b, c = machine.devices
    assert (a.kind, a.memory_bytes, a.busy_w, a.model) == ("cuda", 24 * 10**9, 72.0, "nvidia/l4")
    assert (b.memory_bytes, b.busy_w, b.idle_w) == (8 * 10**9, 50.0, 10.0)
    assert Peak.of(b, "fp16").flops_per_s == 2 * 65e12 and Peak.of(c).bytes_per_s == 1e11
    speed = {(x.src, x.dst): x.bandwidth_bytes_per_s for x in machine.links}
    assert speed["a", "b"] == 1e9 and speed["b", "a"] == 12e9 and speed["a", "c"] == 25e9
    machine.to_yaml(tmp_path / "again.yaml")
    assert Cluster.from_yaml(tmp_path / "again.yaml").fingerprint == machine.fingerprint


def test_what_is_stated_of_a_device_of_this_machine_counts_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "calibrate", lambda device: Peak(1e9, 2e9, 3e-6, is_reached=True))
    here = cluster('devices: [{name: "cpu:0", kind: cpu, bytes_per_s: 80e9}]', tmp_path)
    (peak,) = serving.peaks(decoder(), here)
    assert (peak.flops_per_s, peak.bytes_per_s, peak.call_s) == (1e9, 80e9, 3e-6)


def test_a_name_that_is_not_in_the_library(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"'nvidia/l5' is not in the library; did you mean nv"):
        cluster("devices: [{name: a, like: nvidia/l5}]", tmp_path)
    assert nearest("RTX 4090")[0] == "nvidia/rtx-4090"
    assert nearest("m2_ultra")[0] == "apple/m2-ultra"
    # A device that was measured elsewhere may have such a name.
    assert cluster("devices: [{name: a, like: node0/cpu:1}]", tmp_path).devices[0].like
    short = cluster("devices: [{name: a, like: l4}]", tmp_path)
    with pytest.raises(RatesError, match=r"'a': its peak rates are not known.*nvidia/l4"):
        serving_problem(decoder(), short, Serving("decode", 9))
    streams = "[{name: c, kind: cpu}, {name: a, kind: cuda}, {name: s/a, kind: cuda, streams: a}]"
    with pytest.raises(ServingError, match=r"'s/a' streams, .*a device like 'a', with the bytes_p"):
        serving_problem(decoder(), cluster(f"devices: {streams}", tmp_path), Serving("decode", 9))


def test_operators_of_a_graph_on_a_device_of_the_library() -> None:
    graph = capture(torch.nn.Linear(1000, 2000).eval(), (torch.zeros(500, 1000),))
    l4 = Device("gpu", "cuda", like="nvidia/l4")
    profile = profile_of(graph, Cluster("c", (l4,)), Roofline())
    share = FITTED["product"]
    power = (72 / 30.3 / 10) ** share.power
    expected = share.calls * 12.1e-6 + 2 * 500 * 1000 * 2000 / (share.compute * power * 30.3e12)
    assert profile.compute_s.sum() == pytest.approx(expected, rel=1e-3)


# --- seconds and bytes ---------------------------------------------------------------------------


def test_a_token_by_hand(tmp_path: Path) -> None:
    one = cluster("devices: [{name: a, like: nvidia/rtx-4090}]", tmp_path)
    context, batch = 1000, 2
    problem = serving_problem(decoder(), one, Serving("decode", context, batch))
    facts, own = library()["nvidia/rtx-4090"], runtimes()["vllm/cuda"]
    start, flops, speed = facts.call_s + own.part_s, facts.peak("bf16"), facts.bytes_per_s

    def matrices(numel: int, more: int = 0) -> float:  # 2 bytes each, and what goes in and out
        read = 2 * numel + more + 2 * batch * 2 * 4096
        return start + 2 * batch * numel / (own.compute * flops) + read / (own.weights * speed)

    keys = batch * context * 2 * 2 * 1024 / (own.cache * speed)
    keys += 4 * 4096 * batch * context / (own.attention * flops)
    attention, feed, head = problem.compute_s[[1, 2, -1], 0]
    norms = 2 * 2 * 4096
    assert attention == pytest.approx(matrices(4096 * (4096 * 2 + 2048), norms) + keys)
    assert feed == pytest.approx(matrices(3 * 4096 * 14336))
    assert head == pytest.approx(own.token_s + matrices(128256 * 4096))
    assert simulate(problem, np.zeros(67, int)).latency_s == pytest.approx(problem.compute_s.sum())


def test_bytes_by_hand(tmp_path: Path) -> None:
    problem = serving_problem(decoder(), home(tmp_path), Serving("decode", 1000, 3))
    held = memory(problem, np.array([0] * 33 + [1] * 34))
    layer = 2 * (4096 * (4096 * 2 + 2048) + 3 * 4096 * 14336 + 2 * 4096)
    table = 2 * 128256 * 4096
    buffer = 4 * 512 * (5 * 4096 + 3 * 14336) + 2 * 512 * 1000
    assert held["cuda:0"] == {
        "weights_bytes": table + 16 * layer,
        "kv_cache_bytes": 3 * 1000 * 16 * 2 * 2 * 1024,
        "buffers_bytes": buffer,
        "needed_bytes": table + 16 * layer + 3 * 1000 * 16 * 4096 + buffer,
        "there_bytes": 24 * 10**9,
    }
    assert held["cuda:1"]["buffers_bytes"] == buffer + 4 * 3 * 128256  # logits
    assert held["cpu:0"]["needed_bytes"] == 0
    peak = simulate(problem, np.array([0] * 33 + [1] * 34)).peak_bytes
    assert peak is not None and peak.tolist() == [h["needed_bytes"] for h in held.values()]


def test_tied_embeddings_count_once_on_a_device(tmp_path: Path) -> None:
    tied = decoder(tie_word_embeddings=True)
    problem = serving_problem(tied, home(tmp_path), Serving("decode", 10))
    total = sum(decoder().class_bytes().values()) - 2 * 128256 * 4096
    together = memory(problem, np.zeros(67, int))
    assert together["cuda:0"]["weights_bytes"] == total
    apart = memory(problem, np.array([0] * 33 + [1] * 34))
    assert sum(h["weights_bytes"] for h in apart.values()) == total + 2 * 128256 * 4096


def test_a_window_bounds_cache_and_seconds(tmp_path: Path) -> None:
    local = decoder(model_type="mistral", sliding_window=100)
    at = [serving_problem(local, home(tmp_path), Serving("decode", n)) for n in (100, 9999)]
    held = [memory(p, np.zeros(67, int))["cuda:0"]["kv_cache_bytes"] for p in at]
    assert held[0] == held[1] == 32 * 100 * 4096
    np.testing.assert_allclose(at[0].compute_s, at[1].compute_s)


def test_experts_are_read_as_routing_by_chance_touches_them(tmp_path: Path) -> None:
    def moved(batch: int) -> float:
        problem = serving_problem(decoder(MIXTRAL), home(tmp_path), Serving("decode", 10, batch))
        return float(problem.compute_s[3, 0])

    own, facts = runtimes()["vllm/cuda"], library()["nvidia/rtx-4090"]
    weights = 2 * 8 * 3 * 4096 * 14336
    for batch in (1, 4):
        touched = weights * (1 - 0.75**batch) + 4 * batch * 4096
        work_s = 2 * batch * weights / 2 / 4 / (own.routed * facts.peak("bf16"))  # 2 experts of 8
        read_s = touched / (own.weights * facts.bytes_per_s)
        assert moved(batch) == pytest.approx(facts.call_s + own.part_s + work_s + read_s)


def test_serve_is_a_prompt_and_its_answer(tmp_path: Path) -> None:
    devices, placement = home(tmp_path), np.array([0] * 33 + [1] * 34)

    def value(phase: str) -> float:
        asked = Serving(phase, 1000, 2, prompt=300)
        return float(simulate(serving_problem(decoder(), devices, asked), placement).latency_s)

    assert value("serve") == pytest.approx(value("prefill") + 700 * value("decode"))
    both = terms(decoder(), devices, Serving("serve", 1000, 2, prompt=300), placement)
    assert both["prefill_s"] == value("prefill") and both["decode_s"] == value("decode")
    # A prompt goes through in pieces: the weights are read again for each.
    asked = [Serving("prefill", n) for n in (512, 1024, 700, 188)]
    times = [serving_problem(decoder(), devices, x).compute_s[2, 0] for x in asked]
    assert times[1] == pytest.approx(2 * times[0])
    assert times[2] == pytest.approx(times[0] + times[3])  # what is left over is a short piece


def test_prompts_that_cannot_be() -> None:
    for wrong in ({"context": 0}, {"context": 9, "batch": 0}, {"context": 9, "prompt": 10}):
        with pytest.raises(ServingError, match="must be from 1 to"):
            Serving("decode", **wrong)


def test_the_largest_context_that_fits(tmp_path: Path) -> None:
    one = cluster("devices: [{name: a, like: nvidia/rtx-4090, memory_bytes: 18e9}]", tmp_path)
    asked = Serving("decode", 10**6)
    most = largest_context(lambda s: serving_problem(decoder(), one, s), asked, fits)

    def needed(context: int) -> int:
        problem = serving_problem(decoder(), one, replace(asked, context=context))
        return memory(problem, np.zeros(67, int))["a"]["needed_bytes"]

    assert needed(most) <= 18 * 10**9 < needed(most + 1)
    assert not fits(serving_problem(decoder(), one, asked))
    tiny = cluster("devices: [{name: a, like: nvidia/rtx-4090, memory_bytes: 1e9}]", tmp_path)
    assert largest_context(lambda s: serving_problem(decoder(), tiny, s), asked, fits) == 0


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["prefill", "decode", "serve"])
def test_what_machines_read(objective: str, tmp_path: Path, says: Any) -> None:
    model, devices = written(tmp_path, LLAMA)
    argv = ["plan", model, "--cluster", devices, "--objective", objective, "--context", "4096"]
    answer = says.answer(*argv, "--batch", "2", "--prompt", "1024")  # which needs no planner
    assert set(answer) == {
        "planner", "objective", "value_s", "lower_bound_s", "seconds", "evaluations", "feasible",
        "assignment", "memory", "prefill_s", "decode_s", "weights", "interval", "tokens_per_s",
        "bounds",
    }  # fmt: skip
    assert (answer["planner"], answer["objective"]) == ("layer_dp", objective)
    assert answer["feasible"] is True and len(answer["assignment"]) == 67
    assert set(answer["memory"]) == {"cuda:0", "cuda:1", "cpu:0"}
    kinds = ("weights", "kv_cache", "buffers", "needed", "there")
    assert set(answer["memory"]["cpu:0"]) == {f"{kind}_bytes" for kind in kinds}
    weights = answer["weights"]
    value = sum(weights[x] * answer[f"{x}_s"] for x in ("prefill", "decode"))
    assert answer["value_s"] == pytest.approx(value)
    both = {"prefill": (1.0, 0.0), "decode": (0.0, 1.0), "serve": (1.0, 3072.0)}[objective]
    assert weights == dict(zip(("prefill", "decode"), both, strict=True))


def test_a_context_that_fits_nowhere(tmp_path: Path, says: Any) -> None:
    model, devices = written(tmp_path, LLAMA)
    argv = ["plan", model, "--cluster", devices, "--planner", "layer_dp", "--context"]
    said = says([*argv, "1000000", "--json"], NO)
    answer, stderr, largest = said.json, said.err, said.json["largest_context"]
    assert answer["feasible"] is False and f"--context {largest}" in stderr
    assert "needs 148," in stderr and "the devices have 100,000,000,000 together" in stderr
    says([*argv, str(largest)])
    says([*argv, str(largest + 1)], NO)


def test_devices_without_work_are_named_with_the_reason(tmp_path: Path, says: Any) -> None:
    """Layers run one after the other, so that four of eight equal GPUs hold a model as fast."""
    gpus = [f'- {{name: "cuda:{i}", like: nvidia/a100}}\n' for i in range(8)]
    big = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    big |= {"num_attention_heads": 64, "vocab_size": 128256}

    def said(count: int) -> str:
        model, devices = written(tmp_path, LLAMA | big, f"devices:\n{''.join(gpus[:count])}")
        argv = ["plan", model, "--cluster", devices, "--context", "4096", "--batch", "8"]
        return " ".join(says(argv).out.split())

    assert "4 of 8 devices are idle (cuda:4, cuda:5, cuda:6, cuda:7): a batch is on one" in said(8)
    assert "are idle" not in said(4)


def test_a_gguf_file_without_its_tensors(tmp_path: Path, says: Any, monkeypatch: Any) -> None:
    _, devices = written(tmp_path, LLAMA)
    path = problems.written(tmp_path / "model.gguf", gguf_llama(experts=8))
    argv = ["plan", str(path), "--cluster", devices, "--context", "512", "--planner", "layer_dp"]
    out, stderr = says([*argv, "--out", tmp_path / "plan.json"])
    assert "for decode, a context of 512 x 1 predicted" in " ".join(out.split())
    assert "\n decode " in out and "latency" not in out and "period" not in out
    monkeypatch.chdir(tmp_path)
    command = stderr.partition("next: placement ")[2].partition(" (--list")[0]
    says(shlex.split(command))
    assert Path("llama.ot").exists() and Path("llama.args").exists()
    assert "KV cache" in out and "tokens/s at a context of 512 (" in out
    says([*argv, "--out", tmp_path / "b.json", "--objective", "serve"])
    out = says(["diff", tmp_path / "plan.json", tmp_path / "b.json"]).out
    assert "decode serve" in " ".join(out.split())
    says(["report", tmp_path])
    assert '"objective":"decode"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--context TOKENS is needed"),
        (["--context", "9", "--objective", "latency"], "is not for language models"),
        (["--context", "9", "--objective", "decod"], "did you mean 'decode'"),
        (["--context", "9", "--batch", "0"], "batch = 0"),
        (["--context", "9", "--prompt", "10"], "a prompt of 10 tokens"),
        (["--context", "9", "--predict", "roofline"], "--predict is not for language models"),
        (["--context", "9", "--microbatches", "2"], "--microbatches is not for language models"),
        (["--context", "9", "--max-phases", "2", "--pieces", "2"], "--max-phases, --pieces is not"),
    ],
)
def test_commands_that_are_wrong(words: list[str], text: str, tmp_path: Path, says: Any) -> None:
    model, devices = written(tmp_path, LLAMA)
    argv = ["plan", model, "--cluster", devices, "--planner", "layer_dp", *words]
    assert text in says(argv, BAD_INPUT).err


def test_what_is_served_is_for_language_models(says: Any) -> None:
    for words in (["--context", "9"], ["--objective", "decode"]):
        err = says(["plan", "tiny_mlp", "--planner", "heft", *words], BAD_INPUT).err
        assert "for language models without weights" in err


def test_seventy_billion_parameters_are_planned_at_once(tmp_path: Path) -> None:
    config = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    names = ("nvidia/rtx-4090", "nvidia/rtx-3090", "apple/m2-ultra", "amd/mi210", "nvidia/l4",
             "amd/epyc-7763")  # fmt: skip
    text = "devices:\n" + "".join(f"- {{name: d{i}, like: {x}}}\n" for i, x in enumerate(names))
    model = decoder(num_attention_heads=64, **config)
    problem = serving_problem(model, cluster(text, tmp_path), Serving("decode", 8192))
    solution = load("layer_dp")(problem)
    held = memory(problem, solution.placement)
    assert np.isfinite(solution.value_s) and solution.stats["all_orders"]
    assert all(h["needed_bytes"] <= h["there_bytes"] for h in held.values())


# Tokens per second of llama.cpp, Llama 2 7B in Q4_0 and F16, up to a context of 1,024, as
# https://github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference measured them at the end of 2023.
PUBLISHED = {
    "nvidia/rtx-3090": (120.6, 51.85),
    "nvidia/rtx-4090": (149.37, 60.78),
    "nvidia/rtx-a6000": (111.57, 44.01),
    "nvidia/a100-80gb": (136.24, 73.83),
    "nvidia/h100-pcie": (133.77, 83.32),
    "apple/m2-ultra": (91.89, 40.68),
}


def test_published_speeds_of_decoding(tmp_path: Path) -> None:
    """Nothing is fitted to them. The errors are in docs/hardware.md."""
    plain = decoder(vocab_size=32000, intermediate_size=11008, num_key_value_heads=32)
    plain = replace(plain, format="gguf")  # which llama.cpp runs
    header = gguf_llama(32, sizes=(4096, 11008, 32000, 32, 32), kinds=(2, 2))
    path = problems.written(tmp_path / "q4_0.gguf", header)
    errors = []
    for like, both in PUBLISHED.items():
        one = Cluster("c", (Device("d", library()[like].kind, like=like, memory_bytes=10**11),))
        for model, published in zip((load_decoder(path), plain), both, strict=True):
            problem = serving_problem(model, one, Serving("decode", 512))
            errors.append(1 / problem.compute_s.sum() / published - 1)
    page = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
    percents = [f"{x * 100:.0f} %" for x in (np.median(np.abs(errors)), min(errors), max(errors))]
    assert f"median error {percents[0]} (from {percents[1]} to {percents[2]})" in page
