"""Measuring: every operator on every device, links fitted, profiles saved and reused."""

import gc
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from placement import planners
from placement.capturing import capture
from placement.cluster import Cluster, Device
from placement.costs import calibration, transfers
from placement.costs import measure as measure_module
from placement.costs.calibration import Costs, _ways, at_speed, calibrated, pieces, scaled
from placement.costs.measure import (
    MeasuringEffort,
    cached_path,
    load_or_measure,
    measurable,
    measure,
    typical,
)
from placement.costs.transfers import fit_link, measure_links
from placement.executor.runner import Runner
from placement.graph import OpGraph
from placement.plan import make_plan
from placement.problem import Problem, Solution
from placement.profile import Profile, ProfileError
from placement.simulator import evaluate, score
from placement.tools.files import FileError
from placement.workloads import tiny
from tests.machine import TWO, problem_of
from tests.problems import every_link

pytestmark = pytest.mark.timeout(60)
BOTH = Cluster("both", (Device("cpu:0"), Device("cuda:0", "cuda")))
LINK_BYTES = transfers.EFFORT.link_bytes


def branches() -> OpGraph:
    return capture(*tiny.tiny_branches())


def relus(count: int) -> OpGraph:
    return capture(nn.Sequential(*[nn.ReLU() for _ in range(count)]), torch.ones(4))


def errors(graph: OpGraph, cluster: Cluster, guess: Profile, truth: Profile) -> list[float]:
    """How far latencies and periods of 20 placements are off, on average."""
    others = np.random.default_rng(0).integers(0, 2, (20, graph.num_ops)).astype(np.int32)
    problems = [Problem(graph, cluster, p, num_microbatches=8) for p in (guess, truth)]
    predicted, true = (evaluate(problem, others) for problem in problems)
    ratios = predicted.latency_s / true.latency_s, predicted.period_s / true.period_s
    return [float(np.abs(ratio - 1).mean()) for ratio in ratios]


def test_every_operator_is_measured_on_every_device_and_nothing_is_left_running():
    graph, shares = branches(), []
    profile = measure(graph, TWO, repeats=2, progress=lambda _, share: shares.append(share))
    assert profile.compute_s.shape == (graph.num_ops, 2)
    assert (profile.compute_s > 0).all() and (profile.spread_s >= 0).all()
    assert profile.loaded_s is not None and (profile.loaded_s > 0).all()
    profile.check(graph)
    assert profile.provenance["repeats"] == 2 and profile.provenance["torch"]
    assert {(x.src, x.dst) for x in profile.links} == {("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")}
    assert all(0 <= x.latency_s < 1 and x.bandwidth_bytes_per_s > 0 for x in profile.links)
    done = [share for share in shares if share is not None]  # of rounds; the rest is not counted
    assert done == sorted(done) and shares[-1] is None
    assert not [t for t in threading.enumerate() if t.name.startswith("placement-")]


def test_medians_add_up_to_the_median_run():
    """
    Three runs of two operators; each run is hit once, by another operator:

        run 0: 10+10 = 20    run 1: 10+12 = 22    run 2: 12+10 = 22    medians 10, 10; run 22
    """
    rounds = np.array([[10.0, 10.0], [10.0, 12.0], [12.0, 10.0]])[:, :, None]
    np.testing.assert_allclose(typical(rounds)[:, 0], [11.0, 11.0])


def test_rounds_in_which_others_used_a_core_do_not_count_for_it():
    """Device 0 is disturbed in three rounds of five, device 1 in another one."""
    each = np.array([[1.5, 3.0], [1.6, 2.0], [1.0, 2.0], [1.5, 2.2], [1.0, 2.0]])
    rounds = np.stack([each, 3 * each], axis=1)
    np.testing.assert_allclose(typical(rounds), [[1.0, 2.0], [3.0, 6.0]])


