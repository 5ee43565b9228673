"""When operators can end at the earliest, against all placements and known answers."""

from dataclasses import replace

import numpy as np
import pytest

from placement.bounds import lower_bound, lower_bounds
from placement.bounds.paths import earliest_end_s
from placement.planners import load
from placement.problem import Problem
from placement.simulator import score
from tests.problems import chain, every_placement, random_problem, small_problem


def drawn(seed: int) -> Problem:
    """Branches, chains with skips and random graphs; groups, unsupported operators, slow links."""
    rng = np.random.default_rng(seed)
    d = int(rng.integers(2, 4))
    n = int(rng.integers(3, 10 - d))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = [
        [x for x in pairs if rng.random() < 0.4],
        [x for x in pairs if (x[0] == 0) != (x[1] == n - 1)],
        [x for x in pairs if rng.random() < (0.8 if x[1] == x[0] + 1 else 0.3)],
    ][seed % 3]
    work = rng.random((n, 1))
    seconds = work * (rng.uniform(0.3, 3, (n, d)) if rng.random() < 0.5 else np.ones(d))
    if rng.random() < 0.3:
        seconds[:, 1:][rng.random((n, d - 1)) < 0.3] = np.inf
    size = {"tensor_bytes": rng.integers(1, 1000, n), "objective": "latency"}
    size |= {"link": (float(rng.choice([0, 0.05, 0.3])), float(rng.choice([1e3, 3e3, 1e4])))}
    size |= {"group": rng.integers(0, n, n) if rng.random() < 0.4 else None}
    return small_problem(seconds, edges, **size)


WORK = 10**9


@pytest.mark.parametrize("work", [0, 2_000, WORK])
def test_no_placement_ends_earlier(work: int) -> None:
    reached = 0
    for seed in range(30):
        problem = drawn(seed)
        if seed % 3 == 0:
            seed_of, sizes = seed // 3, (6 - seed % 2, 2 + seed % 2)
            problem = random_problem(seed_of, *sizes, grouped=True, objective="latency")
        best_s = score(problem, every_placement(problem)).min(initial=np.inf)
        if not 0 < best_s < np.inf:
            continue
        bound_s = earliest_end_s(problem, work)
        assert bound_s <= best_s * (1 + 1e-9), seed
        reached += bound_s >= best_s * (1 - 2e-3)
        few = replace(problem, objective="period", num_microbatches=12, max_in_flight=1 + seed % 3)
        period_s = score(few, every_placement(few)).min(initial=np.inf)
        assert lower_bound(few) <= period_s * (1 + 1e-9), seed
    assert reached > (8 if work else 1)


def test_branches_are_apart_only_as_far_as_sending_lets_them() -> None:
    # Of six branches of 1 s, to and from which a tensor takes 1 s: at most so many go elsewhere,
    # and come back, while the others run: four here, and two there.
    edges = [(0, b) for b in range(1, 7)] + [(b, 7) for b in range(1, 7)]
    problem = small_problem([[1, 1]] * 8, edges, link=(1, 1e9), objective="latency")
    assert earliest_end_s(problem, WORK) == pytest.approx(6, rel=1e-3)
    assert lower_bounds(problem)["latency"] == pytest.approx(6, rel=1e-3)
    best_s = load("macro_search", evaluations=300, seed=0)(problem).value_s
    assert best_s == pytest.approx(6)


def test_of_a_group_what_one_cannot_another_cannot() -> None:
    # The second must be with the last, or its tensor comes late; so is what is in its group.
    sent = [(0, 0, [3]), (1, 9, [3]), (2, 0, [3])]
    facts = dict(tensors=sent, link=(0, 1), objective="latency")
    groups = [0, 1, 2, 3], [0, 0, 1, 2]
    alone, together = (small_problem([[1, 1]] * 4, group=group, **facts) for group in groups)
    assert earliest_end_s(alone, WORK) == pytest.approx(2 + 1 / 2, rel=2e-3)  # the third, in parts
    assert earliest_end_s(together, WORK) == pytest.approx(3, rel=2e-3)


def test_a_chain_stays_where_it_is_fast() -> None:
    problem = small_problem([[1, 2]] * 5, chain(5), link=(3, 1e9), objective="latency")
    assert earliest_end_s(problem, WORK) == pytest.approx(5)
