"""``placement.search.descent``: estimates are what they say, and nothing gets worse or too dear."""

import numpy as np
import pytest

from placement.bounds import lower_bound
from placement.bounds.loads import balance_prices, balanced, priced
from placement.objective import Objective
from placement.planners import load
from placement.problem import Problem
from placement.search.descent import descend
from placement.search.evaluation import Search
from placement.search.pipeline import Pipeline
from placement.simulator import score
from placement.workloads import synthetic
from tests.problems import altered, small_problem

NAMES = ("layered", "towers", "u_net", "transformer_training")


def period(name: str, seed: int = 5) -> Problem:
    return synthetic.families()[name](seed).with_objective("period")


def begun(problem: Problem, evaluations: int, planner: str = "contiguous_dp") -> Search:
    search = Search(problem, evaluations=evaluations)
    search.run(planner)
    return search


def by_hand(problem: Problem, placement: np.ndarray, wait: float) -> float:
    """The largest of the loads, of the channels, and of the path over those in flight."""
    g, seconds = problem.graph, problem.loaded_s
    load_s = np.zeros(problem.num_devices)
    channel_s: dict[int, float] = {}
    arrives: dict[tuple[int, int], float] = {}
    end = np.zeros(g.num_ops)
    for n, d in enumerate(placement.tolist()):
        load_s[d] += seconds[n, d]
        begin = 0.0
        for t in g.in_tensor[g.in_ptr[n] : g.in_ptr[n + 1]].tolist():
            maker = int(g.tensor_src[t])
            if maker < 0:
                continue
            src, at, taken = int(placement[maker]), end[maker], 0.0
            if src != d and (t, d) not in arrives:
                taken = problem.link_receive_s[src, d]
                load_s[d] += taken
                sent = problem.link_latency_s[src, d]
                sent += problem.link_s_per_byte[src, d] * g.tensor_bytes[t]
                channel = int(problem.link_channel[src, d])
                channel_s[channel] = channel_s.get(channel, 0.0) + sent
                arrives[t, d] = at + sent + wait
            begin = max(begin, at if src == d else arrives[t, d] + taken)
        end[n] = begin + seconds[n, d]
    return max(load_s.max(), *channel_s.values(), end.max() / problem.max_in_flight)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("receives", [False, True])
def test_estimates_are_those_made_by_hand_and_below_the_simulated_period(name, receives):
    problem = period(name)
    mean_s = receives * float(problem.compute_s.mean())
    problem = altered(problem, links={"receive_s": lambda x: mean_s * (1 + (x.src < x.dst))})
    pipeline, rng = Pipeline(problem, 0), np.random.default_rng(1)
    number = np.arange(problem.graph.num_groups)
    for _ in range(5):
        cuts = np.sort(rng.choice(number[1:], problem.num_devices - 1, replace=False))
        choice = np.searchsorted(cuts, number, side="right").astype(np.int32)
        choice[rng.integers(len(choice), size=3)] = 0
        placement = choice[problem.graph.group]
        for wait in (0.0, 0.01 * float(problem.loaded_s.sum())):
            by = by_hand(problem, placement, wait)
            assert pipeline.estimate(choice, wait) == pytest.approx(by, rel=1e-12)
        value_s = score(problem, placement[None])[0]
        assert np.isinf(value_s) or pipeline.estimate(choice, 0.0) <= value_s * 1.02


