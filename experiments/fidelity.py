"""How well predicted time agrees with measured time on the devices of this machine.

    python -m experiments.fidelity [WORKLOAD ...] [--placements 20] [--rounds 3]

For every workload, single-device, planned and random placements run for real in interleaved
rounds (so that drift falls on all alike): latency with one micro-batch at a time, period in a
pipeline. Profiles are taken before and after every round. The medians are compared with the
simulator.
Writes ``experiments/results/fidelity.csv`` and ``fidelity.md``.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from placement import planners
from placement.cluster import Cluster
from placement.compare import mape, spearman
from placement.executor import Executor
from placement.files import write_atomic
from placement.measure import measure, provenance
from placement.problem import Placement, Problem
from placement.profile import Profile
from placement.program import capture
from placement.simulator import simulate
from placement.workloads import load

WORKLOADS = ("resnet50", "bert_base", "vit", "lstm", "inception", "bert_tiny_hidden128")
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One placement: predicted and measured seconds."""

    workload: str
    placement: str
    predicted_latency_s: float
    measured_latency_s: float
    predicted_period_s: float
    measured_period_s: float


def candidates(problem: Problem, count: int) -> dict[str, Placement]:
    """Planned placements first, then random ones (a share of the groups on each device)."""
    found: dict[str, Placement] = {}
    for d, name in enumerate(problem.cluster.device_names):
        found[name] = np.full(problem.num_ops, d, np.int32)
    for name in ("round_robin", "heft", "contiguous_dp"):
        for objective in ("period", "latency"):
            answer = planners.load(name)(problem.with_objective(objective))
            found[f"{name}/{objective}"] = answer.placement
    rng = np.random.default_rng(0)
    for i in range(count - len(found)):
        # Every third is a random cut in operator order, the others scatter the operators.
        share = rng.dirichlet(np.ones(problem.num_devices))
        groups = rng.choice(problem.num_devices, problem.graph.num_groups, p=share)
        if i % 3 == 0:
            groups = np.sort(groups)
        found[f"random {i}"] = groups[problem.graph.group].astype(np.int32)
    return found


def study(workload: str, count: int, rounds: int, repeats: int) -> list[Row]:
    """Predicted and measured times of ``count`` placements of one workload."""
    module, inputs = load(workload)
    graph = capture(module, inputs, name=workload)
    cluster = Cluster.detect()
    print(f"{workload}: {graph.num_ops} operators; measuring", file=sys.stderr, flush=True)
    profiles = [measure(graph, cluster, repeats=repeats)]
    problem = Problem(graph, cluster, profiles[0], num_microbatches=16)
    placements = candidates(problem, count)
    executor = Executor(problem)
    latency: dict[str, list[float]] = {name: [] for name in placements}
    period: dict[str, list[float]] = {name: [] for name in placements}
    for r in range(rounds):
        for name, placement in placements.items():
            alone = executor.run(placement, num_microbatches=4, max_in_flight=1)
            latency[name].append(float(np.median(alone.span_s)))
            period[name].append(executor.run(placement).period_s)
        # The machine drifts by 10 % and more within minutes: profile as often as we run.
        profiles.append(measure(graph, cluster, repeats=repeats))
        print(f"{workload}: round {r + 1} of {rounds}", file=sys.stderr, flush=True)
    problem = replace(problem, profile=merged(profiles))
    return [
        Row(
            workload,
            name,
            simulate(problem, placement, num_microbatches=1).latency_s,
            float(np.median(latency[name])),
            simulate(problem, placement).period_s,
            float(np.median(period[name])),
        )
        for name, placement in placements.items()
    ]


def merged(profiles: list[Profile]) -> Profile:
    """Medians over several profiles of the same graph and cluster."""
    compute = np.median([p.compute_s for p in profiles], axis=0)
    loaded = [p.loaded_s for p in profiles if p.loaded_s is not None]
    return replace(
        profiles[-1],
        compute_s=compute,
        loaded_s=np.median(loaded, axis=0) if loaded else None,
    )


def summary(rows: list[Row]) -> str:
    """Markdown: error and rank correlation per workload and over all."""
    lines = [
        "| workload | placements | latency MAPE % | Spearman | period MAPE % | Spearman |",
        "|---|---|---|---|---|---|",
    ]
    for workload in [*dict.fromkeys(r.workload for r in rows), "all"]:
        chosen = [r for r in rows if workload in (r.workload, "all")]
        cells = [workload, str(len(chosen))]
        for what in ("latency", "period"):
            predicted = [getattr(r, f"predicted_{what}_s") for r in chosen]
            measured = [getattr(r, f"measured_{what}_s") for r in chosen]
            cells += [
                f"{100 * mape(predicted, measured):.1f}",
                f"{spearman(predicted, measured):.3f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=WORKLOADS)
    parser.add_argument("--placements", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[Row] = []
    for workload in options.workloads or WORKLOADS:
        rows += study(workload, options.placements, options.rounds, options.repeats)
        # Written after every workload: an interrupted study keeps what it has.
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(vars(r) for r in rows)
        write_atomic(RESULTS / "fidelity.csv", text.getvalue())
        facts = "\n".join(f"- {k}: {v}" for k, v in provenance(rounds=options.rounds).items())
        command = "python -m experiments.fidelity " + " ".join(options.workloads)
        write_atomic(
            RESULTS / "fidelity.md",
            f"# Predicted against measured\n\n`{command.strip()}`\n\n{summary(rows)}\n{facts}\n",
        )
    print(summary(rows))


if __name__ == "__main__":
    main()
