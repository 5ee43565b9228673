"""What measurement says beyond the simulator: features, posterior, uncertainty."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import random_problem
from runtimes import layered, with_errors

from placement.cluster import Cluster, Device, Link
from placement.graph import OpGraph
from placement.planners._search import random_choice
from placement.problem import Problem
from placement.profile import Profile
from placement.residual import Features, _blocks, fit, random_placements
from placement.simulator import score
from placement.trials import Samples


def once(placements: np.ndarray, seconds: np.ndarray, rounds: int = 1) -> Samples:
    """Every placement ran once, in so many rounds."""
    count = len(placements)
    return Samples(placements, np.arange(count), np.arange(count) * rounds // count, seconds)


def test_what_is_looked_at() -> None:
    #  a -> b -> d      one device each; a is sent to b, b's and c's tensors to where d is
    #   \-> c -/
    graph = OpGraph.build(
        "diamond", list("abcd"), range(4), [100, 200, 300, 400], [(0, 1), (0, 2), (1, 3), (2, 3)]
    )
    links = (Link("x", "y", 1.0, 100.0), Link("y", "x", 1.0, 100.0))
    seconds = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [2e-5, 2e-5]])
    cluster = Cluster("two", (Device("x"), Device("y")))
    problem = Problem(graph, cluster, Profile(("x", "y"), seconds, 0 * seconds, links))
    p = np.array([[0, 1, 0, 0]], np.int32)
    summary, operators, sent = _blocks(problem, p, np.array([10.0]))
    # Transfers take 2, 3, 4 and 5 s. a and b are sent: 5 s of 10 s, 300 bytes of 1000.
    assert sent == pytest.approx(np.array([[0.2, 0.3, 0.0, 0.0]]))
    busy, rest = summary[0, :2], summary[0, 2:]
    assert busy == pytest.approx([0.4, 0.2], rel=1e-4)
    assert problem.priority.tolist() == [0, 2, 1, 3]  # a c b d: two switches of three
    # busy on average, transfers per operator, their time, their bytes, switches, elsewhere
    # one operator of four, none of which is small.
    assert rest == pytest.approx([0.3, 0.5, 0.5, 0.3, 2 / 3, 0.25, 0.0], rel=1e-4)
    # Device y is half as busy as x: for the period its operators count 1 / 2 ** 8.
    share = np.array([[0.1, 0, 0, 0.2 / 256, 0.3, 0, 2e-6, 0]])
    assert operators == pytest.approx(share, rel=1e-3)
    operators = _blocks(problem.with_objective("latency"), p, np.array([10.0]))[1]
    assert operators == pytest.approx(np.array([[0.1, 0, 0, 0.2, 0.3, 0, 2e-6, 0]]))


def test_a_tensor_is_sent_once_per_device() -> None:
    for seed in range(20):
        problem = random_problem(seed)
        placements = random_placements(problem, 4, np.random.default_rng(seed))
        sent = _blocks(problem, placements, np.ones(4))[2]
        weight = _blocks(problem, placements, np.full(4, 2.0))[2]
        assert weight == pytest.approx(sent / 2)  # shares of the simulated time
        g = problem.graph
        for p, row in zip(placements, sent, strict=True):
            for t in range(g.num_tensors):
                users = set(p[g.use_dst[g.use_ptr[t] : g.use_ptr[t + 1]]].tolist())
                away = users - {int(p[g.tensor_src[t]])} if g.tensor_src[t] >= 0 else set()
                assert (row[t] > 0) <= bool(away)


def test_random_placements_are_legal_and_every_second_is_a_cut() -> None:
    problem = random_problem(3, 12, 3, grouped=True, unsupported=True)
    placements = random_placements(problem, 20, np.random.default_rng(0))
    for p in placements:
        problem.check_placement(p)
    cuts = random_placements(layered(30), 40, np.random.default_rng(0))[1::2]
    assert (np.abs(np.diff(cuts, axis=1)).sum(axis=1) <= 1).all()
    assert {int(c[0]) for c in cuts} == {0, 1}  # in either direction


def test_a_constant_error_is_found_and_its_uncertainty_shrinks() -> None:
    problem = layered(20)
    placements = random_placements(problem, 40, np.random.default_rng(1))
    simulated = score(problem, placements)
    features = Features.of(problem, float(simulated.min()))
    rng = np.random.default_rng(0)
    measured = simulated * np.exp(0.25 + 0.01 * rng.standard_normal(40))
    few, many = (fit(features, once(placements[:k], measured[:k]), simulated[:k]) for k in (5, 30))
    mean, std = many.predict(placements[30:], simulated[30:])
    assert mean == pytest.approx(np.full(10, 0.25), abs=0.03)
    assert (std < few.predict(placements[30:], simulated[30:])[1]).all()
    assert (np.abs(mean - 0.25) < 4 * std).all()


def test_errors_of_a_profile_are_learned_from_placements() -> None:
    problem = layered(20)
    hidden = with_errors(problem, 0.3, seed=4)
    placements = random_placements(problem, 140, np.random.default_rng(1))
    simulated, measured = score(problem, placements), score(hidden, placements)
    known, new = slice(0, 80), slice(80, None)
    features = Features.of(problem, float(simulated.min()))
    posterior = fit(features, once(placements[known], measured[known]), simulated[known])
    mean, std = posterior.predict(placements[new], simulated[new])
    truth = np.log(measured[new] / simulated[new])
    before = np.abs(truth - truth.mean()).mean()
    assert np.abs(truth - mean).mean() < 0.6 * before
    assert (np.abs(truth - mean) < 2 * std).mean() > 0.8  # it knows what it does not know


def test_rounds_and_repetitions_are_told_from_placements() -> None:
    problem = layered(12)
    placements = random_placements(problem, 12, np.random.default_rng(1))
    simulated = score(problem, placements)
    # Placement 0 is in each of 8 rounds; every other round is 30 % slower.
    index = np.concatenate([[0, 1 + r % 11] for r in range(8)])
    where = np.repeat(np.arange(8), 2)
    rng = np.random.default_rng(0)
    slow = np.where(where % 2, 0.3, 0.0)
    seconds = simulated[index] * np.exp(slow + 0.01 * rng.standard_normal(16))
    features = Features.of(problem, float(simulated.min()))
    posterior = fit(features, Samples(placements, index, where, seconds), simulated)
    mean, std = posterior.predict(placements, simulated)
    assert np.ptp(mean) < 0.1  # not taken for what the placements are
    assert posterior.std["round"] > 3 * posterior.std["noise"]
    assert std[0] <= std[8:].min()  # the more runs, the surer


def test_the_posterior_is_that_of_bayes_rule() -> None:
    """Against the formula with all coefficients explicit, at the variances that were found."""
    problem = layered(8)
    placements = random_placements(problem, 14, np.random.default_rng(2))
    simulated = score(problem, placements)
    measured = score(with_errors(problem, 0.2, 1), placements)
    features = Features.of(problem, float(simulated.min()))
    samples = once(placements[:10], measured[:10], rounds=3)
    posterior = fit(features, samples, simulated[:10])
    variance = np.exp(posterior.log_variance)
    blocks = [np.ones((14, 1)), *features(placements, simulated)]
    design = np.hstack([x * np.sqrt(v) for x, v in zip(blocks, variance[:4], strict=True)])
    rounds = np.eye(3)[samples.round] * np.sqrt(variance[5])
    seen = np.hstack([design[:10], rounds])
    noise = variance[4] + variance[6] * posterior.scale
    target = np.log(measured[:10] / simulated[:10])
    precision = np.eye(seen.shape[1]) + seen.T @ (seen / noise[:, None])
    weights = np.linalg.solve(precision, seen.T @ (target / noise))
    new = np.hstack([design[10:], np.zeros((4, 3))])
    mean, std = posterior.predict(placements[10:], simulated[10:])
    assert mean == pytest.approx(new @ weights, rel=1e-5, abs=1e-8)
    expected = (new @ np.linalg.solve(precision, new.T)).diagonal() + variance[4]
    assert std**2 == pytest.approx(expected, rel=1e-4)
    joint_mean, covariance = posterior.joint(placements[10:], simulated[10:])
    assert joint_mean == pytest.approx(mean)
    assert covariance.diagonal() == pytest.approx(std**2)


def test_a_run_that_was_disturbed_says_little() -> None:
    """Twelve placements twice; one of 24 runs took 1.6 times as long as it takes."""
    problem = layered(12)
    placements = random_placements(problem, 12, np.random.default_rng(1))
    simulated = score(problem, placements)
    index = np.tile(np.arange(12), 2)
    seconds = simulated[index] * np.exp(0.01 * np.random.default_rng(0).standard_normal(24))
    seconds[3] *= 1.6
    features = Features.of(problem, float(simulated.min()))
    where = np.repeat(np.arange(2), 12)
    posterior = fit(features, Samples(placements, index, where, seconds), simulated)
    assert posterior.scale.argmax() == 3 and np.median(posterior.scale) < 1
    mean, _ = posterior.predict(placements, simulated)
    assert abs(mean[3]) < 0.05  # half of log(1.6) is 0.24


def test_runs_that_did_not_fit_are_left_out() -> None:
    problem = layered(8)
    placements = random_placements(problem, 6, np.random.default_rng(2))
    simulated = score(problem, placements)
    features = Features.of(problem, float(simulated.min()))
    samples = once(placements, np.append(simulated[:5], np.inf))
    mean, _ = fit(features, samples, simulated).predict(placements, simulated)
    same = replace(samples, index=samples.index[:5], round=samples.round[:5])
    same = replace(same, seconds=samples.seconds[:5])
    assert mean == pytest.approx(fit(features, same, simulated).predict(placements, simulated)[0])


def test_any_problem_has_finite_features() -> None:
    for seed in range(30):
        problem = random_problem(seed, grouped=seed % 2 == 0, unsupported=seed % 3 == 0)
        allowed = np.isfinite(problem.group_compute_s)
        choice = random_choice(np.random.default_rng(seed), allowed)
        features = Features.of(problem, 1.0)
        for block in features(choice[problem.graph.group][None], np.ones(1)):
            assert np.isfinite(block).all() and block.shape[0] == 1
