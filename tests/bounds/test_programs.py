"""What linear programs say of latencies that operators and memory force, against all placements."""

import numpy as np
import pytest

from placement.bounds import lower_bound, lower_bounds
from placement.bounds.calls import Call, Regions, tighten
from placement.bounds.pieces import Pieces
from placement.cluster import Cluster, Device, Link
from placement.problem import Problem
from placement.simulator import score
from tests.problems import (
    chain,
    every_placement,
    graph_of,
    problem_on,
    random_problem,
    small_problem,
)


def pieces_problem(seed: int) -> Problem:
    """CPUs, if any, and accelerators that cannot hold everything; some groups, some unsupported."""
    rng = np.random.default_rng(seed)
    n, num_cpus, num_accelerators = (int(rng.integers(*x)) for x in ((3, 8), (0, 2), (1, 4)))
    near = [(a, a + 1) for a in range(n - 1) if rng.random() < 0.7]
    far = [(a, b) for b in range(n) for a in range(b - 1) if rng.random() < 1.2 / n]
    kinds = ["cpu"] * num_cpus + ["other"] * num_accelerators
    seconds = rng.random((n, 1)) * [rng.uniform(1, 10) if k == "cpu" else 1.0 for k in kinds]
    if rng.random() < 0.5:
        seconds *= rng.uniform(0.5, 2, seconds.shape)
    if rng.random() < 0.3:
        seconds[:, 1:][rng.random((n, len(kinds) - 1)) < 0.2] = np.inf
    held = rng.integers(1, 100, n)
    room = [2**40 if k == "cpu" else int(held.sum() * rng.uniform(0.3, 0.9)) + 1 for k in kinds]
    grouped = {"group": rng.integers(0, n, n)} if rng.random() < 0.3 else {}
    io_s = rng.random((n, 1)) * rng.choice([0.05, 0.3, 2]) * [float(k != "cpu") for k in kinds]
    facts = {"param_bytes": held, "memory_bytes": room, "device": {"kind": kinds}, **grouped}
    facts |= {"profile": {"io_s": io_s}, "objective": "piecewise_latency"}
    return small_problem(seconds, sorted({*near, *far}), **facts)


@pytest.mark.parametrize("seed", range(40))
def test_no_pieces_are_faster(seed: int) -> None:
    problem = pieces_problem(seed)
    best_s = score(problem, every_placement(problem)).min(initial=np.inf)
    if not np.isfinite(best_s):
        return
    assert lower_bound(problem) <= best_s * (1 + 1e-9)
    pieces = Pieces(problem)
    most_s = best_s / pieces.unit_s * (1 + 1e-9)
    assert tighten(pieces.program, pieces.tighten, np.inf) <= most_s


def test_a_chain_that_one_accelerator_cannot_hold_is_written_and_read_again() -> None:
    # 4 x 1 s on accelerators that hold two each; a tensor takes 0.5 s to write and 0.5 s to read.
    io_s = [[0.5, 0.5, 0.0]] * 4
    facts = dict(param_bytes=10, profile={"io_s": io_s}, objective="piecewise_latency")
    where = dict(device={"kind": ["other", "other", "cpu"]}, memory_bytes=[20, 20, 10**6])
    problem = small_problem([[1, 1, 9]] * 4, chain(4), **facts, **where)
    assert lower_bounds(problem)["piecewise_latency"] == pytest.approx(5)
    # One accelerator holds two of them: it reads and writes once, the others take 9 s each.
    facts |= dict(profile={"io_s": [[0.5, 0]] * 4})
    where = dict(device={"kind": ["other", "cpu"]}, memory_bytes=[20, 10**6])
    alone = small_problem([[1, 9]] * 4, chain(4), **facts, **where)
    assert lower_bounds(alone)["piecewise_latency"] == pytest.approx(20.5)


def test_regions_lie_between_forks_and_joins() -> None:
    # 0 ─▶ 1, 2 ─▶ 3 ─▶ 4
    edges = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]
    regions = Regions(small_problem([[1]] * 5, edges))
    assert regions.forks.tolist() == [-1, 0] and regions.joins.tolist() == [3, 5]
    ended = np.array([1.0, 2, 2, 3, 4])
    late = list(regions.late(np.ones(5) / 2, ended, np.ones(5), 4.0))
    assert late == []
    (fork, join, between), *rest = regions.late(np.ones(5), ended, np.ones(5), 4.0)
    assert (fork, join, between.tolist()) == (0, 3, [1, 2]) and len(rest) > 0
    # Nothing waits for several: what comes after the fork does not hold itself.
    tree = Regions(small_problem([[1]] * 3, [(0, 1), (0, 2)]))
    ((fork, join, between), *_) = tree.late(np.ones(3), np.array([1.0, 2, 2]), np.ones(3), 2.0)
    assert (fork, join, between.tolist()) == (0, 3, [1, 2])


@pytest.mark.parametrize("seed", range(30))
def test_no_call_is_shorter(seed: int) -> None:
    problem = random_problem(seed, 6 - seed % 2, 2 + seed % 2, grouped=True, objective="latency")
    best_s = score(problem, every_placement(problem)).min(initial=np.inf)
    if not 0 < best_s < np.inf:
        return
    call = Call(problem)
    most_s = best_s / call.unit_s * (1 + 1e-9)
    assert (least := tighten(call.program, call.tighten, np.inf)) <= most_s
    assert least <= call.apart(least, 20_000) <= most_s


def test_what_is_taken_in_keeps_the_reader_busy() -> None:
    # Each operator runs on one device only. A tensor takes 0.1 s to be sent; its first reader
    # takes 0.3 s to take it in, for the second as well.
    seconds, edges = [[1, np.inf], [np.inf, 1], [np.inf, 1]], [(0, 1), (0, 2), (1, 2)]
    for sent_s in (0.1, 0.0):  # where that takes none, calls are no multiples of a second
        links = (Link("d0", "d1", sent_s, receive_s=0.3),)
        problem = small_problem(seconds, edges, links=links, objective="latency")
        assert score(problem, np.array([[0, 1, 1]])) == pytest.approx(3.3 + sent_s)
        bounds = lower_bounds(problem)
        assert bounds["latency"] == pytest.approx(3.3 + sent_s)
        assert bounds["period"] == pytest.approx(2.3 if sent_s else 2)


def test_what_only_the_streaming_device_can_run_is_not_as_well_on_its_worker() -> None:
    """Its first operator takes no time, as if there was a worker that could; then its 100 bytes
    would come in every call. They have room, and come once."""
    devices = Device("c"), Device("g", "gpu"), Device("s", "gpu", streams="g")
    seconds = [[np.inf, np.inf, 0], [np.inf, 1, np.inf]]
    problem = problem_on(
        graph_of(2, chain(2), param_bytes=[100, 0]),
        seconds,
        cluster=Cluster("c", devices),
        links=(Link("c", "s", 5.0),),
        objective="latency",
    )
    assert lower_bound(problem) <= score(problem, [[2, 1]])[0] == 1.0
