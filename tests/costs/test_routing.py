"""Experts that are read with a share: counts, hot experts, and the bound beside a plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import expert_strategies as strategies
from experiments.study import DATA
from placement.cli import BAD_INPUT
from placement.cluster import Cluster, Device, Link
from placement.costs.hot_experts import with_hot_experts
from placement.costs.serving import (
    NEVER_PAYS,
    Phase,
    Serving,
    min_batch,
    part_seconds,
    peaks,
    serving_problem,
)
from placement.costs.serving_bound import bound, least
from placement.importers.decoder import Decoder
from placement.importers.routing import hottest, split, with_counts
from placement.planners import load
from placement.planners.layer_dp import LayerDp
from tests import problems
from tests.problems import every_link
from tests.served import MIXTRAL, decoder, written

SMALL = {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 4096,
         "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1000}  # fmt: skip
SKEWED = (900, 300, 200, 200, 150, 100, 100, 50)  # of 1,000 tokens, two experts each
GPU = Device("cuda:0", "cuda", like="nvidia/rtx-4090", memory_bytes=350_000_000)
HOST = Device("cpu:0", "cpu", like="amd/ryzen-7950x")
HOME = Cluster("home", (GPU, HOST), every_link(("cpu:0", "cuda:0"), 1e-5, 25e9))


def counts(folder: Path, rows: Any = None, layers: int = 4) -> Path:
    """A file of these rows, or of skewed counts that every layer has in another order."""
    if rows is None:
        rows = [(i, (e + i) % 8, SKEWED[e]) for i in range(layers) for e in range(8)]
    lines = ["layer,expert,count", *(",".join(map(str, row)) for row in rows)]
    return problems.written(folder / "counts.csv", "\n".join(lines) + "\n")


def routed(folder: Path) -> Decoder:
    return with_counts(decoder(MIXTRAL | SMALL), counts(folder))


def test_shares_are_of_tokens(tmp_path: Path) -> None:
    experts = [part for part in routed(tmp_path).parts if part.num_experts]
    assert [part.layer for part in experts] == [0, 1, 2, 3]
    assert experts[0].shares == pytest.approx([c / 1000 for c in SKEWED])
    assert experts[1].shares[1] == pytest.approx(0.9) and experts[1].used == 0.25
    # One token reads a quarter; of two, an expert of share p is read with 1 - (1 - p)^2.
    assert experts[0].read(1) == pytest.approx(0.25)
    both = [1 - (1 - c / 1000) ** 2 for c in SKEWED]
    assert experts[0].read(2) == pytest.approx(sum(both) / 8)
    alike = decoder(MIXTRAL | SMALL).parts[3]
    assert alike.read(2) == pytest.approx(1 - 0.75**2) and experts[0].read(2) < alike.read(2)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([(4, 0, 1)], "layer 4: c has layers 0 to 3"),
        ([(0, 8, 1)], "layer 0 counts expert 8: c has experts 0 to 7 there"),
        ([(0, 0, -1)], "0,0,-1: numbers must be at least 0"),
        ([(0, 0, "nan")], "0,0,nan: numbers must be at least 0"),
        ([(0, 0, "x")], "line 2: '0,0,x' is not three numbers"),
        ([(0, 0, 1), (0, 0, 2)], "line 3: layer 0, expert 0 is there twice"),
        ([(0, 0, 1), (0, 1, 1)], "nothing is counted in layer 1"),
        (
            [(i, e, 6 if e == 3 else 2) for i in range(4) for e in (1, 2, 3)],
            "expert 3 of layer 0 has 6 of 10 counts, a share of 1.20 of the tokens: a token "
            "chooses 2 different experts, so that one has at most 5 of the counts",
        ),
    ],
)
def test_counts_of_another_model(tmp_path: Path, rows: Any, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        with_counts(decoder(MIXTRAL | SMALL), counts(tmp_path, rows))
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_other_files_and_models(tmp_path: Path, says: Any) -> None:
    model, home = written(tmp_path, MIXTRAL | SMALL)
    argv = ["plan", model, "--cluster", home, "--context", "64", "--experts"]
    (tmp_path / "b.csv").write_text("layer,count\n0,1\n")
    wrong = "no column 'expert': the first line must name layer, expert, count"
    assert wrong in says([*argv, tmp_path / "b.csv"], BAD_INPUT).err
    (tmp_path / "q.csv").write_text('layer,expert,count\n0,0,"' + "1" * 200_000)
    assert "q.csv: not a CSV file: field larger" in says([*argv, tmp_path / "q.csv"], BAD_INPUT).err
    assert "none.csv: cannot be read" in says([*argv, tmp_path / "none.csv"], BAD_INPUT).err
    with pytest.raises(ValueError, match="c has no experts: leave --experts out"):
        with_counts(decoder(), counts(tmp_path))


def test_the_hottest_are_the_best_choice(tmp_path: Path) -> None:
    """Of all choices of so many experts none reads more of its bytes (brute force, two layers)."""
    model = decoder(MIXTRAL | SMALL | {"num_hidden_layers": 2})
    two = with_counts(model, counts(tmp_path, layers=2))
    shares = np.array([p for part in two.parts for p in part.shares])
    for num in (1, 3, 5):
        mask = np.concatenate([*hottest(two, num).values()])
        best = max(shares[list(some)].sum() for some in combinations(range(16), num))
        assert mask.sum() == num and shares[mask].sum() == pytest.approx(best)
    # All alike: whole layers from the first.
    alike = hottest(decoder(MIXTRAL | SMALL), 11)
    assert [int(mask.sum()) for mask in alike.values()] == [8, 3, 0, 0]


def test_two_parts_are_the_whole(tmp_path: Path) -> None:
    whole = routed(tmp_path)
    parted = split(whole, hottest(whole, 9))
    assert parted.class_bytes() == whole.class_bytes()
    hot, cold = (next(p for p in parted.parts if p.name.endswith(f"0.experts#{i}")) for i in (0, 1))
    assert hot.experts == (0, 1, 2)[: hot.num_experts]
    assert {*hot.experts, *cold.experts} == {*range(8)}
    before = whole.parts[3]
    for rows in (1, 7):
        read = sum(p.weight_bytes * p.read(rows) for p in (hot, cold))
        assert read == pytest.approx(before.weight_bytes * before.read(rows))
    assert hot.numel * hot.used + cold.numel * cold.used == pytest.approx(before.numel / 4)


def test_hot_experts_stay_where_the_layer_is(tmp_path: Path) -> None:
    """A quarter of the experts fit: those that are asked most are faster than whole layers."""
    asked = Serving(Phase.DECODE, 64, whole_layers=False)
    whole = routed(tmp_path)
    _, problem = with_hot_experts(whole, HOME, asked)
    solution = load("layer_dp")(problem)
    apart = load("layer_dp")(serving_problem(whole, HOME, asked))
    assert solution.value_s < apart.value_s
    on = {name: int(d) for name, d in zip(problem.graph.op_name, solution.placement, strict=True)}
    assert {d for name, d in on.items() if name.endswith("#1")} == {1}
    assert {d for name, d in on.items() if name.endswith(("#0", "attention", "router"))} == {0}
    # Nothing is known of them, or layers are whole: as it was.
    alike = decoder(MIXTRAL | SMALL)
    assert with_hot_experts(alike, HOME, asked)[0] is alike
    assert with_hot_experts(whole, HOME, Serving(Phase.DECODE, 64))[0] is whole


def test_the_command_says_hot_experts_and_the_bound(tmp_path: Path, says: Any) -> None:
    model, devices = written(tmp_path, MIXTRAL | SMALL)
    HOME.to_yaml(devices)
    argv = ["plan", model, "--cluster", devices, "--context", "64", "--experts"]
    argv += [str(counts(tmp_path)), "--out", str(tmp_path / "plan.json")]
    answer = says([*argv, "--json"]).json
    hot = answer["hot_experts"]
    assert [*hot] == ["0", "1", "2", "3"] and hot["1"][0] == 1  # the first of the second layer
    facts = answer["bounds"]["decode"]
    assert sum(facts.values()) == pytest.approx(answer["decode_s"])
    out = " ".join(says(argv).out.split())
    assert "hot experts stay with their layer" in out
    assert f"decode: {facts['least_s'] / answer['decode_s']:.0%} of what this machine can do" in out
    says(["export", tmp_path / "plan.json", "--out", tmp_path / "kt", "--to", "ktransformers"])
    num, over = divmod(sum(map(len, hot.values())), 4)
    share = f" --kt-gpu-experts-ratio {int((4 * num + over) / 32 * 1e4) / 1e4:g}" if over else ""
    expected = f"--kt-num-gpu-experts {num}{share} --kt-expert-placement-strategy frequency\n"
    assert (tmp_path / "kt").read_text() == expected


# --- the bound -----------------------------------------------------------------------------------


def test_a_bound_by_hand() -> None:
    """Two bytes of three fit the GPU, the rest comes from memory and over the link."""
    model = decoder(num_hidden_layers=4)
    read = sum(part.weight_bytes for part in model.parts if part.kind != "embedding")
    gpu = Device("g", "cuda", flops_per_s=1e15, bytes_per_s=1e12, call_s=0.0, memory_bytes=10**9)
    host = Device("h", "cpu", flops_per_s=1e15, bytes_per_s=1e10, call_s=0.0, memory_bytes=10**11)
    cluster = Cluster("c", (gpu, host), (Link("h", "g", 0.0, 3e10), Link("g", "h", 0.0, 1e12)))
    asked = Serving(Phase.DECODE, 1)
    cache = 4 * 2 * 2 * 8 * 128  # layers x keys and values x bytes x heads x size
    expected = (read + cache - 10**9) / (1e10 + 3e10)
    assert least(model, cluster, asked) == pytest.approx(expected)
    # A prompt on fast memory takes its operations on both devices.
    prompt = Serving(Phase.PREFILL, 4096)
    work = sum(2 * part.numel * (1 if part.kind == "head" else 4096) for part in model.parts)
    large = Cluster("c", (replace(gpu, memory_bytes=10**12), host))
    assert least(model, large, prompt) == pytest.approx(work / 2e15)


def test_a_link_for_many_is_that_of_each_and_the_last_one_counts() -> None:
    model, asked = decoder(MIXTRAL | SMALL), Serving(Phase.DECODE, 1)
    slow = Link("cpu:*", "*", 1e-5, 2e9)
    for links, spelt in (
        ((slow,), replace(slow, src="cpu:0", dst="cuda:0")),
        ((slow, *HOME.links), HOME.links[0]),  # from the processor to the GPU
    ):
        assert (spelt.src, spelt.dst) == ("cpu:0", "cuda:0")
        many, same = (replace(HOME, links=x) for x in (links, (spelt,)))
        assert min_batch(model, many) == min_batch(model, same) is not None
        assert least(model, many, asked) == least(model, same, asked)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_plan_beats_the_bound(data: st.DataObject) -> None:
    """Any placement of layers, or ``layer_dp``'s, on any devices."""
    model = decoder(MIXTRAL | SMALL) if data.draw(st.booleans()) else decoder(num_hidden_layers=4)
    known = st.sampled_from(["nvidia/rtx-4090", "nvidia/h100", "amd/epyc-7763", "apple/m1-max"])
    likes = data.draw(st.lists(known, min_size=1, max_size=3))
    sizes = [data.draw(st.integers(10**8, 10**10)) for _ in likes]
    devices = tuple(
        Device(f"d{i}", "cpu" if "epyc" in like else "cuda", like=like, memory_bytes=size)
        for i, (like, size) in enumerate(zip(likes, sizes, strict=True))
    )
    rate = data.draw(st.floats(1e8, 1e12))
    cluster = Cluster("c", devices, every_link([d.name for d in devices], 1e-6, rate))
    batch, context = data.draw(st.integers(1, 64)), data.draw(st.integers(2, 8192))
    asked = Serving(Phase.DECODE, context, batch, whole_layers=data.draw(st.booleans()))
    problem = serving_problem(model, cluster, asked)
    solution = LayerDp()(problem)
    if not np.isfinite(solution.value_s):
        return
    for phase in (Phase.PREFILL, Phase.DECODE):
        said = bound(model, cluster, asked, solution.placement, phase)
        parts = (said.least_s, said.slow_s, said.turns_s, said.handing_s)
        assert min(parts) >= -1e-9 and 0 < said.share <= 1 + 1e-9