def test_rounds_go_on_while_somebody_else_uses_a_core(monkeypatch):
    """Device 1 takes 2 s or, disturbed, 3 s: half of the rounds disagree, or one of five."""

    def rounds(*seconds):
        return [np.array([[0.5, s / 2], [0.5, s / 2]]) for s in seconds]

    assert measure_module._steady(rounds(2, 2, 3, 2, 2.1)) and measure_module._steady([])
    assert not measure_module._steady(rounds(2, 3, 3, 2, 2))
    steady, collects = iter([False, False, True, True]), []

    def next_steady(answer):
        collects.append(gc.isenabled())  # it would fall on the same operator in every round
        return next(steady)

    monkeypatch.setattr(measure_module, "_steady", next_steady)
    one = Cluster("one", TWO.devices[:1])
    # Two rounds, not steady; a third, not steady; a fourth, steady both alone and loaded.
    profile = measure(branches(), one, repeats=2)
    assert profile.provenance["rounds"] == 4 and profile.provenance["repeats"] == 2
    assert profile.loaded_s is None and profile.links == ()  # of one device
    assert not any(collects) and gc.isenabled()
    monkeypatch.setattr(measure_module, "_steady", lambda answer: False)
    assert measure(branches(), one, repeats=1).provenance["rounds"] == 3


def test_ctrl_c_while_all_devices_measure_leaves_nobody_waiting(monkeypatch):
    """Threads that wait for results of stopped workers would keep the process for ever."""
    graph = branches()
    flat = graph.program.timing_inputs()
    before = set(threading.enumerate())
    runners = [Runner(graph, TWO, np.full(graph.num_ops, d), record=True) for d in range(2)]
    with pytest.raises(KeyboardInterrupt), runners[0], runners[1]:
        main = threading.main_thread().ident
        timer = threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT))
        timer.start()
        monkeypatch.setattr(measure_module, "EFFORT", MeasuringEffort(together_s=1e6))
        measure_module._run_together(runners, flat, 1e-3)
    timer.join()
    assert set(threading.enumerate()) <= before


def test_busy_neighbours_are_at_other_places_of_the_graph(monkeypatch):
    """In step they would read the same parameters at once, and share what one has fetched."""
    graph, delays = branches(), []
    monkeypatch.setattr(measure_module.time, "sleep", delays.append)
    runners = [Runner(graph, TWO, np.full(graph.num_ops, d), record=True) for d in range(2)]
    with runners[0], runners[1]:
        seconds = measure_module._run_together(runners, graph.program.timing_inputs(), 0.3)
    assert sorted(delays) == [0.0, 0.15] and (seconds > 0).all()


def test_the_chain_beside_which_waking_is_seen_is_of_the_same_operators():
    watched, silent = (capture(transfers.Watched(w), torch.ones(8)) for w in (True, False))
    assert set(silent.op_kind) == {"aten.add.Tensor"} and silent.num_ops == 17
    assert watched.op_kind.count("aten.add.Tensor") == silent.num_ops


def test_a_transfer_takes_at_least_what_passes_until_it_is_there(monkeypatch):
    """On one device the chain took longer than on two, as it frees what the others leave."""

    def span(runner, inputs):
        apart = len(set(runner.placement.ravel().tolist())) > 1
        return (5e-3, 3e-3) if apart else (8e-3, 0.0)

    monkeypatch.setattr(transfers, "_span", span)
    for link in measure_links(TWO, repeats=1):
        assert link.latency_s == pytest.approx(3e-3)


@pytest.mark.parametrize(("latency_s", "bandwidth"), [(2e-5, 1e9), (0.0, 5e8), (1e-4, np.inf)])
def test_a_line_is_fitted_back(latency_s, bandwidth):
    """Known answer: seconds made from a latency and a bandwidth give them back."""
    seconds = latency_s + np.array(LINK_BYTES) / bandwidth
    link = fit_link("a", "b", LINK_BYTES, seconds)
    assert link.latency_s == pytest.approx(latency_s, abs=1e-9)
    assert 1 / link.bandwidth_bytes_per_s == pytest.approx(1 / bandwidth, abs=1e-14)
    free = fit_link("a", "b", LINK_BYTES, 0 * seconds)  # where nothing is to be seen
    assert free.latency_s == 0 and free.bandwidth_bytes_per_s == float("inf")