def test_the_wait_is_the_one_at_which_the_estimate_is_the_value() -> None:
    problem = period("layered")
    pipeline = Pipeline(problem, 0)
    choice = (np.arange(problem.graph.num_groups) % problem.num_devices).astype(np.int32)
    value_s = 3.0 * pipeline.estimate(choice, 0.0)
    wait = pipeline.wait_of(choice, value_s, 2.0 * value_s)
    assert pipeline.estimate(choice, wait) == pytest.approx(value_s, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("objective", ["period", "max_load"])
def test_what_is_found_is_no_worse_within_its_budget_and_the_same_again(name, objective):
    problem = period(name).with_objective(objective)
    answers = []
    for _ in range(2):
        search = begun(problem, 40)
        before_s = search.best_s
        descend(search, 3)
        assert search.num_evaluations <= 40
        assert search.best_s <= before_s
        value_s = score(problem, search.best[problem.graph.group][None])[0]
        assert search.best_s == pytest.approx(value_s, rel=1e-9)
        answers.append((search.best_s, search.best.tolist()))
    assert answers[0] == answers[1]


def test_few_evaluations_balance_a_pipeline() -> None:
    gains = []
    for name in NAMES[:3]:
        search = begun(period(name), 40)
        before_s = search.best_s
        descend(search, 0)
        gains.append(search.best_s / before_s)
    assert max(gains) < 1.0
    assert np.prod(gains) < 0.9


def test_moves_off_one_device_balance_loads_and_are_counted() -> None:
    problem = period("layered").with_objective("max_load")
    search = begun(problem, 30, "single_device")
    before_s, used = search.best_s, search.num_evaluations
    descend(search, 0)
    assert search.best_s < 0.9 * before_s
    assert used < search.num_evaluations <= 30


def test_latency_and_unlimited_loads_are_left_alone() -> None:
    for objective, limit in (("latency", {"evaluations": 30}), ("max_load", {"seconds": 5.0})):
        search = Search(period("layered").with_objective(Objective(objective)), **limit)
        search.run("heft")
        used = search.num_evaluations
        descend(search, 0)
        assert search.num_evaluations == used


@pytest.mark.parametrize(("limit", "walks"), [({"evaluations": 99}, 40), ({"seconds": 98.0}, 9)])
def test_walks_in_vain_end_and_take_few_of_limited_seconds(limit, walks, monkeypatch):
    """Each takes a second here: of 98 s nine in a row take more than a tenth of what is left."""
    ended: list[float] = []

    def in_vain(self: Pipeline, choice: np.ndarray, *how: float) -> np.ndarray:
        ended.append(1.0)
        return choice

    monkeypatch.setattr(Pipeline, "walk", in_vain)
    monkeypatch.setattr("placement.search.evaluation.clock", lambda: sum(ended))
    search = Search(period("layered"), **limit)
    search.cost(np.zeros(search.problem.graph.num_groups, np.int32))
    descend(search, 0)
    assert len(ended) == walks


@pytest.mark.parametrize("planner", ["policy", "macro_search"])
@pytest.mark.parametrize("objective", ["period", "max_load"])
def test_planners_with_few_evaluations_keep_to_them(planner: str, objective: str) -> None:
    problem = period("towers").with_objective(Objective(objective))
    few = load(planner, evaluations=50)(problem)
    assert few.stats["evaluations"] <= 50
    start = load("best_of", evaluations=30)(problem)
    assert few.value_s <= start.value_s * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_on_unlike_devices_it_also_begins_where_loads_are_balanced(seed: int) -> None:
    """From HEFT's placement alone it ends 2.2 to 3.5 % above the bound."""
    rng = np.random.default_rng(seed)
    seconds = rng.random((60, 1)) * (0.5 + rng.random((60, 4)))
    problem = small_problem(seconds, [(i, i + 3) for i in range(57)])
    answer = load("macro_search", evaluations=200, start="heft")(problem)
    assert answer.value_s <= 1.02 * lower_bound(problem)


@pytest.mark.parametrize("seed", range(20))
def test_balanced_loads_are_those_of_fractions_and_one_row_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(1, 5))
    seconds = rng.random((int(rng.integers(1, 30)), devices))
    seconds[:, 1:][rng.random(seconds[:, 1:].shape) < 0.2] = np.inf
    device = balanced(seconds)
    rows = seconds[np.arange(len(seconds)), device]
    load_s = np.bincount(device, rows, devices)
    split = np.sort(np.where(np.isfinite(seconds), seconds, 0.0).max(axis=1))[-devices + 1 :]
    most_s = split.sum() if devices > 1 else 0.0
    least_s = priced(seconds, balance_prices(seconds)).sum()
    assert load_s.max() <= least_s * (1 + 1e-9) + most_s