# --- how many tokens a copy pays for -------------------------------------------------------------


@pytest.mark.parametrize("config", [MIXTRAL | SMALL, MIXTRAL | SMALL | {"model_type": "llama"}])
def test_the_least_batch_that_pays_for_a_copy(config: dict[str, Any]) -> None:
    model = decoder(config)
    found = min_batch(model, HOME)
    assert found is not None and 1 < found <= NEVER_PAYS
    part = next(p for p in model.parts if p.kind in ("experts", "feed_forward") and p.numel > 1e5)
    gpu, host = peaks(model, HOME)
    for tokens, pays in ((found - 1, False), (found, True))[: 2 if found < NEVER_PAYS else 1]:
        asked = Serving(Phase.PREFILL, tokens, 1, tokens)
        copy_s = 1e-5 + part.weight_bytes * part.read(tokens) / 25e9
        on = (host, HOST), (gpu, GPU)
        here_s, there_s = (part_seconds(part, model, asked, *x) for x in on)
        saved_s = here_s - there_s
        assert (copy_s < saved_s) is pays
    slow = every_link(("cpu:0", "cuda:0"), 1e-5, 1e4)
    assert min_batch(model, Cluster("c", (GPU, HOST), slow)) == NEVER_PAYS
    assert min_batch(model, Cluster("c", (HOST,))) is None