def test_small_transfers_decide_the_latency():
    """Noise of a millisecond on 8 MiB must not turn 20 us of latency into 0 or 500 us."""
    seconds = 2e-5 + np.array(LINK_BYTES) / 1e10
    seconds[-1] += 1e-3
    assert fit_link("a", "b", LINK_BYTES, seconds).latency_s == pytest.approx(2e-5, rel=0.3)


def test_transfers_that_were_not_seen_do_not_hide_the_others():
    """8 MiB took no longer than without them, by chance, 64 MiB a second."""
    sizes = (*LINK_BYTES, 2**26)
    link = fit_link("a", "b", sizes, np.array([0.0, 0.0, 0.0, 0.0, 1.0]))
    assert 2**26 < link.bandwidth_bytes_per_s < 2**29


@pytest.mark.parametrize(
    ("microseconds", "latency_s", "bandwidth"),
    [
        ((304, 297, 538, 2423, 16677), 3e-4, 4e9),
        ((219, 225, 189, 407, 0), 2.1e-4, 4.5e10),  # 64 MiB were not seen
        ((219, 225, 189, 30, 1400), 2.1e-4, 5.5e10),
        ((9000, 225, 189, 407, 1400), 2.1e-4, 5.5e10),  # somebody disturbed the first
    ],
)
def test_a_transfer_that_contradicts_the_others_does_not_count(microseconds, latency_s, bandwidth):
    """What 4 KiB to 64 MiB took between a CPU and an H200, and what may come of it."""
    link = fit_link("a", "b", (*LINK_BYTES, 2**26), np.array(microseconds) * 1e-6)
    assert link.latency_s == pytest.approx(latency_s, rel=0.1)
    assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.2)


def test_a_saved_profile_is_reused_by_fingerprint(tmp_path, monkeypatch):
    graph, large = branches(), capture(*tiny.tiny_branches(batch=3))
    first = load_or_measure(graph, TWO, repeats=1, folder=tmp_path)
    assert cached_path(graph, TWO, tmp_path).exists()
    monkeypatch.setattr(measure_module, "measure", None)  # calling it would fail
    again = load_or_measure(branches(), TWO, folder=tmp_path)
    np.testing.assert_array_equal(again.compute_s, first.compute_s)
    # Another shape or cluster has a profile of its own.
    pairs = ((graph, TWO), (large, TWO), (graph, Cluster("one", TWO.devices[:1])))
    assert len({cached_path(*pair, tmp_path) for pair in pairs}) == 3


def test_described_devices_are_scaled_from_measured_ones(tmp_path, monkeypatch):
    graph = branches()
    seconds = np.full((graph.num_ops, 2), 1e-4)
    fake = Profile(TWO.device_names, seconds, seconds * 0, provenance={})
    monkeypatch.setattr(measure_module, "measure", lambda *a, **k: fake)
    monkeypatch.setattr(Cluster, "detect", lambda *a: TWO)
    fast = Device("fast:0", "fast", like="cpu:1", speed=4.0)
    described = Cluster("described", (TWO.devices[0], fast))
    profile = load_or_measure(graph, described, folder=tmp_path)
    np.testing.assert_allclose(profile.compute_s[0], [1e-4, 2.5e-5])


def test_a_cluster_s_own_devices_are_measured_as_it_declares_them(tmp_path, monkeypatch):
    graph, seen = branches(), []

    def fake(graph, cluster, **_):
        seen.append(cluster.devices)
        seconds = np.full((graph.num_ops, cluster.num_devices), 1e-4)
        return Profile(cluster.device_names, seconds, seconds * 0, provenance={})

    monkeypatch.setattr(measure_module, "measure", fake)
    monkeypatch.setattr(Cluster, "detect", lambda *a: TWO)
    for name, others in (("cpu:0", ()), ("big", TWO.devices[:1])):
        own = Device(name, "cpu", (0, 1), 2)
        fast = Device("fast", "fast", like="cpu:0", speed=4.0)
        profile = load_or_measure(graph, Cluster("c", (own, fast)), folder=tmp_path)
        assert seen.pop() == (own, *others)
        np.testing.assert_allclose(profile.compute_s[0], [1e-4, 2.5e-5])
    everything = measurable(Cluster("described", (fast,)))
    assert everything is TWO  # none of its own
    assert measurable(Cluster("c", (own, Device("far", like="nvidia/l4")))).devices == (own,)


