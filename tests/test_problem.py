"""The decision problem: what it derives from its parts, what it refuses, what it can prove."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from placement.bounds import lower_bound, lower_bounds
from placement.bounds.calls import Call, tighten
from placement.bounds.loads import balance_prices, priced
from placement.cluster import Cluster, ClusterError, Device, Link
from placement.graph import OpGraph
from placement.problem import Problem, ProblemError, Solution
from placement.profile import Profile, ProfileError
from placement.replan import remaining
from placement.simulator import evaluate, score, simulate
from tests.problems import (
    DIAMOND,
    altered,
    chain,
    every_placement,
    graph_of,
    problem_on,
    problems,
    random_placement,
    random_problem,
    small_problem,
)


def make(graph: OpGraph, compute_s: Any, links: tuple[Link, ...] = (), **problem: Any) -> Problem:
    return problem_on(graph, compute_s, memory_bytes=100, links=links, **problem)


CHAIN = OpGraph.build("chain", ["A", "B"], [0], [4], [(0, 1)])
BUS = Link("d0", "d1", 1.0, 2.0, blocking=True, channel="bus")
LINKS = BUS, Link("d1", "d0", 2.0, 4.0, channel="bus")


def test_links_as_tables() -> None:
    problem = make(CHAIN, [[1, 1], [1, 1]], LINKS)
    assert problem.link_latency_s.tolist() == [[0, 1], [2, 0]]
    assert problem.link_s_per_byte.tolist() == [[0, 0.5], [0.25, 0]]
    assert problem.link_blocking.tolist() == [[False, True], [False, False]]
    channel = problem.link_channel
    assert channel[0, 1] == channel[1, 0]  # of one name
    assert problem.num_channels == channel.max() + 1
    assert problem.transfer_s(0, 0, 1) == 1 + 4 / 2
    assert problem.transfer_s(0, 1, 0) == 2 + 4 / 4
    assert problem.transfer_s(0, 1, 1) == 0
    assert problem.mean_transfer_s.tolist() == [3]
    alone = make(CHAIN, [[1, 1], [1, 1]]).link_channel
    assert len(set(alone.ravel())) == 4  # each ordered pair for itself
    itself = make(CHAIN, [[1, 1], [1, 1]], (Link("d0", "d0", 9.0),))  # is nothing
    assert itself.link_latency_s.tolist() == [[0, 0], [0, 0]]


def test_ranks_are_longest_paths() -> None:
    # A ─▶ B ─▶ D     mean compute 1, 2, 4, 1; transfers 3 for a tensor of 4 bytes,
    # └──▶ C ──▶ D    1.5 for one without bytes
    graph = graph_of(4, DIAMOND, [4, 0, 4], tensor_src=[0, 1, 2])
    problem = make(graph, [[1, 1], [1, 3], [4, np.inf], [1, 1]], LINKS)
    assert problem.upward_rank_s.tolist() == [1 + 3 + 8, 2 + 1.5 + 1, 4 + 3 + 1, 1]
    assert problem.downward_rank_s.tolist() == [0, 1 + 3, 1 + 3, 1 + 3 + 4 + 3]
    assert problem.mean_compute_s.tolist() == [1, 2, 4, 1]
    assert problem.priority.tolist() == [0, 2, 1, 3]
    equal = small_problem([[2, 2], [1, 3], [2, 2]])  # by number
    assert equal.priority.tolist() == [0, 1, 2]


def test_groups_are_supported_where_all_their_operators_are() -> None:
    graph = OpGraph.build("grouped", list("ABC"), [], [], [], group=[0, 1, 0])
    problem = make(graph, [[1, 2], [3, np.inf], [5, 6]])
    assert problem.group_compute_s.tolist() == [[6, 8], [3, np.inf]]
    assert problem.supported.tolist() == [[True, True], [True, False], [True, True]]
    first, second = problem.cluster.device_names
    message = rf"operator 2 \('C'\) is on '{second}', the rest of its .* together, on '{first}'"
    with pytest.raises(ProblemError, match=message):
        problem.check_placement([0, 0, 1])
    assert problem.check_placement([1, 0, 1]).dtype == np.int32


def test_what_is_pinned_can_run_there_only() -> None:
    modules = ["encoder.layer.1", "encoder.layer.10", "head"]
    graph = OpGraph.build("net", list("ABC"), [], [], [], op_module=modules, group=[0, 1, 1])
    problem = make(graph, [[1, 2]] * 3)
    first, second = problem.cluster.device_names

    def where(**pins: str) -> list[list[bool]]:
        return problem.pinned(pins).supported.tolist()

    # A module is not one whose name begins alike; C goes along with B, its group.
    free, on = [True, True], [[True, False], [False, True]]
    assert where(**{"encoder.layer.1": first}) == [on[0], free, free]
    assert where(**{"enc*.layer.10": second}) == [free, on[1], on[1]]
    assert where(A=second, encoder=second) == [[False, True]] * 3
    assert where(encoder=first, A=first) == where(**{"[AB]": first})
    for pins, message in (
        ({"A": "gpu"}, r"A=gpu: no such device; use one of \['"),
        ({"encode": first}, f"encode={first}: no operator and no module .* there: head, encoder"),
        ({"encoder": first, "A": second}, f"A={second}: cannot run there, or is pinned to another"),
        (
            {"B": first, "C": second},
            f"--on B={first} and --on C={second}: operators 'B' of module 'encoder.layer.10' and "
            "'C' of 'head' work on the same memory",
        ),
    ):
        with pytest.raises(ProblemError, match=message):
            problem.pinned(pins)


def test_views_follow_the_memory_that_they_are_pinned_away_from() -> None:
    """As cosines of rotary embeddings, of which every layer takes a view."""
    modules = ["rotary", "layers.0", "layers.0", "layers.1", "layers.1"]

    def pinned(kind: str, **pins: str) -> list[list[bool]]:
        graph = OpGraph.build(
            "net", ["cos", "view", "mul", "view_1", "mul_1"], range(5), [8] * 5,
            [(0, 1), (0, 3), (1, 2), (3, 4)], op_module=modules, tensor_root=[0, 0, 2, 0, 4],
            op_kind=["aten.cos.default", kind, "aten.mul.Tensor", kind, "aten.mul.Tensor"],
            group=[0, 0, 1, 0, 2],
        )  # fmt: skip
        return make(graph, [[1, 1]] * 5).pinned(pins).supported.tolist()

    view, first, second = "aten.unsqueeze.default", *make(CHAIN, [[1, 1]] * 2).cluster.device_names
    free, on = [True, True], [[True, False], [False, True]]
    apart = {"layers.0": first, "layers.1": second}
    assert pinned(view, **apart) == [free, free, on[0], free, on[1]]
    assert pinned(view, rotary=first, **apart) == [on[0], on[0], on[0], on[0], on[1]]
    # On one device everything goes along, as before.
    assert pinned(view, **{"layers.0": first}) == [on[0], on[0], on[0], on[0], free]
    with pytest.raises(ProblemError, match=r"'view' of module 'layers\.0' and 'view_1'"):
        pinned("aten.relu_.default", **apart)  # which work on that memory


@pytest.mark.parametrize("number", [0.7, np.nan, np.inf, -0.5, 2**40])
def test_a_placement_holds_whole_numbers(number: float) -> None:
    problem = make(CHAIN, [[3, 1], [2, 4]])
    for check in (problem.check_placement, problem.as_batch):
        assert check(np.array([1.0, 0.0])).ravel().tolist() == [1, 0]
        with pytest.raises(ProblemError, match=r"numbers of devices, 0, 1, ...: .* is none"):
            check(np.array([0, number]))


def test_loaded_seconds_are_never_below_those_alone() -> None:
    problem = make(CHAIN, [[1, 2], [3, 4]])
    assert problem.loaded_s is problem.compute_s
    problem = altered(problem, loaded_s=np.array([[2.0, 1.0], [3.0, 9.0]]))
    assert problem.loaded_s.tolist() == [[2, 2], [3, 9]]


def test_parameters_count_once_per_device() -> None:
    tied = {"param_bytes": [10, 1], "param_uses": [(0, 0), (2, 0), (1, 1)]}
    problem = make(graph_of(3, [], **tied), [[1, 1]] * 3)
    assert problem.param_bytes_on(np.array([0, 0, 0])).tolist() == [11, 0]
    assert problem.param_bytes_on(np.array([0, 1, 0])).tolist() == [10, 1]
    assert problem.param_bytes_on(np.array([0, 1, 1])).tolist() == [10, 11]


def test_memory_is_ignored_only_where_it_cannot_bind() -> None:
    graph = OpGraph.build("m", ["A"], [0], [20], [], param_bytes=[40], param_uses=[(0, 0)])
    problem = make(graph, [[1, 1]], max_in_flight=3)
    assert not problem.memory_may_bind  # 40 + 3 * 20 of 100
    assert replace(problem, max_in_flight=4).memory_may_bind
    assert not replace(problem, max_in_flight=4, num_microbatches=3).memory_may_bind
    assert altered(problem, workspace_bytes=np.array([1])).memory_may_bind
    assert altered(problem, library_bytes=np.array([[0, 1]])).memory_may_bind


@given(problems(), st.integers(0, 100))
def test_no_run_needs_more_than_everything_at_once(problem: Problem, seed: int) -> None:
    g, workspace = problem.graph, problem.profile.workspace_bytes
    most = g.param_bytes.sum() + problem.max_in_flight * g.tensor_bytes.sum()
    most += sum(0 if x is None else x.max() for x in (workspace, problem.profile.library_bytes))
    assert simulate(problem, random_placement(problem, seed)).peak_bytes.max() <= most


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"objective": "speed"}, r"objective 'speed' is unknown; use one of \('period', 'lat"),
        ({"num_microbatches": 0}, r"num_microbatches = 0 and max_in_flight = 4 must be at least"),
        ({"max_in_flight": 0}, r"max_in_flight = 0 must be at least 1"),
        ({"objective": 3}, r"objective 3 is unknown"),
        ({"num_microbatches": "many"}, r"num_microbatches must be .*, not 'many' \(of type str"),
        ({"max_phases": 1.5}, r"max_phases must be a whole number, not 1.5 \(of type float\)"),
        ({"second_j": None}, r"second_j must be a number, not None"),
        ({"contention": "no"}, r"contention must be True or False, not 'no'"),
    ],
)
def test_what_is_no_problem(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        make(CHAIN, [[1, 1], [1, 1]], **changes)


def test_parts_may_be_lists_and_are_told_what_they_are_not() -> None:
    cluster = Cluster("c", [Device("a")], [])
    problem = Problem(CHAIN, cluster, Profile(["a"], [[1.0], [2.0]], [[0.0], [0.0]]))
    assert simulate(problem, [0, 0], num_microbatches=1).latency_s == 3.0
    for count, message in (
        (0, "= 0 and max_in_flight = 4 must be"),
        ("x", "a whole number, not 'x'"),
    ):
        with pytest.raises(ProblemError, match=message):
            simulate(problem, [0, 0], num_microbatches=count)
    for wrong in (["a", "a"], {"A": "a"}, None, Solution([0, 0], 3.0)):
        with pytest.raises(ProblemError, match=r"numbers of devices.*of a solution: \.placement"):
            simulate(problem, wrong)
    for make_one, message in (
        (lambda: Cluster("c", ("a",)), r"devices holds 'a' \(of type str\), not a placement.Dev"),
        (lambda: Device("a", memory_bytes="16GB"), "memory_bytes = '16GB', must be from 1"),
        (lambda: Link("a", "b", "fast"), "latency_s = fast.* must be >= 0"),
    ):
        with pytest.raises(ClusterError, match=message):
            make_one()


def test_parts_that_do_not_fit_each_other() -> None:
    problem = make(CHAIN, [[1, 1], [1, 1]])
    why = r"cluster must be a placement.Cluster .*, not OpGraph.*chain"
    with pytest.raises(ProblemError, match=why):
        replace(problem, cluster=CHAIN)
    with pytest.raises(ProblemError, match=r"the cluster has \['x'\]; use profile.for_cluster"):
        replace(problem, cluster=Cluster("other", (Device("x"),)))
    with pytest.raises(ProfileError, match="profile has 2 operators"):
        replace(problem, graph=OpGraph.build("one", ["A"], [], [], []))
    together = OpGraph.build("g", ["A", "B"], [], [], [], group=[0, 0])
    with pytest.raises(ProblemError, match=r"colocation group \['A', 'B'\]"):
        make(together, [[1, np.inf], [np.inf, 1]])


def balance_bound(seconds: np.ndarray) -> float:
    return float(priced(seconds, balance_prices(seconds)).sum())


@pytest.mark.parametrize(
    "seconds, bound",
    [
        ([[1, 2], [2, 1]], 1),  # each where it is fast
        ([[2, 1]], 2 / 3),  # a third on d0 takes as long as two thirds on d1
        ([[1, np.inf], [1, 1]], 1),
        ([[3, np.inf], [1, 1]], 3),
        ([[0, 5], [0, 5]], 0),
        ([[4, 4, 4, 4], [1, 1, 1, 1], [3, 3, 3, 3]], 8 / 4),  # equal speeds: total / K
        ([[6, 3, 2]], 1),  # 1/6 + 1/3 + 1/2 of it in one second
    ],
)
def test_balance_bound_of_known_cases(seconds: list[list[float]], bound: float) -> None:
    assert balance_bound(np.array(seconds, float)) == pytest.approx(bound, rel=1e-9)


def spread(s: np.ndarray) -> float:
    """The fractional load balance as it reads: shares x [G, D] and the largest load, by HiGHS."""
    g, d = s.shape
    finite = np.isfinite(s)
    cost = np.where(finite, s, 0.0)
    load = np.zeros((d, g * d + 1))
    whole = np.zeros((g, g * d + 1))
    for i, j in itertools.product(range(g), range(d)):
        load[j, i * d + j] = cost[i, j]
        whole[i, i * d + j] = 1
    load[:, -1] = -1
    limits = [*((0, 1 if ok else 0) for ok in finite.ravel()), (0, None)]
    return float(linprog(np.eye(g * d + 1)[-1], load, np.zeros(d), whole, np.ones(g), limits).fun)


@given(st.integers(0, 2**32 - 1))
def test_balance_bound_is_the_fractional_optimum_and_below_every_assignment(seed: int) -> None:
    rng = np.random.default_rng(seed)
    g, d = rng.integers(1, 5), rng.integers(1, 5)
    s = rng.integers(0, 6, (g, d)) * 1.0 if rng.random() < 0.5 else rng.random((g, d))
    if rng.random() < 0.5:
        s[:, rng.integers(0, d, d)] = s[:, rng.integers(0, d, d)]  # equal devices
    s[:, 1:][rng.random((g, d - 1)) < 0.2] = np.inf
    bound = balance_bound(s)
    assert bound == pytest.approx(spread(s), rel=1e-6, abs=1e-9)
    every = itertools.product(range(d), repeat=int(g))
    best = min(np.bincount(p, weights=s[range(g), p], minlength=d).max() for p in every)
    assert bound <= best * (1 + 1e-12)


def test_bounds_by_hand() -> None:
    # A ─▶ B; A takes 3 or 1, B 2 or 4: path 1 + 2; B and C share a device: 2 + 5 or 4 + 5
    graph = OpGraph.build("b", list("ABC"), [0], [0], [(0, 1)], group=[0, 1, 1])
    bounds = lower_bounds(make(graph, [[3, 1], [2, 4], [5, 5]]))
    assert bounds["latency"] == bounds["period"] == 7  # the group of B and C
    bounds = lower_bounds(make(CHAIN, [[3, 1], [2, 4]]))
    assert (bounds["latency"], bounds["period"]) == (3, 2)
    # 7 s beside 1 s: 4 s each on average, but no device has less than the heaviest group.
    assert lower_bounds(small_problem([[7.0, 7.0], [1.0, 1.0]]))["max_load"] == pytest.approx(7.0)


@pytest.mark.parametrize("seed", range(76))
def test_bounds_hold_for_every_placement_of_small_problems(seed: int) -> None:
    problem = random_problem(seed, 5, 2 + seed % 2, grouped=True, unsupported=True)
    if seed >= 40:  # few in flight, or all
        runs = {"num_microbatches": (1, 2, 5, 12, 17, 32)[seed % 6], "max_in_flight": 1 + seed % 4}
        problem = replace(problem, **runs)
    values, bounds = evaluate(problem, every_placement(problem)), lower_bounds(problem)
    assert values.latency_s.min() >= bounds["latency"] * (1 - 1e-9)
    assert values.period_s.min() >= bounds["period"] * (1 - 1e-9)
    assert values.energy_j.min() >= bounds["energy"] * (1 - 1e-9)
    own = {what: lower_bound(problem.with_objective(what)) for what in bounds}
    # What devices write and read is looked at where it is the problem's objective only.
    assert bounds.pop("max_load") <= own.pop("max_load") * (1 + 1e-9) and bounds == own


def test_a_problem_is_bounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(CHAIN, [[3, 1], [2, 4]])
    bound_s = lower_bound(problem)
    monkeypatch.setattr("placement.bounds._bounds", lambda other, *_: {other.objective: -1.0})
    assert lower_bound(problem.with_objective(problem.objective)) == bound_s > 0
    assert lower_bound(replace(problem)) == -1


def branches(rng: np.random.Generator, most: int) -> OpGraph:
    """So many operators at most: forks, branches and joins. Some parameters are tied."""
    edges: list[tuple[int, int]] = []
    last = 0
    while (free := most - 1 - last) >= 3:
        width = int(rng.integers(2, min(3, free - 1) + 1))
        ends = [last] * width
        at = last + 1
        for k in range(width + int(rng.integers(0, free - width))):  # the last is the join
            branch = k if k < width else int(rng.integers(width))
            edges.append((ends[branch], at))
            ends[branch], at = at, at + 1
        edges += [(end, at) for end in ends]
        last = at
    n = last + 1
    tied = rng.integers(n, size=(int(rng.integers(3)), 2))
    uses = [(0, 0), *((1 + src, dst) for src, dst in edges)]
    sizes, param_uses = rng.integers(0, 3, n + 1), [*((i, i) for i in range(n)), *tied]
    params = {"param_bytes": rng.integers(0, 50, n), "param_uses": param_uses}
    return graph_of(n, uses, sizes, tensor_src=[-1, *range(n)], **params)


def like_a_gpu(seed: int) -> Problem:
    """Blocks on a CPU and a GPU, which may stream, may be small, and slow each other."""
    rng = np.random.default_rng(seed)
    graph = branches(rng, 6 if seed % 4 == 1 else 9)
    n, all_bytes = graph.num_ops, int(graph.param_bytes.sum())
    seconds = rng.random((n, 2)) * [rng.choice([1, 2, 5]), 1]
    room = int(all_bytes * rng.random()) + 20 if seed % 2 else 10**6
    devices = [Device("cpu"), Device("gpu", "cuda", memory_bytes=room)]
    links = [
        Link("cpu", "gpu", rng.random() * rng.choice([0.2, 1, 3]), 1e3, wake_s=0.1, send_s=0.1),
        Link("gpu", "cpu", rng.random() / 10, 1e3),
    ]
    if seed % 4 == 1:
        # It holds nothing.
        devices.append(Device("streamed", "cuda", memory_bytes=1, streams="gpu"))
        links.append(Link("cpu", "streamed", rng.random() / 10, 10.0 * rng.integers(1, 10)))
    loaded_s = seconds * (1 + rng.random((n, 2)) * rng.choice([0.2, 2, 10]))
    facts: Any = {"loaded_s": loaded_s, "batch_s": rng.random()}
    profile = Profile(("cpu", "gpu"), seconds, 0 * seconds, **facts)
    cluster = Cluster("c", tuple(devices), tuple(links))
    stream = {"num_microbatches": 4} if seed % 3 else {"num_microbatches": 16, "max_in_flight": 2}
    return Problem(graph, cluster, profile.for_cluster(cluster), **stream)


CLOSE = (32, 37, 62, 96, 117, 149, 157, 180, 193, 210, 221, 240, 242, 244)  # to the least


@pytest.mark.parametrize("seed", [*range(16), *CLOSE, *range(-1, -9, -1)])
def test_bounds_hold_for_every_placement_of_a_cpu_and_a_gpu(seed: int) -> None:
    """Below 0: libraries keep memory of the GPU."""
    problem, rng = like_a_gpu(abs(seed)), np.random.default_rng(abs(seed))
    if seed < 0:
        most = int(problem.graph.param_bytes.sum() * rng.uniform(0.05, 0.4))
        kept = rng.choice([0, most // 2, most], (problem.num_ops, problem.num_devices))
        kept[:, 0] = 0
        problem = altered(problem, library_bytes=kept)
    values, bounds = evaluate(problem, every_placement(problem)), lower_bounds(problem)
    can = values.feasible
    assert values.latency_s[can].min(initial=np.inf) >= bounds["latency"] * (1 - 1e-9)
    assert values.period_s[can].min(initial=np.inf) >= bounds["period"] * (1 - 1e-9)


def test_a_micro_batch_ends_before_too_many_others_begin() -> None:
    """Six operators in a row, each 1 s on one device and 2 s on three others: loads could be 2.4 s.

    No path takes less than 6 s: with one micro-batch in flight that is a period, with two half.
    """
    seconds = [[1.0, 2.0, 2.0, 2.0]] * 6
    two = small_problem(seconds, chain(6), max_in_flight=2)
    assert evaluate(two, [0, 0, 0, 0, 1, 1]).period_s[0] == pytest.approx(4.0)
    assert lower_bounds(two)["period"] == pytest.approx(3.0)
    assert lower_bounds(two)["max_load"] == pytest.approx(6 / (1 + 3 / 2))
    for alone in (replace(two, max_in_flight=1), replace(two, num_microbatches=1)):
        assert lower_bounds(alone)["period"] == pytest.approx(6.0)


def test_a_call_pays_for_its_input_and_runs_branches_one_after_another() -> None:
    # Input ─▶ A ─▶ B, C, D ─▶ E. On the GPU 4 + 5 s; there A to E is a path of 3 s, and whatever of
    # B, C and D is elsewhere takes 4 s to come back; on the CPU all is 50 s.
    uses = [(0, 0), *((1, i) for i in (1, 2, 3)), *((i, 4) for i in (2, 3, 4))]
    graph = OpGraph.build("branches", list("ABCDE"), [-1, 0, 1, 2, 3], [0] * 5, uses)
    cluster = Cluster("c", (Device("cpu"), Device("gpu", "cuda")))
    links = (Link("cpu", "gpu", 4.0),)
    problem = problem_on(graph, [[10.0, 1.0]] * 5, cluster=cluster, links=links)
    assert lower_bounds(problem)["latency"] == pytest.approx(9.0)
    assert evaluate(problem, [1] * 5).latency_s[0] == pytest.approx(9.0)


def test_what_crosses_between_two_devices_waits_for_its_channel() -> None:
    """Three operators take 9 s, or 1 s where each of their inputs takes 4 s to get to.

    In fractions 27 / 13 of them have the 4 s each, the others 9 s each: 108 / 13 s both. Whole,
    one takes 9 s meanwhile. Of two in a row on devices of their own, an item of a stream takes as
    long as its tensor is sent (which is so of 11 of 12 items); with one in flight it is a call.
    """
    cluster = Cluster("c", (Device("cpu"), Device("gpu", "cuda")))
    graph = graph_of(3, [(0, 0), (1, 1), (2, 2)], tensor_src=[-1] * 3)
    here = {"cluster": cluster, "links": (Link("cpu", "gpu", 4.0),)}
    problem = problem_on(graph, [[9.0, 1.0]] * 3, **here)
    assert evaluate(problem, [0, 1, 1]).latency_s[0] == 9.0
    assert lower_bounds(problem)["latency"] == pytest.approx(9)
    call = Call(problem)
    assert tighten(call.program, call.tighten, np.inf) * call.unit_s == pytest.approx(108 / 13)
    apart = problem_on(CHAIN, [[1, np.inf], [np.inf, 1]], **here, max_in_flight=2)
    assert evaluate(apart, [0, 1]).period_s[0] == 4.0
    assert lower_bounds(apart)["period"] == pytest.approx(4.0 * 11 / 12)
    alone = replace(apart, max_in_flight=1)
    assert evaluate(alone, [0, 1]).period_s[0] == 6.0
    assert lower_bounds(alone)["period"] == pytest.approx(6.0)


def test_a_stream_is_as_slow_as_what_has_no_room_on_the_fast_device() -> None:
    graph = graph_of(4, [], param_bytes=10)
    problem = problem_on(graph, [[8.0, 1.0]] * 4, memory_bytes=[40, 20])
    assert evaluate(problem, [0, 0, 1, 1]).period_s[0] == 16.0
    for what in ("period", "max_load"):
        assert lower_bounds(problem)[what] == pytest.approx(16.0)


def test_loads_know_nothing_of_the_memory_of_tensors() -> None:
    """What the first operator makes has no room beside its parameters; ``max_load`` lets it run."""
    sizes = {"param_bytes": [100, 1], "tensor_bytes": [50, 0], "memory_bytes": [100, 1000]}
    problem = small_problem([[1.0, 10.0], [1.0, 1.0]], **sizes, objective="max_load")
    assert score(problem, [[0, 1]])[0] == 1.0
    assert lower_bound(problem) <= 1.0 and lower_bounds(problem)["max_load"] <= 1.0
    assert lower_bounds(problem)["period"] > 1.0  # of which some of it must run elsewhere


def test_memory_without_a_limit_is_no_lack_of_it() -> None:
    """Two operators of 500 bytes are on the first GPU, 2 s; nothing need be streamed."""
    cards = Device("g0", "cuda", memory_bytes=1000), Device("g1", "cuda")
    streams = Device("s", "cuda", streams="g0", buffer_bytes=600)
    cluster = Cluster("c", (Device("cpu"), *cards, streams), (Link("cpu", "s", 5.0, 1e9),))
    seconds = [[np.inf, 1.0, 10.0, 1.0]] * 2
    problem = problem_on(
        graph_of(2, [], param_bytes=500), seconds, cluster=cluster, objective="latency"
    )
    assert score(problem, [[1, 1]])[0] == 2.0
    assert lower_bound(problem) <= 2.0 * (1 + 1e-9)


def test_joules_of_what_is_streamed_are_of_its_seconds_not_of_the_copies() -> None:
    """1 s of 10 W, while 4 bytes come in 4 s."""
    watts = {"busy_w": 10.0, "idle_w": 0.0}
    card = Device("gpu", "cuda", **watts)
    devices = (
        Device("cpu", busy_w=0.0, idle_w=0.0),
        card,
        Device("s", "cuda", streams="gpu", **watts),
    )
    cluster = Cluster("c", devices, (Link("cpu", "s", 0.0, 1.0),))
    problem = problem_on(
        graph_of(1, [], param_bytes=4), [[np.inf, np.inf, 1.0]], cluster=cluster, objective="energy"
    )
    assert lower_bound(problem) <= score(problem, [[2]])[0] * (1 + 1e-9)


def test_what_has_no_room_is_streamed_through_two_buffers() -> None:
    """Of four operators with 10 bytes the GPU holds 25: one, and the buffers; three take 2 s.

    A call after another takes what the three copies take: operators run meanwhile.
    """
    graph = graph_of(4, chain(4), tensor_src=[0, 1, 2], param_bytes=10)
    devices = Device("cpu"), Device("gpu", "cuda", memory_bytes=30)
    streams = Device("s", "cuda", streams="gpu")
    cluster = Cluster("c", (*devices, streams), (Link("cpu", "s", 0.0, 5.0),))
    seconds = np.array([[9.0, 1.0]] * 4)
    profile = Profile(("cpu", "gpu"), seconds, 0 * seconds).for_cluster(cluster)
    problem = Problem(graph, cluster, profile)
    assert evaluate(problem, [1, 2, 2, 2]).latency_s[0] == pytest.approx(6.0)
    assert 5.5 < lower_bounds(problem)["latency"] <= 6.0  # of fractions of operators, any buffer
    with pytest.raises(ProblemError, match="'s' has no time of its own: leave that device out"):
        problem.with_objective("max_load")
    assert score(problem.by_loads, [1, 2, 2, 2]).tolist() == [6.0]  # of `s` alone


def streaming(links: tuple[Link, ...], other: bool = False, **more: Any) -> Problem:
    """Three operators in a row with 2 bytes, each 1 s on a GPU that may stream them by 4 bytes."""
    power = {"busy_w": 0.0, "idle_w": 1.0}
    hosts = [Device(name, **power) for name in (("cpu", "cpu2") if other else ("cpu",))]
    card = Device("gpu", "cuda", busy_w=0.0, idle_w=0.0)
    twin = replace(card, name="s", streams="gpu", buffer_bytes=4)
    graph = graph_of(3, chain(3), 1, param_bytes=2)
    facts = {"num_microbatches": 4, "max_in_flight": 1, "links": links} | more
    seconds = [[9.0] * len(hosts) + [1.0, 1.0]] * 3
    return problem_on(graph, seconds, cluster=Cluster("c", (*hosts, card, twin)), **facts)


def test_parameters_come_as_tensors_do_where_no_link_says_how() -> None:
    tensors, parameters = Link("cpu", "gpu", 0.0, 1.0), Link("cpu", "s", 0.0, 1.0)
    told, free = streaming((tensors, parameters)), streaming((tensors, Link("cpu", "s")))
    assert told.copy_s.tolist() == [[2, 2, 2]] and free.copy_s.tolist() == [[0, 0, 0]]
    assert told.without_copies.copy_s.tolist() == [[0, 0, 0]]
    line = simulate(streaming((tensors,)), [2, 2, 2])
    assert line.start_s[0].tolist() == [2, 4, 6] and line.period_s == 6.0
    # Without the processor whose memory it was they come from the other one.
    two = streaming((parameters, Link("cpu2", "gpu", 0.0, 0.5)), other=True)
    assert two.copy_s.tolist() == [[2, 2, 2]]
    assert remaining(two, ["cpu"]).copy_s.tolist() == [[4, 4, 4]]


def test_joules_are_of_the_wait_for_the_first_copy_too() -> None:
    """1 W of the processor: 2 s until the first copy has come, then 3 operators of 4 items."""
    links = Link("cpu", "gpu", 0.0, 1.0), Link("cpu", "s", 0.0, 1.0)
    problem = streaming(links, objective="energy")
    line = simulate(problem, [2, 2, 2])
    assert (line.begin_s, line.start_s[0, 0]) == (0.0, 2.0)
    assert line.energy_j == pytest.approx(4 * score(problem, [[2, 2, 2]])[0])
    assert simulate(problem, [1, 1, 1]).energy_j == pytest.approx(12.0)  # nothing is copied


def test_a_stream_of_items_is_as_slow_as_busy_devices_make_each_other() -> None:
    """Two operators of 1 s, or 3 s beside another: on two devices 3 s an item, on one 2 s.

    If they could be cut, and one device did x of the other's work, an item would take 1 + 2 x
    seconds or more, and 2 / (1 + x) or more: as much as where these meet, at x = 0.28.
    """
    slow = {"loaded_s": np.full((2, 2), 3.0)}
    problem = small_problem([[1, 1]] * 2, chain(2), profile=slow)
    assert evaluate(problem, [[0, 1], [0, 0]]).period_s.tolist() == [3.0, 2.0]
    assert lower_bounds(problem)["period"] == pytest.approx(1.5616, rel=1e-3)
    alone = small_problem([[1, 9]] * 2, chain(2), profile=slow | {"batch_s": 1.0})
    assert evaluate(alone, [[0, 0]]).period_s[0] == pytest.approx(3.0)
    assert lower_bounds(alone)["period"] == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_a_small_shop_is_below_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    device, edges = rng.integers(0, 2, 7), [(0, 1), (1, 2), (3, 4), (4, 5), (5, 6)]
    seconds = np.full((7, 2), np.inf)
    seconds[range(7), device] = rng.integers(1, 6, 7)
    uses = [*enumerate(b for _, b in edges)]
    graph = graph_of(7, uses, tensor_src=[a for a, _ in edges])
    shortest_s = np.inf
    for first in itertools.combinations(range(7), 3):  # whose turn is of the first job
        free, done, jobs = [0.0, 0.0], [0.0, 0.0], ([0, 1, 2], [3, 4, 5, 6])
        for turn in range(7):
            job = turn not in first
            i = jobs[job].pop(0)
            done[job] = free[device[i]] = max(free[device[i]], done[job]) + seconds[i, device[i]]
        shortest_s = min(shortest_s, max(done))
    assert 0 < lower_bounds(problem_on(graph, seconds))["latency"] <= shortest_s


def test_the_bounds_are_reached_where_nothing_is_in_the_way() -> None:
    graph = OpGraph.build("free", list("ABCD"), [], [], [])
    problem = make(graph, [[1, 1]] * 4)
    values = evaluate(problem, [0, 1, 0, 1])
    assert values.period_s[0] == pytest.approx(lower_bounds(problem)["period"])
    chain = make(CHAIN, [[1, 2], [2, 1]])
    assert evaluate(chain, [0, 1]).latency_s[0] == lower_bounds(chain)["latency"]