# --- what was measured ---------------------------------------------------------------------------


def test_strategies_of_ktransformers() -> None:
    """Without the table: with nothing on the GPU all are one; few hot experts are read often."""
    shares = strategies.power_law(1.93)
    assert shares.sum() == pytest.approx(strategies.CHOSEN) and shares.max() <= 1
    assert shares[:256].sum() / strategies.CHOSEN == pytest.approx(1 - 0.5**1.93, abs=0.01)
    token_s = strategies.Constants().token_s
    assert {token_s(name, 1.0, 9e-3) for name in strategies.STRATEGIES} == {9e-3}
    none = [token_s(name, 0.0, 9e-3) for name in strategies.STRATEGIES]
    assert none == pytest.approx([none[0]] * 5, rel=2e-3)
    # 48 waits, and 10 of 512 experts of 3 MiB each in 48 layers at 211.8 GB/s
    assert none[0] == pytest.approx(9e-3 + 48 * 50.7e-6 + 48 * 10 * 3 * 2**20 / 211.8e9, rel=1e-3)
    ninth = {name: token_s(name, 0.9, 9e-3) for name in strategies.STRATEGIES}
    assert sorted(ninth, key=ninth.__getitem__)[:3] == ["frequency", "front_loading", "dynamic"]


def test_strategies_as_measured() -> None:
    path = DATA / "measured_llm" / f"{strategies.TABLE}.csv"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    facts = strategies.figures(path)
    assert facts["rows"] == 55 and facts["worst"] < 0.1 and facts["median_error"] < 0.02
    assert facts["pairs"] > 60 and facts["pairs_wrong"] == 0 and facts["pairs_alike"] == 2
    assert facts["left_out"]["worst"] < 0.12