def test_no_space_left_gives_the_profile_and_a_warning(tmp_path, monkeypatch):
    def full(self, path):
        raise FileError("cannot write profile: no space left")

    monkeypatch.setattr(Profile, "save", full)
    with pytest.warns(UserWarning, match=r"no space left.*PLACEMENT_HOME"):
        profile = load_or_measure(branches(), TWO, repeats=1, folder=tmp_path)
    assert profile.compute_s.min() > 0


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (Device("cpu:0", "cpu", (10_000,)), r"cores \[10000\]"),
        (Device("cuda:0", "cuda"), "sees no CUDA device"),
        (Device("tpu:0", "tpu"), "cannot be measured"),
    ],
)
def test_devices_that_are_not_here_are_refused(device, message):
    with pytest.raises(ProfileError, match=message + r".*like: <measured device>"):
        measure(branches(), Cluster("elsewhere", (device,)), repeats=1)
    with pytest.raises(ProfileError, match="repeats = 0: must be at least 1"):
        measure(branches(), TWO, repeats=0)
    for call in (measure, load_or_measure):
        with pytest.raises(ProfileError, match=r"graph must be .*\(of type Problem\)"):
            call(problem_of(branches(), TWO), TWO)
        with pytest.raises(ProfileError, match=r"cluster must be .*of type list"):
            call(branches(), ["cpu:0"])
        with pytest.raises(ProfileError, match="has no program to run"):
            call(branches().without_program(), TWO)


def test_cuda_devices_of_another_name_or_number_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("cuda:1", "gpu0", "host/cuda:2", "nvidia:0", "cuda"):
        with pytest.raises(ProfileError, match="is not one of the 1 CUDA devices here"):
            measure(branches(), Cluster("elsewhere", (Device(name, "cuda"),)), repeats=1)
    for name in ("cuda:0", "host/cuda:0"):
        measure_module.check_here(Cluster("here", (Device(name, "cuda"),)))


def test_a_profile_of_fewer_rounds_than_asked_for_is_measured_again(tmp_path, monkeypatch):
    graph, asked = branches(), []
    seconds = np.full((graph.num_ops, 2), 1e-4)

    def fake(graph, cluster, *, repeats, progress):
        asked.append(repeats)
        return Profile(TWO.device_names, seconds, seconds * 0, provenance={"repeats": repeats})

    monkeypatch.setattr(measure_module, "measure", fake)
    for repeats in (2, 2, None, 1, 5, None, 3):
        load_or_measure(graph, TWO, repeats=repeats, folder=tmp_path)
    assert asked == [2, 5]
    load_or_measure(graph, TWO, folder=tmp_path / "none")
    assert asked[2:] == [10]


def like(truth: Profile, changed=lambda placement, truth: truth):
    """In the place of ``run_placement``: what a simulator says that knows the true costs."""

    def run(problem, placement, *counts):
        there = changed(placement, truth)
        values = evaluate(replace(problem, profile=there), placement[None])
        return float(values.latency_s[0]), float(values.period_s[0])

    return run


