"""The policies that ship: they load, are small, say where they come from, and are the default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import agents
from agents.planner import PolicyPlanner, released
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


def test_latency_is_planned_with_the_released_policies() -> None:
    assert {released(k, "latency") for k in ("guided_search", "order_search")} < set(FILES)
    problem = giph(0).with_objective("latency")
    planner = PolicyPlanner(evaluations=200, baseline="round_robin")
    assert planner(problem).stats["policy"] == "guided_search-latency.safetensors"
    # Where orders can be searched there is one for them.
    orders = planner(synthetic.families()["layered"](900).with_objective("latency")).stats
    assert orders["policy"] == "order_search-latency.safetensors"
    # So it is with the one that constructs placements.
    several = PolicyPlanner(mode="best_of_k", k=4, baseline="round_robin")(problem)
    assert several.stats["policy"] == "dispatch-latency.safetensors"
    assert several.value_s <= several.stats["baseline_value_s"]
    # Nothing ships for this objective: the hand-written score chooses, and that is said.
    stats = planner(problem.with_objective("max_load")).stats
    assert (stats["policy"], stats["chooser"], stats["network"]) == ("none", "hand", "none")
    assert orders["network"] == "dispatch-latency.safetensors, order_search-latency.safetensors"
