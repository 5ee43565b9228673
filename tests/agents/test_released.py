"""The policies that ship: they load, are small, say where they come from, and are the default."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.dispatch import DispatchConfig
from agents.encoder import PolicyError
from agents.planner import RELEASED, PolicyPlanner
from agents.trained import TrainedPolicy, file_of, released, untrained_net
from experiments.learned import gnn
from experiments.learned.folds import DATASET, RulesThenDecodes, measured
from placement.planners import load
from placement.workloads import synthetic
from placement.workloads.synthetic import giph

FORMULATIONS = {"dispatch": "dispatch", "gnn": "sequential"}


@pytest.mark.parametrize("name", released())
def test_what_ships(name: str) -> None:
    path = file_of(name)
    assert path.stat().st_size < 5e6
    policy = TrainedPolicy.load(name)
    kind, _, objective = name.partition("-")
    assert policy.formulation == FORMULATIONS[kind]
    config: Any = policy.card["config"]
    assert {p["objective"] for p in policy.card["problems"]} == {objective}
    card = path.with_suffix(".md").read_text(encoding="utf-8")
    assert card.startswith(f"# {name}\n")
    assert f"{policy.card['steps']:,} steps" in card and f"seed {config['seed']}" in card
    assert all(word in card for word in ("Command: `", "Held out", "Limits"))


def test_policies_are_called_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert released() == ["dispatch-latency", "gnn-latency", "gnn-period"]
    problem = giph(0).with_objective("period")
    for name in ("gnn-period", "gnn-period.safetensors"):
        stats = load("policy", policy=name, k=2, search=False)(problem).stats
        assert stats["policy"] == stats["network"] == "gnn-period.safetensors"
    for wrong in ("gnn-latncy", "waits-period"):  # that one is no policy
        with pytest.raises(PolicyError, match=f"{wrong}.*those are dispatch-latency, gnn-latency"):
            load("policy", policy=wrong)
    with pytest.raises(PolicyError, match="did you mean 'gnn-latency'"):
        TrainedPolicy.load("gnn-latncy")
    monkeypatch.chdir(tmp_path)  # a file is meant before what ships
    TrainedPolicy(untrained_net(None, "one_shot")).save("gnn-period")
    assert TrainedPolicy.load("gnn-period").formulation == "one_shot"


@pytest.mark.parametrize("objective", gnn.OBJECTIVES)
def test_a_gnn_does_what_its_card_says_on_graphs_of_other_architectures(objective: str) -> None:
    """20 graphs of the fold that its training never saw, beside itself untrained."""
    mine = [r for r in gnn.STUDY.read() if gnn.unit_of(r) == gnn.Unit(objective)]
    rows = [r for r in mine if r.machine == gnn.FOUR]
    names = list(dict.fromkeys(r.problem for r in rows))[:20]
    committed = {(r.problem, r.arm): r.few_s for r in rows}
    arms = {
        gnn.TRAINED: TrainedPolicy.load(f"gnn-{objective}"),
        gnn.UNTRAINED: TrainedPolicy(untrained_net(gnn.PPO_NETWORK, "sequential")),
    }
    values: dict[str, list[float]] = {arm: [] for arm in arms}
    for name in names:
        problem = measured(DATASET / f"{name}.json.gz", objective)
        start = RulesThenDecodes()(problem)
        for arm, policy in arms.items():
            value_s = gnn.few(policy, problem, start).value_s
            assert value_s <= start.value_s  # of rules
            values[arm].append(value_s)
    trained, before = (np.log(values[arm]) for arm in arms)
    assert np.mean(trained - before) < 0.0
    for arm, logs in zip(arms, (trained, before), strict=True):  # samples may differ by rounding
        known = np.mean([np.log(committed[n, arm]) for n in names])
        assert np.mean(logs) == pytest.approx(known, abs=2e-3)


def test_latency_is_planned_with_the_released_policy() -> None:
    problem = giph(0).with_objective("latency")
    planner = PolicyPlanner(evaluations=200, baseline="round_robin")
    orders = planner(synthetic.families()["layered"](900).with_objective("latency")).stats
    assert orders["search"] == "order_search"
    several = PolicyPlanner(k=4, search=False, baseline="round_robin")(problem)
    assert several.stats["policy"] == "dispatch-latency.safetensors"
    assert several.value_s <= several.stats["baseline_value_s"]
    # Nothing ships for this objective, and that is said.
    stats = planner(problem.with_objective("max_load")).stats
    assert (stats["policy"], stats["network"], stats["search"]) == ("none", "none", "macro_search")


def test_a_network_says_of_itself_what_it_is() -> None:
    net = TrainedPolicy.load(RELEASED).net
    assert net.config == DispatchConfig(scorer=64, finish_weight=4.0)
