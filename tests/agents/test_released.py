"""The policies that ship: they load, are small, say where they come from, and are the default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agents
from agents.dispatch import DispatchConfig
from agents.planner import RELEASED, PolicyPlanner
from agents.trained import TrainedPolicy
from placement.workloads import synthetic
from placement.workloads.synthetic import giph

FILES = sorted(Path(agents.__file__).with_name("released").glob("*-latency.safetensors"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_what_ships(path: Path) -> None:
    assert path.stat().st_size < 5e6
    policy = TrainedPolicy.load(path)
    kind, _, objective = path.stem.partition("-")
    assert policy.formulation == kind
    config: Any = policy.card["config"]
    assert {p["objective"] for p in policy.card["problems"]} == {objective}
    card = path.with_suffix(".md").read_text(encoding="utf-8")
    assert card.startswith(f"# {path.stem}\n")
    assert f"{policy.card['steps']:,} steps" in card and f"seed {config['seed']}" in card
    assert all(word in card for word in ("placement-train", "Held out", "Limits"))


def test_latency_is_planned_with_the_released_policy() -> None:
    problem = giph(0).with_objective("latency")
    planner = PolicyPlanner(evaluations=200, baseline="round_robin")
    stats = planner(problem).stats
    assert stats["policy"] == stats["network"] == "dispatch-latency.safetensors"
    assert stats["search"] == "macro_search"  # devices run what arrives first: no order to search
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
