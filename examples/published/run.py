"""Train one of the published methods of this folder on drawn graphs, and say what it reaches.

    python examples/published/run.py gdp --steps 20000 --out gdp.safetensors
    python -m placement plan resnet50 --planner policy policy=gdp.safetensors

In this folder, a policy of a method with a formulation of its own plans with
``allow=giph:formulation``, and Post's with ``--planner post:GroupPlanner``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from agents.trained import TrainedPolicy
from agents.training import train
from placement.planners import load
from placement.problem import Problem
from placement.workloads.synthetic import families

METHODS = ("placeto", "gdp", "hdp", "hsdag", "giph", "post", "doppler")
# Their authors' simulators: links carry any number of tensors, what arrives first runs first.
OF_THEIR_AUTHORS: dict[str, dict[str, Any]] = {
    name: {"contention": False, "ready_order": "arrival"} for name in ("giph", "doppler")
}


def learn(method: str, problems: Sequence[Problem], **changes: Any) -> TrainedPolicy:
    """A policy of the method, trained on ``problems``; ``changes`` are fields of its ``CONFIG``."""
    module = import_module(method)
    prepared = getattr(module, "prepared", lambda problem: problem)
    chosen = [prepared(problem) for problem in problems]
    solutions = [module.taught(p) for p in chosen] if hasattr(module, "taught") else None
    start = {"baseline": load("single_device"), "solutions": solutions}
    return train(chosen, config=replace(module.CONFIG, **changes), **start)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--steps", type=int, default=20_000, help="environment steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    drawn = [families()[name](0) for name in ("layered", "inception", "fork_join")]
    rules = OF_THEIR_AUTHORS.get(args.method, {})
    problems = [replace(p, objective="latency", **rules) for p in drawn]
    policy = learn(args.method, problems, total_steps=args.steps, seed=args.seed)
    for problem, best in zip(problems, policy.best, strict=True):
        single_s = load("single_device")(problem).value_s
        print(f"{problem.graph.name}: {single_s / best.value_s:.3f}x over the best single device")
    print(f"greedily {policy.card['greedy_speedup']:.3f}x on average")
    if args.out is not None:
        policy.save(args.out)


if __name__ == "__main__":
    main()