@pytest.mark.parametrize(("wake_s", "sending_s"), [(4e-5, 0.0), (0.0, 2e-5)])
def test_costs_between_devices_are_learned_from_runs_of_placements(monkeypatch, wake_s, sending_s):
    """Transfers cost twice, waking half, neighbours 1.4x of what was measured; or 20 us to send.

    Other placements than those that ran are predicted better for it.
    """
    graph, ways = relus(12), _ways(TWO)
    links = tuple(replace(x, wake_s=wake_s) for x in every_link(TWO.device_names, 3e-5, 1e9))
    seconds = np.full((12, 2), 1e-4)
    profile = Profile(("cpu:0", "cpu:1"), seconds, seconds * 0, links, loaded_s=1.5 * seconds)
    ones = np.ones(2)
    truth = scaled(profile, Costs(ones, 1.4 * ones, 0.5, {ways[0]: (2.0, 0.0, sending_s, 0.0)}))

    # By chance faster beside neighbours, 4x of that: 1e-4 - 4 * 0.5e-4 < 0, but not in no time.
    lucky = scaled(replace(profile, loaded_s=0.5 * seconds), Costs(ones, 4 * ones, 1.0, {}))
    np.testing.assert_allclose(lucky.loaded_s, 0.05 * seconds)

    runs = []

    def disturbed(placement, truth):
        runs.append(placement)
        busy = 7 < len(runs) < 11  # somebody else uses a core for some time
        return at_speed(truth, np.array([2.0, 2.0])) if busy else truth

    monkeypatch.setattr(calibration, "run_placement", like(truth, disturbed))
    corrected = calibrated(graph, TWO, profile)
    # Replicas send nothing: of what neighbours cost they tell most, and are told best.
    turns = np.array([[[0] * 12, [1] * 12]], np.int32)
    predicted, true = (evaluate(Problem(graph, TWO, p), turns) for p in (corrected, truth))
    np.testing.assert_allclose(predicted.period_s, true.period_s, rtol=0.03)

    before, after = (errors(graph, TWO, guess, truth) for guess in (profile, corrected))
    assert min(before) > 0.07 and max(after) < 0.04, (before, after)
    assert corrected.error < 0.02
    # Twice each: single devices; cut at 1 and 3 places, a quarter of all; replicas; and answers of
    # a planner that use both.
    assert len(runs) in (2 * (2 + 2 + 1), 2 * (2 + 2 + 1 + 1), 2 * (2 + 2 + 1 + 2))
    assert all(0 < p.sum() < 12 for p in runs[10:])
    assert [int((np.diff(p) != 0).sum()) for p in runs[2:4]] == [1, 3]
    assert runs[4].tolist() == turns[0].tolist()
    assert {p.shape[-1] for p in runs} == {12}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_speed_is_between_two_measurements_or_a_gpus_where_nothing_is_recorded(monkeypatch, kind):
    """The second device looks 1.4 times as slow as it is later."""
    graph, cluster = relus(24), Cluster("both", (Device("cpu:0"), Device("other", kind)))
    seconds = np.full((24, 2), 1e-4)
    links = every_link(cluster.device_names, 3e-5, 1e9)
    truth = Profile(cluster.device_names, seconds, seconds * 0, links)
    monkeypatch.setattr(calibration, "run_placement", like(truth))
    corrected = calibrated(graph, cluster, at_speed(truth, np.array([1.0, 1.4])))
    assert corrected.provenance["alone"] == pytest.approx([1.0, 1 / 1.4], rel=0.03)
    expected = truth.compute_s * [1.0, 1.0 if kind == "cuda" else 1.4**0.5]
    np.testing.assert_allclose(corrected.compute_s, expected, rtol=0.03)


def test_each_way_between_unlike_devices_has_costs_of_its_own(monkeypatch):
    """To a GPU tensors take three times as long as measured; to send one off takes it 100 us."""
    graph, names = relus(48), BOTH.device_names
    links = every_link(names, 3e-5, 1e9)
    seconds = np.full((48, 2), 1e-4)
    profile = Profile(names, seconds, seconds * 0, links)
    to, back = links
    there = replace(to, latency_s=9e-5, bandwidth_bytes_per_s=1e9 / 3)
    truth = replace(profile, links=(there, replace(back, send_s=1e-4)))

    monkeypatch.setattr(calibration, "run_placement", like(truth))
    corrected = calibrated(graph, BOTH, profile)
    before, after = (errors(graph, BOTH, guess, truth) for guess in (profile, corrected))
    assert min(before) > 0.1 and max(after) < 0.04, (before, after)
    assert [way[:2] for way in corrected.provenance["ways"]] == [list(names), list(names[::-1])]
    assert corrected.links[1].send_s > 5e-5 and corrected.links[0].send_s < 3e-5


