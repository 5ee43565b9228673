"""``agents.foresee``: the kernel computes what the network does, it learns, what ships is used."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from agents import foresee
from agents.encoder import PolicyError
from agents.foresee import RELEASED, WaitsNet, fit, labelled, load_waits, placements
from agents.planner import PolicyPlanner
from placement.planners import load
from placement.problem import Problem
from placement.search.evaluation import two_operators
from placement.search.pipeline import NUM_FEATURES, WAITED, WAITS, Pipeline, constructed
from placement.simulator import score
from placement.workloads import synthetic


def period(name: str, seed: int = 5) -> Problem:
    return synthetic.families()[name](seed)


def random_net(seed: int = 0) -> WaitsNet:
    torch.manual_seed(seed)
    net = WaitsNet(8)
    torch.nn.init.normal_(net.out.weight)
    net.mean, net.spread = torch.randn(NUM_FEATURES), torch.rand(NUM_FEATURES) + 0.5
    return net


@pytest.mark.parametrize("name", ["layered", "towers", "transformer_training"])
def test_the_kernel_foresees_what_the_network_does(name: str) -> None:
    problem, rng = period(name), np.random.default_rng(0)
    for net in (random_net(), WaitsNet()):
        pipeline = Pipeline(problem, 0, net.net())
        for choice in placements(problem, None, rng, 6):
            bound_s, features = pipeline.describe(choice)
            foreseen_s = pipeline.estimate(choice, WAITS * pipeline.bound(choice))
            with torch.no_grad():
                logit = float(net(torch.from_numpy(features[None]).float())[0])
            assert np.log(foreseen_s / bound_s) == pytest.approx(max(0.0, logit), abs=1e-4)
            assert bound_s <= score(problem, choice[problem.graph.group][None])[0] * 1.02
    # Before training it is the rule.
    assert logit == pytest.approx(np.log(max(1.0, features[WAITED])), abs=1e-5)


def test_features_of_a_pipeline_of_two_stages() -> None:
    """Two operators of 1 s on two devices, a tensor of 0 s between them, two in flight."""
    problem = two_operators().with_objective("period")
    pipeline = Pipeline(problem, 0, WaitsNet().net())
    bound_s, features = pipeline.describe(np.array([0, 1], np.int32))
    sent_s = float(problem.link_s_per_byte[0, 1])  # of a byte
    assert bound_s == pytest.approx(1.0)
    window = pipeline.room.window
    path = (2 + sent_s) / window
    expected = [1, 0, 1, sent_s, path, path + WAITS / window, path, 1 / window, 1 / window]
    expected += [np.log1p(0.5), sent_s / 2, 1, np.log(2), np.log(window)]
    assert features == pytest.approx(expected)


@pytest.mark.parametrize("trained", [False, True])
def test_walks_drop_only_moves_that_they_would_refuse(trained: bool) -> None:
    net = load_waits(RELEASED)[0].net() if trained else None
    for name in ("layered", "towers", "transformer_training"):
        problem = period(name, 3)
        start = np.zeros(problem.graph.num_groups, np.int32)
        quick, whole = Pipeline(problem, 0, net), Pipeline(problem, 0, net)
        whole.room.group_s[:] = 0.0  # operators alone never cost too much
        whole.room.memory_binds = True  # bytes are counted, although they do not matter
        assert problem.memory_may_bind == (name == "transformer_training")
        walked = quick.walk(start, 0.0, 2, 256)
        assert np.array_equal(walked, whole.walk(start, 0.0, 2, 256))
        assert not np.array_equal(walked, start)
        device = quick.state.device[problem.graph.group]
        seconds = problem.loaded_s[np.arange(problem.num_ops), device]
        work = np.bincount(device, seconds, problem.num_devices)
        assert np.allclose(quick.room.work, work, 1e-9)


def test_it_learns_what_a_rule_gets_wrong() -> None:
    rng, rows = np.random.default_rng(0), []
    for name in ("layered", "inception", "chain_with_skips", "transformer_training"):
        problem = period(name)
        pipeline = Pipeline(problem, 0, WaitsNet().net())
        rows.append(labelled(problem, placements(problem, None, rng), pipeline))
    features, target = map(torch.from_numpy, map(np.concatenate, zip(*rows, strict=True)))
    features, target = features.float(), target.float()

    def error(net: WaitsNet) -> float:
        with torch.no_grad():
            return (net(features).clamp(min=0) - target).abs().mean().item()

    assert error(fit(rows, 0, hidden=16)) < 0.7 * error(WaitsNet())


def test_a_file_is_read_as_it_was_written_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "waits.safetensors"
    net = random_net()
    net.save(path, {"seed": 3})
    read, card = load_waits(path)
    assert card == {"seed": 3}
    assert all(torch.equal(x, y) for x, y in zip(net.parameters(), read.parameters(), strict=True))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(PolicyError, match="no network that foresees waits"):
        PolicyPlanner(foresight=path)
    net.out.bias.data[:] = np.nan
    net.save(path, {})
    with pytest.raises(PolicyError, match="is no number, or above"):
        load_waits(path)


def test_training_says_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresee, "_PLACEMENTS", 6)
    path = tmp_path / "trained.safetensors"
    foresee.main(["--rounds", "2", "--problems", "2", "--seed", "1", "--out", str(path)])
    card = load_waits(path)[1]
    assert (card["seed"], card["problems"]) == (1, 4) and card["placements"] > 8


@pytest.mark.parametrize("evaluations", [1, 3])
def test_few_evaluations_of_a_pipeline_are_what_is_foreseen(evaluations: int) -> None:
    gains = []
    for name in ("butterfly", "towers", "layered"):
        problem = period(name, 7)
        answer = PolicyPlanner(evaluations=evaluations)(problem)
        assert answer.stats["evaluations"] == evaluations
        assert answer.stats["network"] == RELEASED.name
        net = load_waits(RELEASED)[0].net()
        first = np.array(list(islice(constructed(problem, net), evaluations)))
        assert len(np.unique(first, axis=0)) == evaluations
        values = score(problem, first[:, problem.graph.group])
        assert answer.value_s == min(values) and answer.stats["greedy_value_s"] == values[0]
        gains.append(answer.value_s / load("contiguous_dp")(problem).value_s)
        hand = PolicyPlanner(evaluations=evaluations, foresight="untrained")(problem)
        assert hand.stats["network"] == "none"
    assert np.exp(np.mean(np.log(gains))) < 0.95


def test_what_ships_says_where_it_comes_from() -> None:
    card = load_waits(RELEASED)[1]
    text = RELEASED.with_suffix(".md").read_text(encoding="utf-8")
    assert RELEASED.stat().st_size < 1e5 and text.startswith(f"# {RELEASED.stem}\n")
    assert f"{card['placements']:,} placements" in text and f"seed {card['seed']}" in text
    assert all(word in text for word in ("agents.foresee", "Held out", "Limits"))
