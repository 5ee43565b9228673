"""Splits of layers: the exact program against every split, and what is done today beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.cluster import Cluster, Device, Link
from placement.costs.serving import Phase, Serving, memory, serving_problem
from placement.devices import library
from placement.planners import load
from placement.planners.even_layers import layer_units
from placement.problem import Problem
from placement.search.evaluation import Search
from placement.simulator import score
from tests.planners.test_planners import contiguous
from tests.problems import altered, every_link, graph_of, problem_on, small_problem
from tests.served import LLAMA, MIXTRAL
from tests.served import decoder as decoder_of

BASELINES = ("even_layers", "by_memory", "llama_cpp_split")


def chain(seed, num_ops=5, num_devices=3, *, alike=False, heavy=0) -> Problem:
    """A chain on unlike devices and links, memory tight, one parameter shared by all operators."""
    rng = np.random.default_rng(seed)
    names = [f"d{i}" for i in range(num_devices)]
    memory = [60] * num_devices if alike else rng.integers(30, 80, num_devices).tolist()
    links = tuple(
        Link(a, b, 0.1 if alike else float(rng.random()), float(rng.integers(20, 200)))
        for a, b in permutations(names, 2)
    )
    sizes = [*rng.integers(5, 25, num_ops).tolist(), 7]
    uses = [(i, i) for i in range(num_ops)] + [(i, num_ops) for i in range(num_ops)]
    sizes_of = rng.integers(0, 4, num_ops + 1) * heavy
    facts = {"param_bytes": sizes, "param_uses": uses, "output_tensor": [num_ops]}
    src, reads = [-1, *range(num_ops)], [(i, i) for i in range(num_ops)]
    graph = graph_of(num_ops, reads, sizes_of, tensor_src=src, **facts)
    seconds = rng.random((num_ops, num_devices)) + 0.1
    if alike:
        seconds = np.repeat(seconds[:, :1], num_devices, axis=1)
    else:
        seconds[rng.random(seconds.shape) < 0.1] = np.inf
        seconds[:, 0] = np.where(np.isfinite(seconds).any(axis=1), seconds[:, 0], 1.0)
    pairs = rng.random((num_ops + 1, num_devices, num_devices))  # of each tensor its own
    if alike:
        pairs[:] = 0.1
    transfers = None if heavy else pairs * (1 - np.eye(num_devices))
    return problem_on(
        graph, seconds, device={"kind": ["cpu", "npu", "npu"]}, memory_bytes=memory, links=links,
        profile={"transfer_s": transfers}, objective="latency", num_microbatches=1, max_in_flight=1,
    )  # fmt: skip


def best_contiguous(problem: Problem) -> float:
    """The least cost of all contiguous splits."""
    n = np.arange(problem.num_ops)
    able = [row for row in contiguous(problem) if np.isfinite(problem.compute_s[n, row]).all()]
    search = Search(problem)
    search.costs(able)
    return search.best_s


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), alike=st.booleans())
def test_no_contiguous_split_is_better(seed: int, alike: bool) -> None:
    problem = chain(seed, alike=alike)
    solution, best = load("layer_dp")(problem), best_contiguous(problem)
    if np.isfinite(best):
        assert solution.value_s <= best * (1 + 1e-9)
        assert solution.value_s == score(problem, solution.placement)[0]
    else:
        assert solution.value_s == np.inf and solution.stats["infeasible"]
    with_tensors = load("layer_dp")(chain(seed, alike=alike, heavy=1))
    assert with_tensors.value_s == np.inf or with_tensors.value_s > 0


@pytest.mark.parametrize("receive_s", [0.0, 0.5])
def test_tensors_of_a_cut_wait_for_each_other(receive_s: float) -> None:
    """Cut behind the first operator 1 + (1 + 1) * 2 + 2 = 7 s, behind the second 2 + 3 + 1 = 6."""
    two = [(0, 2, [1]), (0, 2, [1]), (1, 3, [2])]
    links = every_link(("d0", "d1"), 0.0, 1.0)
    problem = small_problem(np.ones((3, 2)), tensors=two, param_bytes=100, memory_bytes=250,
                            links=[replace(x, receive_s=receive_s) for x in links],
                            objective="latency", num_microbatches=1)  # fmt: skip
    solution = load("layer_dp")(problem)
    assert solution.placement.tolist() in ([0, 0, 1], [1, 1, 0])
    assert solution.value_s == best_contiguous(problem) == pytest.approx(6 + receive_s)


def test_what_is_before_the_layers_may_be_the_whole_first_one() -> None:
    """Five operators of 100 bytes, of which each of three devices holds two."""
    names = ["0", "1.0", "1.1", "2.0", "2.1"]
    chained = [(n, n + 1) for n in range(4)]
    facts = {"param_bytes": 100, "memory_bytes": 250, "objective": "latency"}
    problem = small_problem(np.ones((5, 3)), chained, graph={"op_module": names}, **facts)
    assert load("layer_dp")(problem).value_s == 5.0


def test_devices_in_one_order_where_there_are_many_sets() -> None:
    problem = chain(3)
    every, one = load("layer_dp")(problem), load("layer_dp", max_states=1)(problem)
    assert every.stats["all_orders"] and not one.stats["all_orders"]
    assert every.value_s <= one.value_s


def test_other_problems_get_the_best_single_device() -> None:
    problem = replace(chain(1), objective="period")
    assert "period, not latency" in load("layer_dp")(problem).stats["no_chain"]
    edges = [(0, 1), (0, 2), (1, 2)]
    skip = small_problem(np.ones((3, 1)), edges, graph={"op_name": "abc"}, objective="latency")
    why = load("layer_dp")(skip).stats["no_chain"]
    assert why == "'c' reads from 'a', which is not just before it"


def home(seed: int, config: Mapping[str, object]) -> Problem:
    """A token on two to six devices of the library, of whose memory the model needs 60 to 95 %."""
    rng = np.random.default_rng(seed)
    likes = rng.choice(sorted(library()), int(rng.integers(2, 7)), replace=False).tolist()
    hosts = rng.integers(0, 3, len(likes)).tolist()
    share = rng.uniform(0.3, 1.0, len(likes))
    network = ((1e-4, 1.2e8), (1e-4, 3e8), (5e-5, 1.2e9))[int(rng.integers(3))]
    needed = rng.uniform(0.6, 0.95)
    names = [f"{like}/{i}" for i, like in enumerate(likes)]
    links = tuple(
        Link(names[i], names[j], *((15e-6, 2e10) if hosts[i] == hosts[j] else network))
        for i, j in permutations(range(len(likes)), 2)
    )

    devices = tuple(
        Device(n, library()[x].kind, like=x, model=x, memory_bytes=library()[x].memory_bytes)
        for n, x in zip(names, likes, strict=True)
    )
    serving = Serving(Phase.DECODE, 8192, whole_layers=config is not MIXTRAL)
    problem = serving_problem(decoder_of(config), Cluster("home", devices, links), serving)
    rooms = share * problem.memory_bytes
    rooms *= problem.graph.param_bytes.sum() / needed / rooms.sum()
    return altered(problem, {"memory_bytes": lambda d: int(rooms[names.index(d.name)])})


@pytest.mark.parametrize("seed", range(12))
def test_home_clusters(seed: int) -> None:
    """Never over memory; never slower than what is done today, nor than the contiguous split."""
    problem = home(seed, LLAMA if seed % 3 else MIXTRAL)
    solution = load("layer_dp")(problem)
    held = memory(problem, solution.placement)
    fits = all(x["needed_bytes"] <= x["there_bytes"] for x in held.values())
    assert solution.value_s == np.inf or fits
    for name in BASELINES:
        other = load(name)(problem)
        assert solution.value_s <= other.value_s * (1 + 1e-9), name


def test_experts_beside_attention() -> None:
    """Attention of all layers fits on the fast device, experts of a few: the others are left."""
    decoder = decoder_of(MIXTRAL, num_hidden_layers=8)
    gpu = Device("gpu", "cuda", like="nvidia/rtx-4090", memory_bytes=14 * 10**9)
    host = Device("host", "cpu", like="amd/epyc-9654")
    cluster = Cluster("c", (gpu, host), every_link(("gpu", "host"), 1e-5, 2e10))
    problem = serving_problem(decoder, cluster, Serving("decode", 4096, whole_layers=False))
    solution = load("layer_dp")(problem)
    kinds = np.array(problem.graph.op_kind)
    assert (solution.placement[kinds == "attention"] == 0).all()
    assert 0 < (solution.placement[kinds == "experts"] == 1).sum() < 8
    assert solution.value_s < load("layer_dp", helpers=False)(problem).value_s
    # As few as must: one more on the GPU does not fit.
    held = memory(problem, solution.placement)["gpu"]
    one = decoder.parts[3].weight_bytes
    assert held["needed_bytes"] + one > held["there_bytes"]


# --- baselines -----------------------------------------------------------------------------------


def layers(counts: list[int], memory_bytes: list[int], kinds: list[str] | None = None) -> Problem:
    """Layers of so many bytes on devices of so much memory."""
    n, d = len(counts), len(memory_bytes)
    names = [f"layers.{i}.mlp" for i in range(n)]
    facts = {"op_name": names, "op_module": names}
    edges, alike = [(i, i + 1) for i in range(n - 1)], kinds or ["npu"] * d
    some = {"param_bytes": counts, "memory_bytes": memory_bytes, "objective": "latency"}
    return small_problem(np.ones((n, d)), edges, graph=facts, device={"kind": alike}, **some)


@pytest.mark.parametrize(
    ("planner", "memory_bytes", "kinds", "expected"),
    [
        ("even_layers", [99, 99, 99], None, [0, 0, 0, 1, 1, 1, 2, 2]),
        ("by_memory", [60, 20], None, [0, 0, 0, 0, 0, 0, 1, 1]),
        ("by_memory", [20, 60], None, [1, 1, 1, 1, 1, 1, 0, 0]),  # the largest first
        ("by_memory", [50, 30], None, [0, 0, 0, 0, 0, 1, 1, 1]),
        ("by_memory way=fill", [100, 30], ["cpu", "npu"], [1, 1, 1, 0, 0, 0, 0, 0]),
        ("llama_cpp_split", [60, 20], None, [0, 0, 0, 0, 0, 0, 1, 1]),
        # Three layers at most are left to the processor until the others fit.
        ("llama_cpp_split", [100, 30, 20], ["cpu", "npu", "npu"], [0, 0, 0, 1, 1, 1, 2, 2]),
    ],
)
def test_what_is_done_today(planner, memory_bytes, kinds, expected):
    name, _, option = planner.partition(" ")
    options = dict([option.split("=")]) if option else {}
    solution = load(name, **options)(layers([10] * 8, memory_bytes, kinds))
    assert solution.placement.tolist() == expected and np.isfinite(solution.value_s)


def test_an_even_split_does_not_look_at_memory() -> None:
    assert load("even_layers")(layers([10] * 4, [10, 90])).value_s == np.inf
    assert np.isfinite(load("by_memory")(layers([10] * 4, [10, 90])).value_s)


def test_layers_are_items_of_lists() -> None:
    names = ["model.embed", "model.layers.0.a", "model.layers.0.b", "model.layers.1", "head"]
    problem = small_problem(np.ones((5, 1)), graph={"op_module": names})
    assert layer_units(problem).tolist() == [0, 0, 0, 1, 1]
    assert layer_units(chain(0)).tolist() == [0, 1, 2, 3, 4]
    nested = ["layers.0.attn", "layers.0.ff.0", "layers.0.ff.1", "layers.1.attn", "2.conv.1"]
    problem = small_problem(np.ones((5, 1)), graph={"op_module": nested})
    assert layer_units(problem).tolist() == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("kind", ["embedding", "aten.embedding.default"])
def test_the_embedding_is_on_the_processor(kind: str) -> None:
    facts = {"op_kind": [kind, "aten.linear.default"], "op_module": ["wte", "h.0"]}
    problem = small_problem(np.ones((2, 2)), [(0, 1)], device={"kind": ["cpu", "cuda"]},
                            graph=facts, objective="latency")  # fmt: skip
    assert load("llama_cpp_split")(problem).placement.tolist() == [0, 1]