def test_hidden_costs_of_a_cpu_and_a_gpu_are_learned_from_noisy_runs(monkeypatch):
    """Others than the placements that ran are predicted better, at noise of 5 %.

    So is what a planner then answers, which is what was predicted too short.
    """
    rows = np.array([learned(seed, monkeypatch) for seed in range(2)])
    before, after, answer, answer_before = np.median(rows, axis=0)
    assert after < min(0.1, before / 2) and rows[:, 1].max() < 0.15, rows
    assert answer > 0.9 > answer_before and rows[:, 2].min() > 0.75, rows


def learned(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Mean errors before and after; what a planner answers for streams, over what that takes."""
    rng, graph = np.random.default_rng(seed), relus(60)
    seconds = rng.lognormal(-8.0, 0.7, (60, 2)) * [1.0, 0.2]
    links = every_link(BOTH.device_names, 5e-5, 1e10)
    profile = Profile(BOTH.device_names, seconds, 0 * seconds, links, 1.2 * seconds)
    alone, loaded = np.exp(rng.normal(0.0, [0.1, 0.4])), np.exp(rng.normal(0.0, 1.0, 2))
    sent = {way: (2.0, *rng.exponential([2e-4, 1e-4, 1e-4])) for way in _ways(BOTH)}
    truth = scaled(profile, Costs(alone, loaded, 1.0, sent))

    def run(problem, placement, *counts):
        both = np.array(like(truth)(problem, placement))
        return tuple(both * np.exp(rng.normal(0.0, 0.05, 2)))

    def answered(profile: Profile) -> float:
        problem = Problem(graph, BOTH, profile, num_microbatches=8)
        answer = planners.load("local_search", evaluations=500)(problem)
        return answer.value_s / score(replace(problem, profile=truth), answer.placement[None])[0]

    monkeypatch.setattr(calibration, "run_placement", run)
    corrected = calibrated(graph, BOTH, profile)
    before, after = (float(np.mean(errors(graph, BOTH, p, truth))) for p in (profile, corrected))
    return [before, after, answered(corrected), answered(profile)]


@pytest.mark.parametrize("seed", [1, 3])
def test_a_gpu_is_predicted_alone_as_it_runs_alone_whatever_others_say(seed, monkeypatch):
    """It takes 0.6 of its seconds where the caller launches it, all of them beside a CPU."""
    rng, graph = np.random.default_rng(seed), relus(40)
    seconds = rng.lognormal(-8.0, 0.7, (40, 2)) * [1.0, 0.2]
    links = every_link(BOTH.device_names, 5e-5, 1e10)
    profile = Profile(BOTH.device_names, seconds, 0 * seconds, links, 1.1 * seconds)
    problem = Problem(graph, BOTH, profile, num_microbatches=8)
    placements = [np.full(40, d, np.int32) for d in (0, 1)]
    placements += [*pieces(problem, (1, 3, 7, 15, 1, 3, 7), seed)]
    took = np.array([like(profile)(problem, p) for p in placements])
    took *= np.exp(rng.normal(0.0, 0.05, took.shape))
    took[:2, 0], took[1, 1] = np.nan, 0.6 * took[1, 1]
    for sure in (calibration.LIKELY.sure, 1.0):
        monkeypatch.setattr(calibration, "LIKELY", calibration.Likely(sure=sure))
        better = replace(problem, profile=calibration.corrected(problem, placements, took))
        off = abs(np.log(evaluate(better, np.stack(placements)).period_s / took[:, 1]))
        assert np.median(off) < 0.1 and (off[1] < 0.05) == (sure > 1), off


def test_what_takes_less_time_runs_more_often(monkeypatch):
    """A GPU that was idle is warm after some dozens of runs that take 4 ms, not after three."""
    graph, seconds = relus(10), np.tile([1e-2, 4e-4], (10, 1))
    profile = Profile(BOTH.device_names, seconds, 0 * seconds)
    asked = {}

    def run(problem, placement, *counts):
        asked[tuple(placement.ravel())] = counts[:3]  # the fourth: whether it is compiled
        return like(profile)(problem, placement)

    monkeypatch.setattr(calibration, "run_placement", run)
    calibrated(graph, BOTH, profile)
    (alone, many), warm = calibration.EFFORT.runs, calibration.EFFORT.warm
    assert asked[(0,) * 10] == (alone, many, warm)
    assert asked[(1,) * 10] == (12 * alone, 12 * many, 12 * warm)
    assert asked[(0,) * 10 + (1,) * 10][0] == 1  # of replicas no latency is taken


def test_what_calls_and_items_cost_besides_operators_is_in_the_profile(monkeypatch):
    """Operators of 1 us: calls take 40 us more on cpu:0, 70 us on cpu:1, an item of a stream 20.

    By itself a stream seemed to cost 80 us an item.
    """
    graph = relus(10)
    seconds = np.full((10, 2), 1e-6)
    links = every_link(TWO.device_names, 3e-5, 1e9)
    profile = Profile(TWO.device_names, seconds, 0 * seconds, links, batch_s=8e-5)
    truth, own_s = replace(profile, batch_s=2e-5), np.array([4e-5, 7e-5])

    def run(problem, placement, *counts):
        latency_s, period_s = like(truth)(problem, placement)
        return latency_s + own_s[np.unique(placement)].max(), period_s

    monkeypatch.setattr(calibration, "run_placement", run)
    corrected = calibrated(graph, TWO, profile)
    np.testing.assert_allclose(corrected.overhead_s, own_s, atol=2e-6)
    assert corrected.batch_s == pytest.approx(2e-5, rel=0.15)
    problem = Problem(graph, TWO, corrected, objective="latency")
    both = np.arange(10, dtype=np.int32) % 2
    assert problem.called_s() == problem.overhead_s(0 * both) == corrected.overhead_s[0]
    assert problem.called_s(both) == problem.called_s(0 * both + 1) == corrected.overhead_s[1]
    assert replace(problem, objective="period").called_s(both) == 0.0
    # A plan has it: 10 us of operators and 40 us; no call takes less.
    solution = Solution(0 * both, float(score(problem, 0 * both[None])[0]))
    plan = make_plan(problem, solution, planner="single_device")
    assert plan.predicted.latency_s == plan.predicted.value_s == pytest.approx(5e-5, rel=0.05)
    assert plan.predicted.overhead_s == corrected.overhead_s[0]
    assert corrected.overhead_s[0] < plan.lower_bound_s["latency"] <= plan.predicted.latency_s
    assert plan.fallback.device == "cpu:0" and plan.fallback.value_s == plan.predicted.value_s
    assert not list(plan.inconsistencies())


def test_a_profile_knows_how_far_its_predictions_are_off(monkeypatch, tmp_path):
    """Every second placement takes 1.4x as long, which no cost of transfers explains."""
    graph = relus(60)
    seconds = np.full((60, 2), 1e-4)
    profile = Profile(TWO.device_names, seconds, 0 * seconds, loaded_s=1.5 * seconds)

    def slower(placement, truth):
        times = {3: 1.4, 15: 1.4}.get(int((np.diff(placement) != 0).sum()), 1.0)
        return at_speed(truth, np.array([times, times]))

    monkeypatch.setattr(calibration, "run_placement", like(profile, slower))
    corrected = calibrated(graph, TWO, profile)
    # Two of seven placements: cut at 1, 3, 7 and 15 places, two devices, and replicas.
    assert corrected.error == pytest.approx(2 / 7 * np.log(1.4), abs=0.05)
    assert profile.error == 0.0
    corrected.save(tmp_path / "profile.npz")
    assert Profile.load(tmp_path / "profile.npz").for_cluster(TWO).error == corrected.error
    for nonsense in ("much", -1.0, np.nan, np.inf, None):
        assert replace(profile, provenance={"error": nonsense}).error == 0.0


def test_placements_for_calibration_are_cut_at_few_places_to_a_quarter_of_all():
    placements = pieces(problem_of(relus(60), TWO), calibration.EFFORT.cuts, 20)
    assert (np.diff(placements, axis=1) != 0).sum(axis=1).tolist() == [1, 3, 7, 15]
    assert placements.shape == (4, 60) and placements.dtype == np.int32
